// Embedding, soft caps, gradient accumulation, casts, norms, AdamW and SGD. Shapes and formulas: contract.py.
#pragma once

#include <stdlib.h>

#include "parallel.h"
#include "simd.h"

namespace {

using packmule::Pool;

PM_INLINE bool inside(const int64_t* ids, int64_t n, int64_t size) {
  for (int64_t i = 0; i < n; ++i)
    if (ids[i] < 0 || ids[i] >= size) return false;
  return true;
}

template <class C>
int embedding(Pool* pool, int64_t n, int64_t vocab, int64_t h, const C* table, const int64_t* ids, C* out,
              double scale, bool add) {
  using S = typename Wide<C>::type;
  if (!inside(ids, n, vocab)) return 1;
  const bool copy = scale == 1 && !add;
  parallel(pool, n, h * 2 * sizeof(C), [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const C* from = table + ids[row] * h;
      C* to = out + row * h;
      if (copy)
        memcpy(to, from, h * sizeof(C));
      else
        each(0, h, [&](int64_t i, auto lanes) {
          const V<S> a = load(from + i, lanes) * S(scale);
          store(to + i, add ? load(to + i, lanes) + a : a, lanes);
        });
    }
  });
  return 0;
}

// Columns are shared out, so each element sees its tokens in order.
template <class C>
int embedding_backward(Pool* pool, int64_t n, int64_t vocab, int64_t h, const C* dy, const int64_t* ids,
                       typename Wide<C>::type* grad, bool first, double scale) {
  using S = typename Wide<C>::type;
  if (!inside(ids, n, vocab)) return 1;
  if (first)
    parallel(pool, vocab, h * sizeof(S), [=](int64_t begin, int64_t end) {
      memset(grad + begin * h, 0, (end - begin) * h * sizeof(S));
    });
  parallel(pool, (h + kLanes - 1) / kLanes, n * kLanes * 3 * sizeof(S), [=](int64_t begin, int64_t end) {
    const int64_t low = begin * kLanes, high = end * kLanes < h ? end * kLanes : h;
    for (int64_t t = 0; t < n; ++t) {
      S* to = grad + ids[t] * h;
      const C* from = dy + t * h;
      each(low, high, [&](int64_t i, auto lanes) {
        store(to + i, load(to + i, lanes) + load(from + i, lanes) * S(scale), lanes);
      });
    }
  });
  return 0;
}

// x = cap * tanh(x * scale / cap).
template <class C> void softcap(Pool* pool, int64_t count, C* x, double scale, double cap) {
  using S = typename Wide<C>::type;
  const S inside = S(scale / cap), outside = S(cap);
  parallel_flat(pool, count, 2 * sizeof(C), [=](int64_t begin, int64_t end) {
    each(begin, end, [&](int64_t i, auto lanes) {
      store(x + i, hyperbolic_tangent(load(x + i, lanes) * inside) * outside, lanes);
    });
  });
}

template <class C>
void softcap_backward(Pool* pool, int64_t count, C* dy, const C* y, double scale, double cap) {
  using S = typename Wide<C>::type;
  const S inverse = S(1 / cap), factor = S(scale);
  parallel_flat(pool, count, 3 * sizeof(C), [=](int64_t begin, int64_t end) {
    each(begin, end, [&](int64_t i, auto lanes) {
      const V<S> t = load(y + i, lanes) * inverse;
      store(dy + i, load(dy + i, lanes) * ((splat(S(1)) - t * t) * factor), lanes);
    });
  });
}

template <class S, class C>
void accumulate(Pool* pool, int64_t count, S* dst, const C* src, bool first) {
  parallel_flat(pool, count, 2 * sizeof(S) + sizeof(C), [=](int64_t begin, int64_t end) {
    if (first)
      each(begin, end, [&](int64_t i, auto lanes) { store(dst + i, load(src + i, lanes), lanes); });
    else
      each(begin, end, [&](int64_t i, auto lanes) {
        store(dst + i, load(dst + i, lanes) + load(src + i, lanes), lanes);
      });
  });
}

