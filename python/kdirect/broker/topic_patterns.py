"""Regular expressions over the names of topics, which the broker evaluates for clients (KIP-848).

Owns: the import of RE2, Kafka's own choice.  Its time is linear in the name and its memory is
bounded, whatever a client sends; what needs backtracking (look-around, back references) is refused.
It is loaded with the first expression.  An expression stands for a topic if it matches the whole
name.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

PROGRAM_BYTES = 1 << 20  # of one compiled expression, and of what matching it takes
PATTERN_BYTES = 16 << 10


@lru_cache(maxsize=256)
def _compiled(regex: str) -> Any:
    """The expression, or a text that says what is wrong with it."""
    import re2  # type: ignore[import-not-found, import-untyped, unused-ignore]

    if len(regex.encode()) > PATTERN_BYTES:
        return f"it has more than {PATTERN_BYTES} bytes"
    options = re2.Options()
    options.max_mem = PROGRAM_BYTES
    options.log_errors = False
    try:
        return re2.compile(regex, options=options)
    except re2.error as e:
        why = e.args[0] if e.args else str(e)
        return why.decode(errors="replace") if isinstance(why, bytes) else str(why)


def problem(regex: str) -> str:
    """Why this is no regular expression; empty: it is one."""
    found = _compiled(regex)
    return found if isinstance(found, str) else ""


def matching(regex: str, names: Iterable[str]) -> frozenset[str]:
    """Those of the names that an expression stands for; none for what is no expression."""
    found = _compiled(regex)
    if isinstance(found, str):
        return frozenset()
    return frozenset(name for name in names if found.fullmatch(name) is not None)
