// How each dtype of the cache becomes operands of the matrix product: keys transposed, values in rows, both in panels.
//
// Keys are transposed as 32-bit lanes whatever they hold. A pair of bf16 is then already what the dot product wants, and
// elsewhere the halves are widened to fp32 after the transposition.
#pragma once

#include "elements.h"
#include "matmul.h"

namespace {

struct Fp32 {
    using E = F32;
    using M = Multiply;
    static constexpr int PAIR = 1;  // keys or values that a lane of an operand holds
    QUIRE_INLINE void put_keys(float* at, V lanes, int) { store(at, lanes); }
    static constexpr int PER_LANE = 1;  // numbers in 32 bits of the cache
};

template <class Element>
struct Widened {
    using E = Element;
    using M = Multiply;
    static constexpr int PAIR = 1;
    static constexpr int PER_LANE = 2;
    QUIRE_INLINE void put_keys(float* at, V lanes, int left) {
        store(at, E::lower(lanes));
        if (left > 1) store(at + PANEL, E::upper(lanes));
    }
};

#ifdef QUIRE_BF16_DOT
struct Pairs {
    using E = BF16;
    using M = MultiplyPairs;
    static constexpr int PAIR = 2;
    static constexpr int PER_LANE = 2;
    QUIRE_INLINE void put_keys(float* at, V lanes, int) { store(at, lanes); }
};
#endif

// Lanes of an operand that D numbers take.
template <class K>
constexpr int operand_lanes(int dim) {
    return K::PAIR == 2 ? (dim + 1) / 2 : dim;
}

// One row of queries as the lanes that are broadcast.
template <class K>
static void pack_query(const typename K::E::T* row, int dim, float* to) {
    if constexpr (K::PAIR == 2) {
        to[(dim - 1) / 2] = 0.0f;
        memcpy(to, row, (size_t)dim * sizeof *row);
    } else {
        for (int c = 0; c < dim; c += W) put_part<F32>(to + c, get_part<typename K::E>(row + c, dim - c), dim - c);
    }
}

// PANEL keys, transposed: to[lane][key].
template <class K>
static void pack_keys(const typename K::E::T* const* rows, int dim, float* to) {
    constexpr int step = W * K::PER_LANE;  // numbers of a key in one vector
    constexpr int lanes_of_step = K::PAIR == 2 ? W : step;
    for (int t = 0; t < PANEL; t += W) {
        for (int c = 0; c < dim; c += step) {
            V lanes[W];
            const int left = dim - c;
            if (left >= step) {
                for (int i = 0; i < W; i++) lanes[i] = load((const float*)(rows[t + i] + c));
            } else {
                for (int i = 0; i < W; i++) lanes[i] = load_lanes(rows[t + i] + c, left * (int)sizeof(typename K::E::T));
            }
            transpose(lanes);
            float* at = to + (int64_t)(c / step) * lanes_of_step * PANEL + t;
            for (int i = 0; i < W && i * K::PER_LANE < left; i++)
                K::put_keys(at + i * (lanes_of_step / W) * PANEL, lanes[i], left - i * K::PER_LANE);
        }
    }
}

// The values of `count` keys (even where lanes are pairs), in panels of PANEL columns: to[panel][lane][column].
template <class K>
static void pack_values(const typename K::E::T* const* rows, int count, int dim, float* to, int64_t panel_stride) {
    if constexpr (K::PAIR == 2) {
#ifdef QUIRE_BF16_DOT
        for (int t = 0; t < count; t += 2) {
            for (int c = 0; c < dim; c += 2 * W) {
                V low, high;
                interleave_bf16(load_lanes(rows[t] + c, (dim - c) * 2), load_lanes(rows[t + 1] + c, (dim - c) * 2), &low, &high);
                float* at = to + c / PANEL * panel_stride + (int64_t)(t / 2) * PANEL + c % PANEL;
                store(at, low);
                store(at + W, high);
            }
        }
#endif
    } else {
        for (int t = 0; t < count; t++)
            for (int c = 0; c < dim; c += W)
                store(to + c / PANEL * panel_stride + (int64_t)t * PANEL + c % PANEL,
                      get_part<typename K::E>(rows[t] + c, dim - c));
    }
}

}  // namespace
