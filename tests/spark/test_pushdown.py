"""Filters and counts that are not read for: the same rows as without, from fewer offsets."""

from __future__ import annotations

import json
import random
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path

import pytest
from pyspark.sql import datasource as pds

from kdirect.errors import ConfigError
from kdirect.model import TopicPartition
from kdirect_spark import pushdown, shim
from kdirect_spark.offsets import OFFSET_MAX, OffsetRange
from kdirect_spark.pushdown import AllOf, AnyOf, Compare, Not

T0 = 1_700_000_000_000  # ms
FILTERS = "spark.sql.python.filterPushdown.enabled"
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def time(ms: float) -> str:
    return f"TIMESTAMP '{(EPOCH + timedelta(milliseconds=ms)).isoformat()}'"


@pytest.fixture(scope="module")
def filled(broker, topics_of):
    """Two partitions of 1000 records.  Times of partition 0 rise by 10 ms a record; those of
    partition 1 jump to and fro."""
    topics = topics_of(broker.bootstrap_servers)
    name = topics.create(2, "pushdown", retention_ms=-1)
    values = [b"%d" % i for i in range(1000)]
    topics.fill(name, values, 0, timestamp_ms=lambda i: T0 + 10 * i)
    topics.fill(name, values, 1, timestamp_ms=lambda i: T0 + (i * 7919) % 10_000)
    return name


@pytest.fixture
def paths(spark):
    """Chooses how a query is read: by the shim, or as PySpark does, with or without filters."""

    def choose(path: str) -> None:
        spark.conf.set(shim.CONF, str(path == "shim").lower())
        spark.conf.set(FILTERS, str(path == "pushFilters").lower())

    yield choose
    spark.conf.unset(shim.CONF)
    spark.conf.unset(FILTERS)


def plan(df) -> str:
    return df._jdf.queryExecution().executedPlan().toString()


def read_ranges(directory: Path) -> list[tuple[int, int, int]]:
    """(partition, start, stop) of each range that tasks have read."""
    lines = [
        json.loads(line) for path in directory.iterdir() for line in path.read_text().splitlines()
    ]
    return sorted((x["partition"], x["start"], x["stop"]) for x in lines)


WHOLE = [(0, 0, 1000), (1, 0, 1000)]
CASES = {
    "partition = 1": [(1, 0, 1000)],
    "offset >= 990": [(0, 990, 1000), (1, 990, 1000)],
    "offset BETWEEN 5 AND 7 AND partition = 0": [(0, 5, 8)],
    "offset < 3 AND 100 < 10 * partition + 100": [(0, 0, 3), (1, 0, 3)],
    "(partition = 0 AND offset > 997) OR (partition = 1 AND offset < 2)": [
        (0, 998, 1000), (1, 0, 2),
    ],
    "offset IN (3, 4, 900) AND partition <> 1": [(0, 3, 5), (0, 900, 901)],
    "NOT (offset >= 10 AND offset < 995) AND partition = 0": [(0, 0, 10), (0, 995, 1000)],
    "offset > 5000": [],
    "topic = 'another'": [],
    "topic IS NOT NULL AND partition = 0 AND offset = 1": [(0, 1, 2)],
    "value = '17'": WHOLE,
    "partition = 0 AND value = '17'": [(0, 0, 1000)],
    "partition = 0 OR value = '17'": WHOLE,
    "(offset = 1 AND value = '1') OR offset = 3": [(0, 1, 2), (0, 3, 4), (1, 1, 2), (1, 3, 4)],
    f"partition = 0 AND timestamp >= {time(T0 + 9000)}": [(0, 900, 1000)],
    f"partition = 0 AND timestamp > {time(T0 + 9000)}": [(0, 901, 1000)],
    f"partition = 0 AND timestamp >= {time(T0 + 8990.5)}": [(0, 900, 1000)],
    f"partition = 0 AND timestamp = {time(T0 + 9000)}": [(0, 900, 1000)],
    f"partition = 0 AND timestamp < {time(T0 + 100)}": [(0, 0, 1000)],
    f"timestamp >= {time(T0 + 9_990)}": [(0, 999, 1000), (1, 889, 1000)],
    f"timestamp > {time(T0 + 60_000)}": [],
    f"timestamp > {time(-5)}": WHOLE,
}  # fmt: skip


