"""Brokers of a cluster, in this process, over a real ZooKeeper: who is who, topics, configs, and
joining, through any broker."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient
from kazoo.client import KazooClient

import kdirect
from kdirect.errors import ConfigError, LogError
from kdirect.format import protocol as p
from kdirect.format.error_codes import ErrorCode as E
from kdirect.format.schema import build
from kdirect.model import TopicPartition
from tests.broker.conftest import call_on_loop
from tests.members.conftest import TEST_PROPERTIES, wait_for_members
from tests.members.wire import RECORD, ask, create, fetch, metadata, partition_row, produce
from tests.support import wait_until


def ids(rows: Any) -> list[int]:
    return sorted(row.node_id for row in rows)


def code(row: Any) -> E:
    return E(row.error_code)


def test_metadata_names_brokers_racks_replicas_and_who_is_in_sync(brokers: Any) -> None:
    ours = brokers(3, racks=["a", "b", "c"])
    created = create(ours[2], "t", partitions=3, factor=3)
    assert (code(created), created.num_partitions, created.replication_factor) == (E.NONE, 3, 3)
    for broker in ours:
        wait_until(lambda b=broker: metadata(b, ["t"]).topics[0].error_code == 0, "it was seen")
        answers = {v: metadata(broker, ["t"], v) for v in range(13)}
        for version, answer in answers.items():
            assert ids(answer.brokers) == [1, 2, 3]
            rows = answer.topics[0].partitions
            assert [r.error_code for r in rows] == [0, 0, 0]
            assert sorted(r.leader_id for r in rows) == [1, 2, 3]
            assert all(sorted(r.replica_nodes) == [1, 2, 3] for r in rows)
            assert all(sorted(r.isr_nodes) == [1, 2, 3] for r in rows)
            if version >= 1:
                assert {b.rack for b in answer.brokers} == {"a", "b", "c"}
                assert answer.controller_id in (1, 2, 3)
            if version >= 5:
                assert all(list(r.offline_replicas) == [] for r in rows)
            if version >= 7:
                assert all(r.leader_epoch == 0 for r in rows)
    described = ask(ours[1], build(p.DescribeClusterRequest), 0)
    assert sorted(b.broker_id for b in described.brokers) == [1, 2, 3]
    assert {b.rack for b in described.brokers} == {"a", "b", "c"}
    stock = AdminClient({"bootstrap.servers": ours[0].bootstrap_servers}).list_topics(timeout=10)
    assert sorted(stock.brokers) == [1, 2, 3] and len(stock.topics["t"].partitions) == 3


def test_a_broker_that_stops_leaves_metadata_and_its_replicas_are_offline(brokers: Any) -> None:
    ours = brokers(2)
    assert code(create(ours[0], "t", assignment={0: (1, 2), 1: (2, 1)})) is E.NONE
    assert code(create(ours[0], "alone", assignment={0: (2,)})) is E.NONE
    ours[1].stop()
    wait_until(lambda: ids(metadata(ours[0]).brokers) == [1], "the broker left")
    rows = {r.partition_index: r for r in metadata(ours[0], ["t"]).topics[0].partitions}
    assert [rows[i].leader_id for i in range(2)] == [1, 1]
    assert all(list(r.offline_replicas) == [2] for r in rows.values())
    assert rows[1].leader_epoch > 0
    alone = TopicPartition("alone", 0)
    wait_until(lambda: partition_row(ours[0], alone).leader_id == -1, "nobody leads it")
    row = partition_row(ours[0], alone)
    assert code(row) is E.LEADER_NOT_AVAILABLE and list(row.offline_replicas) == [2]
    ours[1].start()
    wait_until(lambda: partition_row(ours[0], alone).leader_id == 2, "it is back")


def test_topics_are_created_checked_grown_and_deleted_through_any_broker(brokers: Any) -> None:
    ours = brokers(
        2, default_replication_factor=2, num_partitions=3, log_segment_delete_delay_ms=100
    )
    refused = {
        "factor": (create(ours[0], "x", partitions=1, factor=3), E.INVALID_REPLICATION_FACTOR),
        "unknown": (create(ours[1], "x", assignment={0: (1, 7)}), E.INVALID_REPLICA_ASSIGNMENT),
        "twice": (create(ours[1], "x", assignment={0: (1, 1)}), E.INVALID_REPLICA_ASSIGNMENT),
        "gap": (create(ours[1], "x", assignment={1: (1,)}), E.INVALID_REPLICA_ASSIGNMENT),
        "name": (create(ours[0], "a b", partitions=1, factor=1), E.INVALID_TOPIC_EXCEPTION),
        "count": (create(ours[0], "x", partitions=0, factor=1), E.INVALID_PARTITIONS),
        "config": (create(ours[0], "x", retention_ms="soon"), E.INVALID_CONFIG),
    }
    for what, (row, expected) in refused.items():
        assert code(row) is expected, what
        assert row.error_message
    assert code(create(ours[1], "t", validate_only=True)) is E.NONE
    assert metadata(ours[0], ["t"]).topics[0].error_code == E.UNKNOWN_TOPIC_OR_PARTITION
    created = create(ours[1], "t", retention_ms=1234567)  # what the broker's defaults say
    assert (created.num_partitions, created.replication_factor) == (3, 2)
    assert {c.name: c.value for c in created.configs}["retention.ms"] == "1234567"
    assert code(create(ours[0], "t")) is E.TOPIC_ALREADY_EXISTS
    grow = build(
        p.CreatePartitionsRequest,
        topics=[{"name": "t", "count": 4, "assignments": [{"broker_ids": [2, 1]}]}],
        timeout_ms=20_000,
        validate_only=False,
    )
    assert code(ask(ours[0], grow, 3).results[0]) is E.NONE
    assert list(partition_row(ours[0], TopicPartition("t", 3)).replica_nodes) == [2, 1]
    assert code(ask(ours[0], grow, 3).results[0]) is E.INVALID_PARTITIONS
    for broker in ours:
        wait_until(lambda b=broker: len(list(b.log_dirs[0].glob("t-*"))) == 4, "all were made")
    doomed = [{"name": "t", "topic_id": None}]
    delete = build(p.DeleteTopicsRequest, topics=doomed, timeout_ms=20_000)
    assert code(ask(ours[1], delete, 6).responses[0]) is E.NONE
    assert metadata(ours[1], ["t"]).topics[0].error_code == E.UNKNOWN_TOPIC_OR_PARTITION
    for broker in ours:
        wait_until(lambda b=broker: not list(b.log_dirs[0].glob("t-*")), "all were removed")
    assert code(ask(ours[0], delete, 6).responses[0]) is E.UNKNOWN_TOPIC_OR_PARTITION


def test_missing_topics_are_created_for_whoever_asks_for_metadata(brokers: Any) -> None:
    ours = brokers(2, default_replication_factor=2, auto_create_topics_enable=True)
    names = [{"topic_id": None, "name": name} for name in ("auto", "a b")]
    request = build(p.MetadataRequest, topics=names, allow_auto_topic_creation=True)
    rows = {t.name: t for t in ask(ours[1], request, 12).topics}
    assert code(rows["auto"]) is E.LEADER_NOT_AVAILABLE and not rows["auto"].partitions
    assert code(rows["a b"]) is E.INVALID_TOPIC_EXCEPTION
    wait_until(lambda: code(metadata(ours[1], ["auto"]).topics[0]) is E.NONE, "the topic")
    row = metadata(ours[1], ["auto"]).topics[0]
    assert sorted(row.partitions[0].replica_nodes) == [1, 2]


def alter(broker: Any, kind: int, name: str, **values: Any) -> Any:
    configs = [
        {
            "name": key.replace("_", "."),
            "config_operation": 1 if value is None else 0,
            "value": None if value is None else str(value),
        }
        for key, value in values.items()
    ]
    resource = {"resource_type": kind, "resource_name": name, "configs": configs}
    request = build(p.IncrementalAlterConfigsRequest, resources=[resource], validate_only=False)
    return ask(broker, request, 1).responses[0]


def described(broker: Any, kind: int, name: str) -> dict[str, str]:
    resource = {"resource_type": kind, "resource_name": name, "configuration_keys": None}
    request = build(p.DescribeConfigsRequest, resources=[resource])
    return {c.name: c.value for c in ask(broker, request, 4).results[0].configs}


def test_configs_of_topics_and_brokers_change_through_any_broker(brokers: Any) -> None:
    ours = brokers(2)
    create(ours[0], "t", partitions=1, factor=2)
    assert code(alter(ours[1], 2, "t", segment_bytes=2 << 20)) is E.NONE
    assert described(ours[1], 2, "t")["segment.bytes"] == str(2 << 20)
    tp = TopicPartition("t", 0)
    for broker in ours:
        found = broker.server.logs.partitions
        wait_until(
            lambda f=found: tp in f and f[tp].config.segment_bytes == 2 << 20,
            "the log is configured",
        )
    assert code(alter(ours[0], 2, "t", retention_ms="x")) is E.INVALID_CONFIG
    assert code(alter(ours[0], 2, "u", retention_ms=1)) is E.UNKNOWN_TOPIC_OR_PARTITION
    rate = "leader.replication.throttled.rate"
    assert code(alter(ours[0], 4, "2", leader_replication_throttled_rate=1000)) is E.NONE
    wait_until(lambda: described(ours[1], 4, "2")[rate] == "1000", "the broker knows")
    assert code(alter(ours[0], 4, "", log_cleaner_backoff_ms=77)) is E.NONE
    assert code(alter(ours[1], 4, "2", log_cleaner_threads=2)) is E.NONE
    assert code(alter(ours[1], 4, "2", log_cleaner_threads=5)) is E.INVALID_REQUEST
    for broker, threads in zip(ours, (1, 2), strict=True):
        cleaner = broker.server.cleaner
        wait_until(lambda c=cleaner: c._config["log.cleaner.backoff.ms"] == 77)
        wait_until(lambda c=cleaner, n=threads: len(c._threads) == n)
    assert code(alter(ours[0], 4, "2", num_partitions=3)) is E.INVALID_REQUEST
    assert code(alter(ours[0], 4, "2", min_insync_replicas=2)) is E.INVALID_REQUEST
    assert code(alter(ours[0], 4, "", min_insync_replicas=2)) is E.NONE
    assert code(alter(ours[0], 4, "2", leader_replication_throttled_rate=None)) is E.NONE
    wait_until(lambda: described(ours[1], 4, "2")[rate] != "1000", "it was taken back")


def test_properties_of_all_kinds_are_the_clusters(brokers: Any) -> None:
    """They apply at once where they were asked for, soon elsewhere, and outlive the controller."""
    ours = brokers(2, log_retention_ms=5000)
    create(ours[0], "t", partitions=1, factor=2)
    tp, group = TopicPartition("t", 0), "a/b 100%.."

    def retention(broker: Any) -> int:
        return broker.server.logs.partitions[tp].config.retention_ms

    for broker in ours:
        wait_until(lambda b=broker: tp in b.server.logs.partitions, "the replica was made")
    assert code(alter(ours[1], 4, "", log_retention_ms=6000)) is E.NONE
    assert retention(ours[1]) == 6000
    wait_until(lambda: retention(ours[0]) == 6000, "the other broker follows")
    assert code(alter(ours[0], 4, "2", log_retention_ms=7000)) is E.NONE
    wait_until(lambda: retention(ours[1]) == 7000, "its own goes before that of all")
    assert retention(ours[0]) == 6000
    assert code(alter(ours[0], 4, "1", log_segment_bytes=1)) is E.INVALID_REQUEST
    assert code(alter(ours[0], 4, "", sasl_kerberos_kinit_cmd="/x")) is E.INVALID_REQUEST
    assert code(alter(ours[0], 4, "2", sasl_kerberos_kinit_cmd="/x")) is E.NONE
    kinit = "sasl.kerberos.kinit.cmd"
    wait_until(lambda: described(ours[1], 4, "2")[kinit] == "/x", "the broker keeps it")
    assert code(alter(ours[0], 32, group, consumer_session_timeout_ms=50_000)) is E.NONE
    assert code(alter(ours[0], 32, group, consumer_session_timeout_ms=1)) is E.INVALID_CONFIG
    assert code(alter(ours[0], 32, "", consumer_session_timeout_ms=50_000)) is E.INVALID_REQUEST
    assert code(alter(ours[1], 16, "m", interval_ms=200, metrics="a.")) is E.NONE
    assert code(alter(ours[1], 16, "m", match="shoe=1")) is E.INVALID_CONFIG

    def told(broker: Any) -> tuple[str, str]:
        session = described(broker, 32, group)["consumer.session.timeout.ms"]
        return session, described(broker, 16, "m")["interval.ms"]

    for broker in ours:
        wait_until(lambda b=broker: told(b) == ("50000", "200"), "every broker knows")
    assert code(alter(ours[1], 8, "1", kdirect="INFO")) is E.INVALID_REQUEST
    ours[0].stop()
    ours[1].stop()
    ours[1].start()  # a controller that has read all of it from the store
    assert retention(ours[1]) == 7000 and told(ours[1]) == ("50000", "200")
    assert code(alter(ours[1], 32, group, consumer_session_timeout_ms=None)) is E.NONE
    assert code(alter(ours[1], 4, "2", log_retention_ms=None)) is E.NONE
    assert retention(ours[1]) == 6000
    request = build(p.ListConfigResourcesRequest, resource_types=[32, 16, 4])
    listed = ask(ours[1], request, 1).config_resources
    assert [(r.resource_type, r.resource_name) for r in listed] == [(16, "m"), (4, "2")]


def test_producer_ids_are_given_once(brokers: Any) -> None:
    ours = brokers(2)
    request = build(p.InitProducerIdRequest, transactional_id=None, transaction_timeout_ms=1)
    given = [ask(broker, request, 4).producer_id for broker in ours for _ in range(3)]
    assert len(set(given)) == 6 and min(given) >= 0


def test_a_lone_broker_loads_nothing_of_a_cluster() -> None:
    program = """
