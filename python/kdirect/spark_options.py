"""The rows of the data source and the sink in the table of Spark options (`options.py`).

Law: as in `options.py`, of which this is a part.
"""

from __future__ import annotations

from kdirect.option_table import Option, duration_ms
from kdirect.remote_options import REMOTE_SPARK_ROWS

# fmt: off
# Names, defaults and precedence are those of Spark's Kafka connector; options that the connector
# does not have come last.  None means that the option is not given.
SPARK_ROWS: tuple[Option, ...] = (
    Option("kafka.bootstrap.servers", "list", None,
           "host:port of the broker; of a list, the first that answers is used.", required=True,
           aliases=("bootstrap.servers",)),
    Option("assign", "str", None,
           'Source: the partitions to read, as JSON `{"topic":[0,1]}`. Exactly one of assign, '
           "subscribe and subscribePattern."),
    Option("subscribe", "list", None, "Source: the topics to read, separated by commas."),
    Option("subscribePattern", "str", None,
           "Source: a regular expression. Topics whose whole name matches are read, including "
           "those created later."),
    Option("startingTimestamp", "str", None,
           "Source: start at the first record of this time (ms since 1970) or later, on every "
           "partition; `-10 minutes` is that long before the query is planned. Takes precedence "
           "over startingOffsetsByTimestamp and startingOffsets. All three apply to a new query "
           "only."),
    Option("startingOffsetsByTimestamp", "str", None,
           "Source: start times (ms since 1970) by partition, as JSON "
           '`{"topic":{"0":1700000000000}}`. Takes precedence over startingOffsets.'),
    Option("startingOffsets", "str", None,
           'Source: `earliest`, `latest` or JSON `{"topic":{"0":23,"1":-2}}` (-2 earliest, -1 '
           'latest); `-1000` for the last 1000 offsets of each partition; in JSON a topic may '
           'have a word or such a number, `{"topic":"earliest","other":-1000}`. Default: latest '
           "for a stream, earliest for a batch."),
    Option("startingOffsetsByTimestampStrategy", "enum", "error",
           "Source: what to do when a start time is later than every record of a partition.",
           choices=("error", "latest")),
    Option("endingTimestamp", "str", None,
           "Batch source: end before the first record of this time or later; a span as in "
           "startingTimestamp. Takes precedence over the other ending options."),
    Option("endingOffsetsByTimestamp", "str", None,
           "Batch source: end times (ms since 1970) by partition, as JSON. Takes precedence over "
           "endingOffsets."),
    Option("endingOffsets", "str", None,
           'Batch source: `latest` (the default) or JSON `{"topic":{"0":50,"1":-1}}`. -1 is the '
           "latest; the end itself is not included. Back from the end as in startingOffsets."),
    Option("failOnDataLoss", "bool", True,
           "Source: fail when records were deleted before the query read them, or their topic was "
           "deleted and created again. With `false` the query continues without them and logs what "
           "is missing."),
    Option("kafkaConsumer.pollTimeoutMs", "ms", 120000,
           "Source: how long a task waits for the broker, also for one that restarts. An explicit "
           "`request.timeout.ms` takes precedence.", low=1),
    Option("fetchOffset.numRetries", "int", 3,
           "Source: how often a failed request for the broker's offsets is repeated. A broker that "
           "was reached before is waited for besides, within `request.timeout.ms`.", low=0),
    Option("fetchOffset.retryIntervalMs", "ms", 10,
           "Source: how long to wait before each repetition.", low=0),
    Option("maxOffsetsPerTrigger", "int", None,
           "Stream source: most records of one micro-batch, divided among partitions in "
           "proportion to what each has waiting (pyspark 4.2 or later).", low=1),
    Option("minOffsetsPerTrigger", "int", None,
           "Stream source: how many records a micro-batch waits for, at most for maxTriggerDelay "
           "(pyspark 4.2 or later).", low=1),
    Option("maxTriggerDelay", "str", 900_000,
           "Stream source: how long minOffsetsPerTrigger may delay a micro-batch (15m).",
           check=duration_ms),
    Option("minPartitions", "int", None,
           "Source: least number of Spark partitions; large ranges of offsets are split.", low=1),
    Option("maxRecordsPerPartition", "int", None,
           "Source: most offsets of one Spark partition; larger ranges are split.", low=1),
    Option("coalescePartitions", "int", None,
           "Source: most Spark partitions. Topic partitions share them, so that about as many "
           "records are in each; set it to about the number of task slots where topic partitions "
           "are many and small. Default: one for each topic partition.", low=1),
    Option("groupIdPrefix", "str", None, "No effect: the source joins no consumer group."),
    Option("kafka.group.id", "str", None,
           "Stream source: commit what each micro-batch has read as this group's offsets, so that "
           "Kafka's tools show the lag.", aliases=("group.id",)),
    Option("includeHeaders", "bool", False,
           "Source: add the column headers. The sink writes a headers column whenever there is "
           "one."),
    Option("columns", "list", None,
           "Source: the rows have only these columns, for example `value,offset`. Their order "
           "stays that of the full row. A batch query that reads columns (docs/spark.md) selects "
           "its columns without this option."),
    Option("valueFormat", "enum", None,
           "Source: decode values of this format (docs/value-formats.md). A row then has the "
           "columns of the value.", choices=("fixed", "json", "arrow", "avro", "protobuf")),
    Option("valueSchema", "str", None,
           "Source with valueFormat: names and types of the columns. For fixed, with their "
           "places, `user:int64, kind:int32@12`; for others `user long, at timestamp(ms)`, or what "
           "`df.schema.json()` returns, or `.schema(...)` of the reader instead. For avro and "
           "protobuf it chooses columns. For avro it may be a schema of Avro's, as avroSchema."),
    Option("valueSize", "bytes", None,
           "Source with valueFormat=fixed: bytes of a value. Default: up to the end of the last "
           "field.", low=1, high=1 << 20),
    Option("valueMode", "enum", None,
           "Source with valueFormat, for values that do not decode: `PERMISSIVE` makes a row of "
           "nulls of them, `DROPMALFORMED` drops them; both count them and log the first ones. "
           "`FAILFAST` ends the query with the first one. Default: FAILFAST for avro and "
           "protobuf, DROPMALFORMED for the others.",
           choices=("PERMISSIVE", "DROPMALFORMED", "FAILFAST")),
    Option("columnNameOfCorruptRecord", "str", None,
           "Source with valueMode=PERMISSIVE: a column that has the value where it does not "
           "decode. If the schema does not have it, it comes last. `_corrupt_record` in a schema "
           "is it without the option."),
    Option("metadataColumns", "list", None,
           "Source with valueFormat: columns of Kafka's that a row has after those of the value, "
           "for example `key, offset as kafka_offset`. `value` is the value as bytes."),
    Option("valueFraming", "enum", None,
           "Source with valueFormat json, avro or protobuf: `confluent` if values begin with "
           "Confluent's frame, which names a schema of a registry. Default: confluent with "
           "schema.registry.url, none without.", choices=("none", "confluent")),
    Option("avroSchema", "str", None,
           "Source with valueFormat=avro: the schema to read values by, as JSON. Default: the "
           "latest one of the subject in the registry."),
    Option("avroWriterSchema", "str", None,
           "Source with valueFormat=avro: the schema that values were written by where it is "
           "another than avroSchema and no registry has it."),
    Option("descriptorFile", "str", None,
           "Source with valueFormat=protobuf: a file of the driver that `protoc --include_imports "
           "--descriptor_set_out` wrote. Default: what the registry has as the latest one of the "
           "subject."),
    Option("messageName", "str", None,
           "Source with valueFormat=protobuf: the message that a value is. Default, with a "
           "registry: the first of its schema."),
    Option("schema.registry.url", "str", None,
           "Source with valueFormat json, avro or protobuf: the address of a schema registry that "
           "speaks the API of Confluent's. The package is `kdirect[registry]`."),
    Option("schema.registry.subject", "str", None,
           "Source: under which subject the schema of the rows is registered. Default: TOPIC-value "
           "where one topic is read."),
    Option("schema.registry.timeout.ms", "ms", 10_000,
           "Source: how long the registry may take for an answer; it is asked three times.",
           low=1),
    Option("schema.registry.ssl.ca.location", "str", None,
           "Source: a file of certificates that the registry's is checked by."),
    Option("schema.registry.secret.basic.auth.user.info", "str", None,
           "Source: USER:PASSWORD for the registry. Spark hides options whose names say `secret`.",
           secret=True),
    Option("schema.registry.secret.bearer.auth.token", "str", None,
           "Source: a token for the registry.", secret=True),
    Option("topic", "str", None,
           "Sink: the topic to write to. Takes precedence over a topic column."),
    Option("exactlyOnce", "bool", True,
           "Sink: what a micro-batch or a batch writes is visible to readers of committed records "
           "once and all at a time (docs/spark.md). With `false` it is at-least-once, and visible "
           "as it is written."),
    Option("exactlyOnceId", "str", None,
           "Sink: who writes, where that is to outlive the checkpoint, or to be one at a time: a "
           "later query or batch of this name fences the one before. Default: the id in the "
           "checkpoint; for a batch, a new one."),
    Option("prefetchBytes", "bytes", 16 << 20,
           "Source: how many decoded bytes a task may hold that Spark has not taken yet.", low=1),
    Option("arrowBatchBytes", "bytes", 1 << 20,
           "Source: size of the Arrow batches that Spark gets.", low=1024, high=256 << 20),
    Option("partitionDiscoveryIntervalMs", "ms", 1000,
           "Stream source: how often to look for new topics and partitions.", low=0),
    *REMOTE_SPARK_ROWS,
    Option("taskStatisticsDir", "str", None,
           "Source: an existing directory where each task writes a JSON line of what its reader "
           "did (READs, bytes, transport, values that gave no row)."),
    Option("checkpointLocation", "str", None, "Spark's own; Spark passes it to a stream's sink."),
    Option("queryName", "str", None, "Spark's own; Spark passes it to a stream's sink."),
    Option("asyncProgressTrackingEnabled", "bool", False,
           "Stream sink, Spark's own: write the checkpoint's logs on another thread. Needs "
           "exactlyOnce=false."),
    Option("asyncProgressTrackingCheckpointIntervalMs", "int", None, "Spark's own.", low=0),
    Option("_asyncProgressTrackingOverrideSinkSupportCheck", "bool", None,
           "Spark's own; without the shim, Spark admits asyncProgressTrackingEnabled only with "
           "`true`."),
    Option("kdirectLoadedBy", "enum", None,
           "Set by kdirect's shim: whose load() was called.", choices=("batch", "stream")),
    Option("path", "str", None, "Not available: subscribe or topic names the topic."),
)
# fmt: on
