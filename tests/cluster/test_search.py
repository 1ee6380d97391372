"""Every world within small bounds holds, and each mistake is found within them.

Larger bounds by hand: ``python -m tests.cluster.search --help``.
"""

from __future__ import annotations

import random

import pytest

from tests.cluster.mistakes import MISTAKES
from tests.cluster.model_log import ModelLog
from tests.cluster.moves import after, moves
from tests.cluster.search import Fingerprints, Found, fingerprint, search, tidy, told
from tests.cluster.world import Bounds, World, begin, check

SHORT = ModelLog(((0, 0),))
LONG = ModelLog(((0, 0), (0, 1)))

ONE = Bounds(records=1, epochs=2, changes=1, losses=0)
RETURN = ONE._replace(changes=2)
TWO = Bounds(records=2, epochs=2, changes=0, losses=0)
LATE = Bounds(records=0, epochs=3, changes=0, losses=0, late=True)
PAIR = Bounds(replicas=2, records=1, epochs=2, changes=1, losses=0)
POWER = Bounds(crashes=1, lossy=True, min_in_sync=2, records=1, epochs=1, changes=1, losses=0)

WHOLE = {
    "a change and its return": RETURN,
    "two records, two elections": TWO,
    "a record, three epochs": TWO._replace(records=1, epochs=3),
    "a lost link": Bounds(records=1, epochs=1, changes=2, losses=1),
    "two replicas, three epochs": Bounds(replicas=2, records=2, epochs=3, changes=2, losses=1),
    "late answers": PAIR._replace(records=2, epochs=3, changes=0, late=True),
    "states learned late": ONE._replace(stale=True),
    "followers are told": ONE._replace(records=2, epochs=1, tells=True),
    "each step alone": ONE._replace(epochs=1, separate=True, late=True),
    "a power loss": POWER,
    "a power loss and an election": POWER._replace(replicas=2, epochs=2),
    "a session ends": PAIR._replace(crashes=1, expires=True),
    "retention": TWO._replace(records=1, deletes=1),
    "an unclean election": PAIR._replace(changes=0, crashes=1, lossy=True, unclean=True),
}


def parted() -> World:
    """Broker 1 was elected and lacks a record of an older epoch, which broker 0 still has.  It has
    answered broker 2 that the older epoch ends before that record, and the answer is on its way.
    Then broker 0 was elected and leads.  The record may be committed now; whoever takes that answer
    for one of a later leader cuts it off again."""
    world = begin(LATE, (LONG, SHORT, SHORT), leader=1)
    for broker in (1, 2):
        world = after(world, LATE, ("learn", broker, world.state))
    for move in (("answer", 1, 2), ("elect", 0)):
        world = after(world, LATE, move)
    for broker in (0, 2):
        world = after(world, LATE, ("learn", broker, world.state))
    return world


FINDS = {
    "epoch_start_left_out": (RETURN, begin(RETURN)),
    "smaller_in_sync_used": (ONE, begin(ONE)),
    "revoked_after_truncation": (TWO, begin(TWO)),
    "completion_counted": (TWO, begin(TWO)),
    "answer_of_another_epoch_used": (LATE, parted()),
}


def report(found: Found) -> str:
    return "\n".join(told(found))


@pytest.mark.parametrize("bounds", WHOLE)
def test_every_world_holds(bounds: str) -> None:
    found = search(WHOLE[bounds])
    assert found.complete and found.broken is None, report(found)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake: str) -> None:
    bounds, start = FINDS[mistake]
    with MISTAKES[mistake]():
        found = search(bounds, start, most=200_000)
    assert found.broken is not None and found.path, report(found)
    # The same moves do no harm without the mistake, as far as they are possible.
    world = start
    for move in found.path:
        if move not in list(moves(world, bounds)):
            break
        world = tidy(after(world, bounds, move))
        check(world)


def test_a_path_is_told_move_by_move() -> None:
    with MISTAKES["smaller_in_sync_used"]():
        found = search(ONE)
    lines = report(found).splitlines()
    assert lines[0].strip().startswith("1 ")
    assert len(lines) == len(found.path) + 2
    assert lines[-2].startswith("BROKEN: ") and "lacks records" in lines[-2]


def test_names_of_brokers_do_not_matter() -> None:
    """A search that takes no two worlds for one but equal ones comes to the same worlds."""
    bounds = Bounds(records=1, epochs=1, changes=1, losses=0)
    start = begin(bounds)
    every: set[World] = {start}
    left = [start]
    while left:
        world = left.pop()
        for move in moves(world, bounds):
            found = tidy(after(world, bounds, move))
            if found not in every:
                every.add(found)
                left.append(found)
    different = {fingerprint(world) for world in every}
    assert search(bounds).worlds == len(different) < len(every)
    assert {fingerprint(begin(bounds, leader=leader)) for leader in range(3)} == {
        fingerprint(start)
    }


def test_fingerprints_are_kept_while_the_table_grows() -> None:
    chance = random.Random(1)
    numbers = [chance.getrandbits(64) - (1 << 63) for _ in range(5000)]
    seen = Fingerprints(places=1 << 4)
    assert all(seen.add(number) for number in numbers)
    assert not any(seen.add(number) for number in numbers)
    assert len(seen) == len(numbers)
