"""The rows of compaction in the tables of brokers and topics (`options.py`).

Law: as in `options.py`, of which this is a part.  Names, defaults and bounds are those of Kafka
4.1.
"""

from __future__ import annotations

from kdirect.errors import ConfigError
from kdirect.option_table import Option

_POLICIES = ("compact", "delete")
_FOREVER = (1 << 63) - 1


def _cleanup_policy(names: list[str]) -> list[str]:
    """What happens to old segments: one or both policies, or with none they are kept."""
    names = list(dict.fromkeys(name.lower() for name in names))
    unknown = [name for name in names if name not in _POLICIES]
    if unknown:
        raise ConfigError(
            f"option cleanup.policy: {','.join(unknown)!r} is not allowed",
            hint="use delete, compact, or both with a comma between; none keeps everything",
        )
    return names


# fmt: off
CLEANER_BROKER_ROWS = (
    Option("log.cleanup.policy", "list", ["delete"],
           "What happens to old segments (topic: cleanup.policy): `delete` removes them by "
           "retention, `compact` keeps the last record of each key, `compact,delete` does both. "
           "Without a policy everything is kept.",
           check=_cleanup_policy),
    Option("log.cleaner.enable", "bool", True,
           "Compact topics with cleanup.policy=compact. Without it they grow, __consumer_offsets "
           "too."),
    Option("log.cleaner.threads", "int", 1, "Threads that compact, one log each at a time.",
           low=0, high=64),
    Option("log.cleaner.dedupe.buffer.size", "bytes", 128 << 20,
           "Memory of all threads for the keys of a log's dirty section, 24 bytes for each key. It "
           "is allocated while a log is compacted, and no more than its records may need.",
           low=4096, high=1 << 40),
    Option("log.cleaner.io.buffer.size", "bytes", 512 << 10,
           "Memory of all threads for what is written.", low=4096, high=1 << 30),
    Option("log.cleaner.io.buffer.load.factor", "float", 0.9,
           "How full the memory for keys may become. Fuller takes more keys at once, and longer "
           "for each.", low=0.01, high=1),
    Option("log.cleaner.io.max.bytes.per.second", "float", 1.7976931348623157e308,
           "Bytes that all threads together read and write in a second, at most.", low=1),
    Option("log.cleaner.backoff.ms", "ms", 15_000,
           "How long a thread sleeps when there is no log to compact.", low=0),
    Option("log.cleaner.min.cleanable.ratio", "float", 0.5,
           "Compact a log when more than this part of its bytes is dirty: new since it was "
           "compacted (topic: min.cleanable.dirty.ratio).", low=0, high=1),
    Option("log.cleaner.delete.retention.ms", "ms", 86_400_000,
           "How long tombstones and markers of transactions stay after their log was compacted "
           "(topic: delete.retention.ms).", low=0),
    Option("log.cleaner.min.compaction.lag.ms", "ms", 0,
           "Records that are younger are not compacted (topic: min.compaction.lag.ms).", low=0),
    Option("log.cleaner.max.compaction.lag.ms", "ms", _FOREVER,
           "A log with a dirty record that is older is compacted, however little of it is dirty "
           "(topic: max.compaction.lag.ms).", low=1),
)

# What the threads work by.  It may change while the broker runs, and then counts at once.
DYNAMIC_CLEANER = frozenset((
    "log.cleaner.backoff.ms", "log.cleaner.dedupe.buffer.size", "log.cleaner.io.buffer.size",
    "log.cleaner.io.buffer.load.factor", "log.cleaner.io.max.bytes.per.second",
    "log.cleaner.threads",
))

CLEANER_TOPIC_ROWS = (
    Option("cleanup.policy", "list", None, "Overrides log.cleanup.policy.",
           check=_cleanup_policy, synonym="log.cleanup.policy"),
    Option("delete.retention.ms", "ms", None, "Overrides log.cleaner.delete.retention.ms.", low=0,
           synonym="log.cleaner.delete.retention.ms"),
    Option("max.compaction.lag.ms", "ms", None, "Overrides log.cleaner.max.compaction.lag.ms.",
           low=1, synonym="log.cleaner.max.compaction.lag.ms"),
    Option("min.cleanable.dirty.ratio", "float", None,
           "Overrides log.cleaner.min.cleanable.ratio.", low=0, high=1,
           synonym="log.cleaner.min.cleanable.ratio"),
    Option("min.compaction.lag.ms", "ms", None, "Overrides log.cleaner.min.compaction.lag.ms.",
           low=0, synonym="log.cleaner.min.compaction.lag.ms"),
)
# fmt: on
