"""What callers of a consumer may name partitions and offsets by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kdirect.client.message import Message
from kdirect.errors import ConfigError
from kdirect.model import TopicPartition

OFFSET_STORED = -1000  # start at the committed offset, as confluent-kafka numbers it
OFFSET_INVALID = -1001

Offsets = Mapping[TopicPartition, int] | Iterable[Any]


def as_partition(thing: Any) -> TopicPartition:
    """A `TopicPartition`, a (topic, partition) pair, or an object with these two attributes, as
    confluent-kafka's."""
    if isinstance(thing, TopicPartition):
        return thing
    topic, number = getattr(thing, "topic", None), getattr(thing, "partition", None)
    if topic is None and isinstance(thing, tuple) and len(thing) == 2:
        topic, number = thing
    if not isinstance(topic, str) or not isinstance(number, int):
        raise ConfigError(
            f"{thing!r} names no partition", hint="give kdirect.TopicPartition(topic, partition)"
        )
    return TopicPartition(topic, number)


def as_partitions(things: Iterable[Any]) -> list[TopicPartition]:
    """Several of them."""
    if isinstance(things, TopicPartition | str):
        raise ConfigError(f"{things!r} is one thing, not several", hint="give a list of partitions")
    return [as_partition(thing) for thing in things]


def as_offsets(things: Offsets) -> dict[TopicPartition, int]:
    """A mapping from partitions to offsets, or partitions, whose attribute `offset` counts if they
    have one; else OFFSET_INVALID."""
    if isinstance(things, Mapping):
        return {as_partition(tp): int(offset) for tp, offset in things.items()}
    if isinstance(things, TopicPartition | str):
        raise ConfigError(
            f"{things!r} is one thing, not several",
            hint="give a list of partitions, or a mapping to offsets",
        )
    return {as_partition(thing): getattr(thing, "offset", OFFSET_INVALID) for thing in things}


def offset_after(message: Message) -> dict[TopicPartition, int]:
    """What to commit when `message` is done with."""
    return {TopicPartition(message.topic(), message.partition()): message.offset() + 1}
