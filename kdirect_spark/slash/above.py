"""What the readers of aggregates and of joins share: the engine's inputs, and what is known above.

Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kdirect.state.plan import Input, Plan
from kdirect_spark.slash.below import Below, Column
from kdirect_spark.slash.catalyst import Node, describe, node
from kdirect_spark.slash.catalyst_expressions import Conditions, all_of
from kdirect_spark.slash.catalyst_windows import event_time
from kdirect_spark.slash.refusal import unsupported
from kdirect_spark.slash.slash_plan import Leaf, Output
from kdirect_spark.slash.sql_text import SqlText

START, END = node("@Result", name="window_start"), node("@Result", name="window_end")


class Session(NamedTuple):
    """Settings of the Spark session that change what a plan means."""

    ansi: bool
    time_zone: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Above:
    """What is known above an aggregate or join: its columns and conditions, over the engine's
    output, and `finish`, which makes the engine's plan once it is known what of it is used."""

    columns: tuple[Column, ...]
    leaves: tuple[int, ...]
    having: tuple[Node, ...]
    finish: Callable[[Sequence[Node]], tuple[Plan, SqlText, tuple[Output, ...]]]


def input_of(
    below: Below, leaf: Leaf, session: Session, window: Node | None, where: Sequence[Node]
) -> Input:
    """The engine's input of one relation; `window` says which event time it needs."""
    time = event_time(window.children[0]) if window is not None else None
    if window is not None and time is None:
        raise unsupported(
            f"a window over {describe(window.children[0])} is not supported",
            "use a timestamp column of the topic, or timestamp_millis, timestamp_micros or"
            " timestamp_seconds of an integer column",
        )
    delay = 0
    if leaf.is_streaming and window is not None:
        delay = _delay(below, leaf, window.children[0])
    kinds = {field.name: field.type for field in leaf.fields}
    conditions = Conditions(kinds, session.time_zone)
    kept = tuple(conditions.read(part) for part in where if not _is_there(part, time))
    return Input(
        topic=leaf.topic,
        schema=leaf.fields,
        value_format=leaf.value_format,
        layout=leaf.layout,
        time=None if time is None else time.column,
        time_unit=(time.unit if time is not None else "") or "us",
        where=all_of(kept),
        delay_us=delay,
        mode=leaf.mode,
        max_ahead_us=leaf.max_ahead_us,
        idle_timeout_ms=leaf.idle_timeout_ms,
    )


def _is_there(part: Node, time: object) -> bool:
    """Is it the condition that the event time is not null?  The engine drops such rows itself."""
    return (
        time is not None
        and part.kind == "IsNotNull"
        and len(part.children) == 1
        and event_time(part.children[0]) == time
    )


def _delay(below: Below, leaf: Leaf, time: Node) -> int:
    if below.watermark is None:
        raise unsupported(
            f"the stream of topic {leaf.topic} has a window over {describe(time)} and no watermark,"
            " so no window would ever close",
            f'call withWatermark("{describe(time)}", "10 seconds") before the window',
        )
    marked, delay = below.watermark
    if marked != time:
        raise unsupported(
            f"the watermark of topic {leaf.topic} is on {describe(marked)} and its window on"
            f" {describe(time)}",
            "use the same column for both",
        )
    return delay
