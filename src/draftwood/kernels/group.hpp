// The innermost loops of linear layers: one group of one tile, for a few rows, in every set of
// instructions. linear.hpp says how weights and activations lie.
#pragma once

#include <algorithm>
#include <cstddef>

#include "simd.hpp"

namespace dw {

#define DW_UNROLL _Pragma("GCC unroll 16")

constexpr int kTile = 64;       // output channels in a tile
constexpr int kMaxRows = 64;    // rows that share one pass over a tile
constexpr int kMaxGroup = 256;  // activations that share a scale

#if defined(DW_AVX512)
typedef int8_t act_t;
constexpr int kRowBlock = 6;
#elif defined(DW_AVXVNNI)
typedef int8_t act_t;
constexpr int kRowBlock = 4;
#elif defined(DW_AVX2)
typedef int16_t act_t;          // vpmaddwd takes 16-bit factors
constexpr int kRowBlock = 4;
#else
typedef int16_t act_t;
constexpr int kRowBlock = 1;
#endif

// acc[r][0..63] += scale[r] * (integer products of one group), for MR rows and one tile.
#if defined(DW_AVX512)

// c += products of unsigned w and signed x, four to a lane. Not the intrinsic: gcc 12 copies every
// accumulator around it and spills them.
DW_INLINE void dot4(__m512i& c, __m512i w, __m512i x) {
    asm("vpdpbusd %2, %1, %0" : "+v"(c) : "v"(w), "v"(x));
}

DW_INLINE void prefetch4(const uint8_t* p) {
    for (int i = 0; i < 256; i += 64) __builtin_prefetch(p + i);
}

template <int MR>
static void group_kernel(const uint8_t* w, int quads, const act_t* x, size_t ldx,
                         const int32_t* fix, const float* scale, size_t ldg, float* acc,
                         size_t ahead) {
    __m512i c[MR][4];
    DW_UNROLL for (int r = 0; r < MR; ++r)
        DW_UNROLL for (int t = 0; t < 4; ++t) c[r][t] = _mm512_set1_epi32(fix[r * ldg]);
    for (int k = 0; k < quads; ++k) {
        if (ahead) prefetch4(w + 256 * k + ahead);
        __m512i b[4];
        DW_UNROLL for (int t = 0; t < 4; ++t) b[t] = _mm512_loadu_si512(w + 256 * k + 64 * t);
        DW_UNROLL for (int r = 0; r < MR; ++r) {
            int32_t four;
            std::memcpy(&four, x + r * ldx + 4 * k, 4);
            const __m512i a = _mm512_set1_epi32(four);
            DW_UNROLL for (int t = 0; t < 4; ++t) dot4(c[r][t], b[t], a);
        }
    }
    DW_UNROLL for (int r = 0; r < MR; ++r) {
        const __m512 s = _mm512_set1_ps(scale[r * ldg]);
        DW_UNROLL for (int t = 0; t < 4; ++t) {
            float* p = acc + r * kTile + 16 * t;
            _mm512_storeu_ps(p, _mm512_fmadd_ps(_mm512_cvtepi32_ps(c[r][t]), s, _mm512_loadu_ps(p)));
        }
    }
}

// The same for 4-bit weights, which are spread in registers; also times the channels' `group_scale`.
template <int MR>
static void group_kernel4(const uint8_t* w, int quads, const act_t* x, size_t ldx,
                          const int32_t* fix, const float* scale, size_t ldg,
                          const float* group_scale, float* acc) {
    __m512i c[MR][4];
    DW_UNROLL for (int r = 0; r < MR; ++r)
        DW_UNROLL for (int t = 0; t < 4; ++t) c[r][t] = _mm512_set1_epi32(fix[r * ldg] / 16);
    const __m512i low = _mm512_set1_epi8(15);
    for (int k = 0; k < quads; k += 2) {
        const uint8_t* p = w + 128 * k;
        prefetch4(p + 128 * quads);
        __m512i even[MR], odd[MR];
        DW_UNROLL for (int r = 0; r < MR; ++r) {
            int32_t four[2];
            std::memcpy(four, x + r * ldx + 4 * k, 8);
            even[r] = _mm512_set1_epi32(four[0]);
            odd[r] = _mm512_set1_epi32(four[1]);
        }
        DW_UNROLL for (int t = 0; t < 4; ++t) {
            const __m512i both = _mm512_loadu_si512(p + 64 * t);
            const __m512i first = _mm512_and_si512(both, low);
            const __m512i second = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
            DW_UNROLL for (int r = 0; r < MR; ++r) {
                dot4(c[r][t], first, even[r]);
                dot4(c[r][t], second, odd[r]);
            }
        }
    }
    DW_UNROLL for (int t = 0; t < 4; ++t) {
        const __m512 g = _mm512_loadu_ps(group_scale + 16 * t);
        DW_UNROLL for (int r = 0; r < MR; ++r) {
            float* y = acc + r * kTile + 16 * t;
            const __m512 s = _mm512_set1_ps(scale[r * ldg]);
            const __m512 sums = _mm512_mul_ps(_mm512_cvtepi32_ps(c[r][t]), s);
            _mm512_storeu_ps(y, _mm512_fmadd_ps(sums, g, _mm512_loadu_ps(y)));
        }
    }
}

#elif defined(DW_AVXVNNI)

DW_INLINE void dot4(__m256i& c, __m256i w, __m256i x) {
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(c) : "x"(w), "x"(x));
}

