"""Tests of the whole system over real verbs: they need a machine with an RDMA device, such as the
guest of `make test-rdma`.

Collected only where KDIRECT_TEST_VERBS=1 is set, which that guest does; elsewhere `make test` says
that they were not run. KDIRECT_TEST_TRANSPORT=shm with it runs what can run over the software RNIC,
to work on the tests themselves.

One broker process serves most tests, each with topics of its own; one that is to be killed is the
test's own (`own_broker`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest

import kdirect
from kdirect.client.session import Session
from kdirect.model import TopicPartition
from kdirect.rdma import verbs_choice
from tests.support import BrokerProcess, wait_until

collect_ignore_glob = (
    [] if os.environ.get("KDIRECT_TEST_VERBS", "0") not in ("", "0") else ["test_*.py"]
)

TRANSPORT = os.environ.get("KDIRECT_TEST_TRANSPORT", "verbs")
WAIT_S = float(
    os.environ.get("KDIRECT_TEST_WAIT_S", "60")
)  # a test that waits this long has failed; the guest is slow
SEGMENT_BYTES = 4 << 20  # registration costs milliseconds a MiB


def rdma_address() -> str:
    """An IPv4 address of this machine's RDMA network."""
    if TRANSPORT != "verbs":
        return "127.0.0.1"
    found = [
        gid.ip
        for port in verbs_choice.devices()
        if port.active
        for gid in port.gids
        if gid.address.ipv4_mapped is not None
    ]
    assert found, f"no RDMA device with an IPv4 address: {verbs_choice.devices()}"
    return found[0]


