// Products of integers: weights of 4, 5, 6 or 8 bits with scales, and rows of x as bytes with scales. ops/weights/quantised.py defines
// the computation and the order of rounding, which are the same on every instruction set.
//
// For each segment of inputs, a strip has the lines of its sub-scales if there are any, then the lines of its values, then the lines of
// scales. If two segments share lines of scales, these follow the first segment, so that all lines are read in the order of memory.
//
// A line of values holds 4 inputs of W columns as bytes, or 8 as nibbles: the first four in the lower nibbles. With 5 and 6 bits, these
// lines follow a line with the upper bits of all their inputs: each byte of it has the bits of every fourth input, from the lowest bits
// up. 16 lines of bytes are one tile of integers, see linear_integer_tiles.h.
//
// Scales in fp32 have one line per segment, followed by a line of zeros if there are any. Scales in fp16 have one line per two segments,
// followed by such a line of minimums if there are any. With sub-scales, one line has the scale and the minimum, or nothing in its
// place. A lane of a line of sub-scales has four of a column: 128 inputs have two such lines, the second one with the sub-minimums if
// sub-scales are of 32 inputs.
//
// A row of x consists of its bytes or, with WIDE_X, of 16-bit numbers, each four in the order 0, 2, 1, 3, with zeros after its end.
// They are followed by a scale per segment, then by the sums of each segment's bytes: one of all, one per 16,
// or one per 32 in 16 bits, in the order 0, 2, 1, 3.
#pragma once

#include "linear_vectors.h"
#include "rounding.h"

namespace {

// Whether x has 16 bits for products with weights of 8 bits: otherwise its bytes would be widened again for each weight.
#if defined(QUIRE_BYTE_PAIRS) && !defined(QUIRE_TILES)
constexpr bool WIDE_X = true;
#else
constexpr bool WIDE_X = false;
#endif

constexpr int64_t ACTIVATION_GROUP = 128;  // most inputs of x that share a scale, unless a whole row does

// A kind of integer weight. N: bits. INPUTS_OF_SUB: inputs that share a sub-scale, 16 or 32; 0: no sub-scales. IN_BLOCKS: each 32 inputs
// have a scale in fp16. A unit is the inputs whose values fill whole lines.
template <int N, int INPUTS_OF_SUB = 0, bool IN_BLOCKS = false>
struct Integers {
    static constexpr int BITS = N, SUB = INPUTS_OF_SUB;
    static constexpr bool BLOCKS = IN_BLOCKS, HALVES = BLOCKS || SUB;  // scales are fp16
    static constexpr int UPPER = N == 8 ? 0 : N - 4;  // bits that are stored in a separate line
    static constexpr int QUADS = N == 8 ? 1 : UPPER ? 8 / UPPER : 2;  // of a unit: four inputs each
    static constexpr int LINES = N == 8 ? 1 : QUADS / 2 + (UPPER ? 1 : 0), INPUTS = 4 * QUADS;  // of a unit
    static constexpr int SUB_LINES = SUB ? 2 : 0;  // of a segment
};
constexpr int64_t BLOCK = 32;  // inputs that share a scale in fp16, without sub-scales

// Whether a row of x and an output have one scale each, so that sums remain integers until the end.
inline bool by_row(const LinearParams& p) { return p.scales && !p.zeros && p.activation_group >= p.in_size; }

// Call f.template operator()<K>() with the kind of a quantised weight.
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

// The division of a weight's inputs into segments. The products within a segment are one sum. The last segment may have fewer inputs.
struct Segments {
    int64_t group;  // inputs of x that are rounded at a time
    int64_t size, count, last;
    int sub, sum_lanes;  // inputs that share a sub-scale, 0: no sub-scales; lanes for the sums of each segment in a row of x
    int width;           // bytes of a number of x
    explicit Segments(const LinearParams& p)
        : group(p.activation_group < ACTIVATION_GROUP && p.activation_group < p.in_size ? p.activation_group : ACTIVATION_GROUP),
          size(!p.scales && p.group < group ? p.group : group), count((p.in_size + size - 1) / size),
          last(p.in_size - (count - 1) * size), sub(p.sub), sum_lanes(sub == 0 ? 1 : sub == 16 ? 8 : 2),
          width(WIDE_X && p.bits == 8 ? 2 : 1) {}

