"""The rows of tiered storage in the tables of brokers, topics and clients (`options.py`).

Law: as in `options.py`, of which this is a part.  Names, defaults and refusals are those of Kafka
4.1 where it has the property.  What holds between them is checked in `kdirect.log.remote_rules`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from kdirect.errors import ConfigError
from kdirect.option_table import Option

BROKER_CREDENTIALS = "rsm.config."
_UNLIMITED = (1 << 63) - 1
_SECRET = re.compile(r"key|secret|token|password|sas", re.IGNORECASE)


def store_properties(properties: Mapping[str, Any], prefix: str) -> dict[str, str]:
    """The properties of an object store among others: those below `prefix`, without it."""
    return {n.removeprefix(prefix): str(v) for n, v in properties.items() if n.startswith(prefix)}


def _without_credentials(uri: str, name: str = "remote.log.storage.uri") -> str:
    """The URI is shown to whoever asks for the broker's properties, and in errors of clients, so it
    must hold no secret.  The error does not repeat it."""
    try:
        parts = urlsplit(uri)
        secrets = [name for name, _ in parse_qsl(parts.query) if _SECRET.search(name)]
        has_password = ":" in parts.netloc.rpartition("@")[0]
    except ValueError as e:
        raise ConfigError(
            f"option {name} is no URI: {e}",
            hint="give for example s3://bucket/logs",
        ) from None
    if not parts.scheme:
        raise ConfigError(
            f"option {name} names no kind of store",
            hint="begin it with s3://, gs://, abfs://, hdfs:// or file:///",
        )
    if has_password or secrets:
        raise ConfigError(
            f"option {name} holds credentials, which would be shown with it",
            hint="take them out and give them as rsm.config.* properties, a client's as"
            " remote.config.*, or in the environment",
        )
    return uri


# fmt: off
REMOTE_BROKER_ROWS = (
    Option("remote.log.storage.system.enable", "bool", False,
           "Switch tiered storage on: topics with remote.storage.enable=true keep what is old in "
           "the object store of remote.log.storage.uri. A broker that has such topics does not "
           "start without it."),
    Option("remote.log.storage.uri", "str", None,
           "Where the segments of tiered topics go, as pyarrow's `FileSystem.from_uri` takes it: "
           "`s3://bucket/prefix?endpoint_override=...`, `gs://`, `abfs://`, `hdfs://` or "
           "`file:///`. It may hold no credentials.", check=_without_credentials),
    Option("rsm.config.*", "str", None,
           "Properties of the object store, such as rsm.config.access_key and "
           "rsm.config.secret_key; any name below rsm.config. is accepted. Their values are "
           "secrets and are shown nowhere. Default: the environment, or the role of the machine.",
           secret=True),
    Option("log.local.retention.ms", "ms", -2,
           "How long segments of tiered topics that were copied stay on this broker, too (topic: "
           "local.retention.ms); -2: as long as the topic's retention says; -1: no limit.",
           low=-2),
    Option("log.local.retention.bytes", "bytes", -2,
           "How many bytes of a tiered partition stay on this broker; older segments go once they "
           "were copied (topic: local.retention.bytes); -2: as many as the topic's retention says; "
           "-1: no limit.", low=-2),
    Option("remote.log.manager.copier.thread.pool.size", "int", 10,
           "Threads that copy segments to the object store.", low=1),
    Option("remote.log.manager.expiration.thread.pool.size", "int", 10,
           "Threads that delete from the object store what retention no longer keeps.", low=1),
    Option("remote.log.manager.task.interval.ms", "ms", 30_000,
           "How often the broker checks for what is to be copied or deleted. A segment that was "
           "just sealed does not wait for that.", low=1),
    Option("remote.log.manager.copy.max.bytes.per.second", "long", _UNLIMITED,
           "How many bytes per second the broker copies to the object store at most.", low=1),
    Option("remote.log.manager.fetch.max.bytes.per.second", "long", _UNLIMITED,
           "How many bytes per second the broker reads from the object store at most.", low=1),
    Option("remote.log.copy.timeout.ms", "ms", 300_000,
           "A copy of which the store takes nothing for so long is given up and begun again.",
           low=1),
    Option("remote.log.storage.take.over", "str", None,
           "An incarnation of another broker, as an error of this one names it, whose objects "
           "this broker may take over: that one is gone for good, or a copy of this one. It means "
           "nothing once it was taken over from (docs/tiered-storage.md)."),
    Option("remote.orphan.age.ms", "ms", 86_400_000,
           "For twice this time a copy that was given up may still turn up in the object store; "
           "the broker looks for it, and deletes it, twice in this time. `kdirect remote sweep` "
           "deletes what no metadata names once it is this old.",
           low=1),
    Option("remote.log.reader.threads", "int", 10,
           "Threads that read from the object store for Fetch.", low=1),
    Option("remote.log.reader.max.pending.tasks", "int", 100,
           "How many such reads may wait for a thread. With more, a Fetch is answered without "
           "records.", low=1),
    Option("remote.fetch.max.wait.ms", "ms", 500,
           "How long a Fetch waits for the object store. What comes later is kept for the next "
           "one.", low=1),
    Option("remote.list.offsets.request.timeout.ms", "ms", 30_000,
           "How long a lookup by time waits for the object store.", low=1),
    Option("remote.log.index.file.cache.total.size.bytes", "bytes", 1 << 30,
           "Disk space for indexes of remote segments (remote-log-index-cache in the log "
           "directory).", low=1),
    Option("remote.log.chunk.cache.bytes", "bytes", 256 << 20,
           "Memory for records that were read from the object store, ahead of readers or after "
           "their Fetch was answered. Objects of less than 1 MiB may take twice as much.",
           low=1 << 20),
    Option("rlmm.config.remote.log.metadata.topic.num.partitions", "int", 1,
           "Partitions of __remote_log_metadata; takes effect when the first segment is copied. "
           "Kafka's default is 50, to spread the load over brokers.", low=1, high=1000),
    Option("rlmm.config.remote.log.metadata.topic.replication.factor", "int", 3,
           "Replicas of __remote_log_metadata. Without zookeeper.connect there is one, whatever is "
           "given.", low=1, high=32767),
    Option("remote.log.client.access", "enum", "broker",
           "How clients may read what is in the object store: by asking it themselves with "
           "credentials of their own (`config`), by URLs that the broker signs for one object each "
           "(`presigned`), or through the broker only (`broker`).",
           choices=("config", "presigned", "broker")),
    Option("remote.log.presign.expiry.ms", "ms", 900_000,
           "How long a URL that the broker has signed is good for.", low=1000,
           high=604_800_000),
)

# What may change while the broker runs, and then counts at once.
DYNAMIC_REMOTE = frozenset((
    "remote.fetch.max.wait.ms", "remote.list.offsets.request.timeout.ms",
    "remote.log.index.file.cache.total.size.bytes",
    "remote.log.manager.copier.thread.pool.size",
    "remote.log.manager.copy.max.bytes.per.second",
    "remote.log.manager.expiration.thread.pool.size",
    "remote.log.manager.fetch.max.bytes.per.second", "remote.log.reader.threads",
))

REMOTE_TOPIC_ROWS = (
    Option("local.retention.bytes", "bytes", None,
           "Overrides log.local.retention.bytes. Counts for tiered topics only, and may not be "
           "above retention.bytes.", low=-2, synonym="log.local.retention.bytes"),
    Option("local.retention.ms", "ms", None,
           "Overrides log.local.retention.ms. Counts for tiered topics only, and may not be above "
           "retention.ms.", low=-2, synonym="log.local.retention.ms"),
    Option("remote.copy.lag.bytes", "bytes", 0,
           "Copy a sealed segment once so many bytes of the log come after it; 0 copies at once, "
           "-1 takes local.retention.bytes. Either of this and remote.copy.lag.ms is enough; so to "
           "wait for a time alone, set this to -1 (KIP-1241).", low=-1),
    Option("remote.copy.lag.ms", "ms", 0,
           "Copy a sealed segment once its newest record is this old; 0 copies at once, -1 takes "
           "local.retention.ms. Either of this and remote.copy.lag.bytes is enough.", low=-1),
    Option("remote.log.client.access", "enum", "inherit",
           "Whether clients may read this topic's objects themselves: as the broker's property of "
           "this name says (`inherit`), or never (`broker`).", choices=("inherit", "broker")),
    Option("remote.log.copy.disable", "bool", False,
           "Copy nothing more of a tiered topic. What is in the object store stays readable, and "
           "local.retention.* must be as retention.*, or -2."),
    Option("remote.log.delete.on.disable", "bool", False,
           "Needed to take remote.storage.enable back: then what is in the object store is "
           "deleted."),
    Option("remote.storage.enable", "bool", False,
           "Keep what is old in the object store (tiered storage). The broker needs "
           "remote.log.storage.system.enable=true."),
)

REMOTE_SPARK_ROWS = (
    Option("coldReads", "enum", "auto",
           "Source: how tasks read records that are in remote storage only: from the object store "
           "(`direct`), through the broker (`broker`), or from the store if the broker allows it "
           "and the store answers (`auto`). A batch, and a stream with Trigger.AvailableNow, has a "
           "task for each object (docs/tiered-storage.md).",
           choices=("auto", "direct", "broker")),
    Option("preferCold", "bool", False,
           "Source: read from the object store also what the broker has itself, as far as it is in "
           "both, so that a backfill takes nothing of the broker's memory."),
    Option("coldBufferBytes", "bytes", 16 << 20,
           "Source: how much of the object store a task may have asked for and not used yet "
           "(cold.buffer.bytes). A store that is far away is read faster with more.", low=65536),
    Option("kdirect.remote.*", "str", None,
           "Source: the store that tasks read from (kdirect.remote.uri) and its properties, such "
           "as kdirect.remote.region. Credentials are kdirect.remote.secret.access_key and the "
           "like: Spark hides options whose names say `secret` from plans and pages. The "
           "environment of the executors, or their role, is the better place.", secret=True),
)

REMOTE_CLIENT_ROWS = (
    Option("cold.reads", "enum", "auto",
           "How records are read that are in remote storage only: by this process from the object "
           "store (`direct`), through the broker (`broker`), or by this process if the broker "
           "allows it and the store answers, else through the broker, with one warning (`auto`).",
           choices=("auto", "direct", "broker")),
    Option("prefer.cold", "bool", False,
           "Read from the object store also what the broker has itself, as far as it is in both: "
           "a reader of much old data then takes nothing of the broker's memory."),
    Option("cold.buffer.bytes", "bytes", 16 << 20,
           "How much of remote storage a reader may have asked for past the broker and not used "
           "yet, beside what it takes next of each partition. A quarter of it, 4 MiB at most, is "
           "asked for in one GET, and less where several partitions are read. A store that is far "
           "away is read faster with more.", low=65536),
    Option("remote.storage.uri", "str", None,
           "The object store that this client's credentials are for, as the broker's "
           "remote.log.storage.uri names it, with the parameters that this client needs. A broker "
           "that names another one is not believed. Needed with remote.config.*, and for a store "
           "with an endpoint of its own (docs/security.md).",
           check=lambda uri: _without_credentials(uri, "remote.storage.uri")),
    Option("remote.config.*", "str", None,
           "Properties of this client for the object store, such as remote.config.access_key and "
           "remote.config.secret_key. Their values are secrets and are shown nowhere. Default: the "
           "environment, or the role of the machine.", secret=True),
)
# fmt: on
