"""The two clusters under test: brokers of each in processes of their own on this machine, one
cluster at a time.

Owns: starting and stopping them, killing, pausing and bringing back a broker, topics with replicas,
and what a run needs to see from outside: who leads, who is in sync, which process is whose.  Both
have the same face (`Cluster`), and both are looked at through the same stock client.  Kafka's
brokers are three nodes that serve and vote, so that any of them may be killed; a fourth only
serves.  kdirect's are those of `kdirect.Cluster`, with its ZooKeeper beside them.
"""

from __future__ import annotations

import base64
import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from versus import jars, systems

HEAP = "512m"
JVM = [option.replace(systems.HEAP, HEAP) for option in systems.JVM]
VOTERS = 3
MIN_IN_SYNC = 2
READY_S, WAIT_S = 120.0, 90.0
POLL_S = 0.02


class NotPossibleError(RuntimeError):
    """kdirect cannot do yet what a figure is about; the text says in one line what is missing."""

    def __init__(self, why: object) -> None:
        super().__init__(" ".join(str(why).split())[:300])


class Cluster:
    """A cluster that runs.  `key` is its name in results, `label` what a reader sees."""

    key: str
    label: str
    address: str
    settings: dict[str, Any]
    node_ids: list[int]

    def pid(self, node_id: int) -> int:
        raise NotImplementedError

    def kill(self, node_id: int) -> None:
        """End a broker by SIGKILL, and wait until its process is gone."""
        raise NotImplementedError

    def start(self, node_id: int) -> None:
        """Bring back a broker that was killed; it may still be on its way when this returns."""
        raise NotImplementedError

    def stop(self) -> None:
        raise NotImplementedError

    # -- what both do in the same way --------------------------------------------------------------

    @property
    def admin(self) -> Any:
        """A stock client's, which has never heard of this cluster: old news cannot come from it."""
        from confluent_kafka.admin import AdminClient

        return AdminClient({"bootstrap.servers": self.address, "log_level": 0})

    @contextmanager
    def paused(self, node_id: int) -> Iterator[None]:
        """All threads of a broker stand still."""
        pause(self.pid(node_id))
        try:
            yield
        finally:
            os.kill(self.pid(node_id), signal.SIGCONT)

    def memory_bytes(self, node_id: int) -> int:
        """The memory of a broker's own: without pages of files, which the log's are."""
        status = Path(f"/proc/{self.pid(node_id)}/status").read_text()
        return next(
            int(line.split()[1]) << 10
            for line in status.splitlines()
            if line.startswith("RssAnon:")
        )

    @contextmanager
    def topic(self, name: str, replicas: int) -> Iterator[str]:
        """A topic of one partition with all its replicas in sync, deleted in the end."""
        from confluent_kafka.admin import NewTopic

        full = f"{name}-{uuid.uuid4().hex[:6]}"
        least = {"min.insync.replicas": str(min(MIN_IN_SYNC, replicas))}
        admin = self.admin
        admin.create_topics([NewTopic(full, 1, replicas, config=least)])[full].result(30)
        self.until_in_sync(full, replicas)
        try:
            yield full
        finally:
            admin.delete_topics([full])[full].result(30)

    def leader(self, topic: str, without: int = -1) -> int:
        """Who leads its partition, once that is somebody other than `without`."""
        admin = self.admin
        return self._until(
            lambda: next(
                (p.leader for p in self._partitions(admin, topic) if p.leader not in (-1, without)),
                None,
            ),
            f"a leader of {topic}",
        )

    def follower(self, topic: str) -> int:
        """A broker in sync that does not lead."""
        (found,) = self._partitions(self.admin, topic)
        return max(node for node in found.isrs if node != found.leader)

    def until_in_sync(self, topic: str, replicas: int) -> None:
        admin = self.admin
        self._until(
            lambda: (
                any(
                    len(p.isrs) == replicas and p.leader >= 0
                    for p in self._partitions(admin, topic)
                )
                or None
            ),
            f"{replicas} replicas of {topic} in sync",
        )

    def until_serving(self) -> None:
        """Until every broker, asked by itself, names them all."""
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient

        def serves(address: str) -> bool | None:
            try:
                client = AdminClient({"bootstrap.servers": address, "log_level": 0})
                known = client.list_topics(timeout=2).brokers
            except KafkaException:
                self.check()
                return None
            return len(known) == len(self.node_ids) or None

        for address in self.address.split(","):
            self._until(lambda address=address: serves(address), f"broker {address}", READY_S)

    def check(self) -> None:
        """An error if a broker has ended by itself."""

    def _partitions(self, admin: Any, topic: str) -> list[Any]:
        from confluent_kafka import KafkaException

        try:
            found = admin.list_topics(topic, timeout=5).topics[topic]
        except KafkaException:
            return []
        return list(found.partitions.values())

    def _until(self, ask: Callable[[], Any], what: str, limit_s: float = WAIT_S) -> Any:
        deadline = time.monotonic() + limit_s
        while (answer := ask()) is None:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.label}: no {what} within {limit_s:g} s")
            time.sleep(POLL_S)
        return answer

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


