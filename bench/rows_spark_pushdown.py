"""How long a Spark batch read of one percent of a topic takes, by a filter on offsets, against one
of all of it.

Both run in one session with one task slot, in turns after a warm-up of each, to Spark's noop sink;
the figures are medians.  A run has what every query costs (planning in a process of its own, a
task), which does not become less with what is read.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from rows_spark import fill, spark_and_broker, to_noop

VALUE_BYTES = 100
ROWS = 40_000_000  # some 10 s of reading and more: what a query costs at least is about 0.3 s
QUICK_ROWS = 200_000
ROUNDS = 5


def spark_pushdown(seconds: float, quick: bool) -> list[dict[str, Any]]:
    """Seconds of `where("offset >= a AND offset < b")` over 1 % of a topic, against all of it."""
    rows = QUICK_ROWS if quick else ROWS
    with spark_and_broker() as (spark, address, _):
        transport = fill(address, "bench", rows, VALUE_BYTES)
        whole = (
            spark.read.format("kdirect")
            .option("kafka.bootstrap.servers", address)
            .option("subscribe", "bench")
            .load()
        )
        first = rows // 2
        part = whole.where(f"offset >= {first} AND offset < {first + rows // 100}")
        assert part.count() == rows // 100
        runs: dict[str, list[float]] = {"part": [], "whole": []}
        to_noop(part)
        began = time.monotonic()
        while len(runs["whole"]) < (1 if quick else ROUNDS) and (
            len(runs["whole"]) < 3 or time.monotonic() - began < 4 * seconds
        ):
            runs["part"].append(to_noop(part))
            runs["whole"].append(to_noop(whole))
            if quick:
                break
    value, against = (statistics.median(runs[name]) for name in ("part", "whole"))
    return [
        {
            "row": "spark-pushdown",
            "value": value,
            "unit": "s",
            "against": "the whole topic",
            "against_value": against,
            "ratio": value / against,
            "settings": {
                "rows": rows,
                "value_bytes": VALUE_BYTES,
                "share": 0.01,
                "master": "local[1]",
                "transport": transport,
                "runs": len(runs["whole"]),
            },
        }
    ]
