"""libibverbs through pyverbs: the one file that imports it.

It owns the import, the differences between pyverbs 44 of Debian (`pyverbs.enums`) and 59
(`pyverbs.libibverbs_enums`), and a thin layer of plain types that the rest of the provider is
written against (`verbs_device`, `verbs_completions`, `verbs_queue_pairs`).  pyverbs is imported at
first use, so a process that does not use RDMA does not load it.  What may not enter: the contract's
classes, policy, accounting.

Every call that libibverbs refuses raises OSError with its errno; the callers say what that means.
pyverbs holds the GIL during all of its calls.  So a descriptor is polled before an event is taken
from it, and nothing here blocks for long except the registration of memory.

Life of what is made here: `close()` each, in the order queue pairs, regions, domains, completion
queues and channels, context.  In a forked child nothing may be closed or collected, because that
would destroy the parent's objects: see `immortal`.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import threading
from typing import Any

from kdirect.errors import TransportError

INSTALL = (
    "install it: apt install python3-pyverbs (then make it visible to this Python), or"
    " pip install 'kdirect[rdma]'"
)
RETRY_COUNT = 6  # not 7: that means "for ever" to soft-RoCE
RNR_RETRY_COUNT = 6  # not 7: that means "for ever" everywhere
TIMEOUT_CODE = 14  # 4.096 us * 2 ** 14 = 67 ms, about half a second with all repetitions
MAX_RD_ATOMIC = 16
MIN_INLINE_BYTES, WANTED_INLINE_BYTES = 0, 128
HOP_LIMIT = 64
# Microseconds of the RNR timer codes (InfiniBand specification, table 45).
RNR_TIMER_US = (
    655360, 10, 20, 30, 40, 60, 80, 120, 160, 240, 320, 480, 640, 960, 1280, 1920, 2560, 3840, 5120,
    7680, 10240, 15360, 20480, 30720, 40960, 61440, 81920, 122880, 163840, 245760, 327680, 491520,
)  # fmt: skip

_library: Library | None = None
_opening = threading.Lock()


def rnr_timer_code(timeout_ms: float) -> int:
    """The code of the longest RNR timer with which all repetitions together stay within
    `timeout_ms`."""
    fitting = [
        (us, code)
        for code, us in enumerate(RNR_TIMER_US)
        if us * RNR_RETRY_COUNT <= timeout_ms * 1000
    ]
    return max(fitting)[1] if fitting else 1


class Library:
    """pyverbs, imported: its classes and numbers."""

    def __init__(self) -> None:
        root = logging.getLogger()
        handlers, level = root.handlers[:], root.level
        try:
            import pyverbs  # type: ignore[import-not-found]

            try:
                from pyverbs import libibverbs_enums as e  # type: ignore[import-not-found]
            except ImportError:
                from pyverbs import enums as e  # type: ignore[import-not-found]
            from pyverbs import fork
            from pyverbs.addr import GID, AHAttr, GlobalRoute  # type: ignore[import-not-found]
            from pyverbs.cq import CQ, CompChannel  # type: ignore[import-not-found]
            from pyverbs.device import Context  # type: ignore[import-not-found]
            from pyverbs.mr import MR  # type: ignore[import-not-found]
            from pyverbs.pd import PD  # type: ignore[import-not-found]
            from pyverbs.pyverbs_error import PyverbsError  # type: ignore[import-not-found]
            from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr  # type: ignore[import-not-found]
            from pyverbs.wr import SGE, RecvWR, SendWR  # type: ignore[import-not-found]
        except ImportError as error:
            raise TransportError(f"pyverbs cannot be imported: {error}", hint=INSTALL) from error
        finally:  # it sets up logging for the whole process; that is the application's business
            root.handlers[:] = handlers
            root.setLevel(level)
        self.file = str(pyverbs.__file__)
        self.flavour = (
            "of rdma-core 45 or later"
            if e.__name__.endswith("libibverbs_enums")
            else "of rdma-core 44 or earlier"
        )
        self.enums = e
        self.Context, self.CompChannel, self.CQ, self.PD, self.MR = Context, CompChannel, CQ, PD, MR
        self.QP, self.QPAttr, self.QPCap, self.QPInitAttr = QP, QPAttr, QPCap, QPInitAttr
        self.SGE, self.RecvWR, self.SendWR = SGE, RecvWR, SendWR
        self.AHAttr, self.GlobalRoute, self.GID = AHAttr, GlobalRoute, GID
        self.PyverbsError = PyverbsError
        self.opcodes = {
            "read": e.IBV_WR_RDMA_READ,
            "write": e.IBV_WR_RDMA_WRITE,
            "write_imm": e.IBV_WR_RDMA_WRITE_WITH_IMM,
            "send": e.IBV_WR_SEND,
            "fetch_add": e.IBV_WR_ATOMIC_FETCH_AND_ADD,
            "compare_swap": e.IBV_WR_ATOMIC_CMP_AND_SWP,
        }
        self.signaled = int(e.IBV_SEND_SIGNALED)
        self.inline = int(e.IBV_SEND_SIGNALED) | int(e.IBV_SEND_INLINE)
        self.with_imm = int(e.IBV_WC_RECV_RDMA_WITH_IMM)
        # Pages that are registered here must survive a fork of this process.  Does nothing where
        # the kernel sees to that (5.12 and later).
        fork.fork_init()


def load() -> Library:
    """pyverbs, imported at the first call; TransportError when that fails."""
    global _library
    with _opening:
        if _library is None:
            _library = Library()
        return _library


def library() -> tuple[str, str]:
    """(which pyverbs, its file); TransportError when it cannot be imported."""
    found = load()
    return found.flavour, found.file


def immortal(objects: Any) -> None:
    """In a forked child: never let the collector have these, for their destructors would destroy
    the parent's verbs objects."""
    for item in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(item))


