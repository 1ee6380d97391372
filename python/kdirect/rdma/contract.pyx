# cython: language_level=3, boundscheck=False, wraparound=False
"""The verbs contract: what every transport of kdirect offers, in the words of ibverbs.

Law of the room: everything above ``kdirect.rdma`` is written against these classes; nothing above
imports a provider.  Providers (`shm`, `verbs`, `sim`) subclass them.  There are two interfaces:

- the Python methods (``post_read`` ...), which raise `kdirect.errors` exceptions;
- the C methods (``c_post_read`` ...), which hot loops call without the GIL.  They return 0 or an
  errno: ``ENOMEM`` the send or receive queue is full, ``EINVAL`` a malformed work request,
  ``ENOTCONN`` the queue pair is not connected or in error, ``ECHILD`` the device was opened by the
  parent of this process.  A provider written in Python overrides the Python methods only: the C
  defaults here take the GIL and call them.  A compiled provider overrides both.

Rules every provider keeps (the contract suite checks them):

- A posted work request stays outstanding until its completion is polled.  ``max_send_wr`` and
  ``max_recv_wr`` bound the number of outstanding ones.  Every send-side work request is signalled.
- Local memory of a work request belongs to the transport from post to completion.
- Work requests of one queue pair execute, and complete, in the order they were posted.  What a
  WRITE placed is visible before the completion of any later request of that queue pair reaches the
  peer.
- The last 8 bytes of a WRITE, where they are 8 bytes long and end at an aligned address of the
  target, land last and together: whoever sees them there, by a load with acquire order, sees all of
  the WRITE.  So a process may poll them in its own memory.  An RNIC keeps this rule because it
  places a WRITE from lower to higher addresses and memory is registered without relaxed ordering;
  a copy by software must end with a store of its own.  A protocol that relies on it has a checksum
  as well, so that a fabric that breaks it is caught.
- Remote operations check key, bounds and access flags; a failure completes with WC_REM_ACCESS_ERR
  and moves the queue pair to ERROR.  In ERROR every outstanding request completes with
  WC_WR_FLUSH_ERR.
- SEND and WRITE_WITH_IMM consume one posted receive.  With none posted they wait (receiver not
  ready) at most ``rnr_timeout_ms``, then complete with WC_RNR_RETRY_EXC_ERR.  Once one is posted
  they proceed by themselves, as long as a thread of the sender waits on either completion queue or
  polls the one of its send side.
- READ, WRITE and atomics never involve the target's CPU.
- When the peer dies or disconnects, the queue pair moves to ERROR, outstanding requests are
  flushed, and a sleeper on either completion queue wakes.
- A MemoryRegion whose ``deregister()`` returned True is out of reach: no operation under its key is
  in flight and none will start.  False: the peer did not leave in time; the caller must move the
  data.

Threads: one thread at a time per queue pair's send side, one per receive side; one poller per
completion queue.  Registration and connection calls take the GIL and may be made from any thread.
Fork: a device remembers the process that opened it and refuses to work in another.
"""

from libc.stdint cimport uint8_t, uint32_t, uint64_t, uintptr_t
from libc.errno cimport EAGAIN, ECHILD, EINVAL, ENOMEM, ENOTCONN, EIO
from posix.mman cimport munmap, MAP_FAILED, PROT_READ, PROT_WRITE

cdef extern from "huge_map.h" nogil:
    void* kd_map_shared(int fd, size_t length, int protection, int64_t position)

from cpython.buffer cimport PyBuffer_FillInfo
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE

import enum
import os

from kdirect.errors import QueueFullError, QueuePairError, RdmaError

cdef enum:
    LONG_READ = 1 << 16     # bytes from which on a READ is posted without the GIL

STATUS_NAMES = {
    WC_SUCCESS: "success", WC_LOC_LEN_ERR: "local length error",
    WC_LOC_PROT_ERR: "local protection error",
    WC_WR_FLUSH_ERR: "flushed", WC_REM_INV_REQ_ERR: "remote invalid request",
    WC_REM_ACCESS_ERR: "remote access error",
    WC_RETRY_EXC_ERR: "retries exceeded (peer unreachable)",
    WC_RNR_RETRY_EXC_ERR: "receiver not ready",
}


