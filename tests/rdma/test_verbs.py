"""What only real verbs show: messages beyond the device's largest, inline sends, retries that end,
limits, the preflight.

Collected where KDIRECT_TEST_VERBS=1 says that there is a device; the contract suite runs over it
too (conftest.PROVIDERS).
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kdirect.errors import QueuePairError, RdmaError, TransportError
from kdirect.rdma import verbs_choice, verbs_preflight
from kdirect.rdma.contract import Access, Memory, Opcode, State, Status
from kdirect.rdma.verbs_device import VerbsDevice
from kdirect.rdma.verbs_link import Address
from tests.rdma.conftest import ALL, WAIT_MS, End, Rig, completion, completions, eventually, join


@pytest.fixture
def verbs() -> Iterator[Rig]:
    rig = Rig("verbs", 0)
    yield rig
    rig.close()


def largest(rig: Rig) -> int:
    return rig.device._context.max_message_bytes


def test_reads_and_writes_beyond_the_largest_message(verbs: Rig) -> None:
    """soft-RoCE carries 8 MiB at once."""
    size = largest(verbs) + (1 << 20)
    if size > 64 << 20:
        size = 64 << 20  # a device that needs no pieces
    a, b = verbs.pair(size=size, max_send_wr=4)
    pattern = os.urandom(1 << 20)
    for at in range(0, size, 1 << 20):
        b.bytes[at : at + (1 << 20)] = pattern
    a.qp.post_read(1, a.region, 0, size, b.address, b.rkey)
    a.qp.post_read(2, a.region, 0, 8, b.address, b.rkey)
    first, second = completions(a.send_cq, 2, 120_000)
    assert (first.wr_id, first.status, first.opcode, first.byte_len) == (
        1,
        Status.SUCCESS,
        Opcode.RDMA_READ,
        size,
    )
    assert second.wr_id == 2 and second.ok
    assert all(a.bytes[at : at + (1 << 20)] == pattern for at in range(0, size, 1 << 20))
    a.bytes[size - 9 : size] = b"the end !"
    a.qp.post_write(3, a.region, 0, size, b.address, b.rkey)
    assert completions(a.send_cq, 1, 120_000)[0].ok
    assert b.bytes[size - 9 : size] == b"the end !"
    assert verbs.device.statistics()["read_bytes"] == size + 8
    a.qp.post_read(
        4, a.region, 0, size, b.address + 4096, b.rkey
    )  # its last piece reaches past the region
    assert completions(a.send_cq, 1, 120_000)[0].status == Status.REM_ACCESS_ERR
    assert a.qp.state == State.ERROR


def test_an_immediate_beyond_the_largest_message_is_refused_at_post(verbs: Rig) -> None:
    size = largest(verbs) + 4096
    if size > 1 << 28:
        size = 1 << 28
    a, b = verbs.pair(size=size)
    if size > largest(verbs):
        with pytest.raises(RdmaError, match=r"alignment|malformed|length"):
            a.qp.post_write_imm(1, a.region, 0, size, b.address, b.rkey, 1)
    b.qp.post_recv(1)
    a.qp.post_write_imm(2, a.region, 0, 100, b.address, b.rkey, 1)
    assert completion(a.send_cq).wr_id == 2


def test_inline_sends_still_check_their_local_key(verbs: Rig) -> None:
    a, b = verbs.pair()
    assert a.qp._inline_bytes >= 32
    a.bytes[0:5] = b"small"
    a.qp.post_write(1, a.region, 0, 5, b.address, b.rkey)
    a.bytes[0:5] = b"later"  # was copied at post
    assert completion(a.send_cq).ok
    assert b.bytes[0:5] == b"small"
    a.qp.post_write(2, verbs.end().region, 0, 5, b.address, b.rkey)  # another domain's key
    assert completion(a.send_cq).status == Status.LOC_PROT_ERR


def test_a_sleeper_hears_of_queue_pairs_that_come_later(verbs: Rig) -> None:
    cq = verbs.other_device.create_cq()
    woken: list[bool] = []
    sleeper = threading.Thread(target=lambda: woken.append(cq.wait(WAIT_MS)))
    sleeper.start()
    time.sleep(0.2)
    a, b = verbs.end(), End(verbs.other_device, cq=cq)
    b.qp.post_recv(1)
    join(a, b)
    a.qp.post_write_imm(1, a.region, 0, 0, 0, 0, 7)
    sleeper.join()
    assert woken == [True]
    assert completion(cq).imm_data == 7


def test_a_completion_queue_takes_more_than_the_device_allows_at_once(verbs: Rig) -> None:
    """A broker's clients share one; soft-RoCE holds 32767 completions."""
    cq = verbs.other_device.create_cq(depth=4096)
    pairs = []
    for _ in range(4):
        b = End(verbs.other_device, cq=cq, max_send_wr=1000, max_recv_wr=1000)
        a = verbs.end()
        join(a, b)
        pairs.append((a, b))
    assert len(cq._shards) > 1
    for i, (a, b) in enumerate(pairs):
        b.qp.post_recv(i)
        a.qp.post_write_imm(1, a.region, 0, 0, 0, 0, i)
    assert sorted(wc.imm_data for wc in completions(cq, 4)) == [0, 1, 2, 3]
    for a, b in pairs:
        b.qp.close()
        a.qp.close()
    assert [shard.free for shard in cq._shards] and all(shard.free >= 4096 for shard in cq._shards)


