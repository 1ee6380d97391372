"""The wall clock of the room, as the log writes it into segments and snapshots."""

from __future__ import annotations

import time


def now_ms() -> int:
    """Wall-clock time in ms since 1970."""
    return time.time_ns() // 1_000_000
