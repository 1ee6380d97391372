"""The server, frame by frame: answers of the right shape in the right order, and what it does with
everything else."""

from __future__ import annotations

import logging
import os
import random
import socket
import struct
import subprocess
import sys
import threading
import time

import pytest

import kdirect
from kdirect import metrics
from kdirect.broker.connection import BLOCKED_BYTES
from kdirect.format import layout
from kdirect.format import protocol as p
from kdirect.format.batch import encode_single_bytes
from kdirect.format.error_codes import ErrorCode as E
from kdirect.format.record_list import encode_records
from kdirect.format.schema import build
from kdirect.log.partition import Partition

SERVED = [
    api
    for api in p.APIS.values()
    if api.key not in p.BROKER_API_KEYS and api.key != layout.API_LOCATE_RECORDS  # without tiers
]


def create(connection, name="t", partitions=1, **configs):
    topic = {"name": name, "num_partitions": partitions, "replication_factor": 1, "assignments": [],
             "configs": [{"name": k.replace("_", "."), "value": str(v)}
                         for k, v in configs.items()]}  # fmt: skip
    answer = connection.call(build(p.CreateTopicsRequest, topics=[topic], timeout_ms=1000), 5)
    assert answer.topics[0].error_code == 0, answer.topics[0].error_message


def produce(records, topic="t", partition=0, acks=-1, transactional_id=None):
    return build(p.ProduceRequest, transactional_id=transactional_id, acks=acks, timeout_ms=1000,
                 topic_data=[{"name": topic,
                              "partition_data": [{"index": partition, "records": records}]}]
                 )  # fmt: skip


def fetch(
    offset=0,
    topic="t",
    partition=0,
    max_wait_ms=0,
    min_bytes=1,
    max_bytes=1 << 20,
    partition_max_bytes=1 << 20,
    epoch=-1,
    session_id=0,
    session_epoch=-1,
):
    part = {"partition": partition, "current_leader_epoch": epoch, "fetch_offset": offset,
            "partition_max_bytes": partition_max_bytes,
            "log_start_offset": -1, "last_fetched_epoch": -1}  # fmt: skip
    return build(p.FetchRequest, replica_id=-1, max_wait_ms=max_wait_ms, min_bytes=min_bytes,
                 max_bytes=max_bytes, isolation_level=0,
                 session_id=session_id, session_epoch=session_epoch,
                 topics=[{"topic": topic, "partitions": [part]}],
                 forgotten_topics_data=[], rack_id="")  # fmt: skip


JOIN = {"group_id": "g", "session_timeout_ms": 10000, "rebalance_timeout_ms": 60000,
        "group_instance_id": None, "protocol_type": "consumer",
        "protocols": [{"name": "range", "metadata": b"m"}]}  # fmt: skip


def appended(answer):
    one = answer.responses[0].partition_responses[0]
    assert one.error_code == 0, one.error_code
    return one.base_offset


def fetched(answer):
    return answer.responses[0].partitions[0]


# -- every API -------------------------------------------------------------------------------------
def sample(fields, version, nulls, text):
    """A request with one element in each array, or with null where null may be."""
    values = {
        "bool": False,
        "float64": 0.0,
        "bytes": b"",
        "records": b"",
        "uuid": None,
        "string": text,
    }
    out = {}
    for f in fields:
        if not f.for_version_q(version) or f._tag is not None:
            continue
        if nulls and f.nullable_for_version_q(version):
            out[f.name] = None
        elif f.is_struct_array():
            out[f.name] = [sample(f.array_of._fields, version, nulls, text)]
        elif f.is_array():
            out[f.name] = [values.get(f.array_of._type_str, 0)]
        elif f.is_struct():
            out[f.name] = sample(f._fields, version, nulls, text)
        else:
            out[f.name] = values.get(f._type_str, 0)
    return out


