"""Options of source and sink: names, precedence, and one clear error for each mistake."""

from __future__ import annotations

import pytest

from kdirect.errors import ConfigError
from kdirect.model import TopicPartition
from kdirect.options import SPARK
from kdirect_spark.offsets import (
    Assign,
    AtOffsets,
    AtTimes,
    Earliest,
    Latest,
    Subscribe,
    SubscribePattern,
)
from kdirect_spark.settings import sink_settings, source_settings

BASE = {"kafka.bootstrap.servers": "localhost:9092", "subscribe": "t"}


def source(streaming=True, drop=(), **options):
    options = {
        k: v
        for k, v in (BASE | {k.replace("__", "."): v for k, v in options.items()}).items()
        if k not in drop
    }
    return source_settings(options, streaming=streaming)


def test_defaults_are_those_of_sparks_kafka_connector():
    stream, batch = source(True), source(False)
    assert stream.starting == Latest() and batch.starting == Earliest()
    assert batch.ending == Latest()
    assert stream.fail_on_data_loss is True and stream.include_headers is False
    assert (stream.retries, stream.retry_interval_ms, stream.max_delay_ms) == (
        3,
        10,
        15 * 60 * 1000,
    )
    assert (
        stream.max_offsets
        is stream.min_offsets
        is stream.min_partitions
        is stream.max_records
        is None
    )
    assert (
        stream.task_client["request.timeout.ms"] == 120000
        and "request.timeout.ms" not in stream.client
    )
    assert stream.client == {"bootstrap.servers": ["localhost:9092"]}


def test_every_option_of_the_kafka_connector_is_a_row():
    for name in (
        "assign",
        "subscribe",
        "subscribePattern",
        "kafka.bootstrap.servers",
        "startingTimestamp",
        "startingOffsetsByTimestamp",
        "startingOffsets",
        "startingOffsetsByTimestampStrategy",
        "endingTimestamp",
        "endingOffsetsByTimestamp",
        "endingOffsets",
        "failOnDataLoss",
        "kafkaConsumer.pollTimeoutMs",
        "fetchOffset.numRetries",
        "fetchOffset.retryIntervalMs",
        "maxOffsetsPerTrigger",
        "minOffsetsPerTrigger",
        "maxTriggerDelay",
        "minPartitions",
        "maxRecordsPerPartition",
        "groupIdPrefix",
        "kafka.group.id",
        "includeHeaders",
        "topic",
    ):
        assert SPARK.find(name.lower()).name == name


@pytest.mark.parametrize(
    "name", ["bootstrap.servers", "Kafka.Bootstrap.Servers", "KAFKA.BOOTSTRAP.SERVERS"]
)
def test_names_in_any_case_and_bootstrap_servers_with_and_without_prefix(name):
    settings = source_settings(
        {name: "a:1, b:2", "SUBSCRIBE": "x,y , x", "FAILONDATALOSS": "False"}, streaming=True
    )
    assert settings.client["bootstrap.servers"] == ["a:1", "b:2"]
    assert settings.subscription == Subscribe(("x", "y"))
    assert settings.fail_on_data_loss is False


def test_client_settings_pass_with_and_without_prefix():
    settings = source(
        transport="TCP",
        kafka__client__id="me",
        fetch__max__read__bytes="64k",
        kafka__max__partition__fetch__bytes="1m",
    )
    assert settings.client == {
        "bootstrap.servers": ["localhost:9092"],
        "transport": "tcp",
        "client.id": "me",
        "fetch.max.read.bytes": 65536,
    }
    assert source(request__timeout__ms="5").task_client["request.timeout.ms"] == 5
    assert source(**{"kafkaConsumer.pollTimeoutMs": "7"}).task_client["request.timeout.ms"] == 7
    sink = sink_settings(
        {
            "kafka.bootstrap.servers": "h:1",
            "exactlyOnce": "false",
            "kafka.acks": "1",
            "kafka.batch.size": "2k",
            "kafka.compression.type": "lz4",
        }
    )
    assert sink.client == {
        "bootstrap.servers": ["h:1"],
        "acks": "1",
        "batch.bytes": 2048,
        "compression.type": "lz4",
    }


def test_kafka_tuning_without_effect_is_said_not_refused():
    settings = source(kafka__max__poll__records="500")
    assert "kafka.max.poll.records" in settings.warnings[0]
    # Kafka's socket buffer is not our send buffer, though it has the same name.
    assert sink_settings(
        {"kafka.bootstrap.servers": "h:1", "kafka.send.buffer.bytes": "5"}
    ).client == {"bootstrap.servers": ["h:1"]}


