"""What rows of tiered storage work with: stores on tmpfs, a broker in a process of its own, records
that are written fast, and a store as bare pyarrow sees it.

The broker and each client that must not share an interpreter with what is measured are `Peer`s: run
as a program, this file serves `Side`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import socket
import struct
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from sides import Peer, serve

ROOT = Path(__file__).resolve().parent.parent
WAIT_S = 300.0
PARTITIONS = 4
SEGMENT_BYTES = 64 << 20
QUICK_SEGMENT_BYTES = 1 << 20
BATCH_BYTES = 128 << 10
WINDOW = 16  # requests under way
GET_BYTES = 1 << 20  # as the broker gets
JAVA = ("-Xmx512m", "-XX:+UseSerialGC")  # of S3Proxy
LOAD_BEGINS_S = 0.3  # not counted
GETTERS = 10  # its reader threads, by default


# -- stores ----------------------------------------------------------------------------------------


@contextmanager
def directory_store() -> Iterator[tuple[Path, Any]]:
    """A directory on tmpfs, and in it the `Place` of a store that is a directory."""
    sys.path.append(str(ROOT))  # behind the package that is installed
    from tests.object_servers import directory_place

    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    directory = Path(tempfile.mkdtemp(prefix="kdirect-bench-", dir=base))
    try:
        (directory / "objects").mkdir()
        yield directory, directory_place(directory / "objects")
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def stores() -> Iterator[tuple[Path, dict[str, Any]]]:
    """A directory on tmpfs, and in it a `Place` of each kind of store: `directory`, and `s3`, whose
    place is the reason where it cannot be had."""
    with directory_store() as (directory, place):
        from versus.jars import MissingJarsError, jars

        from tests.object_servers import S3Proxy

        found: dict[str, Any] = {"directory": place}
        server = None
        try:
            try:
                if shutil.which("java") is None:
                    raise MissingJarsError("there is no Java for S3Proxy")
                (directory / "s3").mkdir()
                server = S3Proxy(directory / "s3", jars("s3proxy"), JAVA)
                found["s3"] = server.place
            except MissingJarsError as e:
                found["s3"] = str(e)
            yield directory, found
        finally:
            if server is not None:
                server.stop()


def properties(place: Any, **more: Any) -> dict[str, Any]:
    """Of a broker whose objects go to `place`."""
    return {
        "remote.log.storage.system.enable": "true",
        "remote.log.storage.uri": place.uri,
        **{f"rsm.config.{name}": value for name, value in place.config.items()},
        "remote.log.manager.task.interval.ms": "200",
        "log.retention.check.interval.ms": "100",
        **{name.replace("_", "."): str(value) for name, value in more.items()},
    }


class BareStore:
    """pyarrow alone, by the same file system as the broker's."""

    def __init__(self, place: Any) -> None:
        self.store = place.store()
        self.files = self.store._filesystem
        self.root = self.store.parsed.root

    def logs(self, topic: str) -> list[tuple[str, int]]:
        """Objects of a topic, in the order of their partitions and offsets: key, bytes of log."""
        from kdirect.format.segment_object import needs, parse_footer, parse_key

        found = []
        for info in sorted(self.store.list(), key=lambda info: str(info.key)):
            parsed = parse_key("", info.key)
            if parsed is not None and parsed[0].topic == topic:
                tail = self.store.get_tail(info.key, info.size, 64 << 10)
                wanted = needs(tail, info.size)
                if wanted > len(tail):
                    tail = self.store.get_tail(info.key, info.size, wanted)
                found.append((info.key, parse_footer(tail, info.size).log_bytes))
        return found

    def put(self, files: Iterable[Path], prefix: str, streams: int) -> float:
        """Copy files to the store; seconds."""
        from pyarrow import fs

        local = fs.LocalFileSystem()
        folder = f"{self.root}/{prefix}"
        if isinstance(self.files, fs.LocalFileSystem):
            self.files.create_dir(folder)

        def copy(path: Path) -> None:
            name = f"{folder}/{path.parent.name}-{path.name}"
            with (
                local.open_input_stream(str(path)) as source,
                self.files.open_output_stream(name) as target,
            ):
                while piece := source.read(GET_BYTES):
                    target.write(piece)

        began = time.perf_counter()
        with ThreadPoolExecutor(streams) as pool:
            list(pool.map(copy, files))
        took = time.perf_counter() - began
        self.clear(f"{prefix}/")
        return took

    def warm(self, times: int = 8) -> None:
        """A server on a Java machine compiles what it does often."""
        data = os.urandom(SEGMENT_BYTES // 2)
        for _ in range(times):
            self.store.put("warm", len(data), [data])
            self.get([("warm", len(data))])
        self.store.delete("warm")

    def clear(self, prefix: str = "") -> None:
        for info in list(self.store.list(prefix)):
            self.store.delete(info.key)

    def get(self, logs: list[tuple[str, int]], keep: bool = False) -> tuple[float, list[Any]]:
        """Get all bytes of these logs, in ranges as the broker's and by as many threads; seconds,
        and the bytes where they are to be kept."""

        def ranged(where: tuple[Any, int, int]) -> Any:
            file, at, length = where
            data = file.read_at(length, at)
            if len(data) != length:
                raise RuntimeError("an object is shorter than its log")
            return data if keep else None

        began = time.perf_counter()
        ranges = []
        for key, size in logs:
            file = self.files.open_input_file(f"{self.root}/{key}")
            ranges += [(file, at, min(GET_BYTES, size - at)) for at in range(0, size, GET_BYTES)]
        with ThreadPoolExecutor(GETTERS) as pool:
            data = list(pool.map(ranged, ranges))
        return time.perf_counter() - began, data


# -- records ---------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """One record batch, as it is sent again and again."""

    data: bytes
    records: int


def batch_of(value_bytes: int, batch_bytes: int = BATCH_BYTES) -> Batch:
    import pyarrow as pa

    from kdirect.format.codec import ArrowEncoder

    count = max(1, batch_bytes // (value_bytes + 12))
    values = pa.array([os.urandom(value_bytes) for _ in range(count)], pa.binary())
    now = time.time_ns() // 1_000_000
    encoder = ArrowEncoder(batch_bytes=4 * batch_bytes + value_bytes, compression="none")
    (batch,) = encoder.encode(values, None, default_timestamp_ms=now)
    return Batch(bytes(batch.data), count)


def batches_of(batch: Batch, segments: int, segment_bytes: int) -> int:
    """How many batches seal so many segments, and begin one more."""
    return segments * (segment_bytes // len(batch.data)) + 1


def fill(address: str, topic: str, partitions: int, batch: Batch, count: int) -> None:
    """Append the batch `count` times to each partition, pipelined, acks=all."""
    from kdirect.format import protocol as p
    from kdirect.format.schema import build

    frames = []
    for number in range(partitions):
        data = {"index": number, "records": batch.data}
        request = build(
            p.ProduceRequest, transactional_id=None, acks=-1, timeout_ms=60_000,
            topic_data=[{"name": topic, "partition_data": [data]}],
        )  # fmt: skip
        frames.append(bytes(p.encode_request(request, 9, number, "fill")))
    host, _, port = address.rpartition(":")
    under_way: deque[int] = deque()
    with socket.create_connection((host, int(port)), 60) as s:
        reader = s.makefile("rb")

        def take() -> None:
            under_way.popleft()
            frame = reader.read(struct.unpack(">i", reader.read(4))[0])
            _, answer = p.decode_response(0, 9, frame)
            error = answer.responses[0].partition_responses[0].error_code
            if error:
                raise RuntimeError(f"records were refused with code {error}")

        for n in range(count * partitions):
            s.sendall(frames[n % partitions])
            under_way.append(n)
            if len(under_way) >= WINDOW:
                take()
        while under_way:
            take()


TIERED = {"remote.storage.enable": "true", "retention.ms": "-1"}


def make_cold(peer: Peer, session: Any, topic: str, batch: Batch, segments: int,
              segment_bytes: int, partitions: int = 1) -> int:  # fmt: skip
    """A topic, all of which is tiered and nothing local but the active segment of each partition;
    the offset where that begins."""
    configs = {**TIERED, "segment.bytes": segment_bytes, "local.retention.bytes": 1}
    session.admin.create_topic(topic, partitions, configs=configs)
    count = batches_of(batch, segments, segment_bytes)
    fill(session.settings["bootstrap.servers"][0], topic, partitions, batch, count)
    peer.call("until_cold", topic)
    return (count - 1) * batch.records


def local_start(directory: Path, topic: str, partition: int) -> int:
    """The first offset of which a broker's log directory has records, by the names that Kafka gives
    to its files."""
    return min(int(path.stem) for path in (directory / f"{topic}-{partition}").glob("*.log"))


# -- the other process -----------------------------------------------------------------------------


class Side:
    """A broker, or a client of one."""

    def __init__(self) -> None:
        import confluent_kafka  # noqa: F401 - none of the turns is to wait for it

        import kdirect  # noqa: F401

        self.broker: Any = None
        self.consumer: Any = None

    def start(self, directory: str, given: dict[str, Any]) -> str:
        import kdirect

        self.broker = kdirect.Broker(directory, properties=given)
        self.broker.start()
        gc.freeze()  # as `kdirect broker` does
        return str(self.broker.bootstrap_servers)

    def stop(self) -> None:
        self.broker.stop()

    def statistics(self) -> dict[str, int]:
        found = self.broker.statistics()
        return {name: value for name, value in found.items() if name.startswith("remote_")}

    def cpu_s(self) -> float:
        """CPU time of this process so far, all threads."""
        return time.process_time()

    def until_copied(self, requests: int) -> float:
        """When so many copies have begun since the start, and none is left to do."""

        def copied(now: dict[str, int]) -> bool:
            return now["remote_copy_requests"] >= requests and not now["remote_copy_lag_segments"]

        return self._until(copied)

    def until_deleted(self) -> float:
        return self._until(lambda now: not now["remote_bytes"] and not now["remote_metadata_count"])

    def until_cold(self, topic: str) -> None:
        partitions = self.broker.server.logs.partitions.items()
        those = [partition for tp, partition in partitions if tp.topic == topic]
        self._until(lambda now: all(len(partition.segments) == 1 for partition in those))

    def _until(self, condition: Any) -> float:
        end = time.monotonic() + WAIT_S
        while not condition(now := self.statistics()):
            if time.monotonic() > end:
                raise RuntimeError(f"nothing more happens: {now}")
            time.sleep(0.005)
        return time.monotonic()

    # -- clients -----------------------------------------------------------------------------------

    def load(self, address: str, topic: str, rate: float, size: int, seconds: float) -> list[float]:
        """Produce records of `size` at `rate` bytes a second, acks=all, one round over the
        partitions at a time; ms from each to its acknowledgment, sorted, but for those of the
        first `LOAD_BEGINS_S`, in which connections are made and heads grow."""
        from confluent_kafka import Producer

        producer = Producer({"bootstrap.servers": address, "acks": "all", "linger.ms": 0,
                             "log_level": 0})  # fmt: skip
        took: list[float] = []
        failed: list[str] = []

        def done(error: Any, message: Any) -> None:
            if time.monotonic() > began + LOAD_BEGINS_S:
                took.append(message.latency() * 1e3)
            if error:
                failed.append(str(error))

        value = b"v" * size
        began, sent = time.monotonic(), 0
        while (now := time.monotonic()) < began + LOAD_BEGINS_S + seconds:
            if sent * size > (now - began) * rate:
                producer.poll(0.0005)
                continue
            for partition in range(PARTITIONS):
                producer.produce(topic, value, partition=partition, callback=done)
            sent += PARTITIONS
            producer.poll(0)
        if producer.flush(60) or failed:
            raise RuntimeError(f"records were not acknowledged: {failed[:1]}")
        return sorted(took)

    def follow(self, address: str, topic: str, offset: int) -> None:
        """Be at the end of a topic, whose last record is that at `offset`."""
        import kdirect

        self.consumer = kdirect.Consumer({"bootstrap.servers": address, "transport": "tcp"})
        self.consumer.assign({kdirect.TopicPartition(topic, 0): offset})
        while self.consumer.poll(1.0) is None:
            pass

    def tail(self, seconds: float) -> list[float]:
        """Follow it on; ms from the moment that each record says to now, sorted."""
        took = []
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            message = self.consumer.poll(0.1)
            if message is not None:
                sent = int(message.value()[:20])
                took.append((time.monotonic_ns() - sent) / 1e6)
        self.consumer.close()
        return sorted(took)

    def read_old(self, address: str, topic: str, stop: int, rate: float, seconds: float) -> float:
        """Read the offsets below `stop` at `rate` bytes a second, again and again; what rate it
        came to."""
        import kdirect

        began, got = time.monotonic(), 0
        end = began + seconds
        with kdirect.connect({"bootstrap.servers": address, "transport": "tcp"}) as session:
            while time.monotonic() < end:
                with session.reader(kdirect.TopicPartition(topic, 0), 0, stop) as reader:
                    for rows in reader.batches():
                        got += rows.column("value").nbytes
                        now = time.monotonic()
                        if now > end:
                            break
                        time.sleep(max(0.0, began + got / rate - now))
        return got / (time.monotonic() - began)


@contextmanager
def side() -> Iterator[Peer]:
    peer = Peer(__file__)
    try:
        yield peer
    finally:
        with contextlib.suppress(OSError):
            peer.close()


@contextmanager
def tiered_broker(place: Any, directory: Path, **more: Any) -> Iterator[tuple[Peer, Any, str]]:
    """A broker in a process of its own: it, a session with it over TCP, its address."""
    import kdirect

    with side() as peer:
        address = peer.call("start", str(directory), properties(place, **more))
        with kdirect.connect({"bootstrap.servers": address, "transport": "tcp"}) as session:
            yield peer, session, address
        peer.call("stop")
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    serve(Side())
