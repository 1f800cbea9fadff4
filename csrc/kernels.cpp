// The C face of one build of the kernels: every symbol ends in the build's name (PM_ISA).
// Dtypes arrive as codes: 0 float32, 1 bfloat16, 2 float64. A kernel returns 0, or 1 for an
// index out of range (nothing written), 2 for no memory, 3 for dtypes it does not offer.
#include "experts.h"
#include "flat.h"
#include "loss.h"
#include "rows.h"

#define PM_JOIN2(a, b) a##_##b
#define PM_JOIN(a, b) PM_JOIN2(a, b)
#define PM_NAME(name) PM_JOIN(pm_##name, PM_ISA)
#define PM_API extern "C" __attribute__((visibility("default"))) int

namespace {

enum Dtype { kFloat32 = 0, kBfloat16 = 1, kFloat64 = 2 };

template <class T> struct Tag {
  using type = T;
};
template <class TagType> using TypeOf = typename TagType::type;

// Calls body with a Tag of the compute dtype.
template <class Body> PM_INLINE int with(int dtype, Body body) {
  switch (dtype) {
    case kFloat32: return body(Tag<float>());
    case kBfloat16: return body(Tag<bf16>());
    case kFloat64: return body(Tag<double>());
  }
  return 3;
}

// float64 only goes with float64; float32 with float32 and bfloat16.
template <class A, class B> constexpr bool kMatch = sizeof(typename Wide<A>::type) == sizeof(typename Wide<B>::type);

}  // namespace

#define PM_TYPES(tag)                       \
  using C [[maybe_unused]] = TypeOf<decltype(tag)>; \
  using S [[maybe_unused]] = typename Wide<C>::type

PM_API PM_NAME(rmsnorm)(Pool* pool, int dtype, int64_t n, int64_t h, const void* x, const void* weight,
                        double offset, double eps, void* out, void* rstd) {
  return with(dtype, [=](auto tag) {
    PM_TYPES(tag);
    rmsnorm<C>(pool, n, h, (const C*)x, (const C*)weight, offset, eps, (C*)out, (S*)rstd);
    return 0;
  });
}

PM_API PM_NAME(layernorm)(Pool* pool, int dtype, int64_t n, int64_t h, const void* x, const void* weight,
                          const void* bias, double eps, void* out, void* mean, void* rstd) {
  return with(dtype, [=](auto tag) {
    PM_TYPES(tag);
    layernorm<C>(pool, n, h, (const C*)x, (const C*)weight, (const C*)bias, eps, (C*)out, (S*)mean, (S*)rstd);
    return 0;
  });
}

PM_API PM_NAME(layernorm_backward)(Pool* pool, int dtype, int64_t n, int64_t h, const void* dy, const void* x,
                                   const void* weight, const void* mean, const void* rstd, void* dx,
                                   void* dweight, const void* residual, int first) {
  return with(dtype, [=](auto tag) {
    PM_TYPES(tag);
    return layernorm_backward<C>(pool, n, h, (const C*)dy, (const C*)x, (const C*)weight, (const S*)mean,
                                 (const S*)rstd, (C*)dx, (S*)dweight, (const C*)residual, first != 0);
  });
}

PM_API PM_NAME(column_sums)(Pool* pool, int dtype, int64_t n, int64_t h, const void* x, void* out, int first) {
  return with(dtype, [=](auto tag) {
    PM_TYPES(tag);
    return column_sums<C>(pool, n, h, (const C*)x, (S*)out, first != 0);
  });
}

PM_API PM_NAME(rmsnorm_backward)(Pool* pool, int dtype, int64_t n, int64_t h, const void* dy, const void* x,
                                 const void* weight, double offset, const void* rstd, void* dx, void* dweight,
                                 const void* residual, int first) {
  return with(dtype, [=](auto tag) {
    PM_TYPES(tag);
    return rmsnorm_backward<C>(pool, n, h, (const C*)dy, (const C*)x, (const C*)weight, offset,
                               (const S*)rstd, (C*)dx, (S*)dweight, (const C*)residual, first != 0);
  });
}

PM_API PM_NAME(rope)(Pool* pool, int dtype, int64_t n, int64_t heads, int64_t head_dim, int64_t half,
                     int64_t rows, void* x, const void* cosines, const void* sines, const int32_t* positions, int inverse) {
  return with(dtype, [=](auto tag) {
    PM_TYPES(tag);
    return rope<C>(pool, n, heads, head_dim, half, rows, (C*)x, (const S*)cosines, (const S*)sines, positions,
                   inverse != 0);
  });
}

