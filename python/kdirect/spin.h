/* How a thread spins that waits for another one. */
#ifndef KD_SPIN_H
#define KD_SPIN_H

#include <sched.h>
#include <stdint.h>

#include "machine.h"

/* A spin keeps its processor for so long. */
#define KD_ALONE_NS 10000

/* One turn of a spin that has had no news for so long.  The thread that is waited for may have been
   woken on this very processor, and would not run before the spin is over: after a while it goes
   first.  Where nobody else wants the processor that costs half a microsecond. */
static inline void kd_spin(int64_t silent_ns) {
    if (silent_ns < KD_ALONE_NS)
        kd_pause();
    else
        sched_yield();
}

#endif
