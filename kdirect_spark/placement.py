"""Which ranges of offsets share a task, and on which hosts a task should run.

Law: `grouped` is pure.  `names_of` asks this host about names, and no server that the client has
not asked already when it connected.

A task keeps a slot busy for some 30 ms whatever it reads, so a topic of many small partitions takes
longer to start tasks for than to read.  With `coalescePartitions` ranges share tasks.  Which hosts
a task prefers reaches Spark only through the shim, which looks for `HOSTS` in a pickled partition.
"""

from __future__ import annotations

import heapq
import socket
from collections.abc import Hashable, Sequence
from functools import lru_cache

# A pickle holds a string as its UTF-8 bytes.  No name of a topic or host has these characters.
HOSTS, HOSTS_END = "kdirect.hosts[", "]"
LOOPBACK = ("localhost", "127.", "::1")


def grouped(sizes: Sequence[int], homes: Sequence[Hashable], most: int) -> list[list[int]]:
    """Numbers of ranges, in at most `most` groups of about the same size; `sizes` and `homes` are
    of each range.  Ranges of different homes share no group if there are no more homes than groups.
    A range that is larger than its share has a group to itself."""
    if len(sizes) <= most:
        return [[i] for i in range(len(sizes))]
    members: dict[Hashable, list[int]] = {}
    for i, home in enumerate(homes):
        members.setdefault(home, []).append(i)
    if len(members) > most:
        members = {None: list(range(len(sizes)))}
    groups: list[list[int]] = []
    left, left_bytes = most, sum(sizes)
    for number, mine in enumerate(members.values(), 1):
        size = sum(sizes[i] for i in mine)
        others = len(members) - number
        share = round(left * size / left_bytes) if left_bytes else 1
        parts = min(max(share, 1), left - others, len(mine))
        groups += _balanced(sizes, mine, parts)
        left, left_bytes = left - parts, left_bytes - size
    return sorted(groups)


def _balanced(sizes: Sequence[int], members: Sequence[int], parts: int) -> list[list[int]]:
    """The largest first, each to the group that has least."""
    heap: list[tuple[int, int]] = [(0, number) for number in range(parts)]
    out: list[list[int]] = [[] for _ in range(parts)]
    for i in sorted(members, key=lambda i: (-sizes[i], i)):
        size, number = heap[0]
        out[number].append(i)
        heapq.heapreplace(heap, (size + sizes[i], number))
    return [sorted(group) for group in out if group]


def marked(hosts: Sequence[str]) -> str:
    """`hosts` as the shim finds them in a pickle; empty if there are none."""
    return f"{HOSTS}{','.join(hosts)}{HOSTS_END}" if hosts else ""


@lru_cache(maxsize=1024)
def names_of(host: str) -> tuple[str, ...]:
    """The names by which Spark may know the host of a broker: `host` itself and its addresses.  A
    loopback address is that of this host, where the query is planned."""
    names = [host]
    if host.startswith(LOOPBACK):
        names += ["localhost", "127.0.0.1"]
        host = socket.gethostname()
        names.append(host)
    try:
        names += [str(x[4][0]) for x in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except OSError:  # the name of this host may be known nowhere
        pass
    return tuple(dict.fromkeys(names))
