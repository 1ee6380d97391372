"""What the coordinator of a job decides: which batches run, in what state, and who hears of it.

Pure: `step(job, event)` gives a new state and effects, and the driver carries them out in order,
each durable one before the next.  One coordinator for each job, at one attempt: whenever an
executor is lost, or the coordinator itself starts again, a new attempt begins, every executor says
hello with its header, and `recovery.decide` says how to go on.

============  =====================================================================================
phase         what is waited for
============  =====================================================================================
GATHERING     a hello of every executor, and the ends of the topics
LISTENING     the receiving ends of all channels
CONNECTING    the sending ends, and the restoring of what was lost
RUNNING       `BatchDone` of every executor, for a batch of the recovery or a new one
OFFERING      the caller, who may ask for the output of the last batch, or has it
WAITING       new records, or the caller
SNAPSHOT      the parts of the last snapshot, before the job stops
ENDED         nothing: stopped, finished or failed
============  =====================================================================================

=================  ================================================================================
event              what it does
=================  ================================================================================
a message          of an executor, checked
`Lost`             the connection to an executor broke: a new attempt
`Ends`             the answer to `AskEnds`: first and next offset of every partition, and the time
`Asked`            the caller wants the next output, and so has done with the one before: a commit
`Handed`           the caller has the output that was to be handed out
`StopAsked`        the caller wants no more; a snapshot is taken if nothing waits for a commit
`Planned`          of a planned job: what a batch reads; all batches before it are committed
=================  ================================================================================

=================  ================================================================================
effect             what the driver does
=================  ================================================================================
`WriteAttempt`     make the number durable
`LogBatch`         append to batches.log, durable before anything that follows
`LogCommit`        append to commits.log, durable before anything that follows
`Tell`             send a message to one executor
`Disconnect`       close the connection to an executor; it comes back with a hello
`AskEnds`          find the ends of the topics and answer `Ends`; where nothing was new, after a
                   pause
`HandOut`          collect the kept output of a batch from all executors and give it to the caller;
                   of a planned job, let all executors hand out their own and leave
`WriteManifest`    make it durable: the snapshot exists from then on
`ForgetSnapshot`   remove it, and the lines of batches.log up to a number
`Finish`           the end: no more output, or an error
=================  ================================================================================

A batch is logged before it runs, a commit before the next batch is logged, and a snapshot is taken
of committed batches only.  An executor copies its state when it is told to, which is before the
next batch begins; the copy is written while batches run.  The snapshot exists from its manifest on,
and with a new attempt it never will.

In a planned job (`planned_job`) executors come for one batch.  When they have done it they leave,
and a new attempt gathers whoever comes next: for the same batch, or for the one that is planned
then.  Attempts that fail are not counted: whoever starts the processes decides how often.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kdirect.errors import ConfigError, KdirectError, StateError, StateProtocolError
from kdirect.state import recovery
from kdirect.state.batches import (
    NO_BATCH,
    BatchRecord,
    Commit,
    Manifest,
    Progress,
    deal_partitions,
)
from kdirect.state.clock import VectorClock
from kdirect.state.job import (
    Asked,
    AskEnds,
    Disconnect,
    Effect,
    Effects,
    Ends,
    Event,
    Finish,
    ForgetSnapshot,
    Handed,
    HandOut,
    Job,
    LogBatch,
    LogCommit,
    Lost,
    Phase,
    Planned,
    Settings,
    StopAsked,
    Taking,
    Tell,
    WriteAttempt,
    WriteManifest,
)
from kdirect.state.messages import (
    BatchDone,
    BatchOver,
    Connect,
    Failed,
    Hello,
    Listening,
    NotRestored,
    Ready,
    Restore,
    SnapshotDone,
    StartBatch,
    Stop,
    TakeSnapshot,
    Welcome,
    error_of,
)
from kdirect.state.planned_job import check_planned, planned_record
from kdirect.state.ranges import (
    check_kept,
    closes_more,
    idle_partitions,
    next_ranges,
    positions_after,
)
from kdirect.state.recovery import Resume, Situation, Step
from kdirect.state.windows import TIME_MIN


def open_job(
    settings: Settings,
    *,
    attempt: int,
    records: dict[int, BatchRecord],
    committed: Commit | None,
    manifests: tuple[Manifest, ...],
) -> tuple[Job, Effects]:
    """A job whose directory says this.  `attempt` is the last one that was made durable, and
    `committed` the last line of commits.log."""
    return _new_attempt(
        Job(
            settings=settings,
            attempt=attempt,
            records=dict(records),
            committed=committed,
            manifests=tuple(sorted(manifests, key=lambda manifest: manifest.number)),
            hellos={},
            advanced_us={},
        )
    )


def step(job: Job, event: Event) -> tuple[Job, Effects]:
    """The state and the effects after an event.  Messages of older attempts change nothing."""
    if job.phase is Phase.ENDED:
        return job, ()
    try:
        return _HANDLERS[type(event)](job, event)
    except KdirectError as e:
        return _end(job, e)


def _new_attempt(job: Job) -> tuple[Job, Effects]:
    """Begin again from the headers.  All executors that are connected are to come back.  A job that
    is to stop ends instead: its directory says all that the next start needs."""
    if job.is_stopping:
        return _end(job, None)
    gone = tuple(Disconnect(executor) for executor in sorted(job.hellos))
    is_planned = job.settings.is_planned
    job = replace(
        job,
        phase=Phase.GATHERING,
        attempt=job.attempt + 1,
        hellos={},
        ends=job.ends if is_planned else None,
        heard=frozenset(),
        steps=(),
        taking=None,
    )
    if is_planned:
        return job, (WriteAttempt(job.attempt), *gone)
    # Whatever was asked for before may be answered when the next batch is due, hours later.
    job = replace(job, is_asking=True)
    return job, (WriteAttempt(job.attempt), *gone, AskEnds(False))


def _ask_ends(job: Job, *, pause: bool) -> tuple[Job, Effects]:
    if job.is_asking:
        return job, ()
    return replace(job, is_asking=True), (AskEnds(pause),)


def end(job: Job, error: KdirectError) -> tuple[Job, Effects]:
    """What the driver has to do fails for good."""
    return (job, ()) if job.phase is Phase.ENDED else _end(job, error)


def _end(job: Job, error: KdirectError | None) -> tuple[Job, Effects]:
    stop = Stop(attempt=job.attempt, forget=error is None and job.is_all_in_snapshot)
    if error is not None:
        name = type(error).__name__
        stop = replace(stop, error=name, message=error.message, hint=error.hint)
    stops = tuple(Tell(executor, stop) for executor in sorted(job.hellos))
    return replace(job, phase=Phase.ENDED), (*stops, Finish(error))


# -- meeting ---------------------------------------------------------------------------------------


def _hello(job: Job, hello: Hello) -> tuple[Job, Effects]:
    if hello.executor >= job.settings.executors:
        raise StateProtocolError(
            f"executor {hello.executor} said hello to a job of {job.settings.executors}",
            hint="start it with the number that the job was started with",
        )
    if job.phase is not Phase.GATHERING:
        # Another process of an executor that was not yet known to be lost.
        job, effects = _lost(job, Lost(hello.executor))
        job, more = _gathered(replace(job, hellos={hello.executor: hello}))
        return job, (*effects, *more)
    return _gathered(replace(job, hellos={**job.hellos, hello.executor: hello}))


def _lost(job: Job, event: Lost) -> tuple[Job, Effects]:
    if event.executor not in job.hellos:
        return job, ()
    hellos = {i: hello for i, hello in job.hellos.items() if i != event.executor}
    job = replace(job, hellos=hellos)
    if job.phase is Phase.GATHERING:
        return job, ()
    if job.settings.is_planned:
        return _new_attempt(job)
    if job.restarts >= job.settings.max_restarts:
        raise StateError(
            f"{job.restarts + 1} attempts failed one after the other at batch {job.last}: in the "
            f"last one executor {event.executor} was lost",
            hint="the output of its process says why it ended",
        )
    return _new_attempt(replace(job, restarts=job.restarts + 1))


def _failed(job: Job, said: Failed) -> tuple[Job, Effects]:
    if job.settings.is_planned:
        # Its process raises the error too, and whoever started it decides what comes of it.
        return _lost(job, Lost(said.executor))
    if said.retriable and job.restarts < job.settings.max_restarts:
        # The brokers are asked for the ends of the topics before a batch begins: so an attempt
        # begins only when they answer again, for which the driver gives them a time.
        return _new_attempt(replace(job, restarts=job.restarts + 1))
    raise error_of(said)


def _ends(job: Job, event: Ends) -> tuple[Job, Effects]:
    job = replace(_seen(job, event), is_asking=False)
    if job.phase is Phase.GATHERING:
        return _gathered(job)
    return _next_batch(job) if job.phase is Phase.WAITING and job.is_asked else (job, ())


def _seen(job: Job, event: Ends) -> Job:
    """After the ends of the topics are known: which partitions have new records."""
    advanced = dict(job.advanced_us)
    before = job.seen_ends
    for tp, range_ in event.ends.items():
        if tp not in advanced or range_.end > before.get(tp, range_.end):
            advanced[tp] = event.now_us
    return replace(
        job,
        ends=event,
        seen_ends={tp: range_.end for tp, range_ in event.ends.items()},
        advanced_us=advanced,
        snapshot_us=event.now_us if job.snapshot_us is None else job.snapshot_us,
    )


def _planned(job: Job, event: Planned) -> tuple[Job, Effects]:
    """The caller has planned a batch; those before it are committed."""
    if not job.settings.is_planned:
        raise StateProtocolError("a batch was planned in a job that plans its own")
    check_planned(job, event)
    job = replace(
        _seen(job, Ends(event.ends, event.now_us)),
        planned=event,
        now_us=max(job.now_us, event.now_us),
    )
    return _gathered(job) if job.phase is Phase.GATHERING else _new_attempt(job)


def _gathered(job: Job) -> tuple[Job, Effects]:
    """When everybody is here: decide how to go on, and let them connect."""
    executors = job.settings.executors
    if job.phase is not Phase.GATHERING or job.ends is None or len(job.hellos) < executors:
        return job, ()
    _check_one_host(job)
    resume = recovery.decide(
        Situation(
            plan_hash=job.settings.plan.hash,
            attempt=job.attempt,
            headers=tuple(job.hellos[i].header for i in range(executors)),
            vparts=job.settings.vparts,
            records=job.records,
            # As the log has it: where a batch must run again for its clocks, which the commit that
            # is not logged yet needs, its state keeps them.
            committed=NO_BATCH if job.committed is None else job.committed.number,
            manifests=tuple(m for m in job.manifests if m.number not in job.unusable),
            log_starts={tp: range_.start for tp, range_ in job.ends.ends.items()},
        )
    )
    job = replace(job, phase=Phase.LISTENING, steps=resume.steps, after=_after(job))
    effects = [Tell(i, _welcome(job, i, resume)) for i in range(executors)]
    effects += [Tell(i, _restore(job, i, resume)) for i in sorted(resume.cold)]
    return job, tuple(effects)


def _check_one_host(job: Job) -> None:
    """Shared memory reaches executors of one host (and one network namespace) only."""
    over_shm = [hello for hello in job.hellos.values() if hello.address.get("exchange") == "shm"]
    if len({str(hello.address.get("place")) for hello in over_shm}) > 1:
        where = (f"{h.executor} on {h.host}" for h in sorted(over_shm, key=lambda h: h.executor))
        raise ConfigError(
            "provider=shm reaches executors of one host and network namespace, and those of this"
            f" job are on several: executors {', '.join(where)}",
            hint="use provider=verbs, or exchange=tcp",
        )


def _after(job: Job) -> Progress | None:
    """The clocks after the last batch, if it does not run again: from its commit, or from the
    headers of those that are done with it."""
    if job.committed is not None and job.committed.number == job.last:
        return job.committed.after
    headers = [hello.header for hello in job.hellos.values() if hello.header is not None]
    kept = [header.after for header in headers if header.batch == job.last and header.after]
    if any(after != kept[0] for after in kept):
        raise StateError(
            f"the executors disagree about the clocks after batch {job.last}",
            hint="remove the state files: the job is rebuilt from its last snapshot",
        )
    return kept[0] if kept else None


def _welcome(job: Job, executor: int, resume: Resume) -> Welcome:
    settings = job.settings
    return Welcome(
        attempt=job.attempt,
        plan=settings.plan,
        options=dict(settings.options),
        vparts=settings.vparts,
        addresses=tuple(job.hellos[i].address for i in range(settings.executors)),
        cold=executor in resume.cold,
    )


def _restore(job: Job, executor: int, resume: Resume) -> Restore:
    snapshot = resume.snapshot
    return Restore(
        attempt=job.attempt,
        batch=NO_BATCH if snapshot is None else snapshot.number,
        parts=() if snapshot is None else snapshot.parts_of([job.settings.vparts[executor]]),
    )


def _all_have_said(job: Job, executor: int, waited_for: int) -> tuple[Job, bool]:
    """After `executor` has said what is waited for; was it the last one?"""
    job = replace(job, heard=job.heard | {executor})
    if len(job.heard) < waited_for:
        return job, False
    return replace(job, heard=frozenset()), True


def _listening(job: Job, said: Listening) -> tuple[Job, Effects]:
    if said.attempt != job.attempt or job.phase is not Phase.LISTENING:
        return job, ()
    job, complete = _all_have_said(job, said.executor, job.settings.executors)
    if not complete:
        return job, ()
    connect = Connect(attempt=job.attempt)
    everybody = range(job.settings.executors)
    return replace(job, phase=Phase.CONNECTING), tuple(Tell(i, connect) for i in everybody)


def _ready(job: Job, said: Ready) -> tuple[Job, Effects]:
    if said.attempt != job.attempt or job.phase is not Phase.CONNECTING:
        return job, ()
    job, complete = _all_have_said(job, said.executor, job.settings.executors)
    return _run_steps(job) if complete else (job, ())


def _not_restored(job: Job, said: NotRestored) -> tuple[Job, Effects]:
    """A snapshot is damaged or gone: use the one before it."""
    if said.attempt != job.attempt:
        return job, ()
    return _new_attempt(replace(job, unusable=job.unusable | {said.batch}))


# -- batches ---------------------------------------------------------------------------------------


def _run_steps(job: Job) -> tuple[Job, Effects]:
    """Run the first step that is left, or see what to do if there is none."""
    if not job.steps:
        return _rest(replace(job, restarts=0))
    job = replace(job, phase=Phase.RUNNING, heard=frozenset())
    starts = _start_batches(job, job.steps[0])
    return job, tuple(Tell(executor, start) for executor, start in enumerate(starts))


def _start_batches(job: Job, planned: Step) -> list[StartBatch]:
    """What each executor is told to run."""
    record = job.records[planned.batch]
    dealt = deal_partitions(record.ranges, job.settings.readers)
    dealt += ((),) * (job.settings.executors - job.settings.readers)
    return [
        StartBatch(
            attempt=job.attempt,
            batch=planned.batch,
            ranges={tp: record.ranges[tp] for tp in partitions},
            clock=record.clock,
            idle=record.idle,
            closed_before=record.closed_before,
            now_us=record.now_us,
            closes_all=record.closes_all,
            vparts=planned.vparts,
            emit=planned.emit,
        )
        for partitions in dealt
    ]


def _batch_done(job: Job, done: BatchDone) -> tuple[Job, Effects]:
    if done.attempt != job.attempt or job.phase is not Phase.RUNNING:
        return job, ()
    number = job.steps[0].batch
    if done.batch != number:
        raise StateProtocolError(
            f"executor {done.executor} has done batch {done.batch}, and not {number}"
        )
    if job.heard and done.after != job.after:
        raise StateProtocolError(
            f"executor {done.executor} computed other clocks for batch {number}",
            hint="all executors of a job must run the same version of kdirect",
        )
    job = replace(job, after=done.after)
    job, complete = _all_have_said(job, done.executor, job.settings.executors)
    if not complete:
        return job, ()
    _check_as_logged(job, number, done.after)
    over = BatchOver(attempt=job.attempt, batch=number)
    told = tuple(Tell(executor, over) for executor in range(job.settings.executors))
    job, effects = _run_steps(replace(job, steps=job.steps[1:]))
    return job, (*told, *effects)


def _check_as_logged(job: Job, number: int, after: Progress) -> None:
    """A batch that runs again must come to the clocks that the next one was logged with."""
    following = job.records.get(number + 1)
    if following is None:
        return
    clock = {tp: after.clock.get(tp, TIME_MIN) for tp in following.clock}
    if clock != following.clock or after.closes != following.closed_before:
        raise StateError(
            f"batch {number} came to other clocks when it ran again",
            hint="its records have changed: start a new job in an empty directory",
        )


def _rest(job: Job) -> tuple[Job, Effects]:
    """Nothing is left to be run for the state's sake."""
    if job.last > job.last_committed and job.settings.is_planned:
        return _let_leave(job)
    if job.last > job.last_committed:
        return _offer(replace(job, phase=Phase.OFFERING))
    return _committed(job)


