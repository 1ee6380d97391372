"""A consumer's membership in a group of KIP-848 (``group.protocol=consumer``): heartbeats, and what
their answers give and take.

It owns the requests and the names of topics, which the coordinator calls by their ids.  What the
member says, may read and has to give up is decided by `consumer_member`, a pure machine; the
thread, commits and the end are `group_member`'s.

The coordinator decides who reads what, how often members send heartbeats, and when it takes one for
dead.  A member asks nobody to come together: what stays its own is read on throughout.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from kdirect.client.consumer_member import (
    FENCED,
    LEAVES,
    LEAVES_FOR_A_WHILE,
    ConsumerMember,
    Partition,
    Say,
)
from kdirect.client.coordinator_link import ELSEWHERE
from kdirect.client.group_member import HINTS, JOINING, OUT, STABLE, GroupMember, Owner
from kdirect.errors import ConfigError, KdirectError
from kdirect.format import protocol as p
from kdirect.format.error_codes import ErrorCode
from kdirect.format.schema import build
from kdirect.model import TopicPartition
from kdirect.options import CLIENT
from kdirect.wire.broker_errors import broker_error
from kdirect.wire.cluster import Cluster

log = logging.getLogger("kdirect.client")

_PASSING = ELSEWHERE | {ErrorCode.COORDINATOR_LOAD_IN_PROGRESS}
_UNNAMED_S = 0.05  # between two looks for a topic of which only the id is known
_CHOSEN_IDS = 1  # the version of the heartbeat from which on members make their ids themselves


class ConsumerMembership(GroupMember):
    """See the module, and `GroupMember`."""

    incremental = True
    finds_topics = True

    def __init__(self, cluster: Cluster, settings: Mapping[str, Any], owner: Owner) -> None:
        super().__init__(cluster, settings, owner)
        self._assignor: str | None = settings["group.remote.assignor"]
        self._rack: str | None = settings["client.rack"]
        self._rules = ConsumerMember(self._session_ms, settings["max.poll.interval.ms"])
        self.member_id = str(uuid.uuid4())
        self._error: KdirectError | None = None  # for the next `advance` to raise
        self._news = threading.Event()  # there may be something for `advance`
        self._names: dict[uuid.UUID, str] = {}
        self._given: frozenset[Partition] = frozenset()  # what `advance` said last

    # -- on the consumer's thread ------------------------------------------------------------------

    def join(self, topics: Iterable[str], regex: str = "") -> None:
        """See `GroupMember.join`."""
        with self._lock:
            self._rules.subscribe(frozenset(topics), regex)
            self._rules.begin()
            self._subscribed = True
            self.state, self.generation = JOINING, -1
            self.lost = ""
        self.start_thread()
        self._poked.set()

    @property
    def settled(self) -> bool:
        """See `GroupMember.settled`."""
        return self.state == STABLE and self._rules.wanted is None

    def advance(self, timeout_ms: float) -> list[TopicPartition] | None:
        """See `GroupMember.advance`.  What is to be given back comes first: what takes its place is
        told by the call after the coordinator has heard of it."""
        deadline = self._environment.monotonic() + timeout_ms / 1000
        while True:
            with self._lock:
                self._news.clear()
                error, self._error = self._error, None
                rules = self._rules
                wanted = rules.wanted
                gives = wanted is not None and bool(rules.owned - wanted)
                ready = wanted is not None and (gives or rules.may_take)
            if error is not None:
                raise error
            if self.state == OUT:
                return None
            if wanted is not None and ready:
                return self._named(wanted)
            left_s = deadline - self._environment.monotonic()
            if left_s <= 0 or not self._news.wait(left_s):
                return None

    def _named(self, wanted: frozenset[Partition]) -> list[TopicPartition] | None:
        """Those of the partitions that have a name, and are not of a topic that was made once more
        in the place of one that is still read.  None: only unnamed ones are new."""
        if any(topic_id not in self._names for topic_id, _ in wanted):
            self._learn_names()
        self._given = wanted
        owned = {self._tp(x): x for x in self._rules.owned}
        named = {self._tp(x): x for x in wanted if x[0] in self._names}
        if len(named) < len(wanted) and owned == named:
            self._environment.sleep(_UNNAMED_S)
            return None
        return [tp for tp, x in named.items() if owned.get(tp, x) == x]

    def _learn_names(self) -> None:
        names: list[str]
        if self._rules.regex:
            names = list(self._cluster.topics())
        else:
            names = list(self._cluster.refresh(sorted(self._rules.topics)))
        for name in names:
            topic_id = self._cluster.topic_id(name)
            if topic_id is not None:
                self._names[uuid.UUID(topic_id)] = name

    def _tp(self, x: Partition) -> TopicPartition:
        return TopicPartition(self._names[x[0]], x[1])

    def gave_back(self, kept: Iterable[TopicPartition]) -> bool:
        """See `GroupMember.gave_back`."""
        still = frozenset(kept)
        with self._lock:
            rules = self._rules
            rules.gave_back(frozenset(x for x in rules.owned if self._tp(x) in still))
        self._poked.set()
        return True

    def took(self, tps: Iterable[TopicPartition]) -> bool:
        """See `GroupMember.took`."""
        those = frozenset(tps)
        given = self._given
        known = frozenset(x for x in given if x[0] in self._names and self._tp(x) in those)
        with self._lock:
            if self.state != STABLE or self._rules.is_late(self._now_ms()):
                return False
            before = self._rules.owned
            if not self._rules.take(given, known):
                return False
            if self._rules.owned != before:
                self.rebalances += 1
        self._poked.set()
        return True

    def _asks_for_offsets(self) -> tuple[str, int] | None:
        with self._lock:
            return (self.member_id, self.generation) if self.state == STABLE else None

    # -- heartbeats, on the thread -----------------------------------------------------------------

    def _now_ms(self) -> float:
        return self._environment.monotonic() * 1000

    def _beats(self) -> bool:
        return self.state in (JOINING, STABLE)

    def _beat(self) -> float:
        now_ms = self._now_ms()
        with self._lock:
            late = self._rules.is_late(now_ms)
            say = self._rules.heartbeat(now_ms)
        drops = self._link.drops
        if late:
            self._fence("no answer of the coordinator for most of session.timeout.ms")
            return self._interval_s
        try:
            answer = self._ask(say)
        except KdirectError as e:
            if not e.retriable:
                self._fail(say, e)
                return self._interval_s
            return self._try_again(say, f"{e}", drops)
        code = answer.error_code
        if not code:
            return self._heard(say, answer)
        if code in _PASSING:
            return self._try_again(say, ErrorCode(code).name, drops if code in ELSEWHERE else None)
        if code in FENCED:
            return self._fenced(say, code)
        what = f"group {self.group_id!r}"
        self._fail(say, broker_error(code, what, answer.error_message, hint=HINTS.get(code, "")))
        return self._interval_s

    def _ask(self, say: Say) -> Any:
        with self._lock:
            patience_ms = min(self._cluster.timeout_ms, self._rules.left_ms(say.sent_ms))
        connection = self._link.connection(patience_ms)
        message = self._message(say, say.epoch)
        if not connection.speaks(message, _CHOSEN_IDS):
            if say.regex:
                raise ConfigError(
                    f"the broker at {connection.peer} does not match regular expressions for"
                    " group.protocol=consumer",
                    hint="name the topics, or use group.protocol=classic",
                )
            if say.epoch == 0:
                message.member_id = ""  # such a broker makes the id
        with self._lock:
            patience_ms = min(patience_ms, self._rules.left_ms(self._now_ms()))
        return connection.request(message, patience_ms)

    def _message(self, say: Say | None, epoch: int) -> Any:
        fields: dict[str, Any] = {}
        if say is not None and say.full:
            fields = {
                "rack_id": self._rack,
                "rebalance_timeout_ms": say.rebalance_timeout_ms,
                "subscribed_topic_names": sorted(say.topics or ()),
                "subscribed_topic_regex": say.regex,
                "server_assignor": self._assignor,
            }
        if say is not None and say.owned is not None:
            topics: dict[uuid.UUID, list[int]] = {}
            for topic_id, index in sorted(say.owned):
                topics.setdefault(topic_id, []).append(index)
            fields["topic_partitions"] = [
                {"topic_id": topic_id, "partitions": indexes}
                for topic_id, indexes in topics.items()
            ]
        return build(
            p.ConsumerGroupHeartbeatRequest,
            group_id=self.group_id,
            member_id=self.member_id,
            member_epoch=epoch,
            instance_id=self._instance_id,
            **fields,
        )

    def _heard(self, say: Say, answer: Any) -> float:
        assignment = None
        if answer.assignment is not None:
            assignment = frozenset(
                (t.topic_id, index)
                for t in answer.assignment.topic_partitions
                for index in t.partitions
            )
        with self._lock:
            rules = self._rules
            if not self._beats() or not rules.answered(say, answer.member_epoch, assignment):
                return 0.0
            self.member_id = answer.member_id or self.member_id
            joined = self.state == JOINING
            self.state, self.generation = STABLE, answer.member_epoch
            self._failures = 0
            more = rules.has_to_say
        if joined or assignment is not None:
            log.info(
                "member %s of group %s, epoch %d: %s",
                self.member_id,
                self.group_id,
                answer.member_epoch,
                "as before" if assignment is None else f"{len(assignment)} partitions",
            )
        self._notify()
        self._interval_s = max(1, answer.heartbeat_interval_ms) / 1000
        return 0.0 if more else self._interval_s

    def _try_again(self, say: Say, why: str, drops: int | None) -> float:
        """Say it later.  `drops`: on a new connection, unless there is one since then."""
        log.info("heartbeat of group %s: %s; trying again", self.group_id, why)
        with self._lock:
            self._rules.failed(say)
        self._news.set()
        if drops is not None and not self._stop.is_set():
            self._link.drop(drops)
        return min(self._backoff_s(), self._interval_s)

    def _fenced(self, say: Say, code: int) -> float:
        with self._lock:
            over = self._rules.refused(say, code)
            if over and self.state == JOINING:
                self._rules.begin()
        if over:
            self._fence(ErrorCode(code).name)
        return self._backoff_s()

    def _fail(self, say: Say, error: KdirectError) -> None:
        """The coordinator will not have this member: the next poll says why."""
        with self._lock:
            if not self._rules.failed(say) or not self._beats():
                return
            self._error = error
            if self.state == STABLE:
                self.lost = str(error)
            self.state, self.generation = OUT, -1
        self._notify()

    def _notify(self) -> None:
        self._news.set()
        if not self.settled:
            self._tell()

    def _fence(self, why: str) -> None:
        super()._fence(why)
        self._news.set()

    def _give_up(self, why: str) -> None:
        # The thread that leaves is the one that would join: it does so after it has left.
        self._fence(why)
        super()._give_up(why)

    # -- leaving -----------------------------------------------------------------------------------

    def _send_leave(self) -> None:
        with self._lock:
            self._rules.begin()  # answers that are under way are not heard any more
        epoch = LEAVES if self._instance_id is None else LEAVES_FOR_A_WHILE
        self._ask_to_leave(self._message(None, epoch))

    def leave(self) -> None:
        """Leave the group.  `join` may be called again."""
        super().leave()
        self._error = None


def check_protocol(settings: Mapping[str, Any]) -> None:
    """Refuse settings of the other protocol.  ConfigError names one of them."""
    names, other = ["group.remote.assignor"], "consumer"
    if settings["group.protocol"] == "consumer":
        names, other = ["partition.assignment.strategy", "heartbeat.interval.ms"], "classic"
    for name in names:
        if settings[name] != CLIENT.find(name).default:
            raise ConfigError(
                f"option {name} is for group.protocol={other}",
                hint="leave it out: the broker decides"
                if other == "classic"
                else "leave it out, or set group.protocol=consumer",
            )
