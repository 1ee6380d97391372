"""The sim provider: a simulated RDMA network in one process and one thread, in virtual time, from a
seed.

Law of the room: no clock, no thread, no randomness but the seed's; the same seed and the same calls
give the same run.  It is a stricter machine than any RNIC: what real hardware forgives now and
then, it reports.

- Requests of one queue pair execute in order, after delays; between queue pairs anything may
  overtake.
- The local buffer of a request belongs to the network from post to completion: it is checksummed at
  post, when it is used and when it completes, and a change raises, and goes on raising.  READ
  buffers are filled with rubbish meanwhile, so that a reader who does not wait is found.
- A READ or WRITE may be torn: its halves happen at different times (`Faults.tear`).
- Connections are lost (`Faults.disconnect`), receivers are slow (`Faults.rnr`), a peer may hang in
  the middle of a copy (`SimNetwork.hold`) or die (`SimNetwork.kill`).

Time moves in `SimNetwork.step`, `run_until_idle`, `run_for` and `CompletionQueue.wait` only; `poll`
moves nothing, unless the network was made with ``autorun=True``.
"""

from __future__ import annotations

import heapq
import os
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kdirect.errors import ClosedError, RdmaError
from kdirect.rdma.contract import (
    CompletionQueue,
    Device,
    MemoryRegion,
    ProtectionDomain,
    WorkCompletion,
    check_registration,
    forked_error,
)
from kdirect.rdma.sim_queue import Half, SimQueuePair

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


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong, and how often (probabilities per request).  `delay_ns`: least and most of
    one hop."""

    delay_ns: tuple[int, int] = (500, 20_000)
    disconnect: float = (
        0.0  # the connection is lost while the request is under way: it may have happened or not
    )
    rnr: float = 0.0  # the receiver takes its time although a receive is posted
    tear: float = 0.0  # a READ or WRITE happens in two halves
    poison: bool = True  # READ buffers hold rubbish until completion


class SimNetwork:
    """Devices of one network share its clock and its seed (None: chosen, and printed)."""

    def __init__(
        self, seed: int | None = None, faults: Faults | None = None, *, autorun: bool = False
    ) -> None:
        self.seed = random.SystemRandom().randrange(2**32) if seed is None else seed
        self.faults = faults or Faults()
        self.autorun = autorun
        self.random = random.Random(self.seed)
        self.now_ns = 0
        self.failure: RdmaError | None = None
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._event_number = 0
        self._qps: dict[bytes, SimQueuePair] = {}
        self._halves: list[Half] = []
        self._last_qp_num = 0
        self._hold_next: set[int] = set()
        print(f"sim: network seed {self.seed}")

    def device(self, name: str = "sim") -> SimDevice:
        return SimDevice(self, name)

    # -- time --------------------------------------------------------------------------------------
    def call_later(self, delay_ns: int, call: Callable[[], None]) -> None:
        """Run `call` at now + `delay_ns`; protocols under test set their timers with it."""
        self._event_number += 1
        heapq.heappush(self._events, (self.now_ns + delay_ns, self._event_number, call))

    def step(self) -> bool:
        """The next event; False when nothing is left to happen."""
        if self.failure is not None:
            raise self.failure
        if not self._events:
            return False
        self.now_ns, _, call = heapq.heappop(self._events)
        call()
        return True

    def run_until_idle(self, most: int = 1_000_000) -> int:
        """Step until nothing is left; the number of steps.  RdmaError after `most`: something
        spins."""
        for n in range(most):
            if not self.step():
                return n
        raise RdmaError(
            f"the simulation did not come to rest in {most} steps (seed {self.seed})",
            hint="look for a request that retries for ever",
        )

    def run_for(self, duration_ns: int) -> None:
        """Let virtual time pass."""
        until = self.now_ns + duration_ns
        while self._events and self._events[0][0] <= until:
            self.step()
        self.now_ns = until

    # -- faults on demand --------------------------------------------------------------------------
    def disconnect(self, qp: SimQueuePair) -> None:
        """Lose the connection of `qp` now."""
        qp._fail()

    def kill(self, device: SimDevice) -> None:
        """The device's process dies: its queue pairs are gone; their peers notice after a delay."""
        for qp in list(device._qps):
            qp._die()

    def hold(self, qp: SimQueuePair) -> None:
        """The next READ or WRITE of `qp` stops half-way (a hung or stopped peer), until `release`."""
        self._hold_next.add(qp.qp_num)

    def release(self) -> None:
        """Let every held operation finish."""
        self._hold_next.clear()
        for half in list(self._halves):
            half.held = False
            self._finish(half)

    # -- internals ---------------------------------------------------------------------------------
    def _delay(self) -> int:
        return self.random.randint(*self.faults.delay_ns)

    def _chance(self, probability: float) -> bool:
        return probability > 0 and self.random.random() < probability

    def _fail(self, message: str) -> None:
        self.failure = RdmaError(
            f"{message} (seed {self.seed}, virtual time {self.now_ns} ns)",
            hint="local buffers belong to the network from post until the completion is polled",
        )
        raise self.failure

    def _finish(self, half: Half) -> None:
        if not half.done and not half.held:
            half.done = True
            self._halves.remove(half)
            half.finish()


