"""The rules of a channel, as pure steps, in thousands of schedules, and with mistakes planted."""

from __future__ import annotations

import random
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rdma import channel_model
from tests.rdma.channel_model import (
    Buffer,
    Delivered,
    Ended,
    Look,
    ReceiverState,
    Refused,
    Send,
    SenderState,
    Word,
    explore,
    generation,
    step_receiver,
    step_sender,
)

SCHEDULES = 3000


def run(seed: int) -> channel_model.Explored:
    chance = random.Random(seed)
    slots = chance.choice((2, 4, 8))
    buffers = chance.randint(1, 60)
    explored = explore(seed, slots=slots, buffers=buffers, epoch=chance.randint(1, 40))
    assert explored.delivered == list(range(buffers)), seed
    return explored


def test_every_schedule_ends_with_all_buffers_in_order(seed: int) -> None:
    done = [run(seed + i) for i in range(SCHEDULES)]
    # They were schedules in which both ends slept, were refused, and were woken.
    assert sum(e.slept for e in done) > SCHEDULES
    assert sum(e.refusals for e in done) > SCHEDULES / 4
    assert sum(e.wakeups for e in done) > SCHEDULES


def some_schedule_fails(seed: int) -> bool:
    for i in range(SCHEDULES):
        try:
            run(seed + i)
        except AssertionError:
            return True
    return False


def test_a_return_that_never_wakes_is_found(seed: int) -> None:
    real = channel_model._return
    with mock.patch.object(channel_model, "_return", lambda s, *, notify: real(s, notify=False)):
        assert some_schedule_fails(seed)


def test_a_last_credit_that_is_not_told_is_found(seed: int) -> None:
    """The sender sleeps, and the credits that came before its last buffer woke nobody."""
    real = channel_model._look

    def blind(state: ReceiverState, holds: Buffer | None):  # type: ignore[no-untyped-def]
        if holds is not None:
            holds = Buffer(holds.sequence, holds.generation, False, holds.notified)
        return real(state, holds)

    with mock.patch.object(channel_model, "_look", blind):
        assert some_schedule_fails(seed)


def test_a_last_credit_that_wakes_nobody_is_found(seed: int) -> None:
    real = channel_model.step_sender

    def silent(state, event):  # type: ignore[no-untyped-def]
        state, effects = real(state, event)
        return state, tuple(
            Buffer(e.sequence, e.generation, e.last_credit, event.wake)
            if isinstance(e, Buffer)
            else e
            for e in effects
        )

    with mock.patch.object(channel_model, "step_sender", silent):
        assert some_schedule_fails(seed)


def test_a_sender_that_sends_without_a_credit_is_found(seed: int) -> None:
    with mock.patch.object(SenderState, "may_send", property(lambda s: True)):
        assert some_schedule_fails(seed)


@given(st.integers(1, 10), st.integers(0, 2**40), st.integers(0, 2**40))
def test_a_credit_word_is_believed_within_what_was_sent(
    slots_bits: int, posted: int, count: int
) -> None:
    slots = 1 << slots_bits
    acknowledged = max(0, posted - slots)
    state = SenderState(slots, posted=posted, completed=posted, acknowledged=acknowledged)
    state, effects = step_sender(state, Word(count))
    if acknowledged <= count <= posted:
        assert effects == () and state.acknowledged == count
    else:
        assert effects == (Ended("credit"),)
        assert step_sender(state, Send())[1] == (Ended("credit"),)


@given(st.sampled_from((2, 4, 8, 64)), st.integers(0, 2**40))
def test_a_generation_is_never_zero_and_never_that_of_the_turn_before(
    slots: int, sequence: int
) -> None:
    assert 1 <= generation(sequence, slots) <= 255
    assert generation(sequence, slots) != generation(sequence + slots, slots)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"generation": 7}, "generation"),
        ({"fits": False}, "length"),
        ({"intact": False}, "torn"),
        ({"sequence": 3}, "sequence"),
    ],
)
def test_a_footer_that_cannot_be_ends_the_channel(change: dict, why: str) -> None:
    good = {"sequence": 0, "generation": 1, "last_credit": False, "notified": False}
    state = ReceiverState(4)
    assert step_receiver(state, Look(None)) == (state, ())
    assert step_receiver(state, Look(Buffer(**good)))[1] == (Delivered(0),)
    state, effects = step_receiver(state, Look(Buffer(**{**good, **change})))
    assert effects == (Ended(why),)
    assert step_receiver(state, Look(Buffer(**good)))[1] == (Ended(why),)


def test_a_sender_without_credits_is_refused() -> None:
    state = SenderState(2)
    sent = []
    for _ in range(3):
        state, (effect,) = step_sender(state, Send())
        sent.append(effect)
    assert [isinstance(e, Buffer) for e in sent] == [True, True, False]
    assert sent[1] == Buffer(1, 1, last_credit=True, notified=True) and sent[2] == Refused()
