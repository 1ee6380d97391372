"""Avro values as columns: every type, resolution of schemas, and bytes that are no values.  The
oracle is fastavro's own reading, value by value; no broker."""

from __future__ import annotations

import datetime
import io
import json
from decimal import Decimal

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdirect.errors import ConfigError, UnknownSchemaError
from kdirect_spark.avro_schema import AvroSchema
from kdirect_spark.avro_values import AvroValues

UTC = datetime.timezone.utc
AT = datetime.datetime(2024, 2, 29, 1, 2, 3, 4000, UTC)
INNER = {
    "type": "record",
    "name": "Inner",
    "fields": [
        {"name": "x", "type": "int"},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
    ],
}
# A field's type, Spark's, what is written of it, and what is read.
TYPES = [
    ("int", "int", -(2**31), -(2**31)),
    ("long", "bigint", 2**63 - 1, 2**63 - 1),
    ("float", "float", 1.5, 1.5),
    ("double", "double", 0.1, 0.1),
    ("boolean", "boolean", True, True),
    ("string", "string", "ü", "ü"),
    ("bytes", "binary", b"\xff\0", b"\xff\0"),
    ({"type": "fixed", "name": "F", "size": 3}, "binary", b"abc", b"abc"),
    ({"type": "enum", "name": "E", "symbols": ["A", "B"]}, "string", "B", "B"),
    ({"type": "int", "logicalType": "date"}, "date", AT.date(), AT.date()),
    ({"type": "long", "logicalType": "timestamp-millis"}, "timestamp", AT, AT),
    ({"type": "long", "logicalType": "timestamp-micros"}, "timestamp", AT, AT),
    (
        {"type": "long", "logicalType": "local-timestamp-millis"},
        "timestamp_ntz",
        AT.replace(tzinfo=None),
        AT.replace(tzinfo=None),
    ),
    ({"type": "int", "logicalType": "time-millis"}, "int", datetime.time(0, 0, 1), 1000),
    ({"type": "string", "logicalType": "uuid"}, "string", "x", "x"),
    (
        {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2},
        "decimal(9,2)",
        Decimal("-12.34"),
        Decimal("-12.34"),
    ),
    (
        {"type": "fixed", "name": "D", "size": 8, "logicalType": "decimal", "precision": 18},
        "decimal(18,0)",
        Decimal(7),
        Decimal(7),
    ),
    (["null", "string"], "string", None, None),
    (["int", "null"], "int", 5, 5),
    (["int", "long"], "bigint", 5, 5),
    (
        ["null", "string", "long", {"type": "array", "items": "int"}],
        "struct<member0:string,member1:bigint,member2:array<int>>",
        [1],
        {"member0": None, "member1": None, "member2": [1]},
    ),
    ({"type": "array", "items": ["null", "int"]}, "array<int>", [1, None], [1, None]),
    ({"type": "map", "values": "long"}, "map<string,bigint>", {"k": 1}, [("k", 1)]),
    (INNER, "struct<x:int,at:timestamp>", {"x": 1, "at": AT}, {"x": 1, "at": AT}),
    (
        ["null", {"type": "map", "values": INNER}],
        "map<string,struct<x:int,at:timestamp>>",
        {"k": {"x": 1, "at": AT}},
        [("k", {"x": 1, "at": AT})],
    ),
    (
        ["int", INNER, {"type": "enum", "name": "E", "symbols": ["A"]}],
        "struct<member0:int,member1:struct<x:int,at:timestamp>,member2:string>",
        ("Inner", {"x": 2, "at": AT}),
        {"member0": None, "member1": {"x": 2, "at": AT}, "member2": None},
    ),
]


def record(*fields, name="R"):
    return {
        "type": "record",
        "name": name,
        "fields": [
            {"name": f"f{i}", "type": kind} if not isinstance(kind, dict) or "default" not in kind
            else {"name": f"f{i}", **kind}
            for i, kind in enumerate(fields)
        ],
    }  # fmt: skip


def written(schema, *rows):
    parsed = fastavro.parse_schema(json.loads(json.dumps(schema)))
    out = []
    for row in rows:
        stream = io.BytesIO()
        fastavro.schemaless_writer(stream, parsed, row)
        out.append(stream.getvalue())
    return out


