"""What is wrong with a store, an object, a segment or a record of the metadata, met by a broker
that runs: what it says, that it says it once, and that nobody else notices."""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest

from kdirect.broker.metadata_reader import _decode
from kdirect.broker.remote_metadata import metadata_partition
from kdirect.broker.topics import REMOTE_METADATA_TOPIC
from kdirect.format import protocol as p
from kdirect.format.batch import iterate_batches, stamp
from kdirect.format.error_codes import ErrorCode
from kdirect.format.record_list import encode_records
from kdirect.format.remote_metadata import (
    RemoteSegmentUpdate,
    SegmentState,
    pack_record,
    parse_record,
)
from kdirect.format.schema import build
from kdirect.log.partition import Partition
from kdirect.model import TopicPartition
from kdirect.storage.remote_log import MOST_FAILED
from kdirect.storage.upload import key_of
from tests.broker.conftest import Raw, call_on_loop
from tests.broker.test_topic_properties import alter
from tests.object_servers import Place, gate_to
from tests.storage.test_tier_proofs import RECORDS, everything
from tests.storage.tiered_broker import TOPIC, TieredBroker, tiered_broker


def send(tiers: TieredBroker, topic: str, partition: int = 0, count: int = RECORDS) -> None:
    """Records to any topic, in batches of twenty."""
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": tiers.address, "batch.num.messages": 20, "log_level": 0}
    )
    for i in range(count):
        producer.produce(topic, b"%08d" % i + bytes(92), partition=partition)
        if i % 20 == 19:
            producer.flush()
    assert producer.flush(20) == 0


def log_of(tiers: TieredBroker, topic: str, partition: int = 0) -> Partition:
    found: Partition = tiers.broker.server.logs.partitions[TopicPartition(topic, partition)]
    return found


def fetch(connection: Raw, wanted: Sequence[tuple[str, int, int]]) -> dict[tuple[str, int], Any]:
    """One Fetch of (topic, partition, offset)s: what is answered of each."""
    parts = [
        {
            "topic": topic,
            "partitions": [
                {"partition": partition, "current_leader_epoch": -1, "fetch_offset": offset,
                 "last_fetched_epoch": -1, "log_start_offset": -1, "partition_max_bytes": 1 << 20}
            ],
        }
        for topic, partition, offset in wanted
    ]  # fmt: skip
    request = build(
        p.FetchRequest, replica_id=-1, max_wait_ms=0, min_bytes=1, max_bytes=1 << 22,
        isolation_level=0, session_id=0, session_epoch=-1, topics=parts, forgotten_topics_data=[],
    )  # fmt: skip
    return {
        (topic.topic, found.partition_index): found
        for topic in connection.call(request, 11).responses
        for found in topic.partitions
    }


def offsets(found: Any) -> tuple[int, int]:
    """From where to where the records of an answer go, whose CRCs are right; (-1, -1): none."""
    batches = list(iterate_batches(bytes(found.records or b"")))
    return (batches[0].base_offset, batches[-1].next_offset) if batches else (-1, -1)


# -- an object that is damaged ---------------------------------------------------------------------


