"""Replicas that wait for their turn to be read: only so many of one leader are, at a time."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from kdirect.broker.catch_up import MOST_PULLS, CatchUp, CatchUps
from kdirect.errors import BrokerUnavailableError
from kdirect.model import TopicPartition

LEADER = 1


async def nothing(*arguments: Any, **more: Any) -> Any:
    return SimpleNamespace(segments=[])


def one_more(shared: CatchUps) -> CatchUp:
    tp = TopicPartition("t", 0)
    copy: Any = SimpleNamespace(tp=tp, epoch=1, partition=SimpleNamespace(log_end_offset=0))
    reader = asyncio.get_running_loop().create_future()
    reader.set_result(SimpleNamespace(is_broken=False))
    link: Any = SimpleNamespace(leader=LEADER, reader=reader)
    return CatchUp(shared, link, copy, stop_copying=nothing, progressed=lambda: None)


def all_others() -> CatchUps:
    none: Any = None
    return CatchUps(
        send=nothing, ask=nothing, thread=none, on_thread=none, background=none, pace=none
    )


async def all_turns_are_free(turns: asyncio.Semaphore) -> None:
    for _ in range(MOST_PULLS):
        await asyncio.wait_for(turns.acquire(), 5)
    assert turns.locked()


@pytest.mark.parametrize("how", ["stopped", "given up"])
def test_one_that_waits_for_its_turn_hears_that_it_is_to_stop(how: str) -> None:
    async def run() -> None:
        shared = all_others()
        turns = shared.turns(LEADER)
        for _ in range(MOST_PULLS):
            await turns.acquire()
        catch_up = one_more(shared)
        running = asyncio.ensure_future(catch_up.run())
        await asyncio.sleep(0)
        if how == "stopped":
            catch_up.stop("the link is cut")
            with pytest.raises(BrokerUnavailableError, match="the link is cut"):
                await asyncio.wait_for(running, 5)
        else:
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(running, 5)
        for _ in range(MOST_PULLS):
            turns.release()
        await all_turns_are_free(turns)

    asyncio.run(run())


def test_one_that_is_stopped_as_its_turn_comes_leaves_it_to_others() -> None:
    async def run() -> None:
        shared = all_others()
        turns = shared.turns(LEADER)
        catch_up = one_more(shared)
        catch_up.stop("the link is cut")
        with pytest.raises(BrokerUnavailableError, match="the link is cut"):
            await catch_up.run()
        await one_more(shared).run()
        await all_turns_are_free(turns)

    asyncio.run(run())
