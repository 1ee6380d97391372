"""Types of `kdirect.format.fixed`, which is compiled.  See fixed.pyx."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import pyarrow as pa

from kdirect.format.bad_values import Dropped
from kdirect.format.decode import ArrowDecoder
from kdirect.format.fixed_layout import FixedLayout

DEFAULT_BLOCK_BYTES: int
DEFAULT_BLOCK_ROWS: int
LATEST_US: int
NO_STOP: int
OPERATORS: tuple[str, ...]
WIDEST_COLUMN: int

class FixedRows(NamedTuple):
    rows: int
    fields: list[pa.Array]
    offsets: pa.Array
    times_us: pa.Array | None
    least_us: int | None
    greatest_us: int | None
    clock_us: int | None
    keys: pa.Array | None
    timestamps: pa.Array | None
    input_bytes: int

def can_test(layout: FixedLayout, name: str, operator: str, literal: object) -> bool: ...
def integer_field(layout: FixedLayout, name: str) -> tuple[int, int] | None: ...

class FixedDecoder(ArrowDecoder):
    def __init__(
        self,
        topic: str,
        partition: int,
        layout: FixedLayout,
        columns: Iterable[str],
        *,
        tests: Sequence[tuple[str, str, int]] = (),
        time: str | None = None,
        time_unit: str | None = None,
        time_of_record: bool = False,
        latest_us: int | None = None,
        with_keys: bool = False,
        with_timestamps: bool = False,
        start_offset: int = 0,
        stop_offset: int = ...,
        target_rows: int = ...,
        target_bytes: int = ...,
        check_crc: bool = True,
        max_decompressed_bytes: int = ...,
    ) -> None: ...
    @property
    def layout(self) -> FixedLayout: ...
    @property
    def columns(self) -> tuple[str, ...]: ...
    @property
    def dropped(self) -> Dropped: ...
    @property
    def input_bytes(self) -> int: ...
    @property
    def with_keys(self) -> bool: ...
    @property
    def with_timestamps(self) -> bool: ...
    def take(self) -> pa.RecordBatch: ...
    def take_rows(self) -> FixedRows: ...
