"""The two exchanges by themselves, without a job: strangers, descriptors, forks and waits."""

from __future__ import annotations

import gc
import os
import resource
import socket
from collections.abc import Iterator

import pytest

from kdirect.errors import RdmaError, StateExchangeError, TransportError
from kdirect.state import tcp_channel
from kdirect.state.exchange import RdmaExchange, TcpExchange
from tests.support import wait_until


def test_strangers_at_the_door_of_the_tcp_exchange_keep_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tcp_channel, "HELLO_TIMEOUT_S", 3600.0)  # who waited for one would fail
    ends = [TcpExchange(i, 2, host="127.0.0.1", token="a" * 32) for i in range(2)]
    addresses = [end.address() for end in ends]
    port = addresses[1]["port"]
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(80)]
    wrong = tcp_channel.HELLO.pack(0, b"b" * 32)
    for said in (wrong, b"x" * 1000, tcp_channel.HELLO.pack(7, b"a" * 32), wrong[:10]):
        strangers.append(socket.create_connection(("127.0.0.1", port)))
        strangers[-1].sendall(said)
    try:
        for end in ends:
            end.connect(addresses)
        assert ends[0].senders[1].send_from(memoryview(b"abc"), 0, 3)
        ends[0].flush()
        receiver = ends[1].receivers[0]
        wait_until(lambda: ends[1].wait(10) and receiver.poll())
        assert bytes(receiver.payload) == b"abc"
    finally:
        for stranger in strangers:
            stranger.close()
        for end in ends:
            end.close()


def test_a_sender_without_the_token_is_no_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = [TcpExchange(i, 2, host="127.0.0.1", token=c * 32) for i, c in enumerate("ab")]
    addresses = [end.address() for end in ends]
    try:
        for end in ends:
            end.connect(addresses)
        assert ends[0].senders[1].send_from(memoryview(b"abc"), 0, 3)
        ends[0].flush()
        with pytest.raises(StateExchangeError, match="executor 1 has gone"):
            for _ in range(200):
                ends[1].wait(10)
                ends[0].senders[1].send_from(memoryview(b"abc"), 0, 3)
                ends[0].flush()
        assert not ends[1].receivers[0].attached
    finally:
        for end in ends:
            end.close()


@pytest.fixture
def tcp_ends() -> Iterator[list[TcpExchange]]:
    """Executors 0 and 1, connected."""
    ends = [TcpExchange(i, 2, host="127.0.0.1", token="a" * 32) for i in range(2)]
    addresses = [end.address() for end in ends]
    for end in ends:
        end.connect(addresses)

    def all_are_there() -> bool:
        for end in ends:
            end.wait(10)
        return ends[0].receivers[1].attached and ends[1].receivers[0].attached

    wait_until(all_are_there)
    yield ends
    for end in ends:
        end.close()


def test_an_exchange_may_have_descriptors_of_any_number() -> None:
    """`select` takes none above 1023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    taken = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        ends = [TcpExchange(i, 2, host="127.0.0.1", token="a" * 32) for i in range(2)]
        addresses = [end.address() for end in ends]
        for end in ends:
            end.connect(addresses)
        assert ends[1].senders[0].fileno() > 1023
        assert ends[0].senders[1].send_from(memoryview(b"abc"), 0, 3)
        wait_until(lambda: ends[1].wait(10) and ends[1].receivers[0].poll())
        ends[0].flush()
        for end in ends:
            end.close()
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_exchange_that_cannot_be_made_leaves_nothing_open() -> None:
    """A process that lives on, a worker of Spark, kept what was made before the limit was met."""

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    RdmaExchange(0, 3, provider="shm").close()
    gc.collect()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The limit is of a descriptor's number: those below the highest that earlier tests have given
    # back would be taken first, and nothing would be refused.
    highest = max(map(int, os.listdir("/proc/self/fd")))
    filled = [os.dup(0)]
    while filled[-1] < highest:
        filled.append(os.dup(0))
    before, refused = descriptors(), 0
    try:
        for more in range(2, 20):
            resource.setrlimit(resource.RLIMIT_NOFILE, (filled[-1] + more, hard))
            try:
                RdmaExchange(0, 3, provider="shm").close()
            except (OSError, RdmaError, TransportError):
                refused += 1
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            gc.collect()
        assert refused > 5
        assert descriptors() <= before
    finally:
        for fd in filled:
            os.close(fd)


def test_a_child_made_by_fork_keeps_no_channel_open(tcp_ends: list[TcpExchange]) -> None:
    """Its peers did not miss an executor that had ended before its child."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(writing)
            os.read(reading, 1)  # until the test has ended
        finally:
            os._exit(0)
    os.close(reading)
    try:
        tcp_ends[0].close()
        with pytest.raises(StateExchangeError, match="executor 0 has gone"):
            for _ in range(100):
                tcp_ends[1].wait(10)
                tcp_ends[1].receivers[0].poll()
    finally:
        os.close(writing)
        os.waitpid(child, 0)


def test_a_wait_ends_when_it_has_made_room_itself(tcp_ends: list[TcpExchange]) -> None:
    """It slept although a sender that had found none could go on."""
    sender, receiver = tcp_ends[0].senders[1], tcp_ends[1].receivers[0]
    page = memoryview(bytes(sender.payload_bytes))
    while sender.may_send:
        assert sender.send_from(page, 0, len(page))

    made = 0
    for _ in range(200):
        wait_until(receiver.poll)
        receiver.release()
        before = sender.completed
        is_ready = tcp_ends[0].wait(20)
        if sender.completed > before:
            made += 1
            assert is_ready
        while sender.may_send:
            assert sender.send_from(page, 0, len(page))
    assert made
