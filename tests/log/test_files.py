"""Files: byte for byte what Kafka's own tools expect, and what is left of them on disk after roll,
close and deletion."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import random
import struct
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import pytest
from kafka.record import MemoryRecords

from kdirect.errors import (
    ClosedError,
    ConfigError,
    LogError,
    OffsetOutOfRangeError,
)
from kdirect.format import layout
from kdirect.format.batch import crc32c, iterate_batches
from kdirect.log import checkpoint, producer_state
from kdirect.log.config import LogConfig
from kdirect.log.growth import head_bytes
from kdirect.log.manager import LogManager
from kdirect.log.mapped import copy_bytes
from kdirect.log.producers import ProducerEntry
from kdirect.log.segment_search import position_for
from kdirect.model import TopicPartition
from tests.log.conftest import stamped

TP = TopicPartition("t", 0)
NOW = int(time.time() * 1000)


def files(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir())


def test_segment_files_are_kafkas(open_partition, batch, seed) -> None:
    rng = random.Random(seed)
    p = open_partition(segment_bytes=64 << 10, index_interval_bytes=1000)
    expected: dict[int, bytes] = {}
    base = offset = 0
    for i in range(600):
        n = rng.randrange(1, 6)
        data = batch(n, value_bytes=rng.randrange(300), timestamp_ms=NOW - 1000 + i)
        r = p.append(data)
        assert (r.error, r.base_offset) == (0, offset)
        if p.kernel.segment_base_offset != base:
            base = p.kernel.segment_base_offset
            assert base == offset, "the request that did not fit opens the new segment"
        expected[base] = expected.get(base, b"") + stamped(data, offset)
        offset += n
    directory = p.directory
    assert len(expected) > 3
    p = open_partition()  # a clean close trims
    for base, data in expected.items():
        assert (directory / f"{base:020d}.log").read_bytes() == data
        # ... and kafka-python reads every record of it
        records = MemoryRecords(data)
        at = base
        while (b := records.next_batch()) is not None:
            assert b.validate_crc() and b.base_offset == at
            for record in b:
                assert record.offset == at
                at += 1
        # indexes, entry by entry, by Kafka's rule
        infos = list(iterate_batches(data))
        offsets, times, since, indexed = [], [], 0, -1
        for info in infos:
            if since > 1000:
                offsets.append((info.next_offset - 1 - base, info.position))
                times.append((info.max_timestamp, info.next_offset - 1 - base))
                indexed = info.max_timestamp
                since = 0
            since += info.size
        if infos[-1].max_timestamp > indexed:
            times.append((infos[-1].max_timestamp, infos[-1].next_offset - 1 - base))
        assert (
            list(struct.iter_unpack(">II", (directory / f"{base:020d}.index").read_bytes()))
            == offsets
        )
        assert (
            list(struct.iter_unpack(">qI", (directory / f"{base:020d}.timeindex").read_bytes()))
            == times
        )
        assert len(offsets) > 3 or base == max(expected)  # an index worth the name
    assert b"".join(bytes(x) for x in p.read(0, 1 << 30)) == b"".join(expected.values())


def test_what_there_is_of_a_head_is_allocated_and_never_sparse(open_partition, batch) -> None:
    p = open_partition(segment_bytes=256 << 10)
    assert p.head is None and files(p.directory) == [
        "00000000000000000000.log",
        "leader-epoch-checkpoint",
        "partition.metadata",
    ]
    assert os.stat(p.segments[0].path).st_size == 0
    lengths = []
    while p.append(batch(value_bytes=500)).error == 0 and len(p.segments) == 1:
        stat = os.stat(p.head.path)
        assert (
            p.head.size <= stat.st_size == p.head.mapped_length == p.kernel.capacity
            and stat.st_blocks * 512 >= stat.st_size
        )
        if stat.st_size not in lengths:
            lengths.append(stat.st_size)
        for index in (p.head.offset_index, p.head.time_index):
            stat = os.stat(index.path)
            assert 0 < stat.st_size < 16384 and stat.st_blocks * 512 >= stat.st_size
        assert p.head.reserved_length == 256 << 10 and p.head.address and p.head.fd >= 0
    assert lengths[0] == 4096 and lengths[-1] == 256 << 10 and len(lengths) > 2
    assert p.ensure_head(1000) is p.head


def test_default_sizes() -> None:
    config = LogConfig()
    whole = head_bytes(config, config.segment_bytes)
    assert whole.log == config.segment_bytes == 64 << 20
    assert whole.offset_index < 200_000 and whole.time_index < 256_000
    most = head_bytes(LogConfig(index_interval_bytes=1), config.segment_bytes)
    assert most.offset_index == 10 << 20, "never more than index_max_bytes"
    assert LogConfig(segment_bytes=5000).segment_bytes == 8192
    for name, value in (
        ("segment.bytes", "100"),
        ("retention.msx", "5"),
        ("cleanup.policy", "keep"),
        ("preallocate", "false"),
    ):
        with pytest.raises(ConfigError, match=name[:9]):
            config.with_overrides({name: value})


def test_sealed_segments_are_shortened_only_when_nobody_holds_them(open_partition, batch) -> None:
    p = open_partition(segment_bytes=64 << 10)
    p.ensure_head(64 << 10)
    p.append(batch(value_bytes=5000))
    old = p.head
    old.acquire()
    address, length = old.address, old.mapped_length
    valid = old.size
    p.roll()
    assert (
        old.sealed and old.size == valid and (old.address, old.mapped_length) == (address, length)
    )
    stat = os.stat(old.path)
    assert stat.st_size == 64 << 10, "who maps it may still read past the records"
    assert stat.st_blocks * 512 < 32 << 10, "but a hole is punched"
    old.release()
    assert os.stat(old.path).st_size == valid
    old.acquire()
    assert old.mapped_length == valid
    old.release()
    again = p.head
    p.append(batch())
    p.roll()
    assert os.stat(again.path).st_size == len(batch()), (
        "without holders it is shortened at the roll"
    )


def test_a_held_segment_survives_deletion_and_close(open_partition, batch) -> None:
    p = open_partition()
    data = batch(3)
    p.append(data)
    view = p.read(0, 1 << 20)[0]
    held = p.head.acquire()
    p.roll()
    p.append(batch())
    assert p.delete_records(3) == 3
    assert not held.path.exists() and bytes(view) == stamped(data, 0)
    with pytest.raises(OffsetOutOfRangeError):
        p.read(0, 100)
    p.close()
    assert bytes(view) == stamped(data, 0)
    held.release()
    assert held.address != 0, "the view holds it still"
    del view
    assert held.address == 0 and held.fd == -1
    with pytest.raises(ClosedError):
        held.acquire()
    with pytest.raises(ClosedError):
        p.append(batch())


def test_descriptors_and_mappings_do_not_leak(open_partition, batch) -> None:
    def descriptors() -> int:
        """Of the partition's own files: the process may open others at any time."""
        found = 0
        for entry in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                found += os.readlink(entry).startswith(f"{directory}/")
        return found

    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count(f"{directory}/")

    p = open_partition(segment_bytes=8 << 10)
    directory = p.directory
    p.append(batch())
    before = descriptors()
    for _ in range(100):
        p.append(batch(value_bytes=4000))
        p.roll()
    assert len(p.segments) > 100
    for segment in p.segments:
        position_for(segment, segment.base_offset)
    offset = 0
    while buffers := p.read(offset, 5000):
        offset = list(iterate_batches(bytes(buffers[-1])))[-1].next_offset
    buffers = []
    assert offset == p.log_end_offset
    assert 0 < before <= descriptors() <= before + 40 and 0 < mappings() <= 40 * 3
    p.close()
    assert descriptors() == 0 == mappings()


