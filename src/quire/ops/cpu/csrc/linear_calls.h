// Products by packed weights: conversion of rows of x to lanes, and division of the work between threads.
#pragma once

#include "linear.h"

namespace {

constexpr int64_t MANY = 16;  // items per thread from which an uneven division no longer matters

static inline const LinearKind& linear_kind(const LinearParams& p) { return QUIRE_NAME(linear_kind, QUIRE_ISA)(p); }

static LinearCall linear_call(const LinearKind& kind, const LinearParams* p) {
    LinearCall call = {};
    call.params = p;
    call.strips = (p->out_size + W - 1) / W, call.lanes = kind.strip_lines(*p);
    call.chunks = (p->rows + kind.chunk - 1) / kind.chunk;
    call.whole = p->rows;
    return call;
}

// Write the rows of x from `first` on as lanes.
static void copy_rows(ParallelFor parallel_for, const LinearKind& kind, const LinearParams& p, int64_t first) {
    const int64_t lanes = kind.x_lanes(p), bytes = p.x_stride * (p.dtype == DTYPE_F32 ? 4 : 2);
    parallel(parallel_for, p.rows - first, rows_a_thread(p.in_size),
             [&](int64_t i) { kind.copy_row(p, (const char*)p.x + (first + i) * bytes, p.copy + i * lanes); });
}

// Provide the rows of x as lanes: in place if they have this layout already, else copied. In place, tiles may read 15 extra rows.
static void take_rows(ParallelFor parallel_for, const LinearKind& kind, LinearCall& call) {
    const LinearParams& p = *call.params;
    if (kind.in_place(p, p.rows, p.x_stride)) {
        call.x = (const float*)p.x, call.x_stride = p.x_stride / kind.pair;
        return;
    }
    copy_rows(parallel_for, kind, p, 0);
    call.x = p.copy, call.x_stride = kind.x_lanes(p);
}

// Tiles read many rows 16 at a time. The last ones are copied, so that no memory after them is read.
static void take_tail(ParallelFor parallel_for, const LinearKind& kind, LinearCall& call) {
    const LinearParams& p = *call.params;
    if (!kind.tiled || p.rows <= 32 || call.x == p.copy) return;
    call.whole = p.rows / 16 * 16;
    copy_rows(parallel_for, kind, p, call.whole);
    call.tail = p.copy, call.tail_stride = kind.x_lanes(p);
}

// Compute all of these products, at least one. Their weights have one shape, and their rows are lanes.
static void multiply_calls(ParallelFor parallel_for, const LinearKind& kind, LinearCall* calls, int64_t count, int64_t most_threads) {
    const LinearParams& p = *calls->params;
    int64_t rows = 0, most_rows = 0, chunks = 0;
    for (int64_t i = 0; i < count; i++) {
        rows += calls[i].params->rows, chunks += calls[i].chunks;
        most_rows = calls[i].params->rows > most_rows ? calls[i].params->rows : most_rows;
    }
    const int64_t threads = rows * p.in_size * p.out_size < FORK ? 1 : most_threads;
    const int64_t wide = most_rows > 32 ? kind.panel_strips : kind.few_strips, units = (calls->strips + kind.unit - 1) / kind.unit;
    int64_t panels = (calls->strips + wide - 1) / wide;
    if (panels * chunks < MANY * threads) {  // use narrower panels, so that all threads end at about the same time
        const int64_t turns = (panels + threads - 1) / threads;
        panels = turns * threads < units ? turns * threads : units;
    }
    int64_t first = 0;
    for (int64_t i = 0; i < count; i++) {
        calls[i].panels = panels, calls[i].first = first;
        first += panels * calls[i].chunks;
    }
    LinearWork all = {&kind, calls, first, threads, (int)(threads < MOST_SHARES ? threads : MOST_SHARES), {}};
    for (int i = 0; i < all.shares; i++) all.share[i] = {all.items * i / all.shares, all.items * (i + 1) / all.shares};
    parallel(parallel_for, threads, 1, [&](int64_t thread) { kind.work(all, thread); });
}

static void linear(ParallelFor parallel_for, const LinearParams* p) {
    const LinearKind& kind = linear_kind(*p);
    LinearCall call = linear_call(kind, p);
    take_rows(parallel_for, kind, call);
    take_tail(parallel_for, kind, call);
    multiply_calls(parallel_for, kind, &call, 1, p->threads);
}

}  // namespace
