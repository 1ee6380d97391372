"""The two-sided path (`produce.path=send`): Produce requests in SENDs, with the semantics of TCP.
Real brokers, over shm."""

from __future__ import annotations

import contextlib
import socket
import struct
import time

import pytest

import kdirect
from kdirect.broker import two_sided as messages_of_broker
from kdirect.client import connect
from kdirect.client.two_sided import FRAME_BYTES
from kdirect.errors import DeliveryError
from kdirect.format import protocol
from kdirect.format.codec import encode_records
from kdirect.model import TopicPartition

TP = TopicPartition("t", 0)
SEND = {"produce.path": "send", "batch.bytes": 65536}
MESSAGE_BYTES = 65536 + FRAME_BYTES


@pytest.fixture
def served(broker_process):
    """(session, settings, broker) with topic `t` of one partition."""
    made = []

    def make(**properties: object):
        broker = broker_process(**properties)
        settings = {"bootstrap.servers": broker.bootstrap_servers, "transport": "shm"}
        made.append(connect(settings))
        made[-1].admin.create_topic("t", 1)
        return made[-1], {**settings, **SEND}, broker

    yield make
    for session in made:
        session.close()


def log_of(session):
    reader = session.reader(TP, 0, session.latest_offsets([TP])[TP])
    values = [value for batch in reader.batches() for value in batch.column("value").to_pylist()]
    reader.close()
    return values


def test_records_arrive_in_order_beside_those_of_other_paths(served):
    session, settings, _ = served()
    with kdirect.Producer(settings) as producer, session.producer() as direct:
        for i in range(500):
            producer.produce("t", b"%d" % i, partition=0)
            if i % 50 == 0:
                producer.flush()
                direct.produce_sync("t", b"direct", partition=0)
        producer.flush()
        assert producer.produce_sync("t", b"last", partition=0) == 510
        counts = producer.statistics()
        assert (
            counts["send_records"] == 501
            and not counts.get("tcp_records")
            and not counts.get("rdma_records")
        )
    assert [v for v in log_of(session) if v != b"direct"] == [b"%d" % i for i in range(500)] + [
        b"last"
    ]


def test_many_under_way_in_large_and_small_messages(served):
    session, settings, _ = served(**{"rdma.message.memory.bytes": 1 << 20})
    with kdirect.Producer(settings) as producer:
        sent = []
        for i in range(400):
            value = b"%d " % i + b"x" * (0, 10, 60_000)[i % 3]
            producer._driver.send(TP, encode_records([(None, value, [], 1)]), 1)
            sent.append(value)
        producer._driver.flush()
    assert log_of(session) == sent


@contextlib.contextmanager
def broker_full_of(broker, bound):
    """Another client has sent nearly all of a request of `bound` bytes, which is more than the
    broker has room for besides."""
    host, port = broker.bootstrap_servers.rsplit(":", 1)
    with socket.create_connection((host, int(port))) as other:
        other.sendall(
            struct.pack(">ih", bound, protocol.ProduceRequest.API_KEY) + bytes(bound - 64)
        )
        until = time.monotonic() + 10
        while broker.statistics()["broker_request_bytes"] <= bound:
            assert time.monotonic() < until, "the broker did not take it"
            time.sleep(0.005)
        yield


@pytest.mark.parametrize("how", ["waits", "polls"])
def test_a_request_that_waits_for_a_receive_goes_on_when_nothing_else_is_sent(how):
    """Another client's request takes all the memory for requests: no receive is posted again until
    it is gone."""
    count, bound = 8, 4 << 20
    properties = {
        "rdma.message.memory.bytes": count * MESSAGE_BYTES,
        "queued.max.request.bytes": bound,
        "socket.request.max.bytes": bound,
    }
    with kdirect.Broker(properties=properties) as broker:
        settings = {"bootstrap.servers": broker.bootstrap_servers, "transport": "shm"}
        with (
            contextlib.closing(connect(settings)) as session,
            kdirect.Producer({**settings, **SEND}) as producer,
        ):
            session.admin.create_topic("t", 1)
            producer.produce_sync("t", b"0", partition=0)
            messages = next(iter(producer._driver.links)).messages_at_hand
            assert messages.count == count
            with broker_full_of(broker, bound):
                for i in range(1, count + 1):
                    producer.produce_sync("t", b"%d" % i, partition=0)
                producer._driver.send(TP, encode_records([(None, b"waiting", [], 1)]), 1)
                time.sleep(0.05)
                producer._driver.outcomes()
                assert len(messages._pending) == 1, "no receive is left for it"
            until = time.monotonic() + 20
            while how == "polls" and messages._pending:
                producer._driver.outcomes()
                assert time.monotonic() < until, "a look at the answers brings it on"
            producer._driver.flush()
            assert next(iter(producer._driver.links)).messages_at_hand is messages, (
                "it was not sent again over another queue pair"
            )
            assert producer.produce_sync("t", b"last", partition=0) == count + 2


def produce_request(value):
    r = protocol.ProduceRequest
    data = r.TopicProduceData.PartitionProduceData(
        index=0, records=encode_records([(None, value, [], 1)])
    )
    return r(
        transactional_id=None,
        acks=1,
        timeout_ms=1000,
        topic_data=[r.TopicProduceData(name="t", partition_data=[data])],
    )


