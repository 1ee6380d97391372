"""Processes of a job killed with signal 9 at each step: no row is lost, doubled or changed.

What comes out is compared with what DuckDB makes of the topic.  The processes are real, and so are
the broker, the channels and the files.
"""

from __future__ import annotations

import json
import os
import re
import signal
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
    CoordinatorUnavailableError,
    StateDirectoryError,
    StateError,
    StateExchangeError,
    StateProtocolError,
)
from kdirect.model import TopicPartition
from kdirect.state import control, exchange, executor, kept, launcher
from kdirect.state.aggregates import Aggregate
from kdirect.state.batch_run import Step
from kdirect.state.executor import ExecutorSettings
from kdirect.state.launcher import LocalLauncher, LocalProcess
from kdirect.state.stream_job import run
from tests.state import jobs
from tests.state.killed_jobs import Kill, run_killed
from tests.support import wait_until

RECORDS = 30_000
SMALL: dict[str, Any] = {
    "executors": 2,
    "batch_records": 6000,
    "epoch_bytes": 20_000,
    "block_rows": 500,
    "slot_bytes": 4096,
    "snapshot_interval": 0,
}
LARGE = {"batch_records": 10_000}  # three batches
LIMIT_S = 120


@pytest.fixture
def session(broker: Any) -> Iterator[Session]:
    with kdirect.connect(broker.bootstrap_servers) as made:
        yield made


# How executors exchange, by mode: what holds for Slash holds for its baseline.
EXCHANGES: dict[str, dict[str, str]] = {
    "slash": {},
    "slash-tcp": {"exchange": "tcp"},
    "uppar": {"mode": "uppar", "layout": "colocated"},
    "uppar-split": {"mode": "uppar", "layout": "split"},
}
# What those do that read and that lead.  In the layout split these are not the same executors.
OF_READERS = (Step.READ, Step.DELTA)
OF_LEADERS = (Step.MERGE, Step.TRIGGER, Step.OUTPUT, Step.SNAPSHOT, Step.PART, Step.MERGE)


class EachStep:
    """Starts an executor that dies at the first step of its role at which none has died yet."""

    def __init__(self, directory: Path, split_after: int | None) -> None:
        """The first `split_after` executors read and the others lead; None: all do both."""
        self._split_after = split_after
        # A step that comes again is a kill of its own, of an executor that has recovered from some.
        self.marks = {
            directory / f"{number}-{step.value}": step
            for number, step in enumerate((*OF_READERS, *OF_LEADERS))
        }

    def start(self, settings: ExecutorSettings) -> LocalProcess:
        left = (
            jobs.killing(step.value, 3 if step in (Step.READ, Step.MERGE) else 1, mark)
            for mark, step in self.marks.items()
            if step in self._steps_of(settings.executor) and not mark.exists()
        )
        return next(left, LocalLauncher()).start(settings)

    def _steps_of(self, executor: int) -> tuple[Step, ...]:
        if self._split_after is None:
            return (*OF_READERS, *OF_LEADERS)
        return OF_READERS if executor < self._split_after else OF_LEADERS


@pytest.mark.parametrize("settings", EXCHANGES.values(), ids=EXCHANGES)
def test_an_executor_killed_at_each_step(
    broker: Any, session: Session, seed: int, tmp_path: Path, settings: dict[str, str]
) -> None:
    """One after the other, so that an attempt that began after a kill is killed too."""
    jobs.write(session, jobs.events(seed, RECORDS), 3)
    each = EachStep(tmp_path, 1 if settings.get("layout") == "split" else None)
    with run(
        jobs.plan(),
        broker.bootstrap_servers,
        until="latest",
        launcher=each,
        **{**SMALL, "max_restarts": 20, **settings},
    ) as job:
        output = list(job)
        attempts = job.server.attempt
    assert [mark.name for mark in each.marks if not mark.exists()] == []
    assert attempts > len(each.marks) // 2
    assert [n for n, _ in output] == list(range(len(output)))
    jobs.assert_same(jobs.rows_of(table for _, table in output), jobs.expected(session))


@pytest.mark.parametrize("name", ["slash", "uppar-split"])
def test_an_executor_killed_while_it_restores(
    broker: Any, session: Session, seed: int, tmp_path: Path, name: str
) -> None:
    rows = jobs.events(seed, RECORDS)
    tables = []
    mark = tmp_path / "killed"
    for executors, piece in zip((2, 3), np.array_split(rows, 2)):
        jobs.write(session, piece, 2)
        with run(
            jobs.plan(),
            broker.bootstrap_servers,
            until="latest",
            directory=tmp_path / "job",
            launcher=jobs.killing("restore", 1, mark),
            **{**SMALL, **EXCHANGES[name], "executors": executors},
        ) as job:
            tables += [table for _, table in job]
    assert mark.exists()
    jobs.assert_same(jobs.rows_of(tables), jobs.expected(session))


