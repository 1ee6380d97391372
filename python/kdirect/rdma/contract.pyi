"""Types of `kdirect.rdma.contract`, which is compiled: its Python interface.  See contract.pyx."""

import enum
from typing import Any

from kdirect.errors import RdmaError

class Access(enum.IntFlag):
    LOCAL_WRITE = 1
    REMOTE_WRITE = 2
    REMOTE_READ = 4
    REMOTE_ATOMIC = 8

class Status(enum.IntEnum):
    SUCCESS = 0
    LOC_LEN_ERR = 1
    LOC_PROT_ERR = 4
    WR_FLUSH_ERR = 5
    REM_INV_REQ_ERR = 9
    REM_ACCESS_ERR = 10
    RETRY_EXC_ERR = 12
    RNR_RETRY_EXC_ERR = 13

class Opcode(enum.IntEnum):
    SEND = 0
    RDMA_WRITE = 1
    RDMA_READ = 2
    COMP_SWAP = 3
    FETCH_ADD = 4
    RECV = 128
    RECV_RDMA_WITH_IMM = 129

class State(enum.IntEnum):
    RESET = 0
    INIT = 1
    RTS = 3
    ERROR = 6

STATUS_NAMES: dict[int, str]

class WorkCompletion:
    wr_id: int
    status: int
    opcode: int
    byte_len: int
    imm_data: int | None
    qp_num: int
    def __init__(
        self,
        wr_id: int,
        status: int,
        opcode: int,
        byte_len: int = 0,
        imm_data: int | None = None,
        qp_num: int = 0,
    ) -> None: ...
    @property
    def ok(self) -> bool: ...

class Memory:
    @property
    def address(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def fd(self) -> int: ...
    @property
    def writable(self) -> bool: ...
    @property
    def closed(self) -> bool: ...
    @staticmethod
    def anonymous(length: int, name: str = "kdirect") -> Memory: ...
    @staticmethod
    def map(fd: int, length: int, writable: bool = True) -> Memory: ...
    @staticmethod
    def wrap(fd: int, address: int, length: int, writable: bool, owner: object) -> Memory: ...
    def close(self) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class MemoryRegion:
    def __init__(
        self,
        memory: Memory | None = None,
        address: int = 0,
        length: int = 0,
        lkey: int = 0,
        rkey: int = 0,
        access: int = 0,
    ) -> None: ...
    @property
    def memory(self) -> Memory: ...
    @property
    def address(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def lkey(self) -> int: ...
    @property
    def rkey(self) -> int: ...
    @property
    def access(self) -> int: ...
    def deregister(self, timeout_ms: float = 100) -> bool: ...

class CompletionQueue:
    def __init__(self, depth: int = 0) -> None: ...
    @property
    def depth(self) -> int: ...
    def poll(self, n: int = 16) -> list[WorkCompletion]: ...
    def wait(self, timeout_ms: float = -1, spin_us: float = 0) -> bool: ...
    def fileno(self) -> int: ...
    def arm(self) -> bool: ...
    def wake(self) -> None: ...
    def close(self) -> None: ...

class RemoteView:
    @property
    def address(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def rkey(self) -> int: ...
    def close(self) -> None: ...
    def keep_in_forks(self) -> None: ...

class QueuePair:
    def __init__(
        self,
        qp_num: int = 0,
        send_cq: CompletionQueue | None = None,
        recv_cq: CompletionQueue | None = None,
    ) -> None: ...
    @property
    def qp_num(self) -> int: ...
    @property
    def send_cq(self) -> CompletionQueue: ...
    @property
    def recv_cq(self) -> CompletionQueue: ...
    @property
    def state(self) -> int: ...
    @property
    def address(self) -> bytes: ...
    def listen(self) -> None: ...
    def connect(self, peer_address: bytes, active: bool) -> None: ...
    def close(self) -> None: ...
    def view(self, remote_address: int, length: int, rkey: int) -> RemoteView | None: ...
    def read_in_place(self, view: RemoteView, remote_address: int, length: int) -> bytes: ...
    def raw_post(
        self,
        op: str,
        wr_id: int,
        local_address: int,
        lkey: int,
        length: int,
        remote_address: int,
        rkey: int,
        arg0: int,
        arg1: int,
    ) -> None: ...
    def post_read(
        self,
        wr_id: int,
        local: MemoryRegion,
        position: int,
        length: int,
        remote_address: int,
        rkey: int,
    ) -> None: ...
    def post_write(
        self,
        wr_id: int,
        local: MemoryRegion,
        position: int,
        length: int,
        remote_address: int,
        rkey: int,
    ) -> None: ...
    def post_write_imm(
        self,
        wr_id: int,
        local: MemoryRegion,
        position: int,
        length: int,
        remote_address: int,
        rkey: int,
        imm: int,
    ) -> None: ...
    def post_write_imm_inline(
        self,
        wr_id: int,
        local: MemoryRegion,
        position: int,
        length: int,
        inline_at: int,
        inline_data: bytes,
        remote_address: int,
        rkey: int,
        imm: int,
    ) -> bool: ...
    def post_write_summed(
        self,
        wr_id: int,
        local: MemoryRegion,
        position: int,
        length: int,
        remote_address: int,
        rkey: int,
        imm: int | None = None,
    ) -> bool: ...
    def post_send(self, wr_id: int, local: MemoryRegion, position: int, length: int) -> None: ...
    def post_recv(
        self, wr_id: int, local: MemoryRegion | None = None, position: int = 0, length: int = 0
    ) -> None: ...
    def post_fetch_add(
        self,
        wr_id: int,
        local: MemoryRegion,
        position: int,
        remote_address: int,
        rkey: int,
        add: int,
    ) -> None: ...
    def post_compare_swap(
        self,
        wr_id: int,
        local: MemoryRegion,
        position: int,
        remote_address: int,
        rkey: int,
        compare: int,
        swap: int,
    ) -> None: ...

class ProtectionDomain:
    def register(
        self, memory: Memory, access: int, position: int = 0, length: int | None = None
    ) -> MemoryRegion: ...
    def create_qp(
        self,
        send_cq: CompletionQueue,
        recv_cq: CompletionQueue,
        max_send_wr: int = 128,
        max_recv_wr: int = 128,
        max_send_bytes: int = 65536,
        rnr_timeout_ms: float = 5000,
    ) -> QueuePair: ...
    def close(self) -> None: ...

class Device:
    name: str
    # Each provider has options of its own.
    def __init__(self, *arguments: Any, **options: Any) -> None: ...
    def alloc_pd(self) -> ProtectionDomain: ...
    def create_cq(self, depth: int = 1024) -> CompletionQueue: ...
    def statistics(self) -> dict[str, int]: ...
    def close(self) -> None: ...
    @property
    def closed(self) -> bool: ...

def forked_error(what: str) -> RdmaError: ...
def check_registration(memory: Memory, access: int, position: int, length: int | None) -> int: ...
