"""Every counter is in the one table of metrics, and every row of the table is counted: complete
sets, in both directions, of a broker that serves clients over each path.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import kdirect
from kdirect import blocks, metrics
from kdirect.client import connect
from kdirect.client.tcp_append import TcpAppender
from kdirect.client.tcp_fetch import TcpFetcher
from kdirect.model import TopicPartition
from kdirect.rdma.sim import SimNetwork

TP = TopicPartition("t", 0)
ROOT = Path(__file__).resolve().parents[2]

# Where the tree has a method or function `statistics`, and the rooms whose metrics it returns,
# alone or with others.
COUNTING = {
    "python/kdirect/broker/access.py": {"broker"},
    "python/kdirect/broker/broker.py": {"broker", "log", "member"},
    "python/kdirect/broker/cleaner.py": {"log"},
    "python/kdirect/broker/directory_moves.py": {"log"},
    "python/kdirect/broker/member.py": {"member"},
    "python/kdirect/broker/produce_access.py": {"broker"},
    "python/kdirect/broker/replication.py": {"member"},
    "python/kdirect/broker/remote_storage.py": {"storage"},
    "python/kdirect/broker/server.py": {"broker", "log", "member"},
    "python/kdirect/broker/worker.pyx": {"broker"},
    "python/kdirect/wire/cluster.py": {"cluster"},
    "python/kdirect/wire/connection.py": {"connection"},
    "python/kdirect/client/cold.py": {"consumer", "reader"},
    "python/kdirect/client/consumer.py": {"consumer"},
    "python/kdirect/client/direct.py": {"consumer", "reader"},
    "python/kdirect/client/file_stream.pyx": {"stream"},
    "python/kdirect/client/direct_append.py": {"producer"},
    "python/kdirect/client/produce_driver.py": {"producer"},
    "python/kdirect/client/producer.py": {"producer"},
    "python/kdirect/client/reading.py": {"consumer"},
    "python/kdirect/client/read_paths.py": {"consumer", "reader"},
    "python/kdirect/client/reader.py": {"reader"},
    "python/kdirect/client/request_append.py": {"producer"},
    "python/kdirect/client/tcp_append.py": {"appender"},
    "python/kdirect/client/tcp_fetch.py": {"fetcher", "reader"},
    "python/kdirect/client/tcp_multi_fetch.py": {"consumer"},
    "python/kdirect/blocks.pyx": {"memory"},
    "python/kdirect/member/figures.py": {"member"},
    "python/kdirect/member/push.py": {"member"},
    "python/kdirect/member/replicas.py": {"member"},
    "python/kdirect/log/kernel.pyx": {"log"},
    "python/kdirect/log/manager.py": {"log"},
    "python/kdirect/log/partition.py": {"log"},
    "python/kdirect/storage/chunk_cache.py": {"storage"},
    "python/kdirect/storage/index_cache.py": {"storage"},
    "python/kdirect/storage/remote_reader.py": {"storage"},
    "python/kdirect/state/coordinator_server.py": {"state"},
    "python/kdirect/state/planned_stream.py": {"state"},
    "python/kdirect/state/source.py": {"reader"},
    "python/kdirect/state/stream_job.py": {"state"},
    "python/kdirect/rdma/contract.pyx": {"rdma"},
    "python/kdirect/rdma/shm.pyx": {"rdma"},
    "python/kdirect/rdma/sim.py": {"rdma"},
    "python/kdirect/rdma/verbs_device.py": {"rdma"},
    "kdirect_spark/rows.py": {"reader", "state"},
}
# Counted once something was looked for in remote storage: `test_cold_reads.py` compares them.
COLD = {name for name in metrics.names("reader") if name.startswith("client_cold_")}


@pytest.fixture
def served(broker):
    """(broker, its address as a setting) with topic `t`."""
    connect(broker.bootstrap_servers).admin.create_topic("t", 2)
    return broker, {"bootstrap.servers": broker.bootstrap_servers}


def produced(settings, **more):
    """The statistics of a producer that has delivered a record."""
    with kdirect.Producer({**settings, **more}) as producer:
        producer.produce_sync("t", b"v", partition=0)
        return producer.statistics()


def test_of_a_broker_with_rdma_clients(served):
    broker, settings = served
    before = set(broker.statistics())
    produced(settings, transport="shm")
    reader = connect(settings).reader(TP, 0, 1)
    assert sum(batch.num_rows for batch in reader.batches()) == 1
    seen = broker.statistics()
    assert set(seen) == metrics.names("broker") | metrics.names("log")
    assert before < set(seen), "before there is an RDMA client, some of them"
    assert not metrics.names("broker") & metrics.names("log")
    assert (seen["rdma_commits"], seen["rdma_exclusive_heads"], seen["rdma_grants"]) == (1, 1, 1)
    assert seen["rdma_commit_bytes"] == seen["log_bytes"] > 60
    assert seen["log_commit_runs"] >= 1 and seen["rdma_acks"] >= seen["rdma_ack_writes"] >= 1
    assert seen["rdma_access_requests"] >= 3 and seen["rdma_peers"] >= 1
    reader.close()


def test_of_a_broker_that_serves_a_shared_head(served):
    """Counters of what goes on between producers and Kafka clients stand where the table says."""
    broker, settings = served
    with (
        kdirect.Producer({**settings, "transport": "shm"}) as alone,
        kdirect.Producer({**settings, "transport": "shm"}) as second,
    ):
        alone.produce_sync("t", b"1", partition=0)
        second.produce_sync("t", b"2", partition=0)
        alone.produce_sync("t", b"3", partition=0)
        produced(settings, transport="tcp")
        seen = broker.statistics()
    assert (seen["rdma_recalls"], seen["rdma_exclusive_heads"], seen["rdma_shared_heads"]) == (
        1,
        1,
        1,
    )
    assert (
        seen["rdma_own_requests"] == 1
        and seen["rdma_produce_heads"] == 1
        and seen["rdma_produce_grants"] == 2
    )
    assert (
        seen["rdma_commits"] == 4 and seen["rdma_clients_cut"] == seen["rdma_produce_errors"] == 0
    )


def test_of_producers(served):
    _, settings = served
    over = [produced(settings, transport="shm"), produced(settings, transport="tcp"),
            produced(settings, transport="shm", **{"produce.path": "send"})]  # fmt: skip
    assert set().union(*over) == metrics.names("producer")
    assert [s[f"{way}_records"] for s, way in zip(over, ("rdma", "tcp", "send"), strict=True)] == [
        1,
        1,
        1,
    ]


def test_of_consumers(served):
    _, settings = served
    produced(settings)
    seen = []
    for transport in ("shm", "tcp"):
        more = {"transport": transport, "group.id": transport, "auto.offset.reset": "earliest"}
        with kdirect.Consumer({**settings, **more}) as consumer:
            consumer.subscribe(["t"])
            assert consumer.poll(20).value() == b"v"
            seen.append(consumer.statistics())
    assert set().union(*seen) == metrics.names("consumer") - COLD
    assert all(s["messages"] == s["rebalances"] == 1 for s in seen)
    assert seen[0]["reads"] >= 1 and seen[1]["fetches"] >= 1


def test_of_readers_and_what_they_read_with(served):
    _, settings = served
    produced(settings)
    seen = set()
    for transport in ("shm", "tcp"):
        session = connect({**settings, "transport": transport})
        reader = session.reader(TP, 0, 1)
        assert sum(batch.num_rows for batch in reader.batches()) == 1
        seen |= set(reader.statistics())
        if transport == "shm":
            (fetcher,) = reader._place.paths.direct
            assert set(fetcher.stream(TP).statistics()) == metrics.names("stream")
            assert set(fetcher.channel.device.statistics()) == metrics.names("rdma")
        reader.close()
    assert seen == metrics.names("reader") - COLD


def test_of_what_speaks_kafkas_protocol(served):
    _, settings = served
    cluster = connect(settings).cluster
    assert set(cluster.statistics()) == metrics.names("cluster")
    assert set(cluster.connection_for(TP).statistics()) == metrics.names("connection")
    with TcpAppender(cluster, TP) as appender:
        assert set(appender.statistics()) == metrics.names("appender")
    fetcher = TcpFetcher(cluster, TP, 0)
    assert set(fetcher.statistics()) == metrics.names("fetcher")
    fetcher.close()


def test_of_memory_and_of_other_transports():
    assert set(blocks.statistics()) == metrics.names("memory")
    assert set(SimNetwork(seed=1).device("a").statistics()) == metrics.names("rdma")
    verbs = re.search(
        r"^COUNTERS = \((.*?)\)$",
        (ROOT / "python/kdirect/rdma/verbs_opened.py").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    assert verbs is not None and set(re.findall(r'"(\w+)"', verbs[1])) == metrics.names("rdma")


def test_every_place_that_counts_is_known_here_and_every_room_is_counted():
    found = {
        str(path.relative_to(ROOT))
        for room in ("python", "kdirect_spark")
        for path in (ROOT / room).rglob("*.py*")
        if path.suffix in (".py", ".pyx")
        and re.search(r"^ *def statistics\(", path.read_text(), re.MULTILINE)
    }
    assert found == set(COUNTING), "say above which metrics it returns, and compare them in a test"
    # What an accelerated query says of a batch is a row of its result, and no method.
    rooms = set().union(*COUNTING.values()) | {"slash"}
    assert rooms == set(metrics.ROOMS) == {m.room for m in metrics.METRICS}


def test_the_figures_of_an_accelerated_query_are_those_of_the_table():
    from kdirect_spark.slash.task import figures_of

    assert set(figures_of(0, {}, None)) == metrics.names("slash")
