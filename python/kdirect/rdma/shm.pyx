# cython: language_level=3, boundscheck=False, wraparound=False
"""The shm provider: a software RNIC for the processes of one host.

Law of the room: the classes of the contract over the engine (shm_core) and the links (shm_link).
READ, WRITE and atomics are the initiator's own copies and instructions in mapped memory;
WRITE_WITH_IMM and SEND add an entry to a shared ring and wake the target only if it sleeps.  The
target's CPU takes no part.

Who owns what:

- A Memory owns its mapping; a region keeps its Memory alive until it is deregistered.
- A protection domain owns its key table and its regions, and tells connected peers about them.
- A queue pair owns its pair memory, its socket and its mappings of the peer's regions.  The
  mappings go at `close()` or when the peer has left, after whatever ran on them has ended; the pair
  memory goes when the last completion was polled.
- A device owns the service thread and everything above.  Close children first; parents close the
  rest.

What differs from hardware: requests run inside their post, so the completion is there when the post
returns.  Requests that wait for a receiver run in `poll()` and `wait()` of their send CQ, and stand
still while nobody calls those.  A completion queue cannot overrun.

The trust boundary is the user account of one host: a descriptor handed over cannot be taken back,
so revocation binds the library (key table, checked before each operation), and read-only grants are
passed as descriptors opened read-only.  A peer that breaks the rules of the rings is cut.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc

from kdirect.rdma.contract cimport REMOTE_ATOMIC, REMOTE_WRITE, Memory, MemoryRegion
from kdirect.rdma.shm_core cimport *
from kdirect.rdma.shm_queues cimport REMOTE_ACCESS, ShmQueuePair, tell

import collections
import os
import threading
import weakref

from kdirect.errors import ClosedError, RdmaError
from kdirect.rdma import shm_link
from kdirect.rdma.contract import Device, ProtectionDomain, check_registration, forked_error
from kdirect.rdma.shm_queues import KeyTable, ShmCompletionQueue, reopen_read_only

KEEP_FREE = 64      # indices that rest before they are used again; few, so that tables stay short
GENERATIONS = 1 << 32 - KD_KEY_INDEX_BITS
cdef int64_t ANNOUNCE_TIMEOUT_NS = 500 * 1000000


cdef class ShmMemoryRegion(MemoryRegion):
    """See MemoryRegion.  `deregister` may be called again after it returned False, to wait on."""
    cdef object domain
    cdef readonly bint ended        # deregistered, and nothing is in flight

    cdef _end(self):
        self.ended = True

    def deregister(self, timeout_ms=100):
        return self.domain._deregister(self, timeout_ms)


class ShmProtectionDomain(ProtectionDomain):
    """See ProtectionDomain.  `_lock` orders registrations and the peers they are announced to: a
    region is announced to every peer either when it is registered or when the peer is introduced.
    """

    def __init__(self, device):
        self._device = device
        self._keys = KeyTable()
        self._lock = threading.RLock()
        self._regions = {}          # key -> region, until it is out of reach
        self._links = set()         # queue pairs whose peers hear of registrations
        self._qps = set()           # queue pairs that may run, or whose peers may
        self._free = collections.deque()
        self._next = 0              # indices from here on were never used
        self._last = {}             # index -> its last generation
        self._step = int.from_bytes(os.urandom(4), "little") % GENERATIONS | 1
        self._closed = False

    def register(self, memory, access, position=0, length=None):
        cdef ShmMemoryRegion region = ShmMemoryRegion.__new__(ShmMemoryRegion)
        cdef Memory m = memory
        self._check()
        access = int(access)
        length = check_registration(m, access, position, length)
        if m.fd < 0:
            raise RdmaError("memory without a descriptor cannot be registered with shm",
                            hint="use Memory.anonymous, Memory.map or Memory.wrap")
        with self._lock:
            index, key = self._allocate()
            region.memory = m
            region.address = m.address + <uint64_t> position
            region.length = length
            region.access = access
            region.lkey = key
            region.rkey = key
            region.domain = self
            region.data = m.data + <uint64_t> position
            self._keys.publish(index, key, region.address, region.length, access)
            self._regions[key] = region
            if self._links and access & REMOTE_ACCESS:
                try:
                    self._announce(region, self._links)
                except BaseException:
                    self._keys.withdraw(index)
                    self._free_key(region)
                    raise
        return region

    def _allocate(self):
        """An index and its next key.  Generations start and step at random, and the step is odd: no
        key of an index comes back before all the others were used."""
        if self._next < KD_KEYS and len(self._free) < KEEP_FREE:
            index = self._next
            self._next += 1
            generation = int.from_bytes(os.urandom(4), "little")
        elif self._free:
            index = self._free.popleft()
            generation = self._last[index] + self._step
        else:
            raise RdmaError(f"the protection domain has {KD_KEYS} regions already",
                            hint="deregister what is no longer used, or use another domain")
        generation %= GENERATIONS
        if generation == 0:
            generation = self._step
        self._last[index] = generation
        return index, generation << KD_KEY_INDEX_BITS | index

    def _free_key(self, ShmMemoryRegion region):
        if self._regions.pop(region.rkey, None) is not None:
            self._free.append(region.rkey & KD_KEY_INDEX_MASK)

    def _announce(self, ShmMemoryRegion region, links):
        """Tell `links` of a region.  A peer that does not empty its socket in time is disconnected.
        """
        cdef kd_message m
        cdef int rc, fd
        cdef ShmQueuePair qp
        read_only = not region.access & (REMOTE_WRITE | REMOTE_ATOMIC)
        fd = reopen_read_only(region.memory.fd) if read_only else region.memory.fd
        try:
            m.type = KD_MSG_ANNOUNCE
            m.rkey = region.rkey
            m.access = region.access
            m.address = region.address
            m.length = region.length
            m.position = region.address - region.memory.address
            for qp in list(links):
                tell(qp, &m, fd, ANNOUNCE_TIMEOUT_NS)
        finally:
            if read_only:
                os.close(fd)

    def _introduce(self, ShmQueuePair qp, bint passive):
        """Announce everything to a new peer; the passive side is in RTS before the peer can know
        it."""
        cdef kd_message m
        with self._lock:
            for region in list(self._regions.values()):
                if region.access & REMOTE_ACCESS:
                    self._announce(region, (qp,))
            self._links.add(qp)
            if passive:
                with nogil:
                    qp_set_ready(qp.core)
            m.type = KD_MSG_READY
            tell(qp, &m, -1, ANNOUNCE_TIMEOUT_NS)

    def _unlink(self, ShmQueuePair qp):
        with self._lock:
            self._links.discard(qp)

    def _deregister(self, ShmMemoryRegion region, timeout_ms):
        cdef kd_message m
        self._device._check_process()
        with self._lock:
            if region.ended:
                return True
            self._keys.withdraw(region.rkey & KD_KEY_INDEX_MASK)
        if not self._wait_out_of_reach(timeout_ms):
            return False
        with self._lock:
            if not region.ended:
                region._end()
                self._free_key(region)
                if region.access & REMOTE_ACCESS:
                    m.type = KD_MSG_REVOKE
                    m.rkey = region.rkey
                    for qp in list(self._links):
                        tell(qp, &m, -1, 0)
        return True

    def _wait_out_of_reach(self, timeout_ms):
        cdef int n, out
        cdef int64_t timeout_ns = <int64_t> (timeout_ms * 1000000)
        cdef kd_qp** cores
        qps = list(self._qps)           # keeps them alive
        n = len(qps)
        cores = <kd_qp**> malloc((n + 1) * sizeof(kd_qp*))
        if cores == NULL:
            raise MemoryError
        for i in range(n):
            cores[i] = (<ShmQueuePair> qps[i]).core
        with nogil:
            out = wait_out_of_reach(cores, n, timeout_ns)
        free(cores)
        return out != 0

    def create_qp(self, send_cq, recv_cq, max_send_wr=128, max_recv_wr=128, max_send_bytes=65536,
                  rnr_timeout_ms=5000):
        self._check()
        qp = ShmQueuePair(self, send_cq, recv_cq, max_send_wr, max_recv_wr, max_send_bytes,
                          rnr_timeout_ms)
        self._qps.add(qp)
        self._device._qps.add(qp)
        return qp

    def close(self):
        if self._closed:
            return
        self._closed = True
        for qp in list(self._qps):
            qp.close()
        if self._device._forked():
            return
        with self._lock:
            for region in self._regions.values():
                self._keys.withdraw(region.rkey & KD_KEY_INDEX_MASK)
        if not self._wait_out_of_reach(100):
            shm_link.log.warning("a peer is still inside a copy under a key of a closed protection "
                                 "domain: its process is stopped or hangs")
        with self._lock:
            for region in self._regions.values():
                (<ShmMemoryRegion> region)._end()
            self._regions.clear()
        self._device._domains.discard(self)

    def _check(self):
        self._device._check_process()
        if self._closed:
            raise ClosedError("the protection domain is closed", hint="allocate another")

    def _abandon(self):
        self._keys.abandon()
        self._lock = threading.RLock()


class ShmDevice(Device):
    """See Device.  Costs nothing until it is used: the listener and the service thread start with
    the first address or connection.  Threads: any."""

    name = "shm"

    def __init__(self):
        cdef bint light
        self._pid = os.getpid()
        with nogil:             # a broker opens its device on a thread while its event loop serves
            light = fences_register()
        self._fences = bool(light)
        self._service = shm_link.ShmLinkService()
        self._lock = threading.Lock()
        self._domains = set()
        self._cqs = set()
        self._qps = set()
        self._retired = dict.fromkeys(COUNTERS, 0)
        self._last_qp_num = 0
        self._closed = False
        _devices[id(self)] = weakref.ref(self, lambda _, key=id(self): _devices.pop(key, None))

    def alloc_pd(self):
        self._check()
        domain = ShmProtectionDomain(self)
        self._domains.add(domain)
        return domain

    def create_cq(self, depth=1024):
        self._check()
        if depth <= 0:
            raise RdmaError(f"completion queue depth {depth} is out of range",
                            hint="give at least 1")
        cq = ShmCompletionQueue(self, depth)
        self._cqs.add(cq)
        return cq

    def statistics(self):
        """Counters of all queue pairs, closed ones too; `wakeups` counts eventfd writes to sleeping
        peers."""
        with self._lock:
            total = dict(self._retired)
            qps = list(self._qps)
        for qp in qps:
            for name, value in qp._statistics().items():
                total[name] += value
        return total

    def close(self):
        if self._closed:
            return
        self._closed = True
        for domain in list(self._domains):
            domain.close()
        if self._forked():
            return
        self._service.stop()
        for cq in list(self._cqs):
            cq.close()

    @property
    def closed(self):
        return self._closed

    def _next_qp_num(self):
        with self._lock:
            self._last_qp_num += 1
            return self._last_qp_num

    def _retire(self, qp, counters):
        with self._lock:
            if qp in self._qps:
                self._qps.discard(qp)
                for name, value in counters.items():
                    self._retired[name] += value

    def _forked(self):
        return os.getpid() != self._pid

    def _check_process(self):
        if self._forked():
            raise forked_error("the shm device")

    def _check(self):
        self._check_process()
        if self._closed:
            raise ClosedError("the shm device is closed",
                              hint="open it again: kdirect.rdma.open_device")

    def _abandon(self):
        """In a forked child: the objects stay, and refuse."""
        self._lock = threading.Lock()
        for qp in list(self._qps):
            qp._abandon()
        for cq in list(self._cqs):
            cq._abandon()
        for domain in list(self._domains):
            domain._abandon()
        self._service.abandon()


COUNTERS = ("reads", "writes", "read_bytes", "write_bytes", "sends", "receives", "atomics",
            "wakeups")
_devices = {}


def use_full_fences(bint always):
    """For tests: devices opened from here on do as where the kernel has no membarrier."""
    fences_forbid(always)


def _after_fork_in_child():
    forked_child()
    for reference in list(_devices.values()):
        device = reference()
        if device is not None:
            device._abandon()
    _devices.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
