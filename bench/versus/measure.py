"""Turns, latencies and figures.

Owns: how two systems take turns (A B A B, never one after the other), HDR histograms, and the form
of a figure.

Latencies of paced work count from the moment at which a record was due, not from the one at which
it was sent, so a pause that delays later records shows in them (no coordinated omission).
One-at-a-time work has no schedule: each call is a sample of its own.

A figure's `value` is kdirect's, `against_value` Kafka's, `ratio` value / against_value, as in all
rows of the benchmark; `settings.factor` says how many times better kdirect is, whichever way better
lies, and `settings.bar` what was asked for.  What was measured of each system is in
`settings.results`, under the names of OpenMessaging's benchmark: rates in records a second,
latencies in milliseconds.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from hdrh.histogram import HdrHistogram
from memory import touch
from versus.systems import Pair, System

if TYPE_CHECKING:
    from versus.lives import Found

LONGEST_NS = 3600 * 10**9
_told: list[Pair | Found] = []
PERCENTILES = {"50pct": 50, "75pct": 75, "95pct": 95, "99pct": 99, "999pct": 99.9, "9999pct": 99.99}


def turns(
    rounds: int, runs: Mapping[str, Callable[[], Any]], *, memory: int = 0
) -> dict[str, list[Any]]:
    """Each of `runs` once a round, in their order; before each, `memory` bytes are made sure to be
    there."""
    out: dict[str, list[Any]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            gc.collect()
            if memory:
                touch(memory)
            out[name].append(run())
    return out


def histogram(samples_ns: Iterable[int]) -> HdrHistogram:
    """Three significant digits, one nanosecond to an hour."""
    out = HdrHistogram(1, LONGEST_NS, 3)
    for sample in samples_ns:
        out.record_value(max(1, int(sample)))
    return out


def latencies(kind: str, rounds: list[list[int]]) -> dict[str, Any]:
    """OpenMessaging's fields of a latency: `kind` is publish, publishDelay or endToEnd;
    milliseconds, over all rounds."""
    whole = histogram(sample for samples in rounds for sample in samples)
    name = f"{kind}Latency"
    out: dict[str, Any] = {f"{name}Avg": whole.get_mean_value() / 1e6}
    out |= {
        f"{name}{suffix}": whole.get_value_at_percentile(p) / 1e6
        for suffix, p in PERCENTILES.items()
    }
    out |= {f"{name}Max": whole.get_max_value() / 1e6, "samples": whole.get_total_count()}
    out["medians_us"] = [
        round(statistics.median(samples) / 1e3, 3) for samples in rounds if samples
    ]
    return out


def latency_figure(
    row: str,
    kind: str,
    samples: Mapping[str, list[list[int]]],
    pair: Pair | Found,
    *,
    bar: float | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """A figure of medians: the median over the rounds of each round's p50, in microseconds."""
    results = {key: latencies(kind, rounds) for key, rounds in samples.items()}
    value, against = (
        statistics.median(results[s.key]["medians_us"]) if s.key in results else None
        for s in pair.both
    )
    p99 = {
        f"{s.key}_p99_us": round(results[s.key][f"{kind}Latency99pct"] * 1e3, 1)
        for s in pair.both
        if s.key in results
    }
    return figure(
        row, "us", value, against, pair, results, lower_is_better=True, bar=bar, **p99, **settings
    )


def rate_figure(
    row: str,
    unit: str,
    field: str,
    rates: Mapping[str, list[float]],
    pair: Pair | Found,
    *,
    bar: float | None = None,
    per_record: float = 1,
    **settings: Any,
) -> dict[str, Any]:
    """A figure of rates: medians of the rounds.  `per_record` turns the unit into records, for
    OpenMessaging's `field`."""
    results = {
        key: {field: statistics.median(runs) / per_record, "runs": [round(r, 3) for r in runs]}
        for key, runs in rates.items()
        if runs
    }
    value, against = (
        statistics.median(rates[s.key]) if s.key in rates else None for s in pair.both
    )
    return figure(row, unit, value, against, pair, results, bar=bar, **settings)


def figure(
    row: str, unit: str, value: float | None, against: float | None, pair: Pair | Found,
    results: Mapping[str, Any], *,
    lower_is_better: bool = False, bar: float | None = None,
    limit: tuple[str, float] | None = None, **settings: Any,
) -> dict[str, Any]:  # fmt: skip
    """`bar`: how many times better kdirect shall be.  `limit`: what kdirect's own value shall be,
    as ("at least" or "at most", a value).  `value`: None if kdirect was not measured, for the
    reason in `settings` under `not_measured`."""
    factor = (
        None
        if not against or not value
        else (against / value if lower_is_better else value / against)
    )
    out: dict[str, Any] = {"lower_is_better": lower_is_better, "factor": factor}
    if pair not in _told:  # once for the brokers' life is enough
        _told.append(pair)
        out["set_up"] = {s.key: s.settings for s in pair.both}
    if bar is not None:
        out |= {"bar": bar, "bar_met": factor is not None and factor >= bar}
    if limit is not None:
        word, bound = limit
        met = value is not None and (value <= bound if word == "at most" else value >= bound)
        out |= {"limit": f"{word} {bound:g} {unit}", "limit_met": met}
    return {
        "row": row,
        "value": value,
        "unit": unit,
        "against": pair.kafka.label,
        "against_value": against,
        "settings": {**settings, **out, "results": dict(results)},
    }


def rounds_figure(
    row: str,
    unit: str,
    field: str,
    runs: Mapping[str, list[float]],
    pair: Pair | Found,
    *,
    scale: float = 1,
    lower_is_better: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """A figure of one number a round: the medians.  `scale` turns the unit into that of `field`."""
    results = {
        key: {field: statistics.median(found) * scale, "runs": [round(r, 3) for r in found]}
        for key, found in runs.items()
    }
    value, against = (statistics.median(runs[s.key]) if s.key in runs else None for s in pair.both)
    return figure(
        row, unit, value, against, pair, results, lower_is_better=lower_is_better, **settings
    )


def warm(rounds: int, runs: Mapping[str, Callable[[], Any]]) -> None:
    """Let connections open and the JVM compile before anything counts."""
    for _ in range(rounds):
        for run in runs.values():
            run()


def cpu_of(system: System, run: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of the broker while `run` ran, and what it returned."""
    before = system.cpu_s()
    result = run()
    return system.cpu_s() - before, result
