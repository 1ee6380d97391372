"""A replica's log in a real kernel, behind the methods of `tests.cluster.model_log.ModelLog`.

What the world is told of a log is read back from the bytes of its segments, after every change:
where a batch lies, the offset and the leader epoch that its header carries, and the record, whose
value names the epoch and the number that it was made with.  Each change is made to a `ModelLog` of
the same records, too, and both must agree.

All records are one idempotent producer's, and a record's sequence number is its offset.  So a
leader takes the next one, and does not double the last one, only where what it knows of producers
is exactly what its log has: after it copied, was pushed to, was cut, started over, or crashed.

A `KernelLog` is what the log was when it was read; the partition below it goes on.
"""

from __future__ import annotations

import struct

from kafka.record.default_records import DefaultRecordBatchBuilder

from kdirect.cluster.leading_replica import epoch_end
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


def batch_of(record: Record, sequence: int, producer: int = PRODUCER) -> bytes:
    """A batch of one record, as an idempotent producer sends it; some are long."""
    padding = _PADDING[sum(record) % len(_PADDING)]
    value = b"x" * padding + (_NAME % record).encode()
    builder = DefaultRecordBatchBuilder(
        2, 0, False, producer, 0 if producer >= 0 else -1, sequence, 1 << 20
    )
    assert builder.append(0, NOW_MS, None, value, []) is not None
    return bytes(builder.build())


def records_of(partition: Partition, start: int) -> tuple[Record, ...]:
    """The records from offset `start` to the log's end, out of its segments."""
    records: list[Record] = []
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
            if base != offset:
                raise Broken(f"at offset {offset} lies a batch of offset {base}")
            if crc32c(data[begin + 21 : at]) != _CRC.unpack_from(data, begin + 17)[0]:
                raise Broken(f"the batch at offset {offset} is damaged")
            if int(name[:6]) not in (epoch, ANY_EPOCH):
                raise Broken(f"a record of epoch {int(name[:6])} is stamped with epoch {epoch}")
            records.append((epoch, int(name[7:])))
            offset += 1
    return tuple(records)


class KernelLog:
    """See the module."""

    __slots__ = ("partition", "records", "start")

    def __init__(self, partition: Partition, records: tuple[Record, ...], start: int) -> None:
        self.partition = partition
        self.records = records
        self.start = start

    @classmethod
    def of(cls, partition: Partition) -> KernelLog:
        """What the log is now."""
        start = partition.first_kept_offset
        return cls(partition, records_of(partition, start), start)

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
        more = records_of(self.partition, self.end)
        return KernelLog(self.partition, self.records + more, self.start)

    def append(self, records: tuple[Record, ...]) -> KernelLog:
        """A client's append, which the kernel stamps.  The client does not know whether the last
        record was appended, at this leader or at another, and sends it again."""
        known = self.records[-1:]
        for record in records:
            offset = self.partition.log_end_offset
            for last in known:
                result = self.partition.append(batch_of(last, offset - 1), NOW_MS)
                if not result.duplicate or result.base_offset != offset - 1:
                    raise Broken(f"the record at offset {offset - 1} is doubled: {result}")
            result = self.partition.append(batch_of(record, offset), NOW_MS)
            if result.error or result.duplicate:
                raise Broken(f"a leader cannot append sequence {offset}: {result}")
            known = (record,)
        return self._as(self.grown(), self.model.append(records))

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
        if found != self.model.epoch_end(asked):
            raise Broken(f"the epochs on disk, {epochs}, are not those of the records")
        return found

    @staticmethod
    def _as(log: KernelLog, model: ModelLog) -> KernelLog:
        if (log.records, log.start) != (model.records, model.start):
            raise Broken(f"the kernel made {log} of a log where {model} was to be")
        return log
