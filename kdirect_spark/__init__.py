"""Spark connector: `spark.read.format("kdirect")`, `spark.readStream`, `df.write` and
`df.writeStream`.

Law of the room: it imports `kdirect.client`, `kdirect.format` and the rows of `kdirect.options`,
and never the broker or the log.

Reading order: settings (what the options mean), offsets (planning, pure), source and prefetch
(reading), sink (writing), datasource (the class that Spark instantiates), worker (what a Spark
worker process keeps), environment (Spark sessions).
"""

from kdirect_spark.environment import configure, session_builder

__all__ = ["configure", "session_builder"]