def avro(schema):
    return AvroSchema(json.dumps(schema), "the schema")


def read(schema, values, columns=None, **more):
    """The rows, the numbers of their values, and what is bad."""
    reader = avro(schema)
    columns = reader.row.names if columns is None else columns
    found = AvroValues(reader, columns, **more).decode(pa.array(values, pa.binary()))
    for name, column in zip(columns, found.columns):
        assert column.type == reader.target(name)
        column.validate(full=True)
    rows = list(zip(*(column.to_pylist() for column in found.columns)))
    return rows, found.records.tolist(), [(bad.record, bad.field, bad.why) for bad in found.bad]


@pytest.mark.parametrize(("kind", "spark", "value", "expected"), TYPES)
def test_every_type(kind, spark, value, expected):
    schema = record(kind, "int")
    assert avro(schema).row["f0"].dataType.simpleString() == spark
    values = written(schema, {"f0": value, "f1": 1}, {"f0": value, "f1": 2})
    assert read(schema, values) == ([(expected, 1), (expected, 2)], [0, 1], [])
    # What is not wanted is skipped, and a name that is defined in it is defined where it is used.
    assert read(schema, values, ["f1"]) == ([(1,), (2,)], [0, 1], [])


def test_names_are_defined_where_they_are_used_first():
    schema = record(INNER, {"type": "array", "items": "Inner"}, ["null", "Inner"])
    (value,) = written(schema, {"f0": {"x": 1, "at": AT}, "f1": [{"x": 2, "at": AT}], "f2": None})
    assert read(schema, [value], ["f1", "f2"])[0] == [([{"x": 2, "at": AT}], None)]


def test_a_schema_that_is_no_record():
    values = written("long", 7, 8)
    assert avro("long").row.simpleString() == "struct<value:bigint>"
    assert read("long", values)[0] == [(7,), (8,)]
    assert AvroSchema("long", "x").row == avro("long").row


def test_schemas_evolve_as_avro_says():
    old = record("int", "string", "string")
    new = {
        "type": "record",
        "name": "R",
        "fields": [
            {"name": "f2", "type": ["null", "string"]},
            {"name": "f0", "type": "double"},  # promoted
            {"name": "renamed", "aliases": ["f1"], "type": "string"},
            {"name": "added", "type": "long", "default": 9},
            {"name": "none", "type": ["null", "long"], "default": None},
        ],
    }
    values = written(old, {"f0": 1, "f1": "a", "f2": "b"})
    assert read(new, values, writer=avro(old))[0] == [("b", 1.0, "a", 9, None)]

    by_id = {1: avro(old), 2: avro(new)}

    def schema_of(number):
        if number not in by_id:
            raise UnknownSchemaError(f"no schema of id {number}")
        return by_id[number]

    newer = written(new, {"f2": None, "f0": 2.5, "renamed": "c", "added": 1, "none": 3})
    framed = [b"\0\0\0\0\1" + values[0], b"\0\0\0\0\2" + newer[0], b"\0\0\0\0\3" + newer[0]]
    bad = [b"\1\0\0\0\1" + values[0], b"\0\0\0\0", b""]
    rows, records, wrong = read(new, framed + bad, framed=True, by_id=schema_of)
    assert (rows, records) == ([("b", 1.0, "a", 9, None), (None, 2.5, "c", 1, 3)], [0, 1])
    assert [row for row, *_ in wrong] == [2, 3, 4, 5]
    assert wrong[0][2] == "no schema of id 3"
    assert all("Confluent's frame" in why for *_, why in wrong[1:])
    # Schemas that do not go together make no rows.
    other = record("string")
    assert "SchemaResolutionError" in read(other, values, writer=avro(old))[2][0][2]


def test_a_schema_of_an_id_that_is_not_read_costs_its_values_only():
    asked = []

    def schema_of(number):
        asked.append(number)
        if number == 1:
            return avro(record("int"))
        if number == 2:
            raise ConfigError("schema 2 of http://registry is of type JSON")
        return AvroSchema('{"type": "nonsense"}', "schema 3 of http://registry")

    value = written(record("int"), {"f0": 5})[0]
    framed = [b"\0\0\0\0" + bytes([i]) + value for i in (1, 2, 3, 2, 3, 1)]
    rows, records, wrong = read(record("int"), framed, framed=True, by_id=schema_of)
    assert (rows, records) == ([(5,), (5,)], [0, 5])
    assert [row for row, *_ in wrong] == [1, 2, 3, 4]
    assert [why for *_, why in wrong[::2]] == ["schema 2 of http://registry is of type JSON"] * 2
    assert all("schema 3 of http://registry is no Avro schema" in why for *_, why in wrong[1::2])
    assert asked == [1, 2, 3], "each id is asked for once"


