"""The source of an accelerated query: it plans micro-batches, and yields control rows for records.

Law: offsets, limits and triggers are those of the readers of `kdirect_spark.source`, one for each
input, which this one asks.  What is added is the epoch in the offset
(`kdirect_spark.epoch_offset`), and the job whose coordinator lives in this process from the first
micro-batch on.  It opens connections, files and a thread at first use only; Spark builds readers in
one process and uses them in another.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    SupportsTriggerAvailableNow,
)

from kdirect.errors import ConfigError, KdirectError
from kdirect.state.batches import Partition, Range, Ranges
from kdirect.state.planned_stream import PlannedJob
from kdirect_spark import offsets
from kdirect_spark.clear_errors import RefusedStreamReader, sentence_first
from kdirect_spark.epoch_offset import EpochOffset, new_query
from kdirect_spark.settings import SourceSettings, source_settings
from kdirect_spark.slash.batch_service import TOKEN, Address, Request
from kdirect_spark.slash.control_row import COLUMN, DDL, BatchRow, ControlRow
from kdirect_spark.slash.job_spec import OPTION, JobSpec
from kdirect_spark.slash.task import figures_of
from kdirect_spark.source import KdirectBatchReader, KdirectStreamReader

log = logging.getLogger("kdirect_spark.slash")

FORMAT = "kdirect_slash"


@dataclass(frozen=True)
class ControlPartition(InputPartition):
    """One task: the control row that it gets."""

    text: str


@sentence_first
class KdirectSlashSource(DataSource):
    """`accelerate` reads by this format; nobody else does."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        return DDL

    def reader(self, schema: Any) -> DataSourceReader:
        return SlashBatchReader(
            JobSpec.from_text(self.options.get(OPTION)), Address.from_text(self.options.get(TOKEN))
        )

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        try:
            return SlashStreamReader(JobSpec.from_text(self.options.get(OPTION)))
        except ConfigError as e:
            return RefusedStreamReader(e)


