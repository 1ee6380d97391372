"""JoinTransaction, CommitAttempts, AbortAttempts, CheckAttempt: writes that are exactly once.

What they mean is said in `kdirect.broker.attempts`.  Here requests are checked, and turned into
questions to the coordinator of the identity's partition of ``__transaction_state``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kdirect.broker.answers import Answer, later, respond
from kdirect.broker.attempt_coordinator import AttemptCoordinator
from kdirect.broker.attempts import AttemptReply, Job, Named
from kdirect.broker.connection import Connection
from kdirect.broker.services import Services
from kdirect.format import protocol as p
from kdirect.format.attempt_records import LONGEST_IDENTITY
from kdirect.format.error_codes import ErrorCode

LONGEST_OWNER = 256  # characters that are kept


class AttemptHandlers:
    """See the module; one for the broker."""

    def __init__(self, services: Services, coordinator: AttemptCoordinator) -> None:
        self._longest_ms = services.config["transaction.max.timeout.ms"]
        self._environment = services.environment
        self._coordinator = coordinator
        self._machine = coordinator.machine

    # -- joining -----------------------------------------------------------------------------------

    def join(self, connection: Connection, header: p.RequestHeader, request: Any) -> Answer:
        reply = _unfit(request) or self._unfit_time(request.timeout_ms)
        if reply is not None:
            return _joined(header, reply)
        return later(self._join(header, request))

    def _unfit_time(self, timeout_ms: int) -> AttemptReply | None:
        if 0 < timeout_ms <= self._longest_ms:
            return None
        return AttemptReply(
            ErrorCode.INVALID_TRANSACTION_TIMEOUT,
            f"a timeout of {timeout_ms} ms; transaction.max.timeout.ms of the broker is"
            f" {self._longest_ms}",
        )

    async def _join(self, header: p.RequestHeader, request: Any) -> Answer:
        job, owner = _job(request), request.owner[:LONGEST_OWNER]
        reply = await self._coordinator.ask(
            job.identity,
            lambda new_id: self._machine.join(
                job, request.batch, request.timeout_ms, owner, self._environment.time_ms(), new_id
            ),
        )
        return _joined(header, reply)

    # -- ending ------------------------------------------------------------------------------------

    def commit(self, connection: Connection, header: p.RequestHeader, request: Any) -> Answer:
        if (reply := _unfit(request)) is not None:
            return _ended(header, p.CommitAttemptsResponse, reply, committed=False)
        return later(self._commit(header, request))

    async def _commit(self, header: p.RequestHeader, request: Any) -> Answer:
        job, owner = _job(request), request.owner[:LONGEST_OWNER]
        named = [
            Named(a.transactional_id, a.producer_id, a.producer_epoch) for a in request.attempts
        ]
        reply = await self._coordinator.ask(
            job.identity,
            lambda _: self._machine.commit(
                job, request.batch, named, self._environment.time_ms(), owner
            ),
        )
        return _ended(header, p.CommitAttemptsResponse, reply, committed=reply.committed)

    def abort(self, connection: Connection, header: p.RequestHeader, request: Any) -> Answer:
        if (reply := _unfit(request)) is not None:
            return _ended(header, p.AbortAttemptsResponse, reply)
        return later(self._abort(header, request))

    async def _abort(self, header: p.RequestHeader, request: Any) -> Answer:
        job = _job(request)
        reply = await self._coordinator.ask(
            job.identity, lambda _: self._machine.abort(job, self._environment.time_ms())
        )
        return _ended(header, p.AbortAttemptsResponse, reply)

    # -- looking -----------------------------------------------------------------------------------

    def check(self, connection: Connection, header: p.RequestHeader, request: Any) -> Answer:
        if (reply := _unfit(request)) is not None:
            return _ended(header, p.CheckAttemptResponse, reply, committed=False)
        return later(self._check(header, request))

    async def _check(self, header: p.RequestHeader, request: Any) -> Answer:
        job = _job(request)
        named = Named(request.transactional_id, request.producer_id, request.producer_epoch)
        reply = await self._coordinator.ask(
            job.identity, lambda _: self._machine.check(job, request.batch, named)
        )
        return _ended(header, p.CheckAttemptResponse, reply, committed=reply.committed)

    def table(self) -> Iterable[tuple[str, Any, bool]]:
        """(API name, handler, whether later requests of the connection wait for its answer)."""
        return (
            ("JoinTransaction", self.join, False),
            ("CommitAttempts", self.commit, False),
            ("AbortAttempts", self.abort, False),
            ("CheckAttempt", self.check, False),
        )


def _job(request: Any) -> Job:
    return Job(request.identity, request.query, request.run)


def _unfit(request: Any) -> AttemptReply | None:
    """What is wrong with who asks; None: nothing."""
    for name in ("identity", "query", "run"):
        size = len(getattr(request, name).encode())
        if size > LONGEST_IDENTITY:
            what = f"the {name} has {size} bytes; {LONGEST_IDENTITY} are allowed"
            return AttemptReply(ErrorCode.INVALID_REQUEST, what)
        if not size and name != "query":
            return AttemptReply(ErrorCode.INVALID_REQUEST, f"the {name} is empty")
    if getattr(request, "batch", 0) < 0:
        return AttemptReply(ErrorCode.INVALID_REQUEST, f"batch {request.batch} is below 0")
    return None


def _joined(header: p.RequestHeader, reply: AttemptReply) -> Answer:
    attempt = reply.attempt or Named("", -1, -1)
    return respond(
        header,
        p.JoinTransactionResponse,
        error_code=int(reply.code),
        error_message=reply.message or None,
        committed=reply.committed,
        transactional_id=attempt.transactional_id,
        producer_id=attempt.producer_id,
        producer_epoch=attempt.epoch,
    )


def _ended(header: p.RequestHeader, message: Any, reply: AttemptReply, **more: bool) -> Answer:
    return respond(
        header,
        message,
        error_code=int(reply.code),
        error_message=reply.message or None,
        **more,
    )
