"""The same log into Apache Kafka's own cleaner and into ours: batch by batch, record by record."""

from __future__ import annotations

import random
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka import admin as confluent_admin

from kdirect.format import layout
from kdirect.format import protocol as p
from kdirect.format.batch import iterate_batches
from kdirect.format.decode import ArrowDecoder
from kdirect.format.schema import build
from kdirect.format.segment_files import AbortedTransaction, parse_transaction_index
from kdirect.log.checkpoint import CLEAN_SHUTDOWN, read_offsets
from kdirect.log.cleaning import Cleaning, Memory, dirt_of
from kdirect.log.config import LogConfig
from kdirect.log.manager import LogManager
from kdirect.model import TopicPartition
from kdirect.wire.connection import Connection
from tests.log.compacted_logs import keyed
from tests.support import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(170)]
ROOT = Path(__file__).resolve().parents[2]
TP = TopicPartition("t", 0)
MIB = 1 << 20
DAY_MS = 86_400_000
MARKER_BYTES = 13  # of a control record, from the length of its key on
CONFIG = {"cleanup.policy": "compact", "segment.bytes": str(MIB)}


def produce(servers: str, rng: random.Random) -> None:
    """Keys that come again, tombstones, every codec, with and without producer ids."""
    for codec in ("none", "gzip", "snappy", "lz4", "zstd", "none"):
        for idempotent in (False, True):
            producer = confluent_kafka.Producer(
                {
                    "bootstrap.servers": servers,
                    "compression.type": codec,
                    "enable.idempotence": idempotent,
                    "batch.size": 30_000,
                    "linger.ms": 20,
                }
            )
            for _ in range(400):
                value = None if rng.random() < 0.1 else rng.randbytes(1000)
                headers = [("h", b"x")] if rng.random() < 0.3 else None
                producer.produce("t", value, b"k%d" % rng.randrange(300), headers=headers)
            assert producer.flush(30) == 0


def segments(directory: Path) -> dict[int, list[Any]]:
    """By base offset, the batches: what their headers say, and their records."""
    out: dict[int, list[Any]] = {}
    for path in sorted(directory.glob("*.log")):
        data = path.read_bytes()
        rows = out[int(path.stem)] = []
        for b in iterate_batches(data):
            one = data[b.position : b.position + b.size]
            decoder = ArrowDecoder("t", 0, include_headers=True)
            decoder.feed(one)
            has_horizon = bool(b.attributes & layout.ATTRIBUTE_DELETE_HORIZON)
            rows.append(
                (
                    (b.base_offset, b.last_offset_delta, b.attributes, b.records_count),
                    (b.producer_id, b.producer_epoch, b.base_sequence, b.leader_epoch),
                    None if has_horizon else b.base_timestamp,  # the time of the cleaning
                    b.max_timestamp,
                    # Readers get nothing of a control batch: its key and value, as they are there.
                    one[layout.BATCH_HEADER_BYTES :][-MARKER_BYTES:] if b.is_control else None,
                    decoder.take().to_pylist(),
                )
            )
    return out


@pytest.fixture
def kafka(broker_jars, tmp_path):
    """Kafka's broker, whose cleaner begins within 100 ms.  Producers may open transactions without
    a coordinator, so that a test chooses their epochs and markers."""
    sys.path.insert(0, str(ROOT / "bench"))
    from versus.systems import Kafka

    started = Kafka(
        str(tmp_path),
        {
            "log.cleaner.backoff.ms": "100",
            "log.cleaner.threads": "1",
            "transaction.partition.verification.enable": "false",
        },
    )
    yield started
    started.stop()


def set_cleaning(kafka: Any, ratio: str, **more: str) -> None:
    """Let Kafka's cleaner begin with the topic where more than this part of it is dirty."""
    where = confluent_admin.ConfigResource(
        confluent_admin.RESOURCE_TOPIC, "t", {**CONFIG, "min.cleanable.dirty.ratio": ratio, **more}
    )
    kafka.admin.alter_configs([where])[where].result(10)


