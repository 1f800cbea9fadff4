// Softmax: cross entropy and causal attention. Shapes and formulas: contract.py.
#pragma once

#include "parallel.h"
#include "simd.h"

namespace {

using packmule::Pool;

constexpr int64_t kBlock = 2048;  // elements between two rescalings of a running sum

template <class S> struct Normalizer {
  S shift;  // the largest element, 0 where all are -inf
  S sum;    // of e^(x - shift)
};

// The online normalizer (Milakov & Gimelshein 2018) over row * scale, rescaled per block.
// Lanes past the end must not count: they get -inf, whose exponential is 0.
template <class C, class S = typename Wide<C>::type>
PM_INLINE Normalizer<S> normalizer(const C* row, int64_t n, S scale) {
  const S lowest = -S(INFINITY);
  V<S> total = splat(S(0));
  S top = lowest;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = begin + kBlock < n ? begin + kBlock : n;
    V<S> high = splat(lowest);
    each(begin, end, [&](int64_t i, auto lanes) {
      high = larger(padded(load(row + i, lanes) * scale, lanes, lowest), high);
    });
    const S block = largest(high);
    if (block > top) {
      total = total * (top == lowest ? S(0) : exponential_one(top - block));
      top = block;
    }
    const S shift = top == lowest ? S(0) : top;
    each(begin, end, [&](int64_t i, auto lanes) {
      total = total + exponential<true>(padded(load(row + i, lanes) * scale, lanes, lowest) - shift);
    });
  }
  return {top == lowest ? S(0) : top, sum(total)};
}

template <class C>
int cross_entropy(Pool* pool, int64_t chunk, int64_t vocab, C* logits, const int64_t* targets, double scale,
                  typename Wide<C>::type* loss, bool gradient) {
  using S = typename Wide<C>::type;
  for (int64_t i = 0; i < chunk; ++i)
    if (targets[i] != -100 && (targets[i] < 0 || targets[i] >= vocab)) return 1;
  parallel(pool, chunk, vocab * 4 * sizeof(C), [=](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      C* row = logits + token * vocab;
      const int64_t target = targets[token];
      if (target == -100) {
        loss[token] = 0;
        if (gradient) memset(row, 0, vocab * sizeof(C));
        continue;
      }
      const Normalizer<S> z = normalizer(row, vocab, S(1));
      const S goal = value(row + target);
      loss[token] = logarithm(z.sum) + (z.shift - goal);
      if (!gradient) continue;
      const S p = exponential_one(goal - z.shift) / z.sum;
      const S factor = S(scale) / z.sum;
      each(0, vocab, [&](int64_t i, auto lanes) {
        store(row + i, exponential<true>(load(row + i, lanes) - z.shift) * factor, lanes);
      });
      put(row + target, (p - S(1)) * S(scale));
    }
  });
  return 0;
}

// Row of scores to probabilities; returns the normalizer. A row of one block keeps its
// exponentials on the stack; a longer one computes them twice. The bits are the same.
template <class C, class S = typename Wide<C>::type>
PM_INLINE Normalizer<S> softmax_row(C* row, int64_t n, S scale) {
  if (n > kBlock) {
    const Normalizer<S> z = normalizer(row, n, scale);
    const S inverse = S(1) / z.sum;
    each(0, n, [&](int64_t i, auto lanes) {
      store(row + i, exponential<true>(load(row + i, lanes) * scale - z.shift) * inverse, lanes);
    });
    return z;
  }
  const S lowest = -S(INFINITY);
  S powers[kBlock];
  V<S> high = splat(lowest), total = splat(S(0));
  each(0, n, [&](int64_t i, auto lanes) {
    high = larger(padded(load(row + i, lanes) * scale, lanes, lowest), high);
  });
  const S top = largest(high);
  const S shift = top == lowest ? S(0) : top;
  each(0, n, [&](int64_t i, auto lanes) {
    const V<S> power = exponential<true>(padded(load(row + i, lanes) * scale, lanes, lowest) - shift);
    total = total + power;
    store(powers + i, power, lanes);
  });
  const Normalizer<S> z = {shift, sum(total)};
  const S inverse = S(1) / z.sum;
  each(0, n, [&](int64_t i, auto lanes) { store(row + i, load(powers + i, lanes) * inverse, lanes); });
  return z;
}

template <class C>
void causal_softmax(Pool* pool, int64_t batch, int64_t n, int64_t m, C* scores, int64_t offset, int64_t window,
                    double scale, typename Wide<C>::type* lse) {
  using S = typename Wide<C>::type;
  parallel(pool, batch * n, m * 2 * sizeof(C), [=](int64_t begin, int64_t end) {
    for (int64_t line = begin; line < end; ++line) {
      C* row = scores + line * m;
      const int64_t last = line % n + offset + 1;
      const int64_t stop = last < m ? last : m;
      const int64_t start = last > window ? last - window : 0;
      const Normalizer<S> z = softmax_row(row + start, stop - start, S(scale));
      lse[line] = logarithm(z.sum) + z.shift;
      memset(row, 0, start * sizeof(C));
      memset(row + stop, 0, (m - stop) * sizeof(C));
    }
  });
}

template <class C>
void causal_softmax_backward(Pool* pool, int64_t rows, int64_t m, const C* p, C* dp,
                             const typename Wide<C>::type* delta, double scale) {
  using S = typename Wide<C>::type;
  parallel(pool, rows, m * 3 * sizeof(C), [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      each(row * m, (row + 1) * m, [&](int64_t i, auto lanes) {
        store(dp + i, load(p + i, lanes) * (load(dp + i, lanes) - delta[row]) * S(scale), lanes);
      });
  });
}

}  // namespace
