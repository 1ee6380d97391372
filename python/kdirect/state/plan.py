"""The plan of a job: what is read, which keys and windows, what is computed.

A plan is a value: frozen, with a form in JSON and a hash of that form, by which every process of a
job and every file of its directory recognise each other.  It is checked as a whole when it is made,
so that whatever holds a plan may rely on it; each error names the thing and the remedy.

The constructors are friendly: a schema may be a ``pa.Schema``, a mapping or text, a duration text
such as ``"10 minutes"``, an aggregate a bare string or a tuple.  What they store is canonical.
Pure; imports no I/O.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import pyarrow as pa

from kdirect.errors import ConfigError, FormatError
from kdirect.format.fixed_layout import FixedLayout, layout_of
from kdirect.state import schema as types
from kdirect.state.aggregates import NEED_TIME, Aggregate
from kdirect.state.expressions import (
    Expression,
    columns_of,
    expression_from_json,
    type_of,
)
from kdirect.state.row_limits import RowLimit, limits_of
from kdirect.state.schema import Field
from kdirect.state.strict import Members, canonical, parse, shown
from kdirect.state.windows import (
    NoWindow,
    Session,
    Tumbling,
    Window,
    duration_us,
    window_from_json,
)

VERSION = 1
VPARTS = 256  # virtual partitions: the top eight bits of a key's hash
VALUE_FORMATS = ("fixed", "json", "arrow")
MODES = ("PERMISSIVE", "FAILFAST")
OVERFLOWS = ("error", "wrap")
HOWS = ("inner", "left", "right", "full")
HOW_SYNONYMS = {
    "outer": "full", "full_outer": "full", "fullouter": "full", "left_outer": "left",
    "leftouter": "left", "right_outer": "right", "rightouter": "right",
}  # fmt: skip
TIME_UNITS = {"s": 1_000_000, "ms": 1_000, "us": 1, "ns": 1}  # microseconds each; ns is divided
WINDOW_COLUMNS = ("window_start", "window_end")
HASHABLE_KEYS = (*types.INTEGERS, "string", "binary", "date32", "bool")


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One topic and how its values become rows.

    `layout` says where values of the format ``fixed`` hold each column; `schema` then is its, and
    need not be given.  `time` is the column of event time: a timestamp, or an integer of
    `time_unit` (s, ms, us, ns) since 1970.  None is allowed where no window needs it.  `where`
    keeps the rows for which it is true.  The clock of a partition is its greatest event time less
    `delay_us`; rows that `where` drops count for it too, so that a partition of which nothing is
    kept holds no window open.  In mode PERMISSIVE a row that does not decode, or has an event time
    that is null, before 1970 or more than `max_ahead_us` after the batch's wall clock, is dropped
    and counted; in FAILFAST it ends the job.  A partition without new records for
    `idle_timeout_ms` holds no window open; None: it holds them for ever.
    """

    topic: str
    schema: tuple[Field, ...] = ()
    name: str = ""
    value_format: str = "json"
    layout: FixedLayout | None = None
    time: str | None = None
    time_unit: str = "us"
    where: Expression | None = None
    delay_us: int = 0
    mode: str = "PERMISSIVE"
    max_ahead_us: int = 3_600_000_000
    idle_timeout_ms: int | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__
        if not isinstance(self.topic, str) or not self.topic:
            raise ConfigError("input: it names no topic", hint="give topic=")
        put(self, "name", self.name or self.topic)
        self._fill_schema()
        put(self, "mode", str(self.mode).upper())
        put(self, "delay_us", duration_us(self.delay_us, f"input {self.name}: delay"))
        ahead = duration_us(self.max_ahead_us, f"input {self.name}: max_ahead_us")
        put(self, "max_ahead_us", ahead)
        self._choose("mode", MODES)
        self._choose("time_unit", tuple(TIME_UNITS))
        for name in ("delay_us", "max_ahead_us"):
            if not 0 <= getattr(self, name) <= 1 << 56:
                raise self._error(f"{name} {getattr(self, name)} is out of range", "give 0 or more")
        idle = self.idle_timeout_ms
        if idle is not None and (not isinstance(idle, int) or not 1 <= idle <= 1 << 40):
            raise self._error(
                f"idle_timeout_ms {shown(idle)} is out of range", "give 1 or more, or None"
            )
        self._check_columns()

    def _error(self, message: str, hint: str) -> ConfigError:
        return ConfigError(f"input {self.name}: {message}", hint=hint)

    def _choose(self, name: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in choices:
            raise self._error(f"{name} {shown(value)} is not known", "use " + ", ".join(choices))

    def _fill_schema(self) -> None:
        self._choose("value_format", VALUE_FORMATS)
        what = f"input {self.name}"
        if self.layout is None:
            if self.value_format == "fixed":
                raise self._error(
                    "the format fixed needs a layout", "give layout=FixedLayout.of(..)"
                )
            object.__setattr__(self, "schema", types.fields(self.schema, what))
            return
        if self.value_format != "fixed":
            raise self._error(
                f"the format {self.value_format} has no layout", "use value_format=fixed"
            )
        layout = layout_of(self.layout)
        held = types.fields(layout.schema(), what)
        if self.schema and types.fields(self.schema, what) != held:
            raise self._error("schema and layout differ", "leave the schema out")
        object.__setattr__(self, "layout", layout)
        object.__setattr__(self, "schema", held)

    def _check_columns(self) -> None:
        kinds = self.types
        if self.time is not None:
            kind = kinds.get(self.time)
            if kind is None:
                raise self._error(
                    f"there is no column {self.time} for event time",
                    "the schema has " + ", ".join(kinds),
                )
            if not kind.startswith("timestamp(") and kind not in types.INTEGERS:
                raise self._error(
                    f"column {self.time} of type {kind} is no event time",
                    "use a timestamp, or an integer and time_unit",
                )
        if self.where is not None and type_of(self.where, kinds) != "bool":
            raise self._error("where is no condition", "compare something")

    @property
    def types(self) -> dict[str, str]:
        """The type of each column."""
        return {field.name: field.type for field in self.schema}

    def to_json(self) -> dict[str, Any]:
        return {
            "topic": self.topic,
            "name": self.name,
            "schema": [field.to_json() for field in self.schema],
            "value_format": self.value_format,
            "layout": None if self.layout is None else self.layout.to_json(),
            "time": self.time,
            "time_unit": self.time_unit,
            "where": None if self.where is None else self.where.to_json(),
            "delay_us": self.delay_us,
            "mode": self.mode,
            "max_ahead_us": self.max_ahead_us,
            "idle_timeout_ms": self.idle_timeout_ms,
        }

    @classmethod
    def from_json(cls, value: Any) -> Input:
        members = Members(value, "plan: input")
        found = cls(
            topic=members.text("topic", empty=False),
            name=members.text("name", empty=False),
            schema=members.each("schema", Field.from_json),
            value_format=members.choice("value_format", VALUE_FORMATS),
            layout=members.optional("layout", FixedLayout.from_json),
            time=members.optional_text("time"),
            time_unit=members.choice("time_unit", TIME_UNITS),
            where=members.optional("where", expression_from_json),
            delay_us=members.number("delay_us", 0),
            mode=members.choice("mode", MODES),
            max_ahead_us=members.number("max_ahead_us", 0),
            idle_timeout_ms=members.optional_number("idle_timeout_ms", 1),
        )
        members.close()
        return found


def _check_keys(what: str, keys: tuple[str, ...], kinds: Mapping[str, str]) -> None:
    for key in keys:
        kind = kinds.get(key)
        if kind is None:
            raise ConfigError(
                f"{what}: there is no key column {key}", hint="the schema has " + ", ".join(kinds)
            )
        if kind not in HASHABLE_KEYS and not kind.startswith(
            ("binary[", "decimal128(", "timestamp(")
        ):
            raise ConfigError(
                f"{what}: key column {key} is of type {kind}",
                hint="use integers, strings, binary, dates, timestamps, decimals or booleans",
            )
    if len(set(keys)) != len(keys):
        raise ConfigError(f"{what}: a key column occurs twice", hint="name each key once")


def _names(given: Any) -> tuple[str, ...]:
    names = (given,) if isinstance(given, str) else given
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"plan: the keys {shown(given)} are no names of columns",
            hint='give "column" or ("column", "column")',
        )
    return tuple(names)


