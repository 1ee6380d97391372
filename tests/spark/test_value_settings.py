"""What the options of values mean, and how types of the engine become Spark's: no broker."""

from __future__ import annotations

import subprocess
import sys

import pyarrow as pa
import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from kdirect.errors import ConfigError
from kdirect.format.fixed_layout import FixedLayout
from kdirect.state import Field, Input, column
from kdirect_spark.settings import sink_settings, source_settings
from kdirect_spark.values import as_spark_takes, engine_fields, misfits, spark_type

BASE = {"kafka.bootstrap.servers": "h:1", "subscribe": "t"}
CLICK = "user:int64, kind:int32@12, time:timestamp(ms), price:decimal128(9,2), name:string[4]"

SPARK_TYPES = {
    "int8": ByteType(),
    "int16": ShortType(),
    "int32": IntegerType(),
    "int64": LongType(),
    "uint8": ShortType(),
    "uint16": IntegerType(),
    "uint32": LongType(),
    "uint64": DecimalType(20, 0),
    "float32": FloatType(),
    "float64": DoubleType(),
    "bool": BooleanType(),
    "string": StringType(),
    "binary": BinaryType(),
    "binary[7]": BinaryType(),
    "date32": DateType(),
    "timestamp(s)": TimestampType(),
    "timestamp(ms)": TimestampType(),
    "timestamp(us)": TimestampType(),
    "timestamp(ns)": TimestampType(),
    "decimal128(9,2)": DecimalType(9, 2),
    "decimal128(38,38)": DecimalType(38, 38),
}


def settings(schema=None, **options):
    found = source_settings(BASE | options, streaming=None, schema=schema)
    return found, found.values


def test_values_stay_bytes_without_a_format():
    assert settings()[1] is None


def test_fixed_values():
    found, values = settings(valueFormat="FIXED", valueSchema=CLICK, valueSize="100")
    assert values.layout == FixedLayout.of(*CLICK.split(", "), size=100)
    assert values.fields == (
        Field(name="user", type="int64"),
        Field(name="kind", type="int32"),
        Field(name="time", type="timestamp(ms)"),
        Field(name="price", type="decimal128(9,2)"),
        Field(name="name", type="string"),
    )
    assert (values.format, values.mode, found.columns) == ("fixed", "DROPMALFORMED", None)
    assert values.row().simpleString() == (
        "struct<user:bigint,kind:int,time:timestamp,price:decimal(9,2),name:string>"
    )
    assert settings(valueFormat="fixed", valueSchema=CLICK)[1].layout.size == 44


@pytest.mark.parametrize("format", ["json", "arrow"])
def test_values_with_a_schema(format):
    text = "user long, Kind INT, at timestamp(ms), price DECIMAL(9, 2), small tinyint, s Smallint"
    _, values = settings(valueFormat=format, valueSchema=text, valueMode="failfast")
    assert [f.to_json() for f in values.fields] == [
        ["user", "int64"],
        ["Kind", "int32"],
        ["at", "timestamp(ms)"],
        ["price", "decimal128(9,2)"],
        ["small", "int8"],
        ["s", "int16"],
    ]
    assert (values.format, values.mode, values.layout) == (format, "FAILFAST", None)
    given = StructType().add("user", LongType()).add("a b", TimestampType())
    _, of_reader = settings(given, valueFormat=format)
    assert [f.to_json() for f in of_reader.fields] == [
        ["user", "int64"],
        ["a b", "timestamp(us)"],
    ]
    _, of_json = settings(valueFormat=format, valueSchema=given.json())
    assert of_json == of_reader
    assert of_reader.row() == given


def test_columns_are_some_of_the_values():
    found, values = settings(valueFormat="fixed", valueSchema=CLICK, columns="TIME,user")
    assert found.columns == ("user", "time")
    assert values.row(found.columns).names == ["user", "time"]
    assert values.arrow_row(found.columns) == pa.schema(
        {"user": pa.int64(), "time": pa.timestamp("us", "UTC")}
    )


