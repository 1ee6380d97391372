"""How long a query waits for a broker: the rule, with a clock of its own."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kdirect.errors import (
    BrokerError,
    BrokerUnavailableError,
    ConfigError,
    DataLossError,
    RemoteUnavailableError,
)
from kdirect.model import TopicPartition
from kdirect_spark.offsets import OffsetRange
from kdirect_spark.patience import LONGEST_PAUSE_S, Patience
from kdirect_spark.reading import RangeReading
from kdirect_spark.settings import source_settings

AWAY = BrokerUnavailableError("no broker answers at h:1", hint="start one")


class Time:
    """Time that passes only in pauses."""

    def __init__(self) -> None:
        self.now = 100.0
        self.pauses: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def patience(self, patience_ms: float) -> Patience:
        return Patience("t-0", patience_ms, clock=lambda: self.now, sleep=self.sleep)


def test_it_lasts_from_the_last_progress_on() -> None:
    time = Time()
    patience = time.patience(20_000)
    while patience.outlasts(AWAY):
        pass
    assert time.now == pytest.approx(120.0), "to its end, and not beyond"
    patience.progressed()
    assert patience.outlasts(AWAY), "what goes wrong later is waited for again"


def test_pauses_grow_and_begin_again() -> None:
    time = Time()
    patience = time.patience(60_000)
    for _ in range(12):
        assert patience.outlasts(AWAY)
    assert time.pauses[0] < 0.1 < 0.5 < time.pauses[-1] <= 1.2 * LONGEST_PAUSE_S
    patience.progressed()
    patience.outlasts(AWAY)
    assert time.pauses[-1] < 0.1


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("no"),
        DataLossError("gone"),
        BrokerError("no"),
        RemoteUnavailableError("a store, not a broker"),
    ],
)
def test_what_does_not_pass_is_not_waited_for(error: Any) -> None:
    time = Time()
    assert not time.patience(60_000).outlasts(error)
    assert time.pauses == []


@pytest.mark.parametrize("name", ["COORDINATOR_LOAD_IN_PROGRESS", "LEADER_NOT_AVAILABLE"])
def test_a_broker_that_is_not_ready_yet_is_waited_for(name: str) -> None:
    assert Time().patience(1000).outlasts(BrokerError("soon", name=name, retriable=True))


def test_the_log_says_once_who_waits_and_why(caplog: Any) -> None:
    patience = Time().patience(60_000)
    with caplog.at_level(logging.WARNING, "kdirect_spark"):
        for _ in range(5):
            patience.outlasts(AWAY)
    (line,) = [r.getMessage() for r in caplog.records]
    assert "t-0 waits for the broker, 60 s at most" in line and "h:1" in line


class AwayOnce(RangeReading):
    """Its broker is away when it begins."""

    def _read(self, *_: Any) -> Iterator[Any]:
        if not self.__dict__.setdefault("tried", False):
            self.tried = True
            raise AWAY
        yield from ()


def test_a_range_waits_however_long_its_task_has_read_others() -> None:
    """They are all there when the task begins, and read one after the other."""
    given = {"kafka.bootstrap.servers": "h:1", "subscribe": "t"}
    given["kafkaConsumer.pollTimeoutMs"] = "200"
    settings = source_settings(given, streaming=True)
    later = AwayOnce(settings, OffsetRange(TopicPartition("t", 1), 0, 1))
    time.sleep(0.3)
    assert list(later.batches()) == [] and later.tried
