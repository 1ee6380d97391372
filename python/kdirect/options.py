"""The one list of options: broker properties, topic properties, client settings and Spark options.

Law: every option that a user can set is a row of a table here.  The rows of tiered storage are in
`remote_options.py`, those of Spark in `spark_options.py`, those of the state engine in
`state_options.py`.  Parsing, defaults, checks and the pages in docs/ come from the row; what a row
is, `option_table.py` says.
"""

from __future__ import annotations

import re

from kdirect.cleaner_options import CLEANER_BROKER_ROWS, CLEANER_TOPIC_ROWS
from kdirect.errors import ConfigError
from kdirect.option_table import Option, Options
from kdirect.remote_options import (
    REMOTE_BROKER_ROWS,
    REMOTE_CLIENT_ROWS,
    REMOTE_TOPIC_ROWS,
)
from kdirect.sasl_options import SASL_BROKER_ROWS
from kdirect.spark_options import SPARK_ROWS
from kdirect.state_options import ENGINE_ROWS
from kdirect.thread_options import THREAD_BROKER_ROWS
from kdirect.transaction_options import TRANSACTION_BROKER_ROWS


def _must_preallocate(value: bool) -> bool:
    if not value:
        raise ConfigError(
            "preallocation cannot be switched off",
            hint="leave preallocate at true: RDMA writes need bytes that exist",
        )
    return value


def _gzip_level(value: int) -> int:
    if value == 0:
        raise ConfigError(
            "option compression.gzip.level: '0' is not a level",
            hint="give 1 to 9, or -1 for the default level",
        )
    return value


_MATCHED = frozenset(
    (
        "client_instance_id",
        "client_id",
        "client_software_name",
        "client_software_version",
        "client_source_address",
        "client_source_port",
    )
)


def _client_match(value: list[str]) -> list[str]:
    for item in value:
        name, equals, pattern = item.partition("=")
        try:
            re.compile(pattern)
        except re.error as e:
            raise ConfigError(
                f"option match: {pattern!r} is no regular expression: {e}",
                hint="write name=regular expression",
            ) from e
        if not equals or name.strip() not in _MATCHED:
            raise ConfigError(
                f"option match: {item!r} names nothing that a client has",
                hint="match one of " + ", ".join(sorted(_MATCHED)),
            )
    return value


# Properties of Kafka 3.7 and later may name the classes of the two: the default there until 4.0.
_ASSIGNOR_CLASSES = {
    f"org.apache.kafka.coordinator.group.assignor.{name.capitalize()}Assignor": name
    for name in ("uniform", "range")
}


def _group_assignors(value: list[str]) -> list[str]:
    named = [_ASSIGNOR_CLASSES.get(name, name) for name in value]
    if not named or not set(named) <= {"uniform", "range"}:
        raise ConfigError(
            f"option group.consumer.assignors: {','.join(value)!r} names no assignor of the broker",
            hint="use uniform, range, or both",
        )
    return named


def _throttled_replicas(value: list[str]) -> list[str]:
    if value != ["*"] and not all(re.fullmatch(r"\d{1,10}:\d{1,10}", item) for item in value):
        raise ConfigError(
            f"option replication.throttled.replicas: {','.join(value)!r} is no list of replicas",
            hint="give partition:broker,partition:broker, or * for all",
        )
    return value


