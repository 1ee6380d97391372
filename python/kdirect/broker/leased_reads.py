"""The requests by which followers READ this broker's sealed segments: OpenReading, AskSegments.

Owns: what is answered to them, over all links.  The queue pairs and the segments that are leased
are of each link (`kdirect.broker.segment_leases`); who may ask, `kdirect.broker.replication` has
looked at before.

**Leases end with the leadership**: when this broker resigns, nobody reads segments of the partition
by a key of it any more, and an answer that is being made then is refused.  A fence does not wait
for that, because a reader changes nothing.  A follower whose READ fails so opens another queue
pair, for its other partitions.

All on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from kdirect.broker.files import FileThreads
from kdirect.broker.push_links import LinkToFollower
from kdirect.broker.segment_leases import SegmentLeases
from kdirect.errors import KdirectError, NotLeaderError, RefusedError
from kdirect.format import layout
from kdirect.format import protocol as p
from kdirect.format.schema import build
from kdirect.log.partition import Partition
from kdirect.member.throttle import Throttles
from kdirect.model import TopicPartition


class LeasedReads:
    """See the module.  `links`: by follower, those that are open now."""

    def __init__(
        self, links: Mapping[int, LinkToFollower], files: FileThreads, throttles: Throttles
    ) -> None:
        self._links = links
        self._files = files
        self._throttles = throttles

    async def open(self, request: Any, stale: bool) -> Any:
        """The response to OpenReading: the end here of a queue pair that a follower READs over."""
        answer = {"error_code": 0, "error_message": "", "address": b""}
        link = self._links.get(request.broker_id)
        if stale or link is None or link.number != request.link:
            answer |= {"error_code": layout.ERROR_UNKNOWN_CONNECTION}
            answer |= {"error_message": "the link is not known"}
            return build(p.OpenReadingResponse, **answer)
        try:
            address = bytes(request.address)
            answer |= {"address": await self._files.read(link.leases.open, address)}
        except (KdirectError, OSError) as e:
            code = e.code if isinstance(e, RefusedError) else layout.ERROR_TRANSPORT_UNAVAILABLE
            answer |= {"error_code": code, "error_message": str(e)}
        return build(p.OpenReadingResponse, **answer)

    async def lease(self, link: LinkToFollower, leader: Any, x: Any) -> dict[str, Any]:
        """Sealed segments for READs: a row of the response to AskSegments."""
        tp = leader.tp
        in_sync = link.broker in leader.leading.state.in_sync
        pace = self._throttles.led(tp, in_sync=in_sync)
        read = partial(self._files.read, _while_led, link.leases, leader)
        answer = await link.leases.answer(tp, leader.partition, x, pace, read)
        if leader.has_resigned:
            raise NotLeaderError(f"{tp} is not led any more")
        return answer

    def give_back(self, link: LinkToFollower, numbers: list[int]) -> None:
        """A follower needs these leases no more."""
        if numbers:
            self._files.background(partial(link.leases.give_back, numbers))

    def resigned(self, tp: TopicPartition, partition: Partition) -> None:
        """This broker leads `tp` no longer."""
        for link in list(self._links.values()):
            if link.leases.are_held(tp):
                self._files.background(partial(link.leases.end, tp))


def _while_led(leases: SegmentLeases, leader: Any, work: Callable[[], Any]) -> Any:
    """What `work` returns, which leases segments; NotLeaderError, and none stays.  On a thread:
    `resigned` may have seen a part of them, or none, and nobody may wait for the answer now."""
    try:
        return work()
    finally:
        if leader.has_resigned:
            leases.end(leader.tp)
            raise NotLeaderError(f"{leader.tp} is not led any more")


__all__ = ["LeasedReads"]
