"""Values as columns in Spark: every type in each format, in batches and streams, as columns and as
rows in the JVM; what does not decode; what is gone.  Real broker, real Spark."""

from __future__ import annotations

import datetime
import json
import logging
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import functions as F
from pyspark.sql.types import LongType, StructType, TimestampType

from kdirect.errors import BadValueError, DataLossError
from kdirect.format.fixed_layout import FixedLayout
from kdirect_spark import shim
from kdirect_spark.broker_view import RangePartition
from kdirect_spark.reading import read_range
from kdirect_spark.settings import source_settings

ROWS = 500
DAY = datetime.date(2024, 2, 29)
START_S = 1_700_000_000  # a time with all its digits follows from the row's number


@pytest.fixture
def columnar(spark):
    def switch(on: bool) -> None:
        spark.conf.set(shim.CONF, str(on).lower())

    yield switch
    spark.conf.unset(shim.CONF)


@pytest.fixture
def read_values(spark, broker):
    """A batch DataFrame of a topic's values."""

    def build(topic, schema=None, **options):
        reader = spark.read.format("kdirect").option(
            "kafka.bootstrap.servers", broker.bootstrap_servers
        )
        if schema is not None:
            reader = reader.schema(schema)
        return reader.option("subscribe", topic).options(**options).load()

    return build


@pytest.fixture
def task(broker):
    """What a task reads of partition 0, in this process."""

    def run(topic, start, stop, **options):
        given = {"kafka.bootstrap.servers": broker.bootstrap_servers, "subscribe": topic}
        settings = source_settings(given | options, streaming=False)
        return list(read_range(settings, RangePartition(topic, 0, start, stop)))

    return run


def rows_of(df):
    """The rows, with times as microseconds: Python's own depend on the time zone of the machine."""
    plain = [
        F.unix_micros(f.name).alias(f.name) if f.dataType == TimestampType() else F.col(f.name)
        for f in df.schema
    ]
    return [
        tuple(bytes(v) if isinstance(v, bytearray) else v for v in row)
        for row in df.select(plain).collect()
    ]


def micros(i, unit):
    """Row number i's time in a unit, as microseconds."""
    digits = {"s": 1_000_000, "ms": 1000, "us": 1}[unit]
    return START_S * 1_000_000 + (i * 1_001_003) // digits * digits


# What row number i has in a column of each type, as Spark gives it back.
EXPECTED = {
    "int8": lambda i: i % 256 - 128,
    "int16": lambda i: i - 200,
    "int32": lambda i: (i << 20) - (1 << 28),
    "int64": lambda i: (i << 50) - (1 << 58),
    "uint8": lambda i: i % 256,
    "uint16": lambda i: 65535 - i,
    "uint32": lambda i: (1 << 32) - 1 - i,
    "uint64": lambda i: Decimal((1 << 64) - 1 - i),
    "float32": lambda i: i / 4 - 10,
    "float64": lambda i: i / 3,
    "bool": lambda i: i % 3 == 0,
    "string": lambda i: f"ü{i}",
    "binary": lambda i: b"%d" % i,
    "binary[3]": lambda i: b"%03d" % i,
    "date32": lambda i: DAY + datetime.timedelta(days=i - 30),
    "timestamp(s)": lambda i: micros(i, "s"),
    "timestamp(ms)": lambda i: micros(i, "ms"),
    "timestamp(us)": lambda i: micros(i, "us"),
    "timestamp(ns)": lambda i: micros(i, "us"),
    "decimal128(12,2)": lambda i: Decimal(i * 1001 - 300_000).scaleb(-2),
}
ALL = {f"c{n}": kind for n, kind in enumerate(EXPECTED)}


def expected(types, numbers=range(ROWS), null=lambda i, n: False):
    return [
        tuple(None if null(i, n) else EXPECTED[kind](i) for n, kind in enumerate(types.values()))
        for i in numbers
    ]


# -- values of row numbers in each format ----------------------------------------------------------

