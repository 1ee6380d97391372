"""Ends of a head that random schedules meet too rarely: a deletion that fails, a roll in the moment
in which the next file becomes the head, and a broker that cannot reserve on its own word
(KafkaDirect §4.2.2)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import TP, Simulation
from leftovers import check_nothing_left
from test_produce import Model, producer

from kdirect.broker.produce_access import ProduceAccess
from kdirect.log.segment import Segment
from kdirect.rdma.sim import Faults

SCHEDULES = 12
TORN = Faults(delay_ns=(100, 400_000), tear=0.2)


def run_to_the_end(simulation: Simulation, model: Model) -> None:
    simulation.run_until(lambda: all(a.done for a in simulation.actors))
    for actor in simulation.actors:
        if actor.error is not None:
            raise actor.error
    simulation.network.run_for(100_000_000)
    model.check(simulation)
    check_nothing_left(simulation)


@pytest.mark.parametrize("mode", ["exclusive", "shared"])
def test_a_deletion_that_fails_leaves_a_clean_head(mode: str, seed: int, tmp_path: Path) -> None:
    """Nobody writes the head when its topic turns out to stay, but what producers wrote past its
    tail is still there: nothing of it may be left for a crash to find."""
    for i in range(SCHEDULES):
        model = Model()
        with Simulation(seed + i, tmp_path / str(i), TORN) as simulation:
            simulation.worker_delay_ns = 300_000
            actor = producer(simulation, model, "p", 20, **{"rdma.produce": mode})

            def look() -> None:
                if TP in simulation.access.produce.heads:
                    simulation.network.call_later(1_000, look)
                else:
                    simulation.check_tail()

            def delete_in_vain(actor: Any = actor) -> None:
                access, loop = simulation.access, simulation.access.loop
                if simulation.busy or TP not in access.produce.heads:
                    if not actor.done:
                        simulation.network.call_later(10_000, delete_in_vain)
                    return
                simulation.stop(actor, 40_000_000)
                end_access = simulation.execute(lambda: access.begin_deletion([TP]))

                def ended(result: Any, error: BaseException | None) -> None:
                    access.end_deletion([TP])
                    look()

                loop.on_thread(simulation.partition, end_access, ended)

            simulation.network.call_later(simulation.random.randint(0, 2_000_000), delete_in_vain)
            run_to_the_end(simulation, model)


def test_a_roll_finds_the_producer_of_a_file_that_is_the_head_already(
    seed: int, tmp_path: Path
) -> None:
    """A thread has put the next file in the head's place; before the event loop hears of it another
    thread is about to seal that file.  Its producer must not have a key to it then."""
    fenced: list[bool] = []
    for i in range(SCHEDULES):
        model = Model()
        with Simulation(seed + i, tmp_path / str(i), TORN, segment_bytes=8192) as simulation:
            producer(simulation, model, "p", 60, **{"rdma.produce": "exclusive"})
            produce = simulation.access.produce
            tries = simulation.random.randint(1, 3)

            def rolled(
                partition: Any, old: Any, new: Any, produce: ProduceAccess = produce
            ) -> None:
                nonlocal tries
                before = produce.heads.get(TP)
                if before is None or before.successor is None or not tries:
                    return
                tries -= 1
                successor = before.successor
                produce.before_roll(partition)
                fenced.append(successor.fenced)

            simulation.partition.on_roll.append(rolled)
            run_to_the_end(simulation, model)
    assert fenced, "no file was granted ahead"
    assert all(fenced), "the head is about to be sealed, and a producer writes it"


def test_appends_go_on_when_the_broker_cannot_reserve_on_its_word(
    seed: int, tmp_path: Path
) -> None:
    """The queue pair of the broker with itself breaks.  What Kafka clients append waits for the
    next head, and is answered."""
    for i in range(SCHEDULES):
        model = Model()
        with Simulation(seed + i, tmp_path / str(i), Faults()) as simulation:
            producer(simulation, model, "p", 20, **{"rdma.produce": "shared"})
            for name in ("kafka0", "kafka1"):
                producer(simulation, model, name, 15, **{"rdma.produce": "off"})

            def break_it() -> None:
                if simulation.busy:
                    simulation.network.call_later(1_000, break_it)
                    return
                simulation.access.engine.loopback._target.close()

            simulation.network.call_later(simulation.random.randint(0, 2_000_000), break_it)
            run_to_the_end(simulation, model)


@pytest.mark.parametrize("mode", ["exclusive", "shared"])
def test_a_head_that_cannot_be_mapped_is_refused_and_leaves_nothing(
    mode: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acquire = Segment.acquire
    failures: list[Segment] = []
    grants: list[int] = []
    model = Model()
    with Simulation(seed, tmp_path, Faults()) as simulation:

        def acquire_or_fail(segment: Segment) -> Segment:
            access = simulation.access.produce.heads.get(TP)
            opens = access is not None and access.segment is segment and not access.members
            if opens and len(failures) < 2:
                failures.append(segment)
                simulation.access.loop.soon(count_grants)
                raise OSError("no memory to map a file")
            return acquire(segment)

        def count_grants() -> None:
            grants.append(simulation.access.statistics()["rdma_grants"])

        monkeypatch.setattr(Segment, "acquire", acquire_or_fail)
        producer(simulation, model, "p", 20, **{"rdma.produce": mode})
        simulation.run_until(lambda: all(a.done for a in simulation.actors))
        simulation.network.run_for(100_000_000)
        check_nothing_left(simulation)
    assert failures
    assert not any(grants), "a grant is left that holds nothing"
