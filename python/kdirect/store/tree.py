"""The tree of a metadata store as a plain value: what `local` and `sim` keep in memory.

Law: pure.  It decides whether operations may be carried out together, carries them out, and says
which watches that concerns.  No clock, no thread, no file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass

from kdirect.store.contract import (
    ANY_VERSION,
    Check,
    Children,
    Committed,
    Conflict,
    Create,
    Delete,
    Found,
    Node,
    Operation,
    Reason,
    parent_of,
    too_large,
)

_NO_CHILDREN: Set[str] = frozenset()  # most nodes have none, and a set of their own is 216 bytes
NOBODY = 0  # the owner of a node that no session's end removes


@dataclass(slots=True)
class _Entry:
    value: bytes
    version: int
    created: int
    owner: int
    children: Set[str] = _NO_CHILDREN

    def add(self, name: str) -> None:
        if not isinstance(self.children, set):
            self.children = set()
        self.children.add(name)

    def discard(self, name: str) -> None:
        if isinstance(self.children, set):
            self.children.discard(name)


@dataclass(frozen=True, slots=True)
class Touched:
    """What a commit changed: paths whose value changed, came to be or went, and paths whose
    children did."""

    values: frozenset[str]
    parents: frozenset[str]


UNTOUCHED = Touched(frozenset(), frozenset())


class Tree:
    """Nodes by path.  The root is the empty path; it always exists and has no value."""

    def __init__(self) -> None:
        self._entries = {"": _Entry(b"", 0, 0, NOBODY)}
        self.changes = 0  # commits that happened

    # -- looking -----------------------------------------------------------------------------------

    def get(self, path: str, session: int = NOBODY) -> Node | None:
        entry = self._entries.get(path)
        if entry is None:
            return None
        owned = entry.owner != NOBODY and entry.owner == session
        return Node(entry.value, entry.version, entry.created, owned)

    def children(self, path: str) -> tuple[str, ...] | None:
        entry = self._entries.get(path)
        return None if entry is None else tuple(sorted(entry.children))

    def owned_by(self, session: int) -> list[str]:
        """Ephemeral nodes of a session."""
        return sorted(path for path, entry in self._entries.items() if entry.owner == session)

    def walk(self) -> Iterator[tuple[str, Node]]:
        """All nodes, parents first."""
        for path in sorted(self._entries):
            node = self.get(path)
            if path and node is not None:
                yield path, node

    # -- changing ----------------------------------------------------------------------------------

    def plant(self, path: str, value: bytes) -> None:
        """Put a node that a store finds when it starts; ValueError without its parent, or twice."""
        refused = self._refuses(Create(path, value))
        if refused is not None:
            raise ValueError(f"{path}: {refused.value}")
        self._carry_out(Create(path, value), NOBODY, [])

    def commit(
        self,
        operations: Sequence[Operation],
        session: int = NOBODY,
        accept: Callable[[Touched], Conflict | None] | None = None,
    ) -> tuple[Committed | Conflict, Touched]:
        """Carry out all operations for a session, or none.  `accept` is asked when all are carried
        out, and may still refuse or raise: then none are."""
        refused = too_large(operations)
        if refused is not None:
            return refused, UNTOUCHED
        undo: list[tuple[str, _Entry | None]] = []
        versions: list[int] = []
        values: set[str] = set()
        parents: set[str] = set()
        for index, operation in enumerate(operations):
            reason = self._refuses(operation)
            if reason is not None:
                self._restore(undo)
                return Conflict(index, reason, operation.path), UNTOUCHED
            if not isinstance(operation, Check):
                values.add(operation.path)
            if isinstance(operation, Create | Delete):
                parents.add(parent_of(operation.path))
            versions.append(self._carry_out(operation, session, undo))
        touched = Touched(frozenset(values), frozenset(parents))
        if accept is not None:
            try:
                refused = accept(touched)
            except BaseException:
                self._restore(undo)
                raise
            if refused is not None:
                self._restore(undo)
                return refused, UNTOUCHED
        self.changes += 1
        return Committed(tuple(versions)), touched

    def _refuses(self, operation: Operation) -> Reason | None:
        entry = self._entries.get(operation.path)
        if isinstance(operation, Create):
            parent = self._entries.get(parent_of(operation.path))
            if parent is None:
                return Reason.MISSING
            if parent.owner != NOBODY:
                return Reason.EPHEMERAL_PARENT
            return Reason.EXISTS if entry is not None else None
        if entry is None:
            return Reason.MISSING
        if operation.version not in (ANY_VERSION, entry.version):
            return Reason.VERSION
        if isinstance(operation, Delete) and entry.children:
            return Reason.NOT_EMPTY
        return None

    def _carry_out(
        self, operation: Operation, session: int, undo: list[tuple[str, _Entry | None]]
    ) -> int:
        path = operation.path
        entry = self._entries.get(path)
        if isinstance(operation, Check):
            return operation.version
        undo.append((path, entry))
        if isinstance(operation, Create):
            owner = session if operation.ephemeral else NOBODY
            self._entries[path] = _Entry(operation.value, 0, self.changes + 1, owner)
            self._entries[parent_of(path)].add(path.rpartition("/")[2])
            return 0
        assert entry is not None
        if isinstance(operation, Delete):
            del self._entries[path]
            self._entries[parent_of(path)].discard(path.rpartition("/")[2])
            return -1
        self._entries[path] = _Entry(
            operation.value, entry.version + 1, entry.created, entry.owner, entry.children
        )
        return entry.version + 1

    def _restore(self, undo: Iterable[tuple[str, _Entry | None]]) -> None:
        for path, entry in reversed(list(undo)):
            name = path.rpartition("/")[2]
            parent = self._entries.get(parent_of(path))
            if entry is None:
                del self._entries[path]
                if parent is not None:
                    parent.discard(name)
            else:
                self._entries[path] = entry
                if parent is not None:
                    parent.add(name)


class Watches:
    """What one session wants to hear of: changes of nodes, and of what is below them.  Each is told
    once."""

    def __init__(self) -> None:
        self._nodes: set[str] = set()
        self._parents: set[str] = set()

    def read(self, tree: Tree, session: int, paths: Sequence[str], *, watch: bool) -> Found:
        """The nodes as they are; `watch`: and hear of their next change."""
        if watch:
            self._nodes.update(paths)
        return Found(tuple(tree.get(path, session) for path in paths))

    def children(self, tree: Tree, paths: Sequence[str], *, watch: bool) -> Children:
        """What is below the nodes; `watch`: and hear when that changes."""
        if watch:
            self._parents.update(paths)
        return Children(tuple(tree.children(path) for path in paths))

    def take(self, touched: Touched) -> list[str]:
        """The paths of which a commit is to be told, in order."""
        nodes = self._nodes & touched.values
        parents = self._parents & (touched.parents | touched.values)
        self._nodes -= nodes
        self._parents -= parents
        return sorted(nodes | parents)

    def clear(self) -> None:
        self._nodes.clear()
        self._parents.clear()
