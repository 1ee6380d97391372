"""What happens under a stream: the scenarios of KafkaMicroBatchSourceSuite in which topics come and
go, transactions end and tasks fail."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tests.parity.relation import at
from tests.parity.scenario import scenario
from tests.parity.world import LIMIT_S, World

# So that Kafka's clients see changes of topics at once.
FRESH = {
    "kafka__metadata__max__age__ms": 1,
    "kafka__request__timeout__ms": 3000,
    "kafka__default__api__timeout__ms": 3000,
    "partitionDiscoveryIntervalMs": 100,
}
BORNE = {**FRESH, "failOnDataLoss": False}


def recreate(w: World, topic: str, partitions: int, *values: Any) -> None:
    w.topics.delete(topic)
    w.topics.create_named(topic, partitions)
    w.fill(topic, 1, *values)


for partitions, count, lost in ((2, 15, "partitions"), (3, 10, "offsets")):

    @scenario("changes", f"AvailableNow ends when {lost} of its plan are gone", "'refused'")
    def gone_meanwhile(w: World, partitions: int = partitions, count: int = count) -> Any:
        topic = w.topic(3)
        w.fill(topic, 1, *range(15))
        frame = w.stream(topic, startingOffsets="earliest", maxOffsetsPerTrigger=5, **FRESH)
        query = (
            frame.writeStream.foreachBatch(
                lambda batch, _: recreate(w, topic, partitions, *range(count))
            )
            .option("checkpointLocation", w.checkpoint())
            .trigger(availableNow=True)
            .start()
        )
        try:
            return w.refused(lambda: query.awaitTermination(LIMIT_S))
        finally:
            query.stop()


@scenario("changes", "a batch that fails runs again, though partitions were added",
          "(True, ['1', '2', '7'])")  # fmt: skip
def failed_batch(w: World) -> Any:
    topic, checkpoint = w.topic(1, 1, 2, 7), w.checkpoint()
    frame = w.stream(topic, startingOffsets="earliest", **FRESH)

    def refuse(batch: Any, _: int) -> None:
        if "7" in w.values(batch):
            raise RuntimeError("no sevens")

    first = frame.writeStream.foreachBatch(refuse).option("checkpointLocation", checkpoint)
    query = first.trigger(availableNow=True).start()
    try:
        query.awaitTermination(LIMIT_S)
        refused = False
    except Exception as e:
        refused = "no sevens" in str(e)
    finally:
        query.stop()
    w.topics.add_partitions(topic, 3)
    return refused, w.drained(frame, checkpoint)


@scenario("changes", "a topic of a pattern is deleted, another one comes",
          "['1', '2', '3', '4', '5', '6']")  # fmt: skip
def pattern_deleted(w: World) -> Any:
    prefix = w.topic(1)
    one, two = f"{prefix}-seems", f"{prefix}-bad"
    w.topics.create_named(one, 2)
    frame = w.stream(subscribePattern=f"{prefix}-.*", startingOffsets="latest", **BORNE)
    with w.running(frame) as (query, batches):
        w.fill(one, 1, 1, 2, 3)
        w.come(query, batches, 1, 2, 3)
        w.topics.delete(one)
        w.topics.create_named(two, 2)
        w.fill(two, 1, 4, 5, 6)
        return w.come(query, batches, *range(1, 7))


@scenario("changes", "offsets in the log are never empty when all topics are gone", "False")
def never_empty(w: World) -> Any:
    prefix, checkpoint = w.topic(1), w.checkpoint()
    topic = f"{prefix}-good"
    w.topics.create_named(topic, 2)
    frame = w.stream(subscribePattern=f"{prefix}-.*", startingOffsets="latest", **BORNE)
    with w.running(frame, checkpoint) as (query, batches):
        w.fill(topic, 1, 1, 2, 3)
        w.come(query, batches, 1, 2, 3)
        w.topics.delete(topic)
        query.processAllAvailable()
        logged = [f.read_text().splitlines() for f in (Path(checkpoint) / "offsets").glob("[0-9]*")]
        return any("{}" in lines[2:] for lines in logged)


@scenario("changes", "a topic of a pattern created again with fewer records", "'refused'")
def pattern_recreated(w: World) -> Any:
    prefix, checkpoint = w.topic(1), w.checkpoint()
    for name in ("good", "bad"):
        w.topics.create_named(f"{prefix}-{name}")
        w.fill(f"{prefix}-{name}", 1, 1, 2)
    given = {"subscribePattern": f"{prefix}-.*", "startingOffsets": "earliest", **FRESH}
    w.drained(w.stream(**given), checkpoint)
    recreate(w, f"{prefix}-bad", 1, 6)
    return w.refused(lambda: w.drained(w.stream(**given), checkpoint))


@scenario("changes", "a topic deleted while a task reads it, with failOnDataLoss=false", "None")
def deleted_under_a_task(w: World) -> Any:
    topic = w.topic(1, *range(10))
    given = {"startingOffsets": "earliest", "kafkaConsumer.pollTimeoutMs": 1000, **BORNE}
    frame = w.stream(topic, **given)

    def keep(batch: Any, number: int) -> None:
        if number == 0:
            recreate(w, topic, 1)
        w.values(batch)

    with w.running(frame, keep=keep) as (query, _):
        return query.exception()


@scenario("changes", "records deleted before a stream with failOnDataLoss=false starts",
          repr(sorted(map(str, range(20, 50)))))  # fmt: skip
def deleted_before(w: World) -> Any:
    topic = w.topic(1, *range(50))
    w.topics.delete_records(topic, 0, 20)
    return w.drained(w.stream(topic, startingOffsets=at(topic, 0), **BORNE))


COMMITS = (
    (["0", "1", "2", "3", "4"], True),  # offsets 0 to 4, and 5 for the mark of the end
    (["6", "7", "8", "9", "10"], False),  # 11
    (["12", "13", "14", "15", "16"], True),  # 17
    (["18"], True),
    (["20"], True),
    (["22", "23"], True),
)
COMMITTED = [
    ["0", "1", "2"], ["3", "4"], [], [], ["12", "13", "14"], ["15", "16"], ["18", "20"],
    ["22", "23"], [],
]  # fmt: skip
ALL = [
    ["0", "1", "2"], ["3", "4"], ["6", "7", "8"], ["10", "9"], ["12", "13", "14"], ["15", "16"],
    ["18", "20"], ["22", "23"], [],
]  # fmt: skip

for level, expected in (("committed", COMMITTED), ("uncommitted", ALL)):

    @scenario("transactions", f"micro-batches of three offsets, read_{level}", repr(expected))
    def by_three(w: World, level: str = level) -> Any:
        topic = w.topic(1)
        w.transactions(topic, *COMMITS)
        given = {"kafka__isolation__level": f"read_{level}", "maxOffsetsPerTrigger": 3}
        given |= {"startingOffsets": "earliest", "kafkaConsumer.pollTimeoutMs": 5000}
        return w.drain(w.stream(topic, **given), empty=True)

    @scenario("transactions", f"a stream while a transaction is open, read_{level}",
              repr(([], ["0", "1"]) if level == "committed" else (["0", "1"], ["0", "1"])),
              )  # fmt: skip
    def open_stream(w: World, level: str = level) -> Any:
        topic = w.topic(1)
        given = {"kafka__isolation__level": f"read_{level}", "startingOffsets": "earliest"}
        with w.running(w.stream(topic, **given)) as (query, batches):
            producer = w.begin(topic, "0", "1")
            before = w.come(query, batches, *([] if level == "committed" else [0, 1]))
            w.end(producer, True)
            return before, w.come(query, batches, 0, 1)

    @scenario("transactions", f"one DataFrame over transactions, read_{level}",
              repr((0, 5, 5, 10) if level == "committed" else (5, 5, 10, 15)))  # fmt: skip
    def stages(w: World, level: str = level) -> Any:
        topic = w.topic(1)
        frame = w.read(topic, kafka__isolation__level=f"read_{level}")
        producer = w.begin(topic, *map(str, range(5)))
        counts = [len(w.values(frame))]
        w.end(producer, True)
        counts.append(len(w.values(frame)))
        for commits in (False, True):
            w.transactions(topic, (list(map(str, range(5))), commits))
            counts.append(len(w.values(frame)))
        return tuple(counts)


@scenario("transactions", "records that come while a micro-batch runs",
          "[['0', '1', '2', '3'], ['4', '5', '6', '7']]")  # fmt: skip
def meanwhile(w: World) -> Any:
    topic = w.topic(1)
    w.transactions(topic, (["0", "1", "2", "3"], True))
    found: list[list[str]] = []

    def keep(batch: Any, number: int) -> None:
        if number == 0:
            w.transactions(topic, (["4", "5", "6", "7"], True))
        if values := w.values(batch):
            found.append(values)

    given = {"startingOffsets": "earliest", "kafka__isolation__level": "read_committed"}
    with w.running(w.stream(topic, **given), keep=keep):
        return found


@scenario("changes", "topics, partitions and records come while a pattern is read", "True")
def stress(w: World) -> Any:
    draw = random.Random(18)
    prefix = w.topic(1)
    topics: dict[str, int] = {}
    sent: list[str] = []

    def send() -> None:
        topic = draw.choice(sorted(topics))
        value = str(len(sent))
        sent.append(value)
        w.topics.fill(topic, [value.encode()], draw.randrange(topics[topic]))

    def create() -> None:
        name = f"{prefix}-{len(topics)}"
        w.topics.create_named(name, n := draw.randrange(1, 4))
        topics[name] = n

    create()
    frame = w.stream(subscribePattern=f"{prefix}-.*", startingOffsets="earliest", **FRESH)
    with w.running(frame) as (query, batches):
        for _ in range(40):
            step = draw.randrange(10)
            if step == 0:
                create()
            elif step == 1:
                topic = draw.choice(sorted(topics))
                topics[topic] += draw.randrange(1, 3)
                w.topics.add_partitions(topic, topics[topic])
            else:
                send()
        return w.come(query, batches, *sent) == sorted(sent)


@scenario("changes", "topics are deleted and come again under failOnDataLoss=false", "None")
def churn(w: World) -> Any:
    draw = random.Random(19)
    prefix = w.topic(1)
    present: list[str] = []
    deleted: list[str] = []
    frame = w.stream(subscribePattern=f"{prefix}-.*", startingOffsets="earliest", **BORNE,
                     **{"fetchOffset.numRetries": 10, "fetchOffset.retryIntervalMs": 500,
                        "kafkaConsumer.pollTimeoutMs": 1000})  # fmt: skip
    w.topics.create_named(f"{prefix}-0")
    present.append(f"{prefix}-0")
    with w.running(frame) as (query, _):
        for n in range(1, 60):
            step = draw.randrange(10)
            if step == 0:
                w.topics.create_named(name := f"{prefix}-{n}")
                present.append(name)
            elif step == 1 and len(present) > 1:
                w.topics.delete(name := present.pop(draw.randrange(len(present))))
                deleted.append(name)
            elif step == 2 and deleted:
                w.topics.create_named(name := deleted.pop(draw.randrange(len(deleted))))
                present.append(name)
            else:
                for name in present:
                    w.fill(name, 1, *range(draw.randrange(1, 5)))
            if query.exception() is not None:
                break
        query.processAllAvailable()
        return query.exception()
