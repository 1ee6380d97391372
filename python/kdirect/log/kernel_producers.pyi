"""Types of `kdirect.log.kernel_producers`, which is compiled.  See kernel_producers.pyx."""

from collections.abc import Iterable

from kdirect.log.kernel import CommitKernel
from kdirect.log.producers import ProducerEntry

def known_producers(kernel: CommitKernel) -> tuple[list[ProducerEntry], int]: ...
def set_producers(kernel: CommitKernel, entries: Iterable[ProducerEntry]) -> None: ...
def expire_producers(kernel: CommitKernel, before_ms: int) -> int: ...
