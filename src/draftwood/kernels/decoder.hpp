// A whole forward pass of a Llama-shaped decoder (Llama, Qwen2, Qwen3 without experts) in one
// call: one team of threads walks through the layers and meets at barriers between the stages.
// Every stage is the same code as the single operators, so the bits are the same too.
#pragma once

#include <sched.h>

#include <atomic>
#include <vector>

#include "attention.hpp"

namespace dw {

// Spins a little, then lets others run: a core may be busy with another program.
class Barrier {
  public:
    // Every thread says how many there are before its first wait; all say the same.
    void join(int threads) { threads_.store(threads, std::memory_order_relaxed); }
    void wait() {
        const int turn = turn_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 ==
            threads_.load(std::memory_order_relaxed)) {
            arrived_.store(0, std::memory_order_relaxed);
            turn_.store(turn + 1, std::memory_order_release);
            return;
        }
        for (int spin = 0; turn_.load(std::memory_order_acquire) == turn; ++spin) {
            if (spin > 4000) {
                sched_yield();
                continue;
            }
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
        }
    }

  private:
    std::atomic<int> threads_{1};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int> turn_{0};
};

// The structs below are mirrored in ops.py.
struct Layer {
    const float* attention_norm;
    const float* mlp_norm;
    const float* q_norm;  // [dim] or null
    const float* k_norm;
    Packed qkv, o, gate_up, down;
};

struct Model {
    const Layer* layers;
    const float* norm;
    Packed embedding, head;
    int32_t num_layers, hidden, inter, group;
    AttentionShape attention;
    float eps;
};

struct Step {
    const int64_t* ids;       // [rows]
    const float* cosine;      // [rows, rotary / 2]
    const float* sine;
    const Segment* segments;
    float* const* k_planes;   // [layers] -> [slots, kv_heads, dim]
    float* const* v_planes;
    const int32_t* wanted;    // [num_wanted] rows whose logits are wanted
    float* logits;            // [num_wanted, vocabulary]
    float* hidden;            // [rows, hidden] behind the final norm, or null
    int32_t rows, num_segments, num_wanted, rotary;
    int64_t slot_stride;
};

// Memory of a step; grows, never shrinks, belongs to the calling thread.
template <class T>
static T* scratch(std::vector<T>& v, size_t n) {
    if (v.size() < n + 16) v.resize(n + 16);
    return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(v.data()) + 63) / 64 * 64);
}
struct Arena {
    std::vector<float> x, normed, wide, context, middle, states, scales;
    std::vector<int32_t> fixes;
    std::vector<act_t> acts;
    std::vector<Workspace> spaces;
};
static Arena& arena() {
    static thread_local Arena a;
    return a;
}

static Quantised quantised(Arena& a, int rows, int k, int group) {
    const int groups = ceil_div(k, group);
    return {scratch(a.acts, static_cast<size_t>(rows) * k + 64),
            scratch(a.scales, static_cast<size_t>(rows) * groups + 16),
            scratch(a.fixes, static_cast<size_t>(rows) * groups + 16), k, group, groups};
}

class Forward {
  public:
    Forward(const Model& m, const Step& s, int threads)
        : m_(m), s_(s) {
        const AttentionShape& a = m.attention;
        q_width_ = a.heads * a.dim;
        kv_width_ = a.kv_heads * a.dim;
        wide_ = q_width_ + 2 * kv_width_;
        Arena& mem = arena();
        const size_t rows = s.rows;
        x_ = scratch(mem.x, rows * m.hidden + 16);
        qkv_ = scratch(mem.wide, rows * wide_ + 16);
        normed_ = scratch(mem.normed, rows * m.hidden + 16);
        context_ = scratch(mem.context, rows * q_width_ + 16);
        middle_ = scratch(mem.middle, rows * m.inter + 16);
        const int widest = std::max(std::max(m.hidden, m.inter), q_width_);
        acts_ = quantised(mem, s.rows, widest, m.group);
        plan_ = plan_attention(a, s.segments, s.num_segments);
        pieces_ = for_pieces(plan_, [](const Piece&, int) {});
        states_ = scratch(mem.states, plan_.piece_floats * (plan_.by_split ? pieces_ : 2 * threads));
        if (mem.spaces.size() < static_cast<size_t>(threads)) mem.spaces.resize(threads);
        spaces_ = mem.spaces.data();
    }

    // The work of thread `t` of a team of `threads`, at most as many as the constructor was told.
    void run(int t, int threads) {
        barrier_.join(threads);
        const Range rows = part(s_.rows, t, threads);
        for (int r = rows.begin; r < rows.end; ++r)
            embedding_row(m_.embedding, s_.ids[r], m_.group, x_ + at(r, m_.hidden), m_.hidden);
        for (int i = 0; i < m_.num_layers; ++i) layer(i, t, threads, rows);
        head(t, threads);
    }

  private:
    static size_t at(int row, int width) { return static_cast<size_t>(row) * width; }

    Quantised acts(int k) const {
        Quantised q = acts_;
        q.k = k;
        q.groups = ceil_div(k, q.group);
        return q;
    }

