"""One host of a job: runs a command, and executors of jobs that run on another host.

    python host.py ADDRESS PORT COMMAND ARGUMENTS...

The command (a broker) writes to the output of this program.  Whoever connects to the port says one
line of JSON.  ``{"executor": {...}}`` starts an executor with these settings, handed over in its
environment; the answer is a line with its process id, and one with its exit status when it has
ended.  The executor is killed when the connection closes, or when a line ``kill`` comes.
``{"forget": "/dev/shm/..."}`` removes a directory, as a restart of the host would; the answer is a
line.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import socketserver
import subprocess
import sys
import threading
from typing import Any, NoReturn


class Asked(socketserver.StreamRequestHandler):
    """One connection."""

    def handle(self) -> None:
        asked = json.loads(self.rfile.readline())
        if "forget" in asked:
            shutil.rmtree(asked["forget"], ignore_errors=True)
            self.wfile.write(b"forgotten\n")
            return
        self._serve(asked["executor"])

    def _serve(self, settings: dict[str, Any]) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", "kdirect.state.executor"],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "KDIRECT_EXECUTOR": json.dumps(settings)},
        )

        def kill_when_told() -> None:
            self.rfile.readline()
            process.kill()

        self.wfile.write(b"%d\n" % process.pid)
        threading.Thread(target=kill_when_told, daemon=True).start()
        try:
            self.wfile.write(b"%d\n" % process.wait())
            self.request.shutdown(socket.SHUT_RDWR)
        except OSError:
            process.wait()


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True


def main(address: str, port: str, *command: str) -> NoReturn:
    with Server((address, int(port)), Asked) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        sys.exit(subprocess.run(command, check=False).returncode)


if __name__ == "__main__":
    main(*sys.argv[1:])
