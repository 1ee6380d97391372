"""The incarnations in which a cluster has owned its objects in remote storage.

The node ``/kdirect/remote_owner`` has those of late, the newest last; the leader of partition 0 of
``__remote_log_metadata`` adds one before it says in the object store that the cluster is the owner
(`kdirect.storage.ownership`).  A copy of the metadata store lacks those that were added since.
"""

from __future__ import annotations

from collections.abc import Sequence

from kdirect.cluster import paths
from kdirect.cluster.fields import read_object, write_object
from kdirect.errors import ConfigError, StoreLostError
from kdirect.member.loop_store import LoopStore
from kdirect.store.contract import (
    Committed,
    Conflict,
    Create,
    Found,
    Node,
    Operation,
    Reason,
    Replace,
)

MOST = 16


async def read_incarnations(store: LoopStore) -> list[str]:
    """Those that are known.  StoreLostError; CorruptMetadataError: the node is damaged."""
    return _decode(await _read(store))


async def add_incarnations(store: LoopStore, incarnations: Sequence[str]) -> list[str]:
    """Add these; all that are known.  Errors as above, and ConfigError: the store refuses."""
    while True:
        node = await _read(store)
        before = [x for x in _decode(node) if x not in incarnations]
        # What is told now stays longest: the present owner may be the one known longest.
        kept = list(dict.fromkeys([*before, *incarnations]))[-MOST:]
        value = write_object({"version": 1, "incarnations": kept})
        path = paths.REMOTE_OWNER
        write: Operation
        write = Create(path, value) if node is None else Replace(path, value, node.version)
        answer = await store.commit_later(write)
        if isinstance(answer, Committed):
            return kept
        if not isinstance(answer, Conflict):
            raise StoreLostError("the metadata store was lost")
        if answer.reason is Reason.REFUSED:
            raise _refused(answer)


async def _read(store: LoopStore) -> Node | None:
    found = await store.read_later(paths.REMOTE_OWNER)
    if isinstance(found, Conflict):
        raise _refused(found)
    if not isinstance(found, Found):
        raise StoreLostError("the metadata store was lost")
    return found.nodes[0]


def _decode(node: Node | None) -> list[str]:
    if node is None:
        return []
    remedy = "delete it, and have a broker take over the objects (remote.log.storage.take.over)"
    return list(read_object(paths.REMOTE_OWNER, node.value, remedy).texts("incarnations"))


def _refused(conflict: Conflict) -> ConfigError:
    why = conflict.detail or conflict.reason.value
    return ConfigError(
        f"the metadata store does not say who owns what is in remote storage, at"
        f" {paths.REMOTE_OWNER}: {why}",
        hint="let this broker read and write there",
    )
