"""A process that comes for one batch of a planned job, and leaves with its part of the output.

This file opens sockets.  Owns: the first words of such a process, by which it becomes an executor,
and what it has in hand when it leaves.  What may not enter: who starts it, and when.

All state is mapped (`kdirect.state.executor`), so the next batch may have another process.  What is
handed out stays mapped for as long as the caller holds it, also when a later batch has replaced the
file; the executor itself, its lock and its channels end before the first row is handed out, so a
caller that is slow, or is killed, holds up nobody.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa

from kdirect.errors import StateProtocolError
from kdirect.state import control, messages
from kdirect.state.batch_run import Observer
from kdirect.state.executor import Executor, ExecutorSettings
from kdirect.state.windows import TIME_MAX, TIME_MIN

_STATE = re.compile(r"state-(\d{1,3})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """What a process has of a batch that all executors have done: its own part of the rows, and the
    counts of all executors (`docs/metrics.md`, state).  `closes`: the event time in microseconds
    below which all windows were emitted; None before the first and after the last.  `rows` are
    views of the kept output."""

    executor: int
    batch: int
    counts: Mapping[str, int]
    closes: int | None
    rows: pa.RecordBatchReader


def visit(
    settings: ExecutorSettings,
    *,
    batch: int,
    task: int,
    start: int,
    observer: Observer | None = None,
) -> Visit:
    """Come for `batch`, do it together with all others that come, and leave.

    `settings.executor` does not matter: the coordinator says which executor this process becomes.
    `task` (from 0) tells the processes of a gang apart, which come together; the numbers `start` of
    a later gang are all greater.  Waits until all have come, for start_timeout.  Raises what ended
    the job or this attempt; then whoever started the gang ends it, and may start another one."""
    connection = control.connect(settings.host, settings.port, settings.token)
    try:
        arrived = messages.Arrived(
            batch=batch,
            task=task,
            start=start,
            host=connection.local_host,
            process_id=os.getpid(),
            states=_states(Path(settings.memory), settings.executors),
        )
        connection.send(messages.encode(arrived))
        answer = messages.decode_from_coordinator(connection.receive())
        if isinstance(answer, messages.Stop):
            raise messages.error_of(answer)
        if not isinstance(answer, messages.Placed) or answer.executor >= settings.executors:
            raise StateProtocolError(f"the coordinator answered an arrival with {answer.type}")
    except BaseException:
        connection.close()
        raise
    placed = replace(settings, executor=answer.executor, start=start)
    try:
        executor = Executor.open(placed, observer, connection=connection)
    except BaseException:
        connection.close()
        raise
    with executor:
        leave = executor.visit()
        rows = executor.kept_rows(batch)
    return Visit(
        executor=placed.executor,
        batch=batch,
        counts=leave.counts,
        closes=leave.closes if TIME_MIN < leave.closes < TIME_MAX else None,
        rows=rows,
    )


def _states(memory: Path, executors: int) -> tuple[int, ...]:
    """The executors whose state this host has."""
    try:
        names = os.listdir(memory)
    except OSError:
        return ()
    found = (int(match[1]) for name in names if (match := _STATE.fullmatch(name)))
    return tuple(sorted(number for number in found if number < executors))
