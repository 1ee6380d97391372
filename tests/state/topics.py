"""Topics without brokers: rows in lists, their ends, and a session whose readers decode them.

The readers give their records to the real decoders, so that everything of an executor's source but
the fetching is what a job runs.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import pyarrow as pa

from kdirect.format.decode import ArrowDecoder
from kdirect.format.encode import ArrowEncoder
from kdirect.format.fixed_layout import FixedLayout
from kdirect.model import TopicPartition
from kdirect.state.batches import Partition, Range
from kdirect.state.job import Ends
from tests.readers import ReadsOnly, StandInReader

LAYOUT = FixedLayout.of("at:int64", "key:int64", "value:int64")
SCHEMA = "at long, key long, value long"
MOST_OF_BATCH = 8  # records


class Row(NamedTuple):
    """A record: event time (None: null), key (None: null), value."""

    time: int | None
    key: int | None
    value: int


def ends_of(ends: Mapping[Partition, int | range], now_us: int) -> Ends:
    """What brokers say of topics whose partitions have so many records, or those of a range."""
    found = {}
    for tp, end in ends.items():
        kept = range(end) if isinstance(end, int) else end
        found[tp] = Range(kept.start, kept.stop)
    return Ends(found, now_us)


def fixed_value(row: Row) -> bytes | None:
    """A struct; a row without a time is a record without a value."""
    return None if row.time is None else struct.pack("<qqq", *row)


def json_value(row: Row) -> bytes:
    members = {"at": row.time, "key": row.key, "value": row.value}
    return json.dumps({name: v for name, v in members.items() if v is not None}).encode()


VALUES = {"fixed": fixed_value, "json": json_value}


class Topics(ReadsOnly):
    """In place of a session: it reads the rows of `rows`, whose values have one format.  How many
    records come at once is a matter of chance."""

    def __init__(
        self, rows: Mapping[Partition, Sequence[Row]], value_format: str, chance: random.Random
    ) -> None:
        self.rows, self.chance = rows, chance
        self._value = VALUES[value_format]
        self._encoder = ArrowEncoder()

    def open_reader(self, tp: TopicPartition, start: int, stop: int) -> _Reader:
        return _Reader(self, Partition(tp.topic, tp.partition), start, stop)

    def batch(self, tp: Partition, start: int, stop: int) -> bytes:
        """A record batch of these offsets."""
        values = pa.array([self._value(row) for row in self.rows[tp][start:stop]], pa.binary())
        (encoded,) = self._encoder.encode(values, default_timestamp_ms=0)
        return struct.pack(">q", start) + bytes(encoded)[8:]


class _Reader(StandInReader):
    """A reader of one range.  See `kdirect.client.reader.Reader`."""

    def __init__(self, topics: Topics, tp: Partition, start: int, stop: int) -> None:
        super().__init__(start, stop)
        self._topics, self._tp = topics, tp

    def fillings(self, decoder: ArrowDecoder) -> Iterator[None]:
        at = self.next_offset
        while at < self.stop:
            upto = min(self.stop, at + self._topics.chance.randint(1, MOST_OF_BATCH))
            data = memoryview(self._topics.batch(self._tp, at, upto))
            while data:
                data = data[decoder.feed(data) :]
                if decoder.full:
                    self.next_offset = decoder.next_offset
                    yield
            at = upto
        if decoder.next_offset > self.next_offset:
            self.next_offset = decoder.next_offset
            yield
