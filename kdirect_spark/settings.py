"""What the options of a query mean: one frozen object for a source, one for a sink.

Law: pure; no I/O.  Names, kinds, defaults and help are rows of `kdirect.options.SPARK` and
`CLIENT`.  This module owns what a row cannot say: which options exclude each other, which belong to
a batch or a stream, and which takes precedence; `values` owns what the options of values mean.  A
known option without effect here is an error with its reason.  If it only tunes a Kafka client, it
is a line in the log instead.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kdirect.errors import ConfigError
from kdirect.model import check_topic_name
from kdirect.options import CLIENT, SPARK
from kdirect_spark.offsets import (
    Assign,
    AtOffsets,
    AtTimes,
    Earliest,
    Latest,
    Limit,
    Subscribe,
    SubscribePattern,
    Subscription,
    from_json,
    partitions_from_json,
)

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from kdirect_spark.values import ValueSettings

FORMAT = "kdirect"

# Kafka client properties that Spark's Kafka connector refuses, with its reasons.
_START = (
    "set startingOffsets to earliest or latest: a streaming query keeps its own offsets, so that "
    "nothing is missed when topics or partitions are added; startingOffsets applies to a new query "
    "only, and a restarted one continues where it stopped"
)
REFUSED_SOURCE = {
    "auto.offset.reset": _START,
    "key.deserializer": "keys are always bytes; decode them with DataFrame operations",
    "value.deserializer": "values are always bytes; decode them with DataFrame operations, or set "
    "valueFormat",
    "enable.auto.commit": "the source commits no offsets by itself; set kafka.group.id to commit "
    "what each micro-batch has read",
    "interceptor.classes": "keys and values are always bytes, and an interceptor may break the "
    "query",
}
REFUSED_SINK = {
    "key.serializer": "keys are strings or bytes; encode them with DataFrame operations",
    "value.serializer": "values are strings or bytes; encode them with DataFrame operations",
    "interceptor.classes": "an interceptor may break the query",
    "transactional.id": "the sink is at-least-once and writes without transactions",
    "enable.idempotence": "the sink is at-least-once; remove the option or set it to false",
}

# Kafka client properties that have another name here.
_RENAMED = {
    "batch.size": "batch.bytes",
    "buffer.memory": "send.buffer.bytes",
    "max.in.flight.requests.per.connection": "max.in.flight",
    "max.partition.fetch.bytes": "fetch.max.read.bytes",
}

# These properties tune parts of a Kafka client that kdirect's client does not have.  A job keeps
# running with them, and the log says that they have no effect.
_TUNING = """
    check.crcs client.dns.lookup connections.max.idle.ms default.api.timeout.ms
    exclude.internal.topics fetch.max.bytes fetch.max.wait.ms fetch.min.bytes heartbeat.interval.ms
    linger.ms max.block.ms max.poll.interval.ms max.poll.records max.request.size
    partition.assignment.strategy receive.buffer.bytes retries retry.backoff.ms send.buffer.bytes
    session.timeout.ms socket.connection.setup.timeout.ms
