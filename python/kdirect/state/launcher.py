"""Processes of executors: started, watched, ended, on this host or another one.

This file starts processes.  Owns: how an executor's process is started and what its end means.
What may not enter: when one is started again (`kdirect.state.coordinator_server`).

A launcher is anything with `start`.  `LocalLauncher` starts children of this process.  One for
other hosts hands ``settings.to_json()`` to a process there, in the environment variable
KDIRECT_EXECUTOR or as a line of standard input, and that process is ``python -m
kdirect.state.executor``, or one that calls
`kdirect.state.Executor.open(ExecutorSettings.from_json(...))`.  The settings hold the token of the
job: no command line may show them.  What `start` returns tells whether the process runs; a launcher
that cannot reach its host any more may leave the process there: the coordinator refuses it as soon
as another one was started in its place.
"""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Protocol

from kdirect.state.executor import ExecutorSettings

log = logging.getLogger("kdirect.state")

END_TIMEOUT_S = 10.0
SHOWN_BYTES = 2000


class ExecutorProcess(Protocol):
    """A process of an executor."""

    @property
    def name(self) -> str:
        """For messages: what and where."""

    def ended(self) -> str | None:
        """Why it ended, or None while it runs.  Asked for a few times a second: never blocks."""

    def end(self, timeout_s: float) -> None:
        """See that it is gone, as far as that can be done from here: it has `timeout_s` to leave by
        itself.  Raises nothing where its host does not answer."""


class Launcher(Protocol):
    """Starts executors."""

    def start(self, settings: ExecutorSettings) -> ExecutorProcess:
        """Start the process of one executor, with exactly these settings but for `memory`, the
        directory on its host below which it maps its state.  Returns at once."""


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
            try:
                self._process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                log.warning("%s was killed and is still there", self.name)
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
