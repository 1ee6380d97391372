# cython: language_level=3, boundscheck=False, wraparound=False
"""Completion queues and queue pairs of the shm provider.

Law of the room: this file offers the contract's Python and C interfaces on top of the engine
(shm_core), and does a queue pair's part of the handshake (shm_link).  Life cycles and ownership:
see shm.pyx.
"""

from libc.errno cimport EAGAIN, ECONNRESET, EINVAL, EPIPE
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from cpython.exc cimport PyErr_CheckSignals
from posix.unistd cimport close as close_descriptor

from kdirect.rdma.contract cimport (
    QPS_ERROR, QPS_INIT, WC_REM_ACCESS_ERR, WC_SUCCESS, CompletionQueue, QueuePair, RemoteView,
    work_completion)
from kdirect.rdma.shm_core cimport *
from kdirect.rdma.shm_execute cimport write_summed
from kdirect.rdma.shm_work cimport *

import contextlib
import fcntl
import os
import select
import socket
import threading
import time

from kdirect.errors import ClosedError, QueuePairError, RdmaError, TransportError
from kdirect.rdma import shm_link
from kdirect.rdma.contract import WorkCompletion, forked_error

log = shm_link.log

if shm_link.VERSION != KD_SHM_VERSION:
    raise ImportError("shm_link.py and shm_ring.h are of different versions: rebuild kdirect")

CUT_REASONS = {CUT_SEQUENCE: "wrote rubbish into its ring",
               CUT_FLOOD: "sent more than there are receives posted",
               CUT_LENGTH: "sent more bytes than agreed",
               CUT_POSITION: "gave a payload position that cannot be",
               CUT_CREDITS: "gave counters that cannot be", CUT_OPCODE: "sent an unknown opcode"}


def reopen_read_only(fd):
    """A new descriptor of the same file that cannot be written through."""
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as e:
        raise RdmaError(f"cannot reopen descriptor {fd} read-only: {e.strerror}",
                        hint="/proc must be mounted and the file readable by this user") from e


cdef class KeyTable:
    """Owns the key table of a protection domain, whose queue pairs hold references to it."""
    def __cinit__(self):
        self.core = domain_new()
        if self.core == NULL:
            raise RdmaError("cannot allocate a key table",
                            hint="check the limits of open files (ulimit -n) and memory")

    def __dealloc__(self):
        if self.core != NULL:
            domain_unref(self.core)

    def fd(self):
        return self.core.keys_fd

    def abandon(self):
        self.core.forked = 1

    def publish(self, uint32_t index, uint32_t key, uint64_t address, uint64_t length,
                uint32_t access):
        cdef kd_local* l = &self.core.locals[index]
        l.address = address
        l.length = length
        l.access = access
        kd_store32(&l.key, key)
        if access & REMOTE_ACCESS:
            kd_store32(&self.core.keys[index], key)

    def withdraw(self, uint32_t index):
        """Take a key back, with full fences: a request that looks it up from now on fails."""
        kd_exchange32(&self.core.locals[index].key, 0)
        kd_exchange32(&self.core.keys[index], 0)


