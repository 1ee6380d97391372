"""Extremes of strings and bytes, and sets: what they are, whatever the order of deltas, and that a
group keeps its values and not its rows."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdirect.errors import DeltaError, StateLimitError
from kdirect.state import AggregatePlan, Input, NoWindow, Session, Tumbling
from kdirect.state.append import AppendState
from kdirect.state.arena import StateMemory
from kdirect.state.texts import LONGEST_VALUE_BYTES
from tests.state.append_run import Cluster, owners_of, page_memory, update
from tests.state.family import NOW_US, SECOND

KINDS = ("min", "max", "first", "last", "collect_set")
WINDOWS = [Tumbling(size_us=SECOND), Session(gap_us=SECOND), NoWindow()]


def plan(window: Any, kind: str = "string") -> AggregatePlan:
    return AggregatePlan(
        input=Input(topic="t", schema=f"k int64, at int64, v {kind}, f float64", time="at"),
        keys="k",
        window=window,
        aggregates=[*((kind, "v") for kind in KINDS), ("collect_set", "f"), ("sum", "f")],
    )


def emitted(cluster: Cluster) -> list[dict]:
    return [r for e in cluster.executors for b in e.trigger(1 << 50) for r in b.to_pylist()]


def rows_of(values: list[tuple[int, int, Any]]) -> list[dict]:
    return [{"k": k, "at": at, "v": v, "f": float(at % 4)} for k, at, v in values]


def edge(rows: list[tuple[int, str | None]], time: int) -> str | None:
    """The value of the rows of one time: a null, or the least."""
    held = [v for at, v in rows if at == time]
    return None if None in held else min(held, key=str.encode)


LETTERS = st.text(st.sampled_from("ab\0é\U0001f600\ufffd"), max_size=12)
RECORDS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 30), st.one_of(LETTERS, st.none())),
    min_size=1,
    max_size=40,
)


@pytest.mark.parametrize("window", WINDOWS, ids=lambda w: w.kind)
@settings(max_examples=40, deadline=None)
@given(RECORDS, st.integers(1, 3), st.randoms(use_true_random=False))
def test_any_order_and_grouping_of_deltas_gives_the_same(
    window: Any, values: list, executors: int, chance: Any
) -> None:
    """Also when what does not count rows is merged twice: the cells are idempotent."""
    cluster = Cluster(plan(window), executors, chance.randrange(1 << 30))
    pages = []
    for row in rows_of(values):
        at = chance.randrange(executors)
        update(cluster.executors[at], 0, cluster.plan.input, [row], NOW_US)
        if chance.random() < 0.3:
            pages += cluster.flush(at)
    for at in range(executors):
        pages += cluster.flush(at)
    twice = chance.random() < 0.5
    pages *= 1 + twice
    chance.shuffle(pages)
    for sender, leader, page in pages:
        cluster.executors[leader].merge(sender, page)
    if chance.random() < 0.5:
        cluster.move(2)
        for executor in cluster.executors:  # what a snapshot has is no change
            assert not isinstance(window, NoWindow) or not list(executor.trigger(1))
        if isinstance(window, NoWindow):
            return
    found = {row["k"]: row for row in emitted(cluster)}
    assert found.keys() == {k for k, _, _ in values}
    for key, row in found.items():
        mine = [(at, v) for k, at, v in values if k == key]
        there = [v for _, v in mine if v is not None]
        assert row["min(v)"] == min(there, key=str.encode, default=None)
        assert row["max(v)"] == max(there, key=str.encode, default=None)
        assert row["first(v)"] == edge(mine, min(at for at, _ in mine))
        assert row["last(v)"] == edge(mine, max(at for at, _ in mine))
        assert sorted(row["collect_set(v)"]) == sorted(set(there))
        assert sorted(row["collect_set(f)"]) == sorted({float(at % 4) for at, _ in mine})
        assert twice or row["sum(f)"] == sum(float(at % 4) for at, _ in mine)


def test_a_group_keeps_the_value_that_won_and_not_its_rows() -> None:
    """Each row beats the one before it, and is longer."""
    one = AggregatePlan(
        input=plan(NoWindow()).input, keys="k", window=NoWindow(), aggregates=[("max", "v")]
    )
    cluster = Cluster(one, 1)
    executor = cluster.executors[0]
    for begin in range(0, 20_000, 5000):
        values = [f"{i:08}" + "x" * (i // 100) for i in range(begin, begin + 5000)]
        update(executor, 0, one.input, rows_of([(1, 5, v) for v in values]), NOW_US)
    assert executor.memory.allocated < 32_768
    assert emitted(cluster) == [{"k": 1, "max(v)": values[-1]}]


def test_a_set_larger_than_pages_and_blocks_is_whole() -> None:
    p = plan(Tumbling(size_us=SECOND))
    cluster = Cluster(p, 2)
    values = [f"value {i % 3000} {'y' * (i % 90)}" for i in range(9000)]
    rows = rows_of([(k, 5, v) for k in range(4) for v in values])
    update(cluster.executors[0], 0, p.input, rows[::2], NOW_US)
    update(cluster.executors[1], 0, p.input, rows[1::2], NOW_US)
    for at in range(2):
        for sender, leader, page in cluster.flush(at):
            cluster.executors[leader].merge(sender, page)
    cluster.move(3)
    found = emitted(cluster)
    assert len(found) == 4
    for row in found:
        assert sorted(row["collect_set(v)"]) == sorted(set(values))
        assert row["min(v)"] == min(values)
    assert all(memory.allocated == 0 for memory in cluster.memories)


def test_only_keys_that_changed_come_out_without_a_window(tmp_path: Any) -> None:
    p = plan(NoWindow())
    memory = StateMemory.open(tmp_path / "state", 1 << 22)
    make = {"executor": 0, "executors": 1, "owners": owners_of(1)}
    state = AppendState(p, memory, page_memory(), **make)
    update(state, 0, p.input, rows_of([(k, 1, "b") for k in range(5000)]), NOW_US)
    assert sum(b.num_rows for b in state.trigger(0)) == 5000
    update(state, 0, p.input, rows_of([(k, 2, "a") for k in (7, 4999)]), NOW_US)
    other = StateMemory.open(tmp_path / "state", 1 << 22)
    other.restore(memory.top, state.blocks())
    again = AppendState(p, other, page_memory(), **make)
    again.adopt(state.catalogue(), state.blocks())
    found = {r["k"]: r["min(v)"] for b in again.trigger(0) for r in b.to_pylist()}
    assert found == {7: "a", 4999: "a"}
    assert not list(again.trigger(0))


def test_a_value_that_leaves_its_log_is_found_before_it_is_read(tmp_path: Any) -> None:
    p = plan(Tumbling(size_us=SECOND))
    memory = StateMemory.open(tmp_path / "state", 1 << 22)
    make = {"executor": 0, "executors": 1, "owners": owners_of(1)}
    state = AppendState(p, memory, page_memory(), **make)
    update(state, 0, p.input, rows_of([(1, i, f"v{i}") for i in range(20)]), NOW_US)
    words = np.frombuffer(memory, np.uint64)
    entry = int(state.tables[0].table.scan()[0])
    cells = state.cells.texts
    begin = int(words[entry // 8]) // 8 + 4 + state.cells.layout.words  # of its texts
    least, slots = begin + 1, begin + cells.words - 1
    place = int(words[slots]) // 8
    used = place + 1 + int(np.flatnonzero(words[place + 1 : place + 1 + int(words[place])])[0])
    for word, value in (
        (least, 1 << 40),
        (least, int(words[least]) + 4),
        (int(words[least]) // 8, 1 << 20),
        (slots, 1 << 40),
        (place, 1 << 30),
        (place, 7),
        (used, 1 << 41),
        (slots - 1, 5),
    ):
        kept = int(words[word])
        words[word] = value
        with pytest.raises(ValueError, match="leaves its log"):
            AppendState(p, memory, page_memory(), **make).adopt(state.catalogue(), state.blocks())
        words[word] = kept
    AppendState(p, memory, page_memory(), **make).adopt(state.catalogue(), state.blocks())


@pytest.mark.parametrize("executors", [1, 4])
def test_a_value_that_is_too_long_is_refused_wherever_its_leader_is(executors: int) -> None:
    p = plan(NoWindow())
    cluster = Cluster(p, executors)
    with pytest.raises(StateLimitError, match=r"min\(v\): a value has 40000 bytes"):
        update(cluster.executors[0], 0, p.input, rows_of([(1, 1, "x" * 40_000)]), NOW_US)


@pytest.mark.parametrize("excess", [0, 1])
def test_a_page_with_a_value_that_is_too_long_is_refused(excess: int) -> None:
    """Its leader could not write it into a snapshot."""
    one = AggregatePlan(
        input=plan(NoWindow()).input, keys="k", window=NoWindow(), aggregates=[("min", "v")]
    )
    cluster = Cluster(one, 2, page_bytes=1 << 16)
    rows = rows_of([(k, 1, "b") for k in range(8)])
    update(cluster.executors[0], 0, one.input, rows, NOW_US)
    ((sender, leader, page),) = cluster.flush(0)
    words = np.frombuffer(page, np.uint64)
    # The first tuple: bucket, key, words of the row, time, last time, lane, state.
    head = 4 + 1 + cluster.executors[0].keys.words
    begin = head + 4 + cluster.executors[0].cells.words
    length = LONGEST_VALUE_BYTES + excess
    tail = struct.pack("<II", 1, length) + b"x" * length
    padded = tail + bytes(-len(tail) % 8)
    forged = np.concatenate([words[:begin], np.frombuffer(padded, np.uint64)])
    forged[begin - 1] = len(tail)
    forged[head] = len(forged) - head - 2
    forged.view(np.uint32)[[1, 2]] = 1, forged.nbytes
    forged[3] = 1
    if excess:
        with pytest.raises(DeltaError, match="leads outside of its state"):
            cluster.executors[leader].merge(sender, forged.tobytes())
    else:
        cluster.executors[leader].merge(sender, forged.tobytes())
    assert len(list(cluster.executors[leader].snapshot())) == 1 - excess


@pytest.mark.parametrize("window", WINDOWS, ids=lambda w: w.kind)
def test_a_page_with_an_interval_that_ends_early_is_refused(window: Any) -> None:
    """Whoever restored a snapshot with it would refuse that."""
    cluster = Cluster(plan(window), 2)
    rows = rows_of([(k, 1, "b") for k in range(8)])
    update(cluster.executors[0], 0, cluster.plan.input, rows, NOW_US)
    ((sender, leader, page),) = cluster.flush(0)
    forged = np.frombuffer(page, np.int64).copy()
    forged[4 + 1 + cluster.executors[0].keys.words + 1] = 2  # the time of the first tuple
    with pytest.raises(DeltaError, match="ends early"):
        cluster.executors[leader].merge(sender, forged.tobytes())


def test_equal_floats_are_one_value_of_a_set() -> None:
    p = plan(NoWindow())
    cluster = Cluster(p, 1)
    other_nan = struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000123))[0]
    floats = [0.0, -0.0, float("nan"), other_nan, 1.5]
    rows = [{"k": 1, "at": 1, "v": "", "f": f} for f in floats]
    update(cluster.executors[0], 0, p.input, rows, NOW_US)
    (row,) = emitted(cluster)
    assert sorted(map(str, row["collect_set(f)"])) == ["0.0", "1.5", "nan"]
