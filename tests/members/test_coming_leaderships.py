"""Records for a partition that a broker is about to lead: by its picture of the cluster it leads,
and it has not begun yet."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kdirect.broker.coming_leaderships import HOLD_S, ComingLeaderships
from kdirect.cluster.election import Partition as Picture
from kdirect.cluster.image import Image, Topic
from kdirect.cluster.partition_state import PartitionState
from kdirect.cluster.records import TopicAssignment
from kdirect.errors import KdirectError, NotLeaderError, UnknownTopicError
from kdirect.format.codec import encode_records
from kdirect.format.error_codes import ErrorCode as E
from kdirect.member.metadata import Metadata
from kdirect.model import TopicPartition
from tests.broker.conftest import Raw
from tests.members.test_brokers_records import T0, led_by_the_first, reassign
from tests.members.wire import partition_row, produce_request
from tests.support import wait_until


@contextmanager
def beginning_late(broker: Any) -> Iterator[Callable[[], None]]:
    """The broker does not begin to lead `T0` until the callable is called, or the block ends."""
    may_begin = threading.Event()
    # A follower names the leader of a topic before it has opened a log for it.
    wait_until(lambda: T0 in broker.server.logs.partitions, "the follower keeps the partition")
    partition = broker.server.logs.partitions[T0]
    begin_epoch = partition.begin_epoch

    def begin(*arguments: Any, **options: Any) -> None:
        assert may_begin.wait(60)
        begin_epoch(*arguments, **options)

    partition.begin_epoch = begin
    try:
        yield may_begin.set
    finally:
        may_begin.set()
        del partition.begin_epoch


def idempotent(sequence: int) -> bytes:
    """The batch of a producer of which the log knows nothing."""
    rows = [(None, b"value", None, 0)]
    return encode_records(rows, producer_id=5, producer_epoch=0, base_sequence=sequence)


class Pipeline:
    """A producer that sends batches without waiting for answers; with a transactional id in its
    requests, if one is given."""

    def __init__(self, broker: Any, transactional_id: str | None = None) -> None:
        self.broker = broker
        self.transactional_id = transactional_id
        self.connection = Raw(broker.bootstrap_servers, timeout_s=30)

    def send(self, *sequences: int, timeout_ms: int = 30_000) -> None:
        """They have come to the broker when this returns."""
        requests = self.broker.server.counters.requests
        before = requests["Produce"]
        for sequence in sequences:
            request = produce_request(
                T0,
                idempotent(sequence),
                timeout_ms=timeout_ms,
                transactional_id=self.transactional_id,
            )
            self.connection.send(request, 10)
        wait_until(lambda: requests["Produce"] == before + len(sequences), "they came")

    def receive(self) -> Any:
        return self.connection.receive().responses[0].partition_responses[0]


def the_second_is_to_lead(ours: list[Any]) -> None:
    ours[0].stop()
    wait_until(lambda: partition_row(ours[1], T0).leader_id == 2, "it is named as the leader")


@pytest.mark.parametrize("transactional_id", [None, "x"])
def test_batches_that_come_before_a_leader_begins_are_appended_in_order(
    brokers: Any, transactional_id: str | None
) -> None:
    """A batch that was refused here parted the pipeline: the next one was OUT_OF_ORDER."""
    ours = brokers(2)
    led_by_the_first(ours)
    with beginning_late(ours[1]) as begin:
        the_second_is_to_lead(ours)
        producer = Pipeline(ours[1], transactional_id)
        producer.send(0, 1)
        begin()
        producer.send(2)
        found = [producer.receive() for _ in range(3)]
        assert [(E(row.error_code), row.base_offset) for row in found] == [
            (E.NONE, offset) for offset in range(3)
        ]
    assert ours[1].server.logs.partitions[T0].log_end_offset == 3


def test_a_broker_that_never_begins_to_lead_refuses_in_time(brokers: Any) -> None:
    ours = brokers(2)
    led_by_the_first(ours)
    with beginning_late(ours[1]) as begin:
        the_second_is_to_lead(ours)
        impatient, patient = Pipeline(ours[1]), Pipeline(ours[1])
        impatient.send(0, timeout_ms=200)
        impatient.send(1)
        patient.send(0)
        before = time.monotonic()
        for _ in range(2):  # the second one would be out of order
            assert E(impatient.receive().error_code) is E.NOT_LEADER_OR_FOLLOWER
        impatient.send(2)  # and so would this one be, whether the broker begins or not
        assert E(impatient.receive().error_code) is E.NOT_LEADER_OR_FOLLOWER
        assert time.monotonic() - before < HOLD_S
        begin()
        row = patient.receive()
        assert (E(row.error_code), row.base_offset) == (E.NONE, 0)
        impatient.send(1)
        assert E(impatient.receive().error_code) is E.NONE


def test_another_leader_before_a_broker_has_begun(brokers: Any) -> None:
    ours = brokers(3)
    led_by_the_first(ours)
    with beginning_late(ours[1]):
        the_second_is_to_lead(ours)
        producer = Pipeline(ours[1])
        producer.send(0, 1)
        before = time.monotonic()
        assert E(reassign(ours[2], T0, [3]).error_code) is E.NONE
        for _ in range(2):
            row = producer.receive()
            assert E(row.error_code) is E.NOT_LEADER_OR_FOLLOWER
            assert row.current_leader.leader_id == 3
        assert time.monotonic() - before < HOLD_S
    again = Pipeline(ours[2])
    again.send(0, 1)
    assert [again.receive().base_offset for _ in range(2)] == [0, 1]


# -- without brokers -------------------------------------------------------------------------------

TP = TopicPartition("t", 0)
OTHER = TopicPartition("t", 1)
OWN, INCARNATION = 2, 7


def picture(leader: int, epoch: int, incarnation: int = INCARNATION, count: int = 2) -> Metadata:
    state = PartitionState(leader, epoch, (1, OWN), 1, (), INCARNATION)
    partitions = (Picture((1, OWN), state=state),) * count
    record = TopicAssignment(None, ((1, OWN),) * count)
    image = Image(1, 1, topics={"t": Topic(record, partitions, {})} if count else {})
    return Metadata("c" * 22, OWN, incarnation, 1, {}, image, 1)


class Peer:
    """A connection."""

    closed = False


class Held:
    """What broker `OWN` holds, and what became of it: "led" or the error, by name."""

    def __init__(self) -> None:
        self.picture = picture(OWN, 3)
        self.coming = ComingLeaderships(OWN, lambda: self.picture)
        self.ends: list[tuple[str, Any]] = []

    def hold(self, name: str, tp: TopicPartition = TP, connection: Any = None) -> bool:
        def go_on(error: KdirectError | None) -> None:
            self.ends.append((name, "led" if error is None else type(error)))

        return self.coming.hold(tp, connection or Peer(), 30.0, go_on)

    def show(self, after: Metadata) -> None:
        before, self.picture = self.picture, after
        self.coming.changed(before, after)


def run(test: Callable[[Held], None]) -> None:
    async def on_loop() -> None:
        test(Held())

    asyncio.run(on_loop())


def test_only_whom_its_own_picture_names_holds_anything() -> None:
    def test(held: Held) -> None:
        for other in (picture(1, 3), picture(-1, 3), picture(OWN, 3, incarnation=8)):
            held.picture = other
            assert not held.hold("a")
        held.picture = picture(OWN, 3, count=0)
        assert not held.hold("a")

    run(test)


def test_what_ends_a_wait() -> None:
    def test(held: Held) -> None:
        changes: list[tuple[Metadata, Any]] = [
            (picture(1, 4), NotLeaderError),
            (picture(OWN, 5), NotLeaderError),  # another led in epoch 4, perhaps
            (picture(OWN, 3, incarnation=-1), NotLeaderError),  # its session is over
            (picture(OWN, 3, count=0), UnknownTopicError),
        ]
        for after, error in changes:
            held.ends.clear()
            held.show(picture(OWN, 3))
            assert held.hold("a") and held.hold("b")
            held.show(picture(OWN, 3))
            assert held.ends == []  # nothing of this partition has changed
            held.show(after)
            assert held.ends == [("a", error), ("b", error)]
            assert len(held.coming) == 0

    run(test)


def test_one_partition_goes_on_in_order_without_those_that_are_gone() -> None:
    def test(held: Held) -> None:
        gone = Peer()
        assert held.hold("a") and held.hold("b", OTHER) and held.hold("c", connection=gone)
        assert held.hold("d")
        gone.closed = True
        held.coming.led(TP, None, 3)
        assert held.ends == [("a", "led"), ("c", NotLeaderError), ("d", "led")]
        held.coming.close()
        assert held.ends[3:] == [("b", NotLeaderError)]
        assert not held.hold("e")

    run(test)
