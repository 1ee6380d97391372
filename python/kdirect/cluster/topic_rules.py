"""What a controller does when it is asked to create, grow, delete or configure a topic, or to
configure a broker.

Each function looks at a request and a draft, changes the draft, and says what to answer when the
draft is committed.
"""

from __future__ import annotations

from collections.abc import Mapping

from kdirect.cluster import paths
from kdirect.cluster.assignment import (
    Racks,
    assign,
    assign_more,
    refuse_assignment,
    refuse_more,
)
from kdirect.cluster.codes import DONE, Code, Outcome
from kdirect.cluster.draft import Draft
from kdirect.cluster.election import Partition
from kdirect.cluster.image import Topic
from kdirect.cluster.records import TopicAssignment
from kdirect.cluster.requests import (
    AlterConfig,
    Answer,
    ConfigOf,
    CreatedTopic,
    CreateTopic,
    DeleteTopic,
    GrowTopic,
    Replicas,
)
from kdirect.errors import ConfigError
from kdirect.model import TopicPartition, check_topic_name

LONGEST_NAME = 1024  # of a group or a subscription that has properties, in bytes
MOST_PARTITIONS = 10_000  # of a topic, as elsewhere in kdirect
MOST_FIRST_EPOCH = 2**30  # which leaves as many for the elections to come


def _racks(draft: Draft) -> Racks:
    """Brokers that may get new replicas.  One that is shutting down comes back, says Kafka."""
    return {number: broker.rack for number, broker in draft.fleet.live.items()}


def create(draft: Draft, wanted: CreateTopic) -> Answer:
    """CreateTopics.  Its partitions get their first state when they are reviewed."""
    refusal = _refuse_name(draft, wanted.name)
    if refusal is not None:
        return Answer(wanted.tag, refusal)
    if not 0 <= wanted.first_epoch <= MOST_FIRST_EPOCH:
        message = f"leader epoch {wanted.first_epoch} is not one of 0 to {MOST_FIRST_EPOCH}"
        return Answer(wanted.tag, Outcome(Code.INVALID_REQUEST, message))
    replicas = _replicas(draft, wanted)
    if isinstance(replicas, Outcome):
        return Answer(wanted.tag, replicas)
    created = CreatedTopic(wanted.name, wanted.topic_id, replicas)
    if not wanted.validate_only:
        record = TopicAssignment(wanted.topic_id, replicas)
        partitions = tuple(Partition(r, first_epoch=wanted.first_epoch) for r in replicas)
        draft.create_topic(wanted.name, Topic(record, partitions))
        draft.set_topic_config(wanted.name, dict(wanted.config))
        draft.take_node(paths.deletion(wanted.name))  # of one of this name that went by hand
    return Answer(wanted.tag, DONE, (created,))


def _refuse_name(draft: Draft, name: str) -> Outcome | None:
    try:
        check_topic_name(name)
    except ConfigError as e:
        return Outcome(Code.INVALID_TOPIC_EXCEPTION, str(e))
    there = draft.topics.get(name)
    if there is not None:
        state = "is being deleted" if there.deleting else "exists"
        return Outcome(Code.TOPIC_ALREADY_EXISTS, f"topic {name} {state}")
    if draft.exists(paths.topic(name)):
        message = f"node {paths.topic(name)} exists and is damaged; repair or delete it"
        return Outcome(Code.TOPIC_ALREADY_EXISTS, message)
    # Kafka's metrics write both as an underscore.
    plain = name.replace(".", "_")
    for other in draft.topics:
        if other.replace(".", "_") == plain:
            message = f"topic {name} differs from topic {other} only in '.' and '_'"
            return Outcome(Code.INVALID_TOPIC_EXCEPTION, message)
    return None


def _replicas(draft: Draft, wanted: CreateTopic) -> tuple[Replicas, ...] | Outcome:
    racks = _racks(draft)
    given = wanted.assignment
    count = wanted.partitions if given is None else len(given)
    if count > MOST_PARTITIONS:
        message = f"{count} partitions; give at most {MOST_PARTITIONS}"
        return Outcome(Code.INVALID_PARTITIONS, message)
    if given is None:
        return assign(
            racks, wanted.partitions, wanted.factor, start=wanted.start, shift=wanted.shift
        )
    refusal = refuse_assignment(given, racks)
    return refusal or tuple(given[partition] for partition in range(count))


