"""Each workload as a job of real processes: what comes out is what DuckDB makes of the same topic,
and batch for batch what the sequential engine of the tests does.

The topic is read back as bytes and decoded by numpy, by layouts that are written down here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kdirect
import kdirect.workloads
from kdirect.client.session import Session
from kdirect.model import TopicPartition
from kdirect.state import Aggregate, AggregatePlan, JoinPlan, NoWindow, Sliding, Tumbling
from kdirect.state import Session as SessionWindow
from tests.state import jobs
from tests.state.reference import Batch, Row
from tests.state.whole_jobs import (
    ENCODERS,
    Outcome,
    Plan,
    assert_equal,
    change_inputs,
    family_test,
    run_batches,
    send,
)

SECOND = 1_000_000
PARTITIONS = 3
RECORDS = 4_500  # in three batches
EXAMPLES = 12

DTYPES = {
    "ysb": "user i8,page i8,campaign i8,ad_type i8,event_type i8,time i8,ip i8,filler1 i8,"
    "filler2 i8,filler3 i4,filler4 i2",
    "cm": "time i8,job i8,task i8,machine i8,event i4,user i4,category i4,priority i4,cpu f4,"
    "ram f4,disk f4,constraints i4",
    "ro": "key i8,time i8",
    "bid": "bidder i8,auction i8,price f8,time i8",
    "person": "id i8,name S32,email S32,credit_card S32,city S32,state S32,income i8,rating i8,"
    "zip i4,age i4,country i4,flags i2,time i8",
    "auction": "id i8,seller i8,condition i1,category i4,start i8,end i8,quantity i4,item S20,"
    "description S200,time i8",
}  # fmt: skip


def dtype(stream: str) -> np.dtype:
    """The layout of a stream's records: packed, little endian."""
    pairs = (field.split() for field in DTYPES[stream].split(","))
    return np.dtype([(name, kind if kind[0] == "S" else "<" + kind) for name, kind in pairs])


@pytest.fixture(scope="module")
def kept_broker() -> Iterator[Any]:
    with kdirect.Broker() as made:
        yield made


