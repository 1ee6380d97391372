"""What differs from Spark's Kafka connector, and why.

Law: the table says what the runs have shown: a scenario of it that comes out alike is an error too.
docs/spark.md has the table, written by ``make parity``.
"""

from __future__ import annotations

KNOWN: dict[str, str] = {
    "load of a stream with endingTimestamp=5": "a stream has no end, so no ending option is taken",
    "load of a stream with startingOffsets=first": "refused by load(), there when the query starts",
    "maxRecordsPerPartition in a batch": "large partitions of a batch are split too",
    "each topic has its own start, by one word": (
        "in place of its partitions a topic may have one word or number"
    ),
    "asynchronous progress with the defaults of the sink": (
        "exactly once, a micro-batch is committed before Spark logs it; with `exactlyOnce=false` "
        "it works"
    ),
    "a partitioner of the user's": (
        "a class of Java cannot be asked; a column `partition` says where a row goes"
    ),
}
