"""Batch readers that read less than the options of a query say: only the offsets at which rows meet
its filters (`pushdown`), or no rows at all where only their number is asked for: the brokers know
it for most ranges (`BrokerView.counted`), and tasks read the others.

Law: planning is that of `KdirectBatchReader`, losses included, before anything is left out: what a
filter excludes is missed as before.

The shim says filters and counts with options.  Without it, PySpark calls `pushFilters`, if
`spark.sql.python.filterPushdown.enabled` is set.  If it is not, PySpark refuses every reader that
has this method, so only the process that is there to call it gets such a reader.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from kdirect.model import TopicPartition
from kdirect_spark import pushdown
from kdirect_spark.broker_view import BrokerView, ranges_of
from kdirect_spark.clear_errors import sentence_first
from kdirect_spark.offsets import Plan
from kdirect_spark.pushdown import ALL, Condition
from kdirect_spark.reading import read_range
from kdirect_spark.settings import SourceSettings
from kdirect_spark.shim_options import Pushed
from kdirect_spark.source import KdirectBatchReader

# The module that PySpark runs in a process of its own to hand filters to a reader.
FILTER_PROCESS = "pyspark.sql.worker.data_source_pushdown_filters"


def batch_reader(
    settings: SourceSettings, pushed: Pushed, schema: StructType
) -> KdirectBatchReader:
    """The reader of a batch query; `schema` is what Spark wants to have of it."""
    if pushed.counted is not None:
        return CountingReader(settings, pushed.condition or ALL, pushed.counted, schema.names)
    if pushed.condition is not None:
        return NarrowedReader(settings, pushed.condition)
    if is_filter_process() and settings.values is None:
        return FilteringReader(settings, ALL)
    return KdirectBatchReader(settings)


def is_filter_process() -> bool:
    """Whether this process is there to call `pushFilters`."""
    # Spark's daemon has the module's name as its argument; without a daemon the module is the
    # program.
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return FILTER_PROCESS in sys.argv or (spec is not None and spec.name == FILTER_PROCESS)


@sentence_first
class NarrowedReader(KdirectBatchReader):
    """Reads the offsets at which rows may meet `condition`."""

    def __init__(self, settings: SourceSettings, condition: Condition) -> None:
        super().__init__(settings)
        self._condition = condition

    def partitions(self) -> list[InputPartition]:
        view, plan = self.narrowed_plan()
        return view.input_partitions(plan, by_object=True)

    def narrowed_plan(self) -> tuple[BrokerView, Plan]:
        """What is read."""
        view, plan, _ = self.plan()
        condition = self._condition
        tps = {r.topic_partition for r in plan.ranges}
        wanted = sorted(tp for tp in tps if pushdown.may_be_in(condition, tp))
        by_time = {
            ms: view.first_offsets(dict.fromkeys(wanted, ms))
            for ms in pushdown.times_of(condition)
            if wanted
        }
        return view, replace(plan, ranges=pushdown.narrowed(plan.ranges, condition, by_time))


@sentence_first
class FilteringReader(NarrowedReader):
    """Takes filters from PySpark."""

    def pushFilters(self, filters: list[Any]) -> Iterable[Any]:
        self._condition, left = pushdown.from_filters(filters)
        return left


@dataclass(frozen=True)
class CountedPartition(InputPartition):
    """Numbers of rows that the planner knows, by topic partition."""

    rows: tuple[tuple[TopicPartition, int], ...]


@sentence_first
class CountingReader(NarrowedReader):
    """Counts rows, by some of the columns `topic` and `partition`.  A task gives a row of the
    columns `names`: those that are counted by, and one or more times their number.  Spark adds up.
    """

    def __init__(
        self, settings: SourceSettings, condition: Condition, by: tuple[str, ...], names: list[str]
    ) -> None:
        # Of a row that is only counted, the narrowest column is enough.
        super().__init__(replace(settings, columns=("partition",)), condition)
        self._by = by
        self._names = names

    def partitions(self) -> list[InputPartition]:
        view, plan = self.narrowed_plan()
        known = view.counted(plan.ranges)
        rows: dict[TopicPartition, int] = {}
        for r, n in known.items():
            rows[r.topic_partition] = rows.get(r.topic_partition, 0) + n
        rest = replace(plan, ranges=tuple(r for r in plan.ranges if r not in known))
        # There is always one, because the sum of no numbers would not be 0.
        counted = CountedPartition(tuple(rows.items()))
        return [counted, *view.input_partitions(rest, by_object=True)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if isinstance(partition, CountedPartition):
            counted = partition.rows
        else:
            rows: dict[TopicPartition, int] = {}
            for x in ranges_of(partition):
                tp = TopicPartition(x.topic, x.partition)
                found_here = sum(batch.num_rows for batch in read_range(self._settings, x))
                rows[tp] = rows.get(tp, 0) + found_here
            counted = tuple(rows.items())
        # A group without a row is none.
        found = [(tp, n) for tp, n in counted if n] if self._by else list(counted)
        if not self._by:
            found = [(TopicPartition("", 0), sum(n for _, n in found))]
        if found:
            yield self._rows(found)

    def _rows(self, counted: list[tuple[TopicPartition, int]]) -> pa.RecordBatch:
        columns: dict[str, pa.Array] = {}
        for name, by in zip(self._names, self._by, strict=False):
            columns[name] = (
                pa.array([tp.topic for tp, _ in counted], pa.string())
                if by == "topic"
                else pa.array([tp.partition for tp, _ in counted], pa.int32())
            )
        numbers = pa.array([n for _, n in counted], pa.int64())
        columns |= dict.fromkeys(self._names[len(self._by) :], numbers)
        return pa.RecordBatch.from_pydict(columns)
