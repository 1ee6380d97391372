"""An election on a broker whose threads are held by a slow disk."""

from __future__ import annotations

import threading
from typing import Any

from kdirect.broker.room_threads import ROOM_THREADS
from kdirect.model import TopicPartition
from tests.broker.conftest import call_on_loop
from tests.members.wire import create, partition_row, produce
from tests.support import wait_until

TP, SLOW = TopicPartition("t", 0), TopicPartition("slow", 0)


def test_a_slow_allocation_holds_up_no_election(brokers: Any) -> None:
    """The new leader waited for the room of other partitions: to fence the log, to end its copy,
    and to begin the epoch."""
    ours = brokers(2)
    assert create(ours[0], TP.topic, assignment={0: (1, 2)}).error_code == 0
    assert create(ours[0], SLOW.topic, assignment={0: (2,)}).error_code == 0
    wait_until(lambda: produce(ours[0], TP)[0].error_code == 0, "it serves")
    server = ours[1]._server
    wait_until(lambda: {TP, SLOW} <= set(server.logs.partitions), "both are there")
    begun, may_end = threading.Semaphore(0), threading.Event()

    def allocate() -> None:
        begun.release()
        assert may_end.wait(60)

    def hold() -> None:
        for _ in range(2 * ROOM_THREADS):
            partition = server.logs.partitions[SLOW]
            server.files.for_partition(partition, allocate, lambda result, error: None)

    call_on_loop(ours[1], hold)
    try:
        for _ in range(ROOM_THREADS):
            assert begun.acquire(timeout=10)
        ours[0].stop()
        wait_until(lambda: partition_row(ours[1], TP).leader_id == 2, "it is elected")
        replicas = server.member.replicas._replicas
        wait_until(lambda: replicas[TP].leader is not None, "it leads")
        assert not may_end.is_set()
    finally:
        may_end.set()
