"""Values in Avro, Protobuf and JSON from a real broker, by tasks and by Spark: as Confluent's
serializers write them and with a registry; values that do not decode, by mode; Kafka's columns
beside those of the value; a registry that is away or refuses."""

from __future__ import annotations

import json
import logging
import socket
import time

import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from kdirect.errors import BadValueError, ConfigError, SchemaRegistryError
from kdirect_spark import shim
from kdirect_spark.broker_view import RangePartition
from kdirect_spark.reading import read_range
from kdirect_spark.settings import source_settings
from tests.spark.schema_registry import SchemaRegistryServer
from tests.spark.test_protobuf_values import SET, expected, order

OLD = {
    "type": "record",
    "name": "Click",
    "fields": [
        {"name": "user", "type": "int"},
        {"name": "tags", "type": {"type": "array", "items": "string"}},
    ],
}
NEW = {
    "type": "record",
    "name": "Click",
    "fields": [
        {"name": "user", "type": "long"},
        {"name": "note", "type": ["null", "string"], "default": None},
        {"name": "tags", "type": {"type": "array", "items": "string"}},
    ],
}
SECRET = "reader:s3cret-word"


@pytest.fixture
def registry():
    with SchemaRegistryServer() as server:
        yield server


@pytest.fixture
def given(broker):
    """The options of a query."""
    return lambda topic, **options: {
        "kafka.bootstrap.servers": broker.bootstrap_servers,
        "subscribe": topic,
        **{name.replace("__", "."): value for name, value in options.items()},
    }


@pytest.fixture
def task(given):
    """The rows that a task reads of partition 0, as dicts."""

    def run(topic, count, **options):
        found = source_settings(given(topic, **options), streaming=False)
        batches = list(read_range(found, RangePartition(topic, 0, 0, count)))
        return [row for batch in batches for row in batch.to_pylist()]

    return run


def confluents(registry, topic):
    """Clicks of both schemas, as Confluent's serializer writes them."""
    client = SchemaRegistryClient({"url": registry.url})
    at = SerializationContext(topic, MessageField.VALUE)
    old, new = (AvroSerializer(client, json.dumps(schema)) for schema in (OLD, NEW))
    values = [old({"user": i, "tags": ["x"] * i}, at) for i in range(3)]
    values += [new({"user": 1 << 40, "note": f"n{i}", "tags": []}, at) for i in range(3)]
    read = AvroDeserializer(client, json.dumps(NEW))
    return values, [read(value, at) for value in values]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_avro_by_a_registry(task, topics, registry, transport):
    name = topics.create(1)
    values, rows = confluents(registry, name)
    now_s = int(time.time())  # retention spares it
    topics.fill(name, values, key=lambda i: b"k%d" % i, timestamp_ms=lambda i: now_s * 1000)
    options = {
        "valueFormat": "avro", "schema__registry__url": registry.url, "transport": transport,
    }  # fmt: skip
    assert task(name, 6, **options) == rows
    assert [p for p in registry.asked if p == "/schemas/ids/1"] == ["/schemas/ids/1"], "kept"
    # Columns: some of the value's, and Kafka's beside them.
    found = task(
        name, 6, **options, columns="note,key,at",
        metadataColumns="offset, key, timestamp as at",
    )  # fmt: skip
    assert [sorted(row) for row in found] == [["at", "key", "note"]] * 6
    assert [(row["note"], row["key"]) for row in found] == [
        (row["note"], b"k%d" % i) for i, row in enumerate(rows)
    ]
    assert {row["at"].timestamp() for row in found} == {now_s}
    # The schema of the rows stays that of the query, whatever is registered later.
    later = json.loads(json.dumps(NEW))
    later["fields"].append({"name": "later", "type": "int", "default": 0})
    schema = source_settings(
        {"kafka.bootstrap.servers": "h:1", "subscribe": name, "valueFormat": "avro",
         "schema.registry.url": registry.url}, streaming=False,
    ).values.row()  # fmt: skip
    registry.register(f"{name}-value", json.dumps(later))
    assert [sorted(row) for row in task(name, 1, **options)] == [["later", "note", "tags", "user"]]
    assert task(name, 6, **options, valueSchema=schema.json()) == rows


