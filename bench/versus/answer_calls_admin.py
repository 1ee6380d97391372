"""The rest of `versus.answer_calls`: properties, the cluster, security and transactions; and all
calls in their order."""

from __future__ import annotations

from typing import Any

from versus.answer_calls import (
    DATA,
    GROUPS,
    GROWTH,
    LONG,
    READS,
    TOPICS,
    VERSIONS,
    Call,
    T,
)
from versus.answer_calls_members import MEMBERS
from versus.answer_calls_txn import TRANSACTIONS


def _config(kind: int, name: str, *configs: tuple[Any, ...]) -> dict[str, Any]:
    rows = [
        {"name": n, "value": value, "config_operation": operation}
        for n, operation, value in configs
    ]
    resource = {"resource_type": kind, "resource_name": name, "configs": rows}
    return {"resources": [resource], "validate_only": False}


def _replaced(kind: int, name: str, *configs: tuple[str, Any]) -> dict[str, Any]:
    rows = [{"name": n, "value": value} for n, value in configs]
    resource = {"resource_type": kind, "resource_name": name, "configs": rows}
    return {"resources": [resource], "validate_only": False}


def _described(kind: int, name: str, keys: Any = None, **more: Any) -> dict[str, Any]:
    row = {"resource_type": kind, "resource_name": name, "configuration_keys": keys}
    return {"resources": [row], "include_synonyms": True, **more}


TOPIC, BROKER, LOGGER, METRICS, GROUP = 2, 4, 8, 16, 32
_CHANGES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("set", _config(TOPIC, T, ("retention.ms", 0, "8000"))),
    ("set several", _config(TOPIC, T, ("retention.bytes", 0, "9"), ("segment.ms", 0, "99999"))),
    ("delete", _config(TOPIC, T, ("retention.bytes", 1, None))),
    ("delete what is not set", _config(TOPIC, T, ("flush.ms", 1, None))),
    ("delete with a value", _config(TOPIC, T, ("segment.ms", 1, "1"))),
    ("append", _config(TOPIC, T, ("cleanup.policy", 2, "delete"))),
    ("append nothing", _config(TOPIC, T, ("cleanup.policy", 2, None))),
    ("subtract what is not there", _config(TOPIC, T, ("cleanup.policy", 3, "compact"))),
    ("append to no list", _config(TOPIC, T, ("retention.ms", 2, "1"))),
    ("set nothing", _config(TOPIC, T, ("retention.ms", 0, None))),
    ("operation 9", _config(TOPIC, T, ("retention.ms", 9, "1"))),
    ("unknown property", _config(TOPIC, T, ("nonsense", 0, "1"))),
    ("bad value", _config(TOPIC, T, ("retention.ms", 0, "soon"))),
    ("out of range", _config(TOPIC, T, ("segment.bytes", 0, "1"))),
    ("property twice", _config(TOPIC, T, ("retention.ms", 0, "1"), ("retention.ms", 0, "2"))),
    ("nothing", _config(TOPIC, T)),
    ("unknown topic", _config(TOPIC, "nope", ("retention.ms", 0, "8000"))),
    ("no name", _config(TOPIC, "", ("retention.ms", 0, "8000"))),
    ("255 bytes", _config(TOPIC, LONG[255], ("retention.ms", 0, "8000"))),
    ("unknown broker", _config(BROKER, "9", ("log.retention.ms", 0, "1000000"))),
    ("broker of no number", _config(BROKER, "x", ("log.retention.ms", 0, "1000000"))),
    ("broker, read only", _config(BROKER, "1", ("log.dirs", 0, "/tmp/x"))),
    ("all brokers, read only", _config(BROKER, "", ("log.dirs", 0, "/tmp/x"))),
    ("broker, unknown", _config(BROKER, "1", ("nonsense.property", 0, "1"))),
    ("broker, bad value", _config(BROKER, "1", ("log.retention.ms", 0, "soon"))),
    ("broker, never set", _config(BROKER, "1", ("log.retention.ms", 1, None))),
    ("all brokers, never set", _config(BROKER, "", ("log.retention.ms", 1, None))),
    ("broker, SASL", _config(BROKER, "1", ("sasl.kerberos.min.time.before.relogin", 0, "58000"))),
    ("broker, bad SASL", _config(BROKER, "1", ("sasl.kerberos.min.time.before.relogin", 0, "x"))),
    ("broker, SASL, any", _config(BROKER, "1", ("sasl.login.refresh.window.jitter", 0, "1.5"))),
    ("all brokers, SASL", _config(BROKER, "", ("sasl.login.refresh.window.jitter", 0, "0.1"))),
    ("broker", _config(BROKER, "1", ("log.retention.ms", 0, "604800001"))),
    ("all brokers", _config(BROKER, "", ("log.retention.ms", 0, "604800002"))),
    ("logger", _config(LOGGER, "1", ("kafka", 0, "INFO"))),
    ("group", _config(GROUP, "cg", ("consumer.session.timeout.ms", 0, "50000"))),
    ("group, unknown", _config(GROUP, "cg", ("nonsense", 0, "1"))),
    ("group, too short", _config(GROUP, "cg", ("consumer.session.timeout.ms", 0, "1"))),
    ("group, no name", _config(GROUP, "", ("consumer.session.timeout.ms", 0, "50000"))),
    ("metrics", _config(METRICS, "cm", ("interval.ms", 0, "1000"))),
    ("metrics, all", _config(METRICS, "cm", ("metrics", 0, "org.apache"))),
    ("metrics, match", _config(METRICS, "cm", ("match", 0, "client_id=x.*"))),
    ("metrics, bad match", _config(METRICS, "cm", ("match", 0, "nonsense=x"))),
    ("metrics, too short", _config(METRICS, "cm", ("interval.ms", 0, "1"))),
    ("metrics, unknown", _config(METRICS, "cm", ("nonsense", 0, "1"))),
    ("metrics, no name", _config(METRICS, "", ("interval.ms", 0, "1000"))),
    ("type 1", _config(1, "x", ("a", 0, "1"))),
    ("type 99", _config(99, "x", ("a", 0, "1"))),
)

