"""Whatever another process asks of a controller: it is answered once, the controller goes on, and
what it has written can be read by the next one.
"""

from __future__ import annotations

import random
import types
import typing
import uuid
from collections.abc import Mapping
from enum import Enum
from typing import Any

import pytest

from kdirect.cluster import partition_state, requests
from kdirect.cluster.requests import REQUESTS
from kdirect.errors import ProtocolError
from kdirect.member.forwarding import decode_request, encode_answer, encode_request
from kdirect.model import TopicPartition
from tests.cluster.desk import Desk

NAMES = ("t", "u", "", ".", "..", "a/b", "a.b", "a_b", "<default>", "0", "2", "07", "x" * 250, "é")
NUMBERS = (-1, 0, 0, 1, 1, 2, 3, 7, 2**31 - 1, 2**31, 2**63 - 1, -(2**63))
TEXTS = (*NAMES, "true", "2", "\x00", "min.insync.replicas", "unclean.leader.election.enable")
ROUNDS = 300
EACH = 12


def make(kind: Any, draw: random.Random) -> Any:
    """A value of this type, as a careless or malicious process would choose it."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return None if draw.random() < 0.3 else make(inner[0], draw)
    if origin is tuple and inner[-1] is Ellipsis:
        return tuple(make(inner[0], draw) for _ in range(draw.randrange(4)))
    if origin is tuple:
        return tuple(make(x, draw) for x in inner)
    if origin in (Mapping, dict) or getattr(origin, "__name__", "") == "Mapping":
        return {make(inner[0], draw): make(inner[1], draw) for _ in range(draw.randrange(4))}
    if kind is int:
        return draw.choice(NUMBERS)
    if kind is str:
        return draw.choice(TEXTS)
    if kind is bool:
        return draw.random() < 0.2
    if kind is uuid.UUID:
        return uuid.UUID(int=draw.randrange(3))
    if issubclass(kind, Enum):
        return draw.choice(list(kind))
    hints = typing.get_type_hints(
        kind, {**vars(requests), **vars(partition_state), "TopicPartition": TopicPartition}
    )
    fields = {name: make(hints[name], draw) for name in kind._fields if name != "tag"}
    return kind(None, **fields) if "tag" in kind._fields else kind(**fields)


@pytest.mark.parametrize("seed", range(4))
def test_a_controller_survives_whatever_it_is_asked(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(ROUNDS // 4):
        desk = Desk()
        desk.create("t", [(0, 1, 2), (1, 2, 0)])
        desk.create("u", [(2,)])
        for _ in range(EACH):
            wanted = make(draw.choice(REQUESTS), draw)
            try:
                request = decode_request(*encode_request(wanted))
            except ProtocolError:
                continue
            assert request == wanted
            answer = desk.ask(request)
            assert answer is not None, request
            encode_answer(answer, request)
        desk.brokers()
        assert not desk.resigned
        desk.reports.clear()
        desk.begin()
        assert not desk.reports
