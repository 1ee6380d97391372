"""Writes that are exactly once, as a job's driver and tasks ask for them (docs/transactions.md).

Owns: the requests JoinTransaction, CommitAttempts, AbortAttempts and CheckAttempt, the search for
the coordinator of an identity, and the pauses between tries.  What may not enter: what a broker
decides (`kdirect.broker.attempts`), and records.

A job writes one batch after another, each by attempts of its tasks.  An attempt joins, writes with
a producer that is made for it (`kdirect.client.attempt_producer`), and flushes.  Nobody sees its
records, until the driver commits the batch with the attempts that count.

Each call may be repeated: a batch that is committed already is said to be so, and nothing changes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, NamedTuple

from kdirect.errors import (
    AttemptsUnsupportedError,
    FencedRunError,
    KdirectError,
    OlderCheckpointError,
    TimedOutError,
    TransactionError,
    UnknownAttemptError,
)
from kdirect.format import protocol as p
from kdirect.format.error_codes import ErrorCode, error_kind
from kdirect.wire.cluster import TRANSACTION, Cluster

log = logging.getLogger("kdirect.client")

OPEN = "open"
COMMITTED = "committed"
ALREADY_COMMITTED = "already committed"
PAUSE_S, MOST_PAUSE_S = 0.02, 1.0
# While markers are written, or another attempt joins.
SOON_S, MOST_SOON_S = 0.0005, 0.02
LEAST_MS = 1.0


class Attempt(NamedTuple):
    """A task attempt that has joined a batch: the transaction that it writes in.  It may be
    pickled, and be used in another process."""

    transactional_id: str
    producer_id: int
    epoch: int


class AttemptCalls:
    """See the module.  `timeout_ms`: how long a call goes on trying."""

    def __init__(self, cluster: Cluster, timeout_ms: float) -> None:
        self._cluster = cluster
        self._environment = cluster.environment
        self._timeout_ms = timeout_ms

    def join(
        self, identity: str, query: str, run: str, batch: int, timeout_ms: int, owner: str
    ) -> Attempt | None:
        """See `Session.join_attempt`."""
        answer = self._ask(
            f"an attempt of batch {batch}",
            p.JoinTransactionRequest(
                identity=identity,
                query=query,
                run=run,
                batch=batch,
                timeout_ms=timeout_ms,
                owner=owner,
            ),
        )
        if answer.committed:
            return None
        return Attempt(answer.transactional_id, answer.producer_id, answer.producer_epoch)

    def commit(
        self,
        identity: str,
        query: str,
        run: str,
        batch: int,
        attempts: Iterable[Attempt],
        owner: str,
    ) -> str:
        """See `Session.commit_attempts`."""
        row = p.CommitAttemptsRequest.CommittedAttempt
        answer = self._ask(
            f"the commit of batch {batch}",
            p.CommitAttemptsRequest(
                identity=identity,
                query=query,
                run=run,
                batch=batch,
                owner=owner,
                attempts=[
                    row(transactional_id=a[0], producer_id=a[1], producer_epoch=a[2])
                    for a in attempts
                ],
            ),
        )
        return ALREADY_COMMITTED if answer.committed else COMMITTED

    def abort(self, identity: str, query: str, run: str) -> None:
        """See `Session.abort_attempts`."""
        request = p.AbortAttemptsRequest(identity=identity, query=query, run=run)
        self._ask("the end of open attempts", request)

    def check(self, identity: str, query: str, run: str, batch: int, attempt: Attempt) -> str:
        """See `Session.check_attempt`."""
        name, producer_id, epoch = attempt
        answer = self._ask(
            f"the state of an attempt of batch {batch}",
            p.CheckAttemptRequest(
                identity=identity,
                query=query,
                run=run,
                batch=batch,
                transactional_id=name,
                producer_id=producer_id,
                producer_epoch=epoch,
            ),
        )
        return ALREADY_COMMITTED if answer.committed else OPEN

    # -- within ------------------------------------------------------------------------------------

    def _ask(self, what: str, request: Any) -> Any:
        """The coordinator's answer, once it has one without an error."""
        identity = request.identity
        monotonic = self._environment.monotonic
        until = monotonic() + self._timeout_ms / 1000
        pause, soon, last = PAUSE_S, SOON_S, ""
        while True:
            left_ms = max(LEAST_MS, (until - monotonic()) * 1000)
            wait = pause
            try:
                answer = self._call(identity, request, left_ms)
                code = answer.error_code
                if not code:
                    return answer
                last = answer.error_message or error_kind(code).description
                if code == ErrorCode.CONCURRENT_TRANSACTIONS:
                    wait, soon = soon, min(2 * soon, MOST_SOON_S)
                elif not error_kind(code).retriable:
                    raise _error(code, f"{what} as {identity!r}: {last}")
                else:
                    self._cluster.forget_coordinator(identity, TRANSACTION)
                    pause = min(2 * pause, MOST_PAUSE_S)
            except KdirectError as e:
                if not e.retriable:
                    raise
                last = e.message
                log.info("%s as %r: %s", what, identity, e)
                self._cluster.forget_coordinator(identity, TRANSACTION)
                pause = min(2 * pause, MOST_PAUSE_S)
            if monotonic() + wait >= until:
                raise TimedOutError(
                    f"{what} as {identity!r}: no answer of the coordinator in time: {last}",
                    hint="call it again: what was committed stays committed, once",
                )
            self._environment.sleep(wait)

    def _call(self, identity: str, request: Any, left_ms: float) -> Any:
        connection = self._cluster.lease_coordinator(identity, TRANSACTION, left_ms)
        try:
            if not connection.supports(request.API_KEY):
                raise AttemptsUnsupportedError(
                    f"the broker at {connection.peer} has no exactly-once writes",
                    hint="use a broker of this version of kdirect, or write with exactlyOnce=false",
                )
            answer = connection.request(request, min(left_ms, self._cluster.timeout_ms))
        except BaseException:
            connection.close()
            raise
        self._cluster.give_back(connection)
        return answer


def _error(code: int, text: str) -> KdirectError:
    if code == ErrorCode.PRODUCER_FENCED:
        return FencedRunError(text, hint="stop this run, or give the other one its own identity")
    if code == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER:
        return OlderCheckpointError(
            text,
            hint="go on with the newest checkpoint; or start with a new one: that is a new query, "
            "which writes again what it reads again",
        )
    if code == ErrorCode.INVALID_TXN_STATE:
        return UnknownAttemptError(
            text, hint="nothing of the batch was committed: write it again, as Spark does"
        )
    return TransactionError(f"{text} ({error_kind(code).name})")
