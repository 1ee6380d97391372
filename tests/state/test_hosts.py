"""Executors that are started elsewhere, that hang, and strangers on the ports of a job: real
processes on the addresses of one host.  Two hosts are in tests/guest."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import kdirect
from kdirect.client.session import Session
from kdirect.errors import (
    ConfigError,
    TimedOutError,
)
from kdirect.model import TopicPartition
from kdirect.state import ExecutorSettings, messages
from kdirect.state.control import ControlConnection, connect
from kdirect.state.launcher import LocalLauncher, LocalProcess
from kdirect.state.stream_job import run
from tests.state import jobs
from tests.support import wait_until

RECORDS = 20_000
SMALL: dict[str, Any] = {
    "executors": 2,
    "batch_records": 5000,
    "epoch_bytes": 20_000,
    "block_rows": 500,
    "slot_bytes": 4096,
    "snapshot_interval": 0,
}
HANG_S = 2  # the first block of a process takes up to a second on a busy machine
PROGRAM = str(Path(__file__).with_name("far_executor.py"))


@pytest.fixture
def session(broker: Any) -> Iterator[Session]:
    with kdirect.connect(broker.bootstrap_servers) as made:
        yield made


def launcher_of(how: str) -> LocalLauncher:
    return LocalLauncher((sys.executable, PROGRAM, how))


class Noting(LocalLauncher):
    """Notes the settings of what it starts."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[ExecutorSettings] = []

    def start(self, settings: ExecutorSettings) -> LocalProcess:
        self.started.append(settings)
        return super().start(settings)


def far_and_near(how: str = "far", **of_executor_1: Any) -> Any:
    """A launcher whose executor 1 does not see the directory of the job and has other settings."""

    class Launcher:
        def start(self, settings: ExecutorSettings) -> LocalProcess:
            if settings.executor == 0:
                return LocalLauncher().start(settings)
            return launcher_of(how).start(replace(settings, **of_executor_1))

    return Launcher()


def kill(process: LocalProcess) -> None:
    os.kill(process.pid, signal.SIGKILL)
    wait_until(process.ended)


# -- another host ----------------------------------------------------------------------------------


def test_executors_reach_an_address_that_is_not_the_one_listened_on(
    broker: Any, session: Session, seed: int
) -> None:
    jobs.write(session, jobs.events(seed, RECORDS), 2)
    launcher = Noting()
    with run(
        jobs.plan(),
        broker.bootstrap_servers,
        until="latest",
        launcher=launcher,
        exchange="tcp",
        listen_address="0.0.0.0",
        advertised_address="127.0.0.2",
        **SMALL,
    ) as job:
        tables = [table for _, table in job]
        assert job.exchange == "tcp"
    assert {settings.host for settings in launcher.started} == {"127.0.0.2"}
    jobs.assert_same(jobs.rows_of(tables), jobs.expected(session))


def test_an_address_of_another_host_cannot_be_listened_on(broker: Any, session: Session) -> None:
    session.admin.create_topic(jobs.TOPIC, 1)
    with pytest.raises(ConfigError, match=r"listen_address=192\.0\.2\.1: .*advertised_address"):
        run(jobs.plan(), broker.bootstrap_servers, listen_address="192.0.2.1")


def test_shared_memory_between_hosts_is_refused(broker: Any, session: Session) -> None:
    """Executors found it out, one after the other, and joined again until all starts were used."""
    session.admin.create_topic(jobs.TOPIC, 1)
    launcher = far_and_near("elsewhere")
    with (
        run(jobs.plan(), broker.bootstrap_servers, launcher=launcher, executors=2) as job,
        pytest.raises(
            ConfigError, match=r"provider=shm .*: executors 0 on 127.*, 1 on 127"
        ) as said,
    ):
        next(job)
    assert "provider=verbs" in said.value.hint and "exchange=tcp" in said.value.hint


