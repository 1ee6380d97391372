"""The rows of room `storage` in the table of metrics (`metrics.py`), which had grown too long.

Law: name, unit and meaning; where Kafka has the figure, its name in brackets.
"""

from __future__ import annotations

REMOTE_ROWS: tuple[tuple[str, str, str], ...] = (
    (
        "remote_copy_requests",
        "segments",
        "Segments whose copy to the object store was begun (Kafka: RemoteCopyRequestsPerSec).",
    ),
    ("remote_copy_bytes", "bytes", "Bytes of objects that were stored (RemoteCopyBytesPerSec)."),
    ("remote_copy_errors", "segments", "Copies that failed (RemoteCopyErrorsPerSec)."),
    (
        "remote_copies_given_up",
        "segments",
        "Copies of which the store took nothing for remote.log.copy.timeout.ms.",
    ),
    (
        "remote_delete_requests",
        "objects",
        "Deletions that were begun (RemoteDeleteRequestsPerSec).",
    ),
    (
        "remote_delete_errors",
        "objects",
        "Deletions that failed, and are repeated (RemoteDeleteErrorsPerSec).",
    ),
    (
        "remote_adopted",
        "objects",
        "Objects that were whole without being counted when the broker looked after a crash.",
    ),
    ("remote_orphans", "objects", "Objects that nobody owned and that were deleted."),
    (
        "remote_not_owner",
        "flag",
        "1 while the objects of this cluster belong to another broker, so that this one copies and"
        " deletes nothing.",
    ),
    (
        "remote_copy_lag_bytes",
        "bytes",
        "Bytes of sealed segments that are not copied yet (RemoteCopyLagBytes).",
    ),
    (
        "remote_copy_lag_segments",
        "segments",
        "Sealed segments that are not copied yet (RemoteCopyLagSegments).",
    ),
    (
        "remote_delete_lag_bytes",
        "bytes",
        "Bytes of log whose deletion from the store is not finished (RemoteDeleteLagBytes).",
    ),
    (
        "remote_delete_lag_segments",
        "segments",
        "Segments whose deletion from the store is not finished (RemoteDeleteLagSegments).",
    ),
    (
        "remote_metadata_count",
        "segments",
        "Remote segments of which there is metadata (RemoteLogMetadataCount).",
    ),
    ("remote_bytes", "bytes", "Bytes of log in the store that count (RemoteLogSizeBytes)."),
    (
        "remote_fetch_requests",
        "requests",
        "Reads and lookups there (RemoteFetchRequestsPerSec, which has reads only).",
    ),
    ("remote_fetch_refused", "requests", "Those that found the queue full."),
    ("remote_fetch_errors", "requests", "Those that failed (RemoteFetchErrorsPerSec)."),
    (
        "remote_fetch_bytes",
        "bytes",
        "Record batches that they brought (RemoteFetchBytesPerSec).",
    ),
    ("remote_get_requests", "requests", "Ranged GETs for reads and lookups."),
    ("remote_get_errors", "requests", "GETs that failed."),
    ("remote_get_bytes", "bytes", "Bytes that they brought."),
    (
        "remote_reader_queue",
        "requests",
        "Those that wait for a thread (RemoteLogReaderTaskQueueSize).",
    ),
    ("remote_chunk_hits", "chunks", "Chunks of logs that were in memory."),
    ("remote_chunk_misses", "chunks", "Chunks that were not there yet."),
    ("remote_chunk_bytes", "bytes", "Bytes of the chunks in memory."),
    ("remote_chunks_ahead", "chunks", "Chunks that were read ahead."),
    ("remote_chunks_unused", "chunks", "Those dropped unread."),
    ("remote_index_hits", "segments", "Indexes that were at hand."),
    ("remote_index_misses", "segments", "Indexes that were fetched."),
    ("remote_index_damaged", "segments", "Indexes with damaged files."),
    ("remote_index_bytes", "bytes", "Files of indexes."),
)
