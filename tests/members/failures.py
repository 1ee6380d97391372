"""Rounds of failure: brokers that stop, are killed or hang, under producers and a consumer that
note everything; and the judgement of what was noted.

A round is a value that a seed draws (`draw`).  `Bout` lets a cluster of real processes go through
it, with stock clients; `judge` compares what was acknowledged and what was seen with the log as it
is in the end, and is pure.  Nothing here sleeps in place of an event: a fault lasts until records
were acknowledged without its victim, or until the cluster has noticed.
"""

from __future__ import annotations

import enum
import hashlib
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import confluent_kafka

import kdirect
from kdirect.format import layout
from tests.support import wait_until

PARTITIONS = 2
MOST_IN_FLIGHT = 200
PACE_S = 0.002  # a producer's rest after a record for each partition
QUIET_RECORDS = 100  # acknowledged before, between and after faults
AGAIN_S = 45.0  # how long the records of all partitions may stay unacknowledged after a fault
END_S = 90.0
# By default a client waits for a broker that hangs for a minute, whoever leads meanwhile.
PATIENCE = {"socket.timeout.ms": 5000, "reconnect.backoff.max.ms": 500, "log_level": 0}


class Fault(enum.Enum):
    """What happens to a broker."""

    CLEAN_SHUTDOWN = "stopped, and started after a while"
    HARD_SHUTDOWN = "killed, and started after a while"
    CLEAN_BOUNCE = "stopped and started at once, twice"
    HARD_BOUNCE = "killed and started at once, twice"
    PAUSE = "stopped in its tracks until others lead"
    HICCUP = "stopped in its tracks for a moment"
    ALL_KILLED = "killed together with all others"


class Victim(enum.Enum):
    """Whom it happens to."""

    LEADER = "the leader of partition 0"
    CONTROLLER = "the controller"
    ANYBODY = "a broker drawn by the seed"


class Round(NamedTuple):
    """What a seed draws."""

    seed: int
    idempotent: bool
    faults: tuple[tuple[Fault, Victim], ...]

    def __str__(self) -> str:
        faults = ", ".join(f"{f.name.lower()} of {v.name.lower()}" for f, v in self.faults)
        return f"{'idempotent' if self.idempotent else 'plain'}: {faults}"


def draw(seed: int) -> Round:
    """The round of a seed: one to three faults, one after the other."""
    rng = random.Random(seed)
    faults = list(Fault)
    weights = [1 if fault is Fault.ALL_KILLED else 3 for fault in faults]
    count = rng.choice((1, 1, 2, 3))
    return Round(
        seed,
        rng.random() < 0.75,
        tuple((rng.choices(faults, weights)[0], rng.choice(list(Victim))) for _ in range(count)),
    )


# -- what is noted, and the judgement --------------------------------------------------------------


@dataclass
class Notes:
    """What clients have noted.  Values are ``producer:number``; a producer counts for each
    partition by itself.

    `sent`: (producer, partition) -> how many; `progress`: partition -> how many were acknowledged;
    `acknowledged`: (partition, offset) -> value;
    `failed`: values with the error; `seen`: (partition, offset) -> value, as a consumer read them
    while faults went on; `final`: partition -> (offset, value) of its whole log in the end."""

    sent: Counter[tuple[int, int]] = field(default_factory=Counter)
    progress: Counter[int] = field(default_factory=Counter)
    acknowledged: dict[tuple[int, int], bytes] = field(default_factory=dict)
    failed: list[tuple[bytes, str]] = field(default_factory=list)
    seen: dict[tuple[int, int], bytes] = field(default_factory=dict)
    contradictions: list[str] = field(default_factory=list)
    final: dict[int, list[tuple[int, bytes]]] = field(default_factory=dict)


def judge(notes: Notes, idempotent: bool) -> list[str]:
    """What is wrong, in sentences; empty where nothing is."""
    wrong = list(notes.contradictions)
    logs = {partition: dict(records) for partition, records in notes.final.items()}
    for what, noted in (("acknowledged", notes.acknowledged), ("read", notes.seen)):
        for (partition, offset), value in noted.items():
            there = logs.get(partition, {}).get(offset)
            if there != value:
                wrong.append(
                    f"{value!r} was {what} at {partition}@{offset}, where"
                    f" {'nothing' if there is None else repr(there)} is now"
                )
    for partition, records in notes.final.items():
        wrong += _order(partition, records, idempotent)
        offsets = [offset for offset, _ in records]
        if offsets != list(range(len(offsets))):
            wrong.append(f"the offsets of partition {partition} have gaps or repetitions")
        if not any(number == partition for number, _ in notes.seen):
            wrong.append(f"the consumer has read nothing of partition {partition}")
    wrong += _missing(notes)
    wrong += [f"{value!r} could not be delivered: {why}" for value, why in notes.failed]
    return wrong


