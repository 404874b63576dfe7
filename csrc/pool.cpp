#include "pool.h"

#include <csignal>

#include <chrono>
#include <limits>
#include <stdexcept>

namespace toque {

namespace {

constexpr uint32_t CLOSED = std::numeric_limits<uint32_t>::max();
// The next loop of a step mostly follows within microseconds; going to sleep and being woken costs
// about ten. Spinning longer would take the core from other processes between two steps.
constexpr auto SPIN = std::chrono::microseconds(30);

uint32_t job_of(uint64_t ticket) { return static_cast<uint32_t>(ticket >> 32); }
uint32_t chunk_of(uint64_t ticket) { return static_cast<uint32_t>(ticket); }
uint64_t make_ticket(uint32_t job, uint32_t chunk) { return uint64_t{job} << 32 | chunk; }

thread_local bool within_a_body = false;

struct WithinABody {
  WithinABody() { within_a_body = true; }
  ~WithinABody() { within_a_body = false; }
};

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits until `value` is no longer `old`: spins for a moment, then sleeps.
void wait_for_change(const std::atomic<uint32_t>& value, uint32_t old) {
  const auto deadline = std::chrono::steady_clock::now() + SPIN;
  while (value.load(std::memory_order_acquire) == old) {
    for (int i = 0; i < 16; ++i) relax();
    if (std::chrono::steady_clock::now() > deadline) {
      value.wait(old, std::memory_order_acquire);
    }
  }
}

// Signals belong to Python's main thread, which would otherwise sleep through a Ctrl-C.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

}  // namespace

Pool::Pool(int threads) : ticket_(make_ticket(0, CLOSED)) {
  SignalsBlocked inherited_by_the_workers;
  try {
    for (int worker = 1; worker < threads; ++worker) {
      workers_.emplace_back([this, worker] { worker_loop(worker); });
    }
  } catch (...) {
    stop_workers();
    throw;
  }
}

Pool::~Pool() { stop_workers(); }

void Pool::stop_workers() {
  stopping_.store(true);
  rounds_.fetch_add(1);
  rounds_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void Pool::run(long chunks, Body body, void* context) {
  if (chunks <= 0) return;
  if (chunks >= CLOSED) throw std::length_error("too many chunks");
  if (within_a_body) throw std::logic_error("a parallel loop within another one");
  if (chunks == 1) {
    const WithinABody here;
    return body(context, 0, 0);
  }
  std::lock_guard<std::mutex> lock(one_at_a_time_);
  open({body, context, static_cast<uint32_t>(chunks)});
  work(0);
  for (uint32_t done; (done = done_.load(std::memory_order_acquire)) != chunks;) {
    wait_for_change(done_, done);
  }
}

void Pool::open(const Job& job) {
  const uint32_t number = job_of(ticket_.load(std::memory_order_relaxed)) + 1;
  ticket_.store(make_ticket(number, CLOSED));
  body_.store(job.body);
  context_.store(job.context);
  chunks_.store(job.chunks);
  done_.store(0);
  ticket_.store(make_ticket(number, 0));
  rounds_.fetch_add(1);
  if (!workers_.empty()) rounds_.notify_all();
}

void Pool::work(int worker) noexcept {
  const WithinABody here;
  for (;;) {
    uint64_t ticket = ticket_.load();
    const uint32_t chunks = chunks_.load();  // of this job, or of a later one: then claiming fails
    if (chunk_of(ticket) >= chunks) return;
    if (!ticket_.compare_exchange_weak(ticket, ticket + 1)) continue;
    // From here to done_, the job cannot end and its data cannot change.
    body_.load()(context_.load(), chunk_of(ticket), worker);
    if (done_.fetch_add(1) + 1 == chunks) done_.notify_one();
  }
}

void Pool::worker_loop(int worker) {
  uint32_t seen = 0;
  for (;;) {
    wait_for_change(rounds_, seen);
    seen = rounds_.load();
    if (stopping_.load()) return;
    work(worker);
  }
}

void pool_run(Pool& pool, long chunks, Body body, void* context) {
  pool.run(chunks, body, context);
}

int pool_threads(const Pool& pool) { return pool.threads(); }

}  // namespace toque
