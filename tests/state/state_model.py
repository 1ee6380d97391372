"""A plain model of aggregation in dicts and lists, and executors that exchange pages in memory."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from decimal import ROUND_HALF_UP, Decimal, localcontext
from typing import Any

import numpy as np
import pyarrow as pa

from kdirect.rdma.contract import Memory
from kdirect.state import Aggregate, AggregatePlan, Input
from kdirect.state.arena import PageMemory, StateMemory
from kdirect.state.backend import Backend
from kdirect.state.windows import NoWindow, Window

VPARTS = 256


def plan_of(schema: Sequence[tuple[str, str]], keys: Sequence[str], window: Window,
            aggregates: Sequence[Any], overflow: str = "error") -> AggregatePlan:  # fmt: skip
    given = Input(topic="t", schema=tuple(schema), time="time")
    return AggregatePlan(input=given, keys=tuple(keys), window=window,
                         aggregates=tuple(aggregates), overflow=overflow)  # fmt: skip


def owners_of(executors: int) -> list[int]:
    return [v * executors // VPARTS for v in range(VPARTS)]


def page_memory(**options: Any) -> PageMemory:
    return PageMemory(Memory.anonymous, footer_bytes=32, **options)


def backend_of(plan: AggregatePlan, executor: int = 0, executors: int = 1,
               memory: StateMemory | None = None, **options: Any) -> Backend:  # fmt: skip
    return Backend(
        plan, executor=executor, executors=executors, owners=owners_of(executors),
        memory=memory or StateMemory.anonymous(1 << 28), pages=page_memory(), **options,
    )  # fmt: skip


def cluster_of(plan: AggregatePlan, executors: int, **options: Any) -> list[Backend]:
    return [backend_of(plan, i, executors, **options) for i in range(executors)]


def update(backend: Backend, rows: Sequence[dict[str, Any]]) -> Any:
    kinds = {f.name: f.arrow.type for f in backend.plan.input.schema}
    columns = {n: pa.array([r[n] for r in rows], kinds[n]) for n in backend.plan.columns_kept()}
    times = pa.array([r["time"] for r in rows], pa.int64())
    return backend.update(columns, len(rows), time_us=times)


def exchange(backends: Sequence[Backend], order: Iterable[int] | None = None) -> None:
    """Flush every fragment and merge it at its leader; helpers come in the given order."""
    for sender in order if order is not None else range(len(backends)):
        for leader, backend in enumerate(backends):
            if leader != sender:
                delta = backends[sender].flush(leader)
                for page in delta.pages:
                    backend.merge(sender, page.address, page.length)
                backends[sender].release(delta.pages)


def merge_bytes(backend: Backend, sender: int, page: Any) -> int:
    """Merge a page that lies in a buffer, at whatever address."""
    view = np.frombuffer(page, np.uint8)
    if view.ctypes.data % 8:
        view = np.frombuffer(bytearray(page) + bytearray(8), np.uint8)[: len(view)].copy()
    return backend.merge(sender, view.ctypes.data, len(view))


def rows_of(batches: Iterable[pa.RecordBatch]) -> list[dict[str, Any]]:
    return [row for batch in batches for row in batch.to_pylist()]


def canonical(value: Any) -> Any:
    """A key as Spark groups it."""
    if isinstance(value, float):
        return "nan" if math.isnan(value) else value + 0.0
    return value


def expected(plan: AggregatePlan, rows: Sequence[dict[str, Any]]) -> dict[tuple, dict[str, Any]]:
    """(keys, window start) -> results."""
    groups: dict[tuple, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        key = tuple(canonical(row[k]) for k in plan.keys)
        if isinstance(plan.window, NoWindow):
            groups[(*key, None)].append(row)
            continue
        size, slide = plan.window.size_us, plan.window.slide_us
        start = (row["time"] - plan.window.origin_us) // slide * slide + plan.window.origin_us
        while start + size > row["time"]:
            groups[(*key, start)].append(row)
            start -= slide
    return {
        key: {a.name: _aggregate(plan, a, group) for a in plan.aggregates}
        for key, group in groups.items()
    }


def _float_order(value: Any) -> Any:
    if isinstance(value, float):
        return (1, 0.0, 0) if math.isnan(value) else (0, value, math.copysign(1, value))
    return value


def _aggregate(plan: AggregatePlan, aggregate: Aggregate, rows: list[dict[str, Any]]) -> Any:
    kind, name = aggregate.kind, aggregate.column
    if name is None:
        return len(rows)
    values = [r[name] for r in rows if r[name] is not None]
    if kind == "count":
        return len(values)
    if kind in ("first", "last"):
        sign = 1 if kind == "first" else -1
        least = min(sign * r["time"] for r in rows)
        tied = [r[name] for r in rows if sign * r["time"] == least]
        return None if None in tied else min(tied, key=_float_order)
    if kind == "approx_count_distinct":
        return len({canonical(v) for v in values})
    if not values:
        return None
    if kind in ("min", "max"):
        return (min if kind == "min" else max)(values, key=_float_order)
    decimal = isinstance(values[0], Decimal)
    if kind == "sum":
        return sum(values) if decimal or isinstance(values[0], int) else math.fsum(values)
    if kind == "avg":
        if decimal:
            kinds = {f.name: f.arrow.type for f in plan.output}
            with localcontext() as context:
                context.prec = 80
                unit = Decimal(1).scaleb(-kinds[aggregate.name].scale)
                return (sum(values) / len(values)).quantize(unit, ROUND_HALF_UP)
        return math.fsum(values) / len(values)
    floats = [float(v) for v in values]
    if kind.endswith("samp") and len(floats) < 2:
        return None
    variance = (statistics.variance if kind.endswith("samp") else statistics.pvariance)(floats)
    return math.sqrt(variance) if kind.startswith("stddev") else variance


def as_groups(plan: AggregatePlan, rows: Iterable[dict[str, Any]]) -> dict[tuple, dict[str, Any]]:
    """Output rows in the form of `expected`; a group that occurs twice is an error."""
    epoch = None
    found: dict[tuple, dict[str, Any]] = {}
    for row in rows:
        start = row.get("window_start")
        if start is not None:
            epoch = start.replace(year=1970, month=1, day=1, hour=0, minute=0, second=0,
                                  microsecond=0)  # fmt: skip
            delta = start - epoch
            start = (delta.days * 86_400 + delta.seconds) * 1_000_000 + delta.microseconds
        key = (*(canonical(row[k]) for k in plan.keys), start)
        assert key not in found, f"{key} was emitted twice"
        found[key] = {a.name: row[a.name] for a in plan.aggregates}
    return found


def assert_same(plan: AggregatePlan, got: dict[tuple, Any], want: dict[tuple, Any],
                error: float = 1e-9) -> None:  # fmt: skip
    assert got.keys() == want.keys()
    for key, results in want.items():
        for aggregate in plan.aggregates:
            a, b = got[key][aggregate.name], results[aggregate.name]
            where = (key, aggregate.name, a, b)
            if aggregate.kind == "approx_count_distinct":
                assert abs(a - b) <= 1 + 0.25 * b, where
            elif isinstance(b, float) and a is not None:
                scale = max(1.0, abs(b))
                same = math.isnan(a) and math.isnan(b)
                assert same or math.isclose(a, b, rel_tol=error, abs_tol=error * scale), where
            else:
                assert a == b and type(a) is type(b), where
