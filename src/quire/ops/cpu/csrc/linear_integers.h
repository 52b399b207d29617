// Products of integers: weights of 4, 5, 6 or 8 bits with scales, and rows of x as bytes with scales. What is computed, and in which
// order it is rounded, stands in quire/ops/quantised.py; it is the same on every instruction set.
//
// A strip has for each segment of inputs the lines of its sub-scales if there are any, then those of its values, then those of
// scales. Where two segments share these, they follow the first one's, so that all lines are met in the order of memory.
//
// A line of values holds 4 inputs of W columns as bytes, or 8 as nibbles: the first four in the lower ones. Of 5 and 6 bits, a line
// with the upper bits of all its inputs comes first: a byte of it has those of every fourth one, from the lowest bits up. 16 lines of
// bytes are what a tile of integers takes: linear_integer_tiles.h multiplies by these.
//
// Scales in fp32 have a line for each segment; then one of zeros, if there are any. Of scales in fp16, a line has those of two segments.
// Then comes such a line of minimums, if there are any. Where there are sub-scales, a line has the scale and the minimum, or nothing.
// A lane of a line of sub-scales has four of a column: 128 inputs have two such lines, the second one that of sub-minimums, if those
// are of 32 inputs.
//
// A row of x is its bytes, zero after its end, then a scale for each segment, then for each the sums of its bytes: of all, of each 16,
// or of each 32 as 16 bits, in the order 0, 2, 1, 3.
#pragma once

#include "linear.h"
#include "linear_vectors.h"
#include "rounding.h"

#include <memory>

namespace {

constexpr int64_t ACTIVATION_GROUP = 128;  // inputs of x that share a scale at most, unless a whole row does

// N bits; inputs that share a sub-scale: 16 or 32, 0: there are none; whether each 32 inputs have a scale in fp16. A unit is inputs
// whose values are whole lines.
template <int N, int INPUTS_OF_SUB = 0, bool IN_BLOCKS = false>
struct Integers {
    static constexpr int BITS = N, SUB = INPUTS_OF_SUB;
    static constexpr bool BLOCKS = IN_BLOCKS, HALVES = BLOCKS || SUB;  // scales are fp16
    static constexpr bool TILED = false;
    static constexpr int UPPER = N == 8 ? 0 : N - 4;  // bits that have a line of their own
    static constexpr int QUADS = N == 8 ? 1 : UPPER ? 8 / UPPER : 2;  // of a unit: four inputs each
    static constexpr int LINES = N == 8 ? 1 : QUADS / 2 + (UPPER ? 1 : 0), INPUTS = 4 * QUADS;  // of a unit
    static constexpr int SUMS = SUB == 0 ? 1 : SUB == 16 ? 8 : 2;  // lanes that a row of x has of each segment
    static constexpr int SUB_LINES = SUB ? 2 : 0;  // of a segment
};
template <int N, int SUB, bool BLOCKS>
constexpr bool INTEGERS<Integers<N, SUB, BLOCKS>> = true;

constexpr int64_t BLOCK = 32;  // inputs that share a scale in fp16 where there are no sub-scales

// Whether a row of x and an output have one scale each, and there is nothing else to be rounded until the end.
inline bool by_row(const LinearParams& p) { return p.scales && !p.zeros && p.activation_group >= p.in_size; }

// The kind of a quantised weight.
template <class F>
static void with_integers(const LinearParams& p, const F& f) {
    if (p.sub) {
        if (p.bits == 4) f.template operator()<Integers<4, 32>>();
        else if (p.bits == 5) f.template operator()<Integers<5, 32>>();
        else f.template operator()<Integers<6, 16>>();
    } else if (p.halves) {
        if (p.bits == 4) f.template operator()<Integers<4, 0, true>>();
        else if (p.bits == 5) f.template operator()<Integers<5, 0, true>>();
        else f.template operator()<Integers<8, 0, true>>();
    } else {
        p.bits == 4 ? f.template operator()<Integers<4>>() : f.template operator()<Integers<8>>();
    }
}

// How the inputs of a weight are divided: into those whose products make one sum. The last segment may have fewer.
template <class K>
struct Segments {
    int64_t group;  // inputs of x that are rounded at a time
    int64_t size, count, last;
    explicit Segments(const LinearParams& p)
        : group(p.activation_group < ACTIVATION_GROUP && p.activation_group < p.in_size ? p.activation_group : ACTIVATION_GROUP),
          size(!p.scales && p.group < group ? p.group : group), count((p.in_size + size - 1) / size),
          last(p.in_size - (count - 1) * size) {}

