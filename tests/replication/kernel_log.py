"""A replica's log in a real kernel, behind the methods of `tests.cluster.model_log.ModelLog`.

What the world is told of a log is read back from the bytes of its segments, after every change:
where a batch lies, the offset and the leader epoch that its header carries, and the record, whose
value names the epoch and the number that it was made with.  Each change is made to a `ModelLog` of
the same records, too, and both must agree.

All records are one idempotent producer's, and a record's sequence number is its offset.  So a
leader takes the next one, and does not double the last one, only where what it knows of producers
is exactly what its log has: after it copied, was pushed to, was cut, started over, or crashed.

Where logs are compacted (`tests.replication.cleaning`), a record that is missing, or whose batch is
empty, was removed by compaction: what the world is told of is the record that was committed at its
offset (`Committed`).  There must be a later committed one of its key.

A `KernelLog` is what the log was when it was read; the partition below it goes on.
"""

from __future__ import annotations

import struct
from weakref import WeakKeyDictionary

from kafka.record.default_records import DefaultRecordBatchBuilder

from kdirect.cluster.leading_replica import epoch_end
from kdirect.format import layout
from kdirect.format.batch import crc32c
from kdirect.log.partition import Partition
from tests.cluster.model_log import ModelLog, Record
from tests.cluster.world import Broken

NOW_MS = 1_700_000_000_000
PRODUCER = 7  # whose sequence numbers are the offsets, so that they go on wherever a log does
READ_BYTES = 1 << 20
# Of a record that its producer sends again to the next leader, in the place of the epoch.
ANY_EPOCH = 999_999
_CRC = struct.Struct(">I")
_HEADER = struct.Struct(">qii")  # base offset, length of what follows, leader epoch
_NAME = "%06d.%06d"
_NAME_BYTES = 13
_PADDING = (0, 20, 400, 100)


class Committed:
    """The records that were committed when some log was compacted, by offset."""

    def __init__(self) -> None:
        self._records: dict[int, Record] = {}
        self._last: dict[bytes, int] = {}  # the largest offset of each key

    def note(self, start: int, records: tuple[Record, ...]) -> None:
        for offset, record in enumerate(records, start):
            if self._records.setdefault(offset, record) != record:
                raise Broken(f"another record was committed at offset {offset} before")
            key = key_of(record)
            self._last[key] = max(offset, self._last.get(key, -1))

    def removed(self, offset: int) -> Record:
        """The record that compaction has removed at `offset`."""
        record = self._records.get(offset)
        if record is None:
            raise Broken(f"a record at offset {offset} is missing that was not committed")
        if self._last[key_of(record)] == offset:
            raise Broken(f"the last record of a key is missing, at offset {offset}")
        return record


# Of logs that may be compacted: what was committed.
_committed: WeakKeyDictionary[Partition, Committed] = WeakKeyDictionary()


def may_be_compacted(partition: Partition, committed: Committed) -> None:
    """Records of this log have keys from now on, and some may be missing."""
    _committed[partition] = committed


def key_of(record: Record) -> bytes:
    return b"key %d" % (sum(record) % 3)


def batch_of(
    record: Record, sequence: int, producer: int = PRODUCER, key: bytes | None = None
) -> bytes:
    """A batch of one record, as an idempotent producer sends it; some are long."""
    padding = _PADDING[sum(record) % len(_PADDING)]
    value = b"x" * padding + (_NAME % record).encode()
    builder = DefaultRecordBatchBuilder(
        2, 0, False, producer, 0 if producer >= 0 else -1, sequence, 1 << 20
    )
    assert builder.append(0, NOW_MS, key, value, []) is not None
    return bytes(builder.build())


def records_of(partition: Partition, start: int) -> tuple[tuple[Record, ...], frozenset[int]]:
    """The records from offset `start` to the log's end, out of its segments, and the offsets at
    which compaction has removed them."""
    committed = _committed.get(partition)
    records: list[Record] = []
    gaps: set[int] = set()
    offset, end = start, partition.log_end_offset
    while offset < end:
        buffers = partition.read_for_replica(offset, READ_BYTES).buffers
        data = b"".join(map(bytes, buffers))
        if not data:
            raise Broken(f"offset {offset} of [{start}, {end}) cannot be read")
        at = 0
        while at < len(data):
            base, length, epoch = _HEADER.unpack_from(data, at)
            begin, at = at, at + 12 + length
            name = data[at - 1 - _NAME_BYTES : at - 1]  # a record ends with its number of headers
            while committed is not None and offset < base:
                gaps.add(offset)
                records.append(committed.removed(offset))
                offset += 1
            if base != offset:
                raise Broken(f"at offset {offset} lies a batch of offset {base}")
            if crc32c(data[begin + 21 : at]) != _CRC.unpack_from(data, begin + 17)[0]:
                raise Broken(f"the batch at offset {offset} is damaged")
            if committed is not None and length + 12 == layout.BATCH_HEADER_BYTES:
                gaps.add(offset)
                records.append(committed.removed(offset))
                offset += 1
                continue
            if int(name[:6]) not in (epoch, ANY_EPOCH):
                raise Broken(f"a record of epoch {int(name[:6])} is stamped with epoch {epoch}")
            records.append((epoch, int(name[7:])))
            offset += 1
    return tuple(records), frozenset(gaps)


