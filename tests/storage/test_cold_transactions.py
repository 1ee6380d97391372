"""Readers of committed records, where records and markers are in remote storage only: through a
restart of the broker, and at a broker that was rebuilt from the store."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import kdirect
from kdirect.errors import CorruptObjectError
from kdirect.format.remote_metadata import RemoteSegment
from kdirect.format.segment_files import AbortedTransaction
from kdirect.log.kernel_transactions import aborted_index
from kdirect.log.partition import Partition
from tests.broker.test_read_committed import Coordinator, values
from tests.log.test_transactions import NOW, admit, data_batch, marker_batch
from tests.object_servers import Place
from tests.storage.test_remote_tools import rebuild
from tests.storage.tiered import Tiers
from tests.storage.tiered_broker import TP, TieredBroker, tiered_broker

SIZE = 9000  # of a value: three fill a segment
NEVER = 1 << 40


@pytest.fixture
def place(object_stores: Any) -> Place:
    found: Place = object_stores["directory"].fresh()
    return found


# -- the reader ------------------------------------------------------------------------------------


def write(p: Partition, producer: int, sequence: int) -> None:
    admit(p.kernel, producer, 0, sequence)
    assert p.append(data_batch(producer, 0, sequence), NOW).error == 0


def end(p: Partition, producer: int, *, commit: bool) -> None:
    assert p.append_marker(marker_batch(producer, 0, 0, commit, NOW), NOW).error == 0


def some_segments(tiers: Tiers, p: Partition) -> list[RemoteSegment]:
    """Four of them: a transaction of producer 7 lies in the first three and ends in the third; one
    of producer 8 ends in the first one, and one of producer 9 lies in the fourth."""
    write(p, 7, 0)  # 0
    write(p, 8, 0)
    end(p, 8, commit=False)  # 2
    p.roll()
    write(p, 7, 1)  # 3
    p.roll()
    write(p, 7, 2)
    end(p, 7, commit=False)  # 5
    p.roll()
    write(p, 9, 0)  # 6
    end(p, 9, commit=False)
    p.roll()
    sealed = p.sealed_segments()
    assert [s.aborted for s in sealed] == [
        (AbortedTransaction(8, 1, 2, 0),),
        (),
        (AbortedTransaction(7, 0, 5, 6),),
        (AbortedTransaction(9, 6, 7, 8),),
    ]
    return [
        tiers.add(bytes(s.open()), s.base_offset, s.end_offset, aborted=s.aborted) for s in sealed
    ]


def test_markers_are_looked_for_as_far_as_needed(
    tiers: Tiers, open_partition: Callable[..., Partition]
) -> None:
    segments = some_segments(tiers, open_partition())
    assert [s.txn_index_empty for s in segments] == [False, True, False, False]
    reader, find = tiers.reader(), tiers.segments.at_or_after

    def aborted(offset: int, local_start: int) -> list[int]:
        answer = reader.read_committed(find, offset, 1 << 20, stable=NEVER, local_start=local_start)
        assert answer is not None
        read = answer.result(30)
        assert read.end_offset == tiers.segments.at(offset).end_offset
        assert b"".join(read.buffers)
        return [t.producer_id for t in read.aborted]

    assert aborted(3, NEVER) == [7]
    asked = {name for name, _, _ in tiers.handler.gets}
    assert len(asked) == 2, "neither the fourth one nor one without entries is asked for them"
    assert aborted(0, NEVER) == [8, 7]
    assert aborted(2, NEVER) == [], "a marker alone: nothing of it is handed on"
    assert aborted(0, 3) == [8], "what ends later, ends where the log is local"
    assert aborted(6, NEVER) == [9]
    answer = reader.read_committed(find, 3, 1 << 20, stable=4, local_start=NEVER)
    assert answer is not None and answer.result(30).end_offset == 4
    answer = reader.read_committed(find, 4, 1 << 20, stable=4, local_start=NEVER)
    assert answer is not None and answer.result(30).buffers == []


def test_records_whose_marker_is_lost_are_not_handed_on(
    tiers: Tiers, open_partition: Callable[..., Partition]
) -> None:
    segments = some_segments(tiers, open_partition())
    reader = tiers.reader()

    def find(offset: int, lost: int) -> RemoteSegment | None:
        return next((s for s in segments if s.end_offset > offset and s.base_offset != lost), None)

    ask = partial(reader.read_committed, partial(find, lost=4), max_bytes=1 << 20, stable=NEVER)
    with pytest.raises(CorruptObjectError, match="holds offset 4, where a transaction"):
        ask(offset=0, local_start=NEVER).result(30)
    assert ask(offset=0, local_start=4).result(30).aborted == [(8, 1, 2, 0)]
    assert ask(offset=6, local_start=NEVER).result(30).aborted == [(9, 6, 7, 8)]


# -- a broker --------------------------------------------------------------------------------------


class Transactions(Coordinator):
    """Of the one partition of a broker with tiers."""

    def __init__(self, tiers: TieredBroker) -> None:
        self.broker = tiers.broker
        self.partition = tiers.partition
        self.sequences: dict[int, int] = {}


def written(tiers: TieredBroker) -> list[str]:
    """Transactions that lie across segments; the values of those that were committed, and of plain
    records, in order."""
    c = Transactions(tiers)
    texts: list[str] = []
    for turn in range(4):
        for i, (producer, is_kept) in enumerate(((1, False), (2, True), (3, False), (1, False))):
            text = f"{turn}-{i} ".ljust(SIZE, "x")
            c.write(producer, text)
            if is_kept:
                texts.append(text)
        text = f"{turn} plain".ljust(SIZE, "x")
        c.write(4, text, transactional=False)
        texts.append(text)
        c.end(3, commit=False)
        c.end(1, commit=False)
        c.end(2, commit=True)
    c.write(1, "aborted here".ljust(SIZE, "x"))
    tiers.partition.roll()
    c.end(1, commit=False)
    return texts


def check(tiers: TieredBroker, expected: list[str]) -> None:
    assert values(tiers.broker, len(expected), "read_committed") == expected
    for transport in ("tcp", "auto"):
        settings = {
            "bootstrap.servers": tiers.address,
            "transport": transport,
            "isolation.level": "read_committed",
        }
        with kdirect.Consumer(settings) as consumer:
            consumer.assign({TP: 0})
            got = []
            while len(got) < len(expected):
                message = consumer.poll(10)
                assert message is not None, got
                got.append(message.value().decode())
        assert got == expected


def test_cold_records_of_aborted_transactions_are_never_seen(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with tiered_broker(place, tmp_path / "log") as tiers:
        tiers.create()
        expected = written(tiers)
        tiers.settle()
        local_start = tiers.partition.local_log_start_offset
        assert local_start > 20
        check(tiers, expected)
    with tiered_broker(place, tmp_path / "log") as tiers:
        known = aborted_index(tiers.partition.kernel, 0, NEVER)
        assert [t.last_offset >= local_start for t in known] == [True], "it knows what ended here"
        check(tiers, expected)
    shutil.rmtree(tmp_path / "log")
    status, _, said = rebuild(capsys, place, tmp_path / "log")
    assert status == 0, said
    with tiered_broker(place, tmp_path / "log") as tiers:
        assert tiers.partition.log_end_offset == local_start
        assert tiers.partition.last_stable_offset == local_start - 1, "its marker is lost"
        check(tiers, expected)
