"""Whole jobs and what happens around them: brokers that go, topics that change, interruptions, file
systems that are full, forks.  What comes out in the end is what DuckDB makes of the topic, and
nothing is left behind.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import kdirect
from kdirect.client.session import Session
from kdirect.errors import BrokerUnavailableError, DataLossError, StateDirectoryError, StateError
from kdirect.format.batch import crc32c
from kdirect.model import TopicPartition
from kdirect.state import layout as at
from kdirect.state.stream_job import StateJob, run
from tests.state import jobs
from tests.support import BrokerProcess, wait_until

RECORDS = 12_000
SMALL: dict[str, Any] = {"executors": 2, "batch_records": 4000, "block_rows": 500}
PROGRAM = Path(__file__).with_name("job_program.py")
LIMIT_S = 60


@pytest.fixture
def session(broker: Any) -> Iterator[Session]:
    with kdirect.connect(broker.bootstrap_servers) as made:
        yield made


def until_end(bootstrap: str, **settings: Any) -> list[pa.Table]:
    """The rest of the output of a job."""
    with run(jobs.plan(), bootstrap, until="latest", **{**SMALL, **settings}) as job:
        return [table for _, table in job]


def executors_of(memory: Path) -> list[int]:
    """The processes that have mapped state there."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(memory) in (process / "maps").read_text():
                found.append(int(process.name))
    return found


# -- memory ----------------------------------------------------------------------------------------


def test_mapped_state_goes_with_a_job_that_stops_in_good_order(
    broker: Any, session: Session, seed: int, tmp_path: Path
) -> None:
    jobs.write(session, jobs.events(seed, RECORDS), 2)
    root = tmp_path / "memory"
    settings: dict[str, Any] = {"directory": tmp_path / "job", "state_memory": str(root)}
    with run(jobs.plan(), broker.bootstrap_servers, **SMALL, **settings) as job:
        tables = [next(job)[1]]
        memory = job.memory
        assert {"job.json", "lock", "state-0", "state-1"} <= set(os.listdir(memory))
        assert json.loads((memory / "job.json").read_text())["directory"] == str(tmp_path / "job")
    # The output of the first batch was not committed: it comes again, from what is kept.
    assert (memory / "output-0.arrow").exists()
    tables = until_end(broker.bootstrap_servers, **settings)
    assert os.listdir(root) == []
    jobs.write(session, jobs.events(seed + 1, RECORDS, start_ms=jobs.FIRST_MS + 1200), 2)
    tables += until_end(broker.bootstrap_servers, **settings)
    assert os.listdir(root) == []
    jobs.assert_same(jobs.rows_of(tables), jobs.expected(session))


def after_the_host_went(path: Path) -> None:
    """A state file on a disk as a host may leave it that went: of what was never synced, the header
    and the catalogue are there, and the tables are not."""
    head, blank = at.STATE_HEADER_BYTES, bytes(4)
    with open(path, "r+b") as file:
        body = bytearray(file.read(at.STATE_END)[at.STATE_AT_PLAN_HASH :])
        numbers = [body[a - at.STATE_AT_PLAN_HASH :][:8] for a in (
            at.STATE_AT_CATALOGUE, at.STATE_AT_CATALOGUE_BYTES, at.STATE_AT_TOP)]  # fmt: skip
        catalogue, length, top = (int.from_bytes(number, "little") for number in numbers)
        file.seek(catalogue)
        text = file.read(length)
        file.seek(head)
        file.write(bytes(top - head))
        file.seek(catalogue)
        file.write(text)
        body[-4:] = blank if body[-4:] != blank else b"host"  # of another start
        file.seek(at.STATE_AT_CRC)
        file.write(crc32c(body).to_bytes(4, "little") + body)


def test_mapped_state_that_outlives_its_host_is_not_used(
    broker: Any, session: Session, seed: int, tmp_path: Path
) -> None:
    jobs.write(session, jobs.events(seed, RECORDS), 2)
    settings: dict[str, Any] = {
        "directory": tmp_path / "job", "state_memory": str(tmp_path / "disk")
    }  # fmt: skip
    job = run(jobs.plan(), broker.bootstrap_servers, **SMALL, **settings)
    outputs = dict(next(job) for _ in range(2))
    memory = job.memory
    job.close(stop=False)
    for path in memory.glob("state-*"):
        after_the_host_went(path)
    with run(jobs.plan(), broker.bootstrap_servers, until="latest", **SMALL, **settings) as job:
        outputs |= dict(job)
    jobs.assert_same(jobs.rows_of(outputs.values()), jobs.expected(session))