def test_restart_goes_on_where_it_stopped(open_partition, batch) -> None:
    p = open_partition()
    first = batch(5, timestamp_ms=NOW)
    p.append(first)
    topic_id = p.topic_id
    p = open_partition()
    assert (p.log_end_offset, p.high_watermark, p.log_start_offset, p.topic_id) == (
        5,
        5,
        0,
        topic_id,
    )
    dormant = p.head
    assert (
        dormant is not None
        and not dormant.is_head
        and dormant.size == len(first)
        and not dormant.sealed
    )
    assert bytes(p.read(2, 1)[0]) == stamped(first, 0)
    told = []
    p.on_roll.append(lambda *a: told.append(a))
    held = dormant.acquire()
    assert held.mapped_length == len(first)
    head = p.ensure_head(100)
    assert (
        told == [(p, dormant, head)]
        and head is p.head is p.segments[-1]
        and head.base_offset == 0
        and dormant.sealed
    )
    assert (
        held.mapped_length == len(first)
        and held.address != head.address
        and head.reserved_length == 1 << 20
    )
    assert len(first) + 100 <= head.mapped_length == os.stat(head.path).st_size < 64 << 10, (
        "no more than is needed"
    )
    r = p.append(batch(2, timestamp_ms=NOW + 1))
    assert (r.base_offset, r.end_position) == (5, len(first) + len(batch(2)))
    held.release()
    assert held.address == 0 and os.stat(head.path).st_size == head.mapped_length, (
        "the old object touches the file no more"
    )
    p = open_partition()
    assert [i.base_offset for i in iterate_batches(bytes(p.read(0, 1 << 20)[0]))] == [0, 5]
    assert p.segments[0].max_timestamp == NOW + 1


