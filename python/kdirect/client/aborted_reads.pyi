"""Types of `kdirect.client.aborted_reads`, which is compiled.  See aborted_reads.pyx."""

from typing import Any

class ListReads:
    reads: int
    torn: int
    skipped: int
    def __init__(self, channel: Any, *, torn_timeout_ms: int = 10000) -> None: ...

class AbortedReads:
    name: str
    def __init__(
        self,
        name: str,
        reads: ListReads,
        location: tuple[int, int, int],
        file_id: int,
        position: int,
    ) -> None: ...
