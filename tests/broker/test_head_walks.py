"""Random walks through the machine of a partition's head, with a world that does what the driver
does, only without files: producers that ask, write, finish and vanish at any moment, Kafka clients,
rolls, deletions that succeed or fail, leaderships that are lost and won, threads and timers that
end in any order, and news that comes too late.

After each step: one producer writes an exclusive head, no memory is given up before its keys have
ended, and who waits has somebody to wait for.  At the end of each walk everybody leaves, and then
the partition is free and everybody was answered.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable

import pytest

from kdirect.broker.head_life import (
    LED_ELSEWHERE,
    Ask,
    Effect,
    Event,
    HeadLife,
    Mode,
    NextFile,
    NextFileEvent,
    Room,
    State,
)

WALKS = 100
STEPS = 60
MOST_ROUNDS = 200
WITHOUT_HEAD = {State.NOBODY, State.MAKING_ROOM, State.RESIGNED}
ANSWERS = {
    effect
    for effect in Effect
    if effect.name.startswith("REFUSE_")
    or effect in (Effect.GRANT, Effect.GRANT_NEXT, Effect.WAIT, Effect.RESERVE, Effect.INSERT)
}
# News of the worker and of timers may be told when it is not true any more.
LATE_NEWS = (
    Event.FULL,
    Event.ONE_LOST,
    Event.IDLE,
    Event.DRAINED,
    Event.RECALL_HEEDED,
    Event.GRACE_OVER,
)


class OpenFailed(Exception):
    """The head could not be opened for the producer that asked."""


class World:
    """What the driver has of one partition: who has keys, what is under way."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.life = HeadLife()
        self.now = 0.0
        self.head = False  # there is access to the head
        self.keys = 0  # producers that may write the head
        self.next_key = False  # its producer may write the next file
        self.stopped = False  # the worker commits nothing more of the head
        self.fenced = False  # the keys to the head have ended
        self.held = 0  # `Appends.hold`
        self.deletions = 0
        self.making_room = False
        self.resigning = False  # somebody waits until nothing can be written any more
        self.waiting = 0  # requests for the head
        self.next_is_awaited = False  # the producer of the head has asked for the next file
        self.under_way: list[Callable[[], None]] = []  # threads and timers
        self.sharing = self.random.choice((0.0, 0.1, 0.5))  # how many want to share the head

    # -- what the driver does ----------------------------------------------------------------------

    def happened(self, event: Event) -> None:
        self.carry_out(self.life.on(event, self.now))

    def next_file(self, event: NextFileEvent) -> None:
        self.carry_out(self.life.on_next_file(event))

    def carry_out(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            action = getattr(self, effect.name.lower(), None)
            if action is not None:
                action()
            else:
                assert effect.name.startswith("REFUSE_") or effect in (
                    Effect.DRAIN,
                    Effect.EXPIRE_HOLE,
                    Effect.FAIL_NEXT,
                )

    def wait(self) -> None:
        self.waiting += 1

    def serve(self) -> None:
        waiting, self.waiting = self.waiting, 0
        if self.next_is_awaited:
            self.next_is_awaited = False
            self.ask_next()
        for _ in range(waiting):
            self.ask(Ask(alone=False, shared=False))

    def reserve(self) -> None:
        assert self.life.state is State.SHARED and not self.fenced

    def insert(self) -> None:
        assert self.life.state is State.EXCLUSIVE and not self.fenced

    def open(self) -> None:
        assert not self.head and not self.keys
        if self.random.random() < 0.05:
            self.happened(Event.OPEN_FAILED)
            raise OpenFailed
        self.head, self.stopped, self.fenced = True, False, False
        self.held += 1

    def grant(self) -> None:
        assert self.head
        assert self.life.state is State.SHARED or (
            self.life.state is State.EXCLUSIVE and self.keys == 0
        )
        self.keys += 1

    def make_room(self) -> None:
        self.held += 1
        self.making_room = True

        def made() -> None:
            self.making_room = False
            self.happened(Event.ROOM_MADE)

        self.under_way.append(made)

    def recall(self) -> None:
        assert self.keys == 1
        self.check_recall_later()

    def check_recall_later(self) -> None:
        def check() -> None:
            if self.head and not self.fenced:
                progress = self.random.random() < 0.5
                self.happened(self.life.classify_recall(progress=progress))

        self.under_way.append(check)

    def stop(self) -> None:
        assert self.head
        self.stopped = True

    revoke = withdraw = report_cut = stop

    def report_resigned(self) -> None:
        assert not (self.head or self.keys or self.next_key), "a former producer can still write"
        self.resigning = False

    def close_later(self) -> None:
        self.under_way.append(lambda: self.happened(Event.GRACE_OVER))

    def close(self) -> None:
        assert self.head and self.stopped, "a head is repaired while the worker still commits"

        def closed() -> None:
            self.fenced = True
            self.happened(Event.CLOSED)

        self.under_way.append(closed)

    def forget(self) -> None:
        assert self.head and self.fenced, "memory is given up to which there are keys"
        assert not self.next_key, "the next file is forgotten and not discarded"
        self.head, self.keys = False, 0

    def resume(self) -> None:
        assert not self.head
        self.held -= 1
        self.serve()

    def make_next(self) -> None:
        made = self.random.choice((NextFileEvent.MADE, NextFileEvent.FAILED))
        self.under_way.append(lambda: self.next_file(made))

    def grant_next(self) -> None:
        assert self.keys == 1 and not self.next_key
        self.next_key = True
        self.next_file(NextFileEvent.GRANTED)

    def drop_next(self) -> None:
        self.next_key = False

    drop_next_silently = discard_next = end_next = drop_next

    def stop_for_next(self) -> None:
        if not self.stopped:  # else there is news of the end of the head already
            self.stopped = True
            self.happened(Event.STOPPED)

    def succeed(self) -> None:
        assert self.next_key

        def succeeded() -> None:
            if self.random.random() < 0.2:
                self.fenced = True
                self.next_file(NextFileEvent.DROPPED)
                self.happened(Event.SUCCESSION_FAILED)
                return
            self.keys, self.next_key = 1, False
            begun = self.random.random() < 0.8
            self.fenced, self.stopped = False, not begun
            self.next_file(NextFileEvent.BECAME_HEAD)
            wanted = self.waiting > 0
            self.happened(self.life.classify_succession(begun=begun, wanted=wanted))
            self.serve()

        self.under_way.append(succeeded)

    # -- what the world does -----------------------------------------------------------------------

    def ask(self, ask: Ask) -> None:
        free = self.life.state is State.NOBODY and self.held == 0
        room = self.random.choice((Room.NONE, Room.ENOUGH, Room.ENOUGH)) if free else Room.BUSY
        effects = self.life.on(self.life.classify(ask._replace(room=room), self.now), self.now)
        assert len(ANSWERS & set(effects)) == 1, "a request has one answer"
        with contextlib.suppress(OpenFailed):  # it is refused
            self.carry_out(effects)

    def ask_anything(self) -> None:
        chance = self.random.random
        self.ask(
            Ask(
                alone=chance() < 0.2,
                shared=chance() < self.sharing,
                same_transport=chance() < 0.9,
                full=chance() < 0.2,
                in_turn=chance() < 0.2,
            )
        )

    def ask_next(self) -> None:
        if self.keys == 1 and self.life.mode is not Mode.SHARED:
            event = self.life.classify_next_file(
                wanted=self.waiting > 0 and self.random.random() < 0.5,
                growing=False,
                from_it=self.next_key and self.random.random() < 0.5,
            )
            effects = self.life.on_next_file(event)
            assert len(ANSWERS & set(effects)) == 1, "a request has one answer"
            self.next_is_awaited = Effect.WAIT in effects
            self.carry_out(e for e in effects if e is not Effect.WAIT)

    def append(self) -> None:
        if self.head:
            event = Event.APPEND
            if self.random.random() < 0.5:
                between = self.keys == 1 and self.random.random() < 0.5
                event = self.life.classify_marker(fits_between=between)
            effects = self.life.on(event, self.now)
            assert len(ANSWERS & set(effects)) == 1, "an append has one answer"
            self.carry_out(e for e in effects if e is not Effect.WAIT)  # it is not a request

    def leave(self) -> None:
        """The last producer, or one of several."""
        if not self.keys:
            return
        if self.next_key and self.random.random() < 0.5:
            self.happened(Event.NEXT_LEFT)
        elif self.life.mode is not Mode.SHARED:
            self.happened(self.random.choice((Event.LEFT, Event.FINISHED)))
        elif self.life.is_granted:  # else it goes with its head
            self.keys -= 1
            self.happened(Event.ONE_LOST if self.keys else Event.LEFT)

    def write_next(self) -> None:
        if self.next_key:
            self.happened(Event.NEXT_WRITTEN)

    def fill(self) -> None:
        """The holder asks for the next file, gets it, and goes on there."""
        self.ask_next()
        self.end_something()
        self.ask_next()
        self.write_next()

    def abort(self) -> None:
        if self.head and not self.stopped:
            self.stopped = True
            self.happened(self.random.choice((Event.ABORTED, Event.ABORTED_FULL)))

    def roll(self) -> None:
        if self.head and self.life.is_granted:
            self.fenced = self.stopped = True
            self.happened(Event.ROLLED_AWAY)

    def delete(self) -> None:
        if self.deletions:
            return
        self.deletions, self.held = 1, self.held + 1
        if self.head:
            self.happened(Event.DELETE)
        mine = self.life.state is State.DELETING
        assert not self.life.is_granted, "the files of a head go to which there are keys"

        def ended() -> None:
            if mine:
                self.fenced = self.stopped = True
                if self.random.random() < 0.5:
                    self.happened(Event.DELETED)
                    self.held -= 1
                else:
                    self.happened(Event.DELETION_FAILED)
            self.deletions, self.held = 0, self.held - 1
            self.serve()

        self.under_way.append(ended)

    def resign(self) -> None:
        self.resigning = self.resigning or self.life.state not in LED_ELSEWHERE
        self.happened(Event.RESIGN)

    def lead(self) -> None:
        if not self.resigning:
            self.happened(Event.LEAD)

    def late_news(self) -> None:
        if self.head:
            self.happened(self.random.choice(LATE_NEWS))

    def end_something(self) -> None:
        if self.under_way:
            self.under_way.pop(self.random.randrange(len(self.under_way)))()

    def check(self) -> None:
        state = self.life.state
        assert self.head == (state not in WITHOUT_HEAD) or state is State.RESIGNING
        assert not (self.head and self.fenced) or not self.life.is_granted, "the keys have ended"
        assert not (self.head and self.stopped and self.life.is_granted) or (
            state in (State.ENDING, State.LEAVING)
        )
        assert self.keys <= 1 or self.life.mode is Mode.SHARED
        assert not self.next_key or self.life.next_file is NextFile.GRANTED
        assert self.held == self.deletions + (self.head or self.making_room)
        assert self.resigning == (state in (State.LEAVING, State.RESIGNING))
        waiting = self.waiting or self.next_is_awaited
        assert not waiting or self.under_way or self.keys, "nobody will answer who waits"


@pytest.mark.parametrize("part", range(20))
def test_walks_end_with_nobody_and_everybody_answered(part: int, seed: int) -> None:
    for i in range(WALKS):
        number = (seed + part * WALKS + i) % 2**32
        print(f"walk {number}")
        world = World(number)
        moves = (
            world.ask_anything,
            world.ask_next,
            world.append,
            world.leave,
            world.write_next,
            world.fill,
            world.abort,
            world.roll,
            world.delete,
            world.resign,
            world.lead,
            world.late_news,
            world.end_something,
        )
        # Each walk prefers some moves and avoids others, so that all together go everywhere.
        weights = [world.random.choice((0.0, 0.1, 1.0)) for _ in moves]
        weights[0] += 0.02
        for _ in range(STEPS):
            world.random.choices(moves, weights)[0]()
            world.now += world.random.choice((0.001, 0.5, 5.0))
            world.check()
        for _ in range(MOST_ROUNDS):
            while world.under_way:
                world.end_something()
                world.check()
            world.now += 100.0  # nothing is held off any more
            world.lead()
            world.leave()
            world.check()
            if not (world.under_way or world.keys or world.waiting):
                break
        assert not world.next_is_awaited
        assert (world.life.state, world.keys, world.waiting) == (State.NOBODY, 0, 0)
        assert (world.held, world.head, world.next_key) == (0, False, False)
