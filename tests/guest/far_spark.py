"""A cluster of Spark on two hosts, and accelerated queries on it (test_spark_hosts.py).

    far_spark.py driver ADDRESS WORK SHARED   broker, master, a worker of one core, and the driver
    far_spark.py worker ADDRESS WORK MASTER   a worker of one core
    far_spark.py train WORK ARCHIVE           the same queries on one host, once for the JVM's
                                              archive of classes (jvm.py)

Each does what it is told line by line, and answers with one line:

    stream     the query over verbs, as a stream into Parquet files in SHARED -> stream {JSON}
    batch      the query as a batch, whose input comes by TCP: what goes over verbs are deltas
               -> batch {JSON}
    packets    how many this host's RNIC has sent -> packets NUMBER
    stop       end everything; there is no answer

WORK is a directory of this host alone, and so are checkpoint and state of the stream, which the
driver keeps there.  The first line is ``ready`` once both workers have come, or this one has.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from tests.guest import far_job  # noqa: E402
from tests.support import BrokerProcess  # noqa: E402

MASTER_PORT = 7077
PORT = 9092
TOPIC = "clicks"
RECORDS, KEYS, BATCHES = 12_000, 500, 3
START_S = 240.0
BATCH = "batch.json"  # of the rows of the batch, in the directory that is shared
STARTS = 5
PLANNER = "pyspark.sql.streaming.python_streaming_source_runner"
COUNTERS = Path("/sys/class/infiniband/rxe0/ports/1/hw_counters")
# An emulated host is slow: nobody is given up for that.
SPARK = {
    "spark.ui.enabled": "false",
    "spark.log.level": "WARN",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.memory": "512m",
    "spark.executor.memory": "512m",
    "spark.executor.cores": "1",
    "spark.network.timeout": "600s",
    "spark.eventLog.enabled": "true",
    "spark.eventLog.compress": "false",
    "spark.eventLog.rolling.enabled": "false",
}
DAEMONS = {
    "SPARK_DAEMON_MEMORY": "256m",
    "SPARK_MASTER_OPTS": "-Dspark.worker.timeout=600 -Dspark.master.rest.enabled=false",
}
ENGINE = {"start_timeout": 240_000, "stall_timeout": 300_000, "slot_bytes": 16384}


def say(*words: object) -> None:
    print(*words, flush=True)


# -- the cluster -----------------------------------------------------------------------------------


class Daemon:
    """A process of the standalone cluster, and its log."""

    def __init__(self, address: str, work: Path, kind: str, *arguments: str) -> None:
        import pyspark

        command = [str(Path(pyspark.__file__).parent / "bin" / "spark-class")]
        command += [f"org.apache.spark.deploy.{kind.lower()}.{kind}"]
        command += ["--host", address, "--webui-port", "0", *arguments]
        self._log = work / f"{kind.lower()}.log"
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **DAEMONS},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def wait_for(self, words: str) -> None:
        deadline = time.monotonic() + START_S
        while words not in (text := self._log.read_text(errors="replace")):
            assert time.monotonic() < deadline and self._process.poll() is None, text[-4000:]
            time.sleep(0.2)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(60)


def start_worker(address: str, work: Path, master: str) -> Daemon:
    return Daemon(
        address, work, "Worker", "--cores", "1", "--memory", "1g",
        "--work-dir", str(work / "executors"), master,
    )  # fmt: skip


def worker(address: str, work: Path, master: str) -> None:
    """The host that does nothing but work."""
    with contextlib.closing(start_worker(address, work, master)) as daemon:
        daemon.wait_for("Successfully registered with master")
        say("ready")
        serve({})


# -- the queries -----------------------------------------------------------------------------------


class Queries:
    """An accelerated query over one topic."""

    def __init__(self, spark: Any, servers: str, work: Path, shared: Path, transport: str) -> None:
        self._spark = spark
        self._servers = servers
        self._work = work
        self._shared = shared
        self._transport = transport  # "verbs" between hosts
        self._engine = {**ENGINE, "provider": transport}

    def _frame(self, reader: Any, **options: str) -> Any:
        from pyspark.sql import functions as F

        from kdirect_spark.slash.workload_queries import value_options

        given = {"subscribe": TOPIC, "startingOffsets": "earliest"}
        given |= {"kafka.bootstrap.servers": self._servers, **value_options(far_job.LAYOUT)}
        events = reader.format("kdirect").options(**given, **options).load()
        return (
            events.withWatermark("time", "0 seconds")
            .groupBy(F.window("time", f"{far_job.SIZE_MS} milliseconds"), "key")
            .agg(F.count("*").alias("count"), F.sum("amount").alias("total"))
            .select("key", F.col("window.start").alias("start"), "count", "total")
        )

    def stream(self) -> dict[str, Any]:
        """Rows go to files; what is told is how the query ran."""
        from kdirect_spark import slash

        frame = self._frame(
            self._spark.readStream,
            transport=self._transport,
            maxOffsetsPerTrigger=str(RECORDS // BATCHES),
        )
        writer = (
            slash.accelerate(
                frame,
                executors=2,
                epochBytes=20_000,
                snapshotInterval=0,
                stateDir=self._work / "state",
                options=self._engine,
            )
            .writeStream.format("parquet")
            .option("path", str(self._shared / "rows"))
            .option("checkpointLocation", str(self._work / "checkpoint"))
            .trigger(availableNow=True)
        )
        query = self._run(writer)
        reports = [report.observedMetrics.get("slash") for report in query.recentProgress]
        return {
            "figures": [dict(report["figures"]) for report in reports if report is not None],
            "parts": sorted(p.name for p in (self._work / "state" / "snapshots").glob("*/part*")),
        }

    @staticmethod
    def _run(writer: Any) -> Any:
        """The query, at its end.  Spark gives the process that plans a stream ten seconds to come,
        which no setting changes, and an emulated one may take more: then it is started again."""
        for _ in range(STARTS):
            query = writer.start()
            try:
                assert query.awaitTermination(600), query.status
                return query
            except Exception as e:
                if "Python worker failed to connect back" not in str(e):
                    raise
        raise TimeoutError(f"the planner of the stream did not come, {STARTS} times")

    def batch(self) -> dict[str, Any]:
        """All windows, as a batch ends them.  Rows go to a file: a line to the host that asks holds
        fewer."""
        from pyspark.sql import functions as F

        from kdirect_spark import slash

        fast = slash.accelerate(
            self._frame(self._spark.read, transport="tcp"),
            executors=2,
            epochBytes=20_000,
            options={**self._engine, **self._anywhere()},
        )
        rows = fast.select("key", F.unix_millis("start"), "count", "total").collect()
        self._shared.mkdir(exist_ok=True)
        (self._shared / BATCH).write_text(json.dumps([list(row) for row in rows]))
        return {}

    def _anywhere(self) -> dict[str, str]:
        """The coordinator of a batch listens at every address, and executors are told one."""
        address = self._spark.conf.get("spark.driver.host")
        return {"listen_address": "0.0.0.0", "advertised_address": address}


def tasks(events: Path) -> list[list[Any]]:
    """Of each stage of barrier tasks that ended well: the hosts of its tasks, in their order."""
    barriers: set[tuple[int, int]] = set()
    hosts: dict[tuple[int, int], list[tuple[int, str]]] = defaultdict(list)
    for line in next(events.iterdir()).read_text().splitlines():
        event = json.loads(line)
        if event["Event"] == "SparkListenerStageCompleted":
            stage = event["Stage Info"]
            if any(rdd.get("Barrier") for rdd in stage["RDD Info"]):
                barriers.add((stage["Stage ID"], stage["Stage Attempt ID"]))
        elif event["Event"] == "SparkListenerTaskEnd":
            assert event["Task End Reason"]["Reason"] == "Success", event
            info = event["Task Info"]
            of = event["Stage ID"], event["Stage Attempt ID"]
            hosts[of].append((info["Index"], info["Host"]))
    return [[host for _, host in sorted(hosts[stage])] for stage in sorted(barriers)]


@contextlib.contextmanager
def session(master: str, address: str, work: Path, **more: str) -> Iterator[Any]:
    from kdirect_spark import session_builder

    builder = session_builder("two hosts", master)
    own = {
        "spark.driver.host": address,
        "spark.driver.bindAddress": address,
        "spark.eventLog.dir": f"file://{work / 'events'}",
        "spark.sql.warehouse.dir": str(work / "warehouse"),
    }
    (work / "events").mkdir(parents=True)
    for name, value in {**SPARK, **own, **more}.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    try:
        yield spark
    finally:
        spark.stop()


@contextlib.contextmanager
def broker(address: str, work: Path, transport: str) -> Iterator[str]:
    """A broker with the topic; its address."""
    import kdirect

    given = {"rdma.transports": transport, "log.segment.bytes": "1m"}
    process = BrokerProcess(work / "log", given, address).start()
    try:
        with kdirect.connect(process.bootstrap_servers) as connected:
            far_job.write(connected, TOPIC, far_job.events(0, RECORDS, KEYS))
        yield process.bootstrap_servers
    finally:
        process.stop()


def driver(address: str, work: Path, shared: Path) -> None:
    with contextlib.ExitStack() as held:
        url = f"spark://{address}:{MASTER_PORT}"
        master = Daemon(address, work, "Master", "--port", str(MASTER_PORT))
        held.callback(master.close)
        master.wait_for("I have been elected leader")
        held.callback(start_worker(address, work, url).close)
        say("master", url)
        servers = held.enter_context(broker(f"{address}:{PORT}", work, "verbs"))
        # What has been read once is in the memory of this host.
        subprocess.run([sys.executable, "-c", f"import {PLANNER}"], check=True)
        spark = held.enter_context(session(url, address, work, **{"spark.cores.max": "2"}))
        java = spark.sparkContext._jsc.sc()
        profile = java.resourceProfileManager().defaultResourceProfile()
        deadline = time.monotonic() + START_S
        while java.maxNumConcurrentTasks(profile) < 2:
            assert time.monotonic() < deadline, "both workers are wanted"
            time.sleep(0.5)
        queries = Queries(spark, servers, work, shared, "verbs")
        say("ready")

        def told(query: Any) -> dict[str, Any]:
            found = query()
            return {**found, "tasks": tasks(work / "events")}

        serve({"stream": lambda: told(queries.stream), "batch": lambda: told(queries.batch)})


def train(work: Path, archive: Path) -> None:
    """Both queries on this host; the JVM of the driver leaves its classes when it ends."""
    more = {"spark.driver.extraJavaOptions": f"-XX:ArchiveClassesAtExit={archive}"}
    with (
        broker("127.0.0.1:0", work, "shm") as servers,
        session("local[2]", "127.0.0.1", work, **more) as spark,
    ):
        queries = Queries(spark, servers, work, work / "shared", "shm")
        queries.stream()
        queries.batch()


def serve(answers: dict[str, Any]) -> None:
    """Do what is told, to the end of the input."""
    for line in sys.stdin:
        command = line.strip()
        if command == "stop":
            return
        if command == "packets":
            say("packets", int((COUNTERS / "sent_pkts").read_text()))
        else:
            say(command, json.dumps(answers[command]()))


if __name__ == "__main__":
    kind, *arguments = sys.argv[1:]
    if kind == "driver":
        driver(arguments[0], Path(arguments[1]), Path(arguments[2]))
    elif kind == "worker":
        worker(arguments[0], Path(arguments[1]), arguments[2])
    else:
        train(Path(arguments[0]), Path(arguments[1]))
