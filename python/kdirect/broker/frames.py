"""Size-prefixed frames out of a stream of bytes.  No I/O, no protocol knowledge beyond the prefix.

A `FrameParser` owns the receive buffer.  The caller receives straight into `writable()`, reports
the count with `received(n)`, and takes frames with `next_frame()` until it returns None.  A frame
is a view of the buffer and is valid until the next `writable()`; a caller that keeps it copies it.

Invariants: the buffer grows with what has arrived, never with what a prefix merely promises (a peer
that announces 100 MB and sends nothing costs nothing); a size outside [0, max_bytes] is a
ProtocolError, after which the parser yields nothing more.
"""

from __future__ import annotations

import struct

from kdirect.errors import ProtocolError

INITIAL_BYTES = 64 << 10
_SIZE = struct.Struct(">i")


class FrameParser:
    """One connection's stream.  Not thread-safe."""

    __slots__ = ("_broken", "_buffer", "_end", "_start", "_view", "max_bytes")

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._buffer = bytearray(INITIAL_BYTES)
        self._view = memoryview(self._buffer)
        self._start = 0  # of the first byte not yet handed on
        self._end = 0  # of what was received
        self._broken = False

    @property
    def buffered(self) -> int:
        """Bytes received and not yet handed on."""
        return self._end - self._start

    @property
    def capacity(self) -> int:
        """Bytes of the receive buffer."""
        return len(self._buffer)

    def received_bytes(self) -> tuple[bytearray, int, int]:
        """(the receive buffer, where in it the bytes begin that are not handed on, where they end):
        for who takes frames out of it himself, and then calls `skip_to`."""
        return self._buffer, self._start, 0 if self._broken else self._end

    def skip_to(self, position: int) -> None:
        """What lies before `position` of the buffer, whole frames, was taken."""
        self._start = position

    def growth(self) -> int:
        """Bytes by which the next `writable()` makes the receive buffer larger."""
        held = self._end - self._start
        if held == 0 or self._end < len(self._buffer):
            return 0
        return max(0, self._next_size(held) - len(self._buffer))

    def _next_size(self, held: int) -> int:
        """The size of the buffer to take the place of a full one."""
        wanted = 4 + _SIZE.unpack_from(self._buffer, self._start)[0] if held >= 4 else 0
        if wanted > len(self._buffer) or held > len(self._buffer) // 2:
            return max(min(max(wanted, 0), 2 * held), 2 * INITIAL_BYTES, held + INITIAL_BYTES)
        return len(self._buffer)

    def trim(self) -> None:
        """Give the memory of a large frame back once it has passed, whether or not the peer sends
        more."""
        held = self._end - self._start
        if len(self._buffer) > 4 * INITIAL_BYTES and held <= INITIAL_BYTES:
            wanted = _SIZE.unpack_from(self._buffer, self._start)[0] if held >= 4 else 0
            if held == 0 or wanted <= INITIAL_BYTES:
                self._replace(2 * INITIAL_BYTES if held else INITIAL_BYTES, held)

    def writable(self) -> memoryview:
        """Where the next bytes go; never empty."""
        held = self._end - self._start
        if held == 0:
            self._start = self._end = 0
            self.trim()
        elif self._end == len(self._buffer):
            # Copied, not moved: frames handed out before may still be looked at by a view of their
            # own.
            self._replace(self._next_size(held), held)
        return self._view[self._end :]

    def received(self, count: int) -> None:
        """`count` bytes were written into `writable()`."""
        self._end += count

    def next_frame(self) -> memoryview | None:
        """The next whole frame without its prefix, or None: more bytes are needed."""
        start = self._start
        held = self._end - start
        if held < 4 or self._broken:
            return None
        size = _SIZE.unpack_from(self._buffer, start)[0]
        if size < 0 or size > self.max_bytes:
            self._broken = True
            if size < 0:
                raise ProtocolError(f"frame of negative size {size}")
            raise ProtocolError(
                f"frame of {size} bytes", hint=f"socket.request.max.bytes is {self.max_bytes}"
            )
        if held < 4 + size:
            return None
        self._start = start + 4 + size
        return self._view[start + 4 : self._start]

    def _replace(self, size: int, held: int) -> None:
        buffer = bytearray(size)
        buffer[:held] = self._view[self._start : self._end]
        self._buffer = buffer
        self._view = memoryview(buffer)
        self._start = 0
        self._end = held
