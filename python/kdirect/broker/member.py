"""A broker's part in a cluster: what it has in addition to a broker that is alone.

Owns: the order in which a broker joins and leaves, and the wires between the rooms: the membership
(`kdirect.member`), the replicas, the topics and what of them is here, access that ends with a
leadership, requests of other brokers.

**Joining** (`connect`, then `join`): the store says which cluster this is, before the log
directories are opened; the broker listens, before it registers, so that whoever finds it can reach
it; it brings along the topics that it had while it was alone; it makes the replicas that it lacks;
then it serves.  Until then clients' requests wait (`when_joined`).

**Leaving** (`leave_in_order`, then `leave`): others take over what it leads while it still serves;
after the last answer it gives up its registration.

All methods run on the broker's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from kdirect.broker.answers import Answer, later
from kdirect.broker.appends import Appends
from kdirect.broker.closing import Ending
from kdirect.broker.cluster_view import ClusterView
from kdirect.broker.coming_leaderships import ComingLeaderships
from kdirect.broker.config import BrokerConfig, Listener
from kdirect.broker.connection import Connection
from kdirect.broker.files import FileThreads
from kdirect.broker.handlers_member_configs import MemberConfigHandlers
from kdirect.broker.handlers_members import MemberHandlers
from kdirect.broker.handlers_placement import PlacementHandlers
from kdirect.broker.handlers_replicated import ReplicatedDataHandlers
from kdirect.broker.handlers_topics import TopicHandlers
from kdirect.broker.listeners import Listeners
from kdirect.broker.local_replicas import LocalReplicas, Remove
from kdirect.broker.member_properties import MemberProperties
from kdirect.broker.member_topics import MemberTopics, check_remote_storage
from kdirect.broker.member_view import MemberView
from kdirect.broker.metadata_appends import MetadataAppends
from kdirect.broker.metadata_calls import MetadataCalls
from kdirect.broker.picture import Picture
from kdirect.broker.replication import Replication
from kdirect.broker.scheduler import soon
from kdirect.broker.services import Services
from kdirect.broker.topics import Registry
from kdirect.broker.waiters import Waiters
from kdirect.cluster.records import Endpoint
from kdirect.errors import ConfigError, NotLeaderError
from kdirect.format import protocol as p
from kdirect.log.manager import LogManager
from kdirect.log.partition import Partition
from kdirect.member.figures import Figures
from kdirect.member.halting import HaltedReplicas
from kdirect.member.identity import Kept
from kdirect.member.membership import Membership
from kdirect.member.peers import Peers
from kdirect.member.replicas import Replicas
from kdirect.model import TopicPartition
from kdirect.wire.environment import Environment

log = logging.getLogger("kdirect.broker")

# Requests that are answered while the broker joins: clients ask for versions when they connect, and
# other brokers may have elected this one controller.
AT_ONCE = frozenset((p.API_VERSIONS, p.AskControllerRequest.API_KEY, p.ProduceRequest.API_KEY))


def listener_names(listeners: Iterable[Listener]) -> list[str]:
    """The names of a broker's listeners; ConfigError where two share one, by which brokers could
    not tell where to reach each other."""
    names = [listener.name for listener in listeners]
    if len(set(names)) != len(names):
        raise ConfigError(
            f"option listeners: two listeners have one of the names {', '.join(names)}",
            hint="in a cluster each listener has a name of its own: INSIDE://host:port, ...",
        )
    return names


class Member:
    """See the module.  Life: construct, `connect`, `bind`, `join`; `leave_in_order`, `leave`."""

    def __init__(
        self,
        config: BrokerConfig,
        logs: LogManager,
        environment: Environment,
    ) -> None:
        self._config = config
        self._logs = logs
        self._environment = environment
        names = listener_names(config.listeners)
        self.peers = Peers(lambda: self.membership.metadata, names[0], environment)
        self.membership = Membership(config, logs.log_dirs, self.peers, environment=environment)
        self.view = MemberView(
            config["node.id"],
            cluster_id=lambda: logs.cluster_id,
            metadata=lambda: self.membership.metadata,
            default_listener=names[0],
        )
        self.topics = MemberTopics(logs, self.view, environment)
        self.picture = Picture(self.membership)
        self.properties = MemberProperties(lambda: self.membership.metadata, config, logs)
        self.figures = Figures(config["node.id"])
        self.membership.subscribe(self.figures.changed)
        self.replicas: Any = None
        self._local: LocalReplicas | None = None
        self._files: FileThreads | None = None
        self._appends: Appends | None = None
        self._waiters: Waiters | None = None
        self._access: Any = None
        self._coming: ComingLeaderships | None = None
        self._replicates = False  # `replicas` was started
        self.on_joined: list[Callable[[], None]] = []  # called when it knows its replicas
        self.metadata_appends: Any = None
        self._joined = asyncio.Event()
        self._own: Registry | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def make_replicas(self, files: FileThreads) -> Replicas:
        """What answers for the replicas; hooks are added to it before `join`."""
        self._files = files
        files.expect_failovers()
        self.replicas = Replicas(
            self.membership,
            self.peers,
            on_thread=files.for_partition,
            hurry=files.hurry,
            read=files.read,
            release=files.release,
            environment=self._environment,
            lag_ms=self._config["replica.lag.time.max.ms"],
            min_in_sync=self._config["min.insync.replicas"],
            throttle_rates={
                name: self._config[name]
                for name in (
                    "leader.replication.throttled.rate",
                    "follower.replication.throttled.rate",
                )
            },
        )
        self.halts = HaltedReplicas(
            self._config["node.id"], self.replicas, lambda: self.membership.metadata
        )
        return self.replicas

    def bind(
        self,
        *,
        appends: Appends,
        waiters: Waiters,
        access: Any,
        remove: Remove,
    ) -> None:
        """Tie the replicas to those who append and read.  `remove` as in `local_replicas`."""
        assert self._files is not None
        self._appends, self._waiters, self._access = appends, waiters, access
        self.replicas.on_lead.append(self._lead)
        self.replicas.on_resign.append(self._resign)
        self.replicas.on_high_watermark.append(self._moved)
        appends.appended = self._grown
        if access is not None:
            access.leadership = self.replicas
            self.replicas.on_too_few.append(lambda tp, partition: access.too_few(tp))
            self.replicas.on_released.append(lambda tp, partition: access.released(tp))
            access.on_append = self._committed_by_rdma
            self.replicas.watch = access.watch
            access.links.watch = self.replicas.watch_readable
            access.links.flushed = self._flushed_for_rdma
            if self._config["rdma.replicate"]:
                push = self.replicas.push = Replication(
                    access,
                    self._files,
                    self.peers,
                    self._config,
                    lambda: self.membership.metadata.incarnation,
                    self.replicas.throttles,
                )
                self.replicas.on_resign.append(push.reads.resigned)
            else:
                log.info("followers and leaders fetch over TCP: rdma.replicate=false")
        self._local = LocalReplicas(
            self._config["node.id"],
            self._logs,
            self.picture,
            admin=self._files.admin,
            made=lambda tp, partition: self.replicas.add(partition),
            gone=self.halts.gone,
            remove=remove,
            failed=self.replicas.failed,
        )

    def handlers(self, services: Services) -> tuple[Any, Any, TopicHandlers, PlacementHandlers]:
        """Those for configs, records, topics and placement."""
        configs = MemberConfigHandlers(services, self.picture, self.properties)
        data = ReplicatedDataHandlers(services, self.replicas, self.picture)
        self.metadata_appends = MetadataAppends(services)
        self._coming = data.coming
        self.replicas.on_lead.append(data.coming.led)  # after `_lead`, which lets appends be made
        self.membership.subscribe(data.coming.changed)
        topics = TopicHandlers(services, self.picture, configs.topic_rows)
        return configs, data, topics, PlacementHandlers(self.picture)

    def add_remote_storage(
        self, remote: Any, handler: Callable[[int], Callable[..., Answer]]
    ) -> None:
        """Tie tiered storage to the replicas and to other brokers.  `handler(api key)`: what
        answers such a request here."""
        calls = MetadataCalls(self._config["node.id"], self.peers, handler)
        remote.bind(self.membership, self.replicas, calls, self.metadata_appends)
        self.on_joined.append(remote.joined)

    # -- joining -----------------------------------------------------------------------------------

    async def connect(self) -> None:
        """Reach the store, so that the log directories know their cluster.  Those of a broker that
        was alone become the cluster's."""
        alone = self._own_file.exists()
        self.membership.may_come_from_elsewhere = alone
        self._logs.belong_to(await self.membership.connect(), adopt=alone)

    async def join(self, listeners: Listeners) -> None:
        """Register, make what replicas are missing, and serve."""
        assert self._files is not None and self._local is not None
        self._loop = asyncio.get_running_loop()
        await self._files.admin(self._look_back)
        await self.membership.start(self._endpoints(listeners), self._kept)
        check_remote_storage(self.membership.metadata, self._config)
        await self.properties.follow(self.membership.subscribe, self._files.admin)
        self.topics.bind(self.membership, self.replicas, self.picture)
        self.membership.subscribe(self._local.follow)
        if self._own is not None:
            await self._local.bring_along(self._own, self._own_file)
            self._own = None
        self._replicates = True
        await self.replicas.start()
        await self._local.start()
        for call in self.on_joined:
            call()
        self._joined.set()

    @property
    def _own_file(self) -> Any:
        return self._logs.log_dirs[0] / "topics.json"

    def _look_back(self) -> None:
        """What this broker had while it was alone.  File work."""
        self.topics.known_producer_ids()
        if self._own_file.exists():
            alone = ClusterView(
                self._config["node.id"],
                cluster_id=lambda: self._logs.cluster_id,
                local_epoch=lambda tp: None,
            )
            self._own = Registry(self._logs, alone, self._environment)
            self._own.open()

    def _kept(self) -> dict[TopicPartition, Kept]:
        """The replicas that were found."""
        return {
            tp: Kept(found.topic_id, found.directory.parent)
            for tp, found in self._logs.partitions.items()
        }

    def _endpoints(self, listeners: Listeners) -> list[Endpoint]:
        return [
            Endpoint(listener.name, *listeners.registered(index))
            for index, listener in enumerate(self._config.listeners)
        ]

    @property
    def is_joined(self) -> bool:
        return self._joined.is_set()

    def must_wait(self, api_key: int) -> bool:
        """Does a request wait until the broker has joined?  Those that carry records do not: they
        are answered with an error that clients retry."""
        return not self.is_joined and api_key not in AT_ONCE

    def when_joined(self, answer: Callable[[], Answer]) -> Answer:
        """The answer of a handler, once this broker knows its cluster."""
        return later(self._when_joined(answer))

    async def _when_joined(self, answer: Callable[[], Answer]) -> Answer:
        await self._joined.wait()
        found = answer()
        return found if found.awaited is None else await found.awaited

    # -- leaving -----------------------------------------------------------------------------------

    async def leave_in_order(self) -> None:
        """Have others lead what this broker leads, if there are any; appends wait no longer for
        it to lead."""
        try:
            if self.is_joined and len(self.membership.metadata.brokers) > 1:
                await self.membership.shut_down_in_order()
        finally:
            if self._coming is not None:
                self._coming.close()

    async def leave(self) -> None:
        """End replication and the session."""
        self.properties.close()
        steps = [self._local.stop] if self._local is not None else []
        steps += [self.replicas.stop] if self._replicates else []
        ending = Ending("the membership")
        for stop in (*steps, self.membership.stop):
            await ending.wait(stop())
        ending.tell()

    # -- leaderships -------------------------------------------------------------------------------

    def _lead(self, tp: TopicPartition, partition: Partition, epoch: int) -> None:
        assert self._appends is not None and self._waiters is not None
        if self._access is not None:
            self._access.lead(tp)
        else:
            self._appends.accept(tp)
        self._waiters.notify(tp)

    def _resign(self, tp: TopicPartition, partition: Partition) -> Awaitable[None]:
        """Nothing that was granted or begun here changes the log once this is done."""
        assert self._appends is not None and self._waiters is not None
        self._waiters.notify(tp)
        if self._access is not None:
            resigned: Awaitable[None] = self._access.resign(tp)
            return resigned
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def settled() -> None:
            if not done.done():
                done.set_result(None)

        leader = self.view.partition(tp).leader
        error = NotLeaderError(f"broker {leader} leads {tp}", hint="ask for metadata")
        self._appends.refuse(tp, error, settled)
        if self._appends.is_settled(tp):
            settled()
        return done

    def _committed_by_rdma(self, tp: TopicPartition) -> None:
        """The produce worker has committed where `watch` asked for it.  Any thread."""
        if self._loop is not None:
            soon(self._loop, self._grown, tp)

    def _flushed_for_rdma(self, tp: TopicPartition) -> None:
        """Producers' acknowledgements have waited for the disk.  Any thread."""
        if self._loop is not None:
            soon(self._loop, self.flushed, tp)

    def _grown(self, tp: TopicPartition) -> None:
        """The log has grown by an append that had to wait, or by RDMA.  Consumers are told now
        where nothing comes between a commit and its readers, else when the high watermark moves."""
        assert self._waiters is not None
        self.replicas.appended(tp)
        if not self.replicas.is_replicated(tp):
            self._waiters.notify(tp)

    def flushed(self, tp: TopicPartition) -> None:
        """More of a log is on disk."""
        assert self._waiters is not None
        self.replicas.flushed(tp)
        self._waiters.notify(tp)

    async def directory_failed(self, partitions: list[TopicPartition]) -> None:
        """The log directory of these has failed: others are to lead them."""
        assert self._local is not None
        self._local.let_go(partitions)
        for tp in partitions:
            self.halts.forget(tp)
        await self.replicas.fail(partitions)

    def statistics(self) -> dict[str, Any]:
        """By the names of `kdirect.metrics`; any thread."""
        replicas = self.replicas
        figures = self.figures.statistics(self.membership.metadata, replicas.describe)
        push = replicas.push.statistics() if replicas.push is not None else {}
        return {**replicas.statistics(), **push, **figures}

    def _moved(self, tp: TopicPartition, partition: Partition) -> None:
        """Records became readable."""
        assert self._waiters is not None
        self._waiters.notify(tp)
        if self._access is not None:
            self._access.high_watermark_moved(tp)

    # -- requests of other brokers -----------------------------------------------------------------

    def table(self) -> Iterable[tuple[int, Callable[..., Answer], bool]]:
        """(API key, handler, whether later requests of the connection wait for its answer)."""
        rooms = (MemberHandlers(self.membership), self.metadata_appends)
        for name, handler, blocking in (row for room in rooms for row in room.table()):
            yield p.API_NAMES[name].key, handler, blocking
        for key in p.REPLICA_API_KEYS:
            yield key, self._replica_request, False

    def _replica_request(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        connection.used_by_replica = True
        return later(self._answer_replica(connection, request))

    async def _answer_replica(self, connection: Connection, request: Any) -> Answer:
        return Answer(await self.replicas.answer(connection, request))

    def connection_lost(self, connection: Connection) -> None:
        """A connection has ended that a replica may have fetched by."""
        if connection.used_by_replica:
            self.replicas.connection_closed(connection)
