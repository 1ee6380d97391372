"""Writes the parts of snapshots while the next batches run.

Owns: the thread of an executor that does so.  It gets copies, so it shares nothing with batches;
checksums and writes run without the GIL.  What may not enter: the form of a part
(`kdirect.state.snapshots`), and what is told to whom when it is on disk.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias

from kdirect.state.batches import Part
from kdirect.state.snapshots import Section

log = logging.getLogger("kdirect.state")

Write: TypeAlias = Callable[[Sequence[Section], Callable[[], bool]], Part | None]


class SnapshotWriter:
    """Takes one copy at a time: the memory of an executor's copy is bounded by its state's.

    `write`, `wait` and `close` are called from the thread of the executor."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._given_up = threading.Event()
        self._steps = 0  # of the thread

    @property
    def is_busy(self) -> bool:
        """Is a part being written?"""
        return self._thread is not None and self._thread.is_alive()

    def steps_taken(self) -> int:
        """How many steps the thread has made since this was asked last."""
        steps, self._steps = self._steps, 0
        return steps

    def write(
        self,
        sections: Sequence[Section],
        write: Write,
        done: Callable[[Part], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """Begin to `write` the sections, after those before.  `done` or `failed` is called in the
        thread, neither after `close`."""
        self.wait()
        self._thread = threading.Thread(
            target=self._run, args=(sections, write, done, failed), name="snapshot", daemon=True
        )
        self._thread.start()

    def _run(
        self,
        sections: Sequence[Section],
        write: Write,
        done: Callable[[Part], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        try:
            part = write(sections, self._is_given_up)
            if part is None:
                log.info("the part of a snapshot was given up")
            elif not self._given_up.is_set():
                done(part)
        except BaseException as e:
            if not self._given_up.is_set():
                failed(e)

    def _is_given_up(self) -> bool:
        """Asked by `write` at each of its steps."""
        self._steps += 1
        return self._given_up.is_set()

    def wait(self) -> None:
        """Until what was begun is written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """Give up what is being written; it leaves no file."""
        self._given_up.set()
        self.wait()
