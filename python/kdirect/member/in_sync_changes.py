"""Who is in sync: what leaders here propose to the controller, many partitions in one request.

Owns: the proposals that the controller has not answered.  One request is under way at a time; what
is proposed meanwhile goes with the next one.  A request whose outcome is not known (the controller
moved, the answer was lost) is sent again, as long as its proposals stand: the version of the state
that each of them names lets the controller do a thing once only.

A refusal ends a proposal only if no copy of it is unanswered (`leading_replica.Refused`).  One that
was sent before without an answer is sent as `repeated`: a controller that refuses it gives the
state a new version, which ends the proposal and every copy of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from kdirect.cluster.codes import Code
from kdirect.cluster.leading_replica import Learned, Propose, Refused
from kdirect.cluster.requests import AlterInSync, InSyncAnswer, InSyncRow
from kdirect.errors import KdirectError
from kdirect.member.pause import Pause
from kdirect.model import TopicPartition

log = logging.getLogger("kdirect.member")

ASK_S = 10.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
_RETRIED = (Code.NOT_CONTROLLER, Code.UNKNOWN_SERVER_ERROR, Code.KAFKA_STORAGE_ERROR)

# What a leader is told of its proposal.
Settle = Callable[[Learned | Refused], None]


class _Proposal(NamedTuple):
    epoch: int
    propose: Propose
    settle: Settle


class InSyncChanges:
    """See the module.  `incarnation()`: of this broker, now.  All on the event loop."""

    def __init__(self, membership: Any, broker: int, incarnation: Callable[[], int]) -> None:
        self._membership = membership
        self._broker = broker
        self._incarnation = incarnation
        self._open: dict[TopicPartition, _Proposal] = {}
        self._doubtful: set[tuple[TopicPartition, Propose]] = set()
        self._task: asyncio.Task[None] | None = None

    def propose(self, tp: TopicPartition, epoch: int, propose: Propose, settle: Settle) -> None:
        """Ask the controller; `settle` is called with what came of it, unless `withdraw` is."""
        self._open[tp] = _Proposal(epoch, propose, settle)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._work())

    def withdraw(self, tp: TopicPartition) -> None:
        """Its leader here has resigned, or its state has changed."""
        self._open.pop(tp, None)

    def stop(self) -> None:
        """Ask no more."""
        self._open.clear()
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _work(self) -> None:
        pause = Pause(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        try:
            while self._open:
                asked = dict(self._open)
                if await self._ask(asked):
                    pause.reset()
                elif self._open:
                    await asyncio.sleep(pause.next_s())
        finally:
            self._task = None
            self._doubtful.clear()

    async def _ask(self, asked: dict[TopicPartition, _Proposal]) -> bool:
        """Ask for all of them once; whether that settled each."""
        rows = tuple(
            _row(tp, proposal, repeated=(tp, proposal.propose) in self._doubtful)
            for tp, proposal in asked.items()
        )
        request = AlterInSync(None, self._broker, self._incarnation(), rows)
        try:
            answer = await self._membership.ask(request, ASK_S)
        except KdirectError as e:
            log.info("the controller has not answered which replicas are in sync: %s", e)
            self._doubtful.update((tp, proposal.propose) for tp, proposal in asked.items())
            return False
        if answer.outcome.code != Code.NONE:
            log.info("the controller does not change who is in sync: %s", answer.outcome)
            return False
        results = [self._settle(asked, row) for row in answer.rows]
        return len(results) == len(asked) and all(results)

    def _settle(self, asked: dict[TopicPartition, _Proposal], row: InSyncAnswer) -> bool:
        """Tell a leader what the controller says; whether that is all there is to it."""
        proposal = asked.get(row.partition)
        if proposal is None or self._open.get(row.partition) is not proposal:
            return True  # settled or withdrawn meanwhile
        propose, state = proposal.propose, row.state
        if row.code in _RETRIED:
            return False
        if state is not None and state.version > propose.version:
            del self._open[row.partition]
            proposal.settle(Learned(state))
            return True
        if row.code in (Code.FENCED_LEADER_EPOCH, Code.UNKNOWN_TOPIC_OR_PARTITION):
            del self._open[row.partition]  # the metadata will say what it is now
            return True
        if (row.partition, propose) in self._doubtful:
            return False  # of a controller that has not given the state a new version
        log.info("who is in sync of %s was not changed: %s", row.partition, row.code.name)
        del self._open[row.partition]
        proposal.settle(Refused(propose.version))
        return True


def _row(tp: TopicPartition, proposal: _Proposal, *, repeated: bool) -> InSyncRow:
    propose = proposal.propose
    in_sync = tuple(zip(propose.in_sync, propose.incarnations, strict=True))
    return InSyncRow(tp, proposal.epoch, propose.version, in_sync, repeated)
