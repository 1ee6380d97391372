"""What tiered storage promises of a broker as a whole: that a store which hangs, is full or refuses
harms nobody else, what survives a restart, and that each figure moves when its thing happens."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from kdirect.format import protocol as p
from kdirect.format.remote_metadata import RemoteSegment, RemoteSegmentUpdate, SegmentState
from kdirect.format.schema import build
from kdirect.format.segment_object import CustomMetadata, TailPlace, pack_custom_metadata
from kdirect.log.directories import INDEX_CACHE
from kdirect.model import TopicPartition
from kdirect.remote_metrics import REMOTE_ROWS
from tests.broker.conftest import Raw
from tests.broker.test_topic_properties import alter
from tests.object_servers import CUT, Place, gate_to
from tests.storage.test_hard_cases import process
from tests.storage.tiered_broker import (
    TIERED,
    TOPIC,
    TieredBroker,
    tiered_broker,
)

RECORDS = 700  # three segments, two of which are cold
METADATA = TopicPartition("__remote_log_metadata", 0)


def everything(start: int = 0, end: int = RECORDS) -> list[tuple[int, int]]:
    return [(i, i) for i in range(start, end)]


# -- a store that hangs ----------------------------------------------------------------------------


def test_producers_and_consumers_of_the_tail_wait_for_no_get(
    object_stores: Any, tmp_path: Path
) -> None:
    """A broker of its own process with two threads that read, both of which hang in a GET: two
    hundred records are produced and consumed meanwhile, one after the other."""
    count, hanging, may_go = 200, [], threading.Event()
    with (
        gate_to(object_stores["s3"].fresh()) as (gate, place),
        process(place, tmp_path / "log", **{"remote.log.reader.threads": 2}) as (_, address),
    ):
        admin = AdminClient({"bootstrap.servers": address, "log_level": 0})
        admin.create_topics([NewTopic(TOPIC, 2, 1, config=TIERED)])[TOPIC].result(20)
        producer = confluent_kafka.Producer(
            {"bootstrap.servers": address, "linger.ms": 0, "log_level": 0}
        )
        for i in range(2 * RECORDS):
            producer.produce(TOPIC, b"%08d" % (i // 2) + bytes(92), partition=i % 2)
            if i % 40 == 0:
                producer.flush()
        producer.flush()
        end = time.monotonic() + 30
        while gate.lines.count("PUT") < 4 and time.monotonic() < end:
            time.sleep(0.02)
        time.sleep(1)  # local retention looks each 50 ms

        def fault(request: Any) -> None:
            if request.method in ("GET", "HEAD"):
                hanging.append(request.path)
                assert may_go.wait(60)
                hanging.remove(request.path)

        gate.fault = fault
        cold = confluent_kafka.Consumer(
            {"bootstrap.servers": address, "group.id": "c", "log_level": 0}
        )
        cold.assign([confluent_kafka.TopicPartition(TOPIC, i, 0) for i in (0, 1)])
        got: Counter[int] = Counter()
        while len(hanging) < 2:
            assert time.monotonic() < end, "nothing is read from the store"
            got.update(m.partition() for m in cold.consume(1000, 0.1) if not m.error())
        assert not got
        tail = confluent_kafka.Consumer(
            {"bootstrap.servers": address, "group.id": "t", "log_level": 0}
        )
        tail.assign([confluent_kafka.TopicPartition(TOPIC, 0, RECORDS)])
        for number in range(RECORDS, RECORDS + count):
            producer.produce(TOPIC, b"%08d" % number, partition=0)
            assert producer.flush(5) == 0, f"record {number} waits"
            (message,) = tail.consume(1, 5) or [None]
            assert message is not None and message.offset() == number, f"record {number} waits"
        assert len(hanging) == 2, "a GET was answered meanwhile"
        may_go.set()
        while min(got[0], got[1]) < RECORDS:
            assert time.monotonic() < end + 30, got
            got.update(m.partition() for m in cold.consume(1000, 0.1) if not m.error())
        tail.close()
        cold.close()


# -- a store that is full, or refuses --------------------------------------------------------------


@pytest.mark.parametrize(
    "answer, says",
    [
        ((507, "InsufficientStorage"), "InsufficientStorage"),
        ((403, "AccessDenied"), "permit the credentials"),
    ],
    ids=["full", "read-only"],
)
def test_a_store_that_takes_nothing_is_told_once(
    object_stores: Any,
    tmp_path: Path,
    answer: tuple[int, str],
    says: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is one topic's objects that it refuses: those of others are copied meanwhile."""
    caplog.set_level(logging.WARNING, "kdirect.storage")
    with (
        gate_to(object_stores["s3"].fresh()) as (gate, place),
        tiered_broker(place, tmp_path / "log") as tiers,
    ):
        gate.fault = lambda request: (
            answer if request.method == "PUT" and f"/{TOPIC}-" in request.path else None
        )
        tiers.create()
        tiers.create("other")
        tiers.produce(0, RECORDS)
        tiers.wait(lambda: tiers.figure("remote_copy_errors") > 1)
        other = confluent_kafka.Producer({"bootstrap.servers": tiers.address, "log_level": 0})
        for i in range(RECORDS):
            other.produce("other", b"%08d" % i + bytes(92))
            if i % 20 == 0:
                other.flush()
        other.flush()
        logs = tiers.broker.server.logs.partitions
        tiers.wait(lambda: logs[TopicPartition("other", 0)].local_log_start_offset > 0)
        said = [r.getMessage() for r in caplog.records if f"copy of {TOPIC}-0" in r.getMessage()]
        assert len(said) == 1, said
        assert f"/{TOPIC}-" in said[0] and ".kseg" in said[0] and says in said[0], said
        assert tiers.partition.local_log_start_offset == 0
        assert tiers.consume(0, RECORDS) == everything()
        gate.fault = lambda request: None
        tiers.settle()
        assert tiers.partition.local_log_start_offset > 0
        assert tiers.consume(0, RECORDS) == everything()


