"""Which member of a group may WRITE its offsets to this coordinator, and until when.

Owns: the commit slots of this broker, from the request that asks for one to the end of its key, and
what of ``__consumer_offsets`` they are folded into.  What may not enter: how a commit is checked
and appended without the loop (`kdirect.broker.commit_cells`), who is a member (`Groups`).

A slot is of one member in one generation, and the member may write nothing but its cells.  It ends
with the first of these, and then nothing that is written into it counts:

- the group is rebalanced, or the member leaves, is replaced, or its session ends (`look`, which the
  coordinator calls after each event and before anybody is told of it);
- this broker is not the group's coordinator any more (the same: the group is given up);
- one of its topics is deleted (`forget_topic`);
- the member asks for another one, gives it back, or its queue pair ends.

The worker is told first (`retire`), under its lock, and tells the member through its ring; then the
key ends; then what the worker has appended is folded.  A commit that was deferred is judged by the
loop once more when its turn comes.

A commit here is no heartbeat: the worker does not know of sessions.

Memory: the cells and the acknowledgements on their way are a slot's own, registered in the domain
of its member's queue pair.  The member WRITEs the cells until its key ends; the worker reads them,
and fills the acknowledgements, until `remove_slot` has returned.

All methods run on the event loop, but for `_told`, which the worker's thread calls.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from kdirect.broker.answers import Answer, respond
from kdirect.broker.commit_cells import CommitSlot, OffsetLog
from kdirect.broker.connection import Connection
from kdirect.broker.failures import access_refusal, explain
from kdirect.broker.grants import Peer
from kdirect.broker.services import Services
from kdirect.errors import KdirectError, RefusedError
from kdirect.format import layout
from kdirect.format import protocol as p
from kdirect.format.error_codes import ErrorCode
from kdirect.format.group_records import CommittedOffset, offset_key
from kdirect.log.config import NEVER
from kdirect.model import TopicPartition
from kdirect.rdma.contract import Access, Memory

log = logging.getLogger("kdirect.broker.groups")

MOST_NAME_BYTES = 255  # of a group that gets slots: each partition's key holds the name
MOST_ACK_ENTRIES = 4096


class Groups(Protocol):
    """Who is a member of what; `GroupHandlers`."""

    def refusal(self, group: str, /) -> int:
        """Why nothing may be said of a group here; NONE: its coordinator is this broker."""

    def may_commit(
        self, group: str, generation: int, member_id: str, instance_id: str | None, /
    ) -> int:
        """May this member commit offsets of the group now?  An error code."""

    def still_commits(
        self, group: str, generation: int, member_id: str, instance_id: str | None, /
    ) -> bool:
        """The same of a member that was judged before; nothing happens to it."""


class ClientAccess(Protocol):
    """As much of `kdirect.broker.access.AccessManager` as slots need."""

    grants: Any

    def peer_of(self, connection: Any, connection_id: int, /) -> Peer:
        """The queue pair of that number on this connection.  RefusedError."""

    def soon(self, call: Any, /, *arguments: Any) -> None:
        """Call it on the event loop.  Any thread."""


@dataclass(eq=False, slots=True)
class Slot:
    """One member's slot.  `index`: of the partition that keeps its group."""

    file_id: int
    peer: Peer
    group: str
    generation: int
    member_id: str
    instance_id: str | None
    partitions: tuple[TopicPartition, ...]
    index: int
    cells: CommitSlot
    region: Any
    staging: Any
    ended: bool = False