cdef class ShmCompletionQueue(CompletionQueue):
    """See CompletionQueue.  Completions stay in the rings of the queue pairs until they are polled,
    so the queue cannot overrun; `depth` only fulfils the contract.  `arm()` also returns True while
    requests of its queue pairs wait for a receiver, because a thread of this process must run
    them."""

    def __cinit__(self):
        self.event_fd = -1

    def __init__(self, device, int depth):
        self.depth = depth
        self.device = device
        self.event_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.core = cq_new(self.event_fd)
        if self.core == NULL:
            raise MemoryError

    def __dealloc__(self):
        if self.core != NULL:
            cq_free(self.core)
        if self.event_fd >= 0:
            close_descriptor(self.event_fd)

    cdef int c_poll(self, work_completion* out, int n) noexcept nogil:
        return cq_poll(self.core, out, n)

    def poll(self, int n=16):
        """See the contract.  From Python any number of threads may poll and wait."""
        cdef work_completion[64] wcs
        cdef int i, k
        self._check()
        n = 0 if n < 0 else 64 if n > 64 else n
        with nogil:
            k = cq_poll_guarded(self.core, wcs, n)
        return [WorkCompletion(wcs[i].wr_id, wcs[i].status, wcs[i].opcode, wcs[i].byte_len,
                               wcs[i].imm_data if wcs[i].has_imm else None,
                               wcs[i].qp_num) for i in range(k)]

    def wait(self, timeout_ms=-1, spin_us=0):
        cdef int64_t deadline = -1, spin_until = 0, now
        cdef int r
        self._check()
        if spin_us or timeout_ms >= 0:
            now = kd_now_ns()
            spin_until = now + <int64_t> (spin_us * 1000)
            if timeout_ms >= 0:
                deadline = now + <int64_t> (timeout_ms * 1000000)
        self.sleepers += 1
        try:
            while True:
                with nogil:
                    r = cq_wait(self.core, deadline, spin_until)
                if r != WAIT_INTERRUPTED:
                    break
                PyErr_CheckSignals()
        finally:
            self.sleepers -= 1
            if self.closed:
                self._close_event()
        if r < 0:
            self._check()
            raise ClosedError("the completion queue was closed while a thread waited on it",
                              hint="wake() the thread and join it first")
        return r == 1

    def fileno(self):
        self._check()
        return self.event_fd

    def arm(self):
        cdef bint there
        self._check()
        with nogil:
            there = cq_arm(self.core)
        return there

    def wake(self):
        """Wake a sleeper.  If there is none, the next `wait()` returns False at once."""
        self._check()
        kd_exchange32(&self.core.wake, 1)
        kd_signal(self.event_fd)

    def close(self):
        if self.closed:
            return
        if self.users:
            raise RdmaError(f"the completion queue still serves {self.users} queue pairs",
                            hint="close the queue pairs first")
        self.closed = True
        if self.core.forked:
            return
        kd_store32(&self.core.closed, 1)
        kd_signal(self.event_fd)
        with nogil:
            cq_detach_all(self.core)
        self._close_event()
        self.device._cqs.discard(self)

    cdef _close_event(self):
        if self.sleepers == 0 and self.event_fd >= 0:
            fd = self.event_fd
            self.event_fd = -1
            self.core.event_fd = -1
            os.close(fd)

    cdef _check(self):
        if self.core.forked:
            raise forked_error("completion queue")
        if self.closed:
            raise ClosedError("the completion queue is closed", hint="create another")

    def _abandon(self):
        """Called in a forked child."""
        self.core.forked = 1
        fd = self.event_fd
        self.event_fd = self.core.event_fd = -1
        if fd >= 0:
            os.close(fd)


cdef class ShmRemoteView(RemoteView):
    """See RemoteView.  Holds a reference to the mapping, which therefore stays mapped."""
    cdef kd_mapping* mapping

    def close(self):
        cdef kd_mapping* m = self.mapping
        self.data = NULL
        self.mapping = NULL
        if m != NULL:
            mapping_release(m)

    def keep_in_forks(self):
        if self.mapping != NULL:
            mapping_keep_in_forks(self.mapping)

    def __dealloc__(self):
        if self.mapping != NULL:
            mapping_release(self.mapping)


cdef inline void fill(kd_wr* wr, uint32_t kind, uint64_t wr_id, uint64_t local, uint32_t lkey,
                      uint32_t length, uint64_t remote, uint32_t rkey, uint64_t arg0,
                      uint64_t arg1) noexcept nogil:
    wr.wr_id = wr_id
    wr.local = local
    wr.remote = remote
    wr.arg0 = arg0
    wr.arg1 = arg1
    wr.lkey = lkey
    wr.rkey = rkey
    wr.length = length
    wr.kind = kind


