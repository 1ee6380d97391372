"""Words the whole project shares.  No I/O, no imports from other rooms.

`offset` is a record offset, `position` a byte position in a segment file, `address` a memory
address. Intervals are half-open.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from kdirect.errors import ConfigError

TOPIC_NAME_MAX = 249
_TOPIC_NAME = re.compile(r"[a-zA-Z0-9._-]+\Z")

CREATE_TIME = 0
LOG_APPEND_TIME = 1

EARLIEST_OFFSET = -2
LATEST_OFFSET = -1


class TopicPartition(NamedTuple):
    """A partition of a topic; prints as ``topic-partition``, as Kafka's directories do.  A tuple,
    because it is a key everywhere and a tuple hashes in C."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


class Record(NamedTuple):
    """One record as a consumer gets it.  `timestamp` is in ms since 1970; `timestamp_type` 0 is
    CreateTime, 1 LogAppendTime; `headers` are (key, value) pairs in order."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    timestamp_type: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()


def check_topic_name(name: str) -> str:
    """Return `name`, or raise ConfigError: Kafka's rules for topic names."""
    if not isinstance(name, str) or not name:
        raise ConfigError(
            "a topic name is empty", hint="give 1 to 249 characters of a-z A-Z 0-9 . _ -"
        )
    if name in (".", ".."):
        raise ConfigError(
            f"topic name {name!r} is not allowed", hint="it is a directory name; choose another"
        )
    if len(name) > TOPIC_NAME_MAX:
        raise ConfigError(
            f"topic name of {len(name)} characters is too long",
            hint=f"use at most {TOPIC_NAME_MAX}",
        )
    if not _TOPIC_NAME.match(name):
        raise ConfigError(
            f"topic name {name!r} has a character that is not allowed",
            hint="use a-z A-Z 0-9 . _ - only",
        )
    return name
