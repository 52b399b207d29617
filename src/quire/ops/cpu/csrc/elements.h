// The dtypes of tensors: reading W numbers of each as fp32, and writing them back, rounded to nearest even.
#pragma once

#include "params.h"
#include "simd.h"

namespace {

struct F32 {
    using T = float;
    QUIRE_INLINE V get(const T* p) { return load(p); }
    QUIRE_INLINE void put(T* p, V v) { store(p, v); }
};

struct F16 {
    using T = uint16_t;
    QUIRE_INLINE V get(const T* p) { return widen_fp16(p); }
    QUIRE_INLINE void put(T* p, V v) { narrow_fp16(p, v); }
    // From lanes that hold two numbers each: the first numbers, the second numbers.
    QUIRE_INLINE V lower(V lanes) { return lower_fp16(lanes); }
    QUIRE_INLINE V upper(V lanes) { return upper_fp16(lanes); }
};

struct BF16 {
    using T = uint16_t;
    QUIRE_INLINE V get(const T* p) { return widen_bf16(p); }
    QUIRE_INLINE void put(T* p, V v) {
#ifdef QUIRE_BF16_PAIRS
        narrow_bf16(p, v);
#else
        U bits = (U)v;
        U rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        U quiet = (bits >> 16) | 0x40u;  // adding could turn a NaN into an infinity
        narrow_32_to_16(p, (U)(v != v) ? quiet : rounded);
#endif
    }
    QUIRE_INLINE V lower(V lanes) { return (V)((U)lanes << 16); }
    QUIRE_INLINE V upper(V lanes) { return (V)((U)lanes & 0xffff0000u); }
};

struct S8 {
    using T = int8_t;
    QUIRE_INLINE V get(const T* p) { return widen_int8(p); }
    QUIRE_INLINE void put(T* p, V v) { narrow_int8(p, v); }  // of whole numbers
};

// Return the numbers from an index on that fit into one vector.
QUIRE_INLINE int part(int64_t dim, int64_t at) { return dim - at < W ? (int)(dim - at) : W; }

// Access the first n (1..W) numbers only. Memory after them is not touched.
template <class E>
QUIRE_INLINE V get_part(const typename E::T* p, int n) {
    if (n >= W) return E::get(p);
    typename E::T few[W] = {};
    memcpy(few, p, (size_t)n * sizeof *p);
    return E::get(few);
}

template <class E>
QUIRE_INLINE void put_part(typename E::T* p, V v, int n) {
    if (n >= W) return E::put(p, v);
    typename E::T few[W];
    E::put(few, v);
    memcpy(p, few, (size_t)n * sizeof *p);
}

template <class F>
static void with_element(int32_t dtype, const F& f) {
    if (dtype == DTYPE_F32) f(F32{});
    else if (dtype == DTYPE_F16) f(F16{});
    else f(BF16{});
}

}  // namespace
