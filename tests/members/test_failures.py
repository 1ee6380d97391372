"""Nothing acknowledged is lost, doubled or reordered, whatever becomes of brokers: seeded rounds of
failure on three real processes and a real ZooKeeper, with stock clients.

KDIRECT_ROUNDS=n runs n rounds (`make cluster-proof`: 500); KDIRECT_ROUND=seed runs the one of this
seed, which a failing round prints.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

import kdirect
from tests.conftest import SEED
from tests.members.conftest import TEST_PROPERTIES
from tests.members.failures import Bout, Fault, Notes, batches, draw, judge

ROUNDS = int(os.environ.get("KDIRECT_ROUNDS") or 20)
ONE = os.environ.get("KDIRECT_ROUND")
SEEDS = (
    [int(ONE)]
    if ONE
    else [random.Random(f"{SEED}:rounds:{n}").randrange(2**32) for n in range(ROUNDS)]
)
SESSION_MS = 3000


class Living:
    """The cluster of all rounds; another one after a round that did not end well."""

    def __init__(self, directories: Iterator[Path]) -> None:
        self._directories = directories
        self._cluster: kdirect.Cluster | None = None
        self.is_well = True

    def cluster(self) -> kdirect.Cluster:
        if not self.is_well:
            self.end()
        if self._cluster is None:
            properties = {**TEST_PROPERTIES, "zookeeper.session.timeout.ms": SESSION_MS}
            self._cluster = kdirect.Cluster(3, next(self._directories), properties=properties)
            self._cluster.start()
        return self._cluster

    def tell(self) -> None:
        """Print the ends of the brokers' logs."""
        assert self._cluster is not None
        for node_id in self._cluster.node_ids:
            lines = self._cluster.log_file(node_id).read_text(errors="replace").splitlines()
            print(f"-- broker {node_id}", *lines[-25:], sep="\n")

    def end(self) -> None:
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cluster.stop()


@pytest.fixture(scope="module")
def living(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Living]:
    found = Living(tmp_path_factory.mktemp("rounds") for _ in itertools.count())
    yield found
    found.end()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed_of_round", SEEDS)
def test_nothing_acknowledged_is_lost(living: Living, seed_of_round: int) -> None:
    round_ = draw(seed_of_round)
    print(f"KDIRECT_ROUND={seed_of_round}: {round_}")
    bout = Bout(living.cluster(), round_)
    living.is_well = False
    try:
        wrong = bout.run()
    except BaseException:
        living.tell()
        raise
    finally:
        print(*bout.steps, sep="\n")
    assert not wrong, f"KDIRECT_ROUND={seed_of_round}: {round_}\n" + "\n".join(wrong[:20])
    living.is_well = True


def test_every_fault_is_drawn() -> None:
    drawn = {fault for seed in range(200) for fault, _ in draw(seed).faults}
    assert drawn == set(Fault)
    assert draw(7) == draw(7)


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
