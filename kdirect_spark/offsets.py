"""Offsets of a query: pure planning, no I/O.

Law: everything here depends on its arguments only.  The readers fetch what the broker knows
(topics, watermarks, offsets by time) and pass it in.  All ranges are half-open: ``start`` is read,
``stop`` is not.

Invariants:
- JSON is that of Spark's Kafka connector, ``{"topic":{"0":123}}``, with sorted topics and
  partitions; a stream adds ids (`kdirect_spark.topic_ids`).  Spark compares offsets as text, so
  equal offsets must be equal text.
- A partition that a query has not seen before is read from its earliest record.
- A plan lists as losses what may be missing; the caller decides by `failOnDataLoss`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Any

from kdirect.errors import ConfigError, DataLossError, UnknownTopicError
from kdirect.model import EARLIEST_OFFSET, LATEST_OFFSET, TopicPartition, check_topic_name
from kdirect_spark.topic_ids import is_id

Offsets = dict[TopicPartition, int]
Watermarks = Mapping[TopicPartition, tuple[int, int]]  # log start offset, high watermark

OFFSET_MAX = 2**63 - 1
LOSS_HINT = 'set option failOnDataLoss to "false" to continue without the missing records'


# -- JSON ------------------------------------------------------------------------------------------


def to_json(offsets: Mapping[TopicPartition, int]) -> dict[str, dict[str, int]]:
    """``{"topic": {"0": 123}}`` with topics and partitions in order."""
    out: dict[str, dict[str, int]] = {}
    for tp in sorted(offsets):
        out.setdefault(tp.topic, {})[str(tp.partition)] = offsets[tp]
    return out


def from_json(value: str | Mapping[str, Any], option: str, *, low: int = 0) -> Offsets:
    """Parse ``{"topic":{"0":123}}``, leaving out ids of topics (`topic_ids`).  Raises ConfigError,
    which names `option`, for a number below `low` and for any other shape."""
    example = '{"topic":{"0":123,"1":456}}'
    loaded = json_object(value, option, example)
    out: Offsets = {}
    for topic, partitions in loaded.items():
        if is_id(topic):
            continue
        _check_topic(topic, option)
        if not isinstance(partitions, Mapping):
            raise ConfigError(
                f"option {option}: topic {topic} holds {partitions!r} instead of partitions",
                hint=f"write {example}",
            )
        for name, number in partitions.items():
            partition = _partition(name, topic, option)
            if (
                isinstance(number, bool)
                or not isinstance(number, int)
                or not low <= number <= OFFSET_MAX
            ):
                raise ConfigError(
                    f"option {option}: {topic}-{partition} has {number!r}",
                    hint=f"give a whole number of at least {low}",
                )
            out[TopicPartition(topic, partition)] = number
    return out


def partitions_from_json(value: str, option: str) -> tuple[TopicPartition, ...]:
    """Parse ``{"topic":[0,1]}``, the value of the option `assign`."""
    example = '{"topic":[0,1]}'
    out = set()
    for topic, partitions in json_object(value, option, example).items():
        _check_topic(topic, option)
        if not isinstance(partitions, list):
            raise ConfigError(
                f"option {option}: topic {topic} holds {partitions!r} instead of a list",
                hint=f"write {example}",
            )
        out.update(TopicPartition(topic, _partition(p, topic, option)) for p in partitions)
    if not out:
        raise ConfigError(f"option {option} names no partition", hint=f"write {example}")
    return tuple(sorted(out))


def json_object(value: str | Mapping[str, Any], option: str, example: str) -> Mapping[str, Any]:
    """The JSON object that `option` holds.  Raises ConfigError; a name may not occur twice."""
    if isinstance(value, str):
        try:
            value = json.loads(value, object_pairs_hook=_no_repeats)
        except (ValueError, RecursionError) as e:
            raise ConfigError(
                f"option {option}: {_short(value)} is not JSON of offsets ({e})",
                hint=f"write {example}",
            ) from e
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"option {option}: {_short(value)} is not a JSON object", hint=f"write {example}"
        )
    return value


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in pairs:
        if name in out:
            raise ValueError(f"{name!r} occurs twice")
        out[name] = value
    return out


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _check_topic(topic: str, option: str) -> None:
    try:
        check_topic_name(topic)
    except ConfigError as e:
        raise ConfigError(f"option {option}: {e.message}", hint=e.hint) from None


def _partition(name: Any, topic: str, option: str) -> int:
    if isinstance(name, str) and len(name) <= 10 and name.isascii() and name.isdigit():
        name = int(name)
    if isinstance(name, bool) or not isinstance(name, int) or not 0 <= name < 2**31:
        raise ConfigError(
            f"option {option}: {name!r} is not a partition of topic {topic}",
            hint="partitions are numbers from 0",
        )
    return name


# -- subscription ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Assign:
    """Exactly these partitions."""

    partitions: tuple[TopicPartition, ...]

    def resolve(
        self, topics: Mapping[str, int], *, must_exist: bool = True
    ) -> tuple[TopicPartition, ...]:
        """Those partitions that exist in `topics` (name -> number of partitions).  With
        `must_exist`, a missing one raises UnknownTopicError."""
        missing = [tp for tp in self.partitions if tp.partition >= topics.get(tp.topic, 0)]
        if missing and must_exist:
            raise _unknown("assign", [f"{tp.topic}-{tp.partition}" for tp in missing])
        return tuple(tp for tp in self.partitions if tp not in missing)


@dataclass(frozen=True, slots=True)
class Subscribe:
    """All partitions of these topics."""

    topics: tuple[str, ...]

    def resolve(
        self, topics: Mapping[str, int], *, must_exist: bool = True
    ) -> tuple[TopicPartition, ...]:
        missing = [t for t in self.topics if t not in topics]
        if missing and must_exist:
            raise _unknown("subscribe", missing)
        return _all_partitions(t for t in topics.items() if t[0] in self.topics)


@dataclass(frozen=True, slots=True)
class SubscribePattern:
    """All partitions of the topics whose whole name matches, now or later."""

    pattern: str

    def resolve(
        self, topics: Mapping[str, int], *, must_exist: bool = True
    ) -> tuple[TopicPartition, ...]:
        match = re.compile(self.pattern).fullmatch
        return _all_partitions(t for t in topics.items() if match(t[0]))


Subscription = Assign | Subscribe | SubscribePattern


def _all_partitions(topics: Iterable[tuple[str, int]]) -> tuple[TopicPartition, ...]:
    return tuple(sorted(TopicPartition(topic, p) for topic, count in topics for p in range(count)))


def _unknown(option: str, names: list[str]) -> UnknownTopicError:
    what = "partition" if option == "assign" else "topic"
    return UnknownTopicError(
        f"option {option}: the broker has no {what} {', '.join(names)}",
        hint="create it first, correct the name, or use subscribePattern for topics of the future",
    )


# -- where a query starts and ends -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Earliest:
    pass


@dataclass(frozen=True, slots=True)
class Latest:
    pass


@dataclass(frozen=True, slots=True)
class AtOffsets:
    """An offset for each partition; -2 is the earliest, -1 the latest.  `items` is a tuple so that
    the object is immutable and can be hashed."""

    items: tuple[tuple[TopicPartition, int], ...]


@dataclass(frozen=True, slots=True)
class AtTimes:
    """A time (ms since 1970) for each partition, or `everywhere` as the one for all.  With `strict`
    a partition that has no record at that time or later is an error."""

    items: tuple[tuple[TopicPartition, int], ...] = ()
    everywhere: int | None = None
    strict: bool = False

    def times(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        if self.everywhere is not None:
            return dict.fromkeys(partitions, self.everywhere)
        return dict(self.items)


Limit = Earliest | Latest | AtOffsets | AtTimes


def moves(limit: Limit) -> bool:
    """Whether `limit` may mean the latest offset of a partition, which is another offset when it
    is resolved later."""
    if isinstance(limit, AtOffsets):
        return any(n == LATEST_OFFSET for _, n in limit.items)
    return isinstance(limit, Latest) or (isinstance(limit, AtTimes) and not limit.strict)


def named_offsets(limit: Limit) -> frozenset[TopicPartition]:
    """The partitions for which `limit` gives an offset as a number."""
    return (
        frozenset(tp for tp, n in limit.items if n >= 0)
        if isinstance(limit, AtOffsets)
        else frozenset()
    )


def resolve_limit(
    limit: Limit,
    option: str,
    partitions: Iterable[TopicPartition],
    watermarks: Watermarks,
    by_time: Mapping[TopicPartition, int | None] | None = None,
) -> Offsets:
    """One offset for each of `partitions`.

    `by_time` is needed for AtTimes only.  It holds the first offset at or after each time, or None
    if there is no such record.  Raises ConfigError when `limit` names other partitions than
    `partitions`, or when a strict time finds no record.
    """
    partitions = list(partitions)
    if isinstance(limit, Earliest):
        return {tp: watermarks[tp][0] for tp in partitions}
    if isinstance(limit, Latest):
        return {tp: watermarks[tp][1] for tp in partitions}
    if isinstance(limit, AtOffsets):
        given = dict(limit.items)
        _same_partitions(
            set(given),
            set(partitions),
            option,
            "use -1 for the latest and -2 for the earliest offset where it does not matter",
        )
        special = {EARLIEST_OFFSET: 0, LATEST_OFFSET: 1}
        return {tp: watermarks[tp][special[n]] if n in special else n for tp, n in given.items()}
    times = limit.times(partitions)
    _same_partitions(set(times), set(partitions), option, "give a time for each")
    found = by_time or {}
    out: Offsets = {}
    for tp in partitions:
        offset = found.get(tp)
        if offset is None:
            if limit.strict:
                raise ConfigError(
                    f"option {option}: {tp} has no record at {times[tp]} ms or later",
                    hint="choose an earlier time, or set startingOffsetsByTimestampStrategy "
                    'to "latest"',
                )
            offset = watermarks[tp][1]
        out[tp] = offset
    return out


def _same_partitions(
    given: set[TopicPartition], known: set[TopicPartition], option: str, remedy: str
) -> None:
    missing, unknown = known - given, given - known
    if not missing and not unknown:
        return
    parts = [
        f"{word} {', '.join(map(str, sorted(tps)))}"
        for word, tps in (("lacks", missing), ("names the unknown", unknown))
        if tps
    ]
    raise ConfigError(
        f"option {option} must name exactly the partitions that are read: it {' and '.join(parts)}",
        hint=remedy,
    )


class Phase(Enum):
    """How far a stream's first micro-batch has come in this planner process."""

    NEW = "the engine has not asked where the query starts: it may be a restarted one"
    STARTING = "the start is resolved, and no micro-batch was offered after it"
    RUNNING = "the engine has asked for the end of a micro-batch"


