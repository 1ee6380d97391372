"""The tree of a store in the plainest form, to compare stores with; and random operations on it."""

from __future__ import annotations

import random
from collections.abc import Sequence

from kdirect.store.contract import (
    ANY_VERSION,
    Check,
    Committed,
    Conflict,
    Create,
    Delete,
    Operation,
    Reason,
    Replace,
)

PATHS = ("/a", "/b", "/a/x", "/a/y", "/a/x/p", "/a/x/q", "/b/x")


class Model:
    """Path to value, version and whether it is ephemeral.  A commit works on a copy."""

    def __init__(self) -> None:
        self.nodes: dict[str, tuple[bytes, int, bool]] = {}

    def children(self, path: str) -> tuple[str, ...] | None:
        if path not in self.nodes:
            return None
        names = (other[len(path) + 1 :] for other in self.nodes if other.startswith(path + "/"))
        return tuple(sorted(name for name in names if "/" not in name))

    def commit(self, operations: Sequence[Operation]) -> Committed | tuple[int, Reason]:
        before = dict(self.nodes)
        versions = []
        for index, operation in enumerate(operations):
            reason = self._one(operation)
            if reason is not None:
                self.nodes = before
                return index, reason
            if isinstance(operation, Check):
                versions.append(operation.version)
            else:
                versions.append(self.nodes.get(operation.path, (b"", -1))[1])
        return Committed(tuple(versions))

    def _one(self, operation: Operation) -> Reason | None:
        path, parent = operation.path, operation.path.rpartition("/")[0]
        node = self.nodes.get(path)
        if isinstance(operation, Create):
            if parent and parent not in self.nodes:
                return Reason.MISSING
            if parent and self.nodes[parent][2]:
                return Reason.EPHEMERAL_PARENT
            if node is not None:
                return Reason.EXISTS
            self.nodes[path] = (operation.value, 0, operation.ephemeral)
            return None
        if node is None:
            return Reason.MISSING
        if operation.version not in (ANY_VERSION, node[1]):
            return Reason.VERSION
        if isinstance(operation, Replace):
            self.nodes[path] = (operation.value, node[1] + 1, node[2])
        elif isinstance(operation, Delete):
            if self.children(path):
                return Reason.NOT_EMPTY
            del self.nodes[path]
        return None


def random_commit(chance: random.Random, model: Model) -> list[Operation]:
    """Operations of which most fit the model as it is."""
    return [_random_operation(chance, model) for _ in range(chance.choice((1, 1, 2, 3, 6)))]


def _random_operation(chance: random.Random, model: Model) -> Operation:
    path, value = chance.choice(PATHS), b"%d" % chance.randrange(1000)
    there = path in model.nodes
    if chance.random() < 0.1:
        there = not there
    if not there:
        return Create(path, value, ephemeral=chance.random() < 0.15)
    version = ANY_VERSION
    if chance.random() < 0.5:
        version = model.nodes.get(path, (b"", 0))[1]
    elif chance.random() < 0.1:
        version = chance.randrange(4)
    kind = chance.random()
    if kind < 0.4:
        return Replace(path, value, version)
    return Delete(path, version) if kind < 0.7 else Check(path, version)


def as_pair(answer: object) -> object:
    """A conflict without the store's own words."""
    return (answer.index, answer.reason) if isinstance(answer, Conflict) else answer