@pytest.mark.parametrize("text", ["", "nothing", "t"])
@pytest.mark.parametrize("nulls", [False, True], ids=["filled", "nulls"])
def test_every_version_of_every_api_is_answered_in_its_shape(broker, raw, nulls, text, caplog):
    connection = raw()
    create(connection)
    caplog.set_level(logging.WARNING, logger="kdirect")
    advertised = {
        a.api_key: (a.min_version, a.max_version)
        for a in connection.call(build(p.ApiVersionsRequest), 0).api_keys
    }
    assert advertised == {a.key: (a.low, a.high) for a in SERVED}
    for api in SERVED:
        for version in range(api.low, api.high + 1):
            fields = sample(api.request._struct._fields, version, nulls, text)
            if api.name == "Produce":
                fields["acks"] = 1
            if api.name in ("DeleteTopics", "DeleteGroups"):
                fields = sample(api.request._struct._fields, version, nulls, "nothing")
            connection.call(build(api.request, **fields), version)
            assert connection.call(build(p.ApiVersionsRequest), 0).error_code == 0
    assert not [r for r in caplog.records if r.exc_info], "a request made a handler fail"


def test_an_unknown_version_of_api_versions_is_answered_in_version_0(broker, raw):
    connection = raw()
    connection.send_frame(struct.pack(">hhih", 18, 99, 7, 3) + b"abc" + b"\0 whatever comes then")
    frame = connection.receive_frame()
    correlation_id, answer = p.decode_response(18, 0, frame)
    assert correlation_id == 7 and answer.error_code == E.UNSUPPORTED_VERSION
    assert {a.api_key for a in answer.api_keys} == {a.key for a in SERVED}


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\0",
        struct.pack(">hhih", 9999, 0, 1, -1),  # unknown API key
        struct.pack(">hhih", 3, 99, 1, -1),  # unknown version
        struct.pack(">hhih", -1, -1, 1, -1),
        struct.pack(">hhih", 3, 4, 1, 2000) + b"short",  # client id longer than the frame
        struct.pack(">hhih", 3, 4, 1, -7),
        struct.pack(">hhih", 3, 4, 1, 2) + b"\xff\xfe" + b"\0" * 8,  # client id that is not UTF-8
        struct.pack(">hhih", 3, 4, 1, -1) + struct.pack(">i", 2**31 - 1),  # more topics than bytes
        struct.pack(">hhih", 3, 12, 1, -1) + b"\0" + b"\xff" * 100,
        struct.pack(">hhih", 0, 7, 1, -1) + b"\xff\xff",  # a Produce that ends at once
    ],
)
def test_what_is_no_request_closes_its_connection_only(broker, raw, caplog, frame):
    caplog.set_level(logging.WARNING, logger="kdirect.broker")
    other, bad = raw(), raw()
    create(other)
    bad.send(build(p.ApiVersionsRequest), 0)
    bad.send_frame(frame)
    assert bad.receive().error_code == 0, "what came before is answered"
    assert bad.closed
    assert any("closing connection from" in r.getMessage() for r in caplog.records)
    assert appended(other.call(produce(encode_single_bytes(b"v")), 8)) == 0


@pytest.mark.parametrize(
    "head",
    [
        struct.pack(">i", -1),
        struct.pack(">i", 2**31 - 1),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
    ],
)
def test_what_is_no_frame_closes_its_connection(broker, raw, head):
    bad = raw()
    bad.send_bytes(head)
    assert bad.closed
    assert raw().call(build(p.ApiVersionsRequest), 0).error_code == 0


def test_requests_larger_than_allowed(raw):
    with kdirect.Broker(socket_request_max_bytes=10000) as b:
        connection = raw(b.bootstrap_servers)
        create(connection)
        assert appended(connection.call(produce(encode_single_bytes(b"v" * 9000)), 8)) == 0
        connection.send(produce(encode_single_bytes(b"v" * 10000)), 8)
        assert connection.closed


