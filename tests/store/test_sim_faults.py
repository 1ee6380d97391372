"""Faults that a simulation may cause at any time, in any order."""

from __future__ import annotations

from kdirect.store.contract import SessionState
from kdirect.store.sim import SimServer, SimStore


def test_a_session_that_has_ended_may_expire_again() -> None:
    server = SimServer(1, session_timeout_ns=10)
    store = SimStore(server)
    events: list[object] = []
    store.start(events.append)
    server.cut(store)
    server.pass_time(10)
    server.expire(store)
    server.mend(store)
    server.drain()
    server.expire(store)
    server.drain()
    assert events[-1] is SessionState.EXPIRED
    assert events.count(SessionState.EXPIRED) == 1