@sentence_first
class SlashBatchReader(DataSourceReader):
    """A batch query: what it reads is resolved whenever it is planned."""

    def __init__(self, spec: JobSpec, service: Address) -> None:
        self._spec = spec
        self._service = service
        self._readers = [
            KdirectBatchReader(source_settings(given, streaming=False)) for given in spec.inputs
        ]

    def partitions(self) -> list[InputPartition]:
        ranges: Ranges = {}
        ends: Ranges = {}
        for reader in self._readers:
            _, plan, watermarks = reader.plan()
            for (topic, partition), (low, high) in watermarks.items():
                tp = Partition(topic, partition)
                ends[tp] = Range(low, max(low, high))
                ranges[tp] = Range(high, high)
            for part in plan.ranges:
                ranges[Partition(*part.topic_partition)] = Range(part.start, part.stop)
        request = Request(spec=self._spec, ranges=ranges, ends=ends).to_text()
        run = new_query()
        return [
            ControlPartition(
                BatchRow(
                    run=run,
                    task=task,
                    executors=self._spec.executors,
                    host=self._service.host,
                    port=self._service.port,
                    token=self._service.token,
                    request=request,
                ).to_text()
            )
            for task in range(self._spec.executors)
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return control_rows(partition)


def control_rows(partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """What a task gets; Spark passes another partition for a plan without any."""
    if isinstance(partition, ControlPartition):
        yield pa.record_batch({COLUMN: pa.array([partition.text])})


@sentence_first
class SlashStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """See the module.  Used from one thread of the planner's process."""

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        settings = [source_settings(given, streaming=True) for given in spec.inputs]
        self._settings: list[SourceSettings] = settings
        self._readers = [KdirectStreamReader(one) for one in settings]
        self._topics = [given.topic for given in spec.plan.inputs]
        self._query: str | None = None
        self._job: PlannedJob | None = None
        self._told = -1  # the newest batch of which a line was logged

    # -- offsets -----------------------------------------------------------------------------------

    def initialOffset(self) -> dict:
        found: dict[str, Any] = {}
        for reader in self._readers:
            found.update(reader.initialOffset())
        if self._query is None:
            self._query = new_query()
        return EpochOffset(query=self._query, epoch=0, offsets=found).to_json()

    def getDefaultReadLimit(self) -> Any:
        limits = [reader.getDefaultReadLimit() for reader in self._readers]
        if len(limits) == 1:
            return limits[0]
        # Each input has its own limit, which `latestOffset` uses; Spark only hands this one back.
        return next(
            (limit for limit in limits if not isinstance(limit, ReadAllAvailable)),
            ReadAllAvailable(),
        )

    def latestOffset(self, start: dict, limit: Any) -> dict:
        self._tell_of_batch()
        at = EpochOffset.from_json(start)
        found: dict[str, Any] = {}
        for reader, topic in zip(self._readers, self._topics):
            own = limit if len(self._readers) == 1 else self._own_limit(reader, limit)
            found.update(reader.latestOffset(at.of([topic]), own))
        if found == at.offsets and not self._closes_more(found):
            return start
        return EpochOffset(query=at.query, epoch=at.epoch + 1, offsets=found).to_json()

    @staticmethod
    def _own_limit(reader: KdirectStreamReader, limit: Any) -> Any:
        return limit if isinstance(limit, ReadAllAvailable) else reader.getDefaultReadLimit()

    def _closes_more(self, found: dict[str, Any]) -> bool:
        """Would a batch without records emit windows, because partitions have become idle?"""
        if self._job is None or all(i.idle_timeout_ms is None for i in self._spec.plan.inputs):
            return False
        return self._job.would_close(self._ends(found))

    def reportLatestOffset(self) -> dict | None:
        found: dict[str, Any] = {}
        for reader in self._readers:
            found.update(reader.reportLatestOffset() or {})
        return found or None

    def prepareForTriggerAvailableNow(self) -> None:
        for reader in self._readers:
            reader.prepareForTriggerAvailableNow()

    def commit(self, end: dict) -> None:
        done = EpochOffset.from_json(end)
        for reader, topic in zip(self._readers, self._topics):
            reader.commit(done.of([topic]))

    # -- batches -----------------------------------------------------------------------------------

    def partitions(self, start: dict, end: dict) -> list[InputPartition]:
        begin, stop = EpochOffset.from_json(start), EpochOffset.from_json(end)
        if stop.epoch == 0 or start == end:
            return []
        job = self._opened(stop.query)
        batch = stop.epoch - 1
        ids: dict[str, str] = {}
        for reader, topic in zip(self._readers, self._topics):
            ids.update(reader.topic_ids([topic]))
        job.check_topics(ids)  # first: what is lost of the source is not what the state is about
        job.plan(batch, self._ranges(begin, stop), self._ends(stop.offsets))
        return [
            ControlPartition(ControlRow(batch=batch, task=task, settings=job.settings).to_text())
            for task in range(self._spec.executors)
        ]

    def _ranges(self, begin: EpochOffset, stop: EpochOffset) -> Ranges:
        """What every partition has in the batch; where nothing is new, nothing."""
        found: Ranges = {}
        for reader, topic in zip(self._readers, self._topics):
            ends = offsets.from_json(stop.of([topic]), "end offset")
            for tp, at in ends.items():
                found[Partition(tp.topic, tp.partition)] = Range(at, at)
            plan = reader.plan(begin.of([topic]), stop.of([topic]))
            for part in () if plan is None else plan.ranges:
                tp = part.topic_partition
                found[Partition(tp.topic, tp.partition)] = Range(part.start, part.stop)
        return found

    def _ends(self, found: dict[str, Any]) -> Ranges:
        """First and next offset of every partition, as the brokers say now."""
        ends: Ranges = {}
        for reader, topic in zip(self._readers, self._topics):
            for tp, (low, high) in reader.watermarks({topic: found.get(topic, {})}).items():
                ends[Partition(tp.topic, tp.partition)] = Range(low, max(low, high))
        return ends

    def _opened(self, query: str) -> PlannedJob:
        if self._job is None:
            spec = self._spec
            if spec.logs:
                tell_all()
            self._job = PlannedJob(
                spec.plan,
                self._settings[0].task_client,
                executors=spec.executors,
                directory=state_directory(spec, query),
                options=spec.resolved_options(),
                mode=spec.mode,
                caller=query,
            )
            log.info("%s: the state of this query is in %s", spec.name, self._job.directory)
        return self._job

    def _tell_of_batch(self) -> None:
        """One line for each batch that is done."""
        if self._job is None or not self._spec.logs:
            return
        batch, counts, closes = self._job.figures()
        if batch > self._told:
            self._told = batch
            figures = figures_of(batch, counts, closes)
            log.info("%s: %s", self._spec.name, " ".join(f"{k}={v}" for k, v in figures.items()))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return control_rows(partition)

    def stop(self) -> None:
        with contextlib.suppress(KdirectError):
            self._tell_of_batch()
        if self._job is not None:
            self._job.close()
        for reader in self._readers:
            reader.stop()


def state_directory(spec: JobSpec, query: str) -> Path:
    """Where the state of a query is: the directory that was asked for, or one by its name."""
    if spec.state_dir is not None:
        return Path(spec.state_dir)
    return Path(spec.state_root, hashlib.sha256(query.encode()).hexdigest()[:32])


def tell_all() -> None:
    """Let this process write a line for each batch to its standard error, which is the driver's
    log: nothing else sets up Python's logging in a planner."""
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False