def test_a_dormant_segment_without_room_is_left_behind(open_partition, batch) -> None:
    p = open_partition(segment_bytes=8192)
    p.append(batch(value_bytes=5000))
    p = open_partition(segment_bytes=8192)
    assert p.append(batch(value_bytes=5000)).base_offset == 1
    assert [s.base_offset for s in p.segments] == [0, 1] and p.segments[0].sealed
    p = open_partition(segment_bytes=8192)
    p.roll()
    assert [s.base_offset for s in p.segments] == [0, 1, 2]


def test_who_holds_a_segment_at_the_close_is_served_and_the_next_start_shortens(
    open_partition, batch
) -> None:
    p = open_partition()
    p.append(batch())
    held = p.head.acquire()
    length = held.mapped_length
    p.close()
    assert os.stat(held.path).st_size == length > len(batch()) and copy_bytes(
        held.address, held.mapped_length
    )[:8] == bytes(8)
    p = open_partition()
    assert (
        os.stat(p.segments[0].path).st_size == len(batch()) == p.segments[0].size
        and p.log_end_offset == 1
    )
    held.release()


# -- checkpoints and identities --------------------------------------------------------------------


def test_no_id_begins_with_a_dash(tmp_path, monkeypatch):
    """Kafka draws such an id again: its tools take one that is given as an argument of its own for
    an option."""
    first = iter([uuid.UUID("fb" + "0" * 30), uuid.UUID("f8" + "0" * 30)] * 2)
    drawn = uuid.uuid4
    monkeypatch.setattr(uuid, "uuid4", lambda: next(first, None) or drawn())
    assert checkpoint.encode_id(uuid.UUID("fb" + "0" * 30)).startswith("-")
    with LogManager([tmp_path / "log"]) as m:
        m.create_partition(TopicPartition("t", 0))
    meta = checkpoint.read_properties(tmp_path / "log" / "meta.properties")
    topic = checkpoint.encode_id(
        checkpoint.read_partition_metadata(tmp_path / "log" / "t-0").topic_id
    )
    assert not [x for x in (meta["cluster.id"], meta["directory.id"], topic) if x.startswith("-")]


