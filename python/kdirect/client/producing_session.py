"""What a producer needs of a session: the face that `kdirect.client.session` has for it.

A protocol and no class, so that the producer's modules know nothing of readers, and a simulation
passes a session of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from kdirect.client.two_sided import MessageConnection
from kdirect.model import TopicPartition
from kdirect.wire.channel import Channel
from kdirect.wire.environment import Environment


class ProducingSession(Protocol):
    """See the module.  Thread-safe."""

    @property
    def cluster(self) -> Any:
        """Metadata, and connections to leaders (`kdirect.wire.cluster.Cluster`)."""

    @property
    def environment(self) -> Environment:
        """Clock, threads, connections."""

    @property
    def closed(self) -> bool:
        """No way can be opened any more."""

    def transport_to(self, tp: TopicPartition) -> str:
        """The transport to the leader of `tp`: `verbs`, `shm` or `tcp`."""

    def channel(self, tp: TopicPartition, *, receives: int, sends: int) -> Channel:
        """A new queue pair to the leader of `tp`."""

    def messages(self, tp: TopicPartition, settings: Mapping[str, Any]) -> MessageConnection:
        """A new queue pair for requests in SENDs, to the leader of `tp`."""

    def new_producer_id(self) -> tuple[int, int] | None:
        """(producer id, epoch) for an idempotent producer; None when the broker has none."""
