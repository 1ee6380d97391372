"""Answers that tell of brokers and of leaders tell them as they were at one time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from kdirect.broker.handlers_cluster import ClusterHandlers
from kdirect.broker.member_view import MemberView
from kdirect.cluster.election import Partition as Picture
from kdirect.cluster.image import Image, Topic
from kdirect.cluster.partition_state import PartitionState
from kdirect.cluster.records import BrokerRegistration, Endpoint, TopicAssignment
from kdirect.format import protocol as p
from kdirect.format.schema import build
from kdirect.member.metadata import LiveNode, Metadata


def picture(*live: int) -> Metadata:
    """The last of the brokers that live leads the only partition, and is the controller."""
    nodes = {
        n: LiveNode(n, BrokerRegistration((Endpoint("INSIDE", "h", 9090 + n),), {}), n, 0)
        for n in live
    }
    partition = Picture((1, 2, 3), state=PartitionState(live[-1], live[-1], live, 1))
    topics = {"t": Topic(TopicAssignment(None, ((1, 2, 3),)), (partition,), {})}
    return Metadata("c" * 22, 1, 1, live[-1], nodes, Image(1, 1, topics=topics), 1)


def handlers() -> ClusterHandlers:
    """Each question to the membership is answered from a newer picture than the one before."""
    pictures = iter([picture(1, 2), *[picture(1, 3)] * 100])
    view = MemberView(
        1,
        cluster_id=lambda: "c" * 22,
        metadata=lambda: next(pictures),
        default_listener="INSIDE",
    )
    topic = SimpleNamespace(
        name="t", topic_id=None, internal=False, deleting=False, partition_count=1
    )
    services = SimpleNamespace(
        config=SimpleNamespace(listeners=[SimpleNamespace(name="INSIDE")]),
        cluster=view,
        topics=SimpleNamespace(all_topics=lambda: [topic]),
        files=None,
        listeners=SimpleNamespace(address_for=lambda listener, host: ("h", 9091)),
    )
    unused = cast(Any, None)
    return ClusterHandlers(cast(Any, services), config_rows=unused, delete_topic=unused)


def answer(message: Any, version: int) -> Any:
    connection: Any = SimpleNamespace(listener=0, local=("h", 9091))
    api = p.APIS[message.API_KEY]
    header: Any = SimpleNamespace(api=api, api_key=api.key, api_version=version)
    ours = handlers()
    of = {p.MetadataRequest: ours.metadata, p.DescribeClusterRequest: ours.describe_cluster}
    answered = of[type(message)](connection, header, message)
    assert answered.buffers is not None
    body = b"".join(map(bytes, answered.buffers))
    head = p.response_header(header.api, version, 1)
    return p.decode_response(message.API_KEY, version, bytes(head) + body)[1]


def test_metadata_names_no_leader_that_is_none_of_its_brokers() -> None:
    request = build(p.MetadataRequest, topics=None, allow_auto_topic_creation=False)
    told = answer(request, 12)
    brokers = [broker.node_id for broker in told.brokers]
    assert (brokers, told.controller_id) == ([1, 2], 2)
    assert told.topics[0].partitions[0].leader_id == 2


def test_describe_cluster_names_no_controller_that_is_none_of_its_brokers() -> None:
    request = build(p.DescribeClusterRequest, include_cluster_authorized_operations=False)
    told = answer(request, 0)
    assert [broker.broker_id for broker in told.brokers] == [1, 2]
    assert told.controller_id == 2
