// Sixteen lanes of float or double, whatever the instruction set: 1, 2 or 4 (2, 4 or 8)
// registers. Only operations that IEEE 754 defines bit for bit, in one order, so every build
// of the kernels gives the same bits. Compiled with -ffp-contract=off: a * b + c rounds twice.
//
// Everything here has internal linkage: builds for different instruction sets must not share
// inline functions, or the linker would keep one of them for all.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kRegister = 64;
#elif defined(__AVX2__)
constexpr int kRegister = 32;
#else
constexpr int kRegister = 16;
#endif
constexpr int kLanes = 16;

#define PM_INLINE __attribute__((always_inline)) inline

struct bf16 {
  uint16_t bits;
};

// The dtype of statistics of a compute dtype.
template <class C> struct Wide { using type = float; };
template <> struct Wide<double> { using type = double; };

template <class T, int Bytes> struct Reg {
  typedef T type __attribute__((vector_size(Bytes)));
};

constexpr int kFloats = kRegister / 4;  // floats in a register
using F = Reg<float, kRegister>::type;
using I = Reg<int32_t, kRegister>::type;
using U = Reg<uint32_t, kRegister>::type;
using H = Reg<uint16_t, kRegister / 2>::type;

template <class T> struct V {
  using Register = typename Reg<T, kRegister>::type;
  static constexpr int N = kRegister / sizeof(T);  // lanes of a register
  static constexpr int K = kLanes / N;
  Register v[K];
};

struct Full {};  // the number of live lanes, when it is all of them

// A register at an address of any alignment and type.
template <class R> struct Loose {
  typedef R type __attribute__((aligned(1), may_alias));
};
template <class R> PM_INLINE R from(const void* p) { return *static_cast<const typename Loose<R>::type*>(p); }
template <class R> PM_INLINE void into(void* p, R a) { *static_cast<typename Loose<R>::type*>(p) = a; }

template <class T> PM_INLINE V<T> splat(T value) {
  V<T> out;
  for (int k = 0; k < V<T>::K; ++k) out.v[k] = value - typename V<T>::Register{};
  return out;
}

#define PM_OPERATOR(op)                                                \
  template <class T> PM_INLINE V<T> operator op(V<T> a, V<T> b) {      \
    V<T> out;                                                          \
    for (int k = 0; k < V<T>::K; ++k) out.v[k] = a.v[k] op b.v[k];     \
    return out;                                                        \
  }                                                                    \
  template <class T> PM_INLINE V<T> operator op(V<T> a, T b) { return a op splat(b); }
PM_OPERATOR(+)
PM_OPERATOR(-)
PM_OPERATOR(*)
PM_OPERATOR(/)
#undef PM_OPERATOR

// The larger of two; b where either is NaN.
template <class T> PM_INLINE V<T> larger(V<T> a, V<T> b) {
  V<T> out;
  for (int k = 0; k < V<T>::K; ++k) out.v[k] = a.v[k] > b.v[k] ? a.v[k] : b.v[k];
  return out;
}

// ---- memory ----

template <class T> PM_INLINE V<T> load(const T* p, Full) {
  V<T> out;
  for (int k = 0; k < V<T>::K; ++k) out.v[k] = from<typename V<T>::Register>(p + k * V<T>::N);
  return out;
}

// Between 16 and 32 bits; GCC 12 takes detours where one instruction does it.
#if defined(__AVX512F__)
PM_INLINE U longer(H a) { return (U)_mm512_cvtepu16_epi32((__m256i)a); }
PM_INLINE H shorter(U a) { return (H)_mm512_cvtepi32_epi16((__m512i)a); }
#elif defined(__AVX2__)
PM_INLINE U longer(H a) { return (U)_mm256_cvtepu16_epi32((__m128i)a); }
PM_INLINE H shorter(U a) {  // of values below 65536
  const __m256i packed = _mm256_packus_epi32((__m256i)a, (__m256i)a);
  return (H)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 8));
}
#else
PM_INLINE U longer(H a) { return __builtin_convertvector(a, U); }
PM_INLINE H shorter(U a) { return __builtin_convertvector(a, H); }
#endif

