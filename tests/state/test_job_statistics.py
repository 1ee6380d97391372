"""The counters of a job are those of the table of metrics, and they count."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kdirect
from kdirect import metrics
from kdirect.client.session import Session
from kdirect.state import snapshots
from kdirect.state.launcher import LocalLauncher
from kdirect.state.stream_job import run
from tests.state import jobs

RECORDS = 30_000
SMALL: dict[str, Any] = {
    "executors": 2,
    "epoch_bytes": 100_000,
    "slot_bytes": 4096,
    "block_rows": 500,
}


@pytest.fixture
def session(broker: Any) -> Iterator[Session]:
    with kdirect.connect(broker.bootstrap_servers) as made:
        yield made


def test_what_a_job_does_is_counted(
    broker: Any, session: Session, seed: int, tmp_path: Path
) -> None:
    first, second = np.array_split(jobs.events(seed, RECORDS), 2)
    options = {**SMALL, "directory": tmp_path, "snapshot_interval": 0, "adaptive_ratio": 0.0}
    jobs.write(session, first, 2)
    with run(jobs.plan(), broker.bootstrap_servers, **options) as job:
        _, table = next(job)
        seen = job.statistics()
        assert set(seen) == metrics.names("state")
        assert (seen["batches"], seen["attempts"], seen["restores"]) == (0, 1, 2)
        assert (seen["rows"], seen["late"]) == (len(first), 0)
        assert seen["input_bytes"] >= first.nbytes
        assert seen["epochs"] >= first.nbytes // SMALL["epoch_bytes"]
        assert 0 < seen["deltas"] <= seen["epochs"]
        assert seen["merged"] == seen["sent_entries"] > 0
        assert seen["sent_tuples"] == 0
        # A page each at least, and a buffer that ends each epoch.
        assert seen["sent_buffers"] >= seen["deltas"] + seen["epochs"]
        assert seen["sent_bytes"] > 24 * seen["sent_entries"]
        assert seen["rows_out"] == table.num_rows > 0
        assert seen["state_bytes"] > 0
        assert seen["snapshots"] == seen["snapshot_bytes"] == 0
        jobs.write(session, np.concatenate([second, first[:50]]), 2)
        _, more = next(job)
        seen = job.statistics()
        assert (seen["batches"], seen["late"]) == (1, 50)
        assert seen["rows"] == RECORDS + 50
        assert seen["rows_out"] == table.num_rows + more.num_rows
        assert job.batch_counts["rows"] == len(second) + 50
        assert job.batch_counts["state_bytes"] == seen["state_bytes"]
    # The one after the first batch, which was being written: the end waited for it.
    seen = job.statistics()
    assert seen["snapshots"] == 1
    files = tmp_path.glob("snapshots/*/*")
    parts = [file for file in files if file.name != snapshots.MANIFEST]
    assert seen["snapshot_bytes"] == sum(part.stat().st_size for part in parts) > 0


def test_an_executor_that_waits_for_another_one_counts_that(
    broker: Any, session: Session, seed: int
) -> None:
    """Executor 1 has nothing to read, and executor 0 sleeps at each of its blocks."""
    jobs.write(session, jobs.events(seed, 1000), 1)
    program = str(Path(__file__).with_name("far_executor.py"))
    with run(
        jobs.plan(),
        broker.bootstrap_servers,
        executors=2,
        block_rows=50,
        launcher=LocalLauncher((sys.executable, program, "slow")),
    ) as job:
        next(job)
        assert job.statistics()["waits"] > 0


def test_rows_that_are_sent_as_they_are_count_as_tuples(
    broker: Any, session: Session, seed: int
) -> None:
    jobs.write(session, jobs.events(seed, RECORDS), 2)
    options = {**SMALL, "mode": "uppar", "until": "latest"}
    with run(jobs.plan(), broker.bootstrap_servers, **options) as job:
        list(job)
        seen = job.statistics()
    assert seen["sent_entries"] == 0
    assert RECORDS // 4 < seen["sent_tuples"] < 3 * RECORDS // 4
    assert seen["merged"] == seen["sent_tuples"]


def test_keys_that_hardly_repeat_are_sent_as_tuples_and_frequent_ones_as_entries(
    broker: Any, session: Session, seed: int
) -> None:
    """The batches differ in their keys only; the estimate begins after 2,048 rows for a leader."""
    frequent_rows = jobs.events(seed, RECORDS)
    rare_rows = jobs.events(seed, RECORDS, 1 << 40, jobs.FIRST_MS + RECORDS // 10)
    jobs.write(session, frequent_rows, 2)
    options = {**SMALL, "epoch_bytes": 64 << 20}
    tables, counts = [], []
    with run(jobs.plan(), broker.bootstrap_servers, **options) as job:
        for number in range(2):
            if number:
                jobs.write(session, rare_rows, 2)
            tables.append(next(job)[1])
            counts.append(job.batch_counts)
    frequent, rare = counts
    assert frequent["sent_tuples"] == 0
    # An entry at most for each key, window, executor and other executor.
    assert 0 < frequent["sent_entries"] <= 40 * (RECORDS // 10_000 + 1) * 2
    assert rare["sent_tuples"] > RECORDS // 4
    assert rare["sent_entries"] < rare["sent_tuples"]
    assert rare["merged"] == rare["sent_tuples"] + rare["sent_entries"]
    jobs.assert_same(jobs.rows_of(tables), jobs.expected(session))
