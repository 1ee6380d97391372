"""The queries of the workloads (`kdirect.workloads`) as ordinary PySpark DataFrames.

Owns: what each query is in PySpark, and how a source of a workload's topic is declared.  They know
nothing of `accelerate`: the same DataFrame runs unwrapped and wrapped, in tests and benchmarks.

`nb11` is the query 11 of the public NEXMark suite, which counts the bids of each bidder's sessions.
The Slash paper joins bids and persons by session there; Spark has no join by session windows, so
that one runs as a plan of the engine only (`kdirect.workloads.nexmark`, query ``nb11``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kdirect.errors import ConfigError
from kdirect.format.fixed_layout import FixedLayout

Read = Callable[[str], Any]  # the DataFrame of a stream, by its name


def value_options(layout: FixedLayout) -> dict[str, str]:
    """The options of a source whose values have this layout."""
    return {
        "valueFormat": "fixed",
        "valueSchema": ", ".join(f"{f.name}:{f.type}@{f.position}" for f in layout.fields),
        "valueSize": str(layout.size),
    }


def ysb(read: Read, window: str = "10 minutes", delay: str = "0 seconds") -> Any:
    from pyspark.sql import functions as F

    events = read("ysb").withWatermark("time", delay).where("event_type = 0")
    return events.groupBy(F.window("time", window), "campaign").count()


def nb7(read: Read, window: str = "60 seconds", delay: str = "0 seconds") -> Any:
    from pyspark.sql import functions as F

    bids = read("bid").withWatermark("time", delay)
    return bids.groupBy(F.window("time", window), "auction").agg(F.max("price").alias("price"))


def nb8(read: Read, window: str = "12 hours", delay: str = "0 seconds") -> Any:
    from pyspark.sql import functions as F

    persons = (
        read("person")
        .withWatermark("time", delay)
        .select(F.window("time", window).alias("window"), F.col("id").alias("person"), "name")
    )
    auctions = (
        read("auction")
        .withWatermark("time", delay)
        .select(F.window("time", window).alias("opened"), "seller", F.col("id").alias("auction"))
    )
    same = (persons["window"] == auctions["opened"]) & (persons["person"] == auctions["seller"])
    return persons.join(auctions, same).select("window", "person", "name", "auction")


def nb11(read: Read, gap: str = "10 seconds", delay: str = "0 seconds") -> Any:
    from pyspark.sql import functions as F

    bids = read("bid").withWatermark("time", delay)
    return bids.groupBy(F.session_window("time", gap), "bidder").count()


def cm(read: Read, window: str = "2 seconds", delay: str = "0 seconds") -> Any:
    from pyspark.sql import functions as F

    tasks = read("cm").withWatermark("time", delay)
    return tasks.groupBy(F.window("time", window), "job").agg(F.avg("cpu").alias("cpu"))


def ro(read: Read) -> Any:
    return read("ro").groupBy("key").count()


def ro_window(read: Read, window: str = "10 minutes", delay: str = "0 seconds") -> Any:
    from pyspark.sql import functions as F

    return read("ro").withWatermark("time", delay).groupBy(F.window("time", window), "key").count()


# Query: the function, and the streams with the columns that it needs of each.
QUERIES: Mapping[str, tuple[Callable[..., Any], Mapping[str, tuple[str, ...]]]] = {
    "ysb": (ysb, {"ysb": ("campaign", "event_type", "time")}),
    "nb7": (nb7, {"bid": ("auction", "price", "time")}),
    "nb8": (nb8, {"person": ("id", "name", "time"), "auction": ("id", "seller", "time")}),
    "nb11": (nb11, {"bid": ("bidder", "time")}),
    "cm": (cm, {"cm": ("time", "job", "cpu")}),
    "ro": (ro, {"ro": ("key",)}),
    "ro_window": (ro_window, {"ro": ("key", "time")}),
}


def data_frame(
    reader: Callable[[], Any],
    query: str,
    layouts: Mapping[str, FixedLayout],
    topics: Mapping[str, str],
    servers: str,
    options: Mapping[str, str] | None = None,
    **settings: str,
) -> Any:
    """The DataFrame of `query`.  `reader` gives ``spark.read`` or ``spark.readStream``, `layouts`
    and `topics` are by stream, `options` are further ones of every source, and `settings` those of
    the query (`window`, `gap`, `delay`).  Only the columns that the query needs are decoded."""
    if query not in QUERIES:
        raise ConfigError(f"there is no query {query!r}", hint="use " + ", ".join(QUERIES))
    function, streams = QUERIES[query]

    def read(stream: str) -> Any:
        given = {
            "kafka.bootstrap.servers": servers,
            "subscribe": topics[stream],
            "startingOffsets": "earliest",
            "columns": ",".join(streams[stream]),
            **value_options(layouts[stream]),
            **(options or {}),
        }
        return reader().format("kdirect").options(**given).load()

    return function(read, **settings)