# The rows are dense so that a table can be read as a whole.
# fmt: off
_STORED_CODECS = ("uncompressed", "gzip", "snappy", "lz4", "zstd", "producer")
BROKER = Options("Broker properties", (
    Option("compression.type", "enum", "producer",
           "The codec of stored batches (topic: the same name). With `producer` they stay as they "
           "were sent; otherwise the broker compresses what comes in another codec, and producers "
           "have no access over RDMA.", choices=_STORED_CODECS),
    Option("compression.gzip.level", "int", -1, "With compression.type=gzip: 1 to 9, or -1.",
           low=-1, high=9, check=_gzip_level),
    Option("compression.lz4.level", "int", 9, "With compression.type=lz4.", low=1, high=17),
    Option("compression.zstd.level", "int", 3, "With compression.type=zstd.", low=-131_072,
           high=22),
    Option("rdma.produce", "bool", True, "Offer the RDMA produce path."),
    Option("rdma.consume", "bool", True, "Offer the RDMA consume path."),
    Option("rdma.commit", "bool", True,
           "Let members of groups commit their offsets by WRITEs into memory of their coordinator, "
           "where they have a transport for RDMA."),
    Option("rdma.produce.hole.timeout.ms", "ms", 500,
           "How long requests on a shared head wait for an earlier request whose room is reserved "
           "but whose bytes are not written. After that the broker revokes access to the head and "
           "cuts the log before the missing request.", low=1, high=600_000),
    Option("rdma.transports", "list", ["verbs", "shm"],
           "Transports that the broker offers for RDMA: `verbs` (an RNIC or soft-RoCE device, "
           "opened when the first client asks for it) and `shm` (memory of this host). An empty "
           "list switches RDMA off."),
    Option("rdma.bind.address", "str", None,
           "IP address that selects the RDMA device and GID. Clients also reach the links of "
           "their queue pairs at this address. Default: the first listener's address, or the "
           "first active port."),
    Option("rdma.device", "str", None,
           "Name of the RDMA device, such as mlx5_0. Default: chosen by the address."),
    Option("rdma.gid.index", "int", -1,
           "Index into the port's GID table; -1 selects the RoCE v2 GID of the address.", low=-1,
           high=4095),
    Option("rdma.link.port", "int", 0,
           "TCP port of the links through which each end of a verbs queue pair notices that the "
           "other has gone; 0 takes any free port.", low=0, high=65535),
    Option("rdma.spin.us", "int", 50,
           "How many microseconds the produce worker spins after a request before it sleeps; 0 "
           "sleeps at once.", low=0, high=1_000_000),
    Option("rdma.max.in.flight", "int", 1024,
           "How many produce requests one client may have in flight on one queue pair. The broker "
           "keeps this many receives posted.", low=1, high=16384),
    Option("rdma.message.memory.bytes", "bytes", 32 << 20,
           "Registered memory for the requests of one client that sends them with SEND "
           "(`produce.path=send`). It bounds the number and the size of requests in flight.",
           low=65536, high=1 << 30),
    Option("rdma.slots.per.consumer", "int", 1024,
           "Metadata slots of one consumer, 64 bytes each: how many partitions it can follow on "
           "one queue pair.", low=1, high=1 << 20),
    # the log
    Option("log.dirs", "list", ["/tmp/kdirect-logs"],
           "Directories that hold the partitions. Only one broker may use a directory at a time. "
           "Segments that producers write over verbs belong on tmpfs, hugetlbfs or DAX: kernels "
           "from 6.5 on refuse to register writable mappings of ext4 and xfs files.",
           aliases=("log.dir",)),
    Option("log.segment.bytes", "bytes", 64 << 20,
           "Size of a segment file, rounded up to whole pages (topic: segment.bytes). Kafka's "
           "default is 1 GiB. The default here is smaller because the whole head of a busy "
           "partition is allocated, mapped and registered; the head of a quiet partition takes "
           "only what it uses.", low=4096, high=0x7FFFF000),
    Option("log.roll.ms", "ms", None,
           "Start a new segment when the next record's timestamp is this much later than the "
           "segment's first (topic: segment.ms). Takes precedence over log.roll.hours.", low=1),
    Option("log.roll.hours", "int", 168, "The same, in hours.", low=1),
    Option("log.roll.jitter.ms", "ms", None,
           "Each segment ends a random time below this one sooner (topic: segment.jitter.ms), so "
           "that logs that began together do not all begin segments at once. Takes precedence over "
           "log.roll.jitter.hours.", low=0),
    Option("log.roll.jitter.hours", "int", 0, "The same, in hours.", low=0),
    Option("log.index.interval.bytes", "bytes", 4096,
           "Bytes of batches between two index entries (topic: index.interval.bytes).", low=0,
           high=0x7FFFFFFF),
    Option("log.index.size.max.bytes", "bytes", 10 << 20,
           "Upper limit of an index file (topic: segment.index.bytes). If a full segment needs "
           "less, only that is used: 192 KiB instead of 10 MiB with the default segment size and "
           "index interval. An index file starts with one page and grows with the head.", low=4096,
           high=1 << 30),
    Option("log.preallocate", "bool", True,
           "Always true: RDMA writes go into the head's file in place, so its bytes must exist. "
           "They are allocated in steps, as they are needed (topic: preallocate).",
           check=_must_preallocate),
    Option("log.retention.ms", "ms", None,
           "Delete segments whose newest record is older than this; -1 keeps them (topic: "
           "retention.ms). Takes precedence over the settings in minutes and hours.", low=-1),
    Option("log.retention.minutes", "int", None, "The same, in minutes.", low=-1),
    Option("log.retention.hours", "int", 168, "The same, in hours.", low=-1),
    Option("log.retention.bytes", "bytes", -1,
           "Delete a partition's oldest segments while the partition is larger than this; -1 sets "
           "no limit (topic: retention.bytes).", low=-1),
    Option("log.retention.check.interval.ms", "ms", 300_000,
           "How often the broker checks for segments to delete.", low=1),
    Option("log.segment.delete.delay.ms", "ms", 60_000,
           "How long files of deleted segments stay on disk under names that end in .deleted "
           "(topic: file.delete.delay.ms), and directories of deleted partitions under names that "
           "end in -delete. On a full disk they are removed at once.", low=0),
    *CLEANER_BROKER_ROWS,
    Option("log.flush.interval.messages", "long", (1 << 63) - 1,
           "Call fsync after this many records of a partition (topic: flush.messages).", low=1),
    Option("log.flush.interval.ms", "ms", None,
           "Call fsync at the latest this long after a record was appended (topic: flush.ms). "
           "Default: the operating system decides.", low=0),
    Option("log.flush.scheduler.interval.ms", "ms", 1000,
           "How often the broker checks flush.ms, flush.messages and sealed segments that are not "
           "on disk yet.", low=1),
    Option("log.flush.before.ack", "bool", False,
           "Group commit: records become visible and are acknowledged only once they are on disk. "
           "One fsync serves all producers that wait."),
    Option("log.flush.offset.checkpoint.interval.ms", "ms", 60_000,
           "How often the broker writes checkpoints of recovery points and high watermarks.",
           low=1),
    Option("log.message.timestamp.type", "enum", "CreateTime",
           "Which time a record carries: the producer's (CreateTime) or that of the append "
           "(LogAppendTime) (topic: message.timestamp.type).",
           choices=("CreateTime", "LogAppendTime")),
    Option("log.message.timestamp.before.max.ms", "ms", (1 << 63) - 1,
           "Refuse records whose timestamp is this much earlier than the broker's clock (topic: "
           "message.timestamp.before.max.ms).", low=0),
    Option("log.message.timestamp.after.max.ms", "ms", 3_600_000,
           "Refuse records whose timestamp is this much later than the broker's clock (topic: "
           "message.timestamp.after.max.ms).", low=0),
    Option("message.max.bytes", "bytes", 1_048_588,
           "Largest record batch, compressed or not (topic: max.message.bytes).", low=61,
           high=0x7FFFF000),
    Option("max.batch.bytes", "bytes", 64 << 20,
           "Largest record batch, after decompression, that a lookup by time opens; the default "
           "equals the consumers' default. A lookup that meets a larger batch is answered with "
           "MESSAGE_TOO_LARGE. So much may also the batches of a partition in one Produce be "
           "together, where the broker looks into records, because the topic is compacted or has a "
           "compression.type; INVALID_RECORD if they are larger.", low=1024, high=1 << 30),
    Option("producer.id.expiration.ms", "ms", 86_400_000,
           "How long the broker remembers an idle idempotent producer.", low=1),
    # network
    Option("listeners", "list", ["127.0.0.1:9092"],
           "Where to listen: `host:port` or `PLAINTEXT://host:port`, several separated by commas; "
           "port 0 takes a free port. There is no authentication: listen only on addresses that "
           "trusted hosts reach."),
    Option("advertised.listeners", "list", [],
           "Addresses that clients are given, one for each listener. Default: the listener's own "
           "address, or, for a listener on all addresses, the address that the client connected "
           "to."),
    Option("node.id", "int", 1, "Id of this broker.", low=0, high=0x7FFFFFFF,
           aliases=("broker.id",)),
    Option("socket.request.max.bytes", "bytes", 104_857_600,
           "Largest request. The broker closes a connection that sends a larger one.", low=1024,
           high=0x7FFFFFFF),
    Option("socket.listen.backlog.size", "int", 128, "Connections that may wait to be accepted.",
           low=1),
    Option("queued.max.requests", "int", 500,
           "How many unanswered requests one connection may have. The broker stops reading from a "
           "connection that has more.", low=1),
    Option("queued.max.request.bytes", "bytes", None,
           "How much memory requests in progress may hold on all connections together. Beyond "
           "that the broker stops reading from connections with large requests until others are "
           "done; it always admits one request. -1 sets no bound, as Kafka's default does. "
           "Default: an eighth of the memory of the machine (or of its control group), and at "
           "least socket.request.max.bytes.", low=-1),
    Option("connections.max.idle.ms", "ms", 600_000,
           "Close connections that were silent for this long and hold no RDMA access; -1 never "
           "closes them.", low=-1),
    Option("fetch.max.bytes", "bytes", 57_671_680,
           "Largest response to a Fetch. A response whose first batch alone is larger is still "
           "sent.", low=1024, high=0x7FFFFFFF),
    Option("max.incremental.fetch.session.cache.slots", "int", 1000,
           "Sessions of clients that fetch (KIP-227) which are kept; 0: none.", low=0),
    # topics
    Option("auto.create.topics.enable", "bool", True,
           "Create a topic when a client first asks for it."),
    Option("delete.topic.enable", "bool", True, "Allow clients to delete topics."),
    Option("num.partitions", "int", 1, "Number of partitions of a topic whose creator names none.",
           low=1, high=10_000),
    Option("default.replication.factor", "int", 1,
           "Replicas of a topic whose creator names no number. A topic cannot have more replicas "
           "than there are brokers.", low=1, high=32767, alone=1),
    Option("min.insync.replicas", "int", 1,
           "How many replicas, the leader included, must be in sync for a record that was sent "
           "with acks=all. With fewer it is refused, and the high watermark stands still (topic: "
           "min.insync.replicas).", low=1, high=32767, alone=1),
    Option("unclean.leader.election.enable", "bool", False,
           "When no replica in sync is left, let one that lags become the leader. Records that it "
           "lacks are lost, although they were acknowledged (topic: "
           "unclean.leader.election.enable)."),
    # the cluster
    Option("zookeeper.connect", "str", None,
           "The ZooKeeper servers of the cluster that the broker joins: host:port,host:port, and, "
           "after the last, an optional /path below which the cluster is kept; that node must "
           "exist. Default: the broker is alone and keeps everything in log.dirs."),
    Option("zookeeper.session.timeout.ms", "ms", 18_000,
           "How long ZooKeeper waits for a silent broker before it tells the others that the "
           "broker is gone. The servers bound it: by default to 2 to 20 of their ticks.", low=1,
           high=0x7FFFFFFF),
    Option("zookeeper.connection.timeout.ms", "ms", None,
           "How long a broker that starts waits for ZooKeeper before it gives up. Default: "
           "zookeeper.session.timeout.ms.", low=1, high=0x7FFFFFFF),
    Option("broker.rack", "str", None,
           "Where this broker is. Replicas of a partition are spread over the racks, and a "
           "consumer with client.rack reads from a replica of its own rack."),
    Option("replica.lag.time.max.ms", "ms", 30_000,
           "The leader removes a follower from the replicas in sync that has not had all of its "
           "records for this long.", low=1),
    Option("rdma.replicate", "bool", True,
           "Replicate by RDMA writes into the followers' files. With false, and between brokers "
           "that share no transport, followers fetch over TCP."),
    Option("replica.push.max.bytes", "bytes", 65_536,
           "Records that lie together in the leader's log go to a follower in one RDMA write of "
           "at most this size; 0 writes each run by itself. Smaller values lower latency, larger "
           "ones raise bandwidth (KafkaDirect section 5.2).", low=0, high=16 << 20),
    Option("leader.replication.throttled.rate", "long", (1 << 63) - 1,
           "How many bytes per second this broker sends to followers that are not in sync, or lets "
           "them read, for the partitions in leader.replication.throttled.replicas. May change at "
           "run time.", low=0),
    Option("follower.replication.throttled.rate", "long", (1 << 63) - 1,
           "How many bytes per second this broker takes from leaders while it is not in sync, for "
           "the partitions in follower.replication.throttled.replicas. May change at run time.",
           low=0),
    Option("replica.alter.log.dirs.io.max.bytes.per.second", "long", (1 << 63) - 1,
           "How many bytes per second are copied between the log directories of this broker, for "
           "all partitions that are moved (AlterReplicaLogDirs); 0: none. May change at run time.",
           low=0),
    Option("auto.leader.rebalance.enable", "bool", True,
           "Give leadership back to the preferred replicas, which are the first of each partition, "
           "when a broker leads too few of those that prefer it."),
    Option("leader.imbalance.check.interval.seconds", "int", 300,
           "How often the controller checks for that.", low=1),
    Option("leader.imbalance.per.broker.percentage", "int", 10,
           "How large a part of the partitions that prefer a broker, in per cent, may be led by "
           "others before leadership is given back.", low=0, high=100),
    Option("controlled.shutdown.enable", "bool", True,
           "A broker that is stopped first hands the partitions that it leads to other replicas in "
           "sync."),
    Option("controlled.shutdown.max.retries", "int", 3,
           "How often it tries again when that fails, before it stops nevertheless.", low=0),
    Option("controlled.shutdown.retry.backoff.ms", "ms", 5000,
           "How long it waits before it tries again.", low=0),
    # groups
    Option("group.initial.rebalance.delay.ms", "ms", 0,
           "How long the first rebalance of an empty group waits for more members. Kafka's "
           "default is 3000; the properties file that it ships sets 0.", low=0),
    Option("group.min.session.timeout.ms", "ms", 6000,
           "Shortest session a group member may ask for.", low=1),
    Option("group.max.session.timeout.ms", "ms", 1_800_000,
           "Longest session a group member may ask for.", low=1),
    Option("group.max.size", "int", 0x7FFFFFFF, "How many members a group may have.", low=1),
    Option("group.coordinator.rebalance.protocols", "list", ["classic", "consumer"],
           "Which protocols groups may use: `classic`, and `consumer`, that of KIP-848."),
    Option("group.consumer.session.timeout.ms", "ms", 45_000,
           "How long a member of a group of the new protocol may be silent.", low=1),
    Option("group.consumer.min.session.timeout.ms", "ms", 45_000,
           "The least that `consumer.session.timeout.ms` of a group may be set to.", low=1),
    Option("group.consumer.max.session.timeout.ms", "ms", 60_000,
           "The most that `consumer.session.timeout.ms` of a group may be set to.", low=1),
    Option("group.consumer.heartbeat.interval.ms", "ms", 5000,
           "How often members of groups of the new protocol send heartbeats.", low=1),
    Option("group.consumer.min.heartbeat.interval.ms", "ms", 5000,
           "The least that `consumer.heartbeat.interval.ms` of a group may be set to.", low=1),
    Option("group.consumer.max.heartbeat.interval.ms", "ms", 15_000,
           "The most that `consumer.heartbeat.interval.ms` of a group may be set to.", low=1),
    Option("group.consumer.max.size", "int", 0x7FFFFFFF,
           "How many members a group of the new protocol may have.", low=1),
    Option("group.consumer.assignors", "list", ["uniform", "range"],
           "The assignors of the broker: `uniform` and `range`, the default one first.",
           check=_group_assignors),
    Option("group.consumer.migration.policy", "enum", "bidirectional",
           "Which groups change their protocol while they have members: to the new one when the "
           "first member of it joins (`upgrade`), back when the last one of it is gone "
           "(`downgrade`), both, or none (`disabled`).",
           choices=("bidirectional", "upgrade", "downgrade", "disabled")),
    Option("offsets.topic.num.partitions", "int", 1,
           "Partitions of __consumer_offsets; takes effect when the first group is written. "
           "Kafka's default is 50, to spread the load over brokers.", low=1, high=1000),
    Option("offsets.topic.replication.factor", "int", 3,
           "Replicas of __consumer_offsets. In a cluster no group can begin before so many brokers "
           "are there. Without zookeeper.connect there is one replica, whatever is given.", low=1,
           high=32767),
    Option("offsets.topic.segment.bytes", "bytes", 100 << 20,
           "Segment size of __consumer_offsets, when the topic is created. Its last segment is not "
           "compacted, and is read whole when a broker starts or becomes coordinator.",
           low=1 << 20, high=1 << 30),
    Option("offsets.retention.minutes", "int", 10080,
           "Forget the offsets of a group that has been empty for this long.", low=1),
    Option("offsets.retention.check.interval.ms", "ms", 600_000,
           "How often the broker checks for such groups.", low=1000),
    Option("offset.metadata.max.bytes", "bytes", 4096,
           "Longest text that may be committed with an offset.", low=0, high=32767),
    # transactions
    *TRANSACTION_BROKER_ROWS,
    # tiered storage
    *REMOTE_BROKER_ROWS,
    # SASL
    *SASL_BROKER_ROWS,
    # threads
    *THREAD_BROKER_ROWS,
))

