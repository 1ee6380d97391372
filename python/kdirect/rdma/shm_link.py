"""How two shm queue pairs find each other: addresses, the handshake and the service thread.

Law of the room: control plane only.  Nothing here runs while data moves; the thread sleeps in epoll
until a peer connects, announces a region or leaves.  What a peer says is checked before it is used;
a peer that says anything else is dropped, and nobody else notices.

Handshake over one SOCK_SEQPACKET Unix socket (abstract name, same network namespace)::

    active                                   passive (service thread)
    HELLO   + eventfd, key table  -------->  uid, version, one-time token, expected peer
    ANNOUNCE ...                  -------->
    READY                         -------->
                                  <--------  WELCOME + pair memory, eventfd, key table   (or REFUSED + text)
                                  <--------  ANNOUNCE ...
                                  <--------  READY           passive side is in RTS
    active side is in RTS

Afterwards the socket carries ANNOUNCE and REVOKE both ways (shm_ring.h).  A side shuts or closes
its end only after its queue pair is in ERROR and its executor has left: so an end of file says that
this peer touches nobody's memory any more.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import struct
import threading
import time
from array import array
from dataclasses import dataclass
from typing import Any

from kdirect.errors import TransportError

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
_ADDRESS = struct.Struct(
    "<4sH16s16sQIB"
)  # magic, version, token, boot id, network namespace, qp_num, length of the name that follows
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
    def unpack(cls, data: Any) -> Address:
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
                f"queue pair {self.qp_num} is on another host (boot id {self.boot_id.hex()}, here {boot_id.hex()})",
                hint="shm works within one host: use transport=verbs or transport=tcp",
            )
        if self.namespace and namespace and self.namespace != namespace:
            raise TransportError(
                f"queue pair {self.qp_num} is in another network namespace ({self.namespace}, here {namespace})",
                hint="run both ends in one network namespace (container), or use transport=tcp",
            )


@dataclass(frozen=True, slots=True)
class Peer:
    """What the handshake tells of the other side."""

    token: bytes
    qp_num: int
    max_recv_wr: int
    max_send_bytes: int
    fences: bool  # registered for heavy fences (shm_ring.h)


def place() -> tuple[bytes, int]:
    """(boot id, network namespace) of this process; zeros where /proc does not tell."""
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


def close_fds(fds: Any) -> None:
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
        except (
            ConnectionResetError
        ):  # it closed without reading our announcements; what it said comes next
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
            raise TransportError(
                f"queue pair {address.qp_num} refused the connection: {data[_REPLY.size :].decode(errors='replace')}",
                hint="exchange addresses anew and connect the passive side first",
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
class LinkService:
    """One daemon thread a device: accepts peers, takes in announcements, notices hang-ups.

    Life: created with the device, started by the first address or connection, `stop()` by the
    device's close.  Threads: `expect`, `forget`, `watch` from any; the rest on its own thread.  It
    owns the listener and connections that have not said HELLO; a queue pair owns its socket, and
    the service keeps the queue pair alive until the peer has left.

    A queue pair gives it ``_expected_token()``, ``_greet(sock, peer, fds) -> bool`` (True: it owns
    `sock` now), ``_link_event(left) -> bool`` (False: the link is over), ``_link_error()`` (tell
    the peer, if it went to ERROR here) and ``_link_close()``.
    """

    def __init__(self) -> None:
        self.name = f"kdirect-{os.getpid()}-{os.urandom(8).hex()}".encode()
        self.kick_fd = -1
        self._lock = threading.Lock()
        self._expected: dict[bytes, Any] = {}
        self._links: dict[int, Any] = {}
        self._pending: dict[int, tuple[socket.socket, float]] = {}
        self._thread: threading.Thread | None = None
        self._listener: socket.socket | None = None
        self._epoll: select.epoll | None = None
        self._stopping = False

    # any thread
    def start(self) -> None:
        with self._lock:
            if self._thread is not None or self._stopping:
                return
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                listener.bind(b"\0" + self.name)
                listener.listen(128)
                listener.setblocking(False)
                self.kick_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                self._epoll = select.epoll()
                self._epoll.register(listener.fileno(), select.EPOLLIN)
                self._epoll.register(self.kick_fd, select.EPOLLIN)
            except OSError as e:
                listener.close()
                raise TransportError(
                    f"cannot open the shm transport's listener: {e.strerror}",
                    hint="check the limit of open files (ulimit -n)",
                ) from e
            self._listener = listener
            self._thread = threading.Thread(target=self._run, name="kdirect-shm", daemon=True)
            self._thread.start()

    def expect(self, token: bytes, qp: Any) -> None:
        with self._lock:
            self._expected[token] = qp

    def forget(self, token: bytes) -> None:
        with self._lock:
            self._expected.pop(token, None)

    def watch(self, fd: int, qp: Any) -> None:
        """Take over a connected active queue pair's socket (its owner stays the queue pair)."""
        with self._lock:
            if self._epoll is None:
                raise TransportError(
                    "the shm device was closed while connecting", hint="open it again"
                )
            self._links[fd] = qp
            self._epoll.register(fd, select.EPOLLIN | select.EPOLLRDHUP)
        self.kick()

    def kick(self) -> None:
        with self._lock:
            if self.kick_fd >= 0:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_write(self.kick_fd, 1)

    def stop(self) -> None:
        """End the thread and every link; queue pairs must be closed already."""
        with self._lock:
            self._stopping = True
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self.kick()
            thread.join()
            with (
                self._lock
            ):  # last, so that nobody kicks a descriptor that means something else by now
                if self.kick_fd >= 0:
                    os.close(self.kick_fd)
                    self.kick_fd = -1

    def abandon(self) -> None:
        """In a forked child, where the thread does not exist: close the descriptors, so that the
        peers see the parent's end when the parent leaves."""
        self._lock = threading.Lock()
        if self._epoll is not None:
            self._epoll.close()
        if self._listener is not None:
            self._listener.close()
        for sock, _ in self._pending.values():
            sock.close()
        if self.kick_fd >= 0:
            os.close(self.kick_fd)
        self._epoll = self._listener = self._thread = None
        self.kick_fd = -1
        self._stopping = True
        self._expected.clear()
        self._links.clear()
        self._pending.clear()

    # service thread
    def _run(self) -> None:
        assert self._epoll is not None and self._listener is not None
        listener, kick = self._listener.fileno(), self.kick_fd
        while True:
            kicked = False
            for fd, events in self._epoll.poll(1.0 if self._pending else -1):
                try:
                    if fd == kick:
                        os.eventfd_read(kick)
                        kicked = True
                    elif fd == listener:
                        self._accept()
                    elif fd in self._pending:
                        self._hello(fd)
                    elif fd in self._links:
                        self._link_event(fd, events)
                except Exception:  # one peer's trouble must not end the service of the others
                    log.exception("shm link on descriptor %d failed", fd)
                    try:
                        self._drop(fd)
                    except Exception:
                        log.exception("and could not be closed")
            if self._stopping:
                break
            if kicked:
                for qp in list(self._links.values()):
                    qp._link_error()
            if self._pending:
                now = time.monotonic()
                for fd, (_, deadline) in list(self._pending.items()):
                    if now > deadline:
                        self._drop(fd)
        self._close_all()

    def _accept(self) -> None:
        assert self._listener is not None and self._epoll is not None
        while True:
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as e:
                log.error(
                    "cannot accept a shm peer: %s; check the limit of open files (ulimit -n)",
                    e.strerror,
                )
                time.sleep(0.1)
                return
            sock.setblocking(False)
            uid = peer_uid(sock)
            if uid not in (0, os.geteuid()):
                log.warning("refused a shm peer of user %d", uid)
                send_refused(sock, f"user {uid} may not connect to a device of user {os.geteuid()}")
                sock.close()
                continue
            self._pending[sock.fileno()] = (sock, time.monotonic() + HANDSHAKE_TIMEOUT_S)
            self._epoll.register(sock.fileno(), select.EPOLLIN | select.EPOLLRDHUP)

    def _hello(self, fd: int) -> None:
        sock, _ = self._pending[fd]
        try:
            data, fds = recv_fds(sock, 512, 4)
        except BlockingIOError:
            return
        except OSError:
            self._drop(fd)
            return
        refusal, qp = "", None
        if len(data) < 8 or data[:4] != _MAGIC:
            close_fds(fds)
            self._drop(fd)
            return
        _, version, kind = struct.unpack_from("<4sHH", data)
        if version != VERSION:
            refusal = f"this side speaks version {VERSION} of the shm transport"
        elif kind != MSG_HELLO or len(data) != _HELLO.size or len(fds) != 2:
            refusal = "malformed greeting"
        else:
            _, _, _, target, token, qp_num, max_recv_wr, max_send_bytes, fences = _HELLO.unpack(
                data
            )
            peer = Peer(token, qp_num, max_recv_wr, max_send_bytes, bool(fences))
            with self._lock:
                qp = self._expected.get(target)
                if qp is None:
                    refusal = "no queue pair expects this token (it was used, or its queue pair was closed)"
                elif not _sane(max_recv_wr, max_send_bytes):
                    refusal = "malformed greeting"
                elif qp._expected_token() != token:
                    refusal = "the queue pair expects another peer"
                else:
                    del self._expected[target]
        if refusal:
            close_fds(fds)
            send_refused(sock, refusal)
            self._drop(fd)
            return
        del self._pending[fd]
        if qp is not None and qp._greet(sock, peer, fds):
            with self._lock:
                self._links[fd] = qp
            self._link_event(fd, 0)
        else:
            send_refused(sock, "the queue pair cannot be set up")
            self._forget_fd(fd)
            sock.close()

    def _link_event(self, fd: int, events: int) -> None:
        qp = self._links[fd]
        left = bool(events & (select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR))
        if not qp._link_event(left):
            self._finish(fd, qp)

    def _finish(self, fd: int, qp: Any) -> None:
        with self._lock:
            self._links.pop(fd, None)
        self._forget_fd(fd)
        qp._link_close()

    def _forget_fd(self, fd: int) -> None:
        if self._epoll is not None:
            with contextlib.suppress(OSError):
                self._epoll.unregister(fd)

    def _drop(self, fd: int) -> None:
        if fd in self._pending:
            sock, _ = self._pending.pop(fd)
            self._forget_fd(fd)
            sock.close()
        elif fd in self._links:
            qp = self._links[fd]
            qp._link_event(True)
            self._finish(fd, qp)

    def _close_all(self) -> None:
        for fd, qp in list(self._links.items()):
            self._finish(fd, qp)
        for fd in list(self._pending):
            self._drop(fd)
        with self._lock:
            assert self._epoll is not None and self._listener is not None
            self._epoll.close()
            self._listener.close()
            self._epoll = self._listener = None
            self._expected.clear()
