"""Sessions of clients that fetch (KIP-227), and Fetch by topic ids: what is named, what is
answered, and which errors, as Apache Kafka does it."""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import pytest

import kdirect
from kdirect.broker.fetch_session_cache import (
    MAX_EPOCH,
    FetchSession,
    SessionCache,
    SessionRow,
    next_epoch,
)
from kdirect.format import protocol as p
from kdirect.format.batch import encode_single_bytes
from kdirect.format.error_codes import ErrorCode as E
from kdirect.format.schema import build
from tests.support import wait_until

HIGHEST = p.API_NAMES["Fetch"].high


class Client:
    """A client with one session over one connection."""

    def __init__(self, connection: Any, version: int, ids: dict[str, uuid.UUID]) -> None:
        self.connection = connection
        self.version = version
        self.ids = ids
        self.session_id = 0
        self.epoch = 0

    def topic(self, name: str, partitions: list[Any]) -> dict[str, Any]:
        key = {"topic": name} if self.version < 13 else {"topic_id": self.ids[name]}
        return {**key, "partitions": partitions}

    def request(
        self,
        offsets: dict[tuple[str, int], int],
        forgotten: dict[str, list[int]] | None = None,
        *,
        wait_ms: int = 0,
        min_bytes: int = 1,
        max_bytes: int = 1 << 20,
    ) -> Any:
        topics = [
            self.topic(
                name,
                [
                    {
                        "partition": index,
                        "current_leader_epoch": -1,
                        "fetch_offset": offset,
                        "partition_max_bytes": 1 << 20,
                        "log_start_offset": -1,
                        "last_fetched_epoch": -1,
                    }
                ],
            )
            for (name, index), offset in offsets.items()
        ]
        return build(
            p.FetchRequest,
            replica_id=-1,
            max_wait_ms=wait_ms,
            min_bytes=min_bytes,
            max_bytes=max_bytes,
            isolation_level=0,
            session_id=self.session_id,
            session_epoch=self.epoch,
            topics=topics,
            forgotten_topics_data=[self.topic(n, x) for n, x in (forgotten or {}).items()],
            rack_id="",
        )

    def fetch(self, *arguments: Any, **options: Any) -> dict[tuple[str, int], Any]:
        """Partitions of the answer, in their order."""
        answer = self.connection.call(self.request(*arguments, **options), self.version)
        assert answer.error_code == 0, answer.error_code
        self.session_id = answer.session_id
        self.epoch = next_epoch(self.epoch)
        return self.partitions(answer)

    def partitions(self, answer: Any) -> dict[tuple[str, int], Any]:
        names = {topic_id: name for name, topic_id in self.ids.items()}
        return {
            (t.topic if self.version < 13 else names[t.topic_id], x.partition_index): x
            for t in answer.responses
            for x in t.partitions
        }

    def error(self, *arguments: Any, **options: Any) -> int:
        answer = self.connection.call(self.request(*arguments, **options), self.version)
        assert not answer.responses
        return int(answer.error_code)


def make_topics(connection: Any, names: dict[str, int]) -> dict[str, uuid.UUID]:
    rows = [
        {"name": n, "num_partitions": c, "replication_factor": 1, "assignments": [], "configs": []}
        for n, c in names.items()
    ]
    request = build(p.CreateTopicsRequest, topics=rows, timeout_ms=5000)
    return {t.name: t.topic_id for t in connection.call(request, 7).topics}


def put(connection: Any, topic: str, partition: int = 0) -> None:
    rows = [{"index": partition, "records": encode_single_bytes(b"v")}]
    request = build(
        p.ProduceRequest, transactional_id=None, acks=-1, timeout_ms=1000,
        topic_data=[{"name": topic, "partition_data": rows}],
    )  # fmt: skip
    answer = connection.call(request, 8)
    assert answer.responses[0].partition_responses[0].error_code == 0


@pytest.fixture
def world(broker: kdirect.Broker, raw: Callable[..., Any]) -> Callable[[int], Client]:
    connection = raw()
    ids = make_topics(connection, {"a": 3, "b": 1})

    def make(version: int) -> Client:
        return Client(connection, version, ids)

    return make


A0, A1, A2, B0 = ("a", 0), ("a", 1), ("a", 2), ("b", 0)
ALL = {A0: 0, A1: 0, A2: 0, B0: 0}


