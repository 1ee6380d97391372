"""What is said of a write that has failed: whether its batch is committed."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from kdirect_spark import exactly_once, worker
from kdirect_spark.settings import sink_settings
from kdirect_spark.sink import KdirectWriter, Written
from tests.support import BrokerProcess


def written(address: str) -> tuple[KdirectWriter, Written]:
    """A writer of a batch, and what its only task has written and flushed."""
    from pyspark.sql.types import BinaryType, StructField, StructType

    settings = sink_settings(
        {
            "kafka.bootstrap.servers": address,
            "topic": "t",
            "delivery.timeout.ms": "2000",
            "request.timeout.ms": "1000",
            "connect.timeout.ms": "500",
        }
    )
    writer = KdirectWriter(StructType([StructField("value", BinaryType())]), False, settings)
    session, job = worker.session(settings.client), writer._drawn
    attempt = session.join_attempt(job.identity, job.query, job.run, job.batch)
    with session.attempt_producer(attempt) as producer:
        producer.produce("t", b"v")
        producer.flush()
    return writer, Written(1, job, tuple(attempt))


@pytest.mark.parametrize(
    ("before", "said"),
    [
        ("nothing", "nothing of it is committed"),
        ("a commit", "all of it is committed, and is not to be written again"),
        ("an end of the broker", "whether it is committed is not known"),
    ],
)
def test_a_write_that_failed_says_whether_it_is_committed(
    own_broker: BrokerProcess, caplog: Any, before: str, said: str
) -> None:
    """Spark says that a write has failed also where only the answer to its commit was lost."""
    writer, done = written(own_broker.bootstrap_servers)
    assert done.job is not None and done.attempt is not None
    if before == "a commit":
        exactly_once.commit(writer._settings, done.job, [done.attempt])
    elif before != "nothing":
        own_broker.kill()
    with caplog.at_level(logging.WARNING, "kdirect_spark"):
        writer.abort([done])
    assert said in caplog.text


def test_a_write_without_a_task_that_ended_is_not_committed(
    own_broker: BrokerProcess, caplog: Any
) -> None:
    writer, _ = written(own_broker.bootstrap_servers)
    with caplog.at_level(logging.WARNING, "kdirect_spark"):
        writer.abort([None])
    assert "a write failed; nothing of it is committed" in caplog.text
