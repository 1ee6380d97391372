"""Protobuf values as columns: every type, the message that is meant, and bytes that are no values.
The oracle is Google's own library; no broker."""

from __future__ import annotations

import datetime
from decimal import Decimal

import pyarrow as pa
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, timestamp_pb2

from kdirect.errors import ConfigError
from kdirect_spark.protobuf_values import ProtobufMessage, ProtobufValues, last_of_each_key

F = descriptor_pb2.FieldDescriptorProto
TYPES = {
    "i": F.TYPE_INT32, "l": F.TYPE_SINT64, "u": F.TYPE_UINT32, "ul": F.TYPE_FIXED64,
    "d": F.TYPE_DOUBLE, "f": F.TYPE_FLOAT, "o": F.TYPE_BOOL, "s": F.TYPE_STRING, "b": F.TYPE_BYTES,
}  # fmt: skip
UTC = datetime.timezone.utc


def descriptors(*, group=False, recursive=False):
    """shop.Order with every kind of field, and shop.Other.Part, as a FileDescriptorSet."""
    out = descriptor_pb2.FileDescriptorSet()
    file = out.file.add(name="shop.proto", package="shop", syntax="proto3")
    file.dependency.append("google/protobuf/timestamp.proto")
    file.enum_type.add(name="Kind").value.add(name="A", number=0)
    file.enum_type[0].value.add(name="B", number=1)
    order = file.message_type.add(name="Order")

    def add(name, kind, to=order, label=F.LABEL_OPTIONAL, **more):
        to.field.add(name=name, number=len(to.field) + 1, type=kind, label=label, **more)

    for name, kind in TYPES.items():
        add(name, kind)
    add("kind", F.TYPE_ENUM, type_name=".shop.Kind")
    add("at", F.TYPE_MESSAGE, type_name=".google.protobuf.Timestamp")
    add("tags", F.TYPE_STRING, label=F.LABEL_REPEATED)
    add("item", F.TYPE_MESSAGE, type_name=".shop.Order.Item")
    add("items", F.TYPE_MESSAGE, label=F.LABEL_REPEATED, type_name=".shop.Order.Item")
    add("m", F.TYPE_MESSAGE, label=F.LABEL_REPEATED, type_name=".shop.Order.MEntry")
    item = order.nested_type.add(name="Item")
    add("sku", F.TYPE_STRING, item)
    add("n", F.TYPE_UINT32, item)
    entry = order.nested_type.add(name="MEntry")
    entry.options.map_entry = True
    add("key", F.TYPE_STRING, entry)
    add("value", F.TYPE_INT64, entry)
    order.oneof_decl.add(name="which")
    add("a", F.TYPE_INT32, oneof_index=0)
    add("c", F.TYPE_STRING, oneof_index=0)
    order.oneof_decl.add(name="_maybe")
    add("maybe", F.TYPE_INT32, oneof_index=1, proto3_optional=True)
    other = file.message_type.add(name="Other")
    add("x", F.TYPE_INT32, other.nested_type.add(name="Part"))
    if group:
        add("g", F.TYPE_GROUP, other, type_name=".shop.Other.Part")
    if recursive:
        add("me", F.TYPE_MESSAGE, other, type_name=".shop.Other")
    return out


SET = descriptors()


def message_class(name="shop.Order", given=SET):
    pool = descriptor_pool.DescriptorPool()
    well_known = descriptor_pb2.FileDescriptorProto()
    timestamp_pb2.DESCRIPTOR.CopyToProto(well_known)
    pool.Add(well_known)
    for file in given.file:
        pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))


Order = message_class()


def order(i):
    out = Order(
        i=-i, l=-(2**62) + i, u=2**32 - 1 - i, ul=2**64 - 1 - i, d=i / 3, f=1.5, o=True, s=f"ü{i}",
        b=b"\xff%d" % i, kind=i % 2, tags=["x"] * (i % 3), c="chosen",
    )  # fmt: skip
    out.at.seconds, out.at.nanos = 1_700_000_000 + i, 5000
    out.item.sku = "s"
    out.items.add(n=2**32 - 1)
    out.m["k"] = i
    return out


