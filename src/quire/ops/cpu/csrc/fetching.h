// Prefetching: the best settings depend on the core, not on the instruction set, and do not affect any bit of the results.
// quire/ops/fetching.py chooses them when the library is loaded.
#pragma once

#include <cstdint>

enum FetchKind : int32_t {
    FETCH_PAST = 0,    // PREFETCHNTA: bypass the larger caches, in which a step's weights would evict data that is used again
    FETCH_FIRST = 1,   // PREFETCHT0: into all caches
    FETCH_SECOND = 2,  // PREFETCHT1: into all caches but the first
};

struct Fetching {
    int32_t weights;        // FetchKind of a weight that is multiplied with few rows
    int32_t weights_ahead;  // distance of prefetching, in bytes of each strip
    int32_t keys;           // FetchKind of keys and values
};

extern "C" Fetching quire_fetching;  // in machine.cpp

template <int KIND>
static inline __attribute__((always_inline)) void fetch_line(const char* at) {
    __builtin_prefetch(at, 0, KIND == FETCH_FIRST ? 3 : KIND == FETCH_SECOND ? 2 : 0);
}

// Call f.template operator()<KIND>(). This is used around a loop in which a test for each line would be too slow.
template <class F>
static inline __attribute__((always_inline)) void with_fetch_kind(int32_t kind, const F& f) {
    if (kind == FETCH_FIRST) f.template operator()<FETCH_FIRST>();
    else if (kind == FETCH_SECOND) f.template operator()<FETCH_SECOND>();
    else f.template operator()<FETCH_PAST>();
}

static inline __attribute__((always_inline)) void fetch_line(const char* at, int32_t kind) {
    asm volatile("");  // otherwise GCC considers a function that only prefetches to have no effect, and removes its calls
    with_fetch_kind(kind, [&]<int KIND>() __attribute__((always_inline)) { fetch_line<KIND>(at); });
}
