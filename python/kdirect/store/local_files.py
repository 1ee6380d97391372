"""What the files of a single broker say of the tree, and the tree of the files.

Law: pure, but for what reads the files.  The form of the first two is in `own_files`, and such a
kdirect as knows no store opens what is written here.  ConfigError says that they cannot keep a
node.

=====================================  ============================================================
node                                   file in the first log directory
=====================================  ============================================================
``/brokers/topics/T``                  ``topics.json``: the topic's id and number of partitions
``/brokers/topics/T/partitions/...``   the same; led by this broker, at the epoch of its log
``/config/topics/T``                   the same: configs
``/admin/delete_topics/T``             the same: `deleting`
``/latest_producer_id_block``          ``producer_ids``: the first id that was never in a block
``/cluster/id``                        ``meta.properties``, in each log directory
=====================================  ============================================================

The rows of ``topics.json`` imply nodes.  A node that is not what its row implies is kept under
``nodes``, as it is; one that its row implies and that is not there is named under ``absent``.  A
kdirect that does not know these two keys ignores them, and drops them when it writes the file: what
the rows imply is then what there is.  Without such nodes the file is, byte for byte, the one that
it would write.

All other nodes have no file.
"""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from kdirect.errors import ConfigError, CorruptLogError, LogError
from kdirect.model import check_topic_name
from kdirect.store import own_files
from kdirect.store.contract import check_path
from kdirect.store.own_files import (
    IDS_FILE,
    PRODUCER_ID_BLOCK,
    PRODUCER_ID_LIMIT,
    TOPICS_FILE,
    Row,
    new_row,
    read_file,
)

META_FILE = "meta.properties"

TOPICS = "/brokers/topics"
CONFIGS = "/config/topics"
DELETIONS = "/admin/delete_topics"
BLOCK = "/latest_producer_id_block"
CLUSTER_ID = "/cluster/id"
# Of them the files say nothing; they are there so that the nodes above can be.
PARENTS = ("/cluster", "/brokers", TOPICS, "/config", CONFIGS, "/admin", DELETIONS)

MOST_PARTITIONS = 1_000_000  # so that a damaged number does not fill the memory

EpochOf = Callable[[str, int], int]


@dataclass(slots=True)
class TopicNodes:
    """What is kept of one topic: its row (None: there is no such topic), nodes that the row does
    not imply, and nodes that it implies and that are not there."""

    row: Row | None = None
    nodes: dict[str, bytes] = field(default_factory=dict)
    absent: tuple[str, ...] = ()


# -- values: Kafka's JSON, as `kdirect.cluster.records` has it -------------------------------------


def _write_object(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()


def _read_object(value: bytes) -> dict[str, Any]:
    try:
        found = json.loads(value)
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"it is not JSON: {e}") from e
    if not isinstance(found, dict):
        raise ConfigError("it is no JSON object")
    return found


def topic_value(topic_id: str, partitions: int, node_id: int) -> bytes:
    assignment = {str(number): [node_id] for number in range(partitions)}
    return _write_object(
        {
            "version": 3,
            "partitions": assignment,
            "adding_replicas": {},
            "removing_replicas": {},
            "topic_id": topic_id,
        }
    )


@cache  # the states of most partitions are equal
def state_value(node_id: int, leader_epoch: int) -> bytes:
    return _write_object(
        {
            "controller_epoch": 0,
            "leader": node_id,
            "version": 1,
            "leader_epoch": leader_epoch,
            "isr": [node_id],
        }
    )


def config_value(config: Mapping[str, str]) -> bytes:
    return _write_object({"version": 1, "config": dict(config)})


def block_value(node_id: int, next_id: int) -> bytes:
    """A block that ended before `next_id`."""
    return _write_object(
        {
            "version": 1,
            "broker": node_id,
            "block_start": str(max(0, next_id - PRODUCER_ID_BLOCK)),
            "block_end": str(next_id - 1),
        }
    )


def cluster_value(cluster_id: str) -> bytes:
    return _write_object({"version": "1", "id": cluster_id})


