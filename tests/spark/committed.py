"""What a stock client sees of a topic's committed records: for the tests of the sink.

All of it is confluent-kafka's, with isolation.level=read_committed, which knows nothing of kdirect.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

LIMIT_S = 30


class Committed:
    """The committed records of a topic.  One thread at a time."""

    def __init__(self, address: str, topic: str, partitions: int) -> None:
        self.topic, self.partitions = topic, partitions
        self._address = address
        self._admin = AdminClient({"bootstrap.servers": address, "log_level": 0})
        self._begin()

    def _begin(self) -> None:
        """Read from the start."""
        self._consumer = Consumer({
            "bootstrap.servers": self._address, "group.id": "none", "enable.auto.commit": False,
            "isolation.level": "read_committed", "log_level": 0, "fetch.wait.max.ms": 20,
            "auto.offset.reset": "error",
        })  # fmt: skip
        self._consumer.assign([TopicPartition(self.topic, p, 0) for p in range(self.partitions)])
        self._read: list[tuple[int, int, bytes]] = []  # (partition, offset, value)

    def close(self) -> None:
        self._consumer.close()

    def _offsets(self, level: IsolationLevel) -> list[int]:
        """Where each partition ends, at one moment: one request asks for all of them."""
        wanted = {
            TopicPartition(self.topic, p): OffsetSpec.latest() for p in range(self.partitions)
        }
        found = self._admin.list_offsets(wanted, isolation_level=level, request_timeout=LIMIT_S)
        offsets = [
            found[TopicPartition(self.topic, p)].result(LIMIT_S).offset
            for p in range(self.partitions)
        ]
        if min(offsets) < 0:  # what the client answers when the broker does not
            raise KafkaException(KafkaError(KafkaError._TRANSPORT))
        return offsets

    def ends(self) -> list[int]:
        """The last stable offset of each partition."""
        return self._offsets(IsolationLevel.READ_COMMITTED)

    def held_back(self) -> int:
        """How many offsets transactions hold back that are open."""
        return sum(self._offsets(IsolationLevel.READ_UNCOMMITTED)) - sum(self.ends())

    def read(self) -> list[tuple[int, int, bytes]]:
        """(partition, offset, value) of everything that is committed at one moment.  KafkaException
        while the broker is away."""
        ends = self.ends()
        behind = [p for p in range(self.partitions) if ends[p] > 0]
        deadline = time.monotonic() + LIMIT_S
        while behind:
            # The position also passes markers and what was aborted.
            for at in self._consumer.position([TopicPartition(self.topic, p) for p in behind]):
                if at.offset >= ends[at.partition]:
                    behind.remove(at.partition)
            assert time.monotonic() < deadline, (
                f"{behind} of {self.topic} were not read to {ends} in {LIMIT_S} s"
            )
            for message in self._consumer.consume(1000, 0.05) if behind else ():
                if message.error() is not None:
                    self._consumer.close()
                    self._begin()
                    raise KafkaException(message.error())
                self._read.append((message.partition(), message.offset(), message.value()))
        return sorted(one for one in self._read if one[1] < ends[one[0]])

    def read_when_back(self) -> list[tuple[int, int, bytes]]:
        """The same, asked again until a broker that was just started answers."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            try:
                return self.read()
            except KafkaException:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def all(self) -> list[bytes]:
        """The values of everything that is committed now."""
        return [value for _, _, value in self.read()]

    def watched(self, is_whole: Callable[[list[bytes]], bool]) -> Watch:
        """A context manager: while it is open, a thread looks all the time, and what it sees has to
        be whole, whenever it looks."""
        return Watch(self, is_whole)


class Watch:
    """A thread that reads all the time what is committed, and checks it.  While the broker is away
    nothing can be seen."""

    def __init__(self, of: Committed, is_whole: Callable[[list[bytes]], bool]) -> None:
        self._of = of
        self._is_whole = is_whole
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._error: BaseException | None = None
        self.looks = 0
        self.held_back = 0  # most offsets that were in the log, and not visible

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._ends.set()
        self._thread.join(2 * LIMIT_S)
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while not self._ends.wait(0.05):
                try:
                    values = self._of.all()
                except KafkaException:
                    continue
                assert self._is_whole(values), f"a part is visible: {sorted(values)}"
                self.looks += 1
                with contextlib.suppress(KafkaException):
                    self.held_back = max(self.held_back, self._of.held_back())
        except BaseException as e:
            self._error = e
