// Attention to a tile of an int8 cache by products of bytes. Queries, and the weights of values, are rounded to integers of 16 bits,
// which are split into two bytes each. A query row has one scale; the weights have one per row and tile. The largest number uses all
// 16 bits. Sums of products are exact. A product of four bytes costs as much as a product of two bf16 numbers, so two byte products
// cost the same as bf16; but keys and values are multiplied where they are stored, without a conversion to bf16.
#pragma once

#include "attention.h"
#include "rounding.h"

#ifdef QUIRE_BYTE_DOT
namespace {

constexpr int QUAD = 4;  // numbers in a lane

// Keys as unsigned bytes: 128 is added to each.
struct KeyQuads {
    using Cache = S8;
    static constexpr int PAIR = QUAD, PER_LANE = QUAD;
    static int64_t lanes(int64_t numbers) { return (numbers + QUAD - 1) / QUAD; }
    QUIRE_INLINE void put_keys(float* at, V lanes, int) { store(at, (V)((U)lanes ^ 0x80808080u)); }
};

// Add products with one byte of each of the rows' numbers.
template <int R, int N, class M, class F>
QUIRE_INLINE void add_bytes(
    I (&sum)[R][N], const float* a, int64_t stride, const Panel& b, int begin, int end, const M& multiply, const F& pause) {
    for (int k = begin; k < end; k++) {
        I column[N];
        QUIRE_UNROLL for (int j = 0; j < N; j++) column[j] = (I)b(k, j);
        QUIRE_UNROLL for (int i = 0; i < R; i++) {
            const I row = (I)broadcast(a + i * stride + k);
            QUIRE_UNROLL for (int j = 0; j < N; j++) sum[i][j] = multiply(sum[i][j], row, column[j]);
        }
        pause();
    }
}

// Add products with both bytes, the upper ones first.
template <int R, int N, class M, class F>
QUIRE_INLINE void add_parts(
    I (&sum)[R][N], const float* upper, const float* lower, int64_t stride, const Panel& b, int begin, int end, const M& multiply,
    const F& pause) {
    add_bytes(sum, upper, stride, b, begin, end, multiply, pause);
    QUIRE_UNROLL for (int i = 0; i < R; i++)
        QUIRE_UNROLL for (int j = 0; j < N; j++) sum[i][j] = (I)((U)sum[i][j] << 8);
    add_bytes(sum, lower, stride, b, begin, end, multiply, pause);
}

template <class K>
struct ByteAttention : Worker<ByteAttention<K>, K> {
    static constexpr int ITEM_ROWS = VectorAttention<K>::ITEM_ROWS, MEMORY_ROWS = VectorAttention<K>::MEMORY_ROWS;
    // The largest integers: a sum of 512 products of a query and a key fits an int32, and so does one of TILE weights and values.
    static constexpr float LARGEST_QUERY = 32512.0f, LARGEST_WEIGHT = 65535.0f;

    using Base = Worker<ByteAttention<K>, K>;
    using typename Base::Step;
    using typename Base::C;
    using Base::Base, Base::seen, Base::sees, Base::weigh;
    using Base::lanes, Base::wide, Base::spec;
    using Base::query, Base::keys, Base::values, Base::scores, Base::weights, Base::sums, Base::low, Base::high;

    const int quads = (int)KeyQuads::lanes(spec.head_dim);
    const int cut = spec.latent ? spec.head_dim_v : spec.head_dim;  // index from which numbers have another scale
    float factors[ITEM_ROWS];  // scale of each row's weights in this tile