def test_a_directory_that_is_full(small_disk: Path, tmp_path: Path) -> None:
    """Of a mebibyte: what finds no room stays here, and goes there when there is some."""
    place = Place(kind="directory", uri=(small_disk / "tiers").as_uri())
    ballast = small_disk / "ballast"
    with tiered_broker(place, tmp_path / "log") as tiers:
        ballast.write_bytes(bytes(1000 << 10))
        tiers.create()
        tiers.produce(0, RECORDS)
        tiers.wait(lambda: tiers.figure("remote_copy_errors") > 0)
        assert tiers.partition.local_log_start_offset == 0 and not tiers.objects()
        ballast.unlink()
        tiers.settle()
        assert tiers.consume(0, RECORDS) == everything()


# -- what comes late -------------------------------------------------------------------------------


def test_an_object_that_comes_after_its_topic_has_gone(object_stores: Any, tmp_path: Path) -> None:
    """Its upload was given up; the sweep, which would find it after an hour, is not waited for."""
    held, may_go = [], threading.Event()

    def fault(request: Any) -> None:
        if request.method == "PUT" and request.path.endswith(".kseg") and not held:
            held.append(request.path)
            assert may_go.wait(60)

    with (
        gate_to(object_stores["s3"].fresh()) as (gate, place),
        tiered_broker(place, tmp_path / "log", remote_log_copy_timeout_ms=500) as tiers,
    ):
        gate.fault = fault
        tiers.create()
        tiers.produce(0, RECORDS)
        tiers.wait(lambda: tiers.figure("remote_copies_given_up") == 1)
        tiers.settle()
        tiers.admin.delete_topics([TOPIC])[TOPIC].result(20)
        tiers.wait(lambda: not tiers.figure("remote_metadata_count"))
        done = len(gate.requests)
        may_go.set()
        tiers.wait(lambda: any(r.method == "DELETE" and r.path == held[0]
                               for r in gate.requests[done:]), "it stays")  # fmt: skip
        tiers.wait(lambda: not tiers.objects())
        assert tiers.figure("remote_orphans") == 0