def _os_error(error: Exception) -> OSError:
    code = getattr(error, "error_code", -1)
    code = abs(code) if isinstance(code, int) and code not in (-1, 0) else errno.EIO
    return OSError(code, str(error))


class Context:
    """An opened device, with what it can do.  `fds` are the descriptors it opened (a forked child
    closes its copies)."""

    def __init__(self, name: str, port: int) -> None:
        self.lib = lib = load()
        self.port = port
        self.natives: set[Any] = set()
        self._templates: list[WorkTemplates] = []
        with _opening:
            before = _event_descriptors()
            try:
                self.native = lib.Context(name=name)
            except lib.PyverbsError as e:
                raise _os_error(e) from e
            (self.async_fd,) = _event_descriptors() - before
        self.natives.add(self.native)
        self.fds = {self.async_fd}
        command = getattr(self.native, "cmd_fd", -1)
        if isinstance(command, int) and command >= 0:
            self.fds.add(command)
        attributes, ports = (
            self._call(self.native.query_device),
            self._call(self.native.query_port, port),
        )
        self.max_qp_wr = int(attributes.max_qp_wr)
        self.max_cqe = int(attributes.max_cqe)
        self.max_rd_atomic = max(
            1,
            min(MAX_RD_ATOMIC, int(attributes.max_qp_rd_atom), int(attributes.max_qp_init_rd_atom)),
        )
        self.firmware = str(attributes.fw_version)
        self.mtu = int(ports.active_mtu)
        self.lid = int(ports.lid)
        self.max_message_bytes = max(1 << 12, int(ports.max_msg_sz)) & ~4095

    def _call(self, function: Any, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except self.lib.PyverbsError as e:
            raise _os_error(e) from e

    def _make(self, kind: Any, *arguments: Any, **options: Any) -> Any:
        try:
            made = kind(*arguments, **options)
        except self.lib.PyverbsError as e:
            raise _os_error(e) from e
        self.natives.add(made)
        return made

    def destroy(self, native: Any) -> None:
        """Close what one of the methods below made.  Again: nothing."""
        if native in self.natives:
            self._call(native.close)
            self.natives.discard(native)

    def close(self) -> None:
        self.destroy(self.native)

    # -- events ------------------------------------------------------------------------------------
    def next_event(self) -> str:
        """Take one asynchronous event (the descriptor must be readable); its name, such as
        IBV_EVENT_PORT_ERR."""
        event = self._call(self.native.get_async_event)
        kind = event.event_type
        event.ack()
        for name in dir(self.lib.enums):
            if name.startswith(("IBV_EVENT_", "IBV_DEVICE_PORT_ACTIVE_EVENT")) and int(
                getattr(self.lib.enums, name)
            ) == int(kind):
                return name
        return f"event {int(kind)}"

    def create_channel(self) -> tuple[Any, int]:
        """A completion channel and its descriptor."""
        with _opening:
            before = _event_descriptors()
            channel = self._make(self.lib.CompChannel, self.native)
            (fd,) = _event_descriptors() - before
        self.fds.add(fd)
        return channel, fd

    def destroy_channel(self, channel: Any, fd: int) -> None:
        self.fds.discard(fd)
        self.destroy(channel)

    def create_cq(self, depth: int, channel: Any) -> Any:
        return self._make(self.lib.CQ, self.native, depth, None, channel, 0)

    def take_cq_event(self, channel: Any, cq: Any) -> None:
        """Take and acknowledge one event (the channel's descriptor must be readable)."""
        self._call(channel.get_cq_event, cq)
        cq.ack_events(1)

    def request_notify(self, cq: Any) -> None:
        self._call(cq.req_notify)

    def poll(self, cq: Any, n: int) -> list[Any]:
        """At most `n` completions, as pyverbs gives them (wr_id, status, opcode, byte_len,
        imm_data, qp_num)."""
        try:
            return cq.poll(n)[1]
        except self.lib.PyverbsError as e:
            raise _os_error(e) from e

    # -- memory ------------------------------------------------------------------------------------
    def alloc_pd(self) -> Any:
        return self._make(self.lib.PD, self.native)

    def register(self, pd: Any, address: int, length: int, access: int) -> Any:
        """A memory region (lkey, rkey); the numbers of `access` are those of ibv_access_flags."""
        return self._make(self.lib.MR, pd, length, access, address=address)

    # -- queue pairs -------------------------------------------------------------------------------
    def create_qp(
        self, pd: Any, send_cq: Any, recv_cq: Any, max_send_wr: int, max_recv_wr: int
    ) -> tuple[Any, int]:
        """A reliable connected queue pair in INIT, and how many bytes it sends inline."""
        lib = self.lib
        for inline in (WANTED_INLINE_BYTES, MIN_INLINE_BYTES):
            cap = lib.QPCap(
                max_send_wr=max_send_wr,
                max_recv_wr=max_recv_wr,
                max_send_sge=1,
                max_recv_sge=1,
                max_inline_data=inline,
            )
            init = lib.QPInitAttr(
                qp_type=lib.enums.IBV_QPT_RC, scq=send_cq, rcq=recv_cq, cap=cap, sq_sig_all=1
            )
            try:
                qp = self._make(lib.QP, pd, init)
                break
            except OSError as e:
                if e.errno != errno.EINVAL or inline == MIN_INLINE_BYTES:
                    raise
        e_ = lib.enums
        attr = lib.QPAttr(qp_state=e_.IBV_QPS_INIT, port_num=self.port)
        attr.pkey_index = 0
        attr.qp_access_flags = (
            e_.IBV_ACCESS_REMOTE_READ
            | e_.IBV_ACCESS_REMOTE_WRITE
            | e_.IBV_ACCESS_REMOTE_ATOMIC
            | e_.IBV_ACCESS_LOCAL_WRITE
        )
        try:
            self._call(
                qp.modify,
                attr,
                e_.IBV_QP_STATE | e_.IBV_QP_PKEY_INDEX | e_.IBV_QP_PORT | e_.IBV_QP_ACCESS_FLAGS,
            )
        except OSError:
            self.destroy(qp)
            raise
        return qp, inline

    def to_ready_to_receive(
        self,
        qp: Any,
        *,
        gid_index: int,
        peer_gid: str,
        peer_lid: int,
        peer_qp_num: int,
        peer_psn: int,
        mtu: int,
        rd_atomic: int,
        rnr_timer: int,
    ) -> None:
        """INIT -> RTR towards a peer.  `peer_gid` in eight groups of four hexadecimal digits; `mtu`
        a code of ibv_mtu."""
        lib, e = self.lib, self.lib.enums
        attr = lib.QPAttr(qp_state=e.IBV_QPS_RTR, port_num=self.port)
        attr.path_mtu, attr.dest_qp_num, attr.rq_psn = mtu, peer_qp_num, peer_psn
        attr.max_dest_rd_atomic, attr.min_rnr_timer = rd_atomic, rnr_timer
        route = lib.GlobalRoute(dgid=lib.GID(peer_gid), sgid_index=gid_index, hop_limit=HOP_LIMIT)
        attr.ah_attr = lib.AHAttr(port_num=self.port, is_global=1, gr=route, dlid=peer_lid)
        mask = (
            e.IBV_QP_STATE
            | e.IBV_QP_AV
            | e.IBV_QP_PATH_MTU
            | e.IBV_QP_DEST_QPN
            | e.IBV_QP_RQ_PSN
            | e.IBV_QP_MAX_DEST_RD_ATOMIC
            | e.IBV_QP_MIN_RNR_TIMER
        )
        self._call(qp.modify, attr, mask)

    def to_ready_to_send(self, qp: Any, *, psn: int, rd_atomic: int) -> None:
        """RTR -> RTS; retries and timeouts are bounded."""
        lib, e = self.lib, self.lib.enums
        attr = lib.QPAttr(qp_state=e.IBV_QPS_RTS, port_num=self.port)
        attr.timeout, attr.retry_cnt, attr.rnr_retry = TIMEOUT_CODE, RETRY_COUNT, RNR_RETRY_COUNT
        attr.sq_psn, attr.max_rd_atomic = psn, rd_atomic
        mask = (
            e.IBV_QP_STATE
            | e.IBV_QP_TIMEOUT
            | e.IBV_QP_RETRY_CNT
            | e.IBV_QP_RNR_RETRY
            | e.IBV_QP_SQ_PSN
            | e.IBV_QP_MAX_QP_RD_ATOMIC
        )
        self._call(qp.modify, attr, mask)

    def to_error(self, qp: Any) -> None:
        self._call(
            qp.modify,
            self.lib.QPAttr(qp_state=self.lib.enums.IBV_QPS_ERR, port_num=self.port),
            self.lib.enums.IBV_QP_STATE,
        )

    def in_error(self, qp: Any) -> bool:
        """Whether the device has moved `qp` to an error state."""
        attr, _ = self._call(qp.query, self.lib.enums.IBV_QP_STATE)
        return int(attr.qp_state) in (
            int(self.lib.enums.IBV_QPS_ERR),
            int(self.lib.enums.IBV_QPS_SQE),
        )

    # -- work requests -----------------------------------------------------------------------------
    def take_templates(self) -> WorkTemplates:
        """Work requests for one queue pair; `give_templates` when it is destroyed."""
        try:
            return self._templates.pop()
        except IndexError:
            return WorkTemplates(self.lib)

    def give_templates(self, templates: WorkTemplates) -> None:
        self._templates.append(templates)

    def post_recv(self, qp: Any, wr_id: int, address: int, length: int, lkey: int) -> None:
        lib = self.lib
        try:
            qp.post_recv(lib.RecvWR(wr_id=wr_id, num_sge=1, sg=[lib.SGE(address, length, lkey)]))
        except lib.PyverbsError as e:
            raise _os_error(e) from e


class WorkTemplates:
    """Work requests that are made once for each operation and filled in for each post: to make one
    costs several times the post.

    One thread at a time.  A request points to its element's memory and frees it in the end, which
    the element would do again: so elements are immortal, and the templates are kept for the next
    queue pair.
    """

    def __init__(self, lib: Library) -> None:
        self._lib = lib
        self._sends: dict[str, tuple[Any, Any]] = {}
        # pyverbs 44 refuses a receive without an element: one of no bytes does the same
        self._empty_receive = lib.RecvWR(wr_id=0, num_sge=1, sg=[lib.SGE(0, 0, 0)])

    def _make(self, op: str) -> tuple[Any, Any]:
        lib = self._lib
        element = lib.SGE(0, 0, 0)
        immortal((element,))
        work = lib.SendWR(opcode=lib.opcodes[op], num_sge=1, sg=[element], send_flags=lib.signaled)
        work.sg_list = element
        self._sends[op] = work, element
        return work, element

    def post_send(
        self,
        qp: Any,
        op: str,
        wr_id: int,
        address: int,
        length: int,
        lkey: int,
        remote: int,
        rkey: int,
        arg0: int,
        arg1: int,
        inline: bool,
    ) -> None:
        work, element = self._sends.get(op) or self._make(op)
        element.addr = address
        element.length = length
        element.lkey = lkey
        work.wr_id = wr_id
        if op == "read" or op == "write":
            work.set_wr_rdma(rkey, remote)
        elif op == "write_imm":
            work.set_wr_rdma(rkey, remote)
            work.imm_data = arg0
        elif op != "send":
            work.set_wr_atomic(rkey, remote, arg0, arg1)
        if op != "read":
            work.send_flags = self._lib.inline if inline else self._lib.signaled
        try:
            qp.post_send(work)
        except self._lib.PyverbsError as e:
            raise _os_error(e) from e

    def post_empty_recv(self, qp: Any, wr_id: int) -> None:
        self._empty_receive.wr_id = wr_id
        try:
            qp.post_recv(self._empty_receive)
        except self._lib.PyverbsError as e:
            raise _os_error(e) from e


def _event_descriptors() -> set[int]:
    """Descriptors of verbs events in this process: pyverbs 44 does not tell those of its channels
    and contexts."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}") in (
                "anon_inode:[infinibandevent]",
                "anon_inode:[infiniband_event]",
            ):
                found.add(int(name))
        except OSError:
            continue
    return found
