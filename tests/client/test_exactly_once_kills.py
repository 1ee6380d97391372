"""The broker is killed at each step of a commit, and at random times beside drivers that leave in
the middle of a batch: each batch is seen once and whole, at any time.

KDIRECT_ROUNDS=n runs n rounds of kills at random times, KDIRECT_SEED=s begins with that seed
(`make exactly-once-kills`).
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import kdirect
from kdirect.client.attempts import ALREADY_COMMITTED, COMMITTED
from kdirect.failpoints import VARIABLE
from tests.client.batches import PARTITIONS, Watcher, write, write_batch
from tests.support import BrokerProcess, wait_until

ROUNDS = int(os.environ.get("KDIRECT_ROUNDS") or 2)
FIRST = int(os.environ.get("KDIRECT_SEED") or 0)
BATCHES = 6
KILLS = 4  # at random times
KILLED_AT = 3  # the batch whose commit finds the broker dying
OPTIONS = {"transaction_state_log_num_partitions": "2"}
POINTS = {
    "attempts, to be ended": "nothing of the commit is written",
    "attempts, prepared": "it is decided, and has no marker",
    "markers, one more:5": "some partitions have some markers",
    "attempts, marked": "all have theirs",
    "attempts, complete": "it is complete, and nobody was told",
}


def _point(name: str) -> str:
    """The failpoint of the commit of batch KILLED_AT; those before come there, too."""
    name, _, more = name.partition(":")
    before = KILLED_AT
    if name.startswith("markers"):
        # Of each batch before: four attempts that count and one or two that do not, in three
        # partitions.
        counted = sum(4 + sum((b + t) % 3 == 0 for t in range(4)) for b in range(KILLED_AT))
        before = counted * PARTITIONS + int(more)
    return f"{name}:{before + 1}"


@pytest.mark.parametrize("transport", ["tcp", "auto"])
@pytest.mark.parametrize("point", POINTS)
def test_a_broker_that_is_killed_in_a_commit(
    point: str, transport: str, broker_process: Callable[..., BrokerProcess], monkeypatch: Any
) -> None:
    monkeypatch.setenv(VARIABLE, _point(point))
    broker = broker_process(**OPTIONS)
    monkeypatch.delenv(VARIABLE)
    servers = broker.bootstrap_servers
    process = broker.process
    assert process is not None
    with kdirect.connect({"bootstrap.servers": servers, "transport": transport}) as session:
        session.admin.create_topic("t", PARTITIONS)
        watcher = Watcher(servers, "t")
        died_in: list[int] = []

        def start_again() -> None:
            process.wait(60)
            broker.kill()
            broker.start()

        starter = threading.Thread(target=start_again)
        starter.start()
        for batch in range(BATCHES):
            before = process.poll()
            said = write_batch(session, "t", "r", batch)
            if before is None and process.poll() is not None:
                died_in.append(batch)
            assert said in (COMMITTED, ALREADY_COMMITTED)
            assert write_batch(session, "t", "r", batch) == ALREADY_COMMITTED
        starter.join(60)
        assert died_in == [KILLED_AT]
        wait_until(lambda: watcher.has_seen(BATCHES), "all batches were seen")
        watcher.close()
        assert watcher.looks > BATCHES


@pytest.mark.parametrize("seed", range(FIRST, FIRST + ROUNDS))
def test_brokers_that_are_killed_and_drivers_that_leave(
    seed: int, broker_process: Callable[..., BrokerProcess]
) -> None:
    chance = random.Random(seed)
    broker = broker_process(**OPTIONS)
    servers = broker.bootstrap_servers
    settings = {"bootstrap.servers": servers, "transport": chance.choice(["tcp", "auto"])}
    with kdirect.connect(settings) as session:
        session.admin.create_topic("t", PARTITIONS)
    watcher = Watcher(servers, "t")
    ends = threading.Event()

    def kill() -> None:
        for _ in range(KILLS):
            if not ends.wait(chance.uniform(0.1, 3.0)):
                broker.kill()
                broker.start()

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        batch, run, rng = 0, 0, random.Random(seed + 1)
        while batch < BATCHES:
            run += 1
            with kdirect.connect(settings) as session:
                # A driver that is gone after some batches, at any step of the next.
                for _ in range(rng.randint(0, 2)):
                    if batch < BATCHES and _written(session, run, batch):
                        batch += 1
                _leave_in_the_middle(session, run, batch, rng)
                time.sleep(rng.uniform(0, 0.3))
    finally:
        ends.set()
        killer.join()
    with kdirect.connect(settings) as session:
        assert write_batch(session, "t", "last", BATCHES - 1) == ALREADY_COMMITTED
    wait_until(lambda: watcher.has_seen(BATCHES), "all batches were seen")
    watcher.close()


def _written(session: Any, run: int, batch: int) -> bool:
    """A task fails when the broker goes away under an attempt for too long; Spark tries again."""
    try:
        return write_batch(session, "t", f"r{run}", batch) in (COMMITTED, ALREADY_COMMITTED)
    except kdirect.KdirectError:
        return False


def _leave_in_the_middle(session: Any, run: int, batch: int, rng: random.Random) -> None:
    attempts = []
    for task in range(rng.randint(0, 4)):
        try:
            attempt = session.join_attempt("t", "q", f"r{run}", batch)
            if attempt is not None:
                write(session, attempt, "t", batch, task)
                attempts.append(attempt)
        except kdirect.KdirectError:
            return
