"""Bench row of accelerated queries: started again with ten million keys in an open window, cold and
warm, beside Spark's own plan.

A stream counts records by key in a window that stays open, until it has ten million keys, and is
stopped.  A few records are written, and the query is started again; what counts are the seconds
from start() to the end of its first batch.  Spark's own plan loads its state from its checkpoint,
with its state store in memory and in RocksDB.  The accelerated query goes on with the state that is
mapped (warm), or, once that was removed, as if the host had restarted, with its snapshot and what
the log has behind it (cold).

All runs are in one Spark session, which is warm by then; what Spark's state stores keep of a query
that was stopped is unloaded, so that its restart loads it.  Checkpoints and snapshots are on tmpfs,
so that nobody waits for a disk.  One round.  A start that takes longer than PATIENCE_S is cut off,
and its figure is the least that it can have been; a plan that cannot fill its state in
FILL_PATIENCE_S is named and not measured.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from rows_slash import EXECUTORS, PARTITIONS, free_bytes
from rows_slash_spark import CHECKPOINTS, PATIENCE_S, STORE, STORES, spark_session
from sides import Figure, figure

import kdirect
import kdirect.workloads
from kdirect.state import snapshots
from kdirect_spark import slash
from kdirect_spark.slash import workload_queries

ROW = "slash-cold"
TOPIC = "cold"
RECORDS, QUICK_RECORDS = 14_000_000, 140_000  # half of twice as many keys and a half occur
JVM_BYTES = 8 << 30  # that Spark's driver may take
RECORD_BYTES = 400  # of topic, state and checkpoints, at most, for each record
FILLS = 4  # batches that fill the state; a small one follows, in which their snapshot is taken
FEW = 10_000  # records of a small batch
FILL_PATIENCE_S = 480.0
FILL, WARM, COLD = "fill", "warm", "cold"


class Cold:
    """A topic, and the query over it, filled and started again by one system after another."""

    def __init__(self, spark: Any, session: Any, bootstrap: str, records: int) -> None:
        self._spark, self._session, self._bootstrap = spark, session, bootstrap
        self.records = records
        self._workload = kdirect.workloads.ro(keys=records * 10 // 7, window="10 days", step_us=1)
        self._written = 0
        self.keys = 0
        self.snapshot_bytes = 0
        self.write(records + FEW)

    def write(self, records: int) -> None:
        (stream,) = self._workload.streams.values()
        kdirect.workloads.write(
            self._session,
            stream,
            TOPIC,
            records=records,
            first=self._written,
            partitions=PARTITIONS,
        )
        self._written += records

    def _frame(self) -> Any:
        return workload_queries.data_frame(
            lambda: self._spark.readStream,
            "ro_window",
            {name: stream.layout for name, stream in self._workload.streams.items()},
            {"ro": TOPIC},
            self._bootstrap,
            {"maxOffsetsPerTrigger": str(self.records // FILLS)},
            window="10 days",
        )

    def slash(self) -> tuple[float, float]:
        """Seconds of the first batch of a warm start and of a cold one."""
        with (
            tempfile.TemporaryDirectory(prefix="kdirect-bench-state-", dir=CHECKPOINTS) as state,
            tempfile.TemporaryDirectory(prefix="kdirect-bench-memory-", dir=CHECKPOINTS) as memory,
            tempfile.TemporaryDirectory(
                prefix="kdirect-bench-checkpoint-", dir=CHECKPOINTS
            ) as checkpoint,
        ):
            found: dict[str, float] = {}
            for start in (FILL, WARM, COLD):
                if start == COLD:
                    for mapped in Path(memory).iterdir():
                        shutil.rmtree(mapped)
                if start != FILL:
                    self.write(FEW)
                accelerated = slash.accelerate(
                    self._frame(),
                    stateDir=state,
                    executors=EXECUTORS,
                    options={"state_memory": memory},
                    snapshotInterval="0s" if start == FILL else None,
                )
                patience_s = FILL_PATIENCE_S if start == FILL else PATIENCE_S
                took, reports = started(
                    accelerated, checkpoint, patience_s, measures_all=start == FILL
                )
                if took is None:
                    raise RuntimeError(f"the {start} start took longer than {patience_s} s")
                found[start] = took
                if start == FILL:
                    figures = reports[-1]["observedMetrics"]["slash"]["figures"]
                    self.keys = figures["keys"]
                    self.snapshot_bytes = _newest(Path(state) / "snapshots")
            return found[WARM], found[COLD]

    def own_plan(self, system: str) -> float | None:
        """Seconds of the first batch of Spark's own plan, started again; None if it could not fill
        its state."""
        self._spark.conf.set(STORE, STORES[system])
        with tempfile.TemporaryDirectory(
            prefix="kdirect-bench-checkpoint-", dir=CHECKPOINTS, ignore_cleanup_errors=True
        ) as checkpoint:
            try:
                filled, _ = started(self._frame(), checkpoint, FILL_PATIENCE_S, measures_all=True)
                if filled is None:
                    return None
                self._unload()
                self.write(FEW)
                took, _ = started(
                    self._frame(), checkpoint, PATIENCE_S, measures_all=False, goes_on=False
                )
                return PATIENCE_S if took is None else took
            finally:
                self._unload()

    def _unload(self) -> None:
        """What the state stores of stopped queries keep in this JVM goes."""
        package = self._spark.sparkContext._jvm.org.apache.spark.sql.execution.streaming.state
        getattr(getattr(package, "StateStore$"), "MODULE$").stop()


def started(
    frame: Any, checkpoint: str, patience_s: float, *, measures_all: bool, goes_on: bool = True
) -> tuple[float | None, list[Any]]:
    """Seconds from start() to the end of the first batch, or of all that there is; None if that did
    not come.  And the reports of the batches.  A query that goes on later ends in good order: Spark
    may run a batch without records behind the last one."""
    began = time.monotonic()
    query = (
        frame.writeStream.format("noop")
        .outputMode("append")
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    try:
        took = None
        while took is None and time.monotonic() < began + patience_s:
            ended = not query.isActive
            if ended if measures_all else any(p["numInputRows"] for p in query.recentProgress):
                took = time.monotonic() - began
            elif ended:
                raise RuntimeError(f"the query ended without a batch: {query.exception()}")
            else:
                time.sleep(0.005)
        if took is not None and goes_on:
            query.awaitTermination(PATIENCE_S)
        if query.exception() is not None:
            raise RuntimeError(str(query.exception()))
        return took, [p for p in query.recentProgress if p["numInputRows"]]
    finally:
        query.stop()


def _newest(root: Path) -> int:
    """Bytes of the newest snapshot."""
    directory = snapshots.snapshot_directory(root, snapshots.batches_of(root)[0])
    return sum(path.stat().st_size for path in directory.iterdir())


def slash_cold(seconds: float, quick: bool) -> list[Figure]:
    """A cold start against a warm one, and against Spark's two."""
    fits = (free_bytes() - JVM_BYTES) // RECORD_BYTES // 1_000_000 * 1_000_000
    records = QUICK_RECORDS if quick else max(1_000_000, min(RECORDS, fits))
    with kdirect.Broker() as broker, kdirect.connect(broker.bootstrap_servers) as session:
        spark = spark_session()
        try:
            trial = Cold(spark, session, broker.bootstrap_servers, records)
            warm, cold = trial.slash()
            others = {system: trial.own_plan(system) for system in STORES}
        finally:
            spark.stop()
    settings = {
        "keys": trial.keys,
        "records": records,
        "batch_records": FEW,
        "snapshot_bytes": trial.snapshot_bytes,
        "tasks": EXECUTORS,
        "lower_is_better": True,
    }
    what = "s from start() to the end of a batch"
    figures = [figure(ROW, cold, f"{what}, cold", WARM, warm, **settings)]
    for system, took in others.items():
        for name, ours in ((COLD, cold), (WARM, warm)):
            said = system if took is not None else f"{system}: not filled in {FILL_PATIENCE_S:g} s"
            figures.append(figure(ROW, ours, f"{what}, {name}", said, took, **settings))
    return figures
