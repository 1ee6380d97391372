"""The servers of the tests end with the process that started them, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT, wait_until

START = """
import sys, time
from pathlib import Path
from tests.object_servers import FakeGcs, S3Proxy

kind, directory, *jars = sys.argv[1:]
place = Path(directory)
server = S3Proxy(place, [Path(jar) for jar in jars]) if kind == "s3" else FakeGcs(place)
print(server.process.pid, flush=True)
time.sleep(100)
"""


@pytest.mark.parametrize("kind", ["s3", "gcs"])
def test_a_server_ends_with_who_started_it(
    kind: str, tmp_path: Path, s3proxy_jars: list[Path]
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", START, kind, str(tmp_path), *map(str, s3proxy_jars)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        server = int(parent.stdout.readline())
        try:
            os.kill(server, 0)
        finally:
            parent.send_signal(signal.SIGKILL)
    wait_until(lambda: not runs(server), f"the end of server {server}")


def runs(pid: int) -> bool:
    """Does it?  One that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
