// Softmax of one row of scores over one tile of keys: scale, cap, bias and mask, then the exponentials, relative to the running
// maximum (Milakov & Gimelshein 2018). Scores are in units of log 2, so that exponentials are powers of two.
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

QUIRE_INLINE V within(V key, int low, int high, V inside, V outside) {
    return ((key >= splat((float)low)) & (key < splat((float)high))) ? inside : outside;
}

QUIRE_INLINE float largest(V* top) {
    for (int step = VECTORS / 2; step; step /= 2)
        for (int i = 0; i < step; i++) top[i] = larger(top[i], top[i + step]);
    return reduce_max(top[0]);
}

// Return the largest q·k of a row's visible keys low..high - 1.
QUIRE_INLINE float top_score(const float* s, int low, int high) {
    V top[VECTORS];
    for (int i = 0; i < VECTORS; i++) top[i] = splat(-INF);
    for (int at = low / SUBTILE * SUBTILE; at < high; at += SUBTILE) {
        const bool edge = at < low || at + SUBTILE > high;
        for (int i = 0; i < VECTORS; i++) {
            V x = load(s + at + i * W);
            if (edge) x = within(iota() + (float)(at + i * W), low, high, x, splat(-INF));
            top[i] = larger(x, top[i]);
        }
    }
    return largest(top);
}

// Multiply scores of integer keys by the keys' scales, in place: for the keys low..high - 1, and some next to them.
QUIRE_INLINE void scale_row(float* s, const float* key_scales, int low, int high) {
    for (int t = low / W * W; t < high; t += W) store(s + t, load(s + t) * load(key_scales + t));
}

// Return the largest score if scores are more than a positive multiple of q·k. The scores are computed in place; keys that are not
// visible get -inf, within the subtiles of visible keys. distance: position of the tile's first key minus that of the row.
static float bend_row(float* s, int low, int high, const ScoreRule& rule, float slope, float distance) {
    V top[VECTORS];
    for (int i = 0; i < VECTORS; i++) top[i] = splat(-INF);
    for (int at = low / SUBTILE * SUBTILE; at < high; at += SUBTILE) {
        for (int i = 0; i < VECTORS; i++) {
            V x = load(s + at + i * W) * rule.scale, key = iota() + (float)(at + i * W);
            if (rule.softcap != 0.0f) x = rule.softcap * tanh_any(x * rule.inverse_softcap);
            x = within(key, low, high, fma(splat(slope), key + distance, x), splat(-INF));
            store(s + at + i * W, x);
            top[i] = larger(x, top[i]);
        }
    }
    return largest(top);
}

// The sum and the maximum of a row's weights.
struct Weighed {
    float sum, largest;  // largest: only for K::BYTES
};

// Return the larger of numbers that are not negative, compared by their bits, so that NaN is the largest.
QUIRE_INLINE U larger_bits(U a, U b) { return a > b ? a : b; }
QUIRE_INLINE float largest_bits(U v) {
    uint32_t all[W], found = 0;
    memcpy(all, &v, sizeof all);
    for (uint32_t bits : all) found = bits > found ? bits : found;
    float number;
    memcpy(&number, &found, sizeof number);
    return number;
}

// Write the weights 2^(score * scale - top) of a row as an operand of the product with the values. Keys between begin and end that are
// not visible to the row get weight 0. value_scales: scales of integer values, which multiply the written weights, but not their sum.
template <class K>
QUIRE_INLINE Weighed weigh_row(
    const float* s, float* weights, int low, int high, int begin, int end, float scale, float top, const float* value_scales) {
    V sum[VECTORS] = {};
    U top_bits[VECTORS] = {};
    for (int at = begin; at < end; at += SUBTILE) {
        if (at >= high || at + SUBTILE <= low) {
            memset(weights + at / K::PAIR, 0, sizeof(float) * SUBTILE / K::PAIR);
            continue;
        }
        const bool edge = at < low || at + SUBTILE > high;
        V w[VECTORS];
        QUIRE_UNROLL for (int i = 0; i < VECTORS; i++) {
            // The product is rounded like the maximum, so that no score exceeds it. A fused product of huge scores could.
            w[i] = exp2_negative(load(s + at + i * W) * scale - top);
            if (edge) w[i] = within(iota() + (float)(at + i * W), low, high, w[i], V{});
            sum[i] = sum[i] + w[i];
            if constexpr (K::SCALED) {
                w[i] = w[i] * load(value_scales + at + i * W);
                if (edge) w[i] = within(iota() + (float)(at + i * W), low, high, w[i], V{});  // a scale may be NaN
                if constexpr (K::BYTES) top_bits[i] = larger_bits(top_bits[i], (U)w[i]);
            }
        }
        QUIRE_UNROLL for (int i = 0; i < VECTORS; i += K::PAIR) {
            float* to = weights + (at + i * W) / K::PAIR;
#ifdef QUIRE_BF16_PAIRS
            if constexpr (K::PAIR == 2) {
                store(to, pair_bf16(w[i], w[i + 1]));
                continue;
            }
#endif
            store(to, w[i]);
        }
    }
    for (int step = VECTORS / 2; step; step /= 2)
        for (int i = 0; i < step; i++) sum[i] = sum[i] + sum[i + step];
    QUIRE_UNROLL for (int i = 1; i < VECTORS; i++) top_bits[0] = larger_bits(top_bits[0], top_bits[i]);
    return {reduce_add(sum[0]), K::BYTES ? largest_bits(top_bits[0]) : 0.0f};
}

}  // namespace
