"""Registered memory of the verbs provider.

Law of the room: a region keeps its Memory alive and its pages pinned until it is deregistered.  The
RNIC checks key, bounds and access of every operation of a peer.  What may not enter: queue pairs,
sockets.

Lock: `VerbsRegions._lock` guards the table and the life of the domain's native object.
"""

from __future__ import annotations

import errno
import logging
import threading
from typing import Any

from kdirect.errors import ClosedError, RdmaError
from kdirect.rdma.contract import Access, Memory, MemoryRegion, check_registration
from kdirect.rdma.verbs_limits import queue_error, registration_error
from kdirect.rdma.verbs_opened import OpenedDevice

log = logging.getLogger("kdirect.rdma.verbs")

# What a kernel answers that does not pin read-only mappings.
_NOT_PINNED = (errno.EFAULT, errno.EINVAL, errno.EOPNOTSUPP, errno.EACCES, errno.EPERM)


class VerbsMemoryRegion(MemoryRegion):
    """See MemoryRegion.  `address` may differ from the memory's: see `VerbsRegions.register`."""

    regions: VerbsRegions
    native: Any

    def deregister(self, timeout_ms: float = 100) -> bool:
        return self.regions.deregister(self)


class VerbsRegions:
    """The device's protection domain and the regions registered in it, by their local key."""

    def __init__(self, opened: OpenedDevice) -> None:
        self._opened = opened
        # A region may end with the last reference to it, and so at any place of a thread that holds
        # the lock already.
        self._lock = threading.RLock()
        self._by_key: dict[int, VerbsMemoryRegion] = {}
        self._closed = False
        try:
            self.native = opened.context.alloc_pd()
        except OSError as e:
            raise queue_error(e.errno or 0, "a protection domain", "one") from e

    def register(
        self, memory: Memory, access: int, position: int, length: int | None
    ) -> VerbsMemoryRegion:
        """See ProtectionDomain.register.  Blocks while the pages are pinned: some milliseconds for
        64 MiB.

        Kernels pin writable shared mappings only.  So memory that is mapped read-only is mapped a
        second time, read-write, for the device.  The region's address then lies in that mapping,
        and what peers may do is bounded by `access`, as always.
        """
        length = check_registration(memory, access, position, length)
        try:
            return self._pin(memory, position, length, access)
        except OSError as e:
            if memory.writable or memory.fd < 0 or e.errno not in _NOT_PINNED:
                raise registration_error(e.errno or 0, memory, access, length) from e
            try:
                writable = Memory.map(memory.fd, memory.length, True)
                return self._pin(writable, position, length, access)
            except (OSError, RdmaError):
                raise registration_error(e.errno or 0, memory, access, length) from e

    def _pin(self, memory: Memory, position: int, length: int, access: int) -> VerbsMemoryRegion:
        # The lock is held from the check to the table: a domain that is closed meanwhile either
        # ends the region, or there is none.
        address = memory.address + position
        with self._lock:
            if self._closed:
                raise closed_error()
            native = self._opened.context.register(self.native, address, length, access)
            region = VerbsMemoryRegion(
                memory, address, length, int(native.lkey), int(native.rkey), access
            )
            region.regions, region.native = self, native
            self._by_key[region.lkey] = region
        return region

    def covers(self, lkey: int, address: int, length: int, *, writable: bool = False) -> bool:
        """Whether [address, address + length) lies in a live region of `lkey`.  Inline sends need
        this check: they are copied here, unchecked by the RNIC."""
        region = self._by_key.get(lkey)
        if region is None or (writable and not region.access & Access.LOCAL_WRITE):
            return False
        return region.address <= address and address + length <= region.address + region.length

    def deregister(self, region: VerbsMemoryRegion) -> bool:
        """Whether the region is out of reach now; see MemoryRegion.deregister."""
        self._opened.check_process()
        with self._lock:
            if self._by_key.get(region.lkey) is not region:
                return True
            try:
                self._opened.context.destroy(region.native)
            except OSError as e:
                if e.errno not in (errno.EBUSY, errno.EAGAIN, errno.ETIMEDOUT):
                    log.error("region %r cannot be deregistered: %s", region, e)
                return False
            del self._by_key[region.lkey]
        return True

    def refuse(self) -> bool:
        """Register nothing from here on; False when that was so before."""
        with self._lock:
            was_open = not self._closed
            self._closed = True
        return was_open

    def close(self) -> None:
        """End the regions and the domain, after `refuse` and the end of the queue pairs."""
        with self._lock:
            while self._by_key:
                self._opened.context.destroy(self._by_key.popitem()[1].native)
            self._opened.context.destroy(self.native)

    def abandon(self) -> None:
        """In a forked child, where another thread may have held the lock."""
        self._lock = threading.RLock()


def closed_error() -> ClosedError:
    return ClosedError("the protection domain is closed", hint="allocate another")
