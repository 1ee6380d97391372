"""Values of records that give no row: why, how many, and which were the first.

Every format of values counts here what it drops.  The first ones are kept with their offsets, so
that a user can look at them.  `error_of` makes of such a row the error of FAILFAST.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from kdirect.errors import BadValueError
from kdirect.model import TopicPartition

SAMPLES = 10


class DropReason(Enum):
    """Why a record gave no row.  The value is how counters and messages name it."""

    NULL_VALUE = "null_value"  # a tombstone: not an error
    WRONG_SIZE = "wrong_size"
    NOT_DECODED = "not_decoded"
    NULL_TIME = "null_time"
    BEFORE_1970 = "before_1970"
    TOO_FAR_AHEAD = "too_far_ahead"
    TOO_LONG = "too_long"  # for what is to be kept of it


# What is wrong with an event time.
TIME_FAULTS = {
    DropReason.NULL_TIME: "the event time is null",
    DropReason.BEFORE_1970: "the event time is before 1970",
    DropReason.TOO_FAR_AHEAD: "the event time is further ahead of the wall clock than max_ahead_us",
}


@dataclass(frozen=True, slots=True)
class BadRow:
    """One of them: `field` is empty where the value as a whole is meant."""

    offset: int
    reason: DropReason
    field: str
    why: str


@dataclass(slots=True)
class Dropped:
    """How many rows were dropped, by reason, and the first of them."""

    counts: dict[DropReason, int] = field(default_factory=dict)
    samples: list[BadRow] = field(default_factory=list)

    def add(self, reason: DropReason, count: int, samples: Iterable[BadRow] = ()) -> None:
        """`count` more rows for this reason; nothing if it is 0."""
        if count:
            self.counts[reason] = self.counts.get(reason, 0) + count
        for row in samples:
            if len(self.samples) >= SAMPLES:
                break
            self.samples.append(row)

    def merge(self, other: Dropped) -> None:
        """Add what `other` counted, of the same partition."""
        for reason, count in other.counts.items():
            self.counts[reason] = self.counts.get(reason, 0) + count
        self.samples = sorted(self.samples + other.samples, key=lambda row: row.offset)[:SAMPLES]

    def clear(self) -> None:
        """Forget all of it."""
        self.counts.clear()
        self.samples.clear()

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    @property
    def first_error(self) -> BadRow | None:
        """The first row that FAILFAST does not accept.  (Null values are counted without a
        sample.)"""
        return self.samples[0] if self.samples else None


def described(tp: TopicPartition, row: BadRow) -> str:
    """Where this row is, and what is wrong with it."""
    where = f" field {row.field}:" if row.field else ""
    return f"{tp} offset {row.offset}:{where} {row.why}"


def error_of(tp: TopicPartition, row: BadRow) -> BadValueError:
    """What FAILFAST raises for this row."""
    error = BadValueError(
        described(tp, row),
        hint="correct what the producer writes, or the format and schema that it is read with;"
        " mode=PERMISSIVE drops such records and counts them",
    )
    error.topic_partition, error.offset = tp, row.offset
    return error
