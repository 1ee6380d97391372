"""The connection to a group's coordinator, which the thread that sends heartbeats may drop while
the consumer's thread waits for an answer over it."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from kdirect.client.coordinator_link import CoordinatorLink
from kdirect.errors import ClosedError
from kdirect.model import TopicPartition
from tests.client.conftest import SILENT
from tests.support import wait_until

OFFSET_FETCH = 9


@pytest.fixture
def link(behind, new_topic):
    """(a link, a partition of which its group has committed offset 7)."""
    tp = TopicPartition(new_topic(1), 0)
    made = CoordinatorLink(behind(), tp.topic)
    answer = made.send_commit({tp: 7}, "", -1, "", None).result()
    assert answer.topics[0].partitions[0].error_code == 0
    yield made, tp
    made.give_back()


@pytest.fixture
def under_way(proxy, link):
    """A call of another thread for what is committed, of which the broker's answer is lost."""
    made, tp = link
    proxy.once(OFFSET_FETCH, SILENT)
    with ThreadPoolExecutor(1) as pool:
        call: Future = pool.submit(made.committed, [tp])
        wait_until(lambda: OFFSET_FETCH in proxy.requests, "the request is sent")
        yield call
        made.give_back()  # ends a call that still waits


def test_a_call_goes_on_over_the_connection_after_the_one_that_was_dropped(link, under_way):
    made, tp = link
    before = made.connection()
    made.drop()
    assert under_way.result(30) == {tp: 7}
    assert before.closed and not made.connection().closed


def test_a_call_ends_with_its_consumer(link, under_way):
    """A consumer that closes gives the connection back."""
    made, _ = link
    made.give_back()
    with pytest.raises(ClosedError):
        under_way.result(30)


def test_who_failed_over_a_dropped_connection_leaves_the_next_one_alone(link):
    made, _ = link
    drops = made.drops
    made.drop()
    following = made.connection()
    made.drop(drops)
    assert made.connection() is following and not following.closed
    made.drop(made.drops)
    assert following.closed
