// Embedding, soft caps, gradient accumulation, casts, norms and update rules. Shapes and formulas: contract.py.
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

struct AdaLomo {
  double lr, decay, eps, least, most, weight_decay, grad_scale;
};

// The last pass: master shrinks and moves along u(row, lanes of column i), whose squares sum to `squares`;
// `sizes` is the sum of the squares of the masters.
template <class S, class W, class U>
void normalized_update(Pool* pool, int64_t rows, int64_t columns, S* master, W* weight, double squares,
                       double sizes, const AdaLomo& rule, U u) {
  const double count = double(rows) * double(columns), size = ::sqrt(sizes / count);
  const double reach = ::sqrt(squares / count) / rule.most, rate = rule.lr * (size > rule.least ? size : rule.least);
  const S kept = S(1 - rate * rule.weight_decay), step = S(rate / (reach > 1 ? reach : 1));
  parallel(pool, rows, columns * (3 * sizeof(S) + sizeof(W)), [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      S* p = master + row * columns;
      each(0, columns, [&](int64_t i, auto lanes) {
        const V<S> moved = load(p + i, lanes) * kept - u(row, i, lanes) * step;
        store(p + i, moved, lanes);
        if (weight) store(weight + row * columns + i, moved, lanes);
      });
    }
  });
}

// Rows and columns of the second moment decay and take in the gradient's; every sum is in double, of a
// row in lanes, of columns and of rows' sums in order.
template <class S, class G, class W>
int adalomo(Pool* pool, int64_t rows, int64_t columns, S* master, S* row_square, S* column_square, const G* grad,
            W* weight, const AdaLomo& rule) {
  const S grad_scale = S(rule.grad_scale);
  double* by_row = static_cast<double*>(malloc(sizeof(double) * (2 * rows + 1)));
  S* factor = static_cast<S*>(malloc(sizeof(S) * (rows + columns)));
  if (!by_row || !factor) {
    free(by_row);
    free(factor);
    return 2;
  }
  double* sizes = by_row + rows;
  S *row_factor = factor, *column_factor = factor + rows;
  parallel(pool, rows, columns * sizeof(G), [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      V<double> squares = splat(0.0);
      each(0, columns, [&](int64_t i, auto lanes) {
        const V<double> g = widen(load(grad + row * columns + i, lanes) * grad_scale);
        squares = squares + g * g;
      });
      by_row[row] = sum(squares) / double(columns) + rule.eps;
    }
  });
  double mean = 0;
  for (int64_t row = 0; row < rows; ++row) {
    row_square[row] = S(rule.decay * double(row_square[row]) + (1 - rule.decay) * by_row[row]);
    mean += double(row_square[row]);
  }
  mean /= double(rows);
  for (int64_t row = 0; row < rows; ++row) row_factor[row] = S(1 / ::sqrt(double(row_square[row]) / mean));
  parallel(pool, (columns + kLanes - 1) / kLanes, rows * kLanes * sizeof(G), [=](int64_t begin, int64_t end) {
    for (int64_t slab = begin; slab < end; ++slab) {
      const int64_t low = slab * kLanes, high = low + kLanes < columns ? low + kLanes : columns;
      each(low, high, [&](int64_t i, auto lanes) {
        V<double> squares = splat(0.0);
        for (int64_t row = 0; row < rows; ++row) {
          const V<double> g = widen(load(grad + row * columns + i, lanes) * grad_scale);
          squares = squares + g * g;
        }
        double found[kLanes];
        store(found, squares, Full());
        for (int64_t j = i; j < high; ++j) {
          const double fresh = found[j - i] / double(rows) + rule.eps;
          column_square[j] = S(rule.decay * double(column_square[j]) + (1 - rule.decay) * fresh);
          column_factor[j] = S(1 / ::sqrt(double(column_square[j])));
        }
      });
    }
  });
  const auto u = [=](int64_t row, int64_t i, auto lanes) {
    const V<S> factors = load(column_factor + i, lanes) * row_factor[row];
    return load(grad + row * columns + i, lanes) * grad_scale * factors;
  };
  parallel(pool, rows, columns * (sizeof(G) + 2 * sizeof(S)), [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      V<double> squares = splat(0.0), size = splat(0.0);
      each(0, columns, [&](int64_t i, auto lanes) {
        const V<double> a = widen(u(row, i, lanes)), p = widen(load(master + row * columns + i, lanes));
        squares = squares + a * a;
        size = size + p * p;
      });
      by_row[row] = sum(squares);
      sizes[row] = sum(size);
    }
  });
  double squares = 0, size = 0;
  for (int64_t row = 0; row < rows; ++row) squares += by_row[row], size += sizes[row];
  normalized_update(pool, rows, columns, master, weight, squares, size, rule, u);
  free(by_row);
  free(factor);
  return 0;
}

// Of a vector, whose second moment is whole. It is short: one thread.
template <class S, class G, class W>
void adalomo_vector(Pool* pool, int64_t count, S* master, S* square, const G* grad, W* weight,
                    const AdaLomo& rule) {
  const S grad_scale = S(rule.grad_scale), decay = S(rule.decay), gain = S(1 - rule.decay), eps = S(rule.eps);
  V<double> squares = splat(0.0), size = splat(0.0);
  const auto u = [=](int64_t, int64_t i, auto lanes) {
    return load(grad + i, lanes) * grad_scale / square_root(load(square + i, lanes));
  };
  each(0, count, [&](int64_t i, auto lanes) {
    const V<S> g = load(grad + i, lanes) * grad_scale;
    store(square + i, load(square + i, lanes) * decay + (g * g + splat(eps)) * gain, lanes);
    const V<double> a = widen(g / square_root(padded(load(square + i, lanes), lanes, S(1))));
    const V<double> p = widen(load(master + i, lanes));
    squares = squares + a * a;
    size = size + p * p;
  });
  normalized_update(pool, 1, count, master, weight, sum(squares), sum(size), rule, u);
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