# -- restarts --------------------------------------------------------------------------------------


def test_indexes_survive_a_restart_and_damaged_ones_are_fetched(
    object_stores: Any, tmp_path: Path
) -> None:
    log = tmp_path / "log"

    def tails(gate: Any, objects: dict[str, int]) -> int:
        """GETs that reach the end of an object, where its indexes are, and do not begin at 0."""
        found = 0
        for request in gate.requests:
            first, _, last = request.range.removeprefix("bytes=").partition("-")
            size = objects.get(request.path.rpartition("/")[2])
            found += request.method == "GET" and first != "0" and last == str((size or 0) - 1)
        return found

    with gate_to(object_stores["s3"].fresh()) as (gate, place):
        with tiered_broker(place, log) as tiers:
            tiers.create()
            tiers.produce(0, RECORDS)
            tiers.settle()
            listed = [i for i in place.store().list() if i.key.endswith(".kseg")]
            objects = {i.key.rpartition("/")[2]: i.size for i in listed}
            assert tiers.consume(0, RECORDS) == everything()
            assert tails(gate, objects) == len(objects) == 2
        files = {
            f: f.stat().st_mtime_ns for f in (log / INDEX_CACHE).iterdir() if f.suffix != ".sums"
        }
        assert len(files) >= 2 * len(objects)
        gate.requests.clear()
        with tiered_broker(place, log) as tiers:
            assert tiers.consume(0, RECORDS) == everything()
            assert {f: f.stat().st_mtime_ns for f in files} == files
            assert "GET" in gate.lines and tails(gate, objects) == 0
        damaged = next(f for f in files if f.suffix == ".index")
        data = bytearray(damaged.read_bytes())
        data[3] ^= 1
        damaged.write_bytes(data)
        gate.requests.clear()
        with tiered_broker(place, log) as tiers:
            assert tiers.consume(0, RECORDS) == everything()
            assert tails(gate, objects) == 1, "one object's indexes are fetched anew"
            assert tiers.figure("remote_index_damaged") == 1


def test_epochs_of_cold_records_are_told(place: Place, tmp_path: Path) -> None:
    """OffsetForLeaderEpoch, by which a client finds where a log was cut off; and a client that
    reads committed records only, which are all, for there are no transactions."""
    log = tmp_path / "log"
    with tiered_broker(place, log) as tiers:
        tiers.create()
        for epoch in range(3):
            if epoch:
                tiers.partition.set_leader_epoch(epoch)
            tiers.produce(RECORDS * epoch, RECORDS)
        tiers.settle()
    with tiered_broker(place, log) as tiers:
        assert tiers.partition.local_log_start_offset > 2 * RECORDS
        with contextlib.closing(Raw(tiers.address)) as client:
            ends = []
            for epoch in range(4):
                wanted = {"partition": 0, "current_leader_epoch": -1, "leader_epoch": epoch}
                request = build(
                    p.OffsetForLeaderEpochRequest,
                    replica_id=-1,
                    topics=[{"topic": TOPIC, "partitions": [wanted]}],
                )
                (found,) = client.call(request, 3).topics[0].partitions
                assert found.error_code == 0
                ends.append((found.leader_epoch, found.end_offset))
        assert ends == [(0, RECORDS), (1, 2 * RECORDS), (2, 3 * RECORDS), (-1, -1)]
        read = tiers.consume(0, 3 * RECORDS, **{"isolation.level": "read_committed"})
        assert read == everything(0, 3 * RECORDS)


# -- the metadata topic ----------------------------------------------------------------------------


