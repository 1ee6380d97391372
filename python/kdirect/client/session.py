"""`kdirect.connect` and `Session`, the entry point to reading and administration.

A `Session` is a caller's handle on the connections that its process holds for one set of settings
(`kdirect.client.connections`).  It makes readers and producers that use these connections.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kdirect.client.attempt_producer import AttemptProducer
from kdirect.client.attempts import Attempt, AttemptCalls
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
        topic_id: str | None = None,
        live_ms: int | None = None,
    ) -> Reader:
        """Read the offsets [start_offset, stop_offset) of one partition as Arrow batches of about
        `target_rows` rows or `target_bytes` bytes; see `Reader`.

        `timeout_ms`: how long to wait for the broker without progress; request.timeout.ms if None.
        `topic_id`: the topic must be the one of this id (`TopicInfo`), not another of its name.
        `live_ms`: records are handed out as they come; see `Reader`.
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
            topic_id=topic_id,
            live_ms=live_ms,
            include_headers=include_headers,
            target_rows=target_rows,
            target_bytes=target_bytes,
        )

    def producer(self, **settings: Any) -> Producer:
        """A new producer over this session's connections.  `settings` override the session's; write
        underscores for dots: `acks="1"`, `compression_type="zstd"`.  Raises ConfigError."""
        overrides = {k.replace("_", "."): v for k, v in settings.items()}
        return Producer({**self.settings, **overrides}, session=self)

    # -- writes that are exactly once (docs/transactions.md) ---------------------------------------

    def join_attempt(
        self,
        identity: str,
        query: str,
        run: str,
        batch: int,
        *,
        timeout_ms: int | None = None,
        owner: str = "",
    ) -> Attempt | None:
        """A task attempt of a batch begins: the transaction that it writes in, for
        `attempt_producer`, and for `commit_attempts` once all is flushed.  None: the batch is
        committed already, and there is nothing to write.

        `identity`: what writes, a streaming query or a batch job; `query` numbers the batches,
        `run` is its present run.  The first join of a new run aborts what the one before has open.
        `timeout_ms`: the attempt is aborted so long after its first record unless it is committed
        (None: transaction.timeout.ms).  `owner`: host, process and application, which errors of
        others name.

        FencedRunError: another run is the present one.  AttemptsUnsupportedError: the broker does
        not know attempts.  TimedOutError: no coordinator has answered within delivery.timeout.ms;
        it may be called again."""
        if timeout_ms is None:
            timeout_ms = self.settings["transaction.timeout.ms"]
        return self._attempts().join(identity, query, run, batch, timeout_ms, owner)

    def attempt_producer(self, attempt: Attempt, **settings: Any) -> AttemptProducer:
        """A producer that writes in the transaction of an attempt, over this session's connections;
        `settings` as of `producer`."""
        overrides = {k.replace("_", "."): v for k, v in settings.items()}
        return AttemptProducer({**self.settings, **overrides}, Attempt(*attempt), session=self)

    def commit_attempts(
        self,
        identity: str,
        query: str,
        run: str,
        batch: int,
        attempts: Iterable[Attempt],
        *,
        owner: str = "",
    ) -> str:
        """Commit a batch: the records of these attempts become visible to readers of committed
        records, all or none; whatever else the identity has open is aborted.  Returns once readers
        see them: "committed", or "already committed" where the batch was committed before, and
        nothing has changed.

        UnknownAttemptError: one of them is not open any more, and nothing was committed.  Other
        errors as of `join_attempt`; after a TimedOutError nobody knows, so call it again."""
        return self._attempts().commit(identity, query, run, batch, attempts, owner)

    def abort_attempts(self, identity: str, query: str, run: str) -> None:
        """Abort whatever this run has open.  Errors as of `join_attempt`."""
        self._attempts().abort(identity, query, run)

    def check_attempt(
        self, identity: str, query: str, run: str, batch: int, attempt: Attempt
    ) -> str:
        """What has become of an attempt whose producer has failed: "open", or "already committed"
        where the batch was committed, with this attempt or without it.  Changes nothing.

        FencedRunError: another run has ended it, which the error names.  UnknownAttemptError: it
        has ended otherwise.  Other errors as of `join_attempt`."""
        return self._attempts().check(identity, query, run, batch, attempt)

    def _attempts(self) -> AttemptCalls:
        self.check()
        return AttemptCalls(self.cluster, self.settings["delivery.timeout.ms"])
