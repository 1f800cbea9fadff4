// Prints a CRC-32C of what each kernel of a built library makes of seeded random inputs. Two builds of
// the scalar kernels for different processors print the same lines: see tests/native/compare.sh.
//   digest LIBRARY
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <vector>

namespace {

void* library;
void* pool;

template <class F> F symbol(const char* name) {
  void* found = dlsym(library, name);
  if (!found) {
    fprintf(stderr, "no %s: %s\n", name, dlerror());
    _Exit(2);
  }
  F function;
  memcpy(&function, &found, sizeof function);
  return function;
}

uint64_t state = 1;
double random_unit() {  // in [-1, 1), by a linear congruential generator
  state = state * 6364136223846793005ull + 1442695040888963407ull;
  return static_cast<double>(static_cast<int64_t>(state)) / 9223372036854775808.0;
}

constexpr int kFloat = 0, kBf16 = 1, kDouble = 2;
constexpr int kSize[] = {4, 2, 8};
const char* kName[] = {"float32", "bfloat16", "float64"};

struct Buffer {
  std::vector<unsigned char> bytes;
  int type;
  Buffer(int type, size_t count, bool positive = false) : bytes(count * kSize[type]), type(type) {
    for (size_t i = 0; i < count; ++i) {
      double value = random_unit() * 2;
      if (positive) value = value < 0 ? -value : value;
      const float narrow = static_cast<float>(value);
      uint32_t bits;
      memcpy(&bits, &narrow, 4);
      const uint16_t half = static_cast<uint16_t>(bits >> 16);
      if (type == kFloat) memcpy(&bytes[i * 4], &narrow, 4);
      if (type == kBf16) memcpy(&bytes[i * 2], &half, 2);
      if (type == kDouble) memcpy(&bytes[i * 8], &value, 8);
    }
  }
  void* get() { return bytes.data(); }
};

void show(const char* kernel, int type, Buffer& found) {
  static auto crc = symbol<uint32_t (*)(const void*, size_t, uint32_t, int)>("pm_crc32c");
  printf("%s %s %08x\n", kernel, kName[type], crc(found.get(), found.bytes.size(), 0, 0));
}

int wide(int type) { return type == kDouble ? kDouble : kFloat; }

void check(int type) {
  const int s = wide(type);
  const int64_t n = 37, h = 83;
  {
    auto forward = symbol<int (*)(void*, int, int64_t, int64_t, void*, void*, double, void*, void*)>("pm_rmsnorm_scalar");
    Buffer x(type, n * h), weight(type, h), out(type, n * h), rstd(s, n);
    forward(pool, type, n, h, x.get(), weight.get(), 1e-5, out.get(), rstd.get());
    show("rmsnorm", type, out);
    show("rmsnorm.rstd", s, rstd);
  }
  {
    auto forward = symbol<int (*)(void*, int, int64_t, void*, void*, void*)>("pm_swiglu_scalar");
    auto backward = symbol<int (*)(void*, int, int64_t, void*, void*, void*, void*, void*)>("pm_swiglu_backward_scalar");
    Buffer gate(type, n * h), up(type, n * h), out(type, n * h), da(type, n * h), dgate(type, n * h), dup(type, n * h);
    forward(pool, type, n * h, gate.get(), up.get(), out.get());
    backward(pool, type, n * h, da.get(), gate.get(), up.get(), dgate.get(), dup.get());
    show("swiglu", type, out);
    show("swiglu_backward.gate", type, dgate);
    show("swiglu_backward.up", type, dup);
  }
  {
    auto accumulate = symbol<int (*)(void*, int, int64_t, void*, void*, int)>("pm_accumulate_scalar");
    Buffer target(s, n * h), source(type, n * h);
    accumulate(pool, type, n * h, target.get(), source.get(), 0);
    show("accumulate", type, target);
  }
  {
    auto cast = symbol<int (*)(void*, int, int, int64_t, void*, void*)>("pm_cast_scalar");
    Buffer target(type, n * h), source(s, n * h);
    cast(pool, type, s, n * h, target.get(), source.get());
    show("cast", type, target);
  }
  {
    auto squares = symbol<int (*)(void*, int, int64_t, void*, void*)>("pm_sum_squares_scalar");
    Buffer x(s, n * h), total(kDouble, 1);
    squares(pool, s, n * h, x.get(), total.get());
    show("sum_squares", s, total);
  }
  {
    auto adamw = symbol<int (*)(void*, int, int, int64_t, void*, void*, void*, void*, void*, void*)>("pm_adamw_scalar");
    Buffer master(s, n * h), m(s, n * h), v(s, n * h, true), grad(s, n * h), weight(type, n * h);
    double scalars[9] = {1 - 1e-3, 0.9, 1 - 0.9, 0.95, 1 - 0.95, 1e-2, 1.25, 1e-8, 0.5};
    adamw(pool, s, type, n * h, master.get(), m.get(), v.get(), grad.get(), weight.get(), scalars);
    show("adamw.master", type, master);
    show("adamw.m", type, m);
    show("adamw.v", type, v);
    show("adamw.weight", type, weight);
  }
  {
    auto rope = symbol<int (*)(void*, int, int64_t, int64_t, int64_t, int64_t, void*, void*, void*, void*, int)>("pm_rope_scalar");
    const int64_t heads = 3, d = 10, rows = 64;
    Buffer x(type, n * heads * d), cos(s, rows * d / 2), sin(s, rows * d / 2);
    std::vector<int32_t> positions(n);
    for (int64_t i = 0; i < n; ++i) positions[i] = static_cast<int32_t>(i);
    rope(pool, type, n, heads, d, rows, x.get(), cos.get(), sin.get(), positions.data(), 0);
    show("rope", type, x);
  }
  if (type != kDouble) {  // float64 takes exp and log from the C library, which may differ in the last bit
    auto entropy = symbol<int (*)(void*, int, int64_t, int64_t, void*, void*, double, void*, int)>("pm_cross_entropy_scalar");
    Buffer logits(type, n * h), loss(s, n);
    std::vector<int64_t> targets(n);
    for (int64_t i = 0; i < n; ++i) targets[i] = i % 5 ? i % h : -100;
    entropy(pool, type, n, h, logits.get(), targets.data(), 0.25, loss.get(), 1);
    show("cross_entropy", type, logits);
    show("cross_entropy.loss", s, loss);
  }
}

}  // namespace

int main(int count, char** words) {
  if (count != 2 || !(library = dlopen(words[1], RTLD_NOW))) {
    fprintf(stderr, "usage: digest LIBRARY (%s)\n", count == 2 ? dlerror() : "no library");
    return 2;
  }
  pool = symbol<void* (*)(int, void*)>("pm_create")(2, nullptr);
  for (int type : {kFloat, kBf16, kDouble}) check(type);
  symbol<void (*)(void*)>("pm_destroy")(pool);
  return 0;
}
