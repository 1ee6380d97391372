"""Types of `kdirect.log.kernel`, which is compiled: the commit kernel.  See kernel.pyx.

`data` is any contiguous buffer of bytes, which typing cannot say before Python 3.12.
"""

from typing import Any

from kdirect.log.results import CommitResult
from kdirect.log.views import KernelView

NO_SPACE: int
WRONG_POSITION: int
NO_HEAD: int
NOT_CONTIGUOUS: int
UNKNOWN_EPOCH: int
UNVERIFIED_TRANSACTION: int

class CommitKernel:
    def __init__(
        self,
        *,
        log_start_offset: int = 0,
        log_end_offset: int = 0,
        segment_base_offset: int = -1,
        position: int = 0,
        leader_epoch: int = 0,
        last_epoch: int = 0,
        **policy: int,
    ) -> None: ...
    # requests
    def commit_next(
        self,
        segment_base_offset: int,
        position: int,
        length: int,
        leader_epoch: int,
        now_ms: int,
        *,
        stamped: bool = False,
    ) -> CommitResult: ...
    def commit_as_stamped(
        self, segment_base_offset: int, position: int, length: int, now_ms: int
    ) -> CommitResult: ...
    def append(self, data: Any, now_ms: int) -> CommitResult: ...
    def append_as_stamped(self, data: Any, now_ms: int) -> CommitResult: ...
    def check(self, data: Any, now_ms: int) -> int: ...
    def clear_tail(
        self, segment_base_offset: int | None = None, end: int | None = None
    ) -> None: ...
    # slots
    def attach_slot(
        self,
        address: int,
        file_id: int,
        segment_base_offset: int | None = None,
        *,
        aborted: tuple[int, int, int] | None = None,
    ) -> bool: ...
    def detach_slot(self, address: int) -> None: ...
    def revoke_slots(self) -> None: ...
    # offsets
    def truncate(
        self,
        offset: int,
        position: int,
        segment_base_offset: int,
        epoch: int,
        *,
        empty: bool = False,
    ) -> None: ...
    def set_log_start_offset(self, offset: int) -> None: ...
    def set_leader_epoch(self, epoch: int) -> None: ...
    def configure(
        self,
        *,
        segment_bytes: int = ...,
        max_batch_bytes: int = ...,
        index_interval_bytes: int = 4096,
        segment_ms: int = ...,
        before_max_ms: int = ...,
        after_max_ms: int = ...,
        log_append_time: bool = False,
        hold_high_watermark: bool = False,
        wait_for_disk: bool = False,
    ) -> None: ...
    # state
    def view(self) -> KernelView: ...
    def index_entries(self) -> tuple[int, int]: ...
    def timestamps(self) -> tuple[int, int, int]: ...
    @property
    def log_end_offset(self) -> int: ...
    @property
    def high_watermark(self) -> int: ...
    @property
    def last_stable_offset(self) -> int: ...
    @property
    def log_start_offset(self) -> int: ...
    @property
    def leader_epoch(self) -> int: ...
    @property
    def end_position(self) -> int: ...
    @property
    def max_message_bytes(self) -> int: ...
    @property
    def capacity(self) -> int: ...
    @property
    def over(self) -> bool: ...
    @property
    def segment_base_offset(self) -> int: ...
    @property
    def hold_high_watermark(self) -> bool: ...
    def statistics(self) -> dict[str, int]: ...
