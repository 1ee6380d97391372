"""Plans: friendly constructors, one form in JSON, clear refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pyarrow as pa
import pytest

from kdirect.errors import ConfigError, FormatError, KdirectError
from kdirect.format.fixed_layout import FixedLayout
from kdirect.state.aggregates import KINDS, Aggregate
from kdirect.state.expressions import column
from kdirect.state.plan import AggregatePlan, Input, JoinPlan, plan_from_json
from kdirect.state.schema import Field, fields
from kdirect.state.strict import canonical
from kdirect.state.windows import NoWindow, Session, Sliding, Tumbling

SCHEMA = "user long, name string, price double, at timestamp(ms), amount decimal(10,2), raw binary"


def input_(**changes: Any) -> Input:
    return Input(**{"topic": "bids", "schema": SCHEMA, "time": "at", **changes})


def plan(**changes: Any) -> AggregatePlan:
    values = {
        "input": input_(),
        "keys": "user",
        "window": Tumbling(size_us="10 minutes"),
        "aggregates": ["count"],
    }
    return AggregatePlan(**{**values, **changes})


def join(**changes: Any) -> JoinPlan:
    values = {
        "left": input_(name="left"),
        "right": input_(name="right", topic="sales"),
        "left_keys": "user",
        "right_keys": "user",
        "window": Tumbling(size_us="1 hour"),
    }
    return JoinPlan(**{**values, **changes})


PLANS = [
    plan(),
    plan(keys=("name", "amount"), window=NoWindow(), aggregates=[("sum", "price", "total")]),
    plan(
        input=input_(where=(column("price") > 3.5) & ~column("name").is_null(), delay_us="2 s"),
        window=Sliding(size_us="1 minute", slide_us="10 seconds"),
        aggregates=[("avg", "price"), ("last", "user"), ("approx_distinct", "name")],
        overflow="wrap",
    ),
    plan(keys=(), window=Session(gap_us="10 s"), aggregates=[("collect_list", "name")]),
    join(),
    join(how="left", window=Session(gap_us=5), columns=[(0, "price", "bid"), (1, "name", "who")]),
]


@pytest.mark.parametrize("given", PLANS, ids=range(len(PLANS)))
def test_a_plan_survives_json(given: Any) -> None:
    found = plan_from_json(canonical(given.to_json()))
    assert found == given
    assert found.hash == given.hash
    assert isinstance(found.output_schema, pa.Schema)


def test_hashes_differ_with_every_member_but_the_mode_and_overflow() -> None:
    """A job that failed fast may go on in mode PERMISSIVE, one whose sum overflowed may wrap."""
    assert plan(overflow="wrap").hash == plan().hash
    assert plan(input=input_(mode="failfast")).hash == plan(input=input_(mode="permissive")).hash
    hashes = {given.hash for given in PLANS}
    hashes |= {
        plan(input=input_(delay_us=1)).hash,
        plan(input=input_(max_ahead_us=1)).hash,
        plan(aggregates=[Aggregate(kind="count", name="n")]).hash,
    }
    assert len(hashes) == len(PLANS) + 3


def test_a_hash_is_the_same_in_another_process() -> None:
    code = (
        "import sys; from kdirect.state.plan import plan_from_json as p; print(p(sys.argv[1]).hash)"
    )
    text = canonical(PLANS[2].to_json())
    run = subprocess.run(
        [sys.executable, "-c", code, text], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == PLANS[2].hash


def test_the_result_is_what_spark_would_give() -> None:
    found = plan(
        aggregates=[
            "count", ("sum", "user"), ("sum", "price"), ("sum", "amount"), ("avg", "amount"),
            ("avg", "user"), ("min", "at"), ("stddev", "user"), ("collect_list", "name"),
        ]
    )  # fmt: skip
    assert [str(field.type) for field in found.output_schema] == [
        "int64", "timestamp[us]", "timestamp[us]", "int64", "int64", "double",
        "decimal128(20, 2)", "decimal128(14, 6)", "double", "timestamp[ms]", "double",
        "list<item: string>",
    ]  # fmt: skip
    assert found.output_schema.names[:4] == ["user", "window_start", "window_end", "count"]


def test_only_needed_columns_are_read_and_kept() -> None:
    given = plan(input=input_(where=column("price") > 1), aggregates=[("min", "amount")])
    assert given.columns_read() == ("user", "price", "at", "amount")
    assert given.columns_kept() == ("user", "amount")
    both = join(columns=[(1, "name", "who")])
    assert (both.columns_kept(0), both.columns_kept(1)) == ((), ("name",))
    assert (both.columns_decoded(0), both.columns_decoded(1)) == (("user",), ("user", "name"))
    assert (both.columns_read(0), both.columns_read(1)) == (("user", "at"), ("user", "name", "at"))


def test_names_that_both_sides_have_are_told_by_side() -> None:
    assert "left_price" in join().output_schema.names
    assert "right_price" in join().output_schema.names


def test_schemas_come_in_many_forms() -> None:
    wanted = fields("id int64, name string, cost decimal(5, 2)")
    assert fields({"id": "long", "name": "str", "cost": "decimal(5,2)"}) == wanted
    assert fields([("id", pa.int64()), ("name", pa.string()), ("cost", pa.decimal128(5, 2))]) == (
        wanted
    )
    assert fields(pa.schema([f.arrow for f in wanted])) == wanted
    assert Field(name="at", type="timestamp").type == "timestamp(us)"
    assert Field(name="at", type=str(pa.timestamp("ns", tz="UTC"))).type == "timestamp(ns)"


def test_a_layout_gives_the_schema() -> None:
    layout = FixedLayout.of("user:int64", "at:timestamp(ms)", "name:string[8]")
    given = Input(topic="t", value_format="fixed", layout=layout, time="at")
    assert given.types == {"user": "int64", "at": "timestamp(ms)", "name": "string"}
    assert Input.from_json(json.loads(canonical(given.to_json()))) == given


REFUSED = {
    "aggregate 'median'.*count": lambda: plan(aggregates=[("median", "price")]),
    "needs a column": lambda: plan(aggregates=["sum"]),
    "no column pric": lambda: plan(aggregates=[("sum", "pric")]),
    "of type string; sum takes a number": lambda: plan(aggregates=[("sum", "name")]),
    "key column price is of type float64; use integers": lambda: plan(keys="price"),
    "no key column who": lambda: plan(keys="who"),
    "key column occurs twice": lambda: plan(keys=("user", "user")),
    "no aggregate": lambda: plan(aggregates=[]),
    "two columns user": lambda: plan(aggregates=[Aggregate(kind="count", name="user")]),
    "no event time": lambda: plan(input=input_(time=None)),
    "keep every row for ever": lambda: plan(
        window=NoWindow(), aggregates=[("collect_list", "name")]
    ),
    "is no event time": lambda: input_(time="name"),
    "there is no column when": lambda: input_(time="when"),
    "where is no condition": lambda: input_(where=column("user")),
    "no column gone": lambda: input_(where=column("gone") > 1),
    "> does not go with string and int64": lambda: input_(where=column("name") > 1),
    "names no topic": lambda: Input(topic="", schema=SCHEMA),
    "fixed needs a layout": lambda: input_(value_format="fixed"),
    "json has no layout": lambda: input_(layout=FixedLayout.of("a:int8")),
    "value_format 'csv'": lambda: input_(value_format="csv"),
    "mode 'SLOPPY'": lambda: input_(mode="sloppy"),
    "column name occurs twice": lambda: input_(schema="at long, name string, name string"),
    "type 'map' is not supported": lambda: input_(schema="at map"),
    "idle_timeout_ms 0": lambda: input_(idle_timeout_ms=0),
    "no duration": lambda: input_(delay_us="a while"),
    "a sliding window is not supported for joins": lambda: join(
        window=Sliding(size_us=10, slide_us=5)
    ),
    "a none window is not supported": lambda: join(window=NoWindow()),
    "how='anti'.*inner": lambda: join(how="anti"),
    "1 left keys and 2 right keys": lambda: join(right_keys=("user", "name")),
    "key user is of type int64 and name of string": lambda: join(right_keys="name"),
    "both have one name": lambda: join(right=input_(name="left")),
    "column .* is not there": lambda: join(columns=[(0, "gone", "x")]),
    "overflow 'ignore'": lambda: plan(overflow="ignore"),
    "both read the topic bids; write the rows": lambda: join(right=input_(name="right")),
    r"\('k', 'name'\) is not there": lambda: join(columns=[("k", "name")]),
    r"\(0, 'name', ''\) is not there": lambda: join(columns=[(0, "name", "")]),
    "column 'name' is not there": lambda: join(columns=["name"]),
    "None is no window": lambda: plan(window=None),
    "'1 hour' is no window; use Tumbling": lambda: plan(window="1 hour"),
    "is no window; .*NoWindow": lambda: plan(window=NoWindow),
    "join of .*None is no window": lambda: join(window=None),
    "'t' is no input": lambda: plan(input="t"),
    "keys None are no names": lambda: plan(keys=None),
    "None are no aggregates": lambda: plan(aggregates=None),
    r"\('sum', 'price', 'a', 'b'\) is no aggregate": lambda: plan(
        aggregates=[("sum", "price", "a", "b")]
    ),
    "aggregate sum: 3 is no name": lambda: plan(aggregates=[("sum", "price", 3)]),
    "precision_bits '9'": lambda: Aggregate(kind="count", precision_bits="9"),
    "idle_timeout_ms '5 seconds'": lambda: input_(idle_timeout_ms="5 seconds"),
    "None is no schema": lambda: input_(schema=None),
    "'id long'.* is no schema": lambda: input_(schema=["id long", "at long"]),
}


def test_one_aggregate_needs_no_list() -> None:
    assert plan(aggregates="count") == plan(aggregates=["count"]) == plan(aggregates=[("count",)])
    assert join(how="LEFT").how == "left"


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_refused_names_thing_and_remedy(message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        REFUSED[message]()
    assert caught.value.hint


def mutations(value: Any) -> Any:
    """Every way to spoil one member of a JSON value."""
    for spoiled in (None, True, -1, 1 << 70, "?", [], {}, [[]], 1.5):
        if spoiled != value:
            yield spoiled
    if isinstance(value, dict):
        yield {**value, "more": 1}
        for name in value:
            yield {k: v for k, v in value.items() if k != name}
            for spoiled in mutations(value[name]):
                yield {**value, name: spoiled}
    elif isinstance(value, list):
        for i, item in enumerate(value):
            for spoiled in mutations(item):
                yield [*value[:i], spoiled, *value[i + 1 :]]


@pytest.mark.parametrize("given", PLANS, ids=range(len(PLANS)))
def test_spoiled_json_is_a_plan_or_an_error(given: Any) -> None:
    refused = 0
    for spoiled in mutations(json.loads(canonical(given.to_json()))):
        try:
            found = plan_from_json(spoiled)
        except KdirectError:
            refused += 1
        else:
            assert plan_from_json(found.to_json()) == found
    assert refused > 100


@pytest.mark.parametrize("text", ["", "{", "NaN", '{"version": 1, "version": 1}', "[1]", "null"])
def test_text_that_is_no_plan(text: str) -> None:
    with pytest.raises(FormatError):
        plan_from_json(text)


def test_a_plan_of_another_version_is_refused() -> None:
    with pytest.raises(FormatError, match="version 2"):
        plan_from_json({**plan().to_json(), "version": 2})


def test_every_kind_of_aggregate_has_a_type_for_its_result() -> None:
    for kind in KINDS:
        assert Aggregate(kind=kind, column="user").result_type({"user": "int64"})


def test_the_room_names_what_users_need() -> None:
    from kdirect import state

    for name in state.__all__:
        assert getattr(state, name).__module__.startswith(("kdirect.state.", "kdirect.format."))
    assert {*state.__all__} <= {*dir(state)}
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        state.nothing  # noqa: B018