def flipped(data: bytes, at: int) -> bytes:
    """With one bit of a byte the other way round."""
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize("kind", ["directory", "s3"])
def test_a_damaged_object_is_named_and_fails_its_partition_alone(
    object_stores: Any, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One byte of the third batch of the first object, and one of the third object.  What lies
    before it is handed on, and what lies in the next object; other partitions of the same Fetch get
    theirs, cold and hot; each object is named; and once one is restored, its records come."""
    damaged, sound = f"damaged-{kind}", f"sound-{kind}"
    place = object_stores[kind].fresh()
    waits = {"remote_fetch_max_wait_ms": 20_000}
    with tiered_broker(place, tmp_path / "log", **waits) as tiers:
        for topic in (damaged, sound):
            tiers.create(topic)
            send(tiers, topic, count=2 * RECORDS)
        logs = [log_of(tiers, topic) for topic in (damaged, sound)]
        tiers.wait(lambda: all(len(log.segments) == 1 for log in logs))
        end = logs[0].local_log_start_offset
        key, after, last = [k for k in tiers.objects() if f"/{damaged}-" in k][:3]
        store = place.store()
        size = store.size(key)
        assert size is not None
        whole = bytes(store.get(key, 0, size))
        second, third = (int(k.rpartition("/")[2].partition("-")[0]) for k in (after, last))
        store.put(key, size, [flipped(whole, whole.index(b"%08d" % 45) + 20)])
        length = store.size(last) or 0
        store.put(last, length, [flipped(bytes(store.get(last, 0, length)), 100)])

        caplog.set_level(logging.WARNING, "kdirect.broker")
        connection = Raw(tiers.address, 30)
        with contextlib.closing(connection):
            others = [(sound, 0, 0)]
            found = fetch(connection, [(damaged, 0, 0), *others])
            assert found[damaged, 0].error_code == 0 and offsets(found[damaged, 0]) == (0, 40)
            for _ in range(3):
                found = fetch(connection, [(damaged, 0, 40), *others])
                assert found[damaged, 0].error_code == ErrorCode.CORRUPT_MESSAGE
                assert not found[damaged, 0].records
                assert found[sound, 0].error_code == 0 and offsets(found[sound, 0])[0] == 0
            found = fetch(connection, [(damaged, 0, second), (sound, 0, end)])
            assert {x.error_code for x in found.values()} == {0}
            assert offsets(found[damaged, 0])[0] == second and offsets(found[sound, 0])[0] == end
            said = [r.getMessage() for r in caplog.records if damaged in r.getMessage()]
            assert len(said) == 1 and key in said[0] and "40" in said[0], said
            found = fetch(connection, [(damaged, 0, third)])
            assert found[damaged, 0].error_code == ErrorCode.CORRUPT_MESSAGE
            said = [r.getMessage() for r in caplog.records if damaged in r.getMessage()]
            assert len(said) == 2 and last in said[1], said

            store.put(key, size, [whole])
            tiers.wait(
                lambda: offsets(fetch(connection, [(damaged, 0, 40)])[damaged, 0])[0] == 40,
                "it is restored, and stays damaged here",
            )


# -- a store that refuses --------------------------------------------------------------------------


def test_without_the_right_to_delete_everything_else_goes_on(
    object_stores: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One message, a figure that stays until it is mended, and then the objects go."""
    caplog.set_level(logging.WARNING, "kdirect.storage")
    with (
        gate_to(object_stores["s3"].fresh()) as (gate, place),
        tiered_broker(place, tmp_path / "log") as tiers,
    ):
        gate.fault = lambda request: (
            (403, "AccessDenied") if request.method in ("DELETE", "POST") else None
        )
        tiers.create()
        tiers.create("other")
        tiers.produce(0, 2 * RECORDS)
        tiers.settle()
        before = tiers.objects()
        alter(tiers.admin, TOPIC, "retention.bytes", "1")
        tiers.wait(lambda: tiers.figure("remote_delete_errors") > len(before))
        assert tiers.figure("remote_delete_lag_segments") == len(before)
        alter(tiers.admin, TOPIC, "retention.bytes", "-1")
        tiers.produce(2 * RECORDS, RECORDS)
        assert tiers.consume(2 * RECORDS, RECORDS) == everything(2 * RECORDS, 3 * RECORDS)
        send(tiers, "other")
        tiers.wait(lambda: log_of(tiers, "other").local_log_start_offset > 0, "others wait")
        assert set(before) < set(tiers.objects())
        said = [r.getMessage() for r in caplog.records if "deletion" in r.getMessage()]
        assert len(said) == 1 and "permit the credentials" in said[0] and ".kseg" in said[0], said
        gate.fault = lambda request: None
        tiers.settle()
        assert not set(before) & set(tiers.objects())
        assert len(tiers.objects()) == tiers.figure("remote_metadata_count")


WRONG = {
    "key": ({"access_key": "nobody"}, {}, "does not know the access key"),
    "secret": ({"secret_key": "wrong-secret-7f"}, {}, "check rsm.config.secret_key"),
    "bucket": ({}, {"bucket": "no-such-bucket"}, "no-such-bucket"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_store_that_is_named_wrongly_is_told_once_and_nothing_is_lost(
    object_stores: Any, tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """However many partitions there are to copy.  The next start, with what is right, copies them;
    one that begins wrongly says so at once."""
    config, parts, says = WRONG[what]
    right = object_stores["s3"].fresh()
    wrong = replace(right.within(**parts), config={**right.config, **config})
    caplog.set_level(logging.WARNING, "kdirect.storage")

    def complaints() -> list[str]:
        return [r.getMessage() for r in caplog.records if says in r.getMessage()]

    with tiered_broker(wrong, tmp_path / "log") as tiers:
        tiers.create()
        tiers.create("other", partitions=2)
        tiers.produce(0, RECORDS)
        for partition in (0, 1):
            send(tiers, "other", partition)
        tiers.wait(lambda: tiers.figure("remote_copy_errors") > 5)
        assert tiers.partition.local_log_start_offset == 0
        assert tiers.figure("remote_metadata_count") <= 3 * MOST_FAILED, "tries pile up"
        assert tiers.consume(0, RECORDS) == everything()
        said = complaints()
        assert len(said) == 1, said
        assert len(caplog.records) == 1, caplog.text
        assert "wrong-secret" not in caplog.text
    caplog.clear()
    with tiered_broker(wrong, tmp_path / "log") as tiers:
        tiers.wait(complaints, "it starts wrongly without a word")
        assert tiers.consume(0, RECORDS) == everything()
    with tiered_broker(right, tmp_path / "log") as tiers:
        tiers.settle()
        logs = [log_of(tiers, "other", i) for i in (0, 1)]
        tiers.wait(lambda: all(log.local_log_start_offset > 0 for log in logs))
        assert tiers.partition.local_log_start_offset > 0
        assert tiers.consume(0, RECORDS) == everything()


# -- a segment that is damaged here ----------------------------------------------------------------


def test_a_segment_that_is_damaged_here_is_not_copied(
    place: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is named; what lies before it is copied, and other partitions; nothing goes here of what
    is not copied; and once it is restored, copying goes on."""
    caplog.set_level(logging.WARNING, "kdirect.storage")
    with tiered_broker(place, tmp_path / "log") as tiers:
        off = {"remote_log_copy_disable": "true", "local_retention_bytes": "-2"}
        tiers.create(**off)
        tiers.create("other", **off)
        tiers.produce(0, 2 * RECORDS)
        send(tiers, "other", count=2 * RECORDS)
        sealed = tiers.partition.sealed_segments()
        assert len(sealed) >= 3
        path = Path(sealed[1].segment.path)
        with path.open("r+b") as file:
            file.seek(sealed[1].size // 2)
            (good,) = file.read(1)
            file.seek(sealed[1].size // 2)
            file.write(bytes([good ^ 1]))
        for topic in (TOPIC, "other"):
            alter(tiers.admin, topic, "remote.log.copy.disable", "false")
        for topic in (TOPIC, "other"):
            alter(tiers.admin, topic, "local.retention.bytes", "1")
        tiers.wait(lambda: len(log_of(tiers, "other").segments) == 1, "others wait for it")
        tiers.wait(lambda: tiers.figure("remote_copy_errors") > 1)
        tiers.wait(lambda: tiers.partition.local_log_start_offset > 0)
        assert tiers.partition.local_log_start_offset == sealed[0].end_offset
        assert len([k for k in tiers.objects() if f"/{TOPIC}-" in k]) == 1
        said = [r.getMessage() for r in caplog.records]
        assert len(said) == 1 and str(path) in said[0] and "is damaged" in said[0], said
        with path.open("r+b") as file:
            file.seek(sealed[1].size // 2)
            file.write(bytes([good]))
        tiers.settle()
        assert tiers.consume(0, 2 * RECORDS) == everything(0, 2 * RECORDS)


# -- records of the metadata that say what cannot be -----------------------------------------------


def write_somehow(tiers: TieredBroker, records: Sequence[tuple[int, bytes]]) -> None:
    """(partition, value)s into the metadata topic, as the broker appends; a client may not, which
    is tried with the first one."""
    failed: list[Any] = []
    producer = confluent_kafka.Producer({"bootstrap.servers": tiers.address, "log_level": 0})
    index, value = records[0]
    producer.produce(
        REMOTE_METADATA_TOPIC, value, partition=index, callback=lambda e, _: failed.append(e)
    )
    assert producer.flush(20) == 0
    assert [error.name() for error in failed] == ["TOPIC_EXCEPTION"]
    state = tiers.broker.server.remote.metadata._state
    for index, value in records:
        call_on_loop(
            tiers.broker, partial(state.change, lambda _, i=index: i, [(b"k", value)], lambda: None)
        )


def test_metadata_that_cannot_be_is_told_once_and_changes_nothing(
    place: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Records of an api key that nobody knows, torn ones and no records at all; and sound ones that
    contradict what is known: a second beginning of a segment with other offsets, an end without a
    deletion, one of a segment of which nobody has heard, a whole partition of a topic that is not
    there.  The object of that one is somebody's, and stays."""
    log = tmp_path / "log"
    with tiered_broker(place, log) as tiers:
        tiers.create()
        tiers.create("other")
        tiers.produce(0, RECORDS)
        send(tiers, "other")
        tiers.settle()
        tiers.wait(lambda: len(log_of(tiers, "other").segments) == 1)
        table = tiers.broker.server.remote.metadata.table
        where = (tiers.partition.topic_id, 0)
        index = metadata_partition(where, table.topic_partitions)
        known = dict(table.partitions[where].segments)
        first = min(known.values(), key=lambda s: s.base_offset)
        foreign = replace(first, topic="gone", topic_id=uuid.uuid4(), segment_id=uuid.uuid4())
        cluster = tiers.broker.server.logs.cluster_id
        place.store().put(key_of(foreign, cluster), 3, [b"abc"])
        begun = replace(first, state=SegmentState.COPY_SEGMENT_STARTED)

        def update(segment_id: uuid.UUID, state: SegmentState) -> bytes:
            return pack_record(
                RemoteSegmentUpdate(
                    topic=TOPIC, topic_id=where[0], partition=0, segment_id=segment_id,
                    broker_id=1, event_timestamp_ms=5, custom=None, state=state,
                )
            )  # fmt: skip

        good = pack_record(begun)
        unreadable = [
            bytes([good[0], 77, *good[2:]]), good[:40], good + b"x", b"", b"\xff" * 30, b"hello",
        ]  # fmt: skip
        contradicting = [
            pack_record(replace(begun, base_offset=5, end_offset=9)),
            pack_record(replace(begun, base_offset=RECORDS, end_offset=RECORDS + 9)),
            update(first.segment_id, SegmentState.DELETE_SEGMENT_FINISHED),
            update(uuid.uuid4(), SegmentState.COPY_SEGMENT_FINISHED),
            update(uuid.uuid4(), SegmentState.DELETE_SEGMENT_STARTED),
        ]
        gone = (foreign.topic_id, 0)
        abroad = metadata_partition(gone, table.topic_partitions)
        write_somehow(
            tiers,
            [(index, value) for value in (*unreadable, *contradicting)]
            + [(abroad, pack_record(replace(foreign, state=SegmentState.COPY_SEGMENT_STARTED)))],
        )
        objects = tiers.objects()
    for _ in range(2):
        caplog.clear()
        caplog.set_level(logging.WARNING, "kdirect")
        with tiered_broker(place, log) as tiers:
            table = tiers.broker.server.remote.metadata.table
            assert table.partitions[where].segments == known
            said = [r.getMessage() for r in caplog.records]
            assert len(said) == 1 and f"{len(unreadable)} records" in said[0], said
            assert REMOTE_METADATA_TOPIC in said[0] and "api key 77" in said[0], said
            assert tiers.consume(0, RECORDS) == everything()
            assert set(tiers.objects()) == set(objects)
    with tiered_broker(place, log) as tiers:
        tiers.produce(RECORDS, RECORDS)
        send(tiers, "other")
        tiers.settle()
        tiers.wait(lambda: log_of(tiers, "other").local_log_start_offset > RECORDS)
        assert tiers.consume(0, 2 * RECORDS) == everything(0, 2 * RECORDS)
        tiers.admin.delete_topics([TOPIC])[TOPIC].result(20)
        tiers.wait(lambda: not [k for k in tiers.objects() if f"/{TOPIC}-" in k])
        assert key_of(foreign, cluster) in tiers.objects(), "somebody else's object is deleted"


def test_a_member_of_a_cluster_tells_of_unreadable_metadata_once_in_an_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What it has of the topic's leader: brokers of another version may have written it."""
    good = pack_record(
        RemoteSegmentUpdate(
            topic=TOPIC, topic_id=uuid.UUID(int=5), partition=0, segment_id=uuid.UUID(int=6),
            broker_id=1, event_timestamp_ms=5, custom=None,
            state=SegmentState.DELETE_SEGMENT_STARTED,
        )
    )  # fmt: skip
    values = [good, bytes([good[0], 77, *good[2:]]), good[:-1], None, good]
    data = bytearray(encode_records([(b"k", value, None, 5) for value in values]))
    stamp(data, 40, 3)
    caplog.set_level(logging.WARNING, "kdirect")
    piece = _decode(bytes(data), 7, 40)
    assert [offset for offset, _ in piece.records] == list(range(40, 45))
    known = parse_record(good)
    assert [record for _, record in piece.records] == [known, None, None, None, known]
    assert (piece.next_offset, piece.epoch) == (45, 3)
    (said,) = [r.getMessage() for r in caplog.records]
    assert said.startswith(f"2 records of {REMOTE_METADATA_TOPIC}-7") and "offset 41" in said
    assert "api key 77" in said