def test_the_engine_reads_a_topic_by_the_same_words():
    _, values = settings(valueFormat="fixed", valueSchema=CLICK, valueMode="FAILFAST")
    where = column("kind").equals(0)
    assert values.input("clicks", time="time", where=where) == Input(
        topic="clicks",
        value_format="fixed",
        layout=values.layout,
        mode="FAILFAST",
        time="time",
        where=where,
    )
    _, values = settings(valueFormat="json", valueSchema="user long")
    assert values.input("clicks") == Input(
        topic="clicks", value_format="json", schema=(Field(name="user", type="int64"),)
    )


@pytest.mark.parametrize("kind", SPARK_TYPES)
def test_types_become_sparks_and_come_back(kind):
    assert spark_type(kind) == SPARK_TYPES[kind]
    _, values = settings(valueFormat="json", valueSchema=f"c {kind}")
    (back,) = engine_fields(values.row(), "schema")
    assert spark_type(back.type) == SPARK_TYPES[kind]
    if not kind.startswith(("uint", "timestamp", "binary[")):
        assert back.type == kind


def test_columns_become_what_spark_takes():
    def taken(kind, values, type):
        return as_spark_takes(kind, pa.array(values, type))

    most = pa.array([(1 << 64) - 1, 0, None], pa.uint64())
    assert as_spark_takes("uint64", most).to_pylist() == [(1 << 64) - 1, 0, None]
    assert as_spark_takes("uint64", most).type == pa.decimal128(20, 0)
    assert taken("uint8", [255, None], pa.uint8()).equals(pa.array([255, None], pa.int16()))
    assert taken("uint32", [(1 << 32) - 1], pa.uint32()).type == pa.int64()
    assert taken("binary[2]", [b"ab"], pa.binary(2)).equals(pa.array([b"ab"]))
    same = pa.array([1, 2])
    assert as_spark_takes("int64", same) is same
    times = taken("timestamp(ns)", [1999, -1, -1000, -1001, None], pa.timestamp("ns"))
    assert times.cast(pa.int64()).to_pylist() == [1, -1, -1, -2, None], "rounded down"
    times = taken("timestamp(s)", [-2, None], pa.timestamp("s"))
    assert times.type == pa.timestamp("us", "UTC")
    assert times.cast(pa.int64()).to_pylist() == [-2_000_000, None]
    micros = pa.array([5, None], pa.timestamp("us"))
    assert as_spark_takes("timestamp(us)", micros).buffers()[1].address == (
        micros.buffers()[1].address
    )


def test_times_that_spark_cannot_hold_are_found():
    most = ((1 << 63) - 1) // 1000
    times = pa.array([most, None, most + 1, -most, -most - 1], pa.timestamp("ms"))
    assert misfits("timestamp(ms)", times).to_pylist() == [False, False, True, False, True]
    assert misfits("timestamp(ms)", times[:2]) is None
    assert misfits("timestamp(us)", times.view(pa.timestamp("us"))) is None
    assert misfits("int64", times.view(pa.int64())) is None


