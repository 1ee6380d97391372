"""Readers that fetch what is in remote storage only past the broker: over every transport and each
way of access every record comes once, and the broker fetches nothing meanwhile."""

from __future__ import annotations

import logging
import os
import pickle
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import kdirect
from kdirect import metrics
from kdirect.client import cold
from kdirect.errors import (
    KdirectError,
    ObjectNotFoundError,
    OffsetOutOfRangeError,
    RemoteAccessError,
)
from tests.client.cold_logs import TP, ColdLog, cold_log, value_of
from tests.object_servers import gate_to
from tests.support import wait_until

COLD = {name for name in metrics.names("reader") if name.startswith("client_cold_")}
TRANSPORTS = ("shm", "tcp")
ACCESS = ("directory", "config", "presigned")


@pytest.fixture(scope="module")
def logs(
    tmp_path_factory: pytest.TempPathFactory, object_stores: Any
) -> Iterator[dict[str, ColdLog]]:
    """Of each way of access a broker whose topic is cold."""
    directory = tmp_path_factory.mktemp("cold")
    with (
        cold_log(directory / "a", object_stores["directory"].fresh()) as on_disk,
        cold_log(directory / "b", object_stores["s3"].fresh()) as config,
        cold_log(directory / "c", object_stores["s3"].fresh(), "presigned") as presigned,
    ):
        yield {"directory": on_disk, "config": config, "presigned": presigned}


def read(log: ColdLog, start: int, stop: int, **more: Any) -> tuple[list[int], dict[str, int]]:
    """The offsets of a range, whose values are looked at; and what its reader counts."""
    offsets: list[int] = []
    with (
        kdirect.connect(log.settings(**more)) as session,
        session.reader(TP, start, stop) as reader,
    ):
        for batch in reader:
            found = batch.column("offset").to_pylist()
            assert batch.column("value").to_pylist() == [value_of(i, log.size) for i in found]
            offsets += found
        return offsets, reader.statistics()


def consume(log: ColdLog, count: int, **more: Any) -> tuple[list[int], dict[str, int]]:
    offsets = []
    with kdirect.Consumer(log.settings(**more)) as consumer:
        consumer.assign({TP: 0})
        while len(offsets) < count:
            message = consumer.poll(10)
            assert message is not None, f"nothing after {len(offsets)} records"
            assert message.value() == value_of(message.offset(), log.size)
            offsets.append(message.offset())
        assert consumer.poll(0.05) is None
        return offsets, consumer.statistics()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("access", ACCESS)
def test_a_reader_gets_every_record_once(
    logs: dict[str, ColdLog], access: str, transport: str
) -> None:
    log = logs[access]
    before = log.gets_of_the_broker()
    offsets, counts = read(log, 0, log.records, transport=transport, cold_reads="direct")
    assert offsets == list(range(log.records))
    assert log.gets_of_the_broker() == before
    needed = sum(s.size for s in log.segments)
    assert counts["client_cold_gets"] == len(log.segments), "one for each small object"
    assert set(counts) <= metrics.names("reader") and set(counts) >= COLD
    assert needed < counts["client_cold_bytes"]
    # The head is read by READs or by Fetch.
    assert counts["read_bytes" if transport == "shm" else "fetched_bytes"] > 0


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("access", ACCESS)
def test_a_consumer_sees_one_log(logs: dict[str, ColdLog], access: str, transport: str) -> None:
    log = logs[access]
    before = log.gets_of_the_broker()
    offsets, counts = consume(log, log.records, transport=transport, cold_reads="direct")
    assert offsets == list(range(log.records))
    assert log.gets_of_the_broker() == before
    assert counts["client_cold_gets"] == len(log.segments)
    assert set(counts) <= metrics.names("consumer") and set(counts) >= COLD
    assert counts["read_bytes" if transport == "shm" else "fetched_bytes"] > 0


