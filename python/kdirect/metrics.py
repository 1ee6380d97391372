"""The one table of metrics: (name, label, unit, meaning).  Counters live in the object that counts;
`statistics()` methods return dicts keyed by these names, and docs/metrics.md is written from this table.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    unit: str
    room: str
    help: str


METRICS: tuple[Metric, ...] = ()


def names(room: str | None = None) -> frozenset[str]:
    """Names of all metrics, or of one room's."""
    return frozenset(m.name for m in METRICS if room is None or m.room == room)