@pytest.mark.parametrize("version", [7, 11, 12, 13, HIGHEST])
def test_an_incremental_answer_names_what_has_changed(world: Any, version: int) -> None:
    client = world(version)
    found = client.fetch(ALL)
    assert list(found) == list(ALL) and client.session_id > 0
    assert client.fetch({}) == {}
    put(client.connection, "a", 1)
    found = client.fetch({})
    assert list(found) == [A1] and found[A1].high_watermark == 1 and found[A1].records
    assert list(client.fetch({})) == [A1], "it was not asked for a later offset"
    assert client.fetch({A1: 1}) == {}
    put(client.connection, "b")
    put(client.connection, "a", 1)
    assert set(client.fetch({A1: 1})) == {A1, B0}
    assert client.fetch({A1: 2}, {"b": [0]}) == {}
    put(client.connection, "b")
    assert client.fetch({}) == {}, "it was forgotten"
    assert list(client.fetch({B0: 2})) == [B0], "it is new, and its high watermark was not told"
    assert client.fetch({}) == {}


@pytest.mark.parametrize("version", [11, HIGHEST])
def test_errors_of_sessions_are_those_of_kafka(world: Any, version: int) -> None:
    client = world(version)
    client.session_id, client.epoch = 4711, 1
    assert client.error({}) == E.FETCH_SESSION_ID_NOT_FOUND
    client.session_id, client.epoch = 0, 0
    client.fetch(ALL)
    number = client.session_id
    client.epoch = 7
    assert client.error({}) == E.INVALID_FETCH_SESSION_EPOCH
    client.epoch = 1
    other = world(HIGHEST if version < 13 else 12)
    other.session_id, other.epoch = number, 1
    assert other.error({}) == E.FETCH_SESSION_TOPIC_ID_ERROR
    client.fetch({})
    # Forgetting everything ends it, and so does a full Fetch that names it, in an epoch of either
    # kind; one with the final epoch and no session is none.
    assert client.fetch({}, {"a": [0, 1, 2], "b": [0]}) == {}
    assert client.session_id == 0
    client.session_id, client.epoch = number, 3
    assert client.error({}) == E.FETCH_SESSION_ID_NOT_FOUND
    client.session_id, client.epoch = 0, 0
    client.fetch(ALL)
    number = client.session_id
    client.epoch = -1
    assert list(client.fetch(ALL)) == list(ALL) and client.session_id == 0
    client.session_id, client.epoch = number, 1
    assert client.error({}) == E.FETCH_SESSION_ID_NOT_FOUND
    client.session_id, client.epoch = -1, -1
    assert list(client.fetch(ALL)) == list(ALL) and client.session_id == 0


def test_a_topic_id_that_nobody_knows_is_the_error_of_its_partitions(world: Any) -> None:
    client = world(HIGHEST)
    client.ids["gone"] = uuid.uuid4()
    found = client.fetch({A0: 0, ("gone", 0): 0, ("a", 9): 0})
    assert found["gone", 0].error_code == E.UNKNOWN_TOPIC_ID
    assert found["a", 9].error_code == E.UNKNOWN_TOPIC_OR_PARTITION
    assert found[A0].error_code == 0
    # An error is told each time, until it is forgotten.
    assert set(client.fetch({})) == {("gone", 0), ("a", 9)}
    assert set(client.fetch({}, {"gone": [0]})) == {("a", 9)}
    # A topic that is deleted while a session has it.
    gone = build(p.DeleteTopicsRequest, topic_names=["a"], timeout_ms=5000)
    assert client.connection.call(gone, 1).responses[0].error_code == 0
    found = client.fetch({})
    assert {x.error_code for x in found.values()} == {E.UNKNOWN_TOPIC_ID}
    make_topics(client.connection, {"a": 3})
    found = client.fetch({})
    assert {x.error_code for x in found.values()} == {E.UNKNOWN_TOPIC_ID}, "another topic's id"


