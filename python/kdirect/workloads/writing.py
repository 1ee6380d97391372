"""Writes the records of a stream into a topic, column-wise: no record is a Python object.

Record number i goes to partition i mod P, so that event time advances in all partitions alike.
`write` uses the client's producer and its encoder: it is what opens connections in this room.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from kdirect.client.session import Session
from kdirect.errors import ConfigError
from kdirect.workloads.workload import Stream

BLOCK_BYTES = 4 << 20  # of values that are handed to the producer at a time


@dataclass(frozen=True, slots=True)
class Written:
    """What `write` did: `value_bytes` of records, in `seconds`."""

    records: int
    value_bytes: int
    seconds: float


def write(
    session: Session,
    stream: Stream,
    topic: str,
    *,
    records: int,
    partitions: int | None = None,
    first: int = 0,
    **settings: Any,
) -> Written:
    """Write the records number `first` to `first` + `records` of the stream.

    The topic is created with `partitions` (by default 1) if it is not there; else it must have that
    many if they are given.  `settings` are those of the producer (`compression_type="zstd"`).
    Returns when the broker has acknowledged everything.  Raises ConfigError, and what
    `Producer.flush` raises."""
    if records < 0 or first < 0:
        raise ConfigError(f"{records} records from {first} on", hint="give 0 or more")
    count = _partitions(session, topic, partitions)
    began = time.monotonic()
    settings.setdefault("batch_bytes", 1 << 20)
    rows = max(1, BLOCK_BYTES // stream.layout.size)
    out = np.empty(rows, stream.layout.dtype())
    numbers = pa.array(np.zeros(rows, np.int32))
    partition_of = [
        pa.array(np.full(rows, partition, np.int32)) if partition else numbers
        for partition in range(count)
    ]
    with session.producer(**settings) as producer:
        for start in range(0, records, rows * count):
            for begin in range(start, start + count):
                own = min(rows, (records - begin + count - 1) // count)
                if own <= 0:
                    continue
                made = stream.records(first + begin, own, step=count, out=out)
                partition = partition_of[(first + begin) % count]
                producer.send_arrow(
                    pa.RecordBatch.from_arrays(
                        [stream.layout.values(made), partition.slice(0, own)],
                        names=["value", "partition"],
                    ),
                    topic,
                )
        producer.flush()
    return Written(records, records * stream.layout.size, time.monotonic() - began)


def _partitions(session: Session, topic: str, wanted: int | None) -> int:
    """How many partitions the topic has, which is created if need be."""
    if wanted is not None and wanted < 1:
        raise ConfigError(f"a topic of {wanted} partitions", hint="give 1 or more")
    found = session.list_topics().get(topic)
    if found is None:
        session.admin.create_topic(topic, wanted or 1)
        return wanted or 1
    if wanted is not None and wanted != found:
        raise ConfigError(
            f"the topic {topic} has {found} partitions, not {wanted}",
            hint="write to another topic, or leave the number out",
        )
    return found