@pytest.mark.spark
@pytest.mark.parametrize("where", CASES)
@pytest.mark.parametrize("path", ["shim", "pushFilters"])
def test_what_a_filter_excludes_is_not_read(read, filled, paths, tmp_path, where, path):
    paths("neither")
    expected = sorted(map(repr, read(filled).where(where).collect()))
    assert bool(expected) == bool(CASES[where])
    paths(path)
    df = read(filled, taskStatisticsDir=str(tmp_path)).where(where)
    assert sorted(map(repr, df.collect())) == expected
    ranges = CASES[where]
    if path == "pushFilters" and " OR " in where:
        ranges = WHOLE  # PySpark passes on no condition with OR
    if path == "pushFilters" and where.startswith("NOT"):
        ranges = [(0, 0, 1000)]
    assert read_ranges(tmp_path) == ranges


@pytest.mark.spark
def test_the_plan_names_what_was_pushed(read, filled, spark, paths):
    df = read(filled).where("offset >= 990 AND value = '995'")
    assert "PushedFilters: [" in plan(df) and "offset >= 990" in plan(df)
    assert "value" not in plan(df).partition("PushedFilters: [")[2].partition("]")[0]
    exact = plan(read(filled).where("offset >= 990"))
    assert "PushedFilters" in exact and "Filter (" not in exact, "nothing is left to evaluate"
    assert "Filter (" in plan(read(filled).where(f"timestamp >= {time(T0)}"))
    assert "PushedAggregates: count by partition" in plan(
        read(filled).where("offset > 3").groupBy("partition").count()
    )
    spark.sql("DROP VIEW IF EXISTS pushed")
    read(filled).createTempView("pushed")
    text = spark.sql("EXPLAIN FORMATTED SELECT count(*) FROM pushed WHERE partition = 1").first()[0]
    assert "PushedAggregates: count" in text and "PushedFilters: [" in text
    paths("pushFilters")
    spark.sql("CREATE OR REPLACE TEMPORARY VIEW filtered AS SELECT * FROM pushed WHERE offset > 7")
    text = spark.sql("EXPLAIN FORMATTED SELECT * FROM filtered").first()[0]
    assert "PushedFilters: [IsNotNull(offset), GreaterThan(offset,7)]" in text


@pytest.mark.spark
def test_filters_with_a_schema_and_in_sql(spark, broker, read, filled, tmp_path):
    schema = read(filled).schema
    df = (
        spark.read.format("kdirect").schema(schema)
        .option("kafka.bootstrap.servers", broker.bootstrap_servers)
        .option("subscribe", filled).option("taskStatisticsDir", str(tmp_path)).load()
    )  # fmt: skip
    df.createOrReplaceTempView("with_schema")
    found = spark.sql("SELECT value FROM with_schema WHERE partition = 0 AND offset >= 998")
    assert sorted(bytes(row.value) for row in found.collect()) == [b"998", b"999"]
    assert read_ranges(tmp_path) == [(0, 998, 1000)]


@pytest.mark.spark
def test_many_values_are_evaluated_by_spark(read, filled, paths):
    wanted = set(range(0, 1000, 9))
    for path in ("shim", "pushFilters"):
        paths(path)
        found = read(filled).where(f"offset IN ({','.join(map(str, wanted))})").collect()
        assert {row.offset for row in found} == wanted and len(found) == 2 * len(wanted)


@pytest.mark.spark
def test_a_column_of_values_is_no_column_of_kafka(broker, read, topics):
    name = topics.create()
    topics.fill(name, [b'{"offset": %d}' % (100 + i) for i in range(3)])
    df = read(name, valueFormat="json", valueSchema="offset long")
    assert df.where("offset >= 101").count() == 2
    assert df.where("offset < 5").count() == 0


COUNTS = {
    "all": lambda df: df.groupBy().count(),
    "some": lambda df: df.where("offset >= 10 AND offset < 20").groupBy().count(),
    "by partition": lambda df: df.groupBy("partition").count(),
    "by both": lambda df: df.where("partition = 1").groupBy("topic", "partition").count(),
    "of columns": lambda df: df.selectExpr("count(offset)", "count(*) + 1", "count(timestamp)"),
    "of values": lambda df: df.selectExpr("count(value)", "count(DISTINCT partition)"),
    "none": lambda df: df.where("offset > 5000").groupBy().count(),
    "none by partition": lambda df: df.where("offset > 5000").groupBy("partition").count(),
    "more": lambda df: df.groupBy("partition").agg({"offset": "max", "*": "count"}),
    "by value": lambda df: df.where("offset < 3").groupBy("value").count(),
}


