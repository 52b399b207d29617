// Measurements of the machine's peak rates, for benchmarks to compare with.
#pragma once

#include "matmul.h"
#include "parallel.h"

namespace {

constexpr int64_t AHEAD = 4096;  // bytes

// Read every byte once. Each thread calls this for a separate range.
static float read_all(const char* data, int64_t bytes) {
    V sum[4] = {};
    for (int64_t at = 0; at + 4 * (int64_t)sizeof(V) <= bytes; at += 4 * (int64_t)sizeof(V)) {
        for (int64_t line = 0; line < 4 * (int64_t)sizeof(V); line += 64) __builtin_prefetch(data + at + AHEAD + line, 0, 3);
        for (int i = 0; i < 4; i++) sum[i] = (V)((I)sum[i] + (I)load((const float*)(data + at) + i * W));
    }
    return reduce_add((V)((I)(sum[0]) + (I)(sum[1]) + (I)(sum[2]) + (I)(sum[3])));
}

// Multiply-adds on numbers that never leave the registers.
static float multiply_all(int64_t rounds) {
    V sum[2 * ROWS];
    for (int i = 0; i < 2 * ROWS; i++) sum[i] = splat((float)i);
    V a = splat(0.999f), b = splat(1e-3f);
    for (int64_t k = 0; k < rounds; k++) {
#if defined(__x86_64__)
        asm volatile("" : "+x"(a), "+x"(b));
#else
        asm volatile("" : "+w"(a), "+w"(b));
#endif
        for (int i = 0; i < 2 * ROWS; i++) sum[i] = fma(sum[i], a, b);
    }
    V total = {};
    for (int i = 0; i < 2 * ROWS; i++) total = total + sum[i];
    return reduce_add(total);
}

}  // namespace
