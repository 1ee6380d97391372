"""The metadata store of a cluster: a ZooKeeper ensemble, through kazoo.  The one file that imports
it.

Owns: one kazoo client, and so one ZooKeeper session, one socket and the thread that kazoo starts
for it; and one thread that hands out answers and events, one at a time and in their order.
A ZooKeeper session that expired is the end of this store, although kazoo would begin another: its
ephemeral nodes are gone, and what depends on them must begin again, too.

What kazoo leaves open, and what is done about it here:

- After a lost connection kazoo may come back to a server that lags.  A `sync` comes before the
  second and later ``CONNECTED``: then whatever this session asked for is in what it reads, or will
  never happen.  (ZooKeeper closes a session's old connection, or refuses its requests as those of a
  session that has moved, before it takes the new one.)
- kazoo keeps requests that are made while it has no connection, and sends them once it has one.
  They are answered `Unknown` at once here, and never sent.  Neither is one sent in the session that
  kazoo begins after one that expired: a lock is held from the look at the state until kazoo has the
  request, and kazoo tells of a state in between.
- Requests count as signs of life that were *sent*, so a client that asks often never notices that
  its server has stopped.  `_Handler.select` drops a connection on which nothing was heard for two
  thirds of the session's timeout, which is when kazoo drops one that is idle.
- An attempt to connect lasts for the whole of the session's timeout: a server whose host is gone,
  or one that is starting (ZooKeeper may take a connection then and never answer on it), would use
  up the session.  `_Handler` gives an attempt, and the server's first answer, a sixth of it each.
- Whoever asks may wait for the thread of the connection.  `_Waker` never waits.
- Answers and watches come from two threads, and so out of order.  `_Handler` has neither; both come
  from the thread of the connection, and wait for nothing.
- A chroot that does not exist makes each node "missing".  It is looked for before the first
  ``CONNECTED``, and `Refused` says so.
- Watches: kazoo tells every watcher of a suspension by an event without a path.  Those are dropped;
  the contract says that watches do not survive.

A store belongs to the process that made it: in a child of it every request is a `ConfigError`, and
`close` does nothing, for the session is the parent's.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kdirect.errors import ConfigError
from kdirect.store.contract import (
    Changed,
    Children,
    ChildrenAnswer,
    CommitAnswer,
    Committed,
    Conflict,
    Create,
    Delete,
    Event,
    Found,
    MetadataStore,
    Node,
    Operation,
    ReadAnswer,
    Reason,
    Refused,
    Replace,
    SessionState,
    Unknown,
    check_operations,
    check_path,
    check_process,
    too_large,
)

try:
    from kazoo import exceptions as zk
    from kazoo.client import KazooClient
    from kazoo.handlers.threading import SequentialThreadingHandler
    from kazoo.protocol.states import Callback, KazooState, KeeperState, WatchedEvent
except ImportError as e:
    raise ConfigError(
        "zookeeper.connect needs the package kazoo, which is not installed",
        hint="pip install 'kdirect[cluster]'",
    ) from e

log = logging.getLogger("kdirect.store")
# kazoo warns of every attempt to connect, twice a second while the ensemble is away.
_kazoo_log = logging.getLogger("kdirect.store.kazoo")
if _kazoo_log.level == logging.NOTSET:
    _kazoo_log.setLevel(logging.ERROR)

LEAST_ATTEMPT_S = 0.5  # to connect to a server, whatever the session's timeout
CLOSE_S = 1.0  # how long `close` waits for the servers, and again for kazoo's thread

_REASONS = {
    zk.NodeExistsError: Reason.EXISTS,
    zk.NoNodeError: Reason.MISSING,
    zk.BadVersionError: Reason.VERSION,
    zk.NotEmptyError: Reason.NOT_EMPTY,
    zk.NoChildrenForEphemeralsError: Reason.EPHEMERAL_PARENT,
}
# The answer did not come, or the session is not there to ask for anything.
_LOST = (
    zk.ConnectionLoss,
    zk.ConnectionClosedError,
    zk.SessionExpiredError,
    zk.OperationTimeoutError,
    zk.CancelledError,
)
_ENDED = (SessionState.EXPIRED, SessionState.CLOSED)


class _Waker:
    """Both ends of what wakes kazoo's connection: a count of requests, as an eventfd.

    kazoo's own is a pair of sockets with a byte for each request, whose buffer is full after some
    278: who asks then waits for the thread of the connection, which may wait for our lock.
    """

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._fd

    def send(self, data: bytes) -> None:
        os.eventfd_write(self._fd, len(data))

    def recv(self, size: int) -> None:
        os.eventfd_read(self._fd)

    def close(self) -> None:
        """Again: does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class _Handler(SequentialThreadingHandler):
    """kazoo's sockets, and calls on the thread of its connection; see the module for why.

    `silence_s`: how long nothing may be heard on a connection.  `attempt_s`: the same while it is
    made.  All calls but `hang_up` are made by the thread of the connection.
    """

    def __init__(self, session_timeout_s: float) -> None:
        super().__init__()
        self.silence_s = session_timeout_s * 2 / 3
        self._attempt_s = max(session_timeout_s / 6, LEAST_ATTEMPT_S)
        self._socket: Any = None
        self._greeted = False
        self._heard = 0.0
        self._hung_up = False

    def start(self) -> None:
        """No threads: as `running` stays false, kazoo calls back at once."""

    def stop(self) -> None:
        """See `start`."""

    def dispatch_callback(self, callback: Callback) -> None:
        callback.func(*callback.args)

    def create_socket_pair(self) -> tuple[_Waker, _Waker]:
        waker = _Waker()
        return waker, waker

    def create_connection(self, *args: Any, **kwargs: Any) -> Any:
        kwargs["timeout"] = self._attempt_s
        made = super().create_connection(*args, **kwargs)
        self._socket, self._greeted, self._heard = made, False, time.monotonic()
        if self._hung_up:
            made.close()
            raise ConnectionAbortedError("the store was closed")
        return made

    def select(self, reads: Any, writes: Any, others: Any, timeout: float | None = None) -> Any:
        if not self._greeted:
            timeout = self._attempt_s if timeout is None else min(timeout, self._attempt_s)
        ready = super().select(reads, writes, others, timeout)
        now = time.monotonic()
        if self._socket in ready[0]:
            self._greeted, self._heard = True, now
        elif now - self._heard > self.silence_s:
            raise TimeoutError(f"nothing was heard for {now - self._heard:.1f} s")
        return ready

    def hang_up(self) -> None:
        """Drop the connection, and make no other.  Any thread."""
        self._hung_up = True
        if self._socket is not None:
            try:
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it is down already


