"""What a leader shows and proposes: tables of events, and what each makes it do."""

from __future__ import annotations

from typing import Any

import pytest

from kdirect.cluster.leading_replica import (
    Appended,
    Assigned,
    Configured,
    Confirmed,
    Leading,
    Learned,
    LinkLost,
    Propose,
    Refused,
    Registered,
    ShowHighWatermark,
    Ticked,
    begin,
    epoch_end,
    step,
)
from kdirect.cluster.partition_state import NO_INCARNATION, PartitionState, leads

EPOCH = 5
LIVES = ((0, 10), (1, 11), (2, 12))


def state(*in_sync: int, version: int = 7, eligible: tuple[int, ...] = ()) -> PartitionState:
    return PartitionState(0, EPOCH, in_sync, version, eligible, incarnation=10)


def leader(of: PartitionState, *, hw: int = 6, min_in_sync: int = 1) -> Leading:
    """Broker 0, of replicas 0, 1 and 2, begins with a log that ends at 10."""
    leading, _ = begin(
        0,
        of,
        (0, 1, 2),
        end=10,
        high_watermark=hw,
        now_ms=0,
        min_in_sync=min_in_sync,
        registered=LIVES,
    )
    return leading


def confirmed(broker: int, end: int, *, incarnation: int = 0, epoch: int = EPOCH) -> Confirmed:
    return Confirmed(broker, incarnation or 10 + broker, epoch, end)


def full(broker: int, end: int, *, level: bool = False) -> Confirmed:
    """Without room for what follows."""
    return confirmed(broker, end)._replace(level=level, is_full=True)


def shows(offset: int) -> tuple[ShowHighWatermark]:
    return (ShowHighWatermark(offset),)


def proposes(*in_sync: int, heard: tuple[int, ...], version: int = 7) -> tuple[Propose]:
    incarnations = tuple(10 + b if b == 0 or b in heard else NO_INCARNATION for b in in_sync)
    return (Propose(in_sync, incarnations, version),)


ALL, TWO, ALONE = state(0, 1, 2), state(0, 1), state(0)

