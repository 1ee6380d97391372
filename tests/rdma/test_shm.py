"""What only the shm provider has, in one process: threads, descriptors, mappings, addresses."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kdirect.errors import ClosedError, RdmaError, TransportError
from kdirect.rdma import open_device, shm, shm_link, shm_probe
from kdirect.rdma.contract import Access, Memory, State, Status
from tests.rdma.conftest import ALL, WAIT_MS, End, Rig, completion, completions, eventually, join


def run_threads(*calls: Callable[[], object]) -> None:
    """Run `calls` in threads; the first exception of any is raised."""
    failures: list[BaseException] = []

    def guarded(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=guarded, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a thread hangs"
    if failures:
        raise failures[0]


@pytest.fixture(params=["light fences", "full fences"])
def fenced(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """A rig whose devices use membarrier, and one whose devices do without."""
    shm.use_full_fences(request.param == "full fences")
    try:
        rig = Rig("shm", 0)
        yield rig
        rig.close()
    finally:
        shm.use_full_fences(False)


# -- queues and threads ----------------------------------------------------------------------------
def test_many_queue_pairs_share_a_queue_fairly(shm_rig: Rig) -> None:
    """One that has a thousand completions ready does not keep the others waiting."""
    cq = shm_rig.other_device.create_cq(8192)
    ends = []
    for i in range(9):
        b = End(shm_rig.other_device, cq=cq, max_recv_wr=1000)
        a = shm_rig.end(max_send_wr=1000, depth=2048)
        join(a, b)
        ends.append((a, b))
        for n in range(1000 if i == 0 else 3):
            b.qp.post_recv(n)
            a.qp.post_write_imm(n, a.region, 0, 0, 0, 0, i)
    for a, _ in ends:
        completions(a.send_cq, 1000 if a is ends[0][0] else 3)
    seen: dict[int, int] = {}
    for _ in range(12):
        for wc in cq.poll(16):
            seen[wc.imm_data] = seen.get(wc.imm_data, 0) + 1
    assert all(seen.get(i) == 3 for i in range(1, 9)), seen
    rest = completions(cq, 1000 - seen[0])
    assert {wc.imm_data for wc in rest} == {0}
    assert [wc.wr_id for wc in rest] == list(range(seen[0], 1000))


def bounce_pair(rig: Rig) -> tuple[End, End]:
    a, b = (End(device, cq=device.create_cq(256)) for device in (rig.device, rig.other_device))
    join(a, b)
    for i in range(16):
        a.qp.post_recv(i)
        b.qp.post_recv(i)
    return a, b


def test_no_wake_up_is_lost_between_threads(fenced: Rig) -> None:
    """Both sides sleep after every message: each race between "sleeps" and "sent" occurs."""
    a, b = bounce_pair(fenced)
    n = 12_000
    run_threads(
        lambda: shm_probe.bounce_asleep(a.qp, a.recv_cq, a.region, b.address, b.rkey, n, True),
        lambda: shm_probe.bounce_asleep(b.qp, b.recv_cq, b.region, a.address, a.rkey, n, False),
    )
    assert fenced.device.statistics()["wakeups"] > 0


def test_spinning_threads(fenced: Rig) -> None:
    a, b = bounce_pair(fenced)
    n = 8_000
    run_threads(
        lambda: shm_probe.bounce(
            a.qp, a.recv_cq, a.region, b.address, b.rkey, 64, n, True, WAIT_MS
        ),
        lambda: shm_probe.bounce(
            b.qp, b.recv_cq, b.region, a.address, a.rkey, 64, n, False, WAIT_MS
        ),
    )
    assert fenced.device.statistics()["wakeups"] == 0


def test_a_local_completion_wakes_another_thread(fenced: Rig) -> None:
    """One thread posts READs, another sleeps on the send queue after every one."""
    a, b = fenced.pair(max_send_wr=1)
    n = 5_000
    seen = threading.Semaphore(0)

    def sleeper() -> None:
        for i in range(n):
            assert a.send_cq.wait(WAIT_MS), f"wake-up {i} was lost"
            (wc,) = a.send_cq.poll(4)
            assert (wc.wr_id, wc.status) == (i, Status.SUCCESS)
            seen.release()

    def poster() -> None:
        for i in range(n):
            a.qp.post_read(i, a.region, 0, 8, b.address, b.rkey)
            assert seen.acquire(timeout=10)

    run_threads(sleeper, poster)


@pytest.mark.parametrize("beside", ["nobody", "a thread that waits for receives"])
def test_waiting_requests_run_in_the_thread_that_polls(fenced: Rig, beside: str) -> None:
    """Three threads: one posts, one polls, one makes the receiver ready now and then.  A fourth has
    a right to run them, too."""
    a, b = fenced.pair(max_send_wr=16, max_recv_wr=16)
    n = 3_000
    room = threading.Semaphore(16)
    rng = random.Random(5)

    def poster() -> None:
        for i in range(n):
            assert room.acquire(timeout=20)
            a.qp.post_write_imm(i, a.region, 0, 8, b.address, b.rkey, i)

    def poller() -> None:
        got = 0
        while got < n:
            assert a.send_cq.wait(WAIT_MS)
            for wc in a.send_cq.poll():
                assert (wc.wr_id, wc.status) == (got, Status.SUCCESS)
                got += 1
                room.release()

    def receiver() -> None:
        posted = got = 0
        while got < n:
            for _ in range(min(rng.randint(0, 16), n - posted, 16 - (posted - got))):
                b.qp.post_recv(posted)
                posted += 1
            b.recv_cq.wait(0 if rng.random() < 0.9 else 2)
            for wc in b.recv_cq.poll():
                assert (wc.wr_id, wc.imm_data) == (got, got)
                got += 1
        over.set()

    def waiter() -> None:
        while not over.is_set():
            assert a.recv_cq.wait(1) is False

    over = threading.Event()
    run_threads(poster, poller, receiver, *([waiter] if beside != "nobody" else []))


def test_wake_from_another_thread(shm_rig: Rig) -> None:
    a, _ = shm_rig.pair()
    results: list[bool] = []
    thread = threading.Thread(target=lambda: results.append(a.send_cq.wait(WAIT_MS)))
    started = time.monotonic()
    thread.start()
    time.sleep(0.02)
    a.send_cq.wake()
    thread.join(10)
    assert results == [False]
    assert time.monotonic() - started < WAIT_MS / 1000


def test_closing_a_queue_frees_its_sleeper(shm_rig: Rig) -> None:
    cq = shm_rig.device.create_cq()
    raised: list[BaseException] = []

    def sleeper() -> None:
        try:
            cq.wait(WAIT_MS)
        except ClosedError as e:
            raised.append(e)

    thread = threading.Thread(target=sleeper)
    thread.start()
    time.sleep(0.02)
    cq.close()
    thread.join(10)
    assert not thread.is_alive()
    assert len(raised) == 1


def test_a_peer_that_leaves_wakes_a_sleeping_thread(shm_rig: Rig) -> None:
    a, b = shm_rig.pair()
    a.qp.post_recv(1)
    results: list[bool] = []
    thread = threading.Thread(target=lambda: results.append(a.recv_cq.wait(WAIT_MS)))
    thread.start()
    time.sleep(0.02)
    b.qp.close()
    thread.join(10)
    assert results == [True]
    assert a.recv_cq.poll()[0].status == Status.WR_FLUSH_ERR


def test_closing_under_a_thread_that_works(fenced: Rig) -> None:
    """close() of either side, and of the memory behind it, while another thread reads as fast as it
    can."""
    for turn in range(60):
        a, b = fenced.pair(size=1 << 16)
        ended: list[str] = []

        def reader(a: End = a, b: End = b, ended: list[str] = ended) -> None:
            try:
                while True:
                    shm_probe.read_loop(
                        a.qp, a.send_cq, a.region, b.address, b.rkey, 4096, 65536, 65536, 200
                    )
            except RdmaError as e:
                ended.append(str(e))

        thread = threading.Thread(target=reader)
        thread.start()
        time.sleep(0.001)
        if turn % 2:
            a.qp.close()
            assert a.region.deregister(1000) is True
            a.memory.close()
        else:
            b.qp.close()
            assert b.region.deregister(1000) is True
            b.memory.close()
            eventually(lambda a=a: a.qp.state == State.ERROR)
            a.qp.close()
        thread.join(10)
        assert len(ended) == 1
        for end in (a, b):
            end.domain.close()


@pytest.mark.parametrize("op", ["read", "write"])
def test_after_deregister_nothing_moves(fenced: Rig, op: str) -> None:
    """The other thread copies under the key until it fails.  What a READ brought is from before
    deregister() returned; a WRITE leaves the memory alone after it."""
    good, bad, size = b"\x11" * 4096, b"\xee" * 4096, 4096
    for turn in range(150):
        a, b = fenced.pair(size=size, max_send_wr=4)
        b.bytes[:] = good
        a.bytes[:] = good
        brought: list[bytes] = []

        def worker(a: End = a, b: End = b, brought: list[bytes] = brought) -> None:
            while True:
                if op == "read":
                    a.qp.post_read(1, a.region, 0, size, b.address, b.rkey)
                else:
                    a.qp.post_write(1, a.region, 0, size, b.address, b.rkey)
                (wc,) = a.send_cq.poll()
                if not wc.ok:
                    assert wc.status == Status.REM_ACCESS_ERR
                    return
                brought.append(bytes(a.bytes))

        thread = threading.Thread(target=worker)
        thread.start()
        for _ in range(turn % 7):
            time.sleep(0)
        assert b.region.deregister(5000) is True
        b.bytes[:] = bad
        thread.join(10)
        assert not thread.is_alive()
        assert bytes(b.bytes) == bad, "a WRITE landed after deregister()"
        assert all(data == good for data in brought), "a READ saw what came after deregister()"
        for end in (a, b):
            end.domain.close()


def test_registering_while_others_read(fenced: Rig) -> None:
    """Announcements are taken in by two threads at once: the service thread and the one that meets
    an unknown key."""
    a, b = fenced.pair(size=1 << 16)
    for i in range(600):
        region = b.domain.register(b.memory, Access.REMOTE_READ, position=8 * i, length=8)
        struct.pack_into("<Q", b.bytes, 8 * i, i + 1)
        a.qp.post_read(i, a.region, 0, 8, region.address, region.rkey)
        (wc,) = a.send_cq.poll()
        assert wc.ok
        assert struct.unpack_from("<Q", a.bytes)[0] == i + 1
        if i % 3:
            assert region.deregister() is True


# -- descriptors, mappings, threads ----------------------------------------------------------------
def descriptors() -> dict[str, int]:
    """Those of the kinds that only the provider opens in this process, which may open others, or
    close them, at any time."""
    with open("/proc/net/unix") as f:
        links = {
            f"socket:[{fields[6]}]" for fields in map(str.split, f) if fields[4] == "0005"
        }  # SOCK_SEQPACKET
    found = {"memory": 0, "eventfd": 0, "link": 0}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            what = os.readlink(f"/proc/self/fd/{name}")
            if what.startswith("/memfd:kdirect"):
                found["memory"] += 1
            elif what == "anon_inode:[eventfd]":
                found["eventfd"] += 1
            elif what in links:
                found["link"] += 1
    return found


def mappings(inode: int | None = None) -> list[str]:
    """Access flags of the mappings of kdirect's memfds in this process, or of one file."""
    with open("/proc/self/maps") as f:
        lines = [line.split() for line in f]
    return [
        line[1]
        for line in lines
        if (
            int(line[4]) == inode
            if inode is not None
            else any("memfd:kdirect" in word for word in line)
        )
    ]


