"""A client of Kafka's protocol that costs next to nothing: frames made once and sent many times.

Rows that measure what a request costs a broker use it for either broker: what they measure is then
the broker's work, and not the client's.
"""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path
from typing import Any

from kdirect.format import protocol as p
from kdirect.format.batch import encode_single_bytes
from kdirect.format.schema import build

PRODUCE_VERSION = 9
FETCH_VERSION = 11


def cpu_seconds(pid: int) -> float:
    """Of all threads of a process that live, in nanoseconds' steps where the kernel tells them."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return sum(int((t / "schedstat").read_text().split()[0]) for t in tasks) / 1e9
    except OSError:  # a kernel without them
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class RawClient:
    """One connection.  `frame` encodes a request; `exchange` sends one frame `depth` times at once,
    then takes as many answers, `count` in all."""

    def __init__(self, address: str) -> None:
        host, _, port = address.partition(",")[0].rpartition(":")
        self._socket = socket.create_connection((host, int(port)), 30)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._answers = self._socket.makefile("rb", buffering=1 << 20)

    def frame(self, message: Any, version: int) -> bytes:
        return bytes(p.encode_request(message, version, 1, "bench"))

    def answer(self) -> bytes:
        size = struct.unpack(">i", self._answers.read(4))[0]
        return self._answers.read(size)

    def call(self, message: Any, version: int) -> Any:
        self._socket.sendall(self.frame(message, version))
        return p.decode_response(message.API_KEY, version, self.answer())[1]

    def exchange(self, frame: bytes, count: int, depth: int) -> None:
        together = frame * depth
        for _ in range(count // depth):
            self._socket.sendall(together)
            for _ in range(depth):
                self.answer()

    def close(self) -> None:
        self._answers.close()
        self._socket.close()


def one_record(topic: str, size: int) -> Any:
    """A Produce of one record with a value of `size` bytes, acks=1."""
    rows = [{"index": 0, "records": encode_single_bytes(b"v" * size)}]
    return build(
        p.ProduceRequest,
        transactional_id=None,
        acks=1,
        timeout_ms=30_000,
        topic_data=[{"name": topic, "partition_data": rows}],
    )


def first_bytes(topic: str, size: int) -> Any:
    """A Fetch of the first `size` bytes of partition 0, without a session."""
    part = {"partition": 0, "current_leader_epoch": -1, "fetch_offset": 0,
            "partition_max_bytes": size, "log_start_offset": -1}  # fmt: skip
    return build(
        p.FetchRequest,
        replica_id=-1,
        max_wait_ms=0,
        min_bytes=1,
        max_bytes=1 << 30,
        isolation_level=0,
        session_id=0,
        session_epoch=-1,
        topics=[{"topic": topic, "partitions": [part]}],
        forgotten_topics_data=[],
        rack_id="",
    )


def check_produced(answer: Any) -> None:
    """RuntimeError unless the one record was taken."""
    code = answer.responses[0].partition_responses[0].error_code
    if code:
        raise RuntimeError(f"the broker refused a record with error {code}")
