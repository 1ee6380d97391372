"""Planned jobs of real processes over a real broker: whatever dies, every gang that comes to the
end of a batch hands out the same rows, and all together are what DuckDB makes of the topic."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import kdirect
from kdirect.client.session import Session
from kdirect.errors import (
    DataLossError,
    StateDirectoryError,
    StateError,
    StateProtocolError,
    TimedOutError,
)
from kdirect.options import ENGINE
from kdirect.state import control, directory, kept, messages
from kdirect.state.batch_run import Step
from kdirect.state.batches import Partition, Range, ranges_to_json
from kdirect.state.visitor import Visit
from tests.state import family, gangs, jobs, killed_jobs
from tests.state.oracle import Oracle
from tests.support import wait_until

RECORDS = 24_000


@pytest.fixture
def session(broker: Any) -> Iterator[Session]:
    with kdirect.connect(broker.bootstrap_servers) as made:
        yield made


@pytest.fixture
def ends(session: Session, seed: int) -> Mapping[Partition, Range]:
    jobs.write(session, jobs.events(seed, RECORDS), 2)
    return gangs.ends_of(session, jobs.plan())


def failures(found: list[Visit | BaseException]) -> list[BaseException]:
    return [one for one in found if isinstance(one, BaseException)]


def everything(session: Session) -> jobs.Rows:
    """All windows of the topic, as DuckDB has them: as if a row came that closes them."""
    partitions = jobs.read(session)
    late = np.zeros(1, jobs.LAYOUT.dtype())
    late["time"], late["key"] = 2**42, -1
    found = jobs.expected_of([np.concatenate([rows, late]) for rows in partitions])
    return {where: row for where, row in found.items() if where[0] >= 0}


@pytest.mark.parametrize("exchange", ["rdma", "tcp"])
def test_batches_and_a_second_gang_for_each(
    broker: Any, session: Session, ends: Any, tmp_path: Path, exchange: str
) -> None:
    """The last batch closes all windows; a job that begins again does not forget that."""
    tables = []
    cuts = gangs.cuts(ends, 3)
    with gangs.job_of(broker, jobs.plan(), tmp_path, exchange=exchange) as job:
        assert job.figures()[0] == -1
        for n, ranges in enumerate(cuts):
            job.plan(n, ranges, ends, closes_all=n == 2)
            found = gangs.gang(job, n)
            tables.append(gangs.rows(found))
            counts = [v.counts for v in found if isinstance(v, Visit)]
            assert counts[0] == counts[1] and counts[0].get("rows_out", 0) == tables[-1].num_rows
            assert gangs.rows(gangs.gang(job, n)).equals(tables[-1])
            done, figures, _ = job.figures()
            statistics = job.statistics()
            assert (done, figures["rows_out"]) == (n, tables[-1].num_rows)
            assert statistics["batches"] == n and statistics["attempts"] < 3 * (n + 2)
    shutil.rmtree(job.memory)  # all of it runs again
    with gangs.job_of(broker, jobs.plan(), tmp_path, exchange=exchange) as job:
        job.plan(2, cuts[2], ends, closes_all=True)
        assert gangs.rows(gangs.gang(job, 2)).sort_by(ORDER).equals(tables[2].sort_by(ORDER))
        assert job.statistics()["attempts"] < 10
    jobs.assert_same(jobs.rows_of(tables), everything(session))


ORDER = [("key", "ascending"), ("window_start", "ascending")]


def test_a_visitor_killed_at_each_step(
    broker: Any, session: Session, ends: Any, tmp_path: Path
) -> None:
    """The others of its gang hear of it, and a new gang finishes the batch."""
    steps = [step for step in Step if step is not Step.RESTORE]
    tables = []
    killed = []
    with gangs.job_of(broker, jobs.plan(), tmp_path / "job") as job:
        for n, ranges in enumerate(gangs.cuts(ends, len(steps) + 1)):
            job.plan(n, ranges, ends)
            if n:
                step = steps[n - 1]
                mark = tmp_path / step.value
                die = {n % 2: [step.value, 1, str(mark)]}
                said = gangs.ended(gangs.start(job, n, tmp_path / f"{n}", die))
                killed.append(mark.exists())
                assert said[n % 2] is None and said[1 - n % 2]["error"] in (
                    "StateProtocolError", "ChannelLostError", "StateExchangeError",
                )  # fmt: skip
            tables.append(gangs.rows(gangs.gang(job, n)))
    assert killed == [True] * len(steps)
    jobs.assert_same(jobs.rows_of(tables), jobs.expected(session))


def test_a_planning_process_that_is_killed(
    broker: Any, session: Session, ends: Any, tmp_path: Path
) -> None:
    """Before its gang came, and when all was done and nothing committed.  A new one goes on, with
    another number of executors."""
    tables: list[pa.Table] = []
    cuts = gangs.cuts(ends, 3)
    options = {"snapshot_interval": 0, "slot_bytes": 4096, "block_rows": 500}
    for n, executors in enumerate((2, 3, 1)):
        for again in range(2):
            given = {
                "plan": jobs.plan().to_json(),
                "source": {"bootstrap.servers": broker.bootstrap_servers},
                "executors": executors if again else 2,
                "directory": str(tmp_path / "job"),
                "options": ENGINE.resolve(options),
                "batch": n,
                "ranges": ranges_to_json(cuts[n]),
                "ends": ranges_to_json(ends),
            }
            program = Path(gangs.__file__).with_name("planning_program.py")
            planner = subprocess.Popen(
                [sys.executable, str(program), json.dumps(given)], stdout=subprocess.PIPE, text=True
            )
            assert planner.stdout is not None
            text = planner.stdout.readline()
            if again:
                found = gangs.gang_of(text, n)
                table = gangs.rows(found)
                assert gangs.rows(gangs.gang_of(text, n)).equals(table)
                tables.append(table)
                planner.kill()
            else:  # one of two has come: it does not wait for a coordinator that is gone
                (visitor,) = gangs.start_of(text, n, tmp_path / "alone", tasks=1)
                time.sleep(1.0)
                planner.kill()
                (said,) = gangs.ended([visitor])
                assert said["error"] in ("StateProtocolError", "CoordinatorUnavailableError")
            planner.wait(10)
            planner.stdout.close()
    jobs.assert_same(jobs.rows_of(tables), jobs.expected(session))


def test_mapped_state_that_is_gone_is_rebuilt(
    broker: Any, session: Session, ends: Any, tmp_path: Path
) -> None:
    tables = []
    with gangs.job_of(broker, jobs.plan(), tmp_path) as job:
        for n, ranges in enumerate(gangs.cuts(ends, 5)):
            job.plan(n, ranges, ends)
            if n in (1, 4):
                for path in job.memory.glob("state-*"):
                    path.unlink()
            tables.append(gangs.rows(gangs.gang(job, n)))
        assert job.statistics()["restores"] == 6  # two at the start, of nothing
        assert job.statistics()["snapshots"] > 0
    jobs.assert_same(jobs.rows_of(tables), jobs.expected(session))


@pytest.mark.parametrize("kind", ["join", "left join", "session", "session join"])
def test_joins_and_sessions(broker: Any, session: Session, seed: int, kind: str) -> None:
    """In the last of two batches everything closes."""
    plan = killed_jobs.plan_of(kind, (f"planned {kind} l".replace(" ", "-"),
                                      f"planned {kind} r".replace(" ", "-")))  # fmt: skip
    batch = {source.name: killed_jobs.rows_of(source, seed) for source in plan.inputs}
    for source in plan.inputs:
        session.admin.create_topic(source.topic, killed_jobs.PARTITIONS)
        for partition, rows in batch[source.name].items():
            killed_jobs.send(
                session, source.topic, partition, killed_jobs.arrow_values(source, rows)
            )
    ends = gangs.ends_of(session, plan)
    outputs: list[list[Any]] = []
    for batches in (1, 2):
        found = []
        with gangs.job_of(broker, plan, None) as job:
            for n, ranges in enumerate(gangs.cuts(ends, batches)):
                job.plan(n, ranges, ends, closes_all=n == batches - 1)
                table = gangs.rows(gangs.gang(job, n))
                assert gangs.rows(gangs.gang(job, n)).equals(table)
                found += killed_jobs.plain_rows(table)
        outputs.append(found)
    shown = [sorted(map(repr, rows)) for rows in outputs]
    assert len(shown[0]) > 100 and shown[0] == shown[1]
    far = {  # rows that close everything else
        source.name: {
            p: [*rows, {f.name: 10**12 if f.name == source.time else -1 for f in source.schema}]
            for p, rows in batch[source.name].items()
        }
        for source in plan.inputs
    }
    parts = {source.name: killed_jobs.PARTITIONS for source in plan.inputs}
    oracle = Oracle(plan, parts, [(far, int(time.time() * 1_000_000))])
    assert not family.differences(plan, outputs[1], oracle.final_rows())


def test_output_is_handed_out_while_the_next_batch_replaces_it(
    broker: Any, ends: Any, tmp_path: Path
) -> None:
    cuts = gangs.cuts(ends, 2)
    with gangs.job_of(broker, jobs.plan(), tmp_path) as job:
        job.plan(0, cuts[0], ends)
        slow = gangs.gang(job, 0)
        wanted = gangs.rows(gangs.gang(job, 0))
        job.plan(1, cuts[1], ends)
        assert not gangs.rows(gangs.gang(job, 1)).equals(wanted)
        assert gangs.rows(slow).equals(wanted) and wanted.num_rows


def test_what_ends_the_job_reaches_those_that_come_and_those_that_wait(
    broker: Any, session: Session, ends: Any, tmp_path: Path
) -> None:
    cuts = gangs.cuts(ends, 2)
    with gangs.job_of(broker, jobs.plan(), tmp_path) as job:
        job.plan(0, cuts[0], ends)
        waits = gangs.Waits(job, 0)
        session.admin.delete_records(dict.fromkeys(gangs.partitions(cuts[0]), 6000))
        with pytest.raises(DataLossError, match="offsets 0 to 6000"):
            job.plan(0, {tp: Range(0, 9) for tp in ends},
                     {tp: Range(6000, r.end) for tp, r in ends.items()})  # fmt: skip
        for error in (waits.error(), *failures(gangs.gang(job, 0))):
            assert type(error) is DataLossError and "offsets 0 to 6000" in str(error)
            assert "retention" in error.hint
        with pytest.raises(DataLossError):
            job.plan(0, cuts[0], ends)


def test_a_log_that_cannot_be_written_ends_the_job(
    broker: Any, ends: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator's thread ended, and everybody waited for it."""

    def full(log: Any, entry: Any) -> None:
        raise StateDirectoryError(f"{log.path}: a line cannot be written", hint="make room")

    with gangs.job_of(broker, jobs.plan(), tmp_path) as job:
        monkeypatch.setattr(directory.LineLog, "append", full)
        job.plan(0, ends, ends)
        found = failures(gangs.gang(job, 0))
        assert {type(error) for error in found} == {StateDirectoryError}
        assert all(error.hint == "make room" for error in found)  # type: ignore[attr-defined]
        with pytest.raises(StateDirectoryError, match="a line cannot be written"):
            job.plan(0, ends, ends)
        monkeypatch.undo()
    with gangs.job_of(broker, jobs.plan(), tmp_path) as job:
        job.plan(0, ends, ends)
        assert gangs.rows(gangs.gang(job, 0)).num_rows