    int64_t inputs(int64_t segment) const { return segment + 1 < count ? size : last; }
    int64_t row_lanes() const {
        const int64_t lanes = size * count / 4 + (1 + K::SUMS) * count;
#ifdef QUIRE_TILES
        return odd_lines(lanes);
#else
        return lanes;
#endif
    }
    float* scales(float* row) const { return row + size * count / 4; }
    int32_t* sums(float* row) const { return (int32_t*)(scales(row) + count); }
};

// The lines of a strip.
template <class K>
struct Lines {
    static constexpr int BYTES = 4 * W;
    Segments<K> segments;
    int shift;       // 2 ** shift segments share lines of scales, which follow the first one's
    int64_t scales;  // lines of scales, zeros and minimums
    int64_t each;    // lines of a segment without these
    int64_t all;     // of the strip
    explicit Lines(const LinearParams& p)
        : segments(p), shift(K::HALVES ? 1 : 0),
          scales(K::HALVES ? (!K::SUB && p.minimums ? 2 : 1) : (p.scales ? 0 : 1) + (p.zeros ? 1 : 0)),
          each(segments.size / K::INPUTS * K::LINES + K::SUB_LINES),
          all(at(segments.count) - each + values(segments.count - 1) + K::SUB_LINES) {}

    int64_t units(int64_t segment) const { return (segments.inputs(segment) + K::INPUTS - 1) / K::INPUTS; }
    int64_t values(int64_t segment) const { return units(segment) * K::LINES; }
    // Where the lines of a segment begin, and those of its scales.
    int64_t at(int64_t segment) const { return segment * each + ((segment + shift) >> shift) * scales; }
    int64_t scales_at(int64_t segment) const {
        const int64_t first = segment >> shift << shift;
        return first + 1 < segments.count ? at(first) + each : all - scales;
    }
};

// Of a segment, with its lines of scales: W scales, and W zeros or minimums.
template <class K>
QUIRE_INLINE V scales_of(const char* lines, int64_t segment) {
    if constexpr (!K::HALVES) return load((const float*)lines);
    return widen_fp16((const uint16_t*)lines + (K::SUB ? 0 : (segment & 1) * W));
}
template <class K>
QUIRE_INLINE V offsets_of(const LinearParams& p, const char* lines, int64_t segment) {
    if constexpr (!K::HALVES) return load((const float*)lines + (p.scales ? 0 : W));
    return widen_fp16((const uint16_t*)lines + (K::SUB ? W : 2 * W + (segment & 1) * W));
}

// What the minimums of a segment with sub-minimums are multiplied with: of a row's sums, and the line of these.
QUIRE_INLINE I low_sums(const int32_t* sums, U line) {
    const U mask = U{} + 0x00ff00ffu;
    const I first = dot_halves(I{}, (I)(line & mask), (I)broadcast((const float*)sums));
    return dot_halves(first, (I)(line >> 8 & mask), (I)broadcast((const float*)sums + 1));
}

// ------------------------------------------------------------------------------------------------- rows of x

// `count` numbers as fp32, zero after the row's end.
template <class E, class T = typename E::T>
static void get_group(const LinearParams& p, const T* row, int64_t first, int64_t count, float* to) {
    for (int64_t c = 0; c < count; c += W) {
        const int64_t left = p.in_size - first - c;
        const int n = left < 0 ? 0 : left < W ? (int)left : W;
        if (p.order) {
            T few[W] = {};
            for (int i = 0; i < n; i++) few[i] = row[p.order[first + c + i]];
            store(to + c, E::get(few));
        } else {
            store(to + c, n ? get_part<E>(row + first + c, n) : V{});
        }
    }
}

// The sum of whole numbers, which is exact.
static int32_t sum_bytes(const int8_t* bytes, int64_t count) {
    V sum = {};
    for (int64_t k = 0; k < count; k += W) sum = sum + S8::get(bytes + k);
    return (int32_t)reduce_add(sum);
}

// The sums of a segment's bytes.
template <class K>
static void put_row_sums(const int8_t* bytes, int64_t size, int32_t* to) {
    if constexpr (K::SUB == 0) {
        *to = sum_bytes(bytes, size);
    } else if constexpr (K::SUB == 16) {
        for (int i = 0; i < 8; i++) to[i] = sum_bytes(bytes + i * 16, 16);
    } else {
        for (int i = 0; i < 4; i++) ((int16_t*)to)[i % 2 * 2 + i / 2] = (int16_t)sum_bytes(bytes + i * 32, 32);
    }
}

template <class K, class E>
static void round_groups(const LinearParams& p, const typename E::T* row, float* to) {
    const Segments<K> segments(p);
    int8_t* bytes = (int8_t*)to;
    float* scales = segments.scales(to);
    int32_t* sums = segments.sums(to);
    const int64_t end = segments.size * segments.count;
    alignas(64) float group[ACTIVATION_GROUP];
    const bool whole = p.activation_group > segments.group;
    Rounding rounding;
    if (whole) {
        float largest = 0.0f;
        bool finite = true;
        for (int64_t first = 0; first < end; first += segments.group) {
            get_group<E>(p, row, first, segments.group, group);
            const float found = largest_number<F32>(group, segments.group, finite);
            largest = found > largest ? found : largest;
        }
        rounding = rounding_of(largest, finite);
    }
    for (int64_t first = 0; first < end; first += segments.group) {
        const int64_t count = end - first < segments.group ? end - first : segments.group;
        get_group<E>(p, row, first, segments.group, group);
        if (!whole) {
            bool finite = true;
            const float largest = largest_number<F32>(group, segments.group, finite);
            rounding = rounding_of(largest, finite);
        }
        round_numbers<F32>(group, count, rounding, bytes + first);
        for (int64_t c = first; c < first + count; c += segments.size) {
            *scales++ = rounding.scale;
            put_row_sums<K>(bytes + c, segments.size, sums), sums += K::SUMS;
        }
    }
}

// -------------------------------------------------------------------------------------------------- products

// W numbers of a row of the output from `column` on. sums: of all segments; int32 where they are by row, x_scale its scale.
template <class Out>
static void put_sums(const LinearParams& p, V sums, float x_scale, int64_t column, typename Out::T* row) {
    const int n = p.out_size - column < W ? (int)(p.out_size - column) : W;
    if (by_row(p)) sums = __builtin_convertvector((I)sums, V) * x_scale;
    if (p.scales) sums = sums * get_part<F32>(p.scales + column, n);
    if (p.bias) sums = sums + get_part<F32>(p.bias + column, n);
    put_part<Out>(row + column, sums, n);
}

// Four inputs of W columns as bytes: the i-th of a unit, whose lines begin there.
template <class K>
QUIRE_INLINE I quad_of(const char* unit, int i) {
    constexpr int LINE = Lines<K>::BYTES;
    if constexpr (K::BITS == 8) return (I)load((const float*)unit);
    const U low = (U)load((const float*)(unit + (K::UPPER ? 1 + i / 2 : 0) * LINE));
    const U nibbles = (i % 2 ? low >> 4 : low) & 0x0f0f0f0fu;
    if constexpr (K::UPPER == 0) return (I)nibbles;
    const U upper = (U)load((const float*)unit);
    const int up = 4 - K::UPPER * i;
    return (I)(nibbles | ((up > 0 ? upper << up : upper >> -up) & (K::UPPER == 1 ? 0x10101010u : 0x30303030u)));
}

// The four sub-scales that a line has of each column.
QUIRE_INLINE I sub_scale_of(const char* line, int i) { return (I)((U)load((const float*)line) << (24 - 8 * i)) >> 24; }

// Multiplies items of up to MOST_ROWS rows and COLUMNS strips by vectors.
template <class K, int MOST_ROWS>
class IntegerVectors {
  public:
    static constexpr int LINE = Lines<K>::BYTES;

