"""Rounds of failure: brokers that stop, are killed, hang, are parted or have no room, under
producers and consumers that note everything.

A round is a value that a seed draws (`draw`).  `Bout` lets a cluster of real processes go through
it, with stock clients; `tests.members.judgement` says what is wrong.  Nothing here sleeps in place
of an event: a fault lasts until records were acknowledged without its victim, or until the cluster
has noticed.  Some faults may keep all records waiting, since they part a leader from its controller
alone: these last for `GREY_S`.
"""

from __future__ import annotations

import enum
import random
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import confluent_kafka

import kdirect
from tests.members.apart import ClusterApart
from tests.members.inflicted import Disk, End, cut_links
from tests.members.java_tools import Tool
from tests.members.judgement import Notes, differing_replicas, judge
from tests.support import wait_until

PARTITIONS = 2
SEGMENT_BYTES = 1 << 18  # some rolls in each round
KEY = bytes(500)
MOST_IN_FLIGHT = 200
PACE_S = 0.002  # a producer's rest after a record for each partition
QUIET_RECORDS = 100  # acknowledged before, between and after faults
AGAIN_S = 45.0  # how long the records of all partitions may stay unacknowledged after a fault
END_S = 90.0
GREY_S = 6.0
CUTS = 4
# By default a client waits for a broker that hangs for a minute, whoever leads meanwhile.
PATIENCE = {"socket.timeout.ms": 5000, "reconnect.backoff.max.ms": 500, "log_level": 0}


class Setting(enum.Enum):
    """How the brokers reach each other."""

    PUSHED = "leaders write into their followers' files"
    FETCHED = "rdma.replicate=false: followers fetch"
    APART = "each on a network of its own: followers fetch over TCP"


class Fault(enum.Enum):
    """What happens to a broker."""

    CLEAN_SHUTDOWN = "stopped, and started after a while"
    HARD_SHUTDOWN = "killed, and started after a while"
    CLEAN_BOUNCE = "stopped and started at once, twice"
    HARD_BOUNCE = "killed and started at once, twice"
    PAUSE = "stopped in its tracks until others lead"
    HICCUP = "stopped in its tracks for a moment"
    ALL_KILLED = "killed together with all others"
    CUT_LINKS = "the queue pairs between it and others are cut, time and again"
    FULL_DISK = "the disk of one that follows is full until others go on without it"
    UNPLUGGED = "it is cut off from the network until others lead"
    SEPARATED = "it and other brokers are cut off from each other, but not from ZooKeeper"
    UNHEARD = "what it sends to other brokers is lost, and what they send arrives"


class Victim(enum.Enum):
    """Whom it happens to."""

    LEADER = "the leader of partition 0"
    CONTROLLER = "the controller"
    ANYBODY = "a broker drawn by the seed"


ANYWHERE = [fault for fault in Fault if fault.name.startswith(("CLEAN", "HARD", "PAUSE", "HIC"))]
FAULTS = {
    Setting.PUSHED: [
        *ANYWHERE,
        Fault.ALL_KILLED,
        Fault.CUT_LINKS,
        Fault.CUT_LINKS,
        Fault.FULL_DISK,
    ],
    Setting.FETCHED: [*ANYWHERE, Fault.ALL_KILLED, Fault.FULL_DISK],
    Setting.APART: [*ANYWHERE, Fault.UNPLUGGED, Fault.UNPLUGGED, Fault.SEPARATED, Fault.UNHEARD],
}


class Round(NamedTuple):
    """What a seed draws."""

    seed: int
    setting: Setting
    idempotent: bool
    faults: tuple[tuple[Fault, Victim], ...]
    verifiable: bool  # VerifiableProducer and VerifiableConsumer take part

    def __str__(self) -> str:
        faults = ", ".join(f"{f.name.lower()} of {v.name.lower()}" for f, v in self.faults)
        how = "idempotent" if self.idempotent else "plain"
        how += ", verifiable" if self.verifiable else ""
        return f"{self.setting.name.lower()}, {how}: {faults}"


def draw(seed: int) -> Round:
    """The round of a seed: one to three faults, one after the other."""
    rng = random.Random(seed)
    setting = rng.choices(list(Setting), (5, 2, 3))[0]
    faults = FAULTS[setting]
    count = rng.choice((1, 1, 2, 3))
    idempotent = rng.random() < 0.75
    drawn = tuple((rng.choice(faults), rng.choice(list(Victim))) for _ in range(count))
    # A broker with a full disk may coordinate its group, whose commits would be refused.
    verifiable = rng.random() < 0.2 and all(fault is not Fault.FULL_DISK for fault, _ in drawn)
    return Round(seed, setting, idempotent, drawn, verifiable)


def choose(count: int, seed: object) -> list[int]:
    """Seeds of so many rounds, those of one setting together.  Every fault comes in them, if there
    are enough."""
    rng = random.Random(f"{seed}:rounds")
    missing = set(Fault)
    chosen: list[Round] = []
    while len(chosen) < count:
        drawn = draw(rng.randrange(2**32))
        news = missing & {fault for fault, _ in drawn.faults}
        if news or len(missing) < count - len(chosen):
            missing -= news
            chosen.append(drawn)
    settings = list(Setting)
    return [r.seed for r in sorted(chosen, key=lambda r: settings.index(r.setting))]


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
                    key=KEY,
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