def test_asyncio_waits_on_the_descriptor(verbs: Rig) -> None:
    a, b = verbs.pair()

    async def receive() -> int:
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_reader(b.recv_cq.fileno(), ready.set)
        b.qp.post_recv(1)
        assert b.recv_cq.arm() is False
        loop.call_later(0.05, lambda: a.qp.post_write_imm(1, a.region, 0, 0, 0, 0, 42))
        await asyncio.wait_for(ready.wait(), WAIT_MS / 1000)
        loop.remove_reader(b.recv_cq.fileno())
        return b.recv_cq.poll(1)[0].imm_data

    assert asyncio.run(receive()) == 42


ROOT = str(Path(__file__).parent.parent.parent)
PEER = """
import sys
sys.path.append(sys.argv[1])
from kdirect.rdma.verbs_device import VerbsDevice
from kdirect.rdma.verbs_link import Address
from tests.rdma.conftest import End
end = End(VerbsDevice())
end.qp.connect(bytes.fromhex(sys.stdin.readline().strip()), False)
print(end.qp.address.hex(), end.address, end.rkey, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_peer_that_dies_or_stops(verbs: Rig, number: int) -> None:
    """Killed: an idle queue pair hears of it by its link.  Stopped: its RNIC still serves READs."""
    a = verbs.end()
    peer = subprocess.Popen(
        [sys.executable, "-c", PEER, ROOT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert peer.stdin is not None and peer.stdout is not None
    peer.stdin.write(a.qp.address.hex() + "\n")
    peer.stdin.flush()
    address, remote, rkey = peer.stdout.readline().split()
    a.qp.connect(bytes.fromhex(address), True)
    for i in range(3):
        a.qp.post_recv(i)
    peer.send_signal(number)
    if number == signal.SIGSTOP:
        a.qp.post_read(1, a.region, 0, 64, int(remote), int(rkey))
        assert completion(a.send_cq).ok
        peer.send_signal(signal.SIGKILL)
    assert [wc.status for wc in completions(a.recv_cq, 3)] == [Status.WR_FLUSH_ERR] * 3
    assert a.qp.state == State.ERROR
    with pytest.raises(QueuePairError):
        a.qp.post_read(2, a.region, 0, 64, int(remote), int(rkey))
    peer.wait(10)
    peer.stdin.close()
    peer.stdout.close()


def test_a_peer_that_does_not_answer_ends_within_the_retries(verbs: Rig) -> None:
    """Its queue pair is gone and nobody says so: a request fails after about half a second, not
    never."""
    a, b = verbs.pair()
    b.device._context.destroy(b.qp._native)
    b.qp._native = None
    a.qp.post_read(1, a.region, 0, 8, b.address, b.rkey)
    assert completion(a.send_cq).status == Status.RETRY_EXC_ERR


def test_strangers_on_the_link_are_dropped(verbs: Rig) -> None:
    a, b = verbs.end(), End(verbs.other_device)
    b.qp.connect(a.qp.address, False)
    where = Address.unpack(b.qp.address)
    for noise in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"KDVL" + bytes(36),
        b"KDVL\x01\x00\x01\x00" + os.urandom(32),
    ):
        with socket.create_connection((where.host, where.port), timeout=10) as stranger:
            stranger.sendall(noise)
            while stranger.recv(1024):
                pass
    a.qp.connect(b.qp.address, True)
    a.qp.post_read(1, a.region, 0, 8, b.address, b.rkey)
    assert completion(a.send_cq).ok


def test_the_device_is_chosen_by_address_and_index(verbs: Rig) -> None:
    gid = verbs.device.choice.gid
    again = VerbsDevice(gid.ip, strict=True)
    assert again.choice.gid == gid and gid.ip in again.describe()
    again.close()
    with pytest.raises(TransportError, match="GID"):
        VerbsDevice("203.0.113.7", strict=True)
    with pytest.raises(TransportError, match=r"GID index 999"):
        VerbsDevice(gid_index=999)
    assert verbs_choice.devices()


def test_preflight_passes_and_names_every_step(tmp_path: Path) -> None:
    steps = verbs_preflight.preflight(paths=["/dev/shm"], need_bytes=4 << 20)
    assert all(step.ok for step in steps), steps
    assert tuple(step.name for step in steps) == verbs_preflight.STEPS


UNPRIVILEGED = """
import ctypes, os, resource
from kdirect.rdma import verbs, verbs_device
from kdirect.rdma.verbs_preflight import preflight
verbs.load()
resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, 64 << 10))
os.setuid(65534)
# PR_SET_DUMPABLE: /proc/self stays readable after the change of user
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
for step in preflight(need_bytes=4 << 20):
    if not step.ok:
        print(step.name, "|", step.detail, "|", step.hint)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="gives up root's privileges")
