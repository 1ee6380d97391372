"""The exactly-once sink on a cluster of two workers, as a program: a copy that Spark runs
speculatively, a lost executor, and a task that writes after the commit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(420)
def test_copies_lost_executors_and_late_writes_on_a_cluster(tmp_path):
    run = subprocess.run(
        [sys.executable, str(ROOT / "tests/spark/sink_cluster.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "SPARK_LOCAL_IP": "127.0.0.1"},
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    assert "its copy counts" in run.stdout
    assert "writes late: refused" in run.stdout
