"""A leader: which pages count, and when windows are emitted."""

from __future__ import annotations

from typing import Any

import pytest

from kdirect.errors import StateProtocolError
from kdirect.state import leader
from kdirect.state.batches import Partition, Phase, Progress, deal_vparts
from kdirect.state.leader import (
    Drop,
    DropReason,
    Hold,
    Leading,
    MarkDirty,
    MarkDone,
    Merge,
    OwnRead,
    Page,
    Refuse,
    Report,
    Trigger,
)
from kdirect.state.messages import StartBatch
from kdirect.state.windows import TIME_MIN

A, B = Partition("a", 0), Partition("a", 1)
VPARTS = deal_vparts(2)


def start(batch: int = 3, **changes: Any) -> StartBatch:
    values = {
        "attempt": 5, "batch": batch, "ranges": {}, "clock": {A: 10, B: 20}, "idle": frozenset(),
        "closed_before": 10, "now_us": 0,
    }  # fmt: skip
    return StartBatch(**{**values, **changes})


def running(**changes: Any) -> Leading:
    leading, effects = leader.step(leader.begin(0, 5, VPARTS), start(**changes))
    assert effects == (MarkDirty(3),)
    return leading


def page(epoch: int = 0, sequence: int = 0, **changes: Any) -> Page:
    return Page(**{"sender": 1, "attempt": 5, "batch": 3, "epoch": epoch, "sequence": sequence,
                   **changes})  # fmt: skip


def feed(leading: Leading, *events: Any) -> tuple[Leading, list]:
    found = []
    for event in events:
        leading, effects = leader.step(leading, event)
        found += effects
    return leading, found


def test_a_batch_from_its_start_to_its_report() -> None:
    leading, effects = feed(
        running(),
        page(0, 0),
        page(0, 1, ends_epoch=True),
        OwnRead({A: 40}),
        page(1, 0, ends_epoch=True, clock={B: 30}),
    )
    after = Progress(clock={A: 40, B: 30}, closes=30)
    assert effects[:-1] == [
        Merge(1), Merge(1), Merge(1), Trigger(10, 30, True), MarkDone(3, Phase.DONE, after)
    ]  # fmt: skip
    (report,) = [e for e in effects if isinstance(e, Report)]
    assert (report.message.executor, report.message.after) == (0, after)
    assert leading.running is None


def test_nothing_triggers_before_everybody_has_ended() -> None:
    for event in (OwnRead({A: 99}), page(clock={B: 99})):
        _, effects = feed(running(), event)
        assert not any(isinstance(e, Trigger | MarkDone | Report) for e in effects)


def test_the_slowest_partition_closes_and_an_idle_one_does_not_count() -> None:
    ends = (OwnRead({A: 40}), page(clock={B: 25}))
    _, effects = feed(running(), *ends)
    assert Trigger(10, 25, True) in effects
    _, effects = feed(running(idle=frozenset([B])), *ends)
    assert Trigger(10, 40, True) in effects
    _, effects = feed(running(clock={A: TIME_MIN, B: TIME_MIN}), OwnRead({}), page(clock={}))
    assert Trigger(10, 10, True) in effects


@pytest.mark.parametrize(
    ("again", "reason"),
    [
        (page(0, 0), DropReason.REPEATED),
        (page(0, 1, ends_epoch=True), DropReason.REPEATED),
        (page(9, 9, batch=2), DropReason.REPEATED),
        (page(1, 0, attempt=4), DropReason.OLD_ATTEMPT),
        (page(7, 7, attempt=4, batch=9), DropReason.OLD_ATTEMPT),
    ],
)
def test_a_page_that_was_merged_or_is_old_changes_nothing(again: Page, reason: DropReason) -> None:
    leading, _ = feed(running(), page(0, 0), page(0, 1, ends_epoch=True))
    after, effects = feed(leading, again)
    assert (after, effects) == (leading, [Drop(1, reason)])


@pytest.mark.parametrize(
    "wrong",
    [page(0, 1), page(1, 0), page(0, 0, batch=4), page(0, 0, attempt=6), page(3, 0, batch=3)],
)
def test_a_gap_or_a_newer_attempt_names_the_peer(wrong: Page) -> None:
    leading = running()
    after, effects = feed(leading, wrong)
    assert after == leading
    assert effects == [Refuse(1, (5, 3, 0, 0), (wrong.attempt, wrong.batch, *wrong[3:5]))]


def test_a_page_of_the_next_batch_waits_for_it() -> None:
    leading, _ = feed(running(), OwnRead({A: 1}), page(clock={B: 2}))
    early = page(batch=4)
    after, effects = feed(leading, early)
    assert (after, effects) == (leading, [Hold(1)])
    _, effects = feed(leading, page(batch=5))
    assert isinstance(effects[0], Refuse)
    leading, _ = feed(leading, start(4))
    assert feed(leading, early)[1] == [Merge(1)]


def test_before_the_first_batch_pages_wait() -> None:
    leading = leader.begin(0, 5, VPARTS)
    assert feed(leading, page(batch=8))[1] == [Hold(1)]
    assert feed(leading, page(attempt=4))[1] == [Drop(1, DropReason.OLD_ATTEMPT)]
    assert isinstance(feed(leading, page(attempt=6))[1][0], Refuse)


def test_a_sender_that_has_ended_sends_no_more_of_this_batch() -> None:
    leading, _ = feed(running(), page(clock={B: 2}))
    assert isinstance(feed(leading, page(batch=4))[1][0], Refuse)
    assert feed(leading, page())[1] == [Drop(1, DropReason.REPEATED)]


def test_an_executor_that_lost_nothing_leaves_its_state_alone() -> None:
    _, effects = feed(
        leader.begin(0, 5, VPARTS),
        start(vparts=(VPARTS[1],)),
        OwnRead({A: 40}),
        page(clock={B: 30}),
    )
    assert not any(isinstance(e, MarkDirty | Trigger | MarkDone) for e in effects)
    assert isinstance(effects[-1], Report) and effects[-1].message.after.closes == 30


def test_a_repetition_of_a_committed_batch_keeps_no_output() -> None:
    _, effects = feed(running(emit=False), OwnRead({A: 40}), page(clock={B: 30}))
    assert Trigger(10, 30, False) in effects
    assert [e.phase for e in effects if isinstance(e, MarkDone)] == [Phase.CLEAN]


@pytest.mark.parametrize(
    "event", [start(4), start(3), start(4, attempt=6), OwnRead({A: 1})], ids=repr
)
def test_what_is_out_of_turn_is_refused(event: Any) -> None:
    leading, _ = feed(running(), OwnRead({A: 1}))
    with pytest.raises(StateProtocolError):
        leader.step(leading, event)


def test_batches_follow_each_other() -> None:
    leading, _ = feed(running(), OwnRead({A: 1}), page(clock={B: 2}))
    with pytest.raises(StateProtocolError, match=r"batch 5 .* out of turn"):
        leader.step(leading, start(5))


def test_one_executor_alone_is_a_whole_job() -> None:
    leading, effects = feed(leader.begin(0, 5, deal_vparts(1)), start(), OwnRead({A: 40, B: 30}))
    assert Trigger(10, 30, True) in effects and leading.running is None
