"""What the reader of plans takes and gives: the leaves of a DataFrame, and the plan of the engine
with what Spark still does above it.

Values only, frozen; a `SlashPlan` has a form in JSON, which is checked when it is read.  Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kdirect.format.fixed_layout import FixedLayout
from kdirect.state.plan import WINDOW_COLUMNS, Plan, plan_from_json
from kdirect.state.schema import Field
from kdirect.state.strict import Members, canonical, parse
from kdirect.state.windows import NoWindow, Sliding, Tumbling

VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One relation of the plan, as its options describe it.

    `source` is the name of its data source.  `value_format` is "" where there is none: then the
    relation has the columns of Kafka's connector.  `fields` are the columns of the value in the
    engine's types; the engine cannot read what else the relation has.
    """

    topic: str
    value_format: str
    fields: tuple[Field, ...]
    layout: FixedLayout | None = None
    mode: str = "PERMISSIVE"
    is_streaming: bool = True
    idle_timeout_ms: int | None = None
    max_ahead_us: int = 3_600_000_000
    source: str = "kdirect"


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A column that the engine gives, as Spark must declare it: `type` is DDL."""

    name: str
    type: str
    nullable: bool

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "type": self.type, "nullable": self.nullable}

    @classmethod
    def from_json(cls, value: Any) -> Output:
        members = Members(value, "slash plan: output")
        found = cls(
            name=members.text("name", empty=False),
            type=members.text("type", empty=False),
            nullable=members.boolean("nullable"),
        )
        members.close()
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultColumn:
    """A column of the DataFrame: its declaration, and what it is in SQL over the `outputs`."""

    name: str
    type: str
    nullable: bool
    sql: str

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name, "type": self.type, "nullable": self.nullable, "sql": self.sql,
        }  # fmt: skip

    @classmethod
    def from_json(cls, value: Any) -> ResultColumn:
        members = Members(value, "slash plan: column")
        found = cls(
            name=members.text("name"),
            type=members.text("type", empty=False),
            nullable=members.boolean("nullable"),
            sql=members.text("sql", empty=False),
        )
        members.close()
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class SlashPlan:
    """A DataFrame, divided: `plan` is the engine's part, and Spark keeps the rows for which
    `having` is true and selects `columns` of them.

    `leaves[i]` is the number of the leaf that feeds ``plan.inputs[i]``.  `outputs` are the columns
    of ``plan.output`` as Spark declares them; timestamps are microseconds UTC there.
    """

    plan: Plan
    leaves: tuple[int, ...]
    is_streaming: bool
    outputs: tuple[Output, ...]
    columns: tuple[ResultColumn, ...]
    having: str | None = None

    @property
    def output_mode(self) -> str:
        """What the rows of a stream are: ``append`` once for each window, or ``update``."""
        return "update" if isinstance(self.plan.window, NoWindow) else "append"

    @property
    def constant_outputs(self) -> tuple[int, ...]:
        """Those of `outputs` that change only from window to window, as the engine gives the rows
        of one tumbling or sliding window after those of another.  Some other output is left."""
        found = WINDOW_COLUMNS if isinstance(self.plan.window, Tumbling | Sliding) else ()
        places = tuple(i for i, field in enumerate(self.plan.output) if field.name in found)
        return places if len(places) < len(self.outputs) else ()

    @property
    def output_ddl(self) -> str:
        """The declaration of `outputs`, for example for `mapInArrow`."""
        return ", ".join(
            f"`{o.name.replace('`', '``')}` {o.type}{'' if o.nullable else ' NOT NULL'}"
            for o in self.outputs
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "plan": self.plan.to_json(),
            "leaves": list(self.leaves),
            "is_streaming": self.is_streaming,
            "outputs": [output.to_json() for output in self.outputs],
            "columns": [column.to_json() for column in self.columns],
            "having": self.having,
        }

    def to_text(self) -> str:
        return canonical(self.to_json())

    @classmethod
    def from_json(cls, value: Any) -> SlashPlan:
        """The plan that `to_json` wrote, from the object or its text.  Raises FormatError or
        ConfigError."""
        if isinstance(value, str | bytes):
            value = parse(value, "slash plan")
        members = Members(value, "slash plan")
        members.number("version", VERSION, VERSION)
        found = cls(
            plan=plan_from_json(members.take("plan")),
            leaves=members.numbers("leaves", 0, 1 << 16),
            is_streaming=members.boolean("is_streaming"),
            outputs=members.each("outputs", Output.from_json),
            columns=members.each("columns", ResultColumn.from_json),
            having=members.optional_text("having"),
        )
        members.close()
        return found
