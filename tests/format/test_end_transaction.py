"""EndTxn by hand, beside the messages of the schemas."""

from __future__ import annotations

import struct

import pytest

from kdirect.format import end_transaction
from kdirect.format import protocol as p
from kdirect.format.schema import build

NAMES = ("", "copy-1", "ü" * 100, "x" * 32767)


@pytest.mark.parametrize("version", range(6))
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("commit", [True, False])
def test_a_request_is_that_of_the_schema(version: int, name: str, commit: bool) -> None:
    ours = p.EndTransaction(name, (1 << 62) + 3, 32766, commit)
    theirs = p.EndTxnRequest(
        transactional_id=name,
        producer_id=(1 << 62) + 3,
        producer_epoch=32766,
        committed=commit,
    )
    frame = p.encode_request(ours, version, 77, "client")
    assert bytes(frame) == bytes(p.encode_request(theirs, version, 77, "client"))
    body = memoryview(bytes(frame))[4:]
    header = p.parse_request_header(body)
    read = p.decode_request(header, body)
    assert (header.correlation_id, header.client_id) == (77, "client")
    assert (read.transactional_id, read.producer_id) == (name, (1 << 62) + 3)
    assert (read.producer_epoch, read.committed) == (32766, commit)


@pytest.mark.parametrize("version", range(6))
@pytest.mark.parametrize("code", [0, 51, -1])
def test_a_response_is_that_of_the_schema(version: int, code: int) -> None:
    api = p.APIS[p.EndTxnRequest.API_KEY]
    message = build(p.EndTxnResponse, error_code=code, producer_id=1 << 62, producer_epoch=9)
    theirs = bytes(message.encode(version=version))
    given = version >= end_transaction.GIVES_EPOCH
    if version >= end_transaction.FIRST_VERSION:
        assert end_transaction.response_body(version, code, 1 << 62, 9) == theirs
    payload = p.response_header(api, version, 12) + theirs
    correlation_id, read = p.decode_response(api.key, version, payload)
    assert (correlation_id, read.error_code) == (12, code)
    assert not given or (read.producer_id, read.producer_epoch) == (1 << 62, 9)


def test_tagged_fields_of_a_response_are_passed_over_and_one_that_is_cut_is_refused() -> None:
    body = end_transaction.response_body(5, 3, 8, 1)
    correlation = struct.pack(">i", 12)
    tagged = correlation + b"\1\7\1x" + body  # a tagged field in the header
    assert p.decode_response(end_transaction.API_KEY, 5, tagged) == (12, (3, 8, 1))
    more = correlation + b"\0" + body[:-1] + b"\1\7\1x"  # one in the body
    assert p.decode_response(end_transaction.API_KEY, 5, more) == (12, (3, 8, 1))
    for version in (2, 3, 5):
        message = build(p.EndTxnResponse, error_code=3, producer_id=8, producer_epoch=1)
        header = p.response_header(p.APIS[end_transaction.API_KEY], version, 12)
        whole = header + bytes(message.encode(version=version))
        for cut in range(len(whole)):
            with pytest.raises(p.ProtocolError):
                p.decode_response(end_transaction.API_KEY, version, whole[:cut])
