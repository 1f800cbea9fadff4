// Chunks to and from a file with their CRC-32C, some blocks under way while another is summed: in an
// io_uring where the kernel gives one, else by threads. Raw system calls: no liburing to link.
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <condition_variable>
#include <memory>
#include <mutex>

#if defined(__has_include)
#if __has_include(<linux/io_uring.h>) && defined(__NR_io_uring_setup)
#include <linux/io_uring.h>
#define PM_RING 1
#endif
#endif

#define PM_API extern "C" __attribute__((visibility("default")))

extern "C" uint32_t pm_crc32c(const void* data, size_t nbytes, uint32_t value, int tables);

namespace {

constexpr unsigned kDepth = 4;         // blocks under way
constexpr size_t kSummedBlock = 1 << 20;  // bytes of one: it is summed while it is in a cache
constexpr size_t kPlainBlock = 4 << 20;   // fewer turns of a core that others compute on
constexpr int64_t kGrid = 4096;        // of direct transfers
constexpr size_t kStackBytes = 128 << 10;
constexpr int kThreads = 2;

struct Operation {
  int file = -1;
  bool write = false;
  char* data = nullptr;
  size_t bytes = 0;
  int64_t offset = 0;
};

ssize_t transfer_once(const Operation& op) {
  const ssize_t done = op.write ? pwrite(op.file, op.data, op.bytes, op.offset)
                                : pread(op.file, op.data, op.bytes, op.offset);
  return done < 0 ? -errno : done;
}

// Begins operations by slot and waits for them; what one moved is bytes, or a negative errno.
class Channel {
 public:
  virtual ~Channel() = default;
  virtual void begin(unsigned slot, const Operation& op) = 0;
  virtual int64_t wait(unsigned slot) = 0;
};

#if defined(PM_RING)
class Ring : public Channel {
 public:
  Ring() {
    io_uring_params params;
    memset(&params, 0, sizeof params);
    ring_ = static_cast<int>(syscall(__NR_io_uring_setup, kDepth, &params));
    if (ring_ < 0 || !(params.features & IORING_FEAT_SINGLE_MMAP)) return;
    const size_t submissions = params.sq_off.array + params.sq_entries * sizeof(unsigned);
    const size_t completions = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
    rings_bytes_ = submissions > completions ? submissions : completions;
    entries_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
    rings_ = map(rings_bytes_, IORING_OFF_SQ_RING);
    entries_ = map(entries_bytes_, IORING_OFF_SQES);
    if (rings_ == MAP_FAILED || entries_ == MAP_FAILED) return;
    auto* base = static_cast<char*>(rings_);
    tail_ = reinterpret_cast<unsigned*>(base + params.sq_off.tail);
    mask_ = *reinterpret_cast<unsigned*>(base + params.sq_off.ring_mask);
    array_ = reinterpret_cast<unsigned*>(base + params.sq_off.array);
    ended_head_ = reinterpret_cast<unsigned*>(base + params.cq_off.head);
    ended_tail_ = reinterpret_cast<unsigned*>(base + params.cq_off.tail);
    ended_mask_ = *reinterpret_cast<unsigned*>(base + params.cq_off.ring_mask);
    ended_ = reinterpret_cast<io_uring_cqe*>(base + params.cq_off.cqes);
    works_ = true;
  }

  ~Ring() override {
    if (rings_ != MAP_FAILED) munmap(rings_, rings_bytes_);
    if (entries_ != MAP_FAILED) munmap(entries_, entries_bytes_);
    if (ring_ >= 0) close(ring_);
  }

  bool works() const { return works_; }

