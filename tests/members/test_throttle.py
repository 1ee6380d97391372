"""How fast replicas may catch up: the rates, and whom they hold back."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kdirect.cluster.election import Partition
from kdirect.cluster.image import Image, Topic
from kdirect.cluster.partition_state import PartitionState
from kdirect.member.metadata import Metadata
from kdirect.member.throttle import LONGEST_WAIT_S, NO_LIMIT, Pace, Throttles
from kdirect.model import TopicPartition

TP = TopicPartition("t", 1)
RATE = "leader.replication.throttled.rate"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("limit", [50_000, 1_000_000, 300_000_000])
def test_a_pace_keeps_its_rate(limit: int) -> None:
    clock, rng = Clock(), random.Random(limit)
    pace = Pace(clock, limit)
    taken, began = 0, clock.now
    while clock.now < began + 20:
        wait_s = pace.wait_s()
        if wait_s > 0:
            clock.now += wait_s * rng.uniform(1.0, 1.3)  # whoever waits comes late
            continue
        count = rng.randrange(1, pace.most + 1)
        pace.take(count)
        taken += count
    assert taken / 20 == pytest.approx(limit, rel=0.1)


def test_no_rate_holds_nothing_back_and_a_rate_of_none_everything() -> None:
    clock = Clock()
    pace = Pace(clock)
    pace.take(1 << 40)
    assert pace.wait_s() == 0
    pace.set_limit(0)
    assert pace.wait_s() == LONGEST_WAIT_S
    pace.set_limit(1000)
    assert pace.wait_s() == 0
    pace.take(10_000)
    assert pace.wait_s() == LONGEST_WAIT_S
    pace.set_limit(NO_LIMIT)
    assert pace.wait_s() == 0


def picture(brokers: Any = None, in_sync: tuple[int, ...] = (1,), **config: str) -> Metadata:
    state = PartitionState(1, 3, in_sync, 1)
    partitions = (Partition((1, 2)), Partition((1, 2), state=state))
    properties = {name.replace("_", "."): value for name, value in config.items()}
    topic = Topic(None, partitions, properties)  # type: ignore[arg-type]
    image = Image(1, 1, topics={"t": topic}, broker_configs=brokers or {})
    return Metadata("c", 1, image=image)


def throttles(broker: int, metadata: Metadata, **of_broker: int) -> Throttles:
    properties = {name.replace("_", "."): value for name, value in of_broker.items()}
    made = Throttles(broker, lambda: metadata, Clock(), properties)
    made.changed(metadata)
    return made


@pytest.mark.parametrize(
    ("replicas", "held"),
    [("", False), ("*", True), ("1:1", True), ("1:2", False), ("0:1,1:1", True), ("0:1", False)],
)
def test_a_leader_holds_back_for_the_replicas_that_name_it(replicas: str, held: bool) -> None:
    there = picture({"1": {RATE: "1000"}}, leader_replication_throttled_replicas=replicas)
    ours = throttles(1, there)
    assert (ours.led(TP, in_sync=False) is not None) == held
    assert ours.led(TP, in_sync=True) is None
    assert ours.followed(TP) is None


def test_a_follower_holds_itself_back_until_it_is_in_sync() -> None:
    brokers = {"2": {"follower.replication.throttled.rate": "1000"}}
    list_ = {"follower_replication_throttled_replicas": "1:2"}
    assert throttles(2, picture(brokers, **list_)).followed(TP) is not None
    assert throttles(2, picture(brokers, (1, 2), **list_)).followed(TP) is None
    assert throttles(2, picture(brokers)).followed(TP) is None


def test_the_rate_of_one_broker_goes_before_that_of_all_and_of_its_file() -> None:
    names = {"leader_replication_throttled_replicas": "*"}
    of_file = {"leader_replication_throttled_rate": 30}
    one, all_ = {"1": {RATE: "10"}}, {"<default>": {RATE: "20"}}
    for brokers, limit in (({**one, **all_}, 10), (all_, 20), ({"2": {RATE: "10"}}, 30)):
        pace = throttles(1, picture(brokers, **names), **of_file).led(TP, in_sync=False)
        assert pace is not None and pace.limit == limit
    assert throttles(1, picture(**names)).led(TP, in_sync=False) is None
