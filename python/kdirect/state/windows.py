"""Windows in event time: which ones a row falls into, and which ones a clock closes.

A window is ``[start, end)``.  Aligned windows are stored in *buckets*: bucket i of a width w and an
origin o is ``[o + i*w, o + (i+1)*w)``.  A tumbling window is one bucket.  A sliding window is a run
of buckets whose width, its *slice*, is the greatest common divisor of size and slide, so that a row
updates one bucket however many windows it falls into (general slicing).  A session grows with its
rows and is no bucket; its rows are kept by key.  `NoWindow` has the one bucket 0, which never
closes.

Division rounds towards minus infinity, so times before the origin, and before 1970, fall right.
Pure arithmetic on int64 microseconds; a bound beyond int64 is clamped to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from kdirect.errors import ConfigError
from kdirect.option_table import duration_ms
from kdirect.state.strict import Members, shown

TIME_MIN = -(1 << 63)  # earlier than any event: nothing has been seen, nothing is closed
TIME_MAX = (1 << 63) - 1
LONGEST_US = 3_660 * 86_400_000_000  # ten years and some days
MOST_SLICES = 100_000  # windows that one bucket may belong to

_WORDS_US = {
    "microsecond": 1, "millisecond": 1_000, "second": 1_000_000, "minute": 60_000_000,
    "hour": 3_600_000_000, "day": 86_400_000_000, "week": 604_800_000_000,
}  # fmt: skip


def clamp(time_us: int) -> int:
    return min(max(time_us, TIME_MIN), TIME_MAX)


def duration_us(value: Any, what: str) -> int:
    """Microseconds of a duration: an int of microseconds, ``"10 minutes"`` or ``"500ms"``.

    Raises ConfigError, which names `what`.  Months have no fixed length and are refused."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    words = str(value).lower().replace("interval ", "").split()
    if words and len(words) % 2 == 0:
        span = 0
        for number, unit in zip(words[::2], words[1::2]):
            unit_us = _WORDS_US.get(unit.removesuffix("s"))
            if unit_us is None or not number.lstrip("-").isdecimal():
                break
            span += int(number) * unit_us
        else:
            return span
    text = str(value).strip()
    if text.endswith("us") and text[:-2].strip().isdecimal():
        return int(text[:-2])
    try:
        if any(c.isalpha() for c in text):
            return duration_ms(text) * 1000
    except ConfigError:
        pass
    raise ConfigError(
        f"{what}: {shown(value)} is no duration",
        hint='write for example "10 minutes", "500 milliseconds" or microseconds as an integer',
    )


def _checked(value: Any, what: str, low: int = 1) -> int:
    span = duration_us(value, what)
    if not low <= span <= LONGEST_US:
        raise ConfigError(
            f"{what}: {shown(value)} is out of range",
            hint=f"give at least {low} microseconds and at most ten years",
        )
    return span