def _missing(notes: Notes) -> list[str]:
    """Each record that was sent is there: the end of a round waits for all acknowledgements, and
    those of repeated records may name no offset."""
    wrong = []
    for (producer, partition), count in notes.sent.items():
        there = {value for _, value in notes.final.get(partition, ())}
        gone = [n for n in range(count) if b"%d:%d" % (producer, n) not in there]
        if gone:
            wrong.append(
                f"{len(gone)} of the {count} records of producer {producer} are not in partition"
                f" {partition}, the first is number {gone[0]}"
            )
    return wrong


def _order(partition: int, records: list[tuple[int, bytes]], idempotent: bool) -> list[str]:
    """Each idempotent producer's records are there once, in the order in which they were sent.  A
    plain one may repeat records, and send what came after them to a new leader meanwhile."""
    wrong = []
    last: dict[bytes, int] = {}
    for offset, value in records if idempotent else ():
        producer, _, text = value.partition(b":")
        number, before = int(text), last.get(producer, -1)
        if number <= before:
            wrong.append(f"{value!r} at {partition}@{offset} comes after number {before}")
        if number > before + 1:
            wrong.append(f"{value!r} at {partition}@{offset} comes before those sent before it")
        last[producer] = number
    return wrong


# -- logs on disk ----------------------------------------------------------------------------------


def batches(directory: Path) -> list[tuple[int, str]]:
    """(base offset, digest) of each batch in the files of one replica."""
    found = []
    for path in sorted(directory.glob("*.log")):
        data = path.read_bytes()
        at = 0
        while at + layout.BATCH_HEADER_BYTES <= len(data):
            base = int.from_bytes(data[at : at + 8], "big")
            length = int.from_bytes(data[at + 8 : at + 12], "big") + 12
            if length <= 12 or at + length > len(data):
                break
            found.append((base, hashlib.sha256(data[at : at + length]).hexdigest()))
            at += length
    return found


def differing_replicas(cluster: kdirect.Cluster, topic: str) -> list[str]:
    """Where the files of the replicas do not hold the same batches.  To be asked when every replica
    is in sync and nothing is produced."""
    wrong = []
    for number in range(PARTITIONS):
        logs = {
            node_id: batches(cluster.log_dirs(node_id)[0] / f"{topic}-{number}")
            for node_id in cluster.node_ids
        }
        first, *others = cluster.node_ids
        for other in others:
            for ours, theirs in zip(logs[first], logs[other], strict=False):
                if ours != theirs:
                    wrong.append(
                        f"{topic}-{number}: broker {first} has {ours} where broker {other} has"
                        f" {theirs}"
                    )
                    break
            else:
                if len(logs[first]) != len(logs[other]):
                    wrong.append(
                        f"{topic}-{number}: {len(logs[first])} batches at broker {first},"
                        f" {len(logs[other])} at broker {other}"
                    )
    return wrong


# -- clients ---------------------------------------------------------------------------------------


