"""A second, slow and simple implementation of record batch v2, to hold the fast one against.

It reads one number at a time in Python and shares nothing with the code under test; its CRC is
kafka-python's.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kafka.record.util import calc_crc32c

HEADER = struct.Struct(">qiibIhiqqqhii")
Row = tuple  # (offset, timestamp_ms, key, value, headers)


class Malformed(ValueError):
    """The reference refuses the bytes."""


class Reference:
    """Builds and reads batches; see the module."""

    Malformed = Malformed

    @staticmethod
    def varint(n: int) -> bytes:
        u = (n << 1) ^ (n >> 63)
        u &= (1 << 64) - 1
        out = bytearray()
        while u >= 0x80:
            out.append(u & 0x7F | 0x80)
            u >>= 7
        out.append(u)
        return bytes(out)

    @classmethod
    def text(cls, data: bytes | None) -> bytes:
        return cls.varint(-1) if data is None else cls.varint(len(data)) + data

    @classmethod
    def record(
        cls,
        offset_delta: int,
        timestamp_delta: int,
        key: bytes | None,
        value: bytes | None,
        headers: Any = (),
    ) -> bytes:
        body = (
            b"\0"
            + cls.varint(timestamp_delta)
            + cls.varint(offset_delta)
            + cls.text(key)
            + cls.text(value)
            + cls.varint(len(headers))
        )
        for name, content in headers:
            body += cls.text(name) + cls.text(content)
        return cls.varint(len(body)) + body

    @staticmethod
    def batch(records: bytes, count: int, **fields: Any) -> bytes:
        """A batch around any bytes at all, with a correct CRC unless `crc` is given."""
        f = {
            "base_offset": 0,
            "length": len(records) + 49,
            "leader_epoch": -1,
            "magic": 2,
            "attributes": 0,
            "last_offset_delta": count - 1,
            "base_timestamp": 1_700_000_000_000,
            "max_timestamp": 1_700_000_000_000,
            "producer_id": -1,
            "producer_epoch": -1,
            "base_sequence": -1,
            **fields,
        }
        tail = (
            struct.pack(
                ">hiqqqhii",
                f["attributes"],
                f["last_offset_delta"],
                f["base_timestamp"],
                f["max_timestamp"],
                f["producer_id"],
                f["producer_epoch"],
                f["base_sequence"],
                count,
            )
            + records
        )
        crc = f.get("crc", calc_crc32c(tail))
        return (
            struct.pack(">qiibI", f["base_offset"], f["length"], f["leader_epoch"], f["magic"], crc)
            + tail
        )

    @classmethod
    def simple(
        cls, rows: list[tuple[bytes | None, bytes | None]], base_offset: int = 0, **fields: Any
    ) -> bytes:
        """A batch of (key, value) pairs."""
        records = b"".join(cls.record(i, i, key, value) for i, (key, value) in enumerate(rows))
        return cls.batch(records, len(rows), base_offset=base_offset, **fields)

    @staticmethod
    def fix_crc(data: bytes) -> bytes:
        """The one batch in `data`, its CRC made right."""
        return data[:17] + struct.pack(">I", calc_crc32c(data[21:])) + data[21:]

    # -- reading -----------------------------------------------------------------------------------

    @staticmethod
    def read_varint(data: bytes, position: int, end: int) -> tuple[int, int]:
        u = 0
        for shift in range(0, 70, 7):
            if position >= end:
                raise Malformed("number is cut off")
            byte = data[position]
            position += 1
            u |= (byte & 0x7F) << shift
            if byte < 0x80:
                u &= (1 << 64) - 1
                return (u >> 1) ^ -(u & 1), position
        raise Malformed("number is too long")

    @classmethod
    def read_text(cls, data: bytes, position: int, end: int) -> tuple[bytes | None, int]:
        n, position = cls.read_varint(data, position, end)
        if n < -1 or n > end - position:
            raise Malformed("length")
        return (None, position) if n < 0 else (data[position : position + n], position + n)

    @classmethod
    def read_records(
        cls, data: bytes, count: int, base_offset: int, last_offset_delta: int, base_timestamp: int
    ) -> list[Row]:
        """The records of an uncompressed batch, or Malformed."""
        out: list[Row] = []
        position, previous = 0, -1
        if count * 7 > len(data):
            raise Malformed("count")
        for _ in range(count):
            n, position = cls.read_varint(data, position, len(data))
            if n < 1 or n > len(data) - position:
                raise Malformed("record length")
            end = position + n
            timestamp_delta, position = cls.read_varint(data, position + 1, end)
            offset_delta, position = cls.read_varint(data, position, end)
            key, position = cls.read_text(data, position, end)
            value, position = cls.read_text(data, position, end)
            n, position = cls.read_varint(data, position, end)
            if n < 0 or n > (end - position) // 2:
                raise Malformed("headers count")
            headers = []
            for _ in range(n):
                name, position = cls.read_text(data, position, end)
                if name is None:
                    raise Malformed("header key")
                content, position = cls.read_text(data, position, end)
                headers.append((name.decode("utf-8", "replace"), content))
            if position != end:
                raise Malformed("record end")
            if not previous < offset_delta <= last_offset_delta:
                raise Malformed("offsets")
            previous = offset_delta
            out.append(
                (
                    base_offset + offset_delta,
                    base_timestamp + timestamp_delta,
                    key,
                    value,
                    tuple(headers),
                )
            )
        if position != len(data):
            raise Malformed("bytes left")
        return out

    @classmethod
    def read_batch(cls, data: bytes) -> list[Row] | None:
        """The records of one uncompressed batch at the start of `data`; None: it is incomplete; or
        Malformed."""
        if len(data) < 12:
            return None
        base_offset, length = struct.unpack_from(">qi", data)
        if not 49 <= length <= 2**31 - 1 - 12:
            raise Malformed("length")
        if len(data) > 16 and data[16] != 2:
            raise Malformed("magic")
        if len(data) < 12 + length:
            return None
        f = HEADER.unpack_from(data)
        attributes, last_offset_delta, base_timestamp, max_timestamp, count = (
            f[5],
            f[6],
            f[7],
            f[8],
            f[12],
        )
        if (
            base_offset < 0
            or last_offset_delta < 0
            or base_offset + last_offset_delta >= 2**63 - 1
            or count < 0
        ):
            raise Malformed("header")
        if f[4] != calc_crc32c(data[21 : 12 + length]):
            raise Malformed("crc")
        if attributes & 7:
            raise Malformed("the reference reads uncompressed batches only")
        rows = (
            []
            if attributes & 0x20
            else cls.read_records(
                data[61 : 12 + length], count, base_offset, last_offset_delta, base_timestamp
            )
        )
        return [(r[0], max_timestamp, *r[2:]) for r in rows] if attributes & 8 else rows


@pytest.fixture(scope="session")
def ref() -> type[Reference]:
    return Reference


@pytest.fixture(scope="session")
def golden() -> Path:
    return Path(__file__).parent / "golden"


class Guarded:
    """Memory whose last byte is followed by a page that may not be touched: reading too far kills
    the process."""

    def __init__(self, capacity: int) -> None:
        page = mmap.PAGESIZE
        self.bytes = -(-capacity // page) * page
        self._map = mmap.mmap(-1, self.bytes + page)
        self._view = (ctypes.c_char * (self.bytes + page)).from_buffer(self._map)
        self.base = ctypes.addressof(self._view)
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        if libc.mprotect(self.base + self.bytes, page, 0):
            raise OSError(ctypes.get_errno(), "mprotect")

    def put(self, data: bytes) -> int:
        """Lay `data` directly before the forbidden page; its address."""
        address = self.base + self.bytes - len(data)
        ctypes.memmove(address, data, len(data))
        return address


@pytest.fixture(scope="session")
def guarded() -> Iterator[Guarded]:
    yield Guarded(1 << 20)