# Every topic property of Kafka 4.1, by its name.  A default of None means the broker's property of
# the same meaning (`synonym`).  A property of a feature that this broker lacks is accepted if it
# does not ask for the feature: `only` holds the one value that does not.  A property that matters
# only within a missing feature accepts any value.  Such values are kept and shown, without effect.
TOPIC = Options("Topic properties", (
    *CLEANER_TOPIC_ROWS,
    Option("compression.gzip.level", "int", None, "Overrides compression.gzip.level.", low=-1,
           high=9, check=_gzip_level, synonym="compression.gzip.level"),
    Option("compression.lz4.level", "int", None, "Overrides compression.lz4.level.", low=1,
           high=17, synonym="compression.lz4.level"),
    Option("compression.type", "enum", None, "Overrides compression.type of the broker.",
           choices=_STORED_CODECS, synonym="compression.type"),
    Option("compression.zstd.level", "int", None, "Overrides compression.zstd.level.",
           low=-131_072, high=22, synonym="compression.zstd.level"),
    Option("file.delete.delay.ms", "ms", None, "Overrides log.segment.delete.delay.ms, for "
           "segments; a directory of a deleted partition waits as long as the broker says.", low=0,
           synonym="log.segment.delete.delay.ms"),
    Option("flush.messages", "long", None, "Overrides log.flush.interval.messages.", low=1,
           synonym="log.flush.interval.messages"),
    Option("flush.ms", "ms", None, "Overrides log.flush.interval.ms.", low=0,
           synonym="log.flush.interval.ms"),
    Option("follower.replication.throttled.replicas", "list", [],
           "Followers that follower.replication.throttled.rate holds back: partition:broker, "
           "separated by commas, or * for all. Replicas in sync are not held back.",
           check=_throttled_replicas, alone=[]),
    Option("index.interval.bytes", "bytes", None, "Overrides log.index.interval.bytes.", low=0,
           high=0x7FFFFFFF, synonym="log.index.interval.bytes"),
    Option("leader.replication.throttled.replicas", "list", [],
           "Leaders that leader.replication.throttled.rate holds back: partition:broker, "
           "separated by commas, or * for all. Followers in sync are not held back.",
           check=_throttled_replicas, alone=[]),
    Option("max.message.bytes", "bytes", None, "Overrides message.max.bytes.", low=61,
           high=0x7FFFF000, synonym="message.max.bytes"),
    Option("message.timestamp.after.max.ms", "ms", None,
           "Overrides log.message.timestamp.after.max.ms.", low=0,
           synonym="log.message.timestamp.after.max.ms"),
    Option("message.timestamp.before.max.ms", "ms", None,
           "Overrides log.message.timestamp.before.max.ms.", low=0,
           synonym="log.message.timestamp.before.max.ms"),
    Option("message.timestamp.type", "enum", None, "Overrides log.message.timestamp.type.",
           choices=("CreateTime", "LogAppendTime"), synonym="log.message.timestamp.type"),
    Option("min.insync.replicas", "int", None, "Overrides min.insync.replicas of the broker.",
           low=1, high=32767, alone=1, synonym="min.insync.replicas"),
    Option("preallocate", "bool", True,
           "The bytes of a head exist before records are written into them.", only=True,
           why="RDMA writes need bytes that exist", synonym="log.preallocate"),
    Option("retention.bytes", "bytes", None, "Overrides log.retention.bytes.", low=-1,
           synonym="log.retention.bytes"),
    Option("retention.ms", "ms", None, "Overrides log.retention.ms.", low=-1,
           synonym="log.retention.ms"),
    Option("segment.bytes", "bytes", None, "Overrides log.segment.bytes.", low=4096,
           high=0x7FFFF000, synonym="log.segment.bytes"),
    Option("segment.index.bytes", "bytes", None, "Overrides log.index.size.max.bytes.", low=4096,
           high=1 << 30, synonym="log.index.size.max.bytes"),
    Option("segment.jitter.ms", "ms", None, "Overrides log.roll.jitter.ms.", low=0,
           synonym="log.roll.jitter.ms"),
    Option("segment.ms", "ms", None, "Overrides log.roll.ms.", low=1, synonym="log.roll.ms"),
    Option("unclean.leader.election.enable", "bool", None,
           "Overrides unclean.leader.election.enable of the broker.", alone=False,
           synonym="unclean.leader.election.enable"),
    *REMOTE_TOPIC_ROWS,
))

