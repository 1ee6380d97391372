"""Read access: files and metadata slots granted to consumers (KafkaDirect §4.4.2).

Owns: opening files for readers on a thread, granting them on the event loop, and giving them back.
What may not enter: queue pairs (`kdirect.broker.queue_pairs`), write access
(`kdirect.broker.produce_access`).

Memory: a grant holds its segment (`SegmentSource.grant`) from grant to release, and so it does the
file's list of aborted transactions (`kdirect.broker.aborted_regions`).  A client's slot region
belongs to the client's `Peer` and outlives its attachment to any kernel.  Regions, lists and slots
are remote-read only.

All methods run on the broker's event loop, except where said.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from kdirect.broker.aborted_regions import (
    AbortedRegion,
    region_beside_slot,
    region_of_finished,
)
from kdirect.broker.failures import explain
from kdirect.broker.files import FileThreads
from kdirect.broker.grants import Grant, GrantTable, Peer
from kdirect.errors import KdirectError, NotLeaderError, RdmaError, RefusedError
from kdirect.format import layout
from kdirect.format import protocol as p
from kdirect.format.batch import crc32c
from kdirect.format.error_codes import ErrorCode
from kdirect.format.schema import build
from kdirect.log.partition import Partition
from kdirect.log.segment import Segment
from kdirect.log.segment_source import FileExtent, SegmentSource
from kdirect.model import EARLIEST_OFFSET, LATEST_OFFSET, TopicPartition
from kdirect.rdma.contract import Access, Memory

log = logging.getLogger("kdirect.broker.rdma")

# A file that rolled between its opening and its grant is given up, and the next one opened, at most
# so often.
MOST_OPENINGS = 16


@dataclass(eq=False, slots=True)
class OpenedFile:
    """A file for a reader, opened on a thread: its location held, its memory registered, the
    position of `wanted` known.  `location` is None where the partition has no head file yet,
    `region` where only a slot is asked for."""

    partition: Partition
    source: SegmentSource | None
    wanted: int  # an offset
    with_slot: bool
    location: FileExtent | None = None
    position: int = 0  # of the batch that holds `wanted`
    base: int = -1  # its base offset
    region: Any = None
    aborted: AbortedRegion | None = None  # for who reads committed records

    @property
    def segment(self) -> Segment | None:
        """The segment whose file it is."""
        return self.location.owner if self.location is not None else None


class Wish(NamedTuple):
    """How a client reads: also where this broker only follows, and committed records only."""

    of_replica: bool
    committed_only: bool


class SlotValues(NamedTuple):
    """What a metadata slot says of its file; see `kdirect.format.layout`."""

    segment_base_offset: int
    last_readable_position: int
    high_watermark: int
    last_stable_position: int
    last_stable_offset: int


class ReadAccess:
    """See the module.  `partition_of(target, of_replica)` and `leads(tp)` are asked on the event
    loop, and the former says by its KdirectError why not; with `of_replica` replicas that only
    follow are granted, too (KIP-392).  `listen(partition)` makes the log ask before it shortens the
    head; `background(work)` does what nobody waits for.  Without `files`, what belongs on a thread
    is done on the spot."""

    def __init__(
        self,
        grants: GrantTable,
        *,
        slots_per_consumer: int,
        partition_of: Callable[[Any, bool], Partition],
        is_current: Callable[[Partition], bool],
        leads: Callable[[TopicPartition], bool],
        listen: Callable[[Partition], None],
        background: Callable[[Callable[[], Any]], None],
        files: FileThreads | None,
    ) -> None:
        self._grants = grants
        self._slots_per_consumer = slots_per_consumer
        self._partition_of = partition_of
        self._is_current = is_current
        self._leads = leads
        self._listen = listen
        self._background = background
        self._files = files

    async def answer(self, peer: Peer, request: p.GetConsumeAccessRequest) -> Any:
        """The response to a request for read access to any number of partitions."""
        for target in request.partitions:
            finished = peer.grants.get(target.finished_file_id)
            if finished is not None and not finished.is_produce:
                self.release(finished)
        granted: list[dict[str, Any]] = []
        wish = Wish(request.of_replica, request.committed_only)
        opened = deque(await self._opened(peer, request.partitions, wish))
        try:
            for target in request.partitions:
                granted.append(await self._answer_one(peer, target, opened.popleft(), wish))
        finally:
            for file in opened:  # the client is gone
                self._close_file(file)
        return build(
            p.GetConsumeAccessResponse,
            slot_address=peer.slot_region.address,
            slot_rkey=peer.slot_region.rkey,
            slot_count=self._slots_per_consumer,
            partitions=granted,
        )

    async def _opened(
        self, peer: Peer, targets: Sequence[Any], wish: Wish
    ) -> list[OpenedFile | KdirectError]:
        """`_open_files` on a thread; what it opens for a client that goes meanwhile is closed."""
        found = [(target, self._find(target, wish.of_replica)) for target in targets]
        committed = wish.committed_only
        if self._files is None:
            return self._open_files(peer, found, committed)
        task = asyncio.ensure_future(self._files.read(self._open_files, peer, found, committed))
        try:
            return await asyncio.shield(task)  # type: ignore[no-any-return]
        except asyncio.CancelledError:
            task.add_done_callback(self._close_files)
            raise

    def _find(self, target: Any, of_replica: bool) -> Partition | KdirectError:
        """The partition of one request, if it may be read here."""
        try:
            return self._partition_of(target, of_replica)
        except KdirectError as e:
            return e

    def _close_files(self, opened: asyncio.Task[list[OpenedFile | KdirectError]]) -> None:
        for file in opened.result() if not opened.cancelled() else ():
            self._close_file(file)

    async def _answer_one(
        self, peer: Peer, target: Any, file: OpenedFile | KdirectError, wish: Wish
    ) -> dict[str, Any]:
        """The fields of a ConsumeGrant for one partition.  A file that is not the right one any
        more is opened again."""
        name = f"{target.topic}-{target.partition}"
        try:
            for _ in range(MOST_OPENINGS):
                if isinstance(file, KdirectError):
                    raise file
                granted = self._grant_file(peer, file, wish.of_replica)
                if granted is not None:
                    return granted
                (file,) = await self._opened(peer, [target], wish)
            self._close_file(file)
            raise RefusedError(
                ErrorCode.UNKNOWN_SERVER_ERROR,
                f"{name} rolls faster than access can be granted; raise log.segment.bytes",
            )
        except RefusedError as e:
            return _refused(e.code, str(e))
        except RdmaError as e:  # what cannot be registered can still be had over TCP
            log.warning("read access of %s to %s failed: %s", peer.client, name, e)
            return _refused(layout.ERROR_ACCESS_DISABLED, str(e))
        except KdirectError as e:
            return _refused(*explain(e, f"read access to {name}"))

    # On a read thread: mapping a file, looking a position up and registering memory, which may pin
    # it, take their time.

    def _open_files(
        self,
        peer: Peer,
        targets: Sequence[tuple[Any, Partition | KdirectError]],
        committed_only: bool,
    ) -> list[OpenedFile | KdirectError]:
        out: list[OpenedFile | KdirectError] = []
        for target, partition in targets:
            if isinstance(partition, KdirectError):
                out.append(partition)
                continue
            try:
                out.append(self._open_file(peer, partition, target.offset, committed_only))
            except KdirectError as e:
                out.append(e)
            except Exception as e:
                log.exception("read access to %s-%d failed", target.topic, target.partition)
                out.append(
                    RefusedError(
                        ErrorCode.UNKNOWN_SERVER_ERROR,
                        f"{type(e).__name__} in the broker; see its log",
                    )
                )
        return out

    def _open_file(
        self, peer: Peer, partition: Partition, offset: int, committed_only: bool
    ) -> OpenedFile:
        self._listen(partition)
        wanted = _readable(partition, offset)
        head = partition.head
        at_end = wanted >= partition.log_end_offset
        source = partition.source_for(wanted) if head is not None or not at_end else None
        with_slot = source is None or not partition.is_finished(source)
        file = OpenedFile(partition, source, wanted, with_slot)
        if source is None:
            return file
        if peer.pins:  # before it is acquired: see `ProduceAccess.may_give_back`
            self._grants.opening.add(file)
        try:
            location = file.location = source.grant()
        except BaseException:
            self._grants.opening.discard(file)
            raise
        try:
            if wanted <= source.end_offset:
                file.position, file.base = source.locate(wanted)
            if not with_slot or offset != LATEST_OFFSET:
                file.region = _register(peer, location)
                if committed_only:
                    file.aborted = _aborted_beside(peer, file)
            return file
        except BaseException:
            self._grants.opening.discard(file)
            _close_region(file.region, location.release)
            raise

    # On the event loop again.

    def _close_file(self, file: OpenedFile | KdirectError) -> None:
        """Give back a file that is not granted."""
        if not isinstance(file, KdirectError) and file.location is not None:
            self._grants.opening.discard(file)
            if file.aborted is not None:
                file.aborted.give_back(self._grants.deregister)
            self._background(partial(_close_region, file.region, file.location.release))

    def _grant_file(self, peer: Peer, file: OpenedFile, of_replica: bool) -> dict[str, Any] | None:
        """Grant an opened file; None when the head moved on in between (the caller opens the
        next)."""
        partition = file.partition
        if peer.closed or not self._is_current(partition):
            self._close_file(file)
            if peer.closed:
                raise RefusedError(
                    layout.ERROR_UNKNOWN_CONNECTION,
                    "the queue pair that asked for access is closed; connect again",
                )
            raise RefusedError(
                ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
                f"partition {partition.topic_partition} was deleted",
            )
        if not of_replica and not self._leads(partition.topic_partition):
            self._close_file(file)
            raise NotLeaderError(
                f"this broker does not lead {partition.topic_partition} any more",
                hint="ask for metadata",
            )
        try:
            grant = self._grants.new(peer, partition, file.segment)
        except RefusedError:
            self._close_file(file)
            raise
        grant.region, grant.aborted = file.region, file.aborted
        self._grants.opening.discard(file)
        try:
            fields = self._with_slot(grant, file) if file.with_slot else _sealed_fields(file)
            if fields is None:
                self.release(grant)
                return None
            if file.source is not None:
                fields["first_epoch"], fields["last_epoch"] = partition.epochs_of(
                    file.source, fields["start_offset"]
                )
            return _grant_fields(grant) | fields
        except BaseException:
            if self._grants.get(grant.file_id) is grant:
                self.release(grant)
            raise

    def _with_slot(self, grant: Grant, file: OpenedFile) -> dict[str, Any] | None:
        """Attach a slot to the file, which may grow, or of which more may be read in time; its
        fields of a ConsumeGrant, or None when the file is finished, replaced, or not wholly
        registered any more."""
        peer, partition, segment = grant.peer, file.partition, file.segment
        grant.slot_index = peer.free_slot(self._slots_per_consumer)
        if grant.slot_index < 0:
            raise RefusedError(
                layout.ERROR_NO_FREE_SLOT,
                f"all {self._slots_per_consumer} metadata slots of this consumer are in use;"
                " raise rdma.slots.per.consumer on the broker",
            )
        peer.slots[grant.slot_index] = partition.topic_partition
        address = peer.slot_address(grant.slot_index)
        expected = segment.base_offset if segment is not None else None
        place = file.aborted.place if file.aborted is not None else None
        if not partition.kernel.attach_slot(address, grant.file_id, expected, aborted=place):
            return None
        slot = _read_slot(peer.slot_memory, grant.slot_index)
        moved_on = not partition.is_current(segment) or (
            expected is not None and slot.segment_base_offset != expected
        )
        if moved_on or (
            grant.region is not None and slot.last_readable_position > grant.region.length
        ):
            return None
        position, base = slot.last_readable_position, slot.high_watermark
        if segment is not None and file.wanted < partition.log_end_offset:
            position, base = file.position, file.base
        elif file.wanted > base:  # the log's end, and records before it may not be read yet
            position, base = 0, slot.segment_base_offset
            if segment is not None:
                position, base = file.position, file.base
        return {
            **slot._asdict(),
            "slot_index": grant.slot_index,
            "start_position": position,
            "start_offset": base,
        }

    def release(self, grant: Grant) -> None:
        """End a grant.  The second call does nothing."""
        if grant.released:
            return
        grant.released = True
        if grant.slot_index >= 0:
            grant.partition.kernel.detach_slot(grant.peer.slot_address(grant.slot_index))
            _clear_slot(grant.peer.slot_memory, grant.slot_index)
            grant.peer.give_back_slot(grant.slot_index)
            grant.slot_index = -1
        aborted, grant.aborted = grant.aborted, None
        if aborted is not None:
            aborted.give_back(self._grants.deregister)
        segment, grant.segment = grant.segment, None
        if segment is not None:
            self._background(partial(_close_region, grant.region, segment.release))
        self._grants.drop(grant)


def _refused(code: int, message: str) -> dict[str, Any]:
    """The fields of a ConsumeGrant that grants nothing."""
    return {"error_code": code, "error_message": message, "file_id": -1, "slot_index": -1}


def _grant_fields(grant: Grant) -> dict[str, Any]:
    """What a ConsumeGrant says of the file and the key to it."""
    region, partition = grant.region, grant.partition
    aborted = grant.aborted.region if grant.aborted is not None else None
    return {
        "aborted_rkey": aborted.rkey if aborted is not None else 0,
        "aborted_address": aborted.address if aborted is not None else 0,
        "aborted_length": aborted.length if aborted is not None else 0,
        "file_id": grant.file_id,
        "rkey": region.rkey if region is not None else 0,
        "address": region.address if region is not None else 0,
        "length": region.length if region is not None else 0,
        "log_start_offset": partition.log_start_offset,
        "leader_epoch": partition.leader_epoch,
        "dense_from": partition.dense_from,
    }


def _sealed_fields(file: OpenedFile) -> dict[str, Any]:
    """What a ConsumeGrant says of a file that changes no more."""
    partition, segment = file.partition, file.segment
    assert segment is not None
    return {
        "slot_index": -1,
        "segment_base_offset": segment.base_offset,
        "start_position": file.position,
        "start_offset": file.base,
        "last_readable_position": segment.size,
        "high_watermark": partition.high_watermark,
        "last_stable_position": segment.size,
        "last_stable_offset": partition.last_stable_offset,
    }


def _readable(partition: Partition, offset: int) -> int:
    """The offset that a reader means; RefusedError when it is not in the log, TieredOffsetError
    when it is in remote storage only, where no READ leads."""
    high_watermark, start = partition.high_watermark, partition.log_start_offset
    wanted = {LATEST_OFFSET: high_watermark, EARLIEST_OFFSET: start}.get(offset, offset)
    if not start <= wanted <= max(high_watermark, partition.log_end_offset):
        raise RefusedError(
            ErrorCode.OFFSET_OUT_OF_RANGE,
            f"offset {wanted} of {partition.topic_partition} is outside"
            f" [{start}, {high_watermark}]",
        )
    return int(partition.skip_gap(wanted))


def _register(peer: Peer, at: FileExtent) -> Any:
    """A key to what there is of a file."""
    # The file is the log's and is held by `at` until the key has ended (`_close_region`).  Clients
    # READ it; the log appends past what they may read, and never changes what is committed.
    memory = Memory.wrap(at.fd, at.address, at.mapped_length, False, at.owner)
    return peer.domain.register(memory, Access.REMOTE_READ, 0, at.length)


def _aborted_beside(peer: Peer, file: OpenedFile) -> AbortedRegion | None:
    """The list of aborted transactions for who reads an opened file from its position on."""
    partition, segment = file.partition, file.segment
    assert segment is not None
    start = file.base if file.base >= 0 else segment.base_offset
    if file.with_slot:
        return region_beside_slot(peer, partition, start)
    return region_of_finished(peer, partition, start, segment.end_offset)


def _read_slot(memory: Memory, index: int) -> SlotValues:
    """The broker's own view of a slot that it has just attached (repeated while the kernel updates
    it)."""
    base = index * layout.SLOT_BYTES
    view = memoryview(memory)
    while True:
        raw = bytes(view[base : base + layout.SLOT_BYTES])
        guard = int.from_bytes(raw[layout.SLOT_GUARD : layout.SLOT_FLAGS], "little")
        if guard == crc32c(raw[layout.SLOT_FLAGS :]):
            return SlotValues(
                segment_base_offset=_int64(raw, layout.SLOT_SEGMENT_BASE_OFFSET),
                last_readable_position=_int64(raw, layout.SLOT_LAST_READABLE_POSITION),
                high_watermark=_int64(raw, layout.SLOT_HIGH_WATERMARK),
                last_stable_position=_int64(raw, layout.SLOT_LAST_STABLE_POSITION),
                last_stable_offset=_int64(raw, layout.SLOT_LAST_STABLE_OFFSET),
            )


def _int64(raw: bytes, at: int) -> int:
    return int.from_bytes(raw[at : at + 8], "little", signed=True)


def _clear_slot(memory: Memory, index: int) -> None:
    base = index * layout.SLOT_BYTES
    memoryview(memory)[base : base + layout.SLOT_BYTES] = bytes(layout.SLOT_BYTES)


def _close_region(region: Any, release: Callable[[], None]) -> None:
    """End a key, then give back the memory under it.  Waits for a peer that is inside a copy."""
    if region is not None:
        region.deregister()
    release()
