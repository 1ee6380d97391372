"""A table that lives in a topic, partition by partition: what is taken out of memory stays in the
log, and nothing that is absent is changed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kdirect
from kdirect.broker.appends import Appends
from kdirect.broker.state_topic import StateTopic
from kdirect.errors import LogError
from kdirect.format.group_records import CommittedOffset, GroupRecord
from kdirect.log.config import LogConfig
from kdirect.log.manager import LogManager
from kdirect.log.partition import Partition
from kdirect.model import TopicPartition

NAME = "state"
PARTITIONS = 2


class Rows:
    """A table of rows whose key begins with the number of their partition."""

    def __init__(self) -> None:
        self.rows: dict[bytes, bytes] = {}

    def apply(self, key: bytes | None, value: bytes | None) -> None:
        assert key is not None
        if value is None:
            self.rows.pop(key, None)
        else:
            self.rows[key] = value

    def forget_partition(self, index: int) -> None:
        for key in [key for key in self.rows if key[:1] == b"%d" % index]:
            del self.rows[key]


class Topics:
    """As much of the registry as a state topic asks for."""

    def __init__(self, logs: LogManager) -> None:
        self.logs = logs
        self.topic: Any = None

    def get(self, name: str) -> Any:
        return self.topic

    def create(self, name: str, partitions: int, configs: dict[str, str]) -> Any:
        for index in range(partitions):
            self.logs.create_partition(TopicPartition(name, index))
        self.topic = SimpleNamespace(partition_count=partitions, configs=configs)
        return self.topic

    def partition(self, name: str, index: int) -> Partition:
        return self.logs.partitions[TopicPartition(name, index)]


class World:
    """A state topic on a loop of the test's own; work for threads is done when the test says so."""

    def __init__(self, path: Path, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.logs = LogManager([path], LogConfig(segment_bytes=1 << 16)).open()
        self.topics = Topics(self.logs)
        self.table = Rows()
        self.work: list[Callable[[], None]] = []
        self.appends = Appends(
            on_thread=self._on_thread,
            later=lambda callback, *arguments: callback(*arguments),
            new_future=loop.create_future,
        )
        self.state = StateTopic(
            NAME, self.table, what="rows", partitions=PARTITIONS, configs={},
            topics=self.topics, appends=self.appends, admin=self._admin,  # type: ignore[arg-type]
        )  # fmt: skip

    async def _admin(self, work: Callable[[], Any]) -> Any:
        return work()

    def _on_thread(self, partition: Partition, work: Callable[[], Any], then: Any) -> None:
        def run() -> None:
            try:
                result = work()
            except Exception as e:
                then(None, e)
            else:
                then(result, None)

        self.work.append(run)

    def run(self) -> None:
        """Let everything that waits happen."""
        for _ in range(5):
            self.loop.run_until_complete(asyncio.sleep(0))
            while self.work:
                self.work.pop(0)()

    def change(self, key: bytes, value: bytes | None) -> asyncio.Future[Any]:
        async def begin() -> asyncio.Future[Any]:
            return self.state.change(
                lambda count: int(key[:1]), [(key, value)], lambda: self.table.apply(key, value)
            )

        return self.loop.run_until_complete(begin())

    def partition(self, index: int) -> Partition:
        return self.topics.partition(NAME, index)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    loop = asyncio.new_event_loop()
    w = World(tmp_path, loop)
    yield w
    w.run()
    w.logs.close()
    loop.close()


def changed(w: World, key: bytes, value: bytes | None) -> None:
    future = w.change(key, value)
    w.run()
    assert future.result() is w.partition(int(key[:1]))


def test_what_is_unloaded_is_loaded_again_from_the_log(world) -> None:
    w = world
    for key, value in ((b"0a", b"1"), (b"1a", b"2"), (b"0b", b"3"), (b"0a", b"4"), (b"0b", None)):
        changed(w, key, value)
    assert w.table.rows == {b"0a": b"4", b"1a": b"2"}
    w.state.unload(0)
    assert w.table.rows == {b"1a": b"2"}
    w.state.unload(0)
    changed(w, b"1b", b"5")
    w.state.load(0)
    w.state.load(0)
    assert w.table.rows == {b"0a": b"4", b"1a": b"2", b"1b": b"5"}
    changed(w, b"0c", b"6")
    assert w.table.rows[b"0c"] == b"6"


def test_what_is_absent_cannot_be_changed(world) -> None:
    w = world
    changed(w, b"0a", b"1")
    w.state.unload(0)
    end = w.partition(0).log_end_offset
    future = w.change(b"0b", b"2")
    w.run()
    with pytest.raises(LogError, match="rows in state-0 are not loaded"):
        future.result()
    assert w.table.rows == {} and w.partition(0).log_end_offset == end
    assert w.state.create().partition_count == PARTITIONS, "asked for again, it is no new topic"
    w.state.load(0)
    assert w.table.rows == {b"0a": b"1"}


def test_a_change_that_is_under_way_when_its_partition_is_unloaded(world) -> None:
    """It is in the log, for whoever loads it next; here it is not remembered."""
    w = world
    for i in range(3):
        changed(w, b"0%d" % i, b"x")
    tp = w.partition(0).topic_partition
    w.appends.hold(tp)  # as while RDMA producers have the head, or it is exchanged
    future = w.change(b"09", b"y")
    w.run()
    assert not future.done()
    w.state.unload(0)
    w.appends.release(tp)
    w.run()
    with pytest.raises(LogError):
        future.result()
    assert w.table.rows == {}
    w.state.load(0)
    assert w.table.rows == {b"00": b"x", b"01": b"x", b"02": b"x", b"09": b"y"}


def test_a_broker_forgets_the_groups_of_a_partition(tmp_path, on_loop) -> None:
    tp = TopicPartition("t", 0)
    with kdirect.Broker(log_dirs=tmp_path) as b:
        store = b.server.offsets
        b.server.topics.create("t", 1, {})
        names = [f"g{i}" for i in range(8)]
        for i, name in enumerate(names):
            committed = {tp: CommittedOffset(i, -1, "", 1)}
            on_loop(b, lambda n=name, c=committed: store.commit(n, c))
            record = GroupRecord("consumer", i, "range", None, 1, ())
            on_loop(b, lambda n=name, r=record: store.save_group(n, r))
        index = store.partition_of("g3").topic_partition.partition
        theirs = {n for n in names if store.partition_of(n).topic_partition.partition == index}

        async def unload() -> None:
            store.unload_partition(index)

        on_loop(b, unload)
        assert store.groups() == set(names) - theirs and store.offsets("g3") == {}
        loaded = store.load_partition(index)
        assert {g.group_id: g.record.generation for g in loaded} == {
            name: int(name[1:]) for name in theirs
        }
        assert store.groups() == set(names) and store.offsets("g3")[tp].offset == 3
