"""The search for a broker that was lost while its partitions were read or written.

Owns: which errors mean that a broker is lost, or leads a partition no more; the words that name the
partitions which such an error concerns, which partitions wait for their brokers, and the one
attempt at a time to reach such a broker again, where nobody waits for it: the thread that reads or
writes goes on with what other brokers lead.  What may not enter: where partitions are read, and
what follows when the broker is back.

One thread at a time calls a search; the attempt itself runs on another.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from kdirect.errors import (
    BrokerError,
    BrokerUnavailableError,
    ClosedError,
    KdirectError,
    NotLeaderError,
    QueuePairError,
    TimedOutError,
    UnknownTopicError,
)
from kdirect.format.error_codes import ErrorCode
from kdirect.model import TopicPartition
from kdirect.wire.attempt import Attempt
from kdirect.wire.backoff import Backoff
from kdirect.wire.cluster import Cluster
from kdirect.wire.environment import Environment

log = logging.getLogger("kdirect.client")

LOST = (QueuePairError, BrokerUnavailableError, ClosedError, TimedOutError)
FIRST_PAUSE_MS, LONGEST_PAUSE_MS = 100.0, 2000.0  # between two attempts of a reader
# The longest wait of a reading thread for a connection to a broker while it reads from others.
CONNECT_MS_BESIDES = 500
NEWS_MS = 500  # for an answer where a leader is

T = TypeVar("T")


_MOVED = (
    ErrorCode.LEADER_NOT_AVAILABLE,
    ErrorCode.NOT_LEADER_OR_FOLLOWER,
    ErrorCode.REPLICA_NOT_AVAILABLE,
    ErrorCode.NOT_ENOUGH_REPLICAS,
    ErrorCode.FENCED_LEADER_EPOCH,
    ErrorCode.UNKNOWN_LEADER_EPOCH,
    ErrorCode.OFFSET_NOT_AVAILABLE,
)


def has_moved(error: BaseException) -> bool:
    """Does this pass once the partition's leader was looked for again, or has become ready?"""
    return isinstance(error, NotLeaderError) or (
        isinstance(error, BrokerError) and error.code in _MOVED
    )


def as_moved(cluster: Cluster, tp: TopicPartition, error: KdirectError) -> KdirectError:
    """What the leader of `tp` refused: where this `has_moved`, the leader is asked for before it is
    needed next.  That is so, too, of a partition which its leader does not know though others do:
    it was made a moment ago."""
    if has_moved(error):
        cluster.forget(tp.topic)
    elif isinstance(error, UnknownTopicError):
        try:
            look_again(cluster, tp, None)
        except UnknownTopicError:
            return error
        return NotLeaderError(error.message, hint=error.hint)
    return error


def as_left(cluster: Cluster, tp: TopicPartition, error: KdirectError) -> KdirectError:
    """What the broker refused at which `tp` was read.  Where that was not the leader, the leader is
    asked next, and what it says counts."""
    if not cluster.leave_replica(tp):
        return error
    return NotLeaderError(
        f"{error.message}; {tp} is read at its leader for a while", hint=error.hint
    )


def ask_leader(cluster: Cluster, *tps: TopicPartition) -> None:
    """Ask where these are led; what goes wrong is told when a leader is needed."""
    with contextlib.suppress(KdirectError):
        cluster.refresh(sorted({tp.topic for tp in tps}), timeout_ms=NEWS_MS)


def look_again(cluster: Cluster, tp: TopicPartition, topic_id: str | None) -> None:
    """Access to `tp`, of the topic that had this id, has ended: where is it led now?
    UnknownTopicError when it was deleted, even if there is another of its name.  What else goes
    wrong passes, or is told when the leader is needed."""
    cluster.forget(tp.topic)
    try:
        now = cluster.refresh([tp.topic], timeout_ms=NEWS_MS).get(tp.topic)
        if now is not None:
            now.partition(tp.partition)
    except UnknownTopicError:
        raise
    except KdirectError as e:
        log.debug("%s: its leader is not known yet: %s", tp, e)
        return
    if now is None or (topic_id is not None and now.topic_id != topic_id):
        raise UnknownTopicError(
            f"{tp} was deleted while it was read",
            hint="look the topic up again and open a new reader",
        )


