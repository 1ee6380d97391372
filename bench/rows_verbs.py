"""Bench row of real verbs: what the client adds to the bare READs of perftest over the same device.

The broker is a process of its own, and stopped (SIGSTOP) while it is read: nothing on its side can
copy or answer.  perftest and the client take turns, and each figure is the median of its rounds.
What was READ is counted: a row whose counts are not the expected ones fails.  Needs an RDMA device
with an IPv4 address, pyverbs and perftest.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from rows_direct import _cpu_seconds, broker_process
from sides import Figure

READ_BYTES = 64 << 10
BATCHES = 320  # 20 MiB, in one segment
SLOT_BYTES = 64
PORT = 18515
START_S = 20.0


def perftest(
    program: str, device: str, gid_index: int, address: str, options: Sequence[str]
) -> list[float]:
    """The numbers of the last line of the client's table; both ends run here, the data goes through
    the device."""
    command = [program, "-d", device, "-x", str(gid_index), "-F", "-p", str(PORT), *options]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            deadline = time.monotonic() + START_S
            while True:
                client = subprocess.run(
                    [*command, address], capture_output=True, text=True, timeout=120, check=False
                )
                if client.returncode == 0:
                    break
                if server.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{program} failed: {client.stdout}{client.stderr}")
                time.sleep(0.1)
            server.wait(30)
        finally:
            server.kill()
    table = [
        line.split()
        for line in client.stdout.splitlines()
        if line.strip() and line.strip()[0].isdigit()
    ]
    return [float(word) for word in table[-1]]


def stop(pid: int) -> None:
    """SIGSTOP; returns when every thread stands still."""
    os.kill(pid, signal.SIGSTOP)
    while {
        Path(task, "stat").read_text().rsplit(")", 1)[1].split()[0]
        for task in Path(f"/proc/{pid}/task").iterdir()
    } != {"T"}:
        time.sleep(0.001)


def verbs_read(seconds: float, quick: bool) -> list[Figure]:
    """Bandwidth of data READs at 64 KiB, the time of a slot READ, and how many READs a consumption
    took."""
    import kdirect
    from kdirect.format.codec import encode_records
    from kdirect.model import TopicPartition
    from kdirect.rdma import verbs_choice

    found = [
        (port, gid)
        for port in verbs_choice.devices()
        if port.active
        for gid in port.gids
        if gid.address.ipv4_mapped is not None
    ]
    if not found:
        raise RuntimeError(
            "no RDMA device with an IPv4 address; make bench-rdma measures in a guest with"
            " soft-RoCE"
        )
    port, gid = found[0]
    on = (port.device, gid.index, gid.ip)
    value = bytes(READ_BYTES)
    value = value[
        : READ_BYTES - (len(encode_records([(None, value, [], 1000)])) - READ_BYTES)
    ]  # a batch of one is READ_BYTES long
    total = BATCHES * READ_BYTES
    tp = TopicPartition("read", 0)
    properties = {
        "listeners": f"{gid.ip}:0",
        "rdma.transports": "verbs",
        "log.segment.bytes": 2 * total,
    }
    with broker_process(**properties) as (servers, pid):
        settings = {
            "bootstrap.servers": servers,
            "transport": "verbs",
            "fetch.min.read.bytes": READ_BYTES,
            "fetch.max.read.bytes": READ_BYTES,
        }
        session = kdirect.connect(settings)
        session.admin.create_topic(tp.topic, 1)
        with session.producer() as producer:
            for _ in range(BATCHES):
                producer.produce_sync(tp.topic, value, partition=0)
        consumer = kdirect.Consumer(settings, session=session)
        consumer.assign({tp: 0})
        consumer.poll(0)
        # The row measures READs, not what is made of their bytes.
        fetcher = next(iter(consumer._reading.paths.direct))
        broker_cpu_s = 0.0
        reads = 0

        def read_all() -> float:
            """MiB/s of one pass over the file."""
            nonlocal broker_cpu_s, reads
            fetcher.assign({tp: 0})
            stream = fetcher.stream(tp)
            if stream.limit != total:
                raise RuntimeError(
                    f"the file holds {stream.limit} bytes, not {BATCHES} batches of {READ_BYTES}"
                )
            stop(pid)
            try:
                reads_before, bytes_before, cpu_before = (
                    stream.reads,
                    stream.read_bytes,
                    _cpu_seconds(pid),
                )
                begin = time.perf_counter()
                while stream.unread:
                    stream.fill()
                    stream.consume(stream.buffered)
                took = time.perf_counter() - begin
                broker_cpu_s += _cpu_seconds(pid) - cpu_before
            finally:
                os.kill(pid, signal.SIGCONT)
            reads = stream.reads - reads_before
            if (reads, stream.read_bytes - bytes_before) != (BATCHES, total):
                raise RuntimeError(
                    f"{reads} READs of {stream.read_bytes - bytes_before} bytes where {BATCHES}"
                    f" of {total} were due"
                )
            return total / took / (1 << 20)

        def slot_us(count: int = 500) -> float:
            stop(pid)
            try:
                begin = time.perf_counter()
                fetcher._slots.poll(count)
                return (time.perf_counter() - begin) / count * 1e6
            finally:
                os.kill(pid, signal.SIGCONT)

        ours: list[float] = []
        theirs: list[float] = []
        slots: list[float] = []
        bare: list[float] = []
        end = time.monotonic() + seconds
        while not ours or (not quick and time.monotonic() < end):
            theirs.append(
                perftest("ib_read_bw", *on, ["-s", str(READ_BYTES), "-n", str(BATCHES)])[3]
            )
            ours.append(read_all())
            bare.append(perftest("ib_read_lat", *on, ["-s", str(SLOT_BYTES), "-n", "500"])[5])
            slots.append(slot_us())
        consumer.close()
        session.close()
    common = {"device": port.device, "gid_index": gid.index, "rounds": len(ours)}
    return [
        {
            "value": statistics.median(ours),
            "unit": "MiB/s",
            "against": "ib_read_bw",
            "against_value": statistics.median(theirs),
            "settings": {"what": "data READs", "bytes": READ_BYTES, **common},
        },
        {
            "value": statistics.median(slots),
            "unit": "us",
            "against": "ib_read_lat",
            "against_value": statistics.median(bare),
            "settings": {
                "what": "slot READ",
                "bytes": SLOT_BYTES,
                "lower_is_better": True,
                **common,
            },
        },
        {
            "value": reads,
            "unit": "READs",
            "against": "expected",
            "against_value": BATCHES,
            "settings": {"what": "one consumption", "bytes": total, **common},
        },
        {
            "value": broker_cpu_s,
            "unit": "s",
            "settings": {
                "what": "CPU of broker",
                "bytes": total * len(ours),
                "broker_stopped": True,
                **common,
            },
        },
    ]