def _offer(job: Job) -> tuple[Job, Effects]:
    """The last batch is done and not committed."""
    if job.is_stopping:
        return _stop(job)
    if job.handed is not None and job.handed.number == job.last:
        return _asked(job, Asked(job.now_us)) if job.is_asked else (job, ())
    if not job.is_asked or job.after is None:
        return job, ()
    offered = Commit(number=job.last, after=job.after)
    return replace(job, offered=offered), (HandOut(job.last),)


def _let_leave(job: Job) -> tuple[Job, Effects]:
    """Of a planned job: the batch that is planned is done.  Whoever has done it hands out its part
    and leaves, when the snapshot that it writes is there."""
    if job.taking is not None:
        return replace(job, phase=Phase.SNAPSHOT, heard=_written(job, job.taking)), ()
    job, effects = _new_attempt(replace(job, hellos={}))
    return job, (HandOut(job.last), *effects)


def _handed(job: Job, event: Handed) -> tuple[Job, Effects]:
    if job.offered is None or job.offered.number != event.batch:
        return job, ()
    return replace(job, handed=job.offered, offered=None, is_asked=False), ()


def _asked(job: Job, event: Asked) -> tuple[Job, Effects]:
    """The caller has done with what it has, and wants more."""
    job = replace(job, is_asked=True, now_us=max(job.now_us, event.now_us))
    effects: Effects = ()
    if job.handed is not None and job.handed.number > job.last_committed:
        effects = (LogCommit(job.handed),)
        job = replace(job, committed=job.handed, handed=None)
        if job.phase is Phase.OFFERING:
            job, more = _committed(job)
            return job, (*effects, *more)
    if job.phase is Phase.OFFERING:
        job, more = _offer(job)
    elif job.phase is Phase.WAITING:
        job, more = _ask_ends(job, pause=False)
    else:
        more = ()
    return job, (*effects, *more)


