"""Columns of views: no copy is made, and their bytes stay as they are whatever happens to the log,
the reader and the broker."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import random
from pathlib import Path
from typing import Any

import duckdb
import polars
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import kdirect
from kdirect import TopicPartition, blocks
from kdirect.client.direct import DirectFetcher
from kdirect.wire.channel import Channel
from tests.support import BrokerProcess, alter_topic, wait_until

LONG = 20_000
TP = TopicPartition("t", 0)


@pytest.fixture
def broker(tmp_path: Path):
    process = BrokerProcess(
        tmp_path / "log", {"log.retention.check.interval.ms": 500, "log.segment.delete.delay.ms": 0}
    ).start()
    yield process
    if process.process is not None:
        process.stop()


def settings(broker: BrokerProcess, transport: str = "auto", **more: Any) -> dict[str, Any]:
    return {"bootstrap.servers": broker.bootstrap_servers, "transport": transport, **more}


def payload(seed: int) -> bytes:
    chance = random.Random(seed)
    return chance.randbytes(chance.choice((0, 5, 12, 13, 100, LONG)))


def fill(broker: BrokerProcess, first: int, count: int, codec: str = "none") -> None:
    """Records whose values follow from their offsets, which begin at `first`."""
    with kdirect.Producer(settings(broker, **{"compression.type": codec})) as producer:
        for i in range(first, first + count):
            key = None if i % 7 == 3 else b"key %d" % i if i % 2 else b"a key of more than twelve"
            producer.produce("t", payload(i), key, partition=0, headers=[("h", payload(i + 1))])


def check(batches: list[pa.RecordBatch]) -> int:
    """Every byte of each row; how many rows."""
    rows = 0
    for batch in batches:
        batch.validate(full=True)
        for row in batch.to_pylist():
            i = row["offset"]
            assert row["value"] == payload(i)
            wanted = b"key %d" % i if i % 2 else b"a key of more than twelve"
            assert row["key"] == (None if i % 7 == 3 else wanted)
            if "headers" in row:
                assert row["headers"] == [{"key": "h", "value": payload(i + 1)}]
            rows += 1
    return rows


WAYS = ["shm", "read", "tcp"]


@pytest.fixture(params=WAYS)
def way(request, monkeypatch) -> str:
    """How a reader gets at the bytes: in place, by READs into its buffer, by Fetch."""
    if request.param == "read":
        made = DirectFetcher.__init__

        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            made(self, *args, **kwargs)
            self._stream_settings["in_place"] = False

        monkeypatch.setattr(DirectFetcher, "__init__", init)
    return request.param


def transport(way: str) -> str:
    return "tcp" if way == "tcp" else "shm"


def viewed(broker: BrokerProcess, way: str, stop: int, **more: Any) -> list[pa.RecordBatch]:
    """The rows [0, stop) as views; the reader and its session are closed then."""
    with (
        kdirect.connect(settings(broker, transport(way))) as session,
        session.reader(TP, 0, stop, include_headers=True, **more) as reader,
    ):
        found = list(reader.batches(views=True))
        assert reader.transport == transport(way)
    assert all(batch.schema.field("value").type == pa.binary_view() for batch in found)
    return found


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_views_have_the_rows_of_copies(broker, way, codec):
    fill(broker, 0, 300, codec)
    found = viewed(broker, way, 300, target_bytes=200_000)
    assert len(found) > 1
    assert check(found) == 300
    with kdirect.connect(settings(broker, transport(way))) as session:
        copies = pa.Table.from_batches(session.reader(TP, 0, 300, include_headers=True).batches())
    views = (
        pa.Table.from_batches(found)
        .drop_columns("headers")
        .cast(copies.drop_columns("headers").schema)
    )
    assert views.equals(copies.drop_columns("headers"))


def test_a_consumer_hands_out_views(broker, way):
    fill(broker, 0, 200)
    with kdirect.Consumer(settings(broker, transport(way))) as consumer:
        consumer.assign({TP: 0})
        assert consumer.poll(10).offset() == 0  # and others are in hand as messages
        found: list[pa.RecordBatch] = []
        while sum(b.num_rows for b in found) < 199:
            batch = consumer.poll_arrow(10, max_bytes=100_000, include_headers=True, views=True)
            assert batch is not None
            found.append(batch)
    assert check(found) == 199


def polled(broker: BrokerProcess, way: str, count: int) -> list[kdirect.Message]:
    """So many messages whose values are views; the consumer is closed then."""
    found: list[kdirect.Message] = []
    with kdirect.Consumer(settings(broker, transport(way)), views=True) as consumer:
        consumer.assign({TP: 0})
        while len(found) < count:
            found += consumer.consume(count - len(found), 20)
    return found


def check_messages(found: list[kdirect.Message]) -> None:
    for i, message in enumerate(found):
        value = message.value()
        assert message.offset() == i
        assert isinstance(value, memoryview) and value.readonly and value == payload(i)
        assert len(message) == len(value)
        wanted = b"key %d" % i if i % 2 else b"a key of more than twelve"
        assert message.key() == (None if i % 7 == 3 else wanted)
        assert message.headers() == [("h", payload(i + 1))]


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_messages_view_their_values(broker, way, codec):
    fill(broker, 0, 400, codec)
    found = polled(broker, way, 400)
    killed(broker)
    check_messages(found)
    with kdirect.Consumer(settings(broker, transport(way))) as consumer:
        consumer.assign({TP: 0})
        copies = [consumer.poll(20) for _ in range(400)]
    assert [pickle.loads(pickle.dumps(m)) for m in found] == copies == found
    assert all(isinstance(m.value(), bytes) for m in copies)


def test_messages_of_views_from_the_middle_of_a_batch_and_beside_columns(broker, way):
    """Records before the offset that is asked for are passed over, and what is in hand as messages
    may be asked for as columns."""
    with kdirect.Producer(settings(broker, **{"linger.ms": 200, "batch.size": 50_000})) as producer:
        for i in range(300):
            producer.produce("t", payload(i), b"a key of more than twelve", partition=0)
    with kdirect.Consumer(settings(broker, transport(way)), views=True) as consumer:
        consumer.assign({TP: 7})
        assert [consumer.poll(20).offset() for _ in range(5)] == [7, 8, 9, 10, 11]
        assert consumer.position(TP) == 12
        batch = consumer.poll_arrow(20, max_bytes=60_000, views=True)
        after = batch["offset"][-1].as_py() + 1
        assert batch["offset"][0].as_py() == 12
        message = consumer.poll(20)
        assert message.offset() == after and message.value() == payload(after)
    assert [v.as_py() for v in batch["value"]] == [payload(i) for i in range(12, after)]


def test_a_message_of_views_that_is_null_or_empty(broker, way):
    with kdirect.Producer(settings(broker)) as producer:
        for value in (None, b"", b"x" * 64, b"x" * 65):
            producer.produce("t", value, partition=0)
    found = polled(broker, way, 4)
    assert [None if m.value() is None else bytes(m.value()) for m in found] == [
        None, b"", b"x" * 64, b"x" * 65,
    ]  # fmt: skip


def private_bytes() -> int:
    """The memory of this process that is no file's."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


