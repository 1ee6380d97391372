"""Questions to the controller, which may be this broker, another one, or nobody for a while.

A question is asked again when whoever was asked is not the controller any more, or cannot be
reached.  It may have been carried out then although no answer came, and the second answer is that
there is nothing to do.  `_settled` tells by what this broker knew before, and knows now, whether
that is what was asked for: a topic that exists with the id that was to be created is this
question's own; partitions that were to be added, or a move that was to be taken back, are as asked.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from kdirect.cluster.codes import DONE, Code
from kdirect.cluster.requests import (
    AlterInSync,
    Answer,
    CreatedTopic,
    CreateTopic,
    DeleteTopic,
    GrowTopic,
    ListReassignments,
    Reassign,
    ReassignRow,
    Request,
    RowOutcome,
    ShutDown,
)
from kdirect.errors import (
    BrokerUnavailableError,
    ClosedError,
    ProtocolError,
    TimedOutError,
)
from kdirect.format import protocol
from kdirect.member.forwarding import decode_answer, encode_request
from kdirect.member.metadata import NOBODY, Metadata
from kdirect.member.peers import Peers
from kdirect.model import TopicPartition
from kdirect.wire.environment import Environment

log = logging.getLogger("kdirect.member")

AGAIN_S = 0.2  # until whoever could not answer is asked again, if nothing changes before
SEEN_S = 2.0  # how long an answer waits until this broker has read what it tells
# Whoever waits so long ends the connection to the controller, and by that takes back what others
# have asked in vain.  An asker with less patience, who may be a client, does not end it for all.
PATIENT_S = 5.0
SHUTDOWN_S = 10.0  # for one request to be shut down


class Asking:
    """See the module.  `metadata_of`: the newest.  `news(timeout_s)`: waits for newer.
    `ask_here(request)`: asks the controller on this broker."""

    def __init__(
        self,
        node_id: int,
        peers: Peers,
        environment: Environment,
        *,
        metadata_of: Callable[[], Metadata],
        news: Callable[[float], Awaitable[bool]],
        ask_here: Callable[[Request], asyncio.Future[tuple[Answer, int]]],
    ) -> None:
        self._node_id = node_id
        self._peers = peers
        self._now = environment.monotonic
        self._metadata_of = metadata_of
        self._news = news
        self._ask_here = ask_here

    async def ask(self, request: Request, timeout_s: float) -> Answer:
        """As `Membership.ask`."""
        deadline = self._now() + timeout_s
        why = "no broker is known to be controller"
        doubtful = False  # it may have been carried out already
        before = self._metadata_of()
        while (left_s := deadline - self._now()) > 0:
            controller = self._metadata_of().controller_id
            if controller != NOBODY:
                try:
                    answer, generation = await self._ask_once(controller, request, left_s)
                except (BrokerUnavailableError, TimedOutError) as e:
                    why, doubtful = str(e), True
                    request = _repeated(request)
                else:
                    if not _is_elsewhere(answer):
                        await self._see(request, generation, deadline)
                        if doubtful:
                            return await self._settled(request, answer, before, deadline)
                        return answer
                    why = f"broker {controller} is not the controller any more"
                    doubtful = doubtful or _may_have_happened(request)
            left_s = deadline - self._now()
            if left_s > 0 and self._metadata_of().controller_id == controller:
                await self._news(min(AGAIN_S, left_s))
        raise TimedOutError(
            f"the controller did not answer {type(request).__name__} within {timeout_s:g} s: {why}",
            hint="see the brokers' logs, and whether ZooKeeper answers",
        )

    async def _ask_once(
        self, controller: int, request: Request, timeout_s: float
    ) -> tuple[Answer, int]:
        """The answer, and the generation in which it is true."""
        if controller == self._node_id:
            try:
                return await asyncio.wait_for(self._ask_here(request), timeout_s)
            except asyncio.TimeoutError as e:
                raise TimedOutError("the controller on this broker waits for the store") from e
        kind, body = encode_request(request)
        message = protocol.AskControllerRequest(kind=kind, body=body)
        if timeout_s >= PATIENT_S:
            response = await self._peers.call(controller, message, timeout_s=timeout_s)
        else:
            call = self._peers.call(controller, message, timeout_s=PATIENT_S)
            try:
                response = await asyncio.wait_for(call, timeout_s)
            except asyncio.TimeoutError as e:
                raise TimedOutError(f"broker {controller} has not answered yet") from e
        answer = decode_answer(response.error_code, bytes(response.body), request)
        return answer, response.generation

    async def _see(self, request: Request, generation: int, deadline: float) -> None:
        """Wait until the metadata has what the controller had when it answered."""
        if isinstance(request, AlterInSync | ListReassignments | ShutDown):
            return
        until = min(deadline, self._now() + SEEN_S)
        while self._metadata_of().generation < generation and (left_s := until - self._now()) > 0:
            await self._news(left_s)

    async def _settled(
        self, request: Request, answer: Answer, before: Metadata, deadline: float
    ) -> Answer:
        """The answer to a question that was asked twice.  TimedOutError: the store does not say
        whose the topic is that exists."""
        code = answer.outcome.code
        if isinstance(request, CreateTopic) and code is Code.TOPIC_ALREADY_EXISTS:
            while (there := self._metadata_of().image.topics.get(request.name)) is None:
                left_s = deadline - self._now()
                if left_s <= 0 or not await self._news(left_s):
                    raise TimedOutError(
                        f"topic {request.name} exists, and it is not known whether this request"
                        " has created it: the metadata store does not answer",
                        hint="look whether it has the wanted partitions and properties",
                    )
            if there.record.topic_id == request.topic_id:
                made = CreatedTopic(request.name, request.topic_id, there.record.replicas)
                return Answer(request.tag, DONE, (made,))
        unknown = (Code.UNKNOWN_TOPIC_OR_PARTITION, Code.UNKNOWN_TOPIC_ID)
        if isinstance(request, DeleteTopic) and code in unknown and _knows(before, request):
            return Answer(request.tag, DONE)
        if isinstance(request, GrowTopic) and code is Code.INVALID_PARTITIONS:
            while not _shows_partitions(self._metadata_of(), request):
                left_s = deadline - self._now()
                if left_s <= 0 or not await self._news(left_s):
                    return answer
            if _has_grown(before, self._metadata_of(), request):
                return Answer(request.tag, DONE)
        if isinstance(request, Reassign):
            after = self._metadata_of()
            pairs = zip(request.rows, answer.rows, strict=False)
            rows = [
                RowOutcome(row.partition) if _is_taken_back(before, after, row, told) else told
                for row, told in pairs
            ]
            return answer._replace(rows=tuple(rows))
        return answer

    # -- controlled shutdown -----------------------------------------------------------------------

    async def shut_down_in_order(self, *, retries: int, backoff_s: float) -> None:
        """As `Membership.shut_down_in_order`."""
        left: tuple[TopicPartition, ...] | None = None
        for attempt in range(retries + 1):
            metadata = self._metadata_of()
            request = ShutDown(None, self._node_id, metadata.incarnation)
            try:
                answer = await self.ask(request, SHUTDOWN_S)
            except (TimedOutError, ProtocolError) as e:
                log.warning("the controller did not shut this broker down in order: %s", e)
            except ClosedError:
                return
            else:
                if answer.outcome.code is Code.NONE:
                    left = answer.rows
                    if not left:
                        await self._resigned()
                        return
                else:
                    log.warning(
                        "the controller did not shut this broker down in order: %s %s",
                        answer.outcome.code.name,
                        answer.outcome.message,
                    )
            if attempt < retries:
                await self._news(backoff_s)
        if left:
            log.warning(
                "this broker stops although it leads %d partitions that no other broker can lead",
                len(left),
            )

    async def _resigned(self) -> None:
        """Wait until this broker knows that it leads nothing that others can lead."""
        until = self._now() + SEEN_S
        while _leads(self._metadata_of()) and (left_s := until - self._now()) > 0:
            await self._news(left_s)


def _is_elsewhere(answer: Answer) -> bool:
    """Is the question to be asked again?  Not if some of its rows were carried out."""
    if answer.outcome.code is not Code.NOT_CONTROLLER:
        return False
    for row in answer.rows:
        code = row.outcome.code if hasattr(row, "outcome") else getattr(row, "code", None)
        if code is not None and code is not Code.NOT_CONTROLLER:
            return False
    return True


def _repeated(request: Request) -> Request:
    """The request when a copy of it is unanswered."""
    if not isinstance(request, AlterInSync):
        return request
    return request._replace(rows=tuple(row._replace(repeated=True) for row in request.rows))


def _may_have_happened(request: Request) -> bool:
    """A controller that is deposed says NOT_CONTROLLER to what it was committing, too."""
    return isinstance(request, CreateTopic | DeleteTopic | GrowTopic | Reassign)


def _shows_partitions(metadata: Metadata, request: GrowTopic) -> bool:
    """Does this broker know of as many partitions as the controller has said that there are?"""
    topic = metadata.topic(request.name)
    return topic is None or len(topic.partitions) >= request.total


def _has_grown(before: Metadata, after: Metadata, request: GrowTopic) -> bool:
    """Has the topic got the partitions that were asked for since the question was?"""
    old, new = before.topic(request.name), after.topic(request.name)
    if request.validate_only or old is None or new is None:
        return False
    if old.record.topic_id != new.record.topic_id or len(old.partitions) >= request.total:
        return False
    added = new.record.replicas[len(old.partitions) :]
    return len(new.partitions) == request.total and request.assignment in (None, added)


def _is_taken_back(before: Metadata, after: Metadata, row: ReassignRow, told: RowOutcome) -> bool:
    """Was a move cancelled that went on when the question was asked, and has not been finished?"""
    if row.target is not None or told.outcome.code is not Code.NO_REASSIGNMENT_IN_PROGRESS:
        return False
    old, new = before.partition(row.partition), after.partition(row.partition)
    if old is None or new is None or not (old.adding or old.removing):
        return False
    return set(new.replicas) == set(old.origin)


def _knows(metadata: Metadata, request: DeleteTopic) -> bool:
    if request.name is not None:
        return metadata.topic(request.name) is not None
    return request.topic_id is not None and metadata.topic_by_id(request.topic_id) is not None


def _leads(metadata: Metadata) -> bool:
    return any(
        p.state is not None and p.state.leader == metadata.node_id and len(p.replicas) > 1
        for _, p in metadata.image.all_partitions()
    )
