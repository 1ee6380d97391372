"""What the tests of the RDMA room share: the rig (two connected ends over a provider) and peers in
other processes.

A provider that cannot run here skips with its reason; KDIRECT_NO_SKIPS=1 makes that a failure
(tests/conftest.py).
"""

from __future__ import annotations

import os
import pickle
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kdirect.errors import KdirectError
from kdirect.rdma.contract import Access, Memory, State, WorkCompletion
from tests.support import wait_until

ALL = Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_READ | Access.REMOTE_ATOMIC
WAIT_MS = 10_000  # a test that waits this long has failed
# Real verbs where a device is: the runner of the soft-RoCE guest says so.
HAS_DEVICE = os.environ.get("KDIRECT_TEST_VERBS", "0") not in ("", "0")
PROVIDERS = ("shm", "sim", "verbs") if HAS_DEVICE else ("shm", "sim")
collect_ignore = [] if HAS_DEVICE else ["test_verbs.py"]


class End:
    """One side of a connection: a domain with a region of `size` bytes, CQs and a queue pair."""

    def __init__(
        self,
        device: Any,
        size: int = 1 << 16,
        *,
        access: int = ALL,
        cq: Any = None,
        depth: int = 1024,
        **limits: Any,
    ) -> None:
        self.device = device
        self.domain = device.alloc_pd()
        self.send_cq = cq or device.create_cq(depth)
        self.recv_cq = cq or device.create_cq(depth)
        self.memory = Memory.anonymous(size)
        self.region = self.domain.register(self.memory, access)
        self.qp = self.domain.create_qp(self.send_cq, self.recv_cq, **limits)

    @property
    def bytes(self) -> memoryview:
        return memoryview(self.memory)

    @property
    def address(self) -> int:
        return self.region.address

    @property
    def rkey(self) -> int:
        return self.region.rkey


class Rig:
    """Makes ends over one provider, and closes what they used."""

    def __init__(self, provider: str, seed: int) -> None:
        self.provider = provider
        if provider == "shm":
            from kdirect.rdma.shm import ShmDevice

            self.new_device: Callable[[], Any] = ShmDevice
        elif provider == "verbs":
            from kdirect.rdma.verbs_device import VerbsDevice

            self.new_device = VerbsDevice
        else:
            from kdirect.rdma.sim import SimNetwork

            self.network = SimNetwork(seed)
            self.new_device = self.network.device
        self.device = self.new_device()
        self.other_device = self.new_device()

    def end(self, *arguments: Any, **options: Any) -> End:
        return End(self.device, *arguments, **options)

    def pair(
        self, size: int = 1 << 16, a: dict | None = None, b: dict | None = None, **options: Any
    ) -> tuple[End, End]:
        """Two connected ends, of two devices; `a` is the active one."""
        x = End(self.device, **{"size": size, **options, **(a or {})})
        y = End(self.other_device, **{"size": size, **options, **(b or {})})
        join(x, y)
        return x, y

    def close(self) -> None:
        self.device.close()
        self.other_device.close()


def join(a: End, b: End) -> None:
    """Connect `a` (active) to `b` (passive)."""
    b.qp.connect(a.qp.address, False)
    a.qp.connect(b.qp.address, True)
    assert a.qp.state == State.RTS
    assert b.qp.state == State.RTS


def completions(cq: Any, n: int, timeout_ms: int = WAIT_MS) -> list[WorkCompletion]:
    """The next `n` completions of `cq`."""
    got: list[WorkCompletion] = []
    deadline = time.monotonic() + timeout_ms / 1000
    while len(got) < n:
        assert time.monotonic() < deadline, (
            f"{len(got)} of {n} completions after {timeout_ms} ms: {got}"
        )
        cq.wait(1000)
        got += cq.poll(n - len(got))
    return got


def completion(cq: Any) -> WorkCompletion:
    return completions(cq, 1)[0]


# The condition's value as soon as it is true.
eventually = partial(wait_until, timeout_s=WAIT_MS / 1000, every_s=0.002)


@pytest.fixture(params=PROVIDERS)
def rig(request: pytest.FixtureRequest, seed: int) -> Iterator[Rig]:
    """A rig over each provider in turn."""
    yield from _rig(request.param, seed)


@pytest.fixture(params=[p for p in PROVIDERS if p != "sim"])
def threads_rig(request: pytest.FixtureRequest, seed: int) -> Iterator[Rig]:
    """A rig over each provider that more than one thread may use at a time."""
    yield from _rig(request.param, seed)


@pytest.fixture
def shm_rig(seed: int) -> Iterator[Rig]:
    """A rig over shm, for what only real memory and processes show."""
    yield from _rig("shm", seed)


def _rig(provider: str, seed: int) -> Iterator[Rig]:
    try:
        made = Rig(provider, seed)
    except (ImportError, KdirectError, OSError) as e:
        pytest.skip(f"{provider} cannot run here: {e}")
    yield made
    made.close()


class PeerProcess:
    """Another process that runs tests/rdma/peer.py; ``peer.run(code, **names)`` executes Python
    there.

    The code sees what peer.py has and what earlier code left; the value of its last line comes back
    if that is an expression.
    """

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("peer.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        self._lock = threading.Lock()

    @property
    def pid(self) -> int:
        return self.process.pid

    def start(self, code: str, **names: Any) -> None:
        """Begin; `finish` brings the value."""
        data = pickle.dumps((code, names))
        assert self.process.stdin is not None
        self.process.stdin.write(struct.pack("<I", len(data)) + data)
        self.process.stdin.flush()

    def finish(self) -> Any:
        assert self.process.stdout is not None
        head = self.process.stdout.read(4)
        assert len(head) == 4, f"the peer process ended (status {self.process.poll()})"
        ok, value = pickle.loads(self.process.stdout.read(struct.unpack("<I", head)[0]))
        assert ok, f"in the peer process:\n{value}"
        return value

    def run(self, code: str, **names: Any) -> Any:
        with self._lock:
            self.start(code, **names)
            return self.finish()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        self.process.kill()
        self.process.wait(10)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                pass


@pytest.fixture
def peer_process() -> Iterator[Callable[[], PeerProcess]]:
    """``peer_process()`` starts one; all are killed after the test."""
    started: list[PeerProcess] = []

    def start() -> PeerProcess:
        started.append(PeerProcess())
        return started[-1]

    yield start
    for process in started:
        process.end()


def join_process(a: End, peer: PeerProcess, **options: Any) -> tuple[int, int]:
    """Connect `a` (active) to a new end `b` in `peer` (passive); (address, rkey) of b's region."""
    b_address, address, rkey = peer.run(
        "b = make_end(**options); b.qp.connect(a_address, False);"
        " (b.qp.address, b.address, b.rkey)",
        options=options,
        a_address=a.qp.address,
    )
    a.qp.connect(b_address, True)
    return address, rkey