  void begin(unsigned slot, const Operation& op) override {
    ended_in_[slot] = false;
    const unsigned at = *tail_ & mask_;
    auto* entry = static_cast<io_uring_sqe*>(entries_) + at;
    memset(entry, 0, sizeof *entry);
    entry->opcode = op.write ? IORING_OP_WRITE : IORING_OP_READ;
    entry->fd = op.file;
    entry->addr = reinterpret_cast<uint64_t>(op.data);
    entry->len = static_cast<unsigned>(op.bytes);
    entry->off = static_cast<uint64_t>(op.offset);
    entry->user_data = slot;
    array_[at] = at;
    __atomic_store_n(tail_, *tail_ + 1, __ATOMIC_RELEASE);
    for (;;) {
      const long sent = syscall(__NR_io_uring_enter, ring_, 1, 0, 0, nullptr, 0);
      if (sent == 1) return;
      if (sent < 0 && (errno == EAGAIN || errno == EBUSY)) {
        collect(0);
        usleep(100);
      } else if (sent < 0 && errno != EINTR) {
        // The kernel took nothing: the entry goes back, and whoever waits does it by hand.
        const int reason = errno;
        __atomic_store_n(tail_, *tail_ - 1, __ATOMIC_RELEASE);
        ended_in_[slot] = true;
        result_[slot] = -reason;
        return;
      }
    }
  }

  int64_t wait(unsigned slot) override {
    while (!ended_in_[slot]) collect(1);
    return result_[slot];
  }

 private:
  void* map(size_t bytes, off_t what) {
    return mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring_, what);
  }

  void collect(unsigned least) {
    unsigned head = *ended_head_;
    if (head == __atomic_load_n(ended_tail_, __ATOMIC_ACQUIRE) && least)
      syscall(__NR_io_uring_enter, ring_, 0, least, IORING_ENTER_GETEVENTS, nullptr, 0);
    for (; head != __atomic_load_n(ended_tail_, __ATOMIC_ACQUIRE); ++head) {
      const io_uring_cqe& found = ended_[head & ended_mask_];
      ended_in_[found.user_data] = true;
      result_[found.user_data] = found.res;
    }
    __atomic_store_n(ended_head_, head, __ATOMIC_RELEASE);
  }

  int ring_ = -1;
  bool works_ = false;
  void* rings_ = MAP_FAILED;
  void* entries_ = MAP_FAILED;
  size_t rings_bytes_ = 0, entries_bytes_ = 0;
  unsigned *tail_ = nullptr, *array_ = nullptr, *ended_head_ = nullptr, *ended_tail_ = nullptr;
  unsigned mask_ = 0, ended_mask_ = 0;
  io_uring_cqe* ended_ = nullptr;
  bool ended_in_[kDepth] = {};
  int64_t result_[kDepth] = {};
};
#endif

class Workers : public Channel {
 public:
  Workers() {
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, kStackBytes);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const auto entry = [](void* self) -> void* {
      static_cast<Workers*>(self)->work();
      return nullptr;
    };
    while (started_ < kThreads && pthread_create(&threads_[started_], &attributes, entry, this) == 0)
      ++started_;
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    pthread_attr_destroy(&attributes);
  }

  ~Workers() override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    for (int i = 0; i < started_; ++i) pthread_join(threads_[i], nullptr);
  }

  bool works() const { return started_ > 0; }

  void begin(unsigned slot, const Operation& op) override {
    std::lock_guard<std::mutex> lock(mutex_);
    operations_[slot] = op;
    ended_[slot] = false;
    line_[(first_ + waiting_++) % kDepth] = slot;
    changed_.notify_all();
  }

  int64_t wait(unsigned slot) override {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return ended_[slot]; });
    return result_[slot];
  }

 private:
  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return stop_ || waiting_ > 0; });
      if (stop_) return;
      const unsigned slot = line_[first_];
      first_ = (first_ + 1) % kDepth;
      --waiting_;
      const Operation op = operations_[slot];
      lock.unlock();
      const int64_t done = transfer_once(op);
      lock.lock();
      result_[slot] = done;
      ended_[slot] = true;
      changed_.notify_all();
    }
  }

  pthread_t threads_[kThreads] = {};
  int started_ = 0;
  bool stop_ = false;
  std::mutex mutex_;
  std::condition_variable changed_;
  unsigned line_[kDepth] = {}, first_ = 0, waiting_ = 0;
  Operation operations_[kDepth];
  bool ended_[kDepth] = {};
  int64_t result_[kDepth] = {};
};

