"""Bench row of accelerated queries: started again with ten million keys in an open window, cold and
warm, beside Spark's own plan.

A stream counts records by key in a window that stays open, until it has ten million keys, and is
stopped.  A few records are written, and the query is started again; what counts are the seconds
from start() to the end of its first batch.  Spark's own plan loads its state from its checkpoint,
with its state store in memory and in RocksDB.  The accelerated query goes on with the state that is
mapped (warm), or, once that was removed, as if the host had restarted, with its snapshot and what
the log has behind it (cold).

Each system has a process and a Spark session of its own, so that none has memory that another one
needs.  It is started again in the session that filled it, which is warm by then; what Spark's state
stores keep of a query that was stopped is unloaded, so that the next start loads it.  Checkpoints
and snapshots are on tmpfs, so that nobody waits for a disk.  One round.  A start that takes longer
than PATIENCE_S is cut off, and its figure is the least that it can have been; a plan that cannot
fill its state in FILL_PATIENCE_S, or whose process dies, is named and not measured.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rows_slash import EXECUTORS, PARTITIONS, free_bytes
from rows_slash_spark import CHECKPOINTS, PATIENCE_S, SLASH, STORE, STORES, spark_session, unload
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
    """The query over the topic, filled and started again by one system."""

    def __init__(self, spark: Any, bootstrap: str, records: int, written: int) -> None:
        self._spark, self._bootstrap = spark, bootstrap
        self._records, self._written = records, written

    def _write(self) -> None:
        write(self._bootstrap, self._records, self._written, FEW)
        self._written += FEW

    def _frame(self) -> Any:
        return workload_queries.data_frame(
            lambda: self._spark.readStream,
            "ro_window",
            {name: stream.layout for name, stream in workload_of(self._records).streams.items()},
            {"ro": TOPIC},
            self._bootstrap,
            {"maxOffsetsPerTrigger": str(self._records // FILLS)},
            window="10 days",
        )

    def slash(self) -> dict[str, Any]:
        """Seconds of the first batch of a warm start and of a cold one, and what was loaded."""
        with (
            tempfile.TemporaryDirectory(prefix="kdirect-bench-state-", dir=CHECKPOINTS) as state,
            tempfile.TemporaryDirectory(prefix="kdirect-bench-memory-", dir=CHECKPOINTS) as memory,
            tempfile.TemporaryDirectory(
                prefix="kdirect-bench-checkpoint-", dir=CHECKPOINTS
            ) as checkpoint,
        ):
            found: dict[str, Any] = {}
            for start in (FILL, WARM, COLD):
                if start == COLD:
                    mapped = list(Path(memory).iterdir())
                    if not mapped:
                        raise RuntimeError("there is no mapped state, so no start is cold")
                    for path in mapped:
                        shutil.rmtree(path)
                if start != FILL:
                    self._write()
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
                    found["keys"] = figures["keys"]
                    found["snapshot_bytes"] = _newest(Path(state) / "snapshots")
            return found

    def own_plan(self, system: str) -> dict[str, Any]:
        """Seconds that filling took, and the first batch of Spark's own plan, started again; the
        latter only if it could fill its state."""
        self._spark.conf.set(STORE, STORES[system])
        with tempfile.TemporaryDirectory(
            prefix="kdirect-bench-checkpoint-", dir=CHECKPOINTS, ignore_cleanup_errors=True
        ) as checkpoint:
            try:
                filled, _ = started(self._frame(), checkpoint, FILL_PATIENCE_S, measures_all=True)
                if filled is None:
                    return {}
                unload(self._spark)
                self._write()
                took, _ = started(
                    self._frame(), checkpoint, PATIENCE_S, measures_all=False, goes_on=False
                )
                return {FILL: filled, COLD: PATIENCE_S if took is None else took}
            finally:
                unload(self._spark)


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


def workload_of(records: int) -> Any:
    return kdirect.workloads.ro(keys=records * 10 // 7, window="10 days", step_us=1)


def write(bootstrap: str, records: int, first: int, count: int) -> None:
    """`count` records more of the workload of so many `records`."""
    (stream,) = workload_of(records).streams.values()
    with kdirect.connect(bootstrap) as session:
        kdirect.workloads.write(
            session, stream, TOPIC, records=count, first=first, partitions=PARTITIONS
        )


def measured(system: str, bootstrap: str, records: int, written: int) -> dict[str, Any]:
    """What a process of its own finds out of a system; nothing when it died."""
    given = json.dumps([system, bootstrap, records, written])
    run = subprocess.run(
        [sys.executable, __file__, given], stdout=subprocess.PIPE, text=True, check=False
    )
    if run.returncode != 0:
        return {}
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    print(f"{ROW}: {system}: {found}", file=sys.stderr, flush=True)
    return found


def measure(system: str, bootstrap: str, records: int, written: int) -> None:
    """Be that process."""
    spark = spark_session()
    try:
        cold = Cold(spark, bootstrap, records, written)
        found = cold.slash() if system == SLASH else cold.own_plan(system)
    finally:
        spark.stop()
    print(json.dumps(found))


def slash_cold(seconds: float, quick: bool) -> list[Figure]:
    """A cold start against a warm one, and against Spark's two."""
    fits = (free_bytes() - JVM_BYTES) // RECORD_BYTES // 1_000_000 * 1_000_000
    records = QUICK_RECORDS if quick else max(1_000_000, min(RECORDS, fits))
    with kdirect.Broker() as broker:
        server = broker.bootstrap_servers
        written = records + FEW
        write(server, records, 0, written)
        found = {}
        for system in (SLASH, *reversed(STORES)):
            found[system] = measured(system, server, records, written)
            written += 2 * FEW  # the most that it wrote
    ours = found.pop(SLASH)
    if not ours:
        raise RuntimeError("the accelerated query was not measured")
    settings = {
        "keys": ours["keys"],
        "records": records,
        "batch_records": FEW,
        "snapshot_bytes": ours["snapshot_bytes"],
        "tasks": EXECUTORS,
        "lower_is_better": True,
    }
    what = "s from start() to the end of a batch"
    figures = [figure(ROW, ours[COLD], f"{what}, cold", WARM, ours[WARM], **settings)]
    for system, theirs in found.items():
        said = system if theirs else f"{system} (not measured)"
        for start in (COLD, WARM):
            figures.append(
                figure(ROW, ours[start], f"{what}, {start}", said, theirs.get(COLD), **settings)
            )
    return figures


if __name__ == "__main__":
    measure(*json.loads(sys.argv[1]))
