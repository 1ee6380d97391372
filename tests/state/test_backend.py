"""The backend against a plain model: executors update, exchange deltas and emit windows."""

from __future__ import annotations

import ctypes
import math
import random
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdirect.errors import ConfigError, DeltaError, FormatError, StateError
from kdirect.state import NoWindow, Sliding, Tumbling, snapshot_rows
from kdirect.state.backend import Backend
from kdirect.state.snapshots import Section
from kdirect.state.table import index_log
from tests.state.state_model import (
    as_groups,
    assert_same,
    backend_of,
    cluster_of,
    exchange,
    expected,
    plan_of,
    rows_of,
    update,
)

SCHEMA = [
    ("time", "int64"), ("i", "int64"), ("n", "int32"), ("s", "string"), ("b", "binary"),
    ("d", "date32"), ("flag", "bool"), ("dec", "decimal128(12,2)"), ("big", "decimal128(30,3)"),
    ("x", "float64"), ("y", "float32"), ("u", "uint64"),
]  # fmt: skip
AGGREGATES = [
    "count", ("count", "x"), ("sum", "i"), ("sum", "x"), ("sum", "big"), ("min", "x"), ("max", "x"),
    ("min", "i"), ("max", "n"), ("min", "big"), ("max", "dec"), ("max", "d"), ("min", "flag"),
    ("max", "u"), ("avg", "i"), ("avg", "x"), ("avg", "dec"), ("stddev_samp", "x"),
    ("var_pop", "i"), ("first", "x"), ("last", "i"), ("first", "big"),
    ("approx_count_distinct", "s"),
]  # fmt: skip
WINDOWS = [
    Tumbling(size_us=100), Sliding(size_us=100, slide_us=40), Sliding(size_us=90, slide_us=30),
    NoWindow(),
]  # fmt: skip


def test_a_key_that_is_not_utf8_is_refused_and_binary_may_be_anything() -> None:
    """It was merged, and came out in a table that no other program can read."""
    for kind, refused in (("string", True), ("binary", False)):
        schema = [("time", "int64"), ("b", "binary"), ("s", kind)]
        plan = plan_of(schema, ["b", "s"], Tumbling(size_us=100), ["count"])
        helper, leader = cluster_of(plan, 2)
        update(helper, [{"time": 1, "b": b"\xff", "s": f"key {i}".encode()} for i in range(99)])
        merged = said = 0
        for page in helper.flush(1).pages:
            view = (ctypes.c_char * page.length).from_address(page.address)
            for bad in range(0x80, 0x100):
                view.raw = view.raw.replace(b"key", bytes([bad]) + b"ey", 1)
                try:
                    merged += leader.merge(0, page.address, page.length)
                except DeltaError as e:
                    assert "executor 0" in str(e)
                    said += "not UTF-8" in str(e)
                view.raw = view.raw.replace(bytes([bad]) + b"ey", b"key", 1)
        assert (said > 0, merged > 0) == (refused, not refused)


HALVES = [(0, 128), (128, 256)]


def restore(others: list[Backend], backend: Backend, vparts: tuple[int, int]) -> int:
    """Give a snapshot of one of two executors to all others; how many keys these have used."""
    sections = backend.snapshot()
    return sum(other.restore(section, 2, vparts) for other in others for section in sections)