cdef class ShmQueuePair(QueuePair):
    """See QueuePair.  Threads: posts as the contract says; `connect` and `close` from any thread;
    the methods with an underscore from the service thread."""

    def __cinit__(self):
        self.memfd = -1

    def __init__(self, domain, ShmCompletionQueue send_cq, ShmCompletionQueue recv_cq, max_send_wr,
                 max_recv_wr, max_send_bytes, rnr_timeout_ms):
        cdef KeyTable keys = domain._keys
        if not (0 < max_send_wr <= shm_link.MAX_QUEUE and 0 < max_recv_wr <= shm_link.MAX_QUEUE):
            raise RdmaError(f"queue depths {max_send_wr} and {max_recv_wr} are out of range",
                            hint=f"give 1 to {shm_link.MAX_QUEUE}")
        if not 0 <= max_send_bytes <= shm_link.MAX_SEND_BYTES:
            raise RdmaError(f"max_send_bytes {max_send_bytes} is out of range",
                            hint=f"give 0 to {shm_link.MAX_SEND_BYTES}")
        send_cq._check()
        recv_cq._check()
        self.domain = domain
        self.device = domain._device
        self.send_cq = send_cq
        self.recv_cq = recv_cq
        self.qp_num = self.device._next_qp_num()
        self.lock = threading.Lock()
        self.token = os.urandom(shm_link.TOKEN_BYTES)
        self.core = qp_new(keys.core, send_cq.core, recv_cq.core, self.qp_num, max_send_wr,
                           max_recv_wr, max_send_bytes,
                           <int64_t> (rnr_timeout_ms * 1000000))
        if self.core == NULL or cq_attach(send_cq.core, self.core, False) or cq_attach(recv_cq.core,
                self.core, True):
            raise MemoryError
        send_cq.users += 1
        recv_cq.users += 1

    def __dealloc__(self):
        if self.core != NULL:
            qp_unref(self.core)

    # -- the C interface ---------------------------------------------------------------------------
    cdef int c_state(self) noexcept nogil:
        return kd_load32(&self.core.state)

    cdef int c_post_read(self, uint64_t wr_id, uint64_t local_address, uint32_t lkey,
                         uint32_t length, uint64_t remote_address, uint32_t rkey) noexcept nogil:
        return qp_read(self.core, wr_id, local_address, lkey, length, remote_address, rkey)

    def view(self, uint64_t remote_address, uint64_t length, uint32_t rkey):
        cdef ShmRemoteView view = ShmRemoteView.__new__(ShmRemoteView)
        cdef uint8_t* base = NULL
        cdef int status
        with nogil:
            status = qp_in_place(self.core, remote_address, length, rkey, &view.mapping, &base)
        if status != WC_SUCCESS:
            return None
        view.address = remote_address
        view.length = length
        view.rkey = rkey
        view.data = base
        return view

    cdef int c_read_in_place(self, RemoteView view, uint64_t remote_address,
                             uint32_t length) noexcept nogil:
        if view.data == NULL or remote_address < view.address or length > view.length \
                or remote_address - view.address > view.length - length:
            return WC_REM_ACCESS_ERR
        return qp_in_place(self.core, remote_address, length, view.rkey, NULL, NULL)

    cdef int c_post_write(self, uint64_t wr_id, uint64_t local_address, uint32_t lkey,
                          uint32_t length, uint64_t remote_address, uint32_t rkey) noexcept nogil:
        return self.post(KIND_WRITE, wr_id, local_address, lkey, length, remote_address, rkey, 0, 0)

    cdef int c_post_write_imm(self, uint64_t wr_id, uint64_t local_address, uint32_t lkey,
                              uint32_t length, uint64_t remote_address, uint32_t rkey,
                              uint32_t imm) noexcept nogil:
        return self.post(KIND_WRITE_IMM, wr_id, local_address, lkey, length, remote_address, rkey,
                         imm, 0)

    cdef int c_post_write_imm_inline(self, uint64_t wr_id, uint64_t local_address, uint32_t lkey,
                                     uint32_t length, uint32_t inline_at,
                                     const uint8_t* inline_data, uint32_t inline_length,
                                     uint64_t remote_address, uint32_t rkey,
                                     uint32_t imm) noexcept nogil:
        cdef kd_wr wr
        cdef kd_inline piece
        fill(&wr, KIND_WRITE_IMM, wr_id, local_address, lkey, length, remote_address, rkey, imm, 0)
        piece.data = inline_data
        piece.at = inline_at
        piece.length = inline_length
        return qp_post(self.core, &wr, &piece)

    cdef int c_post_write_summed(self, uint64_t wr_id, uint64_t local_address, uint32_t lkey,
                                 uint32_t length, uint64_t remote_address, uint32_t rkey,
                                 bint notify, uint32_t imm) noexcept nogil:
        return write_summed(self.core, wr_id, local_address, lkey, length, remote_address, rkey,
                            notify, imm)

    cdef int c_post_send(self, uint64_t wr_id, uint64_t local_address, uint32_t lkey,
                         uint32_t length) noexcept nogil:
        return self.post(KIND_SEND, wr_id, local_address, lkey, length, 0, 0, 0, 0)

    cdef int c_post_recv(self, uint64_t wr_id, uint64_t local_address, uint32_t lkey,
                         uint32_t length) noexcept nogil:
        return qp_post_recv(self.core, wr_id, local_address, lkey, length)

    cdef int c_post_fetch_add(self, uint64_t wr_id, uint64_t local_address, uint32_t lkey,
                              uint64_t remote_address, uint32_t rkey, uint64_t add) noexcept nogil:
        return self.post(KIND_FETCH_ADD, wr_id, local_address, lkey, 8, remote_address, rkey, add,
                         0)

    cdef int c_post_compare_swap(self, uint64_t wr_id, uint64_t local_address, uint32_t lkey,
                                 uint64_t remote_address, uint32_t rkey, uint64_t compare,
                                 uint64_t swap) noexcept nogil:
        return self.post(KIND_COMPARE_SWAP, wr_id, local_address, lkey, 8, remote_address, rkey,
                         compare, swap)

    cdef int post(self, uint32_t kind, uint64_t wr_id, uint64_t local, uint32_t lkey,
                  uint32_t length, uint64_t remote, uint32_t rkey, uint64_t arg0,
                  uint64_t arg1) noexcept nogil:
        cdef kd_wr wr
        fill(&wr, kind, wr_id, local, lkey, length, remote, rkey, arg0, arg1)
        return qp_post(self.core, &wr, NULL)

    # -- connection --------------------------------------------------------------------------------
    @property
    def address(self):
        self._check()
        self.device._service.start()
        boot_id, namespace = shm_link.place()
        return shm_link.Address(self.token, boot_id, namespace, self.qp_num,
                                self.device._service.name).pack()

    def connect(self, peer_address, active, timeout_ms=shm_link.CONNECT_TIMEOUT_MS):
        """Connect to the queue pair at `peer_address`.  A passive end remembers whom to expect and
        returns; its state becomes RTS once that peer has arrived.  An active end connects within
        `timeout_ms`, or raises TransportError."""
        self._check()
        address = shm_link.Address.unpack(peer_address)
        address.check_reachable()
        with self.lock:
            if (self.core.state != QPS_INIT or self.connecting or self.expected is not None
                    or self.sock is not None):
                raise QueuePairError(f"queue pair {self.qp_num} was connected before",
                                     hint="create another; a queue pair connects once")
            self.connecting = active
            self.expected = address.token
        self.device._service.start()
        self.core.service_fd = self.device._service.kick_fd
        if not active:
            self.device._service.expect(self.token, self)
            return
        deadline = time.monotonic() + timeout_ms / 1000
        try:
            self._connect(address, deadline)
        except BaseException:
            with nogil:
                qp_set_error(self.core)
            self._link_close()
            raise
        finally:
            self.connecting = False

    def _connect(self, address, double deadline):
        cdef int rc, flags
        sock = shm_link.open_connection(address, deadline)
        self.sock = sock
        self.core.sock = sock.fileno()
        keys_fd = reopen_read_only(self.domain._keys.fd())
        try:
            shm_link.send_hello(sock, address.token, self._self(),
                                [(<ShmCompletionQueue> self.recv_cq).event_fd, keys_fd])
        except OSError as e:
            raise TransportError(f"queue pair {address.qp_num} hung up: {e.strerror}",
                                 hint="ask it for a new address") from e
        finally:
            os.close(keys_fd)
        self.domain._introduce(self, False)
        peer, fds = shm_link.recv_welcome(sock, address, deadline)
        self._adopt(peer, fds[0], fds[1], fds[2], True)
        poller = select.poll()
        poller.register(sock.fileno(), select.POLLIN | select.POLLRDHUP)
        while True:
            with nogil:
                flags = link_drain(self.core)
            if flags & LINK_READY:
                break
            if flags & LINK_LEFT or self.closed:
                raise TransportError(f"queue pair {address.qp_num} hung up while connecting",
                                     hint="look at its process's log")
            left = deadline - time.monotonic()
            if left <= 0:
                raise TransportError(
                    f"queue pair {address.qp_num} did not finish connecting in time",
                    hint="its process is stopped or overloaded; try again, or use transport=tcp")
            poller.poll(min(left, 0.1) * 1000)
        with self.lock:
            if self.closed:
                raise QueuePairError(f"queue pair {self.qp_num} was closed while connecting",
                                     hint="create another")
            with nogil:
                qp_set_ready(self.core)
            self.device._service.watch(sock.fileno(), self)

    cdef _adopt(self, peer, int memfd, int event_fd, int keys_fd, bint active):
        """Map what the peer sent.  Takes over `event_fd` and closes the two other descriptors."""
        cdef int rc
        cdef uint32_t recv_wr = peer.max_recv_wr, send_bytes = peer.max_send_bytes
        cdef bint light = peer.fences
        self.core.peer_event_fd = event_fd
        try:
            with nogil:
                rc = qp_map_pair(self.core, memfd, keys_fd, active, light, recv_wr, send_bytes)
        finally:
            os.close(keys_fd)
            if active:
                os.close(memfd)
        if rc == EINVAL:
            raise TransportError(f"queue pair {peer.qp_num} sent shared memory of another shape",
                                 hint="use the same release of kdirect on both sides")
        if rc:
            raise TransportError(f"cannot map the shared memory of queue pair {peer.qp_num}:"
                                 f" {os.strerror(rc)}",
                                 hint="check the address-space limit (ulimit -v) and free memory")

    cdef _self(self):
        return shm_link.Peer(self.token, self.qp_num, self.core.max_recv_wr,
                             self.core.max_send_bytes, self.device._fences)

    # -- service thread ----------------------------------------------------------------------------
    def _expected_token(self):
        return self.expected

    def _greet(self, sock, peer, fds):
        """A peer proved that it knows the token: make the memory of the pair.  True if `sock` now
        belongs to this queue pair."""
        cdef uint64_t n = pair_bytes(self.core.max_recv_wr, peer.max_send_bytes, peer.max_recv_wr,
                                     self.core.max_send_bytes)
        cdef int memfd = -1
        with self.lock:
            if self.closed:
                shm_link.close_fds(fds)
                return False
            try:
                memfd = os.memfd_create("kdirect-pair", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                os.ftruncate(memfd, n)
                fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
                given, fds = fds, []
                self._adopt(peer, memfd, given[0], given[1], False)
            except (OSError, TransportError) as e:
                log.error("queue pair %d cannot serve its peer: %s", self.qp_num, e)
                shm_link.close_fds(fds)
                if memfd >= 0:
                    os.close(memfd)
                with nogil:
                    qp_set_error(self.core)
                return False
            self.memfd = memfd
            self.sock = sock
            self.core.sock = sock.fileno()
        return True

    def _welcome(self):
        """The peer announced its regions: answer, announce ours, and go to RTS before the peer
        does."""
        keys_fd = reopen_read_only(self.domain._keys.fd())
        try:
            with self.lock:
                if self.closed:
                    return
                self.welcomed = True
                shm_link.send_welcome(self.sock, self._self(),
                                      [self.memfd, (<ShmCompletionQueue> self.recv_cq).event_fd,
                                       keys_fd])
            self.domain._introduce(self, True)
        except (OSError, RdmaError) as e:
            log.error("queue pair %d lost its peer while connecting: %s", self.qp_num, e)
            with nogil:
                qp_set_error(self.core)
        finally:
            os.close(keys_fd)
            os.close(self.memfd)
            self.memfd = -1

    def _link_event(self, left):
        cdef int flags
        with nogil:
            flags = link_drain(self.core)
        if self.core.map_failures:
            log.error("queue pair %d cannot map %d regions that its peer announced: too many open "
                      "files (ulimit -n) or mappings "
                      "(vm.max_map_count), no address space, or a file shorter than the region",
                      self.qp_num, self.core.map_failures)
            self.core.map_failures = 0
        if flags & LINK_READY and self.memfd >= 0 and not self.welcomed:
            self._welcome()
        if not (left or flags & LINK_LEFT):
            return True
        with nogil:
            qp_set_error(self.core)
        return False

    @property
    def cut_reason(self):
        """Which rule the peer broke, as a text for the log; None if it broke none."""
        return CUT_REASONS.get(self.core.cut, str(self.core.cut)) if self.core.cut else None

    def _link_error(self):
        if self.core.state != QPS_ERROR or self.told or self.sock is None:
            return
        self.told = True
        if self.core.cut:
            log.error("queue pair %d was cut: its peer %s", self.qp_num, self.cut_reason)
        with nogil:
            qp_quiesce(self.core)
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)

    def _link_close(self):
        """The link has ended: from here on no memory of the peer is touched."""
        with nogil:
            qp_set_error(self.core)
            qp_quiesce(self.core)
            link_forget_remotes(self.core)
        self.domain._unlink(self)
        with self.lock:
            sock, self.sock = self.sock, None
            with nogil:
                pthread_mutex_lock(&self.core.link_mutex)
                self.core.link_flags |= LINK_LEFT
                self.core.sock = -1
                pthread_mutex_unlock(&self.core.link_mutex)
            if sock is not None:
                sock.close()
            if self.memfd >= 0:
                os.close(self.memfd)
                self.memfd = -1
            if self.closed:
                self._retire()

    # -- the end -----------------------------------------------------------------------------------
    def close(self):
        with self.lock:
            if self.closed:
                return
            self.closed = True
        (<ShmCompletionQueue> self.send_cq).users -= 1
        (<ShmCompletionQueue> self.recv_cq).users -= 1
        if self.core.forked:
            return
        self.device._service.forget(self.token)
        with nogil:
            qp_set_error(self.core)
            qp_quiesce(self.core)
            link_forget_remotes(self.core)
            kd_store32(&self.core.closed, 1)
        with self.lock:
            if self.sock is None and not self.connecting:
                self._retire()
        self.device._service.kick()

    cdef _retire(self):
        if not self.retired:
            self.retired = True
            self.domain._qps.discard(self)
            self.device._retire(self, self._statistics())

    def _statistics(self):
        cdef kd_qp* q = self.core
        return {"reads": q.reads, "writes": q.writes, "read_bytes": q.read_bytes,
                "write_bytes": q.write_bytes,
                "sends": q.sends, "receives": q.receives, "atomics": q.atomics,
                "wakeups": q.wakeups}

    cdef _check(self):
        if self.core.forked:
            raise forked_error(f"queue pair {self.qp_num}")
        if self.closed:
            raise QueuePairError(f"queue pair {self.qp_num} is closed", hint="create another")

    def _abandon(self):
        """Called in a forked child, which may neither poll the parent's rings nor keep its
        connection open."""
        self.core.forked = 1
        self.core.state = QPS_ERROR
        self.core.sock = -1
        if self.core.peer_event_fd >= 0:
            os.close(self.core.peer_event_fd)
            self.core.peer_event_fd = -1
        self.lock = threading.Lock()
        sock, self.sock = self.sock, None
        if sock is not None:
            sock.close()

    def _pair_memory(self):
        """For tests of hostile peers: the pair memory (shm_ring.h) as a writable view, valid while
        the queue pair lives."""
        return <uint8_t[:self.core.pair_bytes]> self.core.pair


cdef int tell(ShmQueuePair qp, kd_message* m, int fd, int64_t timeout_ns) except -1:
    """Send a control message; 1 once it is sent.  A peer that leaves its socket full is cut off."""
    cdef int rc
    m.magic = KD_MSG_MAGIC
    m.flags = KD_MSG_FLAG_SWEEP if qp.core.need_sweep else 0
    with nogil:
        rc = link_send(qp.core, m, fd, timeout_ns)
    if rc == 0:
        qp.core.need_sweep = 0
        return 1
    if m.type == KD_MSG_REVOKE:
        qp.core.need_sweep = 1      # only a hint: the key table says the same
    else:
        if rc == EAGAIN:
            log.error("queue pair %d disconnects its peer: it does not take in announcements",
                      qp.qp_num)
        elif rc != EPIPE and rc != ECONNRESET:
            log.error("queue pair %d disconnects its peer: a region cannot be announced (%s)",
                      qp.qp_num, os.strerror(rc))
        with nogil:
            qp_set_error(qp.core)   # EPIPE and the like: the service thread sees the hang-up
    return 0
