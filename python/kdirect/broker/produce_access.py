"""Producers' access to the heads of partitions, over RDMA and by Kafka's protocol (KafkaDirect
§4.2.2).

Owns: what clients, the log and the broker want of a head, turned into the events of
`kdirect.broker.head_life`.  Decides nothing itself: who may write a head, and what ends it, is in
the tables of that module, and `kdirect.broker.head_driver` carries their effects out.  The keys to
a head are `kdirect.broker.head_access`, the work on its file `kdirect.broker.head_files`, the order
of its requests `kdirect.broker.order`.  None of them touches records.

Invariants:

- A head has one exclusive holder, or any number of shared ones, all over one transport (atomics of
  different devices are not atomic together).  A Kafka client always gets its turn: on a shared head
  it reserves on the same word, an exclusive one is recalled.
- While a producer fills a head that it holds exclusively it may be granted the file of the next
  one, which is nobody's segment yet.  Its first request there says that it is done with the head:
  that is sealed, the file becomes the head, and what has arrived in it is committed.  Until then
  nothing in it is.  If the head ends in any other way the file is discarded, and its producer
  repeats what it has written there.
- Otherwise the next head is granted only when the last one has ended: its keys are out of reach and
  the bytes past its tail are zeros, or it is sealed and the head is a fresh file.  Whoever asks
  meanwhile waits for the answer.
- Requests of one Kafka connection to one partition keep their order, whatever becomes of the head:
  from before a head is opened until its file is repaired the partition is held (`Appends.hold`),
  and what Kafka clients send waits, or is reserved on the word.
- A partition that another broker leads is granted to nobody (`resign`, `lead`).
- A partition whose shared heads are aborted again and again is served over TCP for a while, and so
  is one that a producer wants for itself while Kafka clients write it.

All methods run on the broker's event loop, except where said.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from kdirect.broker.appends import Appends, PendingAppend, resolve
from kdirect.broker.failures import code_of
from kdirect.broker.grants import Grant, GrantTable, Peer
from kdirect.broker.head_access import Appended, HeadAccess
from kdirect.broker.head_answers import Occasion
from kdirect.broker.head_driver import HeadDriver
from kdirect.broker.head_life import LED_ELSEWHERE, Ask, Event, Room, State
from kdirect.broker.scheduler import Scheduler
from kdirect.broker.waiting_requests import WaitingRequest, WaitingRequests
from kdirect.errors import KdirectError, LogError, RefusedError, UnknownTopicError
from kdirect.format import layout
from kdirect.format import protocol as p
from kdirect.format.error_codes import ErrorCode
from kdirect.log.manager import LogManager
from kdirect.log.partition import AppendResult, Partition
from kdirect.model import TopicPartition
from kdirect.wire.environment import Environment

MAX_ACK_ENTRIES = 1 << 16
IDLE_BYTES = 1 << 20  # so much of a quiet head is not left to producers that do not write


class ProduceAccess:
    """See the module.  `appended(tp)` is called after commits to a shared head by the broker
    itself; `watched` are the partitions whose next commit somebody waits for."""

    def __init__(
        self,
        logs: LogManager,
        grants: GrantTable,
        config: Mapping[str, Any],
        *,
        appends: Appends,
        scheduler: Scheduler,
        environment: Environment,
        appended: Callable[[TopicPartition], None],
        watched: set[TopicPartition],
    ) -> None:
        self._logs = logs
        self._grants = grants
        self._appends = appends
        self._enabled = bool(config["rdma.produce"])
        self._scheduler = scheduler
        self._monotonic = environment.monotonic
        self._waiting = WaitingRequests(scheduler, self._ask)
        appends.on_idle = self._waiting.serve
        self._driver = HeadDriver(
            logs,
            grants,
            config,
            appends=appends,
            waiting=self._waiting,
            scheduler=scheduler,
            environment=environment,
            appended=appended,
            watched=watched,
        )
        self._driver.resigned = self._look_resigned
        # NotEnoughReplicasError below min.insync.replicas; for producers that wait for them.
        self.may_append: Callable[[TopicPartition], None] = lambda tp: None
        self._resigning: dict[TopicPartition, asyncio.Future[None]] = {}
        self._doomed: dict[TopicPartition, Partition] = {}  # they are about to be deleted
        # The worker's news, on the event loop.
        self.on_head = self._driver.on_head
        self.on_broker_requests = self._driver.on_broker_requests

    def stop(self) -> None:
        """Nothing is left to the event loop or to threads from here on.  Any thread."""
        self._driver.stopping = True

    @property
    def heads(self) -> dict[TopicPartition, HeadAccess]:
        """The heads that producers have access to."""
        return self._driver.heads

    # -- requests for access -----------------------------------------------------------------------

    def request(
        self, peer: Peer, partition: Partition, request: Any
    ) -> p.GetProduceAccessResponse | None:
        """The answer; None: the request has to `wait` for it.  Raises RefusedError."""
        self._check_request(partition, request)
        self.listen(partition)
        return self._ask(peer, partition, request)

    def wait(self, peer: Peer, partition: Partition, request: Any) -> WaitingRequest:
        """Let a request wait that `request` has just found no answer to."""
        return self._waiting.add(peer, partition, request)

    def _check_request(self, partition: Partition, request: Any) -> None:
        """RefusedError for what no state of the head could grant."""
        tp, config = partition.topic_partition, partition.config
        if not self._enabled:
            raise RefusedError(
                layout.ERROR_ACCESS_DISABLED,
                "RDMA produce is switched off on this broker (rdma.produce=false); use TCP",
            )
        if config.compacts:
            raise RefusedError(
                layout.ERROR_ACCESS_DISABLED,
                f"{tp} is compacted, and its records are checked for keys before they lie in its"
                " log; use TCP",
            )
        if config.looks_into_records:
            raise RefusedError(
                layout.ERROR_ACCESS_DISABLED,
                f"{tp} has compression.type={config.compression_type}, which the broker makes of"
                " batches before they lie in its log; use TCP",
            )
        if request.mode not in (
            layout.PRODUCE_EXCLUSIVE,
            layout.PRODUCE_SHARED,
            layout.PRODUCE_AUTO,
        ):
            raise RefusedError(
                ErrorCode.INVALID_REQUEST,
                f"produce mode {request.mode} is not offered; use 0 (exclusive), 1 (shared) or"
                " 2 (either)",
            )
        entries = request.ack_entries
        if not 2 <= entries <= MAX_ACK_ENTRIES or entries & (entries - 1):
            raise RefusedError(
                ErrorCode.INVALID_REQUEST,
                f"AckEntries {entries} is not a power of two from 2 to {MAX_ACK_ENTRIES}",
            )
        if not 0 < request.min_bytes <= config.max_message_bytes:
            raise RefusedError(
                ErrorCode.MESSAGE_TOO_LARGE,
                f"a batch of {request.min_bytes} bytes is over max.message.bytes of {tp}"
                f" ({config.max_message_bytes})",
            )
        if request.min_bytes > config.segment_bytes:  # said before a head is ended for it
            raise RefusedError(
                ErrorCode.RECORD_LIST_TOO_LARGE,
                f"a batch of {request.min_bytes} bytes is over segment.bytes of {tp}"
                f" ({config.segment_bytes})",
            )

    def _ask(
        self, peer: Peer, partition: Partition, request: Any
    ) -> p.GetProduceAccessResponse | None:
        """The answer; None: the request is looked at again when the head has ended."""
        tp = partition.topic_partition
        if request.acks != 1:
            self.may_append(tp)
        occasion = Occasion(partition, min_bytes=request.min_bytes)
        occasion.peer, occasion.request = peer, request
        if request.ahead_of_file_id >= 0:
            return self._ask_next(occasion)
        self._take_back(peer, partition, request)
        access = self._driver.current(tp)
        life = self._driver.life(tp)
        room = Room.BUSY
        if life.state is State.NOBODY and self._appends.is_free(tp):
            occasion.segment = partition.head_nowait(request.min_bytes)
            rolls = self._driver.files.rolling.get(tp) is occasion.segment
            room = Room.NONE if occasion.segment is None or rolls else Room.ENOUGH
        ask = Ask(
            alone=request.mode == layout.PRODUCE_EXCLUSIVE,
            shared=request.mode == layout.PRODUCE_SHARED,
            same_transport=access is None or access.engine is peer.engine,
            full=access is not None and access.tail >= access.capacity,
            room=room,
            in_turn=request.enters and access is not None and self._gives_way(access),
        )
        if access is not None:
            occasion.why = f"{peer.client} asks for it, too"
        event = life.classify(ask, self._monotonic())
        return self._driver.happened(event, occasion).answer  # type: ignore[no-any-return]

    def _gives_way(self, access: HeadAccess) -> bool:
        """May the head be recalled for another exclusive transactional producer?"""
        return access.between_transactions and self._monotonic() >= access.enters_until

    def _take_back(self, peer: Peer, partition: Partition, request: Any) -> None:
        """End what a producer has of the partition when it asks for access: it says which file it
        is done with, or has forgotten its grant, and what was under way."""
        access = self._driver.current(partition.topic_partition)
        finished = peer.grants.get(request.finished_file_id)
        if finished is not None and finished.is_produce and finished.partition is partition:
            if access is None or finished.head_access is not access:
                self.release(finished)
            elif access.shared:
                occasion = Occasion(partition)
                if 0 <= request.end_position <= access.capacity:
                    occasion.end_order = request.end_order
                self._driver.happened(Event.FULL, occasion)
            else:
                finished.released = True
                self._driver.happened(
                    Event.FINISHED, Occasion(partition, min_bytes=request.min_bytes)
                )
                access.engine.worker.remove(finished.file_id)
        elif access is not None:
            for grant in [g for g in access.members.values() if g.peer is peer]:
                self.release(grant, clean=False)

    # -- the file of the next head -----------------------------------------------------------------

    def _ask_next(self, occasion: Occasion) -> p.GetProduceAccessResponse | None:
        """A request for the file after the head that its producer fills."""
        tp = occasion.partition.topic_partition
        assert occasion.peer is not None
        access = self._driver.current(tp)
        filled = occasion.peer.grants.get(occasion.request.ahead_of_file_id)
        filled_access = filled.head_access if filled is not None else None
        if (
            access is None
            or filled_access is None
            or filled_access not in (access, access.successor)
        ):
            raise RefusedError(
                ErrorCode.INVALID_REQUEST,
                f"file {occasion.request.ahead_of_file_id} is not the head of {tp} which this"
                " producer writes",
            )
        life = self._driver.life(tp)
        event = life.classify_next_file(
            wanted=self._appends.waiting(tp),
            growing=access.capacity < access.full_length,
            from_it=filled_access is access.successor,
        )
        self._driver.run(life, life.on_next_file(event), occasion)
        return occasion.answer  # type: ignore[no-any-return]

    # -- producers that leave ----------------------------------------------------------------------

    def release(self, grant: Grant, *, clean: bool = True) -> None:
        """A producer gives access back, or (not `clean`) is gone.  The second call does nothing."""
        if grant.released:
            return
        grant.released = True
        access = grant.head_access
        assert isinstance(access, HeadAccess)
        if grant.file_id not in access.members:  # its head has ended
            if grant.word is not None:
                self._grants.deregister(grant.word)
            self._grants.drop(grant)
            return
        partition, worker = access.partition, access.engine.worker
        current = self._driver.heads.get(partition.topic_partition)
        if current is not None and current.successor is access:
            # It has left the head, too, and will write nothing in this file.
            worker.remove(grant.file_id)
            self._driver.happened(Event.NEXT_LEFT, Occasion(partition))
        elif current is not access or (
            access.shared and not self._driver.life(partition.topic_partition).is_granted
        ):
            # It goes with its head, in a moment; the worker writes into its ring no more.
            worker.remove(grant.file_id)
        elif not access.shared:
            self._driver.happened(Event.LEFT, Occasion(partition))
            worker.remove(grant.file_id)  # its ring may go when it has the answer
        else:
            access.leave(self._grants, grant, clean=clean)
            if not access.members:
                self._driver.happened(Event.LEFT, Occasion(partition))
            elif not clean:
                self._driver.happened(Event.ONE_LOST, Occasion(partition))

    # -- transactions of an exclusive producer -----------------------------------------------------

    def pause(self, grant: Grant) -> bool:
        """The one producer of a head ends its transaction: it has nothing under way, and writes
        nothing until `resume`.  Markers are appended at the tail meanwhile, and it keeps the head.
        False: it has to give the head back."""
        access = self._held_alone(grant)
        if access is not None:
            access.between_transactions = True
            access.enters_until = float("-inf")
        return access is not None

    def resume(self, grant: Grant) -> tuple[int, int] | None:
        """It writes again: the position and the order of its next request.  None: it has to give
        the head back."""
        access = self._held_alone(grant)
        if access is None:
            return None
        access.between_transactions = False
        return access.requests.position, access.requests.next_order

    def _held_alone(self, grant: Grant) -> HeadAccess | None:
        """The head of a grant, if its producer holds it alone and may go on there."""
        tp = grant.partition.topic_partition
        access = self._driver.current(tp)
        if (
            access is None
            or grant.head_access is not access
            or grant.released
            or access.requests.waiting
            or self._driver.life(tp).state is not State.EXCLUSIVE
        ):
            return None
        return access

    # -- the log's own wishes ----------------------------------------------------------------------

    def listen(self, partition: Partition) -> None:
        """Be asked before the partition's head is sealed, or shortened."""
        if self.before_roll not in partition.before_roll:
            partition.before_roll.append(self.before_roll)
            partition.before_give_back.append(self.may_give_back)

    def before_roll(self, partition: Partition) -> None:
        """The head is about to be sealed for another reason than its producers' wish (retention,
        roll by time).

        Any thread, and it may hold the partition's locks: so only what must be over before the seal
        is done here, the rest on the loop.
        """
        tp = partition.topic_partition
        head = partition.segments[-1]
        # Before looking: `HeadDriver._open` looks here after it has put its access there.
        self._driver.files.rolling[tp] = head
        access = self._driver.access_to(tp, head)
        if access is not None and not access.fenced:
            access.fence(notify=True)
            self._scheduler.soon(self._driver.rolled_away, access)

    def may_give_back(self, partition: Partition) -> bool:
        """May the unused part of a quiet head be freed?  Not while a producer may write it; one
        that holds much of it, or the file after it, without writing is asked to come back when it
        has something to write.  Nor while an RNIC has its pages pinned, for a consumer: they would
        not be the file's any more.  Any thread; holds the partition's roll lock."""
        access = self._driver.heads.get(partition.topic_partition)
        requests = access.requests if access is not None else None
        if access is not None and requests is not None:
            # The next file is as large as a whole head.
            ahead = access.successor is not None or access.next_file is not None
            if ahead or access.capacity - requests.position > IDLE_BYTES:
                self._scheduler.soon(self._end_idle, access)
            return False
        # These first: then they are among the grants.
        if any(file.partition is partition for file in list(self._grants.opening)):
            return False
        return not any(
            g.region is not None and g.peer.pins for g in self._grants.of(partition.topic_partition)
        )

    def _end_idle(self, access: HeadAccess) -> None:
        """End a head that nobody has written for a while, so that what is allocated of it can be
        given back."""
        if self._driver.current(access.partition.topic_partition) is access:
            occasion = Occasion(access.partition, why="nothing was written for a while")
            self._driver.happened(Event.IDLE, occasion)

    def begin_deletion(self, partitions: Iterable[TopicPartition]) -> list[HeadAccess]:
        """These partitions are about to be deleted: nobody gets access, and appends wait, until
        `end_deletion`.  Their heads, to be fenced on a thread before the files go."""
        heads = []
        for tp in partitions:
            self._appends.hold(tp)
            if tp in self._logs.partitions:
                self._doomed[tp] = self._logs.partitions[tp]
            access = self._driver.heads.get(tp)
            if access is not None:
                self._driver.happened(Event.DELETE, Occasion(access.partition))
                if (
                    self._driver.life(tp).state is State.DELETING
                ):  # else a thread puts it away already
                    heads.append(access)
        return heads

    def end_deletion(
        self, partitions: Iterable[TopicPartition], heads: Iterable[HeadAccess]
    ) -> None:
        """They are deleted, or (still in the log) could not be: producers and those who wait are
        told, and those whose records wait for the disk or for replicas."""
        for tp in partitions:
            partition = self._doomed.pop(tp, None)
            if partition is not None and self._logs.partitions.get(tp) is not partition:
                self._withdraw(partition)
        for access in heads:
            if not self._driver.is_current(access):
                continue
            if self._driver.files.is_current(access):  # RESUME releases it, when the head is closed
                self._driver.happened(Event.DELETION_FAILED, Occasion(access.partition))
            else:
                self._driver.happened(Event.DELETED, Occasion(access.partition))
                self._appends.release(access.partition.topic_partition)
        for tp in partitions:
            if tp not in self._logs.partitions:
                gone = self._why_gone(tp)
                self._appends.fail_waiting(tp, gone)
                refusal = RefusedError(code_of(gone), str(gone))
                self._waiting.refuse(tp, lambda waiting: True, refusal)
                if self._driver.life(tp).state is State.RESIGNED:
                    self._appends.accept(tp)
                self._driver.forget_history(tp)
            self._appends.release(tp)
            self._waiting.serve(tp)

    def _withdraw(self, partition: Partition) -> None:
        """What waits to be acknowledged never is; its producers are told, and look the topic up."""
        for access in self._driver.with_waiting(partition):
            if access.requests is not None:
                access.engine.worker.drop_gated(access.requests)

    def _why_gone(self, tp: TopicPartition) -> KdirectError:
        if tp in self._logs.lost:
            return LogError(
                f"the log directory of {tp} has failed",
                hint="mend it and start the broker again; see its log",
            )
        return UnknownTopicError(f"partition {tp} was deleted")

    # -- leadership --------------------------------------------------------------------------------

    def leads(self, tp: TopicPartition) -> bool:
        """May access be given?  False from `resign` until `lead`."""
        return self._driver.life(tp).state not in LED_ELSEWHERE

    def resign(self, partition: Partition, why: KdirectError) -> asyncio.Future[None]:
        """This broker does not lead the partition any more.  Producers are told, what waits fails
        with `why`; the future is done when nothing that a producer writes can become a record, and
        no append is being made."""
        tp = partition.topic_partition
        under_way = self._resigning.get(tp)
        if under_way is not None:
            return under_way
        future = self._resigning[tp] = self._scheduler.new_future()
        self._waiting.refuse(tp, lambda waiting: True, why)
        self._appends.refuse(tp, why, partial(self._look_resigned, tp))
        self._driver.happened(Event.RESIGN, Occasion(partition))
        self._look_resigned(tp)
        return future

    def _look_resigned(self, tp: TopicPartition) -> None:
        """Is a resignation over?"""
        over = self._driver.life(tp).state in (State.RESIGNED, State.NOBODY)
        if tp in self._resigning and over and self._appends.is_settled(tp):
            future = self._resigning.pop(tp)
            if not future.done():
                future.set_result(None)

    def lead(self, partition: Partition) -> None:
        """This broker leads the partition: access may be given.  Where a resignation is under way,
        once it is over."""
        tp = partition.topic_partition
        under_way = self._resigning.get(tp)
        if under_way is not None:
            under_way.add_done_callback(lambda _: self.lead(partition))
            return
        self._driver.happened(Event.LEAD, Occasion(partition))
        self._appends.accept(tp)

    def released(self, partition: Partition) -> None:
        """Look at the acknowledgements that wait."""
        for access in self._driver.with_waiting(partition):
            if access.requests is not None:
                access.engine.worker.gate_moved(access.requests)

    def too_few(self, partition: Partition) -> None:
        """See `HeadDriver.too_few`."""
        self._driver.too_few(partition)

    # -- Kafka clients -----------------------------------------------------------------------------

    @property
    def busy(self) -> tuple[dict[TopicPartition, Any], ...]:
        """See `Appender`."""
        return self._driver.heads, *self._appends.busy

    def append_nowait(
        self, partition: Partition, records: Any, at_ms: int
    ) -> AppendResult | Appended | None:
        """Append whole batches of a Kafka client, if nothing is to be waited for: no room to be
        made, and nobody before them.  None, and nothing has changed: then `append`."""
        if partition.topic_partition in self._driver.heads:
            return None
        return self._appends.append_nowait(partition, records, at_ms)

    def append(
        self, partition: Partition, records: Any, at_ms: int
    ) -> asyncio.Future[AppendResult] | asyncio.Future[Appended]:
        """The same after whatever comes first; its place among the appends to the partition is that
        of this call.  The future raises as `Partition.append`."""
        tp = partition.topic_partition
        if tp not in self._driver.heads:
            return self._appends.append(partition, records, at_ms)
        future: asyncio.Future[Any] = self._scheduler.new_future()
        item = PendingAppend(partition, bytes(records), at_ms, partial(resolve, future))
        error = partition.kernel.check(item.data, at_ms)
        if error:
            item.settle(Appended(error, -1, -1))
            return future
        item.checked = True
        self._submit(item)
        return future

    def append_marker(
        self, partition: Partition, batch: bytes, at_ms: int
    ) -> asyncio.Future[AppendResult] | asyncio.Future[Appended]:
        """The same of a coordinator's marker, which ends a transaction of the producers that write
        the head, or of others."""
        if partition.topic_partition not in self._driver.heads:
            return self._appends.append_marker(partition, batch, at_ms)
        future: asyncio.Future[Any] = self._scheduler.new_future()
        self._submit(
            PendingAppend(partition, batch, at_ms, partial(resolve, future), is_marker=True)
        )
        return future

    def _submit(self, item: PendingAppend) -> None:
        tp = item.partition.topic_partition
        if self._appends.waiting(tp) or not self._driver.reserve_for(item):
            self._appends.append_later(item)

    # -- the rest ----------------------------------------------------------------------------------

    def watch(self, tp: TopicPartition) -> None:
        """Somebody waits for the next commit to `tp`."""
        access = self._driver.heads.get(tp)
        for head in (access, access.successor if access is not None else None):
            if head is not None and head.requests is not None:
                head.engine.worker.watch(head.requests)

    def statistics(self) -> dict[str, int]:
        return self._driver.counters()
