"""Batches that say little and mean much: small on the wire, a gigabyte when decompressed.

Whoever opens one refuses it by what it may hold (`max.batch.bytes`), without ever having the
memory.  The peaks are those of whole processes: a broker that looks up times, and each reader in a
process of its own.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import cramjam
import pytest
import zstandard

import kdirect
from kdirect.client.tcp_append import TcpAppender
from kdirect.errors import BrokerError
from kdirect.format.batch import crc32c, encode_single_bytes
from kdirect.format.codec import encode_records
from kdirect.format.compression import codec_of
from kdirect.model import TopicPartition
from kdirect.options import CLIENT
from kdirect.wire.cluster import Cluster

T = 1_700_000_000_000
PLAIN_BYTES = 1 << 30
LIMIT_BYTES = CLIENT.find("max.batch.bytes").default
# The limit once as pieces and once joined, and a batch as it came; a bomb that goes off takes a
# gigabyte.
MOST_GROWTH_BYTES = 2 * LIMIT_BYTES + (48 << 20)
CODECS = ("gzip", "snappy", "xerial", "lz4", "zstd", "zstd-unsized")
ALLOWED_BYTES = 48 << 20
MANY = 20
READERS = ("messages", "columns", "range")


def varint(n: int) -> bytes:
    n = (n << 1) ^ (n >> 63)
    out = bytearray()
    while n >= 0x80:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    return bytes(out + bytes([n]))


def record_head(plain_bytes: int) -> bytes:
    """The start of one record whose value is zeros to the end of `plain_bytes`."""
    rest = plain_bytes - 20
    value = rest - 8 - 1
    body = b"\0" + varint(0) + varint(0) + varint(-1) + varint(value)
    return varint(len(body) + value + 1) + body


def zeros(total: int):
    piece = bytes(1 << 20)
    for at in range(0, total, len(piece)):
        yield piece[: total - at]


def packed(codec: str) -> bytes:
    """One record of zeros, as much as a batch of 8 MiB can hold of it."""
    head = record_head(PLAIN_BYTES)
    if codec == "gzip":
        tool = zlib.compressobj(6, zlib.DEFLATED, 31)
        return (
            tool.compress(head)
            + b"".join(tool.compress(x) for x in zeros(PLAIN_BYTES))
            + tool.flush()
        )
    if codec.startswith("zstd"):
        total = PLAIN_BYTES + len(head)
        stream = zstandard.ZstdCompressor().compressobj(size=total if codec == "zstd" else -1)
        return (
            stream.compress(head)
            + b"".join(stream.compress(x) for x in zeros(PLAIN_BYTES))
            + stream.flush()
        )
    if codec == "lz4":
        # One block a 4 MiB, each a repetition of one byte: 255 bytes for each byte of length.
        block = (
            bytes([0x1F, 0, 1, 0])
            + b"\xff" * ((4 << 20) // 255 - 1)
            + bytes([200])
            + bytes([0x50])
            + bytes(5)
        )
        frame = b"\x04\x22\x4d\x18\x60\x70\x73"
        first = struct.pack("<I", len(head) | 1 << 31) + head
        return frame + first + (struct.pack("<I", len(block)) + block) * 250 + b"\0\0\0\0"
    block = bytes(cramjam.snappy.compress_raw(head + bytes(64 << 20)))
    if codec == "snappy":
        return bytes(cramjam.snappy.compress_raw(head + bytes(150 << 20)))
    return b"\x82SNAPPY\0" + struct.pack(">ii", 1, 1) + (struct.pack(">i", len(block)) + block) * 2


def bomb(codec: str) -> bytes:
    return batch(codec_of(codec.split("-")[0].replace("xerial", "snappy")), packed(codec))


def batch(attributes: int, data: bytes) -> bytes:
    """A batch of one record, of time T to T + 1000, as its header says."""
    tail = struct.pack(">hiqqqhii", attributes, 0, T, T + 1000, -1, -1, -1, 1) + data
    return struct.pack(">qiibI", 0, len(tail) + 9, -1, 2, crc32c(tail)) + tail


def peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return (
        int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")))
        << 10
    )


CHILD = """
import json, sys
from pathlib import Path
import kdirect
from kdirect.errors import CorruptBatchError
from kdirect.model import TopicPartition

