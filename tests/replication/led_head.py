"""What a simulated broker grants of its heads to RDMA producers: the room of the broker that does
so (`kdirect.broker.produce_access`), over an event loop that the schedule steps.

Owns: the loop, the queue pairs of producers, and what they were granted; all of it ends with the
process.  What a thread would do is done on the loop, whole, and heard of at another moment.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from kdirect.broker.appends import Appends
from kdirect.broker.grants import GrantTable, Peer
from kdirect.broker.head_access import HeadAccess
from kdirect.broker.produce_access import ProduceAccess
from kdirect.broker.queue_pairs import close_domain
from kdirect.errors import NotEnoughReplicasError, NotLeaderError
from kdirect.format import layout
from kdirect.log.manager import LogManager
from kdirect.log.partition import Partition
from kdirect.rdma.contract import Access, Memory
from kdirect.rdma.sim import SimNetwork

IN_FLIGHT = 8
LONGEST_S = 1.0  # a timer for a longer time is never over within a schedule
MOST_CALLS = 1_000
CONFIG = {"rdma.produce": True, "rdma.produce.hole.timeout.ms": 20}


class Future:
    """A future without an event loop."""

    def __init__(self) -> None:
        self._done = False
        self._callbacks: list[Callable[[Any], object]] = []

    def done(self) -> bool:
        return self._done

    def set_result(self, result: Any) -> None:
        self._done = True
        for callback in self._callbacks:
            callback(self)

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        self._callbacks.append(callback)


class StepLoop:
    """A `Scheduler`, and the threads.  Time is the network's, but a timer that is the only thing
    left is over."""

    def __init__(self, network: SimNetwork) -> None:
        self._network = network
        self._soon: deque[Callable[[], object]] = deque()
        self._timers: list[tuple[int, int, Callable[[], object]]] = []
        self._numbers = itertools.count()

    def soon(self, callback: Callable[..., object], *args: Any) -> None:
        self._soon.append(partial(callback, *args))

    def later(self, seconds: float, callback: Callable[..., object], *args: Any) -> None:
        if seconds < LONGEST_S:
            due = self._network.now_ns + int(seconds * 1e9)
            heapq.heappush(self._timers, (due, next(self._numbers), partial(callback, *args)))

    def new_future(self) -> Any:
        return Future()

    def on_thread(
        self,
        partition: Any,
        work: Callable[[], Any],
        done: Callable[[Any, BaseException | None], None],
    ) -> None:
        def run() -> None:
            try:
                result, error = work(), None
            except Exception as e:
                result, error = None, e
            self.soon(done, result, error)

        self.soon(run)

    @property
    def is_idle(self) -> bool:
        return not self._soon and not self._timers

    def run(self) -> int:
        """Call what is due; how many calls that were no timers."""
        count = len(self._soon)
        timers = self._timers
        while timers and (timers[0][0] <= self._network.now_ns or not self._soon):
            self._soon.append(heapq.heappop(timers)[2])
        for _ in range(len(self._soon)):
            self._soon.popleft()()
        return count

    def run_until(self, ready: Callable[[], bool]) -> None:
        """What waits is over once `ready`."""
        for _ in range(MOST_CALLS):
            if ready():
                return
            self.run()
        raise AssertionError("the event loop waits for ever")


class LedHead:
    """See the module.  `worker` is stepped by its owner."""

    def __init__(self, network: SimNetwork, device: Any, logs: LogManager, queues: Any) -> None:
        self.loop = StepLoop(network)
        self._send_cq, self._recv_cq, self._worker = queues
        self._engine = SimpleNamespace(transport="sim", device=device, worker=self._worker)
        self._device = device
        self._grants = GrantTable(_release, self.loop.soon)
        self._peers: dict[int, Peer] = {}
        self._numbers = itertools.count(1)
        self._resigned: Any = None
        self._too_few = False
        environment: Any = SimpleNamespace(monotonic=lambda: network.now_ns / 1e9)
        self.access = ProduceAccess(
            logs,
            self._grants,
            CONFIG,
            appends=Appends(
                on_thread=self.loop.on_thread,
                later=self.loop.soon,
                new_future=self.loop.new_future,
            ),
            scheduler=self.loop,
            environment=environment,
            appended=lambda tp: None,
            watched=set(),
        )
        self.access.may_append = self._may_append

    def close(self) -> None:
        """The process is over, and its device closed: what was granted is nobody's."""
        for grant in self._grants:
            self._grants.release_segment(grant)

    # -- the leadership ----------------------------------------------------------------------------

    def lead(self, partition: Partition) -> None:
        self.access.lead(partition)

    def resign(self, partition: Partition) -> None:
        """Nothing is committed any more; the keys end in a while (`end`)."""
        error = NotLeaderError("another broker leads", hint="ask for metadata")
        self._resigned = self.access.resign(partition, error)

    def end(self) -> None:
        """Whatever was granted has ended when this returns."""
        if self._resigned is not None:
            self.loop.run_until(self._resigned.done)

    def count(self, partition: Partition, *, too_few: bool) -> None:
        """Are fewer replicas in sync than ``min.insync.replicas``?  Producers that wait for them
        are told when that begins, and refused while it lasts."""
        began, self._too_few = too_few and not self._too_few, too_few
        if began:
            self.access.too_few(partition)

    def _may_append(self, tp: Any) -> None:
        if self._too_few:
            raise NotEnoughReplicasError("too few replicas are in sync", hint="ask again")

    # -- producers ---------------------------------------------------------------------------------

    def open(self, address: bytes) -> Peer:
        """A queue pair of a producer, as `QueuePairs` opens it."""
        domain = self._device.alloc_pd()
        qp = domain.create_qp(
            self._send_cq,
            self._recv_cq,
            max_send_wr=2 * IN_FLIGHT,
            max_recv_wr=IN_FLIGHT,
            max_send_bytes=4096,
        )
        qp.connect(address, active=False)
        notices = domain.register(
            Memory.anonymous(IN_FLIGHT * layout.NOTICE_BYTES), Access.LOCAL_WRITE
        )
        self._worker.add_peer(qp, IN_FLIGHT, notices)
        number = next(self._numbers)
        peer = Peer(
            connection_id=number,
            connection=number,
            client="producer",
            engine=self._engine,  # type: ignore[arg-type]
            domain=domain,
            qp=qp,
            max_in_flight=IN_FLIGHT,
            ping=None,
            slot_memory=Memory.anonymous(layout.SLOT_BYTES),
            slot_region=None,
        )
        self._peers[qp.qp_num] = peer
        return peer

    def cut(self, qp_num: int) -> bool:
        """Is it a producer's queue pair that the worker has cut?"""
        peer = self._peers.get(qp_num)
        if peer is not None:
            self.loop.soon(self.close_peer, peer)
        return peer is not None

    def close_peer(self, peer: Peer) -> None:
        """A producer is gone, as for `AccessManager`."""
        if self._peers.pop(peer.qp.qp_num, None) is None:
            return
        peer.closed = True
        written = []
        for grant in list(peer.grants.values()):
            if grant.head_access is not None:
                self._worker.retire(grant.file_id, False)
                written.append((grant.head_access, grant.region))
        self._worker.remove_peer(peer.qp.qp_num)
        for grant in list(peer.grants.values()):
            self.access.release(grant, clean=False)
        self.loop.soon(close_domain, peer, written)

    def give_back(self, peer: Peer, file_id: int) -> None:
        grant = peer.grants.get(file_id)
        if grant is not None:
            self.access.release(grant)

    def head_event(self, head: Any) -> bool:
        """The worker's news of a head; was it one that producers write?"""
        ours = isinstance(head.owner, HeadAccess)
        if ours:
            self.loop.soon(self._head_event, head)
        return ours

    def _head_event(self, head: Any) -> None:
        if head.owner is not None:
            self.access.on_head(head)


def _release(segment: Any) -> None:
    segment.release()
