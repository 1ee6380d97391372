"""Stock Java clients: a JVM with Kafka's own jars and nothing of ours, called through the py4j that
comes with pyspark.

No compiler is needed, so a JRE is enough.  The jars are fetched once (tests/conftest.py); where
that is impossible these tests skip.
"""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyspark
import pytest
from py4j.java_gateway import GatewayParameters, JavaGateway

WAIT_S = 30
CLIENTS = ("4.1.0", "3.9.2")
_names = itertools.count()


def class_path(jars: list[Path]) -> str:
    return os.pathsep.join(map(str, jars))


class Java:
    """Kafka's client library of one version in a JVM of its own.  `close` ends it; use it from one
    thread."""

    def __init__(self, jars: list[Path]) -> None:
        (bridge,) = Path(pyspark.__file__).parent.glob("jars/py4j-*.jar")
        command = [
            "java",
            "-cp",
            class_path([*jars, bridge]),
            "-Xmx256m",
            "-XX:TieredStopAtLevel=1",
            "-Dlog4j2.level=off",
        ]
        command += ["py4j.GatewayServer", "--die-on-broken-pipe", "0"]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout is not None
        port = int(self.process.stdout.readline())
        self.gateway = JavaGateway(
            gateway_parameters=GatewayParameters(port=port, auto_convert=True)
        )
        self.kafka = self.gateway.jvm.org.apache.kafka

    def close(self) -> None:
        # Objects that are collected later would look for the JVM, and say in the log that it is
        # gone.
        self.gateway.shutdown()
        self.process.kill()
        self.process.wait(WAIT_S)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()

    def properties(self, values: Mapping[str, Any]) -> Any:
        out = self.gateway.jvm.java.util.Properties()
        for name, value in values.items():
            out.setProperty(name, str(value))
        return out

    def admin(self, servers: str) -> Any:
        # A static method of an interface: py4j finds the one that takes a map.
        settings = {
            "bootstrap.servers": servers,
            "request.timeout.ms": 15000,
            "default.api.timeout.ms": 20000,
        }
        return self.kafka.clients.admin.Admin.create(self.properties(settings))

    def producer(self, servers: str, **settings: Any) -> Any:
        serializer = "org.apache.kafka.common.serialization.StringSerializer"
        values = {
            "bootstrap.servers": servers,
            "key.serializer": serializer,
            "value.serializer": serializer,
        }
        return self.kafka.clients.producer.KafkaProducer(
            self.properties({**values, **_dotted(settings)})
        )

    def consumer(self, servers: str, **settings: Any) -> Any:
        deserializer = "org.apache.kafka.common.serialization.StringDeserializer"
        values = {
            "bootstrap.servers": servers,
            "key.deserializer": deserializer,
            "value.deserializer": deserializer,
        }
        return self.kafka.clients.consumer.KafkaConsumer(
            self.properties({**values, "auto.offset.reset": "earliest", **_dotted(settings)})
        )

    def record(self, topic: str, partition: int | None, key: str | None, value: str) -> Any:
        return self.kafka.clients.producer.ProducerRecord(topic, partition, key, value)

    def partition(self, topic: str, index: int) -> Any:
        return self.kafka.common.TopicPartition(topic, index)

    def milliseconds(self, n: int) -> Any:
        return self.gateway.jvm.java.time.Duration.ofMillis(n)

    def list(self, collection: Any) -> list[Any]:
        """The elements of what is no List, Set or Map, which py4j does not make iterable."""
        return list(self.gateway.jvm.java.util.ArrayList(collection))

    def before(self, offset: int) -> Any:
        """RecordsToDelete.beforeOffset(offset): py4j finds the getter of the same name in its
        place."""
        name = "org.apache.kafka.clients.admin.RecordsToDelete"
        (method,) = (
            m
            for m in self.gateway.jvm.Class.forName(name).getMethods()
            if m.getName() == "beforeOffset" and m.getParameterCount()
        )
        arguments = self.gateway.new_array(self.gateway.jvm.Object, 1)
        arguments[0] = self.gateway.jvm.Long.valueOf(str(offset))
        return method.invoke(None, arguments)

    def poll(self, consumer: Any) -> Iterator[Any]:
        """The records of one poll."""
        records = consumer.poll(self.milliseconds(200)).iterator()
        while records.hasNext():
            yield records.next()

    def get(self, future: Any) -> Any:
        """The result of a future of Kafka's."""
        return future.get(WAIT_S, self.gateway.jvm.java.util.concurrent.TimeUnit.SECONDS)


def _dotted(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name.replace("_", "."): value for name, value in settings.items()}


@pytest.fixture(scope="session", params=CLIENTS)
def java(
    request: pytest.FixtureRequest, broker_jars: list[Path], connector_jars: list[Path]
) -> Iterator[Java]:
    """Kafka's client of each version: the broker's own, and that which Spark's connector takes."""
    rest = [jar for jar in broker_jars if "kafka-clients" not in jar.name]
    clients = [
        jar
        for jar in [*broker_jars, *connector_jars]
        if jar.name.endswith(f"kafka-clients-{request.param}.jar")
    ]
    assert len(clients) == 1
    made = Java(
        [
            *clients,
            *(
                rest
                if clients[0] in broker_jars
                else [jar for jar in rest if ".kafka-" not in jar.name]
            ),
        ]
    )
    yield made
    made.close()


@pytest.fixture
def admin(java: Java, broker: Any) -> Iterator[Any]:
    made = java.admin(broker.bootstrap_servers)
    yield made
    made.close(java.milliseconds(1000))


@pytest.fixture
def tool(broker_jars: list[Path], broker: Any) -> Callable[..., str]:
    """``tool(class, *arguments)``: run one of Kafka's command-line tools against the broker; what
    it printed.

    A class without a package is in that of the tools.  SERVERS in an argument becomes the address;
    where no argument has it, it is given with --bootstrap-server."""

    def run(name: str, *arguments: str) -> str:
        given = [x.replace("SERVERS", broker.bootstrap_servers) for x in arguments]
        if given == list(arguments):
            given = ["--bootstrap-server", broker.bootstrap_servers, *given]
        main = name if "." in name else f"org.apache.kafka.tools.{name}"
        command = [
            "java",
            "-cp",
            class_path(broker_jars),
            "-XX:TieredStopAtLevel=1",
            "-XX:+UseSerialGC",
            "-Dlog4j2.level=off",
            main,
        ]
        done = subprocess.run(
            [*command, *given],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run
