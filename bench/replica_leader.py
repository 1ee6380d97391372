"""A broker whose one partition is pushed to followers, for the rows of replication.

    python bench/replica_leader.py DIRECTORY FOLLOWERS MOST_BYTES SPIN_US SEGMENT_BYTES

The broker is a whole one, so that real clients produce; its followers are brokers' cores (produce
worker, log, queue pairs) in processes of their own.  The control plane of a cluster has no part in
this: what it would decide is fixed here.  Prints ``broker HOST:PORT PID...``; then answers each
line on standard input by one of figures as JSON.  ``replicate TOPIC`` has its partition 0 pushed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from kdirect.broker.broker import Broker
from kdirect.broker.followed_head import FileGrant
from kdirect.broker.push import PushLink
from kdirect.broker.pushed_partition import PushedPartition, RingMemory
from tests.broker.push_rig import RECEIVES, RemoteNode

WINDOW = 64
handlers: dict[int, Any] = {}  # of each follower's news


def main() -> None:
    directory, followers, most, spin_us, segment_bytes = sys.argv[1], *map(int, sys.argv[2:])
    broker = Broker(
        f"{directory}/0",
        properties={"rdma.spin.us": spin_us, "log.segment.bytes": segment_bytes},
    )
    with broker:
        nodes = [
            RemoteNode(n, Path(directory) / str(n), spin_us=spin_us, segment_bytes=segment_bytes)
            for n in range(1, followers + 1)
        ]
        print(f"broker {broker.bootstrap_servers} {' '.join(str(n.process.pid) for n in nodes)}")
        sys.stdout.flush()
        topics: dict[str, Any] = {}
        for line in sys.stdin:
            words = line.split()
            if words[0] == "replicate":
                _replicate(broker, words[1], nodes, most, topics)
            print(json.dumps(_figures(broker, topics, nodes)))
            sys.stdout.flush()
        for pushed in topics.values():
            pushed.close()
        engine = broker._server.access._engines.get("shm")
        for link, domain in getattr(engine, "links", {}).values():
            engine.worker.remove_link(link)
            link.qp.close()
            domain.close()
        for node in nodes:
            node.end()


def _replicate(
    broker: Any, topic: str, nodes: list[Any], most: int, topics: dict[str, Any]
) -> None:
    """Push partition 0 of a topic, which all followers have to confirm."""
    from kdirect.model import TopicPartition

    server = broker._server
    partition = server.logs.partitions[TopicPartition(topic, 0)]
    engine = server.access._engines["shm"]
    worker = engine.worker
    link_cq = getattr(engine, "link_cq", None)
    if link_cq is None:
        link_cq = engine.link_cq = engine.device.create_cq(1 << 12)
        engine.links = {}
        worker.on_push = lambda ring: topics[ring.owner].ring_event(ring)
        worker.on_moved = lambda what: None
    pushed = topics[topic] = PushedPartition(partition, worker, most_bytes=most)
    for node in nodes:
        if node.number not in engine.links:
            domain = engine.device.alloc_pd()
            qp = domain.create_qp(link_cq, engine.recv_cq, max_send_wr=256, max_recv_wr=256)
            qp.connect(node.accept_link(bytes(qp.address)), active=True)
            link = PushLink(node.number, qp, 256, RECEIVES)
            worker.add_link(link)
            engine.links[node.number] = link, domain
        link, domain = engine.links[node.number]
        node.new_topic(topic)
        memory = RingMemory(domain, WINDOW)
        ring = pushed.start(link, memory, FileGrant(*node.follow(memory.ring, WINDOW, 0)))
        ring.owner = topic

        def granted(what: str, value: Any, ring: Any = ring, pushed: Any = pushed) -> None:
            if what == "ahead":
                pushed.grant_ahead(ring, FileGrant(*value))

        if node.number not in handlers:
            node.on_news(lambda what, value, number=node.number: handlers[number](what, value))
        handlers[node.number] = granted
        pushed.grant_ahead(ring, FileGrant(*node.grant_ahead()))
    pushed.set_counted([n.number for n in nodes])


def _figures(broker: Any, topics: dict[str, Any], nodes: list[Any]) -> dict[str, Any]:
    engine = broker._server.access._engines.get("shm")
    out: dict[str, Any] = {"now": time.monotonic(), "pid": os.getpid()}
    if engine is not None:
        out |= engine.worker.statistics()
        out["cpu_s"] = time.process_time()
    for topic, pushed in topics.items():
        out[topic] = {
            "end": pushed.partition.log_end_offset,
            "high_watermark": pushed.partition.high_watermark,
            "writes": sum(r.posted for r in pushed.pushing.rings),
            "slots": sum(r.slots_written for r in pushed.pushing.rings),
            "bytes": sum(r.bytes_pushed for r in pushed.pushing.rings),
        }
    return out


if __name__ == "__main__":
    main()
