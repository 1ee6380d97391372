"""Leaders and followers over real logs, moved by hand: what is copied, counted, cut and kept."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kdirect.errors import (
    CorruptLogError,
    NotEnoughReplicasAfterAppendError,
    NotEnoughReplicasError,
    NotLeaderError,
    StorageFullError,
    TimedOutError,
)
from kdirect.format.error_codes import ErrorCode
from kdirect.log.partition import Partition
from kdirect.member import following
from kdirect.member.fetch_sessions import _Row
from tests.log.conftest import make_batch
from tests.members.world import DEADLINE_S, TP, Broker, World, sealed, until

Scenario = Callable[[World], Coroutine[Any, Any, None]]
batch = partial(make_batch, value_bytes=100)


def play(directory: Path, scenario: Scenario, **options: Any) -> None:
    async def run() -> None:
        world = World(directory, **options)
        try:
            await scenario(world)
        finally:
            await world.stop()

    asyncio.run(run())


def contents(partition: Partition) -> bytes:
    out = []
    for segment in partition.segments:
        if segment.size:
            out += partition.read_for_replica(segment.base_offset, 1 << 30).buffers
    return b"".join(bytes(buffer) for buffer in out)


async def level(world: World, *numbers: int) -> None:
    """Wait until these brokers' logs, and what they show, are equal."""
    logs = [world.brokers[n].log for n in numbers]
    await until(
        lambda: (
            len({(x.log_end_offset, x.high_watermark, x.log_start_offset) for x in logs}) == 1
            and logs[0].high_watermark == logs[0].log_end_offset
            # A segment without records is told of after the records.
            and len({tuple(sealed(x).items()) for x in logs}) == 1
        ),
        f"{[(x.log_start_offset, x.high_watermark, x.log_end_offset) for x in logs]} {world.state}"
        f" {[sealed(x) for x in logs]}",
    )
    assert len({contents(x) for x in logs}) == 1


def test_what_is_committed_is_on_all_in_sync(tmp_path: Path) -> None:
    """acks=all is answered when both followers have the records, at the same segments."""

    async def scenario(world: World) -> None:
        await world.start(1, 2, 3)
        await world.create(1, 2, 3)
        await until(lambda: world.leads(1, 0))
        for _ in range(5):
            end = world.append(1, batch, 40)
            await world.brokers[1].replicas.committed(TP, end, 0, 10)
            for number in (2, 3):
                assert world.brokers[number].log.log_end_offset == end
        await level(world, 1, 2, 3)
        assert len(world.brokers[1].log.segments) > 3
        with pytest.raises(NotLeaderError):
            world.brokers[2].replicas.leader(TP)
        with pytest.raises(NotLeaderError):
            world.brokers[2].log.append(batch())

    play(tmp_path, scenario, segment_bytes=4096)


def test_followers_get_records_of_which_nobody_has_told(tmp_path: Path) -> None:
    """A producer that writes by RDMA and dies may leave a commit that is told to nobody."""

    async def scenario(world: World) -> None:
        await world.start(1, 2, 3)
        await world.create(1, 2, 3)
        await until(lambda: world.leads(1, 0))
        world.append(1, batch, 1)
        await level(world, 1, 2, 3)
        world.brokers[1].log.append(batch())
        await level(world, 1, 2, 3)
        assert world.brokers[1].replicas.statistics()["replicas_in_sync_shrinks"] == 0

    play(tmp_path, scenario, lag_ms=1000)


def test_who_only_looks_does_not_step_the_leader(tmp_path: Path) -> None:
    """Searches by time, and statistics, look from threads of their own."""

    async def scenario(world: World) -> None:
        await world.start(1, 2)
        await world.create(1, 2)
        await until(lambda: world.leads(1, 0))
        world.append(1, batch, 1)
        await level(world, 1, 2)
        replicas = world.brokers[1].replicas
        leader = replicas._replicas[TP].leader
        assert leader is not None
        world.brokers[1].log.append(batch())
        before = leader.leading
        assert replicas.knows_high_watermark(TP)
        assert [row["lag"] for row in replicas.describe(TP)] == [0, 1]
        assert leader.leading is before

    play(tmp_path, scenario)