def services() -> int:
    return sum(thread.name == "kdirect-shm" for thread in threading.enumerate())


def test_nothing_leaks() -> None:
    def cycle(closer: str) -> None:
        rig = Rig("shm", 0)
        for i in range(4):
            a, b = rig.pair(size=8192)
            part = b.domain.register(b.memory, Access.REMOTE_READ, position=100, length=100)
            a.qp.post_read(1, a.region, 0, 8, part.address, part.rkey)
            b.qp.post_recv(1)
            a.qp.post_write_imm(2, a.region, 0, 8, b.address, b.rkey, 1)
            a.send_cq.poll()
            if closer == "children":
                (a if i % 2 else b).qp.close()
                part.deregister()
                completion(b.recv_cq)
                for end in (a, b):
                    end.qp.close()
                    end.domain.close()
                    end.send_cq.close()
                    end.recv_cq.close()
                    end.memory.close()
        thief = rig.end()
        with contextlib.suppress(TransportError):
            thief.qp.connect(
                shm_link.Address(bytes(16), *place(), 1, rig.device._service.name).pack(), True
            )
        epolls = [device._service._epoll for device in (rig.device, rig.other_device)]
        rig.close()
        assert all(epoll.closed for epoll in epolls)

    for closer in ("children", "device"):
        cycle(closer)
    gc.collect()
    before = (descriptors(), len(mappings()), services())
    for closer in ("children", "device") * 4:
        cycle(closer)
    gc.collect()
    assert (descriptors(), len(mappings()), services()) == before


