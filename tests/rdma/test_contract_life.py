"""The verbs contract, over every provider: queues, receivers that are not ready, waiting,
connecting, and the end."""

from __future__ import annotations

import os
import random
import select
import threading
import time

import pytest

from kdirect.errors import (
    ClosedError,
    KdirectError,
    QueueFullError,
    QueuePairError,
    RdmaError,
    TransportError,
)
from kdirect.rdma.contract import State, Status
from tests.rdma.conftest import ALL, WAIT_MS, End, Rig, completion, completions, join


def put(end: End, position: int, data: bytes) -> None:
    end.bytes[position : position + len(data)] = data


def got(end: End, position: int, length: int) -> bytes:
    return bytes(end.bytes[position : position + length])


# -- queues ----------------------------------------------------------------------------------------
def test_send_queue_depth(rig: Rig) -> None:
    a, b = rig.pair(max_send_wr=5)
    for turn in range(3):
        for i in range(5):
            a.qp.post_read(i, a.region, 8 * i, 8, b.address, b.rkey)
        with pytest.raises(QueueFullError) as e:
            a.qp.post_read(5, a.region, 40, 8, b.address, b.rkey)
        assert e.value.retriable
        assert [wc.wr_id for wc in completions(a.send_cq, 5)] == [0, 1, 2, 3, 4], turn


def test_a_request_is_outstanding_until_polled(rig: Rig) -> None:
    a, b = rig.pair(max_send_wr=4)
    for i in range(4):
        a.qp.post_read(i, a.region, 8 * i, 8, b.address, b.rkey)
    assert completions(a.send_cq, 1)[0].wr_id == 0
    a.qp.post_read(4, a.region, 0, 8, b.address, b.rkey)
    with pytest.raises(QueueFullError):
        a.qp.post_read(5, a.region, 0, 8, b.address, b.rkey)


def test_receive_queue_depth(rig: Rig) -> None:
    a, b = rig.pair(max_recv_wr=3)
    for turn in range(3):
        for i in range(3):
            b.qp.post_recv(10 * turn + i)
        with pytest.raises(QueueFullError):
            b.qp.post_recv(99)
        for i in range(3):
            a.qp.post_write_imm(i, a.region, 0, 0, 0, 0, i)
        assert [wc.wr_id for wc in completions(b.recv_cq, 3)] == [
            10 * turn,
            10 * turn + 1,
            10 * turn + 2,
        ]
        assert len(completions(a.send_cq, 3)) == 3


def test_receives_posted_before_connecting(rig: Rig) -> None:
    a, b = rig.end(), End(rig.other_device)
    for i in range(4):
        b.qp.post_recv(i, b.region, 100 * i, 100)
    a.qp.post_recv(7)
    join(a, b)
    put(a, 0, b"early")
    for i in range(4):
        a.qp.post_send(i, a.region, 0, 5)
    assert [wc.wr_id for wc in completions(b.recv_cq, 4)] == [0, 1, 2, 3]
    assert got(b, 300, 5) == b"early"
    b.qp.post_write_imm(1, b.region, 0, 0, 0, 0, 5)
    assert completion(a.recv_cq).wr_id == 7


def test_posts_before_connecting_are_refused(rig: Rig) -> None:
    a = rig.end()
    with pytest.raises(QueuePairError):
        a.qp.post_write(1, a.region, 0, 8, 0, 0)
    b = End(rig.other_device)
    b.qp.connect(a.qp.address, False)
    with pytest.raises(QueuePairError):
        b.qp.post_write(1, b.region, 0, 8, 0, 0)