    // after: the weight of the next item, which is fetched once nothing is left of this one.
    void multiply(const LinearItem& item, const char* after) {
        memset(sums, 0, (size_t)item.rows * PANEL * sizeof *sums);
        const LinearParams& p = *item.call->params;
        const Lines<K> lines(p);
        const int64_t near = NEAR / (COLUMNS * LINE * lines.each) & ~1, stretch = near ? near : 2, count = lines.segments.count;
        for (int64_t begin = 0; begin < count; begin += stretch)
            add_segments(item, begin, begin + stretch < count ? begin + stretch : count, lines, after);
        with_element(p.out_dtype, [&](auto element) { finish<decltype(element)>(item); });
    }

  private:
    const Fetching fetching = quire_fetching;
    alignas(64) float sums[MOST_ROWS * PANEL];  // int32 until they are complete, where they are by row

    void add_segments(const LinearItem& item, int64_t begin, int64_t end, const Lines<K>& lines, const char* after) {
        const RowBlocks blocks(item.rows);
        const LinearCall& call = *item.call;
        const int64_t stride = item.stride, first = lines.at(begin), stop = end < lines.segments.count ? lines.at(end) : lines.all;
        const int64_t ahead = blocks.blocks == 1 ? fetching.weights_ahead / LINE : stop - first;
        const int64_t turn = call.lanes - ahead;
        const char *here = item.weight + ahead * LINE, *next = after - turn * LINE;
        for (int b = 0; b < blocks.blocks; b++) {
            with_vectors(item.strips, [&]<int N>() {
                with_rows(blocks.rows(b), [&]<int R>() {
                    const int row = blocks.first(b);
                    if (MOST_ROWS <= ROWS || blocks.blocks == 1)
                        return add_rows<R, N>(item, row, begin, end, lines, FetchAhead<LINE>{here, next, turn, stride, fetching.weights});
                    const char* from = first < turn ? here : next;
                    const char* share = b < COLUMNS ? from + b * stride : from;
                    const bool past = fetching.weights == FETCH_PAST && call.chunks == 1;
                    if (past) add_rows<R, N>(item, row, begin, end, lines, Fetch<LINE, 1, FETCH_PAST>{share, stride});
                    else add_rows<R, N>(item, row, begin, end, lines, Fetch<LINE, 1, FETCH_FIRST>{share, stride});
                });
            });
        }
    }

