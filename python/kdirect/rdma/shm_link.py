"""How two shm queue pairs find each other: addresses, the handshake and the service thread.

Law of the room: control plane only.  Nothing here runs while data moves.  The thread sleeps in
epoll until a peer connects, announces a region or leaves.  What a peer says is checked before it is
used; a peer that says anything else is dropped, and nobody else notices.

The handshake uses one SOCK_SEQPACKET Unix socket (an abstract name, so both ends must be in the
same network namespace)::

    active                                   passive (service thread)
    HELLO   + eventfd, key table  -------->  uid, version, one-time token, expected peer
    ANNOUNCE ...                  -------->
    READY                         -------->
                                  <--------  WELCOME + pair memory, eventfd, key table
                                             (or REFUSED + text)
                                  <--------  ANNOUNCE ...
                                  <--------  READY           passive side is in RTS
    active side is in RTS

Afterwards the socket carries ANNOUNCE and REVOKE in both directions (shm_ring.h).  A side shuts
down or closes its end only after its queue pair is in ERROR and its executor has left.  So an end
of file means that this peer touches nobody's memory any more.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import struct
import time
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from kdirect.errors import TransportError
from kdirect.rdma.link_service import LinkService

log = logging.getLogger("kdirect.rdma.shm")

VERSION = 1
TOKEN_BYTES = 16
CONNECT_TIMEOUT_MS = 5000
HANDSHAKE_TIMEOUT_S = 5.0

MSG_HELLO = 1
MSG_WELCOME = 2
MSG_REFUSED = 3
# magic, version, type, [HELLO: token of the target, own token,] qp_num, max_recv_wr,
# max_send_bytes, fences
_HELLO = struct.Struct("<4sHH16s16sIIII")
_REPLY = struct.Struct("<4sHHIIII")  # REFUSED: UTF-8 text follows
_MAGIC = b"KDSL"
# magic, version, token, boot id, network namespace, qp_num, length of the name that follows
_ADDRESS = struct.Struct("<4sH16s16sQIB")
_ADDRESS_MAGIC = b"KDSA"
MAX_QUEUE = 1 << 20
MAX_SEND_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Address:
    """Where a queue pair is reached: what `QueuePair.address` packs."""

    token: bytes
    boot_id: bytes
    namespace: int
    qp_num: int
    name: bytes  # abstract socket name without its leading NUL

    def pack(self) -> bytes:
        return (
            _ADDRESS.pack(
                _ADDRESS_MAGIC,
                VERSION,
                self.token,
                self.boot_id,
                self.namespace,
                self.qp_num,
                len(self.name),
            )
            + self.name
        )

    @classmethod
    def unpack(cls, data: bytes) -> Address:
        """TransportError when `data` is not the address of a shm queue pair of this version."""
        data = bytes(data)
        if len(data) < _ADDRESS.size or data[:4] != _ADDRESS_MAGIC:
            raise TransportError(
                f"{len(data)} bytes are not the address of a shm queue pair",
                hint="both ends must use the same transport",
            )
        _, version, token, boot_id, namespace, qp_num, n = _ADDRESS.unpack_from(data)
        if version != VERSION:
            raise TransportError(
                f"the peer speaks version {version} of the shm transport, this process {VERSION}",
                hint="use the same release of kdirect on both sides, or transport=tcp",
            )
        name = data[_ADDRESS.size :]
        if len(name) != n or not n:
            raise TransportError(
                "the address of a shm queue pair is cut short",
                hint="pass QueuePair.address as it is",
            )
        return cls(token, boot_id, namespace, qp_num, name)

    def check_reachable(self) -> None:
        """TransportError when the address belongs to another host or network namespace."""
        boot_id, namespace = place()
        if any(self.boot_id) and any(boot_id) and self.boot_id != boot_id:
            raise TransportError(
                f"queue pair {self.qp_num} is on another host"
                f" (boot id {self.boot_id.hex()}, here {boot_id.hex()})",
                hint="shm works within one host: use transport=verbs or transport=tcp",
            )
        if self.namespace and namespace and self.namespace != namespace:
            raise TransportError(
                f"queue pair {self.qp_num} is in another network namespace"
                f" ({self.namespace}, here {namespace})",
                hint="run both ends in one network namespace (container), or use transport=tcp",
            )


@dataclass(frozen=True, slots=True)
class Peer:
    """What the handshake says about the other side."""

    token: bytes
    qp_num: int
    max_recv_wr: int
    max_send_bytes: int
    fences: bool  # registered for heavy fences (shm_ring.h)


def place() -> tuple[bytes, int]:
    """(boot id, network namespace) of this process; zeros where /proc does not say."""
    boot_id, namespace = bytes(16), 0
    with contextlib.suppress(OSError, ValueError), open("/proc/sys/kernel/random/boot_id") as f:
        boot_id = bytes.fromhex(f.read().strip().replace("-", ""))
    with contextlib.suppress(OSError):
        namespace = os.stat("/proc/self/ns/net").st_ino
    return (boot_id if len(boot_id) == 16 else bytes(16)), namespace


# -- messages with descriptors ---------------------------------------------------------------------
def send_fds(sock: socket.socket, data: bytes, fds: list[int]) -> None:
    sock.sendmsg(
        [data],
        [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else [],
        socket.MSG_NOSIGNAL,
    )


def recv_fds(sock: socket.socket, size: int, most: int) -> tuple[bytes, list[int]]:
    """One message and its descriptors (the caller owns them, close-on-exec)."""
    data, ancillary, flags, _ = sock.recvmsg(
        size, socket.CMSG_SPACE(most * 4), socket.MSG_CMSG_CLOEXEC
    )
    fds = array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        close_fds(fds)
        raise OSError("truncated message")
    return data, list(fds)


def close_fds(fds: Iterable[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def send_hello(sock: socket.socket, target: bytes, own: Peer, fds: list[int]) -> None:
    limits = (own.qp_num, own.max_recv_wr, own.max_send_bytes, own.fences)
    send_fds(sock, _HELLO.pack(_MAGIC, VERSION, MSG_HELLO, target, own.token, *limits), fds)


def send_welcome(sock: socket.socket, own: Peer, fds: list[int]) -> None:
    send_fds(
        sock,
        _REPLY.pack(
            _MAGIC,
            VERSION,
            MSG_WELCOME,
            own.qp_num,
            own.max_recv_wr,
            own.max_send_bytes,
            own.fences,
        ),
        fds,
    )


def send_refused(sock: socket.socket, text: str) -> None:
    with contextlib.suppress(OSError):
        send_fds(
            sock, _REPLY.pack(_MAGIC, VERSION, MSG_REFUSED, 0, 0, 0, 0) + text.encode()[:200], []
        )


def _sane(max_recv_wr: int, max_send_bytes: int) -> bool:
    return 0 < max_recv_wr <= MAX_QUEUE and 0 <= max_send_bytes <= MAX_SEND_BYTES


def open_connection(address: Address, deadline: float) -> socket.socket:
    """A socket to the listener of `address`, with the peer's user checked."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        sock.connect(b"\0" + address.name)
        uid = peer_uid(sock)
        if os.geteuid() != 0 and uid not in (0, os.geteuid()):
            raise TransportError(
                f"queue pair {address.qp_num} belongs to user {uid}",
                hint="shm connects processes of one user only",
            )
        return sock
    except OSError as e:
        sock.close()
        raise TransportError(
            f"cannot reach queue pair {address.qp_num} over shared memory: {e.strerror or e}",
            hint="its process has ended or closed its device; ask it for a new address",
        ) from e
    except BaseException:
        sock.close()
        raise