class KernelLog:
    """See the module.  `gaps`: where compaction has removed records."""

    __slots__ = ("gaps", "partition", "records", "start")

    def __init__(
        self,
        partition: Partition,
        records: tuple[Record, ...],
        start: int,
        gaps: frozenset[int] = frozenset(),
    ) -> None:
        self.partition = partition
        self.records = records
        self.start = start
        self.gaps = gaps

    @classmethod
    def of(cls, partition: Partition) -> KernelLog:
        """What the log is now."""
        start = partition.first_kept_offset
        records, gaps = records_of(partition, start)
        return cls(partition, records, start, gaps)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, KernelLog)
            and self.start == other.start
            and self.records == other.records
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"[{self.start}: {' '.join(f'{e}.{n}' for e, n in self.records)}]"

    @property
    def model(self) -> ModelLog:
        return ModelLog(self.records, self.start)

    @property
    def end(self) -> int:
        return self.start + len(self.records)

    @property
    def last_epoch(self) -> int:
        return self.model.last_epoch

    def between(self, begin: int, end: int) -> tuple[Record, ...]:
        return self.records[max(begin - self.start, 0) : max(end - self.start, 0)]

    def grown(self) -> KernelLog:
        """What it is after records were added."""
        more, gaps = records_of(self.partition, self.end)
        return KernelLog(self.partition, self.records + more, self.start, self.gaps | gaps)

    def append(self, records: tuple[Record, ...]) -> KernelLog:
        """A client's append, which the kernel stamps.  The client does not know whether the last
        record was appended, at this leader or at another, and sends it again."""
        known = self.records[-1:]
        for record in records:
            offset = self.partition.log_end_offset
            for last in known:
                result = self.partition.append(self._batch(last, offset - 1), NOW_MS)
                if not result.duplicate or result.base_offset != offset - 1:
                    raise Broken(f"the record at offset {offset - 1} is doubled: {result}")
            result = self.partition.append(self._batch(record, offset), NOW_MS)
            if result.error or result.duplicate:
                raise Broken(f"a leader cannot append sequence {offset}: {result}")
            known = (record,)
        return self._as(self.grown(), self.model.append(records))

    def _batch(self, record: Record, sequence: int) -> bytes:
        return batch_of(record, sequence, key=key_of(record) if self._is_compacted else None)

    @property
    def _is_compacted(self) -> bool:
        return self.partition in _committed

    def truncate(self, epoch: int, offset: int) -> KernelLog:
        below = offset < self.partition.log_start_offset
        self.partition.cut_after_epoch(epoch, offset)
        cut = KernelLog.of(self.partition)
        return cut if below else self._as(cut, self.model.truncate(epoch, offset))

    def start_over(self, offset: int) -> KernelLog:
        self.partition.start_over(offset)
        return self._as(KernelLog.of(self.partition), self.model.start_over(offset))

    def delete_below(self, offset: int) -> KernelLog:
        """Retention: the first segment goes, if all of it was shown; the records of a head are
        deleted and kept."""
        first = self.partition.segments[0].end_offset
        if first <= self.partition.high_watermark:
            self.partition.delete_records(first)
        start = self.partition.first_kept_offset
        return self._as(KernelLog.of(self.partition), self.model.delete_below(start))

    def epoch_end(self, asked: int) -> tuple[int, int]:
        epochs = self.partition.epochs_with_records()
        found = epoch_end(epochs, self.start, self.end, asked)
        # Who has copied a compacted log knows no epoch of which nothing is left.
        if found != self.model.epoch_end(asked) and not self._is_compacted:
            raise Broken(f"the epochs on disk, {epochs}, are not those of the records")
        return found

    @staticmethod
    def _as(log: KernelLog, model: ModelLog) -> KernelLog:
        if (log.records, log.start) != (model.records, model.start):
            raise Broken(f"the kernel made {log} of a log where {model} was to be")
        return log