def place() -> tuple[bytes, int]:
    return shm_link.place()


def test_peers_that_come_and_go_leave_nothing_behind(shm_rig: Rig) -> None:
    """On devices that stay open, as a broker's does."""

    def visit() -> None:
        for _ in range(5):
            a, b = shm_rig.pair(size=4096)
            a.qp.close()
            eventually(lambda b=b: b.qp.state == State.ERROR)
            for end in (a, b):
                end.domain.close()
                end.send_cq.close()
                end.recv_cq.close()

    def count() -> tuple[dict[str, int], int]:
        gc.collect()
        return descriptors(), len(mappings())

    visit()
    eventually(
        lambda: not shm_rig.device._service._links and not shm_rig.other_device._service._links
    )
    before = count()
    visit()
    eventually(lambda: count() == before)
    assert not shm_rig.device._qps
    assert not shm_rig.other_device._qps


def test_one_mapping_of_a_file_serves_all_its_regions(shm_rig: Rig) -> None:
    """As when a broker registers a segment for every client: here one process plays all the
    clients."""
    memory = Memory.anonymous(1 << 20)
    memoryview(memory)[:4] = b"once"
    inode = os.fstat(memory.fd).st_ino
    for _ in range(10):
        a, b = shm_rig.pair()
        whole = b.domain.register(memory, Access.REMOTE_READ)
        parts = [
            b.domain.register(memory, Access.REMOTE_READ, position=4096 * i + 8, length=4096)
            for i in range(10)
        ]
        for region in (whole, *parts):
            a.qp.post_read(1, a.region, 0, 4, region.address, region.rkey)
            assert completion(a.send_cq).ok
    assert sorted(mappings(inode)) == ["r--s", "rw-s"]  # the initiators', and the owner's


