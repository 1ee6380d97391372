"""Plain requests have the answers, and the effects, that the general handlers give them.

Two brokers get the same random requests, in the same order and in the same pieces; one of them has
no plain requests.  Their answers are compared byte for byte, and so are their counters and logs."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import random
import struct
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kdirect
from kdirect.format import protocol as p
from kdirect.format.batch import crc32c, encode_single_bytes
from kdirect.format.schema import build
from kdirect.log.kernel_transactions import (
    admit_transaction,
    begin_verification,
    marker_batch,
)
from kdirect.model import TopicPartition
from kdirect.wire.environment import Environment
from tests.broker.conftest import Raw, call_on_loop
from tests.support import wait_until

NOW_MS = 1_700_000_000_000
TOPICS = {
    "plain": {},
    "small-segments": {"segment.bytes": "4096", "max.message.bytes": "2000"},
    "stamped": {"message.timestamp.type": "LogAppendTime"},
    "slow": {"flush.messages": "3"},
}
IDS = {name: uuid.UUID(int=7 << 64 | i) for i, name in enumerate(TOPICS)}
NO_ID = uuid.UUID(int=7 << 64 | 99)
PARTITIONS = 3
COUNTED = (
    "broker_requests",
    "broker_requests_by_api",
    "broker_bytes_in",
    "broker_bytes_out",
    "broker_appends",
    "broker_append_bytes",
    "broker_append_errors",
    "broker_fetch_waits",
    "log_requests",
    "log_batches",
    "log_bytes",
    "log_duplicates",
    "log_refused",
    "log_rolls",
)


@pytest.fixture
def brokers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[kdirect.Broker]]:
    """One as it is, and one that takes every request the general way."""
    monkeypatch.setattr(Environment, "time_ms", lambda self: NOW_MS)
    ids = itertools.chain(IDS.values(), IDS.values(), iter(uuid.uuid4, None))
    monkeypatch.setattr("kdirect.broker.topics.new_id", lambda: next(ids))
    made = [kdirect.Broker(tmp_path / name, rdma_transports="") for name in ("plain", "general")]
    for broker in made:
        broker.start()
    server = made[1].server
    server._context = dataclasses.replace(server._context, plain=None)
    for broker in made:
        connection = Raw(broker.bootstrap_servers)
        for name, configs in TOPICS.items():
            rows = [{"name": k, "value": v} for k, v in configs.items()]
            topic = {"name": name, "num_partitions": PARTITIONS, "replication_factor": 1,
                     "assignments": [], "configs": rows}  # fmt: skip
            request = build(p.CreateTopicsRequest, topics=[topic], timeout_ms=5000)
            assert connection.call(request, 5).topics[0].error_code == 0
        connection.close()
    yield made
    for broker in made:
        broker.stop()


class Requests:
    """Random requests, most of which are plain."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.sequences: dict[tuple[str, int], int] = {}

    def batch(self, topic: str, partition: int) -> bytes:
        chance = self.chance
        value = chance.randbytes(chance.choice((1, 20, 100, 100, 100, 1500)))
        data = bytearray(encode_single_bytes(value, timestamp_ms=NOW_MS))
        kind = chance.random()
        if kind < 0.3:  # an idempotent producer, which repeats itself at times, or errs
            at = self.sequences.get((topic, partition), 0)
            sequence = max(0, at + chance.choice((0, 0, 0, 0, 0, -1, -2, -9, 3)))
            if sequence == at:
                self.sequences[topic, partition] = at + 1
            struct.pack_into(">qhi", data, 43, 4711, 0, sequence)
            struct.pack_into(">I", data, 17, crc32c(data[21:]))
        elif kind < 0.34:
            data[chance.randrange(len(data))] ^= 0x10
        return bytes(data) * chance.choice((1, 1, 1, 1, 2))

    def produce(self) -> tuple[Any, int]:
        chance = self.chance
        topic = chance.choice((*TOPICS, "plain", "plain", "plain", "nothing"))
        partition = chance.randrange(PARTITIONS + 1) if chance.random() < 0.1 else 0
        rows = [{"index": partition, "records": self.batch(topic, partition)}]
        if chance.random() < 0.03:
            rows.append({"index": 1, "records": self.batch(topic, 1)})
        if chance.random() < 0.02:
            rows[0]["records"] = chance.choice((b"", None))
        request = build(
            p.ProduceRequest,
            transactional_id="x" if chance.random() < 0.02 else None,
            acks=chance.choice((-1, -1, -1, 1, 1, 7)) if chance.random() < 0.3 else -1,
            timeout_ms=1000,
            topic_data=[{"name": topic, "topic_id": IDS.get(topic, NO_ID), "partition_data": rows}],
        )
        return request, chance.randint(3, p.API_NAMES["Produce"].high)

    def fetch(self) -> tuple[Any, int]:
        chance = self.chance
        names = [
            chance.choice((*TOPICS, "plain", "plain")) for _ in range(chance.choice((1, 1, 2)))
        ]
        if chance.random() < 0.03:
            names.append("nothing")
        topics = [
            {
                "topic": name,
                "topic_id": IDS.get(name, NO_ID),
                "partitions": [
                    {
                        "partition": i,
                        "current_leader_epoch": chance.choice((-1, -1, -1, -1, 0, 0, 1)),
                        "fetch_offset": chance.choice((0, 0, chance.randrange(200), -1)),
                        "partition_max_bytes": chance.choice((0, 1, 300, 4000, 1 << 20)),
                        "log_start_offset": -1,
                        "last_fetched_epoch": chance.choice((-1, -1, 0)),
                    }
                    for i in range(chance.choice((1, 1, 1, 2)))
                ],
            }
            for name in dict.fromkeys(names)
        ]
        waits = chance.random() < 0.05
        request = build(
            p.FetchRequest,
            replica_id=-1,
            max_wait_ms=10 if waits else 0,
            min_bytes=chance.choice((1, 1, 1, 0, 5000)),
            max_bytes=chance.choice((1, 1000, 1 << 20, 1 << 20, 1 << 20)),
            isolation_level=chance.choice((0, 0, 0, 1)),
            session_id=0,
            session_epoch=-1,
            topics=topics,
            forgotten_topics_data=[],
            rack_id=chance.choice(("", "", "rack")),
        )
        return request, chance.randint(4, p.API_NAMES["Fetch"].high)

    def several(self, count: int) -> list[tuple[Any, int]]:
        """Sent at once.  While a thread reads, or makes room, later requests go on; a Fetch may see
        what a Produce beside it does, or not.  So both are not sent together."""
        make = self.produce if self.chance.random() < 0.55 else self.fetch
        return [self._now_and_then_another(*make()) for _ in range(count)]

    def _now_and_then_another(self, request: Any, version: int) -> tuple[Any, int]:
        if self.chance.random() < 0.98:
            return request, version
        return build(p.ApiVersionsRequest, client_software_name="t", client_software_version="1"), 3


