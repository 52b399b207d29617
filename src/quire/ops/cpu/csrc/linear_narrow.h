// Products of floating-point weights of 8 or 4 bits with scales, see ops/weights/narrow.py: numbers are widened exactly to the operands of
// rows of x (fp32, or pairs of bf16), and every group's sum is scaled in fp32:
//
//     out = bias;  for each group of inputs, ascending:  out = fma(the group's sum, its scale, out)
//
// A group's sum is added up in the same order as with a weight of 16 bits, for any number of rows.
//
// For each block of 128 inputs, a strip has a line of scales, then lines of numbers. A line of numbers holds 4 inputs of W columns as
// bytes (e4m3), or 8 as nibbles (e2m1), the first four in the lower nibbles. A line of scales holds W scales in fp32 (e4m3, a group is a
// block), or four times W exponents (e2m1, a group is a quarter of a block).
#pragma once

#include "linear_vectors.h"

#include <type_traits>

namespace {

constexpr int64_t NARROW_BLOCK = 128;  // inputs

// Base: the kind of the rows, and of the widened numbers.
template <class Base, int N>
struct Narrow : Base {
    using Wide = Base;
    static constexpr int BITS = N;
    static constexpr int GROUP = BITS == 8 ? 128 : 32;              // inputs that share a scale
    static constexpr int INPUTS = 32 / BITS;                        // of a line
    static constexpr int LANES = INPUTS / Base::PAIR;               // of a widened line
    static constexpr float UNIT = BITS == 8 && Base::PAIR == 1 ? 256.0f : 1.0f;  // of widened numbers, see widen
    static int64_t lanes(int64_t numbers) { return Base::lanes((numbers + 7) / 8 * 8); }  // whole lines
};

// Call f.template operator()<K>() with the kind of a weight, given that of the rows: weights are widened to fp32 unless vectors multiply
// pairs.
template <class F>
static void with_narrow(const LinearParams& p, const F& f) {
    with_kind(p.dtype, [&]<class K>() {
        using Base = std::conditional_t<K::PAIR == 2, K, Fp32>;
        if (p.bits == 4) f.template operator()<Narrow<Base, 4>>();
        else f.template operator()<Narrow<Base, 8>>();
    });
}

// The lines of a strip.
template <class K>
struct NarrowLines {
    static constexpr int BYTES = 4 * W;
    static constexpr int64_t EACH = 1 + NARROW_BLOCK / K::INPUTS;  // of a whole block
    int64_t blocks, last, all;                                     // last: those of numbers in the last block
    explicit NarrowLines(const LinearParams& p)
        : blocks((p.in_size + NARROW_BLOCK - 1) / NARROW_BLOCK),
          last(K::lanes(p.in_size) / K::LANES - (blocks - 1) * (EACH - 1)), all((blocks - 1) * EACH + 1 + last) {}

