"""Two connected ends of a channel over one provider, and footers as a hostile peer writes them."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from typing import Any

from kdirect.rdma import channel_probe, layout
from kdirect.rdma.channel import ChannelSet
from kdirect.rdma.contract import Memory
from tests.rdma.channel_model import generation
from tests.rdma.conftest import WAIT_MS, Rig

SLOTS, SLOT_BYTES = 4, 512


class Ends:
    """A channel from `near` to `far`, each of a device of its own."""

    def __init__(
        self, rig: Rig, *, slots: int = SLOTS, slot_bytes: int = SLOT_BYTES, most: int = 4
    ) -> None:
        self.network: Any = getattr(rig, "network", None)
        self.near = ChannelSet(rig.device, most=most, slots=slots, slot_bytes=slot_bytes)
        self.far = ChannelSet(rig.other_device, most=most, slots=slots, slot_bytes=slot_bytes)
        self.sender = self.near.sender("the far end")
        self.receiver = self.far.receiver("the near end")
        self.receiver.connect(self.sender.offer)
        self.sender.connect(self.receiver.offer)

    def send(self, payload: bytes, **header: Any) -> bool:
        """Through a staging slot."""
        buffer = self.sender.buffer()
        if buffer is None:
            return False
        buffer[: len(payload)] = payload
        return self.sender.send(len(payload), **header)

    def until(self, condition: Callable[[], Any]) -> None:
        """Let time pass until it holds."""
        deadline = time.monotonic() + WAIT_MS / 1000
        while not condition():
            assert time.monotonic() < deadline, "it has not come true"
            if self.network is not None:
                self.network.step()
            else:
                time.sleep(0.0002)

    def receive(self) -> bytes:
        """The next payload, given back."""
        self.until(self.receiver.poll)
        payload = bytes(self.receiver.payload)
        self.receiver.release()
        return payload

    def forge(self, number: int, payload: bytes = b"forged", **changes: Any) -> None:
        """Put a buffer into the slot of that number as the peer's WRITE would, with `changes` to
        its footer."""
        ring: Memory = channel_probe.ring_memory(self.receiver)
        slots, slot_bytes = self.receiver.slots, self.receiver.slot_bytes
        fields = {
            "sequence": number,
            "batch": 0,
            "epoch": 0,
            "attempt": 0,
            "length": len(payload),
            "flags": 0,
            "kind": 0,
            "generation": generation(number, slots),
            "crc": None,
            **changes,
        }
        front = struct.pack(
            "<QIIII",
            *(fields[name] for name in ("sequence", "batch", "epoch", "attempt", "length")),
        )
        tail = struct.pack("<HBB", fields["flags"], fields["kind"], fields["generation"])
        crc = fields["crc"]
        if crc is None:
            crc = channel_probe.crc32c(payload + front + tail)
        footer = front + struct.pack("<I", crc) + tail
        assert len(footer) == layout.FOOTER_BYTES
        end = (number % slots + 1) * slot_bytes
        memoryview(ring)[end - len(payload) - len(footer) : end] = payload + footer
