"""The Kafka protocol's messages, and kdirect's own access messages beside them.

The only file that imports ``kafka.protocol`` (kafka-python, pinned exactly: internals are used).  It
holds no sockets.  Message classes are kafka-python's, generated from Kafka's JSON schemas;
kdirect's four access messages are schemas of the same form in ``kdirect/format/messages``.

Traps of the library, handled here: minimum versions come from ``_json['validVersions']``, because
the classes pretend 0; request headers are parsed here without copying the body.
"""

# ruff: noqa: F401  the imported classes are this module's exports
from __future__ import annotations

import struct
from typing import Any, NamedTuple

from kafka.errors import kafka_errors
from kafka.protocol.admin import (
    AlterConfigsRequest,
    CreatePartitionsRequest,
    CreateTopicsRequest,
    DeleteRecordsRequest,
    DeleteTopicsRequest,
    DescribeConfigsRequest,
    IncrementalAlterConfigsRequest,
    ListGroupsRequest,
)
from kafka.protocol.api_header import ResponseClassRegistry
from kafka.protocol.api_message import ApiMessage
from kafka.protocol.consumer import FetchRequest, ListOffsetsRequest, OffsetCommitRequest, OffsetFetchRequest
from kafka.protocol.metadata import ApiVersionsRequest, FindCoordinatorRequest, MetadataRequest
from kafka.protocol.producer import ProduceRequest

import kdirect.format.messages
from kdirect.errors import ProtocolError


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


# -- error codes -------------------------------------------------------------------------------------------


class ErrorKind(NamedTuple):
    """What an error code means.  `stale`: the leader or coordinator moved; refresh metadata before the next attempt."""

    name: str
    retriable: bool
    stale: bool
    description: str


# kafka-python keeps some names that Kafka has renamed since.
_RENAMED = {-1: "UNKNOWN_SERVER_ERROR", 0: "NONE", 6: "NOT_LEADER_OR_FOLLOWER", 10: "MESSAGE_TOO_LARGE", 17: "INVALID_TOPIC_EXCEPTION"}

ERRORS: dict[int, ErrorKind] = {
    code: ErrorKind(_RENAMED.get(code, kind.message), bool(kind.retriable), bool(kind.invalid_metadata) or code in (16, 41), kind.description or "")
    for code, kind in kafka_errors.items() if code is not None
}


def error_kind(code: int) -> ErrorKind:
    """The row of `code`; a code that this build does not know is named by its number and is not retriable."""
    return ERRORS.get(code) or ErrorKind(f"ERROR_{code}", False, False, "an error code of a newer broker")


# -- the client's side of a message --------------------------------------------------------------------------


def version_range(message: type[ApiMessage] | ApiMessage) -> tuple[int, int]:
    """Lowest and highest version of `message` that this build speaks."""
    low, _, high = message._json["validVersions"].partition("-")
    return int(low), int(high or low)


def encode_request(message: ApiMessage, version: int, correlation_id: int, client_id: str) -> bytearray:
    """The frame of a request, length prefix included."""
    message.API_VERSION = version
    message.with_header(correlation_id, client_id)
    return message.encode(version=version, header=True, framed=True)


def decode_response(api_key: int, version: int, payload: bytes | bytearray) -> tuple[int, Any]:
    """``(correlation id, response)`` of a frame without its length prefix; ProtocolError when it is malformed.

    kafka-python slices without a look at the end of the bytes, so the position after the body tells a
    truncated response from a whole one.
    """
    response_class = ResponseClassRegistry._response_class_registry[api_key]
    view = memoryview(payload)
    try:
        correlation_id, position = struct.unpack_from(">i", view, 0)[0], 4
        if api_key == ApiVersionsRequest.API_KEY:  # its header is never flexible; an error has the body of version 0
            if struct.unpack_from(">h", view, position)[0] != 0:
                version = 0
        elif response_class.flexible_version_q(version):
            position = _skip_tagged_fields(view, position)
        flexible = response_class.flexible_version_q(version)
        decode = response_class._struct.compiled_decode_from(version, compact=flexible, tagged=flexible, data_class=response_class[None])
        response, end = decode(view, position)
    except Exception as e:  # the library raises whatever its slicing runs into
        raise ProtocolError(f"a malformed response ({type(e).__name__}: {e}) to {response_class.__name__} version {version}") from e
    if end > len(view):
        raise ProtocolError(f"a truncated response to {response_class.__name__} version {version}: {len(view)} bytes of {end}")
    return correlation_id, response


def _skip_tagged_fields(view: memoryview, position: int) -> int:
    count, position = _unsigned_varint(view, position)
    for _ in range(count):
        _, position = _unsigned_varint(view, position)
        size, position = _unsigned_varint(view, position)
        position += size
    return position


def _unsigned_varint(view: memoryview, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 35, 7):
        byte = view[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ValueError("a varint of more than 5 bytes")