def varint(number):
    number = (number << 1) ^ (number >> 63)
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes(out) + bytes([number])


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("int", b""),
        ("int", b"\x80"),
        ("double", b"1234567"),
        ("string", varint(1 << 31) + b"ab"),
        ("bytes", varint(1 << 62) + b"ab"),
        ("string", varint(-3) + b"abc"),
        ("string", varint(2) + b"\xff\xfe"),
        ({"type": "array", "items": "int"}, varint(1 << 40) + b"\2\2"),
        ({"type": "array", "items": "int"}, varint(-(1 << 40)) + varint(1) + b"\2"),
        ({"type": "map", "values": "int"}, varint(1 << 31) + b"\2a\2"),
        (["null", "int"], varint(7)),
        ({"type": "enum", "name": "E", "symbols": ["A"]}, varint(9)),
        ({"type": "fixed", "name": "F", "size": 4}, b"ab"),
        ("int", varint(1 << 40)),
        ({"type": "long", "logicalType": "timestamp-millis"}, varint(1 << 61)),
        (
            {"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 2},
            b"\x10" + b"9" * 8,
        ),
    ],
)  # fmt: skip
def test_bytes_that_are_no_value_cost_their_row_only(kind, value):
    schema = record(kind)
    good = written(schema, {"f0": next(v for k, _, v, _ in [*TYPES, *MORE] if k == kind)})[0]
    rows, records, bad = read(schema, [good, value, good, good + b"\0"])
    assert (len(rows), records) == (2, [0, 2])
    assert [row for row, *_ in bad] == [1, 3]
    assert bad[1][2] == "1 bytes follow the value of its Avro schema"


@pytest.mark.parametrize(
    ("item", "size"),
    [
        ("boolean", 1),
        ("double", 8),
        ({"type": "fixed", "name": "F", "size": 3}, 3),
        (record("float", "boolean", name="In"), 5),
    ],
)
def test_what_is_skipped_ends_with_its_value(item, size):
    schema = record("int", {"type": "array", "items": item})
    good = b"\2" + varint(1) + bytes(size) + varint(0)
    promised = b"\2" + varint(1 << 24)  # with 2^62 items it took for ever
    values = [good, promised, good[:-1], good[:-2], good + b"\0"]
    expected = [(1,)], [0]
    # Whether the query leaves the fields out, or the schema that it reads by.
    for found in (read(schema, values, ["f0"]), read(record("int"), values, writer=avro(schema))):
        assert found[:2] == expected
        assert [row for row, *_ in found[2]] == [1, 2, 3, 4]
    flat = record("int", item)
    rows, records, bad = read(flat, [b"\2" + bytes(size), b"\2" + bytes(size - 1)], ["f0"])
    assert (rows, records) == expected
    assert bad == [(1, "", "it ends within the value of its Avro schema")]


MORE = [
    ({"type": "array", "items": "int"}, "", [1], None),
    ({"type": "map", "values": "int"}, "", {"a": 1}, None),
    (["null", "int"], "", 1, None),
    ({"type": "enum", "name": "E", "symbols": ["A"]}, "", "A", None),
    ({"type": "fixed", "name": "F", "size": 4}, "", b"abcd", None),
    (
        {"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 2},
        "",
        Decimal("1.23"),
        None,
    ),
]


TWICE = {
    "type": "record",
    "name": "R",
    "fields": [{"name": "x", "type": "int"}, {"name": "x", "type": "string"}],
}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ("{", "no Avro schema: JSONDecodeError"),
        (json.dumps(record("text")), "no Avro schema: UnknownType"),
        (json.dumps(record()), "without fields"),
        (json.dumps(record({"type": "array", "items": "null"})), "f0 is an array whose items have"),
        (
            json.dumps(record({"type": "array", "items": record(record(name="A"), name="B")})),
            "f0 is an array whose items have",
        ),
        (json.dumps(record(["null", "R"])), "f0 is a R within a R"),
        (json.dumps(TWICE), "R has several fields of the name x"),
        (json.dumps(record({**TWICE, "name": "In"})), "f0 has several fields of the name x"),
        (
            json.dumps(record({"type": "bytes", "logicalType": "decimal", "precision": 50})),
            "f0 is a decimal(50,0)",
        ),
        (json.dumps(record(["int", "long", "string"])), "f0 cannot be distinguished"),
        (
            json.dumps(record([INNER, {"type": "map", "values": "int"}])),
            "f0 cannot be distinguished",
        ),
    ],
)
def test_schemas_that_are_refused(schema, words):
    with pytest.raises(ConfigError) as e:
        AvroSchema(schema, "option avroSchema")
    assert words in str(e.value) and e.value.message.startswith("option avroSchema")
    assert e.value.hint


