"""A replica's way from Fetch to push and back, with a leader and a head that the test plays."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kdirect.broker.followed_head import AckRing
from kdirect.broker.pushed_copy import FIRST_PAUSE_S, CopyByPush, Ring, State
from kdirect.errors import RefusedError, StorageFullError
from kdirect.format.replica_fetch import Feed, Feeding, Push
from kdirect.model import TopicPartition


class Link:
    engine = SimpleNamespace(transport="shm")

    def __init__(self) -> None:
        self.is_open = True
        self.copies: set[Any] = set()
        self.hung: list[Any] = []
        self.works = False

    def leave(self, copy: Any) -> None:
        self.works = self.works or copy.has_arrived
        self.copies.discard(copy)


class Replica:
    """What the copy sees of `kdirect.member.following.Replica`."""

    tp = TopicPartition("t", 0)
    epoch = 3
    partition = object()

    def __init__(self, log: list[str]) -> None:
        self.log = log

    async def stop_copying(self) -> None:
        self.log.append("stop copying")

    def copy_again(self) -> None:
        self.log.append("copy again")

    def moved(self) -> None:
        self.log.append("moved")


class Head:
    def __init__(self, log: list[str], vacated: bool) -> None:
        self.log = log
        self.vacated = vacated
        self.full = 0
        self.error: Exception = StorageFullError("no room for a fresh file")
        self.has_arrived = False

    def grant(self) -> str:
        self.log.append("open head")
        return "present"

    may_grow = False
    length = 8192

    def grow(self) -> str:
        self.may_grow = False
        return "more"

    def is_too_short(self, segment_bytes: int) -> bool:
        return self.length < segment_bytes

    def grant_ahead(self) -> str:
        return "ahead"

    def end(self) -> bool:
        if self.full:
            self.full -= 1
            raise self.error
        self.log.append("take keys")
        return self.vacated

    def watch(self) -> None:
        self.log.append("watch")


class Segments:
    """Sealed segments that are read until `done` is set."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.has_arrived = False
        self.is_reading = True
        self.done = asyncio.Event()
        self.ended = asyncio.Event()  # no READ is under way

    async def run(self) -> None:
        self.log.append("read")
        await self.done.wait()

    def stop(self, why: str) -> None:
        self.log.append(f"stop: {why}")
        self.ended.set()

    async def close(self) -> None:
        await self.ended.wait()
        self.log.append("no read is under way")


class Leader:
    """The ways to it.  `waits`: at which step it does not answer; `fails`: where it refuses."""

    def __init__(self, *, waits: str = "", fails: str = "", vacated: bool = True) -> None:
        self.log: list[str] = []
        self.waits = waits
        self.fails = fails
        self.vacated = vacated
        self.the_link = Link()
        self.on_rolled: Callable[[], None] = lambda: None
        self.reasons: list[str] = []
        self.holds: asyncio.Future[None] | None = None  # what it answers after

    async def _step(self, name: str) -> None:
        self.log.append(name)
        if self.waits == name:
            await asyncio.get_running_loop().create_future()
        if self.fails == name:
            self.fails = ""
            raise RefusedError(32004, f"{name} was refused")

    async def link(self, leader: int) -> Any:
        await self._step("link")
        return self.the_link

    async def ask(self, link: Any, copy: Any) -> Ring:
        await self._step("ask")
        return Ring(1, AckRing(0, 0, 64), 32)

    async def grant(self, link: Any, copy: Any, ring: int, grant: Any) -> None:
        await self._step(f"grant {grant}")
        if self.holds is not None:
            await self.holds

    async def on_thread(self, copy: Any, work: Callable[[], Any]) -> Any:
        await asyncio.sleep(0)
        return work()

    def open_head(self, link: Any, copy: Any, ring: Ring, on_rolled: Any, on_ended: Any) -> Any:
        if self.fails == "disk":
            self.fails = ""
            raise StorageFullError("no room")
        self.on_rolled = on_rolled
        self.head = Head(self.log, self.vacated)
        return self.head

    def catch_up(self, link: Any, copy: Any, replica: Any) -> Any:
        self.segments = Segments(self.log)
        return self.segments

    async def end(self, link: Any, copy: Any, ring: int) -> bool:
        await self._step("end")
        return True

    def left(self, link: Any, head: Any) -> None:
        self.log.append("left")

    def refused(self, leader: int, reason: str) -> None:
        self.reasons.append(reason)

    def pushed(self, link: Any) -> None:
        pass


def play(leader: Leader, scenario: Callable[[CopyByPush, Leader], Awaitable[None]]) -> list[str]:
    async def run() -> None:
        copy = CopyByPush(leader, 1, Replica(leader.log))
        await scenario(copy, leader)
        await asyncio.wait_for(copy.close(), 5)
        assert copy.state is State.CLOSED
        assert not leader.the_link.copies

    asyncio.run(run())
    return leader.log


async def until(holds: Callable[[], Any]) -> None:
    for _ in range(3000):
        if holds():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it does not come to that")


