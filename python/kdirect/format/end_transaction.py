"""EndTxn, built and read by hand.  No I/O.

A producer waits for this one request at the end of each of its transactions, so its messages are
not left to the schemas' encoder, which takes longer than the broker needs to end a transaction.
Field by field these follow Kafka's EndTxnRequest.json and EndTxnResponse.json, versions 3 to 5; a
test compares them with the schemas' messages, which serve what is sent in the versions before.
Responses are read here in every version::

    request   compact string transactional id   int64 producer id   int16 producer epoch
              bool committed   tagged fields
    response  int32 throttle time   int16 error code   int64 producer id, int16 producer epoch
              (both from version 5 on)   tagged fields
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from kdirect.errors import ProtocolError
from kdirect.format.datapath import uvarint
from kdirect.format.schema import skip_tags

API_KEY = 26
FIRST_VERSION = 3  # of those that are known here: the first with compact strings and tags
GIVES_EPOCH = 5  # the version whose response has the id and the epoch of the next transaction

_HEAD = struct.Struct(">hhih")  # API key, version, correlation id, length of the client id
_PRODUCER = struct.Struct(">qh?B")  # producer id, epoch, is it a commit, number of tagged fields
# Throttle time and error code, then id and epoch; the number of tagged fields follows.
_ENDED, _ENDED_WITH_EPOCH = struct.Struct(">ih"), struct.Struct(">ihqh")
_SIZE = struct.Struct(">i")


class EndedTransaction(NamedTuple):
    """A response: an error code, and from version 5 on the id and the epoch of what follows."""

    error_code: int
    producer_id: int = -1
    producer_epoch: int = -1


def request_frame(
    version: int,
    correlation_id: int,
    client_id: str,
    transactional_id: str,
    producer_id: int,
    epoch: int,
    commit: bool,
) -> bytearray:
    """A request with its header and its length.  struct.error: a number or a text is too large."""
    client, name = client_id.encode(), transactional_id.encode()
    frame = bytearray(_SIZE.size)
    frame += _HEAD.pack(API_KEY, version, correlation_id, len(client))
    frame += client + b"\0" + uvarint(len(name) + 1) + name
    frame += _PRODUCER.pack(producer_id, epoch, commit, 0)
    _SIZE.pack_into(frame, 0, len(frame) - _SIZE.size)
    return frame


def response_body(version: int, error: int, producer_id: int, epoch: int) -> bytes:
    """A response after its header."""
    if version < GIVES_EPOCH:
        return _ENDED.pack(0, error) + b"\0"
    return _ENDED_WITH_EPOCH.pack(0, error, producer_id, epoch) + b"\0"


def read_response(version: int, payload: bytes | bytearray | memoryview) -> EndedTransaction:
    """A response of any version with its header, which is a correlation id and from
    `FIRST_VERSION` on tagged fields.  Those are ignored, and so are bytes after it, as by Kafka.
    ProtocolError: it is cut."""
    data, size, pos = memoryview(payload), len(payload), 4
    if version >= FIRST_VERSION:
        pos = skip_tags(data, pos, size)
    fields = _ENDED_WITH_EPOCH if version >= GIVES_EPOCH else _ENDED
    if size - pos < fields.size:
        raise ProtocolError(f"a response of EndTxn is cut after {size} bytes")
    _, *found = fields.unpack_from(payload, pos)
    if version >= FIRST_VERSION:
        skip_tags(data, pos + fields.size, size)
    return EndedTransaction(*found)