# -- drawn schemas and values ----------------------------------------------------------------------

_PLAIN = {
    "int": st.integers(-(2**31), 2**31 - 1),
    "long": st.integers(-(2**63), 2**63 - 1),
    "double": st.floats(allow_nan=False),
    "boolean": st.booleans(),
    "string": st.text(max_size=8),
    "bytes": st.binary(max_size=8),
}


@st.composite
def typed(draw, depth=2):
    """A type, and a strategy of values of it."""
    kinds = ["plain", "plain", "null"] + (["array", "map", "record"] if depth else [])
    kind = draw(st.sampled_from(kinds))
    if kind == "plain":
        name = draw(st.sampled_from(sorted(_PLAIN)))
        return name, _PLAIN[name]
    if kind == "null":
        name = draw(st.sampled_from(sorted(_PLAIN)))
        return ["null", name], st.none() | _PLAIN[name]
    if kind == "record":
        fields = draw(st.lists(typed(depth - 1), min_size=1, max_size=3))
        name = f"R{draw(st.integers(0, 10**9))}"
        parts = {f"f{i}": values for i, (_, values) in enumerate(fields)}
        return record(*(k for k, _ in fields), name=name), st.fixed_dictionaries(parts)
    inner, values = draw(typed(depth - 1))
    if kind == "array":
        return {"type": "array", "items": inner}, st.lists(values, max_size=3)
    return {"type": "map", "values": inner}, st.dictionaries(
        st.text(max_size=3), values, max_size=3
    )


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_is_read_is_what_fastavro_reads(data):
    fields = data.draw(st.lists(typed(), min_size=1, max_size=4))
    schema = record(*(kind for kind, _ in fields), name="Root")
    try:
        parsed = fastavro.parse_schema(json.loads(json.dumps(schema)))
    except fastavro.schema.SchemaParseException:
        return  # one name, drawn twice
    row = st.fixed_dictionaries({f"f{i}": values for i, (_, values) in enumerate(fields)})
    values = written(schema, *data.draw(st.lists(row, max_size=4)))
    expected = [
        tuple(plain(v) for v in fastavro.schemaless_reader(io.BytesIO(v), parsed, None).values())
        for v in values
    ]
    rows, records, bad = read(schema, values)
    assert [tuple(plain(v) for v in r) for r in rows] == expected
    assert (records, bad) == (list(range(len(values))), [])
    some = data.draw(st.sampled_from([f"f{i}" for i in range(len(fields))]))
    assert [plain(v) for (v,) in read(schema, values, [some])[0]] == [
        r[int(some[1:])] for r in expected
    ]
    # Damaged bytes are bad, or are another value: never an error, never another number of rows.
    if values:
        damaged = bytearray(values[0])
        for _ in range(min(len(damaged), 2)):
            damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
        rows, records, bad = read(schema, [bytes(damaged), *values[1:]])
        assert records == list(range(len(bad), len(values))) and len(rows) == len(records)


def plain(value):
    """A value of Arrow and one of Avro in one form: maps as dicts, and what is empty as None, as
    Python's form of an empty map in Arrow is that of an empty list."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()} or None
    if isinstance(value, list):
        if value and all(isinstance(part, tuple) for part in value):
            return {k: plain(v) for k, v in value}
        return [plain(part) for part in value] or None
    return value
