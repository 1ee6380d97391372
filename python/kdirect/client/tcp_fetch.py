"""Kafka's Fetch of one partition: the datapath of a reader where no RDMA path leads to the broker.

Owns: the requests, their retries, where the next one begins, and what the answer for a partition
means, for this fetcher and for that of many partitions (`answered`).  Bytes out are whole record
batches; what is in them is the codec's business.  Works with any Kafka broker of 2.1 or later.

Invariants:

- `TcpFetcher` returns whole batches only, in order, without a gap: its next request starts after
  the last one.
- No call waits longer than its caller says, except for the first connection of all.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from kdirect.client.aborted import without_aborted
from kdirect.client.cursor import TcpCursor
from kdirect.client.lost_broker import as_left, look_again
from kdirect.client.tcp_kernel import whole_batches
from kdirect.client.truncation import truncated
from kdirect.errors import (
    BrokerError,
    BrokerUnavailableError,
    ClosedError,
    CorruptBatchError,
    CorruptLogError,
    KdirectError,
    OffsetOutOfRangeError,
    ProtocolError,
    TimedOutError,
    UnknownTopicError,
    UnsupportedFormatError,
)
from kdirect.format import protocol
from kdirect.format.chain import DAMAGED_HINT
from kdirect.format.error_codes import ErrorCode, error_kind
from kdirect.model import TopicPartition
from kdirect.wire.backoff import Backoff
from kdirect.wire.broker_errors import broker_error, read_error
from kdirect.wire.cluster import Cluster
from kdirect.wire.connection import Connection, Pending

BY_ID = 13  # the version of Fetch from which on topics are named by their ids
DEFAULT_FETCH_BYTES = 1 << 20
DEFAULT_MAX_WAIT_MS = 500


class Fetched(NamedTuple):
    """`data` holds whole batches, or nothing.  The first may begin before the offset asked for.
    Offsets as of the answer; `aborted` are (producer id, first offset) of aborted transactions in
    `data`, for read_committed, whose batches hold no records there any more."""

    data: memoryview
    high_watermark: int
    last_stable_offset: int
    log_start_offset: int
    aborted: tuple[tuple[int, int], ...] = ()


class Asked(NamedTuple):
    """What a request names: a partition, from where on, and how much of it.  `leader_epoch`: of the
    leader that is meant, and `last_epoch`: of the batch before; -1 where that is not known."""

    tp: TopicPartition
    offset: int
    max_bytes: int
    leader_epoch: int = -1
    last_epoch: int = -1


def fetch_request(
    asked: Iterable[Asked],
    *,
    wait_ms: int,
    min_bytes: int,
    max_bytes: int,
    committed_only: bool,
    topic_id: uuid.UUID | None = None,
) -> Any:
    """A Fetch outside of any session.  `topic_id`: of the one topic that is asked for, where it is
    sent as a version from BY_ID on."""
    r = protocol.FetchRequest
    topics: dict[str, list[Any]] = {}
    for x in asked:
        topics.setdefault(x.tp.topic, []).append(
            r.FetchTopic.FetchPartition(
                partition=x.tp.partition,
                current_leader_epoch=x.leader_epoch,
                last_fetched_epoch=x.last_epoch,
                fetch_offset=x.offset,
                partition_max_bytes=x.max_bytes,
            )
        )
    return r(
        replica_id=-1,
        max_wait_ms=wait_ms,
        min_bytes=min_bytes,
        max_bytes=max_bytes,
        isolation_level=int(committed_only),
        session_id=0,
        session_epoch=-1,
        forgotten_topics_data=[],
        rack_id="",
        topics=[
            r.FetchTopic(topic=name, topic_id=topic_id, partitions=rows)
            for name, rows in topics.items()
        ],
    )


class Answered(NamedTuple):
    """What the answer for one partition brought.  `data` holds whole batches and `next_offset` is
    the one after them.  `needed`: bytes of the next batch, where the answer had no room for a whole
    one; 0 otherwise."""

    data: memoryview
    next_offset: int
    needed: int = 0
    last_epoch: int = -1  # leader epoch of the last batch of `data`


def answered(
    tp: TopicPartition,
    offset: int,
    last_epoch: int,
    partition: Any,
    asked_bytes: int,
    max_batch_bytes: int,
) -> Answered:
    """What `partition`, the part of a Fetch answer for `tp`, brought from `offset` on, of which
    `asked_bytes` were asked for; `last_epoch`: what the request said of the batch before.

    Raises OffsetOutOfRangeError (TruncatedLogError), UnknownTopicError, CorruptLogError,
    CorruptBatchError (frame), UnsupportedFormatError (a batch over `max_batch_bytes`),
    ProtocolError, or a BrokerError; what is `retriable` passes when the leader is looked up again.
    """
    if partition.error_code == ErrorCode.OFFSET_OUT_OF_RANGE:
        raise OffsetOutOfRangeError(
            f"offset {offset} of {tp} is out of range{_range_of(partition)}",
            hint="below it retention has deleted the records, above it the topic may be a new one",
        )
    if partition.error_code:
        error = read_error(partition.error_code, f"fetch of {tp} at offset {offset}")
        if not isinstance(error, CorruptLogError):
            # UNKNOWN_TOPIC_OR_PARTITION passes when only the leader has moved.
            error.retriable = error_kind(partition.error_code).retriable
        raise error
    diverging = partition.diverging_epoch
    if diverging is not None and diverging.end_offset >= 0:
        raise truncated(tp, offset, last_epoch, (diverging.epoch, diverging.end_offset))
    data = memoryview(partition.records if partition.records is not None else b"")
    whole, next_offset, needed, wrong, epoch = whole_batches(data, offset)
    if whole:
        return Answered(data[:whole], next_offset, last_epoch=epoch)
    if wrong is not None:
        raise CorruptBatchError(
            f"record batch at {tp} offset {next_offset} {wrong}", hint=DAMAGED_HINT
        )
    if needed > max_batch_bytes:
        raise UnsupportedFormatError(
            f"a batch of {tp} at offset {offset} has {needed} bytes, {max_batch_bytes} are allowed",
            hint="raise max.batch.bytes",
        )
    if 0 < needed <= asked_bytes:
        raise ProtocolError(
            f"the broker cut a batch of {needed} bytes of {tp} at {len(data)} bytes",
            hint="use a broker of Kafka 2.1 or later",
        )
    return Answered(data[:0], offset, needed)


class TcpFetcher:
    """Reads one partition from `start_offset` on.  For one thread at a time.

    It leases a connection with the first fetch, because a fetch that waits for records would hold
    up other requests, and gives it back with `close`.  With `read_ahead` the next request is under
    way while the caller works on the answer of the last; it then waits for records as long as the
    fetch before it was allowed to.
    """

    def __init__(
        self,
        cluster: Cluster,
        tp: TopicPartition,
        start_offset: int,
        *,
        isolation_level: str | None = None,
        min_bytes: int = 1,
        read_ahead: bool = False,
        topic_id: str | None = None,
    ) -> None:
        self.topic_partition = tp
        self._topic_id = topic_id
        self._id = None if topic_id is None else uuid.UUID(topic_id)
        self.asks_by_id = False  # the last request did, so its answer is of that topic
        self.next_offset = start_offset
        self._cluster = cluster
        self._isolation_level = int(
            (isolation_level or cluster.settings["isolation.level"]) == "read_committed"
        )
        self._max_batch_bytes: int = cluster.settings["max.batch.bytes"]
        self.last_epoch = -1  # leader epoch of the batch before `next_offset`; -1: not known
        self._min_bytes = min_bytes
        self._read_ahead = read_ahead
        self._connection: Connection | None = None
        self._ahead: tuple[int, int, Pending] | None = None  # offset, max_bytes, request
        self._pid = os.getpid()
        self._closed = False
        self._fetches = self._bytes = self._retries = 0

    def fetch(
        self, max_bytes: int = DEFAULT_FETCH_BYTES, max_wait_ms: int = DEFAULT_MAX_WAIT_MS
    ) -> Fetched:
        """The next batches, about `max_bytes` of them (more if one batch is larger); nothing after
        `max_wait_ms` without new records.

        OffsetOutOfRangeError, UnknownTopicError, CorruptBatchError (frame), UnsupportedFormatError
        (a batch over `max.batch.bytes`). Passing errors are waited out for `request.timeout.ms`.
        """
        self._check()
        backoff: Backoff | None = None
        while True:
            try:
                self._connect(max_bytes)
                return self._fetch(max_bytes, max_wait_ms)
            except KdirectError as error:
                e = error
                if (
                    isinstance(e, BrokerUnavailableError)
                    and self._connection is None
                    and backoff is None
                ):
                    raise  # nobody answered the first attempt to connect, which waited already
                e = as_left(self._cluster, self.topic_partition, e)
                if self._topic_id is not None and _is_unknown(e):
                    # Only its leader does not know it, or it was deleted: then this raises.
                    look_again(self._cluster, self.topic_partition, self._topic_id)
                if e.retriable or isinstance(e, ProtocolError):
                    self._drop()
                if not e.retriable or isinstance(e, TimedOutError):
                    raise
                backoff = backoff or self._cluster.backoff(self._cluster.timeout_ms)
                if not backoff.wait():
                    raise
                self._retries += 1
                self._cluster.forget(self.topic_partition.topic)

    def seek(self, offset: int) -> None:
        """Go on from `offset`."""
        if offset != self.next_offset:
            self.last_epoch = -1
        self.next_offset = offset

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            if self._connection is not None and self._pid == os.getpid():
                self._cluster.give_back(self._connection)
            self._connection = self._ahead = None

    def __enter__(self) -> TcpFetcher:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def statistics(self) -> dict[str, int]:
        return {"reads": self._fetches, "read_bytes": self._bytes, "retries": self._retries}

    def _fetch(self, max_bytes: int, max_wait_ms: int) -> Fetched:
        partition = self._response(max_bytes, max_wait_ms)
        found = answered(
            self.topic_partition,
            self.next_offset,
            self.last_epoch,
            partition,
            max_bytes,
            self._max_batch_bytes,
        )
        if found.needed:
            return self._fetch(found.needed, max_wait_ms)
        whole = len(found.data)
        if whole:
            self.last_epoch = found.last_epoch
        self.next_offset = found.next_offset
        self._fetches += 1
        self._bytes += whole
        if self._read_ahead and whole:
            self._send(max_bytes, max_wait_ms)
        aborted = (
            tuple((t.producer_id, t.first_offset) for t in partition.aborted_transactions or ())
            if self._isolation_level
            else ()
        )
        return Fetched(
            without_aborted(found.data, aborted),
            partition.high_watermark,
            partition.last_stable_offset,
            partition.log_start_offset,
            aborted,
        )

    def _connect(self, max_bytes: int) -> None:
        if self._ahead is not None and (
            self._ahead[0] != self.next_offset or self._ahead[1] < max_bytes
        ):
            self._drop()  # its answer is not wanted any more and would come first
        if self._connection is None:
            self._connection = self._cluster.lease(self.topic_partition, closest=True)

    def _response(self, max_bytes: int, max_wait_ms: int) -> Any:
        if self._ahead is None:
            self._send(max_bytes, max_wait_ms)
        ahead = self._ahead
        assert ahead is not None
        self._ahead = None
        response = ahead[2].result(self._cluster.timeout_ms + max_wait_ms)
        if response.error_code:
            raise broker_error(response.error_code, f"fetch of {self.topic_partition}")
        for topic in response.responses:
            for partition in topic.partitions:
                if (
                    self.asks_by_id or topic.topic == self.topic_partition.topic
                ) and partition.partition_index == self.topic_partition.partition:
                    return partition
        raise ProtocolError(
            f"the broker's answer to a fetch of {self.topic_partition} does not hold it",
            hint="look for the reason in the broker's log",
        )

    def _send(self, max_bytes: int, max_wait_ms: int) -> None:
        assert self._connection is not None
        tp = self.topic_partition
        epoch = self._cluster.leader_epoch(tp)
        by_id = self._id is not None and self._connection.offers(protocol.FetchRequest, BY_ID)
        message = fetch_request(
            [Asked(tp, self.next_offset, max_bytes, epoch, self.last_epoch)],
            wait_ms=max_wait_ms,
            min_bytes=self._min_bytes,
            max_bytes=max_bytes,
            committed_only=bool(self._isolation_level),
            topic_id=self._id if by_id else None,
        )
        pending = self._connection.submit(message, at=BY_ID if by_id else None)
        self.asks_by_id = by_id
        self._ahead = (self.next_offset, max_bytes, pending)

    def _drop(self) -> None:
        """Close the connection: an answer that nobody waits for any more may still come on it."""
        if self._connection is not None:
            self._connection.close()
        self._connection = self._ahead = None

    def _check(self) -> None:
        if self._closed:
            raise ClosedError(f"the reader of {self.topic_partition} is closed")
        if self._pid != os.getpid():
            raise ClosedError(
                f"the reader of {self.topic_partition} belongs to process {self._pid}",
                hint="open a new one in this process",
            )


class SinglePartition:
    """Kafka's Fetch for a reader of one partition at a time: the source of its `TcpCursor`.

    A lost connection and a leader that moved are waited out here (`TcpFetcher.fetch`), so what is
    raised has been tried for `request.timeout.ms`.
    """

    def __init__(
        self, cluster: Cluster, settings: Mapping[str, Any], topic_id: str | None = None
    ) -> None:
        self._cluster = cluster
        self._topic_id = topic_id  # of the topic that is read; None: whichever has the name
        self._isolation_level: str = settings["isolation.level"]
        self._fetch_bytes: int = settings["fetch.max.read.bytes"]
        self._max_batch_bytes: int = settings["max.batch.bytes"]
        self._fetchers: dict[TopicPartition, tuple[TcpFetcher, TcpCursor]] = {}
        self._fetched_bytes = 0
        self._waited_s = 0.0

    def assign(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Read these, from these offsets."""
        for tp, offset in offsets.items():
            self.release([tp])
            fetcher = TcpFetcher(
                self._cluster,
                tp,
                offset,
                isolation_level=self._isolation_level,
                topic_id=self._topic_id,
            )
            cursor = TcpCursor(tp, offset, self, max_batch_bytes=self._max_batch_bytes)
            self._fetchers[tp] = fetcher, cursor

    def cursor(self, tp: TopicPartition) -> TcpCursor | None:
        found = self._fetchers.get(tp)
        return found[1] if found is not None else None

    def follow(self, tp: TopicPartition, epoch: int) -> None:
        """Before what is read of `tp` is a batch of this leader epoch."""
        fetcher, cursor = self._fetchers[tp]
        fetcher.last_epoch = epoch
        cursor.follow(epoch)

    @property
    def asks_by_id(self) -> bool:
        """Were the last answers of the topic with the id that was given, whatever has its name?"""
        return all(fetcher.asks_by_id for fetcher, _ in self._fetchers.values())

    def bring(self, cursor: TcpCursor, wait_ms: float) -> bool:
        """See `TcpCursor`."""
        fetcher, _ = self._fetchers[cursor.tp]
        fetcher.seek(cursor.next_offset)
        now = self._cluster.environment.monotonic
        began = now()
        try:
            data = fetcher.fetch(self._fetch_bytes, int(wait_ms)).data
        finally:
            self._waited_s += now() - began
        self._fetched_bytes += len(data)
        cursor.arrived(data, fetcher.last_epoch)
        return len(data) > 0

    def consumed(self, cursor: TcpCursor, n: int) -> None:
        """See `TcpCursor`."""

    def release(self, tps: Iterable[TopicPartition]) -> None:
        """Stop reading these."""
        for tp in tps:
            fetcher, _ = self._fetchers.pop(tp, (None, None))
            if fetcher is not None:
                fetcher.close()

    def close(self) -> None:
        self.release(list(self._fetchers))

    def statistics(self) -> dict[str, int]:
        return {
            "fetched_bytes": self._fetched_bytes,
            "fetch_wait_us": round(self._waited_s * 1e6),
        }


def _is_unknown(error: KdirectError) -> bool:
    """Does the broker not know the topic, by its name or its id?"""
    if isinstance(error, BrokerError):
        return error.code in (ErrorCode.UNKNOWN_TOPIC_ID, ErrorCode.INCONSISTENT_TOPIC_ID)
    return isinstance(error, UnknownTopicError)


def _range_of(partition: Any) -> str:
    if partition.log_start_offset >= 0 and partition.high_watermark >= 0:
        return f": the log holds [{partition.log_start_offset}, {partition.high_watermark})"
    return ""
