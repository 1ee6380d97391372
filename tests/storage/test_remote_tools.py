"""`kdirect remote` and `kdirect inspect`, and a broker that has lost everything."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, OffsetSpec

import kdirect
from kdirect.cli import main
from kdirect.errors import KdirectError
from kdirect.log.kernel_producers import known_producers
from tests.object_servers import Place
from tests.storage.tiered_broker import (
    TOPIC,
    TP,
    TieredBroker,
    properties,
    tiered_broker,
)

RECORDS = 2000
NOBODYS = "AAAAAAAAAAAAAAAAAAAAAQ.kseg"


@pytest.fixture(params=["directory", "s3"])
def place(request: Any, object_stores: Any) -> Place:
    found: Place = object_stores[request.param].fresh()
    return found


@pytest.fixture
def tiers(place: Place, tmp_path: Path) -> Iterator[TieredBroker]:
    with tiered_broker(place, tmp_path / "log") as found:
        found.create()
        found.produce(0, RECORDS)
        found.settle()
        yield found


def credentials(place: Place) -> list[str]:
    return [x for n, v in place.config.items() for x in ("--set", f"rsm.config.{n}={v}")]


def run(capsys: Any, *arguments: str) -> tuple[int, list[dict[str, Any]], str]:
    """(exit status, what was printed as JSON, what was said)."""
    capsys.readouterr()
    status = main([*arguments, "--json"])
    out, said = capsys.readouterr()
    return status, [json.loads(line) for line in out.splitlines()], said


def test_ls_lists_the_segments(tiers: TieredBroker, capsys: Any) -> None:
    status, rows, _ = run(capsys, "remote", "ls", TOPIC, "--broker", tiers.address)
    assert status == 0 and len(rows) == len(tiers.objects())
    assert rows[0]["base_offset"] == 0
    assert [r["base_offset"] for r in rows[1:]] == [r["end_offset"] for r in rows[:-1]]
    assert {r["state"] for r in rows} == {"COPY_SEGMENT_FINISHED"}
    status, rows, _ = run(
        capsys, "remote", "ls", TOPIC, "--partition", "7", "--broker", tiers.address
    )
    assert status == 0 and not rows


def test_verify_names_what_is_damaged(tiers: TieredBroker, capsys: Any) -> None:
    options = ["--broker", tiers.address, *credentials(tiers.place)]
    status, rows, said = run(capsys, "remote", "verify", *options)
    assert status == 0 and len(rows) == len(tiers.objects()) and "0 damaged" in said
    store, keys = tiers.place.store(), tiers.objects()
    data = bytearray(store.get(keys[0], 0, store.size(keys[0]) or 0))
    data[100] ^= 1
    store.delete(keys[0])
    store.put(keys[0], len(data), [bytes(data)])
    store.delete(keys[1])
    status, rows, said = run(capsys, "remote", "verify", TOPIC, *options)
    named = {row["key"]: row["finding"] for row in rows if row["finding"]}
    assert status == 1 and set(named) == {keys[0], keys[1]} and "2 damaged" in said


def test_sweep_takes_orphans_only(tiers: TieredBroker, capsys: Any) -> None:
    store, keys = tiers.place.store(), tiers.objects()
    orphan = keys[0][: -len(NOBODYS)] + NOBODYS
    cluster, rest = keys[0].split("/", 1)
    foreign = [
        f"another-cluster/{rest}",
        f"{cluster}/t-BBBBBBBBBBBBBBBBBBBBBA/0/{'0' * 20}-AAAAAAAAAAAAAAAAAAAAAg.kseg",
        f"{cluster}/notes.txt",
    ]
    for key in (orphan, *foreign):
        store.put(key, 4, [b"data"])
    options = ["--broker", tiers.address, *credentials(tiers.place)]
    assert run(capsys, "remote", "sweep", *options)[1] == [], "they are young"
    old = [*options, "--age-ms", "-1000"]
    status, rows, said = run(capsys, "remote", "sweep", "--dry-run", *old)
    assert status == 0 and [r["key"] for r in rows] == [orphan] and "would be" in said
    assert tiers.objects() == sorted([*keys, orphan, *foreign])
    assert [r["key"] for r in run(capsys, "remote", "sweep", *old)[1]] == [orphan]
    assert tiers.objects() == sorted([*keys, *foreign])


def test_text_says_what_json_says(tiers: TieredBroker, capsys: Any) -> None:
    """A line of values for each object; of verify, for those only of which something is found."""
    store, keys = tiers.place.store(), tiers.objects()
    orphan = keys[0][: -len(NOBODYS)] + NOBODYS
    store.put(orphan, 4, [b"data"])
    store.delete(keys[1])
    options = ["--broker", tiers.address, *credentials(tiers.place)]
    sweep = ["sweep", "--age-ms", "-1000", *options]

    def as_text(*arguments: str) -> tuple[int, list[list[str]], str]:
        capsys.readouterr()
        status = main(["remote", *arguments])
        out, said = capsys.readouterr()
        return status, [line.split("\t") for line in out.splitlines()], said

    for arguments, count in (
        (["ls", TOPIC, "--broker", tiers.address], len(keys)),
        (["verify", *options], 1),
        ([*sweep, "--dry-run"], 1),
    ):
        status, rows, said = run(capsys, "remote", *arguments)
        if arguments[0] == "verify":
            rows = [row for row in rows if row["finding"]]
        lines = [["-" if v is None else str(v) for v in row.values()] for row in rows]
        assert as_text(*arguments) == (status, lines, said)
        assert len(lines) == count and status == (arguments[0] == "verify")
    status, lines, said = as_text(*sweep)
    assert (status, [x[0] for x in lines], said) == (0, [orphan], "1 objects deleted\n")
    assert as_text(*sweep) == (0, [], "0 objects deleted\n")


def test_inspect_shows_an_object(tiers: TieredBroker, capsys: Any) -> None:
    key = tiers.objects()[0]
    base, _, query = tiers.place.uri.partition("?")
    uri = f"{base}/{key}" + (f"?{query}" if query else "")
    status, (shown,), said = run(capsys, "inspect", uri, *credentials(tiers.place))
    assert status == 0 and not said
    assert (shown["topic"], shown["partition"], shown["base_offset"]) == (TOPIC, 0, 0)
    assert shown["sections"]["topic"] > 0
    data = bytes(tiers.place.store().get(key, 0, shown["bytes"]))
    damaged = tiers.log_dir / "damaged.kseg"
    damaged.write_bytes(data[:200] + b"?" + data[201:])
    status, _, said = run(capsys, "inspect", str(damaged))
    assert status == 1 and "the log" in said


# -- everything is lost ----------------------------------------------------------------------------


def rebuild(capsys: Any, place: Place, log_dir: Path) -> tuple[int, list[dict[str, Any]], str]:
    given = properties(place, log_dir)
    sets = [x for name, value in given.items() for x in ("--set", f"{name}={value}")]
    return run(capsys, "remote", "rebuild", *sets)


def test_a_broker_starts_from_the_store_alone(place: Place, tmp_path: Path, capsys: Any) -> None:
    with tiered_broker(place, tmp_path / "log") as tiers:
        tiers.create(partitions=3, max_message_bytes=4242)
        tiers.produce(0, RECORDS)
        tiers.settle()
        objects, end = tiers.objects(), tiers.partition.local_log_start_offset
        topic_id = tiers.partition.topic_id
    shutil.rmtree(tmp_path / "log")
    status, rows, said = rebuild(capsys, place, tmp_path / "log")
    assert status == 0 and not said.startswith("kdirect:"), said
    assert rows == [
        {"topic": TOPIC, "partition": 0, "log_start_offset": 0, "end_offset": end,
         "segments": len(objects)}
    ]  # fmt: skip
    with tiered_broker(place, tmp_path / "log") as tiers:
        assert tiers.consume(0, end) == [(i, i) for i in range(end)]
        assert tiers.offset_for(OffsetSpec.latest()) == end
        assert tiers.partition.topic_id == topic_id
        resource = ConfigResource(ConfigResource.Type.TOPIC, TOPIC)
        configs = tiers.admin.describe_configs([resource])[resource].result(20)
        assert configs["max.message.bytes"].value == "4242"
        assert configs["retention.ms"].value == "-1"
        assert len(tiers.admin.list_topics(TOPIC).topics[TOPIC].partitions) == 3
        tiers.produce(end, RECORDS)
        tiers.settle()
        assert tiers.consume(0, end + RECORDS) == [(i, i) for i in range(end + RECORDS)]
        assert set(objects) <= set(tiers.objects()), "nothing was copied twice"
        assert len(tiers.objects()) == tiers.figure("remote_metadata_count")


def test_a_producer_of_before_is_known_after_a_rebuild(
    object_stores: Any, tmp_path: Path, capsys: Any
) -> None:
    """Its last batch, sent again, is no second one."""
    place = object_stores["directory"].fresh()
    with tiered_broker(place, tmp_path / "log") as tiers:
        tiers.create()
        producer = confluent_kafka.Producer(
            {"bootstrap.servers": tiers.address, "enable.idempotence": True, "linger.ms": 0}
        )
        for i in range(500):
            producer.produce(TOPIC, b"%08d" % i + b"x" * 100)
            producer.flush()
        tiers.settle()
        partition = tiers.partition
        partition.roll()
        end = partition.log_end_offset
        tiers.wait(lambda: partition.remote_end_offset == end)
        (entry,), _ = known_producers(partition.kernel)
    shutil.rmtree(tmp_path / "log")
    assert rebuild(capsys, place, tmp_path / "log")[0] == 0
    with tiered_broker(place, tmp_path / "log") as tiers:
        (found,), _ = known_producers(tiers.partition.kernel)
        assert tiers.partition.log_end_offset == end
        assert (found.producer_id, found.producer_epoch) == (
            entry.producer_id,
            entry.producer_epoch,
        )
        assert found.batches[-1] == entry.batches[-1]


def test_a_damaged_object_is_named_and_left_out(place: Place, tmp_path: Path, capsys: Any) -> None:
    with tiered_broker(place, tmp_path / "log") as tiers:
        tiers.create()
        tiers.produce(0, RECORDS)
        tiers.settle()
        keys = tiers.objects()
        store = tiers.place.store()
        size = store.size(keys[-1]) or 0
        data = bytes(store.get(keys[-1], 0, size))
        store.delete(keys[-1])
        store.put(keys[-1], size - 1, [data[:-1]])
    shutil.rmtree(tmp_path / "log")
    status, rows, said = rebuild(capsys, place, tmp_path / "log")
    assert status == 0 and keys[-1] in said
    with tiered_broker(place, tmp_path / "log") as tiers:
        end = rows[0]["end_offset"]
        assert 0 < end < RECORDS
        assert tiers.consume(0, end) == [(i, i) for i in range(end)]


def test_what_lies_before_a_damaged_object_stays(
    place: Place, tmp_path: Path, capsys: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Its records are lost, and said to be: no others are."""
    with tiered_broker(place, tmp_path / "log") as tiers:
        tiers.create()
        tiers.produce(0, RECORDS, at_ms=1)
        tiers.settle()
        keys = tiers.objects()
        _, rows, _ = run(capsys, "remote", "ls", TOPIC, "--broker", tiers.address)
        start, end = rows[2]["base_offset"], rows[2]["end_offset"]
        whole = tiers.partition.local_log_start_offset
        store = place.store()
        store.delete(keys[2])
        store.put(keys[2], 4, [b"rest"])
    shutil.rmtree(tmp_path / "log")
    status, rows, said = rebuild(capsys, place, tmp_path / "log")
    assert status == 0 and keys[2] in said and f"t-0 lacks offsets {start} to {end - 1}" in said
    assert (rows[0]["log_start_offset"], rows[0]["end_offset"]) == (0, whole)
    with tiered_broker(place, tmp_path / "log", remote_orphan_age_ms=1) as tiers:
        tiers.wait(lambda: tiers.figure("remote_metadata_count") == len(keys) - 1)
        assert tiers.consume(0, start) == [(i, i) for i in range(start)]
        assert tiers.consume(end, whole - end) == [(i, i) for i in range(end, whole)]
        with pytest.raises(AssertionError, match=r"(?i)invalid|corrupt|checksum"):
            tiers.consume(start, 1)
        assert tiers.broker.server.remote.gap(tiers.partition, start) == (start, end)
        if place.kind == "directory":  # the log says it once in a while, whatever broker it is
            assert f"t-0 lacks offsets {start} to {end - 1}" in caplog.text
            assert f"from offset {end}" in caplog.text
        with kdirect.Consumer(
            {"bootstrap.servers": tiers.address, "cold.reads": "auto"}
        ) as consumer:
            consumer.assign({TP: start - 1})
            assert consumer.poll(10).offset() == start - 1
            with pytest.raises(KdirectError, match=f"{start}"):
                consumer.poll(10)
        options = ["--broker", tiers.address, *credentials(place)]
        status, rows, said = run(capsys, "remote", "verify", *options)
        (gap,) = [row for row in rows if row["finding"]]
        assert status == 1 and gap["key"] == keys[2] and str(start) in gap["finding"]
        assert "1 gaps" in said and "0 damaged" in said
        assert set(tiers.objects()) == set(keys), "nothing was deleted"
        tiers.produce(whole, RECORDS)
        tiers.settle()
        entry = ConfigEntry("retention.ms", "60000", incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ConfigResource.Type.TOPIC, TOPIC, incremental_configs=[entry])
        tiers.admin.incremental_alter_configs([resource])[resource].result(20)
        tiers.wait(lambda: tiers.partition.log_start_offset >= whole, "the gap holds retention up")


def test_rebuilding_wants_empty_directories(place: Place, tmp_path: Path, capsys: Any) -> None:
    with tiered_broker(place, tmp_path / "log") as tiers:
        tiers.create()
        tiers.produce(0, RECORDS)
        tiers.settle()
    status, _, said = rebuild(capsys, place, tmp_path / "log")
    assert status == 2 and "empty" in said
    status, _, said = rebuild(capsys, place.fresh(), tmp_path / "other")
    assert status == 2 and "--cluster-id" in said
