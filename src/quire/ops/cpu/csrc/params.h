// The parameters that Python passes. quire/ops/native.py declares the same structures, field by field.
#pragma once

#include <cstdint>

#define QUIRE_EXPORT __attribute__((visibility("default")))

enum Dtype : int32_t { DTYPE_F32 = 0, DTYPE_F16 = 1, DTYPE_BF16 = 2, DTYPE_S8 = 3 };

// One step's metadata, as validated by Python.
struct StepParams {
    const int32_t* query_starts;  // [S + 1]
    const int32_t* context_lens;  // [S]
    const int32_t* block_tables;  // [S, table_stride]
    const int32_t* slots;         // [T]
    const int32_t* key_ends;      // [T], the keys before which each row attends, of a causal plan; null: its position + 1
    int32_t* nonfinite;           // [T], 0; becomes 1 for rows whose K or V is written and not finite
    int64_t table_stride;
    int32_t num_seqs;
    int32_t num_threads;
};

// The sizes and settings that are the same in all steps.
struct SpecParams {
    int32_t num_heads, num_kv_heads, head_dim, head_dim_v, block_size;
    int32_t causal;
    int32_t window;  // 0: none
    int32_t dtype, kv_dtype;  // of q and of the cache: the same, or that of the cache is S8
    int32_t item_rows;    // most rows of an item of attention, a multiple of 32
    int32_t memory_rows;  // number of rows whose computation takes as long as reading a key
    int32_t latent;       // 1: V is the first numbers of K, whose scale is v_scale; k_scale is that of the others
};

// A layer's cache; strides in elements.
struct CacheParams {
    void* k;         // [N, Hkv, B, D]
    void* v;         // [N, Hkv, B, Dv]
    float* k_scale;  // [N, Hkv, B], of S8; else null
    float* v_scale;  // [N, Hkv, B], of S8; else null
    int64_t k_block, k_head, k_slot;
    int64_t v_block, v_head, v_slot;
    int64_t k_scale_block, k_scale_head, k_scale_slot;
    int64_t v_scale_block, v_scale_head, v_scale_slot;
};

struct AttentionParams {
    CacheParams cache;
    const void* q;              // [T, Hq, D]
    void* out;                  // [T, Hq, Dv]
    float* lse;                 // [T, Hq], contiguous; null: not wanted
    const float* alibi_slopes;  // [Hq], or [S, Hq]; null: none
    const float* sinks;         // [Hq]; null: none
    int64_t q_token, q_head;    // strides, in elements
    int64_t out_token, out_head;
    int64_t slope_seq;  // from one sequence's slopes to the next one's; 0: all have the same
    float scale;
    float softcap;  // 0: none
    int32_t chunk;  // chunk length: a row attends to no key before the last multiple of it; 0: to all keys before the row
};

struct WriteParams {
    CacheParams cache;
    const void* k_new;  // [T, Hkv, D]
    const void* v_new;  // [T, Hkv, Dv]
    int64_t k_new_token, k_new_head;
    int64_t v_new_token, v_new_head;
};

struct LinearParams {
    const void* x;       // [T, in]
    const void* weight;  // strips
    const float* bias;   // [out]; null: none
    void* out;           // [T, out], of the weight's dtype or fp32
    float* copy;         // [T, lanes]: scratch for x as 32-bit lanes; unused if x has this layout already
    int64_t x_stride, out_stride;  // from row to row, in elements
    int64_t rows, in_size, out_size;
    int32_t dtype, out_dtype;  // dtype: of x, and of a weight that is not quantised
    int32_t threads;
    // Of a quantised weight, see linear_integers.h.
    int32_t bits;          // 4, 5, 6 or 8; 0: not quantised
    int32_t sub;           // inputs that share a sub-scale: 16 or 32; 0: no sub-scales
    int32_t zeros;         // 1: each group has a zero
    int32_t halves;        // 1: scales and minimums are fp16
    int32_t minimums;      // 1: each group has a minimum
    int32_t narrow;        // 1: floating-point numbers, see linear_narrow.h; of these fields, only bits applies then
    int64_t group;             // inputs that share a scale
    int64_t activation_group;  // inputs of x that share a scale
    const float* scales;   // [out], if each output has one scale; else null
    const int64_t* order;  // [in]: the input of x for each input of the weight; null: the same
};

