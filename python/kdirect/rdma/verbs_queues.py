"""Completion queues and queue pairs of the verbs provider.

Law of the room: the accounting that the contract promises on top of what the device does.  The
device moves the bytes and orders the completions; here are the depths ("outstanding until polled"),
the sizes (a READ or WRITE beyond the device's largest message is posted in pieces), the end
(flushed requests, sleepers that wake) and the waiting.  What may not enter: pyverbs itself
(`kdirect.rdma.verbs` is its face), registration, sockets.

A CompletionQueue of the contract is one or more of the device's, each with its channel: one more is
made when the queue pairs that use it could together overrun those there are.  So it cannot overrun,
whatever depth the device allows.

Every work request has an entry in its queue pair's FIFO from post to completion.  The device's
wr_id is ``tag << 34 | sequence << 1 | is receive``; a completion is believed only if it is the next
one of its queue pair: a late one of a number used before is dropped.

Locks, in this order: completion queue, queue pair.  `CompletionQueue._lock` guards the device's
queues and what was drained from them; `QueuePair._lock` keeps posts and the destruction of the
device's queue pair apart.  Neither is held while anything blocks.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from kdirect.errors import ClosedError, QueueFullError, QueuePairError, RdmaError, TransportError
from kdirect.rdma import verbs, verbs_link
from kdirect.rdma.contract import CompletionQueue, Opcode, QueuePair, State, Status, WorkCompletion
from kdirect.rdma.verbs_preflight import queue_error

if TYPE_CHECKING:
    from kdirect.rdma.verbs_device import VerbsDevice, VerbsProtectionDomain

log = logging.getLogger("kdirect.rdma.verbs")

MAX_QUEUE = 1 << 20
MAX_LENGTH = 1 << 31
SPARE_PIECES = 64  # send queue entries beyond max_send_wr, for requests that are posted in pieces
FLUSH_TIMEOUT_S = 1.0
_SEQUENCE_MASK = (1 << 33) - 1
_TAG_MASK = (1 << 30) - 1
_OPCODES = {
    "read": int(Opcode.RDMA_READ), "write": int(Opcode.RDMA_WRITE), "write_imm": int(Opcode.RDMA_WRITE), "send": int(Opcode.SEND),
    "fetch_add": int(Opcode.FETCH_ADD), "compare_swap": int(Opcode.COMP_SWAP),
}  # fmt: skip
_LOC_QP_OP_ERR, _REM_OP_ERR = 2, 11  # of ibv_wc_status
# As plain numbers: members of an enum are slow to reach where every request passes.
_INIT, _RTS, _ERROR, _SUCCESS = (
    int(State.INIT),
    int(State.RTS),
    int(State.ERROR),
    int(Status.SUCCESS),
)
_RECV, _RECV_IMM = int(Opcode.RECV), int(Opcode.RECV_RDMA_WITH_IMM)
_INLINE_OPS = frozenset(("write", "write_imm", "send"))
# What a failed receive says about the peer; a device that merely flushes it leaves open which of
# the two it was.
REFUSED_REQUEST = "the device refused a request of its (a key, bounds or access that it was not granted), or it could not be reached"
_FAULTS = {
    int(
        Status.REM_ACCESS_ERR
    ): "it asked for memory that it was not granted (key, bounds or access)",
    int(Status.LOC_LEN_ERR): "it sent more than a receive takes",
    int(Status.REM_INV_REQ_ERR): "it made an invalid request",
    _LOC_QP_OP_ERR: "it sent what no receive could take",
}


class _Entry:
    """A work request from post to completion.  `pieces` of it are still to be completed by the
    device."""

    __slots__ = ("address", "length", "lkey", "op", "pieces", "status", "wr_id")

    def __init__(
        self, wr_id: int, op: str, address: int, length: int, lkey: int, pieces: int
    ) -> None:
        self.wr_id = wr_id
        self.op = op
        self.address = address
        self.length = length
        self.lkey = lkey
        self.pieces = pieces
        self.status = _SUCCESS


class _Shard:
    """One completion queue of the device, with its channel."""

    __slots__ = ("channel", "cq", "fd", "free")

    def __init__(self, cq: Any, channel: Any, fd: int, free: int) -> None:
        self.cq = cq
        self.channel = channel
        self.fd = fd
        self.free = free


class VerbsCompletionQueue(CompletionQueue):
    """See CompletionQueue and the module.  `fileno()` is an epoll descriptor over the channels and
    the wake-up."""

    def __init__(self, device: VerbsDevice, depth: int) -> None:
        super().__init__(depth)
        self._device = device
        self._lock = threading.Lock()
        self._shards: list[_Shard] = []
        self._pairs: dict[int, VerbsQueuePair] = {}  # by number: those with completions to come
        self._ready: deque[tuple[WorkCompletion, VerbsQueuePair, bool]] = deque()
        self._ends: deque[int] = (
            deque()
        )  # queue pairs that went to ERROR since a waiter was last told
        self._woken = False
        self._closed = False
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll = select.epoll()
        self._epoll.register(self._wake_fd, select.EPOLLIN)

    # -- for queue pairs ---------------------------------------------------------------------------
    def _reserve(self, entries: int) -> _Shard:
        """A queue of the device with room for `entries` more completions."""
        self._check()
        with self._lock:
            for shard in self._shards:
                if shard.free >= entries:
                    shard.free -= entries
                    return shard
            context = self._device._context
            size = max(entries, min(self.depth, context.max_cqe))
            if size > context.max_cqe:
                raise RdmaError(
                    f"{entries} completions of one queue pair are more than a completion queue of {self._device.choice.device} holds"
                    f" ({context.max_cqe})",
                    hint="lower max_send_wr or max_recv_wr (rdma.max.in.flight)",
                )
            try:
                channel, fd = context.create_channel()
                try:
                    cq = context.create_cq(size, channel)
                except OSError:
                    context.destroy_channel(channel, fd)
                    raise
            except OSError as e:
                raise queue_error(e.errno or 0, "a completion queue", f"{size} entries") from e
            shard = _Shard(cq, channel, fd, size - entries)
            self._epoll.register(fd, select.EPOLLIN)
            self._shards.append(shard)
        self._signal()  # who sleeps has asked the others for an event, not this one
        return shard

    def _attach(self, qp: VerbsQueuePair) -> None:
        with self._lock:
            self._pairs[qp.qp_num] = qp

    def _release(self, qp: VerbsQueuePair, shard: _Shard, entries: int) -> None:
        """`qp` is destroyed; what it had outstanding was pushed by `_flush_into`."""
        with self._lock:
            if self._pairs.get(qp.qp_num) is qp:
                del self._pairs[qp.qp_num]
            shard.free += entries

    def _ended(self, qp_num: int) -> None:
        """A queue pair went to ERROR: whoever sleeps here is told."""
        self._ends.append(qp_num)
        self._signal()

    def _signal(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            os.eventfd_write(self._wake_fd, 1)

    # -- taking ------------------------------------------------------------------------------------
    def _drain(self, n: int) -> None:
        """Move up to `n` completions of each device queue to `_ready`.  Under the lock."""
        context = self._device._context
        for shard in self._shards:
            try:
                taken = context.poll(shard.cq, n)
            except OSError as e:
                raise RdmaError(
                    f"the completion queue cannot be polled: {e.strerror}",
                    hint="the device was removed or failed; open it again",
                ) from e
            for wc in taken:
                qp = self._pairs.get(wc.qp_num)
                if qp is not None:
                    qp._completed(wc, self._ready)

    def poll(self, n: int = 16) -> list[WorkCompletion]:
        self._check()
        with self._lock:
            if self._closed:
                raise self._closed_error()
            ready = self._ready
            if len(ready) < n:
                self._drain(n - len(ready))
            if not ready:
                return []
            out = []
            for _ in range(min(n, len(ready))):
                wc, qp, is_receive = ready.popleft()
                if is_receive:
                    qp._receives_out -= 1
                else:
                    qp._sends_out -= 1
                out.append(wc)
            return out

    # -- waiting -----------------------------------------------------------------------------------
    def _look(self) -> bool:
        """Whether there is something to tell a waiter."""
        with self._lock:
            if self._closed:
                raise self._closed_error()
            if not self._ready:
                self._drain(16)
            told = bool(self._ready or self._ends)
            self._ends.clear()
            return told

    def _consume_events(self) -> None:
        """Take what made `fileno()` readable."""
        with self._lock:
            if self._closed:
                return
            readable = {fd for fd, _ in self._epoll.poll(0)}
            while readable:
                for shard in self._shards:
                    if shard.fd in readable:
                        self._device._context.take_cq_event(shard.channel, shard.cq)
                if self._wake_fd in readable:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wake_fd)
                readable = {fd for fd, _ in self._epoll.poll(0)}

    def _request_events(self) -> None:
        with self._lock:
            if not self._closed:
                for shard in self._shards:
                    self._device._context.request_notify(shard.cq)

    def wait(self, timeout_ms: float = -1, spin_us: float = 0) -> bool:
        self._check()
        deadline = None if timeout_ms < 0 else time.monotonic() + timeout_ms / 1000
        spin_until = time.monotonic() + spin_us / 1e6 if spin_us > 0 else 0.0
        armed = False
        while True:
            if self._look():
                return True
            if self._woken:
                self._woken = False
                return False
            now = time.monotonic()
            if now < spin_until:
                continue
            if deadline is not None and now >= deadline:
                return False
            if not armed:
                self._consume_events()
                self._request_events()
                armed = True
                continue  # what came before the request makes no event: look again
            self._epoll.poll(-1 if deadline is None else max(0.0, deadline - now) + 0.0005, 1)
            armed = False

    def fileno(self) -> int:
        return self._epoll.fileno()

    def arm(self) -> bool:
        self._check()
        self._consume_events()
        self._request_events()
        return self._look()

    def wake(self) -> None:
        self._check()
        self._woken = True
        self._signal()

    # -- life --------------------------------------------------------------------------------------
    def close(self) -> None:
        if self._closed or self._device._forked():
            return
        with self._lock:
            if self._pairs:
                raise RdmaError(
                    f"the completion queue is used by {len(self._pairs)} queue pairs",
                    hint="close the queue pairs first",
                )
            self._closed = True
            for shard in self._shards:
                self._epoll.unregister(shard.fd)
                self._device._context.destroy(shard.cq)
                self._device._context.destroy_channel(shard.channel, shard.fd)
            self._shards.clear()
        self._signal()
        self._device._cqs.discard(self)

    def __del__(self, _close: Any = os.close) -> None:  # the module may be gone by then
        if hasattr(self, "_epoll") and not self._epoll.closed:
            self._epoll.close()
            _close(self._wake_fd)

    def _check(self) -> None:
        self._device._check_process()
        if self._closed:
            raise self._closed_error()

    def _closed_error(self) -> ClosedError:
        return ClosedError("the completion queue is closed", hint="create another")

    def _abandon(self) -> None:
        self._lock = threading.Lock()


class VerbsQueuePair(QueuePair):
    """See QueuePair and the module."""

    def __init__(
        self, domain: VerbsProtectionDomain, send_cq: VerbsCompletionQueue, recv_cq: VerbsCompletionQueue, max_send_wr: int,
        max_recv_wr: int, max_send_bytes: int, rnr_timeout_ms: int,
    ) -> None:  # fmt: skip
        device = domain._device
        context = device._context
        for name, value in (("max_send_wr", max_send_wr), ("max_recv_wr", max_recv_wr)):
            if not 0 < value <= min(MAX_QUEUE, context.max_qp_wr):
                raise RdmaError(
                    f"{name} {value} is out of range for {device.choice.device}",
                    hint=f"give 1 to {min(MAX_QUEUE, context.max_qp_wr)}",
                )
        if send_cq._device is not device or recv_cq._device is not device:
            raise RdmaError(
                "the completion queues belong to another device",
                hint="create them on the device of the protection domain",
            )
        self._depth = min(max_send_wr + SPARE_PIECES, context.max_qp_wr)
        self._reserved = (
            (send_cq, send_cq._reserve(self._depth), self._depth),
            (recv_cq, recv_cq._reserve(max_recv_wr), max_recv_wr),
        )
        try:
            self._native, self._inline_bytes = context.create_qp(
                domain._native,
                self._reserved[0][1].cq,
                self._reserved[1][1].cq,
                self._depth,
                max_recv_wr,
            )
        except OSError as e:
            for cq, shard, n in self._reserved:
                with cq._lock:
                    shard.free += n
            raise queue_error(
                e.errno or 0, "a queue pair", f"{max_send_wr} sends and {max_recv_wr} receives"
            ) from e
        super().__init__(int(self._native.qp_num), send_cq, recv_cq)
        self._device = device
        self._context = context
        self._domain = domain
        self._limits = (max_send_wr, max_recv_wr, max_send_bytes)
        self._rnr_timer = verbs.rnr_timer_code(rnr_timeout_ms)
        self._templates = context.take_templates()
        self._lock = threading.Lock()
        self._state = _INIT
        self._closed = False
        self._token = os.urandom(verbs_link.TOKEN_BYTES)
        self._psn = int.from_bytes(os.urandom(3), "little")
        self._tag = int.from_bytes(os.urandom(4), "little") & _TAG_MASK
        self._peer: verbs_link.Address | None = None
        self._link: socket.socket | None = None
        self._send_failed = False
        self.fault = ""  # what the peer did for which the device ended the pair, in words for a log
        self._sends: deque[_Entry] = deque()
        self._receives: deque[_Entry] = deque()
        self._send_posted = self._send_seen = 0  # pieces given to the device, and completed by it
        self._recv_posted = self._recv_seen = 0
        self._sends_out = self._receives_out = 0  # not polled yet
        send_cq._attach(self)
        recv_cq._attach(self)

    # -- connection --------------------------------------------------------------------------------
    @property
    def state(self) -> int:
        return self._state

    @property
    def address(self) -> bytes:
        self._check()
        service, choice = self._device._service, self._device.choice
        return verbs_link.Address(
            self._token, self.qp_num, self._psn, choice.gid.address.packed, self._context.lid, self._context.mtu,
            self._context.max_rd_atomic, self._rnr_timer, service.host, service.port,
        ).pack()  # fmt: skip

    def connect(self, peer_address: bytes, active: bool) -> None:
        self._check()
        peer = verbs_link.Address.unpack(peer_address)
        if self._state != _INIT or self._peer is not None:
            raise QueuePairError(
                f"queue pair {self.qp_num} was connected before",
                hint="create another; a queue pair connects once",
            )
        service = self._device._service
        service.start(listen=not active)
        self._peer = peer
        if not active:
            service.expect(self._token, self)
            return
        try:
            self._ready_to_receive(peer)
            link = verbs_link.greet(peer, self._token)
            self._ready_to_send(peer, link)
            service.watch(link, self)
        except OSError as e:
            self._fail()
            raise TransportError(
                f"queue pair {self.qp_num} cannot be set up towards GID {peer.gid_text} from {self._device.choice}: {e.strerror}",
                hint="both sides must be on one RDMA network: check rdma.bind.address, rdma.gid.index and the route between the two",
            ) from e
        except BaseException:
            self._fail()
            raise

    def _ready_to_receive(self, peer: verbs_link.Address) -> None:
        with self._lock:
            if self._native is None:
                raise QueuePairError(f"queue pair {self.qp_num} is closed", hint="create another")
            self._context.to_ready_to_receive(
                self._native,
                gid_index=self._device.choice.gid.index,
                peer_gid=peer.gid_text,
                peer_lid=peer.lid,
                peer_qp_num=peer.qp_num,
                peer_psn=peer.psn,
                mtu=min(self._context.mtu, peer.mtu),
                rd_atomic=min(self._context.max_rd_atomic, peer.rd_atomic),
                rnr_timer=peer.rnr_timer,
            )

    def _ready_to_send(self, peer: verbs_link.Address, link: socket.socket) -> None:
        with self._lock:
            if self._native is None or self._state != _INIT:
                raise QueuePairError(
                    f"queue pair {self.qp_num} was closed while it connected", hint="create another"
                )
            self._context.to_ready_to_send(
                self._native,
                psn=self._psn,
                rd_atomic=min(self._context.max_rd_atomic, peer.rd_atomic),
            )
            self._link = link
            self._state = _RTS

    # for the link service, on its thread
    def _expects(self, token: bytes) -> bool:
        return self._state == _INIT and self._peer is not None and self._peer.token == token

    def _greeted(self, link: socket.socket) -> None:
        assert self._peer is not None
        self._ready_to_receive(self._peer)
        self._ready_to_send(self._peer, link)

    def _peer_left(self) -> None:
        self._fail()

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
        context = self._context
        if op == "recv":
            with self._lock:
                if self._state not in (_INIT, _RTS):
                    raise self._broken()
                if self._receives_out >= max_recv_wr:
                    raise QueueFullError(
                        f"the receive queue of queue pair {self.qp_num} is full",
                        hint="poll completions first",
                    )
                self._receives.append(_Entry(wr_id, op, local_address, length, lkey, 1))
                try:
                    if length:
                        context.post_recv(
                            self._native,
                            self._wr_id(self._recv_posted, 1),
                            local_address,
                            length,
                            lkey,
                        )
                    else:
                        self._templates.post_empty_recv(
                            self._native, self._wr_id(self._recv_posted, 1)
                        )
                except OSError as e:
                    self._receives.pop()
                    raise self._post_error(e, op) from e
                self._recv_posted += 1
                self._receives_out += 1
            return
        if (
            length > MAX_LENGTH
            or (op == "send" and length > max_send_bytes)
            or (op[-3:] in ("add", "wap") and remote_address % 8)
        ):
            raise RdmaError(
                "malformed work request", hint="check lengths and the 8-byte alignment of atomics"
            )
        largest = context.max_message_bytes
        pieces = 1 if length <= largest else -(-length // largest)
        if pieces > 1 and op in ("send", "write_imm"):
            raise RdmaError(
                f"{op.upper()} of {length} bytes: {self._device.choice.device} carries messages of {largest} bytes at most",
                hint="send smaller batches (batch.bytes)",
            )
        with self._lock:
            if self._state != _RTS:
                raise self._broken()
            if (
                self._sends_out >= max_send_wr
                or self._send_posted - self._send_seen + pieces > self._depth
            ):
                if pieces > self._depth:
                    raise RdmaError(
                        f"a request of {length} bytes needs {pieces} messages",
                        hint="make smaller requests, or a deeper queue pair",
                    )
                raise QueueFullError(
                    f"the send queue of queue pair {self.qp_num} is full",
                    hint="poll completions first",
                )
            inline = (
                op in _INLINE_OPS
                and 0 < length <= self._inline_bytes
                and self._domain._covers(lkey, local_address, length)
            )
            entry = _Entry(wr_id, op, local_address, length, lkey, pieces)
            self._sends.append(entry)
            at = 0
            try:
                for _ in range(pieces):
                    n = min(length - at, largest)
                    self._templates.post_send(
                        self._native, op, self._wr_id(self._send_posted, 0), local_address + at, n, lkey,
                        remote_address + at & _U64, rkey, arg0, arg1, inline,
                    )  # fmt: skip
                    self._send_posted += 1
                    at += n
            except OSError as e:
                if at == 0:
                    self._sends.pop()
                    raise self._post_error(e, op) from e
                # some pieces are on their way: the request fails as a whole, behind them
                entry.pieces -= (length - at + largest - 1) // largest
                entry.status = int(Status.LOC_PROT_ERR)
            self._sends_out += 1

    def _wr_id(self, sequence: int, is_receive: int) -> int:
        return self._tag << 34 | (sequence & _SEQUENCE_MASK) << 1 | is_receive

    def _broken(self) -> QueuePairError:
        return QueuePairError(
            f"queue pair {self.qp_num} is not connected or in error", hint="open a new connection"
        )

    def _post_error(self, e: OSError, op: str) -> RdmaError:
        if e.errno == errno.ENOMEM:
            return QueueFullError(
                f"the device's queue of queue pair {self.qp_num} is full",
                hint="poll completions first",
            )
        return RdmaError(
            f"{op}: {e.strerror or e} on queue pair {self.qp_num}",
            hint="check lengths, keys and the alignment of atomics",
        )

    # -- completion --------------------------------------------------------------------------------
    def _completed(
        self, wc: Any, ready: deque[tuple[WorkCompletion, VerbsQueuePair, bool]]
    ) -> None:
        """Take a completion of the device.  Under the lock of the completion queue that it came
        from."""
        tagged, status = int(wc.wr_id), int(wc.status)
        is_receive = tagged & 1
        entries = self._receives if is_receive else self._sends
        seen = self._recv_seen if is_receive else self._send_seen
        if not entries or tagged != self._wr_id(seen, is_receive):
            return  # of a queue pair that had this number before, or flushed already
        if is_receive:
            self._recv_seen += 1
        else:
            self._send_seen += 1
        entry = entries[0]
        entry.pieces -= 1
        if status != _SUCCESS and is_receive and self._state == _RTS:
            # Nobody here has ended the pair, so the device did: it refused what the peer asked for,
            # or sent.
            self.fault = _FAULTS.get(status, REFUSED_REQUEST)
        if status != _SUCCESS and entry.status == _SUCCESS:
            entry.status = self._contract_status(entry, status)
        if entry.pieces == 0:
            entries.popleft()
            if is_receive:
                self._push_receive(entry, wc, ready)
            else:
                self._push_send(entry, ready)
        if status != _SUCCESS:
            self._send_failed |= not is_receive
            self._fail()

    def _contract_status(self, entry: _Entry, status: int) -> int:
        """What the contract calls it: devices differ in how they name a receive that cannot take
        what was sent."""
        if entry.op != "recv":
            if status == _LOC_QP_OP_ERR:
                return int(Status.LOC_PROT_ERR)
            return (
                int(Status.REM_INV_REQ_ERR)
                if status == _REM_OP_ERR and entry.op == "send"
                else status
            )
        if (
            status == Status.REM_ACCESS_ERR
        ):  # a request of the peer failed; this receive had no part in it
            return int(Status.WR_FLUSH_ERR)
        if status in (_LOC_QP_OP_ERR, Status.REM_INV_REQ_ERR):
            protected = entry.length and not self._domain._covers(
                entry.lkey, entry.address, entry.length, writable=True
            )
            return int(Status.LOC_PROT_ERR if protected else Status.LOC_LEN_ERR)
        return status

    def _push_send(self, entry: _Entry, ready: deque[Any]) -> None:
        ok = entry.status == _SUCCESS
        if ok:
            self._device._count(entry.op, entry.length)
        ready.append(
            (
                WorkCompletion(
                    entry.wr_id,
                    entry.status,
                    _OPCODES[entry.op],
                    entry.length if ok else 0,
                    None,
                    self.qp_num,
                ),
                self,
                False,
            )
        )

    def _push_receive(self, entry: _Entry, wc: Any, ready: deque[Any]) -> None:
        opcode, length, imm = _RECV, 0, None
        if entry.status == _SUCCESS:
            length = int(wc.byte_len)
            self._device._count("recv", 0)
            if int(wc.opcode) == self._context.lib.with_imm:
                opcode, imm = _RECV_IMM, int(wc.imm_data)
        ready.append(
            (
                WorkCompletion(entry.wr_id, entry.status, opcode, length, imm, self.qp_num),
                self,
                True,
            )
        )

    # -- the end -----------------------------------------------------------------------------------
    def _fail(self) -> None:
        """To ERROR, wherever it was: the device flushes what is outstanding, the peer hears of it,
        sleepers wake.  Any thread."""
        with self._lock:
            if self._state == _ERROR:
                return
            connected = self._state == _RTS
            self._state = _ERROR
            link, self._link = self._link, None
            if self._native is not None:
                try:
                    if (
                        connected
                        and not self.fault
                        and not self._send_failed
                        and self._context.in_error(self._native)
                    ):
                        self.fault = (
                            REFUSED_REQUEST  # the news of the peer's end overtook the completions
                        )
                    self._context.to_error(self._native)
                except OSError as e:
                    log.warning(
                        "queue pair %d cannot be moved to its error state: %s", self.qp_num, e
                    )
        self._device._service.forget(self._token)
        if link is not None:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
        for cq in {id(x): x for x in (self.send_cq, self.recv_cq)}.values():
            cq._ended(self.qp_num)

    def _check_device_state(self) -> None:
        """After an asynchronous event: follow the device into its error state."""
        with self._lock:
            failed = (
                self._native is not None
                and self._state == _RTS
                and self._context.in_error(self._native)
            )
        if failed:
            log.warning("queue pair %d: the device moved it to its error state", self.qp_num)
            self._fail()

    def close(self) -> None:
        if self._device._forked():
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._fail()
        # What the device has completed is kept in order; then it is destroyed, after which it
        # touches no memory; the rest is flushed here.
        deadline = time.monotonic() + FLUSH_TIMEOUT_S
        while (self._sends or self._receives) and time.monotonic() < deadline:
            before = len(self._sends) + len(self._receives)
            for cq, _, _ in self._reserved:
                with cq._lock:
                    cq._drain(64)
            if len(self._sends) + len(self._receives) == before:
                time.sleep(0.001)
        with self._lock:
            native, self._native = self._native, None
            self._context.give_templates(self._templates)
            try:
                self._context.destroy(native)
            except OSError as e:
                log.error("queue pair %d cannot be destroyed: %s", self.qp_num, e)
        for (cq, shard, n), entries, is_receive in zip(
            self._reserved, (self._sends, self._receives), (False, True), strict=True
        ):
            with cq._lock:
                while entries:
                    entry = entries.popleft()
                    opcode = _RECV if is_receive else _OPCODES[entry.op]
                    status = entry.status or int(Status.WR_FLUSH_ERR)
                    cq._ready.append(
                        (
                            WorkCompletion(entry.wr_id, status, opcode, 0, None, self.qp_num),
                            self,
                            is_receive,
                        )
                    )
            cq._release(self, shard, n)
            cq._signal()
        self._domain._pairs.discard(self)

    def _check(self) -> None:
        self._device._check_process()
        if self._closed:
            raise QueuePairError(f"queue pair {self.qp_num} is closed", hint="create another")

    def _abandon(self) -> None:
        self._lock = threading.Lock()


_U64 = (1 << 64) - 1
