"""The ids of topics in the offsets of a stream, so that a checkpoint knows a topic that was deleted
and created again.

Pure.  An offset is that of Spark's Kafka connector, ``{"topic":{"0":123}}``, with one more member
for each topic, ``"/topic-id/topic/2f8b...":{}``, whose name says the id.  The connector reads such
offsets: to it the member is a topic without partitions, of which there is nothing to be read.  It
writes offsets without ids, and those are read here, too; of such topics nothing is known.  No
topic's name has a slash.  The ids are not kept beside the checkpoint: they belong to offsets, and a
query that ran with the connector meanwhile has written offsets of another topic.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

PREFIX = "/topic-id/"


def with_ids(value: Mapping[str, Any], ids: Mapping[str, str | None]) -> dict[str, Any]:
    """An offset with the ids of its topics, those that have one.  Equal offsets are equal text."""
    known = {f"{PREFIX}{topic}/{ids[topic]}": {} for topic in sorted(value) if ids.get(topic)}
    return {**value, **known}


def ids_of(value: Mapping[str, Any]) -> dict[str, str]:
    """The ids that an offset names, by topic."""
    found: dict[str, str] = {}
    for name in value:
        if is_id(name):
            topic, _, topic_id = name.removeprefix(PREFIX).partition("/")
            found[topic] = topic_id
    return found


def is_id(name: str) -> bool:
    """Whether a member of an offset with this name is an id, and no topic."""
    return name.startswith(PREFIX)


def of_topics(value: Mapping[str, Any], topics: Collection[str]) -> dict[str, Any]:
    """The members of an offset that are of these topics, ids included, in their order."""
    ids = ids_of(value)
    wanted = {f"{PREFIX}{topic}/{ids[topic]}" for topic in topics if topic in ids}
    return {name: of for name, of in value.items() if name in topics or name in wanted}


def others(first: Mapping[str, str], second: Mapping[str, str | None]) -> frozenset[str]:
    """The topics of which both know an id, and not the same one."""
    return frozenset(
        topic for topic, i in first.items() if (other := second.get(topic)) and i and other != i
    )


def same(first: Mapping[str, str], second: Mapping[str, str | None]) -> frozenset[str]:
    """The topics of which both know the same id."""
    return frozenset(topic for topic, i in first.items() if i and second.get(topic) == i)