def lines_of(settings, name):
    (line,) = (line for line in settings.warnings if f"option {name} " in line)
    return line


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("kafka.security.protocol", "plaintext", "asks for what happens anyway"),
        ("groupIdPrefix", "x", "joins no consumer group"),
        ("kafka.group.id", "g", "for streaming queries"),
        ("maxOffsetsPerTrigger", "5", "for streaming queries"),
        ("minOffsetsPerTrigger", "5", "for streaming queries"),
        ("maxTriggerDelay", "5s", "for streaming queries"),
        ("topic", "x", "belongs to a sink"),
        ("kafka.enable.idempotence", "true", "a source writes nothing"),
        ("kafka.retries", "3", "a source writes nothing"),
        ("kafka.partitioner.class", "x.Mine", "a source writes nothing"),
        ("kafka.value.serializer", "x", "a source writes nothing"),
        ("acks", "1", "a source writes nothing"),
        ("kafka.enable.auto.commit", "false", "asks for what happens anyway"),
        ("Kafka.Session.Timeout.Ms", "9", "joins no consumer group"),
    ],
)
def test_what_changes_nothing_in_a_batch_is_a_line_in_the_log(name, value, words):
    assert words in lines_of(source_settings(BASE | {name: value}, streaming=False), name)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("failOnDataLoss", "false", "belongs to a source"),
        ("startingOffsets", "nonsense", "belongs to a source"),
        ("subscribe", "t", "belongs to a source"),
        ("kafka.group.id", "g", "belongs to a source"),
        ("kafka.auto.offset.reset", "earliest", "a sink reads nothing"),
        ("kafka.isolation.level", "read_committed", "a sink reads nothing"),
        ("kafka.linger.ms", "5", "sent as they come"),
        ("kafka.retries", "0", "delivery.timeout.ms"),
        ("kafka.max.request.size", "5", "max.message.bytes"),
    ],
)
def test_what_changes_nothing_in_a_sink_is_a_line_in_the_log(name, value, words):
    options = {"kafka.bootstrap.servers": "h:1", "topic": "t", name: value}
    settings = sink_settings(options)
    assert words in lines_of(settings, name) and settings.client == {"bootstrap.servers": ["h:1"]}


def test_properties_of_security_are_of_no_account_in_plaintext():
    plain = {"kafka.security.protocol": "PLAINTEXT", "kafka.sasl.jaas.config": "secret"}
    for settings in (
        source_settings(BASE | plain, streaming=True),
        sink_settings({"kafka.bootstrap.servers": "h:1"} | plain),
    ):
        assert "PLAINTEXT" in lines_of(settings, "kafka.sasl.jaas.config")
        assert not any("secret" in line for line in settings.warnings)


def test_values_that_only_kafka_admits_become_the_nearest_ones():
    settings = source(kafka__max__partition__fetch__bytes=str(1 << 30))
    assert settings.client["fetch.max.read.bytes"] == 64 << 20
    assert str(1 << 30) in settings.warnings[0] and "fetch.max.read.bytes" in settings.warnings[0]
    sink = sink_settings({"kafka.bootstrap.servers": "h:1", "kafka.batch.size": "0"})
    assert sink.client["batch.bytes"] == 1 and len(sink.warnings) == 1
    with pytest.raises(ConfigError, match=r"fetch\.max\.read\.bytes"):
        source(fetch__max__read__bytes=str(1 << 30))  # our own name keeps its range


def test_our_own_name_takes_precedence_over_kafkas():
    for options in (
        {"kafka.batch.size": "5", "batch.bytes": "7"},
        {"batch.bytes": "7", "kafka.batch.size": "5"},
    ):
        sink = sink_settings({"kafka.bootstrap.servers": "h:1"} | options)
        assert sink.client["batch.bytes"] == 7


def test_idempotence_of_the_sink_is_as_asked():
    for value in ("true", "false"):
        sink = sink_settings({
            "kafka.bootstrap.servers": "h:1", "kafka.enable.idempotence": value,
            "exactlyOnce": "false",
        })  # fmt: skip
        assert sink.client["enable.idempotence"] is (value == "true")