    // Adds what segments begin.. give for R rows and N strips to their sums.
    template <int R, int N, class F>
    void add_rows(const LinearItem& item, int row, int64_t begin, int64_t end, const Lines<K>& lines, const F& fetch) {
        // Sums of a sub-scale and sums of all of them are more than there are registers.
        constexpr int AT_ONCE = K::SUB && R * COLUMNS > 8 ? COLUMNS / 2 : COLUMNS;
        for (int64_t s = begin; s < end; s++) {
            if constexpr (K::BLOCKS) add_block<R, N>(item, row, s, lines, fetch);
            else add_segment<R, N < AT_ONCE ? N : AT_ONCE>(item, row, 0, s, lines, fetch);
            if constexpr (N > AT_ONCE) add_segment<R, N - AT_ONCE>(item, row, AT_ONCE, s, lines, idle);
            // In the order of memory: the hardware's own fetching is lost where it is left.
            for (int64_t line = lines.at(s) + lines.each; line < lines.at(s + 1); line++) fetch(line);
        }
    }

    // The same of one block, whose few products are followed by as little as can be.
    template <int R, int N, class F>
    QUIRE_INLINE_MEMBER void add_block(const LinearItem& item, int row, int64_t s, const Lines<K>& lines, const F& fetch) {
        constexpr int UNITS = BLOCK / K::INPUTS;
        const LinearCall& call = *item.call;
        const Segments<K>& segments = lines.segments;
        const bool minimums = call.params->minimums;
        const float* const x = call.x + (item.first_row + row) * call.x_stride;
        const float* const x_scales = segments.scales((float*)x) + s;
        const int32_t* const x_sums = segments.sums((float*)x) + s;
        float* const to = sums + row * PANEL;
        const int64_t line = lines.at(s);
        const char *const weight = item.weight + line * LINE, *const scales = item.weight + lines.scales_at(s) * LINE;
        I sum[R][N];
        QUIRE_UNROLL for (int i = 0; i < R; i++) {
            const int32_t taken = minimums ? 0 : x_sums[i * call.x_stride] << (K::BITS - 1);
            QUIRE_UNROLL for (int j = 0; j < N; j++) sum[i][j] = I{} - taken;
        }
        QUIRE_UNROLL for (int unit = 0; unit < UNITS; unit++) {
            add_unit<R, N>(sum, x + s * (BLOCK / 4) + unit * K::QUADS, call.x_stride, weight + unit * K::LINES * LINE, item.stride);
            QUIRE_UNROLL for (int l = 0; l < K::LINES; l++) fetch(line + unit * K::LINES + l);
        }
        QUIRE_UNROLL for (int j = 0; j < N; j++) {
            const V scale = scales_of<K>(scales + j * item.stride, s);
            QUIRE_UNROLL for (int i = 0; i < R; i++) {
                float* const at = to + i * PANEL + j * W;
                const V x_scale = splat(x_scales[i * call.x_stride]);
                store(at, fma(__builtin_convertvector(sum[i][j], V), x_scale * scale, load(at)));
            }
        }
        if (!minimums) return;
        QUIRE_UNROLL for (int j = 0; j < N; j++) {
            const V minimum = offsets_of<K>(*call.params, scales + j * item.stride, s);
            QUIRE_UNROLL for (int i = 0; i < R; i++) {
                float* const at = to + i * PANEL + j * W;
                const V low = splat((float)x_sums[i * call.x_stride]), x_scale = splat(x_scales[i * call.x_stride]);
                store(at, fma(low, x_scale * minimum, load(at)));
            }
        }
    }

