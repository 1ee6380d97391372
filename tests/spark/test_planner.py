"""The planner: one Python process of the driver's answers for query after query."""

from __future__ import annotations

import gc
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest

from kdirect_spark import configure, shim
from kdirect_spark.environment import DAEMON, OTHER_PYTHONS, OUR_DAEMON
from pyspark_kdirect.daemon import prefer_installed
from tests.spark.test_stream import Sink, run
from tests.support import cpu_ticks, wait_until

MODULE = "pyspark_kdirect.planner"


def processes(name: str) -> set[int]:
    """Those below this process whose command names a module."""
    parents, named = {}, set()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit():
                pid = int(entry.name)
                parents[pid] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if name in (entry / "cmdline").read_text():
                    named.add(pid)
        except OSError:
            continue

    def is_below(pid: int) -> bool:
        while pid > 1 and pid != os.getpid():
            pid = parents.get(pid, 0)
        return pid == os.getpid()

    return {pid for pid in named if is_below(pid)}


@pytest.mark.spark
def test_query_after_query_has_one_planner(read, read_stream, topics, tmp_path):
    name = topics.create()
    topics.fill(name, [b"v"] * 30)
    assert read(name).count() == 30
    run(read_stream(name, startingOffsets="earliest"), Sink(), str(tmp_path / "first"))
    before = processes(MODULE)
    assert len(before) >= 2  # the daemon, and a process of it
    for query in range(3):
        sink = Sink()
        run(read_stream(name, startingOffsets="earliest"), sink, str(tmp_path / f"{query}"))
        assert len(sink.rows) == 30
        assert read(name).where("offset > 9").count() == 20
        assert processes(MODULE) <= before
    assert not processes("python_streaming_source_runner")


@pytest.mark.spark
def test_a_stream_that_fails_at_its_start_leaves_no_planner(read, read_stream, topics, tmp_path):
    """The engine does not stop a source when another call of the query's set-up has failed."""
    name = topics.create()
    topics.fill(name, [b"v"])
    assert read(name).count() == 1
    before = len(processes(MODULE))
    for turn in range(3):
        frame = read_stream(name, address="127.0.0.1:1", connect__timeout__ms="200")
        writer = frame.writeStream.format("noop").trigger(availableNow=True)
        query = writer.option("checkpointLocation", str(tmp_path / str(turn))).start()
        with pytest.raises(Exception, match="no broker answers"):
            query.awaitTermination(60)
    wait_until(lambda: len(processes(MODULE)) <= before, "an end of the planners")


@pytest.mark.spark
def test_a_source_whose_neighbour_cannot_be_made_leaves_no_planner(
    spark, read, read_stream, topics, tmp_path
):
    """The engine forgets the first source of a union where the second one fails, and stops none."""
    name = topics.create()
    topics.fill(name, [b"v"])
    assert read(name).count() == 1
    before = len(processes(MODULE))
    for turn in range(3):
        bad = read_stream(name, address="127.0.0.1:1", connect__timeout__ms="200")
        writer = read_stream(name).union(bad).writeStream.format("noop").trigger(availableNow=True)
        query = writer.option("checkpointLocation", str(tmp_path / str(turn))).start()
        with pytest.raises(Exception, match="no broker answers"):
            query.awaitTermination(60)
        del query  # of a query that is kept, Spark keeps the sources

    def are_gone() -> bool:
        gc.collect()
        spark._jvm.System.gc()
        return len(processes(MODULE)) <= before

    wait_until(are_gone, "an end of the planners")


@pytest.mark.spark
def test_a_session_without_a_limit_of_rows_reads(spark, read, read_stream, topics, tmp_path):
    """Spark's word for no limit is 0, which PySpark's code for data sources refuses."""
    name = topics.create()
    topics.fill(name, [b"v"] * 3)
    setting = "spark.sql.execution.arrow.maxRecordsPerBatch"
    before = spark.conf.get(setting)
    spark.conf.set(setting, "0")
    try:
        assert len(read(name).collect()) == 3
        sink = Sink()
        run(read_stream(name, startingOffsets="earliest"), sink, str(tmp_path / "c"))
        assert len(sink.rows) == 3
    finally:
        spark.conf.set(setting, before)