def test_no_memory_of_the_values_size_is_taken(broker, way):
    """Neither to read, but for what READs and Fetches bring, nor to compute with what was read."""
    size, count = 1 << 19, 64
    with kdirect.Producer(settings(broker)) as producer:
        for _ in range(count):
            producer.produce("t", os.urandom(size), partition=0)
            producer.flush()

    def computed(batches: list[pa.RecordBatch]) -> None:
        table = pa.Table.from_batches(batches)
        value = pa.concat_arrays(table["value"].slice(1).chunks)
        assert pc.equal(value, value).true_count == count - 1
        frame = polars.from_arrow(table.select(["value", "offset"]))
        assert frame["value"].bin.size().sum() == count * size
        assert frame.filter(frame["offset"] > 3)["value"].bin.starts_with(b"no").sum() == 0
        asked = duckdb.connect().execute('SELECT sum(octet_length(value)) FROM "table"')
        assert asked.fetchone() == (count * size,)

    def read() -> list[pa.RecordBatch]:
        with (
            kdirect.connect(settings(broker, transport(way))) as session,
            session.reader(TP, 0, count, target_bytes=1 << 28) as reader,
        ):
            return list(reader.batches(views=True))

    computed(read())  # what is imported and started once
    blocks.trim()
    gc.collect()
    before = private_bytes()
    found = read()
    taken = private_bytes() - before
    if way == "shm":
        assert taken < 2 * size
    before = private_bytes()
    computed(found)
    assert private_bytes() - before < 4 * size


