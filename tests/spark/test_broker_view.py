"""What a planner is told of topics that come and go while it asks: real broker, no Spark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import kdirect
from kdirect.errors import UnknownTopicError
from kdirect.model import TopicPartition
from kdirect_spark.broker_view import LISTINGS, BrokerView
from kdirect_spark.settings import source_settings

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
