"""The commit kernel: what it accepts, what it refuses and leaves behind, and what it tells the
slots."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import random
import struct
import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kdirect.errors import LogError
from kdirect.format import layout
from kdirect.format.batch import crc32c, iterate_batches
from kdirect.log.kernel import NO_HEAD, NO_SPACE, WRONG_POSITION, CommitKernel
from kdirect.log.kernel_head import install_head, seal_head
from kdirect.log.kernel_marks import advance_high_watermark
from kdirect.log.kernel_producers import expire_producers, known_producers
from kdirect.log.kernel_transactions import (
    admit_transaction,
    append_marker,
    begin_verification,
    marker_batch,
)
from tests.log.conftest import commit_at_tail

CORRUPT, TOO_LARGE, LIST_TOO_LARGE, BAD_TIME, OUT_OF_ORDER, DUPLICATE, FENCED, INVALID = (
    2,
    10,
    18,
    32,
    45,
    46,
    47,
    87,
)
NOW = int(time.time() * 1000)


def slot_fields(data: bytes) -> dict[str, int]:
    guard, flags, file_id, base, readable, high, stable, last_stable, epoch, updates, start = (
        struct.unpack("<IHHqqqqqiIq", data)
    )
    assert guard == crc32c(data[4:]), "torn or never written"
    return {"flags": flags, "file_id": file_id, "base": base, "readable": readable, "high": high,
            "stable": stable,
            "last_stable": last_stable, "epoch": epoch, "updates": updates,
            "start": start}  # fmt: skip


class Slots:
    def __init__(self, count: int) -> None:
        self.map = mmap.mmap(-1, count * layout.SLOT_BYTES)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.map))

    def address(self, i: int) -> int:
        return self.base + i * layout.SLOT_BYTES

    def read(self, i: int) -> dict[str, int]:
        return slot_fields(self.map[i * layout.SLOT_BYTES : (i + 1) * layout.SLOT_BYTES])


def test_append_stamps_offsets_and_epoch_and_keeps_the_rest(batch, head) -> None:
    h = head(base_offset=100, leader_epoch=7)
    first, second = batch(3), batch(2, value_bytes=1000)
    r = h.kernel.append(first, NOW)
    assert (r.error, r.base_offset, r.last_offset, r.batches, r.duplicate, r.log_append_time) == (
        0,
        100,
        102,
        1,
        False,
        -1,
    )
    r = h.kernel.append(second + first, NOW)
    assert (r.error, r.base_offset, r.last_offset, r.batches) == (0, 103, 107, 2)
    assert r.end_position == h.kernel.end_position == len(first) * 2 + len(second)
    expected = b""
    for data, offset in ((first, 100), (second, 103), (first, 105)):
        expected += struct.pack(">q", offset) + data[8:12] + struct.pack(">i", 7) + data[16:]
    assert h.bytes == expected
    assert h.kernel.log_end_offset == h.kernel.high_watermark == h.kernel.last_stable_offset == 108


def test_commit_in_place_equals_append(batch, head) -> None:
    a, b = head(), head()
    for i in range(20):
        data = batch(1 + i % 3, value_bytes=i * 50, timestamp_ms=NOW) * (1 + i % 2)
        b.put(b.kernel.end_position, data)
        left, right = (
            a.kernel.append(data, NOW),
            commit_at_tail(b.kernel, len(data), NOW),
        )
        assert repr(left) == repr(right) and left.error == 0
    assert a.bytes == b.bytes
    assert a.offset_index[:] == b.offset_index[:] and a.time_index[:] == b.time_index[:]


def test_commit_elsewhere_than_at_the_tail_is_refused(batch, head) -> None:
    h = head()
    data = batch()
    h.put(0, data)
    h.put(len(data), data)
    assert h.kernel.commit_next(5, 0, len(data), 0, NOW).error == WRONG_POSITION
    assert h.kernel.commit_next(0, 0, len(data), 1, NOW).error == 74, "of another leadership"
    assert commit_at_tail(h.kernel, h.capacity + 1, NOW).error == NO_SPACE
    assert h.kernel.commit_next(0, 0, len(data), 0, NOW).error == 0
    assert h.kernel.commit_next(0, 0, len(data), 0, NOW).error == WRONG_POSITION, "below the tail"
    assert h.map[len(data) : 2 * len(data)] == data, (
        "bytes that are not at the tail are not touched"
    )
    assert commit_at_tail(h.kernel, len(data), NOW).base_offset == 1


def test_without_a_head_nothing_is_committed(batch, head) -> None:
    h = head(install=False)
    assert h.kernel.append(batch(), NOW).error == NO_HEAD
    assert commit_at_tail(h.kernel, 100, NOW).error == NO_HEAD
    assert h.kernel.append(b"\0" * 100, NOW).error == CORRUPT, (
        "bad requests are refused before a head is asked for"
    )
    h.install()
    assert h.kernel.append(batch(), NOW).error == 0


def broken(data: bytes, at: int, value: bytes, *, fix_crc: bool = False) -> bytes:
    out = bytearray(data)
    out[at : at + len(value)] = value
    if fix_crc:
        out[17:21] = struct.pack(">I", crc32c(bytes(out[21:])))
    return bytes(out)


@pytest.mark.parametrize(
    ("what", "damage", "error"),
    [
        ("empty", lambda b: b"", CORRUPT),
        ("half a header", lambda b: b[:30], CORRUPT),
        ("truncated", lambda b: b[:-1], CORRUPT),
        ("rubbish behind", lambda b: b + b"\0", CORRUPT),
        ("zero length", lambda b: broken(b, 8, b"\0\0\0\0"), CORRUPT),
        ("negative length", lambda b: broken(b, 8, b"\xff\xff\xff\xff"), CORRUPT),
        ("huge length", lambda b: broken(b, 8, b"\x7f\xff\xff\xff"), CORRUPT),
        ("short length", lambda b: broken(b, 8, struct.pack(">I", len(b) - 13)), CORRUPT),
        ("magic 1", lambda b: broken(b, 16, b"\1"), CORRUPT),
        ("crc", lambda b: broken(b, 17, b"\0\1\2\3"), CORRUPT),
        ("flipped bit", lambda b: broken(b, len(b) - 1, bytes([b[-1] ^ 1])), CORRUPT),
        ("no records", lambda b: broken(b, 57, struct.pack(">i", 0), fix_crc=True), INVALID),
        ("counts differ", lambda b: broken(b, 23, struct.pack(">i", 9), fix_crc=True), INVALID),
        ("unknown codec", lambda b: broken(b, 21, b"\0\7", fix_crc=True), INVALID),
        ("control batch", lambda b: broken(b, 21, b"\0\x20", fix_crc=True), INVALID),
        ("transactional", lambda b: broken(b, 21, b"\0\x10", fix_crc=True), INVALID),
        (
            "producer without epoch",
            lambda b: broken(b, 43, struct.pack(">qhi", 5, -1, 0), fix_crc=True),
            INVALID,
        ),
        (
            "producer without sequence",
            lambda b: broken(b, 43, struct.pack(">qhi", 5, 0, -1), fix_crc=True),
            INVALID,
        ),
    ],
)
@pytest.mark.parametrize("second", [False, True])
def test_bad_requests_leave_no_trace(batch, head, what, damage, error, second) -> None:
    h = head()
    good = batch(2)
    h.kernel.append(good, NOW)
    bad = (good if second else b"") + damage(good)
    if bad == good:
        return  # a good batch and nothing more
    before, view = h.map[:], h.kernel.view()
    assert h.kernel.append(bad, NOW).error == error
    assert h.map[:] == before
    h.put(len(good), bad)
    r = commit_at_tail(h.kernel, len(bad), NOW, len(good))
    assert (r.error, r.base_offset, r.end_position) == (error, -1, len(good))
    assert h.map[:] == before and h.kernel.view() == view, "the tail is zeros again"
    assert h.kernel.append(good, NOW).base_offset == 2


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_requests_are_committed_or_refused_and_nothing_else(batch, head, data) -> None:
    """Any bytes: committed whole with consecutive offsets, or refused with one of the kernel's
    codes and no trace."""
    h = head(1 << 14)
    good = data.draw(
        st.sampled_from(
            [
                batch(timestamp_ms=NOW),
                batch(3, value_bytes=0, timestamp_ms=NOW),
                sequence_batch(batch, 0, 2),
            ]
        )
    )
    request = bytearray(good * data.draw(st.integers(1, 3)))
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, min(len(request) - 1, 80)))
        request[at] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        request[17:21] = struct.pack(">I", crc32c(bytes(request[21 : len(good)])))
    request = bytes(
        request[: data.draw(st.integers(0, len(request)))] if data.draw(st.booleans()) else request
    )
    before, view = h.map[:], h.kernel.view()
    if data.draw(st.booleans()):
        r = h.kernel.append(request, NOW)
    else:
        h.put(h.kernel.end_position, request)
        r = commit_at_tail(h.kernel, len(request), NOW)
    if r.error:
        assert r.error in (
            CORRUPT,
            TOO_LARGE,
            LIST_TOO_LARGE,
            BAD_TIME,
            OUT_OF_ORDER,
            DUPLICATE,
            FENCED,
            INVALID,
            NO_SPACE,
        )
        assert h.kernel.view() == view and h.map[:] == before
    else:
        infos = list(iterate_batches(h.bytes))
        assert (
            infos[0].base_offset == 0
            and infos[-1].next_offset == h.kernel.log_end_offset == r.last_offset + 1
        )
        assert all(a.next_offset == b.base_offset for a, b in itertools.pairwise(infos))


def test_sizes_are_bounded(batch, head) -> None:
    h = head(8192, max_batch_bytes=500, segment_bytes=4096)
    assert h.kernel.append(batch(value_bytes=450), NOW).error == TOO_LARGE
    small = batch(value_bytes=300)
    assert h.kernel.append(small * 20, NOW).error == LIST_TOO_LARGE
    assert h.kernel.append(small * 9, NOW).error == 0
    while (r := h.kernel.append(small, NOW)).error == 0:
        pass
    assert r.error == NO_SPACE
    assert 8192 - h.kernel.end_position < len(small)


def test_timestamps_are_bounded_by_the_clock(batch, head) -> None:
    h = head(before_max_ms=1000, after_max_ms=500)
    for timestamp, error in (
        (NOW, 0),
        (NOW - 1000, 0),
        (NOW - 1001, BAD_TIME),
        (NOW + 500, 0),
        (NOW + 501, BAD_TIME),
    ):
        assert h.kernel.append(batch(timestamp_ms=timestamp), NOW).error == error, timestamp - NOW


def test_log_append_time_is_stamped_with_its_crc(batch, head) -> None:
    h = head(log_append_time=True)
    r = h.kernel.append(batch(3, timestamp_ms=5) * 2, NOW)
    assert (r.error, r.log_append_time) == (0, NOW)
    infos = list(iterate_batches(h.bytes))
    assert [i.max_timestamp for i in infos] == [NOW, NOW] and all(
        i.attributes & layout.ATTRIBUTE_LOG_APPEND_TIME for i in infos
    )


def test_relative_offsets_do_not_overflow(batch, head) -> None:
    # A compressed batch may claim many records; the segment's index has 31 bits for an offset.
    h = head()
    many = broken(batch(), 23, struct.pack(">i", 0x7FFFFFFE), fix_crc=False)
    many = broken(many, 57, struct.pack(">i", 0x7FFFFFFF), fix_crc=True)
    assert h.kernel.append(many, NOW).error == 0
    assert h.kernel.append(batch(), NOW).error == 0
    assert h.kernel.append(batch(), NOW).error == NO_SPACE
    h.put(h.kernel.end_position, batch())
    assert commit_at_tail(h.kernel, len(batch()), NOW).error == NO_SPACE
    assert h.kernel.append(many * 2, NOW).error == LIST_TOO_LARGE, "no segment could ever hold it"


# -- idempotence -----------------------------------------------------------------------------------


def sequence_batch(
    batch: Callable[..., bytes],
    sequence: int,
    records: int = 1,
    *,
    epoch: int = 0,
    producer: int = 9,
) -> bytes:
    return batch(
        records, producer_id=producer, producer_epoch=epoch, sequence=sequence, timestamp_ms=NOW
    )


def test_repetitions_answer_with_the_original_offsets(batch, head) -> None:
    h = head()
    requests = [sequence_batch(batch, i * 2, 2) for i in range(7)]
    for i, request in enumerate(requests):
        assert h.kernel.append(request, NOW).base_offset == i * 2
    size = h.kernel.end_position
    for i in range(2, 7):
        r = h.kernel.append(requests[i], NOW)
        assert (r.error, r.duplicate, r.base_offset, r.last_offset) == (0, True, i * 2, i * 2 + 1)
        h.put(size, requests[i])
        r = commit_at_tail(h.kernel, len(requests[i]), NOW, size)
        assert (r.error, r.duplicate, r.base_offset, r.end_position) == (0, True, i * 2, size)
        assert not any(h.map[size : size + len(requests[i])])
    for i in range(2):
        assert h.kernel.append(requests[i], NOW).error == DUPLICATE, (
            "only five batches are remembered with their offsets"
        )
    assert h.kernel.end_position == size and h.kernel.statistics()["log_duplicates"] == 10


def test_a_request_of_old_batches_is_a_repetition_whole_or_not_at_all(batch, head) -> None:
    h = head()
    ones = [sequence_batch(batch, i) for i in range(9)]
    for one in ones:
        assert h.kernel.append(one, NOW).error == 0
    assert h.kernel.append(ones[0] + ones[1], NOW).error == DUPLICATE
    assert h.kernel.append(b"".join(ones[2:7]), NOW).error == DUPLICATE, (
        "old ones and remembered ones"
    )
    assert h.kernel.append(b"".join(ones[4:9]), NOW).duplicate
    assert (
        h.kernel.append(b"".join(ones[3:]) + sequence_batch(batch, 9), NOW).error == OUT_OF_ORDER
    ), "a new one among them"
    assert h.kernel.append(sequence_batch(batch, 9), NOW).base_offset == 9


def test_what_lies_before_the_first_batch_of_a_stranger_was_not_appended(batch, head) -> None:
    h = head()
    for i in range(3, 12):  # the first three were refused for a passing reason, or are on their way
        assert h.kernel.append(sequence_batch(batch, i), NOW).error == 0
    assert h.kernel.append(sequence_batch(batch, 3), NOW).error == DUPLICATE
    assert h.kernel.append(sequence_batch(batch, 2), NOW).error == OUT_OF_ORDER
    assert h.kernel.append(sequence_batch(batch, 0), NOW).error == OUT_OF_ORDER


def test_gaps_epochs_and_strangers(batch, head) -> None:
    h = head()
    assert h.kernel.append(sequence_batch(batch, 40, producer=1), NOW).error == 0, (
        "a producer not known may start anywhere"
    )
    assert h.kernel.append(sequence_batch(batch, 0, 3), NOW).error == 0
    assert h.kernel.append(sequence_batch(batch, 4), NOW).error == OUT_OF_ORDER
    assert h.kernel.append(sequence_batch(batch, 2, 2), NOW).error == OUT_OF_ORDER, (
        "overlaps without repeating"
    )
    assert h.kernel.append(sequence_batch(batch, 3), NOW).error == 0
    assert h.kernel.append(sequence_batch(batch, 1, epoch=1), NOW).error == OUT_OF_ORDER, (
        "a new epoch starts at 0"
    )
    assert h.kernel.append(sequence_batch(batch, 0, epoch=1), NOW).error == 0
    assert h.kernel.append(sequence_batch(batch, 4, epoch=0), NOW).error == FENCED
    assert h.kernel.append(sequence_batch(batch, 41, producer=1), NOW).error == 0
    assert h.kernel.append(batch(), NOW).error == 0, "batches without a producer id pass by"
    assert h.kernel.log_end_offset == 3 + 1 + 1 + 1 + 1 + 1


def test_requests_of_several_batches_are_all_or_nothing(batch, head) -> None:
    h = head()
    a, b, c = (sequence_batch(batch, s) for s in (0, 1, 2))
    assert h.kernel.append(a + b, NOW).last_offset == 1
    r = h.kernel.append(a + b, NOW)
    assert (r.duplicate, r.base_offset, r.last_offset) == (True, 0, 1)
    assert h.kernel.append(b + c, NOW).error == OUT_OF_ORDER, "half a repetition"
    assert h.kernel.append(c + sequence_batch(batch, 4), NOW).error == OUT_OF_ORDER
    assert h.kernel.append(c + batch(), NOW).error == INVALID, "two producers in one request"
    assert h.kernel.log_end_offset == 2
    assert h.kernel.append(c + sequence_batch(batch, 3), NOW).last_offset == 3


def test_sequences_start_again_after_the_largest(batch, head) -> None:
    h = head()
    assert h.kernel.append(sequence_batch(batch, 0x7FFFFFFE, 3), NOW).error == 0
    assert h.kernel.append(sequence_batch(batch, 0x7FFFFFFE, 3), NOW).duplicate
    assert h.kernel.append(sequence_batch(batch, 1), NOW).error == 0


def test_many_producers_and_expiry(batch, head, seed) -> None:
    h = head(4 << 20)
    rng = random.Random(seed)
    ids = [rng.randrange(1 << 40) for _ in range(2000)]
    for i, producer in enumerate(dict.fromkeys(ids)):
        assert h.kernel.append(sequence_batch(batch, 0, producer=producer), NOW + i).error == 0
    assert {e.producer_id for e in known_producers(h.kernel)[0]} == set(ids)
    n = len(set(ids))
    assert expire_producers(h.kernel, NOW + n - 10) == n - 10
    assert len(known_producers(h.kernel)[0]) == 10
    last = list(dict.fromkeys(ids))[-1]
    assert h.kernel.append(sequence_batch(batch, 0, producer=last), NOW).duplicate


# -- indexes ---------------------------------------------------------------------------------------


def test_index_entries_are_those_of_kafka(batch, head) -> None:
    """LogSegment.append: an entry for a batch when more than the interval has gone by since the
    last; its offset is the last one of the batch; the time index takes the largest timestamp so
    far, if it grew."""
    h = head(index_interval_bytes=500, index_entries=100)
    rng = random.Random(5)
    offsets, times = [], []
    since = position = offset = 0
    largest, largest_at, indexed = -1, 0, -1
    for _ in range(200):
        records = rng.randrange(1, 5)
        timestamp = NOW - 100_000 + rng.randrange(100_000)
        data = batch(records, timestamp_ms=timestamp, value_bytes=rng.randrange(100))
        assert h.kernel.append(data, NOW).error == 0
        offset += records
        if timestamp > largest:
            largest, largest_at = timestamp, offset - 1
        if since > 500:
            offsets.append((offset - 1, position))
            if largest > indexed:
                times.append((largest, largest_at))
                indexed = largest
            since = 0
        since += len(data)
        position += len(data)
    assert h.kernel.index_entries() == (len(offsets), len(times))
    assert list(struct.iter_unpack(">II", h.offset_index[: len(offsets) * 8])) == offsets
    assert list(struct.iter_unpack(">qI", h.time_index[: len(times) * 12])) == times
    sealed = seal_head(h.kernel)
    assert (sealed.size, sealed.end_offset, sealed.max_timestamp) == (position, offset, largest)
    if largest > indexed:
        times.append((largest, largest_at))
    assert list(struct.iter_unpack(">qI", h.time_index[: sealed.time_entries * 12])) == times


def test_a_full_index_asks_for_a_roll(batch, head) -> None:
    h = head(index_interval_bytes=0, index_entries=4)
    n = 0
    while h.kernel.append(batch(timestamp_ms=NOW + n), NOW + n).error == 0:
        n += 1
    assert n < 6 and h.kernel.append(batch(), NOW).error == NO_SPACE
    h.put(h.kernel.end_position, batch())
    assert commit_at_tail(h.kernel, len(batch()), NOW).error == 0, (
        "RDMA requests are in the head already"
    )
    assert seal_head(h.kernel).time_entries <= 4


# -- slots -----------------------------------------------------------------------------------------


def test_slots_follow_the_head(batch, head) -> None:
    h = head(install=False, base_offset=50, leader_epoch=3)
    slots = Slots(4)
    h.kernel.attach_slot(slots.address(0), 11)
    assert slots.read(0) == {"flags": 1, "file_id": 11, "base": 50, "readable": 0, "high": 50,
                             "stable": 0, "last_stable": 50,
                             "epoch": 3, "updates": 1, "start": 50}  # fmt: skip
    h.install()
    assert slots.read(0)["flags"] == layout.SLOT_FLAG_ASSIGNED | layout.SLOT_FLAG_SEALED, (
        "a new head is a roll for who waited for one"
    )
    assert h.kernel.statistics()["log_slots"] == 0
    for i in range(4):
        h.kernel.attach_slot(slots.address(i), i)
    size = len(batch())
    h.kernel.append(batch(), NOW)
    for i in range(4):
        s = slots.read(i)
        assert (
            s["file_id"],
            s["readable"],
            s["high"],
            s["stable"],
            s["last_stable"],
            s["flags"],
        ) == (i, size, 51, size, 51, 1)
    h.kernel.detach_slot(slots.address(2))
    h.kernel.detach_slot(slots.address(2))
    h.kernel.append(batch(), NOW)
    assert [slots.read(i)["high"] for i in range(4)] == [52, 52, 51, 52]
    h.kernel.set_log_start_offset(51)
    h.kernel.set_leader_epoch(4)
    assert (slots.read(0)["start"], slots.read(0)["epoch"], slots.read(2)["epoch"]) == (51, 4, 3)
    seal_head(h.kernel)
    s = slots.read(1)
    assert (s["flags"], s["base"], s["readable"], s["high"]) == (3, 50, 2 * size, 52)
    h.kernel.attach_slot(slots.address(3), 8)
    h.kernel.revoke_slots()
    s = slots.read(3)
    assert (s["flags"], s["base"], s["readable"]) == (
        layout.SLOT_FLAG_ASSIGNED | layout.SLOT_FLAG_REVOKED,
        52,
        0,
    )
    assert slots.read(1)["flags"] == 3, "dropped slots are left alone"
    with pytest.raises(LogError):
        h.kernel.attach_slot(slots.base + 4, 1)


def test_group_commit_holds_the_high_watermark(batch, head) -> None:
    h = head(hold_high_watermark=True)
    slots = Slots(1)
    h.kernel.attach_slot(slots.address(0), 1)
    size = len(batch())
    for _ in range(3):
        assert h.kernel.append(batch(), NOW).error == 0
    assert (h.kernel.log_end_offset, h.kernel.high_watermark, slots.read(0)["high"]) == (3, 0, 0)
    advance_high_watermark(h.kernel, 2, 2 * size, 0)
    assert (slots.read(0)["high"], slots.read(0)["readable"]) == (2, 2 * size)
    advance_high_watermark(h.kernel, 1, size, 0)
    advance_high_watermark(h.kernel, 9, 9 * size, 0)
    advance_high_watermark(h.kernel, 3, 3 * size, 17)
    assert h.kernel.high_watermark == 2, "never back, never past the end, never for another segment"
    assert seal_head(h.kernel).end_offset == 3, "sealed with a record that may not be read yet"
    s = slots.read(0)
    assert (s["flags"], s["readable"], s["high"]) == (layout.SLOT_FLAG_ASSIGNED, 2 * size, 2)
    advance_high_watermark(h.kernel, 3, 3 * size, 0)
    s = slots.read(0)
    assert (s["flags"], s["base"], s["readable"], s["high"]) == (3, 0, 3 * size, 3)
    assert h.kernel.view().mark() == (3, 0, 3)


def test_a_sealed_segment_may_be_readable_before_it_is_stable(batch, head) -> None:
    h = head()
    slots = Slots(2)
    h.kernel.attach_slot(slots.address(0), 1)
    data = batch(producer_id=7, producer_epoch=0, sequence=0, transactional=True)
    _, ticket = begin_verification(h.kernel, 7, 0, 0, NOW)
    assert admit_transaction(h.kernel, 7, 0, ticket)
    assert h.kernel.append(data, NOW).error == 0
    assert slots.read(0)["flags"] == layout.SLOT_FLAG_ASSIGNED
    seal_head(h.kernel)
    assert h.kernel.attach_slot(slots.address(1), 2, 0), "it is not stable yet"
    for i in range(2):
        s = slots.read(i)
        assert s["flags"] == layout.SLOT_FLAG_ASSIGNED | layout.SLOT_FLAG_READABLE
        assert (s["readable"], s["high"], s["stable"]) == (len(data), 1, 0)
    h.install()
    marker = marker_batch(7, 0, 0, True, NOW)
    assert append_marker(h.kernel, marker, NOW).error == 0
    for i in range(2):
        s = slots.read(i)
        assert s["flags"] == layout.SLOT_FLAG_ASSIGNED | layout.SLOT_FLAG_SEALED
        assert (s["readable"], s["stable"]) == (len(data), len(data))


def test_a_torn_slot_read_is_seen(batch, head) -> None:
    """A process that copies the slot while another writes it: every copy whose guard holds is one
    that was published."""
    requests = 100_000
    data = batch(value_bytes=0)
    h = head(requests * len(data) + 4096)
    slots = Slots(1)
    h.kernel.attach_slot(slots.address(0), 77)
    writer = os.fork()
    if writer == 0:  # all memory of this test is shared between the two
        for _ in range(requests):
            h.kernel.append(data, NOW)
        os._exit(0)
    raw = memoryview(slots.map)
    seen, torn, last = 0, 0, 0
    while last < requests:
        copy = bytes(raw)
        if struct.unpack_from("<I", copy)[0] != crc32c(copy[4:]):
            torn += 1
            continue
        s = slot_fields(copy)
        assert (
            s["readable"] == s["high"] * len(data) == s["stable"]
            and s["file_id"] == 77
            and s["last_stable"] == s["high"]
        )
        assert s["high"] >= last
        last = s["high"]
        seen += 1
    os.waitpid(writer, 0)
    print(f"{seen} whole, {torn} torn")


def test_clear_tail_removes_what_a_revoked_producer_left(batch, head) -> None:
    h = head()
    h.kernel.append(batch(), NOW)
    tail = h.kernel.end_position
    h.put(tail + 10, b"rubbish" * 1000)
    h.put(tail + 100_000, b"more")
    h.kernel.clear_tail(99)
    assert h.map[tail + 10 : tail + 17] == b"rubbish", "another segment"
    h.kernel.clear_tail(0, tail + 5000)
    assert not any(h.map[tail : tail + 5000]) and h.map[tail + 100_000 : tail + 100_004] == b"more"
    h.kernel.clear_tail()
    assert not any(h.map[tail:])


def test_concurrent_appends_keep_offsets_contiguous(batch, head) -> None:
    h = head(16 << 20)
    results: list[list[int]] = [[] for _ in range(4)]

    def work(i: int) -> None:
        data = batch(1 + i, fill=b"%d" % i)
        for _ in range(2000):
            r = h.kernel.append(data, NOW)
            assert r.error == 0 and r.last_offset - r.base_offset == i
            results[i].append(r.base_offset)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    owner = {offset: i for i, offsets in enumerate(results) for offset in offsets}
    expected = 0
    for info in iterate_batches(h.bytes):
        assert info.base_offset == expected and info.records_count == owner[expected] + 1
        expected += info.records_count
    assert expected == h.kernel.log_end_offset == 2000 * (1 + 2 + 3 + 4)


def test_head_must_continue_the_log(head) -> None:
    h = head(base_offset=5)
    with pytest.raises(LogError):
        install_head(h.kernel, h.address, h.capacity, segment_base_offset=5)
    seal_head(h.kernel)
    with pytest.raises(LogError):
        install_head(h.kernel, h.address, h.capacity, segment_base_offset=6)
    with pytest.raises(LogError):
        install_head(CommitKernel(), 0, 100, segment_base_offset=0)
