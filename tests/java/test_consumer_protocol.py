"""Groups of KIP-848 with Kafka's own client and tool."""

from __future__ import annotations

import re
import time

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
