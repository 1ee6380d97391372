"""Readers of committed records of several partitions under a seeded network, while transactions
begin, commit and abort in all of them, the partitions roll, and are compacted.

The client's own `Reading`, cursors, `SlotTable` and `AbortedReads` read a real commit kernel's
slots, files and lists of aborted transactions by simulated READs.  Any number of transactions may
end between the READ of a slot, of the data and of a list, and each of the three may be torn.

Another reader fetches as over TCP.  It may stop between reading bytes, which it holds, and asking
for the aborted transactions in them, for so long that the log is compacted several times.

The model, checked at each record and after each schedule: a record is seen once, in order, only
after its transaction was committed, and never one that was aborted; in the end all that were
committed were seen, but for those of which compaction keeps a later one of their key.

A failing schedule prints its seed; `KDIRECT_SIMULATE=seed` repeats it alone, and
`KDIRECT_SCHEDULES=n` runs n of each case (`make committed-schedules`).
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable

import pytest
from actors import Actor
from connections import append_to
from harness import Simulation
from readers import ReadingSession

from kdirect.broker import aborted_regions
from kdirect.client.aborted import without_aborted
from kdirect.client.reading import Reading
from kdirect.format.batch import iterate_batches
from kdirect.format.decode import ArrowDecoder
from kdirect.log.cleaning import Cleaning, dirt_of
from kdirect.log.clock import now_ms
from kdirect.log.kernel_transactions import (
    aborted_in,
    aborted_transactions,
    admit_transaction,
    begin_verification,
    marker_batch,
)
from kdirect.log.partition import Partition
from kdirect.model import TopicPartition
from kdirect.rdma.sim import Faults
from tests.log.compacted_logs import MEMORY, NOW, keyed

SCHEDULES = int(os.environ.get("KDIRECT_SCHEDULES", "3"))
ONE = os.environ.get("KDIRECT_SIMULATE")
STEPS = 250
CASES: dict[str, dict] = {
    "one partition": {"partitions": 1},
    "several": {"partitions": 4},
    "torn": {"partitions": 3, "faults": Faults(delay_ns=(100, 400_000), tear=0.3)},
    # Lists of two entries are full nearly at once, in files that hold many transactions.
    "full lists": {"partitions": 2, "segment_bytes": 1 << 15, "entries": 2},
    "restless": {"partitions": 3, "faults": Faults(tear=0.1), "restless": True},
    "compacted": {"partitions": 2, "cleans": 0.1},
    "compacted, full lists": {"partitions": 1, "cleans": 0.1, "entries": 2, "restless": True},
}
PRODUCERS = 4
DAY_MS = 86_400_000  # delete.retention.ms
FOREVER = (1 << 63) - 1


class Log:
    """What was written to one partition, and what may be seen of it."""

    def __init__(self) -> None:
        self.values: dict[int, bytes] = {}
        self.open: dict[int, list[int]] = {}
        self.sequences: dict[int, int] = defaultdict(int)
        self.committed: dict[int, bytes] = {}
        self.keys: dict[int, bytes] = {}
        self.got: dict[int, bytes] = {}  # by READs
        self.fetched: dict[int, bytes] = {}
        self.cleaned_to: int | None = None

    @property
    def must_be_seen(self) -> set[int]:
        """The offset of the last committed record of each key."""
        return set({self.keys[offset]: offset for offset in sorted(self.committed)}.values())

    def take(self, seen: dict[int, bytes], offset: int, value: bytes) -> None:
        assert offset in self.committed, f"offset {offset} was seen, which is not committed"
        assert not seen or offset > max(seen), f"offset {offset} after {max(seen)}"
        assert value == self.committed[offset]
        seen[offset] = value


class Model:
    def __init__(self, partitions: list[TopicPartition]) -> None:
        self.logs = {tp: Log() for tp in partitions}
        self.done = False
        self.aborted = 0
        self.time_ms = NOW  # of cleanings
        self.forgotten = 0

    def complete(self, of: Callable[[Log], dict[int, bytes]]) -> bool:
        return self.done and all(log.must_be_seen <= of(log).keys() for log in self.logs.values())


def broker(simulation: Simulation, model: Model, *, cleans: float) -> None:
    """Some step in some partition, again and again, of which that part are cleanings; in the end
    every transaction is ended."""
    random, network = simulation.random, simulation.network
    partitions = list(model.logs)
    steps = 0

    def write(tp: TopicPartition, producer: int) -> None:
        log, partition = model.logs[tp], simulation.logs.partitions[tp]
        value = b"%d of %d " % (len(log.values), producer) + b"." * random.choice((0, 100, 700))
        sequence = log.sequences[producer]
        log.sequences[producer] += 1
        _, ticket = begin_verification(partition.kernel, producer, 0, sequence, now_ms())
        assert ticket == 0 or admit_transaction(partition.kernel, producer, 0, ticket)
        key = value  # of this record alone
        if cleans and random.random() < 0.7:
            key = b"k%d" % random.randrange(5)
        data = keyed([(key, value)], producer=(producer, 0, sequence), transactional=True)
        log.open.setdefault(producer, [])
        result = simulation.execute(lambda: append_to(simulation.access, partition, data))
        written(result, tp, producer, key, value)

    def written(result, tp: TopicPartition, producer: int, key: bytes, value: bytes) -> None:
        if hasattr(result, "done"):
            if not result.done():
                network.call_later(20_000, lambda: written(result, tp, producer, key, value))
                return
            result = result.result()
        assert result.error == 0
        log = model.logs[tp]
        log.keys[result.base_offset] = key
        log.values[result.base_offset] = value
        log.open[producer].append(result.base_offset)
        network.call_later(random.choice((1_000, 30_000, 300_000)), act)

    def end(tp: TopicPartition, producer: int, *, commit: bool) -> None:
        log, partition = model.logs[tp], simulation.logs.partitions[tp]
        marker = marker_batch(producer, 0, 0, commit, now_ms())
        result = simulation.execute(lambda: partition.append_marker(marker, now_ms()))
        assert result.error == 0
        for offset in log.open.pop(producer):
            if commit:
                log.committed[offset] = log.values[offset]
            else:
                model.aborted += 1

    def clean(tp: TopicPartition) -> None:
        log, partition = model.logs[tp], simulation.logs.partitions[tp]
        model.time_ms += random.choice((0, DAY_MS // 2, DAY_MS))
        dirt = dirt_of(partition, random.choice((None, log.cleaned_to)), model.time_ms)
        before = aborted_in(partition.kernel, 0, FOREVER)
        done = simulation.execute(Cleaning(partition, dirt, MEMORY, model.time_ms).run)
        model.forgotten += before - aborted_in(partition.kernel, 0, FOREVER)
        log.cleaned_to = max(log.cleaned_to or 0, done.end_offset)

    def act() -> None:
        nonlocal steps
        if simulation.busy:
            network.call_later(1_000, act)
            return
        steps += 1
        tp, producer = random.choice(partitions), random.randrange(PRODUCERS)
        log = model.logs[tp]
        if steps >= STEPS:
            for tp, log in model.logs.items():
                for producer in list(log.open):
                    end(tp, producer, commit=random.random() < 0.5)
            model.done = True
            return
        if random.random() < cleans:
            clean(tp)
            network.call_later(1_000, act)
            return
        if producer not in log.open or random.random() < 0.5:
            write(tp, producer)
            return
        if random.random() < 0.1:
            simulation.execute(simulation.logs.partitions[tp].roll)
        else:
            end(tp, producer, commit=random.random() < 0.5)
        network.call_later(random.choice((1_000, 30_000, 300_000)), act)

    act()


def consumer(simulation: Simulation, model: Model, figures: dict, *, restless: bool) -> Actor:
    def disturb(reading: Reading) -> None:
        """Go to another file in the middle of one, by the way of a seek or a new grant."""
        tp = simulation.random.choice(list(model.logs))
        got = model.logs[tp].got
        position = max(got) + 1 if got else 0
        if simulation.random.random() < 0.5:
            reading.seek(tp, position)
        else:
            reading.release([tp])
            reading.add({tp: position})

    def body(actor: Actor) -> None:
        session = ReadingSession(simulation)
        reading = Reading(session, session.settings)
        reading.assign(dict.fromkeys(model.logs, 0))
        while not model.complete(lambda log: log.got):
            if restless and simulation.random.random() < 0.05 and reading.queue.empty:
                disturb(reading)
            if not reading.queue.empty or reading.pull(0):
                for message in reading.queue.take(100):
                    log = model.logs[TopicPartition(message.topic(), message.partition())]
                    log.take(log.got, message.offset(), message.value())
            else:
                simulation.sleep(simulation.random.choice((1, 50, 1000)) * 1e-6)
            reading.tell()
        figures.update(reading.statistics())
        reading.close()

    return simulation.spawn("consumer", body)


def fetcher(simulation: Simulation, model: Model) -> Actor:
    """Reads as a Fetch does, and stops at times between its bytes and what was aborted in them."""
    random = simulation.random
    positions = dict.fromkeys(model.logs, 0)

    def fetch(tp: TopicPartition, partition: Partition) -> None:
        start = positions[tp]
        held = partition.read(start, random.choice((1, 2000, 1 << 20)), committed_only=True)
        if random.random() < 0.3:
            simulation.sleep(random.choice((1e-5, 1e-3, 5e-3)))
        found = aborted_transactions(partition.kernel, start, partition.last_stable_offset)
        data = memoryview(b"".join(bytes(buffer) for buffer in held))
        held.clear()
        for batch in iterate_batches(data):
            positions[tp] = max(positions[tp], batch.next_offset)
        data = without_aborted(data, [(t.producer_id, t.first_offset) for t in found])
        decoder, log = ArrowDecoder(tp.topic, 0, start_offset=start), model.logs[tp]
        while len(data):
            data = data[decoder.feed(data) :]
            for row in decoder.take().to_pylist():
                log.take(log.fetched, row["offset"], row["value"])

    def body(actor: Actor) -> None:
        while not model.complete(lambda log: log.fetched):
            tp = random.choice(list(model.logs))
            partition = simulation.logs.partitions[tp]
            if positions[tp] < partition.last_stable_offset:
                fetch(tp, partition)
            simulation.sleep(random.choice((1e-6, 5e-5, 1e-3)))

    return simulation.spawn("fetcher", body)


def run(case: str, seed: int, directory, monkeypatch) -> dict[str, int]:
    shape = CASES[case]
    print(f"{case}: KDIRECT_SIMULATE={seed}")
    monkeypatch.setattr(aborted_regions, "FIRST_ENTRIES", shape.get("entries", 25))
    partitions = [TopicPartition("t", i) for i in range(shape["partitions"])]
    model, figures = Model(partitions), {}
    with Simulation(
        seed,
        directory / f"{case} {seed}",
        shape.get("faults", Faults()),
        segment_bytes=shape.get("segment_bytes", 4096),
        client={"isolation.level": "read_committed"},
    ) as simulation:
        for tp in partitions[1:]:
            simulation.logs.create_partition(tp)
        broker(simulation, model, cleans=shape.get("cleans", 0))
        consumer(simulation, model, figures, restless=shape.get("restless", False))
        fetcher(simulation, model)
        simulation.run_until(lambda: all(a.done for a in simulation.actors))
        for actor in simulation.actors:
            if actor.error is not None:
                raise actor.error
    if not shape.get("cleans"):
        assert all(x.got == x.fetched == x.committed for x in model.logs.values())
    assert model.aborted > 0
    return figures | {"forgotten": model.forgotten}


@pytest.mark.parametrize("case", CASES)
def test_only_committed_records_are_seen(case, seed, tmp_path, monkeypatch):
    if ONE is not None:
        run(case, int(ONE), tmp_path, monkeypatch)
        return
    figures: dict[str, int] = defaultdict(int)
    for i in range(SCHEDULES):
        for name, value in run(case, (seed + i) % 2**32, tmp_path, monkeypatch).items():
            figures[name] += value
    assert figures["aborted_reads"] > 0 and figures["aborted_batches"] > 0
    assert figures["reads"] > 0 and "fetched_bytes" not in figures
    assert (figures["forgotten"] > 0) == ("cleans" in CASES[case])
