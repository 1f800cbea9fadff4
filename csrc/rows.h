// Norms, sums over rows, rotary embedding, activations. Shapes and formulas: src/packmule/kernels/contract.py.
#pragma once

#include <stdlib.h>

#include <type_traits>

#include "parallel.h"
#include "simd.h"

namespace {

using packmule::Pool;

template <class C>
void rmsnorm(Pool* pool, int64_t n, int64_t h, const C* x, const C* weight, double offset, double eps, C* out,
             typename Wide<C>::type* rstd) {
  using S = typename Wide<C>::type;
  parallel(pool, n, h * 2 * sizeof(C), [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const C* in = x + row * h;
      C* to = out + row * h;
      V<S> squares = splat(S(0));
      each(0, h, [&](int64_t i, auto lanes) {
        const V<S> a = load(in + i, lanes);
        squares = squares + a * a;
      });
      const S r = S(1) / square_root(sum(squares) / S(h) + S(eps));
      rstd[row] = r;
      each(0, h, [&](int64_t i, auto lanes) {
        store(to + i, load(in + i, lanes) * r * (load(weight + i, lanes) + S(offset)), lanes);
      });
    }
  });
}

template <class C>
void layernorm(Pool* pool, int64_t n, int64_t h, const C* x, const C* weight, const C* bias, double eps,
               C* out, typename Wide<C>::type* mean, typename Wide<C>::type* rstd) {
  using S = typename Wide<C>::type;
  parallel(pool, n, h * 2 * sizeof(C), [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const C* in = x + row * h;
      C* to = out + row * h;
      V<S> total = splat(S(0)), squares = splat(S(0));
      each(0, h, [&](int64_t i, auto lanes) { total = total + load(in + i, lanes); });
      const S middle = sum(total) / S(h);
      each(0, h, [&](int64_t i, auto lanes) {
        const V<S> a = padded(load(in + i, lanes) - middle, lanes, S(0));
        squares = squares + a * a;
      });
      const S r = S(1) / square_root(sum(squares) / S(h) + S(eps));
      mean[row] = middle;
      rstd[row] = r;
      each(0, h, [&](int64_t i, auto lanes) {
        const V<S> xhat = (load(in + i, lanes) - middle) * r;
        store(to + i, xhat * load(weight + i, lanes) + load(bias + i, lanes), lanes);
      });
    }
  });
}

// out = (out +) the sum of what body(row, mine) adds to mine [h]. Rows are cut into at most 64
// blocks whatever the threads; each block sums its rows in order, then the blocks are added in order.
template <class S, class Body>
int sum_over_rows(Pool* pool, int64_t n, int64_t h, int64_t row_bytes, S* out, bool first, Body body) {
  const int64_t rows = n <= 64 * 8 ? 8 : (n + 63) / 64;
  const int64_t blocks = (n + rows - 1) / rows;
  S* partial = static_cast<S*>(malloc(sizeof(S) * (blocks * h + 1)));
  if (!partial) return 2;
  parallel(pool, blocks, rows * row_bytes, [=](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      S* mine = partial + block * h;
      const int64_t stop = (block + 1) * rows < n ? (block + 1) * rows : n;
      memset(mine, 0, h * sizeof(S));
      for (int64_t row = block * rows; row < stop; ++row) body(row, mine);
    }
  });
  parallel(pool, (h + kLanes - 1) / kLanes, blocks * kLanes * sizeof(S), [=](int64_t begin, int64_t end) {
    each(begin * kLanes, end * kLanes < h ? end * kLanes : h, [&](int64_t i, auto lanes) {
      V<S> total = splat(S(0));
      for (int64_t block = 0; block < blocks; ++block) total = total + load(partial + block * h + i, lanes);
      store(out + i, first ? total : load(out + i, lanes) + total, lanes);
    });
  });
  free(partial);
  return 0;
}

template <class C>
int rmsnorm_backward(Pool* pool, int64_t n, int64_t h, const C* dy, const C* x, const C* weight, double offset,
                     const typename Wide<C>::type* rstd, C* dx, typename Wide<C>::type* dweight,
                     const C* residual, bool first) {
  using S = typename Wide<C>::type;
  return sum_over_rows(pool, n, h, h * 4 * sizeof(C), dweight, first, [=](int64_t row, S* mine) {
    const int64_t at = row * h;
    const S r = rstd[row];
    V<S> dot = splat(S(0));
    each(0, h, [&](int64_t i, auto lanes) {
      const V<S> u = load(dy + at + i, lanes) * (load(weight + i, lanes) + S(offset));
      dot = dot + u * (load(x + at + i, lanes) * r);
    });
    const S mean = sum(dot) / S(h);
    each(0, h, [&](int64_t i, auto lanes) {
      const V<S> d = load(dy + at + i, lanes);
      const V<S> xhat = load(x + at + i, lanes) * r;
      V<S> g = (d * (load(weight + i, lanes) + S(offset)) - xhat * mean) * r;
      if (residual) g = load(residual + at + i, lanes) + g;
      store(mine + i, load(mine + i, lanes) + d * xhat, lanes);
      store(dx + at + i, g, lanes);
    });
  });
}

