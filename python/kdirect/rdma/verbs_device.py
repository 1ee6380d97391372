"""The verbs provider: devices, protection domains and memory regions over libibverbs.

Law of the room: the classes of the contract that own things.  A device owns its context, the link
service's thread and everything below; a protection domain owns its regions and queue pairs; a
region keeps its Memory alive until it is deregistered.  Children close before parents; parents
close the rest, in the order that libibverbs demands.

Opened lazily by `kdirect.rdma.open_device` and bound to the process: in a forked child every object
refuses to work, its descriptors are closed, and nothing of the parent's is destroyed.

What a caller may notice beside the shm provider: registration pins memory (limits, see
`verbs_preflight`), an RNIC works on while the process does not, a dead peer shows after about half
a second for requests under way, and READs beyond the device's largest message are posted in pieces.
Trust: the RNIC checks key, bounds and access of every operation; a key is 32 bits, valid within its
protection domain, one domain a client.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
import weakref
from typing import Any

from kdirect.errors import ClosedError, RdmaError
from kdirect.rdma import verbs, verbs_choice, verbs_link
from kdirect.rdma.contract import (
    Access,
    Device,
    Memory,
    MemoryRegion,
    ProtectionDomain,
    check_registration,
    forked_error,
)
from kdirect.rdma.verbs_preflight import queue_error, registration_error
from kdirect.rdma.verbs_queues import VerbsCompletionQueue, VerbsQueuePair

log = logging.getLogger("kdirect.rdma.verbs")

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
    "read": "reads", "write": "writes", "write_imm": "writes", "send": "sends", "recv": "receives", "fetch_add": "atomics",
    "compare_swap": "atomics",
}  # fmt: skip
_BYTES = {"read": "read_bytes", "write": "write_bytes", "write_imm": "write_bytes"}
_PAIR_EVENTS = ("IBV_EVENT_QP_FATAL", "IBV_EVENT_QP_REQ_ERR", "IBV_EVENT_QP_ACCESS_ERR")
_DEVICE_EVENTS = ("IBV_EVENT_DEVICE_FATAL", "IBV_EVENT_CQ_ERR")
_PORT_EVENTS = ("IBV_EVENT_PORT_ERR", "IBV_EVENT_GID_CHANGE", "IBV_EVENT_LID_CHANGE")


class VerbsMemoryRegion(MemoryRegion):
    """See MemoryRegion.  `address` may differ from the memory's: see
    `VerbsProtectionDomain.register`."""

    _domain: VerbsProtectionDomain
    _native: Any

    def deregister(self, timeout_ms: float = 100) -> bool:
        return self._domain._deregister(self)


class VerbsProtectionDomain(ProtectionDomain):
    """See ProtectionDomain."""

    def __init__(self, device: VerbsDevice) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._by_key: dict[int, VerbsMemoryRegion] = {}
        self._pairs: set[VerbsQueuePair] = set()
        self._closed = False
        try:
            self._native = device._context.alloc_pd()
        except OSError as e:
            raise queue_error(e.errno or 0, "a protection domain", "one") from e

    def register(
        self, memory: Memory, access: int, position: int = 0, length: int | None = None
    ) -> MemoryRegion:
        """See ProtectionDomain.  Blocks while the pages are pinned, some milliseconds for 64 MiB.

        Kernels pin writable shared mappings only, so memory that is mapped read-only is mapped once
        more, read-write, for the device: the region's address then lies in that mapping, and what
        peers may do is bounded by `access`, as always.
        """
        self._check()
        access = int(access)
        length = check_registration(memory, access, position, length)
        try:
            return self._pin(memory, position, length, access)
        except OSError as e:
            if (
                memory.writable
                or memory.fd < 0
                or e.errno
                not in (errno.EFAULT, errno.EINVAL, errno.EOPNOTSUPP, errno.EACCES, errno.EPERM)
            ):
                raise registration_error(e.errno or 0, memory, access, length) from e
            try:
                return self._pin(
                    Memory.map(memory.fd, memory.length, True), position, length, access
                )
            except (OSError, RdmaError):
                raise registration_error(e.errno or 0, memory, access, length) from e

    def _pin(self, memory: Memory, position: int, length: int, access: int) -> VerbsMemoryRegion:
        """One hold of the lock from the check to the table: a domain that is closed meanwhile ends
        the region, or there is none."""
        address = memory.address + position
        with self._lock:
            if self._closed:
                raise self._closed_error()
            native = self._device._context.register(self._native, address, length, access)
            region = VerbsMemoryRegion(
                memory, address, length, int(native.lkey), int(native.rkey), access
            )
            region._domain, region._native = self, native
            self._by_key[region.lkey] = region
        return region

    def _covers(self, lkey: int, address: int, length: int, *, writable: bool = False) -> bool:
        """Whether [address, address + length) lies in a live region of `lkey`: inline sends are
        copied here, unchecked by the RNIC."""
        region = self._by_key.get(lkey)
        if region is None or (writable and not region.access & Access.LOCAL_WRITE):
            return False
        return region.address <= address and address + length <= region.address + region.length

    def _deregister(self, region: VerbsMemoryRegion) -> bool:
        self._device._check_process()
        with self._lock:
            if self._by_key.get(region.lkey) is not region:
                return True
            try:
                self._device._context.destroy(region._native)
            except OSError as e:
                if e.errno in (errno.EBUSY, errno.EAGAIN, errno.ETIMEDOUT):
                    return False
                log.error("region %r cannot be deregistered: %s", region, e)
                return False
            del self._by_key[region.lkey]
        return True

    def create_qp(
        self,
        send_cq: Any,
        recv_cq: Any,
        max_send_wr: int = 128,
        max_recv_wr: int = 128,
        max_send_bytes: int = 65536,
        rnr_timeout_ms: int = 5000,
    ) -> VerbsQueuePair:
        self._check()
        qp = VerbsQueuePair(
            self, send_cq, recv_cq, max_send_wr, max_recv_wr, max_send_bytes, rnr_timeout_ms
        )
        self._pairs.add(qp)
        return qp

    def close(self) -> None:
        if self._device._forked():
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for qp in list(self._pairs):
            qp.close()
        with self._lock:
            context = self._device._context
            for region in self._by_key.values():
                context.destroy(region._native)
            self._by_key.clear()
            context.destroy(self._native)
        self._device._domains.discard(self)

    def _check(self) -> None:
        self._device._check_process()
        if self._closed:
            raise self._closed_error()

    def _closed_error(self) -> ClosedError:
        return ClosedError("the protection domain is closed", hint="allocate another")

    def _abandon(self) -> None:
        self._lock = threading.Lock()
        for qp in self._pairs:
            qp._abandon()


class VerbsDevice(Device):
    """See Device.  `choice` is the port and GID in use.

    `bind_address`, `device`, `gid_index` and `link_port` as the options rdma.bind.address,
    rdma.device, rdma.gid.index and rdma.link.port; `strict` refuses to take another GID than that
    of `bind_address`.  Raises TransportError or RdmaError, with the remedy.  Threads: any.
    """

    name = "verbs"

    def __init__(
        self,
        bind_address: str = "",
        *,
        device: str = "",
        gid_index: int = -1,
        link_port: int = 0,
        strict: bool = False,
    ) -> None:
        self._pid = os.getpid()
        self.choice = verbs_choice.choose(
            bind_address, device=device, gid_index=gid_index, strict=strict
        )
        verbs.load()
        refused = verbs_choice.device_file_error()
        if refused is not None:
            raise refused
        try:
            self._context = verbs.Context(self.choice.device, self.choice.port.number)
        except OSError as e:
            raise queue_error(e.errno or 0, "a context", f"device {self.choice.device}") from e
        self._lock = threading.Lock()
        self._domains: set[VerbsProtectionDomain] = set()
        self._cqs: set[VerbsCompletionQueue] = set()
        self._counters = dict.fromkeys(COUNTERS, 0)
        self._closed = False
        self._service = verbs_link.LinkService(
            self._link_host(bind_address), link_port, self._context.async_fd, self._take_event
        )
        key = id(self)
        _devices[key] = weakref.ref(self, lambda _: _devices.pop(key, None))
        log.info("RDMA over %s", self.describe())

    def _link_host(self, bind_address: str) -> str:
        """Where peers reach the link: the bind address if it is one, else the address that the GID
        is made of."""
        try:
            wanted = (
                socket.getaddrinfo(bind_address, None, type=socket.SOCK_STREAM)[0][4][0]
                if bind_address
                else ""
            )
        except OSError:
            wanted = ""
        if wanted and wanted not in ("0.0.0.0", "::"):
            return str(wanted)
        if (
            self.choice.port.link_layer != verbs_choice.LINK_INFINIBAND
            and not self.choice.gid.address.is_link_local
        ):
            return self.choice.gid.ip
        try:
            return str(
                socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)[0][4][0]
            )
        except OSError:
            return "127.0.0.1"

    def describe(self) -> str:
        """Device, port, GID, and what matters of its limits, for the log."""
        c = self._context
        return f"{self.choice} (firmware {c.firmware}, messages up to {c.max_message_bytes} bytes, {c.max_rd_atomic} READs at once)"

    def alloc_pd(self) -> VerbsProtectionDomain:
        self._check()
        domain = VerbsProtectionDomain(self)
        self._domains.add(domain)
        return domain

    def create_cq(self, depth: int = 1024) -> VerbsCompletionQueue:
        self._check()
        if depth <= 0:
            raise RdmaError(
                f"completion queue depth {depth} is out of range", hint="give at least 1"
            )
        cq = VerbsCompletionQueue(self, depth)
        self._cqs.add(cq)
        return cq

    def statistics(self) -> dict[str, int]:
        """Counters of all queue pairs, closed ones too; `wakeups` stays 0: an RNIC wakes its host
        itself."""
        return dict(self._counters)

    def _count(self, op: str, length: int) -> None:
        self._counters[_COUNTS[op]] += 1
        if op in _BYTES:
            self._counters[_BYTES[op]] += length

    def _take_event(self) -> None:
        """An asynchronous event of the device, on the service's thread."""
        name = self._context.next_event()
        if name in _PAIR_EVENTS:
            log.debug("%s: %s", self.choice.port.name, name)
            for qp in self._all_pairs():
                qp._check_device_state()
        elif name in _DEVICE_EVENTS:
            log.error(
                "%s: %s; its queue pairs are closed, clients must connect again",
                self.choice.port.name,
                name,
            )
            for qp in self._all_pairs():
                qp._fail()
        elif name in _PORT_EVENTS:
            log.warning(
                "%s: %s; requests under way fail if the port does not come back soon",
                self.choice.port.name,
                name,
            )
        else:
            log.info("%s: %s", self.choice.port.name, name)

    def _all_pairs(self) -> list[VerbsQueuePair]:
        return [qp for domain in list(self._domains) for qp in list(domain._pairs)]

    def close(self) -> None:
        if self._closed or self._forked():
            return
        self._closed = True
        for domain in list(self._domains):
            domain.close()
        self._service.stop()
        for cq in list(self._cqs):
            cq.close()
        self._context.close()

    @property
    def closed(self) -> bool:
        return self._closed

    def _forked(self) -> bool:
        return os.getpid() != self._pid

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise forked_error("the verbs device")

    def _check(self) -> None:
        self._check_process()
        if self._closed:
            raise ClosedError(
                "the verbs device is closed", hint="open it again: kdirect.rdma.open_device"
            )

    def _abandon(self) -> None:
        """In a forked child: the objects stay, and refuse; the descriptors go, so that the parent's
        end is the end."""
        verbs.immortal(self._context.natives)
        for domain in self._domains:
            domain._abandon()
        for cq in self._cqs:
            cq._abandon()
        self._service.abandon()
        for fd in self._context.fds:
            os.close(fd)


_devices: dict[int, weakref.ref[VerbsDevice]] = {}


def _after_fork_in_child() -> None:
    for reference in list(_devices.values()):
        device = reference()
        if device is not None and not device._closed:
            device._abandon()
    _devices.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)

__all__ = ["VerbsDevice", "VerbsMemoryRegion", "VerbsProtectionDomain"]
