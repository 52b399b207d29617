// C[rows, columns] (+)= A[rows, lanes] * B[lanes, columns], B packed in panels, in steps of 32-bit lanes.
//
// A lane is an fp32 number, or a pair of bf16 numbers whose products are added together. Every element of C is one chain
// of multiply-adds in ascending order of lanes, so its bits depend neither on the other rows nor on how they are blocked.
#pragma once

#include "simd.h"

namespace {

struct Multiply {
    QUIRE_INLINE V mac(V acc, V a, V b) { return fma(a, b, acc); }
};

#ifdef QUIRE_BF16_DOT
struct MultiplyPairs {
    QUIRE_INLINE V mac(V acc, V a, V b) { return dot_bf16(acc, a, b); }
};
#endif

// `pause` is called after each step: a place to do something else meanwhile.
template <class M, int R, int N, bool ADD, class F>
static void micro_kernel(
    const float* a, int64_t lda, const float* b, float* c, int64_t ldc, int begin, int end, const F& pause) {
    V sum[R][N];
    for (int i = 0; i < R; i++)
        for (int j = 0; j < N; j++) sum[i][j] = ADD ? load(c + i * ldc + j * W) : V{};
    for (int k = begin; k < end; k++) {
        V column[N];
        for (int j = 0; j < N; j++) column[j] = load(b + (int64_t)k * PANEL + j * W);
        for (int i = 0; i < R; i++) {
            V row = broadcast(a + i * lda + k);
            for (int j = 0; j < N; j++) sum[i][j] = M::mac(sum[i][j], row, column[j]);
        }
        pause();
    }
    for (int i = 0; i < R; i++)
        for (int j = 0; j < N; j++) store(c + i * ldc + j * W, sum[i][j]);
}

// Call f.template operator()<R>() for a block of that many rows.
template <class F>
QUIRE_INLINE void with_rows(int rows, const F& f) {
    static_assert(ROWS == 6);
    switch (rows) {
        case 1: return f.template operator()<1>();
        case 2: return f.template operator()<2>();
        case 3: return f.template operator()<3>();
        case 4: return f.template operator()<4>();
        case 5: return f.template operator()<5>();
        default: return f.template operator()<6>();
    }
}

// Rows `first`.. of a split of `total` rows into blocks of nearly equal height.
struct RowBlocks {
    int blocks, height, taller;
    explicit RowBlocks(int total) : blocks((total + ROWS - 1) / ROWS) {
        height = blocks ? total / blocks : 0;
        taller = blocks ? total % blocks : 0;
    }
    int first(int block) const { return block * height + (block < taller ? block : taller); }
    int rows(int block) const { return height + (block < taller ? 1 : 0); }
};

}  // namespace
