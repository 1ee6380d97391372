"""Writers of Spark's Python Data Source API: a batch write and the micro-batches of a stream.

Law: rows arrive as Arrow batches and leave through a producer (`kdirect.client`).  There is no loop
over records.  A task returns its commit message after the broker has acknowledged every record.

Exactly-once: a producer for each task attempt, whose records are visible when commit() says so
(`exactly_once`).  At-least-once: the producer of this worker process.  Records that a failed task
had sent stay in the topic then, so a task or a micro-batch that runs again leaves duplicates;
commit() has nothing to do, and abort() only logs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import datasource as api
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import ArrayType, BinaryType, DataType, IntegerType, StringType, StructType

from kdirect.errors import BrokerError, ConfigError, DeliveryError, KdirectError
from kdirect_spark import exactly_once, worker
from kdirect_spark.clear_errors import sentence_first
from kdirect_spark.counts import WriterCounts
from kdirect_spark.exactly_once import Job, TaskAttempt, job_of_batch, job_of_task
from kdirect_spark.patience import Patience
from kdirect_spark.settings import SinkSettings
from kdirect_spark.versions import SameVersion

log = logging.getLogger("kdirect_spark")

COLUMNS = ("value", "key", "headers", "topic", "partition")


@dataclass(frozen=True)
class Written(WriterCommitMessage):
    """How many rows a task was given, which the broker has acknowledged; with exactlyOnce, for whom
    they were written, and in which attempt (transactional id, producer id, epoch).  None: there
    were no rows, or their batch was committed before.  `counts`: for the metrics in the JVM
    (`counts.written_text`)."""

    rows: int
    job: Job | None = None
    attempt: tuple | None = None
    counts: str = ""


def check_schema(schema: StructType, settings: SinkSettings) -> None:
    """Raise ConfigError unless `schema` has the columns of Spark's Kafka sink, with types that can
    be written.  Other columns are ignored."""
    types = {field.name: field.dataType for field in schema.fields}
    if "value" not in types:
        raise ConfigError(
            f"the data to write has no column value (it has {', '.join(types) or 'none'})",
            hint="create it, for example with to_json(struct(...)) AS value",
        )
    for name in ("value", "key"):
        if name in types and not isinstance(types[name], StringType | BinaryType):
            raise _wrong_type(
                name, types[name], "string or binary", f"cast it: CAST({name} AS STRING)"
            )
    if settings.topic is None and "topic" not in types:
        raise ConfigError(
            "the sink does not know which topic to write to",
            hint="set the option topic, or give the data a column topic",
        )
    if settings.topic is None and not isinstance(types["topic"], StringType):
        raise _wrong_type("topic", types["topic"], "string", "cast it: CAST(topic AS STRING)")
    if "partition" in types and not isinstance(types["partition"], IntegerType):
        raise _wrong_type("partition", types["partition"], "int", "cast it: CAST(partition AS INT)")
    if "headers" in types and not _is_headers(types["headers"]):
        raise _wrong_type(
            "headers",
            types["headers"],
            "array<struct<key:string,value:binary>>",
            "build it with array(struct(... AS key, ... AS value))",
        )


def _is_headers(t: DataType) -> bool:
    if not isinstance(t, ArrayType) or not isinstance(t.elementType, StructType):
        return False
    fields = t.elementType.fields
    return [(f.name, type(f.dataType)) for f in fields] == [
        ("key", StringType),
        ("value", BinaryType),
    ]


def _wrong_type(column: str, found: DataType, wanted: str, remedy: str) -> ConfigError:
    return ConfigError(
        f"column {column} has type {found.simpleString()}; the sink takes {wanted}", hint=remedy
    )


TOO_LARGE = 10  # Kafka's MESSAGE_TOO_LARGE


class Largest:
    """The largest row of a task, which is the one to name when a record is too large."""

    def __init__(self) -> None:
        self._bytes = -1
        self._row = -1
        self._key: bytes | None = None

    def look_at(self, batch: pa.RecordBatch, rows_before: int) -> None:
        """A batch of rows, and how many rows came before it."""
        # Imported at first use, as below: queries that write nothing do not wait for it.
        import pyarrow.compute as pc

        sizes = pc.fill_null(pc.binary_length(batch.column("value")), 0)
        most = pc.max(sizes).as_py()
        if most > self._bytes:
            at = pc.index(sizes, most).as_py()
            key = batch.column("key")[at].as_py() if "key" in batch.schema.names else None
            self._bytes, self._row = most, rows_before + at
            self._key = key.encode() if isinstance(key, str) else key

    def refused(self, error: BaseException, topic: str | None) -> DeliveryError:
        """What to say of `error`, by which a record was refused as too large."""
        key = "no key" if self._key is None else f"the key {self._key[:60]!r}"
        return DeliveryError(
            f"{error.message if isinstance(error, KdirectError) else error}; the largest row of "
            f"this task is row {self._row}, with {key} and a value of {self._bytes} bytes",
            hint=f"raise max.message.bytes of {topic or 'its topic'}, or write less into one row",
        )


def is_too_large(error: BaseException | None) -> bool:
    """Was a batch of records refused for its size?"""
    while error is not None:
        if isinstance(error, BrokerError) and error.code == TOO_LARGE:
            return True
        error = error.__cause__
    return False


def reach_topics(session: Any, topic: str | None, batch: pa.RecordBatch) -> None:
    """Learn the partitions of the topics that `batch` is for (`topic`, else its column), so that
    the producer, which waits by itself for brokers that it has reached, sends all of it.

    A broker that is away is waited for within delivery.timeout.ms, if it was there before: this
    process has reached it, or the query has run a micro-batch.  Otherwise its address may be wrong,
    and the query fails after connect.timeout.ms."""
    import pyarrow.compute as pc

    cluster, limits = session.cluster, session.settings
    patience = Patience("the sink", limits["delivery.timeout.ms"])
    for name in [topic] if topic is not None else pc.unique(batch["topic"]).to_pylist():
        while name:  # a row without a topic is refused when it is sent
            try:
                cluster.partitions(name, create=limits["allow.auto.create.topics"])
                break
            except KdirectError as e:
                was_there = cluster.has_reached("control") or _is_later_batch()
                if not (was_there and patience.outlasts(e)):
                    raise


def _is_later_batch() -> bool:
    """Whether this task is of a micro-batch of a stream, and not of its first one."""
    context = TaskContext.get()
    batch_id = None if context is None else context.getLocalProperty(exactly_once.BATCH_ID)
    return batch_id is not None and batch_id.isdigit() and int(batch_id) > 0


class _AtLeastOnce:
    """What a task writes by the producer of its process."""

    def __init__(self, settings: SinkSettings) -> None:
        self._settings = settings
        self._producer: Any = None
        self.counts = WriterCounts()

    def send(self, batch: pa.RecordBatch) -> None:
        if self._producer is None:
            self._producer = worker.producer(self._settings.client)
            self.counts.begin(self._producer)
        self._producer.send_arrow(batch, self._settings.topic)
        if self._settings.real_time:
            # What comes meanwhile waits for this one, and is the next batch.
            self._producer.flush()

    def finish(self) -> None:
        if self._producer is not None:
            with self.counts.waiting():
                self._producer.flush()
            self.counts.end(self._producer, worker.session(self._settings.client))

    def explained(self, error: BaseException) -> None:
        """Nothing more is to be said."""

    def drop(self) -> None:
        # The next task must not send records of this one, nor see its failures.
        worker.drop_producer(self._settings.client)


class _Writer(SameVersion):
    """What both writers share.  It is pickled into every task, so it holds settings only."""

    def __init__(self, schema: StructType, settings: SinkSettings) -> None:
        check_schema(schema, settings)
        self._settings = settings
        worker.settle()  # Spark makes a stream's writer again for each micro-batch

    def _job(self) -> Job:
        """Who writes, asked in a task.  Only with exactlyOnce."""
        raise NotImplementedError

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """Send all batches and wait until every record is acknowledged."""
        settings = self._settings
        job = self._job() if settings.exactly_once else None
        attempt = TaskAttempt(settings, job) if job is not None else _AtLeastOnce(settings)
        largest = Largest()
        session: Any = None
        rows = 0
        try:
            # All are taken, even if they were committed before: operators of Spark keep their state
            # when their last row is taken.
            for batch in iterator:
                if batch.num_rows == 0:
                    continue
                batch = outgoing(batch)
                largest.look_at(batch, rows)
                if session is None:
                    worker.keep_session(settings.client)
                    session = worker.session(settings.client)
                reach_topics(session, settings.topic, batch)
                attempt.send(batch)
                rows += batch.num_rows
            attempted = attempt.finish()
            log.info("written: %d rows, %s", rows, attempt.counts.done)
            return Written(rows, job, attempted, attempt.counts.text(rows))
        except BaseException as e:
            attempt.drop()
            if is_too_large(e):
                raise largest.refused(e, settings.topic) from e
            if (ended := attempt.explained(e)) is not None:
                raise ended from e
            raise
        finally:
            worker.settle()

    def commit(self, messages: Sequence[Written | None], *_: int) -> None:
        """At-least-once: nothing to do, the records are in the topic already.  Exactly-once: make
        them visible."""
        done = [m for m in messages if m is not None]
        attempts = [m.attempt for m in done if m.attempt is not None]
        if attempts:
            assert done[0].job is not None
            exactly_once.commit(self._settings, done[0].job, attempts)
        worker.settle()

    def abort(self, messages: Sequence[Written | None], *_: int) -> None:
        done = [m for m in messages if m is not None]
        rows = sum(m.rows for m in done)
        if self._settings.exactly_once:
            job = self._job_of(done)
            became = "nothing of it is committed"
            if job is not None:
                attempts = [m.attempt for m in done if m.attempt is not None]
                became = exactly_once.abort(self._settings, job, attempts, was_there=bool(rows))
            log.warning("a write failed; %s", became)
            return
        log.warning(
            "a write failed; %d records of its finished tasks stay in the topic "
            "(exactlyOnce=false)",
            rows,
        )

    def _job_of(self, done: Sequence[Written]) -> Job | None:
        """Who has written, asked on the driver; None if no task has come to its end."""
        return done[0].job if done else None


def outgoing(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The columns of Spark's Kafka sink.  As there, others are ignored, even a timestamp."""
    return batch.select([name for name in COLUMNS if name in batch.schema.names])


