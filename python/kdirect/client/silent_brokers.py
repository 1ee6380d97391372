"""Brokers that a producer writes to by RDMA, and that answer nothing: do they lead any more?

A broker that is stopped keeps its queue pairs, and takes what is written into its memory without a
word.  Another broker may lead its partitions by then, and nobody tells its producers.

Owns: what was acknowledged when it was looked last, and the questions where leaders are, which are
asked where nobody waits.  What may not enter: what follows from the answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kdirect.client.broker_link import BrokerLink, BrokerLinks
from kdirect.client.direct_append import DirectAppender
from kdirect.client.lost_broker import ask_leader
from kdirect.client.written_partition import WrittenPartition
from kdirect.model import TopicPartition
from kdirect.wire.attempt import Attempt
from kdirect.wire.environment import Environment

LOOK_EVERY_S = 0.5  # between two looks whether requests under way are answered


class SilentBrokers:
    """See the module.  `links` are the producer's, `cluster` tells where leaders are."""

    def __init__(self, environment: Environment, cluster: Any, links: BrokerLinks) -> None:
        self.next_look = 0.0  # monotonic seconds; 0: never, for there is one broker
        self._environment = environment
        self._cluster = cluster
        self._links = links
        self._acknowledged: dict[TopicPartition, int] = {}
        self._questions: dict[BrokerLink, Attempt[None]] = {}

    def watch(self) -> None:
        """A way to a broker was opened.  Where there are others, they may lead its partitions some
        day."""
        if not self.next_look and self._cluster.has_several_brokers:
            self.next_look = self._environment.monotonic() + LOOK_EVERY_S

    def moved(
        self, partitions: Iterable[WrittenPartition]
    ) -> list[tuple[WrittenPartition, BrokerLink, BrokerLink]]:
        """Look: those of these partitions that another broker leads, while nothing that is under
        way was answered since the last look; with the link that is silent, and the other."""
        self.next_look = self._environment.monotonic() + LOOK_EVERY_S
        found = []
        for p in partitions:
            appender = p.appender
            if not isinstance(appender, DirectAppender):
                continue
            before = self._acknowledged.get(p.tp)
            now = self._acknowledged[p.tp] = appender.requests_acknowledged
            if not appender.in_flight or now != before or not self._have_asked(appender.link, p.tp):
                continue
            link = self._links.moved(p.tp, appender.link)
            if link is not None:
                found.append((p, appender.link, link))
        return found

    def _have_asked(self, link: BrokerLink, tp: TopicPartition) -> bool:
        """Was the leader of `tp` asked for since `link` is silent?  False while it is."""
        question = self._questions.get(link)
        if question is None:
            cluster = self._cluster
            self._questions[link] = self._environment.spawn(lambda: ask_leader(cluster, tp))
        elif question.done:
            del self._questions[link]
            return True
        return False
