"""What was done by half is never taken for whole.

Owns: the memory of a change that an error has interrupted.  A state that was changed by half can
only be cleared: nothing is read, kept or emitted of it.  Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

from kdirect.errors import DeltaError, StateError

Method = TypeVar("Method", bound=Callable[..., Any])


class Whole:
    """Whether all changes of a state were made to their end."""

    def __init__(self) -> None:
        self._half_done: str | None = None

    @contextmanager
    def changing(self, what: str) -> Iterator[None]:
        """What runs here changes the state.  An error other than DeltaError, which is raised before
        anything has changed, leaves it half done."""
        self.check()
        try:
            yield
        except DeltaError:
            raise
        except BaseException:
            self._half_done = what
            raise

    def check(self) -> None:
        """Raises StateError if a change was left half done."""
        if self._half_done is not None:
            raise StateError(
                f"{self._half_done} was brought in by half, after an error: the state cannot be "
                "used",
                hint="restore the last snapshot and replay",
            )

    def reset(self) -> None:
        """The state was cleared."""
        self._half_done = None


def changes(what: str) -> Callable[[Method], Method]:
    """Makes a method of a state one of its changes: `check_settled` refuses it where it may not be
    made, before anything has changed, and `whole` notes its errors."""

    def wrap(method: Method) -> Method:
        @wraps(method)
        def changing(self: Any, *args: Any, **options: Any) -> Any:
            self.check_settled()
            with self.whole.changing(what):
                return method(self, *args, **options)

        return changing  # type: ignore[return-value]

    return wrap
