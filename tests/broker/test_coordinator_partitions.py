"""A coordinator whose partition has replicas: commits count when they are committed, and nothing
that was told is lost or goes back, through elections, compaction and threads that come late."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kdirect.broker.appends import Appends
from kdirect.broker.coordinator_partition import State
from kdirect.broker.coordinator_partitions import CoordinatorPartitions
from kdirect.broker.deleted_topics import DeletedTopics
from kdirect.broker.offsets import OffsetStore
from kdirect.broker.state_replication import StateReplication
from kdirect.broker.topics import OFFSETS_TOPIC
from kdirect.cluster import paths
from kdirect.cluster.image import Image, Topic
from kdirect.cluster.records import TopicAssignment
from kdirect.errors import (
    CorruptMetadataError,
    LogError,
    NotEnoughReplicasError,
    NotLeaderError,
    TimedOutError,
)
from kdirect.format import group_records as records
from kdirect.format.batch import encode_single_bytes
from kdirect.format.error_codes import ErrorCode as E
from kdirect.format.group_records import CommittedOffset
from kdirect.log.config import LogConfig
from kdirect.log.kernel_transactions import admit_transaction, begin_verification, marker_batch
from kdirect.log.manager import LogManager
from kdirect.log.partition import Partition
from kdirect.member.metadata import Metadata
from kdirect.model import TopicPartition
from tests.log.compacted_logs import compact

LOG = TopicPartition(OFFSETS_TOPIC, 0)
TP = TopicPartition("t", 0)
FOLLOWER = 2


class Replicas:
    """One follower, which has what the test says; the leader's log ends where it ends."""

    def __init__(self, w: World) -> None:
        self.w = w
        self.waiting: list[tuple[int, asyncio.Future[None]]] = []
        self.enough = True
        self.watched = False

    def may_append(self, tp: TopicPartition) -> None:
        if not self.enough:
            raise NotEnoughReplicasError("one replica is in sync")

    def appended(self, tp: TopicPartition) -> None:
        pass

    def committed(
        self, tp: TopicPartition, end: int, epoch: int, timeout_s: float
    ) -> asyncio.Future[None]:
        if not self.w.leads or epoch != self.w.log.leader_epoch:
            raise NotLeaderError("another broker leads")
        future = self.w.loop.create_future()
        self.waiting.append((end, future))
        self.tell()
        return future

    def watch_readable(self, tp: TopicPartition) -> None:
        self.watched = True

    def tell(self) -> None:
        for end, future in sorted(self.waiting, key=lambda row: row[0]):
            if not future.done() and end <= self.w.log.high_watermark:
                future.set_result(None)
        self.waiting = [row for row in self.waiting if not row[1].done()]

    def fail(self, error: Exception) -> None:
        for _, future in self.waiting:
            if not future.done():
                future.set_exception(error)
        self.waiting.clear()


class Topics:
    def __init__(self, w: World) -> None:
        self.w = w

    def get(self, name: str) -> Any:
        return SimpleNamespace(partition_count=1)

    def partition(self, name: str, index: int) -> Partition:
        if not self.w.leads:
            raise NotLeaderError("another broker leads")
        return self.w.log