template <class C>
int layernorm_backward(Pool* pool, int64_t n, int64_t h, const C* dy, const C* x, const C* weight,
                       const typename Wide<C>::type* mean, const typename Wide<C>::type* rstd, C* dx,
                       typename Wide<C>::type* dweight, const C* residual, bool first) {
  using S = typename Wide<C>::type;
  return sum_over_rows(pool, n, h, h * 4 * sizeof(C), dweight, first, [=](int64_t row, S* mine) {
    const int64_t at = row * h;
    const S r = rstd[row], middle = mean[row];
    V<S> total = splat(S(0)), dot = splat(S(0));
    each(0, h, [&](int64_t i, auto lanes) {
      const V<S> u = load(dy + at + i, lanes) * load(weight + i, lanes);  // 0 past the end
      total = total + u;
      dot = dot + u * ((load(x + at + i, lanes) - middle) * r);
    });
    const S mean_u = sum(total) / S(h), mean_dot = sum(dot) / S(h);
    each(0, h, [&](int64_t i, auto lanes) {
      const V<S> d = load(dy + at + i, lanes);
      const V<S> xhat = (load(x + at + i, lanes) - middle) * r;
      V<S> g = (d * load(weight + i, lanes) - mean_u - xhat * mean_dot) * r;
      if (residual) g = load(residual + at + i, lanes) + g;
      store(mine + i, load(mine + i, lanes) + d * xhat, lanes);
      store(dx + at + i, g, lanes);
    });
  });
}

template <class C>
int column_sums(Pool* pool, int64_t n, int64_t h, const C* x, typename Wide<C>::type* out, bool first) {
  using S = typename Wide<C>::type;
  return sum_over_rows(pool, n, h, h * sizeof(C), out, first, [=](int64_t row, S* mine) {
    each(0, h, [&](int64_t i, auto lanes) {
      store(mine + i, load(mine + i, lanes) + load(x + row * h + i, lanes), lanes);
    });
  });
}

template <class C>
int rope(Pool* pool, int64_t n, int64_t heads, int64_t head_dim, int64_t half, int64_t rows, C* x,
         const typename Wide<C>::type* cosines, const typename Wide<C>::type* sines,
         const int32_t* positions, bool inverse) {
  using S = typename Wide<C>::type;
  for (int64_t i = 0; i < n; ++i)
    if (positions[i] < 0 || positions[i] >= rows) return 1;
  const S sign = inverse ? S(-1) : S(1);
  parallel(pool, n, heads * head_dim * 2 * sizeof(C), [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const S* cosine = cosines + positions[row] * half;
      const S* sine = sines + positions[row] * half;
      for (int64_t head = 0; head < heads; ++head) {
        C* low = x + (row * heads + head) * head_dim;
        C* high = low + half;
        each(0, half, [&](int64_t i, auto lanes) {
          const V<S> c = load(cosine + i, lanes), s = load(sine + i, lanes) * sign;
          const V<S> a = load(low + i, lanes), b = load(high + i, lanes);
          store(low + i, a * c - b * s, lanes);
          store(high + i, b * c + a * s, lanes);
        });
      }
    }
  });
  return 0;
}

template <class S> PM_INLINE V<S> sigmoid(V<S> a) {
  return splat(S(1)) / (exponential<false>(splat(S(0)) - a) + S(1));
}

enum ActivationKind { kSilu = 0, kGeluTanh = 1 };

// An activation g * sigmoid(u(g)): u, and g times u's derivative. silu: u = g. gelu_tanh: u = 2 sqrt(2 / pi)
// (g + 0.044715 g^3), since 1 + tanh(a) = 2 sigmoid(2 a); beyond +-100 the sigmoid is 0 or 1 and the cube
// would overflow.
template <class S> struct Inner {
  V<S> u, slope;
};
template <int Kind, class S> PM_INLINE Inner<S> inner(V<S> g) {
  if constexpr (Kind == kSilu) {
    return {g, g};
  } else {
    const S a = S(1.5957691216057307117597842397375), b = S(0.044715);
    const V<S> zero = splat(S(0)), low = splat(S(-100));
    const V<S> up = larger(low, g), c = zero - larger(low, zero - up), square = c * c;
    return {(c + c * square * b) * a, (c + c * square * S(3 * 0.044715)) * a};
  }
}

template <class Body> PM_INLINE void with_activation(int kind, Body body) {
  if (kind == kSilu)
    body(std::integral_constant<int, kSilu>());
  else
    body(std::integral_constant<int, kGeluTanh>());
}

// up may be null: no gate.
template <class C> void activate(Pool* pool, int kind, int64_t count, const C* gate, const C* up, C* out) {
  using S = typename Wide<C>::type;
  with_activation(kind, [=](auto tag) {
    constexpr int Kind = decltype(tag)::value;
    parallel_flat(pool, count, 3 * sizeof(C), [=](int64_t begin, int64_t end) {
      each(begin, end, [&](int64_t i, auto lanes) {
        const V<S> g = load(gate + i, lanes);
        const V<S> a = g * sigmoid(inner<Kind>(g).u);
        store(out + i, up ? a * load(up + i, lanes) : a, lanes);
      });
    });
  });
}

template <class C>
void activate_backward(Pool* pool, int kind, int64_t count, const C* da, const C* gate, const C* up, C* dgate,
                       C* dup) {
  using S = typename Wide<C>::type;
  with_activation(kind, [=](auto tag) {
    constexpr int Kind = decltype(tag)::value;
    parallel_flat(pool, count, 5 * sizeof(C), [=](int64_t begin, int64_t end) {
      each(begin, end, [&](int64_t i, auto lanes) {
        const V<S> d = load(da + i, lanes), g = load(gate + i, lanes);
        const Inner<S> in = inner<Kind>(g);
        const V<S> one = splat(S(1)), s = sigmoid(in.u);
        const V<S> slope = s * (one + in.slope * (one - s));
        if (up) {
          const V<S> u = load(up + i, lanes);
          store(dup + i, d * (g * s), lanes);
          store(dgate + i, d * u * slope, lanes);
        } else {
          store(dgate + i, d * slope, lanes);
        }
      });
    });
  });
}

}  // namespace
