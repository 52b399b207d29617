// Threads: torch's own pool, through the function that Python looked up in libtorch.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

typedef void (*ParallelBody)(int64_t begin, int64_t end, void* context);
typedef int32_t (*ParallelFor)(int64_t begin, int64_t end, int64_t grain, ParallelBody body, void* context);

constexpr int64_t GRAIN = 32768;  // numbers that are worth a thread
constexpr int64_t FORK = 1 << 16;  // multiply-adds that are worth a second one

static inline int64_t rows_a_thread(int64_t dim) { return dim >= GRAIN ? 1 : (GRAIN + dim - 1) / (dim ? dim : 1); }

// Call body(i) for i in 0..count - 1, on as many threads as torch uses. The bodies must not wait for each other: where
// the pool is busy they run one after the other.
template <class Body>
static inline void parallel(ParallelFor parallel_for, int64_t count, int64_t grain, const Body& body) {
    if (count <= grain) {
        for (int64_t i = 0; i < count; i++) body(i);
        return;
    }
    parallel_for(
        0, count, grain,
        [](int64_t begin, int64_t end, void* context) {
            for (int64_t i = begin; i < end; i++) (*static_cast<const Body*>(context))(i);
        },
        const_cast<void*>(static_cast<const void*>(&body)));
}

// The same on at most `threads` threads, each of which takes the next `step` of them when it is done with others: one whose core
// another process uses does fewer.
template <class Body>
static inline void parallel_in_turns(ParallelFor parallel_for, int64_t threads, int64_t count, int64_t step, const Body& body) {
    std::atomic<int64_t> taken{0};
    parallel(parallel_for, std::min(threads, (count + step - 1) / step), 1, [&](int64_t) {
        for (int64_t first; (first = taken.fetch_add(step, std::memory_order_relaxed)) < count;)
            for (int64_t i = first; i < std::min(count, first + step); i++) body(i);
    });
}
