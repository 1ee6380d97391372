"""Spark connector: `spark.read.format("kdirect")`, `spark.readStream`, `df.write` and
`df.writeStream`.

Law of the room: it imports `kdirect.client`, `kdirect.format`, `kdirect.state` and the rows of
`kdirect.options`, and never the broker or the log.

Reading order: option_names and settings (what the options mean) and values (those of values),
offsets (planning, pure), broker_view and source (planning, with a broker), reading, value_rows and
prefetch (in a task), sink and exactly_once (writing), real_time (both, without an end), counts
(what Spark is told of both), datasource (the class that Spark instantiates), worker (what a Spark
worker process keeps), environment (Spark sessions), unpack and versions (where this
package comes from, and that all processes have the same one).
"""

from kdirect_spark.environment import configure, session_builder
from kdirect_spark.versions import check_jar

check_jar()

__all__ = ["configure", "session_builder"]
