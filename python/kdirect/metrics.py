"""The one table of metrics: (name, label, unit, meaning).  Counters live in the object that counts;
`statistics()` methods return dicts keyed by these names, and docs/metrics.md is written from this table.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    unit: str
    room: str
    help: str


METRICS: tuple[Metric, ...] = (
    Metric("log_partitions", "partitions", "log", "Partitions of this broker."),
    Metric("log_segments", "segments", "log", "Segments of all partitions."),
    Metric("log_requests", "requests", "log", "Requests committed by the kernel, over TCP or RDMA."),
    Metric("log_batches", "batches", "log", "Record batches committed."),
    Metric("log_bytes", "bytes", "log", "Bytes of record batches committed."),
    Metric("log_duplicates", "requests", "log", "Repetitions of idempotent producers, answered and not appended."),
    Metric("log_refused", "requests", "log", "Requests refused by the kernel: corrupt, too large, out of sequence."),
    Metric("log_producers", "producers", "log", "Idempotent producers remembered."),
    Metric("log_slots", "slots", "log", "Metadata slots kept current."),
    Metric("log_flushes", "fsyncs", "log", "Times that a partition was put on disk."),
    Metric("log_rolls", "segments", "log", "Heads sealed and replaced."),
    Metric("broker_requests", "requests", "broker", "Requests executed, of all APIs; none of RDMA reads, writes and atomics."),
    Metric("broker_requests_by_api", "requests", "broker", "The same by name of the API: a mapping."),
    Metric("broker_connections", "connections", "broker", "TCP connections open now."),
    Metric("broker_connections_opened", "connections", "broker", "TCP connections accepted so far."),
    Metric("broker_bytes_in", "bytes", "broker", "Bytes received over TCP."),
    Metric("broker_bytes_out", "bytes", "broker", "Bytes of answers over TCP, size prefixes included."),
    Metric("broker_appends", "requests", "broker", "Appends to a partition by Produce requests."),
    Metric("broker_append_bytes", "bytes", "broker", "Their bytes."),
    Metric("broker_append_errors", "requests", "broker", "Appends by Produce requests that were refused or failed."),
    Metric("broker_fetch_waits", "requests", "broker", "Fetches that found too little and waited for records."),
    Metric(
        "broker_request_bytes", "bytes", "broker", "Bytes that requests under way hold now, beyond the first buffer of each connection."
    ),
    Metric("broker_request_waits", "events", "broker", "Times that a connection was not read from because of queued.max.request.bytes."),
    Metric("broker_flushes", "fsyncs", "broker", "Group commits: fsyncs that producers waited for together."),
    Metric("broker_topics", "topics", "broker", "Topics, the broker's own included."),
    Metric("broker_groups", "groups", "broker", "Consumer groups known."),
    Metric("reads", "requests", "rdma", "READs that this device executed."),
    Metric("read_bytes", "bytes", "rdma", "Their bytes."),
    Metric("writes", "requests", "rdma", "WRITEs that this device executed, with immediate data or without."),
    Metric("write_bytes", "bytes", "rdma", "Their bytes."),
    Metric("sends", "requests", "rdma", "SENDs that this device executed."),
    Metric("receives", "requests", "rdma", "Receives that completed: SENDs and immediate data from peers."),
    Metric("atomics", "requests", "rdma", "FETCH_AND_ADDs and COMPARE_AND_SWAPs that this device executed."),
    Metric("wakeups", "events", "rdma", "Times that this device woke a sleeping peer."),
    Metric("rdma_records", "records", "client", "Records of a producer acknowledged over RDMA."),
    Metric("rdma_bytes", "bytes", "client", "Their record batches."),
    Metric("rdma_requests", "requests", "client", "The requests they came in."),
    Metric("tcp_records", "records", "client", "Records of a producer sent over TCP."),
    Metric("tcp_bytes", "bytes", "client", "Their record batches."),
    Metric("tcp_requests", "requests", "client", "The requests they came in."),
    Metric("waiting_records", "records", "client", "Records of a producer that are gathered and not sent."),
    Metric("in_flight_records", "records", "client", "Records of a producer sent and not answered."),
    Metric("failed_records", "records", "client", "Records of a producer that were not delivered."),
    Metric("waiting_reports", "reports", "client", "Delivery reports that no poll has served yet."),
    Metric("messages", "records", "client", "Records a consumer handed out one by one."),
    Metric("reads", "requests", "client", "Data READs of a consumer."),
    Metric("read_bytes", "bytes", "client", "Their bytes."),
    Metric("slot_reads", "requests", "client", "READs of a consumer's metadata slots, all at once each time."),
    Metric("slot_read_bytes", "bytes", "client", "Their bytes."),
    Metric("torn_slot_reads", "requests", "client", "Slot READs repeated because an update was under way."),
    Metric("access_requests", "requests", "client", "Requests of a consumer for access to files."),
    Metric("buffer_bytes", "bytes", "client", "READ buffers that a consumer holds."),
    Metric("fetches", "requests", "client", "Fetches of a consumer over TCP."),
    Metric("fetched_bytes", "bytes", "client", "Whole batches they brought."),
    Metric("fetch_partitions", "partitions", "client", "Partitions they named, each time it was named."),
    Metric("rebalances", "events", "client", "Assignments that a consumer got from its group."),
)


def names(room: str | None = None) -> frozenset[str]:
    """Names of all metrics, or of one room's."""
    return frozenset(m.name for m in METRICS if room is None or m.room == room)
