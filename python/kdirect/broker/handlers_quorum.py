"""DescribeQuorum: who decides in this cluster, in the words of Kafka's `kafka-metadata-quorum`.

There is no quorum of Raft here: one broker is the controller, and its decisions are durable in the
metadata store.  So the answer names the controller as the leader and the one voter, and the other
brokers, which follow what the controller writes, as observers.  A broker that is alone is its own
controller; what it decides has no numbers, so its offsets are 0.  In a cluster they are the numbers
of changes in the store; how far another broker is, is not known (-1).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kdirect.broker.answers import Answer, respond
from kdirect.broker.connection import Connection
from kdirect.broker.services import Services
from kdirect.format import protocol as p
from kdirect.format.error_codes import ErrorCode

METADATA_TOPIC = "__cluster_metadata"
NOT_KNOWN = -1


class QuorumHandlers:
    """See the module.  A broker has one, used on its event loop."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._cluster = services.cluster
        self._config = services.config

    def describe_quorum(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        """Kafka answers a request for any other partition with that partition's error alone."""
        asked = [(t.topic_name, x.partition_index) for t in request.topics for x in t.partitions]
        if asked != [(METADATA_TOPIC, 0)]:
            rows = [
                {
                    "topic_name": t.topic_name,
                    "partitions": [_unknown(x.partition_index) for x in t.partitions],
                }
                for t in request.topics
            ]
            return respond(header, p.DescribeQuorumResponse, error_code=0, topics=rows)
        listener = self._config.listeners[connection.listener].name
        own = self._services.listeners.address_for(connection.listener, connection.local[0])
        cluster = self._cluster.as_of_now()
        controller, nodes = cluster.controller_id, cluster.nodes(own, listener)
        epoch, end = cluster.decided()
        now = self._services.environment.time_ms()
        voter = {
            "replica_id": controller,
            "log_end_offset": end,
            "last_fetch_timestamp": now,
            "last_caught_up_timestamp": now,
        }
        partition = {
            "partition_index": 0,
            "error_code": 0,
            "leader_id": controller,
            "leader_epoch": epoch,
            "high_watermark": end,
            "current_voters": [voter],
            "observers": [
                {"replica_id": n.node_id, "log_end_offset": NOT_KNOWN}
                for n in nodes
                if n.node_id != controller
            ],
        }
        return respond(
            header,
            p.DescribeQuorumResponse,
            error_code=0,
            topics=[{"topic_name": METADATA_TOPIC, "partitions": [partition]}],
            nodes=[
                {
                    "node_id": n.node_id,
                    "listeners": [{"name": listener, "host": n.host, "port": n.port}],
                }
                for n in nodes
                if n.node_id == controller
            ],
        )

    def table(self) -> Iterable[tuple[str, Any, bool]]:
        """(API name, handler, whether later requests of the connection wait for its answer)."""
        return [("DescribeQuorum", self.describe_quorum, True)]


def _unknown(index: int) -> dict[str, Any]:
    return {
        "partition_index": index,
        "error_code": ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        "error_message": "This server does not host this topic-partition.",
        "leader_id": 0,
        "leader_epoch": 0,
        "high_watermark": 0,
        "current_voters": [],
        "observers": [],
    }
