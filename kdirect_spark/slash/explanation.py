"""The text that tells what of a DataFrame the engine computes, what Spark keeps, and who does what.

`explained` is a pure function of the plan and of what is known of the run.
"""

from __future__ import annotations

from collections.abc import Iterable

from kdirect.state.batches import deal_vparts
from kdirect.state.expressions import Call, Column, Expression, Literal
from kdirect.state.plan import VPARTS, AggregatePlan, Input, JoinPlan
from kdirect.state.windows import NoWindow, Session, Sliding, Window
from kdirect_spark.slash.slash_plan import SlashPlan

_UNITS = (
    ("day", 86_400_000_000), ("hour", 3_600_000_000), ("minute", 60_000_000),
    ("second", 1_000_000), ("millisecond", 1_000), ("microsecond", 1),
)  # fmt: skip
_BYTES = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def explained(
    found: SlashPlan,
    *,
    executors: int,
    epoch_bytes: int,
    mode: str = "slash",
    layout: str = "colocated",
) -> str:
    """What `slash.explain` prints."""
    plan = found.plan
    lines = ["Accelerated by the state engine", ""]
    for i, given in enumerate(plan.inputs):
        lines += _input(found, i, given)
    lines += _aggregate(plan) if isinstance(plan, AggregatePlan) else _join(plan)
    lines += _spark(found)
    lines += _executors(found, executors, mode, layout, epoch_bytes)
    return "\n".join(lines) + "\n"


def _input(found: SlashPlan, i: int, given: Input) -> list[str]:
    side = f" ({('left', 'right')[i]})" if len(found.plan.inputs) > 1 else ""
    kinds = given.types
    read = ", ".join(f"{name} {kinds[name]}" for name in found.plan.columns_read(i))
    skipped = len(kinds) - len(found.plan.columns_read(i))
    lines = [
        f"Input{side}: topic {given.topic}, leaf {found.leaves[i]}",
        f"  values: {given.value_format}, {given.mode}",
        f"  decoded: {read or 'nothing'}" + (f" ({skipped} not needed)" if skipped else ""),
    ]
    if given.time is not None:
        unit = "" if kinds[given.time].startswith("timestamp") else f" in {given.time_unit}"
        lines.append(f"  event time: {given.time}{unit}")
    if found.is_streaming and given.time is not None:
        lines.append(f"  watermark: {duration(given.delay_us)} behind the newest event time")
    if given.where is not None:
        lines.append(f"  condition: {condition(given.where)}")
    return lines


def _aggregate(plan: AggregatePlan) -> list[str]:
    lines = [f"Keys: {', '.join(plan.keys) or 'none'}", f"Window: {_window(plan.window)}"]
    lines.append("Aggregates:")
    for aggregate in plan.aggregates:
        what = f"{aggregate.kind}({aggregate.column or '*'})"
        lines.append(f"  {what}")
    return lines


def _join(plan: JoinPlan) -> list[str]:
    keys = " and ".join(f"{a} = {b}" for a, b in zip(plan.left_keys, plan.right_keys))
    kept = [
        f"{('left', 'right')[side]} {', '.join(plan.columns_kept(side)) or 'nothing'}"
        for side in (0, 1)
    ]
    return [
        f"Join: {plan.how}, {keys}",
        f"Window: {_window(plan.window)}",
        f"Kept of a row: {'; '.join(kept)}",
    ]


def _window(window: Window) -> str:
    if isinstance(window, NoWindow):
        return "none: each batch gives the keys that changed"
    if isinstance(window, Session):
        return f"session, gap {duration(window.gap_us)}"
    start = f", from {duration(window.origin_us)} after 1970" if window.origin_us else ""
    if isinstance(window, Sliding):
        return (
            f"sliding, {duration(window.size_us)} every {duration(window.slide_us)}{start}, in"
            f" slices of {duration(window.bucket_us)}"
        )
    return f"tumbling, {duration(window.size_us)}{start}"


def _spark(found: SlashPlan) -> list[str]:
    lines = ["Spark keeps:"]
    if found.having is not None:
        lines.append(f"  filter: {found.having}")
    lines += [f"  column {column.name}: {column.sql}" for column in found.columns]
    return lines


def _executors(
    found: SlashPlan, executors: int, mode: str, layout: str, epoch_bytes: int
) -> list[str]:
    only_read = executors // 2 if layout == "split" else 0
    lines = [
        f"Executors: {executors}, mode {mode}"
        + (f", {layout}" if mode == "uppar" else "")
        + f", epochs of {_bytes(epoch_bytes)}"
    ]
    led = deal_vparts(executors, only_read)
    for i, (first, end) in enumerate(led):
        if first == end:
            lines.append(f"  {i}: leads nothing, reads and sends rows")
        else:
            lines.append(
                f"  {i}: leads virtual partitions {first} to {end - 1} ({end - first} of {VPARTS})"
            )
    windows = not isinstance(found.plan.window, NoWindow)
    each = ", a table for each window" if windows else ""
    if isinstance(found.plan, JoinPlan):
        each = ", rows by key for each window"
    elif isinstance(found.plan.window, Session):
        each = ", the intervals of each key"
    lines.append(f"Each task keeps: the state of its own virtual partitions{each}")
    if executors > 1 and mode == "slash":
        lines.append(
            "  and within an epoch fragments of the keys of the others, sent as deltas at its end"
        )
    elif executors > 1:
        lines.append("  and nothing of the keys of the others, whose rows it sends as they are")
    return lines


def duration(span_us: int) -> str:
    """Microseconds in words: ``1 minute 500 milliseconds``."""
    words = []
    for name, unit in _UNITS:
        count, span_us = divmod(span_us, unit)
        if count:
            words.append(f"{count} {name}{'' if count == 1 else 's'}")
    return " ".join(words) or "0 seconds"


def _bytes(count: int) -> str:
    for name, unit in _BYTES:
        if count >= unit and count % unit == 0:
            return f"{count // unit} {name}"
    return f"{count} bytes"


def condition(found: Expression) -> str:
    """A condition of the engine as a line of text."""
    if isinstance(found, Column):
        return found.name
    if isinstance(found, Literal):
        return "null" if found.value is None else repr(found.value)
    assert isinstance(found, Call)
    if found.op in ("and", "or"):
        return "(" + f" {found.op} ".join(map(condition, _chain(found, found.op))) + ")"
    inner = [condition(arg) for arg in found.args]
    if found.op == "is_null":
        return f"({inner[0]} is null)"
    if found.op == "not":
        return f"(not {inner[0]})"
    return f"({inner[0]} {found.op} {inner[1]})"


def _chain(found: Expression, op: str) -> Iterable[Expression]:
    if isinstance(found, Call) and found.op == op:
        for arg in found.args:
            yield from _chain(arg, op)
    else:
        yield found
