// Products of integers by tiles, where there are more rows than vectors take at once. Sums of integers are exact, so the bits
// are those of linear_integers.h, which has the format and the order of all that is rounded.
//
// Of a weight of bytes, 16 lines in a row are a tile as they lie. Nibbles become bytes first, once for all rows of an item,
// less their zeros, so that no zero is left to take from the sums. A tile is 64 inputs deep, or all 32 of a group.
//
// What 32 rows and two strips give in a segment leaves the tiles as integers. Vectors scale these and add them to the rows'
// sums between the products of the next segment.
#pragma once

#include "fetching.h"
#include "linear_integers.h"
#include "linear_tiles.h"
#include "tiles.h"

namespace {

// The scales of a product: of each row of x and segment, together with one of each group of the weight; the same, with one of
// each output at the end; or one of each row and output, both at the end.
enum class Scales { OF_GROUPS, OF_OUTPUTS, OF_ROWS };

template <int BITS>
struct LinearIntegerTiles {
    static constexpr int LINE = 64;
    static constexpr int CHUNK = LinearTiles::CHUNK;
    static constexpr int PANEL_STRIPS = LinearTiles::PANEL_STRIPS;
    static constexpr int64_t PANEL_BYTES = LinearTiles::PANEL_BYTES;
    static constexpr int UNIT = LinearTiles::UNIT;
    static int64_t panel_strips(int64_t rows) { return LinearTiles::panel_strips(rows); }

    // Rows that vectors take: one turn of theirs. On a Granite Rapids a forerunner read a weight for 4 rows at 0.86 of the rate for one,
    // and for 8, which took two turns, at 0.6 to 0.7 of it.
    static constexpr int FEW = ROWS;
    // Inputs of two strips, as bytes 24 KiB, that stay in the first cache while an item's rows pass by. So it was measured of a forerunner on a
    // Granite Rapids: scaling the sums of each 128 inputs then took 15 to 20 % of the time.
    static constexpr int64_t DEPTH = 768;

    LinearItems<LinearIntegerTiles> items;
    IntegerVectors<BITS, FEW> vectors;
    alignas(64) int32_t totals[32][2][W];  // of rows and strips, in one segment
    alignas(64) char unpacked[(BITS == 4 ? DEPTH : ACTIVATION_GROUP) * 2 * W];

    LinearIntegerTiles(LinearWork& all, int64_t thread) : items(all, thread) {}

    void work() {
        LinearItem item, after;
        for (bool more = items.take(item); more; item = after) {
            more = items.take(after);
            const char* next = more ? after.weight : item.weight;  // the latter is in the cache
            const LinearParams& p = *item.call->params;
            if (item.rows <= FEW) multiply_few(item, next);
            else if (p.whole_rows) multiply<Scales::OF_ROWS>(item, next);
            else if (p.scales) multiply<Scales::OF_OUTPUTS>(item, next);
            else multiply<Scales::OF_GROUPS>(item, next);
        }
    }

  private:
    using Block = float[32][2][W];  // sums of rows and strips

    // Segments begin.. of two strips.
    struct Part {
        Lines<BITS> lines;
        const LinearParams& params;
        const char* weight;  // of the first strip, all of it
        int64_t other;       // bytes to the second strip; 0: there is none, and the first one is multiplied twice
        int64_t begin, end;
        bool passes;         // only one block of rows meets it

        int64_t tile() const { return (lines.segments.size < 64 ? lines.segments.size : 64) * W; }  // bytes
        int64_t tiles(int64_t segment) const { return (lines.inputs(segment) * (8 / BITS) + 15) / 16; }
        // Whether the lines of a segment are no whole tiles, so that those after them may lie beyond the weight.
        bool is_ragged(int64_t segment) const {
            return segment + 1 == lines.segments.count && lines.segments.last * W % tile();
        }
        // Where a segment's bytes stand among those of the part.
        int64_t place(int64_t segment) const { return (segment - begin) * lines.segments.size * 2 * W; }
        const char* at(int64_t segment) const { return weight + segment * lines.each * LINE; }
        // A segment's scales, of the first strip, and its zeros.
        const char* scales(int64_t segment) const { return at(segment) + lines.inputs(segment) * LINE; }
        const char* zeros(int64_t segment) const { return scales(segment) + (params.scales ? 0 : LINE); }
    };

