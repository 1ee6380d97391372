"""What requests under way hold in all: bounded, given back, and nobody waits for ever.  Real
sockets, and the broker's own counters."""

from __future__ import annotations

import struct
import threading

import pytest

import kdirect
from kdirect.broker.config import BrokerConfig
from kdirect.broker.request_memory import FREE_BYTES, STALL_SECONDS, default_limit
from kdirect.errors import ConfigError
from kdirect.format import protocol as p
from kdirect.format.schema import build

LARGEST = 8 << 20
BOUND = 16 << 20
CLIENTS = 12


@pytest.fixture
def broker():
    with kdirect.Broker(socket_request_max_bytes=LARGEST, queued_max_request_bytes=BOUND) as b:
        yield b


def large_request(size: int = LARGEST - 4096) -> bytes:
    """A Produce to a topic that is not there: its answer is an error, but it has to be taken
    whole."""
    message = build(
        p.ProduceRequest, transactional_id=None, acks=1, timeout_ms=1000,
        topic_data=[{"name": "none", "partition_data": [{"index": 0, "records": bytes(size)}]}],
    )  # fmt: skip
    data = p.encode_request(message, 7, 1, "raw")
    assert struct.unpack_from(">i", data)[0] == len(data) - 4
    return data


def held(broker) -> int:
    return broker.statistics()["broker_request_bytes"]


def answered(connection) -> bool:
    return bool(connection.receive_frame())


def test_half_requests_of_many_connections_stay_below_the_bound_and_all_end_when_they_go_on(
    broker, raw, until
):
    data = large_request()
    connections = [raw() for _ in range(CLIENTS)]
    peak = 0
    over = threading.Event()

    def send(connection) -> None:
        connection.socket.settimeout(60)
        connection.socket.sendall(data)

    threads = [threading.Thread(target=send, args=(c,), daemon=True) for c in connections]
    for thread in threads:
        thread.start()
    for connection in connections:
        connection.socket.settimeout(60)

    def watch() -> None:
        nonlocal peak
        while not over.wait(0.002):
            peak = max(peak, held(broker))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        assert all(answered(c) for c in connections), "each has its turn"
    finally:
        over.set()
        watcher.join()
    assert peak <= BOUND + LARGEST + FREE_BYTES
    until(lambda: held(broker) == 0, what="the end of what was held")


def test_whoever_stops_halfway_does_not_hold_the_bound_for_ever(broker, raw, until):
    data = large_request()

    def push(connection) -> None:
        """Three quarters of a request, and nothing more."""
        try:
            connection.socket.settimeout(60)
            connection.socket.sendall(data[: len(data) * 3 // 4])
        except OSError:
            pass

    for _ in range(4):
        threading.Thread(target=push, args=(raw(),), daemon=True).start()
    until(lambda: broker.statistics()["broker_request_waits"] > 0, what="the bound")
    small = raw()
    small.call(
        build(p.ApiVersionsRequest, client_software_name="x", client_software_version="1"), 3
    )  # small ones never wait
    honest = raw()
    honest.socket.settimeout(STALL_SECONDS * CLIENTS)
    honest.socket.sendall(large_request(1 << 20))
    assert answered(honest)
    large = raw()
    large.socket.settimeout(STALL_SECONDS * CLIENTS)
    large.socket.sendall(data)
    assert answered(large), "the ones that stopped were closed for it"


def test_an_announcement_holds_nothing_and_a_lost_connection_gives_all_back(broker, raw, until):
    announced = [raw() for _ in range(CLIENTS)]
    for connection in announced:
        connection.send_bytes(struct.pack(">i", LARGEST) + bytes(1000))
    connection = raw()
    connection.send_bytes(large_request())
    assert answered(connection) and broker.statistics()["broker_request_waits"] == 0
    until(lambda: held(broker) == 0, what="the end of the request")
    half = raw()
    half.send_bytes(large_request()[: 5 << 20])
    until(lambda: held(broker) > 4 << 20, what="half a request")
    half.close()
    until(lambda: held(broker) == 0, what="the end of the connection")


def test_an_idle_connection_keeps_no_buffer_of_its_last_request(broker, raw, until):
    """It was given back with the next request only: a thousand idle producers kept a thousand large
    buffers."""
    connections = [raw() for _ in range(4)]
    for connection in connections:
        connection.send_bytes(large_request())
        assert answered(connection)
    until(lambda: held(broker) == 0, what="the end of the requests")
    for connection in broker.server._connections:
        assert connection._parser.capacity <= FREE_BYTES


def test_the_bound_is_at_least_one_request(tmp_path):
    with pytest.raises(
        ConfigError, match=r"queued\.max\.request\.bytes: 1000 is below socket\.request\.max\.bytes"
    ):
        BrokerConfig({"queued.max.request.bytes": 1000})
    assert BrokerConfig({"queued.max.request.bytes": -1}).request_memory == -1
    assert BrokerConfig({}).request_memory == default_limit(104_857_600) >= 104_857_600
