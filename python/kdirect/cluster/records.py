"""The values of the nodes of a cluster, as Kafka 2.2 to 3.9 writes them (`kafka.zk.ZkData`), and
those of ``/kdirect/changes``.

Each kind of node is a tuple with `encode_...` and `decode_...`.  Decoding takes the node's path and
its value, which may be anything: `CorruptMetadataError` names the path, what is wrong, and the
remedy.  Fields that this build does not know are left alone, so that a newer Kafka's nodes are
read; older versions of a record are read where Kafka reads them.

Kafka ignores fields that it does not know.  Four are ours:

- of a partition's state: ``eligible`` (KIP-966's eligible leader replicas) and ``incarnations``
  (which process of each broker it was that had every committed record);
- of a broker: ``intact_since`` (the incarnation from which on its logs have all that it confirmed:
  since then it did not lose power) and ``remote_storage`` (where its tiered topics are).
"""

from __future__ import annotations

import base64
import binascii
import uuid
from collections.abc import Mapping
from typing import Any, NamedTuple

from kdirect.cluster import fields
from kdirect.cluster.fields import MOST_INT64, Fields, read_object, write_object
from kdirect.cluster.partition_state import NO_INCARNATION, NO_LEADER, PartitionState
from kdirect.model import TopicPartition

# What `/kdirect/changes` keeps: it is written with every commit.
MOST_CHANGES = 64
MOST_CHANGE_BYTES = 65_536

_RESTORE = "restore the node from a backup of the metadata store"


# -- brokers ---------------------------------------------------------------------------------------


class Endpoint(NamedTuple):
    """Where a broker listens: ``PLAINTEXT://host:9092`` with listener name ``PLAINTEXT``."""

    listener: str
    host: str
    port: int


OWN = 0  # the incarnation of the node that says so


class BrokerRegistration(NamedTuple):
    """``/brokers/ids/N``.  `protocols`: listener name -> security protocol.

    `intact_since`: the incarnation from which on nothing is lost that this broker's processes have
    confirmed.  None: this process may lack what those before it confirmed, as after a power loss;
    then it is its own incarnation, which is not known before the node is created.

    `remote_storage`: the URI of its object store, None where it has no tiered storage.

    `lost`: replicas of which more is lost than that, as when one of several log directories was
    replaced: each has what was confirmed from its own incarnation on, `OWN` for the node's.
    """

    endpoints: tuple[Endpoint, ...]
    protocols: Mapping[str, str]
    rack: str | None = None
    timestamp_ms: int = 0
    intact_since: int | None = None
    lost: Mapping[TopicPartition, int] = {}
    remote_storage: str | None = None

    def lost_since(self, incarnation: int) -> dict[TopicPartition, int]:
        """`lost`, for the node that was created as this incarnation."""
        return {tp: incarnation if n == OWN else n for tp, n in self.lost.items()}


def encode_broker(registration: BrokerRegistration) -> bytes:
    """Version 5.  `host` and `port` are those of the first PLAINTEXT endpoint, for old clients."""
    plain = next(
        (e for e in registration.endpoints if registration.protocols[e.listener] == "PLAINTEXT"),
        None,
    )
    record: dict[str, Any] = {
        "version": 5,
        "host": plain.host if plain is not None else None,
        "port": plain.port if plain is not None else -1,
        "jmx_port": -1,
        "timestamp": str(registration.timestamp_ms),
        "endpoints": [_endpoint_text(e) for e in registration.endpoints],
        "listener_security_protocol_map": dict(registration.protocols),
        "features": {},
    }
    if registration.rack is not None:
        record["rack"] = registration.rack
    if registration.intact_since is not None:
        record["intact_since"] = registration.intact_since
    if registration.remote_storage is not None:
        record["remote_storage"] = registration.remote_storage
    if registration.lost:
        lost: dict[str, dict[str, int]] = {}
        for tp, since in registration.lost.items():
            lost.setdefault(tp.topic, {})[str(tp.partition)] = since
        record["lost"] = lost
    return write_object(record)


