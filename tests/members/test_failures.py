"""Nothing acknowledged is lost, doubled or reordered, whatever becomes of brokers: seeded rounds of
failure on three real processes and a real ZooKeeper, with stock clients.

KDIRECT_ROUNDS=n runs n rounds (`make cluster-proof`: 500); KDIRECT_ROUND=seed runs the one of this
seed, which a failing round prints.  Rounds whose brokers are parted by the network, or of which one
has a full disk, need root.
"""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

import kdirect
from tests.conftest import SEED
from tests.members import apart, inflicted
from tests.members.apart import ClusterApart
from tests.members.conftest import TEST_PROPERTIES
from tests.members.failures import (
    Bout,
    Fault,
    Round,
    Setting,
    choose,
    draw,
)
from tests.members.inflicted import Disk
from tests.members.judgement import Notes, batches, judge
from tests.support import wait_until

ROUNDS = int(os.environ.get("KDIRECT_ROUNDS") or 12)
ONE = os.environ.get("KDIRECT_ROUND")
FAILED_SEEDS: list[int] = []  # of rounds that have found a mistake, each with what it was
SEEDS = [int(ONE)] if ONE else [*FAILED_SEEDS, *choose(ROUNDS, SEED)]
PROPERTIES = {
    **TEST_PROPERTIES,
    "zookeeper.session.timeout.ms": 3000,
    "replica.lag.time.max.ms": 3000,
    "offsets.topic.num.partitions": 4,
}
DISK_BYTES = 512 << 20


class Living:
    """The cluster of all rounds of a setting; another one after a round that did not end well."""

    def __init__(self, directories: Iterator[Path]) -> None:
        self._directories = directories
        self._cluster: kdirect.Cluster | None = None
        self._setting: Setting | None = None
        self.disks: dict[int, Disk] = {}
        self.is_well = True

    def cluster(self, setting: Setting) -> kdirect.Cluster:
        if not self.is_well or setting is not self._setting:
            self.end()
        if self._cluster is None:
            self._setting = setting
            directory = next(self._directories)
            if setting is Setting.APART:
                self._cluster = ClusterApart(3, directory, PROPERTIES)
            else:
                pushes = setting is Setting.PUSHED
                properties = {**PROPERTIES, "rdma.replicate": pushes}
                self._cluster = kdirect.Cluster(3, directory, properties=properties)
                for node_id in (1, 2, 3) if not inflicted.why_no_disks() else ():
                    self.disks[node_id] = Disk(directory / f"broker-{node_id}", DISK_BYTES)
            self._cluster.start()
        return self._cluster

    def tell(self) -> None:
        """Print the ends of the brokers' logs."""
        assert self._cluster is not None
        for node_id in self._cluster.node_ids:
            lines = self._cluster.log_file(node_id).read_text(errors="replace").splitlines()
            print(f"-- broker {node_id}", *lines[-40:], sep="\n")

    def end(self) -> None:
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cluster.stop()
        for disk in self.disks.values():
            disk.unmount()
        self.disks.clear()


@pytest.fixture(scope="module")
def living(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Living]:
    found = Living(tmp_path_factory.mktemp("rounds") for _ in itertools.count())
    yield found
    found.end()


def skip_what_cannot_be(round_: Round) -> None:
    """Skip a round for which this machine lacks something."""
    faults = {fault for fault, _ in round_.faults}
    if round_.setting is Setting.APART and (why := apart.why_not()):
        pytest.skip(why)
    if Fault.FULL_DISK in faults and (why := inflicted.why_no_disks()):
        pytest.skip(why)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed_of_round", SEEDS)
def test_nothing_acknowledged_is_lost(
    living: Living, seed_of_round: int, request: pytest.FixtureRequest
) -> None:
    round_ = draw(seed_of_round)
    print(f"KDIRECT_ROUND={seed_of_round}: {round_}")
    skip_what_cannot_be(round_)
    jars = request.getfixturevalue("broker_jars") if round_.verifiable else []
    bout = Bout(living.cluster(round_.setting), round_, living.disks, jars)
    living.is_well = False
    try:
        wrong = bout.run()
    except BaseException:
        living.tell()
        raise
    finally:
        print(*bout.steps, sep="\n")
    if wrong:
        living.tell()
    assert not wrong, f"KDIRECT_ROUND={seed_of_round}: {round_}\n" + "\n".join(wrong[:20])
    living.is_well = True


def test_every_fault_is_drawn() -> None:
    for seed in range(5):
        seeds = choose(20, seed)
        assert len(set(seeds)) == 20 and seeds == choose(20, seed)
        rounds = list(map(draw, seeds))
        assert {fault for r in rounds for fault, _ in r.faults} == set(Fault)
        assert {r.setting for r in rounds} == set(Setting)
        assert len({r.idempotent for r in rounds}) == len({r.verifiable for r in rounds}) == 2


