"""One replica on its way from Fetch to push and back (KafkaDirect §4.3.2).

Owns: what a follower does so that its leader may write its head, and what it does when that ends.

=========  ====================================================  ==================================
state      what goes on                                          leaves it by
=========  ====================================================  ==================================
FETCHING   Fetch brings records                                  the leader offers to push, or says
                                                                 that sealed segments may be READ:
                                                                 ASKING
ASKING     a link is opened, and a ring asked for; Fetch goes    a ring: STOPPING; refused: FETCHING
           on                                                    after a pause; segments: PULLING
PULLING    a lease of the first segment is waited for, while     the log ends in the leader's last
           Fetch goes on; then segments are READ                 segment, or it failed: ENDING
           (`kdirect.broker.catch_up`)
STOPPING   records of Fetch are thrown away; the head is opened  granted: GRANTING; the disk is full
           to the leader on a thread                             : ENDING
GRANTING   the leader is told where the head lies                taken: PUSHED; refused, or not
                                                                 known: ENDING
PUSHED     the leader writes, the produce worker commits         the head, the link or the leader
                                                                 says that it ended: ENDING
ENDING     the leader is asked to write no more, and answers     FETCHING, after a pause
           once all that it wrote has arrived; then keys are
           taken away on a thread; then Fetch goes on from the
           log's end
CLOSED     the replica follows no longer
=========  ====================================================  ==================================

**No gap and no record twice**: records of Fetch are taken no more *before* the log's end is read
for the grant, and again *after* the keys are gone and what was not committed is zeros again.

**A leader stops before its keys go**, where it answers within `END_S`: a WRITE to a key that is
gone breaks the queue pair, which all partitions of the two brokers share.  One that does not answer
loses its keys all the same.

`close` may come in any state.  What is asked of the leader is given up; what a thread does is
waited for; the keys are taken away before anything else happens to the log.

The pause before the next attempt is longer each time that push did not last.  A link that had
worked and was cut is no failure of this partition, and does not lengthen it.

All on the event loop, except where said.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, Protocol, TypeVar

from kdirect.broker.catch_up import CatchUp
from kdirect.broker.followed_head import AckRing, FileGrant, FollowedHead
from kdirect.broker.push_links import LinkToLeader
from kdirect.errors import KdirectError
from kdirect.format.replica_fetch import Feed, Feeding, Push
from kdirect.log.urgent import Urgent
from kdirect.member.pause import Pause
from kdirect.member.push import PushableCopy

log = logging.getLogger("kdirect.member")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 30.0
AGAIN_S = 1.0  # between two attempts to take keys away
LASTING_S = 10.0  # a push that lasted so long was no failure

T = TypeVar("T")


class State(enum.Enum):
    FETCHING = "Fetch brings records"
    ASKING = "a ring is asked for"
    PULLING = "sealed segments are read"
    STOPPING = "the head is opened to the leader"
    GRANTING = "the leader is told of the head"
    PUSHED = "the leader writes"
    ENDING = "keys are taken away"
    CLOSED = "it follows no longer"


class Ring(NamedTuple):
    """What a leader gave for one grant."""

    number: int
    acks: AckRing
    window: int


class _Over(NamedTuple):
    """Why push has ended; `failed`: so that the next attempt waits longer."""

    why: str
    failed: bool = True


class _Closed(Exception):
    """The replica follows no longer."""


class Ways(Protocol):
    """How a copy reaches its leader; `kdirect.broker.replication.Replication`.  KdirectError where
    the leader refuses or is not reached."""

    async def link(self, leader: int) -> LinkToLeader:
        """The link to it, opened where there is none."""

    async def ask(self, link: LinkToLeader, copy: CopyByPush) -> Ring:
        """A ring for one grant."""

    async def grant(
        self, link: LinkToLeader, copy: CopyByPush, ring: int, grant: FileGrant
    ) -> None:
        """Tell it of a file."""

    async def on_thread(self, copy: CopyByPush, work: Callable[[], T]) -> T:
        """What `work` returns on a thread of the log's directory."""

    def open_head(
        self,
        link: LinkToLeader,
        copy: CopyByPush,
        ring: Ring,
        on_rolled: Callable[[], None],
        on_ended: Callable[[str], None],
    ) -> FollowedHead:
        """On a thread.  Both are called on the event loop."""

    def catch_up(self, link: LinkToLeader, copy: CopyByPush, replica: PushableCopy) -> CatchUp:
        """What READs the leader's sealed segments."""

    async def end(self, link: LinkToLeader, copy: CopyByPush, ring: int) -> bool:
        """Have it write no more by this ring.  False: it may still do so."""

    def left(self, link: LinkToLeader, head: FollowedHead | None) -> None:
        """One replica less uses the link, and the head has ended."""

    def refused(self, leader: int, reason: str) -> None:
        """Say why this leader is fetched from."""

    def pushed(self, link: LinkToLeader) -> None:
        """Say that this leader pushes."""


