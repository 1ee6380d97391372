"""Partitions spread evenly over readers, most of them where they are.  Pure.

The coordinator's assignor `uniform` (KIP-848) and the clients' `cooperative-sticky` (KIP-429) are
this function.  Neither side may import the other, so it stands here.

Law: every partition of a topic with a reader is given, to one reader of that topic, once.  Where
all read the same topics, the numbers of partitions differ by one at most, and no more partitions
move than that needs.  Where they do not, no single partition can move to a reader that has at least
two less.  The same input gives the same output, whatever its order.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar

# A topic by its name or its id.  Topics, and readers, can be sorted among themselves.
Topic = TypeVar("Topic", bound=Any)

_ROUNDS = 64  # of mending an uneven spread: each ends sooner where nothing can be mended


def assign_evenly(
    subscriptions: Mapping[str, Collection[Topic]],
    counts: Mapping[Topic, int],
    previous: Mapping[str, Iterable[tuple[Topic, int]]],
) -> dict[str, set[tuple[Topic, int]]]:
    """By reader, its partitions.  `subscriptions`: by reader, its topics; `counts`: by topic, how
    many partitions it has, topics that do not exist left out; `previous`: by reader, what it has
    had.  What two readers claim to have had, the first in order keeps."""
    readers = sorted(subscriptions)
    wanted = {r: {t for t in subscriptions[r] if t in counts} for r in readers}
    held: dict[str, set[tuple[Topic, int]]] = {r: set() for r in readers}
    taken: set[tuple[Topic, int]] = set()
    for reader in readers:
        for tp in sorted(previous.get(reader, ())):
            topic, index = tp
            if topic in wanted[reader] and 0 <= index < counts[topic] and tp not in taken:
                taken.add(tp)
                held[reader].add(tp)
    topics = sorted(set().union(*wanted.values())) if readers else []
    free = [(t, i) for t in topics for i in range(counts[t]) if (t, i) not in taken]
    if all(wanted[r] == wanted[readers[0]] for r in readers):
        _fill_quotas(readers, held, free)
    else:
        _fill_and_mend(readers, wanted, held, topics, free)
    return held


def _fill_quotas(
    readers: list[str], held: dict[str, set[tuple[Topic, int]]], free: list[tuple[Topic, int]]
) -> None:
    """All read the same: everybody has a number to have.  Those with most keep one more."""
    if not readers:
        return
    total = len(free) + sum(map(len, held.values()))
    each, more = divmod(total, len(readers))
    order = sorted(readers, key=lambda r: (-len(held[r]), r))
    quotas = {r: each + (i < more) for i, r in enumerate(order)}
    for reader in order:
        for tp in sorted(held[reader])[quotas[reader] :]:
            held[reader].remove(tp)
            free.append(tp)
    free.sort(reverse=True)
    for reader in readers:
        while len(held[reader]) < quotas[reader]:
            held[reader].add(free.pop())


def _fill_and_mend(
    readers: list[str],
    wanted: dict[str, set[Topic]],
    held: dict[str, set[tuple[Topic, int]]],
    topics: list[Topic],
    free: list[tuple[Topic, int]],
) -> None:
    """Give what is free to whoever reads it and has least, topics with few readers first; then move
    single partitions from those with more to those with less, as long as that helps."""
    by_topic = {t: [r for r in readers if t in wanted[r]] for t in topics}
    waiting: dict[Topic, list[int]] = {}
    for topic, index in free:
        waiting.setdefault(topic, []).append(index)
    for topic in sorted(waiting, key=lambda t: (len(by_topic[t]), t)):
        heap = [(len(held[r]), r) for r in by_topic[topic]]
        heapq.heapify(heap)
        for index in waiting[topic]:
            size, reader = heap[0]
            held[reader].add((topic, index))
            heapq.heapreplace(heap, (size + 1, reader))
    for _ in range(_ROUNDS):
        if not sum(_mend_topic(t, by_topic[t], held) for t in topics):
            return


def _mend_topic(topic: Topic, readers: list[str], held: dict[str, set[tuple[Topic, int]]]) -> bool:
    """Even out one topic among its readers; whether anything moved."""
    own = {r: sorted(tp for tp in held[r] if tp[0] == topic) for r in readers}
    moved = False
    while True:
        givers = [r for r in readers if own[r]]
        if not givers:
            return moved
        most = max(givers, key=lambda r: (len(held[r]), r))
        least = min(readers, key=lambda r: (len(held[r]), r))
        if len(held[most]) - len(held[least]) < 2:
            return moved
        tp = own[most].pop()
        held[most].remove(tp)
        held[least].add(tp)
        own[least].append(tp)
        moved = True
