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
    Option("startingTimestamp", "int", None,
           "Source: start at the first record of this time (ms since 1970) or later, on every "
           "partition. Takes precedence over startingOffsetsByTimestamp and startingOffsets. All "
           "three apply to a new query only.", low=0),
    Option("startingOffsetsByTimestamp", "str", None,
           "Source: start times (ms since 1970) by partition, as JSON "
           '`{"topic":{"0":1700000000000}}`. Takes precedence over startingOffsets.'),
    Option("startingOffsets", "str", None,
           'Source: `earliest`, `latest` or JSON `{"topic":{"0":23,"1":-2}}` (-2 earliest, -1 '
           "latest). Default: latest for a stream, earliest for a batch."),
    Option("startingOffsetsByTimestampStrategy", "enum", "error",
           "Source: what to do when a start time is later than every record of a partition.",
           choices=("error", "latest")),
    Option("endingTimestamp", "int", None,
           "Batch source: end before the first record of this time or later. Takes precedence "
           "over the other ending options.", low=0),
    Option("endingOffsetsByTimestamp", "str", None,
           "Batch source: end times (ms since 1970) by partition, as JSON. Takes precedence over "
           "endingOffsets."),
    Option("endingOffsets", "str", None,
           'Batch source: `latest` (the default) or JSON `{"topic":{"0":50,"1":-1}}`. -1 is the '
           "latest; the end itself is not included."),
    Option("failOnDataLoss", "bool", True,
           "Source: fail when records were deleted before the query read them. With `false` the "
           "query continues without them and logs what is missing."),
    Option("kafkaConsumer.pollTimeoutMs", "ms", 120000,
           "Source: how long a task may wait for the broker. An explicit `request.timeout.ms` "
           "takes precedence.", low=1),
    Option("fetchOffset.numRetries", "int", 3,
           "Source: how often a failed request for the broker's offsets is repeated.", low=0),
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
    Option("groupIdPrefix", "str", None, "Not available: the source joins no consumer group."),
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
           "columns of the value, and only these.", choices=("fixed", "json", "arrow")),
    Option("valueSchema", "str", None,
           "Source with valueFormat: names and types of the columns. For fixed, with their "
           "places, `user:int64, kind:int32@12`; for json and arrow `user long, at "
           "timestamp(ms)`, or `.schema(...)` of the reader instead."),
    Option("valueSize", "bytes", None,
           "Source with valueFormat=fixed: bytes of a value. Default: up to the end of the last "
           "field.", low=1, high=1 << 20),
    Option("valueMode", "enum", "PERMISSIVE",
           "Source with valueFormat: `PERMISSIVE` drops values that do not decode, counts them "
           "and logs the first ones; `FAILFAST` ends the query with the first one.",
           choices=("PERMISSIVE", "FAILFAST")),
    Option("topic", "str", None,
           "Sink: the topic to write to. Takes precedence over a topic column."),
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
    Option("path", "str", None, "Not available: subscribe or topic names the topic."),
)
# fmt: on