def test_checkpoint_files_are_kafkas(tmp_path, batch) -> None:
    directory = tmp_path / "log"
    topic_id = uuid.UUID("12345678-1234-5678-1234-567812345678")
    with LogManager(
        [directory], LogConfig(segment_bytes=8192), node_id=3, cluster_id="MkU3OEVBNTcwNTJENDM2Qk"
    ) as m:
        p = m.create_partition(TP, {"retention.ms": "77", "segment.bytes": 8192}, topic_id)
        other = m.create_partition(TopicPartition("t", 1))
        for _ in range(6):
            assert p.append(batch(value_bytes=3000)).error == 0
        p.delete_records(5)
        assert (
            other.topic_id == topic_id
            and m.topic_id("t") == topic_id
            and m.partitions_of("t") == [p, other]
        )
    assert (directory / "recovery-point-offset-checkpoint").read_text() == "0\n2\nt 0 6\nt 1 0\n"
    assert (directory / "replication-offset-checkpoint").read_text() == "0\n2\nt 0 6\nt 1 0\n"
    assert (directory / "log-start-offset-checkpoint").read_text() == "0\n1\nt 0 5\n"
    assert (directory / "t-0" / "partition.metadata").read_text() == (
        "version: 0\ntopic_id: EjRWeBI0VngSNFZ4EjRWeA\nkdirect_dense_from: 0"
    )
    # The epoch of the first record that is kept, below the log start.
    assert (directory / "t-0" / "leader-epoch-checkpoint").read_text() == "0\n1\n0 4\n"
    meta = checkpoint.read_properties(directory / "meta.properties")
    assert (meta["version"], meta["node.id"], meta["cluster.id"]) == (
        "1",
        "3",
        "MkU3OEVBNTcwNTJENDM2Qk",
    )
    assert (directory / ".kafka_cleanshutdown").exists()
    with LogManager([directory], node_id=3) as m:
        p = m.partitions[TP]
        assert (p.log_start_offset, p.config.retention_ms, p.config.segment_bytes, p.topic_id) == (
            5,
            77,
            8192,
            topic_id,
        )
        assert (
            m.cluster_id == "MkU3OEVBNTcwNTJENDM2Qk"
            and not (directory / ".kafka_cleanshutdown").exists()
        )
        m.alter_topic("t", {"max.message.bytes": 100})
        assert p.append(batch(value_bytes=200)).error == 10 and p.config.retention_ms != 77
    with LogManager([directory], node_id=3) as m:
        assert m.partitions[TP].config.max_message_bytes == 100
        assert m.delete_topic("t") == 2 and not m.partitions
    with LogManager([directory], node_id=3):
        assert not list(directory.glob("t-*")), "what waits is removed by the next start"
    for arguments, match in (
        ({"node_id": 4}, "node 3"),
        ({"node_id": 3, "cluster_id": "other"}, "cluster"),
    ):
        with pytest.raises(LogError, match=match):
            LogManager([directory], **arguments).open()


def test_leader_epochs(open_partition, batch) -> None:
    p = open_partition()
    p.append(batch(4))
    p.set_leader_epoch(3)
    p.append(batch(2))
    with pytest.raises(LogError):
        p.set_leader_epoch(3)
    assert [i.leader_epoch for i in iterate_batches(bytes(p.read(0, 1 << 20)[0]))] == [0, 3]
    assert [p.end_offset_for_epoch(e) for e in (-1, 0, 1, 3, 4)] == [
        (-1, -1),
        (0, 4),
        (0, 4),
        (3, 6),
        (-1, -1),
    ]
    p = open_partition()
    assert (
        p.leader_epoch == 3
        and (p.directory / "leader-epoch-checkpoint").read_text() == "0\n2\n0 0\n3 4\n"
    )


