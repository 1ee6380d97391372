"""Reasons that are compared as values, and explained in logs by a text."""

from __future__ import annotations

from enum import IntEnum


class Reason(IntEnum):
    """Members are written as ``NAME = code, "text"``; `text` says it for a log."""

    text: str

    def __new__(cls, code: int, text: str) -> Reason:
        self = int.__new__(cls, code)
        self._value_ = code
        self.text = text
        return self
