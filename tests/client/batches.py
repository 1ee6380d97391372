"""A job that writes batches exactly once, and who watches what readers of committed records see.

A record's value is ``b"batch row"``; batch n has rows 0 to `ROWS` - 1, row r in partition r modulo
`PARTITIONS`, and each task writes some of them.
"""

from __future__ import annotations

import threading
from typing import Any

import confluent_kafka as ck
import pyarrow as pa

from kdirect.client.attempts import Attempt

PARTITIONS = 3
TASKS = 4
ROWS = 24
OF_PARTITION = ROWS // PARTITIONS


def write(session: Any, attempt: Attempt, topic: str, batch: int, task: int) -> None:
    """The rows of a task, flushed; its producer is gone."""
    rows = range(task, ROWS, TASKS)
    columns = {
        "value": pa.array([b"%d %d" % (batch, row) for row in rows], pa.binary()),
        "partition": pa.array([row % PARTITIONS for row in rows], pa.int32()),
    }
    with session.attempt_producer(attempt) as producer:
        producer.send_arrow(pa.table(columns), topic)
        assert producer.flush() == 0


def write_batch(session: Any, topic: str, run: str, batch: int) -> str:
    """Have all tasks write a batch, some of them twice, and commit it; what the commit said."""
    chosen = []
    for task in range(TASKS):
        attempt = session.join_attempt(topic, "q", run, batch, owner="test")
        if attempt is None:
            continue
        write(session, attempt, topic, batch, task)
        chosen.append(attempt)
        if (batch + task) % 3 == 0:  # another attempt of the same task, which does not count
            other = session.join_attempt(topic, "q", run, batch)
            write(session, other, topic, batch, task)
    return str(session.commit_attempts(topic, "q", run, batch, chosen))


class Watcher(threading.Thread):
    """A stock reader of committed records.  Each time when it has read all that a partition shows,
    it has seen whole batches."""

    def __init__(self, servers: str, topic: str) -> None:
        super().__init__(daemon=True)
        self._consumer = ck.Consumer(
            {
                "bootstrap.servers": servers,
                "group.id": "none",
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
                "enable.auto.commit": False,
                "reconnect.backoff.max.ms": 200,
                "fetch.wait.max.ms": 1,
                "log_level": 0,
            }
        )
        self._consumer.assign([ck.TopicPartition(topic, i, 0) for i in range(PARTITIONS)])
        self.seen: list[dict[int, list[int]]] = [{} for _ in range(PARTITIONS)]
        self.looks = 0
        self.error: BaseException | None = None
        self._ends = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            while not self._ends.is_set():
                message = self._consumer.poll(0.1)
                if message is None:
                    continue
                of_partition = self.seen[message.partition()]
                if message.error() is None:
                    batch, row = map(int, message.value().split())
                    of_partition.setdefault(batch, []).append(row)
                elif message.error().code() == ck.KafkaError._PARTITION_EOF:
                    self._look(message.partition(), of_partition)
        except BaseException as e:
            self.error = e
        finally:
            self._consumer.close()

    def _look(self, partition: int, found: dict[int, list[int]]) -> None:
        self.looks += 1
        whole = list(range(partition, ROWS, PARTITIONS))
        for batch, rows in found.items():
            assert sorted(rows) == whole, f"partition {partition}, batch {batch}: {sorted(rows)}"

    def check(self) -> None:
        """Nothing was wrong so far."""
        if self.error is not None:
            raise self.error

    def has_seen(self, batches: int) -> bool:
        """Has it seen so many batches, all of each?"""
        self.check()
        return all(
            len(found) == batches and all(len(rows) == OF_PARTITION for rows in found.values())
            for found in self.seen
        )

    def close(self) -> None:
        self._ends.set()
        self.join(20)
        self.check()
