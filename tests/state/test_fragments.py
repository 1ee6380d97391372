"""Deltas: what pages hold, when tuples take the place of entries, and pages that were forged."""

from __future__ import annotations

import random
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdirect.errors import DeltaError, StateError
from kdirect.state import Aggregate, NoWindow, Tumbling
from kdirect.state.executor_state import CellState
from kdirect.state.layout import PAGE_ENTRIES, PAGE_TUPLES
from kdirect.state.source import Block
from tests.state.state_model import (
    backend_of,
    cluster_of,
    merge_bytes,
    plan_of,
    rows_of,
    update,
)

SCHEMA = [("time", "int64"), ("k", "int64"), ("s", "string"), ("x", "float64")]
WINDOW = Tumbling(size_us=100)


def rows(n: int, keys: int, seed: int = 1) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [
        {"time": rng.randrange(300), "k": rng.randrange(keys), "s": "s" * rng.randrange(20),
         "x": rng.random()}
        for _ in range(n)
    ]  # fmt: skip


def pages_of(keys: list[str], n: int = 200, **options: Any) -> tuple[Any, list[bytes]]:
    """A leader, and copies of the pages that executor 1 sends it."""
    plan = plan_of(SCHEMA, keys, WINDOW, ["count", ("sum", "x"), ("last", "x")])
    leader, helper = cluster_of(plan, 2, **options)
    update(helper, rows(n, 60))
    delta = helper.flush(0)
    import ctypes

    return leader, [ctypes.string_at(p.address, p.length) for p in delta.pages]


def state_of(leader: Any) -> list[str]:
    return sorted(repr((s.head, bytes(s.data))) for s in leader.snapshot())


@pytest.mark.parametrize("mode", ["slash", "uppar"])
@pytest.mark.parametrize("keys", [["k"], ["s", "k"]], ids="-".join)
def test_a_damaged_page_is_refused_and_changes_nothing(keys: list[str], mode: str) -> None:
    leader, (page, *_) = pages_of(keys, mode=mode)
    assert page[0] == (PAGE_ENTRIES if mode == "slash" else PAGE_TUPLES)
    forged = {
        "length": [page[:-8], page + bytes(8), page[:31], page[:-1], b""],
        "version": [page[:1] + b"\x09" + page[2:], b"\x07" + page[1:]],
        "sender": [page[:2] + b"\x00\x00" + page[4:]],
        "count": [page[:4] + struct.pack("<I", n) + page[8:] for n in (0, 1, 2**32 - 1)],
        "plan": [page[:12] + b"abcd" + page[16:], page[:16] + b"\x50" + page[17:]],
        "window": [
            page[:32] + struct.pack("<q", b) + page[40:] for b in (-(1 << 63), (1 << 63) - 1)
        ],
    }  # fmt: skip
    leader.closed_before, leader.max_time_us = 0, 1 << 40
    for what, pages in forged.items():
        for bad in pages:
            with pytest.raises(DeltaError, match="executor 1"):
                merge_bytes(leader, 1, bad)
            assert not leader.engine.slots, what
    with pytest.raises(DeltaError, match="executor 5"):
        merge_bytes(leader, 5, page)
    assert merge_bytes(leader, 1, page) > 0


def test_a_window_before_1970_is_refused() -> None:
    """Before any window was emitted, no other bound holds; the start of the last one overflows."""
    leader, (page, *_) = pages_of(["k"])
    for bucket in (-2, -(1 << 62)):
        with pytest.raises(DeltaError, match="executor 1"):
            merge_bytes(leader, 1, page[:32] + struct.pack("<q", bucket) + page[40:])
    assert not leader.engine.slots
    assert merge_bytes(leader, 1, page) > 0


