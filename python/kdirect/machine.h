/* What compiled modules of every room ask of the machine: clocks, and a pause while spinning. */
#ifndef KD_MACHINE_H
#define KD_MACHINE_H

#include <stdint.h>
#include <time.h>

/* Tells the CPU that this thread spins. */
static inline void kd_pause(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

static inline int64_t kd_clock_ns(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* The monotonic clock: for deadlines and durations. */
static inline int64_t kd_now_ns(void) { return kd_clock_ns(CLOCK_MONOTONIC); }

/* The time of day since 1970: for timestamps. */
static inline int64_t kd_wall_ns(void) { return kd_clock_ns(CLOCK_REALTIME); }

#endif
