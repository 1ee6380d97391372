"""The laws of the delta protocol: what a leader puts out depends neither on the order in which the
deltas of several helpers come, nor on what comes twice or from an older attempt, nor on how rows
are dealt to executors and cut into epochs.

The states are the real ones, behind `kdirect.state.leader.step` as in a batch.  A leader has rows
of its own too.  Results are compared bit for bit: the `repr` of a float is exact.  Addition of
floats is not associative.  So floats are of any size where only the order of arrival differs
(each helper's have a lane of their own), and multiples of a quarter where rows are dealt and cut in
another way.
"""

from __future__ import annotations

import datetime
import math
import os
import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdirect.state import (
    Aggregate,
    AggregatePlan,
    Input,
    JoinPlan,
    NoWindow,
    Session,
    Sliding,
    Tumbling,
    leader,
)
from kdirect.state.accumulate import Kernel
from kdirect.state.accumulators import cell_of
from kdirect.state.aggregates import KINDS
from kdirect.state.arena import StateMemory
from kdirect.state.batches import Partition
from kdirect.state.executor_state import Place, State, open_state
from kdirect.state.messages import StartBatch
from kdirect.state.plan import VPARTS
from kdirect.state.schema import arrow_type
from kdirect.state.source import Block
from kdirect.state.windows import TIME_MIN
from tests.state.append_run import bytes_at
from tests.state.family import fits
from tests.state.state_model import page_memory

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")  # values may be infinite

EXAMPLES = int(os.environ.get("KDIRECT_EXAMPLES") or 15)  # of each law and plan
LEADER = 0
ATTEMPT = 5
CLOSES = (12, 1 << 40)  # after each of two batches
VALUE_TYPES = {
    "i": "int64", "u": "uint64", "b": "bool", "d": "date32", "x": "float64", "f": "float32",
    "m": "decimal128(12,2)", "w": "decimal128(30,3)",
}  # fmt: skip
SCHEMA = (("k", "int64"), ("time", "int64"), ("s", "string"), *VALUE_TYPES.items())
MOMENTS = ("stddev_samp", "stddev_pop", "var_samp", "var_pop")
SPECIAL = (0.0, -0.0, 1e300, -1e300, 1e-300, math.inf, -math.inf, math.nan)


def kept_in_cells() -> list[Aggregate]:
    """Every aggregate of every type that a cell holds."""
    found = [Aggregate(kind="count", name="rows")]
    for kind in KINDS:
        for column, type_ in VALUE_TYPES.items():
            made = Aggregate(kind=kind, column=column, name=f"{kind}_{column}", precision_bits=4)
            if fits(kind, type_) and made.kept_as({column: type_}) == "cell":
                found.append(made)
    return found


def aggregate_plan(window: Any, aggregates: Sequence[Any]) -> AggregatePlan:
    source = Input(topic="t", schema=SCHEMA, time="time")
    return AggregatePlan(
        input=source, keys=("k",), window=window, aggregates=tuple(aggregates), overflow="wrap"
    )


def join_plan(window: Any, how: str) -> JoinPlan:
    sides = [
        Input(
            topic=side,
            schema=tuple((name if name == "time" else side + name, kind) for name, kind in SCHEMA),
            time="time",
        )
        for side in "lr"
    ]
    return JoinPlan(
        left=sides[0], right=sides[1], left_keys=("lk",), right_keys=("rk",), window=window,
        how=how, columns=((0, "ls", "ls"), (0, "lx", "lx"), (1, "rs", "rs"), (1, "rm", "rm")),
    )  # fmt: skip


TEXTS = [(kind, "s") for kind in ("min", "max", "first", "last", "collect_set")]
PLANS: dict[str, AggregatePlan | JoinPlan] = {
    "cells": aggregate_plan(Tumbling(size_us=12), kept_in_cells()),
    "sliced cells": aggregate_plan(Sliding(size_us=12, slide_us=5), kept_in_cells()),
    "cells without windows": aggregate_plan(NoWindow(), kept_in_cells()),
    "sessions": aggregate_plan(Session(gap_us=2), kept_in_cells()),
    "texts": aggregate_plan(Tumbling(size_us=12), [*TEXTS, ("collect_set", "x"), ("sum", "x")]),
    "texts of sessions": aggregate_plan(Session(gap_us=2), [*TEXTS, ("avg", "x")]),
    "lists": aggregate_plan(Tumbling(size_us=12), [("collect_list", "x"), ("collect_list", "s")]),
    "full join": join_plan(Tumbling(size_us=12), "full"),
    "join of sessions": join_plan(Session(gap_us=2), "left"),
}


