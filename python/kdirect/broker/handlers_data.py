"""Requests about records: Produce; with those of `handlers_fetch` and `handlers_lookups`.

Law: record bytes are neither copied nor decoded on the event loop.  A produced batch goes from the
receive buffer to the partition, a fetched one from the segment's mapping to the socket.  Work that
needs a file, or bytes that are not in memory, runs on a thread first (`kdirect.broker.files`).  An
error concerns one partition and does not affect the others.
"""

from __future__ import annotations

import asyncio
import struct
import uuid
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from kdirect.broker.answers import Answer, later, nothing
from kdirect.broker.connection import Connection
from kdirect.broker.failures import explain
from kdirect.broker.fetch_contexts import NO_ID
from kdirect.broker.handlers_fetch import FetchHandlers
from kdirect.broker.topics import INTERNAL_TOPICS, Topic
from kdirect.errors import KdirectError, UnknownTopicError
from kdirect.format import layout
from kdirect.format import protocol as p
from kdirect.format.datapath import Produced, produce_response
from kdirect.format.error_codes import ErrorCode, error_kind
from kdirect.log.config import NEVER
from kdirect.log.kernel import UNVERIFIED_TRANSACTION
from kdirect.log.partition import Partition
from kdirect.log.record_keys import KeylessRefusal
from kdirect.model import TopicPartition

_LENGTH = struct.Struct(">I")
BY_ID = 13  # the version of Produce from which on topics are named by their ids
_NO_TRANSACTION = "the records belong to a transaction, and the request names none"

_KERNEL_MESSAGES = {
    ErrorCode.CORRUPT_MESSAGE: "a record batch is damaged: its frame or CRC does not match",
    ErrorCode.MESSAGE_TOO_LARGE: "a record batch is larger than max.message.bytes of the topic",
    ErrorCode.RECORD_LIST_TOO_LARGE: "the record batches together are larger than"
    " segment.bytes of the topic",
    ErrorCode.INVALID_RECORD: "the records are not whole record batches (v2) that this topic takes",
    ErrorCode.INVALID_TIMESTAMP: "a timestamp is further from the broker's clock than"
    " the topic allows",
    ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER: "a batch of an idempotent producer does not"
    " follow the last one",
    ErrorCode.DUPLICATE_SEQUENCE_NUMBER: "the batch was appended before, too long ago to"
    " know its offset",
    ErrorCode.INVALID_TXN_STATE: "the partition is in no transaction of this producer",
    ErrorCode.CONCURRENT_TRANSACTIONS: "the transaction before is not complete yet",
    ErrorCode.INVALID_PRODUCER_EPOCH: "a newer producer has the id, or its transaction was aborted",
    ErrorCode.NOT_ENOUGH_REPLICAS: "the coordinator of the transaction cannot be asked at present",
    ErrorCode.UNSUPPORTED_COMPRESSION_TYPE: "the codec is none of none, gzip, snappy, lz4, zstd",
}


class Arrival(NamedTuple):
    """A Produce request: where it came in, how long its producer waits for other replicas, and when
    it came."""

    connection: Connection
    timeout_ms: int
    at_ms: int


class Refused(NamedTuple):
    """What the kernel would answer to a batch of a transaction that its coordinator refuses."""

    error: int
    base_offset: int = -1
    last_offset: int = -1
    log_append_time: int = -1


class OneAppend:
    """One partition of a Produce request.  `done` is its answer, once there is one; until then
    `pending` is a future of the kernel's answer.  `gated`: the answer waits for the partition's
    acknowledgement gate, in a cluster for records below `end_offset` of `leader_epoch`.
    `transaction`: the transactional id of the request and its version, None: it has none."""

    __slots__ = (
        "acks", "done", "end_offset", "gated", "index", "leader_epoch", "partition", "pending",
        "size", "transaction",
    )  # fmt: skip

    def __init__(self, index: int, acks: int, *, done: Produced | None = None) -> None:
        self.index = index
        self.acks = acks
        self.done = done
        self.end_offset = -1
        self.leader_epoch = -1
        self.pending: asyncio.Future[Any] | None = None
        self.gated = False
        self.partition: Partition | None = None
        self.size = 0
        self.transaction: tuple[str, int] | None = None

    def waits(self, acks: int) -> bool:
        """Whether the response must wait for this partition.  With acks=0 it never waits for the
        gate."""
        return self.done is None or (self.gated and acks != 0)

    @property
    def produced(self) -> Produced:
        assert self.done is not None
        return self.done

    @property
    def start_offset(self) -> int:
        return self.produced.log_start_offset


def _keys(version: int, request: Any) -> list[str | bytes]:
    """How a Produce names its topics, and its answer does."""
    return [t.name if version < BY_ID else _id_of(t).bytes for t in request.topic_data]


