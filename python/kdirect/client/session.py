"""`kdirect.connect`: a process's way to the log.

A `Session` is a caller's handle on the connections that its process has for some settings
(`kdirect.client.connections`), and makes readers and producers over them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kdirect.client.connections import Handle, open_handle
from kdirect.client.producer import Producer
from kdirect.client.reader import DEFAULT_TARGET_BYTES, DEFAULT_TARGET_ROWS, Reader
from kdirect.model import TopicPartition


def connect(settings: Mapping[str, Any] | str) -> Session:
    """A session for these client settings (a mapping of CLIENT options, or just "host:port").

    Sessions of one process with the same settings share their connections, also between threads;
    each is closed by itself.  Raises ConfigError for settings that cannot be; the broker is
    contacted on first use.
    """
    return open_handle(settings, Session)


class Session(Handle):
    """A caller's way to the log, over RDMA or over Kafka's protocol.  Made by `connect`.
    Thread-safe.

    Use it as a context manager, or `close` it: that ends this caller's use, and nobody else's.
    """

    def __enter__(self) -> Session:
        return self

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
    ) -> Reader:
        """Read offsets [start, stop) of one partition as Arrow batches of about `target_rows` rows
        or `target_bytes` bytes; see `Reader`.  `timeout_ms`: request.timeout.ms if None."""
        self.check()
        return Reader(
            self,
            tp,
            start_offset,
            stop_offset,
            timeout_ms=timeout_ms
            if timeout_ms is not None
            else self.settings["request.timeout.ms"],
            include_headers=include_headers,
            target_rows=target_rows,
            target_bytes=target_bytes,
        )

    def producer(self, **settings: Any) -> Producer:
        """A new producer; `settings` override the session's (`acks="1"`, or
        `compression_type="zstd"` with underscores)."""
        overrides = {k.replace("_", "."): v for k, v in settings.items()}
        return Producer({**self.settings, **overrides}, session=self)