def decode_broker(path: str, value: bytes) -> BrokerRegistration:
    """Versions 2 (endpoints without names of listeners) to 5 and newer."""
    remedy = "restart that broker: it writes the node when it starts"
    found = read_object(path, value, remedy)
    version = found.integer("version", least=1)
    endpoints: tuple[Endpoint, ...]
    if version == 1:
        endpoints = (Endpoint("PLAINTEXT", found.text("host"), found.integer("port", most=65535)),)
    else:
        endpoints = tuple(_endpoint(found, text) for text in found.texts("endpoints"))
    if not endpoints:
        found.wrong("it has no endpoints")
    names = [endpoint.listener for endpoint in endpoints]
    if len(set(names)) != len(names):
        found.wrong("two endpoints have the same listener name")
    if version >= 4:
        protocols = found.text_map("listener_security_protocol_map")
    else:
        protocols = {name: name for name in names}
    unknown = [name for name in names if name not in protocols]
    if unknown:
        found.wrong(f"listener {unknown[0]!r} has no security protocol")
    return BrokerRegistration(
        endpoints,
        protocols,
        found.text("rack") if found.has("rack") else None,
        found.digits("timestamp", least=-1) if found.has("timestamp") else 0,
        found.integer("intact_since", most=MOST_INT64) if found.has("intact_since") else None,
        _lost(found.inner("lost")) if found.has("lost") else {},
        found.text("remote_storage") if found.has("remote_storage") else None,
    )


def _lost(found: Fields) -> dict[TopicPartition, int]:
    return {
        TopicPartition(topic, partition): since
        for topic in found.names()
        for partition, since in found.number_map(topic).items()
    }


def _endpoint_text(endpoint: Endpoint) -> str:
    host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
    return f"{endpoint.listener}://{host}:{endpoint.port}"


def _endpoint(found: Fields, text: str) -> Endpoint:
    listener, separator, address = text.partition("://")
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    if not (listener and separator and colon) or not (port.isascii() and port.isdigit()):
        found.wrong(f"endpoint {text[:80]!r} is not LISTENER://HOST:PORT")
    if len(port) > 5 or int(port) > 65535:
        found.wrong(f"endpoint {text[:80]!r} has an impossible port")
    return Endpoint(listener, host, int(port))


# -- the cluster and its controller ----------------------------------------------------------------


def encode_cluster_id(cluster_id: str) -> bytes:
    return write_object({"version": "1", "id": cluster_id})


def decode_cluster_id(path: str, value: bytes) -> str:
    remedy = "write the id of meta.properties of any of its brokers back into the node"
    found = read_object(path, value, remedy)
    cluster_id = found.text("id")
    if not cluster_id:
        found.wrong("the id is empty")
    return cluster_id


def encode_controller(broker: int, timestamp_ms: int) -> bytes:
    """``/controller``, version 1 (Kafka up to 3.3; later ones read it)."""
    return write_object({"version": 1, "brokerid": broker, "timestamp": str(timestamp_ms)})


def decode_controller(path: str, value: bytes) -> int:
    """The broker that is controller."""
    remedy = "delete the node: the brokers elect another controller"
    return read_object(path, value, remedy).integer("brokerid")


def encode_controller_epoch(epoch: int) -> bytes:
    return str(epoch).encode()


def decode_controller_epoch(path: str, value: bytes) -> int:
    remedy = "write a decimal number into it that is above every controller_epoch of the states"
    return fields.read_number(path, value, remedy)


# -- topics ----------------------------------------------------------------------------------------


class TopicAssignment(NamedTuple):
    """``/brokers/topics/T``: the brokers of each partition, by partition.  `replicas` are all that
    there are; during a reassignment `adding` and `removing` are those that come and go."""

    topic_id: uuid.UUID | None  # of topics that Kafka before 2.8 created: none
    replicas: tuple[tuple[int, ...], ...]
    adding: Mapping[int, tuple[int, ...]] = {}
    removing: Mapping[int, tuple[int, ...]] = {}


def encode_topic(topic: TopicAssignment) -> bytes:
    """Version 3, or 2 for a topic without an id."""
    record: dict[str, Any] = {
        "version": 2 if topic.topic_id is None else 3,
        "partitions": {str(p): list(brokers) for p, brokers in enumerate(topic.replicas)},
        "adding_replicas": {str(p): list(b) for p, b in sorted(topic.adding.items()) if b},
        "removing_replicas": {str(p): list(b) for p, b in sorted(topic.removing.items()) if b},
    }
    if topic.topic_id is not None:
        record["topic_id"] = _id_text(topic.topic_id)
    return write_object(record)


