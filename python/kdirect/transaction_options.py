"""The rows of transactions in the table of brokers (`options.py`).

Law: as in `options.py`, of which this is a part.  Names and defaults are those of Kafka 4.1, but
for `identity.expiration.ms`.
"""

from __future__ import annotations

from kdirect.option_table import Option

TRANSACTION_BROKER_ROWS = (
    Option("transaction.max.timeout.ms", "ms", 900_000,
           "Longest transaction.timeout.ms that a producer may ask for.", low=1, high=0x7FFFFFFF),
    Option("transactional.id.expiration.ms", "ms", 604_800_000,
           "Forget a transactional id that nobody has used for this long.", low=1),
    Option("identity.expiration.ms", "ms", 2_592_000_000,
           "Forget the last committed batches of an identity that writes exactly once "
           "(transactions.md) so long after its last run or commit. Whoever repeats a commit after "
           "that writes its batch once more.", low=1),
    Option("transaction.remove.expired.transaction.cleanup.interval.ms", "ms", 3_600_000,
           "How often the broker looks for such ids.", low=1),
    Option("transaction.abort.timed.out.transaction.cleanup.interval.ms", "ms", 10_000,
           "How often it looks for transactions that have taken longer than their producers "
           "allowed, and aborts them.", low=1),
    Option("transaction.state.log.num.partitions", "int", 50,
           "Partitions of __transaction_state; takes effect when the first transactional id is "
           "written.", low=1, high=1000),
    Option("transaction.state.log.replication.factor", "int", 3,
           "Replicas of __transaction_state. In a cluster no transaction can begin before so many "
           "brokers are there. Without zookeeper.connect there is one replica, whatever is given.",
           low=1, high=32767),
    Option("transaction.state.log.min.isr", "int", 2,
           "min.insync.replicas of __transaction_state, when the topic is created. With fewer in "
           "sync no transaction begins or ends. Without zookeeper.connect there is one replica, "
           "whatever is given.", low=1, high=32767),
    Option("transaction.state.log.segment.bytes", "bytes", 100 << 20,
           "Segment size of __transaction_state, when the topic is created. Its last segment is "
           "not compacted, and is read whole when a broker starts or becomes coordinator.",
           low=1 << 20, high=1 << 30),
    Option("transaction.partition.verification.enable", "bool", True,
           "Ask the coordinator whether a partition belongs to a transaction before its first "
           "record is taken (KIP-890).", only=True,
           why="a batch that comes late must not stay open without an end"),
)  # fmt: skip