def _stop_asked(job: Job, event: StopAsked) -> tuple[Job, Effects]:
    if job.settings.is_planned:
        return _end(job, None)
    job = replace(job, is_stopping=True, is_asked=False, now_us=max(job.now_us, event.now_us))
    if job.phase is Phase.OFFERING:
        return _offer(job)
    if job.phase in (Phase.GATHERING, Phase.LISTENING, Phase.CONNECTING):
        return _end(job, None)
    return _committed(job) if job.phase is Phase.WAITING else (job, ())


def _committed(job: Job) -> tuple[Job, Effects]:
    """The last batch is committed, and every executor has its state: time for a snapshot?"""
    newest = max((manifest.number for manifest in job.manifests), default=NO_BATCH)
    is_due = job.is_stopping or (
        job.snapshot_us is not None
        and job.now_us - job.snapshot_us >= job.settings.snapshot_interval_us
    )
    taking: Effects = ()
    logged = NO_BATCH if job.committed is None else job.committed.number
    if logged < job.last_committed:
        job, effects = _log_commit(job)
        job, more = _committed(job)
        return job, (*effects, *more)
    if is_due and job.taking is None and job.last_committed > newest:
        job, taking = _take_snapshot(job)
    if job.is_stopping:
        job, more = _stop(job)
        return job, (*taking, *more)
    job = replace(job, phase=Phase.WAITING)
    if job.settings.is_planned:
        job, more = _log_and_run(job, planned_record(job))
        return job, (*taking, *more)
    job, asking = _ask_ends(job, pause=False) if job.is_asked else (job, ())
    return job, (*taking, *asking)


