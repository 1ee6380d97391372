"""What a metadata store promises, whichever it is.

A store is a tree of nodes.  A node has a path (``/brokers/ids/1``), a value (bytes) and a version:
the number of times that its value was replaced, 0 at first.  A node may have children.  An
*ephemeral* node belongs to the session that created it, has no children, and goes when that session
ends.  The store gives each change a number that only grows; a node keeps the number of the change
that created it (`Node.created`), so a node that was deleted and created again can be told from the
first.

What a store promises:

- **Atomic commits.**  All operations of a `commit` happen, or none.  Each may be conditional on a
  version.  Who lost is told which operation failed and why (`Conflict`).
- **Order.**  Requests of one store object take effect in the order in which they were made, and
  their answers come in that order.
- **Sequential views.**  A store object never sees a value and, later, an older one.  It may see
  changes of others late; what it has committed itself, it sees.
- **Honest outcomes.**  A request whose answer was lost with the connection is answered `Unknown`:
  it may have happened, and it may happen yet, until the next ``CONNECTED`` (the bytes of a request
  can wait in a server that has stopped for a while) or, if there is none, until the servers end the
  session.  After ``CONNECTED`` it has happened, and reads show it, or never will: read back and
  compare then.
- **Sessions.**  `SessionState.CONNECTED`, then any number of ``SUSPENDED`` and ``CONNECTED``, then
  ``EXPIRED`` or ``CLOSED``, which is the last.  While a session is suspended others may already see
  it expired, ephemeral nodes gone.  A new session is a new store object.  Where the servers will
  never do (no such chroot), `Refused` and ``CLOSED`` come in place of the first ``CONNECTED``.
- **Watches.**  A read that asks for it is followed by one `Changed` of its path after the node (or,
  for `children`, the set of its children) changes, came to be or went.  `Changed` is a hint: it
  carries no value, one may stand for several changes, one may come without any.  It comes before
  the answer to any read that shows the change.  **Watches do not survive a suspension**: after each
  ``CONNECTED`` but the first, whoever watches reads again.

Answers and events come on a thread of the store (in a simulation, in its loop), one at a time.  The
function that is called must not wait; it hands on what it was given.  It may call the store, and
`close` it.  Once `close` was called, a request may be answered by the thread that makes it.  No
call of a store raises because of what the store answers; ValueError says that the caller made a
mistake, such as a bad path.
"""

from __future__ import annotations

import enum
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from kdirect.errors import ConfigError, KdirectError

ANY_VERSION = -1
# Of paths and values, and what an operation takes besides: ZooKeeper's jute.maxbuffer is 1,048,575,
# and a server answers a larger request by cutting the connection.  Its largest operation, a create,
# has a header of 9 bytes, three lengths, an access list of 31 bytes and flags.
MOST_COMMIT_BYTES = 1_000_000
OPERATION_BYTES = 64
_PATH = re.compile(r"(/[^/\x00-\x1f\x7f]+)+")


class Node(NamedTuple):
    """A node as it was read.  `created`: number of the change that created it; `owned`: it is
    ephemeral, and this store's session created it."""

    value: bytes
    version: int
    created: int
    owned: bool = False


# -- operations ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Create:
    """Create a node, whose parent exists; with `ephemeral`, for the life of this session."""

    path: str
    value: bytes = b""
    ephemeral: bool = False


@dataclass(frozen=True, slots=True)
class Replace:
    """Replace the value of a node whose version is `version`."""

    path: str
    value: bytes
    version: int = ANY_VERSION


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete a node without children whose version is `version`."""

    path: str
    version: int = ANY_VERSION


@dataclass(frozen=True, slots=True)
class Check:
    """Do nothing, if the node exists with this version."""

    path: str
    version: int = ANY_VERSION


Operation: TypeAlias = Create | Replace | Delete | Check


# -- answers ---------------------------------------------------------------------------------------


class Reason(enum.Enum):
    """Why an operation could not be carried out."""

    EXISTS = "the node exists already"
    MISSING = "the node, or its parent, does not exist"
    VERSION = "the node has another version"
    NOT_EMPTY = "the node has children"
    EPHEMERAL_PARENT = "the parent is ephemeral"
    REFUSED = "the store refuses it"  # read-only, no permission, too large


@dataclass(frozen=True, slots=True)
class Committed:
    """All operations happened.  `versions`: of each operation's node after it; -1 of a deleted
    one, and of a `Check` the version that it named."""

    versions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Conflict:
    """None of the operations happened, because of the one at `index`.  `detail`: what the store
    said, for people."""

    index: int
    reason: Reason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Found:
    """What was read, in the order of the paths; None where there is no node."""

    nodes: tuple[Node | None, ...]


@dataclass(frozen=True, slots=True)
class Children:
    """Names of the children of each path, sorted; None where there is no node."""

    names: tuple[tuple[str, ...] | None, ...]


@dataclass(frozen=True, slots=True)
class Unknown:
    """The connection was lost before the answer came, or the session has ended.  A commit may have
    happened, unless `ended`: requests made after the session's end do not."""

    ended: bool = False


