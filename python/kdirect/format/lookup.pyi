"""Types of `kdirect.format.lookup`, which is compiled.  See lookup.pyx."""

from typing_extensions import Buffer

LARGEST_BATCH_BYTES: int

def find_record(
    data: Buffer,
    where: str,
    timestamp: int,
    from_offset: int = 0,
    *,
    max_decompressed_bytes: int = ...,
) -> tuple[int, int] | None: ...
