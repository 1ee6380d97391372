"""The client of two hosts: runs in one guest against a broker in the other, told what to do line by
line (test_two_hosts.py).

    start TOPIC   make the topic; produce numbers without end and consume them, both over RDMA
                  -> started TRANSPORT REASON
    status        how far both are
                  -> status ACKNOWLEDGED READ OVER_RDMA
    probe         ask the broker for its topics over a connection of its own, within a few seconds
                  -> probe ok | probe ERROR
    job KIND HERE run a job of the state engine with an executor on each host; HERE is the address
                  of this one -> job {JSON}; see far_job.py
    stop          no more; wait for what is under way, read everything again
                  -> stopped {JSON}

What kdirect's client logs is printed too, as ``log ...``.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import kdirect
from kdirect.errors import KdirectError
from kdirect.model import TopicPartition

AHEAD = 50  # records under way
PAUSE_S = 0.002
END_S = 60.0
PROBE_MS = 3000
REQUEST_MS = 5000  # a request that went into a cut is given up soon


class _Tell(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say("log", record.getMessage())


_saying = threading.Lock()


def say(*words: object) -> None:
    """One line; other threads' lines before or behind it, not in it."""
    line = " ".join(str(word).replace("\n", " ") for word in words)
    with _saying:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


class Stream:
    """A producer and a consumer of one topic, each on a thread of its own, from `start` to
    `stop`."""

    def __init__(self, session: Any, topic: str) -> None:
        self._session = session
        self._tp = TopicPartition(topic, 0)
        session.admin.create_topic(topic, 1)
        self._producer = session.producer(enable_idempotence=True)
        self.acknowledged: dict[int, int] = {}  # number: offset
        self.read: list[int] = []
        self.failures: list[str] = []
        self.consumer_errors: list[str] = []
        self._sent = 0
        self._stopping = threading.Event()
        self._end = -1
        self._threads = [
            threading.Thread(target=self._produce, daemon=True),
            threading.Thread(target=self._consume, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def over_rdma(self) -> int:
        return int(self._producer.statistics().get("rdma_records", 0))

    def _delivered(self, error: KdirectError | None, message: Any) -> None:
        if error is not None:
            self.failures.append(f"{type(error).__name__}: {error}")
        else:
            self.acknowledged[int(message.value())] = message.offset()

    def _produce(self) -> None:
        while not self._stopping.is_set():
            if self._sent - len(self.acknowledged) - len(self.failures) >= AHEAD:
                self._producer.poll(0.01)
                continue
            self._producer.produce(
                self._tp.topic, b"%d" % self._sent, partition=0, on_delivery=self._delivered
            )
            self._sent += 1
            self._producer.poll(0)
            time.sleep(PAUSE_S)

    def _consume(self) -> None:
        consumer = kdirect.Consumer(dict(self._session.settings), session=self._session)
        consumer.assign({self._tp: 0})
        next_offset = 0
        while self._end < 0 or next_offset < self._end:
            try:
                message = consumer.poll(0.2)
            except KdirectError as e:
                self.consumer_errors.append(f"{type(e).__name__}: {e}")
                time.sleep(0.2)
                continue
            if message is not None:
                assert message.offset() == next_offset, (
                    f"offset {message.offset()} where {next_offset} was due"
                )
                next_offset += 1
                self.read.append(int(message.value()))
        consumer.close()

    def stop(self) -> dict[str, Any]:
        """End both; what there is to check."""
        self._stopping.set()
        self._threads[0].join(END_S)
        left = self._producer.flush(END_S)
        statistics = self._producer.statistics()
        self._producer.close()
        self._end = self._session.latest_offsets([self._tp])[self._tp]
        self._threads[1].join(END_S)
        reader = self._session.reader(self._tp, 0, self._end)
        stored = [int(v) for batch in reader.batches() for v in batch.column("value").to_pylist()]
        reader.close()
        return {
            "sent": self._sent,
            "unflushed": left,
            "acknowledged": len(self.acknowledged),
            "failures": self.failures,
            "stored": len(stored),
            "lost": sorted(self.acknowledged.keys() - set(stored))[:10],
            "misplaced": [
                n
                for n, offset in self.acknowledged.items()
                if offset >= 0 and stored[offset : offset + 1] != [n]
            ][:10],
            "offset_unknown": sum(offset < 0 for offset in self.acknowledged.values()),
            "twice": [n for n, times in Counter(stored).items() if times > 1][:10],
            "in_order": list(dict.fromkeys(stored)) == sorted(set(stored)),
            "consumed_as_stored": self.read == stored,
            "consumer_ended": not self._threads[1].is_alive(),
            "consumer_errors": self.consumer_errors,
            "statistics": statistics,
            "reader": reader.transport,
        }


def probe(servers: str) -> str:
    try:
        # settings of its own make it a session of its own
        session = kdirect.connect(
            {
                "bootstrap.servers": servers,
                "request.timeout.ms": PROBE_MS,
                "client.id": f"probe-{time.monotonic_ns()}",
            }
        )
        try:
            session.list_topics()
        finally:
            session.close()
    except KdirectError as e:
        return f"{type(e).__name__}: {e}"
    return "ok"


def main(servers: str) -> None:
    logger = logging.getLogger("kdirect")
    logger.setLevel(logging.INFO)  # of a failed test these lines are the evidence
    logger.addHandler(_Tell())
    session = kdirect.connect(
        {"bootstrap.servers": servers, "transport": "auto", "request.timeout.ms": REQUEST_MS}
    )
    stream: Stream | None = None
    say("ready")
    for line in sys.stdin:
        command, _, rest = line.strip().partition(" ")
        try:
            if command == "start":
                stream = Stream(session, rest)
                say("started", session.transport, session.transport_reason)
            elif command == "probe":
                say("probe", probe(servers))
            elif command == "status" and stream is not None:
                say("status", len(stream.acknowledged), len(stream.read), stream.over_rdma)
            elif command == "stop" and stream is not None:
                say("stopped", json.dumps(stream.stop()))
            elif command == "job":
                # Imported here: the other tests do not wait for it.
                sys.path.insert(0, str(Path(__file__).parent))
                import far_job

                kind, _, here = rest.partition(" ")
                say("job", json.dumps(far_job.run_job(session, servers, here, kind, say)))
        except Exception as e:
            logging.getLogger(__name__).exception("%s failed", command)
            say("failed", command, type(e).__name__, e)


if __name__ == "__main__":
    main(sys.argv[1])
