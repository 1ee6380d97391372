"""The partitions of which this broker has a replica, and what handlers ask about them.

Owns: one `Replica` for each local log that a cluster knows, the fetch sessions of other brokers
here (`fetch_sessions`), this broker's fetches from other leaders (`fetcher`), and what is on its
way to the controller (`in_sync_changes`).  Everything runs on the event loop; file work is passed
to threads.

How others use it.  `add` when a local log exists (made, or loaded at the start) and the cluster
names this broker among its replicas; `await remove(tp)` before that log is deleted.  `appended`
after each append to a log that is led here, and after a commit by RDMA for which `watch` asked.
`answer` for the requests of `protocol.REPLICA_API_KEYS`, `connection_closed` when a connection that
brought one has ended.

Hooks, lists of callables that others add to before `start`:

===================  ============================================================================
`on_lead`            (tp, partition, epoch): this broker leads from now on
`on_resign`          (tp, partition) -> None or an awaitable: it does not lead any more.  Whatever
                     clients were granted here has ended when the awaitable is done; only then
                     does the replica follow another leader
`on_high_watermark`  (tp, partition): records became readable, here as leader or follower
===================  ============================================================================
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping
from typing import Any

from kdirect.cluster.election import Partition as PartitionPicture
from kdirect.cluster.following_replica import BeginToLead, Follow
from kdirect.cluster.image import Settings
from kdirect.cluster.leading_replica import (
    Configured,
    Learned,
    LinkLost,
    Registered,
    epoch_end,
)
from kdirect.cluster.partition_state import NO_LEADER, leads
from kdirect.errors import (
    FencedLeaderEpochError,
    KdirectError,
    LeaderNotAvailableError,
    LogError,
    NotLeaderError,
    ProtocolError,
    ReplicaNotAvailableError,
    UnknownLeaderEpochError,
    UnknownTopicError,
)
from kdirect.format import protocol as p
from kdirect.format.error_codes import ErrorCode
from kdirect.format.replica_fetch import Feeding, Push
from kdirect.log.partition import Partition
from kdirect.member import epoch_questions
from kdirect.member.epoch_questions import EpochQuestions, EpochRow
from kdirect.member.failed_replicas import FailedReplicas
from kdirect.member.fetch_sessions import FetchSessions, Found
from kdirect.member.fetcher import Fetcher
from kdirect.member.following import Replica, Ways, begin_leading
from kdirect.member.in_sync_changes import InSyncChanges
from kdirect.member.leading import Leader, Surroundings
from kdirect.member.metadata import Metadata
from kdirect.member.push import PushSide
from kdirect.member.throttle import Pace, Throttles
from kdirect.model import TopicPartition
from kdirect.wire.environment import Environment

log = logging.getLogger("kdirect.member")

NO_RATES: Mapping[str, Any] = {}
StateBehind = Callable[[Partition, int, int, int], Awaitable[Mapping[str, Any]]]

# `on_thread(partition, work, done)`: see `kdirect.broker.files.FileThreads.for_partition`.
OnThread = Callable[
    [Partition, Callable[[], Any], Callable[[Any, BaseException | None], None]], None
]


class Replicas:
    """See the module.  Life: construct, add hooks, `start` on the event loop once the membership is
    registered, `add` what there is, `await stop()`.

    `membership` and `peers` as in `kdirect.member`; `on_thread` does file work of one partition,
    `read(work)` awaits what reads cold bytes, and `release(segment)` gives back what was read
    (`FileThreads`).  `lag_ms`: replica.lag.time.max.ms; `min_in_sync`: the broker's
    min.insync.replicas, for topics that have none of their own; `throttle_rates`: its properties
    of these names."""

    def __init__(
        self,
        membership: Any,
        peers: Any,
        *,
        on_thread: OnThread,
        hurry: Callable[[Partition], None] = lambda partition: None,
        read: Callable[..., Awaitable[Any]],
        release: Callable[[Any], None],
        environment: Environment,
        lag_ms: int = 30_000,
        min_in_sync: int = 1,
        throttle_rates: Mapping[str, Any] = NO_RATES,
    ) -> None:
        self.on_lead: list[Callable[[TopicPartition, Partition, int], None]] = []
        self.on_resign: list[Callable[[TopicPartition, Partition], Awaitable[None] | None]] = []
        self.on_high_watermark: list[Callable[[TopicPartition, Partition], None]] = []
        # The high watermark may have moved without a word: see `Surroundings.released`.
        self.on_released: list[Callable[[TopicPartition, Partition], None]] = []
        # Fewer replicas are in sync than min.insync.replicas, and were enough before.
        self.on_too_few: list[Callable[[TopicPartition, Partition], None]] = []
        # `watch(tp)`: have `appended` called, on the loop, after the next commit by RDMA.  Of a
        # partition with replicas somebody always watches: the sessions of its followers, whenever
        # they have looked at it, or this, where it has none.
        self.watch: Callable[[TopicPartition], None] = lambda tp: None
        # Replication by WRITEs into followers' files; set before `start`, None: by Fetch alone.
        self.push: PushSide | None = None
        # `state_behind(partition, leader, epoch, offset)`: what `Partition.start_over` is to know
        # of the log below `offset`, of which the leader of `epoch` keeps nothing; KdirectError: it
        # cannot be known yet.
        self.state_behind: StateBehind = _no_state
        self._membership = membership
        self._metadata: Metadata | None = None
        self._environment = environment
        self._lag_ms = lag_ms
        self._settings = Settings(min_in_sync=min_in_sync)
        self._replicas: dict[TopicPartition, Replica] = {}
        # The newest epoch of replicas that are not here any more: by topic id, for a topic of the
        # same name may come.
        self._left: dict[tuple[Any, int], int] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = False
        self._shrinks = self._expansions = 0
        self._broker = node_id = membership.metadata.node_id
        self._changes = InSyncChanges(membership, node_id, self._incarnation)
        self.failed = FailedReplicas(membership, node_id)
        self.throttles = Throttles(
            node_id, lambda: self._metadata, environment.monotonic, throttle_rates
        )
        self._fetcher = Fetcher(peers, node_id, self._incarnation, self.throttles.followed)
        self._questions = EpochQuestions(peers, node_id)
        self._sessions = self._fetch_sessions(read, release)
        self._around = self._surroundings(on_thread)._replace(hurry=hurry)
        self._ways = self._ways_to_others()

    def _ways_to_others(self) -> Ways:
        return Ways(
            self._fetcher,
            self._questions,
            self._lead,
            self._is_replicated,
            self._led,
            self._end,
            lambda: self.push,
            lambda *asked: self.state_behind(*asked),
        )

    def _fetch_sessions(
        self, read: Callable[..., Awaitable[Any]], release: Callable[[Any], None]
    ) -> FetchSessions:
        """What serves followers."""
        sessions = FetchSessions(
            find=self._find,
            incarnation_of=self._incarnation_of,
            read=read,
            release=release,
            watch=lambda tp: self.watch(tp),
            offers=self._offers,
            held_back=self._held_back,
        )
        sessions.on_lost = self._link_lost
        return sessions

    def _surroundings(self, on_thread: OnThread) -> Surroundings:
        """What leaders and followers work with."""
        return Surroundings(
            self._broker,
            self._changes,
            on_thread,
            self._shown,
            lambda: int(self._environment.monotonic() * 1000),
            self._environment.time_ms,
            self._sessions.end_push,
            self._sessions.want_file,
            self._sessions.begin_push,
            self._sessions.fetches,
            self._released,
            self._too_few,
        )

    async def start(self) -> None:
        """Follow the membership's picture of the cluster from now on."""
        self._membership.subscribe(self._changed)
        self._changed(None, self._membership.metadata)
        self._tick_later()

    async def stop(self) -> None:
        """End fetches and timers; what waits fails with NotLeaderError.  Logs stay as they are."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
        self._fetcher.stop()
        self._questions.stop()
        self._changes.stop()
        self.failed.stop()
        await asyncio.gather(*(replica.close() for replica in self._replicas.values()))
        self._sessions.stop()

    # -- local logs --------------------------------------------------------------------------------

    def add(self, partition: Partition, *, again: bool = False) -> None:
        """There is a local log of this partition: lead it or follow, as the cluster says.  `again`:
        it was removed for a moment only, so the epoch that it was in goes on."""
        tp = partition.topic_partition
        if again:
            self._left.pop((partition.topic_id, tp.partition), None)
        replica = Replica(self._around, self._ways, tp, partition)
        self._replicas[tp] = replica
        if self._metadata is not None:
            self._look_at(replica, self._metadata.partition(tp))

    async def remove(self, tp: TopicPartition) -> None:
        """The local log is about to go: end everything that touches it."""
        replica = self._replicas.pop(tp, None)
        if replica is None:
            return
        key = (replica.partition.topic_id, tp.partition)
        self._left[key] = replica.following.newest_epoch
        await replica.close()
        self._count(replica.leader)
        self._sessions.mark(tp)

    async def fail(self, partitions: Iterable[TopicPartition]) -> None:
        """The directory of their logs has failed: others are to lead, and clients are told so."""
        doomed = list(partitions)
        self.failed.add(doomed)  # first: others lead the sooner
        await asyncio.gather(*(self.remove(tp) for tp in doomed))

    def has_no_room(self, tp: TopicPartition) -> None:
        """The log could not be written for lack of room.  One that follows tells its leader when it
        asks for more; one that leads, or cannot even begin to lead or follow, tells the controller.
        """
        replica = self._replicas.get(tp)
        picture = self._metadata.partition(tp) if self._metadata is not None else None
        if replica is None or replica.is_following or picture is None or picture.state is None:
            return
        if self._broker in picture.state.in_sync and len(picture.state.in_sync) > 1:
            self.failed.is_full(tp)

    # -- what handlers ask -------------------------------------------------------------------------

    def leader(self, tp: TopicPartition, epoch: int = -1) -> Partition:
        """The log, if this broker leads.  UnknownTopicError, NotLeaderError,
        LeaderNotAvailableError, ReplicaNotAvailableError; FencedLeaderEpochError and
        UnknownLeaderEpochError where the client believes in another `epoch` (-1: in none)."""
        leader = self._replica(tp, epoch).leader
        if leader is None:
            metadata = self._metadata
            if metadata is not None and metadata.leader_of(tp) == NO_LEADER:
                raise LeaderNotAvailableError(
                    f"{tp} has no leader at present",
                    hint="start a broker that has all of its records",
                )
            raise NotLeaderError(
                f"this broker does not lead {tp}", hint="ask for metadata again, then the leader"
            )
        return leader.partition

    def readable(self, tp: TopicPartition, epoch: int = -1) -> Partition:
        """The log, whether this broker leads or follows (KIP-392).  Errors as `leader`."""
        return self._replica(tp, epoch).partition

    def epoch(self, tp: TopicPartition) -> int:
        """The leader epoch that this replica knows; -1 where there is none."""
        replica = self._replicas.get(tp)
        return -1 if replica is None else replica.following.newest_epoch

    def may_append(self, tp: TopicPartition) -> None:
        """NotEnoughReplicasError below min.insync.replicas.  To be asked for acks=-1 only."""
        leader = self._leader_here(tp)
        if leader is not None:
            leader.may_append()

    def committed(
        self, tp: TopicPartition, end_offset: int, leader_epoch: int, timeout_s: float
    ) -> asyncio.Future[None]:
        """Done when every record below `end_offset` is committed, in the leader epoch in which it
        was appended (-1: the present one).  NotEnoughReplicasAfterAppendError, TimedOutError,
        NotLeaderError."""
        leader = self._leader_here(tp)
        if leader is None or leader_epoch not in (-1, leader.epoch):
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            future.set_exception(NotLeaderError(f"this broker does not lead {tp} any more"))
            return future
        return leader.committed(end_offset, timeout_s)

    def knows_high_watermark(self, tp: TopicPartition) -> bool:
        """False for a leader whose high watermark may be lower than one that was shown before.  To
        be asked before the high watermark is read.  Any thread."""
        leader = self._leader_here(tp)
        if leader is None:
            return tp in self._replicas
        return leader.knows_high_watermark

    def diverging(
        self, tp: TopicPartition, last_fetched_epoch: int, offset: int
    ) -> tuple[int, int] | None:
        """(epoch, end) where a reader's log parts from this one, or None where it does not."""
        if last_fetched_epoch < 0:
            return None
        partition = self.readable(tp)
        epoch, end = partition.end_offset_for_epoch(last_fetched_epoch)
        if epoch < 0 or (epoch == last_fetched_epoch and offset <= end):
            return None
        return epoch, end

    def epoch_end(self, tp: TopicPartition, epoch: int) -> tuple[int, int]:
        """OffsetForLeaderEpoch: (the largest epoch that is not above `epoch`, where it ends)."""
        return self.leader(tp).end_offset_for_epoch(epoch)

    def preferred_replica(self, tp: TopicPartition, rack: str, offset: int) -> int:
        """The broker that a consumer in `rack` should fetch `offset` from (KIP-392); -1: here."""
        leader, metadata = self._leader_here(tp), self._metadata
        if leader is None or metadata is None or not rack:
            return -1
        racks = {b: node.registration.rack for b, node in metadata.brokers.items()}
        if racks.get(self._broker) == rack:
            return -1
        partition = leader.partition
        if offset < max(partition.remote_end_offset, partition.local_log_start_offset):
            return -1  # it may be gone at followers
        there = [
            follower
            for follower in leader.leading.followers
            if follower.broker in leader.leading.state.in_sync
            and racks.get(follower.broker) == rack
            and follower.end >= offset
        ]
        return max(there, key=lambda f: f.end).broker if there else -1

    def low_watermark(self, tp: TopicPartition) -> asyncio.Future[int]:
        """The least log start offset of all replicas that live, once it has reached the leader's
        present one (DeleteRecords)."""
        leader = self._leader_here(tp)
        if leader is None:
            raise NotLeaderError(f"this broker does not lead {tp}", hint="ask the leader")
        self._sessions.mark(tp)
        return leader.low_watermark()

    def describe(self, tp: TopicPartition) -> list[dict[str, Any]]:
        """A row for each replica, where this broker leads: broker, end, lag, in_sync.  Any
        thread."""
        leader = self._leader_here(tp)
        return [] if leader is None else leader.describe()

    def statistics(self) -> dict[str, int]:
        """Counters, by the names of `kdirect.metrics`.  Any thread."""
        replicas = list(self._replicas.values())
        leaders = [leader for r in replicas if (leader := r.leader) is not None]
        return {
            "replicas": len(replicas),
            "replicas_led": len(leaders),
            "replicas_under_replicated": sum(
                len(leader.leading.state.in_sync) < len(leader.leading.replicas)
                for leader in leaders
            ),
            "replicas_under_min_in_sync": sum(not leader.has_enough for leader in leaders),
            "replicas_in_sync_shrinks": self._shrinks + sum(x.shrinks for x in leaders),
            "replicas_in_sync_expansions": self._expansions + sum(x.expansions for x in leaders),
            "replicas_fetch_requests": self._sessions.requests,
            "replicas_sent_bytes": self._sessions.sent_bytes,
            "replicas_fetched_bytes": self._fetcher.fetched_bytes,
            "replicas_pulled_bytes": 0 if self.push is None else self.push.pulled_bytes,
            "replicas_fetch_failures": self._fetcher.failures,
        }

    # -- what happens to logs ----------------------------------------------------------------------

    def appended(self, tp: TopicPartition) -> None:
        """The log of `tp` has grown: followers that wait are answered."""
        replica = self._replicas.get(tp)
        if replica is not None and replica.leader is not None and not replica.leader.is_alone:
            self._sessions.grown(tp)  # first: then the next commit by RDMA is told of, too
            replica.leader.appended()

    def start_moved(self, tp: TopicPartition) -> None:
        """The log of `tp` starts later: followers are told, also where nothing is appended."""
        self._sessions.mark(tp)

    def is_replicated(self, tp: TopicPartition) -> bool:
        """Are there other replicas of a partition that this broker leads?"""
        leader = self._leader_here(tp)
        return leader is not None and not leader.is_alone

    def watch_readable(self, tp: TopicPartition) -> None:
        """Somebody waits for more readable records: have `on_high_watermark` called although the
        high watermark moves without Python here."""
        replica = self._replicas.get(tp)
        if replica is None:
            return
        if replica.leader is not None:
            replica.leader.watch()
        else:
            replica.watch()

    def feeding(self) -> dict[TopicPartition, Feeding]:
        """How each replica here gets its records."""
        return {tp: replica.feeding() for tp, replica in self._replicas.items()}

    def flushed(self, tp: TopicPartition) -> None:
        """More of the log of `tp` is on disk: what waited for that may be committed now."""
        replica = self._replicas.get(tp)
        if replica is not None and replica.leader is not None:
            replica.leader.shown()

    # -- requests of other brokers -----------------------------------------------------------------

    async def answer(self, connection: Hashable, request: Any) -> list[Any]:
        """The body of the response to a request of `protocol.REPLICA_API_KEYS`, as buffers.
        `connection` tells connections apart."""
        if request.API_KEY == p.FetchAsReplicaRequest.API_KEY:
            return await self._sessions.answer(connection, request)
        if request.API_KEY != p.EndOfEpochRequest.API_KEY:
            return await self._answer_push(request)
        response = epoch_questions.answer(request, self._epoch_row)
        return [response.encode(version=0)]

    async def _answer_push(self, request: Any) -> list[Any]:
        if self.push is None:
            raise ProtocolError(f"this broker takes no {type(request).__name__}")
        else:
            response = await self.push.answer(request, self._find, self._incarnation_of)
        return [response.encode(version=0)]

    def _offers(self, partition: Partition, offset: int) -> Push:
        return Push.NOTHING if self.push is None else self.push.offers(partition, offset)

    def _held_back(self, leader: Leader, broker: int) -> Pace | None:
        in_sync = broker in leader.leading.state.in_sync
        return self.throttles.led(leader.tp, in_sync=in_sync)

    def connection_closed(self, connection: Hashable) -> None:
        """What this connection fetched is not on its way any more."""
        self._sessions.connection_closed(connection)

    # -- the picture of the cluster ----------------------------------------------------------------

    def _changed(self, before: Metadata | None, after: Metadata) -> None:
        """The membership has a newer picture."""
        if self._stopped:
            return
        before, self._metadata = self._metadata, after
        self.throttles.changed(after)
        registered = None
        if before is None or _incarnations(before) != _incarnations(after):
            registered = Registered(_incarnations(after))
            if self.push is not None:
                self.push.registered(after.incarnation, self._incarnation_of)
        rules = before is None or before.image.broker_configs != after.image.broker_configs
        for tp, replica in list(self._replicas.items()):
            known = before.partition(tp) if before is not None else None
            now = after.partition(tp)
            if known is not now or before is None or before.incarnation != after.incarnation:
                self._look_at(replica, now)
            leader = replica.leader
            if leader is not None:
                if registered is not None:
                    leader.feed(registered)
                old = before.topic(tp.topic) if before is not None else None
                new = after.topic(tp.topic)
                if rules or old is None or new is None or old.config is not new.config:
                    self._configure(leader)
                    self._sessions.mark(tp)  # what held a follower back may be gone
        self.failed.look()
        self._fetcher.retry()

    def _look_at(self, replica: Replica, picture: PartitionPicture | None) -> None:
        """What the store says of one partition."""
        metadata = self._metadata
        if metadata is None or picture is None or picture.state is None:
            return
        state = picture.state
        leader = state.leader
        if leader == self._broker and not leads(state, self._broker, metadata.incarnation):
            leader = NO_LEADER
        left = self._left.get((replica.partition.topic_id, replica.tp.partition), -1)
        if state.leader_epoch > left:
            replica.feed(Follow(leader, state.leader_epoch))
        if replica.leader is not None and replica.leader.epoch == state.leader_epoch:
            replica.leader.feed(Learned(state))
            if self.throttles.led(replica.tp, in_sync=False) is not None:
                self._sessions.mark(replica.tp)  # nothing holds a follower back that is in sync
            if tuple(sorted(picture.replicas)) != replica.leader.leading.replicas:
                self.watch(replica.tp)
                replica.leader.assigned(picture.replicas)

    def _configure(self, leader: Leader) -> None:
        wanted = Configured(self._min_in_sync(leader.tp), self._lag_ms)
        if (leader.leading.min_in_sync, leader.leading.lag_ms) != wanted:
            leader.feed(wanted)

    def _min_in_sync(self, tp: TopicPartition) -> int:
        metadata = self._metadata
        if metadata is None:
            return 1
        return metadata.image.rules(tp.topic, self._settings).min_in_sync

    def _incarnation(self) -> int:
        return self._metadata.incarnation if self._metadata is not None else -1

    def _incarnation_of(self, broker: int) -> int:
        metadata = self._metadata
        node = metadata.brokers.get(broker) if metadata is not None else None
        return -1 if node is None else node.incarnation

    # -- leading -----------------------------------------------------------------------------------

    def _is_replicated(self, tp: TopicPartition) -> bool:
        picture = self._metadata.partition(tp) if self._metadata is not None else None
        return picture is not None and len(picture.replicas) > 1

    def _lead(self, replica: Replica, effect: BeginToLead, bound: bool) -> Leader:
        metadata = self._metadata
        assert metadata is not None
        picture = metadata.partition(replica.tp)
        if picture is None or picture.state is None:
            raise KdirectError(f"{replica.tp} is gone from the cluster's metadata")
        if picture.state.leader_epoch != effect.epoch:
            raise KdirectError(f"{replica.tp} is in a newer epoch than {effect.epoch} already")
        return begin_leading(
            self._around,
            replica,
            effect,
            state=picture.state,
            replicas=picture.replicas,
            registered=_incarnations(metadata),
            min_in_sync=self._min_in_sync(replica.tp),
            lag_ms=self._lag_ms,
            bound=bound,
        )

    def _led(self, replica: Replica) -> None:
        log.info("leading %s in epoch %d", replica.tp, replica.epoch)
        if replica.leader is not None and not replica.leader.is_alone:
            self.watch(replica.tp)
        self._sessions.mark(replica.tp)
        for hook in self.on_lead:
            _call(hook, replica.tp, replica.partition, replica.epoch)

    def _end(self, replica: Replica) -> list[Awaitable[None]]:
        """This broker leads it no longer; what is to be waited for."""
        log.info("not leading %s any more", replica.tp)
        self._count(replica.leader)
        self._sessions.mark(replica.tp)
        ended = [_call(hook, replica.tp, replica.partition) for hook in self.on_resign]
        if replica.leader is not None and replica.leader.pushed is not None:
            ended.append(replica.leader.pushed.resign())
        return [awaitable for awaitable in ended if awaitable is not None]

    def _count(self, leader: Leader | None) -> None:
        if leader is not None:
            self._shrinks += leader.shrinks
            self._expansions += leader.expansions

    def _shown(self, tp: TopicPartition) -> None:
        self._sessions.mark_soon(tp)
        self._tell(self.on_high_watermark, tp)

    def _released(self, tp: TopicPartition) -> None:
        self._tell(self.on_released, tp)

    def _too_few(self, tp: TopicPartition) -> None:
        self._tell(self.on_too_few, tp)

    def _tell(self, hooks: Iterable[Callable[..., None]], tp: TopicPartition) -> None:
        replica = self._replicas.get(tp)
        if replica is not None:
            for hook in hooks:
                _call(hook, tp, replica.partition)

    def _link_lost(self, broker: int, partitions: list[TopicPartition]) -> None:
        for tp in partitions:
            leader = self._leader_here(tp)
            if leader is not None:
                leader.appended()
                leader.feed(LinkLost(broker))

    def _tick_later(self) -> None:
        if not self._stopped:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._lag_ms / 2000, self._tick)

    def _tick(self) -> None:
        for replica in list(self._replicas.values()):
            if replica.leader is not None:
                replica.leader.ticked()
                # A commit by RDMA may be told of late, or not, when its producer is gone; and the
                # log may start elsewhere, which those that are pushed do not hear.
                if replica.leader.pushed is not None or replica.leader.has_more:
                    self._sessions.mark(replica.tp)
        self._tick_later()

    # -- looking up --------------------------------------------------------------------------------

    def _leader_here(self, tp: TopicPartition) -> Leader | None:
        replica = self._replicas.get(tp)
        return None if replica is None else replica.leader

    def _replica(self, tp: TopicPartition, epoch: int) -> Replica:
        replica = self._replicas.get(tp)
        if replica is None:
            raise self._absence(tp)
        known = replica.following.newest_epoch
        if 0 <= epoch < known:
            raise FencedLeaderEpochError(
                f"{tp} is in leader epoch {known}, not {epoch} any more",
                hint="ask for metadata again",
            )
        if epoch > known:
            raise UnknownLeaderEpochError(
                f"leader epoch {epoch} of {tp} is newer than {known}, the one known here",
                hint="ask again soon",
            )
        return replica

    def _absence(self, tp: TopicPartition) -> KdirectError:
        metadata = self._metadata
        picture = metadata.partition(tp) if metadata is not None else None
        if picture is None:
            return UnknownTopicError(f"there is no partition {tp}")
        if tp in self.failed:
            return LogError(
                f"the log directory of {tp} on this broker has failed",
                hint="ask for metadata again: another broker leads; see the broker's log",
            )
        if self._broker in picture.replicas:
            return ReplicaNotAvailableError(
                f"the replica of {tp} on this broker is being made", hint="ask again soon"
            )
        return NotLeaderError(
            f"this broker has no replica of {tp}", hint="ask for metadata again, then the leader"
        )

    def _find(self, tp: TopicPartition, epoch: int) -> Found:
        """Who leads, for a follower that believes in `epoch`."""
        replica = self._replicas.get(tp)
        if replica is None:
            picture = self._metadata.partition(tp) if self._metadata is not None else None
            absent = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            return Found(None, absent if picture is None else ErrorCode.NOT_LEADER_OR_FOLLOWER)
        known = replica.following.newest_epoch
        if epoch > known:
            return Found(None, ErrorCode.UNKNOWN_LEADER_EPOCH)
        if epoch < known:
            return Found(None, ErrorCode.FENCED_LEADER_EPOCH)
        if replica.leader is None:
            return Found(None, ErrorCode.NOT_LEADER_OR_FOLLOWER)
        return Found(replica.leader, 0)

    def _epoch_row(self, tp: TopicPartition, epoch: int, asked: int) -> EpochRow | int:
        leader, error = self._find(tp, epoch)
        if leader is None:
            return error
        partition = leader.partition
        start, end = partition.first_kept_offset, partition.log_end_offset
        found, found_end = epoch_end(partition.epochs_with_records(), start, end, asked)
        return EpochRow(leader.epoch, found, found_end, start, end)


async def _no_state(
    partition: Partition, leader: int, epoch: int, offset: int
) -> Mapping[str, Any]:
    return {}


def _incarnations(metadata: Metadata) -> tuple[tuple[int, int], ...]:
    return tuple(sorted((b, node.incarnation) for b, node in metadata.brokers.items()))


def _call(hook: Callable[..., Any], *arguments: Any) -> Any:
    """A hook that fails stops nobody else."""
    try:
        return hook(*arguments)
    except Exception:
        log.exception("a hook of replicas failed for %s", arguments[0])
        return None