def test_protobuf_by_a_registry_and_by_a_file(task, topics, registry, tmp_path):
    client = SchemaRegistryClient({"url": registry.url})
    name = topics.create(1)
    # Of the class whose file names its import, as the serializer registers both.
    write = ProtobufSerializer(type(order(0)), client, {"use.deprecated.format": False})
    at = SerializationContext(name, MessageField.VALUE)
    framed = [write(order(i), at) for i in range(4)]
    topics.fill(name, framed)
    options = {"valueFormat": "protobuf", "schema__registry__url": registry.url}
    assert task(name, 4, **options) == [expected(i) for i in range(4)]
    path = tmp_path / "shop.desc"
    path.write_bytes(SET.SerializeToString())
    options = {"valueFormat": "protobuf", "descriptorFile": str(path), "messageName": "shop.Order"}
    assert task(name, 4, **options, valueFraming="confluent") == [expected(i) for i in range(4)]
    with pytest.raises(BadValueError, match=f"{name}-0 offset 0: it is no shop.Order"):
        task(name, 4, **options)
    plain = topics.create(1)
    topics.fill(plain, [order(i).SerializeToString() for i in range(4)])
    assert task(plain, 4, **options, columns="s") == [{"s": expected(i)["s"]} for i in range(4)]


def test_modes(task, topics, caplog):
    """What becomes of values that do not decode, and of tombstones, in each format and mode."""
    name = topics.create(1)
    topics.fill(name, [b'{"a": 1}', b"\xff{", None, b'{"a": "x"}', b'{"a": 2}'])
    of_json = {"valueFormat": "json", "valueSchema": "a long"}
    assert task(name, 5, **of_json) == [{"a": 1}, {"a": 2}], "as without the option"
    assert task(name, 5, **of_json, metadataColumns="offset") == [
        {"a": 1, "offset": 0}, {"a": 2, "offset": 4},
    ]  # fmt: skip
    with caplog.at_level(logging.WARNING, "kdirect_spark"):
        found = task(
            name, 5, **of_json, valueMode="PERMISSIVE", metadataColumns="offset",
            columnNameOfCorruptRecord="raw",
        )  # fmt: skip
    assert found == [
        {"a": 1, "offset": 0, "raw": None},
        {"a": None, "offset": 1, "raw": "\ufffd{"},
        {"a": None, "offset": 2, "raw": None},
        {"a": None, "offset": 3, "raw": '{"a": "x"}'},
        {"a": 2, "offset": 4, "raw": None},
    ]
    said = caplog.records[-1].getMessage()
    assert "3 values have a row of nulls (not_decoded 2, null_value 1)" in said
    assert "offset 3: field a: it is no int64" in said
    # In the schema, under Spark's own name, where it stands.
    spark_schema = StructType().add("_corrupt_record", "binary").add("a", "long").json()
    found = task(
        name, 5, valueFormat="json", valueSchema=spark_schema, valueMode="PERMISSIVE",
        columns="_corrupt_record",
    )  # fmt: skip
    assert [row["_corrupt_record"] for row in found] == [None, b"\xff{", None, b'{"a": "x"}', None]
    with pytest.raises(BadValueError, match=f"{name}-0 offset 1: .*valueMode=DROPMALFORMED") as e:
        task(name, 5, **of_json, valueMode="FAILFAST", metadataColumns="offset")
    assert e.value.offset == 1

    # Avro ends a query with the first bad value unless it is told not to.
    other = topics.create(1)
    topics.fill(other, [b"\2", b"", None, b"\4\0", b"\6"])
    schema = '{"type": "record", "name": "R", "fields": [{"name": "a", "type": "int"}]}'
    for options in ({"avroSchema": schema}, {"valueSchema": schema}):
        options["valueFormat"] = "avro"
        with pytest.raises(BadValueError, match=f"{other}-0 offset 1: it is no value of its Avro"):
            task(other, 5, **options)
        assert task(other, 5, **options, valueMode="DROPMALFORMED") == [{"a": 1}, {"a": 3}]
        found = task(other, 5, **options, valueMode="PERMISSIVE", columnNameOfCorruptRecord="raw")
        assert [(row["a"], row["raw"]) for row in found] == [
            (1, None), (None, b""), (None, None), (None, b"\4\0"), (3, None),
        ]  # fmt: skip
    # Fixed values, and values in Arrow, have rows for what is bad too.
    fixed = {"valueFormat": "fixed", "valueSchema": "a:int8", "valueMode": "PERMISSIVE"}
    assert task(other, 5, **fixed, metadataColumns="offset as n") == [
        {"a": 2, "n": 0}, {"a": None, "n": 1}, {"a": None, "n": 2}, {"a": None, "n": 3},
        {"a": 6, "n": 4},
    ]  # fmt: skip
    arrow = {"valueFormat": "arrow", "valueSchema": "a long", "valueMode": "PERMISSIVE"}
    assert task(other, 2, **arrow) == [{"a": None}] * 2