    int64_t numbers(int64_t block) const { return block + 1 < blocks ? EACH - 1 : last; }
};

// -------------------------------------------------------------------------------------------------- packing

// Return the position in a line of the code of input i (0..3) and column c, chosen so that `widen` gives lanes in order.
template <class K>
constexpr int code_place(int i, int c) {
    const int word = K::PAIR == 2 ? 2 * c + i % 2 : W * (i % 2) + c;
    return word / 8 * 16 + i / 2 * 8 + word % 8;
}

// Pack a weight. codes: [out, in], one per byte. scales: [out, groups].
template <class K>
static void pack_narrow(ParallelFor parallel_for, const LinearParams& p, const uint8_t* codes, const float* scales, char* packed) {
    const NarrowLines<K> lines(p);
    const int64_t in = p.in_size, groups = (in + K::GROUP - 1) / K::GROUP;
    parallel(parallel_for, (p.out_size + W - 1) / W, 1, [&](int64_t strip) {
        const int64_t row = strip * W;
        const int columns = p.out_size - row < W ? (int)(p.out_size - row) : W;
        char* line = packed + strip * lines.all * lines.BYTES;
        memset(line, 0, (size_t)(lines.all * lines.BYTES));
        for (int64_t b = 0; b < lines.blocks; b++) {
            for (int c = 0; c < columns; c++) {
                const float* of_row = scales + (row + c) * groups;
                for (int64_t g = b * NARROW_BLOCK / K::GROUP, i = 0; g < groups && i < NARROW_BLOCK / K::GROUP; g++, i++) {
                    uint32_t bits;
                    memcpy(&bits, of_row + g, 4);
                    if (K::BITS == 8) memcpy(line + c * 4, &bits, 4);
                    else line[i * W + c] = (char)(bits >> 23);  // the exponent of a power of two
                }
            }
            line += lines.BYTES;
            for (int64_t l = 0; l < lines.numbers(b); l++, line += lines.BYTES) {
                const int64_t first = b * NARROW_BLOCK + l * K::INPUTS, left = in - first;
                for (int c = 0; c < columns; c++) {
                    const uint8_t* from = codes + (row + c) * in + first;
                    QUIRE_UNROLL for (int i = 0; i < K::INPUTS; i++)
                        if (i < left) line[code_place<K>(i % 4, c)] |= (char)(from[i] << (i / 4 * 4));
                }
            }
        }
    });
}

// ------------------------------------------------------------------------------------------------- widening

// A table of 16 bytes: the upper or the lower bytes of bf16 numbers, or the upper bytes of fp16 numbers.
struct alignas(16) Bytes16 {
    uint8_t of[16];
};
// e4m3 by its upper four bits; subnormal numbers by their lower four bits, without the sign.
constexpr Bytes16 E4M3_UPPER = {{0x3c, 0x3d, 0x3e, 0x3f, 0x40, 0x41, 0x42, 0x43, 0xbc, 0xbd, 0xbe, 0xbf, 0xc0, 0xc1, 0xc2, 0xc3}};
constexpr Bytes16 TINY_UPPER = {{0x00, 0x3b, 0x3b, 0x3b, 0x3c, 0x3c, 0x3c, 0x3c}};
constexpr Bytes16 TINY_LOWER = {{0x00, 0x00, 0x80, 0xc0, 0x00, 0x20, 0x40, 0x60}};
// e2m1.
constexpr Bytes16 E2M1_UPPER = {{0x00, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40, 0x80, 0xbf, 0xbf, 0xbf, 0xc0, 0xc0, 0xc0, 0xc0}};
constexpr Bytes16 E2M1_LOWER = {{0x00, 0x00, 0x80, 0xc0, 0x00, 0x40, 0x80, 0xc0, 0x00, 0x00, 0x80, 0xc0, 0x00, 0x40, 0x80, 0xc0}};
constexpr Bytes16 E2M1_FP16 = {{0x00, 0x38, 0x3c, 0x3e, 0x40, 0x42, 0x44, 0x46, 0x80, 0xb8, 0xbc, 0xbe, 0xc0, 0xc2, 0xc4, 0xc6}};

// Widen a line of numbers to K::LANES vectors of lanes, in units of K::UNIT: the bits of e4m3, placed in an fp16, give 2^-8 times the
// number, also for subnormal numbers.
template <class K>
QUIRE_INLINE void widen(const char* line, V* to) {
    B all;
    memcpy(&all, line, sizeof all);
    if constexpr (K::BITS == 8 && K::PAIR == 2) {
        const B lower = all & 15;
        const auto tiny = (all & 0x78) == 0;
        const B high = tiny ? look_up(TINY_UPPER.of, lower) : look_up(E4M3_UPPER.of, all >> 4);
        const B low = tiny ? look_up(TINY_LOWER.of, lower) : all << 4;
        const B with_sign = high | (all & 0x80);
        to[0] = join_lower(low, with_sign), to[1] = join_upper(low, with_sign);
    } else if constexpr (K::BITS == 8) {
        const auto halves = [&](V bytes, V* at) __attribute__((always_inline)) {  // each in the upper byte of 16 bits
            widen_halves((V)((H)bytes >> 1 & (int16_t)0xbf80), at);
        };
        halves(join_lower(B{}, all), to), halves(join_upper(B{}, all), to + 2);
    } else {
        QUIRE_UNROLL for (int half = 0; half < 2; half++) {
            const B codes = (half ? all >> 4 : all) & 15;
            V* at = to + half * 4 / K::PAIR;
            if constexpr (K::PAIR == 2) {
                const B low = look_up(E2M1_LOWER.of, codes), high = look_up(E2M1_UPPER.of, codes);
                at[0] = join_lower(low, high), at[1] = join_upper(low, high);
            } else {
                const B high = look_up(E2M1_FP16.of, codes);
                widen_halves(join_lower(B{}, high), at), widen_halves(join_upper(B{}, high), at + 2);
            }
        }
    }
}

// Read the scales of a group of a block. line: the block's first line.
template <class K>
QUIRE_INLINE V group_scales(const char* line, int group) {
    if constexpr (K::BITS == 8) return load((const float*)line);
    uint8_t exponents __attribute__((vector_size(W)));
    memcpy(&exponents, line + group * W, W);
    const U wide = __builtin_convertvector(exponents, U);
    return (V)(wide == 0 ? U{} + 0x400000u : wide << 23);  // the smallest power is a subnormal fp32
}

// ------------------------------------------------------------------------------------------------- products

template <class K>
struct LinearNarrow {
    using Lines = NarrowLines<K>;
    static constexpr int LINE = Lines::BYTES;
    static constexpr int CHUNK = K::TILED ? 192 : 96;  // most rows of x in an item

