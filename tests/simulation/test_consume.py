"""One consumer of many partitions under a seeded network, while the partitions roll all the time
(KafkaDirect §4.4.2).

The client's own `Reading`, `DirectFetcher`, `SlotTable`, `FileStream` and cursors read a real
commit kernel's memory by simulated READs, which take their time and are torn.  The broker appends
and rolls between any two of them, also while the consumer waits for a grant.

The case "marks" holds the high watermarks back, in sealed files too, while the consumer looks above
them.

The model, checked after each schedule: no error at all, and every record of every partition once
and in order.

A failing schedule prints its seed; `KDIRECT_SIMULATE=seed` repeats it alone, and
`KDIRECT_SCHEDULES=n` runs n of each case.
"""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import replace

import pytest
from actors import Actor
from connections import append_to
from harness import Simulation
from readers import ReadingSession

from kdirect.client.reading import Reading
from kdirect.format.codec import encode_records
from kdirect.model import TopicPartition
from kdirect.rdma.sim import Faults

SCHEDULES = int(os.environ.get("KDIRECT_SCHEDULES", "8"))
ONE = os.environ.get("KDIRECT_SIMULATE")
ROLLS = 40  # of a schedule, at least
CASES: dict[str, dict] = {
    "two partitions": {"partitions": 2},
    "many partitions": {"partitions": 12},
    "torn": {"partitions": 5, "faults": Faults(delay_ns=(100, 400_000), tear=0.3)},
    "restless": {"partitions": 6, "faults": Faults(tear=0.2), "restless": True},
    # The high watermarks lag, also in files that are sealed, and the consumer looks above them.
    "marks": {"partitions": 4, "faults": Faults(tear=0.1), "restless": True, "marks": True},
}
REPLICA = 2  # has to confirm what may be read, with "marks"


class Model:
    """What was appended, and what the consumer got."""

    def __init__(self) -> None:
        self.appended: dict[TopicPartition, list[bytes]] = defaultdict(list)
        self.got: dict[TopicPartition, list[bytes]] = defaultdict(list)
        self.rolls = 0

    @property
    def complete(self) -> bool:
        return sum(map(len, self.got.values())) >= sum(map(len, self.appended.values()))

    def take(self, message) -> None:
        tp = TopicPartition(message.topic(), message.partition())
        assert message.offset() == len(self.got[tp]), (
            f"offset {message.offset()} of {tp} came after {len(self.got[tp])} records"
        )
        self.got[tp].append(message.value())


def move_mark(simulation: Simulation, tp: TopicPartition, end: int | None = None) -> None:
    """The replica confirms some more of a partition, or all before `end`."""
    partition = simulation.logs.partitions[tp]
    if end is None:
        end = simulation.random.randint(partition.high_watermark, partition.log_end_offset)
    simulation.execute(lambda: (partition.flush(), partition.replicated(REPLICA, end)))


def broker(simulation: Simulation, model: Model, partitions: list[TopicPartition], *, marks: bool):
    """Appends a few records to some partition, or rolls it, again and again until there were enough
    rolls."""
    random, network = simulation.random, simulation.network
    bases = dict.fromkeys(partitions, 0)

    def appended(result) -> None:
        """A thread may have to make room first; appends to one partition are made in order all the
        same."""
        if hasattr(result, "done"):
            if not result.done():
                network.call_later(20_000, lambda: appended(result))
                return
            result = result.result()
        assert result.error == 0

    def act() -> None:
        if simulation.busy:
            network.call_later(1_000, act)
            return
        tp = random.choice(partitions)
        partition = simulation.logs.partitions[tp]
        if marks and random.random() < 0.3:
            move_mark(simulation, tp)
        elif random.random() < 0.1:
            simulation.execute(partition.roll)
        else:
            values = [
                b"%d " % (len(model.appended[tp]) + k) + b"." * random.choice((0, 100, 900))
                for k in range(random.choice((1, 3)))
            ]
            result = simulation.execute(
                lambda: append_to(
                    simulation.access, partition, encode_records([(None, v, [], 1) for v in values])
                )
            )
            appended(result)
            model.appended[tp] += values
        model.rolls += bases[tp] != partition.kernel.segment_base_offset
        bases[tp] = partition.kernel.segment_base_offset
        if model.rolls < ROLLS:
            network.call_later(random.choice((1_000, 30_000, 300_000)), act)
        elif marks:
            finish()

    def finish() -> None:
        """Confirm everything, once the threads that made room have let it be appended."""
        logs = simulation.logs.partitions
        if not simulation.busy:
            for tp in partitions:
                move_mark(simulation, tp, logs[tp].log_end_offset)
        if any(logs[tp].high_watermark < len(model.appended[tp]) for tp in partitions):
            network.call_later(20_000, finish)

    act()