# -- rows ------------------------------------------------------------------------------------------


class Given(NamedTuple):
    """One row that Hypothesis draws: where it is read, and what its values are made of."""

    batch: int
    executor: int
    side: int  # of a join
    key: int
    time: int
    values: int


def drawn(executors: int) -> st.SearchStrategy[list[Given]]:
    row = st.builds(
        Given,
        st.integers(0, 1),
        st.integers(0, executors - 1),
        st.integers(0, 1),
        st.integers(0, 1),
        st.integers(0, 23),
        st.integers(0, 1 << 20),
    )
    return st.lists(row, min_size=1, max_size=40)


def values_of(drawn_row: Given, *, exact: bool) -> dict[str, Any]:
    """The columns of a row; with `exact` its floats are multiples of a quarter."""
    chance = random.Random(drawn_row.values)

    def maybe(value: Any) -> Any:
        return None if chance.random() < 0.2 else value

    def real() -> float:
        if exact:
            return chance.randrange(-400, 400) / 4
        return chance.choice(SPECIAL) if chance.random() < 0.04 else chance.uniform(-50, 50)

    return {
        "k": drawn_row.key,
        "time": drawn_row.time,
        "s": maybe("é" * chance.randrange(3) + "s" * chance.randrange(9)),
        "i": maybe(chance.randrange(-(1 << 62), 1 << 62)),  # the sums wrap
        "u": maybe(chance.randrange(1 << 64)),
        "b": maybe(chance.random() < 0.5),
        "d": maybe(datetime.date(2020, 1, 1 + chance.randrange(9))),
        "x": maybe(real()),
        "f": maybe(float(np.float32(min(1e30, max(-1e30, real()))))),
        "m": maybe(Decimal(chance.randrange(-(10**6), 10**6)).scaleb(-2)),
        "w": maybe(Decimal(chance.randrange(-(10**25), 10**25)).scaleb(-3)),
    }


def block_of(rows: list[dict[str, Any]], names: Sequence[tuple[str, str]]) -> Block:
    """Rows as a source gives them, under the names (in the schema, in the plan)."""
    kinds = dict(SCHEMA)
    columns = {
        ours: pa.array([row[name] for row in rows], arrow_type(kinds[name])) for name, ours in names
    }
    return Block(
        rows=len(rows), columns=columns, time_us=np.array([row["time"] for row in rows], np.int64),
        min_time_us=None, max_time_us=None, clock_us=None, offsets=np.arange(len(rows)),
        next_offset=0, records=0, input_bytes=0,
    )  # fmt: skip


# -- executors -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Buffer:
    """A buffer as it comes from a helper: what its footer says, and a page unless it ends an
    epoch.  It offers what `State.merge` asks of the end of a channel."""

    page: leader.Page
    words: np.ndarray | None = None
    length: int = 0

    @property
    def address(self) -> int:
        assert self.words is not None
        return int(self.words.ctypes.data)

    @property
    def payload(self) -> memoryview:
        return memoryview(self.words).cast("B")[: self.length]


def start_of(batch: int, executors: int) -> StartBatch:
    before = TIME_MIN if batch == 0 else CLOSES[batch - 1]
    clock = {Partition("t", i): before for i in range(executors)}
    return StartBatch(
        attempt=ATTEMPT, batch=batch, ranges={}, clock=clock, idle=frozenset(),
        closed_before=before, now_us=0,
    )  # fmt: skip


def state_of(plan: Any, executor: int, executors: int, mode: str) -> State:
    """An executor's state; the first one leads everything."""
    place = Place(
        executor=executor, executors=executors, owners=(LEADER,) * VPARTS,
        memory=StateMemory.anonymous(1 << 26), pages=page_memory(page_bytes=16_384),
    )  # fmt: skip
    return open_state(plan, place, fresh=True, mode=mode, adaptive_ratio=0, epoch_bytes=1 << 30)


