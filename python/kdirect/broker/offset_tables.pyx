# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Commit slots at a produce worker: completions of commits in, acknowledgements out.

Owns: the part of the worker's tables that leads from a file id to a member's commit slot
(`kdirect.broker.commit_cells`, where a commit is checked and appended).  A commit is acknowledged
by an entry of the member's ring, in the same way as a produce request.  What may not enter: who is
a member, what is deferred.

A slot is touched only under the worker's lock while its grant is in the table.  After `retire`
nothing that it is written counts; after `remove` its memory may go.

Threads and memory: see the worker.  C methods are called with `_lock` held.
"""

from cpython.ref cimport PyObject
from libc.stdint cimport int16_t, int64_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from kdirect.broker.commit_cells cimport DEFERRED, CommitSlot, deferred_commits
from kdirect.broker.produce_tables cimport (
    CUT_ACK_OVERRUN, CUT_BAD_LENGTH, CUT_BAD_ORDER, GRANT_ACTIVE, grant_t, peer_t,
    pthread_mutex_lock, pthread_mutex_unlock)
from kdirect.broker.push_tables cimport PushTables
from kdirect.format.layout cimport OFFSETS_CELLS
from kdirect.log.kernel cimport commit_result
from kdirect.rdma.contract cimport MemoryRegion, QueuePair

from kdirect.errors import AccessDeniedError

cdef enum:
    FOLD_AFTER = 1024      # commits; the loop is told, so that the log can be kept short


cdef class OffsetTables(PushTables):
    """See the module."""

    def install_slot(self, uint16_t file_id, CommitSlot slot not None, QueuePair qp,
                     uint64_t ack_address, uint32_t ack_rkey, uint64_t entries,
                     MemoryRegion staging):
        """Start taking commits for `file_id` from `qp`.  `staging` holds `entries` acknowledgement
        entries, a power of two above the number of cells."""
        cdef grant_t* g = <grant_t*> calloc(1, sizeof(grant_t))
        if g == NULL:
            raise MemoryError()
        g.state = GRANT_ACTIVE
        g.file_id = file_id
        g.qp_num = qp.qp_num
        g.ack_address = ack_address
        g.ack_rkey = ack_rkey
        g.entries = entries
        g.staging_lkey = staging.lkey
        g.staging_address = staging.address
        g.slot = <PyObject*> slot
        g.qp = <PyObject*> qp
        with nogil:
            pthread_mutex_lock(&self._lock)
        if self._table[file_id] != NULL:
            pthread_mutex_unlock(&self._lock)
            free(g)
            raise AccessDeniedError(
                f"file id {file_id} is granted already", hint="release it first")
        self._grants[file_id] = (slot, qp, staging)
        self._table[file_id] = g
        self._slot_count += 1
        pthread_mutex_unlock(&self._lock)

    def remove_slot(self, uint16_t file_id, CommitSlot slot not None):
        """Forget it: its memory is not touched once this returns.  False: there was none."""
        cdef void** at
        with nogil:
            pthread_mutex_lock(&self._lock)
        known = file_id in self._grants
        if known:
            self._slot_count -= 1
        at = &self._noted_slots
        while at[0] != NULL and at[0] != <void*> slot:
            at = &(<CommitSlot> at[0]).next_noted
        if at[0] != NULL:
            at[0] = slot.next_noted
        at = &self._idle_slots
        while at[0] != NULL and at[0] != <void*> slot:
            at = &(<CommitSlot> at[0]).next_idle
        if at[0] != NULL:
            at[0] = slot.next_idle
        slot.noted = slot.idle_noted = False
        pthread_mutex_unlock(&self._lock)
        self.remove(file_id)
        return known

    def answer_commit(self, uint16_t file_id, CommitSlot slot not None, uint16_t order, int error):
        """The loop has done with a deferred commit what there is to do."""
        cdef grant_t* g
        with nogil:
            pthread_mutex_lock(&self._lock)
            slot.deferred -= 1
            g = self._table[file_id]
            if g != NULL and g.slot == <PyObject*> slot:
                g.pending -= 1
                if self._peer_alive(g.qp_num):
                    self._stage(g, order, <int16_t> error, 0, 1, -1, -1)
                    self._post_acks(g)
            pthread_mutex_unlock(&self._lock)
        if self._backlog or self._has_news():
            self._wake_for_news()

    cdef void _take_commit(self, peer_t* peer, grant_t* g, CommitSlot slot, uint16_t order,
                           uint32_t length) noexcept nogil:
        """A commit has arrived under a slot's grant."""
        cdef commit_result result
        cdef int error
        if g.state != GRANT_ACTIVE:
            return
        if not slot.c_fits(length):
            self._cut_peer(peer, CUT_BAD_LENGTH)
            return
        if order != <uint16_t> slot.next_sequence:
            self._cut_peer(peer, CUT_BAD_ORDER)
            return
        if slot.deferred >= OFFSETS_CELLS or g.staged + g.pending - g.completed >= g.entries:
            self._drain_sends()
            if slot.deferred >= OFFSETS_CELLS or g.staged + g.pending - g.completed >= g.entries:
                self._cut_peer(peer, CUT_ACK_OVERRUN)
                return
        result.base_offset = -1
        error = slot.c_take(length, self._wall_ms(), &result)
        if error == DEFERRED:
            g.pending += 1
            self._offset_deferred += 1
            self._note_slot(slot)
            return
        if error:
            self._offset_errors += 1
        else:
            self._offset_commits += 1
            if slot.log.unfolded >= FOLD_AFTER:
                self._note_slot(slot)
            elif not slot.idle_noted:
                slot.idle_noted = True
                slot.next_idle = self._idle_slots
                self._idle_slots = <void*> slot
        self._stage(g, order, <int16_t> error, 0, 1, result.base_offset, -1)

    cdef void _note_slot(self, CommitSlot slot) noexcept nogil:
        """There are deferred commits to hand to the loop, or much is to be folded."""
        if not slot.noted:
            slot.noted = True
            slot.next_noted = self._noted_slots
            self._noted_slots = <void*> slot

    cdef bint _note_idle_slots(self) noexcept nogil:
        """The worker is about to sleep: have folded what was appended.  Were there any?"""
        cdef void* slot
        if self._idle_slots == NULL:
            return False
        pthread_mutex_lock(&self._lock)
        while self._idle_slots != NULL:
            slot = self._idle_slots
            self._idle_slots = (<CommitSlot> slot).next_idle
            (<CommitSlot> slot).idle_noted = False
            if (<CommitSlot> slot).log.unfolded:
                self._note_slot(<CommitSlot> slot)
        pthread_mutex_unlock(&self._lock)
        return self._noted_slots != NULL

    cdef list _news_of_slots(self):
        """[(slot, its deferred commits)] of those that were noted."""
        cdef CommitSlot slot
        cdef list found = []
        while self._noted_slots != NULL:
            slot = <CommitSlot> self._noted_slots
            self._noted_slots = slot.next_noted
            slot.noted = False
            found.append((slot, deferred_commits(slot)))
        return found