def _aggregates(given: Any) -> tuple[Aggregate, ...]:
    """One of what `_aggregate` takes, or a list of them."""
    if isinstance(given, str | Aggregate):
        given = (given,)
    if not isinstance(given, tuple | list):
        raise ConfigError(f"plan: {shown(given)} are no aggregates", hint=_WRITE_AGGREGATES)
    return tuple(map(_aggregate, given))


def _aggregate(given: Any) -> Aggregate:
    """An Aggregate, ``"count"``, or (kind, column) or (kind, column, name)."""
    if isinstance(given, Aggregate):
        return given
    if isinstance(given, str):
        return Aggregate(kind=given)
    if not isinstance(given, tuple | list) or not 1 <= len(given) <= 3:
        raise ConfigError(f"plan: {shown(given)} is no aggregate", hint=_WRITE_AGGREGATES)
    return Aggregate(**dict(zip(("kind", "column", "name"), given)))


_WRITE_AGGREGATES = 'write ["count", ("sum", "column"), ("avg", "column", "name in the result")]'


def _check_window(what: str, window: Any) -> None:
    if not isinstance(window, Window):
        raise ConfigError(
            f"{what}: {shown(window)} is no window",
            hint='use Tumbling(size_us="10 minutes"), Sliding(..), Session(..) or NoWindow()',
        )


