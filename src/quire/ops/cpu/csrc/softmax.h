// One row of scores over one tile of keys: scale, cap, bias and mask, then the exponentials, relative to the running
// maximum (Milakov & Gimelshein 2018). Scores are kept in units of log 2, so that exponentials are powers of two.
#pragma once

#include "kinds.h"
#include "plan.h"
#include "vmath.h"

namespace {

struct ScoreRule {
    float scale;    // of q·k, times log2(e)
    float softcap;  // in units of log 2; 0: none
    float inverse_softcap;
};

constexpr int VECTORS = SUBTILE / W;

// The final scores of a row's visible keys low..high - 1, -inf beside them, within the subtiles that these touch.
// distance: position of the tile's first key minus that of the row. Returns the largest.
template <bool BENT>
QUIRE_INLINE float score_row(float* s, int low, int high, const ScoreRule& rule, float slope, float distance) {
    V top[VECTORS];
    for (int i = 0; i < VECTORS; i++) top[i] = splat(-INF);
    for (int at = low / SUBTILE * SUBTILE; at < high; at += SUBTILE) {
        const bool edge = at < low || at + SUBTILE > high;
        for (int i = 0; i < VECTORS; i++) {
            V x = load(s + at + i * W) * rule.scale;
            V key = iota() + (float)(at + i * W);
            if constexpr (BENT) {
                if (rule.softcap != 0.0f) x = rule.softcap * tanh_any(x * rule.inverse_softcap);
                x = fma(splat(slope), key + distance, x);
            }
            if (edge) x = (key >= splat((float)low)) & (key < splat((float)high)) ? x : splat(-INF);
            store(s + at + i * W, x);
            top[i] = larger(x, top[i]);
        }
    }
    for (int step = VECTORS / 2; step; step /= 2)
        for (int i = 0; i < step; i++) top[i] = larger(top[i], top[i + step]);
    return reduce_max(top[0]);
}

// The weights 2^(score - top) of a scored row, written as the operand of the product with the values; returns their sum.
// Where the row sees nothing between begin and end the weights are 0.
template <class K>
QUIRE_INLINE float weigh_row(const float* s, float* weights, int low, int high, int begin, int end, float top) {
    V sum[VECTORS] = {};
    for (int at = begin; at < end; at += SUBTILE) {
        const bool seen = at < high && at + SUBTILE > low;
        for (int i = 0; i < VECTORS; i += K::PAIR) {
            V w[2] = {};
            for (int j = 0; j < K::PAIR; j++) {
                if (!seen) continue;
                w[j] = exp2_negative(load(s + at + (i + j) * W) - top);
                sum[i + j] = sum[i + j] + w[j];
            }
            float* to = weights + (at + i * W) / K::PAIR;
#ifdef QUIRE_BF16_DOT
            if constexpr (K::PAIR == 2) {
                store(to, pair_bf16(w[0], w[1]));
                continue;
            }
#endif
            store(to, w[0]);
        }
    }
    for (int step = VECTORS / 2; step; step /= 2)
        for (int i = 0; i < step; i++) sum[i] = sum[i] + sum[i + step];
    return reduce_add(sum[0]);
}

}  // namespace
