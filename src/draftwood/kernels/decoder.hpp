// A whole forward pass of a Llama-shaped decoder (Llama, Qwen2, Qwen3 without experts) in one
// call: one team of threads walks through the layers and meets at barriers between the stages.
// Every stage is the same code as the single operators, so the bits are the same too.
#pragma once

#include <vector>

#include "attention_plan.hpp"
#include "team.hpp"

namespace dw {

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
        : m_(m), s_(s), plan_(plan_attention(m.attention, s.segments, s.num_segments)) {
        const AttentionShape& a = m.attention;
        q_width_ = a.heads * a.dim;
        kv_width_ = a.kv_heads * a.dim;
        wide_ = q_width_ + 2 * kv_width_;
        Arena& mem = arena();
        const size_t rows = s.rows;
        x_ = scratch(mem.x, rows * m.hidden + 16);
        normed_ = scratch(mem.normed, rows * m.hidden + 16);
        qkv_ = scratch(mem.wide, rows * wide_ + 16);
        context_ = scratch(mem.context, rows * q_width_ + 16);
        middle_ = scratch(mem.middle, rows * m.inter + 16);
        acts_ = quantised(mem, s.rows, std::max({m.hidden, m.inter, q_width_}), m.group);
        states_ = scratch(mem.states, plan_floats(plan_, threads));
        if (mem.spaces.size() < static_cast<size_t>(threads)) mem.spaces.resize(threads);
        spaces_ = mem.spaces.data();
    }

    int num_stages() const { return 3 + 11 * m_.num_layers; }

    void run(Member team) {
        team.each(s_.rows, [&](int r) {
            embedding_row(m_.embedding, s_.ids[r], m_.group, x_ + at(r, m_.hidden), m_.hidden);
        });
        for (int i = 0; i < m_.num_layers; ++i) {
            attention(i, team);
            mlp(i, team);
        }
        head(team);
    }

  private:
    static size_t at(int row, int width) { return static_cast<size_t>(row) * width; }

    Quantised acts(int k) const {
        Quantised q = acts_;
        q.k = k;
        q.groups = ceil_div(k, q.group);
        return q;
    }

    void norm(const float* weight, Member& team) {
        team.each(s_.rows, [&](int r) {
            float* y = normed_ + at(r, m_.hidden);
            rms_norm_row(x_ + at(r, m_.hidden), weight, y, m_.hidden, m_.eps);
            quantise_row(y, acts(m_.hidden), r);
        });
    }

    void attention(int i, Member& team) {
        const Layer& l = m_.layers[i];
        norm(l.attention_norm, team);
        const int parts = team.pieces(num_tiles(l.qkv));
        team.each(parts, [&](int nth) {
            linear_part(l.qkv, acts(m_.hidden), s_.rows, nth, parts, [&](int r, int c, F16 y) {
                store_channels(y, qkv_ + at(r, wide_), c, wide_);
            });
        });
        team.each(s_.rows, [&](int r) { place(l, i, r); });
        const Planes kv{s_.k_planes[i], s_.v_planes[i], static_cast<size_t>(s_.slot_stride)};
        team.each(static_cast<int>(plan_.pieces.size()), [&](int n) {
            attend_piece(plan_, n, kv, qkv_, wide_, context_, q_width_, states_, team.thread,
                         spaces_[team.thread]);
        });
        team.each(static_cast<int>(plan_.divided.size()),
                  [&](int n) { merge_piece(plan_, n, context_, q_width_, states_); });
        team.each(s_.rows,
                  [&](int r) { quantise_row(context_ + at(r, q_width_), acts(q_width_), r); });
        add_linear(l.o, q_width_, team);
    }

    // Rotates a row's queries and keys and puts its keys and values into their slot.
    void place(const Layer& l, int i, int r) {
        const AttentionShape& a = m_.attention;
        const int half = s_.rotary / 2;
        float* x = qkv_ + at(r, wide_);
        for (int h = 0; h < a.heads + a.kv_heads; ++h) {
            float* head = x + h * a.dim;
            const float* weight = h < a.heads ? l.q_norm : l.k_norm;
            if (weight) rms_norm_row(head, weight, head, a.dim, m_.eps);
            rope_head(head, s_.cosine + at(r, half), s_.sine + at(r, half), half);
        }
        const Segment* seg = s_.segments;
        while (r >= seg->row0 + seg->rows) ++seg;
        const size_t slot = own_slot(*seg, r - seg->row0) * s_.slot_stride;
        std::memcpy(s_.k_planes[i] + slot, x + q_width_, sizeof(float) * kv_width_);
        std::memcpy(s_.v_planes[i] + slot, x + q_width_ + kv_width_, sizeof(float) * kv_width_);
    }

    void mlp(int i, Member& team) {
        const Layer& l = m_.layers[i];
        norm(l.mlp_norm, team);
        const int parts = team.pieces(num_tiles(l.gate_up) / 2);
        team.each(parts, [&](int nth) {
            linear_pairs_part(l.gate_up, acts(m_.hidden), s_.rows, nth, parts,
                              [&](int r, int c, F16 gate, F16 up) {
                                  store_channels(silu_mul(gate, up), middle_ + at(r, m_.inter), c,
                                                 m_.inter);
                              });
        });
        team.each(s_.rows,
                  [&](int r) { quantise_row(middle_ + at(r, m_.inter), acts(m_.inter), r); });
        add_linear(l.down, m_.inter, team);
    }

    void add_linear(const Packed& p, int k, Member& team) {
        const int parts = team.pieces(num_tiles(p));
        team.each(parts, [&](int nth) {
            linear_part(p, acts(k), s_.rows, nth, parts, [&](int r, int c, F16 y) {
                float* x = x_ + at(r, m_.hidden);
                store_channels(load_some(x + c, m_.hidden - c) + y, x, c, m_.hidden);
            });
        });
    }

    void head(Member& team) {
        const Quantised q = acts(m_.hidden);
        team.each(s_.num_wanted + (s_.hidden ? s_.rows : 0), [&](int i) {
            const bool wanted = i < s_.num_wanted;
            const int r = wanted ? s_.wanted[i] : i - s_.num_wanted;
            float* y = wanted ? normed_ + at(i, m_.hidden) : s_.hidden + at(r, m_.hidden);
            rms_norm_row(x_ + at(r, m_.hidden), m_.norm, y, m_.hidden, m_.eps);
            if (wanted) quantise_row(y, q, i);
        });
        const int vocabulary = m_.head.n, parts = team.pieces(num_tiles(m_.head));
        team.each(parts, [&](int nth) {
            linear_part(m_.head, q, s_.num_wanted, nth, parts, [&](int r, int c, F16 y) {
                store_channels(y, s_.logits + at(r, vocabulary), c, vocabulary);
            });
        });
    }

    const Model& m_;
    const Step& s_;
    const AttentionPlan plan_;
    int q_width_, kv_width_, wide_;
    float *x_, *normed_, *qkv_, *context_, *middle_, *states_;
    Quantised acts_;
    Workspace* spaces_;
};

}  // namespace dw