def test_exactly_once_is_the_default_and_brings_its_own_settings():
    servers = {"kafka.bootstrap.servers": "h:1"}
    sink = sink_settings(servers)
    assert sink.exactly_once and sink.exactly_once_id is None and sink.warnings == ()
    assert sink.transaction_timeout_ms == 900_000
    weaker = sink_settings(servers | {"kafka.acks": "1", "kafka.enable.idempotence": "false"})
    assert "acks" not in weaker.client and "enable.idempotence" not in weaker.client
    assert ["acks=1" in weaker.warnings[0], "idempotence=false" in weaker.warnings[1]] == [True] * 2
    named = sink_settings(
        servers | {"exactlyOnceId": "orders of EU", "kafka.transaction.timeout.ms": "30000"}
    )
    assert named.exactly_once_id == "orders of EU" and named.transaction_timeout_ms == 30_000
    assert "transaction.timeout.ms" not in named.client
    assert (
        sink_settings(
            servers | {"exactlyOnce": "false", "asyncProgressTrackingEnabled": "true"}
        ).warnings
        == ()
    )


def test_starting_precedence():
    both = {
        "startingTimestamp": "5",
        "startingOffsetsByTimestamp": '{"t":{"0":7}}',
        "startingOffsets": "earliest",
    }
    assert source(**both).starting == AtTimes(everywhere=5, strict=True)
    assert source(**both).starting_option == "startingTimestamp"
    del both["startingTimestamp"]
    assert source(**both).starting == AtTimes(items=((TopicPartition("t", 0), 7),), strict=True)
    assert source(**both, startingOffsetsByTimestampStrategy="LATEST").starting.strict is False
    del both["startingOffsetsByTimestamp"]
    assert source(**both).starting == Earliest()


def test_ending_precedence():
    options = {
        "endingTimestamp": "5",
        "endingOffsetsByTimestamp": '{"t":{"0":7}}',
        "endingOffsets": '{"t":{"0":-1}}',
    }
    assert source(False, **options).ending == AtTimes(everywhere=5)
    del options["endingTimestamp"]
    assert source(False, **options).ending == AtTimes(items=((TopicPartition("t", 0), 7),))
    del options["endingOffsetsByTimestamp"]
    assert source(False, **options).ending == AtOffsets(((TopicPartition("t", 0), -1),))


def test_a_stream_may_start_at_the_latest_offset():
    assert source(startingOffsets='{"t":{"0":-1,"1":-2,"2":5}}').starting == AtOffsets(
        ((TopicPartition("t", 0), -1), (TopicPartition("t", 1), -2), (TopicPartition("t", 2), 5))
    )


