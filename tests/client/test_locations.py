"""LocateRecords at a real broker: what it says of where records are, and to whom."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kdirect
from kdirect.format import layout
from kdirect.format import protocol as p
from kdirect.format.error_codes import ErrorCode
from kdirect.format.segment_object import parse_key
from kdirect.objects import get_presigned
from kdirect.wire.connection import Connection
from tests.client.cold_logs import TOPIC, TP, ColdLog, cold_log
from tests.object_servers import directory_place


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ColdLog]:
    directory = tmp_path_factory.mktemp("located")
    place = directory_place(directory / "store")
    (directory / "store").mkdir()
    with cold_log(directory, place) as found:
        yield found


def located(log: ColdLog, start: int, end: int = -1, most: int = 0, **more: Any) -> Any:
    host, _, port = log.servers.rpartition(":")
    connection = Connection(host, int(port), timeout_ms=10_000)
    target = p.LocateRecordsRequest.LocateTarget(
        **{
            "topic": TOPIC,
            "partition": 0,
            "current_leader_epoch": -1,
            "from_offset": start,
            "to_offset": end,
            "max_locations": most,
            **more,
        }
    )
    try:
        return connection.request(p.LocateRecordsRequest(partitions=[target]))
    finally:
        connection.close()


def test_the_cold_part_in_order(log: ColdLog) -> None:
    answer = located(log, 0)
    (row,) = answer.partitions
    assert answer.store_uri == log.place.uri and row.error_code == 0
    assert (row.log_start_offset, row.high_watermark) == (0, log.records)
    assert row.local_log_start_offset == log.partition.local_log_start_offset > 0
    offset = 0
    assert len(row.locations) == len(log.segments) > 5
    for location, segment in zip(row.locations, log.segments, strict=True):
        assert location.kind == layout.LOCATION_OBJECT and location.url is None
        assert location.start_offset == location.base_offset == offset
        epochs = [(e.epoch, e.start_offset) for e in location.leader_epochs]
        assert epochs == [(0, offset)]
        offset = location.end_offset
        identity, base = parse_key("", location.key) or (None, -1)
        assert identity is not None and base == location.base_offset
        assert identity.segment_id == segment.segment_id == location.segment_id
        assert identity.cluster_id == answer.cluster_id and identity.topic_id == row.topic_id
        store = log.place.store()
        assert store.size(location.key) == location.tail_position + location.tail_length
        assert location.tail_position == location.log_bytes
        assert location.min_timestamp == -1 and location.max_timestamp > 0
    assert offset == row.local_log_start_offset


def test_a_part_of_it(log: ColdLog) -> None:
    middle = log.segments[2].base_offset + 3
    (row,) = located(log, middle, most=2).partitions
    assert [x.start_offset for x in row.locations] == [middle, log.segments[3].base_offset]
    (row,) = located(log, middle, log.segments[2].end_offset).partitions
    assert len(row.locations) == 1 and row.locations[0].base_offset == middle - 3
    (row,) = located(log, middle, log.records + 5).partitions
    *objects, rest = row.locations
    assert rest.kind == layout.LOCATION_BROKER and rest.key is None
    assert rest.start_offset == objects[-1].end_offset and rest.end_offset == log.records
    (row,) = located(log, log.records, layout.TO_TIERED_END).partitions
    assert (row.error_code, row.locations) == (0, [])


@pytest.mark.parametrize("prefers", [False, True])
def test_a_planner_asks_once(log: ColdLog, prefers: bool) -> None:
    """Also where the range ends with what the broker has itself."""

    def asked() -> int:
        return int(log.broker.statistics()["broker_requests_by_api"].get("LocateRecords", 0))

    before = asked()
    own = log.settings(prefer_cold=prefers, client_id=f"planner {prefers}")
    with kdirect.connect(own) as session:
        places = session.locate({TP: (0, log.records)})[TP]
    assert places[-1].end_offset == log.segments[-1].end_offset < log.records
    assert asked() == before + 1


def test_what_is_refused(log: ColdLog) -> None:
    (row,) = located(log, log.records + 1).partitions
    assert row.error_code == ErrorCode.OFFSET_OUT_OF_RANGE
    assert f"offset {log.records + 1} of cold-0 is outside [0, {log.records}]" in row.error_message
    (row,) = located(log, 0, topic="none").partitions
    assert row.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    (row,) = located(log, 0, current_leader_epoch=7).partitions
    assert row.error_code == ErrorCode.UNKNOWN_LEADER_EPOCH


@pytest.mark.parametrize("whose", ["the topic", "this broker"])
def test_who_may_not_read_past_the_broker(tmp_path: Path, whose: str) -> None:
    (tmp_path / "store").mkdir()
    place = directory_place(tmp_path / "store")
    access = "broker" if whose == "this broker" else "config"
    with cold_log(tmp_path, place, access, records=300) as log:
        if whose == "the topic":
            assert located(log, 0).partitions[0].locations
            with kdirect.connect(log.servers) as session:
                session.admin.alter_configs(TOPIC, {"remote.log.client.access": "broker"})
        (row,) = located(log, 0).partitions
        assert row.error_code == layout.ERROR_ACCESS_DISABLED and not row.locations
        assert f"remote.log.client.access of {whose} is broker" in row.error_message


def test_signed_urls(tmp_path: Path, object_stores: Any) -> None:
    with cold_log(tmp_path, object_stores["s3"].fresh(), "presigned", records=300) as log:
        answer = located(log, 0)
        (row,) = answer.partitions
        assert answer.store_uri is None and len(row.locations) == len(log.segments)
        for location in row.locations:
            data = get_presigned(location.url, location.tail_position, location.tail_length)
            assert data[-8:] == layout.OBJECT_MAGIC


def test_a_store_without_signatures_says_so(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    with cold_log(tmp_path, directory_place(tmp_path / "store"), "presigned", records=300) as log:
        (row,) = located(log, 0).partitions
        assert row.error_code == ErrorCode.INVALID_CONFIG and not row.locations
        assert "only S3 has them" in row.error_message


def test_only_a_broker_with_tiers_is_asked(broker: Any) -> None:
    host, _, port = broker.bootstrap_servers.rpartition(":")
    connection = Connection(host, int(port), timeout_ms=10_000)
    try:
        assert connection.is_kdirect and not connection.supports(layout.API_LOCATE_RECORDS)
    finally:
        connection.close()