    // Layout of a query: its upper bytes, its lower bytes, its scale, and the initial values of its sums before and after the cut.
    void put_query(const void* row, float* to) {
        const int dim = spec.head_dim;
        alignas(64) float widened[1024];
        pack_row_of<Fp32>(spec.dtype, row, dim, widened);
        alignas(64) int8_t upper[1024], lower[1024];
        bool finite = true;
        const float top = dim > 512 ? LARGEST_QUERY / 2 : LARGEST_QUERY;
        const float largest = largest_number<F32>(widened, dim, finite);
        const bool any = finite && largest >= SMALLEST;
        const float factor = any ? top / largest : 0.0f;
        int32_t numbers[1024];
        for (int c = 0; c < dim; c += W) store((float*)numbers + c, (V)(any ? nearest(get_part<F32>(widened + c, dim - c) * factor) : I{}));
        const int32_t starts[2] = {start_of(numbers, cut), start_of(numbers + cut, dim - cut)};
        for (int c = 0; c < dim; c += W) {
            const I whole = (I)load((float*)numbers + c), rest = (whole << 24) >> 24;
            put_bytes(upper + c, (whole - rest) >> 8), put_bytes(lower + c, rest);
        }
        memcpy(to, upper, (size_t)quads * QUAD), memcpy(to + quads, lower, (size_t)quads * QUAD);
        to[2 * quads] = finite ? largest / top : __builtin_nanf("");
        memcpy(to + 2 * quads + 1, starts, sizeof starts);
    }

    void compute(const Step& step, Fetcher<C> fetcher) {
        const RowBlocks blocks(step.item->count);
        auto fetching = [&] { fetcher.fetch(FETCH_SCORE / 2); };  // called twice per lane, and a lane has four numbers, not two
        for (int at = step.begin; at < least(step.end, step.stop); at += PANEL) {
            const int count = least(step.stop - at, PANEL);
            pack_keys<KeyQuads>(step.keys + at, count, spec.head_dim, keys, fetcher);
            for (int b = 0; b < blocks.blocks; b++) {
                const int first = blocks.first(b), rows = blocks.rows(b);
                if (!sees(step.tile + at, PANEL, first, rows)) continue;
                if (blocks.blocks > FEW_BLOCKS) {
                    with_several_rows(rows, [&]<int R>() { score<R, COLUMNS>(first, at, [] {}); });
                    continue;
                }
                with_width(count, [&]<int N>() { with_rows(rows, [&]<int R>() { score<R, N>(first, at, fetching); }); });
            }
        }
        for (int i = 0; i < step.item->count; i++) {
            if (blocks.blocks <= FEW_BLOCKS) fetcher.fetch(FETCH_ROW);
            float* row = scores + (int64_t)i * TILE;
            const float largest = weigh(step, i, row, row);
            round_weights(step, i, row, largest);
        }
        for (int column = 0; column < spec.head_dim_v; column += PANEL) add_values(step, blocks, column, fetcher);
        fetcher.fetch(Base::ALL_LINES);
    }

  private:
    // Return the initial value of the sums of a query's numbers. Keys are 128 too large, so 128 times the sum of these numbers must
    // be subtracted, or half the sum before the upper sums are shifted by 8 bits. The sum is made even for this.
    static int32_t start_of(int32_t* numbers, int count) {
        int32_t sum = 0;
        for (int c = 0; c < count; c++) sum += numbers[c];
        const int32_t odd = sum & 1;
        if (odd) numbers[0] -= 1;
        return -(sum - odd) / 2;
    }

    // Compute q·k of the rows from `first` on with the packed keys, which begin at `at` within the tile.
    template <int R, int N, class F>
    void score(int first, int at, const F& fetch) const {
        const int end = cut / QUAD;
        if (!spec.latent) return score_part<R, N, Sums::REPLACED>(first, at, 0, quads, 0, this->key_scales, fetch);
        score_part<R, N, Sums::REPLACED>(first, at, 0, end, 0, this->value_scales, fetch);
        score_part<R, N, Sums::ADDED>(first, at, end, quads, 1, this->key_scales, fetch);
    }

