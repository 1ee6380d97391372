"""Types of `kdirect.format.batch`, which is compiled.  See batch.pyx."""

from collections.abc import Iterator
from dataclasses import dataclass

from typing_extensions import Buffer

from kdirect.errors import FormatError

CODEC_NAMES: tuple[str, ...]

@dataclass(frozen=True, slots=True)
class BatchInfo:
    position: int
    size: int
    base_offset: int
    leader_epoch: int
    attributes: int
    last_offset_delta: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    records_count: int
    @property
    def next_offset(self) -> int: ...
    @property
    def compression(self) -> str: ...
    @property
    def timestamp_type(self) -> int: ...
    @property
    def is_transactional(self) -> bool: ...
    @property
    def is_control(self) -> bool: ...

def any_transactional(data: Buffer) -> bool: ...
def batch_error(code: int, where: str, head: Buffer | None = None) -> FormatError: ...
def check_batch_bytes(data: Buffer) -> BatchInfo: ...
def crc32c(data: Buffer, crc: int = 0) -> int: ...
def crc32c_by(name: str, data: Buffer, crc: int = 0) -> int: ...
def crc32c_implementations() -> tuple[str, ...]: ...
def encode_single_bytes(
    value: bytes | None, key: bytes | None = None, timestamp_ms: int = 0
) -> bytes: ...
def iterate_batches(data: Buffer, *, check_crc: bool = True) -> Iterator[BatchInfo]: ...
def stamp(
    data: Buffer, base_offset: int, leader_epoch: int, log_append_time: int | None = None
) -> None: ...
