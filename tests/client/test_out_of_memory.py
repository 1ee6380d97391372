"""A reader that runs out of memory in the middle of what it has READ goes on where it was, once
there is some."""

from __future__ import annotations

import contextlib
import zlib

import pytest

import kdirect
from kdirect.client import connect
from kdirect.format import compression
from kdirect.model import TopicPartition

TP = TopicPartition("t", 0)


class NoMemoryOnce:
    """zlib, but for the third batch there is no memory the first time."""

    error = zlib.error

    def __init__(self):
        self.calls = 0

    def decompressobj(self, *arguments):
        self.calls += 1
        if self.calls == 3:
            raise MemoryError
        return zlib.decompressobj(*arguments)


@pytest.mark.parametrize("reader", ["columns", "messages"])
def test_a_reader_that_had_no_memory_goes_on_where_it_was(monkeypatch, reader):
    """It has followed the log to the third batch by then, and consumed none."""
    with kdirect.Broker() as broker:
        settings = {"bootstrap.servers": broker.bootstrap_servers, "transport": "shm"}
        values = [b"%05d" % i * 200 for i in range(12)]
        with contextlib.closing(connect(settings)) as session:
            session.admin.create_topic("t", 1)
        for batch in range(4):
            with kdirect.Producer(
                {**settings, "compression.type": "gzip", "linger.ms": 10_000}
            ) as producer:
                for value in values[3 * batch : 3 * batch + 3]:
                    producer.produce("t", value, partition=0)
        monkeypatch.setattr(compression, "zlib", NoMemoryOnce())
        got, failures = [], 0
        with kdirect.Consumer(settings) as consumer:
            consumer.assign({TP: 0})
            while len(got) < len(values):
                try:
                    found = consumer.poll_arrow(10) if reader == "columns" else consumer.poll(10)
                except MemoryError:
                    failures += 1
                else:
                    got += found["value"].to_pylist() if reader == "columns" else [found.value()]
        assert (got, failures) == (values, 1)
