"""Bench row of the broker's event loop: how long others wait while partitions get their first
record.

Four processes: the broker, a client that pings it every millisecond on a connection of its own, the
producers, and this one.  The broker's process is started from this file, so that it can say what
its event loop did: how long a callback took at most, by the clock and in CPU time (the rest it was
waiting, for a processor or for the interpreter's lock), and how late a timer of the loop was:
`late_own_ms` without the time in which the loop's thread could have run and had no processor.  On a
machine with as many busy threads as cores the scheduler's part of a ping is tens of milliseconds;
`quiet_ms` says what the same client waited at most for an idle broker before.

Under memory pressure: the broker is put into a memory cgroup, if we may make one, whose limit it
has reached with page cache before the first record comes, so that every page of a new head has to
be reclaimed from somewhere first.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sides import Figure, figure

BAR_MS = 20.0
PARTITIONS = 1000
PRESSED_PARTITIONS = 32
PRESSED_BYTES = 8 << 20  # of records for each of them
CONNECTIONS = 4
PING_S = 0.001
CGROUPS = Path("/sys/fs/cgroup")


# -- the broker ------------------------------------------------------------------------------------


class Probe:
    """What the event loop of this process does.  `report` starts again."""

    def __init__(self) -> None:
        self.longest = (0.0, 0.0, "")  # by the clock, CPU, what
        self.late = self.late_own = 0.0
        plain = asyncio.events.Handle._run

        def run(handle: asyncio.Handle) -> None:
            callback = handle._callback
            began, cpu = time.perf_counter(), time.thread_time()
            plain(handle)
            took = time.perf_counter() - began
            if took > self.longest[0]:
                self.longest = (took, time.thread_time() - cpu, repr(callback)[:120])

        asyncio.events.Handle._run = run  # type: ignore[method-assign]
        self.collected = self._began = 0.0
        gc.callbacks.append(self._collecting)

    def _collecting(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.thread_time()
        else:
            self.collected = max(self.collected, time.thread_time() - self._began)

    async def watch(self) -> None:
        """On the loop whose thread is watched."""
        schedstat = _schedstat()
        while True:
            without = _without_processor(schedstat)
            due = time.perf_counter() + PING_S
            await asyncio.sleep(PING_S)
            late = time.perf_counter() - due
            self.late = max(self.late, late)
            self.late_own = max(self.late_own, late - (_without_processor(schedstat) - without))

    def report(self) -> dict[str, Any]:
        (took, cpu, what), late, late_own = self.longest, self.late, self.late_own
        collected = self.collected
        self.longest, self.late, self.late_own, self.collected = (0.0, 0.0, ""), 0.0, 0.0, 0.0
        return {
            "callback_ms": took * 1e3,
            "callback_cpu_ms": cpu * 1e3,
            "callback": what,
            "late_ms": late * 1e3,
            "late_own_ms": late_own * 1e3,
            "collection_cpu_ms": collected * 1e3,
        }


def _schedstat() -> int:
    """A descriptor for `_without_processor`, of the thread that calls."""
    return os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)


def _without_processor(schedstat: int) -> float:
    """For how many seconds the thread has been ready to run, and has not."""
    return int(os.pread(schedstat, 100, 0).split()[1]) / 1e9


def broker(directory: str, properties: dict[str, Any]) -> None:
    """The broker's process: a line with its address, then a report for each line that comes."""
    import kdirect

    probe = Probe()
    with kdirect.Broker(directory, properties=properties) as b:
        asyncio.run_coroutine_threadsafe(probe.watch(), b.server._loop)  # type: ignore[arg-type]
        gc.freeze()  # as `kdirect broker` does
        print(b.bootstrap_servers, flush=True)
        for line in sys.stdin:
            if line.strip() == "fill":
                _fill_memory(Path(directory))
            print(json.dumps(probe.report()), flush=True)


