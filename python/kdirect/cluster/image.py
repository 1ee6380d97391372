"""What a controller knows of the metadata store: a value that is read from its nodes.

The topics, partitions and configs as the nodes say, and the version of every node that the
controller may write.  `draft.Draft` makes the next image.  A node whose value nobody understands is
listed and left alone: nothing is decided about what it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from kdirect.cluster import paths, records
from kdirect.cluster.election import LiveBroker, Partition, Rules
from kdirect.cluster.records import Changes, TopicAssignment
from kdirect.errors import CorruptMetadataError
from kdirect.model import TopicPartition
from kdirect.store.contract import Node

MISSING = -1  # the version of a state whose node was deleted or damaged by hand


class Settings(NamedTuple):
    """The controller's broker's properties, which hold where nodes below ``/config`` have none."""

    min_in_sync: int = 1  # min.insync.replicas
    unclean: bool = False  # unclean.leader.election.enable
    rebalance: bool = True  # auto.leader.rebalance.enable
    rebalance_interval_ms: int = 300_000  # leader.imbalance.check.interval.seconds
    rebalance_percent: int = 10  # leader.imbalance.per.broker.percentage


class Topic(NamedTuple):
    """A topic as its nodes say."""

    record: TopicAssignment
    partitions: tuple[Partition, ...]
    config: Mapping[str, str] = {}
    deleting: bool = False


class Image(NamedTuple):
    """See the module.  `versions`: of nodes that exist, by path.  `damaged`: paths of nodes whose
    value nobody understands, which are left alone; what is wrong, by path."""

    epoch: int
    epoch_version: int
    changes: Changes = Changes()
    topics: Mapping[str, Topic] = {}
    broker_configs: Mapping[str, Mapping[str, str]] = {}
    other_configs: Mapping[tuple[str, str], Mapping[str, str]] = {}  # by `paths.other_of_config`
    versions: Mapping[str, int] = {}
    damaged: Mapping[str, CorruptMetadataError] = {}

    def find(self, tp: TopicPartition) -> Partition | None:
        """The partition, unless its topic is being deleted."""
        topic = self.topics.get(tp.topic)
        if topic is None or topic.deleting or not 0 <= tp.partition < len(topic.partitions):
            return None
        return topic.partitions[tp.partition]

    def all_partitions(self) -> Iterator[tuple[TopicPartition, Partition]]:
        """Those of topics that are not being deleted."""
        for name, topic in self.topics.items():
            if not topic.deleting:
                for number, partition in enumerate(topic.partitions):
                    yield TopicPartition(name, number), partition

    def rules(self, name: str, settings: Settings) -> Rules:
        """What holds for a topic: its config, else that of all brokers, else the settings."""
        topic = self.topics.get(name)
        configs = [topic.config if topic is not None else {}]
        configs.append(self.broker_configs.get(paths.ALL_BROKERS, {}))
        found = {}
        for config in reversed(configs):
            found.update(config)
        return Rules(
            _positive(found.get("min.insync.replicas"), settings.min_in_sync),
            _truth(found.get("unclean.leader.election.enable"), settings.unclean),
        )


def _positive(text: str | None, default: int) -> int:
    text = (text or "").strip()
    usable = text.isascii() and text.isdigit() and len(text) < 10 and int(text) > 0
    return int(text) if usable else default


def _truth(text: str | None, default: bool) -> bool:
    return {"true": True, "false": False}.get((text or "").strip().lower(), default)


# -- reading ---------------------------------------------------------------------------------------


def read_brokers(
    nodes: Mapping[str, Node],
) -> tuple[dict[int, LiveBroker], list[CorruptMetadataError]]:
    """The brokers that live, of the nodes of ``/brokers/ids``.  One whose node is damaged does not
    count."""
    live, wrong = {}, []
    for path, node in nodes.items():
        name = paths.name_below(path, paths.BROKER_IDS)
        if name is None:
            continue
        try:
            if not (name.isascii() and name.isdigit() and len(name) < 11):
                remedy = "delete the node"
                raise CorruptMetadataError(f"node {path} is no broker's", hint=remedy)
            found = records.decode_broker(path, node.value)
            since = found.intact_since if found.intact_since is not None else node.created
            live[int(name)] = LiveBroker(
                node.created, found.rack, since, found.lost_since(node.created)
            )
        except CorruptMetadataError as e:
            wrong.append(e)
    return live, wrong


def read_image(nodes: Mapping[str, Node], epoch: int) -> Image:
    """The image of all nodes of the store, for the controller of `epoch`.  Damaged nodes are listed
    in it; CorruptMetadataError if the epoch itself is one of them or another controller's."""
    node = nodes.get(paths.CONTROLLER_EPOCH)
    if node is None:
        hint = "start a broker: it creates the node"
        raise CorruptMetadataError(f"node {paths.CONTROLLER_EPOCH} is missing", hint=hint)
    stored = records.decode_controller_epoch(paths.CONTROLLER_EPOCH, node.value)
    if stored != epoch:
        raise CorruptMetadataError(
            f"node {paths.CONTROLLER_EPOCH} has epoch {stored}, not {epoch}",
            hint="another broker has become controller, or somebody edited the node",
        )
    image = Image(
        epoch,
        node.version,
        topics={},
        versions={path: n.version for path, n in nodes.items() if not _is_of_others(path)},
        # Where `/kdirect/changes` is lost: above every generation that there was before.
        changes=Changes(epoch << 32),
    )
    # Topics before their configs, states and deletions.
    order = (paths.CHANGES, paths.TOPICS)
    ranked = sorted(nodes, key=lambda p: (not p.startswith(order), len(p.split("/")), p))
    return absorb(image, {path: nodes[path] for path in ranked})


