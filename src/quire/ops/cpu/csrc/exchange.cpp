// Entry points of exchanges for Python, and the watchdog that ends a group when one of its ranks dies or hangs.
#include "exchange.h"

#include <cstring>

namespace {

constexpr int64_t BEAT = 50'000'000, HUNG = 800'000'000;  // nanoseconds between heartbeats, and without one until a rank is lost

}  // namespace

extern "C" {

// Send heartbeats and watch those of the other ranks, on a dedicated thread, until this rank leaves or the group is lost. A process
// that the system stops sends no heartbeats; one whose Python holds the GIL does. Time in which this process itself was stopped does
// not count, since all ranks may have been stopped with their container or virtual machine. ends: end the process with the group.
QUIRE_EXPORT void quire_exchange_watch(Exchange* of, int32_t ends) {
    int64_t seen[MOST_RANKS] = {}, silent[MOST_RANKS] = {}, last = Exchange::now();
    ExchangeMemory& memory = *of->memory;
    while (true) {
        const int64_t now = Exchange::now(), passed = now - last < 2 * BEAT ? now - last : 2 * BEAT;
        last = now;
        memory.ranks[of->rank].beats.fetch_add(1, std::memory_order_relaxed);
        for (int r = 0; r < of->size; r++) {
            const int64_t beats = memory.ranks[r].beats.load(std::memory_order_relaxed);
            silent[r] = beats == seen[r] && beats ? silent[r] + passed : 0;
            seen[r] = beats;
            if (r != of->rank && !memory.ranks[r].left.load() && silent[r] > HUNG) of->lose(r);
        }
        if (ends && (memory.lost.load() || memory.ranks[0].left.load())) _exit(memory.lost.load() ? 1 : 0);
        if (memory.ranks[of->rank].left.load() || memory.lost.load()) return;
        usleep(BEAT / 1000);
    }
}

QUIRE_EXPORT int64_t quire_exchange_bytes(int32_t size, int64_t slot_bytes) { return Exchange::SLOTS + 2 * size * slot_bytes; }

QUIRE_EXPORT Exchange* quire_exchange_new(void* memory, int32_t rank, int32_t size, int64_t slot_bytes) {
    auto* made = new Exchange(memory, rank, size, slot_bytes);
    made->memory->ranks[rank].beats.fetch_add(1, std::memory_order_relaxed);  // from now on, missing heartbeats count
    return made;
}

// Mark that this rank ends in an orderly way. The Exchange is not freed, since threads may still read it.
QUIRE_EXPORT void quire_exchange_leave(Exchange* of) { of->memory->ranks[of->rank].left.store(1); }

// Return the lost rank, or -1.
QUIRE_EXPORT int32_t quire_exchange_lost(Exchange* of) { return of->memory->lost.load() - 1; }

QUIRE_EXPORT void quire_exchange_lose(Exchange* of, int32_t rank) { of->lose(rank); }

// Gather `bytes` bytes of each rank, those of rank 0 first. Return 0, or -1 if a rank is lost.
QUIRE_EXPORT int32_t quire_exchange_gather(Exchange* of, const char* from, int64_t bytes, char* to) {
    for (int64_t at = 0; at < bytes; at += of->slot_bytes) {
        const int64_t count = bytes - at < of->slot_bytes ? bytes - at : of->slot_bytes;
        if (!of->begin()) return -1;
        memcpy(of->slot(of->rank), from + at, (size_t)count);
        of->publish();
        if (!of->wait_for_all()) return -1;
        for (int r = 0; r < of->size; r++) memcpy(to + r * bytes + at, of->slot(r), (size_t)count);
    }
    return 0;
}

// Collect rows on rank 0, of which each rank has sizes[rank] bytes: one row after the other, the bytes of rank 0 first. to: null on
// the other ranks. Return 0, or -1 if a rank is lost.
QUIRE_EXPORT int32_t quire_exchange_collect(Exchange* of, const char* from, int64_t rows, const int64_t* sizes, char* to) {
    int64_t all = 0, widest = 1;
    for (int r = 0; r < of->size; r++) all += sizes[r], widest = sizes[r] > widest ? sizes[r] : widest;
    const int64_t most = of->slot_bytes / widest, own = sizes[of->rank];  // rows at a time
    for (int64_t first = 0; first < rows; first += most) {
        const int64_t count = rows - first < most ? rows - first : most;
        if (!of->begin()) return -1;
        if (!to) memcpy(of->slot(of->rank), from + first * own, (size_t)(count * own));
        of->publish();
        if (!to) continue;
        if (!of->wait_for_all()) return -1;
        for (int64_t i = 0; i < count; i++) {
            char* row = to + (first + i) * all;
            for (int r = 0; r < of->size; row += sizes[r++])
                memcpy(row, r == of->rank ? from + (first + i) * own : of->slot(r) + i * sizes[r], (size_t)sizes[r]);
        }
    }
    return 0;
}

// Send a part of a message of `total` bytes from rank 0, at most 16 bytes less than a slot. Return 0, or -1 if a rank is lost.
QUIRE_EXPORT int32_t quire_exchange_send(Exchange* of, const char* from, int64_t bytes, int64_t total) {
    if (!of->begin()) return -1;
    const int64_t sizes[] = {total, bytes};
    memcpy(of->slot(0), sizes, sizeof sizes);
    memcpy(of->slot(0) + sizeof sizes, from, (size_t)bytes);
    of->publish();
    return 0;
}

// Receive a part of a message on another rank, without a timeout. It begins with its two sizes. Return null if a rank is lost.
QUIRE_EXPORT const char* quire_exchange_receive(Exchange* of) {
    if (!of->begin()) return nullptr;
    of->publish();
    return of->wait_for(0, of->current(), 0) ? of->slot(0) : nullptr;
}
}
