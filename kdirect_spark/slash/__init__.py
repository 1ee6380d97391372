"""Slash in PySpark: `accelerate` a DataFrame over `format("kdirect")`, and nothing is shuffled.

Law of the room: it turns a query of Spark into a plan of the state engine (`kdirect.state`), and
runs that in Spark's tasks.  Reading a plan, offsets and control rows are pure; `query` and
`session_facts` are the only files that call Spark's JVM.

Reading order: slash_plan (what goes in and out), catalyst (the JSON of a plan), plan_reader, then
below, above, aggregation and joining (what the nodes mean), catalyst_windows, catalyst_expressions
and sql_text (expressions), literals and spark_types, explanation.  Then query (what users call),
frames, source and control_row (micro-batches), task, and batch_service (batch queries).

This module only names what users need; each name is loaded when it is first used.
"""

from __future__ import annotations

from kdirect.lazy_names import lazy_names as _lazy_names

_HOME = {
    "Leaf": "kdirect_spark.slash.slash_plan",
    "Output": "kdirect_spark.slash.slash_plan",
    "ResultColumn": "kdirect_spark.slash.slash_plan",
    "SlashPlan": "kdirect_spark.slash.slash_plan",
    "accelerate": "kdirect_spark.slash.query",
    "explain": "kdirect_spark.slash.query",
    "read_plan": "kdirect_spark.slash.plan_reader",
    "read_tree": "kdirect_spark.slash.catalyst",
}

__all__ = sorted(_HOME)  # noqa: PLE0605 - the table above spells it out
__getattr__, __dir__ = _lazy_names(__name__, _HOME)
