"""The fields that records of Kafka's own topics, and what members of groups send, consist of: big
endian, in order, without names.  No I/O.

Owns: what every kind of record reads and writes in the same way.  Which fields a record has, the
modules of the records know (`group_records`, `consumer_group_records`, `transaction_records`,
`consumer_protocol`).
"""

from __future__ import annotations

import struct

from kdirect.errors import FormatError

I16 = struct.Struct(">h")
I32 = struct.Struct(">i")
I64 = struct.Struct(">q")

TEXT_BYTES = 32767  # of one string with a length of 16 bits, in UTF-8


def raw_text(value: str, what: str) -> bytes:
    """A text in UTF-8 that a length of 16 bits can be given of.  FormatError; `what` it does not
    fit into."""
    raw = value.encode()
    if len(raw) > TEXT_BYTES:
        raise FormatError(
            f"a text of {len(raw)} bytes does not fit into {what}", hint=f"{TEXT_BYTES} bytes do"
        )
    return raw


class FieldReader:
    """Reads fields in order; FormatError where the bytes do not hold them.  `what` the bytes are is
    said in errors."""

    what = "a record of __consumer_offsets"

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.pos = 0

    def left(self) -> int:
        return len(self.data) - self.pos

    def take(self, n: int) -> bytes:
        if n < 0 or n > len(self.data) - self.pos:
            raise FormatError(f"{self.what} is cut short")
        self.pos += n
        return self.data[self.pos - n : self.pos]

    def i16(self) -> int:
        return int(I16.unpack(self.take(2))[0])

    def i32(self) -> int:
        return int(I32.unpack(self.take(4))[0])

    def i64(self) -> int:
        return int(I64.unpack(self.take(8))[0])

    def uvarint(self) -> int:
        value = 0
        for shift in (0, 7, 14, 21, 28):
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise FormatError(f"{self.what} has a length of more than 32 bits")

    def decoded(self, n: int) -> str:
        """A text of `n` bytes."""
        try:
            return self.take(n).decode()
        except UnicodeDecodeError as e:
            raise FormatError(f"{self.what} holds text that is not UTF-8") from e

    def null_short_text(self) -> str | None:
        """A text whose length has 16 bits; None where that is -1."""
        n = self.i16()
        return None if n == -1 else self.decoded(n)

    def tags(self) -> dict[int, bytes]:
        """Tagged fields, by their tags."""
        out = {}
        for _ in range(self.uvarint()):
            tag = self.uvarint()
            out[tag] = self.take(self.uvarint())
        return out
