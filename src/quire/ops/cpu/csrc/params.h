// What Python hands over. quire/ops/cpu/native.py declares the same structures, field by field.
#pragma once

#include <cstdint>

#define QUIRE_EXPORT __attribute__((visibility("default")))

enum Dtype : int32_t { DTYPE_F32 = 0, DTYPE_F16 = 1, DTYPE_BF16 = 2 };

// One step's metadata, as validated by Python.
struct StepParams {
    const int32_t* query_starts;  // [S + 1]
    const int32_t* context_lens;  // [S]
    const int32_t* block_tables;  // [S, table_stride]
    const int32_t* slots;         // [T]
    int64_t table_stride;
    int32_t num_seqs;
    int32_t num_threads;
};

// What stays the same from step to step.
struct SpecParams {
    int32_t num_heads, num_kv_heads, head_dim, head_dim_v, block_size;
    int32_t causal;
    int32_t window;  // 0: none
    int32_t dtype;
};

struct AttentionParams {
    const void* q;              // [T, Hq, D]
    const void* k;              // [N, Hkv, B, D]
    const void* v;              // [N, Hkv, B, Dv]
    void* out;                  // [T, Hq, Dv]
    float* lse;                 // [T, Hq], contiguous; null: not wanted
    const float* alibi_slopes;  // [Hq]; null: none
    const float* sinks;         // [Hq]; null: none
    int64_t q_token, q_head;    // strides, in elements
    int64_t k_block, k_head, k_slot;
    int64_t v_block, v_head, v_slot;
    int64_t out_token, out_head;
    float scale;
    float softcap;  // 0: none
};

struct WriteParams {
    const void* k_new;  // [T, Hkv, D]
    const void* v_new;  // [T, Hkv, Dv]
    void* k;            // [N, Hkv, B, D]
    void* v;            // [N, Hkv, B, Dv]
    int64_t k_new_token, k_new_head;
    int64_t v_new_token, v_new_head;
    int64_t k_block, k_head, k_slot;
    int64_t v_block, v_head, v_slot;
};

struct LinearParams {
    const void* x;       // [T, in], as 32-bit lanes: fp32 numbers, or pairs of bf16 where the ISA multiplies those
    const void* weight;  // strips
    const float* bias;   // [out]; null: none
    void* out;           // [T, out], contiguous, of the weight's dtype or fp32
    int64_t x_stride;    // bytes from one row to the next
    int64_t rows, in_size, out_size;
    int32_t dtype, out_dtype;
    int32_t threads;
};
