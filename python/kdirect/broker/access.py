"""RDMA clients of the broker: which may touch which memory (KafkaDirect §4.2.2, §4.4.2).

Owns: the engines of the transports in use, the way of a request to the room that answers it, and
the end of a client.  A client opens a queue pair over its TCP connection
(`kdirect.broker.queue_pairs`), then asks for access to files: to read them
(`kdirect.broker.read_access`) or to write the head of a partition
(`kdirect.broker.produce_access`).  Nothing here touches records: the produce worker commits, the
kernel updates slots, the RNIC (or its software) moves the bytes.

Invariants:

- A produce grant covers the head file from its tail on; consume regions and slots are remote-read
  only.
- Keys end before the memory under them changes its meaning: `deregister` comes first, then the
  tail is cleared or, where a client did not leave in time, the head moves to a fresh file.

All methods run on the broker's event loop, except where said.  The produce worker's callbacks
arrive on its thread and only schedule.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

from kdirect.broker.appends import Appends
from kdirect.broker.closing import Ending
from kdirect.broker.cluster_view import ClusterView
from kdirect.broker.connection import ConnectionContext
from kdirect.broker.engine import Engine, open_transport
from kdirect.broker.failures import PASSING, access_refusal
from kdirect.broker.files import FileThreads
from kdirect.broker.grants import Grant, GrantTable, Peer
from kdirect.broker.head_access import HeadAccess
from kdirect.broker.produce_access import ProduceAccess, WaitingRequest
from kdirect.broker.queue_pairs import QueuePairs
from kdirect.broker.read_access import ReadAccess
from kdirect.broker.scheduler import LoopScheduler, Scheduler
from kdirect.broker.worker import CutReason
from kdirect.errors import (
    KdirectError,
    LogError,
    NotLeaderError,
    OffsetNotAvailableError,
    RdmaError,
    RefusedError,
    StorageFullError,
    TransportError,
)
from kdirect.format import layout
from kdirect.format import protocol as p
from kdirect.format.error_codes import ErrorCode
from kdirect.format.schema import build
from kdirect.log.manager import LogManager
from kdirect.log.partition import Partition
from kdirect.log.segment import Segment
from kdirect.model import TopicPartition
from kdirect.wire.environment import SYSTEM, Environment

log = logging.getLogger("kdirect.broker.rdma")

RELEASED_AT_ONCE = 16

_RESPONSES = {
    layout.API_OPEN_QUEUE_PAIR: p.OpenQueuePairResponse,
    layout.API_GET_PRODUCE_ACCESS: p.GetProduceAccessResponse,
    layout.API_GET_CONSUME_ACCESS: p.GetConsumeAccessResponse,
    layout.API_RELEASE_ACCESS: p.ReleaseAccessResponse,
}


class AccessAnswer(NamedTuple):
    """What becomes of a request for access; one of the three is set."""

    response: Any = None  # it is answered
    work: Coroutine[Any, Any, Any] | None = None  # returns the response; never fails
    waiting: asyncio.Future[Any] | None = None  # of the response, which a later event brings

    @property
    def awaited(self) -> Awaitable[Any] | None:
        """What returns the response, unless it is there."""
        return self.work if self.work is not None else self.waiting


class Leadership(Protocol):
    """What access needs to know of a cluster's replicas: see `kdirect.broker.services.Replicas`."""

    def leader(self, tp: TopicPartition, epoch: int = -1, /) -> Partition:
        """A partition that this broker leads, in no other epoch than that; -1: in any."""

    def readable(self, tp: TopicPartition, epoch: int = -1, /) -> Partition:
        """A partition of which this broker has a replica, whether it leads or follows."""

    def may_append(self, tp: TopicPartition, /) -> None:
        """NotEnoughReplicasError below min.insync.replicas."""

    def knows_high_watermark(self, tp: TopicPartition, /) -> bool:
        """Are all records that were ever readable below the high watermark?"""