CONFIGS = (
    *(Call("IncrementalAlterConfigs", case, fields) for case, fields in _CHANGES),
    *(
        Call("DescribeConfigs", case, fields)
        for case, fields in (
            ("topic", _described(TOPIC, T)),
            ("topic, documented", _described(TOPIC, T, include_documentation=True)),
            ("some of a topic", _described(TOPIC, T, ["retention.ms", "nonsense"])),
            ("none of a topic", _described(TOPIC, T, [])),
            ("unknown topic", _described(TOPIC, "nope")),
            ("topic of no name", _described(TOPIC, "")),
            ("255 bytes", _described(TOPIC, LONG[255])),
            ("broker", _described(BROKER, "1")),
            ("some of the broker", _described(BROKER, "1", ["log.retention.ms"])),
            ("all brokers", _described(BROKER, "")),
            ("unknown broker", _described(BROKER, "9")),
            ("broker of no number", _described(BROKER, "x")),
            ("logger", _described(LOGGER, "1", ["ROOT"])),
            ("group", _described(GROUP, "cg")),
            ("unknown group", _described(GROUP, "nobody")),
            ("group of no name", _described(GROUP, "")),
            ("metrics", _described(METRICS, "cm")),
            ("unknown metrics", _described(METRICS, "nobody")),
            ("metrics of no name", _described(METRICS, "")),
            ("type 1", _described(1, "x")),
            ("type 99", _described(99, "x")),
            ("twice", {"resources": _described(TOPIC, T, ["segment.ms"])["resources"] * 2}),
        )
    ),
    *(
        Call("AlterConfigs", case, fields)
        for case, fields in (
            ("topic", _replaced(TOPIC, T, ("retention.ms", "9000"))),
            ("nothing", _replaced(TOPIC, T)),
            ("no value", _replaced(TOPIC, T, ("retention.ms", None))),
            ("unknown property", _replaced(TOPIC, T, ("nonsense", "1"))),
            ("bad value", _replaced(TOPIC, T, ("retention.ms", "soon"))),
            ("unknown topic", _replaced(TOPIC, "nope", ("retention.ms", "9000"))),
            ("broker", _replaced(BROKER, "1", ("log.retention.ms", "604800003"))),
            ("SASL", _replaced(BROKER, "1", ("sasl.kerberos.min.time.before.relogin", "59000"))),
            ("all, SASL", _replaced(BROKER, "", ("sasl.kerberos.kinit.cmd", "/x"))),
            ("broker, nothing", _replaced(BROKER, "1")),
            ("all brokers", _replaced(BROKER, "", ("log.retention.ms", "604800004"))),
            ("all brokers, nothing", _replaced(BROKER, "")),
            ("unknown broker", _replaced(BROKER, "9", ("log.retention.ms", "604800003"))),
            ("logger", _replaced(LOGGER, "1", ("kafka", "INFO"))),
            ("group", _replaced(GROUP, "cg", ("consumer.session.timeout.ms", "50000"))),
            ("metrics", _replaced(METRICS, "cm", ("interval.ms", "1000"))),
            ("type 99", _replaced(99, "x", ("a", "1"))),
            ("property twice", _replaced(TOPIC, T, ("flush.ms", "1"), ("flush.ms", "2"))),
        )
    ),
    Call("ListConfigResources", "all", {"resource_types": []}),
    *(
        Call("ListConfigResources", f"type {kind}", {"resource_types": [kind]}, low=1)
        for kind in (TOPIC, BROKER, LOGGER, METRICS, GROUP, 1, 99)
    ),
)