    static constexpr int BLOCK_LANES = NARROW_BLOCK / K::PAIR, GROUP_LANES = K::GROUP / K::PAIR;
    static constexpr int GROUP_LINES = K::GROUP / K::INPUTS;

    LinearItems items;
    const Fetching fetching = quire_fetching;
    alignas(64) float sums[CHUNK * PANEL];
    alignas(64) float wide[COLUMNS * BLOCK_LANES * W];  // a widened block of each strip, for use by several blocks of rows
    alignas(64) float part[16 * PANEL];                 // the sums of a group for a block of rows

    LinearNarrow(LinearWork& all, int64_t thread) : items(all, thread) {}

    void work() {
        LinearItem item, after;
        for (bool more = items.take(item); more; item = after) {
            more = items.take(after);
            // After the last item, its own weight is prefetched again, which is harmless since it is cached.
            each_part(item, more ? after.weight : item.weight, [&]<int N>(const LinearItem& own, const char* next) {
                start_sums(own, sums);
                multiply<N>(own, next);
                finish_sums(own, sums);
            });
        }
    }

  private:
    struct WidePanel {
        const float* data;
        __attribute__((always_inline)) V operator()(int64_t k, int j) const { return load(data + (j * BLOCK_LANES + k) * W); }
    };

    // Multiply a part of an item. after: the address to prefetch at the end of this part.
    template <int N>
    void multiply(const LinearItem& item, const char* after) {
        const LinearCall& call = *item.call;
        const Lines lines(*call.params);
        const int64_t ahead = fetching.weights_ahead / LINE, turn = call.lanes - ahead;
        const FetchAhead<LINE> fetch{item.weight + ahead * LINE, after - turn * LINE, turn, item.stride, fetching.weights};
        for (int64_t b = 0; b < lines.blocks; b++) {
            const float* x = call.x + item.first_row * call.x_stride + b * BLOCK_LANES;
            const int64_t line = b * Lines::EACH, count = lines.numbers(b);
            if constexpr (!K::TILED) {
                if (item.rows <= ROWS) {
                    with_rows(item.rows, [&]<int R>() { stream<R, N>(item, x, line, count, fetch); });
                    continue;
                }
            }
            widen_block<N>(item, line, count, fetch);
            const int lanes = (int)count * K::LANES;
#ifdef QUIRE_TILES
            if constexpr (K::TILED) multiply_tiles<N>(item, x, line, lanes);
#endif
            if constexpr (!K::TILED) {
                const RowBlocks blocks(item.rows);
                for (int i = 0; i < blocks.blocks; i++) {
                    const int first = blocks.first(i);
                    with_several_rows(blocks.rows(i), [&]<int R>() {
                        add_rows<R, N>(item, x + first * call.x_stride, first, line, lanes);
                    });
                }
            }
        }
    }

    // Multiply a block of lines from `line` on with few rows, widening each number when it is used.
    template <int R, int N>
    void stream(const LinearItem& item, const float* x, int64_t line, int64_t count, const FetchAhead<LINE>& fetch) {
        const char *scales = item.weight + line * LINE, *weight = scales + LINE;
        const int64_t stride = item.stride, lda = item.call->x_stride;
        for (int64_t l = 0; l < count;) {
            const int group = (int)(l / GROUP_LINES);
            const int64_t end = l + GROUP_LINES < count ? l + GROUP_LINES : count;
            V sum[R][N];
            QUIRE_UNROLL for (int i = 0; i < R; i++)
                QUIRE_UNROLL for (int j = 0; j < N; j++) sum[i][j] = V{};
            for (; l < end; l++) {
                const float* at = x + l * K::LANES;
                QUIRE_UNROLL for (int j = 0; j < N; j++) {
                    V lanes[K::LANES];
                    widen<K>(weight + j * stride + l * LINE, lanes);
                    QUIRE_UNROLL for (int k = 0; k < K::LANES; k++)
                        QUIRE_UNROLL for (int i = 0; i < R; i++) sum[i][j] = K::M::mac(sum[i][j], broadcast(at + i * lda + k), lanes[k]);
                }
                if (l % PER_LINE<LINE> == 0) fetch(line + 1 + l);
            }
            QUIRE_UNROLL for (int j = 0; j < N; j++) {
                const V scale = group_scales<K>(scales + j * stride, group);
                QUIRE_UNROLL for (int i = 0; i < R; i++) add_scaled(sums + i * PANEL + j * W, sum[i][j], scale);
            }
        }
    }

