// Threads of torch's pool, through the function that Python looked up in libtorch.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

typedef void (*ParallelBody)(int64_t begin, int64_t end, void* context);
typedef int32_t (*ParallelFor)(int64_t begin, int64_t end, int64_t grain, ParallelBody body, void* context);

constexpr int64_t GRAIN = 32768;  // least numbers per thread
constexpr int64_t FORK = 1 << 16;  // least multiply-adds for using a second thread

static inline int64_t rows_a_thread(int64_t dim) { return dim >= GRAIN ? 1 : (GRAIN + dim - 1) / (dim ? dim : 1); }

// Call body(i) for i in 0..count - 1, on the number of threads that torch uses. The bodies must not wait for each other: if the pool is
// busy, they run one after the other.
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

// Call body(i) on at most `threads` threads, each of which takes the next `step` calls when it has finished the previous ones, so that a
// thread whose core is shared with another process takes fewer.
template <class Body>
static inline void parallel_in_turns(ParallelFor parallel_for, int64_t threads, int64_t count, int64_t step, const Body& body) {
    std::atomic<int64_t> taken{0};
    parallel(parallel_for, std::min(threads, (count + step - 1) / step), 1, [&](int64_t) {
        for (int64_t first; (first = taken.fetch_add(step, std::memory_order_relaxed)) < count;)
            for (int64_t i = first; i < std::min(count, first + step); i++) body(i);
    });
}