def test_a_session_waits_for_its_partitions_and_looks_at_those_with_news_only(
    broker: kdirect.Broker, world: Any, raw: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = world(HIGHEST)
    client.fetch(ALL)
    client.fetch({})
    data = broker.server.handlers.by_key[1][0].__self__
    looks = []
    plain = data._read
    monkeypatch.setattr(data, "_read", lambda *of: looks.append(of[1]) or plain(*of))
    assert client.fetch({}) == {} and not looks
    began = time.monotonic()
    assert client.fetch({}, wait_ms=150) == {}
    assert time.monotonic() - began >= 0.14 and not looks
    writer = raw()
    timer = threading.Timer(0.1, put, (writer, "a", 2))
    timer.start()
    assert list(client.fetch({}, wait_ms=20_000)) == [A2]
    assert time.monotonic() - began < 10 and set(looks) == {"a"} and len(looks) <= 2
    timer.join()
    # What came between two requests is found at once.
    put(writer, "b")
    assert set(client.fetch({A2: 1}, wait_ms=20_000)) == {B0}


def test_a_request_that_was_overtaken_in_its_session_is_refused(
    broker: kdirect.Broker, world: Any
) -> None:
    client = world(HIGHEST)
    client.fetch(ALL)
    client.connection.send(client.request({}, wait_ms=300), client.version)
    wait_until(lambda: broker.statistics()["broker_fetch_waits"] >= 1, "it waits")
    client.epoch = 2
    client.connection.send(client.request({}), client.version)
    first, second = client.connection.receive(), client.connection.receive()
    assert first.error_code == E.INVALID_FETCH_SESSION_EPOCH
    assert second.error_code == 0


def test_partitions_that_brought_records_come_last_the_next_time(world: Any) -> None:
    client = world(HIGHEST)
    for name, index in (A0, A1, B0):
        put(client.connection, name, index)
    found = client.fetch(ALL, max_bytes=1)
    assert [k for k, x in found.items() if x.records] == [A0]
    turns = []
    for _ in range(3):
        found = client.fetch({}, max_bytes=1)
        turns += [k for k, x in found.items() if x.records]
    assert turns == [A0, A1, B0]


def test_sessions_are_compared_with_full_fetches(world: Any, seed: int, raw: Any) -> None:
    """Whatever is produced, forgotten and asked for, what a session has told at last is what a full
    Fetch tells."""
    chance = random.Random(seed)
    client = world(chance.choice((7, 12, 13, HIGHEST)))
    full = world(client.version)
    offsets = dict.fromkeys(ALL, 0)
    known: dict[tuple[str, int], tuple[int, int]] = {}
    asked = dict(offsets)
    forgotten: dict[str, list[int]] = {}
    for _ in range(120):
        found = client.fetch(asked, forgotten)
        asked, forgotten = {}, {}
        for key, x in found.items():
            known[key] = x.high_watermark, x.error_code
            if x.records and chance.random() < 0.8:
                offsets[key] = asked[key] = x.high_watermark
        for key in chance.sample(list(ALL), chance.randrange(3)):
            put(client.connection, *key)
        if chance.random() < 0.2 and len(offsets) > 1:
            key = chance.choice(list(offsets))
            offsets.pop(key), asked.pop(key, None), known.pop(key, None)
            forgotten.setdefault(key[0], []).append(key[1])
        elif chance.random() < 0.3:
            for key in ALL.keys() - offsets.keys():
                offsets[key] = asked[key] = 0
    while found := client.fetch(asked, forgotten):
        asked, forgotten = {}, {}
        for key, x in found.items():
            known[key] = x.high_watermark, x.error_code
            offsets[key] = asked[key] = x.high_watermark
    full.epoch = -1
    whole = full.fetch(offsets)
    assert {k: (x.high_watermark, x.error_code) for k, x in whole.items()} == known


# -- which sessions are kept -----------------------------------------------------------------------
def rows(count: int) -> dict[Any, SessionRow]:
    return {("t", i): SessionRow("t", i) for i in range(count)}


def test_the_cache_evicts_as_kafka_does() -> None:
    numbers = iter(range(1, 100))
    cache = SessionCache(2, 1000, lambda: next(numbers))
    ended: list[int] = []
    cache.ended = lambda session: ended.append(session.number)

    def create(now_ms: int, size: int) -> FetchSession | None:
        return cache.create(now_ms, False, rows(size))

    first, second = create(0, 10), create(0, 5)
    assert first is not None and second is not None
    assert create(10, 100) is None, "none is old enough"
    cache.touch(first, 900)
    cache.touch(second, 1001)
    # `second` was used when it was old enough: a larger one takes its place, and no other.
    assert create(1100, 5) is None and create(1100, 4) is None
    third = create(1100, 6)
    assert third is not None and ended == [second.number]
    # One that was not used for so long goes whatever its size is.
    assert create(1901, 1) is not None and ended == [second.number, first.number]
    assert cache.evicted == 2 and len(cache.sessions) == 2
    cache.remove(third.number)
    cache.remove(third.number)
    assert ended[2:] == [third.number] and cache.get(third.number) is None
    assert SessionCache(0, 1000, lambda: 1).create(0, False, rows(1)) is None


def test_epochs_go_round() -> None:
    assert [next_epoch(e) for e in (-1, 0, 1, MAX_EPOCH)] == [-1, 1, 2, 1]


def test_without_slots_there_are_no_sessions(tmp_path: Any, raw: Any, broker: Any) -> None:
    properties = {"max.incremental.fetch.session.cache.slots": 1}
    with kdirect.Broker(tmp_path / "one", properties=properties) as one:
        connection = raw(one.bootstrap_servers)
        ids = make_topics(connection, {"a": 3, "b": 1})
        first, second = (Client(connection, HIGHEST, ids) for _ in range(2))
        first.fetch(ALL)
        assert list(second.fetch(ALL)) == list(ALL)
        assert first.session_id > 0 and second.session_id == 0