# Numbers of ibv_access_flags, ibv_wc_status, ibv_wc_opcode and ibv_qp_state.
Access = enum.IntFlag("Access", {
    "LOCAL_WRITE": LOCAL_WRITE, "REMOTE_WRITE": REMOTE_WRITE, "REMOTE_READ": REMOTE_READ,
    "REMOTE_ATOMIC": REMOTE_ATOMIC})
Status = enum.IntEnum("Status", {
    "SUCCESS": WC_SUCCESS, "LOC_LEN_ERR": WC_LOC_LEN_ERR, "LOC_PROT_ERR": WC_LOC_PROT_ERR,
    "WR_FLUSH_ERR": WC_WR_FLUSH_ERR,
    "REM_INV_REQ_ERR": WC_REM_INV_REQ_ERR, "REM_ACCESS_ERR": WC_REM_ACCESS_ERR,
    "RETRY_EXC_ERR": WC_RETRY_EXC_ERR,
    "RNR_RETRY_EXC_ERR": WC_RNR_RETRY_EXC_ERR})
Opcode = enum.IntEnum("Opcode", {
    "SEND": WC_SEND, "RDMA_WRITE": WC_RDMA_WRITE, "RDMA_READ": WC_RDMA_READ,
    "COMP_SWAP": WC_COMP_SWAP, "FETCH_ADD": WC_FETCH_ADD,
    "RECV": WC_RECV, "RECV_RDMA_WITH_IMM": WC_RECV_RDMA_WITH_IMM})
State = enum.IntEnum("State",
                     {"RESET": QPS_RESET, "INIT": QPS_INIT, "RTS": QPS_RTS, "ERROR": QPS_ERROR})


class WorkCompletion:
    """One completion as Python sees it."""
    __slots__ = ("wr_id", "status", "opcode", "byte_len", "imm_data", "qp_num")

    def __init__(self, wr_id, status, opcode, byte_len=0, imm_data=None, qp_num=0):
        self.wr_id = wr_id
        self.status = status
        self.opcode = opcode
        self.byte_len = byte_len
        self.imm_data = imm_data
        self.qp_num = qp_num

    @property
    def ok(self):
        return self.status == WC_SUCCESS

    def __repr__(self):
        imm = "" if self.imm_data is None else f" imm=0x{self.imm_data:x}"
        return (f"WorkCompletion(wr_id={self.wr_id}, {STATUS_NAMES.get(self.status, self.status)}, "
                f"opcode={self.opcode}, byte_len={self.byte_len}{imm}, qp={self.qp_num})")


