"""What the objects of one opened verbs device share.

Law of the room: completion queues, queue pairs and protection domains get an `OpenedDevice` and
never the device that made them, so that imports and ownership point one way.  It owns nothing: the
device opens and closes the context and the link service.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from kdirect.rdma import verbs
from kdirect.rdma.contract import forked_error
from kdirect.rdma.verbs_choice import Choice
from kdirect.rdma.verbs_link import VerbsLinkService

COUNTERS = (
    "reads",
    "writes",
    "read_bytes",
    "write_bytes",
    "sends",
    "receives",
    "atomics",
    "wakeups",
)
_COUNTS = {
    "read": "reads",
    "write": "writes",
    "write_imm": "writes",
    "send": "sends",
    "recv": "receives",
    "fetch_add": "atomics",
    "compare_swap": "atomics",
}
_BYTES = {"read": "read_bytes", "write": "write_bytes", "write_imm": "write_bytes"}


@dataclass(eq=False, slots=True)
class OpenedDevice:
    """The context, port, link service and counters of one device, in the process that opened it."""

    context: verbs.Context
    choice: Choice
    service: VerbsLinkService
    counters: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))
    pid: int = field(default_factory=os.getpid)

    @property
    def forked(self) -> bool:
        """Whether this process was forked from the one that opened the device."""
        return os.getpid() != self.pid

    def check_process(self) -> None:
        """RdmaError in a forked child."""
        if os.getpid() != self.pid:
            raise forked_error("the verbs device")

    def count(self, op: str, length: int) -> None:
        """Count a request that has completed."""
        self.counters[_COUNTS[op]] += 1
        if op in _BYTES:
            self.counters[_BYTES[op]] += length


__all__ = ["COUNTERS", "OpenedDevice"]