class Verifiable:
    """Kafka's VerifiableProducer, and a VerifiableConsumer in a group."""

    def __init__(
        self, jars: list[Path], directory: Path, servers: str, topic: str, notes: Notes,
        idempotent: bool,
    ) -> None:  # fmt: skip
        self._notes = notes
        where = ("--bootstrap-server", servers, "--topic", topic)
        config = {
            "producer": {
                "enable.idempotence": str(idempotent).lower(),
                "max.in.flight.requests.per.connection": 5 if idempotent else 1,
                "retries": 2**31 - 1,
                "request.timeout.ms": 4000,
            },
            "consumer": {"request.timeout.ms": 5000, "default.api.timeout.ms": 60_000},
        }
        files = {}
        for name, properties in config.items():
            files[name] = directory / f"{topic}-{name}.properties"
            files[name].write_text("".join(f"{k}={v}\n" for k, v in properties.items()))
        self._consumer = Tool(
            jars, "VerifiableConsumer", *where, "--group-id", topic, "--verbose",
            "--reset-policy", "earliest", "--consumer.config", str(files["consumer"]),
        )  # fmt: skip
        self._producer = Tool(
            jars, "VerifiableProducer", *where, "--throughput", "200", "--acks", "-1",
            "--value-prefix", "9", "--producer.config", str(files["producer"]),
        )  # fmt: skip
        self._tools = (self._producer, self._consumer)
        self._acknowledged: set[str] = set()
        self._read: set[str] = set()

    def look(self) -> int:
        """Take what both have said; how many records were read."""
        notes = self._notes
        for row in self._producer.take("producer_send_success"):
            self._acknowledged.add(row["value"])
            notes.progress[row["partition"]] += 1
            if row["offset"] >= 0:
                self._put(notes.acknowledged, row, "acknowledged")
        for row in self._consumer.take("record_data"):
            if row["value"].startswith("9."):
                self._read.add(row["value"])
                self._put(notes.seen, row, "read")
        return len(self._read)

    def _put(self, noted: dict[tuple[int, int], bytes], row: dict[str, Any], what: str) -> None:
        place, value = (row["partition"], row["offset"]), row["value"].encode()
        before = noted.setdefault(place, value)
        if before != value:
            self._notes.contradictions.append(
                f"{before!r} and {value!r} were both {what} at {place}"
            )

    def finish(self) -> None:
        """Produce no more, and wait until everything was acknowledged and read."""
        self._producer.process.terminate()
        wait_until(lambda: self._producer.told("tool_data"), "VerifiableProducer was done", END_S)
        wait_until(
            lambda: self.look() and self._read >= self._acknowledged,
            lambda: (
                f"VerifiableConsumer has read {len(self._read)} of {len(self._acknowledged)}"
                f" records after {END_S:g} s"
            ),
            END_S,
        )
        self._notes.failed += [
            (row["value"].encode(), row["message"])
            for row in self._producer.told("producer_send_error")
        ]

    def said(self) -> str:
        """How many lines of each name both have said, and whether they live."""
        return ", ".join(f"{tool.process.poll()} {tool.counts()}" for tool in self._tools)

    def end(self) -> None:
        for tool in self._tools:
            tool.end()


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