    // Compute the part of q·k from the lanes begin..end, four numbers each. start: index of the initial value of the sums.
    template <int R, int N, Sums SUMS, class F>
    void score_part(int first, int at, int begin, int end, int start, const float* scales, const F& fetch) const {
        const float* q = query + (int64_t)first * lanes;
        float* to = scores + (int64_t)first * TILE + at;
        I sum[R][N];
        QUIRE_UNROLL for (int i = 0; i < R; i++)
            QUIRE_UNROLL for (int j = 0; j < N; j++) sum[i][j] = (I)broadcast(q + i * lanes + 2 * quads + 1 + start);
        auto multiply = [](I acc, I row, I column) __attribute__((always_inline)) { return dot_bytes(acc, column, row); };
        add_parts(sum, q, q + quads, lanes, Panel{keys}, begin, end, multiply, fetch);
        QUIRE_UNROLL for (int i = 0; i < R; i++) {
            const V unit = splat(q[i * lanes + 2 * quads]);
            QUIRE_UNROLL for (int j = 0; j < N; j++) {
                float* place = to + i * TILE + j * W;
                const V part = __builtin_convertvector(sum[i][j], V) * unit * load(scales + at + j * W);
                store(place, SUMS == Sums::ADDED ? load(place) + part : part);
            }
        }
    }

    // The upper and the lower bytes of a row's weights: [2][TILE].
    char* bytes_of(int row) const { return (char*)weights + (int64_t)row * 2 * TILE; }

    void round_weights(const Step& step, int i, const float* row, float largest) {
        const bool finite = largest < INF, any = finite && largest >= SMALLEST;
        const float factor = any ? LARGEST_WEIGHT / largest : 0.0f;
        factors[i] = !finite ? __builtin_nanf("") : any ? largest / LARGEST_WEIGHT : 0.0f;
        char* to = bytes_of(i);
        for (int t = step.begin; t < step.end; t += SUBTILE) {
            I whole[VECTORS];
            QUIRE_UNROLL for (int j = 0; j < VECTORS; j++)
                whole[j] = any ? nearest(load(row + t + j * W) * factor) : I{};
            split_bytes(whole, to + t, to + TILE + t);
        }
    }

    // Add one panel of columns of the product of weights and values to the sums.
    void add_values(const Step& step, const RowBlocks& blocks, int column, Fetcher<C>& fetcher) {
        const int left = spec.head_dim_v - column;
        for (int t = step.begin; t < step.end; t += QUAD) {
            V rows[QUAD];
            for (int i = 0; i < QUAD; i++) rows[i] = load_lanes(step.values[t + i] + column, left);
            interleave_bytes(rows);
            fetcher.fetch(FETCH_WEIGH);
            for (int j = 0; j < COLUMNS; j++) store(values + (int64_t)t / QUAD * PANEL + j * W, rows[j]);
        }
        for (int b = 0; b < blocks.blocks; b++) {
            const int first = blocks.first(b), count = blocks.rows(b);
            const auto range = seen(step, first, count);
            const int begin = range.begin, end = range.end;
            if (begin >= end) continue;
            with_rows(count, [&]<int R>() { add_block<R>(first, begin / QUAD, (end + QUAD - 1) / QUAD, sums + (int64_t)first * wide + column); });
        }
    }

    template <int R>
    void add_block(int first, int begin, int end, float* to) const {
        I sum[R][COLUMNS] = {};
        const float* row = (const float*)bytes_of(first);
        auto multiply = [](I acc, I row, I column) __attribute__((always_inline)) { return dot_bytes(acc, row, column); };
        add_parts(sum, row, row + TILE / QUAD, 2 * TILE / QUAD, Panel{values}, begin, end, multiply, [] {});
        QUIRE_UNROLL for (int i = 0; i < R; i++) {
            const float factor = factors[first + i];
            if (factor == 0.0f) continue;
            V columns[COLUMNS];
            QUIRE_UNROLL for (int j = 0; j < COLUMNS; j++) columns[j] = (V)sum[i][j];
            part_columns(columns);
            QUIRE_UNROLL for (int j = 0; j < COLUMNS; j++) {
                float* at = to + i * wide + j * W;
                store(at, fma(__builtin_convertvector((I)columns[j], V), splat(factor), load(at)));
            }
        }
    }
};

}  // namespace
#endif
