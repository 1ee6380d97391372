"""What the options of a query mean: one frozen object for a source, one for a sink.

Law: pure; no I/O but for the schemas of values that options name.  Names, kinds, defaults and help
are rows of `kdirect.options.SPARK` and `CLIENT`.  This module owns what a row cannot say: which
options exclude each other, which belong to a batch or a stream, and which takes precedence;
`option_names` owns which name is what, and `value_options` what the options of values mean.  An
option that changes nothing here, because it belongs to the other kind of query or to the sink, is a
line in the log; so jobs may hand one dict of options to source and sink.  An option that asks for
what cannot be is an error with its reason.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kdirect.errors import ConfigError
from kdirect.model import check_topic_name
from kdirect.options import CLIENT, SPARK
from kdirect_spark.limits import Limit, has, offset_limit, time_limit
from kdirect_spark.offsets import (
    Assign,
    AtTimes,
    Earliest,
    Latest,
    Subscribe,
    SubscribePattern,
    Subscription,
    from_json,
    partitions_from_json,
)
from kdirect_spark.option_names import REMOTE, sorted_options

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from kdirect_spark.values import ValueSettings

FORMAT = "kdirect"

_SUBSCRIPTIONS = ("assign", "subscribe", "subscribePattern")
_ENDING = ("endingTimestamp", "endingOffsetsByTimestamp", "endingOffsets")
COLUMNS = ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType")
HEADERS = "headers"
# Without effect where values stay bytes.
_OF_VALUES = (
    "valueSchema",
    "valueSize",
    "valueMode",
    "valueFraming",
    "columnNameOfCorruptRecord",
    "metadataColumns",
    "avroSchema",
    "avroWriterSchema",
    "descriptorFile",
    "messageName",
    "schema.registry.url",
    "schema.registry.subject",
    "schema.registry.timeout.ms",
    "schema.registry.ssl.ca.location",
    "schema.registry.secret.basic.auth.user.info",
    "schema.registry.secret.bearer.auth.token",
)
_STREAM_ONLY = (
    "maxOffsetsPerTrigger",
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
    "partitionDiscoveryIntervalMs",
    "kafka.group.id",
)
SINK_ONLY = ("topic", "exactlyOnce", "exactlyOnceId")
# Properties of object stores that are shown nowhere.
_SECRETS = frozenset(("access_key", "secret_key", "session_token", "account_key", "sas_token"))
SINK = (
    "kafka.bootstrap.servers",
    "topic",
    "exactlyOnce",
    "exactlyOnceId",
    "checkpointLocation",
    "queryName",
    "includeHeaders",
    "asyncProgressTrackingEnabled",
    "asyncProgressTrackingCheckpointIntervalMs",
    "_asyncProgressTrackingOverrideSinkSupportCheck",
)
# How long a task's transaction may wait for the commit of its batch.  Kafka's brokers allow no more
# unless they are told to; tasks of one batch may end a long time after another.
TRANSACTION_TIMEOUT_MS = 900_000
_IDENTITY = re.compile(r"[\w.:/@-][\w .:/@-]{0,199}")


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
    patience_ms: int = 120_000  # how long a task waits for a broker that is away
    planner_patience_ms: int = 30_000  # how long the planner does
    max_offsets: int | None = None
    min_offsets: int | None = None
    max_delay_ms: int = 900_000
    min_partitions: int | None = None
    max_records: int | None = None
    coalesce_partitions: int | None = None
    group_id: str | None = None
    prefetch_bytes: int = 16 << 20
    batch_bytes: int = 1 << 20
    discovery_interval_ms: int = 1000
    statistics_dir: str | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkSettings:
    """A sink's checked options.  If `topic` is None, a column names it.  If `exactly_once_id` is
    None, a query's identity is that of its checkpoint."""

    client: dict[str, Any]
    topic: str | None = None
    exactly_once: bool = True
    exactly_once_id: str | None = None
    transaction_timeout_ms: int = TRANSACTION_TIMEOUT_MS
    query_name: str | None = None
    checkpoint: str | None = None
    real_time: bool = False  # rows are sent as they come
    warnings: tuple[str, ...] = ()


