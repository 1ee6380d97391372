"""The state engine: windows and joins computed where the records are read (Slash, SIGMOD 2022).

Each executor keeps partial state of every key that it meets, and sends what changed to the key's
leader at the end of an epoch; nothing is repartitioned.  docs/slash.md tells the whole story.

Law of the room: it imports `client`, `wire`, `rdma`, `format` and what everyone may, and nothing of
Spark, of the broker or of the log.  Decisions are pure: the plan, expressions, windows, clocks and
the machines of helper, leader, coordinator and recovery are functions of values, without a socket,
file, clock, thread or process; kernels hold memory and nothing else.  The files that open sockets,
start processes or write files say so in their first lines, and carry out what the machines decide.
Event time is an int64 number of microseconds since 1970 UTC everywhere in the room, and every
interval is half-open.

This module only names what users need; each name is loaded when it is first used.
"""

from __future__ import annotations

from kdirect.lazy_names import lazy_names as _lazy_names

_HOME = {
    "Aggregate": "kdirect.state.aggregates",
    "AggregatePlan": "kdirect.state.plan",
    "Call": "kdirect.state.expressions",
    "Column": "kdirect.state.expressions",
    "Executor": "kdirect.state.executor",
    "ExecutorProcess": "kdirect.state.launcher",
    "ExecutorSettings": "kdirect.state.executor",
    "Field": "kdirect.state.schema",
    "FixedLayout": "kdirect.format.fixed_layout",
    "Input": "kdirect.state.plan",
    "JoinPlan": "kdirect.state.plan",
    "Launcher": "kdirect.state.launcher",
    "Literal": "kdirect.state.expressions",
    "LocalLauncher": "kdirect.state.launcher",
    "NoWindow": "kdirect.state.windows",
    "Partition": "kdirect.state.batches",
    "PlannedJob": "kdirect.state.planned_stream",
    "Range": "kdirect.state.batches",
    "Session": "kdirect.state.windows",
    "Sliding": "kdirect.state.windows",
    "StateJob": "kdirect.state.stream_job",
    "Tumbling": "kdirect.state.windows",
    "Visit": "kdirect.state.visitor",
    "column": "kdirect.state.expressions",
    "plan_from_json": "kdirect.state.plan",
    "run": "kdirect.state.stream_job",
    "visit": "kdirect.state.visitor",
}

__all__ = sorted(_HOME)  # noqa: PLE0605 - the table above spells it out
__getattr__, __dir__ = _lazy_names(__name__, _HOME)
