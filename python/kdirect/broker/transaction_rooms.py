"""The parts of a broker that are about transactions, put together.

Owns: which part is given which other one; no part is told of more than it needs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from kdirect.broker.coordinator_partition import State
from kdirect.broker.handlers_attempts import AttemptHandlers
from kdirect.broker.handlers_enter import EnterHandlers
from kdirect.broker.handlers_groups import GroupHandlers
from kdirect.broker.handlers_transactions import TransactionHandlers
from kdirect.broker.handlers_txn_offsets import TxnOffsetHandlers
from kdirect.broker.marker_groups import MarkerGroups
from kdirect.broker.services import Services
from kdirect.broker.topics import OFFSETS_TOPIC
from kdirect.broker.transaction_checks import TransactionChecks
from kdirect.broker.transaction_coordinator import TransactionCoordinator
from kdirect.broker.transaction_markers import TransactionMarkers
from kdirect.broker.transactions import Markers
from kdirect.errors import CoordinatorError
from kdirect.format.error_codes import ErrorCode
from kdirect.model import TopicPartition


class TransactionRooms:
    """See the module.  `take_id`: a producer id; `peers`: the connections to other brokers, None
    where the broker is alone; `access`: RDMA clients, None where there are none.  `rooms`: what
    answers requests."""

    def __init__(
        self,
        services: Services,
        groups: GroupHandlers,
        take_id: Callable[[], Awaitable[int]],
        peers: Any,
        access: Any,
    ) -> None:
        self._services = services
        self._groups = groups
        markers = TransactionMarkers(services, peers)
        markers.may_append = self._may_append
        markers.completed = self._completed
        marker_groups = MarkerGroups(markers, peers, services.cluster.node_id)
        self.coordinator = TransactionCoordinator(services, take_id, markers, marker_groups)
        handlers = TransactionHandlers(
            services, self.coordinator, marker_groups, take_id, self._group_partition
        )
        self.checks = TransactionChecks(services, handlers, peers)
        self.rooms: list[Any] = [
            handlers,
            AttemptHandlers(services, self.coordinator.attempts),
            TxnOffsetHandlers(services, groups, self.checks),
            EnterHandlers(services, self.checks, access),
        ]

    async def _group_partition(self, group: str) -> TopicPartition:
        """The partition that keeps a group's offsets.  CoordinatorError: there is none yet."""
        offsets = self._services.offsets
        if offsets.partition_count:
            pass
        elif self._services.replicas is None:
            await self._services.files.admin(offsets.create_topic)
        else:
            self._groups.partitions.ask_for_topic()
            raise CoordinatorError(f"the topic {OFFSETS_TOPIC} is being created", hint="try again")
        return TopicPartition(OFFSETS_TOPIC, offsets.index_of(group))

    # -- markers in the offsets of groups ----------------------------------------------------------

    def _is_loaded(self, tp: TopicPartition) -> bool:
        if self._services.replicas is None:
            return True
        return self._groups.partitions.state(tp.partition).state is State.ACTIVE

    def _may_append(self, tp: TopicPartition) -> int:
        """A marker that came while offsets are read could be missed by whoever reads."""
        if tp.topic != OFFSETS_TOPIC or self._is_loaded(tp):
            return ErrorCode.NONE
        return ErrorCode.NOT_LEADER_OR_FOLLOWER

    def _completed(self, tp: TopicPartition, markers: Markers) -> int:
        if tp.topic == OFFSETS_TOPIC and self._is_loaded(tp):
            self._services.offsets.end_transaction(
                tp.partition, markers.producer_id, markers.commit
            )
        return ErrorCode.NONE
