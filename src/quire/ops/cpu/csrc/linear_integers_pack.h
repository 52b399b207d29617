// Packing of integer weights to the strips that linear_integers.h describes, and dequantisation of their rows.
#pragma once

#include "linear_integers.h"

#include <memory>

namespace {

// The parts of a quantised weight, each contiguous; null if the weight has no such part.
struct IntegerParts {
    const uint8_t* values;  // [out, in]
    const void* scales;     // fp32 [out, groups], of p.group inputs each; fp16 with p.halves
    const float* zeros;     // [out, groups]
    const uint16_t* minimums;  // fp16 [out, groups]
    const int8_t *sub_scales, *sub_minimums;  // [out, in / K::SUB]
};

// Write column i of a segment's lines, which must be zero before.
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

// Pack one strip of `rows` rows. The parts begin at the first of these rows.
template <class K>
static void pack_integers(const LinearParams& p, const Lines<K>& lines, const IntegerParts& parts, int64_t rows, char* to) {
    const Segments& segments = lines.segments;
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

// Pack GGUF blocks. rows: the address of each row of the weight. Only the values of one strip are unpacked at a time.
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

// Return the value of an input in a segment's lines.
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

// Dequantise one row of the weight, in the order of the inputs.
template <class K>
static void unpack_row(const LinearParams& p, int64_t row, float* to) {
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
            // No contraction to a fused multiply-add, so that each number is rounded once: the operations before are exact.
            float number = ((float)value_of<K>(at + K::SUB_LINES * LINE, k, i) - (p.minimums ? 0.0f : offset)) * of_value;
            if (p.minimums) number = number + minimum;
            const int64_t input = s * lines.segments.size + k;
            to[p.order ? p.order[input] : input] = number;
        }
    }
}

}  // namespace