    void norm(const float* weight, Range rows) {
        const Quantised q = acts(m_.hidden);
        for (int r = rows.begin; r < rows.end; ++r) {
            float* y = normed_ + at(r, m_.hidden);
            rms_norm_row(x_ + at(r, m_.hidden), weight, y, m_.hidden, m_.eps);
            quantise_row(y, q, r);
        }
    }

    void layer(int i, int t, int threads, Range rows) {
        const Layer& l = m_.layers[i];
        norm(l.attention_norm, rows);
        barrier_.wait();
        linear_part(l.qkv, acts(m_.hidden), s_.rows, t, threads, [&](int r, int c, F16 y) {
            store_channels(y, qkv_ + at(r, wide_), c, wide_);
        });
        barrier_.wait();
        place(i, rows);
        barrier_.wait();
        const Planes kv{s_.k_planes[i], s_.v_planes[i], static_cast<size_t>(s_.slot_stride)};
        attend_part(plan_, kv, qkv_, wide_, context_, q_width_, states_, pieces_, t, threads,
                    spaces_[t]);
        barrier_.wait();
        if (plan_.by_split) {
            merge_part(plan_, context_, q_width_, states_, t, threads);
            barrier_.wait();
        }
        for (int r = rows.begin; r < rows.end; ++r)
            quantise_row(context_ + at(r, q_width_), acts(q_width_), r);
        barrier_.wait();
        add_linear(l.o, q_width_, t, threads);
        barrier_.wait();
        norm(l.mlp_norm, rows);
        barrier_.wait();
        gate_up(l.gate_up, t, threads);
        barrier_.wait();
        for (int r = rows.begin; r < rows.end; ++r)
            quantise_row(middle_ + at(r, m_.inter), acts(m_.inter), r);
        barrier_.wait();
        add_linear(l.down, m_.inter, t, threads);
        barrier_.wait();
    }

    // Rotates queries and keys and puts keys and values into their slots.
    void place(int i, Range rows) {
        const Layer& l = m_.layers[i];
        const AttentionShape& a = m_.attention;
        const int half = s_.rotary / 2;
        for (int n = 0; n < s_.num_segments; ++n) {
            const Segment& seg = s_.segments[n];
            const int begin = std::max(rows.begin, seg.row0);
            const int end = std::min(rows.end, seg.row0 + seg.rows);
            for (int r = begin; r < end; ++r) {
                float* x = qkv_ + at(r, wide_);
                for (int h = 0; h < a.heads + a.kv_heads; ++h) {
                    float* head = x + h * a.dim;
                    const float* weight = h < a.heads ? l.q_norm : l.k_norm;
                    if (weight) rms_norm_row(head, weight, head, a.dim, m_.eps);
                    rope_head(head, s_.cosine + at(r, half), s_.sine + at(r, half), half);
                }
                const size_t slot = own_slot(seg, r - seg.row0) * s_.slot_stride;
                std::memcpy(s_.k_planes[i] + slot, x + q_width_, sizeof(float) * kv_width_);
                std::memcpy(s_.v_planes[i] + slot, x + q_width_ + kv_width_,
                            sizeof(float) * kv_width_);
            }
        }
    }

    void add_linear(const Packed& p, int k, int t, int threads) {
        linear_part(p, acts(k), s_.rows, t, threads, [&](int r, int c, F16 y) {
            float* x = x_ + at(r, m_.hidden);
            store_channels(load_some(x + c, m_.hidden - c) + y, x, c, m_.hidden);
        });
    }

    void gate_up(const Packed& p, int t, int threads) {
        linear_pairs_part(p, acts(m_.hidden), s_.rows, t, threads,
                          [&](int r, int c, F16 gate, F16 up) {
                              store_channels(silu_mul(gate, up), middle_ + at(r, m_.inter), c,
                                             m_.inter);
                          });
    }

    void head(int t, int threads) {
        const Range wanted = part(s_.num_wanted, t, threads);
        const Quantised q = acts(m_.hidden);
        for (int i = wanted.begin; i < wanted.end; ++i) {
            float* y = normed_ + at(i, m_.hidden);
            rms_norm_row(x_ + at(s_.wanted[i], m_.hidden), m_.norm, y, m_.hidden, m_.eps);
            quantise_row(y, q, i);
        }
        if (s_.hidden) {
            const Range rows = part(s_.rows, t, threads);
            for (int r = rows.begin; r < rows.end; ++r)
                rms_norm_row(x_ + at(r, m_.hidden), m_.norm, s_.hidden + at(r, m_.hidden),
                             m_.hidden, m_.eps);
        }
        barrier_.wait();
        const int vocabulary = m_.head.n;
        linear_part(m_.head, q, s_.num_wanted, t, threads, [&](int r, int c, F16 y) {
            store_channels(y, s_.logits + at(r, vocabulary), c, vocabulary);
        });
    }

    const Model& m_;
    const Step& s_;
    Barrier barrier_;
    int q_width_, kv_width_, wide_, pieces_;
    float *x_, *normed_, *qkv_, *context_, *middle_, *states_;
    Quantised acts_;
    AttentionPlan plan_;
    Workspace* spaces_;
};

}  // namespace dw