"""
WITHOUT_EFFECT = frozenset(_TUNING.split())

_SUBSCRIPTIONS = ("assign", "subscribe", "subscribePattern")
_ENDING = ("endingTimestamp", "endingOffsetsByTimestamp", "endingOffsets")
COLUMNS = ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType")
HEADERS = "headers"
_OF_VALUES = ("valueSchema", "valueSize", "valueMode")  # without effect where values stay bytes
_STREAM_ONLY = (
    "maxOffsetsPerTrigger",
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
    "partitionDiscoveryIntervalMs",
    "kafka.group.id",
)
_SINK_ONLY = ("topic",)
REMOTE = "kdirect.remote."
# Properties of object stores that are shown nowhere.
_SECRETS = frozenset(("access_key", "secret_key", "session_token", "account_key", "sas_token"))
_SINK = ("kafka.bootstrap.servers", "topic", "checkpointLocation", "queryName", "includeHeaders")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSettings:
    """A source's checked options.  `client` holds the settings for `kdirect.connect`, and
    `task_client` those for Spark's tasks."""

    client: dict[str, Any]
    task_client: dict[str, Any]
    subscription: Subscription
    starting: Limit
    starting_option: str
    ending: Limit = field(default_factory=Latest)
    ending_option: str = "endingOffsets"
    fail_on_data_loss: bool = True
    include_headers: bool = False
    columns: tuple[str, ...] | None = None  # None: all
    values: ValueSettings | None = None  # None: values stay bytes, and rows are Kafka's
    retries: int = 3
    retry_interval_ms: int = 10
    max_offsets: int | None = None
    min_offsets: int | None = None
    max_delay_ms: int = 900_000
    min_partitions: int | None = None
    max_records: int | None = None
    group_id: str | None = None
    prefetch_bytes: int = 16 << 20
    batch_bytes: int = 1 << 20
    discovery_interval_ms: int = 1000
    statistics_dir: str | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkSettings:
    """A sink's checked options.  If `topic` is None, a column names it."""

    client: dict[str, Any]
    topic: str | None = None
    warnings: tuple[str, ...] = ()


def source_settings(
    options: Mapping[str, str], *, streaming: bool | None, schema: StructType | None = None
) -> SourceSettings:
    """Check the options of a source.  `streaming` is None while it is not known whether the query
    is a batch or a stream; then only what both refuse is refused.  `schema` is that of the query,
    where it is known: values of a valueFormat without valueSchema have it.  Raises ConfigError."""
    own, client, warnings = _sort(options, REFUSED_SOURCE, "source")
    given = {SPARK.find(name).name for name in own}
    _check_belongs(given, streaming)
    values = SPARK.resolve({"kafka.bootstrap.servers": "-"} | own)
    subscription = _subscription(values, given)
    starting, starting_option = _starting(values, streaming)
    ending, ending_option = _ending(values)
    _check_trigger(values)
    decoded = _values(values, given, schema)
    client |= _cold(values, given)
    task_client = dict(client)
    task_client.setdefault("request.timeout.ms", values["kafkaConsumer.pollTimeoutMs"])
    return SourceSettings(
        client=client,
        task_client=task_client,
        subscription=subscription,
        starting=starting,
        starting_option=starting_option,
        ending=ending,
        ending_option=ending_option,
        fail_on_data_loss=values["failOnDataLoss"],
        include_headers=values["includeHeaders"],
        columns=_columns(values["columns"], values["includeHeaders"], decoded),
        values=decoded,
        retries=values["fetchOffset.numRetries"],
        retry_interval_ms=values["fetchOffset.retryIntervalMs"],
        max_offsets=values["maxOffsetsPerTrigger"],
        min_offsets=values["minOffsetsPerTrigger"],
        max_delay_ms=values["maxTriggerDelay"],
        min_partitions=values["minPartitions"],
        max_records=values["maxRecordsPerPartition"],
        group_id=values["kafka.group.id"],
        prefetch_bytes=values["prefetchBytes"],
        batch_bytes=values["arrowBatchBytes"],
        discovery_interval_ms=values["partitionDiscoveryIntervalMs"],
        statistics_dir=values["taskStatisticsDir"],
        warnings=warnings,
    )


def sink_settings(options: Mapping[str, str]) -> SinkSettings:
    """Check the options of a sink.  Raises ConfigError."""
    own, client, warnings = _sort(options, REFUSED_SINK, "sink")
    for name in own:
        row = SPARK.find(name)
        if row.name not in _SINK:
            raise ConfigError(
                f"option {row.name} belongs to a source",
                hint="a sink takes kafka.bootstrap.servers, topic and client settings",
            )
    values = SPARK.resolve({"kafka.bootstrap.servers": "-"} | own)
    topic = values["topic"]
    if topic is not None:
        try:
            check_topic_name(topic.strip())
        except ConfigError as e:
            raise ConfigError(f"option topic: {e.message}", hint=e.hint) from None
        topic = topic.strip()
    return SinkSettings(client=client, topic=topic, warnings=warnings)


