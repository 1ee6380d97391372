"""Requests about topics: what of them is badly formed, whoever has the topics.  Pure.

The rules and their codes are those of Kafka's `ReplicationControlManager` and `ControllerApis`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from kdirect.errors import ConfigError
from kdirect.format.error_codes import ErrorCode
from kdirect.model import check_topic_name

Refusal = tuple[int, str]


class Deletion(NamedTuple):
    """One topic of a DeleteTopics request, by its name or by its id, or why it is neither."""

    name: str | None
    topic_id: Any
    refusal: Refusal | None = None


def deletions(request: Any, version: int) -> list[Deletion]:
    """The topics of a DeleteTopics request, each once.

    An empty name that comes with an id does not count as a name: some clients send one.  A name
    beside an id is refused, because it says of two topics that they are to go."""
    if version < 6:
        names = Counter(request.topic_names)
        return [Deletion(n, None, _twice(n) if times > 1 else None) for n, times in names.items()]
    given = [(t.name if t.name or t.topic_id is None else None, t.topic_id) for t in request.topics]
    out = []
    for (name, topic_id), times in Counter(given).items():
        refusal: Refusal | None = None
        if name is None and topic_id is None:
            refusal = ErrorCode.INVALID_REQUEST, "Neither topic name nor id were specified."
        elif name is not None and topic_id is not None:
            refusal = ErrorCode.INVALID_REQUEST, "You may not specify both topic name and topic id."
        elif times > 1:
            refusal = _twice(name or str(topic_id))
        out.append(Deletion(name, topic_id, refusal))
    return out


def _twice(what: str) -> Refusal:
    return ErrorCode.INVALID_REQUEST, f"topic {what} is in the request twice"


def configs_of(wanted: Any) -> dict[str, str]:
    """The properties of a topic of a CreateTopics request.  ConfigError for one without a value."""
    without = [c.name for c in wanted.configs if c.value is None]
    if without:
        raise ConfigError(
            f"Null value not supported for topic configs: {', '.join(without)}",
            hint="give a value, or leave the property out",
        )
    return {c.name: c.value for c in wanted.configs}


def named_twice(topics: Iterable[Any]) -> set[str]:
    """The names that are in a request more than once."""
    return {name for name, times in Counter(t.name for t in topics).items() if times > 1}


def name_error(name: str) -> int:
    """INVALID_TOPIC_EXCEPTION for what can be no topic's name, else NONE."""
    try:
        check_topic_name(name)
    except ConfigError:
        return ErrorCode.INVALID_TOPIC_EXCEPTION
    return ErrorCode.NONE