@pytest.mark.parametrize("access", ACCESS)
def test_views_of_cold_records(logs: dict[str, ColdLog], access: str) -> None:
    """They keep what was fetched, also when reader and consumer have ended."""
    log = logs[access]
    settings = log.settings(cold_reads="direct")
    with kdirect.connect(settings) as session, session.reader(TP, 0, log.records) as reader:
        batches = list(reader.batches(views=True))
        assert reader.statistics()["client_cold_gets"] == len(log.segments)
    messages: list[kdirect.Message] = []
    with kdirect.Consumer(settings, views=True) as consumer:
        consumer.assign({TP: 0})
        while len(messages) < log.records:
            messages += consumer.consume(log.records - len(messages), 10)
    wanted = [value_of(i, log.size) for i in range(log.records)]
    assert [v for batch in batches for v in batch.column("value").to_pylist()] == wanted
    assert [bytes(m.value()) for m in messages] == wanted


def test_a_reader_of_a_store_of_googles(tmp_path: Path, object_stores: Any) -> None:
    """Small objects, and some of several pieces."""
    for segment_bytes, size in ((16384, 90), (1 << 20, 1600)):
        place = object_stores["gcs"].fresh()
        directory = tmp_path / str(size)
        with cold_log(directory, place, size=size, segment_bytes=segment_bytes) as log:
            offsets, counts = read(
                log, 0, log.records, transport="tcp", cold_reads="direct",
                cold_buffer_bytes=1 << 20,
            )  # fmt: skip
            assert offsets == list(range(log.records)) and log.gets_of_the_broker() == 0
            assert counts["client_cold_bytes"] > sum(x.size for x in log.segments)
            pieces = counts["client_cold_gets"] / len(log.segments)
            assert pieces == 1 if size == 90 else pieces > 3


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_through_the_broker(logs: dict[str, ColdLog], transport: str) -> None:
    log = logs["directory"]
    offsets, counts = read(log, 0, log.records, transport=transport, cold_reads="broker")
    assert offsets == list(range(log.records))
    assert "client_cold_gets" not in counts and log.gets_of_the_broker() > 0
    assert set(log.broker.server.remote.statistics()) == metrics.names("storage")
    assert consume(log, log.records, transport=transport, cold_reads="broker")[0] == offsets


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_range_in_the_middle(logs: dict[str, ColdLog], transport: str) -> None:
    """It begins and ends within segments, and takes from them what it needs."""
    log = logs["directory"]
    segments = log.segments
    for start, stop in (
        (segments[1].base_offset + 7, segments[1].base_offset + 9),
        (segments[2].end_offset - 1, segments[3].base_offset + 1),
        (segments[0].base_offset + 5, segments[4].end_offset - 5),
        (segments[-1].end_offset - 2, log.records - 1),
    ):
        offsets, counts = read(log, start, stop, transport=transport, cold_reads="direct")
        assert offsets == list(range(start, stop)), (start, stop)
        inside = [s for s in segments if s.base_offset < stop and s.end_offset > start]
        assert counts["client_cold_gets"] <= len(inside) + 2


# -- large objects ---------------------------------------------------------------------------------

# Pieces of 1 MiB.
IN_PIECES = {"transport": "tcp", "cold_reads": "direct", "cold_buffer_bytes": 4 << 20}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory, object_stores: Any) -> Iterator[ColdLog]:
    """Segments of 3 MiB: several pieces each, with `IN_PIECES`."""
    directory = tmp_path_factory.mktemp("large")
    place = object_stores["s3"].fresh()
    with cold_log(
        directory, place, records=9000, size=1600, batch=50, segment_bytes=3 << 20
    ) as log:
        assert len(log.segments) >= 4 and all(s.size > 2 << 20 for s in log.segments)
        yield log


def test_a_whole_range_costs_little_more_than_its_bytes(large: ColdLog) -> None:
    stop = large.segments[-1].end_offset
    offsets, counts = read(large, 0, stop, **IN_PIECES)
    assert offsets == list(range(stop))
    needed = sum(s.size for s in large.segments)
    assert needed < counts["client_cold_bytes"] <= 1.05 * needed
    # Of each object its tail, and pieces of 1 MiB that end with a batch.
    assert 4 * len(large.segments) <= counts["client_cold_gets"] <= 6 * len(large.segments)
    assert counts["client_cold_lookups"] == 1


