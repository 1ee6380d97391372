"""What a broker tells of itself where Kafka's tools ask: what a client may do, feature levels, who
decides; and how badly formed changes of properties are refused."""

from __future__ import annotations

import pytest

import kdirect
from kdirect.broker.features import levels
from kdirect.broker.operations import ON_CLUSTER, ON_GROUP, ON_TOPIC
from kdirect.format import protocol as p
from kdirect.format.error_codes import ErrorCode
from kdirect.format.schema import build

# As Kafka 4.1 answers without an authorizer: bits of AclOperation.
CLUSTER_BITS, TOPIC_BITS, GROUP_BITS = 0x1FA0, 0x0DF8, 0x0D48


@pytest.fixture
def raw(raw):
    """One connection; in this room's other tests a function that opens one."""
    return raw()


@pytest.fixture
def session(broker):
    return kdirect.connect(broker.bootstrap_servers)


@pytest.fixture
def topic(session):
    session.admin.create_topic("t", 2)
    return "t"


def bits(operations):
    return None if operations is None else sum(1 << o for o in operations)


def test_the_bits_are_kafkas():
    assert [bits(x) for x in (ON_CLUSTER, ON_TOPIC, ON_GROUP)] == [
        CLUSTER_BITS,
        TOPIC_BITS,
        GROUP_BITS,
    ]


@pytest.mark.parametrize("asked", [True, False])
def test_operations_are_told_to_whoever_asks(raw, topic, asked):
    for version in range(8, 11):
        request = build(
            p.MetadataRequest,
            topics=[{"name": topic}],
            include_cluster_authorized_operations=asked,
            include_topic_authorized_operations=asked,
        )
        answer = raw.call(request, version)
        assert bits(answer.authorized_operations) == (CLUSTER_BITS if asked else None)
        assert bits(answer.topics[0].authorized_operations) == (TOPIC_BITS if asked else None)
    for version in range(3):
        request = build(p.DescribeClusterRequest, include_cluster_authorized_operations=asked)
        answer = raw.call(request, version)
        assert bits(answer.authorized_operations) == (CLUSTER_BITS if asked else None)


def test_described_topics_have_operations_always(raw, topic):
    request = build(
        p.DescribeTopicPartitionsRequest,
        topics=[{"name": topic}],
        response_partition_limit=10,
        cursor=None,
    )
    assert raw.call(request, 0).topics[0].topic_authorized_operations == TOPIC_BITS


def test_groups_have_them_where_there_is_a_group(raw, broker, topic):
    settings = {"bootstrap.servers": broker.bootstrap_servers, "group.id": "g"}
    with kdirect.Consumer(settings) as consumer:
        consumer.subscribe([topic])
        consumer.poll(0.1)
        request = build(
            p.DescribeGroupsRequest, groups=["g", "none"], include_authorized_operations=True
        )
        for version in range(3, 7):
            found, none = raw.call(request, version).groups
            assert bits(found.authorized_operations) == GROUP_BITS, version
            has = none.error_code == 0
            assert bits(none.authorized_operations) == (GROUP_BITS if has else None)


def api_versions(name, version):
    software = {"client_software_name": name, "client_software_version": version}
    return build(p.ApiVersionsRequest, **software)


@pytest.mark.parametrize("name", ["", "-a", "a b", "a" * 99 + "."])
def test_a_client_says_what_it_is(raw, name):
    for version in (3, 4):
        for request in (api_versions(name, "1"), api_versions("a", name)):
            answer = raw.call(request, version)
            assert (answer.error_code, answer.api_keys) == (ErrorCode.INVALID_REQUEST, [])
    assert raw.call(api_versions("a", "1"), 4).error_code == 0  # it may try again


def test_features_are_those_of_what_is_served(raw):
    served = [raw.call(api_versions("a-client", "1.0"), version) for version in range(3, 5)]
    for answer in served:
        final = {f.name: f.max_version_level for f in answer.finalized_features}
        there = {a.api_key: a.max_version for a in answer.api_keys}
        assert answer.finalized_features_epoch == 0
        assert final["metadata.version"] == 27
        assert ("group.version" in final) == (68 in there)
        # One alone would make producers speak KIP-890's second protocol to a broker without it.
        assert ("transaction.version" in final) == (there[0] >= 12 and there[24] >= 4)
        assert "kraft.version" not in final and "share.version" not in final
    old, new = ({f.name: f.min_version for f in a.supported_features} for a in served)
    assert new.keys() == {f.name for f in served[1].finalized_features}
    assert old == {name: low for name, low in new.items() if low > 0}


