"""Times of records that Spark's timestamps cannot hold.

Owns: `check_times`, which both kinds of rows ask that have the times of records.
"""

from __future__ import annotations

import logging
from typing import Any

import pyarrow as pa

from kdirect.errors import BadTimestampError, KdirectError
from kdirect.model import TopicPartition

log = logging.getLogger("kdirect_spark")

# What decoders give for times that microseconds of 64 bits cannot hold.  No time in milliseconds
# is one of them.
CLAMPED = (-(2**63), 2**63 - 1)


def check_times(session: Any, tp: TopicPartition, batch: pa.RecordBatch) -> None:
    """BadTimestampError if a row has a time that Spark's timestamps cannot hold."""
    # Imported at first use: planners and writers import this module, and do not wait for it.
    import pyarrow.compute as pc

    times = batch.column("timestamp").view(pa.int64())
    ends = pc.min_max(times)
    lowest, highest = ends["min"].as_py(), ends["max"].as_py()
    if lowest is None or (lowest != CLAMPED[0] and highest != CLAMPED[1]):
        return
    row = pc.index_in(pa.scalar(True), pc.is_in(times, pa.array(CLAMPED))).as_py()
    offset = batch.column("offset")[row].as_py()
    error = BadTimestampError(
        f"the record of {tp} at offset {offset} has the timestamp {_time_of(session, tp, offset)}, "
        "which Spark's timestamps, microseconds of 64 bits, cannot hold",
        hint="Kafka's timestamps are milliseconds since 1970; correct its producer if it writes "
        "microseconds or nanoseconds, and read past the record with startingOffsets",
    )
    error.topic_partition, error.offset = tp, offset
    raise error


def _time_of(session: Any, tp: TopicPartition, offset: int) -> str:
    """The time of a record as its log has it."""
    from kdirect.client.tcp_fetch import TcpFetcher
    from kdirect.format.record_list import decode_records

    try:
        with TcpFetcher(session.cluster, tp, offset) as fetcher:
            records, _, _ = decode_records(fetcher.fetch().data, *tp, offset, offset + 1)
        return f"{records[0].timestamp} ms"
    except (KdirectError, IndexError) as e:
        log.debug("%s: the time at offset %d: %s", tp, offset, e)
        return "out of range"
