// Products of a few rows with weights [outputs, inputs], read once, in place; and the norm that comes before them.
#pragma once

#include <cmath>

#include "call.h"
#include "vectors.h"

constexpr int BLOCK = 24;       // outputs whose weights stay in the second-level cache while all rows pass
constexpr int DEPTH = 768;      // most inputs at once, so that eight rows stay in the first-level cache
constexpr int ROWS = MANY ? 8 : 4;
constexpr int NEAR = 128;       // how many inputs ahead weights are asked into the first-level cache
// Outputs computed together for R rows: R * tile(R) sums in registers; each divides BLOCK.
constexpr int tile(int R) {
  return MANY ? (R <= 3 ? 8 : R == 4 ? 6 : R <= 6 ? 4 : 3) : (R == 1 ? 8 : R == 2 ? 6 : R == 3 ? 4 : 3);
}

// Rows of weights to ask the memory for meanwhile: `count` of them, `step` floats apart.
struct Ahead { const float* at; int64_t step; int count; };

// Ask the first-level cache for weights that the tile, or the one after it, multiplies NEAR inputs later.  Where
// multiplications wait for the second level they fill the processor's queue, and what asks the memory for the next block
// waits behind them: reading and arithmetic then add up instead of overlapping (six rows of a 135 M model: 20.4 ms
// instead of 18.7).
template <int N> static inline void ask_near(const float* w, int64_t ldw, int64_t depth, int64_t k) {
  const int64_t at = k + NEAR < depth ? k + NEAR : k + NEAR - depth + N * ldw;
  UNROLL for (int j = 0; j < N; j++) __builtin_prefetch(w + j * ldw + at, 0, 3);
}

// out[r * N + j] = sum over k of x[r, k] * w[j, k].
template <int R, int N>
static inline void dots(const float* x, int64_t ldx, const float* w, int64_t ldw, int64_t depth, float* out, Ahead ahead) {
  vec acc[R * N];
  UNROLL for (int i = 0; i < R * N; i++) acc[i] = vec{};
  for (int64_t k = 0; k < depth; k += W) {
    if (W == 16 || k % 16 == 0) {
      if constexpr (R > 1) ask_near<N>(w, ldw, depth, k);
      for (int j = 0; j < ahead.count; j++) __builtin_prefetch(ahead.at + j * ahead.step + k, 0, 2);
    }
    if constexpr (R <= N) {  // the fewer stay in registers while the others pass
      vec a[R];
      UNROLL for (int r = 0; r < R; r++) a[r] = fetch(x + r * ldx + k);
      UNROLL for (int j = 0; j < N; j++) {
        vec b = fetch(w + j * ldw + k);
        UNROLL for (int r = 0; r < R; r++) acc[r * N + j] += a[r] * b;
      }
    } else {
      vec b[N];
      UNROLL for (int j = 0; j < N; j++) b[j] = fetch(w + j * ldw + k);
      UNROLL for (int r = 0; r < R; r++) {
        vec a = fetch(x + r * ldx + k);
        UNROLL for (int j = 0; j < N; j++) acc[r * N + j] += a * b[j];
      }
    }
  }
  sum_lanes<R * N>(acc, out);
}

struct Slab {  // one block of outputs times one run of inputs, for one group of rows
  const float *x, *w, *bias;
  int64_t ldx, ldw, depth, outputs, ldy;
  float* y;
  bool add;
  const float* ahead;  // the block that comes next, null for none
  int64_t ahead_ld;
  int group, groups;   // each group of rows asks for its part of the next block
};

template <int R, int N> static inline void put(const Slab& s, int64_t o) {
  Ahead ahead{s.ahead, s.groups * s.ahead_ld, 0};
  if (s.ahead) {
    int first = (int)((s.group - o % s.groups + s.groups) % s.groups);
    ahead.at += (o + first) * s.ahead_ld;
    ahead.count = first < N ? (N - 1 - first) / s.groups + 1 : 0;
  }
  float out[R * N];
  dots<R, N>(s.x, s.ldx, s.w + o * s.ldw, s.ldw, s.depth, out, ahead);
  for (int r = 0; r < R; r++)
    for (int j = 0; j < N; j++) {
      float& y = s.y[r * s.ldy + o + j];
      float value = s.bias ? out[r * N + j] + s.bias[o + j] : out[r * N + j];
      y = s.add ? y + value : value;
    }
}
template <int R> static void slab(const Slab& s) {
  int64_t o = 0;
  for (; o + tile(R) <= s.outputs; o += tile(R)) put<R, tile(R)>(s, o);
  for (; o < s.outputs; o++) put<R, 1>(s, o);
}
static void slab(int rows, const Slab& s) {
  if constexpr (MANY) switch (rows) {
    case 5: return slab<5>(s);
    case 6: return slab<6>(s);
    case 7: return slab<7>(s);
    case 8: return slab<8>(s);
  }
  switch (rows) {
    case 1: return slab<1>(s);
    case 2: return slab<2>(s);
    case 3: return slab<3>(s);
    case 4: return slab<4>(s);
  }
}

// y[r, o] = (or +=) sum over k of x[r, k] m.weight[o, k] + m.bias[o], for the outputs of `part`.
// next: where this thread reads weights after this product, and the length of a row there.
static void product(const float* x, int64_t n, int64_t depth, const Matrix& m, Range part, float* y, int64_t ldy, bool add,
                    const float* next, int64_t next_ld) {
  int64_t runs = (depth + DEPTH - 1) / DEPTH, groups = (n + ROWS - 1) / ROWS;
  for (int64_t run = 0; run < runs; run++) {
    int64_t k0 = depth / 16 * run / runs * 16, k1 = depth / 16 * (run + 1) / runs * 16;
    for (int64_t o = part.from; o < part.to; o += BLOCK) {
      Slab s{x + k0, m.weight + o * depth + k0, run == 0 && m.bias ? m.bias + o : nullptr,
             depth, depth, k1 - k0, std::min<int64_t>(BLOCK, part.to - o), ldy, y + o, add || run > 0, next, next_ld, 0, (int)groups};
      if (o + BLOCK < part.to) s.ahead = s.w + BLOCK * depth, s.ahead_ld = depth;
      else if (run + 1 < runs) s.ahead = m.weight + part.from * depth + k1, s.ahead_ld = depth;
      for (int64_t g = 0, r = 0; g < groups; g++) {
        int64_t rows = (n - r + groups - g - 1) / (groups - g);
        s.x = x + r * depth + k0; s.y = y + r * ldy + o; s.group = (int)g;
        slab((int)rows, s);
        r += rows;
      }
    }
  }
}

// y = x / sqrt(mean(x^2) + eps) * weight, over `width` floats; x and y may be one.
static inline void rms_norm(const float* x, const float* weight, float* y, int64_t width, float eps) {
  vec squares = vec{};
  for (int64_t i = 0; i < width; i += W) { vec a = load(x + i); squares += a * a; }
  float factor = 1.f / std::sqrt(sum(squares) / width + eps);
  for (int64_t i = 0; i < width; i += W) store(y + i, load(x + i) * factor * load(weight + i));
}
