"""Accelerated queries against Spark's own batch SQL, over the same topic."""

from __future__ import annotations

from collections import Counter
from datetime import datetime
from typing import Any

import pytest

from kdirect import workloads
from kdirect_spark import slash
from tests.spark import slash_runs

pytestmark = pytest.mark.spark

EVENTS = 30_000
WORKLOADS = {
    "ysb": (workloads.ysb(keys=100, step_us=100_000, disorder_us=5_000_000), {}),
    "nb7": (workloads.nexmark(step_us=20_000), {}),
    "nb8": (workloads.nexmark(step_us=20_000, paper=True), {"window": "2 minutes"}),
    "nb11": (workloads.nexmark(step_us=20_000), {"gap": "10 seconds"}),
    "cm": (workloads.cm(jobs=200, step_us=1_000), {}),
    "ro_window": (workloads.ro(keys=5_000, step_us=50_000), {}),
}


def _watermark(progress: list[Any]) -> datetime:
    """Below which all windows were emitted, as the figures of the last batch say."""
    figures = progress[-1].observedMetrics["slash"]["figures"]
    return datetime.fromisoformat(figures["watermark"]).replace(tzinfo=None)


@pytest.mark.parametrize("mode", ["slash", "uppar"])
@pytest.mark.parametrize("query", sorted(WORKLOADS))
def test_a_stream_has_the_closed_windows_of_batch_sql(spark, broker, tmp_path, query, mode):
    workload, settings = WORKLOADS[query]
    topic = slash_runs.write(broker.bootstrap_servers, workload, query, EVENTS, **settings)
    expected = slash_runs.rows_of(topic.frame(lambda: spark.read))
    limit = "2000" if query == "nb8" else "8000"
    stream = topic.frame(lambda: spark.readStream, maxOffsetsPerTrigger=limit)
    progress = slash_runs.run(
        slash.accelerate(stream, mode=mode, stateDir=tmp_path / "state"), tmp_path
    )
    assert len(progress) > 2
    found = slash_runs.written(spark, tmp_path)
    wanted = slash_runs.closed(expected, _watermark(progress), strictly=query == "nb11")
    assert len(wanted) > 50
    slash_runs.assert_same(found, wanted)


@pytest.mark.parametrize("query", sorted(WORKLOADS))
def test_a_batch_has_all_windows(spark, broker, query):
    workload, settings = WORKLOADS[query]
    topic = slash_runs.write(broker.bootstrap_servers, workload, query, EVENTS, **settings)
    frame = topic.frame(lambda: spark.read)
    fast = slash.accelerate(frame)
    assert [(f.name, f.dataType, f.nullable) for f in fast.schema] == [
        (f.name, f.dataType, f.nullable) for f in frame.schema
    ]
    slash_runs.assert_same(slash_runs.rows_of(fast), slash_runs.rows_of(frame))


def test_without_a_window_each_batch_has_the_keys_that_changed(spark, broker, tmp_path):
    topic = slash_runs.write(broker.bootstrap_servers, workloads.ro(keys=500), "ro", EVENTS)
    expected = slash_runs.rows_of(topic.frame(lambda: spark.read))
    batches: list[Counter[Any]] = []
    stream = topic.frame(lambda: spark.readStream, maxOffsetsPerTrigger="8000")
    query = (
        slash.accelerate(stream, stateDir=tmp_path / "state")
        .writeStream.foreachBatch(lambda rows, _: batches.append(slash_runs.rows_of(rows)))
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(120)
    last: dict[int, int] = {}
    for batch in batches:
        for key, count in batch:
            assert last.get(key, 0) < count
            last[key] = count
    assert Counter(last.items()) == expected
