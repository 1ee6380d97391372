"""A job of the state engine with an executor on each of two hosts; see far.py.

The coordinator and executor 0 run here, executor 1 runs on the host of the broker, where `host.py`
starts it.  What comes out is compared with a plain computation over what a reader gets of the same
topics.
"""

from __future__ import annotations

import json
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa

import kdirect.state
from kdirect.format.fixed_layout import FixedLayout
from kdirect.model import TopicPartition
from kdirect.state import AggregatePlan, ExecutorSettings, Input, JoinPlan, Tumbling
from kdirect.state.launcher import ExecutorProcess, LocalLauncher

LAYOUT = FixedLayout.of("key:int64", "time:timestamp(ms)", "amount:int64")
SCHEMA = {"key": "int64", "time": "timestamp(ms)", "amount": "int64"}
SIZE_MS = 1000
FIRST_MS = 1_700_000_000_000
PARTITIONS = 2
HOST_PORT = 7078
START_S = 60.0


class FarProcess:
    """An executor on the other host: a connection to its `host.py`."""

    def __init__(self, host: str, settings: ExecutorSettings) -> None:
        self._executor = settings.executor
        self._socket = socket.create_connection((host, HOST_PORT), timeout=START_S)
        asked = {"executor": json.loads(settings.to_json())}
        self._socket.sendall(json.dumps(asked).encode() + b"\n")
        self._said = self._socket.makefile("rb")
        self.pid = int(self._said.readline())
        self._socket.setblocking(False)
        self._status: str | None = None

    @property
    def name(self) -> str:
        return f"executor {self._executor} (process {self.pid} of the other host)"

    def ended(self) -> str | None:
        if self._status is None:
            try:
                data = self._socket.recv(100)
            except BlockingIOError:
                return None
            self._status = data.decode().strip() or "unknown"
        return f"{self.name} ended with status {self._status}"

    def kill(self) -> None:
        self._socket.sendall(b"kill\n")

    def end(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self.ended() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        self._socket.close()


class TwoHosts:
    """A launcher: executor 0 here, all others on the other host."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._local = LocalLauncher()

    def start(self, settings: ExecutorSettings) -> ExecutorProcess:
        if settings.executor == 0:
            return self._local.start(settings)
        return FarProcess(self._host, settings)

    def forget(self, directory: str) -> None:
        """The other host loses what its executors had in memory."""
        with socket.create_connection((self._host, HOST_PORT), timeout=START_S) as sock:
            sock.sendall(json.dumps({"forget": directory}).encode() + b"\n")
            sock.makefile("rb").readline()


def events(seed: int, records: int, keys: int) -> np.ndarray:
    """Rows in order of time, the same for the same seed."""
    random = np.random.default_rng(seed)
    rows = np.zeros(records, LAYOUT.dtype())
    rows["key"] = random.integers(0, keys, records)
    rows["time"] = FIRST_MS + np.arange(records)
    rows["amount"] = random.integers(-1000, 1000, records)
    return rows


def write(session: Any, topic: str, rows: np.ndarray) -> None:
    """A new topic with these rows, dealt to its partitions one by one."""
    session.admin.create_topic(topic, PARTITIONS)
    with session.producer() as producer:
        for partition in range(PARTITIONS):
            own = np.ascontiguousarray(rows[partition::PARTITIONS])
            where = pa.array(np.full(len(own), partition, np.int32))
            batch = pa.record_batch({"value": LAYOUT.values(own), "partition": where})
            producer.send_arrow(batch, topic)
        producer.flush()


def _read(session: Any, topic: str) -> tuple[np.ndarray, int]:
    """All rows of a topic, and the time that all its partitions have reached."""
    found = []
    for partition in range(PARTITIONS):
        tp = TopicPartition(topic, partition)
        with session.reader(tp, 0, session.latest_offsets([tp])[tp]) as reader:
            values = [v for batch in reader for v in batch.column("value").to_pylist()]
        found.append(np.frombuffer(b"".join(values), LAYOUT.dtype()))
    return np.concatenate(found), min(int(rows["time"].max()) for rows in found)


def totals(rows: np.ndarray, closes_ms: int) -> Counter[tuple[int, ...]]:
    """Key, start, count and sum of each key and second that has ended by then."""
    found: dict[tuple[int, int], list[int]] = defaultdict(lambda: [0, 0])
    for row in rows:
        if (start := _start_ms(row)) + SIZE_MS <= closes_ms:
            cell = found[int(row["key"]), start]
            cell[0] += 1
            cell[1] += int(row["amount"])
    return Counter((*key, *cell) for key, cell in found.items())


def _start_ms(row: Any) -> int:
    return int(row["time"]) - int(row["time"]) % SIZE_MS


def _milliseconds(column: Any) -> list[int]:
    return [value // 1000 for value in column.cast(pa.int64()).to_pylist()]


def _input(topic: str) -> Input:
    return Input(topic=topic, schema=SCHEMA, value_format="fixed", layout=LAYOUT, time="time")


class Aggregate:
    """Count and sum by key and second."""

    topics = ("clicks",)
    records, keys = 24_000, 50

    plan = AggregatePlan(
        input=_input("clicks"),
        keys=("key",),
        window=Tumbling(size_us=SIZE_MS * 1000),
        aggregates=("count", ("sum", "amount", "total")),
    )

    @staticmethod
    def expected(session: Any) -> Counter[tuple[int, ...]]:
        return totals(*_read(session, "clicks"))

    @staticmethod
    def rows(table: pa.Table) -> Iterable[tuple[int, ...]]:
        starts = _milliseconds(table.column("window_start"))
        columns = (table.column(name).to_pylist() for name in ("key", "count", "total"))
        for start, key, count, total in zip(starts, *columns, strict=True):
            yield key, start, count, int(total)


class Join:
    """Sales and purchases of the same key in the same second."""

    topics = ("sales", "purchases")
    records, keys = 3000, 800

    plan = JoinPlan(
        left=_input("sales"),
        right=_input("purchases"),
        left_keys=("key",),
        right_keys=("key",),
        window=Tumbling(size_us=SIZE_MS * 1000),
        columns=((0, "key", "key"), (0, "amount", "sold"), (1, "amount", "bought")),
    )

    @staticmethod
    def expected(session: Any) -> Counter[tuple[int, ...]]:
        (left, left_closes), (right, right_closes) = (_read(session, t) for t in Join.topics)
        closes = min(left_closes, right_closes)
        waiting = defaultdict(list)
        for row in right:
            waiting[int(row["key"]), _start_ms(row)].append(int(row["amount"]))
        return Counter(
            (int(row["key"]), int(row["amount"]), amount)
            for row in left
            if (start := _start_ms(row)) + SIZE_MS <= closes
            for amount in waiting[int(row["key"]), start]
        )

    @staticmethod
    def rows(table: pa.Table) -> Iterable[tuple[int, ...]]:
        columns = (table.column(name).to_pylist() for name in ("key", "sold", "bought"))
        yield from zip(*columns, strict=True)


KINDS = {"aggregate": Aggregate, "join": Join}


def run_job(session: Any, servers: str, here: str, kind: str, say: Any) -> dict[str, Any]:
    """Run a job of this kind.  The far executor of the aggregate is killed twice: once its state
    stays where it is mapped, once that is lost too."""
    job_kind = KINDS[kind]
    for seed, topic in enumerate(job_kind.topics):
        write(session, topic, events(seed, job_kind.records, job_kind.keys))
    host = servers.partition(":")[0]
    launcher = TwoHosts(host)
    found: Counter[tuple[int, ...]] = Counter()
    batches: list[int] = []
    far_had_state: list[bool] = []
    with kdirect.state.run(
        job_kind.plan,
        servers,
        executors=2,
        until="latest",
        launcher=launcher,
        exchange="rdma",
        provider="verbs",
        listen_address="0.0.0.0",
        advertised_address=here,
        batch_records=job_kind.records // 4,
        epoch_bytes=40_000,
        snapshot_interval=0,
        slot_bytes=16384,
    ) as job:
        for number, table in job:
            say("log batch", number, table.num_rows, "attempt", job.server.attempt)
            batches.append(number)
            far_had_state.append(job.server._job.hellos[1].header is not None)
            found.update(job_kind.rows(table))
            if kind == "aggregate" and number in (0, 2):
                far = job.processes[1]
                assert isinstance(far, FarProcess)
                far.kill()
                while far.ended() is None:
                    time.sleep(0.05)
                if number == 2:
                    launcher.forget(str(job.memory))
        statistics = {name: n for name, n in job.statistics().items() if n}
        exchange = job.exchange
    expected = job_kind.expected(session)
    return {
        "batches": batches,
        "far_had_state": far_had_state,
        "exchange": exchange,
        "rows": found.total(),
        "missing": list((expected - found).items())[:5],
        "wrong": list((found - expected).items())[:5],
        "statistics": statistics,
    }
