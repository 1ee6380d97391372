"""What a replica grants to its leader, where files fail it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kdirect.broker.followed_head import FollowedHead
from kdirect.broker.push import PushState
from kdirect.errors import AccessDeniedError, StorageFullError
from tests.broker.push_rig import connect
from tests.broker.push_world import World


def test_a_grant_that_fails_leaves_nothing(world: Callable[..., Any]) -> None:
    """It is tried again and again; what each attempt took would never come back."""
    w: World = world(followers=1)
    follower, partition = w.followers[0], w.followers[0].partition
    w.leader.lead([1], 4096)
    connect(w.leader, follower)
    ring = w.leader.ring_for(follower.number, 8)
    assert follower.leader is not None
    domain, qp = follower.leader
    ids = iter([1, 0, 2])
    freed: list[int] = []

    def new_file_id() -> int:
        found = next(ids)
        if not found:
            raise AccessDeniedError("there are no more file ids")
        return found

    head = FollowedHead(
        partition,
        follower.worker,
        *(domain, qp, ring),
        window=8,
        leader_epoch=1,
        new_file_id=new_file_id,
        free_file_id=freed.append,
        on_rolled=lambda head: None,
        on_ended=lambda head, why: None,
    )
    head.grant()
    segment, files = partition.segments[-1], set(partition.directory.iterdir())
    held = segment.references
    with pytest.raises(AccessDeniedError):
        head.grant_ahead()
    assert set(partition.directory.iterdir()) == files, "the file for the next segment is gone"
    assert head.grant_ahead() is not None
    assert head.end() and freed == [1, 2]
    assert segment.references == held - 1

    last = FollowedHead(
        partition,
        follower.worker,
        *(domain, qp, ring),
        window=8,
        leader_epoch=1,
        new_file_id=new_file_id,
        on_rolled=lambda head: None,
        on_ended=lambda head, why: None,
    )
    ids = iter([0])
    with pytest.raises(AccessDeniedError):
        last.grant()
    assert segment.references == held - 1
    assert last.end()


def test_a_file_that_cannot_be_dropped_keeps_no_other(world: Callable[..., Any]) -> None:
    w: World = world(followers=1)
    follower, partition = w.followers[0], w.followers[0].partition
    w.leader.lead([1], 4096)
    connect(w.leader, follower)
    assert follower.leader is not None
    domain, qp = follower.leader
    ids = iter([1, 2])
    freed: list[int] = []

    def free(file_id: int) -> None:
        freed.append(file_id)
        if file_id == 1:
            raise OSError("planted")

    head = FollowedHead(
        partition,
        follower.worker,
        *(domain, qp, w.leader.ring_for(follower.number, 8)),
        window=8,
        leader_epoch=1,
        new_file_id=lambda: next(ids),
        free_file_id=free,
        on_rolled=lambda head: None,
        on_ended=lambda head, why: None,
    )
    head.grant()
    files = set(partition.directory.iterdir())
    head.grant_ahead()
    with pytest.raises(OSError, match="planted"):
        head.end()
    assert freed == [1, 2]
    assert set(partition.directory.iterdir()) == files
    assert head.end()


@pytest.mark.parametrize("work", ["learn_epochs", "roll_into"])
def test_a_disk_that_fails_ends_the_grant(
    world: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, work: str
) -> None:
    """Else the leader waits for it, and the replica for the leader, until the next epoch."""
    w: World = world(followers=1)
    follower = w.followers[0]

    def fails(*arguments: Any, **options: Any) -> Any:
        raise StorageFullError("no space is left") if work == "roll_into" else OSError("no space")

    monkeypatch.setattr(follower.partition, work, fails)
    w.start()
    w.append(10, 4000)  # into the next segment
    w.run(lambda: follower.ended == ["NO_ROOM"])
    w.run(lambda: w.leader.rings[1].state != PushState.PUSHING)
    monkeypatch.undo()

    def has_all() -> bool:
        w.follow_again()  # what was under way may have broken the link
        return w.all_have(w.end())

    w.run(has_all)
    w.check_equal()
