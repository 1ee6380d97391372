"""Executors of append state in one process: what the tests drive in place of a whole engine."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pyarrow as pa

from kdirect.state.append import AppendState
from kdirect.state.arena import PageMemory, StateMemory
from kdirect.state.expressions import matches
from kdirect.state.schema import arrow_type
from tests.state.family import Case, types_unit
from tests.state.reference import START, Row


class Chunk:
    """Memory for pages."""

    def __init__(self, length: int) -> None:
        self.words = np.zeros(length // 8, np.uint64)
        self.address, self.length = self.words.ctypes.data, length


def bytes_at(address: int, length: int) -> bytes:
    import ctypes

    return ctypes.string_at(address, length)


def page_memory(page_bytes: int = 1 << 16) -> PageMemory:
    return PageMemory(Chunk, page_bytes, 64, 1 << 28)


def owners_of(executors: int) -> list[int]:
    return [v * executors // 256 for v in range(256)]


class Cluster:
    """Executors that exchange pages through memory, in an order that a seed decides."""

    def __init__(self, plan: Any, executors: int, seed: int = 0, limit: int = 1 << 26,
                 page_bytes: int = 4096) -> None:  # fmt: skip
        self.plan = plan
        self.random = random.Random(seed)
        self.memories = [StateMemory.anonymous(limit) for _ in range(executors)]
        self.executors = [
            AppendState(plan, memory, page_memory(page_bytes), executor=i, executors=executors,
                        owners=owners_of(executors))
            for i, memory in enumerate(self.memories)
        ]  # fmt: skip
        self.late = 0
        self.closed = START

    def batch(self, batch: Any, now_us: int, closes: int) -> list[Row]:
        """Run a batch: blocks and pages in any order, then windows end at `closes`."""
        for executor in self.executors:
            executor.begin(self.closed)
        work = []
        for side, source in enumerate(self.plan.inputs):
            for records in batch.get(source.name, {}).values():
                at = self.random.randrange(len(self.executors))
                cut = self.random.randint(0, len(records))
                work += [
                    (at, side, source, part) for part in (records[:cut], records[cut:]) if part
                ]
        self.random.shuffle(work)
        pages = []
        for at, side, source, records in work:
            self.late += update(self.executors[at], side, source, records, now_us)
            if self.random.random() < 0.4:
                pages += self.flush(at)
        for at in range(len(self.executors)):
            pages += self.flush(at)
        self.random.shuffle(pages)
        for sender, leader, page in pages:
            self.executors[leader].merge(sender, page)
        found = [row for e in self.executors for b in e.trigger(closes) for row in b.to_pylist()]
        self.closed = closes
        return found

    def flush(self, at: int) -> list[tuple[int, int, bytes]]:
        found = []
        for leader in range(len(self.executors)):
            if leader != at:
                delta = self.executors[at].flush(leader)
                found += [(at, leader, bytes_at(*page)) for page in delta.pages]
                self.executors[at].release(delta.pages)
        return found

    def move(self, executors: int) -> None:
        """Snapshot everything and go on with another number of executors."""
        sections = [section for e in self.executors for section in e.snapshot()]
        fresh = Cluster(self.plan, executors, self.random.random())
        for executor in fresh.executors:
            for section in sections:
                executor.restore(section, len(self.executors), (0, 256))
        self.memories, self.executors = fresh.memories, fresh.executors


def update(executor: AppendState, side: int, source: Any, records: list[Row], now_us: int) -> int:
    """Give rows to an executor as a source would: usable event times only, and after `where`."""
    unit = types_unit(source)
    usable = [
        row
        for row in records
        if row[source.time] is not None
        and 0 <= row[source.time] * unit <= now_us + source.max_ahead_us
    ]
    table = pa.table(
        {f.name: pa.array([r[f.name] for r in usable], arrow_type(f.type)) for f in source.schema}
    )
    times = np.array([row[source.time] * unit for row in usable], np.int64)
    if source.where is not None:
        columns = {name: table.column(name) for name in table.column_names}
        mask = matches(source.where, columns, len(usable))
        table = table.filter(mask)
        times = times[np.asarray(mask.to_numpy(zero_copy_only=False), bool)]
    return executor.update({n: table.column(n) for n in table.column_names}, times, side)


def run_case(case: Case, cluster: Cluster, clocks: list[int], move: list[int]) -> list[Row]:
    """All rows that the batches emit; before batch i the executors become `move[i]`, if not 0."""
    found: list[Row] = []
    for i, (rows, now_us) in enumerate(case.batches):
        if i < len(move) and move[i]:
            cluster.move(move[i])
        found += cluster.batch(rows, now_us, clocks[i])
    return found
