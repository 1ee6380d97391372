"""What kdirect adds to the metadata records of a remote segment, in Kafka's field for that.  Pure.

Little endian: ``u8 version = 1, i32 leader epoch, u64 bytes of the object``.  The epoch is that of
the leadership that wrote the record: records of an older one than others before them count for
nothing.  The size of the object is known once it is stored, 0 before; with it one ranged GET brings
the end of the object, where its indexes are.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

_CUSTOM = struct.Struct("<BiQ")
_VERSION = 1
NO_EPOCH = -1


class CustomMetadata(NamedTuple):
    """See the module.  `leader_epoch` is NO_EPOCH in records that are not kdirect's."""

    leader_epoch: int = NO_EPOCH
    object_bytes: int = 0

    def pack(self) -> bytes:
        return _CUSTOM.pack(_VERSION, self.leader_epoch, self.object_bytes)


def parse_custom(data: bytes | None) -> CustomMetadata:
    """What the field says; nothing is said by what is not kdirect's."""
    if data is None or len(data) != _CUSTOM.size or data[0] != _VERSION:
        return CustomMetadata()
    _, epoch, size = _CUSTOM.unpack(data)
    return CustomMetadata(max(epoch, NO_EPOCH), size)


__all__ = ["NO_EPOCH", "CustomMetadata", "parse_custom"]
