"""A part of the scenarios, in a process of its own: a session's jars are chosen when its JVM
starts.  ``make parity`` runs all of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parity import run
from tests.parity.differences import KNOWN
from tests.parity.scenario import SCENARIOS

ROOT = Path(__file__).resolve().parents[2]
# One of each kind: batches, losses, transactions, the sink, streams and their checkpoints.
CHOSEN = (
    "a range by time: starts and ends of partitions",
    "no headers, several, and two of one name",
    "offsets that were deleted are refused",
    "one DataFrame over transactions, read_committed",
    "keys choose the partition as Kafka's murmur2 does",
    "maxOffsetsPerTrigger divides the backlog",
    "a checkpoint of the other format is continued",
    "a stream's column names the topic",
)


def test_differences_are_of_scenarios() -> None:
    assert set(KNOWN) <= {case.name for case in SCENARIOS}
    assert len(SCENARIOS) >= 200


def test_the_page_has_the_table_of_a_whole_run() -> None:
    table = run.PAGE.read_text().split(run.BEGIN)[1].split(run.END)[0]
    assert table.startswith(f"Of {len(SCENARIOS)} scenarios")
    assert {line.split(" | ")[0][2:] for line in table.splitlines() if "`" in line} == set(KNOWN)


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_both_formats_come_out_alike(connector_jars: list[Path]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.parity.run", "--names", *CHOSEN],
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert f"{len(CHOSEN)} scenarios, 0 wrong" in done.stdout
