/* What the two ends of a shm queue pair share, and the atomics with which they read and write it.
 *
 * Law: this header is the one description of the shared bytes.  Both ends are compiled from it;
 * KD_SHM_VERSION goes up when anything here changes, and the handshake compares it.  Nothing here
 * allocates, and nothing here trusts a value after it was read once.
 *
 * Pair memory (a memfd made and sealed against resizing by the passive side, mapped by both;
 * unmapped by each when its queue pair is freed):
 *
 *      0                 192                384
 *     +-----------------+------------------+------------------------------------------------+
 *     | direction 0     | direction 1      | per direction: lengths, entries, payload ring  |
 *     | active->passive | passive->active  | (kd_pair_layout)                               |
 *     +-----------------+------------------+------------------------------------------------+
 *
 * A direction has an initiator and a target.  Each word has one writer, except `sleeping`:
 *
 *     busy       initiator  odd while a work request runs (key check, copy), even between.  The
 *                           target's deregister() waits for "even, or changed": then nothing runs
 *                           under a key it took away before it looked.
 *     posted     target     receives posted so far; entry n may be sent once n < posted.
 *     byte_head  target     payload bytes consumed so far.
 *     sleeping   both       the target sets it before it sleeps, the initiator takes it (exchange)
 *                           after it published an entry and then writes the target's eventfd.
 *
 * lengths[n % cap]: length of receive n (target).  entries[n % cap]: entry n (initiator), valid
 * once `sequence` is n + 1.  A slot is reused only for entry n + cap, which needs a receive that is
 * posted only after entry n was polled: so no entry is overwritten unread.
 *
 * Payload ring: a SEND's bytes, contiguous.  `byte_position` counts for ever; it is the position
 * after the last payload, or that rounded up to a whole turn of the ring (nothing left to read, or
 * no room before the end).
 *
 * Key table (a memfd of each protection domain, sealed against resizing, passed read-only): one
 * word per key index, holding the live key or 0.
 *
 *     key = generation << 14 | index
 */
#ifndef KDIRECT_SHM_RING_H
#define KDIRECT_SHM_RING_H

#include <errno.h>
#include <fcntl.h>
#include <linux/membarrier.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif
#include <unistd.h>

#include "machine.h"

#define KD_SHM_VERSION 1u
#define KD_KEY_INDEX_BITS 14
#define KD_KEYS (1u << KD_KEY_INDEX_BITS)
#define KD_KEY_INDEX_MASK (KD_KEYS - 1)
#define KD_KEY_TABLE_BYTES (KD_KEYS * sizeof(uint32_t))
#define KD_MAX_MESSAGE_BYTES (1u << 31)
#define KD_PAYLOAD_RING_MAX (64ull << 20)

