"""The definition of windows that kernels are compared with: which ones a row falls into by itself,
and what sessions become."""

from __future__ import annotations

from collections.abc import Iterator

from kdirect.state.windows import TIME_MAX, TIME_MIN, NoWindow, Session, Window, clamp


def unite(sessions: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The union of session windows ``[start, end)`` of one key: those that overlap or touch
    become one."""
    united: list[tuple[int, int]] = []
    for start, end in sorted(sessions):
        if united and start <= united[-1][1]:
            united[-1] = (united[-1][0], max(end, united[-1][1]))
        else:
            united.append((start, end))
    return united


def windows_at(window: Window, time_us: int) -> Iterator[tuple[int, int]]:
    """(start, end) of each window that a row of this event time falls into by itself: a session's
    is that of the single row."""
    if isinstance(window, Session):
        yield time_us, clamp(time_us + window.gap_us)
    elif isinstance(window, NoWindow):
        yield TIME_MIN, TIME_MAX
    else:
        for index in window.windows_of(window.bucket(time_us)):
            yield window.bounds(index)