def _id_of(topic: Any) -> uuid.UUID:
    """The id by which a Produce names a topic; one of zeros is read as None."""
    return topic.topic_id or NO_ID


def failed_append(index: int, code: int, message: str | None, start_offset: int = -1) -> Produced:
    return Produced(index, code, -1, -1, start_offset, message)


def _is_transactional(records: Any) -> bool:
    """Do the records begin with a batch of a transaction?"""
    if not records or len(records) < layout.BATCH_HEADER_BYTES:
        return False
    size = layout.BATCH_LENGTH_PREFIX_BYTES + _LENGTH.unpack_from(records, layout.BATCH_LENGTH)[0]
    if records[layout.BATCH_MAGIC] != layout.BATCH_MAGIC_V2 or size > len(records):
        return False  # the kernel says what it is
    low_byte = records[layout.BATCH_ATTRIBUTES + 1]
    return bool(low_byte & layout.ATTRIBUTE_TRANSACTIONAL)


def _refusal(version: int, request: Any) -> tuple[int, str] | None:
    """(error code, message) of a Produce that is refused for all its partitions, or None."""
    if version < 3:
        return (
            ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT,
            "only record batch v2 is taken (Produce version 3 and later)",
        )
    if request.acks not in (-1, 0, 1):
        return ErrorCode.INVALID_REQUIRED_ACKS, f"acks={request.acks}; use 0, 1 or all"
    if request.transactional_id is None and any(
        _is_transactional(x.records) for topic in request.topic_data for x in topic.partition_data
    ):
        # Also while it is open: its producer's id, epoch and sequence are no secret.
        return ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, _NO_TRANSACTION
    return None


