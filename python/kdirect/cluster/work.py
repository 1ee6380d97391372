"""One commit's worth of what a controller has to do.

Requests are carried out and partitions reviewed in a draft until it has no room; what there was no
room for waits for the next commit.  Requests of many rows (`AlterInSync`, `ElectLeaders`,
`Reassign`, `ReplicasFailed`) may be cut between two rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

from kdirect.cluster import paths, topic_rules
from kdirect.cluster.codes import DONE, Code, Outcome
from kdirect.cluster.draft import Draft
from kdirect.cluster.partition_rules import (
    alter_in_sync,
    elect,
    fail_replica,
    reassign,
    settle,
)
from kdirect.cluster.requests import (
    AlterConfig,
    AlterInSync,
    Answer,
    CreateTopic,
    DeleteTopic,
    ElectLeaders,
    GrowTopic,
    InSyncAnswer,
    Reassign,
    ReplicasFailed,
    Request,
    RowOutcome,
    Tag,
)
from kdirect.model import TopicPartition

OfRows: TypeAlias = AlterInSync | ReplicasFailed | ElectLeaders | Reassign


class Queued(NamedTuple):
    """A request that waits.  `done`: answers of its rows that were committed already."""

    request: Request
    done: tuple[Any, ...] = ()


class Work:
    """What is put into one commit.

    `taken` are the requests, `answers` what they are answered if it happens, `rest` the request of
    which rows are left; `deletions` (topic, tag) of requests that wait for the topic's end;
    `reviewed` partitions that were looked at, `concerned` those that are to be; `doomed` topics
    whose nodes are deleted.  `alone`: it takes one thing only.
    """

    def __init__(self, draft: Draft, *, alone: bool) -> None:
        self._draft = draft
        self._alone = alone
        self.taken: list[Queued] = []
        self.answers: list[Answer] = []
        self.rest: Queued | None = None
        self.deletions: list[tuple[str, Tag]] = []
        self.concerned: set[TopicPartition] = set()
        self.reviewed: set[TopicPartition] = set()
        self.doomed: set[str] = set()

    @property
    def is_full(self) -> bool:
        alone = self._alone and bool(self.taken or self.reviewed or self.doomed)
        return alone or self.rest is not None or not self._draft.has_room

    def carry_out(self, queued: Queued) -> None:
        """Put one request into the draft."""
        draft, request = self._draft, queued.request
        self.taken.append(queued)
        match request:
            case CreateTopic():
                self.answers.append(topic_rules.create(draft, request))
                self._concern_new(request.name, 0)
            case GrowTopic():
                topic = draft.topics.get(request.name)
                before = len(draft.partitions_of(request.name)) if topic is not None else 0
                self.answers.append(topic_rules.grow(draft, request))
                self._concern_new(request.name, before)
            case DeleteTopic():
                name = topic_rules.find_doomed(draft, request)
                if isinstance(name, Outcome):
                    self.answers.append(Answer(request.tag, name))
                    return
                if not draft.topics[name].deleting:
                    draft.mark_deletion(name)
                self.deletions.append((name, request.tag))
            case AlterConfig():
                answer, concerned = topic_rules.configure(draft, request)
                self.answers.append(answer)
                self.concerned.update(concerned)
            case AlterInSync() | ReplicasFailed() | ElectLeaders() | Reassign():
                self._carry_out_rows(queued, request)

    def _concern_new(self, name: str, before: int) -> None:
        if name in self._draft.topics:
            for number in range(before, len(self._draft.partitions_of(name))):
                self.concerned.add(TopicPartition(name, number))

    def _carry_out_rows(self, queued: Queued, request: OfRows) -> None:
        """As many rows as there is room for; the others with the next commit."""
        draft = self._draft
        if isinstance(request, AlterInSync | ReplicasFailed):
            there = draft.fleet.live.get(request.broker)
            if there is None or there.incarnation != request.incarnation:
                message = f"broker {request.broker} is not registered with {request.incarnation}"
                outcome = Outcome(Code.STALE_BROKER_EPOCH, message)
                self.answers.append(Answer(request.tag, outcome, queued.done))
                return
        if isinstance(request, Reassign) and request.from_node:
            draft.take_node(paths.REASSIGNMENTS)
        done = list(queued.done)
        for place in range(len(done), len(request.rows or ())):
            if not draft.has_room:
                self.rest = Queued(request, tuple(done))
                return
            done.append(self._carry_out_row(request, place))
        if isinstance(request, ElectLeaders) and request.of_all:
            done = [row for row in done if row.outcome.code is not Code.ELECTION_NOT_NEEDED]
        self.answers.append(Answer(request.tag, DONE, tuple(done)))

    def _carry_out_row(self, request: OfRows, place: int) -> InSyncAnswer | RowOutcome:
        if isinstance(request, AlterInSync):
            return alter_in_sync(self._draft, request, request.rows[place])
        if isinstance(request, ReplicasFailed):
            return fail_replica(self._draft, request, request.rows[place])
        if isinstance(request, Reassign):
            self.concerned.add(request.rows[place].partition)
            return reassign(self._draft, request.rows[place])
        assert request.rows is not None
        return elect(self._draft, request.kind, request.rows[place])

    def review_all(self, partitions: Iterable[TopicPartition]) -> None:
        """Bring partitions to where the rules want them, as many as there is room for."""
        for tp in sorted(partitions):
            if self.is_full:
                return
            settle(self._draft, tp)
            self.reviewed.add(tp)

    def delete_nodes(self, name: str) -> None:
        """Delete nodes of a topic, as many as there is room for."""
        self._draft.delete_topic_nodes(name)
        self.doomed.add(name)