def expected(i):
    at = datetime.datetime.fromtimestamp(1_700_000_000 + i, UTC).replace(microsecond=5)
    return {
        "i": -i, "l": -(2**62) + i, "u": 2**32 - 1 - i, "ul": Decimal(2**64 - 1 - i), "d": i / 3,
        "f": 1.5, "o": True, "s": f"ü{i}", "b": b"\xff%d" % i, "kind": "AB"[i % 2], "at": at,
        "tags": ["x"] * (i % 3), "item": {"sku": "s", "n": 0},
        "items": [{"sku": "", "n": 2**32 - 1}], "m": [("k", i)], "a": None, "c": "chosen",
        "maybe": None,
    }  # fmt: skip


def read(values, columns=None, name="shop.Order", **more):
    message = ProtobufMessage(SET.SerializeToString(), name, "the set")
    columns = message.row.names if columns is None else columns
    found = ProtobufValues(message, columns, **more).decode(pa.array(values, pa.binary()))
    for column in found.columns:
        column.validate(full=True)
    rows = [dict(zip(columns, row)) for row in zip(*(c.to_pylist() for c in found.columns))]
    return rows, found.records.tolist(), found.bad


def test_every_type():
    message = ProtobufMessage(SET.SerializeToString(), "Order", "the set")
    assert message.row.simpleString() == (
        "struct<i:int,l:bigint,u:bigint,ul:decimal(20,0),d:double,f:float,o:boolean,s:string,"
        "b:binary,kind:string,at:timestamp,tags:array<string>,item:struct<sku:string,n:bigint>,"
        "items:array<struct<sku:string,n:bigint>>,m:map<string,bigint>,a:int,c:string,maybe:int>"
    )
    values = [order(i).SerializeToString() for i in range(50)]
    assert read(values) == ([expected(i) for i in range(50)], list(range(50)), [])
    assert read(values[:2], ["m", "u"])[0] == [
        {"m": [("k", i)], "u": 2**32 - 1 - i} for i in range(2)
    ]
    # Without presence a field has its default, with presence it is null.
    (row,), _, _ = read([b""])
    assert (row["i"], row["s"], row["kind"], row["tags"], row["m"]) == (0, "", "A", [], [])
    assert [row[name] for name in ("at", "item", "a", "c", "maybe")] == [None] * 5


def test_bytes_that_are_no_message_cost_their_row_only():
    good = order(1).SerializeToString()
    wrong = {
        "cut short": good[:-3],
        "huge": b"\x42\xff\xff\xff\xff\x07ab",
        "longer than memory": b"\x42" + b"\xff" * 9 + b"\x01ab",  # 2^64 - 1 bytes
        "longer than memory, within": b"\x6a\x0c\x0a" + b"\xff" * 9 + b"\x01a",
        "endless number": b"\x08" + b"\xff" * 11,
        "no UTF-8": b"\x42\x02\xff\xfe",
        "no field": b"\x00",
        "a time that Spark cannot hold": b"\x5a\x0a\x08" + b"\xff" * 8 + b"\x3f",
    }
    assert Order.FromString(wrong["a time that Spark cannot hold"]).at.seconds == 2**62 - 1
    values = [v for bad in wrong.values() for v in (good, bad)] + [good]
    rows, records, bad = read(values)
    assert rows == [expected(1)] * (len(wrong) + 1)
    assert records == list(range(0, len(values), 2))
    assert [b.record for b in bad] == list(range(1, len(values), 2))
    assert all("it is no shop.Order (" in b.why for b in bad)
    assert read([wrong["cut short"]])[:2] == ([], [])


