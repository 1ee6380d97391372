"""What every workload is: streams of records of a fixed layout, and plans over them.

Owns: `Stream`, `Workload`, and the options that all have in common: event times (`EventTime`) and
keys (`Keys`).  A stream is a function of record numbers: `records(first, count)` gives the same
bytes for a number whenever and in whatever order it is asked, so a topic of any size and number of
partitions can be written in pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kdirect.errors import ConfigError
from kdirect.format.fixed_layout import FixedLayout
from kdirect.state.plan import AggregatePlan, Input, JoinPlan
from kdirect.workloads.generate import Filler

PIECE_BYTES = 512 << 10  # of records whose fields are filled in turn: they stay in a cache
MOST_KEYS = (1 << 53) - 1  # a double has them all
START_US = 1_700_000_000_000_000  # 14 November 2023, 22:13:20 UTC


def check_number(name: str, value: Any, least: int, most: int) -> None:
    """ConfigError, which names the option, unless `value` is a whole number from least to most."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ConfigError(
            f"{name}={value!r} is out of range", hint=f"give a whole number, {least} to {most}"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class EventTime:
    """Record number i happens at `start_us` + i * `step_us`.  Its event time is up to `disorder_us`
    earlier, at random, and for a share `late_share` of the records `late_by_us` earlier still."""

    start_us: int = START_US
    step_us: int = 10
    disorder_us: int = 0
    late_share: float = 0.0
    late_by_us: int = 0

    def __post_init__(self) -> None:
        for name in ("start_us", "step_us", "disorder_us", "late_by_us"):
            check_number(name, getattr(self, name), 0, 1 << 62)
        if not _is_number(self.late_share) or not 0 <= self.late_share <= 1:
            raise ConfigError(f"late_share {self.late_share} is no share", hint="give 0 to 1")
        if self.start_us < self.disorder_us + self.late_by_us:
            raise ConfigError(
                "records would be from before 1970", hint="start later, or make them less late"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """Keys in [0, range): uniform, or Zipf with the exponent `zipf`, or Pareto with `pareto`.
    With the latter two, key 0 is the hottest."""

    range: int
    zipf: float | None = None
    pareto: float | None = None

    def __post_init__(self) -> None:
        check_number("keys", self.range, 1, MOST_KEYS)
        if self.zipf is not None and self.pareto is not None:
            raise ConfigError("keys are both Zipf and Pareto", hint="choose one of them")
        for name, exponent in (("zipf", self.zipf), ("pareto", self.pareto)):
            if exponent is not None and not (_is_number(exponent) and 0 <= exponent <= 20):
                raise ConfigError(f"{name}={exponent} is out of range", hint="give 0 to 20")

    def fill(self, filler: Filler, name: str, base: int = 0) -> None:
        """Fill the field `name` with keys, to which `base` is added."""
        if self.zipf:
            filler.zipf(name, base, self.range, self.zipf)
        elif self.pareto:
            filler.pareto(name, base, self.range, self.pareto)
        else:
            filler.uniform(name, base, self.range)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Records of one `layout`; `fill` fills the fields of some of them.  `time` is the field of
    their event time.  `mixture`: of so many events of the workload (the last number), so many are
    records of this stream (the first one), after so many others (the second)."""

    name: str
    layout: FixedLayout
    fill: Callable[[Filler], None]
    seed: int
    time: str = "time"
    mixture: tuple[int, int, int] = (1, 0, 1)

    def among(self, events: int) -> int:
        """How many of the first `events` events of the workload are records of this stream."""
        own, before, total = self.mixture
        return events // total * own + min(max(events % total - before, 0), own)

    def records(self, first: int, count: int, step: int = 1, out: Any = None) -> Any:
        """The records number `first`, `first` + `step` and so on, `count` of them, as an array of
        the layout's `dtype`; into `out`, an array of at least as many, if it is given."""
        if out is None:
            out = np.empty(count, self.layout.dtype())
        rows = out[:count]
        if rows.dtype.itemsize != self.layout.size or not rows.flags.c_contiguous:
            raise ConfigError(
                f"the array is none of {self.name}", hint="make it with the layout's dtype()"
            )
        if count == 0:
            return rows
        piece = PIECE_BYTES // self.layout.size + 1
        # The name, too: fields of one name in two streams have nothing to do with each other.
        seed = (self.name, self.seed)
        with Filler(rows.view(np.uint8), self.layout, seed, first, step) as filler:
            for start in range(0, count, piece):
                filler.go(start, min(piece, count - start))
                self.fill(filler)
        return rows

    def input(self, topic: str, **settings: Any) -> Input:
        """How the engine reads the stream from a topic."""
        return Input(
            topic=topic,
            name=settings.pop("name", self.name),
            value_format="fixed",
            layout=self.layout,
            time=self.time,
            **settings,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Streams by name, and the plans of queries over them.

    `plan(query, topics)` names the topic of each stream that the query reads: a mapping by stream,
    or just text where there is one."""

    name: str
    streams: Mapping[str, Stream]
    queries: Mapping[str, Callable[..., AggregatePlan | JoinPlan]]

    def plan(
        self, topics: Mapping[str, str] | str, query: str | None = None, **settings: Any
    ) -> AggregatePlan | JoinPlan:
        """The plan of a query, by default of the first one.  `settings` are those of its inputs
        (`delay_us`, `mode`, ..)."""
        query = next(iter(self.queries)) if query is None else query
        if query not in self.queries:
            raise ConfigError(
                f"the workload {self.name} has no query {query!r}",
                hint="it has " + ", ".join(self.queries),
            )
        by_stream = dict.fromkeys(self.streams, topics) if isinstance(topics, str) else topics
        return self.queries[query](
            lambda stream, **more: self.streams[stream].input(
                by_stream[stream], **{**settings, **more}
            )
        )