class World:
    """A broker with a replica of the one partition of the topic; work for threads is done when, and
    in the order in which, the test says so."""

    def __init__(self, path: Path) -> None:
        self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)  # for tasks that are made while it does not run
        self.logs = LogManager([path], LogConfig(segment_bytes=1 << 16)).open()
        self.log = self.logs.create_partition(LOG)
        other_coordinator(self.log, "first", 1)  # so that the head is there
        self.leads = False
        self.work: list[Callable[[], None]] = []
        self.appending: list[Callable[[], None]] = []
        self.appends = Appends(
            on_thread=partial(self._on_thread, self.appending),
            later=lambda callback, *arguments: callback(*arguments),
            new_future=self.loop.create_future,
        )
        config = {"offsets.topic.num.partitions": 1, "offsets.topic.segment.bytes": 1 << 20}
        self.store = OffsetStore(Topics(self), config, self.appends, None)  # type: ignore[arg-type]
        self.replicas = Replicas(self)
        on_thread = partial(self._on_thread, self.work)
        replication = StateReplication(self.replicas, lambda partition: None)
        self.store.join_cluster(replication)
        self.coordinated: set[str] = set()
        self.partitions = CoordinatorPartitions(
            OFFSETS_TOPIC, self.store, self, on_thread, replication=replication
        )
        self.deleted = DeletedTopics(self.store.forget_topic, lambda: self.partitions.active)

    def restore(self, loaded: Any) -> None:
        self.coordinated = {group.group_id for group in loaded}

    def give_up(self, is_gone: Callable[[str], bool]) -> None:
        self.coordinated = {name for name in self.coordinated if not is_gone(name)}

    def _on_thread(
        self,
        where: list[Callable[[], None]],
        partition: Partition,
        work: Callable[[], Any],
        then: Any,
    ) -> None:
        def run() -> None:
            try:
                result = work()
            except Exception as e:
                then(None, e)
            else:
                then(result, None)

        where.append(run)

    # -- what happens ------------------------------------------------------------------------------

    def on_loop(self, call: Callable[[], Any]) -> Any:
        async def begin() -> Any:
            return call()

        result = self.loop.run_until_complete(begin())
        self.turn()
        return result

    def turn(self) -> None:
        async def turns() -> None:
            for _ in range(6):
                await asyncio.sleep(0)

        self.loop.run_until_complete(turns())

    def elect(self, epoch: int) -> None:
        def lead() -> None:
            self.leads = True
            self.appends.accept(LOG)
            self.log.begin_epoch(epoch, replicated=True)
            self.log.set_replicas({FOLLOWER: self.log.high_watermark})
            self.partitions.elected(LOG, self.log, epoch)

        self.on_loop(lead)

    def resign(self) -> None:
        """An append that a thread is making is still made; then the log is another leader's."""

        def end() -> None:
            self.leads = False
            self.appends.refuse(LOG, NotLeaderError("another broker leads"))
            self.partitions.resigned(LOG, self.log)
            self.replicas.fail(NotLeaderError("another broker leads"))

        self.on_loop(end)
        while self.appending:
            self.appending.pop(0)()
            self.turn()

    def replicate(self, offset: int | None = None) -> None:
        before = self.log.high_watermark
        self.log.replicated(FOLLOWER, self.log.log_end_offset if offset is None else offset)

        def tell() -> None:
            self.replicas.tell()
            if self.log.high_watermark > before and self.replicas.watched:
                self.replicas.watched = False
                self.partitions.moved(LOG, self.log)

        self.on_loop(tell)

    def threads(self) -> None:
        while work := self.appending or self.work:
            work.pop(0)()
            self.turn()

    def settle(self) -> None:
        """The follower keeps up, and every thread is done."""
        for _ in range(50):
            self.threads()
            self.replicate()
            if (
                not (self.work or self.appending)
                and self.log.high_watermark == self.log.log_end_offset
            ):
                break

    def commit_later(self, group: str, offset: int) -> asyncio.Future[Any]:
        return self.on_loop(
            lambda: self.store.commit(group, {TP: CommittedOffset(offset, -1, "", 1)})
        )

    def commit(self, group: str, offset: int) -> asyncio.Future[Any]:
        """The same, and it is in the log now."""
        future = self.commit_later(group, offset)
        while self.appending:
            self.appending.pop(0)()
            self.turn()
        return future

    def seen(self, group: str) -> int | None:
        """What OffsetFetch says."""
        if self.partitions.refusal(group):
            return None
        found = self.store.offsets(group).get(TP)
        return -1 if found is None else found.offset

    @property
    def state(self) -> State:
        return self.partitions.state(0).state


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    w = World(tmp_path)
    yield w
    w.replicas.fail(TimedOutError("the test is over"))
    w.on_loop(w.partitions.close)
    w.threads()
    w.logs.close()
    w.loop.close()


def active(w: World, epoch: int) -> None:
    w.elect(epoch)
    w.settle()
    assert w.state is State.ACTIVE


def test_a_coordinator_waits_for_slow_replicas_without_asking_again_and_again(world) -> None:
    w = world
    w.elect(1)
    other_coordinator(w.log, "more", 6)
    other_coordinator(w.log, "more", 7)
    w.resign()
    w.elect(2)
    assert w.state is State.WAITING
    w.on_loop(lambda: w.replicas.fail(TimedOutError("the follower is slow")))
    assert not w.replicas.waiting and not w.loop._scheduled  # type: ignore[attr-defined]
    w.replicate(w.log.log_end_offset - 1)
    assert w.state is State.WAITING and len(w.replicas.waiting) == 1
    w.on_loop(lambda: w.replicas.fail(NotEnoughReplicasError("one replica is in sync")))
    w.settle()
    assert w.state is State.ACTIVE and w.seen("more") == 7


def test_why_the_topic_cannot_be_created_is_logged_once(
    world, caplog: pytest.LogCaptureFixture
) -> None:
    w, errors = world, ["too few brokers"] * 3 + ["no controller"] * 2 + [""] + ["no controller"]

    async def create() -> None:
        if error := errors.pop(0):
            raise NotEnoughReplicasError(error)

    w.partitions._create_topic = create
    while errors:
        w.on_loop(w.partitions.ask_for_topic)
    told = [record.getMessage() for record in caplog.records]
    assert [text.rpartition(": ")[2] for text in told] == [
        "too few brokers", "no controller", "no controller",
    ]  # fmt: skip


