"""Accelerated queries that write a Delta table: stopped and started again, also where the last
batch was written but not committed by Spark, which is where a driver may die.

The session is that of the driver of the killed queries, since the jars of a session are chosen when
its JVM starts.
"""

from __future__ import annotations

import pickle
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.spark import slash_runs
from tests.spark.slash_kills import DELTA, EVENTS, WORKLOADS, Driver, mapped_of

pytestmark = [pytest.mark.spark, pytest.mark.slow]

QUERY = "cm"
WORKLOAD, _, SETTINGS, LIMIT = WORKLOADS[QUERY]
HALF = EVENTS // 2


@pytest.fixture(scope="module")
def driver(tmp_path_factory, delta_jars):
    made = Driver(tmp_path_factory.mktemp("driver"), delta_jars)
    yield made
    made.end()


class Life:
    """A topic that grows, and a query over it that writes a Delta table."""

    def __init__(self, driver: Driver, servers: str, directory: Path) -> None:
        self._driver = driver
        self._servers = servers
        self.directory = directory
        self._topic = slash_runs.write(servers, WORKLOAD, QUERY, HALF, **SETTINGS)
        self._of = {"query": QUERY, "topics": dict(self._topic.topics), "servers": servers}

    def grow(self) -> None:
        slash_runs.write(
            self._servers, WORKLOAD, QUERY, HALF, first=HALF, topics=self._topic.topics
        )

    def run(self) -> dict[str, Any]:
        """Run the query over what is there; what the driver says of it."""
        answer = self._driver.ask(
            do="run",
            directory=str(self.directory),
            sink=DELTA,
            source={"maxOffsetsPerTrigger": str(LIMIT)},
            accelerate={"executors": 2},
            grown="",
            **self._of,
        )
        assert answer["error"] is None, answer["error"]
        return answer

    def rows(self, do: str, **given: Any) -> Counter[Any]:
        path = self.directory / "rows.pickle"
        self._driver.ask(do=do, to=str(path), **given)
        found: Counter[Any] = pickle.loads(path.read_bytes())
        return found


@pytest.mark.parametrize("memory", ["with memory", "without memory"])
@pytest.mark.parametrize("last", ["committed", "written only"])
def test_a_restarted_query_writes_each_row_once_into_a_delta_table(
    driver, broker, tmp_path, last, memory
):
    life = Life(driver, broker.bootstrap_servers, tmp_path)
    before = life.run()["batches"]
    if last == "written only":
        commit = tmp_path / f"checkpoint/commits/{before[-1]}"
        commit.unlink()
        commit.with_name(f".{commit.name}.crc").unlink(missing_ok=True)
    if memory == "without memory":
        [mapped] = mapped_of(tmp_path / "state")
        shutil.rmtree(mapped)
    life.grow()
    answer = life.run()
    # Delta knows a batch that it has, so no task of it runs again.
    assert answer["batches"][0] == before[-1] + 1
    expected = life.rows("expect", **life._of)
    wanted = slash_runs.closed(expected, slash_runs.time_of(answer["watermark"]))
    assert len(wanted) > 1000
    slash_runs.assert_same(life.rows("written", directory=str(tmp_path), sink=DELTA), wanted)
