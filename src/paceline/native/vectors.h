// Vectors of as many floats as the machine has lanes, and sums over lanes in one fixed order.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(PACELINE_PORTABLE)
constexpr int W = 4;  // floats of a vector
constexpr bool MANY = false;  // whether there are 32 vector registers, not 16
#elif defined(__AVX512F__)
constexpr int W = 16;
constexpr bool MANY = true;
#elif defined(__AVX__)
constexpr int W = 8;
constexpr bool MANY = false;
#elif defined(__aarch64__)
constexpr int W = 4;
constexpr bool MANY = true;
#else
constexpr int W = 4;
constexpr bool MANY = false;
#endif

typedef float vec __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * W)));

#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 24")
#endif

static inline vec load(const float* p) { return *(const vec*)p; }
static inline void store(float* p, vec v) { *(vec*)p = v; }
// Load once into a register: a compiler may else read the same memory again for every use, at the price of the load port.
static inline vec fetch(const float* p) {
  vec v = load(p);
#if defined(__x86_64__)
  __asm__("" : "+v"(v));
#elif defined(__aarch64__)
  __asm__("" : "+w"(v));
#endif
  return v;
}

// Two vectors become one: lane i is a[first(i)] or b[first(i) - W], chosen by a compile-time function of the lane.
template <class Pick, size_t... I> static inline vec mix(vec a, vec b, std::index_sequence<I...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, Pick::lane(I)...);
#else
  return __builtin_shuffle(a, b, (ivec){Pick::lane(I)...});
#endif
}
template <class Pick> static inline vec mix(vec a, vec b) { return mix<Pick>(a, b, std::make_index_sequence<W>()); }

// Halves of all runs of 2 D lanes of a, then of b; OFFSET 0 or D says which half.
template <int D, int OFFSET> struct Half {
  static constexpr int lane(int i) {
    int run = i / D, per = W / (2 * D);
    return run / per * W + run % per * 2 * D + OFFSET + i % D;
  }
};
// a0 b0 a1 b1 ... from the lower (OFFSET 0) or upper (OFFSET W / 2) halves.
template <int OFFSET> struct Zip {
  static constexpr int lane(int i) { return i / 2 + OFFSET + (i % 2) * W; }
};

// One step of summing lanes: COUNT vectors of runs of 2 D lanes become half as many, of runs of D lanes.
template <int D, int COUNT> static inline void fold(vec* v) {
  if constexpr (D > 0) {
    constexpr int left = (COUNT + 1) / 2;
    UNROLL for (int i = 0; i < left; i++) {
      vec a = v[2 * i], b = 2 * i + 1 < COUNT ? v[2 * i + 1] : a;
      v[i] = mix<Half<D, 0>>(a, b) + mix<Half<D, D>>(a, b);
    }
    fold<D / 2, left>(v);
  }
}
// out[i] = sum of the lanes of v[i], always added in the same order.
template <int COUNT> static inline void sum_lanes(vec* v, float* out) {
  constexpr int here = COUNT < W ? COUNT : W;
  fold<W / 2, here>(v);
  if constexpr (here == W) store(out, v[0]);
  else { float lanes[W]; store(lanes, v[0]); UNROLL for (int i = 0; i < here; i++) out[i] = lanes[i]; }
  if constexpr (COUNT > W) sum_lanes<COUNT - W>(v + W, out + W);
}
static inline float sum(vec v) { float s; sum_lanes<1>(&v, &s); return s; }

// exp for x <= 88 to less than 2 ulp: Cephes' polynomial; below -87 its value there.
static inline vec exp_of(vec x) {
  x = x < -87.f ? vec{} - 87.f : x;
  vec n = x * 1.44269504f + 12582912.f; n = n - 12582912.f;  // to the nearest integer
  x = x - n * 0.693359375f; x = x + n * 2.12194440e-4f;
  vec y = vec{} + 1.9875691500e-4f;
  y = y * x + 1.3981999507e-3f; y = y * x + 8.3334519073e-3f; y = y * x + 4.1665795894e-2f;
  y = y * x + 1.6666665459e-1f; y = y * x + 5.0000001201e-1f; y = y * x * x + x + 1.f;
  ivec e = (__builtin_convertvector(n, ivec) + 127) << 23;
  vec power; memcpy(&power, &e, sizeof power);
  return y * power;
}
