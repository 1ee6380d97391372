"""What was done by half is never taken for whole: errors in a block, readers that stop, peers that
write into a page while it is merged."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from kdirect.errors import ConfigError, DeltaError, StateError, StateLimitError
from kdirect.state import AggregatePlan, Input, NoWindow, Session, Tumbling
from kdirect.state.append import AppendState
from kdirect.state.arena import StateMemory
from kdirect.state.batches import Phase
from tests.state import append_run
from tests.state.state_model import backend_of, cluster_of, plan_of, rows_of

SCHEMA = [("time", "int64"), ("i", "int64"), ("s", "string"), ("b", "binary[5]")]
LARGEST = (1 << 63) - 1


def add(backend: Any, values: Any, time: int = 0) -> Any:
    n = len(values)
    return backend.update({"i": pa.array(values, pa.int64())}, n, time_us=np.full(n, time))


def refused(backend: Any) -> None:
    with pytest.raises(StateError, match="by half"):
        backend.mark(Phase.CLEAN, attempt=1, batch=1)
    for act in (backend.trigger, backend.snapshot, lambda: backend.flush(0),
                lambda: add(backend, [1])):  # fmt: skip
        with pytest.raises(StateError, match="by half"):
            act()


def test_a_state_with_half_a_block_is_good_for_nothing_but_clear() -> None:
    plan = plan_of(SCHEMA, ["i"], NoWindow(), ["count"])
    backend = backend_of(plan, memory=StateMemory.anonymous(1 << 20))
    with pytest.raises(StateLimitError, match=r"state_limit"):
        add(backend, range(100_000))
    refused(backend)
    backend.clear()
    add(backend, [1, 1, 2])
    assert {(r["i"], r["count"]) for r in rows_of(backend.trigger())} == {(1, 2), (2, 1)}
    backend.mark(Phase.CLEAN, attempt=1, batch=1)


def test_a_sum_that_overflows_is_not_kept() -> None:
    backend = backend_of(plan_of(SCHEMA, [], NoWindow(), [("sum", "i")]))
    with pytest.raises(StateError, match="does not fit"):
        add(backend, [LARGEST, LARGEST])
    refused(backend)


def test_a_page_that_is_refused_leaves_the_state_usable() -> None:
    helper, leader = cluster_of(plan_of(SCHEMA, ["i"], NoWindow(), ["count"]), 2)
    add(helper, range(100))
    (page,) = helper.flush(1).pages
    with pytest.raises(DeltaError):
        leader.merge(0, page.address, page.length - 8)
    assert leader.merge(0, page.address, page.length) == len(rows_of(leader.trigger()))


def test_a_mask_of_another_length_is_refused() -> None:
    backend = backend_of(plan_of(SCHEMA, ["i"], NoWindow(), ["count"]))
    with pytest.raises(StateError, match="a mask of 3 rows was given for 1000"):
        backend.update({"i": pa.array(range(1000))}, 1000, time_us=np.zeros(1000, np.int64),
                       mask=pa.array([True] * 3))  # fmt: skip


@pytest.mark.parametrize("kind", ["min", "max", "first", "last"])
def test_cells_refuse_what_has_a_state_of_its_own(kind: str) -> None:
    with pytest.raises(ConfigError, match="strings are kept in chains"):
        backend_of(plan_of(SCHEMA, ["i"], NoWindow(), [(kind, "b")]))


def test_a_page_that_changes_while_it_is_merged_cannot_lead_astray() -> None:
    """The length of a key is flipped by a peer all the time: each merge takes or refuses the page,
    and every key that was taken can be walked and is one of those that were sent."""
    helper, leader = cluster_of(plan_of(SCHEMA, ["s"], NoWindow(), ["count"]), 2)
    names = [f"key-{i:05}" for i in range(1500)]
    helper.update({"s": pa.array(names)}, len(names), time_us=np.zeros(len(names), np.int64))
    (page,) = helper.flush(1).pages[:1]
    shared = mmap.mmap(-1, page.length)
    shared[:] = ctypes.string_at(page.address, page.length)
    words = np.frombuffer(shared, np.uint64)
    lengths = np.flatnonzero(words == 17)  # a null word and nine letters
    assert len(lengths) > 100
    peer = os.fork()
    if not peer:
        while True:
            words[lengths] = 1 << 40
            words[lengths] = 17
    taken = refused = 0
    try:
        while taken < 200 or refused < 200:
            try:
                leader.merge(0, words.ctypes.data, page.length)
                taken += 1
            except DeltaError:
                refused += 1
    finally:
        os.kill(peer, signal.SIGKILL)
        os.waitpid(peer, 0)
    found = rows_of(leader.trigger())
    assert {r["s"] for r in found} <= set(names)
    assert {r["count"] for r in found} <= {taken}


def test_a_thousand_windows_use_the_memory_of_a_few() -> None:
    backend = backend_of(plan_of(SCHEMA, ["i"], Tumbling(size_us=100), ["count"]))
    tops = []
    for window in range(1000):
        add(backend, range(2000), window * 100)
        assert sum(b.num_rows for b in backend.trigger((window + 1) * 100)) == 2000
        tops.append(backend.memory.top)
    assert tops[10] == tops[-1] and backend.memory.allocated == 0


def test_a_trigger_that_is_left_half_way_goes_on_with_the_next() -> None:
    given = Input(topic="t", schema=(("time", "int64"), ("i", "int64")), time="time")
    plan = AggregatePlan(input=given, keys=("i",), window=Session(gap_us=10), aggregates=("count",))
    state = AppendState(plan, StateMemory.anonymous(1 << 28), append_run.page_memory(1 << 16),
                        executor=0, executors=1, owners=[0] * 256)  # fmt: skip
    n = 200_000
    state.begin(0)
    state.update({"i": pa.array(np.arange(n))}, np.full(n, 5))
    blocks = state.trigger(100)
    found = [next(blocks)]
    del blocks
    assert 0 < found[0].num_rows < n
    for act in (lambda: list(state.snapshot()), state.catalogue,
                lambda: state.update({"i": pa.array([1])}, np.array([200]))):  # fmt: skip
        with pytest.raises(StateError, match="left half way"):
            act()
    found += list(state.trigger(100))
    assert sorted(i for b in found for i in b.column(0).to_pylist()) == list(range(n))
    assert list(state.trigger(100)) == [] and not list(state.snapshot())


def chains(**options: Any) -> AppendState:
    """Sessions that sum decimals, of keys that this executor leads or its only peer."""
    schema = (("time", "int64"), ("i", "int64"), ("dec", "decimal128(38,0)"))
    plan = AggregatePlan(
        input=Input(topic="t", schema=schema, time="time"), keys=("i",), window=Session(gap_us=10),
        aggregates=(("sum", "dec"),),
    )  # fmt: skip
    return AppendState(
        plan, options.get("memory") or StateMemory.anonymous(1 << 28),
        append_run.page_memory(1 << 16), executor=0, executors=1, owners=[0] * 256,
    )  # fmt: skip


def bring(state: AppendState, keys: Any, decimals: Any = None) -> None:
    n = len(keys)
    values = pa.array(decimals or [1] * n, pa.decimal128(38, 0))
    state.update({"i": pa.array(keys, pa.int64()), "dec": values}, np.full(n, 5))


def all_refuse(state: AppendState) -> None:
    for act in (state.snapshot, state.catalogue, lambda: bring(state, [1]),
                lambda: list(state.trigger(100))):  # fmt: skip
        with pytest.raises(StateError, match="by half"):
            act()
    state.clear()
    assert state.snapshot() == []


def test_chains_with_half_a_block_are_good_for_nothing_but_clear() -> None:
    state = chains(memory=StateMemory.anonymous(1 << 18))
    state.begin(0)
    with pytest.raises(StateLimitError, match=r"state_limit"):
        bring(state, range(100_000))
    all_refuse(state)


def test_an_error_in_the_trigger_of_chains_does_not_lose_groups_in_silence() -> None:
    """The groups before it were taken out and not all handed out: what is left is not the state."""
    state = chains()
    state.begin(0)
    largest = Decimal("8e37")
    bring(state, [1, 2, 2], [Decimal(1), largest, largest])
    with pytest.raises(StateError, match="does not fit"):
        list(state.trigger(100))
    all_refuse(state)


def test_restoring_by_half_is_noticed() -> None:
    whole = chains()
    whole.begin(0)
    bring(whole, range(30_000))
    sections = whole.snapshot()
    small = chains(memory=StateMemory.anonymous(1 << 18))
    with pytest.raises(StateLimitError):
        for section in sections:
            small.restore(section, 1, (0, 256))
    all_refuse(small)
    torn = sections[0]._replace(data=sections[0].data[:-8])
    other = chains()
    with pytest.raises(DeltaError, match="do not fill"):  # before anything has changed
        other.restore(torn, 1, (0, 256))
    for section in sections:
        other.restore(section, 1, (0, 256))
    assert sum(b.num_rows for b in other.trigger(100)) == 30_000


def test_the_changed_keys_of_an_output_that_failed_are_not_forgotten_in_silence() -> None:
    schema = [*SCHEMA, ("dec", "decimal128(38,0)")]
    backend = backend_of(plan_of(schema, ["i"], NoWindow(), [("sum", "dec")]))
    largest = pa.array([Decimal("8e37")] * 2, pa.decimal128(38, 0))
    backend.update({"i": pa.array([1, 1]), "dec": largest}, 2, time_us=np.zeros(2, np.int64))
    with pytest.raises(StateError, match="does not fit"):
        backend.trigger()
    with pytest.raises(StateError, match="by half"):
        backend.trigger()