PM_INLINE V<float> load(const bf16* p, Full) {
  V<float> out;
  for (int k = 0; k < V<float>::K; ++k) {
    out.v[k] = (F)(longer(from<H>(p + k * kFloats)) << 16);
  }
  return out;
}

// n lanes from memory, zeros above them.
template <class T> PM_INLINE auto load(const T* p, int n) {
  T lanes[kLanes] = {};
  memcpy(lanes, p, n * sizeof(T));
  return load(lanes, Full());
}

template <class T> PM_INLINE void store(T* p, V<T> a, Full) {
  for (int k = 0; k < V<T>::K; ++k) into(p + k * V<T>::N, a.v[k]);
}

PM_INLINE void store(bf16* p, V<float> a, Full) {
  for (int k = 0; k < V<float>::K; ++k) {
    const U u = (U)a.v[k];
    const U nearest = (u + (0x7fffu + ((u >> 16) & 1u))) >> 16;
    const U quiet = (u >> 16) | 0x40u;
    into(p + k * kFloats, shorter(a.v[k] != a.v[k] ? quiet : nearest));
  }
}

template <class T, class A> PM_INLINE void store(T* p, V<A> a, int n) {
  T lanes[kLanes];
  store(lanes, a, Full());
  memcpy(p, lanes, n * sizeof(T));
}

template <class T> PM_INLINE T lane(V<T> a, int i) {
  T lanes[kLanes];
  store(lanes, a, Full());
  return lanes[i];
}

// Lanes from n up set to `fill`.
template <class T> PM_INLINE V<T> padded(V<T> a, Full, T) { return a; }
template <class T> PM_INLINE V<T> padded(V<T> a, int n, T fill) {
  T lanes[kLanes];
  store(lanes, a, Full());
  for (int i = n; i < kLanes; ++i) lanes[i] = fill;
  return load(lanes, Full());
}

// The value of one element, widened.
template <class C> PM_INLINE typename Wide<C>::type value(const C* p) { return lane(load(p, 1), 0); }
template <class C> PM_INLINE void put(C* p, typename Wide<C>::type a) { store(p, splat(a), 1); }

using FH = Reg<float, kRegister / 2>::type;  // as many floats as a register has doubles

PM_INLINE V<double> widen(V<float> a) {
  float lanes[kLanes];
  store(lanes, a, Full());
  V<double> out;
  for (int k = 0; k < V<double>::K; ++k)
    out.v[k] = __builtin_convertvector(from<FH>(lanes + k * V<double>::N), V<double>::Register);
  return out;
}
PM_INLINE V<double> widen(V<double> a) { return a; }

PM_INLINE V<float> narrow(V<double> a) {
  float lanes[kLanes];
  for (int k = 0; k < V<double>::K; ++k)
    into(lanes + k * V<double>::N, __builtin_convertvector(a.v[k], FH));
  return load(lanes, Full());
}

// ---- reductions over lanes: a fixed tree ----

