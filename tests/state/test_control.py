"""Control connections: messages come whole and in order; a stranger is refused and disturbs
nobody."""

from __future__ import annotations

import select
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from kdirect.errors import CoordinatorUnavailableError, StateProtocolError, TimedOutError
from kdirect.state import control
from kdirect.state.control import ControlConnection, ControlListener
from tests.support import wait_until


@pytest.fixture
def listener() -> Iterator[ControlListener]:
    made = ControlListener("127.0.0.1", control.new_token())
    yield made
    made.close()


def pair(listener: ControlListener) -> tuple[ControlConnection, ControlConnection]:
    client = control.connect(*listener.address, listener.token)
    (server,) = wait_until(listener.poll)
    return client, server


def test_messages_come_whole_and_in_order(listener: ControlListener) -> None:
    client, server = pair(listener)
    sent = [bytes([i]) * (i * 50) for i in range(50)]
    for message in sent:
        client.send(message)
    assert [server.receive(10) for _ in sent] == sent
    server.send(b"back")
    assert client.receive(10) == b"back"
    assert client.poll() is None
    client.close()
    server.close()


def test_a_message_larger_than_the_buffers_of_sockets(listener: ControlListener) -> None:
    client, server = pair(listener)
    message = b"x" * (8 << 20)
    server_side = []
    reader = threading.Thread(target=lambda: server_side.append(server.receive(30)))
    reader.start()
    client.send(message)
    reader.join()
    assert server_side == [message]
    client.close()
    server.close()


def test_what_was_sent_before_the_end_is_received(listener: ControlListener) -> None:
    client, server = pair(listener)
    client.send(b"last")
    client.close()
    assert server.receive(10) == b"last"
    with pytest.raises(StateProtocolError, match="closed"):
        server.receive(10)
    assert server.closed


def test_a_wrong_token_is_refused_and_others_connect(listener: ControlListener) -> None:
    stranger = control.connect(*listener.address, "0" * 32)
    wait_until(lambda: listener.poll() or listener.refused)
    assert listener.refused == 1
    with pytest.raises(StateProtocolError):
        stranger.receive(10)
    client, server = pair(listener)
    client.close()
    server.close()


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">I", 0xFFFFFFFF),
        struct.pack(">I", 2048) + b"x" * 2048,
        struct.pack(">I", 0),
        struct.pack(">I", 32) + b"0" * 32,
        struct.pack(">I", 3) + b"\xff\xfe\xfd",
        b"GET / HTTP/1.1\r\n\r\n",
        b"",
    ],
    ids=lambda data: repr(data[:20]),
)
def test_a_stranger_is_refused(listener: ControlListener, data: bytes) -> None:
    with socket.create_connection(listener.address) as stranger:
        stranger.sendall(data)
        stranger.shutdown(socket.SHUT_WR)
        wait_until(lambda: listener.poll() or listener.refused)
        assert listener.refused == 1


def test_a_silent_stranger_is_refused_in_time(
    listener: ControlListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "TOKEN_TIMEOUT_S", 0.0)
    with socket.create_connection(listener.address):
        wait_until(lambda: listener.poll() or listener.refused)
        assert len(listener.filenos()) == 1


def test_a_peer_that_breaks_the_framing_is_named(listener: ControlListener) -> None:
    with socket.create_connection(listener.address) as sock:
        token = listener.token.encode()
        too_long = struct.pack(">I", control.MAX_MESSAGE_BYTES + 1)
        sock.sendall(struct.pack(">I", len(token)) + token + too_long)
        (server,) = wait_until(listener.poll)
        with pytest.raises(StateProtocolError, match=rf"{sock.getsockname()[1]} announces"):
            server.receive(10)
        assert server.closed


def test_waiting_ends_in_time_and_the_socket_can_be_waited_on(listener: ControlListener) -> None:
    client, server = pair(listener)
    with pytest.raises(TimedOutError):
        client.receive(0.01)
    server.send(b"a")
    assert select.select([client], [], [], 10)[0]
    assert client.poll() == b"a"
    client.close()
    server.close()
    assert client.closed
    with pytest.raises(StateProtocolError):
        client.poll()


def test_an_unreachable_coordinator_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(CoordinatorUnavailableError, match=f"127.0.0.1:{port} cannot be reached"):
        control.connect("127.0.0.1", port, "x")