def values_at(batches: list[pa.RecordBatch]) -> set[int]:
    """Addresses of the buffers that long values lie in."""
    return {b.address for batch in batches for b in batch["value"].buffers()[2:] if b is not None}


def test_views_over_shared_memory_lie_in_the_segment(broker):
    fill(broker, 0, 100)
    found = viewed(broker, "shm", 100)
    maps = Path("/proc/self/maps").read_text().splitlines()
    segments = [line.split()[0].split("-") for line in maps if line.endswith(".log")]
    for address in values_at(found):
        assert any(int(a, 16) <= address < int(b, 16) for a, b in segments)
    del found
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert not [line for line in maps if line.endswith(".log")], "the lease ends with the columns"


# -- what happens to the log -----------------------------------------------------------------------


def rolled(broker: BrokerProcess) -> None:
    alter_topic(broker.bootstrap_servers, "t", segment_bytes=1 << 20)
    fill(broker, 300, 600)


def deleted(broker: BrokerProcess) -> None:
    with kdirect.connect(settings(broker)) as session:
        session.admin.delete_topic("t")
        session.admin.create_topic("t", 1)
    fill(broker, 7000, 300)


def retained(broker: BrokerProcess) -> None:
    rolled(broker)
    fill(broker, 900, 2000)
    with kdirect.connect(settings(broker)) as session:
        session.admin.delete_records({TP: 2900})
    first = broker.log_dir / "t-0" / f"{0:020d}.log"
    wait_until(lambda: not first.exists(), "the end of the first segment", 60)


def restarted(broker: BrokerProcess) -> None:
    broker.stop()
    broker.start()
    fill(broker, 300, 300)


def killed(broker: BrokerProcess) -> None:
    broker.kill()
    broker.start()
    fill(broker, 300, 300)


def dead(broker: BrokerProcess) -> None:
    broker.kill()


def read_on(broker: BrokerProcess) -> None:
    """Whoever reads more uses other memory."""
    for _ in range(3):
        assert check(viewed(broker, "shm", 300)) == 300
    blocks.trim()


EVENTS = [rolled, deleted, retained, restarted, killed, dead, read_on]


@pytest.mark.parametrize("event", EVENTS)
def test_views_stay_as_they_are(broker, way, event):
    fill(broker, 0, 300)
    found = viewed(broker, way, 300, target_bytes=200_000)
    event(broker)
    gc.collect()
    assert check(found) == 300


@pytest.mark.parametrize("event", [rolled, killed])
def test_views_of_a_reader_that_goes_on_stay(broker, way, event):
    fill(broker, 0, 300)
    with kdirect.connect(settings(broker, transport(way))) as session:
        reader = session.reader(TP, 0, 600, include_headers=True, target_bytes=50_000)
        batches = reader.batches(views=True)
        found = [next(batches)]
        event(broker)
        if event is rolled:
            found += batches
            assert sum(batch.num_rows for batch in found) == 600
        else:
            found += batches
    check(found)


def damage(broker: BrokerProcess, value: bytes) -> None:
    """Change a byte of the record with this value, where it lies on disk."""
    path = broker.log_dir / "t-0" / f"{0:020d}.log"
    with open(path, "r+b") as file:
        at = file.read().index(value)
        file.seek(at + 40)
        file.write(b"X" if value[40:41] != b"X" else b"Y")