class QueryStart:
    """Where a new stream starts, and what is special about its first micro-batch.

    ============  =====================  ========================================================
    phase         event                  next phase, effect
    ============  =====================  ========================================================
    NEW           `resolve(offsets)`     STARTING; the offsets are kept for every later question
    NEW           `begin(start)`         RUNNING; the checkpoint has the start
    STARTING      `begin(start)`         RUNNING; True if this micro-batch must be empty
    STARTING      `repeats_first(start)`  STARTING; True if `start` is the start that was resolved
    RUNNING       any                    RUNNING; `begin` and `repeats_first` are False
    ============  =====================  ========================================================

    With `moving`, a start may mean the latest offset of a partition, which changes when it is
    resolved again.  The engine does not store the initial offset before the first micro-batch ends.
    The first micro-batch of such a query is therefore empty: once it is in the checkpoint, a crash
    loses nothing.
    """

    def __init__(self, moving: bool) -> None:
        self.phase = Phase.NEW
        self.offsets: Offsets | None = None
        self._moving = moving

    def resolve(self, offsets: Offsets) -> None:
        self.offsets = offsets
        if self.phase is Phase.NEW:
            self.phase = Phase.STARTING

    def begin(self, start: Offsets) -> bool:
        """The engine asks for the end of a micro-batch from `start`.  Whether it must be empty."""
        empty = self.repeats_first(start) and self._moving
        self.phase = Phase.RUNNING
        return empty

    def repeats_first(self, start: Offsets) -> bool:
        """Whether a micro-batch from `start` is the first one of the query, whose end the engine
        has from the checkpoint because it did not finish before."""
        return self.phase is Phase.STARTING and start == self.offsets

    def was_empty(self, stop: Offsets) -> bool:
        """Whether the first micro-batch, which ended at `stop`, was an empty one: "latest" has
        moved on since, so the resolved start is not below its end.  The query continues there."""
        starts = self.offsets or {}
        return self._moving and all(stop.get(tp, n) <= n for tp, n in starts.items())


