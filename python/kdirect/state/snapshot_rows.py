"""Rows of a snapshot: one record batch for each virtual partition, and back.

A row is (bucket, key words, state words) as they lie in a table, with all lanes.  The metadata of
the batch's schema says what it is: version, plan hash, virtual partition, number of executors.
Pure but for the tables that are read and merged into.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from kdirect.errors import StateError
from kdirect.state import state_rows
from kdirect.state.plan import VPARTS

VERSION = "1"


def _metadata(backend: Any, vpart: int) -> dict[str, str]:
    return {"version": VERSION, "plan": backend.plan.hash, "vpart": str(vpart),
            "executors": str(backend.executors)}  # fmt: skip


def snapshot_rows(backend: Any) -> Iterator[tuple[int, pa.RecordBatch]]:
    """(virtual partition, its rows), ascending, of those that are not empty."""
    base, layout, words = backend.memory.address, backend.layout, backend.keys.words
    buckets, sorted_positions, ends = [], [], []
    for bucket in sorted(backend.engine.slots):
        positions = backend.engine.table(bucket).scan()
        parts = state_rows.vparts(base, positions, layout.words, words)
        buckets.append(bucket)
        sorted_positions.append(positions[np.argsort(parts, kind="stable")])
        ends.append(np.cumsum(np.bincount(parts, minlength=VPARTS)))
    for vpart in range(VPARTS):
        slices = [
            positions[(end[vpart - 1] if vpart else 0) : end[vpart]]
            for positions, end in zip(sorted_positions, ends, strict=True)
        ]
        counts = [len(s) for s in slices]
        if not sum(counts):
            continue
        yield vpart, _batch(backend, vpart, np.repeat(np.array(buckets, np.int64), counts),
                            np.concatenate(slices))  # fmt: skip


def _batch(backend: Any, vpart: int, buckets: np.ndarray, positions: np.ndarray) -> Any:
    base, layout, words, n = (
        backend.memory.address, backend.layout, backend.keys.words, len(positions)
    )  # fmt: skip
    if words:
        data = state_rows.words_at(base, positions, layout.words, words)
        keys = pa.Array.from_buffers(pa.binary(8 * words), n, [None, pa.py_buffer(data)])
    else:
        data, offsets = state_rows.variable_keys(base, positions, layout.words)
        keys = pa.Array.from_buffers(
            pa.large_binary(), n, [None, pa.py_buffer(offsets), pa.py_buffer(data)]
        )
    states = state_rows.words_at(base, positions, 0, layout.words)
    state = pa.Array.from_buffers(pa.binary(8 * layout.words), n, [None, pa.py_buffer(states)])
    schema = pa.schema(
        [("bucket", pa.int64()), ("key", keys.type), ("state", state.type)],
        metadata=_metadata(backend, vpart),
    )
    return pa.RecordBatch.from_arrays([pa.array(buckets), keys, state], schema=schema)


def _bytes(array: pa.Array) -> np.ndarray:
    """The bytes of a column without nulls, as words."""
    width = array.type.byte_width
    data = np.frombuffer(array.buffers()[1], np.uint8, len(array) * width, array.offset * width)
    return np.ascontiguousarray(data).view(np.uint64)


def restore_rows(backend: Any, batch: pa.RecordBatch) -> int:
    """Merge the rows of one virtual partition; their number.  Raises StateError."""
    metadata = {k.decode(): v.decode() for k, v in (batch.schema.metadata or {}).items()}
    if metadata.get("version") != VERSION or metadata.get("plan") != backend.plan.hash:
        raise StateError("a snapshot belongs to another plan or version",
                         hint="use the directory of this job, or start a new one")  # fmt: skip
    vpart, executors = int(metadata.get("vpart", -1)), int(metadata.get("executors", 0))
    if not 0 <= vpart < VPARTS or not 1 <= executors <= VPARTS:
        raise StateError("a snapshot names no virtual partition")
    if backend.owners[vpart] != backend.executor:
        raise StateError(f"virtual partition {vpart} of a snapshot is led by executor "
                         f"{backend.owners[vpart]}, not {backend.executor}")  # fmt: skip
    layout, words = backend.layout_for(executors), backend.keys.words
    key_type = pa.binary(8 * words) if words else pa.large_binary()
    wanted = [pa.int64(), key_type, pa.binary(8 * layout.words)]
    if batch.schema.types != wanted or any(c.null_count for c in batch.columns):
        raise StateError("the columns of a snapshot are not those of its plan")
    batch.validate(full=True)
    buckets, keys, states = batch.columns
    offsets = None
    if words:
        key_words = _bytes(keys)
    else:
        ends = np.frombuffer(keys.buffers()[1], np.int64, len(keys) + 1, keys.offset * 8)
        if (ends % 8).any() or ends[-1] - ends[0] > 1 << 34:
            raise StateError("a key of a snapshot is no sequence of words")
        offsets = ((ends - ends[0]) // 8).astype(np.uint32)
        data = np.frombuffer(keys.buffers()[2], np.uint8)[ends[0] : ends[-1]]
        key_words = np.ascontiguousarray(data).view(np.uint64)
    if batch.num_rows:
        backend.engine.restore(vpart, np.ascontiguousarray(buckets.to_numpy()),
                               key_words, offsets, _bytes(states), layout)  # fmt: skip
    return int(batch.num_rows)
