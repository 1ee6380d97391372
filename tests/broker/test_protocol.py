"""Decoding: what the library encodes we read as it does; any other bytes are a declared error."""

from __future__ import annotations

import random
import re
import struct
import uuid
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdirect.errors import FormatError, ProtocolError
from kdirect.format import group_records as g
from kdirect.format import protocol as p
from kdirect.format import schema
from kdirect.format.datapath import (
    Fetched,
    NodeEndpoint,
    Produced,
    fetch_response,
    produce_response,
)
from tests.broker.random_messages import message_bytes

VERSIONS = [(api, version) for api in p.APIS.values() for version in range(api.low, api.high + 1)]


@pytest.mark.parametrize("api", p.APIS.values(), ids=lambda a: a.name)
def test_we_read_what_the_library_reads(api, seed):
    rng = random.Random(seed)
    for version in range(api.low, api.high + 1):
        for cls in (api.request, api.response):
            for _ in range(3):
                data = message_bytes(cls, version, rng)
                ours, end = schema.decoder(cls, version)(memoryview(data), 0, len(data))
                assert end == len(data)
                flexible = cls.flexible_version_q(version)
                decode = cls._struct.compiled_decode_from(
                    version, compact=flexible, tagged=flexible, data_class=cls
                )
                theirs, _ = decode(memoryview(data), 0)
                assert ours.to_dict() == theirs.to_dict()


@pytest.mark.parametrize("api", p.APIS.values(), ids=lambda a: a.name)
def test_every_truncation_is_declared(api, seed):
    rng = random.Random(seed)
    version = rng.randint(api.low, api.high)
    data = message_bytes(api.request, version, rng)
    for cut in range(len(data)):
        with pytest.raises(ProtocolError):
            schema.decode(api.request, version, memoryview(data[:cut]))


def test_two_apis_with_one_key_are_refused():
    found = p.API_NAMES["Fetch"]
    assert p.by_key([found, p.API_NAMES["Produce"]])[found.key] is found
    with pytest.raises(ValueError, match="Fetch and Other both have the key 1"):
        p.by_key([found, found._replace(name="Other")])


def test_the_documented_versions_are_those_served():
    text = (Path(__file__).resolve().parents[2] / "docs" / "broker.md").read_text()
    rows = re.findall(r"^\| (\w+) \| (\d+) \| (\d+)(?:-(\d+))? \|$", text, re.M)
    assert {(n, int(k), int(low), int(high or low)) for n, k, low, high in rows} == {
        (a.name, a.key, a.low, a.high) for a in p.APIS.values() if a.key not in p.BROKER_API_KEYS
    }


@given(st.sampled_from(VERSIONS), st.binary(max_size=400))
def test_any_body_is_a_message_or_a_declared_error(which, data):
    api, version = which
    for cls in (api.request, api.response):
        try:
            schema.decode(cls, version, memoryview(data))
        except ProtocolError:
            pass


@given(
    st.sampled_from(VERSIONS),
    st.randoms(use_true_random=False),
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=5),
)
def test_damaged_messages_are_messages_or_declared_errors(which, rng, damage):
    api, version = which
    data = bytearray(message_bytes(api.request, version, rng))
    for at, value in damage:
        if data:
            data[at % len(data)] = value
    try:
        schema.decode(api.request, version, memoryview(data))
    except ProtocolError:
        pass


@given(st.binary(max_size=100))
def test_any_header_is_a_header_or_a_declared_error(data):
    try:
        header = p.parse_request_header(memoryview(data))
    except ProtocolError:
        return
    assert 10 <= header.body <= len(data)
    try:
        p.decode_request(header, memoryview(data))
    except ProtocolError:
        pass


def test_a_varint_without_end_is_refused_at_once():
    """The library would build an integer of as many bits as there are bytes."""
    api = p.API_NAMES["Metadata"]
    with pytest.raises(ProtocolError, match="32 bits"):
        schema.decode(api.request, 12, memoryview(b"\xff" * (1 << 20)))


def test_counts_are_compared_with_the_bytes_left():
    with pytest.raises(ProtocolError, match="bytes are left"):
        schema.decode(p.MetadataRequest, 4, memoryview(struct.pack(">i", 2**31 - 1) + b"x" * 10))


def test_null_is_refused_where_the_schema_has_none():
    with pytest.raises(ProtocolError, match="null"):
        schema.decode(p.CreateTopicsRequest, 2, memoryview(struct.pack(">i", -1) + b"\0" * 10))


def test_records_are_views_everything_else_is_copied():
    row = {"name": "t", "partition_data": [{"index": 0, "records": b"abc"}]}
    message = schema.build(
        p.ProduceRequest, transactional_id=None, acks=1, timeout_ms=1, topic_data=[row]
    )
    data = bytearray(message.encode(version=9))
    decoded = schema.decode(p.ProduceRequest, 9, memoryview(data))
    records = decoded.topic_data[0].partition_data[0].records
    assert isinstance(records, memoryview) and records.obj is data and bytes(records) == b"abc"
    assert isinstance(decoded.topic_data[0].name, str)


def test_build_refuses_names_that_the_schema_lacks():
    with pytest.raises(AttributeError, match="no field colour"):
        schema.build(p.MetadataResponse, brokers=[{"colour": 1}])


