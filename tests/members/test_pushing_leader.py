"""A leader whose marks move the high watermark without Python: whom it counts, and whom it lets
join."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from kdirect.cluster import leading_replica as machine
from kdirect.cluster.partition_state import PartitionState
from kdirect.member.leading import Leader, Surroundings
from kdirect.member.push import Confirmation
from kdirect.model import TopicPartition

TP = TopicPartition("t", 0)


class Log:
    """The leader's log; `high_watermark` is what the kernel shows."""

    def __init__(self, end: int, high_watermark: int) -> None:
        self.log_end_offset = end
        self.high_watermark = high_watermark
        self.log_start_offset = 0

    def set_replicas(self, brokers: Any) -> None:
        self.replicas = brokers

    def replicated_nowait(self, broker: int, offset: int) -> bool:
        self.high_watermark = max(self.high_watermark, offset)
        return True


class Pushed:
    """Marks and rings."""

    def __init__(self) -> None:
        self.counted: tuple[list[int], bool] = ([], False)
        self.ends: dict[int, int] = {}
        self.fetched: list[tuple[int, int]] = []
        self.watches = 0

    def push(self) -> None:
        pass

    def set_counted(self, brokers: Any, *, stands_still: bool) -> None:
        self.counted = (list(brokers), stands_still)

    def confirm(self, broker: int, incarnation: int, end: int) -> None:
        self.fetched.append((broker, end))
        self.ends[broker] = end

    def confirmations(self) -> list[Confirmation]:
        return [Confirmation(b, 10 + b, end) for b, end in self.ends.items()]

    def marks(self) -> dict[int, int]:
        return self.ends

    def watch(self) -> None:
        self.watches += 1


class Changes:
    def __init__(self) -> None:
        self.proposed: list[tuple[int, ...]] = []

    def propose(self, tp: Any, epoch: int, effect: machine.Propose, feed: Any) -> None:
        self.proposed.append(effect.in_sync)

    def withdraw(self, tp: Any) -> None:
        pass


def play(
    scenario: Callable[[Leader, Log, Pushed, Changes], Awaitable[None]],
    *,
    in_sync: tuple[int, ...],
    end: int = 5,
    min_in_sync: int = 1,
) -> None:
    async def run() -> None:
        changes, log = Changes(), Log(end, end)
        around = Surroundings(
            1,
            changes,  # type: ignore[arg-type]
            lambda partition, work, done: done(work(), None),
            lambda tp: None,
            lambda: 0,
            lambda: 0,
        )
        state = PartitionState(1, 3, in_sync, 7, (), 11)
        leading, effects = machine.begin(
            1,
            state,
            (1, 2, 3),
            end=end,
            high_watermark=end,
            now_ms=0,
            min_in_sync=min_in_sync,
            registered=((1, 11), (2, 12), (3, 13)),
        )
        leader = Leader(around, TP, log, leading, bound=True)  # type: ignore[arg-type]
        leader.begin(effects)
        pushed = Pushed()
        done = leader.begin_push(pushed)  # type: ignore[arg-type]
        assert done is not None
        await done
        assert log.replicas == {}, "the gate must not hold what marks move"
        await scenario(leader, log, pushed, changes)
        leader.resign()

    asyncio.run(run())


def test_who_is_in_sync_counts() -> None:
    async def scenario(leader: Leader, log: Log, pushed: Pushed, changes: Changes) -> None:
        assert pushed.counted == ([2, 3], False)
        assert leader.begin_push(pushed) is None, "marks move it already"  # type: ignore[arg-type]

    play(scenario, in_sync=(1, 2, 3))


def test_below_min_in_sync_the_high_watermark_stands_still() -> None:
    async def scenario(leader: Leader, log: Log, pushed: Pushed, changes: Changes) -> None:
        assert pushed.counted == ([], True)
        log.high_watermark = 5
        leader.feed(machine.Learned(PartitionState(1, 3, (1, 2), 8, (), 11)))
        assert pushed.counted == ([2], False)

    play(scenario, in_sync=(1,), min_in_sync=2)


def test_a_follower_joins_only_with_all_that_is_committed_by_then() -> None:
    """The machine believes in an older high watermark than the kernel shows."""

    async def scenario(leader: Leader, log: Log, pushed: Pushed, changes: Changes) -> None:
        log.log_end_offset, log.high_watermark = 12, 10  # by marks
        pushed.ends[3] = 7
        leader.pushes(3)
        leader.measure()
        assert leader.leading.high_watermark < 10
        assert changes.proposed == [] and pushed.counted == ([2], False)
        log.log_end_offset, log.high_watermark, pushed.ends[3] = 14, 13, 12
        leader.feed(machine.Ticked(1))
        leader.measure()  # it has all that there was at the measure before
        assert changes.proposed == []
        assert pushed.counted == ([2, 3], False), "the high watermark waits for it from now on"
        pushed.ends[3] = 13
        leader.feed(machine.Ticked(2))
        leader.measure()
        assert changes.proposed == [(1, 2, 3)] and pushed.counted == ([2, 3], False)

    play(scenario, in_sync=(1, 2))


