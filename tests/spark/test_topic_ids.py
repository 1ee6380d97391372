"""Topics that are deleted and created again: their ids in offsets, and tasks that run meanwhile."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from kdirect.client.session import connect
from kdirect.errors import DataLossError
from kdirect_spark import topic_ids
from kdirect_spark.broker_view import RangePartition
from kdirect_spark.offsets import from_json
from kdirect_spark.reading import read_range
from kdirect_spark.settings import source_settings

pytestmark = pytest.mark.spark

OFFSET = {"a": {"0": 5}, "a.b": {"0": 1, "1": 2}}


def test_ids_are_members_that_hold_no_offset() -> None:
    given = topic_ids.with_ids(OFFSET, {"a": "1-2", "a.b": None, "other": "3"})
    assert given == OFFSET | {"/topic-id/a/1-2": {}}
    assert topic_ids.ids_of(given) == {"a": "1-2"} and topic_ids.ids_of(OFFSET) == {}
    assert from_json(given, "offset") == from_json(OFFSET, "offset")


def test_equal_offsets_are_equal_text_whatever_the_order_of_ids() -> None:
    first = topic_ids.with_ids(OFFSET, {"a": "1", "a.b": "2"})
    second = topic_ids.with_ids(OFFSET, {"a.b": "2", "a": "1"})
    assert json.dumps(first) == json.dumps(second)
    assert json.dumps(json.loads(json.dumps(first))) == json.dumps(first)


def test_the_members_of_some_topics_have_their_ids() -> None:
    given = topic_ids.with_ids(OFFSET, {"a": "1", "a.b": "2"})
    assert topic_ids.of_topics(given, ("a",)) == {"a": {"0": 5}, "/topic-id/a/1": {}}
    assert topic_ids.of_topics(given, ("none",)) == {}


def test_only_ids_that_both_know_tell_topics_apart() -> None:
    known = {"a": "1", "b": "2", "c": "3"}
    assert topic_ids.others(known, {"a": "1", "b": "9", "d": "4"}) == {"b"}
    assert topic_ids.same(known, {"a": "1", "b": "9", "d": "4"}) == {"a"}
    assert topic_ids.same({"a": ""}, {"a": ""}) == topic_ids.same(known, {"c": None}) == frozenset()
    assert topic_ids.others(known, {"c": None}) == topic_ids.others(known, {"c": ""}) == frozenset()


RECORDS = 20_000


def old_values() -> list[bytes]:
    return [b"old %d" % i + bytes(200) for i in range(RECORDS)]


class Task:
    """What a Spark task does with RECORDS records of a topic, in batches of 16 KB."""

    def __init__(self, topics: Any, transport: str, fail: str) -> None:
        # Of small segments: a READ goes on in the file that was granted, whatever its topic's fate.
        self.name = topics.create(1, segment_bytes=1 << 16)
        self._topics = topics
        topics.fill(self.name, old_values(), **{"batch.size": 16000})
        options = {
            "kafka.bootstrap.servers": topics.address,
            "subscribe": self.name,
            "transport": transport,
            "failOnDataLoss": fail,
            "arrowBatchBytes": "16k",
            "prefetchBytes": "1k",
            "kafkaConsumer.pollTimeoutMs": "60000",
            "fetch.max.read.bytes": "16k",
        }
        with connect({"bootstrap.servers": topics.address, "transport": "tcp"}) as session:
            topic_id = session.admin.list_topics()[self.name].topic_id
        self._range = RangePartition(self.name, 0, 0, RECORDS, (), topic_id=topic_id)
        self._settings = source_settings(options, streaming=True)
        self.batches = read_range(self._settings, self._range)

    def first(self) -> int:
        return next(self.batches).num_rows

    def create_again(self, records: int) -> None:
        self._topics.delete(self.name)
        self._topics.create_named(self.name)
        self._topics.fill(self.name, [b"new %d" % i for i in range(records)])

    def rest(self) -> list[bytes]:
        return [v for b in self.batches for v in b.column("value").to_pylist()]


@pytest.mark.parametrize("records", [5, RECORDS + 1000])
@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("begun", [True, False])
def test_a_topic_created_again_under_a_running_task(
    topics: Any, caplog: Any, transport: str, records: int, begun: bool
) -> None:
    """With failOnDataLoss=false a warning: what is new belongs to a later micro-batch, so none of
    it is read.  It has fewer or more records than the task was to read."""
    task = Task(topics, transport, "false")
    had = task.first() if begun else 0
    task.create_again(records)
    with caplog.at_level(logging.WARNING, "kdirect_spark"):
        rest = task.rest()
    assert not [v for v in rest if v.startswith(b"new")]
    assert had + len(rest) < RECORDS
    assert f"{task.name}-0" in caplog.text and f"{RECORDS} were still to be read" in caplog.text


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_topic_created_again_under_a_running_task_is_a_loss(topics: Any, transport: str) -> None:
    task = Task(topics, transport, "true")
    task.first()
    task.create_again(RECORDS + 1000)
    with pytest.raises(DataLossError, match=f"{task.name}-0 is gone|deleted and created again"):
        task.rest()


def test_a_parked_reader_of_a_deleted_topic_is_not_used_again(topics: Any) -> None:
    """A worker keeps what it reads a partition with for its next task."""
    task = Task(topics, "auto", "true")
    assert len(task.rest()) == RECORDS
    task.create_again(3)
    with connect({"bootstrap.servers": topics.address, "transport": "tcp"}) as session:
        topic_id = session.admin.list_topics()[task.name].topic_id
    again = read_range(task._settings, RangePartition(task.name, 0, 0, 3, (), topic_id=topic_id))
    assert [v for b in again for v in b.column("value").to_pylist()] == [
        b"new 0",
        b"new 1",
        b"new 2",
    ]
    old = read_range(task._settings, task._range)
    with pytest.raises(DataLossError):
        list(old)
