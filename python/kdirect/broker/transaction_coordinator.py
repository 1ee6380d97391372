"""The coordinator of transactions: carries out what `kdirect.broker.transactions` decides.

Owns: the order in which it happens.  A decision is written to ``__transaction_state`` first; once
that counts (in a cluster: is committed by replicas; where files are flushed before they are
acknowledged: is on disk), the machine is told and whoever asked is answered.  Then markers are
written, and that the transaction is complete.
Which transactional ids are this broker's, `kdirect.broker.coordinator_partitions` knows; how
markers get to the partitions, `kdirect.broker.transaction_markers`.

The end of a transaction is not given up: what could not be written is tried again while this broker
coordinates the id, and by the next coordinator from what the log says.

On the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from kdirect.broker.appends import resolve
from kdirect.broker.attempt_coordinator import AttemptCoordinator
from kdirect.broker.coordinator_partition import State
from kdirect.broker.coordinator_partitions import CoordinatorPartitions
from kdirect.broker.failures import explain
from kdirect.broker.marker_groups import MarkerGroups
from kdirect.broker.services import Services
from kdirect.broker.state_replication import StateReplication
from kdirect.broker.topics import TRANSACTIONS_TOPIC
from kdirect.broker.transaction_markers import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    TransactionMarkers,
)
from kdirect.broker.transaction_store import LoadedTransaction
from kdirect.broker.transactions import (
    Decision,
    Markers,
    NeedsId,
    Reply,
    Transactions,
    Write,
)
from kdirect.errors import ClosedError, KdirectError, NotCoordinatorError
from kdirect.format.error_codes import ErrorCode

log = logging.getLogger("kdirect.broker.transactions")


class TransactionCoordinator:
    """See the module.  `take_id`: a producer id, once the next block of them was written down."""

    def __init__(
        self,
        services: Services,
        take_id: Callable[[], Awaitable[int]],
        markers: TransactionMarkers,
        groups: MarkerGroups,
    ) -> None:
        self._services = services
        self._store = services.transactions
        self._take_id = take_id
        self._markers = markers
        self._environment = services.environment
        self.machine = Transactions()
        self.partitions = self._open_partitions()
        self._tasks: set[asyncio.Task[None]] = set()
        self._timers: list[asyncio.TimerHandle] = []
        self._closed = False
        self.attempts = AttemptCoordinator(services, self, groups)

    # -- life --------------------------------------------------------------------------------------

    def _open_partitions(self) -> CoordinatorPartitions:
        """Which ids are this broker's.  In a cluster that changes with leaderships."""
        services, store = self._services, self._store
        on_thread, replicas = services.files.for_partition, services.replicas
        if replicas is None:
            return CoordinatorPartitions(TRANSACTIONS_TOPIC, store, self, on_thread)
        replication = StateReplication(replicas, services.flusher.begin)
        store.join_cluster(replication)
        topics: Any = services.topics  # of a member
        partitions = CoordinatorPartitions(
            TRANSACTIONS_TOPIC,
            store,
            self,
            on_thread,
            replication=replication,
            create_topic=self.create_topic,
            set_right=partial(topics.set_right, TRANSACTIONS_TOPIC, store.own_configs),
        )
        replicas.on_lead.append(partitions.elected)
        replicas.on_resign.append(partitions.resigned)
        replicas.on_high_watermark.append(partitions.moved)
        return partitions

    async def create_topic(self) -> Any:
        """Have the controller create ``__transaction_state``.  KdirectError."""
        config = self._services.config
        topics: Any = self._services.topics  # of a member
        return await topics.create_everywhere(
            TRANSACTIONS_TOPIC,
            config["transaction.state.log.num.partitions"],
            config["transaction.state.log.replication.factor"],
            self._store.topic_configs,
        )

    def start(self) -> None:
        """Before the broker serves.  CorruptLogError names a record that cannot be read.  A broker
        of a cluster reads when it is elected."""
        if self._services.replicas is None:
            self.partitions.start_alone()
        self._every(
            "transaction.abort.timed.out.transaction.cleanup.interval.ms", self.abort_timed_out
        )
        self._every(
            "transaction.remove.expired.transaction.cleanup.interval.ms", self.forget_expired
        )

    def _every(self, option: str, work: Callable[[], None]) -> None:
        seconds = self._services.config[option] / 1000

        def due() -> None:
            self._timers.remove(timer)
            if not self._closed:
                try:
                    work()
                finally:
                    self._every(option, work)

        timer = asyncio.get_running_loop().call_later(seconds, due)
        self._timers.append(timer)

    def close(self) -> None:
        """Nothing is begun from here on; what is prepared is ended by the next coordinator."""
        self._closed = True
        for timer in self._timers:
            timer.cancel()
        for task in self._tasks:
            task.cancel()
        self.attempts.close()
        self.partitions.close()

    def restore(self, loaded: Sequence[LoadedTransaction]) -> None:
        """This broker coordinates these ids from now on: it ends what was prepared."""
        for markers in self.attempts.restore(loaded):
            self._end_soon(markers, set(markers.partitions))

    def give_up(self, is_gone: Callable[[str], bool]) -> None:
        """Another broker coordinates these ids."""
        self.attempts.give_up(is_gone)

    # -- asking ------------------------------------------------------------------------------------

    def refusal(self, name: str) -> int:
        """Why nothing may be said of a transactional id here; NONE: this broker coordinates it."""
        services = self._services
        if self._closed:
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        if services.replicas is None and not services.cluster.coordinates(name):
            return ErrorCode.NOT_COORDINATOR
        return self.partitions.refusal(name)

    async def ask(self, name: str, decide: Callable[[int | None], Decision]) -> Reply:
        """The answer to a request about a transactional id, once what it changes counts.
        `decide(new id)` asks the machine, with a new producer id if it needs one."""
        found = self.ask_nowait(name, decide)
        return found if isinstance(found, Reply) else await found

    def ask_nowait(
        self, name: str, decide: Callable[[int | None], Decision]
    ) -> Reply | Awaitable[Reply]:
        """The same without a task where nothing is to be waited for: then the answer itself."""
        if code := self.refusal(name):
            return Reply(code)
        made = decide(None)
        if isinstance(made, NeedsId):
            new_id = self._services.topics.producer_id_nowait()
            if new_id is None:
                return self._ask_with_new_id(name, decide)
            made = decide(new_id)
        return self._settled(made)

    async def _ask_with_new_id(self, name: str, decide: Callable[[int | None], Decision]) -> Reply:
        """`ask` where the next block of producer ids has to be written down first."""
        new_id = await self.new_id()
        if new_id is None:
            return Reply(ErrorCode.COORDINATOR_NOT_AVAILABLE)
        if code := self.refusal(name):
            return Reply(code)
        found = self._settled(decide(new_id))
        return found if isinstance(found, Reply) else await found

    def _settled(self, made: Decision) -> Reply | asyncio.Future[Reply]:
        """The answer, once what was decided counts."""
        if isinstance(made, Reply):
            return made
        assert isinstance(made, Write)
        # Not by a task of whoever asks, who may be gone before the write is settled.
        answers: list[Reply] = []
        future: asyncio.Future[Reply] | None = None

        def told(reply: Reply) -> None:
            if future is None:
                answers.append(reply)
            else:
                resolve(future, reply, None)

        self._write(made, told)
        if answers:
            return answers[0]
        future = asyncio.get_running_loop().create_future()
        return future

    async def new_id(self) -> int | None:
        """A producer id that nobody has; None: there is none to be had now."""
        new_id = self._services.topics.producer_id_nowait()
        if new_id is None:
            try:
                new_id = await self._take_id()
            except KdirectError as e:
                explain(e, "a new producer id")
        return new_id

    # -- writing -----------------------------------------------------------------------------------

    def _write(self, write: Write, told: Callable[[Reply], None]) -> None:
        try:
            saved = self._store.save(write.transactional_id, write.record)
        except Exception as e:  # whatever it is: the id must not wait for ever
            self._settle(write, told, e)
            return
        self.when_saved(saved, partial(self._settle, write, told))

    def when_saved(
        self, saved: asyncio.Future[Any], then: Callable[[BaseException | None], None]
    ) -> None:
        """`then(error)` once a change counts that the store has begun, at once if it does."""
        if saved.done():
            self._saved(then, saved)
        else:
            saved.add_done_callback(partial(self._saved, then))

    def _saved(
        self, then: Callable[[BaseException | None], None], saved: asyncio.Future[Any]
    ) -> None:
        """It is in the log; does it have to be on disk before it counts?"""
        error = _error_of(saved)
        partition = saved.result() if error is None else None
        if partition is None or not partition.acknowledgements_wait():
            then(error)
            return
        flushed = self._services.flusher.begin(partition)
        if flushed is None:  # another flush has come first
            then(None)
        else:
            flushed.add_done_callback(lambda done: then(_error_of(done)))

    def _settle(
        self, write: Write, told: Callable[[Reply], None], error: BaseException | None
    ) -> None:
        """It counts, or nobody knows."""
        name = write.transactional_id
        if error is not None:
            self.machine.failed(write)
            explain(error, f"a change of transactional id {name}")
            told(Reply(self.refusal(name) or ErrorCode.COORDINATOR_NOT_AVAILABLE))
            return
        markers = self.machine.written(write)
        if markers is not None:
            # The answer leaves first, as with Kafka: the transaction is committed.  What is asked
            # after it comes in a later turn of the loop, and finds the markers.
            asyncio.get_running_loop().call_soon(self._end, markers)
        told(write.reply)

    # -- ending ------------------------------------------------------------------------------------

    def epoch(self, name: str) -> int | None:
        """The epoch in which this broker coordinates an id; None: it does not."""
        index = self.partitions.index_of(name)
        if self._closed or index is None:
            return None
        if self._services.replicas is None:  # a topic that was created since was never loaded
            return max(0, self.partitions.state(index).epoch)
        found = self.partitions.state(index)
        return found.epoch if found.state is State.ACTIVE else None

    def _end(self, markers: Markers) -> None:
        """Write markers, at once where that is possible, then that the transaction is complete."""
        epoch = self.epoch(markers.transactional_id)
        if epoch is None:
            return
        try:
            left = self._markers.append_here(markers, epoch)
        except Exception:  # whatever it is: the transaction must not wait for the next coordinator
            log.exception("markers of %s could not be appended at once", markers.transactional_id)
            left = set(markers.partitions)
        if left:
            self._end_soon(markers, left)
        else:
            self._complete(markers, lambda done: None if done else self._end_soon(markers, left))

    def _complete(self, markers: Markers, told: Callable[[bool], None]) -> None:
        write = self.machine.complete(markers, self._environment.time_ms())
        if write is None:
            told(True)  # that transaction is another's business
        else:
            self._write(write, lambda reply: told(reply.code == ErrorCode.NONE))

    def _end_soon(self, markers: Markers, left: set[Any]) -> None:
        task = asyncio.ensure_future(self._end_later(markers, left))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the end of a transaction failed", exc_info=error)

    async def _end_later(self, markers: Markers, left: set[Any]) -> None:
        """Try until all partitions have their markers, and the log says so."""
        name, pause = markers.transactional_id, 0.0
        epoch = self.epoch(name)
        while epoch is not None and self.epoch(name) == epoch:
            await asyncio.sleep(pause)
            pause = min(max(pause * 2, FIRST_PAUSE_S), LONGEST_PAUSE_S)
            if left:
                try:
                    left = await self._markers.write(markers, epoch, left)
                except NotCoordinatorError as e:
                    log.warning("%s: another coordinator ends its transaction: %s", name, e)
                    return
            if left or self.epoch(name) != epoch:
                continue
            if await self._completed(markers):
                return

    def _completed(self, markers: Markers) -> asyncio.Future[bool]:
        """Does the log say that the transaction is complete?"""
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._complete(markers, lambda ok: resolve(done, ok, None))
        return done

    # -- time --------------------------------------------------------------------------------------

    def abort_timed_out(self) -> None:
        """Abort the transactions that have taken longer than their producers allowed."""
        for write in self.machine.timed_out(self._environment.time_ms()):
            log.info("the transaction of %s takes too long, and is aborted", write.transactional_id)
            self._write(write, lambda reply: None)

    def forget_expired(self) -> None:
        """Forget the transactional ids that nobody has used for long."""
        expiration = self._services.config["transactional.id.expiration.ms"]
        for write in self.machine.expired(self._environment.time_ms(), expiration):
            self._write(write, lambda reply: None)
        self.attempts.forget_expired()


def _error_of(future: asyncio.Future[Any]) -> BaseException | None:
    if future.cancelled():
        return ClosedError("the broker is stopping", hint="try again")
    return future.exception()
