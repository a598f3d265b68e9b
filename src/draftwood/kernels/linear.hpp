// Linear layers with 8-bit or 4-bit weights and 8-bit activations.
//
// 8-bit weights: one scale per output channel, stored as w + 128 in unsigned bytes, in tiles of 64
// channels: packed[channel / 64][k / 4][channel % 64][k % 4]. 4-bit weights: one more scale for each
// channel and group, stored as w + 8; a byte holds the same place of two neighbouring quads of k, the
// first in its low half, so a tile takes half the bytes. They are spread to bytes group by group and
// go through the same kernels. Activations: signed 8 bits with
// one scale for each row and group of `group` neighbours along K. A group's products are summed
// exactly in 32 bits; the groups are then added in float32, in their order, by one fma each.
// Before quantisation both sides are turned by the same Hadamard matrix, group by group, which
// leaves the products as they are and spreads outliers: the loss of 8 bits falls to a quarter.
// No step looks at another row, so a row's result does not depend on what else is in the batch.
#pragma once

#include "group.hpp"

namespace dw {

// Quantised activations of M rows. `fix` is -128 times a group's sum: it undoes the weights' +128.
struct Quantised {
    act_t* x;        // [M, k]
    float* scale;    // [M, groups]
    int32_t* fix;    // [M, groups]
    int k, group, groups;
};

struct Packed {
    const uint8_t* w;
    const float* scale;        // [n padded to a whole tile]
    const float* bias;         // the same, or null
    const float* group_scale;  // [tiles, groups, 64] for 4-bit weights; null for 8-bit ones
    int n, k;                  // k padded to a multiple of 16
};

DW_INLINE int ceil_div(int a, int b) { return (a + b - 1) / b; }
DW_INLINE int padded(int n, int to) { return ceil_div(n, to) * to; }

DW_INLINE int num_tiles(const Packed& p) { return ceil_div(p.n, kTile); }

struct Range {
    int begin, end;
};
// Part `nth` of `count` items cut into `parts`.
DW_INLINE Range part(int count, int nth, int parts) {
    return {static_cast<int>(static_cast<int64_t>(count) * nth / parts),
            static_cast<int>(static_cast<int64_t>(count) * (nth + 1) / parts)};
}

// Multiplies n floats by a Hadamard matrix over sqrt(n), in place; n is 16 times a power of two,
// at most kMaxGroup. The matrix is its own inverse.
static void rotate_block(float* x, int n) {
    F16 v[kMaxGroup / 16];
    const int count = n / 16;
    for (int i = 0; i < count; ++i)
        v[i] = butterfly<8>(butterfly<4>(butterfly<2>(butterfly<1>(F16::load(x + 16 * i)))));
    for (int half = 1; half < count; half *= 2)
        for (int i = 0; i < count; ++i)
            if (!(i & half)) {
                const F16 a = v[i], b = v[i + half];
                v[i] = a + b;
                v[i + half] = a - b;
            }
    const F16 norm = F16::set(1.0f / std::sqrt(static_cast<float>(n)));
    for (int i = 0; i < count; ++i) (v[i] * norm).store(x + 16 * i);
}

// Rotates a group of any multiple of 16: the largest power of two first, then the next.
DW_INLINE void rotate_group(float* x, int n) {
    for (int block = kMaxGroup; block >= 16; block /= 2)
        for (; n >= block; n -= block, x += block) rotate_block(x, block);
}

// x must be readable up to the padded k, with zeros there.
static void quantise_row(const float* source, const Quantised& q, int row) {
    act_t* out = q.x + static_cast<size_t>(row) * q.k;
    alignas(64) float x[kMaxGroup];
    for (int g = 0; g < q.groups; ++g) {
        const int size = std::min(q.group, q.k - g * q.group);
        std::memcpy(x, source + g * q.group, sizeof(float) * size);
        rotate_group(x, size);
        F16 top = F16::set(0.0f);
        for (int i = 0; i < size; i += 16) top = max(top, abs(F16::load(x + i)));
        const float amax = max_lane(top);
        const bool zero = !(amax > 1e-30f);
        const F16 inverse = F16::set(zero ? 0.0f : 127.0f / amax);
        F16 total = F16::set(0.0f);
        for (int i = 0; i < size; i += 16) {
            const F16 r = round(F16::load(x + i) * inverse);
            total = total + r;
#if defined(DW_AVX512) || defined(DW_AVXVNNI)
            store_i8(r, out + i);
#else
            store_i16(r, out + i);
#endif
        }
        out += q.group;
        const size_t at = static_cast<size_t>(row) * q.groups + g;
        q.scale[at] = zero ? 0.0f : amax / 127.0f;
        q.fix[at] = -128 * static_cast<int32_t>(sum(total));
    }
}

// One group's sums for all rows: acc[rows][64] += scales of the rows * integer products.
DW_INLINE void group_sums(const uint8_t* w, int g, const Quantised& q, int row0, int rows,
                          float* acc, size_t ahead) {
    const int begin = g * q.group, end = std::min(begin + q.group, q.k);
    const int blocks = ceil_div(rows, kRowBlock);
    for (int b = 0; b < blocks; ++b) {
        const Range r = part(rows, b, blocks);
        const size_t row = row0 + r.begin;
        kernel_for(r.end - r.begin)(w, (end - begin) / 4, q.x + row * q.k + begin, q.k,
                                    q.fix + row * q.groups + g, q.scale + row * q.groups + g,
                                    q.groups, acc + r.begin * kTile, b == 0 ? ahead : 0);
    }
}

// Spreads `bytes` packed bytes (a multiple of 256) to w + 128 in bytes, as 8-bit weights have it.
DW_INLINE void spread4(const uint8_t* packed, int bytes, uint8_t* out) {
    for (int at = 0; at < bytes; at += 256, out += 512) {
        for (int i = 0; i < 256; i += 64) __builtin_prefetch(packed + at + bytes + i);
        for (int i = 0; i < 256; ++i) {
            out[i] = static_cast<uint8_t>((packed[at + i] & 15) + 120);
            out[256 + i] = static_cast<uint8_t>((packed[at + i] >> 4) + 120);
        }
    }
}

#if defined(DW_AVX512)
constexpr int kRows4 = 4;  // rows up to which spreading in registers is faster than in memory

DW_INLINE void group_sums4(const uint8_t* packed, int g, const Quantised& q, int row0, int rows,
                           const float* scales, float* acc) {
    const int begin = g * q.group, quads = (std::min(begin + q.group, q.k) - begin) / 4;
    const size_t row = row0;
    const act_t* x = q.x + row * q.k + begin;
    const int32_t* fix = q.fix + row * q.groups + g;
    const float* scale = q.scale + row * q.groups + g;
    switch (rows) {
        case 1: return group_kernel4<1>(packed, quads, x, q.k, fix, scale, q.groups, scales, acc);
        case 2: return group_kernel4<2>(packed, quads, x, q.k, fix, scale, q.groups, scales, acc);
        case 3: return group_kernel4<3>(packed, quads, x, q.k, fix, scale, q.groups, scales, acc);
        default: return group_kernel4<4>(packed, quads, x, q.k, fix, scale, q.groups, scales, acc);
    }
}
#endif

// `tile_sums` for 4-bit weights.
static void tile_sums4(const Packed& p, int tile, const Quantised& q, int row0, int rows,
                       float* acc) {
    alignas(64) uint8_t w[kMaxGroup * kTile];
    alignas(64) float sums[kMaxRows * kTile];
    const uint8_t* packed = p.w + static_cast<size_t>(tile) * kTile * p.k / 2;
    const float* scales = p.group_scale + static_cast<size_t>(tile) * q.groups * kTile;
    std::memset(acc, 0, sizeof(float) * kTile * rows);
    for (int g = 0; g < q.groups; ++g, scales += kTile) {
        const int bytes = std::min(q.group, q.k - g * q.group) * kTile / 2;
#if defined(DW_AVX512)
        if (rows <= kRows4) {
            group_sums4(packed, g, q, row0, rows, scales, acc);
            packed += bytes;
            continue;
        }
#endif
        spread4(packed, bytes, w);
        packed += bytes;
        std::memset(sums, 0, sizeof(float) * kTile * rows);
        group_sums(w, g, q, row0, rows, sums, 0);
        for (int r = 0; r < rows; ++r)
            for (int c = 0; c < kTile; c += 16) {
                float* y = acc + r * kTile + c;
                fma(F16::load(sums + r * kTile + c), F16::load(scales + c), F16::load(y)).store(y);
            }
    }
}

// acc[rows][64] = the tile's sums for rows row0.., before the channels' scales.
static void tile_sums(const Packed& p, int tile, const Quantised& q, int row0, int rows,
                      float* acc) {
    if (p.group_scale) return tile_sums4(p, tile, q, row0, rows, acc);
    const uint8_t* w = p.w + static_cast<size_t>(tile) * kTile * p.k;
    const size_t ahead = static_cast<size_t>(q.group) * kTile;
    std::memset(acc, 0, sizeof(float) * kTile * rows);
    for (int g = 0; g < q.groups; ++g)
        group_sums(w + static_cast<size_t>(g) * q.group * kTile, g, q, row0, rows, acc, ahead);
}

// Sixteen channels of a row: the channels' scales and biases over a tile's sums.
DW_INLINE F16 scaled(const Packed& p, const float* acc, int channel) {
    const F16 bias = p.bias ? F16::load(p.bias + channel) : F16::set(0.0f);
    return fma(F16::load(acc), F16::load(p.scale + channel), bias);
}

// The tiles of part `nth` of `parts` of a layer; `emit(row, channel, values of 16 channels)` takes
// the results.
template <class Emit>
static void linear_part(const Packed& p, const Quantised& q, int rows, int nth, int parts,
                        Emit emit) {
    alignas(64) float acc[kMaxRows * kTile];
    const Range tiles = part(num_tiles(p), nth, parts);
    for (int tile = tiles.begin; tile < tiles.end; ++tile)
        for (int row0 = 0; row0 < rows; row0 += kMaxRows) {
            const int count = std::min(kMaxRows, rows - row0);
            tile_sums(p, tile, q, row0, count, acc);
            for (int r = 0; r < count; ++r)
                for (int c = 0; c < kTile && tile * kTile + c < p.n; c += 16)
                    emit(row0 + r, tile * kTile + c,
                         scaled(p, acc + r * kTile + c, tile * kTile + c));
        }
}

// The same for a layer whose second half of tiles belongs to the first (gate and up):
// `emit(row, channel, value of the first half, value of the second half)`.
template <class Emit>
static void linear_pairs_part(const Packed& p, const Quantised& q, int rows, int nth, int parts,
                              Emit emit) {
    alignas(64) float first[kMaxRows * kTile], second[kMaxRows * kTile];
    const int half = num_tiles(p) / 2;
    const Range tiles = part(half, nth, parts);
    for (int tile = tiles.begin; tile < tiles.end; ++tile)
        for (int row0 = 0; row0 < rows; row0 += kMaxRows) {
            const int count = std::min(kMaxRows, rows - row0);
            tile_sums(p, tile, q, row0, count, first);
            tile_sums(p, tile + half, q, row0, count, second);
            for (int r = 0; r < count; ++r)
                for (int c = 0; c < kTile; c += 16) {
                    const int at = r * kTile + c, channel = tile * kTile + c;
                    emit(row0 + r, channel, scaled(p, first + at, channel),
                         scaled(p, second + at, channel + half * kTile));
                }
        }
}

// Sixteen channels to out[row, channel..], fewer at the ragged end of a row.
DW_INLINE void store_channels(F16 y, float* out, int channel, int n) {
    if (channel + 16 <= n) {
        y.store(out + channel);
    } else if (channel < n) {
        alignas(64) float t[16];
        y.store(t);
        std::memcpy(out + channel, t, sizeof(float) * (n - channel));
    }
}

}  // namespace dw