# -- sorting names ---------------------------------------------------------------------------------


def _sort(
    options: Mapping[str, str], refused: Mapping[str, str], room: str
) -> tuple[dict[str, str], dict[str, Any], tuple[str, ...]]:
    """The given options of the table SPARK, parsed client settings, and warnings for the log."""
    own: dict[str, str] = {}
    client: dict[str, Any] = {}
    warnings = []
    for name, value in options.items():
        lower = name.lower()
        if lower in _own_names() or lower.startswith(REMOTE):
            row = SPARK.find(lower)
            if row.name == "path":
                raise ConfigError(
                    "option path (or an argument of load, save or start) is not available",
                    hint="name topics with an option: subscribe for a source, topic for a sink",
                )
            if row.name == "kafka.bootstrap.servers":
                client["bootstrap.servers"] = _servers(value)
            else:
                own[lower if row.is_prefix else row.name] = value
            continue
        bare = lower.removeprefix("kafka.")
        if bare in refused:
            if bare == "enable.idempotence" and str(value).strip().lower() == "false":
                continue
            raise ConfigError(
                f"option {name} is not available for kdirect's {room}", hint=refused[bare]
            )
        if bare in _client_names() and not (bare in WITHOUT_EFFECT and lower != bare):
            row = CLIENT.find(bare)
            client[row.name] = row.parse(value)
        elif bare in _RENAMED:
            row = CLIENT.find(_RENAMED[bare])
            client.setdefault(row.name, row.parse(value))
        elif lower != bare and bare in WITHOUT_EFFECT:
            warnings.append(f"option {name} tunes a Kafka client and has no effect here")
        else:
            raise _unknown(name)
    if "bootstrap.servers" not in client:
        raise ConfigError(
            "option kafka.bootstrap.servers is missing", hint="give host:port of the broker"
        )
    return own, client, tuple(warnings)


def _servers(value: str) -> list[str]:
    servers = CLIENT.find("bootstrap.servers").parse(value)
    if not servers:
        raise ConfigError(
            "option kafka.bootstrap.servers is empty", hint="give host:port of the broker"
        )
    for server in servers:
        host, _, port = server.rpartition(":")
        if not host or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65536:
            raise ConfigError(
                f"option kafka.bootstrap.servers: {server!r} is not host:port",
                hint="write for example 127.0.0.1:9092",
            )
    return servers


def _own_names() -> dict[str, str]:
    return {name.lower(): name for row in SPARK.rows for name in (row.name, *row.aliases)}


def _client_names() -> dict[str, str]:
    return {name.lower(): name for row in CLIENT.rows for name in (row.name, *row.aliases)}


def _unknown(name: str) -> ConfigError:
    known = _own_names() | _client_names()
    if name.lower().startswith("kafka."):
        known |= {f"kafka.{n}": f"kafka.{n}" for n in _client_names()}
        if name.lower().startswith(("kafka.ssl.", "kafka.sasl.", "kafka.security.")):
            return ConfigError(
                f"option {name} is not available: kdirect's client neither encrypts nor "
                "authenticates",
                hint="remove it, or read this broker with Spark's Kafka connector",
            )
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.6)
    return ConfigError(
        f"unknown option {name!r}",
        hint=f"did you mean {known[near[0]]}?" if near else "docs/options.md lists them all",
    )


# -- their meaning ---------------------------------------------------------------------------------


