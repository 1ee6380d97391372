"""Batches of rows through `kdirect.state.run`, and what two independent engines make of them.

A batch is written to the topics, and then asked for: so batch N of the job is what was written
N-th.  DuckDB and the sequential engine get plain values, which no code of the engine has touched.

    python -m tests.state.whole_jobs --first 0 --examples 200

runs so many jobs of the family of tests/state/family.py over one broker.
"""

from __future__ import annotations

import argparse
import datetime
import io
import json
import time
from collections import Counter
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import count
from typing import Any

import pyarrow as pa
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import kdirect
from kdirect.client.session import Session
from kdirect.state import AggregatePlan, Input, JoinPlan
from kdirect.state import Session as SessionWindow
from kdirect.state.launcher import Launcher
from kdirect.state.schema import arrow_type
from kdirect.state.stream_job import run
from tests.state import family
from tests.state.oracle import Oracle
from tests.state.reference import Batch, Reference, Row

Plan = AggregatePlan | JoinPlan
EPOCH = datetime.datetime(1970, 1, 1)
FAR_US = 7_000_000_000_000_000  # in the year 2191: later than any wall clock and `max_ahead_us`
_numbers = count()


@dataclass(frozen=True)
class Outcome:
    """What a job gave: its rows by batch, and what it counted."""

    batches: list[list[Row]]
    counts: Counter[str]
    attempts: int

    @property
    def rows(self) -> list[Row]:
        return [row for rows in self.batches for row in rows]


# -- values ----------------------------------------------------------------------------------------


def schema_of(given_input: Input) -> pa.Schema:
    return pa.schema([(f.name, arrow_type(f.type)) for f in given_input.schema])


def arrow_values(given_input: Input, rows: list[Row], rows_a_value: int = 3) -> list[bytes]:
    """Streams of some rows each."""
    values = []
    for start in range(0, len(rows), rows_a_value):
        table = pa.Table.from_pylist(rows[start : start + rows_a_value], schema_of(given_input))
        sink = io.BytesIO()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        values.append(sink.getvalue())
    return values


def json_values(given_input: Input, rows: list[Row]) -> list[bytes]:
    """An object a row, as docs/value-formats.md has it; fields that are null are left out."""

    def text(kind: str, value: Any) -> Any:
        if kind.startswith("timestamp"):
            scale, digits = {"ms": (1000, "milliseconds"), "us": (1, "microseconds")}[kind[10:-1]]
            when = EPOCH + datetime.timedelta(microseconds=value * scale)
            return when.isoformat(timespec=digits)
        if isinstance(value, datetime.date):
            return value.isoformat()
        if isinstance(value, bytes):
            return value.decode()
        return str(value) if isinstance(value, Decimal) else value

    kinds = given_input.types
    return [
        json.dumps({n: text(kinds[n], v) for n, v in row.items() if v is not None}).encode()
        for row in rows
    ]


ENCODERS = {"arrow": arrow_values, "json": json_values}


def send(session: Session, topic: str, partition: int, values: Any) -> None:
    """Append values, which are bytes or a binary column, to a partition."""
    if not len(values):
        return
    column = values if isinstance(values, pa.Array) else pa.array(values, pa.binary())
    where = pa.array([partition] * len(column), pa.int32())
    with session.producer() as producer:
        producer.send_arrow(pa.record_batch({"value": column, "partition": where}), topic)
        producer.flush()


# -- jobs ------------------------------------------------------------------------------------------


def plain_rows(table: pa.Table) -> list[Row]:
    """The rows of a table, with times as numbers of microseconds."""
    for i, f in enumerate(table.schema):
        if pa.types.is_timestamp(f.type):
            whole = table.column(i).cast(pa.timestamp("us")).cast(pa.int64())
            table = table.set_column(i, f.name, whole)
    return table.to_pylist()


def run_batches(
    bootstrap: str,
    plan: Plan,
    writes: list[Any],
    *,
    launcher: Launcher | None = None,
    **options: Any,
) -> Outcome:
    """Call each of `writes` and ask the job for the batch of what it wrote."""
    batches = []
    writes[0]()
    with run(plan, bootstrap, launcher=launcher, **options) as job:
        for number, write in enumerate(writes):
            if number:
                write()
            found, table = next(job)
            assert found == number
            batches.append(plain_rows(table))
        return Outcome(batches, job.counts, job.server.attempt)


