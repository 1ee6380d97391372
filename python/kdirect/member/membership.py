"""A broker's membership in a cluster: what the rest of the broker has to do with the others.

Owns: the session with the metadata store, and the next one when it has expired; the newest
`Metadata`; questions to the controller.  Everything runs on the broker's event loop.

A broker becomes a member in two steps, because its log directories must know the cluster's id
before they open, and others must not find it before it listens:

1. `connect` reaches the store and says which cluster this is;
2. `start` registers the broker, and waits until it has read what there is.

**The store goes away.**  While no server answers, the metadata stays what it was, and the broker
goes on as it is.  What changed meanwhile is read when a server answers again.  When the session has
expired, the broker's node is gone and others may have its partitions: a new session begins, and
with it the broker has a new incarnation.  Between the two, `metadata.incarnation` is -1.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from kdirect.cluster.image import Settings
from kdirect.cluster.records import OWN, BrokerRegistration, Endpoint
from kdirect.cluster.requests import Answer, Request
from kdirect.errors import (
    BrokerUnavailableError,
    ClosedError,
    CorruptLogError,
    KdirectError,
    StoreLostError,
    TimedOutError,
)
from kdirect.log import checkpoint
from kdirect.member.asking import Asking
from kdirect.member.identity import (
    Identity,
    Kept,
    Past,
    boot_id,
    find_lost,
    have_been_used,
    read_past,
    write_identity,
)
from kdirect.member.loop_store import LoopStore
from kdirect.member.metadata import NOBODY, Metadata
from kdirect.member.peers import Peers
from kdirect.member.picture import read_image
from kdirect.member.producer_ids import Block, take_block
from kdirect.member.registration import check_cluster
from kdirect.member.remote_owner import add_incarnations, read_incarnations
from kdirect.member.reports import Reports
from kdirect.member.session import Hooks, Session
from kdirect.model import TopicPartition
from kdirect.store.contract import MetadataStore
from kdirect.wire.environment import SYSTEM, Environment

log = logging.getLogger("kdirect.member")

TICK_S = 2.0
MOST_LOST = 5000  # replicas that a registration names
STORE_ANSWER_S = 30.0  # how long is waited for what others ask of the store
NO_OWNER = "nothing came of who owns what is in remote storage"
Callback = Callable[[Metadata, Metadata], None]
_Result = TypeVar("_Result")


def open_zookeeper(config: Mapping[str, Any]) -> MetadataStore:
    """The store that the broker's properties name; ConfigError: kazoo is not installed, or
    zookeeper.connect is no list of servers."""
    from kdirect.store.zookeeper import ZookeeperStore

    timeout_ms = config["zookeeper.session.timeout.ms"]
    return ZookeeperStore(config["zookeeper.connect"], session_timeout_ms=timeout_ms)


def settings_of(config: Mapping[str, Any]) -> Settings:
    """What a controller on this broker goes by where the cluster's nodes say nothing."""
    return Settings(
        min_in_sync=config["min.insync.replicas"],
        unclean=config["unclean.leader.election.enable"],
        rebalance=config["auto.leader.rebalance.enable"],
        rebalance_interval_ms=config["leader.imbalance.check.interval.seconds"] * 1000,
        rebalance_percent=config["leader.imbalance.per.broker.percentage"],
    )


