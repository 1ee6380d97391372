/* Loops over many numbers, for the widest registers that the processor has. */
#ifndef KD_WIDE_H
#define KD_WIDE_H

/* KD_WIDE(name, parameters, arguments, body) is a function that is compiled twice, once for
 * registers of 512 bits; which one is called was chosen when the module was loaded. */
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
static int kd_has_wide;
__attribute__((constructor)) static void kd_look_for_wide(void) {
    __builtin_cpu_init();
    kd_has_wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq");
}
#define KD_WIDE(NAME, PARAMETERS, ARGUMENTS, BODY)                                                 \
    __attribute__((target("avx512f,avx512dq,prefer-vector-width=512"))) static void                \
        NAME##_wide PARAMETERS BODY static void NAME##_any PARAMETERS BODY                         \
        static inline __attribute__((always_inline)) void NAME PARAMETERS {                        \
        if (kd_has_wide)                                                                           \
            NAME##_wide ARGUMENTS;                                                                 \
        else                                                                                       \
            NAME##_any ARGUMENTS;                                                                  \
    }
#else
#define KD_WIDE(NAME, PARAMETERS, ARGUMENTS, BODY) static void NAME PARAMETERS BODY
#endif

#endif
