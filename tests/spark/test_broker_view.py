"""What a planner is told of topics and records that come and go while it asks: real broker, no
Spark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import kdirect
import kdirect_spark.source
from kdirect.errors import UnknownTopicError
from kdirect.model import TopicPartition
from kdirect_spark.broker_view import LISTINGS, BrokerView
from kdirect_spark.offsets import OffsetRange
from kdirect_spark.settings import source_settings
from kdirect_spark.source import KdirectBatchReader

TP = TopicPartition("t", 0)


class Races(BrokerView):
    """Deletes the topic after each of the first `times` listings, or creates it before the next."""

    times = 0

    def _list_topics(self) -> dict[str, int]:
        admin = self.session().admin
        if "t" not in admin.list_topics():
            admin.create_topic("t", 1)
        found = super()._list_topics()
        if self.times:
            self.times -= 1
            admin.delete_topic("t")
        return found


@pytest.fixture
def view(tmp_path: Path) -> Iterator[Races]:
    with kdirect.Broker(tmp_path / "log") as broker:
        given = {
            "kafka.bootstrap.servers": broker.bootstrap_servers,
            "subscribe": "t",
            "fetchOffset.numRetries": "0",
        }
        view = Races(source_settings(given, streaming=True))
        admin = view.session().admin
        admin.create_topic("t", 1)
        assert view.watermarks([TP]) == {TP: (0, 0)}
        admin.delete_topic("t")
        yield view


def test_a_topic_that_goes_between_a_listing_and_its_offsets_is_listed_again(view: Races) -> None:
    view.times = LISTINGS - 1
    assert view.watermarks([TP]) == {TP: (0, 0)}


def test_a_topic_that_goes_each_time_is_gone_in_the_end(view: Races) -> None:
    """What that means for the query is what failOnDataLoss says."""
    view.times = LISTINGS + 1
    assert view.watermarks([TP]) == {}
    view.times = LISTINGS + 1
    with pytest.raises(UnknownTopicError, match="t-0 was deleted while the query was planned"):
        view.watermarks([TP], must_exist=True)


def test_other_topics_are_told_while_one_comes_and_goes(view: Races) -> None:
    view.session().admin.create_topic("other", 1)
    other = TopicPartition("other", 0)
    view.times = LISTINGS + 1
    assert view.watermarks([TP, other]) == {other: (0, 0)}


class LateRecords(BrokerView):
    """Records come after the watermarks were asked for, before a time is looked up."""

    def first_offsets(self, times):
        write(self, 1000, 2000)
        return super().first_offsets(times)


def write(view: BrokerView, *times: int) -> None:
    with view.session().producer() as producer:
        for ms in times:
            producer.produce("t", b"x", partition=0, timestamp=ms)


def test_a_record_of_a_time_that_comes_while_a_batch_is_planned_is_not_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was a start beyond the end, or a loss; nothing is wrong."""
    with kdirect.Broker(tmp_path / "log") as broker:
        given = {"kafka.bootstrap.servers": broker.bootstrap_servers, "subscribe": "t"}

        def planned(**options: str) -> tuple[OffsetRange, ...]:
            admin.delete_topic("t")
            admin.create_topic("t", 1, configs={"retention.ms": "-1"})
            write(view, 1000, 1000)
            settings = source_settings(given | options, streaming=False)
            return KdirectBatchReader(settings).plan()[1].ranges

        view = BrokerView(source_settings(given, streaming=False))
        admin = view.session().admin
        admin.create_topic("t", 1)
        monkeypatch.setattr(kdirect_spark.source, "BrokerView", LateRecords)
        assert planned(startingTimestamp="1500") == ()
        assert planned(endingTimestamp="1500") == (OffsetRange(TP, 0, 2),)
        assert planned(startingTimestamp="1000", endingTimestamp="1500") == (OffsetRange(TP, 0, 2),)