def test_receiver_not_ready_waits(rig: Rig) -> None:
    """Nothing is lost or reordered while the receiver has nothing posted."""
    a, b = rig.pair()
    put(a, 0, b"one-----two-----three---")
    a.qp.post_write_imm(1, a.region, 0, 8, b.address, b.rkey, 1)
    a.qp.post_send(2, a.region, 8, 8)
    a.qp.post_write(3, a.region, 16, 8, b.address + 16, b.rkey)
    assert a.send_cq.wait(5) is False
    assert a.send_cq.poll() == []
    assert got(b, 0, 24) == bytes(24)
    b.qp.post_recv(1)
    assert completion(a.send_cq).wr_id == 1
    assert got(b, 0, 8) == b"one-----"
    assert a.send_cq.wait(5) is False
    assert got(b, 16, 8) == bytes(8)
    b.qp.post_recv(2, b.region, 8, 8)
    assert [wc.wr_id for wc in completions(a.send_cq, 2)] == [2, 3]
    assert [wc.wr_id for wc in completions(b.recv_cq, 2)] == [1, 2]
    assert got(b, 0, 24) == b"one-----two-----three---"


def test_requests_that_wait_for_a_receiver_go_on_while_their_owner_waits_for_answers(
    rig: Rig,
) -> None:
    """A side that waits for an answer looks at its receives alone; its question must arrive."""
    a, b = rig.pair()
    put(a, 0, b"question")
    a.qp.post_recv(1, a.region, 8, 8)
    a.qp.post_send(2, a.region, 0, 8)
    b.qp.post_recv(3, b.region, 0, 8)
    arrived = []
    for _ in range(50):  # an RNIC tries again after a while of its own
        assert a.recv_cq.wait(100) is False
        arrived += [wc.wr_id for wc in b.recv_cq.poll()]
        if arrived:
            break
    assert arrived == [3] and got(b, 0, 8) == b"question"
    assert completion(a.send_cq).wr_id == 2