def test_mappings_follow_the_grant_and_go_with_it(shm_rig: Rig) -> None:
    a, b = shm_rig.pair()
    memory = Memory.anonymous(8192)
    inode = os.fstat(memory.fd).st_ino
    readable = b.domain.register(memory, Access.REMOTE_READ)
    eventually(lambda: sorted(mappings(inode)) == ["r--s", "rw-s"])
    writable = b.domain.register(memory, ALL)
    eventually(lambda: sorted(mappings(inode)) == ["r--s", "rw-s", "rw-s"])
    assert readable.deregister() is True
    eventually(lambda: sorted(mappings(inode)) == ["rw-s", "rw-s"])
    assert writable.deregister() is True
    eventually(lambda: mappings(inode) == ["rw-s"])
    b.domain.register(memory, Access.REMOTE_READ)
    eventually(lambda: len(mappings(inode)) == 2)
    a.qp.close()
    assert len(mappings(inode)) == 1


def test_an_idle_device_uses_no_cpu(shm_rig: Rig) -> None:
    shm_rig.pair()
    threads = [device._service._thread for device in (shm_rig.device, shm_rig.other_device)]
    assert [thread.name for thread in threads] == ["kdirect-shm"] * 2

    def switches() -> list[str]:
        found = []
        for thread in threads:
            with open(f"/proc/self/task/{thread.native_id}/status") as f:
                found += [line for line in f if line.startswith("State") or "ctxt_switches" in line]
        return found

    def settled() -> bool:
        before = switches()
        time.sleep(0.05)
        return switches() == before and sum("S (sleeping)" in line for line in before) == len(
            threads
        )

    eventually(settled)
    before = switches()
    time.sleep(0.3)
    assert switches() == before