@pytest.mark.spark
def test_what_a_sink_needs_on_the_driver_is_done_by_planners(
    spark, read_stream, topics, broker, tmp_path
):
    source, target = topics.create(1), topics.create(1)
    topics.fill(source, [b"%d" % i for i in range(6)])
    options = {"kafka.bootstrap.servers": broker.bootstrap_servers, "topic": target}
    query = (
        read_stream(source, startingOffsets="earliest", maxOffsetsPerTrigger=2).select("value")
        .writeStream.format("kdirect").options(**options)
        .option("checkpointLocation", str(tmp_path / "c")).trigger(availableNow=True).start()
    )  # fmt: skip
    assert query.awaitTermination(60)
    assert query.lastProgress["batchId"] == 2
    spark.range(1).selectExpr("'6' AS value").write.format("kdirect").options(**options).save()
    found = sorted(r[3] for r in topics.consume(target, 1))
    assert found == [b"%d" % i for i in range(7)]
    for module in (
        "write_into_data_source", "commit_data_source_write", "python_streaming_sink_runner"
    ):  # fmt: skip
        assert not processes(module), module


@pytest.mark.spark
def test_streams_side_by_side_have_a_planner_each(read_stream, topics, tmp_path):
    name = topics.create()
    topics.fill(name, [b"v"] * 10)
    queries = []
    try:
        for number in range(2):
            frame = read_stream(name, startingOffsets="earliest")
            writer = frame.writeStream.format("noop").option(
                "checkpointLocation", str(tmp_path / f"{number}")
            )
            queries.append(writer.start())
            queries[-1].processAllAvailable()
        frame = read_stream(name, startingOffsets="earliest")
        sink = Sink()
        run(frame, sink, str(tmp_path / "third"))
        assert len(sink.rows) == 10
        topics.fill(name, [b"v"] * 5)
        for query in queries:
            query.processAllAvailable()
            assert sum(p["numInputRows"] for p in query.recentProgress) == 15
    finally:
        for query in queries:
            query.stop()
    assert not any(query.exception() for query in queries)


@pytest.mark.spark
def test_a_planner_that_hangs_holds_up_its_query_alone(read, read_stream, topics, tmp_path):
    """The others, and those that begin now, have processes of their own."""
    name = topics.create()
    topics.fill(name, [b"v"] * 3)
    assert read(name).count() == 3

    def started(of: str):
        frame = read_stream(name, startingOffsets="earliest")
        writer = frame.writeStream.format("noop").option("checkpointLocation", str(tmp_path / of))
        query = writer.start()
        query.processAllAvailable()
        return query

    def busiest() -> int:
        """A planner that a stream asks for offsets all the time; others are idle."""
        ticks = {pid: cpu_ticks(pid) for pid in processes(MODULE)}
        time.sleep(1)
        used = {pid: cpu_ticks(pid) - ticks[pid] for pid in processes(MODULE) if pid in ticks}
        return max(used, key=lambda pid: used[pid])

    queries = [started("one"), started("other")]
    hanging = busiest()
    try:
        os.kill(hanging, signal.SIGSTOP)
        topics.fill(name, [b"v"] * 2)
        assert read(name).count() == 5
        queries.append(started("new"))
        assert sum(p["numInputRows"] for p in queries[-1].recentProgress) == 5
        done = [sum(p["numInputRows"] for p in q.recentProgress) for q in queries[:2]]
        assert 3 in done, "one of them hangs"
        wait_until(
            lambda: any(sum(p["numInputRows"] for p in q.recentProgress) == 5 for q in queries[:2]),
            "the rows in the other one",
        )
    finally:
        os.kill(hanging, signal.SIGCONT)
        for query in queries:
            query.stop()


