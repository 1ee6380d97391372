"""Copy words to another topic, in capital letters and exactly once, in transactions of ten.

    python examples/exactly_once.py

It starts a broker and writes a hundred words.  Every third transaction is aborted, as after a
failure: the consumer goes back to what its group has committed, and the words come once more.
"""

from __future__ import annotations

import kdirect
from kdirect import TopicPartition

WORDS = TopicPartition("words", 0)


def main() -> None:
    with kdirect.Broker() as broker:
        servers = {"bootstrap.servers": broker.bootstrap_servers}
        with kdirect.connect(servers) as session, session.producer() as producer:
            session.admin.create_topic("words", 1)
            session.admin.create_topic("capitals", 1)
            for i in range(100):
                producer.produce("words", f"word {i}")

        group = {"group.id": "copy", "isolation.level": "read_committed"}
        consumer = kdirect.Consumer({**servers, **group, "enable.auto.commit": False})
        producer = kdirect.Producer({**servers, "transactional.id": "copy-1"})
        producer.init_transactions()
        consumer.assign({WORDS: 0})
        aborted = committed = 0
        while committed < 10:
            words = []
            while len(words) < 10:
                words += consumer.consume(10 - len(words), 1)
            producer.begin_transaction()
            for word in words:
                producer.produce("capitals", word.value().upper())
            producer.send_offsets_to_transaction(
                {WORDS: words[-1].offset() + 1}, consumer.consumer_group_metadata()
            )
            if (aborted + committed) % 3 == 2:
                producer.abort_transaction()
                aborted += 1
                consumer.seek(WORDS, consumer.committed([WORDS])[WORDS] or 0)
            else:
                producer.commit_transaction()
                committed += 1
        path = producer.statistics()["paths"]["capitals-0"]
        producer.close()
        consumer.close()
        print(f"{committed} transactions committed, {aborted} aborted, written over {path}")


if __name__ == "__main__":
    main()
