"""Requests for what this broker does not have: ACLs, SASL, quotas, credentials,
reassignments.

Each is answered with the error code that says so.  If the connection were closed instead, clients
would retry without end when the broker advertises the request or they cannot do without it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kdirect.broker.answers import Answer, respond
from kdirect.broker.connection import Connection
from kdirect.broker.services import Services
from kdirect.format import protocol as p
from kdirect.format.error_codes import ErrorCode
from kdirect.log.kernel_producers import known_producers
from kdirect.log.partition import Partition
from kdirect.model import TopicPartition

NO_SECURITY = "this broker has no authentication and no ACLs"
NO_QUOTAS = "this broker has no quotas"
_ENTITIES = ("user", "client-id", "ip")
NO_REASSIGNMENT = "a partition has one replica here, and cannot move"


def _producers(partition: Partition) -> list[dict[str, int]]:
    return [
        {
            "producer_id": e.producer_id,
            "producer_epoch": e.producer_epoch,
            "last_sequence": e.batches[-1][1] if e.batches else -1,
            "last_timestamp": e.timestamp_ms,
            "coordinator_epoch": e.coordinator_epoch,
            "current_txn_start_offset": e.transaction_start,
        }
        for e in known_producers(partition.kernel)[0]
    ]


class RefusedHandlers:
    """Handlers that refuse.  A broker has one, used on its event loop."""

    def __init__(self, services: Services) -> None:
        self._logs = services.logs
        self._cluster = services.cluster

    # -- producers ---------------------------------------------------------------------------------

    def describe_producers(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        """What the logs here remember of producers, and their open transactions."""
        topics = []
        for t in request.topics:
            rows = []
            for i in t.partition_indexes:
                partition = self._logs.partitions.get(TopicPartition(t.name, i))
                code = ErrorCode.NONE if partition else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                rows.append(
                    {
                        "partition_index": i,
                        "error_code": code,
                        "error_message": None,
                        "active_producers": _producers(partition) if partition else [],
                    }
                )
            topics.append({"name": t.name, "partitions": rows})
        return respond(header, p.DescribeProducersResponse, topics=topics)

    # -- security ----------------------------------------------------------------------------------

    def sasl_handshake(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        return respond(
            header, p.SaslHandshakeResponse, error_code=ErrorCode.ILLEGAL_SASL_STATE, mechanisms=[]
        )

    def sasl_authenticate(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        return respond(
            header,
            p.SaslAuthenticateResponse,
            error_code=ErrorCode.ILLEGAL_SASL_STATE,
            error_message=NO_SECURITY,
            auth_bytes=b"",
        )

    def describe_acls(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        return respond(
            header,
            p.DescribeAclsResponse,
            error_code=ErrorCode.SECURITY_DISABLED,
            error_message=NO_SECURITY,
            resources=[],
        )

    def create_acls(self, connection: Connection, header: p.RequestHeader, request: Any) -> Answer:
        rows = [
            {"error_code": ErrorCode.SECURITY_DISABLED, "error_message": NO_SECURITY}
            for _ in request.creations
        ]
        return respond(header, p.CreateAclsResponse, results=rows)

    def delete_acls(self, connection: Connection, header: p.RequestHeader, request: Any) -> Answer:
        rows = [
            {
                "error_code": ErrorCode.SECURITY_DISABLED,
                "error_message": NO_SECURITY,
                "matching_acls": [],
            }
            for _ in request.filters
        ]
        return respond(header, p.DeleteAclsResponse, filter_results=rows)

    def describe_scram(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        rows = [
            {
                "user": u.name,
                "error_code": ErrorCode.RESOURCE_NOT_FOUND,
                "error_message": NO_SECURITY,
                "credential_infos": [],
            }
            for u in request.users or []
        ]
        return respond(
            header,
            p.DescribeUserScramCredentialsResponse,
            error_code=0,
            error_message="",
            results=rows,
        )

    def alter_scram(self, connection: Connection, header: p.RequestHeader, request: Any) -> Answer:
        users = dict.fromkeys(
            [*(d.name for d in request.deletions), *(u.name for u in request.upsertions)]
        )
        rows = [
            {"user": u, "error_code": ErrorCode.SECURITY_DISABLED, "error_message": NO_SECURITY}
            for u in users
        ]
        return respond(header, p.AlterUserScramCredentialsResponse, results=rows)

    # -- quotas and reassignments ------------------------------------------------------------------

    def describe_quotas(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        strange = [c.entity_type for c in request.components if c.entity_type not in _ENTITIES]
        code: int = 0
        text = ""
        entries: list[Any] | None = []
        if strange:
            code, text, entries = (
                ErrorCode.UNSUPPORTED_VERSION,
                f"Custom entity type '{strange[0]}' not supported",
                None,
            )
        return respond(
            header,
            p.DescribeClientQuotasResponse,
            error_code=code,
            error_message=text,
            entries=entries,
        )

    def alter_quotas(self, connection: Connection, header: p.RequestHeader, request: Any) -> Answer:
        rows = [
            {
                "error_code": ErrorCode.INVALID_REQUEST,
                "error_message": NO_QUOTAS,
                "entity": [
                    {"entity_type": x.entity_type, "entity_name": x.entity_name} for x in e.entity
                ],
            }
            for e in request.entries
        ]
        return respond(header, p.AlterClientQuotasResponse, entries=rows)

    def alter_reassignments(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        me = [self._cluster.node_id]
        topics = []
        for t in request.topics:
            rows = []
            for x in t.partitions:
                code, message = ErrorCode.INVALID_REPLICA_ASSIGNMENT, NO_REASSIGNMENT
                if TopicPartition(t.name, x.partition_index) not in self._logs.partitions:
                    code, message = (
                        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
                        "there is no such partition",
                    )
                elif x.replicas is None:
                    code, message = ErrorCode.NO_REASSIGNMENT_IN_PROGRESS, NO_REASSIGNMENT
                elif x.replicas == me:
                    code, message = ErrorCode.NONE, ""
                rows.append(
                    {
                        "partition_index": x.partition_index,
                        "error_code": code,
                        "error_message": message or None,
                    }
                )
            topics.append({"name": t.name, "partitions": rows})
        return respond(
            header,
            p.AlterPartitionReassignmentsResponse,
            error_code=0,
            error_message=None,
            responses=topics,
        )

    def list_reassignments(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        return respond(
            header,
            p.ListPartitionReassignmentsResponse,
            error_code=0,
            error_message=None,
            topics=[],
        )

    def table(self) -> Iterable[tuple[str, Any, bool]]:
        return (
            ("DescribeProducers", self.describe_producers, True),
            ("SaslHandshake", self.sasl_handshake, True),
            ("SaslAuthenticate", self.sasl_authenticate, True),
            ("DescribeAcls", self.describe_acls, True),
            ("CreateAcls", self.create_acls, True),
            ("DeleteAcls", self.delete_acls, True),
            ("DescribeUserScramCredentials", self.describe_scram, True),
            ("AlterUserScramCredentials", self.alter_scram, True),
            ("DescribeClientQuotas", self.describe_quotas, True),
            ("AlterClientQuotas", self.alter_quotas, True),
            ("AlterPartitionReassignments", self.alter_reassignments, True),
            ("ListPartitionReassignments", self.list_reassignments, True),
        )