class Membership:
    """See the module.  `config`: the broker's properties.  `log_dirs`: what remembers this broker's
    membership.  `open_store`: a new session with the store, not started.

    `peers` asks `metadata` where brokers are; it is closed with the membership."""

    def __init__(
        self,
        config: Mapping[str, Any],
        log_dirs: Sequence[Path],
        peers: Peers,
        *,
        environment: Environment = SYSTEM,
        open_store: Callable[[], MetadataStore] | None = None,
    ) -> None:
        self.node_id: int = config["node.id"]
        self.peers = peers
        self.reports = Reports()
        self.metadata = Metadata("", self.node_id)
        self.sessions_expired = 0
        # Set before `connect` where the directories are those of a broker that was alone, whose
        # cluster's id is its own: they may become those of another cluster.
        self.may_come_from_elsewhere = False
        self._config = config
        self._log_dirs = [Path(d) for d in log_dirs]
        self._remote_storage: str | None = None
        if config["remote.log.storage.system.enable"]:
            self._remote_storage = config["remote.log.storage.uri"]
        self._environment = environment
        self._open_store = open_store or (lambda: open_zookeeper(config))
        self._settings = settings_of(config)
        self._subscribers: list[Callback] = []
        self._unpublished: deque[tuple[Metadata, Metadata]] = deque()
        self._news = asyncio.Event()  # replaced with each publication
        self._session: Session | None = None
        self._may_register = asyncio.Event()
        self._past = Past()
        self._boot = boot_id()
        self._may_found = False  # a cluster, in a store that knows none
        self._own_cluster_id = ""
        self._intact_since: int | None = None
        self._since: dict[Path, int | None] = {}  # the same of each log directory
        self._kept: Callable[[], Mapping[TopicPartition, Kept]] | None = None
        self._lost_replicas: Mapping[TopicPartition, int] = {}
        self._incarnation = -1  # of the registration before, which may be seen after its session
        self._endpoints: tuple[Endpoint, ...] = ()
        self._failure: asyncio.Future[KdirectError] | None = (
            None  # while `connect` or `start` waits
        )
        self._lost: asyncio.Future[None] | None = None
        self._reaching: set[int] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing: list[asyncio.Task[None]] = []  # sessions that have ended
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = False
        self._asking = Asking(
            self.node_id,
            peers,
            environment,
            metadata_of=lambda: self.metadata,
            news=self.news,
            ask_here=self.answer,
        )
        peers.listen_for_losses(self._peer_died)

    # -- life --------------------------------------------------------------------------------------

    async def connect(self) -> str:
        """Reach the store; the id of its cluster.  The log directories need not be open yet, and
        must not have been opened by this process.

        ConfigError: the store refuses; BrokerUnavailableError: it does not answer within
        zookeeper.connection.timeout.ms; LogError: the directories are another cluster's."""
        self._past = read_past(self._log_dirs, self._boot)
        self._intact_since = self._past.intact_since
        self._since = dict(self._past.since)
        self._own_cluster_id = self._cluster_id_on_disk()
        was_member = bool(self._own_cluster_id) and have_been_used(self._log_dirs)
        self._may_found = self.may_come_from_elsewhere or not was_member
        self._open_session()
        timeout_ms = self._config["zookeeper.connection.timeout.ms"]
        if timeout_ms is None:
            timeout_ms = self._config["zookeeper.session.timeout.ms"]
        try:
            await self._until(
                lambda: bool(self.metadata.cluster_id),
                timeout_ms / 1000,
                f"ZooKeeper at {self._config['zookeeper.connect']} does not answer within"
                f" {timeout_ms} ms",
                "start it, or correct zookeeper.connect",
            )
        except BaseException:
            await self.stop()
            raise
        return self.metadata.cluster_id

    async def start(
        self,
        endpoints: Sequence[Endpoint],
        kept: Callable[[], Mapping[TopicPartition, Kept]] | None = None,
    ) -> None:
        """Register, and read what there is.  `endpoints`: where this broker is found.  `kept()`:
        the replicas that are here; None: none that were was lost.  The log directories must be
        open.  Connects, if that was not done.

        ConfigError: the broker's id is in use, or the store refuses."""
        self._endpoints = tuple(endpoints)
        self._kept = kept
        if self._session is None:
            await self.connect()
        self._may_register.set()
        self._tick()
        try:
            await self._until(self._takes_part)
        except BaseException:
            await self.stop()
            raise

    def _takes_part(self) -> bool:
        here = self.metadata.brokers.get(self.node_id)
        complete = self._session is not None and self._session.picture.is_complete
        return complete and here is not None and here.incarnation == self.metadata.incarnation

    async def stop(self) -> None:
        """Give up what this broker holds in the cluster, at once.  See `shut_down_in_order`, which
        comes before."""
        if self._stopped:
            return
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        self.peers.close()
        if self._session is not None:
            await self._session.close()
        await asyncio.gather(*self._closing)

    async def shut_down_in_order(self) -> None:
        """Have the controller give the partitions that this broker leads to others
        (controlled.shutdown.*), and wait until this broker knows.  It never fails: what cannot be
        moved is logged."""
        if not self._config["controlled.shutdown.enable"] or self.metadata.incarnation == -1:
            return
        if self._session is None or not self._session.connected.is_set():
            log.warning("the metadata store does not answer: this broker stops as it is")
            return
        await self._asking.shut_down_in_order(
            retries=self._config["controlled.shutdown.max.retries"],
            backoff_s=self._config["controlled.shutdown.retry.backoff.ms"] / 1000,
        )

    # -- what others use ---------------------------------------------------------------------------

    def subscribe(self, callback: Callback) -> None:
        """Call `callback(before, after)` with each new `metadata`, on the event loop, in order."""
        self._subscribers.append(callback)

    def ask(self, request: Request, timeout_s: float) -> asyncio.Future[Answer]:
        """Ask the controller, wherever it is.  While there is none, or another is elected, it is
        asked again.  When the answer is here, `metadata` shows what it tells, but for AlterInSync,
        which does not wait for that.  TimedOutError says what stood in the way last."""
        return self._spawn(self._asking.ask(request, timeout_s))

    def answer(self, request: Request) -> asyncio.Future[tuple[Answer, int]]:
        """The answer of the controller here, to another broker's question, and the generation in
        which it is true; NOT_CONTROLLER if it is elsewhere."""
        if self._session is None:
            raise ClosedError("this broker is not in a cluster")
        return self._session.host.ask(request)

    def producer_id_block(self, least: int = 0) -> asyncio.Future[Block]:
        """Producer ids from `least` on that no other broker gets.  TimedOutError: the store does
        not answer; CorruptMetadataError: its node is damaged."""
        work = partial(take_block, broker=self.node_id, least=least)
        return self._spawn(self._from_store(work, "no block of producer ids came"))

    def remote_owners(self) -> asyncio.Future[list[str]]:
        """The incarnations in which the cluster has owned its objects in remote storage.  Errors as
        above."""
        return self._spawn(self._from_store(read_incarnations, NO_OWNER))

    def add_remote_owners(self, incarnations: Sequence[str]) -> asyncio.Future[list[str]]:
        """Add to them."""
        work = partial(add_incarnations, incarnations=incarnations)
        return self._spawn(self._from_store(work, NO_OWNER))

    @property
    def lost(self) -> asyncio.Future[None]:
        """Resolved when the present session has ended."""
        if self._lost is None:
            self._lost = asyncio.get_running_loop().create_future()
        return self._lost

    @property
    def is_controller(self) -> bool:
        """Does the controller work on this broker?"""
        return self._session is not None and self._session.host.leads

    async def news(self, timeout_s: float | None = None) -> bool:
        """Wait until `metadata` is another one; False: it did not change in time."""
        try:
            await asyncio.wait_for(self._news.wait(), timeout_s)
        except asyncio.TimeoutError:
            return False
        return True

    # -- sessions ----------------------------------------------------------------------------------

    def _open_session(self) -> None:
        store = LoopStore(self._open_store(), asyncio.get_running_loop())
        first = not self.sessions_expired
        hooks = Hooks(
            self._reached,
            lambda: self._may_found,
            self._registration,
            self._registered,
            self._session_changed,
            self._failed,
            self._session_ended,
        )
        self._session = Session(
            store,
            self.node_id,
            self._own_cluster_id or checkpoint.encode_id(checkpoint.new_id()),
            self._past if first else Past(own_incarnation=self._incarnation),
            self._settings,
            self._environment,
            self.reports,
            hooks,
            where=str(self._log_dirs[0]),
            may_register=self._may_register,
            # The process before may have had the longer session.
            wait_s=self._config["zookeeper.session.timeout.ms"] / 1000 * 2 if first else None,
        )
        self._session.start()

    def _reached(self, cluster_id: str) -> None:
        if self._own_cluster_id and not self.may_come_from_elsewhere:
            where = str(self._log_dirs[0])
            check_cluster(cluster_id, self._own_cluster_id, where)
        self._own_cluster_id = cluster_id
        self.may_come_from_elsewhere = False  # from here on it is this cluster's
        self._may_found = False
        self._publish(cluster_id=cluster_id)

    async def _registration(self) -> BrokerRegistration:
        """StoreLostError."""
        if self._kept is not None:
            await self._find_lost(self._kept())
            self._kept = None
        return BrokerRegistration(
            self._endpoints,
            {endpoint.listener: "PLAINTEXT" for endpoint in self._endpoints},
            self._config["broker.rack"],
            self._environment.time_ms(),
            self._intact_since,
            self._lost_replicas,
            self._remote_storage,
        )

    async def _find_lost(self, kept: Mapping[TopicPartition, Kept]) -> None:
        """Which replicas lack what this broker's processes have confirmed, although others do
        not."""
        assert self._session is not None
        if self._intact_since is None:
            return  # all may
        image = await read_image(self._session.store)
        if image is None:
            raise StoreLostError("the metadata store was lost")
        lost = find_lost(image, self.node_id, self._past, kept)
        if lost:
            some = ", ".join(str(tp) for tp in list(lost)[:10])
            log.warning("%d replicas are missing or not whole: %s", len(lost), some)
        if len(lost) > MOST_LOST:  # more than a node has room for
            self._intact_since, lost = None, {}
        self._lost_replicas = lost

    def _registered(self) -> None:
        assert self._session is not None
        incarnation = self._session.incarnation
        if self._intact_since is None or self._intact_since > incarnation:
            self._intact_since = incarnation  # a number of another store says nothing here
        self._incarnation = incarnation
        self._lost_replicas = {
            tp: incarnation if since == OWN else since for tp, since in self._lost_replicas.items()
        }
        for directory in self._log_dirs:
            since = self._since.get(directory)
            known = since is not None and since <= incarnation
            self._since[directory] = since if known else incarnation
        write_identity(
            {
                directory: Identity(self._boot, incarnation, since, self._lost_replicas)
                for directory, since in self._since.items()
                if since is not None
            }
        )
        log.info("broker %d is registered, as incarnation %d", self.node_id, incarnation)
        self._publish(incarnation=incarnation)

    def _session_changed(self) -> None:
        session = self._session
        if session is None or self._stopped:
            return
        changes: dict[str, Any] = {"controller_id": session.host.controller_id}
        if session.picture.is_complete:
            changes["brokers"] = session.picture.brokers
            changes["image"] = session.picture.image
            changes["generation"] = session.picture.generation
            changes["readings"] = self.sessions_expired << 32 | session.picture.times_read_whole
        self._publish(**changes)
        self._reach_brokers()

    def _failed(self, error: KdirectError) -> None:
        if self._failure is not None and not self._failure.done():
            self._failure.set_result(error)
        else:
            self.reports.error(error)

    def _session_ended(self) -> None:
        if self._stopped:
            return
        self.sessions_expired += 1
        log.warning("the session with the metadata store has ended: a new one begins")
        old, self._session = self._session, None
        lost, self._lost = self._lost, None
        if lost is not None and not lost.done():
            lost.set_result(None)
        self._publish(incarnation=-1, controller_id=NOBODY)
        if old is not None:
            self._closing = [task for task in self._closing if not task.done()]
            self._closing.append(asyncio.get_running_loop().create_task(old.close()))
        if old is None or old.was_connected:
            self._open_again()  # else the store refuses: the next tick is soon enough

    def _open_again(self) -> None:
        try:
            self._open_session()
        except KdirectError as e:
            self.reports.error(e)

    def _cluster_id_on_disk(self) -> str:
        for directory in self._log_dirs:
            try:
                found = checkpoint.read_properties(directory / checkpoint.META_PROPERTIES)
            except CorruptLogError as e:  # the log will not open, or leave this directory out
                log.error("%s", e)
                continue
            if found is not None and found.get("cluster.id"):
                return found["cluster.id"]
        return ""

    # -- publishing --------------------------------------------------------------------------------

    def _publish(self, **changes: Any) -> None:
        before = self.metadata
        after = before.replace(**changes)
        if after is before:
            return
        self.metadata = after
        self._unpublished.append((before, after))
        if len(self._unpublished) > 1:
            return  # a subscriber has caused this: those before it are told of the first one first
        while self._unpublished:
            for callback in self._subscribers:
                try:
                    callback(*self._unpublished[0])
                except Exception:
                    log.exception("what new metadata led to has failed")
            self._unpublished.popleft()
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def _until(
        self,
        holds: Callable[[], bool],
        timeout_s: float | None = None,
        what: str = "",
        hint: str = "",
    ) -> None:
        """Wait for metadata of which something holds; raise what makes this broker fail."""
        loop = asyncio.get_running_loop()
        self._failure = loop.create_future()
        deadline = None if timeout_s is None else loop.time() + timeout_s
        try:
            while not holds():
                left_s = None if deadline is None else deadline - loop.time()
                news = loop.create_task(self._news.wait())
                await asyncio.wait(
                    (news, self._failure), timeout=left_s, return_when=asyncio.FIRST_COMPLETED
                )
                news.cancel()
                if self._failure.done():
                    raise self._failure.result()
                if deadline is not None and loop.time() >= deadline and not holds():
                    raise BrokerUnavailableError(what, hint=hint)
        finally:
            self._failure = None

    # -- other brokers -----------------------------------------------------------------------------

    def _tick(self) -> None:
        if self._stopped:
            return
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)
        if self._session is None:
            self._open_again()
            return
        self._session.tick()
        self._reach_brokers()

    def _reach_brokers(self) -> None:
        """The controller keeps connections to all brokers, and they to it, by which they notice
        that one has died."""
        metadata = self.metadata
        wanted = metadata.brokers if self.is_controller else (metadata.controller_id,)
        for node_id in wanted:
            if node_id in (self.node_id, NOBODY) or not metadata.is_live(node_id):
                continue
            if node_id not in self._reaching:
                self._reaching.add(node_id)
                self._spawn(self._reach(node_id))

    async def _reach(self, node_id: int) -> None:
        try:
            await self.peers.reach(node_id)
        except BrokerUnavailableError as e:
            if isinstance(e.__cause__, ConnectionRefusedError):
                self._peer_died(node_id)
        except KdirectError:
            pass  # the session timeout tells whether it lives
        else:
            if self._session is not None:
                self._session.host.revived(node_id)
        finally:
            self._reaching.discard(node_id)

    def _peer_died(self, node_id: int) -> None:
        if self._session is not None:
            self._session.host.died(node_id)

    # -- what others ask of the store --------------------------------------------------------------

    async def _from_store(
        self, work: Callable[[LoopStore], Coroutine[Any, Any, _Result]], failed: str
    ) -> _Result:
        """What `work` brings, begun again until the store answers."""
        deadline = self._environment.monotonic() + STORE_ANSWER_S
        while (left_s := deadline - self._environment.monotonic()) > 0:
            session = self._session
            if session is None:
                await self.news(left_s)
                continue
            try:
                await asyncio.wait_for(session.connected.wait(), min(left_s, TICK_S))
                return await asyncio.wait_for(work(session.store), left_s)
            except (StoreLostError, asyncio.TimeoutError):
                continue
        raise TimedOutError(
            f"{failed} within {STORE_ANSWER_S:g} s: the metadata store does not answer",
            hint="see the log of this broker, and ZooKeeper's",
        )

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
