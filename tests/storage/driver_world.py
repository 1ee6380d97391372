"""A broker with one tiered partition in virtual time, whose parts are the real ones: `RemoteLogs`
with uploads, sweeps and deletions, the log in a directory, the object store.

Simulated are the threads, which take turns (`turns`), what the store does (`tests.objects.faulty`),
and when metadata records are committed.  The broker dies at any moment and comes back.  After every
step the promises of tiered storage are checked against the records that were produced, the objects
that are there and the metadata that is committed (`DriverWorld.check`); in the end the faults stop,
and everything has to settle (`DriverWorld.heal`).
"""

from __future__ import annotations

import logging
import random
import uuid
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kdirect.format.batch import stamp
from kdirect.format.record_list import encode_records
from kdirect.format.remote_metadata import (
    PartitionDeleteState,
    RemotePartitionDelete,
    SegmentState,
)
from kdirect.format.segment_object import SegmentIdentity, parse_key, parse_tail
from kdirect.log.config import LogConfig
from kdirect.log.manager import LogManager
from kdirect.log.partition import Partition
from kdirect.model import TopicPartition
from kdirect.objects.store import ObjectStore
from kdirect.storage.remote_logs import RemoteLogs, RemoteSettings
from kdirect.storage.remote_reader import RemoteReader
from kdirect.storage.segment_states import PartitionMetadata, Record
from tests.objects.faulty import Chances, FaultyHandler, Upload, VirtualClock, faulty_store
from tests.storage.turns import Ended, Life, SimulatedThreads, Turns

CLUSTER = "cluster"
TP = TopicPartition("t", 0)
TOPIC_ID = uuid.UUID(int=9)
WHERE = (TOPIC_ID, 0)
INTERVAL_S = 5.0
COPY_TIMEOUT_S = 20.0
REMEMBERED_S = 40.0  # for so long a decision by an older configuration may be carried out
OUTAGE = Chances(unavailable=0.9, lost=0.5, silent=0.05)
_S = SegmentState


class SlowStore(FaultyHandler):
    """Each request takes a while, and ends where its process dies; an upload that was whole may
    come later."""

    def __init__(self, world: DriverWorld, seed: int) -> None:
        self._turns = world.turns
        self._world = world
        super().__init__(seed, clock=world.clock, silence_s=60.0, sleep=world.turns.pause)

    def request(self, verb: str, path: str) -> None:
        self._turns.pause(self._random.random() * 0.3)
        super().request(verb, path)

    def put(self, path: str, data: bytes) -> None:
        self._world.stored(path, data)
        super().put(path, data)

    def remove(self, path: str) -> None:
        self._world.deletes(path)
        super().remove(path)


class _LastingUpload(Upload):
    def close(self) -> None:
        try:
            super().close()
        except Ended:
            handler: Any = self._handler
            if handler.draw(0.5) and self._path not in handler.objects:
                handler._world.comes_late(self._path, bytes(self._data))
            raise


SlowStore.upload = _LastingUpload


class Metadata:
    """The metadata topic: `records` are committed, and survive the process."""

    def __init__(self, world: DriverWorld) -> None:
        self._world = world
        self.records: list[Record] = []
        self.known = PartitionMetadata()
        self.failures = 0.0

    def append(self, record: Record) -> None:
        self.records.append(record)
        self.known.apply(record)

    def writer(self, life: Life) -> _Writer:
        return _Writer(self._world, self, life)


class _Writer:
    """`MetadataLog` of one process: one record after the other."""

    def __init__(self, world: DriverWorld, metadata: Metadata, life: Life) -> None:
        self._world = world
        self._metadata = metadata
        self._life = life
        self._waiting: deque[tuple[Record, Callable[[bool], None]]] = deque()
        self._is_busy = False

    def write(self, record: Record, done: Callable[[bool], None], /) -> None:
        if self._life.is_over:
            return
        self._waiting.append((record, done))
        if not self._is_busy:
            self._is_busy = True
            self._world.turns.spawn(self._write_all, self._life)

    def _write_all(self) -> None:
        world = self._world
        while self._waiting:
            world.turns.pause(world.rng.random() * 0.3)
            record, done = self._waiting.popleft()
            if world.rng.random() < self._metadata.failures:
                world.count("records_failed")
                done(False)
                if world.rng.random() < 0.5:  # nobody knew, and it was written
                    world.turns.pause(world.rng.random() * 10)
                    if not world.forgotten:
                        self._commit(record)
                continue
            self._commit(record)
            done(True)
        self._is_busy = False

    def _commit(self, record: Record) -> None:
        self._metadata.append(record)
        self._world.told(record)

    def die(self) -> None:
        """What was under way may have been written."""
        for record, _ in list(self._waiting)[: self._world.rng.randrange(3)]:
            self._metadata.append(record)