/* -- atomics: one name per meaning ------------------------------------------------------------- */
static inline uint32_t kd_load32(const uint32_t *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
static inline uint64_t kd_load64(const uint64_t *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
static inline void *kd_load_pointer(void *const *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
static inline void kd_store32(uint32_t *p, uint32_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
static inline void kd_store64(uint64_t *p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
static inline void kd_store_pointer(void **p, void *v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
/* The exchanges are full fences too: the store is visible before any later load is made. */
static inline uint32_t kd_exchange32(uint32_t *p, uint32_t v) {
    return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST);
}
static inline uint64_t kd_exchange64(uint64_t *p, uint64_t v) {
    return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST);
}
static inline uint32_t kd_add32(uint32_t *p, uint32_t v) {
    return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST);
}
static inline uint64_t kd_fetch_add(uint64_t *p, uint64_t v) {
    return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST);
}
static inline int kd_cas32(uint32_t *p, uint32_t expected, uint32_t v) {
    return __atomic_compare_exchange_n(p, &expected, v, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}
static inline uint64_t kd_compare_swap(uint64_t *p, uint64_t expected, uint64_t v) {
    __atomic_compare_exchange_n(p, &expected, v, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    return expected; /* the old value, swapped or not */
}
static inline void kd_fence(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
/* Asymmetric fences.  The data path pays nothing (a light fence: only the compiler keeps the
 * order).  A thread that takes something away or goes to sleep makes every running thread execute a
 * full fence (a heavy fence: membarrier).  Light is allowed only where every party has registered
 * and can be heavy; otherwise both are full fences. */
static inline void kd_compiler_fence(void) { __atomic_signal_fence(__ATOMIC_SEQ_CST); }
static inline int kd_membarrier(int command) { return (int)syscall(SYS_membarrier, command, 0, 0); }
/* 1 when this process is registered and the kernel lets it be heavy. */
static inline int kd_register_fences(void) {
    return kd_membarrier(MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED) == 0 &&
           kd_membarrier(MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED) == 0 &&
           kd_membarrier(MEMBARRIER_CMD_PRIVATE_EXPEDITED) == 0 &&
           kd_membarrier(MEMBARRIER_CMD_GLOBAL_EXPEDITED) == 0;
}
static inline void kd_heavy_fence(int asymmetric, int everywhere) {
    kd_fence();
    if (asymmetric)
        kd_membarrier(everywhere ? MEMBARRIER_CMD_GLOBAL_EXPEDITED
                                 : MEMBARRIER_CMD_PRIVATE_EXPEDITED);
}

/* One turn, the n-th, of a wait that is expected to be short. */
static inline void kd_backoff(unsigned n) {
    if (n & 63)
        kd_pause();
    else
        sched_yield();
}

/* A lock for sections of nanoseconds that never wait for anything else; a holder that was preempted
 * is given the processor after a while. */
static inline void kd_lock(uint32_t *p) {
    for (unsigned n = 1; kd_exchange32(p, 1); n++)
        while (__atomic_load_n(p, __ATOMIC_RELAXED)) {
            kd_pause();
            if ((++n & 1023) == 0)
                sched_yield();
        }
}
static inline void kd_unlock(uint32_t *p) { kd_store32(p, 0); }

/* -- shared bytes ------------------------------------------------------------------------------ */
typedef struct {
    uint64_t busy;
    uint8_t pad0[56];
    uint64_t posted;
    uint64_t byte_head;
    uint8_t pad1[48];
    uint32_t sleeping;
    uint8_t pad2[60];
} kd_direction;

typedef struct {
    uint64_t sequence;
    uint64_t byte_position; /* of a SEND's payload */
    uint32_t opcode; /* opcode of the completion at the target: WC_RECV or WC_RECV_RDMA_WITH_IMM */
    uint32_t byte_len;
    uint32_t imm_data;
    uint32_t reserved;
} kd_entry;

_Static_assert(sizeof(kd_direction) == 192 && offsetof(kd_direction, posted) == 64 &&
                   offsetof(kd_direction, sleeping) == 128,
               "a direction is three cache lines");
_Static_assert(sizeof(kd_entry) == 32, "two entries a cache line");

/* Positions of one direction's parts in the pair memory.  `cap` receives (a power of two) and
 * `ring` payload bytes (a power of two, whole pages). */
typedef struct {
    uint64_t lengths, entries, payload, end;
} kd_direction_layout;

static inline uint64_t kd_round_up(uint64_t v, uint64_t to) { return (v + to - 1) / to * to; }
static inline uint64_t kd_power_of_two(uint64_t v) {
    uint64_t p = 1;
    while (p < v)
        p <<= 1;
    return p;
}
static inline void kd_pair_layout(uint64_t start, uint32_t cap, uint64_t ring,
                                  kd_direction_layout *out) {
    out->lengths = start;
    out->entries = kd_round_up(out->lengths + (uint64_t)cap * 4, 64);
    out->payload = kd_round_up(out->entries + (uint64_t)cap * sizeof(kd_entry), 4096);
    out->end = out->payload + ring;
}
/* Bytes of payload ring that a direction needs: every posted receive may hold the largest SEND, and
 * once a turn the bytes before the end may be too few for the next one.  Beyond KD_PAYLOAD_RING_MAX
 * a SEND waits for the target's poll instead.  Untouched pages cost nothing. */
static inline uint64_t kd_payload_ring_bytes(uint32_t cap, uint32_t max_send_bytes) {
    uint64_t all = ((uint64_t)cap + 1) * max_send_bytes, most = KD_PAYLOAD_RING_MAX;
    if (most < 2 * (uint64_t)max_send_bytes)
        most = 2 * (uint64_t)max_send_bytes;
    all = kd_power_of_two(all < most ? all : most);
    return all < 4096 ? 4096 : all;
}

/* A completion of the contract (work_completion: wr_id, status, opcode, byte_len, imm_data, qp_num,
 * has_imm) in four stores.  Their number matters: after a large copy, the stores of a poll wait in
 * the store queue until those of the copy have drained. */
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
               "completions are packed for little-endian machines");
static inline void kd_fill_completion(void *out, uint64_t wr_id, uint32_t status, uint32_t opcode,
                                      uint32_t byte_len, uint32_t imm_data, uint32_t qp_num,
                                      uint32_t has_imm) {
    uint64_t *o = out;
    o[0] = wr_id;
    o[1] = status | (uint64_t)opcode << 32;
    o[2] = byte_len | (uint64_t)imm_data << 32;
    o[3] = qp_num | (uint64_t)has_imm << 32;
}

/* -- control messages after the handshake ------------------------------------------------------ */
enum { KD_MSG_ANNOUNCE = 4, KD_MSG_REVOKE = 5, KD_MSG_READY = 6 };
enum { KD_MSG_MAGIC = 0x314d444b, KD_MSG_FLAG_SWEEP = 1 };

/* ANNOUNCE carries the region's descriptor; byte 0 of the region is byte `position` of the file.
 * REVOKE names a key that is dead already (the key table says so): the receiver unmaps the region.
 * SWEEP asks the receiver to look at every key, because a REVOKE could not be sent.  READY ends the
 * announcements of the handshake. */
typedef struct {
    uint32_t magic;
    uint16_t type;
    uint16_t flags;
    uint32_t rkey;
    uint32_t access;
    uint64_t address;
    uint64_t length;
    uint64_t position;
} kd_message;
_Static_assert(sizeof(kd_message) == 40, "control message");

/* Send one message, with `fd` attached when it is not negative.  0, or an errno. */
static inline int kd_send_message(int sock, const kd_message *m, int fd) {
    struct iovec iov = {(void *)m, sizeof *m};
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control;
    struct msghdr h;
    memset(&h, 0, sizeof h);
    h.msg_iov = &iov;
    h.msg_iovlen = 1;
    if (fd >= 0) {
        memset(&control, 0, sizeof control);
        h.msg_control = control.bytes;
        h.msg_controllen = sizeof control.bytes;
        struct cmsghdr *c = CMSG_FIRSTHDR(&h);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(c), &fd, sizeof(int));
    }
    for (;;) {
        ssize_t n = sendmsg(sock, &h, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n == (ssize_t)sizeof *m)
            return 0;
        if (n >= 0)
            return EIO;
        if (errno != EINTR)
            return errno;
    }
}

/* Receive one message.  1: got it, and `*fd` is the descriptor that came with it (the caller owns
 * it) or -1 (none came, or this process may open no more).  0: nothing there.  -1: the peer has
 * gone, or sent something that is not a message. */
static inline int kd_receive_message(int sock, kd_message *m, int *fd) {
    struct iovec iov = {m, sizeof *m};
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(4 * sizeof(int))];
    } control;
    struct msghdr h;
    ssize_t n;
    *fd = -1;
    do {
        memset(&h, 0, sizeof h);
        h.msg_iov = &iov;
        h.msg_iovlen = 1;
        h.msg_control = control.bytes;
        h.msg_controllen = sizeof control.bytes;
        n = recvmsg(sock, &h, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    } while (n < 0 && errno == EINTR);
    if (n < 0)
        return errno == EAGAIN || errno == EWOULDBLOCK ? 0 : -1;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&h); c != NULL; c = CMSG_NXTHDR(&h, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
            continue;
        size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < count; i++) {
            int got;
            memcpy(&got, CMSG_DATA(c) + i * sizeof(int), sizeof(int));
            if (*fd < 0)
                *fd = got;
            else
                close(got); /* one descriptor a message; keep no other */
        }
    }
    if (n == (ssize_t)sizeof *m && m->magic == KD_MSG_MAGIC && !(h.msg_flags & MSG_TRUNC))
        return 1;
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
    return -1;
}

