// All-gather of columns that are split between the ranks of a group.
#pragma once

#include <cstring>

#include "exchange.h"
#include "parallel.h"

namespace {

// Gather the columns of all ranks. Return false if a rank is lost. to: [rows, sum of the sizes], numbers of `number` bytes, rows
// `to_stride` numbers apart. fill(first, count, slot) writes this rank's columns of these rows to the slot, one row after the other.
template <class Fill>
static bool gather_columns(
    ParallelFor parallel_for, const GatherParams& p, int64_t number, int64_t rows, char* to, int64_t to_stride, const Fill& fill) {
    Exchange& exchange = *(Exchange*)p.exchange;
    int64_t all = 0, widest = 1;
    for (int r = 0; r < exchange.size; r++) all += p.sizes[r], widest = p.sizes[r] > widest ? p.sizes[r] : widest;
    const int64_t most = exchange.slot_bytes / (widest * number);  // rows at a time
    for (int64_t first = 0; first < rows; first += most) {
        const int64_t count = rows - first < most ? rows - first : most;
        if (!exchange.begin()) return false;
        fill(first, count, exchange.slot(exchange.rank));
        exchange.publish();
        if (!exchange.wait_for_all()) return false;
        parallel(parallel_for, count, rows_a_thread(all), [&](int64_t i) {
            char* row = to + (first + i) * to_stride * number;
            for (int r = 0; r < exchange.size; r++) {
                const int64_t bytes = p.sizes[r] * number;
                memcpy(row, exchange.slot(r) + i * bytes, (size_t)bytes);
                row += bytes;
            }
        });
    }
    return true;
}

// Gather columns of which this rank's are in memory, with rows `stride` numbers apart.
static bool gather_rows(
    ParallelFor parallel_for, const GatherParams& p, int64_t number, int64_t rows, const char* from, int64_t stride, char* to, int64_t to_stride) {
    const int64_t own = p.sizes[((Exchange*)p.exchange)->rank] * number;
    return gather_columns(parallel_for, p, number, rows, to, to_stride, [&](int64_t first, int64_t count, char* slot) {
        parallel(parallel_for, count, rows_a_thread(own), [&](int64_t i) {
            memcpy(slot + i * own, from + (first + i) * stride * number, (size_t)own);
        });
    });
}

}  // namespace
