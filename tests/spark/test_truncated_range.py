"""A task whose range was cut off the log by an unclean election: a loss, as failOnDataLoss says.
No Spark, no broker."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest

from kdirect.errors import DataLossError, TruncatedLogError
from kdirect.model import TopicPartition
from kdirect_spark import worker
from kdirect_spark.offsets import OffsetRange
from kdirect_spark.reading import RangeReading
from kdirect_spark.settings import source_settings
from tests.readers import ReadsOnly, StandInReader

TP = TopicPartition("t", 0)


class Log(ReadsOnly):
    """A session whose first reader gets two records, and is told then that they are not there; the
    next one reads what is there now."""

    transport = "tcp"

    def __init__(self) -> None:
        self.starts: list[int] = []

    def open_reader(self, tp: TopicPartition, start: int, stop: int) -> StandInReader:
        self.starts.append(start)
        return _Reader(self, start, stop)


class _Reader(StandInReader):
    transport = "tcp"

    def __init__(self, log: Log, start: int, stop: int) -> None:
        super().__init__(start, stop)
        self.first = len(log.starts) == 1

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        end = self.next_offset + 2 if self.first else self.stop
        offsets = list(range(self.next_offset, end))
        batch = pa.RecordBatch.from_pydict(
            {"offset": offsets, "timestamp": pa.array(offsets, pa.timestamp("us", tz="UTC"))}
        )
        self.next_offset = end
        yield batch
        if self.first:
            raise TruncatedLogError("t-0 was cut: it was read up to offset 2", hint="none")


def run(monkeypatch: pytest.MonkeyPatch, fail: str) -> tuple[Log, list[int]]:
    log, got = Log(), []
    monkeypatch.setattr(worker, "session", lambda settings: log)
    given = {"kafka.bootstrap.servers": "h:1", "subscribe": "t", "failOnDataLoss": fail}
    reading = RangeReading(source_settings(given, streaming=True), OffsetRange(TP, 0, 5))
    for batch in reading.batches():
        got += batch["offset"].to_pylist()
    return log, got


def test_the_query_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataLossError, match=r"t-0 was cut.*; 2 to 5 were still to be read"):
        run(monkeypatch, "true")


def test_or_reads_what_there_is_now(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log, got = run(monkeypatch, "false")
    assert got == [0, 1, 2, 3, 4]
    assert log.starts == [0, 2]
    assert [r.levelname for r in caplog.records if "t-0 was cut" in r.getMessage()] == ["WARNING"]
