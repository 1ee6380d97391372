"""What the leader of a partition of ``__remote_log_metadata`` does with records that other brokers
send: WriteRemoteMetadata.

Clients may not write to internal topics, so brokers have this message of their own.  It is answered
once the records are committed, as a Produce with acks=all is; below min.insync.replicas nothing is
appended.  A broker that was replaced by a newer process, or has lost its session, is refused.

The topic is rewritten here, too: what counts is written again, and all before it goes.  Appends
wait meanwhile, for a record means something only after those before it.

Every broker of a cluster answers it, whether it has tiered storage itself or not.  On the event
loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from kdirect.broker.answers import Answer, later
from kdirect.broker.connection import Connection
from kdirect.broker.failures import explain
from kdirect.broker.services import Services
from kdirect.broker.state_replication import StateReplication
from kdirect.broker.topics import REMOTE_METADATA_TOPIC
from kdirect.errors import ClosedError, FormatError, LogError, StaleIncarnationError
from kdirect.format import protocol as p
from kdirect.format.batch import encode_single_bytes
from kdirect.format.error_codes import ErrorCode, error_kind
from kdirect.format.remote_metadata import RemoteRecord, pack_record, parse_record, record_key
from kdirect.format.schema import build
from kdirect.log.partition import Partition
from kdirect.model import TopicPartition

log = logging.getLogger("kdirect.storage")

PIECE_BYTES = 256 << 10  # of one append


class MetadataAppends:
    """See the module.  A member has one."""

    def __init__(self, services: Services) -> None:
        assert services.replicas is not None and services.membership is not None
        self._services = services
        self._replicas = services.replicas
        self._membership: Any = services.membership
        self._replication = StateReplication(self._replicas, services.flusher.begin)
        self._locks: dict[int, asyncio.Lock] = {}  # held by appends, and by rewriting
        self._stopping: asyncio.Future[None] | None = None

    # -- the request -------------------------------------------------------------------------------

    def write(self, connection: Connection, header: p.RequestHeader, request: Any) -> Answer:
        return later(self._write(request))

    async def _write(self, request: Any) -> Answer:
        return Answer([(await self.answer(request)).encode(version=0)])

    async def answer(self, request: Any) -> Any:
        """The response to a WriteRemoteMetadata."""
        code, message = 0, None
        try:
            self._check_sender(request.broker_id, request.incarnation)
            records = [parse_record(bytes(value)) for value in request.records]
            await self.append(request.partition, records)
        except FormatError as e:
            code, message = int(ErrorCode.INVALID_RECORD), str(e)
        except Exception as e:
            code, message = explain(e, f"{REMOTE_METADATA_TOPIC}-{request.partition}")
        return build(p.WriteRemoteMetadataResponse, error_code=code, error_message=message)

    def _check_sender(self, broker: int, incarnation: int) -> None:
        known = self._membership.metadata.brokers.get(broker)
        if known is None or known.incarnation != incarnation:
            raise StaleIncarnationError(
                f"broker {broker} is not registered as incarnation {incarnation}",
                hint="it has been replaced, or this broker has not heard of it yet",
            )

    # -- appending ---------------------------------------------------------------------------------

    async def append(self, index: int, records: Sequence[RemoteRecord]) -> None:
        """Return when the records are committed.  KdirectError: they may be, or not."""
        async with self._lock(index):
            committed = await self._append(index, records)
        stopping = self._stops()
        await asyncio.wait((committed, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not committed.done():
            raise ClosedError("the broker is stopping", hint="ask the next leader")
        committed.result()

    def _stops(self) -> asyncio.Future[None]:
        if self._stopping is None:
            self._stopping = asyncio.get_running_loop().create_future()
        return self._stopping

    def close(self) -> None:
        """The broker stops: nobody waits for replicas any more."""
        if not self._stops().done():
            self._stops().set_result(None)

    def _lock(self, index: int) -> asyncio.Lock:
        return self._locks.setdefault(index, asyncio.Lock())

    async def _append(self, index: int, records: Iterable[RemoteRecord]) -> asyncio.Future[None]:
        """Append; a future that is done when they are committed."""
        tp = TopicPartition(REMOTE_METADATA_TOPIC, index)
        partition = self._replicas.leader(tp)
        self._replicas.may_append(tp)
        epoch, end = partition.leader_epoch, partition.log_end_offset
        now = self._services.environment.time_ms()
        for piece in _pieces(records, now):
            result = await self._services.appender.append(partition, piece, now)
            if result.error:
                raise LogError(
                    f"append to {tp} failed: {error_kind(result.error).name}",
                    hint="is max.message.bytes very small?",
                )
            end = result.last_offset + 1
        return self._replication.committed(partition, end, epoch)

    # -- rewriting ---------------------------------------------------------------------------------

    def hold(self, index: int) -> asyncio.Lock:
        """To be held while nothing is to be appended to a partition."""
        return self._lock(index)

    async def rewrite(self, partition: Partition, records: Sequence[RemoteRecord]) -> None:
        """Write `records`, which are all that counts, and delete everything before them.  The
        caller holds appends off, and all that was appended is committed.  KdirectError."""
        index, start = partition.topic_partition.partition, partition.log_end_offset
        before = start - partition.log_start_offset
        await (await self._append(index, records))
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def told(result: object, error: BaseException | None) -> None:
            if not done.done():
                done.set_result(None) if error is None else done.set_exception(error)

        delete = partial(partition.delete_records, start)
        self._services.files.for_partition(partition, delete, told)
        await done
        self._replicas.start_moved(partition.topic_partition)
        log.info(
            "rewrote %s: %d records became %d", partition.topic_partition, before, len(records)
        )

    def table(self) -> Iterable[tuple[str, Any, bool]]:
        return (("WriteRemoteMetadata", self.write, False),)


def _pieces(records: Iterable[RemoteRecord], now_ms: int) -> Iterable[bytes]:
    """Batches of one record each, as many together as one append takes."""
    batches: list[bytes] = []
    size = 0
    for record in records:
        batch = encode_single_bytes(pack_record(record), record_key(record), now_ms)
        if batches and size + len(batch) > PIECE_BYTES:
            yield b"".join(batches)
            batches, size = [], 0
        batches.append(batch)
        size += len(batch)
    if batches:
        yield b"".join(batches)


__all__ = ["MetadataAppends"]
