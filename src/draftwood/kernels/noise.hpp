// The tokens of highest logit / temperature + Gumbel noise, without noise for most tokens.
//
// The noise is that of sampling/noise.py: SplitMix64's output number `token` of a stream. Its
// logarithms are what takes time, and nearly all are for nothing: a token far below the best would
// need a noise that is rare, and whether its bits are large enough for it is one comparison.
#pragma once

#include "rows.hpp"

namespace dw {

DW_INLINE uint64_t noise_bits(uint64_t key, uint64_t token) {
    uint64_t x = (token + 1) * 0x9E3779B97F4A7C15ull + key;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return (x ^ (x >> 31)) >> 12;
}

static double gumbel_of(uint64_t bits) {
    const double uniform = (static_cast<double>(bits) + 0.5) * 0x1p-52;
    return -std::log(-std::log(uniform));
}

// Which bits a noise of at least `lowest + i / steps` needs; a few fewer, to be on the safe side.
struct NoiseTable {
    static constexpr float lowest = -5.0f, highest = 38.0f;  // no noise is above 36.8
    static constexpr int steps = 8, size = 43 * steps + 1;
    uint64_t bits[size];

    NoiseTable() {
        for (int i = 0; i < size; ++i) {
            const double least = lowest + static_cast<double>(i) / steps;
            const double below_one = -std::expm1(-std::exp(-least));  // 1 - uniform
            const double bound = 0x1p52 * (1.0 - below_one) - 8.0 - 0x1p52 * below_one * 1e-9;
            bits[i] = bound > 0 ? static_cast<uint64_t>(bound) : 0;
        }
    }

    // For a noise of at least `least`, which is at most `highest`.
    uint64_t at(float least) const {
        const int i = static_cast<int>((least - lowest) * steps);
        return least <= lowest ? 0 : bits[std::min(i, size - 1)];
    }
};

static void noisy_top_row(const float* x, int64_t n, float temperature, uint64_t key, int k,
                          double* keys, int64_t* tokens) {
    static const NoiseTable table;
    constexpr int block = 16, few = 16;
    const auto exact = [&](int64_t i) {
        return static_cast<double>(x[i] / temperature) + gumbel_of(noise_bits(key, i));
    };
    int count = 0;
    const auto insert = [&](double v, int64_t i) {
        insert_sorted(v, i, keys, tokens, count, k);
    };
    // The k-th best of some likely tokens is a bound from below that lets most others be skipped.
    double bound = -std::numeric_limits<double>::infinity();
    if (k <= few && n > few) {
        float likely[few];
        int64_t where[few];
        top_k_row(x, n, few, likely, where);
        if (likely[few - 1] > -std::numeric_limits<float>::infinity()) {
            for (int i = 0; i < few; ++i) insert(exact(where[i]), where[i]);
            bound = keys[k - 1];
            count = 0;
        }
    }
    const auto consider = [&](int64_t i) {
        const float y = x[i] / temperature;
        const float least = static_cast<float>(bound) - y - 1e-3f;
        if (!(y > -std::numeric_limits<float>::infinity()) || !(least <= NoiseTable::highest)) return;
        const uint64_t bits = noise_bits(key, i);
        if (bits < table.at(least)) return;
        const double v = static_cast<double>(y) + gumbel_of(bits);
        if (v < bound) return;
        insert(v, i);
        if (count == k) bound = std::max(bound, keys[k - 1]);
    };
    int64_t i = 0;
    for (; i + block <= n; i += block) {
        const float top = max_lane(F16::load(x + i));
        const float least = static_cast<float>(bound) - top / temperature - 1e-3f;
        if (least > NoiseTable::highest) continue;
        const uint64_t needed = std::isfinite(least) ? table.at(least) : 0;
        bool any = false;
        for (int j = 0; j < block; ++j) any |= noise_bits(key, i + j) >= needed;
        if (any)
            for (int j = 0; j < block; ++j) consider(i + j);
    }
    for (; i < n; ++i) consider(i);
    for (; count < k; ++count) {
        keys[count] = -std::numeric_limits<double>::infinity();
        tokens[count] = 0;
    }
}

}  // namespace dw