def test_the_metadata_topic_is_rewritten_while_it_is_written(place: Place, tmp_path: Path) -> None:
    """Three times, with records under way at any moment: what was acknowledged is there."""
    topic_id, custom = uuid.UUID(int=99), pack_custom_metadata(CustomMetadata(0, TailPlace(1, 1)))
    states = list(SegmentState)
    under_way = threading.Semaphore(300)
    written: dict[uuid.UUID, SegmentState] = {}

    def record(segment_id: uuid.UUID, base: int, state: SegmentState) -> Any:
        common: dict[str, Any] = {
            "topic": "gone", "topic_id": topic_id, "partition": 0, "segment_id": segment_id,
            "broker_id": 1, "event_timestamp_ms": 5, "custom": custom, "state": state,
        }  # fmt: skip
        if state is not SegmentState.COPY_SEGMENT_STARTED:
            return RemoteSegmentUpdate(**common)
        return RemoteSegment(
            base_offset=base, end_offset=base + 10, max_timestamp_ms=5, leader_epochs=((0, 0),),
            size=100, **common,
        )  # fmt: skip

    with tiered_broker(place, tmp_path / "log") as tiers:
        tiers.create()
        metadata = tiers.broker.server.remote.metadata

        def write(segment_id: uuid.UUID, base: int, state: SegmentState) -> None:
            def done(is_written: bool) -> None:
                if is_written:
                    written[segment_id] = state
                under_way.release()

            assert under_way.acquire(timeout=30)
            metadata.write(record(segment_id, base, state), done)

        partition = tiers.broker.server.logs.partitions[METADATA]
        number, starts = 0, {partition.log_start_offset}
        while len(starts) < 4:
            number += 1
            assert number < 30_000, "it is not rewritten"
            for state in states[: 2 if number % 40 == 0 else 4]:
                write(uuid.UUID(int=number), 10 * number, state)
            starts.add(partition.log_start_offset)
        for _ in range(300):
            assert under_way.acquire(timeout=30)
        assert len(written) == number, "records were refused"
    finished = {i for i, s in written.items() if s is SegmentState.COPY_SEGMENT_FINISHED}
    assert len(finished) == number // 40
    with tiered_broker(place, tmp_path / "log") as tiers:
        known = tiers.broker.server.remote.metadata.table.partitions[topic_id, 0].segments
        assert set(known) == finished


# -- figures ---------------------------------------------------------------------------------------