_PRINCIPAL = {
    "resource_type": 2,
    "resource_name": T,
    "resource_pattern_type": 3,
    "principal": "User:x",
    "host": "*",
    "operation": 3,
    "permission_type": 3,
}
_FILTER = {
    "resource_type_filter": 1,
    "resource_name_filter": None,
    "pattern_type_filter": 1,
    "principal_filter": None,
    "host_filter": None,
    "operation": 1,
    "permission_type": 1,
}


def _moved(topic: str, partition: int, replicas: Any) -> dict[str, Any]:
    row = {"partition_index": partition, "replicas": replicas}
    return {"timeout_ms": 5000, "topics": [{"name": topic, "partitions": [row]}]}


def _level(feature: str, level: int, kind: int = 1) -> dict[str, Any]:
    row = {"feature": feature, "max_version_level": level, "upgrade_type": kind}
    return {"timeout_ms": 5000, "feature_updates": [row]}


def _quorum(topic: str, partition: int) -> dict[str, Any]:
    return {"topics": [{"topic_name": topic, "partitions": [{"partition_index": partition}]}]}


CLUSTER = (
    Call("ElectLeaders", "all", {"election_type": 0, "topic_partitions": None, "timeout_ms": 5000}),
    *(
        Call(
            "ElectLeaders",
            case,
            {
                "election_type": kind,
                "topic_partitions": [{"topic": topic, "partitions": [partition]}],
                "timeout_ms": 5000,
            },
            low=1 if kind else 0,
        )
        for case, kind, topic, partition in (
            ("preferred", 0, T, 0),
            ("unclean", 1, T, 0),
            ("type 7", 7, T, 0),
            ("unknown topic", 0, "nope", 0),
            ("unknown partition", 0, T, 9),
        )
    ),
    *(
        Call("AlterPartitionReassignments", case, _moved(*what))
        for case, what in (
            ("where it is", (T, 0, [1])),
            ("to nobody", (T, 0, [9])),
            ("twice there", (T, 0, [1, 1])),
            ("nowhere", (T, 0, [])),
            ("cancelled", (T, 0, None)),
            ("unknown topic", ("nope", 0, [1])),
            ("unknown partition", (T, 9, [1])),
        )
    ),
    Call("ListPartitionReassignments", "all", {"timeout_ms": 5000, "topics": None}),
    Call(
        "ListPartitionReassignments",
        "unknown",
        {"timeout_ms": 5000, "topics": [{"name": "nope", "partition_indexes": [0]}]},
    ),
    Call("DescribeLogDirs", "all", {"topics": None}),
    Call("DescribeLogDirs", "one", {"topics": [{"topic": T, "partitions": [0]}]}),
    Call("DescribeLogDirs", "unknown", {"topics": [{"topic": "nope", "partitions": [0]}]}),
    Call("DescribeLogDirs", "none", {"topics": []}),
    *(
        Call(
            "AlterReplicaLogDirs",
            case,
            {"dirs": [{"path": path, "topics": [{"name": topic, "partitions": [partition]}]}]},
        )
        for case, path, topic, partition in (
            ("no such directory", "/nowhere", T, 0),
            ("relative", "nowhere", T, 0),
            ("unknown topic there", "/nowhere", "nope", 0),
            ("too long a name", "/nowhere", "t" * 249, 0),
        )
    ),
    Call("AlterReplicaLogDirs", "nothing", {"dirs": []}),
    Call("DescribeQuorum", "the metadata", _quorum("__cluster_metadata", 0)),
    Call("DescribeQuorum", "another topic", _quorum(T, 0)),
    Call("DescribeQuorum", "another partition", _quorum("__cluster_metadata", 1)),
    Call("DescribeQuorum", "nothing", {"topics": []}),
    Call("UpdateFeatures", "as it is", _level("metadata.version", 27)),
    Call("UpdateFeatures", "too high", _level("metadata.version", 999)),
    Call("UpdateFeatures", "unknown", _level("nonsense", 1)),
    Call("UpdateFeatures", "-1", _level("metadata.version", -1)),
    Call("UpdateFeatures", "type 9", _level("metadata.version", 27, 9), low=1),
)

