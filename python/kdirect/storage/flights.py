"""One load for all who want the same thing at once.

Owns: who loads and who waits for it.  What was loaded is kept by others, and a load that fails is
kept by nobody: it fails whoever waits for it, and the next one tries again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, TypeVar

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


class Flights(Generic[_Key, _Value]):
    """Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: dict[_Key, Future[_Value]] = {}

    def __contains__(self, key: _Key) -> bool:
        return key in self._under_way

    def join(self, key: _Key, load: Callable[[], _Value]) -> _Value:
        """What `load` returns: of this call, or of the one that is under way for `key`.  `load`
        looks first whether another one has ended meanwhile."""
        with self._lock:
            under_way = self._under_way.get(key)
            if under_way is None:
                mine = self._under_way[key] = Future()
        if under_way is not None:
            return under_way.result()
        try:
            value = load()
        except BaseException as e:
            self._end(key)
            mine.set_exception(e)
            raise
        self._end(key)
        mine.set_result(value)
        return value

    def _end(self, key: _Key) -> None:
        with self._lock:
            del self._under_way[key]
