"""Queue pairs of the sim provider: how one request after another comes to pass, in virtual time.

Law of the room: see sim.py.  A queue pair has at most one event of its own under way that executes
something (`_pumping`), so its requests keep their order; completions are events of their own and
keep it too.
"""

from __future__ import annotations

import struct
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kdirect.errors import QueueFullError, QueuePairError, RdmaError, TransportError
from kdirect.rdma.contract import Access, Opcode, QueuePair, State, Status, WorkCompletion

if TYPE_CHECKING:
    from kdirect.rdma.sim import SimCompletionQueue, SimMemoryRegion, SimProtectionDomain

RNR_RETRY_NS = 100_000
_U64 = struct.Struct("=Q")
_OPCODES = {
    "read": Opcode.RDMA_READ,
    "write": Opcode.RDMA_WRITE,
    "write_imm": Opcode.RDMA_WRITE,
    "send": Opcode.SEND,
    "fetch_add": Opcode.FETCH_ADD,
    "compare_swap": Opcode.COMP_SWAP,
}
_REMOTE_NEED = {
    "read": Access.REMOTE_READ,
    "write": Access.REMOTE_WRITE,
    "write_imm": Access.REMOTE_WRITE,
    "fetch_add": Access.REMOTE_ATOMIC,
    "compare_swap": Access.REMOTE_ATOMIC,
}
_FILLS_LOCAL = ("read", "fetch_add", "compare_swap")


@dataclass(slots=True)
class _Request:
    op: str
    wr_id: int
    local: int
    lkey: int
    length: int
    remote: int
    rkey: int
    arg0: int
    arg1: int
    checksum: int | None = None
    rnr_deadline: int | None = None
    receiver_slow_until: int = 0


@dataclass(slots=True)
class _Receive:
    wr_id: int
    local: int
    lkey: int
    length: int
    checksum: int | None = None


@dataclass(slots=True)
class Half:
    """The second half of a torn operation, in flight under `region`."""

    region: SimMemoryRegion
    finish: Callable[[], None]
    held: bool = False
    done: bool = field(default=False)


