"""The states of a plan with cells as sections of a snapshot, and back.

A section is the table of one window: {"bucket": its number, "entries": how many} and the entries
with all lanes, states and keys, as they lie in the log (`kdirect.state.state_rows`).  Pure but for
the tables that are copied and filled.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kdirect.state import state_rows
from kdirect.state.snapshots import Section
from kdirect.state.strict import Members


def snapshot_rows(backend: Any) -> list[Section]:
    """A section for each window that has keys.  It is a copy: the state may change at once."""
    found = []
    for bucket in sorted(backend.engine.slots):
        table = backend.engine.table(bucket)
        if len(table):
            head = {"bucket": bucket, "entries": len(table)}
            found.append(Section(head, state_rows.entries_of(table)))
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