class _Asked:
    """A request that waits for its answer, which is made when it is handed out."""

    __slots__ = ("answer", "done")

    def __init__(self, done: Callable[[Any], None]) -> None:
        self.done = done
        self.answer: Callable[[], Any] | None = None

    def hand_out(self) -> None:
        assert self.answer is not None
        self.done(self.answer())


class ZookeeperStore(MetadataStore):
    """One session with the ensemble at `servers` (``zookeeper.connect``: ``host:port,...``, with an
    optional chroot after the last, which must exist); ConfigError for what is no such list.

    `session_timeout_ms`: how long the ensemble keeps the session of a process that is silent; it
    may grant another (`granted_timeout_ms`).

    Any thread may call.  Kept by `_lock`: the state, what is asked, and the order of the mailbox.
    It is reentrant, because kazoo calls back at once for a request that fails at once.
    """

    def __init__(self, servers: str, *, session_timeout_ms: int) -> None:
        self._servers = servers
        self._granted_ms = session_timeout_ms
        self._handler = _Handler(session_timeout_ms / 1000)
        # Connecting is tried again for as long as the store is open, soon and evenly: a broker
        # that has lost its ensemble has nothing better to do, and its session is running out.
        retry = {"max_tries": -1, "delay": 0.05, "backoff": 2, "max_delay": 0.5}
        try:
            self._client = KazooClient(
                hosts=_check_servers(servers),
                timeout=session_timeout_ms / 1000,
                connection_retry=retry,
                handler=self._handler,
                logger=_kazoo_log,
            )
        except ValueError as e:
            raise ConfigError(
                f"option zookeeper.connect: {servers!r} names no servers: {e}",
                hint="write host:port,host:port, and a chroot as /path after the last",
            ) from e
        self._note_granted_timeout()
        self._pid = os.getpid()
        self._on_event: Callable[[Event], None] = lambda event: None
        self._mailbox: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.RLock()
        self._state: SessionState | None = None
        self._closing = False  # `close` was called
        self._asked: deque[_Asked] = deque()
        self._changes = 0  # of kazoo's state; an answer to what was asked in one counts in that one
        self._session = -1

    @property
    def granted_timeout_ms(self) -> int:
        """The session timeout that the ensemble granted; the one asked for before that."""
        return self._granted_ms

    def _note_granted_timeout(self) -> None:
        """kazoo keeps what was granted in local variables; `_connect` returns two thirds of it."""
        connection = self._client._connection
        connect = connection._connect

        def connect_and_note(*where: Any) -> tuple[float, float]:
            read_timeout_ms, connect_timeout_ms = connect(*where)
            self._granted_ms = round(read_timeout_ms * 3 / 2)
            self._handler.silence_s = read_timeout_ms / 1000
            return read_timeout_ms, connect_timeout_ms

        connection._connect = connect_and_note

    # -- life --------------------------------------------------------------------------------------

    def start(self, on_event: Callable[[Event], None]) -> None:
        check_process(self._pid)
        with self._lock:
            if self._thread is not None or self._closing:
                raise ValueError("a store is started once, and not after it was closed")
            self._on_event = on_event
            self._thread = threading.Thread(target=self._deliver, name="kdirect-store", daemon=True)
            self._thread.start()
        self._client.add_listener(self._on_kazoo_state)
        self._client.start_async()

    def close(self) -> None:
        if self._pid != os.getpid():
            return
        with self._lock:
            first, self._closing = not self._closing, True
            ends = self._end(SessionState.CLOSED)
        if first:
            if ends:
                self._end_client()
                self._mailbox.put(partial(self._on_event, SessionState.CLOSED))
            self._mailbox.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _deliver(self) -> None:
        while (call := self._mailbox.get()) is not None:
            try:
                call()
            except Exception:
                log.exception("what an answer or event of the metadata store led to has failed")

    def _end_client(self) -> None:
        """End kazoo's session and thread.  Servers that do not answer are not waited for: the
        session then ends by its timeout."""
        self._client.remove_listener(self._on_kazoo_state)
        ending = threading.Thread(target=self._stop_client, name="kdirect-store-end", daemon=True)
        ending.start()
        ending.join(CLOSE_S)
        if ending.is_alive():
            self._handler.hang_up()
            ending.join(CLOSE_S)  # a connection that is being made is left to its time limit

    def _stop_client(self) -> None:
        try:
            self._client.stop()
            self._client.close()
        except Exception as e:
            log.warning("the session with ZooKeeper at %s did not end: %s", self._servers, e)

    # -- states ------------------------------------------------------------------------------------

    def _enter(self, state: SessionState) -> None:
        """Take a state and tell it, if it is new and possible.  Under the lock."""
        if self._state is state or self._state in _ENDED:
            return
        if state is SessionState.CONNECTED:
            self._state = state
        else:
            self._end(state)
        self._mailbox.put(partial(self._on_event, state))

    def _end(self, state: SessionState) -> bool:
        """Take a state in which nothing is answered; False if the session has ended already."""
        if self._state in _ENDED:
            return False
        self._state = state
        for asked in self._asked:
            if asked.answer is None:
                asked.answer = Unknown
            self._mailbox.put(asked.hand_out)
        self._asked.clear()
        return True

    def _on_kazoo_state(self, state: str) -> None:
        """On the thread of kazoo's connection, which must not wait."""
        with self._lock:
            self._changes += 1
            if state == KazooState.CONNECTED:
                self._session = self._client.client_id[0]
                ask = self._client.exists_async if self._state is None else self._client.sync_async
                ask("/").rawlink(partial(self._back, self._changes))
            elif state == KazooState.SUSPENDED:
                if self._state is SessionState.CONNECTED:
                    log.warning("no ZooKeeper server answers at %s: trying again", self._servers)
                    self._enter(SessionState.SUSPENDED)
            elif self._client.client_state == KeeperState.AUTH_FAILED:
                self._refuse("refuses to authenticate this broker", "check the servers' log")
            else:
                log.warning("the session with ZooKeeper at %s has expired", self._servers)
                self._enter(SessionState.EXPIRED)
                self._mailbox.put(self._end_client)

    def _back(self, change: int, result: Any) -> None:
        """A server has answered after a connection was made; unless that was lost meanwhile, the
        session is there."""
        with self._lock:
            if change != self._changes or self._state in _ENDED:
                return
            if result.exception is not None:
                if self._state is None and not isinstance(result.exception, _LOST):
                    self._refuse(
                        f"does not let this broker in: {_said(result.exception)}",
                        "let it use ZooKeeper without authentication, below its chroot",
                    )
                return
            if self._state is None and result.value is None:
                root = self._client.chroot
                self._refuse(
                    f"has no node {root}, below which zookeeper.connect places the cluster",
                    f"correct the path, or create it: zkCli.sh create {root}",
                )
                return
            if self._state is SessionState.SUSPENDED:
                log.info("ZooKeeper at %s answers again", self._servers)
            self._enter(SessionState.CONNECTED)

    def _refuse(self, what: str, hint: str) -> None:
        """The servers are there, and this store can never use them.  Under the lock."""
        if self._end(SessionState.CLOSED):
            error = ConfigError(f"ZooKeeper at {self._servers} {what}", hint=hint)
            self._mailbox.put(partial(self._on_event, Refused(error)))
            self._mailbox.put(self._end_client)
            self._mailbox.put(partial(self._on_event, SessionState.CLOSED))

    def _watcher(self, event: WatchedEvent) -> None:
        if event.path is not None:  # without: kazoo tells that the connection was lost
            with self._lock:
                if self._state not in _ENDED:
                    self._mailbox.put(partial(self._on_event, Changed(event.path)))

    # -- requests ----------------------------------------------------------------------------------

    def read(
        self, paths: Sequence[str], done: Callable[[ReadAnswer], None], *, watch: bool = False
    ) -> None:
        wanted = [check_path(path) for path in paths]

        def node(result: Any) -> Node:
            value, stat = result
            return Node(
                value or b"", stat.version, stat.czxid, stat.ephemeralOwner == self._session
            )

        self._gather(wanted, self._client.get_async, node, Found, done, watch=watch)

    def children(
        self, paths: Sequence[str], done: Callable[[ChildrenAnswer], None], *, watch: bool = False
    ) -> None:
        wanted = [check_path(path) for path in paths]

        def ask(path: str) -> Any:
            return self._client.get_children_async(path, watch=self._watcher if watch else None)

        self._gather(wanted, ask, lambda names: tuple(sorted(names)), Children, done, watch=watch)

    def commit(self, operations: Sequence[Operation], done: Callable[[CommitAnswer], None]) -> None:
        checked = check_operations(operations)
        refused = too_large(checked, len(self._client.chroot.encode()))
        with self._lock:
            asked = self._admit(done)
            if asked is None:
                return
            if refused is not None:
                self._settle(asked, lambda: refused)
                return
            transaction = self._client.transaction()
            for operation in checked:
                _add(transaction, operation)
            result = transaction.commit_async()
            result.rawlink(lambda _: self._settle(asked, lambda: _committed(checked, result)))

    def _gather(
        self,
        paths: list[str],
        ask: Callable[[str], Any],
        value_of: Callable[[Any], Any],
        answer: Callable[[tuple[Any, ...]], Any],
        done: Callable[[Any], None],
        *,
        watch: bool,
    ) -> None:
        """Ask for each path, in one go, and answer once for all."""
        with self._lock:
            asked = self._admit(done)
            if asked is None:
                return
            if not paths:
                self._settle(asked, lambda: answer(()))
                return
            results = []
            for path in paths:
                if watch:  # also where there is no node yet
                    self._client.exists_async(path, watch=self._watcher)
                results.append(ask(path))
            # Answers come in the order of requests: with the last, all are there.
            results[-1].rawlink(
                lambda _: self._settle(asked, lambda: _read(results, value_of, answer))
            )

    def _admit(self, done: Callable[[Any], None]) -> _Asked | None:
        """Take a request, or answer at once if nothing can be asked now.  Under the lock."""
        check_process(self._pid)
        if self._thread is None and not self._closing:
            raise ValueError("the store was not started")
        if self._state is SessionState.CONNECTED:
            asked = _Asked(done)
            self._asked.append(asked)
            return asked
        answer = Unknown(ended=self._state in _ENDED)
        if self._closing:
            done(answer)  # the thread of the store ends, or has ended
        else:
            self._mailbox.put(lambda: done(answer))
        return None

    def _settle(self, asked: _Asked, answer: Callable[[], Any]) -> None:
        """Hand out an answer, after those of earlier requests."""
        with self._lock:
            if asked.answer is not None:
                return  # the connection was lost before
            asked.answer = answer
            while self._asked and self._asked[0].answer is not None:
                self._mailbox.put(self._asked.popleft().hand_out)