def test_a_damaged_batch_is_the_error_of_copies(broker, way):
    with kdirect.Producer(settings(broker)) as producer:
        for i in range(20):
            producer.produce("t", b"%03d" % i * 100, partition=0)
            producer.flush()
    damage(broker, b"010" * 100)
    said = set()
    with kdirect.connect(settings(broker, transport(way))) as session:
        for views in (False, True):
            with pytest.raises(kdirect.CorruptBatchError) as caught:
                list(session.reader(TP, 0, 20).batches(views=views))
            said.add(str(caught.value))
    with kdirect.Consumer(settings(broker, transport(way)), views=True) as consumer:
        consumer.assign({TP: 0})
        with pytest.raises(kdirect.CorruptBatchError):
            while consumer.poll(20) is not None:
                pass
    assert len(said) == 1


def test_recovery_leaves_what_is_viewed_beside_a_damaged_batch(broker):
    """The broker cuts its log there, and what was committed after it may be looked at."""
    values = [b"%04d" % i * 100 for i in range(500)]
    with kdirect.Producer(settings(broker)) as producer:
        for i, value in enumerate(values):
            producer.produce("t", value, partition=0)
            if i % 10 == 9:
                producer.flush()
    with kdirect.connect(settings(broker)) as session:
        found = list(session.reader(TP, 0, 500).batches(views=True))
    broker.kill()
    damage(broker, values[100])
    broker.start()
    now = [v for batch in found for v in batch["value"].to_pylist()]
    assert [i for i, v in enumerate(now) if v != values[i]] == [100], "damaged by hand"
    with kdirect.connect(settings(broker)) as session:
        assert sum(b.num_rows for b in session.reader(TP, 0, 100).batches()) == 100


def test_a_forked_process_keeps_what_its_parent_drops(broker, way):
    """READ buffers are memory that both share, and the parent reads on."""
    fill(broker, 0, 4000)
    with kdirect.connect(settings(broker, transport(way))) as session:
        reader = session.reader(TP, 0, 4000, include_headers=True, target_bytes=100_000)
        batches = reader.batches(views=True)
        while (batch := next(batches))["offset"][0].as_py() < 2000:
            pass
        ends, go = os.pipe()
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                os.read(ends, 1)
                os._exit(0 if check([batch]) else 1)
            os._exit(2)
        del batch
        for batch in batches:
            del batch
        os.write(go, b"x")
        assert os.waitpid(pid, 0)[1] == 0


def test_a_forked_process_reads_the_views_of_its_parent(broker):
    fill(broker, 0, 100)
    found = viewed(broker, "shm", 100)
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            os._exit(0 if check(found) == 100 else 1)
        os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.parametrize("way", ["read"], indirect=True)
def test_buffers_of_reads_are_used_again(broker, way, monkeypatch):
    """Whoever drops what it has looked at needs no more memory than a reader that copies, and
    whoever keeps all of it gets other buffers."""
    count = 8000
    fill(broker, 0, 1)
    alter_topic(broker.bootstrap_servers, "t", segment_bytes=3 << 20)
    fill(broker, 1, count - 1)
    made = []
    make = Channel.local_memory
    monkeypatch.setattr(
        Channel, "local_memory", lambda self, length: (made.append(length), make(self, length))[1]
    )

    def read(keeps: bool) -> tuple[int, list[pa.RecordBatch]]:
        made.clear()
        kept = []
        with (
            kdirect.connect(settings(broker, "shm")) as session,
            session.reader(TP, 0, count, include_headers=True, target_bytes=50_000) as reader,
        ):
            for batch in reader.batches(views=True):
                assert reader.transport == "shm"
                if keeps:
                    kept.append(batch)
        return sum(made), kept

    dropped, _ = read(keeps=False)
    assert dropped < 24 << 20
    used, kept = read(keeps=True)
    assert used > 2 * dropped
    assert check(kept) == count
