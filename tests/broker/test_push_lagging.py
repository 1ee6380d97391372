"""What is pushed when something else of the partition ends: a follower that lacks more segments
than a ring can name, and the leadership before."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from kdirect.broker.led_log import LedLog, Rings
from kdirect.broker.push import PushState
from tests.broker.push_rig import follow
from tests.broker.push_world import World


def test_a_stopped_follower_does_not_end_push_to_the_others(world: Callable[..., Any]) -> None:
    w: World = world()
    w.start()
    w.slow = {1}
    w.counted = {2}
    w.leader.count([2])
    told: list[tuple[int, int]] = []
    w.leader.tell = lambda what, value: told.append(value)
    first, second = w.leader.rings[1], w.leader.rings[2]
    for _ in range(12):
        w.append(8, 4000)
        w.run(lambda: w.followers[1].partition.log_end_offset == w.end())
    assert len(w.leader.partition.segments) > 9
    w.run(lambda: (1, PushState.LACKS) in told)
    assert first.state == PushState.LACKS, "the owner is told that it has to fetch"
    assert second.state == PushState.PUSHING
    assert w.followers[1].sealed() == w.leader.sealed()


def test_a_follower_that_comes_and_goes_holds_no_segments(world: Callable[..., Any]) -> None:
    """Each grant names the leader's segments as sources of its WRITEs: they are given back when all
    of the grant has arrived, not when the link ends."""
    w: World = world()
    w.start()
    pushed = w.leader.pushed
    assert pushed is not None
    first = w.leader.partition.segments[0]

    def has_arrived(link: Any) -> bool:
        posted, done = w.leader.worker.sends(link)
        return bool(posted == done)

    for _ in range(6):
        w.append(8, 4000)
        w.run(lambda: all(f.partition.log_end_offset == w.end() for f in w.followers))
        w.run(lambda: all(has_arrived(link) for link, _ in w.leader.links.values()))
        for follower in w.followers:
            follow(w.leader, follower, window=w.window)
    assert len(pushed._left) <= len(w.followers), "those of the grant before, at most"
    w.run(lambda: pushed.sweep() or not pushed._left)
    named = sum(len(segments) for _, segments in pushed._rings.values())
    assert named <= 2 * len(w.followers)
    assert first not in [s for _, segments in pushed._rings.values() for s in segments]


def test_the_end_of_a_leadership_leaves_the_next_one_alone(world: Callable[..., Any]) -> None:
    w: World = world()
    w.start()
    before = w.leader.pushed
    assert before is not None
    before.resign()
    w.leader.lead([1], 4096)  # before a thread has come to what is left of the other one
    before.close()
    pushed = w.leader.pushed
    assert pushed is not None
    pushed.set_counted([1])
    w.append(1)
    kernel = w.leader.partition.kernel
    w.leader.worker.watch_pushing(pushed.pushing)
    w.leader.worker.confirm(
        pushed.pushing, 1, w.end(), kernel.end_position, kernel.segment_base_offset
    )
    assert w.leader.partition.high_watermark == w.end()
    w.leader.worker.step()
    assert w.leader.moved == [pushed.pushing], "whoever waits for the high watermark is told"


def test_a_leadership_ends_after_it_has_begun(world: Callable[..., Any]) -> None:
    """Its beginning empties the log's gate on a thread, and its end fills it on another one: the
    other way round, commits would move the high watermark of a replica."""
    node = world().leader
    works: list[str] = []

    def on_thread(partition: Any, work: Callable[[], Any], done: Callable[..., None]) -> None:
        works.append("end")
        done(work(), None)

    async def run() -> None:
        leader: Any = SimpleNamespace(tp=node.partition.topic_partition, partition=node.partition)
        led = LedLog(
            leader, node.worker, on_thread, most_bytes=4096, logs_of=Rings(), ended=lambda led: None
        )
        led.begins = asyncio.get_running_loop().create_future()
        resigned = asyncio.ensure_future(led.resign())
        led.begins.get_loop().call_soon(lambda: works.append("gate is empty"))
        led.begins.get_loop().call_soon(led.begins.set_result, None)
        await resigned

    asyncio.run(run())
    assert works == ["gate is empty", "end"]