def _check_servers(servers: str) -> str:
    """The value of zookeeper.connect; ValueError for what kazoo would misread."""
    names, slash, chroot = servers.partition("/")
    if any(not name.strip() or len(name.split()) != 1 for name in names.split(",")):
        raise ValueError("a server has no name, or one with a space")
    if "," in chroot:
        raise ValueError("a chroot is written once, after the last server")
    if chroot:
        check_path(slash + chroot.rstrip("/"))
    return servers


def _add(transaction: Any, operation: Operation) -> None:
    if isinstance(operation, Create):
        transaction.create(operation.path, operation.value, ephemeral=operation.ephemeral)
    elif isinstance(operation, Replace):
        transaction.set_data(operation.path, operation.value, operation.version)
    elif isinstance(operation, Delete):
        transaction.delete(operation.path, operation.version)
    else:
        transaction.check(operation.path, operation.version)


def _read(
    results: list[Any], value_of: Callable[[Any], Any], answer: Callable[[tuple[Any, ...]], Any]
) -> Any:
    found: list[Any] = []
    for index, result in enumerate(results):
        error = result.exception
        if error is None:
            found.append(value_of(result.value))
        elif isinstance(error, zk.NoNodeError):
            found.append(None)
        elif isinstance(error, _LOST):
            return Unknown()
        else:
            return Conflict(index, Reason.REFUSED, _said(error))
    return answer(tuple(found))


def _committed(operations: Sequence[Operation], result: Any) -> CommitAnswer:
    """What ZooKeeper's answer to a transaction means: one result or error for each operation."""
    error = result.exception
    if error is not None:
        if isinstance(error, _LOST):
            return Unknown()
        return Conflict(0, _REASONS.get(type(error), Reason.REFUSED), _said(error))
    versions: list[int] = []
    for index, (operation, outcome) in enumerate(zip(operations, result.value, strict=True)):
        if isinstance(outcome, zk.RolledBackError | zk.RuntimeInconsistency):
            continue  # another operation is why
        if isinstance(outcome, Exception):
            reason = _REASONS.get(type(outcome), Reason.REFUSED)
            return Conflict(index, reason, f"{operation.path}: {_said(outcome)}")
        if isinstance(operation, Create):
            versions.append(0)
        elif isinstance(operation, Replace):
            versions.append(outcome.version)
        else:
            versions.append(-1 if isinstance(operation, Delete) else operation.version)
    return Committed(tuple(versions))


def _said(error: BaseException) -> str:
    return f"{type(error).__name__} {error}".strip()