def some_rows(seed: int, n: int, keys: int, nulls: float) -> list[dict[str, Any]]:
    rng = random.Random(seed)

    def maybe(value: Any) -> Any:
        return None if rng.random() < nulls else value

    import datetime

    return [
        {
            "time": rng.randrange(1000),
            "i": maybe(rng.randrange(keys) - keys // 2),
            "n": maybe(rng.randrange(keys)),
            "s": maybe("k" * (rng.randrange(keys) % 23) + str(rng.randrange(keys))),
            "b": maybe(bytes([rng.randrange(3)]) * rng.randrange(12)),
            "d": maybe(datetime.date(2020, 1, 1 + rng.randrange(9))),
            "flag": maybe(rng.random() < 0.5),
            "dec": maybe(Decimal(rng.randrange(-10_000, 10_000)).scaleb(-2)),
            "big": maybe(Decimal(rng.randrange(-(10**25), 10**25)).scaleb(-3)),
            "x": maybe(rng.choice([rng.uniform(-50, 50), 0.0, 1e9])),
            "y": maybe(float(rng.randrange(5))),
            "u": maybe(rng.randrange(1 << 64)),
        }
        for _ in range(n)
    ]


KEYS = [("i",), ("s",), ("n", "flag"), ("s", "i", "b"), ("big", "d"), ("dec",), ()]


def emitted(plan: Any, backends: list[Backend]) -> dict[tuple, Any]:
    return as_groups(plan, [row for b in backends for row in rows_of(b.trigger(10_000))])


@pytest.mark.parametrize("keys", KEYS, ids="-".join)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_results_are_those_of_the_model(keys: tuple, window: Any) -> None:
    plan = plan_of(SCHEMA, keys, window, AGGREGATES)
    for executors, nulls, options in (
        (1, 0.0, {}), (3, 0.1, {"adaptive_ratio": 0}), (3, 0.0, {"mode": "uppar"}),
        (2, 0.1, {"mode": "uppar"}),
    ):  # fmt: skip
        rows = some_rows(7, 300, 24, nulls)
        backends = cluster_of(plan, executors, **options)
        for epoch in range(3):
            for i, backend in enumerate(backends):
                update(backend, rows[i::executors][epoch::3])
            exchange(backends)
        assert_same(plan, emitted(plan, backends), expected(plan, rows))


def test_a_null_that_comes_late_finds_the_sums_before_it() -> None:
    plan = plan_of(SCHEMA, ["i"], Tumbling(size_us=1000), [("sum", "x"), ("min", "n"), "count"])
    rows = some_rows(1, 300, 9, 0.0) + some_rows(2, 300, 14, 0.6)
    backends = cluster_of(plan, 2, adaptive_ratio=0)
    for part in (rows[:300], rows[300:]):
        for i, backend in enumerate(backends):
            update(backend, part[i::2])
        exchange(backends)
    assert_same(plan, emitted(plan, backends), expected(plan, rows))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 30), executors=st.integers(1, 4), tuples=st.booleans(),
       nulls=st.sampled_from([0.0, 0.3]), data=st.data())  # fmt: skip
def test_no_arrival_order_shows(seed: int, executors: int, tuples: bool, nulls: float,
                                data: Any) -> None:  # fmt: skip
    """Deltas of the same epochs, merged in any order of helpers, give bit for bit the same."""
    plan = plan_of(SCHEMA, ["n"], Tumbling(size_us=300), AGGREGATES)
    rows = some_rows(seed, 240, 12, nulls)
    results = []
    for order in (range(executors), data.draw(st.permutations(range(executors)))):
        backends = cluster_of(plan, executors, mode="uppar" if tuples else "slash")
        for epoch in range(2):
            for i in order:
                update(backends[i], rows[i::executors][epoch::2])
            exchange(backends, order)
        results.append(sorted(map(repr, [r for b in backends for r in rows_of(b.trigger(10_000))])))
    assert results[0] == results[1]


def test_late_and_unusable_rows_are_dropped_and_counted() -> None:
    plan = plan_of(SCHEMA, ["i"], Tumbling(size_us=100), ["count"])
    backend = backend_of(plan)
    backend.closed_before, backend.max_time_us = 200, 5000
    rows = some_rows(3, 6, 1, 0.0)
    for row, time in zip(rows, (None, -1, 199, 200, 5000, 5001), strict=True):
        row["time"] = time
    found = update(backend, rows)
    assert (found.rows, found.late, found.null_time, found.early, found.ahead) == (2, 1, 1, 1, 1)
    assert (found.first_bad, found.newest) == (0, 5000)
    assert len(backend.engine.slots) == 2