PM_INLINE void convert(V<float> a, float* p, Full) { store(p, a, Full()); }
PM_INLINE void convert(V<float> a, bf16* p, Full) { store(p, a, Full()); }
PM_INLINE void convert(V<float> a, double* p, Full) { store(p, widen(a), Full()); }
PM_INLINE void convert(V<double> a, float* p, Full) { store(p, narrow(a), Full()); }
PM_INLINE void convert(V<double> a, bf16* p, Full) { store(p, narrow(a), Full()); }
PM_INLINE void convert(V<double> a, double* p, Full) { store(p, a, Full()); }
template <class S, class To> PM_INLINE void convert(V<S> a, To* p, int n) {
  To lanes[kLanes];
  convert(a, lanes, Full());
  memcpy(p, lanes, n * sizeof(To));
}

template <class To, class From> void cast(Pool* pool, int64_t count, To* dst, const From* src) {
  parallel_flat(pool, count, sizeof(To) + sizeof(From), [=](int64_t begin, int64_t end) {
    each(begin, end, [&](int64_t i, auto lanes) { convert(load(src + i, lanes), dst + i, lanes); });
  });
}

template <class C> int sum_squares(Pool* pool, int64_t count, const C* x, double* total) {
  constexpr int64_t kChunk = 65536;
  const int64_t chunks = (count + kChunk - 1) / kChunk;
  double* partial = static_cast<double*>(malloc(sizeof(double) * (chunks + 1)));
  if (!partial) return 2;
  parallel(pool, chunks, kChunk * sizeof(C), [=](int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      const int64_t stop = (chunk + 1) * kChunk;
      V<double> squares = splat(0.0);
      each(chunk * kChunk, stop < count ? stop : count, [&](int64_t i, auto lanes) {
        const V<double> a = widen(load(x + i, lanes));
        squares = squares + a * a;
      });
      partial[chunk] = sum(squares);
    }
  });
  double all = 0;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) all += partial[chunk];
  free(partial);
  *total = all;
  return 0;
}

// The scalars of one update, made once in double and rounded to S.
struct AdamW {
  double decay, beta1, gain1, beta2, gain2, rate, root_scale, eps, grad_scale;
};

template <class S, class G, class W>
void adamw(Pool* pool, int64_t count, S* master, S* first, S* second, const G* grad, W* weight,
           const AdamW& rule) {
  const S decay = S(rule.decay), beta1 = S(rule.beta1), gain1 = S(rule.gain1), beta2 = S(rule.beta2),
          gain2 = S(rule.gain2), rate = S(rule.rate), root_scale = S(rule.root_scale), eps = S(rule.eps),
          grad_scale = S(rule.grad_scale);
  parallel_flat(pool, count, 6 * sizeof(S) + sizeof(G) + sizeof(W), [=](int64_t begin, int64_t end) {
    const auto update = [=](int64_t i, auto lanes) {
      const V<S> g = load(grad + i, lanes) * grad_scale;
      const V<S> m = load(first + i, lanes) * beta1 + g * gain1;
      const V<S> v = load(second + i, lanes) * beta2 + g * g * gain2;
      const V<S> step = m / (square_root(v) * root_scale + eps);
      const V<S> p = load(master + i, lanes) * decay - step * rate;
      store(first + i, m, lanes);
      store(second + i, v, lanes);
      store(master + i, p, lanes);
      return p;
    };
    if (weight)
      each(begin, end, [&](int64_t i, auto lanes) { store(weight + i, update(i, lanes), lanes); });
    else
      each(begin, end, [&](int64_t i, auto lanes) { update(i, lanes); });
  });
}

template <class S, class G, class W>
void sgd(Pool* pool, int64_t count, S* master, const G* grad, W* weight, double decay, double rate) {
  const S kept = S(decay), step = S(rate);
  parallel_flat(pool, count, 2 * sizeof(S) + sizeof(G) + sizeof(W), [=](int64_t begin, int64_t end) {
    const auto update = [=](int64_t i, auto lanes) {
      const V<S> p = load(master + i, lanes) * kept - load(grad + i, lanes) * step;
      store(master + i, p, lanes);
      return p;
    };
    if (weight)
      each(begin, end, [&](int64_t i, auto lanes) { store(weight + i, update(i, lanes), lanes); });
    else
      each(begin, end, [&](int64_t i, auto lanes) { update(i, lanes); });
  });
}

}  // namespace
