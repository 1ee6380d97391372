"""The leader epoch of what was read last, by which a reader is told that its log was cut (KIP-320):
which batch it is of, and that it outlives a change of path."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest

import kdirect
from kdirect.client.cursor import Cursor, DirectCursor, TcpCursor
from kdirect.client.file_stream import FileStream
from kdirect.client.tcp_fetch import SinglePartition
from kdirect.client.tcp_multi_fetch import TcpRound
from kdirect.client.truncation import ReadEpochs
from kdirect.errors import TruncatedLogError
from kdirect.format.batch import stamp
from kdirect.format.codec import ArrowDecoder, encode_records
from kdirect.model import TopicPartition
from tests.client.test_slots import Ends

TP = TopicPartition("t", 0)
EPOCHS = [3, 3, 5, 5, 7]
COPIED, OURS = 1 << 40, 0  # from which offset on the log was written by kdirect


def batches(*epochs: int) -> list[bytes]:
    """A batch of one record for each leader epoch, from offset 0 on."""
    made = []
    for offset, epoch in enumerate(epochs):
        batch = bytearray(encode_records([(None, b"v", [], 1)]))
        stamp(batch, offset, epoch)
        made.append(bytes(batch))
    return made


@pytest.fixture(params=[False, True], ids=["read", "in place"])
def ends(request: Any) -> Iterator[Any]:
    made: Any = Ends()
    made.in_place = request.param
    yield made
    made.close()


def opened(ends: Any, made: list[bytes], dense_from: int) -> FileStream:
    data = b"".join(made)
    memoryview(ends.file)[: len(data)] = data
    stream = ends.stream(min_read_bytes=1 << 16)
    stream.open(ends.location(), 1, 0, len(data), True)
    stream.expect(0, 0, dense_from, len(made), 0, 9)
    return stream


@pytest.mark.parametrize("dense_from", [COPIED, OURS, 1, 2, 3])
def test_batches_that_were_read_ahead_do_not_count(ends: Any, dense_from: int) -> None:
    made = batches(*EPOCHS)
    stream = opened(ends, made, dense_from)
    stream.follow(2)
    stream.fill()
    assert stream.window()[1] == sum(map(len, made))  # all are checked
    assert stream.last_epoch == 2
    for batch, epoch in zip(made, EPOCHS, strict=True):
        stream.consume(len(batch))
        assert stream.last_epoch == epoch
    stream.open(ends.location(), 2, 0, 0, True)
    assert stream.last_epoch == EPOCHS[-1]


@pytest.mark.parametrize("dense_from", [COPIED, OURS, 1, 2, 3])
@pytest.mark.parametrize("consumed", range(len(EPOCHS)))
def test_a_stream_that_was_closed_knows_it_still(ends: Any, dense_from: int, consumed: int) -> None:
    made = batches(*EPOCHS)
    stream = opened(ends, made, dense_from)
    stream.fill()
    stream.window()
    stream.consume(len(b"".join(made[:consumed])))
    expected = EPOCHS[consumed - 1] if consumed else -1
    stream.close()
    assert stream.last_epoch == expected
    stream.open(ends.location(), 1, 0, 0, True)
    assert stream.last_epoch == expected


def test_where_nobody_has_looked_at_the_batches_it_is_not_known(ends: Any) -> None:
    made = batches(*EPOCHS)
    stream = opened(ends, made, OURS)
    stream.follow(2)
    stream.fill()
    stream.consume(len(made[0]))
    assert stream.last_epoch == -1


@pytest.mark.parametrize("dense_from", [COPIED, OURS])
def test_a_direct_cursor_tells_that_of_what_it_handed_out(ends: Any, dense_from: int) -> None:
    stream = opened(ends, batches(*EPOCHS), dense_from)
    fetcher = Source()  # which is asked for nothing
    cursor = DirectCursor(TP, 0, fetcher, stream, committed_only=False, max_batch_bytes=1 << 20)
    cursor.has_data = True
    stream.fill()
    decoder = ArrowDecoder(TP.topic, TP.partition, target_rows=1)
    for offset, epoch in enumerate(EPOCHS):
        assert cursor.fill_decoder(decoder)
        decoder.take()
        assert (cursor.next_offset, cursor.last_epoch) == (offset + 1, epoch)


class Source:
    """Of a cursor's bytes: brings none by itself."""

    def bring(self, cursor: TcpCursor, wait_ms: float) -> bool:
        return False

    def consumed(self, cursor: TcpCursor, n: int) -> None:
        pass


