"""What the produce worker tells the event loop: each cut and each append that somebody waits for,
however many one batch brings."""

from __future__ import annotations

from typing import Any

import pytest

from kdirect.broker.worker import ProduceWorker
from kdirect.format import layout
from kdirect.format.codec import encode_records
from kdirect.log.kernel import CommitKernel
from kdirect.log.kernel_head import install_head
from kdirect.rdma.contract import Access, Memory
from kdirect.rdma.sim import SimNetwork

BATCH = 64  # completions that the worker takes at a time
RING_ENTRIES = 4
CAPACITY = 1 << 20


class Client:
    """One producer: its queue pair, the broker's end of it, and a ring for acknowledgements."""

    def __init__(self, broker: Broker, number: int) -> None:
        device = broker.network.device(f"client-{number}")
        domain = device.alloc_pd()
        self.ring = domain.register(
            Memory.anonymous(RING_ENTRIES * layout.ACK_BYTES),
            Access.LOCAL_WRITE | Access.REMOTE_WRITE,
        )
        self.source = domain.register(Memory.anonymous(4096), Access.LOCAL_WRITE)
        self.qp = domain.create_qp(device.create_cq(16), device.create_cq(16))
        self.domain = broker.device.alloc_pd()
        self.broker_qp = self.domain.create_qp(broker.send_cq, broker.recv_cq, max_recv_wr=2)
        self.broker_qp.connect(self.qp.address, active=False)
        self.qp.connect(self.broker_qp.address, active=True)
        for i in range(RING_ENTRIES):
            self.qp.post_recv(i)
        notices = self.domain.register(Memory.anonymous(layout.NOTICE_BYTES), Access.LOCAL_WRITE)
        broker.worker.add_peer(self.broker_qp, 1, notices)

    def write(self, data: bytes, region: Any, position: int, file_id: int, order: int) -> None:
        memoryview(self.source.memory)[: len(data)] = data
        immediate = file_id << layout.IMM_FILE_ID_SHIFT | order
        self.qp.post_write_imm(
            0, self.source, 0, len(data), region.address + position, region.rkey, immediate
        )


class Broker:
    """The worker over a simulated device, with one head in anonymous memory."""

    def __init__(self, seed: int) -> None:
        self.network = SimNetwork(seed)
        self.device = self.network.device("broker")
        self.recv_cq, self.send_cq = self.device.create_cq(4096), self.device.create_cq(4096)
        self.cut: list[int] = []
        self.appended: list[int] = []
        self.ended: list[Any] = []
        self.worker = ProduceWorker(
            self.recv_cq,
            self.send_cq,
            on_cut=lambda number, why: self.cut.append(number),
            on_append=self.appended.append,
            on_head=self.ended.append,
            on_broker_requests=lambda head, answers: None,
            sync=lambda head: None,
        )
        self.memory = Memory.anonymous(CAPACITY)
        self.indexes = [Memory.anonymous(1 << 16) for _ in range(2)]
        self.kernel = CommitKernel(log_start_offset=0, log_end_offset=0)
        install_head(
            self.kernel,
            self.memory.address,
            CAPACITY,
            segment_base_offset=0,
            offset_index_address=self.indexes[0].address,
            offset_index_capacity=4096,
            time_index_address=self.indexes[1].address,
            time_index_capacity=4096,
        )

    def open_head(self, *, shared: bool) -> Any:
        return self.worker.open_head(
            self.kernel, 0, 0, 0, shared=shared, entries=256, hole_timeout_ms=1000
        )

    def grant(
        self,
        head: Any,
        client: Client,
        file_id: int,
        *,
        ring_key: int | None = None,
        watched: bool = False,
    ) -> Any:
        """The key of the head for a client that has been granted it."""
        staging = client.domain.register(
            Memory.anonymous(RING_ENTRIES * layout.ACK_BYTES), Access.LOCAL_WRITE
        )
        key = client.ring.rkey if ring_key is None else ring_key
        assert self.worker.install(
            file_id,
            head,
            client.broker_qp,
            client.ring.address,
            key,
            RING_ENTRIES,
            staging,
            watched,
        )
        return client.domain.register(self.memory, Access.LOCAL_WRITE | Access.REMOTE_WRITE)