def source_settings(
    options: Mapping[str, str], *, streaming: bool | None, schema: StructType | None = None
) -> SourceSettings:
    """Check the options of a source.  `streaming` is None while it is not known whether the query
    is a batch or a stream; then only what both refuse is refused.  `schema` is that of the query,
    where it is known: values of a valueFormat without valueSchema have it.  Raises ConfigError."""
    own, client, warnings = sorted_options(options, "source")
    given = {SPARK.find(name).name for name in own}
    warnings += _check_belongs(given, streaming)
    values = SPARK.resolve({"kafka.bootstrap.servers": "-"} | own)
    subscription = _subscription(values, given)
    starting, starting_option = _starting(values, given, streaming)
    ending, ending_option = _ending(values)
    if streaming is not False:
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
        patience_ms=task_client["request.timeout.ms"],
        planner_patience_ms=CLIENT.resolve(client)["request.timeout.ms"],
        max_offsets=values["maxOffsetsPerTrigger"],
        min_offsets=values["minOffsetsPerTrigger"],
        max_delay_ms=values["maxTriggerDelay"],
        min_partitions=values["minPartitions"],
        max_records=values["maxRecordsPerPartition"],
        coalesce_partitions=_coalesce(values, given),
        group_id=values["kafka.group.id"],
        prefetch_bytes=values["prefetchBytes"],
        batch_bytes=values["arrowBatchBytes"],
        discovery_interval_ms=values["partitionDiscoveryIntervalMs"],
        statistics_dir=values["taskStatisticsDir"],
        warnings=warnings,
    )


def sink_settings(options: Mapping[str, str], *, real_time: bool = False) -> SinkSettings:
    """Check the options of a sink; `real_time`: of a query in Real-Time Mode.  Raises
    ConfigError."""
    own, client, warnings = sorted_options(options, "sink")
    of_source = {name for name in own if SPARK.find(name).name not in SINK}
    warnings += tuple(
        f"option {SPARK.find(name).name} belongs to a source and changes nothing in a sink"
        for name in own
        if name in of_source
    )
    own = {name: value for name, value in own.items() if name not in of_source}
    values = SPARK.resolve({"kafka.bootstrap.servers": "-"} | own)
    if client.get("enable.idempotence") and client.get("acks") in ("0", "1"):
        raise ConfigError(
            f"options kafka.enable.idempotence and kafka.acks={client['acks']} exclude each other",
            hint="set kafka.acks=all, or remove kafka.enable.idempotence",
        )
    topic = values["topic"]
    if topic is not None:
        try:
            check_topic_name(topic.strip())
        except ConfigError as e:
            raise ConfigError(f"option topic: {e.message}", hint=e.hint) from None
        topic = topic.strip()
    if real_time and values["exactlyOnce"]:
        raise ConfigError(
            "trigger(realTime=...) excludes exactlyOnce: Spark writes down which records belong to "
            "a real-time batch only after the batch is committed, so after a failure another batch "
            "has its number, and would be taken for one that is committed already",
            hint="set exactlyOnce=false (at-least-once, and visible as it is written), or use "
            "another trigger",
        )
    once, lines = _exactly_once(values, client)
    return SinkSettings(
        client=client,
        topic=topic,
        query_name=values["queryName"],
        checkpoint=values["checkpointLocation"],
        real_time=real_time,
        warnings=warnings + lines,
        **once,
    )