import sys, kdirect
with kdirect.Broker():
    rooms = ("kazoo", "kdirect.member", "kdirect.store.", "kdirect.cluster.image")
    print([name for name in sys.modules if name.startswith(rooms)])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    # The form of its own files is in the room of stores; it is all that it loads of it.
    own = "['kdirect.store.own_files']"
    assert (done.stdout.strip(), done.returncode) == (own, 0), done.stderr


def test_a_lone_broker_brings_its_topics_along(zookeeper_connect: str, tmp_path: Path) -> None:
    alone = kdirect.Broker(tmp_path / "one")
    with alone:
        create(alone, "t", partitions=2, factor=1, retention_ms=7654321)
        assert produce(alone, TopicPartition("t", 1))[0].base_offset == 0
        before = metadata(alone, ["t"]).topics[0].topic_id
        request = build(p.InitProducerIdRequest, transactional_id=None, transaction_timeout_ms=1)
        last_id = ask(alone, request, 4).producer_id
    properties = {"zookeeper.connect": zookeeper_connect, **TEST_PROPERTIES}
    with (
        kdirect.Broker(tmp_path / "one", properties=properties) as joined,
        kdirect.Broker(tmp_path / "two", properties={**properties, "node.id": 2}) as other,
    ):
        wait_for_members([joined, other])
        row = metadata(other, ["t"]).topics[0]
        assert row.topic_id == before
        assert [list(x.replica_nodes) for x in row.partitions] == [[1], [1]]
        assert described(other, 2, "t")["retention.ms"] == "7654321"
        found = wait_until(
            lambda: r if not (r := fetch(joined, TopicPartition("t", 1))).error_code else None
        )
        assert found.high_watermark == 1 and bytes(found.records)
        answer = produce(joined, TopicPartition("t", 1))[0]
        assert (code(answer), answer.base_offset) == (E.NONE, 1)
        assert ask(joined, request, 4).producer_id > last_id
    with kdirect.Broker(tmp_path / "one", properties=properties) as again:  # nothing to bring
        wait_until(lambda: partition_row(again, TopicPartition("t", 0)).leader_id == 1, "it leads")