def test_followers_that_fetch_have_marks_too() -> None:
    async def scenario(leader: Leader, log: Log, pushed: Pushed, changes: Changes) -> None:
        log.log_end_offset = 9
        leader.confirmed(machine.Confirmed(2, 12, 3, 8))
        leader.pushes(3)
        # Its row in the fetch session, which the ring overtakes.
        leader.confirmed(machine.Confirmed(3, 13, 3, 8))
        assert pushed.fetched == [(2, 8)]

    play(scenario, in_sync=(1, 2, 3))


def test_the_end_of_a_ring_brings_no_follower_back_whose_connection_is_lost() -> None:
    """Both end with its process, in any order."""

    async def scenario(leader: Leader, log: Log, pushed: Pushed, changes: Changes) -> None:
        for follower in (2, 3):
            leader.confirmed(machine.Confirmed(follower, 10 + follower, 3, 5, True))
            leader.pushes(follower)
        leader.measure()
        leader.feed(machine.LinkLost(3))
        assert changes.proposed == [(1, 2)]
        leader.pushes_no_more(3, tell=True)
        leader.feed(machine.Learned(PartitionState(1, 3, (1, 2), 8, (), 11)))
        assert changes.proposed == [(1, 2)], "it is not proposed again"
        assert pushed.counted == ([2], False), "nothing waits for it"

    play(scenario, in_sync=(1, 2, 3))


def test_one_without_room_is_pushed_to_until_it_is_in_sync_again() -> None:
    async def scenario(leader: Leader, log: Log, pushed: Pushed, changes: Changes) -> None:
        log.log_end_offset = 9
        leader.confirmed(machine.Confirmed(2, 12, 3, 9))
        leader.confirmed(machine.Confirmed(3, 13, 3, 8, is_full=True))
        assert changes.proposed == [(1, 2)]
        leader.feed(machine.Learned(PartitionState(1, 3, (1, 2), 8, (), 11)))
        leader.pushes(3)
        leader.measure()  # it has got no further
        assert changes.proposed == [(1, 2)]
        pushed.ends[3] = 9
        leader.measure()
        assert changes.proposed == [(1, 2), (1, 2, 3)]

    play(scenario, in_sync=(1, 2, 3))


def test_acknowledgements_wait_for_marks() -> None:
    async def scenario(leader: Leader, log: Log, pushed: Pushed, changes: Changes) -> None:
        log.log_end_offset = 9
        before = pushed.watches
        future = leader.committed(9, 10)
        assert pushed.watches > before
        leader.moved()
        assert not future.done()
        log.high_watermark = 9
        leader.moved()
        assert future.done()
        assert leader.knows_high_watermark

    play(scenario, in_sync=(1, 2, 3))


def test_a_move_while_the_one_before_is_told_is_not_lost() -> None:
    """The worker tells of one move for each `watch`; the next may come at any moment."""

    async def scenario(leader: Leader, log: Log, pushed: Pushed, changes: Changes) -> None:
        log.log_end_offset = 9
        future = leader.committed(9, 10)
        told = pushed.watches
        leader._around = leader._around._replace(shown=lambda tp: move())

        def move() -> None:
            nonlocal told
            if log.high_watermark < 9:
                log.high_watermark = 9
                if pushed.watches > told:
                    told = pushed.watches
                    asyncio.get_running_loop().call_soon(leader.moved)

        log.high_watermark = 8
        leader.moved()
        await asyncio.sleep(0.01)
        assert future.done()

    play(scenario, in_sync=(1, 2, 3))


def test_what_waits_when_marks_begin_is_answered() -> None:
    """Followers have fetched it already, and nothing moves after that."""

    async def scenario(leader: Leader, log: Log, pushed: Pushed, changes: Changes) -> None:
        leader.pushed = leader._counted = None
        log.log_end_offset = 9
        future = leader.committed(9, 10)
        assert not future.done()

        class Moving(Pushed):
            def set_counted(self, brokers: Any, *, stands_still: bool) -> None:
                log.high_watermark = 9

        done = leader.begin_push(Moving())  # type: ignore[arg-type]
        assert done is not None
        await done
        assert future.done()

    play(scenario, in_sync=(1, 2, 3))


def test_a_leader_that_others_leave_needs_nobody_to_feed_it() -> None:
    """What RDMA producers write is fed to nobody: the kernel has to move the high watermark."""

    async def scenario(leader: Leader, log: Log, pushed: Pushed, changes: Changes) -> None:
        leader.pushed = leader._counted = None
        log.replicas = {-1: 5}
        leader.assigned((1, 2))
        assert log.replicas == {-1: 5}
        leader.assigned((1,))
        assert leader.is_alone and log.replicas == {}
        leader.assigned((1, 2))
        assert log.replicas == {-1: 5}, "another one counts from here on"

    play(scenario, in_sync=(1,))