def test_executors_do_not_import_pandas(broker: Any, session: Session, seed: int) -> None:
    """pyarrow did at the first block of each process, for a third of a second."""
    jobs.write(session, jobs.events(seed, RECORDS), 2)
    with run(jobs.plan(), broker.bootstrap_servers, **SMALL) as job:
        next(job)
        for process in job.processes.values():
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            assert "pyarrow" in maps and "pandas" not in maps


@pytest.mark.parametrize("everybody", [True, False])
def test_what_a_killed_job_left_is_removed(
    broker: Any, session: Session, seed: int, tmp_path: Path, everybody: bool
) -> None:
    """A temporary job, whose directory goes too.  Where all its processes were killed, the next job
    does it, else the last executor, when it finds the coordinator gone."""
    jobs.write(session, jobs.events(seed, RECORDS), 2)
    code = (
        "import sys; from kdirect.state.stream_job import run; from tests.state import jobs\n"
        "job = run(jobs.plan(), sys.argv[1], executors=2, state_memory=sys.argv[2])\n"
        "next(job); print(job.directory, flush=True); sys.stdin.read()"
    )
    root = Path(__file__).parents[2]
    first = subprocess.Popen(
        [sys.executable, "-c", code, broker.bootstrap_servers, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert first.stdout is not None
    directory = Path(first.stdout.readline().strip())
    (left,) = tmp_path.iterdir()
    with run(jobs.plan(), broker.bootstrap_servers, executors=1, state_memory=str(tmp_path)):
        assert (left / "state-0").exists()  # its processes live
    executors = executors_of(left)
    for pid in executors if everybody else ():
        os.kill(pid, signal.SIGSTOP)  # they shall not notice
    first.kill()
    for pid in executors if everybody else ():
        os.kill(pid, signal.SIGKILL)
    first.communicate()
    wait_until(lambda: not executors_of(left), "the executors ended", LIMIT_S)
    if everybody:
        assert directory.exists()
    else:
        wait_until(lambda: not left.exists(), "the last executor removed it", LIMIT_S)
    with run(jobs.plan(), broker.bootstrap_servers, executors=1, state_memory=str(tmp_path)):
        assert not left.exists()
        assert not directory.exists()


def test_nothing_grows_over_batches_and_restarts(
    broker: Any, session: Session, seed: int, tmp_path: Path
) -> None:
    """50 batches and two starts of the job; in each, executor 0 joins three times again because
    executor 1 was killed.  Files, threads and names of the coordinator and of executor 0."""
    jobs.write(session, jobs.events(seed, 20_000), 2)
    settings: dict[str, Any] = {
        "directory": tmp_path / "job",
        "state_memory": str(tmp_path / "memory"),
        "batch_records": 300,
        "snapshot_interval": 50,
    }

    def held(job: StateJob) -> list[int]:
        pids = [os.getpid(), job.processes[0].pid]  # type: ignore[attr-defined]
        return [
            *(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids),
            *(len(os.listdir(f"/proc/{pid}/task")) for pid in pids),
            *(Path(f"/proc/{pid}/maps").read_text().count("kdirect") for pid in pids),
            *(len(os.listdir(path)) for path in (job.memory, job.directory, job.memory.parent)),
        ]

    seen: list[list[list[int]]] = []
    for _ in range(2):
        with run(jobs.plan(), broker.bootstrap_servers, **{**SMALL, **settings}) as job:
            seen.append([])
            first = job.processes.get(0)
            for turn in range(4):
                numbers = [next(job)[0] for _ in range(6 + turn % 2)]
                seen[-1].append(held(job))
                if turn < 3:
                    first = job.processes[0]
                    job.processes[1].end(0)
            assert job.processes[0] is first
    assert numbers[-1] >= 50
    for before in (seen[0][0], seen[1][0]):
        # A snapshot that is being replaced, a connection that is coming or going.
        assert all(b <= a + 2 for a, b in zip(before, seen[1][-1], strict=True)), seen


# -- brokers and topics ----------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_broker_that_dies_within_a_batch(
    broker_process: Callable[..., BrokerProcess], seed: int, tmp_path: Path, transport: str
) -> None:
    """It is away for longer than a client tries to connect.  An executor that has not read anything
    over TCP yet needs it; one that has mapped its segments goes on without it for a while."""
    broker = broker_process()
    mark = tmp_path / "killed"
    launcher = jobs.killing("read", 1 if transport == "tcp" else 3, mark, str(broker.pid))

    def start_again() -> None:
        wait_until(mark.exists, "the broker was killed", LIMIT_S)
        time.sleep(4)
        broker.kill()
        broker.start()

    again = threading.Thread(target=start_again)
    again.start()
    source = {
        "bootstrap.servers": broker.bootstrap_servers,
        "connect.timeout.ms": 2000,
        "transport": transport,
    }
    with kdirect.connect(broker.bootstrap_servers) as session:
        jobs.write(session, jobs.events(seed, RECORDS), 2)
        with run(jobs.plan(), source, until="latest", launcher=launcher, **SMALL) as job:
            tables = [table for _, table in job]
            assert transport == "auto" or job.statistics()["attempts"] > 1
        again.join()
        jobs.assert_same(jobs.rows_of(tables), jobs.expected(session))


def test_a_broker_that_stays_away_ends_the_job(
    broker_process: Callable[..., BrokerProcess], seed: int
) -> None:
    broker = broker_process()
    source = {"bootstrap.servers": broker.bootstrap_servers, "connect.timeout.ms": 2000}
    with kdirect.connect(broker.bootstrap_servers) as session:
        jobs.write(session, jobs.events(seed, 1000), 1)
    with run(jobs.plan(), source, executors=1, broker_timeout=500) as job:
        next(job)
        broker.kill()
        with pytest.raises(BrokerUnavailableError, match="no broker answers"):
            next(job)


def test_a_leader_that_dies_within_a_batch(tmp_path: Path, seed: int) -> None:
    with (
        kdirect.Cluster(3, tmp_path / "cluster") as cluster,
        kdirect.connect(cluster.bootstrap_servers) as session,
    ):
        jobs.write(session, jobs.events(seed, RECORDS), 2, 3)
        leader = session.admin.describe_topic(jobs.TOPIC).leaders[0].leader
        mark = tmp_path / "killed"
        launcher = jobs.killing("read", 3, mark, str(cluster.pid(leader)))
        tables = until_end(cluster.bootstrap_servers, launcher=launcher)
        assert mark.exists()
        jobs.assert_same(jobs.rows_of(tables), jobs.expected(session))


def test_records_that_retention_removed_are_named(
    broker: Any, session: Session, seed: int, tmp_path: Path
) -> None:
    jobs.write(session, jobs.events(seed, RECORDS), 1)
    settings: dict[str, Any] = {
        **SMALL,
        "directory": tmp_path / "job",
        "state_memory": str(tmp_path / "memory"),
    }
    with run(jobs.plan(), broker.bootstrap_servers, **settings) as job:
        next(job)
        session.admin.delete_records({TopicPartition(jobs.TOPIC, 0): 5000})
        with pytest.raises(DataLossError, match="offsets 4000 to 5000 of events-0 were removed"):
            next(job)
        assert list(job) == []
    # State that was lost cannot be rebuilt either.
    other: dict[str, Any] = {**settings, "executors": 1}
    with (
        pytest.raises(DataLossError, match=r"offsets 0 to 4000 of events-0.*begins at 5000"),
        run(jobs.plan(), broker.bootstrap_servers, **other) as job,
    ):
        next(job)


@pytest.mark.parametrize("restarts", [False, True])
def test_a_topic_that_was_made_again_ends_the_job(
    broker: Any, session: Session, seed: int, tmp_path: Path, restarts: bool
) -> None:
    """It has more records than were read of the one before, and the first of them were left out."""
    jobs.write(session, jobs.events(seed, RECORDS), 2)
    settings: dict[str, Any] = {**SMALL, "directory": tmp_path / "job"}
    job = run(jobs.plan(), broker.bootstrap_servers, **settings)
    try:
        next(job)
        if restarts:
            job.close(stop=False)
        session.admin.delete_topic(jobs.TOPIC)
        wait_until(lambda: jobs.TOPIC not in session.list_topics())
        jobs.write(session, jobs.events(seed, 2 * RECORDS), 2)
        with pytest.raises(DataLossError, match="topic events was made again: its id is"):
            if restarts:
                job = run(jobs.plan(), broker.bootstrap_servers, **settings)
            next(job)
    finally:
        job.close(stop=False)


def test_partitions_that_come_while_a_job_runs(broker: Any, session: Session, seed: int) -> None:
    rows = jobs.events(seed, RECORDS)
    half = RECORDS // 2
    jobs.write(session, rows[:half], 1)
    tables = []
    with run(jobs.plan(), broker.bootstrap_servers, executors=2) as job:
        tables.append(next(job)[1])
        session.admin.create_partitions(jobs.TOPIC, 3)
        jobs.write(session, rows[half:], 3)
        wanted = jobs.expected(session)
        while sum(table.num_rows for table in tables) < len(wanted):
            tables.append(next(job)[1])
    jobs.assert_same(jobs.rows_of(tables), wanted)


def test_an_empty_topic_and_more_executors_than_partitions(
    broker: Any, session: Session, seed: int, tmp_path: Path
) -> None:
    session.admin.create_topic(jobs.TOPIC, 1)
    settings: dict[str, Any] = {"executors": 4, "directory": tmp_path / "job"}
    assert until_end(broker.bootstrap_servers, **settings) == []
    jobs.write(session, jobs.events(seed, RECORDS), 1)
    tables = until_end(broker.bootstrap_servers, **settings)
    jobs.assert_same(jobs.rows_of(tables), jobs.expected(session))


# -- interruptions ---------------------------------------------------------------------------------


def test_ctrl_c_ends_all_processes_and_the_job_goes_on(
    broker: Any, session: Session, seed: int, tmp_path: Path
) -> None:
    jobs.write(session, jobs.events(seed, RECORDS * 3), 2)
    output, memory = tmp_path / "output", tmp_path / "memory"
    output.mkdir()
    given = {
        "bootstrap": broker.bootstrap_servers,
        "directory": str(tmp_path / "job"),
        "output": str(output),
        "plan": jobs.plan().to_json(),
        "settings": {**SMALL, "state_memory": str(memory)},
    }
    command = [sys.executable, str(PROGRAM), json.dumps(given)]
    endless = {**given, "patient": True, "settings": {**given["settings"], "until": None}}
    first = subprocess.Popen(
        [*command[:2], json.dumps(endless)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert first.stdout is not None
    first.stdout.readline()
    os.killpg(first.pid, signal.SIGINT)
    _, errors = first.communicate(timeout=LIMIT_S)  # they leave by themselves
    assert "KeyboardInterrupt" in errors.splitlines()[-1]
    assert executors_of(memory) == []
    subprocess.run(command, check=True, timeout=LIMIT_S, stdout=subprocess.DEVNULL)
    tables = []
    for path in sorted(output.glob("*.arrow")):
        with pa.ipc.open_file(path) as file:
            tables.append(file.read_all())
    jobs.assert_same(jobs.rows_of(tables), jobs.expected(session))


def _has_open(path: Path) -> bool:
    """Does this process have the file open?"""
    return any(
        os.path.samefile(link, path)
        for link in Path("/proc/self/fd").iterdir()
        if os.path.exists(link)
    )


class _TurnedAwayError(Exception):
    """The caller has something else to do."""


def test_a_job_that_is_closed_within_a_batch_goes_on(
    broker: Any, session: Session, seed: int, tmp_path: Path
) -> None:
    jobs.write(session, jobs.events(seed, RECORDS), 2)

    def turn_away(*_: object) -> None:
        raise _TurnedAwayError

    before = signal.signal(signal.SIGALRM, turn_away)
    try:
        # As soon as it is told to run the first batch.
        launcher = jobs.killing("read", 2, tmp_path / "mark", f"{os.getpid()}/SIGALRM")
        job = run(
            jobs.plan(),
            broker.bootstrap_servers,
            directory=tmp_path / "job",
            launcher=launcher,
            **SMALL,
        )
        with pytest.raises(_TurnedAwayError):
            next(job)
        pids = [p.pid for p in job.processes.values()]  # type: ignore[attr-defined]
        assert list(job) == []  # a decision may be half carried out
        job.close()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    tables = until_end(broker.bootstrap_servers, directory=tmp_path / "job")
    jobs.assert_same(jobs.rows_of(tables), jobs.expected(session))


def test_a_forked_child_leaves_the_job_alone(broker: Any, session: Session, seed: int) -> None:
    """It neither ends the job, nor keeps it alive after its coordinator."""
    jobs.write(session, jobs.events(seed, RECORDS), 2)
    tables = []
    with run(jobs.plan(), broker.bootstrap_servers, until="latest", **SMALL) as job:
        tables.append(next(job)[1])
        child = os.fork()
        if child == 0:
            status = 1
            with contextlib.suppress(BaseException):
                try:
                    next(job)
                except StateError:
                    job.close()
                    status = 2 if _has_open(job.directory / "lock") else 0
            os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert job.directory.exists()
        assert job.memory.exists()
        tables += [table for _, table in job]
    jobs.assert_same(jobs.rows_of(tables), jobs.expected(session))


def test_executors_end_with_their_coordinator_though_a_child_of_it_lives(
    broker: Any, session: Session, seed: int, tmp_path: Path
) -> None:
    jobs.write(session, jobs.events(seed, 1000), 1)
    code = (
        "import os, sys, time; from kdirect.state.stream_job import run\n"
        "from tests.state import jobs\n"
        "job = run(jobs.plan(), sys.argv[1], executors=1, state_memory=sys.argv[2])\n"
        "next(job); child = os.fork()\n"
        "if child: print(child, job.processes[0].pid, flush=True)\n"
        "time.sleep(100); os._exit(0)"
    )
    first = subprocess.Popen(
        [sys.executable, "-c", code, broker.bootstrap_servers, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert first.stdout is not None
    child, executor = map(int, first.stdout.readline().split())
    try:
        first.kill()
        first.wait()
        wait_until(lambda: not executors_of(tmp_path), f"{executor} ended", LIMIT_S)
    finally:
        os.kill(child, signal.SIGKILL)
        first.stdout.close()


# -- file systems that are full --------------------------------------------------------------------


def test_a_log_that_cannot_be_appended_to_ends_the_job_without_loss(
    broker_process: Callable[..., BrokerProcess], seed: int, tmp_path: Path
) -> None:
    broker = broker_process()
    directory = tmp_path / "job"
    tables = []
    with kdirect.connect(broker.bootstrap_servers) as session:
        jobs.write(session, jobs.events(seed, RECORDS), 2)
        with run(jobs.plan(), broker.bootstrap_servers, directory=directory, **SMALL) as job:
            tables.append(next(job)[1])
            log = directory / "batches.log"
            size = log.stat().st_size
            soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, hard))  # half of a line fits
            try:
                with pytest.raises(StateDirectoryError, match=r"batches\.log: a line cannot be"):
                    next(job)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            assert log.stat().st_size == size
            assert list(job) == []
        tables += until_end(broker.bootstrap_servers, directory=directory)
        jobs.assert_same(jobs.rows_of(tables), jobs.expected(session))


@pytest.mark.parametrize("what", ["attempt", "batches.log", "manifest.json", "mark"])
def test_a_file_of_the_job_that_cannot_be_written_ends_it_without_loss(
    broker: Any, session: Session, seed: int, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, what: str,
) -> None:  # fmt: skip
    """`attempt` is written at the start, the others when the third snapshot is there."""
    jobs.write(session, jobs.events(seed, RECORDS), 2)
    directory = tmp_path / "job"
    settings = {**SMALL, "snapshot_interval": 0}
    sync = os.fsync

    def full(fd: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{fd}")).name.startswith(what + "."):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(fd)

    tables = []
    with (
        monkeypatch.context() as patched,
        pytest.raises(StateDirectoryError, match=rf"{what}: .*No space.*KiB are free") as said,
    ):
        patched.setattr(os, "fsync", full)
        with run(jobs.plan(), broker.bootstrap_servers, directory=directory, **settings) as job:
            for _, table in job:
                tables.append(table)
    assert "make room" in said.value.hint
    tables += until_end(broker.bootstrap_servers, directory=directory)
    jobs.assert_same(jobs.rows_of(tables), jobs.expected(session))


@pytest.mark.parametrize("room", ["200k", "5m"])
def test_a_full_tmpfs_is_an_error_and_the_job_goes_on_when_there_is_room(
    broker: Any, session: Session, seed: int, tmp_path: Path, room: str
) -> None:
    """200 kB hold the locks and no table; 5 MB hold the first tables, which then cannot grow."""
    if os.getuid():
        pytest.skip("needs root: a file system is mounted in a namespace of its own")
    random = np.random.default_rng(seed)
    rows = jobs.events(seed, RECORDS * 8)
    rows["key"] = random.permutation(len(rows))
    jobs.write(session, rows, 2)
    output, memory = tmp_path / "output", tmp_path / "memory"
    output.mkdir()
    memory.mkdir()
    given = {
        "bootstrap": broker.bootstrap_servers,
        "directory": str(tmp_path / "job"),
        "output": str(output),
        "plan": jobs.plan().to_json(),
        "settings": {**SMALL, "batch_records": 20_000, "state_memory": str(memory)},
    }
    command = [sys.executable, str(PROGRAM), json.dumps(given)]
    small = f'mount -t tmpfs -o size={room} none "$1" && shift && exec "$@"'
    first = subprocess.run(
        ["unshare", "-m", "sh", "-c", small, "sh", str(memory), *command],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert first.returncode == 1, first.stderr
    assert "StateLimitError" in first.stderr.splitlines()[-1]
    assert "room" in first.stderr.splitlines()[-1]
    subprocess.run(command, check=True, timeout=LIMIT_S, stdout=subprocess.DEVNULL)
    tables = []
    for path in sorted(output.glob("*.arrow")):
        with pa.ipc.open_file(path) as file:
            tables.append(file.read_all())
    jobs.assert_same(jobs.rows_of(tables), jobs.expected(session))
