"""FindCoordinator: which broker coordinates what a client names.

Owns: the answer.  Which broker it is follows from who leads a partition of the topic that holds the
coordinator's state; where that topic is missing, it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kdirect.broker.answers import Answer, respond
from kdirect.broker.cluster_view import Node
from kdirect.broker.connection import Connection
from kdirect.broker.coordinator_partitions import CoordinatorPartitions
from kdirect.broker.services import Services
from kdirect.format import protocol as p
from kdirect.format.error_codes import ErrorCode

GROUP_KEY = 0
TRANSACTION_KEY = 1
_WHAT = {GROUP_KEY: "group", TRANSACTION_KEY: "transactional id"}


class CoordinatorHandlers:
    """See the module.  `groups`, `transactions`: the partitions by which groups and transactional
    ids are coordinated."""

    def __init__(
        self,
        services: Services,
        groups: CoordinatorPartitions,
        transactions: CoordinatorPartitions,
    ) -> None:
        self._services = services
        self._partitions = {GROUP_KEY: groups, TRANSACTION_KEY: transactions}

    def find_coordinator(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        own = self._services.listeners.address_for(connection.listener, connection.local[0])
        keys = request.coordinator_keys if header.api_version >= 4 else [request.key]
        listener = self._services.config.listeners[connection.listener].name
        rows = [self._coordinator_row(request.key_type, key, own, listener) for key in keys]
        if header.api_version >= 4:
            return respond(header, p.FindCoordinatorResponse, coordinators=rows)
        row = rows[0]
        del row["key"]
        return respond(header, p.FindCoordinatorResponse, **row)

    def _coordinator_row(
        self, key_type: int, key: str, own: tuple[str, int], listener: str
    ) -> dict[str, Any]:
        """`own`: where the client reaches this broker, through the listener of that name."""
        if key_type not in self._partitions:
            why = "this broker coordinates consumer groups and transactions"
            return _no_coordinator(key, ErrorCode.INVALID_REQUEST, why)
        node = self._coordinator_of(key_type, key, own, listener)
        if node is None:
            return _no_coordinator(
                key,
                ErrorCode.COORDINATOR_NOT_AVAILABLE,
                f"no broker coordinates the {_WHAT[key_type]} at present",
            )
        return {
            "key": key,
            "node_id": node.node_id,
            "host": node.host,
            "port": node.port,
            "error_code": 0,
            "error_message": None,
        }

    def _coordinator_of(
        self, key_type: int, key: str, own: tuple[str, int], listener: str
    ) -> Node | None:
        """The broker that coordinates a group or a transactional id; None: there is none at
        present.  Where the topic that keeps them is missing, it is asked for."""
        cluster, partitions = self._services.cluster, self._partitions[key_type]
        if self._services.replicas is not None and partitions.index_of(key) is None:
            partitions.ask_for_topic()
            return None
        of = cluster.coordinator_of if key_type == GROUP_KEY else cluster.transaction_coordinator_of
        return cluster.node(of(key), own, listener)

    def table(self) -> Iterable[tuple[str, Any, bool]]:
        """(API name, handler, whether later requests of the connection wait for its answer)."""
        return [("FindCoordinator", self.find_coordinator, True)]


def _no_coordinator(key: str, code: int, why: str) -> dict[str, Any]:
    return {
        "key": key,
        "node_id": -1,
        "host": "",
        "port": -1,
        "error_code": code,
        "error_message": why,
    }
