"""The simulated fabric: virtual time, chance, and what is in flight between simulated processes.

Law of the room: no clock, no thread, and no randomness except that of the seed.  This file knows
nothing of queue pairs or devices; `sim_queue` and `sim` are built on it.  It owns

- `SimFabric`: the heap of events, the seed, the switches for faults, the endpoints that a peer's
  address can name, and the second halves of torn operations;
- `SimProcess`: what the objects of one simulated process share;
- `SimMemoryRegion` and `SimRegions`: the registered memory of one protection domain.
"""

from __future__ import annotations

import heapq
import mmap
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kdirect.errors import RdmaError
from kdirect.rdma.contract import Memory, MemoryRegion, check_registration, forked_error

PAGE_BYTES = mmap.PAGESIZE
BUFFERS_HINT = "local buffers belong to the network from post until the completion is polled"
Event = tuple[int, int, Callable[[], None]]  # when it is due, its number, what happens


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong, and how often.  Probabilities are per request."""

    # The shortest and the longest time of one hop.
    delay_ns: tuple[int, int] = (500, 20_000)
    # The connection is lost while the request is under way: it may or may not have happened.
    disconnect: float = 0.0
    # The receiver is slow although a receive is posted.
    rnr: float = 0.0
    # A READ or WRITE happens in two halves.
    tear: float = 0.0
    # The second half of a torn WRITE lands first: a fabric that breaks the contract's rule of the
    # last 8 bytes.
    disorder: float = 0.0
    # READ buffers hold random bytes until completion.
    poison: bool = True


@dataclass(slots=True)
class Half:
    """The second half of a torn operation, in flight under `region`."""

    region: SimMemoryRegion
    finish: Callable[[], None]
    held: bool = False
    done: bool = field(default=False)


class SimFabric:
    """The clock, the seed and the events of one simulation.

    `seed` None chooses one.  The seed is printed, so that a failed run can be repeated.
    """

    def __init__(
        self, seed: int | None = None, faults: Faults | None = None, *, autorun: bool = False
    ) -> None:
        self.seed = random.SystemRandom().randrange(2**32) if seed is None else seed
        self.faults = faults or Faults()
        self.autorun = autorun
        self.random = random.Random(self.seed)
        self.now_ns = 0
        self.failure: RdmaError | None = None
        # Queue pairs by the token in their address.  `Any`: this file does not know the class.
        self.endpoints: dict[bytes, Any] = {}
        self.halves: list[Half] = []
        self.hold_next: set[int] = set()  # numbers of queue pairs whose next copy is held
        self.parted: set[tuple[str, str]] = set()  # names of devices: from, to
        # Queue pairs whose requests wait until their devices are joined again.
        self.waiting: list[Any] = []
        self._events: list[Event] = []
        self._event_number = 0
        self._last_qp_num = 0
        print(f"sim: network seed {self.seed}")

    # -- time --------------------------------------------------------------------------------------
    def call_later(self, delay_ns: int, call: Callable[[], None]) -> None:
        """Run `call` at now + `delay_ns`.  Protocols under test set their timers with it."""
        self._event_number += 1
        heapq.heappush(self._events, (self.now_ns + delay_ns, self._event_number, call))

    @property
    def next_event_ns(self) -> int | None:
        """The virtual time of the next event; None when nothing is left to happen."""
        return self._events[0][0] if self._events else None

    def step(self) -> bool:
        """Execute the next event; False when nothing is left to happen."""
        if self.failure is not None:
            raise self.failure
        if not self._events:
            return False
        self.now_ns, _, call = heapq.heappop(self._events)
        call()
        return True

    def run_until_idle(self, most: int = 1_000_000) -> int:
        """Step until nothing is left; the number of steps.

        Raises RdmaError after `most` steps: something repeats itself for ever.
        """
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

    # -- chance ------------------------------------------------------------------------------------
    def delay(self) -> int:
        """The time that one hop takes, drawn from the seed."""
        return self.random.randint(*self.faults.delay_ns)

    def chance(self, probability: float) -> bool:
        """Whether a fault of this probability happens now."""
        return probability > 0 and self.random.random() < probability

    # -- what is in flight -------------------------------------------------------------------------
    def new_qp_num(self) -> int:
        """The number of a new queue pair, unique in this fabric."""
        self._last_qp_num += 1
        return self._last_qp_num

    def fail(self, message: str, hint: str = BUFFERS_HINT) -> None:
        """A program broke the contract: raise now, and from every later call."""
        self.failure = RdmaError(
            f"{message} (seed {self.seed}, virtual time {self.now_ns} ns)",
            hint=hint,
        )
        raise self.failure

    def finish(self, half: Half) -> None:
        """Execute the second half of a torn operation, unless it is held."""
        if not half.done and not half.held:
            half.done = True
            self.halves.remove(half)
            half.finish()


class SimProcess:
    """What the objects of one simulated process share: its name, counters and operating system
    process.

    The operating system process matters because a device refuses to work in a forked child.
    """

    def __init__(self, name: str, counters: dict[str, int]) -> None:
        self.name = name
        self.counters = counters
        self._pid = os.getpid()

    @property
    def forked(self) -> bool:
        return os.getpid() != self._pid

    def check(self) -> None:
        """RdmaError in a process that was forked from the one that opened the device."""
        if self.forked:
            raise forked_error("the sim device")


class SimMemoryRegion(MemoryRegion):
    """See MemoryRegion.  It keeps its Memory alive; `ended` once it was deregistered."""

    def __init__(
        self,
        regions: SimRegions,
        memory: Memory,
        address: int,
        length: int,
        key: int,
        access: int,
    ) -> None:
        super().__init__(memory, address, length, key, key, access)
        self.regions = regions
        self.ended = False
        self._mapped: Memory | None = None

    def deregister(self, timeout_ms: float = 100) -> bool:
        """See MemoryRegion.  Virtual time stands still: what is half done under the key is finished
        first, unless it is held."""
        return self.regions.remove(self)

    def view(self, address: int, length: int) -> memoryview:
        """The bytes at `address` themselves; the caller has checked the bounds.  In a mapping of
        the network's own, as an RNIC pins pages and a peer over shared memory maps them: whoever
        registered them may unmap them while a key is alive or a copy hangs.  But a file that was
        shortened would be a bus error of that peer."""
        if self._mapped is None:
            self._mapped = Memory.map(self.memory.fd, self.memory.length, self.memory.writable)
        start = address - self.memory.address
        size = os.fstat(self.memory.fd).st_size
        if start + length > (size + PAGE_BYTES - 1) // PAGE_BYTES * PAGE_BYTES:
            self.regions.fabric.fail(
                f"a file was shortened to {size} bytes under an operation that ends at"
                f" {start + length}",
                hint="end the key first, and keep the length while a peer is inside of a copy",
            )
        return memoryview(self._mapped)[start : start + length]

    def holds(self, address: int, length: int) -> bool:
        return self.address <= address and address + length <= self.address + self.length


class SimRegions:
    """The registered regions of one protection domain, by key."""

    def __init__(self, fabric: SimFabric, process: SimProcess) -> None:
        self.fabric = fabric
        self._process = process
        self._by_key: dict[int, SimMemoryRegion] = {}

    def add(
        self, memory: Memory, access: int, position: int, length: int | None
    ) -> SimMemoryRegion:
        """Register [position, position + length) of `memory`; RdmaError as ibv_reg_mr refuses."""
        length = check_registration(memory, access, position, length)
        key = 0
        while key == 0 or key in self._by_key:
            key = self.fabric.random.getrandbits(32)
        region = SimMemoryRegion(self, memory, memory.address + position, length, key, access)
        self._by_key[key] = region
        return region

    def remove(self, region: SimMemoryRegion) -> bool:
        """End a region; whether no operation is in flight under it."""
        self._process.check()
        region.ended = True
        self._by_key.pop(region.rkey, None)
        for half in [h for h in self.fabric.halves if h.region is region]:
            self.fabric.finish(half)
        return not any(h.region is region for h in self.fabric.halves)

    def clear(self) -> None:
        for region in list(self._by_key.values()):
            region.deregister()

    def find(self, key: int, address: int, length: int, need: int) -> SimMemoryRegion | None:
        """The live region of `key` that holds [address, address + length) and allows `need`."""
        region = self._by_key.get(key)
        if region is None or region.access & need != need or not region.holds(address, length):
            return None
        return region
