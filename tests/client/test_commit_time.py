"""A commit that waits ends with its timeout, however that is spent: looking for the coordinator,
waiting for its answer, or trying again.  Without sockets, by a clock that the test moves."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kdirect.client.coordinator_link import CoordinatorLink
from kdirect.client.group_member import GroupMember
from kdirect.errors import BrokerUnavailableError, TimedOutError
from kdirect.wire.backoff import Backoff

TIMEOUT_MS = 1000.0


class World:
    """A member whose coordinator takes `find_ms` to be found and never answers; its connection
    breaks after `lasts_ms`."""

    def __init__(self, find_ms: float, lasts_ms: float) -> None:
        self.now_ms, self.find_ms, self.lasts_ms = 0.0, find_ms, lasts_ms
        self.connected = True
        environment = SimpleNamespace(monotonic=lambda: self.now_ms / 1000, sleep=self.sleep)
        link = SimpleNamespace(
            connection=self.connection,
            drop=self.drop,
            drops=0,
            _cluster=SimpleNamespace(
                timeout_ms=TIMEOUT_MS,
                backoff=lambda ms: Backoff(ms, 50, 1000, environment, spread=0),
            ),
        )
        link.patiently = lambda use, ms: CoordinatorLink.patiently(link, use, ms)
        self.member = SimpleNamespace(
            _link=link,
            _environment=environment,
            send_commit=self.send_commit,
            check_commit=lambda answer: None,
        )

    def sleep(self, seconds: float) -> None:
        self.now_ms += seconds * 1000

    def drop(self, since: int) -> None:
        self.connected = False

    def connection(self, timeout_ms: float | None = None) -> None:
        if self.connected:
            return
        patience = TIMEOUT_MS if timeout_ms is None else timeout_ms
        self.now_ms += min(self.find_ms, patience)
        if self.find_ms > patience:
            raise TimedOutError("the coordinator is not found in time")
        self.connected = True

    def send_commit(self, offsets: object) -> SimpleNamespace:
        self.connection()
        return SimpleNamespace(result=self.result)

    def result(self, left_ms: float) -> None:
        self.now_ms += min(self.lasts_ms, left_ms)
        if self.lasts_ms > left_ms:
            raise TimedOutError("no answer in time")
        raise BrokerUnavailableError("the connection broke")


@pytest.mark.parametrize(
    ("find_ms", "lasts_ms"), [(5000, 500), (600, 300), (900, 50), (10, 5000), (400, 5000)]
)
def test_a_commit_takes_no_longer_than_its_timeout(find_ms: float, lasts_ms: float) -> None:
    world = World(find_ms, lasts_ms)
    with pytest.raises((TimedOutError, BrokerUnavailableError)):
        GroupMember.commit(world.member, {}, None)
    assert world.now_ms <= TIMEOUT_MS + 1
