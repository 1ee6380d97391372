"""The broker's server: wiring, connections, dispatch, start and stop.

Owns: the one event loop's view of a broker.  It joins the rooms (log, topics, groups, access) and
decides nothing itself: requests are answered by the ``handlers_*`` modules, which
`kdirect.broker.handler_rooms` knows; what is done again and again is `kdirect.broker.periodic`.

Threads: the event loop answers requests.  It does no file work, faults no cold memory in and waits
for no lock whose holder does: all of that runs on the threads of `files` and `flusher`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from kdirect.broker.answers import Answer
from kdirect.broker.appends import Appends
from kdirect.broker.changed_properties import ALL_BROKERS, ChangedProperties, Kind, checked
from kdirect.broker.cleaner import LogCleaner
from kdirect.broker.closing import Ending
from kdirect.broker.cluster_view import ClusterLayout, ClusterView
from kdirect.broker.config import BrokerConfig, Listener, format_address
from kdirect.broker.connection import Connection, ConnectionContext, Turns
from kdirect.broker.directory_moves import DirectoryMover
from kdirect.broker.failing_directories import FailingDirectories
from kdirect.broker.files import FileThreads, make_room_for_descriptors
from kdirect.broker.flusher import Flusher
from kdirect.broker.handler_rooms import HandlerRooms
from kdirect.broker.listeners import Listeners
from kdirect.broker.offsets import OffsetStore
from kdirect.broker.periodic import PeriodicWork
from kdirect.broker.request_memory import RequestMemory
from kdirect.broker.services import Counters, Services
from kdirect.broker.topics import Registry, Topic
from kdirect.broker.transaction_store import TransactionStore
from kdirect.broker.waiters import Waiters
from kdirect.errors import BrokerUnavailableError, ConfigError, KdirectError, ProtocolError
from kdirect.format import protocol as p
from kdirect.log.config import LogConfig
from kdirect.log.manager import LogManager
from kdirect.model import TopicPartition
from kdirect.wire.environment import SYSTEM, Environment

log = logging.getLogger("kdirect.broker")

STOP_GRACE_SECONDS = 5.0
LATE_TRANSACTION_MS = 300_000  # as in Kafka: what a transaction may take longer than the longest


class BrokerServer:
    """One broker.  `start` and `stop` on its event loop; `statistics` from any thread.

    `layout`: the cluster that the broker is part of; None: it is alone and leads everything."""

    def __init__(
        self,
        config: BrokerConfig,
        *,
        layout: ClusterLayout | None = None,
        environment: Environment = SYSTEM,
    ) -> None:
        self.config = config
        self.environment = environment
        self.counters = Counters()
        self.logs = LogManager(
            config["log.dirs"],
            LogConfig.from_broker(config),
            node_id=config["node.id"],
            cluster_id=layout.cluster_id if layout is not None else None,
            replicated=bool(config["zookeeper.connect"]),
        )
        # None: the broker is alone, or has a layout.
        self.member = self._as_member(layout)
        self.properties = self._changed_properties()
        self.view: ClusterView
        self.topics: Registry
        if self.member is not None:
            self.view, self.topics = self.member.view, self.member.topics
        else:
            self.view = ClusterView(
                config["node.id"],
                cluster_id=lambda: self.logs.cluster_id,
                local_epoch=self._local_epoch,
                layout=layout,
            )
            self.topics = Registry(self.logs, self.view, environment)
        self.listeners = Listeners(config.advertised)
        self.waiters = Waiters()
        self.flusher = Flusher(self.waiters.notify)
        self.files = FileThreads(self.logs.log_dirs, environment)
        self.files.failed = self.flusher.failed = self.logs.look_into
        self.directories = FailingDirectories(self.logs, self.member, self._end_access)
        self.appends = Appends(
            on_thread=self.files.for_partition, later=self._later, new_future=self._new_future
        )
        self.appends.appended = self.waiters.notify
        self.offsets = OffsetStore(self.topics, config, self.appends, self.files.admin)
        self.access: Any = self._rdma_access()
        self.remote: Any = self._remote_storage(layout)
        self.memory = RequestMemory(
            config.request_memory,
            lambda seconds, call: asyncio.get_running_loop().call_later(seconds, call),
            environment.monotonic,
        )
        self.handlers = self._open_handlers()
        self._context = self._connection_context()
        self.groups = self.handlers.groups
        self._connections: set[Connection] = set()
        self._servers: list[asyncio.Server] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = False
        self._make_upkeep(environment)
        self._all_gone = asyncio.Event()

    def _make_upkeep(self, environment: Environment) -> None:
        self.cleaner = LogCleaner(self.config, self.logs, environment.time_ms)
        self.config.on_change.append(self.cleaner.reconfigure)
        self.mover.on_moved = self.cleaner.moved
        self._periodic = PeriodicWork(self.config, environment, self.logs, self.files, self.topics)

    def _changed_properties(self) -> ChangedProperties:
        """Of a broker that is alone they are in its files, of others in the store."""
        if self.member is None:
            return ChangedProperties(self.logs.log_dirs[0])
        found: ChangedProperties = self.member.properties
        return found

    def _as_member(self, layout: ClusterLayout | None) -> Any:
        """The `Member`, where zookeeper.connect names the cluster; else None, and nothing of a
        cluster is loaded."""
        if not self.config["zookeeper.connect"]:
            return None
        if layout is not None:
            raise ConfigError(
                "a broker with zookeeper.connect has no layout",
                hint="leave one of them out: the metadata store says who leads what",
            )
        from kdirect.broker.member import Member

        return Member(self.config, self.logs, self.environment)

    def _rdma_access(self) -> Any:
        """The AccessManager, where RDMA is not switched off; else None."""
        if not self.config["rdma.transports"]:
            return None
        try:
            from kdirect.broker.access import AccessManager
        except ImportError as e:
            log.warning("RDMA access is not available: %s", e)
            return None
        access = AccessManager(
            self.logs,
            self.config,
            self.appends,
            self.files,
            self.view,
            environment=self.environment,
        )
        access.on_append = self.waiters.notify_from_thread
        return access

    def _remote_storage(self, layout: ClusterLayout | None) -> Any:
        """The RemoteStorage, where tiered storage is switched on; else None, and nothing of it is
        loaded."""
        if not self.config["remote.log.storage.system.enable"]:
            return None
        made: Any
        if self.member is None:
            from kdirect.broker.remote_storage import RemoteStorage

            made = RemoteStorage
        else:
            from kdirect.broker.member_remote import MemberRemoteStorage

            made = MemberRemoteStorage
        return made(
            self.config,
            self.logs,
            self.topics,
            self.appends,
            self.flusher,
            self.files,
            address=lambda: self.listeners.bootstrap_servers,
            scope="" if layout is None else f"{self.config['node.id']}/",
        )

    def _connection_context(self) -> ConnectionContext:
        return ConnectionContext(
            dispatch=self.dispatch,
            opened=self._connection_opened,
            lost=self._connection_lost,
            memory=self.memory,
            turns=Turns(self.environment),
            counters=self.counters,
            environment=self.environment,
            max_request_bytes=self.config["socket.request.max.bytes"],
            max_in_flight=self.config["queued.max.requests"],
            plain=self.handlers.plain,
        )

    def _open_handlers(self) -> HandlerRooms:
        """Build what answers requests."""
        services = self._services()
        if self.member is not None:
            self.member.bind(
                appends=self.appends,
                waiters=self.waiters,
                access=self.access,
                remove=self._end_access,
            )
            self.flusher.on_flushed = self.member.flushed
        return HandlerRooms(
            services,
            member=self.member,
            access=self.access,
            remote=self.remote,
            delete_topic=self.delete_topic,
        )

    def _services(self) -> Services:
        """What handlers work with."""
        member = self.member
        replicas = None if member is None else member.make_replicas(self.files)
        self.mover = DirectoryMover(self.config, self.logs)
        self.mover.replicas = None if member is None else member.halts
        return Services(
            config=self.config,
            environment=self.environment,
            counters=self.counters,
            listeners=self.listeners,
            cluster=self.view,
            logs=self.logs,
            topics=self.topics,
            properties=self.properties,
            files=self.files,
            mover=self.mover,
            flusher=self.flusher,
            waiters=self.waiters,
            offsets=self.offsets,
            transactions=TransactionStore(self.topics, self.config, self.appends, self.files.admin),
            appender=self.appends if self.access is None else self.access.produce,
            watch=_watch_nothing if self.access is None else self.access.watch,
            membership=None if member is None else member.membership,
            replicas=replicas,
            remote_reads=None if self.remote is None else self.remote.reads(),
        )

    def _local_epoch(self, tp: TopicPartition) -> int | None:
        partition = self.logs.partitions.get(tp)
        return None if partition is None else partition.leader_epoch

    # -- start and stop ----------------------------------------------------------------------------

    async def start(self) -> None:
        """Open the log, then the listeners.  KdirectError leaves nothing behind."""
        loop = self._loop = asyncio.get_running_loop()
        self.directories.start(loop)
        for name in self.config.ignored:
            log.warning("property %s means nothing to this broker; it is ignored", name)
        make_room_for_descriptors()
        if self.member is not None:
            await self.member.connect()
        try:
            self._load_properties()
            self.logs.open()
        except BaseException:
            if self.member is not None:
                await self.member.leave()
            raise
        try:
            self.files.start(loop)
            self.waiters.start(loop)
            self.topics.open()
            if self.access is not None:
                self.access.context = self._context
                self.access.start(loop)
            if self.remote is not None:
                await self.remote.start()
            await self.groups.start()
            self.handlers.transactions.start()
            for index, listener in enumerate(self.config.listeners):
                await self._listen(index, listener)
            if self.member is not None:
                await self.member.join(self.listeners)
            elif self.remote is not None:
                self.remote.serving()
        except BaseException:
            await self._end_start()
            raise
        self.cleaner.start()
        self.mover.start(loop)
        self._periodic.start(loop, self.groups.expire_offsets, self._close_idle)

    def _load_properties(self) -> None:
        """Go on with the properties that were changed in an earlier run; ConfigError names one that
        the broker cannot have any more."""
        self.properties.load()
        if self.member is not None:
            return  # the store has them: see `Member.join`
        names = (ALL_BROKERS, str(self.config["node.id"]))
        found = [checked(Kind.BROKER, self.properties.of(Kind.BROKER, n)) for n in names]
        if any(found):
            self.config.change(self.config.changed_by(*found))
            self.logs.reconfigure(LogConfig.from_broker(self.config))

    async def _end_start(self) -> None:
        """The broker cannot start: close what was opened.  Errors are logged."""
        ending = Ending("a broker that cannot start")
        if self.member is not None:
            await ending.wait(self.member.leave())
        for server in self._servers:
            ending.step(server.close)
        if self.access is not None:
            ending.step(self.access.stop)
        if self.remote is not None:
            ending.step(self.remote.close)
        for close in (
            self.mover.stop,
            self.cleaner.stop,
            self.files.close,
            self.flusher.close,
            self.logs.close,
        ):
            ending.step(close)
        try:
            ending.tell()
        except Exception as e:
            log.error("a broker that cannot start did not end in order: %s", e)

    async def _listen(self, index: int, listener: Listener) -> None:
        loop = asyncio.get_running_loop()
        # No host means every address of both families; with port 0 these would get two ports.
        host = listener.host or (None if listener.port else "0.0.0.0")
        try:
            server = await loop.create_server(
                lambda: Connection(self._context, index),
                host,
                listener.port,
                backlog=self.config["socket.listen.backlog.size"],
            )
        except OSError as e:
            raise BrokerUnavailableError(
                f"cannot listen on {format_address(listener.host, listener.port)}:"
                f" {e.strerror or e}",
                hint="choose another address or port with listeners, or stop what uses it",
            ) from e
        self._servers.append(server)
        name = server.sockets[0].getsockname()
        self.listeners.add(listener, name[0], name[1])

    async def stop(self) -> None:
        """Finish what is under way, then close everything; the next start finds a clean log.
        Listeners end first, then who is served, then what they are served by.  What fails to end
        keeps nothing else open; the first error is raised once all is closed."""
        if self._stopping:
            return
        self._stopping = True
        self.directories.stop()
        self._periodic.stop()
        ending = Ending("the broker")
        if self.member is not None:
            await ending.wait(self.member.leave_in_order())
        for server in self._servers:
            ending.step(server.close)
        ending.step(self.waiters.close)
        ending.step(self.groups.close)
        ending.step(self.handlers.transactions.close)
        if self.member is not None:
            ending.step(self.member.metadata_appends.close)
            if self.remote is not None:
                ending.step(self.remote.leave)
        await ending.wait(self._end_connections())
        await ending.wait(_on_a_thread(self.mover.stop))
        if self.member is not None:
            await ending.wait(self.member.leave())
        under_way = [*self.directories.tasks, *self._periodic.tasks]
        if under_way:  # a directory that fails is let go, say
            await asyncio.wait(under_way, timeout=STOP_GRACE_SECONDS)
        await self.files.settled(STOP_GRACE_SECONDS)
        if self.access is not None:
            await ending.wait(_on_a_thread(self.access.stop))
        if self.remote is not None:
            await ending.wait(_on_a_thread(self.remote.close))
        await ending.wait(_on_a_thread(self.cleaner.stop))
        await ending.wait(_on_a_thread(self.files.close))
        await ending.wait(_on_a_thread(self.flusher.close))
        await ending.wait(_on_a_thread(self.logs.close))
        ending.tell()

    async def _end_connections(self) -> None:
        """Let requests be answered, but for no longer than a moment, and close."""
        under_way = [task for c in self._connections for task in c.tasks]
        if under_way:
            await asyncio.wait(under_way, timeout=STOP_GRACE_SECONDS)
        for connection in list(self._connections):
            connection.close("")
        if self._connections:
            try:
                await asyncio.wait_for(self._all_gone.wait(), STOP_GRACE_SECONDS)
            except asyncio.TimeoutError:
                log.warning("%d clients did not take their answers in time", len(self._connections))
                for connection in list(self._connections):
                    connection.abort()

    # -- connections -------------------------------------------------------------------------------

    def _connection_opened(self, connection: Connection) -> None:
        self.counters.connections_opened += 1
        self._all_gone.clear()
        self._connections.add(connection)

    def _connection_lost(self, connection: Connection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._all_gone.set()
        if self.access is not None and connection.used_access:
            self.access.connection_closed(connection)
        if self.member is not None:
            self.member.connection_lost(connection)

    async def _close_idle(self) -> None:
        """Clients that hold RDMA access are silent because they need no broker: they stay."""
        idle_seconds = self.config["connections.max.idle.ms"] / 1000
        limit = self.environment.monotonic() - idle_seconds
        for connection in list(self._connections):
            if (
                connection.last_active < limit
                and not connection.used_access
                and not connection.unanswered
            ):
                log.debug("closing idle connection from %s", connection.peer)
                connection.close("")

    @property
    def bootstrap_servers(self) -> str:
        """``host:port`` of every listener, separated by commas."""
        return self.listeners.bootstrap_servers

    # -- requests ----------------------------------------------------------------------------------

    def dispatch(self, connection: Connection, frame: memoryview) -> Answer:
        """Execute one request.

        ProtocolError closes the connection: for bytes that are no request, for API keys that this
        broker does not know and versions that it does not speak, as Kafka does.  ApiVersions alone
        is answered in any version: its answer says what this broker speaks.
        """
        header = p.parse_request_header(frame)
        connection.client_id = header.client_id
        api = header.api
        found = self.handlers.by_key.get(header.api_key)
        if api is None or found is None:
            raise ProtocolError(f"API key {header.api_key} is not one that this broker serves")
        self.counters.requests[api.name] += 1
        version = header.api_version
        if not api.low <= version <= api.high:
            if api.key != p.API_VERSIONS:
                raise ProtocolError(
                    f"{api.name} version {version} is not one that this broker serves"
                    f" ({api.low} to {api.high})"
                )
            answer = Answer([self.handlers.versions.unsupported_version()])
            answer.header = p.response_header(api, 0, header.correlation_id)
            return answer
        request = p.decode_request(header, frame)
        handler, blocking = found
        try:
            if self.member is not None and self.member.must_wait(header.api_key):
                answer = self.member.when_joined(partial(handler, connection, header, request))
            else:
                answer = handler(connection, header, request)
        except KdirectError as e:
            raise ProtocolError(f"{api.name} failed: {e}") from e
        except Exception as e:
            log.exception("%s version %d of %s failed", api.name, version, connection.peer)
            raise ProtocolError(f"{api.name} failed in the broker") from e
        answer.header = p.response_header(api, version, header.correlation_id)
        answer.blocking = blocking
        return answer

    async def delete_topic(self, topic: Topic) -> None:
        """End access to a topic, delete it, wake the fetches that wait for it, and forget what
        groups have committed in it."""
        partitions = [TopicPartition(topic.name, i) for i in range(topic.partition_count)]
        await self._end_access(partitions, partial(self.topics.delete, topic))
        if self.remote is not None:
            await self.remote.topic_deleted(topic)
            if self.topics.get(topic.name) is topic:
                await self.files.admin(self.topics.forget_deleted, topic)
        await self.offsets.forget_topic(topic.name)

    async def _end_access(
        self, partitions: list[TopicPartition], remove: Callable[[], Any]
    ) -> None:
        """End access to partitions, have the admin thread remove them, and wake the fetches that
        wait for them."""
        end_access = (
            self.access.begin_deletion(partitions) if self.access is not None else lambda: None
        )

        def delete() -> None:
            end_access()
            remove()

        try:
            await self.files.admin(delete)
        finally:
            if self.access is not None:
                self.access.end_deletion(partitions)
        for tp in partitions:
            self.waiters.notify(tp)

    # -- appends -----------------------------------------------------------------------------------

    def _later(self, callback: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None
        self._loop.call_soon(callback, *arguments)

    def _new_future(self) -> asyncio.Future[Any]:
        assert self._loop is not None
        return self._loop.create_future()

    # -- looking -----------------------------------------------------------------------------------

    def statistics(self) -> dict[str, Any]:
        """Counters, by the names of `kdirect.metrics`; callable from any thread."""
        c = self.counters
        out: dict[str, Any] = {
            "broker_requests": sum(c.requests.values()),
            "broker_requests_by_api": dict(c.requests),
            "broker_fetch_sessions": len(self.handlers.fetch_sessions.sessions),
            "broker_plain_requests": 0
            if self.handlers.plain is None
            else self.handlers.plain.served,
            "broker_connections": len(self._connections),
            "broker_connections_opened": c.connections_opened,
            "broker_bytes_in": c.bytes_in,
            "broker_bytes_out": c.bytes_out,
            "broker_appends": c.appends,
            "broker_append_bytes": c.append_bytes,
            "broker_append_errors": c.append_errors,
            "broker_fetch_waits": c.fetch_waits,
            "broker_request_bytes": self.memory.used,
            "broker_request_waits": self.memory.waits,
            "broker_cold_fetches": c.cold_fetches,
            "broker_flushes": self.flusher.flushes,
            "broker_topics": len(self.topics),
            "broker_groups": len(self.groups.coordinator.groups),
        }
        out.update(self.logs.statistics())
        late_ms = self.config["transaction.max.timeout.ms"] + LATE_TRANSACTION_MS
        out["log_late_transactions"] = self.logs.late_transactions(
            self.environment.time_ms() - late_ms
        )
        out.update(self.cleaner.statistics())
        out.update(self.mover.statistics())
        if self.member is not None:
            out.update(self.member.statistics())
        if self.access is not None:
            out.update(self.access.statistics())
        if self.remote is not None:
            out.update(self.remote.statistics())
        return out


def _watch_nothing(tp: TopicPartition) -> None:
    """Without RDMA nobody commits but this event loop, which notifies the waiters itself."""


async def _on_a_thread(work: Callable[[], object]) -> None:
    """Wait for `work` on a thread of its own: executors take nothing any more when a broker is
    stopped while the interpreter exits."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def run() -> None:
        try:
            work()
        except BaseException as e:
            loop.call_soon_threadsafe(done.set_exception, e)
        else:
            loop.call_soon_threadsafe(done.set_result, None)

    threading.Thread(target=run, name="kdirect-stop", daemon=True).start()
    await done
