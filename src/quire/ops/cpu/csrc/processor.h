// Operations for which every kind of processor has an instruction, but C++ has no function.
#pragma once

#include <cstdint>

// To be called within a loop that waits for another thread.
static inline void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    asm volatile("yield");
#endif
}

// Evict this memory from all caches.
static inline void evict(const char* data, int64_t bytes) {
#if defined(__x86_64__)
    for (int64_t at = 0; at < bytes; at += 64) __builtin_ia32_clflush(data + at);
    __builtin_ia32_mfence();
#else
    for (int64_t at = 0; at < bytes; at += 64) asm volatile("dc civac, %0" ::"r"(data + at) : "memory");
    asm volatile("dsb ish" ::: "memory");
#endif
}
