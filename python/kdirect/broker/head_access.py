"""One head file and the keys that producers have to it (KafkaDirect §4.2.2).

Owns: the grants of one head, its shared word, the broker's own requests on it.  Decides nothing:
when a head is opened, drained, recalled or ended is `kdirect.broker.head_life`'s business, and in
which order requests are committed the produce worker's.

Life: made with a head file that nobody writes by RDMA, or with a prepared file that is granted
ahead; `join` and `leave` as producers come and go; `become_head` when a prepared file is the head;
then `fence` and `end`, once and for good.  It belongs to the event loop, except `fence` and
`written_end`: any thread may call them, and they wait for producers and look at memory.

Memory: each member has a key to the file from its tail on, and to the word, in its own protection
domain.  The keys to the file end with the head.  The keys to the word live until the member comes
back or leaves, and the word is closed then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kdirect.broker.appends import PendingAppend
from kdirect.broker.grants import Grant, GrantTable, Peer, PeerEngine
from kdirect.broker.shared_word import SharedWord
from kdirect.errors import AccessDeniedError, RefusedError, RevokedError
from kdirect.format import layout
from kdirect.format import protocol as p
from kdirect.format.schema import build
from kdirect.log.head import PreparedHead
from kdirect.log.partition import Partition
from kdirect.log.segment import Segment
from kdirect.rdma.contract import Access, Memory

# Requests under way of one producer of a shared head: the orders of all together stay below 2**15.
SHARED_WINDOW = 256
BROKER_WINDOW = 256  # the broker's own requests under way
# A producer that is inside a copy for longer is stopped or hangs: the log goes on in a fresh file.
DEREGISTER_MS = 20
ZERO_CHUNK_BYTES = 64 << 10
# A producer that is granted a head alone enters its transaction at once; if others could have the
# head before, two that ask for it would take it from each other again and again.
ENTER_S = 1.0


@dataclass(frozen=True, slots=True)
class Appended:
    """Outcome of an append through a shared head; fields as of CommitResult.  `last_offset` -1: the
    worker does not tell it."""

    error: int
    base_offset: int
    log_append_time: int
    last_offset: int = -1


class HeadAccess:
    """See the module.  `file` is the head, or a prepared file that is granted ahead to the producer
    that fills the head."""

    def __init__(
        self,
        partition: Partition,
        file: Segment | PreparedHead,
        engine: PeerEngine,
        *,
        shared: bool,
        entries: int,
        hole_timeout_ms: int,
    ) -> None:
        kernel = partition.kernel
        self.partition = partition
        self.segment: Segment | None = file if isinstance(file, Segment) else None
        self.prepared: PreparedHead | None = None if isinstance(file, Segment) else file
        self.engine = engine
        # What follows this head in the hands of the same producer: the file that was made for it,
        # until it is granted, then the access to it.
        self.next_file: PreparedHead | None = None
        self.successor: HeadAccess | None = None
        segment_bytes = partition.config.segment_bytes
        self.capacity = (
            int(kernel.capacity)
            if self.prepared is None
            else min(self.prepared.length, segment_bytes)
        )
        self.full_length = max(self.capacity, segment_bytes)  # a smaller head grows
        position = self.tail
        self.word = SharedWord(engine.loopback, position) if shared else None
        self.requests = engine.worker.open_head(
            kernel,
            self.segment.base_offset if self.segment is not None else -1,
            position,
            partition.leader_epoch,
            shared=shared,
            entries=entries,
            hole_timeout_ms=hole_timeout_ms,
            ahead_bytes=self.capacity if self.prepared is not None else 0,
        )
        self.requests.owner = self
        self.members: dict[int, Grant] = {}
        self.broker_requests: dict[int, PendingAppend] = {}  # by order
        # The one producer of an exclusive head has nothing under way, and has promised to write
        # nothing until it has entered its next transaction (`ProduceAccess.resume`).
        self.between_transactions = False
        # Until then (monotonic s) a producer that was granted the head may enter its first
        # transaction there, before the head is given to another one in turn.
        self.enters_until = float("-inf")
        self.ended = False
        # Written by any thread, in this order: a thread has begun to end the keys; it has ended
        # them.
        self.fencing = False
        self.fenced = False
        # False: a producer is still inside a copy into the file, which is not used on then.  Known
        # once the head is fenced.
        self.vacated = True
        # Regions of producers that were inside a copy when they left.
        self._leaving: list[tuple[Peer, Any]] = []
        self._window = BROKER_WINDOW

    @property
    def shared(self) -> bool:
        return self.word is not None

    @property
    def tail(self) -> int:
        """The position at which the committed bytes end."""
        return int(self.partition.kernel.end_position) if self.segment is not None else 0

    # -- members -----------------------------------------------------------------------------------

    def join(
        self, grants: GrantTable, peer: Peer, request: Any, *, watched: bool, now: float
    ) -> p.GetProduceAccessResponse:
        """Grant the head to one more producer; the answer to its request.  RevokedError: the
        worker has ended the head, and news of it is on its way."""
        position = self.tail
        window = self._window_of(peer, request)
        grant = self._new_grant(grants, peer)
        self.between_transactions = request.enters and not self.shared
        self.enters_until = now + ENTER_S
        grant.waits_for_replicas = request.acks != 1
        try:
            self._give_keys(grant, request, position)
            self.members[grant.file_id] = grant  # before it is open: `fence` ends its keys
            if not self.engine.worker.install(
                grant.file_id,
                self.requests,
                peer.qp,
                request.ack_address,
                request.ack_rkey,
                request.ack_entries,
                grant.staging,
                watched,
                not grant.waits_for_replicas,
            ):
                raise RevokedError(
                    f"the head of {self.partition.topic_partition} has ended", hint="ask again"
                )
        except BaseException:
            self.members.pop(grant.file_id, None)
            for region in (grant.region, grant.staging, grant.word):  # nobody was given these keys
                if region is not None:
                    grants.deregister(region)
            grants.drop(grant)
            raise
        grant.max_in_flight = window
        self._window += window
        return self._granted(grant, position)

    def _new_grant(self, grants: GrantTable, peer: Peer) -> Grant:
        """A grant that holds the head.  A prepared file needs no holder: it lives until it is
        fenced."""
        segment = self.segment
        if segment is not None:
            segment.acquire()
        try:
            return grants.new(peer, self.partition, segment, self)
        except BaseException:
            if segment is not None:
                segment.release()
            raise

    def _window_of(self, peer: Peer, request: Any) -> int:
        """How many requests a producer may have under way; on a shared head, with room for their
        orders."""
        window = int(peer.max_in_flight)
        if request.max_in_flight > 0:
            window = min(request.max_in_flight, window)
        if self.word is None:
            return window
        window = min(window, SHARED_WINDOW)
        try:
            self.engine.worker.widen(self.requests, self._window + window)
        except AccessDeniedError as e:
            raise RefusedError(
                layout.ERROR_ACCESS_CONTENDED,
                f"{self.partition.topic_partition} has too many RDMA producers: {e}",
            ) from e
        return window

    def _give_keys(self, grant: Grant, request: Any, position: int) -> None:
        domain = grant.peer.domain
        # The file is the partition's.  The producer writes it from the tail on, until the key ends:
        # `fence` or `leave`, which know whether it is still inside a copy.
        grant.region = domain.register(
            self._memory(),
            Access.LOCAL_WRITE | Access.REMOTE_WRITE,
            position,
            self.capacity - position,
        )
        # Acknowledgements on their way to the producer's ring, which is as large.  The worker fills
        # an entry, which is the transport's from the post of its WRITE to that one's completion.
        # It goes with the grant, once the worker has forgotten that (`ProduceTables.remove`).
        grant.staging = domain.register(
            Memory.anonymous(request.ack_entries * layout.ACK_BYTES, "kdirect-acks"),
            Access.LOCAL_WRITE,
        )
        if self.word is not None:
            # The word's memory is the head's; this key ends when its producer comes back or leaves.
            grant.word = self.word.register(domain)

    def _granted(self, grant: Grant, position: int) -> p.GetProduceAccessResponse:
        partition = self.partition
        return build(  # type: ignore[no-any-return]
            p.GetProduceAccessResponse,
            file_id=grant.file_id,
            rkey=grant.region.rkey,
            address=grant.region.address - position,
            length=self.capacity,
            position=position,
            next_offset=partition.log_end_offset,
            leader_epoch=partition.leader_epoch,
            max_message_bytes=partition.config.max_message_bytes,
            mode=layout.PRODUCE_SHARED if self.shared else layout.PRODUCE_EXCLUSIVE,
            word_address=grant.word.address if grant.word is not None else 0,
            word_rkey=grant.word.rkey if grant.word is not None else 0,
            max_in_flight=grant.max_in_flight,
            full_length=self.full_length,
        )

    def _memory(self) -> Memory:
        """The mapped file.  It outlives the keys: a grant holds the segment, and a prepared file is
        discarded once it is fenced."""
        file = self.prepared
        if file is not None:
            return Memory.wrap(file.fd, file.address, file.length, True, file)
        head = self.segment
        assert head is not None
        return Memory.wrap(head.fd, head.address, head.mapped_length, True, head)

    def leave(self, grants: GrantTable, grant: Grant, *, clean: bool) -> None:
        """One producer leaves a head that goes on.  `clean`: it said so itself, with nothing under
        way."""
        worker = self.engine.worker
        worker.retire(grant.file_id, False)
        if not grant.region.deregister(0):
            # Whoever fences the head, or closes the peer, waits until it is out of the file.
            self._leaving.append((grant.peer, grant.region))
            grant.peer.leaving.add(self)
        worker.remove(grant.file_id)
        grants.deregister(grant.staging)
        if grant.word is not None:
            grants.deregister(grant.word)
        self.members.pop(grant.file_id, None)
        grants.drop(grant)
        if clean:  # else its reservations may still be outstanding
            self._window -= grant.max_in_flight

    # -- the broker's own requests -----------------------------------------------------------------

    def takes_between(self, length: int) -> bool:
        """May the broker append so many bytes at the tail of this exclusive head, whose producer
        writes nothing now?"""
        requests = self.requests
        return (
            self.between_transactions
            and requests is not None
            and not requests.waiting
            and requests.position + length <= self.capacity
        )

    def submit(self, order: int, item: PendingAppend) -> list[Any] | None:
        """Give the worker a request of the broker's own, of an order that nobody else has.  The
        answers that are known now, to this one and others; None: the head has ended."""
        self.broker_requests[order] = item
        try:
            answers: list[Any] = self.engine.worker.submit_broker_request(
                self.requests, order, item.data, item.checked, item.is_marker
            )
        except AccessDeniedError:
            del self.broker_requests[order]
            return None
        return answers

    # -- a file that was granted ahead -------------------------------------------------------------

    def become_head(self, segment: Segment) -> bool:
        """The file that was granted ahead is the partition's head now, as `segment`, acquired for
        its one grant: what has arrived is committed.  False when its producer is gone."""
        self.segment, self.prepared = segment, None
        (grant,) = self.members.values()
        grant.segment = segment
        return bool(
            self.engine.worker.begin_head(
                self.requests, segment.base_offset, self.partition.leader_epoch
            )
        )

    def is_answered(self) -> bool:
        """Has every acknowledgement been written into its producer's ring?"""
        return all(self.engine.worker.is_answered(file_id) for file_id in self.members)

    # -- the end -----------------------------------------------------------------------------------

    def fence(self, *, notify: bool) -> None:
        """Nothing more is committed or written from here on; what producers have under way fails,
        and with `notify` they are told so through their rings.  Any thread; takes a moment while
        they are inside a copy."""
        self.fencing = True
        requests = self.requests
        if requests is not None:  # else another thread has fenced it, and the loop has ended it
            self.engine.worker.close_head(requests, notify)
        if self.word is not None:
            self.word.close()
        # The members first: whoever leaves meanwhile is then among those that leave.
        members = [grant.region for grant in list(self.members.values())]
        for region in [*members, *(region for _, region in self._leaving)]:
            if region is not None:
                self.end_file_key(region)
        self.fenced = True

    def end_file_key(self, region: Any, timeout_ms: float = DEREGISTER_MS) -> bool:
        """End a producer's key to the file.  False when the producer is still inside a copy: then
        the file is not used on once the head has ended.  Any thread."""
        if region.deregister(timeout_ms):
            return True
        self.vacated = False
        return False

    def keys_left_by(self, peer: Peer) -> list[Any]:
        """The keys of a producer that was inside a copy when it left."""
        return [region for left, region in self._leaving if left is peer]

    def written_end(self) -> int:
        """The position at which the bytes end that may have been written.  Any thread, once it is
        fenced; reads up to ``max.message.bytes`` of the file."""
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
        if not self.fenced:
            self.fence(notify=False)
        for grant in list(self.members.values()):
            worker.remove(grant.file_id)
            grants.deregister(grant.staging)
            grant.region = grant.staging = None
            if grant.word is not None and not grant.released:
                # Its producer has not noticed yet, and learns of it by the closed word.
                grants.release_segment(grant)
                continue
            if grant.word is not None:  # its producer left while a thread was at work
                grants.deregister(grant.word)
            grants.drop(grant)
        self.members.clear()
        for peer, _ in self._leaving:
            peer.leaving.discard(self)
        self._leaving.clear()
        orders = [order for order, _ in worker.unanswered(self.requests)]
        answered(self.requests, worker.forget_head(self.requests))
        if self.word is not None:
            self.word.end()
        # The worker's part holds this object: in a cycle they would keep the word's memory until
        # the collector comes.
        self.requests = None
        broker_requests = self.broker_requests
        return [broker_requests.pop(order) for order in orders if order in broker_requests]


def _written_end(grant: Grant, tail: int) -> int:
    """The position at which the bytes end that an exclusive producer wrote past the tail.  Requests
    are contiguous and none is longer than max.message.bytes, so a longer stretch of zeros is the
    end; a 64 MiB file need not be touched to its last page."""
    view = memoryview(grant.region.memory)
    limit = grant.partition.config.max_message_bytes
    end = at = tail
    while at < len(view) and at - end <= limit:
        chunk = bytes(view[at : at + ZERO_CHUNK_BYTES])
        if chunk.count(0) != len(chunk):
            end = at + len(chunk)
        at += len(chunk)
    return end
