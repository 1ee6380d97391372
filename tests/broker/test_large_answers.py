"""Answers that the socket does not take at once: they are sent from where they lie, and whoever
reads slowly costs the broker no copies."""

from __future__ import annotations

import contextlib
import os
import resource
from typing import Any

import kdirect
from kdirect.format import protocol as p
from kdirect.format.batch import encode_single_bytes
from kdirect.format.schema import build
from kdirect.model import TopicPartition
from tests.broker.conftest import call_on_loop
from tests.support import wait_until

BATCH = encode_single_bytes(b"v" * 500_000)
COUNT = 40  # more than any socket takes


def fetch(max_bytes: int, *, wait_ms: int = 0) -> Any:
    """With `wait_ms`, for more than there is."""
    part = {"partition": 0, "current_leader_epoch": -1, "fetch_offset": 0,
            "partition_max_bytes": max_bytes, "log_start_offset": -1}  # fmt: skip
    return build(
        p.FetchRequest, replica_id=-1, max_wait_ms=wait_ms, max_bytes=max_bytes,
        min_bytes=1 << 30 if wait_ms else 1,
        isolation_level=0, session_id=0, session_epoch=-1,
        topics=[{"topic": "large", "partitions": [part]}], forgotten_topics_data=[], rack_id="",
    )  # fmt: skip


def filled(broker: kdirect.Broker) -> Any:
    """The log of a topic with records, and the segment that they lie in."""
    settings = {"bootstrap.servers": broker.bootstrap_servers, "transport": "tcp"}
    with kdirect.connect(settings) as session:
        session.admin.create_topic("large", 1)
    log = broker.server.logs.partitions[TopicPartition("large", 0)]
    for _ in range(COUNT):
        assert log.append(BATCH).error == 0
    return log, log.segments[-1]


def test_an_answer_is_sent_from_the_mapping(broker: kdirect.Broker, raw: Any) -> None:
    log, segment = filled(broker)
    references = segment._references
    client = raw()
    client.send(fetch(1 << 28), 11)
    (connection,) = wait_until(
        lambda: [c for c in list(broker.server._connections) if c._pending], "the socket is full"
    )
    assert segment._references > references  # the head and the answer have it
    assert connection._transport.get_write_buffer_size() == 0
    owed = call_on_loop(broker, lambda: sum(len(view) for view in connection._pending))
    assert owed > COUNT * len(BATCH) // 4
    # It is not read from meanwhile, and goes on afterwards.
    client.send(fetch(1), 11)
    records = client.receive().responses[0].partitions[0].records
    assert bytes(records) == b"".join(bytes(b) for b in log.read(0, 1 << 30))
    assert len(client.receive().responses[0].partitions[0].records) == len(BATCH)
    wait_until(lambda: segment._references == references, "the mapping is given back")
    assert not connection._pending and connection._writer < 0


def test_without_descriptors_a_reader_that_is_slow_is_let_go(
    broker: kdirect.Broker, raw: Any
) -> None:
    """It does not wait for ever for an answer that nobody goes on writing."""
    filled(broker)
    client = raw()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = []
    try:
        client.send(fetch(1 << 28, wait_ms=1000), 11)
        wait_until(lambda: len(broker.server.waiters), "the Fetch waits")
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, limits[1]))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        assert client.closed
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in taken:
            os.close(descriptor)
    assert raw().call(fetch(1), 11).responses[0].partitions[0].records, "others are served"


def test_a_reader_that_goes_away_leaves_no_mapping_behind(broker: kdirect.Broker, raw: Any) -> None:
    _, segment = filled(broker)
    references = segment._references
    client = raw()
    for _ in range(3):
        client.send(fetch(1 << 28), 11)
    wait_until(lambda: segment._references > references, "the answer is made")
    client.close()
    wait_until(lambda: segment._references == references, "the mapping is given back")
