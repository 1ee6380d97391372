"""What tests of whole jobs share: a topic of events, a plan over it, and what an independent engine
says that comes out."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from kdirect.client.session import Session
from kdirect.format.fixed_layout import FixedLayout
from kdirect.model import TopicPartition
from kdirect.state import AggregatePlan, Input, Tumbling
from kdirect.state.launcher import LocalLauncher

TOPIC = "events"
LAYOUT = FixedLayout.of("key:int64", "time:timestamp(ms)", "amount:int64", "price:float64")
SCHEMA = {"key": "int64", "time": "timestamp(ms)", "amount": "int64", "price": "float64"}
WINDOW_US = 1_000_000
FIRST_MS = 1_700_000_000_000


def plan(**settings: Any) -> AggregatePlan:
    """Count, sum and average by key and second."""
    given = Input(
        topic=TOPIC, schema=SCHEMA, value_format="fixed", layout=LAYOUT, time="time", **settings
    )
    return AggregatePlan(
        input=given,
        keys=("key",),
        window=Tumbling(size_us=WINDOW_US),
        aggregates=("count", ("sum", "amount", "total"), ("avg", "price", "mean")),
    )


def events(seed: int, records: int, keys: int = 40, start_ms: int = FIRST_MS) -> np.ndarray:
    """Records in the order of their event time, ten to a millisecond."""
    random = np.random.default_rng(seed)
    rows = np.zeros(records, LAYOUT.dtype())
    rows["key"] = random.integers(0, keys, records)
    rows["time"] = start_ms + np.arange(records) // 10
    rows["amount"] = random.integers(-1000, 1000, records)
    rows["price"] = random.random(records)
    return rows


def write(session: Session, rows: np.ndarray, partitions: int, replicas: int = 1) -> None:
    """Append the rows to the topic, in turn to its partitions."""
    if TOPIC not in session.list_topics():
        session.admin.create_topic(TOPIC, partitions, replicas)
    with session.producer() as producer:
        for partition in range(partitions):
            own = np.ascontiguousarray(rows[partition::partitions])
            batch = pa.record_batch(
                {
                    "value": LAYOUT.values(own),
                    "partition": pa.array(np.full(len(own), partition, np.int32)),
                }
            )
            producer.send_arrow(batch, TOPIC)
        producer.flush()


def read(session: Session) -> list[np.ndarray]:
    """The rows of each partition of the topic, as any consumer gets them."""
    found = []
    for partition in range(session.list_topics()[TOPIC]):
        tp = TopicPartition(TOPIC, partition)
        end = session.latest_offsets([tp])[tp]
        with session.reader(tp, 0, end) as reader:
            values = [v for batch in reader for v in batch.column("value").to_pylist()]
        found.append(np.frombuffer(b"".join(values), LAYOUT.dtype()))
    return found


Rows = dict[tuple[int, int], tuple[int, int, float]]


def expected(session: Session) -> Rows:
    """What DuckDB makes of the topic: by (key, start of the window in ms) the count, the sum and
    the average, of the windows that all partitions have passed."""
    return expected_of(read(session))


def expected_of(partitions: list[np.ndarray]) -> Rows:
    """The same, of these rows of each partition."""
    closes = min(int(rows["time"].max()) for rows in partitions if len(rows))
    rows = np.concatenate(partitions)
    table = pa.table({name: rows[name] for name in ("key", "time", "amount", "price")})
    size = WINDOW_US // 1000
    with duckdb.connect() as duck:
        duck.register("events", table)
        found = duck.execute(
            "select key, start, count(*), sum(amount), avg(price)"
            f" from (select *, time - time % {size} as start from events)"
            f" where start + {size} <= {closes} group by key, start"
        ).fetchall()
    return {(key, start): (count, int(total), mean) for key, start, count, total, mean in found}


def rows_of(tables: Iterable[pa.Table]) -> Rows:
    """The output of a job in the same form.  AssertionError if a window came twice."""
    found: Rows = {}
    for table in tables:
        columns = [table.column(name) for name in ("key", "window_start", "window_end")]
        keys = columns[0].to_pylist()
        starts = (columns[1].cast(pa.int64()).to_numpy() // 1000).tolist()
        values = [table.column(name).to_pylist() for name in ("count", "total", "mean")]
        for key, start, *row in zip(keys, starts, *values, strict=True):
            assert (key, start) not in found, f"key {key} of window {start} came twice"
            found[key, start] = tuple(row)
    return found


def assert_same(found: Rows, wanted: Rows) -> None:
    """Equal, floats but for their last digits."""
    assert found.keys() == wanted.keys(), (
        f"{len(found.keys() - wanted.keys())} too many, {len(wanted.keys() - found.keys())} lost"
    )
    for key, (count, total, mean) in wanted.items():
        assert found[key][:2] == (count, total), key
        assert abs(found[key][2] - mean) <= 1e-9 * abs(mean), key


def killing(step: str, number: int, mark: Path, victim: str = "self") -> LocalLauncher:
    """A launcher of executors of which one kills itself, its parent or another process at a step;
    see failing_executor.py."""
    program = Path(__file__).with_name("failing_executor.py")
    return LocalLauncher((sys.executable, str(program), step, str(number), str(mark), victim))