    int64_t inputs(int64_t segment) const { return segment + 1 < count ? size : last; }
    int64_t row_lanes() const {
        const int64_t lanes = size * count * width / 4 + (1 + sum_lanes) * count;
#ifdef QUIRE_TILES
        return odd_lines(lanes);
#else
        return lanes;
#endif
    }
    float* scales(float* row) const { return row + size * count * width / 4; }
    int32_t* sums(float* row) const { return (int32_t*)(scales(row) + count); }
};

// The lines of a strip.
template <class K>
struct Lines {
    static constexpr int BYTES = 4 * W;
    Segments segments;
    int shift;       // 2 ** shift segments share lines of scales, which follow the first segment
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
    // Return the first line of a segment, and of its scales.
    int64_t at(int64_t segment) const { return segment * each + ((segment + shift) >> shift) * scales; }
    int64_t scales_at(int64_t segment) const {
        const int64_t first = segment >> shift << shift;
        return first + 1 < segments.count ? at(first) + each : all - scales;
    }
};

// Read W scales, or W zeros or minimums, from a segment's lines of scales.
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

// Return the factor of a segment's minimums: the products of a row's sums and the line of sub-minimums, added up.
QUIRE_INLINE I low_sums(const int32_t* sums, U line) {
    const U mask = U{} + 0x00ff00ffu;
    const I first = dot_halves(I{}, (I)(line & mask), (I)broadcast((const float*)sums));
    return dot_halves(first, (I)(line >> 8 & mask), (I)broadcast((const float*)sums + 1));
}

// ------------------------------------------------------------------------------------------------- rows of x

// Read `count` numbers of a row as fp32, zero after the row's end.
template <class E, class T = typename E::T>
static void get_group(const LinearParams& p, const T* row, int64_t first, int64_t count, float* to) {
    if (!p.order && first + count <= p.in_size) {
        for (int64_t c = 0; c < count; c += W) store(to + c, E::get(row + first + c));
        return;
    }
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

// Write the sums of a row's bytes.
static void put_row_sums(const int8_t* bytes, const Segments& segments, int32_t* to) {
    const int64_t each = segments.sub ? segments.sub : segments.size, count = segments.size * segments.count / each;
    for (int64_t first = 0; first < count; first += W) {
        const int64_t left = count - first < W ? count - first : W;
        V rows[W] = {};
        for (int64_t i = 0; i < left; i++)
            for (int64_t k = 0; k < each; k += W) rows[i] = rows[i] + S8::get(bytes + (first + i) * each + k);
        const I found = __builtin_convertvector(reduce_rows(rows, [](V a, V b) { return a + b; }), I);  // of whole numbers: exact
        for (int64_t i = 0; i < left; i++) {
            const int64_t n = first + i;
            if (segments.sub == 32) ((int16_t*)to)[n / 4 * 4 + n % 2 * 2 + n % 4 / 2] = (int16_t)found[i];
            else to[n] = found[i];
        }
    }
}

// Compute the rounding of each of up to W groups of numbers. Magnitudes are compared as integers, where infinity and NaN are largest.
static void roundings_of(const float* numbers, int64_t groups, int64_t size, Rounding* to) {
    V rows[W] = {};
    for (int64_t g = 0; g < groups; g++) {
        V top = {};
        for (int64_t c = 0; c < size; c += W) top = larger_bits((V)((U)load(numbers + g * size + c) & 0x7fffffffu), top);
        rows[g] = top;
    }
    const V largest = reduce_rows(rows, [](V a, V b) { return larger_bits(a, b); });
    const auto finite = (I)largest < 0x7f800000, none = largest < SMALLEST;
    const V scale = none ? V{} : largest / LARGEST_INT8, factor = none ? V{} : LARGEST_INT8 / largest;
    alignas(64) float scales[W], factors[W];
    store(scales, finite ? scale : splat(__builtin_nanf(""))), store(factors, finite ? factor : V{});
    for (int64_t g = 0; g < groups; g++) to[g] = {scales[g], factors[g]};
}

// Widen bytes to 16 bits in place, in the order above.
static void widen_bytes(int8_t* bytes, int64_t count) {
    for (int64_t first = count - 8; first >= 0; first -= 8) {  // backwards, so that bytes are read before they are overwritten
        int8_t from[8];
        int16_t to[8];
        memcpy(from, bytes + first, sizeof from);
        QUIRE_UNROLL for (int i = 0; i < 8; i += 4) to[i] = from[i], to[i + 1] = from[i + 2], to[i + 2] = from[i + 1], to[i + 3] = from[i + 3];
        memcpy((int16_t*)bytes + first, to, sizeof to);
    }
}

// Round a row, W groups at a time: computing the scale of one group alone would take longer than rounding it.
template <class E>
static void round_groups(const LinearParams& p, const typename E::T* row, float* to) {
    const Segments segments(p);
    int8_t* const bytes = (int8_t*)to;
    float* scales = segments.scales(to);
    const int64_t group = segments.group, end = segments.size * segments.count;
    alignas(64) float numbers[W * ACTIVATION_GROUP];
    const bool whole = p.activation_group > group;
    Rounding roundings[W];
    if (whole) {
        float largest = 0.0f;
        bool finite = true;
        for (int64_t first = 0; first < end; first += group) {
            get_group<E>(p, row, first, group, numbers);
            const float found = largest_number<F32>(numbers, group, finite);
            largest = found > largest ? found : largest;
        }
        roundings[0] = rounding_of(largest, finite);
    }
    for (int64_t first = 0; first < end; first += W * group) {
        const int64_t left = end - first < W * group ? end - first : W * group, groups = (left + group - 1) / group;
        get_group<E>(p, row, first, groups * group, numbers);
        if (!whole) roundings_of(numbers, groups, group, roundings);
        for (int64_t g = 0; g < groups; g++) {
            const int64_t count = left - g * group < group ? left - g * group : group;
            const Rounding& rounding = roundings[whole ? 0 : g];
            round_numbers<F32>(numbers + g * group, count, rounding, bytes + first + g * group);
            for (int64_t k = 0; k < count; k += segments.size) *scales++ = rounding.scale;
        }
    }
    put_row_sums(bytes, segments, segments.sums(to));
    if (segments.width == 2) widen_bytes(bytes, segments.size * segments.count);
}

// -------------------------------------------------------------------------------------------------- products

static void copy_integer_row(const LinearParams& p, const void* row, float* to) {
    with_element(p.dtype, [&](auto element) { round_groups<decltype(element)>(p, (const typename decltype(element)::T*)row, to); });
}

// Write W numbers of a row of the output from `column` on. sums: over all segments; int32 if by_row, with x_scale the row's scale.
template <class Out>
static void put_sums(const LinearParams& p, V sums, float x_scale, int64_t column, typename Out::T* row) {
    const int n = p.out_size - column < W ? (int)(p.out_size - column) : W;
    if (by_row(p)) sums = __builtin_convertvector((I)sums, V) * x_scale;
    if (p.scales) sums = sums * get_part<F32>(p.scales + column, n);
    if (p.bias) sums = sums + get_part<F32>(p.bias + column, n);
    put_part<Out>(row + column, sums, n);
}

// Return the i-th four inputs of a unit, for W columns, as bytes. unit: its first line.
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

// Return the i-th of the four sub-scales of each column in a line.
QUIRE_INLINE I sub_scale_of(const char* line, int i) { return (I)((U)load((const float*)line) << (24 - 8 * i)) >> 24; }

// The lines of a segment, from a strip on.
template <class K>
struct SegmentLines {
    static constexpr int LINE = Lines<K>::BYTES;
    const LinearParams& p;
    const char *subs, *scales;  // lines of sub-scales, which the values follow, and lines of scales
    int64_t stride, segment;

    SegmentLines(const LinearItem& item, const Lines<K>& lines, int64_t s)
        : p(*item.call->params), subs(item.weight + lines.at(s) * LINE), scales(item.weight + lines.scales_at(s) * LINE),
          stride(item.stride), segment(s) {}

    void skip(int strips) { subs += strips * stride, scales += strips * stride; }

    // For strip j: the i-th four inputs of a unit, the sub-scales with index `sub`, and so on.
    QUIRE_INLINE_MEMBER I quad(int64_t unit, int i, int j) const {
        return quad_of<K>(subs + (K::SUB_LINES + unit * K::LINES) * LINE + j * stride, i);
    }
    QUIRE_INLINE_MEMBER const char* sub_scales(int sub, int j) const { return subs + sub / 4 * LINE + j * stride; }  // sub % 4 of its line
    QUIRE_INLINE_MEMBER V scale(int j) const { return scales_of<K>(scales + j * stride, segment); }
    QUIRE_INLINE_MEMBER V offset(int j) const { return offsets_of<K>(p, scales + j * stride, segment); }
    QUIRE_INLINE_MEMBER U sub_minimums(int j) const { return (U)load((const float*)(subs + LINE + j * stride)); }
};

// Rows of x that are multiplied together, from a segment on. It caches their addresses: reading these from the call again after each
// store would take as long as the products.
struct RowsOfX {
    const char *bytes, *scales, *sums;  // of the first row
    int64_t stride, size, sum_bytes;    // bytes from one row to the next; of a segment; of its sums

    RowsOfX(const LinearCall& call, const Segments& segments, int64_t row)
        : stride(call.x_stride * 4), size(segments.size * segments.width), sum_bytes(4 * segments.sum_lanes) {
        float* const first = (float*)call.x + row * call.x_stride;
        bytes = (const char*)first, scales = (const char*)segments.scales(first), sums = (const char*)segments.sums(first);
    }

    void next(int64_t count = 1) { bytes += count * size, scales += count * 4, sums += count * sum_bytes; }

    // For row i: the q-th four inputs of the segment, its scale, its sums.
    QUIRE_INLINE_MEMBER I quad(int i, int64_t q) const { return (I)broadcast((const float*)(bytes + i * stride) + q); }
    // If numbers have 16 bits: the first and the third of these inputs, or with `odd` the others.
    QUIRE_INLINE_MEMBER I halves(int i, int64_t q, int odd) const { return (I)broadcast((const float*)(bytes + i * stride) + 2 * q + odd); }
    QUIRE_INLINE_MEMBER V scale(int i) const { return broadcast((const float*)(scales + i * stride)); }
    QUIRE_INLINE_MEMBER const int32_t* sum(int i) const { return (const int32_t*)(sums + i * stride); }
};

// Prefetches lines of some strips: line k < turn relative to `here`, later lines relative to `after`.
template <int LINE>
struct FetchSome {
    const char *here, *after;
    int64_t turn, stride;
    int32_t kind;
    int strips;

    QUIRE_INLINE_MEMBER void operator()(int64_t k) const {
        const char* const at = (k < turn ? here : after) + k * LINE;
        for (int j = 0; j < strips; j++) fetch_line(at + j * stride, kind);
    }
};

static void finish_integers(const LinearItem& item, const float* sums) {
    const LinearCall& call = *item.call;
    const LinearParams& p = *call.params;
    const Segments segments(p);
    with_element(p.out_dtype, [&](auto element) {
        using Out = decltype(element);
        for (int i = 0; i < item.rows; i++) {
            const float scale = *segments.scales((float*)call.x + (item.first_row + i) * call.x_stride);
            typename Out::T* out = (typename Out::T*)p.out + (item.first_row + i) * p.out_stride;
            for (int j = 0; j < item.strips; j++)
                put_sums<Out>(p, load(sums + i * PANEL + j * W), scale, (item.first_strip + j) * W, out);
        }
    });
}

// Multiplies items of up to MOST_ROWS rows by vectors.
template <class K, int MOST_ROWS>
class IntegerVectors {
  public:
    static constexpr int LINE = Lines<K>::BYTES;

    // Multiply an item. after: the weight of the next item, which is prefetched at the end of this one.
    void multiply(const LinearItem& item, const char* after) {
        const Lines<K> lines(*item.call->params);
        each_part(item, after, [&]<int N>(const LinearItem& part, const char* next) {
            memset(sums, 0, (size_t)part.rows * PANEL * sizeof *sums);
            multiply<N>(part, lines, next);
            finish_integers(part, sums);
        });
    }

  private:
    // Most rows of a block if there are several blocks. With 32 inputs per group, scaling the few products overlaps with the next ones
    // only if there are registers for both. Of 16 registers, 8 hold the sums of 4 rows and two strips. Unpacking weights of 5 or 6 bits
    // to bytes takes so long that more rows should share it.
#if defined(QUIRE_BYTE_DOT)
    static constexpr int HEIGHT = K::BLOCKS ? 4 : ROWS;
#elif defined(QUIRE_BYTE_PAIRS)
    static constexpr int HEIGHT = COLUMNS == 2 && (K::BITS == 4 || K::BITS == 8) ? 4 : ROWS;
#else
    static constexpr int HEIGHT = ROWS;
#endif

    const Fetching fetching = quire_fetching;
    alignas(64) float sums[MOST_ROWS * PANEL];  // int32 until they are complete, if by_row

    // A single block of rows prefetches lines a little ahead. Several blocks divide the lines of the next stretch among them.
    template <int N>
    void multiply(const LinearItem& item, const Lines<K>& lines, const char* after) {
        const RowBlocks blocks(item.rows, item.rows <= ROWS ? ROWS : HEIGHT);
        const int64_t count = lines.segments.count, stride = item.stride;
        if (blocks.blocks == 1) {
            const int64_t ahead = fetching.weights_ahead / LINE, turn = lines.all - ahead;
            const char *const here = item.weight + ahead * LINE, *const next = after - turn * LINE;
            const FetchAhead<LINE> fetch{here, next, turn, stride, fetching.weights};
            if (item.rows == 1) return add_stretch<1, N>(item, lines, 0, count, 0, fetch);
            if (item.rows == 2) return add_stretch<2, N>(item, lines, 0, count, 0, fetch);
            return add_block<N>(item, lines, 0, count, 0, item.rows, {here, next, turn, stride, fetching.weights, COLUMNS});
        }
        const int64_t near = NEAR / (COLUMNS * LINE * lines.each) & ~(int64_t)1, stretch = near ? near : 2;
        const int32_t kind = fetching.weights == FETCH_PAST && item.call->chunks == 1 ? FETCH_PAST : FETCH_FIRST;
        for (int64_t begin = 0; begin < count; begin += stretch) {
            const int64_t end = begin + stretch < count ? begin + stretch : count;
            const int64_t first = lines.at(begin), stop = lines.at(end);
            const char* const next = end < count ? item.weight + (stop - first) * LINE : after - first * LINE;
            for (int b = 0; b < blocks.blocks; b++) {
                const char* const share = b < COLUMNS ? next + b * stride : next;
                add_block<N>(item, lines, begin, end, blocks.first(b), blocks.rows(b), {share, share, 0, stride, kind, b < COLUMNS ? 1 : 0});
            }
        }
    }

    template <int N>
    void add_block(
        const LinearItem& item, const Lines<K>& lines, int64_t begin, int64_t end, int row, int rows, const FetchSome<LINE>& fetch) {
        with_several_rows(rows, [&]<int R>() { add_stretch<R, N>(item, lines, begin, end, row, fetch); });
    }

    // Add the products of the segments begin..end - 1 for R rows and N strips to their sums.
    template <int R, int N, class F>
    void add_stretch(const LinearItem& item, const Lines<K>& lines, int64_t begin, int64_t end, int row, const F& fetch) {
        // Partial sums and total sums may need more registers than there are, so the strips may be divided.
#ifdef QUIRE_BYTE_PAIRS
        constexpr int AT_ONCE = K::BITS != 8 && R * N > 4 * COLUMNS ? N / 2 : N;
#else
        constexpr int AT_ONCE = K::SUB && R * N > 8 ? (N + 1) / 2 : N;
#endif
        const LinearParams& p = *item.call->params;
        RowsOfX x(*item.call, lines.segments, item.first_row + row);
        x.next(begin);
        for (int64_t s = begin; s < end; s++, x.next()) {
            const int64_t line = lines.at(s);
            SegmentLines<K> segment(item, lines, s);
            for (int at = 0; at < N; at += AT_ONCE, segment.skip(AT_ONCE)) {
                const auto fetch_here = [&](int64_t i) __attribute__((always_inline)) {
                    if (AT_ONCE == N || at == 0) fetch(line + i);
                };
                add_segment<R, AT_ONCE>(p, x, segment, lines.units(s), sums + row * PANEL + at * W, fetch_here);
            }
            // Keep the order of memory: the hardware prefetcher stops at a gap.
            for (int64_t i = line + lines.each; i < lines.at(s + 1); i++) fetch(i);
        }
    }

    // Add the products of a segment for R rows and N strips to their sums. fetch(i) is called for each of its lines but those of scales.
    template <int R, int N, class F>
    QUIRE_INLINE_MEMBER static void add_segment(
        const LinearParams& p, const RowsOfX& x, const SegmentLines<K>& segment, int64_t units, float* to, const F& fetch) {
        // Values have an offset, instead of being relative to the middle of their range.
        const bool offsets = K::SUB == 32 || (K::SUB == 0 && (K::HALVES ? p.minimums : p.zeros));
        const bool by_output = !K::HALVES && p.scales, as_integers = !K::HALVES && by_row(p);
        I sum[R][N];
        QUIRE_UNROLL for (int i = 0; i < R; i++) {
            const I first = K::SUB ? I{} : start(x, i, offsets);
            QUIRE_UNROLL for (int j = 0; j < N; j++) sum[i][j] = first;
        }
        QUIRE_UNROLL for (int l = 0; l < K::SUB_LINES; l++) fetch(l);
        if constexpr (K::SUB) {
            constexpr int SUBS = ACTIVATION_GROUP / K::SUB;
            // With one row, reaching the memory's rate needs full unrolling. With more rows, there are not enough registers for it.
            if constexpr (R == 1) {
                QUIRE_UNROLL for (int sub = 0; sub < SUBS; sub++) add_sub<R, N>(sum, x, segment, sub, fetch);
            } else {
                for (int sub = 0; sub < SUBS; sub++) add_sub<R, N>(sum, x, segment, sub, fetch);
            }
        } else if constexpr (K::BLOCKS) {
            add_plain<R, N, BLOCK / K::INPUTS>(sum, x, segment, 0, fetch);
        } else {
            constexpr int AT_ONCE = K::BITS == 8 ? (R > 2 ? 2 : 4) : FITTING;
            int64_t unit = 0;
            for (; unit + AT_ONCE <= units; unit += AT_ONCE) add_plain<R, N, AT_ONCE>(sum, x, segment, unit, fetch);
            if constexpr (AT_ONCE > 1)
                for (; unit < units; unit++) add_plain<R, N, 1>(sum, x, segment, unit, fetch);
        }
        QUIRE_UNROLL for (int j = 0; j < N; j++) {
            V of_group = {}, offset = {};
            if (!by_output) of_group = segment.scale(j);
            if (offsets) offset = segment.offset(j);
            U sub_minimums = {};
            if constexpr (K::SUB == 32) sub_minimums = segment.sub_minimums(j);
            QUIRE_UNROLL for (int i = 0; i < R; i++) {
                float* const at = to + i * PANEL + j * W;
                if (as_integers) {
                    store(at, (V)((I)load(at) + sum[i][j]));
                    continue;
                }
                const V scale = x.scale(i);
                V total = __builtin_convertvector(sum[i][j], V), low = {};
                if constexpr (K::SUB == 32) low = __builtin_convertvector(low_sums(x.sum(i), sub_minimums), V);
                else if (offsets) low = splat((float)*x.sum(i));
                if (!K::HALVES && offsets) total = total - offset * low;  // exact, as these are integers
                V result = fma(total, by_output ? scale : scale * of_group, load(at));
                if (K::HALVES && offsets) result = fma(low, scale * offset, result);
                store(at, result);
            }
        }
    }

    // Return the initial value of the sums of row i, so that values are relative to the middle of their range or have an offset.
    QUIRE_INLINE_MEMBER static I start(const RowsOfX& x, int i, bool offsets) {
        constexpr int MIDDLE = 1 << (K::BITS - 1), GIVEN = K::BITS == 8 ? BYTE_MIDDLE : MIDDLE;  // GIVEN: the operand for MIDDLE
        const I sum = (I)broadcast((const float*)x.sum(i));
        return offsets ? sum * (MIDDLE - GIVEN) : sum * -GIVEN;
    }

    // Prefetch the cache lines of a unit. first: the unit that is added first.
    template <class F>
    QUIRE_INLINE_MEMBER static void fetch_unit(int64_t unit, int64_t first, const F& fetch) {
        QUIRE_UNROLL for (int l = 0; l < K::LINES; l++)
            if (((unit - first) * K::LINES + l) % PER_LINE<LINE> == 0) fetch(K::SUB_LINES + unit * K::LINES + l);
    }

#ifdef QUIRE_BYTE_PAIRS
    // Products of two bytes are added up in 16 bits, over FITTING_QUADS quads, and then multiplied with a factor. Products with weights
    // of 8 bits do not fit, so those are widened.
    static constexpr int BYTE_MIDDLE = 128, FITTING_QUADS = K::BITS == 4 ? 8 : K::BITS == 5 ? 4 : K::BITS == 6 ? 2 : 1;
    static constexpr int FITTING = FITTING_QUADS < K::QUADS ? 1 : FITTING_QUADS / K::QUADS;  // units to add at a time

    // Factors for each strip's columns, as pairs of the same number.
    template <int N>
    struct Factors {
        I of[N];
    };

    // Add the products of the inputs that share a sub-scale, times the sub-scale.
    template <int R, int N, class F>
    QUIRE_INLINE_MEMBER static void add_sub(I (&sum)[R][N], const RowsOfX& x, const SegmentLines<K>& segment, int sub, const F& fetch) {
        constexpr int UNITS = K::SUB / K::INPUTS;
        Factors<N> scales;
        QUIRE_UNROLL for (int j = 0; j < N; j++) scales.of[j] = doubled_byte((I)load((const float*)segment.sub_scales(sub, j)), sub % 4);
        add_units<R, N, UNITS>(sum, x, segment, sub * UNITS, scales, fetch);
        if constexpr (K::BITS == 6) {  // subtract the middle, 32, times the sum of 16 inputs, which fits 16 bits
            QUIRE_UNROLL for (int j = 0; j < N; j++) {
                const I middle = (I)((H)scales.of[j] << 5) & 0xffff;
                QUIRE_UNROLL for (int i = 0; i < R; i++)
                    sum[i][j] = sum[i][j] - dot_halves(I{}, (I)broadcast((const float*)x.sum(i) + sub), middle);
            }
        }
    }

    // Add the products of units without sub-scales.
    template <int R, int N, int UNITS, class F>
    QUIRE_INLINE_MEMBER static void add_plain(
        I (&sum)[R][N], const RowsOfX& x, const SegmentLines<K>& segment, int64_t first, const F& fetch) {
        Factors<N> ones;
        QUIRE_UNROLL for (int j = 0; j < N; j++) ones.of[j] = I{} + 0x10001;
        add_units<R, N, UNITS>(sum, x, segment, first, ones, fetch);
    }

    template <int R, int N, int UNITS, class F>
    QUIRE_INLINE_MEMBER static void add_units(
        I (&sum)[R][N], const RowsOfX& x, const SegmentLines<K>& segment, int64_t first, const Factors<N>& factors, const F& fetch) {
        H part[R][N];
        const auto clear = [&]() __attribute__((always_inline)) {
            QUIRE_UNROLL for (int i = 0; i < R; i++) QUIRE_UNROLL for (int j = 0; j < N; j++) part[i][j] = H{};
        };
        const auto flush = [&]() __attribute__((always_inline)) {
            QUIRE_UNROLL for (int i = 0; i < R; i++)
                QUIRE_UNROLL for (int j = 0; j < N; j++) sum[i][j] = dot_halves(sum[i][j], (I)part[i][j], factors.of[j]);
        };
        clear();
        QUIRE_UNROLL for (int64_t unit = first; unit < first + UNITS; unit++) {
            QUIRE_UNROLL for (int q = 0; q < K::QUADS; q++) {
                I column[N];
                QUIRE_UNROLL for (int j = 0; j < N; j++) column[j] = segment.quad(unit, q, j);
                if constexpr (K::BITS == 8) {
                    add_bytes<R, N>(sum, x, unit, column);
                } else {
                    QUIRE_UNROLL for (int i = 0; i < R; i++) {
                        const I bytes = x.quad(i, unit * K::QUADS + q);
                        QUIRE_UNROLL for (int j = 0; j < N; j++) part[i][j] = part[i][j] + pair_products(column[j], bytes);
                    }
                    if constexpr (FITTING_QUADS < K::QUADS)
                        if ((q + 1) % FITTING_QUADS == 0) flush(), clear();
                }
            }
            fetch_unit(unit, first, fetch);
        }
        if constexpr (K::BITS != 8 && FITTING_QUADS >= K::QUADS) flush();
    }

    // Add the products of a quad of bytes.
    template <int R, int N>
    QUIRE_INLINE_MEMBER static void add_bytes(I (&sum)[R][N], const RowsOfX& x, int64_t q, const I (&column)[N]) {
#ifdef QUIRE_TILES  // tiles need x as bytes
        QUIRE_UNROLL for (int i = 0; i < R; i++)
            QUIRE_UNROLL for (int j = 0; j < N; j++) sum[i][j] = dot_bytes(sum[i][j], column[j], x.quad(i, q));
#else
        QUIRE_UNROLL for (int odd = 0; odd < 2; odd++) {
            I weights[N];
            QUIRE_UNROLL for (int j = 0; j < N; j++) weights[j] = odd ? odd_bytes(column[j]) : even_bytes(column[j]);
            QUIRE_UNROLL for (int i = 0; i < R; i++) {
                const I own = x.halves(i, q, odd);
                QUIRE_UNROLL for (int j = 0; j < N; j++) sum[i][j] = dot_halves(sum[i][j], weights[j], own);
            }
        }
#endif
    }
#else
    static constexpr int FITTING = 1;

    // Add the products of the inputs that share a sub-scale, times the sub-scale.
    template <int R, int N, class F>
    QUIRE_INLINE_MEMBER static void add_sub(I (&sum)[R][N], const RowsOfX& x, const SegmentLines<K>& segment, int sub, const F& fetch) {
        constexpr int UNITS = K::SUB / K::INPUTS;
        I part[R][N];
        QUIRE_UNROLL for (int i = 0; i < R; i++) {
            const I middle = K::BITS == 6 ? (I)broadcast((const float*)x.sum(i) + sub) << 5 : I{};
            QUIRE_UNROLL for (int j = 0; j < N; j++) part[i][j] = -middle;
        }
        add_plain<R, N, UNITS>(part, x, segment, sub * UNITS, fetch);
        QUIRE_UNROLL for (int j = 0; j < N; j++) {
            const I scale = sub_scale_of(segment.sub_scales(sub, j), sub % 4);
            QUIRE_UNROLL for (int i = 0; i < R; i++) sum[i][j] = sum[i][j] + part[i][j] * scale;
        }
    }

    // Add the products of units without sub-scales.
    template <int R, int N, int UNITS, class F>
    QUIRE_INLINE_MEMBER static void add_plain(
        I (&sum)[R][N], const RowsOfX& x, const SegmentLines<K>& segment, int64_t first, const F& fetch) {
        QUIRE_UNROLL for (int64_t unit = first; unit < first + UNITS; unit++) {
            QUIRE_UNROLL for (int q = 0; q < K::QUADS; q++) {
                I column[N];
                QUIRE_UNROLL for (int j = 0; j < N; j++) {
                    column[j] = segment.quad(unit, q, j);
                    if constexpr (K::BITS == 8) column[j] = byte_operand(column[j]);
                }
                QUIRE_UNROLL for (int i = 0; i < R; i++) {
                    const I bytes = x.quad(i, unit * K::QUADS + q);
                    QUIRE_UNROLL for (int j = 0; j < N; j++) {
                        if constexpr (K::BITS == 8) sum[i][j] = dot_bytes(sum[i][j], column[j], bytes);
                        else sum[i][j] = dot_small(sum[i][j], column[j], bytes);
                    }
                }
            }
            fetch_unit(unit, first, fetch);
        }
    }
#endif
};

template <class K>
struct LinearIntegers {
    static constexpr int LINE = Lines<K>::BYTES;
    static constexpr int CHUNK = 96;  // most rows of x in an item

    LinearItems items;
    IntegerVectors<K, CHUNK> vectors;

    LinearIntegers(LinearWork& all, int64_t thread) : items(all, thread) {}

    void work() {
        LinearItem item, after;
        for (bool more = items.take(item); more; item = after) {
            more = items.take(after);
            vectors.multiply(item, more ? after.weight : item.weight);  // item.weight is cached, so prefetching it is harmless
        }
    }
};

}  // namespace
