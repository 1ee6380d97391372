"""What a follower asks of a leader, about many partitions at once.

Owns: rows that wait to be asked: one request of a kind is under way, and what comes meanwhile goes
together with the next one.  After an election a thousand partitions ask at the same moment, and are
a handful of requests.  What may not enter: what is asked.

All on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from kdirect.broker.push_links import LinkToLeader
from kdirect.errors import BrokerUnavailableError, KdirectError, ProtocolError, RefusedError
from kdirect.format.error_codes import error_kind
from kdirect.model import TopicPartition

log = logging.getLogger("kdirect.member")

MOST_FILE_BYTES = (1 << 31) - 1  # of a segment
MOST_RKEY = (1 << 32) - 1
MOST_ENTRIES = 1 << 16  # of a ring of acknowledgements


class BatchedRequests:
    """Requests of one `kind` to one leader.  `send(link, kind, topics)` awaits the response."""

    def __init__(self, send: Callable[..., Any], kind: Any) -> None:
        self._send = send
        self._kind = kind
        self._rows: list[tuple[LinkToLeader, TopicPartition, Any, asyncio.Future[Any]]] = []
        self._task: asyncio.Task[None] | None = None

    async def ask(self, link: LinkToLeader, tp: TopicPartition, row: Any) -> Any:
        """The row of the response.  KdirectError."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._rows.append((link, tp, row, future))
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._work())
        return await future

    async def _work(self) -> None:
        try:
            while self._rows:
                link, some = self._take()
                try:
                    await self._ask(link, some)
                except Exception as e:  # whatever it is, nobody may wait for ever
                    if not isinstance(e, KdirectError | OSError):
                        log.exception("broker %d was not asked, or answers nonsense", link.leader)
                    for x in some:
                        if not x[3].done():
                            x[3].set_exception(BrokerUnavailableError(str(e)))
        finally:
            self._task = None

    def _take(self) -> tuple[LinkToLeader, list[Any]]:
        """What is asked next, over one link.  An answer is known by its partition: a second row of
        one, whose first nobody may wait for any more, is asked later."""
        link, some, others, partitions = self._rows[0][0], [], [], set()
        for x in self._rows:
            if x[0] is link and x[1] not in partitions:
                partitions.add(x[1])
                some.append(x)
            else:
                others.append(x)
        self._rows = others
        return link, some

    async def _ask(self, link: LinkToLeader, some: list[Any]) -> None:
        topics: dict[str, list[Any]] = {}
        for _, tp, row, _ in some:
            topics.setdefault(tp.topic, []).append(row)
        rows = [{"topic": name, "partitions": x} for name, x in topics.items()]
        response = await self._send(link, self._kind, rows)
        if response.error_code != 0:
            raise BrokerUnavailableError(_error_name(response.error_code))
        answers = {
            (topic.topic, x.partition): x for topic in response.topics for x in topic.partitions
        }
        for _, tp, _, future in some:
            x = answers.get((tp.topic, tp.partition))
            if future.done():
                continue
            if x is None:
                future.set_exception(
                    ProtocolError(f"broker {link.leader} does not answer for {tp}")
                )
            elif x.error_code != 0:
                future.set_exception(RefusedError(x.error_code, x.error_message))
            else:
                future.set_result(x)


def _error_name(code: int) -> str:
    return "the link is not known" if code > 32000 else error_kind(code).name


def is_stale(request: Any, incarnation_of: Callable[[int], int]) -> bool:
    """Is it of another process, or another registration, than the broker is known by?"""
    known = incarnation_of(request.broker_id)
    return known < 0 or known != request.incarnation


def is_file(x: Any) -> bool:
    """Can there be such a file in a follower?  Whether it may be written, its key says."""
    return (
        0 < x.file_id <= 0xFFFF
        and 0 <= x.position <= x.length <= MOST_FILE_BYTES
        and x.length > 0
        and x.segment_base_offset >= -1
        and x.offset >= min(0, x.segment_base_offset)  # of the file after the present one: none
        and all(0 <= rkey <= MOST_RKEY for rkey in (x.rkey, x.slot_rkey))
        and min(x.address, x.slot_address) >= 0
    )


def is_ring(x: Any) -> bool:
    """Can there be such a ring in a leader?"""
    entries = x.entries
    return (
        0 < entries <= MOST_ENTRIES
        and entries & (entries - 1) == 0
        and 0 < 2 * x.window <= entries
        and 0 <= x.rkey <= MOST_RKEY
        and x.address >= 0
    )


__all__ = ["BatchedRequests", "is_file", "is_ring", "is_stale"]
