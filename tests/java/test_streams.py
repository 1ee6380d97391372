"""Kafka Streams against our broker: a word count with a repartition topic and a changelog.

The state is in memory, so an application that starts has it from the changelog alone.  Nothing is
buffered between a count and the topic of results: each word of the input gives one row, and a word
that was there n times has the rows 1, 2 ... n if nothing was lost and nothing counted twice.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

import kdirect
from tests.java.conftest import Java
from tests.support import BrokerProcess

pytestmark = pytest.mark.slow
LONGS = "org.apache.kafka.common.serialization.LongDeserializer"
STRINGS = "org.apache.kafka.common.serialization.Serdes$StringSerde"
CHANGELOG, REPARTITION = "words-counts-changelog", "words-counts-repartition"
# A member and a transaction of an application that was killed are given up soon.
BROKER = {
    "group.min.session.timeout.ms": 1000,
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": 100,
    "transaction.state.log.num.partitions": 2,
    "offsets.topic.num.partitions": 2,
}
APPLICATION = {
    "application.id": "words",
    "default.key.serde": STRINGS,
    "default.value.serde": STRINGS,
    "commit.interval.ms": 50,
    "statestore.cache.max.bytes": 0,
    "consumer.session.timeout.ms": 1500,
    "consumer.heartbeat.interval.ms": 300,
    "producer.transaction.timeout.ms": 2000,
    "producer.linger.ms": 5,
}


def _functions(java: Java) -> tuple[Any, Any]:
    """The words of a line, and the word as the key: Java's own methods as the interfaces of
    Streams, for which nothing has to be compiled."""
    jvm = java.gateway.jvm
    handles, types = jvm.java.lang.invoke.MethodHandles, jvm.java.lang.invoke.MethodType

    def of(name: str) -> Any:
        return jvm.java.lang.Class.forName(name)

    def array(kind: Any, *items: Any) -> Any:
        made = java.gateway.new_array(kind, len(items))
        for i, item in enumerate(items):
            made[i] = item
        return made

    def as_interface(name: str, handle: Any) -> Any:
        proxies = jvm.java.lang.invoke.MethodHandleProxies
        interface = of(f"org.apache.kafka.streams.kstream.{name}")
        return proxies.asInterfaceInstance(interface, handle)

    look = handles.publicLookup()
    string, strings = of("java.lang.String"), of("[Ljava.lang.String;")
    listed = of("java.util.List")
    split = look.findVirtual(string, "split", types.methodType(strings, string))
    one_space = handles.insertArguments(split, 1, array(jvm.java.lang.Object, " "))
    as_list = look.findStatic(
        of("java.util.Arrays"), "asList", types.methodType(listed, of("[Ljava.lang.Object;"))
    )
    typed = as_list.asFixedArity().asType(types.methodType(listed, strings))
    anything = of("java.lang.Object")
    second = handles.dropArguments(
        handles.identity(anything), 0, array(jvm.java.lang.Class, anything)
    )
    return (
        as_interface("ValueMapper", handles.filterReturnValue(one_space, typed)),
        as_interface("KeyValueMapper", second),
    )


def start_counting(java: Java, servers: str, directory: Path, guarantee: str) -> Any:
    """A KafkaStreams that counts the words of `in` into `out`, started."""
    words, by_word = _functions(java)
    streams = java.kafka.streams
    stores, kstream = streams.state.Stores, streams.kstream
    store = getattr(kstream.Materialized, "as")(stores.inMemoryKeyValueStore("counts"))
    builder = streams.StreamsBuilder()
    counts = builder.stream("in").flatMapValues(words).groupBy(by_word).count(store)
    longs = java.kafka.common.serialization.Serdes.Long()
    counts.toStream().to("out", kstream.Produced.valueSerde(longs))
    settings = {
        **APPLICATION,
        "bootstrap.servers": servers,
        "processing.guarantee": guarantee,
        "state.dir": directory,
    }
    app = streams.KafkaStreams(builder.build(), java.properties(settings))
    app.start()
    return app


@contextmanager
def counter(jars: list[Path], servers: str, directory: Path, guarantee: str) -> Iterator[Any]:
    """The application in a JVM of its own, which is killed in the end."""
    java = Java(jars)
    try:
        yield start_counting(java, servers, directory, guarantee)
    finally:
        java.close()


@pytest.fixture
def lines(seed: int) -> list[str]:
    chance = random.Random(seed)
    return [" ".join(chance.choices("abcdefg", k=chance.randint(1, 4))) for _ in range(400)]


def prepare(servers: str, lines: list[str]) -> None:
    with kdirect.connect(servers) as session:
        for topic in ("in", "out"):
            session.admin.create_topic(topic, 2)
        write(session, lines)


def write(session: Any, lines: list[str]) -> None:
    with session.producer() as producer:
        for i, line in enumerate(lines):
            producer.produce("in", line.encode(), partition=i % 2)
        producer.flush()


class Rows:
    """What a reader with read_committed finds in a topic of two partitions, by words."""

    def __init__(self, java: Java, servers: str, topic: str) -> None:
        self.java = java
        self.consumer = java.consumer(
            servers, isolation_level="read_committed", enable_auto_commit="false",
            value_deserializer=LONGS, reconnect_backoff_max_ms=100,
        )  # fmt: skip
        self.consumer.assign([java.partition(topic, i) for i in range(2)])
        self.found: dict[str, list[int]] = {}

    def read(self, count: int, limit_s: float = 60) -> dict[str, list[int]]:
        """Wait for so many rows altogether."""
        deadline = time.monotonic() + limit_s
        while sum(map(len, self.found.values())) < count:
            assert time.monotonic() < deadline, (count, self.found)
            for record in self.java.poll(self.consumer):
                self.found.setdefault(record.key(), []).append(record.value())
        return self.found

    def close(self) -> None:
        self.consumer.close()


def one_by_one(lines: list[str]) -> dict[str, list[int]]:
    counts = Counter(word for line in lines for word in line.split())
    return {word: list(range(1, n + 1)) for word, n in counts.items()}


def whole(java: Java, servers: str, lines: list[str]) -> None:
    """`out` and the changelog have each count of each word once, in order."""
    expected = one_by_one(lines)
    for topic in ("out", CHANGELOG):
        rows = Rows(java, servers, topic)
        assert rows.read(sum(map(len, expected.values()))) == expected, topic
        assert not list(java.poll(rows.consumer)), "there are more rows"
        rows.close()


@pytest.fixture(scope="module")
def client(broker_jars: list[Path]) -> Iterator[Java]:
    java = Java(broker_jars)
    yield java
    java.close()


def test_words_are_counted(client, streams_jars, tmp_path, lines):
    with kdirect.Broker(**{name.replace(".", "_"): value for name, value in BROKER.items()}) as own:
        servers = own.bootstrap_servers
        prepare(servers, lines)
        with counter(streams_jars, servers, tmp_path, "at_least_once") as app:
            whole(client, servers, lines)
            assert app.state().toString() == "RUNNING"
            app.close()
        with kdirect.connect(servers) as session:
            policies = {
                topic: session.admin.describe_configs(topic)["cleanup.policy"].value
                for topic in (CHANGELOG, REPARTITION)
            }
            assert policies == {CHANGELOG: "compact", REPARTITION: "delete"}


def test_words_are_counted_once_across_deaths(
    client: Java,
    streams_jars: list[Path],
    broker_process: Callable[..., BrokerProcess],
    tmp_path: Path,
    lines: list[str],
    seed: int,
) -> None:
    """Of the application, whose successor has a state of its own to restore, and of the broker."""
    broker = broker_process(**{name.replace(".", "_"): value for name, value in BROKER.items()})
    servers, third = broker.bootstrap_servers, len(lines) // 3
    chance = random.Random(seed)
    prepare(servers, lines[:third])
    rows = Rows(client, servers, "out")
    with ExitStack() as stack:
        with counter(streams_jars, servers, tmp_path / "first", "exactly_once_v2"):
            rows.read(chance.randrange(1, third))
        stack.enter_context(counter(streams_jars, servers, tmp_path / "next", "exactly_once_v2"))
        with kdirect.connect(servers) as session:
            write(session, lines[third : 2 * third])
        rows.read(third + chance.randrange(1, third))
        broker.kill()
        broker.start()
        with kdirect.connect(servers) as session:
            write(session, lines[2 * third :])
        whole(client, servers, lines)
    rows.close()
