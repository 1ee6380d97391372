"""Whose memory a `FileWriter` may take as its own while WRITEs are under way.  Real queue pairs,
over shm.

A WRITE_WITH_IMM that finds no receive posted stays under way here, as one does over an RNIC while
it is sent again.
"""

from __future__ import annotations

import os
import struct
import sys
import time

import pytest

from kdirect.client.direct_write import NO_ROOM_BUFFER, NOT_GRANTED, SENT, FileWriter
from kdirect.client.idempotence import ProducerIdentity
from kdirect.errors import QueuePairError
from kdirect.format import layout
from kdirect.format.codec import decode_records, encode_records
from kdirect.rdma.contract import Access, Memory, Opcode, Status
from kdirect.rdma.shm import ShmDevice
from kdirect.wire.ack_router import AckRouter

FILE_BYTES = 65536
WINDOW = 4
FILE_ID = 7
CORRUPT_MESSAGE = 2


@pytest.fixture
def devices():
    made = [ShmDevice(), ShmDevice()]
    yield made
    for device in made:
        device.close()


class Ends:
    """A producer's queue pair with a writer, and that of its broker, which has posted no receive
    yet."""

    def __init__(self, producer, broker):
        self.domain, domain = producer.alloc_pd(), broker.alloc_pd()
        self.send_cq, self.recv_cq = producer.create_cq(), producer.create_cq()
        self.broker_cq = broker.create_cq()
        self.qp = self.domain.create_qp(self.send_cq, self.recv_cq)
        self.broker_qp = domain.create_qp(self.broker_cq, self.broker_cq)
        self.file = domain.register(
            Memory.anonymous(FILE_BYTES), Access.LOCAL_WRITE | Access.REMOTE_WRITE
        )
        self.staging = domain.register(Memory.anonymous(4096), Access.LOCAL_WRITE)
        self.broker_qp.connect(self.qp.address, False)
        self.qp.connect(self.broker_qp.address, True)
        self.ring = self.domain.register(
            Memory.anonymous(4 * WINDOW * layout.ACK_BYTES),
            Access.LOCAL_WRITE | Access.REMOTE_WRITE,
        )
        self.router = AckRouter(self.qp, self.send_cq, self.recv_cq, 8, WINDOW)
        self.writer = FileWriter("t-0", self.router, self.qp, self.ring, WINDOW)
        self.writer.set_buffer(self.buffer())
        self.open()

    def buffer(self):
        return self.domain.register(Memory.anonymous(FILE_BYTES), Access.LOCAL_WRITE)

    def open(self):
        self.writer.open(FILE_ID, self.file.address, self.file.rkey, FILE_BYTES, 0)

    def arrives(self):
        """Post a receive; the completion of the WRITE that comes then, while somebody of the
        producer waits."""
        self.broker_qp.post_recv(1)
        until = time.monotonic() + 10
        while not (
            completions := [
                c for c in self.broker_cq.poll() if c.opcode == Opcode.RECV_RDMA_WITH_IMM
            ]
        ):
            assert time.monotonic() < until, "the WRITE did not arrive"
            self.send_cq.wait(1)
        return completions[0]

    def acknowledge_first(self):
        """The broker's answer to the first request overtakes the completion of its WRITE."""
        self.answer(0)
        assert self.writer.wait_acknowledged(0, 10_000)

    def answer(self, order, error=0):
        """To the request of this order."""
        entry = memoryview(self.staging.memory)
        struct.pack_into("=IHHhHI", entry, 0, order, FILE_ID, order, error, 0, 1)
        self.broker_qp.post_write_imm(1, self.staging, 0, layout.ACK_BYTES,
                                      self.ring.address + order * layout.ACK_BYTES, self.ring.rkey,
                                      FILE_ID << layout.IMM_FILE_ID_SHIFT | 1)  # fmt: skip