    QUIRE_INLINE_MEMBER static void add_scaled(float* to, V sum, V scale) { store(to, fma(sum * K::UNIT, scale, load(to))); }

    template <int N>
    void widen_block(const LinearItem& item, int64_t line, int64_t count, const FetchAhead<LINE>& fetch) {
        const char* weight = item.weight + (line + 1) * LINE;
        for (int64_t l = 0; l < count; l++) {
            QUIRE_UNROLL for (int j = 0; j < N; j++) {
                V lanes[K::LANES];
                widen<K>(weight + j * item.stride + l * LINE, lanes);
                QUIRE_UNROLL for (int k = 0; k < K::LANES; k++) store(wide + (j * BLOCK_LANES + l * K::LANES + k) * W, lanes[k]);
            }
            if (l % PER_LINE<LINE> == 0) fetch(line + 1 + l);
        }
    }

    // Add the sums of a group in `part`, scaled, for `rows` rows from `row` on.
    template <int N>
    QUIRE_INLINE_MEMBER void add_part(const LinearItem& item, int row, int rows, int64_t line, int group) {
        V scale[N];
        QUIRE_UNROLL for (int j = 0; j < N; j++) scale[j] = group_scales<K>(item.weight + j * item.stride + line * LINE, group);
        for (int i = 0; i < rows; i++)
            QUIRE_UNROLL for (int j = 0; j < N; j++) add_scaled(sums + (row + i) * PANEL + j * W, load(part + i * PANEL + j * W), scale[j]);
    }

    // Multiply R rows with the widened block.
    template <int R, int N>
    void add_rows(const LinearItem& item, const float* x, int row, int64_t line, int lanes) {
        for (int begin = 0; begin < lanes; begin += GROUP_LANES) {
            const int end = begin + GROUP_LANES < lanes ? begin + GROUP_LANES : lanes;
            micro_kernel<typename K::M, R, N, Sums::REPLACED>(x, item.call->x_stride, WidePanel{wide}, part, PANEL, begin, end, idle);
            add_part<N>(item, row, R, line, begin / GROUP_LANES);
        }
    }

#ifdef QUIRE_TILES
    // Multiply all rows with the widened block. Rows of x are copied, so 16 of them may always be read.
    template <int N>
    void multiply_tiles(const LinearItem& item, const float* x, int64_t line, int lanes) {
        const int height = item.rows < 16 ? item.rows : 16;
        const int64_t lda = item.call->x_stride;
        Tiles tiles({height, height});
        const auto strip = [&](int j, int k) { return wide + (j * BLOCK_LANES + k) * W; };
        for (int row = 0; row < item.rows; row += 16) {
            for (int begin = 0; begin < lanes; begin += GROUP_LANES) {
                tiles.zero<0>(), tiles.zero<1>(), tiles.zero<2>(), tiles.zero<3>();
                for (int k = begin; k < begin + GROUP_LANES && k < lanes; k += TILE_LANES) {
                    tiles.load<4>(x + row * lda + k, lda * 4);
                    tiles.load<6>(strip(0, k), 64), tiles.multiply<0, 4, 6>();
                    if constexpr (N > 1) tiles.load<7>(strip(1, k), 64), tiles.multiply<1, 4, 7>();
                    if constexpr (N > 2) tiles.load<6>(strip(2, k), 64), tiles.multiply<2, 4, 6>();
                    if constexpr (N > 3) tiles.load<7>(strip(3, k), 64), tiles.multiply<3, 4, 7>();
                }
                tiles.save<0>(part, PANEL * 4), tiles.save<1>(part + W, PANEL * 4);
                tiles.save<2>(part + 2 * W, PANEL * 4), tiles.save<3>(part + 3 * W, PANEL * 4);
                add_part<N>(item, row, item.rows - row < 16 ? item.rows - row : 16, line, begin / GROUP_LANES);
            }
        }
    }
#endif
};

}  // namespace
