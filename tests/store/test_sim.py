"""The simulated store's own promises: what a lost connection may do, and that a seed repeats."""

from __future__ import annotations

import random
from typing import Any

from kdirect.store.contract import Create, Found, Replace, SessionState, Unknown
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