def test_a_commit_counts_when_the_replicas_have_it(world) -> None:
    w = world
    assert w.partitions.refusal("g") == E.NOT_COORDINATOR
    active(w, 1)
    future = w.commit("g", 5)
    assert not future.done() and w.seen("g") == -1
    w.replicate()
    assert future.result() is None and w.seen("g") == 5


def test_what_is_not_committed_is_shown_by_no_new_leader(world) -> None:
    """The records above the high watermark may be lost with this broker; groups wait for them."""
    w = world
    active(w, 1)
    w.commit("g", 5)
    w.replicate()
    w.commit("g", 6)
    w.resign()
    w.elect(3)
    w.threads()
    assert w.state is State.WAITING and w.partitions.loading
    assert w.partitions.refusal("g") == E.COORDINATOR_LOAD_IN_PROGRESS
    w.replicate()
    assert w.state is State.LOADING and w.seen("g") is None
    w.threads()
    assert w.seen("g") == 6


def test_a_commit_in_flight_at_a_resignation_fails(world) -> None:
    w = world
    active(w, 1)
    future = w.commit("g", 5)
    w.resign()
    with pytest.raises((NotLeaderError, LogError)):
        future.result()
    assert w.partitions.refusal("g") == E.NOT_COORDINATOR and w.store.groups() == set()


def test_a_commit_that_is_told_of_after_its_tenure_fails(world) -> None:
    """Its replicas have it, but this broker was deposed, and elected again, before it came to
    that: it does not know what came between."""
    w = world
    active(w, 1)
    future = w.commit("g", 5)
    _, told = w.replicas.waiting.pop()
    w.resign()
    told.set_result(None)
    active(w, 3)
    with pytest.raises(LogError, match="not loaded"):
        future.result()
    assert w.seen("g") == 5, "read from the log"


def test_elected_again_while_the_older_load_is_running(world) -> None:
    w = world
    active(w, 1)
    w.commit("g", 5)
    w.settle()
    w.resign()
    w.elect(3)
    w.replicate()
    assert w.state is State.LOADING
    older = w.work.pop()
    w.resign()
    w.log.begin_epoch(4, replicated=False)  # another broker leads, commits
    other_coordinator(w.log, "g", 7)
    w.elect(5)
    w.replicate()
    (newer,) = w.work
    w.work.clear()
    older()
    w.turn()
    assert w.state is State.LOADING
    newer()
    w.turn()
    assert w.seen("g") == 7


def test_commits_are_refused_below_the_least_number_of_replicas(world) -> None:
    w = world
    active(w, 1)
    w.replicas.enough = False
    end = w.log.log_end_offset
    with pytest.raises(NotEnoughReplicasError):
        w.commit("g", 5).result()
    assert w.log.log_end_offset == end


def test_a_damaged_partition_is_not_coordinated(world) -> None:
    w = world
    w.log.append(encode_single_bytes(b"", b"\0\1", 1))
    w.elect(1)
    w.settle()
    assert w.state is State.FAILED
    assert w.partitions.refusal("g") == E.COORDINATOR_NOT_AVAILABLE


def test_offsets_are_forgotten_in_topics_that_are_deleted_and_in_no_others(world) -> None:
    """A node that is damaged or not read yet says nothing, and an id that a topic gets later does
    not make it another one."""
    w = world
    active(w, 1)
    ids = [uuid.UUID(int=i) for i in range(2)]

    def topics(topic_id: uuid.UUID | None) -> dict[str, Topic]:
        return {"t": Topic(TopicAssignment(topic_id, ((1,),)), ())}

    def seen(before: dict[str, Topic], image: Image, generation: int = 7) -> int | None:
        w.commit("g", 5)
        w.settle()
        old = Metadata("c", 1, image=Image(1, 1, topics=before), generation=6)
        new = Metadata("c", 1, image=image, generation=generation)
        w.on_loop(lambda: w.deleted.follow(old, new))
        w.settle()
        return w.seen("g")

    damaged = {paths.topic("t"): CorruptMetadataError("what is this")}
    assert seen(topics(ids[0]), Image(1, 1, damaged=damaged)) == 5
    assert seen(topics(ids[0]), Image(-1, -1), generation=-1) == 5
    assert seen(topics(None), Image(1, 1, topics=topics(ids[0]))) == 5
    assert seen(topics(ids[0]), Image(1, 1, topics=topics(ids[0]))) == 5
    assert seen(topics(ids[0]), Image(1, 1, topics=topics(ids[1]))) == -1
    assert seen(topics(ids[0]), Image(1, 1)) == -1


