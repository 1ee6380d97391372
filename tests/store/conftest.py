"""The stores under one suite.

A `Bench` is one kind of store: it opens sessions, and lets what is under way happen (`run_until`).
What a kind can have no part in is left out by what it says of itself: tests that take `bench` run
over every kind, those that take `shared_bench` over kinds that several sessions share.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kdirect.store.contract import Changed, MetadataStore, SessionState
from kdirect.store.local import LocalStore
from kdirect.store.sim import SimServer, SimStore
from kdirect.store.zookeeper_server import ZookeeperServer

WAIT_S = 20.0


class Session:
    """A store with what it told, and requests that wait for their answers."""

    def __init__(self, bench: Bench, store: MetadataStore) -> None:
        self.store = store
        self.events: list[Any] = []
        self.told = threading.Condition()
        self._bench = bench
        store.start(self._on_event)

    def _on_event(self, event: Any) -> None:
        with self.told:
            self.events.append(event)
            self.told.notify_all()

    @property
    def states(self) -> list[SessionState]:
        return [event for event in self.events if isinstance(event, SessionState)]

    def changed(self) -> list[str]:
        return [event.path for event in self.events if isinstance(event, Changed)]

    def wait_for(self, condition: Callable[[Session], Any]) -> None:
        self._bench.run_until(self, lambda: condition(self))

    def _ask(self, request: Callable[[Callable[[Any], None]], None]) -> Any:
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def done(answer: Any) -> None:
            with self.told:
                answers.put(answer)
                self.told.notify_all()

        request(done)
        self._bench.run_until(self, lambda: not answers.empty())
        return answers.get_nowait()

    def read(self, *paths: str, watch: bool = False) -> Any:
        return self._ask(lambda done: self.store.read(paths, done, watch=watch))

    def children(self, *paths: str, watch: bool = False) -> Any:
        return self._ask(lambda done: self.store.children(paths, done, watch=watch))

    def commit(self, *operations: Any) -> Any:
        return self._ask(lambda done: self.store.commit(operations, done))


class Bench:
    """What the suite needs of a kind of store."""

    name = ""
    is_shared = True  # by several sessions, which servers keep

    def __init__(self) -> None:
        self.sessions: list[Session] = []

    def open(self) -> Session:
        session = Session(self, self.new_store())
        self.sessions.append(session)
        session.wait_for(lambda s: SessionState.CONNECTED in s.states)
        return session

    def new_store(self) -> MetadataStore:
        raise NotImplementedError

    def run_until(self, session: Session, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + WAIT_S
        with session.told:
            while not condition():
                assert session.told.wait(deadline - time.monotonic()), session.events

    def lose_session(self, session: Session) -> None:
        """The servers end a session whose client lives."""
        raise NotImplementedError

    def go_away(self) -> None:
        raise NotImplementedError

    def come_back(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        for session in self.sessions:
            session.store.close()


class LocalBench(Bench):
    name = "local"
    is_shared = False

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory

    def new_store(self) -> LocalStore:
        return LocalStore([self.directory], 1, replace=replace_plainly)


class LocalThreadBench(LocalBench):
    """The same with an admin thread, as a broker has it."""

    name = "local-thread"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._admin = ThreadPoolExecutor(1)

    def new_store(self) -> LocalStore:
        return LocalStore([self.directory], 1, replace=replace_plainly, deliver=self._admin.submit)

    def close(self) -> None:
        super().close()
        self._admin.shutdown()


def replace_plainly(path: Path, data: bytes) -> None:
    """Enough where nothing crashes."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(data)
    temporary.rename(path)


class SimBench(Bench):
    name = "sim"

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.server = SimServer(seed)

    def new_store(self) -> MetadataStore:
        return SimStore(self.server)

    def run_until(self, session: Session, condition: Callable[[], Any]) -> None:
        while not condition():
            assert self.server.step(), session.events

    def lose_session(self, session: Session) -> None:
        assert isinstance(session.store, SimStore)
        self.server.expire(session.store)
        self.server.mend(session.store)

    def go_away(self) -> None:
        self.server.go_away()

    def come_back(self) -> None:
        self.server.come_back()


class ZookeeperBench(Bench):
    name = "zookeeper"

    def __init__(self, server: ZookeeperServer, root: str) -> None:
        super().__init__()
        self.server = server
        self._root = root

    def new_store(self) -> MetadataStore:
        from kdirect.store.zookeeper import ZookeeperStore

        return ZookeeperStore(self.server.connect + self._root, session_timeout_ms=4000)

    def lose_session(self, session: Session) -> None:
        """Another client attaches to the session and closes it, as ZooKeeper's own tests do."""
        from kazoo.client import KazooClient

        client_id = session.store._client.client_id  # type: ignore[attr-defined]
        thief = KazooClient(self.server.connect, client_id=client_id)
        thief.start(WAIT_S)
        thief.stop()
        thief.close()

    def go_away(self) -> None:
        self.server.kill()

    def come_back(self) -> None:
        self.server.start()


@pytest.fixture(scope="session")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZookeeperServer]:
    with ZookeeperServer(tmp_path_factory.mktemp("zookeeper")) as server:
        yield server


SHARED = ("sim-1", "sim-2", "sim-3", "zookeeper")
LOCAL = {kind.name: kind for kind in (LocalBench, LocalThreadBench)}


@pytest.fixture(params=[*LOCAL, *SHARED])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    yield from _bench(request)


@pytest.fixture(params=SHARED)
def shared_bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    yield from _bench(request)


def _bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    kind, _, seed = request.param.partition("-")
    if request.param in LOCAL:
        bench: Bench = LOCAL[request.param](request.getfixturevalue("tmp_path"))
    elif kind == "sim":
        bench = SimBench(int(seed))
    else:
        bench = _zookeeper_bench(request)
    yield bench
    bench.close()


def _zookeeper_bench(request: pytest.FixtureRequest) -> ZookeeperBench:
    """Below a chroot of the test's own."""
    from kazoo.client import KazooClient

    server = request.getfixturevalue("zookeeper")
    root = f"/{request.node.name.replace('/', '-')}"
    client = KazooClient(server.connect)
    client.start(WAIT_S)
    client.create(root)
    client.stop()
    client.close()
    return ZookeeperBench(server, root)