def test_a_new_leader_goes_on_where_the_old_one_was(tmp_path: Path) -> None:
    """The leader dies; another leads, takes records, and the dead one comes back, cuts off what
    nobody else has, and joins again."""

    async def scenario(world: World) -> None:
        await world.start(1, 2, 3)
        await world.create(1, 2, 3)
        await until(lambda: world.leads(1, 0))
        end = world.append(1, batch, 10)
        await world.brokers[1].replicas.committed(TP, end, 0, 10)
        await world.brokers[1].kill()
        await until(lambda: True)
        epoch = world.elect(2, in_sync=(2, 3))
        await until(lambda: world.leads(2, epoch))
        end = world.append(2, batch, 5)
        await world.brokers[2].replicas.committed(TP, end, epoch, 10)
        await world.start(1)
        await until(lambda: world.state is not None and set(world.state.in_sync) == {1, 2, 3})
        await level(world, 1, 2, 3)
        assert world.brokers[1].log.log_end_offset == 15
        assert {s.base_offset for s in world.brokers[1].log.segments} >= {0, 10}

    play(tmp_path, scenario)


def test_a_deposed_leader_loses_what_only_it_has(tmp_path: Path) -> None:
    """Cut off from the others it goes on appending and rolling; back again its log is cut at the
    new epoch's start, and its segments begin where all others' do."""

    async def scenario(world: World) -> None:
        await world.start(1, 2, 3)
        await world.create(1, 2, 3)
        await until(lambda: world.leads(1, 0))
        end = world.append(1, batch, 10)
        await world.brokers[1].replicas.committed(TP, end, 0, 10)
        for number in (2, 3):
            world.brokers[number].dropped.add(1)
        world.cut(1)
        world.append(1, batch, 60)
        waits = world.brokers[1].replicas.committed(TP, 70, 0, 10)
        old = world.brokers[1]
        del world.brokers[1]  # it does not hear of the election yet
        epoch = world.elect(2, in_sync=(2, 3))
        await until(lambda: world.leads(2, epoch))
        end = world.append(2, batch, 33)
        await world.brokers[2].replicas.committed(TP, end, epoch, 10)
        world.brokers[1] = old
        world.publish()
        with pytest.raises(NotLeaderError):
            await waits
        await level(world, 1, 2, 3)
        assert old.log.log_end_offset == 43

    play(tmp_path, scenario, segment_bytes=4096)


def test_an_empty_disk_and_a_late_one_catch_up_under_load(tmp_path: Path) -> None:
    """Records keep coming; a broker whose disk is empty and one that was down join the others."""

    async def scenario(world: World) -> None:
        await world.start(1, 2, 3)
        await world.create(1, 2)
        await until(lambda: world.leads(1, 0))
        world.append(1, batch, 100)
        await world.brokers[2].kill(clean=True)
        await until(lambda: world.state is not None and world.state.in_sync == (1,))
        world.append(1, batch, 200)
        world.replicas = (1, 2, 3)
        world.brokers[3].make()
        world.elect(1, in_sync=(1,))
        await world.start(2)
        await until(lambda: world.leads(1, 1))
        loaded = asyncio.ensure_future(load(world))
        await until(lambda: world.state is not None and set(world.state.in_sync) == {1, 2, 3})
        loaded.cancel()
        await level(world, 1, 2, 3)

    async def load(world: World) -> None:
        while True:
            world.append(1, batch, 3)
            await asyncio.to_thread(lambda: None)

    play(tmp_path, scenario, segment_bytes=1 << 16)


