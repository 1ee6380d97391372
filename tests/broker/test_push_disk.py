"""Pushed partitions whose records have to be on disk, or whose producers come another way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kdirect.format import layout
from tests.broker.push_world import NOW, Producer, World
from tests.log.conftest import make_batch


def written(w: World, producer: Producer, end: int, followers: tuple[int, ...] = (1, 2)) -> None:
    """One record more is in the logs of these."""
    producer.write(make_batch(timestamp_ms=NOW))

    def done() -> bool:
        assert w.leader.pushed is not None
        ends = w.leader.pushed.marks.ends()
        return w.end() == end and all(ends[f] == end for f in followers)

    w.run(done)
    w.network.run_until_idle()


def settle(w: World) -> None:
    """Everything that is on its way arrives."""
    for _ in range(50):
        w.step()
    w.network.run_until_idle()


def test_the_disk_counts_as_a_replica(world: Callable[..., Any]) -> None:
    w = world(flush_before_ack=True)
    w.start()
    producer = Producer(w)
    written(w, producer, 1)
    settle(w)
    assert w.leader.asked == [producer.head], "the disk was asked for once"
    assert producer.acknowledged() == 0 and w.leader.partition.high_watermark == 0
    w.leader.flush()
    w.run(lambda: producer.acknowledged() == 1)
    assert w.leader.partition.high_watermark == 1
    w.slow = {1}
    written(w, producer, 2, (2,))
    w.leader.flush()
    settle(w)
    assert producer.acknowledged() == 1, "on disk, and one replica lacks it"
    assert w.leader.partition.high_watermark == 1
    w.slow = set()
    w.run(lambda: producer.acknowledged() == 2)


def test_a_flush_counts_with_what_there_was_before_it(
    world: Callable[..., Any], monkeypatch: Any
) -> None:
    """What is committed while the files are synced is not known to be on disk."""
    w = world(flush_before_ack=True)
    w.start()
    producer = Producer(w)
    written(w, producer, 1)
    disk = w.leader.partition._disk
    sync = disk.sync

    def slow_sync(segments: Any, end_offset: int) -> None:
        written(w, producer, 2)
        sync(segments, end_offset)

    monkeypatch.setattr(disk, "sync", slow_sync)
    w.leader.flush()
    monkeypatch.undo()
    settle(w)
    assert w.leader.partition.high_watermark == 1 and producer.acknowledged() == 1
    assert w.leader.asked == [producer.head]
    w.leader.flush()
    w.run(lambda: producer.acknowledged() == 2)


def test_acks_1_waits_for_the_disk_alone(world: Callable[..., Any]) -> None:
    w = world(flush_before_ack=True)
    w.start()
    producer = Producer(w, acks=1)
    w.slow = {1, 2}
    written(w, producer, 1, ())
    settle(w)
    assert producer.acknowledged() == 0 and w.leader.asked == [producer.head]
    w.leader.flush()
    w.run(lambda: producer.acknowledged() == 1)
    assert w.leader.partition.high_watermark == 0
    written(w, producer, 2, ())
    settle(w)
    assert producer.acknowledged() == 1, "asked for again, though replicas still lack all"
    w.leader.flush()
    w.run(lambda: producer.acknowledged() == 2)


def test_acks_1_waits_for_the_disk_alone_where_followers_fetch(world: Callable[..., Any]) -> None:
    """The partition's gate waits for replicas, and a producer that asked for none does not."""
    w = world(flush_before_ack=True)
    w.start()
    w.leader.pushed.close()
    w.leader.pushed = None
    w.leader.partition.set_replicas({1: 0, 2: 0})
    producer = Producer(w, acks=1)
    for n in (1, 2):
        producer.write(make_batch(timestamp_ms=NOW))
        w.run(lambda n=n: w.end() == n)
        settle(w)
        w.leader.flush()
        w.run(lambda n=n: producer.acknowledged() == n)
    assert w.leader.partition.high_watermark == 0


def test_who_waits_for_replicas_in_vain_is_told_and_who_waits_for_the_disk_goes_on(
    world: Callable[..., Any],
) -> None:
    """Too few replicas are in sync: the head ends."""
    for acks in (-1, 1):
        w = world(flush_before_ack=True)
        w.start()
        w.leader.count([], True)
        producer = Producer(w, acks=acks)
        for n in (1, 2):
            written(w, producer, n)
        settle(w)
        worker = w.leader.worker
        assert worker.close_head(producer.head, True)
        worker.drop_gated(producer.head, for_replicas=True)
        w.leader.flush()
        w.run(lambda p=producer, n=1 if acks == -1 else 3: p.acknowledged() == n)
        flags = [producer.flags(entry) for entry in range(producer.acknowledged())]
        revoked = layout.ACK_FLAG_REVOKED
        assert flags == ([revoked] if acks == -1 else [0, 0, revoked])


def test_a_head_ends_for_its_owner_when_its_producers_are_answered(
    world: Callable[..., Any],
) -> None:
    """A request is refused, and the head ends, while acknowledgements wait for replicas."""
    w = world()
    w.start()
    producer = Producer(w)
    w.leader.on_head = []
    w.slow = {1}
    written(w, producer, 1, (2,))
    w.leader.worker.drain(producer.head, 1)
    settle(w)
    assert w.leader.on_head == []
    w.slow = set()
    w.run(lambda: producer.acknowledged() == 1)
    settle(w)
    assert w.leader.on_head == [producer.head]


def test_whether_the_disk_counts_changes_while_records_wait(world: Callable[..., Any]) -> None:
    w = world()
    w.start()
    partition, producer = w.leader.partition, Producer(w)
    written(w, producer, 1)
    w.run(lambda: producer.acknowledged() == 1)
    w.slow = {1}
    written(w, producer, 2, (2,))  # appended before the change: nobody is asked to flush
    partition.reconfigure(replace(partition.config, flush_before_ack=True))
    w.slow = set()
    w.run(lambda: producer.acknowledged() == 2)
    written(w, producer, 3)
    settle(w)
    assert producer.acknowledged() == 2 and partition.high_watermark == 2
    partition.reconfigure(replace(partition.config, flush_before_ack=False))
    w.run(lambda: producer.acknowledged() == 3)
    written(w, producer, 4)
    w.run(lambda: producer.acknowledged() == 4)


def test_producers_over_another_transport_are_pushed_and_answered(
    world: Callable[..., Any],
) -> None:
    w = world()
    w.start()
    w.leader.open_other(w.network.device("other"))
    producer = Producer(w, elsewhere=True)
    w.slow = {1}
    written(w, producer, 1, (2,))
    settle(w)
    assert producer.acknowledged() == 0
    w.slow = set()
    w.run(lambda: producer.acknowledged() == 1)
    for n in range(2, 12):
        written(w, producer, n)
        w.run(lambda n=n: producer.acknowledged() == n)
    w.slow = {1, 2}
    written(w, producer, 12, ())
    w.counted = set()
    w.leader.count([])  # marks move by another thread's word, too
    w.run(lambda: producer.acknowledged() == 12)


def test_nothing_is_pushed_elsewhere_once_the_leadership_is_over(
    world: Callable[..., Any],
) -> None:
    w = world()
    w.start()
    w.leader.open_other(w.network.device("other"))
    producer = Producer(w, elsewhere=True)
    written(w, producer, 1)
    w.run(lambda: producer.acknowledged() == 1)
    w.leader.pushed.resign()
    producer.write(make_batch(timestamp_ms=NOW))
    w.run(lambda: w.end() == 2)
    settle(w)
    assert all(f.partition.log_end_offset == 1 for f in w.followers)
