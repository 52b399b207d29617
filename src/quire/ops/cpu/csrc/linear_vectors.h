// Products by vectors. Every number of the output is the bias, plus one chain of multiply-adds for each NEAR_LANES lanes, in
// ascending order: the error grows with the root of the chains' length and number, not of all inputs.
#pragma once

#include "fetching.h"
#include "linear.h"

namespace {

constexpr int64_t NEAR = 24 << 10;  // bytes of the weight that stay in the first cache while a chunk's rows pass by

// The strips of one kind of number.
template <class K>
struct Strips {
    using T = typename K::E::T;
    static constexpr int VECTOR = W * (K::PAIR == 2 ? 4 : (int)sizeof(T));  // bytes
    static constexpr int NEAR_LANES = (int)(NEAR / (COLUMNS * VECTOR));

    const char* data;
    int64_t stride;  // bytes from one strip to the next

    __attribute__((always_inline)) V operator()(int64_t k, int j) const {
        const char* at = data + j * stride + k * VECTOR;
        if constexpr (K::PAIR == 2) return load((const float*)at);
        else return K::E::get((const T*)at);
    }
};

// Brings COUNT strips into the cache, a vector of each for each lane that is multiplied.
template <int VECTOR, int COUNT, int KIND>
struct Fetch {
    const char* from;  // of lane 0
    int64_t stride;

    __attribute__((always_inline)) void operator()(int64_t k) const {
        for (int j = 0; j < COUNT; j++) fetch_line<KIND>(from + k * VECTOR + j * stride);
    }
};

// The same of all strips, a little ahead of the multiplication: up to lane `turn` from `here` on, then from `after` on.
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

// Sums of an item's rows, [rows, PANEL], that begin with the bias.
static void start_sums(const LinearItem& item, float* sums) {
    const LinearParams& p = *item.call->params;
    for (int64_t c = 0; c < item.strips * W; c += W) {
        const int64_t left = p.out_size - item.first_strip * W - c;
        const V v = p.bias ? get_part<F32>(p.bias + item.first_strip * W + c, left < W ? (int)left : W) : V{};
        for (int i = 0; i < item.rows; i++) store(sums + i * PANEL + c, v);
    }
}

// What they are at the end to the results.
template <class Out>
static void finish_sums(const LinearItem& item, const float* sums) {
    const LinearParams& p = *item.call->params;
    const int64_t column = item.first_strip * W;
    const int64_t columns = p.out_size - column < item.strips * W ? p.out_size - column : item.strips * W;
    for (int i = 0; i < item.rows; i++) {
        typename Out::T* out = (typename Out::T*)p.out + (item.first_row + i) * p.out_stride + column;
        for (int64_t c = 0; c < columns; c += W)
            put_part<Out>(out + c, load(sums + i * PANEL + c), columns - c < W ? (int)(columns - c) : W);
    }
}

template <class K>
struct LinearVectors {
    using E = typename K::E;
    using S = Strips<K>;
    static constexpr int LINE = S::VECTOR;
    static constexpr int CHUNK = 96;  // rows of x that an item has at most
    static constexpr int PANEL_STRIPS = COLUMNS;
    static constexpr int64_t PANEL_BYTES = 512 << 10;  // of the weight, that stay in the second cache together with the rows
    static constexpr int UNIT = 1;                     // strips that are not parted
    static int64_t panel_strips(int64_t) { return PANEL_STRIPS; }

    LinearItems<LinearVectors> items;
    const Fetching fetching = quire_fetching;
    alignas(64) float sums[CHUNK * PANEL];

    LinearVectors(LinearWork& all, int64_t thread) : items(all, thread) {}

    void work() {
        LinearItem item, after;
        for (bool more = items.take(item); more; item = after) {
            more = items.take(after);
            if (!more) after.weight = item.weight;  // which is in the cache
            start_sums(item, sums);
            const int64_t lanes = item.call->lanes;
            for (int64_t begin = 0; begin < lanes; begin += S::NEAR_LANES)
                multiply(item, begin, begin + S::NEAR_LANES < lanes ? begin + S::NEAR_LANES : lanes, after.weight);
            if (item.call->params->out_dtype == DTYPE_F32) finish_sums<F32>(item, sums);
            else finish_sums<E>(item, sums);
        }
    }

  private:
    // after: the weight of the next item, which is fetched meanwhile once nothing is left of this one.
    void multiply(const LinearItem& item, int64_t begin, int64_t end, const char* after) {
        const RowBlocks blocks(item.rows);
        const LinearCall& call = *item.call;
        const int64_t lda = call.x_stride, stride = item.stride;
        const float* x = call.x + item.first_row * lda;
        const S weight{item.weight, stride};
        // One block of rows fetches a little ahead. Several ones share the strips of the next stretch among them.
        const int64_t ahead = blocks.blocks == 1 ? fetching.weights_ahead / S::VECTOR : end - begin;
        const int64_t turn = call.lanes - ahead;
        const char *here = item.weight + ahead * S::VECTOR, *next = after - turn * S::VECTOR;
        for (int b = 0; b < blocks.blocks; b++) {
            const float* a = x + blocks.first(b) * lda;
            float* c = sums + blocks.first(b) * PANEL;
            with_vectors(item.strips, [&]<int N>() {
                with_rows(blocks.rows(b), [&]<int R>() {
                    const auto run = [&](const auto& fetch) {
                        micro_kernel<typename K::M, R, N, Sums::ADDED>(a, lda, weight, c, PANEL, begin, end, fetch);
                    };
                    if (blocks.blocks == 1) return run(FetchAhead<S::VECTOR>{here, next, turn, stride, fetching.weights});
                    const auto share = [&]<int COUNT, int KIND>() {
                        const char* from = begin < turn ? here : next;
                        run(Fetch<S::VECTOR, COUNT, KIND>{b * COUNT < COLUMNS ? from + b * COUNT * stride : from, stride});
                    };
                    const bool past = fetching.weights == FETCH_PAST;
                    if (blocks.blocks < COLUMNS) past ? share.template operator()<2, FETCH_PAST>() : share.template operator()<2, FETCH_FIRST>();
                    else if (past && call.chunks == 1) share.template operator()<1, FETCH_PAST>();
                    else share.template operator()<1, FETCH_FIRST>();
                });
            });
        }
    }
};

}  // namespace