def test_a_bombardment_with_garbage_leaves_others_alone(broker, raw, seed):
    rng = random.Random(seed)
    host, port = broker.bootstrap_servers.split(":")
    connection = raw()
    create(connection)
    valid = p.encode_request(
        build(p.MetadataRequest, topics=None, allow_auto_topic_creation=False), 4, 1, "x"
    )

    def bombard(own: random.Random):
        for _ in range(60):
            with socket.create_connection((host, int(port)), 5) as s:
                kind = own.randrange(4)
                data = own.randbytes(own.randrange(1, 3000))
                if kind == 1:
                    data = struct.pack(">i", len(data)) + data
                elif kind == 2:
                    damaged = bytearray(valid)
                    damaged[own.randrange(len(damaged))] ^= 1 << own.randrange(8)
                    data = bytes(damaged)
                elif kind == 3:
                    api = own.choice(SERVED)
                    body = struct.pack(
                        ">hhih", api.key, own.randint(api.low, api.high), 5, -1
                    ) + own.randbytes(own.randrange(200))
                    data = struct.pack(">i", len(body)) + body
                try:
                    s.sendall(data)
                    if own.random() < 0.5:
                        s.settimeout(0.02)
                        s.recv(100)
                except (OSError, TimeoutError):
                    pass

    threads = [
        threading.Thread(target=bombard, args=(random.Random(rng.random()),)) for _ in range(4)
    ]
    for t in threads:
        t.start()
    expected = 0
    while any(t.is_alive() for t in threads):
        assert (
            appended(connection.call(produce(encode_single_bytes(b"%d" % expected)), 8)) == expected
        )
        expected += 1
    for t in threads:
        t.join()
    answer = fetched(raw().call(fetch(0), 11))
    assert answer.high_watermark == expected > 0


# -- order and waiting -----------------------------------------------------------------------------
def test_pipelined_requests_are_answered_in_order(broker, raw):
    connection = raw()
    create(connection)
    for i in range(1000):
        connection.send(
            produce(encode_single_bytes(b"%d" % i))
            if i % 3
            else build(p.MetadataRequest, topics=[], allow_auto_topic_creation=False),
            4,
        )
    offsets = [
        appended(a) for i, a in enumerate([connection.receive() for _ in range(1000)]) if i % 3
    ]
    assert offsets == list(range(len(offsets)))


def test_a_waiting_fetch_holds_up_answers_but_not_later_requests(broker, raw):
    """The Produce behind the Fetch on the same connection is what the Fetch waits for."""
    connection = raw()
    create(connection)
    connection.send(fetch(0, max_wait_ms=20000), 11)
    assert connection.silent_for(0.2)
    begin = time.monotonic()
    connection.send(produce(encode_single_bytes(b"v")), 8)
    assert len(fetched(connection.receive()).records) > 0
    assert appended(connection.receive()) == 0
    assert time.monotonic() - begin < 10


def test_a_waiting_fetch_ends_with_its_time(broker, raw):
    connection = raw()
    create(connection)
    begin = time.monotonic()
    answer = fetched(connection.call(fetch(0, max_wait_ms=300), 11))
    assert answer.error_code == 0 and len(answer.records) == 0
    assert 0.29 <= time.monotonic() - begin < 10


def test_a_fetch_waits_for_min_bytes(broker, raw):
    connection, other = raw(), raw()
    create(connection)
    batch = encode_single_bytes(b"v" * 1000)
    connection.send(fetch(0, max_wait_ms=30000, min_bytes=3 * len(batch)), 11)
    for _ in range(2):
        other.call(produce(batch), 8)
    assert connection.silent_for(0.2)
    other.call(produce(batch), 8)
    assert len(fetched(connection.receive()).records) == 3 * len(batch)


def test_a_fetch_is_woken_by_a_thread_of_its_own_kind(broker, raw):
    """As an RDMA producer's worker does: records appear in the log, then `notify_from_thread` is
    called."""
    connection = raw()
    create(connection)
    connection.send(fetch(0, max_wait_ms=30000), 11)
    assert connection.silent_for(0.1)
    tp = kdirect.TopicPartition("t", 0)
    broker.server.logs.partitions[tp].append(encode_single_bytes(b"v"))
    assert connection.silent_for(0.1), "nobody has said so yet"
    broker.server.waiters.notify_from_thread(tp)
    assert len(fetched(connection.receive()).records) > 0


