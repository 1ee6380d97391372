"""The figures of a member: counted from one picture of the cluster to the next, or read off it."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from kdirect.cluster.election import Partition
from kdirect.cluster.image import Image, Topic
from kdirect.cluster.partition_state import PartitionState
from kdirect.cluster.records import TopicAssignment
from kdirect.member.figures import Figures
from kdirect.member.metadata import Metadata
from kdirect.metrics import METRICS
from kdirect.model import TopicPartition

ASSIGNED = TopicAssignment(uuid.UUID(int=1), ((1, 2, 3), (2, 3, 1)))


def picture(*states: PartitionState, controller: int = 1) -> Metadata:
    """Topic `t`, with these states of its partitions."""
    partitions = tuple(
        Partition(replicas, state=state)
        for replicas, state in zip(ASSIGNED.replicas, states, strict=False)
    )
    topics = {"t": Topic(ASSIGNED, partitions)}
    return Metadata("c", 1, controller_id=controller, image=Image(1, 0, topics=topics))


def lag(tp: TopicPartition) -> list[dict[str, int]]:
    return [{"lag": 0}, {"lag": 7 + tp.partition}]


def test_what_changes_is_counted_and_what_stands_is_read() -> None:
    figures = Figures(1)
    whole = PartitionState(1, 0, (1, 2, 3), 0)
    other = PartitionState(2, 0, (2, 3, 1), 0)
    start = picture(whole, other)
    figures.changed(Metadata("c", 1), start)
    assert figures.statistics(start, lag) == {
        "replicas_max_lag": 7,
        "controller_active": 1,
        "controller_offline_partitions": 0,
        "controller_elections": 0,
        "controller_unclean_elections": 0,
    }
    alone = picture(whole._replace(in_sync=(1,)), other)
    figures.changed(start, alone)
    down = picture(whole, other._replace(leader=-1, leader_epoch=1, in_sync=(3,)))
    figures.changed(alone, down)
    assert figures.statistics(down, lag)["controller_offline_partitions"] == 1
    unclean = picture(whole, PartitionState(1, 2, (1,), 2))
    figures.changed(down, unclean)
    found = figures.statistics(unclean, lag)
    assert found["controller_offline_partitions"] == 0 and found["replicas_max_lag"] == 8
    assert found["controller_elections"] == found["controller_unclean_elections"] == 1


def test_only_the_controller_tells_of_offline_partitions() -> None:
    figures = Figures(1)
    down = picture(PartitionState(-1, 1, (2,), 1), controller=2)
    found = figures.statistics(down, lag)
    assert found["controller_active"] == found["controller_offline_partitions"] == 0
    assert found["replicas_max_lag"] == 0


def test_a_member_reports_every_figure_and_no_other(brokers: Callable[..., list[Any]]) -> None:
    first, second = brokers(2)
    rooms = {m.name: m.room for m in METRICS}
    found = first.statistics()
    assert {n for n in found if rooms[n] == "member"} == {
        n for n, room in rooms.items() if room == "member"
    }
    assert first.statistics()["controller_active"] + second.statistics()["controller_active"] == 1