def test_masked_rows_are_left_out_and_their_times_count() -> None:
    plan = plan_of(SCHEMA, ["i"], Tumbling(size_us=100), ["count"])
    backend = backend_of(plan)
    mask = pa.array([True, False, None, True])
    found = backend.update({"i": pa.array([1, 1, 1, 2])}, 4, mask=mask,
                           time_us=pa.array([1, 2, 90, 3]))  # fmt: skip
    assert (found.rows, found.filtered, found.newest) == (2, 2, 90)
    assert {(r["i"], r["count"]) for r in rows_of(backend.trigger(100))} == {(1, 1), (2, 1)}


def test_windows_close_once_and_their_memory_goes_back() -> None:
    plan = plan_of(SCHEMA, ["i"], Tumbling(size_us=100), ["count"])
    backend = backend_of(plan)
    update(backend, some_rows(4, 500, 30, 0.0))
    assert backend.trigger(99) == []
    first = rows_of(backend.trigger(500))
    rest = rows_of(backend.trigger(10_000))
    assert sum(r["count"] for r in first) + sum(r["count"] for r in rest) == 500
    assert backend.trigger(10_000) == [] and len(backend.engine.slots) == 0
    assert backend.memory.allocated == 0


def test_without_windows_only_changed_keys_are_emitted() -> None:
    plan = plan_of(SCHEMA, ["s"], NoWindow(), ["count"])
    backends = cluster_of(plan, 2)

    def batch(*names: str) -> dict[str, int]:
        rows = [{**some_rows(1, 1, 1, 0.0)[0], "s": name} for name in names]
        update(backends[0], rows)
        update(backends[1], rows)
        exchange(backends)
        return {r["s"]: r["count"] for b in backends for r in rows_of(b.trigger())}

    assert batch("a", "b", "a") == {"a": 4, "b": 2}
    assert batch("b") == {"b": 4}
    assert batch() == {}


@pytest.mark.parametrize("overflow", ["error", "wrap"])
def test_a_sum_that_leaves_int64(overflow: str) -> None:
    plan = plan_of(SCHEMA, ["n"], NoWindow(), [("sum", "i")], overflow)
    backend = backend_of(plan)
    row = {**some_rows(1, 1, 1, 0.0)[0], "i": (1 << 63) - 1}
    if overflow == "error":
        with pytest.raises(StateError, match=r"sum\(i\).*overflow=wrap"):
            update(backend, [row, row])
    else:
        update(backend, [row, row])
        assert rows_of(backend.trigger())[0]["sum(i)"] == -2


@pytest.mark.parametrize("executors", [1, 2])
def test_a_sum_of_decimals_that_leaves_128_bits(executors: int) -> None:
    """It ended the job with `overflow=wrap` too, and advised to set that."""
    aggregates = [("sum", "huge"), ("avg", "huge")]
    most, least = Decimal(10**38 - 1), Decimal(1 - 10**38)  # -most would be rounded
    huge = [(1, most), (1, most), (2, most), (2, least), (3, least), (3, least), (4, most)]
    rows = [{"time": 1, "n": n, "huge": value} for n, value in huge]
    schema = [("time", "int64"), ("n", "int32"), ("huge", "decimal128(38,0)")]

    def run(overflow: str, rows: list[dict[str, Any]]) -> dict[int, tuple]:
        plan = plan_of(schema, ["n"], NoWindow(), aggregates, overflow)
        backends = cluster_of(plan, executors)
        for i, backend in enumerate(backends):
            update(backend, rows[i::executors])
        exchange(backends)
        found = [row for b in backends for row in rows_of(b.trigger())]
        return {row["n"]: (row["sum(huge)"], row["avg(huge)"]) for row in found}

    lost = (None, None)
    assert run("wrap", rows) == {1: lost, 2: (0, 0), 3: lost, 4: (most, None)}
    for some in (rows[:2], rows[4:6], rows[6:]):
        with pytest.raises(StateError, match=r"(sum|avg)\(huge\).*overflow=wrap"):
            run("error", some)


