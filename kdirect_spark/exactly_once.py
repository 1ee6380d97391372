"""Writes that are exactly once, as Spark's driver and tasks make them (docs/spark.md, "Writing").

Owns: who writes (`Job`), what a task attempt writes in (`TaskAttempt`), and how a micro-batch or a
batch is committed or given up.  What may not enter: rows and options (`sink`, `settings`), and what
makes it exactly once, which is the broker's (`kdirect.client.attempts`).

A job writes one batch after another.  Each of its task attempts that has rows joins a transaction
of its own.  Nobody who reads committed records sees anything of it, until the driver commits the
batch, with the attempts whose commit messages Spark hands it.  What Spark does not name, such as a
speculative copy or a task that died, is aborted by the same commit.

Law: nothing is kept between calls.  Spark makes a stream's writer again for each call of commit,
in another process, so a commit knows only what the tasks have told it.  Each call may be repeated.
"""

from __future__ import annotations

import logging
import os
import socket
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kdirect import failpoints
from kdirect.errors import (
    BrokerError,
    ConfigError,
    FencedRunError,
    KdirectError,
    ProducerFencedError,
    UnknownAttemptError,
)
from kdirect.format.error_codes import ErrorCode
from kdirect_spark import worker
from kdirect_spark.counts import WriterCounts

if TYPE_CHECKING:
    import pyarrow as pa

    from kdirect_spark.settings import SinkSettings

log = logging.getLogger("kdirect_spark")

# What a task knows of its streaming query: local properties that Spark sets for each micro-batch.
QUERY_ID, BATCH_ID, RUN_ID = "sql.streaming.queryId", "streaming.sql.batchId", "spark.jobGroup.id"

# In front of every identity, so that it is no transactional id of somebody's producer.
PREFIX = "spark-"

# What the broker answers to who writes in a transaction that was ended.
ENDED = (
    ErrorCode.INVALID_PRODUCER_EPOCH,
    ErrorCode.INVALID_TXN_STATE,
    ErrorCode.PRODUCER_FENCED,
)


@dataclass(frozen=True, slots=True)
class Job:
    """Who writes which batch.  `identity` is what one writer at a time may have; the batches of
    `query` are numbered, and `run` is a start of it."""

    identity: str
    query: str
    run: str
    batch: int


def job_of_batch(named: str | None) -> Job:
    """A batch write, which is the only batch of a query of its own.  A second one of the same name
    fences the first."""
    drawn = uuid.uuid4().hex
    return Job(PREFIX + (named or drawn), drawn, drawn, 0)


def job_of_task(named: str | None) -> Job:
    """The micro-batch that this task writes.  The identity of a query without a name is its id,
    which is in the checkpoint: a query that starts without its checkpoint is another one."""
    from pyspark import TaskContext

    context = TaskContext.get()
    found = [context and context.getLocalProperty(key) for key in (QUERY_ID, RUN_ID, BATCH_ID)]
    query, run, batch = found
    if not (query and run and batch):
        raise ConfigError(
            "Spark does not say which micro-batch this task writes",
            hint="set exactlyOnce=false, and report this Spark",
        )
    return Job(PREFIX + (named or query), query, run, int(batch))


class TaskAttempt:
    """What one task attempt writes.  Joins with its first rows; `finish` or `drop` ends it here,
    and only the commit of the batch, or an abort, ends it on the broker."""

    def __init__(self, settings: SinkSettings, job: Job) -> None:
        self._settings = settings
        self._job = job
        self._producer: Any = None
        self._attempt: tuple | None = None
        self._is_committed = False  # the whole batch, by a run before this one
        self.counts = WriterCounts()

    def send(self, batch: pa.RecordBatch) -> None:
        """Write the rows, unless the batch was committed before."""
        if self._is_committed:
            return
        if self._producer is None:
            self._join()
            if self._is_committed:
                return
            self.counts.begin(self._producer)
        self._producer.send_arrow(batch, self._settings.topic)
        failpoints.reached("sink, records are sent")

    def finish(self) -> tuple | None:
        """Wait until every record is acknowledged.  What the commit has to name; None: nothing."""
        if self._producer is not None:
            with self.counts.waiting():
                self._producer.flush()
            self.counts.end(self._producer, worker.session(self._settings.client))
            failpoints.reached("sink, records are flushed")
            self._producer.close()
        return self._attempt

    def explained(self, error: BaseException) -> KdirectError | None:
        """What to say in place of `error`, which the producer raised: where the broker has ended
        the attempt, why it has.  None: it has not, or nobody knows."""
        if self._attempt is None or not _is_ended(error):
            return None
        job = self._job
        what = f"the broker has ended what this task wrote of batch {job.batch} of {job.identity}"
        from kdirect.client.attempts import OPEN, Attempt

        try:
            state = worker.session(self._settings.client).check_attempt(
                job.identity, job.query, job.run, job.batch, Attempt(*self._attempt)
            )
        except FencedRunError as e:
            return e
        except UnknownAttemptError:
            return UnknownAttemptError(
                f"{what}: its run was given up meanwhile, or the task took longer than "
                f"transaction.timeout.ms ({self._settings.transaction_timeout_ms})",
                hint="nothing of it is seen, and Spark may run the task again; raise "
                "kafka.transaction.timeout.ms (and transaction.max.timeout.ms of the broker) if "
                "its tasks take that long",
            )
        except KdirectError as e:
            log.debug("%s; it is not known why: %s", what, e)
            return None
        if state == OPEN:
            return None
        return UnknownAttemptError(
            f"{what}: the batch is committed, with other attempts of its tasks",
            hint="nothing is lost, and nothing of this attempt is seen; Spark does not need it",
        )

    def drop(self) -> None:
        """The task has failed."""
        producer, self._producer = self._producer, None
        if producer is not None:
            try:
                producer.abort()
            except KdirectError as e:
                log.debug("giving up an attempt after a failure: %s", e)

    def _join(self) -> None:
        job = self._job
        attempt = worker.session(self._settings.client).join_attempt(
            job.identity,
            job.query,
            job.run,
            job.batch,
            timeout_ms=self._settings.transaction_timeout_ms,
            owner=owner(self._settings),
        )
        failpoints.reached("sink, an attempt has joined")
        if attempt is None:
            self._is_committed = True
            log.info("batch %d of %s is committed already", job.batch, job.identity)
            return
        self._attempt = tuple(attempt)
        self._producer = worker.session(self._settings.client).attempt_producer(attempt)


