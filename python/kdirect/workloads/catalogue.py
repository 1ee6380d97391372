"""YSB, CM and RO, and every workload by name.

YSB (Yahoo! Streaming Benchmark): records of 78 bytes; views of one campaign in ten minutes, where a
third of the records are views.  CM (cluster monitoring): records of 64 bytes, as in Google's trace
of 12,500 machines; the mean CPU of each job in two seconds.  RO (read only): a key and a time; how
often each key occurs.  `zipf` is RO with keys of that distribution.
"""

from __future__ import annotations

from typing import Any

from kdirect.errors import ConfigError
from kdirect.format.fixed_layout import FixedLayout
from kdirect.state.aggregates import Aggregate
from kdirect.state.expressions import column
from kdirect.state.plan import AggregatePlan
from kdirect.state.windows import NoWindow, Tumbling, Window, duration_us
from kdirect.workloads.auctions import nexmark
from kdirect.workloads.generate import Filler
from kdirect.workloads.workload import (
    MOST_KEYS,
    EventTime,
    Keys,
    Stream,
    Workload,
    check_number,
)

YSB = FixedLayout.of(
    "user:int64",
    "page:int64",
    "campaign:int64",
    "ad_type:int64",
    "event_type:int64",
    "time:timestamp(ms)",
    "ip:int64",
    "filler1:int64",
    "filler2:int64",
    "filler3:int32",
    "filler4:int16",
)
CM = FixedLayout.of(
    "time:timestamp(ms)",
    "job:int64",
    "task:int64",
    "machine:int64",
    "event:int32",
    "user:int32",
    "category:int32",
    "priority:int32",
    "cpu:float32",
    "ram:float32",
    "disk:float32",
    "constraints:int32",
)
RO = FixedLayout.of("key:int64", "time:timestamp(ms)")
assert (YSB.size, CM.size, RO.size) == (78, 64, 16)

VIEW = 0  # of YSB's three types of events, the one that counts
MACHINES = 12_500


def ysb(
    *,
    keys: int = 10_000_000,
    zipf: float | None = None,
    pareto: float | None = None,
    seed: int = 1,
    window: str = "10 minutes",
    **times: Any,
) -> Workload:
    """Views by campaign in tumbling windows.  `keys` campaigns; `times` are those of EventTime."""
    campaigns = Keys(range=keys, zipf=zipf, pareto=pareto)
    when = EventTime(**times)
    spans = Tumbling(size_us=duration_us(window, "window"))

    def fill(filler: Filler) -> None:
        filler.uniform("user", 0, 1 << 40)
        filler.uniform("page", 0, 1 << 40)
        campaigns.fill(filler, "campaign")
        filler.uniform("ad_type", 0, 5)
        filler.uniform("event_type", 0, 3)
        filler.times("time", when)
        filler.uniform("ip", 0, 1 << 32)
        for name in ("filler1", "filler2", "filler3", "filler4"):
            filler.index(name, 0, 0)

    def views(read: Any) -> AggregatePlan:
        given = read("ysb", where=column("event_type").equals(VIEW))
        return AggregatePlan(
            input=given,
            keys=("campaign",),
            window=spans,
            aggregates=(Aggregate(kind="count"),),
        )

    stream = Stream(name="ysb", layout=YSB, fill=fill, seed=seed)
    return Workload(name="ysb", streams={"ysb": stream}, queries={"ysb": views})


def cm(
    *,
    jobs: int = 10_000,
    zipf: float | None = 1.1,
    pareto: float | None = None,
    machines: int = MACHINES,
    seed: int = 1,
    window: str = "2 seconds",
    **times: Any,
) -> Workload:
    """The mean CPU of each job in tumbling windows; few jobs have most of the tasks."""
    of_job = Keys(range=jobs, zipf=zipf if pareto is None else None, pareto=pareto)
    when = EventTime(**times)
    spans = Tumbling(size_us=duration_us(window, "window"))
    check_number("machines", machines, 1, MOST_KEYS)

    def fill(filler: Filler) -> None:
        filler.times("time", when)
        of_job.fill(filler, "job")
        filler.uniform("task", 0, 1000)
        filler.uniform("machine", 0, machines)
        filler.uniform("event", 0, 9)
        filler.uniform("user", 0, 1000)
        filler.uniform("category", 0, 4)
        filler.uniform("priority", 0, 12)
        filler.reals("cpu", 0.0, 1.0)
        filler.reals("ram", 0.0, 1.0)
        filler.reals("disk", 0.0, 1.0)
        filler.uniform("constraints", 0, 2)

    def mean(read: Any) -> AggregatePlan:
        return AggregatePlan(
            input=read("cm"),
            keys=("job",),
            window=spans,
            aggregates=(Aggregate(kind="avg", column="cpu"),),
        )

    stream = Stream(name="cm", layout=CM, fill=fill, seed=seed)
    return Workload(name="cm", streams={"cm": stream}, queries={"cm": mean})


def ro(
    *,
    keys: int = 100_000_000,
    zipf: float | None = None,
    pareto: float | None = None,
    seed: int = 1,
    window: str | None = None,
    **times: Any,
) -> Workload:
    """How often each key occurs: in all, or in tumbling windows if `window` is given."""
    of_record = Keys(range=keys, zipf=zipf, pareto=pareto)
    when = EventTime(**times)
    spans: Window = (
        NoWindow() if window is None else Tumbling(size_us=duration_us(window, "window"))
    )

    def fill(filler: Filler) -> None:
        of_record.fill(filler, "key")
        filler.times("time", when)

    def count(read: Any) -> AggregatePlan:
        return AggregatePlan(
            input=read("ro"), keys=("key",), window=spans, aggregates=(Aggregate(kind="count"),)
        )

    stream = Stream(name="ro", layout=RO, fill=fill, seed=seed)
    return Workload(name="ro", streams={"ro": stream}, queries={"ro": count})


def _zipf(*, zipf: float | None = 1.0, **settings: Any) -> Workload:
    return ro(zipf=zipf, **settings)


NAMES = {"ysb": ysb, "nexmark": nexmark, "cm": cm, "ro": ro, "zipf": _zipf}


def named(name: str, **settings: Any) -> Workload:
    """The workload of this name.  ConfigError for a name or a setting that there is not."""
    maker = NAMES.get(name)
    if maker is None:
        raise ConfigError(f"there is no workload {name!r}", hint="use " + ", ".join(NAMES))
    try:
        return maker(**settings)
    except TypeError as e:
        raise ConfigError(
            f"the workload {name} does not take all of {', '.join(sorted(settings))}: {e}",
            hint="leave out what it does not have",
        ) from e
