// Stands in for torch's thread pool under ThreadSanitizer, which does not see how OpenMP's threads wait for one another. Each
// call starts threads of its own and joins them.
#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

namespace {

constexpr int64_t THREADS = 4;

}  // namespace

extern "C" __attribute__((visibility("default"))) int32_t quire_test_parallel_for(
    int64_t begin, int64_t end, int64_t grain, void (*body)(int64_t, int64_t, void*), void* context) {
    const int64_t size = std::max((end - begin + THREADS - 1) / THREADS, std::max<int64_t>(grain, 1));
    std::vector<std::thread> threads;
    for (int64_t at = begin; at < end; at += size) threads.emplace_back(body, at, std::min(at + size, end), context);
    for (std::thread& thread : threads) thread.join();
    return 0;
}