def test_a_log_that_starts_later_is_copied_from_its_first_segment(tmp_path: Path) -> None:
    """Records are deleted at the leader: followers' logs start there, and a new one's, too."""

    async def scenario(world: World) -> None:
        await world.start(1, 2, 3)
        await world.create(1, 2)
        await until(lambda: world.leads(1, 0))
        end = world.append(1, batch, 200)
        await world.brokers[1].replicas.committed(TP, end, 0, 10)
        leader = world.brokers[1]
        await asyncio.to_thread(leader.log.delete_records, 150)
        assert await asyncio.wait_for(leader.replicas.low_watermark(TP), 10) == 150
        assert world.brokers[2].log.log_start_offset == 150
        assert len(world.brokers[2].log.segments) == len(leader.log.segments)
        world.replicas = (1, 2, 3)
        world.brokers[3].make()
        world.elect(1, in_sync=(1, 2))
        await until(lambda: world.state is not None and set(world.state.in_sync) == {1, 2, 3})
        await level(world, 1, 2, 3)

    play(tmp_path, scenario, segment_bytes=4096)


def test_too_few_in_sync(tmp_path: Path) -> None:
    """Below min.insync.replicas nothing is taken; what was taken before fails, and the high
    watermark stands still until there are enough again."""

    async def scenario(world: World) -> None:
        world.topic_config = {"min.insync.replicas": "2"}
        await world.start(1, 2)
        await world.create(1, 2)
        await until(lambda: world.leads(1, 0))
        leader = world.brokers[1].replicas
        end = world.append(1, batch, 5)
        await leader.committed(TP, end, 0, 10)
        world.refuses = True
        await world.brokers[2].kill()
        end = world.append(1, batch, 5)
        waits = leader.committed(TP, end, 0, 10)
        late = leader.committed(TP, end, 0, 0.01)
        with pytest.raises(TimedOutError):
            await late
        world.refuses = False
        with pytest.raises(NotEnoughReplicasAfterAppendError):
            await waits
        with pytest.raises(NotEnoughReplicasError):
            leader.may_append(TP)
        assert world.brokers[1].log.high_watermark == 5
        await world.start(2)
        await until(lambda: world.state is not None and set(world.state.in_sync) == {1, 2})
        leader.may_append(TP)
        await level(world, 1, 2)

    play(tmp_path, scenario)


def test_an_epoch_without_records_leaves_no_boundary(tmp_path: Path) -> None:
    """A leader was elected with a shorter log (unclean), begins a segment with its epoch and dies
    before it has a record; the next leader's log has none there."""

    async def scenario(world: World) -> None:
        await world.start(1, 2)
        await world.create(1, 2)
        await until(lambda: world.leads(1, 0))
        end = world.append(1, batch, 10)
        await world.brokers[1].replicas.committed(TP, end, 0, 10)
        world.brokers[2].dropped.add(1)
        world.cut(1)
        world.append(1, batch, 2)
        first = world.brokers.pop(1)
        epoch = world.elect(2, in_sync=(2,))
        await until(lambda: world.leads(2, epoch))
        world.brokers[2].dropped.clear()
        assert world.brokers[2].log.segments[-1].base_offset == 10
        world.brokers[1] = first
        epoch = world.elect(1, in_sync=(1,))
        await until(lambda: world.leads(1, epoch))
        world.append(1, batch, 1)
        await level(world, 1, 2)
        bases = [[s.base_offset for s in b.log.segments] for b in world.brokers.values()]
        assert bases == [[0, 12], [0, 12]]

    play(tmp_path, scenario)


def test_one_replica_costs_nothing(tmp_path: Path) -> None:
    """A partition that is here only shows records as soon as they are committed."""

    async def scenario(world: World) -> None:
        await world.start(1)
        await world.create(1)
        await until(lambda: world.leads(1, 0))
        broker: Broker = world.brokers[1]
        broker.log.append(batch())
        assert broker.log.high_watermark == 1 and not broker.log.gate.moves_high_watermark
        waits = broker.replicas.committed(TP, 1, 0, 10)
        assert waits.done()
        assert [s.base_offset for s in broker.log.segments] == [0]

    play(tmp_path, scenario)


