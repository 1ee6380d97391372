"""Spark connector: `spark.read.format("kdirect")`, `spark.readStream`, `df.write` and
`df.writeStream`.

Law of the room: imports `kdirect.client`, `kdirect.format` and the rows of `kdirect.options`; never
the broker or the log.

Reading order: settings (what the options mean), offsets (planning, pure), source and prefetch
(reading), sink (writing), datasource (the face that Spark sees), worker (what lives in a Spark
worker process), environment (Spark sessions).
"""

from kdirect_spark.environment import configure, session_builder

__all__ = ["configure", "session_builder"]
