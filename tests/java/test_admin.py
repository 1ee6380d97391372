"""Java's Admin against our broker: everything that a topic, a group and a cluster can be asked."""

from __future__ import annotations

import pytest
from py4j.protocol import Py4JJavaError

pytestmark = pytest.mark.slow


def topic(java, name, partitions=1, **configs):
    new = java.kafka.clients.admin.NewTopic(name, partitions, 1)
    return new.configs({k.replace("_", "."): str(v) for k, v in configs.items()})


def create(java, admin, *topics):
    java.get(admin.createTopics(list(topics)).all())


def send(java, broker, name, count, partition=0):
    producer = java.producer(broker.bootstrap_servers)
    for i in range(count):
        java.get(producer.send(java.record(name, partition, f"k{i}", f"v{i}")))
    producer.close()


def refused(java, future):
    """The class and message of the error with which a future fails."""
    with pytest.raises(Py4JJavaError) as caught:
        java.get(future)
    cause = caught.value.java_exception.getCause()
    return cause.getClass().getSimpleName(), cause.getMessage()


def test_topics(java, admin):
    result = admin.createTopics([topic(java, "t", 3), topic(java, "u", 1, retention_ms=12345)])
    java.get(result.all())
    assert (java.get(result.numPartitions("t")), java.get(result.replicationFactor("t"))) == (3, 1)
    assert java.get(result.config("u")).get("retention.ms").value() == "12345"
    topic_id = java.get(result.topicId("t"))
    assert refused(java, admin.createTopics([topic(java, "t")]).all())[0] == "TopicExistsException"
    assert set(java.get(admin.listTopics().names())) == {"t", "u"}

    described = java.get(admin.describeTopics(["t", "u"]).allTopicNames())
    assert {name: len(d.partitions()) for name, d in described.items()} == {"t": 3, "u": 1}
    row = described["t"].partitions()[2]
    assert (row.partition(), row.leader().id(), len(row.replicas()), len(row.isr())) == (2, 1, 1, 1)
    assert (len(row.elr()), len(row.lastKnownElr())) == (0, 0)
    assert described["t"].topicId().equals(topic_id) and not described["t"].isInternal()
    by_id = java.kafka.common.TopicCollection.ofTopicIds([topic_id])
    (found,) = java.get(admin.describeTopics(by_id).allTopicIds()).values()
    assert found.name() == "t" and len(found.partitions()) == 3
    assert (
        refused(java, admin.describeTopics(["nowhere"]).allTopicNames())[0]
        == "UnknownTopicOrPartitionException"
    )

    more = java.kafka.clients.admin.NewPartitions
    java.get(admin.createPartitions({"t": more.increaseTo(5)}).all())
    assert java.get(admin.describeTopics(["t"]).allTopicNames())["t"].partitions().size() == 5
    java.get(admin.deleteTopics(by_id).all())
    java.get(admin.deleteTopics(["u"]).all())
    assert set(java.get(admin.listTopics().names())) == set()


def test_a_topic_of_more_partitions_than_one_answer_names(java, admin):
    """Java's client asks for 2000 at once, and goes on from the cursor."""
    create(java, admin, topic(java, "a", 3), topic(java, "t", 12), topic(java, "z", 2))
    options = java.kafka.clients.admin.DescribeTopicsOptions().partitionSizeLimitPerResponse(5)
    names = java.kafka.common.TopicCollection.ofTopicNames(["z", "t", "a"])
    described = java.get(admin.describeTopics(names, options).allTopicNames())
    assert {n: [x.partition() for x in d.partitions()] for n, d in described.items()} == {
        "a": list(range(3)),
        "t": list(range(12)),
        "z": list(range(2)),
    }


def test_offsets_and_deletion_of_records(java, admin, broker):
    create(java, admin, topic(java, "t", 2))
    send(java, broker, "t", 10, partition=1)
    spec = java.kafka.clients.admin.OffsetSpec
    tp = java.partition("t", 1)

    def offset(which):
        return java.get(admin.listOffsets({tp: which}).partitionResult(tp)).offset()

    assert (offset(spec.earliest()), offset(spec.latest()), offset(spec.maxTimestamp())) == (
        0,
        10,
        9,
    )
    assert (offset(spec.forTimestamp(0)), offset(spec.forTimestamp(1 << 60))) == (0, -1)
    java.get(admin.deleteRecords({tp: java.before(4)}).all())
    assert offset(spec.earliest()) == 4


def test_configs(java, admin):
    create(java, admin, topic(java, "t", retention_ms=5000))
    kinds = java.kafka.common.config.ConfigResource
    where = kinds(kinds.Type.TOPIC, "t")
    operations = java.kafka.clients.admin.AlterConfigOp
    kind = operations.OpType

    def alter(name, value, how):
        entry = java.kafka.clients.admin.ConfigEntry(name, value)
        return admin.incrementalAlterConfigs({where: [operations(entry, how)]}).all()

    def value(name):
        entry = java.get(admin.describeConfigs([where]).all())[where].get(name)
        return entry.value(), entry.source().toString(), entry.type().toString()

    assert value("retention.ms") == ("5000", "DYNAMIC_TOPIC_CONFIG", "LONG")
    java.get(alter("retention.ms", "6000", kind.SET))
    assert value("retention.ms")[0] == "6000"
    java.get(alter("retention.ms", "", kind.DELETE))
    assert value("retention.ms")[:2] == ("604800000", "DEFAULT_CONFIG")
    name, message = refused(java, alter("retentoin.ms", "1", kind.SET))
    assert name == "InvalidConfigurationException" and "retention.ms" in message
    broker_properties = java.get(admin.describeConfigs([kinds(kinds.Type.BROKER, "1")]).all())
    assert [c.get("node.id").value() for c in broker_properties.values()] == ["1"]


