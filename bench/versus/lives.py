"""Which clusters a row starts, in which order, and by which paths kdirect does the work.

Owns: the paths (who produces, how replicas get the records), the order of the clusters, and the
proofs that come before any figure: a path is what its name says, and acks=all waits for every
replica in sync.  What cannot be done yet is kept with its reason; no figure is made up for it.

A life of a cluster is one start: its brokers begin with empty directories and are warmed up before
anything counts.  Kafka's cluster goes first in the first round, kdirect's in the second, and so on.
"""

from __future__ import annotations

import subprocess
import time
import traceback
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from versus.clusters import Cluster, KafkaCluster, KdirectCluster, NotPossibleError
from versus.worker import LOW_LATENCY

HOLD_S = 0.5  # how long a follower stands still for the proof
PUSH_S = 3.0  # how long a leader may take until it pushes
GIVE_UP_MS = 15_000  # a record that is not acknowledged by then is a failure
STOCK_UNBATCHED = {
    "batch.num.messages": 1, "linger.ms": 0, "max.in.flight": 5,
    "queue.buffering.max.messages": 1000, "socket.nagle.disable": True, "log_level": 0,
}  # fmt: skip
Send = Callable[[bytes], Any]


@dataclass(frozen=True)
class Path:
    """A way for records to come to all replicas.  `key` is its name in results and rows; `own`:
    kdirect's client writes them over shm, else a stock client sends them over TCP; `pushed`: the
    leader writes them into its followers' files, else followers fetch them over TCP."""

    key: str
    own: bool
    pushed: bool
    label: str

    def row(self, name: str) -> str:
        """The first path has the row's own name."""
        return name if self is PATHS[0] else f"{name}.{self.key}"


KAFKA = Path("kafka", False, False, "stock client, Kafka's replication")
PATHS = (
    Path("push", True, True, "produced over shm, pushed"),
    Path("tcp-push", False, True, "produced over TCP, pushed"),
    Path("shm-fetch", True, False, "produced over shm, fetched over TCP"),
    Path("tcp-fetch", False, False, "produced over TCP, fetched over TCP"),
)
FIRST, STOCK_PUSH = PATHS[0], PATHS[1]


@dataclass
class Side:
    """What a figure says of a cluster that has ended."""

    key: str
    label: str
    settings: dict[str, Any] = field(default_factory=dict)


class Found:
    """What the lives of a row have found: for each path and each key of a figure the result of
    each life, and for each path that is not possible the reason."""

    def __init__(self) -> None:
        self.kdirect, self.kafka = Side("kdirect", "kdirect"), Side("kafka", "Apache Kafka")
        self.both = (self.kdirect, self.kafka)
        self.results: dict[str, dict[Hashable, list[Any]]] = {}
        self.missing: dict[str, str] = {}
        self.failed: set[str] = set()  # of the missing ones: those that went wrong half-way
        self.order: list[str] = []

    def add(self, path: Path, results: Mapping[Hashable, Any]) -> None:
        mine = self.results.setdefault(path.key, {})
        for key, result in results.items():
            mine.setdefault(key, []).append(result)

    def sides(self, path: Path) -> dict[str, dict[Hashable, list[Any]]]:
        """Both sides' results by side; kdirect's only if all its lives have them."""
        ours = {} if path.key in self.missing else {"kdirect": self.results[path.key]}
        return {**ours, "kafka": self.results[KAFKA.key]}

    def of(self, path: Path, key: Hashable) -> dict[str, list[Any]]:
        """The same of one key, as figures take them."""
        return {side: results[key] for side, results in self.sides(path).items()}

    def told(self, path: Path) -> dict[str, Any]:
        """What the settings of every figure say."""
        out: dict[str, Any] = {"path": path.key, "path_means": path.label, "order": self.order}
        if path.key in self.missing:
            out["not_measured"] = self.missing[path.key]
        if path.key in self.failed:
            out["failed"] = True
        return out

    def began(self, side: Side, cluster: Cluster) -> None:
        self.order.append(side.key)
        side.label = cluster.label
        if not side.settings:
            side.settings = cluster.settings


Work = Callable[[Cluster, Path], Mapping[Hashable, Any]]


def lives(
    rounds: int,
    work: Work,
    *,
    brokers: int = 3,
    paths: tuple[Path, ...] = PATHS,
    properties: Mapping[str, str] | None = None,
) -> Found:
    """Let `work` measure both clusters once a round.  It gets each cluster with each of its paths.
    A path of kdirect's that is not possible, or fails, is left out of the rest of the row."""
    from confluent_kafka import KafkaException

    from kdirect import KdirectError

    found = Found()

    def theirs() -> None:
        with KafkaCluster(brokers) as cluster:
            found.began(found.kafka, cluster)
            found.add(KAFKA, work(cluster, KAFKA))

    def ours() -> None:
        for pushed in (True, False):
            wanted = [p for p in paths if p.pushed is pushed and p.key not in found.missing]
            if not wanted:
                continue
            try:
                with KdirectCluster(
                    brokers, **{"rdma.replicate": str(pushed).lower()}, **(properties or {})
                ) as cluster:
                    found.began(found.kdirect, cluster)
                    for path in wanted:
                        attempt(cluster, path)
            except NotPossibleError as e:
                found.missing.update(dict.fromkeys((p.key for p in wanted), str(e)))

    def attempt(cluster: KdirectCluster, path: Path) -> None:
        try:
            prove(cluster, path)
        except NotPossibleError as e:
            found.missing[path.key] = str(e)
            return
        try:
            found.add(path, work(cluster, path))
        except (KdirectError, KafkaException, RuntimeError) as e:
            traceback.print_exc()
            found.missing[path.key] = str(NotPossibleError(f"it failed: {e}"))
            found.failed.add(path.key)

    for number in range(rounds):
        for run in (theirs, ours) if number % 2 == 0 else (ours, theirs):
            run()
    return found


