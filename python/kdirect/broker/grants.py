"""Clients and what they were granted: the words that the rooms of access share.

Owns: `Peer` (one queue pair of one client), `Grant` (one file granted to one client) and the table
of file ids.  What may not enter: policy.  Who gets what is decided in `kdirect.broker.read_access`
(reading) and `kdirect.broker.head_life` (writing).

A file id is 16 bits and names one grant: a file together with a client.  Ids are given out in turn,
so that one that has ended is not used again before 65534 others were.  What arrives under an id
that is not granted is ignored.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from kdirect.broker.slices import Slices
from kdirect.errors import RefusedError
from kdirect.format import layout
from kdirect.log.partition import Partition
from kdirect.log.segment import Segment
from kdirect.model import TopicPartition
from kdirect.rdma.contract import Memory

MAX_FILE_ID = 0xFFFF


class PeerEngine(Protocol):
    """What a peer needs of its transport (`kdirect.broker.engine`)."""

    transport: str
    device: Any
    worker: Any

    @property
    def loopback(self) -> Any:
        """The broker's queue pair with itself."""


class WrittenFile(Protocol):
    """What a grant needs of the head, or next head, that it is a key to
    (`kdirect.broker.head_access`)."""

    engine: PeerEngine
    partition: Partition
    members: dict[int, Grant]

    def end_file_key(self, region: Any, timeout_ms: float) -> bool:
        """End a producer's key to the file; False when the producer is still inside a copy."""

    def keys_left_by(self, peer: Peer) -> list[Any]:
        """The keys of a producer that was inside a copy when it left."""


class AbortedList(Protocol):
    """What a grant needs of the list of aborted transactions beside its file
    (`kdirect.broker.aborted_regions`)."""

    region: Any

    def give_back(self, deregister: Callable[[Any], None]) -> None:
        """The grant has ended; `deregister` ends a key."""


@dataclass(eq=False, slots=True)
class Grant:
    """One file granted to one client.  A produce grant whose head has ended keeps only the key of
    its closed word, so that a producer that has not noticed yet learns of it by a reservation that
    fails, until it comes back or leaves."""

    file_id: int
    peer: Peer
    partition: Partition
    segment: Segment | None  # None: the partition has no head file yet, or the grant has ended
    region: Any = None
    slot_index: int = -1
    aborted: AbortedList | None = None  # beside the file
    staging: Any = None  # produce: region of the acknowledgements being sent
    word: Any = None  # produce, shared: region of the word
    head_access: WrittenFile | None = None  # produce
    max_in_flight: int = 0  # produce
    waits_for_replicas: bool = False  # produce: acks=all
    released: bool = False

    @property
    def is_produce(self) -> bool:
        return self.head_access is not None


@dataclass(eq=False, slots=True)
class Peer:
    """One queue pair of one client, with its protection domain, slot region and grants."""

    connection_id: int
    connection: Hashable
    client: str
    engine: PeerEngine
    domain: Any
    qp: Any
    max_in_flight: int
    ping: Any
    slot_memory: Memory
    slot_region: Any
    grants: dict[int, Grant] = field(default_factory=dict)
    slots: dict[int, TopicPartition] = field(default_factory=dict)
    # What else ends with it: file id -> how to end what was granted under it (commit slots).
    others: dict[int, Callable[[], None]] = field(default_factory=dict)
    full_below: int = 0  # every slot below this one is in use
    closed: bool = False
    ending: threading.Lock = field(default_factory=threading.Lock)  # see `QueuePairs.end`
    # Shared heads that it left while it was inside a copy into them.
    leaving: set[WrittenFile] = field(default_factory=set)
    slices: Slices = field(init=False)  # small memory that the client READs

    def __post_init__(self) -> None:
        self.slices = Slices(self.domain)

    @property
    def pins(self) -> bool:
        """Does a registration hold the pages of a file, even those that the file gives up?"""
        return bool(self.engine.transport != "shm")

    def slot_address(self, index: int) -> int:
        return self.slot_memory.address + index * layout.SLOT_BYTES

    def free_slot(self, count: int) -> int:
        """The lowest free slot, so that the region a client READs stays short; -1 when there is
        none."""
        while self.full_below < count and self.full_below in self.slots:
            self.full_below += 1
        return self.full_below if self.full_below < count else -1

    def give_back_slot(self, index: int) -> None:
        if self.slots.pop(index, None) is not None:
            self.full_below = min(self.full_below, index)


