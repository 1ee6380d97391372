"""Which groups this broker coordinates: the partitions of ``__consumer_offsets`` that it leads.

Carries out what `kdirect.broker.group_partition` decides for each partition: waits for replicas,
has the log read on a thread, and has groups restored and given up.  `refusal` is asked before
anything is said of a group.

A broker that is alone (`replicas` is None) reads all partitions when it starts, before it serves.
In a cluster the hooks `elected` and `resigned` are told of each leadership, and the topic is
created by the controller: `ask_for_topic`.

Called on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

from kdirect.broker import group_partition
from kdirect.broker.files import OnThread
from kdirect.broker.group_partition import Effect, Event, GroupPartition, State
from kdirect.broker.offsets import GroupTable, LoadedGroup, OffsetStore
from kdirect.broker.state_replication import Committing
from kdirect.broker.topics import OFFSETS_TOPIC
from kdirect.cluster.codes import Code
from kdirect.cluster.requests import Answer, CreateTopic, Request
from kdirect.errors import KdirectError
from kdirect.format.protocol import ErrorCode
from kdirect.log.checkpoint import new_id
from kdirect.log.partition import Partition
from kdirect.model import TopicPartition

log = logging.getLogger("kdirect.broker.groups")

CATCH_UP_S = 10.0  # of one wait for replicas; then it is begun again
RETRY_S = 0.1
CREATE_S = 30.0


class Groups(Protocol):
    """What becomes of the groups themselves."""

    def restore(self, loaded: Iterable[LoadedGroup]) -> None:
        """They are coordinated here from now on."""

    def give_up(self, is_gone: Callable[[str], bool]) -> None:
        """Those are no longer."""


class Asking(Protocol):
    """As much of `kdirect.broker.services.Membership` as the creation of a topic needs."""

    def ask(self, request: Request, timeout_s: float, /) -> asyncio.Future[Answer]:
        """What the controller answers."""


class GroupPartitions:
    """See the module.  `replicas` and `membership` are None where the broker is alone."""

    def __init__(
        self,
        store: OffsetStore,
        groups: Groups,
        on_thread: OnThread,
        *,
        replicas: Committing | None = None,
        membership: Asking | None = None,
    ) -> None:
        self._store = store
        self._groups = groups
        self._on_thread = on_thread
        self._replicas = replicas
        self._membership = membership
        self._states: dict[int, GroupPartition] = {}
        self._logs: dict[int, Partition] = {}  # of those that this broker leads
        self._read: dict[int, GroupTable] = {}  # what waits to be installed
        self._retries: set[asyncio.TimerHandle] = set()
        self._creation: asyncio.Future[Answer] | None = None

    # -- looking -----------------------------------------------------------------------------------

    def state(self, index: int) -> GroupPartition:
        return self._states.get(index, GroupPartition())

    def index_of(self, group: str) -> int | None:
        """The partition of a group; None while there is no topic."""
        return self._store.index_of(group) if self._store.partition_count else None

    def refusal(self, group: str) -> int:
        """Why nothing may be said of a group here; NONE: its coordinator is this broker."""
        if self._replicas is None:  # it has read everything before it served
            return ErrorCode.NONE
        index = self.index_of(group)
        if index is None:
            return ErrorCode.NOT_COORDINATOR
        return group_partition.REFUSALS[self.state(index).state]

    @property
    def loading(self) -> bool:
        """Are there groups that this broker coordinates and does not know yet?"""
        return any(x.state in (State.WAITING, State.LOADING) for x in self._states.values())

    # -- leadership --------------------------------------------------------------------------------

    def start_alone(self) -> None:
        """Read all partitions.  File work, before the broker serves.  CorruptLogError names a
        record that cannot be read."""
        for index in range(self._store.open()):
            self._step(index, group_partition.Elected(0))

    def elected(self, tp: TopicPartition, partition: Partition, epoch: int) -> None:
        """This broker leads a partition, of any topic, from leader epoch `epoch` on."""
        if tp.topic == OFFSETS_TOPIC:
            self._logs[tp.partition] = partition
            self._step(tp.partition, group_partition.Elected(epoch))

    def resigned(self, tp: TopicPartition, partition: Partition) -> None:
        """It leads a partition, of any topic, no longer."""
        if tp.topic == OFFSETS_TOPIC:
            self._logs.pop(tp.partition, None)
            self._step(tp.partition, group_partition.Resigned())

    def close(self) -> None:
        """Nothing is begun from here on."""
        for timer in self._retries:
            timer.cancel()
        self._retries.clear()

    def _step(self, index: int, event: Event) -> None:
        before = self.state(index)
        after, effects = group_partition.step(before, event)
        self._states[index] = after
        if after.state is not before.state:
            log.debug("groups of partition %d: %s", index, after)
        for effect in effects:
            self._DO[effect](self, index, after.tenure)

    def _is_present(self, index: int, tenure: int) -> bool:
        return self.state(index).tenure == tenure and self.state(index).state is not State.ABSENT

    # -- effects -----------------------------------------------------------------------------------

    def _wait(self, index: int, tenure: int) -> None:
        if self._replicas is None:
            self._step(index, group_partition.Committed(tenure))
            return
        log_ = self._logs[index]
        epoch = self.state(index).epoch
        self._wait_for(index, tenure, log_.log_end_offset, epoch)

    def _wait_for(self, index: int, tenure: int, end: int, epoch: int) -> None:
        """Wait for replicas, for as long as this broker leads."""
        assert self._replicas is not None
        if not self._is_present(index, tenure):
            return
        tp = TopicPartition(OFFSETS_TOPIC, index)
        again = partial(self._wait_for, index, tenure, end, epoch)
        try:
            future = self._replicas.committed(tp, end, epoch, CATCH_UP_S)
        except KdirectError:
            self._again_later(again)
            return

        def told(done: asyncio.Future[None]) -> None:
            if done.cancelled():
                return
            if done.exception() is None:
                self._step(index, group_partition.Committed(tenure))
            else:
                self._again_later(again)

        future.add_done_callback(told)

    def _again_later(self, work: Callable[[], None]) -> None:
        def due() -> None:
            self._retries.discard(timer)
            work()

        timer = asyncio.get_running_loop().call_later(RETRY_S, due)
        self._retries.add(timer)

    def _load(self, index: int, tenure: int) -> None:
        if self._replicas is None:
            self._store.load_partition(index)
            self._step(index, group_partition.Loaded(tenure))
            return

        def read() -> GroupTable:
            return self._store.read_partition(index, partial(self._is_present, index, tenure))

        self._on_thread(self._logs[index], read, partial(self._loaded, index, tenure))

    def _loaded(self, index: int, tenure: int, table: Any, error: BaseException | None) -> None:
        if not self._is_present(index, tenure):
            return  # of a tenure that is over
        if error is not None:
            log.error("groups of %s-%d cannot be loaded: %s", OFFSETS_TOPIC, index, error)
            self._step(index, group_partition.Unreadable(tenure))
            return
        self._read[index] = table
        self._step(index, group_partition.Loaded(tenure))

    def _install(self, index: int, tenure: int) -> None:
        if self._replicas is None:
            loaded = self._store.load_partition(index)
        else:
            loaded = self._store.install(index, self._read.pop(index))
            log.info(
                "coordinating %d groups of %s-%d, leader epoch %d",
                len(loaded), OFFSETS_TOPIC, index, self.state(index).epoch,
            )  # fmt: skip
        self._groups.restore(loaded)

    def _unload(self, index: int, tenure: int) -> None:
        self._groups.give_up(lambda group: self._store.index_of(group) == index)
        self._store.unload_partition(index)

    _DO = {
        Effect.WAIT: _wait,
        Effect.LOAD: _load,
        Effect.INSTALL: _install,
        Effect.UNLOAD: _unload,
    }

    # -- the topic ---------------------------------------------------------------------------------

    def ask_for_topic(self, partitions: int, factor: int) -> None:
        """Have the controller create the topic, unless it is asked already."""
        if self._membership is None or self._creation is not None:
            return
        request = CreateTopic(
            None,
            OFFSETS_TOPIC,
            new_id(),
            partitions,
            factor,
            config=self._store.topic_configs,
            start=random.randrange(1 << 16),
            shift=random.randrange(1 << 16),
        )
        self._creation = self._membership.ask(request, CREATE_S)
        self._creation.add_done_callback(self._created)

    def _created(self, future: asyncio.Future[Answer]) -> None:
        self._creation = None
        if future.cancelled():
            return
        error = future.exception()
        if error is not None:
            log.warning("%s could not be created: %s", OFFSETS_TOPIC, error)
        elif future.result().outcome.code not in (Code.NONE, Code.TOPIC_ALREADY_EXISTS):
            log.warning("%s could not be created: %s", OFFSETS_TOPIC, future.result().outcome)