class BrokerProcess:
    def __init__(self, directory: Path, **properties: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "broker", str(directory), json.dumps(properties)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.servers = self.process.stdout.readline().strip()

    def report(self, order: str = "report") -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(order, file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())  # type: ignore[no-any-return]

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


# -- clients ---------------------------------------------------------------------------------------


def _connect(servers: str) -> socket.socket:
    host, _, port = servers.rpartition(":")
    s = socket.create_connection((host, int(port)), 60)
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return s


def _answer(s: socket.socket) -> bytes:
    data = b""
    while len(data) < 4 or len(data) < 4 + struct.unpack_from(">i", data)[0]:
        piece = s.recv(1 << 20)
        if not piece:
            raise RuntimeError("the broker closed the connection")
        data += piece
    return data


def ping(servers: str) -> None:
    """The pinging process: at each line, the longest wait in ms since the line before, the 99th
    percentile, and how many there were."""
    from kdirect.format import protocol as p
    from kdirect.format.schema import build

    asked, told = threading.Event(), threading.Event()

    def listen() -> None:
        for _ in sys.stdin:
            asked.set()
            told.wait()
            told.clear()
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    request = bytes(
        p.encode_request(
            build(p.ApiVersionsRequest, client_software_name="ping", client_software_version="1"),
            3,
            1,
            "ping",
        )
    )
    with _connect(servers) as s:
        waits: list[float] = []
        while True:
            began = time.perf_counter()
            s.sendall(request)
            _answer(s)
            waits.append(time.perf_counter() - began)
            if asked.is_set():
                waits.sort()
                print(
                    json.dumps([waits[-1] * 1e3, waits[int(len(waits) * 0.99)] * 1e3, len(waits)]),
                    flush=True,
                )
                waits.clear()
                asked.clear()
                told.set()
            time.sleep(PING_S)


class Pinger:
    def __init__(self, servers: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "ping", servers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def report(self) -> list[float]:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())  # type: ignore[no-any-return]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def first_records_tcp(servers: str, topic: str, count: int) -> None:
    """A record for each partition, in requests of their own, as fast as the broker takes them."""
    from kdirect.format import protocol as p
    from kdirect.format.batch import encode_single_bytes
    from kdirect.format.schema import build

    def write(start: int) -> None:
        mine = range(start, count, CONNECTIONS)
        with _connect(servers) as s:
            reader = s.makefile("rb")
            frames = []
            for i in mine:
                data = {"index": i, "records": encode_single_bytes(b"first")}
                request = build(
                    p.ProduceRequest,
                    transactional_id=None,
                    acks=-1,
                    timeout_ms=60_000,
                    topic_data=[{"name": topic, "partition_data": [data]}],
                )
                frames.append(bytes(p.encode_request(request, 9, i, "first")))
            sender = threading.Thread(target=s.sendall, args=(b"".join(frames),))
            sender.start()
            for _ in mine:
                frame = reader.read(struct.unpack(">i", reader.read(4))[0])
                _, answer = p.decode_response(0, 9, frame)
                error = answer.responses[0].partition_responses[0].error_code
                if error:
                    raise RuntimeError(f"a first record was refused with code {error}")
            sender.join()

    writers = [threading.Thread(target=write, args=(n,)) for n in range(CONNECTIONS)]
    for w in writers:
        w.start()
    for w in writers:
        w.join()


def first_records_rdma(servers: str, topic: str, count: int, size: int = 100) -> None:
    """The same by one RDMA producer, which asks for access to each partition; `size` bytes for
    each, in records of at most 64 KiB."""
    import kdirect

    with kdirect.Producer(
        {"bootstrap.servers": servers, "transport": "shm", "delivery.timeout.ms": 600_000}
    ) as producer:
        value = b"v" * min(size, 64 << 10)
        for i in range(count):
            for _ in range(max(1, size // len(value))):
                producer.produce(topic, value, partition=i)
        left = producer.flush(600)
        if left:
            raise RuntimeError(f"{left} records were not delivered")


# -- memory ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def limited_memory(pid: int, limit: int) -> Iterator[bool]:
    """Keep a process within so much memory, page cache included; False when we may not."""
    name = f"kdirect-bench-{os.getpid()}"
    first, second = CGROUPS / "memory" / name, CGROUPS / name  # cgroup version 1 and 2
    group = first if first.parent.is_dir() else second
    try:
        group.mkdir()
    except OSError:
        yield False
        return
    try:
        (group / ("memory.limit_in_bytes" if group is first else "memory.max")).write_text(
            str(limit)
        )
        (group / "cgroup.procs").write_text(str(pid))
        yield True
    except OSError:
        yield False
    finally:
        with contextlib.suppress(OSError):
            (group.parent / "cgroup.procs").write_text(str(pid))
        with contextlib.suppress(OSError):
            group.rmdir()


def _fill_memory(directory: Path) -> None:
    """Read a long file of holes once: page cache of this process, as much as it may have."""
    with tempfile.TemporaryFile(dir=tempfile.gettempdir()) as file:
        file.truncate(4 << 30)
        limit = time.monotonic() + 20
        while file.read(16 << 20) and time.monotonic() < limit:
            pass


# -- the row ---------------------------------------------------------------------------------------


def _create(servers: str, topic: str, partitions: int) -> None:
    from kdirect.client import connect

    session = connect({"bootstrap.servers": servers, "request.timeout.ms": 120_000})
    session.admin.create_topic(topic, partitions)
    session.close()


def stall_figure(
    name: str,
    waited: list[float],
    quiet: list[float],
    loop: dict[str, Any],
    took_s: float,
    **settings: Any,
) -> Figure:
    return figure(
        f"stall.{name}",
        waited[0],
        "ms",
        f"bar: {BAR_MS:.0f} ms",
        BAR_MS,
        **settings,
        **loop,
        p99_ms=waited[1],
        pings=waited[2],
        quiet_ms=quiet[0],
        took_s=took_s,
        lower_is_better=True,
    )


def _measure(name: str, server: BrokerProcess, work: Any, **settings: Any) -> Figure:
    pinger = Pinger(server.servers)
    try:
        time.sleep(1)
        pinger.report()
        time.sleep(2)
        quiet = pinger.report()
        server.report()
        began = time.perf_counter()
        work()
        took = time.perf_counter() - began
        return stall_figure(name, pinger.report(), quiet, server.report(), took, **settings)
    finally:
        pinger.close()


def _directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(
        prefix="kdirect-bench-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None
    )


def _segment_bytes(directory: str, partitions: int) -> int:
    """The default, or what fits several times where every head is as long as that."""
    stat = os.statvfs(directory)
    return max(1 << 20, min(64 << 20, stat.f_bavail * stat.f_frsize // 4 // partitions & ~4095))


def stall(seconds: float, quick: bool) -> list[Figure]:
    """The longest wait of a client that pings while partitions get their first record."""
    rows: list[Figure] = []
    count = 50 if quick else PARTITIONS
    for name, write in (("tcp", first_records_tcp), ("rdma", first_records_rdma)):
        with _directory() as directory:
            size = _segment_bytes(directory, count)
            server = BrokerProcess(Path(directory), **{"log.segment.bytes": size})
            try:
                _create(server.servers, name, count)
                rows.append(
                    _measure(
                        name,
                        server,
                        lambda w=write, n=name, s=server: w(s.servers, n, count),
                        partitions=count,
                        segment_bytes=size,
                    )
                )
            finally:
                server.close()
    with _directory() as directory:
        count = 4 if quick else PRESSED_PARTITIONS
        server = BrokerProcess(Path(directory), **{"log.segment.bytes": 2 * PRESSED_BYTES})
        try:
            limit = (2 * count * PRESSED_BYTES * 2) + (256 << 20)
            with limited_memory(server.process.pid, limit) as limited:
                if limited:
                    server.report("fill")
                _create(server.servers, "pressed", count)
                rows.append(
                    _measure(
                        "pressed",
                        server,
                        lambda: first_records_rdma(server.servers, "pressed", count, PRESSED_BYTES),
                        partitions=count,
                        bytes_each=PRESSED_BYTES,
                        memory_limit=limit if limited else None,
                    )
                )
                server.close()
        finally:
            if server.process.poll() is None:
                server.close()
    return rows


if __name__ == "__main__":
    if sys.argv[1] == "broker":
        broker(sys.argv[2], json.loads(sys.argv[3]))
    else:
        ping(sys.argv[2])