def concerning(tps: Sequence[TopicPartition], error: KdirectError) -> KdirectError:
    """A copy of `error`, which names a broker, that says which partitions could not be asked for
    because of it: the first of `tps`, and how many others.  Its attribute `topic_partition` is the
    first one."""
    out = copy.copy(error)
    others = f" and {len(tps) - 1} other partitions" if len(tps) > 1 else ""
    out.message = f"{tps[0]}{others}: {error.message}"
    out.topic_partition = tps[0]
    return out


class Search(Generic[T]):
    """Attempt after attempt, with pauses between them that grow from `first_ms` to `most_ms`.

    Begins at once, or `after_s` from now.  `reach` returns what shows that the broker was reached,
    such as a connection (not None), or raises after a time of its own; other threads call it, one
    at a time."""

    def __init__(
        self,
        environment: Environment,
        reach: Callable[[], T],
        after_s: float = 0.0,
        *,
        first_ms: float = FIRST_PAUSE_MS,
        most_ms: float = LONGEST_PAUSE_MS,
    ) -> None:
        self.next_attempt = environment.monotonic() + after_s  # when it may begin
        self._environment = environment
        self._reach = reach
        self._attempt: Attempt[T] | None = None
        # The pauses are not spread at random: one process looks for its broker by one search.
        self._backoff = Backoff(math.inf, first_ms, most_ms, environment, spread=0.0)

    def found(self) -> T | None:
        """What was reached; None while it is looked for.  Raises, once for each attempt that
        failed, what that attempt raised; the next one begins by itself."""
        if self._attempt is None:
            if self._environment.monotonic() < self.next_attempt:
                return None
            self._attempt = self._environment.spawn(self._reach)
        if not self._attempt.done:
            return None
        attempt, self._attempt = self._attempt, None
        pause = self._backoff.pause()
        assert pause is not None, "a search has no deadline"
        self.next_attempt = self._environment.monotonic() + pause
        return attempt.result()

    def wait(self, until: float) -> bool:
        """Wait for the attempt that is under way, until then (monotonic seconds) at most; False
        when there is none."""
        if self._attempt is None:
            return False
        self._attempt.wait(until - self._environment.monotonic())
        return True


class LostPartitions:
    """Partitions whose brokers are lost, and the search for each of these brokers."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._tps: set[TopicPartition] = set()
        self._searches: list[tuple[Search[Any], set[TopicPartition]]] = []  # one for each loss

    def __contains__(self, tp: TopicPartition) -> bool:
        return tp in self._tps

    def __len__(self) -> int:
        return len(self._tps)

    @property
    def searching(self) -> bool:
        """Is a broker looked for?"""
        return bool(self._searches)

    def add(self, tps: set[TopicPartition], reach: Callable[[], Any], after_s: float = 0.0) -> None:
        """One broker that leads these was lost: look for it; see `Search`."""
        self._tps |= tps
        self._searches.append((Search(self._environment, reach, after_s), tps))

    def look(self) -> tuple[bool, list[KdirectError]]:
        """Was a broker reached, so that its partitions are not lost any more; and the errors of
        the attempts that failed.  A search whose partitions were all discarded ends."""
        reached = False
        in_vain: list[KdirectError] = []
        for entry in list(self._searches):
            search, tps = entry
            tps &= self._tps
            try:
                if tps and search.found() is None:
                    continue
            except LOST as e:
                in_vain.append(e)
                continue
            except KdirectError as e:
                # It concerns one of the partitions: each is told what is wrong when it is entered.
                log.debug("the search for a lost broker ends: %s", e)
            self._searches.remove(entry)
            self._tps -= tps
            reached = True
        return reached, in_vain

    def discard(self, tp: TopicPartition) -> None:
        """It is not read any more."""
        self._tps.discard(tp)

    def clear(self) -> None:
        """The end: nothing is looked for any more."""
        self._tps.clear()
        self._searches.clear()