def _exactly_once(
    values: dict[str, Any], client: dict[str, Any]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What of a SinkSettings says how often rows are written, and lines for the log.  Takes out of
    `client` what the sink decides itself.  Raises ConfigError."""
    once, name = values["exactlyOnce"], values["exactlyOnceId"]
    if name is not None and _IDENTITY.fullmatch(name) is None:
        raise ConfigError(
            f"option exactlyOnceId: {name!r} is not an identity",
            hint="write up to 200 letters, digits, and ._:/@-",
        )
    if name is not None and not once:
        raise ConfigError(
            "option exactlyOnceId names who writes exactly once, but exactlyOnce is false",
            hint="remove one of the two",
        )
    if once and values["asyncProgressTrackingEnabled"]:
        raise ConfigError(
            "asyncProgressTrackingEnabled excludes exactlyOnce: Spark commits a micro-batch before "
            "it has written down which records belong to it, so after a failure another micro-batch"
            " has its number, and would be taken for one that is committed already",
            hint="set exactlyOnce=false (at-least-once), or remove asyncProgressTrackingEnabled",
        )
    lines = []
    if once:
        for option, wanted in (("acks", ("all", "-1")), ("enable.idempotence", (True,))):
            if option in client and (given := client.pop(option)) not in wanted:
                lines.append(
                    f"option {option}={str(given).lower()} changes nothing: exactly-once needs "
                    "acks=all and idempotence (exactlyOnce=false does not)"
                )
    elif "transaction.timeout.ms" in client:
        lines.append(
            "option transaction.timeout.ms changes nothing: with exactlyOnce=false there are no "
            "transactions"
        )
    timeout_ms = client.pop("transaction.timeout.ms", TRANSACTION_TIMEOUT_MS)
    return {
        "exactly_once": once,
        "exactly_once_id": name,
        "transaction_timeout_ms": timeout_ms,
    }, tuple(lines)


# -- their meaning ---------------------------------------------------------------------------------


def _check_belongs(given: set[str], streaming: bool | None) -> tuple[str, ...]:
    """Lines for the log about options that change nothing in such a query.  Raises ConfigError for
    those that ask for what such a query cannot do."""
    lines = [
        f"option {name} belongs to a sink and changes nothing in a source"
        for name in SINK_ONLY
        if name in given
    ]
    if lines and not given.intersection(_SUBSCRIPTIONS):
        raise ConfigError(
            f"option {', '.join(n for n in SINK_ONLY if n in given)} belongs to a sink",
            hint="a source names its topics with subscribe, subscribePattern or assign",
        )
    if "groupIdPrefix" in given:
        lines.append(
            "option groupIdPrefix changes nothing: the source joins no consumer group (set "
            "kafka.group.id to commit what each micro-batch has read)"
        )
    if streaming is True:
        for name in _ENDING:
            if name in given:
                raise ConfigError(
                    f"option {name} is for batch queries",
                    hint="a streaming query has no end; remove it, or read with spark.read",
                )
    if streaming is False:
        lines += [
            f"option {name} is for streaming queries and changes nothing in a batch"
            for name in _STREAM_ONLY
            if name in given
        ]
    return tuple(lines)


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


def _coalesce(values: dict[str, Any], given: set[str]) -> int | None:
    for name in ("minPartitions", "maxRecordsPerPartition"):
        if values["coalescePartitions"] is not None and name in given:
            raise ConfigError(
                f"options coalescePartitions and {name} exclude each other",
                hint="remove one: the first joins ranges of offsets, the other splits them",
            )
    coalesce: int | None = values["coalescePartitions"]
    return coalesce


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
                    hint="set valueFormat to fixed, json, arrow, avro or protobuf, or remove it",
                )
        return None
    if values["includeHeaders"]:
        raise ConfigError(
            "options includeHeaders and valueFormat exclude each other",
            hint="remove includeHeaders: metadataColumns=headers adds them to the value's columns",
        )
    # Imported at first use: the engine's words take a while to import, and most queries take bytes.
    from kdirect_spark.value_options import value_settings

    topics: list[str] = values["subscribe"] or []
    topic = topics[0] if len(topics) == 1 else None
    return value_settings(values, topic=topic, spark_schema=schema)


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


def _starting(values: dict[str, Any], given: set[str], streaming: bool | None) -> tuple[Limit, str]:
    by_name = values["startingOffsetsByTimestampStrategy"] == "error"
    strict = by_name if "startingOffsetsByTimestampStrategy" in given else None
    if values["startingTimestamp"] is not None:
        text = values["startingTimestamp"]
        return time_limit(text, "startingTimestamp", strict=strict), "startingTimestamp"
    if values["startingOffsetsByTimestamp"] is not None:
        times = from_json(values["startingOffsetsByTimestamp"], "startingOffsetsByTimestamp")
        return AtTimes(
            items=tuple(sorted(times.items())), strict=by_name
        ), "startingOffsetsByTimestamp"
    limit = offset_limit(values["startingOffsets"], "startingOffsets")
    if limit is None:
        return (Earliest() if streaming is False else Latest()), "startingOffsets"
    if streaming is False and has(limit, Latest):
        raise ConfigError(
            "option startingOffsets: a batch query cannot start at the latest offset",
            hint="use earliest, -2 or an offset",
        )
    return limit, "startingOffsets"


def _ending(values: dict[str, Any]) -> tuple[Limit, str]:
    if values["endingTimestamp"] is not None:
        text = values["endingTimestamp"]
        return time_limit(text, "endingTimestamp", strict=False), "endingTimestamp"
    if values["endingOffsetsByTimestamp"] is not None:
        times = from_json(values["endingOffsetsByTimestamp"], "endingOffsetsByTimestamp")
        return AtTimes(items=tuple(sorted(times.items()))), "endingOffsetsByTimestamp"
    limit = offset_limit(values["endingOffsets"], "endingOffsets") or Latest()
    if has(limit, Earliest):
        raise ConfigError(
            "option endingOffsets: a query cannot end at the earliest offset",
            hint="use latest, -1 or an offset",
        )
    return limit, "endingOffsets"
