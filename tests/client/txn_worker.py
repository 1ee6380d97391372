"""A client that is killed: it reads numbers, and writes each of them twice in one transaction, to
two partitions, with the offsets that it has come to: ``python txn_worker.py servers batch``.

It goes on from what its group has committed, and ends when it is killed.
"""

from __future__ import annotations

import sys

import confluent_kafka as ck

COMMON = {
    "reconnect.backoff.max.ms": 200,
    # librdkafka 2.16 forgets its brokers when none is there, but not which one was the coordinator
    # of a group: send_offsets_to_transaction may wait for a connection to it for ever, with Apache
    # Kafka too (docs/transactions.md).
    "metadata.recovery.strategy": "none",
}


def work(servers: str, most: int) -> None:
    """Until it is killed."""
    consumer = ck.Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "g",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "session.timeout.ms": 6000,
            "socket.connection.setup.timeout.ms": 2000,
            **COMMON,
        }
    )
    consumer.assign([ck.TopicPartition("in", 0, _committed(consumer))])
    producer = ck.Producer(
        {
            "bootstrap.servers": servers,
            "transactional.id": "worker",
            "transaction.timeout.ms": 5000,
            "linger.ms": 0,
            **COMMON,
        }
    )
    producer.init_transactions(30)
    while True:
        got = [m for m in consumer.consume(most, 0.2) if m.error() is None]
        if not got:
            continue
        producer.begin_transaction()
        try:
            last = got[-1].offset()
            for message in got:
                for partition in (0, 1):
                    data = b"%d %d" % (message.offset(), last)  # as `tests.client.whole`
                    producer.produce("out", data, partition=partition)
            where = [ck.TopicPartition("in", 0, last + 1)]
            metadata = consumer.consumer_group_metadata()
            producer.send_offsets_to_transaction(where, metadata, 20)
            producer.commit_transaction(20)
        except ck.KafkaException as e:
            if e.args[0].fatal():
                raise
            producer.abort_transaction(20)
            consumer.seek(ck.TopicPartition("in", 0, _committed(consumer)))


def _committed(consumer: ck.Consumer) -> int:
    """Where the group goes on."""
    while True:
        try:
            (found,) = consumer.committed([ck.TopicPartition("in", 0)], 20)
        except ck.KafkaException:
            continue
        return found.offset if found.offset >= 0 else 0


if __name__ == "__main__":
    work(sys.argv[1], int(sys.argv[2]))
