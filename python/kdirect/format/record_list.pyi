"""Types of `kdirect.format.record_list`, which is compiled.  See record_list.pyx."""

from collections.abc import Iterable

from typing_extensions import Buffer

from kdirect.model import Record

_Content = bytes | str | None
_Header = tuple[str | bytes, _Content]

def decode_records(
    data: Buffer,
    topic: str,
    partition: int,
    start_offset: int = 0,
    stop_offset: int = ...,
    *,
    check_crc: bool = True,
    max_decompressed_bytes: int = ...,
) -> tuple[list[Record], int, int]: ...
def encode_records(
    records: Iterable[tuple[_Content, _Content, Iterable[_Header] | None, int]],
    compression: str = "none",
    *,
    level: int | None = None,
    producer_id: int = -1,
    producer_epoch: int = -1,
    base_sequence: int = -1,
    attributes: int = 0,
) -> bytes: ...
