"""Record batches to Arrow and back: what other rooms import.

The parts: `batch` is the frame and the CRC, `records` the inner loop of reading, `decode` and
`encode` the two directions, `compression` the five codecs, `blocks` the memory they share.
"""

from __future__ import annotations

from kdirect.format.batch import BatchInfo, iterate_batches
from kdirect.format.decode import (
    DEFAULT_MAX_DECOMPRESSED_BYTES,
    DEFAULT_TARGET_BYTES,
    DEFAULT_TARGET_ROWS,
    SCHEMA,
    SCHEMA_VIEWS,
    SCHEMA_VIEWS_WITH_HEADERS,
    SCHEMA_WITH_HEADERS,
    ArrowDecoder,
)
from kdirect.format.encode import (
    DEFAULT_BATCH_BYTES,
    DEFAULT_MAX_RECORD_BYTES,
    ArrowEncoder,
    EncodedBatch,
)
from kdirect.format.record_list import decode_records, encode_records

__all__ = [
    "DEFAULT_BATCH_BYTES",
    "DEFAULT_MAX_DECOMPRESSED_BYTES",
    "DEFAULT_MAX_RECORD_BYTES",
    "DEFAULT_TARGET_BYTES",
    "DEFAULT_TARGET_ROWS",
    "SCHEMA",
    "SCHEMA_VIEWS",
    "SCHEMA_VIEWS_WITH_HEADERS",
    "SCHEMA_WITH_HEADERS",
    "ArrowDecoder",
    "ArrowEncoder",
    "BatchInfo",
    "EncodedBatch",
    "decode_records",
    "encode_records",
    "iterate_batches",
]