def test_an_executor_that_is_killed_between_two_batches(
    broker: Any, session: Session, seed: int
) -> None:
    jobs.write(session, jobs.events(seed, RECORDS), 2)
    tables = []
    with run(jobs.plan(), broker.bootstrap_servers, until="latest", **{**SMALL, **LARGE}) as job:
        for number, table in job:
            tables.append(table)
            victim = job.processes[number % 2]
            os.kill(victim.pid, signal.SIGKILL)
        assert job.server.attempt > 2
    jobs.assert_same(jobs.rows_of(tables), jobs.expected(session))


@pytest.mark.parametrize("lists", [False, True], ids=["cells", "chains"])
def test_another_process_does_the_next_batch(
    broker: Any, session: Session, seed: int, lists: bool
) -> None:
    """Each process runs one batch and leaves; the state stays where it is mapped.  A process whose
    own part of a batch was done used to leave, which ended the attempt of the slower one."""
    jobs.write(session, jobs.events(seed, RECORDS), 2)
    program = Path(__file__).with_name("one_batch_executor.py")
    wanted = jobs.expected(session)
    plan = jobs.plan()
    if lists:
        aggregates = (*plan.aggregates, Aggregate(kind="collect_list", column="amount", name="all"))
        plan = replace(plan, aggregates=aggregates)
    tables = []
    with run(
        plan,
        broker.bootstrap_servers,
        until="latest",
        launcher=LocalLauncher((sys.executable, str(program))),
        **{**SMALL, **LARGE, "snapshot_interval": 3_600_000},
    ) as job:
        for number, table in job:
            tables.append(table)
            # A process that did not go on with what lies in memory would need these records.
            upto = (number + 1) * LARGE["batch_records"] // 2
            parts = (TopicPartition(jobs.TOPIC, partition) for partition in range(2))
            session.admin.delete_records(dict.fromkeys(parts, upto))
        assert job.server.attempt >= len(tables)
        assert job.statistics()["restores"] == 2  # at the start, of nothing
    jobs.assert_same(jobs.rows_of(tables), wanted)
    if lists:
        rows = pa.concat_tables(tables).to_pydict()
        assert [len(values) for values in rows["all"]] == rows["count"]
        assert [sum(values) for values in rows["all"]] == rows["total"]


def test_an_executor_that_dies_again_and_again_ends_the_job(
    broker: Any, session: Session, seed: int
) -> None:
    jobs.write(session, jobs.events(seed, 1000), 2)
    launcher = LocalLauncher((sys.executable, "-c", "import sys; sys.exit('no such thing')"))
    with (
        pytest.raises(StateError, match=r"ended 4 times.*status 1: no such thing"),
        run(
            jobs.plan(),
            broker.bootstrap_servers,
            executors=2,
            launcher=launcher,
            max_restarts=3,
        ) as job,
    ):
        next(job)


def start(broker: Any, directory: Path, rest_at: int = 0, **settings: Any) -> Any:
    """A job in a process of its own; see job_program.py."""
    output = directory / "output"
    output.mkdir(exist_ok=True)
    given = {
        "bootstrap": broker.bootstrap_servers,
        "directory": str(directory / "job"),
        "output": str(output),
        "plan": jobs.plan().to_json(),
        "rest_at": rest_at,
        "settings": {**SMALL, **settings},
    }
    program = Path(__file__).with_name("job_program.py")
    return subprocess.Popen(
        [sys.executable, str(program), json.dumps(given)], stdout=subprocess.PIPE, text=True
    )


def outputs(directory: Path) -> list[pa.Table]:
    """The batches that the processes of a job got, in order; all of them are there."""
    found = []
    paths = sorted((directory / "output").glob("*.arrow"))
    assert [int(p.stem) for p in paths] == list(range(len(paths)))
    for path in paths:
        with pa.ipc.open_file(path) as file:
            found.append(file.read_all())
    return found


@pytest.mark.parametrize(
    ("kind", "kill", "settings"),
    [
        ("session join", Kill("merge", 3, "self"), EXCHANGES["uppar-split"]),
        ("join", Kill("delta", 3, "parent"), EXCHANGES["uppar"]),
        ("left join", Kill("commit torn", 2), {"executors": 1}),
    ],
    ids=["merge-self", "delta-parent", "commit-torn"],
)
def test_a_kill_in_joins_and_sessions_of_whole_programs(
    broker: Any, session: Session, seed: int, kind: str, kill: Kill, settings: dict[str, Any]
) -> None:
    """More of them: make slash-jobs."""
    assert run_killed(session, broker.bootstrap_servers, kind, kill, seed, **settings)


