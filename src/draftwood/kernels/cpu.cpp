// The C interface of the CPU kernels. ops.py says what every function takes and returns.
//
// Compiled on the user's machine for its own instruction set (build.py), with
// -ffp-contract=off: a fused multiply-add is where it is written and nowhere else.
#include <omp.h>

#include "decoder.hpp"

#define DW_API extern "C" __attribute__((visibility("default")))

using namespace dw;

template <class F>
static void in_parallel(int threads, F f) {
#pragma omp parallel num_threads(threads)
    f(omp_get_thread_num(), omp_get_num_threads());
}

template <class F>
static void for_rows(int64_t rows, int threads, F f) {
    if (rows < 2) threads = 1;
    in_parallel(threads, [&](int t, int team) {
        const Range r = part(static_cast<int>(rows), t, team);
        for (int i = r.begin; i < r.end; ++i) f(i);
    });
}

DW_API int dw_abi() { return 1; }

DW_API const char* dw_isa() {
#if defined(DW_AVX512)
    return "avx512vnni";
#elif defined(DW_AVX2)
    return "avx2";
#else
    return "portable";
#endif
}

// x [rows, k] -> out [rows, p.n]
DW_API void dw_linear_int8(const float* x, int64_t rows, int64_t k, const Packed* p, int group,
                           float* out, int threads) {
    const Quantised q = quantised(arena(), static_cast<int>(rows), p->k, group);
    float* padded_rows = scratch(arena().wide, p->k == k ? 1 : rows * p->k);
    Barrier barrier;
    in_parallel(threads, [&](int t, int team) {
        barrier.join(team);
        const Range mine = part(static_cast<int>(rows), t, team);
        for (int64_t r = mine.begin; r < mine.end; ++r) {
            const float* row = x + r * k;
            if (p->k != k) {
                float* copy = padded_rows + r * p->k;
                std::memcpy(copy, row, sizeof(float) * k);
                std::fill(copy + k, copy + p->k, 0.0f);
                row = copy;
            }
            quantise_row(row, q, static_cast<int>(r));
        }
        barrier.wait();
        linear_part(*p, q, static_cast<int>(rows), t, team, [&](int r, int c, F16 y) {
            store_channels(y, out + static_cast<size_t>(r) * p->n, c, p->n);
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
    for_rows(rows, threads, [&](int64_t r) {
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
    for_rows(rows, threads, [&](int64_t r) {
        for (int64_t h = 0; h < heads; ++h)
            rope_head(x + r * row_stride + h * dim, cosine + r * (rotary / 2),
                      sine + r * (rotary / 2), static_cast<int>(rotary / 2));
    });
}

// gate_up [rows, 2 n] -> out [rows, n]
DW_API void dw_silu_mul(const float* gate_up, int64_t rows, int64_t n, float* out, int threads) {
    for_rows(rows, threads, [&](int64_t r) {
        const float* row = gate_up + 2 * r * n;
        silu_mul_row(row, row + n, out + r * n, static_cast<int>(n));
    });
}

DW_API void dw_top_k(const float* x, int64_t rows, int64_t n, int64_t stride, int k, float* values,
                     int64_t* indices, int threads) {
    for_rows(rows, threads, [&](int64_t r) {
        top_k_row(x + r * stride, n, k, values + r * k, indices + r * k);
    });
}

// q [rows of all segments, heads, dim] -> out, the same shape
DW_API void dw_attention(const AttentionShape* shape, const Segment* segments, int num_segments,
                         const float* q, int64_t q_stride, const float* k_plane,
                         const float* v_plane, int64_t slot_stride, float* out, int64_t out_stride,
                         int threads) {
    const AttentionPlan plan = plan_attention(*shape, segments, num_segments);
    const int pieces = for_pieces(plan, [](const Piece&, int) {});
    Arena& mem = arena();
    float* states = scratch(mem.states, plan.piece_floats * (plan.by_split ? pieces : 2 * threads));
    if (mem.spaces.size() < static_cast<size_t>(threads)) mem.spaces.resize(threads);
    Workspace* spaces = mem.spaces.data();
    const Planes kv{k_plane, v_plane, static_cast<size_t>(slot_stride)};
    in_parallel(threads, [&](int t, int team) {
        attend_part(plan, kv, q, q_stride, out, out_stride, states, pieces, t, team, spaces[t]);
    });
    in_parallel(threads,
                [&](int t, int team) { merge_part(plan, out, out_stride, states, t, team); });
}

DW_API void dw_forward(const Model* model, const Step* step, int threads) {
    Forward forward(*model, *step, threads);
    in_parallel(threads, [&](int t, int team) { forward.run(t, team); });
}
