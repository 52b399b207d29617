// Attention to a tile of keys by matrix tiles of the processor. Scores are sums over 32 dimensions at a time; values are added to a
// row's sums 32 keys at a time, at absolute multiples of 32. So the bits of a row are the same for few and for many rows.
#pragma once

#include "attention.h"
#include "tiles.h"

namespace {

template <class K>
struct TileAttention : Worker<TileAttention<K>, K> {
    static constexpr int ITEM_ROWS = 384, MEMORY_ROWS = 28;
    static constexpr int FEW = 16;    // rows up to which keys are multiplied where they are stored
    static constexpr int BLOCK = 32;  // rows whose scores stay in the L1 cache
    static constexpr int APART = TILE + 16;  // stride of the rows of scores: a multiple of TILE would cause conflicts in the L1 cache
    static constexpr int GROUP = 32;  // keys whose values are weighed together

    using Base = Worker<TileAttention<K>, K>;
    using typename Base::Step;
    using typename Base::C;
    using Base::Base, Base::hides_nonfinite, Base::weigh;
    using Base::lanes, Base::lda_weights, Base::wide, Base::spec, Base::params;
    using Base::query, Base::keys, Base::values, Base::scores, Base::weights, Base::sums, Base::low, Base::high;

    Tiles tiles;
    const int depth = lanes / TILE_LANES;
    const bool adjacent = !K::SCALED && spec.head_dim % 32 == 0 && spec.block_size % W == 0;  // 16 stored keys can be loaded as a tile
    float* const columns = keys + 4 * W * row_lanes<K>(spec.head_dim);      // few queries, transposed: [lane][row]

    void start_item(const Step& step) {
        Base::start_item(step);
        const int count = step.item->count;
        if (count > FEW) return;
        for (int c = 0; c < lanes; c += W) {
            V rows[W];
            for (int i = 0; i < W; i++) rows[i] = i < count ? load(query + (int64_t)i * lanes + c) : V{};
            transpose(rows);
            for (int i = 0; i < W; i++) store(columns + (c + i) * W, rows[i]);
        }
    }

    bool fetches(const Step& step) const { return step.item->count > FEW; }

    void compute(const Step& step, const Fetcher<C>& fetcher) {
        if (fetches(step)) many(step, fetcher);
        else few(step);
    }

  private:
    // Find the groups of keys, within the step's tile, that the rows from `first` on attend to. Return whether there are any.
    bool seen(const Step& step, int first, int rows, int& begin, int& end) const {
        const auto found = Base::seen(step, first, rows);
        begin = found.begin / GROUP * GROUP, end = (found.end + GROUP - 1) / GROUP * GROUP;
        return begin < end;
    }

    // -------------------------------------------------------------------------------------------- few rows

    // Keys are the rows and queries the columns of the product. a + b * c equals a + c * b, so the bits are the same as with many rows.
    void few(const Step& step) {
        const int count = step.item->count;
        int begin, end;
        const bool any = seen(step, 0, count, begin, end);
        for (int at = begin / SUBTILE * SUBTILE; any && at < end; at += SUBTILE) score(step, at);
        for (int i = 0; i < count; i++) weigh(step, i, scores + i * APART, weights + i * lda_weights);
        if (!any) return;
        if (hides_nonfinite(step)) return add_seen_values(step, {0, count, begin, end, weights});
        for (int column = 0; column < spec.head_dim_v; column += PANEL) {
            const int left = spec.head_dim_v - column;
            float* to = sums + column;
            with_width(left, [&]<int N>() {
                load_sums<N>(to, wide, W);
                for (int at = begin; at < end; at += GROUP) {
                    pack_panel<K, N>(step.values + at, GROUP, column, left, values, [] {});
                    add_group<N>(weights + at / 2, values);
                }
                save_sums<N>(to, wide, W);
            });
        }
    }

