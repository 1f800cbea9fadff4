// Splitting a kernel's items over the pool in fixed ranges. Internal linkage, like simd.h.
#pragma once

#include <stdint.h>

#include "pool.h"

namespace {

constexpr int64_t kPartBytes = 64 << 10;  // below this a part costs more to hand out than to run

template <class Body> struct Split {
  Body* body;
  int64_t items;
  static void run(void* self, int part, int parts) {
    auto* split = static_cast<Split*>(self);
    (*split->body)(split->items * part / parts, split->items * (part + 1) / parts);
  }
};

// body(begin, end) over [0, items). Each item moves about item_bytes of memory.
template <class Body> void parallel(packmule::Pool* pool, int64_t items, int64_t item_bytes, Body body) {
  if (items <= 0) return;
  const int threads = packmule::pool_threads(pool);
  int64_t parts = threads == 1 ? 1 : threads * 4;  // some slack for a core that is late
  const int64_t worth = items * item_bytes / kPartBytes + 1;
  parts = parts < worth ? parts : worth;
  parts = parts < items ? parts : items;
  parts = parts < 65535 ? parts : 65535;
  Split<Body> split{&body, items};
  packmule::pool_run(pool, static_cast<int>(parts), &Split<Body>::run, &split);
}

// body(begin, end) over [0, count) elements, cut at multiples of 4096.
template <class Body> void parallel_flat(packmule::Pool* pool, int64_t count, int64_t bytes, Body body) {
  constexpr int64_t kBlock = 4096;
  parallel(pool, (count + kBlock - 1) / kBlock, kBlock * bytes, [&](int64_t begin, int64_t end) {
    const int64_t last = end * kBlock;
    body(begin * kBlock, last < count ? last : count);
  });
}

}  // namespace
