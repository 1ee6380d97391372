"""The part of a plan below its aggregate or join: one relation, its columns, conditions, watermark.

Every column of a node is kept as an expression over the relation's own columns, so renames and
projections vanish; what an expression means is asked only where it is used.  Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kdirect.errors import ConfigError
from kdirect_spark.slash.catalyst import Node, Tree, describe, node
from kdirect_spark.slash.catalyst_expressions import conjuncts
from kdirect_spark.slash.catalyst_windows import contains_its_time, recognised, sliding
from kdirect_spark.slash.refusal import unsupported
from kdirect_spark.slash.slash_plan import Leaf
from kdirect_spark.slash.spark_types import spark_name

RELATIONS = ("StreamingRelationV2", "DataSourceV2Relation")
SEE_THROUGH = ("SubqueryAlias", "View")
# What a node that is refused is called by those who wrote it, and what they may do.
_REFUSALS = {
    "Deduplicate": ("dropDuplicates", "drop duplicates after the aggregate"),
    "DeduplicateWithinWatermark": ("dropDuplicatesWithinWatermark", "drop duplicates afterwards"),
    "Distinct": ("distinct", "apply it to the DataFrame that accelerate() gives"),
    "Union": ("union", "write both inputs to one topic"),
    "Sort": ("orderBy", "order the DataFrame that accelerate() gives"),
    "GlobalLimit": ("limit", "limit the DataFrame that accelerate() gives"),
    "LocalLimit": ("limit", "limit the DataFrame that accelerate() gives"),
    "Window": ("a window function over rows", "apply it to the DataFrame that accelerate() gives"),
    "Generate": ("explode", "write one record for each element"),
    "Repartition": ("repartition", "leave it out: the engine does not move records"),
    "RepartitionByExpression": ("repartition", "leave it out: the engine does not move records"),
    "Sample": ("sample", "filter by a column instead"),
    "Pivot": ("pivot", "pivot the DataFrame that accelerate() gives"),
    "LocalRelation": ("a table of constants", "read kdirect topics only"),
    "LogicalRelation": ("a table of another source", "read kdirect topics only"),
    "StreamingRelation": ("a stream of another source", "read kdirect topics only"),
    "ResolvedHint": ("a hint", "leave it out"),
    "CollectMetrics": ("observe", "observe the DataFrame that accelerate() gives"),
    "FlatMapGroupsWithState": ("state of your own functions", ""),
    "TransformWithState": ("transformWithState", ""),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a node: the attribute that names it, and what it is of the relation's columns."""

    id: int
    name: str
    value: Node
    nullable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Below:
    """One relation with what was done to its rows; `watermark` is the expression of its event time
    and the delay in microseconds."""

    leaf: int
    columns: tuple[Column, ...]
    where: tuple[Node, ...] = ()
    watermark: tuple[Node, int] | None = None


def substituted(found: Node, values: Mapping[int, Node]) -> Node:
    """An expression with what is known put in the place of its attributes."""
    if found.kind == "AttributeReference":
        return values.get(found.get("id"), found)
    if not found.children:
        return found
    return found.with_children(tuple(substituted(child, values) for child in found.children))


def values_of(columns: Sequence[Column]) -> dict[int, Node]:
    return {column.id: column.value for column in columns}


def projected(columns: Sequence[Column], given: Sequence[Node], time_zone: str) -> list[Column]:
    """The columns of a projection of named expressions."""
    values = values_of(columns)
    found = []
    for expression in given:
        if expression.kind == "Alias" and len(expression.children) == 1:
            value = substituted(expression.children[0], values)
        elif expression.kind == "AttributeReference":
            value = substituted(expression, values)
        else:
            raise unsupported(f"the column {describe(expression)} is not supported", "name it")
        name, key = expression.get("name", ""), expression.get("id")
        found.append(Column(id=key, name=name, value=recognised(value, time_zone)))
    return found


