// Entry points of recurrent layers.

#include "entries.h"
#include "recurrent.h"
#include "scan.h"

// x *= sigmoid(gate).
ENTRY(gate)(
    ParallelFor parallel_for, const void* gate, int64_t stride, void* x, int64_t x_stride, int64_t rows, const GateParams* p, int32_t dtype) {
    with_element(dtype, [&](auto element) {
        gate_rows<decltype(element)>(parallel_for, gate, stride, x, x_stride, rows, *p);
    });
}

// Normalise rows of `heads` parts, each separately, and multiply them by silu(gate).
ENTRY(gated_norm)(
    ParallelFor parallel_for, const void* x, int64_t stride, const void* gate, int64_t gate_stride, void* out, int64_t out_stride,
    int64_t rows, const GatedNormParams* p, int32_t dtype) {
    with_element(dtype, [&](auto element) {
        using E = decltype(element);
        using T = typename E::T;
        parallel(parallel_for, rows * p->heads, rows_a_thread(p->dim), [&](int64_t i) {
            const int64_t row = i / p->heads, at = i % p->heads * p->dim;
            gated_norm_row<E>((const T*)x + row * stride + at, (const T*)gate + row * gate_stride + at, p->weight + at,
                              (T*)out + row * out_stride + at, p->dim, p->eps, p->gate_first);
        });
    });
}

ENTRY(convolve)(ParallelFor parallel_for, const RecurrentStep* step, const ConvolutionParams* params, int32_t dtype) {
    with_element(dtype, [&](auto element) { convolve<decltype(element)>(parallel_for, *step, *params); });
}

ENTRY(recur)(ParallelFor parallel_for, const RecurrentStep* step, const RecurrenceParams* params, int32_t dtype) {
    if (params->skip) recur<Rule::SPACE>(parallel_for, *step, *params, dtype);
    else recur<Rule::DELTA>(parallel_for, *step, *params, dtype);
}

ENTRY(scan)(ParallelFor parallel_for, const RecurrentStep* step, const ScanParams* params, int32_t dtype) {
    if (params->rule == SCAN_DELTA) scan<SCAN_DELTA>(parallel_for, *step, *params, dtype);
    else if (params->rule == SCAN_SELECTIVE) scan<SCAN_SELECTIVE>(parallel_for, *step, *params, dtype);
    else scan<SCAN_LRU>(parallel_for, *step, *params, dtype);
}
