"""A connection whose requests and answers travel as SENDs: the two-sided produce path
(`produce.path=send`).

Owns: one queue pair to a broker for messages, with its buffers.  It has the interface of a TCP
connection (`kdirect.wire.connection`), from which it inherits all but how bytes travel, so the
writer above (`TcpAppender`) retries, orders and counts as it does over TCP.  What may not enter:
what requests mean.

A message is one frame as it would stand in a TCP stream.  The broker has posted `count` receives of
`message_bytes` each, and this side as many for the answers, so no more than `count` requests are
under way.  The broker may post a receive later than it answers, when it is short of memory: the
SEND that needs it waits in this queue pair.

Memory.  Send buffer i belongs to the transport from the post of its SEND to its completion, receive
buffer i from its post to its completion, after which the answer is copied and the receive posted
again.  Both end with the channel.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Mapping
from typing import Any

from kdirect.errors import ProtocolError, RdmaError, TimedOutError
from kdirect.format.layout import TWO_SIDED_ANSWER_BYTES
from kdirect.rdma.contract import Opcode
from kdirect.wire.channel import Channel
from kdirect.wire.connection import Connection
from kdirect.wire.environment import SYSTEM, Environment

FRAME_BYTES = 4096  # of a request in addition to its batches: names and numbers
MAX_REQUESTS = 128
_SIZE = struct.Struct(">i")


class _End:
    """What `Connection` does with its socket at the end."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def shutdown(self, how: int) -> None:
        for cq in (self._channel.send_cq, self._channel.recv_cq):
            cq.wake()

    def close(self) -> None:
        self._channel.close()


class MessageConnection(Connection):
    """See the module.  `control` is the TCP connection to the same broker, with which this one
    ends.  Raises TransportError or AccessDeniedError where the broker has no such path."""

    def __init__(
        self,
        control: Connection,
        transport: str,
        *,
        message_bytes: int,
        requests: int,
        spin_us: int,
        environment: Environment = SYSTEM,
        device_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._prepare(
            control.host,
            control.port,
            control.client_id,
            control.timeout_ms,
            control.max_response_bytes,
            environment.monotonic,
            environment.wait_on,
        )
        self._environment = environment
        self._versions = control._versions
        self._spin_us = spin_us
        requests = min(requests, MAX_REQUESTS)
        channel = Channel(
            control,
            transport,
            receives=requests,
            sends=requests,
            message_bytes=message_bytes,
            environment=environment,
            device_options=device_options,
        )
        try:
            self.channel = channel
            self.message_bytes = message_bytes
            self.count = min(channel.max_in_flight, requests)
            self._requests_memory = channel.local_memory(self.count * message_bytes)
            self._answers = channel.local_memory(self.count * TWO_SIDED_ANSWER_BYTES)
            for slot in range(self.count):
                self._post_receive(slot)
            self._free = deque(range(self.count))
            self._arrived: deque[bytes] = deque()
            self._socket = _End(channel)  # type: ignore[assignment]
        except BaseException:
            channel.close()
            raise

    def _post_receive(self, slot: int) -> None:
        self.channel.qp.post_recv(
            slot, self._answers, slot * TWO_SIDED_ANSWER_BYTES, TWO_SIDED_ANSWER_BYTES
        )

    def _take_sent(self) -> None:
        """Take the completions of SENDs, whose buffers are free again.  To look at them also lets
        the transport send what waits for a receive."""
        for completion in self.channel.send_cq.poll(64):
            if not completion.ok:
                raise self._lost("sending", None)
            self._free.append(completion.wr_id)

    def _send_some(self, view: memoryview, deadline: float) -> int:
        """Send one frame, whole; its request is among those pending already."""
        if len(view) > self.message_bytes:
            raise ProtocolError(
                f"a request of {len(view)} bytes is larger than a message of {self.message_bytes}",
                hint="lower batch.bytes",
            )
        try:
            while True:
                self._take_sent()
                now = self._environment.monotonic()
                if (
                    len(self._pending) - len(self._unsent) >= self.count
                ):  # those that are at the broker; this one is among both
                    self._read_one(min(deadline, now + 0.1), None)
                elif not self._free and now < deadline:
                    self.channel.send_cq.wait(10, self._spin_us)
                elif self._free:
                    break
                if self._error is not None:
                    raise self._lost("sending", None)
                if now >= deadline:
                    raise TimedOutError(
                        f"the broker at {self.peer} does not take requests",
                        hint="it is overloaded or stopped; see its log",
                    )
            slot = self._free.popleft()
            start = slot * self.message_bytes
            memoryview(self._requests_memory.memory)[start : start + len(view)] = view
            self.channel.qp.post_send(slot, self._requests_memory, start, len(view))
        except RdmaError as e:
            raise self._lost("sending", e) from e
        return len(view)

    def _read_frame(self, deadline: float) -> bytes | None:
        """The next answer without its length, or None at the deadline."""
        cq = self.channel.recv_cq
        try:
            while not self._arrived:
                self._send_rest()
                if len(self._free) < self.count:
                    self._take_sent()
                for completion in cq.poll(64):
                    if not completion.ok or completion.opcode != Opcode.RECV:
                        raise self._lost("answering", None)
                    start = completion.wr_id * TWO_SIDED_ANSWER_BYTES
                    answer = bytes(
                        memoryview(self._answers.memory)[start : start + completion.byte_len]
                    )
                    if len(answer) < 8 or _SIZE.unpack_from(answer)[0] != len(answer) - 4:
                        raise ProtocolError(
                            f"{self.peer} sent a message that is no answer",
                            hint="check that it is a kdirect broker",
                        )
                    self._arrived.append(answer[4:])
                    self._post_receive(completion.wr_id)
                if not self._arrived:
                    left_ms = (deadline - self._environment.monotonic()) * 1000
                    if left_ms <= 0 or self._error is not None:
                        return None
                    cq.wait(max(1, min(1000, int(left_ms))), self._spin_us)
        except RdmaError as e:
            raise self._lost("answering", e) from e
        return self._arrived.popleft()
