"""What readers of committed records may see of transactions that write each number to both of two
partitions.

A record's value is ``b"number last"``: the number, and the last number of its transaction.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence


def value(number: int, last: int) -> bytes:
    return b"%d %d" % (number, last)


def whole(found: Sequence[Sequence[bytes]]) -> list[int]:
    """How many numbers a reader has seen in each partition: those from 0 on, in their order, each
    once, up to the last one of a transaction.  Else it has seen a part of one."""
    counts = []
    for partition, values in enumerate(found):
        numbers = [int(v.split()[0]) for v in values]
        wrong = next((i for i, n in enumerate(numbers) if n != i), None)
        assert wrong is None, f"partition {partition}: lost or doubled near {wrong}: {numbers}"
        if values:
            number, last = map(int, values[-1].split())
            assert number == last, f"partition {partition}: {number} without those up to {last}"
        counts.append(len(numbers))
    return counts


def seen_whole(read: Callable[[], Sequence[Sequence[bytes]]], wait_s: float = 20) -> int:
    """How many numbers a reader has seen in one partition, and soon in the other, too: what is
    visible in one of them was committed in both, and its other marker is on its way."""
    counts = whole(read())
    most, deadline = max(counts), time.monotonic() + wait_s
    while min(counts) < most:
        assert time.monotonic() < deadline, f"a transaction is seen in one partition only: {counts}"
        time.sleep(0.05)
        counts = whole(read())
    return most
