"""Remote segments made of the sealed segments of a real partition, and a store over a directory
that counts its requests, takes its time, and fails when it is told to."""

from __future__ import annotations

import itertools
import struct
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from pyarrow import fs

from kdirect.format.batch import crc32c, iterate_batches, stamp
from kdirect.format.ids import encode_id
from kdirect.format.record_list import encode_records
from kdirect.format.remote_metadata import RemoteSegment, SegmentState
from kdirect.format.segment_files import (
    AbortedTransaction,
    pack_leader_epochs,
    pack_transaction_index,
)
from kdirect.format.segment_object import (
    CustomMetadata,
    Section,
    SegmentFacts,
    SegmentIdentity,
    TailPlace,
    object_key,
    pack_custom_metadata,
    pack_tail,
)
from kdirect.log.partition import Partition
from kdirect.log.scan import scan_segment
from kdirect.objects.store import ObjectStore
from kdirect.storage.remote_reader import RemoteReader
from kdirect.storage.remote_segments import RemoteSegments

CLUSTER = "cluster"
TOPIC_ID = uuid.UUID(int=5)
NOW = int(time.time() * 1000)
Faults = Callable[[str, int, int], bytes | None]


def large_batch(records: int, value_bytes: int, offset: int) -> bytes:
    """A batch as a log keeps it, made faster than by a Kafka client."""
    value = bytes([offset % 251]) * value_bytes
    data = bytearray(encode_records([(b"k", value, None, NOW)] * records))
    stamp(data, offset, 0)
    return bytes(data)


class _File:
    """An open object: each read at a position is one request."""

    closed = False

    def __init__(self, handler: StoreHandler, path: str) -> None:
        self._handler = handler
        self._path = path
        self._file = open(path, "rb")  # noqa: SIM115
        self._size = Path(path).stat().st_size
        self._at = 0

    def seek(self, position: int, whence: int = 0) -> int:
        self._at = position + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, length: int = -1) -> bytes:
        length = self._size - self._at if length < 0 else length
        self._file.seek(self._at)
        data = self._handler.answer(self._path, self._at, self._file.read(length))
        self._at += len(data)
        return data

    def close(self) -> None:
        self._file.close()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False


class StoreHandler(fs.FSSpecHandler):
    """Reads of a directory.  `gets` has (name, position, length) of each, in the order in which
    they were begun; `delay_s` passes before each answer; `fault(name, position, data)` may raise,
    or return other bytes."""

    def __init__(self) -> None:
        self.gets: list[tuple[str, int, int]] = []
        self.delay_s = 0.0
        self.hold = threading.Event()
        self.hold.set()
        self.fault: Callable[[str, int, bytes], bytes] = lambda _name, _at, data: data

    def get_type_name(self) -> str:
        return "counted"

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__

    def get_file_info(self, paths: list[str]) -> list[fs.FileInfo]:
        return fs.LocalFileSystem().get_file_info(paths)

    def open_input_file(self, path: str) -> pa.NativeFile:
        return pa.PythonFile(_File(self, path), mode="r")

    def answer(self, path: str, position: int, data: bytes) -> bytes:
        self.gets.append((Path(path).name, position, len(data)))
        if self.delay_s:
            time.sleep(self.delay_s)
        assert self.hold.wait(30)
        return self.fault(Path(path).name, position, data)


