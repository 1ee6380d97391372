"""Types of `kdirect.rdma.shm`, which is compiled: the shm provider.  See shm.pyx."""

from typing import final

from kdirect.rdma.contract import (
    CompletionQueue,
    Device,
    Memory,
    MemoryRegion,
    ProtectionDomain,
    QueuePair,
)

COUNTERS: tuple[str, ...]

@final
class ShmMemoryRegion(MemoryRegion):
    @property
    def ended(self) -> bool: ...
    def deregister(self, timeout_ms: float = 100) -> bool: ...

class ShmProtectionDomain(ProtectionDomain):
    """Made by `ShmDevice.alloc_pd`."""

    def register(
        self, memory: Memory, access: int, position: int = 0, length: int | None = None
    ) -> ShmMemoryRegion: ...
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

class ShmDevice(Device):
    name: str
    def __init__(self) -> None: ...
    def alloc_pd(self) -> ShmProtectionDomain: ...
    def create_cq(self, depth: int = 1024) -> CompletionQueue: ...
    def statistics(self) -> dict[str, int]: ...
    def close(self) -> None: ...
    @property
    def closed(self) -> bool: ...

def use_full_fences(always: bool) -> None: ...