PM_API PM_NAME(activate)(Pool* pool, int dtype, int kind, int64_t count, const void* gate, const void* up, void* out) {
  return with(dtype, [=](auto tag) {
    PM_TYPES(tag);
    activate<C>(pool, kind, count, (const C*)gate, (const C*)up, (C*)out);
    return 0;
  });
}

PM_API PM_NAME(activate_backward)(Pool* pool, int dtype, int kind, int64_t count, const void* da,
                                  const void* gate, const void* up, void* dgate, void* dup) {
  return with(dtype, [=](auto tag) {
    PM_TYPES(tag);
    activate_backward<C>(pool, kind, count, (const C*)da, (const C*)gate, (const C*)up, (C*)dgate, (C*)dup);
    return 0;
  });
}

PM_API PM_NAME(softcap)(Pool* pool, int dtype, int64_t count, void* x, double scale, double cap) {
  return with(dtype, [=](auto tag) {
    PM_TYPES(tag);
    softcap<C>(pool, count, (C*)x, scale, cap);
    return 0;
  });
}

PM_API PM_NAME(softcap_backward)(Pool* pool, int dtype, int64_t count, void* dy, const void* y, double scale,
                                 double cap) {
  return with(dtype, [=](auto tag) {
    PM_TYPES(tag);
    softcap_backward<C>(pool, count, (C*)dy, (const C*)y, scale, cap);
    return 0;
  });
}

PM_API PM_NAME(cross_entropy)(Pool* pool, int dtype, int64_t chunk, int64_t vocab, void* logits,
                              const int64_t* targets, double scale, void* loss, int gradient) {
  return with(dtype, [=](auto tag) {
    PM_TYPES(tag);
    return cross_entropy<C>(pool, chunk, vocab, (C*)logits, targets, scale, (S*)loss, gradient != 0);
  });
}

PM_API PM_NAME(embedding)(Pool* pool, int dtype, int64_t n, int64_t vocab, int64_t h, const void* table,
                          const int64_t* ids, void* out, double scale, int add) {
  return with(dtype, [=](auto tag) {
    PM_TYPES(tag);
    return embedding<C>(pool, n, vocab, h, (const C*)table, ids, (C*)out, scale, add != 0);
  });
}

PM_API PM_NAME(embedding_backward)(Pool* pool, int dtype, int64_t n, int64_t vocab, int64_t h, const void* dy,
                                   const int64_t* ids, void* grad, int first, double scale) {
  return with(dtype, [=](auto tag) {
    PM_TYPES(tag);
    return embedding_backward<C>(pool, n, vocab, h, (const C*)dy, ids, (S*)grad, first != 0, scale);
  });
}

PM_API PM_NAME(accumulate)(Pool* pool, int dtype, int64_t count, void* dst, const void* src, int first) {
  return with(dtype, [=](auto tag) {
    PM_TYPES(tag);
    accumulate<S, C>(pool, count, (S*)dst, (const C*)src, first != 0);
    return 0;
  });
}

PM_API PM_NAME(cast)(Pool* pool, int to, int from, int64_t count, void* dst, const void* src) {
  return with(to, [=](auto to_tag) {
    return with(from, [=](auto from_tag) {
      using To = TypeOf<decltype(to_tag)>;
      using From = TypeOf<decltype(from_tag)>;
      cast<To, From>(pool, count, (To*)dst, (const From*)src);
      return 0;
    });
  });
}

PM_API PM_NAME(sum_squares)(Pool* pool, int dtype, int64_t count, const void* x, double* total) {
  return with(dtype, [=](auto tag) {
    PM_TYPES(tag);
    return sum_squares<C>(pool, count, (const C*)x, total);
  });
}

PM_API PM_NAME(adamw)(Pool* pool, int grad_dtype, int weight_dtype, int64_t count, void* master, void* m,
                      void* v, const void* grad, void* weight, const double* scalars) {
  const AdamW rule = {scalars[0], scalars[1], scalars[2], scalars[3], scalars[4],
                      scalars[5], scalars[6], scalars[7], scalars[8]};
  return with(grad_dtype, [=](auto grad_tag) {
    return with(weight_dtype, [=](auto weight_tag) {
      using G = TypeOf<decltype(grad_tag)>;
      using W = TypeOf<decltype(weight_tag)>;
      if constexpr (kMatch<G, W>) {
        using S = typename Wide<G>::type;
        adamw<S, G, W>(pool, count, (S*)master, (S*)m, (S*)v, (const G*)grad, (W*)weight, rule);
        return 0;
      } else {
        return 3;
      }
    });
  });
}

