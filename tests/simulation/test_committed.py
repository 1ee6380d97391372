"""One reader of committed records of several partitions under a seeded network, while transactions
begin, commit and abort in all of them and the partitions roll.

The client's own `Reading`, cursors, `SlotTable` and `AbortedReads` read a real commit kernel's
slots, files and lists of aborted transactions by simulated READs.  Any number of transactions may
end between the READ of a slot, of the data and of a list, and each of the three may be torn.

The model, checked at each record and after each schedule: a record is seen once, in order, only
after its transaction was committed, and never one that was aborted; in the end all that were
committed were seen.

A failing schedule prints its seed; `KDIRECT_SIMULATE=seed` repeats it alone, and
`KDIRECT_SCHEDULES=n` runs n of each case (`make committed-schedules`).
"""

from __future__ import annotations

import os
from collections import defaultdict

import pytest
from actors import Actor
from connections import append_to
from harness import Simulation
from readers import ReadingSession

from kdirect.broker import aborted_regions
from kdirect.client.reading import Reading
from kdirect.log.clock import now_ms
from kdirect.log.kernel_transactions import admit_transaction, begin_verification, marker_batch
from kdirect.model import TopicPartition
from kdirect.rdma.sim import Faults
from tests.log.conftest import make_batch

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
}
PRODUCERS = 4


class Log:
    """What was written to one partition, and what may be seen of it."""

    def __init__(self) -> None:
        self.values: dict[int, bytes] = {}
        self.open: dict[int, list[int]] = {}
        self.sequences: dict[int, int] = defaultdict(int)
        self.committed: dict[int, bytes] = {}
        self.got: dict[int, bytes] = {}


class Model:
    def __init__(self, partitions: list[TopicPartition]) -> None:
        self.logs = {tp: Log() for tp in partitions}
        self.done = False
        self.aborted = 0

    @property
    def complete(self) -> bool:
        return self.done and all(len(x.got) == len(x.committed) for x in self.logs.values())

    def take(self, message) -> None:
        log = self.logs[TopicPartition(message.topic(), message.partition())]
        offset = message.offset()
        assert offset in log.committed, f"offset {offset} was seen, which is not committed"
        assert not log.got or offset > max(log.got), f"offset {offset} after {max(log.got)}"
        log.got[offset] = message.value()


def broker(simulation: Simulation, model: Model) -> None:
    """Some step in some partition, again and again; in the end every transaction is ended."""
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
        data = make_batch(
            value_bytes=len(value),
            fill=value,
            producer_id=producer,
            producer_epoch=0,
            sequence=sequence,
            transactional=True,
        )
        log.open.setdefault(producer, [])
        written(simulation.execute(lambda: append_to(simulation.access, partition, data)), tp,
                producer, value)  # fmt: skip

    def written(result, tp: TopicPartition, producer: int, value: bytes) -> None:
        if hasattr(result, "done"):
            if not result.done():
                network.call_later(20_000, lambda: written(result, tp, producer, value))
                return
            result = result.result()
        assert result.error == 0
        log = model.logs[tp]
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
        while not model.complete:
            if restless and simulation.random.random() < 0.05 and reading.queue.empty:
                disturb(reading)
            if not reading.queue.empty or reading.pull(0):
                for message in reading.queue.take(100):
                    model.take(message)
            else:
                simulation.sleep(simulation.random.choice((1, 50, 1000)) * 1e-6)
            reading.tell()
        figures.update(reading.statistics())
        reading.close()

    return simulation.spawn("consumer", body)


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
        broker(simulation, model)
        consumer(simulation, model, figures, restless=shape.get("restless", False))
        simulation.run_until(lambda: all(a.done for a in simulation.actors))
        for actor in simulation.actors:
            if actor.error is not None:
                raise actor.error
    for log in model.logs.values():
        assert log.got == log.committed
    assert model.aborted > 0
    return figures


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
