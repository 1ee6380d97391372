"""The rooms of handlers of a broker, and which of them answers which request.

Owns: the table by API key that `BrokerServer.dispatch` looks into, and so what the broker says that
it speaks.  What a broker has not (a cluster, RDMA, tiered storage) has no handlers here, and
nothing of it is loaded.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from kdirect.broker.answers import Answer, encoded, later, respond
from kdirect.broker.connection import Connection
from kdirect.broker.handlers_cluster import ClusterHandlers
from kdirect.broker.handlers_configs import ConfigHandlers
from kdirect.broker.handlers_consumer_groups import ConsumerGroupHandlers
from kdirect.broker.handlers_coordinators import CoordinatorHandlers
from kdirect.broker.handlers_data import DataHandlers
from kdirect.broker.handlers_group_admin import GroupAdminHandlers
from kdirect.broker.handlers_groups import GroupHandlers
from kdirect.broker.handlers_log_dirs import LogDirHandlers
from kdirect.broker.handlers_quorum import QuorumHandlers
from kdirect.broker.handlers_refused import RefusedHandlers
from kdirect.broker.handlers_versions import VersionHandlers
from kdirect.broker.plain_requests import PlainRequests
from kdirect.broker.services import Services
from kdirect.broker.topics import INTERNAL_TOPICS, Topic
from kdirect.broker.transaction_rooms import TransactionRooms
from kdirect.format import layout
from kdirect.format import protocol as p
from kdirect.format.error_codes import ErrorCode


class HandlerRooms:
    """See the module.  `member`, `access` and `remote` are the broker's parts of these names, or
    None.  `by_key`: by API key the handler, and whether it holds up later requests of its
    connection while it waits.  `plain`: what answers plain requests, or None."""

    def __init__(
        self,
        services: Services,
        *,
        member: Any,
        access: Any,
        remote: Any,
        delete_topic: Callable[[Topic], Awaitable[None]],
    ) -> None:
        self._access = access
        self.groups = GroupHandlers(services)
        self.by_key: dict[int, tuple[Callable[..., Answer], bool]] = {}
        if member is None:
            configs: Any = ConfigHandlers(services)
            data: Any = DataHandlers(services)
            take: Any = partial(services.files.admin, services.topics.next_producer_id)
            rooms: list[Any] = []
            create_missing = None
        else:
            configs, data, topics, placement = member.handlers(services)
            take = member.topics.take_producer_id
            rooms = [topics, placement]  # after those of a broker that is alone
            create_missing = topics.create_missing
        cluster = ClusterHandlers(
            services,
            config_rows=configs.topic_rows,
            delete_topic=delete_topic,
            create_missing=create_missing,
        )
        peers = None if member is None else member.peers
        transactions = TransactionRooms(services, self.groups, take, peers, access)
        self.transactions = transactions.coordinator
        data.checks = transactions.checks
        groups = [*self._of_groups(services), *transactions.rooms]
        self.versions = VersionHandlers(self.apis)
        quorum = QuorumHandlers(services)
        of_cluster = [self.versions, cluster, quorum, LogDirHandlers(services), configs]
        rooms = [data, *of_cluster, *groups, RefusedHandlers(services), *rooms]
        self.fetch_sessions = data.sessions
        # Of a broker that is alone: in a cluster there is more to ask.
        self.plain = PlainRequests(data, services) if member is None else None
        for handlers in rooms:
            for name, function, blocking in handlers.table():
                self.by_key[p.API_NAMES[name].key] = (function, blocking)
        if member is not None:
            for key, function, blocking in member.table():
                self.by_key[key] = (function, blocking)
            if remote is not None:
                member.add_remote_storage(remote, lambda key: self.by_key[key][0])
                topics.before_deletion = remote.mark_deleted
        if access is not None:
            self._add_access(services)

    def _add_access(self, services: Services) -> None:
        """What RDMA clients ask."""
        from kdirect.broker.commit_slots import CommitSlots  # not without RDMA

        slots = CommitSlots(services, self.groups, self._access)
        self.groups.happened = slots.look
        for name, function, blocking in slots.table():
            self.by_key[p.API_NAMES[name].key] = (function, blocking)
        for key in p.ACCESS_API_KEYS:
            # These hold up nothing: a producer that waits for access may wait for another
            # answer on the same connection.
            self.by_key[key] = (self._handle_access, False)

    def _of_groups(self, services: Services) -> list[Any]:
        transactions = self.transactions.partitions
        return [
            self.groups,
            ConsumerGroupHandlers(self.groups),
            GroupAdminHandlers(self.groups, services.offsets),
            CoordinatorHandlers(services, self.groups.partitions, transactions),
        ]

    def apis(self) -> list[p.Api]:
        """What is advertised."""
        return [p.APIS[key] for key in self.by_key if key not in p.BROKER_API_KEYS]

    def _handle_access(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        if header.api_key == layout.API_GET_PRODUCE_ACCESS and request.topic in INTERNAL_TOPICS:
            return respond(
                header,
                p.GetProduceAccessResponse,
                error_code=ErrorCode.INVALID_TOPIC_EXCEPTION,
                error_message="the topic is the broker's own",
            )
        connection.used_access = True
        answer = self._access.handle(connection, request)
        if answer.awaited is not None:
            return later(_encoded_later(header, answer.awaited))
        return encoded(header, answer.response)


async def _encoded_later(header: p.RequestHeader, response: Awaitable[Any]) -> Answer:
    return encoded(header, await response)