    // Compute the scores of SUBTILE keys.
    void score(const Step& step, int at) {
        const int count = step.item->count, first = most(step.item->begin - step.tile, 0);
        const char* rows[4];
        int64_t strides[4];
        for (int t = 0; t < 4; t++) {
            const int key = at + t * W;
            if (adjacent && key >= first && key + W <= step.stop) {
                rows[t] = (const char*)step.keys[key], strides[t] = params.cache.k_slot * 2;
                continue;
            }
            const int64_t apart = row_lanes<K>(spec.head_dim);
            float* copy = keys + t * W * apart;
            for (int i = 0; i < W; i++) pack_cache_row<K>(step.keys[key + i], spec.head_dim, copy + i * apart);
            rows[t] = (const char*)copy, strides[t] = apart * 4;
        }
        tiles.zero<0>(), tiles.zero<1>(), tiles.zero<2>(), tiles.zero<3>();
        for (int d = 0; d < depth; d++) {
            tiles.load<6>(columns + d * TILE_LANES * W, 64);
            tiles.load_far<4>(rows[0] + d * 64, strides[0]), tiles.multiply<0, 4, 6>();
            tiles.load_far<5>(rows[1] + d * 64, strides[1]), tiles.multiply<1, 5, 6>();
            tiles.load_far<4>(rows[2] + d * 64, strides[2]), tiles.multiply<2, 4, 6>();
            tiles.load_far<5>(rows[3] + d * 64, strides[3]), tiles.multiply<3, 5, 6>();
        }
        alignas(64) float found[4][W][W];  // [key][row]
        tiles.save<0>(found[0], 64), tiles.save<1>(found[1], 64), tiles.save<2>(found[2], 64), tiles.save<3>(found[3], 64);
        for (int t = 0; t < 4; t++) {
            V lines[W];
            for (int i = 0; i < W; i++) lines[i] = load(found[t][i]);
            transpose(lines);
            for (int i = 0; i < count; i++) store(scores + i * APART + at + t * W, lines[i]);
        }
    }

    // ------------------------------------------------------------------------------------------- many rows

    // A block of rows, the groups of keys that they attend to, and their weights.
    struct Block {
        int first, rows, begin, end;
        float* weights;  // [rows][lda_weights]
    };

    void many(const Step& step, Fetcher<C> fetcher) {
        const bool apart = hides_nonfinite(step);
        const int stop = least(step.end, step.stop);
        for (int at = step.begin; at < stop; at += PANEL)
            pack_keys<K>(step.keys + at, least(stop - at, PANEL), spec.head_dim, keys + (int64_t)at * lanes, fetcher);
        for (int column = 0; column < spec.head_dim_v; column += PANEL) {
            const int left = spec.head_dim_v - column;
            with_width(left, [&]<int N>() {
                pack_panel<K, N>(step.values + step.begin, step.end - step.begin, column, left, panel_of(column, step.begin),
                                              [&] { fetcher.fetch(FETCH_WEIGH); });
            });
        }
        // The values of this block are added later: this uses the tiles while the softmax of the next block uses the vectors.
        Block before = {};
        for (int first = 0; first < step.item->count; first += BLOCK) {
            Block block = {first, least(step.item->count - first, BLOCK), 0, 0, weights + first / BLOCK % 2 * BLOCK * lda_weights};
            const bool any = seen(step, first, block.rows, block.begin, block.end);
            if (any) score_block(block);
            int weighed = 0;
            auto weigh_rows = [&](int count) {
                for (; count > 0 && weighed < block.rows; count--, weighed++)
                    weigh(step, first + weighed, scores + weighed * APART, block.weights + weighed * lda_weights);
            };
            if (before.rows) add_block(before, weigh_rows);
            weigh_rows(block.rows);
            before = {};
            if (any && apart) add_seen_values(step, block);
            else if (any) before = block;
        }
        if (before.rows) add_block(before, [](int) {});
        fetcher.fetch(Base::ALL_LINES);
    }

    // Return the packed values of a panel of columns, from a key on.
    float* panel_of(int column, int key) const { return values + (int64_t)column / PANEL * (TILE / 2) * PANEL + key / 2 * PANEL; }

    // Compute the scores of a block, 32 keys and up to 32 rows at a time.
    void score_block(const Block& block) {
        const float *a = query + (int64_t)block.first * lanes, *second = block.rows > 16 ? a + 16 * lanes : a;
        for (int at = block.begin; at < block.end; at += 32) {
            const float* b = keys + (int64_t)(at / PANEL * PANEL) * lanes + at % PANEL;
            tiles.zero<0>(), tiles.zero<1>(), tiles.zero<2>(), tiles.zero<3>();
            for (int c = 0; c < lanes; c += TILE_LANES, b += TILE_LANES * PANEL) {
                tiles.load_far<6>(b, PANEL * 4), tiles.load<4>(a + c, lanes * 4);
                tiles.load_far<7>(b + 16, PANEL * 4), tiles.load<5>(second + c, lanes * 4);
                tiles.multiply<0, 4, 6>(), tiles.multiply<1, 4, 7>(), tiles.multiply<2, 5, 6>(), tiles.multiply<3, 5, 7>();
            }
            float* to = scores + at;
            tiles.save<0>(to, APART * 4), tiles.save<1>(to + 16, APART * 4);
            tiles.save<2>(to + 16 * APART, APART * 4), tiles.save<3>(to + 16 * APART + 16, APART * 4);
        }
    }

