// Entry points that a program calls, defined in other files of the same instruction set.
#pragma once

#include "isa.h"
#include "parallel.h"
#include "plan.h"

ENTRY(linear)(ParallelFor parallel_for, const LinearParams* params);                                        // linear.cpp
ENTRY_OF(int64_t, row_stride)(ParallelFor parallel_for, int64_t numbers, int32_t dtype);
ENTRY(attention)(ParallelFor parallel_for, const Plan* plan, const AttentionParams* params);                // attention.cpp
ENTRY(write_kv)(ParallelFor parallel_for, const Plan* plan, const WriteParams* params);
ENTRY(convolve)(ParallelFor parallel_for, const RecurrentStep* step, const ConvolutionParams* params, int32_t dtype);  // recurrent.cpp
ENTRY(recur)(ParallelFor parallel_for, const RecurrentStep* step, const RecurrenceParams* params, int32_t dtype);
ENTRY(scan)(ParallelFor parallel_for, const RecurrentStep* step, const ScanParams* params, int32_t dtype);
ENTRY(gate)(
    ParallelFor parallel_for, const void* gate, int64_t stride, void* x, int64_t x_stride, int64_t rows, const GateParams* p, int32_t dtype);
ENTRY(gated_norm)(
    ParallelFor parallel_for, const void* x, int64_t stride, const void* gate, int64_t gate_stride, void* out, int64_t out_stride,
    int64_t rows, const GatedNormParams* p, int32_t dtype);
