"""A stream query from plain Python: `run` a plan over topics, and iterate over what it puts out.

This file starts processes and opens connections.  Owns: the arguments and options of a job, the
choice of the exchange, and the life of everything that the job needs.  What may not enter: what a
process of it does.

    with kdirect.state.run(plan, "localhost:9092", executors=2, directory="job") as job:
        for batch, table in job:
            ...

Each batch is handed out once its windows are complete.  To ask for the next batch commits the one
before: a batch that was handed out and not committed when the job ended is handed out again, with
the same number and the same rows.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from kdirect.client.session import Session, connect
from kdirect.errors import ConfigError, StateError, UnknownTopicError
from kdirect.model import TopicPartition
from kdirect.options import ENGINE
from kdirect.state import exchange, job
from kdirect.state.batches import Partition, Range
from kdirect.state.control import ControlListener, new_token
from kdirect.state.coordinator_server import CoordinatorServer
from kdirect.state.crew import LaunchedCrew
from kdirect.state.directory import JobDirectory
from kdirect.state.executor import ExecutorSettings
from kdirect.state.job_setup import executor_settings, job_file, welcome_options
from kdirect.state.launcher import ExecutorProcess, Launcher, LocalLauncher
from kdirect.state.mapped import MappedDirectory
from kdirect.state.plan import VPARTS, Plan
from kdirect.state.strict import shown

MODES = ("slash", "uppar")
LAYOUTS = ("colocated", "split")


def run(
    plan: Plan,
    source: Mapping[str, Any] | str,
    *,
    executors: int = 2,
    directory: str | Path | None = None,
    mode: str = "slash",
    layout: str = "colocated",
    until: str | None = None,
    launcher: Launcher | None = None,
    **options: Any,
) -> StateJob:
    """Run `plan` over the topics of the brokers that `source` names (client settings, or just
    "host:port") in `executors` processes.

    `directory` keeps the job from start to start; without one it is temporary, and so is the job.
    `mode`: ``slash``, or ``uppar``, the baseline that partitions rows by key; its `layout` is
    ``colocated`` (each executor partitions and aggregates) or ``split`` (half of them each).
    `until`: ``latest`` ends the job after what is in the topics when it starts; by default it goes
    on for ever.  Windows that are open then stay open: only event time closes them.  `launcher`
    starts the executors; by default they are processes of this host.  `options`: see
    docs/options.md, Options of the state engine.

    Raises ConfigError for arguments that cannot be, TransportError where ``exchange=rdma`` is asked
    for and there is no path, StateDirectoryError for a directory that is in use or damaged."""
    if not isinstance(plan, Plan):
        raise ConfigError(
            f"{shown(plan)} is no plan",
            hint="give an AggregatePlan, or JoinPlan, or plan_from_json()",
        )
    if not isinstance(source, str | Mapping):
        raise ConfigError(
            f"{shown(source)} names no brokers", hint='give "host:port" or the settings of a client'
        )
    return StateJob(
        plan,
        {"bootstrap.servers": source} if isinstance(source, str) else dict(source),
        executors=executors,
        directory=directory,
        mode=mode,
        layout=layout,
        until=until,
        launcher=launcher or LocalLauncher(),
        options=ENGINE.resolve(options),
    )


class StateJob:
    """A job that runs: iterate over it for (batch number, table), use it as a context manager, or
    `close` it.  One thread.  Made by `run`."""

    def __init__(
        self,
        plan: Plan,
        source: Mapping[str, Any],
        *,
        executors: int,
        directory: str | Path | None,
        mode: str,
        layout: str,
        until: str | None,
        launcher: Launcher,
        options: Mapping[str, Any],
    ) -> None:
        _check(executors, mode, layout, until)
        is_split = mode == "uppar" and layout == "split"
        self.plan = plan
        self._options = options
        self._executors = executors
        self._closed = False
        self._process = os.getpid()
        self._server: CoordinatorServer | None = None
        self._directory: JobDirectory | None = None
        self._mapped: MappedDirectory | None = None
        self._session: Session | None = None
        self._ended = False
        # Before anything is started: a refused exchange leaves nothing behind.
        self.exchange, self.exchange_reason = exchange.choose(
            options["exchange"], options["provider"]
        )
        self._source = dict(source)
        try:
            self._session = connect(source)
            self._directory = JobDirectory.open(directory, job_file(plan), plan_hash=plan.hash)
            self._mapped = self._directory.map_state(options["state_memory"])
            self._server = self._coordinator(
                mode, is_split=is_split, until=until, launcher=launcher
            )
        except BaseException:
            self._release()
            raise

    def _coordinator(
        self, mode: str, *, is_split: bool, until: str | None, launcher: Launcher
    ) -> CoordinatorServer:
        options = self._options
        assert self._directory is not None
        is_new = not self._directory.batches.entries and self._directory.commits.last is None
        ends = self._ends()
        settings = job.Settings(
            plan=self.plan,
            executors=self._executors,
            options=welcome_options(self._directory, options, self._source, mode),
            starts=self._directory.starts(lambda: self._starts(ends)) if is_new else {},
            until={tp: r.end for tp, r in ends.items()} if until else None,
            is_split=is_split,
            max_offsets=options["batch_records"],
            snapshot_interval_us=int(options["snapshot_interval"]) * 1000,
            max_restarts=options["max_restarts"],
        )
        self._token = new_token()
        self._crew = LaunchedCrew(
            launcher,
            self._executor_settings,
            executors=self._executors,
            max_restarts=options["max_restarts"],
            start_timeout_s=options["start_timeout"] / 1000,
            stall_timeout_s=options["stall_timeout"] / 1000,
        )
        with contextlib.ExitStack() as opened:
            listener = ControlListener(options["listen_address"], self._token)
            opened.callback(listener.close)
            self._address = listener.address
            server = CoordinatorServer(
                settings,
                self._directory,
                listener,
                crew=self._crew,
                ends=self._ends,
                stall_timeout_s=options["stall_timeout"] / 1000,
                broker_timeout_s=options["broker_timeout"] / 1000,
                trigger_interval_s=options["trigger_interval"] / 1000,
            )
            opened.pop_all()
        return server

    def __enter__(self) -> StateJob:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(stop=kind is None)

    def __iter__(self) -> Iterator[tuple[int, pa.Table]]:
        return self

    def __next__(self) -> tuple[int, pa.Table]:
        if self._closed or self._ended:
            raise StopIteration
        self._check_process()
        # Whatever interrupts it, Ctrl-C too, leaves a decision half carried out: the directory says
        # how to go on, and only a new start reads that.
        self._ended = True
        output = self.server.next_output()
        if output is None:
            raise StopIteration
        self._ended = False
        return output

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise StateError(
                f"the job belongs to process {self._process}, and this is a child of it",
                hint="iterate where the job was made, or call run after the fork",
            )

    @property
    def processes(self) -> Mapping[int, ExecutorProcess]:
        """The executors' processes that were started last."""
        return self._crew.processes

    @property
    def server(self) -> CoordinatorServer:
        """What drives the job: its attempt, its processes."""
        assert self._server is not None
        return self._server

    @property
    def counts(self) -> Counter[str]:
        """What the executors counted over all batches of this start: rows, late, dropped rows by
        reason, what was sent."""
        return self.server.counts

    @property
    def batch_counts(self) -> Counter[str]:
        """The same of the batch that was handed out last, with `state_bytes` after it."""
        return self.server.batch_counts

    @property
    def bad_rows(self) -> tuple[str, ...]:
        """The first ten rows that mode PERMISSIVE dropped since this start: topic, partition,
        offset and field, and what is wrong.  They are logged, too."""
        return tuple(self.server.bad_rows)

    def statistics(self) -> dict[str, int]:
        """The metrics of the room `state`: sums over the executors since this start."""
        return self.server.statistics()

    @property
    def memory(self) -> Path:
        """Where the executors of this host map their state."""
        assert self._mapped is not None
        return self._mapped.path

    @property
    def directory(self) -> Path:
        """Where the job is kept."""
        assert self._directory is not None
        return self._directory.path

    def close(self, *, stop: bool = True) -> None:
        """End the job.  With `stop`, in good order: a snapshot is taken, unless a batch that was
        handed out was not committed; without, as if everything had been killed.  In a child
        made by fork this does nothing: the job goes on in the process that made it."""
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        try:
            if stop and not self._ended:
                self.server.stop()
        finally:
            self._release()

    def _release(self) -> None:
        """End everything, each part also when another one fails."""
        self._closed = True
        with contextlib.ExitStack() as parts:
            for part in (self._session, self._directory):
                if part is not None:
                    parts.callback(part.close)
            parts.callback(self._leave_memory)
            if self._server is not None:
                parts.callback(self._server.close)

    def _leave_memory(self) -> None:
        """The mapped state stays only where the next start would have to rebuild it."""
        if self._mapped is None or self._directory is None:
            return
        is_needed = self._server is None or self._server.needs_mapped_state
        if self._directory.temporary or not is_needed:
            self._mapped.remove()
        else:
            self._mapped.close()

    # -- what the coordinator asks for -------------------------------------------------------------

    def _ends(self) -> dict[Partition, Range]:
        """First and next offset of every partition of the inputs."""
        assert self._session is not None
        topics = self._session.admin.list_topics()
        found: list[TopicPartition] = []
        for given in self.plan.inputs:
            if given.topic not in topics:
                raise UnknownTopicError(
                    f"input {given.name}: there is no topic {given.topic}",
                    hint="create it, or correct the plan",
                )
            found += [TopicPartition(given.topic, p) for p in range(topics[given.topic].partitions)]
        assert self._directory is not None
        self._directory.check_topics(
            {given.topic: topics[given.topic].topic_id or "" for given in self.plan.inputs}
        )
        marks = self._session.watermarks(found)
        return {
            Partition(tp.topic, tp.partition): Range(first, max(first, end))
            for tp, (first, end) in marks.items()
        }

    def _starts(self, ends: Mapping[Partition, Range]) -> dict[Partition, int]:
        latest = self._options["starting_offsets"] == "latest"
        return {tp: r.end if latest else r.start for tp, r in ends.items()}

    def _executor_settings(self, executor: int) -> ExecutorSettings:
        return executor_settings(
            self._options,
            address=self._address,
            token=self._token,
            executor=executor,
            executors=self._executors,
            memory=self.memory,
            exchange=self.exchange,
        )


def _check(executors: int, mode: str, layout: str, until: str | None) -> None:
    for name, value, choices in (
        ("mode", mode, MODES),
        ("layout", layout, LAYOUTS),
        ("until", until, (None, "latest")),
    ):
        if value not in choices:
            raise ConfigError(
                f"{name}={value!r} is not known", hint=f"use one of {', '.join(map(str, choices))}"
            )
    least = 2 if (mode, layout) == ("uppar", "split") else 1
    if not isinstance(executors, int) or not least <= executors <= VPARTS:
        raise ConfigError(
            f"a job cannot have {shown(executors)} executors in this mode",
            hint=f"give {least} to {VPARTS}",
        )