@pytest.mark.spark
@pytest.mark.parametrize("query", COUNTS)
def test_counts(read, filled, paths, query):
    paths("neither")
    expected = sorted(map(tuple, COUNTS[query](read(filled)).collect()))
    paths("shim")
    df = COUNTS[query](read(filled))
    assert sorted(map(tuple, df.collect())) == expected
    assert ("PushedAggregates" in plan(df)) == (query not in ("of values", "more", "by value"))


@pytest.mark.spark
def test_counts_of_what_is_no_row_or_none_any_more(read, topics, paths):
    """Markers, aborted records and gaps of compaction have offsets too."""
    name = topics.create()
    topics.fill(name, [b"a"] * 5)
    topics.transact(name, [(b"yes", True), (b"no", False)])
    for isolation, rows in (("read_uncommitted", 7), ("read_committed", 6)):
        for path in ("neither", "shim"):
            paths(path)
            assert read(name, kafka__isolation__level=isolation).count() == rows
    empty = topics.create(2)
    assert read(empty).count() == 0
    assert read(empty).groupBy("partition").count().collect() == []


@pytest.mark.spark
def test_counts_without_reading(read, topics, paths, tmp_path):
    """Tasks read only those ranges of which the broker does not know the number of records."""
    paths("shim")
    name = topics.create(3)
    for partition in range(3):
        topics.fill(name, [b"v"] * 40, partition=partition)
    topics.transact(name, [(b"yes", True), (b"no", False)])  # in partition 0
    expected = {"read_uncommitted": (122, set()), "read_committed": (121, {0})}
    for isolation, (rows, read_of) in expected.items():
        directory = tmp_path / isolation
        directory.mkdir()
        options = {"kafka__isolation__level": isolation, "taskStatisticsDir": str(directory)}
        df = read(name, **options)
        assert df.count() == rows
        lines = [json.loads(line) for f in directory.iterdir() for line in f.open()]
        assert {line["partition"] for line in lines} == read_of


# ------------------------------------------------------------------------------------------------
# conditions, without Spark

TP = TopicPartition("t", 1)


def never(ms: int) -> int:
    raise AssertionError(f"time {ms} is looked up")


def drawn(rng: random.Random, depth: int):
    """A condition on partition and offset, and the same as a function of a row."""
    kind = rng.randrange(6 if depth else 2)
    if kind < 2:
        column = ("partition", "offset")[kind]
        op = rng.choice(["=", "<", "<=", ">", ">="])
        values = tuple(rng.randrange(-2, 14) for _ in range(rng.randint(1, 3) if op == "=" else 1))
        tests = {
            "=": lambda x: x in values,
            "<": lambda x: x < values[0],
            "<=": lambda x: x <= values[0],
            ">": lambda x: x > values[0],
            ">=": lambda x: x >= values[0],
        }
        return Compare(column, op, values), lambda row: tests[op](row[kind])
    if kind == 2:
        of, test = drawn(rng, depth - 1)
        return Not(of), lambda row: not test(row)
    parts = [drawn(rng, depth - 1) for _ in range(rng.randrange(4))]
    of = tuple(x for x, _ in parts)
    if kind == 3:
        return AnyOf(of), lambda row: any(test(row) for _, test in parts)
    return AllOf(of), lambda row: all(test(row) for _, test in parts)


def test_a_condition_gives_the_offsets_that_meet_it():
    rng = random.Random(7)
    some = 0
    for _ in range(3000):
        condition, test = drawn(rng, 3)
        assert condition.is_exact
        found = condition.offsets(TP, never)
        assert all(a < b for a, b in found)
        assert all(a[1] < b[0] for a, b in pairwise(found))
        here = {o for o in range(12) if any(a <= o < b for a, b in found)}
        assert here == {o for o in range(12) if test((1, o))}
        some += 0 < len(here) < 12
        assert pushdown.parse(json.dumps(as_json(condition))) == condition
    assert some > 300


def as_json(x):
    if isinstance(x, Compare):
        return {"op": x.op, "column": x.column, "values": list(x.values)}
    if isinstance(x, Not):
        return {"op": "not", "of": [as_json(x.of)]}
    return {"op": "and" if isinstance(x, AllOf) else "or", "of": [as_json(y) for y in x.of]}


