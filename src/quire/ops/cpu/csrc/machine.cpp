// Prefetching on this machine. machine_x86.cpp and machine_arm.cpp detect the processor's instruction sets.

#include <chrono>
#include <cstring>

#include "fetching.h"
#include "params.h"
#include "processor.h"

Fetching quire_fetching = {FETCH_FIRST, 2560, FETCH_FIRST};

extern "C" {

// Change the settings. This must not be called while a kernel runs.
QUIRE_EXPORT void quire_set_fetching(int32_t weights, int32_t weights_ahead, int32_t keys) {
    quire_fetching = {weights, weights_ahead, keys};
}

// Return the nanoseconds for reading every cache line once while later lines are prefetched, as in products of few rows.
QUIRE_EXPORT int64_t quire_time_fetching(const char* data, int64_t bytes, int32_t kind, int32_t ahead) {
    using Clock = std::chrono::steady_clock;
    evict(data, bytes);
    const Clock::time_point start = Clock::now();
    int64_t sum = 0;
    for (int64_t at = 0; at + 64 <= bytes; at += 64) {
        if (at + ahead < bytes) fetch_line(data + at + ahead, kind);
        int64_t number;
        memcpy(&number, data + at, 8);
        sum += number;
    }
    asm volatile("" ::"r"(sum));  // so that the sum is not optimised away
    return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count();
}

}  // extern "C"