    // The same of one segment and N strips from `first` on.
    template <int R, int N, class F>
    QUIRE_INLINE_MEMBER void add_segment(const LinearItem& item, int row, int first, int64_t s, const Lines<K>& lines, const F& fetch) {
        const LinearCall& call = *item.call;
        const LinearParams& p = *call.params;
        const Segments<K>& segments = lines.segments;
        constexpr bool minimums = K::SUB == 32;
        const bool zeros = !K::SUB && p.zeros, by_output = !K::SUB && p.scales, as_integers = !K::SUB && by_row(p);
        float* const x = (float*)call.x + (item.first_row + row) * call.x_stride;
        float* const to = sums + row * PANEL + first * W;
        const int64_t line = lines.at(s);
        const char* const strip = item.weight + first * item.stride;
        const char *const sub_lines = strip + line * LINE, *const weight = sub_lines + K::SUB_LINES * LINE;
        const float* const row_bytes = x + s * (segments.size / 4);
        const auto sums_of = [&](int i) { return segments.sums(x + i * call.x_stride) + s * K::SUMS; };
        I sum[R][N];
        int64_t fetched = line;
        QUIRE_UNROLL for (int l = 0; l < K::SUB_LINES; l++) fetch(fetched++);
        if constexpr (K::SUB) {
            QUIRE_UNROLL for (int i = 0; i < R; i++) QUIRE_UNROLL for (int j = 0; j < N; j++) sum[i][j] = I{};
            constexpr int UNITS = K::SUB / K::INPUTS, SUBS = ACTIVATION_GROUP / K::SUB;
            const auto add_sub = [&](int sub) __attribute__((always_inline)) {
                I part[R][N];
                QUIRE_UNROLL for (int i = 0; i < R; i++) {
                    const int32_t taken = K::BITS == 6 ? sums_of(i)[sub] << 5 : 0;
                    QUIRE_UNROLL for (int j = 0; j < N; j++) part[i][j] = I{} - taken;
                }
                for (int unit = sub * UNITS; unit < (sub + 1) * UNITS; unit++) {
                    add_unit<R, N>(part, row_bytes + unit * K::QUADS, call.x_stride, weight + unit * K::LINES * LINE, item.stride);
                    QUIRE_UNROLL for (int l = 0; l < K::LINES; l++) fetch(fetched++);
                }
                QUIRE_UNROLL for (int j = 0; j < N; j++) {
                    const I scale = sub_scale_of(sub_lines + sub / 4 * LINE + j * item.stride, sub % 4);
                    QUIRE_UNROLL for (int i = 0; i < R; i++) sum[i][j] = sum[i][j] + part[i][j] * scale;
                }
            };
            // Of one row, the memory's rate needs all of it unrolled; of more, registers would not suffice.
            if constexpr (R == 1) {
                QUIRE_UNROLL for (int sub = 0; sub < SUBS; sub++) add_sub(sub);
            } else {
                for (int sub = 0; sub < SUBS; sub++) add_sub(sub);
            }
        } else {
            QUIRE_UNROLL for (int i = 0; i < R; i++) {
                const int32_t taken = zeros ? 0 : *sums_of(i) << (K::BITS - 1);
                QUIRE_UNROLL for (int j = 0; j < N; j++) sum[i][j] = I{} - taken;
            }
            const int64_t units = lines.units(s);
            for (int64_t unit = 0; unit < units; unit++) {
                add_unit<R, N>(sum, row_bytes + unit * K::QUADS, call.x_stride, weight + unit * K::LINES * LINE, item.stride);
                QUIRE_UNROLL for (int l = 0; l < K::LINES; l++) fetch(fetched++);
            }
        }
        const char* const scales = strip + lines.scales_at(s) * LINE;
        QUIRE_UNROLL for (int j = 0; j < N; j++) {
            V of_group = {}, offset = {};
            if (!by_output) of_group = scales_of<K>(scales + j * item.stride, s);
            if (zeros || minimums) offset = offsets_of<K>(p, scales + j * item.stride, s);
            U sub_minimums = {};
            if constexpr (K::SUB == 32) sub_minimums = (U)load((const float*)(sub_lines + LINE + j * item.stride));
            QUIRE_UNROLL for (int i = 0; i < R; i++) {
                float* const at = to + i * PANEL + j * W;
                if (as_integers) {
                    store(at, (V)((I)load(at) + sum[i][j]));
                    continue;
                }
                const V scale = splat(segments.scales(x + i * call.x_stride)[s]);
                V total = __builtin_convertvector(sum[i][j], V), low = {};
                if constexpr (K::SUB == 32) low = __builtin_convertvector(low_sums(sums_of(i), sub_minimums), V);
                else if (zeros) low = splat((float)*sums_of(i));
                if (zeros) total = total - offset * low;  // exact: whole numbers
                V result = fma(total, by_output ? scale : scale * of_group, load(at));
                if (minimums) result = fma(low, scale * offset, result);
                store(at, result);
            }
        }
    }