def test_a_bug_in_the_thread_lets_nobody_wait(
    broker: Any, ends: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gangs.job_of(broker, jobs.plan(), tmp_path) as job:
        job.plan(0, ends, ends)
        waits = gangs.Waits(job, 0)
        monkeypatch.setattr(job._server, "_end_stalled", lambda: 1 / 0)
        assert isinstance(waits.error(), StateError)
        with pytest.raises(StateError):
            job.plan(0, ends, ends)


def test_directories_that_do_not_belong(broker: Any, ends: Any, tmp_path: Path) -> None:
    cuts = gangs.cuts(ends, 2)
    with gangs.job_of(broker, jobs.plan(), tmp_path / "a", caller="one") as job:
        with pytest.raises(StateDirectoryError, match="another job runs in this directory"):
            gangs.job_of(broker, jobs.plan(), tmp_path / "a", caller="one")
        job.plan(0, cuts[0], ends)
        gangs.rows(gangs.gang(job, 0))
    with pytest.raises(StateDirectoryError, match="caller differ"):
        gangs.job_of(broker, jobs.plan(), tmp_path / "a", caller="two")
    with (
        gangs.job_of(broker, jobs.plan(), tmp_path / "b") as job,
        pytest.raises(StateDirectoryError, match=r"batch 5 is to run, .* ends with no batch"),
    ):
        job.plan(5, cuts[0], ends)
    with gangs.job_of(broker, jobs.plan(), tmp_path / "a", caller="one") as job:
        job.plan(1, cuts[1], ends)
        (old, other) = gangs.gang(job, 0)
        assert isinstance(old, StateProtocolError) and isinstance(other, StateProtocolError)
        assert "batch 0 is not the one that is planned" in str(old)


def test_a_gang_that_is_not_complete_is_told(broker: Any, ends: Any, tmp_path: Path) -> None:
    with gangs.job_of(broker, jobs.plan(), tmp_path, start_timeout=300) as job:
        job.plan(0, ends, ends)
        error = gangs.Waits(job, 0).error()
        assert isinstance(error, TimedOutError) and "start_timeout" in error.hint


@pytest.mark.parametrize("says", ["nothing", "hello"])
def test_one_that_is_lost_before_the_others_begin(
    broker: Any, ends: Any, tmp_path: Path, says: str
) -> None:
    """It came, and died before its hello or after it: its partner does not wait, and a new gang
    does the batch."""
    with gangs.job_of(broker, jobs.plan(), tmp_path) as job:
        job.plan(0, ends, ends)
        settings = job.settings
        link = control.connect(settings.host, settings.port, settings.token)
        arrived = messages.Arrived(
            batch=0, task=1, start=next(gangs.starts), host="h", process_id=1, states=()
        )
        link.send(messages.encode(arrived))
        waits = gangs.Waits(job, 0)
        placed = messages.decode_from_coordinator(link.receive(10))
        assert placed == messages.Placed(executor=1)
        time.sleep(0.3)  # the other one says hello
        if says == "hello":
            hello = messages.Hello(
                executor=1, token=settings.token, process_id=1, host="h", address={}, header=None
            )
            link.send(messages.encode(replace(hello, address={"exchange": "tcp"})))
            time.sleep(0.3)
        link.close()
        assert isinstance(waits.error(), StateError)
        assert gangs.rows(gangs.gang(job, 0)).num_rows


def test_a_lock_that_a_process_of_an_old_gang_holds(
    broker: Any, ends: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "LOCK_TIMEOUT_S", 0.5)
    with gangs.job_of(broker, jobs.plan(), tmp_path) as job:
        job.plan(0, ends, ends)
        mark = tmp_path / "stopped"
        die = {0: ["read", 1, str(mark)]}
        old = gangs.start(job, 0, tmp_path / "old", die, how=signal.SIGSTOP)
        while not mark.exists():
            time.sleep(0.02)
        old[1].kill()  # the coordinator may know of that, or not yet
        errors = failures(gangs.gang(job, 0))
        assert any("still holds the state of executor" in str(e) for e in errors)
        assert len(errors) == 2  # the other one does not wait
        os.kill(old[0].pid, signal.SIGCONT)
        gangs.ended(old)
        assert gangs.rows(gangs.gang(job, 0)).num_rows


def test_descriptors_and_memory_of_many_batches(broker: Any, ends: Any, tmp_path: Path) -> None:
    """200 batches by visitors in this process: nothing is left open by either side."""
    early = (0, 0)

    def held() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    with gangs.job_of(broker, jobs.plan(), tmp_path, snapshot_interval=100) as job:
        for n, ranges in enumerate(gangs.cuts(ends, 200)):
            job.plan(n, ranges, ends)
            gangs.rows(gangs.gang(job, n))
            if n == 20:
                time.sleep(
                    1.0
                )  # the broker of the tests is in this process, and notices ends later
                early = held()
        # A descriptor a batch would be 180 more.
        wait_until(lambda: held()[0] <= early[0] + 10 and held()[1] <= early[1] + 4)


def test_a_child_made_by_fork_leaves_the_job_alone(broker: Any, ends: Any) -> None:
    job = gangs.job_of(broker, jobs.plan(), None)
    with job:
        job.plan(0, ends, ends)
        child = os.fork()
        if not child:
            code = 1
            try:
                job.close()
                job.plan(0, ends, ends)
            except StateError:
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert job.directory.exists()
        assert gangs.rows(gangs.gang(job, 0)).num_rows
    assert not job.directory.exists() and not job.memory.exists()
    with pytest.raises(StateError, match="closed"):
        job.plan(0, ends, ends)
    job.close()
