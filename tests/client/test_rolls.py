"""Consumers of many partitions while the partitions roll, thousands of times: no error at all, and
every record once and in order.

`KDIRECT_ROLLS=n` runs until n rolls were made (of each transport), `KDIRECT_SEED=n` repeats the
order in which records were produced.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import defaultdict
from pathlib import Path

import pytest

import kdirect
from kdirect.client import connect
from kdirect.model import TopicPartition

ROLLS = int(os.environ.get("KDIRECT_ROLLS", "1500"))
PARTITIONS = 12
SEGMENT_BYTES = 16384  # seven records
VALUE_BYTES = 2200
SECONDS = 120 + ROLLS / 10  # a run that takes longer stands still


class Sent:
    """What the producer's thread has sent: records of partition p are numbered from 0."""

    def __init__(self, broker, directory: Path, seed: int) -> None:
        self.counts = [0] * PARTITIONS
        self.done = threading.Event()
        self.error: BaseException | None = None
        self._broker, self._directory, self._seed = broker, directory, seed
        self._thread = threading.Thread(target=self._produce)

    @property
    def rolls(self) -> int:
        return sum(1 for _ in self._directory.glob("t-*/*.log")) - PARTITIONS

    def _produce(self) -> None:
        chance = random.Random(self._seed)
        try:
            with connect(
                {"bootstrap.servers": self._broker.bootstrap_servers, "transport": "shm"}
            ).producer() as producer:
                while self.rolls < ROLLS and not self.done.is_set():
                    for _ in range(200):
                        p = chance.randrange(PARTITIONS)
                        for _ in range(chance.choice((1, 2, 10))):
                            producer.produce(
                                "t", (b"%d" % self.counts[p]).ljust(VALUE_BYTES), partition=p
                            )
                            self.counts[p] += 1
                        producer.flush()
        except BaseException as e:
            self.error = e
        finally:
            self.done.set()

    def __enter__(self) -> Sent:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.done.set()
        self._thread.join()


def one_by_one(consumer):
    """(partition, offset, value) of what the next polls bring."""
    message = consumer.poll(0.1)
    return [] if message is None else [(message.partition(), message.offset(), message.value())]


def columns(consumer):
    batch = consumer.poll_arrow(0.1)
    if batch is None:
        return []
    return zip(
        *(batch.column(name).to_pylist() for name in ("partition", "offset", "value")), strict=True
    )


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_rolls_under_readers_of_many_partitions(broker_process, tmp_path, seed, transport):
    broker = broker_process(tmp_path / "log")
    settings = {"bootstrap.servers": broker.bootstrap_servers, "transport": transport}
    connect(settings).admin.create_topic(
        "t", PARTITIONS, configs={"segment.bytes": str(SEGMENT_BYTES)}
    )
    got: dict[str, list[int]] = defaultdict(lambda: [0] * PARTITIONS)
    deadline = time.monotonic() + SECONDS
    with (
        Sent(broker, tmp_path / "log", seed) as sent,
        kdirect.Consumer(settings) as first,
        kdirect.Consumer(settings) as second,
    ):
        readers = {"poll": (first, one_by_one), "poll_arrow": (second, columns)}
        for consumer, _ in readers.values():
            consumer.assign({TopicPartition("t", p): 0 for p in range(PARTITIONS)})
        while not (sent.done.is_set() and all(got[name] == sent.counts for name in readers)):
            assert time.monotonic() < deadline, f"the readers stand at {dict(got)} of {sent.counts}"
            for name, (consumer, take) in readers.items():
                for _ in range(50):
                    for partition, offset, value in take(consumer):
                        assert offset == got[name][partition], f"{name}: partition {partition}"
                        assert value.rstrip() == b"%d" % offset
                        got[name][partition] += 1
                    if got[name] == sent.counts:
                        break
        if sent.error is not None:
            raise sent.error
        assert sent.rolls >= ROLLS
        if transport == "shm":
            assert all(c.statistics().get("fetches", 0) == 0 for c, _ in readers.values()), (
                "they were read over TCP"
            )