def test_a_lone_broker_joins_a_cluster_that_is_there(brokers: Any, tmp_path: Path) -> None:
    mine = TopicPartition("mine", 0)
    with kdirect.Broker(tmp_path / "lone", node_id=2) as alone:
        create(alone, "mine", partitions=1, factor=1)
        assert code(produce(alone, mine)[0]) is E.NONE
        # As in a log that was copied from another cluster.
        call_on_loop(alone, lambda: alone.server.logs.partitions[mine].set_leader_epoch(5))
    (there,) = brokers(1)
    zookeeper = there.server.config["zookeeper.connect"]
    properties = {"zookeeper.connect": zookeeper, **TEST_PROPERTIES}
    with pytest.raises(ConfigError, match="in use"):
        kdirect.Broker(tmp_path / "new", properties={**properties, "node.id": 1}).start()
    with pytest.raises(LogError, match="node"):  # the directory is broker 2's
        kdirect.Broker(tmp_path / "lone", properties={**properties, "node.id": 3}).start()
    with kdirect.Broker(tmp_path / "lone", properties={**properties, "node.id": 2}) as joined:
        wait_for_members([there, joined])
        assert joined.server.logs.cluster_id == there.server.logs.cluster_id
        assert list(partition_row(there, mine).replica_nodes) == [2]
        assert partition_row(there, mine).leader_epoch >= 5
        wait_until(lambda: code(produce(joined, mine)[0]) is E.NONE, "it is led")
        wait_until(lambda: fetch(joined, mine).records, "its records are there")


