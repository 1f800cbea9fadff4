// A small pool of worker threads. Parts of a call are claimed one by one by whoever is free,
// the caller included, so a late worker delays nothing; what a part computes depends on its
// number only.
#pragma once

namespace packmule {

struct Pool;

using PartFunction = void (*)(void* context, int part, int parts);

Pool* pool_create(int threads);
void pool_destroy(Pool* pool);
int pool_threads(const Pool* pool);

// Runs function(context, part, parts) for part = 0 .. parts - 1 and returns when all have
// ended. parts is at most 65535. A second caller at the same time runs its parts alone.
void pool_run(Pool* pool, int parts, PartFunction function, void* context);

}  // namespace packmule
