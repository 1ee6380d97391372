"""Kafka's own clients and tools, kcat and Spark's Kafka connector over a tiered topic of which only
the end is left at the broker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.storage.tiered_broker import TieredBroker, tiered_broker

RECORDS = 2000
SCRIPT = """
import json, sys
from kdirect_spark import session_builder
servers, jars = sys.argv[1:]
spark = (session_builder("tiered", "local[2]").config("spark.jars", jars)
         .config("spark.ui.enabled", "false").config("spark.log.level", "ERROR").getOrCreate())
out = {}
for name in ("kafka", "kdirect"):
    rows = (spark.read.format(name).option("kafka.bootstrap.servers", servers)
            .option("subscribe", "t").option("startingOffsets", "earliest").load()
            .selectExpr("offset", "cast(substring(value, 1, 8) as string) as number").collect())
    out[name] = sorted((r.offset, int(r.number)) for r in rows)
print(json.dumps(out))
"""


@pytest.fixture
def broker(object_stores: Any, tmp_path: Path) -> Iterator[Any]:
    """In place of the broker of other tests: the fixture `tool` asks this one."""
    with tiered_broker(object_stores["directory"].fresh(), tmp_path / "log") as found:
        fill(found)
        found.broker.tiers = found
        yield found.broker


def fill(tiers: TieredBroker) -> None:
    tiers.create()
    tiers.produce(0, RECORDS, at_ms=int(time.time() * 1000) - 100_000)
    tiers.settle()
    assert tiers.partition.local_log_start_offset > RECORDS * 0.8


def take(java: Any, consumer: Any, count: int) -> list[tuple[int, int]]:
    """(offset, number) of `count` records or more."""
    got: list[tuple[int, int]] = []
    end = time.monotonic() + 30
    while len(got) < count and time.monotonic() < end:
        got += [(r.offset(), int(r.value()[:8])) for r in java.poll(consumer)]
    return got


@pytest.mark.parametrize("isolation", ["read_uncommitted", "read_committed"])
def test_java_consumers_read_from_the_first(java, broker, isolation):
    consumer = java.consumer(broker.bootstrap_servers, isolation_level=isolation)
    tp = java.partition("t", 0)
    consumer.assign([tp])
    consumer.seekToBeginning([tp])
    assert take(java, consumer, RECORDS) == [(i, i) for i in range(RECORDS)]
    middle = RECORDS // 3
    consumer.seek(tp, middle)
    assert take(java, consumer, 1)[0] == (middle, middle)
    assert consumer.beginningOffsets([tp])[tp] == 0
    consumer.close()


@pytest.mark.slow
def test_kafkas_tool_tells_the_offsets_of_each_tier(broker, tool):
    local = broker.tiers.partition.local_log_start_offset
    for when, offset in (
        ("earliest", 0),
        ("earliest-local", local),
        ("latest-tiered", local - 1),
        ("latest", RECORDS),
        ("max-timestamp", RECORDS - 1),
    ):
        assert tool("GetOffsetShell", "--topic", "t", "--time", when).split() == [f"t:0:{offset}"]


def test_kcat_reads_from_the_first(broker, kcat):
    command = [kcat, "-b", broker.bootstrap_servers, "-C", "-t", "t", "-o", "beginning", "-e", "-q"]
    done = subprocess.run([*command, "-f", "%o\n"], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [str(i) for i in range(RECORDS)], done.stderr


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_spark_reads_from_the_first(broker, connector_jars: list[Path], tmp_path: Path) -> None:
    """With Kafka's connector and with ours."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    jars = ",".join(map(str, connector_jars))
    done = subprocess.run(
        [sys.executable, str(script), broker.bootstrap_servers, jars],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "PYSPARK_PYTHON": sys.executable},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    out = json.loads(done.stdout.splitlines()[-1])
    expected = [[i, i] for i in range(RECORDS)]
    assert out["kafka"] == expected
    assert out["kdirect"] == expected
