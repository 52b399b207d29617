// What the ranks of a tensor-parallel group exchange: processes of one host, each with some columns of what all need, in memory that
// they share.
//
// Ranks take part in the same exchanges in the same order. In each one every rank fills its slot and publishes the exchange's
// number; once all have, each reads all slots. There are two slots a rank, used in turn: before a rank fills one again, it has seen
// all others publish the last exchange, so that none reads a slot of the one before it any more.
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

// What a rank shows the others.
struct alignas(64) ExchangeRank {
    std::atomic<uint32_t> published;  // the number of the last exchange for which its slot is full
    std::atomic<uint32_t> waiting;    // how many wait for that to grow
    std::atomic<int64_t> beats;       // how often it was seen; 0: it has not come yet
    std::atomic<int32_t> left;        // whether it ended in order
};

// The first bytes of the shared memory; slots follow.
struct ExchangeMemory {
    ExchangeRank ranks[MOST_RANKS];
    alignas(64) std::atomic<int32_t> lost;  // rank + 1 that died or hangs; 0: none
};

class Exchange {
  public:
    static constexpr int64_t SLOTS = 4096;  // bytes before them
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

    // A rank's slot of the exchange that was begun.
    char* slot(int of) const { return (char*)memory + SLOTS + ((number & 1) * size + of) * slot_bytes; }

    // Begin the next exchange: wait until no other rank reads a slot of the one before the last. False: a rank is lost.
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

    // Wait until all ranks have published this exchange. False: a rank is lost.
    bool wait_for_all() {
        for (int r = 0; r < size; r++)
            if (r != rank && !wait_for(r, number, DEADLINE)) return false;
        return true;
    }

    // deadline: nanoseconds after which a rank counts as lost; 0: never.
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

    // Say that a rank is lost; the first one that is counts.
    void lose(int of) {
        int32_t none = 0;
        memory->lost.compare_exchange_strong(none, of + 1);
        for (int r = 0; r < size; r++) wake(memory->ranks[r]);
    }

  private:
    static constexpr int SPINS = 1 << 11;                      // some 20 us
    static constexpr int64_t SLEEP = 10'000'000;               // nanoseconds, after which a sleeper looks whether a rank is lost
    static constexpr int64_t DEADLINE = 60ll * 1'000'000'000;  // of a rank that is alive and does not come

    uint32_t number = 0;  // of the exchange

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
