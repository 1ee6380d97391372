"""The two systems under test: a broker of each in a process of its own, its log on tmpfs, on the
cores that clients leave.

Owns: starting, stopping, topics, and the CPU time of a broker.  Both have the same face (`System`);
what is not the same is in `settings` and goes into the report.  With more than two cores the
brokers have the upper half of them and clients the lower; with two, all share.
"""

from __future__ import annotations

import base64
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from versus import jars

HEAP = "2g"
# What Kafka's own start script gives its JVM, with a fixed heap.
JVM = ["-server", f"-Xms{HEAP}", f"-Xmx{HEAP}", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20",
       "-XX:InitiatingHeapOccupancyPercent=35",
       "-XX:+ExplicitGCInvokesConcurrent", "-Djava.awt.headless=true"]  # fmt: skip
KAFKA = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "controller.listener.names": "CONTROLLER",
    "inter.broker.listener.name": "PLAINTEXT",
    "num.network.threads": "3",
    "num.io.threads": "8",
    "socket.send.buffer.bytes": "1048576",
    "socket.receive.buffer.bytes": "1048576",
    "log.segment.delete.delay.ms": "100",
    "log.retention.check.interval.ms": "300000",
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "group.initial.rebalance.delay.ms": "0",
    "auto.create.topics.enable": "false",
}
KDIRECT: dict[str, str] = {
    "log.segment.delete.delay.ms": "100",
    "log.retention.check.interval.ms": "300000",
}


def tmpfs() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


