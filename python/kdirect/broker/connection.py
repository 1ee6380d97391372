"""One TCP connection: requests in, responses out, in order.

Owns: the socket's two directions and the order of answers.  Knows nothing of what requests mean:
`ConnectionContext.dispatch` turns a frame into an `Answer`.

Rules, and why:

- Answers leave in the order of requests, whatever finishes first.
- A request that waits (a long-polling Fetch, a Produce that awaits fsync) does not hold up the
  execution of later ones; a *blocking* one (joining a group, creating a topic) does, because
  Kafka's clients may count on its effects being there before the next request of the same
  connection is looked at.
- Memory: the receive buffer beyond its first size, and requests that wait, are counted
  (`request_memory`); while the broker holds too much, this connection is not read from.
- Back-pressure: this connection is not read from while too many requests are unanswered, while too
  many bytes wait for a blocking one to end, or while the peer does not read its answers.
- One connection that has sent many requests does not hold up the others: after `TURN_S` it waits
  until the others have had their turn, and nothing more is read from it until then.  An answer that
  makes room for further requests asks for a turn, too: hundreds of answers may be ready at once.
- Plain requests (`kdirect.broker.plain_requests`) are taken out of the receive buffer many at a
  time, and only while no earlier request waits, so that the order of answers is that of requests.
- Response bytes are written with writev while the socket takes them; what is left is kept as views,
  so that a slow reader costs no copies of the bytes that it has not taken yet.  A view of a mapped
  segment keeps the mapping until the socket has its bytes.  The transport writes nothing but what
  is left when the connection is closed: it would copy.

All methods run on the event loop.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import os
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kdirect.broker.answers import Answer
from kdirect.broker.files import TURN_S
from kdirect.broker.frames import INITIAL_BYTES, FrameParser
from kdirect.broker.plain_requests import PlainRequests
from kdirect.broker.request_memory import RequestMemory
from kdirect.broker.services import Counters
from kdirect.errors import ProtocolError
from kdirect.wire.environment import Environment

log = logging.getLogger("kdirect.broker")

_SIZE = struct.Struct(">i")
_IOV_MAX = 1024
FLUSH_BYTES = 256 << 10
# How many bytes are read while a blocking request waits, so that the broker notices a peer that has
# gone.
BLOCKED_BYTES = 1 << 20


class Turns:
    """The order in which connections that have more to do go on: one after the other, `TURN_S` for
    all of them in each round of the event loop, however many they are."""

    def __init__(self, environment: Environment) -> None:
        self._clock = environment.monotonic
        self._waiting: deque[Callable[[], None]] = deque()
        self._due = False

    def ask(self, take: Callable[[], None]) -> None:
        """Call `take` when it is its turn, never before this returns."""
        self._waiting.append(take)
        self._schedule()

    def _schedule(self) -> None:
        if self._waiting and not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._give)

    def _give(self) -> None:
        self._due = False
        end = self._clock() + TURN_S
        try:
            # One that asks again meanwhile has its turn in the next round of the loop.
            for _ in range(len(self._waiting)):
                self._waiting.popleft()()
                if self._clock() >= end:
                    return
        finally:
            self._schedule()


@dataclass(frozen=True, slots=True)
class ConnectionContext:
    """What a connection is given by the server that accepted it.

    `dispatch` executes one request; ProtocolError closes the connection.  `opened` and `lost` are
    told of the connection's life.  All are called on the event loop."""

    dispatch: Callable[[Connection, memoryview], Answer]
    opened: Callable[[Connection], None]
    lost: Callable[[Connection], None]
    memory: RequestMemory
    turns: Turns
    counters: Counters
    environment: Environment
    max_request_bytes: int
    max_in_flight: int  # requests without an answer
    plain: PlainRequests | None = None


class _Slot:
    """The place of one unanswered request in the order of answers.  `done`: `answer` is what to
    send.  `size`: bytes of the request, while it waits."""

    __slots__ = ("answer", "done", "header", "size")

    def __init__(self, answer: Answer, *, done: bool, size: int = 0) -> None:
        self.answer = answer
        self.header = answer.header
        self.done = done
        self.size = size


