"""From Spark's analyzed plan to the plan of the engine: `read_plan`.

The law: either the engine computes the DataFrame's rows exactly as Spark would, or the plan is
refused with an error that names the node and the remedy.  This file goes through the nodes;
`below.py`, `aggregation.py` and `joining.py` know what they mean.  Pure: no py4j, and of
pyspark the types alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kdirect.errors import ConfigError, FormatError
from kdirect.state.strict import parse
from kdirect_spark.slash.above import Above, Session
from kdirect_spark.slash.aggregation import aggregated
from kdirect_spark.slash.below import (
    RELATIONS,
    SEE_THROUGH,
    Below,
    BelowReader,
    Column,
    projected,
    refused,
    substituted,
    values_of,
)
from kdirect_spark.slash.catalyst import Tree
from kdirect_spark.slash.catalyst_expressions import conjuncts
from kdirect_spark.slash.joining import joined
from kdirect_spark.slash.refusal import engines_rules, unsupported
from kdirect_spark.slash.slash_plan import Leaf, ResultColumn, SlashPlan
from kdirect_spark.slash.spark_types import ddl

_MOST_DEPTH = 400


def read_plan(
    tree: Tree, leaves: Sequence[Leaf], *, schema: str, ansi: bool, time_zone: str
) -> SlashPlan:
    """The plan of the engine for the DataFrame whose analyzed plan is `tree`.

    `leaves` describe its relations in pre-order (references to common table expressions are none).
    `schema` is the DataFrame's, ``df.schema.json()``; `ansi` and `time_zone` are the session's
    ``spark.sql.ansi.enabled`` and ``spark.sql.session.timeZone``.

    Raises UnsupportedPlanError for what the engine does not do as Spark does, ConfigError for
    leaves that do not fit, and FormatError for a tree of another shape."""
    reader = _Reader(tuple(leaves), Session(ansi, time_zone))
    try:
        found = reader.node(tree, 0)
        if isinstance(found, Below):
            raise unsupported(
                "there is no aggregate and no join in this DataFrame, so there is nothing to"
                " accelerate",
                "add groupBy(window(..)).agg(..)",
            )
        if reader.below.seen != len(leaves):
            raise ConfigError(
                f"accelerate: {len(leaves)} leaves are described and the plan has"
                f" {reader.below.seen}",
                hint="describe the relations of the plan, in its order",
            )
        return _finished(found, reader.leaves, schema)
    except RecursionError:
        raise unsupported(
            "the plan is too deep", "use one select for what many withColumn calls did"
        ) from None


def _finished(found: Above, leaves: Sequence[Leaf], schema: str) -> SlashPlan:
    fields = _fields(schema)
    if [name for name, _, _ in fields] != [column.name for column in found.columns]:
        raise FormatError("plan: its columns are not those of the DataFrame's schema")
    used = [*(column.value for column in found.columns), *found.having]
    with engines_rules():
        plan, text, outputs = found.finish(used)
    columns = tuple(
        ResultColumn(name=name, type=kind, nullable=nullable, sql=text.write(column.value))
        for (name, kind, nullable), column in zip(fields, found.columns)
    )
    conditions = [text.write(part) for part in found.having]
    return SlashPlan(
        plan=plan,
        leaves=found.leaves,
        is_streaming=leaves[found.leaves[0]].is_streaming,
        outputs=outputs,
        columns=columns,
        having=" AND ".join(conditions) or None,
    )


def _fields(schema: str) -> list[tuple[str, str, bool]]:
    """Name, declaration and nullability of the columns of a schema's JSON."""
    value = parse(schema, "schema")
    fields = value.get("fields") if isinstance(value, dict) else None
    if not isinstance(fields, list):
        raise FormatError("schema: it is no struct")
    found = []
    for field in fields:
        if not isinstance(field, dict) or not isinstance(field.get("name"), str):
            raise FormatError("schema: a field has no name")
        kind: Any = field.get("type")
        found.append((field["name"], ddl(kind), field.get("nullable") is not False))
    return found


