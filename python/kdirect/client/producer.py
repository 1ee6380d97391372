"""Producing: records and Arrow batches to the partitions that lead them, over RDMA or Kafka's protocol.

Owns: the choice of partition, and records on their way into batches.  How a batch reaches its partition, over which datapath, and what
is repeated when that breaks is `kdirect.client.produce_paths`.

Records without a key go where RDMA access can be had: a producer keeps to one partition for a while, gives it back, and takes the next
that is free.

Thread-safe: one lock a producer.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kdirect.client.partitioner import murmur2, partition_for_keys
from kdirect.client.produce_paths import ProducePaths
from kdirect.client.session import Session, connect
from kdirect.errors import (
    ClosedError,
    ConfigError,
    UnknownTopicError,
)
from kdirect.format.codec import ArrowEncoder, encode_records
from kdirect.model import TopicPartition, check_topic_name
from kdirect.options import CLIENT

STICKY_BYTES = 8 << 20  # records without a key stay with one partition for so long: access to another costs two requests
Header = tuple[str, bytes | None]


class Producer:
    """Sends records.  `settings` are CLIENT options (or "host:port"); made by `kdirect.Producer(...)` or `Session.producer`.

    `produce` sends one record as a batch of its own (over RDMA at once; over TCP small records are gathered until `flush` or
    64 KiB); `send_arrow` sends columns in batches of `batch.bytes`.  Both return before the broker has answered; `flush` waits for
    the answers and raises what went wrong.  Use as a context manager, or call `close`.
    """

    def __init__(self, settings: Mapping[str, Any] | str, *, session: Session | None = None) -> None:
        given = {"bootstrap.servers": settings} if isinstance(settings, str) else dict(settings)
        self.settings = CLIENT.resolve({k: v for k, v in given.items() if v is not None})
        self._session = session if session is not None else connect(self.settings)
        self._lock = threading.RLock()
        self._partitions: dict[str, int] = {}
        self._places: dict[str, list[TopicPartition]] = {}
        self._sticky: dict[str, list[int]] = {}
        self._encoder = ArrowEncoder(compression=self.settings["compression.type"], batch_bytes=self.settings["batch.bytes"])
        self._closed = False
        self.paths = ProducePaths(self._session, self.settings)

    def __enter__(self) -> Producer:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    # -- sending ---------------------------------------------------------------------------------------

    def produce(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None = None,
        partition: int | None = None,
        headers: Sequence[Header] | None = None,
        timestamp_ms: int = -1,
    ) -> None:
        """Send one record.  `partition` None: by the key (murmur2, as Kafka's), or sticky without a key.  `timestamp_ms` -1: now."""
        with self._lock:
            if partition is None:
                partition = self._choose(topic, key, len(value) if value is not None else 0)
            tp = self._place(topic, partition)
            plain = headers is None and self.settings["compression.type"] == "none"
            if not (plain and self.paths.try_record(tp, value, key, timestamp_ms)):
                self._one(tp, value, key, headers, timestamp_ms)

    def produce_sync(
        self, topic: str, value: bytes | None, key: bytes | None = None, partition: int | None = None, timestamp_ms: int = -1
    ) -> int:
        """Send one record and wait for its acknowledgement; the record's offset.  Raises DeliveryError."""
        with self._lock:
            if partition is None:
                partition = self._choose(topic, key, len(value) if value is not None else 0)
            tp = self._place(topic, partition)
            if self.settings["compression.type"] == "none" and (offset := self.paths.record_sync(tp, value, key, timestamp_ms)) >= 0:
                return offset
            self._one(tp, value, key, None, timestamp_ms)
            return self.paths.finish(tp)

    def _one(self, tp: TopicPartition, value: bytes | None, key: bytes | None, headers: Sequence[Header] | None, timestamp_ms: int) -> None:
        stamp = timestamp_ms if timestamp_ms >= 0 else int(time.time() * 1000)
        if not self.paths.gather(tp, key, value, headers, stamp):
            self.paths.send(
                tp, encode_records([(key, value, list(headers or ()), stamp)], compression=self.settings["compression.type"]), 1
            )

    def send_arrow(self, data: pa.RecordBatch | pa.Table, topic: str | None = None, *, timestamp_ms: int | None = None) -> int:
        """Send columns: `value` (binary or string) and optionally `key`, `headers` (list<struct<key:string,value:binary>>), `topic`,
        `partition` (int), `timestamp` (timestamp; else `timestamp_ms`, else now).  The argument `topic` goes before the column.  Returns
        the number of records."""
        with self._lock:
            self._check()
            if data.num_rows == 0:
                return 0
            columns = {name: data.column(name) for name in data.schema.names}
            if "value" not in columns:
                raise ConfigError("the column `value` is missing", hint="name the column to send `value`")
            if topic is not None:
                self._send_topic(topic, columns, data.num_rows, timestamp_ms)
                return data.num_rows
            if "topic" not in columns:
                raise ConfigError("no topic: neither an argument nor a column `topic`", hint="set the option topic, or add the column")
            if columns["topic"].null_count:
                raise ConfigError(
                    f"{columns['topic'].null_count} rows have no topic", hint="fill the column `topic`, or set the option topic"
                )
            for name in pc.unique(columns["topic"]).to_pylist():
                mask = pc.equal(columns["topic"], name)
                part = {k: pc.filter(v, mask) for k, v in columns.items()}
                self._send_topic(name, part, len(part["value"]), timestamp_ms)
            return data.num_rows

    def _send_topic(self, topic: str, columns: dict[str, Any], rows: int, timestamp_ms: int | None) -> None:
        count = self._partition_count(topic)
        keys = columns.get("key")
        if keys is not None and keys.null_count == rows:
            keys = None
        given = columns.get("partition")
        if given is not None and given.null_count == rows:
            given = None
        if given is None and (keys is None or count == 1):
            self._send_rows(topic, self._choose(topic, None, columns["value"].nbytes) if count > 1 else 0, columns, keys, timestamp_ms)
            return
        wanted = np.zeros(rows, dtype=np.int32)
        if keys is not None:
            wanted[:] = partition_for_keys(_one_array(keys), count)
            if keys.null_count:
                wanted[np.asarray(_one_array(pc.is_null(keys)))] = self._choose(topic, None)
        elif given is not None and given.null_count:
            wanted[:] = self._choose(topic, None)
        if given is not None:
            known = np.asarray(_one_array(pc.is_valid(given)))
            chosen = np.asarray(_one_array(pc.fill_null(pc.cast(given, pa.int32()), 0)))
            wanted[known] = chosen[known]
            bad = chosen[known & ((chosen < 0) | (chosen >= count))]
            if len(bad):
                raise UnknownTopicError(
                    f"partition {int(bad[0])} of topic {topic} does not exist", hint=f"it has {count} partitions, 0 to {count - 1}"
                )
        # One stable sort brings each partition's rows together in their order.
        order = np.argsort(wanted, kind="stable")
        ends = np.cumsum(np.bincount(wanted, minlength=count))
        rearranged = {k: v.take(pa.array(order)) for k, v in columns.items() if k in ("value", "key", "headers", "timestamp")}
        start = 0
        for partition, end in enumerate(ends.tolist()):
            if end > start:
                part = {k: v.slice(start, end - start) for k, v in rearranged.items()}
                self._send_rows(topic, partition, part, part.get("key") if keys is not None else None, timestamp_ms)
            start = end

    def _send_rows(self, topic: str, partition: int, columns: dict[str, Any], keys: Any, timestamp_ms: int | None) -> None:
        timestamps = columns.get("timestamp")
        if timestamps is not None:
            timestamps = pc.cast(pc.cast(timestamps, pa.timestamp("ms", getattr(timestamps.type, "tz", None)), safe=False), pa.int64())
        now = timestamp_ms if timestamp_ms is not None else int(time.time() * 1000)
        batches = self._encoder.encode(columns["value"], keys, columns.get("headers"), timestamps, default_timestamp_ms=now)
        for batch in batches:
            self.paths.send(self._place(topic, partition), batch.data, batch.records_count)

    # -- partitions ------------------------------------------------------------------------------------

    def _partition_count(self, topic: str) -> int:
        count = self._partitions.get(topic)
        if count is None:
            count = self._partitions[check_topic_name(topic)] = len(self._session.cluster.partitions(topic))
        return count

    def _choose(self, topic: str, key: bytes | None, size: int = 0) -> int:
        """The partition of a record with `key`, or of about `size` bytes of records without one."""
        count = self._partitions.get(topic) or self._partition_count(topic)
        if key is not None:
            return (murmur2(key) & 0x7FFFFFFF) % count
        sticky = self._sticky.get(topic)
        if sticky is None:
            sticky = self._sticky[topic] = [random.randrange(count), STICKY_BYTES]
        sticky[1] += size + 64
        if sticky[1] > STICKY_BYTES:
            sticky[0] = self._next_free(topic, sticky[0], count)
            sticky[1] = 0
        return sticky[0]

    def _next_free(self, topic: str, current: int, count: int) -> int:
        """The next partition that can be written by RDMA, giving back the current one; the next at all if there is none."""
        if count == 1:
            return 0
        self.paths.give_back(self._place(topic, current))
        if self._session.transport != "tcp":
            for step in range(1, count + 1):
                partition = (current + step) % count
                if self.paths.is_direct(self._place(topic, partition)):
                    return partition
        return (current + 1) % count

    def _check(self) -> None:
        if self._closed:
            raise ClosedError("the producer is closed", hint="make a new one")

    def _place(self, topic: str, partition: int) -> TopicPartition:
        places = self._places.get(topic)
        if places is None or self._closed:
            self._check()
            places = self._places[topic] = [TopicPartition(topic, i) for i in range(self._partition_count(topic))]
        if not 0 <= partition < len(places):
            raise UnknownTopicError(
                f"partition {partition} of topic {topic} does not exist", hint=f"it has {len(places)} partitions, 0 to {len(places) - 1}"
            )
        return places[partition]

    # -- finishing -------------------------------------------------------------------------------------

    def flush(self, timeout_ms: int | None = None) -> None:
        """Wait until everything sent is acknowledged.  Raises DeliveryError (the first, if several)."""
        with self._lock:
            self._check()
            kept = self.paths.timeout_ms
            if timeout_ms is not None:
                self.paths.timeout_ms = timeout_ms
            try:
                self.paths.flush()
            finally:
                self.paths.timeout_ms = kept

    def close(self) -> None:
        """Flush, then give access back."""
        if self._closed:
            return
        try:
            self.flush()
        finally:
            self.abort()

    def abort(self) -> None:
        """Give access back without waiting; what is not acknowledged may or may not be committed."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self.paths.abort()

    def statistics(self) -> dict[str, int]:
        """Records and bytes acknowledged, by path: `rdma_records`, `rdma_bytes`, `rdma_requests`, `tcp_records`, `tcp_bytes`,
        `tcp_requests`."""
        with self._lock:
            return self.paths.statistics()


def _one_array(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """`column` as one array (a table's columns come in chunks)."""
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