class DriverWorld:
    """`kind`: the class under test."""

    def __init__(self, seed: int, directory: Path, kind: type[RemoteLogs] = RemoteLogs) -> None:
        self.rng = rng = random.Random(seed)
        self.kind = kind
        self.directory = directory
        self.clock = VirtualClock()
        self.clock.now_s = 1_700_000_000.0
        self.turns = Turns(rng, self.clock)
        self.handler = SlowStore(self, seed)
        self.store: ObjectStore = faulty_store(self.handler)
        self.metadata = Metadata(self)
        self.counts: dict[str, int] = {}
        self.bases: list[int] = []  # of all batches ever
        self.batches: list[bytes] = []  # as the log has them
        self.sealed: set[str] = set()  # objects that were there
        self.may_stay: set[str] = set()  # those that came when nobody expected them any more
        self.late: list[tuple[float, str, bytes]] = []
        self.deleted = False
        self.forgotten = False  # the broker knows no such topic any more
        self.overrides = {
            "remote.storage.enable": "true",
            "remote.log.delete.on.disable": "true",
            "segment.bytes": "4096",
            "index.interval.bytes": "512",
            "local.retention.bytes": rng.choice(("1", "1", "6000")),
            "local.retention.ms": rng.choice(("-2", "10000")),
            "retention.ms": rng.choice(("-1", "-1", "60000", "300000")),
            "retention.bytes": rng.choice(("-1", "-1", "9000", "30000")),
        }
        self.configs: list[tuple[float, LogConfig]] = []  # in force until then
        self.justified = 0  # where the log may begin
        self.faults = Chances(
            unavailable=rng.choice((0.0, 0.02, 0.2)),
            lost=rng.choice((0.0, 0.02, 0.2)),
            half=rng.choice((0.0, 0.02, 0.2)),
            missing=rng.choice((0.0, 0.02, 0.2)),
            silent=rng.choice((0.0, 0.02, 0.1)),
            stale=rng.choice((0.0, 0.5)),
        )
        self.handler.chances = self.faults
        self.handler.silence_s = rng.choice((5.0, 30.0, 90.0))
        self.metadata.failures = rng.choice((0.0, 0.05, 0.4))
        self.errors = _Errors()
        self.start()

    # -- processes ---------------------------------------------------------------------------------

    def start(self) -> None:
        """A process of the broker, as `kdirect.broker.remote_storage` starts it."""
        self.life = Life()
        self.threads = SimulatedThreads(self.turns, self.life, INTERVAL_S)
        self.manager = LogManager(
            [self.directory / "log"],
            LogConfig(remote_system=True),
            cluster_id=CLUSTER,
        ).open()
        self.writer = self.metadata.writer(self.life)
        settings = RemoteSettings(
            cluster_id=CLUSTER, broker_id=1, interval_s=INTERVAL_S, copy_timeout_s=COPY_TIMEOUT_S
        )
        self.logs = self.kind(
            self.store,
            self.writer,
            settings,
            ownership=Owner(),  # type: ignore[arg-type]
            partition_count=lambda topic: 1,
            time_ms=lambda: self.now_ms,
            threads=self.threads,
            new_id=lambda: uuid.UUID(int=self.rng.getrandbits(128)),
        )
        self.is_led = False
        for record in self.metadata.known.records():
            self.logs.apply(record)
        if not self.forgotten:
            if TP not in self.manager.partitions and not self.deleted:
                self.manager.create_partition(TP, self.overrides, TOPIC_ID)
            if not self.deleted:
                self.manager.on_changed = self.changed
                self.changed(self.partition)
        self.logs.resume_deletions()
        if self.deleted and not self.forgotten:
            self.delete_remotely()

    def changed(self, partition: Partition) -> None:
        if self.is_led:
            self.logs.wake(*WHERE)
        elif partition.is_tiered or self.logs.has_metadata(*WHERE):
            self.is_led = True
            self.logs.lead(partition)

    def die(self, *, clean: bool = False) -> None:
        self.count("ends" if clean else "deaths")
        if clean:
            self.logs.close()
            self.turns.run_until(self.clock.now_s + 1.0)
        self.turns.end(self.life)
        self.writer.die()
        self.manager.close(clean=clean)
        self.start()

    @property
    def partition(self) -> Partition:
        return self.manager.partitions[TP]

    @property
    def now_ms(self) -> int:
        return int(self.clock.now_s * 1000)

    def told(self, record: Record) -> None:
        """A record is committed and on disk."""
        if self.deleted and isinstance(record, RemotePartitionDelete):
            self.forgotten = True
        self.logs.apply(record)

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    # -- what happens ------------------------------------------------------------------------------

    def step(self) -> None:
        roll = self.rng.random()
        if roll < 0.40:
            self.produce(self.rng.randint(1, 6))
        elif roll < 0.50:
            if self.partition.segments[-1].size:
                self.partition.roll()
        elif roll < 0.70:
            self.expire()
        elif roll < 0.73:
            self.die(clean=self.rng.random() < 0.3)
        elif roll < 0.75:
            self.delete_records()
        elif roll < 0.80:
            self.reconfigure()
        elif roll < 0.84:
            self.sweep()
        elif roll < 0.87:
            self.manager.checkpoint()
        elif roll < 0.91:
            self.count("outages")
            self.handler.chances = OUTAGE
            self.run(self.rng.random() * 60)
            self.handler.chances = self.faults
        self.run(self.rng.random() * self.rng.choice((1, 1, 5, 20)))

    def run(self, seconds: float) -> None:
        end = self.clock.now_s + seconds
        while self.late and min(self.late)[0] <= end:
            due, path, data = min(self.late)
            self.late.remove((due, path, data))
            self._run_until(due)
            self.handler.put(path, data)
        self._run_until(end)
        self.check()

    def _run_until(self, until_s: float) -> None:
        self.turns.run_until(until_s)
        if self.turns.failures:
            raise self.turns.failures[0]
        self.errors.check()

    def produce(self, count: int) -> None:
        for _ in range(count):
            records = self.rng.randint(1, 4)
            at = self.partition.log_end_offset
            values = [
                (b"k", b"%08d" % (at + i) + bytes(80), None, self.now_ms) for i in range(records)
            ]
            data = bytearray(encode_records(values))
            result = self.partition.append(bytes(data), self.now_ms)
            assert not result.error
            stamp(data, at, 0)
            self.bases.append(at)
            self.batches.append(bytes(data))

    def expire(self) -> None:
        """The cleaner of the log."""
        before = self.partition.local_log_start_offset
        self.partition.apply_retention(self.now_ms)
        if self.partition.local_log_start_offset > before:
            self.count("local_deleted")
        self.check()

    def delete_records(self) -> None:
        offset = self.rng.randint(self.partition.log_start_offset, self.partition.high_watermark)
        self.justified = max(self.justified, offset)
        self.count("records_deleted")
        self.partition.delete_records(offset)
        self.check()

    def reconfigure(self) -> None:
        """Another retention; or the topic is tiered no longer, or again."""
        rng, overrides = self.rng, dict(self.overrides)
        if rng.random() < 0.4:
            on = overrides["remote.storage.enable"] == "true"
            overrides["remote.storage.enable"] = "false" if on else "true"
            self.count("switched")
            if rng.random() < 0.5:  # for a moment
                self.configure({**overrides})
                self.run(rng.random() * 4)
                overrides["remote.storage.enable"] = "true" if on else "false"
        else:
            overrides["retention.ms"] = rng.choice(("-1", "20000", "60000"))
            overrides["retention.bytes"] = rng.choice(("-1", "9000", "30000"))
            overrides["remote.log.copy.disable"] = rng.choice(("false", "false", "true"))
        self.configure(overrides)

    def configure(self, overrides: dict[str, str]) -> None:
        self.configs.append((self.clock.now_s, self.partition.config))
        self.overrides = overrides
        self.manager.alter_topic(TP.topic, overrides)
        if not self.partition.is_tiered:
            self.justified = max(self.justified, self.partition.first_kept_offset)

    def sweep(self) -> None:
        self.logs.sweep(list(self.metadata.known.given_up.values()))

    def delete_topic(self) -> None:
        self.count("topics_deleted")
        self.deleted = True
        self.manager.delete_topic(TP.topic)
        self.delete_remotely()

    def delete_remotely(self) -> None:
        if not self.logs.delete(TP.topic, TOPIC_ID, 0):
            self.forgotten = True

    # -- promises ----------------------------------------------------------------------------------

    def comes_late(self, path: str, data: bytes) -> None:
        self.count("late_uploads")
        self.late.append((self.clock.now_s + self.rng.random() * 200, path, data))

    def expected(self, start: int, end: int) -> bytes:
        """The batches from `start` to `end`, where batches begin."""
        return b"".join(self.batches[self._index(start) : self._index(end)])

    def _index(self, offset: int) -> int:
        if offset == (self.end or 0):
            return len(self.bases)
        i = bisect_right(self.bases, offset) - 1
        assert self.bases[i] == offset, f"no batch begins at {offset}"
        return i

    @property
    def end(self) -> int:
        return self._end_of(len(self.bases) - 1) if self.bases else 0

    def _end_of(self, index: int) -> int:
        return self.bases[index] + int.from_bytes(self.batches[index][23:27], "big") + 1

    def stored(self, path: str, data: bytes) -> None:
        """An object appears: it is a true copy, and its key is new."""
        assert path not in self.sealed, f"{path} is written again"
        footer, _ = parse_tail(data, len(data))
        log = self.expected(footer.base_offset, footer.end_offset)
        assert data[: footer.log_bytes] == log, f"{path} has other records"
        self.sealed.add(path)
        segment = self.metadata.known.segments.get(footer.identity.segment_id)
        if segment is None or segment.state is not _S.COPY_SEGMENT_STARTED:
            self.may_stay.add(path)
        self.count("stored")

    def deletes(self, path: str) -> None:
        """An object is about to be deleted."""
        segment = self.metadata.known.segments.get(self._identity(path).segment_id)
        assert segment is None or segment.state is not _S.COPY_SEGMENT_FINISHED, (
            f"the object of {segment} is deleted, which counts"
        )

    def _identity(self, path: str) -> SegmentIdentity:
        parsed = parse_key("", path.removeprefix("sim/prefix/"))
        assert parsed is not None, path
        return parsed[0]

    def there(self) -> dict[uuid.UUID, str]:
        """Segment id -> path of each object."""
        return {self._identity(path).segment_id: path for path in self.handler.objects}

    def check(self) -> None:
        """What is not here counts in the metadata, and is in the store."""
        if self.deleted:
            return
        partition = self.partition
        start, local = partition.log_start_offset, partition.local_log_start_offset
        self._check_start(start)
        assert partition.log_end_offset == self.end
        if start >= local:
            return
        there = self.there()
        finished = [
            s for s in self.metadata.known.segments.values() if s.state is _S.COPY_SEGMENT_FINISHED
        ]
        offset = start
        while offset < local:
            holding = [s for s in finished if s.base_offset <= offset < s.end_offset]
            assert holding, f"offset {offset} is nowhere; local from {local}"
            gone = [s for s in holding if s.segment_id not in there]
            assert not gone, f"the object of {gone[0]} is gone"
            offset = max(s.end_offset for s in holding)

    def _check_start(self, start: int) -> None:
        """The log begins where records were deleted on request, or retention says so."""
        if start <= self.justified:
            return
        now = self.clock.now_s
        self.configs = [c for c in self.configs if c[0] > now - REMEMBERED_S]
        last = max(0, bisect_right(self.bases, start - 1) - 1)
        newest = int.from_bytes(self.batches[last][35:43], "big")
        kept = sum(map(len, self.batches[last + 1 :]))
        for config in [self.partition.config, *(c for _, c in self.configs)]:
            if 0 <= config.retention_ms < self.now_ms - newest:
                break
            if 0 <= config.retention_bytes <= kept + 400:
                break
        else:
            raise AssertionError(f"the log begins at {start}, and not at {self.justified}")
        self.justified = start

    def read_everything(self) -> None:
        """By the reader of brokers and by the log: each record once."""
        partition = self.partition
        start, local = partition.log_start_offset, partition.local_log_start_offset
        reader = RemoteReader(
            self.store,
            cluster_id=CLUSTER,
            index_directory=self.directory / "indexes",
            index_bytes=1 << 20,
            chunk_bytes=1 << 20,
            threads=1,
        )
        data = b""
        try:
            first = bisect_right(self.bases, start) - 1 if self.bases else 0
            offset = start
            while offset < local:
                found = reader.read(lambda o: self.logs.find(*WHERE, o), offset, 1 << 20)
                assert found is not None
                for view in found.result(timeout=30):
                    data += bytes(view)
                offset = self._offset_after(first, data)
        finally:
            reader.close()
        while offset < self.end:
            for view in partition.read(offset, 1 << 20):
                data += bytes(view)
            offset = self._offset_after(first, data)
        assert data == b"".join(self.batches[first:] if start < self.end else [])

    def _offset_after(self, first: int, data: bytes) -> int:
        """The offset after batches that begin with that of index `first`."""
        size = 0
        for i in range(first, len(self.batches)):
            size += len(self.batches[i])
            if size >= len(data):
                assert size == len(data), f"the batches before {self._end_of(i)} are others"
                return self._end_of(i)
        raise AssertionError("more was read than was written")

    # -- the end -----------------------------------------------------------------------------------

    def heal(self) -> None:
        """The faults stop; in the end nothing is left to be done, and no object is too many."""
        self.handler.chances = Chances()
        self.metadata.failures = 0.0
        if not self.deleted:
            self.configure({**self.overrides, "remote.log.copy.disable": "false"})
        self.run(self.handler.silence_s + 10)
        for _ in range(60):
            self.run(20.0)
            if not self.late and self._is_settled():
                break
        else:
            raise AssertionError(f"it does not settle: {self.logs.figures()}")
        known = self.metadata.known.segments
        orphans = {path for i, path in self.there().items() if i not in known}
        assert orphans <= self.may_stay, f"{orphans} were deleted and are there"
        self.sweep()
        for _ in range(20):  # what has become too old meanwhile goes
            self.run(15.0)
            states = {i: s.state for i, s in self.metadata.known.segments.items()}
            finished = {i for i, s in states.items() if s is _S.COPY_SEGMENT_FINISHED}
            if set(states) == finished:
                break
        assert set(states) == finished, f"metadata of segments that are gone: {states}"
        assert set(self.there()) == finished, "objects are too many, or too few"
        if self.deleted:
            assert not finished
            return
        if not self.partition.is_tiered:
            assert not finished, "a topic that is tiered no longer has objects"
        self.read_everything()

    def _is_settled(self) -> bool:
        if self.deleted:
            known = self.metadata.known.deletion
            state = PartitionDeleteState.DELETE_PARTITION_FINISHED
            return self.forgotten and (known is None or known.state is state)
        self.expire()
        partition, figures = self.partition, self.logs.figures().get(WHERE)
        if figures is None:
            return not partition.is_tiered
        if figures.delete_lag_segments:
            return False
        if not partition.is_tiered:
            return not figures.metadata_count
        sizes = [segment.size for segment in partition.segments]
        is_small = len(sizes) == 1 or sum(sizes[1:]) < int(self.overrides["local.retention.bytes"])
        return is_small and not figures.copy_lag_segments

    def close(self) -> None:
        self.turns.end(self.life)
        self.manager.close(clean=False)
        self.errors.close()


class Owner:
    """`Ownership` where nobody else has the directory: it takes its turns by locks of its own."""

    is_lost = False

    def require(self, within_s: float) -> None:
        pass

    def close(self) -> None:
        pass


class _Errors(logging.Handler):
    """What the product says that nobody expects."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self._said: list[str] = []
        self._log = logging.getLogger("kdirect.storage")
        self._log.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self._said.append(self.format(record))

    def check(self) -> None:
        assert not self._said, self._said[0]

    def close(self) -> None:
        self._log.removeHandler(self)
        super().close()


__all__ = ["DriverWorld"]
