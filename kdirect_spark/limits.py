"""Where a query starts and ends, as a user writes it: from the earliest or to the latest, offsets,
times; topic by topic, back from the end of the log, or back from now.

Law: pure; no clock.  `offsets` has the plain limits and resolves them.  This module reads the texts
of the options, and makes of a relative limit a plain one once the planner knows the topics, the
ends of their logs and the time.

    text                                    meaning
    earliest, latest                        of every partition
    {"topic":{"0":23,"1":-2}}               an offset for each partition; -2 earliest, -1 latest
    {"topic":"earliest","other":{"0":23}}   a word stands for all partitions of a topic
    {"topic":-1000}, -1000                  the last 1000 offsets of each partition
    1700000000000                           the first record of this time (ms) or later
    -10 minutes                             the same, so long before the query is planned
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kdirect.errors import ConfigError
from kdirect.model import EARLIEST_OFFSET, LATEST_OFFSET, TopicPartition
from kdirect_spark import offsets
from kdirect_spark.offsets import (
    OFFSET_MAX,
    AtOffsets,
    AtTimes,
    Earliest,
    Latest,
    Offsets,
    Watermarks,
    from_json,
    json_object,
)


@dataclass(frozen=True, slots=True)
class FromEnd:
    """So many offsets before the end of each partition, or its earliest where it has fewer."""

    count: int


@dataclass(frozen=True, slots=True)
class PerTopic:
    """`topics`: what holds for all partitions of a topic.  `partitions`: those of other topics."""

    topics: tuple[tuple[str, Earliest | Latest | FromEnd], ...]
    partitions: AtOffsets


@dataclass(frozen=True, slots=True)
class Ago:
    """The first record that is younger than `ms` when the query is planned.  `strict` as in
    AtTimes."""

    ms: int
    strict: bool = False


Limit = offsets.Limit | FromEnd | PerTopic | Ago

_WORDS: dict[str, Earliest | Latest] = {"earliest": Earliest(), "latest": Latest()}
_EXAMPLE = '{"topic":{"0":123}}'
_SPANS = {
    "ms|millis|milliseconds?": 1,
    "s|secs?|seconds?": 1000,
    "m|mins?|minutes?": 60_000,
    "h|hours?": 3_600_000,
    "d|days?": 86_400_000,
    "w|weeks?": 604_800_000,
}


def moves(limit: Limit) -> bool:
    """Whether `limit` may mean another offset when it is resolved later; see `offsets.moves`."""
    if isinstance(limit, PerTopic):
        return any(moves(of) for _, of in limit.topics) or offsets.moves(limit.partitions)
    return isinstance(limit, FromEnd | Ago) or offsets.moves(limit)


def named_offsets(limit: Limit) -> frozenset[TopicPartition]:
    """The partitions for which `limit` gives an offset as a number."""
    if isinstance(limit, PerTopic):
        return offsets.named_offsets(limit.partitions)
    return frozenset() if isinstance(limit, FromEnd | Ago) else offsets.named_offsets(limit)


def has(limit: Limit, kind: type[Earliest] | type[Latest]) -> bool:
    """Whether `limit` asks for the earliest, or the latest, of some partition by that name."""
    number = EARLIEST_OFFSET if kind is Earliest else LATEST_OFFSET
    if isinstance(limit, PerTopic):
        return has(limit.partitions, kind) or any(isinstance(of, kind) for _, of in limit.topics)
    if isinstance(limit, AtOffsets):
        return any(n == number for _, n in limit.items)
    return isinstance(limit, kind)


def within(limit: Limit, found: Offsets, watermarks: Watermarks) -> Offsets:
    """`found`, to which `limit` was resolved after `watermarks` were asked for: a record of a time
    that has come since then is beyond what the query sees, and its offset is the end's."""
    if not isinstance(limit, AtTimes | Ago):
        return found
    return {tp: min(offset, watermarks[tp][1]) for tp, offset in found.items()}


def resolved(limit: Limit, now_ms: int) -> FromEnd | PerTopic | offsets.Limit:
    """`limit` without `Ago`, for a query that is planned at `now_ms`."""
    if isinstance(limit, Ago):
        return AtTimes(everywhere=max(now_ms - limit.ms, 0), strict=limit.strict)
    return limit


