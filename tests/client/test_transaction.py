"""The machine of a transactional producer: what it asks of coordinators, what answers mean, and
seeded schedules of programs over a lossy network and a model of Kafka's coordinator."""

from __future__ import annotations

import os

import pytest

from kdirect.client.transaction import (
    AddOffsets,
    AddPartitions,
    Answer,
    CommitOffsets,
    EndTransaction,
    GroupMetadata,
    InitProducer,
    Next,
    Phase,
    Transaction,
)
from kdirect.errors import (
    DeliveryError,
    ProducerFencedError,
    TransactionAbortableError,
    TransactionError,
)
from kdirect.format.error_codes import ErrorCode as E
from kdirect.model import TopicPartition
from tests.client.transaction_world import World

A, B = TopicPartition("a", 0), TopicPartition("b", 1)
SCHEDULES = int(os.environ.get("KDIRECT_SCHEDULES", "1500"))
ONE = os.environ.get("KDIRECT_SIMULATE")


def ready(version=2, **more):
    machine = Transaction("id", version, **more)
    machine.initialize()
    assert machine.pending == InitProducer()
    assert machine.answered(InitProducer(), Answer((0,), 7, 0)) is Next.GO_ON
    assert machine.phase is Phase.READY
    return machine


def opened(version=2, **more):
    machine = ready(version, **more)
    machine.begin()
    return machine


def test_first_protocol_adds_partitions_and_groups_once():
    machine = opened(1)
    machine.write([A])
    machine.write([A, B])
    assert machine.pending == AddPartitions((A, B))
    machine.answered(machine.pending, Answer((0, 0)))
    machine.write([A, B])
    assert machine.pending is None
    group = GroupMetadata("g", 3, "m")
    for _ in range(2):
        machine.send_offsets(group, {A: 5})
        if machine.pending == AddOffsets("g"):
            machine.answered(machine.pending, Answer())
        assert machine.pending == CommitOffsets(group, {A: 5})
        machine.answered(machine.pending, Answer())
    machine.commit()
    machine.answered(EndTransaction(True), Answer())
    assert (machine.phase, machine.epoch) == (Phase.READY, 0)


def test_second_protocol_leaves_partitions_to_brokers_and_takes_a_new_epoch():
    machine = opened()
    machine.write([A])
    assert machine.pending is None
    machine.commit()
    machine.answered(machine.pending, Answer((0,), 7, 1))
    assert (machine.phase, machine.epoch) == (Phase.READY, 1)
    assert machine.partitions == set()


@pytest.mark.parametrize("version", [1, 2])
def test_an_empty_transaction_asks_nobody(version):
    machine = opened(version)
    machine.commit()
    assert (machine.pending, machine.phase) == (None, Phase.READY)
    machine.begin()
    machine.abort()
    assert (machine.pending, machine.phase) == (None, Phase.READY)


def test_what_is_pending_goes_before_the_commit():
    machine = opened(1)
    machine.write([A])
    machine.send_offsets(GroupMetadata("g"), {A: 1})
    machine.commit()
    order = []
    while (request := machine.pending) is not None:
        order.append(type(request))
        machine.answered(request, Answer())
    assert order == [AddPartitions, AddOffsets, CommitOffsets, EndTransaction]


def test_calls_out_of_order_are_refused_and_change_nothing():
    machine = Transaction("id")
    for call in (machine.begin, machine.commit, machine.abort, machine.check_open):
        with pytest.raises(TransactionError, match="not initialized"):
            call()
    machine = ready()
    with pytest.raises(TransactionError, match=r"ready.*begin_transaction first"):
        machine.write([A])
    machine.begin()
    for call in (machine.begin, machine.initialize):
        with pytest.raises(TransactionError, match="in a transaction"):
            call()
    machine.write([A])
    machine.commit()
    with pytest.raises(TransactionError, match="being committed"):
        machine.abort()  # the outcome is open until the commit was answered
    machine.commit()
    assert machine.pending == EndTransaction(True)


@pytest.mark.parametrize("version", [1, 2])
def test_a_failed_batch_can_only_be_aborted(version):
    machine = opened(version)
    machine.write([A])
    if version == 1:
        machine.answered(machine.pending, Answer())
    machine.failed(DeliveryError("t-0: too large"))
    for call in (machine.commit, machine.check_open, machine.check):
        with pytest.raises(TransactionAbortableError, match="too large") as caught:
            call()
    assert caught.value.txn_requires_abort and not caught.value.fatal
    machine.abort()
    machine.answered(machine.pending, Answer((0,), 7, 1) if version == 2 else Answer())
    if version == 1:  # the gap in the sequence needs a new epoch
        assert machine.pending == InitProducer(7, 0)
        machine.answered(machine.pending, Answer((0,), 7, 1))
    assert (machine.phase, machine.epoch) == (Phase.READY, 1)