class SimMemoryRegion(MemoryRegion):
    """See MemoryRegion."""

    def __init__(
        self,
        domain: SimProtectionDomain,
        memory: Any,
        address: int,
        length: int,
        key: int,
        access: int,
    ) -> None:
        super().__init__(memory, address, length, key, key, access)
        self.domain = domain
        self.ended = False

    def deregister(self, timeout_ms: float = 100) -> bool:
        """Virtual time stands still: what is half done under the key is finished first, unless it
        is held."""
        self.domain._device._check_process()
        self.ended = True
        self.domain._regions.pop(self.rkey, None)
        network = self.domain._device._network
        for half in [h for h in network._halves if h.region is self]:
            network._finish(half)
        return not any(h.region is self for h in network._halves)

    def _view(self, address: int, length: int) -> memoryview:
        at = address - self.memory.address
        return memoryview(self.memory)[at : at + length]

    def _holds(self, address: int, length: int) -> bool:
        return self.address <= address and address + length <= self.address + self.length


class SimCompletionQueue(CompletionQueue):
    """See CompletionQueue.  Overrun (more completions than `depth`) breaks the queue, as on
    hardware."""

    def __init__(self, device: SimDevice, depth: int) -> None:
        super().__init__(depth)
        self._device = device
        self._ready: deque[tuple[WorkCompletion, Callable[[], None]]] = deque()
        self._users: set[SimQueuePair] = set()
        self._errors = 0
        self._woken = False
        self._armed = False
        self._overrun = False
        self._closed = False
        self._event_fd = -1

    def _push(self, completion: WorkCompletion, polled: Callable[[], None]) -> None:
        if len(self._ready) >= self.depth:
            self._overrun = True
            for qp in sorted(self._users, key=lambda qp: qp.qp_num):
                qp._fail()
            return
        self._ready.append((completion, polled))
        self._signal()

    def _signal(self) -> None:
        if self._armed:
            self._armed = False
            self._device._counters["wakeups"] += 1
            os.eventfd_write(self._event_fd, 1)

    def poll(self, n: int = 16) -> list[WorkCompletion]:
        self._check()
        if self._device._network.autorun:
            self._device._network.run_until_idle()
        if self._overrun:
            raise RdmaError(
                "completion queue overrun",
                hint="make the queue at least as deep as the sum of its queue pairs' depths",
            )
        out = []
        while self._ready and len(out) < n:
            completion, polled = self._ready.popleft()
            polled()
            out.append(completion)
        return out

    def wait(self, timeout_ms: float = -1, spin_us: float = 0) -> bool:
        """Steps the network until something is ready, or virtual time has passed."""
        self._check()
        network = self._device._network
        deadline = None if timeout_ms < 0 else network.now_ns + int(timeout_ms * 1_000_000)
        while True:
            if self._woken:
                self._woken = False
                return False
            if self._ready or self._errors:
                self._errors = 0
                return True
            if deadline is not None and (not network._events or network._events[0][0] > deadline):
                network.now_ns = deadline
                return False
            if not network.step():
                raise RdmaError(
                    "wait for ever: nothing is left to happen in the network",
                    hint="wait with a timeout, or post something first",
                )

    def fileno(self) -> int:
        self._check()
        if self._event_fd < 0:
            self._event_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        return self._event_fd

    def arm(self) -> bool:
        try:
            os.eventfd_read(self.fileno())
        except BlockingIOError:
            pass
        self._armed = True
        there = bool(self._ready or self._errors)
        self._errors = 0
        return there

    def wake(self) -> None:
        self._check()
        self._woken = True
        self._signal()

    def close(self) -> None:
        if self._closed:
            return
        if any(not qp._closed for qp in self._users):
            raise RdmaError(
                "the completion queue still serves queue pairs", hint="close the queue pairs first"
            )
        self._closed = True
        if self._event_fd >= 0:
            os.close(self._event_fd)
            self._event_fd = -1

    def _check(self) -> None:
        self._device._check_process()
        if self._device._network.failure is not None:
            raise self._device._network.failure
        if self._closed:
            raise ClosedError("the completion queue is closed", hint="create another")


