"""Consuming from plain Python: records one by one, or Arrow batches, from many partitions.

Owns: the assignment, one decoder a partition, and the round over partitions.  Over RDMA all partitions share
one queue pair and one slot region: an empty `poll` is one READ, and costs the broker nothing.

No consumer groups: partitions are assigned by the caller; offsets can be committed for a group by
`Session.admin` so that lag shows.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

from kdirect.client.direct import DirectFetcher
from kdirect.client.session import FIRST_WAIT_S, LONGEST_WAIT_S, Session, connect
from kdirect.client.tcp import TcpFetcher
from kdirect.errors import BrokerUnavailableError, ClosedError, ConfigError, QueuePairError
from kdirect.format.codec import ArrowDecoder, decode_records
from kdirect.model import EARLIEST_OFFSET, LATEST_OFFSET, Record, TopicPartition
from kdirect.options import CLIENT

NO_STOP = 2**63 - 1
SPIN_POLLS = 200  # empty polls in a row before the consumer starts to sleep between them


class Consumer:
    """Reads assigned partitions.  `settings`: CLIENT options, or "host:port".  One thread at a time.

    ``assign({tp: offset})`` (EARLIEST_OFFSET -2, LATEST_OFFSET -1, or an offset) or ``subscribe(topics, start)``; then `poll` for
    one record, or `poll_arrow` for many.  `position(tp)` is the offset of the next record, `seek` moves it.  Connections lost are
    replaced, and reading goes on behind the last record handed out.
    """

    def __init__(self, settings: Mapping[str, Any] | str, *, session: Session | None = None) -> None:
        given = {"bootstrap.servers": settings} if isinstance(settings, str) else dict(settings)
        self.settings = CLIENT.resolve({k: v for k, v in given.items() if v is not None})
        self._session = session if session is not None else connect(self.settings)
        self._positions: dict[TopicPartition, int] = {}
        self._fetcher: DirectFetcher | None = None
        self._tcp: dict[TopicPartition, TcpFetcher] = {}
        self._tcp_data: dict[TopicPartition, memoryview] = {}
        self._ready: deque[Record] = deque()
        self._round: list[TopicPartition] = []
        self._closed = False

    def __enter__(self) -> Consumer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- assignment ------------------------------------------------------------------------------------

    def subscribe(self, topics: Iterable[str] | str, start: int = LATEST_OFFSET) -> None:
        """Read all partitions that these topics have now, from `start` (LATEST_OFFSET or EARLIEST_OFFSET)."""
        names = [topics] if isinstance(topics, str) else list(topics)
        cluster = self._session.cluster
        self.assign({TopicPartition(name, i): start for name in names for i in cluster.partitions(name)})

    def assign(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Read exactly these partitions, from these offsets."""
        self._check()
        resolved = dict(offsets)
        earliest = [tp for tp, o in resolved.items() if o == EARLIEST_OFFSET]
        latest = [tp for tp, o in resolved.items() if o == LATEST_OFFSET]
        if earliest:
            resolved |= self._session.earliest_offsets(earliest)
        if latest:
            resolved |= self._session.latest_offsets(latest)
        for tp, offset in resolved.items():
            if offset < 0:
                raise ConfigError(f"offset {offset} of {tp} cannot be", hint="give an offset, -1 (latest) or -2 (earliest)")
        self._drop()
        self._positions = resolved
        self._round = list(resolved)
        self._ready.clear()
        self._open()

    def _open(self) -> None:
        if not self._positions:
            return
        if self._session.transport == "tcp":
            isolation = self.settings["isolation.level"]
            self._tcp = {tp: TcpFetcher(self._session.cluster, tp, o, isolation_level=isolation) for tp, o in self._positions.items()}
            self._tcp_data = {}
            return
        fetcher = DirectFetcher(self._session.channel(self._round[0]), self.settings)
        try:
            fetcher.assign(self._positions)
        except BaseException:
            fetcher.close()
            raise
        self._fetcher = fetcher

    def _drop(self) -> None:
        fetcher, self._fetcher = self._fetcher, None
        if fetcher is not None:
            fetcher.close()
        for tcp in self._tcp.values():
            tcp.close()
        self._tcp = {}

    @property
    def assignment(self) -> tuple[TopicPartition, ...]:
        return tuple(self._positions)

    def position(self, tp: TopicPartition) -> int:
        """Offset of the next record that will be handed out."""
        for record in self._ready:
            if record.topic == tp.topic and record.partition == tp.partition:
                return record.offset
        return self._positions[tp]

    def seek(self, tp: TopicPartition, offset: int) -> None:
        """Go on at `offset` (or -1, -2) on this partition."""
        if tp not in self._positions:
            raise ConfigError(f"{tp} is not assigned", hint="assign it first")
        here = {x: self.position(x) for x in self._positions}
        self.assign({**here, tp: offset})

    def watermarks(self, tp: TopicPartition) -> tuple[int, int]:
        """(log start offset, high watermark)."""
        return self._session.watermarks([tp])[tp]

    # -- polling ---------------------------------------------------------------------------------------

    def poll(self, timeout_ms: float = 0) -> Record | None:
        """The next record, or None when there is none within `timeout_ms`."""
        ready = self._ready
        if not ready:
            self._wait(self._take_records, timeout_ms)
        return ready.popleft() if ready else None

    def poll_arrow(self, timeout_ms: float = 0, *, max_bytes: int = 4 << 20, include_headers: bool = False) -> pa.RecordBatch | None:
        """The next records of one partition as columns (about `max_bytes`), or None when there are none within `timeout_ms`."""
        if self._ready:
            raise ConfigError("records handed to poll() are still waiting", hint="use either poll or poll_arrow, or seek in between")
        found: list[pa.RecordBatch] = []

        def take(tp: TopicPartition) -> bool:
            start = self._positions[tp]
            decoder = ArrowDecoder(tp.topic, tp.partition, start_offset=start, stop_offset=NO_STOP, include_headers=include_headers,
                                   target_bytes=max_bytes, max_decompressed_bytes=self.settings["max.batch.bytes"])  # fmt: skip
            while not decoder.full and (self._feed(tp, decoder.feed, decoder.feed_address) or self._fill(tp, decoder.next_offset)):
                pass
            self._positions[tp] = max(start, decoder.next_offset)
            if decoder.rows:
                found.append(decoder.take())
            return bool(found)

        self._wait(take, timeout_ms)
        return found[0] if found else None

    def _take_records(self, tp: TopicPartition) -> bool:
        """Move whole batches of `tp` into `_ready`: those at hand, else what can be READ now."""
        topic, partition = tp
        position = self._positions[tp]
        fetcher = self._fetcher
        stream = fetcher.stream(tp) if fetcher is not None else None
        while True:
            if stream is not None:
                data: Any = stream.bytes() if stream.buffered else None
            else:
                data = self._tcp_data.get(tp)
            if data:
                records, consumed, next_offset = decode_records(data, topic, partition, position)
                if consumed:
                    if stream is not None:
                        stream.consume(consumed)
                    else:
                        self._tcp_data[tp] = data[consumed:]
                    if next_offset > position:
                        self._positions[tp] = position = next_offset
                    if records:
                        self._ready.extend(records)
                        return True
                    continue
            if not (fetcher.fill(tp, position) if fetcher is not None else self._fill(tp, position)):
                return False

    def _feed(self, tp: TopicPartition, feed: Any, feed_address: Any) -> bool:
        if self._fetcher is not None:
            address, length = self._fetcher.window(tp)
            consumed = feed_address(address, length) if length else 0
            self._fetcher.stream(tp).consume(consumed)
        else:
            data = self._tcp_data.get(tp, memoryview(b""))
            consumed = feed(data) if len(data) else 0
            self._tcp_data[tp] = data[consumed:]
        return consumed > 0

    def _fill(self, tp: TopicPartition, next_offset: int) -> bool:
        if self._fetcher is not None:
            return self._fetcher.fill(tp, next_offset)
        fetcher = self._tcp[tp]
        fetcher.seek(next_offset)
        self._tcp_data[tp] = fetcher.fetch(self.settings["fetch.max.read.bytes"], 0).data
        return len(self._tcp_data[tp]) > 0

    def _wait(self, take: Any, timeout_ms: float) -> None:
        """Go round the partitions until `take(tp)` says that it got something, or the time is over."""
        if self._closed:
            self._check()
        deadline = None
        pause = FIRST_WAIT_S
        empty = failures = 0
        while True:
            try:
                for i, tp in enumerate(self._round):
                    if take(tp):
                        if len(self._round) > 1:
                            self._round = self._round[i + 1 :] + self._round[: i + 1]
                        return
                failures = 0
            except (QueuePairError, BrokerUnavailableError, ClosedError):
                failures += 1
                if failures > 3 or self._session.closed or self._closed:
                    raise
                self._drop()
                self._open()
                continue
            if timeout_ms <= 0:
                return
            now = time.monotonic()
            if deadline is None:
                deadline = now + timeout_ms / 1000
            if now >= deadline:
                return
            empty += 1
            if empty > SPIN_POLLS or self._fetcher is None:
                time.sleep(min(pause, max(0.0, deadline - now)))
                pause = min(pause * 2, LONGEST_WAIT_S)

    # -- end -------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._closed:
            raise ClosedError("the consumer is closed", hint="make a new one")

    def statistics(self) -> dict[str, int]:
        """reads, read_bytes, slot_reads ... over RDMA; empty over TCP."""
        return self._fetcher.statistics() if self._fetcher is not None else {}

    def close(self) -> None:
        """Give access back."""
        if not self._closed:
            self._closed = True
            self._drop()
