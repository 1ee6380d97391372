"""What is particular to a ZooKeeper: servers that stop, threads, chroots, forks."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kdirect.errors import ConfigError
from kdirect.store.contract import Create, Found, Refused, Replace, SessionState, Unknown
from kdirect.store.zookeeper import CLOSE_S, ZookeeperStore
from kdirect.store.zookeeper_server import ZookeeperServer
from tests.store.conftest import WAIT_S, Session, ZookeeperBench
from tests.support import stop_process

CONNECTED, SUSPENDED, EXPIRED, CLOSED = SessionState


class TimedBench(ZookeeperBench):
    """Sessions of a given timeout, at the root or below a chroot."""

    def __init__(self, server: ZookeeperServer, timeout_ms: int = 3000, root: str = "") -> None:
        super().__init__(server, root)
        self._timeout_ms = timeout_ms

    def new_store(self) -> ZookeeperStore:
        return ZookeeperStore(self.server.connect + self._root, session_timeout_ms=self._timeout_ms)

    def begin(self) -> Session:
        """A session that is not waited for."""
        self.sessions.append(Session(self, self.new_store()))
        return self.sessions[-1]


@pytest.fixture
def stopped(zookeeper: ZookeeperServer) -> Iterator[Any]:
    """Stops the server, and lets it go on."""

    def stop() -> None:
        stop_process(zookeeper.pid)

    yield stop
    os.kill(zookeeper.pid, signal.SIGCONT)


@pytest.fixture
def timed(zookeeper: ZookeeperServer) -> Iterator[TimedBench]:
    bench = TimedBench(zookeeper)
    yield bench
    bench.close()


def _node(session: Session, path: str, value: bytes = b"") -> None:
    if session.read(path) == Found((None,)):
        session.commit(Create(path, value))
    else:
        session.commit(Replace(path, value))


@pytest.mark.parametrize("steadily", [False, True], ids=["idle", "asking"])
def test_a_stopped_server_suspends_within_the_sessions_timeout(
    timed: TimedBench, zookeeper: ZookeeperServer, stopped: Any, steadily: bool
) -> None:
    session = timed.open()
    stopped()
    began = time.monotonic()
    if steadily:
        # kazoo takes what it sends for a sign of life, and would never notice.
        while SUSPENDED not in session.states and time.monotonic() - began < 10:
            session.store.read(["/a"], lambda answer: None)
            with session.told:
                session.told.wait(0.05)
    session.wait_for(lambda s: SUSPENDED in s.states)
    assert time.monotonic() - began < 2.8, "of 3 s; ZooKeeper's own client takes 2"
    os.kill(zookeeper.pid, signal.SIGCONT)
    session.wait_for(lambda s: s.states[2:] in ([CONNECTED], [EXPIRED]))


def test_what_was_answered_unknown_may_happen_until_the_session_is_back(
    timed: TimedBench, zookeeper: ZookeeperServer, stopped: Any
) -> None:
    session = timed.open()
    _node(session, "/late", b"old")
    stopped()
    assert session.commit(Replace("/late", b"new")) == Unknown()
    os.kill(zookeeper.pid, signal.SIGCONT)
    session.wait_for(lambda s: s.states == [CONNECTED, SUSPENDED, CONNECTED])
    (first,) = session.read("/late").nodes
    session.commit(Create("/later", ephemeral=True))
    assert session.read("/late").nodes[0] == first, "decided once the session is back"


@pytest.mark.parametrize("connected", [True, False])
def test_a_close_does_not_wait_for_a_stopped_server(
    zookeeper: ZookeeperServer, stopped: Any, connected: bool
) -> None:
    bench = TimedBench(zookeeper, 10_000)
    session = bench.open() if connected else None
    stopped()
    session = session or bench.begin()
    waits: list[Any] = []
    session.store.read(["/a"], waits.append)
    began = time.monotonic()
    session.store.close()
    assert time.monotonic() - began < 2 * CLOSE_S + 0.5
    assert session.events[-1] is CLOSED
    assert waits == [Unknown()]


def test_a_server_that_takes_a_connection_and_is_silent_does_not_use_up_the_session() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(WAIT_S)
        store = ZookeeperStore(f"127.0.0.1:{silent.getsockname()[1]}", session_timeout_ms=9000)
        store.start(lambda event: None)
        first, _ = silent.accept()
        began = time.monotonic()
        second, _ = silent.accept()
        assert time.monotonic() - began < 3, "of 9 s"
        store.close()
        first.close()
        second.close()


def test_a_server_that_wants_authentication_is_told(tmp_path: Path) -> None:
    settings = {"enforce.auth.enabled": "true", "enforce.auth.schemes": "digest"}
    with ZookeeperServer(tmp_path, settings=settings) as server:
        session = TimedBench(server).begin()
        session.wait_for(lambda s: CLOSED in s.states)
        assert isinstance(session.events[0], Refused)
        assert "does not let this broker in" in str(session.events[0].error)
        session.store.close()


def test_a_chroot_that_is_not_there_is_refused(zookeeper: ZookeeperServer) -> None:
    session = TimedBench(zookeeper, root="/nowhere").begin()
    session.wait_for(lambda s: CLOSED in s.states)
    assert session.states == [CLOSED]
    refused = session.events[0]
    assert isinstance(refused, Refused)
    assert "has no node /nowhere" in str(refused.error)
    assert "create /nowhere" in refused.error.hint
    assert session.read("/a") == Unknown(ended=True)
    session.store.close()


@pytest.mark.parametrize(
    "servers",
    ["", "localhost:abc", "a b:1", "host:70000", "host:1:2", "/x", "a:1,,b:1", "a:1/x,b:1/x",
     "a:1/x/../y"],
)  # fmt: skip
def test_what_names_no_servers_is_an_error(servers: str) -> None:
    with pytest.raises(ConfigError, match=r"zookeeper\.connect"):
        ZookeeperStore(servers, session_timeout_ms=4000)


def test_sessions_leave_no_thread_and_no_descriptor(zookeeper: ZookeeperServer) -> None:
    def held() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    bench = TimedBench(zookeeper)
    bench.open().store.close()
    before = held()
    for number in range(50):
        if number % 5 == 4:
            gone = ZookeeperStore("127.0.0.1:1", session_timeout_ms=3000)
            gone.start(lambda event: None)
            gone.close()
            continue
        session = bench.open()
        assert session.store.granted_timeout_ms == 3000  # type: ignore[attr-defined]
        session.commit(Create("/mine", ephemeral=True))
        if number % 5 == 3:
            bench.lose_session(session)
            session.wait_for(lambda s: EXPIRED in s.states)
        session.store.close()
    assert held() == before


def test_what_was_granted_is_told(zookeeper: ZookeeperServer) -> None:
    bench = TimedBench(zookeeper, 60_000)
    session = bench.open()
    assert session.store.granted_timeout_ms == 20 * 500  # type: ignore[attr-defined]
    bench.close()


def test_thousands_of_nodes_are_read_in_one_request(timed: TimedBench) -> None:
    session = timed.open()
    _node(session, "/many")
    paths = [f"/many/{number}" for number in range(3000)]
    for place in range(0, len(paths), 1000):
        session.commit(*[Create(path, bytes(200)) for path in paths[place : place + 1000]])
    found = session.read(*paths, watch=True)
    assert all(node is not None for node in found.nodes)
    assert len(session.children("/many", watch=True).names[0]) == 3000
    assert session.states == [CONNECTED]


def test_requests_without_number_do_not_wait_for_their_answers(timed: TimedBench) -> None:
    session = timed.open()
    _node(session, "/n")
    asked = 3000  # kazoo's own pipe holds 278
    answers: list[Any] = []

    def ask() -> None:
        for number in range(asked // 2):
            session.store.commit([Replace("/n", b"%d" % number)], answers.append)

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    session.read("/n")
    versions = [answer.versions[0] for answer in answers]
    assert versions == list(range(versions[0], versions[0] + asked))


def test_a_child_process_cannot_use_its_parents_store(timed: TimedBench) -> None:
    session = timed.open()
    session.commit(Create("/parents", ephemeral=True))
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            session.store.close()
            session.store.read(["/a"], lambda answer: None)
        except ConfigError as e:
            code = 0 if "after the fork" in e.hint else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert session.read("/parents").nodes[0].owned
    assert session.states == [CONNECTED]


_STOPPED_PROCESS = """
import queue, sys
from kdirect.store.contract import Create, SessionState
from kdirect.store.zookeeper import ZookeeperStore
told = queue.SimpleQueue()
store = ZookeeperStore(sys.argv[1], session_timeout_ms=3000)
store.start(told.put)
assert told.get() is SessionState.CONNECTED
store.commit([Create("/mine", ephemeral=True)], told.put)
print(told.get(), flush=True)
while told.get() is not SessionState.EXPIRED:
    pass