class _Aligned:
    """What windows of buckets have in common; `bucket_us` and `origin_us` come from each."""

    __slots__ = ()
    bucket_us: int
    size_us: int
    slide_us: int
    origin_us: int

    def bucket(self, time_us: int) -> int:
        """The bucket that a row of this event time updates."""
        return (time_us - self.origin_us) // self.bucket_us

    def bucket_start(self, bucket: int) -> int:
        return clamp(self.origin_us + bucket * self.bucket_us)

    def windows_of(self, bucket: int) -> range:
        """Indices of the windows that contain a bucket, ascending."""
        start = bucket * self.bucket_us  # relative to the origin
        last = start // self.slide_us
        first = -((self.size_us - self.bucket_us - start) // self.slide_us)
        return range(first, last + 1)

    def buckets_of(self, window: int) -> range:
        """The buckets of a window, ascending.  Where the slide is longer than the size, some
        buckets belong to no window."""
        first = window * self.slide_us // self.bucket_us
        return range(first, first + self.size_us // self.bucket_us)

    def bounds(self, window: int) -> tuple[int, int]:
        """(start, end) of a window."""
        start = self.origin_us + window * self.slide_us
        return clamp(start), clamp(start + self.size_us)

    def is_closed(self, end: int, closes: int) -> bool:
        """Is a window with this end closed when the clock is at `closes`?"""
        return end <= closes

    def closed_windows(self, closes: int) -> int:
        """The first window that a clock of `closes` leaves open: all below have end <= closes."""
        if closes == TIME_MIN:
            return -(1 << 63)
        return (closes - self.origin_us - self.size_us) // self.slide_us + 1

    def closing(self, before: int, closes: int) -> range:
        """Windows that close when the clock goes from `before` to `closes`."""
        return range(self.closed_windows(before), self.closed_windows(closes))

    def dropped_buckets(self, closes: int) -> int:
        """The first bucket that an open window, at a clock of `closes`, still needs: all below are
        of closed windows only."""
        if closes == TIME_MIN:
            return -(1 << 63)
        return self.closed_windows(closes) * self.slide_us // self.bucket_us

    def is_late(self, time_us: int, closed_before: int) -> bool:
        """Have all windows of a row with this event time been emitted?  A row that still falls into
        an open window is not late."""
        return self.bucket(time_us) < self.dropped_buckets(closed_before)

    def late_below(self, closed_before: int) -> int:
        """Rows with an earlier event time are late: one comparison a row."""
        if closed_before == TIME_MIN:
            return TIME_MIN
        return self.bucket_start(self.dropped_buckets(closed_before))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tumbling(_Aligned):
    """Windows of one size, one after the other."""

    kind: ClassVar[str] = "tumbling"
    size_us: int
    origin_us: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "size_us", _checked(self.size_us, "window size"))
        origin = duration_us(self.origin_us, "window origin") % self.size_us
        object.__setattr__(self, "origin_us", origin)

    @property
    def bucket_us(self) -> int:  # type: ignore[override]
        return self.size_us

    @property
    def slide_us(self) -> int:  # type: ignore[override]
        return self.size_us

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "size_us": self.size_us, "origin_us": self.origin_us}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sliding(_Aligned):
    """Windows of one size, one beginning every `slide_us`."""

    kind: ClassVar[str] = "sliding"
    size_us: int
    slide_us: int
    origin_us: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "size_us", _checked(self.size_us, "window size"))
        object.__setattr__(self, "slide_us", _checked(self.slide_us, "window slide"))
        if self.slide_us > self.size_us:
            raise ConfigError(
                f"window slide: {self.slide_us} us is longer than the size, {self.size_us} us",
                hint="rows between two windows would be lost: filter them instead",
            )
        if self.size_us // self.bucket_us > MOST_SLICES:
            raise ConfigError(
                f"window: size {self.size_us} us and slide {self.slide_us} us make "
                f"{self.size_us // self.bucket_us} slices a window, more than {MOST_SLICES}",
                hint="choose a slide that divides the size",
            )
        origin = duration_us(self.origin_us, "window origin") % self.slide_us
        object.__setattr__(self, "origin_us", origin)

    @property
    def bucket_us(self) -> int:  # type: ignore[override]
        return math.gcd(self.size_us, self.slide_us)

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "size_us": self.size_us,
            "slide_us": self.slide_us,
            "origin_us": self.origin_us,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Rows of one key belong to one window as long as no gap of more than `gap_us` lies between
    them.  The window of a single row is ``[time, time + gap)``; windows that overlap or touch are
    united, as Spark and Flink do.  So a session closes only when the clock has passed its end by a
    microsecond: a row at the very end would still lengthen it."""

    kind: ClassVar[str] = "session"
    gap_us: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "gap_us", _checked(self.gap_us, "session gap"))

    def is_late(self, time_us: int, closed_before: int) -> bool:
        """Would a window of this row alone have been emitted?"""
        return clamp(time_us + self.gap_us) < closed_before

    def late_below(self, closed_before: int) -> int:
        """Rows with an earlier event time are late."""
        return clamp(closed_before - self.gap_us)

    def is_closed(self, end: int, closes: int) -> bool:
        """Is a window with this end closed when the clock is at `closes`?"""
        return end < closes

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "gap_us": self.gap_us}


@dataclass(frozen=True, slots=True, kw_only=True)
class NoWindow:
    """One aggregate for each key over all time.  Nothing closes and nothing is late; after each
    batch the keys that changed are emitted with their new values."""

    kind: ClassVar[str] = "none"

    def bucket(self, time_us: int) -> int:
        return 0

    def is_late(self, time_us: int, closed_before: int) -> bool:
        return False

    def late_below(self, closed_before: int) -> int:
        return TIME_MIN

    def is_closed(self, end: int, closes: int) -> bool:
        return False

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind}


Window: TypeAlias = Tumbling | Sliding | Session | NoWindow
Aligned: TypeAlias = Tumbling | Sliding


def window_from_json(value: Any) -> Window:
    """The window that `to_json` wrote.  Raises FormatError or ConfigError."""
    members = Members(value, "plan: window")
    kind = members.choice("kind", ("tumbling", "sliding", "session", "none"))
    found: Window
    if kind == "tumbling":
        found = Tumbling(size_us=members.number("size_us"), origin_us=members.number("origin_us"))
    elif kind == "sliding":
        found = Sliding(
            size_us=members.number("size_us"),
            slide_us=members.number("slide_us"),
            origin_us=members.number("origin_us"),
        )
    elif kind == "session":
        found = Session(gap_us=members.number("gap_us"))
    else:
        found = NoWindow()
    members.close()
    return found