def test_the_data_path_responses_are_what_the_schema_says():
    fetched = [
        Fetched(3, 0, 100, 90, 5, [b"abc", memoryview(b"def")], 6),
        Fetched(4, 1, -1, -1, -1, [], 0),
        Fetched(5, 6, -1, -1, -1, [], 0, diverging=(3, 9), leader=(2, 8)),
    ]
    nodes = [NodeEndpoint(2, "host", 9092, "r")]
    for version in range(4, p.API_NAMES["Fetch"].high + 1):
        names = ["t", "u" * 200] if version < 13 else [uuid.UUID(int=1), uuid.UUID(int=2)]
        topics = [(x if version < 13 else x.bytes, fetched) for x in names]
        body = b"".join(fetch_response(version, 0, topics, session_id=7, nodes=nodes))
        message, end = schema.decoder(p.FetchResponse, version)(memoryview(body), 0, len(body))
        named = [t.topic if version < 13 else t.topic_id for t in message.responses]
        assert end == len(body) and named == names
        assert version < 7 or message.session_id == 7
        one, two, moved = message.responses[1].partitions
        if version >= 12:
            assert moved.diverging_epoch.end_offset == 9 and one.diverging_epoch is None
            leader = moved.current_leader
            assert version < 16 or (leader.leader_id, leader.leader_epoch) == (2, 8)
            assert version >= 16 or leader is None
            assert one.current_leader is None
        found = [(n.node_id, n.host, n.port, n.rack) for n in message.node_endpoints or ()]
        assert found == ([tuple(nodes[0])] if version >= 16 else [])
        assert (
            one.partition_index,
            one.high_watermark,
            one.last_stable_offset,
            bytes(one.records),
        ) == (3, 100, 90, b"abcdef")
        assert (two.partition_index, two.error_code, bytes(two.records)) == (4, 1, b"")
    produced = [Produced(1, 0, 7, -1, 2, None), Produced(2, 3, -1, -1, -1, "x" * 200)]
    produced[1] = produced[1]._replace(record_errors=[(3, "why"), (200, "z" * 200)])
    for version in range(p.API_NAMES["Produce"].high + 1):
        ids = [uuid.UUID(int=1), uuid.UUID(int=2)]
        keys = ["t", "u"] if version < 13 else [x.bytes for x in ids]
        body = produce_response(version, [(key, produced) for key in keys])
        message, end = schema.decoder(p.ProduceResponse, version)(memoryview(body), 0, len(body))
        assert end == len(body)
        named = [t.name if version < 13 else t.topic_id for t in message.responses]
        assert named == (["t", "u"] if version < 13 else ids)
        one, two = message.responses[1].partition_responses
        assert (one.index, one.error_code, one.base_offset, two.error_code) == (1, 0, 7, 3)
        if version >= 8:
            assert two.error_message == "x" * 200 and one.error_message is None
            found = [(e.batch_index, e.batch_index_error_message) for e in two.record_errors]
            assert found == [(3, "why"), (200, "z" * 200)] and one.record_errors == []


names = st.text(max_size=40)


@given(
    names,
    names,
    st.integers(0, 2**31 - 1),
    st.integers(-1, 2**63 - 1),
    names,
    st.integers(0, 2**62),
)
def test_offset_records(group, topic, partition, offset, metadata, when):
    committed = g.CommittedOffset(offset, 3, metadata, when)
    assert g.parse_key(g.offset_key(group, topic, partition)) == (group, topic, partition)
    assert g.parse_offset_value(g.offset_value(committed)) == committed


members = st.builds(
    g.MemberRecord,
    names,
    st.none() | names,
    names,
    names,
    st.integers(0, 2**31 - 1),
    st.integers(0, 2**31 - 1),
    st.binary(max_size=50),
    st.binary(max_size=50),
)


@given(
    st.builds(
        g.GroupRecord,
        names,
        st.integers(0, 2**31 - 1),
        st.none() | names,
        st.none() | names,
        st.integers(0, 2**62),
        st.tuples(members, members),
    )
)
def test_group_records(record):
    assert g.parse_group_value(g.group_value(record)) == record
    assert g.parse_key(g.group_key("g")) == "g"


def test_a_text_that_no_group_record_can_hold_is_a_declared_error():
    most, more = "ü" * 16383 + "u", "ü" * 16384
    assert g.parse_key(g.offset_key(most, "t", 0)) == (most, "t", 0)
    for pack in (
        lambda: g.group_key(more),
        lambda: g.offset_key("g", more, 0),
        lambda: g.offset_value(g.CommittedOffset(1, 1, more, 1)),
    ):
        with pytest.raises(FormatError, match="32768 bytes"):
            pack()


@given(st.binary(max_size=120))
def test_any_group_record_is_one_or_a_declared_error(data):
    for parse in (g.parse_key, g.parse_offset_value, g.parse_group_value, g.subscribed_topics):
        try:
            parse(data)
        except FormatError:
            pass


def test_the_partition_of_a_group_is_kafkas():
    # Java's hash codes of these are -2147483648, -1268878963, 97 and 3105.
    assert g.partition_of("polygenelubricants", 50) == 0
    assert g.partition_of("foobar", 50) == 1268878963 % 50
    assert g.partition_of("a", 50) == 97 % 50
    assert g.partition_of("ab", 50) == (97 * 31 + 98) % 50
