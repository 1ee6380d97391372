"""Values as columns in Spark: decoded by tasks (valueFormat), against Spark's functions over
the bytes of the same topic, which the same source reads.

JSON is held against from_json, Avro against from_avro where its jar can be had.  All run in one
session with one task slot, to Spark's noop sink, in turns after a warm-up of each; the figures are
medians.  Both must give the same rows.
"""

from __future__ import annotations

import io
import json
import statistics
import sys
import time
from typing import Any

import pyarrow as pa
from pyspark.sql import functions as F
from rows_spark import spark_and_broker, to_noop
from versus.jars import MissingJarsError, jars

SCHEMA = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "user", "type": "string"},
        {"name": "price", "type": "double"},
        {"name": "note", "type": ["null", "string"]},
        {"name": "kind", "type": {"type": "enum", "name": "Kind", "symbols": ["A", "B", "C"]}},
        {"name": "tags", "type": {"type": "array", "items": "string"}},
    ],
}
COLUMNS = "id long, user string, price double, note string, kind string, tags array<string>"
ROWS = 2_000_000
QUICK_ROWS = 20_000
ROUNDS = 5
COMPARED = 1000


def spark_values(seconds: float, quick: bool) -> list[dict[str, Any]]:
    """Rows a second of valueFormat=json and avro to noop on local[1], against Spark's functions."""
    rows = QUICK_ROWS if quick else ROWS
    try:
        extra = jars("formats")
    except MissingJarsError as e:
        print(f"spark-values: without from_avro: {e}", file=sys.stderr)
        extra = []
    figures = []
    with spark_and_broker(jars=extra) as (spark, address, _):
        for format in ("json", "avro") if extra else ("json",):
            transport = _fill(address, format, rows)
            ours, spark_own = _frames(spark, address, format)
            first = [df.orderBy("id").limit(COMPARED).collect() for df in (ours, spark_own)]
            assert first[0] == first[1], f"{format}: other rows than Spark's"
            runs = _turns(ours, spark_own, seconds / 2, quick)
            value, against = (rows / statistics.median(times) for times in runs)
            figures.append(
                {
                    "row": f"spark-values-{format}",
                    "value": value,
                    "unit": "rows/s",
                    "against": f"from_{format} over the bytes",
                    "against_value": against,
                    "ratio": value / against,
                    "settings": {
                        "rows": rows,
                        "columns": len(SCHEMA["fields"]),
                        "master": "local[1]",
                        "transport": transport,
                        "runs": len(runs[0]),
                    },
                }
            )
    return figures


def _frames(spark: Any, address: str, format: str) -> tuple[Any, Any]:
    from pyspark.sql.avro.functions import from_avro

    def reader() -> Any:
        found = spark.read.format("kdirect").option("kafka.bootstrap.servers", address)
        return found.option("subscribe", format)

    if format == "json":
        ours = reader().option("valueFormat", "json").schema(COLUMNS).load()
        value = F.from_json(F.col("value").cast("string"), COLUMNS)
    else:
        text = json.dumps(SCHEMA)
        ours = reader().option("valueFormat", "avro").option("avroSchema", text).load()
        value = from_avro("value", text)
    return ours, reader().load().select(value.alias("v")).select("v.*")


def _turns(ours: Any, spark_own: Any, seconds: float, quick: bool) -> list[list[float]]:
    runs: list[list[float]] = [[], []]
    for frame in (ours, spark_own):
        to_noop(frame)  # opens connections, compiles code
    began = time.monotonic()
    while len(runs[0]) < (1 if quick else ROUNDS) and (
        len(runs[0]) < 3 or time.monotonic() - began < seconds
    ):
        for times, frame in zip(runs, (ours, spark_own)):
            times.append(to_noop(frame))
    return runs


def _fill(address: str, topic: str, rows: int) -> str:
    """One partition with `rows` values of this format; the transport that reads will take."""
    import fastavro

    from kdirect.client.session import connect

    session = connect(address)
    session.admin.create_topic(topic, 1)
    schema = fastavro.parse_schema(json.loads(json.dumps(SCHEMA)))
    step = 50_000
    with session.producer() as producer:
        for start in range(0, rows, step):
            values = []
            for i in range(start, min(start + step, rows)):
                row = {
                    "id": i,
                    "user": f"user{i % 1000}",
                    "price": i / 4,
                    "note": None if i % 3 else "hello",
                    "kind": "ABC"[i % 3],
                    "tags": ["x"] * (i % 3),
                }
                if topic == "json":
                    values.append(json.dumps(row).encode())
                else:
                    stream = io.BytesIO()
                    fastavro.schemaless_writer(stream, schema, row)
                    values.append(stream.getvalue())
            batch = pa.record_batch({"value": pa.array(values, pa.binary())})
            producer.send_arrow(batch, topic)
    return str(session.transport)