def test_a_deleted_topic_ends_the_wait(broker, raw):
    connection, other = raw(), raw()
    create(connection)
    connection.send(fetch(0, max_wait_ms=30000), 11)
    assert connection.silent_for(0.1)
    assert (
        other.call(build(p.DeleteTopicsRequest, topic_names=["t"], timeout_ms=1000), 4)
        .responses[0]
        .error_code
        == 0
    )
    assert fetched(connection.receive()).error_code == E.UNKNOWN_TOPIC_OR_PARTITION


def test_a_join_that_waits_holds_up_what_comes_behind_it(broker, raw):
    """Kafka looks at a connection's next request when the one before is answered; groups count on
    it."""
    first, second = raw(), raw()

    def join(member=""):
        return build(p.JoinGroupRequest, member_id=member, **JOIN)

    member = first.call(join(), 5).member_id
    assert first.call(join(member), 5).generation_id == 1
    newcomer = second.call(join(), 5).member_id
    second.send(join(newcomer), 5)
    beat = build(
        p.HeartbeatRequest,
        group_id="g",
        generation_id=2,
        member_id=newcomer,
        group_instance_id=None,
    )
    second.send(beat, 3)
    assert second.silent_for(0.2)
    answer = first.call(join(member), 5)
    assert answer.generation_id == 2
    assert second.receive().generation_id == 2
    assert second.receive().error_code == 0, "the heartbeat was looked at after the join"


def test_a_client_that_does_not_read_is_not_read_from(broker, raw, until):
    """Requests pile up in the client's socket, not in the broker; others are served."""
    connection, other = raw(), raw()
    create(other)
    batch = encode_single_bytes(os.urandom(900_000))
    for _ in range(4):
        other.call(produce(batch), 8)

    def executed():
        return broker.statistics()["broker_requests_by_api"].get("Fetch", 0)

    count = 200
    for _ in range(count):
        connection.send(fetch(0, max_bytes=4 << 20, partition_max_bytes=4 << 20), 11)

    def settled():
        seen = executed()
        time.sleep(0.2)
        return seen if executed() == seen else 0

    done = until(settled)
    assert 0 < done < 50, f"{done} fetches of 3.6 MB were executed for a client that reads nothing"
    assert appended(other.call(produce(encode_single_bytes(b"v")), 8)) == 4
    for _ in range(count):
        assert len(fetched(connection.receive()).records) >= 4 * 900_000