# Properties of a group (KIP-848) and of a subscription to clients' metrics (KIP-714), which are
# kept whether or not there is such a group or client.
GROUP = Options("Group properties", (
    Option("consumer.heartbeat.interval.ms", "ms", None,
           "How often members of a group with group.protocol=consumer are to send heartbeats. "
           "Overrides group.consumer.heartbeat.interval.ms of the broker.",
           low=1, high=0x7FFFFFFF, synonym="group.consumer.heartbeat.interval.ms"),
    Option("consumer.session.timeout.ms", "ms", None,
           "How long such a member may be silent before it is taken for dead. Overrides "
           "group.consumer.session.timeout.ms of the broker.",
           low=1, high=0x7FFFFFFF, synonym="group.consumer.session.timeout.ms"),
))

CLIENT_METRICS = Options("Client metrics properties", (
    Option("interval.ms", "ms", 300_000, "How often a client is to push its metrics. No client "
           "pushes any: there is nothing here that takes them.", low=100, high=3_600_000),
    Option("match", "list", [], "Which clients: name=regular expression, separated by commas, of "
           "client_instance_id, client_id, client_software_name, client_software_version, "
           "client_source_address and client_source_port.", check=_client_match),
    Option("metrics", "list", [], "Prefixes of the names of the metrics."),
))

