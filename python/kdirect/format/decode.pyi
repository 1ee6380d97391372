"""Types of `kdirect.format.decode`, which is compiled.  See decode.pyx."""

import pyarrow as pa
from typing_extensions import Buffer

from kdirect.model import Record

DEFAULT_MAX_DECOMPRESSED_BYTES: int
DEFAULT_TARGET_BYTES: int
DEFAULT_TARGET_ROWS: int
NO_STOP: int
SCHEMA: pa.Schema
SCHEMA_WITH_HEADERS: pa.Schema

class ArrowDecoder:
    def __init__(
        self,
        topic: str,
        partition: int,
        *,
        start_offset: int = 0,
        stop_offset: int = ...,
        include_headers: bool = False,
        target_rows: int = ...,
        target_bytes: int = ...,
        check_crc: bool = True,
        max_decompressed_bytes: int = ...,
    ) -> None: ...
    @property
    def topic(self) -> str: ...
    @property
    def partition(self) -> int: ...
    @property
    def start_offset(self) -> int: ...
    @property
    def stop_offset(self) -> int: ...
    @property
    def next_offset(self) -> int: ...
    @property
    def next_batch_bytes(self) -> int: ...
    @property
    def target_rows(self) -> int: ...
    @property
    def target_bytes(self) -> int: ...
    @property
    def max_decompressed_bytes(self) -> int: ...
    @property
    def include_headers(self) -> bool: ...
    @property
    def schema(self) -> pa.Schema: ...
    @property
    def rows(self) -> int: ...
    @property
    def pending_bytes(self) -> int: ...
    @property
    def full(self) -> bool: ...
    def feed(self, data: Buffer) -> int: ...
    def feed_address(self, address: int, n: int) -> int: ...
    def take(self) -> pa.RecordBatch: ...

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