FIXED = {
    name: "string[8]" if kind == "string" else kind
    for name, kind in ALL.items()
    if kind != "binary"
}
FIXED_EXPECTED = {name: ALL[name] for name in FIXED}
FIXED_OPTIONS = {
    "valueFormat": "fixed",
    "valueSchema": ", ".join(f"{name}:{kind}" for name, kind in FIXED.items()),
    "valueSize": "200",
}


def fixed_values(numbers=range(ROWS)):
    layout = FixedLayout.of(*(f"{name}:{kind}" for name, kind in FIXED.items()), size=200)
    rows = np.zeros(len(numbers), layout.dtype())
    for name, kind in FIXED.items():
        for row, i in enumerate(numbers):
            value = EXPECTED[ALL[name]](i)
            if kind.startswith("timestamp("):
                value = np.int64(value * 1000 + 999) if "ns" in kind else value
                value //= {"s": 1_000_000, "ms": 1000}.get(kind[10:-1], 1)
            elif kind == "date32":
                value = (value - datetime.date(1970, 1, 1)).days
            elif kind == "uint64":
                value = int(value)
            elif kind == "string[8]":
                value = np.void(value.encode().ljust(8, b"\0"))
            elif kind.startswith("decimal"):
                value = np.void(int(value.scaleb(2)).to_bytes(16, "little", signed=True))
            elif kind.startswith("binary"):
                value = np.void(value)
            rows[row][name] = value
    return [row.tobytes() for row in rows]


JSON_TYPES = dict(ALL)
JSON_OPTIONS = {
    "valueFormat": "json",
    "valueSchema": ", ".join(f"{name} {kind}" for name, kind in JSON_TYPES.items()),
}


def is_null(i, n):
    """Rows with nulls: row 7 lacks every field, others one each."""
    return i == 7 or (i > 20 and (i + n) % 23 == 0)


def json_values(numbers=range(ROWS)):
    return [json.dumps(json_object(i)).encode() for i in numbers]


