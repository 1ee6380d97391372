"""The nodes' values: as Kafka writes them, there and back, and whatever else somebody put there."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdirect.cluster import paths, records
from kdirect.cluster.partition_state import NO_INCARNATION, PartitionState
from kdirect.cluster.records import (
    BrokerRegistration,
    Change,
    Changes,
    Endpoint,
    ProducerIdBlock,
    StoredState,
    TopicAssignment,
)
from kdirect.errors import CorruptMetadataError
from kdirect.model import TopicPartition
from kdirect.store import local_files

T0 = TopicPartition("t", 0)

# What Kafka 3.x wrote; kafka.zk.ZkData has the fields and their order.
KAFKAS = {
    "/cluster/id": b'{"version":"1","id":"QwX3xFmfR6eCNeKmOrDSlA"}',
    "/brokers/ids/1": (
        b'{"features":{},"listener_security_protocol_map":{"PLAINTEXT":"PLAINTEXT","X":"SSL"},'
        b'"endpoints":["PLAINTEXT://localhost:9092","X://[::1]:9093"],"rack":"r1","jmx_port":-1,'
        b'"port":9092,"host":"localhost","version":5,"timestamp":"1612345678901"}'
    ),
    "/controller": (
        b'{"version":2,"brokerid":1,"timestamp":"1612345678901","kraftControllerEpoch":-1}'
    ),
    "/controller_epoch": b"17",
    "/brokers/topics/t": (
        b'{"removing_replicas":{"0":[1]},"partitions":{"0":[2,3,1],"1":[2]},'
        b'"topic_id":"KQpLrFvZTXKNYPnyRyPtBg","adding_replicas":{"0":[2]},"version":3}'
    ),
    "/brokers/topics/t/partitions/0/state": (
        b'{"controller_epoch":17,"leader":1,"version":1,"leader_epoch":4,"isr":[1,3],'
        b'"leader_recovery_state":0}'
    ),
    "/config/topics/t": b'{"version":1,"config":{"retention.ms":"1000"}}',
    "/admin/reassign_partitions": (
        b'{"version":1,"partitions":[{"topic":"t","partition":0,"replicas":[1,2]}]}'
    ),
    "/latest_producer_id_block": (
        b'{"version":1,"broker":1,"block_start":"1000","block_end":"1999"}'
    ),
}


def decode(path: str, value: bytes) -> Any:
    """Any kind of node."""
    if path.endswith("/state"):
        return records.decode_state(path, value, 6)
    return {
        "/cluster/id": records.decode_cluster_id,
        "/brokers/ids/1": records.decode_broker,
        "/controller": records.decode_controller,
        "/controller_epoch": records.decode_controller_epoch,
        "/brokers/topics/t": records.decode_topic,
        "/config/topics/t": records.decode_config,
        "/admin/reassign_partitions": records.decode_reassignments,
        "/latest_producer_id_block": records.decode_producer_ids,
        "/kdirect/changes": records.decode_changes,
    }[path](path, value)


def test_what_kafka_wrote_is_read() -> None:
    found = {path: decode(path, value) for path, value in KAFKAS.items()}
    assert found["/cluster/id"] == "QwX3xFmfR6eCNeKmOrDSlA"
    assert found["/brokers/ids/1"] == BrokerRegistration(
        (Endpoint("PLAINTEXT", "localhost", 9092), Endpoint("X", "::1", 9093)),
        {"PLAINTEXT": "PLAINTEXT", "X": "SSL"},
        "r1",
        1612345678901,
    )
    assert (found["/controller"], found["/controller_epoch"]) == (1, 17)
    topic = found["/brokers/topics/t"]
    assert topic[1:] == (((2, 3, 1), (2,)), {0: (2,)}, {0: (1,)})
    assert found["/brokers/topics/t/partitions/0/state"] == StoredState(
        PartitionState(1, 4, (1, 3), 6, (), NO_INCARNATION), 17
    )
    assert found["/config/topics/t"] == {"retention.ms": "1000"}
    assert found["/admin/reassign_partitions"] == {T0: (1, 2)}
    assert found["/latest_producer_id_block"] == ProducerIdBlock(1, 1000, 1999)


def test_older_versions_are_read() -> None:
    topic = decode("/brokers/topics/t", b'{"version":1,"partitions":{"0":[1]}}')
    assert topic == TopicAssignment(None, ((1,),))
    again = records.encode_topic(topic)
    assert json.loads(again)["version"] == 2
    assert decode("/brokers/topics/t", again) == topic
    one = decode("/brokers/ids/1", b'{"version":1,"host":"h","port":1,"jmx_port":-1}')
    two = decode("/brokers/ids/1", b'{"version":2,"endpoints":["PLAINTEXT://h:1"]}')
    assert (
        one
        == two
        == BrokerRegistration((Endpoint("PLAINTEXT", "h", 1),), {"PLAINTEXT": "PLAINTEXT"})
    )


def test_the_fields_are_kafkas() -> None:
    kafkas = {path: set(json.loads(value)) for path, value in KAFKAS.items() if value[:1] == b"{"}
    ours = {
        "/cluster/id": records.encode_cluster_id("x"),
        "/brokers/ids/1": records.encode_broker(decode("/brokers/ids/1", KAFKAS["/brokers/ids/1"])),
        "/brokers/topics/t": records.encode_topic(
            decode("/brokers/topics/t", KAFKAS["/brokers/topics/t"])
        ),
        "/config/topics/t": records.encode_config({}),
        "/latest_producer_id_block": records.encode_producer_ids(ProducerIdBlock(1, 0, 999)),
    }
    for path, value in ours.items():
        assert set(json.loads(value)) == kafkas[path], path
    assert set(json.loads(records.encode_controller(1, 2))) == {"version", "brokerid", "timestamp"}
    state = StoredState(PartitionState(1, 0, (1,), 0), 3)
    assert json.loads(records.encode_state(state)) == {
        "controller_epoch": 3, "leader": 1, "version": 1, "leader_epoch": 0, "isr": [1],
    }  # fmt: skip


# -- there and back --------------------------------------------------------------------------------

numbers = st.integers(0, 2**31 - 1)
texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
brokers = st.lists(numbers, min_size=1, max_size=6, unique=True).map(tuple)


names = st.text("abcXYZ_-09", min_size=1, max_size=6)
endpoints = st.builds(
    Endpoint, names, names | st.sampled_from(["::1", "fe80::2"]), st.integers(0, 65535)
)


@given(
    st.lists(endpoints, min_size=1, max_size=3, unique_by=lambda e: e.listener),
    st.none() | texts,
    numbers,
    st.none() | st.integers(0, 2**63 - 1),
    st.none() | texts,
)
def test_a_broker_there_and_back(listeners, rack, timestamp, intact_since, store) -> None:
    protocols = {endpoint.listener: "PLAINTEXT" for endpoint in listeners}
    found = BrokerRegistration(
        tuple(listeners), protocols, rack, timestamp, intact_since, remote_storage=store
    )
    assert records.decode_broker("/brokers/ids/1", records.encode_broker(found)) == found


@given(st.none() | st.uuids(), st.lists(brokers, min_size=1, max_size=4), st.data())
def test_a_topic_there_and_back(topic_id, replicas, data) -> None:
    adding = {p: r[:1] for p, r in enumerate(replicas) if data.draw(st.booleans())}
    removing = {p: r[1:] for p, r in enumerate(replicas) if r[1:] and data.draw(st.booleans())}
    topic = TopicAssignment(topic_id, tuple(replicas), adding, removing)
    assert records.decode_topic("/brokers/topics/t", records.encode_topic(topic)) == topic


@given(brokers, numbers, numbers, numbers, st.booleans(), st.data())
def test_a_state_there_and_back(members, epoch, version, controller, leads, data) -> None:
    cut = data.draw(st.integers(1, len(members)))
    known = data.draw(st.dictionaries(st.sampled_from(members), st.integers(0, 2**63 - 1)))
    leader = members[0] if leads else -1
    state = PartitionState(
        leader, epoch, members[:cut], version, members[cut:], known.get(leader, NO_INCARNATION)
    )
    stored = StoredState(state, controller, known)
    path = paths.state(T0)
    assert records.decode_state(path, records.encode_state(stored), version) == stored


@given(st.dictionaries(texts, texts))
def test_a_config_there_and_back(config) -> None:
    assert records.decode_config("/config/topics/t", records.encode_config(config)) == config


def as_old_tools_write(wanted: Mapping[TopicPartition, tuple[int, ...]]) -> bytes:
    """``/admin/reassign_partitions``, which kdirect reads only."""
    rows = [
        {"topic": tp.topic, "partition": tp.partition, "replicas": list(replicas)}
        for tp, replicas in wanted.items()
    ]
    return json.dumps({"version": 1, "partitions": rows}).encode()


@given(st.dictionaries(st.builds(TopicPartition, texts, numbers), brokers))
def test_reassignments_are_read(wanted) -> None:
    path = paths.REASSIGNMENTS
    assert records.decode_reassignments(path, as_old_tools_write(wanted)) == wanted


# -- changes ---------------------------------------------------------------------------------------


def test_a_broker_reads_what_has_changed_since_it_looked() -> None:
    changes = Changes(7, (Change(6, ("/a", "/b")), Change(7, ("/b", "/c"))))
    assert changes.since(7) == ()
    assert changes.since(6) == ("/b", "/c")
    assert changes.since(5) == ("/a", "/b", "/c")
    assert changes.since(4) is None
    assert changes.since(8) is None
    assert Changes(7).since(6) is None
    assert records.decode_changes(paths.CHANGES, records.encode_changes(changes)) == changes


def test_changes_stay_few_and_small() -> None:
    changes = Changes()
    for _ in range(100):
        changes = records.with_change(changes, ("/a",))
    assert (changes.generation, len(changes.kept)) == (100, records.MOST_CHANGES)
    assert changes.kept[-1] == Change(100, ("/a",))
    many = tuple(f"/brokers/topics/t/partitions/{p}/state" for p in range(1000))
    changes = records.with_change(changes, many)
    assert changes.since(100) == many
    changes = records.with_change(changes, many)
    assert (changes.since(101), changes.since(100)) == (many, None)
    assert len(records.encode_changes(changes)) <= records.MOST_CHANGE_BYTES + 100
    changes = records.with_change(changes, many * 2)
    assert (changes.generation, changes.kept, changes.since(102)) == (103, (), None)


# -- what somebody else put there ------------------------------------------------------------------

STATE = "/brokers/topics/t/partitions/0/state"
TOPIC = "/brokers/topics/t"
DAMAGED = [
    *((path, value) for path in (*KAFKAS, "/kdirect/changes") for value in (
        b"\xff", b"{", b"[]", b"null", b'{"version":1}', b'{"a":1,"a":2}', b"[" * 100_000,
        b"1" * 5000,
    )),
    (TOPIC, b'{"version":0,"partitions":{"0":[1]}}'),
    (TOPIC, b'{"version":true,"partitions":{"0":[1]}}'),
    (TOPIC, b'{"version":1,"partitions":{}}'),
    (TOPIC, b'{"version":1,"partitions":{"1":[1]}}'),
    (TOPIC, b'{"version":1,"partitions":{"0":[]}}'),
    (TOPIC, b'{"version":1,"partitions":{"0":[1,1]}}'),
    (TOPIC, b'{"version":1,"partitions":{"0":[-1]}}'),
    (TOPIC, b'{"version":1,"partitions":{"0":["1"]}}'),
    (TOPIC, b'{"version":1,"partitions":{"00":[1]}}'),
    (TOPIC, b'{"version":1,"partitions":{"x":[1]}}'),
    (TOPIC, b'{"version":1,"partitions":{"0":[1]},"adding_replicas":{"0":[2]}}'),
    (TOPIC, b'{"version":1,"partitions":{"0":[1]},"removing_replicas":{"0":[1]}}'),
    (TOPIC, b'{"version":3,"partitions":{"0":[1]},"topic_id":"x"}'),
    (TOPIC, b'{"version":3,"partitions":{"0":[1]},"topic_id":"\xc3\xa4"}'),
    (STATE, b'{"leader":1,"leader_epoch":0,"isr":[],"controller_epoch":1,"version":1}'),
    (STATE, b'{"leader":1,"leader_epoch":0,"isr":[2],"controller_epoch":1,"version":1}'),
    (STATE, b'{"leader":-2,"leader_epoch":0,"isr":[2],"controller_epoch":1,"version":1}'),
    (STATE, b'{"leader":2,"leader_epoch":-1,"isr":[2],"controller_epoch":1,"version":1}'),
    (STATE, b'{"leader":2,"leader_epoch":1e3,"isr":[2],"controller_epoch":1,"version":1}'),
    (STATE, b'{"leader":2,"leader_epoch":0,"isr":[2],"controller_epoch":1,"eligible":[2]}'),
    (STATE, b'{"leader":2,"leader_epoch":0,"isr":[2],"controller_epoch":1,"incarnations":[1]}'),
    ("/brokers/ids/1", b'{"version":5,"endpoints":[],"listener_security_protocol_map":{}}'),
    ("/brokers/ids/1", b'{"version":2,"endpoints":["h:1"]}'),
    ("/brokers/ids/1", b'{"version":2,"endpoints":["A://h:70000"]}'),
    ("/brokers/ids/1", b'{"version":2,"endpoints":["A://h:x"]}'),
    ("/brokers/ids/1", b'{"version":2,"endpoints":["A://::1:1"]}'),
    ("/brokers/ids/1", b'{"version":2,"endpoints":["A://h:1","A://h:2"]}'),
    (
        "/brokers/ids/1",
        b'{"version":4,"endpoints":["A://h:1"],"listener_security_protocol_map":{}}',
    ),
    ("/config/topics/t", b'{"version":1,"config":{"a":1}}'),
    ("/config/topics/t", b'{"version":1,"config":{"a":"\\ud800"}}'),
    ("/config/topics/t", b'{"version":1,"config":{"\\ud800":"a"}}'),
    ("/controller_epoch", b" 1"),
    ("/controller_epoch", b"2147483648"),
    ("/controller_epoch", "\u0661".encode()),
    ("/cluster/id", b'{"version":"1","id":""}'),
    ("/admin/reassign_partitions", b'{"partitions":[1]}'),
    ("/latest_producer_id_block", b'{"version":1,"broker":1,"block_start":"9","block_end":"1"}'),
    ("/kdirect/changes", b'{"version":1,"generation":2,"changes":[[1,[]]]}'),
    ("/kdirect/changes", b'{"version":1,"generation":2,"changes":[[1,[]],[1,[]]]}'),
    ("/kdirect/changes", b'{"version":1,"generation":2,"changes":[[2]]}'),
    ("/kdirect/changes", b'{"version":1,"generation":2,"changes":[[2,[1]]]}'),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value"), DAMAGED, ids=lambda x: str(x)[:60])
def test_a_damaged_node_is_one_clear_error(path, value) -> None:
    with pytest.raises(CorruptMetadataError) as error:
        decode(path, value)
    assert path in error.value.message
    assert error.value.hint
    assert len(str(error.value)) < 500


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@given(st.sampled_from([*KAFKAS, "/kdirect/changes"]), st.data())
def test_an_edited_node_is_read_or_is_one_clear_error(path, data) -> None:
    value = KAFKAS.get(path, b'{"version":1,"generation":2,"changes":[[1,["/a"]],[2,["/b"]]]}')
    kind = data.draw(st.sampled_from(["bytes", "cut", "field"]))
    if kind == "bytes":
        value = data.draw(st.binary(max_size=40))
    elif kind == "cut" or value[:1] != b"{":
        value = value[: data.draw(st.integers(0, len(value)))]
    else:
        fields = json.loads(value)
        name = data.draw(st.sampled_from(sorted(fields)))
        if data.draw(st.booleans()):
            fields[name] = data.draw(json_values)
        else:
            del fields[name]
        value = json.dumps(fields).encode()
    try:
        decode(path, value)
    except CorruptMetadataError as e:
        assert path in e.message
        assert e.hint


def test_ids_are_kafkas_text() -> None:
    topic = TopicAssignment(uuid.UUID(int=2**128 - 1), ((1,),))
    assert json.loads(records.encode_topic(topic))["topic_id"] == "_____________________w"


def test_paths() -> None:
    assert paths.state(T0) == "/brokers/topics/t/partitions/0/state"
    assert paths.partition_of_state(paths.state(T0)) == T0
    for path in ("/brokers/topics/t/partitions/00/state", "/brokers/topics/t/partitions/0", "/"):
        assert paths.partition_of_state(path) is None
    assert paths.name_below("/brokers/topics/t", paths.TOPICS) == "t"
    assert paths.name_below("/brokers/topics/t/partitions", paths.TOPICS) is None
    assert paths.name_below("/brokers/topics", paths.TOPICS) is None
    made = set()
    for path, _ in paths.PERSISTENT:
        assert path.rpartition("/")[0] in ("", *made)
        made.add(path)


def test_a_broker_that_is_alone_keeps_the_same_values() -> None:
    """The files of a single broker stand for nodes; a cluster that it joins reads them."""
    topic_id = uuid.UUID(int=0x29_0A4B_AC5B_D94D_728D_60D9_F2AD_3E4F_B2)
    text = local_files.topic_value(records._id_text(topic_id), 12, 7)
    assert text == records.encode_topic(TopicAssignment(topic_id, ((7,),) * 12))
    state = StoredState(PartitionState(7, 5, (7,), 0), 0)
    assert local_files.state_value(7, 5) == records.encode_state(state)
    configs = {"retention.ms": "1000", "x": 'quoted "ü"'}
    assert local_files.config_value(configs) == records.encode_config(configs)
    for next_id in (1000, 123_000):
        block = ProducerIdBlock(7, next_id - local_files.PRODUCER_ID_BLOCK, next_id - 1)
        assert local_files.block_value(7, next_id) == records.encode_producer_ids(block)
    assert local_files.cluster_value("QwX3x") == records.encode_cluster_id("QwX3x")
