"""What may be computed of the rows of one key and window: the kinds of aggregates.

The table says for each kind which columns it takes and which type its result has; results and
nulls follow Spark: ``count`` of a column leaves nulls out, an aggregate of nothing but nulls is
null, a sum of integers is int64, an average is a float64 unless it is of a decimal.  How a kind is
stored, updated and merged is the kernels' affair.  Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from kdirect.errors import ConfigError
from kdirect.state import schema as types
from kdirect.state.strict import Members, shown


class Kind(NamedTuple):
    """One kind of aggregate.

    `takes` says which columns: numbers, any, or none (no column at all is allowed too).  `kept_as`
    says what its state is: a cell of fixed width (or a text, if the values of the column have no
    fixed width of at most 16 bytes), a set of values, or a list of all of them.
    """

    name: str
    takes: str
    help: str
    kept_as: str = "cell"


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("count", "none", "rows, or rows whose column is not null"),
        Kind("sum", "numbers", "the sum; of integers as int64"),
        Kind("min", "any", "the least value; of strings and binary by their bytes"),
        Kind("max", "any", "the greatest value; of strings and binary by their bytes"),
        Kind("avg", "numbers", "the average"),
        Kind("stddev_samp", "numbers", "the standard deviation of a sample"),
        Kind("stddev_pop", "numbers", "the standard deviation of the population"),
        Kind("var_samp", "numbers", "the variance of a sample"),
        Kind("var_pop", "numbers", "the variance of the population"),
        Kind("first", "any", "the value of the earliest row in event time"),
        Kind("last", "any", "the value of the latest row in event time"),
        Kind("approx_count_distinct", "any", "about how many different values (HyperLogLog)"),
        Kind("collect_list", "any", "all values, in no particular order", kept_as="list"),
        Kind("collect_set", "any", "each value once, in no particular order", kept_as="set"),
    )
}
SYNONYMS = {
    "mean": "avg",
    "average": "avg",
    "stddev": "stddev_samp",
    "std": "stddev_samp",
    "variance": "var_samp",
    "approx_distinct": "approx_count_distinct",
    "list": "collect_list",
    "set": "collect_set",
}
# first and last need the event time of a row to be comparable between executors.
NEED_TIME = ("first", "last")
EXTREMES = ("min", "max", *NEED_TIME)


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregate:
    """One aggregate: its kind, the column that it reads (None: rows) and the name of its result.

    `precision_bits` belongs to approx_count_distinct: 2**precision_bits registers of one byte; the
    standard error is about 1.04 / sqrt of that."""

    kind: str
    column: str | None = None
    name: str = ""
    precision_bits: int = 9

    def __post_init__(self) -> None:
        kind = SYNONYMS.get(str(self.kind), str(self.kind))
        if kind not in KINDS:
            raise ConfigError(
                f"aggregate {shown(self.kind)}: it is not supported",
                hint="use one of " + ", ".join(KINDS),
            )
        if self.column is None and kind != "count":
            raise ConfigError(f"aggregate {kind}: it needs a column", hint="name the column")
        if self.name and not isinstance(self.name, str):
            raise ConfigError(f"aggregate {kind}: {shown(self.name)} is no name", hint="give text")
        if not isinstance(self.precision_bits, int) or not 4 <= self.precision_bits <= 16:
            raise ConfigError(
                f"aggregate {kind}: precision_bits {shown(self.precision_bits)} is out of range",
                hint="give 4 to 16",
            )
        object.__setattr__(self, "kind", kind)
        if not self.name:
            object.__setattr__(self, "name", f"{kind}({self.column})" if self.column else kind)

    def kept_as(self, kinds: Mapping[str, str]) -> str:
        """What the state of this aggregate is, over columns of these types: cell, text, set or
        list.  A text is the one value that won, of any length."""
        kind = "" if self.column is None else kinds[self.column]
        if self.kind in EXTREMES and (types.width_of(kind) is None or kind.startswith("binary")):
            return "text"
        return KINDS[self.kind].kept_as

    @property
    def most_state_bytes(self) -> int:
        """Bytes of its state in an entry of a delta, at most, without the bytes of a text."""
        return 32 + (1 << self.precision_bits if self.kind == "approx_count_distinct" else 0)

    def result_type(self, kinds: Mapping[str, str]) -> str:
        """The type of the result over columns of these types.  Raises ConfigError if the column is
        not there or of a type that this kind does not take."""
        if self.column is None:
            return "int64"
        kind = kinds.get(self.column)
        if kind is None:
            raise ConfigError(
                f"aggregate {self.name}: there is no column {self.column}",
                hint="the schema has " + ", ".join(kinds),
            )
        if KINDS[self.kind].takes == "numbers" and not types.is_number(kind):
            raise ConfigError(
                f"aggregate {self.name}: column {self.column} is of type {kind}",
                hint=f"{self.kind} takes a number",
            )
        return _result(self.kind, kind)

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "column": self.column,
            "name": self.name,
            "precision_bits": self.precision_bits,
        }

    @classmethod
    def from_json(cls, value: Any) -> Aggregate:
        members = Members(value, "plan: aggregate")
        found = cls(
            kind=members.choice("kind", KINDS),
            column=members.optional_text("column"),
            name=members.text("name", empty=False),
            precision_bits=members.number("precision_bits", 4, 16),
        )
        members.close()
        return found


def _result(kind: str, column: str) -> str:
    if kind in ("count", "approx_count_distinct"):
        return "int64"
    if kind in EXTREMES:
        return column
    if kind in ("collect_list", "collect_set"):
        return f"list<{column}>"
    if types.is_decimal(column) and kind in ("sum", "avg"):
        precision, scale = types.decimal_of(column)
        if kind == "sum":
            return f"decimal128({min(38, precision + 10)},{scale})"
        return f"decimal128({min(38, precision + 4)},{min(38, scale + 4)})"
    if kind == "sum" and column in types.INTEGERS:
        return "int64"
    return "float64"
