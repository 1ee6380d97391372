"""Tiered storage of a cluster whose brokers are in this process: what they say to clients and to
one another, which brokers belong to such a cluster, and the metadata topic itself."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest

import kdirect
from kdirect.broker import member_remote
from kdirect.broker.remote_metadata import metadata_partition
from kdirect.cli_remote import _partitions
from kdirect.errors import BrokerError, ConfigError
from kdirect.format import protocol as p
from kdirect.format.error_codes import ErrorCode
from kdirect.format.ids import encode_id
from kdirect.format.remote_metadata import (
    PartitionDeleteState,
    RemotePartitionDelete,
    RemoteSegment,
    SegmentState,
    pack_record,
)
from kdirect.format.schema import build
from kdirect.log.partition import Partition
from kdirect.model import TopicPartition
from kdirect.storage import ownership, remote_logs
from kdirect.storage.upload import key_of
from tests.members import wire
from tests.support import wait_until

TP = TopicPartition("t", 0)
METADATA = TopicPartition("__remote_log_metadata", 0)
TIERED = {
    "remote.storage.enable": "true",
    "segment.bytes": "16384",
    "local.retention.bytes": "1",
    "retention.ms": "-1",
}


class Members:
    """Brokers of a cluster with tiered storage, in a directory."""

    def __init__(self, brokers: list[Any], store: Path) -> None:
        self.brokers = brokers
        self.store = store
        self._by_id = {broker.server.config["node.id"]: broker for broker in brokers}
        self.servers = ",".join(broker.bootstrap_servers for broker in brokers)
        self.session = kdirect.connect({"bootstrap.servers": self.servers, "transport": "tcp"})

    def create(self, **configs: Any) -> None:
        own = {name.replace("_", "."): str(value) for name, value in configs.items()}
        self.session.admin.create_topic(
            TP.topic, 1, replication_factor=len(self.brokers), configs={**TIERED, **own}
        )

    def leader(self, tp: TopicPartition = TP) -> Any:
        """The broker."""
        found = self.session.cluster.topic(tp.topic, refresh=True).partition(tp.partition).leader
        return self._by_id.get(found)

    def partition(self, broker: Any) -> Partition:
        found: Partition = broker.server.logs.partitions[TP]
        return found

    def produce(self, count: int, at_ms: int = 1_000_000) -> None:
        """Records of 100 bytes that begin with their number, 1 ms apart."""
        producer = confluent_kafka.Producer(
            {"bootstrap.servers": self.servers, "batch.num.messages": 20, "log_level": 0}
        )
        for i in range(count):
            producer.produce("t", b"%08d" % i + bytes(92), partition=0, timestamp=at_ms + i)
            if i % 20 == 19:
                producer.flush()
        assert producer.flush(30) == 0

    def settle(self) -> None:
        wait_until(
            lambda: all(len(self.partition(b).segments) == 1 for b in self.brokers),
            "what is copied is gone everywhere",
            60,
        )

    def objects(self) -> list[Path]:
        return list(self.store.rglob("*.kseg"))


@pytest.fixture
def members(brokers: Callable[..., list[Any]], tmp_path: Path) -> Iterator[Callable[..., Members]]:
    """``members(2, **properties)``"""
    made = []

    def start(count: int = 2, **more: Any) -> Members:
        store = tmp_path / "store"
        store.mkdir()
        found = brokers(
            count,
            remote_log_storage_system_enable=True,
            remote_log_storage_uri=store.as_uri(),
            rlmm_config_remote_log_metadata_topic_replication_factor=count,
            remote_log_manager_task_interval_ms=100,
            log_retention_check_interval_ms=50,
            rdma_transports="",
            **more,
        )
        made.append(Members(found, store))
        return made[-1]

    yield start
    for each in made:
        each.session.close()


# -- what clients see ------------------------------------------------------------------------------


def fetch(broker: Any, offset: int, rack: str = "") -> Any:
    row = {
        "partition": 0,
        "current_leader_epoch": -1,
        "fetch_offset": offset,
        "last_fetched_epoch": -1,
        "log_start_offset": -1,
        "partition_max_bytes": 1 << 20,
    }
    request = build(
        p.FetchRequest,
        replica_id=-1,
        max_wait_ms=5000,
        min_bytes=1,
        max_bytes=1 << 20,
        session_epoch=-1,
        topics=[{"topic": "t", "partitions": [row]}],
        forgotten_topics_data=[],
        rack_id=rack,
    )
    return wire.ask(broker, request, 12).responses[0].partitions[0]


def test_consumers_are_sent_to_the_leader_for_what_is_cold(members: Any) -> None:
    cluster = members(2, racks=["a", "b"])
    cluster.create()
    cluster.produce(1000)
    cluster.settle()
    leader = cluster.leader()
    follower = next(b for b in cluster.brokers if b is not leader)
    racks = {b: b.server.config["broker.rack"] for b in cluster.brokers}
    end = cluster.partition(leader).local_log_start_offset
    assert cluster.partition(follower).local_log_start_offset == end > 0
    row = fetch(follower, 5, racks[follower])
    assert (row.error_code, row.records) == (0, b"")
    assert row.preferred_read_replica == leader.server.config["node.id"]
    row = fetch(leader, 5, racks[follower])
    assert row.preferred_read_replica == -1 and row.records
    row = fetch(leader, end, racks[follower])
    assert row.preferred_read_replica == follower.server.config["node.id"]
    assert fetch(follower, end, racks[follower]).records
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": cluster.servers,
            "client.rack": racks[follower],
            "group.id": "g",
            "auto.offset.reset": "error",
            "enable.auto.commit": False,
            "log_level": 0,
        }
    )
    consumer.assign([confluent_kafka.TopicPartition("t", 0, 0)])
    got: list[int] = []
    deadline = time.monotonic() + 60
    while len(got) < 1000 and time.monotonic() < deadline:
        for message in consumer.consume(500, 0.5):
            assert message.error() is None
            got.append(int(message.value()[:8]))
    consumer.close()
    assert got == list(range(1000))


def test_leaders_tell_offsets_of_both_tiers(members: Any) -> None:
    cluster = members(2)
    cluster.create()
    cluster.produce(1000)
    cluster.settle()
    leader = cluster.leader()
    end = cluster.partition(leader).local_log_start_offset

    def offset(timestamp: int) -> int:
        row = {"partition_index": 0, "current_leader_epoch": -1, "timestamp": timestamp}
        request = build(
            p.ListOffsetsRequest,
            replica_id=-1,
            isolation_level=0,
            topics=[{"name": "t", "partitions": [row]}],
            timeout_ms=5000,
        )
        found = wire.ask(leader, request, 10).topics[0].partitions[0]
        assert found.error_code == 0
        return int(found.offset)

    assert (offset(-2), offset(-4), offset(-5), offset(-1)) == (0, end, end - 1, 1000)
    assert (offset(1_000_123), offset(1_000_995), offset(-3)) == (123, 995, 999)
    cluster.session.admin.delete_records({TP: 300})
    assert offset(-2) == 300
    for broker in cluster.brokers:
        wait_until(lambda b=broker: cluster.partition(b).log_start_offset == 300, "all follow")
    wait_until(lambda: len(cluster.objects()) == 5, "what lies below is deleted")


# -- which brokers ---------------------------------------------------------------------------------


def test_brokers_have_one_store(members: Any, brokers: Any, tmp_path: Path) -> None:
    cluster = members(2)
    elsewhere = {
        "remote_log_storage_system_enable": True,
        "remote_log_storage_uri": (tmp_path / "elsewhere").as_uri(),
    }
    with pytest.raises(ConfigError, match=r"broker 1 keeps tiered topics in .*/store, and this"):
        brokers(1, **elsewhere)
    cluster.create()
    with pytest.raises(ConfigError, match=r"system\.enable is false, and topic t is tiered"):
        brokers(1)


def test_a_broker_without_tiered_storage_prevents_tiered_topics(members: Any, brokers: Any) -> None:
    cluster = members(2)
    brokers(1)
    with pytest.raises((BrokerError, ConfigError), match="broker 3 has no tiered storage"):
        cluster.create()


# -- the metadata topic ----------------------------------------------------------------------------


def write(broker: Any, values: list[bytes], **more: Any) -> Any:
    metadata = broker.server.member.membership.metadata
    fields = {
        "broker_id": metadata.node_id,
        "incarnation": metadata.incarnation,
        "partition": 0,
        "records": values,
        **more,
    }
    return wire.ask(broker, build(p.WriteRemoteMetadataRequest, **fields), 0)


def segment(**more: Any) -> RemoteSegment:
    fields = {
        "topic": "gone",
        "topic_id": uuid.uuid4(),
        "partition": 0,
        "segment_id": uuid.uuid4(),
        "base_offset": 0,
        "end_offset": 10,
        "broker_id": 1,
        "max_timestamp_ms": 0,
        "event_timestamp_ms": 0,
        "leader_epochs": ((0, 0),),
        "size": 100,
        "custom": None,
        "state": SegmentState.COPY_SEGMENT_STARTED,
    }
    return RemoteSegment(**{**fields, **more})


def test_clients_make_no_metadata_topic_that_forgets(brokers: Any, members: Any) -> None:
    """With the retention of other topics, what is in the store would be forgotten after a week."""
    cluster = members(2, auto_create_topics_enable=True)
    broker = cluster.brokers[0]
    names = [{"topic_id": None, "name": METADATA.topic}]
    request = build(p.MetadataRequest, topics=names, allow_auto_topic_creation=True)
    found = wire.ask(broker, request, 12).topics[0]
    assert found.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    row = wire.create(broker, METADATA.topic, partitions=1, factor=2)
    assert row.error_code == ErrorCode.INVALID_CONFIG and "retention" in row.error_message
    cluster.create()
    cluster.produce(400)
    cluster.settle()
    with pytest.raises((BrokerError, ConfigError), match=r"INVALID_CONFIG|would be forgotten"):
        cluster.session.admin.alter_configs(METADATA.topic, {"retention.ms": "1000"})


def test_metadata_is_written_by_brokers_that_are_registered(members: Any) -> None:
    cluster = members(2, min_insync_replicas=2)
    cluster.create()
    cluster.produce(400)
    cluster.settle()
    leader = cluster.leader(METADATA)
    other = next(b for b in cluster.brokers if b is not leader)
    good = [pack_record(segment())]
    assert write(leader, good).error_code == 0
    found = write(leader, good, incarnation=1)
    assert found.error_code == ErrorCode.STALE_BROKER_EPOCH
    found = write(leader, [b"\x00\x00\xff"])
    assert found.error_code == ErrorCode.INVALID_RECORD and found.error_message
    assert write(leader, good, partition=7).error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert write(other, good).error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
    row, _ = wire.produce(leader, METADATA)
    assert row.error_code == ErrorCode.INVALID_TOPIC_EXCEPTION, "clients write nothing there"
    other.stop()
    wait_until(
        lambda: write(leader, good).error_code == ErrorCode.NOT_ENOUGH_REPLICAS,
        "below min.insync.replicas nothing is taken",
        60,
    )
    other.start()


def test_a_copy_that_was_given_up_and_came_late_is_swept(members: Any) -> None:
    """By who leads its metadata; an object of which the metadata never spoke is left alone."""
    cluster = members(2, remote_orphan_age_ms=2000)
    cluster.create()
    wait_until(lambda: all(TP in b.server.logs.partitions for b in cluster.brokers), "it is made")
    topic_id = encode_id(cluster.partition(cluster.leader()).topic_id)
    cluster_id = cluster.leader().server.logs.cluster_id
    partition = cluster.store / cluster_id / f"t-{topic_id}" / "0"
    partition.parent.mkdir(parents=True, exist_ok=True)
    partition.write_bytes(b"a file where a folder has to be")
    cluster.produce(400)
    given_up: dict[Any, Any] = {}

    def gave_up() -> bool:
        for broker in cluster.brokers:
            for found in list(broker.server.remote.table.partitions.values()):
                given_up.update(found.given_up)
        return bool(given_up)

    errors = [b.statistics for b in cluster.brokers]
    wait_until(lambda: any(s()["remote_copy_errors"] for s in errors), "a copy fails", 60)
    partition.unlink()
    wait_until(gave_up, "a copy is given up", 60)
    cluster.settle()
    known = set(cluster.objects())
    segment = next(iter(given_up.values()))
    late = cluster.store / key_of(segment, cluster_id)
    late.write_bytes(b"of nobody")
    unknown = late.with_name(f"{0:020}-{encode_id(uuid.uuid4())}.kseg")
    unknown.write_bytes(b"of another cluster, for all that is known")
    wait_until(lambda: not late.exists(), "it is swept", 30)
    assert set(cluster.objects()) == known | {unknown}


def test_a_cluster_stops_where_another_one_is_the_owner(
    members: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy of a whole cluster, say, that has started since."""
    monkeypatch.setattr(remote_logs, "OWNER_COPIES_S", 0.0)
    monkeypatch.setattr(ownership, "LOST_FOR_S", 0.2)
    cluster = members(2)
    cluster.create()
    cluster.produce(400)
    cluster.settle()
    leader = cluster.leader()
    folder = f"{leader.server.logs.cluster_id}/owners/"
    assert len(ownership.markers(leader.server.remote.store, folder)) == 1
    known = set(cluster.objects())
    foreign = cluster.store / folder / f"{99:020}-another"
    foreign.write_text(json.dumps({"address": "elsewhere:9092"}))
    cluster.produce(400)
    wait_until(lambda: leader.statistics()["remote_not_owner"] == 1, "it stops", 30)
    assert set(cluster.objects()) == known
    foreign.unlink()
    wait_until(lambda: set(cluster.objects()) > known, "it goes on", 30)
    cluster.settle()
    assert leader.statistics()["remote_not_owner"] == 0