def prove(cluster: KdirectCluster, path: Path) -> None:
    """NotPossibleError unless records take the path, and acks=all waits for a follower in sync that
    stands still."""
    from kdirect import KdirectError

    with cluster.topic("proof", 3) as topic:
        try:
            send, close = open_sender(cluster, path, topic, "all")
        except KdirectError as e:
            raise NotPossibleError(e) from e
        try:
            try:
                pushed = sends_until_pushed(cluster, path, topic, send)
            except (KdirectError, RuntimeError) as e:
                raise NotPossibleError(f"a record is not acknowledged: {e}") from e
            if pushed != path.pushed:
                raise NotPossibleError(
                    "followers fetch over TCP, nothing is pushed"
                    if path.pushed
                    else "records are pushed although rdma.replicate is false"
                )
            held = seconds_of_a_record(cluster, topic, send)
        finally:
            close()
        if held < 0.9 * HOLD_S:
            raise NotPossibleError(
                f"acks=all was answered after {held * 1e3:.0f} ms"
                f" while a replica in sync stood still for {HOLD_S * 1e3:.0f} ms"
            )


def sends_until_pushed(cluster: KdirectCluster, path: Path, topic: str, send: Send) -> bool:
    """Whether records are pushed in the end: a leader may begin to some time after the first."""
    end = time.perf_counter() + PUSH_S
    while True:
        for _ in range(50):
            send(b"v" * 512)
        if (pushed := cluster.pushes(topic)) or not path.pushed or time.perf_counter() > end:
            return pushed


def seconds_of_a_record(cluster: Cluster, topic: str, send: Send) -> float:
    """How long a record takes while a follower stands still for `HOLD_S`.  Another process lets it
    go on, because `send` may hold this one."""
    follower = cluster.follower(topic)
    with cluster.paused(follower):
        command = f"sleep {HOLD_S}; kill -CONT {cluster.pid(follower)}"
        helper = subprocess.Popen(["sh", "-c", command])
        began = time.perf_counter()
        try:
            send(b"held")
            return time.perf_counter() - began
        finally:
            helper.wait()


def open_sender(
    cluster: Cluster, path: Path, topic: str, acks: str
) -> tuple[Send, Callable[[], Any]]:
    """A call that sends a record and returns when it is acknowledged, and one that closes."""
    if path.own:
        import kdirect

        ours = kdirect.Producer(
            {"bootstrap.servers": cluster.address, "transport": "shm", "acks": acks,
             "delivery.timeout.ms": GIVE_UP_MS}
        )  # fmt: skip
        return lambda value: ours.produce_sync(topic, value, None, partition=0), ours.close
    from confluent_kafka import Producer

    theirs = Producer(
        {"bootstrap.servers": cluster.address, **LOW_LATENCY, "acks": acks,
         "message.timeout.ms": GIVE_UP_MS, "log_level": 0}
    )  # fmt: skip
    done: list[Any] = []

    def send(value: bytes) -> None:
        done.clear()
        theirs.produce(topic, value, partition=0, on_delivery=lambda error, _: done.append(error))
        while not done:
            theirs.poll(1)
        if done[0] is not None:
            raise RuntimeError(str(done[0]))

    return send, lambda: theirs.flush(10)


def warm_up(cluster: Cluster, path: Path, replicas: int, acks: str, seconds: float) -> None:
    """Pipelined records of all sizes for so long, by the stock client, so that a JVM compiles what
    it will run; nothing of it counts.  Then one at a time by the path itself."""
    from confluent_kafka import Producer

    with cluster.topic("warm", replicas) as topic:
        flood = Producer({"bootstrap.servers": cluster.address, **STOCK_UNBATCHED, "acks": acks})
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            for size in (32, 512, 4096, 32768):
                try:
                    flood.produce(topic, b"v" * size, partition=0)
                except BufferError:
                    flood.poll(0.01)
            flood.poll(0)
        flood.flush(60)
        send, close = open_sender(cluster, path, topic, acks)
        for _ in range(50):
            send(b"v" * 512)
        close()


def high_watermark(cluster: Cluster, topic: str) -> int:
    """Where the records end that consumers may see."""
    from confluent_kafka import Consumer, TopicPartition

    reader = Consumer({"bootstrap.servers": cluster.address, "group.id": "bench", "log_level": 0})
    try:
        return int(reader.get_watermark_offsets(TopicPartition(topic, 0), timeout=30)[1])
    finally:
        reader.close()