class CommitSlots:
    """See the module."""

    def __init__(self, services: Services, groups: Groups, access: ClientAccess) -> None:
        self._services = services
        self._store = services.offsets
        self._groups = groups
        self._access = access
        self._enabled = bool(services.config["rdma.commit"])
        self._slots: dict[str, dict[int, Slot]] = {}  # group -> file id -> slot
        self._logs: dict[int, OffsetLog] = {}  # partition of __consumer_offsets -> where it is
        self._paused: dict[int, int] = {}  # partition -> how often
        self._store.use_slots(self)

    # -- requests ----------------------------------------------------------------------------------

    def get_commit_slot(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        try:
            slot = self._grant(connection, request)
        except (KdirectError, OSError) as e:
            refusal = access_refusal(e)
            return respond(
                header,
                p.GetCommitSlotResponse,
                error_code=refusal.code,
                error_message=str(refusal),
                file_id=-1,
            )
        cells = slot.cells
        return respond(
            header,
            p.GetCommitSlotResponse,
            file_id=slot.file_id,
            address=slot.region.address,
            rkey=slot.region.rkey,
            cell_bytes=cells.cell_bytes,
            cells=layout.OFFSETS_CELLS,
            token=cells.token,
        )

    def _grant(self, connection: Connection, request: Any) -> Slot:
        """A slot as the member asks for it.  KdirectError says why not."""
        if not self._enabled:
            raise RefusedError(
                layout.ERROR_ACCESS_DISABLED,
                "commits over RDMA are switched off on this broker (rdma.commit=false); use TCP",
            )
        peer = self._access.peer_of(connection, request.connection_id)
        self._check_member(request)
        partitions = self._checked_partitions(request)
        for old in list(self._slots.get(request.group_id, {}).values()):
            if old.peer is peer or old.member_id == request.member_id:
                self._end(old)
        index = self._store.index_of(request.group_id)
        offsets = self._log_of(request.group_id, index)
        keys = [offset_key(request.group_id, tp.topic, tp.partition) for tp in partitions]
        cell_bytes = layout.OFFSETS_HEADER_BYTES + len(partitions) * layout.OFFSETS_ENTRY_BYTES
        memory = Memory.anonymous(layout.OFFSETS_CELLS * cell_bytes, "kdirect-offsets")
        token = int.from_bytes(os.urandom(8), "little") >> 1
        cells = CommitSlot(offsets, memory, keys, request.generation_id_or_member_epoch, token)
        slot = Slot(
            self._access.grants.reserve(), peer, request.group_id,
            request.generation_id_or_member_epoch, request.member_id, request.group_instance_id,
            partitions, index, cells, None, None,
        )  # fmt: skip
        try:
            self._install(slot, memory, request)
        except BaseException:
            self._access.grants.give_back(slot.file_id)
            self._close_log(index)
            raise
        return slot

    def _check_member(self, request: Any) -> None:
        """RefusedError unless the request is of a member that may commit now."""
        group, entries = request.group_id, request.ack_entries
        if (
            request.generation_id_or_member_epoch < 0
            or not request.member_id
            or len(group.encode()) > MOST_NAME_BYTES
            or not layout.OFFSETS_CELLS < entries <= MOST_ACK_ENTRIES
            or entries & (entries - 1)
            or not 0 <= request.ack_rkey < 1 << 32
            or request.ack_address < 0
        ):
            raise RefusedError(
                ErrorCode.INVALID_REQUEST,
                "a commit slot is for a member in its generation, of a group with a name of at most"
                f" {MOST_NAME_BYTES} bytes, whose ring has more entries than the slot has cells",
            )
        error = self._groups.may_commit(
            group,
            request.generation_id_or_member_epoch,
            request.member_id,
            request.group_instance_id,
        )
        if error:
            raise RefusedError(error, f"member {request.member_id!r} may not commit for {group!r}")
        if not self._store.partition_count:
            raise RefusedError(
                ErrorCode.COORDINATOR_NOT_AVAILABLE, "there is no topic for offsets yet"
            )

    def _checked_partitions(self, request: Any) -> tuple[TopicPartition, ...]:
        """The partitions that a request names, in the order of their indexes.  RefusedError."""
        found: dict[TopicPartition, None] = {}
        count = 0
        for topic in request.topics:
            known = self._services.topics.find(topic.name)
            for index in topic.partitions:
                if known is None or known.deleting or not 0 <= index < known.partition_count:
                    raise RefusedError(
                        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"there is no {topic.name}-{index}"
                    )
                found[TopicPartition(topic.name, index)] = None
                count += 1
        if not 1 <= count <= layout.OFFSETS_MOST_PARTITIONS or len(found) != count:
            raise RefusedError(
                ErrorCode.INVALID_REQUEST,
                f"a commit slot is for 1 to {layout.OFFSETS_MOST_PARTITIONS} different partitions;"
                " commit over TCP",
            )
        return tuple(found)

    def _install(self, slot: Slot, memory: Memory, request: Any) -> None:
        peer, cells = slot.peer, slot.cells
        worker = peer.engine.worker
        slot.region = peer.domain.register(memory, Access.LOCAL_WRITE | Access.REMOTE_WRITE)
        try:
            slot.staging = peer.domain.register(
                Memory.anonymous(request.ack_entries * layout.ACK_BYTES, "kdirect-acks"),
                Access.LOCAL_WRITE,
            )
            worker.on_offsets = self._told
            cells.owner = slot
            cells.log.add(cells)
            worker.install_slot(
                slot.file_id,
                cells,
                peer.qp,
                request.ack_address,
                request.ack_rkey,
                request.ack_entries,
                slot.staging,
            )
        except BaseException:
            if cells in cells.log.slots:
                cells.log.remove(cells)
            for region in (slot.region, slot.staging):
                if region is not None:
                    self._access.grants.deregister(region)
            raise
        self._slots.setdefault(slot.group, {})[slot.file_id] = slot
        peer.others[slot.file_id] = partial(self._end, slot)

    # -- the end of slots --------------------------------------------------------------------------

    def look(self, group: str) -> None:
        """Something has happened to a group, or, with no name, to some: slots of members that may
        not commit any more end.  Before anybody is told of what has happened."""
        for name in [group] if group else list(self._slots):
            for slot in list(self._slots.get(name, {}).values()):
                if not self._groups.still_commits(
                    name, slot.generation, slot.member_id, slot.instance_id
                ):
                    self._end(slot)

    def forget_topic(self, topic: str) -> None:
        """A topic is gone: nobody commits offsets in it any more."""
        for slots in list(self._slots.values()):
            for slot in list(slots.values()):
                if any(tp.topic == topic for tp in slot.partitions):
                    self._end(slot)

    def _end(self, slot: Slot) -> None:
        """The second call does nothing."""
        if slot.ended:
            return
        slot.ended = True
        worker, grants = slot.peer.engine.worker, self._access.grants
        worker.retire(slot.file_id, True)
        grants.deregister(slot.region)
        worker.remove_slot(slot.file_id, slot.cells)
        grants.deregister(slot.staging)
        self.fold()
        slot.cells.log.remove(slot.cells)
        slots = self._slots[slot.group]
        del slots[slot.file_id]
        if not slots:
            del self._slots[slot.group]
        slot.peer.others.pop(slot.file_id, None)
        grants.give_back(slot.file_id)
        self._close_log(slot.index)

    # -- logs --------------------------------------------------------------------------------------

    def _log_of(self, group: str, index: int) -> OffsetLog:
        """Where commits of a group go.  The worker appends them itself where no replica and no
        flush has to be waited for."""
        found = self._logs.get(index)
        if found is None:
            partition = self._store.partition_of(group)
            direct = self._services.replicas is None and partition.config.flush_messages == NEVER
            found = self._logs[index] = OffsetLog(partition.kernel, direct=direct)
            for _ in range(self._paused.get(index, 0)):
                found.pause()
        return found

    def _close_log(self, index: int) -> None:
        if not self._logs[index].slots:
            del self._logs[index]

    def pause(self, index: int) -> None:
        """See `kdirect.broker.state_topic.DirectAppends`."""
        self._paused[index] = self._paused.get(index, 0) + 1
        found = self._logs.get(index)
        if found is not None:
            found.pause()
            self.fold()

    def resume(self, index: int) -> None:
        """See `kdirect.broker.state_topic.DirectAppends`."""
        count = self._paused.pop(index) - 1
        if count:
            self._paused[index] = count
        found = self._logs.get(index)
        if found is not None:
            found.resume()

    def fold(self) -> None:
        """Bring the table of offsets up to what the worker has appended."""
        for offsets in self._logs.values():
            for _, cells, i, offset, epoch, time_ms in offsets.fold():
                slot = cells.owner
                self._store.remember(
                    slot.group, slot.partitions[i], CommittedOffset(offset, epoch, "", time_ms)
                )

    # -- commits that the worker has left to the loop ----------------------------------------------

    def _told(self, cells: CommitSlot, commits: list[Any]) -> None:
        """The worker has deferred commits of a slot, or has appended many."""
        self._access.soon(self._take_news, cells, commits)

    def _take_news(self, cells: CommitSlot, commits: list[Any]) -> None:
        slot: Slot = cells.owner
        self.fold()
        for order, error, entries in commits:
            self._commit(slot, order, error, entries)

    def _commit(
        self, slot: Slot, order: int, error: int, entries: list[tuple[int, int, int]]
    ) -> None:
        if slot.ended:  # nobody waits for the answer
            return
        error = error or self._groups.may_commit(
            slot.group, slot.generation, slot.member_id, slot.instance_id
        )
        if error:
            self._answer(slot, order, error)
            return
        now = self._services.environment.time_ms()
        offsets = {
            slot.partitions[i]: CommittedOffset(offset, epoch, "", now)
            for i, offset, epoch in entries
        }
        committed = self._store.commit(slot.group, offsets)
        committed.add_done_callback(partial(self._committed, slot, order))

    def _committed(self, slot: Slot, order: int, committed: asyncio.Future[Any]) -> None:
        """It is appended, or could not be; it may have to be on disk, too."""
        error = None if committed.cancelled() else committed.exception()
        partition = None if committed.cancelled() or error is not None else committed.result()
        if partition is not None and partition.acknowledgements_wait():
            flushed = asyncio.ensure_future(self._services.flusher.flushed(partition))
            flushed.add_done_callback(partial(self._flushed, slot, order))
        else:
            self._answer(slot, order, self._code(slot, committed))

    def _flushed(self, slot: Slot, order: int, flushed: asyncio.Future[Any]) -> None:
        self._answer(slot, order, self._code(slot, flushed))

    def _code(self, slot: Slot, outcome: asyncio.Future[Any]) -> int:
        """What a commit is answered; as one over TCP."""
        if not outcome.cancelled():
            error = outcome.exception()
            if error is None:
                return ErrorCode.NONE
            explain(error, "a commit of offsets")
        return self._groups.refusal(slot.group) or ErrorCode.COORDINATOR_NOT_AVAILABLE

    def _answer(self, slot: Slot, order: int, error: int) -> None:
        slot.peer.engine.worker.answer_commit(slot.file_id, slot.cells, order, error)

    def table(self) -> Iterable[tuple[str, Any, bool]]:
        return (("GetCommitSlot", self.get_commit_slot, False),)