@contextmanager
def seen_through_a_gate(log: ColdLog) -> Iterator[tuple[Any, ColdLog]]:
    """What clients read goes through it, and what the broker reads does not."""
    locations = log.broker.server.remote.locations
    with gate_to(log.place) as (gate, place):
        locations._store = place.store()
        try:
            yield gate, ColdLog(log.broker, place, log.size)
        finally:
            locations._store = log.broker.server.remote.store


def test_the_requests_at_the_store(large: ColdLog) -> None:
    """What the client counts is what the server sees; of each object, pyarrow asks for the size."""
    with seen_through_a_gate(large) as (gate, through):
        stop = large.segments[1].end_offset
        offsets, counts = read(through, 0, stop, **IN_PIECES)
    assert offsets == list(range(stop))
    gets = [r for r in gate.requests if r.method == "GET"]
    assert len(gets) == counts["client_cold_gets"]
    assert gate.lines.count("HEAD") <= 2 * 4 and not [r for r in gate.requests if "list" in r.query]
    ranges = [tuple(map(int, r.range.removeprefix("bytes=").split("-"))) for r in gets]
    assert sum(b - a + 1 for a, b in ranges) == counts["client_cold_bytes"]
    assert max(b - a + 1 for a, b in ranges) <= 1 << 20


def test_a_range_in_a_large_object(large: ColdLog) -> None:
    segment = large.segments[1]
    middle = (segment.base_offset + segment.end_offset) // 2
    offsets, counts = read(large, middle, middle + 3, **IN_PIECES)
    assert offsets == [middle, middle + 1, middle + 2]
    assert counts["client_cold_gets"] == 2 and counts["client_cold_bytes"] < 256 << 10


