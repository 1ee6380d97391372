"""The programs that show the state engine run to their end, and show something."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def output(*command: str) -> str:
    run = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_the_example_of_clicks_runs_to_its_end() -> None:
    said = output(str(ROOT / "examples/clicks.py"))
    # Ten seconds of clicks: the last of five windows has not ended.
    assert sum(map(int, re.findall(r"(\d+) windows of a campaign", said))) == 4 * 100
    clicks, sent = map(int, re.findall(r"(\d+) clicks, (\d+) bytes of deltas\n$", said)[0])
    assert 330_000 < clicks < 337_000
    assert 0 < sent < 100_000


def test_the_job_of_the_readme_gives_each_auction_in_each_minute() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    (block,) = [b for b in blocks if "kdirect.state.run" in b]
    # A bid in 46 of 50 events a millisecond apart: nine minutes, of which the last is open.
    assert re.fullmatch(r"0 \d{3} prices from 500000 bids\n", output("-c", block))