def _check_inputs(*inputs: Any) -> None:
    for given in inputs:
        if not isinstance(given, Input):
            raise ConfigError(f"plan: {shown(given)} is no input", hint="give Input(topic=..)")


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregatePlan:
    """Aggregates by key and window.

    The result has the keys, ``window_start`` and ``window_end`` (unless there is no window) and the
    aggregates, in this order.  `keys` may be empty: then there is one group.  `overflow` says what
    a sum of integers that leaves int64 does: ``error`` ends the job, ``wrap`` wraps around.  One of
    decimals that leaves the digits of its type ends the job, or is null.
    """

    input: Input
    keys: tuple[str, ...]
    window: Window
    aggregates: tuple[Aggregate, ...]
    overflow: str = "error"

    def __post_init__(self) -> None:
        put = object.__setattr__
        _check_inputs(self.input)
        put(self, "keys", _names(self.keys))
        put(self, "aggregates", _aggregates(self.aggregates))
        what = f"aggregation of {self.input.name}"
        _check_window(what, self.window)
        kinds = self.input.types
        _check_keys(what, self.keys, kinds)
        if not self.aggregates:
            raise ConfigError(f"{what}: there is no aggregate", hint='add one, such as "count"')
        if not isinstance(self.window, NoWindow):
            _need_time(self.input, what)
        for aggregate in self.aggregates:
            aggregate.result_type(kinds)
            if aggregate.kind in NEED_TIME:
                _need_time(self.input, f"{what}: {aggregate.kind}")
        if isinstance(self.window, NoWindow) and any(
            aggregate.kept_as(kinds) == "list" for aggregate in self.aggregates
        ):
            raise ConfigError(
                f"{what}: collect_list without a window would keep every row for ever",
                hint="give a window",
            )
        if self.overflow not in OVERFLOWS:
            raise ConfigError(f"{what}: overflow {shown(self.overflow)} is not known",
                              hint="use error or wrap")  # fmt: skip
        _check_names(what, [field.name for field in self.output])
        self.row_limits()

    @property
    def inputs(self) -> tuple[Input, ...]:
        return (self.input,)

    @property
    def output(self) -> tuple[Field, ...]:
        """Names and types of the result; a collected list is ``list<t>``, which no input can be."""
        kinds = self.input.types
        found = [_output(key, kinds[key]) for key in self.keys]
        if not isinstance(self.window, NoWindow):
            found += [_output(name, "timestamp(us)") for name in WINDOW_COLUMNS]
        found += [_output(a.name, a.result_type(kinds)) for a in self.aggregates]
        return tuple(found)

    @property
    def output_schema(self) -> pa.Schema:
        return _arrow_schema(self.output)

    def columns_read(self, side: int = 0) -> tuple[str, ...]:
        """Columns of the input that must be decoded, in the order of its schema."""
        used = {*self.keys, *columns_of(self.input.where)}
        used |= {a.column for a in self.aggregates if a.column is not None}
        used |= {self.input.time} if self.input.time is not None else set()
        return _ordered(self.input, used)

    def columns_kept(self, side: int = 0) -> tuple[str, ...]:
        """Columns whose values reach the state: neither the condition's nor the event time's."""
        return _ordered(
            self.input, {*self.keys, *(a.column for a in self.aggregates if a.column is not None)}
        )

    def columns_decoded(self, side: int = 0) -> tuple[str, ...]:
        """Columns that the state is given: what it keeps has the keys."""
        return self.columns_kept(side)

    def row_limits(self, side: int = 0, page_bytes: int | None = None) -> tuple[RowLimit, ...]:
        """How long the keys and values of a row may be, where deltas have pages of this size."""
        kinds = self.input.types
        used = [(a.kept_as(kinds), a.column) for a in self.aggregates if a.column is not None]
        # Where there is a list, rows are kept, with what every aggregate takes.
        rows = any(how == "list" for how, _ in used)
        kept = [name for _, name in used] if rows else []
        alone = [name for how, name in used if how in ("text", "set")]
        states = 0 if rows else sum(a.most_state_bytes for a in self.aggregates)
        return limits_of(
            kinds, key=self.keys, kept=kept, alone=alone, states=states, page_bytes=page_bytes
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "plan": "aggregate",
            "input": self.input.to_json(),
            "keys": list(self.keys),
            "window": self.window.to_json(),
            "aggregates": [aggregate.to_json() for aggregate in self.aggregates],
            "overflow": self.overflow,
        }

    @property
    def hash(self) -> str:
        return plan_hash(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinPlan:
    """Rows of two inputs with equal keys in the same window.

    `columns` are (side, column, name in the result) with side 0 for left and 1 for right; by
    default all columns of both, where a name that both have gets ``left_`` or ``right_`` before it.
    Keys never match if one is null.  With `how` left or right the rows of that side that match
    nothing in their window are given too, with nulls for the other side; with full those of both
    sides.
    """

    left: Input
    right: Input
    left_keys: tuple[str, ...]
    right_keys: tuple[str, ...]
    window: Window
    how: str = "inner"
    columns: tuple[tuple[int, str, str], ...] = ()

    def __post_init__(self) -> None:
        put = object.__setattr__
        _check_inputs(self.left, self.right)
        put(self, "left_keys", _names(self.left_keys))
        put(self, "right_keys", _names(self.right_keys))
        how = str(self.how).lower()
        put(self, "how", HOW_SYNONYMS.get(how, how))
        what = f"join of {self.left.name} and {self.right.name}"
        if self.left.name == self.right.name:
            raise ConfigError(f"{what}: both have one name", hint="give one of them another name=")
        if self.left.topic == self.right.topic:
            raise ConfigError(
                f"{what}: both read the topic {self.left.topic}",
                hint="write the rows of one side to a topic of their own: each partition is read"
                " once, for one side",
            )
        if self.how not in HOWS:
            raise ConfigError(f"{what}: how={shown(self.how)} is not supported",
                              hint="use " + ", ".join(HOWS))  # fmt: skip
        _check_window(what, self.window)
        if not isinstance(self.window, Tumbling | Session):
            raise ConfigError(
                f"{what}: a {self.window.kind} window is not supported for joins",
                hint="use a tumbling or a session window, which bounds what must be kept",
            )
        for given in self.inputs:
            _need_time(given, what)
        self._check_join_keys(what)
        put(self, "columns", self._columns(what))
        _check_names(what, [field.name for field in self.output])
        for side in (0, 1):
            self.row_limits(side)

    def _check_join_keys(self, what: str) -> None:
        _check_keys(f"{what}: left", self.left_keys, self.left.types)
        _check_keys(f"{what}: right", self.right_keys, self.right.types)
        if not self.left_keys or len(self.left_keys) != len(self.right_keys):
            raise ConfigError(
                f"{what}: {len(self.left_keys)} left keys and {len(self.right_keys)} right keys",
                hint="give as many on both sides, at least one",
            )
        for left, right in zip(self.left_keys, self.right_keys):
            kinds = self.left.types[left], self.right.types[right]
            if kinds[0] != kinds[1]:
                raise ConfigError(
                    f"{what}: key {left} is of type {kinds[0]} and {right} of {kinds[1]}",
                    hint="declare both with the same type",
                )

    def _columns(self, what: str) -> tuple[tuple[int, str, str], ...]:
        if not self.columns:
            both = {*self.left.types} & {*self.right.types}
            return tuple(
                (side, name, f"{('left_', 'right_')[side]}{name}" if name in both else name)
                for side, given in enumerate(self.inputs)
                for name in given.types
            )
        for given in self.columns:
            if not self._is_column(given):
                raise ConfigError(
                    f"{what}: column {shown(given)} is not there",
                    hint="give (0, name of a left column, result) or (1, right column, result)",
                )
        return tuple((side, name, result) for side, name, result in self.columns)

    def _is_column(self, given: Any) -> bool:
        if not isinstance(given, tuple | list) or len(given) != 3:
            return False
        side, name, result = given
        is_there = side in (0, 1) and name in self.inputs[side].types
        return is_there and isinstance(result, str) and bool(result)

    @property
    def inputs(self) -> tuple[Input, ...]:
        return (self.left, self.right)

    @property
    def output(self) -> tuple[Field, ...]:
        """Names and types of the result: the window, then the chosen columns."""
        return tuple(
            [_output(name, "timestamp(us)") for name in WINDOW_COLUMNS]
            + [_output(n, self.inputs[side].types[name]) for side, name, n in self.columns]
        )

    @property
    def output_schema(self) -> pa.Schema:
        return _arrow_schema(self.output)

    def keys_of(self, side: int) -> tuple[str, ...]:
        return (self.left_keys, self.right_keys)[side]

    def gives_back(self, side: int) -> bool:
        """Are rows of this side that match nothing in the result?"""
        return self.how in (("left", "right")[side], "full")

    def columns_read(self, side: int) -> tuple[str, ...]:
        """Columns of this side that must be decoded, in the order of its schema."""
        given = self.inputs[side]
        used = {*self.keys_of(side), *columns_of(given.where), *self.columns_kept(side)}
        return _ordered(given, used | ({given.time} if given.time is not None else set()))

    def columns_kept(self, side: int) -> tuple[str, ...]:
        """Columns of this side that the result needs.  Nothing else of a row is kept but its key
        and window."""
        return _ordered(self.inputs[side], {name for s, name, _ in self.columns if s == side})

    def columns_decoded(self, side: int) -> tuple[str, ...]:
        """Columns that the state is given: keys, and what it keeps."""
        return _ordered(self.inputs[side], {*self.keys_of(side), *self.columns_kept(side)})

    def row_limits(self, side: int, page_bytes: int | None = None) -> tuple[RowLimit, ...]:
        """How long the keys of a row, and what is kept of it, may be, where deltas have pages of
        this size."""
        return limits_of(
            self.inputs[side].types,
            key=self.keys_of(side),
            kept=self.columns_kept(side),
            page_bytes=page_bytes,
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "plan": "join",
            "left": self.left.to_json(),
            "right": self.right.to_json(),
            "left_keys": list(self.left_keys),
            "right_keys": list(self.right_keys),
            "window": self.window.to_json(),
            "how": self.how,
            "columns": [list(column) for column in self.columns],
        }

    @property
    def hash(self) -> str:
        return plan_hash(self)


Plan: TypeAlias = AggregatePlan | JoinPlan


def _need_time(given: Input, what: str) -> None:
    if given.time is None:
        raise ConfigError(
            f"{what}: input {given.name} has no event time", hint="give time=, the name of a column"
        )


def _ordered(given: Input, used: set[str] | frozenset[str]) -> tuple[str, ...]:
    return tuple(name for name in given.types if name in used)


class _Result(Field):
    """A column of a result: its type is derived, and may be a list."""

    __slots__ = ()

    def __post_init__(self) -> None:
        pass


def _output(name: str, kind: str) -> Field:
    return _Result(name=name, type=kind)


def _arrow_schema(output: tuple[Field, ...]) -> pa.Schema:
    return pa.schema([field.arrow for field in output])


def _check_names(what: str, names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"{what}: the result would have two columns {name}", hint="name them differently"
            )


# -- JSON ------------------------------------------------------------------------------------------


def identity_of(plan: Plan) -> dict[str, Any]:
    """The plan as JSON, without what may change from one start of a job to the next: the mode of
    its inputs, and what overflow does.  What a job in mode FAILFAST has committed had no bad row,
    so in mode PERMISSIVE it goes on as if it had always been in that mode; likewise from
    ``overflow=error`` to ``wrap``.  (That it does not go back the directory of the job sees to.)"""
    found = plan.to_json()
    found.pop("overflow", None)
    for name in ("input", "left", "right"):
        if name in found:
            found[name] = {key: value for key, value in found[name].items() if key != "mode"}
    return found


def plan_hash(plan: Plan) -> str:
    """32 hex digits of its identity, the same in every process and on every machine."""
    return hashlib.sha256(canonical(identity_of(plan)).encode()).hexdigest()[:32]


def plan_from_json(value: Any) -> Plan:
    """The plan that `to_json` wrote, from the object or its text.

    Raises FormatError for what is no plan, and ConfigError for one that is not supported."""
    if isinstance(value, str | bytes):
        value = parse(value, "plan")
    members = Members(value, "plan")
    version = members.number("version")
    if version != VERSION:
        raise FormatError(
            f"plan: version {version} is not known", hint=f"this build of kdirect knows {VERSION}"
        )
    found: Plan
    if members.choice("plan", ("aggregate", "join")) == "aggregate":
        found = AggregatePlan(
            input=Input.from_json(members.take("input")),
            keys=members.texts("keys"),
            window=window_from_json(members.take("window")),
            aggregates=members.each("aggregates", Aggregate.from_json),
            overflow=members.choice("overflow", OVERFLOWS),
        )
    else:
        found = JoinPlan(
            left=Input.from_json(members.take("left")),
            right=Input.from_json(members.take("right")),
            left_keys=members.texts("left_keys"),
            right_keys=members.texts("right_keys"),
            window=window_from_json(members.take("window")),
            how=members.choice("how", HOWS),
            columns=members.each("columns", _column_from_json),
        )
    members.close()
    return found


def _column_from_json(value: Any) -> tuple[int, str, str]:
    if not isinstance(value, list) or [type(part) for part in value] != [int, str, str]:
        raise FormatError(f"plan: column {shown(value)} is not [side, name, result]")
    return value[0], value[1], value[2]