// Destinations of the parts of GGUF blocks, contiguous for each block. Null: the format has no such part.
struct BlockParts {
    uint8_t* values;
    uint16_t* scales;
    uint16_t* minimums;
    int8_t* sub_scales;
    int8_t* sub_minimums;
};

void quire_read_row(int32_t kind, const uint8_t* blocks, int64_t in_size, const BlockParts& to);  // in blocks.cpp

// A weight that is rounded to integers, see round.cpp.
struct RoundParams {
    const void* weight;  // [rows, in_size]
    uint8_t* values;     // [rows, in_size]
    float* scales;       // [rows, groups]
    int64_t stride;      // of the weight, from row to row, in numbers
    int64_t rows, in_size;
    int64_t group;  // inputs that share a scale
    int32_t dtype, bits, threads;
};

// The indexer of sparse attention, see index.h. Strides in elements.
struct IndexParams {
    const void* q;             // [rows, heads, dim]
    const float* weights;      // [rows, heads]
    const void* keys;          // [N, 1, B, dim], of the dtype of q
    const int32_t* tables;     // [S, table_stride]
    const int64_t* sequences;  // [rows]: the table of each row
    const int64_t* counts;     // [rows]: the keys that it sees
    float* room;               // scratch: [rows, (dim + 1) * heads, rounded up to whole vectors]
    float* out;                // [rows, width]; -inf for keys that a row does not see
    int64_t key_block, key_slot, table_stride, rows, heads, dim, width, block_size;
    int32_t dtype;
};

// -------------------------------------------------------------------------- recurrent layers, see recurrent.h

struct RecurrentSizes {
    int64_t heads, k_heads, dim_k, dim_v;  // of the state; heads 0: no state
    int64_t width, taps;                   // of the convolution
};

// One step's metadata, as validated by Python.
struct RecurrentStep {
    RecurrentSizes sizes;
    const int32_t* query_starts;  // [S + 1]
    const int32_t* context_lens;  // [S]
    const int32_t* state_tables;  // [S, table_stride]
    const int32_t* row_tables;    // [S, table_stride]
    int32_t* nonfinite;           // [T], 0; becomes 1 for rows whose key, update or decay is not finite
    int64_t table_stride;
    int64_t num_seqs, num_rows;  // S, T
};

// A layer's state slots and row records, each contiguous. The last line has the strides between records, in elements.
struct RecurrentRecords {
    float* state;    // [Ns, Hv, Dk, Dv]
    void* tail;      // [Ns, K - 1, W]
    float* keys;     // [Nr, Hk, C, Dk]
    float* updates;  // [Nr, Hv, C, Dv]
    float* decays;   // [Nr, Hv, C]
    void* inputs;    // [Nr, C, W]
    int64_t state_record, tail_record, keys_record, updates_record, decays_record, inputs_record;
};

struct ConvolutionParams {
    RecurrentRecords cache;
    const float* weight;  // [K, W]
    const float* bias;    // [W]; null: none
    const void* x;        // [T, W]
    void* out;            // [T, W]
    int64_t x_stride, out_stride;  // from row to row
    int32_t silu;
};

// The gated delta rule with queries, keys, values and gates b, a; or, if `skip` is set, Mamba-2 with values, keys, queries and dt.
struct RecurrenceParams {
    RecurrentRecords cache;
    const float *decay_rate, *dt_bias, *skip;  // [Hv]; skip null: the delta rule
    const void* x;      // [T, 2 Hk Dk + Hv Dv]
    const void* gates;  // [T, 2 Hv], or [T, Hv]
    void* out;          // [T, Hv Dv]
    int64_t x_stride, gates_stride, out_stride;  // from row to row
    float dt_low, dt_high;
    float scale;  // of beta
    int32_t threads;
};

