"""One head file and those who write it (KafkaDirect §4.2.2).

Owns: the grants of one head, its shared word, the broker's own requests on it.  Decides nothing:
when a head is opened, drained, recalled or ended is `kdirect.broker.produce_access`'s business; in
which order requests are committed, the produce worker's.

Life: made with a head file that nobody writes by RDMA, `join` and `leave` as producers come and go,
then `fence` and `end`, once and for good.  The event loop's, but for `fence` and `written_end`,
which any thread may call: they wait for producers and look at memory.

Memory: each member has a key to the file from its tail on, and to the word, in its own protection
domain.  The keys to the file end with the head; the keys to the word live until the member comes
back or leaves, and the word is closed then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kdirect.broker.appends import PendingAppend
from kdirect.broker.engine import Engine
from kdirect.broker.grants import Grant, GrantTable, Peer
from kdirect.broker.shared_word import SharedWord
from kdirect.errors import AccessDeniedError, RefusedError, RevokedError
from kdirect.format import layout
from kdirect.log.head import PreparedHead
from kdirect.log.partition import Partition
from kdirect.log.segment import Segment
from kdirect.rdma.contract import Access, Memory

SHARED_WINDOW = 256  # requests under way of one producer of a shared head: orders of all together stay below 2**15
OWN_WINDOW = 256  # the broker's own
DEREGISTER_MS = 20  # a producer that is inside a copy for longer is stopped or hangs; then the head moves to a fresh file
ZERO_CHUNK = 64 << 10


@dataclass(frozen=True, slots=True)
class Appended:
    """Outcome of an append through a shared head; fields as of CommitResult."""

    error: int
    base_offset: int
    log_append_time: int


class HeadAccess:
    """See the module.  `explicit`: its one holder wants it for itself.  `file`: the head, or a
    prepared file that is granted ahead, to the producer that fills the head `before`; it is the
    head from `go_on` on."""

    def __init__(
        self, partition: Partition, file: Segment | PreparedHead, engine: Engine, *, shared: bool, explicit: bool, entries: int,
        hole_timeout_ms: int, before: HeadAccess | None = None,
    ) -> None:  # fmt: skip
        kernel = partition.kernel
        self.partition = partition
        self.segment: Segment | None = file if isinstance(file, Segment) else None
        self.prepared: PreparedHead | None = None if isinstance(file, Segment) else file
        self.engine = engine
        self.explicit = explicit
        self.before = before
        self.after: HeadAccess | None = None  # granted ahead to the one who fills this one
        self.next_file: PreparedHead | None = (
            None  # that is to be granted ahead; its maker hands it over
        )
        self.preparing = False  # it is being made
        self.capacity = (
            int(kernel.capacity)
            if self.prepared is None
            else min(self.prepared.length, partition.config.segment_bytes)
        )
        self.full_length = max(
            self.capacity, partition.config.segment_bytes
        )  # a smaller head grows
        position = self.tail
        self.word = SharedWord(engine.loopback, position) if shared else None
        self.head = engine.worker.open_head(
            kernel, self.segment.base_offset if self.segment is not None else -1, position, partition.leader_epoch, shared=shared,
            entries=entries, hole_timeout_ms=hole_timeout_ms, ahead_bytes=self.capacity if self.prepared is not None else 0,
        )  # fmt: skip
        self.head.owner = self
        self.members: dict[int, Grant] = {}
        self.own: dict[int, PendingAppend] = {}  # by order
        self.draining = (
            False  # nobody reserves any more; it ends when everything reserved is committed
        )
        self.idle = False  # draining because nobody writes, not because it is full
        self.recalled = False  # the holder was asked to come back
        self.ending = False  # it ends in a moment
        self.finishing = False  # a thread fences it and repairs its file
        self.ended = False
        self._fenced = False
        self.pumping = False  # the broker's own requests that waited are being brought on their way
        self._left = True  # False: somebody is still inside a copy into the file
        self._leaving: list[
            tuple[Peer, Any]
        ] = []  # regions of producers that were inside a copy when they left
        self._window = OWN_WINDOW

    @property
    def shared(self) -> bool:
        return self.word is not None

    @property
    def tail(self) -> int:
        """Where the committed bytes end."""
        return int(self.partition.kernel.end_position) if self.segment is not None else 0

    def join(
        self, grants: GrantTable, peer: Peer, request: Any, *, sync_first: bool, watched: bool
    ) -> dict[str, Any]:
        """Grant the head to one more producer; the answer's fields.  RevokedError: the
        worker has ended the head, and word of it is on its way."""
        position = self.tail
        window = (
            min(request.max_in_flight, peer.max_in_flight)
            if request.max_in_flight > 0
            else peer.max_in_flight
        )
        if self.word is not None:
            window = min(window, SHARED_WINDOW)
            try:
                self.engine.worker.widen(self.head, self._window + window)
            except AccessDeniedError as e:
                raise RefusedError(
                    layout.ERROR_ACCESS_CONTENDED,
                    f"{self.partition.topic_partition} has too many RDMA producers: {e}",
                ) from e
        grant = grants.new(peer, self.partition, self.segment, self)
        if self.segment is not None:  # else it is a prepared file, which lives until it is fenced
            self.segment.acquire()  # it is the head, and mapped
        try:
            memory = self._memory()
            grant.region = peer.domain.register(
                memory, Access.LOCAL_WRITE | Access.REMOTE_WRITE, position, self.capacity - position
            )
            grant.staging = peer.domain.register(
                Memory.anonymous(request.ack_entries * layout.ACK_BYTES, "kdirect-acks"),
                Access.LOCAL_WRITE,
            )
            if self.word is not None:
                grant.word = self.word.register(peer.domain)
            self.members[grant.file_id] = grant  # before it is open: `fence` ends its keys
            if not self.engine.worker.install(
                grant.file_id, self.head, peer.qp, request.ack_address, request.ack_rkey, request.ack_entries, grant.staging, sync_first,
                watched,
            ):  # fmt: skip
                raise RevokedError(
                    f"the head of {self.partition.topic_partition} has ended", hint="ask again"
                )
        except BaseException:
            self.members.pop(grant.file_id, None)
            for region in (grant.region, grant.staging, grant.word):  # nobody has been told of them
                if region is not None:
                    grants.end_key(region)
            grants.drop(grant)
            raise
        grant.max_in_flight = window
        self._window += window
        return {
            "file_id": grant.file_id,
            "rkey": grant.region.rkey,
            "address": grant.region.address - position,
            "length": self.capacity,
            "position": position,
            "next_offset": self.partition.log_end_offset,
            "leader_epoch": self.partition.leader_epoch,
            "max_message_bytes": self.partition.config.max_message_bytes,
            "mode": layout.PRODUCE_SHARED if self.word is not None else layout.PRODUCE_EXCLUSIVE,
            "word_address": grant.word.address if grant.word is not None else 0,
            "word_rkey": grant.word.rkey if grant.word is not None else 0,
            "max_in_flight": window,
            "full_length": self.full_length,
        }

    def _memory(self) -> Memory:
        """The mapped file.  It outlives the keys: a grant holds the segment, and a prepared file is
        discarded once it is fenced."""
        if self.prepared is not None:
            return Memory.wrap(
                self.prepared.fd, self.prepared.address, self.prepared.length, True, self.prepared
            )
        assert self.segment is not None
        return Memory.wrap(
            self.segment.fd, self.segment.address, self.segment.mapped_length, True, self.segment
        )

    def go_on(self, segment: Segment) -> bool:
        """The file that was granted ahead is the partition's head now, as `segment`, acquired for
        its one grant: what has arrived is committed.  False when its producer is gone."""
        self.segment, self.prepared, self.before = segment, None, None
        (grant,) = self.members.values()
        grant.segment = segment
        return bool(
            self.engine.worker.go_on(self.head, segment.base_offset, self.partition.leader_epoch)
        )

    def is_answered(self) -> bool:
        """Has every acknowledgement been written into its producer's ring?"""
        return all(self.engine.worker.is_answered(file_id) for file_id in self.members)

    def leave(self, grants: GrantTable, grant: Grant, *, clean: bool) -> None:
        """One producer leaves a head that goes on.  `clean`: it said so itself, with nothing under
        way."""
        worker = self.engine.worker
        worker.retire(grant.file_id, False)
        if not grant.region.deregister(
            0
        ):  # who fences the head, or closes the peer, waits until it is out of the file
            self._leaving.append((grant.peer, grant.region))
            grant.peer.leaving.add(self)
        worker.remove(grant.file_id)
        grants.end_key(grant.staging)
        if grant.word is not None:
            grants.end_key(grant.word)
        self.members.pop(grant.file_id, None)
        grants.drop(grant)
        if clean:  # else its reservations may still be outstanding
            self._window -= grant.max_in_flight

    def fence(self, *, notify: bool) -> None:
        """Nothing more is committed or written from here on; what producers have under way fails,
        and with `notify` they are told so through their rings.  Any thread; takes a moment while
        they are inside a copy."""
        self.ending = True
        head = self.head
        if (
            head is not None
        ):  # else another thread has fenced it meanwhile, and the loop has ended it
            self.engine.worker.close_head(head, notify)
        if self.word is not None:
            self.word.close()
        members = [
            g.region for g in list(self.members.values())
        ]  # first: who leaves meanwhile is among those that leave
        for region in [*members, *(region for _, region in self._leaving)]:
            if region is not None:
                self.end_key(region)
        self._fenced = True

    def end_key(self, region: Any, timeout_ms: float = DEREGISTER_MS) -> bool:
        """End a producer's key to the file.  False when the producer is still inside a copy: then
        the file is not used on once the head has ended.  Any thread."""
        if region.deregister(timeout_ms):
            return True
        self._left = False
        return False

    def left_by(self, peer: Peer) -> list[Any]:
        """The keys of a producer that was inside a copy when it left."""
        return [region for p, region in self._leaving if p is peer]

    @property
    def fenced(self) -> bool:
        return self._fenced

    @property
    def left(self) -> bool:
        """Has everybody left the file?  Known once it is fenced."""
        return self._left

    def written_end(self) -> int:
        """Where the bytes end that may have been written.  Any thread, once it is fenced; reads up
        to ``max.message.bytes`` of the file."""
        tail = end = self.tail
        if self.word is not None:
            end = min(self.word.close().position, self.capacity)
        else:
            for grant in list(self.members.values()):
                end = _written_end(grant, tail)
        return max(end, tail)

    def end(
        self, grants: GrantTable, answered: Callable[[Any, list[Any]], None]
    ) -> list[PendingAppend]:
        """End it for good: keys, grants, the worker's part.  The broker's own requests that were
        not committed, in order."""
        worker = self.engine.worker
        self.ended = True
        if not self._fenced:
            self.fence(notify=False)
        for grant in list(self.members.values()):
            worker.remove(grant.file_id)
            grants.end_key(grant.staging)
            grant.region = grant.staging = None
            if grant.word is None:
                grants.drop(grant)
            else:
                grants.let_go(grant)
        self.members.clear()
        for peer, _ in self._leaving:
            peer.leaving.discard(self)
        self._leaving.clear()
        orders = [order for order, _ in worker.unanswered(self.head)]
        answered(self.head, worker.forget_head(self.head))
        if self.word is not None:
            self.word.end()
        self.head = None  # it holds this object: in a cycle they would keep the word's memory until the collector comes
        return [self.own.pop(order) for order in orders if order in self.own]


def _written_end(grant: Grant, tail: int) -> int:
    """Where the bytes end that an exclusive producer wrote behind the tail.  Requests are
    contiguous and none is longer than max.message.bytes, so a longer stretch of zeros is the end; a
    64 MiB file need not be touched to its last page."""
    view = memoryview(grant.region.memory)
    limit = grant.partition.config.max_message_bytes
    end = at = tail
    while at < len(view) and at - end <= limit:
        chunk = bytes(view[at : at + ZERO_CHUNK])
        if chunk.count(0) != len(chunk):
            end = at + len(chunk)
        at += len(chunk)
    return end