def _is_ended(error: BaseException | None) -> bool:
    """Is it by this error that a producer learns that its transaction is not open any more?"""
    while error is not None:
        if isinstance(error, ProducerFencedError):
            return True
        if isinstance(error, BrokerError) and error.code in ENDED:
            return True
        error = error.__cause__
    return False


def commit(settings: SinkSettings, job: Job, attempts: Sequence[tuple]) -> None:
    """Make what these attempts wrote visible, all of it or nothing; raises when nothing is."""
    failpoints.reached("sink, before the commit")
    worker.keep_session(settings.client)
    try:
        outcome = worker.session(settings.client).commit_attempts(
            job.identity, job.query, job.run, job.batch, _attempts(attempts), owner=owner(settings)
        )
    except UnknownAttemptError as e:
        raise UnknownAttemptError(
            e.message,
            hint="nothing of the batch was committed, and it may be written again; where its tasks "
            f"need more than transaction.timeout.ms ({settings.transaction_timeout_ms}), raise it "
            "(and transaction.max.timeout.ms of the broker)",
        ) from e
    failpoints.reached("sink, after the commit")
    log.debug("batch %d of %s: %s", job.batch, job.identity, outcome)


def abort(settings: SinkSettings, job: Job, attempts: Sequence[tuple], *, was_there: bool) -> str:
    """Give up whatever the run has open, and say what has become of the batch.  `attempts` are
    those of the tasks that have ended well: where the answer to their commit was lost, it may have
    been done.  What stays open is aborted by the next run, or after transaction.timeout.ms.

    `was_there`: one of its tasks has written, so a broker that is away is waited for within
    delivery.timeout.ms.  Otherwise the job may have failed for its wrong address, and whoever has
    to correct it is told after connect.timeout.ms."""
    session = worker.session(settings.client)
    known = not attempts  # nobody has asked for a commit
    try:
        if not was_there:
            session.cluster.control_connection()
        if attempts and _is_committed(session, job, attempts[0]):
            return "all of it is committed, and is not to be written again"
        known = True
        session.abort_attempts(job.identity, job.query, job.run)
    except KdirectError as e:
        waits = (
            f"it may stay open for transaction.timeout.ms ({settings.transaction_timeout_ms}): {e}"
        )
        if known:
            return f"nothing of it is committed; {waits}"
        return f"whether it is committed is not known: look before it is written again; {waits}"
    return "nothing of it is committed"


def _is_committed(session: Any, job: Job, attempt: tuple) -> bool:
    """Whether the batch is committed of which this attempt is."""
    from kdirect.client.attempts import ALREADY_COMMITTED

    (named,) = _attempts([attempt])
    try:
        state = session.check_attempt(job.identity, job.query, job.run, job.batch, named)
    except (UnknownAttemptError, FencedRunError):
        return False
    return bool(state == ALREADY_COMMITTED)


def owner(settings: SinkSettings) -> str:
    """Who this is, for an error that another writer of the same identity gets."""
    name = f" of query {settings.query_name}" if settings.query_name else ""
    where = f" with the checkpoint {settings.checkpoint}" if settings.checkpoint else ""
    return f"process {os.getpid()} on {socket.gethostname()}{name}{where}"


def _attempts(found: Sequence[tuple]) -> list[Any]:
    from kdirect.client.attempts import Attempt

    return [Attempt(*attempt) for attempt in found]
