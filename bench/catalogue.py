"""The rows of `make bench`, by name.

Owns: `Row`, and `ROWS`, which names them all.  A row is a function in a rows_*.py of this folder,
``fn(seconds: float, quick: bool) -> list[dict]``; each dict is a figure with the keys of
`figures.FIGURE`, measured in the same run as the limit that it is held against.  `seconds` is about
what the whole row may take; `quick` asks for one short round that shows only that it works.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A row's name, where its function is, how many processes are at work in it (1: it is pinned),
    what it shows, the seconds that it needs before it can measure, which are taken off what it is
    given, and those that it may take beside three times what it is given."""

    name: str
    module: str
    processes: int
    help: str
    overhead_s: float = 0.0
    patience_s: float = 180.0

    @property
    def function(self) -> str:
        return self.name.replace("-", "_")


ROWS = (
    Row(
        "codec-decode",
        "rows_format",
        1,
        "record batches to Arrow, against a memcpy of the same bytes and the bare decompressors",
    ),
    Row(
        "codec-views",
        "rows_format",
        1,
        "record batches to views of them, against a memcpy and the decoder that copies values",
    ),
    Row(
        "codec-encode",
        "rows_format",
        1,
        "Arrow to record batches, against a memcpy of the same bytes and the bare compressors",
    ),
    Row(
        "state-update",
        "rows_state",
        1,
        "count and sum by key and window, beside one-thread group-bys of DuckDB and pyarrow",
    ),
    Row(
        "state-merge", "rows_state", 1, "a leader merges the delta of a helper: entries, and tuples"
    ),
    Row("shm-read", "rows_rdma", 1, "one-sided READs by size over the shm provider, beside memcpy"),
    Row(
        "channel-bandwidth",
        "rows_channel",
        2,
        "buffers of 64 KiB through a channel over shm between two processes, against memcpy",
    ),
    Row(
        "channel-latency",
        "rows_channel",
        2,
        "round trips of 64 bytes through two channels over shm, against bare shared memory",
    ),
    Row(
        "slot-poll",
        "rows_direct",
        2,
        "an empty poll: one READ of the metadata slots, with no work of the broker;"
        " then a record at a time",
    ),
    Row(
        "consume-partitions",
        "rows_consume",
        2,
        "a record in each of 1,000 partitions: CPU seconds of a consumer, against confluent-kafka",
    ),
    Row(
        "produce-rtt",
        "rows_direct",
        2,
        "one acknowledged produce at a time: median and tail, against a bare eventfd round trip",
    ),
    Row("commit", "rows_commit", 2, "a commit at a time: median and tail, over shm and over TCP"),
    Row("txn-rdma", "rows_commit", 2, "100 records over shm, from their commit until visible"),
    Row("txn-exclusive", "rows_commit", 2, "a transaction with a head held alone, beside auto"),
    Row(
        "produce-pipelined",
        "rows_direct",
        2,
        "unbatched produces under way together, one call a record, against memcpy",
    ),
    Row(
        "produce-cpu",
        "rows_produce",
        2,
        "the broker's CPU time for each committed produce of 100 bytes over shm",
    ),
    Row(
        "produce-exclusive",
        "rows_produce",
        2,
        "one exclusive producer of 32 KiB records, against memcpy, the CRC told apart",
    ),
    Row(
        "produce-rolls",
        "rows_produce",
        2,
        "the 99th percentile of an awaited produce of 4 KiB in a stream over many rolls",
    ),
    Row(
        "produce-shared",
        "rows_produce",
        6,
        "two and five producers of one partition, by FETCH_AND_ADD and COMPARE_AND_SWAP,"
        " against one alone",
    ),
    Row(
        "produce-notify",
        "rows_produce",
        2,
        "WRITE_WITH_IMM, WRITE and SEND, and the two-sided path, 32 B to 1 MiB:"
        " latency and goodput",
    ),
    Row(
        "quiet",
        "rows_log",
        2,
        "the disk that each of 1,000 partitions with one record takes;"
        " the start of a broker with 10,000",
        60,
    ),
    Row("compact", "rows_compact", 1, "a log compacted by a thread, against reads and writes", 20),
    Row("load-offsets", "rows_compact", 1, "100 MiB of commits read by a broker that starts", 30),
    Row(
        "tcp-cpu",
        "rows_tcp",
        2,
        "the broker's processor time for a Produce and a Fetch over TCP, together and one by one",
    ),
    Row(
        "idle",
        "rows_tcp",
        2,
        "the share of a core that 10,000 partitions and 1,000 connections take with nothing to do",
        60,
    ),
    Row(
        "stall",
        "rows_stall",
        4,
        "the longest wait of a pinging client while 1,000 partitions get their first record;"
        " 32 under memory pressure",
        60,
    ),
    Row(
        "push-sizes",
        "rows_cluster",
        4,
        "32-byte records pushed to two followers in WRITEs of 0 to 64 KiB: goodput, latency, CPU",
        30,
    ),
    Row(
        "push-cpu",
        "rows_cluster",
        4,
        "the leader's CPU time for a record of 100 bytes that two followers get, beyond its commit",
        10,
    ),
    Row(
        "catch-up",
        "rows_cluster",
        4,
        "1 GiB to a new replica, against memcpy, and the leader's CPU time meanwhile",
        15,
    ),
    Row(
        "cluster-idle",
        "rows_cluster",
        6,
        "CPU time of three idle brokers and their clients, ZooKeeper's told apart",
        15,
    ),
    Row(
        "workload-generate",
        "rows_workloads",
        1,
        "records of each workload's streams, against memcpy of as many bytes",
    ),
    Row(
        "slash-decode",
        "rows_workloads",
        1,
        "YSB's topic read and decoded to the columns of its query, against reading it alone",
        overhead_s=10.0,
    ),
    Row(
        "slash-engine",
        "rows_slash",
        3,
        "YSB by the state engine, at three numbers of keys: against reading and dropping by the"
        " same executors, and against partitioning by key (uppar)",
        30,
        patience_s=900.0,
    ),
    Row(
        "slash-skew",
        "rows_slash",
        3,
        "the same by the exponent of a Zipf distribution of the keys",
        30,
        patience_s=900.0,
    ),
    Row(
        "slash-ysb",
        "rows_slash_spark",
        3,
        "YSB as a stream of Spark, wrapped by slash.accelerate and unwrapped",
        60,
        patience_s=3600.0,
    ),
    Row(
        "slash-nb7",
        "rows_slash_spark",
        3,
        "NEXMark 7 as a stream of Spark, wrapped by slash.accelerate and unwrapped",
        60,
        patience_s=3600.0,
    ),
    Row(
        "slash-nb8",
        "rows_slash_spark",
        3,
        "NEXMark 8 as a stream of Spark, wrapped by slash.accelerate and unwrapped",
        60,
        patience_s=3600.0,
    ),
    Row(
        "slash-nb11",
        "rows_slash_spark",
        3,
        "NEXMark 11 as a stream of Spark, wrapped by slash.accelerate and unwrapped",
        60,
        patience_s=3600.0,
    ),
    Row(
        "slash-cm",
        "rows_slash_spark",
        3,
        "CM as a stream of Spark, wrapped by slash.accelerate and unwrapped",
        60,
        patience_s=3600.0,
    ),
    Row(
        "slash-ro",
        "rows_slash_spark",
        3,
        "RO as a stream of Spark, wrapped by slash.accelerate and unwrapped",
        60,
        patience_s=3600.0,
    ),
    Row(
        "slash-empty",
        "rows_slash_empty",
        3,
        "a batch of an accelerated query with four records, beside a bare barrier batch of Spark",
        60,
        patience_s=600.0,
    ),
    Row(
        "slash-recovery",
        "rows_recovery",
        3,
        "ten million keys back after every process was killed: loading the snapshot against reading"
        " its files, replaying against the live rate; and what snapshots cost",
        30,
        patience_s=900.0,
    ),
    Row(
        "slash-cold",
        "rows_slash_cold",
        3,
        "an accelerated query started again with ten million keys, cold and warm, beside Spark's"
        " own plan from its checkpoint",
        60,
        patience_s=3600.0,
    ),
    Row(
        "tier-copy",
        "rows_tiers",
        4,
        "sealed segments to a store, against bare pyarrow; requests; what producers wait meanwhile",
        patience_s=600.0,
    ),
    Row(
        "tier-fetch",
        "rows_tiers",
        3,
        "cold records through the broker, against bare GETs and the decode from memory",
        patience_s=600.0,
    ),
    Row(
        "tier-direct",
        "rows_tiers",
        3,
        "cold records past the broker into Arrow, against bare GETs and the decode from memory",
        patience_s=600.0,
    ),
    Row(
        "tier-tail",
        "rows_tiers",
        5,
        "produce and a consumer of the tail beside a reader of old records, against none",
        patience_s=600.0,
    ),
    Row(
        "tier-rebuild",
        "rows_tiers",
        3,
        "a broker made again from the store, with 512 MiB and 4 GiB, against a copy from a replica",
        patience_s=900.0,
    ),
    Row(
        "tier-backfill",
        "rows_backfill",
        3,
        "a Spark batch read of cold records past the broker, against hot ones, and through it",
        20,
        patience_s=900.0,
    ),
    Row("spark-read-ceiling", "rows_spark", 3, "a Spark read to noop, against ready batches", 20),
    Row("spark-pushdown", "rows_spark_pushdown", 3, "a Spark read of 1 % by a filter", 20, 900.0),
    Row("spark-values", "rows_spark_values", 3, "against from_json and from_avro", 60, 900.0),
    Row("real-time", "rows_real_time", 4, "from producer to sink in Spark's Real-Time Mode", 45),
    Row("latest-offset", "rows_source", 2, "latestOffset of 1,000 partitions, by ListOffsets", 8),
    Row("read-committed", "rows_source", 2, "a Spark task's read of committed records", 8),
    Row("spark-sink-once", "rows_spark_sink", 3, "a Spark batch write, beside at-least-once", 20),
    Row("spark-sink-micro", "rows_spark_sink", 3, "one row at a time through source and sink", 20),
    Row("attempts-join", "rows_spark_sink", 2, "a join of a batch with 3,000 open attempts"),
    Row("attempts-commit", "rows_spark_sink", 2, "the commit of a batch over 8 partitions"),
)


def find(name: str, rows: tuple[Row, ...] = ROWS) -> Row:
    """The row of that name; LookupError names the nearest."""
    by_name = {row.name: row for row in rows}
    if name in by_name:
        return by_name[name]
    near = difflib.get_close_matches(name, by_name, n=1, cutoff=0.4)
    raise LookupError(
        f"no row {name!r}; "
        + (f"did you mean {near[0]}?" if near else "`make bench-list` names them all")
    )
