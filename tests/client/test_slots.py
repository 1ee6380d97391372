"""The consumer's slots over real memory, without a broker: torn READs, bounds, moves (KafkaDirect
§4.4.2)."""

from __future__ import annotations

import random
import struct
import threading
import time
from types import SimpleNamespace

import pytest

from kdirect.client.file_stream import FileStream
from kdirect.client.slot_table import SlotTable
from kdirect.errors import CorruptBatchError, ProtocolError, QueuePairError
from kdirect.format import layout
from kdirect.format.batch import crc32c, stamp
from kdirect.format.codec import encode_records
from kdirect.rdma import open_device
from kdirect.rdma.contract import Access, Memory
from kdirect.wire.location import Location

NOTHING, MOVED, ENDED = range(3)  # what FileStream.advance returns


def slot(*, flags=layout.SLOT_FLAG_ASSIGNED, file_id=1, base=0, readable=0, watermark=0, updates=0):
    body = struct.pack(
        "<HHqqqqqiIq", flags, file_id, base, readable, watermark, readable, watermark, 0, updates, 0
    )
    return struct.pack("<I", crc32c(body)) + body


class Ends:
    """Two queue pairs of one device: `far` owns slots and a file, `near` reads them."""

    def __init__(self):
        self.device = open_device("shm", shared=False)
        self.far_pd, self.near_pd = self.device.alloc_pd(), self.device.alloc_pd()
        self.cqs = [self.device.create_cq(64) for _ in range(4)]
        self.far = self.far_pd.create_qp(self.cqs[0], self.cqs[1])
        self.near = self.near_pd.create_qp(self.cqs[2], self.cqs[3])
        self.far.connect(self.near.address, active=False)
        self.near.connect(self.far.address, active=True)
        self.slots = Memory.anonymous(4 * layout.SLOT_BYTES)
        self.slots_region = self.far_pd.register(self.slots, Access.REMOTE_READ)
        self.file = Memory.anonymous(1 << 20)
        self.file_region = self.far_pd.register(self.file, Access.REMOTE_READ)

    @property
    def endpoint(self):
        return SimpleNamespace(qp=self.near, send_cq=self.cqs[2], local_memory=self.local)

    def local(self, n):
        return self.near_pd.register(Memory.anonymous(n), Access.LOCAL_WRITE)

    def table(self, **settings):
        local = self.local(4 * layout.SLOT_BYTES)
        return SlotTable(
            self.near,
            self.cqs[2],
            local,
            self.slots_region.address,
            self.slots_region.rkey,
            4,
            **settings,
        )

    def stream(self, **settings):
        return FileStream("t-0", in_place=self.in_place, **settings)

    def location(self, length=1 << 20):
        """The granted file, as the near side READs it."""
        return Location(self.endpoint, self.file.address, self.file_region.rkey, length)

    def put(self, index, data):
        memoryview(self.slots)[index * layout.SLOT_BYTES : (index + 1) * layout.SLOT_BYTES] = data

    def close(self):
        self.near.close()
        self.far.close()
        self.near_pd.close()
        self.far_pd.close()
        for cq in self.cqs:
            cq.close()
        self.device.close()


@pytest.fixture(params=[False, True], ids=["read", "in place"])
def ends(request):
    e = Ends()
    e.in_place = request.param
    yield e
    e.close()


def test_a_torn_slot_is_read_again_until_its_guard_matches(ends):
    table = ends.table()
    table.activate(1)
    whole = slot(readable=100, watermark=7)
    ends.put(1, whole[:20] + b"\xee" * 8 + whole[28:])  # half of an update

    def finish():
        time.sleep(0.02)
        ends.put(1, whole)

    thread = threading.Thread(target=finish)
    thread.start()
    table.refresh()
    thread.join()
    assert table.torn > 0
    assert table.get(1)["high_watermark"] == 7


def test_a_guard_that_never_matches_is_an_error_and_not_a_hang(ends):
    table = ends.table(torn_timeout_ms=100)
    table.activate(0)
    ends.put(0, b"\x01" * layout.SLOT_BYTES)
    with pytest.raises(ProtocolError, match="guard"):
        table.refresh()


def test_slots_of_others_are_not_looked_at(ends):
    table = ends.table()
    ends.put(0, b"\x01" * layout.SLOT_BYTES)  # free: never checked
    ends.put(2, slot(readable=5))
    table.activate(2)
    table.refresh()
    assert (
        table.read_bytes == 3 * layout.SLOT_BYTES
    )  # the smallest region from the start that holds what is active
    table.deactivate(2)
    table.refresh()
    assert table.reads == 1