def decode_topic(path: str, value: bytes) -> TopicAssignment:
    """Versions 1 to 3 and newer.  Partitions are numbered from 0 without gaps."""
    found = read_object(path, value, f"{_RESTORE}, or delete the topic")
    found.integer("version", least=1)
    by_number = found.lists_by_number("partitions")
    if sorted(by_number) != list(range(len(by_number))) or not by_number:
        found.wrong("its partitions are not numbered from 0 without gaps")
    moving: list[dict[int, tuple[int, ...]]] = []
    for field in ("adding_replicas", "removing_replicas"):
        rows = found.lists_by_number(field) if found.has(field) else {}
        for number, brokers in rows.items():
            if not set(brokers) <= set(by_number.get(number, ())):
                found.wrong(f"{field} of partition {number} are not among its replicas")
        moving.append({number: brokers for number, brokers in rows.items() if brokers})
    for number, brokers in by_number.items():
        if not brokers:
            found.wrong(f"partition {number} has no replicas")
        if not set(brokers) - set(moving[1].get(number, ())):
            found.wrong(f"all replicas of partition {number} are being removed")
    return TopicAssignment(
        _topic_id(found) if found.has("topic_id") else None,
        tuple(by_number[number] for number in range(len(by_number))),
        *moving,
    )


def _id_text(topic_id: uuid.UUID) -> str:
    return base64.urlsafe_b64encode(topic_id.bytes).decode().rstrip("=")


def _topic_id(found: Fields) -> uuid.UUID:
    text = found.text("topic_id")
    try:
        data = base64.b64decode(text.encode("ascii") + b"==", altchars=b"-_", validate=True)
    except (ValueError, binascii.Error):
        data = b""
    if len(data) != 16 or _id_text(uuid.UUID(bytes=data)) != text:
        found.wrong(f"topic_id {text[:80]!r} is no id")
    return uuid.UUID(bytes=data)


# -- partitions ------------------------------------------------------------------------------------


class StoredState(NamedTuple):
    """``.../partitions/P/state``.  `incarnations`: broker -> the incarnation of the process that
    leads, was in sync or became eligible; brokers of whom it is not known are left out.  `failed`:
    broker -> the incarnation of the process whose replica cannot be used."""

    state: PartitionState
    controller_epoch: int
    incarnations: Mapping[int, int] = {}
    failed: Mapping[int, int] = {}


def encode_state(stored: StoredState) -> bytes:
    state = stored.state
    record: dict[str, Any] = {
        "controller_epoch": stored.controller_epoch,
        "leader": state.leader,
        "version": 1,
        "leader_epoch": state.leader_epoch,
        "isr": list(state.in_sync),
    }
    if state.eligible:
        record["eligible"] = list(state.eligible)
    if stored.incarnations:
        record["incarnations"] = {str(b): n for b, n in sorted(stored.incarnations.items())}
    if stored.failed:
        record["failed"] = {str(b): n for b, n in sorted(stored.failed.items())}
    return write_object(record)


def decode_state(path: str, value: bytes, node_version: int) -> StoredState:
    """`node_version`: of the node, which is the partition's epoch."""
    remedy = f"{_RESTORE}, with a leader_epoch above any that the partition ever had"
    found = read_object(path, value, remedy)
    leader = found.integer("leader", least=NO_LEADER)
    in_sync = found.integers("isr")
    eligible = found.integers("eligible") if found.has("eligible") else ()
    if not in_sync:
        found.wrong("no replica is in sync")
    if leader != NO_LEADER and leader not in in_sync:
        found.wrong(f"leader {leader} is not in sync")
    if set(eligible) & set(in_sync):
        found.wrong("a replica is both in sync and eligible")
    incarnations = found.number_map("incarnations") if found.has("incarnations") else {}
    state = PartitionState(
        leader,
        found.integer("leader_epoch"),
        in_sync,
        node_version,
        eligible,
        incarnations.get(leader, NO_INCARNATION),
    )
    failed = found.number_map("failed") if found.has("failed") else {}
    return StoredState(state, found.integer("controller_epoch"), incarnations, failed)


# -- configs, reassignments, producer ids ----------------------------------------------------------


def encode_config(config: Mapping[str, str]) -> bytes:
    return write_object({"version": 1, "config": dict(config)})


