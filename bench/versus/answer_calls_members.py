"""What is asked of both brokers by members of the groups of KIP-848, and about them.

Owns: the calls of one member, from joining to leaving, and of those that are refused.  The topic is
that of `versus.answer_calls`, whose calls come before."""

from __future__ import annotations

import struct
from typing import Any

from versus.answer_calls import Call, T, Told

MEMBER = "member-of-the-test"


def _beat(group: str = "new-{v}", member: str = MEMBER, epoch: Any = 0, **more: Any) -> Any:
    """ConsumerGroupHeartbeat; that which joins says everything."""
    whole = {"rebalance_timeout_ms": 60_000, "subscribed_topic_names": [T], "topic_partitions": []}
    kept = {"rebalance_timeout_ms": -1, "subscribed_topic_names": None, "topic_partitions": None}
    said = whole if epoch == 0 else kept
    return {"group_id": group, "member_id": member, "member_epoch": epoch, **said, **more}


def _keep_epoch(answer: Any, told: Told) -> None:
    told["member_epoch"] = answer.member_epoch


def _epoch(told: Told) -> Any:
    return told["member_epoch"]


# A member's subscription to the topic of the test: version 0, one topic, no data of its own.
_RANGE = struct.pack(">hih1si", 0, 1, len(T), T.encode(), -1)


def _classic(subscription: bytes) -> dict[str, Any]:
    """JoinGroup of the group that the test's member is in."""
    return {
        "group_id": "cg",
        "session_timeout_ms": 10_000,
        "rebalance_timeout_ms": 10_000,
        "member_id": "",
        "protocol_type": "consumer",
        "protocols": [{"name": "range", "metadata": subscription}],
    }


def _described(*groups: str, **more: Any) -> dict[str, Any]:
    return {"group_ids": list(groups), **more}


_JOINS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("joins", _beat()),
    ("no group", _beat("")),
    ("no topics", _beat("x", subscribed_topic_names=None)),
    ("an empty list of topics", _beat("empty-{v}", subscribed_topic_names=[])),
    ("no partitions", _beat("x", topic_partitions=None)),
    ("no time to rebalance", _beat("x", rebalance_timeout_ms=-1)),
    ("partitions as it joins", _beat("x", topic_partitions=[
        {"topic_id": lambda told: told["topic_id"], "partitions": [0]}])),
    ("an assignor that there is not", _beat("x", server_assignor="nonsense")),
    ("an assignor", _beat("assigned-{v}", server_assignor="range")),
    ("an instance of no name", _beat("x", instance_id="")),
    ("an instance", _beat("static-{v}", instance_id="i")),
    ("a rack of no name", _beat("x", rack_id="")),
    ("an unknown topic", _beat("unknown-{v}", subscribed_topic_names=["nope"])),
    ("unknown member", _beat("new-{v}", "nobody", 3)),
    ("unknown group", _beat("nowhere", MEMBER, 3)),
    ("leaves an unknown group", _beat("nowhere", MEMBER, -1)),
    ("leaves, unknown", _beat("new-{v}", "nobody", -1)),
    ("epoch -3", _beat("new-{v}", MEMBER, -3)),
    ("a classic group", _beat("joined-3")),
    ("an epoch of the future", _beat("new-{v}", MEMBER, 99)),
    ("joins again", _beat()),
)  # fmt: skip

MEMBERS = (
    *(Call("ConsumerGroupHeartbeat", case, fields) for case, fields in _JOINS),
    Call("ConsumerGroupHeartbeat", "no member", _beat("anonymous-{v}", "")),
    *(
        Call("ConsumerGroupHeartbeat", case, _beat("x", subscribed_topic_regex=regex, **more), 1)
        for case, regex, more in (
            ("a bad expression", "(", {"subscribed_topic_names": None}),
            ("no expression", "", {"subscribed_topic_names": None}),
        )
    ),
    Call("ConsumerGroupHeartbeat", "the test's", _beat("cg"), 1, 1, keep=_keep_epoch),
    Call("ConsumerGroupHeartbeat", "stays", _beat("cg", MEMBER, _epoch)),
    Call("ConsumerGroupHeartbeat", "joins from nowhere", _beat("cg", "other", 7)),
    *(
        Call(
            "OffsetCommit",
            f"of a member, {case}",
            {
                "group_id": "cg",
                "generation_id_or_member_epoch": epoch,
                "member_id": member,
                "topics": [
                    {
                        "name": T,
                        "topic_id": lambda told: told["topic_id"],
                        "partitions": [
                            {
                                "partition_index": 0,
                                "committed_offset": 1,
                                "committed_metadata": "",
                            }
                        ],
                    }
                ],
            },
            low=low,
        )
        for case, member, epoch, low in (
            ("known", MEMBER, _epoch, 1),
            ("unknown", "nobody", _epoch, 1),
            ("an epoch of the future", MEMBER, 99, 1),
            ("no epoch", MEMBER, -1, 1),
            ("none", "", -1, 1),
        )
    ),
    *(
        Call(
            "OffsetFetch",
            f"of a member, {case}",
            {
                "groups": [
                    {
                        "group_id": "cg",
                        "member_id": member,
                        "member_epoch": epoch,
                        "topics": [{"name": T, "partition_indexes": [0]}],
                    }
                ]
            },
            9,
            9,
        )
        for case, member, epoch in (
            ("known", MEMBER, _epoch),
            ("unknown", "nobody", _epoch),
            ("an epoch of the future", MEMBER, 99),
            ("no epoch", MEMBER, -1),
        )
    ),
    *(
        Call("ConsumerGroupDescribe", case, fields)
        for case, fields in (
            ("there", _described("cg")),
            ("with operations", _described("cg", include_authorized_operations=True)),
            ("unknown", _described("nobody")),
            ("no name", _described("")),
            ("classic", _described("joined-3")),
            ("twice", _described("cg", "cg")),
            ("nothing", _described()),
        )
    ),
    Call("DescribeGroups", "of the new protocol", {"groups": ["cg"]}),
    Call("ListGroups", "by the new type", {"types_filter": ["Consumer"]}, 5),
    Call("ListGroups", "by state and type", {"states_filter": ["stable"],
                                             "types_filter": ["consumer"]}, 5),
    Call("DeleteGroups", "of the new protocol", {"groups_names": ["cg"]}),
    Call(
        "OffsetDelete",
        "of the new protocol",
        {"group_id": "cg", "topics": [{"name": T, "partitions": [{"partition_index": 0}]}]},
    ),
    Call("JoinGroup", "a group of the new protocol", _classic(_RANGE), 4),
    Call("JoinGroup", "a subscription that cannot be read", _classic(b"")),
    Call("ConsumerGroupHeartbeat", "leaves", _beat("cg", MEMBER, -1)),
    Call("ConsumerGroupDescribe", "empty", _described("cg")),
    Call("DeleteGroups", "empty, of the new protocol", {"groups_names": ["cg"]}),
)  # fmt: skip
