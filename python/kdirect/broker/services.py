"""What the broker's handlers work with, in place of the server that owns it.

Owns: nothing; it names what handlers may use, and so what they may not: connections, listeners,
timers, other handlers.  The server builds one `Services` and closes what is in it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from kdirect.broker.cluster_view import ClusterView
from kdirect.broker.config import BrokerConfig
from kdirect.broker.files import FileThreads
from kdirect.broker.flusher import Flusher
from kdirect.broker.listeners import Listeners
from kdirect.broker.offsets import OffsetStore
from kdirect.broker.topics import Registry
from kdirect.broker.waiters import Waiters
from kdirect.log.manager import LogManager
from kdirect.log.partition import Partition
from kdirect.model import TopicPartition
from kdirect.wire.environment import Environment


class Appender(Protocol):
    """Appends whole batches of Kafka clients; `Appends`, or, where RDMA producers may have the
    head, `ProduceAccess`."""

    def append_nowait(self, partition: Partition, data: Any, at_ms: int, /) -> Any:
        """The kernel's answer, or None, and nothing has changed: then `append`.  Raises as
        `Partition.append_nowait`."""

    def append(self, partition: Partition, data: Any, at_ms: int, /) -> asyncio.Future[Any]:
        """The same after whatever comes first: room, or RDMA producers.  Its place among the
        appends to the partition is that of this call.  The future raises as `Partition.append`."""


@dataclass(slots=True)
class Counters:
    """What connections and handlers count; `BrokerServer.statistics` gives the counters their
    names in `kdirect.metrics`.  Changed on the event loop, and by the threads of cold reads."""

    requests: Counter[str] = field(default_factory=Counter)
    connections_opened: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    appends: int = 0
    append_bytes: int = 0
    append_errors: int = 0
    fetch_waits: int = 0
    cold_fetches: int = 0


@dataclass(frozen=True, slots=True)
class Services:
    """See the module.  `watch(partition)`: have the waiters told of the next commit that RDMA
    producers make there; it does nothing where RDMA is off."""

    config: BrokerConfig
    environment: Environment
    counters: Counters
    listeners: Listeners
    cluster: ClusterView
    logs: LogManager
    topics: Registry
    files: FileThreads
    flusher: Flusher
    waiters: Waiters
    offsets: OffsetStore
    appender: Appender
    watch: Callable[[TopicPartition], None]
