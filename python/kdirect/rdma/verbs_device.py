"""The verbs provider: devices, protection domains and memory regions over libibverbs.

Law of the room: the classes of the contract that own others.  A device owns its context, the link
service's thread and everything below.  A protection domain owns its regions (`verbs_memory`) and
queue pairs (`verbs_queue_pairs`).  Children close before parents; parents close the rest, in the
order that libibverbs demands.

A device is opened at first use by `kdirect.rdma.open_device`, and belongs to the process.  In a
forked child every object refuses to work, its descriptors are closed, and nothing of the parent's
is destroyed.

What differs from the shm provider: registration pins memory (for its limits see `verbs_limits`),
an RNIC goes on while the process is stopped, requests to a peer that died fail after about half a
second, and READs beyond the device's largest message are posted in pieces.

Trust: the RNIC checks key, bounds and access of every operation.  A key has 32 bits and is valid
within its protection domain; each client has its own domain.
"""

from __future__ import annotations

import logging
import os
import socket
import weakref
from collections.abc import Callable

from kdirect.errors import ClosedError, RdmaError
from kdirect.rdma import verbs, verbs_choice
from kdirect.rdma.contract import CompletionQueue, Device, Memory, ProtectionDomain
from kdirect.rdma.verbs_completions import VerbsCompletionQueue
from kdirect.rdma.verbs_limits import queue_error
from kdirect.rdma.verbs_link import VerbsLinkService
from kdirect.rdma.verbs_memory import VerbsMemoryRegion, VerbsRegions, closed_error
from kdirect.rdma.verbs_opened import OpenedDevice
from kdirect.rdma.verbs_queue_pairs import VerbsQueuePair

log = logging.getLogger("kdirect.rdma.verbs")

_PAIR_EVENTS = ("IBV_EVENT_QP_FATAL", "IBV_EVENT_QP_REQ_ERR", "IBV_EVENT_QP_ACCESS_ERR")
_DEVICE_EVENTS = ("IBV_EVENT_DEVICE_FATAL", "IBV_EVENT_CQ_ERR")
_PORT_EVENTS = ("IBV_EVENT_PORT_ERR", "IBV_EVENT_GID_CHANGE", "IBV_EVENT_LID_CHANGE")


