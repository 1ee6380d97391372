"""The life of accelerated queries: stopped, started again, changed, and what they refuse."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from kdirect import connect
from kdirect.model import TopicPartition
from kdirect_spark import slash
from tests.spark import slash_runs
from tests.spark.slash_kills import EVENTS, WORKLOADS, mapped_of
from tests.support import wait_until

pytestmark = pytest.mark.spark

QUERY = "cm"
WORKLOAD, _, SETTINGS, LIMIT = WORKLOADS[QUERY]
HALF = EVENTS // 2


class Life:
    """A topic of one workload, which grows, and a query over it with its checkpoint."""

    def __init__(self, spark: Any, servers: str, directory: Path) -> None:
        self._spark = spark
        self._servers = servers
        self.directory = directory
        self.state = directory / "state"
        self.topic = slash_runs.write(servers, WORKLOAD, QUERY, HALF, **SETTINGS)
        self._events = HALF
        self.limit = LIMIT  # records a micro-batch

    def grow(self, events: int = HALF) -> None:
        slash_runs.write(
            self._servers, WORKLOAD, QUERY, events, first=self._events, topics=self.topic.topics
        )
        self._events += events

    def stream(self, **options: str) -> Any:
        given = {"maxOffsetsPerTrigger": str(self.limit), **options}
        return self.topic.frame(lambda: self._spark.readStream, **given)

    def frame(self, **accelerate: Any) -> Any:
        return slash.accelerate(self.stream(), **{"stateDir": self.state, **accelerate})

    def run(self, **accelerate: Any) -> list[Any]:
        """Run the query over what is there; its reports."""
        return slash_runs.run(self.frame(**accelerate), self.directory)

    def start(self, frame: Any, **trigger: Any) -> Any:
        return (
            frame.writeStream.format("parquet")
            .option("path", str(self.directory / "rows"))
            .option("checkpointLocation", str(self.directory / "checkpoint"))
            .trigger(**trigger)
            .start()
        )

    def forget(self) -> None:
        """Remove the state in memory."""
        for path in mapped_of(self.state):
            shutil.rmtree(path)

    def delete(self, before: dict[str, dict[str, int]]) -> None:
        """Remove the records before these offsets."""
        found = {TopicPartition(t, int(p)): at for t, of in before.items() for p, at in of.items()}
        with connect(self._servers) as session:
            session.admin.delete_records(found)

    def check(self, progress: list[Any]) -> None:
        """The files have the closed windows of Spark's batch SQL, once each."""
        expected = slash_runs.rows_of(self.topic.frame(lambda: self._spark.read))
        wanted = slash_runs.closed(expected, _watermark(progress))
        assert len(wanted) > 1000
        slash_runs.assert_same(slash_runs.written(self._spark, self.directory), wanted)


def _figures(progress: list[Any]) -> list[Any]:
    found = [report.observedMetrics.get("slash") for report in progress]
    return [one["figures"] for one in found if one is not None and one["figures"] is not None]


def _watermark(progress: list[Any]) -> datetime:
    return datetime.fromisoformat(_figures(progress)[-1]["watermark"]).replace(tzinfo=None)


@pytest.fixture
def life(spark, broker, tmp_path):
    return Life(spark, broker.bootstrap_servers, tmp_path)


# -- it goes on ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["as it was", "one executor", "without memory", "no shim", "uppar"])
def test_a_stopped_query_goes_on_from_its_checkpoint(spark, life, how):
    before = life.run(executors=2)
    life.grow()
    given: dict[str, Any] = {"executors": 2}
    if how == "one executor":
        given["executors"] = 1
    elif how == "uppar":
        given["mode"] = "uppar"
    elif how == "without memory":
        assert mapped_of(life.state)
        life.forget()
    elif how == "no shim":
        spark.conf.set("spark.kdirect.columnar", "false")
    try:
        after = life.run(**given)
    finally:
        spark.conf.unset("spark.kdirect.columnar")
    assert _figures(after)[0]["batch"] == _figures(before)[-1]["batch"] + 1
    life.check(after)