def _log_commit(job: Job) -> tuple[Job, Effects]:
    """Of a planned job: the caller has committed the last batch; the log is to say so, too."""
    if job.after is None:
        raise StateError(f"the clocks after batch {job.last} are not known")
    commit = Commit(number=job.last, after=job.after)
    return replace(job, committed=commit), (LogCommit(commit),)


def _stop(job: Job) -> tuple[Job, Effects]:
    """End in good order: when the snapshot that is being written is there."""
    if job.taking is None:
        return _end(job, None)
    return replace(job, phase=Phase.SNAPSHOT, heard=_written(job, job.taking)), ()


def _written(job: Job, taking: Taking) -> frozenset[int]:
    """The executors that are not waited for until a snapshot is there."""
    silent = frozenset(range(job.settings.executors)) - frozenset(job.settings.leaders)
    return silent | taking.parts.keys()


def _next_batch(job: Job) -> tuple[Job, Effects]:
    """Log and run the next batch, if there is anything to do."""
    assert job.ends is not None
    settings, ends, now_us = job.settings, job.ends.ends, max(job.now_us, job.ends.now_us)
    job = replace(job, now_us=now_us)
    last = job.records.get(job.last)
    if last is None and job.last > NO_BATCH:
        raise StateError(f"batches.log does not have batch {job.last}")
    positions = positions_after(last, settings.starts, ends)
    check_kept(positions, ends)
    ranges = next_ranges(positions, ends, until=settings.until, max_offsets=settings.max_offsets)
    idle = idle_partitions(ranges, ends, job.advanced_us, settings.idle_timeouts_us, now_us)
    before = TIME_MIN if job.after is None else job.after.closes
    known = {} if job.after is None else job.after.clock
    clock = VectorClock({tp: known.get(tp, TIME_MIN) for tp in ranges})
    if all(r.start == r.end for r in ranges.values()) and not closes_more(clock, idle, before):
        if settings.until is not None:
            return _committed(replace(job, is_stopping=True, is_asked=False))
        return _ask_ends(job, pause=True)
    record = BatchRecord(
        number=job.last + 1,
        ranges=ranges,
        now_us=now_us,
        idle=idle,
        clock=dict(clock.entries),
        closed_before=before,
    )
    return _log_and_run(job, record)