class Work:
    """The rows of both batches as they are read: by executor and batch, epochs of blocks."""

    def __init__(self, plan: Any, executors: int, rows: list[Given], cuts: random.Random, *,
                 exact: bool) -> None:  # fmt: skip
        """The rows of an executor stay in their order; `cuts` says where an epoch ends, and which
        executors send tuples in place of entries."""
        self.plan, self.executors = plan, executors
        self.modes = [cuts.choice(["slash", "uppar"]) for _ in range(executors)]
        self.epochs: list[list[list[list[tuple[Block, int]]]]] = []
        for executor in range(executors):
            of_batches = []
            for batch in (0, 1):
                epochs: list[list[tuple[Block, int]]] = [[]]
                for row in rows:
                    if (row.batch, row.executor) == (batch, executor):
                        side = row.side if isinstance(plan, JoinPlan) else 0
                        epochs[-1].append((self._block(row, side, exact=exact), side))
                        if cuts.random() < 0.3:
                            epochs.append([])
                of_batches.append(epochs)
            self.epochs.append(of_batches)

    def _block(self, row: Given, side: int, *, exact: bool) -> Block:
        wanted = self.plan.columns_decoded(side)
        prefix = "lr"[side] if isinstance(self.plan, JoinPlan) else ""
        names = [(name, prefix + name) for name, _ in SCHEMA if prefix + name in wanted]
        return block_of([values_of(row, exact=exact)], names)

    def sent_by(self, helper: int) -> list[Buffer]:
        """All that a helper sends, in its order."""
        state = state_of(self.plan, helper, self.executors, self.modes[helper])
        sent = []
        for batch, epochs in enumerate(self.epochs[helper]):
            state.begin_batch(start_of(batch, self.executors))
            for epoch, blocks in enumerate(epochs):
                for block, side in blocks:
                    state.update(block, side)
                delta = state.flush(LEADER)
                page = leader.Page(
                    sender=helper, attempt=ATTEMPT, batch=batch, epoch=epoch, sequence=0
                )
                for at in delta.pages:
                    sent.append(_buffer(page, bytes_at(at.address, at.length)))
                    page = page._replace(sequence=page.sequence + 1)
                state.release(delta.pages)
                last = epoch == len(epochs) - 1
                clock = {Partition("t", helper): CLOSES[batch]} if last else None
                sent.append(Buffer(page._replace(ends_epoch=not last, clock=clock)))
        return sent


def _buffer(page: leader.Page, data: bytes) -> Buffer:
    words = np.frombuffer(data + bytes(-len(data) % 8), np.uint64).copy()
    return Buffer(page, words, len(data))


