"""Control rows, epoch offsets and clusters: what is taken, and what each refusal says."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdirect.errors import CheckpointError, ConfigError, StateProtocolError
from kdirect.state import ExecutorSettings
from kdirect_spark.epoch_offset import MEMBER, EpochOffset, new_query, refuse_accelerated
from kdirect_spark.slash.control_row import BatchRow, ControlRow, row_of
from kdirect_spark.slash.job_spec import JobSpec
from kdirect_spark.slash.query import check_cluster
from kdirect_spark.slash.session_facts import Cluster

SETTINGS = ExecutorSettings(
    host="127.0.0.1", port=4000, token="t" * 32, executor=0, executors=3, memory="/dev/shm/x"
)
ROW = ControlRow(batch=7, task=2, settings=SETTINGS)
BATCH_ROW = BatchRow(
    run="r", task=1, executors=2, host="127.0.0.1", port=4000, token="t", request="{}"
)


@pytest.mark.parametrize("row", [ROW, BATCH_ROW])
def test_a_row_comes_back(row):
    assert row_of(row.to_text()) == row


def _changed(row, **members):
    return json.dumps(json.loads(row.to_text()) | members)


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "x",
        "[]",
        "{}",
        '{"version": 1}',
        _changed(ROW, version=2),
        _changed(ROW, task=3),
        _changed(ROW, task=-1),
        _changed(ROW, task=True),
        _changed(ROW, batch=-1),
        _changed(ROW, batch="1"),
        _changed(ROW, more=1),
        _changed(ROW, executor_settings={}),
        _changed(ROW, executor_settings=None),
        _changed(BATCH_ROW, task=2),
        _changed(BATCH_ROW, executors=257),
        _changed(BATCH_ROW, port=1 << 16),
        _changed(BATCH_ROW, token=""),
        _changed(BATCH_ROW, request=None),
        _changed(BATCH_ROW, more=1),
    ],
)
def test_a_forged_row_is_refused(text):
    with pytest.raises(StateProtocolError, match="a control row of an accelerated query") as e:
        row_of(text)
    assert "nothing may stand between" in e.value.hint


@given(st.binary(max_size=200), st.integers(0, 400))
def test_a_damaged_row_is_refused_or_is_one(noise, at):
    text = ROW.to_text()
    damaged = text[:at] + noise.decode("latin-1") + text[at + len(noise) :]
    try:
        row_of(damaged)
    except StateProtocolError:
        pass


def test_an_offset_comes_back_as_equal_text():
    offset = EpochOffset(query=new_query(), epoch=3, offsets={"b": {"0": 1}, "a": {"1": 2}})
    text = json.dumps(offset.to_json())
    assert EpochOffset.from_json(json.loads(text)) == offset
    assert list(offset.to_json()) == [MEMBER, "a", "b"]
    assert offset.of(["b", "c"]) == {"b": {"0": 1}}


def test_the_checkpoint_of_an_unwrapped_query_is_refused():
    with pytest.raises(CheckpointError, match=r"not wrapped by slash\.accelerate") as e:
        EpochOffset.from_json({"a": {"0": 1}})
    assert "may be swapped over a restart only with a new checkpoint" in e.value.hint


def test_the_checkpoint_of_a_wrapped_query_is_refused_by_the_plain_source():
    offset = EpochOffset(query="q", epoch=0, offsets={"a": {"0": 1}}).to_json()
    with pytest.raises(CheckpointError, match=r"was wrapped by slash\.accelerate") as e:
        refuse_accelerated(offset)
    assert "may be swapped over a restart only with a new checkpoint" in e.value.hint
    refuse_accelerated({"a": {"0": 1}})


@pytest.mark.parametrize(
    "head", [None, {}, {"query": "q"}, {"epoch": 1}, {"query": "", "epoch": 1},
             {"query": "q", "epoch": -1}, {"query": "q", "epoch": "1"}]
)  # fmt: skip
def test_a_damaged_offset_is_refused(head):
    with pytest.raises(CheckpointError, match="damaged"):
        EpochOffset.from_json({MEMBER: head, "a": {"0": 1}})


def _cluster(**more) -> Cluster:
    given = {"slots": 4, "dynamic_allocation": False, "is_local": True, "driver_host": "h"}
    return Cluster(**(given | more))


def test_as_many_tasks_run_as_there_are_slots():
    assert check_cluster(_cluster(), None) == 4
    assert check_cluster(_cluster(), 3) == 3
    assert check_cluster(_cluster(slots=1000), None) == 256


@pytest.mark.parametrize(
    ("cluster", "executors", "said"),
    [
        (_cluster(), 5, "5 tasks must run at the same time, and the cluster has 4 slots"),
        (_cluster(), 0, "executors=0 cannot be"),
        (_cluster(), "2", "executors='2' cannot be"),
        (_cluster(slots=0), None, "the application has no slot for a task"),
        (_cluster(dynamic_allocation=True), 2, "spark.dynamicAllocation.enabled is true"),
    ],
)
def test_a_cluster_that_cannot_run_the_tasks_is_refused(cluster, executors, said):
    with pytest.raises(ConfigError) as e:
        check_cluster(cluster, executors)
    assert said in e.value.message
    assert e.value.hint


@pytest.mark.parametrize("text", [None, "", "x", "{}", "[]", '{"plan": {}}'])
def test_the_source_of_control_rows_is_nothing_for_users(text):
    with pytest.raises(ConfigError, match="kdirect_slash"):
        JobSpec.from_text(text)
