"""What a consumer waits with when no records come: with requests that the brokers answer then.

Owns: how long a Fetch waits at a broker, how long a poll sleeps between looks at metadata slots,
and the Fetches that wait in place of such looks.  What may not enter: the records.  What is found
here is read as ever.

To look at slots costs a client as much as it looks often, and a record is found so much later as it
looks seldom.  A Fetch that waits costs nothing and is answered at once.  So a consumer whose
partitions have had nothing for SILENT_S, and all sleep until their slots change, posts one at each
of their brokers, and looks at the slots when one is answered, or LONGEST_LOOK_MS are over: the
Fetch tells when to look, and nothing but the slots tells what is there.  What was told ends the
silence, even if there is no record then: slots are looked at as after a record.  Where a broker
cannot be asked, they are looked at for REST_S before it is tried again, and so they are while it is
connected to, which is done where nobody waits: no poll takes longer because a broker hangs.

One thread at a time.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kdirect.client.direct import DirectFetcher
from kdirect.client.lost_broker import CONNECT_MS_BESIDES
from kdirect.client.reader import FIRST_WAIT_S, LONGEST_WAIT_S
from kdirect.client.tcp_fetch import Asked, fetch_request
from kdirect.errors import KdirectError
from kdirect.model import TopicPartition
from kdirect.wire.attempt import Attempt
from kdirect.wire.bell import Bell
from kdirect.wire.cluster import Cluster
from kdirect.wire.connection import Connection, Pending, wait_for_any

log = logging.getLogger("kdirect.client")

# A poll that waits sleeps for one part in so many of the time since the last record, so that a
# record comes later by that part at most: for no longer than LONGEST_WAIT_S in the first second,
# and then for one part in QUIET_SHARE, for no longer than QUIET_WAIT_S.
PAUSE_SHARE = 4
QUIET_SHARE = 200
QUIET_WAIT_S = 0.02

FIRST_WAIT_MS, LONGEST_WAIT_MS = 500, 5000
SILENT_S = 1.0
LONGEST_LOOK_MS = 1000.0
REST_S = 1.0

Offsets = Mapping[TopicPartition, int]


def pause_s(empty_s: float) -> float:
    """For how long a poll sleeps before it looks again, `empty_s` after the last record."""
    longest = max(LONGEST_WAIT_S, min(empty_s / QUIET_SHARE, QUIET_WAIT_S))
    return min(max(FIRST_WAIT_S, empty_s / PAUSE_SHARE), longest)


class FetchWait(NamedTuple):
    """How long a Fetch waits for records: `first_ms`, and twice as long after each that found none,
    for `longest_ms` at most."""

    first_ms: int
    longest_ms: int

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> FetchWait:
        """What was set is obeyed.  Where the broker holds records back until they are
        fetch.min.bytes, a longer wait would hold them back for longer."""
        given: int | None = settings["fetch.wait.max.ms"]
        if given is not None:
            return cls(given, given)
        holds_back = settings["fetch.min.bytes"] > 1
        return cls(FIRST_WAIT_MS, FIRST_WAIT_MS if holds_back else LONGEST_WAIT_MS)

    def after(self, wait_ms: int, *, found: bool) -> int:
        """How long the next one waits, after one that was to wait for `wait_ms`."""
        return self.first_ms if found else min(2 * wait_ms, self.longest_ms)


@dataclass(slots=True, eq=False)
class _Sentry:
    """A Fetch that waits at one broker."""

    connection: Connection
    asked: Offsets
    pending: Pending | None = None
    until: float = 0.0


class Silence:
    """See the module.  `settings`: rows of the client table; `bell` ends a wait."""

    def __init__(
        self, cluster: Cluster, settings: Mapping[str, Any], bell: Bell | None = None
    ) -> None:
        self._cluster = cluster
        self._environment = cluster.environment
        self._committed_only = settings["isolation.level"] == "read_committed"
        self._bell = bell
        self._sentries: dict[DirectFetcher, _Sentry] = {}
        self._leases: dict[DirectFetcher, Attempt[Connection]] = {}  # of sentries to come
        self._closed = False
        self._seen: object = None  # the state of what sleeps for which they were posted
        self._not_before = 0.0
        self._pid = os.getpid()

    def wait(
        self,
        state: object,
        asleep: Callable[[], Mapping[DirectFetcher, Offsets]],
        besides: Sequence[Connection],
        wait_ms: float,
    ) -> bool | None:
        """Wait until there may be a record, then True, or there is something to read from one of
        `besides`, or for `wait_ms`.  `asleep` are the partitions, by the fetchers that look at
        their slots; it is asked again when `state` is another one.  None: a broker cannot be asked
        to tell, or not yet, so nobody has waited."""
        now = self._environment.monotonic()
        if now < self._not_before:
            return None
        try:
            if state != self._seen:
                if not self._relieve(asleep()):
                    return None
                self._seen = state
            if self._told(now):
                return True
            connections = [*besides, *(x.connection for x in self._sentries.values())]
            wait_for_any(connections, min(wait_ms, LONGEST_LOOK_MS), self._bell)
            return self._told(self._environment.monotonic())
        except KdirectError as e:
            log.debug("slots are looked at, for a broker cannot be asked: %s", e)
            self._not_before = self._environment.monotonic() + REST_S
            self._forget()
            return None

    def _relieve(self, asleep: Mapping[DirectFetcher, Offsets]) -> bool:
        """Have a sentry for each of `asleep`, and no others.  False: not before their brokers are
        connected to."""
        for fetcher in [x for x in self._sentries if x not in asleep]:
            self._end(self._sentries.pop(fetcher))
        for fetcher in [x for x in self._leases if x not in asleep and self._leases[x].done]:
            self._drop(self._leases.pop(fetcher))
        for fetcher, offsets in asleep.items():
            sentry = self._sentries.get(fetcher)
            if sentry is None:
                if fetcher not in self._leases:
                    self._leases[fetcher] = self._lease(next(iter(offsets)))
                elif self._leases[fetcher].done:
                    connection = self._leases.pop(fetcher).result()
                    self._sentries[fetcher] = _Sentry(connection, offsets)
            elif sentry.asked != offsets:
                if sentry.pending is None and sentry.connection.alive():
                    sentry.asked = offsets
                else:  # what is under way would tell of what was read
                    self._end(self._sentries.pop(fetcher))
                    self._leases[fetcher] = self._lease(next(iter(offsets)))
        return self._sentries.keys() == asleep.keys()

    def _lease(self, tp: TopicPartition) -> Attempt[Connection]:
        """Connect to the broker that `tp` is read at."""

        def lease() -> Connection:
            connection = self._cluster.lease(tp, timeout_ms=CONNECT_MS_BESIDES, closest=True)
            if self._closed:
                connection.close()
            return connection

        return self._environment.spawn(lease)

    def _drop(self, lease: Attempt[Connection]) -> None:
        """Nobody needs what this `done` one was for."""
        with contextlib.suppress(KdirectError):
            self._cluster.give_back(lease.result())

    def _told(self, now: float) -> bool:
        """Take in answers, and ask again where there was nothing; True: there may be a record."""
        told = False
        for sentry in self._sentries.values():
            if sentry.pending is not None and (sentry.pending.wait(0.0) or now >= sentry.until):
                pending, sentry.pending = sentry.pending, None
                try:
                    told |= _has_news(pending.result(0))
                except KdirectError:
                    sentry.connection.close()
                    raise
            if sentry.pending is None and not told:
                self._post(sentry, now)
        if told:
            self._forget()
        return told

    def _post(self, sentry: _Sentry, now: float) -> None:
        message = fetch_request(
            [Asked(tp, offset, 1) for tp, offset in sentry.asked.items()],
            wait_ms=LONGEST_WAIT_MS,
            min_bytes=1,
            max_bytes=1,
            committed_only=self._committed_only,
        )
        sentry.pending = sentry.connection.submit(message)
        sentry.until = now + (self._cluster.timeout_ms + LONGEST_WAIT_MS) / 1000

    def _forget(self) -> None:
        """What sleeps by now is to be asked for again."""
        self._seen = None
        for fetcher, sentry in list(self._sentries.items()):
            if sentry.connection.closed:
                del self._sentries[fetcher]

    def _end(self, sentry: _Sentry) -> None:
        if sentry.pending is None:
            self._cluster.give_back(sentry.connection)
        else:
            sentry.connection.close()

    def close(self) -> None:
        sentries, self._sentries = self._sentries, {}
        leases, self._leases = self._leases, {}
        self._closed = True
        if self._pid == os.getpid():
            for sentry in sentries.values():
                self._end(sentry)
            for lease in leases.values():
                if lease.done:
                    self._drop(lease)


def _has_news(answer: Any) -> bool:
    return bool(answer.error_code) or any(
        x.error_code or (x.records is not None and len(x.records))
        for topic in answer.responses
        for x in topic.partitions
    )
