"""Frames of every API and version that are random, cut, damaged or promise what they do not bring,
on many connections at once: the broker goes on, others are served meanwhile, its memory stays
within bounds, and whatever it thinks of such a frame, it has thought of it before.

`make api-fuzz COUNT=n SEED=s` sends more of them.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import select
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import kdirect
from kdirect.format import protocol as p
from tests.broker.random_messages import frame
from tests.support import BrokerProcess

FRAMES = int(os.environ.get("KDIRECT_FRAMES", "1500"))
CONNECTIONS = 8
CHECK_EVERY = 50  # frames
LONGEST_S = 10.0  # that others wait
MEMORY_BYTES = 256 << 20
SLOWEST = 20  # frames in a second


class Attacker:
    """A few connections, each of which is replaced once the broker has ended it."""

    def __init__(self, servers: str) -> None:
        host, _, port = servers.rpartition(":")
        self._address = host, int(port)
        self._sockets: list[socket.socket] = []
        self.closed = 0

    def send(self, number: int, data: bytes) -> None:
        while len(self._sockets) <= number:
            self._sockets.append(self._open())
        try:
            while select.select([self._sockets[number]], [], [], 0)[0]:
                if not self._sockets[number].recv(1 << 16):
                    raise ConnectionResetError
            self._sockets[number].sendall(data)
        except OSError:
            self.closed += 1
            self._sockets[number].close()
            self._sockets[number] = self._open()

    def _open(self) -> socket.socket:
        return socket.create_connection(self._address, LONGEST_S)

    def close(self) -> None:
        for one in self._sockets:
            one.close()


def resident(pid: int) -> int:
    """Bytes of memory that a process has, files that it maps left out."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) << 10  # type: ignore[index]


def test_frames_name_topics_by_ids_that_there_cannot_be(seed: int) -> None:
    rng = random.Random(seed)
    produce = p.APIS[0]
    found = sum(b"\0" * 16 in frame(produce, 13, rng) for _ in range(200))
    assert 20 < found < 180


@pytest.mark.timeout(300 + FRAMES // SLOWEST)
def test_hostile_frames(broker_process: Callable[..., BrokerProcess], seed: int) -> None:
    rng = random.Random(seed)
    versions = [
        (api, version)
        for api in p.APIS.values()
        for version in [*range(api.low, api.high + 1), -1, api.high + 1]
    ]
    rng.shuffle(versions)
    broker = broker_process()
    settings = {"bootstrap.servers": broker.bootstrap_servers, "transport": "tcp"}
    with (
        contextlib.closing(Attacker(broker.bootstrap_servers)) as attacker,
        kdirect.connect(settings) as session,
        kdirect.Producer(settings) as producer,
        kdirect.Consumer(settings) as consumer,
    ):
        session.admin.create_topic("kept")
        session.admin.create_topic("t", 2)
        consumer.assign({kdirect.TopicPartition("kept", 0): 0})
        before = resident(broker.pid)
        for i in range(FRAMES):
            api, version = versions[i % len(versions)]
            attacker.send(rng.randrange(CONNECTIONS), frame(api, version, rng))
            if i % CHECK_EVERY == 0:
                begun = time.monotonic()
                producer.produce_sync("kept", b"%d" % i, None)
                message = consumer.poll(LONGEST_S)
                assert message is not None and message.value() == b"%d" % i
                assert time.monotonic() - begun < LONGEST_S
        grown = resident(broker.pid) - before
        assert grown < MEMORY_BYTES, f"the broker has taken {grown >> 20} MiB"
    assert attacker.closed > FRAMES // 20, "frames that cannot be read end their connection"
    assert broker.stop() == 0
    errors = broker.errors.read_text()
    assert "Traceback" not in errors, errors[errors.index("Traceback") - 500 :][:4000]