def test_a_directory_of_another_cluster_is_refused(
    zookeeper_connect: str, nodes: KazooClient, tmp_path: Path
) -> None:
    properties = {"zookeeper.connect": zookeeper_connect, **TEST_PROPERTIES}
    with kdirect.Broker(tmp_path / "one", properties=properties) as broker:
        assert broker.server.logs.cluster_id
    nodes.delete("/cluster/id")
    with kdirect.Broker(tmp_path / "two", properties=properties):
        pass
    with pytest.raises(LogError, match="cluster"):
        kdirect.Broker(tmp_path / "one", properties=properties).start()


def test_records_outlive_a_store_that_has_lost_its_topics(brokers: Any, nodes: KazooClient) -> None:
    (broker,) = brokers(1)
    tp = TopicPartition("t", 0)
    assert code(create(broker, "t", partitions=1, factor=1)) is E.NONE
    wait_until(lambda: code(produce(broker, tp)[0]) is E.NONE, "it serves")
    directory = broker.server.logs.partitions[tp].directory
    nodes.delete("/brokers/topics", recursive=True)
    nodes.delete("/kdirect/changes")
    kept = wait_until(lambda: list(directory.parent.glob("t-0.*-stray")), "it was put aside")
    assert not directory.exists()
    assert (kept[0] / f"{0:020}.log").stat().st_size
    broker.stop()
    broker.start()  # what was put aside is left alone
    assert kept[0].is_dir() and not broker.server.logs.partitions