PM_API PM_NAME(adalomo)(Pool* pool, int grad_dtype, int weight_dtype, int64_t rows, int64_t columns, void* master,
                        void* row_square, void* column_square, const void* grad, void* weight,
                        const double* scalars) {
  const AdaLomo rule = {scalars[0], scalars[1], scalars[2], scalars[3], scalars[4], scalars[5], scalars[6]};
  return with(grad_dtype, [=](auto grad_tag) {
    return with(weight_dtype, [=](auto weight_tag) {
      using G = TypeOf<decltype(grad_tag)>;
      using W = TypeOf<decltype(weight_tag)>;
      if constexpr (kMatch<G, W>) {
        using S = typename Wide<G>::type;
        if (column_square)
          return adalomo<S, G, W>(pool, rows, columns, (S*)master, (S*)row_square, (S*)column_square, (const G*)grad,
                                  (W*)weight, rule);
        adalomo_vector<S, G, W>(pool, rows, (S*)master, (S*)row_square, (const G*)grad, (W*)weight, rule);
        return 0;
      } else {
        return 3;
      }
    });
  });
}

PM_API PM_NAME(sgd)(Pool* pool, int grad_dtype, int weight_dtype, int64_t count, void* master, const void* grad,
                    void* weight, double decay, double rate) {
  return with(grad_dtype, [=](auto grad_tag) {
    return with(weight_dtype, [=](auto weight_tag) {
      using G = TypeOf<decltype(grad_tag)>;
      using W = TypeOf<decltype(weight_tag)>;
      if constexpr (kMatch<G, W>) {
        using S = typename Wide<G>::type;
        sgd<S, G, W>(pool, count, (S*)master, (const G*)grad, (W*)weight, decay, rate);
        return 0;
      } else {
        return 3;
      }
    });
  });
}

PM_API PM_NAME(causal_softmax)(Pool* pool, int dtype, int64_t batch, int64_t n, int64_t m, void* scores,
                               int64_t offset, int64_t window, double scale, void* lse) {
  return with(dtype, [=](auto tag) {
    PM_TYPES(tag);
    causal_softmax<C>(pool, batch, n, m, (C*)scores, offset, window, scale, (S*)lse);
    return 0;
  });
}

PM_API PM_NAME(causal_softmax_backward)(Pool* pool, int dtype, int64_t rows, int64_t m, const void* p, void* dp,
                                        const void* delta, double scale) {
  return with(dtype, [=](auto tag) {
    PM_TYPES(tag);
    causal_softmax_backward<C>(pool, rows, m, (const C*)p, (C*)dp, (const S*)delta, scale);
    return 0;
  });
}

PM_API PM_NAME(route)(Pool* pool, int dtype, int64_t n, int64_t experts, int64_t k, const void* logits,
                      int renormalize, int32_t* chosen, void* share, void* mass) {
  return with(dtype, [=](auto tag) {
    PM_TYPES(tag);
    return route<C>(pool, n, experts, k, (const C*)logits, renormalize != 0, chosen, (S*)share, (S*)mass);
  });
}

PM_API PM_NAME(route_backward)(Pool* pool, int dtype, int64_t n, int64_t experts, int64_t k, const void* logits,
                               const int32_t* chosen, const void* dshare, const void* balance, int renormalize,
                               void* dlogits) {
  return with(dtype, [=](auto tag) {
    PM_TYPES(tag);
    return route_backward<C>(pool, n, experts, k, (const C*)logits, chosen, (const S*)dshare, (const S*)balance,
                             renormalize != 0, (C*)dlogits);
  });
}

PM_API PM_NAME(dispatch)(Pool*, int64_t n, int64_t experts, int64_t k, const int32_t* chosen, int64_t* pairs,
                         int64_t* tokens, int64_t* offsets) {
  return dispatch(n, experts, k, chosen, pairs, tokens, offsets);
}

PM_API PM_NAME(weigh)(Pool* pool, int dtype, int64_t n, int64_t width, int64_t shares, void* x, const void* share,
                      const int64_t* pairs) {
  return with(dtype, [=](auto tag) {
    PM_TYPES(tag);
    return weigh<C>(pool, n, width, shares, (C*)x, (const S*)share, pairs);
  });
}

PM_API PM_NAME(weigh_backward)(Pool* pool, int dtype, int64_t n, int64_t width, int64_t shares, void* dy, void* x,
                               const void* share, const int64_t* pairs, void* dshare) {
  return with(dtype, [=](auto tag) {
    PM_TYPES(tag);
    return weigh_backward<C>(pool, n, width, shares, (C*)dy, (C*)x, (const S*)share, pairs, (S*)dshare);
  });
}