def json_object(i):
    found = {}
    for n, (name, kind) in enumerate(JSON_TYPES.items()):
        value = EXPECTED[kind](i)
        if is_null(i, n):
            if n % 2:
                found[name] = None  # else it is missing
            continue
        if kind.startswith("timestamp("):
            at = datetime.datetime.fromtimestamp(value // 1_000_000, datetime.timezone.utc)
            digits = {"s": "", "ms": f".{value // 1000 % 1000:03}"}.get(
                kind[10:-1], f".{value % 1_000_000:06}"
            )
            found[name] = f"{at:%Y-%m-%dT%H:%M:%S}{digits}Z"
        elif kind.startswith("binary"):
            found[name] = value.decode()
        elif kind == "uint64":
            found[name] = int(value)
        else:
            found[name] = str(value) if kind.startswith(("date", "decimal")) else value
    return found | {"other": [1, {"c0": "x"}]}


ARROW_OPTIONS = {**JSON_OPTIONS, "valueFormat": "arrow"}


def arrow_batch(numbers):
    from kdirect.state.schema import arrow_type

    columns = {}
    for n, (name, kind) in enumerate(ALL.items()):
        values = [None if is_null(i, n) else EXPECTED[kind](i) for i in numbers]
        if kind.startswith("timestamp("):
            column = pa.array(values, pa.timestamp("us")).cast(arrow_type(kind))
        elif kind == "uint64":
            column = pa.array([None if v is None else int(v) for v in values], pa.uint64())
        else:
            column = pa.array(values, arrow_type(kind))
        columns[name] = column
    return pa.record_batch(columns)


def arrow_values(numbers=range(ROWS), each=90):
    """Some rows a value: streams, and record batches without their schemas."""
    out = []
    for start in range(0, len(numbers), each):
        batch = arrow_batch(numbers[start : start + each])
        if start // each % 2:
            out.append(batch.serialize().to_pybytes())
            continue
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        out.append(sink.getvalue().to_pybytes())
    return out


FORMATS = {
    "fixed": (FIXED_OPTIONS, fixed_values, expected(FIXED_EXPECTED)),
    "json": (JSON_OPTIONS, json_values, expected(ALL, null=is_null)),
    "arrow": (ARROW_OPTIONS, arrow_values, expected(ALL, null=is_null)),
}


@pytest.fixture(scope="module")
def filled(broker, topics_of):
    """A topic for each format, compressed by zstd."""
    topics = topics_of(broker.bootstrap_servers)
    names = {}
    for format, (_, values, _) in FORMATS.items():
        names[format] = topics.create(1, format)
        topics.fill(names[format], values(), **{"compression.type": "zstd", "linger.ms": 50})
    return names


@pytest.mark.spark
@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("format", FORMATS)
def test_every_type_in_a_batch(read_values, filled, columnar, format, on):
    columnar(on)
    options, _, rows = FORMATS[format]
    df = read_values(filled[format], **options, arrowBatchBytes="16k")
    assert ("ColumnarToRow" in df._jdf.queryExecution().executedPlan().toString()) == on
    assert df.schema["c7"].dataType.simpleString() == "decimal(20,0)"
    assert rows_of(df) == rows, "in the order of their offsets"
    assert df.count() == ROWS
    two = read_values(filled[format], **options, columns="C19,c0")
    assert two.columns == ["c0", "c19"]
    assert rows_of(two) == [(row[0], row[-1]) for row in rows]
    assert two.where("c0 > 100").count() == sum((row[0] or 0) > 100 for row in rows)


@pytest.mark.spark
@pytest.mark.parametrize(
    ("format", "on"), [("fixed", True), ("fixed", False), ("json", True), ("arrow", False)]
)
def test_every_type_in_a_stream(spark, broker, filled, columnar, tmp_path, format, on):
    columnar(on)
    options, _, rows = FORMATS[format]
    found = []
    df = (
        spark.readStream.format("kdirect")
        .option("kafka.bootstrap.servers", broker.bootstrap_servers)
        .option("subscribe", filled[format])
        .option("startingOffsets", "earliest")
        .options(**options)
        .load()
    )
    query = df.writeStream.foreachBatch(lambda batch, _: found.extend(rows_of(batch)))
    query = query.option("checkpointLocation", str(tmp_path)).trigger(availableNow=True).start()
    assert query.awaitTermination(90)
    assert found == rows


@pytest.mark.spark
def test_json_is_what_spark_makes_of_it(spark, read, read_values, filled):
    """But for binary, which Spark expects in base64."""
    ours = read_values(filled["json"], **JSON_OPTIONS).drop("c12", "c13")
    plain = read(filled["json"]).orderBy("offset").select(F.col("value").cast("string"))
    theirs = plain.select(F.from_json("value", ours.schema).alias("v")).select("v.*")
    rows = rows_of(ours)
    assert len(rows) == ROWS
    assert rows == rows_of(theirs)


@pytest.mark.spark
def test_a_query_reads_the_columns_that_it_needs(read_values, filled):
    def plan(df):
        return df._jdf.queryExecution().executedPlan().toString()

    df = read_values(filled["fixed"], **FIXED_OPTIONS)
    scan = f"BatchScan kdirect Subscribe[{filled['fixed']}]"
    assert f"{scan}[c0#" in plan(df.groupBy().count()), "the narrowest, for count()"
    assert f"{scan}[c19#" in plan(df.selectExpr("sum(c19)"))
    total = sum((row[-1] for row in FORMATS["fixed"][2]), Decimal(0))
    assert df.selectExpr("sum(c19)").collect()[0][0] == total


@pytest.mark.spark
@pytest.mark.parametrize("format", ["json", "arrow"])
def test_the_schema_of_the_reader(read_values, topics, format):
    """Also where one column is read of record batches that lack their schemas."""
    name = topics.create(1)
    batch = pa.record_batch(
        {"user": [1, 2, None], "a b": pa.array([5, None, 7], pa.timestamp("us"))}
    )
    if format == "arrow":
        topics.fill(name, [batch.serialize().to_pybytes()])
    else:
        at = ["1970-01-01T00:00:00.000005Z", None, "1970-01-01T00:00:00.000007Z"]
        topics.fill(
            name,
            [json.dumps({"user": u, "a b": t}).encode() for u, t in zip([1, 2, None], at)],
        )
    schema = StructType().add("user", LongType()).add("a b", TimestampType())
    df = read_values(name, schema, valueFormat=format)
    assert rows_of(df) == [(1, 5), (2, None), (None, 7)]
    assert rows_of(df.select("a b")) == [(5,), (None,), (7,)]
    assert df.count() == 3


@pytest.mark.spark
def test_the_schema_of_the_reader_of_a_stream(spark, broker, topics, tmp_path):
    name = topics.create(2)
    topics.fill(name, [b'{"user": 1}', b'{"user": 2}'])
    topics.fill(name, [b'{"user": 3, "at": "2024-01-01T00:00:00Z"}'], 1)
    found = []
    df = (
        spark.readStream.format("kdirect")
        .schema("user long, at timestamp")
        .option("kafka.bootstrap.servers", broker.bootstrap_servers)
        .options(subscribe=name, startingOffsets="earliest", valueFormat="json")
        .load()
    )
    query = df.writeStream.foreachBatch(lambda batch, _: found.extend(rows_of(batch)))
    query = query.option("checkpointLocation", str(tmp_path)).trigger(availableNow=True).start()
    assert query.awaitTermination(90)
    assert sorted(found, key=str) == [(1, None), (2, None), (3, 1_704_067_200_000_000)]


@pytest.mark.spark
def test_schemas_that_differ(read_values, filled, refused):
    with refused("ConfigError", "struct<c0:tinyint>", "struct<c0:bigint>", "remove .schema(...)"):
        read_values(filled["json"], "c0 long", valueFormat="json", valueSchema="c0 int8").collect()
    with refused("ConfigError", "struct<c1:smallint>", "struct<c0:tinyint,c1:smallint>"):
        read_values(
            filled["json"], "c0 tinyint, c1 smallint", valueFormat="json", columns="c1"
        ).collect()
    with refused("ConfigError", "c0:tinyint NOT NULL"):
        read_values(
            filled["json"], "c0 tinyint NOT NULL", valueFormat="json", valueSchema="c0 int8"
        ).collect()
    with refused("ConfigError", ".schema(...)", "column c0", "array<int>"):
        read_values(filled["arrow"], "c0 array<int>", valueFormat="arrow").collect()
    with refused("ConfigError", "valueFormat=json needs valueSchema"):
        read_values(filled["json"], valueFormat="json")


# -- values that give no row -----------------------------------------------------------------------

USERS = {"valueFormat": "json", "valueSchema": "user long, name string"}
BAD = [b'{"user": 1}', b"no JSON", None, b'{"user": "x"}', b'{"user": 2}', b"null"]


@pytest.mark.spark
def test_values_that_do_not_decode(read_values, task, topics, refused, tmp_path, caplog):
    name = topics.create(1)
    topics.fill(name, BAD)
    df = read_values(name, **USERS, taskStatisticsDir=str(tmp_path))
    assert rows_of(df) == [(1, None), (2, None), (None, None)]
    (line,) = [json.loads(line) for f in tmp_path.iterdir() for line in f.open()]
    assert (line["null_value"], line["wrong_size"], line["not_decoded"]) == (1, 0, 2)
    assert line["topic"] == name and line["stop"] == 6

    with caplog.at_level(logging.WARNING, "kdirect_spark"):
        assert sum(batch.num_rows for batch in task(name, 0, 6, **USERS)) == 3
        task(name, 2, 3, **USERS)
    assert [r.getMessage() for r in caplog.records if r.name == "kdirect_spark"] == [
        f"{name}-0 offsets 0 to 6: 3 values were dropped (null_value 1, not_decoded 2): "
        f"{name}-0 offset 1: the value is no JSON object; "
        f"{name}-0 offset 3: field user: it is no int64"
    ], "a tombstone alone is no news"

    options = {**USERS, "valueMode": "FAILFAST"}
    with refused("BadValueError", f"{name}-0 offset 1: the value is no JSON object", "valueMode"):
        read_values(name, **options).collect()
    with pytest.raises(
        BadValueError, match=f"{name}-0 offset 3: field user: .*valueMode=DROPM"
    ) as e:
        task(name, 2, 6, **options)
    assert e.value.offset == 3
    assert sum(batch.num_rows for batch in task(name, 2, 3, **options)) == 0


def test_fixed_values_that_spark_cannot_hold(task, topics, caplog):
    name = topics.create(1)
    layout = FixedLayout.of("n:int64", "s:timestamp(s)", "ms:timestamp(ms)")
    rows = np.zeros(6, layout.dtype())
    rows["n"] = range(6)
    rows["s"][2] = 1 << 60
    rows["ms"][[2, 4]] = -1 << 62
    values = [row.tobytes() for row in rows]
    values[5] += b"x"
    topics.fill(name, values)
    options = {"valueFormat": "fixed", "valueSchema": "n:int64, s:timestamp(s), ms:timestamp(ms)"}
    with caplog.at_level(logging.WARNING, "kdirect_spark"):
        got = [n for batch in task(name, 0, 6, **options) for n in batch["n"].to_pylist()]
    assert got == [0, 1, 3]
    (said,) = [r.getMessage() for r in caplog.records if r.name == "kdirect_spark"]
    assert "3 values were dropped (wrong_size 1, not_decoded 2)" in said
    assert f"{name}-0 offset 4: field ms: it is no timestamp" in said
    # A column that is not read is not looked at.
    got = task(name, 0, 6, **options, columns="n,s")
    assert [n for batch in got for n in batch["n"].to_pylist()] == [0, 1, 3, 4]
    with pytest.raises(BadValueError, match=f"{name}-0 offset 2: field s: .*Spark's"):
        task(name, 0, 5, **options, valueMode="FAILFAST")


# -- batches, and what is gone ---------------------------------------------------------------------


def test_batches_are_of_the_size_that_is_asked_for(task, topics):
    name = topics.create(1)
    big = pa.record_batch({"n": pa.array(range(100_000), pa.int64())})
    topics.fill(name, [big.serialize().to_pybytes()] * 2)
    options = {"valueFormat": "arrow", "valueSchema": "n long", "arrowBatchBytes": "64k"}
    batches = task(name, 0, 2, **options)
    assert [n for b in batches for n in b["n"].to_pylist()] == [*range(100_000)] * 2
    assert max(b.nbytes for b in batches) <= 128 << 10

    name = topics.create(1)
    topics.fill(name, [b"%08d" % i for i in range(20_000)])
    options = {"valueFormat": "fixed", "valueSchema": "n:binary[8]", "arrowBatchBytes": "16k"}
    batches = task(name, 0, 20_000, **options)
    assert [n for b in batches for n in b["n"].to_pylist()] == [b"%08d" % i for i in range(20_000)]
    assert 8 << 10 < max(b.nbytes for b in batches) <= 32 << 10


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_values_that_vanish_between_planning_and_reading(task, topics, transport):
    name = topics.create(1)
    topics.fill(name, [b"%04d" % i for i in range(100)])
    options = {"valueFormat": "fixed", "valueSchema": "n:binary[4]", "transport": transport}

    def read(start, stop, **more):
        return [
            int(n) for b in task(name, start, stop, **options, **more) for n in b["n"].to_pylist()
        ]

    assert read(0, 100) == list(range(100))
    topics.delete_records(name, 0, 60)
    with pytest.raises(DataLossError, match=rf"{name}-0 .*; 20 to 100 were to be read"):
        read(20, 100)
    assert read(20, 100, failOnDataLoss="false") == list(range(60, 100))
    topics.delete(name)
    with pytest.raises(DataLossError, match=rf"{name}-0 is gone; offsets 70 to 100"):
        read(70, 100)
    assert read(70, 100, failOnDataLoss="false") == []
