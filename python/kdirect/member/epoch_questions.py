"""Where epochs end: what a new follower asks its leader, and what a leader answers (KIP-101).

Owns: the questions of this broker that have no answer yet, one request under way to each leader.
After an election many partitions ask at the same time; their questions go out together.  A question
is asked again until it is answered or withdrawn.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from kdirect.cluster.following_replica import AskEpochEnd, EpochEnd
from kdirect.errors import KdirectError
from kdirect.format import protocol as p
from kdirect.format.error_codes import ErrorCode
from kdirect.format.schema import build
from kdirect.member.pause import Pause
from kdirect.model import TopicPartition

log = logging.getLogger("kdirect.member")

ANSWER_S = 10.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0
MOST_ROWS = 1000

Answered = Callable[[EpochEnd], None]


class _Question(NamedTuple):
    ask: AskEpochEnd
    answered: Answered


class EpochQuestions:
    """See the module.  `answered(event)` is called once for a question that is not withdrawn."""

    def __init__(self, peers: Any, broker: int) -> None:
        self._peers = peers
        self._broker = broker
        self._open: dict[int, dict[TopicPartition, _Question]] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def ask(self, tp: TopicPartition, ask: AskEpochEnd, answered: Answered) -> None:
        """Ask; a question about the partition that is open is withdrawn."""
        self.withdraw(tp)
        self._open.setdefault(ask.leader, {})[tp] = _Question(ask, answered)
        if ask.leader not in self._tasks:
            work = self._work(ask.leader)
            self._tasks[ask.leader] = asyncio.get_running_loop().create_task(work)

    def withdraw(self, tp: TopicPartition) -> None:
        """The replica goes another way."""
        for questions in self._open.values():
            questions.pop(tp, None)

    def stop(self) -> None:
        """Ask no more."""
        self._open.clear()
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()

    async def _work(self, leader: int) -> None:
        pause = Pause(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        try:
            while questions := dict(self._open.get(leader, {})):
                some = dict(list(questions.items())[:MOST_ROWS])
                if await self._ask(leader, some):
                    pause.reset()
                else:
                    await asyncio.sleep(pause.next_s())
        finally:
            if self._tasks.get(leader) is asyncio.current_task():
                del self._tasks[leader]

    async def _ask(self, leader: int, questions: dict[TopicPartition, _Question]) -> bool:
        """Ask once; whether all were answered."""
        request = build(p.EndOfEpochRequest, broker_id=self._broker, topics=_rows(questions))
        try:
            response = await self._peers.call(leader, request, timeout_s=ANSWER_S)
        except (KdirectError, OSError) as e:
            log.info("broker %d does not say where epochs end: %s", leader, e)
            return False
        found = 0
        for topic in response.topics:
            for row in topic.partitions:
                found += self._answer(leader, questions, topic.topic, row)
        return found == len(questions)

    def _answer(
        self, leader: int, questions: dict[TopicPartition, _Question], name: str, row: Any
    ) -> bool:
        tp = TopicPartition(name, row.partition)
        question = questions.get(tp)
        if question is None or row.error_code != 0:
            return False
        if self._open.get(leader, {}).get(tp) is not question:
            return True  # withdrawn
        del self._open[leader][tp]
        ask = question.ask
        question.answered(
            EpochEnd(
                row.leader_epoch,
                ask.question,
                ask.epoch,
                row.epoch,
                row.end_offset,
                row.log_start_offset,
                row.log_end_offset,
            )
        )
        return True


def _rows(questions: dict[TopicPartition, _Question]) -> list[dict[str, Any]]:
    topics: dict[str, list[dict[str, int]]] = {}
    for tp, (ask, _) in questions.items():
        row = {"partition": tp.partition, "leader_epoch": ask.leader_epoch, "epoch": ask.epoch}
        topics.setdefault(tp.topic, []).append(row)
    return [{"topic": name, "partitions": rows} for name, rows in topics.items()]


class EpochRow(NamedTuple):
    """What a leader answers about one partition."""

    leader_epoch: int
    epoch: int
    end_offset: int
    log_start_offset: int
    log_end_offset: int


def answer(request: Any, row_of: Callable[[TopicPartition, int, int], EpochRow | int]) -> Any:
    """The response; `row_of(partition, leader epoch, asked)` gives a row, or an error code."""
    topics = []
    for topic in request.topics:
        rows = []
        for x in topic.partitions:
            found = row_of(TopicPartition(topic.topic, x.partition), x.leader_epoch, x.epoch)
            if isinstance(found, EpochRow):
                row = {"partition": x.partition, "error_code": 0, **found._asdict()}
            else:
                row = {
                    "partition": x.partition,
                    "error_code": int(ErrorCode(found)),
                    **EpochRow(-1, -1, -1, -1, -1)._asdict(),
                }
            rows.append(row)
        topics.append({"topic": topic.topic, "partitions": rows})
    return build(p.EndOfEpochResponse, topics=topics)


__all__ = ["EpochQuestions", "EpochRow", "answer"]
