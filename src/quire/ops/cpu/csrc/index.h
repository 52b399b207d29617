// Scores of the indexer of sparse attention (DeepSeek-V3.2): for each row and each key that it sees, the sum over the heads of
// weight * max(0, q.k). Each score is the result of the same operations in the same order, however the keys are divided.
#pragma once

#include "plan.h"
#include "rows.h"

namespace {

constexpr int64_t INDEX_SPAN = 512;  // keys that a thread takes at a time
constexpr int INDEX_KEYS = 4;        // keys that are multiplied together
constexpr int64_t INDEX_DIM = 1024;  // the most numbers of a key

template <class E>
static void index_rows(ParallelFor parallel_for, const IndexParams& p) {
    using T = typename E::T;
    const int64_t wide = round_up(p.heads, W), packed = (p.dim + 1) * wide;
    // Of each row: its queries, one number of all heads after the other, then the heads' weights; zeros for heads that fill a vector.
    parallel(parallel_for, p.rows, rows_a_thread(packed), [&](int64_t i) {
        float* to = p.room + i * packed;
        memset(to, 0, (size_t)packed * sizeof(float));
        for (int64_t h = 0; h < p.heads; h++) {
            float row[INDEX_DIM];
            const T* q = (const T*)p.q + (i * p.heads + h) * p.dim;
            for (int64_t c = 0; c < p.dim; c += W) put_part<F32>(row + c, get_part<E>(q + c, part(p.dim, c)), part(p.dim, c));
            for (int64_t c = 0; c < p.dim; c++) to[c * wide + h] = row[c];
            to[p.dim * wide + h] = p.weights[i * p.heads + h];
        }
    });
    const int64_t spans = (p.width + INDEX_SPAN - 1) / INDEX_SPAN;
    parallel(parallel_for, p.rows * spans, 1, [&](int64_t item) {
        const int64_t i = item / spans, first = item % spans * INDEX_SPAN, end = std::min(first + INDEX_SPAN, p.width);
        const int64_t stop = std::min<int64_t>(end, p.counts[i]);
        const float *q = p.room + i * packed, *weights = q + p.dim * wide;
        const int32_t* table = p.tables + p.sequences[i] * p.table_stride;
        float* out = p.out + i * p.width;
        float keys[INDEX_KEYS][INDEX_DIM];
        for (int64_t t = first; t < stop; t += INDEX_KEYS) {
            const int64_t count = std::min<int64_t>(INDEX_KEYS, stop - t);
            for (int64_t j = 0; j < INDEX_KEYS; j++) {
                const int64_t at = t + std::min(j, count - 1);
                const T* key = (const T*)p.keys + table[at / p.block_size] * p.key_block + at % p.block_size * p.key_slot;
                for (int64_t c = 0; c < p.dim; c += W) put_part<F32>(keys[j] + c, get_part<E>(key + c, part(p.dim, c)), part(p.dim, c));
            }
            V sum[INDEX_KEYS] = {};
            for (int64_t h = 0; h < wide; h += W) {
                V product[INDEX_KEYS] = {};
                for (int64_t c = 0; c < p.dim; c++) {
                    const V own = load(q + c * wide + h);
                    QUIRE_UNROLL
                    for (int j = 0; j < INDEX_KEYS; j++) product[j] = fma(broadcast(keys[j] + c), own, product[j]);
                }
                const V weight = load(weights + h);
                QUIRE_UNROLL
                for (int j = 0; j < INDEX_KEYS; j++) sum[j] = fma(larger(V{}, product[j]), weight, sum[j]);
            }
            for (int64_t j = 0; j < count; j++) out[t + j] = reduce_add(sum[j]);
        }
        for (int64_t t = std::max(first, stop); t < end; t++) out[t] = -INF;
    });
}

}  // namespace