@sentence_first
class KdirectWriter(_Writer, DataSourceArrowWriter):
    """Batch write: one transaction, or at-least-once."""

    def __init__(self, schema: StructType, overwrite: bool, settings: SinkSettings) -> None:
        if overwrite:
            raise ConfigError("a topic cannot be overwritten", hint='write with mode("append")')
        super().__init__(schema, settings)
        for text in settings.warnings:
            log.warning("%s", text)
        # Spark pickles this object into the tasks, and commits with the same one.
        self._drawn = job_of_batch(settings.exactly_once_id)

    def _job(self) -> Job:
        return self._drawn

    def _job_of(self, done: Sequence[Written]) -> Job:
        return self._drawn


class _StreamWriter(_Writer):
    """`overwrite` comes with output mode complete, which appends what comes, as in Spark's Kafka
    sink."""

    def __init__(self, schema: StructType, overwrite: bool, settings: SinkSettings) -> None:
        super().__init__(schema, settings)
        query = (settings.topic, settings.query_name, settings.checkpoint)
        worker.tell_once(settings.warnings, query)

    def _job(self) -> Job:
        return job_of_task(self._settings.exactly_once_id)


if hasattr(api, "DataSourceStreamArrowWriter"):

    @sentence_first
    class KdirectStreamWriter(_StreamWriter, api.DataSourceStreamArrowWriter):
        """Stream write: each micro-batch one transaction, or at-least-once."""

else:  # pyspark 4.0 passes rows to a stream's writer

    @sentence_first
    class KdirectStreamWriter(_StreamWriter, api.DataSourceStreamWriter):  # type: ignore[no-redef]
        """Stream write: each micro-batch one transaction, or at-least-once."""

        ROWS_PER_BATCH = 10_000

        def __init__(self, schema: StructType, overwrite: bool, settings: SinkSettings) -> None:
            super().__init__(schema, overwrite, settings)
            self._schema = schema

        def write(self, iterator: Iterator[Any]) -> Written:
            return super().write(self._batches(iterator))

        def _batches(self, rows: Iterator[Any]) -> Iterator[pa.RecordBatch]:
            from itertools import islice

            from pyspark.sql.pandas.types import to_arrow_schema

            schema = to_arrow_schema(
                StructType([f for f in self._schema.fields if f.name in COLUMNS])
            )
            while chunk := list(islice(rows, self.ROWS_PER_BATCH)):
                yield pa.RecordBatch.from_pylist(
                    [row.asDict(recursive=True) for row in chunk], schema=schema
                )
