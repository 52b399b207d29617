// Copies to and within the cache, the same on every ISA.

#include <cstring>

#include "parallel.h"
#include "plan.h"

namespace {

constexpr int64_t BYTES_A_THREAD = 1 << 17;

// Whether all numbers of a row are finite: the exponent of any other number is all ones.
template <class Bits>
bool finite_bits(const Bits* row, int64_t count, Bits exponent) {
    Bits found = 0;
    for (int64_t i = 0; i < count; i++) found |= (Bits)((row[i] & exponent) == exponent);
    return !found;
}

bool is_finite(const char* row, int64_t count, int32_t dtype) {
    if (dtype == DTYPE_F32) return finite_bits<uint32_t>((const uint32_t*)row, count, 0x7f800000);
    return finite_bits<uint16_t>((const uint16_t*)row, count, dtype == DTYPE_F16 ? 0x7c00 : 0x7f80);
}

}  // namespace

extern "C" {

// Copy row t's K and V to its slot, in a cache of their dtype; slot -1 skips the row. Rows that are not finite are marked.
void quire_write_copies(ParallelFor parallel_for, const Plan* plan, const WriteParams* p) {
    const CacheParams& cache = p->cache;
    const SpecParams& spec = plan->spec;
    const int64_t tokens = plan->step.query_starts[plan->step.num_seqs], bytes = spec.dtype == DTYPE_F32 ? 4 : 2;
    const int64_t key_bytes = spec.head_dim * bytes, value_bytes = spec.head_dim_v * bytes;
    const int64_t token_bytes = spec.num_kv_heads * (key_bytes + value_bytes);
    parallel(parallel_for, tokens, BYTES_A_THREAD / token_bytes + 1, [&](int64_t t) {
        const int64_t slot = plan->step.slots[t];
        if (slot < 0) return;
        const int64_t block = slot / spec.block_size, offset = slot % spec.block_size;
        bool finite = true;
        for (int64_t h = 0; h < spec.num_kv_heads; h++) {
            const char* key = (const char*)p->k_new + (t * p->k_new_token + h * p->k_new_head) * bytes;
            const char* value = (const char*)p->v_new + (t * p->v_new_token + h * p->v_new_head) * bytes;
            memcpy((char*)cache.k + (block * cache.k_block + h * cache.k_head + offset * cache.k_slot) * bytes, key, (size_t)key_bytes);
            memcpy((char*)cache.v + (block * cache.v_block + h * cache.v_head + offset * cache.v_slot) * bytes, value, (size_t)value_bytes);
            finite = finite && is_finite(key, spec.head_dim, spec.dtype) && is_finite(value, spec.head_dim_v, spec.dtype);
        }
        if (!finite) plan->step.nonfinite[t] = 1;
    });
}

// Copy block src[i] of a tensor [N, heads, size, dim] to block dst[i]; strides in bytes.
QUIRE_EXPORT void quire_copy_blocks(
    ParallelFor parallel_for, char* data, int64_t block_stride, int64_t head_stride, int64_t slot_stride, int64_t heads,
    int64_t size, int64_t row_bytes, const int64_t* src, const int64_t* dst, int64_t count) {
    const int64_t block_bytes = heads * size * row_bytes;
    if (block_bytes == 0) return;
    parallel(parallel_for, count, BYTES_A_THREAD / block_bytes + 1, [&](int64_t i) {
        for (int64_t h = 0; h < heads; h++) {
            const char* from = data + src[i] * block_stride + h * head_stride;
            char* to = data + dst[i] * block_stride + h * head_stride;
            if (slot_stride == row_bytes) {
                memcpy(to, from, (size_t)(size * row_bytes));
                continue;
            }
            for (int64_t s = 0; s < size; s++) memcpy(to + s * slot_stride, from + s * slot_stride, (size_t)row_bytes);
        }
    });
}

}  // extern "C"
