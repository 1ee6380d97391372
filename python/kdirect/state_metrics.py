"""The rows of rooms `state` and `slash` in the table of metrics (`metrics.py`).

Law: name, unit and meaning.  The second room is what a query that was accelerated tells of each
micro-batch, so its rows are sums of some of the first.
"""

from __future__ import annotations

STATE_ROWS: tuple[tuple[str, str, str], ...] = (
    ("batches", "batches", "Batches whose output was committed."),
    (
        "attempts",
        "attempts",
        "Attempts of the job since its directory was made; of a planned job since it was started.",
    ),
    (
        "rows",
        "rows",
        "Rows read and decoded that passed the condition of their input, late ones included.",
    ),
    ("input_bytes", "bytes", "Bytes of input, as epochs count them."),
    ("late", "rows", "Rows dropped because their windows had been emitted."),
    ("null_value", "records", "Records dropped because their value is null."),
    ("wrong_size", "records", "Records dropped: not of the size of the fixed layout."),
    ("not_decoded", "records", "Records dropped: not of the format of values."),
    ("null_time", "rows", "Rows dropped because their event time is null."),
    ("before_1970", "rows", "Rows dropped: their event time is before 1970."),
    (
        "too_far_ahead",
        "rows",
        "Rows dropped: their event time is later than the wall clock and `max_ahead_us`.",
    ),
    ("too_long", "rows", "Rows dropped: longer than an entry of the state may be."),
    ("epochs", "epochs", "Epochs that executors ended."),
    ("deltas", "deltas", "Fragments of an epoch that had something to send."),
    ("sent_entries", "entries", "Entries of keys in these deltas."),
    (
        "sent_tuples",
        "rows",
        "Rows sent in place of entries, where an epoch hardly aggregated, and all in mode uppar.",
    ),
    ("sent_bytes", "bytes", "Bytes of the deltas' pages."),
    (
        "sent_buffers",
        "buffers",
        "Buffers sent: pages, and the ends of epochs and batches; over RDMA a WRITE each.",
    ),
    (
        "credit_waits",
        "events",
        "Times that an executor had a buffer to send and no credit of its receiver.",
    ),
    ("merged", "entries", "Entries and rows that leaders merged."),
    ("dropped_old_attempt", "buffers", "Buffers of older attempts, without effect."),
    ("dropped_repeated", "buffers", "Buffers that came again, without effect."),
    (
        "keys",
        "keys",
        "Keys in the windows that were open, when the last batch had been read and before it "
        "emitted; of sliding windows, in each slice.",
    ),
    ("rows_out", "rows", "Rows of windows emitted; without windows, keys changed."),
    ("waits", "events", "Times that an executor slept because it had nothing to do."),
    ("state_bytes", "bytes", "Mapped state in use after the newest batch."),
    ("snapshots", "snapshots", "Snapshots that are whole."),
    ("snapshot_bytes", "bytes", "Bytes of their parts."),
    (
        "restores",
        "executors",
        "Times that an executor was told to begin from a snapshot, or empty.",
    ),
)

SLASH_ROWS: tuple[tuple[str, str, str], ...] = (
    ("batch", "batches", "The number of the batch, from 0: that of its epoch less 1."),
    ("rows", "rows", "Rows that passed the condition, late ones included."),
    ("input_bytes", "bytes", "Bytes of records read."),
    ("dropped", "records", "Bad rows: not decoded, or of no acceptable event time."),
    ("late", "rows", "Rows dropped because their windows had been emitted."),
    ("keys", "keys", "Keys in open windows before the batch emitted."),
    ("epochs", "epochs", "Epochs that tasks ended."),
    ("bytes_written", "bytes", "Bytes of deltas sent to leaders by WRITE."),
    ("credit_waits", "events", "Times that a task waited for a leader's credit."),
    ("merged", "entries", "Entries and rows that leaders merged."),
    ("rows_out", "rows", "Rows of the result; without windows, keys that changed."),
    ("state_bytes", "bytes", "Mapped state in use after the batch."),
    ("watermark", "time", "The time below which all windows were emitted."),
)