def test_damaged_checkpoints_are_told_and_done_without(tmp_path, caplog) -> None:
    path = tmp_path / "checkpoint"
    for text in ("", "1\n0\n", "0\n5\nt 0 1\n", "0\n1\nt 0\n", "0\n1\nt x 1\n", "\xff\xfe"):
        path.write_bytes(text.encode("latin-1"))
        assert checkpoint.read_offsets(path) == {} and str(path) in caplog.text
        caplog.clear()
    assert checkpoint.read_offsets(tmp_path / "none") == {} and not caplog.text
    offsets = {TopicPartition("a-b_c.d", 3): 12, TopicPartition("a", 0): 0}
    checkpoint.write_offsets(path, offsets)
    assert checkpoint.read_offsets(path) == offsets and files(tmp_path) == ["checkpoint"]


def test_producer_snapshot_is_kafkas() -> None:
    entries = [
        ProducerEntry(7, 2, 1234, -1, -1, ((0, 4, 10, 14), (5, 9, 15, 19))),
        ProducerEntry(8, 0, 99, 3, 40, ()),
    ]
    data = producer_state.pack_snapshot(entries)
    # ProducerStateManager.PRODUCER_SNAPSHOT schema, version 1
    entry = struct.Struct(">qhiqiqiq")
    body = (
        struct.pack(">i", 2)
        + entry.pack(7, 2, 9, 19, 4, 1234, -1, -1)
        + entry.pack(8, 0, -1, -1, 0, 99, 3, 40)
    )
    assert data == struct.pack(">hI", 1, crc32c(body)) + body
    assert producer_state.unpack_snapshot(data) == [
        ProducerEntry(7, 2, 1234, -1, -1, ((5, 9, 15, 19),)),
        entries[1],
    ]
    for broken in (
        data[:-1],
        b"",
        b"\0\2" + data[2:],
        data[:20] + b"\x55" + data[21:],
        data + b"\0",
    ):
        with pytest.raises(ValueError):
            producer_state.unpack_snapshot(broken)


# -- one broker at a time --------------------------------------------------------------------------


def test_a_second_broker_is_refused(tmp_path) -> None:
    directory = tmp_path / "log"
    with LogManager([directory]):
        with pytest.raises(LogError, match="in use by another broker"):
            LogManager([directory]).open()
        code = (
            f"from kdirect.log.manager import LogManager; LogManager([{str(directory)!r}]).open()"
        )
        run = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False
        )
        assert (
            run.returncode == 1
            and f"log directory {directory} is in use by another broker" in run.stderr
        )
    LogManager([directory]).open().close()


def test_bad_directories(tmp_path) -> None:
    with pytest.raises(ConfigError):
        LogManager([])
    with pytest.raises(ConfigError):
        LogManager([tmp_path, tmp_path])
    (tmp_path / "file").write_text("")
    with pytest.raises(LogError, match="cannot be used"):
        LogManager([tmp_path / "file"]).open()
    m = LogManager([tmp_path / "a", tmp_path / "b"]).open()
    for i in range(4):
        m.create_partition(TopicPartition("x", i))
    assert [len(list((tmp_path / d).glob("x-*"))) for d in "ab"] == [2, 2]
    with pytest.raises(LogError, match="exists already"):
        m.create_partition(TopicPartition("x", 0))
    with pytest.raises(ConfigError):
        m.create_partition(TopicPartition("x/y", 0))
    m.close()
    with pytest.raises(ClosedError):
        m.create_partition(TopicPartition("x", 9))
    (tmp_path / "a" / "x-1").mkdir()
    with pytest.raises(LogError, match="exists in"):
        LogManager([tmp_path / "a", tmp_path / "b"]).open()
    assert LogManager([tmp_path / "b"]).open().close() is None, (
        "a failed start gives the locks back"
    )


def test_slots_of_a_deleted_topic_are_revoked(tmp_path, batch) -> None:
    with LogManager([tmp_path / "log"], LogConfig(segment_bytes=8192)) as m:
        p = m.create_partition(TP)
        data = batch()
        p.append(data)
        memory = mmap.mmap(-1, 64)
        p.kernel.attach_slot(ctypes.addressof(ctypes.c_char.from_buffer(memory)), 5)
        view = p.read(0, 100)[0]
        m.delete_topic("t")
        assert memory[4] == layout.SLOT_FLAG_ASSIGNED | layout.SLOT_FLAG_REVOKED and bytes(
            view
        ) == stamped(data, 0)
        assert not (tmp_path / "log" / "t-0").exists()
        del view
        assert m.create_partition(TP).log_end_offset == 0