class BelowReader:
    """Reads the relations of one plan, in the order of its leaves."""

    def __init__(self, leaves: Sequence[Leaf], time_zone: str) -> None:
        self._leaves = leaves
        self._time_zone = time_zone
        self.seen = 0

    def relation(self, tree: Tree) -> Below:
        number, self.seen = self.seen, self.seen + 1
        if number >= len(self._leaves):
            raise ConfigError(
                f"accelerate: the plan has more than {len(self._leaves)} relations",
                hint="describe every leaf",
            )
        leaf = self._leaves[number]
        self._check_relation(tree, leaf)
        kinds = {field.name: field.type for field in leaf.fields}
        columns = []
        for attribute in tree.expressions("output"):
            if attribute.kind != "AttributeReference":
                raise unsupported(f"the column {describe(attribute)} of a relation is not known")
            name, value = attribute.get("name"), attribute
            nullable = attribute.get("nullable") is not False
            if name in kinds:
                expected = spark_name(kinds[name])
                if attribute.type != expected:
                    raise ConfigError(
                        f"accelerate: column {name} of topic {leaf.topic} is of type"
                        f" {attribute.type} in Spark and of {kinds[name]} in the engine",
                        hint=f"declare it as {expected}",
                    )
                value = node(
                    "@Column", side=number, name=name, type=attribute.type, nullable=nullable
                )
            columns.append(
                Column(id=attribute.get("id"), name=name, value=value, nullable=nullable)
            )
        return Below(leaf=number, columns=tuple(columns))

    def _check_relation(self, tree: Tree, leaf: Leaf) -> None:
        named = tree.text("sourceName") if tree.has("sourceName") else leaf.source
        for source in (named, leaf.source):
            if source != "kdirect":
                raise unsupported(
                    f"a relation of the source {source} is not supported",
                    'read it with format("kdirect")',
                )
        if not leaf.value_format or not leaf.fields:
            raise unsupported(
                f"topic {leaf.topic} is read without valueFormat, so its columns are Kafka's",
                "set the option valueFormat and the schema of the values (valueFormat=json in place"
                " of from_json)",
            )
        if leaf.is_streaming != (tree.kind == "StreamingRelationV2"):
            raise ConfigError(
                f"accelerate: the leaf of topic {leaf.topic} is described as"
                f" {'a stream' if leaf.is_streaming else 'a batch'} and is a {tree.kind}",
                hint="describe the leaves in the order of the plan",
            )

    def filtered(self, below: Below, tree: Tree) -> Below:
        values = values_of(below.columns)
        condition = substituted(tree.expression("condition"), values)
        added = tuple(part for part in conjuncts(condition) if not _of_its_window(part))
        return replace(below, where=below.where + added)

    def projection(self, below: Below, tree: Tree) -> Below:
        given = tree.expressions("projectList")
        return replace(below, columns=tuple(projected(below.columns, given, self._time_zone)))

    def watermarked(self, below: Below, tree: Tree) -> Below:
        if not self._leaves[below.leaf].is_streaming:
            return below
        time = substituted(tree.expression("eventTime"), values_of(below.columns))
        delay = tree.delay_us or 0
        if below.watermark is not None and below.watermark != (time, delay):
            raise unsupported(
                f"topic {self._leaves[below.leaf].topic} has two watermarks, on"
                f" {describe(below.watermark[0])} and on {describe(time)}",
                "call withWatermark once",
            )
        return replace(below, watermark=(time, delay))

    def expanded(self, below: Below, tree: Tree) -> Below:
        """An Expand: Spark's form of a sliding window, and of grouping sets."""
        refused = unsupported(
            "rollup, cube and grouping sets (Expand) are not supported", "use one groupBy"
        )
        rows = tree.lists("projections")
        output = tree.expressions("output")
        if not rows or any(len(row) != len(output) for row in rows):
            raise refused
        values = values_of(below.columns)
        rows = tuple(tuple(substituted(e, values) for e in row) for row in rows)
        columns = []
        for i, attribute in enumerate(output):
            if attribute.kind != "AttributeReference":
                raise refused
            each = tuple(recognised(row[i], self._time_zone) for row in rows)
            value: Node | None = each[0]
            if each[0].kind in ("CreateNamedStruct", "@Window"):
                value = sliding(each)
            elif any(e != each[0] for e in each):
                value = None
            if value is None:
                raise refused
            columns.append(
                Column(id=attribute.get("id"), name=attribute.get("name", ""), value=value)
            )
        if not any(column.value.kind == "@Window" for column in columns):
            raise refused
        return replace(below, columns=tuple(columns))


def _of_its_window(part: Node) -> bool:
    """Is it a condition that Spark adds to a sliding window, and that each of its rows meets?"""
    windows = [found for found in part.walk() if found.kind == "@Window"]
    return bool(windows) and any(
        window.get("how") != "session" and contains_its_time(part, window.children[0], window)
        for window in windows
    )


def refused(tree: Tree, where: str = "") -> Exception:
    """The error for a node of the plan that is not known."""
    name, hint = _REFUSALS.get(tree.kind, ("", ""))
    called = f"{tree.kind} ({name})" if name and name != tree.kind else tree.kind
    return unsupported(f"{called} is not supported{where}", hint)