def test_subscriptions():
    assert source(drop=("subscribe",), assign='{"b":[1,0],"a":[3]}').subscription == Assign(
        (TopicPartition("a", 3), TopicPartition("b", 0), TopicPartition("b", 1))
    )
    assert source(drop=("subscribe",), subscribePattern=" ev.* ").subscription == SubscribePattern(
        "ev.*"
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"subscribe": "a"}, ("kafka.bootstrap.servers", "missing", "host:port")),
        (
            BASE | {"kafka.bootstrap.servers": "nohost"},
            ("kafka.bootstrap.servers", "'nohost'", "127.0.0.1:9092"),
        ),
        (BASE | {"kafka.bootstrap.servers": "h:99999"}, ("h:99999", "host:port")),
        (BASE | {"kafka.bootstrap.servers": " , "}, ("kafka.bootstrap.servers", "empty")),
        (
            {"kafka.bootstrap.servers": "h:1"},
            ("what to read", "exactly one of assign, subscribe and subscribePattern"),
        ),
        (BASE | {"assign": '{"t":[0]}'}, ("assign, subscribe", "exclude each other")),
        (
            BASE | {"startingOfsets": "earliest"},
            ("unknown option 'startingOfsets'", "did you mean startingOffsets?"),
        ),
        (
            BASE | {"kafka.transprot": "tcp"},
            ("unknown option 'kafka.transprot'", "did you mean kafka.transport?"),
        ),
        (BASE | {"zzzzzz": "1"}, ("unknown option 'zzzzzz'", "docs/options.md")),
        (
            BASE | {"kafka.ssl.truststore.location": "x"},
            ("kafka.ssl.truststore.location", "encrypt"),
        ),
        (
            BASE | {"kafka.auto.offset.reset": "latest"},
            ("kafka.auto.offset.reset", "set startingOffsets"),
        ),
        (BASE | {"auto.offset.reset": "latest"}, ("auto.offset.reset", "set startingOffsets")),
        (
            BASE | {"kafka.key.deserializer": "x"},
            ("kafka.key.deserializer", "keys are always bytes"),
        ),
        (
            BASE | {"kafka.value.deserializer": "x"},
            ("kafka.value.deserializer", "values are always bytes"),
        ),
        (
            BASE | {"kafka.enable.auto.commit": "true"},
            ("kafka.enable.auto.commit", "commits no offsets"),
        ),
        (
            BASE | {"kafka.interceptor.classes": "x"},
            ("kafka.interceptor.classes", "interceptor may break the query"),
        ),
        (
            {"kafka.bootstrap.servers": "h:1", "topic": "x"},
            ("topic belongs to a sink", "subscribe"),
        ),
        (BASE | {"max.poll.records": "1"}, ("'max.poll.records'", "kafka.max.poll.records?")),
        (BASE | {"kafka.max.poll.recrods": "1"}, ("did you mean kafka.max.poll.records?",)),
        (BASE | {"kafka.sasl.mechanism": "PLAIN"}, ("sasl.mechanism", "PLAINTEXT")),
        (
            BASE | {"kafka.security.protocol": "SSL", "kafka.ssl.key.password": "x"},
            ("kafka.security.protocol", "encrypts"),
        ),
        (BASE | {"path": "x"}, ("path", "subscribe")),
        (
            BASE | {"transport": "carrier-pigeon"},
            ("transport", "carrier-pigeon", "auto, verbs, shm, tcp"),
        ),
        (BASE | {"failOnDataLoss": "perhaps"}, ("failOnDataLoss", "'perhaps'", "true or false")),
        (BASE | {"maxOffsetsPerTrigger": "0"}, ("maxOffsetsPerTrigger", "out of range")),
        (BASE | {"minPartitions": "-1"}, ("minPartitions", "out of range")),
        (BASE | {"maxTriggerDelay": "soon"}, ("'soon' is not a time span", "15m")),
        (
            BASE | {"minOffsetsPerTrigger": "9", "maxOffsetsPerTrigger": "8"},
            ("minOffsetsPerTrigger (9)", "maxOffsetsPerTrigger (8)"),
        ),
        (BASE | {"subscribe": "a/b"}, ("subscribe", "'a/b'", "a-z")),
        (BASE | {"subscribe": ","}, ("subscribe names no topic",)),
        (
            {"kafka.bootstrap.servers": "h:1", "subscribePattern": "("},
            ("subscribePattern", "not a regular expression"),
        ),
        (
            {"kafka.bootstrap.servers": "h:1", "subscribePattern": " "},
            ("subscribePattern is empty",),
        ),
        (
            {"kafka.bootstrap.servers": "h:1", "assign": "t"},
            ("assign", "not JSON", '{"topic":[0,1]}'),
        ),
        ({"kafka.bootstrap.servers": "h:1", "assign": '{"t":0}'}, ("assign", "instead of a list")),
        (
            {"kafka.bootstrap.servers": "h:1", "assign": '{"t":["x"]}'},
            ("assign", "'x' is not a partition of topic t"),
        ),
        ({"kafka.bootstrap.servers": "h:1", "assign": "{}"}, ("assign names no partition",)),
        (
            BASE | {"startingOffsets": "first"},
            ("startingOffsets", "'first'", "earliest, latest or JSON"),
        ),
        (BASE | {"startingOffsets": '{"t":{"0":1}'}, ("startingOffsets", "not JSON")),
        (BASE | {"startingOffsets": '{"t":{"0":1,"0":2}}'}, ("startingOffsets", "twice")),
        (
            BASE | {"startingOffsets": '{"t":{"0":-3}}'},
            ("startingOffsets", "t-0 has -3", "at least -2"),
        ),
        (BASE | {"startingOffsets": '{"t":{"0":1.5}}'}, ("startingOffsets", "t-0 has 1.5")),
        (BASE | {"startingOffsets": '{"t":{"0":true}}'}, ("startingOffsets", "t-0 has True")),
        (
            BASE | {"startingOffsets": '{"t":{"0":9223372036854775808}}'},
            ("t-0 has 9223372036854775808",),
        ),
        (
            BASE | {"startingOffsets": '{"t":{"-1":1}}'},
            ("startingOffsets", "'-1' is not a partition"),
        ),
        (BASE | {"startingOffsets": '{"t":[1]}'}, ("startingOffsets", "instead of partitions")),
        (
            BASE | {"startingOffsetsByTimestamp": '{"t":{"0":-1}}'},
            ("startingOffsetsByTimestamp", "at least 0"),
        ),
        (
            BASE | {"startingOffsetsByTimestampStrategy": "guess"},
            ("startingOffsetsByTimestampStrategy", "error, latest"),
        ),
        (
            BASE | {"startingTimestamp": "yesterday"},
            ("startingTimestamp", "'yesterday' is neither a time in ms since 1970 nor a time span"),
        ),
        (BASE | {"endingOffsets": "latest"}, ("endingOffsets is for batch queries", "spark.read")),
        (BASE | {"endingTimestamp": "1"}, ("endingTimestamp is for batch queries",)),
    ],
)
def test_one_clear_error_names_option_and_remedy(options, words):
    with pytest.raises(ConfigError) as e:
        source_settings(options, streaming=True)
    for word in words:
        assert word in str(e.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"startingOffsets": "latest"},
            ("startingOffsets", "cannot start at the latest", "earliest"),
        ),
        ({"startingOffsets": '{"t":{"0":-1}}'}, ("startingOffsets", "cannot start at the latest")),
        ({"endingOffsets": "earliest"}, ("endingOffsets", "cannot end at the earliest")),
        ({"endingOffsets": '{"t":{"0":-2}}'}, ("endingOffsets", "cannot end at the earliest")),
        (
            {"maxOffsetsPerTrigger": "many"},
            ("maxOffsetsPerTrigger", "'many' is not an integer"),
        ),
    ],
)
def test_errors_of_batch_queries(options, words):
    with pytest.raises(ConfigError) as e:
        source_settings(BASE | options, streaming=False)
    for word in words:
        assert word in str(e.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"topic": "a b"}, ("option topic", "'a b'")),
        ({"kafka.transactional.id": "x"}, ("kafka.transactional.id", "exactlyOnceId")),
        (
            {"kafka.enable.idempotence": "true", "kafka.acks": "1"},
            ("kafka.enable.idempotence", "kafka.acks=1", "kafka.acks=all"),
        ),
        ({"exactlyOnceId": " x"}, ("exactlyOnceId", "' x'")),
        ({"exactlyOnceId": "x", "exactlyOnce": "false"}, ("exactlyOnceId", "remove one")),
        (
            {"asyncProgressTrackingEnabled": "true"},
            ("asyncProgressTrackingEnabled excludes exactlyOnce", "set exactlyOnce=false"),
        ),
        ({"kafka.partitioner.class": "x.Mine"}, ("kafka.partitioner.class", "column partition")),
        ({"kafka.partitioner.ignore.keys": "true"}, ("partitioner=random",)),
        ({"kafka.value.serializer": "x"}, ("kafka.value.serializer", "strings or bytes")),
        ({"kafka.acks": "2"}, ("acks", "'2'", "0, 1, all")),
        ({"topci": "x"}, ("unknown option 'topci'", "did you mean topic?")),
    ],
)
def test_errors_of_sinks(options, words):
    with pytest.raises(ConfigError) as e:
        sink_settings({"kafka.bootstrap.servers": "h:1"} | options)
    for word in words:
        assert word in str(e.value)


