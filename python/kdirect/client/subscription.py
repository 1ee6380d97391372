"""The topics that a consumer subscribed to: names, and patterns that match names."""

from __future__ import annotations

import re
from collections.abc import Iterable

from kdirect.errors import ConfigError, UnknownTopicError
from kdirect.wire.cluster import Cluster


class Subscription:
    """`topics`: names; one that begins with ``^`` is a regular expression.  ConfigError for none,
    and for an expression that is none.  With `elsewhere` the group's coordinator finds the topics
    of expressions: `regex` is all of them in one, empty without any."""

    def __init__(self, topics: Iterable[str] | str, *, elsewhere: bool = False) -> None:
        names = [topics] if isinstance(topics, str) else list(topics)
        if not names:
            raise ConfigError(
                "a subscription of no topics", hint="name at least one, or call unsubscribe"
            )
        self._names = [name for name in names if not name.startswith("^")]
        patterns = [name for name in names if name.startswith("^")]
        self.regex = ""
        self._patterns: list[re.Pattern[str]] = []
        if elsewhere:
            self.regex = "|".join(f"({pattern})" for pattern in patterns)
            return
        try:
            self._patterns = [re.compile(pattern) for pattern in patterns]
        except re.error as e:
            raise ConfigError(
                f"a subscribed pattern is no regular expression: {e}", hint="correct it"
            ) from e

    def look_up(self, cluster: Cluster, *, must_exist: bool) -> dict[str, int]:
        """Partition counts of the topics that exist now.  With `must_exist`, UnknownTopicError for
        a name that does not."""
        out = {}
        if self._patterns:
            for name, count in cluster.topics().items():
                if any(p.match(name) for p in self._patterns):
                    out[name] = count
        for name in self._names:
            try:
                out[name] = len(cluster.partitions(name, refresh=True))
            except UnknownTopicError:
                if must_exist:
                    raise
        return out
