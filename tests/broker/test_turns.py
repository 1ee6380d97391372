"""No client's work takes the event loop for itself: what a turn leaves goes on when the loop comes
round.

A turn is made so short here that it ends after one piece of work; a callback that the loop runs
once each time it comes round says how many pieces there were since the last time."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kdirect
from kdirect.broker import connection, files, two_sided
from kdirect.broker.answers import Answer, later
from kdirect.format import protocol as p
from kdirect.format.schema import build

pytestmark = pytest.mark.timeout(120)

AT_ONCE = 20


class Rounds:
    """How much happens while the event loop comes round once: `count` notes one piece, `most` is
    the largest number of them."""

    def __init__(self) -> None:
        self.most = 0
        self._now = 0
        self._over = False

    def count(self) -> None:
        self._now += 1
        self.most = max(self.most, self._now)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """On the loop."""
        self._now = 0
        if not self._over:
            loop.call_soon(self.start, loop)

    def stop(self) -> None:
        self._over = True


@pytest.fixture
def rounds() -> Iterator[Rounds]:
    rounds = Rounds()
    yield rounds
    rounds.stop()


@pytest.fixture
def broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[kdirect.Broker]:
    monkeypatch.setattr(connection, "TURN_S", 0.0)
    with kdirect.Broker(tmp_path / "log", properties={"queued.max.requests": AT_ONCE}) as b:
        yield b


def versions() -> Any:
    return build(p.ApiVersionsRequest, client_software_name="test", client_software_version="1")


def test_answers_that_are_ready_at_once_do_not_bring_as_many_requests(
    broker: kdirect.Broker, rounds: Rounds, monkeypatch: pytest.MonkeyPatch, raw: Any
) -> None:
    """A connection has as many requests under way as it may, and more behind them, when all of them
    are answered."""
    server = broker.server
    loop = server._loop
    assert loop is not None
    gate: asyncio.Future[None] = loop.create_future()
    plain = server.handlers.versions.api_versions

    async def answer(*arguments: Any) -> Answer:
        await asyncio.shield(gate)
        return plain(*arguments)

    def take(*arguments: Any) -> Answer:
        rounds.count()
        return later(answer(*arguments))

    client = raw()
    client.call(versions(), 3)
    monkeypatch.setitem(server.handlers.by_key, p.API_VERSIONS, (take, False))
    loop.call_soon_threadsafe(rounds.start, loop)
    for _ in range(3 * AT_ONCE):
        client.send(versions(), 3)
    (held,) = server._connections
    deadline = time.monotonic() + 30
    while held.unanswered < AT_ONCE:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    loop.call_soon_threadsafe(gate.set_result, None)
    for _ in range(3 * AT_ONCE):
        assert client.receive().error_code == 0
    assert 1 <= rounds.most <= 2  # what is read, and a turn


def test_a_connection_whose_turn_fails_is_closed(
    broker: kdirect.Broker, monkeypatch: pytest.MonkeyPatch, raw: Any
) -> None:  # fmt: skip
    """Nothing would ever be read of it again, nor answered; the others' turns go on."""
    server = broker.server
    plain = server.handlers.versions.api_versions
    turns = 0

    def answer(*arguments: Any) -> Answer:
        nonlocal turns
        turns += 1
        cannot_be_sent = Answer([object()])
        return cannot_be_sent if turns == 2 else plain(*arguments)

    client, other = raw(), raw()
    client.call(versions(), 3)
    other.call(versions(), 3)
    monkeypatch.setitem(server.handlers.by_key, p.API_VERSIONS, (answer, False))
    for _ in range(3):
        client.send(versions(), 3)
    assert client.receive().error_code == 0
    client.socket.settimeout(10)
    assert client.socket.recv(1) == b""
    assert other.call(versions(), 3).error_code == 0


def test_connections_share_a_turn(
    broker: kdirect.Broker, rounds: Rounds, monkeypatch: pytest.MonkeyPatch, raw: Any
) -> None:  # fmt: skip
    plain = connection.Connection._take_turn

    def take_turn(self: connection.Connection) -> None:
        rounds.count()
        plain(self)

    monkeypatch.setattr(connection.Connection, "_take_turn", take_turn)
    loop = broker.server._loop
    assert loop is not None
    clients = [raw() for _ in range(AT_ONCE)]
    loop.call_soon_threadsafe(rounds.start, loop)
    for _ in range(AT_ONCE):
        for client in clients:
            client.send(versions(), 3)
    for client in clients:
        for _ in range(AT_ONCE):
            assert client.receive().error_code == 0
    assert rounds.most <= 1


def test_two_sided_clients_share_a_turn(
    tmp_path: Path, rounds: Rounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(two_sided, "TURN_S", 0.0, raising=False)
    plain = two_sided.MessageConnection.completed

    def completed(self: two_sided.MessageConnection, completion: Any) -> None:
        rounds.count()
        plain(self, completion)

    monkeypatch.setattr(two_sided.MessageConnection, "completed", completed)
    with kdirect.Broker(tmp_path / "log") as broker:
        loop = broker.server._loop
        assert loop is not None
        settings = {"bootstrap.servers": broker.bootstrap_servers, "transport": "shm"}
        session = kdirect.connect(settings)
        session.admin.create_topic("t", 1)
        with kdirect.Producer(
            {**settings, "produce.path": "send", "batch.bytes": 1024, "linger.ms": 0}
        ) as producer:
            producer.produce_sync("t", b"first", partition=0)
            loop.call_soon_threadsafe(rounds.start, loop)
            loop.call_soon_threadsafe(time.sleep, 0.3)  # meanwhile they gather
            for _ in range(500):
                producer.produce("t", b"x" * 900, partition=0)
            producer.flush()
            assert producer.statistics()["send_records"] == 501
        session.close()
    assert 1 < rounds.most <= 2 * two_sided.AT_ONCE  # of each queue


def test_what_threads_have_finished_is_told_in_turns(
    tmp_path: Path, rounds: Rounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "TURN_S", 0.0, raising=False)
    partition: Any = SimpleNamespace(directory=tmp_path / "t-0")
    threads = files.FileThreads([tmp_path])
    works, told = threading.Semaphore(0), []

    def done(result: None, error: BaseException | None) -> None:
        rounds.count()
        told.append(error)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        threads.start(loop)
        for _ in range(AT_ONCE):
            threads.for_partition(partition, works.release, done)
        for _ in range(AT_ONCE):  # the loop stands still until they are finished
            works.acquire()
        rounds.start(loop)
        await threads.settled(30)
        rounds.stop()

    try:
        asyncio.run(run())
    finally:
        threads.close()
    assert told == [None] * AT_ONCE
    assert rounds.most == 1


def test_an_outcome_that_fails_to_be_told_keeps_no_other_back(tmp_path: Path) -> None:
    partition: Any = SimpleNamespace(directory=tmp_path / "t-0")
    threads = files.FileThreads([tmp_path])
    told = []

    def done(result: int, error: BaseException | None) -> None:
        told.append(result)
        if result == 0:
            raise ValueError("told badly")

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: None)
        threads.start(loop)
        for i in range(5):
            threads.for_partition(partition, lambda i=i: i, done)
        await threads.settled(30)

    try:
        asyncio.run(run())
    finally:
        threads.close()
    assert sorted(told) == [0, 1, 2, 3, 4]


def test_the_table_of_descriptors_is_as_large_as_it_may_get() -> None:
    """It never grows while clients are served: the system call that makes it grow waits for all
    processors."""
    code = """
import resource, kdirect
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (2048, hard))
with kdirect.Broker():
    print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("FDSize")))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) >= 2048
