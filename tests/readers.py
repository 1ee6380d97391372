"""What stands in for a session, and for the readers that it gives, in tests without a broker.

`ReadsOnly.reader` has the signature of `Session.reader`, and `StandInReader` has the members of
`Reader` that its users need; `tests/test_readers.py` holds both against the real ones.  So a new
argument is added here, and not in each test.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa

from kdirect.client.reader import DEFAULT_TARGET_BYTES, DEFAULT_TARGET_ROWS
from kdirect.format.decode import ArrowDecoder
from kdirect.model import TopicPartition


class StandInReader:
    """A reader of the offsets [start, stop) that has read nothing.  A test overrides what gives
    records: iterating, or `fillings`."""

    transport = "shm"
    newest_ms = -1

    def __init__(self, start: int, stop: int) -> None:
        self.next_offset, self.stop = start, stop

    @property
    def decoder_range(self) -> dict[str, Any]:
        return {"start_offset": self.next_offset, "stop_offset": self.stop}

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        raise NotImplementedError

    def fillings(self, decoder: ArrowDecoder) -> Iterator[None]:
        raise NotImplementedError

    def check_topic(self) -> None:
        """The topic is always the one that was asked for."""

    def statistics(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        """There is nothing to give back."""


class ReadsOnly:
    """In place of a session: a test says by `open_reader` what reads a range."""

    transport = "shm"
    settings: Mapping[str, Any] = {}

    def open_reader(self, tp: TopicPartition, start: int, stop: int) -> StandInReader:
        raise NotImplementedError

    def reader(
        self,
        tp: TopicPartition,
        start_offset: int,
        stop_offset: int,
        *,
        include_headers: bool = False,
        target_rows: int = DEFAULT_TARGET_ROWS,
        target_bytes: int = DEFAULT_TARGET_BYTES,
        timeout_ms: int | None = None,
        topic_id: str | None = None,
        live_ms: int | None = None,
    ) -> StandInReader:
        return self.open_reader(tp, start_offset, stop_offset)

    def close(self) -> None:
        """There is nothing to close."""