// ------------------------------------------------------------------------------------------- programs, see program.h

// Columns of a buffer, from `first` on.
struct Columns {
    int32_t buffer;  // -1: none
    int32_t first;
};

enum ScanRule : int32_t { SCAN_DELTA, SCAN_SELECTIVE, SCAN_LRU };

// A recurrence whose decay differs between the elements of a state, see scan.h.
struct ScanParams {
    RecurrentRecords cache;
    const float* rate;  // [Hv], or [Hv, Dk, Dv]
    const float* bias;  // of the gates: [Hv Dk], [Hv Dv], or with that of the side [2, Hv Dv]
    const float* skip;  // [Hv Dv]; null: none
    const void* x;      // [T, 2 Hk Dk + Hv Dv], or [T, Hv Dv]
    const void* gates;  // [T, Hv Dk], or [T, Hv Dv]
    const void* side;   // [T, Hv], [T, 2 Hk Dk], or [T, Hv Dv]
    void* out;          // [T, Hv Dv]
    int64_t x_stride, gates_stride, side_stride, out_stride;  // from row to row
    float scale;  // of beta
    float floor;  // the least log-decay, if negative; then it is a sigmoid
    int32_t rule, threads;
    Columns side_columns;  // in a program
};

enum OpKind : int32_t {
    OP_LINEAR, OP_NORM, OP_ROPE, OP_WRITE, OP_ATTENTION, OP_ACTIVATION, OP_MULTIPLY, OP_ADD, OP_COPY, OP_SCALE, OP_KEEP, OP_EXPERTS,
    OP_GATE, OP_GATED_NORM, OP_CONVOLUTION, OP_GATED_DELTA, OP_STATE_SPACE, OP_LORA, OP_GATHER, OP_SCAN
};

struct Op {
    int32_t kind;
    int32_t group;  // cache group, whose plan is used
    Columns x, y, out;
    void* params;  // the structure of this kind of operator
};

struct NormParams {
    const float* weight;  // [dim]
    const float* bias;    // [dim]; null: RMSNorm
    int64_t heads, dim;   // rows of x within a token
    float eps;
};

struct GatedNormParams {
    const float* weight;  // [heads * dim]
    int64_t heads, dim;   // rows of x within a token
    float eps;
    int32_t gate_first;
};

struct RopeParams {
    const float *cos, *sin;  // [length, half]
    int64_t length, half, q_heads, k_heads, head_dim;
};

// An element-wise operator.
struct EachParams {
    int64_t dim;
    float factor;
};

enum Function : int32_t { FUNCTION_SILU, FUNCTION_GELU, FUNCTION_GELU_TANH, FUNCTION_RELU, FUNCTION_RELU_SQUARED, FUNCTION_SIGMOID };

// `dim` numbers of a row times the sigmoid of `dim` gates, or of one gate for all of them.
struct GateParams {
    int64_t gates, dim;
};

// f(gate) * (up + offset) for `dim` gates and `dim` ups, or f of `dim` numbers.
struct ActivationParams {
    int64_t dim;
    int32_t function, gated;
    float slope;  // silu is x * sigmoid(slope * x)
    float limit;  // gates are clamped to at most limit, ups to -limit..limit; infinity: not clamped
    float offset;
};

// The rule by which a row's experts and their shares follow from the router's logits.
struct ChoiceParams {
    const float* bias;    // [E], added to the scores for the choice of experts; null: none
    const float* scales;  // [E], factors of the shares; null: none
    int64_t num_experts, num_chosen;
    int64_t groups, groups_chosen, group_best;
    int32_t sigmoid;       // 1: scores are the sigmoid of each logit; 0: the softmax of all
    int32_t renormalised;  // 1: shares are scores divided by the sum of the chosen experts' scores
    float epsilon;         // added to that sum
    float factor;          // multiplies the shares
};

