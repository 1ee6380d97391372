"""The simulated store's own promises: what a lost connection may do, and that a seed repeats."""

from __future__ import annotations

import random
from typing import Any

from kdirect.store.contract import Committed, Create, Found, Replace, SessionState, Unknown
from kdirect.store.sim import SimServer, SimStore


def _write_and_cut(seed: int) -> tuple[Any, bytes, bytes]:
    """One write, its connection cut: its answer, and the value then and once it is back."""
    server = SimServer(seed)
    store, other = SimStore(server), SimStore(server)
    states: list[Any] = []
    store.start(states.append)
    other.start(lambda event: None)
    store.commit([Create("/n", b"old")], lambda answer: None)
    server.drain()
    answers: list[Any] = []
    store.commit([Replace("/n", b"new")], answers.append)
    server.cut(store)
    while not answers:
        server.step()
    at_once = server.tree.get("/n")
    server.drain()
    server.mend(store)
    server.drain()
    store.read(["/n"], answers.append)
    server.drain()
    assert isinstance(answers[1], Found)
    (seen,) = answers[1].nodes
    later = server.tree.get("/n")
    assert at_once is not None
    assert later is not None
    assert seen is not None
    assert seen.value == later.value
    assert states[-1] is SessionState.CONNECTED
    return answers[0], at_once.value, later.value


def test_a_lost_write_happens_at_once_or_late_or_never() -> None:
    outcomes = {_write_and_cut(seed) for seed in range(60)}
    assert outcomes == {
        (Unknown(), b"old", b"old"),
        (Unknown(), b"old", b"new"),
        (Unknown(), b"new", b"new"),
    }


def test_nothing_happens_late_once_the_session_is_back_or_has_ended() -> None:
    for seed in range(100):
        server = SimServer(seed, session_timeout_ns=100)
        store = SimStore(server)
        store.start(lambda event: None)
        server.drain()
        for number in range(5):
            store.commit([Create(f"/{number}")], lambda answer: None)
        server.cut(store)
        if seed % 2:
            server.pass_time(100)
        else:
            server.mend(store)
        before = server.tree.changes
        server.drain()
        assert server.tree.changes == before


def test_a_seed_repeats_itself() -> None:
    def run(seed: int) -> list[Any]:
        server, chance = SimServer(seed), random.Random(seed)
        told: list[Any] = []
        stores = [SimStore(server) for _ in range(3)]
        for store in stores:
            store.start(told.append)
        for _ in range(300):
            store = chance.choice(stores)
            match chance.randrange(5):
                case 0:
                    store.commit([Create(f"/{chance.randrange(9)}")], told.append)
                case 1:
                    store.read([f"/{chance.randrange(9)}"], told.append, watch=True)
                case 2:
                    server.cut(store)
                case 3:
                    server.mend(store)
                case _:
                    server.step()
        server.drain()
        return told

    assert run(4) == run(4)
    assert run(4) != run(5)


class _Counter:
    """Adds one to a node again and again.  After `Unknown` it reads once the session is back, and
    takes what it sees for what has happened, as the contract allows."""

    def __init__(self, server: SimServer) -> None:
        self.store = SimStore(server)
        self.added = 0
        self.unknown = 0
        self._waits = False  # for CONNECTED, then for what it reads
        self._reads = False
        self.store.start(self._on_event)

    def _on_event(self, event: Any) -> None:
        if event is SessionState.CONNECTED and self._waits and not self._reads:
            self._reads = True
            self.store.read(["/n"], self._on_read)

    def add(self) -> None:
        replace = Replace("/n", b"%d" % (self.added + 1), version=self.added)
        self.store.commit([replace], self._on_answer)

    def _on_answer(self, answer: Any) -> None:
        if isinstance(answer, Unknown):
            self.unknown += 1
            self._waits = True
        else:
            assert answer == Committed((self.added + 1,)), answer
            self.added += 1
            self.add()

    def _on_read(self, answer: Any) -> None:
        self._reads = False
        if isinstance(answer, Found):
            (node,) = answer.nodes
            assert node is not None
            assert node.version in (self.added, self.added + 1)
            self.added = node.version
            self._waits = False
            self.add()


def test_who_reads_back_after_the_session_is_there_again_never_counts_wrong() -> None:
    unknown = added = 0
    for seed in range(150):
        server, chance = SimServer(seed), random.Random(seed)
        first = SimStore(server)
        first.start(lambda event: None)
        first.commit([Create("/n", b"0")], lambda answer: None)
        server.drain()
        counter = _Counter(server)
        counter.add()
        for _ in range(400):
            fault = chance.random()
            if fault < 0.02:
                server.cut(counter.store)
            elif fault < 0.1:
                server.mend(counter.store)
            else:
                server.step()
        server.mend(counter.store)
        for _ in range(40):
            server.step()
        node = server.tree.get("/n")
        assert node is not None
        assert node.version - counter.added in (0, 1)  # one may be under way
        unknown += counter.unknown
        added += counter.added
    assert unknown > 300
    assert added > 3000
