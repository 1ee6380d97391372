"""Types of `kdirect.log.kernel_marks`, which is compiled.  See kernel_marks.pyx."""

from collections.abc import Iterable

from kdirect.log.kernel import CommitKernel
from kdirect.log.views import SealedSegment

def advance_high_watermark(
    kernel: CommitKernel, offset: int, position: int, segment_base_offset: int
) -> bool: ...
def allow_gaps_below(kernel: CommitKernel, offset: int) -> None: ...
def load_high_watermark(
    kernel: CommitKernel,
    offset: int,
    position: int,
    segment_base_offset: int,
    sealed: Iterable[SealedSegment],
) -> None: ...
