// The C interface of the CPU kernels. ops.py says what every function takes and returns.
//
// Compiled on the user's machine for its own instruction set (build.py), with
// -ffp-contract=off: a fused multiply-add is where it is written and nowhere else.
#include "decoder.hpp"
#include "noise.hpp"

#define DW_API extern "C" __attribute__((visibility("default")))

using namespace dw;

// Multiply-adds that are worth a thread of their own: waking one takes some microseconds, and much
// longer on a busy machine.
static int64_t grain = 400000;

static int threads_for(int64_t work, int threads) {
    return static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(threads, work / grain)));
}

// A layer's weights are read once and used for every row, eight rows in the time of reading them.
static int64_t linear_work(const Packed& p, int64_t rows) {
    return static_cast<int64_t>(p.n) * p.k * (8 + rows) / 4;
}

static int64_t attention_work(const AttentionPlan& plan) {
    int64_t work = 0;
    for (const Piece& piece : plan.pieces)
        work += static_cast<int64_t>(kSplit) * plan.shape.dim * (4 + num_queries(plan, piece)) *
                (plan.by_split ? 1 : piece.splits);
    return work;
}

template <class F>
static void for_rows(int64_t rows, int64_t width, int threads, F f) {
    in_parallel(threads_for(rows * width * 4, threads), 1,
                [&](Member team) { team.each(static_cast<int>(rows), f); });
}

DW_API int dw_abi() { return 1; }

// For tests: threads are used for this much work and more.
DW_API void dw_set_grain(int64_t work) { grain = work; }

DW_API const char* dw_isa() {
#if defined(DW_AVX512)
    return "avx512vnni";
#elif defined(DW_AVXVNNI)
    return "avxvnni";
#elif defined(DW_AVX2)
    return "avx2";
#else
    return "portable";
#endif
}

// x [rows, k] -> out [rows, p.n]
DW_API void dw_linear(const float* x, int64_t rows, int64_t k, const Packed* p, int group,
                           float* out, int threads) {
    const Quantised q = quantised(arena(), static_cast<int>(rows), p->k, group);
    float* padded_rows = scratch(arena().wide, p->k == k ? 1 : rows * p->k);
    in_parallel(threads_for(linear_work(*p, rows), threads), 2, [&](Member team) {
        team.each(static_cast<int>(rows), [&](int64_t r) {
            const float* row = x + r * k;
            if (p->k != k) {
                float* copy = padded_rows + r * p->k;
                std::memcpy(copy, row, sizeof(float) * k);
                std::fill(copy + k, copy + p->k, 0.0f);
                row = copy;
            }
            quantise_row(row, q, static_cast<int>(r));
        });
        const int parts = team.pieces(num_tiles(*p));
        team.each(parts, [&](int nth) {
            linear_part(*p, q, static_cast<int>(rows), nth, parts, [&](int r, int c, F16 y) {
                store_channels(y, out + static_cast<size_t>(r) * p->n, c, p->n);
            });
        });
    });
}

DW_API void dw_embedding(const int64_t* ids, int64_t rows, const Packed* p, int64_t k, int group,
                         float* out) {
    for (int64_t r = 0; r < rows; ++r)
        embedding_row(*p, ids[r], group, out + r * k, static_cast<int>(k));
}

// y = x + residual (kept in `residual`) when there is one; out = norm(y) * weight
DW_API void dw_rms_norm(const float* x, float* residual, const float* weight, float eps,
                        int64_t rows, int64_t n, float* out, int threads) {
    for_rows(rows, n, threads, [&](int64_t r) {
        const float* row = x + r * n;
        if (residual) {
            float* sum_row = residual + r * n;
            for (int64_t i = 0; i < n; ++i) sum_row[i] += row[i];
            row = sum_row;
        }
        rms_norm_row(row, weight, out + r * n, static_cast<int>(n), eps);
    });
}

