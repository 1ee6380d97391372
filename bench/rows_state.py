"""Bench rows of the state backend: updates and merges of one executor, on one core.

The rates count rows a CPU second of the process; each figure has the quartiles of its turns, the
CPU seconds of the median turn, and the rate by the clock on the wall.  Memory is recycled: every
turn fills tables that the turns before it have warmed, as windows do.  DuckDB and pyarrow group the
same rows, with one thread, from the same Arrow columns, and take turns with us; unlike ours their
group-bys know no windows, keep nothing for the next block and may use fresh memory.  Our rows come
in blocks of 64 Ki with event times, and go through the whole of `Backend.update`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
from sides import Figure, figure, spread_of

from kdirect.format.fixed_layout import FixedLayout
from kdirect.rdma.contract import Memory
from kdirect.state import AggregatePlan, Input, Tumbling
from kdirect.state.arena import PageMemory, StateMemory
from kdirect.state.backend import Backend

BLOCK = 1 << 16
CASES = ((1_000, 1 << 20), (100_000, 1 << 20), (2_000_000, 2_000_000))  # keys, rows
WINDOW_US = 600_000_000
EXECUTORS = 2
LEAST_TURNS = 5


def _plan() -> AggregatePlan:
    layout = FixedLayout.of("k:int64", "v:int64", "time:int64")
    given = Input(topic="t", value_format="fixed", layout=layout, time="time")
    return AggregatePlan(input=given, keys=("k",), window=Tumbling(size_us=WINDOW_US),
                         aggregates=("count", ("sum", "v")))  # fmt: skip


def _backend(executors: int, executor: int, owners: list[int], memory: StateMemory,
             **options: Any) -> Backend:  # fmt: skip
    pages = PageMemory(Memory.anonymous, footer_bytes=32)
    return Backend(_plan(), executor=executor, executors=executors, owners=owners, memory=memory,
                   pages=pages, **options)  # fmt: skip


def _rows(keys: int, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    k = rng.permutation(rows) if keys == rows else rng.integers(0, keys, rows)
    times = np.sort(rng.integers(0, WINDOW_US - 1, rows))
    return k, rng.integers(0, 1000, rows), times


class Turns:
    """CPU seconds, and seconds, of each turn of a function."""

    def __init__(self) -> None:
        self.cpu_s: list[float] = []
        self.wall_s: list[float] = []

    def run(self, function: Callable[[], object]) -> None:
        cpu, wall = time.process_time(), time.perf_counter()
        function()
        self.cpu_s.append(time.process_time() - cpu)
        self.wall_s.append(time.perf_counter() - wall)

    def rates(self, count: int) -> list[float]:
        """Of so many rows a turn, by CPU time."""
        return [count / seconds for seconds in self.cpu_s]


def _turns(seconds: float, functions: dict[str, Callable[[], object]]) -> dict[str, Turns]:
    """Each function's turns, which alternate; the first turn of each is not counted."""
    found = {name: Turns() for name in functions}
    end = time.perf_counter() + seconds
    for function in functions.values():
        function()
    while time.perf_counter() < end or len(found[next(iter(found))].cpu_s) < LEAST_TURNS:
        for name, function in functions.items():
            found[name].run(function)
    return found


def _compared(row: str, ours: Turns, done: int, unit: str, against: str, theirs: Turns,
              theirs_done: int, **settings: Any) -> Figure:  # fmt: skip
    """Medians of `ours` and `theirs`, whose turns did so much, with what there is of the turns."""
    rates, others = ours.rates(done), theirs.rates(theirs_done)
    median = statistics.median
    return figure(row, median(rates), unit, against, median(others), **settings,
                  **spread_of(rates, others), cpu_s=median(ours.cpu_s),
                  against_cpu_s=median(theirs.cpu_s), per_wall_s=done / median(ours.wall_s),
                  against_per_wall_s=theirs_done / median(theirs.wall_s))  # fmt: skip


def _updates(backend: Backend, k: np.ndarray, v: np.ndarray, times: np.ndarray) -> None:
    for begin in range(0, len(k), BLOCK):
        part = slice(begin, begin + BLOCK)
        columns = {"k": pa.array(k[part]), "v": pa.array(v[part])}
        backend.update(columns, len(k[part]), time_us=times[part])


def state_update(seconds: float, quick: bool) -> list[Figure]:
    """count and sum by key and window, beside DuckDB's and pyarrow's group-by."""
    import duckdb

    pa.set_cpu_count(1)
    connection = duckdb.connect()
    connection.execute("set threads = 1")
    out = []
    for keys, rows in CASES[:1] if quick else CASES:
        k, v, times = _rows(keys, rows)
        backend = _backend(1, 0, [0] * 256, StateMemory.anonymous(1 << 30))
        table = pa.table({"k": k, "v": v})
        connection.register("given", table)

        def ours(backend: Backend = backend, given: Any = (k, v, times)) -> None:
            backend.clear()
            _updates(backend, *given)

        def theirs(table: pa.Table = table) -> object:
            grouped = table.group_by("k", use_threads=False)
            return grouped.aggregate([("v", "count"), ("v", "sum")])

        def duck() -> object:
            return connection.sql(
                "select k, count(*), sum(v) from given group by k"
            ).to_arrow_table()

        turns = _turns(seconds / len(CASES), {"ours": ours, "duckdb": duck, "pyarrow": theirs})
        groups = sum(b.num_rows for b in backend.trigger(WINDOW_US))
        if groups != theirs().num_rows:
            raise RuntimeError("the groups are not those of pyarrow")
        for name in ("duckdb", "pyarrow"):
            out.append(_compared("state-update", turns["ours"], rows, "rows/s",
                                 f"{name}, one thread", turns[name], rows, keys=keys, rows=rows,
                                 turns=len(turns["ours"].cpu_s)))  # fmt: skip
    return out


def state_merge(seconds: float, quick: bool) -> list[Figure]:
    """A leader merges what a helper made of the same rows: entries, or tuples."""
    out = []
    for keys, rows in CASES[:1] if quick else CASES:
        given = _rows(keys, rows)
        for mode in ("slash", "uppar"):
            owners = [0] * 256
            leader = _backend(EXECUTORS, 0, owners, StateMemory.anonymous(1 << 30))
            helper = _backend(EXECUTORS, 1, owners, StateMemory.anonymous(1 << 30), mode=mode,
                              adaptive_ratio=0)  # fmt: skip
            _updates(helper, *given)
            delta = helper.flush(0)
            count = delta.entries if mode == "slash" else delta.tuples

            def merge(leader: Backend = leader, delta: Any = delta) -> None:
                leader.clear()
                for page in delta.pages:
                    leader.merge(1, page.address, page.length)

            def update(helper: Backend = helper, given: Any = given) -> None:
                _updates(helper, *given)
                helper.release(helper.flush(0).pages)

            turns = _turns(seconds / len(CASES) / 2, {"merge": merge, "update": update})
            out.append(_compared("state-merge", turns["merge"], count,
                                 "entries/s" if mode == "slash" else "tuples/s",
                                 "rows/s of the helper's update and flush", turns["update"], rows,
                                 keys=keys, rows=rows, mode=mode, count=count,
                                 pages=len(delta.pages),
                                 turns=len(turns["merge"].cpu_s)))  # fmt: skip
    return out