@pytest.mark.parametrize("queue", ["recv_cq", "send_cq"])
def test_a_thread_that_sleeps_already_brings_on_what_another_posts(rig: Rig, queue: str) -> None:
    """It slept before there was anything to bring on, and who posted it does something else."""
    a, b = rig.pair()
    a.qp.post_recv(1)
    sleeper = threading.Thread(target=getattr(a, queue).wait, args=(WAIT_MS,))
    sleeper.start()
    try:
        time.sleep(0.1)  # it is asleep
        a.qp.post_send(2, a.region, 0, 8)
        time.sleep(0.1)  # it has looked, in vain
        b.qp.post_recv(3, b.region, 0, 8)
        assert b.recv_cq.wait(WAIT_MS // 2)
    finally:
        getattr(a, queue).wake()
        sleeper.join()


def test_waiting_for_receives_tells_whoever_waits_for_the_sends(rig: Rig) -> None:
    a, b = rig.pair()
    a.qp.post_write_imm(1, a.region, 0, 0, 0, 0, 1)
    a.send_cq.arm()
    b.qp.post_recv(1)
    assert a.recv_cq.wait(100) is False
    assert readable(a.send_cq.fileno(), 5)
    assert completion(a.send_cq).wr_id == 1


def test_receiver_not_ready_times_out(rig: Rig) -> None:
    a, b = rig.pair(rnr_timeout_ms=30)
    put(a, 0, b"x" * 8)
    a.qp.post_write_imm(1, a.region, 0, 8, b.address, b.rkey, 1)
    a.qp.post_write(2, a.region, 0, 8, b.address, b.rkey)
    wcs = completions(a.send_cq, 2)
    assert [(wc.wr_id, wc.status) for wc in wcs] == [
        (1, Status.RNR_RETRY_EXC_ERR),
        (2, Status.WR_FLUSH_ERR),
    ]
    assert a.qp.state == State.ERROR
    assert got(b, 0, 8) == bytes(8)


def test_a_full_queue_of_waiting_requests(rig: Rig) -> None:
    a, b = rig.pair(max_send_wr=4)
    for i in range(4):
        a.qp.post_write_imm(i, a.region, 0, 0, 0, 0, i)
    with pytest.raises(QueueFullError):
        a.qp.post_write_imm(4, a.region, 0, 0, 0, 0, 4)
    for i in range(4):
        b.qp.post_recv(i)
    assert len(completions(a.send_cq, 4)) == 4
    assert [wc.imm_data for wc in completions(b.recv_cq, 4)] == [0, 1, 2, 3]


@pytest.mark.parametrize("length", [0, 1, 999])
def test_a_send_longer_than_the_receive(rig: Rig, length: int) -> None:
    a, b = rig.pair()
    if length:
        b.qp.post_recv(1, b.region, 0, length)
    else:
        b.qp.post_recv(1)
    b.qp.post_recv(2, b.region, 0, 4096)
    a.qp.post_send(3, a.region, 0, 1000)
    assert completion(a.send_cq).status == Status.REM_INV_REQ_ERR
    assert [(wc.wr_id, wc.status) for wc in completions(b.recv_cq, 2)] == [
        (1, Status.LOC_LEN_ERR),
        (2, Status.WR_FLUSH_ERR),
    ]
    assert a.qp.state == b.qp.state == State.ERROR
    assert got(b, 0, 1000) == bytes(1000)


def test_a_send_longer_than_allowed(rig: Rig) -> None:
    a, b = rig.pair(max_send_bytes=100)
    b.qp.post_recv(1, b.region, 0, 4096)
    with pytest.raises(RdmaError):
        a.qp.post_send(1, a.region, 0, 101)
    a.qp.post_send(2, a.region, 0, 100)
    assert completion(b.recv_cq).byte_len == 100


def test_a_receive_into_protected_memory(rig: Rig) -> None:
    a, b = rig.pair()
    b.qp.post_recv(1, b.domain.register(b.memory, 0), 0, 100)
    a.qp.post_send(2, a.region, 0, 10)
    assert completion(b.recv_cq).status == Status.LOC_PROT_ERR
    assert b.qp.state == State.ERROR


def test_many_sends_of_all_sizes(rig: Rig, seed: int) -> None:
    """More bytes than any ring between the two holds at once, in order, unharmed."""
    rng = random.Random(seed)
    a, b = rig.pair(size=1 << 17, max_send_bytes=3000, max_send_wr=8, max_recv_wr=8)
    sent: list[bytes] = []
    posted = received = polled = 0
    n = 400 if rig.provider == "shm" else 120
    while received < n:
        while posted < n and posted - polled < 8 and posted - received < 8:
            b.qp.post_recv(posted, b.region, 4096 * (posted % 8), 4096)
            data = rng.randbytes(rng.choice([0, 1, 63, 64, 1000, 2999, 3000]))
            sent.append(data)
            put(a, 4096 * (posted % 8), data)
            a.qp.post_send(posted, a.region, 4096 * (posted % 8), len(data))
            posted += 1
        for wc in completions(b.recv_cq, rng.randint(1, posted - received)):
            assert wc.wr_id == received
            assert got(b, 4096 * (received % 8), wc.byte_len) == sent[received]
            received += 1
        polled += len(a.send_cq.poll(64))


# -- completion queues -----------------------------------------------------------------------------
def test_poll_and_wait_without_work(rig: Rig) -> None:
    a, _ = rig.pair()
    assert a.send_cq.poll() == []
    assert a.send_cq.wait(1) is False
    assert a.send_cq.wait(1, spin_us=50) is False
    assert a.send_cq.wait(0) is False


def test_wait_sees_what_is_there(rig: Rig) -> None:
    a, b = rig.pair()
    a.qp.post_read(1, a.region, 0, 8, b.address, b.rkey)
    assert a.send_cq.wait(WAIT_MS) is True
    assert a.send_cq.wait(WAIT_MS) is True  # until it is polled
    assert len(a.send_cq.poll()) == 1
    assert a.send_cq.wait(1) is False


def test_wake(rig: Rig) -> None:
    a, _ = rig.pair()
    a.send_cq.wake()
    assert a.send_cq.wait(WAIT_MS) is False
    assert a.send_cq.wait(1) is False


def test_poll_takes_at_most_what_it_was_asked_for(rig: Rig) -> None:
    a, b = rig.pair()
    for i in range(10):
        a.qp.post_read(i, a.region, 8 * i, 8, b.address, b.rkey)
    assert a.send_cq.wait(WAIT_MS)
    if rig.provider == "sim":
        rig.network.run_until_idle()
    assert [wc.wr_id for wc in a.send_cq.poll(3)] == [0, 1, 2]
    assert [wc.wr_id for wc in a.send_cq.poll(1)] == [3]
    assert [wc.wr_id for wc in a.send_cq.poll(100)] == [4, 5, 6, 7, 8, 9]
    assert a.send_cq.poll(0) == []


def readable(fd: int, timeout_s: float) -> bool:
    poll = select.poll()  # select() itself refuses descriptors above 1023
    poll.register(fd, select.POLLIN)
    return poll.poll(timeout_s * 1000) == [(fd, select.POLLIN)]


def test_arm_and_fileno(rig: Rig) -> None:
    a, b = rig.pair()
    fd = b.recv_cq.fileno()
    assert b.recv_cq.arm() is False
    assert not readable(fd, 0)
    b.qp.post_recv(1)
    b.qp.post_recv(2)
    a.qp.post_write_imm(1, a.region, 0, 0, 0, 0, 1)
    completion(a.send_cq)
    assert readable(fd, 5)
    assert b.recv_cq.arm() is True  # not polled yet
    completion(b.recv_cq)
    assert b.recv_cq.arm() is False
    assert not readable(fd, 0)
    a.qp.post_write_imm(2, a.region, 0, 0, 0, 0, 2)
    completion(a.send_cq)
    assert readable(fd, 5)


# -- the end ---------------------------------------------------------------------------------------
def test_close_flushes_both_sides(rig: Rig) -> None:
    a, b = rig.pair()
    for i in range(3):
        a.qp.post_recv(i)
        b.qp.post_recv(10 + i)
    a.qp.close()
    assert [(wc.wr_id, wc.status) for wc in completions(a.recv_cq, 3)] == [
        (i, Status.WR_FLUSH_ERR) for i in range(3)
    ]
    assert [(wc.wr_id, wc.status) for wc in completions(b.recv_cq, 3)] == [
        (10 + i, Status.WR_FLUSH_ERR) for i in range(3)
    ]
    assert b.qp.state == State.ERROR
    with pytest.raises(QueuePairError):
        b.qp.post_write(1, b.region, 0, 8, a.address, a.rkey)
    with pytest.raises(QueuePairError):
        b.qp.post_recv(1)
    with pytest.raises(QueuePairError):
        a.qp.post_write(1, a.region, 0, 8, b.address, b.rkey)
    b.qp.close()
    b.qp.close()


def test_what_arrived_before_the_end_is_delivered(rig: Rig) -> None:
    a, b = rig.pair()
    for i in range(4):
        b.qp.post_recv(i, b.region, 100 * i, 100)
    put(a, 0, b"last words")
    a.qp.post_send(1, a.region, 0, 10)
    a.qp.post_write_imm(2, a.region, 0, 10, b.address + 1000, b.rkey, 5)
    completions(a.send_cq, 2)
    a.qp.close()
    wcs = completions(b.recv_cq, 4)
    assert [wc.wr_id for wc in wcs] == [0, 1, 2, 3]
    assert [wc.status for wc in wcs] == [Status.SUCCESS] * 2 + [Status.WR_FLUSH_ERR] * 2
    assert got(b, 0, 10) == got(b, 1000, 10) == b"last words"


def test_waiting_requests_are_flushed(rig: Rig) -> None:
    a, b = rig.pair()
    a.qp.post_send(1, a.region, 0, 8)
    a.qp.post_read(2, a.region, 8, 8, b.address, b.rkey)
    assert a.send_cq.wait(2) is False
    b.qp.close()
    assert [(wc.wr_id, wc.status) for wc in completions(a.send_cq, 2)] == [
        (1, Status.WR_FLUSH_ERR),
        (2, Status.WR_FLUSH_ERR),
    ]


def test_the_end_wakes_even_without_work(rig: Rig) -> None:
    a, b = rig.pair()
    assert a.send_cq.wait(0) is False
    b.qp.close()
    assert a.send_cq.wait(WAIT_MS) is True
    assert a.recv_cq.wait(WAIT_MS) is True
    assert a.qp.state == State.ERROR
    assert a.send_cq.wait(1) is False  # told once
    assert a.send_cq.poll() == []


def test_an_error_here_ends_the_peer_too(rig: Rig) -> None:
    a, b = rig.pair()
    b.qp.post_recv(1)
    a.qp.post_read(1, a.region, 0, 8, b.address, 0xDEADBEEF)
    assert completion(b.recv_cq).status == Status.WR_FLUSH_ERR
    assert b.qp.state == State.ERROR


def test_other_queue_pairs_go_on(rig: Rig) -> None:
    cq = rig.other_device.create_cq()
    pairs = []
    for _ in range(3):
        b = End(rig.other_device, cq=cq)
        a = rig.end()
        join(a, b)
        pairs.append((a, b))
    pairs[1][0].qp.post_read(1, pairs[1][0].region, 0, 8, 0, 0)
    assert completion(pairs[1][0].send_cq).status == Status.REM_ACCESS_ERR
    for a, b in (pairs[0], pairs[2]):
        b.qp.post_recv(1)
        a.qp.post_write_imm(1, a.region, 0, 8, b.address, b.rkey, 3)
        assert completion(a.send_cq).ok
        assert completion(cq).imm_data == 3


def test_domain_close_ends_its_regions_and_queue_pairs(rig: Rig) -> None:
    a, b = rig.pair()
    b.domain.close()
    b.domain.close()
    assert a.send_cq.wait(WAIT_MS)
    assert a.qp.state == State.ERROR
    assert b.qp.state == State.ERROR
    with pytest.raises(ClosedError):
        b.domain.register(b.memory, ALL)
    with pytest.raises(ClosedError):
        b.domain.create_qp(b.send_cq, b.recv_cq)
    assert b.region.deregister() is True


def test_children_close_before_parents(rig: Rig) -> None:
    a, _ = rig.pair()
    with pytest.raises(RdmaError, match="close the queue pairs first"):
        a.send_cq.close()
    a.qp.close()
    a.send_cq.close()
    a.send_cq.close()
    with pytest.raises(ClosedError):
        a.send_cq.poll()
    with pytest.raises(ClosedError):
        a.send_cq.wait(0)
    rig.device.close()
    for call in (rig.device.alloc_pd, rig.device.create_cq):
        with pytest.raises(ClosedError):
            call()


# -- connecting ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "address", [b"", b"x", b"KDSA", bytes(200), b"KDSA" + bytes(100), b"SIM1" + bytes(16)]
)
def test_bad_addresses(rig: Rig, address: bytes) -> None:
    for active in (True, False):
        a = rig.end()
        with pytest.raises(TransportError) as e:
            a.qp.connect(address, active)
        assert e.value.hint


