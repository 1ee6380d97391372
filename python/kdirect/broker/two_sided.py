"""Kafka requests carried in SEND and RECV: the two-sided path of producers that want it (what
KafkaDirect §5 compares itself with).

Owns: the completion queues of such clients, which the event loop looks at, and one
`MessageConnection` a queue pair: its receive buffers and answers.  A message is one frame as it
would stand in a TCP stream, and goes where such a frame goes; only Produce is taken.  What may not
enter: what requests mean, one-sided access.

Memory.  Receive buffer i, registered in the client's protection domain, belongs to the transport
from the post of receive i to its completion; then its frame is copied, and it is posted again once
every frame that has been copied is under way or answered, so a client that sends without waiting
costs no more than its receives.  It is posted before that answer leaves, unless memory is short: an
answer lets the client send once more, and a SEND that finds no receive waits long (an RNIC's
timer).  Answer buffer i belongs to the transport from the post of its SEND to that SEND's
completion.  Both end with the domain, after the queue pair is closed.

All methods run on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any

from kdirect.broker.connection import Connection, ConnectionContext, Turns
from kdirect.broker.files import TURN_S
from kdirect.errors import RdmaError
from kdirect.format import protocol as p
from kdirect.format.layout import TWO_SIDED_ANSWER_BYTES
from kdirect.rdma.contract import Access, Memory, Opcode, Status
from kdirect.wire.environment import Environment

log = logging.getLogger("kdirect.broker.rdma")

MAX_RECEIVES = 128
LEAST_MESSAGE_BYTES = 1024
QUEUE_DEPTH = 1 << 16
AT_ONCE = 16  # completions, each of which may be a request
_HEAD = struct.Struct(">ih")  # size of the frame, API key
_SIZE = struct.Struct(">i")


class MessageService:
    """The queues of one transport's two-sided clients.  Life: with its engine; the event loop
    watches it while there are clients."""

    def __init__(
        self,
        device: Any,
        loop: asyncio.AbstractEventLoop,
        turns: Turns,
        environment: Environment,
    ) -> None:
        self.links: dict[int, MessageConnection] = {}
        self.recv_cq = device.create_cq(depth=QUEUE_DEPTH)
        self.send_cq = device.create_cq(depth=QUEUE_DEPTH)
        self._loop = loop
        self._turns = turns
        self._monotonic = environment.monotonic
        self._waits_for_turn = False
        self._closed = False

    def add(self, link: MessageConnection) -> None:
        if not self.links:
            for cq in (self.recv_cq, self.send_cq):
                self._loop.add_reader(cq.fileno(), self.work)
        self.links[link.qp.qp_num] = link
        self._loop.call_soon(self.work)  # and so the queues are armed

    def remove(self, link: MessageConnection) -> None:
        self.links.pop(link.qp.qp_num, None)
        self._loop.call_soon(self._reap)
        if not self.links:
            for cq in (self.recv_cq, self.send_cq):
                self._loop.remove_reader(cq.fileno())

    def work(self) -> None:
        """Take the completions that are there, then ask for an event at the next one; after
        `TURN_S` others have their turn, for clients that send on while they are answered give no
        end of them."""
        if self._waits_for_turn:
            return
        end = self._monotonic() + TURN_S
        while self.links:
            for cq in (self.send_cq, self.recv_cq):
                for completion in cq.poll(AT_ONCE):
                    link = self.links.get(completion.qp_num)
                    if link is not None:
                        link.completed(completion)
            if self._monotonic() >= end:
                self._waits_for_turn = True
                self._turns.ask(self._take_turn)
                return
            armed = [cq.arm() for cq in (self.send_cq, self.recv_cq)] if self.links else []
            if not any(armed):
                return

    def _take_turn(self) -> None:
        self._waits_for_turn = False
        self.work()

    def _reap(self) -> None:
        """A poll lets go of closed queue pairs; without other clients nobody polls."""
        if not self.links and not self._closed:
            for cq in (self.recv_cq, self.send_cq):
                while cq.poll(64):
                    pass

    def close(self) -> None:
        """Once there are no clients.  Any thread."""
        self._closed = True
        self.recv_cq.close()
        self.send_cq.close()


class MessageConnection(Connection):
    """One two-sided client, in addition to its TCP connection `control`: it ends with that one or
    with its queue pair.  `count` receives of `message_bytes`; the client keeps as many for the
    answers.

    It is a `Connection`: the order of answers, the bounds on memory and on requests under way, and
    the turns are the same, and each request passes them without a further call.  What carries the
    bytes differs, and is overridden below: `_push`, `_flush`, `_throttle` and the end."""

    def __init__(
        self,
        context: ConnectionContext,
        control: Connection,
        service: MessageService,
        domain: Any,
        *,
        message_bytes: int,
        count: int,
    ) -> None:
        super().__init__(context, control.listener)
        self._plain = None  # plain answers are of a stream: each of these goes alone
        self.control = control
        self.client_id = control.client_id
        self.peer = control.peer
        self.local = control.local
        self._service = service
        self._domain = domain
        self._message_bytes = message_bytes
        self.registered_bytes = count * message_bytes
        # Whose a buffer is, and until which completion: see the module.
        self._receives = domain.register(
            Memory.anonymous(count * message_bytes, "kdirect-requests"), Access.LOCAL_WRITE
        )
        self._answers = domain.register(
            Memory.anonymous(count * TWO_SIDED_ANSWER_BYTES, "kdirect-answers"), Access.LOCAL_WRITE
        )
        self.qp = domain.create_qp(
            service.send_cq,
            service.recv_cq,
            max_send_wr=count,
            max_recv_wr=count,
            max_send_bytes=TWO_SIDED_ANSWER_BYTES,
        )
        self._owed: list[int] = list(range(count))  # receives to post
        self._free = deque(range(count))  # answer buffers
        self._ready: deque[bytes] = deque()  # answers that wait for one

    def open(self, address: bytes) -> None:
        """Connect to the client's queue pair and begin to serve it."""
        self._post_receives()
        self.qp.connect(address, active=False)
        self.context.opened(self)
        self.context.memory.hold(self, self.registered_bytes)  # until the connection is lost
        self._service.add(self)

    def completed(self, completion: Any) -> None:
        """One of this queue pair's completions."""
        if self.closed:
            return
        if completion.status != Status.SUCCESS:
            self.close(
                "it sent more than a receive takes"
                if completion.status == Status.LOC_LEN_ERR
                else ""
            )
        elif completion.opcode == Opcode.SEND:
            self._free.append(completion.wr_id)
            self._flush()
        else:
            self._take(completion)

    def _take(self, completion: Any) -> None:
        slot, size = completion.wr_id, completion.byte_len
        start = slot * self._message_bytes
        view = memoryview(self._receives.memory)[start : start + size]
        if (
            completion.opcode != Opcode.RECV
            or size < _HEAD.size
            or _HEAD.unpack_from(view) != (size - 4, p.ProduceRequest.API_KEY)
        ):
            self.close("it sent a message that is no Produce request")
            return
        self.context.counters.bytes_in += size
        self.brought += size
        while view:
            room = self._parser.writable()
            n = min(len(room), len(view))
            room[:n] = view[:n]
            self._parser.received(n)
            view = view[n:]
        self._owed.append(slot)
        self._count_buffer()
        self._work()

    # -- what differs from a socket ----------------------------------------------------------------

    def _work(self) -> None:
        super()._work()
        self._repost()

    def _repost(self) -> None:
        """Post the receives that are owed, once every frame is under way or answered and there is
        memory for the next."""
        if not self.closed and not self._parser.buffered and self._owed and self._make_room():
            self._post_receives()

    def _post_receives(self) -> None:
        owed, self._owed = self._owed, []
        try:
            for slot in owed:
                self.qp.post_recv(
                    slot, self._receives, slot * self._message_bytes, self._message_bytes
                )
        except RdmaError:
            self.close("")  # the queue pair has ended

    def _throttle(self) -> None:
        """Receives that are not posted hold a client back."""

    def memory_granted(self, size: int) -> None:
        if self.closed:
            self.context.memory.give(self, size)
        else:
            self._work()

    @property
    def halfway(self) -> bool:
        """Messages come whole."""
        return False

    def _push(self, buffers: Sequence[Any]) -> None:
        answer = b"".join((_SIZE.pack(sum(len(b) for b in buffers)), *buffers))
        if len(answer) > TWO_SIDED_ANSWER_BYTES:
            self.close(
                f"an answer of {len(answer)} bytes does not fit its buffer of"
                f" {TWO_SIDED_ANSWER_BYTES}"
            )
            return
        self._ready.append(answer)
        self.context.counters.bytes_out += len(answer)

    def _flush(self) -> None:
        if self._ready:
            self._repost()  # first, for whoever reads an answer may send its next request at once
        try:
            while self._ready and self._free and not self.closed:
                slot, answer = self._free.popleft(), self._ready.popleft()
                start = slot * TWO_SIDED_ANSWER_BYTES
                memoryview(self._answers.memory)[start : start + len(answer)] = answer
                self.qp.post_send(slot, self._answers, start, len(answer))
        except RdmaError:
            self.close("")

    # -- the end -----------------------------------------------------------------------------------

    def close(self, reason: str) -> None:
        """Close now; `reason` is logged, unless empty."""
        if self.closed:
            return
        self.closed = True
        if reason:
            log.warning(
                "RDMA client %s (queue pair %d) is cut: %s", self.client_id, self.qp.qp_num, reason
            )
        self._service.remove(self)
        self._ready.clear()
        self.qp.close()
        self._domain.close()
        self.connection_lost(None)

    def abort(self) -> None:
        """The same: nothing is owed that could be sent."""
        self.close("")
