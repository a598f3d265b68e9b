// Work on one row at a time: norms, rotary embedding, activations, embedding, top-k.
#pragma once

#include <limits>

#include "linear.hpp"

namespace dw {

// Up to 16 floats, zeros behind the end.
DW_INLINE F16 load_some(const float* p, int count) {
    if (count >= 16) return F16::load(p);
    alignas(64) float t[16] = {};
    std::memcpy(t, p, sizeof(float) * count);
    return F16::load(t);
}

// out = x / sqrt(mean(x^2) + eps) * weight
static void rms_norm_row(const float* x, const float* weight, float* out, int n, float eps) {
    F16 squares = F16::set(0.0f);
    for (int i = 0; i < n; i += 16) {
        const F16 v = load_some(x + i, n - i);
        squares = fma(v, v, squares);
    }
    const float r = 1.0f / std::sqrt(sum(squares) / static_cast<float>(n) + eps);
    for (int i = 0; i < n; ++i) out[i] = (x[i] * r) * weight[i];
}

// Rotates pairs (i, i + half) of one head in place; lanes from 2 * half on stay.
static void rope_head(float* x, const float* cosine, const float* sine, int half) {
    for (int i = 0; i < half; ++i) {
        const float a = x[i], b = x[i + half];
        x[i] = a * cosine[i] - b * sine[i];
        x[i + half] = b * cosine[i] + a * sine[i];
    }
}

DW_INLINE F16 silu_mul(F16 gate, F16 up) {
    const F16 one = F16::set(1.0f);
    return gate / (one + exp(F16::set(0.0f) - gate)) * up;
}

static void silu_mul_row(const float* gate, const float* up, float* out, int n) {
    for (int i = 0; i < n; i += 16)
        store_channels(silu_mul(load_some(gate + i, n - i), load_some(up + i, n - i)), out, i, n);
}

// One token's row out of a packed table, turned back to what it was before packing.
static void embedding_row(const Packed& p, int64_t token, int group, float* out, int n) {
    const uint8_t* w = p.w + (token / kTile) * kTile * static_cast<size_t>(p.k) + token % kTile * 4;
    const float scale = p.scale[token];
    alignas(64) float x[kMaxGroup];
    for (int begin = 0; begin < n; begin += group) {
        const int size = std::min(group, p.k - begin);
        for (int i = 0; i < size; ++i) {
            const int k = begin + i;
            x[i] = static_cast<float>(static_cast<int>(w[k / 4 * 256 + k % 4]) - 128) * scale;
        }
        rotate_group(x, size);
        std::memcpy(out + begin, x, sizeof(float) * std::min(size, n - begin));
    }
}

// Puts a value and its index into the `count` best so far, at most k and largest first; behind equal
// ones, so the first to come stays first.
template <class T>
DW_INLINE void insert_sorted(T v, int64_t i, T* values, int64_t* indices, int& count, int k) {
    if (count == k && !(v > values[k - 1])) return;
    int at = count < k ? count++ : k - 1;
    for (; at > 0 && v > values[at - 1]; --at) {
        values[at] = values[at - 1];
        indices[at] = indices[at - 1];
    }
    values[at] = v;
    indices[at] = i;
}

// The k largest of a row, largest first, the lower index first among equals; NaN never enters.
static void top_k_row(const float* x, int64_t n, int k, float* values, int64_t* indices) {
    constexpr float lowest = -std::numeric_limits<float>::infinity();
    int count = 0;
    const auto insert = [&](float v, int64_t i) {
        if (!std::isnan(v)) insert_sorted(v, i, values, indices, count, k);
    };
    int64_t i = 0;
    for (; i < n && count < k; ++i) insert(x[i], i);
    for (; i + 64 <= n; i += 64) {
        const F16 top = max(max(F16::load(x + i), F16::load(x + i + 16)),
                            max(F16::load(x + i + 32), F16::load(x + i + 48)));
        if (any_greater(top, F16::set(values[k - 1])))
            for (int j = 0; j < 64; ++j) insert(x[i + j], i + j);
    }
    for (; i < n; ++i) insert(x[i], i);
    for (; count < k; ++count) {
        values[count] = lowest;
        indices[count] = 0;
    }
}

// log(sum(exp(x / temperature))) of a row whose largest value is `top`.
static float log_sum_row(const float* x, int64_t n, float top, float temperature) {
    const F16 shift = F16::set(top), scale = F16::set(temperature);
    F16 total = F16::set(0.0f);
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) total = total + exp((F16::load(x + i) - shift) / scale);
    float rest = 0.0f;
    for (; i < n; ++i) rest += std::exp((x[i] - top) / temperature);
    return top / temperature + std::log(sum(total) + rest);
}

}  // namespace dw
