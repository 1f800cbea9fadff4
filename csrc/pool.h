// A small pool of worker threads. Parts of a call are claimed one by one by whoever is free,
// the caller included, so a late worker delays nothing; what a part computes depends on its
// number only.
#pragma once

namespace packmule {

struct Pool;

using PartFunction = void (*)(void* context, int part, int parts);

// GOMP_parallel of a GNU OpenMP run time: runs function(data) on so many threads of the team that
// belongs to the calling thread.
using Team = void (*)(void (*function)(void*), void* data, unsigned threads, unsigned flags);

// With a team, calls of the creating thread run on it and the pool has no threads of its own: a
// matrix multiply of the same run time leaves its workers spinning on the cores a while, where
// threads of ours would have to fight them.
Pool* pool_create(int threads, Team team);
void pool_destroy(Pool* pool);
int pool_threads(const Pool* pool);

// Runs function(context, part, parts) for part = 0 .. parts - 1 and returns when all have
// ended. parts is at most 65535. A second caller at the same time runs its parts alone.
void pool_run(Pool* pool, int parts, PartFunction function, void* context);

}  // namespace packmule
