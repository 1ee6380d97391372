"""Types of `kdirect.log.clean_run`, which is compiled.  See clean_run.pyx."""

from collections.abc import Sequence
from typing import NamedTuple

from typing_extensions import Buffer

from kdirect.log.key_offsets import KeyOffsets

ALL_KEYED: int
NOT_KEYED: int
COMPRESSED: int
AT_END: int
ASKS: int
IS_FULL: int

class BatchHead(NamedTuple):
    size: int
    base_offset: int
    last_offset: int
    attributes: int
    producer_id: int
    producer_epoch: int
    delete_horizon_ms: int
    records_count: int
    @property
    def codec(self) -> int: ...
    @property
    def is_control(self) -> bool: ...
    @property
    def is_transactional(self) -> bool: ...

class CleanRun:
    records_read: int
    records_kept: int
    bytes_read: int
    keyless: int
    def __init__(
        self,
        keys: KeyOffsets,
        *,
        now_ms: int,
        delete_retention_ms: int,
        upper_bound: int,
        producers: Sequence[tuple[int, int, int]],
        piece_bytes: int,
    ) -> None: ...
    def head(self, address: int, position: int, size: int) -> BatchHead: ...
    def first_key(self, address: int, position: int, size: int) -> bytes | None: ...
    def note_keys(
        self, address: int, position: int, size: int, start_offset: int
    ) -> tuple[int, int]: ...
    def note_batch(
        self, address: int, position: int, size: int, start_offset: int, plain: bytes | None
    ) -> bool: ...
    def keep(self, address: int, position: int, size: int) -> tuple[int, int]: ...
    def keep_batch(
        self,
        address: int,
        position: int,
        size: int,
        plain: bytes | None,
        *,
        discard: bool,
        marker_of_none: bool,
    ) -> bytes | None: ...
    def put_compressed(self, records: bytes) -> None: ...
    def take(self) -> bytes: ...

def look_for_keys(data: Buffer) -> int: ...
def records_are_whole(plain: Buffer, count: int) -> bool: ...
def records_are_keyed(plain: Buffer, count: int) -> bool: ...
def keyless_records(plain: bytes, count: int, most: int) -> list[int]: ...
