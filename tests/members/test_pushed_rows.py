"""What a leader tells a follower over Fetch while it writes into the follower's file."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from kdirect.cluster.leading_replica import Confirmed
from kdirect.format import protocol as p
from kdirect.format.replica_fetch import Push
from kdirect.format.schema import build
from kdirect.log.config import LogConfig
from kdirect.log.replica_log import Copied
from kdirect.member.fetch_sessions import FetchSessions, Found
from kdirect.member.throttle import Pace
from kdirect.model import TopicPartition

TP = TopicPartition("t", 0)


class Kernel:
    segment_base_offset = 100


class Log:
    kernel = Kernel()
    config = LogConfig(segment_bytes=8192)
    log_end_offset = high_watermark = 120
    log_start_offset = dense_from = 0

    def read_for_replica_nowait(self, offset: int, length: int, *, release: Any) -> Copied:
        records = [memoryview(b"records")] if offset < self.log_end_offset else []
        return Copied(records, self.kernel.segment_base_offset, self.config.segment_bytes)


class Leader:
    epoch = 3
    has_resigned = False

    def __init__(self) -> None:
        self.partition = Log()
        self.confirms: list[int] = []

    def confirmed(self, event: Confirmed) -> None:
        self.confirms.append(event.end)

    def starts_at(self, broker: int, offset: int) -> None:
        pass


class Follower:
    """Broker 2, in one session; `ask` gives the row of the answer, None where there is none."""

    def __init__(self) -> None:
        self.leader = Leader()
        self.pace: Pace | None = None
        self.sessions = FetchSessions(
            find=lambda tp, epoch: Found(self.leader, 0),  # type: ignore[arg-type]
            incarnation_of=lambda broker: 5,
            read=self._read,
            release=lambda segment: None,
            watch=lambda tp: None,
            offers=lambda partition, offset: (
                Push.OFFERED if offset >= partition.kernel.segment_base_offset else Push.SEGMENTS
            ),
            held_back=lambda leader, broker: self.pace,
        )
        self.session = self.answers = 0

    async def _read(self, work: Any) -> Any:
        return work()

    async def ask(self, *, wait_ms: int = 0, **row: Any) -> Any:
        rows = [{"partition": 0, "leader_epoch": 3, "log_start_offset": 0, **row}] if row else []
        request = build(
            p.FetchAsReplicaRequest,
            broker_id=2,
            incarnation=5,
            session_id=self.session,
            answers=self.answers,
            max_wait_ms=wait_ms,
            max_bytes=1 << 20,
            topics=[{"topic": "t", "partitions": rows}] if rows else [],
            forgotten=[],
        )
        body = b"".join(bytes(buffer) for buffer in await self.sessions.answer(1, request))
        header = p.response_header(p.APIS[request.API_KEY], 0, 1)
        found = p.decode_response(request.API_KEY, 0, header + body)[1]
        self.session = found.session_id
        self.answers += 1
        assert found.error_code == 0
        return found.topics[0].partitions[0] if found.topics else None


def play(scenario: Callable[[Follower], Awaitable[None]]) -> None:
    async def run() -> None:
        await scenario(Follower())

    asyncio.run(run())


def test_push_is_offered_in_the_leaders_last_segment() -> None:
    async def scenario(follower: Follower) -> None:
        row = await follower.ask(fetch_offset=90, pushed=False)
        assert row.records is not None and row.push == Push.SEGMENTS
        row = await follower.ask(fetch_offset=120, pushed=False)
        assert not row.records and row.push == Push.OFFERED
        assert await follower.ask() is None, "it is told once"

    play(scenario)


def test_neither_records_nor_the_high_watermark_wake_who_is_pushed_to() -> None:
    async def scenario(follower: Follower) -> None:
        log, sessions = follower.leader.partition, follower.sessions
        row = await follower.ask(fetch_offset=110, pushed=True)
        assert not row.records and row.push == Push.NOTHING
        assert follower.leader.confirms == [110]
        waiting = asyncio.ensure_future(follower.ask(wait_ms=20_000))
        await asyncio.sleep(0)
        assert not sessions.fetches(TP)
        log.log_end_offset = 130
        sessions.grown(TP)
        sessions.mark_soon(TP)
        await asyncio.sleep(0.02)
        assert not waiting.done()
        log.log_start_offset = 50
        sessions.mark(TP)
        row = await waiting
        assert row.log_start_offset == 50 and not row.records

    play(scenario)


def test_the_end_of_a_push_is_told_once_and_fetch_goes_on_where_the_follower_is() -> None:
    async def scenario(follower: Follower) -> None:
        await follower.ask(fetch_offset=110, pushed=True)
        waiting = asyncio.ensure_future(follower.ask(wait_ms=20_000))
        await asyncio.sleep(0)
        follower.sessions.end_push(TP, 2)
        row = await waiting
        assert row.push == Push.ENDED and not row.records
        assert await follower.ask() is None
        row = await follower.ask(fetch_offset=115, pushed=False)
        assert row.records is not None and row.push == Push.OFFERED
        assert follower.sessions.fetches(TP)
        follower.sessions.end_push(TP, 2)
        assert await follower.ask(fetch_offset=120, pushed=True) is not None
        assert await follower.ask() is None, "that was told of a push that had ended before"

    play(scenario)


def test_a_follower_that_is_held_back_gets_records_later_and_no_offer() -> None:
    async def scenario(follower: Follower) -> None:
        now = 0.0
        follower.pace = pace = Pace(lambda: now, 80)  # bytes per second; records have 7
        row = await follower.ask(fetch_offset=110, pushed=False)
        assert len(row.records) == 7 and row.push == Push.NOTHING
        assert await follower.ask(fetch_offset=111, pushed=False) is None, "at once"
        now = 1.0
        waiting = asyncio.ensure_future(follower.ask(wait_ms=20_000))
        row = await asyncio.wait_for(waiting, 10)
        assert len(row.records) == 7 and pace.taken == 14
        follower.pace = None  # it is in sync
        row = await follower.ask(fetch_offset=112, pushed=False)
        assert len(row.records) == 7 and row.push == Push.OFFERED

    play(scenario)


def test_a_follower_whose_records_were_thrown_away_is_told_all_the_same() -> None:
    """Records were on their way when it said that it takes none: it never says that it has them."""

    async def scenario(follower: Follower) -> None:
        row = await follower.ask(fetch_offset=110, pushed=False)
        assert row.records is not None
        follower.answers = 0  # its next request was sent before that came
        assert await follower.ask(fetch_offset=110, pushed=True) is None
        follower.answers = 2
        follower.sessions.want_file(TP, 2, ahead=False)
        row = await follower.ask()
        assert row is not None and row.push == Push.WANTS
        follower.sessions.end_push(TP, 2)
        row = await follower.ask()
        assert row is not None and row.push == Push.ENDED

    play(scenario)


def test_what_is_wanted_before_the_follower_says_that_it_takes_no_records_is_not_lost() -> None:
    async def scenario(follower: Follower) -> None:
        await follower.ask(fetch_offset=120, pushed=False)
        follower.sessions.begin_push(TP, 2)
        follower.sessions.want_file(TP, 2, ahead=True)
        row = await follower.ask(fetch_offset=120, pushed=True)
        assert row.push == Push.WANTS_NEXT
        row = await follower.ask(fetch_offset=120, pushed=False)
        assert row.push == Push.OFFERED
        follower.sessions.begin_push(TP, 2)
        follower.sessions.end_push(TP, 2)
        row = await follower.ask(fetch_offset=120, pushed=True)
        assert row.push == Push.ENDED
        follower.sessions.begin_push(TP, 2)
        row = await follower.ask(fetch_offset=120, pushed=True)
        assert row is None or row.push == Push.NOTHING

    play(scenario)


def test_a_leader_that_wants_more_again_is_heard_again() -> None:
    """Nothing else has changed between: the file of a partition that is written grows in steps."""

    async def scenario(follower: Follower) -> None:
        await follower.ask(fetch_offset=110, pushed=True)
        for ahead, said in ((False, Push.WANTS), (False, Push.WANTS), (True, Push.WANTS_NEXT)):
            follower.sessions.want_file(TP, 2, ahead)
            row = await follower.ask()
            assert row is not None and row.push == said
            assert await follower.ask() is None

    play(scenario)
