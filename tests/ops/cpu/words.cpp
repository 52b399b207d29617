// The words of a simd_*.h against what they mean, lane by lane, for whatever instruction set this is compiled for. Prints those that
// are wrong. With an argument, on Arm: prints which instruction sets machine_arm.cpp finds.

#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "elements.h"
#include "vmath.h"

#if defined(__aarch64__)
extern "C" int32_t quire_runs_neon(void), quire_runs_neon_dot(void), quire_runs_neon_bf16(void);
#endif

namespace {

int failures = 0;
uint32_t state = 1;

uint32_t random_bits() { return state = state * 1664525u + 1013904223u, state ^ state >> 15; }

template <class T>
T drawn() {
    T value;
    for (size_t i = 0; i < sizeof value; i++) ((uint8_t*)&value)[i] = (uint8_t)(random_bits() >> 9);
    return value;
}

V numbers() {
    V v;
    for (int i = 0; i < W; i++) v[i] = std::ldexp((float)(int32_t)random_bits(), (int)(random_bits() >> 8) % 20 - 40);
    return v;
}

template <class F>
void expect(const char* word, const F& holds) {
    for (int i = 0; i < W; i++) {
        if (holds(i)) continue;
        std::printf("%s: lane %d\n", word, i), failures++;
        return;
    }
}

// fp16 as C++ has it in neither language standard: by its fields.
float from_fp16(uint16_t bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const float size = exponent ? std::ldexp((float)(1024 + fraction), exponent - 25) : std::ldexp((float)fraction, -24);
    return bits >> 15 ? -size : size;
}
bool is_number(uint16_t fp16) { return (fp16 >> 10 & 31) != 31; }

int8_t byte_of(I v, int lane, int i) { return (int8_t)(v[lane] >> (8 * i)); }

void check_sums() {
    const I a = drawn<I>(), b = drawn<I>(), acc = drawn<I>();
    const auto sum = [&](int lane, int mask) {
        uint32_t total = (uint32_t)acc[lane];
        for (int i = 0; i < 4; i++) total += (uint32_t)(((uint8_t)byte_of(a, lane, i) & mask) * byte_of(b, lane, i));
        return (int32_t)total;
    };
    const I halves = dot_halves(acc, a, b);
#ifdef QUIRE_BYTE_PAIRS
    const I small = (I)((U)a & 0x3f3f3f3fu), even = even_bytes(a), odd = odd_bytes(a);
    const H pairs = pair_products(small, b);
    expect("pair_products", [&](int i) {
        const auto sum = [&](int k) { return (int16_t)(byte_of(small, i, k) * byte_of(b, i, k) + byte_of(small, i, k + 1) * byte_of(b, i, k + 1)); };
        return pairs[2 * i] == sum(0) && pairs[2 * i + 1] == sum(2);
    });
    expect("even_bytes", [&](int i) { return even[i] == (a[i] & 0xff00ff); });
    expect("odd_bytes", [&](int i) { return odd[i] == (a[i] >> 8 & 0xff00ff); });
    for (int k = 0; k < 4; k++)
        expect("doubled_byte", [&](int i) {
            const H found = (H)doubled_byte(a, k);
            return found[2 * i] == byte_of(a, i, k) && found[2 * i + 1] == byte_of(a, i, k);
        });
#else
    const I whole = dot_bytes(acc, byte_operand(a), b), small = dot_small(acc, (I)((U)a & 0x7f7f7f7fu), b);
    expect("dot_bytes", [&](int i) {
        uint32_t total = (uint32_t)acc[i];
        for (int k = 0; k < 4; k++) total += (uint32_t)(((uint8_t)byte_of(a, i, k) - 128 + BYTE_MIDDLE) * byte_of(b, i, k));
        return (uint32_t)whole[i] == total;
    });
    expect("dot_small", [&](int i) { return small[i] == sum(i, 127); });
#endif
    expect("dot_halves", [&](int i) {
        const uint32_t low = (uint32_t)((int16_t)a[i] * (int16_t)b[i]), high = (uint32_t)((a[i] >> 16) * (b[i] >> 16));
        return (uint32_t)halves[i] == (uint32_t)acc[i] + low + high;
    });
}

// The largest and smallest bytes, whose products fill 16 bits.
void check_extremes() {
    const I most = I{} + -1, least = I{} + (int32_t)0x80808080u;  // 255 or -1, 128 or -128
#ifdef QUIRE_BYTE_PAIRS
    expect("pair_products of extremes", [&](int i) { return ((H)pair_products((I)((U)most & 0x7f7f7f7fu), least))[i] == 2 * 127 * -128; });
#else
    expect("dot_bytes of extremes", [&](int i) { return dot_bytes(I{}, byte_operand(most), least)[i] == 4 * (127 + BYTE_MIDDLE) * -128; });
    expect("dot_small of extremes", [&](int i) { return dot_small(I{}, (I)((U)most & 0x7f7f7f7fu), least)[i] == 4 * 127 * -128; });
#endif
}

void check_numbers() {
    const V x = numbers(), y = numbers(), z = numbers();
    expect("fma", [&](int i) { return fma(x, y, z)[i] == std::fma(x[i], y[i], z[i]); });
    expect("larger", [&](int i) { return larger(x, y)[i] == std::fmax(x[i], y[i]); });
    const V nan = splat(__builtin_nanf(""));
    expect("larger with NaN first", [&](int i) { return larger(nan, y)[i] == y[i]; });
    expect("larger with NaN last", [&](int i) { return std::isnan(larger(x, nan)[i]); });
    expect("round_to_even", [&](int i) { return round_to_even(x)[i] == std::nearbyint(x[i]); });
    expect("fraction", [&](int i) { return std::fabs(fraction(x)[i] - (x[i] - std::floor(x[i]))) <= 0x1p-24f; });  // next to 1 AVX-512 rounds down
    expect("swap_lanes<1>", [&](int i) { return swap_lanes<1>(x)[i] == x[i ^ 1]; });
    expect("swap_lanes<2>", [&](int i) { return swap_lanes<2>(x)[i] == x[i ^ 2]; });
    V p, power;
    for (int i = 0; i < W; i++) p[i] = 1.0f + (float)(random_bits() >> 9) * 0x1p-23f, power[i] = (float)(int)(random_bits() % 20000) * -0.01f;
    expect("scale_by_power", [&](int i) {  // what is denormal may be zero
        const float exact = std::ldexp(p[i], (int)std::floor(power[i])), found = scale_by_power(p, power)[i];
        return found == exact || (found == 0.0f && exact < 0x1p-126f);
    });
    V rows[W];
    for (V& row : rows) row = drawn<V>();
    V turned[W];
    memcpy(turned, rows, sizeof rows), transpose(turned);
    expect("transpose", [&](int i) {
        for (int k = 0; k < W; k++) if (((U)turned[k])[i] != ((U)rows[i])[k]) return false;
        return true;
    });
}

void check_halves() {
    uint16_t bits[2 * W], back[W];
    for (uint16_t& each : bits) each = (uint16_t)(random_bits() >> 8);
    expect("widen_bf16", [&](int i) { return ((U)widen_bf16(bits))[i] == (uint32_t)bits[i] << 16; });
    const auto same = [&](V v, int lane, int at) { return !is_number(bits[at]) ? !(std::fabs(v[lane]) < INF) : v[lane] == from_fp16(bits[at]); };
    expect("widen_fp16", [&](int i) { return same(widen_fp16(bits), i, i); });
    narrow_fp16(back, widen_fp16(bits));
    expect("narrow_fp16", [&](int i) { return !is_number(bits[i]) || back[i] == bits[i]; });
    V pairs, wide[2];
    memcpy(&pairs, bits, sizeof pairs), widen_halves(pairs, wide);
    expect("lower_fp16", [&](int i) { return same(lower_fp16(pairs), i, 2 * i); });
    expect("upper_fp16", [&](int i) { return same(upper_fp16(pairs), i, 2 * i + 1); });
    expect("widen_halves", [&](int i) { return same(wide[0], i, i) && same(wide[1], i, W + i); });
    const V x = numbers();
    BF16::put(back, x);
    expect("narrow_bf16", [&](int i) {
        const uint32_t all = ((U)x)[i];
        return back[i] == (uint16_t)((all + 0x7fffu + (all >> 16 & 1)) >> 16);
    });
    U lanes = drawn<U>();
    narrow_32_to_16(back, lanes);
    expect("narrow_32_to_16", [&](int i) { return back[i] == (uint16_t)lanes[i]; });
}

void check_bytes() {
    int8_t bytes[W], back[W];
    for (int8_t& each : bytes) each = (int8_t)(random_bits() >> 8);
    narrow_int8(back, widen_int8(bytes));
    expect("widen_int8", [&](int i) { return widen_int8(bytes)[i] == (float)bytes[i]; });
    expect("narrow_int8", [&](int i) { return back[i] == bytes[i]; });
    alignas(16) uint8_t table[16];
    for (uint8_t& each : table) each = (uint8_t)(random_bits() >> 8);
    const B at = drawn<B>() & 15, other = drawn<B>(), found = look_up(table, at);
    const auto lower = (B)join_lower(at, other), upper = (B)join_upper(at, other);
    for (int i = 0; i < 4 * W; i++)
        if (found[i] != table[at[i]]) std::printf("look_up: byte %d\n", i), failures++;
    for (int i = 0; i < 4 * W; i += 2) {
        const int from = i / 16 * 16 + i % 16 / 2;
        if (lower[i] != at[from] || lower[i + 1] != other[from]) std::printf("join_lower: byte %d\n", i), failures++;
        if (upper[i] != at[from + 8] || upper[i + 1] != other[from + 8]) std::printf("join_upper: byte %d\n", i), failures++;
    }
    for (int count = 1; count <= 4 * W; count++) {  // at the end of what may be read
        char* const memory = (char*)malloc((size_t)count);
        for (int i = 0; i < count; i++) memory[i] = (char)(random_bits() >> 8);
        const B part = (B)load_lanes(memory, count);
        for (int i = 0; i < 4 * W; i++)
            if (part[i] != (i < count ? (uint8_t)memory[i] : 0)) std::printf("load_lanes: byte %d of %d\n", i, count), failures++;
        free(memory);
    }
}

#ifdef QUIRE_BF16_DOT
void check_pairs() {
    const V x = numbers(), y = numbers();
    uint16_t first[W], second[W], pairs[2 * W];
    narrow_bf16(first, x), narrow_bf16(second, y);
    const V both = pair_bf16(x, y);
    memcpy(pairs, &both, sizeof pairs);
    expect("pair_bf16", [&](int i) { return pairs[i] == first[i] && pairs[W + i] == second[i]; });
    const V a = drawn<V>(), b = drawn<V>();
    uint16_t of_a[2 * W], of_b[2 * W], joined[4 * W];
    V low, high;
    interleave_bf16(a, b, &low, &high);
    memcpy(of_a, &a, sizeof of_a), memcpy(of_b, &b, sizeof of_b), memcpy(joined, &low, sizeof low), memcpy(joined + 2 * W, &high, sizeof high);
    expect("interleave_bf16", [&](int i) {
        return joined[2 * i] == of_a[i] && joined[2 * i + 1] == of_b[i] && joined[2 * (W + i)] == of_a[W + i] && joined[2 * (W + i) + 1] == of_b[W + i];
    });
    const V acc = numbers();
    const V sum = dot_bf16(acc, both, both);
    const U bits = (U)both;
    expect("dot_bf16", [&](int i) {
        const float lower = (float)((V)(bits << 16))[i], upper = (float)((V)(bits & 0xffff0000u))[i];
        const double exact = (double)acc[i] + (double)lower * lower + (double)upper * upper;
        return std::fabs(sum[i] - exact) <= 0x1p-21 * (std::fabs((double)acc[i]) + (double)lower * lower + (double)upper * upper);
    });
}
#endif

}  // namespace

int main([[maybe_unused]] int count, char**) {
#if defined(__aarch64__)
    if (count > 1) return std::printf("%d %d %d\n", quire_runs_neon(), quire_runs_neon_dot(), quire_runs_neon_bf16()), 0;
#endif
    check_extremes();
    for (int round = 0; round < 1000 && failures < 10; round++) {
        check_sums(), check_numbers(), check_halves(), check_bytes();
#ifdef QUIRE_BF16_DOT
        check_pairs();
#endif
    }
    std::printf("%d lanes, %d failures\n", W, failures);
    return failures != 0;
}
