"""What the tests of planned jobs share: plans of batches, and gangs of visitors."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from kdirect.client.session import Session
from kdirect.model import TopicPartition
from kdirect.options import ENGINE
from kdirect.state.batches import Partition, Range
from kdirect.state.executor import ExecutorSettings
from kdirect.state.plan import Plan
from kdirect.state.planned_stream import PlannedJob
from kdirect.state.visitor import Visit, visit

PROGRAM = Path(__file__).with_name("visiting_program.py")
starts: Iterator[int] = itertools.count(1)


def job_of(broker: Any, plan: Plan, directory: Path | None, executors: int = 2, *,
           caller: str = "", **options: Any) -> PlannedJob:  # fmt: skip
    given = {"epoch_bytes": 20_000, "block_rows": 500, "slot_bytes": 4096, "snapshot_interval": 0}
    return PlannedJob(
        plan,
        {"bootstrap.servers": broker.bootstrap_servers},
        executors=executors,
        directory=directory,
        options=ENGINE.resolve({**given, **options}),
        caller=caller,
    )


def ends_of(session: Session, plan: Plan) -> dict[Partition, Range]:
    """First and next offset of every partition."""
    topics = session.list_topics()
    tps = [TopicPartition(i.topic, p) for i in plan.inputs for p in range(topics[i.topic])]
    first, last = session.earliest_offsets(tps), session.latest_offsets(tps)
    return {Partition(tp.topic, tp.partition): Range(first[tp], last[tp]) for tp in tps}


def cuts(ends: Mapping[Partition, Range], batches: int) -> list[dict[Partition, Range]]:
    """The ranges of so many batches, which read everything."""
    found = []
    for n in range(batches):
        found.append(
            {tp: Range(r.end * n // batches, r.end * (n + 1) // batches) for tp, r in ends.items()}
        )
    return found


def partitions(ranges: Mapping[Partition, Range]) -> list[TopicPartition]:
    return [TopicPartition(tp.topic, tp.partition) for tp in ranges]


def gang(job: PlannedJob, batch: int) -> list[Visit | BaseException]:
    """A gang in threads: what each of it has, or why it has not."""
    return gang_of(job.settings.to_json(), batch)


def gang_of(settings: str, batch: int) -> list[Visit | BaseException]:
    """The same, of the job with these settings."""
    given = ExecutorSettings.from_json(settings)
    tasks = [Waits(given, batch, task) for task in range(given.executors)]
    return [task.found() for task in tasks]


class Waits:
    """One visitor, in a thread."""

    def __init__(self, given: PlannedJob | ExecutorSettings, batch: int, task: int = 0) -> None:
        self._settings = given.settings if isinstance(given, PlannedJob) else given
        self._batch, self._task, self._start = batch, task, next(starts)
        self._found: Visit | BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._found = visit(
                self._settings, batch=self._batch, task=self._task, start=self._start
            )
        except BaseException as e:
            self._found = e

    def found(self) -> Visit | BaseException:
        """What it has, or why it has not."""
        self._thread.join(60)
        assert self._found is not None, "a visitor waits for ever"
        return self._found

    def error(self) -> Any:
        """Why it has not."""
        found = self.found()
        assert isinstance(found, BaseException), found
        return found


def rows(found: list[Visit | BaseException]) -> pa.Table:
    """What a gang hands out, in the order of executors."""
    for one in found:
        if isinstance(one, BaseException):
            raise one
    tables = {v.executor: v.rows.read_all() for v in found if isinstance(v, Visit)}
    return pa.concat_tables(
        tables[i].replace_schema_metadata(None) for i in sorted(tables)
    ).combine_chunks()


def start(
    job: PlannedJob, batch: int, output: Path, die: Mapping[int, Any] | None = None, *,
    how: int = signal.SIGKILL,
) -> list[Any]:  # fmt: skip
    """A gang of processes; `die` says of some tasks at which step they get the signal `how`."""
    settings = job.settings
    return start_of(settings.to_json(), batch, output, settings.executors, die, how)


def start_of(
    settings: str, batch: int, output: Path, tasks: int, die: Mapping[int, Any] | None = None,
    how: int = signal.SIGKILL,
) -> list[Any]:  # fmt: skip
    found = []
    for task in range(tasks):
        given = {
            "settings": settings,
            "batch": batch,
            "task": task,
            "start": next(starts),
            "output": f"{output}-{task}.arrow",
            "die": (die or {}).get(task),
            "how": int(how),
        }
        command = [sys.executable, str(PROGRAM), json.dumps(given)]
        found.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    return found


def ended(processes: list[Any]) -> list[Any]:
    """What each said, or None of one that was killed.  All end by themselves."""
    said = [process.communicate(timeout=60)[0] for process in processes]
    return [json.loads(text) if text else None for text in said]
