"""One flipped bit in a segment, seen by every reader: an error that says where and what to do, or
exactly the right rows.

Kafka's CRC leaves out the first 21 bytes of a batch: base offset, batch length, leader epoch, magic
and the CRC itself.  A reader compares them with what it knows (`kdirect.format.chain`).

`KDIRECT_FLIPS=n` flips n bits drawn by the seed in a larger log, instead of each bit of each header
of a small one.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import kdirect
from kdirect.client import connect
from kdirect.errors import CorruptBatchError, CorruptLogError, KdirectError, UnsupportedFormatError
from kdirect.format.batch import iterate_batches
from kdirect.model import TopicPartition

TP = TopicPartition("t", 0)
LONGER = int(os.environ.get("KDIRECT_FLIPS", "0"))
HEADER_BYTES = 61
PATIENCE_S = 3.0  # a reader that has neither rows nor an error by then stands still

Row = tuple[int, bytes]
Read = Callable[[int, int], Iterator[Row]]


class Log:
    """One partition of a running broker: a sealed segment and a head, `batches` batches each of one
    to four records."""

    def __init__(self, broker: kdirect.Broker, batches: int, rng: random.Random) -> None:
        self.servers = broker.bootstrap_servers
        session = connect({"bootstrap.servers": self.servers, "transport": "tcp"})
        session.admin.create_topic(TP.topic, 1)
        self.partition = broker.server.logs.partitions[TP]
        self.rows: list[Row] = []
        for segment in range(2):
            if segment:
                self.partition.roll()
            for _ in range(batches):
                with kdirect.Producer(
                    {"bootstrap.servers": self.servers, "transport": "tcp", "linger.ms": 10_000}
                ) as producer:
                    for _ in range(rng.randrange(1, 5)):
                        self.rows.append((len(self.rows), b"%04d" % len(self.rows)))
                        producer.produce(TP.topic, self.rows[-1][1], partition=0)
        self.files = [
            (s.path, s.base_offset, list(iterate_batches(s.path.read_bytes()[: s.size])))
            for s in self.partition.segments
        ]
        assert [len(found) for _, _, found in self.files] == [batches, batches]

    def flips(self, rng: random.Random) -> Iterator[tuple[int, int, int, Any]]:
        """(segment, position, bit, batch): every bit of every header, and one of each other
        byte."""
        for i, (_, _, batches) in enumerate(self.files):
            for batch in batches:
                for at in range(batch.size):
                    for bit in range(8) if at < HEADER_BYTES else (rng.randrange(8),):
                        yield i, batch.position + at, bit, batch


class Flipped:
    """The bit is flipped within the context."""

    def __init__(self, path: Any, position: int, bit: int) -> None:
        self.path, self.position, self.bit = path, position, bit

    def _flip(self) -> None:
        fd = os.open(self.path, os.O_RDWR)  # the pages that the broker has mapped
        try:
            os.pwrite(fd, bytes([os.pread(fd, 1, self.position)[0] ^ 1 << self.bit]), self.position)
        finally:
            os.close(fd)

    def __enter__(self) -> None:
        self._flip()

    def __exit__(self, *exception: object) -> None:
        self._flip()


def arrow_reader(servers: str, transport: str) -> tuple[Read, Callable[[], None]]:
    session = connect({"bootstrap.servers": servers, "transport": transport})

    def read(start: int, stop: int) -> Iterator[Row]:
        reader = session.reader(TP, start, stop, timeout_ms=int(1000 * PATIENCE_S), target_rows=3)
        try:
            for batch in reader.batches():
                yield from zip(batch["offset"].to_pylist(), batch["value"].to_pylist(), strict=True)
        finally:
            reader.close()

    return read, session.close


def consumer(servers: str, transport: str) -> tuple[Read, Callable[[], None]]:
    made = kdirect.Consumer({"bootstrap.servers": servers, "transport": transport})

    def read(start: int, stop: int) -> Iterator[Row]:
        made.assign({TP: start})
        until, left = time.monotonic() + PATIENCE_S, stop - start
        while left > 0:
            found = made.consume(left, 0.2)
            left -= len(found)
            yield from ((m.offset(), m.value()) for m in found)
            if time.monotonic() > until:
                raise TimeoutError("the consumer stands still")

    return read, made.close


def columns(servers: str, transport: str) -> tuple[Read, Callable[[], None]]:
    made = kdirect.Consumer({"bootstrap.servers": servers, "transport": transport})

    def read(start: int, stop: int) -> Iterator[Row]:
        made.assign({TP: start})
        until, left = time.monotonic() + PATIENCE_S, stop - start
        while left > 0:
            batch = made.poll_arrow(0.2)
            if batch is not None:
                left -= batch.num_rows
                yield from zip(batch["offset"].to_pylist(), batch["value"].to_pylist(), strict=True)
            if time.monotonic() > until:
                raise TimeoutError("the consumer stands still")

    return read, made.close


READERS = {"reader": arrow_reader, "consumer": consumer, "columns": columns}


def outcome(read: Read, rows: list[Row], start: int, stop: int) -> str:
    """ "rows" or "error"; AssertionError for anything else than the law allows."""
    got: list[Row] = []
    try:
        for row in read(start, stop):
            got.append(row)
    except (CorruptBatchError, CorruptLogError, UnsupportedFormatError) as e:
        assert got == rows[start : start + len(got)], "what came before the error is right"
        assert "offset" in e.message and str(TP) in e.message and "restore" in str(e), str(e)
        return "error: " + str(e)
    assert got == rows[start:stop]
    return "rows"


@pytest.fixture
def log(tmp_path, seed) -> Iterator[Log]:
    with kdirect.Broker(log_dirs=tmp_path / "log") as broker:
        yield Log(broker, 40 if LONGER else 2, random.Random(seed))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("kind", READERS)
def test_a_flipped_bit_is_an_error_or_changes_nothing(log, seed, kind, transport):
    rng = random.Random(seed)
    read, close = READERS[kind](log.servers, transport)
    flips = list(log.flips(rng))
    if LONGER:
        flips = rng.sample(flips, min(LONGER, len(flips)))
    wrong, errors = [], 0
    try:
        assert outcome(read, log.rows, 0, len(log.rows)) == "rows"
        for i, position, bit, batch in flips:
            path = log.files[i][0]
            start = rng.randrange(batch.next_offset)
            with Flipped(path, position, bit):
                try:
                    found = outcome(read, log.rows, start, len(log.rows))
                    assert (
                        found == "rows"
                        or transport == "tcp"
                        or f"position {batch.position} of the segment" in found
                    ), found
                except (AssertionError, KdirectError, TimeoutError) as e:
                    byte = (
                        f"byte {position - batch.position} bit {bit} of the batch at"
                        f" {batch.position} of {path.name}"
                    )
                    wrong.append(f"{byte}, from {start}: {e!r:.300}")
                    found = ""
                errors += found.startswith("error")
            if len(wrong) > 10:
                break
        assert not wrong, "\n".join(wrong)
        assert errors > 0.9 * len(flips)
        assert outcome(read, log.rows, 0, len(log.rows)) == "rows", (
            "the reader goes on once the file is whole again"
        )
    finally:
        close()
