"""The states of a plan with cells as sections of a snapshot, and back.

A section is of the table of one window: {"bucket": its number, "entries": how many the table has}
and entries with all lanes, states and keys, as they lie in the log (`kdirect.state.state_rows`).
Entries of a fixed length are dealt to sections of some MiB, so that a reader needs no more memory,
and uses it again: memory that is touched for the first time costs more than what is done with it.
Pure but for the tables that are copied and filled.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kdirect.state import state_rows
from kdirect.state.snapshots import Section
from kdirect.state.strict import Members

SECTION_BYTES = 2 << 20


def snapshot_rows(backend: Any) -> list[Section]:
    """The sections of each window that has keys.  A copy: the state may change at once."""
    found = []
    for bucket in sorted(backend.engine.slots):
        table = backend.engine.table(bucket)
        if len(table):
            head = {"bucket": bucket, "entries": len(table)}
            words = state_rows.entries_of(table)
            whole = len(words)  # where one entry of many lengths ends is not known here
            if backend.keys.words:
                entry = backend.layout.words + backend.keys.words
                whole = max(1, SECTION_BYTES // 8 // entry) * entry
            found += [Section(head, words[at : at + whole]) for at in range(0, len(words), whole)]
    return found


def restore_rows(backend: Any, section: Section, executors: int, vparts: tuple[int, int]) -> int:
    """Take over what this executor leads of a section that one of `executors` has written, which
    led the virtual partitions `vparts`; the number of its keys.  StateError if it is damaged."""
    head = Members(section.head, "a section of a snapshot")
    bucket, entries = head.number("bucket"), head.number("entries", 0)
    head.close()
    return int(
        backend.engine.restore(
            bucket,
            np.frombuffer(section.data, np.uint64),
            entries,
            backend.layout_for(executors),
            vparts,
        )
    )