def grow(draft: Draft, wanted: GrowTopic) -> Answer:
    """CreatePartitions."""
    topic = draft.topics.get(wanted.name)
    if topic is None or topic.deleting:
        return Answer(wanted.tag, _no_topic(wanted.name))
    refusal = _refuse_growth(draft, wanted)
    if refusal is not None:
        return Answer(wanted.tag, refusal)
    racks = _racks(draft)
    partitions = draft.partitions_of(wanted.name)
    existing = [partition.target for partition in partitions]
    added: tuple[Replicas, ...] | Outcome
    if wanted.assignment is None:
        added = assign_more(racks, existing, wanted.total)
    else:
        added = refuse_more(wanted.assignment, existing, wanted.total, racks) or wanted.assignment
    if isinstance(added, Outcome):
        return Answer(wanted.tag, added)
    if not wanted.validate_only:
        grown = (*partitions, *(Partition(replicas) for replicas in added))
        draft.create_topic(wanted.name, topic._replace(partitions=grown))
    return Answer(wanted.tag)


def _refuse_growth(draft: Draft, wanted: GrowTopic) -> Outcome | None:
    partitions = draft.partitions_of(wanted.name)
    if any(partition.adding or partition.removing for partition in partitions):
        # Kafka refuses it with this code, too.
        message = f"a reassignment of topic {wanted.name} is in progress; wait until it has ended"
        return Outcome(Code.REASSIGNMENT_IN_PROGRESS, message)
    if not len(partitions) < wanted.total <= MOST_PARTITIONS:
        message = (
            f"topic {wanted.name} has {len(partitions)} partitions;"
            f" give more, and at most {MOST_PARTITIONS}"
        )
        return Outcome(Code.INVALID_PARTITIONS, message)
    return None


def _no_topic(name: str) -> Outcome:
    return Outcome(Code.UNKNOWN_TOPIC_OR_PARTITION, f"there is no topic {name}")


def find_doomed(draft: Draft, wanted: DeleteTopic) -> str | Outcome:
    """The name of the topic that is to be deleted, also if its deletion is under way."""
    if wanted.name is not None:
        return wanted.name if wanted.name in draft.topics else _no_topic(wanted.name)
    for name, topic in draft.topics.items():
        if topic.record.topic_id is not None and topic.record.topic_id == wanted.topic_id:
            return name
    return Outcome(Code.UNKNOWN_TOPIC_ID, f"there is no topic with id {wanted.topic_id}")


def configure(draft: Draft, wanted: AlterConfig) -> tuple[Answer, tuple[TopicPartition, ...]]:
    """AlterConfigs and IncrementalAlterConfigs.  Also: partitions that this concerns."""
    if wanted.of in (ConfigOf.GROUP, ConfigOf.METRICS):
        return _configure_other(draft, wanted), ()
    of_topic = wanted.of is ConfigOf.TOPIC
    topic = draft.topics.get(wanted.name)
    if of_topic and (topic is None or topic.deleting):
        return Answer(wanted.tag, _no_topic(wanted.name)), ()
    if not of_topic and wanted.name != paths.ALL_BROKERS and not _is_number(wanted.name):
        message = f"{wanted.name!r} is no broker's id"
        return Answer(wanted.tag, Outcome(Code.INVALID_REQUEST, message)), ()
    before = dict(topic.config) if topic is not None and of_topic else {}
    if not of_topic:
        before = dict(draft.broker_config(wanted.name))
    config = _altered(before, wanted)
    names = [wanted.name] if of_topic else list(draft.topics)
    rules = {name: draft.rules(name) for name in names}
    if config != before:
        if of_topic:
            draft.set_topic_config(wanted.name, config)
        else:
            draft.set_broker_config(wanted.name, config)
    concerned = tuple(
        TopicPartition(name, number)
        for name in names
        if draft.rules(name) != rules[name]
        for number in range(len(draft.partitions_of(name)))
    )
    return Answer(wanted.tag), concerned


def _altered(before: Mapping[str, str], wanted: AlterConfig) -> dict[str, str]:
    """The properties after the request."""
    config = {} if wanted.whole else dict(before)
    for name, value in wanted.properties.items():
        if value is None:
            config.pop(name, None)
        else:
            config[name] = value
    return config


def _configure_other(draft: Draft, wanted: AlterConfig) -> Answer:
    """Of a group or a subscription, which no partition depends on."""
    of, name = wanted.of.value, wanted.name
    if not 0 < len(name.encode()) <= LONGEST_NAME:
        message = f"the name of a {of} is empty or longer than {LONGEST_NAME} bytes"
        return Answer(wanted.tag, Outcome(Code.INVALID_REQUEST, message))
    before = draft.other_config(of, name)
    config = _altered(before, wanted)
    if config != before:
        draft.set_other_config(of, name, config)
    return Answer(wanted.tag)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and str(int(text[:10])) == text