    // Add the weighted values of a block. weigh_rows(n) computes the softmax of n rows of another block while the tiles multiply.
    template <class F>
    void add_block(const Block& block, const F& weigh_rows) {
        const float *a = block.weights, *second = block.rows > 16 ? a + 16 * lda_weights : a;
        const int begin = block.begin, end = block.end, turns = (end - begin) / 32 * ((spec.head_dim_v + 31) / 32);
        const int share = (BLOCK + turns - 1) / turns;
        for (int column = 0; column < spec.head_dim_v; column += 32) {
            float *to = sums + (int64_t)block.first * wide + column, *lower = to + 16 * wide;
            tiles.load<0>(to, wide * 4), tiles.load<1>(to + 16, wide * 4);
            tiles.load<2>(lower, wide * 4), tiles.load<3>(lower + 16, wide * 4);
            const float* b = panel_of(column, begin) + column % PANEL;
            for (int at = begin / 2; at < end / 2; at += TILE_LANES, b += TILE_LANES * PANEL) {
                tiles.load_far<6>(b, PANEL * 4), tiles.load<4>(a + at, lda_weights * 4);
                tiles.load_far<7>(b + 16, PANEL * 4), tiles.load<5>(second + at, lda_weights * 4);
                tiles.multiply<0, 4, 6>(), tiles.multiply<1, 4, 7>(), tiles.multiply<2, 5, 6>(), tiles.multiply<3, 5, 7>();
                weigh_rows(share);
            }
            tiles.save<0>(to, wide * 4), tiles.save<1>(to + 16, wide * 4);
            tiles.save<2>(lower, wide * 4), tiles.save<3>(lower + 16, wide * 4);
        }
    }

    // ---------------------------------------------------------------------------------- up to 16 rows' sums

    // Load N tiles of sums. stride: from one row to the next. apart: from one tile to the next.
    template <int N>
    void load_sums(const float* at, int64_t stride, int64_t apart) {
        tiles.load<0>(at, stride * 4);
        if constexpr (N > 1) tiles.load<1>(at + apart, stride * 4);
        if constexpr (N > 2) tiles.load<2>(at + 2 * apart, stride * 4);
        if constexpr (N > 3) tiles.load<3>(at + 3 * apart, stride * 4);
    }

    template <int N>
    void save_sums(float* at, int64_t stride, int64_t apart) {
        tiles.save<0>(at, stride * 4);
        if constexpr (N > 1) tiles.save<1>(at + apart, stride * 4);
        if constexpr (N > 2) tiles.save<2>(at + 2 * apart, stride * 4);
        if constexpr (N > 3) tiles.save<3>(at + 3 * apart, stride * 4);
    }

    // Add the packed values of a group times their weights.
    template <int N>
    void add_group(const float* weight, const float* packed) {
        tiles.load<4>(weight, lda_weights * 4);
        tiles.load<6>(packed, PANEL * 4), tiles.multiply<0, 4, 6>();
        if constexpr (N > 1) tiles.load<7>(packed + W, PANEL * 4), tiles.multiply<1, 4, 7>();
        if constexpr (N > 2) tiles.load<6>(packed + 2 * W, PANEL * 4), tiles.multiply<2, 4, 6>();
        if constexpr (N > 3) tiles.load<7>(packed + 3 * W, PANEL * 4), tiles.multiply<3, 4, 7>();
    }

    // Add values row by row, so that each row is multiplied only with values that it attends to. This is slower, with the same bits.
    // It overwrites the packed values, which no row reads in this case.
    void add_seen_values(const Step& step, const Block& block) {
        alignas(64) float all[4][W][W];  // only the first row is used
        const C* given[GROUP];
        for (int i = 0; i < block.rows; i++) {
            const int at_row = block.first + i;
            int begin, end;
            if (!seen(step, at_row, 1, begin, end)) continue;
            const int from = low[at_row] - step.tile, to = high[at_row] - step.tile;
            for (int column = 0; column < spec.head_dim_v; column += PANEL) {
                const int left = spec.head_dim_v - column;
                float* row = sums + (int64_t)at_row * wide + column;
                for (int j = 0; j < 4; j++) store(all[j][0], load(row + j * W));
                with_width(left, [&]<int N>() {
                    load_sums<N>(all[0][0], W, W * W);
                    for (int at = begin; at < end; at += GROUP) {
                        for (int t = 0; t < GROUP; t++)
                            given[t] = at + t >= from && at + t < to ? step.values[at + t] : (const C*)NOTHING;
                        pack_panel<K, N>(given, GROUP, column, left, values, [] {});
                        add_group<N>(block.weights + i * lda_weights + at / 2, values);
                    }
                    save_sums<N>(all[0][0], W, W * W);
                });
                for (int j = 0; j < 4; j++) store(row + j * W, load(all[j][0]));
            }
        }
    }
};

}  // namespace
