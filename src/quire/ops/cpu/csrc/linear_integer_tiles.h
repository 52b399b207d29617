// Products of integers by tiles, used if there are more rows than vectors take at once. Sums of integers are exact, so the bits are
// those of linear_integers.h, which documents the format and the order of rounding.
//
// For weights of 8 bits, 16 consecutive lines are a tile. Weights of fewer bits are converted to bytes once for all rows of an item,
// with their zeros subtracted, so that no correction of the sums is needed. A tile is 64 inputs deep, or 32 if that is a group. With
// sub-scales, the products of values and sub-scales are split into two planes of bytes, 128 * upper + lower, which are multiplied one
// after the other.
//
// The sums of 32 rows and two strips in a segment are stored from the tiles as integers. Vectors scale them and add them to the rows'
// sums between the products of the next segment.
#pragma once

#include "fetching.h"
#include "linear_integers.h"
#include "linear_tiles.h"
#include "tiles.h"

namespace {

// The scales of a product: one per row of x and segment, with one per group of the weight; the same, with one per output at the end;
// or one per row and one per output, both at the end.
enum class Scales { OF_GROUPS, OF_OUTPUTS, OF_ROWS };

template <class K>
struct LinearIntegerTiles {
    static constexpr int BITS = K::BITS, PLANES = K::SUB ? 2 : 1;
    static constexpr int LINE = 64;
    static constexpr int CHUNK = LinearTiles::CHUNK;
    static constexpr int PANEL_STRIPS = LinearTiles::PANEL_STRIPS;

    // Up to this number of rows, vectors are used: one block of rows. On a Granite Rapids, an earlier version read a weight for 4 rows
    // at 0.86 of the rate for one row, and for 8 rows, in two blocks, at 0.6 to 0.7 of it.
    static constexpr int FEW = ROWS;
    // Inputs of two strips, 24 KiB as bytes, that stay in the L1 cache for all rows of an item. This was measured with an earlier
    // version on a Granite Rapids, where scaling the sums of each 128 inputs took 15 to 20 % of the time.
    static constexpr int64_t DEPTH = 768 / PLANES;

    LinearItems items;
    IntegerVectors<K, FEW> vectors;
    alignas(64) int32_t totals[PLANES][32][2][W];  // of rows and strips, in one segment
    alignas(64) char unpacked[(BITS == 8 ? ACTIVATION_GROUP : DEPTH * PLANES) * 2 * W];

    LinearIntegerTiles(LinearWork& all, int64_t thread) : items(all, thread) {}

    void work() {
        LinearItem item, after;
        for (bool more = items.take(item); more; item = after) {
            more = items.take(after);
            const char* next = more ? after.weight : item.weight;  // item.weight is cached already, so prefetching it is harmless
            const LinearParams& p = *item.call->params;
            if (item.rows <= FEW) vectors.multiply(item, next);
            else if (by_row(p)) multiply<Scales::OF_ROWS>(item, next);
            else if (p.scales) multiply<Scales::OF_OUTPUTS>(item, next);
            else multiply<Scales::OF_GROUPS>(item, next);
        }
    }

  private:
    using Block = float[32][2][W];  // sums of rows and strips

    // The segments begin..end - 1 of two strips.
    struct Part {
        Lines<K> lines;
        const LinearParams& params;
        const char* weight;  // of the first strip, all of it
        int64_t other;       // bytes to the second strip; 0: only one strip, which is multiplied twice
        int64_t begin, end;
        bool passes;         // it is used by only one block of rows

        int64_t tile() const { return (lines.segments.size < 64 ? lines.segments.size : 64) * W; }  // bytes
        int64_t tiles(int64_t segment) const { return (lines.units(segment) * K::QUADS + 15) / 16; }
        // Whether the lines of a segment are not a whole number of tiles, so that a tile may extend beyond the weight.
        bool is_ragged(int64_t segment) const {
            return segment + 1 == lines.segments.count && lines.segments.last * W % tile();
        }
        // Bytes of a segment in one plane, and the offset of its first plane within the part.
        int64_t plane() const { return lines.segments.size * 2 * W; }
        int64_t place(int64_t segment) const { return (segment - begin) * PLANES * plane(); }
        const char* at(int64_t segment) const { return weight + lines.at(segment) * LINE; }
        // Return the lines of scales of a segment in the first strip.
        const char* scales(int64_t segment) const { return weight + lines.scales_at(segment) * LINE; }
    };