def test_all_processes_killed_after_each_batch(
    broker: Any, session: Session, seed: int, tmp_path: Path
) -> None:
    """Each start gets one batch further, with another number of executors."""
    jobs.write(session, jobs.events(seed, RECORDS), 3)
    done = False
    for turn in range(30):
        process = start(broker, tmp_path, rest_at=2, executors=2 - turn % 2, **LARGE)
        for lines, _ in enumerate(process.stdout, 1):
            if lines == 2:
                process.kill()
                break
        process.communicate(timeout=LIMIT_S)
        if process.returncode == 0:
            done = True
            break
    assert done
    assert turn >= 1
    jobs.assert_same(jobs.rows_of(outputs(tmp_path)), jobs.expected(session))


def test_an_executor_that_is_stopped_is_replaced(broker: Any, session: Session, seed: int) -> None:
    jobs.write(session, jobs.events(seed, RECORDS), 2)
    tables = []
    with run(
        jobs.plan(),
        broker.bootstrap_servers,
        until="latest",
        stall_timeout=2000,
        max_restarts=20,
        **SMALL,
    ) as job:
        for number, table in job:
            tables.append(table)
            if number == 0:
                os.kill(job.processes[1].pid, signal.SIGSTOP)  # type: ignore[attr-defined]
        attempts = job.server.attempt
    assert attempts > 1
    jobs.assert_same(jobs.rows_of(tables), jobs.expected(session))


def test_the_state_of_a_living_process_is_fenced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "LOCK_TIMEOUT_S", 0.1)
    first = kept.KeptState(tmp_path, 0, 1, 1 << 20)
    with pytest.raises(StateDirectoryError, match=f"process {os.getpid()} still holds"):
        kept.KeptState(tmp_path, 0, 1, 1 << 20)
    first.close()
    kept.KeptState(tmp_path, 0, 1, 1 << 20).close()


def test_a_process_that_ends_before_it_reads_its_settings_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Any child, but here that is the one that was started.
    ended = lambda _: os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT) and "{}"  # noqa: E731
    monkeypatch.setattr(launcher.ExecutorSettings, "to_json", ended)
    settings = launcher.ExecutorSettings(
        host="", port=0, token="", executor=0, executors=1, memory=""
    )
    process = LocalLauncher(("sh", "-c", "echo no room >&2; exit 3")).start(settings)
    assert re.search("executor 0 .* exited with status 3: no room", wait_until(process.ended))
    process.end(0)


def test_an_executor_that_cannot_join_does_not_try_again_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when a coordinator refuses it, which ends the connection."""
    turns = iter(range(12))

    def refused(*_: object) -> None:
        if next(turns, None) is None:
            raise CoordinatorUnavailableError("it has gone")
        raise StateProtocolError("the connection was closed")

    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(executor.Executor, "open", refused)
    with pytest.raises(CoordinatorUnavailableError):
        executor.serve(None)  # type: ignore[arg-type]
    assert sum(slept) > 3
    assert max(slept) <= 1


def test_an_executor_ends_when_another_job_has_the_port_of_its_coordinator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It tried to join that one for ever, and each try held the lock of its state for a while."""
    monkeypatch.setattr(executor, "MOST_PAUSES_S", 0.3)
    other = control.ControlListener("127.0.0.1", control.new_token())
    refusing = threading.Thread(target=lambda: wait_until(lambda: other.poll() or ended, "", 100))
    ended: list[bool] = []
    host, port = other.address
    settings = ExecutorSettings(
        host=host, port=port, token="mine", executor=0, executors=1, memory=str(tmp_path / "m")
    )
    refusing.start()
    try:
        with pytest.raises(CoordinatorUnavailableError, match=f"{host}:{port} lets executor 0 not"):
            executor.serve(settings)
    finally:
        ended.append(True)
        refusing.join()
        other.close()


def test_an_executor_that_goes_before_the_others_connect_is_lost() -> None:
    """The job begins again; it does not end."""
    ends = [exchange.RdmaExchange(i, 2, provider="shm") for i in range(2)]
    addresses = [end.address() for end in ends]
    ends[1].close()
    with pytest.raises(StateExchangeError, match="executor 1 cannot be reached"):
        ends[0].listen(addresses)
        ends[0].connect(addresses)
    ends[0].close()
