"""The service thread of a device: it connects peers and notices their end.

Law of the room: control plane only.  The thread sleeps in epoll while data moves.  What a peer says
is checked before it is used; a peer that says anything else is dropped, and nobody else notices.

`LinkService` owns the thread, its epoll, the descriptor that wakes it, the listener, and the
connections that have not sent their HELLO.  What is special to a transport (how it listens, what a
HELLO is, what happens on an established link) is in a subclass: `shm_link`, `verbs_link`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kdirect.errors import TransportError

Pair = TypeVar("Pair")  # a queue pair that waits for its peer
Link = TypeVar("Link")  # what the service keeps of an established link


@dataclass(slots=True)
class Pending:
    """A connection that has not sent its whole HELLO."""

    sock: socket.socket
    deadline: float  # time.monotonic() at which it is dropped
    data: bytearray = field(default_factory=bytearray)


class LinkService(Generic[Pair, Link]):
    """One daemon thread for each device.

    Life: made with the device; `start` starts the thread at the first address or connection;
    `stop`, called by the device's close, ends it.  Threads: the methods above the line "service
    thread" may be called from any thread, the others run on the service's own.

    `_lock` guards the tables that several threads use (`_expected`, `_links`), the thread and
    `kick_fd`.  A subclass provides `_open_listener`, `_admit`, `_hello`, `_link_event` and
    `_end_link`, and may extend `_kicked` and `_abandon_links`.
    """

    def __init__(self, transport: str, log: logging.Logger, handshake_timeout_s: float) -> None:
        self.transport = transport
        self.log = log
        self.kick_fd = -1
        self._handshake_timeout_s = handshake_timeout_s
        self._lock = threading.Lock()
        self._expected: dict[bytes, Pair] = {}
        self._links: dict[int, Link] = {}
        self._pending: dict[int, Pending] = {}
        self._events: dict[int, Callable[[], None]] = {}  # other descriptors, and what they mean
        self._thread: threading.Thread | None = None
        self._listener: socket.socket | None = None
        self._epoll: select.epoll | None = None
        self._stopping = False

    # -- for a transport ---------------------------------------------------------------------------
    def _open_listener(self) -> socket.socket:
        """A listening, non-blocking socket; TransportError when there can be none."""
        raise NotImplementedError

    def _admit(self, sock: socket.socket) -> bool:
        """Whether a peer that has just connected may send a HELLO.  It has been told if not."""
        raise NotImplementedError

    def _hello(self, fd: int) -> None:
        """`_pending[fd]` is readable: take what it says, and make it a link once it is complete."""
        raise NotImplementedError

    def _link_event(self, fd: int, events: int) -> None:
        """Something happened on `_links[fd]`."""
        raise NotImplementedError

    def _end_link(self, link: Link) -> None:
        """`link` is over and no longer watched: close it, and tell its queue pair."""
        raise NotImplementedError

    def _kicked(self) -> None:
        """Somebody called `kick` since the last round."""

    def _abandon_links(self, links: Iterable[Link]) -> None:
        """In a forked child: close the child's copies of the links' sockets, if the service owns
        them."""

    # -- any thread --------------------------------------------------------------------------------
    def start(self, *, listen: bool = True) -> None:
        """Start the thread if it does not run; with `listen` accept peers from now on.

        Raises TransportError when the listener or the descriptors cannot be opened.
        """
        with self._lock:
            if self._stopping:
                return
            try:
                if self._epoll is None:
                    self._epoll = self._open_epoll()
                if listen and self._listener is None:
                    self._listener = self._open_listener()
                    self._epoll.register(self._listener.fileno(), select.EPOLLIN)
            except BaseException as e:
                self._close_descriptors()
                if not isinstance(e, OSError):
                    raise
                raise TransportError(
                    f"cannot open the service of the {self.transport} transport: {e.strerror}",
                    hint="check the limit of open files (ulimit -n)",
                ) from e
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name=f"kdirect-{self.transport}", daemon=True
                )
                self._thread.start()

    def _open_epoll(self) -> select.epoll:
        self.kick_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        epoll = select.epoll()
        for fd in (self.kick_fd, *self._events):
            epoll.register(fd, select.EPOLLIN)
        return epoll

    def _close_descriptors(self) -> None:
        """`start` failed: leave nothing half open, unless a thread works with it already."""
        if self._thread is not None:
            return
        if self._listener is not None:
            self._listener.close()
        if self._epoll is not None:
            self._epoll.close()
        if self.kick_fd >= 0:
            os.close(self.kick_fd)
        self._listener = self._epoll = None
        self.kick_fd = -1

    def expect(self, token: bytes, qp: Pair) -> None:
        """A peer that names `token` is for `qp`; once."""
        with self._lock:
            self._expected[token] = qp

    def forget(self, token: bytes) -> None:
        """No peer may name `token` any more."""
        with self._lock:
            self._expected.pop(token, None)

    def watch(self, fd: int, link: Link) -> None:
        """Take over an established link, whose socket has descriptor `fd`, from the active side.

        Raises TransportError when the device was closed meanwhile; the caller keeps the socket.
        """
        with self._lock:
            if self._epoll is None:
                raise TransportError(
                    f"the {self.transport} device was closed while connecting", hint="open it again"
                )
            self._links[fd] = link
            self._epoll.register(fd, select.EPOLLIN | select.EPOLLRDHUP)
        self.kick()

    def kick(self) -> None:
        """Let the thread go round once."""
        with self._lock:
            if self.kick_fd >= 0:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_write(self.kick_fd, 1)

    def stop(self) -> None:
        """End the thread and every link; queue pairs must be closed already."""
        with self._lock:
            self._stopping = True
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        self.kick()
        thread.join()
        # The descriptor is closed last, under the lock: otherwise somebody could kick a descriptor
        # that means something else by then.
        with self._lock:
            if self.kick_fd >= 0:
                os.close(self.kick_fd)
                self.kick_fd = -1

    def abandon(self) -> None:
        """In a forked child, where the thread does not exist: close the child's copies of the
        descriptors, so that peers see the end when the parent leaves."""
        self._lock = threading.Lock()
        if self._epoll is not None:
            self._epoll.close()
        if self._listener is not None:
            self._listener.close()
        for pending in self._pending.values():
            pending.sock.close()
        self._abandon_links(self._links.values())
        if self.kick_fd >= 0:
            os.close(self.kick_fd)
        self._epoll = self._listener = self._thread = None
        self.kick_fd = -1
        self._stopping = True
        self._expected.clear()
        self._links.clear()
        self._pending.clear()

    # -- service thread ----------------------------------------------------------------------------
    def _run(self) -> None:
        assert self._epoll is not None
        kick_fd = self.kick_fd
        while True:
            kicked = False
            for fd, events in self._epoll.poll(1.0 if self._pending else -1):
                if fd == kick_fd:
                    os.eventfd_read(kick_fd)
                    kicked = True
                    continue
                try:
                    self._dispatch(fd, events)
                except Exception:  # one peer's trouble must not end the service of the others
                    self.log.exception("%s link on descriptor %d failed", self.transport, fd)
                    try:
                        self._drop(fd)
                    except Exception:
                        self.log.exception("descriptor %d could not be closed either", fd)
            if self._stopping:
                break
            if kicked:
                self._kicked()
            self._drop_late_peers()
        self._close_all()

    def _dispatch(self, fd: int, events: int) -> None:
        if fd in self._events:
            self._events[fd]()
        elif self._listener is not None and fd == self._listener.fileno():
            self._accept(self._listener)
        elif fd in self._pending:
            self._hello(fd)
        elif fd in self._links:
            self._link_event(fd, events)

    def _accept(self, listener: socket.socket) -> None:
        assert self._epoll is not None
        while True:
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as e:
                self.log.error(
                    "cannot accept a peer over %s: %s; check the limit of open files (ulimit -n)",
                    self.transport,
                    e.strerror,
                )
                time.sleep(0.1)
                return
            sock.setblocking(False)
            if not self._admit(sock):
                sock.close()
                continue
            deadline = time.monotonic() + self._handshake_timeout_s
            self._pending[sock.fileno()] = Pending(sock, deadline)
            self._epoll.register(sock.fileno(), select.EPOLLIN | select.EPOLLRDHUP)

    def _claim(self, target: bytes, expects_peer: Callable[[Pair], bool]) -> Pair | str:
        """The queue pair that waits for `target` and for this peer; otherwise why there is none, as
        the peer is told.  A token can be claimed once."""
        with self._lock:
            qp = self._expected.get(target)
            if qp is None:
                return (
                    "no queue pair expects this token (it was used, or its queue pair was closed)"
                )
            if not expects_peer(qp):
                return "the queue pair expects another peer"
            del self._expected[target]
            return qp

    def _establish(self, fd: int, link: Link) -> None:
        """A peer's greeting is complete: what was pending is a link now."""
        del self._pending[fd]
        with self._lock:
            self._links[fd] = link

    def _drop(self, fd: int) -> None:
        """End whatever `fd` is."""
        if fd in self._pending:
            self._unwatch(fd)
            self._pending.pop(fd).sock.close()
        elif fd in self._links:
            self._finish(fd)

    def _finish(self, fd: int) -> None:
        with self._lock:
            link = self._links.pop(fd)
        self._unwatch(fd)
        self._end_link(link)

    def _unwatch(self, fd: int) -> None:
        if self._epoll is not None:
            with contextlib.suppress(OSError):
                self._epoll.unregister(fd)

    def _drop_late_peers(self) -> None:
        now = time.monotonic()
        for fd, pending in list(self._pending.items()):
            if now > pending.deadline:
                self._drop(fd)

    def _close_all(self) -> None:
        for fd in [*self._links, *self._pending]:
            self._drop(fd)
        with self._lock:
            assert self._epoll is not None
            self._epoll.close()
            if self._listener is not None:
                self._listener.close()
            self._epoll = self._listener = None
            self._expected.clear()
