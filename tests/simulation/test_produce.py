"""Many producers of one partition under a seeded network: shared, exclusive and in between, with
Kafka clients among them; producers that are killed or stopped anywhere, that reserve and do not
write, or write something else, or send what was damaged before; a broker that stops or is killed
and started again (KafkaDirect §4.2.2).

The model, checked after each schedule: what was acknowledged is in the log; nothing is in it that
was not produced; offsets have no holes, and what a reader saw once is there for good; each
producer's records stand in the order it produced them and, as they are idempotent, once; and a
producer that was not killed has delivered everything.

A failing schedule prints its seed; `KDIRECT_SIMULATE=seed` repeats it alone, `KDIRECT_SCHEDULES=n`
runs n of each case, and `FAILED_SEEDS` keeps those that failed once.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict

import pytest
from actors import Actor
from harness import TP, Simulation
from leftovers import check_nothing_left

from kdirect.client.produce_driver import ProduceDriver
from kdirect.errors import DeliveryError, KdirectError
from kdirect.format import layout
from kdirect.format.codec import encode_records
from kdirect.format.error_codes import ErrorCode
from kdirect.rdma.sim import Faults

SCHEDULES = int(os.environ.get("KDIRECT_SCHEDULES", "80"))
ONE = os.environ.get("KDIRECT_SIMULATE")
FAILED_SEEDS: list[tuple[str, int]] = [
    ("everything", 2264287909),  # who waited for access and was cut meanwhile was never answered
    (
        "lost connections",
        4071029295,
    ),  # less than a millisecond left was taken for none, and waited for without an end
    ("broker", 3314085693),
    ("broker", 2833475365),
    ("everything", 4138683597),
    (
        "everything",
        1969320516,
    ),  # late word of a head that had ended swept away what waited for the next
    (
        "killed and stopped",
        2702599861,
    ),  # a producer killed between the halves of its WRITE_WITH_IMM
    (
        "everything",
        53900582,
    ),  # a hole that was too old when its producer went: nobody was told that the head had ended
    ("rolls", 949523989),
    ("rolls", 949523931),
]


class Model:
    """What the producers know."""

    def __init__(self) -> None:
        self.produced: dict[str, list[bytes]] = defaultdict(list)
        self.acknowledged: set[bytes] = set()
        self.refused: set[bytes] = set()  # failed, and said to be not in the log
        self.given_up: set[str] = set()  # producers of which something failed, or that were killed
        self.seen: list[bytes] = []

    def read(self, simulation: Simulation) -> None:
        """What a reader sees now goes on from what it has seen."""
        log = simulation.log()
        assert log[: len(self.seen)] == self.seen, "what was read once has changed"
        self.seen = log

    def check(self, simulation: Simulation, *, exactly_once: bool = True) -> None:
        self.read(simulation)
        simulation.check_tail()
        log = self.seen
        everything = {v for values in self.produced.values() for v in values}
        assert set(log) <= everything, "something is in the log that nobody produced"
        assert self.acknowledged <= set(log), (
            f"acknowledged and lost: {sorted(self.acknowledged - set(log))[:3]}"
        )
        assert not self.refused & set(log), (
            f"refused and committed: {sorted(self.refused & set(log))[:3]}"
        )
        assert not exactly_once or len(log) == len(set(log)), "something is there twice"
        first_seen = list(dict.fromkeys(log))
        for name, values in self.produced.items():
            mine = set(values)
            found = [v for v in first_seen if v in mine]
            there = set(found)
            assert found == [v for v in values if v in there], (
                f"the records of {name} are out of order"
            )
            if name not in self.given_up:
                assert there == mine, f"{name} has not delivered {len(mine - there)} records"


SIZES = (0, 30, 200, 1500)


def producer(
    simulation: Simulation,
    model: Model,
    name: str,
    requests: int,
    damage: float = 0.0,
    sizes: tuple[int, ...] = SIZES,
    **settings: object,
):
    """An actor: requests of one to a few records, some waited for, `damage` of them with a bit that
    is wrong."""

    def body(actor: Actor) -> None:
        random = simulation.random
        session = simulation.session(**settings)
        driver = ProduceDriver(session, session.settings)  # type: ignore[arg-type]

        def take() -> None:
            for tag, _, error in driver.outcomes():
                if error is None:
                    model.acknowledged.update(tag)
                else:
                    code = getattr(error.__cause__, "code", None)
                    assert damage or code != ErrorCode.CORRUPT_MESSAGE, (
                        f"{name} sent what the broker could not read: {error}"
                    )
                    model.given_up.add(name)
                    if not error.maybe_committed:
                        model.refused.update(tag)

        for i in range(requests):
            size = random.choice(sizes)
            values = [
                b"%s %d.%d " % (name.encode(), i, k) + b"." * size
                for k in range(random.choice((1, 1, 3)))
            ]
            data = encode_records([(None, v, [], 1) for v in values])
            if random.random() < damage:
                at = random.randrange(layout.BATCH_CRC, len(data))
                data = data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]
            else:
                model.produced[name] += values
            alone = len(values) == 1 and not damage and random.random() < 0.5
            while True:
                try:
                    if not (alone and driver.try_record(TP, values[0], None, 1, values)):
                        driver.send(TP, data, len(values), values)
                    break
                except DeliveryError:
                    model.given_up.add(name)
                    break
                except KdirectError as e:
                    if not e.retriable:
                        raise
                    simulation.sleep(0.002)
            if random.random() < 0.3:
                simulation.give_way()
            if random.random() < 0.1:
                driver.wait_answered(50)
            take()
        for _ in range(1000):
            if driver.wait_answered(100):
                break
        assert driver.in_flight == 0, f"{name} waits for ever"
        take()
        driver.abort()

    return simulation.spawn(name, body)


def vandal(simulation: Simulation, model: Model, how: str):
    """An actor: reserves as a producer does, then dies, sleeps, or writes what it should not."""

    def body(actor: Actor) -> None:
        with contextlib.suppress(KdirectError):
            break_in()

    def break_in() -> None:
        random = simulation.random
        session = simulation.session(**{"rdma.produce": "shared"})
        driver = ProduceDriver(session, session.settings)  # type: ignore[arg-type]
        simulation.sleep(random.random() * 0.002)
        path = driver.open(TP)
        writer = getattr(path, "writer", None)
        if writer is None or not writer.shared:
            return
        qp, cq = path.channel.qp, path.channel.send_cq
        memory = path.channel.local_memory(4096)
        length = random.choice((100, 700))
        qp.post_fetch_add(
            0,
            memory,
            0,
            writer.word_address,
            writer.word_rkey,
            1 << layout.SHARED_ORDER_SHIFT | length,
        )
        while not (completions := cq.poll(1)):
            if not cq.wait(50):
                return
        old = int.from_bytes(memoryview(memory.memory)[:8], "little")
        order, position = (
            old >> layout.SHARED_ORDER_SHIFT,
            old & (1 << layout.SHARED_ORDER_SHIFT) - 1,
        )
        if not completions[0].ok or position + length > writer.length or how == "nothing":
            # Others want the partition for themselves, and would wait for ever for an idle one.
            if how == "notice":
                path.channel.close()
            return
        if how == "late":
            simulation.sleep(0.03)
        model.produced["vandal"] += [b"short", b"order"]  # whole batches, if not as they should be
        model.given_up.add("vandal")
        data = {
            "rubbish": bytes(random.randrange(256) for _ in range(length)),
            "short": encode_records([(None, b"short", [], 1)]),
            "order": encode_records([(None, b"order", [], 1)]),
            "late": bytes(length),
            "notice": encode_records([(None, b"short", [], 1)]),
        }[how]
        data = data[:length]
        memoryview(memory.memory)[: len(data)] = data
        if how == "order":
            order = (order + random.choice((1, 5, 40, 0x8000))) & 0xFFFF
        if (
            how == "notice"
        ):  # too short, too long, another's, of too many bytes, of none, or of too few
            notice = random.choice(
                ((0, 0), (1, 0), (-1, 0), (0, 1 << 30), (0, -len(data)), (0, -7))
            )
            words = writer.file_id + notice[0] & 0xFFFF, order, len(data) + notice[1]
            memoryview(memory.memory)[2048:2064] = b"".join(
                n.to_bytes(k, "little") for n, k in zip(words, (2, 2, 4), strict=True)
            ) + bytes(8)
            qp.post_write(0, memory, 0, len(data), writer.address + position, writer.rkey)
            qp.post_send(
                0, memory, 2048, layout.NOTICE_BYTES if any(notice) else random.choice((0, 7, 9))
            )
        else:
            qp.post_write_imm(
                0,
                memory,
                0,
                len(data),
                writer.address + position,
                writer.rkey,
                writer.file_id << 16 | order,
            )
        simulation.sleep(0.05)
        # A client that named a file id that nobody has is not cut, so it leaves by itself.
        path.channel.close()

    return simulation.spawn(f"vandal {how}", body)


def run(case: str, seed: int, directory) -> None:
    shape = CASES[case]
    model = Model()
    print(f"{case}: KDIRECT_SIMULATE={seed}")
    with Simulation(
        seed,
        directory / f"{case} {seed}",
        shape.get("faults", Faults()),
        **shape.get("settings", {}),
    ) as simulation:
        random = simulation.random
        simulation.lose = shape.get("lose", 0.0)
        simulation.worker_delay_ns = random.choice((1_000, 30_000, 300_000))
        client, damage = shape.get("client", {}), shape.get("damage", 0.0)
        producers = [
            producer(
                simulation,
                model,
                f"p{i}",
                random.randint(*shape.get("requests", (5, 25))),
                damage,
                shape.get("sizes", SIZES),
                **{"rdma.produce": random.choice(shape["modes"]), **client},
            )
            for i in range(random.randint(*shape.get("producers", (2, 5))))
        ]
        for i in range(shape.get("kafka", 0)):
            producers.append(
                producer(
                    simulation, model, f"kafka{i}", random.randint(3, 15), **{"rdma.produce": "off"}
                )
            )
        for i in range(shape.get("two sided", 0)):
            settings = {"produce.path": "send"}
            producers.append(
                producer(simulation, model, f"sends{i}", random.randint(3, 15), **settings)
            )
        if shape.get("vandals") and random.random() < 0.7:
            vandal(simulation, model, random.choice(shape["vandals"]))
        chaos = shape.get("chaos", ())

        def disturb() -> None:
            if simulation.busy:  # the broker's event loop does one thing at a time
                simulation.network.call_later(1_000, disturb)
                return
            what = random.choice(chaos)
            if what == "kill":
                victim = random.choice(producers)
                if not victim.done:
                    model.given_up.add(victim.name)
                    simulation.kill(victim)
            elif what == "stop":
                simulation.stop(
                    random.choice(producers), random.choice((100_000, 5_000_000, 60_000_000))
                )
            elif what == "stop broker":
                simulation.stop_broker(random.choice((100_000, 5_000_000, 60_000_000)))
            elif what == "restart":
                simulation.restart_broker()
            elif what == "roll":
                simulation.execute(lambda: simulation.partition.roll())
            elif what == "read":
                model.read(simulation)

        for _ in range(random.randint(1, 4) if chaos else 0):
            simulation.network.call_later(random.randint(0, 8_000_000), disturb)
        simulation.run_until(lambda: all(a.done for a in simulation.actors))
        for actor in simulation.actors:
            if actor.error is not None:
                raise actor.error
        simulation.network.run_for(100_000_000)
        model.check(simulation, exactly_once=shape.get("exactly_once", True))
        check_nothing_left(simulation)


OFTEN_LOST = Faults(disconnect=0.003, tear=0.2, rnr=0.002)
TORN = Faults(delay_ns=(100, 400_000), tear=0.2)
CASES: dict[str, dict] = {
    "exclusive": {"modes": ["exclusive"], "faults": TORN},
    "exclusive and kafka clients": {
        "modes": ["exclusive", "auto"],
        "kafka": 1,
        "lose": 0.02,
        "faults": Faults(tear=0.1, rnr=0.002),
    },
    "damaged": {
        "modes": ["exclusive", "shared"],
        "client": {"enable.idempotence": "false"},
        "damage": 0.1,
        "exactly_once": False,
        "kafka": 1,
        "faults": Faults(tear=0.1),
    },
    "shared": {"modes": ["shared"]},
    "auto": {"modes": ["auto"], "faults": TORN},
    "kafka clients": {"modes": ["shared", "auto"], "kafka": 2, "lose": 0.02},
    "compare and swap": {
        "modes": ["shared"],
        "client": {"rdma.produce.atomic": "cas"},
        "faults": TORN,
        "kafka": 1,
    },
    "notices": {
        "modes": ["exclusive", "shared", "auto"],
        "client": {"rdma.notify": "send"},
        "kafka": 1,
        "vandals": ["notice"],
        "chaos": ["kill", "roll", "read"],
        "faults": Faults(disconnect=0.002, tear=0.2, rnr=0.002),
    },
    "ahead": {
        "modes": ["exclusive", "auto"],
        "producers": (1, 2),
        "requests": (40, 80),
        "settings": {"segment_bytes": 8192},
        "faults": TORN,
        "chaos": ["roll", "read"],
    },
    "ahead and others": {
        "modes": ["exclusive", "auto"],
        "producers": (1, 2),
        "requests": (40, 80),
        "kafka": 1,
        "lose": 0.02,
        "settings": {"segment_bytes": 8192},
        "faults": Faults(disconnect=0.003, tear=0.2, rnr=0.002),
        "chaos": ["kill", "stop", "stop broker", "restart", "roll", "read"],
    },
    "large values": {
        "modes": ["exclusive", "shared"],
        "sizes": (30, 8200, 20_000),
        "kafka": 1,
        "settings": {"segment_bytes": 65536},
        "chaos": ["roll", "read"],
        "faults": Faults(disconnect=0.003, tear=0.2, rnr=0.002),
    },
    "rolls": {
        "modes": ["shared", "auto"],
        "kafka": 1,
        "settings": {"segment_bytes": 8192},
        "chaos": ["roll", "read"],
    },
    "killed and stopped": {
        "modes": ["shared", "auto"],
        "kafka": 1,
        "faults": TORN,
        "chaos": ["kill", "stop", "read"],
    },
    "vandals": {
        "modes": ["shared", "auto"],
        "kafka": 1,
        "vandals": ["nothing", "rubbish", "short", "order", "late"],
        "chaos": ["read"],
    },
    "lost connections": {
        "modes": ["shared", "auto"],
        "kafka": 1,
        "faults": Faults(disconnect=0.01, tear=0.1, rnr=0.002),
        "lose": 0.05,
    },
    "broker": {
        "modes": ["shared", "auto"],
        "kafka": 1,
        "lose": 0.02,
        "chaos": ["stop broker", "restart", "read"],
    },
    "two-sided": {
        "modes": ["exclusive", "shared", "auto"],
        "two sided": 2,
        "kafka": 1,
        "lose": 0.02,
        "faults": OFTEN_LOST,
        "settings": {"segment_bytes": 16384},
        "chaos": ["kill", "stop", "stop broker", "restart", "roll", "read"],
    },
    "two-sided alone": {
        "modes": ["auto"],
        "client": {"produce.path": "send"},
        "lose": 0.05,
        "chaos": ["stop broker", "restart", "read"],
    },
    "everything": {
        "modes": ["shared", "auto", "off"],
        "kafka": 1,
        "lose": 0.02,
        "faults": Faults(disconnect=0.005, tear=0.2, rnr=0.002),
        "settings": {"segment_bytes": 16384},
        "vandals": ["nothing", "rubbish", "short", "late"],
        "chaos": ["kill", "stop", "stop broker", "restart", "roll", "read"],
    },
}


@pytest.mark.parametrize("case", CASES)
def test_random_schedules(case, seed, tmp_path):
    if ONE is not None:
        run(case, int(ONE), tmp_path)
        return
    for i in range(SCHEDULES):
        run(case, (seed + i) % 2**32, tmp_path)


@pytest.mark.parametrize(("case", "failed"), FAILED_SEEDS)
def test_seeds_that_failed_once(case, failed, tmp_path):
    run(case, failed, tmp_path)
