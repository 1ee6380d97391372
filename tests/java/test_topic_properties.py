"""Our table of topic properties beside Kafka's own: LogConfig of Kafka 4.1, read out of its
jars."""

from __future__ import annotations

from typing import Any

import pytest
from py4j.java_gateway import get_field
from py4j.protocol import Py4JJavaError

from kdirect.broker.config import BrokerConfig
from kdirect.options import TOPIC

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("java", ["4.1.0"], indirect=True)]

# Where our defaults are not Kafka's, and docs/options.md says why.
OURS = {"segment.bytes": str(64 << 20), "preallocate": "true"}
# Those that Kafka has not.
OWN = {"remote.copy.lag.ms", "remote.copy.lag.bytes", "remote.log.client.access"}


@pytest.fixture
def kafkas(java) -> dict[str, tuple[str, str]]:
    """Property -> (type, default) of every public topic property of Kafka."""
    definition = java.kafka.storage.internals.log.LogConfig.configDefCopy()
    keys = definition.configKeys()
    out = {}
    for name in keys:
        if not get_field(keys[name], "internalConfig"):
            kind = get_field(keys[name], "type")
            default = definition.defaultValues().get(name)
            out[name] = (
                kind.toString(),
                java.kafka.common.config.ConfigDef.convertToString(default, kind),
            )
    assert len(out) == 33
    return out


def describe(java, admin, topic) -> dict[str, Any]:
    kinds = java.kafka.common.config.ConfigResource
    options = (
        java.kafka.clients.admin.DescribeConfigsOptions()
        .includeDocumentation(True)
        .includeSynonyms(True)
    )
    (config,) = java.get(
        admin.describeConfigs([kinds(kinds.Type.TOPIC, topic)], options).all()
    ).values()
    return {entry.name(): entry for entry in java.list(config.entries())}


def test_names_types_and_defaults_are_kafkas(java, admin, kafkas):
    java.get(admin.createTopics([java.kafka.clients.admin.NewTopic("t", 1, 1)]).all())
    ours = describe(java, admin, "t")
    assert ours.keys() - kafkas.keys() == OWN
    shown = {n: e for n, e in ours.items() if n not in OWN}
    assert {n: e.type().toString() for n, e in shown.items()} == {
        n: kind for n, (kind, _) in kafkas.items()
    }
    assert {n: e.value() for n, e in shown.items()} == {
        n: OURS.get(n, default) for n, (_, default) in kafkas.items()
    }
    assert all(
        e.documentation() and not e.isSensitive() and not e.isReadOnly() for e in ours.values()
    )
    assert {e.source().toString() for e in ours.values()} == {"DEFAULT_CONFIG"}
    synonyms = {n: [s.name() for s in e.synonyms()] for n, e in ours.items()}
    assert synonyms["segment.bytes"] == ["log.segment.bytes"] and synonyms[
        "min.insync.replicas"
    ] == ["min.insync.replicas"]


def test_kafkas_defaults_are_taken_and_shown(java, admin, kafkas):
    """All but `preallocate`, whose default in Kafka this broker cannot follow."""
    given = {n: default for n, (_, default) in kafkas.items() if n != "preallocate"}
    java.get(
        admin.createTopics([java.kafka.clients.admin.NewTopic("t", 1, 1).configs(given)]).all()
    )
    shown = describe(java, admin, "t")
    assert {n: shown[n].value() for n in given} == given
    assert {shown[n].source().toString() for n in given} == {"DYNAMIC_TOPIC_CONFIG"}

    kinds, operation = (
        java.kafka.common.config.ConfigResource,
        java.kafka.clients.admin.AlterConfigOp,
    )
    changes = [
        operation(java.kafka.clients.admin.ConfigEntry(n, ""), operation.OpType.DELETE)
        for n in given
    ]
    java.get(admin.incrementalAlterConfigs({kinds(kinds.Type.TOPIC, "t"): changes}).all())
    assert {e.source().toString() for e in describe(java, admin, "t").values()} == {
        "DEFAULT_CONFIG"
    }


def test_a_refusal_names_property_and_reason(java, admin):
    new = java.kafka.clients.admin.NewTopic("t", 1, 1).configs({"min.insync.replicas": "2"})
    with pytest.raises(Py4JJavaError) as caught:
        java.get(admin.createTopics([new]).all())
    cause = caught.value.java_exception.getCause()
    assert cause.getClass().getSimpleName() == "InvalidConfigurationException"
    assert "min.insync.replicas" in cause.getMessage() and "one broker" in cause.getMessage()


def test_a_properties_file_may_have_the_brokers_synonyms(java, kafkas):
    """What Kafka's server.properties sets for all topics is known, or named in a warning, with the
    default as its value."""
    holder = java.gateway.jvm.Class.forName(
        "org.apache.kafka.server.config.ServerTopicConfigSynonyms"
    )
    synonyms = holder.getField("TOPIC_CONFIG_SYNONYMS").get(None)
    given = {
        synonyms[n]: default
        for n, (_, default) in kafkas.items()
        if n in synonyms and n != "preallocate"
    }
    assert len(given) > 20
    config = BrokerConfig(given)
    assert config.given | set(config.ignored) == set(given)
    assert {row.synonym for row in TOPIC.rows if row.synonym} <= config.given | {"log.preallocate"}