# -- planning --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """Records ``start <= offset < stop`` of one topic partition: what one Spark task reads."""

    topic_partition: TopicPartition
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Plan:
    """Sorted `ranges` to read, none of them empty, and `losses`: what may be missing, in words."""

    ranges: tuple[OffsetRange, ...]
    losses: tuple[str, ...] = ()

    def check(self, fail_on_data_loss: bool, warn: Callable[[str], None]) -> Plan:
        """Return this plan.  A loss raises DataLossError, or is passed to `warn`."""
        if self.losses and fail_on_data_loss:
            raise DataLossError("records may be missing: " + "; ".join(self.losses), hint=LOSS_HINT)
        for loss in self.losses:
            warn(f"records may be missing: {loss} (failOnDataLoss is false)")
        return self


def plan_stream(
    start: Mapping[TopicPartition, int],
    end: Mapping[TopicPartition, int],
    watermarks: Watermarks,
    created_again: Collection[str] = (),
    replaced: Collection[str] = (),
    kept: Collection[str] = (),
    *,
    is_start: bool = False,
) -> Plan:
    """Ranges of one micro-batch.

    `watermarks` holds every partition that exists now.  Partitions in `end` but not in `start` are
    new and are read from their earliest record.  Partitions in `start` but not in `end` are gone.

    An end before its start means that the partition was deleted and created again, or cut back.
    Topics in `created_again` were created again between start and end whatever their offsets, and
    those in `kept` were not.  What was created again, or may have been, is read from its earliest
    record; of a log that was cut back, everything below the end was read before, so nothing is read
    once more.  Topics in `replaced` were created again after the end: nothing of them is left, and
    what has their names belongs to a later micro-batch.  With `is_start` nothing was read before,
    so an end before its start means that the user asked for a start beyond the end; nothing is read
    then.
    """
    ranges, losses = [], []
    for tp in sorted(start.keys() - end.keys()):
        losses.append(f"{tp} is gone; it was read up to offset {start[tp]}")
    for tp in sorted(end):
        stop = end[tp]
        if tp not in watermarks or tp.topic in replaced:
            begin = 0 if tp.topic in created_again else start.get(tp, 0)
            if begin < stop:
                fate = "was deleted and created again" if tp.topic in replaced else "is gone"
                losses.append(f"{tp} {fate}; offsets {begin} to {stop} were still to be read")
            continue
        earliest, latest = watermarks[tp]
        if tp not in start:
            begin = min(earliest, stop)
            if begin != 0:
                losses.append(f"new partition {tp} starts at offset {begin} instead of 0")
        elif tp.topic in created_again:
            losses.append(
                f"{tp} was deleted and created again; it was read up to offset {start[tp]}"
            )
            begin = min(earliest, stop)
        elif stop < start[tp]:
            was_cut = tp.topic in kept and not is_start
            losses.append(f"{tp} went back from offset {start[tp]} to {stop}: {_why(was_cut)}")
            begin = stop if was_cut or is_start else min(earliest, stop)
        else:
            begin = start[tp]
        ranges.append(_within(tp, begin, stop, earliest, latest, losses))
    return Plan(tuple(r for r in ranges if r.size > 0), tuple(losses))


