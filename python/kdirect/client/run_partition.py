"""The partition of a record that names none.

Owns: the run of records without a key on one partition of each topic, and how a producer moves from
one to the next.  What may not enter: records, and how they are sent.

A record with a key goes where its key says (`kdirect.client.partitioner`).  Records without one go
where RDMA access can be had: a producer keeps to one partition for a while, gives it back, and
takes the next that is free.
"""

from __future__ import annotations

import logging
import random
import weakref
from collections.abc import Callable

from kdirect.client.partitioner import Keys, murmur2
from kdirect.client.produce_driver import ProduceDriver
from kdirect.client.topics import Topics
from kdirect.errors import AccessDeniedError, KdirectError
from kdirect.model import TopicPartition
from kdirect.wire.environment import Environment

log = logging.getLogger("kdirect.client")

# So many bytes without a key stay with one partition: access to another costs two requests.
RUN_BYTES = 8 << 20
LEAST_MOVE_MS = 50  # for access to another partition, when max.block.ms is shorter
RECORD_OVERHEAD = 64  # of a record in addition to key and value, about


class _Run:
    """Records without a key that stay together."""

    __slots__ = ("partition", "used_bytes")

    def __init__(self, partition: int) -> None:
        self.partition = partition
        self.used_bytes = RUN_BYTES  # so the first record looks for a partition that is free


class RunPartitions:
    """See the module.  One thread at a time: the producer's lock.

    `send_gathered`: sends what is gathered for a partition, for which there is room at once.
    `given_back`: called after a partition was given back, or will be once all is answered."""

    def __init__(
        self,
        environment: Environment,
        driver: ProduceDriver,
        topics: Topics,
        keys: Keys,
        block_ms: int,
        send_gathered: Callable[[TopicPartition], None],
        given_back: Callable[[], None],
    ) -> None:
        self._monotonic = environment.monotonic
        self._driver = driver
        self._partition_count = topics.count
        self._partition_of = topics.partition_of
        self._keys = keys
        self._java_keys = keys.is_default
        self._block_ms = block_ms
        # Weak, so that a producer that nobody has any longer ends without the garbage collector.
        self._send_gathered = weakref.WeakMethod(send_gathered)
        self._given_back = weakref.WeakMethod(given_back)
        self._runs: dict[str, _Run] = {}

    def choose(self, topic: str, key: bytes | None, size: int = 0) -> int:
        """The partition of a record with `key` and about `size` bytes."""
        count = self._partition_count(topic)
        if self._java_keys:
            if key is not None:
                return (murmur2(key) & 0x7FFFFFFF) % count
        elif (wanted := self._keys.of(key, count)) >= 0:
            return wanted
        return self.next_of_run(topic, count, size)

    def next_of_run(self, topic: str, count: int, size: int) -> int:
        """The partition for `size` more bytes of records that have no preference."""
        run = self._runs.get(topic)
        if run is None or run.partition >= count:
            run = self._runs[topic] = _Run(random.randrange(count))
        run.used_bytes += size + RECORD_OVERHEAD
        if run.used_bytes > RUN_BYTES:
            run.used_bytes = 0
            run.partition = self._next_free(topic, run.partition, count)
        return run.partition

    def _next_free(self, topic: str, current: int, count: int) -> int:
        """The next partition that can be written by RDMA, giving back the current one; the next at
        all if there is none.  Waits up to max.block.ms (a little in any case) for the broker; when
        that does not answer, the run stays where it is."""
        present = self._partition_of(topic, current)
        try:
            over_rdma = count > 1 and self._driver.has_rdma(present)
        except KdirectError as e:
            # Sending waits for a broker that was reached before, or says what is wrong.
            log.debug("the run stays on %s: %s", present, e)
            return current
        if over_rdma:
            until = self._monotonic() + max(self._block_ms, LEAST_MOVE_MS) / 1000
            for step in range(1, count):
                partition = (current + step) % count
                tp = self._partition_of(topic, partition)
                try:
                    left_ms = max(0.0, (until - self._monotonic()) * 1000)
                    if not self._driver.is_direct(tp, left_ms):
                        continue
                except AccessDeniedError:
                    continue  # another has it for itself
                except KdirectError as e:
                    log.debug("the run stays on %s: %s", present, e)
                    return current
                send_gathered = self._send_gathered()
                if send_gathered is not None:
                    send_gathered(present)
                self._driver.give_back(present)
                given_back = self._given_back()
                if given_back is not None:
                    given_back()
                return partition
            if self._driver.has_direct(present):
                return current
        return (current + 1) % count