class SimProtectionDomain(ProtectionDomain):
    """See ProtectionDomain."""

    def __init__(self, device: SimDevice) -> None:
        self._device = device
        self._regions: dict[int, SimMemoryRegion] = {}
        self._qps: set[SimQueuePair] = set()
        self._closed = False

    def register(
        self, memory: Any, access: int, position: int = 0, length: int | None = None
    ) -> SimMemoryRegion:
        self._check()
        access = int(access)
        length = check_registration(memory, access, position, length)
        key = 0
        while key == 0 or key in self._regions:
            key = self._device._network.random.getrandbits(32)
        region = SimMemoryRegion(self, memory, memory.address + position, length, key, access)
        self._regions[key] = region
        return region

    def create_qp(
        self,
        send_cq: Any,
        recv_cq: Any,
        max_send_wr: int = 128,
        max_recv_wr: int = 128,
        max_send_bytes: int = 65536,
        rnr_timeout_ms: float = 5000,
    ) -> SimQueuePair:
        self._check()
        qp = SimQueuePair(
            self, send_cq, recv_cq, max_send_wr, max_recv_wr, max_send_bytes, rnr_timeout_ms
        )
        self._qps.add(qp)
        self._device._qps.add(qp)
        return qp

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for qp in sorted(self._qps, key=lambda qp: qp.qp_num):
            qp.close()
        if not self._device._forked():
            for region in list(self._regions.values()):
                region.deregister()

    def _find(self, key: int, address: int, length: int, need: int) -> SimMemoryRegion | None:
        region = self._regions.get(key)
        if region is None or region.access & need != need or not region._holds(address, length):
            return None
        return region

    def _check(self) -> None:
        self._device._check_process()
        if self._closed:
            raise ClosedError("the protection domain is closed", hint="allocate another")


class SimDevice(Device):
    """See Device.  `name` tells devices of one network apart in messages."""

    def __init__(self, network: SimNetwork, name: str = "sim") -> None:
        self.name = name
        self._network = network
        self._pid = os.getpid()
        self._domains: list[SimProtectionDomain] = []
        self._cqs: list[SimCompletionQueue] = []
        self._qps: set[SimQueuePair] = set()
        self._counters = dict.fromkeys(COUNTERS, 0)
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    def alloc_pd(self) -> SimProtectionDomain:
        self._check()
        self._domains.append(SimProtectionDomain(self))
        return self._domains[-1]

    def create_cq(self, depth: int = 1024) -> SimCompletionQueue:
        self._check()
        if depth <= 0:
            raise RdmaError(
                f"completion queue depth {depth} is out of range", hint="give at least 1"
            )
        self._cqs.append(SimCompletionQueue(self, depth))
        return self._cqs[-1]

    def statistics(self) -> dict[str, int]:
        return dict(self._counters)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for domain in self._domains:
            domain.close()
        if not self._forked():
            for cq in self._cqs:
                cq.close()

    def _forked(self) -> bool:
        return os.getpid() != self._pid

    def _check_process(self) -> None:
        if self._forked():
            raise forked_error("the sim device")

    def _check(self) -> None:
        self._check_process()
        if self._closed:
            raise ClosedError("the sim device is closed", hint="open another")