def test_slot_updates_under_a_reader_are_never_seen_halfway(ends):
    """A writer that tears every update on purpose, a reader that refreshes all the while."""
    table = ends.table()
    table.activate(0)
    ends.put(0, slot())
    stop = threading.Event()

    def write():
        n = 0
        while not stop.is_set():
            n += 1
            new = slot(readable=n, watermark=n * 3, updates=n)
            view = memoryview(ends.slots)
            for at in range(0, layout.SLOT_BYTES, 8):  # eight stores, in an order of its own
                i = (at * 5 + 16) % layout.SLOT_BYTES
                view[i : i + 8] = new[i : i + 8]

    thread = threading.Thread(target=write)
    thread.start()
    try:
        last = 0
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            table.refresh()
            seen = table.get(0)
            assert (
                seen["high_watermark"]
                == 3 * seen["last_readable_position"]
                == 3 * seen["update_count"]
            )
            assert seen["update_count"] >= last
            last = seen["update_count"]
    finally:
        stop.set()
        thread.join()
    assert last > 100


@pytest.mark.parametrize("sealed", [False, True])
def test_a_head_that_outgrew_its_grant_is_read_to_the_end_of_the_grant(ends, sealed):
    """Never behind it; then the file has to be asked for again."""
    table = ends.table()
    table.activate(0)
    ends.put(0, slot(readable=100))
    stream = ends.stream()
    length = 16 << 10
    stream.open(ends.location(length), 1, 0, 100, False)
    table.refresh()
    stream.take_slot(table, 0, False)
    assert not stream.outgrown
    ends.put(0, slot(readable=length + 1, flags=3 if sealed else 1, updates=2))
    got = 0
    while (moved := stream.advance(table, 0, False)) == MOVED:
        got += stream.buffered
        stream.consume(stream.buffered)
    assert (moved, got, stream.outgrown, stream.limit) == (ENDED, length, True, length)
    reads = table.reads
    assert stream.advance(table, 0, False) == ENDED and table.reads == reads, (
        "the slot tells nothing that is of use"
    )
    stream.open(ends.location(), 2, length, length, False)
    assert not stream.outgrown


@pytest.mark.parametrize(
    ("readable", "message"), [(50, "moved from 100 to 50"), (99, "moved from 100 to 99")]
)
def test_a_position_that_cannot_be_is_refused(ends, readable, message):
    table = ends.table()
    table.activate(0)
    ends.put(0, slot(readable=100))
    stream = ends.stream()
    stream.open(ends.location(), 1, 0, 100, False)
    table.refresh()
    stream.take_slot(table, 0, False)
    ends.put(0, slot(readable=readable))
    table.refresh()
    with pytest.raises(ProtocolError, match=message):
        stream.take_slot(table, 0, False)


@pytest.mark.parametrize("arguments", [(0, 10, 5), (-1, 0, 0), (10, 0, 11), (10, 12, 12)])
def test_a_grant_that_cannot_be_is_refused(ends, arguments):
    with pytest.raises(ProtocolError, match="granted positions"):
        length, *positions = arguments
        ends.stream().open(Location(ends.endpoint, 0, 0, length), 1, *positions, False)


@pytest.mark.parametrize("index", [-1, 4, 200_000_000])
def test_a_slot_outside_of_the_table_is_refused(ends, index):
    table = ends.table()
    stream = ends.stream()
    stream.open(ends.location(), 1, 0, 0, False)
    uses = [
        table.activate,
        table.deactivate,
        lambda i: stream.take_slot(table, i, False),
        lambda i: stream.advance(table, i, False),
    ]
    for use in uses:
        with pytest.raises(ProtocolError, match=f"slot {index} of 4"):
            use(index)
    table.activate(3)
    table.deactivate(3)


def test_a_slot_of_another_file_ends_access(ends):
    table = ends.table()
    table.activate(0)
    ends.put(0, slot(file_id=9))
    stream = ends.stream()
    stream.open(ends.location(), 1, 0, 0, False)
    assert stream.advance(table, 0, False) == 2
    assert stream.revoked


