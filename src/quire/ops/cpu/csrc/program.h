// All layers of a decoder in one call: a list of operators on numbered buffers, written once for a model.
//
// An operator does the same as the entry point of its name. From step to step, only the number of rows, the addresses of the buffers,
// and the attention plans change. Include this file after the entry points.
#pragma once

#include <chrono>

#include "entries.h"
#include "experts.h"
#include "gather.h"
#include "team.h"

namespace {

struct Program {
    ParallelFor parallel_for;
    const ProgramParams& p;
    int64_t rows = p.rows;  // number of rows; OP_KEEP reduces it
    LoraRows lora_rows{p.lora_slots, p.rows};  // of the current rows

    int64_t size() const { return p.dtype == DTYPE_F32 ? 4 : 2; }
    void* at(const Columns& c) const { return c.buffer < 0 ? nullptr : (char*)p.buffers[c.buffer] + c.first * size(); }
    int64_t stride(const Columns& c) const { return c.buffer < 0 ? 0 : p.strides[c.buffer]; }

    void run(const Op& op, const LinearParams& linear) const {
        LinearParams call = linear;
        call.x = at(op.x), call.x_stride = stride(op.x), call.out = at(op.out), call.out_stride = stride(op.out);
        call.rows = rows, call.threads = p.threads;
        QUIRE_NAME(linear, QUIRE_ISA)(parallel_for, &call);
    }

    void run(const Op& op, const NormParams& norm) const {
        const int64_t all = rows * norm.heads;
        if (norm.bias)
            QUIRE_NAME(layer_norm, QUIRE_ISA)(parallel_for, at(op.x), stride(op.x), norm.heads, norm.dim, at(op.y), stride(op.y),
                                              norm.weight, norm.bias, at(op.out), stride(op.out), all, norm.dim, norm.eps, p.dtype);
        else
            QUIRE_NAME(rms_norm, QUIRE_ISA)(parallel_for, at(op.x), stride(op.x), norm.heads, norm.dim, at(op.y), stride(op.y),
                                            norm.weight, at(op.out), stride(op.out), all, norm.dim, norm.eps, p.dtype);
    }

    bool run(const Op& op, const RopeParams& r) const {
        return QUIRE_NAME(rope, QUIRE_ISA)(parallel_for, at(op.x), stride(op.x), r.q_heads, r.head_dim, at(op.y), stride(op.y),
                                           r.k_heads, r.head_dim, p.positions, r.cos, r.sin, rows, r.length, r.half, p.dtype) < 0;
    }

    const Plan* plan(const Op& op) const { return (const Plan*)p.plans[op.group]; }
    const RecurrentStep* step(const Op& op) const { return (const RecurrentStep*)p.plans[op.group]; }

    void run(const Op& op, const WriteParams& write) const {
        const SpecParams& spec = plan(op)->spec;
        WriteParams call = write;
        call.k_new = at(op.x), call.k_new_token = stride(op.x), call.k_new_head = spec.head_dim;
        call.v_new = at(op.y), call.v_new_token = stride(op.y), call.v_new_head = spec.head_dim_v;
        QUIRE_NAME(write_kv, QUIRE_ISA)(parallel_for, plan(op), &call);
    }

    void run(const Op& op, const AttentionParams& attention) const {
        const SpecParams& spec = plan(op)->spec;
        AttentionParams call = attention;
        call.q = at(op.x), call.q_token = stride(op.x), call.q_head = spec.head_dim;
        call.out = at(op.out), call.out_token = stride(op.out), call.out_head = spec.head_dim_v;
        QUIRE_NAME(attention, QUIRE_ISA)(parallel_for, plan(op), &call);
    }

    template <class F>
    void combine(const Op& op, const EachParams& each, const F& f) const {
        with_element(p.dtype, [&](auto element) {
            using E = decltype(element);
            combine_rows<E>(parallel_for, at(op.x), stride(op.x), at(op.out), stride(op.out), rows, each.dim, f);
        });
    }

    void run(const Op& op, const ActivationParams& activation) const {
        activate_rows(parallel_for, at(op.x), stride(op.x), at(op.out), stride(op.out), rows, activation, p.dtype);
    }

    bool run(const Op& op, const ExpertsParams& e) const {
        return Experts{parallel_for, e, rows, p.threads, p.dtype}.run(
            at(op.x), stride(op.x), at(op.y), stride(op.y), at(op.out), stride(op.out));
    }

    bool run(const Op& op, const GatherParams& gather) const {
        return gather_rows(parallel_for, gather, size(), rows, (const char*)at(op.x), stride(op.x), (char*)at(op.out), stride(op.out));
    }

    void run(const Op& op, const GatedNormParams& norm) const {
        QUIRE_NAME(gated_norm, QUIRE_ISA)(parallel_for, at(op.x), stride(op.x), at(op.y), stride(op.y), at(op.out), stride(op.out), rows,
                                          &norm, p.dtype);
    }

    void run(const Op& op, const ConvolutionParams& convolution) const {
        ConvolutionParams call = convolution;
        call.x = at(op.x), call.x_stride = stride(op.x), call.out = at(op.out), call.out_stride = stride(op.out);
        QUIRE_NAME(convolve, QUIRE_ISA)(parallel_for, step(op), &call, p.dtype);
    }