def test_a_tcp_cursor_tells_that_of_what_it_handed_out() -> None:
    source, made = Source(), batches(*EPOCHS)
    decoder = ArrowDecoder(TP.topic, TP.partition, target_rows=1)
    cursor = TcpCursor(TP, 0, source, max_batch_bytes=1 << 20)
    assert cursor.last_epoch == -1
    cursor.follow(2)
    for first, last in ((0, 3), (3, 5)):  # two answers
        cursor.arrived(memoryview(b"".join(made[first:last])), EPOCHS[last - 1])
        assert cursor.last_epoch == (EPOCHS[first - 1] if first else 2)
        for offset in range(first, last):
            assert cursor.fill_decoder(decoder)
            decoder.take()
            assert (cursor.next_offset, cursor.last_epoch) == (offset + 1, EPOCHS[offset])
    cursor.arrived(memoryview(b""))
    assert cursor.last_epoch == EPOCHS[-1]
    cursor.reopen(cursor.next_offset)
    assert cursor.last_epoch == EPOCHS[-1]
    cursor.reopen(0)
    assert cursor.last_epoch == -1


def test_it_is_remembered_for_the_place_where_reading_goes_on() -> None:
    epochs = ReadEpochs(None)  # type: ignore[arg-type]
    cursor = TcpCursor(TP, 7, Source(), max_batch_bytes=1 << 20)
    epochs.note(cursor)
    assert epochs.before(TP, 7) == -1
    cursor.follow(4)
    epochs.note(cursor)
    assert epochs.before(TP, 7) == 4
    assert epochs.before(TP, 6) == -1  # the batch before that may be of another epoch
    epochs.note(Cursor(TP, 7))  # which has no path and knows nothing
    assert epochs.before(TP, 7) == 4
    epochs.forget(TP)
    assert epochs.before(TP, 7) == -1


@pytest.mark.parametrize("kind", [TcpRound, SinglePartition])
def test_a_source_that_is_assigned_a_partition_is_told(kind: Any) -> None:
    """What a Fetch says of it is compared with the leader's log: tests/members shows that."""
    settings: dict[str, Any] = {"isolation.level": "read_uncommitted"}
    settings |= {"fetch.max.read.bytes": 1 << 20}
    settings |= {"max.batch.bytes": 1 << 20, "fetch.wait.max.ms": 10, "fetch.min.bytes": 1}
    cluster: Any = SimpleNamespace(
        environment=SimpleNamespace(monotonic=lambda: 0.0), settings=settings, timeout_ms=1000
    )
    source = kind(cluster, settings)
    source.assign({TP: 7})
    assert source.cursor(TP).last_epoch == -1
    source.follow(TP, 4)
    assert source.cursor(TP).last_epoch == 4


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_log_that_was_cut_takes_nothing_that_is_in_hand(broker: Any, transport: str) -> None:
    """A paused partition has records that were read and not handed out, and its log is cut above
    the first of them."""
    with kdirect.connect(broker.bootstrap_servers) as session:
        session.admin.create_topic(TP.topic, 1)
        with session.producer() as producer:
            for i in range(100):
                producer.produce(TP.topic, b"%d" % i, partition=0)
    settings = {
        "bootstrap.servers": broker.bootstrap_servers,
        "transport": transport,
        "auto.offset.reset": "latest",
    }
    with closing(kdirect.Consumer(settings)) as consumer:
        consumer.assign({TP: 0})
        got: list[int] = []

        def read(count: int) -> None:
            """One after the other: what was read with them stays in hand."""
            end = len(got) + count
            while len(got) < end:
                found = consumer.consume(1, 5)
                assert found, f"nothing comes after {len(got)} records"
                got.extend(m.offset() for m in found)

        read(10)
        consumer.pause([TP])
        cut = TruncatedLogError("the log was cut")
        cut.diverges_at = 50
        consumer._reading._refused(TP, cut)
        consumer.resume([TP])
        read(90)
        assert got == list(range(100))