class GrantTable:
    """All grants by file id.  `release(segment)` gives back what a grant held, `background(work)`
    does what nobody waits for; both may be called on the event loop."""

    def __init__(
        self, release: Callable[[Segment], None], background: Callable[[Callable[[], Any]], None]
    ) -> None:
        self._release = release
        self._background = background
        self._grants: dict[int, Grant] = {}
        self._of: dict[TopicPartition, dict[int, Grant]] = {}
        self._next = 1
        # Ids of files that leaders of other brokers are granted (`replication`).  Any thread.
        self._reserved: set[int] = set()
        self._lock = threading.Lock()
        # Files that are opened for readers whose RNIC pins them, and not granted yet.  Any thread.
        self.opening: set[Any] = set()

    def __len__(self) -> int:
        return len(self._grants)

    def __iter__(self) -> Iterator[Grant]:
        return iter(list(self._grants.values()))

    def get(self, file_id: int) -> Grant | None:
        return self._grants.get(file_id)

    def of(self, tp: TopicPartition) -> list[Grant]:
        """The grants of a partition."""
        return list(self._of.get(tp, {}).values())

    def new(
        self,
        peer: Peer,
        partition: Partition,
        segment: Segment | None,
        head_access: WrittenFile | None = None,
    ) -> Grant:
        """A grant under the next free id; it takes over one `acquire` of its segment, until
        `drop`."""
        with self._lock:
            grant = Grant(
                file_id=self._free_id(),
                peer=peer,
                partition=partition,
                segment=segment,
                head_access=head_access,
            )
            self._grants[grant.file_id] = peer.grants[grant.file_id] = grant
        self._of.setdefault(partition.topic_partition, {})[grant.file_id] = grant
        return grant

    def _free_id(self) -> int:
        if len(self._grants) + len(self._reserved) >= MAX_FILE_ID:
            raise RefusedError(
                layout.ERROR_NO_FREE_SLOT,
                "all 65535 file ids of this broker are granted; close idle clients",
            )
        while self._next in self._grants or self._next in self._reserved:
            self._next = self._next % MAX_FILE_ID + 1
        found, self._next = self._next, self._next % MAX_FILE_ID + 1
        return found

    def reserve(self) -> int:
        """A file id that no grant here has, until `give_back`.  Any thread."""
        with self._lock:
            found = self._free_id()
            self._reserved.add(found)
            return found

    def give_back(self, file_id: int) -> None:
        """The file that had this reserved id is forgotten by the worker.  Any thread."""
        with self._lock:
            self._reserved.discard(file_id)

    def release_segment(self, grant: Grant) -> None:
        """Give back the grant's segment."""
        segment, grant.segment = grant.segment, None
        if segment is not None:
            self._release(segment)

    def deregister(self, region: Any) -> None:
        """End a key to memory that is used for nothing else afterwards.  Where the client is
        inside a copy now, a thread waits until it has left: a client that is stopped there would
        hold up the event loop for as long as the region's own `deregister` waits."""
        if not region.deregister(0):
            self._background(region.deregister)

    def drop(self, grant: Grant) -> None:
        """Forget a grant."""
        self._grants.pop(grant.file_id, None)
        of = self._of.get(grant.partition.topic_partition, {})
        of.pop(grant.file_id, None)
        if not of:
            self._of.pop(grant.partition.topic_partition, None)
        grant.peer.grants.pop(grant.file_id, None)
        self.release_segment(grant)
