"""The broker's event loop does no file work: who needs a file made waits for it, and nobody else
does."""

from __future__ import annotations

import errno
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import kdirect
from kdirect.broker.head_access import HeadAccess
from kdirect.client import connect
from kdirect.errors import BrokerError
from kdirect.format import protocol as p
from kdirect.format.batch import encode_single_bytes
from kdirect.format.error_codes import ErrorCode
from kdirect.format.schema import build
from kdirect.log.head import PreparedHead
from kdirect.rdma.shm import ShmProtectionDomain

pytestmark = pytest.mark.timeout(120)

SEGMENT_BYTES = 1 << 20


class SlowDisk:
    """File space is not given out while the disk is slow, in directories whose name begins with
    `prefix`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._plain = os.posix_fallocate
        self._go = threading.Event()
        self._go.set()
        self.prefix = "slow-"
        self.waiting = 0
        self.refuse: OSError | None = None
        monkeypatch.setattr(os, "posix_fallocate", self._allocate)

    def _allocate(self, fd: int, offset: int, length: int) -> None:
        if f"/{self.prefix}" in os.readlink(f"/proc/self/fd/{fd}"):
            self.waiting += 1
            assert self._go.wait(60)
            self.waiting -= 1
            if self.refuse is not None:
                raise self.refuse
        self._plain(fd, offset, length)

    def stop(self) -> None:
        self._go.clear()

    def go(self) -> None:
        self._go.set()

    def wait_for_work(self) -> None:
        """Until somebody waits for the disk."""
        deadline = time.monotonic() + 30
        while not self.waiting:
            assert time.monotonic() < deadline, "nobody allocates"
            time.sleep(0.005)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    disk = SlowDisk(monkeypatch)
    yield disk
    disk.go()


@pytest.fixture
def broker(tmp_path: Any, disk: SlowDisk) -> Iterator[kdirect.Broker]:
    with kdirect.Broker(
        tmp_path / "log", log_segment_bytes=SEGMENT_BYTES, log_index_size_max_bytes=4096,
        num_partitions=1, auto_create_topics_enable=False,
        offsets_topic_num_partitions=1,
    ) as b:  # fmt: skip
        yield b
        disk.go()


def batch(*values: bytes) -> bytes:
    return b"".join(encode_single_bytes(v) for v in values)


def produce_request(topic: str, *values: bytes, partition: int = 0, acks: int = -1) -> Any:
    data = [{"index": partition, "records": batch(*values)}]
    return build(
        p.ProduceRequest,
        transactional_id=None,
        acks=acks,
        timeout_ms=30_000,
        topic_data=[{"name": topic, "partition_data": data}],
    )


def outcome(response: Any) -> tuple[int, int]:
    (topic,) = response.responses
    (row,) = topic.partition_responses
    return row.error_code, row.base_offset


def create(raw: Any, *names: str, partitions: int = 1, **configs: str) -> None:
    rows = [{"name": k, "value": v} for k, v in configs.items()]
    response = raw.call(
        build(
            p.CreateTopicsRequest, timeout_ms=30_000,
            topics=[{"name": n, "num_partitions": partitions, "replication_factor": 1,
                     "assignments": [], "configs": rows} for n in names],
        ),
        5,
    )  # fmt: skip
    assert [t.error_code for t in response.topics] == [0] * len(names)


def ping(raw: Any) -> None:
    """The broker answers what needs no file."""
    raw.call(
        build(p.ApiVersionsRequest, client_software_name="test", client_software_version="1"), 3
    )
    raw.call(build(p.MetadataRequest, topics=None), 8)


def test_the_first_record_of_a_partition_waits_alone(
    broker: kdirect.Broker, disk: SlowDisk, raw: Any
) -> None:
    slow, other = raw(), raw()
    create(slow, "slow-a", "quick")
    disk.stop()
    for i in range(3):
        slow.send(produce_request("slow-a", b"%d" % i), 9)
    disk.wait_for_work()
    ping(other)
    assert outcome(other.call(produce_request("quick", b"x"), 9)) == (0, 0)
    other.send(produce_request("slow-a", b"3"), 9)
    disk.go()
    assert [outcome(slow.receive()) for _ in range(3)] == [(0, 0), (0, 1), (0, 2)]
    assert outcome(other.receive()) == (0, 3)


def test_a_full_disk_is_told_to_those_who_asked_for_room(
    broker: kdirect.Broker, disk: SlowDisk, raw: Any
) -> None:
    slow, other = raw(), raw()
    create(slow, "slow-a", "quick")
    disk.refuse = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    disk.stop()
    for _ in range(3):
        slow.send(produce_request("slow-a", b"x"), 9)
    disk.wait_for_work()
    assert outcome(other.call(produce_request("quick", b"x"), 9)) == (0, 0)
    disk.go()
    assert [outcome(slow.receive())[0] for _ in range(3)] == [ErrorCode.KAFKA_STORAGE_ERROR] * 3
    disk.refuse = None
    assert outcome(slow.call(produce_request("slow-a", b"x"), 9)) == (0, 0)


def test_a_full_head_is_rolled_while_others_are_served(
    broker: kdirect.Broker, disk: SlowDisk, raw: Any
) -> None:
    slow, other = raw(), raw()
    create(slow, "slow-a", "quick")
    value = b"x" * 300_000
    base = 0
    while outcome(slow.call(produce_request("slow-a", value), 9)) == (0, base) and base < 2:
        base += 1
    disk.stop()
    for _ in range(6):
        slow.send(produce_request("slow-a", value), 9)
    disk.wait_for_work()
    ping(other)
    assert outcome(other.call(produce_request("quick", b"x"), 9)) == (0, 0)
    disk.go()
    assert [outcome(slow.receive()) for _ in range(6)] == [(0, base + 1 + i) for i in range(6)]
    assert len(broker.server.logs.partitions[kdirect.TopicPartition("slow-a", 0)].segments) > 1


def test_a_topic_deleted_while_room_is_made_answers_everybody(
    broker: kdirect.Broker, disk: SlowDisk, raw: Any
) -> None:
    slow, other, admin = raw(), raw(), raw()
    create(slow, "slow-a", "quick")
    disk.stop()
    for _ in range(3):
        slow.send(produce_request("slow-a", b"x"), 9)
    disk.wait_for_work()
    admin.send(build(p.DeleteTopicsRequest, topic_names=["slow-a"], timeout_ms=30_000), 4)
    ping(other)
    assert outcome(other.call(produce_request("quick", b"x"), 9)) == (0, 0)
    disk.go()
    assert admin.receive().responses[0].error_code == 0
    gone = {0, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.NOT_LEADER_OR_FOLLOWER}
    assert {outcome(slow.receive())[0] for _ in range(3)} <= gone
    create(slow, "slow-a")
    assert outcome(slow.call(produce_request("slow-a", b"y"), 9)) == (0, 0)


def test_a_deletion_is_finished_although_the_client_that_asked_for_it_goes(
    broker: kdirect.Broker, raw: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody writes the partitions while their files go, whether or not somebody waits for the
    answer."""
    other, admin = raw(), raw()
    create(other, "a")
    assert outcome(other.call(produce_request("a", b"x"), 9)) == (0, 0)
    began, go, plain = threading.Event(), threading.Event(), broker.server.logs.delete_topic

    def slowly(name: str) -> None:
        began.set()
        assert go.wait(30)
        plain(name)

    monkeypatch.setattr(broker.server.logs, "delete_topic", slowly)
    try:
        admin.send(build(p.DeleteTopicsRequest, topic_names=["a"], timeout_ms=30_000), 4)
        assert began.wait(30)
        connections = broker.server._connections
        before = len(connections)
        admin.close()
        until(lambda: len(connections) < before)
        assert not broker.server.appends.is_free(kdirect.TopicPartition("a", 0))
    finally:
        go.set()
    until(lambda: broker.server.appends.is_free(kdirect.TopicPartition("a", 0)))
    assert broker.server.topics.get("a") is None
    create(other, "a")
    assert outcome(other.call(produce_request("a", b"y"), 9)) == (0, 0)