/* The peer's end of `sock` is closed or shut for sending: it makes no more accesses. */
static inline int kd_peer_left(int sock) {
    struct pollfd p = {sock, POLLRDHUP, 0};
    return poll(&p, 1, 0) == 1 && (p.revents & (POLLRDHUP | POLLHUP | POLLERR | POLLNVAL)) != 0;
}

static inline void kd_signal(int eventfd) {
    uint64_t one = 1;
    ssize_t n;
    if (eventfd < 0)
        return;
    /* EAGAIN needs no repetition: the counter is full, so the sleeper is awake already. */
    do
        n = write(eventfd, &one, sizeof one);
    while (n < 0 && errno == EINTR);
}
static inline void kd_drain_signal(int eventfd) {
    uint64_t v;
    ssize_t n;
    do
        n = read(eventfd, &v, sizeof v);
    while (n < 0 && errno == EINTR);
}
/* Copy past the caches: the target's lines are not fetched before they are written over, which is
 * what a copy into new pages costs most.  For large pieces that this core does not read again.  The
 * fence orders them before every store that follows. */
static inline void kd_copy_past_caches(uint8_t *to, const uint8_t *from, size_t n) {
#if defined(__x86_64__)
    if (n >= 4096) {
        size_t head = (size_t)(-(uintptr_t)to & 63);
        memcpy(to, from, head);
        to += head;
        from += head;
        n -= head;
        for (; n >= 64; n -= 64, to += 64, from += 64)
            for (int i = 0; i < 64; i += 16)
                _mm_stream_si128((__m128i *)(void *)(to + i),
                                 _mm_loadu_si128((const __m128i *)(const void *)(from + i)));
        _mm_sfence();
    }
#endif
    memcpy(to, from, n);
}

#endif
