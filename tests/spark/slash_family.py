"""A family of queries and inputs: each is run by Spark's batch SQL and accelerated, and compared.

    python -m tests.spark.slash_family --examples 200 --first 0

An example is drawn by Hypothesis: the rows of a topic (nulls, few and many keys, event times that
jump back and forth, rows that are late), its format and partitions, and a query (filter, keys,
window or none, aggregates, condition on the result; or a join).
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from kdirect import connect
from kdirect_spark import slash
from tests.spark import slash_runs

SCHEMA = "k long, s string, n int, x double, d decimal(9,2), b boolean, at timestamp(ms)"
BASE_MS = 1_700_000_000_000
_numbers = itertools.count()

KEYS = ("k", "s", "b", "n")
AGGREGATES = (
    "count(*)", "count(n)", "sum(k)", "sum(n)", "min(n)", "max(x)", "avg(n)", "avg(x)", "min(s)",
    "max(at)", "sum(d)", "avg(d)", "stddev(x)", "var_pop(n)", "collect_set(n)", "max(b)",
    "min_by(n, at)",
)  # fmt: skip
CONDITIONS = (
    "n > 3", "s = 'a' OR n IS NULL", "x < 0.5 AND NOT b", "k IN (1, 2, 3)", "n BETWEEN 2 AND 7",
    "d >= 1.50", "s IS NOT NULL",
)  # fmt: skip
WINDOWS = (
    "window(at, '10 seconds')", "window(at, '10 seconds', '4 seconds')",
    "window(at, '7 seconds', '7 seconds', '3 seconds')", "session_window(at, '3 seconds')",
)  # fmt: skip
DELAYS = ("0 seconds", "2 seconds", "1 minute")
HAVING = ("c0 IS NOT NULL", "1 = 1")


@dataclass(frozen=True)
class Example:
    """Rows of each topic, and the query over them."""

    rows: tuple[tuple[dict[str, Any], ...], ...]
    partitions: int
    value_format: str
    where: str | None
    keys: tuple[str, ...]
    window: str | None
    aggregates: tuple[str, ...]
    delay: str
    join: str | None
    each: int  # records of a micro-batch


def _row() -> st.SearchStrategy[dict[str, Any]]:
    maybe = st.none
    return st.fixed_dictionaries(
        {
            "k": st.one_of(maybe(), st.integers(-2, 5), st.sampled_from([1 << 40, -(1 << 50)])),
            "s": st.one_of(maybe(), st.sampled_from(["", "a", "b", "é", "long" * 20])),
            "n": st.one_of(maybe(), st.integers(-5, 10)),
            "x": st.one_of(maybe(), st.floats(-10, 10, width=32)),
            "d": st.one_of(maybe(), st.integers(-999, 999).map(lambda cents: f"{cents / 100:.2f}")),
            "b": st.one_of(maybe(), st.booleans()),
            "at": st.integers(0, 60_000),
        }
    )


@st.composite
def examples(draw: Any) -> Example:
    join = draw(st.sampled_from([None, None, None, "inner", "left", "right", "full"]))
    rows = st.lists(_row(), min_size=1, max_size=60).map(
        # Event time goes on in the topic, and each row lies up to some seconds beside its place.
        lambda found: tuple(
            row | {"at": i * 1_000 + row["at"] % 5_000} for i, row in enumerate(found)
        )
    )
    window = WINDOWS[0] if join else draw(st.sampled_from([None, *WINDOWS]))
    # Without a window the plan has no event time, by which the first one is chosen.
    aggregates = [a for a in AGGREGATES if window is not None or not a.startswith("min_by")]
    keys = draw(st.lists(st.sampled_from(KEYS), min_size=0 if window else 1, unique=True))
    return Example(
        rows=tuple(draw(rows) for _ in range(2 if join else 1)),
        partitions=draw(st.integers(1, 3)),
        value_format=draw(st.sampled_from(["json", "arrow"])),
        where=draw(st.one_of(st.none(), st.sampled_from(CONDITIONS))),
        keys=tuple(keys),
        window=window,
        aggregates=tuple(
            draw(st.lists(st.sampled_from(aggregates), min_size=1, max_size=4, unique=True))
        ),
        delay=draw(st.sampled_from(DELAYS)),
        join=join,
        each=draw(st.integers(5, 60)),
    )


def write(servers: str, example: Example) -> list[str]:
    """The topics of an example."""
    topics = []
    with connect(servers) as session:
        for rows in example.rows:
            topic = f"family-{next(_numbers)}"
            session.admin.create_topic(topic, example.partitions)
            values = [_value(example.value_format, row) for row in rows]
            places = [i % example.partitions for i in range(len(rows))]
            with session.producer() as producer:
                producer.send_arrow(
                    pa.record_batch(
                        {"value": pa.array(values), "partition": pa.array(places, pa.int32())}
                    ),
                    topic,
                )
                producer.flush()
            topics.append(topic)
    return topics


def _value(value_format: str, row: dict[str, Any]) -> bytes:
    at = datetime.utcfromtimestamp((BASE_MS + row["at"]) / 1000).isoformat(timespec="milliseconds")
    if value_format == "json":
        return json.dumps(row | {"at": at}).encode()
    from decimal import Decimal

    columns = {
        "k": pa.array([row["k"]], pa.int64()),
        "s": pa.array([row["s"]], pa.string()),
        "n": pa.array([row["n"]], pa.int32()),
        "x": pa.array([row["x"]], pa.float64()),
        "d": pa.array([None if row["d"] is None else Decimal(row["d"])], pa.decimal128(9, 2)),
        "b": pa.array([row["b"]], pa.bool_()),
        "at": pa.array([BASE_MS + row["at"]], pa.timestamp("ms")),
    }
    batch = pa.record_batch(columns)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def frame(reader: Any, servers: str, example: Example, topics: list[str], limited: bool) -> Any:
    """The DataFrame of an example."""
    from pyspark.sql import functions as F

    sides = []
    for topic in topics:
        options = {
            "kafka.bootstrap.servers": servers,
            "subscribe": topic,
            "startingOffsets": "earliest",
            "valueFormat": example.value_format,
            "valueSchema": SCHEMA,
        }
        if limited:
            options["maxOffsetsPerTrigger"] = str(example.each)
        side = reader().format("kdirect").options(**options).load()
        side = side.withWatermark("at", example.delay)
        sides.append(side if example.where is None else side.where(example.where))
    if example.join is not None:
        left = sides[0].select(F.expr(WINDOWS[0]).alias("w"), "k", "n", "s")
        right = sides[1].select(
            F.expr(WINDOWS[0]).alias("v"), F.col("k").alias("rk"), F.col("x"), F.col("n").alias("m")
        )
        same = (left["w"] == right["v"]) & (left["k"] == right["rk"])
        return left.join(right, same, example.join)
    keys = [F.expr(example.window).alias("w")] if example.window else []
    keys += [F.col(name) for name in example.keys]
    named = [F.expr(a).alias(f"c{i}") for i, a in enumerate(example.aggregates)]
    return sides[0].groupBy(*keys).agg(*named)


def check(spark: Any, servers: str, example: Example, directory: Path) -> None:
    """Compare an example as a batch and as a stream."""
    topics = write(servers, example)
    expected = slash_runs.rows_of(
        frame(lambda: spark.read, servers, example, topics, limited=False)
    )
    batch = slash.accelerate(frame(lambda: spark.read, servers, example, topics, limited=False))
    slash_runs.assert_same(slash_runs.rows_of(batch), expected)
    if example.window is None:
        return
    stream = frame(lambda: spark.readStream, servers, example, topics, limited=True)
    progress = slash_runs.run(slash.accelerate(stream, stateDir=directory / "state"), directory)
    figures = [report.observedMetrics["slash"]["figures"] for report in progress]
    if any(batch["late"] for batch in figures):
        # Which rows are late, Spark decides otherwise: what is left cannot be compared.
        assert example.delay != "1 minute", "no row lies so far back"
        return
    found = slash_runs.written(spark, directory)
    watermark = figures[-1]["watermark"]
    if watermark is None:
        assert not found
        return
    at = slash_runs.time_of(watermark)
    strictly = example.window.startswith("session")
    wanted = Counter()
    for row, count in expected.items():
        end = _ends(row, example)
        if end < at or (end == at and not strictly):
            wanted[row] = count
    slash_runs.assert_same(found, wanted)


def _ends(row: tuple[Any, ...], example: Example) -> Any:
    """The end of the window of a row of the result."""
    if example.join is not None and row[0] is None:
        return row[4][1]
    return row[0][1]


def family_test(spark: Any, servers: str, count: int, first: int) -> Any:
    """A function that compares `count` examples."""

    @seed(first)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    @given(examples())
    def compare(example: Example) -> None:
        directory = Path(tempfile.mkdtemp(prefix="kdirect-family-"))
        try:
            check(spark, servers, example, directory)
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    return compare


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    chosen = parser.parse_args()
    import kdirect
    from kdirect_spark import session_builder

    builder = session_builder("family", "local[2]")
    for name, value in slash_runs.SPARK.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    with kdirect.Broker() as broker:
        family_test(spark, broker.bootstrap_servers, chosen.examples, chosen.first)()
    print(f"{chosen.examples} examples from {chosen.first}: the rows of Spark")
    spark.stop()


if __name__ == "__main__":
    sys.exit(main())
