"""Tiered storage under orders of events that nobody plans."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from kdirect.errors import RemoteAccessError
from kdirect.format.remote_metadata import RemoteSegment, RemoteSegmentUpdate, SegmentState
from kdirect.format.segment_object import TailPlace
from kdirect.storage import remote_events as e
from kdirect.storage.copy_rules import LocalLog, LocalSegment, TierConfig
from kdirect.storage.remote_log import RemoteLog
from kdirect.storage.upload import RunningUpload
from kdirect.store.own_files import topics_text
from tests.broker.test_topic_properties import alter
from tests.object_servers import SILENT, Place, gate_to
from tests.storage.tiered_broker import (
    SEGMENT_BYTES,
    TIERED,
    TOPIC,
    properties,
    tiered_broker,
)

RECORDS = 2000


# -- the store -------------------------------------------------------------------------------------


def test_a_copy_that_takes_long_is_not_given_up(place: Place, tmp_path: Path) -> None:
    """The limit is one of silence: what the rate holds back, or a segment that is large, is not
    begun again and again."""
    limits = {
        "remote_log_manager_copy_max_bytes_per_second": 20_000,
        "remote_log_copy_timeout_ms": 1000,
    }
    with tiered_broker(place, tmp_path / "log", **limits) as tiers:
        tiers.create(segment_bytes=65536)
        tiers.produce(0, 700)
        tiers.settle()
        assert tiers.figure("remote_copies_given_up") == 0


def test_without_the_right_to_delete_copying_goes_on(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiered_broker(place, tmp_path / "log") as tiers:

        def refused(key: str) -> None:
            raise RemoteAccessError(f"delete of {key}: AccessDenied")

        store = tiers.broker.server.remote.store
        monkeypatch.setattr(store, "delete", refused)
        tiers.create()
        tiers.produce(0, RECORDS)
        tiers.settle()
        alter(tiers.admin, TOPIC, "retention.bytes", str(2 * SEGMENT_BYTES))
        tiers.wait(lambda: tiers.figure("remote_delete_lag_segments") > 3)
        tiers.produce(RECORDS, 300)
        tiers.wait(lambda: tiers.partition.remote_end_offset > RECORDS, "copying has ended")
        monkeypatch.undo()
        tiers.settle()
        assert len(tiers.objects()) == tiers.figure("remote_metadata_count")


@contextmanager
def process(place: Place, directory: Path, **own: Any) -> Iterator[tuple[Any, str]]:
    """A broker of its own process, and where it listens."""
    command = [sys.executable, "-m", "kdirect.cli", "broker", "--log-level", "warning"]
    more = {"listeners": "127.0.0.1:0", "rdma.transports": "", **own}
    for name, value in (properties(place, directory) | more).items():
        command += ["--set", f"{name}={value}"]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    try:
        yield started, started.stdout.readline().split()[-1]
    finally:
        started.kill()
        started.wait()
        started.stdout.close()


@pytest.mark.parametrize("method", ["PUT", "DELETE"])
def test_a_broker_ends_although_the_store_is_silent(
    object_stores: Any, tmp_path: Path, method: str
) -> None:
    silent: list[str] = []

    def fault(request: Any) -> str | None:
        if request.method != method or not request.path.endswith(".kseg"):
            return None
        silent.append(request.path)
        return SILENT

    with (
        gate_to(object_stores["s3"].fresh()) as (gate, place),
        process(place, tmp_path / "log") as (broker, address),
    ):
        gate.fault = fault
        admin = AdminClient({"bootstrap.servers": address, "log_level": 0})
        configs = {**TIERED, "retention.bytes": str(3 * SEGMENT_BYTES)}
        admin.create_topics([NewTopic(TOPIC, 1, 1, config=configs)])[TOPIC].result(20)
        producer = confluent_kafka.Producer({"bootstrap.servers": address, "log_level": 0})
        end = time.monotonic() + 20
        while not silent and time.monotonic() < end:
            producer.produce(TOPIC, b"x" * 2000)
            producer.flush()
            time.sleep(0.01)
        assert silent, gate.lines
        began = time.monotonic()
        broker.send_signal(signal.SIGTERM)
        assert broker.wait(60) == 0
        assert time.monotonic() - began < 10


# -- threads ---------------------------------------------------------------------------------------


def test_an_upload_ends_or_is_given_up() -> None:
    """What was given up is deleted by the thread that ends it: it must not count."""
    upload = RunningUpload()
    assert upload.end(TailPlace(1, 2)) and not upload.give_up()
    assert upload.outcome == TailPlace(1, 2) and upload.ended.is_set()
    upload = RunningUpload()
    assert upload.give_up() and not upload.end(TailPlace(1, 2))
    assert upload.outcome is None


@pytest.mark.parametrize("step", ["_put", "_delete"])
def test_an_error_that_nobody_expects_is_tried_again(
    place: Place, tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that cannot be started, say."""
    with tiered_broker(place, tmp_path / "log") as tiers:
        logs = tiers.broker.server.remote.logs
        left = [2]

        def fails(original: Any, *arguments: Any) -> Any:
            if left[0]:
                left[0] -= 1
                raise MemoryError
            return original(*arguments)

        if step == "_put":
            target, name = threading.Thread, "start"
            start = threading.Thread.start

            def put_fails(thread: threading.Thread) -> None:
                fails(start, thread) if thread.name == "kdirect-remote-put" else start(thread)

            monkeypatch.setattr(target, name, put_fails)
        else:
            monkeypatch.setattr(logs, "_delete", partial(fails, logs._delete))
        tiers.create(retention_bytes=2 * SEGMENT_BYTES)
        tiers.produce(0, RECORDS)
        tiers.settle()
        assert not left[0]
        assert len(tiers.objects()) == tiers.figure("remote_metadata_count")


