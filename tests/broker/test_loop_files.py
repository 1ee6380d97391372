"""The broker's event loop touches no file: it is watched while every kind of request is served."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kdirect
import kdirect.log.head
import kdirect.log.index
import kdirect.log.segment
from kdirect.broker.files import FileThreads
from kdirect.client import connect
from kdirect.format import protocol as p
from kdirect.format.batch import encode_single_bytes
from kdirect.format.schema import build

pytestmark = pytest.mark.timeout(180)

SEGMENT_BYTES = 1 << 16


class Watch:
    """Writes down the file work below `directory` that the broker's event loop does, while `on`.

    Python tells of most of it by audit events; the calls that it does not tell of are wrapped."""

    EVENTS = frozenset(
        ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.listdir",
         "os.scandir", "os.link", "shutil.rmtree",
         "mmap.__new__")
    )  # fmt: skip
    CALLS = (
        (
            os,
            (
                "posix_fallocate",
                "fsync",
                "fdatasync",
                "ftruncate",
                "truncate",
                "statvfs",
                "stat",
                "fstat",
                "pread",
                "sendfile",
            ),
        ),
        (kdirect.log.segment, ("Mapping", "punch_hole")),
        (kdirect.log.index, ("Mapping",)),
        (kdirect.log.head, ("Mapping", "allocate_huge")),
    )

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
        self.on = False
        self.directory = str(directory)
        self.seen: list[str] = []
        for module, names in self.CALLS:
            for name in names:
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, self._wrapped(name, getattr(module, name)))

    def _wrapped(self, name: str, call: Any) -> Any:
        def watched(*args: Any, **more: Any) -> Any:
            self.note(name, args)
            return call(*args, **more)

        return watched

    def note(self, what: str, args: Any) -> None:
        if (
            not self.on
            or threading.current_thread().name != "kdirect-broker"
            or not self._concerns_the_log(args)
        ):
            return
        where, frame = [], sys._getframe()
        while frame is not None:
            code = frame.f_code
            if "kdirect" in code.co_filename:
                where.append(f"{Path(code.co_filename).name}:{frame.f_lineno}")
            frame = frame.f_back
        self.seen.append(f"{what}{args!r} in {' < '.join(where)}")

    def _concerns_the_log(self, args: Any) -> bool:
        """Not memory without a name, nor what Python and the shm transport look up in /proc when a
        queue pair is opened."""
        what = args[0] if args else ""
        if isinstance(what, int):
            what = os.readlink(f"/proc/self/fd/{what}")
        return self.directory in os.fsdecode(what)


_watches: list[Watch] = []


def _audit(event: str, args: Any) -> None:
    if event in Watch.EVENTS:
        for watch in _watches:
            watch.note(event, args)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Watch]:
    if not _watches:
        sys.addaudithook(_audit)  # for ever, and idle without a watch
    watch = Watch(monkeypatch, tmp_path)
    _watches[:] = [watch]
    yield watch
    watch.on = False


@pytest.fixture
def broker(tmp_path: Path, watch: Watch) -> Iterator[kdirect.Broker]:
    with started(tmp_path / "log") as b:
        yield b
        watch.on = False


def test_the_watch_sees_file_work_on_the_loop(
    broker: kdirect.Broker, watch: Watch, on_loop: Any, tmp_path: Any
) -> None:
    watch.on = True
    on_loop(broker, lambda: (tmp_path / "a").write_bytes(b"x"))
    on_loop(broker, lambda: os.stat(tmp_path / "a"))
    on_loop(
        broker, lambda: broker.server.logs.create_partition(kdirect.TopicPartition("direct", 0))
    )
    assert {w.partition("(")[0] for w in watch.seen} >= {"open", "stat", "os.mkdir"}


# -- every kind of request -------------------------------------------------------------------------


def started(directory: Path, **properties: Any) -> kdirect.Broker:
    return kdirect.Broker(
        directory, log_segment_bytes=SEGMENT_BYTES, num_partitions=2,
        offsets_topic_num_partitions=2,
        log_retention_check_interval_ms=50, log_flush_scheduler_interval_ms=50,
        log_flush_offset_checkpoint_interval_ms=50, **properties,
    )  # fmt: skip


def drop_from_memory(directory: Path) -> None:
    """The pages of the log, as far as the file system lets them go."""
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def produce(connection: Any, topic: str, value: bytes, *, acks: int = -1) -> None:
    request = build(
        p.ProduceRequest, transactional_id=None, acks=acks, timeout_ms=30_000,
        topic_data=[{"name": topic,
                     "partition_data": [{"index": 0, "records": encode_single_bytes(value)}]}],
    )  # fmt: skip
    if acks == 0:
        connection.socket.sendall(p.encode_request(request, 9, 0, "raw"))
    else:
        assert connection.call(request, 9).responses[0].partition_responses[0].error_code == 0


def write_and_read(session: Any, settings: dict[str, Any], topic: str, count: int) -> None:
    tp = kdirect.TopicPartition(topic, 0)
    with kdirect.Producer({**settings, "batch.bytes": 8192}) as producer:
        for i in range(count):
            producer.produce(topic, b"%d " % i + b"x" * 1000, partition=0)
        producer.flush()
    reader = session.reader(tp, 0, session.latest_offsets([tp])[tp])
    assert sum(batch.num_rows for batch in reader.batches()) >= count
    reader.close()


def administer(connection: Any, session: Any) -> None:
    admin = session.admin
    tp = kdirect.TopicPartition("changed", 0)
    admin.create_topic("changed", 2)
    admin.create_partitions("changed", 4)
    produce(connection, "changed", b"1")
    produce(connection, "changed", b"2")
    admin.alter_configs("changed", {"retention.ms": "3600000", "flush.messages": "1"})
    for acks in (-1, 0):
        produce(connection, "changed", b"3", acks=acks)
    admin.describe_configs("changed")
    admin.list_offsets({tp: kdirect.EARLIEST_OFFSET}) if hasattr(
        kdirect, "EARLIEST_OFFSET"
    ) else None
    admin.delete_records({tp: 1})
    admin.commit_offsets("g", {tp: 1})
    assert admin.committed_offsets("g", [tp]) == {tp: 1}
    admin.list_groups()
    for timestamp in (0, -1, -2, -3):
        part = {"partition_index": 0, "current_leader_epoch": -1, "timestamp": timestamp}
        connection.call(
            build(
                p.ListOffsetsRequest,
                replica_id=-1,
                isolation_level=0,
                topics=[{"name": "changed", "partitions": [part]}],
            ),
            7,
        )
    connection.call(build(p.DescribeLogDirsRequest, topics=None), 1)
    connection.call(
        build(p.InitProducerIdRequest, transactional_id=None, transaction_timeout_ms=1000), 4
    )
    connection.call(
        build(p.MetadataRequest, topics=[{"name": "by-itself"}], allow_auto_topic_creation=True), 8
    )
    connection.call(build(p.DeleteGroupsRequest, groups_names=["g"]), 2)
    admin.delete_topic("changed")


def fetch_all(connection: Any, topic: str) -> int:
    """Fetch from the beginning, over TCP; how many bytes."""
    offset, size = 0, 0
    while True:
        part = {
            "partition": 0,
            "fetch_offset": offset,
            "partition_max_bytes": 50_000,
            "current_leader_epoch": -1,
            "log_start_offset": -1,
        }
        request = build(
            p.FetchRequest, replica_id=-1, max_wait_ms=0, min_bytes=1, max_bytes=1 << 20,
            isolation_level=0, session_id=0,
            session_epoch=-1, topics=[{"topic": topic, "partitions": [part]}],
            forgotten_topics_data=[], rack_id="",
        )  # fmt: skip
        records = bytes(connection.call(request, 11).responses[0].partitions[0].records or b"")
        if not records:
            return size
        size += len(records)
        at = 0
        while at < len(records):
            offset = (
                int.from_bytes(records[at : at + 8], "big")
                + int.from_bytes(records[at + 23 : at + 27], "big")
                + 1
            )
            at += 12 + int.from_bytes(records[at + 8 : at + 12], "big")


def test_no_request_makes_the_loop_touch_a_file(tmp_path: Path, watch: Watch, raw: Any) -> None:
    for life in range(2):
        if life:
            drop_from_memory(tmp_path)
        with started(tmp_path / "watched", log_retention_bytes=40 * SEGMENT_BYTES) as b:
            watch.on = True
            connection = raw(b.bootstrap_servers)
            for transport in ("tcp", "shm"):
                settings = {"bootstrap.servers": b.bootstrap_servers, "transport": transport}
                session = connect(settings)
                if not life:
                    session.admin.create_topic(f"over-{transport}", 1)
                else:
                    assert fetch_all(connection, f"over-{transport}") > 300_000
                write_and_read(session, settings, f"over-{transport}", 400)
                administer(connection, session)
                with kdirect.Consumer(
                    {**settings, "group.id": f"readers-{life}", "auto.offset.reset": "earliest"}
                ) as consumer:
                    consumer.subscribe([f"over-{transport}"])
                    assert consumer.consume(10, 20)
                    consumer.commit(asynchronous=False)
                session.close()
            time.sleep(0.3)  # retention, flushes and checkpoints have their turn
            watch.on = False
            if life:
                counted = b.statistics()
                assert counted["log_segments"] > 4 and counted["broker_cold_fetches"] > 0
    assert watch.seen == [], "\n".join(watch.seen)


def test_who_waits_for_work_on_threads_does_not_wait_for_a_callback_that_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged, and the work counts as done."""
    threads = FileThreads([tmp_path])
    partition: Any = SimpleNamespace(directory=tmp_path / "t-0", topic_partition="t-0")

    def fail(result: Any, error: BaseException | None) -> None:
        raise RuntimeError(f"nobody expects {result}")

    async def run() -> float:
        threads.start(asyncio.get_running_loop())
        for i in range(3):
            threads.for_partition(partition, lambda i=i: i, fail)
        began = time.monotonic()
        await threads.settled(30)
        return time.monotonic() - began

    assert asyncio.run(run()) < 20
    threads.close()
    assert sorted(str(r.exc_info[1]) for r in caplog.records if r.exc_info) == [
        f"nobody expects {i}" for i in range(3)
    ]
