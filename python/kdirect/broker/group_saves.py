"""Records of KIP-848's groups on their way to the log.

Law: what a group's rules have changed is written in that order, and what could not be written goes
out with the group's next change, so that the log is never behind what members are told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from kdirect.broker.groups import SaveRows

Rows = Mapping[bytes, bytes | None]


class GroupSaves:
    """See the module.  `write(group, rows)`: appends them; its future ends when they are in the
    log, in a cluster when they are committed.  Used on the event loop."""

    def __init__(self, write: Callable[[str, Rows], asyncio.Future[Any]]) -> None:
        self._write = write
        self._open: dict[str, dict[bytes, bytes | None]] = {}  # not known to be in the log
        self._failed: dict[str, set[bytes]] = {}  # the keys of those of which it is known
        self._last: dict[str, asyncio.Future[Any]] = {}

    def save(self, effect: SaveRows) -> asyncio.Future[Any]:
        """Write the rows, and those that failed before; without any: wait for those under way."""
        group = effect.group_id
        waiting = self._open.setdefault(group, {})
        rows = {key: waiting[key] for key in self._failed.pop(group, ()) if key in waiting}
        rows.update(effect.rows)
        last = self._last.get(group)
        if not rows:
            if not waiting:
                del self._open[group]
            if last is not None:
                return last
            done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            done.set_result(None)
            return done
        waiting.update(rows)
        try:
            saved = self._write(group, rows)
        except Exception as e:
            saved = asyncio.get_running_loop().create_future()
            saved.set_exception(e)
        self._last[group] = saved
        if saved.done():
            self._ended(group, rows, saved)
        else:
            saved.add_done_callback(partial(self._ended, group, rows))
        return saved

    def _ended(self, group: str, rows: Rows, saved: asyncio.Future[Any]) -> None:
        if self._last.get(group) is saved:
            del self._last[group]
        waiting = self._open.get(group)
        if waiting is None:
            return
        if saved.cancelled() or saved.exception() is not None:
            self._failed.setdefault(group, set()).update(rows)
            return
        for key, value in rows.items():
            if key in waiting and waiting[key] is value:
                del waiting[key]
        if not waiting:
            del self._open[group]

    def forget(self, groups: Iterable[str]) -> None:
        """These groups are not this broker's any more."""
        for group in groups:
            self._open.pop(group, None)
            self._failed.pop(group, None)
            self._last.pop(group, None)
