"""What tests of accelerated queries share: topics of workloads, queries run to their end, and what
Spark's batch SQL makes of the same topics."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from kdirect import connect, workloads
from kdirect.workloads.workload import Workload
from kdirect_spark.slash import workload_queries

SPARK = {
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.session.timeZone": "UTC",
    "spark.log.level": "ERROR",
}
_numbers = itertools.count()
RELATIVE = 1e-9  # of floats: sums are made in another order


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """A workload that was written to topics, and one of its queries over them."""

    workload: Workload
    query: str
    topics: Mapping[str, str]
    servers: str
    settings: Mapping[str, str]

    def frame(self, reader: Callable[[], Any], **options: str) -> Any:
        """The DataFrame of the query."""
        return workload_queries.data_frame(
            reader,
            self.query,
            {name: stream.layout for name, stream in self.workload.streams.items()},
            self.topics,
            self.servers,
            options,
            **self.settings,
        )


def write(
    servers: str,
    workload: Workload,
    query: str,
    events: int,
    partitions: int = 3,
    first: int = 0,
    topics: Mapping[str, str] | None = None,
    **settings: str,
) -> Topic:
    """Write `events` events of a workload from number `first` on to topics of their own."""
    _, streams = workload_queries.QUERIES[query]
    if topics is None:
        topics = {name: f"{name}-{next(_numbers)}" for name in streams}
    with connect(servers) as session:
        for name, topic in topics.items():
            stream = workload.streams[name]
            begin = stream.among(first)
            workloads.write(
                session,
                stream,
                topic,
                first=begin,
                records=stream.among(first + events) - begin,
                partitions=partitions,
            )
    return Topic(workload=workload, query=query, topics=topics, servers=servers, settings=settings)


def rows_of(frame: Any) -> Counter[tuple[Any, ...]]:
    """The rows of a DataFrame as a multiset; windows as their bounds."""
    return Counter(plain(row) for row in frame.collect())


def plain(row: Iterable[Any]) -> tuple[Any, ...]:
    """A row without Spark's types."""
    return tuple(
        plain(value) if isinstance(value, tuple) else
        tuple(sorted(value)) if isinstance(value, list) else value
        for value in row
    )  # fmt: skip


def assert_same(found: Counter[tuple[Any, ...]], expected: Counter[tuple[Any, ...]]) -> None:
    """Equal as multisets; floats within RELATIVE."""
    if found == expected:
        return
    extra, missing = found - expected, expected - found
    assert sum(extra.values()) == sum(missing.values()), _few(extra, missing)
    for mine, theirs in zip(_sorted(extra), _sorted(missing)):
        assert _close(mine, theirs), _few(extra, missing)


def _few(extra: Counter[Any], missing: Counter[Any]) -> str:
    return (
        f"{sum(extra.values())} rows too many, as {list(extra)[:3]}, and"
        f" {sum(missing.values())} missing, as {list(missing)[:3]}"
    )


def _sorted(rows: Counter[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return sorted(rows.elements(), key=lambda row: tuple(_rounded(value) for value in row))


def _rounded(value: Any) -> str:
    return f"{value:.6e}" if isinstance(value, float) else repr(value)


def _close(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, tuple) and isinstance(theirs, tuple):
        return len(mine) == len(theirs) and all(map(_close, mine, theirs))
    if isinstance(mine, float) and isinstance(theirs, float):
        return math.isclose(mine, theirs, rel_tol=RELATIVE, abs_tol=1e-300)
    return mine == theirs


def run(frame: Any, directory: Path, **trigger: Any) -> list[Any]:
    """Run a stream over what is there into Parquet files, to its end; its progress reports."""
    query = (
        frame.writeStream.format("parquet")
        .option("path", str(directory / "rows"))
        .option("checkpointLocation", str(directory / "checkpoint"))
        .trigger(**(trigger or {"availableNow": True}))
        .start()
    )
    assert query.awaitTermination(120), query.status
    return list(query.recentProgress)


def time_of(watermark: str) -> datetime:
    """A watermark of the figures as Spark gives times in a session in UTC."""
    return datetime.fromisoformat(watermark).replace(tzinfo=None)


def written(spark: Any, directory: Path, sink: str = "parquet") -> Counter[tuple[Any, ...]]:
    """The rows that a query wrote, as `run` does."""
    return rows_of(spark.read.format(sink).load(str(directory / "rows")))


def closed(
    rows: Counter[tuple[Any, ...]], watermark: Any, *, strictly: bool = False
) -> Counter[tuple[Any, ...]]:
    """The rows whose window, their first column, has ended by `watermark`; of sessions, before."""
    return Counter(
        {
            row: count
            for row, count in rows.items()
            if (row[0][1] < watermark if strictly else row[0][1] <= watermark)
        }
    )