def test_a_leader_that_others_left_before_it_began_needs_nobody_to_feed_it() -> None:
    """The log had begun the epoch with replicas; by the time the leader begins there are none."""

    async def run() -> None:
        log = Log(5, 5)
        log.replicas = {-1: 5}
        around = Surroundings(
            1,
            Changes(),  # type: ignore[arg-type]
            lambda partition, work, done: done(work(), None),
            lambda tp: None,
            lambda: 0,
            lambda: 0,
        )
        state = PartitionState(1, 3, (1,), 7, (), 11)
        leading, effects = machine.begin(
            *(1, state, (1,)),
            end=5,
            high_watermark=5,
            now_ms=0,
            min_in_sync=1,
            registered=((1, 11), (2, 12)),
        )
        leader = Leader(around, TP, log, leading, bound=True)  # type: ignore[arg-type]
        leader.begin(effects)
        assert leader.is_alone and log.replicas == {}
        leader.assigned((1, 2))
        assert log.replicas == {-1: 5}, "another one counts from here on"
        leader.resign()

    asyncio.run(run())


def test_a_leader_is_alone_once_nobody_who_has_left_counts() -> None:
    """A follower that is no replica any more stays one that counts until the state says so: what
    makes the leader alone is then that state, and no assignment."""

    async def scenario(leader: Leader, log: Log, pushed: Pushed, changes: Changes) -> None:
        leader.pushed = leader._counted = None
        log.replicas = {-1: 5}
        leader.assigned((1,))
        assert not leader.is_alone and log.replicas == {-1: 5}, "the other one is still in sync"
        leader.feed(machine.Learned(PartitionState(1, 3, (1,), 8, (), 11)))
        assert leader.is_alone and log.replicas == {}

    play(scenario, in_sync=(1, 2))


def test_a_leader_is_alone_once_whom_it_has_proposed_is_refused() -> None:
    """The follower has left while the controller was asked to take it in."""

    async def scenario(leader: Leader, log: Log, pushed: Pushed, changes: Changes) -> None:
        leader.pushed = leader._counted = None
        log.replicas = {-1: 5}
        leader.confirmed(machine.Confirmed(2, 12, 3, 5, True, False))
        assert changes.proposed == [(1, 2)]
        leader.assigned((1,))
        assert not leader.is_alone and log.replicas == {-1: 5}
        leader.feed(machine.Refused(7))
        assert leader.is_alone and log.replicas == {}

    play(scenario, in_sync=(1,))


class Thread:
    """Work that is done when it is asked for, in whatever order."""

    def __init__(self, leader: Leader) -> None:
        self.works: list[tuple[Callable[[], Any], Callable[..., None]]] = []
        leader._around = leader._around._replace(
            on_thread=lambda partition, work, done: self.works.append((work, done))
        )

    def do(self, number: int = 0) -> None:
        work, done = self.works.pop(number)
        done(work(), None)


def test_what_the_gate_let_out_when_marks_began_is_answered() -> None:
    """Nobody counts by then, so the end of the gate was what moved the high watermark."""

    async def scenario(leader: Leader, log: Log, pushed: Pushed, changes: Changes) -> None:
        leader.pushed = leader._counted = None
        thread, released = Thread(leader), []
        leader._around = leader._around._replace(released=released.append)
        log.log_end_offset = 9
        future = leader.committed(9, 10)
        log.high_watermark = 5  # for the worker has written more than the machine knows of
        leader.begin_push(Pushed())  # type: ignore[arg-type]
        again = leader.committed(9, 10)
        assert future.done() and not again.done() and not released
        log.set_replicas = lambda brokers: setattr(  # type: ignore[method-assign]
            log, "high_watermark", 9
        )
        thread.works[0] = (lambda: log.set_replicas({}), thread.works[0][1])
        thread.do()
        assert again.done() and released == [TP]

    play(scenario, in_sync=(1,))


def test_one_thread_at_a_time_is_at_the_gate() -> None:
    """Works of one partition may overtake each other; the last word is the right one."""

    async def scenario(leader: Leader, log: Log, pushed: Pushed, changes: Changes) -> None:
        leader.pushed = leader._counted = None
        log.replicas, thread = {-1: 5}, Thread(leader)
        for replicas in ((1,), (1, 2), (1,), (1, 2)):
            leader.assigned(replicas)
        done = 0
        while thread.works:
            assert len(thread.works) == 1 and done < 5
            thread.do()
            done += 1
        assert done and log.replicas == {-1: 5}, "there is another one in the end"
        leader.assigned((1,))
        leader.resign()
        under_way = leader.stop_work()
        assert not all(x.done() for x in under_way), "who comes next has to wait"
        thread.do()
        await asyncio.wait_for(asyncio.gather(*under_way), 10)

    play(scenario, in_sync=(1,))


def test_the_end_of_a_ring_is_told() -> None:
    told: list[Any] = []

    async def scenario(leader: Leader, log: Log, pushed: Pushed, changes: Changes) -> None:
        leader._around = leader._around._replace(push_ended=lambda *x: told.append(x))
        leader.pushes(2)
        leader.pushes_no_more(2, tell=False)
        assert told == []
        leader.pushes(2)
        leader.pushes_no_more(2, tell=True)
        assert told == [(TP, 2)]

    play(scenario, in_sync=(1, 2, 3))
