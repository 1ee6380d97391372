"""What Kafka's own tests of its administrator ask of a broker, with Java's Admin of 4.1: each
scenario is played to Apache Kafka and to our broker, and both must answer as it says."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from py4j.protocol import Py4JJavaError

from tests.java.both import SYSTEMS, broker_of, fresh
from tests.support import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.parametrize("java", ["4.1.0"], indirect=True),
]
SETTINGS = {"auto.create.topics.enable": "false", "group.initial.rebalance.delay.ms": "0"}


@pytest.fixture(scope="module", params=SYSTEMS)
def servers(
    request: pytest.FixtureRequest,
    broker_jars: list[Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[str]:
    """The address of a broker that all scenarios share."""
    with broker_of(request.param, SETTINGS, tmp_path_factory.mktemp("kafka")) as address:
        yield address


@pytest.fixture
def admin(java: Any, servers: str) -> Iterator[Any]:
    made = java.admin(servers)
    yield made
    made.close(java.milliseconds(1000))


def outcome(java: Any, future: Any) -> str:
    """The class of the error with which a future fails; "done"."""
    try:
        java.get(future)
    except Py4JJavaError as e:
        return str(e.java_exception.getCause().getClass().getSimpleName())
    return "done"


def described(java: Any, admin: Any, name: str) -> Any:
    return java.get(admin.describeTopics([name]).allTopicNames())[name]


@pytest.fixture
def topic(java: Any, admin: Any) -> Callable[..., str]:
    """``topic(partitions, property=value, ...)``: a new one, which the broker knows."""

    def make(partitions: int = 1, **configs: Any) -> str:
        name = fresh()
        new = java.kafka.clients.admin.NewTopic(name, partitions, 1)
        new.configs({k.replace("_", "."): str(v) for k, v in configs.items()})
        java.get(admin.createTopics([new]).all())
        wait_until(
            lambda: outcome(java, admin.describeTopics([name]).allTopicNames()) == "done",
            "the topic",
        )
        return name

    return make


def send(java: Any, servers: str, name: str, *times: int | None, **settings: Any) -> None:
    """A record for each time, None: now; each with a batch of its own unless they are to linger."""
    producer = java.producer(servers, **settings)
    sent = []
    for at in times:
        record = java.kafka.clients.producer.ProducerRecord(name, 0, at, None, "v")
        sent.append(producer.send(record))
        if "linger_ms" not in settings:
            java.get(sent[-1])
            time.sleep(0.005)  # the broker's own time is to differ
    producer.flush()
    for future in sent:
        java.get(future)
    producer.close()


# -- topics ----------------------------------------------------------------------------------------
def test_topics_are_described_and_deleted_by_name_and_by_id(java, admin, topic):
    name, nobody = topic(3), java.kafka.common.Uuid.randomUuid()
    collection = java.kafka.common.TopicCollection
    by_name = admin.describeTopics([name, "nowhere"]).topicNameValues()
    assert outcome(java, by_name["nowhere"]) == "UnknownTopicOrPartitionException"
    topic_id = java.get(by_name[name]).topicId()
    by_id = admin.describeTopics(collection.ofTopicIds([topic_id, nobody])).topicIdValues()
    assert java.get(by_id[topic_id]).name() == name
    assert outcome(java, by_id[nobody]) == "UnknownTopicIdException"
    options = java.kafka.clients.admin.DescribeTopicsOptions().includeAuthorizedOperations(True)
    allowed = java.get(admin.describeTopics([name], options).allTopicNames())[name]
    assert sorted(str(x) for x in allowed.authorizedOperations()) == [
        "ALTER", "ALTER_CONFIGS", "CREATE", "DELETE", "DESCRIBE", "DESCRIBE_CONFIGS", "READ",
        "WRITE",
    ]  # fmt: skip
    deleted = admin.deleteTopics(collection.ofTopicIds([topic_id, nobody])).topicIdValues()
    assert outcome(java, deleted[topic_id]) == "done"
    assert outcome(java, deleted[nobody]) == "UnknownTopicIdException"
    wait_until(lambda: name not in java.get(admin.listTopics().names()), "the end of the topic")


def test_topics_that_cannot_be_created(java, admin, topic):
    name, new = topic(), java.kafka.clients.admin.NewTopic
    looking = java.kafka.clients.admin.CreateTopicsOptions().validateOnly(True)
    assert outcome(java, admin.createTopics([new(name, 1, 5)], looking).all()) == (
        "TopicExistsException"
    ), "and not that there are too few brokers"
    long = {n: "x" * n for n in (249, 250)}
    results = admin.createTopics([new(long[n], 1, 1) for n in long]).values()
    assert outcome(java, results[long[249]]) == "done"
    assert outcome(java, results[long[250]]) == "InvalidTopicException"
    java.get(admin.deleteTopics([long[249]]).all())
    null = new(fresh(), 1, 1).configs({"retention.bytes": None, "compression.type": "producer"})
    assert outcome(java, admin.createTopics([null]).all()) == "InvalidConfigurationException"
    seen = fresh()
    result = admin.createTopics([new(seen, 2, 1).configs({"flush.ms": "99"})], looking)
    assert java.get(result.numPartitions(seen)) == 2
    assert java.get(result.config(seen)).get("flush.ms").value() == "99"
    assert seen not in java.get(admin.listTopics().names())


@pytest.mark.parametrize("looking", [True, False])
def test_partitions_that_cannot_be_added(java, admin, topic, looking):
    name, more = topic(3), java.kafka.clients.admin.NewPartitions.increaseTo
    options = java.kafka.clients.admin.CreatePartitionsOptions().validateOnly(looking)

    def result(*what: Any, of: str = name) -> str:
        return outcome(java, admin.createPartitions({of: more(*what)}, options).all())

    assert result(2, of="nowhere") == "UnknownTopicOrPartitionException"
    for count in (1, 3, -22):
        assert result(count) == "InvalidPartitionsException"
    assert result(3, [[1]]) == "InvalidPartitionsException"
    for count, assignments in (
        (4, [[1, 2]]),
        (6, [[1]]),
        (4, [[1], [1]]),
        (4, [[1, 1]]),
        (5, [[1], [1, 1]]),
        (4, [[12]]),
        (4, []),
    ):
        assert result(count, assignments) == "InvalidReplicaAssignmentException", assignments
    assert described(java, admin, name).partitions().size() == 3
    assert result(4, [[1]]) == result(4 if looking else 5) == "done"
    count = 3 if looking else 5
    wait_until(lambda: described(java, admin, name).partitions().size() == count, "the count")
    if not looking:
        other = topic(2)
        mixed = admin.createPartitions({name: more(6), other: more(1)}).values()
        assert outcome(java, mixed[name]) == "done"
        assert outcome(java, mixed[other]) == "InvalidPartitionsException"


# -- records ---------------------------------------------------------------------------------------
def test_records_are_deleted(java, admin, servers, topic):
    name = topic()
    tp = java.partition(name, 0)
    send(java, servers, name, *[None] * 10, linger_ms=1000)
    consumer = java.consumer(servers)
    consumer.assign([tp])

    def deleted(before: int) -> int:
        result = admin.deleteRecords({tp: java.before(before)}).lowWatermarks()
        return int(java.get(result[tp]).lowWatermark())

    def offset_of_time() -> int | None:
        found = consumer.offsetsForTimes({tp: 1 << 40})[tp]  # long ago
        return None if found is None else int(found.offset())

    assert offset_of_time() == 0
    assert deleted(5) == 5 == deleted(3) == offset_of_time()
    late = admin.deleteRecords({tp: java.before(20)}).all()
    assert outcome(java, late) == "OffsetOutOfRangeException"
    consumer.seek(tp, 1)  # it begins where the log does
    read: list[int] = []
    wait_until(
        lambda: read.extend(r.offset() for r in java.poll(consumer)) or len(read) == 5, "the rest"
    )
    assert read == [5, 6, 7, 8, 9]
    consumer.seek(tp, 7)
    assert consumer.position(tp) == 7
    assert deleted(-1) == 10, "to the high watermark"
    consumer.seekToBeginning([tp])
    assert consumer.position(tp) == 10 and offset_of_time() is None
    consumer.close()


@pytest.mark.parametrize("codec", ["none", "gzip"])
def test_offsets_by_their_specification(java, admin, servers, topic, codec):
    spec = java.kafka.clients.admin.OffsetSpec
    level = java.kafka.common.IsolationLevel.READ_COMMITTED
    options = java.kafka.clients.admin.ListOffsetsOptions(level)

    def found(name: str, which: Any, *more: Any) -> Any:
        tp = java.partition(name, 0)
        return java.get(admin.listOffsets({tp: which}, *more).partitionResult(tp))

    empty = found(topic(), spec.maxTimestamp())
    assert (empty.offset(), empty.timestamp(), empty.leaderEpoch().isPresent()) == (-1, -1, False)
    # (time of the records, together in a batch?) -> the offset of the latest
    cases = {
        ("CreateTime", True): 1,
        ("CreateTime", False): 1,
        ("LogAppendTime", True): 0,
        ("LogAppendTime", False): 2,
    }
    for (kind, together), latest in cases.items():
        name = topic(message_timestamp_type=kind, retention_ms=-1)
        settings = {"linger_ms": 5000} if together else {}
        send(java, servers, name, 100, 999, 200, compression_type=codec, **settings)
        most = found(name, spec.maxTimestamp())
        assert (most.offset(), most.leaderEpoch().get()) == (latest, 0), (kind, together)
        assert (most.timestamp() == 999) == (kind == "CreateTime")
        assert found(name, spec.earliest()).offset() == 0
        assert found(name, spec.latest()).offset() == 3
        assert found(name, spec.latest(), options).offset() == 3
        assert found(name, spec.earliestLocal()).offset() == 0
        assert found(name, spec.latestTiered()).offset() == -1
        if kind == "CreateTime":
            at = found(name, spec.forTimestamp(150))
            assert (at.offset(), at.timestamp()) == (1, 999)
        assert found(name, spec.forTimestamp(1 << 60)).offset() == -1


# -- properties ------------------------------------------------------------------------------------
class Properties:
    """Properties of resources, changed and looked at."""

    def __init__(self, java: Any, admin: Any) -> None:
        self.java, self.admin = java, admin
        self.kinds = java.kafka.common.config.ConfigResource
        self.operation = java.kafka.clients.admin.AlterConfigOp

    def resource(self, kind: str, name: str) -> Any:
        return self.kinds(getattr(self.kinds.Type, kind), name)

    def change(self, *changes: tuple[Any, str, str, str], looking: bool = False) -> Any:
        """(resource, operation, property, value): the futures of the resources."""
        by_resource: dict[Any, list[Any]] = {}
        entry = self.java.kafka.clients.admin.ConfigEntry
        for resource, operation, name, value in changes:
            kind = getattr(self.operation.OpType, operation)
            made = self.operation(entry(name, value), kind)
            by_resource.setdefault(resource, []).append(made)
        options = self.java.kafka.clients.admin.AlterConfigsOptions().validateOnly(looking)
        return self.admin.incrementalAlterConfigs(by_resource, options).values()

    def result(self, resource: Any, *change: str, looking: bool = False) -> str:
        changed = self.change((resource, *change), looking=looking)
        return outcome(self.java, changed[resource])

    def entries(self, resource: Any) -> Any:
        return self.java.get(self.admin.describeConfigs([resource]).values()[resource])

    def wait(self, resource: Any, name: str, value: str) -> None:
        wait_until(lambda: self.entries(resource).get(name).value() == value, f"{name}={value}")


@pytest.fixture
def properties(java: Any, admin: Any) -> Properties:
    return Properties(java, admin)


def test_properties_of_several_topics_change(java, properties, topic):
    one = properties.resource("TOPIC", topic(cleanup_policy="compact", retention_ms=60000))
    two = properties.resource("TOPIC", topic())
    changed = properties.change(
        (one, "SET", "flush.ms", "1000"),
        (one, "APPEND", "cleanup.policy", "delete"),
        (one, "DELETE", "retention.ms", ""),
        (two, "SET", "min.cleanable.dirty.ratio", "0.9"),
        (two, "SET", "compression.type", "lz4"),
        (two, "APPEND", "cleanup.policy", "compact"),
    )
    assert [outcome(java, changed[r]) for r in (one, two)] == ["done"] * 2
    for resource, name, value in (
        (one, "flush.ms", "1000"),
        (one, "cleanup.policy", "compact,delete"),
        (one, "retention.ms", "604800000"),
        (two, "min.cleanable.dirty.ratio", "0.9"),
        (two, "compression.type", "lz4"),
        (two, "cleanup.policy", "delete,compact"),
    ):
        properties.wait(resource, name, value)
    throttled = "leader.replication.throttled.replicas"
    changed = properties.change(
        (one, "SUBTRACT", "cleanup.policy", "compact"),
        (one, "SUBTRACT", throttled, "0"),
        (two, "SUBTRACT", "cleanup.policy", "compact,delete"),
    )
    assert [outcome(java, changed[r]) for r in (one, two)] == ["done"] * 2
    properties.wait(one, "cleanup.policy", "delete")
    properties.wait(two, "cleanup.policy", "")
    assert properties.entries(one).get("flush.ms").value() == "1000"
    assert properties.entries(one).get(throttled).value() == ""
    for operation, value in (("APPEND", "delete"), ("SUBTRACT", "compact")):
        assert properties.result(one, operation, "cleanup.policy", value) == "done"
        properties.wait(one, "cleanup.policy", "delete")  # it is there already; it is not there


def test_changes_that_are_refused_or_only_looked_at(java, properties, topic):
    one, two = (properties.resource("TOPIC", topic()) for _ in range(2))
    ratio = "min.cleanable.dirty.ratio"
    changed = properties.change(
        (one, "SET", ratio, "0.75"),
        (one, "SET", ratio, "0.65"),
        (one, "SET", "compression.type", "gzip"),
        (two, "SET", ratio, "0.9"),
    )
    assert outcome(java, changed[one]) == "InvalidRequestException", "the same property twice"
    assert outcome(java, changed[two]) == "done"
    properties.wait(two, ratio, "0.9")
    for operation, name, value in (
        ("APPEND", "compression.type", "gzip"),
        ("SUBTRACT", "compression.type", "snappy"),
        ("SET", ratio, "1.1"),
        ("SET", "compression.type", "zip"),
    ):
        for looking in (True, False):
            refused = properties.result(one, operation, name, value, looking=looking)
            assert refused == "InvalidConfigurationException", (operation, name, value)
    assert properties.result(one, "SET", ratio, "0.1", looking=True) == "done"
    found = properties.entries(one)
    assert (found.get(ratio).value(), found.get("compression.type").value()) == ("0.5", "producer")


def test_properties_are_described(java, admin, properties, topic):
    known = properties.resource("TOPIC", topic())
    strange = properties.resource("TOPIC", "(invalid topic)")
    unknown = properties.resource("TOPIC", "nowhere")
    options = java.kafka.clients.admin.DescribeConfigsOptions()
    told = admin.describeConfigs([known, strange, unknown, known]).values()
    assert (outcome(java, told[strange]), outcome(java, told[unknown])) == (
        "InvalidTopicException",
        "UnknownTopicOrPartitionException",
    )
    for documented in (True, False):
        options.includeDocumentation(documented)
        (found,) = java.get(admin.describeConfigs([known, known], options).all()).values()
        texts = [e.documentation() for e in java.list(found.entries())]
        assert len(texts) > 30 and all((text is not None) == documented for text in texts)
    assert properties.entries(properties.resource("GROUP", "nobody")).entries().size() > 0
    metrics = properties.entries(properties.resource("CLIENT_METRICS", "none"))
    assert sorted(e.name() for e in java.list(metrics.entries())) == [
        "interval.ms", "match", "metrics",
    ]  # fmt: skip


def test_properties_of_groups(properties):
    group = properties.resource("GROUP", fresh("g"))
    timeout, interval = "consumer.session.timeout.ms", "consumer.heartbeat.interval.ms"
    changed = properties.change(
        (group, "SET", timeout, "50000"), (group, "DELETE", interval, "")
    )[group]  # fmt: skip
    assert outcome(properties.java, changed) == "done"
    properties.wait(group, timeout, "50000")
    found = properties.entries(group)
    assert found.get(timeout).source().toString() == "DYNAMIC_GROUP_CONFIG"
    assert (found.get(interval).value(), found.get(interval).source().toString()) == (
        "5000",
        "DEFAULT_CONFIG",
    )
    assert properties.result(group, "SET", timeout, "60000", looking=True) == "done"
    refused = properties.result(group, "SET", timeout, "5", looking=True)
    assert refused == "InvalidConfigurationException"
    assert properties.entries(group).get(timeout).value() == "50000"


def test_levels_of_loggers(java, properties):
    broker = properties.resource("BROKER_LOGGER", "1")
    before = {e.name(): e.value() for e in java.list(properties.entries(broker).entries())}
    name = min(n for n in before if n != "root")
    assert properties.result(broker, "SET", name, "DEBUG", looking=True) == "done"
    assert properties.entries(broker).get(name).value() == before[name]
    assert properties.result(broker, "SET", name, "DEBUG") == "done"
    found = properties.entries(broker).get(name)
    assert (found.value(), found.source().toString()) == ("DEBUG", "DYNAMIC_BROKER_LOGGER_CONFIG")
    assert not found.isReadOnly() and not found.isSensitive() and found.synonyms().isEmpty()
    for operation, logger, level, error in (
        ("APPEND", name, "ERROR", "InvalidRequestException"),
        ("SUBTRACT", name, "ERROR", "InvalidRequestException"),
        ("SET", name, "OFF", "InvalidConfigurationException"),
        ("SET", "Some Other LogCleaner", "ERROR", "InvalidConfigurationException"),
        ("DELETE", "root", "", "InvalidRequestException"),
    ):
        assert properties.result(broker, operation, logger, level) == error, (operation, logger)
    assert properties.entries(broker).get(name).value() == "DEBUG"
    assert properties.result(broker, "DELETE", name, "") == "done"
    assert properties.entries(broker).get(name).value() == properties.entries(broker).get(
        "root"
    ).value()  # fmt: skip


def test_resources_with_properties_are_listed(java, admin, properties, topic):
    kinds, name, metrics = properties.kinds.Type, topic(), fresh("m")

    def listed(*types: Any) -> set[tuple[str, str]]:
        options = java.kafka.clients.admin.ListConfigResourcesOptions()
        found = java.get(admin.listConfigResources(set(types), options).all())
        return {(str(r.type()), r.name()) for r in java.list(found)}

    assert ("TOPIC", name) in listed(kinds.TOPIC)
    assert listed(kinds.BROKER) == {("BROKER", "1")}
    subscription = properties.resource("CLIENT_METRICS", metrics)
    assert properties.result(subscription, "SET", "interval.ms", "111") == "done"
    wait_until(lambda: ("CLIENT_METRICS", metrics) in listed(kinds.CLIENT_METRICS), "it is there")
    assert {("CLIENT_METRICS", metrics), ("TOPIC", name), ("BROKER", "1")} <= listed()
    assert ("TOPIC", name) not in listed(kinds.CLIENT_METRICS, kinds.GROUP)
    assert properties.result(subscription, "DELETE", "interval.ms", "") == "done"
    wait_until(lambda: ("CLIENT_METRICS", metrics) not in listed(), "it is gone")


# -- groups ----------------------------------------------------------------------------------------
def joined(java: Any, servers: str, name: str, members: list[dict[str, Any]]) -> list[Any]:
    """Consumers with these settings, each with a partition of a topic."""
    consumers = [java.consumer(servers, enable_auto_commit="false", **m) for m in members]
    for consumer in consumers:
        consumer.subscribe([name])

    def shared() -> bool:
        for consumer in consumers:
            list(java.poll(consumer))
        return all(consumer.assignment().size() == 1 for consumer in consumers)

    wait_until(shared, "each member has a partition", 60)
    return consumers


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_group_and_its_members(java, admin, servers, topic, protocol):
    name, group, nobody = topic(3), fresh("g"), fresh("nobody")
    common = {"group_id": group, "client_id": "c", "group_protocol": protocol}
    members = [{**common, "group_instance_id": i} for i in ("i1", "i2")]
    consumers = joined(java, servers, name, [*members, common])
    tp, elsewhere = java.partition(name, 0), java.partition(fresh(), 0)
    api = java.kafka.clients.admin
    at = java.kafka.clients.consumer.OffsetAndMetadata
    types, states = java.kafka.common.GroupType, java.kafka.common.GroupState

    def listed(state: str, kind: str) -> bool:
        options = api.ListGroupsOptions()
        options.inGroupStates({getattr(states, state)}).withTypes({getattr(types, kind)})
        return group in {g.groupId() for g in java.list(java.get(admin.listGroups(options).all()))}

    own, other = protocol.upper(), "CONSUMER" if protocol == "classic" else "CLASSIC"
    wait_until(lambda: listed("STABLE", own), "it is stable")
    assert not listed("EMPTY", own) and not listed("STABLE", other)

    options = api.DescribeConsumerGroupsOptions().includeAuthorizedOperations(True)
    result = admin.describeConsumerGroups([group, nobody], options).describedGroups()
    assert outcome(java, result[nobody]) == "GroupIdNotFoundException"
    told = java.get(result[group])
    assert (told.groupId(), str(told.groupState()), str(told.type())) == (
        group, "Stable", protocol.capitalize(),
    )  # fmt: skip
    assert not told.isSimpleConsumerGroup() and told.coordinator().id() == 1
    assert {str(x) for x in told.authorizedOperations()} >= {"READ", "DESCRIBE", "DELETE"}
    rows = java.list(told.members())
    assert {m.clientId() for m in rows} == {"c"}
    assert sorted(m.groupInstanceId().orElse("-") for m in rows) == ["-", "i1", "i2"]
    assigned = [p.partition() for m in rows for p in m.assignment().topicPartitions()]
    assert sorted(assigned) == [0, 1, 2]

    owner = next(c for c in consumers if tp in c.assignment())
    owner.commitSync({tp: at(1)})
    stable = api.ListConsumerGroupOffsetsOptions().requireStable(True)
    spec = api.ListConsumerGroupOffsetsSpec().topicPartitions([tp])
    for found in (
        admin.listConsumerGroupOffsets(group),
        admin.listConsumerGroupOffsets(group, stable),
        admin.listConsumerGroupOffsets({group: spec}, stable),
    ):
        assert java.get(found.partitionsToOffsetAndMetadata(group))[tp].offset() == 1

    # While it has members nobody else changes its offsets, and it is not deleted.
    change = admin.alterConsumerGroupOffsets(group, {tp: at(0)})
    assert outcome(java, change.all()) == "UnknownMemberIdException"
    forget = admin.deleteConsumerGroupOffsets(group, {tp, elsewhere})
    assert outcome(java, forget.partitionResult(tp)) == "GroupSubscribedToTopicException"
    missing = outcome(java, forget.partitionResult(elsewhere))
    assert missing == "UnknownTopicOrPartitionException"
    forget = admin.deleteConsumerGroupOffsets(nobody, {tp})
    assert outcome(java, forget.all()) == "GroupIdNotFoundException"
    deleted = admin.deleteConsumerGroups([group, nobody]).deletedGroups()
    assert outcome(java, deleted[group]) == "GroupNotEmptyException"
    assert outcome(java, deleted[nobody]) == "GroupIdNotFoundException"

    def remove(*instances: str) -> str:
        given = [api.MemberToRemove(i) for i in instances]
        options = api.RemoveMembersFromConsumerGroupOptions
        made = options(given) if given else options()
        return outcome(java, admin.removeMembersFromConsumerGroup(group, made).all())

    def count() -> int:
        return int(java.get(admin.describeConsumerGroups([group]).all())[group].members().size())

    assert remove("none-such") == "UnknownMemberIdException" and count() == 3
    assert remove("i1") == "done" and count() == 2
    assert remove() == "done" and count() == 0
    for consumer in consumers:
        consumer.close(java.milliseconds(0))
    change = admin.alterConsumerGroupOffsets(group, {tp: at(0)})
    assert outcome(java, change.all()) == "done"
    found = admin.listConsumerGroupOffsets(group).partitionsToOffsetAndMetadata()
    assert java.get(found)[tp].offset() == 0
    assert outcome(java, admin.deleteConsumerGroupOffsets(group, {tp}).all()) == "done"
    assert outcome(java, admin.deleteConsumerGroups([group]).all()) == "done"
    result = admin.describeConsumerGroups([group]).describedGroups()
    assert outcome(java, result[group]) == "GroupIdNotFoundException"


# -- transactions ----------------------------------------------------------------------------------
def test_transactions_and_producers(java, admin, servers, topic):
    name = topic()
    tp, api = java.partition(name, 0), java.kafka.clients.admin
    ids = {end: f"{name}-{end}" for end in ("commit", "abort", "open")}
    states = api.TransactionState

    def state(which: str) -> str:
        result = admin.describeTransactions([ids[which]]).description(ids[which])
        return str(java.get(result).state())

    def producers() -> list[Any]:
        return java.list(java.get(admin.describeProducers([tp]).all())[tp].activeProducers())

    def listed(options: Any) -> set[str]:
        found = java.list(java.get(admin.listTransactions(options).all()))
        return {x.transactionalId() for x in found} & set(ids.values())

    send(java, servers, name, None)
    (plain,) = producers()
    assert plain.producerEpoch() == 0 and not plain.coordinatorEpoch().isPresent()
    assert not plain.currentTransactionStartOffset().isPresent()
    unknown = admin.describeTransactions([ids["commit"]]).all()
    assert outcome(java, unknown) == "TransactionalIdNotFoundException"
    for which in ids:
        producer = java.producer(servers, transactional_id=ids[which])
        producer.initTransactions()
        assert state(which) == "Empty"
        producer.beginTransaction()
        java.get(producer.send(java.record(name, 0, None, which)))
        assert state(which) == "Ongoing"
        told = java.get(admin.describeTransactions([ids[which]]).all())[ids[which]]
        assert (told.coordinatorId(), [str(x) for x in told.topicPartitions()]) == (
            1,
            [f"{name}-0"],
        )
        if which == "commit":
            producer.commitTransaction()
            wait_until(lambda: state("commit") == "CompleteCommit", "its end")
        elif which == "abort":
            producer.abortTransaction()
            wait_until(lambda: state("abort") == "CompleteAbort", "its end")
    made = api.ListTransactionsOptions
    assert listed(made()) == set(ids.values())
    assert listed(made().filterStates([states.COMPLETE_ABORT])) == {ids["abort"]}
    assert listed(made().filterStates([states.ONGOING, states.COMPLETE_COMMIT])) == {
        ids["open"], ids["commit"],
    }  # fmt: skip
    assert listed(made().filterProducerIds([(1 << 40) + 1])) == set()
    assert listed(made().filterOnDuration(3_600_000)) == set()
    assert len(producers()) == 4
    (hanging,) = (x for x in producers() if x.currentTransactionStartOffset().isPresent())
    # One plain record, and two transactions of a record and a marker.
    assert hanging.currentTransactionStartOffset().getAsLong() == 5

    consumer = java.consumer(servers, isolation_level="read_committed")
    consumer.assign([tp])
    send(java, servers, name, None)
    assert consumer.endOffsets([tp])[tp] == 5
    spec = api.AbortTransactionSpec(
        tp,
        hanging.producerId(),
        hanging.producerEpoch(),
        max(0, hanging.coordinatorEpoch().orElse(0)),
    )
    assert outcome(java, admin.abortTransaction(spec).all()) == "done"
    wait_until(lambda: consumer.endOffsets([tp])[tp] == 8, "nothing is open")
    values: list[str] = []
    wait_until(
        lambda: values.extend(r.value() for r in java.poll(consumer)) or len(values) == 3,
        "the records",
    )
    assert values == ["v", "commit", "v"]
    consumer.close()
    producer.close(java.milliseconds(0))


# -- the cluster -----------------------------------------------------------------------------------
def test_elections_and_reassignments(java, admin, topic):
    name = topic(3)
    tps = [java.partition(name, i) for i in range(3)]
    missing = [java.partition(name, 7), java.partition("nowhere", 0)]
    kinds, optional = java.kafka.common.ElectionType, java.gateway.jvm.java.util.Optional
    for kind in (kinds.PREFERRED, kinds.UNCLEAN):
        result = java.get(admin.electLeaders(kind, {tps[0], *missing}).partitions())
        errors = {str(tp): e.get().getClass().getSimpleName() for tp, e in result.items()}
        assert errors == {
            str(tps[0]): "ElectionNotNeededException",
            **{str(tp): "UnknownTopicOrPartitionException" for tp in missing},
        }
        assert java.get(admin.electLeaders(kind, None).partitions()).size() == 0

    moved = java.kafka.clients.admin.NewPartitionReassignment
    wanted = {
        tps[0]: optional.of(moved([1, 2])),
        tps[1]: optional.of(moved([-3, -2])),
        tps[2]: optional.of(moved([1, 1])),
        **{tp: optional.of(moved([1])) for tp in missing},
    }
    results = admin.alterPartitionReassignments(wanted).values()
    for tp in wanted:
        error = "InvalidReplicaAssignment" if tp in tps else "UnknownTopicOrPartition"
        assert outcome(java, results[tp]) == f"{error}Exception"
    cancelled = admin.alterPartitionReassignments({tps[0]: optional.empty()}).all()
    assert outcome(java, cancelled) == "NoReassignmentInProgressException"
    for some in (admin.listPartitionReassignments({tps[0]}), admin.listPartitionReassignments()):
        assert java.get(some.reassignments()).size() == 0


def test_features_and_the_quorum(java, admin):
    features = java.get(admin.describeFeatures().featureMetadata())
    finalized = features.finalizedFeatures()
    assert finalized["metadata.version"].maxVersionLevel() == 27
    assert {"group.version", "transaction.version"} <= set(finalized)
    update = java.kafka.clients.admin.FeatureUpdate
    for name, level in (("nonsense", 1), ("metadata.version", 999)):
        change = {name: update(level, update.UpgradeType.UPGRADE)}
        options = java.kafka.clients.admin.UpdateFeaturesOptions()
        refused = outcome(java, admin.updateFeatures(change, options).all())
        assert refused == "InvalidUpdateVersionException", name
    quorum = java.get(admin.describeMetadataQuorum().quorumInfo())
    assert quorum.leaderId() == 1 and [v.replicaId() for v in quorum.voters()] == [1]


def test_what_a_broker_without_security_says(java, admin):
    acl = java.kafka.common.acl
    pattern = java.kafka.common.resource
    binding = acl.AclBinding(
        pattern.ResourcePattern(
            pattern.ResourceType.TOPIC, "t", pattern.PatternType.LITERAL
        ),
        acl.AccessControlEntry(
            "User:x", "*", acl.AclOperation.DESCRIBE, acl.AclPermissionType.ALLOW
        ),
    )  # fmt: skip
    for future in (
        admin.describeAcls(acl.AclBindingFilter.ANY).values(),
        admin.createAcls([binding]).all(),
        admin.deleteAcls([binding.toFilter()]).all(),
    ):
        assert outcome(java, future) == "SecurityDisabledException"
    users = admin.describeUserScramCredentials(["nobody"])
    assert outcome(java, users.description("nobody")) == "ResourceNotFoundException"
    assert java.get(admin.describeUserScramCredentials().all()).size() == 0
    assert java.get(
        admin.describeClientQuotas(java.kafka.common.quota.ClientQuotaFilter.all()).entities()
    ).size() == 0  # fmt: skip