@pytest.mark.parametrize("send", ["a record", "batches"])
def test_the_first_request_of_a_producer_id_goes_alone(devices, send):
    """Until one was acknowledged: the broker would take the next as the first, if the first is
    refused alone.  Then as many go as the window has room for, also into the next grant."""
    ends = Ends(*devices)
    writer = ends.writer
    for number in range(8):
        ends.broker_qp.post_recv(number)
    writer.identity = ProducerIdentity(5, 0, lambda: (6, 0))
    batch = encode_records([(None, b"v", [], 1)])

    def post():
        if send == "batches":
            return writer.try_batches(batch, 1)
        return writer.try_record(b"v")

    assert [post(), post()] == [SENT, NO_ROOM_BUFFER]
    ends.answer(0, CORRUPT_MESSAGE)
    assert not writer.wait_acknowledged(0, 10_000)
    assert post() == NOT_GRANTED
    assert len(writer.take_refused()) == 1
    assert [post(), post()] == [SENT, NO_ROOM_BUFFER]  # that one was not acknowledged either
    ends.answer(1)
    assert writer.wait_acknowledged(1, 10_000)
    assert [post(), post()] == [SENT, SENT]
    ends.answer(2)
    ends.answer(3)
    assert writer.wait_acknowledged(3, 10_000) and writer.wait_completed()
    ends.open()
    assert [post(), post()] == [SENT, SENT]
    writer.identity = ProducerIdentity(6, 0, lambda: None)
    assert post() == NO_ROOM_BUFFER  # what is under way comes first
    writer.forget()
    writer.close()


def test_memory_of_a_write_under_way_stays_when_its_writer_is_closed(devices):
    ends = Ends(*devices)
    assert ends.writer.try_record(b"precious") == 0
    ends.writer.forget()
    ends.writer.close()
    assert ends.arrives().status == Status.SUCCESS
    assert b"precious" in bytes(memoryview(ends.file.memory)[:256])
    assert not ends.router.broken


@pytest.mark.parametrize("what", ["another grant", "another buffer"])
def test_a_writer_does_not_go_on_while_writes_are_under_way(devices, what):
    """Their completions would be lost with the file's id, or free bytes of the new buffer."""
    ends = Ends(*devices)
    assert ends.writer.try_record(b"precious") == 0
    ends.acknowledge_first()
    with pytest.raises(QueuePairError, match=r"t-0: .* not complete"):
        ends.open() if what == "another grant" else ends.writer.set_buffer(ends.buffer())
    assert ends.router.broken, "it is to be replaced"
    ends.writer.close()
    assert ends.arrives().status == Status.SUCCESS
    assert b"precious" in bytes(memoryview(ends.file.memory)[:256])


def test_a_writer_that_is_settled_gives_its_memory_back(devices):
    ends = Ends(*devices)
    ends.broker_qp.post_recv(1)
    assert ends.writer.try_record(b"precious") == 0
    ends.acknowledge_first()
    buffer = ends.buffer()
    ends.writer.set_buffer(buffer)
    ends.open()
    ends.writer.close()
    ends.qp.post_write(99, buffer, 0, 8, ends.file.address, ends.file.rkey)
    while not (completions := [c for c in ends.send_cq.poll() if c.wr_id == 99]):
        pass
    assert completions[0].status == Status.LOC_PROT_ERR


@pytest.mark.parametrize("how", ["taken", "not taken"])
def test_a_large_value_arrives_whether_the_transport_takes_it_from_where_it_is_or_not(devices, how):
    """It takes none that would have to wait: then the writer copies it, and has no need of the
    value any more."""
    ends = Ends(*devices)
    value = os.urandom(20_000)
    before = sys.getrefcount(value)
    if how == "taken":
        ends.broker_qp.post_recv(2)
    assert ends.writer.try_record(value, b"key") == 0
    assert sys.getrefcount(value) == before + (how == "taken")
    arrived = ends.arrives()
    [(data, records, _)] = ends.writer.unacknowledged()
    assert (records, len(data)) == (1, arrived.byte_len)
    assert data == bytes(memoryview(ends.file.memory)[: arrived.byte_len])
    assert [(r.key, r.value) for r in decode_records(data, "t", 0)[0]] == [(b"key", value)]
    ends.acknowledge_first()
    assert sys.getrefcount(value) == before