    void run(const Op& op, const RecurrenceParams& recurrence) const {
        RecurrenceParams call = recurrence;
        call.x = at(op.x), call.x_stride = stride(op.x), call.gates = at(op.y), call.gates_stride = stride(op.y);
        call.out = at(op.out), call.out_stride = stride(op.out), call.threads = p.threads;
        QUIRE_NAME(recur, QUIRE_ISA)(parallel_for, step(op), &call, p.dtype);
    }

    void run(const Op& op, const ScanParams& scan) const {
        ScanParams call = scan;
        call.x = at(op.x), call.x_stride = stride(op.x), call.gates = at(op.y), call.gates_stride = stride(op.y);
        call.side = at(scan.side_columns), call.side_stride = stride(scan.side_columns);
        call.out = at(op.out), call.out_stride = stride(op.out), call.threads = p.threads;
        QUIRE_NAME(scan, QUIRE_ISA)(parallel_for, step(op), &call, p.dtype);
    }

    void run(const Op& op, const LoraParams& lora) const {
        LoraParams call = lora;
        call.x = at(op.x), call.x_stride = stride(op.x), call.out = at(op.out), call.out_stride = stride(op.out);
        with_vector_kind(p.dtype, [&]<class K>() { Lora<K>{call, lora_rows}.run(parallel_for); });
    }

    // Move the kept rows to the front. Return false if one of them does not exist.
    bool keep(const Op& op) {
        if (p.num_kept < 0) return true;
        for (int64_t i = 0; i < p.num_kept; i++)
            if (p.kept[i] >= rows || p.kept[i] < (i ? p.kept[i - 1] + 1 : 0)) return false;
        for (const Columns& c : {op.x, op.y, op.out}) {
            if (c.buffer < 0) continue;
            const int64_t bytes = stride(c) * size();
            char* data = (char*)p.buffers[c.buffer];
            for (int64_t i = 0; i < p.num_kept; i++) memmove(data + i * bytes, data + p.kept[i] * bytes, (size_t)bytes);
        }
        rows = p.num_kept;
        lora_rows = LoraRows(p.lora_slots, rows, p.kept);
        return true;
    }

    // Run an operator. Return false if it failed, see quire_program.
    bool run(const Op& op) {
        const EachParams* each = (const EachParams*)op.params;
        switch (op.kind) {
            case OP_LINEAR: run(op, *(const LinearParams*)op.params); break;
            case OP_NORM: run(op, *(const NormParams*)op.params); break;
            case OP_ROPE: return run(op, *(const RopeParams*)op.params);
            case OP_WRITE: run(op, *(const WriteParams*)op.params); break;
            case OP_ATTENTION: run(op, *(const AttentionParams*)op.params); break;
            case OP_ACTIVATION: run(op, *(const ActivationParams*)op.params); break;
            case OP_MULTIPLY: combine(op, *each, [](V out, V x) { return out * x; }); break;
            case OP_ADD: combine(op, *each, [](V out, V x) { return out + x; }); break;
            case OP_COPY: combine(op, *each, [](V, V x) { return x; }); break;
            case OP_SCALE: combine(op, *each, [&](V, V x) { return x * each->factor; }); break;
            case OP_KEEP: return keep(op);
            case OP_EXPERTS: return run(op, *(const ExpertsParams*)op.params);
            case OP_GATE:
                QUIRE_NAME(gate, QUIRE_ISA)(parallel_for, at(op.x), stride(op.x), at(op.out), stride(op.out), rows, (const GateParams*)op.params, p.dtype);
                break;
            case OP_GATED_NORM: run(op, *(const GatedNormParams*)op.params); break;
            case OP_CONVOLUTION: run(op, *(const ConvolutionParams*)op.params); break;
            case OP_GATED_DELTA:
            case OP_STATE_SPACE: run(op, *(const RecurrenceParams*)op.params); break;
            case OP_SCAN: run(op, *(const ScanParams*)op.params); break;
            case OP_GATHER: return run(op, *(const GatherParams*)op.params);
            case OP_LORA: run(op, *(const LoraParams*)op.params); break;
        }
        return true;
    }
};

// Run all operators in order, on the threads of `team_for`, and return -1. If one of them fails, stop and return its index.
static int64_t run_program(ParallelFor team_for, const ProgramParams& p) {
    using Clock = std::chrono::steady_clock;
    Program program{team_for, p};
    for (int64_t i = 0; i < p.num_ops; i++) {
        const Clock::time_point start = p.seconds ? Clock::now() : Clock::time_point();
        if (!program.run(p.ops[i])) return i;
        if (p.seconds) p.seconds[i] = std::chrono::duration<double>(Clock::now() - start).count();
    }
    return -1;
}

}  // namespace

// Run all operators in order and return -1. If an operator finds a position beyond its table, a row beyond the last one, or that a rank
// of the group is lost, stop and return its index.
ENTRY_OF(int64_t, program)(ParallelFor parallel_for, const ProgramParams* params) {
    int64_t failed = 0;  // stays 0 if the function below is not called
    Team::run(parallel_for, params->threads, [&](ParallelFor team_for) { failed = run_program(team_for, *params); });
    return failed;
}