def test_groups(java, admin, broker):
    create(java, admin, topic(java, "t", 2))
    send(java, broker, "t", 6, partition=1)
    tp = java.partition("t", 1)
    given = {tp: java.kafka.clients.consumer.OffsetAndMetadata(4)}
    java.get(admin.alterConsumerGroupOffsets("g", given).all())
    assert (
        java.get(admin.listConsumerGroupOffsets("g").partitionsToOffsetAndMetadata())[tp].offset()
        == 4
    )
    assert [g.groupId() for g in java.list(java.get(admin.listConsumerGroups().all()))] == ["g"]

    consumer = java.consumer(
        broker.bootstrap_servers, group_id="g", enable_auto_commit="false", session_timeout_ms=6000
    )
    consumer.subscribe(["t"])
    got = []
    for _ in range(100):
        got += [(r.offset(), r.value()) for r in java.poll(consumer)]
        if len(got) >= 2:
            break
    assert got == [(4, "v4"), (5, "v5")]
    consumer.commitSync()
    described = java.get(admin.describeConsumerGroups(["g"]).all())["g"]
    assert described.state().toString() == "Stable" and described.members().size() == 1
    assert sorted(
        x.partition()
        for m in java.list(described.members())
        for x in m.assignment().topicPartitions()
    ) == [0, 1]
    assert refused(java, admin.deleteConsumerGroups(["g"]).all())[0] == "GroupNotEmptyException"
    consumer.close()
    assert (
        java.get(admin.listConsumerGroupOffsets("g").partitionsToOffsetAndMetadata())[tp].offset()
        == 6
    )
    java.get(admin.deleteConsumerGroupOffsets("g", {tp}).all())
    java.get(admin.deleteConsumerGroups(["g"]).all())
    assert java.list(java.get(admin.listConsumerGroups().all())) == []


def test_the_cluster(java, admin, broker):
    create(java, admin, topic(java, "t", 2))
    send(java, broker, "t", 3)
    cluster = admin.describeCluster()
    assert java.get(cluster.controller()).id() == 1 and java.get(cluster.nodes()).size() == 1
    assert java.get(cluster.clusterId()) == broker.server.logs.cluster_id
    (directories,) = java.get(admin.describeLogDirs([1]).allDescriptions()).values()
    (directory,) = directories.values()
    assert directory.error() is None and len(directory.replicaInfos()) == 2
    replica = java.kafka.common.TopicPartitionReplica("t", 0, 1)
    (info,) = java.get(admin.describeReplicaLogDirs([replica]).all()).values()
    assert info.getCurrentReplicaLogDir() in directories
    assert java.get(admin.listPartitionReassignments().reassignments()).size() == 0
    assert java.get(admin.describeFeatures().featureMetadata()) is not None
    (state,) = java.get(admin.describeProducers([java.partition("t", 0)]).all()).values()
    (producer,) = state.activeProducers()  # the one of `send`, which is idempotent by itself
    assert (producer.producerEpoch(), producer.lastSequence()) == (0, 2)
    assert producer.currentTransactionStartOffset().isEmpty()
    assert java.get(admin.listTransactions().all()).size() == 0
    assert (
        refused(java, admin.describeAcls(java.kafka.common.acl.AclBindingFilter.ANY).values())[0]
        == "SecurityDisabledException"
    )
    quotas = java.kafka.common.quota.ClientQuotaFilter.all()
    assert java.get(admin.describeClientQuotas(quotas).entities()).size() == 0
    assert java.get(admin.describeUserScramCredentials().all()).size() == 0
    election = java.kafka.common.ElectionType.PREFERRED
    (outcome,) = java.get(
        admin.electLeaders(election, {java.partition("t", 0)}).partitions()
    ).values()
    assert outcome.get().getClass().getSimpleName() == "ElectionNotNeededException"


def test_what_kafka_has_and_this_broker_does_not(java, admin):
    """Each change is refused by name, at once, and nothing is taken that would not be obeyed."""
    quotas, api = java.kafka.common.quota, java.kafka.clients.admin
    entity = quotas.ClientQuotaEntity({"user": "x"})
    limit = quotas.ClientQuotaAlteration.Op("consumer_byte_rate", 1000.0)
    change = admin.alterClientQuotas([quotas.ClientQuotaAlteration(entity, [limit])])
    name, message = refused(java, change.all())
    assert name == "InvalidRequestException" and "no quotas" in message
    kind = api.ScramCredentialInfo(api.ScramMechanism.SCRAM_SHA_256, 4096)
    user = api.UserScramCredentialUpsertion("x", kind, "password")
    name, message = refused(java, admin.alterUserScramCredentials([user]).all())
    assert name == "SecurityDisabledException" and "no authentication" in message
    token = admin.createDelegationToken().delegationToken()
    assert refused(java, token)[0] == "UnsupportedVersionException"
