// A[rows, lanes] * B[lanes, columns], in steps of 32-bit lanes of A.
//
// A lane is an fp32 number, or a pair of bf16 numbers whose products are added together. Every element is one chain of multiply-adds in
// ascending order of lanes, so its bits depend neither on the other rows nor on the division into blocks.
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

// An operand packed in panels.
struct Panel {
    const float* data;
    __attribute__((always_inline)) V operator()(int64_t k, int j) const { return load(data + k * PANEL + j * W); }
};

static const auto idle = [](int64_t) {};

// The use of the sums in memory: they are replaced, the chain continues from them, or the result of the chain is added to them.
enum class Sums { REPLACED, CONTINUED, ADDED };

// Multiply R rows with N vectors of columns. b(k, j): vector j of lane k of B. pause(k): called after each step, to interleave other
// work such as prefetching.
template <class M, int R, int N, Sums SUMS, class B, class F>
static void micro_kernel(
    const float* a, int64_t lda, const B& b, float* c, int64_t ldc, int begin, int end, const F& pause) {
    V sum[R][N];
    QUIRE_UNROLL for (int i = 0; i < R; i++)
        QUIRE_UNROLL for (int j = 0; j < N; j++) sum[i][j] = SUMS == Sums::CONTINUED ? load(c + i * ldc + j * W) : V{};
    for (int k = begin; k < end; k++) {
        V column[N];
        QUIRE_UNROLL for (int j = 0; j < N; j++) column[j] = b(k, j);
        QUIRE_UNROLL for (int i = 0; i < R; i++) {
            V row = broadcast(a + i * lda + k);
            QUIRE_UNROLL for (int j = 0; j < N; j++) sum[i][j] = M::mac(sum[i][j], row, column[j]);
        }
        pause(k);
    }
    QUIRE_UNROLL for (int i = 0; i < R; i++)
        QUIRE_UNROLL for (int j = 0; j < N; j++) {
            float* at = c + i * ldc + j * W;
            store(at, SUMS == Sums::ADDED ? load(at) + sum[i][j] : sum[i][j]);
        }
}

// Call f.template operator()<R>() for one of several blocks. None of these has fewer than 3 rows, see RowBlocks.
template <class F>
QUIRE_INLINE void with_several_rows(int rows, const F& f) {
    static_assert(ROWS == 6);
    switch (rows) {
        case 3: return f.template operator()<3>();
        case 4: return f.template operator()<4>();
        case 5: return f.template operator()<5>();
        default: return f.template operator()<6>();
    }
}

// Call f.template operator()<R>() for a block of any number of rows.
template <class F>
QUIRE_INLINE void with_rows(int rows, const F& f) {
    if (rows == 1) return f.template operator()<1>();
    if (rows == 2) return f.template operator()<2>();
    with_several_rows(rows, f);
}

// A division of `total` rows into blocks of nearly equal height, with at most `most` rows each.
struct RowBlocks {
    int blocks, height, taller;
    explicit RowBlocks(int total, int most = ROWS) : blocks((total + most - 1) / most) {
        height = blocks ? total / blocks : 0;
        taller = blocks ? total % blocks : 0;
    }
    int first(int block) const { return block * height + (block < taller ? block : taller); }
    int rows(int block) const { return height + (block < taller ? 1 : 0); }
};

}  // namespace
