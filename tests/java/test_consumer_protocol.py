"""Groups of KIP-848 with Kafka's own client and tool, and with members of both kinds."""

from __future__ import annotations

import re
import time

import pytest

import kdirect

TOOL = "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand"


def poll_until(java, consumers, done, seconds=60):
    values = []
    end = time.monotonic() + seconds
    while not done(values):
        assert time.monotonic() < end, [str(c.assignment()) for c in consumers]
        for c in consumers:
            values += [record.value() for record in java.poll(c)]
    return values


def test_java_members_and_the_tool(broker, java, tool):
    """Two members, the second one with an expression that the broker evaluates (client 4.1)."""
    with kdirect.connect(broker.bootstrap_servers) as session:
        session.admin.create_topic("j", 4)
        with session.producer() as producer:
            for i in range(40):
                producer.produce("j", b"%d" % i, partition=i % 4)
            producer.flush()
    settings = {"group_id": "g", "group_protocol": "consumer", "enable_auto_commit": "false"}
    a = java.consumer(broker.bootstrap_servers, **settings)
    b = java.consumer(broker.bootstrap_servers, **settings, group_remote_assignor="range")
    try:
        a.subscribe(["j"])
        read = poll_until(java, [a], lambda values: len(values) == 40)
        assert sorted(map(int, read)) == list(range(40))
        a.commitSync()
        subscription = getattr(java.kafka.clients.consumer, "SubscriptionPattern", None)
        if callable(subscription):  # clients since 4.0
            b.subscribe(subscription("j+"))
        else:
            b.subscribe(["j"])

        def both(_):
            return a.assignment().size() == b.assignment().size() == 2

        assert not poll_until(java, [a, b], both)
        group = broker.server.groups.consumer.groups["g"]
        assert {m.classic for m in group.members.values()} == {None}
        described = tool(TOOL, "--describe", "--group", "g", "--members", "--verbose")
        assert len(re.findall(r"^g\s", described, re.MULTILINE)) == 2, described
        state = tool(TOOL, "--describe", "--group", "g", "--state")
        assert re.search(r"(uniform|range)\s+Stable", state), state
        assert "Consumer" in tool(TOOL, "--list", "--type")
    finally:
        for consumer in (a, b):
            consumer.close()
    assert group.state() == "Empty"
    assert "successful" in tool(TOOL, "--delete", "--group", "g")


@pytest.mark.parametrize("assignor", ["uniform", "range"])
def test_java_members_beside_ours(java, assignor):
    """Ours subscribes by an expression, and commits by WRITEs; Java's reads on what it leaves."""
    options = {
        "group_consumer_heartbeat_interval_ms": 100,
        "group_consumer_session_timeout_ms": 6000,
    }
    with kdirect.Broker(**options) as broker, kdirect.connect(broker.bootstrap_servers) as session:
        session.admin.create_topic("j", 6)
        producer = session.producer()

        def fill(first):
            for i in range(first, first + 60):
                producer.produce("j", b"%d" % i, partition=i % 6)
            producer.flush()

        fill(0)
        theirs = java.consumer(
            broker.bootstrap_servers, group_id="g", group_protocol="consumer",
            group_remote_assignor=assignor, enable_auto_commit="false",
        )  # fmt: skip
        ours = kdirect.Consumer(
            {
                "bootstrap.servers": broker.bootstrap_servers,
                "transport": "shm",
                "group.id": "g",
                "group.protocol": "consumer",
                "group.remote.assignor": assignor,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
            }
        )
        read = {"ours": [], "theirs": []}
        is_there = True

        def look(done, seconds=30):
            end = time.monotonic() + seconds
            while not done():
                assert time.monotonic() < end, (ours.assignment(), str(theirs.assignment()))
                read["theirs"] += [int(record.value()) for record in java.poll(theirs)]
                found = ours.consume(100, 0.05) if is_there else []
                read["ours"] += [int(m.value()) for m in found if not m.error()]

        def numbers():
            return {tp.partition() for tp in java.list(theirs.assignment())}

        try:
            pattern = getattr(java.kafka.clients.consumer, "SubscriptionPattern", None)
            theirs.subscribe(pattern("^j$") if callable(pattern) else ["j"])
            look(lambda: len(read["theirs"]) == 60)
            theirs.commitSync()
            ours.subscribe(["^j"])
            look(lambda: len(ours.assignment()) == 3 and len(numbers()) == 3)
            mine = {tp.partition for tp in ours.assignment()}
            assert mine | numbers() == set(range(6))
            group = broker.server.groups.consumer.groups["g"]
            assert {m.assignor for m in group.members.values()} == {assignor}
            assert read["ours"] == [], "what was committed is not read again"
            fill(60)
            look(lambda: len(read["ours"]) == 30 and len(read["theirs"]) == 90)
            assert {i % 6 for i in read["ours"]} == mine
            for _ in range(3):
                ours.commit(offsets=dict.fromkeys(ours.assignment(), 20), asynchronous=False)
            assert broker.statistics()["rdma_offset_commits"] > 0
            ours.close()
            is_there = False
            fill(120)
            look(lambda: len(read["theirs"]) == 150, seconds=60)
            assert sorted(read["theirs"] + read["ours"]) == list(range(180))
        finally:
            ours.close()
            theirs.close()
            producer.close()