def test_reads_stop_at_the_last_readable_position_and_keep_partial_batches(ends):
    batches = b"".join(encode_records([(None, b"v" * n, [], 1)]) for n in (10, 5000, 3, 4000))
    memoryview(ends.file)[: len(batches)] = batches
    stream = ends.stream(min_read_bytes=512, max_read_bytes=512, buffer_bytes=1024)
    stream.open(ends.location(), 1, 0, len(batches), True)
    out = b""
    while stream.unread or stream.buffered:
        if stream.fill() == 0:
            pass
        data = stream.bytes()
        while len(data) >= 12 and len(data) >= 12 + int.from_bytes(data[8:12], "big"):
            n = 12 + int.from_bytes(data[8:12], "big")
            out += data[:n]
            stream.consume(n)
            data = data[n:]
    assert out == batches
    assert stream.read_bytes == len(batches)


def chained(first=100, sizes=(10, 3000, 3, 4000)):
    """Batches of one record each, stamped from offset `first` on, in leader epoch 2."""
    out = []
    for i, n in enumerate(sizes):
        batch = bytearray(encode_records([(None, b"v" * n, [], 1)]))
        stamp(batch, first + i, 2)
        out.append(bytes(batch))
    return out


def read_whole(stream):
    """What the windows of a stream have, until nothing is left."""
    out = b""
    while stream.unread or stream.buffered:
        _, length = stream.window()
        out += stream.bytes()[:length]
        stream.consume(length)
        if not length and not stream.fill():
            break
    return out


def test_a_window_has_whole_batches_that_continue_the_log(ends):
    batches = chained()
    data = b"".join(batches)
    memoryview(ends.file)[: len(data)] = data
    stream = ends.stream(min_read_bytes=512, max_read_bytes=512, buffer_bytes=1024)

    def opened(**other):
        stream.open(ends.location(), 1, 0, len(data), True)
        known = {
            "next_offset": 100,
            "dense_from": 0,
            "end_offset": 104,
            "least_epoch": 2,
            "greatest_epoch": 2,
            **other,
        }
        stream.expect(90, *known.values())
        return stream

    assert read_whole(opened()) == data
    for other in (
        {"next_offset": 99},
        {"next_offset": 101},
        {"least_epoch": 3, "greatest_epoch": 4},
        {"greatest_epoch": 1},
    ):
        with pytest.raises(
            CorruptBatchError,
            match=r"t-0 offset .*position 0 of the segment that begins at offset 90",
        ):
            read_whole(opened(**other))
    with pytest.raises(
        CorruptBatchError,
        match=f"offset 103, position {len(data) - len(batches[3])} of the segment",
    ):
        read_whole(opened(end_offset=103))


def test_what_is_read_again_after_a_close_is_compared_again(ends):
    batches = chained()
    data = b"".join(batches)
    memoryview(ends.file)[: len(data)] = data
    stream = ends.stream(min_read_bytes=1 << 16)
    stream.open(ends.location(), 1, 0, len(data), True)
    stream.expect(100, 100, 0, 104, 2, 2)
    stream.fill()
    assert stream.window()[1] == len(data)
    stream.consume(len(batches[0]))
    stream.close()
    stream.fill()
    assert stream.window()[1] == len(data) - len(batches[0])


@pytest.mark.parametrize("at", [8, 9, 10, 11])
def test_a_length_that_cannot_be_is_damage_before_memory_is_taken(ends, at):
    data = bytearray(b"".join(chained()))
    data[at] ^= 0x40
    memoryview(ends.file)[: len(data)] = data
    stream = ends.stream(max_batch_bytes=1 << 20)
    stream.open(ends.location(), 1, 0, len(data), True)
    stream.expect(100, 100, 0, 104, 2, 2)
    with pytest.raises(CorruptBatchError, match="position 0 of the segment") as caught:
        read_whole(stream)
    assert "restore the segment" in caught.value.hint
    assert stream.buffer_bytes <= 1 << 20


def test_a_batch_over_the_limit_is_told_before_memory_is_taken(ends):
    memoryview(ends.file)[:12] = struct.pack(">qi", 0, 100 << 20)
    stream = ends.stream(max_batch_bytes=1 << 20)
    stream.open(ends.location(), 1, 0, 1 << 20, True)
    with pytest.raises(
        CorruptBatchError,
        match=r"t-0: a record batch of 104857612 bytes at position 0.*max\.batch\.bytes",
    ):
        stream.fill()
    assert stream.buffer_bytes <= 1 << 20


def test_a_revoked_key_is_an_error_that_names_the_reading(ends):
    stream = ends.stream()
    stream.open(ends.location(), 1, 0, 4096, False)
    assert stream.fill() == 2048
    ends.file_region.deregister()
    with pytest.raises(QueuePairError, match="READ of t-0: remote access error"):
        stream.fill()


