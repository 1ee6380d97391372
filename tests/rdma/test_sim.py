"""What the sim provider adds to the contract: virtual time from a seed, faults, and a harder look
at buffers."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest

from kdirect.errors import RdmaError
from kdirect.rdma import open_device
from kdirect.rdma.contract import Access, Memory, State, Status
from kdirect.rdma.sim import Faults, SimCompletionQueue, SimNetwork
from tests.rdma.conftest import End, completion, completions, join


def pair(network: SimNetwork, **options: object) -> tuple[End, End]:
    a, b = End(network.device("a"), 4096, **options), End(network.device("b"), 4096, **options)
    join(a, b)
    return a, b


def story(seed: int) -> list[tuple]:
    """A run with everything that can go wrong; what was polled, and when."""
    network = SimNetwork(seed, Faults(disconnect=0.02, rnr=0.2, tear=0.3))
    rng = random.Random(seed)
    ends = [pair(network, rnr_timeout_ms=1) for _ in range(3)]
    told: list[tuple] = []
    for i in range(120):
        a, b = rng.choice(ends)
        try:
            rng.choice(
                [
                    lambda a=a, b=b, i=i: a.qp.post_read(i, a.region, 8 * i, 8, b.address, b.rkey),
                    lambda a=a, b=b, i=i: a.qp.post_write_imm(
                        i, a.region, 2048, 8, b.address + 2048, b.rkey, i
                    ),
                    lambda a=a, b=b, i=i: b.qp.post_recv(i),
                ]
            )()
        except RdmaError as e:
            told.append((type(e).__name__,))
        network.run_for(rng.randint(0, 20_000))
        for x, y in ends:
            for cq in (x.send_cq, y.recv_cq):
                told += [
                    (network.now_ns, wc.wr_id, wc.status, wc.opcode, wc.imm_data)
                    for wc in cq.poll()
                ]
    network.run_until_idle()
    for x, y in ends:
        told += [(x.qp.state, y.qp.state)]
        x.device.close()
        y.device.close()
    return told


def test_the_same_seed_tells_the_same_story(seed: int) -> None:
    assert story(seed) == story(seed)
    assert len({tuple(story(s)) for s in range(seed, seed + 5)}) == 5


def test_every_request_completes_once_whatever_happens(seed: int) -> None:
    """Over many seeds: in order per queue pair, successes before flushes, nothing lost or twice."""
    outcomes = set()
    for s in range(seed, seed + 60):
        network = SimNetwork(s, Faults(disconnect=0.01, rnr=0.1, tear=0.2))
        a, b = pair(network, rnr_timeout_ms=1, max_send_wr=64, max_recv_wr=64)
        rng = random.Random(s)
        for i in range(40):
            b.qp.post_recv(i)
        for i in range(60):
            if rng.random() < 0.5:
                a.qp.post_write_imm(i, a.region, 0, 64, b.address, b.rkey, i)
            else:
                a.qp.post_read(i, a.region, 1024 + 32 * i, 32, b.address, b.rkey)
        network.run_until_idle()
        sent, received = a.send_cq.poll(1000), b.recv_cq.poll(1000)
        assert [wc.wr_id for wc in sent] == list(range(60)), f"seed {s}"
        statuses = [wc.status for wc in sent]
        assert (
            sorted(
                statuses,
                key=lambda status: {Status.SUCCESS: 0, Status.WR_FLUSH_ERR: 2}.get(status, 1),
            )
            == statuses
        )
        good = [wc.imm_data for wc in received if wc.ok]
        assert good == sorted(good)
        known = [wc.wr_id for wc in sent if wc.ok and wc.opcode == 1]
        assert good[: len(known)] == known
        assert len(good) <= len(known) + 1  # the one that failed may have happened
        assert len(received) == (40 if a.qp.state == State.ERROR else len(good))
        outcomes.add(a.qp.state)
    assert outcomes == {State.RTS, State.ERROR}


def test_queue_pairs_overtake_each_other(seed: int) -> None:
    network = SimNetwork(seed)
    pairs = [pair(network) for _ in range(8)]
    order = []
    for i, (a, b) in enumerate(pairs):
        a.qp.post_read(i, a.region, 0, 8, b.address, b.rkey)
    while network.step():
        for a, _ in pairs:
            order += [wc.wr_id for wc in a.send_cq.poll()]
    assert sorted(order) == list(range(8))
    assert order != list(range(8)) or seed % 40320 == 0


@pytest.mark.parametrize("op", ["write", "send", "read", "recv"])
def test_a_buffer_that_changes_too_early_is_found(seed: int, op: str) -> None:
    network = SimNetwork(seed)
    a, b = pair(network)
    b.qp.post_recv(1, b.region, 0, 64)
    if op == "write":
        a.qp.post_write(1, a.region, 0, 64, b.address, b.rkey)
    elif op == "read":
        a.qp.post_read(1, a.region, 0, 64, b.address, b.rkey)
    else:
        a.qp.post_send(1, a.region, 0, 64)
    (b if op == "recv" else a).bytes[5] ^= 1
    with pytest.raises(RdmaError, match=f"changed before its completion.*seed {seed}"):
        network.run_until_idle()
    for call in (network.step, a.send_cq.poll, b.recv_cq.poll):  # and it is not forgotten
        with pytest.raises(RdmaError, match="changed before"):
            call()


def test_a_buffer_may_change_after_its_completion(seed: int) -> None:
    network = SimNetwork(seed)
    a, b = pair(network)
    for i in range(20):
        a.bytes[0] = i
        a.qp.post_write(i, a.region, 0, 64, b.address, b.rkey)
        assert completion(a.send_cq).ok
    network.run_until_idle()


def test_reading_too_early_finds_rubbish(seed: int) -> None:
    network = SimNetwork(seed)
    a, b = pair(network)
    b.bytes[:64] = b"\x05" * 64
    a.bytes[:64] = b"\x05" * 64
    a.qp.post_read(1, a.region, 0, 64, b.address, b.rkey)
    assert bytes(a.bytes[:64]) != b"\x05" * 64
    assert completion(a.send_cq).ok
    assert bytes(a.bytes[:64]) == b"\x05" * 64


def test_reads_tear(seed: int) -> None:
    network = SimNetwork(seed, Faults(tear=1.0))
    a, b = pair(network)
    torn = 0
    for i in range(40):
        b.bytes[:64] = bytes([i]) * 64
        a.qp.post_read(i, a.region, 0, 64, b.address, b.rkey)
        while not a.send_cq.poll():
            network.step()
            b.bytes[:64] = bytes([b.bytes[0] ^ 0x80]) * 64
        data = bytes(a.bytes[:64])
        torn += data[:32] != data[32:]
        assert data[:32] == data[:1] * 32
        assert data[32:] == data[63:] * 32
    assert torn > 0


def test_a_peer_that_hangs_in_a_copy(seed: int) -> None:
    """deregister() says False; the rest of the copy lands when the peer wakes, even after its
    connection is gone."""
    network = SimNetwork(seed)
    a, b = pair(network)
    a.bytes[:64] = b"\x01" * 64
    network.hold(a.qp)
    a.qp.post_write(1, a.region, 0, 64, b.address, b.rkey)
    network.run_until_idle()
    assert bytes(b.bytes[:64]) == b"\x01" * 32 + bytes(32)
    assert b.region.deregister() is False
    b.qp.close()
    b.bytes[:64] = b"\x02" * 64
    network.release()
    assert bytes(b.bytes[:64]) == b"\x02" * 32 + b"\x01" * 32
    assert b.region.deregister() is True


def test_memory_is_unmapped_under_a_live_key(seed: int) -> None:
    """The owner of wrapped memory unmaps it, as a broker does that ends while a peer still has the
    key: what the peer writes reaches the file, and nothing else."""
    network = SimNetwork(seed)
    a, b = pair(network)
    file = os.memfd_create("kdirect-test")
    os.ftruncate(file, 4096)
    mapped = Memory.map(file, 4096)
    wrapped = Memory.wrap(file, mapped.address, 4096, True, None)
    region = b.domain.register(wrapped, Access.LOCAL_WRITE | Access.REMOTE_WRITE)
    mapped.close()
    for held in (False, True):
        a.bytes[:64] = bytes([1 + held]) * 64
        if held:
            network.hold(a.qp)
        a.qp.post_write(1, a.region, 0, 64, region.address, region.rkey)
        network.run_until_idle()
        network.release()
        assert os.pread(file, 64, 0) == bytes([1 + held]) * 64
    os.close(file)


def test_a_file_is_shortened_under_a_copy_that_hangs(seed: int) -> None:
    network = SimNetwork(seed)
    a, b = pair(network)
    file = os.memfd_create("kdirect-test")
    os.ftruncate(file, 8192)
    region = b.domain.register(Memory.map(file, 8192), Access.LOCAL_WRITE | Access.REMOTE_WRITE)
    network.hold(a.qp)
    a.qp.post_write(1, a.region, 0, 64, region.address + 4096, region.rkey)
    network.run_until_idle()
    os.ftruncate(file, 4096)
    with pytest.raises(RdmaError, match="shortened to 4096 bytes under an operation"):
        network.release()
    os.close(file)


def test_deregister_lets_what_is_half_done_finish(seed: int) -> None:
    network = SimNetwork(seed, Faults(tear=1.0))
    a, b = pair(network)
    a.bytes[:64] = b"\x01" * 64
    a.qp.post_write(1, a.region, 0, 64, b.address, b.rkey)
    while not b.bytes[0]:
        network.step()
    assert b.region.deregister() is True
    assert bytes(b.bytes[:64]) == b"\x01" * 64
    assert completion(a.send_cq).ok


def test_devices_that_are_parted(seed: int) -> None:
    """Requests wait in the one direction, in order, and go on when the devices are joined."""
    network = SimNetwork(seed)
    a, b = pair(network)
    a.bytes[:1], b.bytes[:8] = b"\x01", bytes(8)
    network.part([("a", "b")])
    for i in range(3):
        a.qp.post_write(i, a.region, 0, 1, b.address + i, b.rkey)
    b.qp.post_write(7, b.region, 4, 4, a.address + 4, a.rkey)
    network.run_until_idle()
    assert bytes(b.bytes[:3]) == bytes(3) and a.send_cq.poll() == []
    assert completion(b.send_cq).ok
    network.part([("b", "a")])
    assert [wc.wr_id for wc in completions(a.send_cq, 3)] == [0, 1, 2]
    assert bytes(b.bytes[:3]) == b"\x01\x01\x01"


def test_a_closed_queue_pair_leaves_its_buffers_alone(seed: int) -> None:
    """Also when it had failed before, and what it had under way was about to be told."""
    network = SimNetwork(seed)
    a, b = pair(network)
    b.region.deregister()
    for i in range(3):
        a.qp.post_write(i, a.region, 0, 64, b.address, b.rkey)
    while a.qp.state != State.ERROR:
        network.step()
    a.qp.close()
    a.bytes[:64] = b"\x03" * 64
    network.run_until_idle()
    assert a.send_cq.poll() == []


def test_a_killed_peer(seed: int) -> None:
    network = SimNetwork(seed)
    a, b = pair(network)
    for i in range(3):
        a.qp.post_recv(i)
    b.qp.post_write_imm(1, b.region, 0, 8, a.address, a.rkey, 1)
    network.kill(b.device)
    assert [wc.status for wc in completions(a.recv_cq, 3)] == [Status.WR_FLUSH_ERR] * 3
    assert a.qp.state == State.ERROR


def test_a_lost_connection(seed: int) -> None:
    network = SimNetwork(seed)
    a, b = pair(network)
    b.qp.post_recv(9)
    a.qp.post_read(1, a.region, 0, 8, b.address, b.rkey)
    network.disconnect(a.qp)
    assert completion(a.send_cq).status == Status.WR_FLUSH_ERR
    assert completion(b.recv_cq).status == Status.WR_FLUSH_ERR


def test_an_overrun_queue_breaks(seed: int) -> None:
    network = SimNetwork(seed)
    a, b = pair(network, depth=4, max_send_wr=8)
    for i in range(5):
        a.qp.post_read(i, a.region, 8 * i, 8, b.address, b.rkey)
    network.run_until_idle()
    with pytest.raises(RdmaError, match="overrun"):
        a.send_cq.poll()
    assert a.qp.state == State.ERROR


def test_time_is_virtual(seed: int) -> None:
    network = SimNetwork(seed)
    a, _ = pair(network)
    fired: list[int] = []
    network.call_later(3_600_000_000_000, lambda: fired.append(network.now_ns))
    assert a.send_cq.wait(1_000_000) is False
    assert network.now_ns == 1_000_000_000_000
    network.run_until_idle()
    assert fired == [3_600_000_000_000]
    with pytest.raises(RdmaError, match="nothing is left to happen"):
        a.send_cq.wait()


def test_a_protocol_that_never_rests_is_told(seed: int) -> None:
    network = SimNetwork(seed)

    def again() -> None:
        network.call_later(1, again)

    again()
    with pytest.raises(RdmaError, match="come to rest"):
        network.run_until_idle(most=100)


def test_autorun_lets_poll_drive(seed: int) -> None:
    network = SimNetwork(seed, autorun=True)
    a, b = pair(network)
    a.qp.post_read(1, a.region, 0, 8, b.address, b.rkey)
    assert [wc.wr_id for wc in a.send_cq.poll()] == [1]


def test_the_c_face_reaches_a_provider_in_python(seed: int) -> None:
    """Compiled protocols run over sim as they do over shm."""
    from kdirect.rdma import shm_probe

    network = SimNetwork(seed, autorun=True)
    a, b = pair(network)
    b.bytes[:64] = b"\x07" * 64
    calls: list[Callable[[], int]] = [
        lambda: shm_probe.read_loop(a.qp, a.send_cq, a.region, b.address, b.rkey, 64, 4096, 64, 30),
        lambda: shm_probe.fetch_add_loop(a.qp, a.send_cq, a.region, b.address + 512, b.rkey, 30),
        lambda: shm_probe.write_loop(
            a.qp, a.send_cq, a.region, b.address + 1024, b.rkey, 64, 1024, 30
        ),
    ]
    for call in calls:
        assert call() > 0
    assert b.bytes[512] == 30
    assert a.device.statistics()["reads"] == 30
    with pytest.raises(RdmaError, match="status"):
        shm_probe.read_loop(a.qp, a.send_cq, a.region, b.address, 0, 64, 4096, 64, 1)


def test_a_device_of_the_network_is_opened_by_name(seed: int) -> None:
    network = SimNetwork(seed)
    device = open_device("sim", network=network)
    assert open_device("sim", network=network) is device
    own = open_device("sim", shared=False, network=network, name="other")
    assert own is not device and own.name == "other"
    a, b = End(device, 4096), End(own, 4096)
    join(a, b)
    a.qp.post_read(1, a.region, 0, 8, b.address, b.rkey)
    assert completion(a.send_cq).ok
    device.close()
    own.close()


class Recorded:
    """A schedule that lets the network move only where it is asked to, and notes the questions."""

    def __init__(self, network: SimNetwork, takes_over: bool) -> None:
        self.asked: list[str] = []
        self._network = network
        self._takes_over = takes_over

    def wait(self, queue: SimCompletionQueue, timeout_ms: float) -> bool:
        self.asked.append(f"wait {timeout_ms}")
        while self._takes_over and not queue.has_news and self._network.step():
            pass
        return self._takes_over

    def poll_found_nothing(self, queue: SimCompletionQueue) -> bool:
        self.asked.append("poll")
        while self._takes_over and not queue.has_news and self._network.step():
            pass
        return self._takes_over

    def signalled(self, queue: SimCompletionQueue) -> None:
        self.asked.append("signalled")


@pytest.mark.parametrize("takes_over", [True, False])
def test_a_schedule_decides_what_happens_where_a_process_would_wait(
    seed: int, takes_over: bool
) -> None:
    network = SimNetwork(seed)
    schedule = Recorded(network, takes_over)
    a, b = End(network.device("a", schedule), 4096), End(network.device("b"), 4096)
    join(a, b)
    a.qp.post_read(1, a.region, 0, 8, b.address, b.rkey)
    assert len(a.send_cq.poll()) == takes_over
    assert schedule.asked == (["poll", "signalled"] if takes_over else ["poll"])
    schedule.asked.clear()
    a.qp.post_read(2, a.region, 8, 8, b.address, b.rkey)
    assert a.send_cq.wait(1000)
    network.run_until_idle()
    assert [wc.wr_id for wc in a.send_cq.poll()] == ([2] if takes_over else [1, 2])
    assert schedule.asked[0] == "wait 1000" and "signalled" in schedule.asked
    schedule.asked.clear()
    a.send_cq.wake()
    assert schedule.asked == ["signalled"]
    assert not a.send_cq.wait(1000)
    assert not a.send_cq.wait(1), "nothing is left to happen"