def test_a_broker_stops_while_room_is_made(tmp_path: Any, disk: SlowDisk, raw: Any) -> None:
    with kdirect.Broker(tmp_path / "stopped", log_segment_bytes=SEGMENT_BYTES) as b:
        connection = raw(b.bootstrap_servers)
        create(connection, "slow-a")
        disk.stop()
        connection.send(produce_request("slow-a", b"x"), 9)
        disk.wait_for_work()
        stopper = threading.Thread(target=b.stop)
        stopper.start()
        time.sleep(0.1)
        disk.go()
        stopper.join(30)
        assert not stopper.is_alive()
    acknowledged = connection.receive_frame() != b""
    with kdirect.Broker(tmp_path / "stopped", log_segment_bytes=SEGMENT_BYTES) as b:
        end = b.server.logs.partitions[kdirect.TopicPartition("slow-a", 0)].log_end_offset
        assert end == 1 if acknowledged else end <= 1


def test_offsets_are_committed_in_order_while_room_is_made(
    broker: kdirect.Broker, disk: SlowDisk, raw: Any
) -> None:
    disk.prefix = "__consumer_offsets-"
    slow, other = raw(), raw()
    create(slow, "t")

    def commit(offset: int) -> Any:
        part = {
            "partition_index": 0,
            "committed_offset": offset,
            "committed_metadata": None,
            "committed_leader_epoch": -1,
        }
        return build(
            p.OffsetCommitRequest, group_id="g", generation_id_or_member_epoch=-1, member_id="",
            topics=[{"name": "t", "partitions": [part]}],
        )  # fmt: skip

    disk.stop()
    slow.send(commit(1), 8)
    disk.wait_for_work()
    other.send(commit(2), 8)
    third = raw()
    ping(third)
    assert outcome(third.call(produce_request("t", b"x"), 9)) == (0, 0)
    fetch = build(
        p.OffsetFetchRequest, group_id="g", topics=[{"name": "t", "partition_indexes": [0]}]
    )
    assert third.call(fetch, 7).topics[0].partitions[0].committed_offset == -1, (
        "not before it is in the log"
    )
    disk.go()
    for connection in (slow, other):
        assert connection.receive().topics[0].partitions[0].error_code == 0
    assert third.call(fetch, 7).topics[0].partitions[0].committed_offset == 2


