"""Requests that change the topics of a cluster: CreateTopics, DeleteTopics, CreatePartitions.

Any broker takes them and asks the controller (`kdirect.cluster.requests`), each topic apart; the
controller decides, and what it refuses is the topic's error.  What it did is answered when this
broker's own picture of the cluster shows it.  A broker that is alone has `handlers_cluster` for
these requests.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from kdirect.broker.answers import Answer, later, respond
from kdirect.broker.connection import Connection
from kdirect.broker.failures import explain
from kdirect.broker.handlers_cluster import created, grown_twice, not_created
from kdirect.broker.member_topics import ASK_S, drawn, has_leaders
from kdirect.broker.picture import Picture
from kdirect.broker.services import Services
from kdirect.broker.topic_requests import Deletion, configs_of, deletions, named_twice
from kdirect.broker.topics import (
    INTERNAL_TOPICS,
    MAX_PARTITIONS,
    OFFSETS_TOPIC,
    REMOTE_METADATA_TOPIC,
    TRANSACTIONS_TOPIC,
    Topic,
)
from kdirect.cluster import requests
from kdirect.cluster.codes import DONE, Code, Outcome
from kdirect.errors import ConfigError, KdirectError
from kdirect.format import protocol as p
from kdirect.format.error_codes import ErrorCode
from kdirect.log.checkpoint import new_id
from kdirect.member.metadata import Metadata

LEAST_WAIT_S = 0.5  # a client that gives no time at all still hears what was refused


def wait_s(timeout_ms: int) -> float:
    """How long to ask and to wait for a client that gives this time."""
    return max(LEAST_WAIT_S, min(timeout_ms / 1000, ASK_S))


def row_of(outcome: Outcome, **names: Any) -> dict[str, Any]:
    """`names` with the error code and message of an outcome."""
    return {
        **names,
        "error_code": int(outcome.code),
        "error_message": outcome.message or None,
    }


class TopicHandlers:
    """See the module.  A member has one, used on its event loop.  `config_rows(topic)`: the
    properties of a topic, in the form of DescribeConfigs."""

    def __init__(
        self,
        services: Services,
        picture: Picture,
        config_rows: Callable[[Topic], list[dict[str, Any]]],
    ) -> None:
        self._config = services.config
        self._topics: Any = services.topics  # of a member
        self._offsets = services.offsets
        self._transactions = services.transactions
        self._picture = picture
        self._config_rows = config_rows
        # Called before a topic is deleted; KdirectError: it is not to be.
        self.before_deletion: Callable[[Topic], Awaitable[None]] | None = None

    # -- create ------------------------------------------------------------------------------------

    def create_topics(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        return later(self._create_topics(header, request))

    async def _create_topics(self, header: p.RequestHeader, request: Any) -> Answer:
        names = Counter(t.name for t in request.topics)
        wanted = list({t.name: t for t in request.topics}.values())
        rows = await asyncio.gather(*(self._create(t, names[t.name], request) for t in wanted))
        return respond(header, p.CreateTopicsResponse, topics=rows)

    async def _create(self, wanted: Any, times: int, request: Any) -> dict[str, Any]:
        name = wanted.name
        if times > 1:
            text = f"topic {name} is in the request twice"
            return not_created(name, Code.INVALID_REQUEST, text)
        question = self._question(wanted, request.validate_only)
        if isinstance(question, Outcome):
            return not_created(name, int(question.code), question.message or None)
        outcome, rows = await self.ask(question, wait_s(request.timeout_ms))
        if outcome.code == Code.NONE and not request.validate_only:
            outcome = await self.seen(
                lambda m: has_leaders(m, name), wait_s(request.timeout_ms), f"topic {name}"
            )
        if outcome.code != Code.NONE or not rows:
            return not_created(name, int(outcome.code), outcome.message or None)
        replicas = rows[0].replicas
        topic = Topic(name, question.topic_id, len(replicas), dict(question.config))
        return created(topic, len(replicas[0]), self._config_rows(topic))

    def _question(self, wanted: Any, validate_only: bool) -> requests.CreateTopic | Outcome:
        """What to ask the controller, or why not."""
        name = wanted.name
        assignment = {a.partition_index: tuple(a.broker_ids) for a in wanted.assignments}
        if len(assignment) != len(wanted.assignments):
            text = "a partition is in the assignment twice"
            return Outcome(Code.INVALID_REPLICA_ASSIGNMENT, text)
        if assignment and (wanted.num_partitions != -1 or wanted.replication_factor != -1):
            text = "give an assignment, or numbers of partitions and replicas, not both"
            return Outcome(Code.INVALID_REQUEST, text)
        partitions, factor = wanted.num_partitions, wanted.replication_factor
        if not assignment and partitions == -1:
            partitions = self._config["num.partitions"]
        if not assignment and factor == -1:
            factor = self._config["default.replication.factor"]
        if not assignment and not 1 <= partitions <= MAX_PARTITIONS:
            text = f"{partitions} partitions; give 1 to {MAX_PARTITIONS}"
            return Outcome(Code.INVALID_PARTITIONS, text)
        try:
            configs = configs_of(wanted)
        except ConfigError as e:
            return Outcome(Code.INVALID_CONFIG, str(e))
        return self.creation(
            name,
            partitions,
            factor,
            configs,
            assignment=assignment or None,
            validate_only=validate_only,
        )

    def creation(
        self,
        name: str,
        partitions: int,
        factor: int,
        configs: Mapping[str, Any],
        *,
        assignment: Mapping[int, tuple[int, ...]] | None = None,
        validate_only: bool = False,
    ) -> requests.CreateTopic | Outcome:
        """The question for the controller, with configs as they are stored."""
        try:
            texts = dict(self._topics.checked_configs(name, configs))
        except ConfigError as e:
            return Outcome(Code.INVALID_CONFIG, str(e))
        start, shift = drawn(self._picture.metadata)
        return requests.CreateTopic(
            None,
            name,
            new_id(),
            partitions,
            factor,
            assignment=assignment,
            config=texts,
            start=start,
            shift=shift,
            validate_only=validate_only,
        )

    async def create_missing(self, names: Iterable[str]) -> dict[str, int]:
        """Create topics that a Metadata request asks for; the error codes of those that cannot be
        created."""
        found = await asyncio.gather(*(self._create_one(name) for name in dict.fromkeys(names)))
        return {name: code for name, code in found if code}

    async def _create_one(self, name: str) -> tuple[str, int]:
        try:
            if name == OFFSETS_TOPIC:
                await self._topics.create_everywhere(
                    name,
                    self._config["offsets.topic.num.partitions"],
                    self._config["offsets.topic.replication.factor"],
                    self._offsets.topic_configs,
                )
                return name, 0
            if name == TRANSACTIONS_TOPIC:
                await self._topics.create_everywhere(
                    name,
                    self._config["transaction.state.log.num.partitions"],
                    self._config["transaction.state.log.replication.factor"],
                    self._transactions.topic_configs,
                )
                return name, 0
        except Exception as e:
            return name, explain(e, f"creation of topic {name}")[0]
        if name == REMOTE_METADATA_TOPIC:  # whoever needs it makes it
            return name, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        partitions = self._config["num.partitions"]
        factor = self._config["default.replication.factor"]
        question = self.creation(name, partitions, factor, {})
        if isinstance(question, Outcome):
            return name, question.code
        outcome, _ = await self.ask(question, ASK_S)
        if outcome.code not in (Code.NONE, Code.TOPIC_ALREADY_EXISTS):
            return name, outcome.code
        await self._picture.until(lambda m: has_leaders(m, name))
        return name, 0

    # -- delete ------------------------------------------------------------------------------------

    def delete_topics(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        return later(self._delete_topics(header, request))

    async def _delete_topics(self, header: p.RequestHeader, request: Any) -> Answer:
        wanted = deletions(request, header.api_version)
        rows = await asyncio.gather(*(self._delete(w, request.timeout_ms) for w in wanted))
        return respond(header, p.DeleteTopicsResponse, responses=rows)

    async def _delete(self, deletion: Deletion, timeout_ms: int) -> dict[str, Any]:
        name, topic_id, refusal = deletion
        if refusal is not None:
            row = row_of(DONE, name=name, topic_id=topic_id)
            return {**row, "error_code": refusal[0], "error_message": refusal[1]}
        named = name is not None
        if not named and topic_id is not None:  # which topic it is decides whether it may go
            await self._picture.catch_up(lambda m: m.topic_by_id(topic_id) is not None)
        topic = self._topics.get(name or "") if named else self._topics.by_id(topic_id)
        if topic is not None:
            name, topic_id = topic.name, topic.topic_id
        if not self._config["delete.topic.enable"]:
            code = ErrorCode.TOPIC_DELETION_DISABLED
            row = row_of(DONE, name=name, topic_id=topic_id)
            return {**row, "error_code": code, "error_message": "delete.topic.enable is false"}
        if name in INTERNAL_TOPICS:
            outcome = Outcome(Code.INVALID_REQUEST, f"topic {name} is the cluster's own")
            return row_of(outcome, name=name, topic_id=topic_id)
        if topic is not None and self.before_deletion is not None:
            try:
                await self.before_deletion(topic)
            except KdirectError as e:
                number, message = explain(e, f"deletion of topic {name}")
                row = row_of(DONE, name=name, topic_id=topic_id)
                return {**row, "error_code": number, "error_message": message}
        question = requests.DeleteTopic(None, name if topic or named else None, topic_id)
        outcome, _ = await self.ask(question, wait_s(timeout_ms))
        if outcome.code == Code.NONE:
            outcome = await self.seen(
                lambda m: not _is_there(m, name, topic_id),
                wait_s(timeout_ms),
                f"the deletion of topic {name}",
            )
        return row_of(outcome, name=name, topic_id=topic_id)

    # -- grow --------------------------------------------------------------------------------------

    def create_partitions(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        return later(self._create_partitions(header, request))

    async def _create_partitions(self, header: p.RequestHeader, request: Any) -> Answer:
        twice = named_twice(request.topics)
        once = [t for t in request.topics if t.name not in twice]
        rows = await asyncio.gather(*(self._grow(t, request) for t in once))
        rows += [grown_twice(name) for name in sorted(twice)]
        return respond(header, p.CreatePartitionsResponse, results=rows)

    async def _grow(self, wanted: Any, request: Any) -> dict[str, Any]:
        name, count = wanted.name, wanted.count
        if name in INTERNAL_TOPICS:
            outcome = Outcome(Code.INVALID_REQUEST, f"topic {name} is the cluster's own")
            return row_of(outcome, name=name)
        assignment = None
        if wanted.assignments is not None:
            assignment = tuple(tuple(a.broker_ids) for a in wanted.assignments)
        question = requests.GrowTopic(None, name, count, assignment, request.validate_only)
        timeout = wait_s(request.timeout_ms)
        outcome, _ = await self.ask(question, timeout)
        if outcome.code == Code.NONE and not request.validate_only:
            outcome = await self.seen(
                lambda m: _has_partitions(m, name, count) and has_leaders(m, name),
                timeout,
                f"the new partitions of topic {name}",
            )
        return row_of(outcome, name=name)

    # -- asking ------------------------------------------------------------------------------------

    async def ask(
        self, question: requests.Request, timeout_s: float
    ) -> tuple[Outcome, Sequence[Any]]:
        """What the controller answers: its outcome and rows.  That there is none in time, or no
        controller, is an outcome, too."""
        return await ask(self._picture, question, timeout_s)

    async def seen(self, shows: Callable[[Metadata], bool], timeout_s: float, what: str) -> Outcome:
        """Wait until this broker's picture shows what was done."""
        if await self._picture.until(shows, timeout_s):
            return DONE
        text = f"{what} was accepted, but this broker does not see it yet; look again"
        return Outcome(Code.REQUEST_TIMED_OUT, text)

    def table(self) -> Iterable[tuple[str, Any, bool]]:
        return (
            ("CreateTopics", self.create_topics, True),
            ("DeleteTopics", self.delete_topics, True),
            ("CreatePartitions", self.create_partitions, True),
        )


async def ask(
    picture: Picture, question: requests.Request, timeout_s: float
) -> tuple[Outcome, Sequence[Any]]:
    """See `TopicHandlers.ask`."""
    try:
        answer = await picture.ask(question, timeout_s)
    except Exception as e:
        code, message = explain(e, f"{type(question).__name__} at the controller")
        known = code if code in Code._value2member_map_ else Code.UNKNOWN_SERVER_ERROR
        return Outcome(Code(known), message), ()
    return answer.outcome, answer.rows


def _is_there(metadata: Metadata, name: str | None, topic_id: Any) -> bool:
    """Is the topic, and not a later one of its name, in the picture?"""
    if name is None:
        return topic_id is not None and metadata.topic_by_id(topic_id) is not None
    found = metadata.image.topics.get(name)
    return found is not None and (topic_id is None or found.record.topic_id == topic_id)


def _has_partitions(metadata: Metadata, name: str, count: int) -> bool:
    topic = metadata.topic(name)
    return topic is not None and len(topic.partitions) >= count