    // The tiles of a segment.
    struct Operand {
        const char* at;
        int64_t tile, strip;  // bytes from one tile to the next, and from the first strip to the second
    };

    // Multiply two strips and two blocks of 16 rows at a time, in stretches of the inputs, as the tiles of bf16 do.
    template <Scales S>
    void multiply(const LinearItem& item, const char* after) {
        const LinearParams& p = *item.call->params;
        const Lines<K> lines(p);
        const int64_t count = lines.segments.count, stretches = (count * lines.segments.size + DEPTH - 1) / DEPTH;
        const int blocks = (item.rows + 31) / 32;
        auto* const sums = (Block*)LinearTiles::waiting();
        const int second = item.rows > 16 && item.rows < 32 ? item.rows - 16 : 16;
        Tiles tiles({item.rows < 16 ? item.rows : 16, second, lines.segments.size < 64 ? 8 : 16});
        for (int64_t stretch = 0; stretch < stretches; stretch++) {
            const int64_t begin = count * stretch / stretches, end = count * (stretch + 1) / stretches;
            const int64_t held = (end < count ? lines.at(end) : lines.all) - lines.at(begin);  // lines of a strip
            for (int strip = 0; strip < item.strips; strip += 2) {
                const char* weight = item.weight + strip * item.stride;
                const Part part = {lines, p, weight, strip + 1 < item.strips ? item.stride : 0, begin, end, blocks == 1};
                const char* next = strip + 2 < item.strips    ? part.at(begin) + 2 * item.stride
                                   : stretch + 1 < stretches ? item.weight + lines.at(end) * LINE
                                                             : after;
                FetchPair ahead(next, item.stride, held, (end - begin) * part.tiles(0) * PLANES * blocks);
                unpack(part);
                for (int block = 0; block < blocks; block++) {
                    const int row = block * 32, rows = item.rows - row < 32 ? item.rows - row : 32;
                    Block& waiting = sums[block * (PANEL_STRIPS / 2) + strip / 2];
                    if (!stretch) memset(waiting, 0, sizeof waiting);
                    if (rows > 16) add<S, 2>(tiles, *item.call, part, item.first_row + row, rows, waiting, ahead);
                    else add<S, 1>(tiles, *item.call, part, item.first_row + row, rows, waiting, ahead);
                    if (stretch + 1 == stretches) put<S>(item, row, rows, strip, waiting);
                }
            }
        }
    }

    // ------------------------------------------------------------------------------------------- the weight

    typedef uint8_t Bytes __attribute__((vector_size(64)));

    // Convert segments that cannot be loaded as tiles.
    void unpack(const Part& part) {
        if constexpr (BITS != 8) {
            for (int64_t s = part.begin; s < part.end; s++) unpack_segment(part, s, unpacked + part.place(s));
        } else if (part.is_ragged(part.end - 1)) {
            unpack_segment(part, part.end - 1, unpacked);
        }
    }

    // Write the tiles of both strips alternately. Bytes after the last line do not matter: they are multiplied with zeros.
    void unpack_segment(const Part& part, int64_t segment, char* to) const {
        const LinearParams& p = part.params;
        const int64_t units = part.lines.units(segment), tile = part.tile();
        for (int j = 0; j < 2; j++) {
            const char* const from = part.at(segment) + j * part.other;
            const auto put = [&](int plane, int64_t quad, Bytes bytes) {
                store((float*)(to + plane * part.plane() + (quad / 16 * 2 + j) * tile + quad % 16 * 64), (V)bytes);
            };
            U zero = U{} + (p.minimums || BITS == 8 ? 0u : 1u << (BITS - 1));
            if (BITS != 8 && p.zeros) zero = __builtin_convertvector(offsets_of<K>(p, part.scales(segment) + j * part.other, segment), U);
            const Bytes zeros = (Bytes)(zero * 0x01010101u);
            for (int64_t unit = 0; unit < units; unit++) {
                QUIRE_UNROLL for (int i = 0; i < K::QUADS; i++) {
                    const int64_t quad = unit * K::QUADS + i;
                    const Bytes values = (Bytes)quad_of<K>(from + (K::SUB_LINES + unit * K::LINES) * LINE, i) - zeros;
                    if constexpr (PLANES == 1) {
                        put(0, quad, values);
                    } else {
                        const int64_t sub = quad * 4 / K::SUB;
                        const auto [upper, lower] = scaled_bytes(values, sub_scale_of(from + sub / 4 * LINE, (int)(sub % 4)));
                        put(0, quad, upper), put(1, quad, lower);
                    }
                }
            }
        }
    }

