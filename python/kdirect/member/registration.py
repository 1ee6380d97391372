"""A broker's registration for one session: its node ``/brokers/ids/N``, and before that the nodes
that every broker makes sure of, and the cluster's id.

The id may be taken: by another broker, which is an error; or by the process before, whose session
has not ended yet.  Which it is shows at the address in the node.  If a broker answers there, the id
is in use.  If nobody does, and the node is the one that the process before has made, as these log
directories remember, then that process has ended, for this one holds the directories' lock: the
node is deleted.  Else the node goes when its session ends, and that is waited for.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Sequence
from typing import Any

from kdirect.cluster import paths, records
from kdirect.cluster.records import BrokerRegistration, Endpoint
from kdirect.errors import (
    ConfigError,
    CorruptMetadataError,
    KdirectError,
    LogError,
    StoreLostError,
)
from kdirect.member.identity import Past
from kdirect.member.loop_store import LoopStore
from kdirect.member.peers import connect
from kdirect.member.reports import Reports
from kdirect.store.contract import (
    Check,
    Committed,
    Conflict,
    Create,
    Delete,
    Found,
    Node,
    Operation,
    Reason,
    Replace,
)

log = logging.getLogger("kdirect.member")

DIAL_S = 2.0  # how long an address may keep silent that may be a broker's


class _Holder(enum.Enum):
    """Who has this broker's node."""

    NOBODY = "nobody"
    BEFORE = "the process before, which has ended"
    SILENT = "a process that does not answer"
    HERE = "a session before this one, from the same address"
    ANOTHER = "a broker that answers"


async def make_nodes(store: LoopStore) -> None:
    """Make sure of the nodes that must be there.  StoreLostError; ConfigError: the store
    refuses."""
    found = await _read(store, *(path for path, _ in paths.PERSISTENT))
    for (path, value), node in zip(paths.PERSISTENT, found, strict=True):
        if node is None:
            await _create(store, Create(path, value))


async def settle_cluster_id(store: LoopStore, own: str, *, may_found: bool, where: str) -> str:
    """The cluster's id.  Where there is none, a broker that `may_found` a cluster creates it, as
    `own`; to another one, whose log directories (the first is `where`) are a cluster's already, the
    store has been emptied, or is not the one that it was.  Before that, the nodes are made sure of
    that every broker needs.  Errors as `make_nodes`, and CorruptMetadataError."""
    if not may_found and not await _exists(store, paths.CLUSTER_ID):
        text = records.encode_cluster_id(own).decode()
        raise ConfigError(
            f"the metadata store knows no cluster, and {where} belongs to cluster {own}: it is"
            " another store (or chroot), or it was emptied",
            hint="correct zookeeper.connect, or restore what ZooKeeper had (where node"
            f" {paths.CLUSTER_ID} alone is missing, create it: {text}); a broker that is started"
            " once without zookeeper.connect brings its topics along to a new cluster",
        )
    await make_nodes(store)
    (node,) = await _read(store, paths.CLUSTER_ID)
    if node is None:
        await _create(store, Create(paths.CLUSTER_ID, records.encode_cluster_id(own)))
        (node,) = await _read(store, paths.CLUSTER_ID)
        if node is None:
            raise StoreLostError("the metadata store was lost")
    return records.decode_cluster_id(paths.CLUSTER_ID, node.value)


def check_cluster(cluster_id: str, own: str, where: str) -> None:
    """LogError if the log directories belong to another cluster."""
    if cluster_id != own:
        raise LogError(
            f"{where} belongs to cluster {own}, and zookeeper.connect leads to cluster"
            f" {cluster_id}",
            hint="use other log.dirs, or the ZooKeeper (or chroot) of the directory's cluster",
        )


