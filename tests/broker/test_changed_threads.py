"""Properties of the cleaner and numbers of threads that change while the broker runs, by stock
clients: they count at once, are shown, and outlive a restart."""

from __future__ import annotations

import threading

import pytest
from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourceType,
)

import kdirect
from kdirect.broker.config import BrokerConfig
from kdirect.errors import ConfigError
from kdirect.option_table import config_text
from kdirect.storage.reader_threads import ReaderThreads
from tests.support import wait_until

HOUR_MS = 3_600_000
INVALID_REQUEST = 42
WITHOUT_EFFECT = {
    "background.threads": 10,
    "num.io.threads": 8,
    "num.network.threads": 3,
    "num.recovery.threads.per.data.dir": 2,
    "num.replica.fetchers": 1,
}
OF_TIERS = {
    "remote.log.manager.copier.thread.pool.size": 10,
    "remote.log.manager.expiration.thread.pool.size": 10,
    "remote.log.reader.threads": 10,
}


def admin_of(servers: str) -> AdminClient:
    return AdminClient({"bootstrap.servers": servers})


def change(client: AdminClient, name: str, value: str | None) -> int:
    """IncrementalAlterConfigs, None deletes; the code of the answer."""
    operation = AlterConfigOpType.DELETE if value is None else AlterConfigOpType.SET
    entry = ConfigEntry(name, value or "", incremental_operation=operation)
    resource = ConfigResource(ResourceType.BROKER, "1", incremental_configs=[entry])
    (future,) = client.incremental_alter_configs([resource]).values()
    try:
        future.result(30)
    except KafkaException as e:
        return e.args[0].code()
    return 0


def shown(client: AdminClient, name: str) -> tuple[str, bool]:
    """The value of a property, and whether it can change."""
    (future,) = client.describe_configs([ConfigResource(ResourceType.BROKER, "1")]).values()
    entry = future.result(30)[name]
    return entry.value, not entry.is_read_only


def dirty(client: AdminClient, servers: str, topic: str) -> None:
    """A topic whose sealed segments are all dirty, and enough for a cleaning."""
    configs = {"cleanup.policy": "compact", "segment.bytes": "16384"}
    (made,) = client.create_topics([NewTopic(topic, 1, 1, config=configs)]).values()
    made.result(30)
    write_more(servers, topic)


def write_more(servers: str, topic: str) -> None:
    producer = Producer({"bootstrap.servers": servers, "batch.size": 4096})
    for i in range(1000):
        producer.produce(topic, bytes(100), key=b"%d" % (i % 10))
    assert producer.flush(30) == 0


def runs(broker: kdirect.Broker) -> int:
    return broker.server.cleaner.statistics()["cleaner_runs"]


def cleaners() -> int:
    return sum(t.name.startswith("kdirect-cleaner-") for t in threading.enumerate())


@pytest.mark.parametrize("whole", [False, True])
def test_a_shorter_pause_wakes_the_cleaner(tmp_path, whole) -> None:
    """`log.cleaner.backoff.ms` by both requests, as sarama's tests set it too.  The cleaner has
    begun a pause of an hour before."""
    with kdirect.Broker(log_dirs=tmp_path, log_cleaner_backoff_ms=HOUR_MS) as b:
        client = admin_of(b.bootstrap_servers)
        wait_until(lambda: b.server.cleaner._woken._waiters)
        dirty(client, b.bootstrap_servers, "t")
        assert runs(b) == 0
        if whole:
            resource = ConfigResource(
                ResourceType.BROKER, "1", set_config={"log.cleaner.backoff.ms": "20"}
            )
            (future,) = client.alter_configs([resource]).values()
            future.result(30)
        else:
            assert change(client, "log.cleaner.backoff.ms", "20") == 0
        wait_until(lambda: runs(b) == 1)
        write_more(b.bootstrap_servers, "t")
        wait_until(lambda: runs(b) >= 2)
        assert shown(client, "log.cleaner.backoff.ms") == ("20", True)


def test_a_higher_rate_frees_a_cleaning_that_waits(tmp_path) -> None:
    slow = {"log_cleaner_backoff_ms": 20, "log_cleaner_io_max_bytes_per_second": 1}
    with kdirect.Broker(log_dirs=tmp_path, **slow) as b:
        client = admin_of(b.bootstrap_servers)
        dirty(client, b.bootstrap_servers, "t")
        wait_until(lambda: b.server.cleaner._under_way and b.server.cleaner._woken._waiters)
        assert runs(b) == 0
        assert change(client, "log.cleaner.io.max.bytes.per.second", "1e9") == 0
        wait_until(lambda: runs(b) == 1)


