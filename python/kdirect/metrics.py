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
)


def names(room: str | None = None) -> frozenset[str]:
    """Names of all metrics, or of one room's."""
    return frozenset(m.name for m in METRICS if room is None or m.room == room)
