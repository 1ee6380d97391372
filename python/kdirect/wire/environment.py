"""What the outside world gives to the code above the verbs: time, connections, threads, devices.

Everything that waits, measures time, opens a TCP connection, starts a thread or opens an RDMA
device gets an `Environment` and asks it.  A simulator passes another one in, whose clock and
network it moves itself, and patches nothing.

A module that only measures how long its own work takes (a benchmark, a spin within a completion
queue) may read the system's clock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from kdirect.rdma import open_device
from kdirect.rdma.contract import Device
from kdirect.wire.attempt import Attempt
from kdirect.wire.connection import Connection

T = TypeVar("T")


class Environment:
    """The real one: the system's clock, TCP, daemon threads, this process's RDMA devices.

    It has no state, may be shared by threads, and survives a fork.
    """

    # Seconds since some fixed moment, never going back: `monotonic()`.  Python's own function and
    # no method that calls it, for a producer asks with each record.
    monotonic: Callable[[], float] = staticmethod(time.monotonic)

    def time_ms(self) -> int:
        """Milliseconds since 1970, as in a record's timestamp."""
        return time.time_ns() // 1_000_000

    def sleep(self, seconds: float) -> None:
        """Let `seconds` pass; none when negative."""
        if seconds > 0:
            time.sleep(seconds)

    def wait_on(self, condition: threading.Condition, seconds: float) -> bool:
        """Wait, for so many seconds at most, until another thread notifies `condition`, which this
        one holds; whether it did."""
        return condition.wait(seconds)

    def connect(
        self, host: str, port: int, client_id: str, timeout_ms: float, **limits: Any
    ) -> Connection:
        """A new TCP connection to a broker; raises as `Connection` does."""
        return Connection(host, port, client_id, timeout_ms, **limits)

    def spawn(self, call: Callable[[], T]) -> Attempt[T]:
        """Begin `call` where nobody waits for it."""
        return Attempt(call)

    def open_device(self, transport: str, **options: Any) -> Device:
        """This process's RDMA device; see `kdirect.rdma.open_device`."""
        return open_device(transport, **options)


SYSTEM = Environment()