def test_an_rdma_producer_waits_for_its_head_alone(
    broker: kdirect.Broker, disk: SlowDisk, raw: Any
) -> None:
    other = raw()
    create(other, "slow-a", "quick")
    disk.stop()
    settings = {"bootstrap.servers": broker.bootstrap_servers, "transport": "shm"}
    with kdirect.Producer(settings) as producer:
        told: list[Any] = []

        def write() -> None:
            told.append([producer.produce_sync("slow-a", b"%d" % i, partition=0) for i in range(3)])

        writer = threading.Thread(target=write)
        writer.start()
        disk.wait_for_work()
        ping(other)
        with kdirect.Producer(
            {**settings, "client.id": "second"}
        ) as second:  # with a connection of its own
            assert second.produce_sync("quick", b"x", partition=0) == 0
        assert outcome(other.call(produce_request("quick", b"y"), 9))[0] == 0
        disk.go()
        writer.join(60)
        assert told == [[0, 1, 2]]


def test_creating_a_topic_holds_up_nobody(
    broker: kdirect.Broker, monkeypatch: pytest.MonkeyPatch, raw: Any
) -> None:
    """Nor do other changes of topics; they are done in the order of the requests."""
    slow, other = raw(), raw()
    create(slow, "quick")
    go, begun = threading.Event(), threading.Event()
    plain = os.mkdir

    def slow_mkdir(path: Any, *more: Any) -> None:
        if "/made-" in str(path):
            begun.set()
            assert go.wait(60)
        plain(path, *more)

    monkeypatch.setattr(os, "mkdir", slow_mkdir)
    topic = {
        "name": "made",
        "num_partitions": 3,
        "replication_factor": 1,
        "assignments": [],
        "configs": [],
    }
    slow.send(build(p.CreateTopicsRequest, topics=[topic], timeout_ms=1000), 5)
    assert begun.wait(30)
    ping(other)
    assert outcome(other.call(produce_request("quick", b"x"), 9)) == (0, 0)
    third = raw()
    third.send(build(p.DeleteTopicsRequest, topic_names=["made"], timeout_ms=30_000), 4)
    ping(other)
    go.set()
    assert slow.receive().topics[0].error_code == 0
    assert third.receive().responses[0].error_code == 0
    ping(other)
    assert "made" not in {
        t.name for t in other.call(build(p.MetadataRequest, topics=None), 8).topics
    }


