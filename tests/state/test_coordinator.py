"""The coordinator: what is durable before what, and who hears of it.  Whole jobs are simulated in
test_simulation.py; here are its rules one at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdirect.errors import BrokerUnavailableError, DataLossError
from kdirect.state import coordinator, messages, ranges
from kdirect.state.batches import (
    BatchRecord,
    Commit,
    Manifest,
    Part,
    Partition,
    Phase,
    Progress,
    Range,
    StateHeader,
)
from kdirect.state.clock import VectorClock
from kdirect.state.job import (
    Asked,
    AskEnds,
    Disconnect,
    Ends,
    Finish,
    Handed,
    HandOut,
    Job,
    LogBatch,
    LogCommit,
    Lost,
    Settings,
    StopAsked,
    Tell,
    WriteAttempt,
    WriteManifest,
)
from kdirect.state.job import Phase as JobPhase
from kdirect.state.plan import AggregatePlan, Input
from kdirect.state.windows import TIME_MIN, Tumbling
from tests.state.topics import ends_of

A, B = Partition("t", 0), Partition("t", 1)
PLAN = AggregatePlan(
    input=Input(topic="t", schema="at long", time="at", idle_timeout_ms=1),
    keys=(),
    window=Tumbling(size_us=5),
    aggregates=("count",),
)


def ends(a: int, b: int, now: int = 100) -> Ends:
    return ends_of({A: a, B: b}, now)


class Driver:
    """Feeds a job and keeps its effects.  Executors do at once what they are told."""

    def __init__(self, **settings: Any) -> None:
        values = {"plan": PLAN, "executors": 2, "starts": {A: 0, B: 0}, **settings}
        self.job, effects = coordinator.open_job(
            Settings(**values), attempt=0, records={}, committed=None, manifests=()
        )
        self.effects: list[Any] = list(effects)

    def feed(self, *events: Any) -> list[Any]:
        new: list[Any] = []
        for event in events:
            self.job, effects = coordinator.step(self.job, event)
            new += effects
        self.effects += new
        return new

    def meet(self, *events: Any, header: StateHeader | None = None) -> None:
        attempt = self.job.attempt
        hellos = [
            messages.Hello(executor=i, token="", process_id=1, host="", address={}, header=header)
            for i in range(2)
        ]
        both = [messages.Listening(attempt=attempt, executor=i) for i in range(2)]
        both += [messages.Ready(attempt=attempt, executor=i) for i in range(2)]
        self.feed(*hellos, *(events or (ends(0, 0),)), *both)

    def done(self, closes: int, number: int | None = None, **clock: int) -> list[Any]:
        batch = self.job.last if number is None else number
        after = Progress(clock={A: clock.get("a", 0), B: clock.get("b", 0)}, closes=closes)
        return self.feed(
            *(
                messages.BatchDone(attempt=self.job.attempt, batch=batch, executor=i, after=after)
                for i in range(2)
            )
        )


def kinds(effects: list[Any]) -> list[type]:
    return [type(effect) for effect in effects]


def test_an_attempt_is_durable_before_anybody_is_told() -> None:
    driver = Driver()
    assert driver.effects == [WriteAttempt(1), AskEnds(False)]
    driver.meet()
    assert driver.job.phase is JobPhase.WAITING
    told = [e.message.type for e in driver.effects if isinstance(e, Tell) and e.executor == 0]
    assert told == ["welcome", "restore", "connect"]


def test_nothing_runs_until_the_caller_asks() -> None:
    driver = Driver()
    driver.meet()
    assert not driver.feed(ends(5, 5))
    assert driver.feed(Asked(100)) == [AskEnds(False)]


def test_a_batch_is_logged_before_it_runs_and_a_commit_before_the_next() -> None:
    driver = Driver()
    driver.meet()
    effects = driver.feed(Asked(100), ends(5, 3))
    assert kinds(effects) == [AskEnds, LogBatch, Tell, Tell]
    record = effects[1].record
    assert record.ranges == {A: Range(0, 5), B: Range(0, 3)}
    assert (record.closed_before, record.clock) == (TIME_MIN, {A: TIME_MIN, B: TIME_MIN})
    assert [e.message.ranges for e in effects[2:]] == [{A: Range(0, 5)}, {B: Range(0, 3)}]
    over = messages.BatchOver(attempt=1, batch=0)
    assert driver.done(7, a=9, b=7) == [Tell(0, over), Tell(1, over), HandOut(0)]
    assert driver.feed(Handed(0)) == []
    effects = driver.feed(Asked(110), ends(6, 3, 110))
    assert kinds(effects) == [LogCommit, AskEnds, LogBatch, Tell, Tell]
    assert effects[0].commit.after.closes == effects[2].record.closed_before == 7
    assert effects[2].record.ranges == {A: Range(5, 6), B: Range(3, 3)}


def test_all_hear_that_a_batch_is_over_when_the_last_one_has_done_it() -> None:
    """A process may end then; before, the others would lose it in the midst of the batch."""
    driver = Driver()
    driver.meet()
    driver.feed(Asked(100), ends(5, 3))
    done = [
        messages.BatchDone(
            attempt=1, batch=0, executor=i, after=Progress(clock={A: 9, B: 7}, closes=7)
        )
        for i in range(2)
    ]
    assert driver.feed(done[0]) == []
    assert {Tell(i, messages.BatchOver(attempt=1, batch=0)) for i in range(2)} <= set(
        driver.feed(done[1])
    )


def test_a_loss_while_the_next_batch_is_not_due_is_recovered_from_at_once() -> None:
    """The answer that was waited for came after trigger_interval, and nothing happened until then;
    a job that was stopped meanwhile took no snapshot."""
    driver = Driver()
    driver.meet()
    assert driver.feed(Asked(100), ends(0, 0)) == [AskEnds(False), AskEnds(True)]
    assert driver.feed(Lost(1)) == [WriteAttempt(2), Disconnect(0), AskEnds(False)]


def test_output_that_did_not_reach_the_caller_is_handed_out_again() -> None:
    driver = Driver()
    driver.meet()
    driver.feed(Asked(100), ends(5, 3))
    driver.done(7, a=9, b=7)
    effects = driver.feed(Lost(1))
    assert effects[:2] == [WriteAttempt(2), Disconnect(0)]
    after = Progress(clock={A: 9, B: 7}, closes=7)
    driver.effects.clear()
    kept = StateHeader(
        plan_hash=PLAN.hash, executor=0, executors=2, vparts=(0, 128), attempt=1, batch=0,
        phase=Phase.DONE, after=after,
    )  # fmt: skip
    for i in range(2):
        header = replace(kept, executor=i, vparts=(128 * i, 128 * i + 128))
        driver.feed(
            messages.Hello(executor=i, token="", process_id=1, host="", address={}, header=header)
        )
    driver.feed(ends(5, 3))
    for i in range(2):
        driver.feed(messages.Listening(attempt=2, executor=i))
    for i in range(2):
        driver.feed(messages.Ready(attempt=2, executor=i))
    assert driver.effects[-1] == HandOut(0)
    assert not any(isinstance(e, Tell) and e.message.type == "restore" for e in driver.effects)
    effects = driver.feed(Handed(0), Asked(120))
    assert effects[0] == LogCommit(Commit(number=0, after=after))


def test_where_nothing_is_new_the_topics_are_asked_after_a_pause() -> None:
    driver = Driver()
    driver.meet()
    assert driver.feed(Asked(100), ends(0, 0)) == [AskEnds(False), AskEnds(True)]


def test_an_idle_partition_lets_windows_close_in_a_batch_of_nothing() -> None:
    driver = Driver()
    driver.meet()
    driver.feed(Asked(100), ends(5, 0))
    driver.done(TIME_MIN, a=50, b=TIME_MIN)
    driver.feed(Handed(0), Asked(200))
    assert driver.feed(ends(5, 0, 200)) == [AskEnds(True)]
    effects = driver.feed(ends(5, 0, 1_200))
    assert kinds(effects) == [LogBatch, Tell, Tell]
    record = effects[0].record
    assert record.idle == {A, B}
    assert all(r.start == r.end for r in record.ranges.values())


def test_snapshots_are_of_committed_batches_and_exist_when_all_parts_do() -> None:
    driver = Driver(snapshot_interval_us=50)
    driver.meet()
    driver.feed(Asked(100), ends(5, 3))
    assert kinds(driver.done(7)) == [Tell, Tell, HandOut]
    effects = driver.feed(Handed(0), Asked(160))
    assert kinds(effects) == [LogCommit, Tell, Tell, AskEnds]
    effects.pop()
    assert [e.message.type for e in effects[1:]] == ["take_snapshot"] * 2
    parts = [
        Part(file=e.message.file, first=128 * i, last=128 * i + 128, size=1, crc=1)
        for i, e in enumerate(effects[1:])
    ]
    said = [
        messages.SnapshotDone(attempt=1, batch=0, executor=i, part=part)
        for i, part in enumerate(parts)
    ]
    assert driver.feed(said[0]) == []
    # The next batch runs meanwhile, and no other snapshot is begun.
    driver.feed(ends(9, 9))
    assert driver.job.phase is JobPhase.RUNNING and driver.job.steps[0].batch == 1
    (manifest,) = driver.feed(said[1])
    assert manifest == WriteManifest(Manifest(number=0, plan_hash=PLAN.hash, parts=tuple(parts)))
    assert driver.feed(said[1]) == [] and driver.job.phase is JobPhase.RUNNING


def test_a_job_that_stops_waits_for_its_snapshot_and_takes_no_other_of_what_waits() -> None:
    driver = Driver(snapshot_interval_us=50)
    driver.meet()
    driver.feed(Asked(100), ends(5, 3))
    driver.done(7)
    effects = driver.feed(Handed(0), Asked(160), ends(9, 9))
    told = [e.message for e in effects if isinstance(e, Tell)][:2]
    driver.done(9, number=1)
    assert driver.feed(StopAsked(170)) == [] and driver.job.phase is JobPhase.SNAPSHOT
    for i, order in enumerate(told):
        part = Part(file=order.file, first=128 * i, last=128 * i + 128, size=1, crc=1)
        said = messages.SnapshotDone(attempt=1, batch=0, executor=i, part=part)
        effects = driver.feed(said)
    assert kinds(effects) == [WriteManifest, Tell, Tell, Finish]
    assert not effects[1].message.forget  # batch 1 is in no snapshot


def test_a_bounded_job_ends_with_a_snapshot() -> None:
    driver = Driver(until={A: 2, B: 3}, snapshot_interval_us=10**9)
    driver.meet()
    effects = driver.feed(Asked(100), ends(5, 5))
    assert effects[1].record.ranges == {A: Range(0, 2), B: Range(0, 3)}
    driver.done(7)
    effects = driver.feed(Handed(0), Asked(160), ends(9, 9))
    told = [e.message for e in effects if isinstance(e, Tell)]
    assert [message.type for message in told] == ["take_snapshot"] * 2
    assert driver.job.phase is JobPhase.SNAPSHOT
    for i, order in enumerate(told):
        part = Part(file=order.file, first=128 * i, last=128 * i + 128, size=1, crc=1)
        effects = driver.feed(messages.SnapshotDone(attempt=1, batch=0, executor=i, part=part))
    assert kinds(effects) == [WriteManifest, Tell, Tell, Finish]
    assert effects[1].message == messages.Stop(attempt=1, forget=True)


def test_stopping_before_a_commit_leaves_the_output_for_the_next_start() -> None:
    driver = Driver()
    driver.meet()
    driver.feed(Asked(100), ends(5, 3))
    driver.done(7)
    effects = driver.feed(Handed(0), StopAsked(100))
    assert kinds(effects) == [Tell, Tell, Finish] and effects[-1].error is None
    assert driver.feed(Asked(100), Lost(0)) == []


@pytest.mark.parametrize("phase", ["gathering", "running"])
def test_stopping_does_not_wait_for_executors_that_are_lost(phase: str) -> None:
    driver = Driver()
    if phase == "running":
        driver.meet()
        driver.feed(Asked(100), ends(5, 3), StopAsked(100))
        effects = driver.feed(Lost(1))
    else:
        effects = driver.feed(StopAsked(100))
    assert effects[-1] == Finish(None)


def test_messages_of_an_older_attempt_change_nothing() -> None:
    driver = Driver()
    driver.meet()
    driver.feed(Asked(100), ends(5, 3))
    job = driver.job
    after = Progress(clock={A: 0, B: 0}, closes=0)
    part = Part(file="x", first=0, last=256, size=1, crc=1)
    for old in (
        messages.Ready(attempt=0, executor=0),
        messages.Listening(attempt=0, executor=0),
        messages.BatchDone(attempt=0, batch=0, executor=0, after=after),
        messages.SnapshotDone(attempt=0, batch=0, executor=0, part=part),
        messages.NotRestored(attempt=0, executor=0, batch=0, message=""),
    ):
        assert driver.feed(old) == []
        assert driver.job == job


def failure(driver: Driver) -> Any:
    assert driver.job.phase is JobPhase.ENDED
    return driver.effects[-1].error


def test_executors_that_die_at_one_batch_again_and_again_end_the_job() -> None:
    driver = Driver(max_restarts=2)
    for _ in range(3):
        driver.meet(ends(5, 5))
        driver.feed(Asked(100), ends(5, 5))
        driver.feed(Lost(0))
    error = failure(driver)
    assert "3 attempts failed" in str(error) and error.hint


def test_executors_that_disagree_end_the_job() -> None:
    driver = Driver()
    driver.meet()
    driver.feed(Asked(100), ends(5, 3))
    for i in range(2):
        after = Progress(clock={A: i, B: 0}, closes=0)
        driver.feed(messages.BatchDone(attempt=1, batch=0, executor=i, after=after))
    assert "computed other clocks" in str(failure(driver))


def test_an_error_of_an_executor_keeps_its_class() -> None:
    for name, wanted in (("DataLossError", "DataLossError"), ("os.system", "StateError")):
        driver = Driver()
        driver.meet()
        driver.feed(messages.Failed(executor=1, error=name, message="row 5", hint="mend it"))
        error = failure(driver)
        assert type(error).__name__ == wanted
        assert str(error) == "executor 1: row 5; mend it"


def test_an_error_that_may_pass_begins_the_job_again() -> None:
    """A broker that an executor did not reach may be starting again."""
    driver = Driver(max_restarts=2)
    said = messages.Failed(
        executor=1, error="BrokerUnavailableError", message="no broker answers", retriable=True
    )
    for attempt in (1, 2):
        driver.meet(ends(5, 5))
        assert driver.job.attempt == attempt
        driver.feed(Asked(100), ends(5, 5))
        effects = driver.feed(said)
        assert {Disconnect(0), Disconnect(1), AskEnds(False)} <= set(effects)
    driver.meet(ends(5, 5))
    driver.feed(Asked(100), ends(5, 5), said)
    error = failure(driver)
    assert isinstance(error, BrokerUnavailableError)
    assert str(error) == "executor 1: no broker answers"


def test_records_that_are_gone_end_the_job() -> None:
    driver = Driver()
    driver.meet()
    driver.feed(Asked(100), ends_of({A: range(4, 9), B: 3}, 100))
    error = failure(driver)
    assert isinstance(error, DataLossError)
    assert "offsets 0 to 4 of t-0" in str(error) and "retention" in error.hint


def test_the_split_mode_reads_on_one_half_and_leads_on_the_other() -> None:
    driver = Driver(is_split=True)
    driver.meet()
    assert driver.job.settings.vparts == ((0, 0), (0, 256))
    effects = driver.feed(Asked(100), ends(5, 3))
    assert [len(e.message.ranges) for e in effects[-2:]] == [2, 0]


partitions = st.dictionaries(
    st.integers(0, 8).map(lambda i: Partition("t", i)),
    st.tuples(st.integers(0, 50), st.integers(0, 50)),
    min_size=1,
)


@given(partitions, st.none() | st.integers(1, 60), st.booleans())
def test_ranges_share_what_a_batch_may_read(given_: dict, most: int | None, bounded: bool) -> None:
    positions = {tp: low for tp, (low, _) in given_.items()}
    all_ends = {tp: Range(0, low + more) for tp, (low, more) in given_.items()}
    until = {tp: low + more // 2 for tp, (low, more) in given_.items()} if bounded else None
    found = ranges.next_ranges(positions, all_ends, until=until, max_offsets=most)
    assert found.keys() == positions.keys()
    there = 0
    for tp, range_ in found.items():
        limit = all_ends[tp].end if until is None else until[tp]
        assert range_.start == positions[tp] <= range_.end <= limit
        there += limit - range_.start
    size = sum(r.end - r.start for r in found.values())
    assert size == (there if most is None else min(there, most))
    if most is not None and most >= len(found):
        waiting = [tp for tp in found if (until or {}).get(tp, all_ends[tp].end) > positions[tp]]
        assert all(found[tp].end > found[tp].start for tp in waiting)


def test_partitions_that_are_new_begin_at_their_first_offset_and_none_may_vanish() -> None:
    last = BatchRecord(number=0, ranges={A: Range(0, 4)}, now_us=0, clock={A: 0})
    found = ranges.positions_after(last, {A: 0}, {A: Range(0, 9), B: Range(2, 9)})
    assert found == {A: 4, B: 2}
    with pytest.raises(DataLossError, match="t-0 is gone"):
        ranges.positions_after(last, {}, {B: Range(0, 1)})
    with pytest.raises(DataLossError, match="ends at offset 3, and was read up to 4"):
        ranges.check_kept({A: 4}, {A: Range(0, 3)})


def test_idle_is_a_partition_read_to_its_end_that_has_been_quiet() -> None:
    all_ends = {A: Range(0, 9), B: Range(0, 9)}
    quiet = {A: Range(9, 9), B: Range(9, 9)}
    advanced = {A: 100, B: 150}
    idle = ranges.idle_partitions(quiet, all_ends, advanced, {"t": 60}, 170)
    assert idle == {A}
    assert not ranges.idle_partitions(quiet, all_ends, advanced, {"t": None}, 9_999)
    behind = {A: Range(8, 8), B: Range(8, 9)}  # held back by maxOffsets, or being read
    assert not ranges.idle_partitions(behind, all_ends, advanced, {"t": 60}, 9_999)
    clock = VectorClock({A: 3, B: 8})
    assert ranges.closes_more(clock, frozenset([A]), 5)
    assert not ranges.closes_more(clock, frozenset(), 5)


def test_a_job_is_a_value() -> None:
    first, second = Driver(), Driver()
    first.meet()
    second.meet()
    assert isinstance(first.job, Job) and first.job == second.job
