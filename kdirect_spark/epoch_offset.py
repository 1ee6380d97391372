"""The offset of an accelerated query, as Spark logs it before each micro-batch.

Pure.  It is the offset of the source, ``{"topic":{"0":123}}``, with one more member, ``/slash``
(which no topic can be called): the number of the *epoch* after the micro-batch, and the random name
of the query.  Batch N of the state job is the micro-batch that ends at epoch N + 1.  So the epoch's
ranges are in Spark's offset log before it runs, a repeated micro-batch is the same batch of the
job, and a checkpoint knows its state directory.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kdirect.errors import CheckpointError
from kdirect_spark.topic_ids import of_topics

MEMBER = "/slash"
_NEW = (
    "start it with a new checkpoint: the same query, unwrapped and wrapped by slash.accelerate, "
    "may be swapped over a restart only with a new checkpoint"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochOffset:
    """Where a query stands: `epoch` micro-batches with records are behind it, up to `offsets`."""

    query: str
    epoch: int
    offsets: dict[str, dict[str, int]]

    def to_json(self) -> dict[str, Any]:
        """As Spark logs it: equal offsets are equal text."""
        head = {"epoch": self.epoch, "query": self.query}
        return {MEMBER: head, **{topic: self.offsets[topic] for topic in sorted(self.offsets)}}

    def of(self, topics: Iterable[str]) -> dict[str, dict[str, int]]:
        """The offsets of these topics, with their ids."""
        return of_topics(self.offsets, tuple(topics))

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> EpochOffset:
        """Raises CheckpointError for an offset of a query that was not accelerated."""
        if MEMBER not in value:
            raise CheckpointError(
                "this checkpoint is that of a query that was not wrapped by slash.accelerate",
                hint=_NEW,
            )
        head = value[MEMBER]
        query = head.get("query") if isinstance(head, Mapping) else None
        epoch = head.get("epoch") if isinstance(head, Mapping) else None
        if not isinstance(query, str) or not query or not isinstance(epoch, int) or epoch < 0:
            raise CheckpointError(
                f"the checkpoint's member {MEMBER} is damaged: {head!r}",
                hint="restore the checkpoint from a copy, or start with a new one",
            )
        offsets = {topic: dict(of) for topic, of in value.items() if topic != MEMBER}
        return cls(query=query, epoch=epoch, offsets=offsets)


def new_query() -> str:
    """A random name for a new query."""
    return secrets.token_hex(16)


def refuse_accelerated(value: Mapping[str, Any]) -> None:
    """CheckpointError if an offset is that of an accelerated query, for a source that is not."""
    if MEMBER in value:
        raise CheckpointError(
            "this checkpoint is that of a query that was wrapped by slash.accelerate", hint=_NEW
        )