def assert_equal(
    plan: Plan,
    outcome: Outcome,
    partitions: dict[str, int],
    batches: list[Batch],
    *,
    time_unit: str | None = None,
) -> None:
    """The outcome is what DuckDB makes of the rows, and batch for batch what the sequential engine
    does.  Event times are numbers of their column's unit, which is `time_unit` for timestamps."""
    now_us = int(time.time() * 1_000_000)
    timed = [(batch, now_us) for batch in batches]
    oracle = Oracle(plan, partitions, timed)
    if not (isinstance(plan.window, SessionWindow) and oracle.has_rows_below_the_clock()):
        wrong = family.differences(plan, family.final(plan, outcome.batches), oracle.final_rows())
        assert not wrong, f"DuckDB: {wrong[:5]}"
    reference = Reference(plan if time_unit is None else with_unit(plan, time_unit), partitions)
    for number, (batch, now) in enumerate(timed):
        wanted = reference.batch(batch, now)
        wrong = family.differences(plan, outcome.batches[number], wanted)
        assert not wrong, f"batch {number}: {wrong[:5]}"
    for ours, theirs in (("late", "late"), ("null_time", "null_time"),
                         ("before_1970", "before_1970"), ("too_far_ahead", "ahead")):  # fmt: skip
        assert outcome.counts[ours] == reference.counts[theirs], ours


def with_unit(plan: Plan, unit: str) -> Plan:
    """The plan as the sequential engine wants it, which gets timestamps as numbers."""
    return change_inputs(plan, lambda given_input: {"time_unit": unit})


def change_inputs(plan: Plan, changes: Any) -> Plan:
    if isinstance(plan, AggregatePlan):
        return replace(plan, input=replace(plan.input, **changes(plan.input)))
    return replace(
        plan,
        left=replace(plan.left, **changes(plan.left)),
        right=replace(plan.right, **changes(plan.right)),
    )


# -- the family ------------------------------------------------------------------------------------

MODES = st.sampled_from(
    [
        {"mode": "slash"},
        {"mode": "slash", "exchange": "tcp"},
        {"mode": "slash", "adaptive_ratio": 0.0},
        {"mode": "uppar"},
        {"mode": "uppar", "layout": "split"},
    ]
)


@st.composite
def job_cases(draw: Any) -> tuple[family.Case, str, dict[str, Any]]:
    """A case, the format of its values, and the options of the job."""
    case = draw(family.cases(st.one_of(family.aggregate_plans(), family.join_plans()), 20))
    options = dict(draw(MODES))
    options["executors"] = draw(st.integers(2, 3))
    options["block_rows"] = draw(st.sampled_from([4, 65536]))
    options["epoch_bytes"] = draw(st.sampled_from([300, 64 << 20]))
    return case, draw(st.sampled_from(sorted(ENCODERS))), options


def check_case(
    session: Session, bootstrap: str, case: family.Case, how: str, options: dict[str, Any]
) -> None:
    """Run a case of the family as a job."""
    number = next(_numbers)
    plan = change_inputs(case.plan, lambda i: {"topic": f"{i.name}-{number}", "value_format": how})
    batches = [_later(plan, batch) for batch, _ in case.batches]
    batches = [b for b in batches if any(rows for side in b.values() for rows in side.values())]
    if not batches:
        return
    for source in plan.inputs:
        session.admin.create_topic(source.topic, case.partitions[source.name])

    def write(batch: Batch) -> None:
        for source in plan.inputs:
            for partition, rows in batch[source.name].items():
                send(session, source.topic, partition, ENCODERS[how](source, rows))

    try:
        outcome = run_batches(
            bootstrap, plan, [lambda b=batch: write(b) for batch in batches], **options
        )
        assert_equal(plan, outcome, case.partitions, batches)
    finally:
        for source in plan.inputs:
            session.admin.delete_topic(source.topic)


def _later(plan: Plan, batch: Batch) -> Batch:
    """The batch with event times that are too far ahead for the real clock too."""
    found: dict[str, dict[int, list[Row]]] = {}
    for source in plan.inputs:
        unit = family.types_unit(source)
        limit = (family.NOW_US + source.max_ahead_us) // unit
        found[source.name] = {
            p: [
                row | {source.time: FAR_US // unit} if (row[source.time] or 0) > limit else row
                for row in rows
            ]
            for p, rows in batch[source.name].items()
        }
    return found


def family_test(examples: int, first: int | None = None) -> Any:
    """A function (session, bootstrap) that runs so many jobs."""

    def check(session: Session, bootstrap: str) -> None:
        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            phases=[Phase.generate] if first is None else [Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        )
        @given(job_cases())
        def one(made: tuple[family.Case, str, dict[str, Any]]) -> None:
            check_case(session, bootstrap, *made)

        (one if first is None else seed(first)(one))()

    return check


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--examples", type=int, default=200)
    given_arguments = parser.parse_args()
    with kdirect.Broker() as broker, kdirect.connect(broker.bootstrap_servers) as session:
        family_test(given_arguments.examples, given_arguments.first)(
            session, broker.bootstrap_servers
        )
    print(f"{given_arguments.examples} jobs are as DuckDB and the sequential engine have them")


if __name__ == "__main__":
    main()
