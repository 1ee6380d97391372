"""Which ranges share a task, and where tasks run."""

from __future__ import annotations

import pickle
import random
import socket

import pytest

from kdirect.errors import ConfigError
from kdirect_spark.broker_view import RangeGroup, RangePartition, ranges_of
from kdirect_spark.placement import grouped, marked, names_of
from kdirect_spark.settings import source_settings


def test_groups_hold_each_range_once_and_about_the_same():
    rng = random.Random(15)
    for _ in range(500):
        n, most = rng.randrange(1, 40), rng.randrange(1, 12)
        sizes = [rng.choice([1, 2, 3, 50, 1000]) for _ in range(n)]
        homes = [rng.choice("abc") for _ in range(n)]
        groups = grouped(sizes, homes, most)
        assert sorted(i for group in groups for i in group) == list(range(n))
        assert len(groups) <= most and len(groups) >= min(n, most, len(set(homes)))
        assert groups == sorted(groups) and all(group == sorted(group) for group in groups)
        if len(set(homes)) <= most:
            assert all(len({homes[i] for i in group}) == 1 for group in groups)
        alone = grouped(sizes, [""] * n, most)
        assert len(alone) == min(n, most)
        loads = [sum(sizes[i] for i in group) for group in alone]
        assert max(loads) <= max(*sizes, 1, sum(sizes) / most + max(sizes))


def test_a_large_range_has_a_task_to_itself():
    assert grouped([1000, 1, 2, 3, 2], [""] * 5, 2) == [[0], [1, 2, 3, 4]]
    assert grouped([5, 5], ["", ""], 4) == [[0], [1]]
    assert grouped([], [], 3) == []


def test_what_a_task_reads_says_where_it_should_run():
    near = marked(("a-host", "10.0.0.1"))
    one = RangePartition("t", 3, 5, 9, (), near)
    group = RangeGroup((one, RangePartition("t", 4, 0, 2)), near)
    for partition in (one, group):
        assert b"kdirect.hosts[a-host,10.0.0.1]" in pickle.dumps(partition)
    assert marked(()) == "" and b"kdirect.hosts[" not in pickle.dumps(RangePartition("t", 0, 0, 1))
    assert ranges_of(group) == group.ranges and ranges_of(one) == (one,) and ranges_of(None) == ()


def test_the_names_of_a_host():
    here = names_of("127.0.0.1")
    assert here[0] == "127.0.0.1" and "localhost" in here and socket.gethostname() in here
    assert names_of("nowhere.invalid") == ("nowhere.invalid",)


@pytest.mark.parametrize("other", ["minPartitions", "maxRecordsPerPartition"])
def test_what_joins_and_what_splits_exclude_each_other(other):
    options = {"kafka.bootstrap.servers": "h:1", "subscribe": "t", "coalescePartitions": "4"}
    assert source_settings(options, streaming=False).coalesce_partitions == 4
    with pytest.raises(ConfigError, match=f"coalescePartitions and {other} exclude each other"):
        source_settings(options | {other: "5"}, streaming=False)
    with pytest.raises(ConfigError, match="coalescePartitions"):
        source_settings(options | {"coalescePartitions": "0"}, streaming=False)


@pytest.fixture(scope="module")
def filled(broker, topics_of):
    """Twelve partitions of 1 to 12 records."""
    topics = topics_of(broker.bootstrap_servers)
    name = topics.create(12, "small")
    for p in range(12):
        topics.fill(name, [b"%d-%d" % (p, i) for i in range(p + 1)], p)
    return name


@pytest.mark.spark
def test_small_partitions_share_tasks(read, read_stream, filled, tmp_path):
    whole = read(filled)
    assert whole.rdd.getNumPartitions() == 12
    some = read(filled, coalescePartitions="3")
    assert some.rdd.getNumPartitions() == 3
    rows = sorted(map(repr, whole.collect()))
    assert len(rows) == 78 and sorted(map(repr, some.collect())) == rows
    assert some.where("partition > 8 AND offset < 2").count() == 6
    counts = some.groupBy("partition").count().collect()
    assert {r["partition"]: r["count"] for r in counts} == {p: p + 1 for p in range(12)}

    found = []

    def take(batch, _):
        found.append(batch.rdd.getNumPartitions())
        found.append(sorted(map(repr, batch.collect())))

    stream = read_stream(filled, startingOffsets="earliest", coalescePartitions="2")
    query = (
        stream.writeStream.foreachBatch(take).trigger(availableNow=True)
        .option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    )  # fmt: skip
    assert query.awaitTermination(120)
    assert found == [2, rows]


@pytest.mark.spark
def test_a_task_runs_beside_its_broker(spark, read, filled):
    context = spark.sparkContext
    rdd = read(filled, coalescePartitions="2")._jdf.queryExecution().toRdd()
    for partition in range(2):
        where = context._jsc.sc().getPreferredLocs(rdd, partition)
        assert "127.0.0.1" in [where.apply(i).host() for i in range(where.size())]

    context.setJobGroup("placed", "placed")
    read(filled).select("value").collect()
    tracker = context.statusTracker()
    (job,) = tracker.getJobIdsForGroup("placed")
    (stage,) = tracker.getJobInfo(job).stageIds
    tasks = context._jsc.sc().statusStore().taskList(stage, 0, 100)
    places = {tasks.apply(i).taskLocality() for i in range(tasks.size())}
    context._jsc.clearJobGroup()
    assert places <= {"NODE_LOCAL", "PROCESS_LOCAL"}, "the executor is on the broker's host"
