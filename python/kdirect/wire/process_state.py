"""What one process knows of a cluster, and the connections that it holds open: the state of a
`kdirect.wire.cluster.Cluster` in one process, which is the only one to use it."""

from __future__ import annotations

import threading

from kdirect.wire.connection import Connection
from kdirect.wire.metadata import Node, TopicMetadata


class ProcessState:
    """See the module; `lock` guards what is changed together."""

    def __init__(self, lock: threading.RLock) -> None:
        self.lock = lock
        self.connecting: dict[tuple[str, int, str], threading.Lock] = {}
        self.shared: dict[tuple[str, int, str], Connection] = {}
        self.idle: dict[tuple[str, int], list[Connection]] = {}
        self.control: Connection | None = None
        self.silent: set[tuple[str, int]] = set()  # did not answer when they were last asked
        self.nodes: dict[int, Node] = {}
        self.several = False  # there was more than one node at a time
        self.controller = -1
        self.cluster_id: str | None = None
        self.topics: dict[str, tuple[float, TopicMetadata]] = {}
        self.forgotten: dict[str, TopicMetadata] = {}  # what was known of topics to be asked for
        self.coordinators: dict[tuple[int, str], Node] = {}  # by kind and key
        self.refreshes = 0
        self.connects = 0
        self.reached: set[str] = set()  # channels over which there was a connection