def test_connecting_twice(rig: Rig) -> None:
    a, b = rig.pair()
    for active in (True, False):
        with pytest.raises(QueuePairError, match="connected before"):
            a.qp.connect(b.qp.address, active)
    a.qp.post_read(1, a.region, 0, 8, b.address, b.rkey)
    assert completion(a.send_cq).ok


def test_an_address_is_used_once(rig: Rig) -> None:
    a, b = rig.pair()
    thief = rig.end()
    with pytest.raises(TransportError):
        thief.qp.connect(b.qp.address, True)
    a.qp.post_read(1, a.region, 0, 8, b.address, b.rkey)
    assert completion(a.send_cq).ok


def test_only_the_expected_peer_is_let_in(rig: Rig) -> None:
    a, b, thief = rig.end(), End(rig.other_device), rig.end()
    b.qp.connect(a.qp.address, False)
    with pytest.raises(TransportError, match="refused"):
        thief.qp.connect(b.qp.address, True)
    assert thief.qp.state == State.ERROR
    a.qp.connect(b.qp.address, True)
    a.qp.post_read(1, a.region, 0, 8, b.address, b.rkey)
    assert completion(a.send_cq).ok


def test_connecting_to_the_closed(rig: Rig) -> None:
    a, b = rig.end(), End(rig.other_device)
    address = b.qp.address
    b.qp.connect(a.qp.address, False)
    b.qp.close()
    with pytest.raises(TransportError):
        a.qp.connect(address, True)
    with pytest.raises(QueuePairError):
        b.qp.connect(a.qp.address, True)


