from collections.abc import Callable, Mapping
from typing import Any

from kdirect.model import TopicPartition

NO_INDEX: int
NO_CELL: int

class CommitWriter:
    cells: Any
    ring: Any
    file_id: int
    posted: int
    under_way: int
    ended: bool
    def __init__(
        self,
        channel: Any,
        grant: Any,
        partitions: Mapping[TopicPartition, int],
        generation: int,
        ring: Any,
        entries: int,
        *,
        spin_us: int,
        monotonic: Callable[[], float],
    ) -> None: ...
    def post(self, offsets: Mapping[TopicPartition, int]) -> int: ...
    def is_answered(self, number: int) -> bool: ...
    def end(self) -> None: ...
    def wait(self, number: int, timeout_ms: float) -> int | None: ...
