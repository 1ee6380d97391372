"""The rows of compaction in the table of metrics (`metrics.py`).

Law: as in `metrics.py`, of which this is a part.
"""

from __future__ import annotations

# Name, unit, help.
CLEANER_ROWS = (
    ("cleaner_runs", "cleanings", "Times that a log was compacted."),
    ("cleaner_bytes_read", "bytes", "Bytes of segments that compaction has read to rewrite them."),
    ("cleaner_bytes_written", "bytes", "Bytes of segments that compaction has written."),
    ("cleaner_records_removed", "records", "Records that compaction has removed."),
    (
        "cleaner_uncleanable_partitions",
        "partitions",
        "Partitions whose compaction has failed; it is tried again after the next start.",
    ),
    (
        "cleaner_max_dirty_percent",
        "percent",
        "How much of the dirtiest compacted log is new since its last compaction.",
    ),
)