def start_broker(log_dir: Path, **properties: Any) -> BrokerProcess:
    settings = {
        "rdma.transports": TRANSPORT,
        "log.segment.bytes": SEGMENT_BYTES,
        "rdma.max.in.flight": 256,
        **properties,
    }
    broker = BrokerProcess(log_dir, settings)
    broker.bootstrap_servers = f"{rdma_address()}:0"
    return broker.start()


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """A broker process for all tests; it must be alive, and not have complained, at the end."""
    process = start_broker(tmp_path_factory.mktemp("broker") / "log")
    yield process
    assert process.stop() == 0
    assert "Traceback" not in process.errors.read_text()


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[Callable[..., BrokerProcess]]:
    """``own_broker(**properties)``: a broker that the test may kill."""
    started: list[BrokerProcess] = []

    def start(**properties: Any) -> BrokerProcess:
        started.append(
            start_broker(
                tmp_path / f"log{len(started)}",
                **{k.replace("_", "."): v for k, v in properties.items()},
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()


@pytest.fixture
def connect() -> Iterator[Callable[..., Session]]:
    """``connect(broker, **settings)``: a session over the transport under test, closed after the
    test."""
    opened: list[Session] = []

    def open_session(broker: BrokerProcess, **settings: Any) -> Session:
        given = {"transport": TRANSPORT, **{k.replace("_", "."): v for k, v in settings.items()}}
        opened.append(kdirect.connect({"bootstrap.servers": broker.bootstrap_servers, **given}))
        return opened[-1]

    yield open_session
    for session in opened:
        session.close()


@pytest.fixture
def session(broker: BrokerProcess, connect: Callable[..., Session]) -> Session:
    return connect(broker)


@pytest.fixture
def topic(session: Session, request: pytest.FixtureRequest) -> Callable[..., TopicPartition]:
    """``topic(partitions=1, **configs)``: a new topic; its partition 0."""
    count = 0

    def make(partitions: int = 1, **configs: Any) -> TopicPartition:
        nonlocal count
        count += 1
        name = f"{request.node.name[:80].translate(str.maketrans('[]/ ', '....'))}-{count}"
        session.admin.create_topic(
            name, partitions, configs={k.replace("_", "."): str(v) for k, v in configs.items()}
        )
        return TopicPartition(name, 0)

    return make


@pytest.fixture
def tp(topic: Callable[..., TopicPartition]) -> TopicPartition:
    return topic()


class BrokerLog:
    """What the broker has written to standard error since this was made."""

    def __init__(self, broker: BrokerProcess) -> None:
        self._path = broker.errors
        self._start = self._path.stat().st_size

    @property
    def text(self) -> str:
        return self._path.read_text()[self._start :]

    def wait_for(self, *words: str) -> None:
        """Until one line holds all of these."""
        eventually(
            lambda: any(all(word in line for word in words) for line in self.text.splitlines()),
            lambda: f"the broker's log has no line with {words}:\n{self.text[-2000:]}",
        )


@pytest.fixture
def broker_log(broker: BrokerProcess) -> BrokerLog:
    return BrokerLog(broker)


class Bystander:
    """A producer with exclusive access and a consumer that follows it, on a partition of their own:
    what others do must not matter."""

    def __init__(self, session: Session, tp: TopicPartition) -> None:
        self._tp = tp
        self._count = 0
        self._producer = session.producer()
        self._consumer = kdirect.Consumer(dict(session.settings), session=session)
        self._consumer.assign({tp: 0})
        self.works()

    def works(self, rounds: int = 5) -> None:
        """Records go through, over RDMA, and nothing had to be opened again."""
        for _ in range(rounds):
            value = b"bystander %d" % self._count
            assert self._producer.produce_sync(self._tp.topic, value, partition=0) == self._count
            record = self._consumer.poll(WAIT_S)
            assert record is not None and (record.offset(), record.value()) == (self._count, value)
            self._count += 1
        assert self._producer.statistics() == {
            **self._producer.statistics(),
            "rdma_records": self._count,
        }

    def close(self) -> None:
        self._consumer.close()
        self._producer.close()


@pytest.fixture
def bystander(
    broker: BrokerProcess, connect: Callable[..., Session], topic: Callable[..., TopicPartition]
) -> Iterator[Bystander]:
    other = Bystander(connect(broker, client_id="bystander"), topic())
    yield other
    other.close()


# The condition's value as soon as it is true.
eventually = partial(wait_until, timeout_s=WAIT_S)


def values_of(
    session: Session, tp: TopicPartition, start: int = 0, stop: int | None = None
) -> list[bytes]:
    """The values of [start, stop) by a reader of the session."""
    reader = session.reader(tp, start, session.latest_offsets([tp])[tp] if stop is None else stop)
    with reader:
        return [value for batch in reader.batches() for value in batch.column("value").to_pylist()]


def kafka_values(broker: BrokerProcess, tp: TopicPartition, count: int) -> list[bytes]:
    """What a stock Kafka client reads of the first `count` records."""
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": broker.bootstrap_servers, "group.id": "check"}
    )
    consumer.assign([confluent_kafka.TopicPartition(tp.topic, tp.partition, 0)])
    out: list[bytes] = []
    deadline = time.monotonic() + WAIT_S
    while len(out) < count and time.monotonic() < deadline:
        for message in consumer.consume(1000, 1.0):
            assert message.error() is None, message.error()
            assert message.offset() == len(out)
            out.append(message.value())
    consumer.close()
    return out


class Child:
    """Another Python process that runs `code` with sys.argv[1:] = arguments; its lines arrive in
    `lines`."""

    def __init__(self, code: str, *arguments: str) -> None:
        command = [sys.executable, "-c", code, *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.endswith("\n"):  # a line cut short by a kill says nothing
                self.lines.append(line.rstrip("\n"))

    def wait_for_lines(self, count: int) -> None:
        eventually(lambda: len(self.lines) >= count or self.process.poll() is not None)
        assert len(self.lines) >= count, (
            f"the child ended ({self.process.poll()}) after {self.lines[-5:]}"
        )

    def kill(self) -> list[str]:
        """SIGKILL; every whole line it wrote."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)
        self._reader.join(30)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return self.lines


@pytest.fixture
def child() -> Iterator[Callable[..., Child]]:
    """``child(code, *arguments)`` starts one; those that still run are killed after the test."""
    started: list[Child] = []

    def start(code: str, *arguments: str) -> Child:
        started.append(Child(code, *arguments))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.kill()
