"""Indexes that are missing or damaged when a log is loaded: made again from batches.

Owns: when that is needed for a file by itself, and how it is written.  Whether entries can be those
of the segment is `kdirect.log.recovery`'s to ask.
"""

from __future__ import annotations

import logging
import os

from kdirect.log.config import LogConfig
from kdirect.log.scan import ScannedSegment, scan_segment
from kdirect.log.segment import Segment

log = logging.getLogger("kdirect.log")

_NEVER_CHECK = (1 << 63) - 1


def check_index_files(segment: Segment, config: LogConfig) -> None:
    """Rebuild the indexes of a segment when a file is missing or has half an entry."""
    if segment.size == 0:
        return
    for index in (segment.offset_index, segment.time_index):
        try:
            if os.stat(index.path).st_size % index.entry_bytes == 0:
                continue
        except FileNotFoundError:
            pass
        log.warning("index %s is missing or damaged: rebuilding it", index.path)
        rebuild_indexes(segment, config)
        return


def rebuild_indexes(segment: Segment, config: LogConfig) -> None:
    """Make them again, from the frames of the segment's batches."""
    segment.acquire()
    try:
        write_indexes(
            segment,
            scan_segment(
                segment.address,
                segment.mapped_length,
                segment.base_offset,
                _NEVER_CHECK,
                config.index_interval_bytes,
            ),
        )
    finally:
        segment.release()
        segment.unmap_if_idle()


def write_indexes(segment: Segment, scanned: ScannedSegment) -> None:
    """Write what a scan has found to the files of the indexes."""
    for index, data in (
        (segment.offset_index, scanned.offset_index),
        (segment.time_index, scanned.time_index),
    ):
        index.close()
        # In place: an index that a crash left half written is rebuilt like any other that is
        # damaged.
        fd = os.open(index.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            at = 0
            while at < len(data):
                at += os.pwrite(fd, data[at:], at)
            os.ftruncate(fd, len(data))
        finally:
            os.close(fd)