def resolve(
    limit: FromEnd | PerTopic | offsets.Limit,
    option: str,
    partitions: Iterable[TopicPartition],
    watermarks: Watermarks,
    by_time: Mapping[TopicPartition, int | None] | None = None,
) -> Offsets:
    """One offset for each of `partitions`; see `offsets.resolve_limit`."""
    if isinstance(limit, FromEnd):
        found = ((tp, watermarks[tp]) for tp in partitions)
        return {tp: max(low, high - limit.count) for tp, (low, high) in found}
    if not isinstance(limit, PerTopic):
        return offsets.resolve_limit(limit, option, partitions, watermarks, by_time)
    partitions = list(partitions)
    out: Offsets = {}
    for topic, of in limit.topics:
        mine = [tp for tp in partitions if tp.topic == topic]
        if not mine:
            raise ConfigError(
                f"option {option} names topic {topic}, which is not read",
                hint="name the topics that the query reads",
            )
        out |= resolve(of, option, mine, watermarks)
    rest = [tp for tp in partitions if tp not in out]
    return out | offsets.resolve_limit(limit.partitions, option, rest, watermarks)


# -- texts -----------------------------------------------------------------------------------------


def offset_limit(text: str | None, option: str) -> Limit | None:
    """The limit that `startingOffsets` or `endingOffsets` says.  Raises ConfigError."""
    if text is None:
        return None
    word = text.strip().lower()
    if word in _WORDS:
        return _WORDS[word]
    if re.fullmatch(r"-[0-9]{1,19}", word):
        return _from_end(int(word), option)
    if not word.startswith("{"):
        raise ConfigError(
            f"option {option}: {text!r} is not allowed",
            hint='use earliest, latest or JSON such as {"topic":{"0":123}}; or -1000 for the last '
            "1000 offsets of each partition",
        )
    given = json_object(text, option, _EXAMPLE)
    topics = {
        topic: of
        for topic, of in given.items()
        if isinstance(of, str) or (isinstance(of, int) and not isinstance(of, bool))
    }
    rest = {topic: of for topic, of in given.items() if topic not in topics}
    partitions = from_json(rest, option, low=-2)
    if not topics:
        return AtOffsets(tuple(sorted(partitions.items())))
    return PerTopic(
        tuple((topic, _of_topic(of, topic, option)) for topic, of in sorted(topics.items())),
        AtOffsets(tuple(sorted(partitions.items()))),
    )


def _of_topic(of: str | int, topic: str, option: str) -> Earliest | Latest | FromEnd:
    if isinstance(of, str) and of.strip().lower() in _WORDS:
        return _WORDS[of.strip().lower()]
    if isinstance(of, int) and of < 0:
        return _from_end(of, option)
    raise ConfigError(
        f"option {option}: topic {topic} has {of!r}",
        hint=f'write "earliest", "latest", a number below 0 to count from the end, or {_EXAMPLE}',
    )


def _from_end(number: int, option: str) -> FromEnd:
    if not 0 < -number <= OFFSET_MAX:
        raise ConfigError(
            f"option {option}: {number} is not a number of offsets before the end",
            hint="write for example -1000",
        )
    return FromEnd(-number)


def time_limit(text: str, option: str, *, strict: bool | None) -> AtTimes | Ago:
    """The limit that `startingTimestamp` or `endingTimestamp` says.  `strict` is None where the
    user leaves open what happens to partitions without a record of that time: then it is an error
    for a time, and for a span the end of the partition.  Raises ConfigError."""
    word = str(text).strip().lower()
    if re.fullmatch(r"\+?[0-9]{1,19}", word) and int(word) <= OFFSET_MAX:
        return AtTimes(everywhere=int(word), strict=strict is None or strict)
    span = re.fullmatch(r"-\s*([0-9]{1,12})\s*([a-z]+)", word)
    if span is not None:
        for names, ms in _SPANS.items():
            if re.fullmatch(names, span[2]):
                return Ago(int(span[1]) * ms, strict=bool(strict))
    raise ConfigError(
        f"option {option}: {text!r} is neither a time in ms since 1970 nor a time span before now",
        hint='write for example 1700000000000, "-10 minutes" or "-2h"',
    )