class Registration:
    """See the module.  `past`: what the log directories remember.  `wait_s`: how long a node of a
    silent process is waited for; None: without end.

    `incarnation` is -1 until the node is there."""

    def __init__(
        self,
        store: LoopStore,
        node_id: int,
        past: Past,
        reports: Reports,
        *,
        wait_s: float | None,
    ) -> None:
        self.incarnation = -1
        self.node_id = node_id
        self.path = paths.broker(node_id)
        self._store = store
        self._past = past
        self._reports = reports
        self._wait_s = wait_s
        self._changed = asyncio.Event()

    def changed(self) -> None:
        """The node may have changed."""
        self._changed.set()

    async def register(self, registration: BrokerRegistration) -> int:
        """Create the node, or see that it is there; the incarnation.  StoreLostError; ConfigError:
        the id is in use, or the store refuses."""
        value = records.encode_broker(registration)
        deadline: float | None = None
        loop = asyncio.get_running_loop()
        while True:
            self._changed.clear()
            (node,) = await _read(self._store, self.path, watch=True)
            if node is not None and node.owned:
                self.incarnation = node.created
                return node.created
            self.incarnation = -1
            if node is None:
                # The node above it has a new version then, for whoever deletes it: see `_delete`.
                await _create(
                    self._store,
                    Create(self.path, value, ephemeral=True),
                    Replace(paths.BROKER_IDS, b""),
                )
                continue
            holder = await self._look_at(node, registration.endpoints)
            if holder is _Holder.BEFORE:
                await self._delete(node)
                continue
            if self._wait_s is not None and holder is _Holder.ANOTHER:
                raise self._in_use(node, "and answers")
            if self._wait_s is None and holder is not _Holder.HERE:
                self._reports.error(str(self._in_use(node, "and this broker's session has ended")))
            if deadline is None and self._wait_s is not None:
                log.info("waiting for %s to go, which another session holds", self.path)
                deadline = loop.time() + self._wait_s
            if not await self._wait(None if deadline is None else deadline - loop.time()):
                raise self._in_use(node, f"and its session has not ended in {self._wait_s:g} s")

    async def _wait(self, timeout_s: float | None) -> bool:
        try:
            await asyncio.wait_for(self._changed.wait(), timeout_s)
        except asyncio.TimeoutError:
            return False
        return True

    async def _look_at(self, node: Node, own: Sequence[Endpoint]) -> _Holder:
        try:
            there = records.decode_broker(self.path, node.value).endpoints
        except CorruptMetadataError as e:
            self._reports.error(e)
            return _Holder.SILENT
        addresses = {(e.host, e.port) for e in there} - {(e.host, e.port) for e in own}
        refused = True
        for host, port in addresses:
            answer = await _dial(host, port)
            if answer is None:
                return _Holder.ANOTHER
            refused = refused and isinstance(answer, ConnectionRefusedError)
        if refused and node.created == self._past.own_incarnation:
            return _Holder.BEFORE
        return _Holder.SILENT if addresses else _Holder.HERE

    async def _delete(self, node: Node) -> None:
        """Delete this node, and not one that another broker has made of the same path meanwhile:
        the version of every such node is 0, so the node above it tells them apart."""
        above, there = await _read(self._store, paths.BROKER_IDS, self.path)
        if above is None or there is None or there.created != node.created:
            return  # look again
        log.info("deleting %s of the process before, which has ended", self.path)
        answer = await self._store.commit_later(
            Check(paths.BROKER_IDS, above.version), Delete(self.path, there.version)
        )
        if not isinstance(answer, Committed | Conflict):
            raise StoreLostError("the metadata store was lost")

    def _in_use(self, node: Node, why: str) -> ConfigError:
        where = "an unreadable address"
        try:
            first = records.decode_broker(self.path, node.value).endpoints[0]
            where = f"{first.host}:{first.port}"
        except CorruptMetadataError:
            pass
        return ConfigError(
            f"broker id {self.node_id} is in use: a broker at {where} is registered with it, {why}",
            hint="give this broker another node.id, or stop the other one",
        )


async def _read(store: LoopStore, *wanted: str, watch: bool = False) -> tuple[Node | None, ...]:
    answer: Any = await store.read_later(*wanted, watch=watch)
    if isinstance(answer, Conflict):
        raise _refused(f"does not let this broker read {wanted[answer.index]}", answer)
    if not isinstance(answer, Found):
        raise StoreLostError("the metadata store was lost")
    return answer.nodes


async def _exists(store: LoopStore, path: str) -> bool:
    """Is there such a node?  A server may lag, and read nothing; a commit it does not answer."""
    answer = await store.commit_later(Check(path))
    if isinstance(answer, Conflict) and answer.reason is Reason.REFUSED:
        raise _refused(f"does not let this broker look at {path}", answer)
    if not isinstance(answer, Committed | Conflict):
        raise StoreLostError("the metadata store was lost")
    return isinstance(answer, Committed)


async def _create(store: LoopStore, operation: Create, *more: Operation) -> None:
    """Create the node, and do what is to be done with it, unless it is there."""
    answer = await store.commit_later(operation, *more)
    if isinstance(answer, Committed):
        return
    if not isinstance(answer, Conflict):
        raise StoreLostError("the metadata store was lost")
    if answer.reason is not Reason.EXISTS:
        raise _refused(f"does not let this broker create {operation.path}", answer)


def _refused(what: str, conflict: Conflict) -> KdirectError:
    return ConfigError(
        f"the metadata store {what}: {conflict.detail or conflict.reason.value}",
        hint="let this broker read and write there",
    )


async def _dial(host: str, port: int) -> OSError | None:
    """None if somebody takes connections there; else why not."""
    try:
        made = await asyncio.wait_for(connect(asyncio.Protocol, host, port), DIAL_S)
    except asyncio.TimeoutError:
        return TimeoutError(f"{host}:{port} keeps silent")
    except OSError as e:
        return e
    made.close()
    return None
