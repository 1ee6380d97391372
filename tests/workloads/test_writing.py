"""Workloads in topics of real brokers, read back by the client, by the engine's source, and made by
the command."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import kdirect
from kdirect import workloads
from kdirect.errors import ConfigError
from kdirect.model import TopicPartition
from kdirect.state.plan import AggregatePlan
from kdirect.state.source import TopicSource

EVENTS = {"bid": 46, "person": 1, "auction": 3}


def read(session: Any, topic: str, partition: int) -> list[bytes]:
    tp = TopicPartition(topic, partition)
    stop = session.latest_offsets([tp])[tp]
    with session.reader(tp, 0, stop) as reader:
        return [v for batch in reader for v in batch.column("value").to_pylist()]


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_records_are_dealt_to_partitions_by_their_number(broker_process: Any, codec: str) -> None:
    stream = workloads.ysb(keys=50).streams["ysb"]
    with kdirect.connect(broker_process().bootstrap_servers) as session:
        written = workloads.write(
            session, stream, "t", records=1000, partitions=3, compression_type=codec
        )
        assert (written.records, written.value_bytes) == (1000, 78_000)
        whole = [row.tobytes() for row in stream.records(0, 1300)]
        for p in range(3):
            assert read(session, "t", p) == whole[p:1000:3]
        # Going on gives what one call would have given.
        workloads.write(session, stream, "t", records=300, first=1000)
        for p in range(3):
            assert read(session, "t", p) == whole[p::3]


def test_more_records_than_one_block(broker_process: Any) -> None:
    stream = workloads.ro().streams["ro"]
    count = 700_001
    with kdirect.connect(broker_process().bootstrap_servers) as session:
        workloads.write(session, stream, "t", records=count, partitions=2)
        keys = []
        for p in range(2):
            given = stream.input("t")
            stop = (count + 1 - p) // 2
            with TopicSource(
                session, given, TopicPartition("t", p), 0, stop, columns=("key",)
            ) as s:
                keys.append(np.concatenate([b.columns["key"].to_numpy() for b in s.blocks()]))
        expected = stream.records(0, count)["key"]
        assert np.array_equal(keys[0], expected[::2]) and np.array_equal(keys[1], expected[1::2])


def test_the_plan_of_ysb_over_its_topic(broker_process: Any) -> None:
    workload = workloads.ysb(keys=7)
    stream = workload.streams["ysb"]
    with kdirect.connect(broker_process().bootstrap_servers) as session:
        workloads.write(session, stream, "t", records=5000)
        plan = workload.plan("t")
        assert isinstance(plan, AggregatePlan)
        with TopicSource(
            session, plan.input, TopicPartition("t", 0), 0, 5000, columns=plan.columns_kept()
        ) as source:
            blocks = list(source.blocks())
    rows = stream.records(0, 5000)
    views = rows[rows["event_type"] == 0]
    found = np.concatenate([block.columns["campaign"].to_numpy() for block in blocks])
    times = [block.time_us for block in blocks if block.time_us is not None]
    assert np.array_equal(found, views["campaign"])
    assert np.array_equal(np.concatenate(times), views["time"] * 1000)
    assert blocks[-1].clock_us == int(rows["time"].max()) * 1000


def test_partitions_that_do_not_fit_are_refused(broker: Any) -> None:
    stream = workloads.ro().streams["ro"]
    with kdirect.connect(broker.bootstrap_servers) as session:
        workloads.write(session, stream, "t", records=0, partitions=2)
        with pytest.raises(ConfigError, match="the topic t has 2 partitions, not 3"):
            workloads.write(session, stream, "t", records=1, partitions=3)
        with pytest.raises(ConfigError, match="a topic of 0 partitions"):
            workloads.write(session, stream, "new", records=1, partitions=0)
        with pytest.raises(ConfigError, match="-1 records"):
            workloads.write(session, stream, "t", records=-1)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kdirect.cli", "workload", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_command(broker_process: Any) -> None:
    servers = broker_process().bootstrap_servers
    made = run(
        "ysb", "--broker", servers, "--topic", "t", "--records", "500", "--partitions", "2",
        "--set", "keys=10", "--set", "zipf=1.5", "--set", "seed=7",
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout)["t"]["records"] == 500
    stream = workloads.ysb(keys=10, zipf=1.5, seed=7).streams["ysb"]
    whole = [row.tobytes() for row in stream.records(0, 500)]
    with kdirect.connect(servers) as session:
        assert [read(session, "t", p) for p in range(2)] == [whole[::2], whole[1::2]]


def test_the_command_writes_the_streams_of_nexmark_in_their_ratio(broker_process: Any) -> None:
    servers = broker_process().bootstrap_servers
    made = run("nexmark", "--broker", servers, "--topic", "nb", "--records", "5000")
    assert made.returncode == 0, made.stderr
    with kdirect.connect(servers) as session:
        for name, share in EVENTS.items():
            values = read(session, f"nb-{name}", 0)
            stream = workloads.nexmark().streams[name]
            assert values == [row.tobytes() for row in stream.records(0, 100 * share)]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nope"], "invalid choice"),
        (["ysb", "--set", "colour=red"], "does not take all of colour"),
        (["ysb", "--set", "keys"], "keys"),
        (["ysb", "--set", "keys=0"], "keys=0"),
    ],
)
def test_the_command_names_what_is_wrong(arguments: list[str], says: str) -> None:
    name, *rest = arguments
    made = run(name, "--topic", "t", "--records", "1", *rest)
    assert made.returncode == 2
    assert says in made.stderr and "Traceback" not in made.stderr