def test_topics_are_deleted_beside_checkpoints(memory_path) -> None:
    """Two threads, one set of files: none fails, and what was deleted last is not in them."""
    with LogManager([memory_path], LogConfig(segment_bytes=64 << 10)) as m:
        m.create_partition(TP)
        failed: list[BaseException] = []
        done = threading.Event()

        def checkpoints() -> None:
            try:
                while not done.is_set():
                    m.checkpoint()
            except BaseException as e:
                failed.append(e)

        threads = [threading.Thread(target=checkpoints) for _ in range(2)]
        for t in threads:
            t.start()
        try:
            for i in range(60):
                m.create_partition(TopicPartition(f"d{i}", 0))
                m.delete_topic(f"d{i}")
                for name in (checkpoint.RECOVERY_POINTS, checkpoint.HIGH_WATERMARKS):
                    assert set(checkpoint.read_offsets(memory_path / name)) == {TP}
        finally:
            done.set()
            for t in threads:
                t.join(30)
        assert not failed and not any(t.is_alive() for t in threads)


def test_a_topic_is_deleted_though_there_can_be_no_checkpoint(tmp_path, caplog) -> None:
    with LogManager([tmp_path], LogConfig(segment_bytes=64 << 10)) as m:
        m.create_partition(TP)
        in_the_way = tmp_path / f"{checkpoint.RECOVERY_POINTS}.tmp"
        in_the_way.mkdir()
        assert m.delete_topic("t") == 1 and not m.partitions and not (tmp_path / "t-0").exists()
        assert "no checkpoint after the deletion of t-0" in caplog.text
        in_the_way.rmdir()
        m.create_partition(TP)


def test_close_while_others_append(tmp_path, batch) -> None:
    m = LogManager([tmp_path / "log"], LogConfig(segment_bytes=64 << 10)).open()
    p = m.create_partition(TP)
    data = batch(value_bytes=500)
    acknowledged = [0] * 3
    errors: list[BaseException] = []

    def work(i: int) -> None:
        try:
            while True:
                r = p.append(data)
                assert r.error == 0
                acknowledged[i] += 1
        except ClosedError:
            pass
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for t in threads:
        t.start()
    time.sleep(0.05)
    m.close()
    for t in threads:
        t.join()
    assert not errors
    with LogManager([tmp_path / "log"]) as m:
        assert m.partitions[TP].log_end_offset == sum(acknowledged) > 0


def test_the_names_of_a_new_partition_are_synced_once(tmp_path, monkeypatch):
    """With all of them, each file by itself, before the partition has its name and is known."""
    synced = []

    def sync(directory):
        synced.append((directory, sorted(os.listdir(directory))))
        real(directory)

    def sync_each(parent, paths):
        if paths:
            synced.append((parent, sorted(str(p.relative_to(parent)) for p in paths)))
        real_paths(parent, paths)

    real, real_paths = checkpoint.sync_directory, checkpoint.sync_paths
    with LogManager([tmp_path]) as logs:
        monkeypatch.setattr(checkpoint, "sync_directory", sync)
        monkeypatch.setattr(checkpoint, "sync_paths", sync_each)
        logs.create_partition(TopicPartition("t", 0), {"segment.bytes": 1 << 20})
        monkeypatch.undo()
    files = [
        "00000000000000000000.log",
        checkpoint.LEADER_EPOCHS,
        checkpoint.PARTITION_METADATA,
        checkpoint.TOPIC_PROPERTIES,
    ]
    first, second = synced
    assert first == (tmp_path, ["t-0-new", *(f"t-0-new/{name}" for name in files)])
    assert second[0] == tmp_path and "t-0" in second[1] and "t-0-new" not in second[1]