class Tiers:
    """The store, what lies in it, and readers of it.  With a `store` that is given, the handler has
    nothing to do with it."""

    def __init__(self, directory: Path, store: ObjectStore | None = None) -> None:
        self.directory = directory / "store"
        self.directory.mkdir()
        self.cache_directory = directory / "remote-log-index-cache"
        self.handler = StoreHandler()
        uri = f"file://{self.directory}"
        self.plain = ObjectStore(uri)
        self.store = ObjectStore(uri, filesystem=fs.PyFileSystem(self.handler))
        if store is not None:
            self.plain = self.store = store
        self.segments = RemoteSegments()
        self._readers: list[RemoteReader] = []

    def add(
        self,
        log: bytes,
        base: int,
        end: int,
        *,
        epochs: tuple[tuple[int, int], ...] | None = None,
        aborted: tuple[AbortedTransaction, ...] = (),
        interval: int = 4096,
        indexes: tuple[bytes, bytes] | None = None,
        with_custom: bool = True,
        change_tail: Callable[[bytes], bytes] = bytes,
        topic_id: uuid.UUID = TOPIC_ID,
    ) -> RemoteSegment:
        """Store the log's bytes as the object of a segment, which counts from now on."""
        epochs = epochs or ((0, base),)
        if indexes is None:
            address = pa.py_buffer(log).address
            found = scan_segment(address, len(log), base, base, interval)
            indexes = found.offset_index, found.time_index
        times = [t for t, _ in struct.iter_unpack(">qI", indexes[1])]
        identity = SegmentIdentity(
            cluster_id=CLUSTER,
            topic="t",
            topic_id=topic_id,
            partition=0,
            segment_id=uuid.uuid4(),
        )
        facts = SegmentFacts(
            identity=identity,
            base_offset=base,
            end_offset=end,
            log_bytes=len(log),
            max_timestamp_ms=max(times, default=-1),
            min_timestamp_ms=-1,
            broker_id=0,
            leader_epoch=0,
        )
        sections = {
            Section.OFFSET_INDEX: indexes[0],
            Section.TIME_INDEX: indexes[1],
            Section.TRANSACTION_INDEX: pack_transaction_index(aborted),
            Section.LEADER_EPOCHS: pack_leader_epochs(epochs),
        }
        tail = change_tail(pack_tail(facts, crc32c(log), sections))
        key = object_key("", identity, base)
        self.plain.put(key, len(log) + len(tail), [log, tail])
        place = TailPlace(len(log), len(tail))
        segment = RemoteSegment(
            topic_id=topic_id,
            topic="t",
            partition=0,
            segment_id=identity.segment_id,
            base_offset=base,
            end_offset=end,
            broker_id=0,
            max_timestamp_ms=facts.max_timestamp_ms,
            event_timestamp_ms=0,
            leader_epochs=epochs,
            size=len(log),
            custom=pack_custom_metadata(CustomMetadata(0, place)) if with_custom else None,
            state=SegmentState.COPY_SEGMENT_FINISHED,
            txn_index_empty=not aborted,
        )
        self.segments.add(segment)
        return segment

    def add_sealed(self, partition: Partition) -> list[RemoteSegment]:
        """All sealed segments of a partition, by its files."""
        logs = sorted(partition.directory.glob("*.log"))
        return [
            self.add(
                path.read_bytes(),
                int(path.stem),
                int(after.stem),
                indexes=(
                    path.with_suffix(".index").read_bytes(),
                    path.with_suffix(".timeindex").read_bytes(),
                ),
            )
            for path, after in itertools.pairwise(logs)
        ]

    def path(self, segment: RemoteSegment) -> Path:
        """The file of its object."""
        (found,) = self.directory.rglob(f"*-{encode_id(segment.segment_id)}.kseg")
        return found

    def reader(self, *, chunk_bytes: int = 64 << 20, index_bytes: int = 1 << 30, **options: Any):
        reader = RemoteReader(
            self.store,
            cluster_id=CLUSTER,
            index_directory=self.cache_directory,
            index_bytes=index_bytes,
            chunk_bytes=chunk_bytes,
            **options,
        )
        self._readers.append(reader)
        return reader

    def close(self) -> None:
        self.handler.hold.set()
        for reader in self._readers:
            reader.close()


class Got(NamedTuple):
    """What a read brought: its bytes, and the offsets that they hold."""

    data: bytes
    first: int
    next: int


def got(views: list[memoryview]) -> Got:
    data = b"".join(views)
    batches = list(iterate_batches(data))
    return Got(data, batches[0].base_offset, batches[-1].next_offset)


def read(reader: RemoteReader, tiers: Tiers, offset: int, max_bytes: int, **options: Any) -> Got:
    future = reader.read(tiers.segments.at_or_after, offset, max_bytes, **options)
    assert future is not None
    return got(future.result(timeout=30))