@cache
def cores() -> tuple[set[int], set[int]]:
    """Cores of clients, cores of brokers."""
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) <= 2:
        return set(allowed), set(allowed)
    return set(allowed[: len(allowed) // 2]), set(allowed[len(allowed) // 2 :])


class System:
    """A broker that runs.  `key` is its name in results, `label` what a reader sees."""

    key: str
    label: str
    address: str
    settings: dict[str, Any]
    process: subprocess.Popen[str]

    def cpu_s(self) -> float:
        """CPU time of the broker so far, all threads."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def create(
        self, topic: str, partitions: int = 1, configs: Mapping[str, str] | None = None
    ) -> None:
        raise NotImplementedError

    def delete(self, topic: str) -> None:
        raise NotImplementedError

    def truncate(self, topic: str) -> None:
        """Delete the records of a topic of one partition, so that the next turn finds as much free
        memory as this one."""
        raise NotImplementedError

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Kdirect(System):
    key, label = "kdirect", "kdirect"

    def __init__(self, directory: str, **more: str) -> None:
        from kdirect.client import connect

        properties = {**KDIRECT, **more}
        sets = [x for k, v in properties.items() for x in ("--set", f"{k}={v}")]
        command = [
            sys.executable,
            "-m",
            "kdirect.cli",
            "broker",
            "--listeners",
            "127.0.0.1:0",
            "--log-dirs",
            f"{directory}/kdirect",
            *sets,
        ]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            preexec_fn=_broker_cores,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if "ready on" not in line:
            raise RuntimeError(f"kdirect's broker did not start: {line!r}")
        self.address = line.rsplit(" ", 1)[1].strip()
        self.session = connect({"bootstrap.servers": self.address, "transport": "shm"})
        self.settings = {"transport": "shm", **properties}

    def create(
        self, topic: str, partitions: int = 1, configs: Mapping[str, str] | None = None
    ) -> None:
        self.session.admin.create_topic(topic, partitions, configs=configs)

    def delete(self, topic: str) -> None:
        self.session.admin.delete_topic(topic)

    def truncate(self, topic: str) -> None:
        from kdirect.model import TopicPartition

        self.session.admin.delete_records({TopicPartition(topic, 0): -1})

    def stop(self) -> None:
        self.session.close()
        super().stop()


def format_arguments(cluster: str, file: str) -> list[str]:
    """What Kafka's StorageTool is called with.  A cluster id may begin with a dash: an argument of
    its own would be an option."""
    return ["format", f"--cluster-id={cluster}", f"--config={file}"]


def java(directory: Path, *more: str) -> list[str]:
    """How a JVM with Kafka's jars, and those of `more` sets, is called that logs nothing; options
    go in after the third."""
    logging = directory / "log4j2.yaml"
    logging.write_text("Configuration:\n  status: off\n  Loggers:\n    Root:\n      level: off\n")
    path = os.pathsep.join(str(jar) for kind in ("broker", *more) for jar in jars.jars(kind))
    return ["java", "-cp", path, f"-Dlog4j2.configurationFile={logging}"]


def format_storage(command: list[str], cluster: str, file: str) -> None:
    """Prepare the log directories that a file of properties names."""
    tool = ["-XX:TieredStopAtLevel=1", "kafka.tools.StorageTool", *format_arguments(cluster, file)]
    run = subprocess.run([*command, *tool], capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(
            f"Kafka's storage was not formatted: {run.stdout[-1000:]}{run.stderr[-1000:]}"
        )


class Kafka(System):
    key = "kafka"

    def __init__(
        self,
        directory: str,
        given: Mapping[str, str] | None = None,
        with_jars: tuple[str, ...] = (),
        jvm: Sequence[str] = JVM,
    ) -> None:
        from confluent_kafka.admin import AdminClient

        self.label = f"Apache Kafka {jars.version('kafka_2.13')}"
        client_port, controller_port = free_ports(2)
        self.address = f"127.0.0.1:{client_port}"
        wanted = {**KAFKA, **(given or {})}
        properties = {
            **wanted,
            "listeners": f"PLAINTEXT://127.0.0.1:{client_port},"
            f"CONTROLLER://127.0.0.1:{controller_port}",
            "controller.quorum.voters": f"1@127.0.0.1:{controller_port}",
            "log.dirs": f"{directory}/kafka",
        }
        self.settings = {"jvm": " ".join(jvm), **wanted}
        file = Path(directory, "server.properties")
        file.write_text("".join(f"{k}={v}\n" for k, v in properties.items()))
        command = java(Path(directory), *with_jars)
        cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        format_storage(command, cluster, str(file))
        self.errors = Path(directory, "kafka.err")
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [*command[:3], *jvm, *command[3:], "kafka.Kafka", str(file)],
                stdout=errors, stderr=errors, text=True, preexec_fn=_broker_cores,
            )  # fmt: skip
        self.admin = AdminClient({"bootstrap.servers": self.address, "log_level": 0})
        self._until_ready()

    def _until_ready(self) -> None:
        from confluent_kafka import KafkaException

        deadline = time.monotonic() + 90
        while True:
            if self.process.poll() is not None:
                raise RuntimeError(
                    f"Kafka ended with status {self.process.returncode}:"
                    f" {self.errors.read_text()[-2000:]}"
                )
            try:
                if self.admin.list_topics(timeout=1).brokers:
                    return
            except KafkaException:
                if time.monotonic() > deadline:
                    raise RuntimeError(
                        f"Kafka was not ready within 90 s: {self.errors.read_text()[-2000:]}"
                    ) from None
            time.sleep(0.1)

    def create(
        self, topic: str, partitions: int = 1, configs: Mapping[str, str] | None = None
    ) -> None:
        from confluent_kafka.admin import NewTopic

        made = NewTopic(topic, partitions, 1, config=dict(configs or {}))
        self.admin.create_topics([made])[topic].result(30)
        deadline = time.monotonic() + 30  # until every partition has a leader
        while True:
            known = self.admin.list_topics(topic, timeout=10).topics[topic]
            if (
                known.error is None
                and len(known.partitions) == partitions
                and all(p.leader >= 0 for p in known.partitions.values())
            ):
                return
            if time.monotonic() > deadline:
                raise RuntimeError(f"Kafka's topic {topic} has no leaders")
            time.sleep(0.05)

    def delete(self, topic: str) -> None:
        self.admin.delete_topics([topic])[topic].result(30)

    def truncate(self, topic: str) -> None:
        self.delete(topic)  # DeleteRecords would leave the files until the next check
        deadline = time.monotonic() + 30
        while topic in self.admin.list_topics(timeout=10).topics:
            if time.monotonic() > deadline:
                raise RuntimeError(f"Kafka did not delete topic {topic}")
            time.sleep(0.05)
        self.create(topic)


class Pair:
    """The two brokers."""

    def __init__(self, kdirect: Kdirect, kafka: Kafka) -> None:
        self.kdirect, self.kafka = kdirect, kafka
        self.both: tuple[System, System] = (kdirect, kafka)

    @contextmanager
    def topic(
        self, name: str, partitions: int = 1, configs: Mapping[str, str] | None = None
    ) -> Iterator[str]:
        """A topic at both, deleted in the end."""
        full = f"{name}-{uuid.uuid4().hex[:6]}"
        for system in self.both:
            system.create(full, partitions, configs)
        try:
            yield full
        finally:
            for system in self.both:
                system.delete(full)


_shared: ExitStack | None = None
_pair: Pair | None = None
_directory = ""


@contextmanager
def pair() -> Iterator[Pair]:
    """Both brokers, started for the first row of a process that asks and stopped by `stop_all`."""
    global _pair
    if _pair is None:
        where = directory()
        try:
            kdirect = Kdirect(where)
            at_end(kdirect.stop)
            kafka = Kafka(where)
            at_end(kafka.stop)
        except BaseException:
            stop_all()
            raise
        _pair = Pair(kdirect, kafka)
    yield _pair


def directory() -> str:
    """Where brokers have their logs: on tmpfs, removed in the end.  From the first call on this
    process is on the cores of clients."""
    global _shared, _directory
    if _shared is None:
        _shared = ExitStack()
        _directory = tempfile.mkdtemp(prefix="kdirect-versus-", dir=tmpfs())
        _shared.callback(shutil.rmtree, _directory, ignore_errors=True)
        os.sched_setaffinity(0, cores()[0])
    return _directory


def at_end(callback: Any) -> None:
    """Have `callback` called before the brokers stop."""
    directory()
    assert _shared is not None
    _shared.callback(callback)


def stop_all() -> None:
    global _pair, _shared
    stack, _shared, _pair = _shared, None, None
    if stack is not None:
        stack.close()


def _broker_cores() -> None:
    os.sched_setaffinity(0, cores()[1])


def free_ports(count: int) -> list[int]:
    """TCP ports that were free a moment ago."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]