def test_json_with_confluents_frame(task, topics, registry):
    name = topics.create(1)
    topics.fill(name, [b'\0\0\0\0\1{"a": [1]}', b'{"a": [2]}', b'\0\0\0\0\2{"a": []}'])
    schema = StructType.fromJson(
        {"type": "struct", "fields": [{"name": "a", "nullable": True, "metadata": {}, "type":
            {"type": "array", "elementType": "long", "containsNull": True}}]}
    ).json()  # fmt: skip
    for more in ({"valueFraming": "confluent"}, {"schema__registry__url": registry.url}):
        found = task(name, 3, valueFormat="json", valueSchema=schema, **more)
        assert found == [{"a": [1]}, {"a": []}]
    assert registry.asked == [], "the schema is the query's"


# -- a registry that does not give what is asked for -----------------------------------------------


def test_ids_that_the_registry_does_not_know(task, topics, registry):
    name = topics.create(1)
    values, rows = confluents(registry, name)
    topics.fill(name, [values[0], b"\0\0\0\x27\x0f" + values[0][5:], values[1], b"\1" + values[2]])
    options = {"valueFormat": "avro", "schema__registry__url": registry.url}
    with pytest.raises(BadValueError, match=f"{name}-0 offset 1: .*no schema of id 9999"):
        task(name, 4, **options)
    assert task(name, 4, **options, valueMode="DROPMALFORMED") == rows[:2]
    assert registry.asked.count("/schemas/ids/9999") == 1, "asked once for a while"


