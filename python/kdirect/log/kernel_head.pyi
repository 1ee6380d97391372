"""Types of `kdirect.log.kernel_head`, which is compiled.  See kernel_head.pyx."""

from kdirect.log.kernel import CommitKernel
from kdirect.log.views import SealedHead

def install_head(
    kernel: CommitKernel,
    address: int,
    capacity: int,
    *,
    position: int = 0,
    segment_base_offset: int,
    offset_index_address: int = 0,
    offset_index_capacity: int = 0,
    offset_index_entries: int = 0,
    time_index_address: int = 0,
    time_index_capacity: int = 0,
    time_index_entries: int = 0,
    last_indexed_timestamp: int = -1,
    first_timestamp: int = -1,
    max_timestamp: int = -1,
    max_timestamp_offset: int = -1,
    created_ms: int = 0,
) -> None: ...
def seal_head(kernel: CommitKernel) -> SealedHead | None: ...
def resize_head(
    kernel: CommitKernel, capacity: int, offset_index_capacity: int, time_index_capacity: int
) -> bool: ...
def freeze_head(kernel: CommitKernel) -> int: ...
def thaw_head(kernel: CommitKernel, capacity: int) -> None: ...
def roll_without_head(kernel: CommitKernel) -> None: ...
