"""The one table of metrics: (name, unit, room, meaning), and where the counters of each room are to
be had.

Counters live in the object that counts.  Its `statistics()` returns a dict keyed by exactly the
names of its room: all of them, or those of the paths that it has used.  docs/metrics.md is written
from this table.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """A row.  `room` is a key of `ROOMS`; a name may be there once in each."""

    name: str
    unit: str
    room: str
    help: str


# Whose `statistics()` has the metrics of a room.
ROOMS = {
    "log": "`Broker.statistics()`; sums over the partitions there are.",
    "broker": "`Broker.statistics()`. Those from `rdma_completions` on are there once an RDMA client has connected, and are sums over "
    "the transports.",
    "rdma": "`Device.statistics()` of each transport, at either end.",
    "producer": "`Producer.statistics()`; of the paths that it has used.",
    "consumer": "`Consumer.statistics()`; of the paths that it has used.",
    "reader": "`Reader.statistics()`, since the reader was made; of the paths that it has used. A task of Spark writes them to "
    "`taskStatisticsDir`.",
    "stream": "`FileStream.statistics()`, of one partition that is read over RDMA.",
    "fetcher": "`TcpFetcher.statistics()`, of one partition that is read over TCP.",
    "appender": "`TcpAppender.statistics()`, of one partition that is written over TCP.",
    "cluster": "`Cluster.statistics()`, of this process.",
    "connection": "`Connection.statistics()`, of one connection to a broker.",
    "memory": "`kdirect.format.blocks.statistics()`, of this process.",
}

METRICS: tuple[Metric, ...] = (
    Metric("log_partitions", "partitions", "log", "Partitions of this broker."),
    Metric("log_segments", "segments", "log", "Segments of all partitions."),
    Metric(
        "log_requests", "requests", "log", "Requests committed by the kernel, over TCP or RDMA."
    ),
    Metric("log_batches", "batches", "log", "Record batches committed."),
    Metric("log_bytes", "bytes", "log", "Bytes of record batches committed."),
    Metric(
        "log_duplicates",
        "requests",
        "log",
        "Repetitions of idempotent producers, answered and not appended.",
    ),
    Metric(
        "log_refused",
        "requests",
        "log",
        "Requests refused by the kernel: corrupt, too large, out of sequence.",
    ),
    Metric(
        "log_commit_runs",
        "runs",
        "log",
        "Times that the kernel's lock was taken to commit; a run commits all requests that wait.",
    ),
    Metric(
        "log_slot_updates",
        "updates",
        "log",
        "Times that the metadata slots of a head were brought up to date.",
    ),
    Metric("log_producers", "producers", "log", "Idempotent producers remembered."),
    Metric("log_slots", "slots", "log", "Metadata slots kept current."),
    Metric("log_flushes", "fsyncs", "log", "Times that a partition was put on disk."),
    Metric("log_rolls", "segments", "log", "Heads sealed and replaced."),
    Metric("log_head_growths", "steps", "log", "Times that more of a head was allocated."),
    Metric(
        "log_given_back_bytes",
        "bytes",
        "log",
        "Bytes of heads that were freed because nothing was appended for a while.",
    ),
    Metric(
        "broker_requests",
        "requests",
        "broker",
        "Requests executed, of all APIs; none of RDMA reads, writes and atomics.",
    ),
    Metric(
        "broker_requests_by_api", "requests", "broker", "The same by name of the API: a mapping."
    ),
    Metric("broker_connections", "connections", "broker", "TCP connections open now."),
    Metric(
        "broker_connections_opened", "connections", "broker", "TCP connections accepted so far."
    ),
    Metric("broker_bytes_in", "bytes", "broker", "Bytes received over TCP."),
    Metric(
        "broker_bytes_out", "bytes", "broker", "Bytes of answers over TCP, size prefixes included."
    ),
    Metric("broker_appends", "requests", "broker", "Appends to a partition by Produce requests."),
    Metric("broker_append_bytes", "bytes", "broker", "Their bytes."),
    Metric(
        "broker_append_errors",
        "requests",
        "broker",
        "Appends by Produce requests that were refused or failed.",
    ),
    Metric(
        "broker_fetch_waits",
        "requests",
        "broker",
        "Fetches that found too little and waited for records.",
    ),
    Metric(
        "broker_request_bytes",
        "bytes",
        "broker",
        "Bytes that requests under way hold now, beyond the first buffer of each connection.",
    ),
    Metric(
        "broker_request_waits",
        "events",
        "broker",
        "Times that a connection was not read from because of queued.max.request.bytes.",
    ),
    Metric(
        "broker_cold_fetches",
        "requests",
        "broker",
        "Fetches of records that were not in memory: a thread read them first.",
    ),
    Metric(
        "broker_flushes",
        "fsyncs",
        "broker",
        "Group commits: fsyncs that producers waited for together.",
    ),
    Metric("broker_topics", "topics", "broker", "Topics, the broker's own included."),
    Metric("broker_groups", "groups", "broker", "Consumer groups known."),
    Metric(
        "rdma_access_requests",
        "requests",
        "broker",
        "Requests over TCP to open a queue pair, and to get or give back access.",
    ),
    Metric(
        "rdma_clients_cut",
        "clients",
        "broker",
        "Queue pairs that the broker ended because their client broke the protocol.",
    ),
    Metric("rdma_grants", "files", "broker", "Files that clients may read or write over RDMA now."),
    Metric(
        "rdma_recalls",
        "events",
        "broker",
        "Times that an exclusive producer was asked to give its head back, because it is to be shared.",
    ),
    Metric("rdma_exclusive_heads", "heads", "broker", "Heads that were given to one producer."),
    Metric(
        "rdma_shared_heads", "heads", "broker", "Heads that were given to any number of producers."
    ),
    Metric(
        "rdma_heads_cut",
        "heads",
        "broker",
        "Heads that were ended at their last commit: after a hole, damage, or for want of room.",
    ),
    Metric(
        "rdma_heads_ahead",
        "heads",
        "broker",
        "Files of the next head that were granted to a producer while it filled the present one.",
    ),
    Metric(
        "rdma_heads_fenced",
        "heads",
        "broker",
        "Heads that a producer did not leave in time, so that the log went on in a fresh file.",
    ),
    Metric(
        "rdma_completions",
        "completions",
        "broker",
        "Completions that the produce workers took: requests, and receives that ended with their queue pair.",
    ),
    Metric("rdma_polls", "polls", "broker", "Polls that brought them; a poll brings up to 64."),
    Metric(
        "rdma_worker_sleeps",
        "sleeps",
        "broker",
        "Times that a produce worker slept for want of completions.",
    ),
    Metric(
        "rdma_commits",
        "requests",
        "broker",
        "Produce requests over RDMA committed, the broker's own on shared heads included.",
    ),
    Metric("rdma_commit_bytes", "bytes", "broker", "Their bytes."),
    Metric(
        "rdma_produce_errors",
        "requests",
        "broker",
        "Produce requests over RDMA that the kernel refused; repetitions are none.",
    ),
    Metric(
        "rdma_own_requests",
        "requests",
        "broker",
        "Appends of Kafka clients that took their turn on a head which producers share.",
    ),
    Metric("rdma_acks", "entries", "broker", "Acknowledgements and notices to producers."),
    Metric("rdma_ack_writes", "requests", "broker", "WRITEs that carried them."),
    Metric(
        "rdma_head_aborts",
        "heads",
        "broker",
        "Heads that a produce worker aborted: after a hole, damage, or for want of room.",
    ),
    Metric("rdma_produce_heads", "heads", "broker", "Heads that producers write over RDMA now."),
    Metric(
        "rdma_produce_grants",
        "grants",
        "broker",
        "Producers that have access to one, each counted once a head.",
    ),
    Metric(
        "rdma_peers",
        "queue pairs",
        "broker",
        "Queue pairs of RDMA clients open now, those of clients that read included.",
    ),
    Metric("reads", "requests", "rdma", "READs that this device executed."),
    Metric("read_bytes", "bytes", "rdma", "Their bytes."),
    Metric(
        "writes",
        "requests",
        "rdma",
        "WRITEs that this device executed, with immediate data or without.",
    ),
    Metric("write_bytes", "bytes", "rdma", "Their bytes."),
    Metric("sends", "requests", "rdma", "SENDs that this device executed."),
    Metric(
        "receives",
        "requests",
        "rdma",
        "Receives that completed: SENDs and immediate data from peers.",
    ),
    Metric(
        "atomics",
        "requests",
        "rdma",
        "FETCH_AND_ADDs and COMPARE_AND_SWAPs that this device executed.",
    ),
    Metric("wakeups", "events", "rdma", "Times that this device woke a sleeping peer."),
    Metric("rdma_records", "records", "producer", "Records of a producer acknowledged over RDMA."),
    Metric("rdma_bytes", "bytes", "producer", "Their record batches."),
    Metric("rdma_requests", "requests", "producer", "The requests they came in."),
    Metric(
        "rdma_files_ahead",
        "files",
        "producer",
        "Segments that a producer went on in without a pause, because they were granted ahead.",
    ),
    Metric("tcp_records", "records", "producer", "Records of a producer sent over TCP."),
    Metric("tcp_bytes", "bytes", "producer", "Their record batches."),
    Metric("tcp_requests", "requests", "producer", "The requests they came in."),
    Metric(
        "send_records",
        "records",
        "producer",
        "Records of a producer sent in SENDs (`produce.path=send`).",
    ),
    Metric("send_bytes", "bytes", "producer", "Their record batches."),
    Metric("send_requests", "requests", "producer", "The requests they came in."),
    Metric(
        "waiting_records",
        "records",
        "producer",
        "Records of a producer that are gathered and not sent.",
    ),
    Metric(
        "in_flight_records", "records", "producer", "Records of a producer sent and not answered."
    ),
    Metric(
        "failed_records", "records", "producer", "Records of a producer that were not delivered."
    ),
    Metric(
        "waiting_reports", "reports", "producer", "Delivery reports that no poll has served yet."
    ),
    Metric("messages", "records", "consumer", "Records a consumer handed out one by one."),
    Metric("reads", "requests", "consumer", "Data READs of a consumer."),
    Metric("read_bytes", "bytes", "consumer", "Their bytes."),
    Metric(
        "slot_reads",
        "requests",
        "consumer",
        "READs of a consumer's metadata slots, all at once each time.",
    ),
    Metric("slot_read_bytes", "bytes", "consumer", "Their bytes."),
    Metric(
        "torn_slot_reads",
        "requests",
        "consumer",
        "Slot READs repeated because an update was under way.",
    ),
    Metric(
        "access_requests", "requests", "consumer", "Requests of a consumer for access to files."
    ),
    Metric("buffer_bytes", "bytes", "consumer", "READ buffers that a consumer holds."),
    Metric("fetches", "requests", "consumer", "Fetches of a consumer over TCP."),
    Metric("fetched_bytes", "bytes", "consumer", "Whole batches they brought."),
    Metric(
        "fetch_partitions",
        "partitions",
        "consumer",
        "Partitions they named, each time it was named.",
    ),
    Metric("rebalances", "events", "consumer", "Assignments that a consumer got from its group."),
    Metric("reads", "requests", "reader", "Data READs of a reader."),
    Metric("read_bytes", "bytes", "reader", "Their bytes."),
    Metric("slot_reads", "requests", "reader", "READs of its metadata slots."),
    Metric("slot_read_bytes", "bytes", "reader", "Their bytes."),
    Metric(
        "torn_slot_reads",
        "requests",
        "reader",
        "Slot READs repeated because an update was under way.",
    ),
    Metric("access_requests", "requests", "reader", "Its requests for access to files."),
    Metric(
        "buffer_bytes",
        "bytes",
        "reader",
        "By how much its READ buffer has grown since it was made.",
    ),
    Metric("fetched_bytes", "bytes", "reader", "Whole batches that its Fetches over TCP brought."),
    Metric("reads", "requests", "stream", "Data READs."),
    Metric("read_bytes", "bytes", "stream", "Their bytes."),
    Metric("read_size", "bytes", "stream", "Size of the next one."),
    Metric("buffer_bytes", "bytes", "stream", "The READ buffer that it holds."),
    Metric("reads", "requests", "fetcher", "Fetches."),
    Metric("read_bytes", "bytes", "fetcher", "Whole batches they brought."),
    Metric("retries", "requests", "fetcher", "Fetches that were repeated."),
    Metric("batches", "requests", "appender", "Appends acknowledged."),
    Metric("written_bytes", "bytes", "appender", "Their bytes."),
    Metric(
        "retries",
        "events",
        "appender",
        "Times that what was not acknowledged was to be sent again.",
    ),
    Metric("in_flight", "requests", "appender", "Appends taken and not answered."),
    Metric("connects", "connections", "cluster", "Connections opened so far."),
    Metric(
        "metadata_refreshes",
        "requests",
        "cluster",
        "Times that the brokers and partitions were asked for.",
    ),
    Metric("connections", "connections", "cluster", "Connections open now that callers share."),
    Metric(
        "idle_connections",
        "connections",
        "cluster",
        "Connections of one caller at a time that wait for the next.",
    ),
    Metric("requests", "requests", "connection", "Requests sent."),
    Metric("responses", "requests", "connection", "Answers received."),
    Metric("bytes_sent", "bytes", "connection", "Bytes of requests."),
    Metric("bytes_received", "bytes", "connection", "Bytes of answers."),
    Metric("in_flight", "requests", "connection", "Requests without an answer."),
    Metric(
        "abandoned",
        "requests",
        "connection",
        "Requests that timed out, whose answer is still to come.",
    ),
    Metric("block_live_bytes", "bytes", "memory", "Memory of decoded batches in use."),
    Metric("block_retained_bytes", "bytes", "memory", "Memory kept for the next ones."),
)


def names(room: str | None = None) -> frozenset[str]:
    """Names of all metrics, or of one room's."""
    return frozenset(m.name for m in METRICS if room is None or m.room == room)