def test_a_lagging_stream_has_several_reads_on_their_way(ends):
    file = memoryview(ends.file)
    file[:] = random.Random(7).randbytes(len(file))
    file[:12] = struct.pack(
        ">qi", 0, 100
    )  # the first batch is small, so that READs are of their own size
    stream = ends.stream(
        min_read_bytes=4096, max_read_bytes=4096, buffer_bytes=160000, max_batch_bytes=1 << 20
    )
    stream.open(ends.location(), 1, 0, 100001, True)
    sizes = []
    while stream.unread:
        sizes.append(stream.fill())
        if ends.in_place:
            assert stream.buffer_bytes == 0
    assert stream.bytes() == bytes(file[:100001])
    if not ends.in_place:
        assert sizes == [65536, 34465]  # sixteen at once, then the rest
        assert stream.reads == 25  # of 4096 bytes, the last of 1697
    assert ends.cqs[2].poll() == []


def test_a_key_revoked_among_several_reads_leaves_no_completion_behind(ends):
    stream = ends.stream(min_read_bytes=4096, max_read_bytes=4096)
    stream.open(ends.location(), 1, 0, 1 << 20, False)
    ends.file_region.deregister()
    with pytest.raises(QueuePairError, match="READ of t-0: remote access error"):
        stream.fill()
    assert ends.cqs[2].poll() == [] and stream.buffered == 0


def test_a_refresh_from_before_a_grant_says_nothing_of_it(ends):
    """Two files share a table.  The first ends, and while the broker grants its successor in the
    same slot, the local copy is of the time before: it shows the first file, and no bytes, which
    may be followed only after another READ."""
    table, first, second = ends.table(), ends.stream(), ends.stream()
    batch = encode_records([(None, b"v", [], 1)])
    memoryview(ends.file)[: len(batch)] = batch
    for index, (stream, file_id) in enumerate([(first, 1), (second, 2)]):
        ends.put(index, slot(file_id=file_id))
        table.activate(index)
        stream.open(ends.location(), file_id, 0, 0, False)
        assert stream.advance(table, index, False) == 0
    ends.put(0, slot(file_id=1, flags=layout.SLOT_FLAG_ASSIGNED | layout.SLOT_FLAG_SEALED))
    assert [first.advance(table, 0, False) for _ in range(2)] == [0, 2], (
        "the second's READ brought nothing, its own did"
    )
    assert second.advance(table, 1, False) == 0
    assert second.advance(table, 1, False) == 0, "a READ of the table that the first has not taken"
    table.deactivate(0)
    ends.put(0, slot(file_id=3, readable=len(batch)))
    table.activate(0)
    first.open(ends.location(), 3, 0, 0, False)
    assert not first.take_slot(table, 0, False)
    assert first.advance(table, 0, False) == 1
    assert not first.revoked
    assert first.bytes() == batch


def test_a_torn_refresh_leaves_nothing_that_another_stream_would_take(ends):
    table, first, second = ends.table(torn_timeout_ms=0), ends.stream(), ends.stream()
    for index, (stream, file_id) in enumerate([(first, 1), (second, 2)]):
        ends.put(index, slot(file_id=file_id))
        table.activate(index)
        stream.open(ends.location(), file_id, 0, 0, False)
    table.refresh()
    for index, stream in enumerate((first, second)):
        stream.take_slot(table, index, False)
    ends.put(1, slot(file_id=9, readable=7)[:32] + slot(file_id=2, readable=9)[32:])
    for index, stream in enumerate((first, second)):
        with pytest.raises(ProtocolError, match="guard"):
            stream.advance(table, index, False)
        assert not stream.revoked


def test_changed_names_each_slot_once_for_each_change(ends):
    table = ends.table()
    for index in (0, 2):
        ends.put(index, slot(file_id=index + 1))
        table.activate(index)
    ends.put(1, slot(file_id=9))
    assert table.changed(fresh=False) == [0, 2]
    assert table.changed(fresh=False) == []
    ends.put(1, slot(file_id=9, readable=5))
    ends.put(2, slot(file_id=3, readable=5))
    table.refresh()
    before = table.reads
    assert table.changed(fresh=False) == [2], "of the copy that another had brought"
    assert table.reads == before
    assert table.changed(fresh=True) == []
    table.activate(1)
    assert table.changed(fresh=True) == [1]
    table.deactivate(0)
    table.activate(0)
    assert table.changed(fresh=False) == [0], "granted again, with the same bytes"