def test_what_is_asked_for_ahead_is_bounded(
    large: ColdLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the buffer; by half of it where the store is quick."""
    most: list[int] = []
    fill = cold.ColdReads._fill

    def watched(reads: cold.ColdReads, found: Any) -> None:
        fill(reads, found)
        most.append(reads._under_way)

    monkeypatch.setattr(cold.ColdReads, "_fill", watched)
    stop = large.segments[-1].end_offset
    piece = IN_PIECES["cold_buffer_bytes"] // cold.PIECES
    for quick_s, allowed in ((3600.0, 2 * piece), (0.0, 4 * piece)):
        monkeypatch.setattr(cold, "QUICK_S", quick_s)
        most.clear()
        offsets, _ = read(large, 0, stop, **IN_PIECES)
        assert offsets == list(range(stop))
        assert allowed - piece < max(most) <= allowed + piece


@pytest.mark.parametrize(
    ("buffer", "partitions", "piece"),
    [
        (16 << 20, 1, 4 << 20),
        (16 << 20, 4, 1 << 20),
        (16 << 20, 100, 512 << 10),
        (1 << 30, 1, 4 << 20),
        (10 << 20, 1, 2 << 20),
        (1 << 20, 9, 256 << 10),
        (65536, 3, 65536),
    ],
)
def test_pieces_share_the_buffer(buffer: int, partitions: int, piece: int) -> None:
    settings = {"max.batch.bytes": 1 << 20, "cold.buffer.bytes": buffer}
    nothing: Any = None
    reads = cold.ColdReads(nothing, settings, nothing, nothing)
    reads._logs = {kdirect.TopicPartition("t", n): nothing for n in range(partitions)}
    assert reads._piece_bytes() == piece


def test_pieces_that_do_not_end_with_a_batch(tmp_path: Path, object_stores: Any) -> None:
    """An index that knows few batches, and batches larger than a piece."""
    place = object_stores["directory"].fresh()
    more = {"log.index.interval.bytes": str(1 << 20), "num.partitions": "1"}
    with cold_log(
        tmp_path, place, records=4000, size=1000, batch=300, segment_bytes=2 << 20, more=more
    ) as log:
        for buffer in (65536, 300_000, 4 << 20):
            for start in (0, 333):
                offsets, counts = read(
                    log, start, log.records, transport="tcp", cold_reads="direct",
                    cold_buffer_bytes=buffer,
                )  # fmt: skip
                assert offsets == list(range(start, log.records)), (buffer, start)
                assert counts["client_cold_gets"] > 4


@pytest.mark.parametrize("kind", ["directory", "s3"])
def test_prefer_cold_leaves_the_broker_alone(tmp_path: Path, object_stores: Any, kind: str) -> None:
    """What is at the broker, too, comes from the store."""
    place = object_stores[kind].fresh()
    with cold_log(tmp_path, place, settle=False, local_retention="-2") as log:
        partition = log.partition
        assert partition.local_log_start_offset == 0
        end = log.broker.server.remote.end_offset(partition)
        assert 0 < end < log.records
        for transport in TRANSPORTS:
            for prefers in (False, True):
                given = {"transport": transport, "prefer_cold": prefers}
                offsets, counts = read(log, 0, end, **given)
                assert offsets == list(range(end))
                hot = counts.get("read_bytes", 0) + counts.get("fetched_bytes", 0)
                assert (hot == 0) == prefers
                assert (counts.get("client_cold_gets", 0) > 0) == prefers
                assert log.gets_of_the_broker() == 0
                assert consume(log, log.records, **given)[0] == list(range(log.records))


# -- what goes wrong -------------------------------------------------------------------------------


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        r.getMessage()
        for r in caplog.records
        if r.levelno >= logging.WARNING and "read through the broker" in r.getMessage()
    ]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_wrong_credentials(
    logs: dict[str, ColdLog], transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    log = logs["config"]
    wrong = {"remote.config.secret_key": "wrong-secret-of-this-test", "transport": transport}
    settings = log.settings() | wrong
    with kdirect.connect(settings | {"cold.reads": "auto"}) as session:
        for _ in range(2):
            with session.reader(TP, 0, log.records) as reader:
                assert sum(b.num_rows for b in reader) == log.records
                assert reader.statistics()["fetched_bytes"] > 0
    (warning,) = warnings_of(caplog)
    assert "secret" in warning and "wrong-secret" not in caplog.text
    with (
        kdirect.connect(settings | {"cold.reads": "direct"}) as session,
        session.reader(TP, 0, log.records) as reader,
        pytest.raises(RemoteAccessError),
    ):
        list(reader)
    assert "wrong-secret" not in caplog.text


def test_a_consumer_falls_back(logs: dict[str, ColdLog], caplog: pytest.LogCaptureFixture) -> None:
    log = logs["config"]
    for transport in TRANSPORTS:
        caplog.clear()
        wrong = {"remote.config.secret_key": "another-wrong-secret", "transport": transport}
        with kdirect.Consumer(log.settings() | wrong) as consumer:
            consumer.assign({TP: 0})
            found: list[int] = []
            while len(found) < log.records:
                found += [m.offset() for m in consumer.consume(500, 10)]
        assert found == list(range(log.records))
        assert len(warnings_of(caplog)) == 1


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_broker_that_allows_no_direct_reads(
    tmp_path: Path, transport: str, object_stores: Any
) -> None:
    with cold_log(tmp_path, object_stores["directory"].fresh(), "broker") as log:
        offsets, counts = read(log, 0, log.records, transport=transport, cold_reads="auto")
        assert offsets == list(range(log.records)) and counts["client_cold_gets"] == 0
        with pytest.raises(RemoteAccessError, match=r"of this broker is broker.*cold\.reads=auto"):
            read(log, 0, log.records, transport=transport, cold_reads="direct")
        hot = log.partition.local_log_start_offset
        assert read(log, hot, log.records, transport=transport, cold_reads="direct")[0]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_records_that_are_deleted_meanwhile(
    tmp_path: Path, transport: str, object_stores: Any
) -> None:
    """Objects that are gone are looked up again, and then it is the usual error, or reset."""
    with cold_log(tmp_path, object_stores["directory"].fresh()) as log:
        settings = log.settings(transport=transport, cold_reads="direct", cold_buffer_bytes=65536)
        start = log.segments[-2].base_offset
        store = log.place.store()
        keys = [log.key(s) for s in log.segments[:-2]]
        with (
            kdirect.connect(settings) as session,
            session.reader(TP, 0, log.records, target_rows=20) as reader,
            kdirect.Consumer(settings) as consumer,
        ):
            batches = reader.batches()
            first = next(batches).num_rows
            consumer.assign({TP: 0})
            polled = [consumer.poll(10).offset()]
            session.admin.delete_records({TP: start})
            wait_for_absence(store, keys)
            with pytest.raises(OffsetOutOfRangeError, match="outside"):
                for batch in batches:
                    first += batch.num_rows
            assert reader.next_offset == first < start
            while polled[-1] < log.records - 1:
                message = consumer.poll(10)
                assert message is not None
                polled.append(message.offset())
        gap = [(a, b) for a, b in pairwise(polled) if b != a + 1]
        assert len(gap) == 1 and gap[0][1] == start, "auto.offset.reset=earliest"


def wait_for_absence(store: Any, keys: list[str]) -> None:
    wait_until(lambda: all(store.size(key) is None for key in keys), "the deletion of objects")


def test_an_object_that_is_lost(tmp_path: Path, object_stores: Any) -> None:
    with cold_log(tmp_path, object_stores["directory"].fresh()) as log:
        key = log.key(log.segments[1])
        log.place.store().delete(key)
        for mode in ("direct", "auto"):
            with pytest.raises(ObjectNotFoundError, match=key):
                read(log, 0, log.records, transport="tcp", cold_reads=mode)


def damage_batch(data: bytearray) -> None:
    data[3000] ^= 1


def damage_offset(data: bytearray) -> None:
    data[7] ^= 3  # of the first base offset, which no CRC covers


def damage_footer(data: bytearray) -> None:
    data[-40] ^= 1


def damage_index(data: bytearray, log_bytes: int) -> None:
    data[log_bytes + 3] ^= 1


def cut(data: bytearray) -> None:
    del data[-100:]


DAMAGES = {"batch": damage_batch, "offset": damage_offset, "footer": damage_footer, "cut": cut}


@pytest.mark.parametrize("kind", ["batch", "offset", "footer", "cut", "index", "swapped"])
@pytest.mark.parametrize("access", ["directory", "presigned"])
def test_damaged_objects_are_named(
    tmp_path: Path, object_stores: Any, kind: str, access: str
) -> None:
    place = object_stores["directory" if access == "directory" else "s3"].fresh()
    with cold_log(tmp_path, place, "config" if access == "directory" else access) as log:
        segment, other = log.segments[1], log.segments[2]
        key, store = log.key(segment), log.place.store()
        size = store.size(key)
        assert size is not None
        data = bytearray(store.get(key, 0, size))
        if kind == "swapped":
            data = bytearray(store.get(log.key(other), 0, store.size(log.key(other)) or 0))
        elif kind == "index":
            damage_index(data, segment.size)
        else:
            DAMAGES[kind](data)
        store.delete(key)
        store.put(key, len(data), [bytes(data)])
        starts = [0, segment.base_offset + 3]
        for transport in TRANSPORTS:
            for start in starts:
                with pytest.raises(KdirectError) as e:
                    read(log, start, log.records, transport=transport, cold_reads="direct")
                assert key in str(e.value), str(e.value)
                assert "X-Amz" not in str(e.value)
        with kdirect.Consumer(log.settings(cold_reads="direct")) as consumer:
            consumer.assign({TP: 0})
            found: list[int] = []
            with pytest.raises(KdirectError) as e:
                while True:
                    found += [m.offset() for m in consumer.consume(500, 10)]
            assert key in str(e.value) and found == list(range(found[-1] + 1))
            assert e.value.topic_partition == TP and e.value.offset == found[-1] + 1
            consumer.seek(TP, segment.end_offset)
            assert consumer.poll(10).offset() == segment.end_offset
        # What comes before it is read, and what comes after it.
        before, _ = read(log, 0, segment.base_offset, transport="tcp", cold_reads="direct")
        after, _ = read(log, segment.end_offset, log.records, transport="tcp", cold_reads="direct")
        assert before + after == [
            i for i in range(log.records) if not segment.base_offset <= i < segment.end_offset
        ]


def test_a_signed_url_that_has_expired(tmp_path: Path, object_stores: Any) -> None:
    """The broker is asked again, and reading goes on where it was."""
    place = object_stores["s3"].fresh()
    more = {"remote.log.presign.expiry.ms": "1000"}
    with cold_log(tmp_path, place, "presigned", more=more) as log:
        settings = log.settings(transport="tcp", cold_reads="direct", cold_buffer_bytes=65536)
        with kdirect.connect(settings) as session, session.reader(TP, 0, log.records) as reader:
            reader._decoder_settings["target_rows"] = 20
            batches = reader.batches()
            count = next(batches).num_rows
            time.sleep(2.1)
            count += sum(b.num_rows for b in batches)
            assert count == log.records
            assert reader.statistics()["client_cold_lookups"] >= 2


def test_a_child_opens_its_own(logs: dict[str, ColdLog]) -> None:
    """PySpark forks its workers from a process that may have read before."""
    log = logs["config"]
    settings = log.settings(transport="tcp", cold_reads="direct")
    with kdirect.connect(settings) as session, session.reader(TP, 0, 100) as reader:
        assert sum(b.num_rows for b in reader) == 100
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                offsets, counts = read(log, 0, 200, transport="tcp", cold_reads="direct")
                status = 0 if offsets == list(range(200)) and counts["client_cold_gets"] else 2
            finally:
                os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0
        with session.reader(TP, 100, 300) as again:
            assert sum(b.num_rows for b in again) == 200


# -- as a consumer -------------------------------------------------------------------------------


def test_pauses_seeks_and_columns(logs: dict[str, ColdLog]) -> None:
    log = logs["directory"]
    for transport in TRANSPORTS:
        with kdirect.Consumer(log.settings(transport=transport, cold_reads="direct")) as consumer:
            consumer.assign({TP: 0})
            assert consumer.poll(10).offset() == 0
            consumer.pause([TP])
            assert consumer.poll(0.1) is None
            consumer.resume([TP])
            assert consumer.poll(10).offset() == 1
            consumer.seek(TP, 777)
            assert consumer.poll(10).offset() == 777
            consumer.seek(TP, log.records - 1)  # hot
            assert consumer.poll(10).offset() == log.records - 1
            consumer.seek(TP, 5)
            found = [consumer.poll(10).offset()]
            while found[-1] < log.records - 1:
                batch = consumer.poll_arrow(10, max_bytes=30_000)
                assert batch is not None
                found += batch.column("offset").to_pylist()
            assert found == list(range(5, log.records))


def test_what_is_appended_meanwhile_follows(tmp_path: Path, object_stores: Any) -> None:
    """Rolls and deletions at the broker go on under the reader's feet."""
    with cold_log(tmp_path, object_stores["directory"].fresh(), records=600) as log:
        settings = log.settings(transport="shm", cold_reads="direct", cold_buffer_bytes=65536)
        with kdirect.Consumer(settings) as consumer:
            consumer.assign({TP: 0})
            found: list[int] = []
            for _ in range(4):
                found += [m.offset() for m in consumer.consume(100, 10)]
                log.produce(200)
                log.settle()
            while len(found) < log.records:
                found += [m.offset() for m in consumer.consume(100, 10)]
            assert found == list(range(log.records))
            assert consumer.statistics()["client_cold_gets"] > 0
        assert log.gets_of_the_broker() == 0


def test_many_partitions_in_one_request(tmp_path: Path, object_stores: Any) -> None:
    """None of them is read through the broker because an answer has no room for it."""
    partitions = 70
    place = object_stores["directory"].fresh()
    with cold_log(tmp_path, place, records=400) as log:
        with kdirect.connect(log.servers) as session:
            session.admin.create_topic(
                "many",
                partitions,
                configs={
                    "remote.storage.enable": "true",
                    "segment.bytes": "4096",
                    "local.retention.bytes": "1",
                },
            )
        with kdirect.Producer({"bootstrap.servers": log.servers, "transport": "tcp"}) as producer:
            for _ in range(5):
                for i in range(partitions):
                    producer.produce("many", bytes(1500), partition=i)
                producer.flush()
        tps = [kdirect.TopicPartition("many", i) for i in range(partitions)]
        known = log.broker.server.logs.partitions
        wait_until(lambda: all(len(known[tp].segments) == 1 for tp in tps), "their copies")
        with kdirect.Consumer(log.settings(transport="tcp", cold_reads="direct")) as consumer:
            consumer.assign(dict.fromkeys(tps, 0))
            found = set()
            while len(found) < 5 * partitions:
                for m in consumer.consume(1000, 10):
                    assert (m.partition(), m.offset()) not in found
                    found.add((m.partition(), m.offset()))
            assert consumer.statistics()["client_cold_lookups"] >= 2
        assert log.gets_of_the_broker() == 0


# -- what was planned elsewhere --------------------------------------------------------------------


def test_readers_that_were_told_the_places(logs: dict[str, ColdLog]) -> None:
    """They ask no broker."""
    log = logs["config"]
    with kdirect.connect(log.settings(cold_reads="direct")) as session:
        places = session.locate({TP: (30, log.records)})[TP]
    assert [p.segment_id for p in places] == [
        s.segment_id for s in log.segments if s.end_offset > 30
    ]
    told = pickle.loads(pickle.dumps(places))
    assert told == places
    stop = places[-1].end_offset
    settings = log.settings(cold_reads="direct", transport="tcp")
    for start in (30, 31, places[2].base_offset + 1):
        before = log.broker.statistics()["broker_requests"]
        with kdirect.connect(settings | {"client.id": f"told {start}"}) as session:
            session.remember_places(told)
            with session.reader(TP, start, stop) as reader:
                offsets = [o for b in reader for o in b.column("offset").to_pylist()]
            assert offsets == list(range(start, stop))
            assert log.broker.statistics()["broker_requests"] == before
            with session.reader(TP, start, stop) as reader:  # it was not told
                assert sum(b.num_rows for b in reader) == stop - start
                assert reader.statistics()["client_cold_lookups"] == 1


def test_places_that_are_no_longer_right(tmp_path: Path, object_stores: Any) -> None:
    """The broker is asked again, and what it says counts."""
    with (
        cold_log(tmp_path, object_stores["directory"].fresh()) as log,
        kdirect.connect(log.settings(cold_reads="direct")) as session,
    ):
        places = session.locate({TP: (0, log.records)})[TP]
        start = places[3].base_offset
        session.admin.delete_records({TP: start})
        wait_for_absence(log.place.store(), [p.key for p in places[:3]])
        session.remember_places(places)
        with (
            session.reader(TP, 0, log.records) as reader,
            pytest.raises(OffsetOutOfRangeError, match="outside"),
        ):
            list(reader)
        with session.reader(TP, start, log.records) as reader:
            assert sum(b.num_rows for b in reader) == log.records - start
            assert reader.statistics()["client_cold_gets"] >= len(places) - 3


@pytest.mark.parametrize("access", ["config", "presigned"])
def test_a_store_with_failures(tmp_path: Path, object_stores: Any, access: str, seed: int) -> None:
    """It answers 503 and 500, and ends connections: every record comes once."""
    chance = random.Random(seed)

    def fault(request: Any) -> Any:
        if request.method == "GET" and request.range and chance.random() < 0.1:
            return chance.choice(["cut", (503, "SlowDown"), (500, "InternalError")])
        return None

    with (
        gate_to(object_stores["s3"].fresh()) as (gate, place),
        cold_log(tmp_path, place, access) as log,
    ):
        gate.fault = fault
        for transport in TRANSPORTS:
            start = chance.randrange(log.records)
            offsets, _ = read(log, start, log.records, transport=transport)
            assert offsets == list(range(start, log.records))
            assert consume(log, log.records, transport=transport)[0] == list(range(log.records))
        gate.fault = lambda request: None


@pytest.mark.parametrize("access", ["config", "presigned"])
def test_a_store_that_is_silent(
    tmp_path: Path, object_stores: Any, access: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Readers go on through the broker before their time is over."""
    place = object_stores["s3"].fresh()
    with (
        cold_log(tmp_path, place, access, records=300) as log,
        seen_through_a_gate(log) as (gate, through),
    ):
        gate.fault = lambda request: "silent" if request.method == "GET" else None
        patience = {"config": 10_000, "presigned": 3000}[access]  # curl counts whole seconds
        given = {"transport": "tcp", "request_timeout_ms": patience}
        offsets, counts = read(through, 0, log.records, **given)
        assert offsets == list(range(log.records)) and counts["fetched_bytes"] > 0
        (warning,) = warnings_of(caplog)
        assert log.key(log.segments[0]) in warning