CommitAnswer: TypeAlias = Committed | Conflict | Unknown
ReadAnswer: TypeAlias = Found | Conflict | Unknown
ChildrenAnswer: TypeAlias = Children | Conflict | Unknown


# -- events ----------------------------------------------------------------------------------------


class SessionState(enum.Enum):
    """Where the session is."""

    CONNECTED = "connected"
    SUSPENDED = "suspended"  # no server answers; the session may still live
    EXPIRED = "expired"  # the servers ended it: its ephemeral nodes are gone
    CLOSED = "closed"  # this store was closed


@dataclass(frozen=True, slots=True)
class Changed:
    """A watched node, or its children, may have changed."""

    path: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The servers are there, and a session with them is of no use until a person mends something;
    `error` says what, with the remedy."""

    error: KdirectError


Event: TypeAlias = SessionState | Changed | Refused


class MetadataStore(ABC):
    """One session with a store.  See the module for what it promises."""

    @abstractmethod
    def start(self, on_event: Callable[[Event], None]) -> None:
        """Begin the session; ``CONNECTED`` is the first event once it is there.  Called once,
        before anything is asked: else ValueError."""

    @abstractmethod
    def read(
        self,
        paths: Sequence[str],
        done: Callable[[ReadAnswer], None],
        *,
        watch: bool = False,
    ) -> None:
        """Read nodes; each by itself, not all at one moment.  `watch`: tell when any changes,
        comes to be or goes."""

    @abstractmethod
    def children(
        self,
        paths: Sequence[str],
        done: Callable[[ChildrenAnswer], None],
        *,
        watch: bool = False,
    ) -> None:
        """Name the children of nodes.  `watch`: tell when a child comes or goes."""

    @abstractmethod
    def commit(self, operations: Sequence[Operation], done: Callable[[CommitAnswer], None]) -> None:
        """Carry out all operations, or none."""

    @abstractmethod
    def close(self) -> None:
        """End the session; its ephemeral nodes go at once, unless no server answers.  Requests that
        wait are answered `Unknown`; the last event is ``CLOSED``.  Again: does nothing.  After
        ``EXPIRED``: frees what the store holds."""


def check_path(path: str) -> str:
    """The path; ValueError if it cannot be one."""
    if _PATH.fullmatch(path) is None or any(part in (".", "..") for part in path.split("/")):
        raise ValueError(f"{path!r} is no path of a node")
    return path


def check_operations(operations: Sequence[Operation]) -> tuple[Operation, ...]:
    """The operations; ValueError if they cannot be committed together."""
    if not operations:
        raise ValueError("a commit without operations")
    for operation in operations:
        check_path(operation.path)
    return tuple(operations)


def check_process(owner: int) -> None:
    """ConfigError in a process that did not make the store: what the store holds (connections,
    threads, what its files say) is that of the other."""
    if owner != os.getpid():
        raise ConfigError(
            f"this store belongs to process {owner}, and this is process {os.getpid()}",
            hint="open a store after the fork, in the process that uses it",
        )


def parent_of(path: str) -> str:
    """``/a/b`` lies below ``/a``, and ``/a`` below the root, which is the empty text here."""
    return path.rpartition("/")[0]


def too_large(operations: Sequence[Operation], root_bytes: int = 0) -> Conflict | None:
    """Why a commit is too large, if it is; the largest operation is named.  `root_bytes`: of what
    the store puts before each path."""
    sizes = [
        OPERATION_BYTES
        + root_bytes
        + len(operation.path.encode())
        + (len(operation.value) if isinstance(operation, Create | Replace) else 0)
        for operation in operations
    ]
    if sum(sizes) <= MOST_COMMIT_BYTES:
        return None
    index = sizes.index(max(sizes))
    path = operations[index].path
    detail = f"{sum(sizes)} bytes in one commit, {sizes[index]} of them for {path}"
    return Conflict(index, Reason.REFUSED, detail)
