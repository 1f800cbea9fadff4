// What is not a kernel: the pool's life and which builds this CPU runs.
#include <string.h>

#include "pool.h"

#define PM_API extern "C" __attribute__((visibility("default")))

// Raised whenever a function's arguments change; the Python face refuses any other.
PM_API int pm_abi() { return 8; }

// team: GOMP_parallel's address, or null for threads of the pool's own.
PM_API packmule::Pool* pm_create(int threads, packmule::Team team) {
  return packmule::pool_create(threads, team);
}

PM_API void pm_destroy(packmule::Pool* pool) { packmule::pool_destroy(pool); }

// 1 if this library holds the build and this CPU runs it.
PM_API int pm_runs(const char* isa) {
  if (strcmp(isa, "scalar") == 0) return 1;
#if defined(PM_X86)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (strcmp(isa, "avx2") == 0) return avx2;
  if (strcmp(isa, "avx512") == 0)
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
  return 0;
}