def _is_of_others(path: str) -> bool:
    """Is this a node that the controller never writes?"""
    return path.startswith(
        (paths.BROKER_IDS + "/", paths.CLUSTER_ID, paths.CONTROLLER, paths.PRODUCER_ID_BLOCK)
    )


def absorb(image: Image, nodes: Mapping[str, Node | None]) -> Image:
    """The image with nodes as they were read; None where there is none."""
    topics, versions = dict(image.topics), dict(image.versions)
    configs, damaged = dict(image.broker_configs), dict(image.damaged)
    others = dict(image.other_configs)
    changes = image.changes
    opened: dict[str, list[Partition]] = {}  # of topics whose states are among the nodes
    for path, node in nodes.items():
        if _is_of_others(path):
            continue
        if node is None:
            versions.pop(path, None)
        else:
            versions[path] = node.version
        damaged.pop(path, None)
        value = node.value if node is not None else None
        try:
            if path == paths.CHANGES and value is not None:
                changes = records.decode_changes(path, value)
            elif (tp := paths.partition_of_state(path)) is not None:
                if tp.topic not in opened and tp.topic in topics:
                    opened[tp.topic] = list(topics[tp.topic].partitions)
                _absorb_state(opened.get(tp.topic, []), tp, path, node)
            elif (name := paths.name_below(path, paths.TOPICS)) is not None:
                _absorb_topic(topics, opened.pop(name, None), name, path, value)
            elif (name := paths.name_below(path, paths.BROKER_CONFIGS)) is not None:
                configs[name] = records.decode_config(path, value or b"")
            elif (other := paths.other_of_config(path)) is not None:
                if value is None:
                    others.pop(other, None)
                else:
                    others[other] = records.decode_config(path, value)
            elif (name := paths.name_below(path, paths.TOPIC_CONFIGS)) in topics:
                assert name is not None
                config = records.decode_config(path, value or b"")
                topics[name] = topics[name]._replace(config=config)
            elif (name := paths.name_below(path, paths.DELETIONS)) in topics:
                assert name is not None
                topics[name] = topics[name]._replace(deleting=value is not None)
        except CorruptMetadataError as e:
            damaged[path] = e
    for name, partitions in opened.items():
        topics[name] = topics[name]._replace(partitions=tuple(partitions))
    return image._replace(
        topics=topics,
        versions=versions,
        broker_configs=configs,
        other_configs=others,
        damaged=damaged,
        changes=changes,
    )


def _absorb_topic(
    topics: dict[str, Topic],
    opened: list[Partition] | None,
    name: str,
    path: str,
    value: bytes | None,
) -> None:
    old = topics.get(name)
    if opened is not None and old is not None:
        old = topics[name] = old._replace(partitions=tuple(opened))
    if value is None:
        # Somebody deleted it by hand; a topic goes by a request only.  It is written again.
        return
    record = records.decode_topic(path, value)
    known = old.partitions if old is not None else ()
    partitions = []
    for number, replicas in enumerate(record.replicas):
        partition = known[number] if number < len(known) else Partition(replicas)
        adding, removing = record.adding.get(number, ()), record.removing.get(number, ())
        moved = partition._replace(replicas=replicas, adding=adding, removing=removing)
        partitions.append(moved)
    topic = old if old is not None else Topic(record, ())
    topics[name] = topic._replace(record=record, partitions=tuple(partitions))


def _absorb_state(
    partitions: list[Partition], tp: TopicPartition, path: str, node: Node | None
) -> None:
    if tp.partition >= len(partitions):
        return
    partition = partitions[tp.partition]
    known = partition.state
    try:
        stored = None if node is None else _decode_state(partition, tp, path, node)
    except CorruptMetadataError:
        if known is None:
            raise
        stored = None
    if stored is not None and (known is None or known.leader_epoch <= stored.state.leader_epoch):
        partition = partition._replace(
            state=stored.state,
            incarnations=tuple(sorted(stored.incarnations.items())),
            failed=tuple(sorted(stored.failed.items())),
        )
    elif known is not None:
        # Nobody but the controller writes this node, so somebody has deleted or damaged it by hand:
        # what is known is written again, in a new leader epoch.
        partition = partition._replace(state=known._replace(version=MISSING))
    partitions[tp.partition] = partition


def _decode_state(
    partition: Partition, tp: TopicPartition, path: str, node: Node
) -> records.StoredState:
    stored = records.decode_state(path, node.value, node.version)
    strangers = {*stored.state.in_sync, *stored.state.eligible} - set(partition.replicas)
    if strangers:
        raise CorruptMetadataError(
            f"node {path} is damaged: brokers {sorted(strangers)} are no replicas of {tp}",
            hint="restore the node from a backup of the metadata store",
        )
    return stored
