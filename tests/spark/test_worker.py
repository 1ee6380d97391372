"""What a worker process keeps from task to task."""

from __future__ import annotations

from kdirect_spark import worker
from tests.support import BrokerProcess


def settings(broker: BrokerProcess, number: int) -> dict[str, str]:
    return {"bootstrap.servers": broker.bootstrap_servers, "client.id": f"worker-{number}"}


def test_of_many_settings_those_used_last_stay_connected(own_broker: BrokerProcess) -> None:
    """A worker lives as long as its executor, and may serve jobs of any number of settings."""
    first = worker.producer(settings(own_broker, 0))
    second = worker.producer(settings(own_broker, 1))
    for number in range(worker.MOST_KEPT):
        made = worker.producer(settings(own_broker, number))
        made.produce("t", b"%d" % number)
        made.flush()
        worker.keep_session(settings(own_broker, number))
    assert worker.producer(settings(own_broker, 0)) is first  # number 1 is the oldest now
    worker.producer(settings(own_broker, worker.MOST_KEPT))
    worker.keep_session(settings(own_broker, worker.MOST_KEPT))
    assert len(worker._producers) == len(worker._sessions) == worker.MOST_KEPT
    assert worker.producer(settings(own_broker, 0)) is first
    again = worker.producer(settings(own_broker, 1))
    assert again is not second
    again.produce("t", b"again")
    again.flush()
