"""Brokers that stop while something of replication does not end: every queue pair is closed all the
same, and the broker ends without an error."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

import kdirect
from kdirect.broker.followed_head import FollowedHead
from kdirect.broker.push_links import LinkToFollower, LinkToLeader
from kdirect.format import protocol as p
from tests.support import wait_until

TP = kdirect.TopicPartition("t", 0)
Brokers = Callable[..., list[Any]]


def make_topic(broker: kdirect.Broker) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers, "log_level": 0})
    admin.create_topics([NewTopic(TP.topic, 1, 2)])[TP.topic].result(30)


def push_of(broker: kdirect.Broker) -> Any:
    return broker.server.member.replicas.push


def in_their_roles(ours: list[Any]) -> tuple[kdirect.Broker, kdirect.Broker]:
    """The leader and the follower, which is pushed to."""

    def pushed_here(broker: Any) -> bool:
        return bool(push_of(broker).statistics()["replicas_pushed_here"])

    wait_until(lambda: any(map(pushed_here, ours)), "the leader wrote into the follower's file")
    leader, follower = sorted(ours, key=pushed_here)
    return leader, follower


def mapped(directory: Path) -> list[str]:
    """The files below it that this process maps."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [line.split()[-1] for line in maps if str(directory) in line]


def keys_stay(monkeypatch: pytest.MonkeyPatch, broker: kdirect.Broker) -> threading.Event:
    """The leader's access to what this broker follows does not end, as where no file can be made
    for the head to go on in; set when that was tried."""
    mine, tried, end = broker.server.logs, threading.Event(), FollowedHead.end

    def failing(head: FollowedHead) -> bool:
        if mine.partitions.get(head.partition.topic_partition) is not head.partition:
            return end(head)
        tried.set()
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))  # the directory is not to blame

    monkeypatch.setattr(FollowedHead, "end", failing)
    return tried


def test_a_replica_that_cannot_be_fenced(brokers: Brokers, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = brokers(2)
    make_topic(ours[0])
    leader, follower = in_their_roles(ours)
    tried = keys_stay(monkeypatch, follower)
    leader.stop()  # the follower is to lead, and fences first
    assert tried.wait(30)
    (directory,) = follower.log_dirs
    assert mapped(directory)
    follower.stop()
    assert not mapped(directory), "what the leader was granted is let go, too"


def test_a_replica_that_cannot_be_fenced_in_a_directory_that_fails(
    brokers: Brokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = brokers(2)
    make_topic(ours[0])
    leader, follower = in_their_roles(ours)
    tried = keys_stay(monkeypatch, follower)
    leader.stop()
    assert tried.wait(30)
    server = follower.server
    ended = threading.Event()

    async def fail() -> None:
        await server.member.directory_failed([TP])
        ended.set()

    server._loop.call_soon_threadsafe(lambda: server._loop.create_task(fail()))
    assert ended.wait(10), "the replica was not let go"
    follower.stop()


def test_a_link_whose_leader_does_not_answer(
    brokers: Brokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = brokers(2)
    asked = threading.Event()
    for broker in ours:
        call = push_of(broker)._peers.call

        async def silent(node: int, message: Any, call: Any = call, **options: Any) -> Any:
            if message.API_KEY != p.OpenPushLinkRequest.API_KEY:
                return await call(node, message, **options)
            asked.set()
            await asyncio.get_running_loop().create_future()

        monkeypatch.setattr(push_of(broker)._peers, "call", silent)
    make_topic(ours[0])
    assert asked.wait(30)
    for broker in ours:
        broker.stop()


def test_a_link_that_is_made_while_the_leader_stops(
    brokers: Brokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = brokers(2)
    began, go, made = threading.Event(), threading.Event(), threading.Event()
    for broker in ours:
        late_links(monkeypatch, broker, began, go, made)
    make_topic(ours[0])
    assert began.wait(30)
    for broker in ours:
        broker.stop()


def late_links(
    monkeypatch: pytest.MonkeyPatch,
    broker: Any,
    began: threading.Event,
    go: threading.Event,
    made: threading.Event,
) -> None:
    """What makes an end of a link stands still until the links are to be closed."""
    server, links = broker.server, broker.server.access.links
    read, close, mine = server.files.read, links.close, threading.Event()

    def late(work: Callable[..., Any], *arguments: Any) -> Any:
        began.set()
        mine.set()
        try:
            assert go.wait(30)
            return work(*arguments)
        finally:
            made.set()

    async def read_late(work: Any, *arguments: Any) -> Any:
        kinds = (LinkToFollower, LinkToLeader)
        if isinstance(work, partial) and any(x in kinds for x in (work.func, *work.args)):
            work = partial(late, work)
        return await read(work, *arguments)

    def close_before() -> None:
        close()
        go.set()
        assert not mine.is_set() or made.wait(30)

    monkeypatch.setattr(server.files, "read", read_late)
    monkeypatch.setattr(links, "close", close_before)
