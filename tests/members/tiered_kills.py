"""Rounds in which the leader of a tiered partition is killed while it copies or deletes.

``python -m tests.members.tiered_kills --first SEED --count N`` runs many of them, in a cluster of
three brokers.

In each round a broker leads a new topic, and ends with SIGKILL at a named step of copying or
deletion (`kdirect.failpoints`), while records are produced with acks=all; another one leads, and
the first comes back.  The cluster has to settle, and then: every acknowledged record from the log
start on is read once; what is in the store is what the metadata says; no replica keeps what is
copied.  Then the topic is deleted, and its objects have to go.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import threading
from pathlib import Path

from confluent_kafka.admin import AdminClient, NewTopic

import kdirect
from kdirect.failpoints import VARIABLE
from tests.members.tiers import SEGMENT_BYTES, TIERED, Tiers, properties
from tests.storage.remote_kills import STEPS

RECORDS = 1500
ALL_STEPS = (*STEPS, "before the leader epoch", "after the leader epoch")


def run(tiers: Tiers, seed: int) -> bool:
    """One round; was the step reached?  AssertionError says what was broken."""
    chance = random.Random(seed)
    cluster = tiers.cluster
    step = ALL_STEPS[seed % len(ALL_STEPS)]
    victim = chance.choice(cluster.node_ids)
    others = [b for b in cluster.node_ids if b != victim]
    tiers.topic, tiers.acknowledged = f"t{seed}", {}
    number = 1 if "leader epoch" in step else chance.choice((1, 1, 2, 4))
    _restart(cluster, victim, f"{step}:{number}")
    _create(tiers, [victim, *others], chance, step)
    stop = threading.Event()
    producing = threading.Thread(target=tiers.produce, args=(RECORDS, stop))
    producing.start()
    tiers.wait(
        lambda: victim not in cluster.running or not producing.is_alive(), "it is reached", 90
    )
    fired = victim not in cluster.running
    if not fired:
        cluster.kill(victim)
    tiers.wait(lambda: tiers.leader() not in (-1, victim), "another leader", 90)
    producing.join(90)
    assert not producing.is_alive()
    cluster.start(victim)
    tiers.wait(lambda: tiers.in_sync() == cluster.node_ids, "all are in sync", 90)
    tiers.settle()
    assert len(tiers.acknowledged) == RECORDS
    tiers.check()
    tiers.session.admin.delete_topic(tiers.topic)
    tiers.wait(lambda: not tiers.objects(), "its objects are gone")
    return fired


def _restart(cluster: kdirect.Cluster, broker: int, failpoint: str) -> None:
    cluster.kill(broker)
    os.environ[VARIABLE] = failpoint
    try:
        cluster.start(broker)
    finally:
        del os.environ[VARIABLE]
    cluster.wait_for_members()


def _create(tiers: Tiers, replicas: list[int], chance: random.Random, step: str) -> None:
    """A topic that the first of these leads."""
    keep = 2 if "DELETE" in step else chance.choice((2, 4, 1000))
    configs = {**TIERED, "retention.bytes": str(SEGMENT_BYTES * keep)}
    admin = AdminClient({"bootstrap.servers": tiers.cluster.bootstrap_servers, "log_level": 0})
    topic = NewTopic(tiers.topic, num_partitions=1, replica_assignment=[replicas], config=configs)
    admin.create_topics([topic])[tiers.topic].result(30)
    if "leader epoch" not in step:  # at which it dies when it has just begun to lead
        tiers.wait(lambda: tiers.in_sync() == sorted(replicas), "all are in sync", 90)
        tiers.wait(lambda: tiers.leader() == replicas[0], "the first leads", 90)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    arguments = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="tiered-kills-", dir="/dev/shm"))
    store = directory / "store"
    store.mkdir()
    fired = 0
    try:
        with kdirect.Cluster(
            3, directory / "cluster",
            properties={"auto.create.topics.enable": False},
            **properties(store),
        ) as cluster:  # fmt: skip
            tiers = Tiers(cluster, store)
            for seed in range(arguments.first, arguments.first + arguments.count):
                reached = run(tiers, seed)
                fired += reached
                step = ALL_STEPS[seed % len(ALL_STEPS)]
                print(f"seed {seed}: {step}{'' if reached else ', not reached'}", flush=True)
            tiers.close()
    except BaseException:
        print(f"what is left is in {directory}")
        raise
    shutil.rmtree(directory, ignore_errors=True)
    print(f"{arguments.count} rounds, {fired} kills")
    return 0


if __name__ == "__main__":
    sys.exit(main())
