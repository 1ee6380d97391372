"""Who may touch which memory: queue pairs, grants, metadata slots (KafkaDirect §4.2.2, §4.4.2).

Owns: the broker's side of every RDMA client.  A client opens a queue pair over its TCP connection
(its own protection domain with it), then asks for access to files.  Nothing here touches records: the
produce worker commits, the kernel updates slots, the RNIC (or its software) moves the bytes.  Who may write what is
decided in `kdirect.broker.produce_access`.

Invariants:

- A produce grant covers the head file from its tail on; consume regions and slots are remote-read only.
- Keys end before the memory behind them changes its meaning: `deregister` comes first, then the tail is
  cleared or, where a client did not leave in time, the head moves to a fresh file.
- Memory: a grant holds its segment (`Segment.acquire`) from grant to release.  A client's slot region
  belongs to the client's `Peer` and outlives its attachment to any kernel.

All methods run on the broker's event loop, except where said.  The produce worker's callbacks arrive on
its thread and only schedule.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from kdirect.broker.engine import Engine, open_transport
from kdirect.broker.failures import explain
from kdirect.broker.grants import (
    INVALID_REQUEST,
    OFFSET_OUT_OF_RANGE,
    STORAGE_ERROR,
    UNKNOWN_SERVER_ERROR,
    UNKNOWN_TOPIC_OR_PARTITION,
    Grant,
    GrantTable,
    Peer,
)
from kdirect.broker.messages import LEAST_MESSAGE_BYTES, MAX_RECEIVES, MessageConnection, MessageService
from kdirect.broker.produce_access import ProduceAccess, Waiting
from kdirect.broker.worker import CutReason
from kdirect.errors import AccessDeniedError, KdirectError, RdmaError, RefusedError, StorageFullError, TransportError
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


class AccessManager:
    """See the module.  `config` maps property names of the BROKER table to values."""

    def __init__(self, log_manager: LogManager, config: Mapping[str, Any]) -> None:
        self._logs = log_manager
        self._config = config
        self._consume_enabled = bool(config["rdma.consume"])
        self._transports = frozenset(config["rdma.transports"])
        self._max_in_flight = int(config["rdma.max.in.flight"])
        self._slots_per_consumer = int(config["rdma.slots.per.consumer"])
        self._produce_enabled = bool(config["rdma.produce"])
        self.on_append: Callable[[TopicPartition], None] | None = None
        self.server: Any = None  # takes the requests of two-sided clients
        self._loop: asyncio.AbstractEventLoop | None = None
        self._engines: dict[str, Engine] = {}
        self._peers: dict[int, Peer] = {}
        self._by_qp: dict[tuple[str, int], Peer] = {}
        self._grants = GrantTable()
        self._watched: set[TopicPartition] = set()
        self.produce = ProduceAccess(
            log_manager, self._grants, config, later=self._later, call_later=self._call_later, new_future=self._new_future,
            appended=self._tell_appended, watched=self._watched,
        )  # fmt: skip
        self._next_connection_id = int.from_bytes(os.urandom(4), "big")
        self._requests = 0
        self._cuts = 0

    # -- life ------------------------------------------------------------------------------------------

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Bind to the event loop.  A transport's device, queues and worker start with its first client."""
        self._loop = loop

    def stop(self) -> None:
        """Cut every client, end every grant and the workers.  Any thread: nothing is scheduled on the loop from here on."""
        self._loop = None
        for peer in list(self._peers.values()):
            self._close_peer(peer)
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()

    def _engine(self, transport: str) -> Engine:
        engine = self._engines.get(transport)
        if engine is None:
            engine = self._engines[transport] = self._open_engine(transport)
        return engine

    def _open_engine(self, transport: str) -> Engine:
        engine = Engine(
            transport,
            open_transport(transport, self._config, self._logs.log_dirs),
            spin_us=int(self._config["rdma.spin.us"]),
            on_cut=lambda transport, qp_num, reason: self._later(self._finish_cut, transport, qp_num, reason),
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

    def _new_future(self) -> asyncio.Future[Any]:
        assert self._loop is not None
        return self._loop.create_future()

    def _tell_appended(self, tp: TopicPartition) -> None:
        if self.on_append is not None:
            self._watched.discard(tp)
            self.on_append(tp)

    # -- the worker's thread ---------------------------------------------------------------------------

    def _appended(self, file_id: int) -> None:
        grant = self._grants.get(file_id)
        if grant is not None:
            self._tell_appended(grant.partition.topic_partition)

    def _sync(self, file_id: int) -> None:
        grant = self._grants.get(file_id)
        if grant is not None:
            grant.partition.flush()

    # -- requests --------------------------------------------------------------------------------------

    def handle(self, connection: Hashable, request: Any) -> Any:
        """Answer one of kdirect's four requests (API keys 32001 to 32004): the response, or a future of it."""
        self._requests += 1
        handler, response = {
            layout.API_OPEN_QUEUE_PAIR: (self._open_queue_pair, p.OpenQueuePairResponse),
            layout.API_GET_PRODUCE_ACCESS: (self._get_produce_access, p.GetProduceAccessResponse),
            layout.API_GET_CONSUME_ACCESS: (self._get_consume_access, p.GetConsumeAccessResponse),
            layout.API_RELEASE_ACCESS: (self._release_access, p.ReleaseAccessResponse),
        }[request.API_KEY]
        try:
            fields = handler(connection, request)
            if isinstance(fields, Waiting):
                return self._answer_later(response, fields)
            code, message = 0, None
        except RefusedError as e:
            fields, code, message = {}, e.code, str(e)
        except StorageFullError as e:
            fields, code, message = {}, STORAGE_ERROR, str(e)
        except RdmaError as e:
            # What cannot be registered can still be had over TCP.
            log.warning("%s of %s failed: %s", type(request).__name__, getattr(connection, "peer", connection), e)
            fields, code, message = {}, layout.ERROR_ACCESS_DISABLED, str(e)
        except KdirectError as e:
            log.warning("%s of %s failed: %s", type(request).__name__, getattr(connection, "peer", connection), e)
            fields, code, message = {}, UNKNOWN_SERVER_ERROR, str(e)
        return response(**{**_EMPTY[response], **fields, "error_code": code, "error_message": message})

    def _answer_later(self, response: Any, waiting: Waiting) -> asyncio.Future[Any]:
        future = self._new_future()

        def answer(outcome: Any) -> None:
            if future.done():  # the client is gone
                return
            refused = isinstance(outcome, RefusedError)
            fields = {"error_code": outcome.code, "error_message": str(outcome)} if refused else {**outcome, "error_code": 0}
            future.set_result(response(**{**_EMPTY[response], "error_message": None, **fields}))

        waiting.answer = answer
        return future

    def _get_produce_access(self, connection: Hashable, request: Any) -> dict[str, Any] | Waiting:
        return self.produce.request(
            self._peer(connection, request.connection_id), self._partition(request.topic, request.partition), request
        )

    def append(self, partition: Partition, records: Any, now_ms: int | None = None) -> Any:
        """See ProduceAccess.append."""
        return self.produce.append(partition, records, now_ms)

    def _peer(self, connection: Hashable, connection_id: int) -> Peer:
        peer = self._peers.get(connection_id)
        if peer is None or peer.connection is not connection:
            raise RefusedError(layout.ERROR_UNKNOWN_CONNECTION, f"queue pair {connection_id} is not open on this connection; open it again")
        return peer

    def _partition(self, topic: str, index: int) -> Partition:
        partition = self._logs.partitions.get(TopicPartition(topic, index))
        if partition is None:
            raise RefusedError(UNKNOWN_TOPIC_OR_PARTITION, f"partition {topic}-{index} does not exist; create the topic or check the name")
        return partition

    def _open_queue_pair(self, connection: Hashable, request: Any) -> dict[str, Any]:
        if request.transport not in self._transports:
            offered = ", ".join(sorted(self._transports)) or "none"
            raise RefusedError(
                layout.ERROR_TRANSPORT_UNAVAILABLE, f"transport {request.transport!r} is not offered here; offered: {offered}"
            )
        if not 1 <= request.max_recv <= MAX_CLIENT_RECEIVES:
            raise RefusedError(INVALID_REQUEST, f"MaxRecv {request.max_recv} is out of range; give 1 to {MAX_CLIENT_RECEIVES}")
        try:
            engine = self._engine(request.transport)
        except (TransportError, RdmaError) as e:
            log.warning("transport %s cannot be offered: %s", request.transport, e)
            raise RefusedError(layout.ERROR_TRANSPORT_UNAVAILABLE, f"the broker cannot offer {request.transport}: {e}") from e
        if request.message_bytes:
            return self._open_messages(connection, request, engine)
        domain = engine.device.alloc_pd()
        try:
            # One more than the client may use: a notice of revocation is not an answer to a request.
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
            slot_memory = Memory.anonymous(self._slots_per_consumer * layout.SLOT_BYTES, "kdirect-slots")
            slot_region = domain.register(slot_memory, Access.REMOTE_READ)
            qp.connect(bytes(request.address), active=False)
            # Ends with the domain, after the worker has forgotten the queue pair.
            notices = Memory.anonymous(self._max_in_flight * layout.NOTICE_BYTES, "kdirect-notices")
            engine.worker.add_peer(qp, self._max_in_flight, domain.register(notices, Access.LOCAL_WRITE))
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
        if self.server is None or self._loop is None or not self._produce_enabled:
            raise RefusedError(layout.ERROR_ACCESS_DISABLED, "requests in SENDs are not taken here; use TCP")
        if not LEAST_MESSAGE_BYTES <= request.message_bytes <= most:
            raise RefusedError(
                layout.ERROR_ACCESS_DISABLED,
                f"messages of {request.message_bytes} bytes are not taken: {LEAST_MESSAGE_BYTES} to {most} are;"
                " lower batch.bytes, or raise rdma.message.memory.bytes on the broker",
            )
        count = max(1, min(request.max_recv, MAX_RECEIVES, memory // request.message_bytes))
        bound = self.server.memory.limit
        if 0 <= bound < self.server.memory.used + count * request.message_bytes:
            raise RefusedError(
                layout.ERROR_ACCESS_DISABLED,
                f"{count * request.message_bytes} bytes for requests in SENDs would be over queued.max.request.bytes ({bound}); use TCP",
            )
        if engine.messages is None:
            engine.messages = MessageService(engine.device, self._loop)
        domain = engine.device.alloc_pd()
        try:
            link = MessageConnection(self.server, connection, engine.messages, domain, message_bytes=request.message_bytes, count=count)
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

    # -- consume ---------------------------------------------------------------------------------------

    def _get_consume_access(self, connection: Hashable, request: Any) -> dict[str, Any]:
        if not self._consume_enabled:
            raise RefusedError(layout.ERROR_ACCESS_DISABLED, "RDMA consume is switched off on this broker (rdma.consume=false); use TCP")
        peer = self._peer(connection, request.connection_id)
        answers = []
        for target in request.partitions:
            try:
                finished = peer.grants.get(target.finished_file_id)
                if finished is not None and not finished.is_produce:
                    self._release(finished)
                answers.append(self._grant_read(peer, self._partition(target.topic, target.partition), target.offset))
            except RefusedError as e:
                answers.append({"error_code": e.code, "error_message": str(e)})
            except RdmaError as e:  # what cannot be registered can still be had over TCP
                log.warning("read access of %s to %s-%d failed: %s", peer.client, target.topic, target.partition, e)
                answers.append({"error_code": layout.ERROR_ACCESS_DISABLED, "error_message": str(e)})
            except KdirectError as e:
                code, message = explain(e, f"read access to {target.topic}-{target.partition}")
                answers.append({"error_code": code, "error_message": message})
        return {
            "slot_address": peer.slot_region.address,
            "slot_rkey": peer.slot_region.rkey,
            "slot_count": self._slots_per_consumer,
            "partitions": [p.GetConsumeAccessResponse.ConsumeGrant(**{**_EMPTY_GRANT, **a}) for a in answers],
        }

    def _grant_read(self, peer: Peer, partition: Partition, offset: int) -> dict[str, Any]:
        tp = partition.topic_partition
        self.produce.listen(partition)
        for _ in range(16):
            wanted = offset
            high_watermark, start = partition.high_watermark, partition.log_start_offset
            if wanted == LATEST_OFFSET:
                wanted = high_watermark
            elif wanted == EARLIEST_OFFSET:
                wanted = start
            if not start <= wanted <= max(high_watermark, partition.log_end_offset):
                raise RefusedError(OFFSET_OUT_OF_RANGE, f"offset {wanted} of {tp} is outside [{start}, {high_watermark}]")
            wanted = partition.skip_gap(wanted)
            head = partition.head
            segment = head if wanted >= partition.log_end_offset else partition.segment_for(wanted)
            if segment is not None and segment.sealed and not (segment is head and wanted >= partition.log_end_offset):
                answer = self._grant_file(peer, partition, segment, wanted, with_slot=False)
            else:
                answer = self._grant_file(peer, partition, segment, wanted, with_slot=True, with_data=offset != LATEST_OFFSET)
            if answer is not None:
                return answer
        raise RefusedError(UNKNOWN_SERVER_ERROR, f"{tp} rolls faster than access can be granted; raise log.segment.bytes")

    def _grant_file(
        self, peer: Peer, partition: Partition, segment: Segment | None, wanted: int, *, with_slot: bool, with_data: bool = True
    ) -> dict[str, Any] | None:
        """Grant one file; None when the head moved on in between (the caller looks again)."""
        grant = self._grants.new(peer, partition, segment)
        try:
            if segment is not None and with_data:
                segment.map()
                mapped = segment.mapped_length  # of a head: what is allocated of it by now
                memory = Memory.wrap(segment.fd, segment.address, mapped, False, segment)
                # Of a sealed file no more than there is: registration may pin pages, and would fill the hole behind the end again.
                length = min(mapped, max(1, -(-segment.size // 4096)) * 4096) if segment.sealed else mapped
                grant.region = peer.domain.register(memory, Access.REMOTE_READ, 0, length)
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
            if with_slot:
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
                outgrown = grant.region is not None and slot["last_readable_position"] > grant.region.length
                if outgrown or partition.head is not segment or (expected is not None and slot["segment_base_offset"] != expected):
                    self._release(grant)
                    return None
                position, base = slot["last_readable_position"], slot["high_watermark"]
                if segment is not None and wanted < partition.log_end_offset:
                    position, base = segment.locate(wanted)
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
                position, base = segment.locate(wanted)
                answer |= {
                    "slot_index": -1,
                    "segment_base_offset": segment.base_offset,
                    "start_position": position,
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

    # -- release ---------------------------------------------------------------------------------------

    def _release_access(self, connection: Hashable, request: Any) -> dict[str, Any]:
        peer = self._peer(connection, request.connection_id)
        for file_id in request.file_ids:
            grant = peer.grants.get(file_id)
            if grant is not None:
                self._release(grant)
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
        if grant.region is not None:
            grant.region.deregister()
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
        # Close the pair first: its grants then end without waiting for a client that is gone.
        for grant in list(peer.grants.values()):
            if grant.is_produce:
                worker.retire(grant.file_id, False)
        worker.remove_peer(peer.qp.qp_num)
        for grant in list(peer.grants.values()):
            try:
                self._release(grant, clean=False)
            except RdmaError as e:
                log.warning("releasing %s of %s: %s", grant.partition.topic_partition, peer.client, e)
        peer.qp.close()
        peer.domain.close()
        worker.reap()

    def connection_closed(self, connection: Hashable) -> None:
        """Free everything that was opened over this TCP connection."""
        for peer in [x for x in self._peers.values() if x.connection is connection]:
            self._close_peer(peer)
        for engine in self._engines.values():
            for link in list(engine.messages.links.values()) if engine.messages is not None else ():
                if link.control is connection:
                    link.close("")

    def partition_deleted(self, tp: TopicPartition) -> None:
        """The partition is being deleted: tell its readers through their slots, end all access to it."""
        self.produce.partition_deleted(tp)
        for grant in self._grants.of(tp):
            if not grant.is_produce:
                # Readers keep the (unlinked) bytes they were granted; their slot says that no more will come.
                grant.partition.kernel.revoke_slots()
        self._watched.discard(tp)

    # -- waiting for appends ---------------------------------------------------------------------------

    def watch(self, tp: TopicPartition) -> None:
        """Call `on_append(tp)` (on any thread) once, at the next RDMA commit to `tp`."""
        self._watched.add(tp)
        self.produce.watch(tp)

    def statistics(self) -> dict[str, int]:
        """Counters; names as in `kdirect.metrics`."""
        out = {"rdma_access_requests": self._requests, "rdma_clients_cut": self._cuts, "rdma_grants": len(self._grants)}
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
        "mode": 0, "word_address": 0, "word_rkey": 0, "max_in_flight": 0,
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


def _clear_slot(memory: Memory, index: int) -> None:
    base = index * layout.SLOT_BYTES
    memoryview(memory)[base : base + layout.SLOT_BYTES] = bytes(layout.SLOT_BYTES)


__all__ = ["AccessDeniedError", "AccessManager"]
