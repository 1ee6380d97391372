"""The rules of a channel as pure step functions: (state, event) -> (state, effects).

No memory, no queue pair, no clock.  `kdirect.rdma.channel_ends` has the same rules compiled; tests
run both side by side.  `explore` runs the model itself over a network that delays, with ends that
sleep whenever they may.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

GENERATIONS = 255


def generation(sequence: int, slots: int) -> int:
    return sequence // slots % GENERATIONS + 1


# -- what travels ----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Buffer:
    """A buffer in its slot."""

    sequence: int
    generation: int
    last_credit: bool
    notified: bool
    intact: bool = True
    fits: bool = True


@dataclass(frozen=True)
class Credit:
    """A WRITE of the credit word."""

    count: int
    notified: bool


@dataclass(frozen=True)
class Refused:
    """There is no credit: the sender may sleep."""


@dataclass(frozen=True)
class Delivered:
    sequence: int


@dataclass(frozen=True)
class Ended:
    why: str


Effect = Buffer | Credit | Refused | Delivered | Ended


# -- the sender ------------------------------------------------------------------------------------
@dataclass(frozen=True)
class SenderState:
    slots: int
    posted: int = 0
    completed: int = 0
    acknowledged: int = 0
    ended: str = ""

    @property
    def freed(self) -> int:
        return min(self.completed, self.acknowledged)

    @property
    def may_send(self) -> bool:
        return (
            not self.ended
            and self.posted - self.acknowledged < self.slots
            and self.posted - self.freed < self.slots
        )


@dataclass(frozen=True)
class Send:
    """The owner wants to send; `wake`: it ends an epoch, or the owner asks for it."""

    wake: bool = False


@dataclass(frozen=True)
class Completed:
    """So many WRITEs have completed."""

    count: int = 1


@dataclass(frozen=True)
class Word:
    """The credit word says that so many buffers were given back."""

    count: int


def step_sender(
    state: SenderState, event: Send | Completed | Word
) -> tuple[SenderState, tuple[Effect, ...]]:
    if isinstance(event, Completed):
        return replace(state, completed=state.completed + event.count), ()
    if isinstance(event, Word):
        if not state.acknowledged <= event.count <= state.posted:
            return replace(state, ended="credit"), (Ended("credit"),)
        return replace(state, acknowledged=event.count), ()
    if not state.may_send:
        return state, (Ended(state.ended) if state.ended else Refused(),)
    last = state.posted + 1 - state.acknowledged == state.slots
    sent = Buffer(
        state.posted, generation(state.posted, state.slots), last, notified=last or event.wake
    )
    return replace(state, posted=state.posted + 1), (sent,)


# -- the receiver ----------------------------------------------------------------------------------
@dataclass(frozen=True)
class ReceiverState:
    slots: int
    received: int = 0
    released: int = 0
    returned: int = 0
    notified: int = 0  # `returned` when the sender was woken last
    ended: str = ""

    @property
    def group(self) -> int:
        return max(1, self.slots // 2)


@dataclass(frozen=True)
class Look:
    """Look at what the next slot holds (None: nothing was ever written there)."""

    holds: Buffer | None


@dataclass(frozen=True)
class Release:
    """The owner gives the present buffer back.  `newest`: what the slot of the last buffer that the
    returned credits allow holds."""

    newest: Buffer | None


@dataclass(frozen=True)
class Sleep:
    """The owner has nothing to do; `newest` as in `Release`."""

    newest: Buffer | None


def step_receiver(
    state: ReceiverState, event: Look | Release | Sleep
) -> tuple[ReceiverState, tuple[Effect, ...]]:
    if state.ended:
        return state, (Ended(state.ended),)
    if isinstance(event, Look):
        return _look(state, event.holds)
    if isinstance(event, Release):
        state = replace(state, released=state.released + 1)
        if state.released - state.returned < state.group:
            return state, ()
    if state.released == state.returned:
        return state, ()
    newest = state.returned + state.slots - 1
    arrived = event.newest is not None and event.newest.generation == generation(
        newest, state.slots
    )
    return _return(state, notify=arrived)


def _return(state: ReceiverState, *, notify: bool) -> tuple[ReceiverState, tuple[Effect, ...]]:
    state = replace(
        state,
        returned=state.released,
        notified=state.released if notify else state.notified,
    )
    return state, (Credit(state.released, notify),)


def _look(state: ReceiverState, holds: Buffer | None) -> tuple[ReceiverState, tuple[Effect, ...]]:
    before = state.received - state.slots
    found = 0 if holds is None else holds.generation
    if found == (0 if before < 0 else generation(before, state.slots)):
        return state, ()
    if found != generation(state.received, state.slots):
        why = "generation"
    elif holds is None or not holds.fits:
        why = "length"
    elif not holds.intact:
        why = "torn"
    elif holds.sequence != state.received:
        why = "sequence"
    else:
        state = replace(state, received=state.received + 1)
        effects: tuple[Effect, ...] = (Delivered(holds.sequence),)
        known = state.received - state.slots
        if holds.last_credit and state.notified <= known < state.returned:
            state, more = _return(state, notify=True)
            effects += more
        return state, effects
    return replace(state, ended=why), (Ended(why),)


# -- both over a network that delays ---------------------------------------------------------------
@dataclass
class Explored:
    """What a schedule did."""

    delivered: list[int]
    wakeups: int
    slept: int
    refusals: int


def explore(seed: int, *, slots: int, buffers: int, epoch: int) -> Explored:
    """One schedule: `buffers` buffers, the last of every `epoch` wakes.  Both ends sleep whenever
    they find nothing to do, and only a notified WRITE wakes them.  Raises AssertionError when a
    rule is broken, or when both sleep and nothing is under way that wakes one."""
    chance = random.Random(seed)
    sender, receiver = SenderState(slots), ReceiverState(slots)
    ring: list[Buffer | None] = [None] * slots
    word = 0
    there: list[Buffer] = []  # WRITEs under way to the receiver, and back
    back: list[Credit] = []
    under_way = 0  # WRITEs of the sender that have not completed
    asleep = {"sender": False, "receiver": False}
    present: int | None = None
    explored = Explored([], 0, 0, 0)

    def sleep(who: str) -> None:
        asleep[who] = True
        explored.slept += 1

    def wake(who: str) -> None:
        explored.wakeups += 1
        asleep[who] = False

    def newest() -> Buffer | None:
        return ring[(receiver.returned + slots - 1) % slots]

    def receiver_does(event: Look | Release | Sleep) -> tuple[Effect, ...]:
        nonlocal receiver
        receiver, effects = step_receiver(receiver, event)
        for effect in effects:
            assert not isinstance(effect, Ended), effect
            if isinstance(effect, Credit):
                back.append(effect)
        return effects

    while receiver.released < buffers:
        moves = [m for m, can in (
            ("land", there), ("return", back), ("complete", under_way),
            ("send", not asleep["sender"] and sender.posted < buffers),
            ("receive", not asleep["receiver"]),
        ) if can]  # fmt: skip
        assert moves, f"both sleep for ever: {sender} {receiver} (seed {seed})"
        move = chance.choice(moves)
        if move == "land":
            buffer = there.pop(0)
            slot = buffer.sequence % slots
            assert buffer.sequence - slots < receiver.released, "unread bytes are overwritten"
            ring[slot] = buffer
            if buffer.notified:
                wake("receiver")
        elif move == "return":
            credit = back.pop(0)
            word = credit.count
            if credit.notified:
                wake("sender")
        elif move == "complete":
            n = chance.randint(1, under_way)
            under_way -= n
            sender, _ = step_sender(sender, Completed(n))
        elif move == "send":
            if chance.random() < 0.7 or not sender.may_send:
                sender, effects = step_sender(sender, Word(word))
                assert not effects, effects
            end = (sender.posted + 1) % epoch == 0 or sender.posted + 1 == buffers
            sender, effects = step_sender(sender, Send(wake=end))
            for effect in effects:
                if isinstance(effect, Buffer):
                    there.append(effect)
                    under_way += 1
                else:
                    assert isinstance(effect, Refused)
                    explored.refusals += 1
                    if sender.posted - sender.acknowledged == slots:
                        sleep("sender")
        elif present is not None:
            receiver_does(Release(newest()))
            present = None
        else:
            for effect in receiver_does(Look(ring[receiver.received % slots])):
                if isinstance(effect, Delivered):
                    present = effect.sequence
                    explored.delivered.append(present)
            if present is None:
                receiver_does(Sleep(newest()))
                sleep("receiver")
        # Credits are conserved: what is not back is under way, in the ring, or not returned yet.
        assert word <= receiver.returned <= receiver.released <= receiver.received
        assert receiver.received <= sender.posted <= word + slots
        assert sender.acknowledged <= word
    return explored
