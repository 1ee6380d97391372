"""Proposals to the controller: what is sent again, and when a refusal ends one; and the bytes of
the response by which replicas copy."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from kdirect.cluster.codes import Code
from kdirect.cluster.leading_replica import Learned, Propose, Refused
from kdirect.cluster.partition_state import PartitionState
from kdirect.cluster.requests import AlterInSync, Answer, InSyncAnswer, InSyncRow
from kdirect.errors import TimedOutError
from kdirect.format import protocol as p
from kdirect.format.replica_fetch import CopiedPartition, Push, fetch_as_replica_response
from kdirect.member.asking import Asking
from kdirect.member.in_sync_changes import InSyncChanges
from kdirect.model import TopicPartition
from kdirect.wire.environment import SYSTEM

TP = TopicPartition("t", 0)
PROPOSE = Propose((1, 2), (10, 20), 5)


def state(version: int, *in_sync: int) -> PartitionState:
    return PartitionState(1, 3, in_sync, version)


class Controller:
    """Answers as it is told; the last answer again and again."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[Any] = []

    def ask(self, request: Any, timeout_s: float) -> asyncio.Future[Answer]:
        self.asked.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            rows = tuple(InSyncAnswer(row.partition, *answer) for row in request.rows)
            future.set_result(Answer(None, rows=rows))
        return future


def outcome(*answers: Any) -> tuple[Any, int]:
    """What a leader is told, and how often the controller was asked."""

    async def run() -> tuple[Any, int]:
        controller = Controller(*answers)
        changes = InSyncChanges(controller, 1, lambda: 10)
        told: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        changes.propose(TP, 3, PROPOSE, told.set_result)
        try:
            found = await asyncio.wait_for(told, 10)
        finally:
            changes.stop()
        row = controller.asked[0].rows[0]
        assert (row.leader_epoch, row.version, row.in_sync) == (3, 5, ((1, 10), (2, 20)))
        return found, len(controller.asked)

    return asyncio.run(run())


LOST = TimedOutError("no answer")


class OneThatRefuses(Controller):
    """Refuses as `partition_rules.alter_in_sync` does, and does not answer at first."""

    def __init__(self) -> None:
        super().__init__(LOST, (Code.INELIGIBLE_REPLICA, state(5, 1)))

    def ask(self, request: Any, timeout_s: float) -> asyncio.Future[Answer]:
        if request.rows[0].repeated:
            self.answers = [(Code.INELIGIBLE_REPLICA, state(6, 1))]
        return super().ask(request, timeout_s)


def test_a_proposal_in_doubt_that_is_refused_ends() -> None:
    async def run() -> tuple[Any, OneThatRefuses]:
        controller = OneThatRefuses()
        changes = InSyncChanges(controller, 1, lambda: 10)
        told: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        changes.propose(TP, 3, PROPOSE, told.set_result)
        try:
            return await asyncio.wait_for(told, 5), controller
        finally:
            changes.stop()

    found, controller = asyncio.run(run())
    assert found == Learned(state(6, 1))
    assert [request.rows[0].repeated for request in controller.asked] == [False, True]


def test_a_proposal_is_repeated_to_a_controller_that_did_not_answer() -> None:
    asked: list[Any] = []

    async def run() -> Answer:
        async def no_news(timeout_s: float) -> bool:
            return False

        def ask_here(request: Any) -> asyncio.Future[tuple[Answer, int]]:
            asked.append(request)
            future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            if len(asked) == 1:
                future.set_exception(LOST)
            else:
                future.set_result((Answer(None), 1))
            return future

        nobody: Any = None
        here: Any = SimpleNamespace(controller_id=1)
        asking = Asking(
            1,
            nobody,
            SYSTEM,
            metadata_of=lambda: here,
            news=no_news,
            ask_here=ask_here,
        )
        row = InSyncRow(TP, 3, 5, ((1, 10), (2, 20)))
        return await asking.ask(AlterInSync(None, 1, 10, (row,)), 10)

    asyncio.run(run())
    assert [request.rows[0].repeated for request in asked] == [False, True]


@pytest.mark.parametrize(
    ("answers", "told", "asked"),
    [
        ([(Code.NONE, state(6, 1, 2))], Learned(state(6, 1, 2)), 1),
        ([(Code.INVALID_UPDATE_VERSION, state(8, 1))], Learned(state(8, 1)), 1),
        ([(Code.INELIGIBLE_REPLICA, state(5, 1))], Refused(5), 1),
        ([LOST, LOST, (Code.NONE, state(6, 1, 2))], Learned(state(6, 1, 2)), 3),
        ([(Code.NOT_CONTROLLER, None), (Code.NONE, state(6, 1, 2))], Learned(state(6, 1, 2)), 2),
        # The first copy may still be carried out, so the refusal of the second ends nothing.
        (
            [LOST, (Code.INELIGIBLE_REPLICA, state(5, 1)), (Code.NONE, state(6, 1, 2))],
            Learned(state(6, 1, 2)),
            3,
        ),
    ],
)
def test_what_a_leader_is_told(answers: list[Any], told: Any, asked: int) -> None:
    assert outcome(*answers) == (told, asked)


def test_the_response_to_a_replica_is_what_its_schema_says() -> None:
    rows = [
        CopiedPartition(
            *(0, 0, 7, 100, 5, 64, 8192, Push.OFFERED),
            [memoryview(b"abc"), memoryview(bytes(300))],
        ),
        CopiedPartition(3, 6, -1, -1, -1, -1, -1, Push.NOTHING, ()),
    ]
    body = b"".join(map(bytes, fetch_as_replica_response(0, 9, [("t", rows), ("u", rows[1:])])))
    header = p.response_header(p.APIS[p.FetchAsReplicaRequest.API_KEY], 0, 1)
    _, found = p.decode_response(p.FetchAsReplicaRequest.API_KEY, 0, header + body)
    assert (found.error_code, found.session_id) == (0, 9)
    assert [t.topic for t in found.topics] == ["t", "u"]
    first, second = found.topics[0].partitions
    assert bytes(first.records) == b"abc" + bytes(300)
    assert (first.partition, first.leader_epoch, first.high_watermark) == (0, 7, 100)
    assert (first.log_start_offset, first.segment_base_offset) == (5, 64)
    assert (first.segment_bytes, second.segment_bytes) == (8192, -1)
    assert (first.push, second.push) == (Push.OFFERED, Push.NOTHING)
    assert (second.partition, second.error_code, bytes(second.records or b"")) == (3, 6, b"")