cdef class Memory:
    """A stretch of mapped memory backed by a descriptor, so that it can be registered.

    ``Memory.anonymous(length)`` allocates (a memfd); ``Memory.map(fd, length, writable)`` maps a
    descriptor it takes a duplicate of; ``Memory.wrap(fd, address, length, writable, owner)``
    describes a mapping that `owner` holds (a log segment) and keeps `owner` alive.  Supports the
    buffer protocol. The mapping lives until ``close()`` or the last reference goes; memory regions
    hold a reference.
    """

    def __cinit__(self):
        self.fd = -1
        self.data = NULL

    @staticmethod
    def anonymous(length, name="kdirect"):
        """Allocate `length` bytes (rounded up to whole pages) of shareable zeroed memory."""
        size = max(4096, (length + 4095) // 4096 * 4096)
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, size)
            return Memory.map(fd, size, True)
        finally:
            os.close(fd)

    @staticmethod
    def map(int fd, uint64_t length, bint writable=True):
        """Map `length` bytes of `fd` from its start, shared."""
        cdef Memory m = Memory.__new__(Memory)
        cdef void* p
        cdef int prot = (PROT_READ | PROT_WRITE) if writable else PROT_READ
        m.fd = os.dup(fd)
        p = kd_map_shared(m.fd, length, prot, 0)
        if p == MAP_FAILED:
            raise RdmaError(f"cannot map {length} bytes of descriptor {fd}",
                            hint="check the address-space limit (ulimit -v) and free memory")
        m.data = <uint8_t*> p
        m.address = <uint64_t><uintptr_t> p
        m.length = length
        m.writable = writable
        m.mapped_here = True
        return m

    @staticmethod
    def wrap(int fd, uint64_t address, uint64_t length, bint writable, owner):
        """Describe memory that `owner` has mapped at `address` from descriptor `fd`."""
        cdef Memory m = Memory.__new__(Memory)
        m.fd = os.dup(fd)
        m.data = <uint8_t*><uintptr_t> address
        m.address = address
        m.length = length
        m.writable = writable
        m.owner = owner
        m.mapped_here = False
        return m

    def __getbuffer__(self, Py_buffer* view, int flags):
        if self.closed:
            raise BufferError("memory is closed")
        PyBuffer_FillInfo(view, self, <void*> self.data, <Py_ssize_t> self.length,
                          not self.writable, flags)

    def close(self):
        """Unmap.  The caller must know that no region, view or pointer into it remains in use."""
        if self.closed:
            return
        self.closed = True
        if self.mapped_here and self.data != NULL:
            munmap(<void*> self.data, self.length)
        self.data = NULL
        self.owner = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __dealloc__(self):
        # exports hold a reference, so no view is left here
        if not self.closed:
            if self.mapped_here and self.data != NULL:
                munmap(<void*> self.data, self.length)
            if self.fd >= 0:
                try:
                    os.close(self.fd)
                except Exception:
                    pass


cdef class MemoryRegion:
    """A registered stretch of a Memory.  Life: `ProtectionDomain.register` to `deregister` (or the
    domain's close).  Remote peers name it by (`rkey`, address within [address, address + length)).
    """

    def __init__(self, Memory memory=None, uint64_t address=0, uint64_t length=0, uint32_t lkey=0,
                 uint32_t rkey=0, int access=0):
        self.memory = memory
        self.address = address
        self.data = <uint8_t*><uintptr_t> address
        self.length = length
        self.lkey = lkey
        self.rkey = rkey
        self.access = access

    def deregister(self, timeout_ms=100):
        """End remote and local access.  True once no operation under the key is in flight (see the
        module's rules); False when a peer did not leave within `timeout_ms`."""
        raise NotImplementedError

    def __repr__(self):
        return (f"MemoryRegion(0x{self.address:x}+{self.length}, rkey=0x{self.rkey:x}, "
                f"access={self.access})")


cdef class CompletionQueue:
    """Completions of the queue pairs created on it, in order per queue pair."""

    def __init__(self, int depth=0):
        self.depth = depth

    cdef int c_poll(self, work_completion* out, int n) noexcept nogil:
        cdef int k = 0
        with gil:
            try:
                for wc in self.poll(n):
                    out[k].wr_id = wc.wr_id
                    out[k].status = wc.status
                    out[k].opcode = wc.opcode
                    out[k].byte_len = wc.byte_len
                    out[k].has_imm = wc.imm_data is not None
                    out[k].imm_data = 0 if wc.imm_data is None else wc.imm_data
                    out[k].qp_num = wc.qp_num
                    k += 1
            except Exception:
                return -EIO
        return k

    def poll(self, int n=16):
        """At most `n` completions, without blocking; a list of WorkCompletion."""
        cdef work_completion wcs[64]
        cdef int i, k
        if n > 64:
            n = 64
        with nogil:
            k = self.c_poll(wcs, n)
        if k == -ECHILD:
            raise forked_error("completion queue")
        if k < 0:
            raise RdmaError(f"completion queue overrun ({os.strerror(-k)})",
                            hint="make the queue at least as deep as its queue pairs together")
        return [WorkCompletion(wcs[i].wr_id, wcs[i].status, wcs[i].opcode, wcs[i].byte_len,
                               wcs[i].imm_data if wcs[i].has_imm else None, wcs[i].qp_num)
                for i in range(k)]

    def wait(self, timeout_ms=-1, spin_us=0):
        """Block until a completion is ready or an attached queue pair went to ERROR; True if so,
        False on timeout (-1: none).  Spins for `spin_us` before it sleeps.  Releases the GIL."""
        raise NotImplementedError

    def fileno(self):
        """A descriptor that turns readable after `arm()` when a completion arrives."""
        raise NotImplementedError

    def arm(self):
        """Ask for one event on `fileno()`.  Returns True when completions are already there (then
        no event need come: poll first), so that no wake-up is lost."""
        raise NotImplementedError

    def wake(self):
        """Make a sleeper in `wait()` return False now (any thread)."""
        raise NotImplementedError

    def close(self):
        raise NotImplementedError


