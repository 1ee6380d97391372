"""Kafka's tools that produce, consume and measure, those of transactions, and the one that resets
an application of Streams."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

import kdirect

pytestmark = pytest.mark.slow
COUNT = 200


@pytest.fixture
def session(broker):
    with kdirect.connect(broker.bootstrap_servers) as made:
        made.admin.create_topic("t", 1)
        yield made


def events(told: str) -> dict[str, list[Any]]:
    """The lines of JSON of the tools that verify, by their names."""
    out: dict[str, list[Any]] = {}
    for line in told.splitlines():
        event = json.loads(line)
        out.setdefault(event["name"], []).append(event)
    return out


def test_the_tools_that_verify(session, tool):
    told = events(tool("VerifiableProducer", "--topic", "t", "--max-messages", str(COUNT)))
    (summary,) = told["tool_data"]
    assert (summary["sent"], summary["acked"]) == (COUNT, COUNT)
    sent = [(e["partition"], e["offset"], e["value"]) for e in told["producer_send_success"]]
    assert sent == [(0, i, str(i)) for i in range(COUNT)]
    arguments = ("--topic", "t", "--max-messages", str(COUNT), "--verbose")
    new = ("--group-id", "g", "--group-protocol", "consumer")
    told = events(tool("VerifiableConsumer", *new, *arguments))
    read = [(e["partition"], e["offset"], e["value"]) for e in told["record_data"]]
    assert read == sent
    place = kdirect.TopicPartition("t", 0)
    assert session.admin.committed_offsets("g", [place]) == {place: COUNT}


def test_from_a_producer_to_a_consumer_and_back(session, tool):
    told = tool("EndToEndLatency", "SERVERS", "t", str(COUNT), "all", "100")
    assert re.search(r"Avg latency: [\d.]+ ms", told) and "Percentiles" in told, told


def test_transactions(session, broker, tool):
    """One that is open is found, described, and aborted by force."""
    with session.producer(transactional_id="id") as producer:
        producer.init_transactions()
        producer.begin_transaction()
        producer.produce("t", b"open", partition=0)
        producer.flush()
        listed = tool("TransactionsCommand", "list")
        assert re.search(r"^id\s+1\s+\d+\s+Ongoing", listed, re.M), listed
        told = tool("TransactionsCommand", "describe", "--transactional-id", "id")
        assert re.search(r"Ongoing.*\bt-0\b", told), told
        told = tool("TransactionsCommand", "describe-producers", "--topic", "t", "--partition", "0")
        assert re.search(r"^\d+\s+0\s+-1\s+0\s+\d+\s+0\s", told, re.M), told
        hanging = ("find-hanging", "--broker-id", "1")
        assert len(tool("TransactionsCommand", *hanging).splitlines()) == 1, "only the heading"
        tool("TransactionsCommand", "forceTerminateTransaction", "--transactionalId", "id")
        told = tool("TransactionsCommand", "describe", "--transactional-id", "id")
        assert re.search(r"\bEmpty\b", told), told
        with pytest.raises(kdirect.KdirectError):
            producer.commit_transaction()


def test_an_application_of_streams_is_reset(session, tool):
    for name in ("words-counts-changelog", "words-counts-repartition"):
        session.admin.create_topic(name, 1)
    with session.producer() as producer:
        for i in range(5):
            producer.produce("t", b"%d" % i)
        producer.flush()
    place = kdirect.TopicPartition("t", 0)
    session.admin.commit_offsets("words", {place: 3})
    tool("StreamsResetter", "--application-id", "words", "--input-topics", "t", "--force")
    assert session.admin.committed_offsets("words", [place]) == {place: 0}
    assert set(session.admin.list_topics()) == {"t"}
