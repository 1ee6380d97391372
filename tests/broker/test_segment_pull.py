"""The steps of reading one sealed segment, without memory, queue pairs or logs."""

from __future__ import annotations

import random

from kdirect.broker import segment_pull as machine
from kdirect.broker.segment_pull import (
    Allowed,
    AskMore,
    Commit,
    Committed,
    Effect,
    End,
    Event,
    Landed,
    Lost,
    Phase,
    Pull,
    Read,
    Stop,
    Turn,
)

PIECE = machine.READ_BYTES


def run(pull: Pull, *events: Event) -> tuple[Pull, list[Effect]]:
    found: list[Effect] = []
    for event in events:
        pull, effects = machine.step(pull, event)
        found += effects
    return pull, found


def test_reads_are_posted_in_order_and_bounded() -> None:
    pull = machine.begin(100, 10 * PIECE, 10 * PIECE)
    pull, effects = run(pull, *[Turn()] * 9)
    assert effects == [Read(100 + i * PIECE, PIECE) for i in range(machine.MOST_READS)]
    pull, effects = run(pull, Landed(100), Committed(150), Turn())
    assert effects == [
        Commit(100, 100 + PIECE),
        Read(100 + machine.MOST_READS * PIECE, PIECE),
    ]
    assert pull.committed == 150


def test_only_what_landed_without_a_gap_is_committed() -> None:
    pull, _ = run(machine.begin(0, 3 * PIECE, 3 * PIECE), Turn(), Turn(), Turn())
    pull, effects = run(pull, Landed(PIECE), Landed(2 * PIECE))
    assert effects == []
    pull, effects = run(pull, Landed(0))
    assert effects == [Commit(0, 3 * PIECE)]
    pull, effects = run(pull, Committed(3 * PIECE))
    assert effects == [End()]
    assert pull.phase is Phase.DONE


def test_a_batch_that_never_becomes_whole_ends_it() -> None:
    pull, _ = run(machine.begin(0, 100, 100), Turn(), Landed(0))
    pull, effects = run(pull, Committed(60))
    assert (pull.phase, effects) == (Phase.DROPPED, [End()])
    assert "position 60" in pull.reason


def test_memory_is_kept_until_no_read_is_under_way() -> None:
    pull, _ = run(machine.begin(0, 9 * PIECE, 9 * PIECE), Turn(), Turn(), Turn())
    pull, effects = run(pull, Stop("fenced"), Turn(), Committed(PIECE), Landed(PIECE))
    assert (pull.phase, effects) == (Phase.STOPPING, [])
    pull, effects = run(pull, Lost(0, "flushed"))
    assert (pull.phase, effects) == (Phase.STOPPING, [])
    pull, effects = run(pull, Landed(2 * PIECE))
    assert (pull.phase, effects, pull.reason) == (Phase.DROPPED, [End()], "fenced")
    assert run(pull, Landed(0), Stop("again"), Turn()) == (pull, [])


def test_what_is_not_allowed_yet_is_asked_for_once() -> None:
    pull, effects = run(machine.begin(0, 3000, 1000), Turn(), Turn(), Turn(), Landed(0))
    assert effects == [Read(0, 1000), AskMore(), Commit(0, 1000)]
    pull, effects = run(pull, Committed(1000), Allowed(1500), Turn(100), Turn(), Turn(), Turn())
    assert effects == [Read(1000, 100), Read(1100, 400), AskMore()]
    pull, effects = run(pull, Allowed(1 << 60), Turn(), Turn())
    assert effects == [Read(1500, 1500)]


def test_any_order_of_events_ends_once_and_with_nothing_under_way() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        end = rng.randrange(1, 8 * PIECE)
        pull = machine.begin(0, end, rng.randrange(1, end + 1))
        under_way: set[int] = set()
        committed, ends = 0, 0
        for _ in range(500):
            events: list[Event] = [Turn(rng.randrange(1, PIECE + 1)), Allowed(rng.randrange(end))]
            events += [Allowed(end)]
            if under_way:
                at = rng.choice(sorted(under_way))
                events += [Landed(at)] * 4
                if rng.random() < 0.02:
                    events = [Lost(at, "flushed")]
            if rng.random() < 0.01:
                events = [Stop("fenced")]
            event = rng.choice(events)
            if isinstance(event, Landed | Lost):
                under_way.discard(event.start)
            queue: list[Event] = [event]
            while queue:
                pull, effects = machine.step(pull, queue.pop())
                for effect in effects:
                    assert ends == 0
                    match effect:
                        case Read(start, length):
                            assert start not in under_way and start + length <= pull.allowed
                            under_way.add(start)
                            assert len(under_way) <= machine.MOST_READS
                        case Commit(start, stop):
                            assert start == committed <= stop
                            assert not any(start <= x < stop for x in under_way)
                            committed = rng.randrange(start, stop + 1) if stop < end else stop
                            queue.append(Committed(committed))
                        case End():
                            ends += 1
                            assert not under_way
            if pull.is_over:
                break
        assert ends == 1, seed
        assert (pull.phase is Phase.DONE) == (committed == end and not pull.reason), seed
