#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <vector>

namespace packmule {
namespace {

// Long enough to bridge the gap between two kernels of one task body, short enough not to
// take a core from the matrix multiply that follows.
constexpr std::chrono::microseconds kSpin(20);
constexpr std::size_t kStackBytes = 256 << 10;  // stacks count against RLIMIT_DATA

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A ticket names a call, its number of parts and the next unclaimed part, in one word, so
// that a claim can never mix two calls.
constexpr std::uint64_t ticket_of(std::uint32_t call, int parts) {
  return static_cast<std::uint64_t>(call) << 32 | static_cast<std::uint64_t>(parts) << 16;
}
constexpr std::uint32_t call_of(std::uint64_t ticket) { return static_cast<std::uint32_t>(ticket >> 32); }
constexpr int parts_of(std::uint64_t ticket) { return static_cast<int>(ticket >> 16 & 0xffff); }
constexpr int next_of(std::uint64_t ticket) { return static_cast<int>(ticket & 0xffff); }

}  // namespace

struct Pool {
  alignas(64) std::atomic<std::uint64_t> ticket{0};
  alignas(64) std::atomic<int> done{0};
  alignas(64) std::atomic<int> sleepers{0};
  std::atomic<bool> stop{false};
  PartFunction function = nullptr;
  void* context = nullptr;
  std::mutex caller;
  std::mutex sleep;
  std::condition_variable wake;
  std::vector<pthread_t> workers;
  Team team = nullptr;
  int team_threads = 1;
  pthread_t owner{};

  // Claims and runs parts of the current call until none is left. A successful claim keeps
  // the call alive, so function and context are stable after it.
  void work() {
    std::uint64_t now = ticket.load(std::memory_order_acquire);
    while (next_of(now) < parts_of(now)) {
      if (ticket.compare_exchange_weak(now, now + 1, std::memory_order_acq_rel)) {
        function(context, next_of(now), parts_of(now));
        done.fetch_add(1, std::memory_order_release);
        now = ticket.load(std::memory_order_acquire);
      }
    }
  }

  bool news(std::uint32_t seen) const { return stop.load() || call_of(ticket.load()) != seen; }

  void worker() {
    std::uint32_t seen = 0;
    for (;;) {
      const auto until = std::chrono::steady_clock::now() + kSpin;
      while (!news(seen) && std::chrono::steady_clock::now() < until)
        for (int i = 0; i < 8; ++i) pause();
      if (!news(seen)) {
        std::unique_lock<std::mutex> lock(sleep);
        sleepers.fetch_add(1);
        wake.wait(lock, [&] { return news(seen); });
        sleepers.fetch_sub(1);
      }
      if (stop.load()) return;
      seen = call_of(ticket.load());
      work();
    }
  }
};

namespace {

struct TeamCall {
  std::atomic<int> next{0};
  int parts;
  PartFunction function;
  void* context;
};

void team_member(void* data) {
  auto* call = static_cast<TeamCall*>(data);
  for (int part; (part = call->next.fetch_add(1, std::memory_order_relaxed)) < call->parts;)
    call->function(call->context, part, call->parts);
}

}  // namespace

Pool* pool_create(int threads, Team team) {
  auto* pool = new Pool;
  if (team != nullptr) {
    pool->team = team;
    pool->team_threads = threads;
    pool->owner = pthread_self();
    return pool;
  }
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, kStackBytes);
  // Signals belong to the threads that know what to do with them.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  for (int i = 1; i < threads; ++i) {
    pthread_t thread;
    const auto entry = [](void* self) -> void* {
      static_cast<Pool*>(self)->worker();
      return nullptr;
    };
    if (pthread_create(&thread, &attributes, entry, pool) != 0) break;
    pool->workers.push_back(thread);
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_attr_destroy(&attributes);
  if (static_cast<int>(pool->workers.size()) != (threads > 1 ? threads - 1 : 0)) {
    pool_destroy(pool);
    return nullptr;
  }
  return pool;
}

void pool_destroy(Pool* pool) {
  {
    std::lock_guard<std::mutex> lock(pool->sleep);
    pool->stop.store(true);
  }
  pool->wake.notify_all();
  for (pthread_t thread : pool->workers) pthread_join(thread, nullptr);
  delete pool;
}

int pool_threads(const Pool* pool) {
  return pool->team != nullptr ? pool->team_threads : static_cast<int>(pool->workers.size()) + 1;
}

void pool_run(Pool* pool, int parts, PartFunction function, void* context) {
  if (pool->team != nullptr && parts > 1 && pthread_equal(pool->owner, pthread_self())) {
    TeamCall call;
    call.parts = parts;
    call.function = function;
    call.context = context;
    pool->team(team_member, &call, static_cast<unsigned>(pool->team_threads), 0);
    return;
  }
  std::unique_lock<std::mutex> mine(pool->caller, std::try_to_lock);
  if (parts == 1 || pool->workers.empty() || !mine.owns_lock()) {
    for (int part = 0; part < parts; ++part) function(context, part, parts);
    return;
  }
  pool->function = function;
  pool->context = context;
  pool->done.store(0, std::memory_order_relaxed);
  pool->ticket.store(ticket_of(call_of(pool->ticket.load()) + 1, parts));
  if (pool->sleepers.load() > 0) {
    { std::lock_guard<std::mutex> lock(pool->sleep); }
    pool->wake.notify_all();
  }
  pool->work();
  for (int spins = 0; pool->done.load(std::memory_order_acquire) != parts; ++spins) {
    pause();
    if (spins > 1000) sched_yield();  // a worker that holds a part may need this core
  }
}

}  // namespace packmule