def recv_welcome(sock: socket.socket, address: Address, deadline: float) -> tuple[Peer, list[int]]:
    """(peer, [pair memory, eventfd, key table]) or TransportError."""
    try:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            data, fds = recv_fds(sock, 512, 3)
        except ConnectionResetError:
            # The peer closed without reading our announcements; what it said can still be read.
            data, fds = recv_fds(sock, 512, 3)
    except OSError as e:
        raise TransportError(
            f"queue pair {address.qp_num} did not answer: {e.strerror or e}",
            hint="its process is stopped or overloaded; try again, or use transport=tcp",
        ) from e
    if len(data) >= _REPLY.size and data[:4] == _MAGIC:
        _, version, kind, qp_num, max_recv_wr, max_send_bytes, fences = _REPLY.unpack_from(data)
        if (
            version == VERSION
            and kind == MSG_WELCOME
            and len(fds) == 3
            and _sane(max_recv_wr, max_send_bytes)
        ):
            return Peer(address.token, qp_num, max_recv_wr, max_send_bytes, bool(fences)), fds
        if kind == MSG_REFUSED:
            close_fds(fds)
            text = data[_REPLY.size :].decode(errors="replace")
            raise TransportError(
                f"queue pair {address.qp_num} refused the connection: {text}",
                hint="exchange new addresses and connect the passive side first",
            )
    close_fds(fds)
    raise TransportError(
        f"queue pair {address.qp_num} closed the connection or answered with something else",
        hint="use the same release of kdirect on both sides",
    )