class VerbsProtectionDomain(ProtectionDomain):
    """See ProtectionDomain.  It owns its regions and its queue pairs."""

    def __init__(
        self, opened: OpenedDevice, on_close: Callable[[VerbsProtectionDomain], None]
    ) -> None:
        self._opened = opened
        self._on_close = on_close
        self._regions = VerbsRegions(opened)
        self._pairs: set[VerbsQueuePair] = set()
        self._closed = False

    def register(
        self, memory: Memory, access: int, position: int = 0, length: int | None = None
    ) -> VerbsMemoryRegion:
        """See ProtectionDomain and `VerbsRegions.register`."""
        self._check()
        return self._regions.register(memory, int(access), position, length)

    def create_qp(
        self,
        send_cq: CompletionQueue,
        recv_cq: CompletionQueue,
        max_send_wr: int = 128,
        max_recv_wr: int = 128,
        max_send_bytes: int = 65536,
        rnr_timeout_ms: float = 5000,
    ) -> VerbsQueuePair:
        self._check()
        if not isinstance(send_cq, VerbsCompletionQueue) or not isinstance(
            recv_cq, VerbsCompletionQueue
        ):
            raise RdmaError(
                "the completion queues belong to another provider",
                hint="create them on the device of the protection domain",
            )
        qp = VerbsQueuePair(
            self._opened,
            self._regions,
            send_cq,
            recv_cq,
            max_send_wr,
            max_recv_wr,
            max_send_bytes,
            rnr_timeout_ms,
            self._pairs.discard,
        )
        self._pairs.add(qp)
        return qp

    def queue_pairs(self) -> list[VerbsQueuePair]:
        return list(self._pairs)

    def close(self) -> None:
        if self._opened.forked or not self._regions.refuse():
            return
        self._closed = True
        for qp in list(self._pairs):
            qp.close()
        self._regions.close()
        self._on_close(self)

    def _check(self) -> None:
        self._opened.check_process()
        if self._closed:
            raise closed_error()

    def abandon(self) -> None:
        """In a forked child: its objects stay, and refuse."""
        self._regions.abandon()
        for qp in self._pairs:
            qp.abandon()


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
        self._domains: set[VerbsProtectionDomain] = set()
        self._cqs: set[VerbsCompletionQueue] = set()
        self._closed = False
        service = VerbsLinkService(
            self._link_host(bind_address), link_port, self._context.async_fd, self._take_event
        )
        self._opened = OpenedDevice(self._context, self.choice, service)
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
        return (
            f"{self.choice} (firmware {c.firmware}, messages up to {c.max_message_bytes} bytes,"
            f" {c.max_rd_atomic} READs at once)"
        )

    def alloc_pd(self) -> VerbsProtectionDomain:
        self._check()
        domain = VerbsProtectionDomain(self._opened, self._domains.discard)
        self._domains.add(domain)
        return domain

    def create_cq(self, depth: int = 1024) -> VerbsCompletionQueue:
        self._check()
        if depth <= 0:
            raise RdmaError(
                f"completion queue depth {depth} is out of range", hint="give at least 1"
            )
        cq = VerbsCompletionQueue(self._opened, depth, self._cqs.discard)
        self._cqs.add(cq)
        return cq

    def statistics(self) -> dict[str, int]:
        """Counters of all queue pairs, closed ones too; `wakeups` stays 0: an RNIC wakes its host
        itself."""
        return dict(self._opened.counters)

    def _take_event(self) -> None:
        """An asynchronous event of the device, on the service's thread."""
        name = self._context.next_event()
        if name in _PAIR_EVENTS:
            log.debug("%s: %s", self.choice.port.name, name)
            for qp in self._all_pairs():
                qp.check_device_state()
        elif name in _DEVICE_EVENTS:
            log.error(
                "%s: %s; its queue pairs are closed, clients must connect again",
                self.choice.port.name,
                name,
            )
            for qp in self._all_pairs():
                qp.fail()
        elif name in _PORT_EVENTS:
            log.warning(
                "%s: %s; requests under way fail if the port does not come back soon",
                self.choice.port.name,
                name,
            )
        else:
            log.info("%s: %s", self.choice.port.name, name)

    def _all_pairs(self) -> list[VerbsQueuePair]:
        return [qp for domain in list(self._domains) for qp in domain.queue_pairs()]

    def close(self) -> None:
        if self._closed or self._opened.forked:
            return
        self._closed = True
        for domain in list(self._domains):
            domain.close()
        self._opened.service.stop()
        for cq in list(self._cqs):
            cq.close()
        self._context.close()

    @property
    def closed(self) -> bool:
        return self._closed

    def _check(self) -> None:
        self._opened.check_process()
        if self._closed:
            raise ClosedError(
                "the verbs device is closed", hint="open it again: kdirect.rdma.open_device"
            )

    def abandon(self) -> None:
        """In a forked child: the objects stay, and refuse.  The descriptors are closed, so that the
        connections end when the parent ends."""
        verbs.immortal(self._context.natives)
        for domain in self._domains:
            domain.abandon()
        for cq in self._cqs:
            cq.abandon()
        self._opened.service.abandon()
        for fd in self._context.fds:
            os.close(fd)


_devices: dict[int, weakref.ref[VerbsDevice]] = {}


def _after_fork_in_child() -> None:
    for reference in list(_devices.values()):
        device = reference()
        if device is not None and not device._closed:
            device.abandon()
    _devices.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)

__all__ = ["VerbsDevice", "VerbsMemoryRegion", "VerbsProtectionDomain"]
