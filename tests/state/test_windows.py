"""Windows: the arithmetic against definitions that try every window."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdirect.errors import ConfigError, KdirectError
from kdirect.state.windows import (
    TIME_MAX,
    TIME_MIN,
    NoWindow,
    Session,
    Sliding,
    Tumbling,
    clamp,
    duration_us,
    window_from_json,
)
from tests.state.window_rules import unite, windows_at

times = st.integers(-200, 200)
far = st.integers(TIME_MIN + (1 << 20), TIME_MAX - (1 << 20))


@st.composite
def aligned(draw: Any) -> Any:
    size = draw(st.integers(1, 30))
    origin = draw(st.integers(-40, 40))
    if draw(st.booleans()):
        return Tumbling(size_us=size, origin_us=origin)
    return Sliding(size_us=size, slide_us=draw(st.integers(1, size)), origin_us=origin)


def all_windows(window: Any) -> list[tuple[int, int]]:
    """Every window that begins within the times that are tried."""
    return [window.bounds(i) for i in range(-600 // window.slide_us, 600 // window.slide_us)]


@given(aligned(), times)
def test_a_row_falls_into_every_window_around_it(window: Any, time: int) -> None:
    wanted = [(start, end) for start, end in all_windows(window) if start <= time < end]
    assert list(windows_at(window, time)) == wanted
    bucket = window.bucket(time)
    start = window.bucket_start(bucket)
    assert start <= time < start + window.bucket_us


@given(aligned(), st.integers(-20, 20))
def test_buckets_and_windows_name_each_other(window: Any, index: int) -> None:
    for bucket in window.buckets_of(index):
        assert index in window.windows_of(bucket)
    start, end = window.bounds(index)
    spanned = [window.bucket_start(b) for b in window.buckets_of(index)]
    assert spanned == list(range(start, end, window.bucket_us))


@given(aligned(), times, times)
def test_what_closes_between_two_clocks(window: Any, before: int, more: int) -> None:
    closes = max(before, more)
    wanted = [b for b in all_windows(window) if before < b[1] <= closes]
    found = [window.bounds(i) for i in window.closing(before, closes)]
    assert [b for b in found if -500 < b[0] < 500] == wanted
    assert all(window.is_closed(b[1], closes) and not window.is_closed(b[1], before) for b in found)


@given(aligned(), times, times)
def test_a_row_is_late_when_all_its_windows_are_closed(window: Any, time: int, closed: int) -> None:
    late = all(end <= closed for _, end in windows_at(window, time))
    assert window.is_late(time, closed) == late
    assert (time < window.late_below(closed)) == late
    assert not window.is_late(time, TIME_MIN)
    assert window.late_below(TIME_MIN) == TIME_MIN


@given(aligned(), times)
def test_buckets_are_kept_while_a_window_needs_them(window: Any, closes: int) -> None:
    first = window.dropped_buckets(closes)
    for bucket in range(first - 40, first + 40):
        needed = any(window.bounds(i)[1] > closes for i in window.windows_of(bucket))
        assert needed == (bucket >= first)


@given(aligned(), far)
def test_far_times_stay_in_bounds(window: Any, time: int) -> None:
    for start, end in windows_at(window, time):
        assert TIME_MIN <= start <= time < end <= TIME_MAX
    assert clamp(1 << 70) == TIME_MAX


@given(st.integers(1, 20), st.lists(times, max_size=12))
def test_sessions_are_split_by_gaps(gap: int, rows: list[int]) -> None:
    found = unite([(t, t + gap) for t in rows])
    ordered, wanted = sorted(rows), []
    for time in ordered:
        if wanted and time - wanted[-1][-1] <= gap:
            wanted[-1].append(time)
        else:
            wanted.append([time])
    assert found == [(part[0], part[-1] + gap) for part in wanted]
    assert unite(found) == found


@given(st.integers(1, 20), times, times)
def test_a_session_waits_for_a_row_at_its_end(gap: int, time: int, closes: int) -> None:
    window = Session(gap_us=gap)
    ((start, end),) = windows_at(window, time)
    assert (start, end) == (time, time + gap)
    assert window.is_closed(end, closes) == (end < closes)
    assert window.is_late(time, closes) == window.is_closed(end, closes)
    assert (time < window.late_below(closes)) == window.is_late(time, closes)
    # A row in time, at the clock or later, never touches a session that was closed.
    if window.is_closed(end, closes):
        assert unite([(start, end), (closes, closes + gap)]) == [
            (start, end),
            (closes, closes + gap),
        ]


def test_without_windows_nothing_closes() -> None:
    window = NoWindow()
    assert window.bucket(-5) == 0
    assert not window.is_late(-5, TIME_MAX) and not window.is_closed(TIME_MAX, TIME_MAX)
    assert list(windows_at(window, 3)) == [(TIME_MIN, TIME_MAX)]


@pytest.mark.parametrize(
    ("text", "us"),
    [
        ("10 minutes", 600_000_000),
        ("1 hour 30 minutes", 5_400_000_000),
        ("interval 2 seconds", 2_000_000),
        ("500 milliseconds", 500_000),
        ("7 microseconds", 7),
        ("500ms", 500_000),
        ("3us", 3),
        ("2h", 7_200_000_000),
        ("1 week", 604_800_000_000),
        (42, 42),
    ],
)
def test_durations(text: Any, us: int) -> None:
    assert duration_us(text, "it") == us


@pytest.mark.parametrize("text", ["", "soon", "1 month", "10", "x minutes", None, True, 1.5])
def test_what_is_no_duration(text: Any) -> None:
    with pytest.raises(ConfigError, match=r"it: .* is no duration; write"):
        duration_us(text, "it")


@pytest.mark.parametrize(
    "make",
    [
        lambda: Tumbling(size_us=0),
        lambda: Tumbling(size_us="-1 seconds"),
        lambda: Tumbling(size_us="9999 weeks"),
        lambda: Sliding(size_us=5, slide_us=6),
        lambda: Sliding(size_us="1 day", slide_us="1001 us".replace(" us", " microseconds")),
        lambda: Session(gap_us=0),
    ],
)
def test_windows_that_are_refused(make: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.hint


@pytest.mark.parametrize(
    "window",
    [
        Tumbling(size_us=10, origin_us=13),
        Sliding(size_us=12, slide_us=8, origin_us=-1),
        Session(gap_us=3),
        NoWindow(),
    ],
)
def test_windows_survive_json(window: Any) -> None:
    assert window_from_json(window.to_json()) == window
    for spoiled in ({}, {**window.to_json(), "more": 1}, {"kind": "hopping"}, None):
        with pytest.raises(KdirectError):
            window_from_json(spoiled)