store.commit([Create("/ghost")], told.put)
print(told.get(), flush=True)
store.close()
"""


def test_a_process_that_was_stopped_for_too_long_learns_that_its_session_expired(
    timed: TimedBench, zookeeper: ZookeeperServer
) -> None:
    watcher = timed.open()
    command = [sys.executable, "-c", _STOPPED_PROCESS, zookeeper.connect]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "Committed(versions=(0,))\n"
        stop_process(process.pid)
        watcher.commit(Create("/seen", ephemeral=True))
        watcher.read("/mine", watch=True)
        watcher.wait_for(lambda s: "/mine" in s.changed())
        process.send_signal(signal.SIGCONT)
        assert process.stdout.readline() == "Unknown(ended=True)\n"
        assert process.wait(WAIT_S) == 0
    assert watcher.read("/mine", "/ghost") == Found((None, None))


def test_nothing_is_asked_in_the_session_that_kazoo_begins_after_the_end(
    timed: TimedBench,
) -> None:
    for number in range(5):
        session, other = timed.open(), timed.open()
        answers: dict[str, Any] = {}
        thread = threading.Thread(target=_create_until_the_end, args=(session, number, answers))
        thread.start()
        timed.lose_session(session)
        thread.join(WAIT_S)
        session.wait_for(lambda s: EXPIRED in s.states)
        session.store.close()
        assert Unknown(ended=True) in answers.values()
        other.commit(Create("/seen", ephemeral=True))
        assert set(other.read(*answers).nodes) == {None}
        other.store.close()


def _create_until_the_end(session: Session, number: int, answers: dict[str, Any]) -> None:
    """Create ephemeral nodes, at most 20 at a time, until the store says that it has ended."""
    under_way = threading.Semaphore(20)
    count = 0
    while Unknown(ended=True) not in list(answers.values())[-40:] and count < 100_000:
        path = f"/after-{number}-{count}"

        def done(answer: Any, path: str = path) -> None:
            answers[path] = answer
            under_way.release()

        assert under_way.acquire(timeout=WAIT_S)
        session.store.commit([Create(path, ephemeral=True)], done)
        count += 1


def test_a_port_that_is_taken_is_told(zookeeper: ZookeeperServer, tmp_path: Path) -> None:
    second = ZookeeperServer(tmp_path, port=zookeeper.port)
    with pytest.raises(ConfigError, match="cannot listen"):
        second.start()
