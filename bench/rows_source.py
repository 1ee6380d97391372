"""What Spark's source does without Spark's JVM: a planner that asks where a stream ends, and a task
that reads committed records.

Law: the connector's own code runs, with the options of a query, in this process; a broker in
another.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

from rows_spark import _Broker, fill
from sides import Figure, figure, spread_of

import kdirect
from kdirect.model import TopicPartition

PARTITIONS, QUICK_PARTITIONS = 1000, 50
LIMIT_MS = 1.0
CALLS = 200  # a round
ROUNDS = 15
VALUE_BYTES, ROWS, QUICK_ROWS = 100, 5_000_000, 100_000
WITHIN = 1.05  # committed records take at most so many times as long


def latest_offset(seconds: float, quick: bool) -> list[Figure]:
    """`latestOffset` of a stream over 1,000 partitions where nothing is new, and where a tenth of
    them has new records, beside the request for the same offsets that a client of Kafka sends to
    the same broker."""
    from confluent_kafka import TopicPartition as TheirPartition
    from confluent_kafka.admin import AdminClient, OffsetSpec
    from pyspark.sql.streaming.datasource import ReadAllAvailable

    from kdirect_spark.settings import source_settings
    from kdirect_spark.source import stream_reader

    partitions = QUICK_PARTITIONS if quick else PARTITIONS
    with tempfile.TemporaryDirectory() as directory, _Broker(directory) as broker:
        session = kdirect.connect(broker.address)
        session.admin.create_topic("bench", partitions)
        given = {
            "kafka.bootstrap.servers": broker.address,
            "subscribe": "bench",
            "startingOffsets": "earliest",
        }
        reader = stream_reader(source_settings(given, streaming=True))
        start = json.loads(json.dumps(reader.initialOffset()))
        theirs = AdminClient({"bootstrap.servers": broker.address})
        wanted = {TheirPartition("bench", p): OffsetSpec.latest() for p in range(partitions)}
        everything: Any = ReadAllAvailable()

        def ours() -> Any:
            return reader.latestOffset(start, everything)

        def request() -> None:
            for found in theirs.list_offsets(wanted).values():
                found.result()

        def with_news(producer: Any) -> float:
            """Milliseconds of the call after records came."""
            nonlocal start
            for p in range(0, partitions, 10):
                producer.produce("bench", b"v", partition=p)
            producer.flush()
            began = time.perf_counter()
            end = ours()
            spent = (time.perf_counter() - began) * 1e3
            start = json.loads(json.dumps(end))
            return spent

        for _ in range(3):
            ours(), request()
        rounds: dict[str, list[float]] = {"ours": [], "request": []}
        for _ in range(2 if quick else ROUNDS):
            rounds["ours"].append(_median_ms(ours, 10 if quick else CALLS))
            rounds["request"].append(_median_ms(request, 2 if quick else 10))
        with session.producer() as producer:
            news = statistics.median(with_news(producer) for _ in range(3 if quick else 50))
        value, against = (statistics.median(rounds[name]) for name in ("ours", "request"))
        return [
            figure(
                "latest-offset",
                value,
                "ms",
                "ListOffsets by librdkafka",
                against,
                lower_is_better=True,
                partitions=partitions,
                limit_ms=LIMIT_MS,
                limit_met=value <= LIMIT_MS,
                with_news_in_a_tenth_ms=round(news, 3),
                transport=session.transport,
                **spread_of(rounds["ours"], rounds["request"]),
            )
        ]


def _median_ms(call: Callable[[], Any], times: int) -> float:
    spent = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        spent.append((time.perf_counter() - began) * 1e3)
    return statistics.median(spent)


def read_committed(seconds: float, quick: bool) -> list[Figure]:
    """Seconds in which a task reads a partition with `kafka.isolation.level=read_committed`, beside
    all records; no transaction is open.  In turns."""
    from kdirect_spark.broker_view import RangePartition
    from kdirect_spark.reading import read_range
    from kdirect_spark.settings import source_settings

    rows = QUICK_ROWS if quick else ROWS
    with tempfile.TemporaryDirectory() as directory, _Broker(directory) as broker:
        transport = fill(broker.address, "bench", rows, VALUE_BYTES)
        end = kdirect.connect(broker.address).watermarks([TopicPartition("bench", 0)])
        ((_, stop),) = end.values()

        def run(isolation: str) -> float:
            given = {
                "kafka.bootstrap.servers": broker.address,
                "subscribe": "bench",
                "kafka.isolation.level": isolation,
            }
            settings = source_settings(given, streaming=False)
            began = time.perf_counter()
            batches = read_range(settings, RangePartition("bench", 0, 0, stop))
            found = sum(batch.num_rows for batch in batches)
            spent = time.perf_counter() - began
            if found != rows:
                raise RuntimeError(f"{found} of {rows} records were read with {isolation}")
            return spent

        levels = "read_committed", "read_uncommitted"
        rounds: dict[str, list[float]] = {level: [run(level)] for level in levels}
        for level in levels:
            rounds[level].clear()  # connections were opened, memory was mapped
        began = time.monotonic()
        while len(rounds[levels[0]]) < (1 if quick else 5) or (
            not quick and len(rounds[levels[0]]) < ROUNDS and time.monotonic() - began < seconds
        ):
            for level in levels:
                rounds[level].append(run(level))
        value, against = (statistics.median(rounds[level]) for level in levels)
        return [
            figure(
                "read-committed",
                value,
                "s",
                "read_uncommitted",
                against,
                lower_is_better=True,
                rows=rows,
                value_bytes=VALUE_BYTES,
                limit_ratio=WITHIN,
                limit_met=value <= WITHIN * against,
                transport=transport,
                **spread_of(rounds[levels[0]], rounds[levels[1]]),
            )
        ]
