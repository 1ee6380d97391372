"""The sim provider: a simulated RDMA network in one process and one thread, in virtual time, from a
seed.

Law of the room: no clock, no thread, and no randomness except that of the seed.  The same seed and
the same calls give the same run.  It is stricter than any RNIC: it reports mistakes that real
hardware forgives now and then.

- Requests of one queue pair execute in order, after delays.  Requests of different queue pairs may
  overtake each other.
- The local buffer of a request belongs to the network from post to completion.  It is checksummed
  at post, when it is used and when it completes; a change raises, and every later call raises too.
  READ buffers hold random bytes until completion, so that a reader that does not wait is found.
- A READ or WRITE may be torn: its halves happen at different times (`Faults.tear`).
- Connections are lost (`Faults.disconnect`), receivers are slow (`Faults.rnr`), a peer may hang in
  the middle of a copy (`SimNetwork.hold`) or die (`SimNetwork.kill`).

Time moves only in `SimNetwork.step`, `run_until_idle`, `run_for` and `CompletionQueue.wait`; `poll`
moves nothing, unless the network was made with ``autorun=True``.  A `Schedule` given to a device
takes over where its process would wait (`sim_queue`).  The fabric itself is in `sim_fabric`.
"""

from __future__ import annotations

from collections.abc import Iterable

from kdirect.errors import ClosedError, RdmaError
from kdirect.rdma.contract import CompletionQueue, Device, Memory, ProtectionDomain
from kdirect.rdma.sim_fabric import (
    Faults,
    SimFabric,
    SimMemoryRegion,
    SimProcess,
    SimRegions,
)
from kdirect.rdma.sim_queue import Schedule, SimCompletionQueue, SimQueuePair

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


class SimNetwork(SimFabric):
    """A fabric with devices on it, and the faults that a test causes at will.

    Devices of one network share its clock and its seed.
    """

    def device(self, name: str = "sim", schedule: Schedule | None = None) -> SimDevice:
        """A device of a process of its own.  `schedule` decides what happens where it would wait.

        `kdirect.rdma.open_device("sim", network=network)` opens one too.
        """
        return SimDevice(self, name, schedule)

    def disconnect(self, qp: SimQueuePair) -> None:
        """Lose the connection of `qp` now."""
        qp.fail()

    def kill(self, device: SimDevice) -> None:
        """The device's process dies: its queue pairs are gone; their peers notice after a delay."""
        for qp in device.queue_pairs():
            qp.die()

    def part(self, pairs: Iterable[tuple[str, str]]) -> None:
        """From now on requests do not get from the first device to the second, by their names, of
        each of these pairs; what waited for pairs that are not among them goes on.  The way back is
        not affected, nor what is said of a connection that ends."""
        self.parted = set(pairs)
        waiting, self.waiting = self.waiting, []
        for qp in waiting:
            qp.go_on()

    def hold(self, qp: SimQueuePair) -> None:
        """The next READ or WRITE of `qp` stops half-way, as when its process hangs or is stopped,
        until `release`."""
        self.hold_next.add(qp.qp_num)

    def release(self) -> None:
        """Let every held operation finish."""
        self.hold_next.clear()
        for half in list(self.halves):
            half.held = False
            self.finish(half)


class SimProtectionDomain(ProtectionDomain):
    """See ProtectionDomain.  It owns its regions and its queue pairs."""

    def __init__(self, fabric: SimFabric, process: SimProcess) -> None:
        self._fabric = fabric
        self._process = process
        self._regions = SimRegions(fabric, process)
        self._qps: set[SimQueuePair] = set()
        self._closed = False

    def register(
        self, memory: Memory, access: int, position: int = 0, length: int | None = None
    ) -> SimMemoryRegion:
        self._check()
        return self._regions.add(memory, int(access), position, length)

    def create_qp(
        self,
        send_cq: CompletionQueue,
        recv_cq: CompletionQueue,
        max_send_wr: int = 128,
        max_recv_wr: int = 128,
        max_send_bytes: int = 65536,
        rnr_timeout_ms: float = 5000,
    ) -> SimQueuePair:
        self._check()
        if not isinstance(send_cq, SimCompletionQueue) or not isinstance(
            recv_cq, SimCompletionQueue
        ):
            raise RdmaError(
                "the completion queues belong to another provider",
                hint="create them on a device of the same network",
            )
        qp = SimQueuePair(
            self._fabric,
            self._process,
            self._regions,
            send_cq,
            recv_cq,
            max_send_wr,
            max_recv_wr,
            max_send_bytes,
            rnr_timeout_ms,
            self._qps.discard,
        )
        self._qps.add(qp)
        return qp

    def queue_pairs(self) -> list[SimQueuePair]:
        """Its open queue pairs, in the order of their numbers."""
        return sorted(self._qps, key=lambda qp: qp.qp_num)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for qp in self.queue_pairs():
            qp.close()
        if not self._process.forked:
            self._regions.clear()

    def _check(self) -> None:
        self._process.check()
        if self._closed:
            raise ClosedError("the protection domain is closed", hint="allocate another")


class SimDevice(Device):
    """See Device.  `name` distinguishes the devices of one network in messages."""

    def __init__(
        self, network: SimFabric, name: str = "sim", schedule: Schedule | None = None
    ) -> None:
        self.name = name
        self._network = network
        self._schedule = schedule
        self._process = SimProcess(name, dict.fromkeys(COUNTERS, 0))
        self._domains: list[SimProtectionDomain] = []
        self._cqs: list[SimCompletionQueue] = []
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    def alloc_pd(self) -> SimProtectionDomain:
        self._check()
        self._domains.append(SimProtectionDomain(self._network, self._process))
        return self._domains[-1]

    def create_cq(self, depth: int = 1024) -> SimCompletionQueue:
        self._check()
        if depth <= 0:
            raise RdmaError(
                f"completion queue depth {depth} is out of range", hint="give at least 1"
            )
        self._cqs.append(SimCompletionQueue(self._network, self._process, depth, self._schedule))
        return self._cqs[-1]

    def queue_pairs(self) -> list[SimQueuePair]:
        """Its open queue pairs, in the order of their numbers."""
        found = [qp for domain in self._domains for qp in domain.queue_pairs()]
        return sorted(found, key=lambda qp: qp.qp_num)

    def statistics(self) -> dict[str, int]:
        return dict(self._process.counters)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for domain in self._domains:
            domain.close()
        if not self._process.forked:
            for cq in self._cqs:
                cq.close()

    def _check(self) -> None:
        self._process.check()
        if self._closed:
            raise ClosedError("the sim device is closed", hint="open another")


__all__ = ["Faults", "Schedule", "SimCompletionQueue", "SimDevice", "SimNetwork"]