def test_parts_of_a_snapshot_travel_to_a_host_without_the_directory(
    broker: Any, session: Session, seed: int, tmp_path: Path
) -> None:
    """Executor 1 loses its state after the first batches have left the topic: only the part of the
    snapshot, which is in the directory of the coordinator, can bring it back."""
    jobs.write(session, jobs.events(seed, RECORDS), 2)
    wanted = jobs.expected(session)
    memory = tmp_path / "memory"
    tables = []
    with run(
        jobs.plan(),
        broker.bootstrap_servers,
        until="latest",
        directory=tmp_path / "job",
        launcher=far_and_near(memory=str(memory)),
        **SMALL,
    ) as job:
        for number, table in job:
            tables.append(table)
            if number == 2:
                restored = job.statistics()["restores"]
                upto = 2 * SMALL["batch_records"] // 2
                parts_read = (TopicPartition(jobs.TOPIC, partition) for partition in range(2))
                session.admin.delete_records(dict.fromkeys(parts_read, upto))
                kill(job.processes[1])  # type: ignore[arg-type]
                (memory / "state-1").unlink()
        assert job.statistics()["restores"] == restored + 1
        parts = sorted(path.name for path in job.directory.glob("snapshots/*/part*"))
        assert {name[-1] for name in parts} == {"0", "1"}
    jobs.assert_same(jobs.rows_of(tables), wanted)


def test_a_part_that_takes_long_to_send_is_not_mixed_with_what_an_executor_says(
    broker: Any, session: Session, seed: int, tmp_path: Path
) -> None:
    """An executor said between two frames of its part that it goes on, which was taken for a frame:
    the connection broke at each snapshot of more than a frame that took a second to send."""
    jobs.write(session, jobs.events(seed, RECORDS), 2)
    with run(
        jobs.plan(),
        broker.bootstrap_servers,
        until="latest",
        directory=tmp_path / "job",
        launcher=launcher_of("far-busy"),
        **SMALL,
    ) as job:
        tables = [table for _, table in job]
        assert job.server.attempt == 1
    assert max(part.stat().st_size for part in job.directory.glob("snapshots/*/part*")) > 1000
    jobs.assert_same(jobs.rows_of(tables), jobs.expected(session))


@pytest.mark.parametrize("how", ["ended", "temporary"])
def test_state_on_another_host_goes_with_a_job_that_cannot_come_back(
    broker: Any, session: Session, seed: int, tmp_path: Path, how: str
) -> None:
    """A job that ended in good order has all in its snapshot; a temporary one never comes back."""
    jobs.write(session, jobs.events(seed, RECORDS), 2)
    memory = tmp_path / "memory"
    directory = tmp_path / "job" if how == "ended" else None
    with run(
        jobs.plan(), broker.bootstrap_servers, until="latest", directory=directory,
        launcher=far_and_near(memory=str(memory)), **SMALL,
    ) as job:  # fmt: skip
        next(job)
        assert {"job.json", "state-1"} <= set(os.listdir(memory))
        if how == "ended":
            assert len(list(job)) > 1
        else:
            job.close(stop=False)
    assert not memory.exists()


def test_settings_come_by_the_environment_or_standard_input() -> None:
    command = [sys.executable, "-m", "kdirect.state.executor"]
    settings = ExecutorSettings(
        host="127.0.0.1", port=9, token="t", executor=0, executors=1, memory="/nonexistent/x"
    )
    for variable, line, status, said in (
        (None, "no json", 2, "the settings of an executor cannot be read"),
        ("{}", "", 2, "KDIRECT_EXECUTOR"),
        (replace(settings, memory="/dev/shm/kdirect-test-unused").to_json(), "", 3, "127.0.0.1:9"),
    ):
        environment = dict(os.environ) | ({"KDIRECT_EXECUTOR": variable} if variable else {})
        ended = subprocess.run(
            command, input=line, env=environment, capture_output=True, text=True, check=False
        )
        assert ended.returncode == status, ended.stderr
        assert said in ended.stderr
        assert "Traceback" not in ended.stderr


# -- hangs -----------------------------------------------------------------------------------------


