"""Accelerated queries on a standalone cluster of two workers, and the example, as programs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.spark


def _said(*command: str, timeout_s: float = 400) -> str:
    run = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "SPARK_LOCAL_IP": "127.0.0.1"},
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    return run.stdout


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_two_workers_of_a_cluster(tmp_path):
    said = _said(str(ROOT / "tests/spark/slash_cluster.py"), str(tmp_path))
    assert "as it is:" in said
    assert "an executor killed:" in said
    assert "the batch:" in said


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_the_example_writes_one_table_twice():
    said = _said(str(ROOT / "examples/slash.py"), "200000")
    assert re.search(r"the same \d{4} rows; \d+\.\d times", said), said
    assert "Keys: campaign" in said