def test_many_pairs_at_once(rig: Rig) -> None:
    for _ in range(40):
        a, b = rig.pair(size=4096)
        put(b, 0, b"hello")
        a.qp.post_read(1, a.region, 0, 5, b.address, b.rkey)
        assert completion(a.send_cq).ok
        assert got(a, 0, 5) == b"hello"


# -- the rest --------------------------------------------------------------------------------------
def test_statistics(rig: Rig) -> None:
    a, b = rig.pair()
    b.qp.post_recv(1, b.region, 0, 100)
    b.qp.post_recv(2)
    a.qp.post_read(1, a.region, 0, 100, b.address, b.rkey)
    a.qp.post_write(2, a.region, 200, 50, b.address, b.rkey)
    a.qp.post_send(3, a.region, 200, 10)
    a.qp.post_write_imm(4, a.region, 200, 7, b.address + 500, b.rkey, 1)
    a.qp.post_fetch_add(5, a.region, 400, b.address + 800, b.rkey, 1)
    completions(a.send_cq, 5)
    completions(b.recv_cq, 2)
    mine, theirs = rig.device.statistics(), rig.other_device.statistics()
    names = ("reads", "read_bytes", "writes", "write_bytes", "sends", "receives", "atomics")
    assert [mine[name] for name in names] == [1, 100, 2, 57, 1, 0, 1]
    assert [theirs[name] for name in names] == [0, 0, 0, 0, 0, 2, 0]
    assert set(mine) == {*names, "wakeups"}
    a.qp.close()
    assert rig.device.statistics()["reads"] == 1


