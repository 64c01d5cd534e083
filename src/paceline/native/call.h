// What Python hands over: library.py mirrors these structs field by field.
// Letters: B batch, N nodes, H hidden, A heads, C head width, I inner width, V vocabulary, K taps.
#pragma once

#include <algorithm>
#include <cstdint>

struct Matrix { const float *weight, *bias; };  // [outputs, inputs]; bias [outputs] or null
struct Layer {
  Matrix q, k, v, o, gate, up, down;
  const float *norm1, *norm2, *q_norm, *k_norm;  // q_norm, k_norm [C] or null
  int64_t window;                                // sliding window in positions, 0 for none
};
struct Model {
  int64_t layers, hidden, heads, key_heads, width, inner, vocab, words;  // vocab: rows of head; words: rows of embed
  float eps, scale;
  const float *embed, *embed_norm, *norm;  // embed_norm: a draft's layer reads [embed_norm(embedding); norm1(x)]; or null
  Matrix head;
  const Layer* layer;
};
typedef void (*Parallel)(void (*)(void*), void*, unsigned, unsigned);  // GOMP_parallel of torch's own OpenMP, or null
typedef int (*Ask)();
struct Team { Parallel parallel; Ask thread_number, thread_count; };
struct Call {
  int64_t batch, nodes, above, capacity, wanted, taps, threads;  // above: nodes that lie behind the lengths already
  const int64_t *tokens, *depths, *lengths;  // [B, N], [B, N], [B]
  const float* features;                     // [B, N, H], where a draft's residual starts; null: at the embeddings
  const uint8_t* mask;                       // [B, N, above + N], ancestors and self
  const float *cos, *sin;                    // [positions, C]
  float *const *keys, *const *values;        // per layer [B, key heads, capacity, C]
  const int64_t *rows, *tap_layers;          // [wanted] rows of B * N whose logits are wanted; [K]
  float *logits, *tapped;                    // [wanted, V]; [B, N, K * H]
  Team team;
};

struct Range { int64_t from, to; };
// The part of thread t of T of `count` things, cut at multiples of `unit`.
static inline Range share(int64_t count, int64_t unit, int t, int T) {
  int64_t units = (count + unit - 1) / unit;
  return {std::min(count, units * t / T * unit), std::min(count, units * (t + 1) / T * unit)};
}
