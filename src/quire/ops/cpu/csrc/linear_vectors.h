// Products by vectors. Every number of the output is the bias, plus one chain of multiply-adds for each NEAR_LANES lanes, in ascending
// order: the error grows with the root of the chains' length and of their number, not with the root of the number of inputs.
#pragma once

#include "fetching.h"
#include "linear.h"
#include "strips.h"

namespace {

// Number of vectors of VECTOR bytes in a cache line. One of them is prefetched.
template <int VECTOR>
constexpr int PER_LINE = VECTOR < 64 ? 64 / VECTOR : 1;

// Prefetches COUNT strips, one vector of each per lane that is multiplied.
template <int VECTOR, int COUNT, int KIND>
struct Fetch {
    const char* from;  // of lane 0
    int64_t stride;

    __attribute__((always_inline)) void operator()(int64_t k) const {
        for (int j = 0; j < COUNT; j++) fetch_line<KIND>(from + k * VECTOR + j * stride);
    }
};

// Prefetches all strips a little ahead of the multiplication: lanes k < turn relative to `here`, later lanes relative to `after`.
template <int VECTOR>
struct FetchAhead {
    const char *here, *after;
    int64_t turn, stride;
    int32_t kind;

    __attribute__((always_inline)) void operator()(int64_t k) const {
        const char* at = (k < turn ? here : after) + k * VECTOR;
        for (int j = 0; j < COLUMNS; j++) fetch_line(at + j * stride, kind);
    }
};

// Initialise the sums of an item's rows, [rows, PANEL], with the bias.
static inline void start_sums(const LinearItem& item, float* sums) {
    const LinearParams& p = *item.call->params;
    for (int64_t c = 0; c < item.strips * W; c += W) {
        const int64_t left = p.out_size - item.first_strip * W - c;
        const V v = p.bias ? get_part<F32>(p.bias + item.first_strip * W + c, left < W ? (int)left : W) : V{};
        for (int i = 0; i < item.rows; i++) store(sums + i * PANEL + c, v);
    }
}

// Write the final sums to the results.
static inline void finish_sums(const LinearItem& item, const float* sums) {
    const LinearParams& p = *item.call->params;
    const int64_t column = item.first_strip * W;
    const int64_t columns = p.out_size - column < item.strips * W ? p.out_size - column : item.strips * W;
    with_element(p.out_dtype, [&](auto element) {
        using Out = decltype(element);
        for (int i = 0; i < item.rows; i++) {
            typename Out::T* out = (typename Out::T*)p.out + (item.first_row + i) * p.out_stride + column;
            for (int64_t c = 0; c < columns; c += W)
                put_part<Out>(out + c, load(sums + i * PANEL + c), columns - c < W ? (int)(columns - c) : W);
        }
    });
}

template <class K>
struct LinearVectors {
    using S = Strips<K>;
    static constexpr int LINE = S::VECTOR;
    static constexpr int CHUNK = 96;  // most rows of x in an item

    LinearItems items;
    const Fetching fetching = quire_fetching;
    alignas(64) float sums[CHUNK * PANEL];

    LinearVectors(LinearWork& all, int64_t thread) : items(all, thread) {}

    void work() {
        LinearItem item, after;
        for (bool more = items.take(item); more; item = after) {
            more = items.take(after);
            // After the last item, its own weight is prefetched again, which is harmless since it is cached.
            each_part(item, more ? after.weight : item.weight, [&]<int N>(const LinearItem& part, const char* next) {
                start_sums(part, sums);
                const int64_t lanes = part.call->lanes;
                for (int64_t begin = 0; begin < lanes; begin += S::NEAR_LANES)
                    multiply<N>(part, begin, begin + S::NEAR_LANES < lanes ? begin + S::NEAR_LANES : lanes, next);
                finish_sums(part, sums);
            });
        }
    }

  private:
    // Multiply a part of an item. after: the address to prefetch at the end of this part.
    template <int N>
    void multiply(const LinearItem& item, int64_t begin, int64_t end, const char* after) {
        const RowBlocks blocks(item.rows);
        const LinearCall& call = *item.call;
        const int64_t lda = call.x_stride, stride = item.stride;
        const float* x = call.x + item.first_row * lda;
        const S weight{item.weight, stride};
        // A single block of rows prefetches a little ahead. Several blocks divide the strips of the next stretch among them.
        const int64_t ahead = blocks.blocks == 1 ? fetching.weights_ahead / S::VECTOR : end - begin;
        const int64_t turn = call.lanes - ahead;
        const char *here = item.weight + ahead * S::VECTOR, *next = after - turn * S::VECTOR;
        const auto add = [&]<int R>(int first, const auto& fetch) __attribute__((always_inline)) {
            const auto fetch_lines = [&](int64_t k) __attribute__((always_inline)) {
                if (k % PER_LINE<S::VECTOR> == 0) fetch(k);
            };
            micro_kernel<typename K::M, R, N, Sums::ADDED>(
                x + first * lda, lda, weight, sums + first * PANEL, PANEL, begin, end, fetch_lines);
        };
        if (blocks.blocks == 1) {
            const FetchAhead<S::VECTOR> fetch{here, next, turn, stride, fetching.weights};
            return with_rows(item.rows, [&]<int R>() { add.template operator()<R>(0, fetch); });
        }
        const char* const from = begin < turn ? here : next;
        const auto share = [&]<int COUNT, int KIND>() {
            for (int b = 0; b < blocks.blocks; b++) {
                const Fetch<S::VECTOR, COUNT, KIND> fetch{b * COUNT < COLUMNS ? from + b * COUNT * stride : from, stride};
                with_several_rows(blocks.rows(b), [&]<int R>() { add.template operator()<R>(blocks.first(b), fetch); });
            }
        };
        const bool past = fetching.weights == FETCH_PAST;
        if constexpr (COLUMNS > 2) {
            if (blocks.blocks < COLUMNS)
                return past ? share.template operator()<2, FETCH_PAST>() : share.template operator()<2, FETCH_FIRST>();
        }
        if (past && call.chunks == 1) share.template operator()<1, FETCH_PAST>();
        else share.template operator()<1, FETCH_FIRST>();
    }
};

}  // namespace