def test_a_follower_goes_on_once_its_disk_has_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its disk is full for three attempts, and the third one has written a part."""

    async def scenario(world: World) -> None:
        await world.start(1, 2)
        await world.create(1, 2)
        await until(lambda: world.leads(1, 0))
        copy = world.brokers[2].log
        append, attempts = copy.append_as_stamped, []

        def full(data: bytes, at_ms: int | None = None) -> Any:
            attempts.append(len(data))
            if len(attempts) == 3:
                append(bytes(data)[: len(data) // 5])
            if len(attempts) <= 3:
                raise StorageFullError("no space")
            return append(data, at_ms)

        monkeypatch.setattr(copy, "append_as_stamped", full)
        end = world.append(1, batch, 5)
        await world.brokers[1].replicas.committed(TP, end, 0, 10)
        await until(lambda: len(attempts) >= 3)
        await level(world, 1, 2)

    play(tmp_path, scenario)


def test_a_follower_without_room_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves at once, whatever replica.lag.time.max.ms is, and comes back when there is room."""

    async def scenario(world: World) -> None:
        await world.start(1, 2, 3)
        await world.create(1, 2, 3)
        await until(lambda: world.leads(1, 0))
        copy = world.brokers[2].log

        def full(*arguments: Any) -> Any:
            raise StorageFullError("no space")

        with monkeypatch.context() as patched:
            patched.setattr(copy, "append_as_stamped_nowait", lambda *arguments: None)
            patched.setattr(copy, "append_as_stamped", full)
            for _ in range(3):
                end = world.append(1, batch, 5)
                await world.brokers[1].replicas.committed(TP, end, 0, 10)
            assert world.state.in_sync == (1, 3)
        await until(lambda: world.state.in_sync == (1, 2, 3))
        await level(world, 1, 2, 3)

    play(tmp_path, scenario, lag_ms=60_000)


def test_a_follower_that_can_begin_no_segment_says_when_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no record that it lacks."""

    async def scenario(world: World) -> None:
        await world.start(1, 2)
        await world.create(1, 2)
        await until(lambda: world.leads(1, 0))
        world.append(1, batch, 5)
        await level(world, 1, 2)

        def full(base_offset: int) -> None:
            raise StorageFullError("no space")

        with monkeypatch.context() as patched:
            patched.setattr(world.brokers[2].log, "begin_segment", full)
            world.brokers[1].log.roll()
            world.brokers[1].replicas.appended(TP)
            await until(lambda: world.state.in_sync == (1,))
        await until(lambda: world.state.in_sync == (1, 2))

    play(tmp_path, scenario, lag_ms=60_000)


def test_what_cannot_be_read_is_refused_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged segment of a leader ends no session: other partitions are copied in it."""

    async def scenario(world: World) -> None:
        await world.start(1, 2)
        await world.create(1, 2)
        await until(lambda: world.leads(1, 0))
        log = world.brokers[1].log
        read, attempts = log.read_for_replica_nowait, []

        def damaged(offset: int, length: int, **options: Any) -> Any:
            attempts.append(offset)
            if len(attempts) <= 3:
                raise CorruptLogError("damaged")
            return read(offset, length, **options)

        monkeypatch.setattr(log, "read_for_replica_nowait", damaged)
        end = world.append(1, batch, 5)
        await world.brokers[1].replicas.committed(TP, end, 0, 10)
        assert len(attempts) > 3
        assert world.brokers[2].replicas.statistics()["replicas_fetch_failures"] == 0

    play(tmp_path, scenario)


def test_looking_changes_nothing(tmp_path: Path) -> None:
    """Metrics and lookups by time ask on threads, where the machine may not be moved: what the
    event loop does at the same time, a proposal say, would be undone."""

    async def scenario(world: World) -> None:
        await world.start(1, 2)
        await world.create(1, 2)
        await until(lambda: world.leads(1, 0))
        replicas = world.brokers[1].replicas
        leader = replicas._replicas[TP].leader
        assert leader is not None
        world.brokers[1].log.append(batch())  # `Replicas.appended` is about to be called
        before = leader.leading
        with ThreadPoolExecutor(1) as thread:  # the event loop does nothing meanwhile
            rows = thread.submit(replicas.describe, TP).result(10)
            assert thread.submit(replicas.knows_high_watermark, TP).result(10)
            assert thread.submit(replicas.statistics).result(10)
        assert [(row["broker"], row["end"], row["lag"]) for row in rows] == [(1, 1, 0), (2, 0, 1)]
        assert leader.leading is before

    play(tmp_path, scenario)


