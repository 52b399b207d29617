// Products of bf16 by tiles. Every number of the output is the sum of products with 32 inputs at a time, in ascending order and, within
// these, in the order of tiles.h, plus the bias.
//
// 16 consecutive lines of a strip are a tile. A row of x is copied, so that tiles of it can be read at any alignment.
#pragma once

#include "fetching.h"
#include "linear.h"
#include "tiles.h"

namespace {

// Prefetches two strips into the L2 cache, in about `steps` steps.
class FetchPair {
  public:
    FetchPair(const char* at, int64_t stride, int64_t lines, int64_t steps)
        : at(at), stride(stride), lines(2 * lines), each((2 * lines + steps - 1) / steps) {}

    void operator()() {
        for (int64_t l = 0; l < each && line < lines; l++, line++) fetch_line(at + (line & 1) * stride + (line >> 1) * 64, FETCH_SECOND);
    }

  private:
    const char* at;
    int64_t stride, lines, each, line = 0;
};

struct LinearTiles {
    static constexpr int LINE = 64;
    static constexpr int CHUNK = 512;
    static constexpr int PANEL_STRIPS = 16, FEW_STRIPS = 4;
    static constexpr int UNIT = 2;  // strips whose rows of results fill a cache line

    // Return memory for the partial sums of all of an item's rows, in blocks of 32 rows and two strips.
    static void* waiting() {
        alignas(64) static thread_local float sums[CHUNK * PANEL_STRIPS * W];
        return sums;
    }

    static constexpr int64_t BYTES = 1024;  // of a tile
    // Tiles of two strips that stay in the L1 cache for all rows of a chunk. Up to WHOLE tiles cost less than storing partial sums.
    static constexpr int64_t DEPTH = 12, WHOLE = 20;

    LinearItems items;
    const Fetching fetching = quire_fetching;
    const int64_t ahead = fetching.weights_ahead / BYTES;  // distance of prefetching, in tiles of each strip
    alignas(64) float results[4][16][16];

    LinearTiles(LinearWork& all, int64_t thread) : items(all, thread) {}

    void work() {
        LinearItem item, after;
        for (bool more = items.take(item); more; item = after) {
            more = items.take(after);
            if (!more) after.weight = item.weight;  // cached already, so prefetching it is harmless
            if (item.rows <= 16) stream_one(item, after.weight);
            else if (item.rows <= 32) stream_two(item, after.weight);
            else multiply(item, after.weight);
        }
    }

  private:
    struct Rows {
        const char* at;
        int64_t stride;  // bytes
    };

    static Rows rows_from(const LinearItem& item, int64_t row) {
        const LinearCall& call = *item.call;
        row += item.first_row;
        if (row < call.whole) return {(const char*)(call.x + row * call.x_stride), call.x_stride * 4};
        return {(const char*)(call.tail + (row - call.whole) * call.tail_stride), call.tail_stride * 4};
    }

    // Prefetch the lines of one tile of each of COUNT strips.
    template <int COUNT>
    void fetch(const char* at, int64_t stride) const {
        for (int j = 0; j < COUNT; j++)
            for (int line = 0; line < 16; line++) fetch_line(at + j * stride + line * 64, fetching.weights);
    }

    // ------------------------------------------------------------------------------------ up to 16 rows

    void stream_one(const LinearItem& item, const char* after) {
        Tiles tiles({item.rows, item.rows});
        for (int strip = 0; strip < item.strips; strip += 4) {
            const int left = item.strips - strip;
            const char* next = left > 4 ? item.weight + (strip + 4) * item.stride : after;
            if (left >= 4) stream<4>(tiles, item, strip, next);
            else if (left == 3) stream<3>(tiles, item, strip, next);
            else if (left == 2) stream<2>(tiles, item, strip, next);
            else stream<1>(tiles, item, strip, next);
        }
    }