// Columns that are split between the ranks of a tensor-parallel group, see exchange.h.
constexpr int MOST_RANKS = 8;
struct GatherParams {
    void* exchange;            // an Exchange
    int64_t sizes[MOST_RANKS]; // columns of each rank, by rank
};

// A mixture of E experts, with k chosen per row.
struct ExpertsParams {
    const LinearParams* router;   // H -> E, its results in fp32
    const LinearParams* mlp_in;   // [E]: H -> 2 I
    const LinearParams* mlp_out;  // [E]: I -> H
    ChoiceParams choice;
    ActivationParams activation;
    int64_t weighs_inputs;  // 1: a row's shares multiply its experts' inputs, not their results
    GatherParams inner_columns;  // split of I between the ranks; its exchange is null if this process has all
    // Scratch for T rows.
    float* logits;     // [T, E]
    float* scores;     // [T, E]
    uint64_t* heaps;   // [T, heap_size of the choice]
    int64_t* chosen;   // [T, k]
    float* shares;     // [T, k]
    int64_t* places;   // [T, k]: index of the row for that expert, among all T k
    float* gathered;   // [T k, lanes of H]: the rows, sorted by expert
    void* inner;       // [T k, 2 I or I]
    void* activated;   // [T k, row_stride of I]
    float* copy;       // [T k, lanes of I]; unused if `activated` has this layout already
    void* results;     // [T k, H]
};

// -------------------------------------------------------------------------------------- low-rank adapters, see lora.h

// An adapter's contribution to some columns of a linear's results.
struct LoraPart {
    const void* b;             // strips of [size, rank]
    int64_t first_rank, rank;  // range of the results of the adapter's A
    int64_t first, size;       // columns
    float scale;
};

// An adapter's part in one linear.
struct LoraSlot {
    const void* a;  // strips of [rank, in]: A of all parts, one part after the other; null: no adapter
    const LoraPart* parts;
    int64_t rank, num_parts;
};

struct LoraParams {
    const LoraSlot* slots;
    const void* x;  // [T, in]
    void* out;      // [T, out]: the adapters' results are added to it
    float* room;    // scratch for T rows, see Lora::room
    int64_t x_stride, out_stride;  // from row to row
    int64_t in_size, most_rank;    // most_rank: the largest rank of any slot
};

constexpr int MAX_BUFFERS = 32;

struct ProgramParams {
    const Op* ops;
    int64_t num_ops;
    double* seconds;  // [num_ops]: the duration of each operator; null: not measured
    const int64_t* positions;  // [rows]
    const void* const* plans;  // [groups]: a Plan, or a RecurrentStep
    void* buffers[MAX_BUFFERS];
    int64_t strides[MAX_BUFFERS];  // from row to row, in numbers
    int64_t rows;
    const int64_t* kept;  // [num_kept], ascending: the rows that remain after OP_KEEP
    int64_t num_kept;     // -1: all rows remain
    const int32_t* lora_slots;  // [rows]: each row's adapter, -1: none; null: no row has an adapter
    int32_t dtype, threads;
};

// Draft tokens of a head, one after the other, see chain.h.
struct ChainParams {
    // Of its layers: buffer 0 is their input [T, 2 H], buffer 1 their result [T, H]. R rows are kept: the last of each of the first R
    // sequences. Its numbers of rows and its positions change.
    ProgramParams* program;
    const LinearParams* embedding;  // packed; null: `rows` are the embeddings
    const char* rows;               // [V, H]
    const LinearParams* head;  // the output projection, of buffer 1, to fp32 logits
    const int64_t* targets;    // the token of each logit; null: its number
    const void* const* plans;  // [num_plans]: each QuirePlan, and the step of its last update, which changes
    StepParams* const* steps;  // [num_plans]
    const int32_t* block_sizes;  // [num_plans]
    int64_t num_plans;
    const int64_t* counts;  // [R], descending: draft tokens of each sequence, one or more
    int64_t* tokens;        // [counts[0], R]: the draft tokens; undefined after a sequence's count
};