def _read_topic(value: bytes, node_id: int) -> tuple[str, int]:
    """The id and the number of partitions; ConfigError unless this broker has all replicas."""
    found = _read_object(value)
    topic_id, partitions = found.get("topic_id"), found.get("partitions")
    if not isinstance(topic_id, str) or not _is_id(topic_id):
        raise ConfigError("it has no id of a topic")
    if not isinstance(partitions, dict) or not 1 <= len(partitions) <= MOST_PARTITIONS:
        raise ConfigError(f"it has not 1 to {MOST_PARTITIONS} partitions")
    for number in range(len(partitions)):
        replicas = partitions.get(str(number))
        if replicas != [node_id]:
            raise ConfigError(
                f"the replicas of partition {number} are {replicas}, and the only broker is"
                f" {node_id}"
            )
    if found.get("adding_replicas") or found.get("removing_replicas"):
        raise ConfigError("replicas move, and there is one broker")
    return topic_id, len(partitions)


def _is_id(text: str) -> bool:
    try:
        data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except ValueError:
        return False
    return len(data) == 16 and base64.urlsafe_b64encode(data).decode().rstrip("=") == text


def _read_config(value: bytes) -> dict[str, str] | None:
    """The properties; None for a value that the rows have no room for."""
    try:
        config = _read_object(value).get("config")
    except ConfigError:
        return None
    if not isinstance(config, dict) or not all(isinstance(text, str) for text in config.values()):
        return None
    return config


def read_block(value: bytes) -> int:
    """The first producer id after a block; ConfigError."""
    last = _read_object(value).get("block_end")
    try:
        next_id = int(last) + 1 if isinstance(last, str) else -1
    except ValueError:
        next_id = -1
    if not 0 <= next_id < PRODUCER_ID_LIMIT:
        raise ConfigError(f"block_end {last!r} is not the last id of a block")
    return next_id


def read_cluster_id(value: bytes) -> str:
    """ConfigError for what has no id that a properties file could hold."""
    cluster_id = _read_object(value).get("id")
    if not isinstance(cluster_id, str) or not cluster_id.isascii() or not cluster_id.isprintable():
        raise ConfigError("it has no id of a cluster")
    if cluster_id != cluster_id.strip() or not cluster_id:
        raise ConfigError("the id of the cluster is empty, or has spaces around it")
    return cluster_id


# -- topics ----------------------------------------------------------------------------------------


def topic_of(path: str) -> str | None:
    """The topic whose row keeps the node at `path`; None for another node."""
    for root in (TOPICS, CONFIGS, DELETIONS):
        if path.startswith(root + "/"):
            return path[len(root) + 1 :].partition("/")[0]
    return None


def implied(name: str, row: Row | None, node_id: int, epoch_of: EpochOf) -> Iterator[Any]:
    """Paths and values of the nodes that a topic's row stands for, parents first."""
    if row is None:
        return
    yield f"{TOPICS}/{name}", topic_value(row["id"], row["partitions"], node_id)
    yield f"{TOPICS}/{name}/partitions", b""
    for number in range(row["partitions"]):
        yield f"{TOPICS}/{name}/partitions/{number}", b""
        state = state_value(node_id, epoch_of(name, number))
        yield f"{TOPICS}/{name}/partitions/{number}/state", state
    yield f"{CONFIGS}/{name}", config_value(row["configs"])
    if row.get("deleting"):
        yield f"{DELETIONS}/{name}", b""


def kept_of_topic(
    name: str,
    there: Mapping[str, bytes],
    node_id: int,
    epoch_of: EpochOf,
    plain_config: Callable[[str, str], bool],
) -> TopicNodes:
    """What the file keeps of a topic whose nodes are `there`; ConfigError.  `plain_config`: may a
    config of this name and value be in a row, so that an older kdirect takes the file?"""
    row: Row | None = None
    value = there.get(f"{TOPICS}/{name}")
    if value is not None:
        try:
            check_topic_name(name)
            topic_id, partitions = _read_topic(value, node_id)
        except ValueError as e:
            raise ConfigError(f"{TOPICS}/{name}: {e}") from e
        config = _read_config(there.get(f"{CONFIGS}/{name}", b"")) or {}
        plain = {key: text for key, text in config.items() if plain_config(key, text)}
        row = new_row(topic_id, partitions, plain, deleting=f"{DELETIONS}/{name}" in there)
    stands = dict(implied(name, row, node_id, epoch_of))
    nodes = {path: value for path, value in there.items() if stands.get(path) != value}
    return TopicNodes(row, nodes, tuple(path for path in stands if path not in there))