class Leader:
    """The executor that leads all keys: it takes what comes as `BatchRun` does."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.state = state_of(work.plan, LEADER, work.executors, work.modes[LEADER])
        vparts = ((0, VPARTS), *((VPARTS, VPARTS) for _ in range(1, work.executors)))
        self.leading = leader.begin(LEADER, ATTEMPT, vparts)
        self.own: deque[tuple[Block, int]] = deque()
        self.rows: list[str] = []
        self.seen: Counter[str] = Counter()
        self.batch = -1

    @property
    def runs(self) -> bool:
        return self.leading.running is not None

    @property
    def reads(self) -> bool:
        """Are there rows of its own to apply, or is there their end to tell?"""
        return self.runs and LEADER not in self.leading.ended

    def start(self) -> None:
        self.batch += 1
        start = start_of(self.batch, self.work.executors)
        self.state.begin_batch(start)
        self.own.extend(b for epoch in self.work.epochs[LEADER][self.batch] for b in epoch)
        self._tell(start)

    def read(self) -> None:
        """Apply a block of its own rows; after the last one, say so."""
        if self.own:
            block, side = self.own.popleft()
            self.state.update(block, side)
        else:
            self._tell(leader.OwnRead({Partition("t", LEADER): CLOSES[self.batch]}))

    def take(self, buffer: Buffer) -> bool:
        """A buffer has come.  False: it stays where it is."""
        return self._tell(buffer.page, buffer)

    def _tell(self, event: leader.Event, buffer: Buffer | None = None) -> bool:
        self.leading, effects = leader.step(self.leading, event)
        for effect in effects:
            self.seen[type(effect).__name__] += 1
            match effect:
                case leader.Hold():
                    return False
                case leader.Merge(sender):
                    assert buffer is not None
                    if buffer.words is not None:
                        self.state.merge(sender, buffer)  # type: ignore[arg-type]
                case leader.Trigger(_, closes, _):
                    self.rows += [
                        f"batch {self.batch}: {_as_set(row)}"
                        for found in self.state.trigger(closes)
                        for row in found.to_pylist()
                    ]
                case leader.Refuse():
                    raise AssertionError(effect)
        return True


def _as_set(row: dict[str, Any]) -> dict[str, Any]:
    """A row whose lists, which have no order, are in one."""
    return {n: sorted(v, key=repr) if isinstance(v, list) else v for n, v in row.items()}


def in_turn(work: Work) -> Leader:
    """Both batches, one sender after the other; nothing comes twice."""
    made = Leader(work)
    sent = {helper: work.sent_by(helper) for helper in range(1, work.executors)}
    for batch in (0, 1):
        made.start()
        while made.reads:
            made.read()
        for buffers in sent.values():
            for buffer in buffers:
                if buffer.page.batch == batch:
                    assert made.take(buffer)
    return made


def in_any_order(work: Work, chance: random.Random) -> Leader:
    """The buffers of each helper in their order and all else in any; some come again, some come
    from an older attempt, and some before their batch begins."""
    made = Leader(work)
    coming = {helper: deque(work.sent_by(helper)) for helper in range(1, work.executors)}
    came: dict[int, list[Buffer]] = {helper: [] for helper in coming}
    again = 0
    while made.batch < 1 or made.runs:
        # Of one that has ended, nothing more is looked at in this batch.
        choices: list[Any] = [
            helper
            for helper, buffers in coming.items()
            if buffers and not (made.runs and helper in made.leading.ended)
        ]
        choices += ["start"] * (not made.runs) + ["read"] * made.reads
        match chance.choice(choices):
            case "start":
                made.start()
            case "read":
                made.read()
            case helper:
                before = chance.random()
                if before < 0.15:
                    page = coming[helper][0].page._replace(attempt=ATTEMPT - 1)
                    assert made.take(replace(coming[helper][0], page=page))
                    again += 1
                elif before < 0.4 and came[helper]:
                    assert made.take(chance.choice(came[helper]))
                    again += 1
                elif made.take(coming[helper][0]):
                    came[helper].append(coming[helper].popleft())
    assert made.seen["Drop"] == again
    assert made.seen["Merge"] == sum(map(len, came.values()))
    assert not any(coming.values())
    return made


# -- laws ------------------------------------------------------------------------------------------


def test_the_plans_have_every_kind_of_cell() -> None:
    plan = PLANS["cells"]
    assert isinstance(plan, AggregatePlan)
    found = {
        cell_of(a, None if a.column is None else VALUE_TYPES[a.column]).kernel
        for a in plan.aggregates
    }
    assert found == set(Kernel) - {Kernel.STAMP}


@pytest.mark.parametrize("name", PLANS)
@settings(max_examples=EXAMPLES)
@given(rows=drawn(3), seed=st.integers(0, 1 << 30))
def test_no_order_of_arrival_and_nothing_that_comes_twice_shows(
    name: str, rows: list[Given], seed: int
) -> None:
    """Commutative over helpers, and idempotent."""
    chance = random.Random(seed)
    work = Work(PLANS[name], 3, rows, chance, exact=False)
    assert sorted(in_any_order(work, chance).rows) == sorted(in_turn(work).rows)


@pytest.mark.parametrize("name", PLANS)
@settings(max_examples=EXAMPLES)
@given(rows=drawn(4), seed=st.integers(0, 1 << 30))
def test_no_grouping_into_epochs_and_executors_shows(
    name: str, rows: list[Given], seed: int
) -> None:
    """Associative: one executor that reads all, and four that cut their rows anyhow."""
    plan, chance = PLANS[name], random.Random(seed)
    if isinstance(plan, AggregatePlan):
        # A mean is no multiple of a quarter, so moments are so only nearly; averages of uint64 are
        # sums of doubles, which large integers are not exact in.
        kept = [a for a in plan.aggregates if a.kind not in MOMENTS]
        kept = [a for a in kept if (a.kind, a.column) != ("avg", "u")]
        plan = replace(plan, aggregates=kept)
    one = in_turn(Work(plan, 1, [row._replace(executor=0) for row in rows], chance, exact=True))
    assert sorted(in_any_order(Work(plan, 4, rows, chance, exact=True), chance).rows) == sorted(
        one.rows
    )