def test_every_cut_of_one_batch_is_reported(seed: int) -> None:
    """A batch of completions cuts one peer each, and an acknowledgement that fails in the same step
    cuts another.  A cut that was not reported would leave a peer that is served no more and never
    closed."""
    broker = Broker(seed)
    producer = Client(broker, 0)
    others = [Client(broker, 1 + i) for i in range(BATCH)]
    head = broker.open_head(shared=False)
    region = broker.grant(
        head, producer, 1, ring_key=producer.ring.rkey ^ 1
    )  # its acknowledgement cannot arrive
    producer.write(encode_records([(None, b"x", None, 1)]), region, 0, 1, 0)
    broker.network.run_until_idle()
    broker.worker.step()
    assert broker.kernel.log_end_offset == 1
    for other in others:
        broker.network.disconnect(other.broker_qp)
    broker.network.run_until_idle()
    for _ in range(4):
        broker.worker.step()
    assert sorted(broker.cut) == sorted(c.broker_qp.qp_num for c in [producer, *others])


def test_a_peer_that_is_removed_before_its_cut_was_told_is_not_told_of(seed: int) -> None:
    broker = Broker(seed)
    clients = [Client(broker, i) for i in range(3)]
    for client in clients:
        broker.network.disconnect(client.broker_qp)
    broker.worker.remove_peer(clients[1].broker_qp.qp_num)
    broker.worker.step()
    assert sorted(broker.cut) == sorted(c.broker_qp.qp_num for c in (clients[0], clients[2]))


def test_every_append_that_is_waited_for_is_told(seed: int) -> None:
    """The request that everybody waits for lets more than a batch of files be appended to in one
    run."""
    broker = Broker(seed)
    clients = [Client(broker, i) for i in range(BATCH + 6)]
    head = broker.open_head(shared=True)
    data = encode_records([(None, b"x", None, 1)])
    regions = [broker.grant(head, client, 1 + i, watched=True) for i, client in enumerate(clients)]
    for order in [*range(1, len(clients)), 0]:
        clients[order].write(data, regions[order], order * len(data), 1 + order, order)
        broker.network.run_until_idle()
        broker.worker.step()
    assert broker.kernel.log_end_offset == len(clients)
    assert broker.appended == [head], "once for all of them"


def test_a_commit_of_a_producer_that_is_gone_is_told(seed: int) -> None:
    """What somebody waits for is the head's next commit, whoever it is of."""
    broker = Broker(seed)
    clients = [Client(broker, i) for i in range(2)]
    head = broker.open_head(shared=True)
    data = encode_records([(None, b"x", None, 1)])
    regions = [broker.grant(head, client, 1 + i) for i, client in enumerate(clients)]
    clients[1].write(data, regions[1], len(data), 2, 1)
    broker.network.run_until_idle()
    broker.worker.step()
    broker.worker.remove(2)
    broker.worker.watch(head)
    clients[1].write(data, regions[1], 2 * len(data), 2, 2)  # under no grant: it is not taken
    clients[0].write(data, regions[0], 0, 1, 0)
    broker.network.run_until_idle()
    broker.worker.step()
    assert broker.kernel.log_end_offset == 2
    assert broker.appended == [head]
    broker.worker.watch(head)
    broker.worker.submit_broker_request(head, 2, data)
    broker.worker.step()
    assert broker.appended == [head, head]


@pytest.mark.parametrize("others", [0, 1000])
def test_news_of_one_head_cost_no_look_at_the_others(seed: int, others: int) -> None:
    """Each piece of news made the worker walk all of its heads, with its lock and the GIL."""
    broker = Broker(seed)
    head = broker.open_head(shared=True)
    for _ in range(others):
        broker.open_head(shared=True)
    for count in range(1, 4):
        broker.worker.watch(head)
        broker.worker.submit_broker_request(
            head, count - 1, encode_records([(None, b"x", None, 1)])
        )
        broker.worker.step()
        assert broker.kernel.log_end_offset == count
        assert broker.appended == [head] * count
        assert broker.worker.heads_reported == count


def test_a_head_that_is_forgotten_is_reported_no_more(seed: int) -> None:
    broker = Broker(seed)
    heads = [broker.open_head(shared=True) for _ in range(3)]
    for head in heads:
        broker.worker.drain(head, 0)  # nothing was reserved: each of them has ended
    broker.worker.forget_head(heads.pop(1))
    broker.worker.step()
    assert broker.ended == heads


def test_an_answer_that_comes_after_a_head_was_forgotten_reports_nothing(seed: int) -> None:
    """A flush may end after its head's topic was deleted.  The worker kept the address of a head
    that nobody kept."""
    broker = Broker(seed)
    for answer in (broker.worker.gate_moved, broker.worker.gate_failed):
        head = broker.open_head(shared=True)
        broker.worker.drain(head, 0)
        broker.worker.forget_head(head)
        answer(head)
        broker.worker.step()
    assert broker.ended == []