@pytest.fixture
def session(kept_broker: Any) -> Iterator[Session]:
    with kdirect.connect(kept_broker.bootstrap_servers) as made:
        yield made


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A name that no other test uses."""
    return "".join(c if c.isalnum() else "-" for c in request.node.name)


def read_rows(session: Session, topic: str, stream: str, starts: dict[int, int]) -> dict[int, Any]:
    """The rows of each partition from its offset in `starts` on, which is moved to the end."""
    found = {}
    for partition in range(PARTITIONS):
        tp = TopicPartition(topic, partition)
        end = session.latest_offsets([tp])[tp]
        with session.reader(tp, starts[partition], end) as reader:
            values = [v for batch in reader for v in batch.column("value").to_pylist()]
        starts[partition] = end
        rows = np.frombuffer(b"".join(values), dtype(stream))
        found[partition] = [_row(stream, row) for row in rows.tolist()]
    return found


def _row(stream: str, values: tuple) -> Row:
    names = dtype(stream).names or ()
    return {
        name: value.decode() if isinstance(value, bytes) else value
        for name, value in zip(names, values, strict=True)
    }


class Feed:
    """A workload's streams, written to topics in pieces and read back."""

    def __init__(self, session: Session, workload: Any, plan: Plan, records: int, pieces: int):
        self._session = session
        self._inputs = {i.name: i.topic for i in plan.inputs}
        self._workload = workload
        self._records, self._pieces = records, pieces
        self._starts = {name: dict.fromkeys(range(PARTITIONS), 0) for name in self._inputs}
        self.batches: list[Batch] = []
        self.writes: list[Callable[[], None]] = [
            lambda piece=piece: self._write(piece) for piece in range(pieces)
        ]

    def _write(self, piece: int) -> None:
        batch: dict[str, Any] = {}
        for name, topic in self._inputs.items():
            stream = self._workload.streams[name]
            first, end = (
                stream.among(self._records * p // self._pieces) for p in (piece, piece + 1)
            )
            kdirect.workloads.write(
                self._session, stream, topic, records=end - first, first=first,
                partitions=PARTITIONS,
            )  # fmt: skip
            batch[name] = read_rows(self._session, topic, name, self._starts[name])
        self.batches.append(batch)


def check(
    kept_broker: Any,
    session: Session,
    workload: Any,
    plan: Plan,
    *,
    records: int = RECORDS,
    pieces: int = 3,
    **options: Any,
) -> Outcome:
    """Run a plan over its workload in batches, and compare."""
    feed = Feed(session, workload, plan, records, pieces)
    options = {"executors": 2, "epoch_bytes": 30_000, "block_rows": 700, **options}
    outcome = run_batches(kept_broker.bootstrap_servers, plan, feed.writes, **options)
    partitions = {given.name: PARTITIONS for given in plan.inputs}
    assert_equal(plan, outcome, partitions, feed.batches, time_unit="ms")
    assert len(outcome.rows) > 20
    return outcome


# Records come up to two seconds late, and some of them four more: of these some are too late.
DISORDER: dict[str, Any] = {"disorder_us": 2 * SECOND, "late_share": 0.05, "late_by_us": 4 * SECOND}
HOURS = 3600 * SECOND
MAKERS: dict[str, tuple[Callable[[], Any], str | None, dict[str, Any]]] = {
    "ysb": (
        lambda: kdirect.workloads.ysb(keys=50, window="1 second", step_us=4000, **DISORDER),
        None,
        {"delay_us": 2 * SECOND},
    ),
    "cm": (
        lambda: kdirect.workloads.cm(jobs=60, step_us=4000, **DISORDER),
        None,
        {"delay_us": SECOND},
    ),
    "ro": (lambda: kdirect.workloads.ro(keys=500), None, {}),
    "zipf": (
        lambda: kdirect.workloads.named(
            "zipf", keys=1000, window="2 seconds", step_us=4000, **DISORDER
        ),
        None,
        {"delay_us": SECOND},
    ),
    "nb7": (
        lambda: kdirect.workloads.nexmark(
            pareto=1.0, keys=50, step_us=200_000, late_share=0.05, late_by_us=100 * SECOND
        ),
        "nb7",
        {"delay_us": 20 * SECOND},
    ),
    "nb8": (
        lambda: kdirect.workloads.nexmark(
            paper=True,
            step_us=60 * SECOND,
            disorder_us=HOURS,
            late_share=0.1,
            late_by_us=36 * HOURS,
        ),
        "nb8",
        {"delay_us": HOURS},
    ),
    "nb11": (
        lambda: kdirect.workloads.nexmark(
            step_us=SECOND, disorder_us=20 * SECOND, active_persons=20, hot_bidders=1
        ),
        "nb11",
        {"delay_us": 20 * SECOND},
    ),
    "nb11 paper": (
        lambda: kdirect.workloads.nexmark(paper=True, active_persons=10, step_us=SECOND),
        "nb11",
        {},
    ),
    "q11": (
        lambda: kdirect.workloads.nexmark(
            step_us=SECOND, disorder_us=20 * SECOND, late_share=0.05, late_by_us=900 * SECOND
        ),
        "q11",
        {"delay_us": 10 * SECOND},
    ),
}
WITHOUT_LATE = {"ro", "nb11", "nb11 paper"}


@pytest.mark.parametrize("mode", ["slash", "uppar"])
@pytest.mark.parametrize("name", MAKERS)
def test_a_workload_equals_duckdb(
    kept_broker: Any, session: Session, topic: str, name: str, mode: str
) -> None:
    maker, query, settings = MAKERS[name]
    workload = maker()
    topics = {stream: f"{topic}-{stream}" for stream in workload.streams}
    plan = workload.plan(topics, query, **settings)
    outcome = check(kept_broker, session, workload, plan, mode=mode)
    assert (outcome.counts["late"] > 0) != (name in WITHOUT_LATE)


@pytest.mark.parametrize(
    ("window", "how"),
    [
        (Sliding(size_us=3 * SECOND, slide_us=SECOND), None),
        (Sliding(size_us=5 * SECOND, slide_us=2 * SECOND), None),
        (NoWindow(), None),
        (SessionWindow(gap_us=SECOND), None),
        (Tumbling(size_us=60 * SECOND), "left"),
        (Tumbling(size_us=60 * SECOND), "right"),
        (SessionWindow(gap_us=10 * SECOND), "left"),
        (SessionWindow(gap_us=10 * SECOND), "right"),
    ],
    ids=lambda value: str(value)[:24],
)
@pytest.mark.parametrize("layout", ["slash", "split"])
def test_other_windows_and_joins_equal_duckdb(
    kept_broker: Any, session: Session, topic: str, window: Any, how: str | None, layout: str
) -> None:
    options: dict[str, Any] = {"executors": 3}
    if layout == "split":
        options |= {"mode": "uppar", "layout": "split"}
    if how is None:
        workload = kdirect.workloads.cm(jobs=400, step_us=4000, **DISORDER)
        plan: Plan = AggregatePlan(
            input=workload.streams["cm"].input(topic, delay_us=SECOND),
            keys=("job", "category"),
            window=window,
            aggregates=(
                "count",
                ("sum", "machine"),
                ("avg", "cpu"),
                ("stddev_samp", "ram"),
                Aggregate(kind="max", column="disk", name="most"),
                ("first", "task"),
            ),
        )
    else:
        workload = kdirect.workloads.nexmark(
            step_us=SECOND // 2, disorder_us=20 * SECOND, active_persons=20
        )
        plan = JoinPlan(
            left=workload.streams["bid"].input(f"{topic}-bid", delay_us=15 * SECOND),
            right=workload.streams["person"].input(f"{topic}-person", delay_us=15 * SECOND),
            left_keys=("bidder",),
            right_keys=("id",),
            window=window,
            how=how,
            columns=((0, "bidder", "bidder"), (0, "price", "price"), (1, "name", "name"),
                     (1, "age", "age")),
        )  # fmt: skip
    outcome = check(kept_broker, session, workload, plan, **options)
    if how is not None:
        side = "age" if how == "left" else "bidder"
        assert any(row[side] is None for row in outcome.rows)
        assert not all(row[side] is None for row in outcome.rows)


@pytest.mark.parametrize("how", sorted(ENCODERS))
def test_values_in_other_formats_equal_duckdb(
    kept_broker: Any, session: Session, topic: str, how: str
) -> None:
    workload = kdirect.workloads.nexmark(step_us=SECOND, disorder_us=20 * SECOND, paper=True)
    plan = workload.plan({s: f"{topic}-{s}" for s in workload.streams}, "nb8", delay_us=SECOND)
    plan = change_inputs(plan, lambda i: {"layout": None, "value_format": how})
    plan = replace(plan, window=Tumbling(size_us=300 * SECOND))
    batches: list[Batch] = []
    for piece in range(3):
        batch: dict[str, Any] = {}
        for given in plan.inputs:
            stream = workload.streams[given.name]
            first, end = (stream.among(500 * p) for p in (piece, piece + 1))
            records = np.frombuffer(stream.records(first, end - first), dtype(given.name))
            rows = [_row(given.name, row) for row in records.tolist()]
            batch[given.name] = {p: rows[p::PARTITIONS] for p in range(PARTITIONS)}
        batches.append(batch)
    for given in plan.inputs:
        session.admin.create_topic(given.topic, PARTITIONS)

    def write(batch: Batch) -> None:
        for given in plan.inputs:
            for partition, rows in batch[given.name].items():
                send(session, given.topic, partition, ENCODERS[how](given, rows))

    outcome = run_batches(
        kept_broker.bootstrap_servers,
        plan,
        [lambda b=batch: write(b) for batch in batches],
        block_rows=50,
        epoch_bytes=5000,
    )
    partitions = dict.fromkeys(("person", "auction"), PARTITIONS)
    assert_equal(plan, outcome, partitions, batches, time_unit="ms")
    assert len(outcome.rows) > 20


@pytest.mark.parametrize("step", ["read", "merge", "output"])
@pytest.mark.parametrize("query", ["nb8", "q11"])
def test_a_kill_in_a_join_and_in_a_session_job(
    kept_broker: Any, session: Session, topic: str, tmp_path: Path, query: str, step: str
) -> None:
    maker, _, settings = MAKERS[query]
    workload = maker()
    plan = workload.plan({s: f"{topic}-{s}" for s in workload.streams}, query, **settings)
    mark = tmp_path / "killed"
    number = 9 if step == "read" else 2
    outcome = check(
        kept_broker,
        session,
        workload,
        plan,
        launcher=jobs.killing(step, number, mark),
        slot_bytes=4096,
        snapshot_interval=0,
        block_rows=200,
    )
    assert mark.exists()
    assert outcome.attempts > 1


def test_a_family_of_jobs_equals_duckdb(kept_broker: Any, session: Session) -> None:
    family_test(EXAMPLES)(session, kept_broker.bootstrap_servers)