    typedef int16_t Halves __attribute__((vector_size(64)));
    struct Planes {
        Bytes upper, lower;
    };

    // Multiply each of a lane's bytes by its scale: 128 * upper + lower, with lower in 0..127.
    QUIRE_INLINE Planes scaled_bytes(Bytes values, I scale) {
        const U twice = ((U)scale & 0xffffu) | (U)scale << 16;
        const Halves even = (Halves)((Halves)values << 8) >> 8, odd = (Halves)values >> 8;
        const U of_even = (U)(even * (Halves)twice), of_odd = (U)(odd * (Halves)twice);
        const U lower = (of_even & 0x007f007fu) | (of_odd & 0x007f007fu) << 8;
        const U upper = ((U)((Halves)of_even >> 7) & 0x00ff00ffu) | (U)((Halves)((Halves)of_odd >> 7) << 8);
        return {(Bytes)upper, (Bytes)lower};
    }

    Operand operand(const Part& part, int64_t segment, int plane) const {
        const int64_t tile = part.tile();
        if (BITS != 8) return {unpacked + part.place(segment) + plane * part.plane(), 2 * tile, tile};
        if (part.is_ragged(segment)) return {unpacked, 2 * tile, tile};
        return {part.at(segment), tile, part.other};
    }

    // --------------------------------------------------------------------------------------------- products

    // Totals of a segment that have not been added to the rows' sums yet.
    template <Scales S>
    struct Pending {
        V scales[2], offsets[2];  // of the two strips
        U sub_minimums[2];
        const float* of_x;  // scale of the current row; its sums are `sums_from` lanes further
        int64_t x_stride, sums_from;
        int64_t row, rows;  // rows from `row` on are pending
        bool minimums;
    };

    template <Scales S>
    QUIRE_INLINE_MEMBER Pending<S> pending(const Part& part, int64_t segment, const float* x, int64_t x_stride, int rows) const {
        const Segments& segments = part.lines.segments;
        const LinearParams& p = part.params;
        Pending<S> found = {{}, {}, {}, segments.scales((float*)x) + segment, x_stride, segments.count + segment * (segments.sum_lanes - 1), 0, rows,
                            (bool)p.minimums};
        QUIRE_UNROLL for (int j = 0; j < 2; j++) {
            const char* const scales = part.scales(segment) + j * part.other;
            if (S == Scales::OF_GROUPS) found.scales[j] = scales_of<K>(scales, segment);
            if (p.minimums || (BITS == 8 && p.zeros)) found.offsets[j] = offsets_of<K>(p, scales, segment);
            else found.offsets[j] = splat(128.0f);
            if (K::SUB == 32)
                found.sub_minimums[j] = (U)load((const float*)(part.at(segment) + j * part.other + LINE));
        }
        return found;
    }

    // Add `count` rows of the totals to the sums, as in ops/weights/quantised.py. The subtraction of zeros is exact.
    template <Scales S>
    QUIRE_INLINE_MEMBER void add_totals(Pending<S>& of, int64_t count, Block& sums) const {
        if constexpr (S == Scales::OF_ROWS) return;
        const int64_t end = of.row + count < of.rows ? of.row + count : of.rows;
        for (; of.row < end; of.row++, of.of_x += of.x_stride) {
            const V scale = broadcast(of.of_x);
            const int32_t* const row_sums = (const int32_t*)(of.of_x + of.sums_from);
            V low = {};
            if (K::SUB == 0 && (BITS == 8 || of.minimums)) low = splat((float)*row_sums);
            QUIRE_UNROLL for (int j = 0; j < 2; j++) {
                float* const to = sums[of.row][j];
                I whole = (I)load((const float*)totals[0][of.row][j]);
                if constexpr (PLANES == 2) whole = whole * 128 + (I)load((const float*)totals[1][of.row][j]);
                V total = __builtin_convertvector(whole, V);
                if (BITS == 8) total = fma(-of.offsets[j], low, total);
                V result = fma(total, S == Scales::OF_GROUPS ? scale * of.scales[j] : scale, load(to));
                if (S == Scales::OF_GROUPS && BITS != 8 && of.minimums) {
                    if (K::SUB == 32) low = __builtin_convertvector(low_sums(row_sums, of.sub_minimums[j]), V);
                    result = fma(low, scale * of.offsets[j], result);
                }
                store(to, result);
            }
        }
    }

