"""The broker's server: wiring, dispatch, periodic work, start and stop.

Owns: the one event loop's view of a broker.  It joins the rooms (log, topics, groups, access) and
decides nothing itself: requests are answered by the ``handlers_*`` modules.

Threads: the event loop answers requests.  It does no file work, faults no cold memory in and waits
for no lock whose holder does: all of that runs on the threads of `files` and `flusher`.  Periodic
work is coarse: an idle broker does nothing but look at the log once in a while.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kdirect.broker.appends import Appends
from kdirect.broker.config import BrokerConfig, Listener, format_address
from kdirect.broker.connection import Connection, Turns, Waiting
from kdirect.broker.files import FileThreads, make_room_for_descriptors
from kdirect.broker.flusher import Flusher
from kdirect.broker.handlers_cluster import ClusterHandlers
from kdirect.broker.handlers_configs import ConfigHandlers
from kdirect.broker.handlers_data import DataHandlers
from kdirect.broker.handlers_groups import GroupHandlers
from kdirect.broker.handlers_refused import RefusedHandlers
from kdirect.broker.offsets import OffsetStore
from kdirect.broker.request_memory import RequestMemory
from kdirect.broker.topics import INTERNAL_TOPICS, Registry, Topic
from kdirect.broker.waiters import Waiters
from kdirect.errors import BrokerUnavailableError, KdirectError, ProtocolError
from kdirect.format import layout
from kdirect.format import protocol as p
from kdirect.format.protocol import ErrorCode
from kdirect.format.schema import build
from kdirect.log.config import LogConfig
from kdirect.log.manager import LogManager
from kdirect.model import TopicPartition

log = logging.getLogger("kdirect.broker")

STOP_GRACE_SECONDS = 5.0
IDLE_BACKOFF = 10


@dataclass(slots=True)
class Counters:
    """What the server counts; `BrokerServer.statistics` gives them their names in
    `kdirect.metrics`."""

    requests: Counter[str] = field(default_factory=Counter)
    connections_opened: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    appends: int = 0
    append_bytes: int = 0
    append_errors: int = 0
    fetch_waits: int = 0
    cold_fetches: int = 0


class BrokerServer:
    """One broker.  `start` and `stop` on its event loop; `statistics` from any thread."""

    def __init__(self, config: BrokerConfig) -> None:
        self.config = config
        self.counters = Counters()
        self.logs = LogManager(
            config["log.dirs"], LogConfig.from_broker(config), node_id=config["node.id"]
        )
        self.topics = Registry(self.logs)
        self.waiters = Waiters()
        self.flusher = Flusher(self.waiters.notify)
        self.files = FileThreads(self.logs.log_dirs)
        self.appends = Appends(
            on_thread=self.files.for_partition, later=self._later, new_future=self._new_future
        )
        self.appends.appended = self.waiters.notify
        self.offsets = OffsetStore(self.topics, config, self.appends, self.files.admin)
        self.configs = ConfigHandlers(self)
        self.groups = GroupHandlers(self)
        self.data = DataHandlers(self)
        self.cluster = ClusterHandlers(self)
        self.access: Any = None
        self.bound: list[tuple[Listener, str, int]] = []  # listener, host, port it got
        self._handlers: dict[int, tuple[Callable[..., Any], bool]] = {}
        for handlers in (self.data, self.cluster, self.configs, self.groups, RefusedHandlers(self)):
            for name, function, blocking in handlers.table():
                self._handlers[p.API_NAMES[name].key] = (function, blocking)
        self.turns = Turns()
        self._connections: set[Connection] = set()
        self._servers: list[asyncio.Server] = []
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._background: set[asyncio.Task[None]] = set()
        self.memory = RequestMemory(
            config.request_memory,
            lambda seconds, call: asyncio.get_running_loop().call_later(seconds, call),
            time.monotonic,
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._flush_backoff = 1
        self._stopping = False
        self._all_gone = asyncio.Event()

    # -- start and stop ----------------------------------------------------------------------------

    async def start(self) -> None:
        """Open the log, then the listeners.  KdirectError leaves nothing behind."""
        loop = self._loop = asyncio.get_running_loop()
        for name in self.config.ignored:
            log.warning("property %s means nothing to this broker; it is ignored", name)
        make_room_for_descriptors()
        self.logs.open()
        try:
            self.files.start(loop)
            self.waiters.start(loop)
            self.topics.open()
            self._start_access(loop)
            self.groups.restore(self.offsets.load())
            await self.offsets.forget_missing_topics()
            for index, listener in enumerate(self.config.listeners):
                await self._listen(index, listener)
        except BaseException:
            for server in self._servers:
                server.close()
            if self.access is not None:
                self.access.stop()
            self.files.close()
            self.flusher.close()
            try:
                self.logs.close()
            except (KdirectError, OSError) as e:
                log.error("closing the log failed: %s", e)
            raise
        self._every("log.retention.check.interval.ms", self._apply_retention)
        self._every("log.flush.scheduler.interval.ms", self._flush_due)
        self._every("log.flush.offset.checkpoint.interval.ms", self._checkpoint)
        self._every("offsets.retention.check.interval.ms", self._expire_offsets)
        if self.config["connections.max.idle.ms"] > 0:
            self._every("connections.max.idle.ms", self._close_idle)

    def _start_access(self, loop: asyncio.AbstractEventLoop) -> None:
        """RDMA access, where its room is there and not switched off."""
        if not self.config["rdma.transports"]:
            return
        try:
            from kdirect.broker.access import AccessManager
        except ImportError as e:
            log.warning("RDMA access is not available: %s", e)
            return
        self.access = AccessManager(self.logs, self.config, self.appends, self.files)
        self.access.on_append = self.waiters.notify_from_thread
        self.access.server = self
        self.access.start(loop)
        for key in p.ACCESS_API_KEYS:
            # Not one by one: a producer that waits for access may wait for another's answer on the
            # same connection.
            self._handlers[key] = (self._handle_access, False)

    async def _listen(self, index: int, listener: Listener) -> None:
        loop = asyncio.get_running_loop()
        # Every address: both families, but with port 0 they would get two ports.
        host = listener.host or (None if listener.port else "0.0.0.0")
        try:
            server = await loop.create_server(
                lambda: Connection(self, index),
                host,
                listener.port,
                backlog=self.config["socket.listen.backlog.size"],
            )
        except OSError as e:
            raise BrokerUnavailableError(
                f"cannot listen on {format_address(listener.host, listener.port)}: {e.strerror or e}",
                hint="choose another address or port with listeners, or stop what uses it",
            ) from e
        self._servers.append(server)
        name = server.sockets[0].getsockname()
        self.bound.append((listener, name[0], name[1]))

    async def stop(self) -> None:
        """Finish what is under way, then close everything; the next start finds a clean log."""
        if self._stopping:
            return
        self._stopping = True
        for server in self._servers:
            server.close()
        for timer in self._timers.values():
            timer.cancel()
        self.waiters.close()
        self.groups.close()
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
        await self.files.settled(STOP_GRACE_SECONDS)
        if self.access is not None:
            await _on_a_thread(self.access.stop)
        await _on_a_thread(self.files.close)
        await _on_a_thread(self.flusher.close)
        await _on_a_thread(self.logs.close)

    # -- connections -------------------------------------------------------------------------------

    def connection_opened(self, connection: Connection) -> None:
        self.counters.connections_opened += 1
        self._all_gone.clear()
        self._connections.add(connection)

    def connection_lost(self, connection: Connection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._all_gone.set()
        if self.access is not None and connection.used_access:
            self.access.connection_closed(connection)

    def advertised(self, connection: Connection) -> tuple[str, int]:
        """The address to give to a client: that of the listener it came through."""
        if self.config.advertised:
            chosen = self.config.advertised[
                min(connection.listener, len(self.config.advertised) - 1)
            ]
            return chosen.host, chosen.port or self.bound[connection.listener][2]
        listener, host, port = self.bound[connection.listener]
        if listener.host in ("", "0.0.0.0", "::"):
            return connection.local[0].removeprefix("::ffff:") or host, port
        return listener.host, port

    @property
    def bootstrap_servers(self) -> str:
        """``host:port`` of every listener, separated by commas."""
        out = []
        for i, (listener, host, port) in enumerate(self.bound):
            if self.config.advertised:
                chosen = self.config.advertised[min(i, len(self.config.advertised) - 1)]
                host, port = chosen.host, chosen.port or port
            elif listener.host in ("", "0.0.0.0", "::"):
                host = "127.0.0.1"
            out.append(format_address(host, port))
        return ",".join(out)

    # -- requests ----------------------------------------------------------------------------------

    def apis(self) -> list[p.Api]:
        """What is advertised."""
        return [p.APIS[key] for key in self._handlers]

    def dispatch(self, connection: Connection, frame: memoryview) -> Sequence[Any] | Waiting | None:
        """Execute one request: its answer's buffers, a `Waiting` for them, or None where none is
        sent.

        ProtocolError closes the connection: for bytes that are no request, for API keys that we do
        not know and versions that we do not speak, as Kafka does; but for ApiVersions, whose answer
        says what we speak.
        """
        header = p.parse_request_header(frame)
        connection.client_id = header.client_id
        api = header.api
        found = self._handlers.get(header.api_key)
        if api is None or found is None:
            raise ProtocolError(f"API key {header.api_key} is not one that this broker serves")
        self.counters.requests[api.name] += 1
        version = header.api_version
        if not api.low <= version <= api.high:
            if api.key != p.API_VERSIONS:
                raise ProtocolError(
                    f"{api.name} version {version} is not one that this broker serves ({api.low} to {api.high})"
                )
            return [
                p.response_header(api, 0, header.correlation_id),
                self.cluster.versions(ErrorCode.UNSUPPORTED_VERSION).encode(version=0),
            ]
        request = p.decode_request(header, frame)
        handler, blocking = found
        try:
            answer = handler(connection, header, request)
        except KdirectError as e:
            raise ProtocolError(f"{api.name} failed: {e}") from e
        except Exception as e:
            log.exception("%s version %d of %s failed", api.name, version, connection.peer)
            raise ProtocolError(f"{api.name} failed in the broker") from e
        if isinstance(answer, Coroutine):
            return Waiting(answer, partial(self._encode, header), blocking=blocking)
        return self._encode(header, answer)

    def _encode(self, header: p.RequestHeader, answer: Any) -> Sequence[Any] | None:
        if answer is None:  # a Produce that asked for no answer had to wait
            return None
        assert header.api is not None
        head = p.response_header(header.api, header.api_version, header.correlation_id)
        if isinstance(answer, list):
            return [head, *answer]
        return [head, answer.encode(version=header.api_version)]

    def _handle_access(self, connection: Connection, header: p.RequestHeader, request: Any) -> Any:
        if header.api_key == layout.API_GET_PRODUCE_ACCESS and request.topic in INTERNAL_TOPICS:
            return build(
                p.GetProduceAccessResponse, error_code=ErrorCode.INVALID_TOPIC_EXCEPTION, error_message="the topic is the broker's own"
            )  # fmt: skip
        connection.used_access = True
        answer = self.access.handle(connection, request)
        return _result_of(answer) if isinstance(answer, asyncio.Future) else answer

    async def delete_topic(self, topic: Topic) -> None:
        """End access to a topic, delete it, wake who waits for it, forget what groups committed in
        it."""
        partitions = [TopicPartition(topic.name, i) for i in range(topic.partition_count)]
        end_access = (
            self.access.begin_deletion(partitions) if self.access is not None else lambda: None
        )

        def delete() -> None:
            end_access()
            self.topics.delete(topic)

        try:
            await self.files.admin(delete)
        finally:
            if self.access is not None:
                self.access.end_deletion(partitions)
        for tp in partitions:
            self.waiters.notify(tp)
        await self.offsets.forget_topic(topic.name)

    def _later(self, callback: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None
        self._loop.call_soon(callback, *arguments)

    def _new_future(self) -> asyncio.Future[Any]:
        assert self._loop is not None
        return self._loop.create_future()

    # -- periodic work -----------------------------------------------------------------------------

    def _every(self, option: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `work` again and again, `option` milliseconds after it last ended."""
        assert self._loop is not None
        if not self._stopping:
            factor = self._flush_backoff if work == self._flush_due else 1
            self._timers[option] = self._loop.call_later(
                self.config[option] * factor / 1000, self._begin, option, work
            )

    def _begin(self, option: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = asyncio.ensure_future(work())
        self._background.add(task)
        task.add_done_callback(lambda t: self._ended(t, option, work))

    def _ended(
        self, task: asyncio.Task[None], option: str, work: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        self._background.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("periodic work of %s failed", option, exc_info=task.exception())
        self._every(option, work)

    async def _maintain(self, work: Callable[..., Any], *arguments: Any) -> Any:
        if self._stopping:
            return None
        return await self.files.upkeep(work, *arguments)

    async def _apply_retention(self) -> None:
        await self._maintain(self.logs.apply_retention, time.time_ns() // 1_000_000)

    async def _flush_due(self) -> None:
        flushed = await self._maintain(self.logs.flush_due, time.time_ns() // 1_000_000)
        names = {
            "flush.ms",
            "flush.messages",
            "log.flush.interval.ms",
            "log.flush.interval.messages",
        }
        timed = bool(names & self.config.given) or any(
            names & t.configs.keys() for t in self.topics
        )
        # Without a promised time, an idle log is looked at less often.
        self._flush_backoff = 1 if flushed or timed else IDLE_BACKOFF

    async def _checkpoint(self) -> None:
        await self._maintain(self.logs.checkpoint)

    async def _expire_offsets(self) -> None:
        await self.groups.expire_offsets()

    async def _close_idle(self) -> None:
        """Clients that hold RDMA access are silent because they need no broker: they stay."""
        limit = time.monotonic() - self.config["connections.max.idle.ms"] / 1000
        for connection in list(self._connections):
            if (
                connection.last_active < limit
                and not connection.used_access
                and not connection.unanswered
            ):
                log.debug("closing idle connection from %s", connection.peer)
                connection.close("")

    # -- looking -----------------------------------------------------------------------------------

    def statistics(self) -> dict[str, Any]:
        """Counters, by the names of `kdirect.metrics`; callable from any thread."""
        c = self.counters
        out: dict[str, Any] = {
            "broker_requests": sum(c.requests.values()),
            "broker_requests_by_api": dict(c.requests),
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
        if self.access is not None:
            out.update(self.access.statistics())
        return out


async def _result_of(future: asyncio.Future[Any]) -> Any:
    return await future


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
