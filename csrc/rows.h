// RMSNorm, rotary embedding, SwiGLU. Shapes and formulas: src/packmule/kernels/contract.py.
#pragma once

#include <stdlib.h>

#include "parallel.h"
#include "simd.h"

namespace {

using packmule::Pool;

template <class C>
void rmsnorm(Pool* pool, int64_t n, int64_t h, const C* x, const C* weight, double eps, C* out,
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
        store(to + i, load(in + i, lanes) * r * load(weight + i, lanes), lanes);
      });
    }
  });
}

// Rows are cut into at most 64 blocks whatever the threads; each block sums its rows of
// dweight in order, then the blocks are added in order.
template <class C>
int rmsnorm_backward(Pool* pool, int64_t n, int64_t h, const C* dy, const C* x, const C* weight,
                     const typename Wide<C>::type* rstd, C* dx, typename Wide<C>::type* dweight,
                     const C* residual, bool first) {
  using S = typename Wide<C>::type;
  const int64_t rows = n <= 64 * 8 ? 8 : (n + 63) / 64;
  const int64_t blocks = (n + rows - 1) / rows;
  S* partial = static_cast<S*>(malloc(sizeof(S) * (blocks * h + 1)));
  if (!partial) return 2;
  parallel(pool, blocks, rows * h * 4 * sizeof(C), [=](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      S* mine = partial + block * h;
      const int64_t stop = (block + 1) * rows < n ? (block + 1) * rows : n;
      memset(mine, 0, h * sizeof(S));
      for (int64_t row = block * rows; row < stop; ++row) {
        const int64_t at = row * h;
        const S r = rstd[row];
        V<S> dot = splat(S(0));
        each(0, h, [&](int64_t i, auto lanes) {
          const V<S> u = load(dy + at + i, lanes) * load(weight + i, lanes);
          dot = dot + u * (load(x + at + i, lanes) * r);
        });
        const S mean = sum(dot) / S(h);
        each(0, h, [&](int64_t i, auto lanes) {
          const V<S> d = load(dy + at + i, lanes);
          const V<S> xhat = load(x + at + i, lanes) * r;
          V<S> g = (d * load(weight + i, lanes) - xhat * mean) * r;
          if (residual) g = load(residual + at + i, lanes) + g;
          store(mine + i, load(mine + i, lanes) + d * xhat, lanes);
          store(dx + at + i, g, lanes);
        });
      }
    }
  });
  parallel(pool, (h + kLanes - 1) / kLanes, blocks * kLanes * sizeof(S), [=](int64_t begin, int64_t end) {
    each(begin * kLanes, end * kLanes < h ? end * kLanes : h, [&](int64_t i, auto lanes) {
      V<S> total = splat(S(0));
      for (int64_t block = 0; block < blocks; ++block) total = total + load(partial + block * h + i, lanes);
      store(dweight + i, first ? total : load(dweight + i, lanes) + total, lanes);
    });
  });
  free(partial);
  return 0;
}

template <class C>
int rope(Pool* pool, int64_t n, int64_t heads, int64_t head_dim, int64_t rows, C* x,
         const typename Wide<C>::type* cosines, const typename Wide<C>::type* sines,
         const int32_t* positions, bool inverse) {
  using S = typename Wide<C>::type;
  for (int64_t i = 0; i < n; ++i)
    if (positions[i] < 0 || positions[i] >= rows) return 1;
  const int64_t half = head_dim / 2;
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

template <class C> void swiglu(Pool* pool, int64_t count, const C* gate, const C* up, C* out) {
  using S = typename Wide<C>::type;
  parallel_flat(pool, count, 3 * sizeof(C), [=](int64_t begin, int64_t end) {
    each(begin, end, [&](int64_t i, auto lanes) {
      const V<S> g = load(gate + i, lanes);
      store(out + i, g * sigmoid(g) * load(up + i, lanes), lanes);
    });
  });
}

template <class C>
void swiglu_backward(Pool* pool, int64_t count, const C* da, const C* gate, const C* up, C* dgate, C* dup) {
  using S = typename Wide<C>::type;
  parallel_flat(pool, count, 5 * sizeof(C), [=](int64_t begin, int64_t end) {
    each(begin, end, [&](int64_t i, auto lanes) {
      const V<S> d = load(da + i, lanes), g = load(gate + i, lanes), u = load(up + i, lanes);
      const V<S> one = splat(S(1)), s = sigmoid(g);
      store(dup + i, d * (g * s), lanes);
      store(dgate + i, d * u * (s * (one + g * (one - s))), lanes);
    });
  });
}

}  // namespace