def test_without_new_epochs_a_gap_is_final():
    machine = opened(1, can_renew=False)
    machine.write([A])
    machine.answered(machine.pending, Answer())
    machine.failed(DeliveryError("lost"))
    machine.abort()
    machine.answered(machine.pending, Answer())
    with pytest.raises(TransactionError) as caught:
        machine.begin()
    assert caught.value.fatal


@pytest.mark.parametrize("code", [E.INVALID_PRODUCER_EPOCH, E.PRODUCER_FENCED])
@pytest.mark.parametrize("call", ["commit", "abort", "offsets"])
def test_who_is_fenced_cannot_go_on(code, call):
    machine = opened()
    machine.write([A])
    if call == "offsets":
        machine.send_offsets(GroupMetadata("g"), {A: 1})
    else:
        getattr(machine, call)()
    assert machine.answered(machine.pending, Answer((code,))) is Next.FAILED
    for again in (machine.begin, machine.abort, machine.commit, machine.initialize):
        with pytest.raises(ProducerFencedError) as caught:
            again()
    assert caught.value.fatal and not caught.value.txn_requires_abort


def test_a_stale_epoch_of_a_batch_is_told_by_the_abort():
    machine = opened()
    machine.write([A])
    machine.failed(DeliveryError("stale"), E.INVALID_PRODUCER_EPOCH)
    assert machine.phase is Phase.FAILED
    machine.failed(DeliveryError("fenced"), E.PRODUCER_FENCED)
    assert machine.phase is Phase.FATAL


def test_abortable_answers():
    machine = opened()
    machine.write([A])
    machine.commit()
    assert machine.answered(machine.pending, Answer((E.TRANSACTION_ABORTABLE,))) is Next.FAILED
    with pytest.raises(TransactionAbortableError, match="TRANSACTION_ABORTABLE"):
        machine.commit()
    machine.abort()
    machine.answered(machine.pending, Answer((0,), 7, 1))
    assert machine.phase is Phase.READY


def test_a_part_that_was_not_attempted_tells_no_reason():
    machine = opened(1)
    machine.write([A, B])
    codes = (E.OPERATION_NOT_ATTEMPTED, E.TOPIC_AUTHORIZATION_FAILED)
    assert machine.answered(machine.pending, Answer(codes)) is Next.FAILED
    with pytest.raises(TransactionAbortableError, match="TOPIC_AUTHORIZATION_FAILED"):
        machine.check()
    machine.abort()
    assert (machine.phase, machine.pending) == (Phase.READY, None)


def test_an_id_that_was_forgotten_is_asked_for_without_an_end():
    machine = opened(1)
    machine.write([A])
    machine.answered(machine.pending, Answer((E.INVALID_PRODUCER_ID_MAPPING,)))
    machine.abort()
    assert machine.pending == InitProducer(7, 0)


def test_transient_answers_are_repeated():
    machine = opened(1)
    machine.write([A])
    request = machine.pending
    assert machine.answered(request, Answer((E.NOT_COORDINATOR,))) is Next.ELSEWHERE
    assert machine.answered(request, Answer((E.CONCURRENT_TRANSACTIONS,))) is Next.SOON
    assert machine.answered(request, Answer((E.COORDINATOR_LOAD_IN_PROGRESS,))) is Next.AGAIN
    assert machine.answered(request, Answer((E.UNKNOWN_TOPIC_OR_PARTITION,))) is Next.AGAIN
    assert machine.pending == request


def test_an_add_without_an_answer_gives_a_new_epoch():
    machine = opened(1)
    machine.write([A])
    machine.lost(machine.pending)
    machine.failed(DeliveryError("too late"))
    machine.abort()
    assert machine.pending == EndTransaction(False)  # the coordinator may know of it
    machine.answered(machine.pending, Answer((E.INVALID_TXN_STATE,)))  # it does not
    assert machine.pending == InitProducer(7, 0)


# -- schedules -------------------------------------------------------------------------------------


def run(seed):
    World(seed, 1 + seed % 2).run()


def test_schedules():
    for seed in [int(ONE)] if ONE else range(SCHEDULES):
        try:
            run(seed)
        except AssertionError as e:
            raise AssertionError(f"KDIRECT_SIMULATE={seed}: {e}") from e


def fails(schedules):
    for seed in range(schedules):
        try:
            run(seed)
        except (AssertionError, TransactionError):
            return True
    return False


def commit_whatever_failed(self, error, code=-1):
    pass


def drop_pending_offsets(self):
    self._offsets = None
    self.check_open("commit_transaction")
    self.phase = Phase.COMMITTING
    self._end_of_nothing()


def keep_the_epoch(self, request):
    pass


@pytest.mark.parametrize(
    "name, mistake",
    [
        ("failed", commit_whatever_failed),
        ("commit", drop_pending_offsets),
        ("lost", keep_the_epoch),
    ],
)
def test_schedules_find_mistakes(monkeypatch, name, mistake):
    monkeypatch.setattr(Transaction, name, mistake)
    assert fails(SCHEDULES), "no schedule notices"
