"""The same requests to Apache Kafka itself and to our broker: what differs has a reason."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ROOT = Path(__file__).resolve().parents[2]


def test_every_difference_has_a_reason(broker_jars):
    """All APIs in all versions that both speak.  In a process of its own, as `make versus-kafka`
    runs it, but a reason that nothing needs any more is none of this test's business."""
    command = [sys.executable, str(ROOT / "bench/versus/answers.py"), "--check", "--idle-reasons"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    found = re.search(r"answers: (\d+) calls, (\d+) differences", done.stdout)
    assert found is not None, done.stdout
    assert int(found[1]) > 1000 and int(found[2]) > 0  # both were asked, and are not the same
