// Rounding of weights to integers when a model is loaded: `quantised` of ops/weights/quantised.py in one pass over the weight. Every
// operation is exact or rounded once, so the numbers equal those of torch's operators on every ISA.

#include <cstring>

#include "parallel.h"
#include "params.h"

namespace {

constexpr int64_t NUMBERS_A_TURN = 1 << 16;
constexpr uint32_t SIGN = 0x80000000, INFINITE = 0x7f800000;

float as_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

uint32_t as_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

// Return a number of each dtype as the bits of an fp32.
uint32_t widened(uint32_t stored) { return stored; }

struct Bf16 {
    uint16_t stored;
};
uint32_t widened(Bf16 x) { return (uint32_t)x.stored << 16; }

struct Fp16 {
    uint16_t stored;
};
uint32_t widened(Fp16 x) {
    const uint32_t magnitude = as_bits(as_float((uint32_t)(x.stored & 0x7fff) << 13) * 0x1p112f);
    return magnitude | ((x.stored & 0x7c00) == 0x7c00 ? INFINITE : 0) | (uint32_t)(x.stored & 0x8000) << 16;
}

// The magnitudes of the largest and of the least number, as bits, which have the same order as the numbers; 0 if no number has that
// sign.
struct Range {
    int32_t high, low;
};

template <class T>
Range range_of(const T* x, int64_t count) {
    Range range = {0, 0};
    for (int64_t i = 0; i < count; i++) {
        const uint32_t bits = widened(x[i]);
        range.high = std::max(range.high, (int32_t)bits);
        range.low = std::max(range.low, (int32_t)(bits ^ SIGN));
    }
    return range;
}

// Return the scale: 0, and not -0, if all numbers are 0; NaN if one is not finite.
template <int BITS>
float scale_of(Range range) {
    const float high = as_float((uint32_t)range.high), low = as_float((uint32_t)range.low);
    if (std::max(range.high, range.low) >= (int32_t)INFINITE) return __builtin_nanf("");
    if (BITS == 8) return std::max(high, low) / 127.0f;
    return (high > low ? high : -low) / -8.0f + 0.0f;  // the largest number becomes -8, so that all 16 values are used
}

template <int BITS, class T>
void round_group(const T* x, int64_t count, uint8_t* values, float* scale) {
    constexpr float HALF = 1 << (BITS - 1), WHOLE = 0x1.8p23f;  // adding WHOLE to a number rounds it to an integer, ties to even
    *scale = scale_of<BITS>(range_of(x, count));
    const float step = *scale == 0.0f ? 1.0f : *scale;
    for (int64_t i = 0; i < count; i++) {
        const float steps = as_float(widened(x[i])) / step;
        const float clamped = std::min(std::max(steps, -HALF), HALF - 1.0f);
        values[i] = (uint8_t)(as_bits(clamped + WHOLE) + (uint32_t)HALF);
    }
}

template <int BITS, class T>
void round_rows(ParallelFor parallel_for, const RoundParams& p) {
    const int64_t groups = (p.in_size + p.group - 1) / p.group;
    parallel_in_turns(parallel_for, p.threads, p.rows, std::max<int64_t>(1, NUMBERS_A_TURN / p.in_size), [&](int64_t row) {
        for (int64_t g = 0; g < groups; g++) {
            const int64_t first = g * p.group, count = std::min(p.group, p.in_size - first);
            round_group<BITS>((const T*)p.weight + row * p.stride + first, count, p.values + row * p.in_size + first, p.scales + row * groups + g);
        }
    });
}

template <class T>
void round_numbers(ParallelFor parallel_for, const RoundParams& p) {
    if (p.bits == 4) round_rows<4, T>(parallel_for, p);
    else round_rows<8, T>(parallel_for, p);
}

}  // namespace

extern "C" QUIRE_EXPORT void quire_round_weight(ParallelFor parallel_for, const RoundParams* params) {
    if (params->dtype == DTYPE_F32) round_numbers<uint32_t>(parallel_for, *params);
    else if (params->dtype == DTYPE_BF16) round_numbers<Bf16>(parallel_for, *params);
    else round_numbers<Fp16>(parallel_for, *params);
}