GRANTED = ["link", "ask", "stop copying", "open head", "grant present", "grant ahead"]
ENDED = ["end", "take keys", "left", "copy again"]  # the leader stops first


def test_nothing_is_asked_before_an_offer() -> None:
    async def scenario(copy: CopyByPush, leader: Leader) -> None:
        copy.told(Push.NOTHING)
        await asyncio.sleep(0.01)

    assert play(Leader(), scenario) == []


def test_an_end_that_is_told_before_the_leader_has_answered_is_heard() -> None:
    async def scenario(copy: CopyByPush, leader: Leader) -> None:
        leader.holds = asyncio.get_running_loop().create_future()
        copy.told(Push.OFFERED)
        await until(lambda: copy.state is State.GRANTING)
        copy.told(Push.ENDED)
        leader.holds.set_result(None)
        await until(lambda: leader.log[-len(ENDED) :] == ENDED)

    play(Leader(), scenario)


def test_records_are_copied_again_once_the_keys_are_gone() -> None:
    async def scenario(copy: CopyByPush, leader: Leader) -> None:
        copy.told(Push.OFFERED)
        await until(lambda: leader.log == GRANTED)
        assert copy.state is State.PUSHED
        leader.on_rolled()
        await until(lambda: leader.log[-1] == "grant ahead" and len(leader.log) == 7)
        copy.told(Push.ENDED)
        await until(lambda: leader.log[7:] == ENDED)
        await until(lambda: copy.state is State.PUSHED)  # after a pause

    log = play(Leader(), scenario)
    assert log.count("take keys") == 2 and log[-4:] == ENDED


@pytest.mark.parametrize("step", ["link", "ask", "grant present", "grant ahead"])
def test_a_leader_that_does_not_answer_holds_up_no_fence(step: str) -> None:
    async def scenario(copy: CopyByPush, leader: Leader) -> None:
        copy.told(Push.OFFERED)
        await until(lambda: leader.log and leader.log[-1] == step)

    log = play(Leader(waits=step), scenario)
    assert log.count("take keys") == log.count("open head")
    if "open head" in log:
        assert log[-4:] == ENDED


def test_a_link_that_is_cut_before_it_is_used_is_left_alone() -> None:
    """It is being closed: nobody is to open a head over it."""

    async def scenario(copy: CopyByPush, leader: Leader) -> None:
        leader.the_link.is_open = False
        copy.told(Push.OFFERED)
        await until(lambda: leader.reasons)
        assert leader.log == ["link", "copy again"]
        leader.the_link.is_open = True
        await until(lambda: copy.state is State.PUSHED)

    play(Leader(), scenario)


def test_a_mistake_of_this_broker_does_not_end_push_for_good() -> None:
    """Errors that a request may end with are not all that there are."""

    async def scenario(copy: CopyByPush, leader: Leader) -> None:
        copy.told(Push.OFFERED)
        await until(lambda: copy.state is State.PUSHED)
        assert leader.reasons == ["ValueError: a mistake"]

    leader = Leader()
    ask = leader.ask

    async def fails_once(link: Any, copy: Any) -> Ring:
        leader.ask = ask  # type: ignore[method-assign]
        raise ValueError("a mistake")

    leader.ask = fails_once  # type: ignore[method-assign]
    play(leader, scenario)


@pytest.mark.parametrize("step", ["link", "ask", "disk", "grant present"])
def test_what_is_refused_is_tried_again_later(step: str) -> None:
    async def scenario(copy: CopyByPush, leader: Leader) -> None:
        copy.told(Push.OFFERED)
        await until(lambda: copy.state is State.PUSHED)
        assert len(leader.reasons) == 1

    log = play(Leader(fails=step), scenario)
    assert log.count("take keys") == log.count("open head")


def test_a_head_that_its_leader_is_inside_of_waits_for_the_link() -> None:
    async def scenario(copy: CopyByPush, leader: Leader) -> None:
        copy.told(Push.OFFERED)
        await until(lambda: copy.state is State.PUSHED)

    leader = Leader(vacated=False)
    play(leader, scenario)
    assert len(leader.the_link.hung) == 1


def test_a_roll_keeps_watching() -> None:
    async def scenario(copy: CopyByPush, leader: Leader) -> None:
        copy.told(Push.OFFERED)
        await until(lambda: copy.state is State.PUSHED)
        copy.watch()
        leader.on_rolled()
        copy.moved()
        leader.on_rolled()

    log = play(Leader(), scenario)
    assert log.count("watch") == 2 and log.count("moved") == 1


