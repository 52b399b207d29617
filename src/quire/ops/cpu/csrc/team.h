// Threads that stay together for many small pieces of parallel work, one after the other.
//
// Torch's pool waits in each of them for all of its threads: where another process has the core of one, for as long as the
// system lets that process run, some milliseconds, thirty times as long as the piece. Here a thread that has not come is
// not waited for: the calling thread does what the others have not taken.
#pragma once

#include <sched.h>

#include <atomic>
#include <memory>

#include "parallel.h"
#include "processor.h"

namespace {

class Team {
  public:
    // Call lead(parallel_for) on this thread, while the pool's other threads take part in what it gives that function. They wait
    // for its end; a pool that runs bodies one after the other begins with the first one, which leads.
    template <class Lead>
    static void run(ParallelFor parallel_for, int threads, const Lead& lead) {
        if (threads <= 1) return lead(parallel_for);
        Team team(threads);
        parallel(parallel_for, threads, 1, [&](int64_t i) {
            if (i > 0) return team.follow((uint64_t)i);
            current = &team;
            lead(share);
            team.state.store(OVER, std::memory_order_release);
        });
    }

  private:
    static constexpr int SPINS = 1 << 14;  // looks for work, some 0.1 ms, before others may have the core
    static constexpr uint64_t ROUND = 1ull << 16, OVER = ~0ull;

    struct alignas(64) Piece {
        std::atomic<uint64_t> round{0};  // in which it was taken last
    };

    static thread_local Team* current;

    const int threads;
    const std::unique_ptr<Piece[]> taken;
    // The round and its number of pieces. What the round is about stands still until all are done, so a thread that has
    // taken a piece of it may read it.
    alignas(64) std::atomic<uint64_t> state{0};
    ParallelBody body;
    void* context;
    int64_t begin, end;
    alignas(64) std::atomic<int> done{0};

    explicit Team(int threads) : threads(threads), taken(new Piece[(size_t)threads]) {}

    // A ParallelFor.
    static int32_t share(int64_t begin, int64_t end, int64_t grain, ParallelBody body, void* context) {
        Team& team = *current;
        const int64_t worth = (end - begin + grain - 1) / grain;
        const int pieces = (int)(worth < team.threads ? worth : team.threads);
        team.body = body, team.context = context, team.begin = begin, team.end = end;
        team.done.store(0, std::memory_order_relaxed);
        const uint64_t seen = (team.state.load(std::memory_order_relaxed) / ROUND + 1) * ROUND + (uint64_t)pieces;
        team.state.store(seen, std::memory_order_release);
        while (team.take_piece(seen, 0)) {}
        for (int64_t spins = 0; team.done.load(std::memory_order_acquire) < pieces; spins++) wait(spins);
        return 0;
    }

    // Do a piece of the round `seen` that is not taken yet, the thread's own before others: so it works on the same part of the
    // memory in each round. False: there is none.
    bool take_piece(uint64_t seen, uint64_t own) {
        const uint64_t round = seen / ROUND, pieces = seen % ROUND;
        for (uint64_t k = 0; k < pieces; k++) {
            const uint64_t piece = (own + k) % pieces;
            uint64_t last = taken[piece].round.load(std::memory_order_relaxed);
            if (last >= round || !taken[piece].round.compare_exchange_strong(last, round, std::memory_order_acquire)) continue;
            const int64_t size = end - begin;
            body(begin + size * (int64_t)piece / (int64_t)pieces, begin + size * (int64_t)(piece + 1) / (int64_t)pieces, context);
            done.fetch_add(1, std::memory_order_release);
            return true;
        }
        return false;
    }

    void follow(uint64_t own) {
        uint64_t finished = 0;  // of which nothing is left: the flags of its pieces are not looked at again
        for (int64_t spins = 0;; spins++) {
            const uint64_t seen = state.load(std::memory_order_acquire);
            if (seen == OVER) return;
            if (seen == finished) {
                wait(spins);
                continue;
            }
            while (take_piece(seen, own)) {}
            finished = seen, spins = 0;
        }
    }

    static void wait(int64_t spins) {
        if (spins < SPINS) pause_briefly();
        else sched_yield();
    }
};

thread_local Team* Team::current = nullptr;

}  // namespace