def _check_belongs(given: set[str], streaming: bool | None) -> None:
    """Raise ConfigError for an option that a source does not have, or not in such a query."""
    for name in _SINK_ONLY:
        if name in given:
            raise ConfigError(
                f"option {name} belongs to a sink",
                hint="a source names its topics with subscribe, subscribePattern or assign",
            )
    if "groupIdPrefix" in given:
        raise ConfigError(
            "option groupIdPrefix is not available: kdirect's source joins no consumer group",
            hint="remove it, or set kafka.group.id to commit what each micro-batch has read",
        )
    if streaming is True:
        for name in _ENDING:
            if name in given:
                raise ConfigError(
                    f"option {name} is for batch queries",
                    hint="a streaming query has no end; remove it, or read with spark.read",
                )
    if streaming is False:
        for name in _STREAM_ONLY:
            if name in given:
                raise ConfigError(
                    f"option {name} is for streaming queries",
                    hint="remove it, or read with spark.readStream",
                )


def _check_trigger(values: dict[str, Any]) -> None:
    if (
        values["minOffsetsPerTrigger"] is not None
        and values["maxOffsetsPerTrigger"] is not None
        and values["minOffsetsPerTrigger"] > values["maxOffsetsPerTrigger"]
    ):
        raise ConfigError(
            f"option minOffsetsPerTrigger ({values['minOffsetsPerTrigger']}) is larger than "
            f"maxOffsetsPerTrigger ({values['maxOffsetsPerTrigger']})",
            hint="choose a number of at most maxOffsetsPerTrigger",
        )


def _subscription(values: dict[str, Any], given: set[str]) -> Subscription:
    chosen = [name for name in _SUBSCRIPTIONS if name in given]
    if len(chosen) != 1:
        problem = (
            f"options {', '.join(chosen)} exclude each other"
            if chosen
            else "no option says what to read"
        )
        raise ConfigError(
            problem, hint="give exactly one of assign, subscribe and subscribePattern"
        )
    if chosen[0] == "assign":
        return Assign(partitions_from_json(values["assign"], "assign"))
    if chosen[0] == "subscribe":
        topics = values["subscribe"]
        if not topics:
            raise ConfigError(
                "option subscribe names no topic", hint="give names separated by commas"
            )
        for topic in topics:
            try:
                check_topic_name(topic)
            except ConfigError as e:
                raise ConfigError(f"option subscribe: {e.message}", hint=e.hint) from None
        return Subscribe(tuple(sorted(set(topics))))
    pattern = values["subscribePattern"].strip()
    if not pattern:
        raise ConfigError(
            "option subscribePattern is empty",
            hint="give a regular expression for whole topic names, such as events-.*",
        )
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as e:
        raise ConfigError(
            f"option subscribePattern: {pattern!r} is not a regular expression ({e})",
            hint="give one for whole topic names, such as events-.*",
        ) from None
    return SubscribePattern(pattern)


# Options, and the client's settings that they are.
_COLD = {
    "coldReads": "cold.reads",
    "preferCold": "prefer.cold",
    "coldBufferBytes": "cold.buffer.bytes",
}


def _cold(values: Mapping[str, Any], given: set[str]) -> dict[str, Any]:
    """The client settings by which records of remote storage are read."""
    out: dict[str, Any] = {}
    for name, setting in _COLD.items():
        if name in given:
            out[setting] = values[name]
    for name, value in values.items():
        if not name.startswith(REMOTE) or value is None:
            continue
        rest = name.removeprefix(REMOTE)
        if rest in _SECRETS:
            raise ConfigError(
                f"option {name} would be shown in Spark's plans",
                hint=f"write {REMOTE}secret.{rest}, which Spark hides, or give it to the executors'"
                " environment",
            )
        rest = rest.removeprefix("secret.")
        setting = "remote.storage.uri" if rest == "uri" else f"remote.config.{rest}"
        out[setting] = CLIENT.find(setting).parse(value)
    return out