def test_what_was_read_while_a_leader_resigned_is_not_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread reads for long: meanwhile the log is cut, and gets records of the next epoch.  A
    follower that has not heard of that would put them after records that were cut off here."""

    async def scenario(world: World) -> None:
        await world.start(1, 2)
        await world.create(1, 2)
        await until(lambda: world.leads(1, 0))
        end = world.append(1, batch, 5)
        replicas, log = world.brokers[1].replicas, world.brokers[1].log
        await replicas.committed(TP, end, 0, 10)
        leader = replicas._replicas[TP].leader
        assert leader is not None

        async def late(work: Callable[[], Any]) -> Any:
            epoch = world.elect(2)
            await until(lambda: world.leads(2, epoch))
            world.append(2, batch, 3)
            await until(lambda: log.log_end_offset == end + 3)
            return work()

        monkeypatch.setattr(log, "read_for_replica_nowait", lambda *_, **__: None)
        monkeypatch.setattr(replicas._sessions, "_read", late)
        told = await replicas._sessions._look(TP, _Row(0, end), leader, 1 << 20, 1, None)
        assert told is not None and told.error == ErrorCode.NOT_LEADER_OR_FOLLOWER
        assert not told.buffers

    play(tmp_path, scenario)


def test_file_work_that_failed_is_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There were no descriptors when this broker was to lead."""

    async def scenario(world: World) -> None:
        monkeypatch.setattr(following, "RETRY_S", 0.01)
        await world.start(1)
        world.brokers[1].make()
        log, attempts = world.brokers[1].log, []
        begin = log.begin_epoch

        def fails(epoch: int, *, replicated: bool) -> None:
            attempts.append(epoch)
            if len(attempts) < 3:
                raise OSError(errno.EMFILE, "too many open files")
            begin(epoch, replicated=replicated)

        monkeypatch.setattr(log, "begin_epoch", fails)
        world.replicas = (1,)
        world.elect(1, in_sync=(1,))
        await until(lambda: world.leads(1, 0))
        assert attempts == [0, 0, 0]

    play(tmp_path, scenario)