def _why(was_cut: bool) -> str:
    """Why a partition's end is before its start."""
    if was_cut:
        return "its log was cut back, so other records than were read come at these offsets now"
    return "it was deleted and created again, or the starting offset lies beyond its end"


def plan_batch(
    start: Mapping[TopicPartition, int],
    end: Mapping[TopicPartition, int],
    watermarks: Watermarks,
    options: tuple[str, str] = ("startingOffsets", "endingOffsets"),
) -> Plan:
    """Ranges of a batch query.  `start` and `end` hold the same partitions; `options` are the names
    of those that set them.  Raises ConfigError for a start beyond its end, as Spark's Kafka
    connector does, whatever failOnDataLoss says: nothing is there to be read."""
    beyond = [tp for tp in sorted(end) if start[tp] > end[tp]]
    if beyond:
        tp = beyond[0]
        others = f" (and of {len(beyond) - 1} other partitions)" if beyond[1:] else ""
        raise ConfigError(
            f"{tp}: the query would start at offset {start[tp]} by {options[0]}, beyond its end at "
            f"offset {end[tp]} by {options[1]}{others}; {tp} holds offsets {watermarks[tp][0]} to "
            f"{watermarks[tp][1]}",
            hint=f"correct {options[0]} or {options[1]}; if the offsets are of an earlier topic "
            "of this name, which was deleted, start at earliest",
        )
    losses: list[str] = []
    ranges = [_within(tp, start[tp], end[tp], *watermarks[tp], losses) for tp in sorted(end)]
    return Plan(tuple(r for r in ranges if r.size > 0), tuple(losses))


