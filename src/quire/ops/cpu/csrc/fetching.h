// How memory is brought into the caches before it is used: a property of the core, not of the instruction set, and of no
// consequence for any bit. quire/ops/cpu/fetching.py decides it when the library is loaded.
#pragma once

#include <cstdint>

enum FetchKind : int32_t {
    FETCH_PAST = 0,    // PREFETCHNTA: past the larger caches, where a step's weights would drive out all that is used again
    FETCH_FIRST = 1,   // PREFETCHT0: into all caches
    FETCH_SECOND = 2,  // PREFETCHT1: into all but the first
};

struct Fetching {
    int32_t weights;        // FetchKind of a weight that only few rows are multiplied with
    int32_t weights_ahead;  // bytes of each strip
    int32_t keys;           // FetchKind of keys and values
};

extern "C" Fetching quire_fetching;  // in machine.cpp

template <int KIND>
static inline __attribute__((always_inline)) void fetch_line(const char* at) {
    __builtin_prefetch(at, 0, KIND == FETCH_FIRST ? 3 : KIND == FETCH_SECOND ? 2 : 0);
}

// Calls f.template operator()<KIND>(): around a loop, where a test for each line would be felt.
template <class F>
static inline __attribute__((always_inline)) void with_fetch_kind(int32_t kind, const F& f) {
    if (kind == FETCH_FIRST) f.template operator()<FETCH_FIRST>();
    else if (kind == FETCH_SECOND) f.template operator()<FETCH_SECOND>();
    else f.template operator()<FETCH_PAST>();
}

static inline __attribute__((always_inline)) void fetch_line(const char* at, int32_t kind) {
    asm volatile("");  // else GCC takes a function that only fetches for one without effect, and drops its calls
    with_fetch_kind(kind, [&]<int KIND>() __attribute__((always_inline)) { fetch_line<KIND>(at); });
}