def test_a_device_costs_nothing_before_it_is_used() -> None:
    before = (descriptors(), services())
    device = shm.ShmDevice()
    assert (descriptors(), services()) == before
    assert device._service._epoll is None
    device.close()


def test_open_device() -> None:
    device = open_device("shm")
    assert open_device("shm") is device
    device.close()
    again = open_device("shm")
    assert again is not device
    assert not again.closed
    again.close()
    with pytest.raises(TransportError, match=r"provider 'verbz'.*shm"):
        open_device("verbz")


def test_a_forked_child_opens_its_own_device() -> None:
    def ping(device: object) -> bool:
        a, b = End(device), End(device)
        join(a, b)
        b.bytes[:4] = b"ping"
        a.qp.post_read(1, a.region, 0, 4, b.address, b.rkey)
        return completion(a.send_cq).ok and bytes(a.bytes[:4]) == b"ping"

    parent = open_device("shm")
    assert ping(parent)
    pid = os.fork()
    if pid == 0:
        try:
            child = open_device("shm")
            os._exit(0 if child is not parent and ping(child) else 1)
        except BaseException:
            os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0
    assert ping(parent)
    parent.close()


# -- addresses and handshakes ----------------------------------------------------------------------
def altered(address: bytes, **changes: object) -> bytes:
    fields = shm_link.Address.unpack(address)
    return shm_link.Address(
        **{**{name: getattr(fields, name) for name in fields.__slots__}, **changes}
    ).pack()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"boot_id": bytes(range(16))}, "another host"),
        ({"namespace": 1}, "another network namespace"),
        ({"name": b"nobody"}, "cannot reach"),
        ({"token": bytes(16)}, "refused"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_addresses_that_cannot_be_reached(shm_rig: Rig, changes: dict, message: str) -> None:
    a, b = shm_rig.end(), End(shm_rig.other_device)
    b.qp.connect(a.qp.address, False)
    with pytest.raises(TransportError, match=message) as e:
        a.qp.connect(altered(b.qp.address, **changes), True)
    assert e.value.hint


def test_an_address_of_another_version(shm_rig: Rig) -> None:
    a = shm_rig.end()
    data = bytearray(a.qp.address)
    data[4] ^= 0xFF
    with pytest.raises(TransportError, match="version"):
        a.qp.connect(data, True)
    with pytest.raises(TransportError, match="cut short"):
        a.qp.connect(a.qp.address[:-1], True)


def test_a_listener_that_never_answers(shm_rig: Rig) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as mute:
        name = f"kdirect-mute-{os.getpid()}".encode()
        mute.bind(b"\0" + name)
        mute.listen()
        a = shm_rig.end()
        with pytest.raises(TransportError, match="did not answer"):
            a.qp.connect(altered(a.qp.address, name=name, token=bytes(16)), True, timeout_ms=50)
        assert a.qp.state == State.ERROR


def test_strangers_at_the_door(shm_rig: Rig, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rubbish, half greetings and silence: dropped, nothing kept, and peers still get in."""
    rng = random.Random(seed)
    memory = Memory.anonymous(4096)  # what they send along
    b = End(shm_rig.other_device)
    name = shm_link.Address.unpack(b.qp.address).name
    shm_rig.pair()
    gc.collect()
    before = descriptors()
    hello = shm_link._HELLO.pack(b"KDSL", 1, 1, bytes(16), bytes(16), 1, 1, 1, 1)
    strangers = []
    with monkeypatch.context() as patched:
        patched.setattr(shm_rig.other_device._service, "_handshake_timeout_s", 0.2)
        for i in range(60):
            s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            s.connect(b"\0" + name)
            data = [
                b"",
                rng.randbytes(rng.randint(1, 300)),
                hello[: rng.randint(1, len(hello))],
                hello,
                b"KDSL" + rng.randbytes(60),
            ][i % 5]
            if data:
                shm_link.send_fds(s, data, [memory.fd] * rng.randint(0, 6))
            strangers.append(s)
        eventually(lambda: not shm_rig.other_device._service._pending)
    for s in strangers:
        s.close()
    eventually(lambda: all(n <= before[kind] for kind, n in descriptors().items()))
    a = shm_rig.end()
    b.qp.connect(a.qp.address, False)
    a.qp.connect(b.qp.address, True)
    a.qp.post_read(1, a.region, 0, 8, b.address, b.rkey)
    assert completion(a.send_cq).ok


@pytest.mark.parametrize(
    "recv_wr,send_bytes", [(0, 1), (2**31, 1), (1, 2**31), (2**32 - 1, 2**32 - 1)]
)
def test_greetings_with_mad_limits(shm_rig: Rig, recv_wr: int, send_bytes: int) -> None:
    a, b = shm_rig.end(), End(shm_rig.other_device)
    b.qp.connect(a.qp.address, False)
    address, own = shm_link.Address.unpack(b.qp.address), shm_link.Address.unpack(a.qp.address)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as s:
        s.connect(b"\0" + address.name)
        shm_link.send_hello(
            s, address.token, shm_link.Peer(own.token, 1, recv_wr, send_bytes, True), [0, 0]
        )
        with pytest.raises(TransportError, match="refused"):
            shm_link.recv_welcome(s, address, time.monotonic() + 5)
    a.qp.connect(b.qp.address, True)


def test_announcements_that_cannot_be_mapped(
    shm_rig: Rig, tmp_path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file shorter than the region would be SIGBUS at the first touch: its key stays unknown."""
    a, b = shm_rig.pair()
    path = tmp_path / "short"
    path.write_bytes(bytes(8192))
    with open(path, "r+b") as f:
        memory = Memory.map(f.fileno(), 8192, True)
        f.truncate(4096)
    region = b.domain.register(memory, ALL)
    a.qp.post_read(1, a.region, 0, 8, region.address, region.rkey)
    assert completion(a.send_cq).status == Status.REM_ACCESS_ERR
    eventually(lambda: "shorter than the region" in caplog.text)


def test_thousands_of_regions_are_announced_when_connecting(shm_rig: Rig) -> None:
    """More than a socket holds, both ways, with both sides in one process and one domain talking to
    itself."""
    memory = Memory.anonymous(4096)
    for a, b in ((shm_rig.end(), End(shm_rig.other_device)), (shm_rig.end(), shm_rig.end())):
        mine = [a.domain.register(memory, Access.REMOTE_READ) for _ in range(2500)]
        theirs = [b.domain.register(memory, Access.REMOTE_READ) for _ in range(2500)]
        join(a, b)
        for region in (theirs[0], theirs[1234], theirs[-1]):
            a.qp.post_read(1, a.region, 0, 8, region.address, region.rkey)
            assert completion(a.send_cq).ok
        b.qp.post_read(1, b.region, 0, 8, mine[-1].address, mine[-1].rkey)
        assert completion(b.send_cq).ok
    domain = shm_rig.device.alloc_pd()
    cq = shm_rig.device.create_cq()
    one, two = domain.create_qp(cq, cq), domain.create_qp(cq, cq)
    regions = [domain.register(memory, ALL) for _ in range(2500)]
    two.connect(one.address, False)
    one.connect(two.address, True)
    one.post_read(1, regions[0], 0, 8, regions[-1].address, regions[-1].rkey)
    assert completion(cq).ok


def test_a_domain_has_only_so_many_keys(shm_rig: Rig) -> None:
    domain = shm_rig.device.alloc_pd()
    memory = Memory.anonymous(4096)
    regions = [domain.register(memory, Access.REMOTE_READ) for _ in range(1 << 14)]
    assert len({region.rkey for region in regions}) == 1 << 14
    with pytest.raises(RdmaError, match="16384 regions"):
        domain.register(memory, Access.REMOTE_READ)
    assert regions[7].deregister() is True
    domain.register(memory, Access.REMOTE_READ)


def test_a_signal_interrupts_a_wait(shm_rig: Rig) -> None:
    """Control-C reaches a thread that sleeps in wait(), and wait() can be called again."""
    a, b = shm_rig.pair()

    class Alarm(BaseException):
        pass

    def ring(*_: object) -> None:
        raise Alarm

    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Alarm):
            a.recv_cq.wait(WAIT_MS)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    a.qp.post_recv(1)
    b.qp.post_write_imm(1, b.region, 0, 0, 0, 0, 1)
    assert a.recv_cq.wait(WAIT_MS) is True