class CopyByPush:
    """See the module.  `pushes` of `kdirect.member.push`."""

    def __init__(self, ways: Ways, leader: int, copy: PushableCopy) -> None:
        self.state = State.FETCHING
        self.leader = leader
        self.tp = copy.tp
        self.partition = copy.partition
        self.epoch = copy.epoch
        self._copy = copy
        self.link: LinkToLeader | None = None
        self._ways = ways
        self._head: FollowedHead | None = None
        self._ring = -1
        self._watches = False
        self._wanted: int = Push.NOTHING
        self._leaders_bytes = 0  # as much as its segments may have
        self._gives_up = asyncio.Event()
        self._offered = asyncio.Event()
        self._offer: int = Push.NOTHING
        self._why = ""  # Fetch goes on
        self._catch_up: CatchUp | None = None
        loop = asyncio.get_running_loop()
        self._closing: asyncio.Future[None] = loop.create_future()
        self._ended: asyncio.Future[_Over] = loop.create_future()
        self._pause = Pause(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        self._aheads: set[asyncio.Task[None]] = set()
        self._task = loop.create_task(self._work())

    # -- what it is told ---------------------------------------------------------------------------

    def told(self, push: int, segment_bytes: int = 0) -> None:
        """See `PushedCopy`."""
        self._leaders_bytes = segment_bytes
        if push in (Push.OFFERED, Push.SEGMENTS):
            self._offer = push
            self._offered.set()
        elif push == Push.ENDED and self.state in (State.GRANTING, State.PUSHED):
            self.end("the leader has ended it")
        elif push in (Push.WANTS, Push.WANTS_NEXT):
            self._wanted = push
            self._grant_more()

    def end(self, why: str, *, failed: bool = True) -> None:
        """Nothing more is taken under the present grant; `failed`: the next attempt waits
        longer."""
        if not self._ended.done():
            self._ended.set_result(_Over(why, failed))
        if self._catch_up is not None:
            self._catch_up.stop(why)

    @property
    def has_arrived(self) -> bool:
        """Has a record come under the present grant, or been READ?"""
        head, catch_up = self._head, self._catch_up
        return (head is not None and head.has_arrived) or (
            catch_up is not None and catch_up.has_arrived
        )

    def feeding(self) -> Feeding:
        """See `PushedCopy`."""
        if self.state is State.PUSHED and self.link is not None:
            return Feeding(Feed.PUSHED, self.link.engine.transport)
        if self._catch_up is not None and self._catch_up.is_reading and self.link is not None:
            return Feeding(Feed.READ, self.link.engine.transport)
        return Feeding(Feed.FETCHED, reason=self._why or "its leader has not offered to push yet")

    def watch(self) -> None:
        """See `PushedCopy`."""
        head = self._head
        if self.state is State.PUSHED and head is not None:
            self._watches = True
            head.watch()

    def moved(self) -> None:
        """The high watermark has moved."""
        self._watches = False
        self._copy.moved()

    async def close(self, *, gives_up: bool = False) -> None:
        """See `PushedCopy`."""
        if gives_up:
            self._gives_up.set()
        if not self._closing.done():
            self._closing.set_result(None)
        await asyncio.wait([self._task])

    # -- the way -----------------------------------------------------------------------------------

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                await self._or_closed(self._offered.wait())
                began = loop.time()
                self._offered.clear()  # another one may come while segments are read
                over = await self._once()
                if over is None:  # the next answer says that the head is offered
                    self._pause.reset()
                    continue
                self._why = over.why
                self._ways.refused(self.leader, over.why)
                if not over.failed or loop.time() - began > LASTING_S:
                    self._pause.reset()
                await self._or_closed(asyncio.sleep(self._pause.next_s()))
                if not over.failed:
                    self._pause.reset()
                self._offered.set()  # an offer is told once; one that holds no more is refused
        except _Closed:
            pass
        finally:
            self.state = State.CLOSED

    async def _once(self) -> _Over | None:
        """From Fetch to push and back; why it ended, None where all sealed segments were read.
        _Closed."""
        self._ended = asyncio.get_running_loop().create_future()
        self._wanted = Push.NOTHING
        try:
            self.state = State.ASKING
            link = await self._or_closed(self._ways.link(self.leader))
            if not link.is_open:  # cut before this replica was one of those that are told
                return _Over("the link is cut", failed=False)
            self.link = link
            link.copies.add(self)
            if self._offer == Push.SEGMENTS:
                self.state = State.PULLING
                self._catch_up = self._ways.catch_up(link, self, self._copy)
                await self._or_closed(self._catch_up.run())
                return None
            ring = await self._or_closed(self._ways.ask(link, self))
            self._ring = ring.number
            self.state = State.STOPPING
            await self._copy.stop_copying()
            grant = await self._ways.on_thread(self, lambda: self._open(link, ring))
            self.state = State.GRANTING
            await self._or_closed(self._ways.grant(link, self, ring.number, grant))
            self.state = State.PUSHED
            self._why = ""
            self._ways.pushed(link)
            self._grant_more()
            return await self._or_closed(self._ended)
        except (KdirectError, OSError) as e:
            return _Over(str(e))
        except _Closed:
            raise
        except Exception as e:  # a mistake here costs one attempt, not push until the next epoch
            log.exception("%s: push by broker %d has failed", self.tp, self.leader)
            return _Over(f"{type(e).__name__}: {e}")
        finally:
            await self._end()

    def _open(self, link: LinkToLeader, ring: Ring) -> FileGrant:
        """On a thread."""
        self._head = head = self._ways.open_head(link, self, ring, self._rolled, self.end)
        return head.grant()

    def _rolled(self) -> None:
        if self._watches:  # it was the head before that told
            self.watch()
        self._grant_more()

    def _grant_more(self) -> None:
        """Let the leader write what it wants, and, where it may write all of the present file, the
        file after it."""
        if self.state is State.PUSHED:
            wanted, self._wanted = self._wanted, Push.NOTHING
            task = asyncio.get_running_loop().create_task(self._more(wanted))
            self._aheads.add(task)
            task.add_done_callback(self._aheads.discard)

    async def _more(self, wanted: int) -> None:
        head, link = self._head, self.link
        assert head is not None and link is not None
        try:
            if wanted == Push.WANTS:
                await self._tell_file(link, await self._ways.on_thread(self, head.grow))
                if head.is_too_short(self._leaders_bytes):  # Fetch goes on in a longer file
                    self.end("its leader's segments have become larger", failed=False)
                    return
            if wanted == Push.WANTS_NEXT or not head.may_grow:
                await self._tell_file(link, await self._ways.on_thread(self, head.grant_ahead))
        except (KdirectError, OSError) as e:
            self.end(f"no file could be granted ahead: {e}")

    async def _tell_file(self, link: LinkToLeader, grant: FileGrant | None) -> None:
        if grant is not None and self.state is State.PUSHED:
            await self._ways.grant(link, self, self._ring, grant)

    async def _end(self) -> None:
        """Have the leader stop, take the keys away, go on by Fetch."""
        self.state = State.ENDING
        head, link = self._head, self.link
        if self._catch_up is not None:
            await self._catch_up.close()
        if head is not None and link is not None:
            head.leader_has_stopped = await self._ways.end(link, self, self._ring)
            if not await self._take_keys(head):
                link.hung.append(head)
        for task in list(self._aheads):
            task.cancel()
        if link is not None:
            link.leave(self)  # while the head is known: what came proves that the link works
        self._head = self.link = self._catch_up = None
        if link is not None:
            self._ways.left(link, head)
        self._copy.copy_again()
        self.state = State.FETCHING

    async def _take_keys(self, head: FollowedHead) -> bool:
        """Not before this is done may anything else be done with the log."""
        while True:
            try:
                return await self._ways.on_thread(self, Urgent(head.end))
            except Exception as e:  # until they are gone, whatever it is, nothing is copied
                log.error(
                    *("the access of broker %d to %s did not end: %s", self.leader, self.tp, e),
                    exc_info=None if isinstance(e, KdirectError | OSError) else e,
                )
                if self._gives_up.is_set():
                    return False
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._gives_up.wait(), AGAIN_S)

    async def _or_closed(self, work: Awaitable[T]) -> T:
        """What `work` returns.  _Closed, and `work` is given up, once it follows no longer."""
        task = asyncio.ensure_future(work)
        both: set[asyncio.Future[Any]] = {task, self._closing}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            given_up = not task.done()
            if given_up:
                task.cancel()
        if self._closing.done():
            if not given_up:
                task.cancelled() or task.exception()  # it was looked at
            raise _Closed
        return await task


__all__ = ["CopyByPush", "Ring", "State", "Ways"]
