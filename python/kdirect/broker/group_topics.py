"""What the rules of KIP-848's groups are told of this broker's topics.

Owns nothing: it asks the registry, which knows all topics of a cluster where there is one.  The
broker's own topics have no part in expressions, as in the clients that evaluate these themselves.
"""

from __future__ import annotations

from collections.abc import Iterable

from kdirect.broker import topic_patterns
from kdirect.broker.topics import Registry
from kdirect.format.consumer_group_records import TopicFacts


class BrokerTopics:
    """`kdirect.broker.consumer_groups.Topics` of a broker."""

    def __init__(self, topics: Registry) -> None:
        self._topics = topics

    def facts(self, name: str) -> TopicFacts | None:
        found = self._topics.find(name)
        if found is None or found.deleting:
            return None
        return TopicFacts(found.topic_id, found.partition_count)

    def names(self) -> list[str]:
        return [t.name for t in self._topics.all_topics() if not t.internal and not t.deleting]

    def problem(self, regex: str) -> str:
        return topic_patterns.problem(regex)

    def matching(self, regex: str, names: Iterable[str]) -> frozenset[str]:
        return topic_patterns.matching(regex, names)