def test_a_receive_is_posted_before_its_answer_leaves(monkeypatch):
    """A client may send as soon as it has an answer, and an RNIC that finds no receive tries again
    much later."""
    post_receives = messages_of_broker.MessageConnection._post_receives

    def slowly(self):
        time.sleep(0.002)  # as when the broker loses the processor here
        post_receives(self)

    monkeypatch.setattr(messages_of_broker.MessageConnection, "_post_receives", slowly)
    with kdirect.Broker(rdma_message_memory_bytes=MESSAGE_BYTES) as broker:
        settings = {"bootstrap.servers": broker.bootstrap_servers, "transport": "shm"}
        with (
            contextlib.closing(connect(settings)) as session,
            kdirect.Producer({**settings, **SEND}) as producer,
        ):
            session.admin.create_topic("t", 1)
            producer.produce_sync("t", b"first", partition=0)
            messages = next(iter(producer._driver.links)).messages_at_hand
            assert messages.count == 1
            waited = 0
            for _ in range(50):
                asked = messages.submit_later(produce_request(b"x"))
                sent = (
                    messages.channel.send_cq.poll()
                )  # a SEND that finds a receive completes at once
                waited += not sent
                messages._free.extend(completion.wr_id for completion in sent)
                asked.result(10_000)
            assert waited == 0


def test_an_idempotent_producer_repeats_over_a_new_queue_pair_what_it_lost(served):
    session, settings, _ = served()
    with kdirect.Producer(settings) as producer:
        for i in range(600):
            producer._driver.send(TP, encode_records([(None, b"%d" % i, [], 1)]), 1)
            if i % 100 == 50:
                (link,) = producer._driver.links
                link._messages.channel.qp.close()  # requests and answers are under way
        producer._driver.flush()
        assert producer.statistics()["send_requests"] == 600
    assert log_of(session) == [b"%d" % i for i in range(600)]


def test_a_request_that_is_too_large_is_told_at_once(served):
    session, settings, _ = served()
    with kdirect.Producer(settings) as producer:
        with pytest.raises(
            DeliveryError,
            match=r"batch of \d+ bytes is too large for a message .*batch\.bytes 65536",
        ):
            producer._driver.send(TP, encode_records([(None, b"x" * 70_000, [], 1)]), 1)
        assert producer.produce_sync("t", b"small", partition=0) == 0
    assert log_of(session) == [b"small"]


@pytest.mark.parametrize("why", ["too large for the broker", "switched off"])
def test_where_the_broker_takes_no_messages_records_go_over_tcp(served, caplog, why):
    session, settings, _ = served(
        **(
            {"rdma.message.memory.bytes": 65536}
            if why != "switched off"
            else {"rdma.produce": "false"}
        )
    )
    with kdirect.Producer(settings) as producer:
        assert producer.produce_sync("t", b"x", partition=0) == 0
    assert "t-0 is written over TCP" in caplog.text
    assert log_of(session) == [b"x"]


def test_the_queue_pair_ends_with_its_control_connection_and_is_opened_again(served):
    session, settings, _ = served()
    with kdirect.Producer(settings) as producer:
        producer.produce_sync("t", b"0", partition=0)
        first = next(iter(producer._driver.links)).messages_at_hand
        first.channel.connection.close()
        sent = [b"0"]
        until = time.monotonic() + 20
        while (
            not first.closed and time.monotonic() < until
        ):  # the broker takes more until it sees that end
            sent.append(b"%d" % len(sent))
            assert producer.produce_sync("t", sent[-1], partition=0) == len(sent) - 1
        assert first.closed and producer.statistics()["send_records"] == len(sent)
    assert log_of(session) == sent


@pytest.mark.parametrize("how", ["no frame", "another size", "another request", "empty"])
def test_a_message_that_is_no_produce_request_is_cut_and_others_go_on(served, how):
    session, settings, _ = served()
    frame = {
        "no frame": b"\xff" * 64,
        "another size": struct.pack(">ihh", 5, 0, 9) + bytes(32),
        "another request": struct.pack(">ihh", 36, 3, 9) + bytes(32),
        "empty": b"",
    }[how]
    with (
        kdirect.Producer(settings) as other,
        kdirect.Producer({**settings, "enable.idempotence": "false"}) as producer,
    ):
        other.produce_sync("t", b"other", partition=0)
        producer.produce_sync("t", b"mine", partition=0)
        messages = next(iter(producer._driver.links)).messages_at_hand
        channel = messages.channel
        memory = channel.local_memory(4096)
        memoryview(memory.memory)[: len(frame)] = frame
        channel.qp.post_send(0, memory, 0, len(frame))
        deadline = time.monotonic() + 10
        while not messages.closed and time.monotonic() < deadline:
            try:
                messages.poll()
                messages._read_one(time.monotonic() + 0.05, None)
            except kdirect.KdirectError:
                break
        assert messages.closed
        assert other.produce_sync("t", b"still", partition=0) == 2
        assert producer.produce_sync("t", b"back", partition=0) == 3
    assert log_of(session) == [b"other", b"mine", b"still", b"back"]
