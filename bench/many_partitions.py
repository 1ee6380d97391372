"""How a cluster of three brokers on this machine does with many partitions of factor 3.

Creates a topic, sends a record to each partition, waits until leaders write into the files of their
followers, kills a broker, and says what each step took, and what the processes hold: descriptors,
mappings, memory, CPU while nothing happens.  Run: ``make bench-cluster PARTITIONS=1000``.  It fails
where a record is lost, or a partition has no leader in time.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import confluent_kafka
from confluent_kafka.admin import AdminClient, NewTopic

import kdirect

TOPIC = "many"
BROKERS = 3
WAIT_S = 300.0


@contextmanager
def timed(what: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    print(f"{what:60} {time.monotonic() - began:8.2f} s", flush=True)


def wait(holds: Callable[[], Any], what: str, every_s: float = 0.05) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        if time.monotonic() > deadline:
            raise SystemExit(f"{what} took more than {WAIT_S:g} s")
        time.sleep(every_s)


def partitions(admin: AdminClient) -> dict[int, Any]:
    try:
        return dict(admin.list_topics(TOPIC, timeout=30).topics[TOPIC].partitions)
    except confluent_kafka.KafkaException:
        return {}


def in_sync(admin: AdminClient, count: int, replicas: int) -> bool:
    found = partitions(admin).values()
    return len(found) == count and all(p.leader > 0 and len(p.isrs) == replicas for p in found)


def write_to_all(bootstrap_servers: str, count: int) -> None:
    """A record to each partition, acknowledged by all."""
    failed: list[Any] = []
    producer = confluent_kafka.Producer(
        {
            "bootstrap.servers": bootstrap_servers,
            "acks": "all",
            "log_level": 0,
            "linger.ms": 5,
            "enable.idempotence": True,
        }
    )
    for number in range(count):
        producer.produce(
            TOPIC,
            b"%d" % number,
            partition=number,
            on_delivery=lambda error, message: failed.append(error) if error else None,
        )
    left = producer.flush(WAIT_S)
    if left or failed:
        raise SystemExit(f"{left} records are not acknowledged, {len(failed)} failed: {failed[:3]}")


def pushed(cluster: kdirect.Cluster) -> int:
    """Replicas whose file their leader has mapped."""
    found = 0
    for node_id in cluster.running:
        maps = Path(f"/proc/{cluster.pid(node_id)}/maps").read_text()
        for other in cluster.node_ids:
            if other != node_id:
                directory = re.escape(str(cluster.log_dirs(other)[0]))
                found += len(set(re.findall(rf"{directory}/({TOPIC}-\d+)/", maps)))
    return found


def holdings(cluster: kdirect.Cluster, node_id: int) -> str:
    process = Path(f"/proc/{cluster.pid(node_id)}")
    status = (process / "status").read_text()
    memory = int(re.findall(r"RssAnon:\s+(\d+)", status)[0]) >> 10
    shared = int(re.findall(r"RssShmem:\s+(\d+)", status)[0]) >> 10
    mappings = len((process / "maps").read_text().splitlines())
    threads = re.findall(r"Threads:\s+(\d+)", status)[0]
    names = [os.readlink(fd) for fd in (process / "fd").iterdir() if fd.is_symlink()]
    kinds: dict[str, int] = {}
    for name in names:
        kind = "log" if ".log" in name else "index" if "index" in name else name.split(":")[0]
        kind = kind.split(" ")[0].split("-")[0] if kind not in ("log", "index") else kind
        kinds[kind[:20]] = kinds.get(kind[:20], 0) + 1
    most = ", ".join(f"{n} {k}" for k, n in sorted(kinds.items(), key=lambda x: -x[1])[:4])
    return (
        f"broker {node_id}: {len(names)} descriptors ({most}), {mappings} mappings,"
        f" {memory} MiB, {shared} MiB shared, {threads} threads"
    )


def cpu_s(cluster: kdirect.Cluster, node_id: int) -> float:
    fields = Path(f"/proc/{cluster.pid(node_id)}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def say_idle(cluster: kdirect.Cluster, seconds: float) -> None:
    before = {n: cpu_s(cluster, n) for n in cluster.running}
    time.sleep(seconds)
    for n, used in before.items():
        share = 100 * (cpu_s(cluster, n) - used) / seconds
        print(f"{holdings(cluster, n)}, {share:.1f} % of a core idle", flush=True)


def run(directory: str, count: int, segment_bytes: int, idle_s: float) -> None:
    properties = {"log.segment.bytes": segment_bytes, "rdma.transports": ["shm"]}
    with kdirect.Cluster(BROKERS, directory or None, properties=properties) as cluster:
        servers = cluster.bootstrap_servers
        admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})
        replicas = count * BROKERS
        with timed(f"{count} partitions of factor {BROKERS} are created"):
            admin.create_topics([NewTopic(TOPIC, count, BROKERS)])[TOPIC].result(WAIT_S)
        with timed("then all have a leader, and all replicas are in sync"):
            wait(lambda: in_sync(admin, count, BROKERS), "in sync")
        with timed("then the first record to each, acks=all"):
            write_to_all(servers, count)
        with timed(f"then {replicas - count} replicas are written by their leaders"):
            wait(lambda: pushed(cluster) >= replicas - count, "pushed", 0.5)
        with timed("then another record to each, acks=all"):
            write_to_all(servers, count)
        say_idle(cluster, idle_s)
        victim = partitions(admin)[0].leader
        others = [n for n in cluster.node_ids if n != victim]
        admin = AdminClient({"bootstrap.servers": cluster.address(others[0]), "log_level": 0})
        cluster.kill(victim)

        def led() -> bool:
            found = partitions(admin).values()
            return len(found) == count and all(p.leader in others for p in found)

        with timed(f"broker {victim} is killed; until all have another leader"):
            wait(led, "failover")
        with timed("then a record to each, acks=all"):
            write_to_all(servers, count)
        with timed("it is started again; until all are in sync"):
            cluster.start(victim)
            wait(lambda: in_sync(admin, count, BROKERS), "in sync again")
        with timed(f"then {replicas - count} replicas are written by their leaders"):
            wait(lambda: pushed(cluster) >= replicas - count, "pushed again", 0.5)
        with timed("then a record to each, acks=all"):
            write_to_all(servers, count)
        for n in cluster.running:
            print(holdings(cluster, n))
        consumer = confluent_kafka.Consumer(
            {"bootstrap.servers": servers, "group.id": "bench", "log_level": 0}
        )
        for number in range(count):
            marks = consumer.get_watermark_offsets(
                confluent_kafka.TopicPartition(TOPIC, number), timeout=30
            )
            if marks != (0, 4):
                raise SystemExit(f"{TOPIC}-{number} has offsets {marks}, and 4 records were sent")
        consumer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--partitions", type=int, default=1000)
    parser.add_argument("--segment-bytes", type=int, default=1 << 20)
    parser.add_argument("--idle", type=float, default=10.0, help="seconds to look at idle brokers")
    parser.add_argument("--directory", default="", help="of the brokers' logs")
    options = parser.parse_args()
    run(options.directory, options.partitions, options.segment_bytes, options.idle)


if __name__ == "__main__":
    main()