class Connection(asyncio.BufferedProtocol):
    """Hashable by identity.  `peer` is ``host:port``; `client_id` is that of the latest request."""

    def __init__(self, context: ConnectionContext, listener: int) -> None:
        self.context = context
        self.listener = listener
        self.client_id: str | None = None
        self.peer = "?"
        self.local: tuple[str, int] = ("", 0)
        self.used_access = False
        self.used_by_replica = False  # another broker fetches by it
        self.closed = False
        self._clock = context.environment.monotonic
        self.last_active = self._clock()
        self._plain = context.plain
        self._transport: Any = None
        self._fd = -1
        self._parser = FrameParser(context.max_request_bytes)
        self._max_in_flight = context.max_in_flight
        self._slots: deque[_Slot] = deque()
        self._out: list[Any] = []
        self._out_bytes = 0
        self._pending: deque[memoryview] = deque()  # owed to the peer, not written
        self._tasks: set[asyncio.Task[None]] = set()
        self._blocked = False
        self._write_paused = False  # the socket is full, and `_writer` tells when it is not
        self._writer = -1  # a descriptor of the socket, while there is something pending
        self._read_paused = False
        self._working = False
        self._charged = 0  # bytes of the receive buffer that are counted
        self.brought = 0  # bytes received
        self._waits_for_turn = False

    # -- transport callbacks -----------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        peer = transport.get_extra_info("peername")
        self.peer = (
            f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) and len(peer) >= 2 else str(peer)
        )
        local = transport.get_extra_info("sockname")
        self.local = (
            (local[0], local[1]) if isinstance(local, tuple) and len(local) >= 2 else ("", 0)
        )
        self._fd = transport.get_extra_info("socket").fileno()
        self.context.opened(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._parser.writable()

    def buffer_updated(self, nbytes: int) -> None:
        self.context.counters.bytes_in += nbytes
        self.brought += nbytes
        self._parser.received(nbytes)
        self._work()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        for task in list(self._tasks):
            task.cancel()
        for slot in self._slots:
            awaited = slot.answer.awaited
            if awaited is not None and inspect.getcoroutinestate(awaited) == inspect.CORO_CREATED:
                awaited.close()  # it never began: say so, or Python warns
        self._slots.clear()
        self._pending.clear()
        self._end_writer()
        self.context.memory.leave(self)
        self.context.lost(self)

    # -- requests ----------------------------------------------------------------------------------

    def _work(self) -> None:
        """Execute what has arrived, as far as the rules of this module let it."""
        if self._working or self.closed:
            return
        if self._waits_for_turn:
            self._throttle()
            return
        self._working = True
        end = self._clock() + TURN_S
        try:
            while (
                not self._blocked
                and not self._write_paused
                and len(self._slots) < self._max_in_flight
            ):
                if not self._answer_plain(end):
                    frame = self._parser.next_frame()
                    if frame is None:
                        break
                    answer = self.context.dispatch(self, frame)
                    self.last_active = self._clock()
                    if answer.awaited is not None:
                        self._begin(answer, len(frame))
                    elif answer.buffers is not None:
                        self._answer(answer)
                # Below that, one flush does for all requests that arrived together.
                if self._out_bytes >= FLUSH_BYTES:
                    self._flush()
                if self.closed:
                    return
                if self.last_active >= end:
                    self._ask_for_turn()
                    break
        except ProtocolError as e:
            self.close(str(e))
            return
        except Exception:  # outside of a callback of the transport nobody else would close it
            log.exception("closing %s: a request failed", self.peer)
            self.close("")
            return
        finally:
            self._working = False
            self._flush()
        self._throttle()

    def _answer_plain(self, until: float) -> bool:
        """Answer the plain requests that come next, unless one before them waits; were there
        any?"""
        plain = self._plain
        if plain is None or self._slots:
            return False
        buffer, start, end = self._parser.received_bytes()
        taken = plain.serve(self, buffer, start, end, self._parser.max_bytes, until)
        if taken == start:
            return False
        self._parser.skip_to(taken)
        self.last_active = plain.now
        if plain.answers:
            self._out.append(plain.answers)
            self._out_bytes += len(plain.answers)
            self.context.counters.bytes_out += len(plain.answers)
        if plain.told is not None:
            self._answer(plain.told)
        return True

    def _ask_for_turn(self) -> None:
        if not self._waits_for_turn:
            self._waits_for_turn = True
            self.context.turns.ask(self._take_turn)

    def _take_turn(self) -> None:
        self._waits_for_turn = False
        self._work()

    def _begin(self, answer: Answer, size: int) -> None:
        """Wait for the answer to a request of `size` bytes."""
        slot = _Slot(answer, done=False, size=size)
        self.context.memory.hold(self, size)
        self._slots.append(slot)
        self._blocked = answer.blocking
        task = asyncio.ensure_future(self._finish(slot))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _finish(self, slot: _Slot) -> None:
        waiting = slot.answer
        assert waiting.awaited is not None
        try:
            answer = await waiting.awaited
        except asyncio.CancelledError:
            raise
        except ProtocolError as e:
            self.close(str(e))
            return
        except Exception:
            log.exception("closing %s: a request failed", self.peer)
            self.close("")
            return
        if self.closed:
            return
        slot.done = True
        slot.answer = answer
        size, slot.size = slot.size, 0
        self.context.memory.give(self, size)
        if waiting.blocking:
            self._blocked = False
        while self._slots and self._slots[0].done:
            ready = self._slots.popleft()
            if ready.answer.buffers is not None:
                self._push([ready.header, *ready.answer.buffers])
        self._flush()
        if self._parser.buffered:
            self._ask_for_turn()
        else:
            self._work()

    def _answer(self, answer: Answer) -> None:
        """Send an answer that is there, after those to earlier requests."""
        if self._slots:
            self._slots.append(_Slot(answer, done=True))
        else:
            assert answer.buffers is not None
            self._push([answer.header, *answer.buffers])

    def _throttle(self) -> None:
        """Stop or resume reading."""
        if self.closed:
            return
        full = (
            self._waits_for_turn
            or self._write_paused
            or len(self._slots) >= self._max_in_flight
            or (self._blocked and self._parser.buffered >= BLOCKED_BYTES)
        )
        full = full or not self._make_room()
        if full != self._read_paused:
            self._read_paused = full
            if full:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    # -- memory ------------------------------------------------------------------------------------

    def _make_room(self) -> bool:
        """Have room for the next bytes, if the broker's bound allows it; False: `memory_granted`
        comes later."""
        self._parser.trim()
        self._count_buffer()
        if not self.context.memory.take(self, self._parser.growth()):
            return False
        self._grow()
        return True

    def _grow(self) -> None:
        """The buffer takes what was counted for it."""
        self._charged += self._parser.growth()
        self._parser.writable()
        self._count_buffer()

    def _count_buffer(self) -> None:
        """Bring what is counted in line with what there is."""
        more = max(0, self._parser.capacity - INITIAL_BYTES) - self._charged
        self._charged += more
        if more > 0:
            self.context.memory.hold(self, more)
        elif more < 0:
            self.context.memory.give(self, -more)

    def memory_granted(self, size: int) -> None:
        """See `request_memory.Holder`."""
        if self.closed:
            self.context.memory.give(self, size)
            return
        self._grow()
        self._throttle()

    @property
    def halfway(self) -> bool:
        """See `request_memory.Holder`.  While this broker keeps the connection from going on,
        nothing is awaited from the peer."""
        return (
            bool(self._parser.buffered)
            and not self._blocked
            and len(self._slots) < self._max_in_flight
        )

    # -- answers -----------------------------------------------------------------------------------

    def _push(self, buffers: Sequence[Any]) -> None:
        size = sum(len(b) for b in buffers)
        self._out.append(_SIZE.pack(size))
        self._out.extend(buffers)
        self._out_bytes += size
        self.context.counters.bytes_out += size + 4

    def _flush(self) -> None:
        """Hand what `_push` collected to the socket."""
        if not self._out or self.closed or self._transport.is_closing():
            return
        out, self._out, self._out_bytes = self._out, [], 0
        if self._pending:
            self._pending.extend(memoryview(b) for b in out)
            return
        try:
            sent = os.writev(self._fd, out[:_IOV_MAX])
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            self._transport.abort()
            return
        for i, b in enumerate(out):
            if sent < len(b):
                self._pending.append(memoryview(b)[sent:])
                self._pending.extend(memoryview(rest) for rest in out[i + 1 :])
                break
            sent -= len(b)
        if self._pending:
            self._feed()

    def _feed(self) -> None:
        """Write what is owed, as far as the socket takes it; `_go_on_writing` writes the rest when
        it takes more."""
        while self._pending:
            try:
                sent = os.writev(self._fd, list(itertools.islice(self._pending, _IOV_MAX)))
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                self._transport.abort()
                return
            while sent:
                view = self._pending.popleft()
                if sent < len(view):
                    self._pending.appendleft(view[sent:])
                    break
                sent -= len(view)
        if self._pending and self._writer < 0:
            # The transport has the descriptor itself, and would copy what it is to write.
            try:
                self._writer = os.dup(self._fd)
            except OSError as e:  # there are no more, and nobody would go on writing
                log.warning("closing %s: it cannot be waited for: %s", self.peer, e)
                self._transport.abort()
                return
            self._write_paused = True
            asyncio.get_running_loop().add_writer(self._writer, self._go_on_writing)

    def _go_on_writing(self) -> None:
        """The socket takes more."""
        if self._transport.is_closing():
            self._end_writer()
            return
        self._feed()
        if not self._pending and self._writer >= 0:
            self._end_writer()
            self._write_paused = False
            self._work()

    def _end_writer(self) -> None:
        if self._writer >= 0:
            asyncio.get_running_loop().remove_writer(self._writer)
            os.close(self._writer)
            self._writer = -1

    # -- the end -----------------------------------------------------------------------------------

    def close(self, reason: str) -> None:
        """Close now; `reason` is logged, unless empty."""
        if self.closed:
            return
        if reason:
            log.warning(
                "closing connection from %s (client id %s): %s", self.peer, self.client_id, reason
            )
        self._flush()
        self.closed = True
        self._end_writer()
        # The transport sends what it has been given before it closes.
        while self._pending and not self._transport.is_closing():
            self._transport.write(self._pending.popleft())
        self._transport.close()

    def abort(self) -> None:
        """Close without sending what is owed."""
        self._transport.abort()

    @property
    def tasks(self) -> set[asyncio.Task[None]]:
        """Requests under way."""
        return set(self._tasks)

    @property
    def unanswered(self) -> int:
        """Requests that wait for their answer."""
        return len(self._slots)
