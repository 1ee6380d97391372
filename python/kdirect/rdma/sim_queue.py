"""Queues of the sim provider: how one request after another is executed, in virtual time.

Law of the room: see sim.py.  Queues know the fabric (time, chance, what is in flight), the process
that they belong to and the regions of their protection domain; they know neither the device nor
the network that made them.

A queue pair has at most one event of its own under way that executes something (`_pumping`), so its
requests keep their order.  Completions are events of their own and keep their order too.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections import deque
from collections.abc import Callable
from typing import Protocol

from kdirect.errors import (
    ClosedError,
    QueueFullError,
    QueuePairError,
    RdmaError,
    TransportError,
)
from kdirect.rdma.contract import (
    Access,
    CompletionQueue,
    Opcode,
    QueuePair,
    State,
    Status,
    WorkCompletion,
)
from kdirect.rdma.sim_fabric import Half, SimFabric, SimMemoryRegion, SimProcess, SimRegions
from kdirect.rdma.sim_work import FILLS_LOCAL, OPCODES, REMOTE_NEED, Receive, Request

RNR_RETRY_NS = 100_000
_U64 = struct.Struct("=Q")


class Schedule(Protocol):
    """Decides what happens where a simulated process would wait.

    A test passes one to `SimNetwork.device` to let other simulated processes run there.  Without
    one, `wait` steps the network itself and `poll` only looks.
    """

    def wait(self, queue: SimCompletionQueue, timeout_ms: float) -> bool:
        """Called by `queue.wait` before it looks.  Return False to let the queue step the network.
        Return True after giving way until `queue.has_news`, or until `timeout_ms` (-1: none) of
        virtual time have passed; the queue then looks once and returns what it finds."""

    def poll_found_nothing(self, queue: SimCompletionQueue) -> bool:
        """Called when a poll found nothing.  Return True to make the queue look once more, for
        example after giving way until `queue.has_news`."""

    def signalled(self, queue: SimCompletionQueue) -> None:
        """Called when a completion has arrived in `queue` or overrun it, and by `queue.wake`."""


class SimCompletionQueue(CompletionQueue):
    """See CompletionQueue.  Overrun (more completions than `depth`) breaks the queue, as on
    hardware.

    Queue pairs attach themselves with `attach` and report with `push` and `ended`.
    """

    def __init__(
        self, fabric: SimFabric, process: SimProcess, depth: int, schedule: Schedule | None = None
    ) -> None:
        super().__init__(depth)
        self.process = process
        self._fabric = fabric
        self._schedule = schedule
        self._ready: deque[tuple[WorkCompletion, Callable[[], None]]] = deque()
        self._users: set[SimQueuePair] = set()
        self._errors = 0
        self._woken = False
        self._armed = False
        self._overrun = False
        self._closed = False
        self._event_fd = -1

    # -- for queue pairs ---------------------------------------------------------------------------
    def attach(self, qp: SimQueuePair) -> None:
        self._users.add(qp)

    def push(self, completion: WorkCompletion, polled: Callable[[], None]) -> None:
        """A completion arrives; `polled` is called when the user takes it."""
        if len(self._ready) < self.depth:
            self._ready.append((completion, polled))
            self._signal()
        else:
            self._overrun = True
            for qp in sorted(self._users, key=lambda qp: qp.qp_num):
                qp.fail()
        if self._schedule is not None:
            self._schedule.signalled(self)

    def ended(self) -> None:
        """A queue pair of this queue went to ERROR: whoever waits is told."""
        self._errors += 1
        self._signal()

    def _signal(self) -> None:
        if self._armed:
            self._armed = False
            self.process.counters["wakeups"] += 1
            os.eventfd_write(self._event_fd, 1)

    # -- for users ---------------------------------------------------------------------------------
    @property
    def has_news(self) -> bool:
        """Whether `wait` would return True at once: a completion is there, or a queue pair went to
        ERROR."""
        return bool(self._ready or self._errors)

    @property
    def woken(self) -> bool:
        """Whether `wake` was called since the last `wait`."""
        return self._woken

    def poll(self, n: int = 16) -> list[WorkCompletion]:
        out = self._take(n)
        if not out and self._schedule is not None and self._schedule.poll_found_nothing(self):
            out = self._take(n)
        return out

    def _take(self, n: int) -> list[WorkCompletion]:
        self._check()
        if self._fabric.autorun:
            self._fabric.run_until_idle()
        if self._overrun:
            raise RdmaError(
                "completion queue overrun",
                hint="make the queue at least as deep as the sum of its queue pairs' depths",
            )
        out = []
        while self._ready and len(out) < n:
            completion, polled = self._ready.popleft()
            polled()
            out.append(completion)
        return out

    def wait(self, timeout_ms: float = -1, spin_us: float = 0) -> bool:
        """Steps the network until something is ready or `timeout_ms` of virtual time have passed;
        with a schedule that takes the wait over, looks once."""
        self._check()
        fabric = self._fabric
        if self._schedule is not None and self._schedule.wait(self, timeout_ms):
            timeout_ms = 0
        deadline = None if timeout_ms < 0 else fabric.now_ns + int(timeout_ms * 1_000_000)
        while True:
            if self._woken:
                self._woken = False
                return False
            if self.has_news:
                self._errors = 0
                return True
            due = fabric.next_event_ns
            if deadline is not None and (due is None or due > deadline):
                fabric.now_ns = deadline
                return False
            if not fabric.step():
                raise RdmaError(
                    "this wait would last for ever: nothing is left to happen in the network",
                    hint="wait with a timeout, or post something first",
                )

    def fileno(self) -> int:
        self._check()
        if self._event_fd < 0:
            self._event_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        return self._event_fd

    def arm(self) -> bool:
        try:
            os.eventfd_read(self.fileno())
        except BlockingIOError:
            pass
        self._armed = True
        there = self.has_news
        self._errors = 0
        return there

    def wake(self) -> None:
        self._check()
        self._woken = True
        self._signal()
        if self._schedule is not None:
            self._schedule.signalled(self)

    def close(self) -> None:
        if self._closed:
            return
        if any(not qp.closed for qp in self._users):
            raise RdmaError(
                "the completion queue still serves queue pairs", hint="close the queue pairs first"
            )
        self._closed = True
        if self._event_fd >= 0:
            os.close(self._event_fd)
            self._event_fd = -1

    def _check(self) -> None:
        self.process.check()
        if self._fabric.failure is not None:
            raise self._fabric.failure
        if self._closed:
            raise ClosedError("the completion queue is closed", hint="create another")


class SimQueuePair(QueuePair):
    """See QueuePair."""

    def __init__(
        self,
        fabric: SimFabric,
        process: SimProcess,
        regions: SimRegions,
        send_cq: SimCompletionQueue,
        recv_cq: SimCompletionQueue,
        max_send_wr: int,
        max_recv_wr: int,
        max_send_bytes: int,
        rnr_timeout_ms: float,
        on_close: Callable[[SimQueuePair], None],
    ) -> None:
        super().__init__(fabric.new_qp_num(), send_cq, recv_cq)
        self._fabric = fabric
        self._process = process
        self._regions = regions
        self._on_close = on_close
        self._queues = (send_cq, recv_cq)
        self._limits = (max_send_wr, max_recv_wr, max_send_bytes)
        self._rnr_timeout_ns = int(rnr_timeout_ms * 1_000_000)
        self._state = State.INIT
        self._token = fabric.random.randbytes(16)
        self._expected: bytes | None = None
        self._peer: SimQueuePair | None = None
        self.closed = False
        self._dead = False
        self._requests: deque[Request] = deque()  # posted, not executed
        self._executed: deque[Request] = deque()  # executed, not completed
        self._receives: deque[Receive] = deque()
        self._send_outstanding = 0
        self._recv_outstanding = 0
        self._pumping = False
        fabric.endpoints[self._token] = self
        send_cq.attach(self)
        recv_cq.attach(self)

    # -- connection --------------------------------------------------------------------------------
    @property
    def state(self) -> int:
        return self._state

    @property
    def address(self) -> bytes:
        self._check()
        return b"SIM1" + self._token

    def connect(self, peer_address: bytes, active: bool) -> None:
        self._check()
        peer_address = bytes(peer_address)
        if len(peer_address) != 20 or peer_address[:4] != b"SIM1":
            raise TransportError(
                "not the address of a sim queue pair", hint="both ends must use the same transport"
            )
        if self._state != State.INIT or self._expected is not None:
            raise QueuePairError(
                f"queue pair {self.qp_num} was connected before",
                hint="create another; a queue pair connects once",
            )
        peer = self._fabric.endpoints.get(peer_address[4:])
        if peer is None or peer.closed or peer._dead:
            raise TransportError(
                "the peer's queue pair is not on this network", hint="ask for a new address"
            )
        self._expected = peer._token
        if not active:
            return
        if peer._expected != self._token or peer._state != State.INIT:
            self.fail()
            raise TransportError(
                f"queue pair {peer.qp_num} refused the connection: it expects another peer or was"
                " connected",
                hint="exchange new addresses and connect the passive side first",
            )
        self._peer, peer._peer = peer, self
        self._state = peer._state = State.RTS

    # -- posting -----------------------------------------------------------------------------------
    def raw_post(
        self,
        op: str,
        wr_id: int,
        local_address: int,
        lkey: int,
        length: int,
        remote_address: int,
        rkey: int,
        arg0: int,
        arg1: int,
    ) -> None:
        self._process.check()
        if op == "recv":
            self._post_recv(wr_id, local_address, lkey, length)
            return
        max_send_wr, _, max_send_bytes = self._limits
        if self._state != State.RTS:
            raise QueuePairError(
                f"queue pair {self.qp_num} is not connected", hint="open a new connection"
            )
        if self._send_outstanding >= max_send_wr:
            raise QueueFullError(
                f"the send queue of queue pair {self.qp_num} is full", hint="poll completions first"
            )
        if (
            length > 1 << 31
            or (op == "send" and length > max_send_bytes)
            or (op in ("fetch_add", "compare_swap") and remote_address % 8)
        ):
            raise RdmaError(
                "malformed work request", hint="check lengths and the 8-byte alignment of atomics"
            )
        request = Request(op, wr_id, local_address, lkey, length, remote_address, rkey, arg0, arg1)
        region = self._regions.find(
            lkey, local_address, length, Access.LOCAL_WRITE if op in FILLS_LOCAL else 0
        )
        if region is not None and length:
            if op in FILLS_LOCAL and self._fabric.faults.poison:
                region.view(local_address, length)[:] = self._fabric.random.randbytes(length)
            request.checksum = zlib.crc32(region.view(local_address, length))
        self._send_outstanding += 1
        self._requests.append(request)
        self._pump(self._fabric.delay())

    def _post_recv(self, wr_id: int, local_address: int, lkey: int, length: int) -> None:
        if self._state not in (State.INIT, State.RTS):
            raise QueuePairError(
                f"queue pair {self.qp_num} is in error", hint="open a new connection"
            )
        if self._recv_outstanding >= self._limits[1]:
            raise QueueFullError(
                f"the receive queue of queue pair {self.qp_num} is full",
                hint="poll completions first",
            )
        self._recv_outstanding += 1
        checksum = self._checksum(local_address, lkey, length)
        self._receives.append(Receive(wr_id, local_address, lkey, length, checksum))

    def _checksum(self, address: int, lkey: int, length: int) -> int | None:
        region = self._regions.find(lkey, address, length, 0) if length else None
        return None if region is None else zlib.crc32(region.view(address, length))

    def _unchanged(self, what: str, item: Request | Receive) -> None:
        if item.checksum is not None and item.length:
            now = self._checksum(item.local, item.lkey, item.length)
            if now is not None and now != item.checksum:
                self._fabric.fail(
                    f"the local buffer of {what} {item.wr_id} on queue pair {self.qp_num} changed"
                    " before its completion"
                )

    # -- execution ---------------------------------------------------------------------------------
    def _pump(self, delay_ns: int) -> None:
        if not self._pumping and self._requests:
            self._pumping = True
            self._fabric.call_later(delay_ns, self._execute)

    def _execute(self) -> None:
        """The next request leaves: it is lost, waits for its receiver, or is performed."""
        self._pumping = False
        if self._state != State.RTS or not self._requests:
            return
        request, peer, fabric = self._requests[0], self._peer, self._fabric
        assert peer is not None
        self._unchanged(request.op, request)
        if (self._process.name, peer._process.name) in fabric.parted:
            self._pumping = True  # nothing of this queue pair overtakes it
            fabric.waiting.append(self)
            return
        needs_receive = request.op in ("send", "write_imm")
        # A loopback has no wire to lose.
        if peer._process is not self._process and fabric.chance(fabric.faults.disconnect):
            if fabric.random.random() < 0.5 and (peer._receives or not needs_receive):
                self._perform(request, peer)  # it happened, but nobody is told
            self._complete_head(request, Status.RETRY_EXC_ERR)
            return
        if needs_receive and not self._receiver_ready(request, peer):
            return
        hold = self.qp_num in fabric.hold_next and request.op in REMOTE_NEED
        torn = (
            request.op in ("read", "write", "write_imm")
            and request.torn_at > 0
            and (hold or fabric.chance(fabric.faults.tear))
        )
        if hold:
            fabric.hold_next.discard(self.qp_num)
        status = self._perform(request, peer, torn=torn, held=hold)
        if status is not None:
            self._complete_head(request, status)

    def go_on(self) -> None:
        """Its device is joined with its peer's again."""
        self._pumping = False
        self._pump(self._fabric.delay())

    def _receiver_ready(self, request: Request, peer: SimQueuePair) -> bool:
        """Whether the peer can take this request now.  If not, it is tried again later, or has
        completed with WC_RNR_RETRY_EXC_ERR."""
        fabric = self._fabric
        if request.rnr_deadline is None:
            if fabric.chance(fabric.faults.rnr):
                request.receiver_slow_until = fabric.now_ns + fabric.random.randint(
                    0, 2 * max(1, self._rnr_timeout_ns)
                )
            request.rnr_deadline = fabric.now_ns + self._rnr_timeout_ns
        if peer._receives and fabric.now_ns >= request.receiver_slow_until:
            return True
        if fabric.now_ns >= request.rnr_deadline:
            self._complete_head(request, Status.RNR_RETRY_EXC_ERR)
        else:
            self._pump(min(RNR_RETRY_NS, request.rnr_deadline - fabric.now_ns))
        return False

    def _perform(
        self, request: Request, peer: SimQueuePair, *, torn: bool = False, held: bool = False
    ) -> int | None:
        """Carry out the request; its status.  None: its second half is in flight, and completes the
        request when it lands."""
        op, length = request.op, request.length
        local = target = None
        if length:
            local = self._regions.find(
                request.lkey, request.local, length, Access.LOCAL_WRITE if op in FILLS_LOCAL else 0
            )
            if local is None:
                return Status.LOC_PROT_ERR
            if op != "send":
                target = peer._regions.find(request.rkey, request.remote, length, REMOTE_NEED[op])
                if target is None:
                    return Status.REM_ACCESS_ERR
        if op == "send":
            return peer._deliver_send(bytes(local.view(request.local, length)) if local else b"")
        if local is None or target is None:  # nothing to move
            return self._arrive(request, peer)
        there, here = target.view(request.remote, length), local.view(request.local, length)
        if op in ("fetch_add", "compare_swap"):
            self._perform_atomic(request, there, here)
            return Status.SUCCESS
        if torn:
            self._perform_torn(request, peer, local, target, held)
            return None
        if op == "read":
            self._land(request, here, bytes(there))
        else:
            there[:] = here
        return self._arrive(request, peer)

    def _perform_atomic(self, request: Request, there: memoryview, here: memoryview) -> None:
        (old,) = _U64.unpack(there)
        if request.op == "fetch_add":
            there[:] = _U64.pack((old + request.arg0) % 2**64)
        elif old == request.arg0:
            there[:] = _U64.pack(request.arg1)
        self._land(request, here, _U64.pack(old))

    def _perform_torn(
        self,
        request: Request,
        peer: SimQueuePair,
        local: SimMemoryRegion,
        target: SimMemoryRegion,
        held: bool,
    ) -> None:
        """The first half of a READ or WRITE now, the second half after a delay, or when it is
        released if it is `held`.  With the fault that breaks the contract's rule of a WRITE's last
        bytes, the halves change places."""
        op, length = request.op, request.length
        there, here = target.view(request.remote, length), local.view(request.local, length)
        source, destination = (there, here) if op == "read" else (here, there)
        middle = request.torn_at
        early, late = slice(0, middle), slice(middle, length)
        if op != "read" and self._fabric.chance(self._fabric.faults.disorder):
            early, late = late, early
        first, rest = bytes(source[early]), bytes(source[late])
        if op != "read":
            destination[early] = first

        def finish() -> None:
            alive = self._state == State.RTS
            if op == "read" and alive and not local.ended:
                self._land(request, here, first + bytes(source[middle:]))
            elif op != "read" and held and not self._dead:
                # A hung process goes on with its copy, whatever happened meanwhile.
                target.view(request.remote, length)[late] = rest
            elif op != "read" and alive:
                self._unchanged(op, request)
                destination[late] = rest
            if alive:
                self._pumping = False
                self._complete_head(request, self._arrive(request, peer))

        half = Half(target, finish, held)
        fabric = self._fabric
        fabric.halves.append(half)
        self._pumping = True  # nothing of this queue pair overtakes it
        if not held:
            fabric.call_later(fabric.delay(), lambda: fabric.finish(half))

    def _arrive(self, request: Request, peer: SimQueuePair) -> int:
        if request.op == "write_imm":
            # The peer may have gone, and its receives been flushed, between the halves.
            if not peer._receives:
                return Status.RETRY_EXC_ERR
            peer._deliver(Opcode.RECV_RDMA_WITH_IMM, request.length, request.arg0 & 0xFFFFFFFF)
        return Status.SUCCESS

    def _land(self, request: Request, here: memoryview, data: bytes) -> None:
        here[:] = data
        request.checksum = zlib.crc32(data)

    def _deliver(self, opcode: int, length: int, imm: int | None) -> None:
        receive = self._receives.popleft()
        self._unchanged("RECV", receive)
        self._process.counters["receives"] += 1
        self._push_recv(
            WorkCompletion(receive.wr_id, Status.SUCCESS, opcode, length, imm, self.qp_num)
        )

    def _deliver_send(self, data: bytes) -> int:
        """A SEND arrives here; the status that its sender gets."""
        receive = self._receives[0]
        if len(data) > receive.length:
            self._receives.popleft()
            return self._refuse(receive, Status.LOC_LEN_ERR)
        if data:
            region = self._regions.find(receive.lkey, receive.local, len(data), Access.LOCAL_WRITE)
            if region is None:
                self._receives.popleft()
                return self._refuse(receive, Status.LOC_PROT_ERR)
            self._unchanged("RECV", receive)
            receive.checksum = None
            region.view(receive.local, len(data))[:] = data
        self._deliver(Opcode.RECV, len(data), None)
        return Status.SUCCESS

    def _refuse(self, receive: Receive, status: int) -> int:
        self._push_recv(WorkCompletion(receive.wr_id, status, Opcode.RECV, 0, None, self.qp_num))
        self.fail()
        return Status.REM_INV_REQ_ERR

    # -- completion --------------------------------------------------------------------------------
    def _complete_head(self, request: Request, status: int) -> None:
        self._requests.popleft()
        self._executed.append(request)
        if status == Status.SUCCESS:
            self._count(request)
        self._fabric.call_later(self._fabric.delay(), lambda: self._complete(request, status))
        if status == Status.SUCCESS:
            self._pump(self._fabric.delay())
        else:
            self.fail(keep=request)

    def _complete(self, request: Request, status: int) -> None:
        """Completions leave in order: one that is due too early delivers those before it first."""
        while request in self._executed:
            head = self._executed.popleft()
            if not self._dead:
                self._unchanged(head.op, head)
                self._push_send(head, status if head is request else Status.SUCCESS)

    def _push_send(self, request: Request, status: int) -> None:
        def polled() -> None:
            self._send_outstanding -= 1

        length = request.length if status == Status.SUCCESS else 0
        self._queues[0].push(
            WorkCompletion(request.wr_id, status, OPCODES[request.op], length, None, self.qp_num),
            polled,
        )

    def _push_recv(self, completion: WorkCompletion) -> None:
        def polled() -> None:
            self._recv_outstanding -= 1

        self._queues[1].push(completion, polled)

    def _count(self, request: Request) -> None:
        counters = self._process.counters
        if request.op == "read":
            counters["reads"] += 1
            counters["read_bytes"] += request.length
        elif request.op in ("write", "write_imm"):
            counters["writes"] += 1
            counters["write_bytes"] += request.length
        else:
            counters["sends" if request.op == "send" else "atomics"] += 1

    # -- the end -----------------------------------------------------------------------------------
    def fail(self, keep: Request | None = None) -> None:
        """To ERROR: flush what is outstanding; the peer follows after a delay."""
        if self._state == State.ERROR:
            return
        self._state = State.ERROR

        def flush() -> None:
            if self._dead:
                return
            if keep is None and self._executed:
                self._complete(self._executed[-1], Status.SUCCESS)  # they had happened
            while self._requests:
                self._push_send(self._requests.popleft(), Status.WR_FLUSH_ERR)
            while self._receives:
                receive = self._receives.popleft()
                self._push_recv(
                    WorkCompletion(
                        receive.wr_id, Status.WR_FLUSH_ERR, Opcode.RECV, 0, None, self.qp_num
                    )
                )
            for cq in dict.fromkeys(self._queues):
                cq.ended()

        if keep is None:
            flush()
        else:  # after the completion that failed
            self._fabric.call_later(self._fabric.faults.delay_ns[1] + 1, flush)
        if self._peer is not None:
            self._fabric.call_later(self._fabric.delay(), self._peer.fail)

    def die(self) -> None:
        self._dead = True
        self._requests.clear()
        self._receives.clear()
        self._executed.clear()
        self.fail()
        self.closed = True

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        if self._process.forked:
            return
        self.fail()
        # Nobody hears of what it had under way when it failed, and its buffers may go.
        self._requests.clear()
        self._executed.clear()
        self._fabric.endpoints.pop(self._token, None)
        self._on_close(self)

    def _check(self) -> None:
        self._process.check()
        if self.closed:
            raise QueuePairError(f"queue pair {self.qp_num} is closed", hint="create another")