template <int MR>
static void group_kernel(const uint8_t* w, int quads, const act_t* x, size_t ldx,
                         const int32_t* fix, const float* scale, size_t ldg, float* acc,
                         size_t ahead) {
    constexpr int T = MR > 2 ? 2 : 4;  // registers of eight channels: what sixteen can hold
    for (int sub = 0; sub < kTile; sub += 8 * T) {
        __m256i c[MR][T];
        DW_UNROLL for (int r = 0; r < MR; ++r)
            DW_UNROLL for (int t = 0; t < T; ++t) c[r][t] = _mm256_set1_epi32(fix[r * ldg]);
        for (int k = 0; k < quads; ++k) {
            const uint8_t* p = w + 256 * k + 4 * sub;
            if (ahead)
                for (int i = 0; i < 32 * T; i += 64) __builtin_prefetch(p + ahead + i);
            __m256i a[MR];
            DW_UNROLL for (int r = 0; r < MR; ++r) {
                int32_t four;
                std::memcpy(&four, x + r * ldx + 4 * k, 4);
                a[r] = _mm256_set1_epi32(four);
            }
            DW_UNROLL for (int t = 0; t < T; ++t) {
                const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32 * t));
                DW_UNROLL for (int r = 0; r < MR; ++r) dot4(c[r][t], b, a[r]);
            }
        }
        DW_UNROLL for (int r = 0; r < MR; ++r) {
            const __m256 s = _mm256_set1_ps(scale[r * ldg]);
            DW_UNROLL for (int t = 0; t < T; ++t) {
                float* p = acc + r * kTile + sub + 8 * t;
                _mm256_storeu_ps(p, _mm256_fmadd_ps(_mm256_cvtepi32_ps(c[r][t]), s,
                                                    _mm256_loadu_ps(p)));
            }
        }
    }
}

#elif defined(DW_AVX2)

template <int MR>
static void group_kernel(const uint8_t* w, int quads, const act_t* x, size_t ldx,
                         const int32_t* fix, const float* scale, size_t ldg, float* acc,
                         size_t ahead) {
    constexpr int T = MR > 2 ? 2 : 4;  // registers of four channels: what sixteen can hold
    for (int sub = 0; sub < kTile; sub += 4 * T) {
        __m256i c[MR][T];  // two partial sums a channel
        DW_UNROLL for (int r = 0; r < MR; ++r)
            DW_UNROLL for (int t = 0; t < T; ++t) c[r][t] = _mm256_setzero_si256();
        for (int k = 0; k < quads; ++k) {
            const uint8_t* p = w + 256 * k + 4 * sub;
            if (ahead) __builtin_prefetch(p + ahead);
            __m256i a[MR];
            DW_UNROLL for (int r = 0; r < MR; ++r) {
                int64_t four;
                std::memcpy(&four, x + r * ldx + 4 * k, 8);
                a[r] = _mm256_set1_epi64x(four);
            }
            DW_UNROLL for (int t = 0; t < T; ++t) {
                const __m256i b = _mm256_cvtepu8_epi16(
                    _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16 * t)));
                DW_UNROLL for (int r = 0; r < MR; ++r)
                    c[r][t] = _mm256_add_epi32(c[r][t], _mm256_madd_epi16(b, a[r]));
            }
        }
        DW_UNROLL for (int r = 0; r < MR; ++r) {
            const __m256 s = _mm256_set1_ps(scale[r * ldg]);
            const __m256i f = _mm256_set1_epi32(fix[r * ldg]);
            DW_UNROLL for (int t = 0; t < T; t += 2) {
                const __m256i v =
                    _mm256_permute4x64_epi64(_mm256_hadd_epi32(c[r][t], c[r][t + 1]), 0xD8);
                float* p = acc + r * kTile + sub + 4 * t;
                const __m256 y = _mm256_cvtepi32_ps(_mm256_add_epi32(v, f));
                _mm256_storeu_ps(p, _mm256_fmadd_ps(y, s, _mm256_loadu_ps(p)));
            }
        }
    }
}

#else

template <int MR>
static void group_kernel(const uint8_t* w, int quads, const act_t* x, size_t ldx,
                         const int32_t* fix, const float* scale, size_t ldg, float* acc,
                         size_t ahead) {
    static_assert(MR == 1, "the portable kernel takes one row at a time");
    int32_t c[kTile];
    for (int n = 0; n < kTile; ++n) c[n] = fix[0];
    for (int k = 0; k < quads; ++k)
        for (int n = 0; n < kTile; ++n) {
            const uint8_t* b = w + 256 * k + 4 * n;
            const act_t* a = x + 4 * k;
            c[n] += b[0] * a[0] + b[1] * a[1] + b[2] * a[2] + b[3] * a[3];
        }
    for (int n = 0; n < kTile; n += 16) {
        float y[16];
        for (int i = 0; i < 16; ++i) y[i] = static_cast<float>(c[n + i]);
        fma(F16::load(y), F16::set(scale[0]), F16::load(acc + n)).store(acc + n);
    }
}

#endif

typedef void (*GroupKernel)(const uint8_t*, int, const act_t*, size_t, const int32_t*,
                            const float*, size_t, float*, size_t);

static GroupKernel kernel_for(int rows) {
#if defined(DW_AVX512)
    static const GroupKernel table[] = {group_kernel<1>, group_kernel<2>, group_kernel<3>,
                                        group_kernel<4>, group_kernel<5>, group_kernel<6>};
#elif defined(DW_AVX2)
    static const GroupKernel table[] = {group_kernel<1>, group_kernel<2>, group_kernel<3>,
                                        group_kernel<4>};
#else
    static const GroupKernel table[] = {group_kernel<1>};
#endif
    return table[rows - 1];
}

}  // namespace dw
