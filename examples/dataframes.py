"""pandas and Polars from plain Python, without Spark: a DataFrame becomes records of a topic, and
the topic becomes a DataFrame again.

    # starts its own broker; needs pandas and Polars
    python examples/dataframes.py
    # uses your broker; any Kafka broker works
    python examples/dataframes.py --bootstrap-servers 127.0.0.1:9092

A day of readings of three weather stations is written from pandas.  Polars reads it and computes
the mean of each hour; pandas reads the last hour and computes its mean too.  kdirect takes and
gives Arrow columns, so it makes no Python object of a record.  The exit status is 1 if one of the
two disagrees with what was written.
"""

from __future__ import annotations

import argparse
import io
import sys
import uuid
from contextlib import ExitStack

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa

import kdirect

STATIONS = ("harbour", "hill", "airport")
MINUTES = 24 * 60
DAY = pd.Timestamp("2026-06-01", tz="UTC")


def readings() -> pd.DataFrame:
    """One reading of each station a minute: station, at (a time), celsius."""
    rng = np.random.default_rng(1)
    at = pd.date_range(DAY, periods=MINUTES, freq="min")
    warmth = 15 - 6 * np.cos(2 * np.pi * np.arange(MINUTES) / MINUTES)
    frames = [
        pd.DataFrame(
            {"station": name, "at": at, "celsius": warmth + i + rng.normal(0, 0.5, len(at))}
        )
        for i, name in enumerate(STATIONS)
    ]
    return pd.concat(frames).sort_values("at", kind="stable", ignore_index=True).round(2)


def produce(session: kdirect.Session, topic: str, frame: pd.DataFrame) -> None:
    """Each row becomes a record: JSON as the value, the station as the key, `at` as its time."""
    values = frame[["station", "celsius"]].to_json(orient="records", lines=True).splitlines()
    records = pa.record_batch(
        {
            "value": pa.array(values, pa.string()),
            "key": pa.array(frame["station"], pa.string()),
            "timestamp": pa.array(frame["at"].dt.as_unit("ms")),
        }
    )
    with session.producer() as producer:
        producer.send_arrow(records, topic)
        producer.flush()


def read(settings: dict[str, str], topic: str, since_ms: int) -> pa.Table:
    """The records of a topic from a time on, as columns: key, value, topic, partition, offset,
    timestamp, timestampType."""
    with kdirect.Consumer(settings) as consumer:
        partitions = range(consumer.list_topics()[topic].partitions)
        tps = [kdirect.TopicPartition(topic, p) for p in partitions]
        ends = {tp: consumer.get_watermark_offsets(tp)[1] for tp in tps}
        # A partition that has no record of that time or later is read from its end: not at all.
        found = consumer.offsets_for_times(dict.fromkeys(tps, since_ms))
        starts = {tp: end if found[tp] is None else found[tp] for tp, end in ends.items()}
        consumer.assign(starts)
        batches = []
        while any(consumer.position(tp) < end for tp, end in ends.items()):
            batch = consumer.poll_arrow(1.0)
            if batch is not None:
                batches.append(batch)
    return pa.Table.from_batches(batches)


def hourly_by_polars(table: pa.Table) -> pl.DataFrame:
    """The mean of each hour and station."""
    schema = pl.Struct({"station": pl.String, "celsius": pl.Float64})
    return (
        pl.DataFrame(pl.from_arrow(table))
        .with_columns(pl.col("value").cast(pl.String).str.json_decode(schema).alias("reading"))
        .unnest("reading")
        .group_by("station", pl.col("timestamp").dt.truncate("1h").alias("hour"))
        .agg(pl.col("celsius").mean().round(2))
        .sort("hour", "station")
    )


def means_by_pandas(table: pa.Table) -> pd.Series:
    """The mean of each station over all records of the table."""
    values = table.select(["value"]).to_pandas()["value"]
    frame = pd.read_json(io.BytesIO(b"\n".join(values)), lines=True)
    return frame.groupby("station")["celsius"].mean().round(2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--bootstrap-servers", help="a running broker; default: start one here")
    parser.add_argument("--transport", default="auto", choices=("auto", "shm", "verbs", "tcp"))
    options = parser.parse_args()
    with ExitStack() as stack:
        servers = (
            options.bootstrap_servers or stack.enter_context(kdirect.Broker()).bootstrap_servers
        )
        settings = {"bootstrap.servers": servers, "transport": options.transport}
        session = stack.enter_context(kdirect.connect(settings))
        topic = f"weather-{uuid.uuid4().hex[:8]}"
        # The default retention of a week would delete records of an older day at once.
        session.admin.create_topic(topic, 4, configs={"retention.ms": "-1"})
        frame = readings()
        produce(session, topic, frame)
        everything = read(settings, topic, 0)
        hourly = hourly_by_polars(everything)
        last_hour = DAY + pd.Timedelta(hours=23)
        last = means_by_pandas(read(settings, topic, int(last_hour.timestamp() * 1000)))
        session.admin.delete_topic(topic)
    print(f"{everything.num_rows} readings; their last hour, by Polars and by pandas:")
    of_polars = hourly.filter(pl.col("hour") == last_hour.to_pydatetime())
    print(of_polars, last, sep="\n")
    wanted = frame[frame["at"] >= last_hour].groupby("station")["celsius"].mean().round(2)
    same = dict(zip(of_polars["station"], of_polars["celsius"])) == dict(last) == dict(wanted)
    return 0 if same and everything.num_rows == len(frame) and len(hourly) == 72 else 1


if __name__ == "__main__":
    sys.exit(main())