def sent_and_answered(broker: kdirect.Broker, pieces: list[tuple[list[bytes], int]]) -> list[bytes]:
    """The frames of all answers."""
    connection = Raw(broker.bootstrap_servers)
    answers = []
    for piece, count in pieces:
        for data in piece:
            connection.send_bytes(data)
        answers += [connection.receive_frame() for _ in range(count)]
    connection.close()
    return answers


def pieces_of(chance: random.Random, count: int) -> list[tuple[list[bytes], int]]:
    """Requests as they are sent: several at once, and cut at any byte."""
    requests = Requests(chance)
    pieces = []
    number = 0
    while number < count:
        several = chance.choice((1, 1, 2, 5, 20))
        data = b""
        for request, version in requests.several(several):
            number += 1
            client = chance.choice(("a client", "a client", "a client", "another"))
            data += p.encode_request(request, version, number, client)
        cuts = sorted(chance.randrange(len(data)) for _ in range(chance.choice((0, 0, 1, 2))))
        edges = [0, *cuts, len(data)]
        pieces.append(([data[a:b] for a, b in itertools.pairwise(edges) if a < b], several))
    return pieces


def logs_of(broker: kdirect.Broker) -> dict[TopicPartition, bytes]:
    found = {}
    for tp, log in broker.server.logs.partitions.items():
        start = log.log_start_offset
        found[tp] = b"".join(bytes(b) for b in log.read(start, 1 << 30))
    return found


@pytest.mark.parametrize("part", range(2))
def test_plain_answers_are_those_of_the_general_handlers(
    brokers: list[kdirect.Broker], seed: int, part: int
) -> None:
    pieces = pieces_of(random.Random(seed + part), 2500)
    plain, general = (sent_and_answered(broker, pieces) for broker in brokers)
    assert len(plain) == len(general)
    for i, (mine, theirs) in enumerate(zip(plain, general, strict=True)):
        assert mine == theirs, f"answer {i}"
    counts = [broker.statistics() for broker in brokers]
    for name in COUNTED:
        assert counts[0][name] == counts[1][name], name
    assert counts[0]["broker_plain_requests"] > 250  # else nothing was compared
    assert counts[1]["broker_plain_requests"] == 0
    logs = [logs_of(broker) for broker in brokers]
    assert logs[0] == logs[1]


