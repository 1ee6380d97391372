"""Work requests of the sim provider, as values.

Law of the room: see sim.py.  What is done with them is `sim_queue`'s.
"""

from __future__ import annotations

from dataclasses import dataclass

from kdirect.rdma.contract import Access, Opcode

OPCODES = {
    "read": Opcode.RDMA_READ,
    "write": Opcode.RDMA_WRITE,
    "write_imm": Opcode.RDMA_WRITE,
    "send": Opcode.SEND,
    "fetch_add": Opcode.FETCH_ADD,
    "compare_swap": Opcode.COMP_SWAP,
}
REMOTE_NEED = {
    "read": Access.REMOTE_READ,
    "write": Access.REMOTE_WRITE,
    "write_imm": Access.REMOTE_WRITE,
    "fetch_add": Access.REMOTE_ATOMIC,
    "compare_swap": Access.REMOTE_ATOMIC,
}
FILLS_LOCAL = ("read", "fetch_add", "compare_swap")


@dataclass(slots=True)
class Request:
    op: str
    wr_id: int
    local: int
    lkey: int
    length: int
    remote: int
    rkey: int
    arg0: int
    arg1: int
    checksum: int | None = None
    rnr_deadline: int | None = None
    receiver_slow_until: int = 0

    @property
    def torn_at(self) -> int:
        """Where a READ or WRITE is torn, if it is; 0: it lands at once.  The last 8 bytes of a
        WRITE are not torn if they are aligned."""
        if self.op != "read" and self.length >= 8 and (self.remote + self.length) % 8 == 0:
            return min(self.length // 2, self.length - 8)
        return self.length // 2


@dataclass(slots=True)
class Receive:
    wr_id: int
    local: int
    lkey: int
    length: int
    checksum: int | None = None