    template <int COUNT>
    void stream(Tiles& tiles, const LinearItem& item, int strip, const char* next) {
        const int64_t stride = item.stride, depth = item.call->lanes / TILE_LANES;
        const char* weight = item.weight + strip * stride;
        const auto [rows, lda] = rows_from(item, 0);
        tiles.zero<0>(), tiles.zero<1>(), tiles.zero<2>(), tiles.zero<3>();
        for (int64_t k = 0; k < depth; k++, weight += BYTES) {
            fetch<COUNT>(k + ahead < depth ? weight + ahead * BYTES : next + (k + ahead - depth) * BYTES, stride);
            tiles.load<4>(rows + k * 64, lda);
            tiles.load<6>(weight, 64), tiles.multiply<0, 4, 6>();
            if constexpr (COUNT > 1) tiles.load<7>(weight + stride, 64), tiles.multiply<1, 4, 7>();
            if constexpr (COUNT > 2) tiles.load<6>(weight + 2 * stride, 64), tiles.multiply<2, 4, 6>();
            if constexpr (COUNT > 3) tiles.load<7>(weight + 3 * stride, 64), tiles.multiply<3, 4, 7>();
        }
        tiles.save<0>(results[0], 64), tiles.save<1>(results[1], 64), tiles.save<2>(results[2], 64), tiles.save<3>(results[3], 64);
        put(item, 0, item.rows, strip, 0, COUNT > 1 ? 2 : 1);
        if constexpr (COUNT > 2) put(item, 0, item.rows, strip + 2, 2, COUNT - 2);
    }

    // ---------------------------------------------------------------------------------------- 17 to 32 rows

    void stream_two(const LinearItem& item, const char* after) {
        Tiles tiles({16, item.rows - 16});
        const int64_t stride = item.stride, depth = item.call->lanes / TILE_LANES;
        const auto [first, lda] = rows_from(item, 0);
        const auto [second, ldb] = rows_from(item, 16);
        for (int strip = 0; strip < item.strips; strip += 2) {
            const char* weight = item.weight + strip * stride;
            const int64_t other = strip + 1 < item.strips ? stride : 0;  // a single last strip is multiplied twice
            const char* next = strip + 2 < item.strips ? weight + 2 * stride : after;
            tiles.zero<0>(), tiles.zero<1>(), tiles.zero<2>(), tiles.zero<3>();
            for (int64_t k = 0; k < depth; k++, weight += BYTES) {
                fetch<2>(k + ahead < depth ? weight + ahead * BYTES : next + (k + ahead - depth) * BYTES, other);
                tiles.load<6>(weight, 64), tiles.load_far<4>(first + k * 64, lda);
                tiles.load<7>(weight + other, 64), tiles.load_far<5>(second + k * 64, ldb);
                tiles.multiply<0, 4, 6>(), tiles.multiply<1, 4, 7>(), tiles.multiply<2, 5, 6>(), tiles.multiply<3, 5, 7>();
            }
            put_block(tiles, item, 0, strip);
        }
    }

    // -------------------------------------------------------------------------------------------- more rows

    // Multiply two strips and two blocks of rows at a time. Many inputs are divided into stretches, with partial sums in memory.
    void multiply(const LinearItem& item, const char* after) {
        Tiles tiles;
        auto* const sums = (float (*)[4][16][16])waiting();
        const int64_t stride = item.stride, depth = item.call->lanes / TILE_LANES;
        const int64_t stretches = depth <= WHOLE ? 1 : (depth + DEPTH - 1) / DEPTH;
        const int blocks = (item.rows + 31) / 32;
        for (int64_t stretch = 0; stretch < stretches; stretch++) {
            const int64_t begin = depth * stretch / stretches, end = depth * (stretch + 1) / stretches;
            for (int strip = 0; strip < item.strips; strip += 2) {
                const char* weight = item.weight + strip * stride + begin * BYTES;
                const int64_t other = strip + 1 < item.strips ? stride : 0;
                // Prefetch the next two strips, the next stretch, or the next item.
                const char* next = strip + 2 < item.strips      ? weight + 2 * stride
                                   : stretch + 1 < stretches ? item.weight + end * BYTES
                                                                : after;
                FetchPair ahead(next, stride, (end - begin) * 16, (end - begin) * blocks);
                for (int block = 0; block < blocks; block++) {
                    Part part = {weight, other, begin, end, block * 32, strip, stretch + 1 == stretches};
                    auto& carried = sums[block * (PANEL_STRIPS / 2) + strip / 2];
                    if (item.rows > part.row + 16) multiply_block<2>(tiles, item, part, carried, ahead);
                    else multiply_block<1>(tiles, item, part, carried, ahead);
                }
            }
        }
    }