    // Adds the products of one unit.
    template <int R, int N>
    QUIRE_INLINE void add_unit(I (&sum)[R][N], const float* x, int64_t x_stride, const char* unit, int64_t stride) {
        QUIRE_UNROLL for (int quad = 0; quad < K::QUADS; quad++) {
            I column[N];
            QUIRE_UNROLL for (int j = 0; j < N; j++) column[j] = quad_of<K>(unit + j * stride, quad);
            QUIRE_UNROLL for (int i = 0; i < R; i++) {
                const I bytes = (I)broadcast(x + i * x_stride + quad);
                QUIRE_UNROLL for (int j = 0; j < N; j++) {
                    if constexpr (K::BITS == 8) sum[i][j] = dot_bytes(sum[i][j], column[j], bytes);
                    else sum[i][j] = dot_small(sum[i][j], column[j], bytes);
                }
            }
        }
    }

    template <class Out>
    void finish(const LinearItem& item) {
        const LinearCall& call = *item.call;
        const LinearParams& p = *call.params;
        const Segments<K> segments(p);
        for (int i = 0; i < item.rows; i++) {
            const float scale = *segments.scales((float*)call.x + (item.first_row + i) * call.x_stride);
            typename Out::T* out = (typename Out::T*)p.out + (item.first_row + i) * p.out_stride;
            for (int j = 0; j < item.strips; j++)
                put_sums<Out>(p, load(sums + i * PANEL + j * W), scale, (item.first_strip + j) * W, out);
        }
    }
};

template <class K>
struct LinearIntegers {
    static constexpr int LINE = Lines<K>::BYTES;
    static constexpr int CHUNK = 96;  // rows of x that an item has at most
    static constexpr int PANEL_STRIPS = COLUMNS;
    static constexpr int64_t PANEL_BYTES = 512 << 10;
    static constexpr int UNIT = 1;
    static int64_t panel_strips(int64_t) { return PANEL_STRIPS; }

    LinearItems<LinearIntegers> items;
    IntegerVectors<K, CHUNK> vectors;

    LinearIntegers(LinearWork& all, int64_t thread) : items(all, thread) {}