@pytest.mark.parametrize("timestamp", [5, -3])
def test_a_lookup_by_time_holds_up_nobody_else(broker, raw, until, monkeypatch, timestamp):
    """It opens batches, which may take seconds; who asks for the ends of the log need not wait
    either."""
    connection, other = raw(), raw()
    create(connection)
    connection.call(produce(encode_single_bytes(b"v", None, time.time_ns() // 1_000_000)), 8)
    begun, go_on = threading.Event(), threading.Event()
    real = Partition.offset_for_timestamp

    def slow(self, timestamp_ms):
        begun.set()
        assert go_on.wait(30)
        return real(self, timestamp_ms)

    monkeypatch.setattr(Partition, "offset_for_timestamp", slow)

    def ask(when):
        part = {"partition_index": 0, "current_leader_epoch": -1, "timestamp": when}
        return build(
            p.ListOffsetsRequest,
            replica_id=-1,
            isolation_level=0,
            topics=[{"name": "t", "partitions": [part]}],
        )

    try:
        connection.send(ask(timestamp), 7)
        assert begun.wait(10)
        assert other.call(build(p.MetadataRequest, topics=None), 8).topics[0].name == "t"
        assert other.call(ask(-1), 7).topics[0].partitions[0].offset == 1
    finally:
        go_on.set()
    assert connection.receive().topics[0].partitions[0].offset == 0


def test_a_closed_client_behind_a_waiting_join_is_noticed(broker, raw, until):
    connection = raw()
    member = raw()
    member.call(build(p.JoinGroupRequest, member_id="", **JOIN), 0)
    connection.send(build(p.JoinGroupRequest, member_id="", **JOIN), 0)
    assert connection.silent_for(0.1)
    connection.send_bytes(b"\0\0\0\x50" * 1000)
    opened = broker.statistics()["broker_connections"]
    connection.close()
    until(lambda: broker.statistics()["broker_connections"] == opened - 1)
    assert BLOCKED_BYTES > 4000


# -- errors ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("version", [3, 7, 8, 9, 10])
def test_errors_of_produce(broker, raw, version):
    connection = raw()
    create(connection, max_message_bytes=1000)
    good = encode_single_bytes(b"v")

    def code(message):
        return connection.call(message, version).responses[0].partition_responses[0].error_code

    assert code(produce(good)) == 0
    assert code(produce(good, topic="nowhere")) == E.UNKNOWN_TOPIC_OR_PARTITION
    assert code(produce(good, partition=1)) == E.UNKNOWN_TOPIC_OR_PARTITION
    assert code(produce(good, partition=-1)) == E.UNKNOWN_TOPIC_OR_PARTITION
    assert code(produce(good, topic="__consumer_offsets")) == E.INVALID_TOPIC_EXCEPTION
    assert code(produce(good, acks=2)) == E.INVALID_REQUIRED_ACKS
    of_transaction = encode_records(
        [(None, b"v", None, 0)], producer_id=7, producer_epoch=0, base_sequence=0, attributes=0x10
    )
    assert code(produce(of_transaction)) == E.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    # Nobody has begun it.
    assert code(produce(of_transaction, transactional_id="x")) == E.INVALID_PRODUCER_ID_MAPPING
    assert code(produce(b"")) == E.INVALID_RECORD
    assert code(produce(None)) == E.INVALID_RECORD
    assert code(produce(encode_single_bytes(b"v" * 2000))) == E.MESSAGE_TOO_LARGE
    damaged = bytearray(good)
    damaged[-1] ^= 1
    assert code(produce(bytes(damaged))) == E.CORRUPT_MESSAGE
    assert code(produce(good[:-1])) in (E.CORRUPT_MESSAGE, E.INVALID_RECORD)
    assert code(produce(os.urandom(100))) in (
        E.CORRUPT_MESSAGE,
        E.INVALID_RECORD,
        E.UNSUPPORTED_FOR_MESSAGE_FORMAT,
    )
    assert appended(connection.call(produce(good), version)) == 1, (
        "nothing of what was refused is in the log"
    )


@pytest.mark.parametrize("version", [0, 1, 2])
def test_producers_of_old_formats_are_told(broker, raw, version):
    connection = raw()
    create(connection)
    answer = connection.call(produce(encode_single_bytes(b"v")), version)
    assert answer.responses[0].partition_responses[0].error_code == E.UNSUPPORTED_FOR_MESSAGE_FORMAT


def test_produce_without_acknowledgement(broker, raw, until):
    connection = raw()
    create(connection)
    for _ in range(10):
        connection.socket.sendall(
            p.encode_request(produce(encode_single_bytes(b"v"), acks=0), 8, 99, "raw")
        )
    until(lambda: fetched(connection.call(fetch(0), 11)).high_watermark == 10)
    connection.socket.sendall(p.encode_request(produce(b"nonsense", acks=0), 8, 99, "raw"))
    assert connection.closed, "the only way to tell"


@pytest.mark.parametrize("version", [4, 7, 11, 12])
def test_errors_of_fetch(broker, raw, version):
    connection = raw()
    create(connection)
    connection.call(produce(encode_single_bytes(b"v")), 8)

    def code(**keywords):
        return fetched(connection.call(fetch(max_wait_ms=10000, **keywords), version)).error_code

    assert code(offset=0) == 0
    assert code(offset=2) == code(offset=-1) == E.OFFSET_OUT_OF_RANGE
    assert code(topic="nowhere") == code(partition=3) == E.UNKNOWN_TOPIC_OR_PARTITION
    if version >= 9:
        assert code(epoch=5) == E.UNKNOWN_LEADER_EPOCH
    if version >= 7:
        assert (
            connection.call(fetch(session_id=5, session_epoch=1), version).error_code
            == E.FETCH_SESSION_ID_NOT_FOUND
        )


def test_limits_of_fetch(broker, raw):
    """At least one batch, however small the limits; never part of a batch."""
    connection = raw()
    create(connection, partitions=2)
    batch = encode_single_bytes(b"v" * 500)
    for partition in (0, 1):
        for _ in range(5):
            connection.call(produce(batch, partition=partition), 8)
    assert len(fetched(connection.call(fetch(partition_max_bytes=1), 11)).records) == len(batch)
    assert len(fetched(connection.call(fetch(max_bytes=1), 11)).records) == len(batch)
    assert len(
        fetched(connection.call(fetch(partition_max_bytes=2 * len(batch) + 7), 11)).records
    ) == 2 * len(batch)
    request = fetch(max_bytes=3 * len(batch))
    request.topics[0].partitions.append(fetch(partition=1).topics[0].partitions[0])
    one, two = connection.call(request, 11).responses[0].partitions
    assert len(one.records) == 3 * len(batch) and len(two.records) == 0


def test_transactional_ids_and_timeouts_that_cannot_be(broker, raw):
    connection = raw()

    def code(**fields):
        return connection.call(build(p.InitProducerIdRequest, **fields), 4).error_code

    longest = 900_000
    assert code(transactional_id="", transaction_timeout_ms=1000) == E.INVALID_REQUEST
    for timeout in (0, -1, longest + 1):
        answer = code(transactional_id="x", transaction_timeout_ms=timeout)
        assert answer == E.INVALID_TRANSACTION_TIMEOUT
    assert code(transactional_id="x", transaction_timeout_ms=longest) == 0
    for name in ("x", None):  # a producer id without an epoch, and an epoch without an id
        for half in ({"producer_id": 1}, {"producer_epoch": 0}):
            answer = code(transactional_id=name, transaction_timeout_ms=longest, **half)
            assert answer == E.INVALID_REQUEST
    ended = connection.call(
        build(p.EndTxnRequest, transactional_id="y", producer_id=1, producer_epoch=0), 3
    )
    assert ended.error_code == E.INVALID_PRODUCER_ID_MAPPING


def test_metadata_creates_topics_only_if_asked(broker, raw):
    connection = raw()

    def ask(name, allow, version=8):
        return connection.call(
            build(p.MetadataRequest, topics=[{"name": name}], allow_auto_topic_creation=allow),
            version,
        ).topics[0]

    assert ask("new", False).error_code == E.UNKNOWN_TOPIC_OR_PARTITION
    coming = ask("new", True)  # as Kafka answers: kafka-go's tests count the partitions
    assert (coming.error_code, list(coming.partitions)) == (E.LEADER_NOT_AVAILABLE, [])
    assert ask("new", True).error_code == 0
    assert ask("bad/name", True).error_code == E.INVALID_TOPIC_EXCEPTION
    assert ask("x" * 250, True).error_code == E.INVALID_TOPIC_EXCEPTION
    names = {t.name for t in connection.call(build(p.MetadataRequest, topics=None), 8).topics}
    assert names == {"new"}
    topic_id = connection.call(build(p.MetadataRequest, topics=None), 12).topics[0].topic_id
    by_id = connection.call(
        build(p.MetadataRequest, topics=[{"name": None, "topic_id": topic_id}]), 12
    ).topics[0]
    assert by_id.name == "new"
    with kdirect.Broker(auto_create_topics_enable=False) as b:
        connection = raw(b.bootstrap_servers)
        assert ask("new", True).error_code == E.UNKNOWN_TOPIC_OR_PARTITION


def test_a_name_that_collides_is_told_from_a_property_that_cannot_be(broker, raw):
    """Kafka tells the two apart by their codes.  The word of one message in another once decided
    which code it was."""
    connection = raw()

    def create_topic(name, **configs):
        rows = [{"name": k, "value": v} for k, v in configs.items()]
        topic = {
            "name": name,
            "num_partitions": 1,
            "replication_factor": 1,
            "assignments": [],
            "configs": rows,
        }
        return connection.call(
            build(p.CreateTopicsRequest, topics=[topic], timeout_ms=10000), 5
        ).topics[0]

    assert create_topic("a.b").error_code == 0
    assert create_topic("a.b").error_code == E.TOPIC_ALREADY_EXISTS
    for _ in range(2):
        answer = create_topic("a_b")
        assert answer.error_code == E.INVALID_TOPIC_EXCEPTION and "a.b" in answer.error_message
    assert create_topic("other", collides="yes").error_code == E.INVALID_CONFIG
    assert create_topic("other", preallocate="collides").error_code == E.INVALID_CONFIG
    answer = connection.call(
        build(p.MetadataRequest, topics=[{"name": "a_b"}], allow_auto_topic_creation=True), 8
    ).topics[0]
    assert answer.error_code == E.INVALID_TOPIC_EXCEPTION


def test_advertised_addresses(raw):
    def address(b):
        one = raw(b.bootstrap_servers).call(build(p.MetadataRequest, topics=[]), 4).brokers[0]
        return f"{one.host}:{one.port}"

    with kdirect.Broker(listeners="0.0.0.0:0") as b:
        assert address(b) == b.bootstrap_servers and b.bootstrap_servers.startswith("127.0.0.1:")
    with kdirect.Broker(
        listeners="127.0.0.1:0", advertised_listeners="PLAINTEXT://localhost:0"
    ) as b:
        assert address(b) == b.bootstrap_servers and b.bootstrap_servers.startswith("localhost:")
    with kdirect.Broker(listeners=["127.0.0.1:0", "[::1]:0"]) as b:
        first, second = b.bootstrap_servers.split(",")
        assert first.startswith("127.0.0.1:") and second.startswith("[::1]:")


def test_idle_connections_are_closed(raw):
    with kdirect.Broker(connections_max_idle_ms=200) as b:
        connection = raw(b.bootstrap_servers)
        connection.call(build(p.ApiVersionsRequest), 0)
        assert connection.closed


def test_statistics_are_named_in_the_table_of_metrics(broker, raw):
    connection = raw()
    create(connection)
    connection.call(produce(encode_single_bytes(b"v")), 8)
    connection.call(produce(b"nonsense"), 8)
    seen = broker.statistics()
    # No RDMA client yet: tests/client/test_statistics.py has one, and compares the whole.
    assert {name for name in seen if name.startswith("broker_")} == {
        n for n in metrics.names("broker") if n.startswith("broker_")
    }
    assert set(seen) < metrics.names("broker") | metrics.names("log")
    assert (seen["broker_appends"], seen["broker_append_errors"], seen["log_partitions"]) == (
        1,
        1,
        1,
    )
    assert seen["broker_requests"] == sum(seen["broker_requests_by_api"].values()) == 3
    assert seen["broker_bytes_in"] > 100 and seen["broker_bytes_out"] > 100


def test_a_broker_that_nobody_stopped_is_stopped_when_python_exits(tmp_path):
    """As in a notebook whose kernel ends: the log is clean, and nothing is complained of."""
    script = f"""
import kdirect
broker = kdirect.Broker(log_dirs={str(tmp_path / "log")!r}, listeners="127.0.0.1:0").start()
producer = kdirect.Producer(broker.bootstrap_servers)
producer.produce("t", b"v")
assert producer.flush(20) == 0
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert (tmp_path / "log" / ".kafka_cleanshutdown").exists()