class KafkaCluster(Cluster):
    key = "kafka"

    def __init__(self, brokers: int = 3) -> None:
        self.label = f"Apache Kafka {jars.version('kafka_2.13')}"
        self.settings = {
            "jvm": " ".join(JVM), "voters": VOTERS,
            "min.insync.replicas": str(MIN_IN_SYNC), **systems.KAFKA,
        }  # fmt: skip
        self.node_ids = list(range(1, brokers + 1))
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._directory = Path(tempfile.mkdtemp(prefix="kdirect-versus-", dir=systems.tmpfs()))
        try:
            self._java = systems.java(self._directory)
            self._write_properties(systems.free_ports(2 * brokers))
            self._format()
            for node_id in self.node_ids:
                self.start(node_id)
            self.until_serving()
        except BaseException:
            self.stop()
            raise

    def _file(self, node_id: int) -> Path:
        return self._directory / f"broker-{node_id}.properties"

    def _errors(self, node_id: int) -> Path:
        return self._directory / f"broker-{node_id}.err"

    def _write_properties(self, ports: list[int]) -> None:
        clients = dict(zip(self.node_ids, ports[::2], strict=True))
        voters = dict(zip(self.node_ids[:VOTERS], ports[1::2], strict=False))
        self.address = ",".join(f"127.0.0.1:{port}" for port in clients.values())
        for node_id, port in clients.items():
            listeners = [f"PLAINTEXT://127.0.0.1:{port}"]
            if node_id in voters:
                listeners.append(f"CONTROLLER://127.0.0.1:{voters[node_id]}")
            properties = {
                **systems.KAFKA,
                "node.id": node_id,
                "process.roles": "broker,controller" if node_id in voters else "broker",
                "listeners": ",".join(listeners),
                "controller.quorum.voters": ",".join(
                    f"{voter}@127.0.0.1:{at}" for voter, at in voters.items()
                ),
                "min.insync.replicas": MIN_IN_SYNC,
                "log.dirs": self._directory / f"broker-{node_id}",
            }
            self._file(node_id).write_text("".join(f"{k}={v}\n" for k, v in properties.items()))

    def _format(self) -> None:
        cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        for node_id in self.node_ids:
            systems.format_storage(self._java, cluster, str(self._file(node_id)))

    def pid(self, node_id: int) -> int:
        return self._processes[node_id].pid

    def start(self, node_id: int) -> None:
        command = [*self._java[:3], *JVM, *self._java[3:], "kafka.Kafka", str(self._file(node_id))]
        with self._errors(node_id).open("ab") as errors, on_the_cores_of_brokers():
            self._processes[node_id] = subprocess.Popen(command, stdout=errors, stderr=errors)

    def kill(self, node_id: int) -> None:
        self._processes[node_id].kill()
        self._processes[node_id].wait()

    def check(self) -> None:
        for node_id, process in self._processes.items():
            if process.poll() is not None:
                raise RuntimeError(
                    f"Kafka's broker {node_id} ended with status {process.returncode}:"
                    f" {self._errors(node_id).read_text()[-2000:]}"
                )

    def stop(self) -> None:
        # What they hold is removed, so there is nothing to hand over in order.
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)


class KdirectCluster(Cluster):
    key, label = "kdirect", "kdirect"

    def __init__(self, brokers: int = 3, **properties: str) -> None:
        import kdirect

        made = getattr(kdirect, "Cluster", None)
        if made is None:
            raise NotPossibleError("this kdirect has no kdirect.Cluster")
        self.settings = {
            "min.insync.replicas": str(MIN_IN_SYNC), **systems.KDIRECT, **properties,
        }  # fmt: skip
        self._directory = Path(tempfile.mkdtemp(prefix="kdirect-versus-", dir=systems.tmpfs()))
        self._cluster = made(brokers=brokers, directory=self._directory, properties=self.settings)
        try:
            with on_the_cores_of_brokers():
                self._cluster.start()
            self.node_ids = list(self._cluster.node_ids)
            self.address = self._cluster.bootstrap_servers
            self.until_serving()
        except BaseException as e:
            self.stop()
            if isinstance(e, kdirect.KdirectError):
                raise NotPossibleError(f"the cluster does not start: {e}") from e
            raise

    def pid(self, node_id: int) -> int:
        return int(self._cluster.pid(node_id))

    def start(self, node_id: int) -> None:
        with on_the_cores_of_brokers():
            self._cluster.start(node_id)

    def kill(self, node_id: int) -> None:
        self._cluster.kill(node_id)

    def stop(self) -> None:
        self._cluster.stop()
        shutil.rmtree(self._directory, ignore_errors=True)

    def pushes(self, topic: str) -> bool:
        """Whether records of the topic are pushed: its leader has files of a follower mapped."""
        leader = self.leader(topic)
        maps = Path(f"/proc/{self.pid(leader)}/maps").read_text()
        return any(
            f"{directory}/{topic}-0/" in maps
            for node_id in self.node_ids
            if node_id != leader
            for directory in self._cluster.log_dirs(node_id)
        )


def pause(pid: int) -> None:
    """Stop a process in its tracks, and wait until all its threads have."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 10
    while any(
        path.read_text().rsplit(")", 1)[1].split()[0] not in "TZ"
        for path in Path(f"/proc/{pid}/task").glob("*/stat")
    ):
        if time.monotonic() > deadline:
            raise RuntimeError(f"process {pid} did not stop")
        time.sleep(0.001)


@contextmanager
def on_the_cores_of_brokers() -> Iterator[None]:
    """What is started here inherits them."""
    clients, brokers = systems.cores()
    os.sched_setaffinity(0, brokers)
    try:
        yield
    finally:
        os.sched_setaffinity(0, clients)