SECURITY = (
    Call("SaslHandshake", "plain", {"mechanism": "PLAIN"}),
    Call("SaslAuthenticate", "without a handshake", {"auth_bytes": b"\0a\0b"}),
    Call("DescribeAcls", "all", _FILTER),
    Call("CreateAcls", "one", {"creations": [_PRINCIPAL]}),
    Call("DeleteAcls", "all", {"filters": [_FILTER]}),
    Call("DescribeUserScramCredentials", "all", {"users": None}),
    Call("DescribeUserScramCredentials", "one", {"users": [{"name": "x"}]}),
    Call("DescribeClientQuotas", "all", {"components": [], "strict": False}),
    Call(
        "DescribeClientQuotas",
        "unknown entity",
        {"components": [{"entity_type": "x", "match_type": 0, "match": "y"}], "strict": False},
    ),
    *(
        Call(
            "AlterClientQuotas",
            case,
            {
                "entries": [
                    {
                        "entity": [{"entity_type": kind, "entity_name": "x"}],
                        "ops": [{"key": key, "value": 1000.0, "remove": False}],
                    }
                ],
                "validate_only": True,
            },
        )
        for case, kind, key in (
            ("a user", "user", "consumer_byte_rate"),
            ("unknown entity", "x", "consumer_byte_rate"),
            ("unknown quota", "user", "nonsense"),
        )
    ),
    Call("AlterClientQuotas", "nothing", {"entries": [], "validate_only": True}),
    Call(
        "AlterUserScramCredentials",
        "delete what is not there",
        {"deletions": [{"name": "x", "mechanism": 1}], "upsertions": []},
    ),
    Call(
        "AlterUserScramCredentials",
        "a user",
        {
            "deletions": [],
            "upsertions": [
                {
                    "name": "x",
                    "mechanism": 1,
                    "iterations": 4096,
                    "salt": b"salt",
                    "salted_password": b"password",
                }
            ],
        },
    ),
    Call("AlterUserScramCredentials", "nothing", {"deletions": [], "upsertions": []}),
)

CALLS: tuple[Call, ...] = (
    *VERSIONS,
    *TOPICS,
    *GROWTH,
    *DATA,
    *READS,
    *GROUPS,
    *MEMBERS,
    *TRANSACTIONS,
    *CONFIGS,
    *CLUSTER,
    *SECURITY,
)