@pytest.mark.parametrize("mode", ["slash", "uppar"])
@pytest.mark.parametrize("keys", [["k"], ["s", "k"]], ids="-".join)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_bytes_crash_a_leader(keys: list[str], mode: str, data: Any) -> None:
    """Whatever a page holds, it is merged, or refused by an error and nothing has changed."""
    leader, (page, *_) = pages_of(keys, n=40, mode=mode)
    bad = bytearray(page)
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(bad) - 1))
        bad[at] = data.draw(st.integers(0, 255))
    bad = bad[: data.draw(st.sampled_from([len(bad), len(bad) - 8, len(bad) // 16 * 8]))]
    leader.max_time_us = 1 << 40
    before = state_of(leader)
    try:
        merge_bytes(leader, 1, bytes(bad))
    except DeltaError:
        assert state_of(leader) == before
        return
    except StateError as e:  # a sum of forged values may overflow
        assert "does not fit" in str(e)
        return
    assert all(b.num_rows for b in leader.trigger(1 << 41))


def test_a_delta_of_another_plan_is_refused() -> None:
    leader, _ = pages_of(["k"])
    _, (page, *_) = pages_of(["s", "k"])
    with pytest.raises(DeltaError, match="another plan"):
        merge_bytes(leader, 1, page)


def test_the_fragment_starts_from_zero_after_each_epoch() -> None:
    plan = plan_of(SCHEMA, ["k"], NoWindow(), ["count"])
    leader, helper = cluster_of(plan, 2, adaptive_ratio=0)
    for _ in range(3):
        update(helper, rows(500, 9))
        delta = helper.flush(0)
        assert delta.entries <= 9 and delta.tuples == 0
        for page in delta.pages:
            leader.merge(1, page.address, page.length)
        helper.release(delta.pages)
    assert helper.flush(0).pages == ()
    mine = {r["k"] for r in rows_of(leader.trigger())}
    counts = [r["count"] for r in rows_of(backend_counts(leader))]
    assert sum(counts) == 3 * sum(r["k"] in mine for r in rows(500, 9))


def backend_counts(leader: Any) -> list:
    """All keys of a leader without windows, changed or not."""
    table = leader.engine.table(0)
    return leader._batches(table.scan(), None)


@pytest.mark.parametrize(("keys", "as_tuples"), [(50, False), (1_000_000, True)])
def test_tuples_are_sent_where_an_epoch_hardly_aggregates(keys: int, as_tuples: bool) -> None:
    plan = plan_of(SCHEMA, ["k"], NoWindow(), ["count", ("sum", "x")])
    leader, helper = cluster_of(plan, 2)
    given = rows(20_000, keys)
    for begin in range(0, len(given), 5000):
        update(helper, given[begin : begin + 5000])
    delta = helper.flush(0)
    assert (delta.tuples > 0) is as_tuples
    for page in delta.pages:
        leader.merge(1, page.address, page.length)
    want = backend_of(plan)
    update(want, given)
    ours = {r["k"]: (r["count"], round(r["sum(x)"], 6)) for r in rows_of(leader.trigger())}
    all_of_them = {r["k"]: (r["count"], round(r["sum(x)"], 6)) for r in rows_of(want.trigger())}
    assert ours and ours.items() <= all_of_them.items()
    again = cluster_of(plan, 2)[1]
    for begin in range(0, len(given), 5000):
        update(again, given[begin : begin + 5000])
    assert again.flush(0).tuples == delta.tuples, "a replay must decide the same"


@pytest.mark.parametrize(("expected", "share"), [(40_000, (0.75, 1)), (1_000_000, (0, 0.01))])
def test_keys_that_come_again_are_aggregated(expected: int, share: tuple[float, float]) -> None:
    """One key in 20,000 rows comes again within a long epoch, and not within a short one."""
    plan = plan_of(SCHEMA, ["k"], NoWindow(), ["count"])
    _, helper = cluster_of(plan, 2)
    helper.engine.expected_rows = expected
    update(helper, rows(20_000, 20_000))
    delta = helper.flush(0)
    assert share[0] <= delta.tuples / delta.rows <= share[1]


@pytest.mark.parametrize("keys", [["k"], ["s", "k"], ["time", "k"]], ids="-".join)
@pytest.mark.parametrize("window", [NoWindow(), WINDOW], ids=["one", "many"])
def test_hot_keys_are_aggregated_and_cold_ones_are_sent(keys: list[str], window: Any) -> None:
    """Half of the rows are of few keys: they become entries, and the others tuples."""
    plan = plan_of(SCHEMA, keys, window, ["count", ("sum", "x"), ("last", "x")])
    hot, cold = rows(12_000, 40), rows(12_000, 1 << 40, seed=2)
    for row in hot:
        row["s"], row["time"] = "hot", row["time"] % 2 * 100
    given = [row for pair in zip(hot, cold, strict=True) for row in pair]
    leader, helper = cluster_of(plan, 2)
    helper.engine.expected_rows = len(given)
    for begin in range(0, len(given), 6000):
        update(helper, given[begin : begin + 6000])
    delta = helper.flush(0)
    assert 0.1 < delta.tuples / delta.rows < 0.5
    assert delta.entries < 0.4 * delta.rows
    for page in delta.pages:
        leader.merge(1, page.address, page.length)
    want = backend_of(plan)
    update(want, given)
    ours, all_of_them = (
        {repr({**row, "sum(x)": round(row["sum(x)"], 6)}) for row in rows_of(b.trigger(1 << 40))}
        for b in (leader, want)
    )
    assert ours and ours <= all_of_them


def test_an_epoch_is_expected_to_end_with_its_batch() -> None:
    """What decides how rows are sent is how many will come, by the bytes and rows that came."""
    block = Block(
        rows=100, columns={}, time_us=None, min_time_us=None, max_time_us=None, clock_us=None,
        offsets=np.arange(100), next_offset=300, records=300, input_bytes=30_000,
    )  # fmt: skip
    state = CellState.__new__(CellState)
    state._epoch_bytes, state._applied_bytes, state._records_left = 90_000, 0, 1_000
    assert [state._expected_rows(block) for _ in range(3)] == [300, 300, 300]
    state._applied_bytes = 0  # the epoch was flushed; 100 records are left
    assert state._expected_rows(block) == pytest.approx(100 / 3)


def test_an_entry_that_fits_into_no_page_is_an_error() -> None:
    wide = Aggregate(kind="approx_count_distinct", column="s", precision_bits=16)
    plan = plan_of(SCHEMA, ["k"], WINDOW, [wide])
    _, helper = cluster_of(plan, 2)
    with pytest.raises(StateError, match=r"does not fit into a page.*slot_bytes"):
        update(helper, rows(50, 60))
