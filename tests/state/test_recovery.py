"""From headers, logs and snapshots to how a job goes on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kdirect.errors import DataLossError, StateDirectoryError
from kdirect.state.batches import (
    BatchRecord,
    Manifest,
    Part,
    Partition,
    Phase,
    Progress,
    Range,
    StateHeader,
    deal_vparts,
)
from kdirect.state.recovery import EVERYTHING, Situation, Step, decide

TP = Partition("t", 0)
AFTER = Progress(clock={TP: 1}, closes=1)
LOWER, UPPER = deal_vparts(2)


def header(executor: int, batch: int, phase: Phase, **changes: Any) -> StateHeader:
    found = StateHeader(
        plan_hash="p",
        executor=executor,
        executors=2,
        vparts=deal_vparts(2)[executor] if executor < 2 else (0, 0),
        attempt=3,
        batch=batch,
        phase=phase,
        after=AFTER if phase is Phase.DONE else None,
    )
    return replace(found, **changes)


def both(batch: int, phase: Phase) -> tuple[StateHeader, StateHeader]:
    return header(0, batch, phase), header(1, batch, phase)


def record(number: int) -> BatchRecord:
    range_ = Range(10 * number, 10 * number + 10)
    return BatchRecord(number=number, ranges={TP: range_}, now_us=0, clock={TP: 0})


def manifest(number: int, plan_hash: str = "p") -> Manifest:
    part = Part(file="part", first=0, last=256, size=1, crc=1)
    return Manifest(number=number, plan_hash=plan_hash, parts=(part,))


def situation(headers: Any, **changes: Any) -> Situation:
    values: dict[str, Any] = {
        "plan_hash": "p",
        "attempt": 4,
        "headers": headers,
        "vparts": deal_vparts(len(headers)),
        "records": {n: record(n) for n in range(8)},
        "committed": 6,
        "manifests": (manifest(2), manifest(4)),
        "log_starts": {TP: 0},
    }
    return Situation(**{**values, **changes})


def steps(*wanted: tuple[int, Any, bool]) -> tuple[Step, ...]:
    return tuple(Step(batch=n, vparts=vparts, emit=emit) for n, vparts, emit in wanted)


def test_a_new_job_begins_empty() -> None:
    found = decide(situation((None, None), records={}, committed=-1, manifests=()))
    assert (found.cold, found.snapshot, found.steps, found.offer) == ({0, 1}, None, (), False)


def test_all_clean_before_the_last_batch_runs_it() -> None:
    for phase in (Phase.CLEAN, Phase.DONE):
        found = decide(situation(both(6, phase)))
        assert (found.cold, found.steps, found.offer) == (
            frozenset(), steps((7, EVERYTHING, True)), True
        )  # fmt: skip


def test_all_done_hands_out_the_kept_output() -> None:
    found = decide(situation(both(7, Phase.DONE)))
    assert (found.cold, found.steps, found.offer) == (frozenset(), (), True)


@pytest.mark.parametrize("phase", [Phase.DONE, Phase.CLEAN])
def test_all_done_and_committed_goes_on(phase: Phase) -> None:
    found = decide(situation(both(7, phase), committed=7))
    assert (found.cold, found.steps, found.offer) == (frozenset(), (), False)


def test_without_its_output_an_uncommitted_batch_is_not_done() -> None:
    found = decide(situation(both(7, Phase.CLEAN)))
    assert found.cold == {0, 1}


def test_killed_within_a_batch_all_are_rebuilt() -> None:
    found = decide(situation(both(7, Phase.DIRTY)))
    assert found.cold == {0, 1} and found.snapshot == manifest(4)
    assert found.steps == steps(
        (5, EVERYTHING, False), (6, EVERYTHING, False), (7, EVERYTHING, True)
    )
    assert found.offer


def test_one_that_is_lost_is_rebuilt_alone() -> None:
    found = decide(situation((None, header(1, 7, Phase.DONE))))
    assert found.cold == {0}
    assert found.steps == steps((5, (LOWER,), False), (6, (LOWER,), False), (7, (LOWER,), True))


def test_one_that_is_lost_before_the_batch_catches_up_and_then_all_run_it() -> None:
    found = decide(situation((header(0, 6, Phase.CLEAN), None)))
    assert found.cold == {1}
    assert found.steps == steps((5, (UPPER,), False), (6, (UPPER,), False), (7, EVERYTHING, True))


def test_a_state_that_is_too_old_is_cold() -> None:
    assert decide(situation((header(0, 5, Phase.CLEAN), header(1, 7, Phase.DONE)))).cold == {0}
    found = decide(situation(both(6, Phase.DONE), committed=7))
    assert found.cold == {0, 1} and not found.offer
    assert all(not step.emit for step in found.steps)


def test_another_number_of_executors_takes_a_snapshot() -> None:
    headers = (*both(7, Phase.DONE), None)
    found = decide(situation(headers, committed=7, manifests=(manifest(7),)))
    assert found.cold == {0, 1, 2} and found.snapshot == manifest(7) and found.steps == ()


def test_state_of_other_keys_is_cold_though_as_many_executors_led_them() -> None:
    """The job went on in the mode that is split, and rows came twice: executor 1 led the upper half
    of the keys and then all of them, of which its state had half."""
    found = decide(situation(both(7, Phase.DONE), vparts=deal_vparts(2, 1)))
    assert found.cold == {1}
    assert found.steps == steps(*[(n, EVERYTHING, n > 6) for n in range(5, 8)])


def test_without_a_snapshot_everything_runs_again() -> None:
    found = decide(situation((None, None), manifests=()))
    assert found.snapshot is None
    assert [step.batch for step in found.steps] == list(range(8))


def test_a_snapshot_of_a_batch_that_is_not_committed_is_left_alone() -> None:
    found = decide(situation((None, None), manifests=(manifest(4), manifest(7))))
    assert found.snapshot == manifest(4)


def test_an_executor_that_leads_nothing_has_nothing_to_lose() -> None:
    found = decide(situation((None, header(1, 7, Phase.DONE)), vparts=((0, 0), (128, 256))))
    assert found.cold == frozenset() and found.steps == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"headers": (header(0, 7, Phase.DONE, plan_hash="q"), None)}, "another plan .*own"),
        ({"manifests": (manifest(4, "q"),)}, "snapshot 4 belongs to a job with another plan"),
        ({"headers": (header(1, 7, Phase.DONE), None)}, "is that of executor 1"),
        ({"headers": (header(0, 8, Phase.DIRTY), None)}, "an old copy"),
        ({"headers": (header(0, 7, Phase.DONE, attempt=5), None)}, "an old copy"),
        ({"committed": 5}, "commits.log with 5"),
        ({"committed": 8}, "commits.log with 8"),
        ({"records": {5: record(5), 7: record(7)}}, "batches are missing"),
        (
            {"headers": (None, None), "manifests": (), "records": {n: record(n) for n in (6, 7)}},
            "batch 0 is needed",
        ),
    ],
)
def test_a_directory_that_does_not_fit_is_refused(changes: Any, message: str) -> None:
    given = {"headers": both(7, Phase.DONE), **changes}
    with pytest.raises(StateDirectoryError, match=message) as caught:
        decide(situation(**given))
    assert caught.value.hint


def test_rows_that_retention_has_removed_are_named() -> None:
    with pytest.raises(DataLossError, match=r"offsets 50 to 60 of t-0 .* begins at 55; raise"):
        decide(situation(both(7, Phase.DIRTY), log_starts={TP: 55}))
    assert decide(situation(both(7, Phase.DIRTY), log_starts={TP: 50})).steps
    assert decide(situation(both(7, Phase.DONE), log_starts={TP: 999})).steps == ()