def test_a_query_reads_what_comes_while_it_runs_and_rests_when_nothing_does(life):
    query = life.start(life.frame(snapshotInterval="0s"), processingTime="50 milliseconds")
    try:
        query.processAllAvailable()
        life.grow(HALF // 2)
        query.processAllAvailable()
        count = len(_figures(query.recentProgress))
        time.sleep(1.0)
        assert len(_figures(query.recentProgress)) == count
        life.grow(HALF // 2)
        query.processAllAvailable()
        progress = list(query.recentProgress)
    finally:
        query.stop()
    assert [one["batch"] for one in _figures(progress)] == list(range(len(_figures(progress))))
    life.check(progress)


def test_two_actions_on_a_batch_have_the_same_rows_of_one_run(life):
    seen: list[tuple[Counter[Any], Counter[Any]]] = []

    def twice(rows: Any, number: int) -> None:
        first = slash_runs.rows_of(rows)
        life.delete(_ends(life.directory / "checkpoint", number))  # nothing can be read again
        seen.append((first, slash_runs.rows_of(rows)))

    query = (
        life.frame()
        .writeStream.foreachBatch(twice)
        .option("checkpointLocation", str(life.directory / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(120)
    assert len(seen) >= 3
    assert all(first == second for first, second in seen)
    assert sum(first.total() for first, _ in seen) > 1000
    figures = _figures(query.recentProgress)
    assert [one["batch"] for one in figures] == list(range(len(seen)))
    assert sum(one["rows"] for one in figures) == HALF


def _ends(checkpoint: Path, number: int) -> dict[str, dict[str, int]]:
    """The offsets that a micro-batch ends at, as Spark logged them."""
    found = json.loads((checkpoint / "offsets" / str(number)).read_text().splitlines()[-1])
    return {topic: at for topic, at in found.items() if not topic.startswith("/")}


def _holder(path: Path) -> int | None:
    """The process that holds the lock of a file now."""
    try:
        inode = path.stat().st_ino
    except OSError:
        return None
    for line in Path("/proc/locks").read_text().splitlines():
        words = line.split()
        if words[1] == "FLOCK" and words[3] == "WRITE" and words[5].endswith(f":{inode}"):
            return int(words[4])
    return None


def test_spark_runs_a_batch_again_whose_worker_was_killed(life):
    query = life.start(life.frame(executors=2), processingTime="0 seconds")
    try:
        wait_until(lambda: (life.directory / "checkpoint/commits/0").exists(), timeout_s=60)
        run = query.runId
        life.grow()
        [memory] = mapped_of(life.state)
        pid = wait_until(lambda: _holder(memory / "lock-1"), "a batch", every_s=0.0005)
        os.kill(pid, signal.SIGKILL)
        query.processAllAvailable()
        assert (query.exception(), query.runId) == (None, run)
        progress = list(query.recentProgress)
    finally:
        query.stop()
    life.check(progress)


def test_a_part_of_a_snapshot_that_is_damaged_is_left_for_the_older_snapshot(life):
    life.run(snapshotInterval="0s")
    life.grow()
    _damage(_snapshots(life.state)[-1])
    life.forget()
    life.check(life.run(snapshotInterval="0s"))


def _snapshots(state: Path) -> list[Path]:
    found = [path for path in (state / "snapshots").iterdir() if (path / "manifest.json").exists()]
    return sorted(found, key=lambda path: int(path.name))


def _damage(snapshot: Path) -> None:
    for part in snapshot.iterdir():
        if part.name != "manifest.json":
            data = bytearray(part.read_bytes())
            data[len(data) // 2] ^= 0xFF
            part.write_bytes(data)


# -- it is refused ---------------------------------------------------------------------------------


def test_state_that_cannot_be_rebuilt_is_an_error(life, refused):
    life.limit = 1000  # so many batches that the log begins after the first one
    life.run(snapshotInterval="0s")
    life.grow()
    snapshots = _snapshots(life.state)
    assert len(snapshots) == 2
    for snapshot in snapshots:
        _damage(snapshot)
    life.forget()
    with refused("StateDirectoryError", "is needed to rebuild it: no snapshot has it"):
        life.run(snapshotInterval="0s")


def test_records_that_went_too_early_are_named(life, refused):
    life.run(snapshotInterval="1h")
    [name] = life.topic.topics.values()
    life.delete({name: {"1": 1000}})
    life.grow()
    life.forget()
    with refused("DataLossError", f"{name}-1", "1000", "snapshot_interval"):
        life.run(snapshotInterval="1h")


def test_a_checkpoint_of_the_unwrapped_query_is_refused(life, refused):
    slash_runs.run(life.stream(), life.directory)
    life.grow()
    with refused("CheckpointError", "not wrapped by slash.accelerate", "only with a new check"):
        life.run()


def test_the_unwrapped_query_refuses_the_checkpoint_of_the_wrapped_one(life, refused):
    life.run()
    life.grow()
    with refused("CheckpointError", "was wrapped by slash.accelerate", "only with a new check"):
        slash_runs.run(life.stream(), life.directory)


def test_a_changed_query_is_refused(spark, life, refused):
    life.run()
    life.grow()
    changed = slash_runs.Topic(
        workload=WORKLOAD,
        query=QUERY,
        topics=life.topic.topics,
        servers=life.topic.servers,
        settings={"window": "3 seconds"},
    )
    frame = changed.frame(lambda: spark.readStream, maxOffsetsPerTrigger=str(LIMIT))
    with refused("StateDirectoryError", str(life.state), "plan", "changed query"):
        slash_runs.run(slash.accelerate(frame, stateDir=life.state), life.directory)


@pytest.mark.parametrize("where", ["removed", "another"])
def test_a_state_directory_that_is_gone_is_an_error(life, refused, where):
    last = _figures(life.run())[-1]["batch"]
    life.grow()
    if where == "removed":
        shutil.rmtree(life.state)
    state = life.state if where == "removed" else life.directory / "another"
    with refused("StateDirectoryError", f"batch {last + 1} is to run", "no batch", "was removed"):
        life.run(stateDir=state)


def test_a_new_checkpoint_on_an_old_state_directory_is_refused(life, refused):
    life.run()
    shutil.rmtree(life.directory / "checkpoint")
    shutil.rmtree(life.directory / "rows")
    with refused("StateDirectoryError", str(life.state), "caller"):
        life.run()


def test_a_topic_that_was_made_again_is_refused(life, refused):
    life.run()
    [name] = life.topic.topics.values()
    with connect(life.topic.servers) as session:
        session.admin.delete_topic(name)
        wait_until(lambda: name not in session.list_topics())
    life.grow(4 * HALF)  # more records than were read of the topic before
    with refused("DataLossError", f"topic {name} was made again"):
        life.run()


def test_two_queries_do_not_share_a_state_directory(life, refused):
    query = life.start(life.frame(), processingTime="50 milliseconds")
    try:
        query.processAllAvailable()
        with refused("StateDirectoryError", str(life.state), "another job runs"):
            slash_runs.run(life.frame(), life.directory / "other")
        assert query.isActive
    finally:
        query.stop()


def test_a_span_of_time_that_is_none_is_named(life, refused):
    with refused("snapshotInterval", "soon", "30s"):
        life.frame(snapshotInterval="soon")
