"""Types of `kdirect.rdma.credit_ring`, which is compiled: its Python interface.  See
credit_ring.pyx."""

from collections.abc import Callable
from typing import Any

from kdirect.rdma.contract import CompletionQueue, QueuePair

class WriteQueue:
    sends_under_way: int
    requests_under_way: int
    limit: int
    def __init__(
        self,
        qp: QueuePair,
        send_cq: CompletionQueue,
        limit: int,
        monotonic: Callable[[], float] = ...,
    ) -> None: ...
    @property
    def broken(self) -> str: ...

class CreditRing:
    window: int
    credits: int
    posted: int
    acknowledged: int
    completed: int
    freed: int
    desynchronised: bool
    def __init__(self, queue: Any, qp: QueuePair, window: int) -> None: ...
    @property
    def in_flight(self) -> int: ...
    def wait_completed(self, timeout_ms: int = 1000) -> bool: ...