def test_a_registry_that_is_away_or_refuses(task, topics, caplog):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    options = {"valueFormat": "avro", "schema__registry__timeout__ms": "300"}
    with pytest.raises(SchemaRegistryError, match=f"{url}: it cannot be asked for the versions of"):
        task("t", 1, **options, schema__registry__url=url)
    with SchemaRegistryServer(SECRET) as server:
        options["schema__registry__url"] = server.url
        secret = "schema__registry__secret__basic__auth__user__info"
        with pytest.raises(SchemaRegistryError, match="subject t-value: HTTP status 401") as e:
            task("t", 1, **options)
        wrong = {secret: "reader:wrong-word"}
        with pytest.raises(SchemaRegistryError, match="401") as of_wrong:
            task("t", 1, **options, **wrong)
        assert "wrong-word" not in f"{of_wrong.value!r} {of_wrong.value}"
        assert e.value.hint
        with pytest.raises(ConfigError, match=r"no subject t-value; .*schema\.registry\.subject"):
            task("t", 1, **options, **{secret: SECRET})
        # A task: never is what the registry does not tell a bad value.
        name = topics.create(1)
        number = server.register(f"{name}-value", json.dumps(OLD))
        topics.fill(name, [b"\0" + number.to_bytes(4, "big") + b"\2\0"])
        options[secret] = SECRET
        with caplog.at_level(logging.DEBUG):
            assert task(name, 1, **options) == [{"user": 1, "tags": []}]
        assert "s3cret" not in caplog.text
        server.status = 503
        schema = json.dumps(OLD)
        more = {"valueMode": "DROPMALFORMED", "avroSchema": schema}
        options["schema__registry__timeout__ms"] = "301"  # another client, which has kept nothing
        with pytest.raises(SchemaRegistryError, match=f"schema of id {number}: HTTP status 503"):
            task(name, 1, **options, **more)
        server.status, server.delay_s = 200, 2.0
        options["schema__registry__timeout__ms"] = "302"
        with pytest.raises(SchemaRegistryError, match=f"for the schema of id {number}: .*Time"):
            task(name, 1, **options, **more)
        server.delay_s = 0.0
        found = source_settings(
            {"kafka.bootstrap.servers": "h:1", "subscribe": name}
            | {n.replace("__", "."): v for n, v in options.items()}, streaming=False,
        )  # fmt: skip
        assert "s3cret" not in repr(found)


def test_a_token_for_the_registry_and_certificates():
    with SchemaRegistryServer(token="t0ken") as server:
        server.register("t-value", json.dumps(OLD))
        base = {"kafka.bootstrap.servers": "h:1", "subscribe": "t", "valueFormat": "avro",
                "schema.registry.url": server.url}  # fmt: skip
        token = {"schema.registry.secret.bearer.auth.token": "t0ken"}
        found = source_settings(base | token, streaming=False)
        assert found.values.row().names == ["user", "tags"] and "t0ken" not in repr(found)
        with pytest.raises(SchemaRegistryError, match="401"):
            source_settings(base, streaming=False)
        with pytest.raises(ConfigError, match=r"FileNotFoundError.*ssl\.ca\.location"):
            source_settings(
                base | {"schema.registry.ssl.ca.location": "/nowhere.pem"}, streaming=False
            )


AVRO = {"valueFormat": "avro", "avroSchema": json.dumps(NEW)}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"valueFormat": "avro"}, ("needs a schema", "avroSchema", "schema.registry.url")),
        ({"valueFormat": "avro", "valueFraming": "confluent"}, ("needs a schema",)),
        ({"valueFormat": "protobuf"}, ("needs a schema", "descriptorFile")),
        (
            {"valueFormat": "protobuf", "descriptorFile": "/nowhere", "messageName": "M"},
            ("descriptorFile: /nowhere cannot be read", "protoc"),
        ),
        ({"valueFormat": "protobuf", "descriptorFile": "/x"}, ("needs messageName",)),
        (AVRO | {"descriptorFile": "x"}, ("descriptorFile is for valueFormat=protobuf",)),
        (
            {"valueFormat": "json", "valueSchema": "a long", "avroSchema": "{}"},
            ("avroSchema is for valueFormat=avro",),
        ),
        (
            {"valueFormat": "arrow", "valueSchema": "a long", "valueFraming": "confluent"},
            ("valueFraming is for valueFormat=json or avro or protobuf, not arrow",),
        ),
        (AVRO | {"valueSchema": "user long, other int"}, ("no field other", "user, note, tags")),
        (AVRO | {"valueSchema": "user int"}, ("column user is int", "bigint by option avroSchema")),
        (AVRO | {"metadataColumns": "offsets"}, ("'offsets' is no column of Kafka's", "headers")),
        (AVRO | {"metadataColumns": "key as user"}, ("the value has a column user", "as kafka_")),
        (AVRO | {"metadataColumns": "key, KEY"}, ("two columns have the name key",)),
        (
            AVRO | {"columnNameOfCorruptRecord": "c"},
            ("column c", "valueMode=PERMISSIVE only"),
        ),
        (AVRO | {"schema.registry.subject": "s"}, ("no effect without schema.registry.url",)),
        (AVRO | {"schema.registry.url": "host:80"}, ("'host:80' is no address of a registry",)),
        (
            AVRO | {"schema.registry.url": "http://u:s3cret@h"},
            ("has credentials", "schema.registry.secret.basic.auth.user.info"),
        ),
        (
            AVRO | {"schema.registry.basic.auth.user.info": "u:s3cret"},
            ("unknown option", "schema.registry.secret.basic.auth.user.info"),
        ),
        (
            AVRO | {"schema.registry.url": "http://h", "valueFraming": "none"},
            ("exclude each other",),
        ),
        ({"metadataColumns": "key"}, ("metadataColumns has no effect without valueFormat",)),
    ],
)
def test_one_clear_error(options, words):
    with pytest.raises(ConfigError) as e:
        source_settings(
            {"kafka.bootstrap.servers": "h:1", "subscribe": "t"} | options, streaming=None
        )
    for word in words:
        assert word in str(e.value)
    assert "s3cret" not in str(e.value)