class Producing:
    """A stock producer on a thread of its own, which keeps some records in flight."""

    def __init__(self, number: int, servers: str, topic: str, notes: Notes, idempotent: bool):
        self._number = number
        self._topic = topic
        self._notes = notes
        self._producer = confluent_kafka.Producer(
            {
                "bootstrap.servers": servers,
                "acks": "all",
                "enable.idempotence": idempotent,
                # Several requests under way would be reordered by repetitions.
                "max.in.flight.requests.per.connection": 5 if idempotent else 1,
                "linger.ms": 2,
                "request.timeout.ms": 4000,
                **PATIENCE,
            }
        )
        self._in_flight = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.is_set():
            if self._in_flight >= MOST_IN_FLIGHT:
                self._producer.poll(0.05)
                continue
            for partition in range(PARTITIONS):
                count = self._notes.sent[self._number, partition]
                self._notes.sent[self._number, partition] += 1
                self._in_flight += 1
                self._producer.produce(
                    self._topic,
                    f"{self._number}:{count}".encode(),
                    partition=partition,
                    on_delivery=self._delivered,
                )
            self._producer.poll(PACE_S)

    def _delivered(self, error: Any, message: Any) -> None:
        self._in_flight -= 1
        if error is not None:
            self._notes.failed.append((message.value(), str(error)))
            return
        self._notes.progress[message.partition()] += 1
        if message.offset() is not None:  # a repeated record may be acknowledged without one
            place = (message.partition(), message.offset())
            before = self._notes.acknowledged.setdefault(place, message.value())
            if before != message.value():
                self._notes.contradictions.append(
                    f"{before!r} and {message.value()!r} were both acknowledged at {place}"
                )

    def finish(self) -> None:
        """Produce no more, and wait until everything is delivered."""
        self._end.set()
        self._thread.join()
        left = self._producer.flush(END_S)
        if left:
            self._notes.contradictions.append(
                f"producer {self._number}: {left} records had no answer after {END_S:g} s"
            )


class Watching:
    """A stock consumer on a thread of its own, which reads as the records come."""

    def __init__(self, servers: str, topic: str, notes: Notes):
        self._notes = notes
        self._consumer = consumer(servers)
        self._consumer.assign(
            [confluent_kafka.TopicPartition(topic, n, 0) for n in range(PARTITIONS)]
        )
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.is_set():
            for message in self._consumer.consume(500, 0.1):
                if message.error() is not None:
                    self._on_error(message)
                    continue
                place = (message.partition(), message.offset())
                before = self._notes.seen.setdefault(place, message.value())
                if before != message.value():
                    self._notes.contradictions.append(
                        f"{before!r} was read at {place}, and then {message.value()!r}"
                    )

    def _on_error(self, message: Any) -> None:
        if message.error().code() == confluent_kafka.KafkaError._AUTO_OFFSET_RESET:
            self._notes.contradictions.append(
                f"an offset that was read is gone: {message.error().str()}"
            )

    def finish(self) -> None:
        self._end.set()
        self._thread.join()
        self._consumer.close()


def consumer(servers: str) -> Any:
    """A stock consumer that takes an offset out of range for an error."""
    return confluent_kafka.Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "failures",
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            **PATIENCE,
        }
    )


def read_all(servers: str, topic: str) -> dict[int, list[tuple[int, bytes]]]:
    """The whole log of each partition."""
    reader = consumer(servers)
    found: dict[int, list[tuple[int, bytes]]] = {}
    try:
        for number in range(PARTITIONS):
            tp = confluent_kafka.TopicPartition(topic, number, 0)
            _, end = reader.get_watermark_offsets(tp, timeout=30)
            records = found[number] = []
            reader.assign([tp])
            deadline = time.monotonic() + END_S
            while len(records) < end:
                assert time.monotonic() < deadline, (
                    f"{len(records)} of {end} records of {topic}-{number} within {END_S:g} s"
                )
                for message in reader.consume(min(1000, end - len(records)), 1.0):
                    if message.error() is None:
                        records.append((message.offset(), message.value()))
    finally:
        reader.close()
    return found


# -- a round ---------------------------------------------------------------------------------------