def forked_error(what):
    """The error for work on an object of a device that the parent process opened."""
    error = RdmaError(f"{what} was opened by the process that forked this one (here: process"
                      f" {os.getpid()})",
                      hint="open a device in this process: kdirect.rdma.open_device")
    error.forked = True
    return error


cdef _check(int rc, what, qp):
    if rc == 0:
        return
    if rc == ECHILD:
        raise forked_error(f"{what}: queue pair {qp.qp_num}")
    if rc == ENOMEM:
        raise QueueFullError(f"{what}: the queue of queue pair {qp.qp_num} is full",
                             hint="poll completions before posting more, or create it deeper")
    if rc == ENOTCONN:
        raise QueuePairError(f"{what}: queue pair {qp.qp_num} is not connected",
                             hint="the peer left or an earlier request failed; open a new"
                             " connection")
    raise RdmaError(f"{what}: {os.strerror(rc)} on queue pair {qp.qp_num}",
                    hint="check lengths, keys and the 8-byte alignment of atomics")


cdef class RemoteView:
    """A peer's region that this process can address itself; see `QueuePair.view`.

    The caller that asked for it owns it.  It lives until `close` or the last reference; the pages
    stay mapped as long, whatever happens to the key.  Only what `c_read_in_place` has allowed may
    be used.
    """

    def close(self):
        """Release the pages."""
        self.data = NULL

    def keep_in_forks(self):
        """Have the pages stay where they are in processes that this one forks from now on, for who
        still looks at them there.  For good: they are the file's, and nobody changes them."""


