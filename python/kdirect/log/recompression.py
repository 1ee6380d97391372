"""Produced batches in the codec that their topic asks for (``compression.type``).

Law of the file: pure, and of bytes that nobody changes.  The rules are those of Kafka's
`LogValidator`: with ``producer`` batches stay as they came; else a batch of another codec is
decompressed and compressed (``uncompressed``: not compressed), and one of the topic's codec stays,
whatever its level.  Only the codec's bits, the length, the checksum and the records' form change:
offsets, timestamps, the producer's id, epoch and sequence, and the kind of the batch are what they
were.

The new checksum must not hide damage, so what is damaged, what is no whole batch of records and
what is too large already goes on as it came: the kernel refuses that, with the code that it has.

Decompressing takes long: never on an event loop.  Producers over RDMA change bytes while they are
looked at, so they get no access to the head of such a log (`kdirect.broker.produce_access`); they
produce by Write+Send's messages or TCP.
"""

from __future__ import annotations

import threading
from struct import Struct
from typing import Any

from kdirect.errors import KdirectError
from kdirect.format import layout
from kdirect.format.batch import CODEC_NAMES, BatchInfo, crc32c, iterate_batches
from kdirect.format.compression import Compressor, Decompressor, codec_of
from kdirect.log.clean_run import records_are_whole
from kdirect.log.config import Codec

_PUT_LENGTH, _PUT_ATTRIBUTES, _PUT_CRC = Struct(">i"), Struct(">h"), Struct(">I")
_own = threading.local()  # a thread's tools; making one of zstd takes longer than a small batch


def _compressor(codec: Codec) -> Compressor:
    tools: dict[Codec, Compressor] = _own.__dict__.setdefault("tools", {})
    if codec not in tools:
        tools.clear()  # there are few codecs in use, and their memory is large
        tools[codec] = Compressor(*codec)
    return tools[codec]


def _codec(info: BatchInfo) -> int:
    return info.attributes & layout.ATTRIBUTE_CODEC_MASK


def is_kept(data: Any, codec: Codec) -> bool:
    """Do the batches stay as they are?  Also where they are none; the kernel says so."""
    number = codec_of(codec.name)
    try:
        return all(_codec(info) == number for info in iterate_batches(data, check_crc=False))
    except KdirectError:
        return True


def recompressed(
    data: Any, codec: Codec, *, max_batch_bytes: int, max_plain_bytes: int
) -> Any | None:
    """The batches in this codec; `data` itself where they are not to be changed.  None: the records
    of the request cannot be decompressed to at most `max_plain_bytes` together, or are not as many
    as their batch says.  A batch that is larger than `max_batch_bytes` afterwards is returned as it
    is, and no more of the request: the kernel refuses it for that."""
    tool = _compressor(codec)
    data = bytes(data)
    try:
        found = list(iterate_batches(data))
    except KdirectError:
        return data
    if any(
        info.is_control or info.size > max_batch_bytes or _codec(info) >= len(CODEC_NAMES)
        for info in found
    ):
        return data
    out = []
    left = max_plain_bytes  # of the whole request: small batches may stand for any number of bytes
    for info in found:
        batch = data[info.position : info.position + info.size]
        if _codec(info) != tool.codec:
            plain = _plain_records(batch, info, left)
            if plain is None:
                return None
            if _codec(info):
                left -= len(plain)
            batch = _with_records(batch, info, tool, plain)
            if len(batch) > max_batch_bytes:
                return batch
        out.append(batch)
    return out[0] if len(out) == 1 else b"".join(out)


def _plain_records(batch: bytes, info: BatchInfo, max_bytes: int) -> Any | None:
    """The records of a batch, at most so many bytes where they are compressed; None: see
    `recompressed`."""
    body: Any = batch[layout.BATCH_HEADER_BYTES :]
    codec = _codec(info)
    if codec:
        try:
            body = Decompressor().run(codec, body, max_bytes)
        except KdirectError:
            return None
    return body if records_are_whole(body, info.records_count) else None


def _with_records(batch: bytes, info: BatchInfo, tool: Compressor, body: Any) -> bytes:
    """The batch with these records in the codec of `tool`, and a checksum of them."""
    new = bytearray(batch[: layout.BATCH_HEADER_BYTES])
    new += tool.run(body)
    length = len(new) - layout.BATCH_LENGTH_PREFIX_BYTES
    attributes = info.attributes & ~layout.ATTRIBUTE_CODEC_MASK | tool.codec
    _PUT_LENGTH.pack_into(new, layout.BATCH_LENGTH, length)
    _PUT_ATTRIBUTES.pack_into(new, layout.BATCH_ATTRIBUTES, attributes)
    _PUT_CRC.pack_into(new, layout.BATCH_CRC, crc32c(memoryview(new)[layout.BATCH_ATTRIBUTES :]))
    return bytes(new)
