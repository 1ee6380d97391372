"""Offsets that transactions have committed of groups, as long as the transactions have no end.

Law of the room: owns the table of them, of all partitions of ``__consumer_offsets`` that this
broker coordinates, and knows in which order they count.  It touches no log.

An offset is *pending* from its record until the marker of its transaction in the same partition.
Then it is committed, or gone.  Of several records for one partition of a group, the last one in the
log counts, whichever transaction ends first: what is committed makes all that are pending and were
written before it worthless.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from kdirect.format.group_records import CommittedOffset
from kdirect.model import TopicPartition


class PendingOffset(NamedTuple):
    """`number`: its place among the records of pending offsets."""

    committed: CommittedOffset
    number: int


class PendingOffsets:
    """See the module."""

    def __init__(self) -> None:
        # producer id -> group -> partition
        self._found: dict[int, dict[str, dict[TopicPartition, PendingOffset]]] = {}
        self._number = 0

    def add(
        self, producer_id: int, group: str, offsets: Mapping[TopicPartition, CommittedOffset]
    ) -> None:
        """A producer has written these offsets in its transaction."""
        of_group = self._found.setdefault(producer_id, {}).setdefault(group, {})
        for tp, committed in offsets.items():
            self._number += 1
            of_group[tp] = PendingOffset(committed, self._number)

    def end(
        self, producer_id: int, commit: bool, is_here: Callable[[str], bool]
    ) -> dict[str, dict[TopicPartition, CommittedOffset]]:
        """The transaction of a producer has ended for the groups of which `is_here` says so: what
        it has committed, by group."""
        groups = self._found.get(producer_id, {})
        ended = {name: groups.pop(name) for name in [name for name in groups if is_here(name)]}
        if not groups:
            self._found.pop(producer_id, None)
        if not commit:
            return {}
        for name, offsets in ended.items():
            for tp, offset in offsets.items():
                self._drop(name, tp, offset.number)
        return {name: {tp: x.committed for tp, x in found.items()} for name, found in ended.items()}

    def superseded(self, group: str, partitions: Iterable[TopicPartition]) -> None:
        """Offsets were committed, or deleted, outside of a transaction."""
        if self._found:
            for tp in partitions:
                self._drop(group, tp, self._number + 1)

    def _drop(self, group: str, tp: TopicPartition, before: int) -> None:
        """Forget what is pending of a partition and was written before that number."""
        for groups in self._found.values():
            offsets = groups.get(group)
            if offsets is not None and tp in offsets and offsets[tp].number < before:
                del offsets[tp]

    def of_group(self, group: str) -> set[TopicPartition]:
        """The partitions of a group of which an offset is pending."""
        return {tp for groups in self._found.values() for tp in groups.get(group, ())}

    def groups(self) -> set[str]:
        """The groups of which an offset is pending."""
        return {
            name for groups in self._found.values() for name, offsets in groups.items() if offsets
        }

    def forget(self, is_here: Callable[[str], bool]) -> None:
        """Another broker coordinates these groups."""
        for producer_id in list(self._found):
            self.end(producer_id, False, is_here)

    def take(self, other: PendingOffsets) -> None:
        """What was read of a partition."""
        ordered = sorted(
            (offset.number, producer_id, name, tp, offset.committed)
            for producer_id, groups in other._found.items()
            for name, offsets in groups.items()
            for tp, offset in offsets.items()
        )
        for _, producer_id, name, tp, committed in ordered:
            self.add(producer_id, name, {tp: committed})
