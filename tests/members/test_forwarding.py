"""Questions to the controller and its answers survive the way there and back, and nothing that is
none of them becomes one."""

from __future__ import annotations

import json
import uuid

import pytest

from kdirect.cluster.codes import Code, Outcome
from kdirect.cluster.partition_state import PartitionState
from kdirect.cluster.requests import (
    AlterConfig,
    AlterInSync,
    Answer,
    ConfigOf,
    CreatedTopic,
    CreateTopic,
    DeleteTopic,
    ElectionKind,
    ElectLeaders,
    GrowTopic,
    InSyncAnswer,
    InSyncRow,
    ListReassignments,
    Reassign,
    ReassignmentRow,
    ReassignRow,
    ReplicasFailed,
    Request,
    RowOutcome,
    ShutDown,
)
from kdirect.errors import ProtocolError
from kdirect.member.forwarding import (
    decode_answer,
    decode_request,
    encode_answer,
    encode_request,
)
from kdirect.model import TopicPartition

TP = TopicPartition("größe", 3)
ID = uuid.UUID(int=7)
STATE = PartitionState(1, 4, (1, 2), 9, (3,), 77)
FAILED = Outcome(Code.INELIGIBLE_REPLICA, "no")
EXCHANGES: list[tuple[Request, tuple[object, ...]]] = [
    (
        CreateTopic(None, "t", ID, 2, 3, {0: (1, 2), 1: (2, 3)}, {"a": "b"}, 1, 2, True),
        (CreatedTopic("t", ID, ((1, 2), (2, 3))),),
    ),
    (CreateTopic(None, "t", ID), ()),
    (GrowTopic(None, "t", 4, ((1,), (2,)), True), ()),
    (DeleteTopic(None, None, ID), ()),
    (AlterConfig(None, ConfigOf.BROKER, "<default>", {"a": None, "b": "c"}, True), ()),
    (
        AlterInSync(None, 1, 2**40, (InSyncRow(TP, 4, 9, ((1, 77), (2, 2**50))),)),
        (InSyncAnswer(TP, Code.NONE, STATE), InSyncAnswer(TP, Code.UNKNOWN_TOPIC_ID, None)),
    ),
    (ElectLeaders(None, ElectionKind.UNCLEAN, None), (RowOutcome(TP, FAILED),)),
    (Reassign(None, (ReassignRow(TP, (1, 2)), ReassignRow(TP, None))), (RowOutcome(TP),)),
    (ListReassignments(None, (TP,)), (ReassignmentRow(TP, (1, 2), (2,), (1,)),)),
    (ReplicasFailed(None, 1, 2**40, (TP,), True), (RowOutcome(TP, FAILED),)),
    (ShutDown(None, 1, 2), (TP,)),
]


@pytest.mark.parametrize("request_, rows", EXCHANGES, ids=lambda x: type(x).__name__)
def test_requests_and_answers_travel(request_: Request, rows: tuple[object, ...]) -> None:
    tagged = request_._replace(tag="asked here")
    assert decode_request(*encode_request(tagged)) == request_
    answer = Answer("asked here", Outcome(Code.NOT_CONTROLLER, "elsewhere"), rows)
    assert decode_answer(*encode_answer(answer, tagged), tagged) == answer


@pytest.mark.parametrize(
    "kind, body",
    [
        ("Answer", b"[]"),
        ("DeleteTopic", b""),
        ("DeleteTopic", b"{}"),
        ("DeleteTopic", b"\xff"),
        ("DeleteTopic", b'["t"]'),
        ("DeleteTopic", b'["t",null,1]'),
        ("DeleteTopic", b"[1,null]"),
        ("DeleteTopic", b'["t","zz"]'),
        ("DeleteTopic", rb'["\ud800",null]'),
        ("DeleteTopic", b"[" * 100_000),
        ("ShutDown", b"[1,true]"),
        ("ShutDown", b"[1,1.0]"),
        ("ShutDown", b"[1,%d]" % 2**63),
        ("ElectLeaders", b"[7,null,false]"),
        ("AlterConfig", b'["topic","t",[["a"]],false]'),
        ("AlterConfig", b'["topic","t",{"a":"b"},false]'),
    ],
)
def test_what_is_no_request_is_refused(kind: str, body: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_request(kind, body)


def test_what_is_no_answer_is_refused() -> None:
    asked = ShutDown(None, 1, 2)
    for body in (b"", b"[]", b'["",[1]]', b'["",[["t"]]]', b"[1,[]]"):
        with pytest.raises(ProtocolError):
            decode_answer(0, body, asked)
    with pytest.raises(ProtocolError):
        decode_answer(0, json.dumps(["", [1]]).encode(), DeleteTopic(None, "t"))


def test_a_newer_brokers_code_is_told() -> None:
    answer = decode_answer(999, b'["why",[]]', ShutDown(None, 1, 2))
    assert answer.outcome == Outcome(
        Code.UNKNOWN_SERVER_ERROR, "code 999, which this broker does not know: why"
    )