def test_a_replica_that_was_lost_leads_nobody_astray(brokers: Any) -> None:
    """Its broker lost nothing else, and was the last one in sync."""
    ours = brokers(2)
    first, second = ours
    tps = [TopicPartition("t", number) for number in range(2)]
    created = create(first, "t", assignment={0: (1, 2), 1: (1, 2)}, min_insync_replicas=2)
    assert code(created) is E.NONE
    for tp in tps:
        wait_until(lambda tp=tp: code(produce(first, tp)[0]) is E.NONE, "it serves")
    ends = {tp: fetch(first, tp).high_watermark for tp in tps}
    second.stop()
    wait_until(lambda: list(partition_row(first, tps[0]).isr_nodes) == [1], "the other one left")
    directory = first.server.logs.partitions[tps[0]].directory
    first.stop()
    shutil.rmtree(directory)
    for _ in range(2):  # the second time it is there again, and empty
        first.start()
        wait_until(lambda: partition_row(first, tps[0]).leader_id == -1, "it does not lead it")
        wait_until(lambda: partition_row(first, tps[1]).leader_id == 1, "it leads what it has")
        wait_until(lambda: tps[0] in first.server.logs.partitions, "it was made again")
        if _ == 0:
            first.stop()
    second.start()
    wait_until(lambda: partition_row(first, tps[0]).leader_id == 2, "the other one leads it")
    wait_until(
        lambda: sorted(partition_row(first, tps[0]).isr_nodes) == [1, 2], "the first one follows"
    )
    for tp, leader in zip(tps, (second, first), strict=True):
        wait_until(
            lambda tp=tp, leader=leader: fetch(leader, tp).high_watermark >= ends[tp],
            "nothing is lost",
        )


