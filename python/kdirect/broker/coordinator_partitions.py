"""What this broker coordinates: the partitions that it leads of a topic with a coordinator's state.

Carries out what `kdirect.broker.coordinator_partition` decides for each partition: waits for
replicas, has the log read on a thread, and has what it holds restored and given up.  `refusal` is
asked before anything is said of a key, which is the name of what is coordinated: of a group, in
``__consumer_offsets``.

A broker that is alone (`replication` is None) reads all partitions when it starts, before it
serves.  In a cluster the hooks `elected` and `resigned` are told of each leadership, `moved` of
high watermarks, and the topic is created by the controller: `ask_for_topic`.

Called on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Protocol

from kdirect.broker import coordinator_partition
from kdirect.broker.coordinator_partition import CoordinatorPartition, Effect, Event, State
from kdirect.broker.files import OnThread
from kdirect.broker.state_replication import StateReplication
from kdirect.errors import KdirectError
from kdirect.format.error_codes import ErrorCode
from kdirect.log.partition import Partition
from kdirect.model import TopicPartition

log = logging.getLogger("kdirect.broker.groups")

CATCH_UP_S = 10.0  # of one wait for replicas; the next begins when the high watermark has moved


class Store(Protocol):
    """The table that lives in the topic; `kdirect.broker.offsets.OffsetStore`."""

    @property
    def partition_count(self) -> int:
        """Of the topic; 0 while there is none."""

    def index_of(self, key: str, /) -> int:
        """The partition of a key."""

    def open(self) -> int:
        """File work of a broker that is alone: how many partitions there are to load."""

    def load_partition(self, index: int, /) -> Sequence[Any]:
        """File work of a broker that is alone: what a partition holds."""

    def read_partition(self, partition: Partition, is_wanted: Callable[[], bool], /) -> Any:
        """File work: a table of its own, for `install`."""

    def install(self, partition: Partition, table: Any, /) -> Sequence[Any]:
        """Put what was read into memory; what the partition holds."""

    def unload_partition(self, index: int, /) -> None:
        """Forget what the partition holds."""


class Owner(Protocol):
    """What becomes of that which is coordinated; `GroupHandlers`."""

    def restore(self, loaded: Sequence[Any], /) -> None:
        """It is coordinated here from now on."""

    def give_up(self, is_gone: Callable[[str], bool], /) -> None:
        """Those keys are no longer."""


class CoordinatorPartitions:
    """See the module.  `replication` is None where the broker is alone.  `create_topic()`: have the
    controller create the topic; `set_right()`: have it correct the topic's properties where they
    are not as they have to be; KdirectError."""

    def __init__(
        self,
        topic: str,
        store: Store,
        owner: Owner,
        on_thread: OnThread,
        *,
        replication: StateReplication | None = None,
        create_topic: Callable[[], Coroutine[Any, Any, Any]] | None = None,
        set_right: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        self._topic = topic
        self._store = store
        self._owner = owner
        self._on_thread = on_thread
        self._replication = replication
        self._create_topic = create_topic
        self._set_right = set_right
        self._correction: asyncio.Future[None] | None = None
        self._states: dict[int, CoordinatorPartition] = {}
        self._logs: dict[int, Partition] = {}  # of those that this broker leads
        self._read: dict[int, Any] = {}  # what waits to be installed
        self._stalled: dict[int, Callable[[], None]] = {}  # waits to be begun again, by partition
        self._creation: asyncio.Future[Any] | None = None
        self._failure = ""  # of the last creation

    # -- looking -----------------------------------------------------------------------------------

    def state(self, index: int) -> CoordinatorPartition:
        return self._states.get(index, CoordinatorPartition())

    def index_of(self, key: str) -> int | None:
        """The partition of a key; None while there is no topic."""
        return self._store.index_of(key) if self._store.partition_count else None

    def refusal(self, key: str) -> int:
        """Why nothing may be said of a key here; NONE: its coordinator is this broker."""
        if self._replication is None:  # it has read everything before it served
            return ErrorCode.NONE
        index = self.index_of(key)
        if index is None:
            return ErrorCode.NOT_COORDINATOR
        return coordinator_partition.REFUSALS[self.state(index).state]

    @property
    def loading(self) -> bool:
        """Is there something that this broker coordinates and does not know yet?"""
        return any(x.state in (State.WAITING, State.LOADING) for x in self._states.values())

    @property
    def active(self) -> bool:
        """Is there a partition of which it coordinates what it holds?"""
        return any(x.state is State.ACTIVE for x in self._states.values())

    # -- leadership --------------------------------------------------------------------------------

    def start_alone(self) -> None:
        """Read all partitions.  File work, before the broker serves.  CorruptLogError names a
        record that cannot be read."""
        for index in range(self._store.open()):
            self._step(index, coordinator_partition.Elected(0))

    def elected(self, tp: TopicPartition, partition: Partition, epoch: int) -> None:
        """This broker leads a partition, of any topic, from leader epoch `epoch` on."""
        if tp.topic == self._topic:
            self._logs[tp.partition] = partition
            self._step(tp.partition, coordinator_partition.Elected(epoch))
            if self._set_right is not None and self._correction is None:
                self._correction = asyncio.ensure_future(self._set_right())
                self._correction.add_done_callback(self._corrected)

    def resigned(self, tp: TopicPartition, partition: Partition) -> None:
        """It leads a partition, of any topic, no longer."""
        if tp.topic == self._topic:
            self._logs.pop(tp.partition, None)
            self._stalled.pop(tp.partition, None)
            self._step(tp.partition, coordinator_partition.Resigned())

    def moved(self, tp: TopicPartition, partition: Partition) -> None:
        """The high watermark of a partition, of any topic, is a higher one."""
        if tp.topic == self._topic and (again := self._stalled.pop(tp.partition, None)):
            again()

    def close(self) -> None:
        """Nothing is begun from here on."""
        self._stalled.clear()

    def _step(self, index: int, event: Event) -> None:
        before = self.state(index)
        after, effects = coordinator_partition.step(before, event)
        self._states[index] = after
        if after.state is not before.state:
            log.debug("%s-%d: %s", self._topic, index, after)
        for effect in effects:
            self._DO[effect](self, index, after.tenure)

    def _is_present(self, index: int, tenure: int) -> bool:
        return self.state(index).tenure == tenure and self.state(index).state is not State.ABSENT

    # -- effects -----------------------------------------------------------------------------------

    def _wait(self, index: int, tenure: int) -> None:
        if self._replication is None:
            self._step(index, coordinator_partition.Committed(tenure))
            return
        end = self._logs[index].log_end_offset
        self._wait_for(index, tenure, end, self.state(index).epoch)

    def _wait_for(self, index: int, tenure: int, end: int, epoch: int) -> None:
        """Wait for replicas, for as long as this broker leads."""
        assert self._replication is not None
        if not self._is_present(index, tenure):
            return
        again = partial(self._wait_for, index, tenure, end, epoch)
        try:
            future = self._replication.committed(self._logs[index], end, epoch, CATCH_UP_S)
        except KdirectError:
            self._stall(index, end, again)
            return

        def told(done: asyncio.Future[None]) -> None:
            if done.cancelled():
                return
            if done.exception() is None:
                self._step(index, coordinator_partition.Committed(tenure))
            else:
                self._stall(index, end, again)

        future.add_done_callback(told)

    def _stall(self, index: int, end: int, again: Callable[[], None]) -> None:
        """The replicas did not have it in time, or are too few: try again when the high watermark
        has moved.  If this broker leads no longer, nobody waits."""
        partition = self._logs.get(index)
        if partition is None or self._replication is None:
            return
        self._stalled[index] = again
        self._replication.watch(partition)
        if partition.high_watermark >= end:  # it has moved meanwhile
            self.moved(partition.topic_partition, partition)

    def _load(self, index: int, tenure: int) -> None:
        if self._replication is None:
            self._store.load_partition(index)
            self._step(index, coordinator_partition.Loaded(tenure))
            return

        partition = self._logs[index]
        is_wanted = partial(self._is_present, index, tenure)

        def read() -> Any:
            return self._store.read_partition(partition, is_wanted)

        self._on_thread(partition, read, partial(self._loaded, index, tenure))

    def _loaded(self, index: int, tenure: int, table: Any, error: BaseException | None) -> None:
        if not self._is_present(index, tenure):
            return  # of a tenure that is over
        if error is not None:
            log.error("%s-%d cannot be loaded: %s", self._topic, index, error)
            self._step(index, coordinator_partition.Unreadable(tenure))
            return
        self._read[index] = table
        self._step(index, coordinator_partition.Loaded(tenure))

    def _install(self, index: int, tenure: int) -> None:
        if self._replication is None:
            loaded = self._store.load_partition(index)
        else:
            loaded = self._store.install(self._logs[index], self._read.pop(index))
            log.info(
                "coordinating what %s-%d holds (%d), leader epoch %d",
                self._topic, index, len(loaded), self.state(index).epoch,
            )  # fmt: skip
        self._owner.restore(loaded)

    def _unload(self, index: int, tenure: int) -> None:
        self._owner.give_up(lambda key: self._store.index_of(key) == index)
        self._store.unload_partition(index)

    _DO = {
        Effect.WAIT: _wait,
        Effect.LOAD: _load,
        Effect.INSTALL: _install,
        Effect.UNLOAD: _unload,
    }

    # -- topics ------------------------------------------------------------------------------------

    def ask_for_topic(self) -> None:
        """Have the controller create the topic, unless it is asked already."""
        if self._create_topic is not None and self._creation is None:
            self._creation = asyncio.ensure_future(self._create_topic())
            self._creation.add_done_callback(self._created)

    def _created(self, task: asyncio.Future[Any]) -> None:
        self._creation = None
        error = None if task.cancelled() else task.exception()
        failure = str(error) if error is not None else ""
        if failure and failure != self._failure:  # it is asked for again by every client
            log.warning("%s could not be created: %s", self._topic, failure)
        self._failure = failure

    def _corrected(self, task: asyncio.Future[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._correction = None  # the next election tries again
            log.warning("the properties of %s could not be corrected: %s", self._topic, error)