cdef class QueuePair:
    """A reliable connected queue pair.

    Life: created in INIT by `ProtectionDomain.create_qp`; `address` (bytes) goes to the peer by any
    channel; `connect(peer_address, active)` moves it to RTS (active: the side that learned the
    other's address last, so both addresses are known; passive: it may return before the peer
    arrived); `close()` or an error ends it.
    """

    def __init__(self, uint32_t qp_num=0, CompletionQueue send_cq=None,
                 CompletionQueue recv_cq=None):
        self.qp_num = qp_num
        self.send_cq = send_cq
        self.recv_cq = recv_cq

    cdef int c_state(self) noexcept nogil:
        with gil:
            return self.state

    cdef int c_post_read(self, uint64_t wr_id, uint64_t local_address, uint32_t lkey,
                         uint32_t length, uint64_t remote_address, uint32_t rkey) noexcept nogil:
        with gil:
            return _errno(self.raw_post,
                          ("read", wr_id, local_address, lkey, length, remote_address, rkey, 0, 0))

    def view(self, uint64_t remote_address, uint64_t length, uint32_t rkey):
        """The peer's memory itself, for readers that need no copy.  None where that is impossible
        (an RNIC, a key that is not valid, a region without REMOTE_READ).  Meant for bytes that do
        not change any more.

        Another process can write there.  Use a byte only after `c_read_in_place` has allowed it.
        Read each length once, check it, and use that copy: a checksum that was right proves nothing
        about bytes that are read a second time.
        """
        return None

    cdef int c_read_in_place(self, RemoteView view, uint64_t remote_address,
                             uint32_t length) noexcept nogil:
        """A READ without the copy: the checks of a READ of [remote_address, remote_address +
        length) under the view's key, now, and its count.  WC_SUCCESS, or the status that the READ
        would complete with; the queue pair stays as it is."""
        return WC_REM_ACCESS_ERR

    def read_in_place(self, RemoteView view, uint64_t remote_address, uint32_t length):
        """The bytes, copied, after the checks of `c_read_in_place`; for tests and tools.  Raises
        QueuePairError."""
        cdef int status
        with nogil:
            status = self.c_read_in_place(view, remote_address, length)
        if status != WC_SUCCESS:
            raise QueuePairError(f"READ in place: {STATUS_NAMES.get(status, status)}",
                                 hint="access ended or never reached so far; ask for it again")
        return (<const char*> (view.data + (remote_address - view.address)))[:length]

    cdef int c_post_write(self, uint64_t wr_id, uint64_t local_address, uint32_t lkey,
                          uint32_t length, uint64_t remote_address, uint32_t rkey) noexcept nogil:
        with gil:
            return _errno(self.raw_post,
                          ("write", wr_id, local_address, lkey, length, remote_address, rkey, 0, 0))

    cdef int c_post_write_imm(self, uint64_t wr_id, uint64_t local_address, uint32_t lkey,
                              uint32_t length, uint64_t remote_address, uint32_t rkey,
                              uint32_t imm) noexcept nogil:
        with gil:
            return _errno(self.raw_post,
                          ("write_imm", wr_id, local_address, lkey, length, remote_address, rkey,
                           imm, 0))

    cdef int c_post_write_imm_inline(self, uint64_t wr_id, uint64_t local_address, uint32_t lkey,
                                     uint32_t length, uint32_t inline_at,
                                     const uint8_t* inline_data, uint32_t inline_length,
                                     uint64_t remote_address, uint32_t rkey,
                                     uint32_t imm) noexcept nogil:
        """As `c_post_write_imm`, but `inline_length` of the `length` bytes, from the `inline_at`th
        on, come from `inline_data` in place of the registered memory, whose bytes there are not
        read.  As with IBV_SEND_INLINE, they may lie anywhere in this process, and are read before
        the call returns and never after.

        EAGAIN: not here, or not now (something is deferred, or the receiver is not ready); nothing
        was posted, and the caller copies them into its registered memory and posts that.  EINVAL:
        they do not lie within the request."""
        return EAGAIN

    cdef int c_post_write_summed(self, uint64_t wr_id, uint64_t local_address, uint32_t lkey,
                                 uint32_t length, uint64_t remote_address, uint32_t rkey,
                                 bint notify, uint32_t imm) noexcept nogil:
        """A WRITE, or with `notify` a WRITE_WITH_IMM, that sums what it carries: at the target the
        4 bytes from `length` - 8 on are the CRC-32C of all its other bytes, in their order.  Those
        4 of the source are not read.  So the bytes are read once for sum and copy.

        EAGAIN: not here, or not now; nothing was posted, and the caller puts the sum into the
        source and posts that."""
        return EAGAIN

    cdef int c_post_send(self, uint64_t wr_id, uint64_t local_address, uint32_t lkey,
                         uint32_t length) noexcept nogil:
        with gil:
            return _errno(self.raw_post, ("send", wr_id, local_address, lkey, length, 0, 0, 0, 0))

    cdef int c_post_recv(self, uint64_t wr_id, uint64_t local_address, uint32_t lkey,
                         uint32_t length) noexcept nogil:
        with gil:
            return _errno(self.raw_post, ("recv", wr_id, local_address, lkey, length, 0, 0, 0, 0))

    cdef int c_post_fetch_add(self, uint64_t wr_id, uint64_t local_address, uint32_t lkey,
                              uint64_t remote_address, uint32_t rkey, uint64_t add) noexcept nogil:
        with gil:
            return _errno(self.raw_post,
                          ("fetch_add", wr_id, local_address, lkey, 8, remote_address, rkey, add,
                           0))

    cdef int c_post_compare_swap(self, uint64_t wr_id, uint64_t local_address, uint32_t lkey,
                                 uint64_t remote_address, uint32_t rkey, uint64_t compare,
                                 uint64_t swap) noexcept nogil:
        with gil:
            return _errno(self.raw_post,
                          ("compare_swap", wr_id, local_address, lkey, 8, remote_address, rkey,
                           compare, swap))

    def raw_post(self, op, wr_id, local_address, lkey, length, remote_address, rkey, arg0, arg1):
        """For providers in Python: post one work request, or raise QueueFullError (ENOMEM),
        QueuePairError (ENOTCONN) or RdmaError (EINVAL).  `op` is one of read, write, write_imm,
        send, recv, fetch_add, compare_swap; `arg0` is the immediate, the addend or the value to
        compare, `arg1` the value to swap in."""
        raise NotImplementedError

    @property
    def state(self):
        return self.c_state()

    @property
    def address(self):
        """What the peer's `connect` needs, as bytes."""
        raise NotImplementedError

    def listen(self):
        """Make `address` complete for a peer that is active, before this side's `connect`: where
        addresses are exchanged in one round, and each side takes its own before it has seen the
        other's.  Providers whose addresses are complete at once need nothing here."""

    def connect(self, peer_address, active):
        raise NotImplementedError

    def close(self):
        """Disconnect: the peer's queue pair moves to ERROR, what is outstanding here is flushed."""
        raise NotImplementedError

    # Python interface: a local buffer is (region, position in the region's memory range, length)
    def post_read(self, wr_id, MemoryRegion local, uint64_t position, uint32_t length,
                  uint64_t remote_address, uint32_t rkey):
        """READ `length` bytes at (`remote_address`, `rkey`) into `local` at `position`."""
        cdef int rc
        cdef uint64_t number = wr_id, at = local.address + position
        cdef uint32_t lkey = local.lkey
        if length < LONG_READ:
            rc = self.c_post_read(number, at, lkey, length, remote_address, rkey)
        else:
            with nogil:  # over shm the posting thread copies
                rc = self.c_post_read(number, at, lkey, length, remote_address, rkey)
        _check(rc, "READ", self)

    def post_write(self, wr_id, MemoryRegion local, uint64_t position, uint32_t length,
                   uint64_t remote_address, uint32_t rkey):
        """WRITE `length` bytes of `local` at `position` to (`remote_address`, `rkey`)."""
        _check(self.c_post_write(wr_id, local.address + position, local.lkey, length,
                                 remote_address, rkey), "WRITE", self)

    def post_write_imm(self, wr_id, MemoryRegion local, uint64_t position, uint32_t length,
                       uint64_t remote_address, uint32_t rkey, uint32_t imm):
        """WRITE_WITH_IMM; `length` may be 0."""
        _check(self.c_post_write_imm(wr_id, local.address + position, local.lkey, length,
                                     remote_address, rkey, imm), "WRITE_WITH_IMM", self)

    def post_write_imm_inline(self, wr_id, MemoryRegion local, uint64_t position, uint32_t length,
                              uint32_t inline_at, bytes inline_data, uint64_t remote_address,
                              uint32_t rkey, uint32_t imm):
        """WRITE_WITH_IMM of `length` bytes, of which those from `inline_at` on are `inline_data`;
        see `c_post_write_imm_inline`.  False: nothing was posted, use `post_write_imm`."""
        cdef int rc = self.c_post_write_imm_inline(wr_id, local.address + position, local.lkey,
                                                   length, inline_at,
                                                   <const uint8_t*> PyBytes_AS_STRING(inline_data),
                                                   <uint32_t> PyBytes_GET_SIZE(inline_data),
                                                   remote_address, rkey, imm)
        if rc == EAGAIN:
            return False
        _check(rc, "WRITE_WITH_IMM", self)
        return True

    def post_write_summed(self, wr_id, MemoryRegion local, uint64_t position, uint32_t length,
                          uint64_t remote_address, uint32_t rkey, imm=None):
        """A WRITE, WITH_IMM if there is one, that sums what it carries; see `c_post_write_summed`.
        False: nothing was posted."""
        cdef int rc = self.c_post_write_summed(wr_id, local.address + position, local.lkey, length,
                                               remote_address, rkey, imm is not None, imm or 0)
        if rc == EAGAIN:
            return False
        _check(rc, "WRITE", self)
        return True

    def post_send(self, wr_id, MemoryRegion local, uint64_t position, uint32_t length):
        _check(self.c_post_send(wr_id, local.address + position, local.lkey, length), "SEND", self)

    def post_recv(self, wr_id, MemoryRegion local=None, uint64_t position=0, uint32_t length=0):
        """Post a receive; without a region it serves WRITE_WITH_IMM and empty SENDs only."""
        if local is None:
            _check(self.c_post_recv(wr_id, 0, 0, 0), "RECV", self)
        else:
            _check(self.c_post_recv(wr_id, local.address + position, local.lkey, length), "RECV",
                   self)

    def post_fetch_add(self, wr_id, MemoryRegion local, uint64_t position, uint64_t remote_address,
                       uint32_t rkey, uint64_t add):
        """FETCH_AND_ADD on 8 aligned bytes; the old value arrives in `local` (native order)."""
        _check(self.c_post_fetch_add(wr_id, local.address + position, local.lkey, remote_address,
                                     rkey, add), "FETCH_AND_ADD", self)

    def post_compare_swap(self, wr_id, MemoryRegion local, uint64_t position,
                          uint64_t remote_address, uint32_t rkey, uint64_t compare, uint64_t swap):
        """COMPARE_AND_SWAP on 8 aligned bytes; the old value arrives in `local` (native order)."""
        _check(self.c_post_compare_swap(wr_id, local.address + position, local.lkey, remote_address,
                                        rkey, compare, swap), "COMPARE_AND_SWAP", self)


