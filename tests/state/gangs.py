"""What the tests of planned jobs share: plans of batches, and gangs of visitors."""

from __future__ import annotations

import itertools
import json
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


def gang(job: PlannedJob, batch: int) -> list[Visit | BaseException]:
    """A gang in threads: what each of it has, or why it has not."""
    executors = job.settings.executors
    found: list[Any] = [None] * executors
    begun = [next(starts) for _ in range(executors)]

    def run(task: int) -> None:
        try:
            found[task] = visit(job.settings, batch=batch, task=task, start=begun[task])
        except BaseException as e:
            found[task] = e

    threads = [threading.Thread(target=run, args=(task,)) for task in range(executors)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a visitor waits for ever"
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


def start(job: PlannedJob, batch: int, output: Path, die: Mapping[int, Any] = {}) -> list[Any]:
    """A gang of processes; `die` says of some tasks where they kill themselves."""
    found = []
    for task in range(job.settings.executors):
        given = {
            "settings": job.settings.to_json(),
            "batch": batch,
            "task": task,
            "start": next(starts),
            "output": f"{output}-{task}.arrow",
            "die": die.get(task),
        }
        command = [sys.executable, str(PROGRAM), json.dumps(given)]
        found.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    return found


def ended(processes: list[Any]) -> list[Any]:
    """What each said, or None of one that was killed.  All end by themselves."""
    said = [process.communicate(timeout=60)[0] for process in processes]
    return [json.loads(text) if text else None for text in said]


def outputs(output: Path, said: list[Any]) -> pa.Table:
    """What a gang of processes handed out, in the order of executors."""
    tables = {}
    for task, one in enumerate(said):
        with pa.ipc.open_file(f"{output}-{task}.arrow") as file:
            tables[one["executor"]] = file.read_all().replace_schema_metadata(None)
    return pa.concat_tables(tables[i] for i in sorted(tables)).combine_chunks()