    void work() {
        LinearItem item, after;
        for (bool more = items.take(item); more; item = after) {
            more = items.take(after);
            vectors.multiply(item, more ? after.weight : item.weight);  // the latter is in the cache
        }
    }
};

// --------------------------------------------------------------------------------------------------- weights

// What there is of each row of a weight, contiguous; null where it is not.
struct IntegerParts {
    const uint8_t* values;  // [out, in]
    const void* scales;     // fp32 [out, groups], of p.group inputs each; fp16 with p.halves
    const float* zeros;     // [out, groups]
    const uint16_t* minimums;  // fp16 [out, groups]
    const int8_t *sub_scales, *sub_minimums;  // [out, in / K::SUB]
};

// Column i of a segment's lines, which are zero.
template <class K>
static void put_values(const uint8_t* values, int64_t count, int64_t i, char* lines) {
    constexpr int LINE = Lines<K>::BYTES;
    int64_t k = 0;
    for (; k + K::INPUTS <= count; k += K::INPUTS) {  // whole units, a word of four inputs at a time
        char* const unit = lines + k / K::INPUTS * K::LINES * LINE + i * 4;
        uint32_t quads[K::QUADS], upper = 0;
        memcpy(quads, values + k, sizeof quads);
        if constexpr (K::BITS == 8) {
            memcpy(unit, quads, 4);
        } else {
            QUIRE_UNROLL for (int q = 0; q < K::QUADS; q += 2) {
                const uint32_t both = (quads[q] & 0x0f0f0f0fu) | (quads[q + 1] & 0x0f0f0f0fu) << 4;
                memcpy(unit + (K::UPPER ? 1 + q / 2 : 0) * LINE, &both, 4);
            }
            QUIRE_UNROLL for (int q = 0; q < K::QUADS; q++) upper |= (quads[q] >> 4 & 0x0f0f0f0fu) << (K::UPPER * q);
            if constexpr (K::UPPER) memcpy(unit, &upper, 4);
        }
    }
    for (; k < count; k++) {
        char* const unit = lines + k / K::INPUTS * K::LINES * LINE + i * 4 + k % 4;
        const int quad = (int)(k % K::INPUTS / 4);
        if constexpr (K::BITS == 8) {
            *unit = (char)values[k];
        } else {
            char& low = unit[(K::UPPER ? 1 + quad / 2 : 0) * LINE];
            low = (char)(low | (values[k] & 15) << (quad % 2 * 4));
            if constexpr (K::UPPER) *unit = (char)(*unit | values[k] >> 4 << (K::UPPER * quad));
        }
    }
}

// One strip, of `rows` rows, all of whose parts begin at their first one.
template <class K>
static void pack_integers(const LinearParams& p, const Lines<K>& lines, const IntegerParts& parts, int64_t rows, char* to) {
    const Segments<K>& segments = lines.segments;
    const int64_t groups = (p.in_size + p.group - 1) / p.group;
    constexpr int LINE = Lines<K>::BYTES;
    memset(to, 0, (size_t)(lines.all * LINE));
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t s = 0; s < segments.count; s++) {
            char* const at = to + lines.at(s) * LINE;
            const int64_t first = s * segments.size;
            put_values<K>(parts.values + i * p.in_size + first, segments.inputs(s), i, at + K::SUB_LINES * LINE);
            const int64_t group = i * groups + first / p.group;
            char* const scales = to + lines.scales_at(s) * LINE;
            if constexpr (K::HALVES) {
                uint16_t* const halves = (uint16_t*)scales + (K::SUB ? 0 : (s & 1) * W) + i;
                halves[0] = ((const uint16_t*)parts.scales)[group];
                if (p.minimums) halves[K::SUB ? W : 2 * W] = parts.minimums[group];
            } else {
                if (!p.scales) ((float*)scales)[i] = ((const float*)parts.scales)[group];
                if (p.zeros) ((float*)scales)[(p.scales ? 0 : W) + i] = parts.zeros[group];
            }
            if constexpr (K::SUB) {
                char* const subs = at + i * 4;
                const int64_t from = (i * p.in_size + first) / K::SUB;
                memcpy(subs, parts.sub_scales + from, 4);
                memcpy(subs + LINE, K::SUB == 16 ? parts.sub_scales + from + 4 : parts.sub_minimums + from, 4);
            }
        }
    }
}

// Call f(strip, rows, its packed memory) for all strips.
template <class K, class F>
static void for_strips(ParallelFor parallel_for, const LinearParams& p, const Lines<K>& lines, char* packed, const F& f) {
    parallel(parallel_for, (p.out_size + W - 1) / W, 1, [&](int64_t strip) {
        const int64_t left = p.out_size - strip * W;
        f(strip, left < W ? left : W, packed + strip * lines.all * Lines<K>::BYTES);
    });
}

