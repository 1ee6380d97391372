"""`kdirect.connect` and `Session`, the entry point to reading and administration.

A `Session` is a caller's handle on the connections that its process holds for one set of settings
(`kdirect.client.connections`).  It makes readers and producers that use these connections.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kdirect.client.connections import Handle, open_handle
from kdirect.client.producer import Producer
from kdirect.client.reader import DEFAULT_TARGET_BYTES, DEFAULT_TARGET_ROWS, Reader
from kdirect.model import TopicPartition


def connect(settings: Mapping[str, Any] | str) -> Session:
    """A session for client settings: a mapping of CLIENT options, or just "host:port".

    Sessions of one process with the same settings share their connections, also between threads.
    Closing one session does not close the others.  Raises ConfigError for an unknown setting or a
    value that is not allowed.  The broker is contacted at first use.
    """
    return open_handle(settings, Session)


class Session(Handle):
    """Access to the log, over RDMA or over Kafka's protocol.  Made by `connect`.  Thread-safe.

    Use it as a context manager, or `close` it.  Either ends this caller's use only: other sessions
    of the process go on.
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
        """Read the offsets [start_offset, stop_offset) of one partition as Arrow batches of about
        `target_rows` rows or `target_bytes` bytes; see `Reader`.

        `timeout_ms`: how long to wait for the broker without progress; request.timeout.ms if None.
        Raises ClosedError if the session is closed."""
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
        """A new producer over this session's connections.  `settings` override the session's; write
        underscores for dots: `acks="1"`, `compression_type="zstd"`.  Raises ConfigError."""
        overrides = {k.replace("_", "."): v for k, v in settings.items()}
        return Producer({**self.settings, **overrides}, session=self)
