"""Messages and records: one form in JSON, and nothing else is taken for it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdirect.errors import FormatError, KdirectError
from kdirect.state import messages
from kdirect.state.batches import (
    BatchRecord,
    Commit,
    Manifest,
    Part,
    Partition,
    Phase,
    Progress,
    Range,
    StateHeader,
    deal_partitions,
    deal_vparts,
    leader_of,
)
from kdirect.state.plan import VPARTS, AggregatePlan, Input
from kdirect.state.strict import canonical
from kdirect.state.windows import TIME_MIN, Tumbling

TP, OTHER = Partition("bids", 0), Partition("bids", 7)
AFTER = Progress(clock={TP: 5, OTHER: TIME_MIN}, closes=-3)
HEADER = StateHeader(
    plan_hash="ab",
    executor=1,
    executors=2,
    vparts=(128, 256),
    attempt=3,
    batch=4,
    phase=Phase.DONE,
    after=AFTER,
)
PART = Part(file="part-1-0", first=0, last=VPARTS, size=10, crc=7)
RECORD = BatchRecord(
    number=4,
    ranges={TP: Range(3, 9), OTHER: Range(2, 2)},
    now_us=17,
    idle=frozenset([OTHER]),
    clock=AFTER.clock,
    closed_before=AFTER.closes,
)
PLAN = AggregatePlan(
    input=Input(topic="bids", schema="at long", time="at"),
    keys=(),
    window=Tumbling(size_us=5),
    aggregates=("count",),
)
MESSAGES = [
    messages.Hello(
        executor=1, token="t", process_id=5, host="h", address={"a": [1]}, header=HEADER
    ),
    messages.Hello(executor=0, token="", process_id=5, host="", address={}, header=None),
    messages.Welcome(
        attempt=1, plan=PLAN, options={"a": 1}, vparts=deal_vparts(3), addresses=({}, {}, {}),
        cold=True,
    ),
    messages.Restore(attempt=1, batch=-1, parts=()),
    messages.Restore(attempt=1, batch=8, parts=(PART,)),
    messages.Listening(attempt=1, executor=2),
    messages.Connect(attempt=1),
    messages.Ready(attempt=1, executor=2),
    messages.NotRestored(attempt=1, executor=2, batch=8, message="it is gone"),
    messages.FetchPart(attempt=1, executor=2, batch=8, file="part-1-0"),
    messages.FetchedPart(attempt=1, batch=8, file="part-1-0", size=10),
    messages.PartFollows(attempt=1, batch=8, file="part-1-0", size=10),
    messages.Working(attempt=1, executor=2, steps=7),
    messages.StartBatch(
        attempt=1, batch=4, ranges={TP: Range(3, 9)}, clock=AFTER.clock, idle=frozenset([OTHER]),
        closed_before=-3, now_us=17, vparts=((0, 3), (9, 256)), emit=False,
    ),
    messages.BatchDone(
        attempt=1, batch=4, executor=2, after=AFTER, rows_out=3, counts={"late": 1},
        bad_rows=("t-0 offset 3: field k: it is no int64",),
    ),
    messages.BatchOver(attempt=1, batch=4),
    messages.Arrived(batch=4, task=1, start=7, host="b", process_id=9, states=(0, 2)),
    messages.Placed(executor=2),
    messages.Leave(attempt=1, batch=4, closes=-3, counts={"rows_out": 3}),
    messages.TakeOutput(attempt=1, batch=4),
    messages.Output(attempt=1, batch=4, executor=2, size=99),
    messages.TakeSnapshot(attempt=1, batch=4, file="part-1-2"),
    messages.SnapshotDone(attempt=1, batch=4, executor=2, part=PART),
    messages.Failed(
        executor=2, error="FormatError", message="row 5", hint="mend it", retriable=True,
        topic="t", partition=3, offset=5,
    ),
    messages.Stop(attempt=1),
]  # fmt: skip


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: m.type)
def test_messages_survive_their_bytes(message: Any) -> None:
    assert messages.decode(messages.encode(message)) == message


def test_every_message_is_tried() -> None:
    assert {type(message) for message in MESSAGES} == set(messages._CLASSES.values())


def test_each_side_takes_what_the_other_one_sends() -> None:
    for message in MESSAGES:
        data = messages.encode(message)
        sides = (messages.decode_from_executor, messages.decode_from_coordinator)
        taken = 0
        for side in sides:
            try:
                taken += side(data) == message
            except FormatError as e:
                assert "this side does not send it" in str(e)
        assert taken == 1


def spoiled(value: Any) -> Any:
    for wrong in (None, True, -7, 1 << 70, "?/", [[None]], {"x": 1}, 0.5):
        if wrong != value:
            yield wrong
    if isinstance(value, dict):
        yield {**value, "more": 1}
        for name in value:
            yield {k: v for k, v in value.items() if k != name}
            for wrong in spoiled(value[name]):
                yield {**value, name: wrong}
    elif isinstance(value, list):
        yield value + value
        for i, item in enumerate(value):
            for wrong in spoiled(item):
                yield [*value[:i], wrong, *value[i + 1 :]]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: m.type)
def test_spoiled_messages_are_messages_or_errors(message: Any) -> None:
    refused = 0
    for wrong in spoiled(json.loads(messages.encode(message))):
        try:
            found = messages.decode(canonical(wrong).encode())
        except KdirectError:
            refused += 1
        else:
            assert messages.decode(messages.encode(found)) == found
    assert refused > 10


@given(st.binary(max_size=60))
def test_any_bytes_are_a_message_or_an_error(data: bytes) -> None:
    with pytest.raises(FormatError):
        messages.decode(data)


def test_another_version_is_named() -> None:
    value = json.loads(messages.encode(MESSAGES[0]))
    with pytest.raises(FormatError, match=r"version 9 is not 1; .*same version"):
        messages.decode(canonical({**value, "version": 9}).encode())


def test_a_message_that_is_too_long_is_refused() -> None:
    with pytest.raises(FormatError, match="more than"):
        messages.decode(b" " * (messages.LONGEST_BYTES + 1))


@pytest.mark.parametrize(
    ("value", "cls"),
    [
        (RECORD, BatchRecord),
        (Commit(number=4, after=AFTER), Commit),
        (Manifest(number=4, plan_hash="ab", parts=(PART,)), Manifest),
        (HEADER, StateHeader),
        (AFTER, Progress),
        (PART, Part),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_what_is_durable_survives_json(value: Any, cls: Any) -> None:
    form = json.loads(canonical(value.to_json()))
    assert cls.from_json(form) == value
    refused = 0
    for wrong in spoiled(form):
        try:
            found = cls.from_json(wrong)
        except KdirectError:
            refused += 1
        else:
            assert cls.from_json(found.to_json()) == found
    assert refused > 10


def test_records_that_contradict_themselves() -> None:
    with pytest.raises(FormatError, match=r"idle partition .* has records"):
        BatchRecord(
            number=0, ranges={TP: Range(0, 1)}, now_us=0, idle=frozenset([TP]), clock={TP: 0}
        )
    with pytest.raises(FormatError, match="differ in partitions"):
        BatchRecord(number=0, ranges={TP: Range(0, 1)}, now_us=0, clock={OTHER: 0})
    half = Part(file="a", first=0, last=100, size=1, crc=1)
    rest = Part(file="b", first=101, last=VPARTS, size=1, crc=1)
    with pytest.raises(FormatError, match="virtual partition 100 is not once"):
        Manifest(number=1, plan_hash="ab", parts=(half, rest))
    with pytest.raises(FormatError, match="from 100 are missing"):
        Manifest(number=1, plan_hash="ab", parts=(half,))


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".", "..", "a\0"])
def test_parts_stay_in_their_directory(name: str) -> None:
    with pytest.raises(FormatError):
        Part.from_json([name, 0, 1, 1, 1])


@pytest.mark.parametrize("only_read", [0, 1])
@pytest.mark.parametrize("executors", [2, 3, 7, 16, 255, 256])
def test_dealing_gives_each_virtual_partition_one_leader(executors: int, only_read: int) -> None:
    dealt = deal_vparts(executors, only_read)
    led = [v for first, last in dealt for v in range(first, last)]
    assert led == list(range(VPARTS))
    sizes = [last - first for first, last in dealt[only_read:]]
    assert max(sizes) - min(sizes) <= 1 and len(dealt) == executors
    for vpart in range(VPARTS):
        first, last = dealt[leader_of(vpart, executors, only_read)]
        assert first <= vpart < last


def test_dealing_gives_each_partition_one_reader() -> None:
    partitions = [Partition("t", i) for i in range(5)]
    dealt = deal_partitions(reversed(partitions), 3)
    assert dealt == (
        (partitions[0], partitions[3]), (partitions[1], partitions[4]), (partitions[2],)
    )  # fmt: skip
