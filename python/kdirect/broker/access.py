"""Who may touch which memory: queue pairs, grants, metadata slots (KafkaDirect §4.2.2, §4.4.2).

Owns: the broker's side of every RDMA client.  A client opens a queue pair over its TCP connection
(its own protection domain with it), then asks for access to files.  Nothing here touches records:
the produce worker commits, the kernel updates slots, the RNIC (or its software) moves the bytes.
Who may write what is decided in `kdirect.broker.produce_access`.

Invariants:

- A produce grant covers the head file from its tail on; consume regions and slots are remote-read
  only.
- Keys end before the memory behind them changes its meaning: `deregister` comes first, then the
  tail is cleared or, where a client did not leave in time, the head moves to a fresh file.
- Memory: a grant holds its segment (`Segment.acquire`) from grant to release.  A client's slot
  region belongs to the client's `Peer` and outlives its attachment to any kernel.

All methods run on the broker's event loop, except where said.  The produce worker's callbacks
arrive on its thread and only schedule.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kdirect.broker.appends import Appends
from kdirect.broker.cluster_view import ClusterView
from kdirect.broker.connection import ConnectionContext
from kdirect.broker.engine import Engine, open_transport
from kdirect.broker.failures import explain
from kdirect.broker.files import FileThreads
from kdirect.broker.grants import (
    INVALID_REQUEST,
    NOT_LEADER_OR_FOLLOWER,
    OFFSET_OUT_OF_RANGE,
    STORAGE_ERROR,
    UNKNOWN_SERVER_ERROR,
    UNKNOWN_TOPIC_OR_PARTITION,
    Grant,
    GrantTable,
    Peer,
)
from kdirect.broker.head_access import DEREGISTER_MS, HeadAccess
from kdirect.broker.produce_access import ProduceAccess, Waiting
from kdirect.broker.two_sided import (
    LEAST_MESSAGE_BYTES,
    MAX_RECEIVES,
    MessageConnection,
    MessageService,
)
from kdirect.broker.worker import CutReason
from kdirect.errors import (
    AccessDeniedError,
    KdirectError,
    RdmaError,
    RefusedError,
    StorageFullError,
    TransportError,
)
from kdirect.format import layout
from kdirect.format import protocol as p
from kdirect.format.batch import crc32c
from kdirect.log.manager import LogManager
from kdirect.log.partition import Partition
from kdirect.log.segment import Segment
from kdirect.model import EARLIEST_OFFSET, LATEST_OFFSET, TopicPartition
from kdirect.rdma.contract import Access, Memory

log = logging.getLogger("kdirect.broker.rdma")

PING_BYTES = 64
MAX_CLIENT_RECEIVES = 1 << 16
RELEASED_AT_ONCE = 16


@dataclass(eq=False, slots=True)
class OpenedFile:
    """A file for a reader, opened on a thread: acquired, its memory registered, the position of
    `wanted` known.  `segment` is None where the partition has no head file yet, `region` where only
    a slot is asked for."""

    partition: Partition
    segment: Segment | None
    wanted: int
    with_slot: bool
    position: int = 0  # of the batch that holds `wanted`
    base: int = -1  # its base offset
    region: Any = None


class AccessManager:
    """See the module.  `config` maps property names of the BROKER table to values.  Without
    `files`, what belongs on a thread is done on the spot; without `cluster`, this broker leads
    everything."""

    def __init__(
        self,
        log_manager: LogManager,
        config: Mapping[str, Any],
        appends: Appends,
        files: FileThreads | None = None,
        cluster: ClusterView | None = None,
    ) -> None:
        self._logs = log_manager
        self._cluster = cluster
        self._config = config
        self._consume_enabled = bool(config["rdma.consume"])
        self._transports = frozenset(config["rdma.transports"])
        self._max_in_flight = int(config["rdma.max.in.flight"])
        self._slots_per_consumer = int(config["rdma.slots.per.consumer"])
        self._produce_enabled = bool(config["rdma.produce"])
        self.on_append: Callable[[TopicPartition], None] | None = None
        self.context: ConnectionContext | None = None  # takes the requests of two-sided clients
        self._loop: asyncio.AbstractEventLoop | None = None
        self._engines: dict[str, Engine] = {}
        self._opening: dict[str, asyncio.Task[Engine]] = {}
        self._peers: dict[int, Peer] = {}
        self._by_qp: dict[tuple[str, int], Peer] = {}
        self._files = files
        release = files.release if files is not None else Segment.release
        self._grants = GrantTable(release, self._in_background)
        self._watched: set[TopicPartition] = set()
        self._ending: dict[tuple[TopicPartition, ...], list[HeadAccess]] = {}
        self.produce = ProduceAccess(
            log_manager, self._grants, config, appends=appends, later=self._later, call_later=self._call_later, new_future=self._new_future,
            appended=self._tell_appended, watched=self._watched,
        )  # fmt: skip
        self._next_connection_id = int.from_bytes(os.urandom(4), "big")
        self._requests = 0
        self._cuts = 0

    # -- life --------------------------------------------------------------------------------------

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Bind to the event loop.  A transport's device, queues and worker start with its first
        client."""
        self._loop = loop

    def stop(self) -> None:
        """Cut every client, end every grant and the workers.  Any thread: nothing is scheduled on
        the loop from here on."""
        self._loop = None
        self.produce.stopping = True
        for peer in list(self._peers.values()):
            self._close_peer(peer)
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()

    async def _engine(self, transport: str) -> Engine:
        """The engine of a transport, opened with its first client: a device takes its time, and
        verbs try the log's files."""
        task = self._opening.get(transport)
        if task is None or (task.done() and task.exception() is not None):
            task = self._opening[transport] = asyncio.ensure_future(self._start_engine(transport))
        return await asyncio.shield(task)

    async def _start_engine(self, transport: str) -> Engine:
        engine = await self._on_read_thread(self._open_engine, transport)
        if self._loop is None:
            engine.close()
            raise RefusedError(layout.ERROR_TRANSPORT_UNAVAILABLE, "the broker is stopping")
        self._engines[transport] = engine
        return engine

    def _open_engine(self, transport: str) -> Engine:
        engine = Engine(
            transport,
            open_transport(transport, self._config, self._logs.log_dirs),
            spin_us=int(self._config["rdma.spin.us"]),
            on_cut=lambda transport, qp_num, reason: self._later(
                self._finish_cut, transport, qp_num, reason
            ),
            on_append=self._appended,
            on_head=lambda head: self._later(self.produce.on_head, head),
            on_own=lambda head, answers: self._later(self.produce.on_own, head, answers),
            sync=self._sync,
        )
        engine.start()
        return engine

    def _later(self, callback: Callable[..., None], *args: Any) -> None:
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(callback, *args)

    def _call_later(self, seconds: float, callback: Callable[..., None], *args: Any) -> None:
        if self._loop is not None:
            self._loop.call_later(seconds, callback, *args)

    def _in_background(self, work: Callable[[], Any]) -> None:
        """Do what may take a moment, and what nobody waits for."""
        if self._files is None or self._loop is None:
            work()
        else:
            self._files.background(work)

    async def _on_read_thread(self, work: Callable[..., Any], *args: Any) -> Any:
        return work(*args) if self._files is None else await self._files.read(work, *args)

    def _new_future(self) -> asyncio.Future[Any]:
        assert self._loop is not None
        return self._loop.create_future()

    def _tell_appended(self, tp: TopicPartition) -> None:
        if self.on_append is not None:
            self._watched.discard(tp)
            self.on_append(tp)

    # -- the worker's thread -----------------------------------------------------------------------

    def _appended(self, file_id: int) -> None:
        grant = self._grants.get(file_id)
        if grant is not None:
            self._tell_appended(grant.partition.topic_partition)

    def _sync(self, file_id: int) -> None:
        grant = self._grants.get(file_id)
        if grant is not None:
            grant.partition.flush()

    # -- requests ----------------------------------------------------------------------------------

    def handle(self, connection: Hashable, request: Any) -> Any:
        """Answer one of kdirect's four requests (API keys 32001 to 32004): the response, or a
        future of it."""
        self._requests += 1
        handler, response = {
            layout.API_OPEN_QUEUE_PAIR: (self._open_queue_pair, p.OpenQueuePairResponse),
            layout.API_GET_PRODUCE_ACCESS: (self._get_produce_access, p.GetProduceAccessResponse),
            layout.API_GET_CONSUME_ACCESS: (self._get_consume_access, p.GetConsumeAccessResponse),
            layout.API_RELEASE_ACCESS: (self._release_access, p.ReleaseAccessResponse),
        }[request.API_KEY]
        try:
            fields = handler(connection, request)
        except (KdirectError, OSError) as e:  # no descriptor is left, say
            fields = self._failed(connection, request, e)
        if isinstance(fields, Waiting):
            return self._answer_later(response, fields)
        if isinstance(fields, Coroutine):
            return self._answer_when_done(response, connection, request, fields)
        return response(**{**_EMPTY[response], "error_code": 0, "error_message": None, **fields})

    async def _answer_when_done(
        self,
        response: Any,
        connection: Hashable,
        request: Any,
        work: Coroutine[Any, Any, dict[str, Any]],
    ) -> Any:
        try:
            fields = await work
        except (KdirectError, OSError) as e:
            fields = self._failed(connection, request, e)
        return response(**{**_EMPTY[response], "error_code": 0, "error_message": None, **fields})

    def _failed(
        self, connection: Hashable, request: Any, error: KdirectError | OSError
    ) -> dict[str, Any]:
        """The fields of the answer to a request that failed."""
        if isinstance(error, RefusedError):
            code = error.code
        elif isinstance(error, StorageFullError):
            code = STORAGE_ERROR
        else:
            # What cannot be registered can still be had over TCP.
            code = (
                layout.ERROR_ACCESS_DISABLED
                if isinstance(error, RdmaError)
                else UNKNOWN_SERVER_ERROR
            )
            log.warning(
                "%s of %s failed: %s",
                type(request).__name__,
                getattr(connection, "peer", connection),
                error,
            )
        return {"error_code": code, "error_message": str(error)}

    def _answer_later(self, response: Any, waiting: Waiting) -> asyncio.Future[Any]:
        future = self._new_future()

        def answer(outcome: Any) -> None:
            if future.done():  # the client is gone
                return
            refused = isinstance(outcome, RefusedError)
            fields = (
                {"error_code": outcome.code, "error_message": str(outcome)}
                if refused
                else {**outcome, "error_code": 0}
            )
            future.set_result(response(**{**_EMPTY[response], "error_message": None, **fields}))

        waiting.answer = answer
        return future

    def _get_produce_access(self, connection: Hashable, request: Any) -> dict[str, Any] | Waiting:
        return self.produce.request(
            self._peer(connection, request.connection_id),
            self._partition(request.topic, request.partition),
            request,
        )

    def append(self, partition: Partition, records: Any, now_ms: int | None = None) -> Any:
        """See ProduceAccess.append."""
        return self.produce.append(partition, records, now_ms)

    def _peer(self, connection: Hashable, connection_id: int) -> Peer:
        peer = self._peers.get(connection_id)
        if peer is None or peer.connection is not connection:
            raise RefusedError(
                layout.ERROR_UNKNOWN_CONNECTION,
                f"queue pair {connection_id} is not open on this connection; open it again",
            )
        return peer

    def _partition(self, topic: str, index: int) -> Partition:
        if self._cluster is not None and not self._cluster.leads(topic):
            raise RefusedError(
                NOT_LEADER_OR_FOLLOWER,
                f"broker {self._cluster.leader_of(topic)} leads {topic}-{index}; ask for metadata",
            )
        partition = self._logs.partitions.get(TopicPartition(topic, index))
        if partition is None:
            raise RefusedError(
                UNKNOWN_TOPIC_OR_PARTITION,
                f"partition {topic}-{index} does not exist; create the topic or check the name",
            )
        return partition

    def _open_queue_pair(
        self, connection: Hashable, request: Any
    ) -> dict[str, Any] | Coroutine[Any, Any, dict[str, Any]]:
        if request.transport not in self._transports:
            offered = ", ".join(sorted(self._transports)) or "none"
            raise RefusedError(
                layout.ERROR_TRANSPORT_UNAVAILABLE,
                f"transport {request.transport!r} is not offered here; offered: {offered}",
            )
        if not 1 <= request.max_recv <= MAX_CLIENT_RECEIVES:
            raise RefusedError(
                INVALID_REQUEST,
                f"MaxRecv {request.max_recv} is out of range; give 1 to {MAX_CLIENT_RECEIVES}",
            )
        engine = self._engines.get(request.transport)
        if engine is None:
            return self._open_first(connection, request)
        return self._open_pair(connection, request, engine)

    async def _open_first(self, connection: Hashable, request: Any) -> dict[str, Any]:
        """The first queue pair of a transport."""
        try:
            engine = await self._engine(request.transport)
        except (TransportError, RdmaError) as e:
            log.warning("transport %s cannot be offered: %s", request.transport, e)
            raise RefusedError(
                layout.ERROR_TRANSPORT_UNAVAILABLE,
                f"the broker cannot offer {request.transport}: {e}",
            ) from e
        return self._open_pair(connection, request, engine)

    def _open_pair(self, connection: Hashable, request: Any, engine: Engine) -> dict[str, Any]:
        if request.message_bytes:
            return self._open_messages(connection, request, engine)
        domain = engine.device.alloc_pd()
        try:
            # One more than the client may use: a notice of revocation is not an answer to a
            # request.
            qp = domain.create_qp(
                engine.send_cq,
                engine.recv_cq,
                max_send_wr=min(request.max_recv, 4096),
                max_recv_wr=self._max_in_flight,
                max_send_bytes=4096,
            )
            ping_memory = Memory.anonymous(PING_BYTES, "kdirect-ping")
            proof = os.urandom(PING_BYTES)
            memoryview(ping_memory)[:PING_BYTES] = proof
            ping = domain.register(ping_memory, Access.REMOTE_READ, 0, PING_BYTES)
            slot_memory = Memory.anonymous(
                self._slots_per_consumer * layout.SLOT_BYTES, "kdirect-slots"
            )
            slot_region = domain.register(slot_memory, Access.REMOTE_READ)
            qp.connect(bytes(request.address), active=False)
            # Ends with the domain, after the worker has forgotten the queue pair.
            notices = Memory.anonymous(self._max_in_flight * layout.NOTICE_BYTES, "kdirect-notices")
            engine.worker.add_peer(
                qp, self._max_in_flight, domain.register(notices, Access.LOCAL_WRITE)
            )
        except BaseException:
            domain.close()
            raise
        self._next_connection_id += 1
        peer = Peer(
            connection_id=self._next_connection_id,
            connection=connection,
            client=str(getattr(connection, "client_id", None) or "?"),
            engine=engine,
            domain=domain,
            qp=qp,
            max_in_flight=self._max_in_flight,
            ping=ping,
            slot_memory=slot_memory,
            slot_region=slot_region,
        )
        self._peers[peer.connection_id] = peer
        self._by_qp[engine.transport, qp.qp_num] = peer
        log.debug("queue pair %d opened for %s over %s", qp.qp_num, peer.client, request.transport)
        return {
            "connection_id": peer.connection_id,
            "address": qp.address,
            "max_in_flight": self._max_in_flight,
            "ping_address": ping.address,
            "ping_rkey": ping.rkey,
            "ping_crc": crc32c(proof),
        }

    def _open_messages(self, connection: Any, request: Any, engine: Engine) -> dict[str, Any]:
        """A queue pair for requests in SENDs."""
        memory = int(self._config["rdma.message.memory.bytes"])
        most = min(memory, int(self._config["socket.request.max.bytes"]))
        context = self.context
        if context is None or self._loop is None or not self._produce_enabled:
            raise RefusedError(
                layout.ERROR_ACCESS_DISABLED, "requests in SENDs are not taken here; use TCP"
            )
        if not LEAST_MESSAGE_BYTES <= request.message_bytes <= most:
            raise RefusedError(
                layout.ERROR_ACCESS_DISABLED,
                f"messages of {request.message_bytes} bytes are not taken: {LEAST_MESSAGE_BYTES} to {most} are;"
                " lower batch.bytes, or raise rdma.message.memory.bytes on the broker",
            )
        count = max(1, min(request.max_recv, MAX_RECEIVES, memory // request.message_bytes))
        bound = context.memory.limit
        if 0 <= bound < context.memory.used + count * request.message_bytes:
            raise RefusedError(
                layout.ERROR_ACCESS_DISABLED,
                f"{count * request.message_bytes} bytes for requests in SENDs would be over queued.max.request.bytes ({bound}); use TCP",
            )
        if engine.messages is None:
            engine.messages = MessageService(engine.device, self._loop)
        domain = engine.device.alloc_pd()
        try:
            link = MessageConnection(
                context,
                connection,
                engine.messages,
                domain,
                message_bytes=request.message_bytes,
                count=count,
            )
            ping_memory = Memory.anonymous(PING_BYTES, "kdirect-ping")
            proof = os.urandom(PING_BYTES)
            memoryview(ping_memory)[:PING_BYTES] = proof
            ping = domain.register(ping_memory, Access.REMOTE_READ, 0, PING_BYTES)
            link.open(bytes(request.address))
        except BaseException:
            domain.close()
            raise
        self._next_connection_id += 1
        return {
            "connection_id": self._next_connection_id,
            "address": link.qp.address,
            "max_in_flight": count,
            "ping_address": ping.address,
            "ping_rkey": ping.rkey,
            "ping_crc": crc32c(proof),
        }

    # -- consume -----------------------------------------------------------------------------------

    async def _get_consume_access(self, connection: Hashable, request: Any) -> dict[str, Any]:
        if not self._consume_enabled:
            raise RefusedError(
                layout.ERROR_ACCESS_DISABLED,
                "RDMA consume is switched off on this broker (rdma.consume=false); use TCP",
            )
        peer = self._peer(connection, request.connection_id)
        answers: list[dict[str, Any]] = []
        for target in request.partitions:
            finished = peer.grants.get(target.finished_file_id)
            if finished is not None and not finished.is_produce:
                self._release(finished)
        opened = deque(await self._opened(peer, request.partitions))
        try:
            for target in request.partitions:
                answers.append(await self._grant_read(peer, target, opened.popleft()))
        finally:
            for file in opened:  # the client is gone
                self._close_file(file)
        return {
            "slot_address": peer.slot_region.address,
            "slot_rkey": peer.slot_region.rkey,
            "slot_count": self._slots_per_consumer,
            "partitions": [
                p.GetConsumeAccessResponse.ConsumeGrant(**{**_EMPTY_GRANT, **a}) for a in answers
            ],
        }

    async def _opened(self, peer: Peer, targets: Sequence[Any]) -> list[OpenedFile | KdirectError]:
        """`_open_files` on a thread; what it opens for a client that goes meanwhile is closed."""
        task = asyncio.ensure_future(self._on_read_thread(self._open_files, peer, targets))
        try:
            return await asyncio.shield(task)  # type: ignore[no-any-return]
        except asyncio.CancelledError:
            task.add_done_callback(self._close_files)
            raise

    def _close_files(self, opened: asyncio.Task[list[OpenedFile | KdirectError]]) -> None:
        for file in opened.result() if not opened.cancelled() else ():
            self._close_file(file)

    async def _grant_read(
        self, peer: Peer, target: Any, file: OpenedFile | KdirectError
    ) -> dict[str, Any]:
        """The answer for one partition; a file that is not the right one any more is opened again."""
        name = f"{target.topic}-{target.partition}"
        try:
            for _ in range(16):
                if isinstance(file, KdirectError):
                    raise file
                answer = self._grant_file(peer, file)
                if answer is not None:
                    return answer
                (file,) = await self._opened(peer, [target])
            self._close_file(file)
            raise RefusedError(
                UNKNOWN_SERVER_ERROR,
                f"{name} rolls faster than access can be granted; raise log.segment.bytes",
            )
        except RefusedError as e:
            return {"error_code": e.code, "error_message": str(e)}
        except RdmaError as e:  # what cannot be registered can still be had over TCP
            log.warning("read access of %s to %s failed: %s", peer.client, name, e)
            return {"error_code": layout.ERROR_ACCESS_DISABLED, "error_message": str(e)}
        except KdirectError as e:
            code, message = explain(e, f"read access to {name}")
            return {"error_code": code, "error_message": message}

    # On a read thread: mapping a file, looking a position up and registering memory, which may pin
    # it, take their time.

    def _open_files(self, peer: Peer, targets: Sequence[Any]) -> list[OpenedFile | KdirectError]:
        out: list[OpenedFile | KdirectError] = []
        for target in targets:
            try:
                out.append(
                    self._open_file(
                        peer, self._partition(target.topic, target.partition), target.offset
                    )
                )
            except KdirectError as e:
                out.append(e)
            except Exception as e:
                log.exception("read access to %s-%d failed", target.topic, target.partition)
                out.append(
                    RefusedError(
                        UNKNOWN_SERVER_ERROR, f"{type(e).__name__} in the broker; see its log"
                    )
                )
        return out

    def _open_file(self, peer: Peer, partition: Partition, offset: int) -> OpenedFile:
        tp = partition.topic_partition
        self.produce.listen(partition)
        wanted = offset
        high_watermark, start = partition.high_watermark, partition.log_start_offset
        if wanted == LATEST_OFFSET:
            wanted = high_watermark
        elif wanted == EARLIEST_OFFSET:
            wanted = start
        if not start <= wanted <= max(high_watermark, partition.log_end_offset):
            raise RefusedError(
                OFFSET_OUT_OF_RANGE,
                f"offset {wanted} of {tp} is outside [{start}, {high_watermark}]",
            )
        wanted = partition.skip_gap(wanted)
        head = partition.head
        segment = head if wanted >= partition.log_end_offset else partition.segment_for(wanted)
        with_slot = (
            segment is None
            or not segment.sealed
            or (segment is head and wanted >= partition.log_end_offset)
        )
        file = OpenedFile(partition, segment, wanted, with_slot)
        if segment is None:
            return file
        if peer.pins:  # before it is acquired: see `ProduceAccess.may_give_back`
            self._grants.opening.add(file)
        try:
            segment.acquire()
        except BaseException:
            self._grants.opening.discard(file)
            raise
        try:
            if wanted <= segment.end_offset:
                file.position, file.base = segment.locate(wanted)
            if not with_slot or offset != LATEST_OFFSET:
                mapped = segment.mapped_length  # of a head: what is allocated of it by now
                memory = Memory.wrap(segment.fd, segment.address, mapped, False, segment)
                # Of a sealed file no more than there is: registration may pin pages, and would fill
                # the hole behind the end again.
                length = (
                    min(mapped, max(1, -(-segment.size // 4096)) * 4096)
                    if segment.sealed
                    else mapped
                )
                file.region = peer.domain.register(memory, Access.REMOTE_READ, 0, length)
            return file
        except BaseException:
            self._grants.opening.discard(file)
            segment.release()
            raise

    # On the event loop again.

    def _close_file(self, file: OpenedFile | KdirectError) -> None:
        """Give back a file that is not granted."""
        if not isinstance(file, KdirectError) and file.segment is not None:
            self._grants.opening.discard(file)
            self._in_background(partial(_close_region, file.region, file.segment.release))

    def _grant_file(self, peer: Peer, file: OpenedFile) -> dict[str, Any] | None:
        """Grant an opened file; None when the head moved on in between (the caller opens the next)."""
        partition, segment, wanted = file.partition, file.segment, file.wanted
        if peer.closed or self._logs.partitions.get(partition.topic_partition) is not partition:
            self._close_file(file)
            if peer.closed:
                raise RefusedError(
                    layout.ERROR_UNKNOWN_CONNECTION,
                    "the queue pair that asked for access is closed; connect again",
                )
            raise RefusedError(
                UNKNOWN_TOPIC_OR_PARTITION, f"partition {partition.topic_partition} was deleted"
            )
        try:
            grant = self._grants.new(peer, partition, segment)
        except RefusedError:
            self._close_file(file)
            raise
        grant.region = file.region
        self._grants.opening.discard(file)
        try:
            answer = {
                "error_code": 0,
                "file_id": grant.file_id,
                "rkey": grant.region.rkey if grant.region is not None else 0,
                "address": grant.region.address if grant.region is not None else 0,
                "length": grant.region.length if grant.region is not None else 0,
                "log_start_offset": partition.log_start_offset,
                "leader_epoch": partition.leader_epoch,
                "dense_from": partition.dense_from,
            }
            if file.with_slot:
                grant.slot_index = peer.free_slot(self._slots_per_consumer)
                if grant.slot_index < 0:
                    raise RefusedError(
                        layout.ERROR_NO_FREE_SLOT,
                        f"all {self._slots_per_consumer} metadata slots of this consumer are in use;"
                        " raise rdma.slots.per.consumer on the broker",
                    )
                peer.slots[grant.slot_index] = partition.topic_partition
                address = peer.slot_address(grant.slot_index)
                partition.kernel.attach_slot(address, grant.file_id)
                slot = _read_slot(peer.slot_memory, grant.slot_index)
                expected = segment.base_offset if segment is not None else None
                outgrown = (
                    grant.region is not None
                    and slot["last_readable_position"] > grant.region.length
                )
                if (
                    outgrown
                    or partition.head is not segment
                    or (expected is not None and slot["segment_base_offset"] != expected)
                ):
                    self._release(grant)
                    return None
                position, base = slot["last_readable_position"], slot["high_watermark"]
                if segment is not None and wanted < partition.log_end_offset:
                    position, base = file.position, file.base
                answer |= {
                    "slot_index": grant.slot_index,
                    "segment_base_offset": slot["segment_base_offset"],
                    "start_position": position,
                    "start_offset": base,
                    "last_readable_position": slot["last_readable_position"],
                    "high_watermark": slot["high_watermark"],
                    "last_stable_position": slot["last_stable_position"],
                    "last_stable_offset": slot["last_stable_offset"],
                }
            else:
                assert segment is not None
                base = file.base
                answer |= {
                    "slot_index": -1,
                    "segment_base_offset": segment.base_offset,
                    "start_position": file.position,
                    "start_offset": base,
                    "last_readable_position": segment.size,
                    "high_watermark": partition.high_watermark,
                    "last_stable_position": segment.size,
                    "last_stable_offset": partition.last_stable_offset,
                }
            if segment is not None:
                answer["first_epoch"], answer["last_epoch"] = partition.epochs_of(segment, base)
            return answer
        except BaseException:
            if self._grants.get(grant.file_id) is grant:
                self._release(grant)
            raise

    # -- release -----------------------------------------------------------------------------------

    async def _release_access(self, connection: Hashable, request: Any) -> dict[str, Any]:
        peer = self._peer(connection, request.connection_id)
        for i, file_id in enumerate(request.file_ids):
            grant = peer.grants.get(file_id)
            if grant is not None:
                self._release(grant)
            if (
                i % RELEASED_AT_ONCE == RELEASED_AT_ONCE - 1
            ):  # 1,000 of them take 50 ms: others have their turn
                await asyncio.sleep(0)
        return {}

    def _release(self, grant: Grant, *, clean: bool = True) -> None:
        """End a grant.  The second call does nothing."""
        if grant.is_produce:
            self.produce.release(grant, clean=clean)
            return
        if grant.released:
            return
        grant.released = True
        if grant.slot_index >= 0:
            grant.partition.kernel.detach_slot(grant.peer.slot_address(grant.slot_index))
            _clear_slot(grant.peer.slot_memory, grant.slot_index)
            grant.peer.give_back_slot(grant.slot_index)
            grant.slot_index = -1
        segment, grant.segment = grant.segment, None
        if segment is not None:
            self._in_background(partial(_close_region, grant.region, segment.release))
        self._grants.drop(grant)

    def _finish_cut(self, transport: str, qp_num: int, reason: CutReason) -> None:
        peer = self._by_qp.get((transport, qp_num))
        if peer is None:
            return
        # A device may know of a disconnected peer what it did wrong.
        fault = getattr(peer.qp, "fault", "") if reason is CutReason.DISCONNECTED else reason.text
        if fault:
            self._cuts += 1
            log.warning("RDMA client %s (queue pair %d) is cut: %s", peer.client, qp_num, fault)
        else:
            log.debug("RDMA client %s (queue pair %d) has disconnected", peer.client, qp_num)
        self._close_peer(peer)

    def _close_peer(self, peer: Peer) -> None:
        peer.closed = True
        self._peers.pop(peer.connection_id, None)
        self._by_qp.pop((peer.engine.transport, peer.qp.qp_num), None)
        worker = peer.engine.worker
        written = [(access, region) for access in peer.leaving for region in access.left_by(peer)]
        for grant in list(peer.grants.values()):
            if grant.head is not None:
                worker.retire(grant.file_id, False)
                written.append((grant.head, grant.region))
        worker.remove_peer(peer.qp.qp_num)
        for grant in list(peer.grants.values()):
            try:
                self._release(grant, clean=False)
            except RdmaError as e:
                log.warning(
                    "releasing %s of %s: %s", grant.partition.topic_partition, peer.client, e
                )
        self._in_background(partial(_close_domain, peer, written))

    def connection_closed(self, connection: Hashable) -> None:
        """Free everything that was opened over this TCP connection."""
        for peer in [x for x in self._peers.values() if x.connection is connection]:
            self._close_peer(peer)
        for engine in self._engines.values():
            for link in list(engine.messages.links.values()) if engine.messages is not None else ():
                if link.control is connection:
                    link.close("")

    def begin_deletion(self, partitions: Sequence[TopicPartition]) -> Callable[[], None]:
        """These partitions are about to be deleted: nobody gets access to them until
        `end_deletion`.  What is to be called on a thread before their files go: it ends what access
        there is."""
        heads = self.produce.begin_deletion(partitions)

        def end_access() -> None:
            for access in heads:
                access.fence(notify=True)

        self._ending[tuple(partitions)] = heads
        return end_access

    def end_deletion(self, partitions: Sequence[TopicPartition]) -> None:
        """They are deleted, or could not be: tell their producers and, through their slots, their
        readers."""
        self.produce.end_deletion(partitions, self._ending.pop(tuple(partitions)))
        gone = {tp for tp in partitions if tp not in self._logs.partitions}
        for partition in {
            g.partition
            for g in self._grants
            if not g.is_produce and g.partition.topic_partition in gone
        }:
            # Readers keep the (unlinked) bytes they were granted; their slot says that no more will
            # come.
            partition.kernel.revoke_slots()
        self._watched -= gone

    # -- waiting for appends -----------------------------------------------------------------------

    def watch(self, tp: TopicPartition) -> None:
        """Call `on_append(tp)` (on any thread) once, at the next RDMA commit to `tp`."""
        self._watched.add(tp)
        self.produce.watch(tp)

    def statistics(self) -> dict[str, int]:
        """Counters; names as in `kdirect.metrics`."""
        out = {
            "rdma_access_requests": self._requests,
            "rdma_clients_cut": self._cuts,
            "rdma_grants": len(self._grants),
        }
        out |= self.produce.statistics()
        for engine in self._engines.values():
            for name, value in engine.worker.statistics().items():
                out[name] = out.get(name, 0) + value
        return out


_EMPTY_GRANT: dict[str, Any] = {
    "error_code": 0, "error_message": None, "file_id": -1, "slot_index": -1, "rkey": 0, "address": 0, "length": 0, "segment_base_offset": 0,
    "start_position": 0, "last_readable_position": 0, "high_watermark": 0, "last_stable_position": 0, "last_stable_offset": 0,
    "log_start_offset": 0, "leader_epoch": 0, "start_offset": 0, "dense_from": 0, "first_epoch": 0, "last_epoch": 0,
}  # fmt: skip
_EMPTY: dict[Any, dict[str, Any]] = {
    p.OpenQueuePairResponse: {"connection_id": 0, "address": b"", "max_in_flight": 0, "ping_address": 0, "ping_rkey": 0, "ping_crc": 0},
    p.GetProduceAccessResponse: {
        "file_id": -1, "rkey": 0, "address": 0, "length": 0, "position": 0, "next_offset": 0, "leader_epoch": 0, "max_message_bytes": 0,
        "mode": 0, "word_address": 0, "word_rkey": 0, "max_in_flight": 0, "full_length": 0,
    },
    p.GetConsumeAccessResponse: {"slot_address": 0, "slot_rkey": 0, "slot_count": 0, "partitions": []},
    p.ReleaseAccessResponse: {},
}  # fmt: skip


def _read_slot(memory: Memory, index: int) -> dict[str, int]:
    """The broker's own view of a slot it has just attached (retries while the kernel updates it)."""
    base = index * layout.SLOT_BYTES
    view = memoryview(memory)
    while True:
        raw = bytes(view[base : base + layout.SLOT_BYTES])
        if int.from_bytes(raw[:4], "little") == crc32c(raw[4:]):
            return {
                "segment_base_offset": int.from_bytes(raw[8:16], "little", signed=True),
                "last_readable_position": int.from_bytes(raw[16:24], "little", signed=True),
                "high_watermark": int.from_bytes(raw[24:32], "little", signed=True),
                "last_stable_position": int.from_bytes(raw[32:40], "little", signed=True),
                "last_stable_offset": int.from_bytes(raw[40:48], "little", signed=True),
            }


def _close_region(region: Any, release: Callable[[], None]) -> None:
    """End a key, then give back the memory under it.  Waits for a peer that is inside a copy."""
    if region is not None:
        region.deregister()
    release()


def _close_domain(peer: Peer, written: Sequence[tuple[HeadAccess, Any]]) -> None:
    """The same for all that a client has left.  `written`: the heads that it may be inside a copy
    into, with its keys to them.  Whether it is can be told until its queue pair is closed, and is
    waited for once: 1,000 keys of a client that hangs would take 20 s."""
    hangs = False
    for access, region in written:
        if region is not None and not access.end_key(region, 0 if hangs else DEREGISTER_MS):
            hangs = True
    peer.qp.close()
    peer.domain.close()
    peer.engine.worker.reap()  # it lets go of closed queue pairs


def _clear_slot(memory: Memory, index: int) -> None:
    base = index * layout.SLOT_BYTES
    memoryview(memory)[base : base + layout.SLOT_BYTES] = bytes(layout.SLOT_BYTES)


__all__ = ["AccessDeniedError", "AccessManager"]
