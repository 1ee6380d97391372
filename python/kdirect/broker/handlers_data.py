"""Requests about records: Produce, Fetch, ListOffsets, DeleteRecords, OffsetForLeaderEpoch,
InitProducerId.

Law: record bytes are neither copied nor decoded on the event loop.  A produced batch goes from the
receive buffer to the partition, a fetched one from the segment's mapping to the socket.  What is
not in memory, or needs a file, is done on a thread first (`kdirect.broker.files`).  Errors are per
partition and leave the others alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from kdirect.broker.answers import Answer, from_buffers, later, respond
from kdirect.broker.connection import Connection
from kdirect.broker.failures import explain
from kdirect.broker.services import Services
from kdirect.broker.topics import INTERNAL_TOPICS
from kdirect.errors import LogError, OffsetOutOfRangeError, UnknownTopicError
from kdirect.format import protocol as p
from kdirect.format.datapath import Fetched, Produced, fetch_response, produce_response
from kdirect.format.protocol import ErrorCode
from kdirect.log.partition import Partition
from kdirect.model import EARLIEST_OFFSET, LATEST_OFFSET, TopicPartition

MAX_TIMESTAMP = -3
EARLIEST_LOCAL = -4
LATEST_TIERED = -5
# Epochs of a Fetch that names all its partitions: 0 asks for a session, -1 for none.  The session
# id says which one ends, if any.
_FULL_FETCH = (0, -1)
_TRANSACTIONS = "transactions are not available; use a producer without transactional.id"

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
    ErrorCode.UNSUPPORTED_COMPRESSION_TYPE: "the codec is none of none, gzip, snappy, lz4, zstd",
}


class Collected(NamedTuple):
    """What a Fetch finds: `size` bytes of records.  `urgent`: an error makes waiting for more
    pointless."""

    topics: list[tuple[str, list[Fetched]]]
    size: int
    urgent: bool


class DataHandlers:
    """Handlers of the data path; one for the broker."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._fetch_max_bytes: int = services.config["fetch.max.bytes"]

    # -- Produce -----------------------------------------------------------------------------------

    def produce(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> list[Any] | Awaitable[list[Any] | None] | None:
        version = header.api_version
        refusal: tuple[int, str] | None = None
        if version < 3:
            refusal = (
                ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT,
                "only record batch v2 is taken (Produce version 3 and later)",
            )
        elif request.acks not in (-1, 0, 1):
            refusal = ErrorCode.INVALID_REQUIRED_ACKS, f"acks={request.acks}; use 0, 1 or all"
        elif request.transactional_id is not None:
            refusal = ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, _TRANSACTIONS
        topics: list[tuple[str, list[Produced]]] = []
        to_flush: list[Partition] = []
        waiting: list[asyncio.Future[Any]] = []
        now_ms = self._services.environment.time_ms()
        for topic in request.topic_data:
            done = []
            for data in topic.partition_data:
                if refusal is not None:
                    done.append(Produced(data.index, refusal[0], -1, -1, -1, refusal[1]))
                else:
                    done.append(
                        self._append(
                            topic.name, data.index, data.records, now_ms, to_flush, waiting
                        )
                    )
            topics.append((topic.name, done))
        if waiting:
            return self._acknowledge_in_turn(connection, version, request.acks, topics, to_flush)
        return self._acknowledge(connection, version, request.acks, topics, to_flush)

    def _acknowledge(
        self,
        connection: Connection,
        version: int,
        acks: int,
        topics: list[tuple[str, list[Produced]]],
        to_flush: list[Partition],
    ) -> list[Any] | Awaitable[list[Any] | None] | None:
        if acks == 0:
            failed = [
                f"{name}-{d.partition}: {p.error_kind(d.error).name}"
                for name, done in topics
                for d in done
                if d.error
            ]
            if failed:  # the only way to tell a producer that asked for no answer
                connection.close("a Produce without acknowledgement failed: " + ", ".join(failed))
            for partition in to_flush:
                self._services.flusher.begin(partition)
            return None
        if to_flush:
            return self._acknowledge_flushed(version, topics, to_flush)
        return [produce_response(version, topics)]

    async def _acknowledge_in_turn(
        self,
        connection: Connection,
        version: int,
        acks: int,
        topics: list[tuple[str, list[Any]]],
        to_flush: list[Partition],
    ) -> list[Any] | None:
        """Answer once the appends that wait for RDMA producers before them have had their turn."""
        settled = [
            (name, [await x if isinstance(x, asyncio.Future) else x for x in done])
            for name, done in topics
        ]
        answer = self._acknowledge(connection, version, acks, settled, to_flush)
        return await answer if isinstance(answer, Awaitable) else answer

    def _append(
        self,
        name: str,
        index: int,
        records: Any,
        now_ms: int,
        to_flush: list[Partition],
        waiting: list[asyncio.Future[Any]],
    ) -> Any:
        """What to answer for one partition: Produced, or a future of it."""
        services = self._services
        try:
            if name in INTERNAL_TOPICS:
                return Produced(
                    index,
                    ErrorCode.INVALID_TOPIC_EXCEPTION,
                    -1,
                    -1,
                    -1,
                    f"topic {name} is the broker's own",
                )
            partition = services.topics.partition(name, index)
            if not records:
                return Produced(index, ErrorCode.INVALID_RECORD, -1, -1, -1, "there are no records")
            result = services.append(partition, records, now_ms)
            if isinstance(result, asyncio.Future):
                waiting.append(result)
                return asyncio.ensure_future(
                    self._appended_later(partition, index, len(records), result, to_flush)
                )
        except UnknownTopicError as e:
            return Produced(index, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, -1, -1, -1, str(e))
        except Exception as e:
            services.counters.append_errors += 1
            code, message = explain(e, f"append to {name}-{index}")
            return Produced(index, code, -1, -1, -1, message)
        return self._appended(partition, index, len(records), result, to_flush)

    async def _appended_later(
        self,
        partition: Partition,
        index: int,
        size: int,
        future: asyncio.Future[Any],
        to_flush: list[Partition],
    ) -> Produced:
        try:
            return self._appended(partition, index, size, await future, to_flush)
        except UnknownTopicError as e:
            return Produced(index, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, -1, -1, -1, str(e))
        except Exception as e:
            self._services.counters.append_errors += 1
            code, message = explain(e, f"append to {partition.topic_partition}")
            return Produced(index, code, -1, -1, -1, message)

    def _appended(
        self, partition: Partition, index: int, size: int, result: Any, to_flush: list[Partition]
    ) -> Produced:
        services = self._services
        if result.error:
            services.counters.append_errors += 1
            return Produced(
                index,
                result.error,
                -1,
                -1,
                partition.log_start_offset,
                _KERNEL_MESSAGES.get(result.error),
            )
        services.counters.appends += 1
        services.counters.append_bytes += size
        if partition.config.flush_before_ack or partition.flush_wanted:
            to_flush.append(partition)
        if not partition.config.flush_before_ack:
            services.waiters.notify(partition.topic_partition, size)
        return Produced(
            index, 0, result.base_offset, result.log_append_time, partition.log_start_offset, None
        )

    async def _acknowledge_flushed(
        self, version: int, topics: list[tuple[str, list[Produced]]], partitions: list[Partition]
    ) -> list[Any]:
        """Answer once what was appended is on disk (`log.flush.before.ack`, `flush.messages`)."""
        outcomes = await asyncio.gather(
            *(self._services.flusher.flushed(x) for x in partitions), return_exceptions=True
        )
        failed = {
            x.topic_partition: e
            for x, e in zip(partitions, outcomes, strict=True)
            if isinstance(e, BaseException)
        }
        if failed:
            topics = [
                (
                    name,
                    [
                        self._failed_flush(name, d, failed.get(TopicPartition(name, d.partition)))
                        for d in done
                    ],
                )
                for name, done in topics
            ]
        return [produce_response(version, topics)]

    def _failed_flush(self, name: str, done: Produced, error: BaseException | None) -> Produced:
        if error is None or done.error:
            return done
        code, message = explain(error, f"flush of {name}-{done.partition}")
        return Produced(done.partition, code, -1, -1, done.log_start_offset, message)

    # -- Fetch -------------------------------------------------------------------------------------

    def fetch(self, connection: Connection, header: p.RequestHeader, request: Any) -> Answer:
        version = header.api_version
        # A further request of a session, and this broker gives none out.
        if request.session_epoch not in _FULL_FETCH:
            return Answer(fetch_response(version, ErrorCode.FETCH_SESSION_ID_NOT_FOUND, ()))
        collected = self._collect(request, wait=False)
        if collected is None:
            return later(self._fetch_cold(version, request))
        if self._is_enough(request, collected):
            return _fetched(version, request, collected.topics)
        return later(self._wait_for_records(version, request, collected.size))

    def _is_enough(self, request: Any, collected: Collected) -> bool:
        return (
            collected.size >= request.min_bytes
            or request.max_wait_ms <= 0
            or collected.urgent
            or not collected.topics
        )

    async def _fetch_cold(self, version: int, request: Any) -> Answer:
        """Something is not in memory: a thread brings it there before the event loop sends it."""
        collected = await self._collected(request)
        if self._is_enough(request, collected):
            return _fetched(version, request, collected.topics)
        return await self._wait_for_records(version, request, collected.size)

    async def _collected(self, request: Any) -> Collected:
        collected = self._collect(request, wait=False)
        if collected is None:
            self._services.counters.cold_fetches += 1
            collected = await self._services.files.read(partial(self._collect, request, wait=True))
        assert collected is not None
        return collected

    async def _wait_for_records(self, version: int, request: Any, size: int) -> Answer:
        """Long poll: look again when records arrive, answer when there are enough or time is up."""
        services = self._services
        partitions = [
            TopicPartition(t.topic, x.partition) for t in request.topics for x in t.partitions
        ]
        loop = asyncio.get_running_loop()
        deadline = loop.time() + request.max_wait_ms / 1000
        services.counters.fetch_waits += 1
        while True:
            waiter = services.waiters.add(partitions, request.min_bytes - size)
            timer = loop.call_at(deadline, waiter.wake)
            try:
                for tp in partitions:
                    services.watch(tp)
                # Records that came between the first look and the registration have woken nobody;
                # those that come while this look waits for a thread wake it at once.
                waiter.missing = 0
                topics, size, urgent = await self._collected(request)
                if size >= request.min_bytes or urgent or services.waiters.closed:
                    return _fetched(version, request, topics)
                waiter.missing = request.min_bytes - size
                await waiter.future
            finally:
                timer.cancel()
                services.waiters.remove(waiter)
            topics, size, urgent = await self._collected(request)
            if (
                size >= request.min_bytes
                or urgent
                or loop.time() >= deadline
                or services.waiters.closed
            ):
                return _fetched(version, request, topics)

    def _collect(self, request: Any, *, wait: bool) -> Collected | None:
        """What there is to answer now.  Without `wait`, on the event loop: None when that needs
        file work."""
        room = min(request.max_bytes, self._fetch_max_bytes)
        committed_only = request.isolation_level == 1
        total = 0
        urgent = False
        topics = []
        for topic in request.topics:
            fetched = []
            for x in topic.partitions:
                one = self._read(topic.topic, x, room - total, committed_only, total == 0, wait)
                if one is None:
                    return None
                total += one.size
                urgent = urgent or one.error != 0
                fetched.append(one)
            topics.append((topic.topic, fetched))
        return Collected(topics, total, urgent)

    def _read(
        self, name: str, x: Any, room: int, committed_only: bool, first: bool, wait: bool
    ) -> Fetched | None:
        index = x.partition
        try:
            partition = self._services.topics.partition(name, index)
            error = _epoch_error(partition, x.current_leader_epoch)
            if error:
                return Fetched(index, error, -1, -1, -1, (), 0)
            high_watermark = partition.high_watermark
            stable = partition.last_stable_offset
            start = partition.log_start_offset
            limit = min(x.partition_max_bytes, room)
            end = stable if committed_only else high_watermark
            if x.fetch_offset >= end or (limit <= 0 and not first):
                if not start <= x.fetch_offset <= partition.log_end_offset:
                    return Fetched(
                        index, ErrorCode.OFFSET_OUT_OF_RANGE, high_watermark, stable, start, (), 0
                    )
                return Fetched(index, 0, high_watermark, stable, start, (), 0)
            release = self._services.files.release
            found: list[memoryview] | None
            if wait:
                found = partition.read(
                    x.fetch_offset,
                    max(limit, 1),
                    committed_only=committed_only,
                    fault_in=True,
                    release=release,
                )
            else:
                found = partition.read_nowait(
                    x.fetch_offset, max(limit, 1), committed_only=committed_only, release=release
                )
            if found is None:
                return None
            buffers: Sequence[Any] = found
            size = sum(len(b) for b in buffers)
            if size > limit and not first:  # the first batch is larger than what is left: next time
                buffers, size = [], 0
            return Fetched(index, 0, high_watermark, stable, start, buffers, size)
        except UnknownTopicError:
            return Fetched(index, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, -1, -1, -1, (), 0)
        except OffsetOutOfRangeError:
            return Fetched(
                index, ErrorCode.OFFSET_OUT_OF_RANGE, high_watermark, stable, start, (), 0
            )
        except Exception as e:
            return Fetched(index, explain(e, f"read of {name}-{index}")[0], -1, -1, -1, (), 0)

    # -- offsets -----------------------------------------------------------------------------------

    def list_offsets(self, connection: Connection, header: p.RequestHeader, request: Any) -> Answer:
        if any(
            x.timestamp >= 0 or x.timestamp == MAX_TIMESTAMP
            for t in request.topics
            for x in t.partitions
        ):
            return later(self._look_up_later(header, request))
        return self._look_up(header, request)

    async def _look_up_later(self, header: p.RequestHeader, request: Any) -> Answer:
        """By time, batches have to be opened: on a thread, for they may be large."""
        return await self._services.files.look_up(self._look_up, header, request)

    def _look_up(self, header: p.RequestHeader, request: Any) -> Answer:
        committed_only = request.isolation_level == 1
        return respond(
            header,
            p.ListOffsetsResponse,
            topics=[
                {
                    "name": t.name,
                    "partitions": [
                        self._list_offset(t.name, x, committed_only) for x in t.partitions
                    ],
                }
                for t in request.topics
            ],
        )

    def _list_offset(self, name: str, x: Any, committed_only: bool) -> dict[str, Any]:
        out = {
            "partition_index": x.partition_index,
            "error_code": 0,
            "timestamp": -1,
            "offset": -1,
            "leader_epoch": -1,
        }
        try:
            partition = self._services.topics.partition(name, x.partition_index)
            error = _epoch_error(partition, x.current_leader_epoch)
            if error:
                return {**out, "error_code": error}
            found = self._find_offset(partition, x.timestamp, committed_only)
        except UnknownTopicError:
            return {**out, "error_code": ErrorCode.UNKNOWN_TOPIC_OR_PARTITION}
        except Exception as e:
            return {
                **out,
                "error_code": explain(e, f"offset lookup in {name}-{x.partition_index}")[0],
            }
        if found is None:
            return out
        return {
            **out,
            "offset": found[0],
            "timestamp": found[1],
            "leader_epoch": partition.leader_epoch,
        }

    def _find_offset(
        self, partition: Partition, timestamp: int, committed_only: bool
    ) -> tuple[int, int] | None:
        """(offset, its timestamp or -1)."""
        end = partition.last_stable_offset if committed_only else partition.high_watermark
        if timestamp == LATEST_OFFSET:
            return end, -1
        if timestamp in (EARLIEST_OFFSET, EARLIEST_LOCAL):
            return partition.log_start_offset, -1
        if timestamp == MAX_TIMESTAMP:
            found = partition.largest_timestamp()
        elif timestamp >= 0:
            found = partition.offset_for_timestamp(timestamp)
        else:  # of tiered storage, which there is none of
            return None
        return found if found is not None and found[0] < end else None

    def offset_for_leader_epoch(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        return respond(
            header,
            p.OffsetForLeaderEpochResponse,
            topics=[
                {
                    "topic": t.topic,
                    "partitions": [self._epoch_end(t.topic, x) for x in t.partitions],
                }
                for t in request.topics
            ],
        )

    def _epoch_end(self, name: str, x: Any) -> dict[str, Any]:
        out = {"error_code": 0, "partition": x.partition, "leader_epoch": -1, "end_offset": -1}
        try:
            partition = self._services.topics.partition(name, x.partition)
            error = _epoch_error(partition, x.current_leader_epoch)
            if error:
                return {**out, "error_code": error}
            epoch, end = partition.end_offset_for_epoch(x.leader_epoch)
            return {**out, "leader_epoch": epoch, "end_offset": end}
        except Exception as e:
            return {**out, "error_code": explain(e, f"epoch lookup in {name}-{x.partition}")[0]}

    def delete_records(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        return later(self._services.files.admin(self._delete_records, header, request))

    def _delete_records(self, header: p.RequestHeader, request: Any) -> Answer:
        return respond(
            header,
            p.DeleteRecordsResponse,
            topics=[
                {
                    "name": t.name,
                    "partitions": [self._delete_before(t.name, x) for x in t.partitions],
                }
                for t in request.topics
            ],
        )

    def _delete_before(self, name: str, x: Any) -> dict[str, Any]:
        out = {"partition_index": x.partition_index, "low_watermark": -1, "error_code": 0}
        try:
            if name in INTERNAL_TOPICS:
                return {**out, "error_code": ErrorCode.INVALID_TOPIC_EXCEPTION}
            partition = self._services.topics.partition(name, x.partition_index)
            partition.delete_records(partition.high_watermark if x.offset == -1 else x.offset)
            return {**out, "low_watermark": partition.log_start_offset}
        except Exception as e:
            return {
                **out,
                "error_code": explain(e, f"deletion of records from {name}-{x.partition_index}")[0],
            }

    def init_producer_id(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        if request.transactional_id is not None:
            code = (
                ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
                if request.transactional_id
                else ErrorCode.INVALID_REQUEST
            )
            return respond(
                header, p.InitProducerIdResponse, error_code=code, producer_id=-1, producer_epoch=-1
            )
        producer_id = self._services.topics.producer_id_nowait()
        if producer_id is None:
            return later(self._init_producer_id_later(header))
        return respond(
            header,
            p.InitProducerIdResponse,
            error_code=0,
            producer_id=producer_id,
            producer_epoch=0,
        )

    async def _init_producer_id_later(self, header: p.RequestHeader) -> Answer:
        """The next block of ids has to be written down first."""
        try:
            producer_id = await self._services.files.admin(self._services.topics.next_producer_id)
        except LogError as e:
            return respond(
                header,
                p.InitProducerIdResponse,
                error_code=explain(e, "a new producer id")[0],
                producer_id=-1,
                producer_epoch=-1,
            )
        return respond(
            header,
            p.InitProducerIdResponse,
            error_code=0,
            producer_id=producer_id,
            producer_epoch=0,
        )

    def _produce_answer(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        return from_buffers(self.produce(connection, header, request))

    def table(self) -> Iterable[tuple[str, Any, bool]]:
        """(API name, handler, does it hold up later requests while it waits?)."""
        return (
            ("Produce", self._produce_answer, False),
            ("Fetch", self.fetch, False),
            ("ListOffsets", self.list_offsets, True),
            ("OffsetForLeaderEpoch", self.offset_for_leader_epoch, True),
            ("DeleteRecords", self.delete_records, True),
            ("InitProducerId", self.init_producer_id, True),
        )


def _fetched(version: int, request: Any, topics: list[tuple[str, list[Fetched]]]) -> Answer:
    return Answer(fetch_response(version, 0, topics, request.isolation_level == 1))


def _epoch_error(partition: Partition, asked: int) -> int:
    """Is a client's idea of the leader epoch (-1: none) out of date?"""
    if asked < 0 or asked == partition.leader_epoch:
        return 0
    return (
        ErrorCode.FENCED_LEADER_EPOCH
        if asked < partition.leader_epoch
        else ErrorCode.UNKNOWN_LEADER_EPOCH
    )
