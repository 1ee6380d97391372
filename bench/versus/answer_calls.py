"""What is asked of both brokers: for each API its good requests, its bad ones, and those that only
look odd.

Owns: the calls, as plain values.  Each is made in every version that both brokers speak.  `{v}` in
a text becomes the version, so that a call that changes something can be made once a version; a
field may be a function of what earlier answers have told (`Told`).  Calls are made in the order of
this file, to two brokers that were empty before.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

T = "t"  # a topic of two partitions with five records in the first
LONG = {n: "n" * n for n in (249, 250, 255)}
NOBODY = uuid.UUID("00000000-0000-0000-0000-00000000abcd")
Told = dict[str, Any]


class Call(NamedTuple):
    """One request.  `case` tells it from others of its API; `fields` are those of the message.
    `low`, `high`: the versions that it makes sense in.  `keep` takes what later calls need from the
    answer.  `after_s`: wait so long first, for a broker that is not done when it answers."""

    api: str
    case: str
    fields: dict[str, Any]
    low: int = 0
    high: int = 99
    keep: Callable[[Any, Told], None] | None = None
    after_s: float = 0


def records(values: Iterable[bytes], damage: bool = False, key: bytes | None = None) -> bytes:
    """One record batch."""
    from kafka.record.default_records import DefaultRecordBatchBuilder

    builder = DefaultRecordBatchBuilder(
        magic=2,
        compression_type=0,
        is_transactional=0,
        producer_id=-1,
        producer_epoch=-1,
        base_sequence=-1,
        batch_size=99999,
    )
    for i, value in enumerate(values):
        builder.append(i, timestamp=1_700_000_000_000 + i, key=key, value=value, headers=[])
    out = bytearray(builder.build())
    if damage:
        out[-1] ^= 1
    return bytes(out)


def one(topic: str, rows: str, **fields: Any) -> list[dict[str, Any]]:
    """One topic with one row of one partition."""
    return [{"name": topic, rows: [fields]}]


def _keep_id(answer: Any, told: Told) -> None:
    told["topic_id"] = answer.topics[0].topic_id


def _keep_member(answer: Any, told: Told) -> None:
    told["member_id"] = answer.member_id


def _topic_id(told: Told) -> Any:
    return told["topic_id"]


def _new(name: str, **more: Any) -> dict[str, Any]:
    given = {"num_partitions": 1, "replication_factor": 1, "assignments": [], "configs": [], **more}
    return {"topics": [{"name": name, **given}], "timeout_ms": 10_000}


def _assigned(*brokers: int) -> list[dict[str, Any]]:
    return [{"partition_index": i, "broker_ids": [b]} for i, b in enumerate(brokers)]


VERSIONS = (
    Call("ApiVersions", "named", {"client_software_name": "x", "client_software_version": "1"}),
    Call(
        "ApiVersions",
        "no name",
        {"client_software_name": "", "client_software_version": ""},
        low=3,
    ),
)

_CREATE: tuple[tuple[str, dict[str, Any]], ...] = (
    ("new", _new("new-{v}", num_partitions=2)),
    ("the broker's defaults", _new("defaults-{v}", num_partitions=-1, replication_factor=-1)),
    ("there already", _new(T)),
    ("only looked at", {**_new("looked-{v}"), "validate_only": True}),
    ("looked at, there already", {**_new(T), "validate_only": True}),
    ("twice", {"topics": _new("a")["topics"] * 2, "timeout_ms": 10_000}),
    ("bad name", _new("a b")),
    ("no name", _new("")),
    ("name ..", _new("..")),
    ("249 bytes", {**_new(LONG[249]), "validate_only": True}),
    ("250 bytes", _new(LONG[250])),
    ("255 bytes", _new(LONG[255])),
    ("collides", _new("col.{v}_x")),
    ("collides with the one before", _new("col_{v}.x")),
    ("no partitions", _new("x", num_partitions=0)),
    ("-2 partitions", _new("x", num_partitions=-2)),
    ("two replicas", _new("x", replication_factor=2)),
    ("no replicas", _new("x", replication_factor=0)),
    (
        "assigned",
        _new(
            "given-{v}",
            num_partitions=-1,
            replication_factor=-1,
            assignments=_assigned(1, 1),
        ),
    ),
    (
        "assigned to nobody",
        _new("x", num_partitions=-1, replication_factor=-1, assignments=_assigned(9)),
    ),
    (
        "assigned with a gap",
        _new(
            "x",
            num_partitions=-1,
            replication_factor=-1,
            assignments=[{"partition_index": 1, "broker_ids": [1]}],
        ),
    ),
    (
        "assigned to one twice",
        _new(
            "x",
            num_partitions=-1,
            replication_factor=-1,
            assignments=[{"partition_index": 0, "broker_ids": [1, 1]}],
        ),
    ),
    (
        "assigned to none",
        _new(
            "x",
            num_partitions=-1,
            replication_factor=-1,
            assignments=[{"partition_index": 0, "broker_ids": []}],
        ),
    ),
    ("assigned and numbered", _new("x", assignments=_assigned(1))),
    ("with configs", _new("conf-{v}", configs=[{"name": "retention.ms", "value": "7000"}])),
    ("unknown config", _new("x", configs=[{"name": "nonsense", "value": "1"}])),
    ("bad config", _new("x", configs=[{"name": "retention.ms", "value": "soon"}])),
    ("config without value", _new("x", configs=[{"name": "retention.ms", "value": None}])),
)

TOPICS = (
    Call("CreateTopics", "the test's", _new(T, num_partitions=2), low=7),
    *(Call("CreateTopics", case, fields) for case, fields in _CREATE),
    Call("Metadata", "one topic", {"topics": [{"name": T}]}, low=10, keep=_keep_id),
    Call("Metadata", "one topic", {"topics": [{"name": T}]}),
    Call("Metadata", "none", {"topics": []}, low=1),
    Call(
        "Metadata",
        "with operations",
        {
            "topics": [{"name": T}, {"name": "nope"}],
            "include_cluster_authorized_operations": True,
            "include_topic_authorized_operations": True,
            "allow_auto_topic_creation": False,
        },
        low=8,
    ),
    Call("Metadata", "unknown", {"topics": [{"name": "nope"}]}),
    Call("Metadata", "bad name", {"topics": [{"name": "a b"}]}),
    Call("Metadata", "no name", {"topics": [{"name": ""}]}),
    Call("Metadata", "255 bytes", {"topics": [{"name": LONG[255]}]}),
    Call("Metadata", "twice", {"topics": [{"name": T}, {"name": T}]}),
    Call("Metadata", "by id", {"topics": [{"name": None, "topic_id": _topic_id}]}, low=12),
    Call("Metadata", "by id, no name", {"topics": [{"name": "", "topic_id": _topic_id}]}, low=12),
    Call("Metadata", "by unknown id", {"topics": [{"name": None, "topic_id": NOBODY}]}, low=12),
    Call("Metadata", "neither", {"topics": [{"name": None}]}, low=10),
    Call(
        "DescribeTopicPartitions",
        "one",
        {"topics": [{"name": T}], "response_partition_limit": 10, "cursor": None},
    ),
    Call(
        "DescribeTopicPartitions",
        "limited",
        {"topics": [{"name": T}, {"name": "new-2"}], "response_partition_limit": 1, "cursor": None},
    ),
    Call(
        "DescribeTopicPartitions",
        "from a cursor",
        {
            "topics": [{"name": T}],
            "response_partition_limit": 10,
            "cursor": {"topic_name": T, "partition_index": 1},
        },
    ),
    *(
        Call(
            "DescribeTopicPartitions",
            case,
            {
                "topics": [{"name": name} for name in names],
                "response_partition_limit": limit,
                "cursor": cursor,
            },
        )
        for case, names, limit, cursor in (
            ("all", (), 100, None),
            ("all from a cursor", (), 100, {"topic_name": "new-3", "partition_index": 1}),
            ("unknown", ("nope", T), 10, None),
            ("limit 0", (T,), 0, None),
            ("limit -1", (T,), -1, None),
            ("another cursor", (T,), 10, {"topic_name": "a", "partition_index": 0}),
            ("cursor -1", (T,), 10, {"topic_name": T, "partition_index": -1}),
            ("cursor past the end", (T,), 10, {"topic_name": T, "partition_index": 7}),
            ("bad name", ("a b",), 10, None),
            ("255 bytes", (LONG[255],), 10, None),
            ("twice", (T, T), 10, None),
        )
    ),
    *(
        Call("DescribeCluster", f"endpoint {kind}", {"endpoint_type": kind}, low=1)
        for kind in (1, 2, 3)
    ),
    Call("DescribeCluster", "with operations", {"include_cluster_authorized_operations": True}),
    Call("DescribeCluster", "fenced too", {"include_fenced_brokers": True}, low=2),
)


def _grown(name: str, count: int, assignments: Any = None, **more: Any) -> dict[str, Any]:
    topic = {"name": name, "count": count, "assignments": assignments}
    return {"topics": [topic], "timeout_ms": 10_000, "validate_only": False, **more}


GROWTH = (
    Call("CreatePartitions", "more", _grown("new-{v2}", 3)),
    Call("CreatePartitions", "as many", _grown(T, 2)),
    Call("CreatePartitions", "fewer", _grown(T, 1)),
    Call("CreatePartitions", "none", _grown(T, 0)),
    Call("CreatePartitions", "-1", _grown(T, -1)),
    Call("CreatePartitions", "unknown", _grown("nope", 3)),
    Call("CreatePartitions", "only looked at", _grown(T, 3, validate_only=True)),
    Call("CreatePartitions", "assigned to nobody", _grown(T, 3, [{"broker_ids": [9]}])),
    Call("CreatePartitions", "too few assigned", _grown(T, 4, [{"broker_ids": [1]}])),
    Call("CreatePartitions", "none assigned", _grown(T, 3, [])),
    Call(
        "CreatePartitions",
        "twice",
        {"topics": _grown(T, 3)["topics"] * 2, "timeout_ms": 10_000, "validate_only": True},
    ),
    Call("DeleteTopics", "there", {"topic_names": ["defaults-{v1}"], "timeout_ms": 5000}, high=5),
    Call("DeleteTopics", "there", {"topics": [{"name": "defaults-7"}], "timeout_ms": 5000}, low=6),
    Call("DeleteTopics", "unknown", {"topic_names": ["nope"], "timeout_ms": 5000}, high=5),
    *(
        Call("DeleteTopics", case, {"topics": topics, "timeout_ms": 5000}, low=6)
        for case, topics in (
            ("unknown", [{"name": "nope"}]),
            ("unknown id", [{"name": None, "topic_id": NOBODY}]),
            ("neither", [{"name": None}]),
            ("both", [{"name": "new-2", "topic_id": NOBODY}]),
            ("twice", [{"name": "nope"}, {"name": "nope"}]),
        )
    ),
)


def _produced(topic: str, partition: int, data: bytes | None, acks: int = 1) -> dict[str, Any]:
    rows = [{"index": partition, "records": data}]
    known = _topic_id if topic == T else NOBODY  # for versions that name topics so
    return {
        "acks": acks,
        "timeout_ms": 5000,
        "topic_data": [{"name": topic, "topic_id": known, "partition_data": rows}],
    }


FIVE = records([b"%d" % i for i in range(5)])
DATA = (
    Call("Produce", "five records", _produced(T, 0, FIVE), low=3),
    Call("Produce", "acks 2", _produced(T, 0, FIVE, 2), low=3),
    Call("Produce", "unknown topic", _produced("nope", 0, FIVE), low=3),
    Call("Produce", "255 bytes", _produced(LONG[255], 0, FIVE), low=3),
    Call("Produce", "unknown partition", _produced(T, 9, FIVE), low=3),
    Call("Produce", "partition -1", _produced(T, -1, FIVE), low=3),
    Call("Produce", "bad CRC", _produced(T, 0, records([b"x"], damage=True)), low=3),
    Call("Produce", "cut off", _produced(T, 0, FIVE[:-3]), low=3),
    Call("Produce", "no topics", {"acks": 1, "timeout_ms": 1000, "topic_data": []}, low=3),
)


def _fetched(topic: str, partition: int, offset: int, **more: Any) -> dict[str, Any]:
    row = {
        "partition": partition,
        "fetch_offset": offset,
        "current_leader_epoch": -1,
        "last_fetched_epoch": -1,
        "log_start_offset": -1,
        "partition_max_bytes": 1 << 20,
    }
    row.update({k: more.pop(k) for k in list(more) if k in row})
    return {
        "replica_id": -1,
        "max_wait_ms": 1,
        "min_bytes": 0,
        "max_bytes": 1 << 20,
        "isolation_level": 0,
        "session_id": 0,
        "session_epoch": -1,
        "topics": [{"topic": topic, "partitions": [row]}],
        "forgotten_topics_data": [],
        "rack_id": "",
        **more,
    }


def _asked(topic: str, partition: int, timestamp: int, **more: Any) -> dict[str, Any]:
    row = {
        "partition_index": partition,
        "current_leader_epoch": more.pop("epoch", -1),
        "timestamp": timestamp,
    }
    return {
        "replica_id": -1,
        "isolation_level": 0,
        "topics": [{"name": topic, "partitions": [row]}],
        **more,
    }


def _epoch(topic: str, partition: int, current: int, epoch: int) -> dict[str, Any]:
    row = {"partition": partition, "current_leader_epoch": current, "leader_epoch": epoch}
    return {"replica_id": -1, "topics": [{"topic": topic, "partitions": [row]}]}


def _deleted(topic: str, partition: int, offset: int) -> dict[str, Any]:
    topics = one(topic, "partitions", partition_index=partition, offset=offset)
    return {"topics": topics, "timeout_ms": 5000}


READS = (
    *(
        Call("Fetch", case, fields, high=12)
        for case, fields in (
            ("at the start", _fetched(T, 0, 0)),
            ("past the end", _fetched(T, 0, 10_000)),
            ("offset -1", _fetched(T, 0, -1)),
            ("unknown topic", _fetched("nope", 0, 0)),
            ("unknown partition", _fetched(T, 9, 0)),
        )
    ),
    Call("Fetch", "old epoch", _fetched(T, 0, 0, current_leader_epoch=99), low=9, high=12),
    Call("Fetch", "unknown session", _fetched(T, 0, 0, session_id=77, session_epoch=5), 7, 12),
    Call("Fetch", "sessionless by epoch", _fetched(T, 0, 0, session_id=-1), low=7, high=12),
    *(
        Call("ListOffsets", case, _asked(T, 0, at), low=low)
        for case, at, low in (
            ("latest", -1, 1),
            ("earliest", -2, 1),
            ("largest time", -3, 7),
            ("earliest local", -4, 8),
            ("latest tiered", -5, 9),
            ("-6", -6, 1),
            ("-3 too early", -3, 1),
            ("time 0", 0, 1),
            ("a time", 1_700_000_000_002, 1),
            ("a late time", 4_000_000_000_000, 1),
        )
    ),
    Call("ListOffsets", "committed", _asked(T, 0, -1, isolation_level=1), low=2),
    Call("ListOffsets", "isolation 7", _asked(T, 0, -1, isolation_level=7), low=2),
    Call("ListOffsets", "unknown topic", _asked("nope", 0, -1)),
    Call("ListOffsets", "unknown partition", _asked(T, 9, -1)),
    Call("ListOffsets", "epoch of the future", _asked(T, 0, -1, epoch=99), low=4),
    Call("ListOffsets", "this epoch", _asked(T, 0, -1, epoch=0), low=4),
    Call(
        "ListOffsets",
        "twice",
        {**_asked(T, 0, -1), "topics": _asked(T, 0, -1)["topics"] * 2},
    ),
    *(
        Call("OffsetForLeaderEpoch", case, _epoch(*what))
        for case, what in (
            ("this epoch", (T, 0, -1, 0)),
            ("of the future", (T, 0, -1, 99)),
            ("epoch -1", (T, 0, -1, -1)),
            ("believed in the future", (T, 0, 99, 0)),
            ("unknown topic", ("nope", 0, -1, 0)),
            ("unknown partition", (T, 9, -1, 0)),
        )
    ),
    *(
        Call("DeleteRecords", case, _deleted(*what))
        for case, what in (
            ("first one", (T, 0, 1)),
            ("past the end", (T, 0, 10_000)),
            ("offset -2", (T, 0, -2)),
            ("unknown topic", ("nope", 0, 0)),
            ("unknown partition", (T, 9, 0)),
        )
    ),
)


def _join(group: str, member: str = "", timeout: int = 10_000, kind: str = "consumer") -> Any:
    return {
        "group_id": group,
        "session_timeout_ms": timeout,
        "rebalance_timeout_ms": timeout,
        "member_id": member,
        "protocol_type": kind,
        "protocols": [{"name": "range", "metadata": b""}],
    }


def _committed(group: str, topic: str = T, partition: int = 0, **more: Any) -> dict[str, Any]:
    row = {"partition_index": partition, "committed_offset": 3, "committed_metadata": "m"}
    row.update({k: more.pop(k) for k in list(more) if k in row})
    return {
        "group_id": group,
        "generation_id_or_member_epoch": -1,
        "member_id": "",
        "topics": [{"name": topic, "partitions": [row]}],
        **more,
    }


def _wanted(group: str, topics: Any, member_epoch: int = -1) -> dict[str, Any]:
    """OffsetFetch, in both of its forms."""
    row = {"group_id": group, "member_id": None, "member_epoch": member_epoch, "topics": topics}
    return {"group_id": group, "topics": topics, "groups": [row]}


GROUPS = (
    *(
        Call(
            "FindCoordinator", case, {"key": key, "key_type": kind, "coordinator_keys": [key]}, low
        )
        for case, key, kind, low in (
            ("of a group", "g", 0, 0),
            ("of no name", "", 0, 0),
            ("type 7", "g", 7, 1),
        )
    ),
    Call("OffsetCommit", "alone", _committed("g-{v}")),
    Call("OffsetCommit", "unknown topic", _committed("g-{v}", "nope")),
    Call("OffsetCommit", "unknown partition", _committed("g-{v}", T, 9)),
    Call("OffsetCommit", "offset -1", _committed("g-{v}", committed_offset=-1)),
    Call("OffsetCommit", "no name", _committed("")),
    Call("OffsetCommit", "long metadata", _committed("g-{v}", committed_metadata="x" * 5000)),
    Call(
        "OffsetCommit",
        "a generation of none",
        _committed("g-{v}", generation_id_or_member_epoch=3, member_id="m"),
    ),
    Call(
        "OffsetCommit",
        "a generation of a new group",
        _committed("fresh-{v}", generation_id_or_member_epoch=3, member_id="m"),
    ),
    *(
        Call("OffsetFetch", case, _wanted(group, topics), low)
        for case, group, topics, low in (
            ("committed", "g-9", [{"name": T, "partition_indexes": [0, 1]}], 1),
            ("all", "g-9", None, 2),
            ("unknown topic", "g-9", [{"name": "nope", "partition_indexes": [0]}], 1),
            ("unknown group", "nobody", [{"name": T, "partition_indexes": [0]}], 1),
            ("all of an unknown group", "nobody", None, 2),
            ("no name", "", [{"name": T, "partition_indexes": [0]}], 1),
        )
    ),
    Call("JoinGroup", "short session", _join("j-{v}", timeout=1)),
    Call("JoinGroup", "long session", _join("j-{v}", timeout=1 << 30)),
    Call("JoinGroup", "no name", _join("")),
    Call("JoinGroup", "unknown member", _join("j-{v}", "m")),
    Call("JoinGroup", "no type", _join("j-{v}", kind="")),
    Call("JoinGroup", "no protocols", {**_join("j-{v}"), "protocols": []}),
    Call("JoinGroup", "first try", _join("join-{v}"), low=4),
    Call("JoinGroup", "joins at once", _join("joined-{v}"), high=3, keep=_keep_member),
    Call("DescribeGroups", "member that syncs", {"groups": ["joined-3"]}, after_s=0.5),
    Call("DeleteGroups", "with a member", {"groups_names": ["joined-3"]}),
    *(
        Call(api, case, {"group_id": group, "generation_id": 1, "member_id": "m", **more})
        for case, group in (
            ("unknown group", "nobody"),
            ("unknown member", "joined-3"),
            ("no name", ""),
        )
        for api, more in (
            ("Heartbeat", {}),
            ("SyncGroup", {"protocol_type": "consumer", "protocol_name": "range"}),
        )
    ),
    *(
        Call(
            "LeaveGroup",
            case,
            {"group_id": group, "member_id": "m", "members": [{"member_id": "m"}]},
        )
        for case, group in (
            ("unknown group", "nobody"),
            ("unknown member", "joined-3"),
            ("no name", ""),
        )
    ),
    Call("ListGroups", "all", {}),
    Call("ListGroups", "by state", {"states_filter": ["Empty"]}, low=4),
    Call("ListGroups", "by no state", {"states_filter": ["Nonsense"]}, low=4),
    Call("ListGroups", "by type", {"types_filter": ["classic"]}, low=5),
    Call("ListGroups", "by no type", {"types_filter": ["nonsense"]}, low=5),
    Call("DescribeGroups", "empty", {"groups": ["g-9"]}),
    Call("DescribeGroups", "unknown", {"groups": ["nobody"]}),
    Call("DescribeGroups", "no name", {"groups": [""]}),
    Call(
        "DescribeGroups",
        "with operations",
        {"groups": ["g-9", "nobody"], "include_authorized_operations": True},
        low=3,
    ),
    *(
        Call("OffsetDelete", case, {"group_id": group, "topics": one(topic, "partitions", **row)})
        for case, group, topic, row in (
            ("committed", "g-8", T, {"partition_index": 0}),
            ("unknown topic", "g-8", "nope", {"partition_index": 0}),
            ("unknown partition", "g-8", T, {"partition_index": 9}),
            ("unknown group", "nobody", T, {"partition_index": 0}),
            ("no name", "", T, {"partition_index": 0}),
        )
    ),
    Call("DeleteGroups", "empty", {"groups_names": ["g-{v2}"]}),
    Call("DeleteGroups", "unknown", {"groups_names": ["nobody"]}),
    Call("DeleteGroups", "no name", {"groups_names": [""]}),
    Call("DeleteGroups", "twice", {"groups_names": ["nobody", "nobody"]}),
)