    // The tiles of a segment.
    struct Operand {
        const char* at;
        int64_t tile, strip;  // bytes from one to the next, and to those of the second strip
    };

    void multiply_few(const LinearItem& item, const char* after) {
        for (int strip = 0; strip < item.strips; strip += COLUMNS) {
            const int left = item.strips - strip;
            LinearItem part = item;
            part.first_strip += strip, part.strips = left < COLUMNS ? left : COLUMNS, part.weight += strip * item.stride;
            vectors.multiply(part, left > COLUMNS ? part.weight + COLUMNS * item.stride : after);
        }
    }

    // As the tiles of bf16 do it, two strips and two blocks of 16 rows at a time, in stretches of the inputs.
    template <Scales S>
    void multiply(const LinearItem& item, const char* after) {
        const LinearParams& p = *item.call->params;
        const Lines<BITS> lines(p);
        const int64_t count = lines.segments.count, stretches = (count * lines.segments.size + DEPTH - 1) / DEPTH;
        const int blocks = (item.rows + 31) / 32;
        auto* const sums = (Block*)LinearTiles::waiting();
        const int second = item.rows > 16 && item.rows < 32 ? item.rows - 16 : 16;
        Tiles tiles({item.rows < 16 ? item.rows : 16, second, lines.segments.size < 64 ? 8 : 16});
        for (int64_t stretch = 0; stretch < stretches; stretch++) {
            const int64_t begin = count * stretch / stretches, end = count * (stretch + 1) / stretches;
            const int64_t held = (end < count ? end * lines.each : lines.all) - begin * lines.each;  // lines of a strip
            for (int strip = 0; strip < item.strips; strip += 2) {
                const char* weight = item.weight + strip * item.stride;
                const Part part = {lines, p, weight, strip + 1 < item.strips ? item.stride : 0, begin, end, blocks == 1};
                const char* next = strip + 2 < item.strips    ? part.at(begin) + 2 * item.stride
                                   : stretch + 1 < stretches ? item.weight + end * lines.each * LINE
                                                             : after;
                FetchPair ahead(next, item.stride, held, (end - begin) * part.tiles(0) * blocks);
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

    // What is no tile as it lies.
    void unpack(const Part& part) {
        if constexpr (BITS == 4) {
            for (int64_t s = part.begin; s < part.end; s++) unpack_segment(part, s, unpacked + part.place(s));
        } else if (part.is_ragged(part.end - 1)) {
            unpack_segment(part, part.end - 1, unpacked);
        }
    }

    // Tiles of both strips in turn. What stands after the last line does not matter: it is multiplied with zeros.
    void unpack_segment(const Part& part, int64_t segment, char* to) const {
        const int64_t lines = part.lines.inputs(segment), tile = part.tile();
        for (int j = 0; j < 2; j++) {
            const char* from = part.at(segment) + j * part.other;
            const auto put = [&](int64_t line, Bytes bytes) {
                store((float*)(to + (line / 16 * 2 + j) * tile + line % 16 * 64), (V)bytes);
            };
            U zero = U{} + 8u;  // of 4 bits
            if (BITS == 4 && part.params.zeros)
                zero = __builtin_convertvector(load((const float*)(part.zeros(segment) + j * part.other)), U);
            const Bytes zeros = (Bytes)(zero * 0x01010101u);
            for (int64_t line = 0; line < lines; line++) {
                const U all = (U)load((const float*)(from + line * LINE));
                if constexpr (BITS == 8) {
                    put(line, (Bytes)all);
                } else {
                    put(2 * line, (Bytes)(all & 0x0f0f0f0f) - zeros);
                    put(2 * line + 1, (Bytes)(all >> 4 & 0x0f0f0f0f) - zeros);
                }
            }
        }
    }

    Operand operand(const Part& part, int64_t segment) const {
        const int64_t tile = part.tile();
        if (BITS == 4) return {unpacked + part.place(segment), 2 * tile, tile};
        if (part.is_ragged(segment)) return {unpacked, 2 * tile, tile};
        return {part.at(segment), tile, part.other};
    }

    // --------------------------------------------------------------------------------------------- products

    // The totals of a segment that are not yet part of the rows' sums.
    template <Scales S>
    struct Pending {
        V scales[2], zeros[2];  // of the two strips
        const float* of_x;      // a row's scale; the sum of its bytes stands `sums_from` lanes further
        int64_t x_stride, sums_from;
        int64_t row, rows;  // those from `row` on are left
    };

    template <Scales S>
    QUIRE_INLINE_MEMBER Pending<S> pending(const Part& part, int64_t segment, const float* x, int64_t x_stride, int rows) const {
        const Segments& segments = part.lines.segments;
        Pending<S> found = {{}, {}, segments.scales((float*)x) + segment, x_stride, segments.count, 0, rows};
        QUIRE_UNROLL for (int j = 0; j < 2; j++) {
            if (S == Scales::OF_GROUPS) found.scales[j] = load((const float*)(part.scales(segment) + j * part.other));
            if (BITS == 4) continue;
            found.zeros[j] = part.params.zeros ? load((const float*)(part.zeros(segment) + j * part.other)) : splat(128.0f);
        }
        return found;
    }

    // Adds `count` rows of the totals to the sums. As in quire/ops/quantised.py; what is taken for the zeros is exact.
    template <Scales S>
    QUIRE_INLINE_MEMBER void add_totals(Pending<S>& of, int64_t count, Block& sums) const {
        if constexpr (S == Scales::OF_ROWS) return;
        const int64_t end = of.row + count < of.rows ? of.row + count : of.rows;
        for (; of.row < end; of.row++, of.of_x += of.x_stride) {
            const V scale = broadcast(of.of_x);
            V bytes = {};
            if (BITS == 8) bytes = __builtin_convertvector((I)broadcast(of.of_x + of.sums_from), V);
            QUIRE_UNROLL for (int j = 0; j < 2; j++) {
                float* const to = sums[of.row][j];
                V total = __builtin_convertvector((I)load((const float*)totals[of.row][j]), V);
                if (BITS == 8) total = fma(-of.zeros[j], bytes, total);
                store(to, fma(total, S == Scales::OF_GROUPS ? scale * of.scales[j] : scale, load(to)));
            }
        }
    }

    // Adds what a part gives for HALVES times 16 rows to their sums, those of rows with one scale as integers.
    template <Scales S, int HALVES>
    void add(Tiles& tiles, const LinearCall& call, const Part& part, int64_t first, int rows, Block& sums, FetchPair& ahead) {
        constexpr bool CARRIED = S == Scales::OF_ROWS, SIGNED = BITS == 4;
        const float* const x = call.x + first * call.x_stride;
        const int64_t lda = call.x_stride * 4;
        Pending<S> before = {};
        // Other blocks of rows find it in the first cache. For one alone, the load that leaves it in the second one is faster: 4
        // times on a Granite Rapids.
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
            const Operand weight = operand(part, s);
            const char* rows_at = (const char*)x + s * part.lines.segments.size;
            const int64_t depth = part.tiles(s);
            const int step = depth == 1 ? 8 : 4;  // rows after each product, so that none is left after the last one
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
            save<HALVES>(tiles, totals);
            before = pending<S>(part, s, x, call.x_stride, rows);
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
