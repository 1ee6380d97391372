"""Kafka's own performance tools in a JVM that stays warm.

Owns: a JVM with Kafka's jars and a py4j gateway, in which ProducerPerformance and
ConsumerPerformance are called as their command lines would, again and again, and the reading of the
lines that they print.
"""

from __future__ import annotations

import os
import queue
import subprocess
import threading
from typing import Any

from versus import jars, systems

PRODUCER = "org.apache.kafka.tools.ProducerPerformance"
CONSUMER = "org.apache.kafka.tools.ConsumerPerformance"
UNBATCHED = {"batch.size": 0, "linger.ms": 0}
BATCHED = {
    "batch.size": 1 << 20,
    "linger.ms": 5,
    "buffer.memory": 128 << 20,
    "max.request.size": 4 << 20,
}


class PerfTools:
    def __init__(self) -> None:
        from py4j.java_gateway import GatewayParameters, JavaGateway

        path = os.pathsep.join(str(jar) for jar in [*jars.jars("broker"), jars.pyspark_jar("py4j")])
        command = ["java", "-cp", path, "-Xmx1g", "-Dlog4j2.level=off", "py4j.GatewayServer", "0"]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout is not None
        port = int(self.process.stdout.readline())
        self.lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.gateway = JavaGateway(gateway_parameters=GatewayParameters(port=port))

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line.strip())

    def produce(
        self, address: str, topic: str, records: int, size: int, properties: dict[str, Any]
    ) -> float:
        """Records a second of one run of ProducerPerformance."""
        props = [
            f"{k}={v}" for k, v in {"bootstrap.servers": address, "acks": 1, **properties}.items()
        ]
        arguments = [
            "--topic",
            topic,
            "--num-records",
            str(records),
            "--record-size",
            str(size),
            "--throughput",
            "-1",
        ]
        self._main(PRODUCER, [*arguments, "--producer-props", *props])
        line = self._line(
            lambda line: line.startswith(f"{records} records sent") and "99th" in line
        )
        return float(line.split(",")[1].split()[0])

    def consume(self, address: str, topic: str, records: int) -> float:
        """Bytes a second of one run of ConsumerPerformance, by its own figure without the time to
        join a group."""
        arguments = [
            "--topic",
            topic,
            "--messages",
            str(records),
            "--bootstrap-server",
            address,
            "--hide-header",
        ]
        self._main(CONSUMER, [*arguments, "--fetch-size", str(4 << 20)])
        line = self._line(lambda line: line.count(",") >= 9)
        return float(line.split(",")[-2]) * (1 << 20)

    def _main(self, tool: str, arguments: list[str]) -> None:
        array = self.gateway.new_array(self.gateway.jvm.java.lang.String, len(arguments))
        for i, argument in enumerate(arguments):
            array[i] = argument
        java_class = self.gateway.jvm
        for part in tool.split("."):
            java_class = getattr(java_class, part)
        java_class.main(array)

    def _line(self, wanted: Any) -> str:
        seen = []
        try:
            while True:
                line = self.lines.get(timeout=5)
                seen.append(line)
                if wanted(line):
                    return line
        except queue.Empty:
            raise RuntimeError(f"Kafka's tool did not say its result: {seen[-5:]}") from None

    def close(self) -> None:
        self.gateway.close()
        self.process.kill()
        self.process.wait()


_tools: PerfTools | None = None


def tools() -> PerfTools:
    """The JVM of this process, which ends with the brokers."""
    global _tools
    if _tools is None:
        _tools = PerfTools()
        systems.at_end(_close)
    return _tools


def _close() -> None:
    global _tools
    if _tools is not None:
        _tools.close()
        _tools = None