def test_times_bound_from_below_alone():
    first_at = {1000: 40, 1001: 50, 2000: OFFSET_MAX}.get
    at = lambda op, us: Compare("timestamp", op, (us,)).offsets(TP, first_at)  # noqa: E731
    assert at(">=", 1_000_000) == ((40, OFFSET_MAX),)
    assert at(">", 1_000_000) == at(">=", 1_000_001) == ((50, OFFSET_MAX),)
    assert at("=", 2_000_000) == ()
    for op in ("<", "<="):
        assert at(op, 1_000_000) == pushdown.EVERYTHING
        assert Compare("timestamp", op, (5_000_000,)).times() == set()
    assert at(">=", -5) == at(">", -1001) == pushdown.EVERYTHING
    several = Compare("timestamp", "=", (2_000_000, 1_000_000))
    assert several.times() == {1000} and not several.is_exact
    assert Not(several).offsets(TP, never) == pushdown.EVERYTHING
    assert Not(several).times() == set()


def test_ranges_are_narrowed_and_stay_in_their_bounds():
    ranges = [OffsetRange(TP, 5, 100), OffsetRange(TopicPartition("u", 0), 0, 10)]
    condition = AllOf((
        AnyOf((Compare("offset", "<", (7,)), Compare("offset", ">=", (99,)))),
        Compare("topic", "=", ("t",)),
    ))  # fmt: skip
    assert pushdown.narrowed(ranges, condition, {}) == (
        OffsetRange(TP, 5, 7), OffsetRange(TP, 99, 100),
    )  # fmt: skip
    late = Compare("timestamp", ">=", (1_000_000,))
    assert pushdown.narrowed(ranges, late, {1000: {TP: 60}}) == (
        OffsetRange(TP, 60, 100), ranges[1],
    )  # fmt: skip
    assert pushdown.narrowed(ranges, late, {1000: {TP: None}}) == (ranges[1],)
    assert pushdown.narrowed(ranges, late, {}) == tuple(ranges)
    assert not pushdown.may_be_in(AllOf((late, Compare("partition", ">", (1,)))), TP)


def test_pieces_are_joined_where_the_least_is_between():
    pieces = ((0, 1), (2, 3), (10, 11), (13, 14), (90, 91))
    assert pushdown.joined(pieces, 9) == pushdown.joined(pieces, 5) == pieces
    assert pushdown.joined(pieces, 3) == ((0, 3), (10, 14), (90, 91))
    assert pushdown.joined(pieces, 1) == ((0, 91),)
    assert pushdown.joined((), 3) == ()


def test_filters_of_pyspark():
    at = EPOCH + timedelta(milliseconds=1500)
    taken = [
        pds.EqualTo(("topic",), "t"),
        pds.In(("partition",), (1, 2)),
        pds.Not(pds.LessThan(("offset",), 5)),
        pds.IsNotNull(("offset",)),
    ]
    left = [
        pds.GreaterThan(("timestamp",), at),
        pds.EqualTo(("value",), b"x"),
        pds.IsNull(("offset",)),
        pds.Not(pds.EqualTo(("timestamp",), at)),
        pds.StringStartsWith(("topic",), "a"),
        pds.EqualTo(("partition", "x"), 1),
        pds.EqualTo(("offset",), None),
    ]
    condition, back = pushdown.from_filters([*taken, *left])
    assert back == left
    assert pushdown.times_of(condition) == [1501]
    assert condition.offsets(TP, lambda ms: 20) == ((20, OFFSET_MAX),)
    assert condition.offsets(TP, lambda ms: 0) == ((5, OFFSET_MAX),)
    assert condition.offsets(TopicPartition("t", 3), never_called) == ()
    many = [pds.In(("offset",), tuple(range(100)))]
    assert pushdown.from_filters(many)[1] == many


def never_called(ms: int) -> int:
    return 0


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "5", '{"op": "xor", "of": []}', '{"op": "not", "of": []}',
        '{"op": "=", "column": "value", "values": [1]}',
        '{"op": "=", "column": "offset", "values": ["1"]}',
        '{"op": "=", "column": "offset", "values": [true]}',
        '{"op": "<", "column": "offset", "values": [1, 2]}',
        '{"op": "<", "column": "offset"}',
    ],
)  # fmt: skip
def test_a_condition_of_another_version_is_refused(text):
    with pytest.raises(ConfigError, match="the filter that the shim passed on is not known"):
        pushdown.parse(text)
