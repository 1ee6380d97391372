"""Producers with transactions on the one partition of a broker in this process, whose coordinator
is played by the test: it verifies, and writes markers."""

from __future__ import annotations

import time

from confluent_kafka import admin as confluent_admin

from kdirect.log.kernel_transactions import admit_transaction, begin_verification, marker_batch
from kdirect.model import TopicPartition
from tests.log.compacted_logs import keyed

TP = TopicPartition("t", 0)
NOW = int(time.time() * 1000)


class Coordinator:
    """See the module.  Makes the topic, with these properties."""

    def __init__(self, broker, **configs: str) -> None:
        client = confluent_admin.AdminClient({"bootstrap.servers": broker.bootstrap_servers})
        topic = confluent_admin.NewTopic(
            "t", 1, 1, config={name.replace("_", "."): value for name, value in configs.items()}
        )
        client.create_topics([topic])["t"].result(10)
        self.broker = broker
        self.partition = broker.server.logs.partitions[TP]
        self.sequences: dict[int, int] = {}

    def write(
        self, producer: int, text: str, *, key: bytes | None = None, transactional: bool = True
    ) -> int:
        sequence = self.sequences.get(producer, 0)
        kernel = self.partition.kernel
        if transactional:
            _, ticket = begin_verification(kernel, producer, 0, sequence, NOW)
            assert ticket == 0 or admit_transaction(kernel, producer, 0, ticket)
        data = keyed(
            [(key, text.encode())],
            timestamp_ms=NOW,
            producer=(producer, 0, sequence),
            transactional=transactional,
        )
        self.sequences[producer] = sequence + 1
        result = self.partition.append(data, NOW)
        assert result.error == 0
        self.broker.server.waiters.notify_from_thread(TP)
        return result.base_offset

    def end(self, producer: int, *, commit: bool) -> int:
        batch = marker_batch(producer, 0, 0, commit, NOW)
        result = self.partition.append_marker(batch, NOW)
        assert result.error == 0
        self.broker.server.waiters.notify_from_thread(TP)
        return result.base_offset


__all__ = ["NOW", "TP", "Coordinator"]
