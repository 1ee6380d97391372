"""A client that is killed: it reads numbers, and writes each of them twice in one transaction, to
two partitions, with the offsets that it has come to:
``python producer_worker.py servers batch setting=value ...``.

It goes on from what its group has committed, and ends when it is killed or cannot go on.
"""

from __future__ import annotations

import sys
import time
from functools import partial

import kdirect
from kdirect import KdirectError, TopicPartition

IN = TopicPartition("in", 0)


def work(servers: str, most: int, settings: dict[str, str]) -> None:
    """Until it is killed."""
    consumer = kdirect.Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "g",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            **{name: value for name, value in settings.items() if name == "transport"},
        }
    )
    producer = kdirect.Producer(
        {
            "bootstrap.servers": servers,
            "transactional.id": "worker",
            "transaction.timeout.ms": 5000,
            **settings,
        }
    )
    patiently(lambda: producer.init_transactions(30))
    seek(consumer)
    while True:
        got = consumer.consume(most, 0.2)
        if not got:
            continue
        try:
            producer.begin_transaction()
            last = got[-1].offset()
            for message in got:
                for partition in (0, 1):
                    data = b"%d %d" % (message.offset(), last)  # as `tests.client.whole`
                    producer.produce("out", data, partition=partition)
            where = {IN: last + 1}
            metadata = consumer.consumer_group_metadata()
            patiently(partial(producer.send_offsets_to_transaction, where, metadata, 20))
            patiently(lambda: producer.commit_transaction(20))
        except KdirectError as e:
            if not e.txn_requires_abort:
                raise
            patiently(lambda: producer.abort_transaction(20))
            seek(consumer)


def seek(consumer: kdirect.Consumer) -> None:
    """Go on where the group has come to."""
    found = patiently(lambda: consumer.committed([IN]))[IN]
    consumer.assign({IN: found or 0})


def patiently(call):
    """`call`, as long as it only ran out of time."""
    while True:
        try:
            return call()
        except KdirectError as e:
            if not e.retriable:
                raise
            time.sleep(0.05)


if __name__ == "__main__":
    work(sys.argv[1], int(sys.argv[2]), dict(x.split("=") for x in sys.argv[3:]))
