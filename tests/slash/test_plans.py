"""Analyzed plans of Spark, as files, read to plans of the engine.  No Spark is started."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kdirect.errors import ConfigError, FormatError, KdirectError, UnsupportedPlanError
from kdirect.state.schema import Field
from kdirect.state.windows import NoWindow
from kdirect_spark.slash import SlashPlan, read_plan, read_tree
from kdirect_spark.slash.catalyst import interval_us
from kdirect_spark.slash.explanation import explained
from tests.slash import queries
from tests.slash.make_plans import PLANS, read

VERSIONS = sorted(path.name for path in PLANS.iterdir() if path.is_dir())
CASES = [(version, name) for version in VERSIONS for name in queries.SUPPORTED]


@functools.cache
def kept(version: str, name: str) -> dict:
    return json.loads((PLANS / version / f"{name}.json").read_text())


def supported(name: str, version: str = VERSIONS[-1], **more) -> SlashPlan:
    leaves = queries.SUPPORTED[name][1]
    return read(kept(version, name), more.pop("leaves", leaves), queries.ZONES.get(name, "UTC"))


def refused(name: str, leaves) -> UnsupportedPlanError:
    with pytest.raises(UnsupportedPlanError) as e:
        read(kept(VERSIONS[-1], name), leaves)
    return e.value


@pytest.mark.parametrize(("version", "name"), CASES)
def test_reads_to_the_slash_plan_that_is_kept(version, name):
    found = supported(name, version)
    expected = json.loads((PLANS / version / f"{name}.slash.json").read_text())
    assert found.to_json() == expected
    assert SlashPlan.from_json(found.to_text()) == found
    assert [o.name for o in found.outputs] == [f.name for f in found.plan.output]


@pytest.mark.parametrize("name", queries.REFUSED)
def test_refuses_by_name_with_a_remedy(name):
    _, leaves, words = queries.REFUSED[name]
    error = refused(f"refused-{name}", leaves)
    assert error.message.startswith("accelerate: ")
    assert error.hint.endswith("run this DataFrame unwrapped")
    for word in words:
        assert word in str(error)


def test_sums_overflow_as_the_session_says():
    for ansi, overflow in ((True, "error"), (False, "wrap")):
        found = read(kept(VERSIONS[-1], "tumbling"), queries.ONE, ansi=ansi)
        assert found.plan.overflow == overflow


def test_what_a_stream_gives():
    assert supported("tumbling").output_mode == "append"
    assert supported("no-window").output_mode == "update"
    assert isinstance(supported("no-window").plan.window, NoWindow)
    assert supported("fixed").output_ddl == (
        "`name` string, `window_start` timestamp_ltz NOT NULL,"
        " `window_end` timestamp_ltz NOT NULL, `sum(x)` bigint, `max(id)` bigint"
    )


def test_rows_without_event_time_count_where_no_window_needs_it():
    """`ts is not null` stays a condition only where the engine does not drop such rows itself."""
    assert supported("no-window").plan.input.where is not None
    assert supported("tumbling-offset").plan.input.where is None


def _leaf(**changes):
    base = {"topic": "t", "held": queries.FEW, **changes}
    return (queries.leaf(base.pop("topic"), base.pop("held"), base.pop("streaming", True), **base),)


def test_nanoseconds_are_refused_where_spark_would_not_see_them():
    held = tuple(
        Field(name=f.name, type="timestamp(ns)" if f.name == "ts" else f.type)
        for f in queries.COLUMNS
    )
    error = refused("every-key", (queries.leaf(held=held, streaming=False),))
    assert "groupBy of ts" in str(error) and "nanoseconds" in str(error)
    error = refused("london", _leaf(held=held[:2] + held[7:8]))
    assert "column ts has nanoseconds" in str(error)
    found = supported("tumbling", leaves=_leaf(held=held[:2] + held[7:8]))
    assert found.plan.input.types["ts"] == "timestamp(ns)"  # a window of them is the same


@pytest.mark.parametrize(
    ("leaves", "words"),
    [
        ((), "more than 0 relations"),
        (queries.TWO, "2 leaves are described"),
        (_leaf(streaming=False), "described as a batch"),
        (_leaf(held=(Field(name="id", type="string"), *queries.FEW[1:])), "column id of topic t"),
        (_leaf(held=queries.FEW[:2]), "ts"),
    ],
)
def test_leaves_that_do_not_fit_the_plan(leaves, words):
    with pytest.raises(ConfigError) as e:
        read(kept(VERSIONS[-1], "tumbling"), leaves)
    assert words in str(e.value)


def test_the_engines_own_rules_come_as_refusals():
    """A slide that does not divide the size makes more slices than the engine takes."""
    given = copy.deepcopy(kept(VERSIONS[-1], "tumbling"))
    given["plan"] = given["plan"].replace('"600000000"', '"6000000000000000"')
    with pytest.raises(UnsupportedPlanError, match="window size"):
        read(given, queries.ONE)


# -- the text --------------------------------------------------------------------------------------


def test_a_watermark_whose_delay_is_not_told_and_a_text_that_is_cut_are_errors():
    given = kept(VERSIONS[-1], "tumbling")
    for text, words in (
        (given["text"].replace("EventTimeWatermark", "Other"), "delay"),
        (given["text"] + "... 3 more fields", "cut short"),
        (given["text"].replace("10 seconds", "some time"), "some time"),
        ("", "missing"),
    ):
        with pytest.raises(FormatError) as e:
            read_tree(given["plan"], text)
        assert words in str(e.value)


def test_intervals_as_spark_writes_them():
    minute = 60_000_000
    assert interval_us("1 minutes 0.5 seconds") == minute + 500_000
    assert interval_us("-0.5 seconds") == -500_000
    assert interval_us("1 months 2 days") == 33 * 24 * 60 * minute
    for text in ("", "1", "soon", "1 fortnights", "1 minutes and"):
        assert interval_us(text) is None


# -- forged plans ----------------------------------------------------------------------------------

SOME = ["tumbling", "sliding-uneven", "session", "having", "sql", "join-using-full", "fixed"]


@st.composite
def mutations(draw):
    """A plan with a few of its values replaced, taken away, doubled or exchanged."""
    name = draw(st.sampled_from(SOME))
    given = kept(VERSIONS[-1], name)
    nodes = json.loads(given["plan"])
    for _ in range(draw(st.integers(1, 3))):
        where = nodes
        for _ in range(draw(st.integers(1, 8))):
            if not isinstance(where, list | dict) or not where:
                break
            keys = list(where) if isinstance(where, dict) else range(len(where))
            key = draw(st.sampled_from(list(keys)))
            last, where = where, where[key]
            if isinstance(where, str | int) or where is None:
                break
        change = draw(st.integers(0, 5))
        if change == 0:
            del last[key]
        elif change == 1 and isinstance(last, list):
            last.insert(key, copy.deepcopy(last[key]))
        elif change == 2 and isinstance(last, list):
            other = draw(st.integers(0, len(last) - 1))
            last[key], last[other] = last[other], last[key]
        else:
            last[key] = draw(VALUES)
    return name, json.dumps(nodes)


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 3), st.integers(), st.text(max_size=5),
    st.sampled_from(["long", "string", "timestamp", "decimal(3,9)", "9" * 30, "\ud800", "NaN"]),
    st.just([]), st.just({}), st.lists(st.integers(), max_size=2),
    st.sampled_from(["Cast", "Sum", "And", "Project", "Join", "Literal", "CaseWhen"])
    .map("org.apache.spark.sql.catalyst.expressions.{}".format),
)  # fmt: skip


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(mutations())
def test_a_forged_plan_raises_errors_of_kdirect_only(made):
    name, plan = made
    given_plan = kept(VERSIONS[-1], name)
    try:
        tree = read_tree(plan, given_plan["text"])
        found = read_plan(
            tree, queries.SUPPORTED[name][1], schema=given_plan["schema"], ansi=True,
            time_zone="UTC",
        )  # fmt: skip
    except KdirectError:
        return
    assert SlashPlan.from_json(found.to_text()) == found


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(SOME), st.binary(min_size=1, max_size=8), st.integers(0, 1 << 20))
def test_damaged_text_raises_errors_of_kdirect_only(name, noise, at):
    given_plan = kept(VERSIONS[-1], name)
    plan = given_plan["plan"].encode()
    at %= len(plan)
    plan = plan[:at] + noise + plan[at + len(noise) :]
    try:
        read({**given_plan, "plan": plan}, queries.SUPPORTED[name][1])
    except KdirectError:
        pass


def test_a_plan_that_is_too_deep_is_refused():
    node = json.loads(kept(VERSIONS[-1], "no-window")["plan"])
    project = {
        "class": "org.apache.spark.sql.catalyst.plans.logical.SubqueryAlias",
        "num-children": 1, "identifier": None, "child": 0,
    }  # fmt: skip
    for depth, refusal in ((100, False), (100_000, True)):
        plan = json.dumps([project] * depth + node)
        given = {**kept(VERSIONS[-1], "no-window"), "plan": plan}
        if refusal:
            with pytest.raises(UnsupportedPlanError, match="deep"):
                read(given, queries.ONE)
        else:
            assert read(given, queries.ONE) == supported("no-window")


def test_columns_that_double_at_each_step_are_refused():
    """A column that stands twice in the next one, forty times over, would be 2**40 parts."""

    def attribute(key):
        return {
            "class": "org.apache.spark.sql.catalyst.expressions.AttributeReference",
            "num-children": 0, "name": "n", "dataType": "integer", "nullable": True,
            "exprId": {"id": key},
        }  # fmt: skip

    nodes = json.loads(kept(VERSIONS[-1], "no-window")["plan"])
    relation = nodes[-1]
    key = relation["output"][0][0]["exprId"]["id"]
    steps = []
    for i in range(40):
        alias = {
            "class": "org.apache.spark.sql.catalyst.expressions.Alias", "num-children": 1,
            "name": "n", "exprId": {"id": 10_000 + i},
        }  # fmt: skip
        add = {"class": "org.apache.spark.sql.catalyst.expressions.Add", "num-children": 2}
        step = {
            "class": "org.apache.spark.sql.catalyst.plans.logical.Project", "num-children": 1,
            "projectList": [[alias, add, attribute(key), attribute(key)]],
        }  # fmt: skip
        steps.append(step)
        key = 10_000 + i
    given = {**kept(VERSIONS[-1], "no-window"), "plan": json.dumps([*steps[::-1], relation])}
    with pytest.raises(UnsupportedPlanError, match="more than"):
        read(given, queries.ONE)


# -- explain ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("having", {"executors": 3}),
        ("fixed", {"executors": 1}),
        ("sliding-uneven", {"executors": 2}),
        ("join-using-full", {"executors": 4, "mode": "uppar", "layout": "split"}),
        ("no-window", {"executors": 2, "mode": "uppar"}),
    ],
)
def test_explain_says_who_does_what(name, more):
    text = explained(supported(name), epoch_bytes=64 << 20, **more)
    golden = Path(__file__).parent / "explained" / f"{name}.txt"
    assert text == golden.read_text()