def read_all(
    servers: str, topic: str, partitions: int = PARTITIONS
) -> dict[int, list[tuple[int, bytes]]]:
    """The whole log of each partition."""
    reader = consumer(servers)
    found: dict[int, list[tuple[int, bytes]]] = {}
    try:
        for number in range(partitions):
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
    """One round on a cluster, with a topic of its own.  `disks`: of each broker; `jars`: Kafka's,
    where the round needs them."""

    def __init__(
        self,
        cluster: kdirect.Cluster,
        round_: Round,
        disks: Mapping[int, Disk],
        jars: list[Path],
    ) -> None:
        self._cluster = cluster
        self._disks = disks
        self._jars = jars
        self._verifiable: Verifiable | None = None
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
            config = {"min.insync.replicas": 2, "segment.bytes": SEGMENT_BYTES}
            admin.create_topic(self.topic, PARTITIONS, 3, config)
            idempotent = self._round.idempotent
            watching = Watching(servers, self.topic, self.notes)
            producing = [
                Producing(n, servers, self.topic, self.notes, idempotent) for n in range(2)
            ]
            try:
                if self._round.verifiable:
                    directory = self._cluster.directory
                    self._verifiable = Verifiable(
                        self._jars, directory, servers, self.topic, self.notes, idempotent
                    )
                self._progress("the first records were acknowledged")
                self._verify()
                for fault, victim in self._round.faults:
                    node_id = self._victim(fault, victim)
                    began = time.monotonic()
                    self._hit(fault, node_id)
                    self._note(f"{fault.name} of broker {node_id} was over", began)
                    self._progress(f"records were acknowledged after {fault.name}")
                    self._heal()
                    self._verify()
                if self._verifiable is not None:
                    self._verifiable.finish()
                for each in producing:
                    each.finish()
                self._read_on()
            finally:
                for each in producing:
                    each.finish()
                watching.finish()
                if self._verifiable is not None:
                    self._verifiable.end()
            self._heal()
            began = time.monotonic()
            self.notes.final = read_all(servers, self.topic)
            self._note(f"{sum(map(len, self.notes.final.values()))} records were read", began)
            wrong = judge(self.notes, idempotent) + differing_replicas(
                self._cluster, self.topic, PARTITIONS
            )
            admin.delete_topic(self.topic)
            return wrong
        finally:
            self._session.close()

    def _verify(self) -> None:
        """Kafka's programs go on."""
        verifiable = self._verifiable
        if verifiable is None:
            return
        began, before = time.monotonic(), verifiable.look()
        wait_until(
            lambda: verifiable.look() >= before + QUIET_RECORDS,
            lambda: (
                f"VerifiableConsumer has read no more than {verifiable.look() - before} records"
            ),
            END_S,
        )
        self._note("VerifiableConsumer had read more", began)

    def _victim(self, fault: Fault, victim: Victim) -> int:
        admin = self._session.admin
        if fault is Fault.FULL_DISK:
            leaders = {p.leader for p in admin.describe_topic(self.topic).leaders}
            return self._rng.choice([n for n in self._cluster.node_ids if n not in leaders])
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
        elif fault is Fault.CUT_LINKS:
            self._cut(node_id)
        elif fault is Fault.FULL_DISK:
            self._fill(node_id)
        elif fault is Fault.ALL_KILLED:
            for each in cluster.node_ids:
                cluster.kill(each)
            for each in cluster.node_ids:
                cluster.start(each)
        else:
            self._part(fault, node_id)

    def _cut(self, node_id: int) -> None:
        """Of one end or the other, each time when there are links again.  A broker that leads
        nothing has them at one end only."""
        for _ in range(CUTS):
            ends = self._rng.sample(list(End), 2)

            def cut(ends: list[End] = ends) -> tuple[int, End] | None:
                counts = ((cut_links(self._cluster, node_id, end), end) for end in ends)
                return next((found for found in counts if found[0]), None)

            count, end = wait_until(
                cut, lambda: f"broker {node_id} has no links after {END_S:g} s", END_S
            )
            self.steps.append(f"       {count} links of broker {node_id} were cut {end.value}")
            self._progress("records were acknowledged after a cut")

    def _fill(self, node_id: int) -> None:
        disk = self._disks[node_id]
        disk.fill()
        try:
            self._leaves(node_id)
            assert disk.free_bytes < SEGMENT_BYTES, "somebody has made room"
            self._progress(f"records were acknowledged while the disk of broker {node_id} was full")
        finally:
            disk.empty()

    def _leaves(self, node_id: int) -> None:
        """Wait until it is in sync with no leader of the topic."""
        began = time.monotonic()

        def in_sync() -> list[int]:
            found = self._session.admin.describe_topic(self.topic).leaders
            return [p.partition for p in found if node_id in p.in_sync_replicas]

        wait_until(
            lambda: not in_sync(),
            lambda: f"broker {node_id} is in sync for partitions {in_sync()} after {AGAIN_S:g} s",
            AGAIN_S,
            0.1,
        )
        self._note(f"broker {node_id} was in sync no more", began)

    def _part(self, fault: Fault, node_id: int) -> None:
        """Faults of the network."""
        assert isinstance(self._cluster, ClusterApart)
        network = self._cluster.network
        others = [n for n in self._cluster.node_ids if n != node_id]
        if fault is Fault.UNPLUGGED:
            network.unplug(node_id)
            try:
                self._progress(f"records were acknowledged without broker {node_id}")
            finally:
                network.plug_in(node_id)
            return
        ways = [(node_id, others)]
        if fault is Fault.SEPARATED:
            ways += [(other, [node_id]) for other in others]
        for sender, receivers in ways:
            network.lose(sender, receivers)
        try:
            self._progress("records were acknowledged meanwhile", at_most_s=GREY_S)
        finally:
            for sender, receivers in ways:
                network.lose_no_more(sender, receivers)

    def _progress(self, what: str, at_most_s: float | None = None) -> None:
        """Wait until each partition has more acknowledged records; `at_most_s`: for no longer."""
        began = time.monotonic()
        now = self.notes.progress
        start = Counter(now)

        def is_over() -> bool:
            if at_most_s is not None and time.monotonic() - began > at_most_s:
                return True
            return all(now[n] >= start[n] + QUIET_RECORDS for n in range(PARTITIONS))

        wait_until(
            is_over,
            lambda: (
                f"not within {AGAIN_S:g} s: {what}; by partition {dict(start)} before, and now"
                f" {dict(now)}"
            ),
            AGAIN_S,
        )
        self._note(what if at_most_s is None else f"{what}, or it was over", began)

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