def peer_uid(sock: socket.socket) -> int:
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return uid


# -- the service thread ----------------------------------------------------------------------------
class LinkedPair(Protocol):
    """What the service asks of a shm queue pair."""

    def _expected_token(self) -> bytes:
        """The token of the peer that it waits for."""

    def _greet(self, sock: socket.socket, peer: Peer, fds: list[int]) -> bool:
        """The peer has said HELLO.  True: the queue pair owns `sock` now."""

    def _link_event(self, left: bool) -> bool:
        """Take in what the peer announced.  `left`: it hung up.  False: the link is over."""

    def _link_error(self) -> None:
        """Tell the peer, if the queue pair went to ERROR here."""

    def _link_close(self) -> None:
        """The link is over."""


class ShmLinkService(LinkService[LinkedPair, LinkedPair]):
    """The service thread of a shm device; see LinkService.

    A queue pair owns its socket.  The service keeps the queue pair alive until the peer has left.
    """

    def __init__(self) -> None:
        super().__init__("shm", log, HANDSHAKE_TIMEOUT_S)
        self.name = f"kdirect-{os.getpid()}-{os.urandom(8).hex()}".encode()

    def _open_listener(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listener.bind(b"\0" + self.name)
            listener.listen(128)
            listener.setblocking(False)
        except OSError as e:
            listener.close()
            raise TransportError(
                f"cannot open the shm transport's listener: {e.strerror}",
                hint="check the limit of open files (ulimit -n)",
            ) from e
        return listener

    def _admit(self, sock: socket.socket) -> bool:
        uid = peer_uid(sock)
        if uid in (0, os.geteuid()):
            return True
        log.warning("refused a shm peer of user %d", uid)
        send_refused(sock, f"user {uid} may not connect to a device of user {os.geteuid()}")
        return False

    def _hello(self, fd: int) -> None:
        sock = self._pending[fd].sock
        try:
            data, fds = recv_fds(sock, 512, 4)
        except BlockingIOError:
            return
        except OSError:
            self._drop(fd)
            return
        if len(data) < 8 or data[:4] != _MAGIC:
            close_fds(fds)
            self._drop(fd)
            return
        qp, peer = self._wanted(data, fds)
        if isinstance(qp, str):
            close_fds(fds)
            send_refused(sock, qp)
            self._drop(fd)
        elif qp._greet(sock, peer, fds):
            self._establish(fd, qp)
            self._link_event(fd, 0)
        else:
            send_refused(sock, "the queue pair cannot be set up")
            self._drop(fd)

    def _wanted(self, data: bytes, fds: list[int]) -> tuple[LinkedPair | str, Peer]:
        """(the queue pair that a HELLO is for, its sender); a text in place of the queue pair says
        why the sender is refused."""
        nobody = Peer(b"", 0, 0, 0, False)
        _, version, kind = struct.unpack_from("<4sHH", data)
        if version != VERSION:
            return f"this side speaks version {VERSION} of the shm transport", nobody
        if kind != MSG_HELLO or len(data) != _HELLO.size or len(fds) != 2:
            return "malformed greeting", nobody
        _, _, _, target, token, qp_num, max_recv_wr, max_send_bytes, fences = _HELLO.unpack(data)
        if not _sane(max_recv_wr, max_send_bytes):
            return "malformed greeting", nobody
        peer = Peer(token, qp_num, max_recv_wr, max_send_bytes, bool(fences))
        return self._claim(target, lambda qp: qp._expected_token() == token), peer

    def _link_event(self, fd: int, events: int) -> None:
        left = bool(events & (select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR))
        if not self._links[fd]._link_event(left):
            self._finish(fd)

    def _end_link(self, link: LinkedPair) -> None:
        link._link_close()

    def _kicked(self) -> None:
        for qp in list(self._links.values()):
            qp._link_error()