template <class T> PM_INLINE T sum(V<T> a) {
  T lanes[kLanes];
  store(lanes, a, Full());
  for (int width = kLanes / 2; width; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
}

template <class T> PM_INLINE T largest(V<T> a) {
  T lanes[kLanes];
  store(lanes, a, Full());
  for (int width = kLanes / 2; width; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
  return lanes[0];
}

// ---- functions ----

#if defined(__AVX512F__)
PM_INLINE V<float>::Register root(V<float>::Register a) { return (F)_mm512_sqrt_ps((__m512)a); }
PM_INLINE V<double>::Register root(V<double>::Register a) {
  return (V<double>::Register)_mm512_sqrt_pd((__m512d)a);
}
#elif defined(__AVX2__)
PM_INLINE V<float>::Register root(V<float>::Register a) { return (F)_mm256_sqrt_ps((__m256)a); }
PM_INLINE V<double>::Register root(V<double>::Register a) {
  return (V<double>::Register)_mm256_sqrt_pd((__m256d)a);
}
#elif defined(__SSE2__)
PM_INLINE V<float>::Register root(V<float>::Register a) { return (F)_mm_sqrt_ps((__m128)a); }
PM_INLINE V<double>::Register root(V<double>::Register a) {
  return (V<double>::Register)_mm_sqrt_pd((__m128d)a);
}
#else
template <class R> PM_INLINE R root(R a) {
  for (unsigned i = 0; i < sizeof a / sizeof a[0]; ++i) a[i] = sizeof a[0] == 4 ? ::sqrtf(a[i]) : ::sqrt(a[i]);
  return a;
}
#endif

template <class T> PM_INLINE V<T> square_root(V<T> a) {
  V<T> out;
  for (int k = 0; k < V<T>::K; ++k) out.v[k] = root(a.v[k]);
  return out;
}

PM_INLINE float square_root(float a) { return ::sqrtf(a); }
PM_INLINE double square_root(double a) { return ::sqrt(a); }
PM_INLINE float logarithm(float a) { return static_cast<float>(::log(static_cast<double>(a))); }
PM_INLINE double logarithm(double a) { return ::log(a); }

// e^x to about one unit in the last place: x = n ln 2 + r, |r| <= ln 2 / 2, a polynomial in r
// (coefficients: Cephes expf, Moshier), times 2^n. NaN stays NaN; 0 below -87.33, where results
// are subnormal; inf above 88.37. Negative says that x is at most 0, which saves the last.
template <bool Negative> PM_INLINE V<float> exponential(V<float> a) {
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  V<float> out;
  for (int k = 0; k < V<float>::K; ++k) {
    const F x = a.v[k];
    const F shifted = x * 1.44269504088896341f + kMagic;
    const F n = shifted - kMagic;
    const F r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    F y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = (y * (r * r) + r) + 1.0f;
    y = y * (F)(((U)shifted << 23) + 0x3f800000u);  // the low bits of shifted hold n
    y = x < -87.33f ? F{} : y;
    if constexpr (!Negative) y = x > 88.37f ? F{} + INFINITY : y;
    out.v[k] = y;
  }
  return out;
}

template <bool Negative> PM_INLINE V<double> exponential(V<double> a) {
  double lanes[kLanes];
  store(lanes, a, Full());
  for (int i = 0; i < kLanes; ++i) lanes[i] = ::exp(lanes[i]);
  return load(lanes, Full());
}

// tanh to about one unit in the last place: near 0 an odd polynomial (coefficients: Cephes tanhf,
// Moshier), elsewhere 1 - 2 / (e^(2 |a|) + 1) with a's sign.
PM_INLINE V<float> hyperbolic_tangent(V<float> a) {
  V<float> size;
  for (int k = 0; k < V<float>::K; ++k) size.v[k] = (F)((U)a.v[k] & 0x7fffffffu);
  const V<float> power = exponential<false>(size + size);
  V<float> out;
  for (int k = 0; k < V<float>::K; ++k) {
    const F x = a.v[k], z = x * x;
    F y = z * -5.70498872745e-3f + 2.06390887954e-2f;
    y = y * z + -5.37397155531e-2f;
    y = y * z + 1.33314422036e-1f;
    y = y * z + -3.33332819422e-1f;
    y = y * z * x + x;
    const F far = 1.0f - 2.0f / (power.v[k] + 1.0f);
    const F sided = (F)((U)far | ((U)x & 0x80000000u));
    out.v[k] = size.v[k] < 0.625f ? y : sided;
  }
  return out;
}

PM_INLINE V<double> hyperbolic_tangent(V<double> a) {
  double lanes[kLanes];
  store(lanes, a, Full());
  for (int i = 0; i < kLanes; ++i) lanes[i] = ::tanh(lanes[i]);
  return load(lanes, Full());
}

// Of one number that is at most 0.
template <class T> PM_INLINE T exponential_one(T a) { return lane(exponential<true>(splat(a)), 0); }

// ---- loops ----

// body(i, lanes) over [begin, end) in steps of sixteen; the last step may be shorter.
template <class Body> PM_INLINE void each(int64_t begin, int64_t end, Body body) {
  int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) body(i, Full());
  if (i < end) body(i, static_cast<int>(end - i));
}

}  // namespace
