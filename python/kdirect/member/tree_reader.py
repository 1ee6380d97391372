"""Reading whole trees of nodes out of the metadata store, level by level."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from kdirect.cluster import paths
from kdirect.member.loop_store import LoopStore
from kdirect.store.contract import Children, Conflict, Found, Node

log = logging.getLogger("kdirect.member")

# Where everything is that a controller, or a broker's picture of the cluster, is made of.
ROOTS = ("/brokers", "/config", "/admin", paths.CONTROLLER_EPOCH, paths.CHANGES)
_WITHOUT_CHILDREN = (
    paths.BROKER_IDS + "/",
    paths.TOPIC_CONFIGS + "/",
    paths.BROKER_CONFIGS + "/",
    paths.DELETIONS + "/",
)


def read_tree(
    store: LoopStore, roots: Sequence[str], done: Callable[[dict[str, Node] | None], None]
) -> None:
    """Read all nodes at and below `roots`, each by itself, and hand them on by path; None when the
    connection was lost, or the store refuses."""
    nodes: dict[str, Node] = {}
    lost = False

    def read_level(level: Sequence[str]) -> None:
        store.read(level, lambda answer: found(level, answer))
        parents = [path for path in level if _may_have_children(path)]
        store.children(parents, lambda answer: descend(parents, answer))

    def found(level: Sequence[str], answer: Any) -> None:
        nonlocal lost
        if not isinstance(answer, Found):
            lost = True
            _note(answer)
            return
        for path, node in zip(level, answer.nodes, strict=True):
            if node is not None:
                nodes[path] = node

    def descend(parents: Sequence[str], answer: Any) -> None:
        if lost or not isinstance(answer, Children):
            _note(answer)
            done(None)
            return
        pairs = zip(parents, answer.names, strict=True)
        below = [f"{parent}/{name}" for parent, names in pairs for name in names or ()]
        if below:
            read_level(below)
        else:
            done(nodes)

    read_level(tuple(roots))


def _note(answer: Any) -> None:
    if isinstance(answer, Conflict):
        log.error(
            "the metadata store does not let this broker read: %s; give it permission",
            answer.detail or answer.reason.value,
        )


def _may_have_children(path: str) -> bool:
    return (
        not path.startswith(_WITHOUT_CHILDREN)
        and path not in (paths.CONTROLLER_EPOCH, paths.CHANGES)
        and paths.partition_of_state(path) is None
    )
