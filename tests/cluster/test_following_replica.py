"""A replica's way from one leader to the next: tables of events, and what each makes it do."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from kdirect.cluster.following_replica import (
    NO_EPOCH,
    AskEpochEnd,
    BeginToLead,
    Committed,
    Confirm,
    EpochEnd,
    Fence,
    Fenced,
    Follow,
    Grant,
    OutOfRange,
    Phase,
    ShowHighWatermark,
    StartOver,
    TellLoss,
    Told,
    Truncate,
    Truncated,
    begin,
    step,
)
from kdirect.cluster.partition_state import NO_LEADER

OWN, LEADER, OTHER = 0, 1, 2


class Row(NamedTuple):
    """An event, the effects, and the phase after it."""

    event: Any
    effects: tuple[Any, ...]
    phase: Phase


def answer(
    epoch: int, end: int, asked: int, *, to: int = 1, of: int = 5, log: tuple[int, int]
) -> EpochEnd:
    """The answer to question `to` of a leader of epoch `of`, which has the offsets `log`."""
    return EpochEnd(of, to, asked, epoch, end, *log)


FENCING, COMPARING, TRUNCATING = Phase.FENCING, Phase.COMPARING, Phase.TRUNCATING
FOLLOWING, LEADING, IDLE = Phase.FOLLOWING, Phase.LEADING, Phase.IDLE

# The replica has records up to offset 10, the last of epoch 4, and its high watermark is 6.
LEARN = Row(Follow(LEADER, 5), (Fence(5),), FENCING)
FENCE = Row(Fenced(5, 10, 4, 6), (AskEpochEnd(LEADER, 5, 4, 1),), COMPARING)
START = (Grant(LEADER, 5, 10), Confirm(5, 10))
AGREE = Row(answer(4, 12, 4, log=(0, 12)), START, FOLLOWING)

WAYS = {
    "its log is a part of the leader's": [LEARN, FENCE, AGREE],
    "its end is the leader's log start": [
        LEARN,
        FENCE,
        Row(answer(4, 12, 4, log=(10, 12)), START, FOLLOWING),
    ],
    "its last epoch is longer than the leader's part of it": [
        LEARN,
        FENCE,
        Row(answer(4, 8, 4, log=(0, 20)), (Truncate(4, 8),), TRUNCATING),
        Row(Truncated(8, 4), (AskEpochEnd(LEADER, 5, 4, 2),), COMPARING),
        Row(answer(4, 8, 4, to=2, log=(0, 20)), (Grant(LEADER, 5, 8), Confirm(5, 8)), FOLLOWING),
    ],
    "the leader does not know its last epoch (KIP-279)": [
        LEARN,
        FENCE,
        Row(answer(3, 9, 4, log=(0, 20)), (Truncate(3, 9),), TRUNCATING),
        Row(Truncated(7, 2), (AskEpochEnd(LEADER, 5, 2, 2),), COMPARING),
        Row(answer(2, 7, 2, to=2, log=(0, 20)), (Grant(LEADER, 5, 7), Confirm(5, 7)), FOLLOWING),
    ],
    "all that it has is below the leader's log start": [
        LEARN,
        FENCE,
        Row(answer(4, 12, 4, log=(12, 20)), (StartOver(12),), TRUNCATING),
        Row(Truncated(12, NO_EPOCH), (AskEpochEnd(LEADER, 5, NO_EPOCH, 2),), COMPARING),
        Row(
            answer(NO_EPOCH, 12, NO_EPOCH, to=2, log=(12, 20)),
            (Grant(LEADER, 5, 12), Confirm(5, 12)),
            FOLLOWING,
        ),
    ],
    "the leader keeps newer epochs only, from an offset below its end": [
        LEARN,
        FENCE,
        Row(answer(4, 7, 4, log=(7, 20)), (StartOver(7),), TRUNCATING),
    ],
    "the leader's log has moved on while it started over": [
        LEARN,
        FENCE,
        Row(answer(4, 12, 4, log=(12, 20)), (StartOver(12),), TRUNCATING),
        Row(Truncated(12, NO_EPOCH), (AskEpochEnd(LEADER, 5, NO_EPOCH, 2),), COMPARING),
        Row(answer(NO_EPOCH, 15, NO_EPOCH, to=2, log=(15, 20)), (StartOver(15),), TRUNCATING),
    ],
    "an unclean election lost committed records": [
        LEARN,
        FENCE,
        Row(answer(3, 5, 4, log=(0, 5)), (TellLoss(5, 6), Truncate(3, 5)), TRUNCATING),
    ],
    "an unclean election lost all records": [
        LEARN,
        FENCE,
        Row(answer(4, 0, 4, log=(0, 0)), (TellLoss(0, 6), StartOver(0)), TRUNCATING),
    ],
    "an answer of a leader of another epoch, or to another question, is nothing": [
        LEARN,
        FENCE,
        Row(answer(4, 3, 4, of=4, log=(0, 3)), (), COMPARING),
        Row(answer(4, 3, 4, of=6, log=(0, 3)), (), COMPARING),
        Row(answer(3, 3, 3, log=(0, 3)), (), COMPARING),
        AGREE,
        Row(answer(4, 3, 4, log=(0, 3)), (), FOLLOWING),
    ],
    "an old epoch is nothing": [
        LEARN,
        Row(Follow(OTHER, 4), (), FENCING),
        Row(Follow(OTHER, 5), (), FENCING),
        Row(Fenced(4, 3, 1, 0), (), FENCING),
        FENCE,
    ],
    "a newer epoch while it compares": [
        LEARN,
        FENCE,
        Row(Follow(OTHER, 6), (Fence(6),), FENCING),
        Row(answer(4, 12, 4, log=(0, 12)), (), FENCING),
        Row(Fenced(6, 10, 4, 6), (AskEpochEnd(OTHER, 6, 4, 1),), COMPARING),
        Row(answer(4, 12, 4, log=(0, 12)), (), COMPARING),
    ],
    "two newer epochs while it truncates: the cut ends first": [
        LEARN,
        FENCE,
        Row(answer(4, 8, 4, log=(0, 20)), (Truncate(4, 8),), TRUNCATING),
        Row(Follow(OTHER, 6), (), TRUNCATING),
        Row(Follow(OWN, 7), (), TRUNCATING),
        Row(Follow(OTHER, 6), (), TRUNCATING),
        Row(Truncated(8, 4), (Fence(7),), FENCING),
        Row(Fenced(7, 8, 4, 6), (BeginToLead(7, 8, 6),), LEADING),
    ],
    "it is to lead: nobody else can write when it does": [
        Row(Follow(OWN, 5), (Fence(5),), FENCING),
        Row(Fenced(5, 11, 4, 6), (BeginToLead(5, 11, 6),), LEADING),
        Row(Told(5, 9), (), LEADING),
        Row(Follow(LEADER, 6), (Fence(6),), FENCING),
    ],
    "it leads again in the next epoch": [
        Row(Follow(OWN, 5), (Fence(5),), FENCING),
        Row(Fenced(5, 11, 4, 6), (BeginToLead(5, 11, 6),), LEADING),
        Row(Follow(OWN, 6), (Fence(6),), FENCING),
        Row(Fenced(6, 14, 5, 12), (BeginToLead(6, 14, 12),), LEADING),
    ],
    "nobody leads": [
        Row(Follow(NO_LEADER, 5), (Fence(5),), FENCING),
        Row(Fenced(5, 10, 4, 6), (), IDLE),
        Row(Follow(LEADER, 6), (Fence(6),), FENCING),
    ],
    "it confirms what this epoch's leader has written": [
        LEARN,
        Row(Committed(11, 4, 4), (), FENCING),
        FENCE,
        AGREE,
        Row(Committed(11, 4, 4), (), FOLLOWING),
        Row(Committed(11, 4, 5), (Confirm(5, 11),), FOLLOWING),
        Row(Committed(13, 5, 5), (Confirm(5, 13),), FOLLOWING),
    ],
    "it shows what it has of the leader's high watermark": [
        LEARN,
        FENCE,
        Row(Told(5, 12), (), COMPARING),
        AGREE,
        Row(Told(4, 12), (), FOLLOWING),
        Row(Told(5, 5), (), FOLLOWING),
        Row(Told(5, 12), (ShowHighWatermark(10),), FOLLOWING),
        Row(Committed(11, 4, 5), (Confirm(5, 11), ShowHighWatermark(11)), FOLLOWING),
        Row(Committed(14, 5, 5), (Confirm(5, 14), ShowHighWatermark(12)), FOLLOWING),
        Row(Told(5, 11), (), FOLLOWING),
    ],
    "what the leader told in an older epoch is forgotten": [
        LEARN,
        FENCE,
        AGREE,
        Row(Told(5, 14), (ShowHighWatermark(10),), FOLLOWING),
        Row(Follow(OTHER, 6), (Fence(6),), FENCING),
        Row(Fenced(6, 10, 4, 10), (AskEpochEnd(OTHER, 6, 4, 1),), COMPARING),
        Row(EpochEnd(6, 1, 4, 4, 10, 0, 10), (Grant(OTHER, 6, 10), Confirm(6, 10)), FOLLOWING),
        Row(Committed(12, 6, 6), (Confirm(6, 12),), FOLLOWING),
    ],
    "the leader has deleted what it lacks": [
        LEARN,
        FENCE,
        AGREE,
        Row(OutOfRange(4, 30), (), FOLLOWING),
        Row(OutOfRange(5, 10), (), FOLLOWING),
        Row(OutOfRange(5, 30), (Fence(5),), FENCING),
        Row(Fenced(5, 10, 4, 6), (AskEpochEnd(LEADER, 5, 4, 2),), COMPARING),
        Row(answer(4, 8, 4, to=1, log=(0, 8)), (), COMPARING),  # of the same epoch, but old
        Row(answer(4, 30, 4, to=2, log=(30, 40)), (StartOver(30),), TRUNCATING),
        Row(Truncated(30, NO_EPOCH), (AskEpochEnd(LEADER, 5, NO_EPOCH, 3),), COMPARING),
        Row(
            answer(NO_EPOCH, 30, NO_EPOCH, to=3, log=(30, 40)),
            (Grant(LEADER, 5, 30), Confirm(5, 30)),
            FOLLOWING,
        ),
    ],
}


@pytest.mark.parametrize("way", WAYS)
def test_way_to_a_leader(way: str) -> None:
    replica = begin(OWN, end=10, last_epoch=4, high_watermark=6)
    for number, (event, effects, phase) in enumerate(WAYS[way]):
        replica, done = step(replica, event)
        assert (done, replica.phase) == (effects, phase), f"row {number}: {event}"


def test_every_event_in_every_phase_is_answered() -> None:
    """No event raises, wherever it comes; and none but `Follow` gives up a phase that it is not
    for."""
    reached = {}
    for rows in WAYS.values():
        replica = begin(OWN, end=10, last_epoch=4, high_watermark=6)
        for row in rows:
            replica, _ = step(replica, row.event)
            reached[replica.phase] = replica
    meant = {
        Fenced: {FENCING},
        EpochEnd: {COMPARING},
        Truncated: {TRUNCATING},
        Committed: {FOLLOWING},
        Told: {FOLLOWING},
        OutOfRange: {FOLLOWING},
    }
    assert set(reached) | {IDLE} == set(Phase)
    for phase, replica in reached.items():
        for event in (row.event for rows in WAYS.values() for row in rows):
            after, effects = step(replica, event)
            if not isinstance(event, Follow) and phase not in meant[type(event)]:
                assert (after, effects) == (replica, ())


def test_an_emptied_log_goes_on_where_it_ends() -> None:
    """Retention may empty a replica that is in sync.  If it began again at the leader's log start,
    it would lack committed records while the controller may still elect it."""
    replica = begin(OWN, end=10, last_epoch=NO_EPOCH, high_watermark=10)
    replica, _ = step(replica, Follow(LEADER, 5))
    replica, asked = step(replica, Fenced(5, 10, NO_EPOCH, 10))
    assert asked == (AskEpochEnd(LEADER, 5, NO_EPOCH, 1),)
    _, started = step(replica, answer(NO_EPOCH, 0, NO_EPOCH, log=(0, 12)))
    assert started == START
    _, over = step(replica, answer(NO_EPOCH, 0, NO_EPOCH, log=(0, 8)))
    assert over == (TellLoss(0, 10), StartOver(0))


def test_a_high_watermark_is_never_above_the_log() -> None:
    assert begin(OWN, end=3, last_epoch=1, high_watermark=9).high_watermark == 3
    replica = begin(OWN, end=10, last_epoch=4, high_watermark=6)
    for event in (
        Follow(LEADER, 5),
        Fenced(5, 10, 4, 6),
        answer(3, 5, 4, log=(0, 5)),
        Truncated(5, 3),
    ):
        replica, _ = step(replica, event)
    assert replica.high_watermark == 5
