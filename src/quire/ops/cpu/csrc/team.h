// A team of threads that stays active for many short parallel regions, one after the other.
//
// In each region, torch's pool waits for all of its threads. If another process occupies the core of one of them, it waits until the
// system preempts that process, a few milliseconds, thirty times as long as the region. A team does not wait for a thread that has not
// arrived: the calling thread does the work that the others have not taken.
#pragma once

#include <sched.h>

#include <atomic>
#include <memory>

#include "parallel.h"
#include "processor.h"

namespace {

class Team {
  public:
    // Call lead(parallel_for) on this thread. The pool's other threads take part in the work that it passes to parallel_for, until it
    // returns. A pool that runs bodies one after the other begins with the first one, which leads.
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
    static constexpr int SPINS = 1 << 14;  // checks for work, about 0.1 ms, before a thread yields its core
    static constexpr uint64_t ROUND = 1ull << 16, OVER = ~0ull;

    struct alignas(64) Piece {
        std::atomic<uint64_t> round{0};  // the round in which it was taken last
    };

    static thread_local Team* current;

    const int threads;
    const std::unique_ptr<Piece[]> taken;
    // The round and its number of pieces. The fields that describe the round do not change until all pieces are done, so a thread that
    // has taken a piece may read them.
    alignas(64) std::atomic<uint64_t> state{0};
    ParallelBody body;
    void* context;
    int64_t begin, end;
    alignas(64) std::atomic<int> done{0};

    explicit Team(int threads) : threads(threads), taken(new Piece[(size_t)threads]) {}

    // The team's implementation of ParallelFor.
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

    // Do a piece of the round `seen` that is not taken yet. The thread's own piece is preferred, so that it works on the same part of
    // memory in each round. Return false if all pieces are taken.
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
        uint64_t finished = 0;  // the last round without pieces left, whose flags need not be checked again
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