def _values(
    values: dict[str, Any], given: set[str], schema: StructType | None
) -> ValueSettings | None:
    """How values are decoded; None if they stay bytes."""
    if values["valueFormat"] is None:
        for name in _OF_VALUES:
            if name in given:
                raise ConfigError(
                    f"option {name} has no effect without valueFormat",
                    hint="set valueFormat to fixed, json or arrow, or remove the option",
                )
        return None
    if values["includeHeaders"]:
        raise ConfigError(
            "options includeHeaders and valueFormat exclude each other",
            hint="remove one: with valueFormat a row has the columns of the value only",
        )
    # Imported at first use: the engine's words take a while to import, and most queries take bytes.
    from kdirect_spark.values import value_settings

    return value_settings(
        values["valueFormat"],
        schema_text=values["valueSchema"],
        size=values["valueSize"],
        mode=values["valueMode"],
        spark_schema=schema,
    )


def _columns(
    names: list[str] | None, include_headers: bool, values: ValueSettings | None
) -> tuple[str, ...] | None:
    """The named columns of a row, in the row's order; None means all of them."""
    if names is None:
        return None
    row: Sequence[str] = (*COLUMNS, HEADERS) if values is None else values.names
    there = {name.lower(): name for name in row}
    wanted = set()
    for name in names:
        if name.lower() not in there:
            raise ConfigError(
                f"option columns: there is no column {name!r}",
                hint=f"choose from {', '.join(there.values())}",
            )
        wanted.add(there[name.lower()])
    if not wanted:
        raise ConfigError(
            "option columns names no column",
            hint="give names separated by commas, or remove the option to read all columns",
        )
    if values is None and HEADERS in wanted and not include_headers:
        raise ConfigError(
            "option columns: headers are read only with includeHeaders",
            hint="set includeHeaders to true",
        )
    return tuple(name for name in there.values() if name in wanted)


def _starting(values: dict[str, Any], streaming: bool | None) -> tuple[Limit, str]:
    strict = values["startingOffsetsByTimestampStrategy"] == "error"
    if values["startingTimestamp"] is not None:
        return AtTimes(everywhere=values["startingTimestamp"], strict=strict), "startingTimestamp"
    if values["startingOffsetsByTimestamp"] is not None:
        times = from_json(values["startingOffsetsByTimestamp"], "startingOffsetsByTimestamp")
        return AtTimes(
            items=tuple(sorted(times.items())), strict=strict
        ), "startingOffsetsByTimestamp"
    limit = _limit(values["startingOffsets"], "startingOffsets")
    if limit is None:
        return (Earliest() if streaming is False else Latest()), "startingOffsets"
    if streaming is False:
        latest = isinstance(limit, Latest) or (
            isinstance(limit, AtOffsets) and any(n == -1 for _, n in limit.items)
        )
        if latest:
            raise ConfigError(
                "option startingOffsets: a batch query cannot start at the latest offset",
                hint="use earliest, -2 or an offset",
            )
    return limit, "startingOffsets"


def _ending(values: dict[str, Any]) -> tuple[Limit, str]:
    if values["endingTimestamp"] is not None:
        return AtTimes(everywhere=values["endingTimestamp"]), "endingTimestamp"
    if values["endingOffsetsByTimestamp"] is not None:
        times = from_json(values["endingOffsetsByTimestamp"], "endingOffsetsByTimestamp")
        return AtTimes(items=tuple(sorted(times.items()))), "endingOffsetsByTimestamp"
    limit = _limit(values["endingOffsets"], "endingOffsets") or Latest()
    if isinstance(limit, Earliest) or (
        isinstance(limit, AtOffsets) and any(n == -2 for _, n in limit.items)
    ):
        raise ConfigError(
            "option endingOffsets: a query cannot end at the earliest offset",
            hint="use latest, -1 or an offset",
        )
    return limit, "endingOffsets"


def _limit(text: str | None, option: str) -> Limit | None:
    if text is None:
        return None
    word = text.strip().lower()
    if word == "earliest":
        return Earliest()
    if word == "latest":
        return Latest()
    if not word.startswith("{"):
        raise ConfigError(
            f"option {option}: {text!r} is not allowed",
            hint='use earliest, latest or JSON such as {"topic":{"0":123}}',
        )
    return AtOffsets(tuple(sorted(from_json(text, option, low=-2).items())))