servers, how, transport, partitions = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
settings = {"bootstrap.servers": servers, "transport": transport}

def peak():
    status = Path("/proc/self/status").read_text()
    return int(next(x.split()[1] for x in status.splitlines() if x.startswith("VmHWM:"))) << 10

def read(partition):
    tp = TopicPartition("t", partition)
    if how == "range":
        session = kdirect.connect(settings)
        reader = session.reader(tp, 0, 1, include_headers=True)
        try:
            return sum(len(b) for b in reader.batches())
        finally:
            reader.close()
            session.close()
    group = {"group.id": "g", "auto.offset.reset": "earliest", "enable.auto.commit": False}
    consumer = kdirect.Consumer({**settings, **group})
    try:
        consumer.assign([tp])
        return len(consumer.poll_arrow(timeout=20) if how == "columns" else consumer.consume(1, 20))
    finally:
        consumer.close()

assert read(0) == 1
if partitions < 0:
    before = peak()
    print(json.dumps({"read": read(-partitions), "growth": peak() - before}))
    sys.exit()
before, errors = peak(), []
for partition in range(1, partitions):
    try:
        errors.append(f"read {read(partition)}")
    except CorruptBatchError as e:
        errors.append(str(e))
print(json.dumps({"growth": peak() - before, "errors": errors}))
"""


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    """A broker in a process of its own with a partition for each bomb, the first being harmless."""
    from tests.support import BrokerProcess

    process = BrokerProcess(
        tmp_path_factory.mktemp("bombs") / "log", {"message.max.bytes": 16 << 20}
    ).start()
    session = kdirect.connect(process.bootstrap_servers)
    session.admin.create_topic("t", 2 + len(CODECS))
    session.close()
    cluster = Cluster(CLIENT.resolve({"bootstrap.servers": process.bootstrap_servers}))
    for partition, data in enumerate([encode_single_bytes(b"good", None, T), *map(bomb, CODECS)]):
        with TcpAppender(cluster, TopicPartition("t", partition)) as appender:
            assert appender.append(data) == 0
    allowed = encode_records([(None, bytes(ALLOWED_BYTES), None, T)], "zstd")
    assert len(allowed) < 10_000
    with TcpAppender(cluster, TopicPartition("t", 1 + len(CODECS))) as appender:
        for pending in [appender.submit(allowed) for _ in range(MANY)]:
            pending.result()
    cluster.close()
    yield process
    process.kill()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("how", READERS)
def test_readers_refuse_bombs_before_they_burst(broker, how, transport):
    arguments = [broker.bootstrap_servers, how, transport, str(1 + len(CODECS))]
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *arguments], capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    for codec, error in zip(CODECS, answer["errors"], strict=True):
        assert f"more than {LIMIT_BYTES} bytes" in error and "max.batch.bytes" in error, (
            f"{codec}: {error}"
        )
    assert answer["growth"] < MOST_GROWTH_BYTES


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("how", ["messages", "columns"])
def test_readers_open_few_batches_at_a_time_that_stand_for_much(broker, how, transport):
    """Each is below the limit; those that one READ or Fetch brings are not, together."""
    arguments = [broker.bootstrap_servers, how, transport, str(-1 - len(CODECS))]
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *arguments], capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["read"] == 1
    # The batch, the column or message made of it, and what the column's memory is rounded up to.
    assert answer["growth"] < 4 * ALLOWED_BYTES


def test_a_broker_that_looks_up_a_time_refuses_bombs_before_they_burst(broker):
    session = kdirect.connect(broker.bootstrap_servers)
    tps = [TopicPartition("t", i) for i in range(1 + len(CODECS))]
    assert session.offsets_for_times({tps[0]: T}) == {tps[0]: 0}
    before = peak_bytes(broker.pid)
    for tp in tps[1:]:
        with pytest.raises(BrokerError, match="MESSAGE_TOO_LARGE"):
            session.offsets_for_times({tp: T + 1})
    growth = peak_bytes(broker.pid) - before
    session.close()
    assert growth < MOST_GROWTH_BYTES
    assert "max.batch.bytes" in broker.errors.read_text(), "the broker's log names the property"
