"""A partition that this broker leads and pushes, tied to its `Leader` (KafkaDirect §4.3.2).

Owns: for one leadership, the `PushedPartition`, who is pushed to by which ring, and in which
incarnation each replica was heard.  What may not enter: who counts, and what an end means, which
the leader's machine decides; links, requests.

A follower that died and came back may have lost what it had confirmed: when it is heard in a newer
incarnation its mark begins again at nothing, while the high watermark stands still.

All on the event loop, except where said.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

from kdirect.broker.followed_head import FileGrant
from kdirect.broker.push import PushRing, PushState
from kdirect.broker.push_links import LinkToFollower
from kdirect.broker.pushed_partition import PushedPartition
from kdirect.errors import KdirectError, LogError, NotLeaderError
from kdirect.log.segment_search import locate
from kdirect.member.directory_work import awaited
from kdirect.member.push import Confirmation, PushableLeader
from kdirect.member.showing import SHOWN

log = logging.getLogger("kdirect.member")

FILE_WAIT_S = 2.0  # a follower that grants no file for so long fetches

OnThread = Callable[..., None]


class _Pushed(NamedTuple):
    link: LinkToFollower
    number: int
    ring: PushRing


class Rings(dict[PushRing, "LedLog"]):
    """Whose ring is which, of all that this broker leads; and what those did that have ended."""

    def __init__(self) -> None:
        super().__init__()
        self.ended_bytes = 0
        self.refusals = 0

    def end(self, ring: PushRing) -> None:
        """Nothing is pushed by it any more."""
        if self.pop(ring, None) is not None:
            self.ended_bytes += ring.bytes_pushed
            self.refusals += ring.state == PushState.REFUSED

    @property
    def bytes_pushed(self) -> int:
        """By all of them.  Any thread."""
        return self.ended_bytes + sum(int(ring.bytes_pushed) for ring in list(self))


class LedLog:
    """See the module, and `kdirect.member.push.PushedLog`.  `logs_of`: whose ring is which, of all
    that this broker leads; `ended(log)`: it has resigned."""

    def __init__(
        self,
        leader: PushableLeader,
        worker: Any,
        on_thread: OnThread,
        *,
        most_bytes: int,
        logs_of: Rings,
        ended: Callable[[LedLog], None],
    ) -> None:
        self.leader = leader
        self._logs_of = logs_of
        self._ended = ended
        self.partition = leader.partition
        self._worker = worker
        self._on_thread = on_thread
        self._pushed = PushedPartition(self.partition, worker, most_bytes=most_bytes)
        self._pushing = self._pushed.pushing
        self._pushing.owner = self
        self._rings: dict[int, _Pushed] = {}  # by follower
        self._incarnations: dict[int, int] = {}
        self._counted: tuple[list[int], bool] = ([], False)
        self._starting = asyncio.Lock()
        # The log's gate is being emptied on a thread.  Works of one partition may overtake each
        # other, so the end of this leadership, which fills it again, waits for that.
        self.begins: asyncio.Future[None] | None = None
        self.resigned = False

    # -- marks -------------------------------------------------------------------------------------

    def push(self) -> None:
        """See `PushedLog`."""
        if self._rings and not self.resigned:
            self._pushed.push()

    def set_counted(self, brokers: Iterable[int], *, stands_still: bool) -> None:
        """See `PushedLog`."""
        self._counted = (list(brokers), stands_still)
        if not self.resigned:
            self._pushed.set_counted(self._counted[0], stands_still=stands_still)

    def confirm(self, broker: int, incarnation: int, end: int) -> None:
        """See `PushedLog`."""
        if self.resigned or not self._hear(broker, incarnation):
            return
        view, head = self.partition.kernel.view(), self.partition.segments[-1]
        if end == view.log_end_offset:
            self._confirm_at(broker, end, view.end_position, view.segment_base_offset)
        elif head.base_offset <= end < view.log_end_offset:
            position, offset = locate(head, end)
            self._confirm_at(broker, offset, position, head.base_offset)
        else:
            work = partial(self._locate, end)
            self._on_thread(self.partition, work, partial(self._located, broker, incarnation))

    def _locate(self, end: int) -> tuple[int, int, int]:
        """(offset, position, segment) of a batch's beginning.  On a thread."""
        source = self.partition.source_for(end)
        position, offset = source.locate(end)
        return offset, position, source.base_offset

    def _located(
        self, broker: int, incarnation: int, mark: Any, error: BaseException | None
    ) -> None:
        if error is not None:
            log.warning("%s: what broker %d has was not found: %s", self.leader.tp, broker, error)
        elif not self.resigned and self._incarnations.get(broker) == incarnation:
            self._confirm_at(broker, *mark)

    def _confirm_at(self, broker: int, offset: int, position: int, base: int) -> None:
        self._worker.confirm(self._pushing, broker, offset, position, base)

    def _hear(self, broker: int, incarnation: int) -> bool:
        """Is it the newest process of this broker that is heard?"""
        known = self._incarnations.get(broker, incarnation)
        if incarnation < known:
            return False
        if incarnation > known:
            counted, stands_still = self._counted
            others = [b for b in counted if b != broker]
            self._pushed.set_counted(others, stands_still=True)
            self._pushed.marks.forget(broker)
            self._pushed.set_counted(counted, stands_still=stands_still)
        self._incarnations[broker] = incarnation
        return True

    def confirmations(self) -> list[Confirmation]:
        """See `PushedLog`."""
        return [
            Confirmation(broker, x.link.incarnation, int(x.ring.confirmed))
            for broker, x in self._rings.items()
        ]

    def marks(self) -> dict[int, int]:
        """See `PushedLog`."""
        found: dict[int, int] = self._pushed.marks.ends()
        return found

    def watch(self) -> None:
        """See `PushedLog`."""
        if not self.resigned:
            self._worker.watch_pushing(self._pushing)

    def also_written_by(self, worker: Any) -> None:
        """See `PushedPartition`."""
        if not self.resigned:
            self._pushed.also_written_by(worker)

    # -- rings -------------------------------------------------------------------------------------

    async def start(self, link: LinkToFollower, number: int, grant: FileGrant) -> None:
        """Push to a follower from where its log ends.  LogError, NotLeaderError."""
        self.check_transport(link)
        async with self._starting:
            memory = link.memories.get(number)
            # Entries of a ring begin at sequence 0: it serves one grant.
            if self.resigned or not link.is_open or memory is None or number not in link.unused:
                raise NotLeaderError(f"{self.leader.tp} is not pushed over this link any more")
            if not self._hear(link.broker, link.incarnation):
                raise LogError(f"broker {link.broker} was heard in a newer incarnation")
            link.unused.discard(number)
            self.stop(link.broker, tell=False)
            ring = await self._do(partial(self._start, link, memory, grant))
            if self.resigned or not link.is_open:
                self._pushed.stop(ring)
                raise NotLeaderError(f"{self.leader.tp} is not pushed over this link any more")
            self._rings[link.broker] = _Pushed(link, number, ring)
            self._logs_of[ring] = self
            self.leader.pushes(link.broker)
            self.told(ring)  # what it said meanwhile was of no known ring

    def check_transport(self, link: LinkToFollower) -> None:
        """Marks are moved by the worker of one transport, as long as this broker leads.  LogError
        for a link of another one."""
        if link.engine.worker is not self._worker:
            raise LogError(
                f"{self.leader.tp} is pushed over another transport than {link.engine.transport}",
                hint="it is fetched by those that do not share that transport",
            )

    def _start(self, link: LinkToFollower, memory: Any, grant: FileGrant) -> PushRing:
        """On a thread."""
        partition = self.partition
        found = [s for s in partition.segments if s.base_offset == grant.segment_base_offset]
        if not found or locate(found[0], grant.offset) != (grant.position, grant.offset):
            raise LogError(
                f"{partition.topic_partition}: the follower's log ends at offset {grant.offset},"
                f" position {grant.position} of segment {grant.segment_base_offset}, and here no"
                " batch begins there",
                hint="it fetches; a segment that begins elsewhere is pushed from the next one on",
            )
        if len(partition.segments) - partition.segments.index(found[0]) > 4:
            raise LogError(f"{partition.topic_partition}: the follower lacks too many segments")
        return self._pushed.start(link.link, memory, grant)

    async def _do(self, work: Callable[[], Any]) -> Any:
        return await awaited(self._on_thread, self.partition, work)

    def renew(self, link: LinkToFollower, number: int, grant: FileGrant) -> bool:
        """The follower's present file has grown.  False: it is of another ring."""
        pushed = self._rings.get(link.broker)
        if pushed is None or (pushed.link, pushed.number) != (link, number):
            return False
        self._worker.renew_target(
            self._pushing, pushed.ring, grant.file_id, grant.address, grant.rkey, grant.length
        )
        return True

    def grant_ahead(self, link: LinkToFollower, number: int, grant: FileGrant) -> None:
        """The follower's file after its present one.  LogError."""
        pushed = self._rings.get(link.broker)
        if pushed is None or (pushed.link, pushed.number) != (link, number):
            raise LogError(f"{self.leader.tp} is not pushed under ring {number} any more")
        self._pushed.grant_ahead(pushed.ring, grant)

    def told(self, ring: PushRing) -> None:
        """The worker says that something has become of a ring."""
        pushed = self._rings.get(ring.broker)
        if pushed is None or pushed.ring is not ring or self.resigned:
            return
        if ring.state != PushState.PUSHING:
            state = PushState(ring.state)
            log.info("%s is not pushed to broker %d: %s", self.leader.tp, ring.broker, state.text)
            self.stop(ring.broker)
            return
        # A source is registered for the worker: that may wait for the other process.
        self._on_thread(self.partition, partial(self._pushed.ring_event, ring), _said)
        if ring.wants_file:
            ahead = self._is_done(*ring.pushed[:2])
            if ahead or not ring.has_wished:  # else it has been asked for
                self.leader.wants_file(ring.broker, ahead=ahead)
            loop = asyncio.get_running_loop()
            loop.call_later(FILE_WAIT_S, self._still_wants, ring, ring.pushed)
        elif ring.take_wish():
            self.leader.wants_file(ring.broker, ahead=False)

    def _is_done(self, base: int, position: int) -> bool:
        """Is everything pushed of a segment that takes no more records?"""
        if base == self.partition.kernel.segment_base_offset:
            return False
        return any(s.size <= position for s in self.partition.segments if s.base_offset == base)

    def _still_wants(self, ring: PushRing, pushed: tuple[int, int, int]) -> None:
        found = self._rings.get(ring.broker)
        if found is not None and found.ring is ring and ring.wants_file and ring.pushed == pushed:
            log.info(
                "%s is not pushed to broker %d: no file is granted", self.leader.tp, ring.broker
            )
            self.stop(ring.broker)

    def stop(self, broker: int, *, tell: bool = True) -> None:
        """Push to this follower no more; `tell`: it is told to fetch."""
        pushed = self._rings.get(broker)
        if pushed is None:
            return
        if not self.resigned:
            self.leader.pushes_no_more(broker, tell=tell)
        del self._rings[broker]
        self._pushed.stop(pushed.ring)
        self._logs_of.end(pushed.ring)

    async def end_ring(self, link: LinkToFollower, number: int) -> None:
        """The follower is about to take its keys back: begin nothing by this ring, or end it."""
        link.unused.discard(number)
        async with self._starting:  # one that is being begun ends once it has
            pushed = self._rings.get(link.broker)
            if pushed is not None and (pushed.link, pushed.number) == (link, number):
                self.stop(link.broker, tell=False)

    def sweep(self) -> None:
        """What was sent by rings that have ended has arrived."""
        self._on_thread(self.partition, self._pushed.sweep, _said)

    def link_cut(self, link: LinkToFollower) -> None:
        """Nothing can be pushed over it any more."""
        pushed = self._rings.get(link.broker)
        if pushed is not None and pushed.link is link:
            self.stop(link.broker)

    def link_closed(self, link: LinkToFollower) -> None:
        """Any thread."""
        self._pushed.link_closed(link.domain)

    # -- the end -----------------------------------------------------------------------------------

    def resign(self) -> Awaitable[None]:
        """See `PushedLog`."""
        self.resigned = True
        self._pushed.resign()
        for pushed in self._rings.values():
            self._logs_of.end(pushed.ring)
        self._rings.clear()
        return self._close()

    async def _close(self) -> None:
        if self.begins is not None:
            await asyncio.wait([self.begins])
        async with self._starting:
            await self._do(self._end)
        self._ended(self)

    def _end(self) -> None:
        """On a thread.  First the gate holds readers where they are, then marks do so no more.
        Marks that have never begun to move the high watermark leave the gate to those who do: a
        leader that is alone would never open it again."""
        if self.begins is not None:
            self.partition.set_replicas({SHOWN: self.partition.high_watermark})
        self._pushed.close()


def _said(result: Any, error: BaseException | None) -> None:
    if error is not None and not isinstance(error, KdirectError):
        log.error("the news of a ring were not handled", exc_info=error)


__all__ = ["LedLog", "Rings"]