def other_coordinator(log: Partition, group: str, offset: int) -> None:
    value = records.offset_value(CommittedOffset(offset, -1, "", 1))
    assert log.append(encode_single_bytes(value, records.offset_key(group, *TP), 1)).error == 0


def test_a_transaction_that_is_aborted_keeps_the_offset_from_before_it(world) -> None:
    """The log is compacted while it is open: what it is about to commit is above what may be."""
    w = world
    active(w, 1)
    for offset in range(20):
        w.commit("g", offset)
    w.settle()
    w.log.roll()
    error, ticket = begin_verification(w.log.kernel, 7, 0, 0, 1)
    assert not error and admit_transaction(w.log.kernel, 7, 0, ticket)
    offsets = {TP: CommittedOffset(100, -1, "", 1)}
    w.on_loop(lambda: w.store.commit_in_transaction("g", (7, 0), offsets))
    w.settle()
    assert w.store.unstable("g") == {TP}
    w.log.roll()
    assert compact(w.log).records_kept == 2, "of g and of the group that was there before"
    assert w.log.append_marker(marker_batch(7, 0, 1, False, 1), 1).error == 0
    w.on_loop(lambda: w.store.end_transaction(0, 7, False))
    w.settle()
    assert w.seen("g") == 19
    w.log.roll()
    compact(w.log)
    w.resign()
    active(w, 2)
    assert w.seen("g") == 19


GROUPS = ("a", "b", "c")


class Walk:
    """Random events, and what must hold.  `told`: the highest offset of each group of which a
    client was told that it is committed, or that was fetched."""

    def __init__(self, w: World, rng: random.Random) -> None:
        self.w, self.rng = w, rng
        self.epoch = 1
        self.next = 0
        self.told = dict.fromkeys(GROUPS, -1)
        self.under_way: list[tuple[str, int, asyncio.Future[Any]]] = []
        self.held = False
        self.done = 0

    def step(self) -> None:
        w, rng = self.w, self.rng
        what = rng.random()
        if what < 0.4:
            self.commit()
        elif what < 0.62:
            end, high = w.log.log_end_offset, w.log.high_watermark
            if w.leads:
                w.replicate(rng.choice([end, rng.randint(high, end)]))
        elif what < 0.85:
            work = rng.choice([w.appending, w.work])
            if work:
                work.pop(rng.choice([0, 0, 0, len(work) - 1]))()
                w.turn()
        elif what < 0.87 and w.leads:
            w.on_loop(lambda: w.replicas.fail(TimedOutError("the follower is slow")))
        elif what < 0.9:
            w.replicas.enough = rng.random() < 0.8
            w.log.roll()
            compact(w.log)
        elif what < 0.93 and w.leads:
            self.hold()
        elif what < 0.95 and w.leads:
            self.depose()
        elif not w.leads:
            self.epoch += rng.choice([1, 2])
            w.elect(self.epoch)
        self.check()

    def commit(self) -> None:
        group = self.rng.choice(GROUPS)
        if self.w.partitions.refusal(group):
            return
        # Clients wait for one commit of a group before they send the next.
        if any(g == group and not f.done() for g, _, f in self.under_way):
            return
        self.next += 1
        self.under_way.append((group, self.next, self.w.commit_later(group, self.next)))

    def hold(self) -> None:
        """As while the head is exchanged: appends wait."""
        appends = self.w.appends
        self.w.on_loop(lambda: (appends.release if self.held else appends.hold)(LOG))
        self.held = not self.held

    def depose(self) -> None:
        w = self.w
        if self.held:
            self.hold()
        w.resign()
        if self.rng.random() < 0.7:  # the new leader lacks what is not committed
            w.log.truncate_to(w.log.high_watermark)
        self.epoch += 1
        w.log.begin_epoch(self.epoch, replicated=False)
        for _ in range(self.rng.randint(0, 3)):
            group = self.rng.choice(GROUPS)
            self.next += 1
            other_coordinator(w.log, group, self.next)
            self.told[group] = self.next

    def check(self) -> None:
        for group, offset, future in self.under_way:
            if future.done() and future.exception() is None:
                self.told[group] = max(self.told[group], offset)
                self.done += 1
        self.under_way = [row for row in self.under_way if not row[2].done()]
        for group in GROUPS:
            seen = self.w.seen(group)
            if seen is not None:
                assert seen >= self.told[group], f"{group} went back to {seen}"
                self.told[group] = seen


@pytest.mark.parametrize("round_", range(40))
def test_nothing_that_was_told_is_lost_or_goes_back(world, seed, round_) -> None:
    walk = Walk(world, random.Random(seed * 100 + round_))
    for _ in range(500):
        walk.step()
    if not world.leads:
        world.elect(walk.epoch + 1)
    if walk.held:
        walk.hold()
    world.replicas.enough = True
    world.settle()
    walk.check()
    assert world.state is State.ACTIVE
