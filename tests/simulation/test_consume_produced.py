"""Consumers that read a partition while producers write it, under a seeded network, across rolls,
recalls of the producers' access, lost connections, and a broker that is killed and started again.

The client's own `Consumer`, `Reading`, `DirectFetcher` and cursors read what the client's own
producers write (`test_produce.producer`), record by record, in lists and in columns.

The model, checked after each schedule: each consumer got every record below the high watermark
once, in the order of the offsets, and nothing that is not in the log.

A failing schedule prints its seed; `KDIRECT_SIMULATE=seed` repeats it alone, and
`KDIRECT_SCHEDULES=n` runs n of each case.
"""

from __future__ import annotations

import contextlib
import os

import pytest
from actors import Actor
from harness import TP, Simulation
from readers import ReadingSession, lose_control
from test_produce import Model, producer

from kdirect.client.consumer import Consumer
from kdirect.client.read_paths import LOST
from kdirect.rdma.sim import Faults

SCHEDULES = int(os.environ.get("KDIRECT_SCHEDULES", "20"))
ONE = os.environ.get("KDIRECT_SIMULATE")
CASES: dict[str, dict] = {
    "rolls": {"modes": ["shared", "auto"], "chaos": ["roll", "roll", "stop"]},
    "recalls": {"modes": ["auto", "exclusive"], "kafka": 2, "lose": 0.02, "chaos": ["roll"]},
    "torn": {"modes": ["exclusive"], "faults": Faults(delay_ns=(100, 400_000), tear=0.3)},
    "lost connections": {
        "modes": ["shared", "auto"],
        "faults": Faults(disconnect=0.01, tear=0.1, rnr=0.002),
        "chaos": ["lose", "lose", "roll"],
    },
    "broker": {"modes": ["shared", "auto"], "chaos": ["stop broker", "restart", "restart", "roll"]},
    "everything": {
        "modes": ["shared", "auto", "off"],
        "kafka": 1,
        "lose": 0.02,
        "faults": Faults(disconnect=0.005, tear=0.2, rnr=0.002),
        "chaos": ["kill", "stop", "stop broker", "restart", "roll", "lose"],
    },
}


class Got:
    """What one consumer was handed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.values: list[bytes] = []

    def take(self, offset: int, value: bytes) -> None:
        assert offset == len(self.values), (
            f"{self.name}: offset {offset} came after {len(self.values)} records"
        )
        self.values.append(value)


def consumer(simulation: Simulation, got: Got, ended: list[bool]) -> Actor:
    """An actor that reads until the producers have `ended` and it has everything."""

    def body(actor: Actor) -> None:
        random = simulation.random
        reads = Consumer(simulation.settings, session=ReadingSession(simulation))
        with contextlib.suppress(*LOST):  # it is assigned all the same
            reads.assign({TP: 0})
        while not (ended and len(got.values) >= simulation.partition.high_watermark):
            try:
                read_some(reads)
            except LOST:
                simulation.sleep(0.001)
            if random.random() < 0.05:
                reads.seek(TP, len(got.values))
        reads.close()

    def read_some(reads: Consumer) -> None:
        how = simulation.random.choice(("poll", "poll", "consume", "columns"))
        wait_s = simulation.random.choice((0.0, 0.0, 0.001))
        if how == "poll":
            message = reads.poll(wait_s)
            if message is not None:
                got.take(message.offset(), message.value())
            elif not wait_s:
                simulation.sleep(simulation.random.choice((1, 50, 1000)) * 1e-6)
        elif how == "consume":
            for message in reads.consume(simulation.random.choice((1, 5, 100)), 0.001):
                got.take(message.offset(), message.value())
        else:
            batch = reads.poll_arrow(0.001, max_rows=simulation.random.choice((1, 10, 1000)))
            if batch is not None:
                columns = batch.column("offset").to_pylist(), batch.column("value").to_pylist()
                for offset, value in zip(*columns, strict=True):
                    got.take(offset, value)

    return simulation.spawn(got.name, body)


def disturb(simulation: Simulation, shape: dict, producers: list[Actor], readers: list[Actor]):
    """Do one of the case's bad things, now or as soon as the event loop is free."""

    def act() -> None:
        if simulation.busy:
            simulation.network.call_later(1_000, act)
            return
        random = simulation.random
        what = random.choice(shape["chaos"])
        if what == "roll":
            simulation.execute(lambda: simulation.partition.roll())
        elif what == "restart":
            simulation.restart_broker()
        elif what == "stop broker":
            simulation.stop_broker(random.choice((100_000, 5_000_000, 60_000_000)))
        elif what == "lose":
            lose_control(simulation, random.choice(readers))
        elif what == "stop":
            victim = random.choice(producers + readers)
            simulation.stop(victim, random.choice((100_000, 5_000_000)))
        else:
            victim = random.choice(producers)
            if not victim.done:
                simulation.kill(victim)

    simulation.network.call_later(simulation.random.randint(0, 8_000_000), act)


def run(case: str, seed: int, directory) -> None:
    shape = CASES[case]
    print(f"{case}: KDIRECT_SIMULATE={seed}")
    with Simulation(
        seed,
        directory / f"{case} {seed}",
        shape.get("faults", Faults()),
        segment_bytes=8192,
    ) as simulation:
        random = simulation.random
        simulation.lose = shape.get("lose", 0.0)
        simulation.worker_delay_ns = random.choice((1_000, 30_000, 300_000))
        produced = Model()
        modes = [random.choice(shape["modes"]) for _ in range(random.randint(1, 3))]
        modes += ["off"] * shape.get("kafka", 0)
        producers = [
            producer(simulation, produced, f"p{i}", random.randint(5, 30), **{"rdma.produce": mode})
            for i, mode in enumerate(modes)
        ]
        ended: list[bool] = []
        got = [Got(f"c{i}") for i in range(random.randint(1, 3))]
        readers = [consumer(simulation, each, ended) for each in got]
        if "chaos" in shape:
            for _ in range(random.randint(1, 5)):
                disturb(simulation, shape, producers, readers)
        simulation.run_until(lambda: all(a.done for a in producers))
        ended.append(True)
        simulation.run_until(lambda: all(a.done for a in readers))
        for actor in simulation.actors:
            if actor.error is not None:
                raise actor.error
        log = simulation.log()
        for each in got:
            # What is committed after a reader has left, for a producer that was killed, is more.
            assert each.values == log[: len(each.values)], f"{each.name} got other records"
        assert produced.acknowledged <= set(log)


@pytest.mark.parametrize("case", CASES)
def test_consumers_get_each_record_once_and_in_order(case, seed, tmp_path):
    if ONE is not None:
        run(case, int(ONE), tmp_path)
        return
    for i in range(SCHEDULES):
        run(case, (seed + i) % 2**32, tmp_path)