# -- what is inflicted -----------------------------------------------------------------------------


def test_a_network_loses_what_it_is_told_to() -> None:
    if why := apart.why_not():
        pytest.skip(why)
    network = apart.Network(2)
    sockets: dict[int, socket.socket] = {}
    try:
        for host in (1, 2):
            with network.inside(host):
                sockets[host] = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            sockets[host].bind((network.address(host), 9))
            sockets[host].settimeout(0.1)

        def arrives(sender: int, receiver: int) -> bool:
            try:
                sockets[sender].sendto(b"?", (network.address(receiver), 9))
                return sockets[receiver].recv(1) == b"?"
            except OSError:
                return False

        def meet() -> None:
            for ends in ((1, 2), (2, 1)):
                wait_until(lambda ends=ends: arrives(*ends), f"packets went {ends}")

        meet()
        network.lose(1, [2])
        assert not arrives(1, 2) and arrives(2, 1)
        network.lose_no_more(1, [2])
        meet()
        network.unplug(2)
        assert not arrives(1, 2) and not arrives(2, 1)
        network.plug_in(2)
        meet()
    finally:
        for each in sockets.values():
            each.close()
        network.close()


def test_a_disk_is_full(tmp_path: Path) -> None:
    if why := inflicted.why_no_disks():
        pytest.skip(why)
    disk = Disk(tmp_path / "disk", 1 << 20)
    try:
        disk.fill()
        with pytest.raises(OSError, match="No space left"):
            (disk.directory / "file").write_bytes(b"?" * 5000)
        disk.empty()
        assert (disk.directory / "file").write_bytes(b"?" * 5000) == 5000
    finally:
        disk.unmount()


# -- the judge -------------------------------------------------------------------------------------

GOOD = [(0, b"0:0"), (1, b"1:0"), (2, b"0:1"), (3, b"0:2")]


def notes(log: list[tuple[int, bytes]]) -> Notes:
    """Everything of `GOOD` was acknowledged and read, and `log` is what is there."""
    found = Notes(final={0: log})
    found.sent.update({(0, 0): 3, (1, 0): 1})
    found.acknowledged = {(0, offset): value for offset, value in GOOD}
    found.seen = dict(found.acknowledged)
    return found


def test_what_is_well_is_not_accused() -> None:
    assert judge(notes(GOOD), idempotent=True) == []
    again = [*GOOD, (4, b"0:1"), (5, b"0:2"), (6, b"0:3")]
    assert judge(notes(again), idempotent=False) == []


@pytest.mark.parametrize(
    ("log", "says"),
    [
        (GOOD[:3], "where nothing is now"),
        ([*GOOD[:3], (3, b"1:1")], "was acknowledged at 0@3, where b'1:1' is now"),
        ([*GOOD, (4, b"0:2")], "comes after number 2"),
        ([*GOOD, (4, b"1:2")], "comes before those sent before it"),
        ([*GOOD, (5, b"1:1")], "gaps or repetitions"),
    ],
    ids=["lost", "replaced", "doubled", "reordered", "gap"],
)
def test_what_is_wrong_is_found(log: list[tuple[int, bytes]], says: str) -> None:
    assert says in "\n".join(judge(notes(log), idempotent=True))


def test_a_lost_record_whose_acknowledgement_named_no_offset_is_found() -> None:
    found = notes(GOOD[:3])
    del found.acknowledged[0, 3], found.seen[0, 3]
    (told,) = judge(found, idempotent=True)
    assert told.startswith("1 of the 3 records of producer 0 are not in partition 0")


def test_a_consumer_that_reads_nothing_is_found() -> None:
    found = notes(GOOD)
    found.seen.clear()
    assert judge(found, idempotent=True) == ["the consumer has read nothing of partition 0"]


def test_failed_and_contradicting_records_are_told() -> None:
    found = notes(GOOD)
    found.failed.append((b"0:3", "it timed out"))
    found.contradictions.append("two at one place")
    assert len(judge(found, idempotent=True)) == 2


def test_files_of_a_replica_are_read(tmp_path: Path) -> None:
    with kdirect.Broker(tmp_path) as broker, kdirect.connect(broker.bootstrap_servers) as session:
        session.admin.create_topic("t", 1)
        with session.producer() as producer:
            for number in range(3):
                producer.produce_sync("t", b"%d" % number)
        found = batches(tmp_path / "t-0")
    assert [base for base, _ in found] == [0, 1, 2] and len({d for _, d in found}) == 3
