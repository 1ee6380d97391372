"""Spark's `Join` of two relations, as the engine's plan and columns of its output.

The sides meet in equal tumbling windows on equal columns.  What else the condition says joins the
condition of one side, if dropping its rows early changes nothing.  Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kdirect.state.plan import Input, JoinPlan, Plan
from kdirect_spark.slash.above import END, START, Above, Session, input_of
from kdirect_spark.slash.below import Below, substituted, values_of
from kdirect_spark.slash.catalyst import Node, Tree, describe, node
from kdirect_spark.slash.catalyst_expressions import conjuncts
from kdirect_spark.slash.catalyst_windows import bounds, event_time, window_of
from kdirect_spark.slash.refusal import unsupported
from kdirect_spark.slash.slash_plan import Leaf, Output
from kdirect_spark.slash.spark_types import engine_ddl
from kdirect_spark.slash.sql_text import SqlText

_HOWS = {
    "Inner": "inner", "Cross": "inner", "LeftOuter": "left", "RightOuter": "right",
    "FullOuter": "full",
}  # fmt: skip


def joined(
    sides: tuple[Below, Below], tree: Tree, leaves: Sequence[Leaf], session: Session
) -> Above:
    """The node Join over two relations."""
    return _Joining(sides, leaves, session).read(tree)


class _Joining:
    def __init__(
        self, sides: tuple[Below, Below], leaves: Sequence[Leaf], session: Session
    ) -> None:
        self._sides = sides
        self._leaves = tuple(leaves[side.leaf] for side in sides)
        self._session = session
        self._keys: list[tuple[Node, Node]] = []
        self._window: Node | None = None
        self._pushed: tuple[list[Node], list[Node]] = ([], [])
        self._how = ""

    def read(self, tree: Tree) -> Above:
        kind = tree.text("joinType").rpartition("$")[0].rpartition(".")[2]
        if kind not in _HOWS:
            raise unsupported(
                f"a join of the kind {kind or 'unknown'} is not supported",
                "use an inner, left, right or full join",
            )
        self._how = _HOWS[kind]
        left, right = self._leaves
        if left.topic == right.topic:
            raise unsupported(
                f"a join of the topic {left.topic} with itself is not supported",
                "write one of the sides to a topic of its own",
            )
        if left.is_streaming != right.is_streaming:
            raise unsupported("a join of a stream with a batch is not supported")
        self._read_condition(tree)
        window = self._checked_window()
        inputs = tuple(self._side_input(i, window) for i in (0, 1))
        columns = tuple(
            replace(column, value=self._outside(column.value, i))
            for i, side in enumerate(self._sides)
            for column in side.columns
        )
        return Above(
            columns=columns, leaves=tuple(side.leaf for side in self._sides), having=(),
            finish=lambda used: self._finish(inputs[0], inputs[1], window, used),
        )  # fmt: skip

    def _side_input(self, i: int, window: Node) -> Input:
        side = self._sides[i]
        time = self._window_times[i]
        for part in side.where:
            if any(found.kind == "@Window" for found in part.walk()):
                raise unsupported(
                    f"the condition {describe(part)} on a window below a join is not supported",
                    "use it after the join",
                )
        here = Node("@Window", (time,), window.values)
        where = (*side.where, *self._pushed[i])
        return input_of(side, self._leaves[i], self._session, here, where)

    @property
    def _window_times(self) -> tuple[Node, Node]:
        assert self._window is not None
        return self._window.children[0], self._window.children[1]

    # -- the condition

    def _read_condition(self, tree: Tree) -> None:
        if not tree.has("condition"):
            raise self._no_window()
        values = [values_of(side.columns) for side in self._sides]
        both = {**values[0], **values[1]}
        for part in conjuncts(substituted(tree.expression("condition"), both)):
            if not self._is_equality(part):
                self._push(part)

    def _no_window(self) -> Exception:
        return unsupported(
            "a join without an equal window is not supported",
            "join on window(time, ..) of both sides and on keys",
        )

    def _side_of(self, found: Node) -> set[int]:
        """Which sides an expression reads."""
        sides = set()
        for part in found.walk():
            if part.kind == "@Column":
                sides.add(0 if part.get("side") == self._sides[0].leaf else 1)
            elif part.kind == "AttributeReference":
                raise unsupported(
                    f"the column {describe(part)} in the condition of a join is not a field of the"
                    " values",
                    "use columns of the value only",
                )
        return sides

    def _is_equality(self, part: Node) -> bool:
        if part.kind != "EqualTo" or len(part.children) != 2:
            return False
        a, b = part.children
        if (self._side_of(a), self._side_of(b)) == ({1}, {0}):
            a, b = b, a
        if (self._side_of(a), self._side_of(b)) != ({0}, {1}):
            return False
        if a.kind == b.kind == "GetStructField" and a.get("ordinal") == b.get("ordinal"):
            if a.children[0].kind == b.children[0].kind == "@Window":
                # Windows of one size are equal if their starts are, or their ends.
                a, b = a.children[0], b.children[0]
        if "@Window" in (a.kind, b.kind):
            self._take_window(a, b)
        elif a.kind == b.kind == "@Column":
            if (a, b) not in self._keys:
                self._keys.append((a, b))
        else:
            raise unsupported(
                f"the condition {describe(part)} of a join is not supported",
                "join on equal columns of one type: the engine's keys are columns of the topics",
            )
        return True

    def _take_window(self, a: Node, b: Node) -> None:
        if a.kind != b.kind or a.values != b.values or a.get("how") != "tumbling":
            raise unsupported(
                f"a join on {describe(a)} and {describe(b)} is not supported",
                "use tumbling windows of the same size and start on both sides",
            )
        both = Node("@Window", (a.children[0], b.children[0]), a.values)
        if self._window is not None and self._window != both:
            raise unsupported("a join on two windows is not supported", "use one")
        self._window = both

    def _checked_window(self) -> Node:
        if self._window is None:
            raise self._no_window()
        if not self._keys:
            raise unsupported(
                "a join on a window alone is not supported", "add an equal key of both sides"
            )
        return self._window

    def _push(self, part: Node) -> None:
        """A condition of one side joins that side's, where dropping its rows early is the same."""
        sides = self._side_of(part)
        optional = {"inner": {0, 1}, "left": {1}, "right": {0}, "full": set()}[self._how]
        if len(sides) != 1 or not sides <= optional:
            raise unsupported(
                f"the condition {describe(part)} of a {self._how} join is not supported",
                "filter the result, or that side before the join",
            )
        self._pushed[sides.pop()].append(part)

    # -- the result

    def _outside(self, found: Node, side: int) -> Node:
        """A column of one side, as the join gives it."""
        if found.kind == "@Column":
            return node("@Joined", side=side, name=found.get("name"))
        if found.kind == "@Window":
            both = bounds(START, END)
            mine = self._window is not None and found == Node(
                "@Window", (self._window.children[side],), self._window.values
            )
            if not mine:
                raise unsupported(
                    f"a join that also gives {describe(found)} is not supported",
                    "drop that window before the join",
                )
            if not self._is_optional(side):
                return both
            # The window of a row that is not there is null.  A row that matched has keys; of a full
            # join a row may come without keys, but never without its event time.
            if self._how == "full":
                time = event_time(self._window_times[side])
                present = time.column if time is not None else ""
            else:
                present = self._keys[0][side].get("name")
            there = node("IsNotNull", node("@Joined", side=side, name=present))
            return node("CaseWhen", there, both)
        return found.with_children(tuple(self._outside(child, side) for child in found.children))

    def _is_optional(self, side: int) -> bool:
        return self._how in ("full", ("right", "left")[side])

    def _finish(
        self, left: Input, right: Input, window: Node, used: Sequence[Node]
    ) -> tuple[Plan, SqlText, tuple[Output, ...]]:
        wanted = []
        for expression in used:
            for part in expression.walk():
                if part.kind == "@Joined":
                    wanted.append((part.get("side"), part.get("name")))
        chosen = list(dict.fromkeys(wanted)) or [(0, self._keys[0][0].get("name"))]
        chosen.sort(key=lambda c: (c[0], list((left, right)[c[0]].types).index(c[1])))
        names = [name for _, name in chosen]
        taken = {"window_start", "window_end"}
        results: dict[tuple[int, str], str] = {}
        for side, name in chosen:
            result = name
            if names.count(name) > 1 or name in taken:
                result = f"{('left', 'right')[side]}_{name}"
            while result in taken:
                result += "_"
            taken.add(result)
            results[side, name] = result
        for keys in self._keys:
            for side, key in zip((left, right), keys):
                if side.types[key.get("name")] == "timestamp(ns)":
                    raise unsupported(
                        f"a join on {key.get('name')} is not supported: it has nanoseconds",
                        "declare it as timestamp(us)",
                    )
        plan = JoinPlan(
            left=left,
            right=right,
            left_keys=tuple(a.get("name") for a, _ in self._keys),
            right_keys=tuple(b.get("name") for _, b in self._keys),
            window=window_of(window),
            how=self._how,
            columns=tuple((side, name, results[side, name]) for side, name in chosen),
        )
        text = SqlText(
            self._session.time_zone, lambda found: results[found.get("side"), found.get("name")]
        )
        return plan, text, self._outputs(plan)

    def _outputs(self, plan: JoinPlan) -> tuple[Output, ...]:
        declared = [
            {
                column.value.get("name"): bool(column.value.get("nullable"))
                for column in side.columns
                if column.value.kind == "@Column"
            }
            for side in self._sides
        ]
        nullable = {
            result: self._is_optional(side) or declared[side].get(name, True)
            for side, name, result in plan.columns
        }
        return tuple(
            Output(
                name=field.name, type=engine_ddl(field.type),
                nullable=nullable.get(field.name, False),
            )
            for field in plan.output
        )  # fmt: skip