// x [rows, heads, dim], rotated in place
DW_API void dw_rope(float* x, const float* cosine, const float* sine, int64_t rows, int64_t heads,
                    int64_t dim, int64_t rotary, int64_t row_stride, int threads) {
    for_rows(rows, heads * dim, threads, [&](int64_t r) {
        for (int64_t h = 0; h < heads; ++h)
            rope_head(x + r * row_stride + h * dim, cosine + r * (rotary / 2),
                      sine + r * (rotary / 2), static_cast<int>(rotary / 2));
    });
}

// gate_up [rows, 2 n] -> out [rows, n]
DW_API void dw_silu_mul(const float* gate_up, int64_t rows, int64_t n, float* out, int threads) {
    for_rows(rows, 4 * n, threads, [&](int64_t r) {
        const float* row = gate_up + 2 * r * n;
        silu_mul_row(row, row + n, out + r * n, static_cast<int>(n));
    });
}

DW_API void dw_top_k(const float* x, int64_t rows, int64_t n, int64_t stride, int k, float* values,
                     int64_t* indices, int threads) {
    for_rows(rows, n / 64, threads, [&](int64_t r) {
        top_k_row(x + r * stride, n, k, values + r * k, indices + r * k);
    });
}

// The same, with probabilities in the place of values.
DW_API void dw_top_shares(const float* x, int64_t rows, int64_t n, int64_t stride, int k,
                          float* shares, int64_t* indices, int threads) {
    for_rows(rows, n / 32, threads, [&](int64_t r) {
        float* out = shares + r * k;
        top_k_row(x + r * stride, n, k, out, indices + r * k);
        const float whole = log_sum_row(x + r * stride, n, out[0], 1.0f);
        for (int i = 0; i < k; ++i) out[i] = std::exp(out[i] - whole);
    });
}

// The k tokens of one row with the highest x / temperature + noise, best first.
DW_API void dw_noisy_top(const float* x, int64_t n, float temperature, uint64_t key, int k,
                         double* keys, int64_t* tokens) {
    noisy_top_row(x, n, temperature, key, k, keys, tokens);
}

// log(sum(exp(x / temperature))) of one row whose largest value is `top`
DW_API double dw_log_sum(const float* x, int64_t n, float temperature, float top) {
    return log_sum_row(x, n, top, temperature);
}

// q [rows of all segments, heads, dim] -> out, the same shape
DW_API void dw_attention(const AttentionShape* shape, const Segment* segments, int num_segments,
                         const float* q, int64_t q_stride, const float* k_plane,
                         const float* v_plane, int64_t slot_stride, float* out, int64_t out_stride,
                         int threads) {
    const AttentionPlan plan = plan_attention(*shape, segments, num_segments);
    Arena& mem = arena();
    float* states = scratch(mem.states, plan_floats(plan, threads));
    if (mem.spaces.size() < static_cast<size_t>(threads)) mem.spaces.resize(threads);
    Workspace* spaces = mem.spaces.data();
    const Planes kv{k_plane, v_plane, static_cast<size_t>(slot_stride)};
    in_parallel(threads_for(attention_work(plan), threads), 2, [&](Member team) {
        team.each(static_cast<int>(plan.pieces.size()), [&](int n) {
            attend_piece(plan, n, kv, q, q_stride, out, out_stride, states, team.thread,
                         spaces[team.thread]);
        });
        team.each(static_cast<int>(plan.divided.size()),
                  [&](int n) { merge_piece(plan, n, out, out_stride, states); });
    });
}

DW_API void dw_forward(const Model* model, const Step* step, int threads) {
    // A layer has four matrices and as many stages between them to meet at.
    int64_t work = 0;
    for (int i = 0; i < model->num_layers; ++i)
        work += linear_work(model->layers[i].gate_up, step->rows) / model->num_layers;
    threads = threads_for(work, threads);
    Forward forward(*model, *step, threads);
    in_parallel(threads, forward.num_stages(), [&](Member team) { forward.run(team); });
}