def test_a_package_that_is_missing(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "fastavro", None)
    with pytest.raises(
        ConfigError, match=r"needs the package fastavro.*pip install 'kdirect\[avro"
    ):
        source_settings({"kafka.bootstrap.servers": "h:1", "subscribe": "t"} | AVRO, streaming=None)


# -- Spark -----------------------------------------------------------------------------------------


@pytest.mark.spark
@pytest.mark.parametrize("columnar", [True, False])
def test_spark_reads_a_registrys_values(spark, given, topics, registry, tmp_path, columnar):
    name = topics.create(1)
    values, rows = confluents(registry, name)
    topics.fill(name, values)
    spark.conf.set(shim.CONF, str(columnar).lower())
    try:
        options = given(
            name, valueFormat="avro", schema__registry__url=registry.url, metadataColumns="offset"
        )
        df = spark.read.format("kdirect").options(**options).load()
        assert df.schema.simpleString() == (
            "struct<user:bigint,note:string,tags:array<string>,offset:bigint>"
        )
        wanted = [(r["user"], r["note"], r["tags"], i) for i, r in enumerate(rows)]
        assert [tuple(row) for row in df.collect()] == wanted
        assert df.count() == 6
        some = df.where("offset > 1").select(F.size("tags").alias("n"), "user")
        assert [tuple(r) for r in some.collect()] == [(len(t), u) for u, _, t, o in wanted if o > 1]
        stream = spark.readStream.format("kdirect").options(**options)
        query = (
            stream.option("startingOffsets", "earliest").load()
            .writeStream.format("memory").queryName(f"formats{columnar}")
            .option("checkpointLocation", str(tmp_path)).trigger(availableNow=True).start()
        )  # fmt: skip
        assert query.awaitTermination(60)
        assert [tuple(r) for r in spark.table(f"formats{columnar}").collect()] == wanted
    finally:
        spark.conf.unset(shim.CONF)


def test_slash_refuses_what_the_engine_does_not_read():
    from kdirect_spark.slash.query import _leaf
    from kdirect_spark.slash.session_facts import Relation

    for more, why in [
        (AVRO, "is read in avro"),
        ({"valueFormat": "json", "valueSchema": "a long", "valueMode": "PERMISSIVE"}, "PERMISSIVE"),
        ({"valueFormat": "json", "valueSchema": "a long", "metadataColumns": "key"}, "Kafka's col"),
    ]:
        options = {"kafka.bootstrap.servers": "h:1", "subscribe": "t"} | more
        relation = Relation(source="kdirect", options=options, is_streaming=False)
        with pytest.raises(ConfigError, match=f"topic t is read .*{why}|{why}.*engine"):
            _leaf(relation, source_settings(options, streaming=False), None)