def test_a_feature_needs_all_that_it_is_made_of():
    apis = {a.name: a for a in p.APIS.values()}

    def names(**high):
        return {f.name for f in levels([apis[n]._replace(high=v) for n, v in high.items()])}

    assert names(AddPartitionsToTxn=5, EndTxn=5, Produce=11) == set()
    assert names(AddPartitionsToTxn=3, EndTxn=5, Produce=13) == set()
    assert names(AddPartitionsToTxn=4, EndTxn=5, Produce=12) == {"transaction.version"}


@pytest.mark.parametrize("version", [0, 1, 2])
def test_levels_are_what_they_are(raw, version):
    def update(feature, level):
        update = {"feature": feature, "max_version_level": level, "upgrade_type": 1}
        return raw.call(build(p.UpdateFeaturesRequest, feature_updates=[update]), version)

    assert update("metadata.version", 27).error_code == 0
    for feature, level in (("metadata.version", 26), ("share.version", 1), ("nonsense", 1)):
        answer = update(feature, level)
        assert answer.error_code == ErrorCode.INVALID_UPDATE_VERSION
        assert f"level {level}" in answer.error_message or f"{level} for" in answer.error_message


def test_a_cursor_that_is_none_is_an_error_of_the_topics(raw, topic):
    def ask(name, index, names=(topic,)):
        request = build(
            p.DescribeTopicPartitionsRequest,
            topics=[{"name": n} for n in names],
            response_partition_limit=10,
            cursor={"topic_name": name, "partition_index": index},
        )
        return raw.call(request, 0)

    assert [x.partition_index for x in ask(topic, 1).topics[0].partitions] == [1]
    for name, index in (("other", 0), (topic, -1)):
        assert [t.error_code for t in ask(name, index).topics] == [ErrorCode.INVALID_REQUEST]
    assert ask("zz", 0, ()).topics == []


@pytest.mark.parametrize("version", [0, 1, 2])
def test_the_controller_is_the_quorum(raw, broker, version):
    def ask(name, index):
        topics = [{"topic_name": name, "partitions": [{"partition_index": index}]}]
        return raw.call(build(p.DescribeQuorumRequest, topics=topics), version)

    answer = ask("__cluster_metadata", 0)
    (partition,) = answer.topics[0].partitions
    assert (answer.error_code, partition.error_code, partition.leader_id) == (0, 0, 1)
    assert [v.replica_id for v in partition.current_voters] == [1] and not partition.observers
    if version == 2:
        (listener,) = answer.nodes[0].listeners
        assert f"{listener.host}:{listener.port}" == broker.bootstrap_servers
    for name, index in (("__cluster_metadata", 1), ("t", 0)):
        (partition,) = ask(name, index).topics[0].partitions
        assert partition.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


CONFIGS = {
    "set": ({"name": "retention.ms", "config_operation": 0, "value": "7000"}, 0),
    "null": ({"name": "retention.ms", "config_operation": 0, "value": None}, 42),
    "append": ({"name": "cleanup.policy", "config_operation": 2, "value": "delete"}, 0),
    "append null": ({"name": "cleanup.policy", "config_operation": 2, "value": None}, 42),
    "subtract none": ({"name": "cleanup.policy", "config_operation": 3, "value": "compact"}, 0),
    "no list": ({"name": "retention.ms", "config_operation": 2, "value": "1"}, 40),
    "no operation": ({"name": "retention.ms", "config_operation": 9, "value": "1"}, 42),
    "unknown": ({"name": "nonsense", "config_operation": 0, "value": "1"}, 40),
}


@pytest.mark.parametrize("what", CONFIGS)
def test_changes_of_a_topics_properties(raw, topic, what):
    config, code = CONFIGS[what]
    for version in (0, 1):
        resource = {"resource_type": 2, "resource_name": topic, "configs": [config]}
        request = build(p.IncrementalAlterConfigsRequest, resources=[resource], validate_only=False)
        (row,) = raw.call(request, version).responses
        assert row.error_code == code and bool(row.error_message) == bool(code)


def test_a_resource_may_be_named_once(raw, topic):
    resource = {"resource_type": 2, "resource_name": topic, "configs": []}
    request = build(p.AlterConfigsRequest, resources=[resource, resource], validate_only=False)
    assert {r.error_code for r in raw.call(request, 2).responses} == {ErrorCode.INVALID_REQUEST}
    config = {"name": "retention.ms", "value": "1"}
    request = build(
        p.AlterConfigsRequest,
        resources=[{**resource, "configs": [config, config]}],
        validate_only=False,
    )
    assert [r.error_code for r in raw.call(request, 2).responses] == [ErrorCode.INVALID_REQUEST]


def test_what_was_never_set_can_be_deleted(raw):
    for name in ("", "1"):
        config = {"name": "log.retention.ms", "config_operation": 1, "value": None}
        resource = {"resource_type": 4, "resource_name": name, "configs": [config]}
        request = build(p.IncrementalAlterConfigsRequest, resources=[resource], validate_only=False)
        assert [r.error_code for r in raw.call(request, 1).responses] == [0]
