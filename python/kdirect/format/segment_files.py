"""Kafka's small files beside a segment, as bytes: ``.txnindex`` and ``leader-epoch-checkpoint``.

Pure: who has the bytes of such a file (a log directory, an object) packs and parses them here.
Parsers trust nothing: what they refuse is a FormatError that names the file and the fault.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kdirect.errors import FormatError, UnsupportedFormatError
from kdirect.format.layout import TRANSACTION_INDEX_ENTRY_BYTES, TRANSACTION_INDEX_VERSION

if TYPE_CHECKING:
    from typing_extensions import Buffer

_ABORTED = struct.Struct(">hqqqq")
LARGEST_OFFSET = (1 << 63) - 1
LARGEST_EPOCH = (1 << 31) - 1
_NUMBER = re.compile(rb"(?:0|[1-9][0-9]{0,18})\Z")


class AbortedTransaction(NamedTuple):
    """An aborted transaction of a producer: its first offset, that of its marker, and the last
    stable offset when the marker was written."""

    producer_id: int
    first_offset: int
    last_offset: int
    last_stable_offset: int


def pack_transaction_index(entries: Iterable[AbortedTransaction]) -> bytes:
    """The bytes of a ``.txnindex`` file."""
    return b"".join(_ABORTED.pack(TRANSACTION_INDEX_VERSION, *entry) for entry in entries)


def parse_transaction_index(data: Buffer) -> Iterator[AbortedTransaction]:
    """The entries of a ``.txnindex`` file, in its order; FormatError."""
    view = memoryview(data).cast("B")
    if len(view) % TRANSACTION_INDEX_ENTRY_BYTES:
        raise FormatError(
            f"a transaction index of {len(view)} bytes does not end with an entry of"
            f" {TRANSACTION_INDEX_ENTRY_BYTES} bytes"
        )
    for number, (version, *fields) in enumerate(_ABORTED.iter_unpack(view)):
        if version != TRANSACTION_INDEX_VERSION:
            raise UnsupportedFormatError(
                f"entry {number} of a transaction index has version {version}",
                hint=f"this build reads version {TRANSACTION_INDEX_VERSION}; use a newer one",
            )
        entry = AbortedTransaction(*fields)
        if not 0 <= entry.first_offset <= entry.last_offset:
            raise FormatError(
                f"entry {number} of a transaction index is a transaction from offset"
                f" {entry.first_offset} to {entry.last_offset}"
            )
        yield entry


def pack_leader_epochs(epochs: Sequence[tuple[int, int]]) -> bytes:
    """The text of a ``leader-epoch-checkpoint``: (epoch, start offset), rising in both."""
    lines = ["0", str(len(epochs)), *(f"{epoch} {start}" for epoch, start in epochs)]
    return ("\n".join(lines) + "\n").encode()


def parse_leader_epochs(data: Buffer) -> tuple[tuple[int, int], ...]:
    """(epoch, start offset) in the order of the file, which rises in both; FormatError."""
    lines = bytes(memoryview(data).cast("B")).split(b"\n")
    if lines[-1:] == [b""]:
        lines.pop()
    if lines[:1] != [b"0"]:
        raise FormatError("a leader-epoch-checkpoint does not begin with its version, 0")
    if len(lines) < 2 or _number(lines[1]) != len(lines) - 2:
        raise FormatError(
            f"a leader-epoch-checkpoint of {len(lines)} lines does not have as many entries as its"
            " second line says"
        )
    epochs: list[tuple[int, int]] = []
    for number, line in enumerate(lines[2:]):
        left, _, right = line.partition(b" ")
        epoch, start = _number(left), _number(right)
        if epoch is None or start is None or epoch > LARGEST_EPOCH:
            raise FormatError(f"entry {number} of a leader-epoch-checkpoint is no epoch and offset")
        if epochs and (epoch <= epochs[-1][0] or start < epochs[-1][1]):
            raise FormatError(
                f"entry {number} of a leader-epoch-checkpoint, epoch {epoch} from offset {start},"
                f" does not follow epoch {epochs[-1][0]} from offset {epochs[-1][1]}"
            )
        epochs.append((epoch, start))
    return tuple(epochs)


def _number(text: bytes) -> int | None:
    if not _NUMBER.match(text):
        return None
    value = int(text)
    return value if value <= LARGEST_OFFSET else None