// What is left of an operation that moved `done` bytes or failed: by hand, so that there is one place where
// short transfers, interrupts and errors are told apart. 0, an errno, or -1 where the file ends.
int finish(const Operation& op, bool direct, int64_t done, size_t* moved) {
  size_t at = 0;
  for (;;) {
    if (done > 0 && direct && op.write) done -= done % kGrid;  // the torn page is written again
    if (done > 0) at += static_cast<size_t>(done);
    *moved = at;
    if (at == op.bytes) return 0;
    // A direct read stops off the page grid only where the file ends.
    if (!op.write && (done == 0 || (done > 0 && direct && done % kGrid))) return -1;
    Operation rest = op;
    rest.data += at, rest.bytes -= at, rest.offset += static_cast<int64_t>(at);
    do done = transfer_once(rest);
    while (done == -EINTR);
    if (done < 0) return static_cast<int>(-done);
    if (op.write && done - (direct ? done % kGrid : 0) == 0) return EIO;
  }
}

struct Block {
  Operation op;
  int chunk = 0;
};

}  // namespace

struct PmTransfers {
  std::unique_ptr<Channel> channel;
  bool ring = false;
};

// ring: 0 asks for threads. Null if neither is to be had.
PM_API PmTransfers* pm_transfers_create([[maybe_unused]] int ring) {
  auto made = std::make_unique<PmTransfers>();
#if defined(PM_RING)
  if (ring) {
    auto found = std::make_unique<Ring>();
    if (found->works()) {
      made->channel = std::move(found);
      made->ring = true;
      return made.release();
    }
  }
#endif
  auto worker = std::make_unique<Workers>();
  if (!worker->works()) return nullptr;
  made->channel = std::move(worker);
  return made.release();
}

PM_API void pm_transfers_destroy(PmTransfers* transfers) { delete transfers; }

PM_API int pm_transfers_ring(const PmTransfers* transfers) { return transfers->ring; }

// Moves chunks and sums them; null `sums`: only moves them. One caller at a time. Returns 0, an errno, or -1 where the file ends; then `chunk`
// is the one that failed and `moved` how many of its bytes are known to have arrived.
PM_API int pm_transfer(PmTransfers* transfers, int file, int write, int direct, int chunks, void* const* data,
                       const int64_t* bytes, const int64_t* offsets, uint32_t* sums, int* chunk,
                       int64_t* moved) {
  Block blocks[kDepth];
  int next = 0;         // the chunk to cut the next block from
  int64_t cut = 0;      // of which so many bytes are cut
  uint64_t begun = 0, ended = 0;
  int failure = 0;
  const auto most = static_cast<int64_t>(sums ? kSummedBlock : kPlainBlock);
  for (int i = 0; sums && i < chunks; ++i) sums[i] = 0;
  for (;;) {
    while (!failure && next < chunks && begun - ended < kDepth) {
      if (cut == bytes[next]) {
        ++next, cut = 0;
        continue;
      }
      const int64_t left = bytes[next] - cut;
      Block& block = blocks[begun % kDepth];
      block.chunk = next;
      block.op.file = file;
      block.op.write = write;
      block.op.data = static_cast<char*>(data[next]) + cut;
      block.op.bytes = static_cast<size_t>(left < most ? left : most);
      block.op.offset = offsets[next] + cut;
      // Summed before it is written: what a faulty disk does to it must show.
      if (write && sums) sums[next] = pm_crc32c(block.op.data, block.op.bytes, sums[next], 0);
      transfers->channel->begin(begun % kDepth, block.op);
      cut += static_cast<int64_t>(block.op.bytes);
      ++begun;
    }
    if (ended == begun) return failure;
    Block& block = blocks[ended % kDepth];
    const int64_t done = transfers->channel->wait(ended % kDepth);
    ++ended;
    if (failure) continue;  // buffers stay in use until everything under way has ended
    size_t arrived = 0;
    failure = finish(block.op, direct, done, &arrived);
    if (failure) {
      *chunk = block.chunk;
      *moved = block.op.offset - offsets[block.chunk] + static_cast<int64_t>(arrived);
    } else if (!write && sums) {
      sums[block.chunk] = pm_crc32c(block.op.data, block.op.bytes, sums[block.chunk], 0);
    }
  }
}