def test_a_fence_goes_on_after_a_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the replica would be in no epoch until the controller elects again."""

    async def scenario(world: World) -> None:
        monkeypatch.setattr(following, "RETRY_S", 0.01)
        await world.start(1, 2)
        await world.create(1, 2)
        await until(lambda: world.leads(1, 0))
        world.append(1, batch, 3)
        log, attempts = world.brokers[1].log, []
        follow = log.follow_leader

        def fails() -> None:
            attempts.append(log.log_end_offset)
            if len(attempts) < 3:
                raise ValueError("a mistake")
            follow()

        monkeypatch.setattr(log, "follow_leader", fails)
        await until(lambda: world.brokers[2].log.log_end_offset == 3)
        world.elect(2)
        await until(lambda: world.leads(2, 1))
        world.append(2, batch, 2)
        await until(lambda: log.log_end_offset == 5)
        assert attempts == [3, 3, 3]

    play(tmp_path, scenario)


@pytest.mark.parametrize("follower", [False, True])
def test_a_high_watermark_that_could_not_be_shown_is_shown_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, follower: bool
) -> None:
    """A thread had to show it, and had no file descriptor left, say; no record comes after it."""
    monkeypatch.setattr("kdirect.member.showing.RETRY_S", 0.01)

    async def scenario(world: World) -> None:
        await world.start(1, 2)
        await world.create(1, 2)
        await until(lambda: world.leads(1, 0))
        await level(world, 1, 2)
        log = world.brokers[2 if follower else 1].log
        attempts: list[int] = []
        show = log.replicated

        def fails(broker: int, offset: int) -> None:
            attempts.append(offset)
            if len(attempts) < 3:
                raise OSError(24, "Too many open files")
            show(broker, offset)

        monkeypatch.setattr(log, "replicated_nowait", lambda *_: False)
        monkeypatch.setattr(log, "replicated", fails)
        end = world.append(1, batch, 1)
        await world.brokers[1].replicas.committed(TP, end, 0, DEADLINE_S)
        await until(lambda: log.high_watermark == end)
        assert attempts == [end, end, end]

    play(tmp_path, scenario)


def test_a_leader_without_followers_hears_of_commits_by_rdma(tmp_path: Path) -> None:
    """The only other replica is gone; records are shown, and so acknowledged, at once, and not at
    the next tick."""

    async def scenario(world: World) -> None:
        watched: set[Any] = set()
        await world.start(1, 2)
        replicas = world.brokers[1].replicas
        replicas.watch = watched.add
        await world.create(1, 2)
        await until(lambda: world.leads(1, 0))
        log = world.brokers[1].log

        def commit() -> None:
            assert log.append(batch()).error == 0
            if TP in watched:
                watched.remove(TP)
                replicas.appended(TP)

        commit()
        await level(world, 1, 2)
        await world.brokers[2].kill()
        await until(lambda: world.state is not None and world.state.in_sync == (1,))
        for end in (2, 3, 4):
            commit()
            assert log.high_watermark == end

    play(tmp_path, scenario)


def test_records_that_are_being_read_are_not_sent_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A follower has more to tell while its request waits for a thread, and records come."""

    async def scenario(world: World) -> None:
        await world.start(1, 2)
        await world.create(1, 2, in_sync=(1,))
        await until(lambda: world.leads(1, 0))
        leader, follower = world.brokers[1], world.brokers[2]
        await until(lambda: TP in leader.replicas._sessions._followers)
        follower.replicas._fetcher.stop()
        sessions, goes_on = leader.replicas._sessions, asyncio.Event()
        sessions.stop()
        reads: list[int] = []

        async def late(work: Callable[[], Any]) -> Any:
            reads.append(1)
            await goes_on.wait()
            return work()

        def ask(session: int) -> asyncio.Future[Any]:
            row = {"partition": 0, "leader_epoch": 0, "fetch_offset": 0, "log_start_offset": 0}
            topics = [{"topic": TP.topic, "partitions": [row]}]
            request = follower.replicas._fetcher.request(session, 0, topics, [])
            return asyncio.ensure_future(follower.call(1, request, timeout_s=10))

        monkeypatch.setattr(leader.log, "read_for_replica_nowait", lambda *_, **__: None)
        monkeypatch.setattr(sessions, "_read", late)
        world.append(1, batch, 3)
        first = ask(0)
        await until(lambda: reads)
        second = ask(sessions._sessions[2].number)
        world.append(1, batch, 1)
        await asyncio.sleep(0)
        goes_on.set()
        found = (await first).topics
        assert [len(x.partitions) for x in found] == [1] and len(reads) == 1
        sessions.stop()
        assert not (await second).topics

    play(tmp_path, scenario)


def test_a_row_that_tells_the_size_alone_begins_no_segment(tmp_path: Path, caplog: Any) -> None:
    """It may be of the time when records were pushed, and of a segment that begins after the ones
    which are lacking here."""

    async def scenario(world: World) -> None:
        await world.start(1, 2)
        await world.create(1, 2)
        await until(lambda: world.leads(1, 0))
        world.append(1, batch, 3)
        await level(world, 1, 2)
        replica = world.brokers[2].replicas._replicas[TP]
        marks = {"leader_epoch": 0, "high_watermark": 3, "log_start_offset": 0, "push": 0}
        size = {"segment_base_offset": 100, "segment_bytes": 1 << 21, "records": None}
        taken = replica.take(SimpleNamespace(**marks, **size))
        assert not isinstance(taken, bool) and await taken
        log = world.brokers[2].log
        assert log.copies_segments_of(1 << 21) and len(log.segments) == 1
        assert "in its leader's log" not in caplog.text

    play(tmp_path, scenario)