def test_threads_of_the_cleaner_come_and_go(tmp_path) -> None:
    before = cleaners()
    with kdirect.Broker(log_dirs=tmp_path) as b:
        client = admin_of(b.bootstrap_servers)
        for count in (2, 4, 2, 1):
            assert change(client, "log.cleaner.threads", str(count)) == 0
            wait_until(lambda count=count: cleaners() - before == count)
        for refused in ("3", "0", "-1", "many"):
            assert change(client, "log.cleaner.threads", refused) == INVALID_REQUEST
        assert change(client, "log.cleaner.threads", "2") == 0
        assert change(client, "log.cleaner.threads", "4") == 0
        assert change(client, "log.cleaner.threads", None) == INVALID_REQUEST, "from 4 to 1"
        memory = b.server.cleaner._memory()
        assert memory.table_bytes == (128 << 20) // 4 and memory.piece_bytes == (512 << 10) // 4
        assert change(client, "log.cleaner.dedupe.buffer.size", "4194304") == 0
        assert change(client, "log.cleaner.io.buffer.size", "65536") == 0
        assert change(client, "log.cleaner.io.buffer.load.factor", "0.5") == 0
        assert b.server.cleaner._memory() == (1 << 20, 0.5, 16384)
    assert cleaners() == before
    with kdirect.Broker(log_dirs=tmp_path) as b:
        assert cleaners() - before == 4
        assert b.server.cleaner._memory() == (1 << 20, 0.5, 16384)


def test_numbers_without_effect_are_kept_and_shown(tmp_path) -> None:
    with kdirect.Broker(log_dirs=tmp_path) as b:
        client = admin_of(b.bootstrap_servers)
        for name, number in {**WITHOUT_EFFECT, **OF_TIERS}.items():
            assert shown(client, name) == (str(number), True)
            assert change(client, name, str(2 * number + 1)) == INVALID_REQUEST
            assert change(client, name, "0") == INVALID_REQUEST
            assert change(client, name, str(2 * number)) == 0
    with kdirect.Broker(log_dirs=tmp_path) as b:
        client = admin_of(b.bootstrap_servers)
        for name, number in {**WITHOUT_EFFECT, **OF_TIERS}.items():
            assert shown(client, name) == (str(2 * number), True)
            assert change(client, name, None) == 0
            assert shown(client, name) == (str(number), True)


def test_one_change_doubles_or_halves_at_most() -> None:
    config = BrokerConfig({"num.io.threads": "5"})
    for wanted, allowed in ((10, True), (2, True), (5, True), (11, False), (1, False)):
        values = config.changed_by({"num.io.threads": str(wanted)})
        if allowed:
            config.check_threads(values)
        else:
            with pytest.raises(ConfigError, match="cannot change from 5") as e:
                config.check_threads(values)
            assert "2 to 10" in e.value.hint
    config.check_threads(config.changed_by({"message.max.bytes": "4000"}))


def test_a_pool_becomes_larger_and_smaller() -> None:
    """Threads that are one too many go when they have nothing in hand."""
    pool, go = ReaderThreads(2, name="resized"), threading.Event()

    def alive() -> int:
        return sum(t.name == "resized" for t in threading.enumerate())

    begun = threading.Semaphore(0)

    def work() -> None:
        begun.release()
        assert go.wait(30)

    futures = [pool.submit(work) for _ in range(4)]
    for _ in range(2):
        assert begun.acquire(timeout=30)
    pool.resize(4)
    for _ in range(2):
        assert begun.acquire(timeout=30)
    pool.resize(1)
    assert alive() == 4, "each has something in hand"
    go.set()
    for future in futures:
        future.result(30)
    wait_until(lambda: alive() == 1)
    assert pool.submit(lambda: 7).result(30) == 7
    pool.close()
    wait_until(lambda: alive() == 0)


@pytest.mark.parametrize(
    ("number", "text"),
    [(0.9, "0.9"), (0.0, "0.0"), (1e7, "1.0E7"), (1.7976931348623157e308, "1.7976931348623157E308"),
     (0.00012, "1.2E-4"), (123456.5, "123456.5")],
)  # fmt: skip
def test_numbers_are_told_as_java_writes_them(number, text) -> None:
    assert config_text(number) == text
    assert float(text) == number
