"""What a scenario has: one Spark session, one broker, topics of its own, and the format under test.

Law: a scenario returns a value that does not name its topics.  It is run once with each format, and
the two values are compared.  Topics are filled by confluent-kafka, which knows neither.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.spark.conftest import Topics
from tests.support import wait_until

FORMATS = ("kafka", "kdirect")
LIMIT_S = 240
_numbers = itertools.count()


class World:
    """For one scenario with one format."""

    def __init__(self, spark: Any, servers: str, directory: Path, form: str) -> None:
        self.spark = spark
        self.servers = servers
        self.form = form
        self.topics = Topics(servers)
        self._directory = directory

    # -- topics

    def topic(self, partitions: int = 1, *values: Any, **config: Any) -> str:
        """A new topic; `values` go to its partitions in turn."""
        name = self.topics.create(partitions, prefix=f"{self.form}-{next(_numbers)}", **config)
        self.fill(name, partitions, *values)
        return name

    def fill(self, topic: str, partitions: int, *values: Any) -> None:
        for p in range(partitions):
            mine = [str(v).encode() for v in values[p::partitions]]
            if mine:
                self.topics.fill(topic, mine, p)

    def transactions(self, topic: str, *steps: tuple[list[str], bool]) -> None:
        """One transaction for each step: (its values, is it committed?)."""
        for values, commits in steps:
            self.end(self.begin(topic, *values), commits)

    def begin(self, topic: str, *values: str) -> Any:
        """An open transaction whose values are in partition 0 of the topic."""
        from confluent_kafka import Producer

        producer = Producer({
            "bootstrap.servers": self.servers, "transactional.id": topic, "log_level": 0,
        })  # fmt: skip
        producer.init_transactions(30)
        producer.begin_transaction()
        for value in values:
            producer.produce(topic, value, partition=0)
        assert producer.flush(30) == 0
        return producer

    @staticmethod
    def end(producer: Any, commits: bool) -> None:
        if commits:
            producer.commit_transaction(30)
        else:
            producer.abort_transaction(30)

    def checkpoint(self) -> str:
        return str(self._directory / f"{self.form}-checkpoint-{next(_numbers)}")

    # -- reading

    def _source(self, reader: Any, topic: str | None, options: dict[str, Any]) -> Any:
        reader = reader.format(self.form).option("kafka.bootstrap.servers", self.servers)
        if topic is not None:
            reader = reader.option("subscribe", topic)
        return reader.options(**{k.replace("__", "."): str(v) for k, v in options.items()})

    def read(self, topic: str | None = None, /, **options: Any) -> Any:
        """A batch DataFrame; two underscores stand for a dot."""
        return self._source(self.spark.read, topic, options).load()

    def stream(self, topic: str | None = None, /, **options: Any) -> Any:
        return self._source(self.spark.readStream, topic, options).load()

    def values(self, frame: Any) -> list[str | None]:
        rows = frame.selectExpr("CAST(value AS STRING) AS v").collect()
        return sorted((row.v for row in rows), key=lambda v: (v is None, v))

    def drain(
        self, frame: Any, checkpoint: str | None = None, empty: bool = False, **trigger: Any
    ) -> list[list[str]]:
        """The values of each micro-batch until everything that is there was read; with `empty`,
        those of micro-batches without a row too."""
        batches: list[list[str]] = []

        def keep(batch: Any, _: int) -> None:
            if (found := self.values(batch)) or empty:
                batches.append(found)

        query = (
            frame.writeStream.foreachBatch(keep)
            .option("checkpointLocation", checkpoint or self.checkpoint())
            .trigger(**(trigger or {"availableNow": True}))
            .start()
        )
        try:
            assert query.awaitTermination(LIMIT_S), "the query did not end"
        finally:
            query.stop()
        return batches

    def drained(self, frame: Any, checkpoint: str | None = None) -> list[str]:
        return sorted(v for batch in self.drain(frame, checkpoint) for v in batch)

    @contextmanager
    def running(
        self, frame: Any, checkpoint: str | None = None, keep: Callable[..., None] | None = None
    ) -> Iterator[tuple[Any, list[list[str]]]]:
        """A query that goes on, and the values of its micro-batches with rows; it has done its
        first work when the block begins.  `keep` takes the micro-batches instead."""
        batches: list[list[str]] = []

        def collect(batch: Any, _: int) -> None:
            if found := self.values(batch):
                batches.append(found)

        query = (
            frame.writeStream.foreachBatch(keep or collect)
            .option("checkpointLocation", checkpoint or self.checkpoint())
            .start()
        )
        try:
            query.processAllAvailable()
            yield query, batches
        finally:
            query.stop()

    @staticmethod
    def come(query: Any, batches: list[list[str]], *values: Any) -> list[str]:
        """Wait until these values, and no others, have come; all that came, in order."""
        wanted = sorted(map(str, values))

        def found() -> list[str]:
            return sorted(v for batch in list(batches) for v in batch)

        def whole() -> bool:
            if query.exception() is not None:
                raise query.exception()
            return len(found()) >= len(wanted)

        wait_until(whole, lambda: f"{found()} came, not {wanted}", LIMIT_S)
        query.processAllAvailable()
        return found()

    # -- writing

    def write(self, frame: Any, mode: str | None = "append", **options: Any) -> None:
        writer = frame.write.format(self.form).option("kafka.bootstrap.servers", self.servers)
        writer = writer.options(**{k.replace("__", "."): str(v) for k, v in options.items()})
        (writer if mode is None else writer.mode(mode)).save()

    def write_stream(self, frame: Any, mode: str = "append", **options: Any) -> None:
        writer = frame.writeStream.format(self.form).outputMode(mode)
        writer = writer.option("kafka.bootstrap.servers", self.servers)
        writer = writer.options(**{k.replace("__", "."): str(v) for k, v in options.items()})
        query = (
            writer.option("checkpointLocation", self.checkpoint()).trigger(availableNow=True)
        ).start()
        try:
            assert query.awaitTermination(LIMIT_S), "the query did not end"
        finally:
            query.stop()

    def written(self, topic: str, partitions: int = 1) -> list[tuple]:
        """(partition, key, value, headers) of the topic, as confluent-kafka reads it."""
        found = self.topics.consume(topic, partitions)
        return sorted(((p, k, v, h) for p, _, k, v, _, h in found), key=repr)

    def rows(self, *values: Any) -> Any:
        """A DataFrame with the string column value."""
        return self.spark.createDataFrame([(str(v),) for v in values], "value string")

    # -- refusals

    def refused(self, action: Callable[[], Any]) -> str:
        """``refused`` if the action fails, else ``accepted``."""
        try:
            action()
        except AssertionError:
            raise
        except Exception:
            return "refused"
        return "accepted"


def outcome(run: Callable[[World], Any], world: World) -> str:
    """What a scenario returned, as a text; or the first line of its error."""
    try:
        return repr(run(world))
    except Exception as e:
        text = " ".join(line.strip() for line in str(e).splitlines()[:2])
        return "failed: " + re.sub(r"\s+", " ", text)[:300]
