"""Topics of a cluster that were deleted: what coordinators remember of them is forgotten.

Owns: when a topic counts as deleted, by the pictures of the cluster before and after.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from kdirect.cluster import paths
from kdirect.cluster.image import Topic
from kdirect.member.metadata import Metadata


class DeletedTopics:
    """See the module.  `forget(topic)` is called while `is_needed()`.  Used on the event loop."""

    def __init__(
        self,
        forget: Callable[[str], Coroutine[Any, Any, None]],
        is_needed: Callable[[], bool],
    ) -> None:
        self._forget = forget
        self._is_needed = is_needed
        self._forgetting: set[asyncio.Future[None]] = set()

    def follow(self, before: Metadata | None, after: Metadata) -> None:
        """Newer metadata: offsets in topics that were deleted are forgotten by whoever coordinates
        their groups.  A subscriber of the membership."""
        old, new = before.image.topics if before is not None else {}, after.image.topics
        if old is new or not self._is_needed():
            return
        for name, topic in old.items():
            now = new.get(name)
            if now is not topic and _is_deleted(name, topic, now, after):
                task = asyncio.ensure_future(self._forget(name))
                self._forgetting.add(task)
                task.add_done_callback(self._forgetting.discard)


def _is_deleted(name: str, topic: Topic, now: Topic | None, metadata: Metadata) -> bool:
    """Is a topic gone, or another one of its name there?  One whose node is damaged, or is not read
    yet, is not gone; one that was written without an id gets one later."""
    if now is None:
        return metadata.generation >= 0 and paths.topic(name) not in metadata.image.damaged
    ids = topic.record.topic_id, now.record.topic_id
    return None not in ids and ids[0] != ids[1]
