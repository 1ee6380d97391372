"""Processes of executors on this host: started, watched, ended.

This file starts processes.  Owns: how an executor's process is started and what its end means.
What may not enter: when one is started again (`kdirect.state.stream_job`).

A launcher is anything with `start`: tests pass one whose processes kill themselves at a step, and a
job of several hosts one that starts them there.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Protocol

from kdirect.state.executor import ExecutorSettings

END_TIMEOUT_S = 10.0
SHOWN_BYTES = 2000


class ExecutorProcess(Protocol):
    """A process of an executor."""

    @property
    def name(self) -> str:
        """For messages: what and where."""

    def ended(self) -> str | None:
        """Why it ended, or None while it runs."""

    def end(self, timeout_s: float) -> None:
        """See that it is gone: it has `timeout_s` to leave by itself."""


class Launcher(Protocol):
    """Starts executors."""

    def start(self, settings: ExecutorSettings) -> ExecutorProcess:
        """Start the process of one executor."""


class LocalProcess:
    """A child of this process."""

    def __init__(self, settings: ExecutorSettings, command: Sequence[str]) -> None:
        self._executor = settings.executor
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        # A new program, never a fork that goes on: devices and threads of this process stay here.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stderr=self._errors, close_fds=True
        )
        assert self._process.stdin is not None
        # A process that has ended already does not read them: `ended` says why.
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(settings.to_json().encode() + b"\n")

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def name(self) -> str:
        return f"executor {self._executor} (process {self._process.pid})"

    def ended(self) -> str | None:
        status = self._process.poll()
        if status is None:
            return None
        how = f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
        return f"{self.name} {how}{self._said()}"

    def end(self, timeout_s: float) -> None:
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(END_TIMEOUT_S)
        self._errors.close()

    def _said(self) -> str:
        """The end of what it wrote to standard error."""
        if self._errors.closed:
            return ""
        size = self._errors.seek(0, 2)
        self._errors.seek(max(0, size - SHOWN_BYTES))
        text = self._errors.read().decode(errors="replace").strip()
        return f": {text.splitlines()[-1]}" if text else ""


class LocalLauncher:
    """Starts executors as children of this process."""

    def __init__(self, command: Sequence[str] | None = None) -> None:
        self._command = tuple(command or (sys.executable, "-m", "kdirect.state.executor"))

    def start(self, settings: ExecutorSettings) -> LocalProcess:
        return LocalProcess(settings, self._command)
