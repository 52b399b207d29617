// Exchanges between the ranks of a tensor-parallel group: processes of one host, each of which computes some columns of a result,
// exchange these in shared memory.
//
// All ranks take part in the same exchanges in the same order. In each exchange, every rank fills its slot and publishes the
// exchange's number; after all have, each reads all slots. Each rank has two slots, used alternately: before a rank fills a slot
// again, it has seen all others publish the last exchange, so no rank still reads a slot of the exchange before that.
#pragma once

#include <unistd.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

#include <atomic>
#include <cstdint>
#include <ctime>

#include "params.h"
#include "processor.h"

namespace {

// The state of a rank that the other ranks read.
struct alignas(64) ExchangeRank {
    std::atomic<uint32_t> published;  // number of the last exchange for which its slot is full
    std::atomic<uint32_t> waiting;    // number of ranks that wait for `published` to grow
    std::atomic<int64_t> beats;       // heartbeats; 0: the rank has not started yet
    std::atomic<int32_t> left;        // 1: it ended in an orderly way
};

// The first bytes of the shared memory; slots follow.
struct ExchangeMemory {
    ExchangeRank ranks[MOST_RANKS];
    alignas(64) std::atomic<int32_t> lost;  // 1 + the rank that died or hangs; 0: none
};

class Exchange {
  public:
    static constexpr int64_t SLOTS = 4096;  // offset of the slots, in bytes
    static_assert(sizeof(ExchangeMemory) <= SLOTS);

    ExchangeMemory* const memory;
    const int rank, size;
    const int64_t slot_bytes;

    Exchange(void* memory, int rank, int size, int64_t slot_bytes)
        : memory((ExchangeMemory*)memory), rank(rank), size(size), slot_bytes(slot_bytes) {}

    static int64_t now() {
        timespec time;
        clock_gettime(CLOCK_MONOTONIC, &time);
        return time.tv_sec * 1'000'000'000 + time.tv_nsec;
    }

    // Return a rank's slot in the current exchange.
    char* slot(int of) const { return (char*)memory + SLOTS + ((number & 1) * size + of) * slot_bytes; }

    // Begin the next exchange: wait until no other rank reads a slot of the exchange before the last. Return false if a rank is lost.
    bool begin() {
        const bool come = wait_for_all();
        number++;
        return come;
    }
    uint32_t current() const { return number; }

    void publish() {
        ExchangeRank& own = memory->ranks[rank];
        own.published.store(number, std::memory_order_seq_cst);
        if (own.waiting.load(std::memory_order_seq_cst)) wake(own);
    }

    // Wait until all ranks have published this exchange. Return false if a rank is lost.
    bool wait_for_all() {
        for (int r = 0; r < size; r++)
            if (r != rank && !wait_for(r, number, DEADLINE)) return false;
        return true;
    }

    // Wait until a rank has published an exchange. deadline: nanoseconds after which the rank counts as lost; 0: never.
    bool wait_for(int of, uint32_t wanted, int64_t deadline) {
        ExchangeRank& other = memory->ranks[of];
        const auto come = [&] { return (int32_t)(other.published.load(std::memory_order_acquire) - wanted) >= 0; };
        for (int i = 0; i < SPINS; i++) {
            if (come()) return true;
            pause_briefly();
        }
        const int64_t start = now();
        while (!come()) {
            if (memory->lost.load(std::memory_order_relaxed)) return false;
            if (other.left.load() && !come()) return lose(of), false;
            if (deadline && now() - start > deadline) return lose(of), false;
            other.waiting.fetch_add(1, std::memory_order_seq_cst);
            const uint32_t seen = other.published.load(std::memory_order_seq_cst);
            if ((int32_t)(seen - wanted) < 0) sleep_while(other, seen);
            other.waiting.fetch_sub(1, std::memory_order_seq_cst);
        }
        return true;
    }

    // Report that a rank is lost. Only the first report is stored.
    void lose(int of) {
        int32_t none = 0;
        memory->lost.compare_exchange_strong(none, of + 1);
        for (int r = 0; r < size; r++) wake(memory->ranks[r]);
    }

  private:
    static constexpr int SPINS = 1 << 11;                      // about 20 us
    static constexpr int64_t SLEEP = 10'000'000;               // nanoseconds after which a waiting rank checks if another one is lost
    static constexpr int64_t DEADLINE = 60ll * 1'000'000'000;  // nanoseconds to wait for a rank that is alive and does not publish

    uint32_t number = 0;  // of the current exchange

#ifdef __linux__
    static void sleep_while(ExchangeRank& of, uint32_t seen) {
        const timespec time = {0, SLEEP};
        syscall(SYS_futex, &of.published, FUTEX_WAIT, seen, &time, nullptr, 0);
    }
    static void wake(ExchangeRank& of) { syscall(SYS_futex, &of.published, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0); }
#else
    static void sleep_while(ExchangeRank&, uint32_t) { usleep(50); }
    static void wake(ExchangeRank&) {}
#endif
};

}  // namespace
