"""Where the nodes of a cluster are in the metadata store: Kafka's paths (`kafka.zk.ZkData`), and
one of our own below ``/kdirect``.

=====================================================  ===========================================
path                                                   what it is; who writes it
=====================================================  ===========================================
``/cluster/id``                                        the cluster's id; the first broker, once
``/brokers/ids/N``                                     a broker that lives, ephemeral; broker N
``/controller``                                        who is controller, ephemeral; that broker
``/controller_epoch``                                  counts controllers; each new one
``/brokers/topics/T``                                  replicas of the partitions; the controller
``/brokers/topics/T/partitions/P/state``               leader, in-sync replicas; the controller
``/config/topics/T``, ``/config/brokers/N``            configs; the controller
``/config/groups/G``, ``/config/client-metrics/M``     the same, with percent-encoded names
``/admin/delete_topics/T``                             T is being deleted; the controller
``/admin/reassign_partitions``                         Kafka's old tools; the controller takes it
``/latest_producer_id_block``                          the block of ids given last; any broker
``/kdirect/changes``                                   what has changed of late; the controller
``/kdirect/remote_owner``                              in which incarnations the cluster has owned
                                                       its objects in remote storage; any broker
=====================================================  ===========================================
"""

from __future__ import annotations

import re
from urllib.parse import quote, unquote

from kdirect.model import TopicPartition

CLUSTER_ID = "/cluster/id"
CONTROLLER = "/controller"
CONTROLLER_EPOCH = "/controller_epoch"
BROKER_IDS = "/brokers/ids"
TOPICS = "/brokers/topics"
TOPIC_CONFIGS = "/config/topics"
BROKER_CONFIGS = "/config/brokers"
OTHER_CONFIGS = {"group": "/config/groups", "client-metrics": "/config/client-metrics"}
DELETIONS = "/admin/delete_topics"
REASSIGNMENTS = "/admin/reassign_partitions"
PRODUCER_ID_BLOCK = "/latest_producer_id_block"
CHANGES = "/kdirect/changes"
REMOTE_OWNER = "/kdirect/remote_owner"
ALL_BROKERS = "<default>"  # below BROKER_CONFIGS: what holds for all brokers

# Nodes that every broker makes sure of when it starts, parents first, and what is in them at first.
# `/cluster/id` is another: whoever creates it draws the id.
PERSISTENT: tuple[tuple[str, bytes], ...] = (
    ("/cluster", b""),
    ("/brokers", b""),
    (BROKER_IDS, b""),
    (TOPICS, b""),
    ("/config", b""),
    (TOPIC_CONFIGS, b""),
    (BROKER_CONFIGS, b""),
    *((path, b"") for path in OTHER_CONFIGS.values()),
    ("/admin", b""),
    (DELETIONS, b""),
    (CONTROLLER_EPOCH, b"0"),
    ("/kdirect", b""),
    (CHANGES, b'{"version":1,"generation":0,"changes":[]}'),
)

_STATE = re.compile(r"/brokers/topics/([^/]+)/partitions/(0|[1-9][0-9]{0,9})/state")


def broker(number: int) -> str:
    return f"{BROKER_IDS}/{number}"


def topic(name: str) -> str:
    return f"{TOPICS}/{name}"


def partitions(name: str) -> str:
    return f"{topic(name)}/partitions"


def partition(tp: TopicPartition) -> str:
    return f"{partitions(tp.topic)}/{tp.partition}"


def state(tp: TopicPartition) -> str:
    return f"{partition(tp)}/state"


def topic_config(name: str) -> str:
    return f"{TOPIC_CONFIGS}/{name}"


def broker_config(name: str) -> str:
    """`name`: a broker's number, or `ALL_BROKERS`."""
    return f"{BROKER_CONFIGS}/{name}"


def other_config(of: str, name: str) -> str:
    """`of`: a key of `OTHER_CONFIGS`; `name`: any text, which a path may not hold as it is."""
    encoded = quote(name, safe="")
    return f"{OTHER_CONFIGS[of]}/{encoded.replace('.', '%2E') if name in ('.', '..') else encoded}"


def other_of_config(path: str) -> tuple[str, str] | None:
    """(`of`, name) of `other_config`; None for another path."""
    for of, parent in OTHER_CONFIGS.items():
        if (name := name_below(path, parent)) is not None:
            return of, unquote(name)
    return None


def deletion(name: str) -> str:
    return f"{DELETIONS}/{name}"


def partition_of_state(path: str) -> TopicPartition | None:
    """The partition whose state is at `path`."""
    match = _STATE.fullmatch(path)
    return TopicPartition(match[1], int(match[2])) if match is not None else None


def name_below(path: str, parent: str) -> str | None:
    """``t`` for ``/brokers/topics/t`` below ``/brokers/topics``; None for what lies elsewhere or
    deeper."""
    name = path.removeprefix(parent + "/")
    return name if path != name and "/" not in name else None
