"""The rows of Kafka's pools of threads in the table of brokers (`options.py`).

Law: as in `options.py`, of which this is a part.  Names, defaults and bounds are those of Kafka
4.1.  A broker here has one event loop, and threads for each log directory (`broker/files.py`), so
that nothing asks for these values: they are accepted, also while the broker runs, kept and shown,
without effect.
"""

from __future__ import annotations

from kdirect.option_table import Option

_NO_EFFECT = "Without effect: the broker has one event loop, and threads for each log directory."

# fmt: off
THREAD_BROKER_ROWS = (
    Option("background.threads", "int", 10, _NO_EFFECT, low=1, high=0x7FFFFFFF),
    Option("num.io.threads", "int", 8, _NO_EFFECT, low=1, high=0x7FFFFFFF),
    Option("num.network.threads", "int", 3, _NO_EFFECT, low=1, high=0x7FFFFFFF),
    Option("num.recovery.threads.per.data.dir", "int", 2, _NO_EFFECT, low=1, high=0x7FFFFFFF),
    Option("num.replica.fetchers", "int", 1, _NO_EFFECT, low=1, high=0x7FFFFFFF),
)
# fmt: on

IDLE_THREADS = frozenset(row.name for row in THREAD_BROKER_ROWS)
# Numbers of threads, with an effect or without: one change at most doubles or halves each.
DYNAMIC_THREADS = IDLE_THREADS | {
    "log.cleaner.threads",
    "remote.log.manager.copier.thread.pool.size",
    "remote.log.manager.expiration.thread.pool.size",
    "remote.log.reader.threads",
}

__all__ = ["DYNAMIC_THREADS", "IDLE_THREADS", "THREAD_BROKER_ROWS"]
