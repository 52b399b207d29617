// Functions on rows of numbers that several operators use.
#pragma once

#include "elements.h"
#include "parallel.h"
#include "vmath.h"

namespace {

// Rows of a tensor [outer, inner, dim] with a unit last stride.
template <class T>
struct Rows {
    T* data;
    int64_t outer_stride, inner, inner_stride;
    T* operator[](int64_t i) const { return data + i / inner * outer_stride + i % inner * inner_stride; }
};

// Return the sum of f(vector index) over a row: four interleaved sums, added pairwise.
template <class F>
QUIRE_INLINE float sum_over(int64_t dim, const F& f) {
    V sum[4] = {};
    int64_t c = 0;
    for (; c + 3 * W < dim; c += 4 * W)  // the inner loops are unrolled, which keeps the sums in registers
        for (int i = 0; i < 4; i++) sum[i] = sum[i] + f(c + i * W);
    for (int i = 0; i < 3; i++)
        if (c + i * W < dim) sum[i] = sum[i] + f(c + i * W);
    return reduce_add((sum[0] + sum[2]) + (sum[1] + sum[3]));
}

// Set the lanes after the row's end to zero.
QUIRE_INLINE V only(V x, int lanes) { return iota() < (float)lanes ? x : V{}; }

// Return x / (1 + e^-x). If the exponential overflows, the quotient is 0, which is correct.
QUIRE_INLINE V silu(V x) { return x / (1.0f + exp_any(-x)); }

// Compute out = f(out, x), element-wise.
template <class E, class F>
static void combine_rows(
    ParallelFor parallel_for, const void* x, int64_t x_stride, void* out, int64_t out_stride, int64_t rows, int64_t dim,
    const F& f) {
    using T = typename E::T;
    parallel(parallel_for, rows, rows_a_thread(dim), [&](int64_t i) {
        const T* from = (const T*)x + i * x_stride;
        T* to = (T*)out + i * out_stride;
        for (int64_t c = 0; c < dim; c += W) {
            const int n = part(dim, c);
            put_part<E>(to + c, f(get_part<E>(to + c, n), get_part<E>(from + c, n)), n);
        }
    });
}

}  // namespace
