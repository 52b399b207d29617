// Elementary functions on vectors, the same polynomials in every ISA.
#pragma once

#include "simd.h"

// glibc 2.29 has a second version of exp2, with other error handling. The first version is in every glibc, see floor.cpp.
#if defined(__GLIBC__) && defined(__x86_64__)
__asm__(".symver exp2,exp2@GLIBC_2.2.5");
#elif defined(__GLIBC__) && defined(__aarch64__)
__asm__(".symver exp2,exp2@GLIBC_2.17");
#endif

namespace {

constexpr float LOG2E = 1.44269504088896341f;
constexpr float LN2 = 0.693147180559945309f;
constexpr float INF = __builtin_inff();

// Return 2^x for x <= 0: 0 below about -126, NaN for NaN. Relative error 1e-7: a minimax polynomial
// of 2^r on 0..1 that is 1 at 0.
QUIRE_INLINE V exp2_negative(V x) {
    x = larger(splat(-200.0f), x);
    V r = fraction(x);
    V p = splat(0.00186713011f);
    p = fma(p, r, splat(0.00901703022f));
    p = fma(p, r, splat(0.0557999132f));
    p = fma(p, r, splat(0.24016445f));
    p = fma(p, r, splat(0.693151312f));
    p = fma(p, r, splat(1.0f));
    return scale_by_power(p, x);
}

// Return e^x for any x, infinity included; results below 2^-126 are 0. The reduction is exact to twice fp32's precision (Cody & Waite),
// for half the argument: the square of e^(x/2) becomes infinite at the correct x.
QUIRE_INLINE V exp_any(V x) {
    V half = 0.5f * x;
    half = half > 64.0f ? splat(64.0f) : half;
    half = half < -44.0f ? splat(-44.0f) : half;
    V whole = round_to_even(half * LOG2E);
    V r = fma(whole, splat(-0.693359375f), half);
    r = fma(whole, splat(2.12194440e-4f), r) * LOG2E;
    V p = splat(0.000153533606f);
    p = fma(p, r, splat(0.00133988749f));
    p = fma(p, r, splat(0.00961843737f));
    p = fma(p, r, splat(0.0555033247f));
    p = fma(p, r, splat(0.240226479f));
    p = fma(p, r, splat(0.693147203f));
    p = fma(p, r, splat(1.0f));
    V root = (V)((U)p + ((U)__builtin_convertvector(whole, I) << 23));
    return x < -87.3f ? V{} : root * root;
}

QUIRE_INLINE float exp2_scalar(float x) { return exp2_negative(splat(x))[0]; }

QUIRE_INLINE V magnitude(V x) { return (V)((U)x & 0x7fffffffu); }

// Return tanh(x) = (1 - t) / (1 + t) with t = e^(-2|x|), which cannot overflow; a series is used where 1 - t would cancel.
QUIRE_INLINE V tanh_any(V x) {
    V a = magnitude(x), square = x * x;
    V t = exp2_negative(a * (-2.0f * LOG2E));
    V large = (1.0f - t) / (1.0f + t);
    V p = splat(62.0f / 2835.0f);
    p = fma(p, square, splat(-17.0f / 315.0f));
    p = fma(p, square, splat(2.0f / 15.0f));
    p = fma(p, square, splat(-1.0f / 3.0f));
    V small = fma(a * square, p, a);
    V result = a < 0.15f ? small : large;
    return (V)((U)result | ((U)x & 0x80000000u));
}

}  // namespace