class _Reader:
    def __init__(self, leaves: tuple[Leaf, ...], session: Session) -> None:
        self.leaves = leaves
        self.below = BelowReader(leaves, session.time_zone)
        self._session = session
        self._common: dict[int, Below | Above] = {}

    def node(self, tree: Tree, depth: int) -> Below | Above:
        if depth > _MOST_DEPTH:
            raise unsupported(
                f"the plan is deeper than {_MOST_DEPTH} nodes",
                "use one select for what many withColumn calls did",
            )
        if tree.kind in RELATIONS:
            return self.below.relation(tree)
        if tree.kind in SEE_THROUGH:
            return self.node(tree.only(), depth + 1)
        read = _READERS.get(tree.kind)
        if read is None:
            raise refused(tree)
        return read(self, tree, depth)

    def _project(self, tree: Tree, depth: int) -> Below | Above:
        found = self.node(tree.only(), depth + 1)
        if isinstance(found, Below):
            return self.below.projection(found, tree)
        given = tree.expressions("projectList")
        columns = projected(found.columns, given, self._session.time_zone)
        return replace(found, columns=tuple(columns))

    def _filter(self, tree: Tree, depth: int) -> Below | Above:
        found = self.node(tree.only(), depth + 1)
        if isinstance(found, Below):
            return self.below.filtered(found, tree)
        condition = substituted(tree.expression("condition"), values_of(found.columns))
        return replace(found, having=found.having + conjuncts(condition))

    def _below_only(self, tree: Tree, depth: int, what: str) -> Below:
        found = self.node(tree, depth + 1)
        if isinstance(found, Above):
            raise unsupported(
                f"{what} above an aggregate or join is not supported",
                "accelerate the inner DataFrame, and apply the rest to what it gives",
            )
        return found

    def _watermark(self, tree: Tree, depth: int) -> Below | Above:
        return self.below.watermarked(self._below_only(tree.only(), depth, "withWatermark"), tree)

    def _expand(self, tree: Tree, depth: int) -> Below | Above:
        found = self._below_only(tree.only(), depth, "a sliding window or grouping sets")
        return self.below.expanded(found, tree)

    def _aggregate(self, tree: Tree, depth: int) -> Below | Above:
        found = self._below_only(tree.only(), depth, "an aggregate")
        with engines_rules():
            return aggregated(found, tree, self.leaves, self._session)

    def _join(self, tree: Tree, depth: int) -> Below | Above:
        left = self._below_only(tree.child(0, 2), depth, "a join")
        right = self._below_only(tree.child(1, 2), depth, "a join")
        with engines_rules():
            return joined((left, right), tree, self.leaves, self._session)

    def _with(self, tree: Tree, depth: int) -> Below | Above:
        """WithCTE: the definitions, then the plan that refers to them."""
        if not tree.children:
            raise FormatError("plan: WithCTE has no children")
        for definition in tree.children[:-1]:
            if definition.kind != "CTERelationDef":
                raise refused(definition)
            found = self.node(definition.only(), depth + 1)
            self._common[definition.number("id")] = found
        return self.node(tree.children[-1], depth + 1)

    def _reference(self, tree: Tree, depth: int) -> Below | Above:
        found = self._common.get(tree.number("cteId"))
        output = tree.expressions("output")
        if found is None or len(found.columns) != len(output):
            raise unsupported("this common table expression (WITH) is not supported", "inline it")
        renamed = tuple(
            Column(id=attribute.get("id"), name=column.name, value=column.value)
            for attribute, column in zip(output, found.columns)
        )
        return replace(found, columns=renamed)


_READERS = {
    "Project": _Reader._project,
    "Filter": _Reader._filter,
    "EventTimeWatermark": _Reader._watermark,
    "Expand": _Reader._expand,
    "Aggregate": _Reader._aggregate,
    "Join": _Reader._join,
    "WithCTE": _Reader._with,
    "CTERelationRef": _Reader._reference,
}
