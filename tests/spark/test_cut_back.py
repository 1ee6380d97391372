"""A stream whose log ends below what the query has read: its tail is lost, or its leader does not
know yet how far it goes.  Real brokers, no Spark."""

from __future__ import annotations

import logging
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

import kdirect
from kdirect.errors import DataLossError
from kdirect.model import TopicPartition
from kdirect_spark import source
from kdirect_spark.broker_view import BrokerView
from kdirect_spark.offsets import OffsetRange
from kdirect_spark.settings import source_settings

if not source.ADMISSION_CONTROL:
    pytest.skip("needs pyspark 4.2 or later", allow_module_level=True)

from pyspark.sql.streaming.datasource import ReadAllAvailable

TP = TopicPartition("t", 0)


def free_address() -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{s.getsockname()[1]}"


def write(servers: str, records: int) -> None:
    with kdirect.connect(servers) as session, session.producer() as producer:
        for i in range(records):
            producer.produce("t", b"%d" % i, partition=0)


def reader(servers: str, fail: bool = False) -> Any:
    """That of a query, as its planner process has it after a start."""
    given = {
        "kafka.bootstrap.servers": servers,
        "subscribe": "t",
        "startingOffsets": "earliest",
        "failOnDataLoss": str(fail).lower(),
    }
    return source.KdirectStreamReader(source_settings(given, streaming=True))


def latest(of: Any, start: dict) -> dict:
    found: dict = of.latestOffset(start, ReadAllAvailable())
    return found


def test_a_log_that_has_lost_its_tail_is_a_loss_and_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As after the end of a machine: the newest pages of a log were not on disk.  With
    failOnDataLoss=false the query read everything that was left a second time."""
    monkeypatch.setattr(source, "BEHIND_S", 0.2)
    log, before, servers = tmp_path / "log", tmp_path / "before", free_address()
    with kdirect.Broker(log, listeners=servers) as broker:
        with kdirect.connect(broker.bootstrap_servers) as session:
            session.admin.create_topic("t", 1)
        write(servers, 6)
    shutil.copytree(log, before)
    with kdirect.Broker(log, listeners=servers):
        write(servers, 4)
        first = reader(servers)
        done = latest(first, first.initialOffset())
        assert done["t"] == {"0": 10}
    shutil.rmtree(log)
    shutil.copytree(before, log)
    with kdirect.Broker(log, listeners=servers):
        strict, second = reader(servers, fail=True), reader(servers)
        with pytest.raises(DataLossError, match="t-0 went back from offset 10 to 6: its log was"):
            strict.plan(done, latest(strict, done))
        end = latest(second, done)
        assert end["t"] == {"0": 6}
        with caplog.at_level(logging.WARNING, "kdirect_spark"):
            assert second.plan(done, end).ranges == ()
        assert "its log was cut back" in caplog.text
        write(servers, 3)
        now = latest(second, end)
        assert second.plan(end, now).ranges == (OffsetRange(TP, 6, 9),), "what came since"


class Lagging(BrokerView):
    """The broker's high watermark is below what was read, the first `times` that it is asked for:
    its leader has just taken over."""

    times = 0

    def watermarks(self, partitions: Any, *, must_exist: bool = False) -> Any:
        found = super().watermarks(partitions, must_exist=must_exist)
        if self.times:
            self.times -= 1
            return {tp: (low, high - 4) for tp, (low, high) in found.items()}
        return found


def test_available_now_waits_for_a_leader_that_does_not_know_its_end_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was a loss to a query that goes on from its checkpoint: its end was fixed before anything
    was known of the checkpoint, and was not asked for again."""
    monkeypatch.setattr(source, "BrokerView", Lagging)
    with kdirect.Broker(tmp_path / "log") as broker:
        with kdirect.connect(broker.bootstrap_servers) as session:
            session.admin.create_topic("t", 1)
        write(broker.bootstrap_servers, 10)
        first = reader(broker.bootstrap_servers, fail=True)
        done = latest(first, first.initialOffset())
        assert done["t"] == {"0": 10}
        write(broker.bootstrap_servers, 2)

        second = reader(broker.bootstrap_servers, fail=True)
        second._view.times = 2
        second.prepareForTriggerAvailableNow()
        end = latest(second, done)
        assert second.plan(done, end).ranges == (OffsetRange(TP, 10, 12),)
        write(broker.bootstrap_servers, 1)
        assert latest(second, end) == end, "the end is fixed as before"
