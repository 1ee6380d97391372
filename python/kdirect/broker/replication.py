"""Replication by one-sided WRITEs between the brokers of a cluster (KafkaDirect §4.3.2).

Owns: the links of both directions, the partitions that are pushed to others, and the requests by
which a follower opens a link (OpenPushLink), asks for a ring (AskPush) and tells where its files
lie (GrantPush); those by which it READs are of `reads` (`leased_reads`).  It is the `PushSide` of
`kdirect.member.push`.  What may not enter: who leads, who is in sync, what is compared and cut.

Followers ask, leaders answer.  Requests about many partitions of one leader go out together.

**Transport.**  The follower tries those that its broker has, `shm` first: that connects within one
host only, and says so itself.  Which one was taken, or why none was, is logged once for each
leader.  One by which no queue pair is made, or that breaks before a record has come, is not tried
for a while with that process of the leader (`push_links.TransportTrials`), and the next one is.

**A follower takes keys back in good order**: it says so (EndPush), and the leader answers when it
writes no more by that ring and all that it wrote has arrived.

All on the event loop, except where said.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from kdirect.broker.access import AccessManager
from kdirect.broker.catch_up import CatchUp, CatchUps
from kdirect.broker.closing import end_all
from kdirect.broker.engine import Engine
from kdirect.broker.files import FileThreads
from kdirect.broker.followed_head import AckRing, FileGrant, FollowedHead
from kdirect.broker.leased_reads import LeasedReads
from kdirect.broker.led_log import LedLog, Rings
from kdirect.broker.push_links import (
    WINDOW,
    Links,
    LinkToFollower,
    LinkToLeader,
    TransportTrials,
    opened_link,
    say_cut,
)
from kdirect.broker.push_requests import BatchedRequests, is_file, is_ring, is_stale
from kdirect.broker.pushed_copy import CopyByPush, Ring, State
from kdirect.broker.scheduler import soon
from kdirect.broker.worker import CutReason
from kdirect.errors import (
    KdirectError,
    NotLeaderError,
    ProtocolError,
    RdmaError,
    RefusedError,
    TransportError,
)
from kdirect.format import layout
from kdirect.format import protocol as p
from kdirect.format.error_codes import ErrorCode
from kdirect.format.replica_fetch import Push
from kdirect.format.schema import build
from kdirect.log.partition import Partition
from kdirect.member.directory_work import awaited
from kdirect.member.push import Find, PushableCopy
from kdirect.member.throttle import Throttles
from kdirect.model import TopicPartition

log = logging.getLogger("kdirect.member")

ANSWER_S = 10.0
# A follower waits so long for its leader to stop before it takes keys away: one that hangs must not
# hold up a fence.
END_S = 0.25
DISTRUST_S = 60.0
MOST_RECEIVES = 1 << 14
TRANSPORTS = ("shm", "verbs")  # in the order in which they are tried


class Replication:
    """See the module.  `incarnation()`: of this broker, now.  Life: construct, `close` from any
    thread, once no partition is led or followed any more."""

    def __init__(
        self,
        access: AccessManager,
        files: FileThreads,
        peers: Any,
        config: Mapping[str, Any],
        incarnation: Callable[[], int],
        throttles: Throttles,
    ) -> None:
        self._access = access
        self._files = files
        self._peers = peers
        self._broker = int(config["node.id"])
        self._incarnation = incarnation
        self._most_bytes = int(config["replica.push.max.bytes"])
        self._transports = [x for x in TRANSPORTS if x in config["rdma.transports"]]
        self._logs: dict[TopicPartition, LedLog] = {}
        self._logs_of = Rings()
        self._links_made = Links()
        self._out: dict[int, LinkToFollower] = {}  # by follower
        self._in: dict[int, asyncio.Task[LinkToLeader]] = {}  # by leader
        self._links = 0
        self._answers: set[asyncio.Task[Any]] = set()
        self._heads: dict[FollowedHead, CopyByPush] = {}
        self._asks: dict[tuple[int, type], BatchedRequests] = {}
        self._told: dict[int, str] = {}  # by leader, how it is copied from
        self.reads = LeasedReads(self._out, files, throttles)
        self._catch_ups = CatchUps(
            send=self._send_to,
            ask=self._ask,
            thread=files.read,
            on_thread=self.on_thread,
            background=files.background,
            pace=throttles.followed,
        )
        self._trials = TransportTrials(time.monotonic)
        self._cuts = 0
        self._fallbacks = 0
        self._incarnation_of: Callable[[int], int] = lambda broker: -1
        # Processes of followers that acknowledged what they never got, and until when none of their
        # links is taken.
        self._distrusted: dict[tuple[int, int], float] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        access.links.cut = self._cut
        access.links.close = self.close
        access.links.opened = self._opened_engine

    # -- engines -----------------------------------------------------------------------------------

    async def _engine(self, transport: str) -> Engine:
        if transport not in self._transports:
            raise RefusedError(
                layout.ERROR_TRANSPORT_UNAVAILABLE,
                f"transport {transport!r} is not offered by broker {self._broker}",
            )
        self._loop = loop = asyncio.get_running_loop()
        engine = await self._access.engine(transport)
        if engine.worker.on_push is None:
            engine.worker.on_moved = lambda x: soon(loop, self._moved, x)
            engine.worker.on_push = lambda ring: soon(loop, self._ring_told, ring)
        return engine

    def _opened_engine(self, engine: Engine) -> None:
        """Producers may come over one more transport."""
        for led in list(self._logs.values()):
            led.also_written_by(engine.worker)

    def _ring_told(self, ring: Any) -> None:
        led = self._logs_of.get(ring)
        if led is not None:
            led.told(ring)

    def _moved(self, what: Any) -> None:
        owner = what.owner
        if isinstance(owner, LedLog):
            if not owner.resigned:
                owner.leader.moved()
        elif (copy := self._heads.get(owner)) is not None:
            copy.moved()

    def _cut(self, transport: str, qp_num: int, reason: Any) -> None:
        self._links_made.cut(transport, qp_num)
        for out in list(self._out.values()):
            if (out.engine.transport, out.qp.qp_num) == (transport, qp_num):
                say_cut(f"to follower {out.broker}", reason)
                self._cuts += 1
                if reason is CutReason.DESYNCHRONISED:
                    until = time.monotonic() + DISTRUST_S
                    self._distrusted[out.broker, out.incarnation] = until
                self._close_out(out)
        for task in list(self._in.values()):
            link = opened_link(task)
            if link is not None and (link.engine.transport, link.qp.qp_num) == (transport, qp_num):
                say_cut(f"of leader {link.leader}", reason)
                self._cuts += 1
                works = link.works
                if not works:
                    why = f"it was cut before a record came ({reason.text})"
                    self._did_not_work(self._trials.cut, link.key, why)
                self._close_in(link, failed=not works)

    def registered(self, own: int, incarnation_of: Callable[[int], int]) -> None:
        """See `PushSide`.  A link is one between two processes as they are registered: what a
        follower confirms over it counts for that incarnation alone."""
        self._incarnation_of = incarnation_of
        self._trials.forget_all_but(incarnation_of)
        for out in list(self._out.values()):
            if incarnation_of(out.broker) != out.incarnation:
                self._close_out(out)
        for task in list(self._in.values()):
            link = opened_link(task)
            if link is not None and link.incarnation != own:
                self._close_in(link)

    # -- the leader --------------------------------------------------------------------------------

    def offers(self, partition: Partition, offset: int) -> Push:
        """See `PushSide`."""
        if not self._transports:
            return Push.NOTHING
        if offset >= partition.kernel.segment_base_offset:
            return Push.OFFERED
        # What was compacted has other bytes in each replica, and comes by Fetch.
        return Push.SEGMENTS if offset >= partition.dense_from else Push.NOTHING

    @property
    def pulled_bytes(self) -> int:
        """See `PushSide`."""
        return self._catch_ups.taken_bytes

    async def answer(self, request: Any, find: Find, incarnation_of: Callable[[int], int]) -> Any:
        """See `PushSide`.  What has begun is finished, although nobody may hear the answer: a link
        or a ring that was made in the middle would be nobody's."""
        task = asyncio.ensure_future(self._answer(request, find, incarnation_of))
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)
        return await asyncio.shield(task)

    async def _answer(self, request: Any, find: Find, incarnation_of: Callable[[int], int]) -> Any:
        stale = is_stale(request, incarnation_of)
        work: Callable[..., Any]
        match request.API_KEY:
            case p.OpenPushLinkRequest.API_KEY:
                return await self._open_out(request, incarnation_of)
            case p.AskPushRequest.API_KEY:
                kind, work = p.AskPushResponse, self._ring
            case p.GrantPushRequest.API_KEY:
                kind, work = p.GrantPushResponse, self._take_grant
            case p.AskSegmentsRequest.API_KEY:
                kind, work = p.AskSegmentsResponse, self.reads.lease
            case p.OpenReadingRequest.API_KEY:
                return await self.reads.open(request, stale)
            case p.EndPushRequest.API_KEY:
                return await self._end_rings(request)
            case _:
                raise ProtocolError(f"no request about push: {type(request).__name__}")
        link = self._out.get(request.broker_id)
        if stale:
            return build(kind, error_code=int(ErrorCode.STALE_BROKER_EPOCH), topics=[])
        if link is None or (link.number, link.incarnation) != (request.link, request.incarnation):
            return build(kind, error_code=layout.ERROR_UNKNOWN_CONNECTION, topics=[])
        if work == self.reads.lease:
            self.reads.give_back(link, list(request.released))
        topics = []
        for topic in request.topics:
            rows = [await self._row(work, link, find, topic.topic, x) for x in topic.partitions]
            topics.append({"topic": topic.topic, "partitions": rows})
        return build(kind, error_code=0, topics=topics)

    async def _row(self, work: Any, link: LinkToFollower, find: Find, name: str, x: Any) -> Any:
        """What is answered about one partition."""
        row = {"partition": x.partition, "error_code": 0, "error_message": ""}
        if work == self._ring:
            row |= {"ring": -1, "address": 0, "rkey": 0, "entries": 0, "window": 0}
        if work == self.reads.lease:
            row["segments"] = []
        found = find(TopicPartition(name, x.partition), x.leader_epoch)
        if found.leader is None:
            return row | {"error_code": int(found.error), "error_message": "it is led elsewhere"}
        try:
            return row | (await work(link, found.leader, x) or {})
        except (KdirectError, OSError) as e:
            return row | {"error_code": layout.ERROR_ACCESS_DISABLED, "error_message": str(e)}

    async def _end_rings(self, request: Any) -> Any:
        """Write no more by these rings; answered when all that was written has arrived."""
        link = self._out.get(request.broker_id)
        if link is None or link.number != request.link:
            return build(p.EndPushResponse, error_code=layout.ERROR_UNKNOWN_CONNECTION, topics=[])
        topics, ended = [], []
        for topic in request.topics:
            rows = []
            for x in topic.partitions:
                led = self._logs.get(TopicPartition(topic.topic, x.partition))
                link.unused.discard(x.ring)
                if led is not None:
                    await led.end_ring(link, x.ring)
                    ended.append(led)
                rows.append({"partition": x.partition, "error_code": 0, "error_message": ""})
            topics.append({"topic": topic.topic, "partitions": rows})
        error = ErrorCode.NONE if await link.arrived(END_S) else ErrorCode.REQUEST_TIMED_OUT
        for led in ended:
            led.sweep()
        return build(p.EndPushResponse, error_code=int(error), topics=topics)

    async def _open_out(self, request: Any, incarnation_of: Callable[[int], int]) -> Any:
        def refused(code: int, why: str) -> Any:
            fields = {"error_code": int(code), "error_message": why, "address": b"", "link": -1}
            return build(p.OpenPushLinkResponse, **fields)

        stale = ErrorCode.STALE_BROKER_EPOCH, "the follower is not registered in this incarnation"
        if is_stale(request, incarnation_of):
            return refused(*stale)
        until = self._distrusted.get((request.broker_id, request.incarnation), 0.0)
        if time.monotonic() < until:
            return refused(layout.ERROR_ACCESS_DISABLED, "it acknowledged what it never got")
        try:
            engine = await self._engine(request.transport)
            self._links += 1
            make = partial(
                self._links_made.make,
                LinkToFollower,
                *(engine, self._links, request.broker_id),
                *(request.incarnation, bytes(request.address)),
            )
            link = await self._files.read(make)
        except (KdirectError, OSError) as e:
            code = e.code if isinstance(e, RefusedError) else layout.ERROR_TRANSPORT_UNAVAILABLE
            return refused(code, str(e))
        if not link.is_open:  # `_cut` did not see it
            self._close_out(link)
            return refused(layout.ERROR_TRANSPORT_UNAVAILABLE, "the follower has hung up")
        if is_stale(request, incarnation_of):  # by now: `registered` did not see this link
            self._close_out(link)
            return refused(*stale)
        before = self._out.get(request.broker_id)
        if before is not None:
            self._close_out(before)
        self._out[request.broker_id] = link
        fields = {"error_code": 0, "error_message": "", "address": link.address}
        return build(p.OpenPushLinkResponse, link=link.number, **fields)

    async def _ring(self, link: LinkToFollower, leader: Any, x: Any) -> dict[str, Any]:
        """Memory for acknowledgements."""
        partition = leader.partition
        if x.segment_bytes < partition.config.segment_bytes:
            raise RefusedError(
                layout.ERROR_ACCESS_DISABLED,
                f"{leader.tp}: the follower has not heard yet that segments have"
                f" {partition.config.segment_bytes} bytes: it expects {x.segment_bytes}",
            )
        led = self._logs.get(leader.tp)
        if led is not None and led.leader is leader:
            led.check_transport(link)  # before the follower stops to fetch
        if led is not None:
            await led.end_ring(link, link.newest(leader.tp))
        number = link.new_ring(leader.tp)
        ring = link.memories[number].ring
        return {
            "ring": number,
            "address": ring.address,
            "rkey": ring.rkey,
            "entries": ring.entries,
            "window": link.memories[number].window,
        }

    async def _take_grant(self, link: LinkToFollower, leader: Any, x: Any) -> None:
        """A follower's file."""
        if not is_file(x):
            text = f"broker {link.broker} grants no file of {leader.tp} that there can be"
            log.warning("the link to follower %d is cut: %s", link.broker, text)
            self._close_out(link)
            raise RefusedError(ErrorCode.INVALID_REQUEST, text)
        grant = FileGrant(
            *(x.file_id, x.address, x.rkey, x.length, x.segment_base_offset, x.position),
            *(x.offset, x.slot_address, x.slot_rkey),
        )
        if x.segment_base_offset < 0:
            led = self._logs.get(leader.tp)
            if led is None:
                raise NotLeaderError(f"{leader.tp} is not pushed")
            led.grant_ahead(link, x.ring, grant)
            return
        led = await self._led(leader, link.engine)
        if not led.renew(link, x.ring, grant):
            await led.start(link, x.ring, grant)

    async def _led(self, leader: Any, engine: Engine) -> LedLog:
        """The marks of a leadership, which move its high watermark from now on."""
        led = self._logs.get(leader.tp)
        if led is not None and led.leader is leader and not led.resigned:
            return led
        if leader.pushed is not None:
            raise NotLeaderError(f"{leader.tp} is not led any more")
        led = LedLog(
            leader,
            engine.worker,
            self._files.for_partition,
            most_bytes=self._most_bytes,
            logs_of=self._logs_of,
            ended=self._resigned,
        )
        self._logs[leader.tp] = led
        for other in self._access.engines:
            led.also_written_by(other.worker)
        done = leader.begin_push(led)
        if done is None:
            del self._logs[leader.tp]
            await led.resign()
            raise NotLeaderError(f"{leader.tp} cannot be pushed yet")
        led.begins = done
        await done
        return led

    def _resigned(self, led: LedLog) -> None:
        if self._logs.get(led.leader.tp) is led:
            del self._logs[led.leader.tp]
            for link in self._out.values():
                link.forget(led.leader.tp)

    def _close_out(self, link: LinkToFollower) -> None:
        link.is_open = False
        if self._out.get(link.broker) is link:
            del self._out[link.broker]
        logs = list(self._logs.values())
        for led in logs:
            led.link_cut(link)
        self._files.background(partial(self._end_out, link, logs))

    def _end_out(self, link: LinkToFollower, logs: list[LedLog]) -> None:
        """End a link that none of these pushes over any more.  On a thread."""
        self._links_made.end(link)
        for led in logs:
            led.link_closed(link)

    # -- the follower ------------------------------------------------------------------------------

    def follow(self, leader: int, copy: PushableCopy) -> CopyByPush:
        """See `PushSide`."""
        return CopyByPush(self, leader, copy)

    async def link(self, leader: int) -> LinkToLeader:
        """See `pushed_copy.Ways`."""
        task = self._in.get(leader)
        if task is not None and task.done():
            link = opened_link(task)
            if link is None or not link.is_open:
                task = None
        if task is None:
            task = asyncio.get_running_loop().create_task(self._open_in(leader))
            self._in[leader] = task
        return await asyncio.shield(task)

    async def _open_in(self, leader: int) -> LinkToLeader:
        reasons = []
        incarnation = self._incarnation_of(leader)
        for transport in self._transports:
            held = self._trials.held(leader, incarnation, transport)
            if held:
                reasons.append(f"{transport}: {held}")
                continue
            try:
                return await self._open_over(leader, transport, incarnation)
            except (TransportError, RdmaError, RefusedError, OSError) as e:
                reasons.append(f"{transport}: {e}")
                if getattr(e, "code", 0) != ErrorCode.STALE_BROKER_EPOCH:  # which passes
                    key = leader, incarnation, transport
                    self._did_not_work(self._trials.failed, key, str(e))
        raise TransportError(
            f"brokers {self._broker} and {leader} share no transport: " + "; ".join(reasons)
        )

    def _did_not_work(
        self, note: Callable[..., float], key: tuple[int, int, str], why: str
    ) -> None:
        hold = note(*key, why)
        if hold:
            log.info(
                "%s is not used to copy from broker %d for %d s: %s", key[2], key[0], hold, why
            )

    async def _open_over(self, leader: int, transport: str, of_leader: int) -> LinkToLeader:
        engine = await self._engine(transport)
        incarnation = self._incarnation()
        make = partial(self._links_made.make, LinkToLeader, engine, leader, incarnation, of_leader)
        link: LinkToLeader = await self._files.read(make)
        try:
            response = await self._peers.call(
                leader,
                build(
                    p.OpenPushLinkRequest,
                    broker_id=self._broker,
                    incarnation=incarnation,
                    transport=transport,
                    address=link.address,
                    receives=MOST_RECEIVES,
                ),
                timeout_s=ANSWER_S,
            )
            if response.error_code != 0:
                raise RefusedError(response.error_code, response.error_message)
            link.number = response.link
            await self._files.read(partial(link.connect, bytes(response.address)))
            if self._incarnation() != incarnation:  # `registered` did not see this link
                raise RefusedError(
                    ErrorCode.STALE_BROKER_EPOCH, "this broker is registered in another incarnation"
                )
        except BaseException:
            self._files.background(partial(self._links_made.end, link))
            raise
        return link

    async def ask(self, link: LinkToLeader, copy: CopyByPush) -> Ring:
        """See `pushed_copy.Ways`."""
        row = {
            "partition": copy.tp.partition,
            "leader_epoch": copy.epoch,
            "segment_bytes": copy.partition.head_config.segment_bytes,
        }
        x = await self._ask(link, p.AskPushRequest, copy.tp, row)
        if not is_ring(x):
            raise ProtocolError(f"broker {link.leader} offers a ring that there cannot be")
        return Ring(x.ring, AckRing(x.address, x.rkey, x.entries), min(x.window, WINDOW))

    async def grant(
        self, link: LinkToLeader, copy: CopyByPush, ring: int, grant: FileGrant
    ) -> None:
        """See `pushed_copy.Ways`."""
        row = {
            "partition": copy.tp.partition,
            "leader_epoch": copy.epoch,
            "ring": ring,
            **grant._asdict(),
        }
        await self._ask(link, p.GrantPushRequest, copy.tp, row)

    async def end(self, link: LinkToLeader, copy: CopyByPush, ring: int) -> bool:
        """See `pushed_copy.Ways`."""
        if not link.is_open:
            return False
        row = {"partition": copy.tp.partition, "leader_epoch": copy.epoch, "ring": ring}
        asked = asyncio.ensure_future(self._ask(link, p.EndPushRequest, copy.tp, row))
        await asyncio.wait([asked], timeout=END_S)
        if not asked.done():
            asked.cancel()
            return False
        return asked.exception() is None

    async def _ask(self, link: LinkToLeader, kind: Any, tp: TopicPartition, row: Any) -> Any:
        rows = self._asks.get((link.leader, kind))
        if rows is None:
            rows = self._asks[link.leader, kind] = BatchedRequests(self._send, kind)
        return await rows.ask(link, tp, row)

    def catch_up(self, link: LinkToLeader, copy: CopyByPush, replica: PushableCopy) -> CatchUp:
        """See `pushed_copy.Ways`."""
        return CatchUp(
            self._catch_ups,
            *(link, copy),
            stop_copying=replica.stop_copying,
            progressed=replica.progressed,
        )

    async def _send(self, link: LinkToLeader, kind: Any, topics: list[Any]) -> Any:
        return await self._send_to(link, kind, topics=topics)

    async def _send_to(self, link: LinkToLeader, kind: Any, **fields: Any) -> Any:
        response = await self._peers.call(
            link.leader,
            build(
                kind,
                broker_id=self._broker,
                incarnation=self._incarnation(),
                link=link.number,
                **fields,
            ),
            timeout_s=ANSWER_S,
        )
        if response.error_code == layout.ERROR_UNKNOWN_CONNECTION and link.is_open:
            # Its end was closed, and that was not heard here: the next attempt opens another one.
            self._close_in(link)
        return response

    async def on_thread(self, copy: CopyByPush, work: Callable[[], Any]) -> Any:
        """See `pushed_copy.Ways`."""
        return await awaited(self._files.for_partition, copy.partition, work)

    def open_head(
        self,
        link: LinkToLeader,
        copy: CopyByPush,
        ring: Ring,
        on_rolled: Callable[[], None],
        on_ended: Callable[[str], None],
    ) -> FollowedHead:
        """See `pushed_copy.Ways`."""
        loop = self._loop
        assert loop is not None
        grants = self._access.grants
        head = FollowedHead(
            copy.partition,
            link.engine.worker,
            *(link.domain, link.qp, ring.acks),
            slices=link.slices,
            window=ring.window,
            leader_epoch=copy.epoch,
            new_file_id=grants.reserve,
            free_file_id=grants.give_back,
            spawn=lambda partition, work: self._files.for_partition(partition, work, _report),
            on_rolled=lambda head: soon(loop, on_rolled),
            on_ended=lambda head, why: soon(loop, on_ended, why.text),
        )
        self._heads[head] = copy
        return head

    def left(self, link: LinkToLeader, head: FollowedHead | None) -> None:
        """See `pushed_copy.Ways`."""
        if link.works:
            self._trials.worked(*link.key)
        if head is not None:
            self._heads.pop(head, None)
        if not link.is_open and not link.copies:
            self._files.background(partial(self._links_made.end, link))

    def refused(self, leader: int, reason: str) -> None:
        """See `pushed_copy.Ways`."""
        self._fallbacks += 1
        self._say(leader, f"over TCP: {reason}")

    def pushed(self, link: LinkToLeader) -> None:
        """See `pushed_copy.Ways`."""
        self._say(link.leader, f"over {link.engine.transport}: it writes into this broker's files")

    def _say(self, leader: int, how: str) -> None:
        if self._told.get(leader) != how:
            self._told[leader] = how
            log.info("copying from broker %d %s", leader, how)

    def _close_in(self, link: LinkToLeader, *, failed: bool = False) -> None:
        """Its replicas fetch; the last one closes it."""
        link.is_open = False
        task = self._in.get(link.leader)
        if task is not None and opened_link(task) is link:
            del self._in[link.leader]
        for copy in list(link.copies):
            copy.end("the link is cut", failed=failed)
        if not link.copies:
            self._files.background(partial(self._links_made.end, link))

    # -- the end -----------------------------------------------------------------------------------

    def statistics(self) -> dict[str, int]:
        """See `PushSide`."""
        copies = list(self._heads.values())
        opened = [task for task in list(self._in.values()) if opened_link(task) is not None]
        return {
            "replicas_pushed": len(self._logs_of),
            "replicas_pushed_bytes": self._logs_of.bytes_pushed,
            "replicas_pushed_here": sum(copy.state is State.PUSHED for copy in copies),
            "replicas_push_refusals": self._logs_of.refusals,
            "replicas_push_links": len(self._out) + len(opened),
            "replicas_push_links_cut": self._cuts,
            "replicas_push_fallbacks": self._fallbacks,
        }

    def close(self) -> None:
        """See the class."""
        outs, logs = list(self._out.values()), list(self._logs.values())
        self._out.clear()
        self._in = {}
        for out in outs:
            out.is_open = False
        end_all(
            "replication",
            self._links_made.close,
            *(partial(led.link_closed, out) for out in outs for led in logs),
            # Of replicas that could not take back their leader's keys.
            *(head.forget for head in list(self._heads)),
        )


def _report(result: Any, error: BaseException | None) -> None:
    if error is not None:
        log.error("the news of a replica's head were not handled", exc_info=error)


__all__ = ["Replication"]
