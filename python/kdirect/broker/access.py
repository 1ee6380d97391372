"""Who may touch which memory: queue pairs, grants, metadata slots (KafkaDirect §4.2.2, §4.4.2).

Owns: the broker's side of every RDMA client.  A client opens a queue pair over its TCP connection
(its own protection domain with it), then asks for access to files.  Nothing here touches records: the
produce worker commits, the kernel updates slots, the RNIC (or its software) moves the bytes.

Invariants:

- A head file has at most one exclusive holder, and its tail moves only through that holder's requests while
  the grant stands.  A plain Kafka producer takes precedence: `before_append` recalls the grant first, and
  for a while the partition is not granted again, so that both kinds of producers make progress: a second
  at first, twice as long each time it happens again soon, 30 seconds at most.
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
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kdirect.broker.engine import Engine, open_transport
from kdirect.errors import AccessDeniedError, KdirectError, RdmaError, StorageFullError, TransportError
from kdirect.format import layout
from kdirect.format import protocol as p
from kdirect.format.batch import crc32c
from kdirect.log.manager import LogManager
from kdirect.log.partition import Partition
from kdirect.log.segment import Segment
from kdirect.model import EARLIEST_OFFSET, LATEST_OFFSET, TopicPartition
from kdirect.rdma.contract import Access, Memory

log = logging.getLogger("kdirect.broker.rdma")

CONTENTION_S = 1.0
CONTENTION_MAX_S = 30.0
# A producer that is told of a recall stops by itself; if its next WRITE met a dead key instead, its queue pair would break with
# everything on it.
RECALL_GRACE_S = 0.002
PING_BYTES = 64
MODE_EXCLUSIVE = 0
MAX_CLIENT_RECEIVES = 1 << 16
MAX_ACK_ENTRIES = 1 << 16

OFFSET_OUT_OF_RANGE = 1
UNKNOWN_TOPIC_OR_PARTITION = 3
MESSAGE_TOO_LARGE = 10
INVALID_REQUEST = 42
STORAGE_ERROR = 56
UNKNOWN_SERVER_ERROR = -1


@dataclass(eq=False, slots=True)
class Grant:
    """One file granted to one client."""

    file_id: int
    peer: Peer
    partition: Partition
    segment: Segment | None  # None: the partition has no head file yet; only a slot was granted
    region: Any = None
    slot_index: int = -1
    staging: Any = None  # produce grants: region of the acknowledgements being sent
    released: bool = False

    @property
    def is_produce(self) -> bool:
        return self.staging is not None


@dataclass(eq=False, slots=True)
class Peer:
    """One queue pair of one client, with its protection domain, slot region and grants."""

    connection_id: int
    connection: Hashable
    client: str
    engine: Engine
    domain: Any
    qp: Any
    max_in_flight: int
    ping: Any
    slot_memory: Memory
    slot_region: Any
    grants: dict[int, Grant] = field(default_factory=dict)
    slots: dict[int, TopicPartition] = field(default_factory=dict)

    def slot_address(self, index: int) -> int:
        return self.slot_memory.address + index * layout.SLOT_BYTES

    def free_slot(self, count: int) -> int:
        """The lowest free slot, so that the region a client READs stays short; -1 when there is none."""
        return next((i for i in range(count) if i not in self.slots), -1)


class _Refused(Exception):
    """An answer with an error code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class AccessManager:
    """See the module.  `config` maps property names of the BROKER table to values."""

    def __init__(self, log_manager: LogManager, config: Mapping[str, Any]) -> None:
        self._logs = log_manager
        self._config = config
        self._produce_enabled = bool(config["rdma.produce"])
        self._consume_enabled = bool(config["rdma.consume"])
        self._transports = frozenset(config["rdma.transports"])
        self._max_in_flight = int(config["rdma.max.in.flight"])
        self._slots_per_consumer = int(config["rdma.slots.per.consumer"])
        self._sync_first = bool(config["log.flush.before.ack"])
        self.on_append: Callable[[TopicPartition], None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._engines: dict[str, Engine] = {}
        self._peers: dict[int, Peer] = {}
        self._by_qp: dict[tuple[str, int], Peer] = {}
        self._grants: dict[int, Grant] = {}
        self._holders: dict[TopicPartition, Grant] = {}
        self._contended: dict[TopicPartition, tuple[float, float]] = {}  # until when, and for how long that was
        self._watched: set[TopicPartition] = set()
        self._next_connection_id = int.from_bytes(os.urandom(4), "big")
        self._next_file_id = 1
        self._requests = 0
        self._recalls = 0
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
            on_retired=lambda file_id: self._later(self._finish_retired, file_id),
            on_cut=lambda transport, qp_num, reason: self._later(self._finish_cut, transport, qp_num, reason),
            on_append=self._appended,
            sync=self._sync,
        )
        engine.start()
        return engine

    def _later(self, callback: Callable[..., None], *args: Any) -> None:
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(callback, *args)

    # -- the worker's thread ---------------------------------------------------------------------------

    def _appended(self, file_id: int) -> None:
        grant = self._grants.get(file_id)
        if grant is not None and self.on_append is not None:
            self._watched.discard(grant.partition.topic_partition)
            self.on_append(grant.partition.topic_partition)

    def _sync(self, file_id: int) -> None:
        grant = self._grants.get(file_id)
        if grant is not None:
            grant.partition.flush()

    # -- requests --------------------------------------------------------------------------------------

    def handle(self, connection: Hashable, request: Any) -> Any:
        """Answer one of kdirect's four requests (API keys 32001 to 32004)."""
        self._requests += 1
        handler, response = {
            layout.API_OPEN_QUEUE_PAIR: (self._open_queue_pair, p.OpenQueuePairResponse),
            layout.API_GET_PRODUCE_ACCESS: (self._get_produce_access, p.GetProduceAccessResponse),
            layout.API_GET_CONSUME_ACCESS: (self._get_consume_access, p.GetConsumeAccessResponse),
            layout.API_RELEASE_ACCESS: (self._release_access, p.ReleaseAccessResponse),
        }[request.API_KEY]
        try:
            fields = handler(connection, request)
            code, message = 0, None
        except _Refused as e:
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

    def _peer(self, connection: Hashable, connection_id: int) -> Peer:
        peer = self._peers.get(connection_id)
        if peer is None or peer.connection is not connection:
            raise _Refused(layout.ERROR_UNKNOWN_CONNECTION, f"queue pair {connection_id} is not open on this connection; open it again")
        return peer

    def _partition(self, topic: str, index: int) -> Partition:
        partition = self._logs.partitions.get(TopicPartition(topic, index))
        if partition is None:
            raise _Refused(UNKNOWN_TOPIC_OR_PARTITION, f"partition {topic}-{index} does not exist; create the topic or check the name")
        return partition

    def _open_queue_pair(self, connection: Hashable, request: Any) -> dict[str, Any]:
        if request.transport not in self._transports:
            offered = ", ".join(sorted(self._transports)) or "none"
            raise _Refused(layout.ERROR_TRANSPORT_UNAVAILABLE, f"transport {request.transport!r} is not offered here; offered: {offered}")
        if not 1 <= request.max_recv <= MAX_CLIENT_RECEIVES:
            raise _Refused(INVALID_REQUEST, f"MaxRecv {request.max_recv} is out of range; give 1 to {MAX_CLIENT_RECEIVES}")
        try:
            engine = self._engine(request.transport)
        except (TransportError, RdmaError) as e:
            log.warning("transport %s cannot be offered: %s", request.transport, e)
            raise _Refused(layout.ERROR_TRANSPORT_UNAVAILABLE, f"the broker cannot offer {request.transport}: {e}") from e
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
            engine.worker.add_peer(qp, self._max_in_flight)
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

    # -- produce ---------------------------------------------------------------------------------------

    def _get_produce_access(self, connection: Hashable, request: Any) -> dict[str, Any]:
        if not self._produce_enabled:
            raise _Refused(layout.ERROR_ACCESS_DISABLED, "RDMA produce is switched off on this broker (rdma.produce=false); use TCP")
        peer = self._peer(connection, request.connection_id)
        partition = self._partition(request.topic, request.partition)
        tp = partition.topic_partition
        entries = request.ack_entries
        if request.mode != MODE_EXCLUSIVE:
            raise _Refused(INVALID_REQUEST, f"produce mode {request.mode} is not offered; use 0 (exclusive)")
        if not 2 <= entries <= MAX_ACK_ENTRIES or entries & (entries - 1):
            raise _Refused(INVALID_REQUEST, f"AckEntries {entries} is not a power of two from 2 to {MAX_ACK_ENTRIES}")
        holder = self._holders.get(tp)
        if holder is not None and holder.peer is not peer:
            raise _Refused(
                layout.ERROR_ACCESS_HELD, f"{tp} is held by another RDMA producer ({holder.peer.client}); retry later or use TCP"
            )
        left = self._contended.get(tp, (0.0, 0.0))[0] - time.monotonic()
        if left > 0:
            raise _Refused(layout.ERROR_ACCESS_HELD, f"{tp} is being written by Kafka producers over TCP; retry in {left:.1f} s or use TCP")
        if holder is not None:
            self._release(holder)
        if not 0 < request.min_bytes <= partition.config.max_message_bytes:
            raise _Refused(
                MESSAGE_TOO_LARGE,
                f"a batch of {request.min_bytes} bytes is over max.message.bytes of {tp} ({partition.config.max_message_bytes})",
            )
        if self.before_roll not in partition.before_roll:
            partition.before_roll.append(self.before_roll)
        segment = partition.ensure_head(request.min_bytes)
        position = partition.kernel.end_position
        grant = self._new_grant(peer, partition, segment)
        try:
            memory = Memory.wrap(segment.fd, segment.address, segment.mapped_length, True, segment)
            grant.region = peer.domain.register(
                memory, Access.LOCAL_WRITE | Access.REMOTE_WRITE, position, segment.mapped_length - position
            )
            grant.staging = peer.domain.register(Memory.anonymous(entries * layout.ACK_BYTES, "kdirect-acks"), Access.LOCAL_WRITE)
            peer.engine.worker.install(
                grant.file_id,
                partition.kernel,
                peer.qp,
                segment.base_offset,
                position,
                request.ack_address,
                request.ack_rkey,
                entries,
                grant.staging,
                self._sync_first,
                tp in self._watched,
            )
        except BaseException:
            self._release(grant)
            raise
        self._holders[tp] = grant
        return {
            "file_id": grant.file_id,
            "rkey": grant.region.rkey,
            "address": grant.region.address - position,
            "length": segment.mapped_length,
            "position": position,
            "next_offset": partition.log_end_offset,
            "leader_epoch": partition.leader_epoch,
            "max_message_bytes": partition.config.max_message_bytes,
        }

    def before_append(self, partition: Partition) -> None:
        """A plain Kafka producer is about to append: recall the exclusive grant, if there is one."""
        grant = self._holders.get(partition.topic_partition)
        if grant is not None:
            self._recalls += 1
            self._contend(partition.topic_partition)
            log.info("RDMA access to %s recalled from %s: a Kafka producer appends", partition.topic_partition, grant.peer.client)
            self._release(grant, notify=True)

    def _contend(self, tp: TopicPartition) -> None:
        now = time.monotonic()
        until, seconds = self._contended.get(tp, (0.0, 0.0))
        seconds = min(2 * seconds, CONTENTION_MAX_S) if now < until + 2 * seconds else CONTENTION_S
        self._contended[tp] = (now + seconds, seconds)

    def before_roll(self, partition: Partition) -> None:
        """The head is about to be sealed for another reason than its holder's wish (retention, roll by time).

        Any thread, and it may hold the partition's locks: so only what must be over before the seal is done here, the rest on the loop.
        """
        grant = self._holders.get(partition.topic_partition)
        if grant is not None:
            grant.peer.engine.worker.retire(grant.file_id, True)
            time.sleep(RECALL_GRACE_S)
            grant.region.deregister()
            self._later(self._finish_retired, grant.file_id)

    # -- consume ---------------------------------------------------------------------------------------

    def _get_consume_access(self, connection: Hashable, request: Any) -> dict[str, Any]:
        if not self._consume_enabled:
            raise _Refused(layout.ERROR_ACCESS_DISABLED, "RDMA consume is switched off on this broker (rdma.consume=false); use TCP")
        peer = self._peer(connection, request.connection_id)
        answers = []
        for target in request.partitions:
            try:
                finished = peer.grants.get(target.finished_file_id)
                if finished is not None and not finished.is_produce:
                    self._release(finished)
                answers.append(self._grant_read(peer, self._partition(target.topic, target.partition), target.offset))
            except _Refused as e:
                answers.append({"error_code": e.code, "error_message": str(e)})
            except RdmaError as e:  # what cannot be registered can still be had over TCP
                log.warning("read access of %s to %s-%d failed: %s", peer.client, target.topic, target.partition, e)
                answers.append({"error_code": layout.ERROR_ACCESS_DISABLED, "error_message": str(e)})
            except KdirectError as e:
                answers.append({"error_code": UNKNOWN_SERVER_ERROR, "error_message": str(e)})
        return {
            "slot_address": peer.slot_region.address,
            "slot_rkey": peer.slot_region.rkey,
            "slot_count": self._slots_per_consumer,
            "partitions": [p.GetConsumeAccessResponse.ConsumeGrant(**{**_EMPTY_GRANT, **a}) for a in answers],
        }

    def _grant_read(self, peer: Peer, partition: Partition, offset: int) -> dict[str, Any]:
        tp = partition.topic_partition
        for _ in range(16):
            wanted = offset
            high_watermark, start = partition.high_watermark, partition.log_start_offset
            if wanted == LATEST_OFFSET:
                wanted = high_watermark
            elif wanted == EARLIEST_OFFSET:
                wanted = start
            if not start <= wanted <= max(high_watermark, partition.log_end_offset):
                raise _Refused(OFFSET_OUT_OF_RANGE, f"offset {wanted} of {tp} is outside [{start}, {high_watermark}]")
            head = partition.head
            segment = head if wanted >= partition.log_end_offset else partition.segment_for(wanted)
            if segment is not None and segment.sealed and not (segment is head and wanted >= partition.log_end_offset):
                answer = self._grant_file(peer, partition, segment, wanted, with_slot=False)
            else:
                answer = self._grant_file(peer, partition, segment, wanted, with_slot=True, with_data=offset != LATEST_OFFSET)
            if answer is not None:
                return answer
        raise _Refused(UNKNOWN_SERVER_ERROR, f"{tp} rolls faster than access can be granted; raise log.segment.bytes")

    def _grant_file(
        self, peer: Peer, partition: Partition, segment: Segment | None, wanted: int, *, with_slot: bool, with_data: bool = True
    ) -> dict[str, Any] | None:
        """Grant one file; None when the head moved on in between (the caller looks again)."""
        grant = self._new_grant(peer, partition, segment)
        try:
            if segment is not None and with_data:
                segment.map()
                memory = Memory.wrap(segment.fd, segment.address, segment.mapped_length, False, segment)
                # Of a sealed file no more than there is: registration may pin pages, and would fill the hole behind the end again.
                length = min(segment.mapped_length, max(1, -(-segment.size // 4096)) * 4096) if segment.sealed else segment.mapped_length
                grant.region = peer.domain.register(memory, Access.REMOTE_READ, 0, length)
            answer = {
                "error_code": 0,
                "file_id": grant.file_id,
                "rkey": grant.region.rkey if grant.region is not None else 0,
                "address": grant.region.address if grant.region is not None else 0,
                "length": grant.region.length if grant.region is not None else 0,
                "log_start_offset": partition.log_start_offset,
                "leader_epoch": partition.leader_epoch,
            }
            if with_slot:
                grant.slot_index = peer.free_slot(self._slots_per_consumer)
                if grant.slot_index < 0:
                    raise _Refused(
                        layout.ERROR_NO_FREE_SLOT,
                        f"all {self._slots_per_consumer} metadata slots of this consumer are in use;"
                        " raise rdma.slots.per.consumer on the broker",
                    )
                peer.slots[grant.slot_index] = partition.topic_partition
                address = peer.slot_address(grant.slot_index)
                partition.kernel.attach_slot(address, grant.file_id)
                slot = _read_slot(peer.slot_memory, grant.slot_index)
                expected = segment.base_offset if segment is not None else None
                if partition.head is not segment or (expected is not None and slot["segment_base_offset"] != expected):
                    self._release(grant)
                    return None
                answer |= {
                    "slot_index": grant.slot_index,
                    "segment_base_offset": slot["segment_base_offset"],
                    "start_position": segment.position_for(wanted)
                    if segment is not None and wanted < partition.log_end_offset
                    else slot["last_readable_position"],
                    "last_readable_position": slot["last_readable_position"],
                    "high_watermark": slot["high_watermark"],
                    "last_stable_position": slot["last_stable_position"],
                    "last_stable_offset": slot["last_stable_offset"],
                }
            else:
                assert segment is not None
                answer |= {
                    "slot_index": -1,
                    "segment_base_offset": segment.base_offset,
                    "start_position": segment.position_for(wanted),
                    "last_readable_position": segment.size,
                    "high_watermark": partition.high_watermark,
                    "last_stable_position": segment.size,
                    "last_stable_offset": partition.last_stable_offset,
                }
            return answer
        except BaseException:
            if grant.file_id in self._grants:
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

    def _new_grant(self, peer: Peer, partition: Partition, segment: Segment | None) -> Grant:
        if len(self._grants) >= 0xFFFF:
            raise _Refused(layout.ERROR_NO_FREE_SLOT, "all 65535 file ids of this broker are granted; close idle clients")
        while self._next_file_id in self._grants:
            self._next_file_id = self._next_file_id % 0xFFFF + 1
        grant = Grant(file_id=self._next_file_id, peer=peer, partition=partition, segment=segment)
        self._next_file_id = self._next_file_id % 0xFFFF + 1
        self._grants[grant.file_id] = peer.grants[grant.file_id] = grant
        if segment is not None:
            segment.acquire()
        return grant

    def _release(self, grant: Grant, *, notify: bool = False) -> None:
        """End a grant: stop commits, end the key, then tidy what it may have left behind the tail.  The second call does nothing."""
        if grant.released:
            return
        grant.released = True
        tp = grant.partition.topic_partition
        if grant.slot_index >= 0:
            grant.partition.kernel.detach_slot(grant.peer.slot_address(grant.slot_index))
            _clear_slot(grant.peer.slot_memory, grant.slot_index)
            grant.peer.slots.pop(grant.slot_index, None)
            grant.slot_index = -1
        if grant.is_produce:
            grant.peer.engine.worker.retire(grant.file_id, notify)
            if notify:
                time.sleep(RECALL_GRACE_S)
        left = grant.region.deregister() if grant.region is not None else True
        if grant.is_produce:
            grant.peer.engine.worker.remove(grant.file_id)
            grant.staging.deregister()
            if self._holders.get(tp) is grant:
                del self._holders[tp]
            if self._logs.partitions.get(tp) is grant.partition and grant.partition.head is grant.segment:
                if left:
                    segment = grant.segment
                    assert segment is not None
                    grant.partition.kernel.clear_tail(segment.base_offset, _written_end(grant, grant.partition.kernel.end_position))
                else:
                    log.warning("%s did not leave %s in time: its head moves to a fresh file", grant.peer.client, tp)
                    grant.partition.roll()
        self._grants.pop(grant.file_id, None)
        grant.peer.grants.pop(grant.file_id, None)
        if grant.segment is not None:
            grant.segment.release()

    def _finish_retired(self, file_id: int) -> None:
        grant = self._grants.get(file_id)
        if grant is not None and grant.is_produce:
            log.info(
                "RDMA access of %s to %s ended: a request was refused, or the head rolled",
                grant.peer.client,
                grant.partition.topic_partition,
            )
            self._release(grant)

    def _finish_cut(self, transport: str, qp_num: int, reason: str) -> None:
        peer = self._by_qp.get((transport, qp_num))
        if peer is not None:
            if reason == "disconnected":
                reason = getattr(peer.qp, "fault", "") or reason
            level = logging.DEBUG if reason == "disconnected" else logging.WARNING
            self._cuts += level == logging.WARNING
            log.log(level, "RDMA client %s (queue pair %d) is cut: %s", peer.client, qp_num, reason)
            self._close_peer(peer)

    def _close_peer(self, peer: Peer) -> None:
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
                self._release(grant)
            except RdmaError as e:
                log.warning("releasing %s of %s: %s", grant.partition.topic_partition, peer.client, e)
        peer.qp.close()
        peer.domain.close()

    def connection_closed(self, connection: Hashable) -> None:
        """Free everything that was opened over this TCP connection."""
        for peer in [x for x in self._peers.values() if x.connection is connection]:
            self._close_peer(peer)

    def partition_deleted(self, tp: TopicPartition) -> None:
        """The partition is being deleted: tell its readers through their slots, end all access to it."""
        grants = [g for g in self._grants.values() if g.partition.topic_partition == tp]
        for grant in grants:
            if grant.is_produce:
                self._release(grant, notify=True)
            else:
                # Readers keep the (unlinked) bytes they were granted; their slot says that no more will come.
                grant.partition.kernel.revoke_slots()
        self._watched.discard(tp)
        self._contended.pop(tp, None)

    # -- waiting for appends ---------------------------------------------------------------------------

    def watch(self, tp: TopicPartition) -> None:
        """Call `on_append(tp)` (on the worker's thread) once, at the next RDMA commit to `tp`."""
        self._watched.add(tp)
        holder = self._holders.get(tp)
        if holder is not None:
            holder.peer.engine.worker.watch(holder.file_id)

    def statistics(self) -> dict[str, int]:
        """Counters; names as in `kdirect.metrics`."""
        out = {"rdma_access_requests": self._requests, "rdma_recalls": self._recalls, "rdma_clients_cut": self._cuts}
        out["rdma_grants"] = len(self._grants)
        for engine in self._engines.values():
            for name, value in engine.worker.statistics().items():
                out[name] = out.get(name, 0) + value
        return out


_EMPTY_GRANT: dict[str, Any] = {
    "error_code": 0, "error_message": None, "file_id": -1, "slot_index": -1, "rkey": 0, "address": 0, "length": 0, "segment_base_offset": 0,
    "start_position": 0, "last_readable_position": 0, "high_watermark": 0, "last_stable_position": 0, "last_stable_offset": 0,
    "log_start_offset": 0, "leader_epoch": 0,
}  # fmt: skip
_EMPTY: dict[Any, dict[str, Any]] = {
    p.OpenQueuePairResponse: {"connection_id": 0, "address": b"", "max_in_flight": 0, "ping_address": 0, "ping_rkey": 0, "ping_crc": 0},
    p.GetProduceAccessResponse: {
        "file_id": -1, "rkey": 0, "address": 0, "length": 0, "position": 0, "next_offset": 0, "leader_epoch": 0, "max_message_bytes": 0,
    },
    p.GetConsumeAccessResponse: {"slot_address": 0, "slot_rkey": 0, "slot_count": 0, "partitions": []},
    p.ReleaseAccessResponse: {},
}  # fmt: skip


def _written_end(grant: Grant, tail: int) -> int:
    """Where the bytes end that a producer wrote behind the tail.  Requests are contiguous and none is longer than max.message.bytes, so a
    longer stretch of zeros is the end; a 64 MiB file need not be touched to its last page."""
    view = memoryview(grant.region.memory)
    limit = grant.partition.config.max_message_bytes
    end = at = tail
    while at < len(view) and at - end <= limit:
        chunk = bytes(view[at : at + _ZERO_CHUNK])
        if chunk.count(0) != len(chunk):
            end = at + len(chunk)
        at += len(chunk)
    return end


_ZERO_CHUNK = 64 << 10


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
