// Mixture of experts: routing, dispatch, and rows weighed by their share. Formulas: contract.py.
#pragma once

#include <stdlib.h>

#include "flat.h"
#include "loss.h"

namespace {

constexpr int64_t kExperts = 1024;  // most experts: a row of probabilities lies on the stack

template <class C, class S = typename Wide<C>::type>
PM_INLINE void probabilities(const C* row, int64_t experts, S* p) {
  each(0, experts, [&](int64_t i, auto lanes) { store(p + i, load(row + i, lanes), lanes); });
  softmax_row(p, experts, S(1));
}

// Rows are cut into at most 64 blocks whatever the threads, as in rmsnorm_backward.
template <class C, class S = typename Wide<C>::type>
int route(Pool* pool, int64_t n, int64_t experts, int64_t k, const C* logits, bool renormalize, int32_t* chosen,
          S* share, S* mass) {
  const int64_t rows = n <= 64 * 8 ? 8 : (n + 63) / 64;
  const int64_t blocks = (n + rows - 1) / rows;
  S* partial = static_cast<S*>(malloc(sizeof(S) * (blocks * experts + 1)));
  if (!partial) return 2;
  parallel(pool, blocks, rows * experts * (8 + k) * sizeof(S), [=](int64_t begin, int64_t end) {
    S p[kExperts], wide[kExperts];
    for (int64_t block = begin; block < end; ++block) {
      S* mine = partial + block * experts;
      const int64_t stop = (block + 1) * rows < n ? (block + 1) * rows : n;
      memset(mine, 0, experts * sizeof(S));
      for (int64_t row = block * rows; row < stop; ++row) {
        const C* in = logits + row * experts;
        each(0, experts, [&](int64_t i, auto lanes) { store(wide + i, load(in + i, lanes), lanes); });
        probabilities(in, experts, p);
        each(0, experts, [&](int64_t i, auto lanes) {
          store(mine + i, load(mine + i, lanes) + load(p + i, lanes), lanes);
        });
        bool taken[kExperts] = {};
        S total = S(0);
        for (int64_t rank = 0; rank < k; ++rank) {
          int64_t best = -1;
          for (int64_t e = 0; e < experts; ++e)
            if (!taken[e] && (best < 0 || wide[e] > wide[best])) best = e;
          taken[best] = true;
          chosen[row * k + rank] = static_cast<int32_t>(best);
          share[row * k + rank] = p[best];
          total += p[best];
        }
        if (renormalize)
          for (int64_t rank = 0; rank < k; ++rank) share[row * k + rank] /= total;
      }
    }
  });
  for (int64_t e = 0; e < experts; ++e) {
    S total = S(0);
    for (int64_t block = 0; block < blocks; ++block) total += partial[block * experts + e];
    mass[e] = total;
  }
  free(partial);
  return 0;
}

PM_INLINE bool known(const int32_t* chosen, int64_t count, int64_t experts) {
  for (int64_t i = 0; i < count; ++i)
    if (chosen[i] < 0 || chosen[i] >= experts) return false;
  return true;
}

template <class C, class S = typename Wide<C>::type>
int route_backward(Pool* pool, int64_t n, int64_t experts, int64_t k, const C* logits, const int32_t* chosen,
                   const S* dshare, const S* balance, bool renormalize, C* dlogits) {
  if (!known(chosen, n * k, experts)) return 1;
  parallel(pool, n, experts * 8 * sizeof(S), [=](int64_t begin, int64_t end) {
    S p[kExperts], dp[kExperts];
    for (int64_t row = begin; row < end; ++row) {
      const int32_t* picks = chosen + row * k;
      const S* given = dshare + row * k;
      probabilities(logits + row * experts, experts, p);
      memcpy(dp, balance, experts * sizeof(S));
      S total = S(1), mean = S(0);
      if (renormalize) {
        total = S(0);
        for (int64_t rank = 0; rank < k; ++rank) total += p[picks[rank]];
        for (int64_t rank = 0; rank < k; ++rank) mean += given[rank] * (p[picks[rank]] / total);
      }
      for (int64_t rank = 0; rank < k; ++rank) dp[picks[rank]] += (given[rank] - mean) / total;
      V<S> dot = splat(S(0));
      each(0, experts, [&](int64_t i, auto lanes) { dot = dot + load(p + i, lanes) * load(dp + i, lanes); });
      const S inner = sum(dot);
      each(0, experts, [&](int64_t i, auto lanes) {
        store(dlogits + row * experts + i, load(p + i, lanes) * (load(dp + i, lanes) - inner), lanes);
      });
    }
  });
  return 0;
}

// A counting sort by expert; tokens stay in order. One thread: a pass over a few numbers per token.
PM_INLINE int dispatch(int64_t n, int64_t experts, int64_t k, const int32_t* chosen, int64_t* pairs,
                       int64_t* tokens, int64_t* offsets) {
  if (!known(chosen, n * k, experts)) return 1;
  int64_t next[kExperts];
  memset(offsets, 0, (experts + 1) * sizeof(int64_t));
  for (int64_t i = 0; i < n * k; ++i) ++offsets[chosen[i] + 1];
  for (int64_t e = 0; e < experts; ++e) offsets[e + 1] += offsets[e];
  memcpy(next, offsets, experts * sizeof(int64_t));
  for (int64_t i = 0; i < n * k; ++i) {
    const int64_t at = next[chosen[i]]++;
    pairs[at] = i;
    tokens[at] = i / k;
  }
  return 0;
}

template <class C, class S = typename Wide<C>::type>
int weigh(Pool* pool, int64_t n, int64_t width, int64_t shares, C* x, const S* share, const int64_t* pairs) {
  if (!inside(pairs, n, shares)) return 1;
  parallel(pool, n, width * 2 * sizeof(C), [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const S factor = share[pairs[row]];
      each(row * width, (row + 1) * width, [&](int64_t i, auto lanes) {
        store(x + i, load(x + i, lanes) * factor, lanes);
      });
    }
  });
  return 0;
}

template <class C, class S = typename Wide<C>::type>
int weigh_backward(Pool* pool, int64_t n, int64_t width, int64_t shares, C* dy, C* x, const S* share,
                   const int64_t* pairs, S* dshare) {
  if (!inside(pairs, n, shares)) return 1;
  parallel(pool, n, width * 4 * sizeof(C), [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const S factor = share[pairs[row]];
      V<S> dot = splat(S(0));
      each(row * width, (row + 1) * width, [&](int64_t i, auto lanes) {
        const V<S> d = load(dy + i, lanes), a = load(x + i, lanes);
        dot = dot + d * a;
        store(dy + i, d * factor, lanes);
        store(x + i, a * factor, lanes);
      });
      dshare[pairs[row]] = sum(dot);
    }
  });
  return 0;
}

}  // namespace
