"""What a controller is asked, and what it answers.  Values only.

Every request has a `tag`, by which the asker knows the answer again; requests that the controller
makes itself have none.  A request is answered once: with an `Outcome` for the whole, or with one
for each of its rows in their order.
"""

from __future__ import annotations

import enum
import uuid
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple, TypeAlias

from kdirect.cluster.codes import DONE, Code, Outcome
from kdirect.cluster.partition_state import PartitionState
from kdirect.model import TopicPartition

Tag: TypeAlias = Hashable
Replicas: TypeAlias = tuple[int, ...]


# -- topics ----------------------------------------------------------------------------------------


class CreateTopic(NamedTuple):
    """`assignment`: replicas by partition; without it they are spread, beginning at `start` and
    `shift`, which are drawn at random.  `validate_only`: answer as if, but create nothing.
    `first_epoch`: the leader epoch to begin with, where there are records already: not below any
    of theirs."""

    tag: Tag
    name: str
    topic_id: uuid.UUID
    partitions: int = 1
    factor: int = 1
    assignment: Mapping[int, Replicas] | None = None
    config: Mapping[str, str] = {}
    start: int = 0
    shift: int = 0
    validate_only: bool = False
    first_epoch: int = 0


class GrowTopic(NamedTuple):
    """CreatePartitions: the topic shall have `total` partitions.  `assignment`: of the new ones."""

    tag: Tag
    name: str
    total: int
    assignment: tuple[Replicas, ...] | None = None
    validate_only: bool = False


class DeleteTopic(NamedTuple):
    """By name, or by id where the name is None.  It is answered when nothing of the topic is in the
    store any more."""

    tag: Tag
    name: str | None
    topic_id: uuid.UUID | None = None


class ConfigOf(enum.Enum):
    TOPIC = "topic"
    BROKER = "broker"
    GROUP = "group"
    METRICS = "client-metrics"


class AlterConfig(NamedTuple):
    """Set properties of a topic, a broker (`paths.ALL_BROKERS`: of all), a group or a subscription
    to clients' metrics; None removes one.
    `whole`: those that are not named are removed too (AlterConfigs; else IncrementalAlterConfigs).
    Whether the properties make sense is checked by whoever asks."""

    tag: Tag
    of: ConfigOf
    name: str
    properties: Mapping[str, str | None]
    whole: bool = False


# -- partitions ------------------------------------------------------------------------------------


class InSyncRow(NamedTuple):
    """A leader's proposal for one partition: (broker, incarnation) of those in sync, for the state
    of this leader epoch and version (KIP-497, KIP-903).

    `repeated`: the same was sent before, and that copy is unanswered.  If it is refused, the state
    gets a new version, so that whenever the other copy comes to a controller, it is refused too:
    by then the leader may have proposed something else and count on that."""

    partition: TopicPartition
    leader_epoch: int
    version: int
    in_sync: tuple[tuple[int, int], ...]
    repeated: bool = False


class AlterInSync(NamedTuple):
    """Of the leader `broker`, whose process is `incarnation`.  Rows: `InSyncAnswer`."""

    tag: Tag
    broker: int
    incarnation: int
    rows: tuple[InSyncRow, ...]


class ReplicasFailed(NamedTuple):
    """Replicas of `broker`, whose process is `incarnation`, cannot go on.  Rows: `RowOutcome`.

    Their directory has failed: until the broker starts again they cannot be used, and are neither
    led nor in sync.  With `is_full` there is no room for more records: the others that are in sync
    go on without it, if there are any, and it comes back into sync when it has copied again."""

    tag: Tag
    broker: int
    incarnation: int
    rows: tuple[TopicPartition, ...]
    is_full: bool = False


class ElectionKind(enum.IntEnum):
    """ElectLeaders' numbers (KIP-460)."""

    PREFERRED = 0
    UNCLEAN = 1


class ElectLeaders(NamedTuple):
    """`rows`: None for all partitions; then only those are answered that needed an election."""

    tag: Tag
    kind: ElectionKind
    rows: tuple[TopicPartition, ...] | None
    of_all: bool = False  # set by the controller when `rows` were None


class ReassignRow(NamedTuple):
    """`target`: None cancels."""

    partition: TopicPartition
    target: Replicas | None


class Reassign(NamedTuple):
    """AlterPartitionReassignments.  `from_node`: taken from `/admin/reassign_partitions`."""

    tag: Tag
    rows: tuple[ReassignRow, ...]
    from_node: bool = False


class ListReassignments(NamedTuple):
    """`partitions`: None for all.  Rows: `ReassignmentRow` of those that are moving."""

    tag: Tag
    partitions: tuple[TopicPartition, ...] | None = None


class TellGeneration(NamedTuple):
    """Nothing but the generation with which every answer comes: whoever has read up to it has seen
    what this controller has done so far."""

    tag: Tag


class ShutDown(NamedTuple):
    """Controlled shutdown of `broker`.  Rows: the partitions that it still leads because no other
    broker can (those with other replicas only, as in Kafka)."""

    tag: Tag
    broker: int
    incarnation: int


Request: TypeAlias = (
    CreateTopic
    | GrowTopic
    | DeleteTopic
    | AlterConfig
    | AlterInSync
    | ReplicasFailed
    | ElectLeaders
    | Reassign
    | ListReassignments
    | TellGeneration
    | ShutDown
)
REQUESTS = (
    CreateTopic,
    GrowTopic,
    DeleteTopic,
    AlterConfig,
    AlterInSync,
    ReplicasFailed,
    ElectLeaders,
    Reassign,
    ListReassignments,
    TellGeneration,
    ShutDown,
)


# -- answers ---------------------------------------------------------------------------------------


class RowOutcome(NamedTuple):
    """Of one partition of `ElectLeaders`, `Reassign` or `ReplicasFailed`."""

    partition: TopicPartition
    outcome: Outcome = DONE


class InSyncAnswer(NamedTuple):
    """Of one row of `AlterInSync`: the state as it is now, unless there is no such partition."""

    partition: TopicPartition
    code: Code = Code.NONE
    state: PartitionState | None = None


class ReassignmentRow(NamedTuple):
    """A partition that is moving."""

    partition: TopicPartition
    replicas: Replicas
    adding: Replicas
    removing: Replicas


class CreatedTopic(NamedTuple):
    """Of `CreateTopic`: what was, or would be, created."""

    name: str
    topic_id: uuid.UUID
    replicas: tuple[Replicas, ...]


class Answer(NamedTuple):
    """What a request is answered.  An effect of the controller."""

    tag: Tag
    outcome: Outcome = DONE
    rows: tuple[Any, ...] = ()
