// The draft tokens of a head in one call: compute its rows, choose a token, compute its row, and so on. Include this file after program.h.
#pragma once

#include "program.h"

struct QuirePlan;
extern "C" int32_t quire_plan_update(QuirePlan* plan, const StepParams* step);                                       // plan.cpp
ENTRY_OF(int64_t, unpack)(ParallelFor parallel_for, const LinearParams* p, const int64_t* places, int64_t count, void* to);  // linear.cpp

namespace {

struct Chain {
    ParallelFor parallel_for;
    const ChainParams& p;
    ProgramParams& program = *p.program;
    int64_t size = program.dtype == DTYPE_F32 ? 4 : 2;
    int64_t hidden = program.strides[1] * size, joined = program.strides[0] * size;  // bytes of a row

    // Write the most likely token of each row.
    void choose(int64_t rows, int64_t* tokens) const {
        LinearParams call = *p.head;
        call.x = program.buffers[1], call.x_stride = program.strides[1], call.rows = rows, call.threads = program.threads;
        QUIRE_NAME(linear, QUIRE_ISA)(parallel_for, &call);
        const float* logits = (const float*)call.out;
        for (int64_t i = 0; i < rows; i++, logits += call.out_stride) {
            const int64_t best = largest(logits, call.out_size);
            tokens[i] = p.targets ? p.targets[best] : best;
        }
    }

    // Return the index of the first of the largest numbers; 0 if all are NaN.
    static int64_t largest(const float* numbers, int64_t count) {
        V most = splat(numbers[0]);
        int64_t k = 0;
        for (; k + W <= count; k += W) most = larger(most, load(numbers + k));
        float best = reduce_max(most);
        for (; k < count; k++) best = numbers[k] > best ? numbers[k] : best;
        for (k = 0; k < count; k++)
            if (numbers[k] == best) return k;
        return 0;
    }

    // Join the embeddings of these tokens and the last results.
    void join(int64_t rows, const int64_t* tokens) const {
        const int64_t first = joined - hidden;
        for (int64_t i = 0; i < rows; i++) {
            char* to = (char*)program.buffers[0] + i * joined;
            if (p.embedding) QUIRE_NAME(unpack, QUIRE_ISA)(parallel_for, p.embedding, tokens + i, 1, to);
            else memcpy(to, p.rows + tokens[i] * first, (size_t)first);
            memcpy(to + first, (const char*)program.buffers[1] + i * hidden, (size_t)hidden);
        }
    }

    // Advance each sequence by a row. Return false if there is no memory for a plan.
    bool advance(int64_t rows) const {
        int64_t* positions = const_cast<int64_t*>(program.positions);
        for (int64_t i = 0; i < rows; i++) positions[i]++;
        for (int64_t g = 0; g < p.num_plans; g++) {
            StepParams& step = *p.steps[g];
            step.num_seqs = (int32_t)rows;
            for (int64_t i = 0; i < rows; i++) {
                const_cast<int32_t*>(step.query_starts)[i + 1] = (int32_t)(i + 1);
                const int64_t at = positions[i], block = step.block_tables[i * step.table_stride + at / p.block_sizes[g]];
                const_cast<int32_t*>(step.context_lens)[i] = (int32_t)(at + 1);
                const_cast<int32_t*>(step.slots)[i] = (int32_t)(block * p.block_sizes[g] + at % p.block_sizes[g]);
            }
            if (quire_plan_update((QuirePlan*)p.plans[g], &step)) return false;
        }
        return true;
    }

    // Compute the rows whose results are chosen from next. Return -1, or the operator that failed.
    int64_t compute(int64_t rows) const {
        program.rows = rows;
        return run_program(parallel_for, program);
    }

    int64_t run() const {
        const int64_t most = p.counts[0], R = program.num_kept;
        int64_t failed = compute(program.rows);
        for (int64_t i = 0; i < R; i++) const_cast<int64_t*>(program.positions)[i] = program.positions[program.kept[i]];
        program.num_kept = -1;
        for (int64_t k = 0, rows = R; failed < 0; k++) {
            int64_t* tokens = p.tokens + k * R;
            choose(rows, tokens);
            if (k + 1 == most) break;
            while (p.counts[rows - 1] <= k + 1) rows--;
            join(rows, tokens);
            if (!advance(rows)) return -2;
            failed = compute(rows);
        }
        return failed;
    }
};

}  // namespace

// Write the draft tokens and return -1; or, if memory is short, -2; or the index of an operator that failed, as `program` does.
ENTRY_OF(int64_t, chain)(ParallelFor parallel_for, const ChainParams* params) {
    int64_t failed = 0;
    Team::run(parallel_for, params->program->threads, [&](ParallelFor team_for) { failed = Chain{team_for, *params}.run(); });
    return failed;
}