def frame(message: Any, version: int, client: str | None = "raw") -> bytes:
    return bytes(p.encode_request(message, version, 1, client))  # type: ignore[arg-type]


def one_record(topic: str = "plain") -> Any:
    rows = [{"index": 0, "records": encode_single_bytes(b"v" * 100, timestamp_ms=NOW_MS)}]
    data = [{"name": topic, "topic_id": IDS.get(topic, NO_ID), "partition_data": rows}]
    return build(p.ProduceRequest, transactional_id=None, acks=-1, timeout_ms=1000, topic_data=data)


@pytest.mark.parametrize("version", [3, 8, 9, 12, 13])
def test_a_hostile_frame_is_refused_as_by_the_general_handlers(
    brokers: list[kdirect.Broker], seed: int, version: int
) -> None:
    """Bytes that were flipped, and frames that end anywhere: both answer, or close.  A flipped bit
    may make a request that asks for no answer; then the next one is answered first."""
    chance = random.Random(seed)
    good = frame(one_record(), version)
    for _ in range(40):
        bad = bytearray(good)
        if chance.random() < 0.5:
            bad[chance.randrange(4, len(bad))] ^= 1 << chance.randrange(8)
        else:
            del bad[chance.randrange(5, len(bad)) :]
            struct.pack_into(">i", bad, 0, len(bad) - 4)
        outcomes = []
        for broker in brokers:
            connection = Raw(broker.bootstrap_servers)
            connection.send_bytes(good)
            first = connection.receive_frame()
            connection.send_bytes(bytes(bad))
            connection.send_bytes(good)
            outcomes.append((first, connection.receive_frame()))
            connection.close()
        assert outcomes[0] == outcomes[1], bytes(bad)
    assert logs_of(brokers[0]) == logs_of(brokers[1])


def test_what_waits_holds_plain_requests_up(brokers: list[kdirect.Broker]) -> None:
    """A plain request behind one that waits is answered after it, and a topic that is gone, or made
    again, is looked up again."""
    broker = brokers[0]
    connection = Raw(broker.bootstrap_servers)
    nothing = Requests(random.Random(1)).fetch()[0]
    nothing.topics[:] = nothing.topics[:1]
    nothing.topics[0].topic = "slow"
    nothing.topics[0].partitions[0].fetch_offset = 0
    nothing.topics[0].partitions[0].current_leader_epoch = -1
    nothing.max_wait_ms, nothing.min_bytes = 300, 1
    connection.call(one_record(), 8)
    connection.send(nothing, 11)
    before = broker.statistics()["broker_plain_requests"]
    for _ in range(3):
        connection.send(one_record(), 8)
    connection.receive()
    offsets = [connection.receive().responses[0].partition_responses[0] for _ in range(3)]
    assert [x.base_offset for x in offsets] == [1, 2, 3]
    assert broker.statistics()["broker_plain_requests"] == before
    # The table does not keep a topic that is gone.
    gone = build(p.DeleteTopicsRequest, topic_names=["plain"], timeout_ms=5000)
    assert connection.call(gone, 1).responses[0].error_code == 0
    answer = connection.call(one_record(), 8).responses[0].partition_responses[0]
    assert answer.error_code == 3
    topic = {"name": "plain", "num_partitions": 1, "replication_factor": 1, "assignments": [],
             "configs": []}  # fmt: skip
    made = build(p.CreateTopicsRequest, topics=[topic], timeout_ms=5000)
    assert connection.call(made, 5).topics[0].error_code == 0
    for i in range(3):
        answer = connection.call(one_record(), 8).responses[0].partition_responses[0]
        assert (answer.error_code, answer.base_offset) == (0, i)
    # Nor does it append while the partition is held.
    appends = broker.server.appends
    held = TopicPartition("plain", 0)
    call_on_loop(broker, lambda: appends.hold(held))
    connection.send(one_record(), 8)
    assert connection.silent_for(0.1)
    call_on_loop(broker, lambda: appends.release(held))
    assert connection.receive().responses[0].partition_responses[0].base_offset == 3
    connection.close()