@pytest.mark.parametrize("error", [StorageFullError("no room"), ValueError("a mistake")])
def test_a_fence_waits_until_the_keys_are_gone(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Whatever keeps them: a replica that gave up would take no records, and fetch none."""
    monkeypatch.setattr("kdirect.broker.pushed_copy.AGAIN_S", 0.01)

    async def scenario(copy: CopyByPush, leader: Leader) -> None:
        copy.told(Push.OFFERED)
        await until(lambda: copy.state is State.PUSHED)
        leader.head.full, leader.head.error = 3, error

    log = play(Leader(), scenario)
    assert log[-4:] == ENDED


def test_a_broker_that_stops_does_not_wait_for_the_disk() -> None:
    async def scenario(copy: CopyByPush, leader: Leader) -> None:
        copy.told(Push.OFFERED)
        await until(lambda: copy.state is State.PUSHED)
        leader.head.full = 1000
        await asyncio.wait_for(copy.close(gives_up=True), 5)

    assert "take keys" not in play(Leader(), scenario)


def test_only_what_is_this_partitions_fault_is_tried_later_each_time() -> None:
    async def scenario(copy: CopyByPush, leader: Leader) -> None:
        copy.told(Push.OFFERED)
        for failed, pauses in ((False, 1), (False, 1), (True, 2), (True, 4), (False, 1)):
            await until(lambda: copy.state is State.PUSHED)
            leader.head.has_arrived = True
            copy.end("the link is cut", failed=failed)
            await until(lambda: copy.state is State.FETCHING)
            await until(lambda n=pauses: copy._pause.coming_s == n * FIRST_PAUSE_S)
        assert leader.the_link.works

    play(Leader(), scenario)


def test_more_is_granted_when_the_leader_wants_it() -> None:
    async def scenario(copy: CopyByPush, leader: Leader) -> None:
        Head.may_grow = True
        try:
            copy.told(Push.OFFERED)
            await until(lambda: copy.state is State.PUSHED)
            await asyncio.sleep(0.01)
            assert leader.log[-1] == "grant present", "a file ahead before the head is long enough"
            copy.told(Push.WANTS_NEXT)  # it rolls early
            await until(lambda: leader.log[-1] == "grant ahead")
            copy.told(Push.WANTS)
            await until(lambda: leader.log[-2:] == ["grant more", "grant ahead"])
        finally:
            Head.may_grow = False

    play(Leader(), scenario)


def test_a_file_that_has_become_too_short_is_left_at_once() -> None:
    """``segment.bytes`` was raised at the leader, which would wait for more of the file in vain."""

    async def scenario(copy: CopyByPush, leader: Leader) -> None:
        copy.told(Push.OFFERED, 8192)
        await until(lambda: leader.log == GRANTED)
        copy.told(Push.WANTS, 8192)
        await until(lambda: leader.log[len(GRANTED) :] == ["grant more", "grant ahead"])
        copy.told(Push.WANTS, 16384)
        await until(lambda: leader.log[-len(ENDED) :] == ENDED)
        assert leader.reasons == ["its leader's segments have become larger"]
        await until(lambda: copy.state is State.PUSHED)  # after a pause

    play(Leader(), scenario)


def test_segments_are_read_before_the_head_is_pushed() -> None:
    """The head is offered while the last of them is read, and not again."""

    async def scenario(copy: CopyByPush, leader: Leader) -> None:
        copy.told(Push.SEGMENTS)
        await until(lambda: copy.state is State.PULLING and leader.log[-1] == "read")
        copy.told(Push.OFFERED)
        leader.segments.done.set()
        leader.segments.ended.set()
        await until(lambda: copy.state is State.PUSHED)
        assert leader.reasons == []

    log = play(Leader(), scenario)
    read = ["link", "read", "no read is under way", "left", "copy again"]
    assert log == [*read, *GRANTED, *ENDED]


def test_it_says_how_the_replica_is_fed() -> None:
    async def scenario(copy: CopyByPush, leader: Leader) -> None:
        first = copy.feeding()
        assert (first.feed, bool(first.reason)) == (Feed.FETCHED, True)
        copy.told(Push.SEGMENTS)
        await until(lambda: leader.log[-1:] == ["read"])
        assert copy.feeding() == Feeding(Feed.READ, "shm")
        leader.segments.done.set()
        leader.segments.ended.set()
        await until(lambda: copy.state is State.FETCHING)
        leader.fails = "ask"
        copy.told(Push.OFFERED)
        await until(lambda: copy.feeding() == Feeding(Feed.FETCHED, reason="ask was refused"))
        await until(lambda: copy.state is State.PUSHED)  # it is tried again
        assert copy.feeding() == Feeding(Feed.PUSHED, "shm")

    play(Leader(), scenario)


def test_a_fence_waits_until_no_read_is_under_way() -> None:
    async def scenario(copy: CopyByPush, leader: Leader) -> None:
        copy.told(Push.SEGMENTS)
        await until(lambda: leader.log[-1:] == ["read"])
        closing = asyncio.ensure_future(copy.close())
        await asyncio.sleep(0.01)
        assert not closing.done() and leader.log[-1] == "read"
        leader.segments.ended.set()
        await asyncio.wait_for(closing, 5)

    assert play(Leader(), scenario)[-3:] == ["no read is under way", "left", "copy again"]


def test_a_cut_link_stops_the_reading() -> None:
    async def scenario(copy: CopyByPush, leader: Leader) -> None:
        copy.told(Push.SEGMENTS)
        await until(lambda: leader.log[-1:] == ["read"])
        copy.end("the link is cut")
        assert leader.log[-1] == "stop: the link is cut"

    play(Leader(), scenario)
