"""What a group and a producer wait for: a commit of offsets, and a transaction until it is visible.

kdirect commits offsets by one WRITE into the coordinator's memory, and writes the records of a
transaction by one-sided WRITEs; Kafka's side is librdkafka.  Both brokers have their defaults.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from rows_commit import Transactions
from versus.measure import latency_figure, turns, warm
from versus.systems import System, pair

Figures = list[dict[str, Any]]
COMMIT_BAR, TRANSACTION_BAR = 30.0, 10.0
RECORDS, RECORD_BYTES = 100, 100


def commit(seconds: float, quick: bool) -> Figures:
    """One consumer's commit of its position in a partition, which waits for the answer."""
    rounds = 1 if quick else 5
    turn_s = 0.1 if quick else seconds / (2 * rounds + 2)
    with pair() as both, both.topic("committed") as topic, ExitStack() as stack:
        calls = {s.key: stack.enter_context(_Member(s, topic)) for s in both.both}
        runs = {key: lambda call=call: _closed_loop(call, turn_s) for key, call in calls.items()}
        warm(1, runs)
        return [
            latency_figure(
                "commit", "publish", turns(rounds, runs), both, bar=COMMIT_BAR, partitions=1,
                how="Consumer.commit(offsets, asynchronous=False) until it returns",
            )
        ]  # fmt: skip


class _Member:
    """A member of a group that has the one partition of a topic; gives a call that commits."""

    def __init__(self, system: System, topic: str) -> None:
        self._system, self._topic = system, topic
        self._group = f"group-{uuid.uuid4().hex[:6]}"

    def __enter__(self) -> Callable[[], Any]:
        settings = {
            "bootstrap.servers": self._system.address,
            "group.id": self._group,
            "enable.auto.commit": False,
        }
        self._offset = 0
        if self._system.key == "kdirect":
            import kdirect

            self._consumer: Any = kdirect.Consumer({**settings, "transport": "shm"})
            self._row: Callable[[int], Any] = self._ours
        else:
            from confluent_kafka import Consumer

            self._consumer = Consumer({**settings, "socket.nagle.disable": True})
            self._row = self._theirs
        self._consumer.subscribe([self._topic])
        deadline = time.monotonic() + 60
        while not self._consumer.assignment():
            self._consumer.poll(0.1)
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self._system.label}: the group has not formed")
        return self._commit

    def _ours(self, offset: int) -> Any:
        from kdirect.model import TopicPartition

        return {TopicPartition(self._topic, 0): offset}

    def _theirs(self, offset: int) -> Any:
        from confluent_kafka import TopicPartition

        return [TopicPartition(self._topic, 0, offset)]

    def _commit(self) -> None:
        self._offset += 1
        self._consumer.commit(offsets=self._row(self._offset), asynchronous=False)

    def __exit__(self, *error: object) -> None:
        self._consumer.close()


def _closed_loop(call: Callable[[], Any], seconds: float) -> list[int]:
    samples = []
    clock = time.perf_counter_ns
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or not samples:
        begin = clock()
        call()
        samples.append(clock() - begin)
    return samples


def txn(seconds: float, quick: bool) -> Figures:
    """A transaction of 100 records, from the call that commits it until a reader of committed
    records has them all."""
    rounds = 1 if quick else 5
    turn_s = 0.2 if quick else seconds / (2 * rounds + 2)
    with pair() as both, both.topic("txn") as topic, ExitStack() as stack:
        loops = {
            s.key: stack.enter_context(
                Transactions(s.key, s.address, topic, RECORDS, RECORD_BYTES, transport="shm")
            )
            for s in both.both
        }
        runs = {key: lambda loop=loop: loop.run(turn_s)[0] for key, loop in loops.items()}
        warm(1 if quick else 2, runs)
        return [
            latency_figure(
                "txn", "endToEnd", turns(rounds, runs), both, bar=TRANSACTION_BAR,
                records=RECORDS, record_bytes=RECORD_BYTES,
                how="commit_transaction is called when all records were given to produce;"
                " until poll of a consumer with isolation.level=read_committed, in the same"
                " thread, has returned the last of them",
            )
        ]  # fmt: skip