def test_values_of_any_length_are_counted() -> None:
    """One of 32 KiB ended the job with an error about the length of its key."""
    plan = plan_of(SCHEMA, ["n"], NoWindow(), [("approx_count_distinct", "s")])
    backends = cluster_of(plan, 2)
    rows = [{**some_rows(1, 1, 1, 0.0)[0], "s": "x" * n} for n in (0, 32_760, 100_000, 100_000)]
    for i, backend in enumerate(backends):
        update(backend, rows[i::2])
    exchange(backends)
    found = [row for b in backends for row in rows_of(b.trigger())]
    assert [row["approx_count_distinct(s)"] for row in found] == [3]


def test_a_variance_over_what_is_not_finite_is_nan() -> None:
    """As in Spark, also of one value: it was 0.0 then, and infinite of several."""
    plan = plan_of(SCHEMA, ["n"], NoWindow(), [("var_pop", "x"), ("stddev_samp", "x")])
    for executors in (1, 2):
        backends = cluster_of(plan, executors)
        for n, x in enumerate((math.nan, math.inf, -math.inf)):
            for key, values in ((n, [x]), (n + 10, [x, 1.0, 2.0]), (n + 20, [1.0, 2.0, x])):
                for i, value in enumerate(values):
                    row = {**some_rows(1, 1, 1, 0.0)[0], "n": key, "x": value}
                    update(backends[i % executors], [row])
        exchange(backends)
        rows = [row for b in backends for row in rows_of(b.trigger())]
        assert len(rows) == 9 and all(math.isnan(row["var_pop(x)"]) for row in rows)
        for row in rows:
            deviation = row["stddev_samp(x)"]
            assert deviation is None if row["n"] < 10 else math.isnan(deviation)


@pytest.mark.parametrize("overflow", ["error", "wrap"])
def test_an_average_of_decimals_that_leaves_its_type(overflow: str) -> None:
    """It ended the job without a name, also where sums may wrap."""
    schema = [("time", "int64"), ("big", "decimal128(38,0)")]
    plan = plan_of(schema, [], NoWindow(), [("avg", "big")], overflow)
    backend = backend_of(plan)
    update(backend, [{"time": 1, "big": Decimal(9 * 10**37)}])
    if overflow == "error":
        with pytest.raises(StateError, match=r"avg\(big\): .*decimal128\(38, 4\).*overflow=wrap"):
            backend.trigger()
    else:
        assert rows_of(backend.trigger()) == [{"avg(big)": None}]


@pytest.mark.parametrize("executors", [1, 2])
def test_deviations_of_infinite_values_are_nan(executors: int) -> None:
    """As in Spark and DuckDB, and not sometimes infinite."""
    plan = plan_of(SCHEMA, ["n"], NoWindow(), [("stddev_pop", "x"), ("var_samp", "x")])
    backends = cluster_of(plan, executors)
    row = some_rows(1, 1, 1, 0.0)[0]
    given_rows = [row | {"n": 1, "x": float("inf")}, row | {"n": 1, "x": 1.0}]
    given_rows += [row | {"n": 2, "x": 1e200}, row | {"n": 2, "x": -1e200}]
    for i, backend in enumerate(backends):
        update(backend, given_rows[i::executors])
    exchange(backends)
    found = {r["n"]: r["stddev_pop(x)"] for b in backends for r in rows_of(b.trigger())}
    assert np.isnan(found[1]) and found[2] == float("inf")


def test_a_sum_of_large_unsigned_integers_names_the_column() -> None:
    backend = backend_of(plan_of(SCHEMA, ["n"], NoWindow(), [("sum", "u")]))
    with pytest.raises(StateError, match=r"column u: a uint64 value from 2\*\*63 on"):
        update(backend, [some_rows(1, 1, 1, 0.0)[0] | {"u": 2**63}])