def test_what_counts_as_copied_is_on_disk(place: Place, tmp_path: Path) -> None:
    """Else a power failure lets the log end before its copies do."""
    never = {"log_flush_scheduler_interval_ms": 3_600_000}
    with tiered_broker(place, tmp_path / "log", **never) as tiers:
        tiers.create(local_retention_bytes=-1)
        tiers.produce(0, RECORDS)
        tiers.wait(lambda: tiers.partition.remote_end_offset > RECORDS // 2)
        assert tiers.partition.recovery_point >= tiers.partition.remote_end_offset


@pytest.mark.parametrize("failing", [1, 2, 3, 5])
def test_metadata_that_is_not_brought_to_the_disk_is_cleaned_up(
    place: Place, tmp_path: Path, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was appended, and the fsync failed: what began there does not wait for the next start."""
    with tiered_broker(place, tmp_path / "log") as tiers:
        metadata = tiers.broker.server.remote.metadata
        flush, begun = metadata._flusher.flushed, itertools.count(1)

        async def fails_once(partition: Any) -> None:
            await flush(partition)
            if next(begun) == failing:
                raise OSError("the disk does not answer")

        monkeypatch.setattr(metadata._flusher, "flushed", fails_once)
        tiers.create()
        tiers.produce(0, RECORDS)
        tiers.settle()
        assert next(begun) > failing

        def nothing_is_left() -> bool:
            (found,) = metadata.table.partitions.values()
            states = {segment.state for segment in found.segments.values()}
            return states == {SegmentState.COPY_SEGMENT_FINISHED} and not metadata._untold

        tiers.wait(nothing_is_left, "a record stays that nobody goes on with")
        tiers.settle()
        assert len(tiers.objects()) == tiers.figure("remote_metadata_count")
        assert tiers.consume(0, RECORDS) == [(i, i) for i in range(RECORDS)]


# -- topics ----------------------------------------------------------------------------------------


def test_a_topic_that_was_tiered_once_is_deleted_whole(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker that is killed after it has marked the topic, and before the metadata says so."""
    log = tmp_path / "log"
    with tiered_broker(place, log) as tiers:

        def refused(key: str) -> None:
            raise RemoteAccessError(f"delete of {key}: AccessDenied")

        tiers.create(remote_log_delete_on_disable="true")
        tiers.produce(0, RECORDS)
        tiers.settle()
        monkeypatch.setattr(tiers.broker.server.remote.store, "delete", refused)
        alter(tiers.admin, TOPIC, "remote.storage.enable", "false")
        tiers.wait(lambda: tiers.figure("remote_delete_errors") > 0)
    topics = json.loads((log / "topics.json").read_text())
    rows = topics["topics"]
    rows[TOPIC]["deleting"] = True
    (log / "topics.json").write_text(topics_text(rows).decode())
    with tiered_broker(place, log) as tiers:
        tiers.wait(lambda: not tiers.objects(), "objects stay")
        assert TOPIC not in tiers.broker.server.topics._topics


def test_nothing_is_kept_of_a_topic_without_copies(place: Place, tmp_path: Path) -> None:
    with tiered_broker(place, tmp_path / "log") as tiers:
        logs = tiers.broker.server.remote.logs
        for _ in range(3):
            tiers.create()
            tiers.wait(lambda: logs.figures())
            tiers.admin.delete_topics([TOPIC])[TOPIC].result(20)
            assert not logs.figures()


def finished(base: int, end: int) -> RemoteSegment:
    return RemoteSegment(
        topic_id=uuid.UUID(int=1),
        topic="t",
        partition=0,
        segment_id=uuid.UUID(int=1000 * base + end),
        base_offset=base,
        end_offset=end,
        broker_id=1,
        max_timestamp_ms=0,
        event_timestamp_ms=0,
        leader_epochs=((0, base),),
        size=100 * (end - base),
        custom=None,
        state=SegmentState.COPY_SEGMENT_FINISHED,
    )


def test_a_copy_that_another_one_covered_counts_again() -> None:
    """Seed 16541 of the schedules, before they had topics that are tiered no longer: of two copies
    of the same offsets the one that counted went, and the other one did not count."""
    sealed = (LocalSegment(20, 25, 500, 0),)
    local = LocalLog(0, 20, 25, 25, sealed, 0, ((0, 0),))
    machine = RemoteLog("t", uuid.UUID(int=1), 0, broker_id=1)
    small, large = finished(0, 10), finished(0, 20)
    for event in (
        e.Recorded(small),
        e.Recorded(large),
        e.Loaded(),
        e.Looked(1, local, TierConfig()),
    ):
        machine.on(event)
    assert machine.segments.at(5) == large
    gone = RemoteSegmentUpdate(
        topic="t", topic_id=large.topic_id, partition=0, segment_id=large.segment_id, broker_id=2,
        event_timestamp_ms=2, custom=None, state=SegmentState.DELETE_SEGMENT_STARTED,
    )  # fmt: skip
    machine.on(e.Recorded(gone))
    assert machine.segments.at(5) == small


def test_each_byte_counts_once_while_copies_are_about_to_go() -> None:
    """Local retention may not rely on them; retention.bytes must not take their bytes for more."""
    sealed = tuple(LocalSegment(base, base + 10, 1000, 0) for base in (0, 10))
    local = LocalLog(0, 0, 25, 25, sealed, 500, ((0, 0),))
    machine = RemoteLog("t", uuid.UUID(int=1), 0, broker_id=1)
    machine.on(e.Loaded())
    for base in (0, 10):
        machine.on(e.Recorded(finished(base, base + 10)))
    config = TierConfig(retention_bytes=2400)
    assert machine.on(e.Looked(1, local, config)) == [e.Tiered(20)]
    off = config._replace(copies=False, deletes_all=True)
    assert len(machine.on(e.Looked(2, local, off))) == 2
    said = machine.on(e.Looked(3, local, config))
    assert said == [e.Tiered(-1)], "2,500 bytes are kept: without the oldest, 1,500 would be"


def test_copies_that_are_about_to_go_count_no_more() -> None:
    """A topic that is tiered no longer, and again before its copies have gone: local retention must
    not take them for copies."""
    machine = RemoteLog("t", uuid.UUID(int=1), 0, broker_id=1)
    sealed = tuple(LocalSegment(base, base + 10, 1000, 0) for base in (0, 10))
    local = LocalLog(0, 0, 25, 25, sealed, 500, ((0, 0),))

    def tell(event: Any, keeps: Callable[[Any], bool] = lambda record: True) -> list[Any]:
        """What the machine does after an event whose effects succeed, but for those kept back."""
        waiting, done = [event], []
        while waiting:
            for effect in machine.on(waiting.pop(0)):
                done.append(effect)
                if isinstance(effect, e.Write) and keeps(effect.record):
                    waiting.append(e.Recorded(effect.record))
                elif isinstance(effect, e.Put):
                    waiting.append(e.PutEnded(effect.segment.segment_id, TailPlace(1000, 10)))
                elif isinstance(effect, e.LookAgain):
                    waiting.append(e.Looked(1, local, TierConfig()))
        return done

    tell(e.Loaded())
    assert e.Tiered(20) in tell(e.Looked(1, local, TierConfig()))
    off = TierConfig(copies=False, deletes_all=True)
    kept = tell(e.Looked(2, local, off), lambda record: False)
    records = [effect.record for effect in kept if isinstance(effect, e.Write)]
    assert [record.state for record in records] == [SegmentState.DELETE_SEGMENT_STARTED] * 2
    assert tell(e.Looked(3, local, TierConfig())) == [e.Tiered(-1)]
    for record in records:
        tell(e.Recorded(record))
    said = tell(e.Looked(4, local, TierConfig()))
    assert sum(isinstance(effect, e.Put) for effect in said) == 2
    assert said.count(e.Tiered(20)) == 1