class Bout:
    """One round on a cluster, with a topic of its own."""

    def __init__(self, cluster: kdirect.Cluster, round_: Round) -> None:
        self._cluster = cluster
        self._round = round_
        self._rng = random.Random(f"{round_.seed}:victims")
        self.topic = f"round-{round_.seed}"
        self.notes = Notes()
        self.steps: list[str] = []  # what was waited for, and for how long
        self._session = kdirect.connect(
            {"bootstrap.servers": cluster.bootstrap_servers, "transport": "tcp"}
        )

    def run(self) -> list[str]:
        """What is wrong; see `judge`."""
        servers = self._cluster.bootstrap_servers
        admin = self._session.admin
        try:
            admin.create_topic(self.topic, PARTITIONS, 3, {"min.insync.replicas": 2})
            idempotent = self._round.idempotent
            watching = Watching(servers, self.topic, self.notes)
            producing = [
                Producing(n, servers, self.topic, self.notes, idempotent) for n in range(2)
            ]
            try:
                self._progress("the first records were acknowledged")
                for fault, victim in self._round.faults:
                    node_id = self._victim(victim)
                    began = time.monotonic()
                    self._hit(fault, node_id)
                    self._note(f"{fault.name} of broker {node_id} was over", began)
                    self._progress(f"records were acknowledged after {fault.name}")
                    self._heal()
                for each in producing:
                    each.finish()
                self._read_on()
            finally:
                for each in producing:
                    each.finish()
                watching.finish()
            self._heal()
            began = time.monotonic()
            self.notes.final = read_all(servers, self.topic)
            self._note(f"{sum(map(len, self.notes.final.values()))} records were read", began)
            wrong = judge(self.notes, idempotent) + differing_replicas(self._cluster, self.topic)
            admin.delete_topic(self.topic)
            return wrong
        finally:
            self._session.close()

    def _victim(self, victim: Victim) -> int:
        admin = self._session.admin
        if victim is Victim.CONTROLLER:
            return admin.describe_cluster().controller
        if victim is Victim.LEADER:
            return admin.describe_topic(self.topic).leaders[0].leader
        return self._rng.choice(self._cluster.node_ids)

    def _hit(self, fault: Fault, node_id: int) -> None:
        cluster = self._cluster
        end = cluster.stop if fault.name.startswith("CLEAN") else cluster.kill
        if fault in (Fault.CLEAN_SHUTDOWN, Fault.HARD_SHUTDOWN):
            end(node_id)
            self._progress(f"records were acknowledged without broker {node_id}")
            cluster.start(node_id)
        elif fault in (Fault.CLEAN_BOUNCE, Fault.HARD_BOUNCE):
            for _ in range(2):
                end(node_id)
                cluster.start(node_id)
        elif fault is Fault.PAUSE:
            cluster.pause(node_id)
            try:
                self._progress(f"records were acknowledged while broker {node_id} hung")
            finally:
                cluster.resume(node_id)
        elif fault is Fault.HICCUP:
            cluster.pause(node_id)
            cluster.resume(node_id)
        else:
            for each in cluster.node_ids:
                cluster.kill(each)
            for each in cluster.node_ids:
                cluster.start(each)

    def _progress(self, what: str) -> None:
        """Wait until each partition has more acknowledged records."""
        began = time.monotonic()
        now = self.notes.progress
        start = Counter(now)
        wait_until(
            lambda: all(now[n] >= start[n] + QUIET_RECORDS for n in range(PARTITIONS)),
            lambda: (
                f"not within {AGAIN_S:g} s: {what}; by partition {dict(start)} before, and now"
                f" {dict(now)}"
            ),
            AGAIN_S,
        )
        self._note(what, began)

    def _read_on(self) -> None:
        """Wait until the consumer has read as many records as were acknowledged."""
        began = time.monotonic()
        wanted = self.notes.progress

        def read() -> Counter[int]:
            return Counter(partition for partition, _ in list(self.notes.seen))

        wait_until(
            lambda: all(read()[n] >= wanted[n] for n in range(PARTITIONS)),
            lambda: f"the consumer has read {dict(read())} of {dict(wanted)} after {END_S:g} s",
            END_S,
        )
        self._note("the consumer had read everything", began)

    def _picture(self, node_id: int) -> tuple[int, bool, tuple[Any, ...]]:
        """(controller, is every replica in sync, leaders of the topic), as one broker has it."""
        settings = {"bootstrap.servers": self._cluster.address(node_id), "transport": "tcp"}
        with kdirect.connect(settings) as session:
            health = session.admin.health()
            found = session.admin.describe_topic(self.topic).leaders
        leaders = tuple((p.leader, p.leader_epoch) for p in found)
        return health.controller, health.is_well, leaders

    def _note(self, what: str, began: float) -> None:
        self.steps.append(f"{time.monotonic() - began:5.2f} s until {what}")

    def _heal(self) -> None:
        """Wait until every replica is in sync again, and all brokers have the same picture: one
        that hung shows an old one at first."""
        began = time.monotonic()
        pictures: list[Any] = []

        def is_well() -> bool:
            pictures[:] = [self._picture(node_id) for node_id in self._cluster.node_ids]
            return all(well for _, well, _ in pictures) and all(
                picture == pictures[0] for picture in pictures
            )

        wait_until(is_well, lambda: f"not well after {END_S:g} s: {pictures}", END_S, every_s=0.05)
        self._note("every replica was in sync", began)