def test_an_average_of_large_unsigned_integers() -> None:
    """It was an error, and negative where sums may wrap: its sum need not fit into int64."""
    plan = plan_of(SCHEMA, ["n"], NoWindow(), [("avg", "u")], "wrap")
    backend = backend_of(plan)
    row = some_rows(1, 1, 1, 0.0)[0]
    update(backend, [row | {"u": 2**64 - 1}, row | {"u": 2**63}, row | {"u": None}])
    assert rows_of(backend.trigger())[0]["avg(u)"] == pytest.approx((2**64 + 2**63) / 2)


@pytest.mark.parametrize("target", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("keys", [("i",), ("s", "n")], ids="-".join)
def test_a_snapshot_restores_into_any_number_of_executors(keys: tuple, target: int) -> None:
    plan = plan_of(SCHEMA, keys, Sliding(size_us=100, slide_us=50), AGGREGATES)
    rows = some_rows(11, 600, 30, 0.2)
    backends = cluster_of(plan, 2)
    for i, backend in enumerate(backends):
        update(backend, rows[i::2][:150])
    exchange(backends)
    others = cluster_of(plan, target)
    keys_of = [sum(len(b.engine.table(n)) for n in b.engine.slots) for b in backends]
    restored = [restore(others, backend, vparts) for backend, vparts in zip(backends, HALVES)]
    assert restored == keys_of
    for i, backend in enumerate(others):
        update(backend, (rows[0::2][150:] + rows[1::2][150:])[i::target])
    exchange(others)
    assert_same(plan, emitted(plan, others), expected(plan, rows))


def test_a_snapshot_into_as_many_executors_is_exact() -> None:
    plan = plan_of(SCHEMA, ["n"], Tumbling(size_us=500), AGGREGATES)
    rows = some_rows(5, 400, 10, 0.1)
    backends, others = cluster_of(plan, 2), cluster_of(plan, 2)
    for i, backend in enumerate(backends):
        update(backend, rows[i::2])
    exchange(backends)
    for backend, vparts in zip(backends, HALVES, strict=True):
        restore(others, backend, vparts)
    before, after = (
        sorted(map(repr, [r for b in group for r in rows_of(b.trigger(10_000))]))
        for group in (backends, others)
    )
    assert before == after


@pytest.mark.parametrize("written_by", [1, 2], ids=["copied", "folded"])
@pytest.mark.parametrize("keys", [["s"], ["i"]], ids="-".join)
def test_a_damaged_snapshot_is_refused_and_leaves_nothing_usable(
    keys: list[str], written_by: int
) -> None:
    plan = plan_of(SCHEMA, keys, Tumbling(size_us=500), ["count", ("avg", "x")])
    backend = backend_of(plan, 0, written_by)
    backend.engine.own([0] * 256)
    update(backend, some_rows(5, 50, 10, 0.1))
    head, words = backend.snapshot()[0]
    longer = words.copy()
    longer[backend.layout.words] = 1 << 40  # bytes of the first key, if it has a length
    damaged = [
        (head, words[:-1], (0, 256), "is cut off"),
        (head, np.concatenate([words, words]), (0, 256), "was there before"),
        (head, words, (0, 1), "virtual partition that is none of its part's"),
        ({**head, "bucket": 1 << 62}, words, (0, 256), "a window that cannot be"),
        ({**head, "bucket": -9}, words, (0, 256), "a window that cannot be"),
    ]
    if keys == ["s"]:
        damaged.append((head, longer, (0, 256), "is cut off"))
    for described, data, vparts, what in damaged:
        other = backend_of(plan)
        with pytest.raises(StateError, match=what):
            other.restore(Section(described, data), written_by, vparts)
        with pytest.raises(StateError, match="by half"):
            other.snapshot()
    for wrong in ({}, {"bucket": 0}, {"bucket": 0, "entries": -1}, {"bucket": "0", "entries": 1}):
        with pytest.raises(FormatError, match="a section of a snapshot"):
            backend_of(plan).restore(Section(wrong, words), written_by, (0, 256))


def test_many_keys_in_stretches_of_an_index_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """In sections of a bounded size: a reader has one after the other in the same memory."""
    plan = plan_of(SCHEMA, ["i"], NoWindow(), ["count"])
    backend, n = backend_of(plan), 60_000
    values = {"i": pa.array(np.arange(n) * 7919)}
    backend.update(values, n, time_us=np.zeros(n, np.int64))
    backend.update(values, n, time_us=np.zeros(n, np.int64))
    assert sum(b.num_rows for b in backend.trigger()) == n
    monkeypatch.setattr(snapshot_rows, "SECTION_BYTES", 100_000)
    sections = backend.snapshot()
    assert index_log(n) > 18 + 1  # so there is more than one stretch
    assert len(sections) > 9 and max(s.data.nbytes for s in sections) <= 100_000
    assert {s.head["entries"] for s in sections} == {n}
    other = backend_of(plan)
    assert sum(other.restore(section, 1, (0, 256)) for section in sections) == n
    assert other.trigger() == []  # none of them has changed since
    other.update(values, n, time_us=np.zeros(n, np.int64))
    rows = pa.Table.from_batches(other.trigger())
    assert set(rows["count"].to_pylist()) == {3} and len(set(rows["i"].to_pylist())) == n


def test_a_replay_applies_lost_partitions_only() -> None:
    plan = plan_of(SCHEMA, ["i"], NoWindow(), ["count"])
    rows = some_rows(5, 900, 200, 0.0)
    backend, half = backend_of(plan), backend_of(plan)
    update(backend, rows)
    half.apply_only(range(128))
    update(half, rows)
    half.apply_only(range(128, 256))
    update(half, rows)
    half.apply_only(None)
    assert sorted(map(repr, rows_of(half.trigger()))) == sorted(
        map(repr, rows_of(backend.trigger()))
    )


def test_what_no_cell_holds_is_refused() -> None:
    plan = plan_of(SCHEMA, ["i"], Tumbling(size_us=5), [("collect_list", "x")])
    with pytest.raises(ConfigError, match="chains"):
        backend_of(plan)


@pytest.mark.parametrize("executors", [1, 2, 3, 11])
def test_blocks_of_one_window_reach_every_owner_once(executors: int) -> None:
    plan = plan_of(SCHEMA, ["i"], Tumbling(size_us=1000), ["count", ("sum", "i"), ("sum", "x")])
    rows = some_rows(3, 3000, 500, 0.0)
    found: dict[tuple, Any] = {}
    for vparts in (range(77), range(77, 256)):  # as two replays, each for a part of the keys
        backends = cluster_of(plan, executors, adaptive_ratio=0)
        used = 0
        for i, backend in enumerate(backends):
            backend.apply_only(vparts)
            for begin in range(0, 3000, 1000):
                used += update(backend, rows[begin : begin + 1000][i::executors]).rows
        exchange(backends)
        part = emitted(plan, backends)
        assert not set(found) & set(part)
        assert used == sum(group[plan.aggregates[0].name] for group in part.values())
        found |= part
    assert_same(plan, found, expected(plan, rows))


def test_a_window_begins_with_the_index_of_one_that_was_dropped() -> None:
    plan = plan_of(SCHEMA, ["i"], Tumbling(size_us=100), ["count"])
    backend = backend_of(plan)
    slots = []
    for window, keys in enumerate((5000, 1, 1)):
        update(backend, [{"time": window * 100, "i": 0}])
        slots.append(backend.engine.table(window).slots)
        update(backend, [{"time": window * 100, "i": key} for key in range(keys)])
        full = backend.engine.table(window).slots
        (out,) = backend.trigger(window * 100 + 100)
        assert out.num_rows == keys
        if window == 0:
            grown = full
    assert slots[0] < slots[1] == grown
    assert slots[2] == slots[0]  # the second had one key: its size was not handed on
