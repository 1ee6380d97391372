"""Queue pairs of the verbs provider.

Law of the room: the accounting that the contract promises on top of what the device does.  The
device moves the bytes and orders the completions.  Here are the depths ("outstanding until
polled"), the sizes (a READ or WRITE beyond the device's largest message is posted in pieces) and
the end (flushed requests, sleepers that wake).  What may not enter: pyverbs itself
(use `kdirect.rdma.verbs`), registration, sockets other than the link.

Every work request has an entry in its queue pair's FIFO from post to completion.  The device's
wr_id is ``tag << 34 | sequence << 1 | is receive``.  A completion is believed only if it is the
next one of its queue pair: a late one of a queue pair that had the same number before is dropped.

Locks, in this order: completion queue, queue pair.  `VerbsQueuePair._lock` keeps posts and the
destruction of the device's queue pair apart.  It is not held while anything blocks.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from kdirect.errors import QueueFullError, QueuePairError, RdmaError, TransportError
from kdirect.rdma import verbs, verbs_link
from kdirect.rdma.contract import Opcode, QueuePair, State, Status, WorkCompletion
from kdirect.rdma.verbs_completions import Completed, VerbsCompletionQueue
from kdirect.rdma.verbs_limits import queue_error
from kdirect.rdma.verbs_memory import VerbsRegions
from kdirect.rdma.verbs_opened import OpenedDevice

log = logging.getLogger("kdirect.rdma.verbs")

MAX_QUEUE = 1 << 20
MAX_LENGTH = 1 << 31
SPARE_PIECES = 64  # send queue entries beyond max_send_wr, for requests that are posted in pieces
FLUSH_TIMEOUT_S = 1.0
_SEQUENCE_MASK = (1 << 33) - 1
_TAG_MASK = (1 << 30) - 1
_U64 = (1 << 64) - 1
_OPCODES = {
    "read": int(Opcode.RDMA_READ),
    "write": int(Opcode.RDMA_WRITE),
    "write_imm": int(Opcode.RDMA_WRITE),
    "send": int(Opcode.SEND),
    "fetch_add": int(Opcode.FETCH_ADD),
    "compare_swap": int(Opcode.COMP_SWAP),
}
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
_ATOMICS = frozenset(("fetch_add", "compare_swap"))
# What a failed receive says about the peer, for a log.  A device that merely flushes the receive
# leaves open which of the two it was.
REFUSED_REQUEST = (
    "the device refused one of its requests (a key, bounds or access that it was not granted),"
    " or it could not be reached"
)
_FAULTS = {
    int(Status.REM_ACCESS_ERR): (
        "it asked for memory that it was not granted (key, bounds or access)"
    ),
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


def _malformed() -> RdmaError:
    return RdmaError(
        "malformed work request", hint="check lengths and the 8-byte alignment of atomics"
    )


def _check_depths(opened: OpenedDevice, max_send_wr: int, max_recv_wr: int) -> None:
    most = min(MAX_QUEUE, opened.context.max_qp_wr)
    for name, value in (("max_send_wr", max_send_wr), ("max_recv_wr", max_recv_wr)):
        if not 0 < value <= most:
            raise RdmaError(
                f"{name} {value} is out of range for {opened.choice.device}",
                hint=f"give 1 to {most}",
            )


class VerbsQueuePair(QueuePair):
    """See QueuePair and the module."""

    def __init__(
        self,
        opened: OpenedDevice,
        regions: VerbsRegions,
        send_cq: VerbsCompletionQueue,
        recv_cq: VerbsCompletionQueue,
        max_send_wr: int,
        max_recv_wr: int,
        max_send_bytes: int,
        rnr_timeout_ms: float,
        on_close: Callable[[VerbsQueuePair], None],
    ) -> None:
        context = opened.context
        _check_depths(opened, max_send_wr, max_recv_wr)
        if send_cq.opened is not opened or recv_cq.opened is not opened:
            raise RdmaError(
                "the completion queues belong to another device",
                hint="create them on the device of the protection domain",
            )
        self._depth = min(max_send_wr + SPARE_PIECES, context.max_qp_wr)
        self._reserved = (
            (send_cq, send_cq.reserve(self._depth), self._depth),
            (recv_cq, recv_cq.reserve(max_recv_wr), max_recv_wr),
        )
        self._native, self._inline_bytes = self._create(context, regions.native, max_recv_wr)
        super().__init__(int(self._native.qp_num), send_cq, recv_cq)
        self._opened = opened
        self._context = context
        self._regions = regions
        self._on_close = on_close
        self._limits = (max_send_wr, max_recv_wr, max_send_bytes)
        self._rnr_timer = verbs.rnr_timer_code(rnr_timeout_ms)
        self._templates = context.take_templates()
        self._lock = threading.Lock()
        self._state = _INIT
        self._closed = False
        self._token = os.urandom(verbs_link.TOKEN_BYTES)
        self._psn = int.from_bytes(os.urandom(3), "little")
        self._tagged = (int.from_bytes(os.urandom(4), "little") & _TAG_MASK) << 34
        self._peer: verbs_link.Address | None = None
        self._link: socket.socket | None = None
        self._send_failed = False
        self.fault = ""  # what the peer did for which the device ended the pair, in words for a log
        self._sends: deque[_Entry] = deque()
        self._receives: deque[_Entry] = deque()
        self._send_posted = self._send_seen = 0  # pieces given to the device, and completed by it
        self._recv_posted = self._recv_seen = 0
        self.sends_out = self.receives_out = 0  # not polled yet
        send_cq.attach(self)
        recv_cq.attach(self)

    def _create(self, context: verbs.Context, pd: Any, max_recv_wr: int) -> tuple[Any, int]:
        """The device's queue pair in INIT, and how many bytes it sends inline."""
        (_, send_shard, _), (_, recv_shard, _) = self._reserved
        try:
            return context.create_qp(pd, send_shard.cq, recv_shard.cq, self._depth, max_recv_wr)
        except OSError as e:
            for cq, shard, n in self._reserved:
                cq.give_back(shard, n)
            raise queue_error(
                e.errno or 0, "a queue pair", f"{self._depth} sends and {max_recv_wr} receives"
            ) from e

    # -- connection --------------------------------------------------------------------------------
    @property
    def state(self) -> int:
        return self._state

    @property
    def address(self) -> bytes:
        self._check()
        context, service = self._context, self._opened.service
        return verbs_link.Address(
            token=self._token,
            qp_num=self.qp_num,
            psn=self._psn,
            gid=self._opened.choice.gid.address.packed,
            lid=context.lid,
            mtu=context.mtu,
            rd_atomic=context.max_rd_atomic,
            rnr_timer=self._rnr_timer,
            host=service.host,
            port=service.port,
        ).pack()

    def listen(self) -> None:
        self._check()
        self._opened.service.start()

    def connect(self, peer_address: bytes, active: bool) -> None:
        self._check()
        peer = verbs_link.Address.unpack(peer_address)
        if self._state != _INIT or self._peer is not None:
            raise QueuePairError(
                f"queue pair {self.qp_num} was connected before",
                hint="create another; a queue pair connects once",
            )
        service = self._opened.service
        service.start(listen=not active)
        self._peer = peer
        if not active:
            service.expect(self._token, self)
            return
        try:
            self._ready_to_receive(peer)
            link = verbs_link.greet(peer, self._token)
            self._ready_to_send(peer, link)
            service.watch_link(link, self)
        except OSError as e:
            self.fail()
            raise TransportError(
                f"queue pair {self.qp_num} cannot be set up towards GID {peer.gid_text} from"
                f" {self._opened.choice}: {e.strerror}",
                hint="both sides must be on one RDMA network: check rdma.bind.address,"
                " rdma.gid.index and the route between the two",
            ) from e
        except BaseException:
            self.fail()
            raise

    def _ready_to_receive(self, peer: verbs_link.Address) -> None:
        with self._lock:
            if self._native is None:
                raise QueuePairError(f"queue pair {self.qp_num} is closed", hint="create another")
            self._context.to_ready_to_receive(
                self._native,
                gid_index=self._opened.choice.gid.index,
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
        self.fail()

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
        self._opened.check_process()
        if op == "recv":
            self._post_receive(wr_id, local_address, lkey, length)
            return
        max_send_wr, _, max_send_bytes = self._limits
        if (
            length > MAX_LENGTH
            or (op == "send" and length > max_send_bytes)
            or (op in _ATOMICS and remote_address % 8)
        ):
            raise _malformed()
        largest = self._context.max_message_bytes
        pieces = 1 if length <= largest else self._pieces(op, length)
        with self._lock:
            if self._state != _RTS:
                raise self._broken()
            posted = self._send_posted
            if self.sends_out >= max_send_wr or posted - self._send_seen + pieces > self._depth:
                raise self._send_queue_full(length, pieces)
            inline = (
                0 < length <= self._inline_bytes
                and op in _INLINE_OPS
                and self._regions.covers(lkey, local_address, length)
            )
            entry = _Entry(wr_id, op, local_address, length, lkey, pieces)
            self._sends.append(entry)
            at = 0
            try:
                for i in range(pieces):
                    n = min(length - at, largest) if pieces > 1 else length
                    self._templates.post_send(
                        self._native, op, self._tagged | (posted + i & _SEQUENCE_MASK) << 1,
                        local_address + at, n, lkey, remote_address + at & _U64, rkey, arg0, arg1,
                        inline,
                    )  # fmt: skip
                    self._send_posted += 1
                    at += n
            except OSError as e:
                if at == 0:
                    self._sends.pop()
                    raise self._post_error(e, op) from e
                # Some pieces are on their way: the request fails as a whole when they complete.
                entry.pieces -= (length - at + largest - 1) // largest
                entry.status = int(Status.LOC_PROT_ERR)
            self.sends_out += 1

    def _post_receive(self, wr_id: int, local_address: int, lkey: int, length: int) -> None:
        with self._lock:
            if self._state not in (_INIT, _RTS):
                raise self._broken()
            if self.receives_out >= self._limits[1]:
                raise QueueFullError(
                    f"the receive queue of queue pair {self.qp_num} is full",
                    hint="poll completions first",
                )
            tagged = self._tagged | (self._recv_posted & _SEQUENCE_MASK) << 1 | 1
            self._receives.append(_Entry(wr_id, "recv", local_address, length, lkey, 1))
            try:
                if length:
                    self._context.post_recv(self._native, tagged, local_address, length, lkey)
                else:
                    self._templates.post_empty_recv(self._native, tagged)
            except OSError as e:
                self._receives.pop()
                raise self._post_error(e, "recv") from e
            self._recv_posted += 1
            self.receives_out += 1

    def _pieces(self, op: str, length: int) -> int:
        """How many of the device's messages a request of `length` bytes takes."""
        largest = self._context.max_message_bytes
        if op in ("send", "write_imm"):
            raise RdmaError(
                f"{op.upper()} of {length} bytes: {self._opened.choice.device} carries messages of"
                f" {largest} bytes at most",
                hint="send smaller batches (batch.bytes)",
            )
        return -(-length // largest)

    def _send_queue_full(self, length: int, pieces: int) -> RdmaError:
        if pieces > self._depth:
            return RdmaError(
                f"a request of {length} bytes needs {pieces} messages",
                hint="make smaller requests, or a deeper queue pair",
            )
        return QueueFullError(
            f"the send queue of queue pair {self.qp_num} is full", hint="poll completions first"
        )

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
    def completed(self, wc: Any, ready: deque[Completed]) -> None:
        """Take a completion of the device.  Under the lock of the completion queue that it came
        from."""
        tagged, status = int(wc.wr_id), int(wc.status)
        is_receive = tagged & 1
        entries = self._receives if is_receive else self._sends
        seen = self._recv_seen if is_receive else self._send_seen
        if not entries or tagged != self._tagged | (seen & _SEQUENCE_MASK) << 1 | is_receive:
            return  # of a queue pair that had this number before, or flushed already
        if is_receive:
            self._recv_seen += 1
        else:
            self._send_seen += 1
        entry = entries[0]
        entry.pieces -= 1
        if status != _SUCCESS:
            if is_receive and self._state == _RTS:
                # Nobody here has ended the pair, so the device did: it refused what the peer asked
                # for, or sent.
                self.fault = _FAULTS.get(status, REFUSED_REQUEST)
            if entry.status == _SUCCESS:
                entry.status = self._contract_status(entry, status)
        if entry.pieces == 0:
            entries.popleft()
            if is_receive:
                self._push_receive(entry, wc, ready)
            else:
                self._push_send(entry, ready)
        if status != _SUCCESS:
            self._send_failed |= not is_receive
            self.fail()

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
            protected = entry.length and not self._regions.covers(
                entry.lkey, entry.address, entry.length, writable=True
            )
            return int(Status.LOC_PROT_ERR if protected else Status.LOC_LEN_ERR)
        return status

    def _push_send(self, entry: _Entry, ready: deque[Completed]) -> None:
        ok = entry.status == _SUCCESS
        if ok:
            self._opened.count(entry.op, entry.length)
        length = entry.length if ok else 0
        wc = WorkCompletion(
            entry.wr_id, entry.status, _OPCODES[entry.op], length, None, self.qp_num
        )
        ready.append((wc, self, False))

    def _push_receive(self, entry: _Entry, wc: Any, ready: deque[Completed]) -> None:
        opcode, length, imm = _RECV, 0, None
        if entry.status == _SUCCESS:
            length = int(wc.byte_len)
            self._opened.count("recv", 0)
            if int(wc.opcode) == self._context.lib.with_imm:
                opcode, imm = _RECV_IMM, int(wc.imm_data)
        taken = WorkCompletion(entry.wr_id, entry.status, opcode, length, imm, self.qp_num)
        ready.append((taken, self, True))

    # -- the end -----------------------------------------------------------------------------------
    def fail(self) -> None:
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
                        # The news of the peer's end overtook the completions.
                        self.fault = REFUSED_REQUEST
                    self._context.to_error(self._native)
                except OSError as e:
                    log.warning(
                        "queue pair %d cannot be moved to its error state: %s", self.qp_num, e
                    )
        self._opened.service.forget(self._token)
        if link is not None:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
        for cq in dict.fromkeys(cq for cq, _, _ in self._reserved):
            cq.ended(self.qp_num)

    def check_device_state(self) -> None:
        """After an asynchronous event: follow the device into its error state."""
        with self._lock:
            failed = (
                self._native is not None
                and self._state == _RTS
                and self._context.in_error(self._native)
            )
        if failed:
            log.warning("queue pair %d: the device moved it to its error state", self.qp_num)
            self.fail()

    def close(self) -> None:
        if self._opened.forked:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.fail()
        # First take, in order, what the device has completed.  Then destroy its queue pair, after
        # which it touches no memory.  What is left is flushed here.
        deadline = time.monotonic() + FLUSH_TIMEOUT_S
        while (self._sends or self._receives) and time.monotonic() < deadline:
            before = len(self._sends) + len(self._receives)
            for cq, _, _ in self._reserved:
                cq.drain(64)
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
            cq.release(self, shard, n, self._flush(entries, is_receive))
        self._on_close(self)

    def _flush(self, entries: deque[_Entry], is_receive: bool) -> Iterator[Completed]:
        """What is left, completed with an error.  Under the lock of the completion queue."""
        while entries:
            entry = entries.popleft()
            opcode = _RECV if is_receive else _OPCODES[entry.op]
            status = entry.status or int(Status.WR_FLUSH_ERR)
            wc = WorkCompletion(entry.wr_id, status, opcode, 0, None, self.qp_num)
            yield wc, self, is_receive

    def _check(self) -> None:
        self._opened.check_process()
        if self._closed:
            raise QueuePairError(f"queue pair {self.qp_num} is closed", hint="create another")

    def abandon(self) -> None:
        self._lock = threading.Lock()
