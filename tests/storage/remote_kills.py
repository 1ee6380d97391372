"""Rounds in which a broker with a tiered topic is killed at a step, and comes back.

``python -m tests.storage.remote_kills --first SEED --count N`` runs many of them, over a directory;
`test_remote_kills.py` runs a part of its rounds over S3.

In each round a broker of its own process copies, deletes locally and deletes remotely while records
are produced; at a named step (`kdirect.failpoints`) it ends with SIGKILL.  The next one has to
settle, and then: every acknowledged record from the log start on is read once; what is in the store
is what the metadata says is there; a whole object that had no FINISHED was adopted.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import confluent_kafka
from confluent_kafka.admin import AdminClient, NewTopic

import kdirect
from kdirect.cli_remote import _partitions
from kdirect.failpoints import VARIABLE
from kdirect.format.object_check import read_footer
from kdirect.format.remote_metadata import SegmentState
from kdirect.format.segment_object import parse_key
from kdirect.model import TopicPartition
from kdirect.objects import ObjectInfo
from tests.object_servers import Place, directory_place

STEPS = (
    "before COPY_SEGMENT_STARTED",
    "after COPY_SEGMENT_STARTED",
    "in the PUT",
    "after the PUT",
    "before COPY_SEGMENT_FINISHED",
    "after COPY_SEGMENT_FINISHED",
    "before a local deletion",
    "after a local deletion",
    "before DELETE_SEGMENT_STARTED",
    "after DELETE_SEGMENT_STARTED",
    "before the DELETE",
    "after the DELETE",
    "before DELETE_SEGMENT_FINISHED",
    "after DELETE_SEGMENT_FINISHED",
)
TOPIC = "t"
SEGMENT_BYTES = 16384
RECORDS = 1500
SETTLE_S = 30.0


class Process:
    """A broker of its own process.  `place`: where its objects go, else below its directory."""

    def __init__(self, directory: Path, failpoint: str, place: Place | None = None) -> None:
        place = place or directory_place(directory / "store")
        environment = {**os.environ, VARIABLE: failpoint}
        arguments = {
            "log.dirs": str(directory / "log"),
            "listeners": "127.0.0.1:0",
            "remote.log.storage.system.enable": "true",
            "remote.log.storage.uri": place.uri,
            **{f"rsm.config.{name}": value for name, value in place.config.items()},
            "remote.log.manager.task.interval.ms": "100",
            "log.retention.check.interval.ms": "50",
            "rdma.transports": "",
        }
        command = [sys.executable, "-m", "kdirect.cli", "broker", "--log-level", "warning"]
        for name, value in arguments.items():
            command += ["--set", f"{name}={value}"]
        self._log = open(directory / "broker.log", "ab")  # noqa: SIM115
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            said = (directory / "broker.log").read_text()[-3000:]
            raise AssertionError(f"the broker does not start: {said}")
        self.address = line.split()[-1]

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def end(self, number: int = signal.SIGKILL) -> None:
        if self.is_alive:
            self.process.send_signal(number)
        self.process.wait(60)
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._log.close()


class Round:
    """One round of a seed."""

    def __init__(self, seed: int, directory: Path, place: Place | None = None) -> None:
        self.chance = random.Random(seed)
        self.directory = directory
        self.place = place or directory_place(directory / "store")
        self.store = self.place.store()
        self.step = STEPS[seed % len(STEPS)]
        self.acknowledged: dict[int, bytes] = {}  # offset -> value
        self.fired = False

    def run(self) -> None:
        deletes = "DELETE" in self.step
        number = 1 if deletes else self.chance.choice((1, 1, 2, 3))
        broker = Process(self.directory, f"{self.step}:{number}", self.place)
        try:
            self._create(broker.address)
            self._produce(broker)
        finally:
            self.fired = not broker.is_alive
            broker.end()
        self.whole = self._whole_objects()
        broker = Process(self.directory, "", self.place)
        try:
            self._settle(broker.address)
            self._check(broker.address)
        finally:
            broker.end(signal.SIGTERM)

    def _create(self, address: str) -> None:
        admin = AdminClient({"bootstrap.servers": address, "log_level": 0})
        configs = {
            "remote.storage.enable": "true",
            "segment.bytes": str(SEGMENT_BYTES),
            "local.retention.bytes": "1",
            "retention.bytes": str(SEGMENT_BYTES * self.chance.choice((2, 4, 1000))),
        }
        if "DELETE" in self.step:
            configs["retention.bytes"] = str(SEGMENT_BYTES * 2)
        admin.create_topics([NewTopic(TOPIC, 1, 1, config=configs)])[TOPIC].result(20)

    def _produce(self, broker: Process) -> None:
        """Send records until the broker dies; then, or when all are sent, wait a little."""
        producer = confluent_kafka.Producer(
            {
                "bootstrap.servers": broker.address,
                "batch.num.messages": 20,
                "linger.ms": 2,
                "log_level": 0,
                "message.timeout.ms": 5000,
            }
        )

        def delivered(error: Any, message: Any) -> None:
            if error is None:
                self.acknowledged[message.offset()] = message.value()

        for i in range(RECORDS):
            if not broker.is_alive:
                break
            producer.produce(TOPIC, b"%08d" % i + os.urandom(60), callback=delivered)
            producer.poll(0.0005)
        end = time.monotonic() + 3
        while broker.is_alive and time.monotonic() < end:
            producer.poll(0.05)
        producer.purge()
        producer.poll(0.1)

    # -- after the restart -------------------------------------------------------------------------

    def _objects(self) -> dict[Any, ObjectInfo]:
        """Segment id -> object, of those that are visible."""
        found = {}
        for info in self.store.list():
            parsed = parse_key("", info.key)
            if parsed is not None:
                found[parsed[0].segment_id] = info
        return found

    def _whole_objects(self) -> dict[Any, int]:
        """Segment id -> end offset, of what is there when the broker is dead.  An object is whole,
        or it is not there."""
        whole = {}
        for segment_id, info in self._objects().items():
            get = partial(self.store.get, info.key)
            whole[segment_id] = read_footer(get, info.size).end_offset
        return whole

    def _settle(self, address: str) -> None:
        end = time.monotonic() + SETTLE_S
        states: dict[Any, SegmentState] = {}
        with kdirect.connect({"bootstrap.servers": address, "transport": "tcp"}) as session:
            while time.monotonic() < end:
                known = _partitions(session)
                states = {i: s.state for m in known.values() for i, s in m.segments.items()}
                finished = {i for i, s in states.items() if s is SegmentState.COPY_SEGMENT_FINISHED}
                if len(finished) == len(states) and finished == set(self._objects()):
                    self.seen = known
                    return
                time.sleep(0.1)
        raise AssertionError(f"it does not settle: {states}, objects {self._objects()}")

    def _check(self, address: str) -> None:
        tp = TopicPartition(TOPIC, 0)
        with kdirect.connect({"bootstrap.servers": address, "transport": "tcp"}) as session:
            end = session.latest_offsets([tp])[tp]
            start = session.earliest_offsets([tp])[tp]
            got: list[tuple[int, bytes]] = []
            for batch in session.reader(tp, start, end):
                got += zip(
                    batch.column("offset").to_pylist(),
                    batch.column("value").to_pylist(),
                    strict=True,
                )
        offsets = [offset for offset, _ in got]
        assert offsets == list(range(start, end)), f"{start} to {end}: {offsets[:3]}.."
        values = dict(got)
        for offset, value in self.acknowledged.items():
            if offset >= start:
                assert values[offset] == value, f"offset {offset} has another record"
        if self.acknowledged:
            assert end > max(self.acknowledged), "acknowledged records are gone"
        finished = {i for m in self.seen.values() for i in m.segments}
        for segment_id in self.whole.keys() - finished:  # not adopted: only what retention took
            assert self.whole[segment_id] <= start, f"{segment_id} was there and was not adopted"


def run(seed: int, place: Place | None = None) -> Round:
    """One round in a directory of its own, with its objects there or in a `place`.  AssertionError
    says what was broken."""
    directory = Path(tempfile.mkdtemp(prefix="remote-kills-", dir="/dev/shm"))
    try:
        one = Round(seed, directory, place)
        one.run()
        return one
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=200)
    arguments = parser.parse_args()
    failed = fired = 0
    for seed in range(arguments.first, arguments.first + arguments.count):
        try:
            one = run(seed)
            fired += one.fired
            print(f"seed {seed}: {one.step}{'' if one.fired else ', not reached'}", flush=True)
        except Exception as e:
            failed += 1
            print(f"seed {seed}: {STEPS[seed % len(STEPS)]}: {type(e).__name__}: {e}", flush=True)
    print(f"{arguments.count} rounds, {fired} kills, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