def clean_ours(root: Path, cleaned_to: int | None, **settings: Any) -> int:
    """One cleaning of our copy; where it ended."""
    config = LogConfig(segment_bytes=MIB, compacts=True, deletes=False, **settings)
    with LogManager([root], config) as manager:
        partition = manager.partitions[TP]
        now_ms = int(time.time() * 1000)
        before = partition.size
        dirt = dirt_of(partition, cleaned_to, now_ms)
        assert not dirt.is_reset
        done = Cleaning(partition, dirt, Memory(8 * MIB, 0.9, MIB), now_ms).run()
        assert partition.size < before
        return done.end_offset


def test_our_cleaner_leaves_what_kafkas_leaves(kafka, tmp_path, seed) -> None:
    theirs, ours = tmp_path / "kafka/t-0", tmp_path / "ours/t-0"
    kafka.create("t", 1, {**CONFIG, "min.cleanable.dirty.ratio": "1"})
    produce(kafka.address, random.Random(seed))
    ours.mkdir(parents=True)
    for path in theirs.glob("*.log"):
        shutil.copy(path, ours)
    active = max(int(path.stem) for path in theirs.glob("*.log"))
    set_cleaning(kafka, "0.01")
    checkpoint = tmp_path / "kafka/cleaner-offset-checkpoint"
    wait_until(lambda: read_offsets(checkpoint).get(TP) == active, 60)
    found = segments(theirs)
    assert clean_ours(tmp_path / "ours", None) == active
    same_segments(segments(ours), found)


def same_segments(mine: dict[int, list[Any]], found: dict[int, list[Any]]) -> None:
    assert mine.keys() == found.keys(), "the same segments are joined"
    for base, batches in found.items():
        assert [row[0] for row in mine[base]] == [row[0] for row in batches], base
        assert mine[base] == batches, base


# -- transactions ----------------------------------------------------------------------------------


class Transactions:
    """Producers of one partition of Kafka's whose transactions the test opens and ends itself: a
    random history of them, interleaved, with records of others in between."""

    def __init__(self, servers: str, rng: random.Random) -> None:
        host, _, port = servers.rpartition(":")
        self._connection = Connection(host, int(port))
        self._rng = rng
        self._open: set[int] = set()
        self._epochs: dict[int, int] = {}
        self._sequences: dict[int, int] = {}
        self.kinds: dict[int, str] = {}  # of control records, by offset

    def _append(self, producer: int, keys: int, *, transactional: bool = False) -> None:
        rng = self._rng
        records: list[tuple[bytes | None, bytes | None]] = [
            (b"k%d" % rng.randrange(keys), None if rng.random() < 0.1 else rng.randbytes(1500))
            for _ in range(rng.randint(1, 4))
        ]
        sequence = self._sequences.get(producer, 0)
        self._sequences[producer] = sequence + len(records)
        data = keyed(
            records,
            codec=rng.choice((0, 0, 1, 4)),
            timestamp_ms=int(time.time() * 1000),
            producer=(producer, self._epochs.setdefault(producer, 0), sequence)
            if producer >= 0
            else (-1, -1, -1),
            transactional=transactional,
        )
        request = build(
            p.ProduceRequest,
            transactional_id=f"x{producer}" if transactional else None,
            acks=1,
            timeout_ms=10_000,
            topic_data=[{"name": "t", "partition_data": [{"index": 0, "records": data}]}],
        )
        # From version 12 on, the leader adds partitions to transactions.
        answer = self._connection.submit(request, most=11).result()
        assert answer.responses[0].partition_responses[0].error_code == 0

    def end(self, producer: int, *, commit: bool) -> None:
        """The marker of a producer, whether or not it has a transaction.  Half of them have an
        epoch of their own, as in KIP-890's second protocol."""
        self._open.discard(producer)
        epoch = self._epochs.setdefault(producer, 0)
        if self._rng.random() < 0.5:
            epoch += 1
            self._epochs[producer] = epoch
            self._sequences[producer] = 0
        marker = {
            "producer_id": producer,
            "producer_epoch": epoch,
            "transaction_result": commit,
            "topics": [{"name": "t", "partition_indexes": [0]}],
            "coordinator_epoch": 0,
        }
        answer = self._connection.request(build(p.WriteTxnMarkersRequest, markers=[marker]))
        assert answer.markers[0].topics[0].partitions[0].error_code == 0

    def run(self, steps: int, keys: int, producers: range) -> None:
        rng = self._rng
        for _ in range(steps):
            what = rng.random()
            producer = rng.choice(producers)
            if what < 0.15:
                self._append(-1, keys)
            elif what < 0.25:
                self._append(1000 + producer % 3, keys)  # idempotent
            elif what < 0.3:
                self.end(rng.choice((producer, 2000 + producer)), commit=rng.random() < 0.5)
            elif producer not in self._open or rng.random() < 0.6:
                self._open.add(producer)
                self._append(producer, keys, transactional=True)
            else:
                self.end(producer, commit=rng.random() < 0.5)

    def end_all(self) -> None:
        for producer in sorted(self._open):
            self.end(producer, commit=self._rng.random() < 0.5)

    def close(self) -> None:
        self._connection.close()