class Unreachable:
    """A launcher that cannot end what it has started, as of a host that does not answer.  Each
    process maps a memory of its own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.processes: list[LocalProcess] = []

    def start(self, settings: ExecutorSettings) -> Any:
        memory = self._directory / str(len(self.processes))
        made = launcher_of("far").start(replace(settings, memory=str(memory)))
        self.processes.append(made)
        return _NeverEnds(made)


class _NeverEnds:
    def __init__(self, process: LocalProcess) -> None:
        self.name = process.name
        self.pid = process.pid
        self.ended = process.ended

    def end(self, timeout_s: float) -> None:
        """The host does not answer."""


@pytest.mark.parametrize("exchange", ["rdma", "tcp"])
def test_one_that_is_stopped_is_replaced_and_changes_nothing_when_it_goes_on(
    broker: Any,
    session: Session,
    seed: int,
    tmp_path: Path,
    exchange: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    jobs.write(session, jobs.events(seed, RECORDS), 2)
    launcher = Unreachable(tmp_path)
    tables: list[pa.Table] = []
    try:
        with run(
            jobs.plan(),
            broker.bootstrap_servers,
            until="latest",
            launcher=launcher,
            exchange=exchange,
            stall_timeout=HANG_S * 1000,
            **SMALL,
        ) as job:
            for number, table in job:
                tables.append(table)
                if number == 0:
                    stopped = launcher.processes[1]
                    os.kill(stopped.pid, signal.SIGSTOP)
                    began = time.monotonic()
                elif number == 1:
                    assert time.monotonic() - began > HANG_S
                    assert job.processes[1].name != stopped.name
                    caplog.clear()
                    os.kill(stopped.pid, signal.SIGCONT)
                    # It comes once more, is told to stop, and leaves.
                    attempt = job.server.attempt
            # On a busy machine another one may have been held to hang.
            hung = caplog.text.count(" hangs: ")
            assert attempt <= job.server.attempt <= attempt + hung
            wait_until(stopped.ended)
            assert "status 3" in (stopped.ended() or "")
    finally:
        for process in launcher.processes:
            process.end(5)
    assert len(tables) > 3
    jobs.assert_same(jobs.rows_of(tables), jobs.expected(session))


def test_one_that_is_stopped_while_the_job_gathers_is_replaced(
    broker: Any, session: Session, seed: int
) -> None:
    """It was waited for until start_timeout had passed, and that ended the job."""
    jobs.write(session, jobs.events(seed, RECORDS), 2)
    tables: list[pa.Table] = []
    with run(
        jobs.plan(),
        broker.bootstrap_servers,
        until="latest",
        stall_timeout=HANG_S * 1000,
        start_timeout=30 * HANG_S * 1000,
        **SMALL,
    ) as job:
        for number, table in job:
            tables.append(table)
            if number == 0:
                killed, stopped = (job.processes[i].pid for i in (0, 1))
                os.kill(stopped, signal.SIGSTOP)
                os.kill(killed, signal.SIGKILL)
        pids = {process.pid for process in job.processes.values()}
        assert not pids & {killed, stopped}
    jobs.assert_same(jobs.rows_of(tables), jobs.expected(session))


def test_one_that_never_comes_ends_the_job_by_name(broker: Any, session: Session) -> None:
    session.admin.create_topic(jobs.TOPIC, 1)

    class Sleeping(LocalLauncher):
        def start(self, settings: ExecutorSettings) -> LocalProcess:
            # The first one that is missed is named, and executor 1 may need longer than the limit.
            far = (sys.executable, PROGRAM, "far")
            return LocalProcess(settings, far if settings.executor else ("sleep", "100"))

    with run(
        jobs.plan(), broker.bootstrap_servers, launcher=Sleeping(), start_timeout=4000, executors=2
    ) as job:
        with pytest.raises(
            TimedOutError, match=r"executor 0 \(process \d+\) did not come within 4 s"
        ):
            next(job)
        job.processes[0].end(0)


def test_a_batch_that_is_longer_than_the_limit_is_no_hang(
    broker: Any, session: Session, seed: int
) -> None:
    jobs.write(session, jobs.events(seed, RECORDS), 2)
    began = time.monotonic()
    with run(
        jobs.plan(),
        broker.bootstrap_servers,
        until="latest",
        launcher=launcher_of("slow"),
        stall_timeout=HANG_S * 1000,
        **{**SMALL, "batch_records": None, "block_rows": 250},
    ) as job:
        tables = [table for _, table in job]  # if it were one, each attempt would meet it
    assert len(tables) == 1
    assert time.monotonic() - began > 1.5 * HANG_S
    jobs.assert_same(jobs.rows_of(tables), jobs.expected(session))


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_a_stop_waits_for_a_part_that_takes_longer_than_the_limit(
    broker: Any, session: Session, seed: int, tmp_path: Path
) -> None:
    """The thread that writes it gets on, and the one that says so waits for nothing else."""
    jobs.write(session, jobs.events(seed, RECORDS), 2)
    with run(
        jobs.plan(),
        broker.bootstrap_servers,
        directory=tmp_path / "job",
        until="latest",
        launcher=launcher_of("slow-part"),
        stall_timeout=HANG_S * 1000,
        executors=1,
    ) as job:
        next(job)
        began = time.monotonic()
        assert list(job) == []  # commits, and the job ends with a snapshot
        assert time.monotonic() - began > 1.25 * HANG_S
    assert len(list((tmp_path / "job" / "snapshots").glob("*/manifest.json"))) == 1


def test_a_check_of_a_part_that_takes_longer_than_the_limit_is_no_hang(
    broker: Any, session: Session, seed: int, tmp_path: Path
) -> None:
    """The part of a full state, on a slow disk: its executor was ended again and again."""
    rows = jobs.events(seed, RECORDS)
    tables: list[pa.Table] = []
    settings: dict[str, Any] = {"directory": tmp_path / "job", "until": "latest"}
    for executors, how, piece in zip((2, 1), ("", "slow-check"), np.array_split(rows, 2)):
        jobs.write(session, piece, 2)
        began = time.monotonic()
        with run(
            jobs.plan(),
            broker.bootstrap_servers,
            executors=executors,
            launcher=launcher_of(how),
            stall_timeout=HANG_S * 1000,
            **settings,
        ) as job:
            tables += [table for _, table in job]
            assert job.statistics()["restores"] >= 1
    assert time.monotonic() - began > 1.25 * HANG_S
    jobs.assert_same(jobs.rows_of(tables), jobs.expected(session))


def test_executors_that_have_nothing_to_do_cost_nothing(
    broker: Any, session: Session, seed: int
) -> None:
    jobs.write(session, jobs.events(seed, 1000), 2)
    with run(jobs.plan(), broker.bootstrap_servers, executors=2) as job:
        next(job)
        processes: Any = job.processes.values()
        pids = [process.pid for process in processes]
        asked = threading.Thread(target=lambda: next(job, None))
        asked.start()  # waits for records
        time.sleep(0.3)
        before = [cpu_ticks(pid) for pid in pids]
        time.sleep(1)
        used = [cpu_ticks(pid) - ticks for pid, ticks in zip(pids, before, strict=True)]
        jobs.write(session, jobs.events(seed, 100, start_ms=jobs.FIRST_MS + 5000), 2)
        asked.join(20)
        assert not asked.is_alive()
        assert job.server.attempt == 1
    assert max(used) <= 2 * os.sysconf("SC_CLK_TCK") // 100, used


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def switches(pid: int) -> int:
    """How often its threads have gone to sleep by themselves."""
    found = [
        int(line.split()[1])
        for task in Path(f"/proc/{pid}/task").iterdir()
        for line in (task / "status").read_text().splitlines()
        if line.startswith("voluntary_ctxt_switches")
    ]
    return sum(found)


# More than the sockets of a host hold, in epochs that fit into the buffers of a sender: it has
# given all of an epoch to the channel, and waits for the kernel to take it.
BEYOND_SOCKETS = {"mode": "uppar", "epoch_bytes": 200_000, "block_rows": 2000, "slot_bytes": 65_536}


@pytest.mark.parametrize(
    ("records", "step", "options"),
    [
        (RECORDS, "read", {"exchange": "rdma"}),
        (RECORDS, "merge", {"exchange": "rdma"}),
        (RECORDS, "merge", {"exchange": "tcp"}),
        (40 * RECORDS, "merge", {"exchange": "tcp", **BEYOND_SOCKETS}),
    ],
    ids=["rdma-read", "rdma-merge", "tcp-merge", "tcp-full"],
)
def test_an_executor_that_waits_in_the_midst_of_a_batch_costs_nothing(
    broker: Any,
    session: Session,
    seed: int,
    tmp_path: Path,
    records: int,
    step: str,
    options: dict[str, Any],
) -> None:
    """The other one stops itself, and the channel to it becomes full."""
    jobs.write(session, jobs.events(seed, records), 2)
    mark = tmp_path / "stopped"
    tables: list[pa.Table] = []
    with run(
        jobs.plan(),
        broker.bootstrap_servers,
        until="latest",
        launcher=jobs.killing(step, 2, mark, "self/SIGSTOP"),
        **{**SMALL, "batch_records": None, "adaptive_ratio": 0.0, **options},
    ) as job:
        asked = threading.Thread(target=lambda: tables.extend(table for _, table in job))
        asked.start()
        wait_until(mark.exists)
        processes: Any = job.processes.values()
        pids = [process.pid for process in processes]
        (stopped,) = wait_until(lambda: [pid for pid in pids if is_stopped(pid)])
        try:
            (waits,) = set(pids) - {stopped}

            def is_quiet() -> bool:
                """For a second."""
                before = cpu_ticks(waits), switches(waits)
                time.sleep(1)
                return (
                    cpu_ticks(waits) - before[0] <= os.sysconf("SC_CLK_TCK") // 100
                    and switches(waits) - before[1] <= 20
                )

            # It still has work to do at first.  One that spins never comes to this.
            wait_until(is_quiet, "a second in which it does nothing")
            assert asked.is_alive()
        finally:
            os.kill(stopped, signal.SIGCONT)
            asked.join(60)
        assert not asked.is_alive()
        assert job.server.attempt == 1
    jobs.assert_same(jobs.rows_of(tables), jobs.expected(session))


# -- strangers -------------------------------------------------------------------------------------


class Strangers(threading.Thread):
    """Speak to the port of a job in all the ways in which an executor does not."""

    def __init__(self, settings: ExecutorSettings) -> None:
        super().__init__(daemon=True)
        self._address = (settings.host, settings.port)
        self._token = settings.token
        self._sockets: list[socket.socket] = []
        self._connections: list[ControlConnection] = []
        self.ended = threading.Event()

    def _raw(self, data: bytes) -> None:
        sock = socket.create_connection(self._address, timeout=10)
        sock.sendall(data)
        self._sockets.append(sock)

    def _known(self, *frames: bytes) -> None:
        made = connect(*self._address, self._token)
        made.put(*frames)
        self._connections.append(made)

    def run(self) -> None:
        for _ in range(100):
            self._raw(b"")
        self._raw(struct.pack(">I", 0xFFFFFFFF) + b"x" * 100_000)
        self._raw(b"GET / HTTP/1.1\r\n\r\n")
        self._raw(struct.pack(">I", 32) + b"0" * 32)
        self._raw(struct.pack(">I", 1000) + b"[" * 10)
        bomb = {"type": "hello", "executor": 0, "address": {}}
        hello = messages.encode(
            messages.Hello(
                executor=9, token="", process_id=1, host="h", address={}, header=None, start=9
            )
        )
        self._known(b"[" * 100_000)
        self._known(b'{"a":' * 50_000)
        self._known(json.dumps(bomb | {"token": "x" * (2 << 20)}).encode())
        self._known(b"\xff\xfe" * 50)
        self._known(hello)
        self._known(messages.encode(messages.Stop(attempt=1)))
        self._known()
        self.ended.set()

    def close(self) -> None:
        self.join(20)
        for end in (*self._sockets, *self._connections):
            end.close()


def test_strangers_stop_nobody(
    broker: Any, session: Session, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    jobs.write(session, jobs.events(seed, RECORDS), 2)
    tables = []
    launcher = Noting()
    with run(
        jobs.plan(), broker.bootstrap_servers, until="latest", launcher=launcher, **SMALL
    ) as job:
        for number, table in job:
            tables.append(table)
            if number == 0:
                strangers = Strangers(launcher.started[0])
                strangers.start()
            if number == 1:
                assert strangers.ended.wait(20)
        assert job.server.attempt == 1
        strangers.close()
    jobs.assert_same(jobs.rows_of(tables), jobs.expected(session))
    assert "executor 9 of a job of 2" in caplog.text
    assert "message stop: this side does not send it" in caplog.text
    assert "too many others came after it" in caplog.text
    assert "these bytes are not JSON" in caplog.text
