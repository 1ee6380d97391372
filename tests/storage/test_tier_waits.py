"""What a running broker waits for, and for how long: a copy lag, a free thread, a GET that hangs;
and what it answers meanwhile.  By the order of events at the store, not by tight times."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from confluent_kafka.admin import OffsetSpec

from kdirect.format import protocol as p
from kdirect.format.error_codes import ErrorCode
from kdirect.format.schema import build
from tests.broker.conftest import Raw
from tests.broker.test_changed_threads import change
from tests.broker.test_topic_properties import alter
from tests.object_servers import Gate, Place, gate_to
from tests.storage.test_tier_bad_input import fetch, log_of, offsets, send
from tests.storage.tiered_broker import SEGMENT_BYTES, TOPIC, TieredBroker, tiered_broker

RECORDS = 700  # three segments, two of which are cold
LONG_S = 30.0  # much longer than what is waited for


class Held:
    """Requests of one method for objects, which a gate keeps until they may go on."""

    def __init__(self, gate: Gate, method: str) -> None:
        self.now: list[str] = []
        self.most = 0
        self.may_go = threading.Event()
        self._lock = threading.Lock()

        def fault(request: Any) -> None:
            if request.method == method and request.path.endswith(".kseg"):
                with self._lock:
                    self.now.append(request.path)
                    self.most = max(self.most, len(self.now))
                assert self.may_go.wait(60)
                with self._lock:
                    self.now.remove(request.path)

        gate.fault = fault


@contextlib.contextmanager
def behind_a_gate(stores: Any, log: Path, **more: Any) -> Iterator[tuple[Gate, TieredBroker]]:
    with (
        gate_to(stores["s3"].fresh()) as (gate, place),
        tiered_broker(place, log, **more) as tiers,
    ):
        yield gate, tiers


# -- copying ---------------------------------------------------------------------------------------


def test_copiers_are_as_many_as_the_pool_has(object_stores: Any, tmp_path: Path) -> None:
    """Five partitions have something to copy, and two uploads are under way, never three."""
    pool = {"remote_log_manager_copier_thread_pool_size": 2}
    with behind_a_gate(object_stores, tmp_path / "log", **pool) as (gate, tiers):
        held = Held(gate, "PUT")
        tiers.create(partitions=5)
        for partition in range(5):
            send(tiers, TOPIC, partition)
        tiers.wait(lambda: tiers.figure("remote_copy_lag_segments") >= 10)
        tiers.wait(lambda: len(held.now) == 2, "two are not under way")
        time.sleep(1)  # five looks at all of them
        assert len(held.now) == 2 and tiers.figure("remote_copy_requests") == 2
        assert change(tiers.admin, "remote.log.manager.copier.thread.pool.size", "4") == 0
        tiers.wait(lambda: len(held.now) == 4, "a larger pool begins no more at once")
        assert change(tiers.admin, "remote.log.manager.copier.thread.pool.size", "2") == 0
        held.may_go.set()
        tiers.wait(lambda: not tiers.figure("remote_copy_lag_segments"))
        assert held.most == 4, held.most


def test_rates_and_waits_change_while_the_broker_runs(place: Place, tmp_path: Path) -> None:
    """A copy at one byte per second goes on at once when the rate is raised."""
    slow = {"remote_log_manager_copy_max_bytes_per_second": 1}
    with tiered_broker(place, tmp_path / "log", **slow) as tiers:
        tiers.create()
        tiers.produce(0, RECORDS)
        remote = tiers.broker.server.remote
        tiers.wait(lambda: remote.logs.throttle.waited_s > 0, "no copy waits")
        assert tiers.partition.remote_end_offset <= 0
        assert (
            change(tiers.admin, "remote.log.manager.copy.max.bytes.per.second", "1000000000") == 0
        )
        tiers.wait(lambda: not tiers.figure("remote_copy_lag_segments"))
        for name, number in (
            ("remote.log.manager.fetch.max.bytes.per.second", 5000),
            ("remote.log.index.file.cache.total.size.bytes", 6000),
            ("remote.fetch.max.wait.ms", 700),
        ):
            assert change(tiers.admin, name, str(number)) == 0
        assert remote.reader.throttle.bytes_per_second == 5000
        assert remote.reader._indexes.max_bytes == 6000
        assert remote.reads()._config["remote.fetch.max.wait.ms"] == 700


def test_segments_are_copied_when_their_lag_is_over(place: Place, tmp_path: Path) -> None:
    """``remote.copy.lag.ms`` counts from the newest record of a segment: old records are copied at
    once, new ones when they are as old as that."""
    lag_ms, hour = 3000, 3_600_000
    with tiered_broker(place, tmp_path / "log") as tiers:
        own = {"local_retention_bytes": "-2", "local_retention_ms": str(5 * hour),
               "remote_copy_lag_bytes": "-1", "retention_ms": str(10 * hour)}  # fmt: skip
        tiers.create(remote_copy_lag_ms=lag_ms, **own)
        tiers.create("later", remote_copy_lag_ms=hour, **own)
        send(tiers, "later")
        at = int(time.time() * 1000)
        tiers.produce(0, RECORDS, at_ms=at - 2 * hour)
        tiers.wait(lambda: tiers.partition.remote_end_offset > 0, "old records wait")
        copied = len(tiers.partition.sealed_segments())
        tiers.wait(lambda: len([k for k in tiers.objects() if f"/{TOPIC}-" in k]) == copied)
        tiers.produce(RECORDS, RECORDS)
        fresh = tiers.partition.sealed_segments()[copied:]
        for segment in fresh:
            tiers.wait(lambda end=segment.end_offset: tiers.partition.remote_end_offset >= end)
            assert time.time() * 1000 >= segment.max_timestamp + lag_ms, "copied before its time"
        assert len(fresh) >= 2
        assert not [k for k in tiers.objects() if "/later-" in k], "an hour has not gone by"
        alter(tiers.admin, "later", "remote.copy.lag.ms", "0")
        tiers.wait(lambda: [k for k in tiers.objects() if "/later-" in k], "it waits for nothing")


def test_segments_are_copied_when_enough_comes_after_them(place: Place, tmp_path: Path) -> None:
    """``remote.copy.lag.bytes``."""
    lag = 2 * SEGMENT_BYTES
    with tiered_broker(place, tmp_path / "log") as tiers:
        tiers.create(local_retention_bytes=100 * SEGMENT_BYTES, remote_copy_lag_bytes=lag,
                     remote_copy_lag_ms="-1")  # fmt: skip
        tiers.produce(0, 3 * RECORDS)
        sealed = tiers.partition.sealed_segments()
        behind, due = tiers.partition.size, 0
        for segment in sealed:
            behind -= segment.size
            due = segment.end_offset if behind >= lag else due
        assert 0 < due < sealed[-1].end_offset
        tiers.wait(lambda: tiers.partition.remote_end_offset == due, "they wait for too long")
        time.sleep(1)  # five looks
        assert tiers.partition.remote_end_offset == due, "copied before its time"


# -- reading ---------------------------------------------------------------------------------------


def test_a_fetch_waits_for_a_get_as_long_as_it_may_and_no_get_is_repeated(
    object_stores: Any, tmp_path: Path
) -> None:
    """``remote.fetch.max.wait.ms``, whatever the client would wait.  The answer has no records and
    no error; the GET that was waited for serves who asks again."""
    wait_s = 1.5
    waits = {"remote_fetch_max_wait_ms": int(1000 * wait_s)}
    with behind_a_gate(object_stores, tmp_path / "log", **waits) as (gate, tiers):
        tiers.create()
        tiers.produce(0, RECORDS)
        tiers.settle()
        gate.requests.clear()
        held = Held(gate, "GET")
        with contextlib.closing(Raw(tiers.address, LONG_S)) as connection:
            for _ in range(2):
                began = time.monotonic()
                found = fetch(connection, [(TOPIC, 0, 0)])[TOPIC, 0]
                spent = time.monotonic() - began
                assert held.now, "the GET has ended before the answer"
                assert found.error_code == 0 and offsets(found) == (-1, -1)
                assert wait_s * 0.9 < spent < LONG_S / 2, spent
            held.may_go.set()
            tiers.wait(lambda: tiers.figure("remote_fetch_bytes") > 0, "what was asked for ends")
            tiers.wait(lambda: not tiers.figure("remote_reader_queue") and not held.now)
            found = fetch(connection, [(TOPIC, 0, 0)])[TOPIC, 0]
            assert offsets(found)[0] == 0
        gets = Counter((r.path, r.range) for r in gate.requests if r.method == "GET")
        assert gets and set(gets.values()) == {1}, gets


def list_offsets(
    connection: Raw, wanted: list[tuple[str, int]], version: int = 10
) -> dict[str, tuple[int, int]]:
    """(error code, offset) of the first partition of each topic at a time."""
    part = {"partition_index": 0, "current_leader_epoch": -1}
    topics = [{"name": t, "partitions": [{**part, "timestamp": at}]} for t, at in wanted]
    request = build(
        p.ListOffsetsRequest, replica_id=-1, isolation_level=0, topics=topics, timeout_ms=20_000
    )
    found = connection.call(request, version).topics
    return {t.name: (t.partitions[0].error_code, t.partitions[0].offset) for t in found}


def test_a_lookup_by_time_that_the_store_does_not_answer(
    object_stores: Any, tmp_path: Path
) -> None:
    """``remote.list.offsets.request.timeout.ms``: REQUEST_TIMED_OUT for the partition whose index
    cannot be had, and answers for those of the same request that need none."""
    limit_s = 1.5
    limit = {"remote_list_offsets_request_timeout_ms": int(1000 * limit_s)}
    with behind_a_gate(object_stores, tmp_path / "log", **limit) as (gate, tiers):
        base = int(time.time() * 1000) - 100_000
        tiers.create()
        tiers.create("hot", remote_log_copy_disable="true", local_retention_bytes="-2")
        tiers.produce(0, RECORDS, at_ms=base)
        send(tiers, "hot", count=50)
        tiers.settle()
        held = Held(gate, "GET")
        with contextlib.closing(Raw(tiers.address, LONG_S)) as connection:
            began = time.monotonic()
            found = list_offsets(connection, [(TOPIC, base + 7), ("hot", 1)])
            spent = time.monotonic() - began
            assert held.now, "the GET has ended before the answer"
            assert found == {TOPIC: (ErrorCode.REQUEST_TIMED_OUT, -1), "hot": (0, 0)}
            assert limit_s * 0.9 < spent < LONG_S / 2, spent
            assert list_offsets(connection, [(TOPIC, -1)]) == {TOPIC: (0, RECORDS)}
            held.may_go.set()
            tiers.wait(lambda: not held.now)
            assert list_offsets(connection, [(TOPIC, base + 7)]) == {TOPIC: (0, 7)}
        assert tiers.offset_for(OffsetSpec.for_timestamp(base + 7)) == 7


def test_the_last_tiered_offset_and_the_bytes_that_are_here(place: Place, tmp_path: Path) -> None:
    """ListOffsets -5 is -1 where nothing is tiered, from version 9 on; DescribeLogDirs tells what
    is in the directories, as Kafka's does, and not what is in the store."""
    with tiered_broker(place, tmp_path / "log") as tiers:
        tiers.create("plain", remote_storage_enable="false", local_retention_bytes="-2")
        tiers.create("empty")
        tiers.create()
        with contextlib.closing(Raw(tiers.address, LONG_S)) as connection:
            every = [("plain", -5), ("empty", -5), (TOPIC, -5)]
            assert list_offsets(connection, every) == {name: (0, -1) for name, _ in every}
            tiers.produce(0, RECORDS)
            tiers.settle()
            local = tiers.partition.local_log_start_offset
            for version in (9, 10):
                found = list_offsets(connection, every, version)
                assert found == {"plain": (0, -1), "empty": (0, -1), TOPIC: (0, local - 1)}
            old = list_offsets(connection, every, 8)
            assert set(old.values()) == {(ErrorCode.UNSUPPORTED_VERSION, -1)}
            answer = connection.call(build(p.DescribeLogDirsRequest, topics=None), 4)
        (directory,) = answer.results
        rows = {t.name: t.partitions for t in directory.topics}
        files = sum(f.stat().st_size for f in log_of(tiers, TOPIC).directory.glob("*.log"))
        assert rows[TOPIC][0].partition_size == tiers.partition.size <= files
        assert 0 < tiers.partition.size < tiers.figure("remote_bytes")
