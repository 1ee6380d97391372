"""Schedules of produce, roll, copy, retention, deletion and crash against a model, and mistakes
that they have to find."""

from __future__ import annotations

import inspect
import types
from collections import Counter

import pytest

from kdirect.storage import copy_rules, lineage, remote_log
from kdirect.storage.remote_log import RemoteLog
from tests.storage.schedules import run

# Seeds that failed: an object was adopted, and then deleted by the broker that had given it up;
# deletions were committed although nobody knew, of copies that counted again.
FAILED = (1320, 13475, 15899)


@pytest.mark.parametrize("first", range(0, 2000, 250))
def test_schedules(first: int) -> None:
    total: Counter[str] = Counter()
    for seed in range(first, first + 250):
        try:
            total += run(seed)
        except Exception as e:
            raise AssertionError(f"seed {seed}: {e}") from e
    for what in (
        *("local_deleted", "deaths", "replaced", "cuts", "failed_puts", "late_records", "switched"),
    ):
        assert total[what] > 20, total


@pytest.mark.parametrize("seed", FAILED)
def test_a_schedule_that_failed(seed: int) -> None:
    run(seed)


def _with(module: types.ModuleType, old: str, new: str) -> type[RemoteLog]:
    """The machine with one mistake in the text of a module."""
    text = inspect.getsource(module)
    assert text.count(old) == 1, f"{module.__name__} has {text.count(old)} times {old!r}"
    changed = types.ModuleType(module.__name__)
    exec(compile(text.replace(old, new), module.__file__ or "", "exec"), changed.__dict__)
    if module is remote_log:
        return changed.RemoteLog  # type: ignore[no-any-return]
    names = {n: v for n, v in vars(changed).items() if not n.startswith("__")}
    machine = types.ModuleType(remote_log.__name__)
    exec(compile(inspect.getsource(remote_log), remote_log.__file__, "exec"), machine.__dict__)
    for name, value in names.items():
        if (name in machine.__dict__ and inspect.isfunction(value)) or inspect.isclass(value):
            machine.__dict__[name] = value
    return machine.RemoteLog  # type: ignore[no-any-return]


MISTAKES = {
    "what is being copied counts": (
        remote_log,
        "held.segment.state is _S.COPY_SEGMENT_FINISHED and not held.is_leaving:\n"
        "            self._moving.discard(segment_id)\n            held",
        "held.segment.state <= _S.COPY_SEGMENT_FINISHED and not held.is_leaving:\n"
        "            self._moving.discard(segment_id)\n            held",
    ),
    "any object is adopted": (
        remote_log,
        "if event.found is Found.SOUND and not",
        "if event.found in (Found.SOUND, Found.UNSOUND) and not",
    ),
    "no answer means no object": (
        remote_log,
        "if event.found is Found.UNKNOWN:",
        "if False:",
    ),
    "a try is uploaded again under its id": (
        remote_log,
        "                held.is_new = False\n",
        "",
    ),
    "a deletion that failed is done": (
        remote_log,
        "        if event.done:\n",
        "        if True:\n",
    ),
    "deleted before it is known": (
        remote_log,
        "        held.writing = state\n        held.is_leaving",
        "        if state is _S.DELETE_SEGMENT_STARTED:\n"
        "            return [Delete(held.segment)]\n"
        "        held.writing = state\n        held.is_leaving",
    ),
    "who gave an upload up deletes what was adopted": (
        remote_log,
        "return held is None or held.segment.state > _S.COPY_SEGMENT_FINISHED",
        "return True",
    ),
    "a deletion that may be committed is forgotten": (
        remote_log,
        "        held.is_leaving |= state is _S.DELETE_SEGMENT_STARTED\n",
        "",
    ),
    "records of older epochs count": (
        remote_log,
        "        if NO_EPOCH < epoch < self._newest_epoch:\n            return []\n",
        "",
    ),
    "decided before the epoch is known to all": (
        remote_log,
        "(self._is_fenced or not self._fences)",
        "True",
    ),
    "any history is this log's": (
        remote_log,
        "if not belongs(segment, self._local) or self._is_covered(segment):",
        "if self._is_covered(segment):",
    ),
    "the log start does not move first": (
        remote_log,
        "else self.segments.below(start)",
        "else self.segments.below(self._kept_from())",
    ),
    "unstable records are copied": (
        copy_rules,
        "        if segment.end_offset > local.stable_offset:\n            return None\n",
        "",
    ),
    "an epoch that the log has elsewhere is its own": (
        lineage,
        "        if last > end or max(first, local.log_start_offset) < start:\n"
        "            return False\n",
        "",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_schedules_find(name: str) -> None:
    kind = _with(*MISTAKES[name])
    for seed in (*FAILED, *range(4000)):
        try:
            run(seed, kind)
        except Exception as e:
            print(f"seed {seed}: {e}")
            return
    pytest.fail(f"4,000 schedules hold although {name}")