def decode_config(path: str, value: bytes) -> dict[str, str]:
    """Of a topic or broker; a node without a value has no properties."""
    if not value:
        return {}
    remedy = "set the properties again, or delete the node to go back to the defaults"
    return read_object(path, value, remedy).text_map("config")


def decode_reassignments(path: str, value: bytes) -> dict[TopicPartition, tuple[int, ...]]:
    """``/admin/reassign_partitions``: the wanted replicas of partitions."""
    remedy = "delete the node, and ask for the reassignment again"
    found = read_object(path, value, remedy)
    wanted: dict[TopicPartition, tuple[int, ...]] = {}
    for row in found.objects("partitions"):
        tp = TopicPartition(row.text("topic"), row.integer("partition"))
        if tp in wanted:
            found.wrong(f"partition {tp} is in it twice")
        wanted[tp] = row.integers("replicas")
    return wanted


class ProducerIdBlock(NamedTuple):
    """``/latest_producer_id_block``: `broker` took the ids of `first` to `last`, both included."""

    broker: int
    first: int
    last: int


def encode_producer_ids(block: ProducerIdBlock) -> bytes:
    return write_object(
        {
            "version": 1,
            "broker": block.broker,
            "block_start": str(block.first),
            "block_end": str(block.last),
        }
    )


def decode_producer_ids(path: str, value: bytes) -> ProducerIdBlock:
    remedy = "write a block into it that is above every producer id of the cluster's logs"
    found = read_object(path, value, remedy)
    first, last = found.digits("block_start"), found.digits("block_end", least=-1)
    if last < first - 1:
        found.wrong(f"the block ends at {last}, before its start at {first}")
    return ProducerIdBlock(found.integer("broker"), first, last)


# -- changes ---------------------------------------------------------------------------------------


class Change(NamedTuple):
    """What one commit of a controller has changed: nodes that came, changed or went."""

    generation: int
    paths: tuple[str, ...]


class Changes(NamedTuple):
    """``/kdirect/changes``: the generation of the last commit, and what the last commits changed,
    the oldest first, without gaps up to `generation`.  A broker that has seen generation g reads
    what the changes above g name; if they do not begin at g + 1 or below, it reads everything."""

    generation: int = 0
    kept: tuple[Change, ...] = ()

    def since(self, seen: int) -> tuple[str, ...] | None:
        """What has changed since generation `seen`, each path once; None: read everything."""
        if seen == self.generation:
            return ()
        first = self.kept[0].generation if self.kept else self.generation + 1
        if seen > self.generation or seen + 1 < first:
            return None
        changed = (p for change in self.kept if change.generation > seen for p in change.paths)
        return tuple(dict.fromkeys(changed))


def with_change(changes: Changes, changed: tuple[str, ...]) -> Changes:
    """One generation later.  The oldest changes go, so that the node stays small; a change that is
    too large by itself is not named, and everybody reads everything."""
    generation = changes.generation + 1
    kept = (*changes.kept, Change(generation, changed))[-MOST_CHANGES:]
    size = 0
    for place in range(len(kept) - 1, -1, -1):
        size += 24 + sum(len(path.encode()) + 3 for path in kept[place].paths)
        if size > MOST_CHANGE_BYTES:
            return Changes(generation, kept[place + 1 :])
    return Changes(generation, kept)


def encode_changes(changes: Changes) -> bytes:
    rows = [[change.generation, list(change.paths)] for change in changes.kept]
    return write_object({"version": 1, "generation": changes.generation, "changes": rows})


def decode_changes(path: str, value: bytes) -> Changes:
    remedy = "delete the node: the controller writes it again, and the brokers read everything"
    found = read_object(path, value, remedy)
    generation = found.integer("generation", most=MOST_INT64)
    rows = found.raw("changes")
    kept: list[Change] = []
    for row in rows if isinstance(rows, list) else found.wrong("it has no list of changes"):
        if not isinstance(row, list) or len(row) != 2:
            found.wrong("a change is not a pair of a generation and paths")
        inner = Fields(path, remedy, {"generation": row[0], "paths": row[1]}, "changes[].")
        kept.append(Change(inner.integer("generation", most=MOST_INT64), inner.texts("paths")))
    numbers = [change.generation for change in kept]
    if numbers != list(range(generation - len(kept) + 1, generation + 1)):
        found.wrong(f"its changes do not end at generation {generation} without gaps")
    return Changes(generation, tuple(kept))