def test_of_a_key_that_is_there_twice_the_last_one_counts():
    def entry(key, n):  # of field m
        text = Order(m={key: n}).SerializeToString()
        assert list(Order.FromString(text).m.items()) == [(key, n)]
        return text

    twice = [
        entry("a", 1) + entry("b", 2) + entry("a", 3),
        b"",
        entry("a", 4),
        entry("b", 5) + entry("b", 6) + entry("b", 7),
    ]
    assert [dict(Order.FromString(value).m) for value in twice[::3]] == [{"b": 2, "a": 3}, {"b": 7}]
    rows, _, bad = read(twice, ["m"])
    assert not bad
    assert [row["m"] for row in rows] == [[("b", 2), ("a", 3)], [], [("a", 4)], [("b", 7)]]


MAP = pa.map_(pa.string(), pa.int64())
STRUCT = pa.struct([("m", MAP), ("n", pa.int32())])


@pytest.mark.parametrize(("kind", "given", "kept"), [
    (MAP, [[("a", 1), ("a", 2)], None, []], [[("a", 2)], None, []]),
    (STRUCT, [{"m": [("x", 1), ("x", 2)], "n": 1}, None, {"m": None, "n": 2}],
     [{"m": [("x", 2)], "n": 1}, None, {"m": None, "n": 2}]),
    (pa.list_(STRUCT), [[{"m": [("x", 1), ("x", 2)], "n": 1}], None, [], [{"m": None, "n": 3}]],
     [[{"m": [("x", 2)], "n": 1}], None, [], [{"m": None, "n": 3}]]),
    (pa.map_(pa.string(), STRUCT),
     [[("k", {"m": [("x", 1)], "n": 1}), ("l", {"m": [("z", 1), ("z", 5)], "n": 2})]],
     [[("k", {"m": [("x", 1)], "n": 1}), ("l", {"m": [("z", 5)], "n": 2})]]),
])  # fmt: skip
def test_maps_within_other_types(kind, given, kept):
    column = pa.array(given, kind)
    for first in range(len(given)):
        found = last_of_each_key(column.slice(first))
        found.validate(full=True)
        assert found.type == kind
        assert found.to_pylist() == kept[first:]
    again = last_of_each_key(column)
    assert last_of_each_key(again) is again, "columns without such keys stay as they are"


def test_the_frame_names_the_message():
    good = order(1).SerializeToString()
    head = b"\0\0\0\0\7"
    framed = [
        head + b"\0" + good,  # the short form
        head + b"\2\0" + good,  # [0]
        head + b"\2\2" + good,  # [1]: Other
        head + b"\4\2\0" + good,  # [1, 0]: Other.Part
        head,
        head + b"\x81",
        head + b"\xff\xff\xff\xff\x0f",
        b"\1" + good,
        b"",
    ]
    rows, records, bad = read(framed, framed=True)
    assert (rows, records) == ([expected(1)] * 2, [0, 1])
    assert [b.record for b in bad] == list(range(2, 9))
    assert "message [1] of its schema, not [0]" in bad[0].why
    assert all("Confluent's frame" in b.why for b in bad[2:])
    part = message_class("shop.Other.Part")(x=5).SerializeToString()
    rows, records, _ = read([head + b"\4\2\0" + part, framed[0]], name="Part", framed=True)
    assert (rows, records) == ([{"x": 5}], [0])


@pytest.mark.parametrize(
    ("data", "name", "words"),
    [
        (b"\xff\xff", "Order", ("no set of descriptors", "protoc")),
        (b"", "Order", ("no file in it",)),
        (SET.SerializeToString(), "Nothing", ("no message Nothing", "shop.Order, shop.Order.Item")),
        (SET.SerializeToString(), "shop.Other", ("shop.Other has no fields",)),
        (descriptors(group=True).SerializeToString(), "Other", ("shop.Other.g is a group",)),
        (descriptors(recursive=True).SerializeToString(), "Other", ("a shop.Other within a",)),
    ],
)
def test_sets_that_are_refused(data, name, words):
    with pytest.raises(ConfigError) as e:
        ProtobufMessage(data, name, "the set")
    for word in words:
        assert word in str(e.value)