def topics_text(topics: Mapping[str, TopicNodes]) -> bytes:
    """The file."""
    nodes: dict[str, str] = {}
    for kept in topics.values():
        for path, value in kept.nodes.items():
            nodes[path] = value.decode(errors="surrogateescape")
    absent = [path for kept in topics.values() for path in kept.absent]
    more: dict[str, Any] = {"nodes": nodes} if nodes else {}
    if absent:
        more["absent"] = absent
    rows = {name: kept.row for name, kept in topics.items() if kept.row is not None}
    return own_files.topics_text(rows, more)


def _topics_of(rows: Mapping[str, Row], document: Mapping[str, Any]) -> dict[str, TopicNodes]:
    """The reverse; ValueError, TypeError or AttributeError for a file that is damaged."""
    for name, row in rows.items():
        if not _is_id(row["id"]):
            raise ValueError(f"{row['id']!r} is no id of topic {name}")
        if row["partitions"] > MOST_PARTITIONS:
            raise ValueError(f"topic {name} has {row['partitions']} partitions")
    topics = {name: TopicNodes(row) for name, row in rows.items()}
    for path, value in document.get("nodes", {}).items():
        _of(topics, path).nodes[path] = value.encode(errors="surrogateescape")
    for path in document.get("absent", ()):
        _of(topics, path).absent += (path,)
    return topics


def _of(topics: dict[str, TopicNodes], path: str) -> TopicNodes:
    name = topic_of(check_path(path))
    if name is None:
        raise ValueError(f"{path} belongs to no topic")
    return topics.setdefault(name, TopicNodes())


# -- reading ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class Files:
    """What was found.  `next_id`: of producers.  None, and no topics: there is no such file."""

    topics: dict[str, TopicNodes]
    next_id: int | None
    cluster_id: str | None


def read_files(log_dirs: list[Path]) -> Files:
    """LogError for a file that cannot be read, CorruptLogError for one that makes no sense."""
    path = log_dirs[0] / TOPICS_FILE
    found = own_files.read_document(path)
    try:
        topics = {} if found is None else _topics_of(*found)
    except (ValueError, TypeError, AttributeError) as e:
        raise own_files.damaged_topics(path, e) from e
    next_id = own_files.read_next_id(log_dirs[0] / IDS_FILE)
    ids = [read_meta(directory).get("cluster.id", "") for directory in log_dirs]
    if len(set(filter(None, ids))) > 1:
        raise LogError(
            f"the log directories belong to the clusters {', '.join(sorted(set(ids)))}",
            hint="use log.dirs of one cluster",
        )
    return Files(topics, next_id, next(filter(None, ids), None))


def read_meta(directory: Path) -> dict[str, str]:
    """``meta.properties``; empty without the file."""
    path = directory / META_FILE
    text = read_file(path)
    properties: dict[str, str] = {}
    try:
        lines = [line.strip() for line in (text or b"").decode().splitlines()]
        for line in lines:
            if line and not line.startswith(("#", "!")):
                name, sign, value = line.partition("=")
                if not sign:
                    raise ValueError(f"line {line!r} is no property")
                properties[name.strip()] = value.strip()
    except ValueError as e:
        raise CorruptLogError(
            f"{path} is damaged: {e}", hint="restore it, or remove it to start with defaults"
        ) from e
    return properties


def meta_text(properties: Mapping[str, str], cluster_id: str, node_id: int) -> bytes:
    """``meta.properties`` of a cluster; what is there already stays."""
    own = {
        "version": "1",
        "node.id": str(node_id),
        "directory.id": _new_id(),
        **properties,
        "cluster.id": cluster_id,
    }
    lines = ["#", *(f"{name}={value}" for name, value in sorted(own.items()))]
    return ("\n".join(lines) + "\n").encode()


def _new_id() -> str:
    while True:  # a text that begins with a dash looks like an option to Kafka's tools
        text = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        if not text.startswith("-"):
            return text