def test_a_broker_of_an_emptied_store_begins_a_new_cluster_on_purpose(
    brokers: Any, nodes: KazooClient
) -> None:
    """By the way that the error tells."""
    (broker,) = brokers(1)
    tp = TopicPartition("t", 0)
    assert code(create(broker, "t", partitions=1, factor=1)) is E.NONE
    wait_until(lambda: code(produce(broker, tp)[0]) is E.NONE, "it serves")
    topic_id = metadata(broker, ["t"]).topics[0].topic_id
    (log_dir,) = broker.log_dirs
    broker.stop()
    for name in nodes.get_children("/"):
        nodes.delete(f"/{name}", recursive=True)
    with pytest.raises(ConfigError, match=r"once without zookeeper\.connect"):
        broker.start()
    assert nodes.get_children("/") == []
    with kdirect.Broker(log_dir):
        pass
    broker.start()
    wait_until(lambda: code(produce(broker, tp)[0]) is E.NONE, "it serves again")
    assert metadata(broker, ["t"]).topics[0].topic_id == topic_id
    assert fetch(broker, tp).high_watermark == 2


def test_replicas_of_a_topic_whose_node_is_damaged_are_left_alone(
    brokers: Any, nodes: KazooClient
) -> None:
    (broker,) = brokers(1)
    tp = TopicPartition("t", 0)
    assert code(create(broker, "t", partitions=1, factor=1)) is E.NONE
    wait_until(lambda: code(produce(broker, tp)[0]) is E.NONE, "it serves")
    broker.stop()
    good, _ = nodes.get("/brokers/topics/t")
    nodes.set("/brokers/topics/t", b"{")
    broker.start()
    assert tp in broker.server.logs.partitions
    assert metadata(broker, ["t"]).topics[0].error_code == E.UNKNOWN_TOPIC_OR_PARTITION
    nodes.set("/brokers/topics/t", good)
    found = wait_until(lambda: r if (r := fetch(broker, tp)).records else None, "it is served")
    assert found.high_watermark == 1


def test_two_listeners_of_one_name_are_refused(zookeeper_connect: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name"):
        kdirect.Broker(
            tmp_path / "one",
            listeners="127.0.0.1:0,127.0.0.1:0",
            zookeeper_connect=zookeeper_connect,
        ).start()


def test_records_of_a_deleted_topic_are_gone_with_its_name_reused(brokers: Any) -> None:
    (broker,) = brokers(1)
    tp = TopicPartition("t", 0)
    delete = build(
        p.DeleteTopicsRequest, topics=[{"name": "t", "topic_id": None}], timeout_ms=20_000
    )
    for _ in range(2):
        assert code(create(broker, "t", partitions=1, factor=1)) is E.NONE
        row = wait_until(lambda: r if not (r := produce(broker, tp)[0]).error_code else None)
        assert row.base_offset == 0
        assert code(ask(broker, delete, 6).responses[0]) is E.NONE
    assert RECORD
    assert not list(broker.log_dirs[0].glob("*-stray"))
