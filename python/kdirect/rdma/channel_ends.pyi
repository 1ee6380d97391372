"""Types of `kdirect.rdma.channel_ends`, which is compiled: its Python interface.  See
channel_ends.pyx."""

from kdirect.errors import KdirectError
from kdirect.rdma.contract import CompletionQueue, MemoryRegion
from kdirect.rdma.credit_ring import CreditRing, WriteQueue

class Wakeups:
    completions: CompletionQueue

class ChannelEnd(WriteQueue):
    channels: Wakeups
    peer: str
    number: int
    connected: bool
    receives_taken: int
    writes_done: int
    def listen(self) -> None: ...
    @property
    def ended(self) -> bool: ...
    @property
    def error(self) -> KdirectError | None: ...
    def check(self) -> None: ...

class Sender(CreditRing):
    end: ChannelEnd
    slots: int
    slot_bytes: int
    payload_bytes: int
    blocked: bool
    bytes_sent: int
    notified: int
    @property
    def offer(self) -> bytes: ...
    def connect(self, offer: bytes) -> None: ...
    @property
    def may_send(self) -> bool: ...
    def send_from(
        self,
        region: MemoryRegion,
        position: int,
        length: int,
        *,
        batch: int = 0,
        epoch: int = 0,
        attempt: int = 0,
        flags: int = 0,
        kind: int = 0,
        wake: bool = False,
    ) -> bool: ...
    def buffer(self) -> memoryview | None: ...
    def send(
        self,
        length: int,
        *,
        batch: int = 0,
        epoch: int = 0,
        attempt: int = 0,
        flags: int = 0,
        kind: int = 0,
        wake: bool = False,
    ) -> bool: ...
    def refresh(self) -> None: ...
    def wait_credit(self, timeout_ms: int = -1) -> bool: ...
    @property
    def sent(self) -> int: ...
    def close(self, timeout_ms: int = 1000) -> None: ...

class Receiver:
    end: ChannelEnd
    slots: int
    slot_bytes: int
    received: int
    released: int
    returned: int
    group: int
    credit_writes: int
    bytes_received: int
    @property
    def offer(self) -> bytes: ...
    def connect(self, offer: bytes) -> None: ...
    def poll(self) -> bool: ...
    def release(self) -> None: ...
    @property
    def payload(self) -> memoryview: ...
    @property
    def address(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def sequence(self) -> int: ...
    @property
    def batch(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def attempt(self) -> int: ...
    @property
    def flags(self) -> int: ...
    @property
    def kind(self) -> int: ...
    def close(self) -> None: ...
