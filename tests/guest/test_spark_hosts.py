"""An accelerated query on two hosts: a standalone cluster of Spark with a worker of one core in
each of two guests, the driver and the broker in the first one, and deltas over verbs between them.

Both guests run for all tests of this file.  They share the directory of the result, as they would
an object store, and nothing else: the state directory and the checkpoint are files of the driver's
host.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyspark
import pytest

from tests.guest import far_job, far_spark, jvm
from tests.guest.machine import Machine, Network, cable

ROOT = Path(__file__).resolve().parents[2]
DRIVER, WORKER = "192.168.79.1", "192.168.79.2"
WORK = "/run/guest/tmp/spark"  # of each host alone
LIMIT_S = 1500
START_S = 600.0
QUERY_S = 600.0
# What entries of all keys of a query cannot do with less, by far.
SOME_PACKETS = 50

pytestmark = [pytest.mark.spark, pytest.mark.timeout(LIMIT_S)]


@dataclass
class Hosts:
    """The two guests; `ask` says a line to one of them and gives its answer."""

    driver: Machine
    worker: Machine
    shared: Path

    def ask(self, host: Machine, line: str, timeout_s: float = 60.0) -> Any:
        seen = len(host.lines)
        host.send(line)
        found = host.wait_for(rf"^{line} (.*)$", timeout_s, after=seen)
        return json.loads(found[1])

    def packets(self) -> tuple[int, int]:
        """How many each host's RNIC has sent."""
        return self.ask(self.driver, "packets"), self.ask(self.worker, "packets")

    def run(self, query: str) -> tuple[dict[str, Any], tuple[int, int]]:
        """What the driver says of a query, and how many packets went from host to host."""
        before = self.packets()
        found = self.ask(self.driver, query, QUERY_S)
        after = self.packets()
        return found, (after[0] - before[0], after[1] - before[1])


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    shared = tmp_path_factory.mktemp("shared")
    ends = cable()
    classes = jvm.archive()

    def machine(i: int, address: str, memory_mib: int, cpus: int, *arguments: str) -> Machine:
        others = {"worker": WORKER} if i == 0 else {"driver": DRIVER}
        name = "driver" if i == 0 else "worker"
        program = [sys.executable, str(Path(__file__).with_name("far_spark.py"))]
        # The archive is read once from end to end: page by page, as mapped files of the machine are
        # read in a guest, it takes a minute.
        # Without pyspark.zip workers import compiled modules, and connect within the ten seconds
        # that Spark gives them; what is removed is gone in the guest only.
        archived = Path(pyspark.__file__).parent / "python/lib/pyspark.zip"
        script = f'mkdir -p {WORK} && cat {classes} > /dev/null && rm -f {archived} && exec "$@"'
        return Machine(
            ["/bin/sh", "-c", script, "sh", *program, name, address, WORK, *arguments],
            limit_s=LIMIT_S,
            network=Network(address, name, ends[i], f"02:00:00:79:00:0{i + 1}", others),
            cwd=ROOT,
            environment={"JAVA_TOOL_OPTIONS": jvm.options(classes), "SPARK_LOCAL_IP": address},
            shares=[shared],
            memory_mib=memory_mib,
            cpus=cpus,
            takes_input=True,
        )

    with machine(0, DRIVER, 4096, 2, str(shared)) as driver:
        master = driver.wait_for(r"^master (spark://\S+)$", START_S)[1]
        with machine(1, WORKER, 2048, 1, master) as worker:
            worker.wait_for("^ready$", START_S)
            driver.wait_for("^ready$", START_S)
            yield Hosts(driver, worker, shared)


def rows_in(directory: Path) -> Counter[tuple[int, ...]]:
    """Key, start, count and sum of each row that the query wrote."""
    table = pa.concat_tables(pq.read_table(file) for file in directory.glob("part-*.parquet"))
    times = table["start"].cast(pa.timestamp("us")).cast("int64").to_pylist()
    starts = [time // 1000 for time in times]
    columns = (table[name].to_pylist() for name in ("count", "total"))
    return Counter(zip(table["key"].to_pylist(), starts, *columns, strict=True))


def milliseconds(watermark: str) -> int:
    since = datetime.fromisoformat(re.sub("Z$", "+00:00", watermark)).astimezone(timezone.utc)
    return round(since.timestamp() * 1000)


def test_a_stream_has_a_task_on_each_host(hosts: Hosts) -> None:
    """Its input comes by READs and its deltas go by WRITEs, both over verbs.  State is carried from
    batch to batch in the memory of each host, and the far one's part of each snapshot comes to the
    driver's host by its control connection."""
    found, packets = hosts.run("stream")
    assert found["tasks"] and all(sorted(on) == [DRIVER, WORKER] for on in found["tasks"]), found
    figures = found["figures"]
    assert [f["batch"] for f in figures] == list(range(far_spark.BATCHES)), figures
    assert sum(f["rows"] for f in figures) == far_spark.RECORDS
    assert all(f["bytes_written"] > 0 and f["merged"] > 0 for f in figures), figures
    assert min(packets) > SOME_PACKETS, packets
    # Each snapshot has a part of either executor: state of the far host came here.
    assert len(found["parts"]) >= 4 and {p[-1] for p in found["parts"]} == {"0", "1"}, found
    events = far_job.events(0, far_spark.RECORDS, far_spark.KEYS)
    closes = milliseconds(figures[-1]["watermark"])
    assert closes == min(int(events["time"][p :: far_job.PARTITIONS].max()) for p in range(2))
    expected = far_job.totals(events, closes)
    assert expected.total() > far_spark.KEYS
    assert rows_in(hosts.shared / "rows") == expected


def test_a_batch_has_a_task_on_each_host(hosts: Hosts) -> None:
    """Its input comes by TCP, so that what goes over verbs are its deltas.  Its tasks find the
    service in the driver by the address that is advertised, since it listens at all of them."""
    found, packets = hosts.run("batch")
    assert sorted(found["tasks"][-1]) == [DRIVER, WORKER], found["tasks"]
    assert min(packets) > SOME_PACKETS, packets
    events = far_job.events(0, far_spark.RECORDS, far_spark.KEYS)
    expected = far_job.totals(events, sys.maxsize)
    rows = json.loads((hosts.shared / far_spark.BATCH).read_text())
    assert Counter(map(tuple, rows)) == expected
