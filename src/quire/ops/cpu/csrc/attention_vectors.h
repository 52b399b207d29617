// Attention to a tile of keys by vectors: keys are transposed and scored. Values are weighed where they are stored or, for many rows,
// packed first.
#pragma once

#include "attention.h"

namespace {

// Up to this number of blocks of rows, values are read where they are stored: packing them costs more than reading them twice.
constexpr int FEW_BLOCKS = 2;

template <class K>
struct VectorAttention : Worker<VectorAttention<K>, K> {
    static constexpr int ITEM_ROWS = 192, MEMORY_ROWS = 12;

    using Base = Worker<VectorAttention<K>, K>;
    using typename Base::Step;
    using typename Base::C;
    using Base::Base, Base::hides_nonfinite, Base::seen, Base::sees, Base::weigh;
    using Base::lanes, Base::lda_weights, Base::wide, Base::spec;
    using Base::query, Base::keys, Base::values, Base::scores, Base::weights, Base::sums, Base::low, Base::high;

    void compute(const Step& step, Fetcher<C> fetcher) {
        const RowBlocks blocks(step.item->count);
        const bool few = blocks.blocks <= FEW_BLOCKS;
        for (int at = step.begin; at < least(step.end, step.stop); at += PANEL) {
            const int count = least(step.stop - at, PANEL);
            pack_keys<K>(step.keys + at, count, spec.head_dim, keys, fetcher);
            for (int b = 0; b < blocks.blocks; b++) {
                const int first = blocks.first(b), rows = blocks.rows(b);
                if (!sees(step.tile + at, PANEL, first, rows)) continue;
                const float* q = query + (int64_t)first * lanes;
                float* s = scores + (int64_t)first * TILE + at;
                if (!few) {
                    with_several_rows(rows, [&]<int R>() { score<R, COLUMNS>(q, at, s, idle); });
                    continue;
                }
                const auto fetching = [&](int) { fetcher.fetch(FETCH_SCORE); };
                with_width(count, [&]<int N>() { with_rows(rows, [&]<int R>() { score<R, N>(q, at, s, fetching); }); });
            }
        }
        for (int i = 0; i < step.item->count; i++) {
            if (few) fetcher.fetch(FETCH_ROW);
            weigh(step, i, scores + (int64_t)i * TILE, weights + (int64_t)i * lda_weights);
        }
        const bool apart = hides_nonfinite(step);
        for (int column = 0; column < spec.head_dim_v; column += PANEL) {
            if (apart) add_seen_values(step, column);
            else add_values(step, blocks, column, fetcher);
        }
        fetcher.fetch(Base::ALL_LINES);
    }

    // Compute q·k of some rows and the packed keys, which begin at `at` within the tile. For a latent cache with scales, each of the
    // two parts of the sum is multiplied by its scale.
    template <int R, int N, class F>
    void score(const float* q, int at, float* to, const F& pause) const {
        const Panel operand{keys};
        if constexpr (K::SCALED) {
            if (spec.latent) {
                alignas(64) float rest[R * PANEL];
                const int cut = (int)K::lanes(spec.head_dim_v);
                micro_kernel<typename K::M, R, N, Sums::REPLACED>(q, lanes, operand, to, TILE, 0, cut, pause);
                micro_kernel<typename K::M, R, N, Sums::REPLACED>(q, lanes, operand, rest, PANEL, cut, lanes, pause);
                QUIRE_UNROLL for (int i = 0; i < R; i++)
                    QUIRE_UNROLL for (int j = 0; j < N; j++) {
                        float* sum = to + i * TILE + j * W;
                        const V first = load(sum) * load(this->value_scales + at + j * W);
                        store(sum, fma(load(rest + i * PANEL + j * W), load(this->key_scales + at + j * W), first));
                    }
                return;
            }
        }
        micro_kernel<typename K::M, R, N, Sums::REPLACED>(q, lanes, operand, to, TILE, 0, lanes, pause);
    }

    // Add one panel of columns of the product of weights and values to the sums.
    void add_values(const Step& step, const RowBlocks& blocks, int column, Fetcher<C>& fetcher) {
        const int left = spec.head_dim_v - column;
        const C* const* rows = step.values + step.begin;
        with_width(left, [&]<int N>() {
            const bool packed = blocks.blocks > FEW_BLOCKS || left < N * W;
            if (packed) pack_panel<K, N>(rows, step.end - step.begin, column, left, values, [&] { fetcher.fetch(FETCH_WEIGH); });
            for (int b = 0; b < blocks.blocks; b++) {
                const int first = blocks.first(b), count = blocks.rows(b);
                const auto range = seen(step, first, count);
                if (range.begin >= range.end) continue;
                const int begin = (range.begin - step.begin) / K::PAIR, end = (range.end - step.begin + K::PAIR - 1) / K::PAIR;
                const float* w = weights + (int64_t)first * lda_weights + step.begin / K::PAIR;
                float* to = sums + (int64_t)first * wide + column;
                with_rows(count, [&]<int R>() {
                    if (packed) micro_kernel<typename K::M, R, N, Sums::CONTINUED>(w, lda_weights, Panel{values}, to, wide, begin, end, idle);
                    else weigh_panel<K, R, N>(w, lda_weights, rows, begin, end, column, to, wide, fetcher);
                });
            }
        });
    }

    // Add values row by row, so that each row is multiplied only with values that it attends to. This is slower, with the same bits
    // as add_values.
    void add_seen_values(const Step& step, int column) {
        const int left = spec.head_dim_v - column;
        const C* seen[TILE];
        for (int i = 0; i < step.item->count; i++) {
            const int from = most(low[i] - step.tile, step.begin), to = least(high[i] - step.tile, step.end);
            if (from >= to) continue;
            const int begin = from / K::PAIR, lanes = (to + K::PAIR - 1) / K::PAIR - begin;
            for (int t = 0; t < lanes * K::PAIR; t++) {
                const int key = begin * K::PAIR + t;
                seen[t] = key >= from && key < to ? step.values[key] : (const C*)NOTHING;
            }
            const float* w = weights + (int64_t)i * lda_weights + begin;
            with_width(left, [&]<int N>() {
                pack_panel<K, N>(seen, lanes * K::PAIR, column, left, values, [] {});
                micro_kernel<typename K::M, 1, N, Sums::CONTINUED>(
                    w, lda_weights, Panel{values}, sums + (int64_t)i * wide + column, wide, 0, lanes, idle);
            });
        }
    }
};

}  // namespace
