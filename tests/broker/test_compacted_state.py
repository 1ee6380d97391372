"""__consumer_offsets and __transaction_state of a running broker: compacted by its cleaner, as
Kafka's are, and all there after a start, however the broker ended."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient

import kdirect
from kdirect.broker.cleaner import CHECKPOINT
from kdirect.broker.state_topic import FOR_EVER
from kdirect.broker.topics import OFFSETS_TOPIC, TRANSACTIONS_TOPIC
from kdirect.errors import KdirectError
from kdirect.format.group_records import CommittedOffset, GroupRecord
from kdirect.log.checkpoint import read_offsets
from kdirect.model import TopicPartition
from kdirect.wire.connection import Connection
from tests.broker.slot_rig import connect, fetched, tcp_commit
from tests.support import BrokerProcess, alter_topic, wait_until

QUICK = {
    "log.cleaner.backoff.ms": "20",
    "log.cleaner.min.cleanable.ratio": "0.1",
    "transaction.state.log.num.partitions": "1",
}
SMALL = 16384
LOG = TopicPartition(OFFSETS_TOPIC, 0)
PLACES = [TopicPartition("t", i) for i in range(3)]


def begin(server: BrokerProcess) -> Connection:
    """The topic, and the one of offsets with small segments."""
    with kdirect.connect({"bootstrap.servers": server.bootstrap_servers}) as session:
        session.admin.create_topic("t", len(PLACES))
    connection = connect(server.bootstrap_servers)
    assert tcp_commit(connection, "first", {PLACES[0]: 1}, -1, "") == [0]
    alter_topic(server.bootstrap_servers, OFFSETS_TOPIC, segment_bytes=SMALL)
    return connection


def commit_some(
    connection: Connection,
    rng: random.Random,
    count: int,
    known: dict[str, dict[TopicPartition, int]],
) -> None:
    for _ in range(count):
        group, tp = f"g{rng.randrange(5)}", rng.choice(PLACES)
        offset = rng.randrange(1 << 40)
        # What is not answered may count, or not: the next commit of it says.
        assert tcp_commit(connection, group, {tp: offset}, -1, "") == [0]
        known.setdefault(group, {})[tp] = offset


def check(servers: str, known: dict[str, dict[TopicPartition, int]]) -> None:
    connection = connect(servers)
    assert {group: fetched(connection, group) for group in known} == known
    connection.close()


def cleaned_to(directory: Path, tp: TopicPartition = LOG) -> int:
    return int(read_offsets(directory / CHECKPOINT).get(tp, 0))


def size_of(directory: Path, tp: TopicPartition = LOG) -> int:
    """Bytes of sealed segments."""
    *sealed, _ = sorted((directory / f"{tp.topic}-{tp.partition}").glob("*.log"))
    return sum(path.stat().st_size for path in sealed)


def test_the_log_of_groups_shrinks_and_all_of_it_is_loaded(broker_process, seed) -> None:
    server, rng = broker_process(**QUICK), random.Random(seed)
    connection = begin(server)
    known: dict[str, dict[TopicPartition, int]] = {}
    commit_some(connection, rng, 1500, known)
    wait_until(lambda: cleaned_to(server.log_dir) > 1000, "it was compacted")
    wait_until(lambda: size_of(server.log_dir) < 4 * SMALL, "it has shrunk")
    admin = AdminClient({"bootstrap.servers": server.bootstrap_servers})
    admin.delete_consumer_groups(["g0"])["g0"].result(10)
    assert fetched(connection, "g0") == {}
    del known["g0"]
    commit_some(connection, rng, 300, known)
    connection.close()
    for end in (server.stop, server.kill):
        check(server.bootstrap_servers, known)
        end()
        server.start()
    check(server.bootstrap_servers, known)


@pytest.mark.parametrize("step", ["cleaned files are written:3", "swap files are named:2",
                                  "old segments are gone:2", "a group is done:4"])  # fmt: skip
def test_a_broker_is_killed_while_it_compacts_what_groups_have_committed(
    broker_process, monkeypatch, seed, step
) -> None:
    server, rng = broker_process(**QUICK), random.Random(seed)
    connection = begin(server)
    known: dict[str, dict[TopicPartition, int]] = {}
    commit_some(connection, rng, 200, known)
    connection.close()
    server.stop()
    monkeypatch.setenv("KDIRECT_FAILPOINT", f"compaction, {step}")
    server.start()
    monkeypatch.delenv("KDIRECT_FAILPOINT")
    connection = connect(server.bootstrap_servers)
    unanswered = None
    try:
        while True:
            group, tp, offset = f"g{rng.randrange(5)}", rng.choice(PLACES), rng.randrange(1 << 40)
            unanswered = group, tp, offset
            assert tcp_commit(connection, group, {tp: offset}, -1, "") == [0]
            known.setdefault(group, {})[tp] = offset
    except (KdirectError, OSError):
        pass
    connection.close()
    server.kill()
    server.start()
    connection = connect(server.bootstrap_servers)
    group, tp, offset = unanswered
    if fetched(connection, group).get(tp) == offset:  # nobody was told
        known.setdefault(group, {})[tp] = offset
    connection.close()
    check(server.bootstrap_servers, known)
    before = cleaned_to(server.log_dir)
    connection = connect(server.bootstrap_servers)
    commit_some(connection, rng, 300, known)
    connection.close()
    wait_until(lambda: cleaned_to(server.log_dir) > before, "it goes on")
    check(server.bootstrap_servers, known)
    place = server.log_dir / f"{OFFSETS_TOPIC}-0"
    # One that is there now may be of a compaction under way.
    wait_until(lambda: not list(place.glob("*.swap")), "the end of every exchange")


def test_transactions_go_on_over_a_compacted_state(broker_process) -> None:
    """The state of transactional ids and the offsets that they commit, with aborted ones between
    and one that is open all the while."""
    server = broker_process(**QUICK)
    servers = server.bootstrap_servers
    connection = begin(server)
    tp = TopicPartition(TRANSACTIONS_TOPIC, 0)

    def producer(name: str) -> Any:
        made = confluent_kafka.Producer(
            {"bootstrap.servers": servers, "transactional.id": name, "log_level": 0}
        )
        made.init_transactions(20)
        return made

    def commit(made: Any, group: str, offset: int) -> None:
        member = confluent_kafka.Consumer({"bootstrap.servers": servers, "group.id": group})
        made.send_offsets_to_transaction(
            [confluent_kafka.TopicPartition("t", 0, offset)], member.consumer_group_metadata(), 20
        )
        member.close()

    made = producer("x")
    alter_topic(servers, TRANSACTIONS_TOPIC, segment_bytes=SMALL)
    for i in range(150):
        made.begin_transaction()
        commit(made, "g", i)
        made.abort_transaction(20) if i % 3 == 2 else made.commit_transaction(20)
    other = producer("y")
    other.begin_transaction()
    commit(other, "open", 7)
    for i in range(150, 200):
        made.begin_transaction()
        commit(made, "g", i)
        made.commit_transaction(20)
    wait_until(lambda: cleaned_to(server.log_dir, tp) > 200, "the ids were compacted")
    wait_until(lambda: cleaned_to(server.log_dir) > 100, "the offsets were compacted")
    assert fetched(connection, "g") == {PLACES[0]: 199}
    connection.close()
    server.kill()
    server.start()
    check(servers, {"g": {PLACES[0]: 199}})
    other.commit_transaction(30)
    made = producer("x")  # librdkafka does not ask again where the group's coordinator was
    made.begin_transaction()
    commit(made, "g", 300)
    made.commit_transaction(30)
    connection = connect(servers)
    wait_until(lambda: fetched(connection, "g") == {PLACES[0]: 300}, "the marker")
    wait_until(lambda: fetched(connection, "open") == {PLACES[0]: 7}, "the other marker")
    connection.close()


def test_the_properties_are_those_that_kafka_gives_them(broker: Any) -> None:
    """What Kafka 4.1 answers, but for two: min.insync.replicas, as one broker has no replicas, and
    max.message.bytes of the states of transactions, as a batch of attempts commits at once."""
    with kdirect.connect({"bootstrap.servers": broker.bootstrap_servers}) as session:
        session.admin.create_topic("t", 1)
        with session.producer(transactional_id="x") as producer:
            producer.init_transactions(20)
        connection = connect(broker.bootstrap_servers)
        assert tcp_commit(connection, "g", {PLACES[0]: 1}, -1, "") == [0]
        connection.close()
        set_here = {
            name: {
                n: e.value
                for n, e in session.admin.describe_configs(name).items()
                if not e.is_default
            }
            for name in (OFFSETS_TOPIC, TRANSACTIONS_TOPIC)
        }
    assert set_here == {
        OFFSETS_TOPIC: {
            "cleanup.policy": "compact",
            "compression.type": "producer",
            "segment.bytes": "104857600",
        },
        TRANSACTIONS_TOPIC: {
            "cleanup.policy": "compact",
            "compression.type": "uncompressed",
            "max.message.bytes": "16777216",
            "segment.bytes": "104857600",
            "unclean.leader.election.enable": "false",
        },
    }


def test_a_log_that_an_older_broker_has_rewritten(
    tmp_path: Path, on_loop: Callable[..., Any]
) -> None:
    """It begins above 0, in the middle of a segment, and its topic has the properties that it was
    made with.  It is loaded, and compacted from then on."""
    properties = {**QUICK, "log.cleaner.enable": "false"}
    with kdirect.Broker(tmp_path, properties=properties) as b:
        b.server.topics.create("t", 3, {})
        store = b.server.offsets
        old = {**FOR_EVER, "segment.bytes": str(4 << 20)}
        on_loop(b, lambda: store.commit("gone", {PLACES[0]: CommittedOffset(1, -1, "", 1)}))
        b.server.topics.configure(b.server.topics.get(OFFSETS_TOPIC), old)
        partition = store.partition_of("g")
        for i in range(300):
            on_loop(
                b, lambda i=i: store.commit("g", {PLACES[i % 3]: CommittedOffset(i, -1, "", 1)})
            )
            if i % 100 == 50:
                partition.roll()
        on_loop(b, lambda: store.save_group("g", GroupRecord("consumer", 5, "range", None, 1, ())))
        partition.delete_records(200)
    expected = {tp: 297 + tp.partition for tp in PLACES}
    for _ in range(2):
        with kdirect.Broker(tmp_path, properties=QUICK) as b:
            topic = b.server.topics.get(OFFSETS_TOPIC)
            assert topic.configs == {
                "cleanup.policy": "compact",
                "compression.type": "producer",
                "segment.bytes": "104857600",
            }
            store = b.server.offsets
            assert store.groups() == {"g"}
            assert {tp: c.offset for tp, c in store.offsets("g").items()} == expected
            assert b.server.groups.coordinator.groups["g"].generation == 5
            partition = store.partition_of("g")
            assert partition.log_start_offset == 200
            partition.roll()
            end = partition.log_end_offset
            wait_until(lambda e=end: cleaned_to(tmp_path) == e, "it was compacted")
            last = {PLACES[0]: CommittedOffset(297, -1, "", 1)}
            on_loop(b, lambda s=store, o=last: s.commit("g", o))