class SimQueuePair(QueuePair):
    """See QueuePair."""

    def __init__(
        self,
        domain: SimProtectionDomain,
        send_cq: SimCompletionQueue,
        recv_cq: SimCompletionQueue,
        max_send_wr: int,
        max_recv_wr: int,
        max_send_bytes: int,
        rnr_timeout_ms: float,
    ) -> None:
        network = domain._device._network
        network._last_qp_num += 1
        super().__init__(network._last_qp_num, send_cq, recv_cq)
        self._domain = domain
        self._device = domain._device
        self._network = network
        self._limits = (max_send_wr, max_recv_wr, max_send_bytes)
        self._rnr_timeout_ns = int(rnr_timeout_ms * 1_000_000)
        self._state = State.INIT
        self._token = network.random.randbytes(16)
        self._expected: bytes | None = None
        self._peer: SimQueuePair | None = None
        self._closed = False
        self._dead = False
        self._requests: deque[_Request] = deque()  # posted, not executed
        self._executed: deque[_Request] = deque()  # executed, not completed
        self._receives: deque[_Receive] = deque()
        self._send_outstanding = 0
        self._recv_outstanding = 0
        self._pumping = False
        network._qps[self._token] = self
        send_cq._users.add(self)
        recv_cq._users.add(self)

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
        peer = self._network._qps.get(peer_address[4:])
        if peer is None or peer._closed or peer._dead:
            raise TransportError(
                "the peer's queue pair is not on this network", hint="ask for a new address"
            )
        self._expected = peer._token
        if not active:
            return
        if peer._expected != self._token or peer._state != State.INIT:
            self._fail()
            raise TransportError(
                f"queue pair {peer.qp_num} refused the connection: it expects another peer or was connected",
                hint="exchange addresses anew and connect the passive side first",
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
        self._device._check_process()
        max_send_wr, max_recv_wr, max_send_bytes = self._limits
        if op == "recv":
            if self._state not in (State.INIT, State.RTS):
                raise QueuePairError(
                    f"queue pair {self.qp_num} is in error", hint="open a new connection"
                )
            if self._recv_outstanding >= max_recv_wr:
                raise QueueFullError(
                    f"the receive queue of queue pair {self.qp_num} is full",
                    hint="poll completions first",
                )
            self._recv_outstanding += 1
            self._receives.append(
                _Receive(
                    wr_id, local_address, lkey, length, self._checksum(local_address, lkey, length)
                )
            )
            return
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
        request = _Request(op, wr_id, local_address, lkey, length, remote_address, rkey, arg0, arg1)
        region = self._domain._find(
            lkey, local_address, length, Access.LOCAL_WRITE if op in _FILLS_LOCAL else 0
        )
        if region is not None and length:
            if op in _FILLS_LOCAL and self._network.faults.poison:
                region._view(local_address, length)[:] = self._network.random.randbytes(length)
            request.checksum = zlib.crc32(region._view(local_address, length))
        self._send_outstanding += 1
        self._requests.append(request)
        self._pump(self._network._delay())

    def _checksum(self, address: int, lkey: int, length: int) -> int | None:
        region = self._domain._find(lkey, address, length, 0) if length else None
        return None if region is None else zlib.crc32(region._view(address, length))

    def _unchanged(self, what: str, item: _Request | _Receive) -> None:
        if item.checksum is not None and item.length:
            now = self._checksum(item.local, item.lkey, item.length)
            if now is not None and now != item.checksum:
                self._network._fail(
                    f"the local buffer of {what} {item.wr_id} on queue pair {self.qp_num} changed before its completion"
                )

    # -- execution ---------------------------------------------------------------------------------
    def _pump(self, delay_ns: int) -> None:
        if not self._pumping and self._requests:
            self._pumping = True
            self._network.call_later(delay_ns, self._execute)

    def _execute(self) -> None:
        self._pumping = False
        if self._state != State.RTS or not self._requests:
            return
        request, peer, network = self._requests[0], self._peer, self._network
        assert peer is not None
        self._unchanged(request.op, request)
        needs_receive = request.op in ("send", "write_imm")
        if peer._device is not self._device and network._chance(
            network.faults.disconnect
        ):  # a loopback has no wire to lose
            if network.random.random() < 0.5 and (peer._receives or not needs_receive):
                self._perform(request, peer)  # it happened, but nobody is told
            self._complete_head(request, Status.RETRY_EXC_ERR)
            return
        if needs_receive:
            if request.rnr_deadline is None and network._chance(network.faults.rnr):
                request.receiver_slow_until = network.now_ns + network.random.randint(
                    0, 2 * max(1, self._rnr_timeout_ns)
                )
            if request.rnr_deadline is None:
                request.rnr_deadline = network.now_ns + self._rnr_timeout_ns
            if not peer._receives or network.now_ns < request.receiver_slow_until:
                if network.now_ns >= request.rnr_deadline:
                    self._complete_head(request, Status.RNR_RETRY_EXC_ERR)
                else:
                    self._pump(min(RNR_RETRY_NS, request.rnr_deadline - network.now_ns))
                return
        hold = self.qp_num in network._hold_next and request.op in _REMOTE_NEED
        torn = (
            request.op in ("read", "write", "write_imm")
            and request.length > 1
            and (hold or network._chance(network.faults.tear))
        )
        if hold:
            network._hold_next.discard(self.qp_num)
        status = self._perform(request, peer, torn=torn, held=hold)
        if status is not None:
            self._complete_head(request, status)

    def _perform(
        self, request: _Request, peer: SimQueuePair, *, torn: bool = False, held: bool = False
    ) -> int | None:
        """Carry out the request; its status, or None: its second half is in flight and completes
        it."""
        op, length = request.op, request.length
        local = target = None
        if length:
            local = self._domain._find(
                request.lkey, request.local, length, Access.LOCAL_WRITE if op in _FILLS_LOCAL else 0
            )
            if local is None:
                return Status.LOC_PROT_ERR
            if op != "send":
                target = peer._domain._find(request.rkey, request.remote, length, _REMOTE_NEED[op])
                if target is None:
                    return Status.REM_ACCESS_ERR
        if op == "send":
            return peer._deliver_send(bytes(local._view(request.local, length)) if local else b"")
        if local is None or target is None:  # nothing to move
            return self._arrive(request, peer)
        there, here = target._view(request.remote, length), local._view(request.local, length)
        if op in ("fetch_add", "compare_swap"):
            (old,) = _U64.unpack(there)
            if op == "fetch_add":
                there[:] = _U64.pack((old + request.arg0) % 2**64)
            elif old == request.arg0:
                there[:] = _U64.pack(request.arg1)
            self._land(request, here, _U64.pack(old))
            return Status.SUCCESS
        source, destination = (there, here) if op == "read" else (here, there)
        cut = length // 2 if torn else length
        first, rest = bytes(source[:cut]), bytes(source[cut:])
        if op != "read":
            destination[:cut] = first
        if not torn:
            if op == "read":
                self._land(request, here, first)
            return self._arrive(request, peer)

        def finish() -> None:
            alive = self._state == State.RTS
            if op == "read" and alive and not local.ended:
                self._land(request, here, first + bytes(source[cut:]))
            elif op != "read" and held and not self._dead:
                destination[cut:] = (
                    rest  # a hung process goes on with its copy whatever happened meanwhile
                )
            elif op != "read" and alive:
                self._unchanged(op, request)
                destination[cut:] = rest
            if alive:
                self._pumping = False
                self._complete_head(request, self._arrive(request, peer))

        half = Half(target, finish, held)
        self._network._halves.append(half)
        self._pumping = True  # nothing of this queue pair overtakes it
        if not held:
            self._network.call_later(self._network._delay(), lambda: self._network._finish(half))
        return None

    def _arrive(self, request: _Request, peer: SimQueuePair) -> int:
        if request.op == "write_imm":
            if (
                not peer._receives
            ):  # the peer went, and its receives were flushed, between the halves of this request
                return Status.RETRY_EXC_ERR
            peer._deliver(Opcode.RECV_RDMA_WITH_IMM, request.length, request.arg0 & 0xFFFFFFFF)
        return Status.SUCCESS

    def _land(self, request: _Request, here: memoryview, data: bytes) -> None:
        here[:] = data
        request.checksum = zlib.crc32(data)

    def _deliver(self, opcode: int, length: int, imm: int | None) -> None:
        receive = self._receives.popleft()
        self._unchanged("RECV", receive)
        self._device._counters["receives"] += 1
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
            region = self._domain._find(receive.lkey, receive.local, len(data), Access.LOCAL_WRITE)
            if region is None:
                self._receives.popleft()
                return self._refuse(receive, Status.LOC_PROT_ERR)
            self._unchanged("RECV", receive)
            receive.checksum = None
            region._view(receive.local, len(data))[:] = data
        self._deliver(Opcode.RECV, len(data), None)
        return Status.SUCCESS

    def _refuse(self, receive: _Receive, status: int) -> int:
        self._push_recv(WorkCompletion(receive.wr_id, status, Opcode.RECV, 0, None, self.qp_num))
        self._fail()
        return Status.REM_INV_REQ_ERR

    # -- completion --------------------------------------------------------------------------------
    def _complete_head(self, request: _Request, status: int) -> None:
        self._requests.popleft()
        self._executed.append(request)
        if status == Status.SUCCESS:
            self._count(request)
        self._network.call_later(self._network._delay(), lambda: self._complete(request, status))
        if status == Status.SUCCESS:
            self._pump(self._network._delay())
        else:
            self._fail(keep=request)

    def _complete(self, request: _Request, status: int) -> None:
        """Completions leave in order: one that became due too early takes those before it along."""
        while request in self._executed:
            head = self._executed.popleft()
            if not self._dead:
                self._unchanged(head.op, head)
                self._push_send(head, status if head is request else Status.SUCCESS)

    def _push_send(self, request: _Request, status: int) -> None:
        def polled() -> None:
            self._send_outstanding -= 1

        length = request.length if status == Status.SUCCESS else 0
        self.send_cq._push(
            WorkCompletion(request.wr_id, status, _OPCODES[request.op], length, None, self.qp_num),
            polled,
        )

    def _push_recv(self, completion: WorkCompletion) -> None:
        def polled() -> None:
            self._recv_outstanding -= 1

        self.recv_cq._push(completion, polled)

    def _count(self, request: _Request) -> None:
        counters = self._device._counters
        if request.op == "read":
            counters["reads"] += 1
            counters["read_bytes"] += request.length
        elif request.op in ("write", "write_imm"):
            counters["writes"] += 1
            counters["write_bytes"] += request.length
        else:
            counters["sends" if request.op == "send" else "atomics"] += 1

    # -- the end -----------------------------------------------------------------------------------
    def _fail(self, keep: _Request | None = None) -> None:
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
            for cq in {id(self.send_cq): self.send_cq, id(self.recv_cq): self.recv_cq}.values():
                cq._errors += 1
                cq._signal()

        if keep is None:
            flush()
        else:  # behind the completion that failed
            self._network.call_later(self._network.faults.delay_ns[1] + 1, flush)
        if self._peer is not None:
            self._network.call_later(self._network._delay(), self._peer._fail)

    def _die(self) -> None:
        self._dead = True
        self._requests.clear()
        self._receives.clear()
        self._executed.clear()
        self._fail()
        self._closed = True

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._device._forked():
            return
        self._fail()
        self._network._qps.pop(self._token, None)
        self._domain._qps.discard(self)
        self._device._qps.discard(self)

    def _check(self) -> None:
        self._device._check_process()
        if self._closed:
            raise QueuePairError(f"queue pair {self.qp_num} is closed", hint="create another")
