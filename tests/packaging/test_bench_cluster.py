"""`make bench-cluster` with a handful of partitions: that it works to its end, which is where it
counts the records."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What its lines begin with, in their order; between them it says what the brokers hold.
STEPS = (
    "6 partitions of factor 3 are created",
    "then all have a leader, and all replicas are in sync",
    "then the first record to each, acks=all",
    "then 12 replicas are written by their leaders",
    "then another record to each, acks=all",
    r"broker \d is killed; until all have another leader",
    "then a record to each, acks=all",
    "it is started again; until all are in sync",
    "then 12 replicas are written by their leaders",
    "then a record to each, acks=all",
)


@pytest.mark.timeout(180)
def test_a_few_partitions_are_made_written_and_led_again(tmp_path: Path) -> None:
    program = ("-m", "bench.many_partitions", "--partitions", "6", "--idle", "0.1")
    run = subprocess.run(
        [sys.executable, *program, "--directory", str(tmp_path / "logs")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},  # the package is the installed one
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    timed = re.findall(r"^(.*?) +\d+\.\d\d s$", run.stdout, re.MULTILINE)
    assert len(timed) == len(STEPS), run.stdout
    assert all(re.fullmatch(step, line) for step, line in zip(STEPS, timed, strict=True)), timed
    held = re.findall(r"^broker \d: \d+ descriptors .*\d+ threads", run.stdout, re.MULTILINE)
    assert len(held) == 6
