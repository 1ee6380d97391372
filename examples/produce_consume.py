"""Produce and consume from plain Python: a broker, a producer with delivery reports, and two
consumers that share a topic as a group.

    # starts its own broker
    python examples/produce_consume.py
    # uses your broker; any Kafka broker works
    python examples/produce_consume.py --bootstrap-servers 127.0.0.1:9092

Two members of one group share a topic of 4 partitions.  The producer sends readings of 20 sensors,
keyed by sensor.  The members read them and commit what they have counted.  Then the second half of
the topic is read as Arrow columns.  The exit status is 1 if a reading is missing or is read twice.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import uuid
from collections import Counter
from contextlib import ExitStack

import pyarrow.compute as pc

import kdirect

SENSORS, READINGS = 20, 10_000


def produce(settings: dict[str, str], topic: str) -> None:
    """Send all readings.  The callback gets every record that could not be delivered, with the
    error."""
    failed: list[str] = []

    def on_delivery(error: kdirect.KdirectError | None, message: kdirect.Message) -> None:
        if error is not None:
            failed.append(f"{message.key()!r}: {error}")

    rng = random.Random(1)
    with kdirect.Producer({**settings, "linger.ms": "5"}) as producer:
        for i in range(READINGS):
            reading = {"sensor": i % SENSORS, "celsius": round(rng.gauss(20, 4), 1)}
            producer.produce(
                topic, json.dumps(reading), key=f"sensor-{i % SENSORS}", on_delivery=on_delivery
            )
        producer.flush()
        last = producer.send(
            topic, json.dumps({"sensor": 0, "celsius": 20.0}), key="sensor-0"
        ).result()
        statistics = producer.statistics()
    over = "RDMA" if statistics.get("rdma_records") else "TCP"
    print(
        f"{READINGS + 1} readings sent over {over}; "
        f"the last one is {topic}-{last.partition()} offset {last.offset()}"
    )
    if failed:
        raise SystemExit(f"{len(failed)} were not delivered; the first: {failed[0]}")


def work(
    settings: dict[str, str],
    topic: str,
    name: str,
    shared: threading.Semaphore,
    seen: Counter[tuple[int, int]],
    done: threading.Event,
) -> None:
    """One member of the group: reads the partitions it gets, and commits every hundred records."""
    group = {
        **settings,
        "group.id": f"{topic}-group",
        "auto.offset.reset": "earliest",
        "enable.auto.commit": "false",
    }
    group["heartbeat.interval.ms"] = "200"  # how soon a member learns that another has joined

    def on_assign(_: kdirect.Consumer, given: list[kdirect.TopicPartition]) -> None:
        print(f"{name} reads partitions {[tp.partition for tp in given]}")
        if len(given) == 2:
            shared.release()

    with kdirect.Consumer(group) as consumer:
        # Commit before partitions move, so that no other member reads again what was counted here.
        consumer.subscribe(
            [topic], on_assign=on_assign, on_revoke=lambda c, _: c.commit(asynchronous=False)
        )
        count = 0
        while not done.is_set():
            message = consumer.poll(0.1)
            if message is None:
                continue
            seen[message.partition(), message.offset()] += 1
            count += 1
            if count % 100 == 0:
                consumer.commit()
            if len(seen) > READINGS:
                done.set()
        print(f"{name} read {count} readings")


def averages(settings: dict[str, str], topic: str) -> None:
    """The second half of each partition, as columns."""
    with kdirect.Consumer(settings) as consumer:
        tps = [
            kdirect.TopicPartition(topic, p)
            for p in range(consumer.list_topics()[topic].partitions)
        ]
        ends = {tp: consumer.get_watermark_offsets(tp)[1] for tp in tps}
        consumer.assign({tp: end // 2 for tp, end in ends.items()})
        rows, celsius = 0, 0.0
        while any(consumer.position(tp) < end for tp, end in ends.items()):
            batch = consumer.poll_arrow(1.0)
            if batch is not None:
                found = pc.extract_regex(
                    pc.cast(batch["value"], "string"), r'celsius": (?P<c>[-0-9.]+)'
                )
                values = pc.cast(pc.struct_field(found, "c"), "double")
                rows, celsius = rows + batch.num_rows, celsius + pc.sum(values).as_py()
        print(f"{rows} readings of the second half average {celsius / rows:.1f} degrees")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--bootstrap-servers", help="a running broker; default: start one here")
    parser.add_argument("--transport", default="auto", choices=("auto", "shm", "verbs", "tcp"))
    options = parser.parse_args()
    with ExitStack() as stack:
        servers = (
            options.bootstrap_servers or stack.enter_context(kdirect.Broker()).bootstrap_servers
        )
        settings = {"bootstrap.servers": servers, "transport": options.transport}
        topic = f"readings-{uuid.uuid4().hex[:8]}"
        kdirect.connect(settings).admin.create_topic(topic, 4)
        seen: Counter[tuple[int, int]] = Counter()
        shared, done = threading.Semaphore(0), threading.Event()
        members = [
            threading.Thread(
                target=work, args=(settings, topic, name, shared, seen, done), daemon=True
            )
            for name in ("one", "two")
        ]
        for member in members:
            member.start()
        for _ in members:
            shared.acquire(timeout=60)  # until each member has two of the partitions
        produce(settings, topic)
        for member in members:
            member.join(120)
        averages(settings, topic)
        kdirect.connect(settings).admin.delete_topic(topic)
    twice = sum(n - 1 for n in seen.values())
    print(f"{len(seen)} readings were read, {twice} of them twice")
    return 0 if len(seen) == READINGS + 1 and not twice else 1


if __name__ == "__main__":
    sys.exit(main())