def test_who_is_to_get_a_head_that_a_thread_rolls_at_that_moment_gets_the_next(
    broker: kdirect.Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = connect({"bootstrap.servers": broker.bootstrap_servers, "transport": "shm"})
    session.admin.create_topic("a", 1)
    with session.producer(**{"rdma.produce": "exclusive"}) as producer:
        assert producer.produce_sync("a", b"x", partition=0) == 0
    plain, rolled = HeadAccess.join, []

    def join(access: HeadAccess, *args: Any, **more: Any) -> Any:
        if not rolled:
            rolled.append(access.partition.roll())
        return plain(access, *args, **more)

    monkeypatch.setattr(HeadAccess, "join", join)
    with session.producer(**{"rdma.produce": "exclusive"}) as producer:
        assert producer.produce_sync("a", b"y", partition=0) == 1
        assert rolled and producer.statistics()["rdma_records"] == 1
    session.close()


def test_who_waits_for_access_is_answered_where_no_descriptor_is_left(
    broker: kdirect.Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = connect({"bootstrap.servers": broker.bootstrap_servers, "transport": "shm"})
    session.admin.create_topic("a", 1)
    plain = HeadAccess.join

    def join(access: HeadAccess, *args: Any, **more: Any) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(HeadAccess, "join", join)
    with (
        session.producer(**{"request.timeout.ms": "5000"}) as producer,
        pytest.raises(BrokerError, match="Too many open files"),
    ):
        producer.produce_sync("a", b"x", partition=0)
    monkeypatch.setattr(HeadAccess, "join", plain)
    with session.producer() as producer:
        assert producer.produce_sync("a", b"x", partition=0) == 0
        assert producer.statistics()["rdma_records"] == 1
    session.close()


def test_a_head_that_cannot_be_opened_is_opened_for_the_next_who_asks(
    broker: kdirect.Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = connect({"bootstrap.servers": broker.bootstrap_servers, "transport": "shm"})
    session.admin.create_topic("a", 1)
    plain = HeadAccess.__init__

    def init(access: HeadAccess, *args: Any, **more: Any) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(HeadAccess, "__init__", init)
    with (
        session.producer(**{"request.timeout.ms": "5000"}) as producer,
        pytest.raises(BrokerError, match="Too many open files"),
    ):
        producer.produce_sync("a", b"x", partition=0)
    assert not broker.server.access.produce.heads
    with session.producer(**{"rdma.produce": "off"}) as plain_producer:
        assert plain_producer.produce_sync("a", b"x", partition=0) == 0
    monkeypatch.setattr(HeadAccess, "__init__", plain)
    with session.producer() as producer:
        assert producer.produce_sync("a", b"x", partition=0) == 1
        assert producer.statistics()["rdma_records"] == 1
    session.close()


@pytest.mark.parametrize("waits", [False, True])
def test_a_request_for_access_that_fails_for_want_of_a_descriptor_costs_nothing_else(
    broker: kdirect.Broker, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """It is answered, whether it had to wait or not, and what its client holds over the same
    connection stays."""
    session = connect({"bootstrap.servers": broker.bootstrap_servers, "transport": "shm"})
    session.admin.create_topic("a", 1)
    session.admin.create_topic("b", 1)
    plain = HeadAccess.join

    def join(access: HeadAccess, *args: Any, **more: Any) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    shared = {"rdma.produce": "shared", "request.timeout.ms": "5000"}
    with session.producer(**shared) as producer, session.producer(**shared) as other:
        assert producer.produce_sync("a", b"x", partition=0) == 0
        if not waits:
            assert other.produce_sync("b", b"x", partition=0) == 0
        monkeypatch.setattr(HeadAccess, "join", join)
        with pytest.raises(BrokerError, match="Too many open files"):
            producer.produce_sync("b", b"y", partition=0)
        grants = broker.statistics()["rdma_grants"]
        assert grants == (1 if waits else 2)
        assert producer.produce_sync("a", b"x", partition=0) == 1
        monkeypatch.setattr(HeadAccess, "join", plain)
        assert producer.produce_sync("b", b"y", partition=0) == (0 if waits else 1)
        assert producer.statistics()["rdma_records"] == 3 and not producer.statistics().get(
            "tcp_records"
        )
    session.close()


def test_no_file_is_used_on_that_a_client_may_still_write_whose_connection_has_ended(
    broker: kdirect.Broker,
) -> None:
    """Its process lives and says that it is inside a copy, into one of its files: nobody knows into
    which.  It is waited for once, and not once a file."""
    count = 30
    session = connect({"bootstrap.servers": broker.bootstrap_servers, "transport": "shm"})
    session.admin.create_topic("a", count)
    producer = session.producer(**{"rdma.produce": "exclusive", "enable.idempotence": "false"})
    for i in range(count):
        producer.produce("a", b"x", partition=i)
    producer.flush()
    access = broker.server.access
    (peer,) = {grant.peer for grant in access._grants}
    grants = list(peer.grants.values())
    busy = peer.qp._pair_memory()[:8]  # the client's word of shm_ring.h: odd inside a copy
    inside = busy[0] | 1
    busy[0] = inside
    began = time.monotonic()
    producer._driver.appender(kdirect.TopicPartition("a", 0)).channel.connection._socket.shutdown(
        socket.SHUT_RDWR
    )
    while len(access._grants):
        assert time.monotonic() < began + 30
        busy[0] = inside
        time.sleep(0.001)
    assert not any(grant.head_access.vacated for grant in grants)
    assert broker.statistics()["rdma_heads_fenced"] == count
    producer.close()
    with session.producer() as producer:
        assert [producer.produce_sync("a", b"y", partition=i) for i in range(count)] == [1] * count
    session.close()


def test_a_file_ahead_that_cannot_be_granted_does_not_stay_behind(
    broker: kdirect.Broker, monkeypatch: pytest.MonkeyPatch, until: Any
) -> None:
    """It waits for the next request, or goes with the head that it was to follow."""
    session = connect({"bootstrap.servers": broker.bootstrap_servers, "transport": "shm"})
    session.admin.create_topic("a", 1)
    (directory,) = [
        p.directory for tp, p in broker.server.logs.partitions.items() if tp.topic == "a"
    ]
    failed = []
    plain = HeadAccess.__init__

    def init(access: HeadAccess, *args: Any, **more: Any) -> None:
        if isinstance(args[1], PreparedHead):
            failed.append(access)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        plain(access, *args, **more)

    monkeypatch.setattr(HeadAccess, "__init__", init)
    with session.producer() as producer:
        for _ in range(2 * SEGMENT_BYTES // 1000):
            producer.produce_sync("a", b"x" * 1000, partition=0)
            if failed:
                break
    assert failed
    until(lambda: not len(broker.server.access._grants), what="the head has ended")
    until(
        lambda: not list(directory.glob("head-*.tmp")),
        timeout_s=5,
        what="the file ahead is removed",
    )
    session.close()


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    """The thread and the time in ms of each wait for a peer that did not leave a copy."""
    waited: list[tuple[str, float]] = []
    plain = ShmProtectionDomain._wait_out_of_reach

    def wait_out_of_reach(domain: Any, timeout_ms: float) -> bool:
        out: bool = plain(domain, timeout_ms)
        if not out and timeout_ms > 0:
            waited.append((threading.current_thread().name, timeout_ms))
        return out

    monkeypatch.setattr(ShmProtectionDomain, "_wait_out_of_reach", wait_out_of_reach)
    return waited


@pytest.mark.parametrize("goes", [False, True])
def test_a_head_is_not_used_on_that_a_producer_left_from_inside_a_copy(
    broker: kdirect.Broker, on_loop: Any, until: Any, goes: bool
) -> None:
    """Whether its connection ends (`goes`) before the head does, or not: others go on with the head
    meanwhile."""
    access = broker.server.access
    session = connect({"bootstrap.servers": broker.bootstrap_servers, "transport": "shm"})
    other = connect({"bootstrap.servers": broker.bootstrap_servers, "transport": "shm"})
    session.admin.create_topic("a", 1)
    left = session.producer(**{"rdma.produce": "shared"})
    assert left.produce_sync("a", b"0", partition=0) == 0
    (grant,) = access._grants
    with other.producer(**{"rdma.produce": "shared"}) as stays:
        assert stays.produce_sync("a", b"1", partition=0) == 1
        (head,) = {g.head_access for g in access._grants}
        busy = grant.peer.qp._pair_memory()[:8]
        busy[:] = (2**33 + 1).to_bytes(8, sys.byteorder)
        on_loop(broker, lambda: access.produce.release(grant, clean=False))
        assert not head.ended
        if goes:
            on_loop(broker, lambda: access._close_peer(grant.peer))
            until(lambda: not broker.server.files._under_way, what="the peer is closed")
    until(lambda: head.ended, what="the head has ended")
    assert not head.vacated
    assert broker.statistics()["rdma_heads_fenced"] == 1
    left.close()
    with other.producer() as producer:
        assert producer.produce_sync("a", b"2", partition=0) == 2
    session.close()
    other.close()


def test_who_leaves_a_head_while_it_is_fenced_is_not_overlooked(
    broker: kdirect.Broker, on_loop: Any
) -> None:
    access = broker.server.access
    session = connect({"bootstrap.servers": broker.bootstrap_servers, "transport": "shm"})
    session.admin.create_topic("a", 1)
    with session.producer(**{"rdma.produce": "shared"}) as producer:
        assert producer.produce_sync("a", b"0", partition=0) == 0
        (grant,) = access._grants
        head = grant.head_access
        busy = grant.peer.qp._pair_memory()[:8]
        before = bytes(busy)
        busy[:] = (2**33 + 1).to_bytes(8, sys.byteorder)

        class Leaving(list[Any]):
            def __iter__(self) -> Iterator[Any]:
                seen = list.__iter__(self[:])
                on_loop(
                    broker,
                    lambda: (
                        head.leave(access._grants, grant, clean=False) if head.members else None
                    ),
                )
                return seen

        head._leaving = Leaving()
        head.fence(notify=True)
        assert not head.vacated
        head._leaving = list(head._leaving)
        on_loop(broker, lambda: access.produce._driver.rolled_away(head))
        busy[:] = before
    session.close()


@pytest.mark.parametrize("how", ["shared", "exclusive"])
def test_a_producer_that_is_stopped_inside_a_copy_holds_up_no_loop(
    broker: kdirect.Broker, waited: list[tuple[str, float]], on_loop: Any, until: Any, how: str
) -> None:
    """The event loop takes its keys away and waits for nobody; a thread does, and the log goes on
    in a fresh file."""
    access = broker.server.access
    session = connect({"bootstrap.servers": broker.bootstrap_servers, "transport": "shm"})
    session.admin.create_topic("a", 1)
    with session.producer(**{"rdma.produce": how}) as stopped:
        assert stopped.produce_sync("a", b"0", partition=0) == 0
        (grant,) = [g for g in access._grants if g.is_produce]
        busy = grant.peer.qp._pair_memory()[:8]  # the peer's word of shm_ring.h: odd inside a copy
        before = bytes(busy)
        busy[:] = (2**33 + 1).to_bytes(8, sys.byteorder)
        on_loop(broker, lambda: access.produce.release(grant, clean=False))
        until(lambda: broker.statistics()["rdma_heads_fenced"] == 1, what="the head is fenced")
        with session.producer(**{"rdma.produce": "shared"}) as other:
            assert other.produce_sync("a", b"1", partition=0) == 1
        busy[:] = before
    assert [timeout for name, timeout in waited if name == "kdirect-broker"] == []
    assert any(name.startswith("kdirect-room") for name, _ in waited)
    session.close()