def consumer(
    simulation: Simulation, model: Model, partitions: list[TopicPartition], *, restless: bool
) -> Actor:
    """An actor that reads all partitions; a restless one pauses, seeks and gives back partitions
    between."""

    def disturb(reading: Reading) -> None:
        random = simulation.random
        tp = random.choice(partitions)
        position = len(model.got[tp])
        what = random.choice(("pause", "resume", "seek", "assign again", "look ahead"))
        if what == "pause":
            reading.pause([tp])
        elif what == "resume":
            reading.resume(list(reading.paused))
        elif what == "seek":
            reading.seek(tp, position)
        elif what == "look ahead":
            look_ahead(reading, tp, position)
        else:
            reading.release([tp])
            reading.add({tp: position})

    def look_ahead(reading: Reading, tp: TopicPartition, position: int) -> None:
        """Read a while from somewhere up to the log end, and come back."""
        ahead = simulation.random.randint(position, simulation.logs.partitions[tp].log_end_offset)
        reading.seek(tp, ahead)
        for _ in range(simulation.random.choice((1, 10, 100))):
            if not reading.queue.empty or reading.pull(0):
                for message in reading.queue.take(simulation.random.choice((1, 100))):
                    if (message.topic(), message.partition()) != tp:
                        model.take(message)
                    else:
                        assert message.offset() == ahead, f"{message.offset()} of {tp} at {ahead}"
                        ahead += 1
            else:
                simulation.sleep(1e-4)
            reading.tell()
        reading.seek(tp, position)

    def body(actor: Actor) -> None:
        session = ReadingSession(simulation)
        reading = Reading(session, session.settings)
        reading.assign(dict.fromkeys(partitions, 0))
        while model.rolls < ROLLS or not model.complete:
            if restless and simulation.random.random() < 0.1:
                disturb(reading)
            if not reading.queue.empty or reading.pull(0):
                for message in reading.queue.take(simulation.random.choice((1, 2, 100))):
                    model.take(message)
            else:
                simulation.sleep(simulation.random.choice((1, 50, 1000)) * 1e-6)
                if model.rolls >= ROLLS:
                    reading.resume(list(reading.paused))
            reading.tell()
        reading.close()

    return simulation.spawn("consumer", body)


def run(case: str, seed: int, directory) -> Model:
    shape = CASES[case]
    model = Model()
    print(f"{case}: KDIRECT_SIMULATE={seed}")
    with Simulation(
        seed,
        directory / f"{case} {seed}",
        shape.get("faults", Faults()),
        segment_bytes=4096,
    ) as simulation:
        partitions = [TopicPartition("t", i) for i in range(shape["partitions"])]
        for tp in partitions[1:]:
            simulation.logs.create_partition(tp)
        marks = shape.get("marks", False)
        for partition in map(simulation.logs.partitions.__getitem__, partitions if marks else ()):
            partition.reconfigure(replace(partition.config, flush_before_ack=True))
            partition.gate.set_replicas({REPLICA: 0})
        broker(simulation, model, partitions, marks=marks)
        consumer(simulation, model, partitions, restless=shape.get("restless", False))
        simulation.run_until(lambda: all(a.done for a in simulation.actors))
        for actor in simulation.actors:
            if actor.error is not None:
                raise actor.error
    assert model.got == model.appended
    return model


@pytest.mark.parametrize("case", CASES)
def test_rolls_under_a_reader_of_many_partitions(case, seed, tmp_path):
    if ONE is not None:
        run(case, int(ONE), tmp_path)
        return
    for i in range(SCHEDULES):
        assert run(case, (seed + i) % 2**32, tmp_path).rolls >= ROLLS
