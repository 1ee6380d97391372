"""Brokers that die, and readers before a backlog that is larger than their memory."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from tests.support import spark_workers, wait_until

pytestmark = pytest.mark.spark


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_killed_broker_ends_the_query_and_the_checkpoint_goes_on(
    spark, own_broker, tmp_path, read_stream, topics_of, transport
):
    topics = topics_of(own_broker.bootstrap_servers)
    name = topics.create(2)
    topics.fill(name, [b"%d" % i for i in range(100)])
    rows: dict[int, list] = {}

    def start():
        df = read_stream(
            name,
            address=own_broker.bootstrap_servers,
            startingOffsets="earliest",
            transport=transport,
            connect__timeout__ms="1000",
            request__timeout__ms="5000",
        )
        return (
            df.writeStream.foreachBatch(
                lambda d, i: rows.__setitem__(
                    i, [bytes(r.value) for r in d.select("value").collect()]
                )
            )
            .option("checkpointLocation", str(tmp_path / "c"))
            .trigger(processingTime="50 milliseconds")
            .start()
        )

    query = start()
    wait_until(lambda: sum(map(len, rows.values())) == 100, timeout_s=60)
    own_broker.kill()
    with pytest.raises(Exception) as caught:
        assert query.awaitTermination(60), "the query does not notice that the broker has gone"
    assert "kdirect.errors." in str(caught.value) and own_broker.bootstrap_servers in str(
        caught.value
    ), str(caught.value)[-3000:]
    own_broker.start()
    topics = topics_of(own_broker.bootstrap_servers)
    topics.fill(name, [b"%d" % i for i in range(100, 200)], 1)
    query = start()
    wait_until(lambda: sum(map(len, rows.values())) >= 200 or not query.isActive, timeout_s=60)
    query.stop()
    assert sorted(int(v) for batch in rows.values() for v in batch) == list(range(200))


def test_a_sink_goes_on_after_its_broker_was_restarted(spark, own_broker, topics_of):
    topics = topics_of(own_broker.bootstrap_servers)
    name = topics.create(1)

    def write(text):
        spark.sql(f"SELECT '{text}' AS value").write.format("kdirect").option(
            "kafka.bootstrap.servers", own_broker.bootstrap_servers
        ).option("topic", name).option("delivery.timeout.ms", 10000).mode("append").save()

    write("before")
    own_broker.kill()
    own_broker.start()
    write("after")
    assert [r[3] for r in topics_of(own_broker.bootstrap_servers).consume(name, 1)] == [
        b"before",
        b"after",
    ]


READER = """
    import json, re, sys, time
    from kdirect.model import TopicPartition
    from kdirect_spark.broker_view import RangePartition
    from kdirect_spark.reading import read_range
    from kdirect_spark.settings import source_settings

    def anonymous_bytes():
        # What the process has for itself; the broker's mapped segments are shared pages and not
        # counted.
        return 1024 * int(re.search(r"RssAnon:\\s+(\\d+) kB", open("/proc/self/status").read())[1])

    address, topic, stop, transport = sys.argv[1:]
    settings = source_settings({"kafka.bootstrap.servers": address, "subscribe": topic,
                                "transport": transport, "prefetchBytes": "8m",
                                "arrowBatchBytes": "1m"}, streaming=False)
    for _ in read_range(settings, RangePartition(topic, 0, 0, 1000)):
        pass
    before = anonymous_bytes()
    rows = high = 0
    for batch in read_range(settings, RangePartition(topic, 0, 0, int(stop))):
        rows += batch.num_rows
        if rows % 7 == 0:
            time.sleep(0.005)    # the consumer is slower than the reader
        high = max(high, anonymous_bytes())
    print(json.dumps({"rows": rows, "grown": high - before}))
"""


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_memory_is_bounded_whatever_the_backlog(spark, broker, topics, transport, tmp_path):
    from kdirect.client.session import connect

    name = topics.create(1)
    producer = connect(broker.bootstrap_servers).producer()
    import pyarrow as pa

    block = pa.record_batch({"value": pa.array([bytes([i % 256]) * 4000 for i in range(5000)])})
    for _ in range(12):
        producer.send_arrow(block, name)  # 240 MB in all
    producer.close()
    script = tmp_path / "reader.py"
    script.write_text(textwrap.dedent(READER))
    run = subprocess.run(
        [sys.executable, str(script), broker.bootstrap_servers, name, "60000", transport],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    result = json.loads(run.stdout)
    assert result["rows"] == 60000
    # 8 MiB waiting, three batches of 1 MiB on their way, READ or fetch buffers of a few MiB, and
    # the allocator's slack.
    assert result["grown"] < 48 << 20, result


def test_a_worker_that_hangs_is_ended_by_spark(spark, topics, read, refused):
    """With the settings that docs/spark.md names.  A process that is stopped does nothing, as one
    that hangs; it is continued when it was told to end."""
    name = topics.create(1)
    topics.fill(name, [b"v"] * 10)
    settings = {"idleTimeoutSeconds": "2", "killOnIdleTimeout": "true"}
    for setting, value in settings.items():
        spark.conf.set(f"spark.sql.execution.pyspark.udf.{setting}", value)
    try:
        assert len(read(name).collect()) == 10
        hanging = spark_workers()
        assert hanging
        for pid in hanging:
            os.kill(pid, signal.SIGSTOP)
        going_on = threading.Thread(target=continue_when_ended, args=(hanging,), daemon=True)
        going_on.start()
        with refused("Python worker"):
            read(name).collect()
        for pid in hanging:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        going_on.join(10)
        assert len(read(name).collect()) == 10
    finally:
        for setting in settings:
            spark.conf.unset(f"spark.sql.execution.pyspark.udf.{setting}")


def continue_when_ended(pids):
    """Let that one of these processes go on that is told to end (SIGTERM)."""

    def told(pid):
        status = Path(f"/proc/{pid}/status").read_text()
        pending = re.search(r"ShdPnd:\s*(\w+)", status)
        return int(pending[1], 16) >> (signal.SIGTERM - 1) & 1

    wait_until(lambda: any(map(told, pids)), "a signal", 60)
    for pid in filter(told, pids):
        os.kill(pid, signal.SIGCONT)