def test_a_sink_takes_what_spark_hands_it():
    settings = sink_settings(
        {
            "kafka.bootstrap.servers": "h:1",
            "topic": " t ",
            "checkpointlocation": "/x",
        }
    )
    assert settings.topic == "t" and settings.warnings == ()


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("15m", 900000),
        ("500ms", 500),
        ("30s", 30000),
        ("2h", 7200000),
        ("1d", 86400000),
        ("42", 42),
        ("3min", 180000),
    ],
)
def test_time_spans(text, ms):
    assert source(maxTriggerDelay=text).max_delay_ms == ms


def test_tasks_are_told_the_rack():
    settings = source(kafka__client__rack="b")
    assert settings.task_client["client.rack"] == settings.client["client.rack"] == "b"
    assert settings.warnings == ()


def test_how_cold_records_are_read_is_the_clients_business():
    settings = source(False, coldReads="direct", preferCold="true", coldBufferBytes="64m")
    assert settings.client["cold.reads"] == "direct"
    assert settings.client["prefer.cold"] is True
    assert settings.client["cold.buffer.bytes"] == 64 << 20
    assert not {"cold.reads", "prefer.cold", "cold.buffer.bytes"} & set(source(False).client)
    with pytest.raises(ConfigError, match="coldBufferBytes"):
        source(False, coldBufferBytes="1k")
