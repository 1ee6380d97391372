"""Where bytes lie that a client may READ: what a grant says, with the way there.

A grant names an address, a key and a length; they mean something only to the queue pair through
which the broker granted them.  A `Location` keeps the four together, so that a file may lie on
another node than the one before it, and whoever reads it need not know.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from kdirect.rdma.contract import CompletionQueue, MemoryRegion, QueuePair


class Endpoint(Protocol):
    """A queue pair to one node, and the memory that its READs may fill.  A `Channel` is one."""

    qp: QueuePair
    send_cq: CompletionQueue

    def local_memory(self, length: int) -> MemoryRegion:
        """`length` bytes of new memory, registered where `qp` belongs."""


class Location(NamedTuple):
    """`length` bytes at `address` of the memory that `rkey` opens to the peer of `endpoint`.

    The numbers came over the network and are not checked here: whoever opens a location does that
    (`FileStream.open`).  A location is valid as long as the grant that it came with."""

    endpoint: Endpoint
    address: int
    rkey: int
    length: int