    // A stretch of two strips, for the block of rows from `row` on.
    struct Part {
        const char* weight;
        int64_t other, begin, end;
        int row, strip;
        bool is_last;
    };

    // Add a stretch. HALVES: number of blocks of 16 rows; the last one may have fewer.
    template <int HALVES>
    void multiply_block(Tiles& tiles, const LinearItem& item, const Part& part, float (&carried)[4][16][16], FetchPair& ahead) {
        const auto [first, lda] = rows_from(item, part.row);
        const auto [second, ldb] = rows_from(item, part.row + (HALVES == 2 ? 16 : 0));
        if (part.begin) {
            tiles.load_far<0>(carried[0], 64), tiles.load_far<1>(carried[1], 64);
            if constexpr (HALVES == 2) tiles.load_far<2>(carried[2], 64), tiles.load_far<3>(carried[3], 64);
        } else {
            tiles.zero<0>(), tiles.zero<1>(), tiles.zero<2>(), tiles.zero<3>();
        }
        const char* at = part.weight;
        for (int64_t k = part.begin; k < part.end; k++, at += BYTES) {
            tiles.load<6>(at, 64), tiles.load_far<4>(first + k * 64, lda);
            tiles.load<7>(at + part.other, 64);
            if constexpr (HALVES == 2) tiles.load_far<5>(second + k * 64, ldb);
            tiles.multiply<0, 4, 6>(), tiles.multiply<1, 4, 7>();
            if constexpr (HALVES == 2) tiles.multiply<2, 5, 6>(), tiles.multiply<3, 5, 7>();
            ahead();
        }
        if (part.is_last) return put_block(tiles, item, part.row, part.strip);
        tiles.save<0>(carried[0], 64), tiles.save<1>(carried[1], 64);
        if constexpr (HALVES == 2) tiles.save<2>(carried[2], 64), tiles.save<3>(carried[3], 64);
    }

    // ---------------------------------------------------------------------------------------------- results

    // Write results of up to 32 rows and up to two strips.
    void put_block(Tiles& tiles, const LinearItem& item, int row, int strip) {
        const int count = item.strips - strip < 2 ? item.strips - strip : 2, rows = item.rows - row;
        tiles.save<0>(results[0], 64), tiles.save<1>(results[1], 64), tiles.save<2>(results[2], 64), tiles.save<3>(results[3], 64);
        put(item, row, rows < 16 ? rows : 16, strip, 0, count);
        if (rows > 16) put(item, row + 16, rows < 32 ? rows - 16 : 16, strip, 2, count);
    }

    // Write rows of one or two tiles of the results, from `tile` on.
    void put(const LinearItem& item, int row, int rows, int strip, int tile, int count) const {
        if (item.call->params->out_dtype == DTYPE_F32) put_rows<F32>(item, row, rows, strip, tile, count);
        else put_rows<BF16>(item, row, rows, strip, tile, count);
    }

    template <class Out>
    void put_rows(const LinearItem& item, int row, int rows, int strip, int tile, int count) const {
        const LinearParams& p = *item.call->params;
        const int64_t column = (item.first_strip + strip) * W, left = p.out_size - column;
        const int first = left < W ? (int)left : W;
        const int second = count < 2 ? 0 : left < 2 * W ? (int)left - W : W;
        const V bias = p.bias ? get_part<F32>(p.bias + column, first) : V{};
        const V more = p.bias && second ? get_part<F32>(p.bias + column + W, second) : V{};
        typename Out::T* out = (typename Out::T*)p.out + (item.first_row + row) * p.out_stride + column;
        for (int i = 0; i < rows; i++, out += p.out_stride) {
            const V low = load(results[tile][i]) + bias;
            if (!second) {
                put_part<Out>(out, low, first);
                continue;
            }
            const V high = load(results[tile + 1][i]) + more;
            if constexpr (sizeof(typename Out::T) == 2) {
                if (second == W) {
                    store((float*)out, pair_bf16(low, high));
                    continue;
                }
            }
            put_part<Out>(out, low, W);
            put_part<Out>(out + W, high, second);
        }
    }
};

}  // namespace
