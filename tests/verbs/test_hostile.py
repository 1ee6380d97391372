"""Clients that ask for what they may not have: the broker tells it, cuts that client, and nobody
else notices.

The hostile client is written against the client's own channel, below everything that keeps an
honest one within bounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from kdirect.client.session import Session
from kdirect.errors import QueueFullError, QueuePairError
from kdirect.format.codec import encode_records
from kdirect.model import TopicPartition
from kdirect.rdma.contract import State, Status
from kdirect.wire.channel import Channel
from tests.verbs.conftest import BrokerLog, Bystander, eventually, values_of

BUFFER_BYTES = 1 << 16
RING_ENTRIES = 64
SECRET = [b"committed %d" % i for i in range(20)]


class Attacker:
    """A queue pair of the client with id `mallory` to the broker that leads `tp`."""

    def __init__(self, session: Session, tp: TopicPartition) -> None:
        self.tp = tp
        self.channel: Channel = session.channel(tp, receives=RING_ENTRIES, sends=RING_ENTRIES)
        self.memory = self.channel.local_memory(BUFFER_BYTES)
        self.ring = self.channel.remote_writable_memory(RING_ENTRIES * 64)
        for i in range(RING_ENTRIES):
            self.channel.qp.post_recv(1000 + i)

    def consume_grant(self):
        """(grant, answer) of read access to the partition from its start."""
        answer = self.channel.consume_access([(self.tp, 0, -1)])
        assert answer.partitions[0].error_code == 0
        return answer.partitions[0], answer

    def produce_grant(self, ring_entries: int = RING_ENTRIES):
        return self.channel.produce_access(self.tp, 1000, self.ring, ring_entries)

    def completion(self):
        eventually(lambda: self.channel.send_cq.wait(1000))
        return self.channel.send_cq.poll(1)[0]

    def read(self, address: int, rkey: int, length: int = 64) -> int:
        """Status of a READ."""
        self.channel.qp.post_read(1, self.memory, 0, length, address, rkey)
        return self.completion().status

    def write(self, address: int, rkey: int, data: bytes) -> int:
        """Status of a WRITE."""
        memoryview(self.memory.memory)[: len(data)] = data
        self.channel.qp.post_write(2, self.memory, 0, len(data), address, rkey)
        return self.completion().status

    @property
    def cut(self) -> bool:
        """The broker has ended the pair."""
        self.channel.send_cq.poll(16)
        self.channel.recv_cq.poll(16)
        return self.channel.qp.state == State.ERROR or self.channel.closed


@pytest.fixture
def target(session: Session, tp: TopicPartition) -> TopicPartition:
    """A partition that holds SECRET."""
    with session.producer() as producer:
        for value in SECRET:
            producer.produce_sync(tp.topic, value, partition=0)
    return tp


@pytest.fixture
def attacker(broker, connect: Callable[..., Session], target: TopicPartition) -> Iterator[Attacker]:
    one = Attacker(connect(broker, client_id="mallory"), target)
    yield one
    one.channel.close()


def until_refused(attempt: Callable[[], int]) -> int:
    """Status of the first attempt that is refused, or of the last one after ten seconds: a key that
    was given back goes on a thread of the broker, a moment after the answer."""
    end = time.monotonic() + 10
    while (status := attempt()) == Status.SUCCESS and time.monotonic() < end:
        pass
    return status


def read_with_a_forged_key(a: Attacker) -> int:
    grant, _ = a.consume_grant()
    return a.read(grant.address, grant.rkey ^ 0x5500)


def read_past_the_end(a: Attacker) -> int:
    grant, _ = a.consume_grant()
    assert a.read(grant.address + grant.length - 64, grant.rkey) == Status.SUCCESS
    return a.read(grant.address + grant.length - 16, grant.rkey)


def read_before_the_start(a: Attacker) -> int:
    grant, _ = a.consume_grant()
    return a.read(grant.address - 64, grant.rkey)


def read_past_the_slots(a: Attacker) -> int:
    _, answer = a.consume_grant()
    return a.read(answer.slot_address + answer.slot_count * 64, answer.slot_rkey)


def read_with_a_revoked_key(a: Attacker) -> int:
    grant, _ = a.consume_grant()
    assert a.read(grant.address, grant.rkey) == Status.SUCCESS
    a.channel.release([grant.file_id])
    return until_refused(lambda: a.read(grant.address, grant.rkey))


def write_into_what_may_be_read(a: Attacker) -> int:
    grant, _ = a.consume_grant()
    return a.write(grant.address + grant.start_position, grant.rkey, b"\xff" * 64)


def write_into_a_slot(a: Attacker) -> int:
    _, answer = a.consume_grant()
    return a.write(answer.slot_address, answer.slot_rkey, b"\xff" * 64)


def write_over_committed_records(a: Attacker) -> int:
    grant = a.produce_grant()
    assert grant.position > 64
    return a.write(grant.address + grant.position - 64, grant.rkey, b"\xff" * 64)


def write_past_the_head(a: Attacker) -> int:
    grant = a.produce_grant()
    return a.write(grant.address + grant.length - 16, grant.rkey, b"\xff" * 64)


def write_with_a_revoked_key(a: Attacker) -> int:
    grant = a.produce_grant()
    a.channel.release([grant.file_id])
    return until_refused(lambda: a.write(grant.address + grant.position, grant.rkey, b"\xff" * 64))


def add_to_what_may_be_read(a: Attacker) -> int:
    grant, _ = a.consume_grant()
    a.channel.qp.post_fetch_add(3, a.memory, 0, grant.address, grant.rkey, 1)
    return a.completion().status


ATTACKS = (
    read_with_a_forged_key,
    read_past_the_end,
    read_before_the_start,
    read_past_the_slots,
    read_with_a_revoked_key,
    write_into_what_may_be_read,
    write_into_a_slot,
    write_over_committed_records,
    write_past_the_head,
    write_with_a_revoked_key,
    add_to_what_may_be_read,
)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda f: f.__name__)
def test_access_that_was_not_granted(
    attack,
    attacker: Attacker,
    session: Session,
    bystander: Bystander,
    broker_log: BrokerLog,
    target: TopicPartition,
) -> None:
    assert attack(attacker) == Status.REM_ACCESS_ERR
    with pytest.raises(QueuePairError):
        attacker.channel.qp.post_read(9, attacker.memory, 0, 8, 0, 0)
    broker_log.wait_for("mallory", "is cut: ")
    bystander.works()
    assert values_of(session, target) == SECRET
    with (
        session.producer() as producer
    ):  # nothing of the client's is left behind: exclusive access is free
        assert producer.produce_sync(target.topic, b"after", partition=0) == len(SECRET)
        assert producer.statistics()["rdma_records"] == 1
    assert values_of(session, target) == [*SECRET, b"after"]


def test_a_key_of_another_client_is_of_no_use(
    attacker: Attacker,
    session: Session,
    broker,
    connect,
    bystander: Bystander,
    broker_log: BrokerLog,
    target: TopicPartition,
) -> None:
    """One protection domain a client."""
    victim = Attacker(connect(broker, client_id="victim"), target)
    grant, _ = victim.consume_grant()
    assert attacker.read(grant.address, grant.rkey) == Status.REM_ACCESS_ERR
    broker_log.wait_for("mallory", "is cut: ")
    assert victim.read(grant.address, grant.rkey) == Status.SUCCESS
    bystander.works()
    victim.channel.close()


def forge_a_file_id(a: Attacker, victim: Attacker) -> None:
    a.channel.qp.post_write_imm(9, a.memory, 0, 0, 0, 0, victim.produce_grant().file_id << 16)


def break_the_order(a: Attacker, victim: Attacker) -> None:
    grant = a.produce_grant()
    a.channel.qp.post_write_imm(
        9, a.memory, 0, 64, grant.address + grant.position, grant.rkey, grant.file_id << 16 | 7
    )


def send_a_message(a: Attacker, victim: Attacker) -> None:
    a.channel.qp.post_send(9, a.memory, 0, 0)


def send_a_long_message(a: Attacker, victim: Attacker) -> None:
    a.channel.qp.post_send(9, a.memory, 0, 4096)


@pytest.mark.parametrize(
    "attack",
    [forge_a_file_id, break_the_order, send_a_message, send_a_long_message],
    ids=lambda f: f.__name__,
)
def test_requests_that_are_none(
    attack,
    attacker: Attacker,
    session: Session,
    broker,
    connect,
    bystander: Bystander,
    broker_log: BrokerLog,
    topic,
    target,
) -> None:
    victim = Attacker(connect(broker, client_id="victim"), topic())
    attack(attacker, victim)
    broker_log.wait_for("mallory", "is cut: ")
    eventually(lambda: attacker.cut)
    assert not victim.cut
    bystander.works()
    assert values_of(session, target) == SECRET
    victim.channel.close()


def test_a_flood_of_requests(
    attacker: Attacker,
    session: Session,
    bystander: Bystander,
    broker_log: BrokerLog,
    target: TopicPartition,
) -> None:
    """Batches without end, and no acknowledgement is ever taken: its ring of two entries is
    overrun."""
    grant = attacker.produce_grant(ring_entries=2)
    batch = encode_records([(None, b"flood", [], 1000)])
    memoryview(attacker.memory.memory)[: len(batch)] = batch
    position, order = grant.position, 0
    qp = attacker.channel.qp

    def post() -> bool:
        """As many as the queue takes; whether the broker has ended it."""
        nonlocal position, order
        try:
            while position + len(batch) <= grant.length:
                qp.post_write_imm(
                    9,
                    attacker.memory,
                    0,
                    len(batch),
                    grant.address + position,
                    grant.rkey,
                    grant.file_id << 16 | order & 0xFFFF,
                )
                position, order = position + len(batch), order + 1
        except QueueFullError:
            pass
        except QueuePairError:
            return True
        return attacker.cut

    eventually(post)
    assert order > 2
    broker_log.wait_for("mallory", "is cut: ")
    bystander.works()
    got = values_of(session, target)
    assert got == SECRET + [b"flood"] * (
        len(got) - len(SECRET)
    )  # what was committed before it was cut is whole
    with session.producer() as producer:
        assert producer.produce_sync(target.topic, b"after", partition=0) == len(got)


def test_garbage_in_the_head(
    attacker: Attacker, session: Session, bystander: Bystander, target: TopicPartition
) -> None:
    """Bytes that are no batch are not committed; the request is answered with an error and access
    ends."""
    grant = attacker.produce_grant()
    memoryview(attacker.memory.memory)[:4096] = b"\xa5" * 4096
    attacker.channel.qp.post_write_imm(
        9, attacker.memory, 0, 4096, grant.address + grant.position, grant.rkey, grant.file_id << 16
    )
    assert attacker.completion().ok
    with session.producer() as producer:
        offset = producer.produce_sync(target.topic, b"after", partition=0)
        assert offset == len(SECRET)
    assert values_of(session, target) == [*SECRET, b"after"]
    bystander.works()


def test_a_client_that_opens_pairs_and_leaves(
    broker, connect, bystander: Bystander, target: TopicPartition
) -> None:
    for _ in range(10):
        one = Attacker(connect(broker, client_id="hasty"), target)
        one.consume_grant()
        one.channel.close()
    bystander.works()