def abort(broker: kdirect.Broker, tp: TopicPartition) -> None:
    """Append a record, and another one in a transaction that is aborted."""
    log = broker.server.logs.partitions[tp]
    data = bytearray(encode_single_bytes(b"aborted", timestamp_ms=NOW_MS))
    struct.pack_into(">qhi", data, 43, 4711, 0, 0)
    data[22] |= 0x10
    struct.pack_into(">I", data, 17, crc32c(data[21:]))
    _, ticket = begin_verification(log.kernel, 4711, 0, 0, NOW_MS)
    admit_transaction(log.kernel, 4711, 0, ticket)
    for batch in (encode_single_bytes(b"v", timestamp_ms=NOW_MS), data):
        assert log.append(bytes(batch), NOW_MS).error == 0
    marker = marker_batch(4711, 0, 0, False, NOW_MS)
    assert log.append_marker(marker, NOW_MS).error == 0


def test_fetches_of_committed_records_and_by_id_have_the_same_answers(
    brokers: list[kdirect.Broker], seed: int
) -> None:
    """Whatever was aborted before, in or after what they read."""
    tp = TopicPartition("plain", 0)
    counts = []
    answers: list[list[bytes]] = []
    for broker in brokers:
        chance = random.Random(seed)
        connection = Raw(broker.bootstrap_servers)
        connection.call(one_record(), 8)
        abort(broker, tp)
        for _ in range(3):
            connection.call(one_record(), 8)
        topic_id = broker.server.topics.get("plain").topic_id
        found = []
        for _ in range(150):
            request = Requests(chance).fetch()[0]
            request.topics[:] = request.topics[:1]
            request.topics[0].topic, request.topics[0].topic_id = "plain", topic_id
            request.isolation_level = chance.randrange(2)
            for part in request.topics[0].partitions:
                part.fetch_offset = chance.randrange(-1, 9)
            version = chance.randint(4, p.API_NAMES["Fetch"].high)
            connection.send(request, version)
            found.append(connection.receive_frame().replace(topic_id.bytes, bytes(16)))
        answers.append(found)
        counts.append(broker.statistics()["broker_plain_requests"])
        connection.close()
    for i, (mine, theirs) in enumerate(zip(*answers, strict=True)):
        assert mine == theirs, f"answer {i}"
    assert counts[0] > 40 and counts[1] == 0


def test_the_names_of_topics_that_are_gone_are_forgotten(brokers: list[kdirect.Broker]) -> None:
    """Also by a client that goes on asking for them."""
    broker = brokers[0]
    connection = Raw(broker.bootstrap_servers)
    plain = gc.get_referents(broker.server.handlers.plain)
    (table,) = (x for x in plain if type(x).__name__ == "PlainTable")
    for i in range(3):
        name = f"short-lived-{i}"
        topic = {"name": name, "num_partitions": 1, "replication_factor": 1, "assignments": [],
                 "configs": []}  # fmt: skip
        made = build(p.CreateTopicsRequest, topics=[topic], timeout_ms=5000)
        assert connection.call(made, 5).topics[0].error_code == 0
        gone = build(p.DeleteTopicsRequest, topic_names=[name], timeout_ms=5000)
        for error in (0, 3):
            answer = connection.call(one_record(name), 8).responses[0].partition_responses[0]
            assert answer.error_code == error
            if not error:
                assert connection.call(gone, 1).responses[0].error_code == 0
    names = [k for d in gc.get_referents(table) if type(d) is dict for k in d]
    assert not [n for n in names if isinstance(n, bytes) and n.startswith(b"short")]
    connection.close()


def test_a_fetch_that_waits_is_woken_by_plain_requests(brokers: list[kdirect.Broker]) -> None:
    broker = brokers[0]
    reader, writer = (Raw(broker.bootstrap_servers) for _ in range(2))
    writer.call(one_record(), 8)
    request = Requests(random.Random(1)).fetch()[0]
    request.topics[:] = request.topics[:1]
    request.topics[0].topic = "plain"
    part = request.topics[0].partitions[0]
    part.partition, part.fetch_offset, part.current_leader_epoch = 0, 1, -1
    part.partition_max_bytes = request.max_bytes = 1 << 20
    request.max_wait_ms, request.min_bytes = 20_000, 1
    reader.send(request, 11)
    wait_until(lambda: len(broker.server.waiters), "the Fetch waits")
    before = broker.statistics()["broker_plain_requests"]
    writer.call(one_record(), 8)
    assert broker.statistics()["broker_plain_requests"] == before + 1
    assert len(reader.receive().responses[0].partitions[0].records) > 100
    reader.close()
    writer.close()