def aborted_of(directory: Path) -> dict[int, list[AbortedTransaction]]:
    """By base offset, the entries of the ``.txnindex`` files that have any."""
    found = {}
    for path in sorted(directory.glob("*.txnindex")):
        if entries := list(parse_transaction_index(path.read_bytes())):
            found[int(path.stem)] = entries
    return found


def markers_of(found: dict[int, list[Any]]) -> dict[int, tuple[int | None, bool]]:
    """By offset, the type of each control record, None where it is gone, and whether its batch has
    a delete horizon."""
    out: dict[int, tuple[int | None, bool]] = {}
    for batches in found.values():
        for (offset, _, attributes, _), _, _, _, control, _ in batches:
            if attributes & layout.ATTRIBUTE_CONTROL:
                kind = control[4] if control else None  # the low byte of its type
                out[offset] = kind, bool(attributes & layout.ATTRIBUTE_DELETE_HORIZON)
    return out


def take_new_segments(theirs: Path, ours: Path, active: int) -> None:
    """Our copy goes on with what Kafka has appended since: from segment `active` on, which may have
    grown.  What we know of that part goes, as if we had crashed, and Kafka's snapshots take its
    place: a producer of which only an empty control batch is left is known from no batch."""
    for path in ours.iterdir():
        if path.name[:20].isdigit() and int(path.name[:20]) >= active:
            path.unlink()
    for path in theirs.iterdir():
        if path.suffix in (".log", ".txnindex", ".snapshot") and int(path.stem) >= active:
            shutil.copy(path, ours)
    (ours.parent / CLEAN_SHUTDOWN).unlink(missing_ok=True)


def test_transactions_and_their_markers_are_cleaned_as_kafkas_are(kafka, tmp_path, seed) -> None:
    """Several cleanings of a log that goes on.  The first one's delete horizons have passed when
    the second begins, and those of the second have not when the third does."""
    rng = random.Random(seed)
    theirs, ours = tmp_path / "kafka/t-0", tmp_path / "ours/t-0"
    checkpoint = tmp_path / "kafka/cleaner-offset-checkpoint"
    ours.mkdir(parents=True)
    kafka.create("t", 1, {**CONFIG, "min.cleanable.dirty.ratio": "1"})
    transactions = Transactions(kafka.address, rng)
    seen: set[tuple[int | None, bool]] = set()
    entries: set[AbortedTransaction] = set()
    active, cleaned_to = 0, None
    for number, retention_ms in enumerate((1, DAY_MS, DAY_MS, 1, 1)):
        # Other producers now and then, so that the last batches of some stay as empty ones.
        transactions.run(500, 150, range(number * 2, number * 2 + 6))
        if number != 2:  # then one that is open ends what may be cleaned
            transactions.end_all()
        take_new_segments(theirs, ours, active)
        active = max(int(path.stem) for path in theirs.glob("*.log"))
        end = clean_ours(tmp_path / "ours", cleaned_to, delete_retention_ms=retention_ms)
        cleaned_to = end
        set_cleaning(kafka, "0.01", **{"delete.retention.ms": str(retention_ms)})
        wait_until(lambda end=end: read_offsets(checkpoint).get(TP) == end, 60)
        set_cleaning(kafka, "1")
        mine, found = segments(ours), segments(theirs)
        same_segments(mine, found)
        assert aborted_of(ours) == aborted_of(theirs)
        seen |= set(markers_of(found).values())
        entries |= {t for one in aborted_of(theirs).values() for t in one}
    transactions.close()
    assert {(0, False), (1, False), (0, True), (1, True), (None, False)} <= seen
    left = {t for one in aborted_of(ours).values() for t in one}
    assert left < entries, "some entries of the aborted index were there, and went"