cdef int _errno(post, args):
    try:
        post(*args)
    except QueueFullError:
        return ENOMEM
    except QueuePairError:
        return ENOTCONN
    except RdmaError as e:
        return ECHILD if getattr(e, "forked", False) else EINVAL
    except Exception:
        return EIO
    return 0


def check_registration(Memory memory, access, position, length):
    """The length to register (`length`, or the rest of `memory`), or RdmaError: what ibv_reg_mr
    refuses."""
    if memory.closed:
        raise RdmaError("cannot register closed memory", hint="register it before Memory.close()")
    if length is None:
        length = memory.length - position
    if position < 0 or length <= 0 or position + length > memory.length:
        raise RdmaError(f"cannot register [{position}, {position + length}) of {memory.length}"
                        " bytes of memory",
                        hint="the region must be a non-empty part of the memory")
    if access & ~15:
        raise RdmaError(f"cannot register memory with unknown access flags {access:#x}",
                        hint="combine values of Access")
    if access & (REMOTE_WRITE | REMOTE_ATOMIC) and not access & LOCAL_WRITE:
        raise RdmaError("cannot register memory for remote writes without LOCAL_WRITE",
                        hint="add Access.LOCAL_WRITE, as ibverbs demands")
    if access & LOCAL_WRITE and not memory.writable:
        raise RdmaError("cannot register read-only memory for writing",
                        hint="map it writable, or leave out LOCAL_WRITE")
    return length


class ProtectionDomain:
    """Memory regions and queue pairs that may work together.  A broker has one for each client."""

    def register(self, memory, access, position=0, length=None):
        """Register [position, position + length) of `memory`; returns a MemoryRegion."""
        raise NotImplementedError

    def create_qp(self, send_cq, recv_cq, max_send_wr=128, max_recv_wr=128, max_send_bytes=65536,
                  rnr_timeout_ms=5000):
        """A queue pair in INIT.  `max_send_bytes` bounds one SEND."""
        raise NotImplementedError

    def close(self):
        """Close its queue pairs, then end its regions."""
        raise NotImplementedError


class Device:
    """One opened device: `alloc_pd()`, `create_cq(depth)`, `close()`, `statistics()` (a dict of
    counters: reads, writes, read_bytes, write_bytes, sends, receives, atomics, wakeups)."""

    name = ""

    def alloc_pd(self):
        raise NotImplementedError

    def create_cq(self, depth=1024):
        raise NotImplementedError

    def statistics(self):
        raise NotImplementedError

    def close(self):
        raise NotImplementedError

    @property
    def closed(self):
        """Whether `close` was called."""
        raise NotImplementedError
