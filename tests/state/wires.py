"""An exchange in memory whose buffers may come twice, which no channel over RDMA does.

It offers what `kdirect.state.exchange.Exchange` does, for real executors of the simulation: what an
executor makes of a delta that is repeated, late or of an older attempt must not depend on channels
that never deliver one.  Credits are counted as those of a channel.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kdirect.errors import ChannelLostError, StateExchangeError
from kdirect.rdma.layout import FOOTER_BYTES
from kdirect.state.exchange import Address


@dataclass(frozen=True, slots=True)
class Buffer:
    """A payload and its footer."""

    data: bytes
    sequence: int
    attempt: int
    batch: int
    epoch: int
    flags: int = 0
    kind: int = 0
    is_repeated: bool = False  # the fabric has no credit for it


class Wire:
    """One way from one exchange to another, with so many credits."""

    def __init__(self, credits: int) -> None:
        self.credits = credits
        self.flying: deque[Buffer] = deque()
        self.is_broken = False
        self.posted = self.returned = 0

    def repeat(self, buffer: Buffer) -> None:
        self.flying.appendleft(replace(buffer, is_repeated=True))

    def check(self) -> None:
        if self.is_broken:
            raise ChannelLostError("the other end has gone")


class Sender:
    """See `SendingEnd`.  A buffer is copied when it is sent, so its source is free at once."""

    def __init__(self, exchange: WireExchange, peer: int) -> None:
        self._exchange, self._peer = exchange, peer
        self._staging = bytearray(exchange.slot_bytes - FOOTER_BYTES)
        self.wire: Wire | None = None
        self.sent = 0

    @property
    def completed(self) -> int:
        return self.sent

    @property
    def may_send(self) -> bool:
        assert self.wire is not None
        self.wire.check()
        return self.wire.posted - self.wire.returned < self.wire.credits

    def send_from(self, source: Any, position: int, length: int, **header: Any) -> bool:
        assert self.wire is not None
        if not self.may_send:
            return False
        data = bytes(memoryview(source)[position : position + length])
        buffer = Buffer(data, self.sent, **header)
        self.wire.flying.append(buffer)
        self.wire.posted += 1
        self.sent += 1
        self._exchange.note_sent(self._peer, buffer)
        return True

    def buffer(self) -> memoryview | None:
        return memoryview(self._staging) if self.may_send else None

    def send(self, length: int, **header: Any) -> bool:
        return self.send_from(self._staging, 0, length, **header)

    def refresh(self) -> None:
        assert self.wire is not None
        self.wire.check()


class Receiver:
    """See `ReceivingEnd`."""

    def __init__(self, exchange: WireExchange) -> None:
        self._exchange = exchange
        self.wire: Wire | None = None
        self._present: Buffer | None = None
        self._words = np.zeros(0, np.uint64)

    def __getattr__(self, name: str) -> Any:
        """What the footer of the present buffer says."""
        return getattr(self._present, name)

    @property
    def payload(self) -> memoryview:
        return memoryview(self._words).cast("B")[: self.length]

    @property
    def address(self) -> int:
        return int(self._words.ctypes.data)

    @property
    def length(self) -> int:
        assert self._present is not None
        return len(self._present.data)

    def poll(self) -> bool:
        if self._present is None and self.wire is not None:
            if not self.wire.flying:
                self.wire.check()
                return False
            self._present = self.wire.flying.popleft()
            data = self._present.data
            self._words = np.frombuffer(data + bytes(-len(data) % 8), np.uint64).copy()
        return self._present is not None

    def release(self) -> None:
        assert self._present is not None and self.wire is not None
        self.wire.returned += not self._present.is_repeated
        self._present = None
        self._exchange.world.news += 1


class WireExchange:
    """See `Exchange`.  `world` has all wires, by the names of two exchanges."""

    kind = "wires"
    completion_wakes = True  # a buffer is complete when it is sent

    def __init__(self, world: Any, index: int, executors: int, slot_bytes: int) -> None:
        self.world, self.index = world, index
        self.slot_bytes = slot_bytes
        world.exchanges += 1
        self.name = world.exchanges
        others = [i for i in range(executors) if i != index]
        self.senders = {i: Sender(self, i) for i in others}
        self.receivers = {i: Receiver(self) for i in others}
        self.sources: list[Any] = []

    def address(self) -> Address:
        return {"exchange": self.kind, "name": self.name}

    def listen(self, addresses: Any) -> None:
        for i, receiver in self.receivers.items():
            receiver.wire = self.world.wire(addresses[i]["name"], self.name)

    def connect(self, addresses: Any) -> None:
        for i, sender in self.senders.items():
            sender.wire = self.world.wire(self.name, addresses[i]["name"])
            if sender.wire.is_broken:
                raise StateExchangeError(f"executor {i} cannot be reached")

    def add_source(self, memory: Any) -> None:
        self.sources.append(memory)

    def wait(self, timeout_ms: int) -> bool:
        return any(r.wire is not None and r.wire.flying for r in self.receivers.values())

    def note_sent(self, peer: int, buffer: Buffer) -> None:
        self.world.news += 1
        self.world.sent.append((self.index, peer, buffer))

    def close(self) -> None:
        """The process ends, or leaves: all its wires break."""
        for end in (*self.senders.values(), *self.receivers.values()):
            if end.wire is not None:
                end.wire.is_broken = True
        self.world.news += 1

    def check(self) -> bool:
        """Are credits conserved?"""
        wires = [s.wire for s in self.senders.values() if s.wire is not None]
        return all(0 <= wire.posted - wire.returned <= wire.credits for wire in wires)