template <class K>
static void pack_values(ParallelFor parallel_for, const LinearParams& p, const IntegerParts& parts, char* packed) {
    const Lines<K> lines(p);
    const int64_t groups = (p.in_size + p.group - 1) / p.group, scale_bytes = K::HALVES ? 2 : 4;
    for_strips<K>(parallel_for, p, lines, packed, [&](int64_t strip, int64_t rows, char* to) {
        const int64_t row = strip * W, group = row * groups, sub = K::SUB ? row * (p.in_size / K::SUB) : 0;
        const auto from = [](auto* first, int64_t n) { return first ? first + n : first; };
        const IntegerParts own = {parts.values + row * p.in_size, (const char*)parts.scales + group * scale_bytes,
                                  from(parts.zeros, group), from(parts.minimums, group), from(parts.sub_scales, sub),
                                  from(parts.sub_minimums, sub)};
        pack_integers<K>(p, lines, own, rows, to);
    });
}

// The same of GGUF's blocks. rows: where each of the weight's begins. Only a strip's values are held at a time.
template <class K>
static void pack_blocks(ParallelFor parallel_for, const LinearParams& p, int32_t kind, const uint8_t* const* rows, char* packed) {
    if constexpr (K::HALVES) {
        const Lines<K> lines(p);
        const int64_t groups = p.in_size / p.group, subs = K::SUB ? p.in_size / K::SUB : 0;
        for_strips<K>(parallel_for, p, lines, packed, [&](int64_t strip, int64_t count, char* to) {
            const std::unique_ptr<uint8_t[]> values(new uint8_t[W * p.in_size]);
            const std::unique_ptr<uint16_t[]> scales(new uint16_t[W * groups]), minimums(new uint16_t[W * groups]);
            const std::unique_ptr<int8_t[]> sub_scales(new int8_t[W * subs]), sub_minimums(new int8_t[W * subs]);
            for (int64_t i = 0; i < count; i++) {
                const BlockParts at = {values.get() + i * p.in_size, scales.get() + i * groups, minimums.get() + i * groups,
                                       sub_scales.get() + i * subs, sub_minimums.get() + i * subs};
                quire_read_row(kind, rows[strip * W + i], p.in_size, at);
            }
            pack_integers<K>(p, lines, {values.get(), scales.get(), nullptr, minimums.get(), sub_scales.get(), sub_minimums.get()}, count, to);
        });
    }
}

// The value of an input, of a segment's lines.
template <class K>
static int value_of(const char* lines, int64_t k, int64_t i) {
    constexpr int LINE = Lines<K>::BYTES;
    const char* const unit = lines + k / K::INPUTS * K::LINES * LINE + i * 4 + k % 4;
    const int quad = (int)(k % K::INPUTS / 4);
    if constexpr (K::BITS == 8) return (uint8_t)*unit;
    const int low = (uint8_t)unit[(K::UPPER ? 1 + quad / 2 : 0) * LINE] >> (quad % 2 * 4) & 15;
    if constexpr (K::UPPER == 0) return low;
    return low | ((uint8_t)*unit >> (K::UPPER * quad) & ((1 << K::UPPER) - 1)) << 4;
}

// One row of the weight: numbers, in the order of the inputs.
template <class K, class E>
static void unpack_row(const LinearParams& p, int64_t row, typename E::T* to) {
    const Lines<K> lines(p);
    constexpr int LINE = Lines<K>::BYTES;
    const char* strip = (const char*)p.weight + row / W * lines.all * LINE;
    const int64_t i = row % W;
    for (int64_t s = 0; s < lines.segments.count; s++) {
        const char *const at = strip + lines.at(s) * LINE, *const scales = strip + lines.scales_at(s) * LINE;
        const float scale = p.scales ? p.scales[row] : scales_of<K>(scales, s)[i];
        const float offset = p.zeros || p.minimums ? offsets_of<K>(p, scales, s)[i] : (float)(1 << (K::BITS - 1));
        for (int64_t k = 0; k < lines.segments.inputs(s); k++) {
            float of_value = scale, minimum = p.minimums ? offset : 0.0f;
            if constexpr (K::SUB) {
                const char* const subs = at + i * 4;
                of_value = of_value * (float)(int8_t)subs[k / K::SUB / 4 * LINE + k / K::SUB % 4];
                if (K::SUB == 32) minimum = minimum * (float)subs[LINE + k / K::SUB];
            }
            // Without contraction, so that each number is rounded once: what comes before is exact.
            float number = ((float)value_of<K>(at + K::SUB_LINES * LINE, k, i) - (p.minimums ? 0.0f : offset)) * of_value;
            if (p.minimums) number = number + minimum;
            const int64_t input = s * lines.segments.size + k;
            put_part<E>(to + (p.order ? p.order[input] : input), broadcast(&number), 1);
        }
    }
}

}  // namespace