FIXED = {"valueFormat": "fixed", "valueSchema": CLICK}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"valueSchema": "a long"}, ("valueSchema has no effect without valueFormat", "arrow")),
        ({"valueSize": "8"}, ("valueSize has no effect without valueFormat",)),
        ({"valueMode": "FAILFAST"}, ("valueMode has no effect without valueFormat",)),
        ({"valueFormat": "xml"}, ("valueFormat", "'xml'", "fixed, json, arrow, avro, protobuf")),
        (FIXED | {"valueMode": "STRICT"}, ("valueMode", "PERMISSIVE, DROPMALFORMED, FAILFAST")),
        ({"valueFormat": "fixed"}, ("valueFormat=fixed needs valueSchema", "user:int64")),
        ({"valueFormat": "json"}, ("valueFormat=json needs valueSchema", ".schema(...)")),
        ({"valueFormat": "arrow", "valueSchema": " "}, ("valueSchema is empty", "user long")),
        (FIXED | {"valueSchema": "a long"}, ("valueSchema", "'a long' describes no field")),
        (FIXED | {"valueSchema": ","}, ("valueSchema", "0 bytes")),
        (FIXED | {"valueSchema": "a:text"}, ("valueSchema", "knows no type 'text'")),
        (FIXED | {"valueSchema": "a:int8, a:int8"}, ("valueSchema", "the name 'a'")),
        (FIXED | {"valueSchema": "a:int8, A:int8"}, ("a and A differ only in case", "rename")),
        (FIXED | {"valueSchema": "a:binary[40000]"}, ("valueSchema: column a", "binary[40000]")),
        (FIXED | {"valueSize": "8"}, ("valueSchema", "the field kind", "a value of 8 bytes")),
        (FIXED | {"valueSize": "2m"}, ("valueSize", "out of range")),
        (
            {"valueFormat": "json", "valueSchema": "a long", "valueSize": "8"},
            ("valueSize is for valueFormat=fixed, not json",),
        ),
        (
            {"valueFormat": "json", "valueSchema": "a:int64"},
            ("valueSchema", "'a:int64' is no schema"),
        ),
        (
            {"valueFormat": "json", "valueSchema": "a array<int>"},
            ("valueSchema", "'array<int>' is not supported"),
        ),
        ({"valueFormat": "json", "valueSchema": "a int, a int"}, ("a occurs twice",)),
        ({"valueFormat": "json", "valueSchema": "{}"}, ("valueSchema", "no schema of Spark")),
        (
            {"valueFormat": "json", "valueSchema": StructType().add("a,b", LongType()).json()},
            ("'a,b'", "comma"),
        ),
        (
            FIXED | {"includeHeaders": "true"},
            ("includeHeaders and valueFormat exclude each other", "metadataColumns=headers"),
        ),
        (FIXED | {"columns": "offset"}, ("columns", "no column 'offset'", "user, kind, time")),
    ],
)
def test_one_clear_error(options, words):
    with pytest.raises(ConfigError) as e:
        settings(**options)
    for word in words:
        assert word in str(e.value)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (
            StructType().add("a", ArrayType(IntegerType())),
            ("column a", "array<int>", "byte, short"),
        ),
        (StructType().add("a", TimestampNTZType()), ("column a", "timestamp_ntz")),
        (StructType().add("a", StringType("UTF8_LCASE")), ("column a", "collate")),
        (StructType([StructField("a", LongType(), nullable=False)]), ("a is NOT NULL",)),
        (StructType(), ("there is no column",)),
    ],
)
def test_schemas_that_values_cannot_have(schema, words):
    with pytest.raises(ConfigError) as e:
        settings(schema, valueFormat="arrow")
    for word in (".schema(...)", *words):
        assert word in str(e.value)


def test_a_sink_decodes_nothing():
    for name, value in {**FIXED, "valueSize": "9", "valueMode": "FAILFAST"}.items():
        settings = sink_settings({"kafka.bootstrap.servers": "h:1", name: value})
        assert settings.client == {"bootstrap.servers": ["h:1"]}
        assert settings.warnings == (
            f"option {name} belongs to a source and changes nothing in a sink",
        )


def test_queries_of_bytes_do_not_wait_for_the_engines_modules():
    """Spark's Python processes import the data source anew for many queries."""
    code = (
        "import sys; import kdirect_spark.datasource; from kdirect_spark.settings import *; "
        "source_settings({'kafka.bootstrap.servers': 'h:1', 'subscribe': 't'}, streaming=None); "
        "engines = 'kdirect.state.', 'pyarrow.compute'; "
        "print([m for m in sys.modules if f'{m}.'.startswith(engines)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
