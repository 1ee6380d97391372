"""The shm provider between processes: what a peer that is stopped, killed, hostile or forked does
to the other side."""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kdirect.errors import QueuePairError, RdmaError, TransportError
from kdirect.rdma import open_device, shm_probe
from kdirect.rdma.contract import Access, Memory, State, Status
from tests.rdma.conftest import (
    WAIT_MS,
    End,
    PeerProcess,
    Rig,
    completion,
    completions,
    eventually,
    join,
    join_process,
)
from tests.support import cpu_ticks

Peers = Callable[[], PeerProcess]


def stopped(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as f:
        return f.read().rpartition(")")[2].split()[0] == "T"


def stop(peer: PeerProcess) -> None:
    peer.signal(signal.SIGSTOP)
    eventually(lambda: stopped(peer.pid))


def test_every_operation_between_processes(shm_rig: Rig, peer_process: Peers) -> None:
    peer = peer_process()
    a = shm_rig.end()
    address, rkey = join_process(a, peer)
    peer.run("b.bytes[:5] = b'there'; b.qp.post_recv(1, b.region, 4096, 100); b.qp.post_recv(2)")
    a.qp.post_read(1, a.region, 0, 5, address, rkey)
    assert completion(a.send_cq).ok
    assert bytes(a.bytes[:5]) == b"there"
    a.bytes[:5] = b"hence"
    a.qp.post_write(2, a.region, 0, 5, address + 100, rkey)
    a.qp.post_send(3, a.region, 0, 5)
    a.qp.post_write_imm(4, a.region, 0, 5, address + 200, rkey, 44)
    a.qp.post_fetch_add(5, a.region, 64, address + 800, rkey, 3)
    a.qp.post_compare_swap(6, a.region, 72, address + 800, rkey, 3, 9)
    assert all(wc.ok for wc in completions(a.send_cq, 5))
    assert peer.run("[(wc.wr_id, wc.status, wc.imm_data) for wc in completions(b.recv_cq, 2)]") == [
        (1, 0, None),
        (2, 0, 44),
    ]
    assert peer.run("[bytes(b.bytes[i : i + 5]) for i in (100, 200, 4096)]") == [b"hence"] * 3
    assert peer.run("bytes(b.bytes[800:808])") == struct.pack("=Q", 9)
    a.qp.post_recv(7)
    peer.run(
        "b.qp.post_write_imm(1, b.region, 0, 5, address, rkey, 5)",
        address=a.address + 500,
        rkey=a.rkey,
    )
    assert completion(a.recv_cq).imm_data == 5
    assert bytes(a.bytes[500:505]) == b"there"


def test_the_target_needs_no_cpu(shm_rig: Rig, peer_process: Peers) -> None:
    """The target is stopped: READ, WRITE, atomics and WRITE_WITH_IMM complete all the same, under
    old keys and under one that it registered at the last moment."""
    peer = peer_process()
    a = shm_rig.end()
    address, rkey = join_process(a, peer)
    peer.run("b.bytes[:6] = b'frozen'; b.qp.post_recv(1)")
    late_address, late_rkey = peer.run(
        "late = b.domain.register(b.memory, Access.REMOTE_READ, 0, 6); (late.address, late.rkey)"
    )
    stop(peer)
    ticks = cpu_ticks(peer.pid)
    for turn in range(1000):
        a.qp.post_read(1, a.region, 0, 6, late_address, late_rkey)
        a.qp.post_write(2, a.region, 0, 6, address + 100, rkey)
        a.qp.post_fetch_add(3, a.region, 64, address + 1024, rkey, 1)
        assert all(wc.ok for wc in completions(a.send_cq, 3))
        assert struct.unpack_from("=Q", a.bytes, 64)[0] == turn
    a.qp.post_write_imm(4, a.region, 0, 6, address + 200, rkey, 6)
    assert completion(a.send_cq).ok
    assert stopped(peer.pid)
    assert cpu_ticks(peer.pid) == ticks
    peer.signal(signal.SIGCONT)
    assert peer.run("(bytes(b.bytes[100:106]), completion(b.recv_cq).imm_data)") == (b"frozen", 6)
    assert peer.run("open_device('shm').statistics()['reads']") == 0


def test_receiver_not_ready_across_processes(shm_rig: Rig, peer_process: Peers) -> None:
    peer = peer_process()
    a = shm_rig.end(rnr_timeout_ms=60)
    address, rkey = join_process(a, peer)
    a.qp.post_write_imm(1, a.region, 0, 8, address, rkey, 1)
    peer.run("b.qp.post_recv(1)")
    assert completion(a.send_cq).ok
    a.qp.post_write_imm(2, a.region, 0, 8, address, rkey, 1)
    assert completion(a.send_cq).status == Status.RNR_RETRY_EXC_ERR
    assert peer.run("eventually(lambda: b.qp.state == State.ERROR)")


@pytest.mark.parametrize("spin_us", [0, 20])
def test_no_wake_up_is_lost_between_processes(peer_process: Peers, spin_us: int) -> None:
    """Two processes that sleep after every message, or spin a little first."""
    one, two = peer_process(), peer_process()
    make = (
        "b = make_end(cq=open_device('shm').create_cq(256));"
        " [b.qp.post_recv(i) for i in range(16)]; (b.qp.address, b.address, b.rkey)"
    )
    first, second = one.run(make), two.run(make)
    two.run("b.qp.connect(peer, False)", peer=first[0])
    one.run("b.qp.connect(peer, True)", peer=second[0])
    n = 20_000 if spin_us else 12_000
    bounce = (
        f"shm_probe.bounce_asleep(b.qp, b.recv_cq, b.region, remote, rkey, {n}, first, {spin_us})"
    )
    two.start(bounce, remote=first[1], rkey=first[2], first=False)
    one.start(bounce, remote=second[1], rkey=second[2], first=True)
    assert one.finish() > 0
    assert two.finish() > 0


def test_spinning_processes(peer_process: Peers) -> None:
    one, two = peer_process(), peer_process()
    make = (
        "b = make_end(cq=open_device('shm').create_cq(256));"
        " [b.qp.post_recv(i) for i in range(16)]; (b.qp.address, b.address, b.rkey)"
    )
    first, second = one.run(make), two.run(make)
    two.run("b.qp.connect(peer, False)", peer=first[0])
    one.run("b.qp.connect(peer, True)", peer=second[0])
    bounce = "shm_probe.bounce(b.qp, b.recv_cq, b.region, remote, rkey, 64, 100_000, first, 30_000)"
    two.start(bounce, remote=first[1], rkey=first[2], first=False)
    one.start(bounce, remote=second[1], rkey=second[2], first=True)
    assert one.finish() > 0
    assert two.finish() > 0


# -- death -----------------------------------------------------------------------------------------
def test_a_peer_that_is_killed_while_it_writes(shm_rig: Rig, peer_process: Peers) -> None:
    """Whatever it was doing: the survivor is told, flushes, and gets its memory back."""
    for turn in range(4):
        peer = peer_process()
        a = shm_rig.end(size=1 << 20)
        for i in range(10):
            a.qp.post_recv(i)
        join_process(a, peer, size=1 << 20)
        peer.start(
            """
while True:
    b.qp.post_write(1, b.region, 0, 1 << 20, address, rkey)
    b.send_cq.poll()
""",
            address=a.address,
            rkey=a.rkey,
        )
        eventually(lambda a=a: a.bytes[0] == 0)
        a.bytes[0] = 1
        eventually(lambda a=a: a.bytes[0] == 0)  # it writes
        peer.signal(signal.SIGKILL)
        if turn % 2:
            assert a.region.deregister(WAIT_MS) is True
        assert [wc.status for wc in completions(a.recv_cq, 10)] == [Status.WR_FLUSH_ERR] * 10
        assert a.qp.state == State.ERROR
        assert a.region.deregister(WAIT_MS) is True
        a.bytes[:] = b"\x07" * (1 << 20)
        assert bytes(a.bytes) == b"\x07" * (1 << 20)
        a.domain.close()


def test_a_killed_peer_wakes_a_sleeper(shm_rig: Rig, peer_process: Peers) -> None:
    peer = peer_process()
    a = shm_rig.end()
    join_process(a, peer)
    a.qp.post_recv(1)
    peer.signal(signal.SIGKILL)
    assert a.recv_cq.wait(WAIT_MS) is True
    assert a.recv_cq.poll()[0].status == Status.WR_FLUSH_ERR
    assert a.send_cq.wait(WAIT_MS) is True


def test_a_killed_initiator_leaves_what_it_completed(shm_rig: Rig, peer_process: Peers) -> None:
    peer = peer_process()
    a = shm_rig.end()
    join_process(a, peer)
    for i in range(5):
        a.qp.post_recv(i)
    peer.run(
        """
b.bytes[:4] = b"done"
for i in range(3):
    b.qp.post_write_imm(i, b.region, 0, 4, address + 100 * i, rkey, i)
completions(b.send_cq, 3)
""",
        address=a.address,
        rkey=a.rkey,
    )
    peer.signal(signal.SIGKILL)
    peer.process.wait(10)
    wcs = completions(a.recv_cq, 5)
    assert [(wc.status, wc.imm_data) for wc in wcs[:3]] == [(Status.SUCCESS, i) for i in range(3)]
    assert [wc.status for wc in wcs[3:]] == [Status.WR_FLUSH_ERR] * 2
    assert [bytes(a.bytes[100 * i : 100 * i + 4]) for i in range(3)] == [b"done"] * 3


def test_a_peer_that_dies_while_it_connects(shm_rig: Rig, peer_process: Peers) -> None:
    peer = peer_process()
    address = peer.run("b = make_end(); b.qp.address")
    a = shm_rig.end()
    peer.signal(signal.SIGKILL)
    peer.process.wait(10)
    with pytest.raises(TransportError, match="cannot reach"):
        a.qp.connect(address, True)


def test_connecting_to_a_stopped_process_times_out(shm_rig: Rig, peer_process: Peers) -> None:
    peer = peer_process()
    a = shm_rig.end()
    address = peer.run(
        "b = make_end(); b.qp.connect(a_address, False); b.qp.address", a_address=a.qp.address
    )
    stop(peer)
    with pytest.raises(TransportError, match="did not answer") as e:
        a.qp.connect(address, True, timeout_ms=100)
    assert e.value.hint


# -- revocation ------------------------------------------------------------------------------------
@pytest.mark.parametrize("inline", [False, True])
def test_a_stopped_peer_inside_a_copy(shm_rig: Rig, peer_process: Peers, inline: bool) -> None:
    """deregister() says False while the peer is stopped in the middle of a WRITE, and True once it
    went on."""
    peer = peer_process()
    size = 16 << 20
    a = shm_rig.end(size=size, max_recv_wr=8192)
    join_process(a, peer, size=size)
    for i in range(8192 if inline else 0):
        a.qp.post_recv(i)
    busy = a.qp._pair_memory()[192:200]  # the peer's word of shm_ring.h: odd inside a copy
    peer.start(
        """
status, value = Status.SUCCESS, bytes(len(b.bytes) - 100)
while status == Status.SUCCESS:
    if inline:
        assert b.qp.post_write_imm_inline(1, b.region, 0, len(b.bytes), 60, value, address, rkey, 0)
    else:
        b.qp.post_write(1, b.region, 0, len(b.bytes), address, rkey)
    status = b.send_cq.poll()[0].status
status
""",
        inline=inline,
        address=a.address,
        rkey=a.rkey,
    )
    for _ in range(100):
        time.sleep(0.01)
        stop(peer)
        if struct.unpack("=Q", busy)[0] % 2:
            break
        peer.signal(signal.SIGCONT)
    else:
        pytest.fail("the peer was never stopped inside its copy")
    assert a.region.deregister(50) is False
    assert a.region.deregister(0) is False
    peer.signal(signal.SIGCONT)
    assert a.region.deregister(WAIT_MS) is True
    a.bytes[:] = bytes([3]) * size
    assert peer.finish() == Status.REM_ACCESS_ERR
    assert bytes(a.bytes) == bytes([3]) * size


def test_a_stopped_peer_that_copies_nothing_holds_nothing_up(
    shm_rig: Rig, peer_process: Peers
) -> None:
    peer = peer_process()
    a = shm_rig.end()
    join_process(a, peer)
    stop(peer)
    assert a.region.deregister(0) is True
    # nor does it stop a hundred registrations, though it takes no announcement in
    regions = [a.domain.register(a.memory, Access.REMOTE_READ) for _ in range(100)]
    assert all(region.deregister(0) for region in regions)
    peer.signal(signal.SIGCONT)
    key = regions[-1].rkey
    read = "b.qp.post_read(1, b.region, 0, 8, address, key); completion(b.send_cq).status"
    assert peer.run(read, address=a.address, key=key) == Status.REM_ACCESS_ERR


def test_a_peer_that_takes_in_no_announcements_is_cut(
    shm_rig: Rig, peer_process: Peers, caplog: pytest.LogCaptureFixture
) -> None:
    peer = peer_process()
    a = shm_rig.end()
    join_process(a, peer)
    stop(peer)
    deadline = time.monotonic() + 20
    while a.qp.state == State.RTS:
        assert time.monotonic() < deadline
        a.domain.register(a.memory, Access.REMOTE_READ)
    assert "does not take in announcements" in caplog.text
    a.domain.register(a.memory, Access.REMOTE_READ)  # the domain goes on
    other, target = shm_rig.pair()
    other.qp.post_read(1, other.region, 0, 8, target.address, target.rkey)
    assert completion(other.send_cq).ok


def test_read_only_grants_are_read_only_descriptors(shm_rig: Rig, peer_process: Peers) -> None:
    """The kernel, not good manners, keeps a peer from writing through what it was given."""
    peer = peer_process()
    a = shm_rig.end(access=Access.REMOTE_READ)
    join_process(a, peer)
    maps = peer.run("open('/proc/self/maps').read()")
    inode = os.fstat(a.memory.fd).st_ino
    assert {
        line.split()[1]
        for line in maps.splitlines()
        if len(line.split()) > 4 and line.split()[4] == str(inode)
    } == {"r--s"}


# -- hostility and forks ---------------------------------------------------------------------------
def test_a_hostile_process_harms_itself_only(shm_rig: Rig, peer_process: Peers, seed: int) -> None:
    """It scribbles over the shared rings while its victim works; another peer is not disturbed."""
    cq = shm_rig.device.create_cq(4096)
    good_a, good_b = shm_rig.end(cq=cq), End(shm_rig.other_device)
    join(good_a, good_b)
    peer = peer_process()
    for turn in range(6):
        a = shm_rig.end(cq=cq)
        for i in range(32):
            a.qp.post_recv(i, a.region, 1024 * i, 1024)
        join_process(a, peer)
        peer.start(
            """
import random, struct
rng, memory = random.Random(seed), b.qp._pair_memory()
for _ in range(20000):
    at = 8 * rng.randrange(0, 1100)
    memory[at : at + 8] = memoryview(
        rng.choice([struct.pack("<Q", rng.randint(0, 40)), rng.randbytes(8)])
    )
""",
            seed=seed + turn,
        )
        deadline = time.monotonic() + 10
        while a.qp.state == State.RTS and time.monotonic() < deadline:
            with contextlib.suppress(RdmaError):
                a.qp.post_send(1, a.region, 0, 64)
            good_b.qp.post_recv(1)
            good_a.qp.post_write_imm(7, good_a.region, 0, 8, good_b.address, good_b.rkey, 7)
            cq.poll()
            assert completion(good_b.recv_cq).imm_data == 7
        assert a.qp.state == State.ERROR
        peer.finish()
        a.domain.close()
    assert good_a.qp.state == State.RTS


def test_a_child_of_the_peer_does_not_keep_it_alive(shm_rig: Rig, peer_process: Peers) -> None:
    """PySpark's daemon forks workers: their copies of its descriptors must not hide its death."""
    peer = peer_process()
    a = shm_rig.end()
    join_process(a, peer)
    child = peer.run("""
import time
child = os.fork()
if child == 0:
    time.sleep(30)
    os._exit(0)
child
""")
    try:
        peer.signal(signal.SIGKILL)
        peer.process.wait(10)
        eventually(lambda: a.qp.state == State.ERROR)
        with pytest.raises(QueuePairError):
            a.qp.post_recv(1)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_fork_while_everything_is_in_use(shm_rig: Rig) -> None:
    """The child's end, however it ends, leaves the parent's rings, keys and mappings alone."""
    a, b = shm_rig.pair()
    for i in range(20):
        b.qp.post_recv(i)
        pid = os.fork()
        if pid == 0:
            a.qp.close()
            b.domain.close()
            del a, b
            os._exit(0)
        a.qp.post_write_imm(i, a.region, 0, 8, b.address, b.rkey, i)
        assert completion(a.send_cq).ok
        assert completion(b.recv_cq).imm_data == i
        assert os.waitpid(pid, 0)[1] == 0


def test_many_processes_read_one_target(shm_rig: Rig, peer_process: Peers) -> None:
    memory = Memory.anonymous(1 << 20)
    memoryview(memory)[:] = b"shared" * ((1 << 20) // 6) + b"shar"
    peers = [peer_process() for _ in range(3)]
    ends = []
    for peer in peers:
        a = shm_rig.end()
        address = peer.run("b = make_end(size=1 << 20); b.qp.address")
        a.qp.connect(address, False)
        peer.run("b.qp.connect(peer, True)", peer=a.qp.address)
        region = a.domain.register(memory, Access.REMOTE_READ)
        read = (
            "shm_probe.read_loop("
            "b.qp, b.send_cq, b.region, address, rkey, 4096, 1 << 20, 1 << 20, 50_000)"
        )
        peer.start(read, address=region.address, rkey=region.rkey)
        ends.append((a, region))
    for peer, (_, region) in zip(peers, ends):
        assert peer.finish() > 0
        assert peer.run("bytes(b.bytes[:6])") == b"shared"
        assert region.deregister() is True


def test_the_device_of_open_device_serves_processes(peer_process: Peers) -> None:
    peer = peer_process()
    a = End(open_device("shm"))
    address, rkey = join_process(a, peer)
    assert shm_probe.fetch_add_loop(a.qp, a.send_cq, a.region, address, rkey, 1000) > 0
    assert peer.run("bytes(b.bytes[:8])") == struct.pack("=Q", 1000)
    a.domain.close()
    assert peer.run("b.send_cq.wait(5000)") is True


INHERIT = """
import gc, os, sys
from kdirect.rdma.shm import ShmDevice
from tests.rdma.conftest import End, completion, eventually, join

def connected():
    ends = End(ShmDevice()), End(ShmDevice())
    join(*ends)
    return ends

kept = [connected() for _ in range(4)]
devices = [end.device for ends in kept for end in ends]
views = []
if sys.argv[1] == "views":
    views = [a.qp.view(b.address, 4096, b.rkey) for a, b in kept]
for ends in kept:
    for end in ends:
        end.qp.close()
eventually(lambda: not any(device._qps for device in devices))
if sys.argv[1] == "domains":
    for ends in kept:
        for end in ends:
            end.domain.close()
child = os.fork()
if child:
    sys.exit(os.waitpid(child, 0)[1])
new = [connected() for _ in range(4)]  # in the places of what is not here
kept = ends = end = views = devices = None
gc.collect()
for a, b in new:
    b.qp.post_recv(1)
    a.qp.post_write_imm(1, a.region, 0, 8, b.address, b.rkey, 7)
    assert completion(a.send_cq).ok and completion(b.recv_cq).ok
os._exit(0)
"""


@pytest.mark.parametrize("left", ["queue pairs", "domains", "views"])
def test_what_a_child_inherits_may_go_while_it_works(left: str) -> None:
    """What the parent had mapped is not mapped in a child made by fork: other memory may lie there,
    and was unmapped with what the parent had closed and still referred to."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", INHERIT, left],
        env={**os.environ, "PYTHONPATH": str(root)},
        check=False,
    )
    assert done.returncode == 0