def test_the_topic_is_rewritten_when_most_of_it_is_dead(
    members: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What lives is counted at any moment: 21 segments have three records each at most, and the
    # topic has 79 in the end.
    monkeypatch.setattr(member_remote, "REWRITE_RECORDS", 5)
    monkeypatch.setattr(member_remote, "REWRITE_FACTOR", 1)
    cluster = members(2, rlmm_config_remote_log_metadata_topic_num_partitions=2)
    cluster.create()
    cluster.produce(3000)
    cluster.settle()
    assert len(cluster.objects()) == 21
    cluster.session.admin.alter_configs("t", {"retention.bytes": "40000"})
    topic_id = cluster.partition(cluster.brokers[0]).topic_id
    index = metadata_partition((topic_id, 0), 2)
    tp = TopicPartition(METADATA.topic, index)
    wait_until(
        lambda: all(b.server.logs.partitions[tp].log_start_offset > 0 for b in cluster.brokers),
        "it was rewritten, and the follower has heard of it",
        30,
    )
    wait_until(
        lambda: len(cluster.objects()) <= 3,
        lambda: f"old objects stay: {sorted(path.name for path in cluster.objects())}",
    )

    def known() -> set[uuid.UUID]:
        found = _partitions(cluster.session)
        return {i for metadata in found.values() for i in metadata.segments}

    # It may be rewritten while it is read here.
    wait_until(
        lambda: {encode_id(i) for i in known()} == {p.stem[21:] for p in cluster.objects()},
        "the topic tells what is there",
    )
    for broker in cluster.brokers:
        table = broker.server.remote.table.partitions[topic_id, 0]
        wait_until(lambda t=table: set(t.segments) == known(), "all brokers know the same")
    # Brokers that come back read what is left.
    leader = cluster.leader()
    leader.stop()
    leader.start()
    cluster.produce(400)
    cluster.settle()
    start = cluster.session.earliest_offsets([TP])[TP]
    reader = cluster.session.reader(TP, start, 3400)
    offsets = [o for batch in reader for o in batch.column("offset").to_pylist()]
    assert offsets == list(range(start, 3400))


def test_who_reads_the_topic_again_decides_nothing_before_it_knows_all(members: Any) -> None:
    """What was read may be no part of the topic any more, and is read again while this broker leads
    with records of its own leader epoch in it."""
    cluster = members(2)
    cluster.create()
    cluster.produce(1000)
    cluster.settle()
    leader = cluster.leader()
    remote, loop = leader.server.remote, leader.server._loop
    key = cluster.partition(leader).topic_id, 0
    for _ in range(20):
        before = remote.logs._logs[key]  # it may know again before anybody has looked
        loop.call_soon_threadsafe(remote._read._begin_again, 0, 0)
        wait_until(lambda x=before: remote.logs._logs.get(key) is not x, "it has forgotten")
        wait_until(lambda: remote.logs.is_ready(*key), "it knows again")
        assert cluster.partition(leader).log_start_offset == 0
    assert len(read(cluster, 1000)) == 1000
    cluster.produce(400)
    cluster.settle()
    assert len(read(cluster, 1400)) == 1400


def test_a_topic_that_is_tiered_no_longer_leaves_nothing(members: Any) -> None:
    cluster = members(2)
    cluster.create()
    cluster.produce(1000)
    cluster.settle()
    cluster.session.admin.alter_configs(
        "t", {"remote.storage.enable": "false", "remote.log.delete.on.disable": "true"}
    )
    wait_until(lambda: not cluster.objects(), "all of it is deleted", 30)
    wait_until(lambda: not any(m.segments for m in _partitions(cluster.session).values()), "known")
    assert cluster.session.earliest_offsets([TP])[TP] == 980


def test_a_mark_means_nothing_while_the_topic_is_there(members: Any) -> None:
    """A deletion that the controller has not heard of, because its asker died."""
    cluster = members(2)
    cluster.create()
    cluster.produce(400)
    cluster.settle()
    before = set(cluster.objects())
    topic_id = cluster.partition(cluster.brokers[0]).topic_id
    mark = RemotePartitionDelete(
        topic="t",
        topic_id=topic_id,
        partition=0,
        state=PartitionDeleteState.DELETE_PARTITION_MARKED,
        event_timestamp_ms=1,
        broker_id=1,
    )
    assert write(cluster.leader(METADATA), [pack_record(mark)]).error_code == 0
    cluster.produce(400)
    cluster.settle()
    assert before < set(cluster.objects())
    leader = cluster.leader()
    leader.stop()  # nor for the next leader
    leader.start()
    cluster.produce(400)
    cluster.settle()
    assert before < set(cluster.objects())
    cluster.session.admin.delete_topic("t")
    wait_until(lambda: not cluster.objects(), "now it does", 30)


# -- histories -------------------------------------------------------------------------------------


def read(cluster: Members, count: int) -> list[bytes]:
    """Values of all records from 0 on."""
    reader = cluster.session.reader(TP, 0, count)
    rows = [
        (o, v)
        for batch in reader
        for o, v in zip(
            batch.column("offset").to_pylist(), batch.column("value").to_pylist(), strict=True
        )
    ]
    assert [o for o, _ in rows] == list(range(count))
    return [v for _, v in rows]


def test_an_unclean_election_mixes_no_histories(members: Any) -> None:
    """The new leader has fewer records than the old one has copied.  It goes on without them, and
    the old one takes over what it has."""
    cluster = members(3)
    first, second, third = cluster.brokers
    row = wire.create(
        third, "t", assignment={0: [1, 2]}, unclean_leader_election_enable="true",
        **{name.replace(".", "_"): value for name, value in TIERED.items()},
    )  # fmt: skip
    assert row.error_code == 0
    wait_until(lambda: TP in second.server.logs.partitions, "it is made")
    cluster.produce(400)
    wait_until(lambda: cluster.partition(second).high_watermark == 400, "it is copied")
    second.stop()
    cluster.produce(600)
    wait_until(lambda: len(cluster.objects()) == 7, "more is tiered", 60)
    wait_until(lambda: cluster.partition(first).local_log_start_offset == 980, "and gone here")
    first.stop()
    second.start()
    wait_until(lambda: cluster.leader() is second, "it leads, with 400 records", 60)
    assert cluster.session.latest_offsets([TP])[TP] == 400
    cluster.produce(600, at_ms=2_000_000)  # in the place of the lost ones
    expected = [b"%08d" % i + bytes(92) for i in (*range(400), *range(600))]
    wait_until(lambda: len(cluster.partition(second).segments) == 1, "it copies its own", 60)
    assert read(cluster, 1000) == expected
    first.start()
    found = cluster.partition
    wait_until(
        lambda: found(first).first_kept_offset == found(second).first_kept_offset,
        "it begins after what the new leader has tiered",
        60,
    )
    wait_until(lambda: found(first).high_watermark == 1000, "it has the rest", 60)
    assert found(first).log_start_offset == 0
    assert found(first).leader_epochs() == found(second).leader_epochs()
    wait_until(lambda: len(cluster.session.cluster.topic("t", refresh=True).partition(0)
                           .in_sync_replicas) == 2, "it is in sync", 60)  # fmt: skip
    second.stop()
    wait_until(lambda: cluster.leader() is first, "it leads again", 60)
    assert read(cluster, 1000) == expected
    second.start()
