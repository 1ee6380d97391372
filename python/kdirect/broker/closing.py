"""The end of what has several parts.

Owns: the rule that a part whose end fails keeps no other part open.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

log = logging.getLogger("kdirect.broker")


class Ending:
    """Do every step, in the order of the calls, whatever the others raise: `step` or `wait` for
    each, then `tell`, which raises the first error; the others are logged where they happen."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._first: Exception | None = None

    def failed(self, error: Exception) -> None:
        """A step has raised this."""
        if self._first is None:
            self._first = error
        else:
            log.error("%s did not end in order", self._what, exc_info=error)

    def step(self, work: Callable[[], object]) -> None:
        """One part ends."""
        try:
            work()
        except Exception as e:
            self.failed(e)

    async def wait(self, work: Awaitable[object]) -> None:
        """One part ends, and takes its time."""
        try:
            await work
        except Exception as e:
            self.failed(e)

    def tell(self) -> None:
        """Raise what the first step that failed has raised."""
        if self._first is not None:
            raise self._first


def end_all(what: str, *steps: Callable[[], object]) -> None:
    """All steps of an `Ending`."""
    ending = Ending(what)
    for work in steps:
        ending.step(work)
    ending.tell()


__all__ = ["Ending", "end_all"]
