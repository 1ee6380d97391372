"""Records of aborted transactions, taken out of what a Fetch of committed records has brought.

Law of the file: pure.  A broker names the aborted transactions of an answer by producer id and
first offset; each ends at its marker.  The batches are made control batches in a copy of the bytes,
so that every decoder skips them as it does markers, and offsets stay what they are.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from kdirect.format import layout
from kdirect.format.batch import crc32c, iterate_batches

_CRC = struct.Struct(">I")
_ATTRIBUTES = struct.Struct(">h")
_KEY_AT = 5  # of a marker's record: its length, attributes, two differences, the key's length
_KEY = struct.Struct(">hh")
_ABORT = 0


def without_aborted(data: memoryview, aborted: Iterable[tuple[int, int]]) -> memoryview:
    """Whole batches `data`, of which those of the `aborted` transactions, (producer id, first
    offset), hold no records any more; `data` itself where there are none."""
    waiting = sorted(aborted, key=lambda one: one[1])
    if not waiting or not len(data):
        return data
    out = bytearray(data)
    open_ones: set[int] = set()
    for batch in iterate_batches(data, check_crc=False):
        while waiting and waiting[0][1] < batch.next_offset:
            open_ones.add(waiting.pop(0)[0])
        if batch.is_control:
            if _is_abort(data, batch.position + layout.BATCH_RECORDS):
                open_ones.discard(batch.producer_id)
        elif batch.is_transactional and batch.producer_id in open_ones:
            _hide(out, batch.position, batch.size)
    return memoryview(bytes(out))


def _is_abort(data: memoryview, record: int) -> bool:
    if len(data) < record + _KEY_AT + _KEY.size:
        return False
    return bool(_KEY.unpack_from(data, record + _KEY_AT)[1] == _ABORT)


def _hide(out: bytearray, position: int, size: int) -> None:
    at = position + layout.BATCH_ATTRIBUTES
    attributes = _ATTRIBUTES.unpack_from(out, at)[0] | layout.ATTRIBUTE_CONTROL
    _ATTRIBUTES.pack_into(out, at, attributes)
    crc = crc32c(bytes(out[at : position + size]))
    _CRC.pack_into(out, position + layout.BATCH_CRC, crc)


__all__ = ["without_aborted"]
