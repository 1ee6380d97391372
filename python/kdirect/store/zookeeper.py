"""The metadata store of a cluster: a ZooKeeper ensemble, through kazoo.  The one file that imports
it.

Owns: one kazoo client, and so one ZooKeeper session and the three threads that kazoo starts for
it; and one thread that hands out answers and events, one at a time and in their order.
A ZooKeeper session that expired is the end of this store, although kazoo would begin another: its
ephemeral nodes are gone, and what depends on them must begin again, too.

Three things that kazoo leaves open:

- After a lost connection kazoo may come back to a server that lags.  A `sync` comes before the
  second and later ``CONNECTED``: then whatever this session asked for is in what it reads, or will
  never happen.
- kazoo keeps requests that are made while it has no connection, and sends them once it has one.
  They are answered `Unknown` at once here, and never sent.
- Watches: kazoo tells every watcher of a suspension by an event without a path.  Those are dropped;
  the contract says that watches do not survive.

kazoo does not survive a fork: a store belongs to the process that made it.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
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
    Replace,
    SessionState,
    Unknown,
    check_operations,
    check_path,
    too_large,
)

try:
    from kazoo import exceptions as zk
    from kazoo.client import KazooClient
    from kazoo.protocol.states import KazooState, WatchedEvent
except ImportError as e:
    raise ConfigError(
        "zookeeper.connect needs the package kazoo, which is not installed",
        hint="pip install 'kdirect[cluster]'",
    ) from e

log = logging.getLogger("kdirect.store")

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


class ZookeeperStore(MetadataStore):
    """One session with the ensemble at `servers` (``zookeeper.connect``: ``host:port,...``, with an
    optional chroot behind it, which must exist).

    `session_timeout_ms`: how long the ensemble keeps the session of a process that is silent; it
    may grant another (`granted_timeout_ms`).
    """

    def __init__(self, servers: str, *, session_timeout_ms: int) -> None:
        # Connecting is tried again for as long as the store is open, soon and evenly: a broker
        # that has lost its ensemble has nothing better to do, and its session is running out.
        retry = {"max_tries": -1, "delay": 0.05, "backoff": 2, "max_delay": 0.5}
        self._client = KazooClient(
            hosts=servers,
            timeout=session_timeout_ms / 1000,
            connection_retry=retry,
            logger=logging.getLogger("kdirect.store.kazoo"),
        )
        self._on_event: Callable[[Event], None] = lambda event: None
        self._mailbox: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # for the state and its number; nothing is called under it
        self._state: SessionState | None = None
        self._connections = 0  # that were made, and lost again but for the last

    @property
    def granted_timeout_ms(self) -> int:
        """The session timeout that the ensemble granted; the one asked for before that."""
        return int(self._client._session_timeout)

    # -- life --------------------------------------------------------------------------------------

    def start(self, on_event: Callable[[Event], None]) -> None:
        self._on_event = on_event
        self._thread = threading.Thread(target=self._deliver, name="kdirect-store", daemon=True)
        self._thread.start()
        self._client.add_listener(self._on_kazoo_state)
        self._client.start_async()

    def close(self) -> None:
        if self._enter(SessionState.CLOSED):
            self._end_client()
            self._mailbox.put(lambda: self._on_event(SessionState.CLOSED))
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
        """End kazoo's session and threads; what it was asked for is answered before it returns."""
        self._client.remove_listener(self._on_kazoo_state)
        self._client.stop()
        self._client.close()

    def _enter(self, state: SessionState) -> bool:
        """Take a state that is new and possible."""
        with self._lock:
            if self._state is state or self._state in (SessionState.EXPIRED, SessionState.CLOSED):
                return False
            self._state = state
            return True

    def _on_kazoo_state(self, state: str) -> None:
        """On the thread of kazoo's connection, which must not wait."""
        if state == KazooState.CONNECTED:
            with self._lock:
                self._connections += 1
                number = self._connections
            if number == 1:
                self._tell(SessionState.CONNECTED)
            else:
                self._client.sync_async("/").rawlink(lambda result: self._synced(number, result))
        elif state == KazooState.SUSPENDED:
            self._tell(SessionState.SUSPENDED)
        elif self._enter(SessionState.EXPIRED):
            self._mailbox.put(self._end_client)
            self._mailbox.put(lambda: self._on_event(SessionState.EXPIRED))

    def _synced(self, number: int, result: Any) -> None:
        """The server has caught up; unless another connection came meanwhile, we are back."""
        if result.exception is None and number == self._connections:
            self._tell(SessionState.CONNECTED)

    def _tell(self, state: SessionState) -> None:
        if self._enter(state):
            self._mailbox.put(lambda: self._on_event(state))

    def _watcher(self, event: WatchedEvent) -> None:
        if event.path is not None:  # without: kazoo tells that the connection was lost
            self._mailbox.put(lambda: self._on_event(Changed(event.path)))

    # -- requests ----------------------------------------------------------------------------------

    def read(
        self, paths: Sequence[str], done: Callable[[ReadAnswer], None], *, watch: bool = False
    ) -> None:
        wanted = [check_path(path) for path in paths]
        session = self._client.client_id[0] if self._client.client_id is not None else -1

        def node(result: Any) -> Node:
            value, stat = result
            owned = stat.ephemeralOwner not in (0, -1) and stat.ephemeralOwner == session
            return Node(value or b"", stat.version, stat.czxid, owned)

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
        refused = too_large(checked)
        if refused is not None:
            self._mailbox.put(lambda: done(refused))
            return
        if self._refuses(done):
            return
        transaction = self._client.transaction()
        for operation in checked:
            if isinstance(operation, Create):
                transaction.create(operation.path, operation.value, ephemeral=operation.ephemeral)
            elif isinstance(operation, Replace):
                transaction.set_data(operation.path, operation.value, operation.version)
            elif isinstance(operation, Delete):
                transaction.delete(operation.path, operation.version)
            else:
                transaction.check(operation.path, operation.version)
        result = transaction.commit_async()
        result.rawlink(lambda _: self._mailbox.put(lambda: done(_committed(checked, result))))

    def _refuses(self, done: Callable[[Any], None]) -> bool:
        """Answer at once if nothing can be asked now."""
        state = self._state
        if state is SessionState.CONNECTED:
            return False
        ended = state in (SessionState.EXPIRED, SessionState.CLOSED)
        self._mailbox.put(lambda: done(Unknown(ended=ended)))
        return True

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
        if not paths:
            self._mailbox.put(lambda: done(answer(())))
            return
        if self._refuses(done):
            return
        results = []
        for path in paths:
            if watch:  # also where there is no node yet
                self._client.exists_async(path, watch=self._watcher)
            results.append(ask(path))

        def gathered(_: Any) -> None:
            # Answers come in the order of requests: with the last, all are there.
            self._mailbox.put(lambda: done(_read(results, value_of, answer)))

        results[-1].rawlink(gathered)


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
