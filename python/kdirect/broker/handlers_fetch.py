"""Fetch: what consumers read over Kafka's protocol, and how long they wait for it.

Law: as in `kdirect.broker.handlers_data`, whose handlers these are a part of.  A Fetch is answered
at once where it may be, from what is in memory; else a thread reads (`_fetch_cold`), remote storage
is asked (`_answer_fetch`), or the answer waits for records (`_wait_for_records`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from kdirect.broker.answers import Answer, later
from kdirect.broker.connection import Connection
from kdirect.broker.failures import explain
from kdirect.broker.fetch_contexts import FetchContexts
from kdirect.broker.handlers_lookups import LookupHandlers, Reader
from kdirect.broker.remote_requests import RemoteRead
from kdirect.broker.services import Services
from kdirect.errors import OffsetOutOfRangeError, TieredOffsetError
from kdirect.format import protocol as p
from kdirect.format.batch import iterate_batches
from kdirect.format.datapath import Fetched, NodeEndpoint, fetch_response
from kdirect.format.error_codes import ErrorCode
from kdirect.log.kernel_transactions import aborted_transactions
from kdirect.log.partition import Partition

KNOWS_ZSTD = 10  # the version of Fetch from which on a client can read it
FEW_ABORTED = 16  # which are told without a look at how far a consumer is read for


class Collected(NamedTuple):
    """What a Fetch finds, by topic: `size` bytes of records in all.  `urgent`: there is an error,
    or the client is to read elsewhere, so waiting for more records is pointless.  `is_remote`: some
    of it is a `RemoteRead`, which is as urgent."""

    topics: list[tuple[str, list[Fetched]]]
    size: int
    urgent: bool
    is_remote: bool = False


class FetchHandlers(LookupHandlers):
    """Handlers of requests that read.  Used on the event loop."""

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self._fetch_max_bytes: int = services.config["fetch.max.bytes"]
        self._contexts = FetchContexts(services)
        self.sessions = self._contexts.cache

    def fetch(self, connection: Connection, header: p.RequestHeader, request: Any) -> Answer:
        version = header.api_version
        asked = self._contexts.begin(version, request)
        if isinstance(asked, int):
            return Answer(fetch_response(version, asked, ()))
        asked.endpoints = partial(self._endpoints, connection)
        reader = Reader(version, getattr(request, "rack_id", ""), request.isolation_level == 1)
        collected = self._collect(reader, asked, wait=False)
        if collected is None:
            return later(self._fetch_cold(reader, asked))
        asked.looked(collected.topics)
        if collected.is_remote:
            return later(self._answer_fetch(reader, asked, collected))
        if self._is_enough(asked, collected):
            return asked.answer(collected.topics)
        return later(self._wait_for_records(reader, asked, collected.size))

    async def _answer_fetch(self, reader: Reader, request: Any, collected: Collected) -> Answer:
        """The answer, once remote storage has had its time."""
        topics = collected.topics
        if collected.is_remote:
            assert self._remote is not None
            room = min(request.max_bytes, self._fetch_max_bytes) - collected.size
            await self._remote.fill(topics, room, request.max_wait_ms / 1000)
        return request.answer(topics)

    def _is_enough(self, request: Any, collected: Collected) -> bool:
        return (
            collected.size >= request.min_bytes
            or request.max_wait_ms <= 0
            or collected.urgent
            or request.is_empty
        )

    async def _fetch_cold(self, reader: Reader, request: Any) -> Answer:
        """Answer a Fetch of bytes that are not in memory: a thread reads them before the event loop
        sends them."""
        collected = await self._collected(reader, request)
        if self._is_enough(request, collected):
            return await self._answer_fetch(reader, request, collected)
        return await self._wait_for_records(reader, request, collected.size)

    async def _collected(self, reader: Reader, request: Any) -> Collected:
        collected = self._collect(reader, request, wait=False)
        if collected is None:
            self._services.counters.cold_fetches += 1
            read = partial(self._collect, reader, request, wait=True)
            collected = await self._services.files.read(read)
        assert collected is not None
        request.looked(collected.topics)
        return collected

    async def _wait_for_records(self, reader: Reader, request: Any, size: int) -> Answer:
        """Look again whenever records arrive, and answer once there are min_bytes or max_wait_ms
        are over.  `size`: how many bytes of records there were at the first look."""
        services = self._services
        partitions = request.awaited()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + request.max_wait_ms / 1000
        services.counters.fetch_waits += 1
        while True:
            waiter = services.waiters.add(partitions, request.min_bytes - size)
            request.wait(waiter)
            timer = loop.call_at(deadline, waiter.wake)
            try:
                for tp in partitions:
                    services.watch(tp)
                # Look once more: records that arrived between the first look and the registration
                # have woken nobody.  With nothing missing, records that arrive while this look
                # waits for a thread wake the waiter at once.
                waiter.missing = 0
                found = await self._collected(reader, request)
                if found.size >= request.min_bytes or found.urgent or services.waiters.closed:
                    return await self._answer_fetch(reader, request, found)
                waiter.missing = request.min_bytes - found.size
                await waiter.future
            finally:
                timer.cancel()
                request.end_wait(waiter)
                services.waiters.remove(waiter)
            found = await self._collected(reader, request)
            size = found.size
            if (
                size >= request.min_bytes
                or found.urgent
                or loop.time() >= deadline
                or services.waiters.closed
            ):
                return await self._answer_fetch(reader, request, found)

    def _collect(self, reader: Reader, request: Any, *, wait: bool) -> Collected | None:
        """What there is to answer now.  Without `wait` it runs on the event loop, and returns None
        if an answer needs file work; with `wait` it runs on a thread."""
        room = min(request.max_bytes, self._fetch_max_bytes)
        total = 0
        urgent = is_remote = False
        topics = []
        for topic in request.topics:
            fetched = []
            for x in topic.partitions:
                one = self._read(reader, topic.topic, x, room - total, total == 0, wait)
                if one is None:
                    return None
                total += one.size
                urgent = urgent or one.error != 0 or one.preferred >= 0 or bool(one.diverging)
                is_remote = is_remote or type(one.buffers) is RemoteRead
                fetched.append(one)
            topics.append((topic.topic, fetched))
        return Collected(topics, total, urgent or is_remote, is_remote)

    def _to_read(self, reader: Reader, name: str, x: Any) -> Partition | Fetched:
        """The partition that a Fetch reads, or what is answered without reading."""
        return self._led(name, x.partition, x.current_leader_epoch)

    def _endpoints(self, connection: Connection, leaders: set[int]) -> Sequence[NodeEndpoint]:
        """Where the client of a connection reaches brokers that lead what it has asked for here.  A
        broker that is alone names none."""
        return ()

    def _unread(self, name: str, x: Any, error: BaseException) -> Fetched:
        """The answer about a partition that cannot be read."""
        code = explain(error, f"read of {name}-{x.partition}")[0]
        return Fetched(x.partition, code, -1, -1, -1, (), 0)

    def _read_here(
        self, partition: Partition, offset: int, limit: int, committed_only: bool, wait: bool
    ) -> list[memoryview] | None:
        release = self._services.files.release
        if wait:
            return partition.read(
                offset, limit, committed_only=committed_only, fault_in=True, release=release
            )
        return partition.read_nowait(offset, limit, committed_only=committed_only, release=release)

    def _read(
        self, reader: Reader, name: Any, x: Any, room: int, first: bool, wait: bool
    ) -> Fetched | None:
        index, committed_only = x.partition, reader.committed_only
        if not isinstance(name, str):
            return Fetched(index, ErrorCode.UNKNOWN_TOPIC_ID, -1, -1, -1, (), 0)
        try:
            to_read = self._to_read(reader, name, x)
            if isinstance(to_read, Fetched):
                return to_read
            partition = to_read
            if reader.version < KNOWS_ZSTD and partition.config.compression_type == "zstd":
                return Fetched(index, ErrorCode.UNSUPPORTED_COMPRESSION_TYPE, -1, -1, -1, (), 0)
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
            found = self._read_here(partition, x.fetch_offset, max(limit, 1), committed_only, wait)
            if found is None:
                return None
            buffers: Sequence[Any] = found
            size = sum(len(b) for b in buffers)
            # A batch larger than the limit is sent only if the response is empty without it.
            if size > limit and not first:
                buffers, size = [], 0
            aborted = _aborted(partition, x.fetch_offset, buffers) if committed_only else []
            start = partition.log_start_offset
            if committed_only and x.fetch_offset < start:
                # Deleted meanwhile: what was aborted there may be forgotten.
                return Fetched(
                    index, ErrorCode.OFFSET_OUT_OF_RANGE, high_watermark, stable, start, (), 0
                )
            return Fetched(index, 0, high_watermark, stable, start, buffers, size, aborted=aborted)
        except OffsetOutOfRangeError:
            return Fetched(
                index, ErrorCode.OFFSET_OUT_OF_RANGE, high_watermark, stable, start, (), 0
            )
        except TieredOffsetError as e:
            if self._remote is None:
                return self._unread(name, x, e)
            read: Any = RemoteRead(partition, x.fetch_offset, max(limit, 1), committed_only)
            return Fetched(index, 0, high_watermark, stable, start, read, 0)
        except Exception as e:
            return self._unread(name, x, e)


def _aborted(partition: Partition, start: int, buffers: Sequence[Any]) -> list[tuple[int, int]]:
    """(producer id, first offset) of the aborted transactions of which a reader of `buffers` has to
    know, which begin with the batch that holds offset `start`."""
    # Asked after reading: that may have gone on above what was stable before.
    found = aborted_transactions(partition.kernel, start, partition.last_stable_offset)
    # Some may lie above all that is read: look where that ends.
    if buffers and len(found) > FEW_ABORTED:
        end = start
        for buffer in buffers:
            for batch in iterate_batches(buffer, check_crc=False):
                end = max(end, batch.next_offset)
        found = aborted_transactions(partition.kernel, start, end)
    return [(entry.producer_id, entry.first_offset) for entry in found]