class DataHandlers(FetchHandlers):
    """Handlers of requests about records.  A broker has one, used on its event loop.  `checks`:
    what asks the coordinators of transactions; set before the broker serves."""

    checks: Any = None  # a `kdirect.broker.transaction_checks.TransactionChecks`

    def produce(self, connection: Connection, header: p.RequestHeader, request: Any) -> Answer:
        """Append to each partition.  The answer comes later if an append must wait for room in the
        head, for producers before it, or for the gate."""
        refusal = _refusal(header.api_version, request)
        now_ms = self._services.environment.time_ms()
        arrival = Arrival(connection, request.timeout_ms, now_ms)
        waits = False
        topics: list[tuple[str, list[OneAppend]]] = []
        for topic in request.topic_data:
            appends = []
            name, unknown = self._name_of(header.api_version, topic)
            refused = refusal or unknown
            for data in topic.partition_data:
                if refused is not None:
                    done = failed_append(data.index, *refused)
                    append = OneAppend(data.index, request.acks, done=done)
                else:
                    append = OneAppend(data.index, request.acks)
                    if request.transactional_id is not None:
                        append.transaction = (request.transactional_id, header.api_version)
                    self._append(append, name, data.records, arrival)
                waits = waits or append.waits(request.acks)
                appends.append(append)
            topics.append((name, appends))
        if waits:
            return later(self._produce_later(connection, header.api_version, request, topics))
        keys = _keys(header.api_version, request)
        return self._acknowledge(connection, header.api_version, request.acks, topics, keys)

    def _name_of(self, version: int, topic: Any) -> tuple[str, tuple[int, str] | None]:
        """The name of a topic that a Produce names, and what is answered where nobody knows its
        id."""
        if version < BY_ID:
            return topic.name, None
        topic_id = _id_of(topic)
        known = self._services.topics.find_by_id(topic_id)
        if known is not None and not getattr(known, "deleting", False):
            return known.name, None
        text = f"there is no topic with the id {topic_id}"
        return str(topic_id), (ErrorCode.UNKNOWN_TOPIC_ID, text)

    def _append(self, append: OneAppend, name: str, records: Any, arrival: Arrival) -> None:
        """Append to one partition now, or queue the append."""
        index = append.index
        try:
            if name in INTERNAL_TOPICS:
                message = f"topic {name} is the broker's own"
                append.done = failed_append(index, ErrorCode.INVALID_TOPIC_EXCEPTION, message)
                return
            append.partition = partition = self._to_append(append, name)
            if not records:
                append.done = failed_append(index, ErrorCode.INVALID_RECORD, "there are no records")
                return
            append.size = len(records)
            if append.transaction is not None and self.checks.holds(partition, records):
                self._wait_for(append, name, records, None)
                return
            appender = self._services.appender
            result = appender.append_nowait(partition, records, arrival.at_ms)
            if result is None:
                appended = appender.append(partition, records, arrival.at_ms)
                self._wait_for(append, name, records, appended)
            elif result.error == UNVERIFIED_TRANSACTION and append.transaction is not None:
                self._wait_for(append, name, records, None)
            else:
                self._appended(append, result)
        except Exception as e:
            if append.partition is not None or not self._held(append, name, records, arrival, e):
                self._append_failed(append, name, e)

    def _wait_for(
        self, append: OneAppend, name: str, records: Any, appended: asyncio.Future[Any] | None
    ) -> None:
        """The kernel's answer comes later, by `appended`, or, None, once the coordinator of the
        transaction was asked.  A batch of a transaction whose partition is not known yet, see
        `_held`, is appended after `appended`."""
        if append.transaction is None:
            append.pending = appended
            return
        batch, held = bytes(records), append.partition is None
        verify = partial(self._verified, append, batch, append.transaction, held, appended)
        tp = TopicPartition(name, append.index)
        append.pending = self.checks.in_turn(tp, batch, verify)

    async def _verified(
        self,
        append: OneAppend,
        batch: bytes,
        transaction: tuple[str, int],
        held: bool,
        appended: asyncio.Future[Any] | None,
        before: asyncio.Future[Any] | None,
    ) -> Any:
        """The kernel's answer to batches of a transaction, which is asked about where the log has
        not been told of it; after `before`, see `TransactionChecks.in_turn`."""
        if held:
            assert appended is not None
            await appended  # until this broker leads the partition
        partition = append.partition
        assert partition is not None
        if before is not None:
            await asyncio.wait([before])
        if held or before is not None:
            now_ms = self._services.environment.time_ms()
            appended = self._services.appender.append(partition, batch, now_ms)
        if appended is not None:
            result = await appended
            if result.error != UNVERIFIED_TRANSACTION:
                return result
        name, version = transaction
        if code := await self.checks.admitted(partition, name, batch, version):
            return Refused(code)
        now_ms = self._services.environment.time_ms()
        result = await self._services.appender.append(partition, batch, now_ms)
        if result.error == UNVERIFIED_TRANSACTION:  # a marker has come since
            return Refused(ErrorCode.NOT_ENOUGH_REPLICAS)
        return result

    def _held(
        self, append: OneAppend, name: str, records: Any, arrival: Arrival, error: Exception
    ) -> bool:
        """Does an append wait until this broker leads the partition, which it cannot be made to
        because of `error`?"""
        return False

    def _to_append(self, append: OneAppend, name: str) -> Partition:
        """The partition, if records may be appended to it that wait for `append.acks`."""
        return self._services.topics.partition(name, append.index)

    def _append_failed(self, append: OneAppend, name: str, error: BaseException) -> None:
        if isinstance(error, UnknownTopicError):
            code, message = int(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION), str(error)
        else:
            self._services.counters.append_errors += 1
            code, message = explain(error, f"append to {name}-{append.index}")
        append.done = failed_append(append.index, code, message)

    def _appended(self, append: OneAppend, result: Any) -> None:
        """Turn the kernel's answer into the producer's, and wake the Fetches that wait for it."""
        services, partition = self._services, append.partition
        assert partition is not None
        start = partition.log_start_offset
        if result.error:
            services.counters.append_errors += 1
            error = result.error
            message = _KERNEL_MESSAGES.get(error)
            append.done = Produced(append.index, error, -1, -1, start, message)
            if isinstance(result, KeylessRefusal) and result.records:
                append.done = _keyless(append.done, partition.topic_partition, result)
            if error == ErrorCode.DUPLICATE_SEQUENCE_NUMBER:  # a success to its producer
                self._grown(append, partition, result, is_new=False)
            return
        services.counters.appends += 1
        services.counters.append_bytes += append.size
        self._grown(append, partition, result, is_new=True)
        append.done = Produced(
            append.index, 0, result.base_offset, result.log_append_time, start, None
        )

    # -- plain requests ----------------------------------------------------------------------------

    def plain_place(self, name: str, index: int) -> tuple[Partition, Topic] | None:
        """The partition that plain requests about it are answered from, with its topic; None where
        there is more to ask.  See `kdirect.broker.plain_requests`."""
        topic = self._services.topics.get(name)
        if topic is None or topic.internal:
            return None
        try:
            return self._services.topics.partition(name, index), topic
        except KdirectError:
            return None

    def plain_name(self, topic_id: bytes) -> str | None:
        """The name of the topic with this id, if there is one."""
        topic = self._services.topics.find_by_id(uuid.UUID(bytes=topic_id))
        return None if topic is None else topic.name

    def takes_plain_appends(self, partition: Partition) -> bool:
        """Is an append to this partition, which is free, the kernel's work alone, and is it
        acknowledged at once?  Asked when the partition's `config` has been replaced."""
        config = partition.config
        if config.looks_into_records:
            return False
        return config.flush_messages == NEVER and partition.gate.is_open

    def refused_plainly(
        self,
        connection: Connection,
        version: int,
        correlation_id: int,
        acks: int,
        partition: Partition,
        key: bytes,
        result: Any,
        size: int,
    ) -> Answer:
        """The answer to a plain Produce, `size` bytes of records, that the kernel has refused.
        `key`: the topic's name or id, as the request has it."""
        tp = partition.topic_partition
        append = OneAppend(tp.partition, acks)
        append.partition, append.size = partition, size
        self._appended(append, result)
        keys: list[str | bytes] = [tp.topic if version < BY_ID else key]
        answer = self._acknowledge(connection, version, acks, [(tp.topic, [append])], keys)
        answer.header = p.response_header(p.API_NAMES["Produce"], version, correlation_id)
        return answer

    # -- what an append waits for ------------------------------------------------------------------

    def _grown(self, append: OneAppend, partition: Partition, result: Any, *, is_new: bool) -> None:
        """The log has the records of an append: does its answer have to wait?  Those who wait for
        new ones are woken."""
        append.gated = partition.acknowledgements_wait()
        if is_new and not partition.gate.holds:
            self._services.waiters.notify(partition.topic_partition, append.size)

    async def _produce_later(
        self,
        connection: Connection,
        version: int,
        request: Any,
        topics: list[tuple[str, list[OneAppend]]],
    ) -> Answer:
        """Answer once the queued appends are done and the gate has opened."""
        for name, appends in topics:
            for append in appends:
                if append.pending is None:
                    continue
                try:
                    self._appended(append, await append.pending)
                except Exception as e:
                    self._append_failed(append, name, e)
        if request.acks != 0:
            await self._wait_for_gate(topics, request.timeout_ms)
        keys = _keys(version, request)
        return self._acknowledge(connection, version, request.acks, topics, keys)

    async def _wait_for_gate(
        self, topics: list[tuple[str, list[OneAppend]]], timeout_ms: int
    ) -> None:
        """Return once the appended records may be acknowledged (`kdirect.log.ack_gate`), or the
        flush that they wait for has failed.  `timeout_ms`: how long the producer waits for other
        replicas; the disk is waited for as long as it takes."""
        gated = [(name, x) for name, appends in topics for x in appends if x.gated]
        outcomes = await asyncio.gather(
            *(self._services.flusher.flushed(x.partition) for _, x in gated if x.partition),
            return_exceptions=True,
        )
        for (name, append), error in zip(gated, outcomes, strict=True):
            if isinstance(error, BaseException):
                code, message = explain(error, f"flush of {name}-{append.index}")
                append.done = failed_append(append.index, code, message, append.start_offset)

    def _acknowledge(
        self,
        connection: Connection,
        version: int,
        acks: int,
        topics: list[tuple[str, list[OneAppend]]],
        keys: Sequence[str | bytes],
    ) -> Answer:
        """`keys`: how the request names the topics."""
        if acks != 0:
            answers = [
                (key, [x.produced for x in appends])
                for key, (_, appends) in zip(keys, topics, strict=True)
            ]
            return self._produced(connection, version, answers)
        failed = [
            f"{name}-{x.index}: {error_kind(x.produced.error).name}"
            for name, appends in topics
            for x in appends
            if x.produced.error
        ]
        if failed:  # the only way to tell a producer that asked for no answer
            connection.close("a Produce without acknowledgement failed: " + ", ".join(failed))
        for _, appends in topics:
            for append in appends:
                if append.gated and append.partition is not None:
                    self._services.flusher.begin(append.partition)
        return nothing()

    def _produced(
        self,
        connection: Connection,
        version: int,
        answers: list[tuple[str | bytes, list[Produced]]],
    ) -> Answer:
        return Answer([produce_response(version, answers)])

    def table(self) -> Iterable[tuple[str, Any, bool]]:
        """(API name, handler, whether later requests of the connection wait for its answer)."""
        table: list[tuple[str, Any, bool]] = [
            ("Produce", self.produce, False),
            ("Fetch", self.fetch, False),
            ("ListOffsets", self.list_offsets, True),
            ("OffsetForLeaderEpoch", self.offset_for_leader_epoch, True),
            ("DeleteRecords", self.delete_records, True),
            ("CountRecords", self.count_records, False),
        ]
        if self._remote is not None:
            table.append(("LocateRecords", self.locate_records, False))
        return table


def _keyless(answer: Produced, tp: TopicPartition, refused: KeylessRefusal) -> Produced:
    """The answer names the records, in Kafka's words (``LogValidator``)."""
    why = f"Compacted topic cannot accept message without key in topic partition {tp}"
    errors = tuple((number, why) for number in refused.records)
    first = ", ".join(f"RecordError(batchIndex={n}, message='{why}')" for n, why in errors[:3])
    message = (
        f"One or more records have been rejected due to {len(errors)} record errors in total, and"
        f" only showing the first three errors at most: [{first}]"
    )
    return answer._replace(message=message, record_errors=errors)
