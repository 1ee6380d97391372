"""Types of `kdirect.format.encode`, which is compiled.  See encode.pyx."""

from typing import Any, final

DEFAULT_BATCH_BYTES: int
DEFAULT_MAX_RECORD_BYTES: int

@final
class EncodedBatch:
    """Made by `ArrowEncoder.encode` only; a read-only buffer."""

    @property
    def size(self) -> int: ...
    @property
    def records_count(self) -> int: ...
    @property
    def data(self) -> memoryview: ...
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class ArrowEncoder:
    def __init__(
        self,
        *,
        compression: str = "none",
        batch_bytes: int = ...,
        max_record_bytes: int = ...,
        level: int | None = None,
    ) -> None: ...
    @property
    def batch_bytes(self) -> int: ...
    @property
    def max_record_bytes(self) -> int: ...
    # The columns are pyarrow arrays, or what pyarrow makes arrays of.
    def encode(
        self,
        values: Any,
        keys: Any = None,
        headers: Any = None,
        timestamps_ms: Any = None,
        *,
        default_timestamp_ms: int,
        producer_id: int = -1,
        producer_epoch: int = -1,
        base_sequence: int = -1,
    ) -> list[EncodedBatch]: ...