@dataclass
class LinkHooks:
    """What replication has done: a queue pair of another broker was cut, somebody waits for records
    that become readable, more of a log is on disk (any thread), one more transport is in use, and
    the end."""

    cut: Callable[[str, int, CutReason], None] = lambda *cut: None
    watch: Callable[[TopicPartition], None] = lambda tp: None
    flushed: Callable[[TopicPartition], None] = lambda tp: None
    opened: Callable[[Engine], None] = lambda engine: None
    close: Callable[[], None] = lambda: None


class AccessManager:
    """See the module.  `config` maps property names of the BROKER table to values.  Without
    `files`, what belongs on a thread is done on the spot; without `cluster`, this broker leads
    everything.  `scheduler` leads to the event loop, and
    `start_engine` lets an engine take completions: by a thread of its own, unless a simulator steps
    it."""

    def __init__(
        self,
        log_manager: LogManager,
        config: Mapping[str, Any],
        appends: Appends,
        files: FileThreads | None = None,
        cluster: ClusterView | None = None,
        *,
        environment: Environment = SYSTEM,
        scheduler: Scheduler | None = None,
        start_engine: Callable[[Engine], None] = Engine.start,
    ) -> None:
        self._logs = log_manager
        self._cluster = cluster
        self._config = config
        self._environment = environment
        self._scheduler: Scheduler = LoopScheduler() if scheduler is None else scheduler
        self._start_engine = start_engine
        self._consume_enabled = bool(config["rdma.consume"])
        self.on_append: Callable[[TopicPartition], None] | None = None
        self.leadership: Leadership | None = None  # None: the broker is alone, or has a layout
        self.links = LinkHooks()
        self._stopping = False
        self._engines: dict[str, Engine] = {}
        self._engines_lock = threading.Lock()  # `stop` comes on another thread than a new one
        self._opening: dict[str, asyncio.Task[Engine]] = {}
        self._files = files
        self._flushes = ThreadPoolExecutor(2, thread_name_prefix="kdirect-rdma-flush")
        release = files.release if files is not None else Segment.release
        self._grants = GrantTable(release, self._in_background)
        self._watched: set[TopicPartition] = set()
        self._ending: dict[tuple[TopicPartition, ...], list[HeadAccess]] = {}
        self._queue_pairs = QueuePairs(config, self._scheduler, environment)
        self.produce = ProduceAccess(
            log_manager,
            self._grants,
            config,
            appends=appends,
            scheduler=self._scheduler,
            environment=environment,
            appended=self._notify_appended,
            watched=self._watched,
        )
        self.produce.may_append = self._may_append
        self.read = ReadAccess(
            self._grants,
            slots_per_consumer=int(config["rdma.slots.per.consumer"]),
            partition_of=self._readable,
            is_current=lambda part: self._logs.partitions.get(part.topic_partition) is part,
            leads=self.produce.leads,
            listen=self.produce.listen,
            background=self._in_background,
            files=files,
        )
        # Heads whose acknowledgements have waited for replicas.  Written by the workers' threads.
        self._gated: dict[TopicPartition, WeakSet[HeadAccess]] = {}
        self._gated_lock = threading.Lock()
        self._requests = 0
        self._cuts = 0

    @property
    def context(self) -> ConnectionContext | None:
        """What takes the requests of two-sided clients."""
        return self._queue_pairs.context

    @context.setter
    def context(self, context: ConnectionContext) -> None:
        self._queue_pairs.context = context

    # -- life --------------------------------------------------------------------------------------

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Bind to the event loop.  A transport's device, queues and worker start with its first
        client."""
        if isinstance(self._scheduler, LoopScheduler):
            self._scheduler.start(loop)

    def stop(self) -> None:
        """Cut every client, end every grant and the workers.  Any thread: nothing is scheduled on
        the loop from here on."""
        self._stopping = True
        if isinstance(self._scheduler, LoopScheduler):
            self._scheduler.stop()
        self.produce.stop()
        ending = Ending("RDMA access")
        self._queue_pairs.open_no_more()
        for peer in self._queue_pairs:
            ending.step(partial(self._close_peer, peer))
        self._flushes.shutdown(wait=True)
        ending.step(self.links.close)
        with self._engines_lock:
            engines = list(self._engines.values())
            self._engines.clear()
        for engine in engines:
            ending.step(engine.stop)
        ending.step(self._queue_pairs.close)
        for engine in engines:
            ending.step(engine.close)
        ending.tell()

    async def _engine(self, transport: str) -> Engine:
        """The engine of a transport, opened with its first client: a device takes its time, and
        verbs try the log's files."""
        task = self._opening.get(transport)
        if task is None or (task.done() and task.exception() is not None):
            task = self._opening[transport] = asyncio.ensure_future(self._add_engine(transport))
        return await asyncio.shield(task)

    async def engine(self, transport: str) -> Engine:
        """The engine of a transport that replication uses; errors as of `open_transport`."""
        return await self._engine(transport)

    def peer_of(self, connection: Hashable, connection_id: int) -> Peer:
        """A client's queue pair.  RefusedError where this connection has none of that number."""
        return self._queue_pairs.peer_of(connection, connection_id)

    def soon(self, call: Callable[..., Any], *arguments: Any) -> None:
        """Call it on the event loop.  Any thread."""
        self._scheduler.soon(call, *arguments)

    @property
    def grants(self) -> GrantTable:
        """Who has which file id."""
        return self._grants

    async def _add_engine(self, transport: str) -> Engine:
        if self._files is None:
            engine = self.open_engine(transport)
        else:
            engine = await self._files.read(self.open_engine, transport)
        with self._engines_lock:
            if not self._stopping:
                self._engines[transport] = engine
        if self._stopping:
            engine.close()
            raise RefusedError(layout.ERROR_TRANSPORT_UNAVAILABLE, "the broker is stopping")
        self.links.opened(engine)
        return engine

    @property
    def engines(self) -> Sequence[Engine]:
        """Those of the transports in use."""
        return list(self._engines.values())

    def open_engine(self, transport: str) -> Engine:
        """A transport's device, at work.  On a thread."""
        soon = self._scheduler.soon
        engine = Engine(
            transport,
            open_transport(transport, self._config, self._logs.log_dirs, self._environment),
            spin_us=int(self._config["rdma.spin.us"]),
            on_cut=lambda *cut: soon(self._finish_cut, *cut),
            on_append=self._appended,
            on_head=lambda requests: soon(self._on_head, requests),
            on_broker_requests=lambda *answered: soon(self.produce.on_broker_requests, *answered),
            sync=self._sync,
        )
        self._start_engine(engine)
        return engine

    def _on_head(self, requests: Any) -> None:
        if isinstance(requests.owner, HeadAccess):
            self.produce.on_head(requests)
        else:
            requests.owner.head_told(requests)

    def _in_background(self, work: Callable[[], Any]) -> None:
        """Do what may take a moment, and what nobody waits for."""
        if self._files is None or self._stopping:
            work()
        else:
            self._files.background(work)

    def _notify_appended(self, tp: TopicPartition) -> None:
        if self.on_append is not None:
            self._watched.discard(tp)
            self.on_append(tp)

    # -- the worker's thread -----------------------------------------------------------------------

    def _appended(self, requests: Any) -> None:
        partition = requests.owner.partition
        # A broker that is alone tells of a flush, where readers wait for that; followers do not.
        if self.leadership is not None or not partition.gate.holds:
            self._notify_appended(partition.topic_partition)

    def _sync(self, requests: Any) -> None:
        """Acknowledgements wait for the disk, or for the gate of this head's partition.  A flush is
        made on a thread of its own, for the worker goes on; replicas open the gate by
        `high_watermark_moved`."""
        partition = requests.owner.partition
        if not (requests.waits_for_disk or partition.gate.waits_for_disk(partition.log_end_offset)):
            self._await_replicas(requests)
            return
        work = partial(self._flush, requests)
        if self._files is None:
            work()
        else:
            try:
                self._flushes.submit(work)
            except RuntimeError:  # the broker is stopping, and its clients are cut
                log.debug("no flush of %s: the broker is stopping", requests.owner.partition)

    def _await_replicas(self, requests: Any) -> None:
        """Have the worker look at this head whenever the high watermark moves, until the head has
        ended."""
        access: HeadAccess = requests.owner
        tp = access.partition.topic_partition
        with self._gated_lock:
            heads = self._gated.setdefault(tp, WeakSet())
            known = access in heads
            heads.add(access)
        if not known:  # it may have moved before anybody knew that this head waits
            access.engine.worker.gate_moved(requests)

    # -- a flush thread ----------------------------------------------------------------------------

    def _flush(self, requests: Any) -> None:
        access: HeadAccess = requests.owner
        partition, worker = access.partition, access.engine.worker
        try:
            partition.flush()
        except Exception as e:
            log.exception(
                "no flush of %s: its producers' access ends unacknowledged",
                partition.topic_partition,
            )
            worker.gate_failed(requests)
            if self._files is not None and isinstance(e, LogError | OSError):
                self._files.failed(partition, e)
            return
        worker.gate_moved(requests)
        self._notify_appended(partition.topic_partition)
        self.links.flushed(partition.topic_partition)

    # -- requests ----------------------------------------------------------------------------------

    def handle(self, connection: Hashable, request: Any) -> AccessAnswer:
        """Answer one of kdirect's four requests (API keys 32001 to 32004)."""
        self._requests += 1
        handler = {
            layout.API_OPEN_QUEUE_PAIR: self._open_queue_pair,
            layout.API_GET_PRODUCE_ACCESS: self._get_produce_access,
            layout.API_GET_CONSUME_ACCESS: self._get_consume_access,
            layout.API_RELEASE_ACCESS: self._release_access,
        }[request.API_KEY]
        try:
            answer = handler(connection, request)
        except (KdirectError, OSError) as e:  # no descriptor is left, say
            return AccessAnswer(self._failed(connection, request, e))
        if answer.work is None:
            return answer
        return AccessAnswer(work=self._answer_when_done(connection, request, answer.work))

    async def _answer_when_done(
        self, connection: Hashable, request: Any, work: Coroutine[Any, Any, Any]
    ) -> Any:
        try:
            return await work
        except (KdirectError, OSError) as e:
            return self._failed(connection, request, e)

    def _failed(self, connection: Hashable, request: Any, error: KdirectError | OSError) -> Any:
        """The answer to a request that failed."""
        refusal = access_refusal(error)
        # Clients repeat at once what passes, and find out by it that leaders move.
        if refusal is not error and not isinstance(error, (StorageFullError, *PASSING)):
            client = getattr(connection, "peer", connection)
            log.warning("%s of %s failed: %s", type(request).__name__, client, error)
        return _refused(request, refusal)

    def _open_queue_pair(self, connection: Hashable, request: Any) -> AccessAnswer:
        self._queue_pairs.check(request)
        engine = self._engines.get(request.transport)
        if engine is None:
            return AccessAnswer(work=self._open_first(connection, request))
        return AccessAnswer(self._queue_pairs.open(connection, request, engine))

    async def _open_first(self, connection: Hashable, request: Any) -> Any:
        """The first queue pair of a transport."""
        try:
            engine = await self._engine(request.transport)
        except (TransportError, RdmaError) as e:
            log.warning("transport %s cannot be offered: %s", request.transport, e)
            raise RefusedError(
                layout.ERROR_TRANSPORT_UNAVAILABLE,
                f"the broker cannot offer {request.transport}: {e}",
            ) from e
        return self._queue_pairs.open(connection, request, engine)

    def _get_produce_access(self, connection: Hashable, request: Any) -> AccessAnswer:
        peer = self._queue_pairs.peer_of(connection, request.connection_id)
        partition = self._partition(request.topic, request.partition, request.current_leader_epoch)
        response = self.produce.request(peer, partition, request)
        if response is not None:
            return AccessAnswer(response)
        return AccessAnswer(waiting=self._later(self.produce.wait(peer, partition, request)))

    def _may_append(self, tp: TopicPartition) -> None:
        if self.leadership is not None:
            self.leadership.may_append(tp)

    def _later(self, waiting: WaitingRequest) -> asyncio.Future[Any]:
        """A future of the response to a request that waits."""
        future = self._scheduler.new_future()

        def answer(outcome: Any) -> None:
            if not future.done():  # else the client is gone
                refused = isinstance(outcome, RefusedError)
                future.set_result(_refused(waiting.request, outcome) if refused else outcome)

        waiting.answer = answer
        return future

    def _get_consume_access(self, connection: Hashable, request: Any) -> AccessAnswer:
        return AccessAnswer(work=self._grant_files(connection, request))

    async def _grant_files(self, connection: Hashable, request: Any) -> Any:
        if not self._consume_enabled:
            raise RefusedError(
                layout.ERROR_ACCESS_DISABLED,
                "RDMA consume is switched off on this broker (rdma.consume=false); use TCP",
            )
        peer = self._queue_pairs.peer_of(connection, request.connection_id)
        return await self.read.answer(peer, request)

    def _release_access(self, connection: Hashable, request: Any) -> AccessAnswer:
        return AccessAnswer(work=self._release_files(connection, request))

    async def _release_files(self, connection: Hashable, request: Any) -> Any:
        peer = self._queue_pairs.peer_of(connection, request.connection_id)
        for i, file_id in enumerate(request.file_ids):
            grant = peer.grants.get(file_id)
            if grant is not None:
                self._release(grant)
            elif (end := peer.others.get(file_id)) is not None:
                end()
            if i % RELEASED_AT_ONCE == RELEASED_AT_ONCE - 1:
                await asyncio.sleep(0)  # 1,000 of them take 50 ms: others have their turn
        return build(p.ReleaseAccessResponse)

    def _partition(self, topic: str, index: int, epoch: int = -1) -> Partition:
        """The partition, if this broker leads it.  RefusedError, or what `Leadership.leader`
        raises."""
        tp = TopicPartition(topic, index)
        if self.leadership is not None:
            partition = self.leadership.leader(tp, epoch)
        else:
            partition = self._local_partition(topic, index)
        if not self.produce.leads(tp):
            raise self._not_led(tp)
        return partition

    def _readable(self, target: Any, of_replica: bool) -> Partition:
        """The partition of a request for read access, if its slots and its log may be shown; with
        `of_replica` also where this broker follows."""
        topic, index, epoch = target.topic, target.partition, target.current_leader_epoch
        leadership = self.leadership
        try:
            partition = self._partition(topic, index, epoch)
        except NotLeaderError:
            if leadership is None or not of_replica:
                raise
            partition = leadership.readable(TopicPartition(topic, index), epoch)
            if target.offset <= partition.high_watermark:
                return partition
            raise OffsetNotAvailableError(
                f"offset {target.offset} of {topic}-{index} is above this replica's high watermark",
                hint="ask the leader",
            ) from None
        if leadership is not None and not leadership.knows_high_watermark(
            partition.topic_partition
        ):
            raise OffsetNotAvailableError(
                f"{topic}-{index}: the leader was just elected, and does not know yet what is"
                " committed",
                hint="ask again in a moment",
            )
        return partition

    def _not_led(self, tp: TopicPartition) -> NotLeaderError:
        text, cluster = f"this broker does not lead {tp}", self._cluster
        if cluster is not None and (leader := cluster.partition(tp).leader) >= 0:
            text = f"broker {leader} leads {tp}" if leader != cluster.node_id else text
        return NotLeaderError(text, hint="ask for metadata")

    def _local_partition(self, topic: str, index: int) -> Partition:
        if self._cluster is not None and not self._cluster.leads(topic):
            raise RefusedError(
                ErrorCode.NOT_LEADER_OR_FOLLOWER,
                f"broker {self._cluster.leader_of(topic)} leads {topic}-{index}; ask for metadata",
            )
        partition = self._logs.partitions.get(TopicPartition(topic, index))
        if partition is None:
            raise RefusedError(
                ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
                f"partition {topic}-{index} does not exist; create the topic or check the name",
            )
        return partition

    # -- the end of grants and clients -------------------------------------------------------------

    def _release(self, grant: Grant, *, clean: bool = True) -> None:
        """End a grant.  The second call does nothing."""
        if grant.is_produce:
            self.produce.release(grant, clean=clean)
        else:
            self.read.release(grant)

    def _finish_cut(self, transport: str, qp_num: int, reason: CutReason) -> None:
        peer = self._queue_pairs.find(transport, qp_num)
        if peer is None:
            self.links.cut(transport, qp_num, reason)
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
        if not self._queue_pairs.forget(peer):
            return
        worker = peer.engine.worker
        written = [
            (access, region) for access in peer.leaving for region in access.keys_left_by(peer)
        ]
        for grant in list(peer.grants.values()):
            if grant.head_access is not None:
                worker.retire(grant.file_id, False)
                written.append((grant.head_access, grant.region))
        for end in list(peer.others.values()):
            end()
        worker.remove_peer(peer.qp.qp_num)
        for grant in list(peer.grants.values()):
            try:
                self._release(grant, clean=False)
            except Exception as e:  # the queue pair is closed all the same
                log.warning(
                    "releasing %s of %s: %s", grant.partition.topic_partition, peer.client, e
                )
        self._in_background(partial(self._queue_pairs.end, peer, written))

    def connection_closed(self, connection: Hashable) -> None:
        """Free everything that was opened over this TCP connection."""
        for peer in self._queue_pairs:
            if peer.connection is connection:
                self._close_peer(peer)
        self._queue_pairs.close_two_sided(connection)

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

    # -- leadership --------------------------------------------------------------------------------

    def resign(self, tp: TopicPartition) -> Awaitable[None]:
        """This broker does not lead `tp` any more.

        Producers' grants end, and those whose keys were not given back in time write into a file
        that is not the log's any more; slots say that access ended; what waits (appends, requests
        for access) fails with NotLeaderError, and what is not acknowledged never is.  When the
        awaitable is done nothing that was granted before can reach committed bytes, and nobody is
        given access until `lead`."""
        partition = self._logs.partitions.get(tp)
        if partition is None:
            done = self._scheduler.new_future()
            done.set_result(None)
            return done
        resigned = self.produce.resign(partition, self._not_led(tp))
        partition.kernel.revoke_slots()
        with self._gated_lock:
            self._gated.pop(tp, None)
        return resigned

    def lead(self, tp: TopicPartition) -> None:
        """This broker leads `tp`, in the epoch of its log: access may be given."""
        partition = self._logs.partitions.get(tp)
        if partition is not None:
            self.produce.lead(partition)

    def too_few(self, tp: TopicPartition) -> None:
        """Fewer replicas are in sync than ``min.insync.replicas``: producers that wait for them
        are told so at once."""
        partition = self._logs.partitions.get(tp)
        if partition is not None:
            self.produce.too_few(partition)

    def released(self, tp: TopicPartition) -> None:
        """The gate of `tp` holds acknowledgements no more: those that wait, for whatever moved the
        high watermark until then, are looked at."""
        partition = self._logs.partitions.get(tp)
        if partition is not None:
            self.produce.released(partition)

    def high_watermark_moved(self, tp: TopicPartition) -> None:
        """Replicas have confirmed records: acknowledgements that have waited for that go out.
        Once for each move, on the event loop."""
        if tp not in self._gated:
            return
        with self._gated_lock:
            heads = [access for access in self._gated[tp] if not access.ended]
            if not heads:
                del self._gated[tp]
        for access in heads:
            if access.requests is not None:
                access.engine.worker.gate_moved(access.requests)

    # -- waiting for appends -----------------------------------------------------------------------

    def watch(self, tp: TopicPartition) -> None:
        """Call `on_append(tp)` (on any thread) once, at the next RDMA commit to `tp`."""
        self._watched.add(tp)
        self.produce.watch(tp)
        self.links.watch(tp)

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


def _refused(request: Any, refusal: RefusedError) -> Any:
    """The response to a request that is refused."""
    fields: dict[str, Any] = {"error_code": refusal.code, "error_message": str(refusal)}
    if request.API_KEY == layout.API_GET_PRODUCE_ACCESS:
        fields["file_id"] = -1
    return build(_RESPONSES[request.API_KEY], **fields)
