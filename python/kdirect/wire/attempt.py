"""A call that may wait long for a broker, made where nobody waits for it.

Owns: one short-lived thread for each call.  When a client loses a broker, each attempt to reach it
again runs this way.  Meanwhile a consumer reads from other brokers, and `produce`, `poll` and the
producer's own thread, which share one lock, go on.  Made by `Environment.spawn`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Attempt(Generic[T]):
    """Begins the call at once.  Once it is `done`, `result` returns what the call returned, or
    raises what it raised.  Thread-safe."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._over = threading.Event()
        self._value: list[T] = []
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="kdirect-attempt", daemon=True).start()

    def _run(self) -> None:
        try:
            self._value.append(self._call())
        except BaseException as e:
            self._error = e
        finally:
            self._over.set()

    @property
    def done(self) -> bool:
        return self._over.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait until the call is done, for so many seconds at most; whether it is."""
        return self._over.wait(max(0.0, seconds))

    def result(self) -> T:
        """What the call returned; raises what it raised.  Only when it is done."""
        if self._error is not None:
            raise self._error
        return self._value[0]
