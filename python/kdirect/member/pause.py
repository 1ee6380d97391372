"""The pause between attempts that nobody waits for, twice as long each time.

It decides and waits for nothing: whoever tries again sleeps, waits for news, or sets a timer.
(`kdirect.wire.backoff` is for a client's attempts, which have a deadline and are spread at random.)
"""

from __future__ import annotations


class Pause:
    """Seconds: `first_s`, then twice as long each time, at most `longest_s`."""

    __slots__ = ("_first_s", "_longest_s", "coming_s")

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s = self.coming_s = first_s
        self._longest_s = longest_s

    def next_s(self) -> float:
        """How long to pause now; the next pause is longer."""
        pause_s = self.coming_s
        self.coming_s = min(2 * pause_s, self._longest_s)
        return pause_s

    def reset(self) -> None:
        """Something has come of it: begin with the first pause again."""
        self.coming_s = self._first_s
