"""Many partitions over Kafka's Fetch: one request under way at each leader, whatever the number of partitions.

Owns: the leased connections, where each partition stands, and the bytes fetched and not yet consumed.  What is in the bytes is the
codec's business; when to give up is the consumer's.

Invariants:

- Bytes of a partition are whole batches, in order, without a gap; they are a window into the answer they came in.
- An answer for a partition that was moved meanwhile is dropped.
- A request waits at the broker (`fetch.wait.max.ms`) only when it asks for every partition of that leader that is wanted: a partition
  with bytes in hand must not wait for the others' news.

One thread at a time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kdirect.client.cluster import Cluster, Node
from kdirect.client.connection import Connection, Pending, broker_error
from kdirect.client.tcp_kernel import whole_batches
from kdirect.errors import (
    BrokerError,
    ClosedError,
    CorruptBatchError,
    KdirectError,
    OffsetOutOfRangeError,
    ProtocolError,
    UnknownTopicError,
    UnsupportedFormatError,
)
from kdirect.format import protocol
from kdirect.format.protocol import ErrorCode
from kdirect.model import TopicPartition

EMPTY = memoryview(b"")
RETRY_S = 0.1


@dataclass(slots=True, eq=False)
class _Partition:
    next_offset: int
    data: memoryview = EMPTY
    max_bytes: int = 0
    error: KdirectError | None = None
    not_before: float = 0.0
    high_watermark: int = -1
    log_start_offset: int = -1


@dataclass(slots=True, eq=False)
class _Leader:
    connection: Connection
    pending: Pending | None = None
    asked: dict[TopicPartition, int] | None = None  # partition -> offset
    until: float = 0.0


class TcpRound:
    """Reads the partitions given to `assign`.  `settings`: rows of the client table."""

    def __init__(self, cluster: Cluster, settings: Mapping[str, Any]) -> None:
        self._cluster = cluster
        self._isolation_level = int(settings["isolation.level"] == "read_committed")
        self._fetch_bytes: int = settings["fetch.max.read.bytes"]
        self._max_batch_bytes: int = settings["max.batch.bytes"]
        self._wait_ms: int = settings["fetch.wait.max.ms"]
        self._min_bytes: int = settings["fetch.min.bytes"]
        self._partitions: dict[TopicPartition, _Partition] = {}
        self._leaders: dict[Node, _Leader] = {}
        self._pid = os.getpid()
        self.fetches = self.fetched_bytes = 0

    def __contains__(self, tp: TopicPartition) -> bool:
        return tp in self._partitions

    def assign(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Read these too, from these offsets; those read already are moved there."""
        for node, leader in list(self._leaders.items()):
            if leader.pending is not None:  # it waits for others, or for an offset that is not wanted any more
                leader.connection.close()
                del self._leaders[node]
        for tp, offset in offsets.items():
            self._partitions[tp] = _Partition(offset, max_bytes=self._fetch_bytes)

    def release(self, tps: Iterable[TopicPartition]) -> None:
        for tp in tps:
            self._partitions.pop(tp, None)

    def window(self, tp: TopicPartition) -> memoryview:
        """Bytes of `tp` that were fetched and not consumed."""
        return self._partitions[tp].data

    def consume(self, tp: TopicPartition, n: int) -> None:
        partition = self._partitions[tp]
        partition.data = partition.data[n:]

    def take_error(self, tp: TopicPartition) -> None:
        """Raise what the broker answered for `tp`, once: OffsetOutOfRangeError, UnknownTopicError, CorruptBatchError (frame), ..."""
        partition = self._partitions[tp]
        error, partition.error = partition.error, None
        if error is not None:
            raise error

    def watermarks(self, tp: TopicPartition) -> tuple[int, int]:
        """(log start offset, high watermark) as of the last answer, -1 before."""
        partition = self._partitions[tp]
        return partition.log_start_offset, partition.high_watermark

    def step(self, wanted: Iterable[TopicPartition], wait_ms: float) -> bool:
        """Ask for what `wanted` lacks, and take in answers; waits up to `wait_ms` for one.  True: there is news of some partition.

        BrokerUnavailableError and its like when a leader is gone; the partitions stay where they are, and the next step tries again.
        """
        if self._pid != os.getpid():
            raise ClosedError("the consumer belongs to the process that was forked from", hint="open a new one in this process")
        now = time.monotonic()
        lacking = [
            tp
            for tp in wanted
            if not len(self._partitions[tp].data) and self._partitions[tp].error is None and self._partitions[tp].not_before <= now
        ]
        if lacking:
            self._ask(lacking, now)
        busy = [(node, leader) for node, leader in self._leaders.items() if leader.pending is not None]
        news = False
        for node, leader in busy:
            news |= self._take(node, leader, 0 if news or len(busy) > 1 else wait_ms)
        if not news and wait_ms > 0:
            if not busy:
                time.sleep(min(wait_ms, 1000 * RETRY_S) / 1000)
            elif len(busy) > 1:
                news = self._take(*busy[0], min(wait_ms, 5))
        return news

    def _ask(self, lacking: list[TopicPartition], now: float) -> None:
        for node, tps in self._by_leader(lacking, now).items():
            leader = self._leaders.get(node)
            if leader is not None and leader.pending is not None:
                continue
            if leader is None or leader.connection.closed:
                leader = self._leaders[node] = _Leader(self._cluster.lease(tps[0]))
            held = sum(len(x.data) > 0 for x in self._partitions.values())
            self._send(leader, tps, 0 if held else self._wait_ms, now)

    def _by_leader(self, tps: list[TopicPartition], now: float) -> dict[Node, list[TopicPartition]]:
        """`tps` by leader; a partition that has none, or is unknown, concerns itself alone."""
        try:
            return self._cluster.by_leader(tps)
        except (UnknownTopicError, BrokerError):
            pass
        out: dict[Node, list[TopicPartition]] = {}
        for tp in tps:
            try:
                out.setdefault(self._cluster.leader(tp), []).append(tp)
            except UnknownTopicError as e:
                self._partitions[tp].error = e
            except BrokerError as e:
                if not e.retriable:
                    self._partitions[tp].error = e
                self._partitions[tp].not_before = now + RETRY_S
        return out

    def _send(self, leader: _Leader, tps: list[TopicPartition], wait_ms: int, now: float) -> None:
        r = protocol.FetchRequest
        topics: dict[str, list[Any]] = {}
        asked = {}
        for tp in tps:
            partition = self._partitions[tp]
            asked[tp] = partition.next_offset
            topics.setdefault(tp.topic, []).append(
                r.FetchTopic.FetchPartition(
                    partition=tp.partition, fetch_offset=partition.next_offset, partition_max_bytes=partition.max_bytes
                )
            )
        message = r(
            replica_id=-1,
            max_wait_ms=wait_ms,
            min_bytes=self._min_bytes,
            max_bytes=max(self._partitions[tp].max_bytes for tp in tps) * min(len(tps), 16),
            isolation_level=self._isolation_level,
            session_id=0,
            session_epoch=-1,
            forgotten_topics_data=[],
            rack_id="",
            topics=[r.FetchTopic(topic=name, partitions=partitions) for name, partitions in topics.items()],
        )
        leader.pending = leader.connection.submit(message)
        leader.asked = asked
        leader.until = now + (self._cluster.timeout_ms + wait_ms) / 1000

    def _take(self, node: Node, leader: _Leader, wait_ms: float) -> bool:
        pending, asked = leader.pending, leader.asked
        assert pending is not None and asked is not None
        try:
            if not pending.wait(max(0.0, wait_ms)):
                if time.monotonic() < leader.until:
                    return False
            leader.pending = leader.asked = None
            answer = pending.result(0)
            if answer.error_code:
                raise broker_error(answer.error_code, f"fetch from {leader.connection.peer}")
        except KdirectError:
            self._leaders.pop(node, None)
            leader.connection.close()
            for tp in asked:
                self._cluster.forget(tp.topic)
            raise
        news = False
        for topic in answer.responses:
            for x in topic.partitions:
                tp = TopicPartition(topic.topic, x.partition_index)
                partition = self._partitions.get(tp)
                if partition is not None and asked.get(tp) == partition.next_offset:
                    news |= self._arrived(tp, partition, x)
        self.fetches += 1
        return news

    def _arrived(self, tp: TopicPartition, partition: _Partition, x: Any) -> bool:
        offset = partition.next_offset
        if x.error_code == ErrorCode.OFFSET_OUT_OF_RANGE:
            partition.error = OffsetOutOfRangeError(
                f"offset {offset} of {tp} is out of range", hint="below it retention has deleted the records, above it the topic may be new"
            )
            return True
        if x.error_code:
            if protocol.error_kind(x.error_code).retriable:
                # The leader moved, or is being elected, or the topic was deleted: metadata tells.
                self._cluster.forget(tp.topic)
                partition.not_before = time.monotonic() + RETRY_S
                return False
            partition.error = broker_error(x.error_code, f"fetch of {tp} at offset {offset}")
            return True
        partition.high_watermark, partition.log_start_offset = x.high_watermark, x.log_start_offset
        data = memoryview(x.records) if x.records is not None else EMPTY
        whole, next_offset, needed, wrong = whole_batches(data, offset)
        if whole:
            partition.data, partition.next_offset, partition.max_bytes = data[:whole], next_offset, self._fetch_bytes
            self.fetched_bytes += whole
            return True
        if wrong is not None:
            partition.error = CorruptBatchError(
                f"a batch of {tp} at offset {offset} is broken: {wrong}", hint="look at the log of its broker"
            )
            return True
        if needed > self._max_batch_bytes:
            partition.error = UnsupportedFormatError(
                f"a batch of {tp} at offset {offset} has {needed} bytes, {self._max_batch_bytes} are allowed", hint="raise max.batch.bytes"
            )
            return True
        if needed:
            if partition.max_bytes >= needed:
                partition.error = ProtocolError(
                    f"the broker cut a batch of {needed} bytes of {tp} at {len(data)} bytes", hint="use a broker of Kafka 2.1 or later"
                )
                return True
            partition.max_bytes = needed
        return False

    def close(self) -> None:
        leaders, self._leaders = self._leaders, {}
        if self._pid == os.getpid():
            for leader in leaders.values():
                if leader.pending is None:
                    self._cluster.give_back(leader.connection)
                else:
                    leader.connection.close()
        self._partitions.clear()

    def statistics(self) -> dict[str, int]:
        return {"fetches": self.fetches, "fetched_bytes": self.fetched_bytes}