def _within(
    tp: TopicPartition, begin: int, stop: int, earliest: int, latest: int, losses: list[str]
) -> OffsetRange:
    """``[begin, stop)`` limited to what the log holds; the rest is a loss."""
    if begin >= stop:
        return OffsetRange(tp, begin, begin)
    if begin < earliest:
        losses.append(
            f"{tp} no longer has offsets {begin} to {min(earliest, stop)}: "
            f"its first record is {earliest}"
        )
    if stop > latest:
        losses.append(f"{tp} ends at offset {latest}, before offset {stop}, where the query ends")
    begin, stop = max(begin, earliest), min(stop, latest)
    return OffsetRange(tp, begin, max(begin, stop))


def new_records(
    start: Mapping[TopicPartition, int],
    end: Mapping[TopicPartition, int],
    earliest: Mapping[TopicPartition, int],
) -> Offsets:
    """How many offsets lie between `start` (for new partitions `earliest`) and `end`, for each
    partition that has any."""
    sizes = {tp: stop - start.get(tp, earliest.get(tp, stop)) for tp, stop in end.items()}
    return {tp: size for tp, size in sizes.items() if size > 0}


def rate_limit(
    limit: int,
    start: Mapping[TopicPartition, int],
    end: Mapping[TopicPartition, int],
    earliest: Mapping[TopicPartition, int],
) -> Offsets:
    """Ends of a micro-batch of about `limit` records.  As in Spark's Kafka connector, the limit is
    divided in proportion to what each partition has waiting, with at least one record each."""
    sizes = new_records(start, end, earliest)
    total = sum(sizes.values())
    out: Offsets = {}
    for tp, stop in end.items():
        size = sizes.get(tp, 0)
        if size:
            share = limit * size // total or 1
            stop = min(stop, start.get(tp, earliest.get(tp, stop)) + share)
        out[tp] = stop
    return out


def split(
    ranges: Iterable[OffsetRange], min_partitions: int | None, max_records: int | None
) -> list[OffsetRange]:
    """Split ranges into pieces of at most `max_records` offsets, then into about `min_partitions`
    ranges.  As in Spark's Kafka connector, large ranges are divided in proportion to their size and
    small ones stay whole."""
    out = [r for r in ranges if r.size > 0]
    if max_records is not None:
        out = [piece for r in out for piece in _divide(r, -(-r.size // max_records))]
    if min_partitions is None or min_partitions <= len(out):
        return out
    total = sum(r.size for r in out)
    whole = {r for r in out if _share(r.size, total, min_partitions) == 1}
    rest = total - sum(r.size for r in whole)
    wanted = max(min_partitions - len(whole), 1)
    return [
        piece
        for r in out
        for piece in ([r] if r in whole else _divide(r, _share(r.size, rest, wanted)))
    ]


def _share(size: int, total: int, parts: int) -> int:
    return max(math.floor(size / total * parts + 0.5), 1)


def _divide(r: OffsetRange, parts: int) -> list[OffsetRange]:
    parts = min(parts, r.size)
    bounds = [r.start + r.size * i // parts for i in range(parts + 1)]
    return [OffsetRange(r.topic_partition, a, b) for a, b in pairwise(bounds)]
