"""The one table of metrics: name, unit, room and meaning, and which object reports each room.

The object that counts holds the counters.  Its `statistics()` returns a dict whose keys are exactly
the names of its room: all of them, or those of the paths that it has used.  docs/metrics.md is
written from this table.
"""

from __future__ import annotations

from dataclasses import dataclass

from kdirect.cleaner_metrics import CLEANER_ROWS
from kdirect.remote_metrics import REMOTE_ROWS
from kdirect.state_metrics import SLASH_ROWS, STATE_ROWS


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table.  `room` is a key of `ROOMS`.  A name occurs at most once in a room."""

    name: str
    unit: str
    room: str
    help: str


# The `statistics()` method that reports the metrics of each room.
ROOMS = {
    "log": "`Broker.statistics()`; sums over all partitions.",
    "broker": "`Broker.statistics()`. Those from `rdma_completions` on appear once an RDMA client "
    "has connected; they are sums over the transports.",
    "storage": "`Broker.statistics()` of a broker with tiered storage (docs/tiered-storage.md).",
    "member": "`Broker.statistics()` of a member of a cluster.",
    "rdma": "`Device.statistics()` of each transport, at either end.",
    "producer": "`Producer.statistics()`; counters of the paths that the producer has used.",
    "consumer": "`Consumer.statistics()`; counters of the paths that the consumer has used.",
    "reader": "`Reader.statistics()`, counted since the reader was created; counters of the paths "
    "that it has used. A Spark task writes them to `taskStatisticsDir`; with valueFormat also "
    "`null_value`, `wrong_size` and `not_decoded`, as a job of the state engine counts them.",
    "stream": "`FileStream.statistics()`, of one partition that is read over RDMA.",
    "fetcher": "`TcpFetcher.statistics()`, of one partition that is read over TCP.",
    "appender": "`TcpAppender.statistics()`, of one partition that is written over TCP.",
    "cluster": "`Cluster.statistics()`, of this process.",
    "connection": "`Connection.statistics()`, of one connection to a broker.",
    "state": "`StateJob.statistics()` of a job of the state engine: sums over its executors, of "
    "the batches that this start ran; a batch that ran twice counts once. `StateJob.batch_counts` "
    "has those of one batch.",
    "slash": '`query.lastProgress.observedMetrics[name]["figures"]` of a query that was wrapped by '
    "`slash.accelerate`: of one micro-batch, over all tasks. One line of the log has them too.",
    "memory": "`kdirect.blocks.statistics()`, of this process.",
}


def _cold(room: str) -> tuple[Metric, ...]:
    """Of reading objects of remote storage, past the broker."""
    return (
        Metric("client_cold_gets", "requests", room, "Ranged GETs of remote segments."),
        Metric("client_cold_bytes", "bytes", room, "Bytes that they brought."),
        Metric("client_cold_lookups", "requests", room, "Questions where remote segments lie."),
        Metric("client_cold_wait_ms", "ms", room, "Time of waiting for these GETs alone."),
    )


METRICS: tuple[Metric, ...] = (
    Metric("log_partitions", "partitions", "log", "Partitions of this broker."),
    Metric(
        "log_directories_failed",
        "directories",
        "log",
        "Log directories that have failed: their partitions are offline here.",
    ),
    Metric(
        "log_removals_waiting",
        "files",
        "log",
        "Files of deleted segments, and directories of deleted partitions, that stay on disk until "
        "log.segment.delete.delay.ms has passed.",
    ),
    Metric("moves_under_way", "partitions", "log", "Partitions that move to another directory."),
    Metric("moves_finished", "partitions", "log", "Moves between log directories that are done."),
    Metric("moves_copied_bytes", "bytes", "log", "Bytes that were copied for such moves."),
    Metric("log_segments", "segments", "log", "Segments of all partitions."),
    Metric(
        "log_requests", "requests", "log", "Requests that the kernel committed, over TCP or RDMA."
    ),
    Metric("log_batches", "batches", "log", "Record batches committed."),
    Metric("log_bytes", "bytes", "log", "Bytes of record batches committed."),
    Metric(
        "log_duplicates",
        "requests",
        "log",
        "Repeated requests of idempotent producers: answered, but not appended again.",
    ),
    Metric(
        "log_refused",
        "requests",
        "log",
        "Requests that the kernel refused: corrupt, too large or out of sequence.",
    ),
    Metric(
        "log_commit_runs",
        "runs",
        "log",
        "Times that the kernel's lock was taken to commit. A run commits all waiting requests.",
    ),
    Metric(
        "log_slot_updates",
        "updates",
        "log",
        "Times that the metadata slots of a head were updated.",
    ),
    Metric("log_producers", "producers", "log", "Idempotent producers that the log remembers."),
    Metric("log_slots", "slots", "log", "Metadata slots that the kernel keeps up to date."),
    Metric(
        "log_open_transactions",
        "transactions",
        "log",
        "Transactions that were begun in the log and have no marker yet.",
    ),
    Metric(
        "log_late_transactions",
        "partitions",
        "log",
        "Partitions with a transaction whose producer has been silent there for five minutes more"
        " than transaction.max.timeout.ms. It hangs; `kafka-transactions.sh abort` ends it.",
    ),
    Metric("log_flushes", "fsyncs", "log", "Times that a partition was flushed to disk."),
    Metric("log_rolls", "segments", "log", "Heads that were sealed and replaced."),
    Metric("log_head_growths", "steps", "log", "Times that a head was enlarged."),
    Metric(
        "log_given_back_bytes",
        "bytes",
        "log",
        "Unused bytes of heads that were freed because nothing was appended for a while.",
    ),
    Metric(
        "broker_requests",
        "requests",
        "broker",
        "Requests executed, of all APIs. RDMA reads, writes and atomics are not requests.",
    ),
    Metric(
        "broker_requests_by_api",
        "requests",
        "broker",
        "The same as a mapping from the name of the API.",
    ),
    Metric("broker_connections", "connections", "broker", "TCP connections open now."),
    Metric(
        "broker_connections_opened", "connections", "broker", "TCP connections accepted so far."
    ),
    Metric("broker_bytes_in", "bytes", "broker", "Bytes received over TCP."),
    Metric(
        "broker_bytes_out", "bytes", "broker", "Bytes of answers over TCP, including size prefixes."
    ),
    Metric(
        "broker_plain_requests",
        "requests",
        "broker",
        "Of the requests, Produce and Fetch that were answered at once by compiled code.",
    ),
    Metric(
        "broker_fetch_sessions",
        "sessions",
        "broker",
        "Sessions of clients that fetch (KIP-227) which are kept now.",
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
        "Bytes that requests in progress hold now, beyond the first buffer of each connection.",
    ),
    Metric(
        "broker_request_waits",
        "events",
        "broker",
        "Times that the broker paused reading a connection because of queued.max.request.bytes.",
    ),
    Metric(
        "broker_cold_fetches",
        "requests",
        "broker",
        "Fetches of records that were not in memory and that a thread had to read first.",
    ),
    Metric(
        "broker_flushes",
        "fsyncs",
        "broker",
        "Group commits: fsyncs that acknowledged all waiting producers together.",
    ),
    Metric("broker_topics", "topics", "broker", "Topics, including the broker's own."),
    Metric("broker_groups", "groups", "broker", "Consumer groups known."),
    Metric(
        "rdma_access_requests",
        "requests",
        "broker",
        "Requests over TCP to open a queue pair and to get or release access.",
    ),
    Metric(
        "rdma_clients_cut",
        "clients",
        "broker",
        "Queue pairs that the broker closed because their client broke the protocol.",
    ),
    Metric("rdma_grants", "files", "broker", "Files that clients may read or write over RDMA now."),
    Metric(
        "rdma_recalls",
        "events",
        "broker",
        "Times that an exclusive producer was asked to release its head so that it can be shared.",
    ),
    Metric("rdma_exclusive_heads", "heads", "broker", "Heads that were granted to one producer."),
    Metric(
        "rdma_shared_heads",
        "heads",
        "broker",
        "Heads that were granted to any number of producers.",
    ),
    Metric(
        "rdma_heads_cut",
        "heads",
        "broker",
        "Heads that were cut at their last commit: after a hole, damage, or for lack of room.",
    ),
    Metric(
        "rdma_heads_ahead",
        "heads",
        "broker",
        "Files of the next head that were granted while the producer filled the current one.",
    ),
    Metric(
        "rdma_heads_fenced",
        "heads",
        "broker",
        "Heads that a producer did not leave in time; the log continued in a new file.",
    ),
    Metric(
        "rdma_completions",
        "completions",
        "broker",
        "Completions that the produce workers took: requests, and receives that were flushed.",
    ),
    Metric(
        "rdma_polls",
        "polls",
        "broker",
        "Polls that returned completions; one poll returns up to 64.",
    ),
    Metric(
        "rdma_worker_sleeps",
        "sleeps",
        "broker",
        "Times that a produce worker slept because there were no completions.",
    ),
    Metric(
        "rdma_commits",
        "requests",
        "broker",
        "Produce requests committed over RDMA, including the broker's own on shared heads.",
    ),
    Metric("rdma_commit_bytes", "bytes", "broker", "Their bytes."),
    Metric(
        "rdma_produce_errors",
        "requests",
        "broker",
        "Produce requests over RDMA that the kernel refused; duplicates do not count.",
    ),
    Metric(
        "rdma_own_requests",
        "requests",
        "broker",
        "Appends of Kafka clients to a head that RDMA producers share; each reserves its place.",
    ),
    Metric("rdma_commit_slots", "slots", "broker", "Members of groups that commit over RDMA."),
    Metric("rdma_offset_commits", "requests", "broker", "Commits of offsets over RDMA."),
    Metric(
        "rdma_offset_commits_deferred",
        "requests",
        "broker",
        "Those of them that the event loop appended, because the produce worker could not.",
    ),
    Metric(
        "rdma_offset_commit_errors",
        "requests",
        "broker",
        "Commits of offsets over RDMA that were refused at once for what they said.",
    ),
    Metric("rdma_acks", "entries", "broker", "Acknowledgements and notices sent to producers."),
    Metric("rdma_ack_writes", "requests", "broker", "WRITEs that carried them."),
    Metric(
        "rdma_head_aborts",
        "heads",
        "broker",
        "Heads that a produce worker aborted: after a hole, after damage, or for lack of room.",
    ),
    Metric("rdma_produce_heads", "heads", "broker", "Heads that producers write over RDMA now."),
    Metric(
        "rdma_produce_grants",
        "grants",
        "broker",
        "Producers with access to such a head, counted once for each head.",
    ),
    Metric(
        "rdma_peers",
        "queue pairs",
        "broker",
        "Queue pairs of RDMA clients open now, including those of consumers.",
    ),
    Metric("replicas", "partitions", "member", "Partitions of which this broker keeps a replica."),
    Metric("replicas_led", "partitions", "member", "Those that it leads (Kafka: LeaderCount)."),
    Metric(
        "replicas_under_replicated",
        "partitions",
        "member",
        "Those that it leads with fewer replicas in sync than they have (Kafka: "
        "UnderReplicatedPartitions). Alert on it if it stays above 0.",
    ),
    Metric(
        "replicas_under_min_in_sync",
        "partitions",
        "member",
        "Those that it leads with fewer replicas in sync than min.insync.replicas, so that "
        "acks=all is refused (Kafka: UnderMinIsrPartitionCount).",
    ),
    Metric(
        "replicas_max_lag",
        "records",
        "member",
        "By how many records the slowest follower lags in any partition that this broker "
        "leads (Kafka: MaxLag).",
    ),
    Metric(
        "replicas_in_sync_shrinks",
        "events",
        "member",
        "Times that a replica left those in sync, in partitions that this broker led (Kafka: "
        "IsrShrinksPerSec).",
    ),
    Metric(
        "replicas_in_sync_expansions",
        "events",
        "member",
        "Times that a replica came back into those in sync (Kafka: IsrExpandsPerSec).",
    ),
    Metric(
        "replicas_fetch_requests",
        "requests",
        "member",
        "Requests of followers for records, over TCP.",
    ),
    Metric("replicas_sent_bytes", "bytes", "member", "Bytes of record batches that answered them."),
    Metric(
        "replicas_fetched_bytes",
        "bytes",
        "member",
        "Bytes of record batches that this broker copied from leaders over TCP.",
    ),
    Metric(
        "replicas_pulled_bytes",
        "bytes",
        "member",
        "Bytes of record batches in sealed segments that this broker has READ from leaders.",
    ),
    Metric(
        "replicas_pushed",
        "partitions",
        "member",
        "Replicas of other brokers into whose files this broker writes, as their leader.",
    ),
    Metric(
        "replicas_pushed_bytes",
        "bytes",
        "member",
        "Bytes of record batches that it has written there.",
    ),
    Metric(
        "replicas_pushed_here",
        "partitions",
        "member",
        "Replicas of this broker that their leaders write; the others fetch.",
    ),
    Metric(
        "replicas_push_refusals",
        "events",
        "member",
        "Times that a follower refused what this broker had written, as damaged or out of order.",
    ),
    Metric(
        "replicas_push_links",
        "queue pairs",
        "member",
        "Queue pairs with other brokers for replication, of both directions.",
    ),
    Metric(
        "replicas_push_links_cut",
        "events",
        "member",
        "Those that broke, or were cut because the other broker misbehaved.",
    ),
    Metric(
        "replicas_push_fallbacks",
        "events",
        "member",
        "Times that a replica of this broker went back to Fetch, or stayed with it, although its "
        "leader offered to write; the log says why.",
    ),
    Metric(
        "replicas_fetch_failures",
        "events",
        "member",
        "Times that copying from a leader was interrupted.",
    ),
    Metric(
        "controller_active",
        "brokers",
        "member",
        "1 if this broker is the controller, else 0; the sum over a cluster is 1 (Kafka: "
        "ActiveControllerCount).",
    ),
    Metric(
        "controller_offline_partitions",
        "partitions",
        "member",
        "Partitions without a leader, told by the controller; 0 at all other brokers (Kafka: "
        "OfflinePartitionsCount). Alert on it.",
    ),
    Metric(
        "controller_elections",
        "elections",
        "member",
        "Leaders that were elected while this broker was controller (Kafka: "
        "LeaderElectionRateAndTimeMs).",
    ),
    Metric(
        "controller_unclean_elections",
        "elections",
        "member",
        "Those among them that lost acknowledged records (Kafka: UncleanLeaderElectionsPerSec).",
    ),
    Metric("reads", "requests", "rdma", "READs that this device executed."),
    Metric("read_bytes", "bytes", "rdma", "Their bytes."),
    Metric(
        "writes",
        "requests",
        "rdma",
        "WRITEs that this device executed, with or without immediate data.",
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
    Metric("rdma_bytes", "bytes", "producer", "Bytes of their record batches."),
    Metric("rdma_requests", "requests", "producer", "Requests that carried them."),
    Metric(
        "rdma_files_ahead",
        "files",
        "producer",
        "Segments that a producer continued in without a pause because they were granted ahead.",
    ),
    Metric("tcp_records", "records", "producer", "Records of a producer sent over TCP."),
    Metric("tcp_bytes", "bytes", "producer", "Bytes of their record batches."),
    Metric("tcp_requests", "requests", "producer", "Requests that carried them."),
    Metric(
        "send_records",
        "records",
        "producer",
        "Records of a producer sent in SENDs (`produce.path=send`).",
    ),
    Metric("send_bytes", "bytes", "producer", "Bytes of their record batches."),
    Metric("send_requests", "requests", "producer", "Requests that carried them."),
    Metric(
        "paths",
        "partitions",
        "producer",
        "No number, but how each partition that the producer has written is written now: a mapping "
        "from `TopicPartition` to `exclusive`, `shared`, `two-sided`, `tcp`, `lost` or `idle`.",
    ),
    Metric(
        "waiting_records",
        "records",
        "producer",
        "Records that a producer has gathered and not sent yet.",
    ),
    Metric(
        "in_flight_records",
        "records",
        "producer",
        "Records that a producer has sent and that are not acknowledged yet.",
    ),
    Metric("failed_records", "records", "producer", "Records that a producer could not deliver."),
    Metric(
        "waiting_reports",
        "reports",
        "producer",
        "Delivery reports that no call has dispatched yet.",
    ),
    Metric("messages", "records", "consumer", "Records that a consumer handed out one by one."),
    Metric("reads", "requests", "consumer", "Data READs of a consumer."),
    Metric("read_bytes", "bytes", "consumer", "Their bytes."),
    Metric("read_wait_us", "us", "consumer", "Time of waiting for their completions."),
    Metric(
        "slot_reads",
        "requests",
        "consumer",
        "READs of a consumer's metadata slots; one READ covers all slots.",
    ),
    Metric("slot_read_bytes", "bytes", "consumer", "Their bytes."),
    Metric(
        "torn_slot_reads",
        "requests",
        "consumer",
        "Slot READs repeated because the slot was being updated.",
    ),
    Metric(
        "aborted_reads",
        "requests",
        "consumer",
        "READs of lists of aborted transactions, with read_committed.",
    ),
    Metric("aborted_batches", "batches", "consumer", "Batches that it left out by these lists."),
    Metric(
        "access_requests", "requests", "consumer", "Requests of a consumer for access to files."
    ),
    Metric("buffer_bytes", "bytes", "consumer", "READ buffers that a consumer holds."),
    Metric("fetches", "requests", "consumer", "Fetches of a consumer over TCP."),
    Metric("fetched_bytes", "bytes", "consumer", "Bytes of the whole batches that they returned."),
    Metric(
        "fetch_partitions",
        "partitions",
        "consumer",
        "Partitions that these Fetches named, counted in each Fetch.",
    ),
    Metric(
        "rebalances", "events", "consumer", "Assignments that a consumer received from its group."
    ),
    Metric("direct_commits", "requests", "consumer", "Commits of offsets that went over RDMA."),
    *_cold("consumer"),
    Metric("reads", "requests", "reader", "Data READs of a reader."),
    Metric("read_bytes", "bytes", "reader", "Their bytes."),
    Metric(
        "read_wait_us", "us", "reader", "Time of waiting for the completions of its data READs."
    ),
    Metric("slot_reads", "requests", "reader", "READs of its metadata slots."),
    Metric("slot_read_bytes", "bytes", "reader", "Their bytes."),
    Metric(
        "torn_slot_reads",
        "requests",
        "reader",
        "Slot READs repeated because the slot was being updated.",
    ),
    Metric(
        "aborted_reads",
        "requests",
        "reader",
        "READs of lists of aborted transactions, with read_committed.",
    ),
    Metric("aborted_batches", "batches", "reader", "Batches that it left out by these lists."),
    Metric("access_requests", "requests", "reader", "Its requests for access to files."),
    Metric(
        "buffer_bytes",
        "bytes",
        "reader",
        "How much its READ buffer has grown since the reader was created.",
    ),
    Metric(
        "fetched_bytes",
        "bytes",
        "reader",
        "Bytes of the whole batches that its Fetches over TCP returned.",
    ),
    Metric("fetch_wait_us", "us", "reader", "Time of waiting for the answers of these Fetches."),
    Metric("pause_us", "us", "reader", "Time of waiting for records that were not readable yet."),
    *_cold("reader"),
    Metric("reads", "requests", "stream", "Data READs."),
    Metric("read_bytes", "bytes", "stream", "Their bytes."),
    Metric("read_wait_us", "us", "stream", "Time of waiting for their completions."),
    Metric("read_size", "bytes", "stream", "Size of the next data READ."),
    Metric("buffer_bytes", "bytes", "stream", "Size of its READ buffer."),
    Metric("reads", "requests", "fetcher", "Fetches."),
    Metric("read_bytes", "bytes", "fetcher", "Bytes of the whole batches that they returned."),
    Metric("retries", "requests", "fetcher", "Fetches that were repeated."),
    Metric("batches", "requests", "appender", "Appends acknowledged."),
    Metric("written_bytes", "bytes", "appender", "Their bytes."),
    Metric(
        "retries",
        "events",
        "appender",
        "Times that unacknowledged requests had to be sent again.",
    ),
    Metric("in_flight", "requests", "appender", "Appends submitted and not answered."),
    Metric("connects", "connections", "cluster", "Connections opened so far."),
    Metric(
        "metadata_refreshes",
        "requests",
        "cluster",
        "Requests for the list of brokers and partitions.",
    ),
    Metric("connections", "connections", "cluster", "Shared connections open now."),
    Metric(
        "idle_connections",
        "connections",
        "cluster",
        "Open connections that are leased to one caller at a time and wait for the next.",
    ),
    Metric("requests", "requests", "connection", "Requests sent."),
    Metric("responses", "requests", "connection", "Answers received."),
    Metric("bytes_sent", "bytes", "connection", "Bytes of requests."),
    Metric("bytes_received", "bytes", "connection", "Bytes of answers."),
    Metric("in_flight", "requests", "connection", "Requests not answered yet."),
    Metric(
        "abandoned",
        "requests",
        "connection",
        "Requests that timed out and whose answer has not arrived yet.",
    ),
    *(Metric(name, unit, "state", help) for name, unit, help in STATE_ROWS),
    *(Metric(name, unit, "slash", help) for name, unit, help in SLASH_ROWS),
    Metric(
        "block_live_bytes",
        "bytes",
        "memory",
        "Memory in use for decoded batches, GETs and parts of uploads.",
    ),
    Metric("block_retained_bytes", "bytes", "memory", "Memory kept for the next ones."),
    *(Metric(name, unit, "storage", help) for name, unit, help in REMOTE_ROWS),
    *(Metric(name, unit, "broker", help) for name, unit, help in CLEANER_ROWS),
)


def names(room: str | None = None) -> frozenset[str]:
    """Names of all metrics, or of those in one room."""
    return frozenset(m.name for m in METRICS if room is None or m.room == room)
