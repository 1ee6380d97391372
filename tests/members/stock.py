"""Kafka's clients as everybody has them: each of these produces numbers and consumes them in a
group of its own, with the settings that it has by default but for acks=all.

All of them write values ``CLIENT.NUMBER`` into one topic; each keeps what it was acknowledged, what
it was refused and what it has read of its own, and goes on until `finish`.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import threading
from pathlib import Path
from typing import Any

import aiokafka
import confluent_kafka
import kafka

from tests.members.java_tools import Tool

TOPIC = "t"
PACE_S = 0.005
END_S = 120.0


class StockClient:
    """`code` stands before the numbers.  `acknowledged`: numbers; `read`: numbers as they came;
    `refused`: what became of records that were not acknowledged.

    `tells`: the program says of each record whether it was acknowledged; else it says in the end
    that all were, and `acknowledged` is empty until then."""

    name = ""
    tells = True

    def __init__(self, code: int, servers: str) -> None:
        self.code = code
        self.servers = servers
        self.group = f"group-{code}"
        self.acknowledged: list[int] = []
        self.read: list[int] = []
        self.refused: list[str] = []
        self._ending = threading.Event()  # of producing
        self._over = threading.Event()  # of consuming
        self._threads = [
            threading.Thread(target=self._guard, args=(work,), daemon=True)
            for work in (self.produce, self.consume)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def _guard(self, work: Any) -> None:
        try:
            work()
        except Exception as e:
            self.refused.append(f"{work.__name__} ended with {type(e).__name__}: {e}")

    def produce(self) -> None:
        raise NotImplementedError

    def consume(self) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        """Produce no more, and wait until everything is acknowledged."""
        self._ending.set()
        self._threads[0].join(END_S)
        if self._threads[0].is_alive():
            self.refused.append(f"producing did not end within {END_S:g} s")

    def close(self) -> None:
        self._ending.set()
        self._over.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(END_S)

    def value(self, number: int) -> bytes:
        return b"%d.%d" % (self.code, number)

    def take(self, value: bytes | str) -> None:
        """A record of the topic, of whatever client."""
        code, _, number = (value if isinstance(value, str) else value.decode()).partition(".")
        if int(code) == self.code:
            self.read.append(int(number))


class Confluent(StockClient):
    name = "confluent-kafka"

    def produce(self) -> None:
        producer = confluent_kafka.Producer(
            {
                "bootstrap.servers": self.servers,
                "acks": "all",
                "enable.idempotence": True,
                "log_level": 0,
            }
        )

        def delivered(error: Any, message: Any) -> None:
            if error is not None:
                self.refused.append(str(error))
            else:
                self.acknowledged.append(int(message.value().partition(b".")[2]))

        number = 0
        while not self._ending.is_set():
            producer.produce(TOPIC, self.value(number), on_delivery=delivered)
            number += 1
            producer.poll(PACE_S)
        if left := producer.flush(END_S):
            self.refused.append(f"{left} records have no answer")

    def consume(self) -> None:
        consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": self.servers,
                "group.id": self.group,
                "auto.offset.reset": "earliest",
                "log_level": 0,
            }
        )
        consumer.subscribe([TOPIC])
        try:
            while not self._over.is_set():
                for message in consumer.consume(500, 0.1):
                    if message.error() is None:
                        self.take(message.value())
        finally:
            consumer.close()


class KafkaPython(StockClient):
    name = "kafka-python"

    def produce(self) -> None:
        producer = kafka.KafkaProducer(
            bootstrap_servers=self.servers.split(","), acks="all", enable_idempotence=True
        )

        def delivered(number: int, _: Any) -> None:
            self.acknowledged.append(number)

        number = 0
        try:
            while not self._ending.wait(PACE_S):
                future = producer.send(TOPIC, self.value(number))
                future.add_callback(delivered, number)
                future.add_errback(lambda error: self.refused.append(repr(error)))
                number += 1
            producer.flush(END_S)
        finally:
            producer.close(10)

    def consume(self) -> None:
        consumer = kafka.KafkaConsumer(
            TOPIC,
            bootstrap_servers=self.servers.split(","),
            group_id=self.group,
            auto_offset_reset="earliest",
        )
        try:
            while not self._over.is_set():
                for messages in consumer.poll(100).values():
                    for message in messages:
                        self.take(message.value)
        finally:
            consumer.close()


class Aiokafka(StockClient):
    name = "aiokafka"

    def produce(self) -> None:
        asyncio.run(self._produce())

    async def _produce(self) -> None:
        producer = aiokafka.AIOKafkaProducer(
            bootstrap_servers=self.servers, acks="all", enable_idempotence=True
        )
        await producer.start()
        waiting: set[Any] = set()

        def delivered(number: int, future: Any) -> None:
            waiting.discard(future)
            if future.exception() is not None:
                self.refused.append(repr(future.exception()))
            else:
                self.acknowledged.append(number)

        number = 0
        try:
            while not self._ending.is_set():
                future = await producer.send(TOPIC, self.value(number))
                waiting.add(future)
                future.add_done_callback(lambda f, number=number: delivered(number, f))
                number += 1
                await asyncio.sleep(PACE_S)
            await asyncio.wait_for(producer.flush(), END_S)
            while waiting:
                await asyncio.wait(set(waiting))
        finally:
            await producer.stop()

    def consume(self) -> None:
        asyncio.run(self._consume())

    async def _consume(self) -> None:
        consumer = aiokafka.AIOKafkaConsumer(
            TOPIC,
            bootstrap_servers=self.servers,
            group_id=self.group,
            auto_offset_reset="earliest",
        )
        await consumer.start()
        try:
            while not self._over.is_set():
                for messages in (await consumer.getmany(timeout_ms=100)).values():
                    for message in messages:
                        self.take(message.value)
        finally:
            await consumer.stop()


class Kcat(StockClient):
    """kcat tells of no record; it exits with 0 if all were acknowledged.

    -E: else it ends itself when it has no connection to any broker for a moment, which librdkafka
    tells it as an error that will pass."""

    name = "kcat"
    tells = False

    def __init__(self, code: int, servers: str, program: str) -> None:
        super().__init__(code, servers)
        self._program = program

    def produce(self) -> None:
        with self._run("-P", "-t", TOPIC, "-X", "acks=all", "-X", "enable.idempotence=true") as run:
            assert run.stdin is not None and run.stderr is not None
            number = 0
            with contextlib.suppress(BrokenPipeError):  # it has ended, and its status says more
                while not self._ending.wait(PACE_S):
                    run.stdin.write(self.value(number) + b"\n")
                    run.stdin.flush()
                    number += 1
                run.stdin.close()
            status = run.wait(END_S)
            said = run.stderr.read().decode(errors="replace")
        if status != 0 or "Delivery failed" in said:
            self.refused.append(f"kcat ended with {status}: {said}")
        else:
            self.acknowledged += range(number)

    def consume(self) -> None:
        offset = ("-X", "auto.offset.reset=earliest")
        with self._run("-G", self.group, "-u", "-q", "-f", "%s\n", *offset, TOPIC) as run:
            assert run.stdout is not None
            stop = threading.Thread(target=self._stop_when_over, args=(run,), daemon=True)
            stop.start()
            for line in run.stdout:
                self.take(line.strip())
            stop.join()

    def _run(self, *arguments: str) -> Any:
        return subprocess.Popen(
            [self._program, "-E", "-b", self.servers, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if "-P" in arguments else subprocess.DEVNULL,
        )

    def _stop_when_over(self, run: subprocess.Popen[bytes]) -> None:
        self._over.wait()
        run.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.wait(10)
        run.kill()


class Java(StockClient):
    """Kafka's own client, in its verifiable programs."""

    name = "Java"

    def __init__(self, code: int, servers: str, jars: list[Path], directory: Path) -> None:
        super().__init__(code, servers)
        self._jars = jars
        # The program says by itself that it wants no repetitions; this is the client's default.
        self._config = directory / "producer.properties"
        self._config.write_text("retries=2147483647\n")

    def produce(self) -> None:
        tool = self._tool(
            "VerifiableProducer", "--acks", "-1", "--throughput", str(int(1 / PACE_S)),
            "--value-prefix", str(self.code), "--producer.config", str(self._config),
        )  # fmt: skip
        try:
            while not self._ending.wait(0.05):
                self._told(tool)
            tool.process.terminate()
            tool.process.wait(END_S)
        finally:
            tool.end()
        self._told(tool)
        if not tool.told("tool_data"):
            self.refused.append("VerifiableProducer has not come to its end")

    def _told(self, tool: Tool) -> None:
        for row in tool.told("producer_send_success")[len(self.acknowledged) :]:
            self.acknowledged.append(int(row["value"].partition(".")[2]))
        self.refused += [r["message"] for r in tool.take("producer_send_error")]

    def consume(self) -> None:
        tool = self._tool(
            "VerifiableConsumer", "--group-id", self.group, "--verbose",
            "--reset-policy", "earliest",
        )  # fmt: skip
        try:
            while not self._over.wait(0.05):
                for row in tool.take("record_data"):
                    self.take(row["value"])
        finally:
            tool.end()

    def _tool(self, name: str, *arguments: str) -> Tool:
        return Tool(
            self._jars, name, "--bootstrap-server", self.servers, "--topic", TOPIC, *arguments
        )