def test_a_low_limit_of_locked_memory_explains_itself() -> None:
    run = subprocess.run(
        [sys.executable, "-c", UNPRIVILEGED], capture_output=True, text=True, check=False
    )
    failed = run.stdout.splitlines()
    assert failed and failed[0].startswith("memlock |"), run.stderr
    last = failed[-1]  # and the device said so too
    assert last.split()[0] in ("open", "memory", "ping") and "64 KiB" in last and "IPC_LOCK" in last


def test_a_read_only_mapping_is_registered_through_one_of_its_own(verbs: Rig) -> None:
    a, b = verbs.pair()
    b.bytes[4096:4100] = b"text"
    view = Memory.map(b.memory.fd, 65536, False)
    region = b.domain.register(view, Access.REMOTE_READ, 4096, 4096)
    a.qp.post_read(1, a.region, 0, 4, region.address, region.rkey)
    assert completion(a.send_cq).ok and a.bytes[0:4] == b"text"
    a.qp.post_write(
        2, a.region, 0, 4, region.address, region.rkey
    )  # readable it is, and nothing else
    assert completion(a.send_cq).status == Status.REM_ACCESS_ERR
    fd = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR)
    os.ftruncate(fd, 4096)
    read_only = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    with pytest.raises(RdmaError, match="read-only"):
        b.domain.register(Memory.map(read_only, 4096, False), Access.REMOTE_READ)
    os.close(fd)
    os.close(read_only)


def test_many_opened_and_closed_leave_nothing(verbs: Rig) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    def once() -> None:
        device = VerbsDevice()
        cq = device.create_cq()
        domain = device.alloc_pd()
        domain.register(Memory.anonymous(4096), ALL)
        domain.create_qp(cq, cq)
        device.close()

    once()
    before = descriptors()
    for _ in range(5):
        once()
    assert eventually(lambda: descriptors() <= before)
