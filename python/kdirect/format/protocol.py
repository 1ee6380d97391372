"""The messages of Kafka's protocol, and kdirect's own access messages.

Owns the message classes, the table of APIs with the versions that we speak, and the headers of
frames; what error codes mean is `kdirect.format.error_codes`.  This is the only file that imports
``kafka.protocol`` (kafka-python, whose version is pinned because internals are used).  It has no
sockets.  The message classes are kafka-python's, generated from Kafka's JSON schemas.  kdirect's
own messages, those for access and those between the brokers of a cluster, are schemas of the same
form in ``kdirect/format/messages``.

Traps of the library, which this file and ``kdirect.format.schema`` avoid:

- The classes report 0 as the lowest version.  The real one is in the schema's ``validVersions``.
- Request headers are parsed here, without copying the body.
- The library's decoder trusts lengths.  Bodies are decoded by a checked decoder of ours.
- A nested class with a version refuses fields that this version lacks.  Nested classes are
  therefore made without a version.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any, NamedTuple

from kafka.protocol import admin as _admin
from kafka.protocol import consumer as _consumer
from kafka.protocol import metadata as _metadata
from kafka.protocol import producer as _producer
from kafka.protocol import sasl as _sasl
from kafka.protocol.api_message import ApiMessage

import kdirect.format.messages
from kdirect.errors import ProtocolError
from kdirect.format import end_transaction, layout, schema

# -- message classes -------------------------------------------------------------------------------
ProduceRequest, ProduceResponse = _producer.ProduceRequest, _producer.ProduceResponse
FetchRequest, FetchResponse = _consumer.FetchRequest, _consumer.FetchResponse
ListOffsetsRequest, ListOffsetsResponse = (
    _consumer.ListOffsetsRequest,
    _consumer.ListOffsetsResponse,
)
MetadataRequest, MetadataResponse = _metadata.MetadataRequest, _metadata.MetadataResponse
OffsetCommitRequest, OffsetCommitResponse = (
    _consumer.OffsetCommitRequest,
    _consumer.OffsetCommitResponse,
)
OffsetFetchRequest, OffsetFetchResponse = (
    _consumer.OffsetFetchRequest,
    _consumer.OffsetFetchResponse,
)
OffsetDeleteRequest, OffsetDeleteResponse = (
    _consumer.OffsetDeleteRequest,
    _consumer.OffsetDeleteResponse,
)
FindCoordinatorRequest, FindCoordinatorResponse = (
    _metadata.FindCoordinatorRequest,
    _metadata.FindCoordinatorResponse,
)
JoinGroupRequest, JoinGroupResponse = _consumer.JoinGroupRequest, _consumer.JoinGroupResponse
SyncGroupRequest, SyncGroupResponse = _consumer.SyncGroupRequest, _consumer.SyncGroupResponse
HeartbeatRequest, HeartbeatResponse = _consumer.HeartbeatRequest, _consumer.HeartbeatResponse
LeaveGroupRequest, LeaveGroupResponse = _consumer.LeaveGroupRequest, _consumer.LeaveGroupResponse
DescribeGroupsRequest, DescribeGroupsResponse = (
    _admin.DescribeGroupsRequest,
    _admin.DescribeGroupsResponse,
)
ListGroupsRequest, ListGroupsResponse = _admin.ListGroupsRequest, _admin.ListGroupsResponse
DeleteGroupsRequest, DeleteGroupsResponse = _admin.DeleteGroupsRequest, _admin.DeleteGroupsResponse
SaslHandshakeRequest, SaslHandshakeResponse = (
    _sasl.SaslHandshakeRequest,
    _sasl.SaslHandshakeResponse,
)
SaslAuthenticateRequest, SaslAuthenticateResponse = (
    _sasl.SaslAuthenticateRequest,
    _sasl.SaslAuthenticateResponse,
)
ApiVersionsRequest, ApiVersionsResponse = (
    _metadata.ApiVersionsRequest,
    _metadata.ApiVersionsResponse,
)
CreateTopicsRequest, CreateTopicsResponse = _admin.CreateTopicsRequest, _admin.CreateTopicsResponse
DeleteTopicsRequest, DeleteTopicsResponse = _admin.DeleteTopicsRequest, _admin.DeleteTopicsResponse
DeleteRecordsRequest, DeleteRecordsResponse = (
    _admin.DeleteRecordsRequest,
    _admin.DeleteRecordsResponse,
)
InitProducerIdRequest, InitProducerIdResponse = (
    _producer.InitProducerIdRequest,
    _producer.InitProducerIdResponse,
)
OffsetForLeaderEpochRequest, OffsetForLeaderEpochResponse = (
    _consumer.OffsetForLeaderEpochRequest,
    _consumer.OffsetForLeaderEpochResponse,
)
AddPartitionsToTxnRequest, AddPartitionsToTxnResponse = (
    _producer.AddPartitionsToTxnRequest,
    _producer.AddPartitionsToTxnResponse,
)
AddOffsetsToTxnRequest, AddOffsetsToTxnResponse = (
    _producer.AddOffsetsToTxnRequest,
    _producer.AddOffsetsToTxnResponse,
)
EndTxnRequest, EndTxnResponse = _producer.EndTxnRequest, _producer.EndTxnResponse
WriteTxnMarkersRequest, WriteTxnMarkersResponse = (
    _producer.WriteTxnMarkersRequest,
    _producer.WriteTxnMarkersResponse,
)
TxnOffsetCommitRequest, TxnOffsetCommitResponse = (
    _producer.TxnOffsetCommitRequest,
    _producer.TxnOffsetCommitResponse,
)
DescribeAclsRequest, DescribeAclsResponse = _admin.DescribeAclsRequest, _admin.DescribeAclsResponse
CreateAclsRequest, CreateAclsResponse = _admin.CreateAclsRequest, _admin.CreateAclsResponse
DeleteAclsRequest, DeleteAclsResponse = _admin.DeleteAclsRequest, _admin.DeleteAclsResponse
DescribeConfigsRequest, DescribeConfigsResponse = (
    _admin.DescribeConfigsRequest,
    _admin.DescribeConfigsResponse,
)
AlterConfigsRequest, AlterConfigsResponse = _admin.AlterConfigsRequest, _admin.AlterConfigsResponse
IncrementalAlterConfigsRequest = _admin.IncrementalAlterConfigsRequest
IncrementalAlterConfigsResponse = _admin.IncrementalAlterConfigsResponse
DescribeLogDirsRequest, DescribeLogDirsResponse = (
    _admin.DescribeLogDirsRequest,
    _admin.DescribeLogDirsResponse,
)
AlterReplicaLogDirsRequest, AlterReplicaLogDirsResponse = (
    _admin.AlterReplicaLogDirsRequest,
    _admin.AlterReplicaLogDirsResponse,
)
CreatePartitionsRequest, CreatePartitionsResponse = (
    _admin.CreatePartitionsRequest,
    _admin.CreatePartitionsResponse,
)
ElectLeadersRequest, ElectLeadersResponse = _admin.ElectLeadersRequest, _admin.ElectLeadersResponse
AlterPartitionReassignmentsRequest = _admin.AlterPartitionReassignmentsRequest
AlterPartitionReassignmentsResponse = _admin.AlterPartitionReassignmentsResponse
ListPartitionReassignmentsRequest = _admin.ListPartitionReassignmentsRequest
ListPartitionReassignmentsResponse = _admin.ListPartitionReassignmentsResponse
DescribeClientQuotasRequest, DescribeClientQuotasResponse = (
    _admin.DescribeClientQuotasRequest,
    _admin.DescribeClientQuotasResponse,
)
AlterClientQuotasRequest, AlterClientQuotasResponse = (
    _admin.AlterClientQuotasRequest,
    _admin.AlterClientQuotasResponse,
)
DescribeUserScramCredentialsRequest = _admin.DescribeUserScramCredentialsRequest
DescribeUserScramCredentialsResponse = _admin.DescribeUserScramCredentialsResponse
AlterUserScramCredentialsRequest = _admin.AlterUserScramCredentialsRequest
AlterUserScramCredentialsResponse = _admin.AlterUserScramCredentialsResponse
DescribeClusterRequest, DescribeClusterResponse = (
    _admin.DescribeClusterRequest,
    _admin.DescribeClusterResponse,
)
DescribeProducersRequest, DescribeProducersResponse = (
    _admin.DescribeProducersRequest,
    _admin.DescribeProducersResponse,
)
DescribeTransactionsRequest, DescribeTransactionsResponse = (
    _admin.DescribeTransactionsRequest,
    _admin.DescribeTransactionsResponse,
)
ListTransactionsRequest, ListTransactionsResponse = (
    _admin.ListTransactionsRequest,
    _admin.ListTransactionsResponse,
)
ListConfigResourcesRequest, ListConfigResourcesResponse = (
    _admin.ListConfigResourcesRequest,
    _admin.ListConfigResourcesResponse,
)
DescribeTopicPartitionsRequest = _admin.DescribeTopicPartitionsRequest
DescribeTopicPartitionsResponse = _admin.DescribeTopicPartitionsResponse
UpdateFeaturesRequest, UpdateFeaturesResponse = (
    _admin.UpdateFeaturesRequest,
    _admin.UpdateFeaturesResponse,
)
DescribeQuorumRequest, DescribeQuorumResponse = (
    _admin.DescribeQuorumRequest,
    _admin.DescribeQuorumResponse,
)


# Kafka's own, which kafka-python lacks.
class ConsumerGroupHeartbeatRequest(ApiMessage, load_json=kdirect.format.messages):
    pass


class ConsumerGroupHeartbeatResponse(ApiMessage, load_json=kdirect.format.messages):
    pass


class ConsumerGroupDescribeRequest(ApiMessage, load_json=kdirect.format.messages):
    pass


class ConsumerGroupDescribeResponse(ApiMessage, load_json=kdirect.format.messages):
    pass


class OpenQueuePairRequest(ApiMessage, load_json=kdirect.format.messages):
    pass


class OpenQueuePairResponse(ApiMessage, load_json=kdirect.format.messages):
    pass


class GetProduceAccessRequest(ApiMessage, load_json=kdirect.format.messages):
    pass


class GetProduceAccessResponse(ApiMessage, load_json=kdirect.format.messages):
    pass


class GetConsumeAccessRequest(ApiMessage, load_json=kdirect.format.messages):
    pass


class GetConsumeAccessResponse(ApiMessage, load_json=kdirect.format.messages):
    pass


class ReleaseAccessRequest(ApiMessage, load_json=kdirect.format.messages):
    pass


class ReleaseAccessResponse(ApiMessage, load_json=kdirect.format.messages):
    pass


class GetCommitSlotRequest(ApiMessage, load_json=kdirect.format.messages):
    pass


class GetCommitSlotResponse(ApiMessage, load_json=kdirect.format.messages):
    pass


class LocateRecordsRequest(ApiMessage, load_json=kdirect.format.messages):
    pass


class LocateRecordsResponse(ApiMessage, load_json=kdirect.format.messages):
    pass


class CountRecordsRequest(ApiMessage, load_json=kdirect.format.messages):
    pass


class CountRecordsResponse(ApiMessage, load_json=kdirect.format.messages):
    pass


class EnterTransactionRequest(ApiMessage, load_json=kdirect.format.messages):
    pass


class EnterTransactionResponse(ApiMessage, load_json=kdirect.format.messages):
    pass


class JoinTransactionRequest(ApiMessage, load_json=kdirect.format.messages):
    pass


class JoinTransactionResponse(ApiMessage, load_json=kdirect.format.messages):
    pass


class CommitAttemptsRequest(ApiMessage, load_json=kdirect.format.messages):
    pass


class CommitAttemptsResponse(ApiMessage, load_json=kdirect.format.messages):
    pass


class AbortAttemptsRequest(ApiMessage, load_json=kdirect.format.messages):
    pass


class AbortAttemptsResponse(ApiMessage, load_json=kdirect.format.messages):
    pass


class CheckAttemptRequest(ApiMessage, load_json=kdirect.format.messages):
    pass


class CheckAttemptResponse(ApiMessage, load_json=kdirect.format.messages):
    pass


class AskControllerRequest(ApiMessage, load_json=kdirect.format.messages):
    pass


class AskControllerResponse(ApiMessage, load_json=kdirect.format.messages):
    pass


class WriteRemoteMetadataRequest(ApiMessage, load_json=kdirect.format.messages):
    pass


class WriteRemoteMetadataResponse(ApiMessage, load_json=kdirect.format.messages):
    pass


class FetchAsReplicaRequest(ApiMessage, load_json=kdirect.format.messages):
    pass


class FetchAsReplicaResponse(ApiMessage, load_json=kdirect.format.messages):
    pass


class EndOfEpochRequest(ApiMessage, load_json=kdirect.format.messages):
    pass


class EndOfEpochResponse(ApiMessage, load_json=kdirect.format.messages):
    pass


class OpenPushLinkRequest(ApiMessage, load_json=kdirect.format.messages):
    pass


class OpenPushLinkResponse(ApiMessage, load_json=kdirect.format.messages):
    pass


class AskPushRequest(ApiMessage, load_json=kdirect.format.messages):
    pass


class AskPushResponse(ApiMessage, load_json=kdirect.format.messages):
    pass


class GrantPushRequest(ApiMessage, load_json=kdirect.format.messages):
    pass


class GrantPushResponse(ApiMessage, load_json=kdirect.format.messages):
    pass


class AskSegmentsRequest(ApiMessage, load_json=kdirect.format.messages):
    pass


class AskSegmentsResponse(ApiMessage, load_json=kdirect.format.messages):
    pass


class OpenReadingRequest(ApiMessage, load_json=kdirect.format.messages):
    pass


class OpenReadingResponse(ApiMessage, load_json=kdirect.format.messages):
    pass


class DescribeReplicasRequest(ApiMessage, load_json=kdirect.format.messages):
    pass


class DescribeReplicasResponse(ApiMessage, load_json=kdirect.format.messages):
    pass


class EndPushRequest(ApiMessage, load_json=kdirect.format.messages):
    pass


class EndPushResponse(ApiMessage, load_json=kdirect.format.messages):
    pass


# -- registry --------------------------------------------------------------------------------------
class Api(NamedTuple):
    """One API: its message classes and the versions that we speak, `low` to `high` inclusive."""

    key: int
    name: str
    request: Any
    response: Any
    low: int
    high: int

    def flexible(self, version: int) -> bool:
        """Whether `version` has compact types and tagged fields."""
        return bool(self.request.flexible_version_q(version))


# The highest version of each API that we speak, where it is not the highest that the schemas know:
# OffsetCommit and OffsetFetch up to the last that names topics (later ones use topic ids),
# ListOffsets up to the last without tiered-storage sentinels of KIP-1023, WriteTxnMarkers,
# InitProducerId and DescribeLogDirs up to Kafka 4.1's.
_HIGHEST = {
    "ListOffsets": 10,
    "OffsetCommit": 9,
    "OffsetFetch": 9,
    "WriteTxnMarkers": 1,
    "InitProducerId": 5,
    "DescribeLogDirs": 4,
}
# librdkafka before 2.11.1 stops compressing when Produce starts at 3 (KAFKA-18659), so 0 is
# offered, as Kafka does; versions 0-2 carry formats before record batch v2 and are answered with
# UNSUPPORTED_FOR_MESSAGE_FORMAT.
_LOWEST = {"Produce": 0}


def _api(request: Any, response: Any) -> Api:
    name = request.name.removesuffix("Request")
    low, high = (
        int(v)
        for v in (request.json["validVersions"] + "-" + request.json["validVersions"]).split("-")[
            :2
        ]
    )
    return Api(
        request.API_KEY, name, request, response, _LOWEST.get(name, low), _HIGHEST.get(name, high)
    )


def by_key(apis: Iterable[Api]) -> dict[int, Api]:
    """APIs by their keys.  ValueError: two of them have the same one."""
    found: dict[int, Api] = {}
    for api in apis:
        other = found.setdefault(api.key, api)
        if other is not api:
            raise ValueError(f"{other.name} and {api.name} both have the key {api.key}")
    return found


APIS: dict[int, Api] = by_key(
    _api(value, globals()[name.removesuffix("Request") + "Response"])
    for name, value in list(globals().items())
    if name.endswith("Request") and isinstance(value, type) and value is not ApiMessage
)
API_NAMES: dict[str, Api] = {api.name: api for api in APIS.values()}

API_VERSIONS = ApiVersionsRequest.API_KEY
# What brokers of a cluster ask one another, which no client is told of.
REPLICA_API_KEYS = frozenset(
    message.API_KEY
    for message in (
        FetchAsReplicaRequest,
        EndOfEpochRequest,
        OpenPushLinkRequest,
        AskPushRequest,
        GrantPushRequest,
        AskSegmentsRequest,
        OpenReadingRequest,
        EndPushRequest,
    )
)
BROKER_API_KEYS = REPLICA_API_KEYS | {
    AskControllerRequest.API_KEY,
    WriteRemoteMetadataRequest.API_KEY,
}
_OWN_API_KEYS = frozenset(v for name, v in vars(layout).items() if name.startswith("API_"))
ACCESS_API_KEYS = _OWN_API_KEYS - {layout.API_LOCATE_RECORDS, layout.API_GET_COMMIT_SLOT}

if _OWN_API_KEYS - set(APIS):
    raise AssertionError("protocol: an access API key differs between layout.py and its schema")

# -- headers ---------------------------------------------------------------------------------------
_REQUEST_HEAD = struct.Struct(">hhih")
_CORRELATION = struct.Struct(">i")
_UNSUPPORTED_VERSION = struct.pack(">h", 35)


class RequestHeader(NamedTuple):
    """The header of a request.  `body` is the index of the body's first byte in the frame; `api` is
    None for an unknown key."""

    api_key: int
    api_version: int
    correlation_id: int
    client_id: str | None
    body: int
    api: Api | None


def parse_request_header(frame: memoryview) -> RequestHeader:
    """The header of a request frame (without its size prefix).  If the API is known but not the
    version, `body` of the result is meaningless.  Raises ProtocolError if the bytes are not a
    header."""
    end = len(frame)
    if end < 10:
        raise ProtocolError(f"request of {end} bytes is shorter than a request header")
    api_key, version, correlation_id, n = _REQUEST_HEAD.unpack_from(frame)
    pos = 10
    client_id = None
    if n >= 0:
        if n > end - pos:
            raise ProtocolError(f"client id of {n} bytes in a request of {end} bytes")
        try:
            client_id = str(frame[pos : pos + n], "utf-8")
        except UnicodeDecodeError as e:
            raise ProtocolError("client id is not UTF-8") from e
        pos += n
    elif n != -1:
        raise ProtocolError(f"client id has length {n}")
    api = APIS.get(api_key)
    if api is not None and api.low <= version <= api.high and api.flexible(version):
        pos = schema.skip_tags(frame, pos, end)
    return RequestHeader(api_key, version, correlation_id, client_id, pos, api)


def decode_request(header: RequestHeader, frame: memoryview) -> Any:
    """The body of a request.  Raises ProtocolError if we do not speak its version or it is
    malformed.  Fields of type records are views of `frame`."""
    api = header.api
    if api is None or not api.low <= header.api_version <= api.high:
        raise ProtocolError(
            f"request with API key {header.api_key} version {header.api_version} is not supported"
        )
    return schema.decode(api.request, header.api_version, frame, header.body)


def response_header(api: Api, version: int, correlation_id: int) -> bytes:
    """The bytes of a response's header.  That of ApiVersions is never flexible, because a client
    reads it before versions are agreed."""
    if api.key != API_VERSIONS and api.flexible(version):
        return _CORRELATION.pack(correlation_id) + b"\0"
    return _CORRELATION.pack(correlation_id)


# -- the client's side of a message ----------------------------------------------------------------
def version_range(message: Any) -> tuple[int, int]:
    """(lowest, highest) version of a request, given as class or object, that this build speaks."""
    api = APIS[message.API_KEY]
    return api.low, api.high


class EndTransaction:
    """EndTxn as a client sends it: encoded by hand where the version allows it
    (`kdirect.format.end_transaction`)."""

    API_KEY = EndTxnRequest.API_KEY
    name = "EndTxnRequest"

    __slots__ = ("commit", "epoch", "producer_id", "transactional_id")

    def __init__(self, transactional_id: str, producer_id: int, epoch: int, commit: bool) -> None:
        self.transactional_id = transactional_id
        self.producer_id = producer_id
        self.epoch = epoch
        self.commit = commit

    def expect_response(self) -> bool:
        return True

    def frame(self, version: int, correlation_id: int, client_id: str) -> bytearray:
        """See `encode_request`."""
        name, producer_id, epoch = self.transactional_id, self.producer_id, self.epoch
        if version >= end_transaction.FIRST_VERSION:
            return end_transaction.request_frame(
                version, correlation_id, client_id, name, producer_id, epoch, self.commit
            )
        message = EndTxnRequest(
            transactional_id=name,
            producer_id=producer_id,
            producer_epoch=epoch,
            committed=self.commit,
        )
        return encode_request(message, version, correlation_id, client_id)


def encode_request(message: Any, version: int, correlation_id: int, client_id: str) -> bytearray:
    """The frame of a request, with its length prefix."""
    if message.__class__ is EndTransaction:
        return message.frame(version, correlation_id, client_id)  # type: ignore[no-any-return]
    message.API_VERSION = version
    message.with_header(correlation_id, client_id)
    return message.encode(version=version, header=True, framed=True)


def decode_response(
    api_key: int, version: int, payload: bytes | bytearray | memoryview
) -> tuple[int, Any]:
    """``(correlation id, response)`` of a frame without its length prefix.

    Raises ProtocolError if it is malformed.  Fields of type records are views of `payload`.
    """
    if api_key == end_transaction.API_KEY:
        ended = end_transaction.read_response(version, payload)
        return _CORRELATION.unpack_from(payload)[0], ended
    return decode_by_schema(api_key, version, payload)


def decode_by_schema(
    api_key: int, version: int, payload: bytes | bytearray | memoryview
) -> tuple[int, Any]:
    """The same with every field that the schema has, whatever API it is of."""
    api = APIS[api_key]
    frame = memoryview(payload)
    if len(frame) < 4:
        raise ProtocolError(f"response of {len(frame)} bytes is shorter than a response header")
    correlation_id = _CORRELATION.unpack_from(frame)[0]
    pos = 4
    if api_key == API_VERSIONS:
        # A broker that does not speak the version says so in version 0.
        if frame[4:6] == _UNSUPPORTED_VERSION:
            version = 0
    elif api.flexible(version):
        pos = schema.skip_tags(frame, pos, len(frame))
    return correlation_id, schema.decode(api.response, version, frame, pos)