# Properties of a broker that may be changed while it runs.
DYNAMIC_LOG = frozenset((
    "log.index.interval.bytes", "log.index.size.max.bytes", "log.segment.bytes", "log.roll.ms",
    "log.roll.jitter.ms",
    "log.retention.ms", "log.retention.bytes", "log.cleanup.policy", "log.preallocate",
    "log.segment.delete.delay.ms",
    "log.flush.interval.messages", "log.flush.interval.ms", "log.message.timestamp.type",
    "log.message.timestamp.before.max.ms", "log.message.timestamp.after.max.ms",
    "message.max.bytes", "log.local.retention.ms", "log.local.retention.bytes",
    "min.insync.replicas", "unclean.leader.election.enable", "producer.id.expiration.ms",
    "log.cleaner.delete.retention.ms", "log.cleaner.min.cleanable.ratio",
    "log.cleaner.min.compaction.lag.ms", "log.cleaner.max.compaction.lag.ms",
    "compression.type", "compression.gzip.level", "compression.lz4.level", "compression.zstd.level",
))

CLIENT = Options("Client settings", (
    Option("bootstrap.servers", "list", None,
           "host:port of the broker; of a list, the first that answers is used.", required=True),
    Option("client.id", "str", "kdirect", "Name that appears in the broker's log."),
    Option("client.rack", "str", None,
           "Where this client is. Partitions are read from a replica in sync whose broker.rack is "
           "the same, if there is one, and from the leader otherwise; what is written, and where "
           "logs end, is the leader's."),
    Option("transport", "enum", "auto",
           "How records travel: `shm` (memory of this host), `verbs` (an RNIC), `tcp` (Kafka's "
           "protocol), or `auto`, which takes the best that works and logs its choice.",
           choices=("auto", "verbs", "shm", "tcp")),
    Option("rdma.bind.address", "str", None,
           "IP address that selects the RDMA device and GID. Default: the address from which the "
           "broker is reached, or the first active port."),
    Option("rdma.device", "str", None,
           "Name of the RDMA device, such as mlx5_0. Default: chosen by the address."),
    Option("rdma.gid.index", "int", -1,
           "Index into the port's GID table; -1 selects the RoCE v2 GID of the address.", low=-1,
           high=4095),
    Option("request.timeout.ms", "ms", 30000, "How long one request to the broker may take.",
           low=1),
    Option("connect.timeout.ms", "ms", 5000,
           "How long to keep trying to reach a broker that does not answer.", low=1,
           aliases=("socket.connection.setup.timeout.ms",)),
    Option("reconnect.backoff.ms", "ms", 50,
           "How long to wait before the second attempt to connect. Each further wait is twice as "
           "long.", low=1),
    Option("reconnect.backoff.max.ms", "ms", 1000, "Longest wait between two attempts to connect.",
           low=1),
    Option("metadata.max.age.ms", "ms", 300000,
           "How long the leaders of partitions are remembered. An error refreshes them at once.",
           low=1),
    Option("fetch.min.read.bytes", "bytes", 2048,
           "Size of the first data READ (KafkaDirect section 4.4.2).", low=512),
    Option("fetch.max.read.bytes", "bytes", 1 << 20,
           "Size up to which data READs grow while the consumer lags.", low=2048, high=64 << 20),
    Option("fetch.buffer.bytes", "bytes", 4 << 20,
           "Size of the READ buffer of one partition. The buffer grows only for a batch that is "
           "larger.", low=65536),
    Option("max.batch.bytes", "bytes", 64 << 20, "Largest record batch that a consumer accepts.",
           low=1024, high=1 << 30),
    Option("isolation.level", "enum", "read_uncommitted", "Which records a consumer sees.",
           choices=("read_uncommitted", "read_committed")),
    Option("fetch.wait.max.ms", "ms", None,
           "How long a Fetch over TCP waits at the broker for records. Where it is not set, 500, "
           "and in silence up to 5000, unless `fetch.min.bytes` holds records back meanwhile.",
           low=0, high=300_000, aliases=("fetch.max.wait.ms",)),
    Option("fetch.min.bytes", "bytes", 1, "How many bytes of records a Fetch over TCP waits for.",
           low=1, high=100_000_000),
    Option("auto.offset.reset", "enum", "latest",
           "Where a consumer starts without a committed offset, and where it continues when its "
           "offset is out of range; with `none` it raises an error.",
           choices=("earliest", "latest", "none")),
    Option("group.id", "str", None,
           "The consumer group. Its members share the partitions of their topics, and offsets are "
           "committed under its name."),
    Option("group.protocol", "enum", "classic",
           "Which protocol a member of a group speaks: Kafka's `classic` one, or `consumer`, that "
           "of KIP-848: the broker assigns partitions and matches subscribed patterns, and members "
           "go on reading while others come and go.", choices=("classic", "consumer")),
    Option("group.remote.assignor", "str", None,
           "With group.protocol=consumer: which of the broker's assignors the group is to use, "
           "`uniform` or `range`. The broker takes what most members ask for."),
    Option("group.instance.id", "str", None,
           "Name of a static member. A static member that restarts within its session gets its "
           "partitions back without a rebalance."),
    Option("session.timeout.ms", "ms", 45000,
           "The group removes a member that sends no heartbeat for this long. With "
           "group.protocol=consumer the broker's group.consumer.session.timeout.ms decides, and "
           "this should not be longer: a member without an answer for most of it stops reading.",
           low=1),
    Option("heartbeat.interval.ms", "ms", 3000,
           "How often a group member sends a heartbeat; must be below session.timeout.ms. Not with "
           "group.protocol=consumer, where the broker decides.", low=1),
    Option("max.poll.interval.ms", "ms", 300000,
           "A consumer that is not polled for this long leaves its group, and the other members "
           "take its partitions.", low=1),
    Option("partition.assignment.strategy", "list", ["range", "roundrobin"],
           "Assignors of a group, in order of preference: range, roundrobin; or cooperative-sticky "
           "alone, with which what stays with a member is read on during a rebalance."),
    Option("enable.auto.commit", "bool", True,
           "Commit the positions of a consumer with a group.id automatically. The positions cover "
           "what was handed out before the current poll."),
    Option("auto.commit.interval.ms", "ms", 5000,
           "How often positions are committed automatically.", low=1),
    Option("enable.auto.offset.store", "bool", True,
           "Commit positions; with `false`, commit only what store_offsets has named."),
    Option("allow.auto.create.topics", "bool", True,
           "A producer creates a missing topic if the broker allows it "
           "(auto.create.topics.enable)."),
    Option("acks", "enum", "all",
           "What a produce request waits for: `all` in-sync replicas have the records, or the "
           "leader has (`1`). With `0` a request over TCP is not answered; over RDMA it is as `1`.",
           choices=("0", "1", "all", "-1")),
    Option("enable.idempotence", "bool", None,
           "Producer: batches carry a producer id and sequence numbers, so that no batch is "
           "appended twice or out of order, whichever path repeats it. Default: on, unless acks "
           "is 0 or 1."),
    Option("transactional.id", "str", None,
           "Producer: makes it transactional, and names it across restarts: a new producer of the "
           "same name fences the one before, and ends its transaction. See docs/transactions.md."),
    Option("transaction.timeout.ms", "ms", 60000,
           "The coordinator aborts a transaction that takes longer, and fences its producer. At "
           "most the broker's transaction.max.timeout.ms.", low=1),
    Option("produce.path", "enum", "rdma",
           "How a producer's requests travel when the transport is not tcp: `rdma` (this process "
           "writes them into the log), `send` (Kafka's Produce requests in SENDs, into buffers of "
           "the broker that batch.bytes sizes; for comparison) or `tcp`.",
           choices=("rdma", "send", "tcp")),
    Option("rdma.produce", "enum", "auto",
           "How a producer writes over RDMA: `exclusive` (an error while another RDMA producer "
           "has the partition), `shared` (together with others; an atomic reserves room for each "
           "request), `auto` (exclusive while alone, otherwise shared) or `off` (over TCP).",
           choices=("auto", "exclusive", "shared", "off")),
    Option("rdma.produce.atomic", "enum", "faa",
           "How shared writes reserve room: `faa` (FETCH_AND_ADD) or `cas` (COMPARE_AND_SWAP, "
           "which is repeated when another producer was faster).", choices=("faa", "cas")),
    Option("rdma.notify", "enum", "imm",
           "How a producer notifies the broker of a request that it has written: `imm` "
           "(WRITE_WITH_IMM, one work request) or `send` (a plain WRITE followed by a SEND of a "
           "notice; for comparison).", choices=("imm", "send")),
    Option("rdma.consume", "bool", True,
           "Read over RDMA. `off` reads over TCP even where a transport for RDMA works."),
    Option("compression.type", "enum", "none", "Codec of the batches that a producer writes.",
           choices=("none", "gzip", "snappy", "lz4", "zstd"), aliases=("compression.codec",)),
    Option("batch.bytes", "bytes", 1 << 20, "Target size of a batch that a producer writes.",
           low=1, high=64 << 20, aliases=("batch.size",)),
    Option("linger.ms", "ms", 0,
           "How long a record may wait for more records of its partition. With 0 it is sent at "
           "once, over RDMA as a batch of its own.", low=0, high=900_000,
           aliases=("queue.buffering.max.ms",)),
    Option("buffer.memory", "bytes", 32 << 20,
           "How many bytes of gathered records a producer may hold that are not sent or not "
           "acknowledged.", low=1024),
    Option("max.block.ms", "ms", 60000,
           "How long produce waits for room; with 0 it does not wait. When the time is over it "
           "raises BufferFullError, which is a BufferError.", low=0),
    Option("partitioner", "enum", "murmur2_random",
           "How a record's key chooses the partition: `murmur2_random` as Kafka's Java client "
           "does, `consistent_random` (CRC-32) as librdkafka does by default. With these two, "
           "records without a key fill one partition after another in runs. `murmur2` and "
           "`consistent` send all records without a key to one partition; `random` ignores keys.",
           choices=("murmur2_random", "murmur2", "consistent_random", "consistent", "random")),
    Option("send.buffer.bytes", "bytes", 16 << 20,
           "Registered memory of a producer for batches that are not acknowledged yet.",
           low=1 << 20),
    Option("max.in.flight", "int", 1024,
           "How many unacknowledged requests a producer may have on one partition.", low=1,
           high=16384, aliases=("max.in.flight.requests.per.connection",)),
    Option("spin.us", "int", 150,
           "How many microseconds a producer that waits for an acknowledgement spins before it "
           "sleeps. The default is longer than a sleeping broker needs to wake up.", low=0,
           high=1_000_000),
    Option("poll.spin.us", "int", 200,
           "For how many microseconds after the last record a waiting poll of a consumer spins, "
           "before it sleeps between looks at the log. A larger value lowers latency and costs "
           "processor time.", low=0, high=1_000_000),
    Option("delivery.timeout.ms", "ms", 120000,
           "How long a record may stay undelivered before it fails.", low=1,
           aliases=("message.timeout.ms",)),
    *REMOTE_CLIENT_ROWS,
))

SPARK = Options("Spark options", SPARK_ROWS, ignore_case=True)
ENGINE = Options("Options of the state engine", ENGINE_ROWS)
# fmt: on
