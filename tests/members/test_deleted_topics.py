"""Producers that wait for replicas when their topic is deleted."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

import pytest

import kdirect
from kdirect.errors import DeliveryError, UnknownTopicError
from tests.client.test_deleted_topics import PATHS
from tests.members.wire import create
from tests.support import wait_until


class At:
    """A broker of a cluster, for requests to it alone."""

    def __init__(self, cluster: kdirect.Cluster, node_id: int) -> None:
        self.bootstrap_servers = cluster.address(node_id)


@pytest.mark.timeout(120)
def test_producers_hear_alike_that_their_topic_is_deleted(
    cluster: Callable[..., kdirect.Cluster],
) -> None:
    """The follower has stopped, so acks=all waits: over TCP and RDMA it ends in the same way."""
    ours = cluster(3)
    failed: dict[str, list[Any]] = {path: [] for path in PATHS}
    with ExitStack() as stack:
        servers = {"bootstrap.servers": ours.bootstrap_servers}
        session = stack.enter_context(kdirect.connect(servers))
        leader = session.admin.describe_cluster().controller
        follower = next(n for n in ours.node_ids if n != leader)
        at = At(ours, leader)
        producers = {}
        for path, settings in PATHS.items():
            assert create(at, path, assignment={0: (leader, follower)}).error_code == 0
            producer = kdirect.Producer(
                {"bootstrap.servers": at.bootstrap_servers, "acks": "all", **settings}
            )
            producers[path] = stack.enter_context(closing(producer))
            producer.produce(path, b"v", partition=0)
            assert producer.flush(30) == 0
            assert producer.statistics()["paths"] == {f"{path}-0": path}
        ours.pause(follower)
        try:
            for path, producer in producers.items():
                producer.produce(
                    path,
                    b"v",
                    partition=0,
                    on_delivery=lambda error, _, path=path: failed[path].append(error),
                )
            for path, producer in producers.items():
                assert producer.flush(0.2) == 1, path  # it waits for the follower
                session.admin.delete_topic(path)
            for path, producer in producers.items():
                wait_until(lambda p=producer, t=path: (p.poll(0), failed[t])[1], f"{path} heard")
        finally:
            ours.resume(follower)
    for path, (error,) in failed.items():
        assert isinstance(error, DeliveryError), path
        assert isinstance(error.__cause__, UnknownTopicError), path