def test_a_forked_child_refuses(rig: Rig) -> None:
    a, b = rig.pair()
    b.qp.post_recv(1)
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            failures = []
            for name, call in {
                "read": lambda: a.qp.post_read(1, a.region, 0, 8, b.address, b.rkey),
                "recv": lambda: b.qp.post_recv(2),
                "poll": a.send_cq.poll,
                "wait": lambda: a.send_cq.wait(0),
                "arm": a.send_cq.arm,
                "wake": a.send_cq.wake,
                "register": lambda: a.domain.register(a.memory, ALL),
                "deregister": a.region.deregister,
                "alloc_pd": rig.device.alloc_pd,
                "create_cq": rig.device.create_cq,
                "create_qp": lambda: a.domain.create_qp(a.send_cq, a.recv_cq),
                "address": lambda: a.qp.address,
                "connect": lambda: a.qp.connect(b"", True),
            }.items():
                try:
                    call()
                    failures.append(name)
                except RdmaError as e:
                    if "forked" not in str(e) or "open_device" not in str(e):
                        failures.append(f"{name}: {e}")
            a.qp.close()
            rig.close()
            os.write(w, ("; ".join(failures) or "refused all").encode())
        except BaseException as e:
            os.write(w, repr(e).encode())
        finally:
            os._exit(0)
    os.close(w)
    with os.fdopen(r) as f:
        assert f.read() == "refused all"
    os.waitpid(pid, 0)
    a.qp.post_write_imm(1, a.region, 0, 8, b.address, b.rkey, 4)  # and the parent goes on
    assert completion(a.send_cq).ok
    assert completion(b.recv_cq).imm_data == 4


def test_errors_say_what_to_do(rig: Rig) -> None:
    a, b = rig.pair(max_send_wr=1)
    a.qp.post_read(1, a.region, 0, 8, b.address, b.rkey)
    for call in (
        lambda: a.qp.post_read(2, a.region, 0, 8, b.address, b.rkey),
        lambda: a.qp.connect(b.qp.address, True),
        lambda: a.send_cq.close(),
        lambda: a.domain.register(a.memory, ALL, 0, 0),
    ):
        with pytest.raises(KdirectError) as e:
            call()
        assert e.value.hint
