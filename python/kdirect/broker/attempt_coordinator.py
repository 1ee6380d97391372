"""Carries out what `kdirect.broker.attempts` decides, beside the coordinator of transactions.

Owns: the order in which it happens.  A decision is written to ``__transaction_state`` as one record
batch, and counts as any change there (`kdirect.broker.transaction_coordinator`).  Then the markers
of all its attempts are written as one group, so that no partition shows a part of it
(`kdirect.broker.marker_groups`), and whoever asked is answered once readers see all of it.

Neither is given up while this broker coordinates the identity: a batch of which nobody knows
whether it is in the log is appended again, and markers are tried again.  The next coordinator does
the same from what the log says.

On the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

from kdirect import failpoints
from kdirect.broker.appends import resolve
from kdirect.broker.attempts import AttemptDecision, AttemptReply, Attempts, WriteMany
from kdirect.broker.failures import explain
from kdirect.broker.marker_groups import Left, MarkerGroups
from kdirect.broker.services import Services
from kdirect.broker.transaction_markers import FIRST_PAUSE_S, LONGEST_PAUSE_S
from kdirect.broker.transaction_store import LoadedTransaction
from kdirect.broker.transactions import Markers, NeedsId, Transactions
from kdirect.errors import FormatError, NotCoordinatorError
from kdirect.format.error_codes import ErrorCode
from kdirect.format.transaction_records import NO_EPOCH, NO_PRODUCER_ID, State, TransactionRecord

log = logging.getLogger("kdirect.broker.transactions")

_NOT_HERE = AttemptReply(ErrorCode.NOT_COORDINATOR, "another broker coordinates it")


class Coordinating(Protocol):
    """As much of `kdirect.broker.transaction_coordinator.TransactionCoordinator` as is needed
    here."""

    @property
    def machine(self) -> Transactions:
        """The transactions that this broker coordinates."""

    def refusal(self, name: str, /) -> int:
        """Why nothing may be said of a transactional id here, or NONE."""

    def epoch(self, name: str, /) -> int | None:
        """The epoch in which this broker coordinates an id; None: it does not."""

    async def new_id(self) -> int | None:
        """A producer id that nobody has; None: there is none to be had now."""

    def when_saved(
        self, saved: asyncio.Future[Any], then: Callable[[BaseException | None], None], /
    ) -> None:
        """`then(error)` once a change counts that the store has begun."""


class AttemptCoordinator:
    """See the module; one for a coordinator of transactions."""

    def __init__(self, services: Services, coordinator: Coordinating, groups: MarkerGroups) -> None:
        self._environment = services.environment
        self._store = services.transactions
        self._coordinator = coordinator
        self._groups = groups
        self._expiration_ms = services.config["identity.expiration.ms"]
        self.machine = Attempts(coordinator.machine, self._store.attempt_id)
        self._tasks: set[asyncio.Task[None]] = set()

    # -- life --------------------------------------------------------------------------------------

    def restore(self, loaded: Iterable[LoadedTransaction]) -> list[Markers]:
        """This broker coordinates these ids from now on: what was prepared of one identity ends as
        one.  The markers of transactions that are nobody's attempts."""
        alone: list[Markers] = []
        groups: dict[str, list[Markers]] = {}
        for name, record in loaded:
            markers = self.machine.install(name, record)
            if markers is None:
                continue
            if record.attempt is None:
                alone.append(markers)
            else:
                groups.setdefault(record.attempt.identity, []).append(markers)
        for identity, group in groups.items():
            left = {markers: set(markers.partitions) for markers in group}
            self._end_soon(identity, group, left, lambda done: None)
        return alone

    def give_up(self, is_gone: Callable[[str], bool]) -> None:
        """Another broker coordinates these ids."""
        self.machine.give_up(is_gone)

    def forget_expired(self) -> None:
        """Forget the identities that nobody has used for long."""
        for name in self.machine.expired(self._environment.time_ms(), self._expiration_ms):
            try:
                saved = self._store.save(name, None)
            except Exception as e:
                explain(e, f"the end of {name}")
                self.machine.forgotten(name, False)
                continue
            self._coordinator.when_saved(saved, partial(self._forgotten, name))

    def _forgotten(self, name: str, error: BaseException | None) -> None:
        if error is not None:
            explain(error, f"the end of {name}")
        self.machine.forgotten(name, error is None)

    def close(self) -> None:
        """Nothing is begun from here on; what is prepared is ended by the next coordinator."""
        for task in self._tasks:
            task.cancel()

    # -- asking ------------------------------------------------------------------------------------

    async def ask(
        self, identity: str, decide: Callable[[int | None], AttemptDecision]
    ) -> AttemptReply:
        """The answer to a request about an identity, once what it decides counts, and all readers
        see what it commits.  `decide(new id)` asks the machine, with a new producer id if it needs
        one."""
        new_id: int | None = None
        while True:
            if code := self._coordinator.refusal(identity):
                return AttemptReply(code)
            made = decide(new_id)
            if not isinstance(made, NeedsId):
                break
            new_id = await self._coordinator.new_id()
            if new_id is None:
                return AttemptReply(ErrorCode.COORDINATOR_NOT_AVAILABLE, "no producer id")
        if isinstance(made, AttemptReply):
            return made
        # Not by a task of whoever asks, who may be gone before it is settled.
        future: asyncio.Future[AttemptReply] = asyncio.get_running_loop().create_future()
        self._write(made, lambda reply: resolve(future, reply, None))
        return await future

    # -- writing -----------------------------------------------------------------------------------

    def _write(self, many: WriteMany, told: Callable[[AttemptReply], None]) -> None:
        if many.waits:
            failpoints.reached("attempts, to be ended")
        self._append(_rows(many), lambda error: self._settle(many, told, error))

    def _append(
        self,
        rows: Sequence[tuple[str, TransactionRecord]],
        then: Callable[[BaseException | None], None],
    ) -> None:
        """Append records as one batch; `then(error)` once they count."""
        try:
            saved = self._store.save_many(rows)
        except Exception as e:
            then(e)
            return
        self._coordinator.when_saved(saved, then)

    def _settle(
        self,
        many: WriteMany,
        told: Callable[[AttemptReply], None],
        error: BaseException | None,
    ) -> None:
        """It counts, or nobody knows."""
        identity = many.identity
        if error is not None:
            explain(error, f"a change of {identity}")
            code = self._coordinator.refusal(identity) or ErrorCode.COORDINATOR_NOT_AVAILABLE
            if isinstance(error, FormatError):  # it cannot be appended
                self.machine.failed(many)
                told(AttemptReply(ErrorCode.MESSAGE_TOO_LARGE, str(error)))
            elif not many.is_decision:
                self.machine.failed(many)
                told(AttemptReply(code))
            else:
                self._spawn(self._write_again(many, told))
            return
        if many.waits:
            failpoints.reached("attempts, prepared")
        self._report(many)
        group = self.machine.written(many)
        if not group or not many.waits:
            told(many.reply)
        if group:
            self._end(identity, group, lambda done: told(many.reply if done else _NOT_HERE))

    def _report(self, many: WriteMany) -> None:
        """Say in the log that another run writes, and where its query is a new one."""
        record = many.record
        if record is None or self.machine.run_of(many.identity) == record.run:
            return
        log.info(
            "%s: run %s of query %s (%s) writes from now on",
            many.identity, record.run, record.query, record.owner,
        )  # fmt: skip
        known = dict(record.queries)
        if known and record.query not in known:
            log.warning(
                "%s: query %s has committed nothing under this name, so its batches are counted"
                " from its first one; others have: %s",
                many.identity, record.query, known,
            )  # fmt: skip

    async def _write_again(self, many: WriteMany, told: Callable[[AttemptReply], None]) -> None:
        """Append it until it is known to be in the log."""
        epoch, pause = self._coordinator.epoch(many.identity), FIRST_PAUSE_S
        try:
            while epoch is not None and self._coordinator.epoch(many.identity) == epoch:
                await asyncio.sleep(pause)
                pause = min(pause * 2, LONGEST_PAUSE_S)
                future = asyncio.get_running_loop().create_future()
                self._append(_rows(many), partial(resolve, future, error=None))
                error = await future
                if error is None:
                    self._settle(many, told, None)
                    return
                explain(error, f"a change of {many.identity}")
        finally:
            told(_NOT_HERE)  # unless it was told already

    # -- ending ------------------------------------------------------------------------------------

    def _end(self, identity: str, group: list[Markers], told: Callable[[bool], None]) -> None:
        """Write the markers of a group, at once where that is possible, then that all of it is
        complete."""
        epoch = self._coordinator.epoch(identity)
        if epoch is None:
            told(False)
            return
        try:
            left = self._groups.append_here(group, epoch)
        except Exception:  # whatever it is: the group must not wait for the next coordinator
            log.exception("markers of %s could not be appended at once", identity)
            left = {markers: set(markers.partitions) for markers in group}
        if left:
            self._end_soon(identity, group, left, told)
            return

        def completed(done: bool) -> None:
            if done:
                told(True)
            else:
                self._end_soon(identity, group, {}, told)

        self._complete(group, completed)

    def _complete(self, group: Sequence[Markers], told: Callable[[bool], None]) -> None:
        failpoints.reached("attempts, marked")
        writes = self.machine.complete(group, self._environment.time_ms())
        rows = [(w.transactional_id, w.record) for w in writes if w.record is not None]
        if not rows:
            told(True)
            return

        def appended(error: BaseException | None) -> None:
            for write in writes:
                if error is None:
                    self.machine.transactions.written(write)
                else:
                    self.machine.transactions.failed(write)
            failpoints.reached("attempts, complete")
            told(error is None)

        self._append(rows, appended)

    def _end_soon(
        self, identity: str, group: list[Markers], left: Left, told: Callable[[bool], None]
    ) -> None:
        self._spawn(self._end_later(identity, group, left, told))

    async def _end_later(
        self, identity: str, group: list[Markers], left: Left, told: Callable[[bool], None]
    ) -> None:
        """Try until all partitions have their markers, and the log says so."""
        pause = 0.0
        epoch = self._coordinator.epoch(identity)
        try:
            while epoch is not None and self._coordinator.epoch(identity) == epoch:
                await asyncio.sleep(pause)
                pause = min(max(pause * 2, FIRST_PAUSE_S), LONGEST_PAUSE_S)
                if left:
                    try:
                        left = await self._groups.write(left, epoch)
                    except NotCoordinatorError as e:
                        log.warning("%s: another coordinator ends it: %s", identity, e)
                        return
                if left or self._coordinator.epoch(identity) != epoch:
                    continue
                done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
                self._complete(group, partial(resolve, done, error=None))
                if await done:
                    told(True)
                    return
        finally:
            told(False)  # unless it was told already

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the end of a commit failed", exc_info=error)


def _rows(many: WriteMany) -> list[tuple[str, TransactionRecord]]:
    rows = [(w.transactional_id, w.record) for w in many.writes if w.record is not None]
    if many.record is not None:
        record = TransactionRecord(NO_PRODUCER_ID, NO_EPOCH, 0, State.EMPTY, identity=many.record)
        rows.append((many.identity, record))
    return rows