class Moves:
    """Which figures have moved, and when."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def expect(self, tiers: TieredBroker, *names: str, **equal: int) -> None:
        """Wait until each of them is above 0, or has the value that is given."""
        for name in names:
            full = f"remote_{name}"
            tiers.wait(lambda full=full: tiers.figure(full) > 0, f"{full} does not move")
            self.seen.add(full)
        for name, value in equal.items():
            full = f"remote_{name}"
            tiers.wait(
                lambda full=full, value=value: tiers.figure(full) == value,
                f"{full} is not {value}",
            )
            self.seen.add(full)


def test_each_figure_moves_when_its_thing_happens(
    object_stores: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, moves = tmp_path / "log", Moves()
    more = {
        "remote_log_copy_timeout_ms": 500,
        "remote_log_chunk_cache_bytes": 4 << 20,
        "remote_log_reader_threads": 1,
        "remote_log_reader_max_pending_tasks": 1,
        "remote_fetch_max_wait_ms": 100,
        "remote_orphan_age_ms": 1000,
    }
    with gate_to(object_stores["s3"].fresh()) as (gate, place):
        with tiered_broker(place, log, **more) as tiers:
            before = {name: tiers.figure(name) for name, _, _ in REMOTE_ROWS}
            assert not any(before.values()), before
            # Copying: refused, silent, and then it goes.
            faults, is_given_up = [(403, "AccessDenied"), CUT], threading.Event()

            def fault(request: Any) -> Any:
                if not faults or request.method != "PUT" or not request.path.endswith(".kseg"):
                    return None
                answer = faults.pop(0)
                assert answer != CUT or is_given_up.wait(30)
                return answer

            gate.fault = fault
            tiers.create(partitions=4)
            tiers.produce(0, RECORDS)
            moves.expect(tiers, "copy_requests", "copy_errors", "copy_lag_bytes", copy_bytes=0)
            assert tiers.figure("remote_copy_lag_segments") == 2
            moves.expect(tiers, "copies_given_up", bytes=0)
            is_given_up.set()
            tiers.settle()
            moves.expect(tiers, "copy_bytes", "bytes", copy_lag_bytes=0, copy_lag_segments=0)
            moves.expect(tiers, metadata_count=2)
            assert tiers.figure("remote_bytes") < tiers.figure("remote_copy_bytes"), "the tails"
            # Reading: from the store, then from memory.
            assert tiers.consume(0, RECORDS) == everything()
            moves.expect(tiers, "fetch_requests", "fetch_bytes", "get_requests", "get_bytes")
            moves.expect(tiers, "chunk_misses", "chunk_bytes", "index_bytes", index_misses=2)
            assert tiers.consume(0, RECORDS) == everything()
            moves.expect(tiers, "chunk_hits", "index_hits", index_misses=2)
        with tiered_broker(place, log, **more) as tiers:
            # Errors, and a queue that is full.
            gate.fault = lambda request: (503, "SlowDown") if request.method == "GET" else None
            reader = tiers.broker.server.remote
            future = reader.read(tiers.partition, 0, 1000)
            assert future is not None
            with pytest.raises(Exception, match="did not answer"):
                future.result(30)
            moves.expect(tiers, "get_errors", "fetch_errors")
            may_go = threading.Event()
            gate.fault = lambda request: may_go.wait(30) and None
            waiting = [reader.read(tiers.partition, 0, 1000) for _ in range(5)]
            moves.expect(tiers, "fetch_refused", "reader_queue")
            assert waiting[-1] is None
            may_go.set()
            assert waiting[0] is not None and waiting[0].result(30)
            moves.expect(tiers, reader_queue=0)
            # Deletion: refused, and then it goes.
            gate.fault = lambda request: (503, "SlowDown") if request.method == "DELETE" else None
            alter(tiers.admin, TOPIC, "retention.bytes", "1")
            moves.expect(tiers, "delete_requests", "delete_errors", "delete_lag_bytes")
            moves.expect(tiers, "delete_lag_segments")
            gate.fault = lambda request: None
            moves.expect(tiers, delete_lag_bytes=0, delete_lag_segments=0, metadata_count=0)
            # An object that nobody owns.
            topic_id = tiers.partition.topic_id
            key = next(r.path for r in gate.requests if r.path.endswith(".kseg"))
            key = key.partition(place.uri.partition("?")[0].rpartition("/")[2] + "/")[2]
            tiers.place.store().put(key, 4, [b"lost"])
            assert topic_id is not None
            moves.expect(tiers, orphans=1)
            # An object whose copy was never finished.
            alter(tiers.admin, TOPIC, "retention.bytes", "-1")
            metadata = tiers.broker.server.remote.metadata
            write = metadata.write

            def forgets(record: Any, done: Any) -> None:
                if record.state is not SegmentState.COPY_SEGMENT_FINISHED:
                    write(record, done)

            monkeypatch.setattr(metadata, "write", forgets)
            tiers.produce(RECORDS, RECORDS)
            tiers.wait(tiers.objects)
        monkeypatch.undo()
        with tiered_broker(place, log, **more) as tiers:
            moves.expect(tiers, "adopted")
            tiers.settle()
            assert tiers.consume(tiers.partition.log_start_offset, 300)
        for path in (log / INDEX_CACHE).glob("*.index"):
            path.write_bytes(path.read_bytes()[:-1])
        with tiered_broker(place, log, **more) as tiers:
            assert tiers.consume(tiers.partition.log_start_offset, 300)
            moves.expect(tiers, "index_damaged")
            owners = f"{tiers.broker.server.logs.cluster_id}/owners/"
            place.store().put(f"{owners}{99:020}-another", 2, [b"{}"])
            tiers.broker.server.remote.ownership.begin()  # or it looks in a minute
            tiers.broker.server.remote.logs.own_soon()
            moves.expect(tiers, not_owner=1)
    elsewhere = {"remote_chunks_ahead", "remote_chunks_unused"}  # test_caches, test_remote_reader
    assert moves.seen | elsewhere == {name for name, _, _ in REMOTE_ROWS}
