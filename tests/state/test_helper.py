"""An executor within a batch: what it reads, and when it sends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdirect.errors import StateProtocolError
from kdirect.state import helper
from kdirect.state.batches import Partition, Range
from kdirect.state.helper import BlockRead, Flush, Flushed, Phase, Read, Reading
from kdirect.state.messages import StartBatch
from kdirect.state.windows import TIME_MIN

A, B, OTHER = Partition("a", 0), Partition("b", 0), Partition("b", 1)


def begin(ranges: dict, **more: int) -> tuple[Reading, tuple]:
    start = StartBatch(
        attempt=1, batch=0, ranges=ranges, clock=dict.fromkeys([A, B, OTHER], TIME_MIN),
        idle=frozenset(), closed_before=TIME_MIN, now_us=0,
    )  # fmt: skip
    settings = {"epoch_bytes": 100, "block_rows": 10, **more}
    return helper.begin(start, {"a": 2, "b": 5}, **settings)


def test_partitions_take_turns_and_the_last_epoch_carries_the_clock() -> None:
    reading, effects = begin({A: Range(0, 15), B: Range(7, 9)})
    assert effects == (Read(A, 0, 10),)
    reading, effects = helper.step(reading, BlockRead(A, 10, 40, 30))
    assert effects == (Read(B, 7, 9),)
    reading, effects = helper.step(reading, BlockRead(B, 9, 40, None))
    assert effects == (Read(A, 10, 15),)
    reading, (flush,) = helper.step(reading, BlockRead(A, 15, 10, 20))
    assert isinstance(flush, Flush) and flush.epoch == 0 and flush.clock is not None
    assert flush.clock.entries == {A: 28, B: TIME_MIN}
    reading, effects = helper.step(reading, Flushed(0))
    assert (reading.phase, effects) == (Phase.SENT, ())


def test_an_executor_without_rows_still_says_that_it_has_done() -> None:
    reading, (flush,) = begin({A: Range(4, 4)})
    assert flush.clock is not None and flush.clock.entries == {A: TIME_MIN}
    assert helper.step(reading, Flushed(0))[0].phase is Phase.SENT


def test_reading_goes_on_while_an_epoch_is_sent_and_waits_before_the_next_one() -> None:
    reading, _ = begin({A: Range(0, 30)})
    reading, effects = helper.step(reading, BlockRead(A, 10, 100, 1))
    assert effects == (Flush(0, None), Read(A, 10, 20))
    reading, effects = helper.step(reading, BlockRead(A, 20, 100, 2))
    assert (reading.phase, effects) == (Phase.FULL, ())
    reading, effects = helper.step(reading, Flushed(0))
    assert effects == (Flush(1, None), Read(A, 20, 30))
    reading, effects = helper.step(reading, BlockRead(A, 30, 1, 3))
    assert (reading.phase, effects) == (Phase.ENDING, ())
    reading, (flush,) = helper.step(reading, Flushed(1))
    assert (flush.epoch, flush.clock.entries[A], reading.phase) == (2, 1, Phase.LAST)


@pytest.mark.parametrize(
    "event",
    [
        BlockRead(B, 8, 1, 1),  # not what was asked for
        BlockRead(A, 0, 1, 1),  # no progress
        BlockRead(A, 16, 1, 1),  # past the end
        BlockRead(A, 3, -1, 1),
        Flushed(0),  # nothing is on its way
    ],
)
def test_what_nothing_asked_for_is_refused(event: helper.Event) -> None:
    reading, _ = begin({A: Range(0, 15), B: Range(7, 9)})
    with pytest.raises(StateProtocolError):
        helper.step(reading, event)


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=4),
    st.integers(1, 60),
    st.integers(1, 9),
    st.randoms(use_true_random=False),
)
def test_every_row_is_read_once_in_order(sizes, epoch_bytes, block_rows, chance) -> None:
    ranges = {Partition("a", i): Range(3, 3 + size) for i, size in enumerate(sizes)}
    clock = dict.fromkeys(ranges, TIME_MIN)
    start = StartBatch(
        attempt=1, batch=0, ranges=ranges, clock=clock, idle=frozenset(),
        closed_before=TIME_MIN, now_us=0,
    )  # fmt: skip
    reading, effects = helper.begin(start, {"a": 0}, epoch_bytes=epoch_bytes, block_rows=block_rows)
    todo, position, epochs, filled = [*effects], dict.fromkeys(ranges, 3), [], 0
    while todo:
        effect = todo.pop(chance.randrange(len(todo)))
        if isinstance(effect, Read):
            assert effect.start == position[effect.tp] < effect.end <= ranges[effect.tp].end
            assert effect.end - effect.start <= block_rows
            assert filled < epoch_bytes
            upto = chance.randint(effect.start + 1, effect.end)
            filled += upto - effect.start
            position[effect.tp] = upto
            event = BlockRead(effect.tp, upto, upto - effect.start, upto)
        else:
            epochs.append(effect)
            filled = 0
            event = Flushed(effect.epoch)
        reading, effects = helper.step(reading, event)
        if any(isinstance(e, Flush) for e in effects):
            filled = 0
        todo += effects
    assert position == {tp: range_.end for tp, range_ in ranges.items()}
    assert [flush.epoch for flush in epochs] == list(range(len(epochs)))
    assert [flush.clock is not None for flush in epochs] == [False] * (len(epochs) - 1) + [True]
    assert reading.phase is Phase.SENT