def _log_and_run(job: Job, record: BatchRecord) -> tuple[Job, Effects]:
    """Begin a new batch."""
    planned = Step(batch=record.number, vparts=recovery.EVERYTHING, emit=True)
    job = replace(job, records={**job.records, record.number: record}, steps=(planned,))
    job, effects = _run_steps(job)
    return job, (LogBatch(record), *effects)


# -- snapshots -------------------------------------------------------------------------------------


def _take_snapshot(job: Job) -> tuple[Job, Effects]:
    job = replace(job, taking=Taking(batch=job.last_committed), snapshot_us=job.now_us)
    return job, tuple(
        Tell(
            i,
            TakeSnapshot(attempt=job.attempt, batch=job.last_committed, file=part_file(job, i)),
        )
        for i in job.settings.leaders
    )


def part_file(job: Job, executor: int) -> str:
    """The name of an executor's part of a snapshot that is taken now."""
    return f"part-{job.attempt}-{executor}"


def _snapshot_done(job: Job, done: SnapshotDone) -> tuple[Job, Effects]:
    """A part is on disk.  The last one makes the snapshot, whatever batch runs now."""
    taking = job.taking
    if done.attempt != job.attempt or taking is None or done.batch != taking.batch:
        return job, ()
    taking = replace(taking, parts={**taking.parts, done.executor: done.part})
    if len(taking.parts) < len(job.settings.leaders):
        job = replace(job, taking=taking)
        return _when_written(job) if job.phase is Phase.SNAPSHOT else (job, ())
    manifest = Manifest(
        number=taking.batch,
        plan_hash=job.settings.plan.hash,
        parts=tuple(sorted(taking.parts.values(), key=lambda part: part.first)),
    )
    usable = tuple(m for m in job.manifests if m.number not in job.unusable)
    kept = (*usable, manifest)[-KEPT_SNAPSHOTS:]
    oldest = kept[0].number if len(kept) == KEPT_SNAPSHOTS else NO_BATCH
    forgotten = tuple(m.number for m in job.manifests if m not in kept)
    job = replace(
        job,
        manifests=kept,
        taking=None,
        records={n: record for n, record in job.records.items() if n > oldest},
    )
    effects: tuple[Effect, ...] = (
        WriteManifest(manifest),
        *(ForgetSnapshot(number, oldest) for number in forgotten),
    )
    if job.phase is not Phase.SNAPSHOT:
        return job, effects
    job, more = _when_written(job)
    return job, (*effects, *more)


def _when_written(job: Job) -> tuple[Job, Effects]:
    """Go on with what waited for the snapshot."""
    if job.settings.is_planned:
        return _let_leave(job)
    return (
        _stop(job) if job.last > job.last_committed or job.taking is not None else _committed(job)
    )


KEPT_SNAPSHOTS = 2

_HANDLERS: dict[type, Callable[[Job, Any], tuple[Job, Effects]]] = {
    Hello: _hello,
    Listening: _listening,
    Ready: _ready,
    NotRestored: _not_restored,
    BatchDone: _batch_done,
    SnapshotDone: _snapshot_done,
    Failed: _failed,
    Lost: _lost,
    Ends: _ends,
    Asked: _asked,
    Handed: _handed,
    StopAsked: _stop_asked,
    Planned: _planned,
}