@pytest.mark.spark
def test_an_error_of_a_planner_is_its_querys_alone(read, read_stream, topics, tmp_path):
    name = topics.create()
    topics.fill(name, [b"v"])
    bad = read_stream(name, startingOffsets='{"none":{"0":1}}')
    query = bad.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "a")).start()
    with pytest.raises(Exception, match="none"):
        query.awaitTermination(60)
    assert read(name).count() == 1


def test_a_planner_of_another_version_than_the_jar_says_so():
    def text(of: str) -> bytes:
        return struct.pack(">i", len(of)) + of.encode()

    env = {
        **{k: v for k, v in os.environ.items() if k != "PYTHON_UNIX_DOMAIN_ENABLED"},
        "PYTHON_WORKER_FACTORY_SECRET": "secret",
        "SPARK_REUSE_WORKER": "1",
        "SPARK_PYTHON_RUNTIME": "PYTHON_WORKER",
        "KDIRECT_JAR_VERSION": "0.0.9",
    }
    daemon = subprocess.Popen(
        [sys.executable, "-m", OUR_DAEMON, MODULE], env=env, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert daemon.stdin is not None and daemon.stdout is not None
    try:
        (port,) = struct.unpack(">i", daemon.stdout.read(4))
        with (
            socket.create_connection(("127.0.0.1", port), timeout=60) as connection,
            connection.makefile("rwb") as spark,
        ):

            def number() -> int:
                return struct.unpack(">i", spark.read(4))[0]

            assert number() > 0  # its process id
            spark.write(text("secret"))
            spark.flush()
            assert spark.read(number()) == b"ok"
            version = f"{sys.version_info[0]}.{sys.version_info[1]}"
            begin = text(version) + text("/nowhere") + bytes(4) + b"\0" + bytes(8)
            spark.write(begin + struct.pack(">i", 1))
            spark.flush()
            assert number() == -2  # an error, and its text
            said = spark.read(number()).decode()
    finally:
        daemon.stdin.close()
        daemon.wait(30)
    assert "the shim's jar is of kdirect 0.0.9, but" in said and "Traceback" not in said


@pytest.fixture
def table(spark, topics):
    """The shim's table of a topic with a record, and options that read it."""
    jvm, name = spark._jvm, topics.create()
    topics.fill(name, [b"v"])
    given = {"kafka.bootstrap.servers": topics.address, "subscribe": name}
    options = jvm.org.apache.spark.sql.util.CaseInsensitiveStringMap(jvm.java.util.HashMap(given))
    source = jvm.org.apache.spark.sql.execution.datasources.v2.python.kdirect.KdirectSource()
    source.setShortName("kdirect")
    kind = jvm.org.apache.spark.sql.connector.expressions.Transform
    none = spark.sparkContext._gateway.new_array(kind, 0)
    return source.getTable(source.inferSchema(options), none, options), options


@pytest.mark.spark
def test_a_stream_whose_planner_has_failed_gets_the_error_again(spark, table, tmp_path):
    """Spark goes on after some errors, and Python answers nothing more."""
    made, options = table
    stream = made.newScanBuilder(options).build().toMicroBatchStream(str(tmp_path))
    limit = spark._jvm.org.apache.spark.sql.connector.read.streaming.ReadLimit.allAvailable()
    said = []

    def ask(call):
        with pytest.raises(Exception, match="start offset") as caught:
            call()
        said.append(str(caught.value.java_exception.getMessage()))

    def both():
        ask(lambda: stream.latestOffset(stream.deserializeOffset('{"t": 3}'), limit))
        ask(stream.initialOffset)

    asking = threading.Thread(target=both, daemon=True)
    asking.start()
    asking.join(30)
    assert not asking.is_alive(), "it waits for an answer that never comes"
    assert len(said) == 2 and said[0] == said[1]
    stream.stop()


@pytest.mark.spark
def test_nothing_stays_of_a_reader_that_could_not_be_made(spark, table):
    made, options = table
    batch = made.newScanBuilder(options).build().toBatch()
    (partition,) = batch.planInputPartitions()
    jvm = spark._jvm.org.apache.spark
    place = Path(jvm.util.Utils.getLocalDir(jvm.SparkEnv.get().conf()))
    before = set(place.glob("kdirect-counts-*"))
    with pytest.raises(Exception, match=r"TaskContext|NullPointerException"):
        batch.createReaderFactory().createColumnarReader(partition)  # this is no task
    assert set(place.glob("kdirect-counts-*")) <= before


@pytest.mark.spark
def test_a_setting_that_is_neither_true_nor_false_is_named(spark, table):
    made, options = table
    spark.conf.set("spark.kdirect.columnar", "maybe")
    try:
        with pytest.raises(Exception, match=r"spark\.kdirect\.columnar is maybe; set it to true"):
            made.newScanBuilder(options)
        spark.conf.set("spark.kdirect.columnar", " TRUE ")
        made.newScanBuilder(options)
    finally:
        spark.conf.unset("spark.kdirect.columnar")


@pytest.mark.spark
def test_what_extends_classes_inside_spark_is_checked_for_another_spark(spark):
    jvm = spark._jvm
    loader = jvm.Thread.currentThread().getContextClassLoader()
    inside = ("org.apache.spark.sql.execution.", "org.apache.spark.sql.internal.")
    extending = set()
    with zipfile.ZipFile(shim.jar()) as jar:
        names = [x[:-6].replace("/", ".") for x in jar.namelist() if x.endswith(".class")]
    for name in names:
        cls = jvm.java.lang.Class.forName(name, False, loader)
        above = [cls.getSuperclass(), *cls.getInterfaces()]
        if any(
            x is not None and x.getName().startswith(inside) and ".kdirect." not in x.getName()
            for x in above
        ):
            extending.add(name)
    room = "org.apache.spark.sql.execution.datasources.v2.python.kdirect."
    known = jvm.org.apache.spark.sql.execution.datasources.v2.python.kdirect.KnownSpark
    checked = set(known.Classes().mkString(",").split(","))
    assert len(extending) > 10
    # The source is what Spark loads first, and extends what Spark has had since 4.0.
    assert extending - checked == {room + "KdirectSource"}


def test_what_the_daemon_imports_starts_no_thread():
    code = (
        "import os, sys\n"
        "from pyspark_kdirect import daemon\n"
        "assert not [m for m in sys.modules if m == 'pyspark' or m.startswith('pyspark.')]\n"
        f"daemon.preload(['daemon', '{MODULE}'])\n"
        "assert 'pyspark.worker' in sys.modules\n"
        "assert not {'pyarrow', 'numpy', 'pandas'} & set(sys.modules)\n"
        "assert len(os.listdir('/proc/self/task')) == 1\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_pyspark_is_imported_from_the_package_that_its_zip_lies_in(tmp_path):
    package = tmp_path / "site-packages/pyspark"
    (package / "python/lib").mkdir(parents=True)
    (package / "__init__.py").touch()
    inside = str(package / "python/lib/pyspark.zip")
    alone = str(tmp_path / "spark/python/lib/pyspark.zip")
    site = str(tmp_path / "site-packages")
    assert prefer_installed([inside, "a", site]) == ["a", site, inside]
    assert prefer_installed([inside, "a"]) == [inside, "a"]  # the package is not found
    assert prefer_installed([alone, site]) == [alone, site]


@pytest.mark.parametrize(
    ("master", "python", "ours"),
    [
        ("local[2]", None, True),
        ("local[2]", sys.executable, True),
        ("local[2]", "/usr/bin/python-of-the-user", False),
        ("spark://host:7077", None, False),
    ],
)
@pytest.mark.parametrize("setting", OTHER_PYTHONS)
def test_tasks_of_a_local_session_have_this_daemon(monkeypatch, master, python, ours, setting):
    from pyspark.sql import SparkSession

    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    builder = SparkSession.Builder().master(master)
    if python:
        builder = builder.config(setting, python)
    assert (configure(builder)._options.get(DAEMON) == OUR_DAEMON) == ours
    mine = SparkSession.Builder().master(master).config(DAEMON, "mine")
    assert configure(mine)._options[DAEMON] == "mine"