# (state it begins with, min.insync.replicas, [(event, effects)])
WAYS: dict[str, tuple[PartitionState, int, list[tuple[Any, tuple[Any, ...]]]]] = {
    "the least end counts, and whoever was not heard in this epoch holds it": (
        ALL,
        1,
        [
            (Appended(14), ()),
            (confirmed(1, 12), ()),
            (confirmed(2, 9), shows(9)),
            (confirmed(2, 14), shows(12)),
            (confirmed(1, 11), ()),  # an older one, late
            (confirmed(1, 14), shows(14)),
        ],
    ),
    "confirmations that cannot be": (
        ALL,
        1,
        [
            (confirmed(2, 10), ()),
            (confirmed(1, 10, epoch=EPOCH - 1), ()),
            (confirmed(1, 10, epoch=EPOCH + 1), ()),
            (confirmed(1, 11), ()),
            (confirmed(3, 10), ()),
            (confirmed(0, 10), ()),
            (confirmed(1, 10), shows(10)),
        ],
    ),
    "a follower that restarted has what its new incarnation confirms": (
        ALL,
        1,
        [
            (confirmed(2, 10), ()),
            (confirmed(1, 8), shows(8)),
            (confirmed(1, 7, incarnation=99), proposes(0, 2, heard=(2,))),
            (confirmed(1, 10), ()),  # of the dead process
            (confirmed(1, 10, incarnation=99), shows(10)),
        ],
    ),
    "the larger of old and proposed counts when one leaves": (
        TWO,
        1,
        [
            (confirmed(1, 10), shows(10)),
            (LinkLost(1), proposes(0, heard=())),
            (Appended(12), ()),
            (confirmed(1, 11), shows(11)),
            (Learned(state(0, version=8)), shows(12)),
        ],
    ),
    "the larger of old and proposed counts when one joins": (
        ALONE,
        1,
        [
            (confirmed(1, 10), proposes(0, 1, heard=(1,))),
            (Appended(12), ()),
            (confirmed(1, 11), shows(11)),
            (Refused(6), ()),  # of an older version
            (Refused(7), shows(12)),
        ],
    ),
    "a follower joins at the high watermark and at the epoch's start": (
        ALONE,
        3,  # so the high watermark stays below the epoch's start
        [
            (confirmed(1, 6), ()),
            (confirmed(1, 9), ()),
            (confirmed(1, 10), proposes(0, 1, heard=(1,))),
        ],
    ),
    "a follower does not join with an incarnation that is not registered": (
        ALONE,
        1,
        [
            (confirmed(1, 10, incarnation=99), ()),
            (Registered(((0, 10), (1, 99), (2, 12))), (Propose((0, 1), (10, 99), 7),)),
        ],
    ),
    "nor over a link that is lost": (
        ALONE,
        3,
        [(confirmed(1, 9), ()), (LinkLost(1), ()), (Ticked(10), ())],
    ),
    "one proposal at a time; what is left comes with the next version": (
        ALONE,
        1,
        [
            (confirmed(1, 10), proposes(0, 1, heard=(1,))),
            (confirmed(2, 10), ()),
            (Ticked(100), ()),
            (Learned(state(0, 1, version=8)), proposes(0, 1, 2, heard=(1, 2), version=8)),
            (Learned(state(0, 1, version=8)), ()),
            (Learned(state(0, 1, 2, version=9)), ()),
        ],
    ),
    "a follower that is linked was taken out: it is proposed again": (
        ALL,
        1,
        [
            (confirmed(1, 10), ()),
            (confirmed(2, 10), shows(10)),
            (Learned(state(0, 1, version=8)), proposes(0, 1, 2, heard=(1, 2), version=8)),
        ],
    ),
    "after a refusal it proposes again at a tick, not at each confirmation": (
        ALONE,
        1,
        [
            (confirmed(1, 10), proposes(0, 1, heard=(1,))),
            (Refused(7), ()),
            (Appended(11), shows(11)),
            (confirmed(1, 11), ()),
            (Refused(7), ()),
            (Ticked(10), proposes(0, 1, heard=(1,))),
        ],
    ),
    "a broker that is gone leaves at once, heard or not": (
        ALL,
        1,
        [
            (confirmed(1, 10), ()),
            (Registered(((0, 10), (1, 11))), proposes(0, 1, heard=(1,))),
        ],
    ),
    "so does one that has restarted": (
        ALL,
        1,
        [
            (confirmed(1, 10), ()),
            (Registered(((0, 10), (1, 99), (2, 12))), proposes(0, 2, heard=())),
        ],
    ),
    "one that has no room leaves at once, and does not come back before it gets further": (
        ALL,
        1,
        [
            (confirmed(1, 10), ()),
            (confirmed(2, 10), shows(10)),
            (Appended(12), ()),
            (full(1, 10), proposes(0, 2, heard=(2,))),
            (Learned(state(0, 2, version=8)), ()),
            (confirmed(2, 11), shows(11)),
            (full(1, 11), ()),  # level with what readers see, or with the log's end
            (full(1, 11, level=True), ()),
            (Ticked(10), ()),
            (confirmed(2, 12), shows(12)),
            (confirmed(1, 12), proposes(0, 1, 2, heard=(1, 2), version=8)),
        ],
    ),
    "below min.insync.replicas the high watermark stands still": (
        TWO,
        2,
        [
            (confirmed(1, 10), shows(10)),
            (LinkLost(1), proposes(0, heard=())),
            (Appended(12), ()),
            # Still in sync, by the state and by the controller's eligible replicas if it agreed.
            (confirmed(1, 11), shows(11)),
            (LinkLost(1), ()),
            (Learned(state(0, version=8, eligible=(1,))), ()),
            (Appended(13), ()),
            (Configured(1, 30_000), ()),  # the controller still counts on replica 1
            (confirmed(1, 13), proposes(0, 1, heard=(1,), version=8)),
            (Learned(state(0, 1, version=9)), shows(13)),
        ],
    ),
    "an open proposal to join does not make enough": (
        ALONE,
        2,
        [
            (confirmed(1, 10), proposes(0, 1, heard=(1,))),
            (Appended(12), ()),
            (confirmed(1, 12), ()),
            (Learned(state(0, 1, version=8)), shows(12)),
        ],
    ),
    "another epoch's state is not this leader's": (
        TWO,
        1,
        [
            (Learned(state(0, version=8)._replace(leader_epoch=EPOCH + 1)), ()),
            (confirmed(1, 9), shows(9)),
        ],
    ),
    "a replica that leaves counts until the controller has agreed": (
        TWO,
        1,
        [
            (confirmed(1, 9), shows(9)),
            (Assigned((0, 2)), proposes(0, heard=())),
            (Appended(12), ()),
            (confirmed(1, 11), shows(11)),
            (Learned(state(0, version=8)), shows(12)),
            (confirmed(1, 12), ()),
        ],
    ),
    "a replica that is added joins when it is level": (
        TWO,
        1,
        [
            (confirmed(1, 10), shows(10)),
            (Registered((*LIVES, (3, 13))), ()),
            (confirmed(3, 10), ()),
            (Assigned((0, 1, 2, 3)), ()),
            (confirmed(3, 4), ()),
            (confirmed(3, 10), proposes(0, 1, 3, heard=(1, 3))),
        ],
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_a_leader_does(way: str) -> None:
    of, min_in_sync, rows = WAYS[way]
    leading = leader(of, min_in_sync=min_in_sync)
    if len(of.in_sync) == 1 and min_in_sync == 1:
        assert leading.high_watermark == 10
    for number, (event, effects) in enumerate(rows):
        before = leading.high_watermark
        leading, done = step(leading, event)
        assert done == effects, f"row {number}: {event}"
        assert leading.high_watermark >= before


def test_it_begins_with_what_it_knows() -> None:
    leading, shown = begin(0, ALL, (0, 1, 2), end=10, high_watermark=12, now_ms=0)
    assert (leading.epoch_start, shown) == (10, shows(10))
    assert leading.knows_high_watermark
    assert not leader(ALL).knows_high_watermark  # KIP-207: 6 may be below what was shown
    alone, shown = begin(0, ALONE, (0, 1, 2), end=10, high_watermark=6, now_ms=0)
    assert shown == shows(10) and alone.knows_high_watermark


def test_min_in_sync_above_the_replicas_counts_as_their_number() -> None:
    """As Kafka's: a topic of one replica works under ``min.insync.replicas=2``."""
    _, shown = begin(0, ALONE, (0,), end=10, high_watermark=6, now_ms=0, min_in_sync=2)
    assert shown == shows(10)


def test_an_incarnation_leads_only_where_it_was_elected() -> None:
    assert leads(ALL, 0, 10)
    assert not leads(ALL, 0, 11)  # restarted in the same epoch: its records may be gone
    assert not leads(ALL, 1, 10)
    assert leads(ALL._replace(incarnation=NO_INCARNATION), 0, 11)


def level(leading: Leading) -> Leading:
    for broker in (1, 2):
        leading, _ = step(leading, confirmed(broker, 10))
    return leading


def test_a_follower_that_lags_leaves() -> None:
    leading = level(leader(ALL))
    leading, _ = step(leading, Appended(11))
    for broker, end in ((1, 11), (2, 10)):
        leading, _ = step(leading, confirmed(broker, end))
    effects: tuple[Any, ...] = ()
    ticks = 0
    while not effects:
        ticks += 1
        leading, effects = step(leading, Ticked(10_000 * ticks))
        assert ticks < 10
    # Level at the beginning, and not for more than 30 s at the tick at 40 s.
    assert (ticks, effects) == (4, proposes(0, 1, heard=(1,)))


def test_a_follower_that_stands_still_stays_out_where_the_high_watermark_does() -> None:
    leading = level(leader(ALL, min_in_sync=2))
    leading, _ = step(leading, Appended(11))
    proposed: list[Any] = []
    for tick in range(1, 20):
        leading, effects = step(leading, Ticked(10_000 * tick))
        for effect in effects:
            proposed.append(effect)
            at = leading.state.version + 1
            leading, more = step(leading, Learned(state(*effect.in_sync, version=at)))
            proposed += more
    assert proposed == [*proposes(0, heard=())]
    leading, effects = step(leading, confirmed(1, 11))
    assert effects == proposes(0, 1, heard=(1,), version=8)


def test_a_follower_that_was_never_heard_leaves_though_the_log_stands_still() -> None:
    leading, _ = step(leader(ALL), confirmed(1, 10))
    done = []
    for tick in range(1, 8):
        leading, effects = step(leading, Ticked(10_000 * tick))
        done += effects
    assert done == [*proposes(0, 1, heard=(1,))]


def test_nobody_lags_while_the_log_stands_still() -> None:
    leading = level(leader(ALL))
    for tick in range(1, 20):
        leading, effects = step(leading, Ticked(10_000 * tick))
        assert effects == ()
    # After a long rest a record has just come: whoever lacks it was level a tick ago.
    leading, _ = step(leading, Appended(11))
    _, effects = step(leading, Ticked(10_000 * 20))
    assert effects == ()


def test_a_follower_that_is_never_level_but_follows_stays() -> None:
    """Under load a follower never has everything; it has what there was a tick ago."""
    leading = level(leader(ALL))
    for tick in range(1, 20):
        leading, _ = step(leading, Appended(10 + 5 * tick))
        for broker in (1, 2):
            leading, _ = step(leading, confirmed(broker, 10 + 5 * tick - 1))
        leading, effects = step(leading, Ticked(10_000 * tick))
        assert effects == ()


@pytest.mark.parametrize("now", [-(10**9), 0, 10**9], ids=["back", "still", "forward"])
def test_a_clock_that_jumps_makes_nobody_leave(now: int) -> None:
    leading = level(leader(ALL))
    leading, _ = step(leading, Appended(11))
    leading, effects = step(leading, Ticked(now))
    assert effects == ()
    # And time goes on from there.
    done: list[Any] = []
    for tick in range(1, 8):
        leading, effects = step(leading, Ticked(now + 10_000 * tick))
        done += effects
    assert done == [*proposes(0, heard=())]


@pytest.mark.parametrize(
    ("asked", "answer"),
    [(-1, (-1, 5)), (1, (1, 5)), (2, (2, 8)), (3, (2, 8)), (4, (4, 12)), (9, (4, 12))],
)
def test_where_an_epoch_ends(asked: int, answer: tuple[int, int]) -> None:
    assert epoch_end([(2, 5), (4, 8)], 5, 12, asked) == answer


def test_an_empty_log_has_nothing_in_common() -> None:
    assert epoch_end([], 7, 7, 3) == (3, 7)


@pytest.mark.parametrize(
    "events",
    [
        [LinkLost(2)],
        [Registered(LIVES[:2])],
        [Ticked(1), Refused(7), Ticked(2)],
        [Assigned((0, 1))],
    ],
    ids=["its link is lost", "it is gone", "it falls behind", "it is no replica any more"],
)
def test_whoever_is_not_about_to_join_any_more_holds_nothing(events: list[Any]) -> None:
    """A broker died as it was about to join, and the controller, which knew, refused it.  Nobody
    appends then, because everybody waits for acknowledgements: no other event comes."""
    leading = leader(TWO)
    for event, effects in (
        (confirmed(1, 10), shows(10)),
        (confirmed(2, 10)._replace(level=True), proposes(0, 1, 2, heard=(1, 2))),
        (Refused(7), ()),
        (Appended(14), ()),
        (confirmed(1, 14), ()),
    ):
        leading, found = step(leading, event)
        assert found == effects, event
    shown: tuple[Any, ...] = ()
    for event in events:
        leading, found = step(leading, event)
        shown += found
    assert ShowHighWatermark(14) in shown and leading.high_watermark == 14