    // Add the products of a part to the sums of HALVES times 16 rows. Sums of rows with one scale are integers.
    template <Scales S, int HALVES>
    void add(Tiles& tiles, const LinearCall& call, const Part& part, int64_t first, int rows, Block& sums, FetchPair& ahead) {
        constexpr bool CARRIED = S == Scales::OF_ROWS, SIGNED = BITS != 8;
        const float* const x = call.x + first * call.x_stride;
        const int64_t lda = call.x_stride * 4;
        Pending<S> before = {};
        // Several blocks of rows reuse the weight in the L1 cache. For one block, a load that leaves it in the L2 cache is faster: by a
        // factor of 4 on a Granite Rapids.
        const auto load_weight = [&]<int TILE>(const char* at) __attribute__((always_inline)) {
            if (BITS == 8 && part.passes) tiles.template load_far<TILE>(at, 64);
            else tiles.template load<TILE>(at, 64);
        };
        if constexpr (CARRIED) {
            tiles.template load_far<0>(sums[0][0], 128), tiles.template load_far<1>(sums[0][1], 128);
            if constexpr (HALVES == 2)
                tiles.template load_far<2>(sums[16][0], 128), tiles.template load_far<3>(sums[16][1], 128);
        }
        for (int64_t s = part.begin; s < part.end; s++) {
            for (int plane = 0; plane < PLANES; plane++) {
                const Operand weight = operand(part, s, plane);
                const char* rows_at = (const char*)x + s * part.lines.segments.size;
                const int64_t depth = part.tiles(s);
                const int step = depth == 1 ? 8 : 4;  // rows to add after each product, so that all are added after the last one
                if constexpr (!CARRIED)
                    tiles.template zero<0>(), tiles.template zero<1>(), tiles.template zero<2>(), tiles.template zero<3>();
                for (int64_t t = 0; t < depth; t++, rows_at += 64) {
                    load_weight.template operator()<6>(weight.at + t * weight.tile), tiles.template load_far<4>(rows_at, lda);
                    tiles.template multiply_bytes<0, 4, 6, SIGNED>(), add_totals(before, step, sums);
                    load_weight.template operator()<7>(weight.at + t * weight.tile + weight.strip);
                    tiles.template multiply_bytes<1, 4, 7, SIGNED>(), add_totals(before, step, sums);
                    if constexpr (HALVES == 2) {
                        tiles.template load_far<5>(rows_at + 16 * lda, lda);
                        tiles.template multiply_bytes<2, 5, 6, SIGNED>(), add_totals(before, step, sums);
                        tiles.template multiply_bytes<3, 5, 7, SIGNED>(), add_totals(before, step, sums);
                    }
                    ahead();
                }
                if constexpr (CARRIED) continue;
                add_totals(before, rows, sums);  // the last segment may have had fewer products
                save<HALVES>(tiles, totals[plane]);
            }
            if constexpr (!CARRIED) before = pending<S>(part, s, x, call.x_stride, rows);
        }
        if constexpr (CARRIED) save<HALVES>(tiles, sums);
        else add_totals(before, rows, sums);
    }

    template <int HALVES, class T>
    static void save(Tiles& tiles, T (&to)[32][2][W]) {
        tiles.template save<0>(to[0][0], 128), tiles.template save<1>(to[0][1], 128);
        if constexpr (HALVES == 2) tiles.template save<2>(to[16][0], 128), tiles.template save<3>(to[16][1], 128);
    }

    // ---------------------------------------------------------------------------------------------- results

    template <Scales S>
    void put(const LinearItem& item, int first, int rows, int strip, const Block& sums) const {
        const LinearCall& call = *item.call;
        const LinearParams& p = *call.params;
        const Segments segments(p);
        const int strips = item.strips - strip < 2 ? item.strips - strip : 2;
        with_element(p.out_dtype, [&](auto element) {
            using Out = decltype(element);
            for (int i = 0; i < rows; i++) {
                const int64_t row = item.first_row + first + i;
                float* const x = (float*)call.x + row * call.x_stride;
                auto* const out = (typename Out::T*)p.out + row * p.out_stride;
                int32_t bytes = 0;
                if (S == Scales::OF_ROWS && BITS == 8)
                    for (int64_t s = 0; s < segments.count; s++) bytes += segments.sums(x)[s];
                for (int j = 0; j < strips; j++) {
                    V v = load(sums[i][j]);
                    if (S == Scales::OF_ROWS) v = (V)((I)v - bytes * 128);
                    put_sums<Out>(p, v, *segments.scales(x), (item.first_strip + strip + j) * W, out);
                }
            }
        });
    }
};

}  // namespace
