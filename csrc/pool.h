// A thread pool for short parallel loops: the caller works too and waits only for chunks in flight.
//
// Owns: its worker threads. Knows: how to hand out chunk numbers. Does not know: what they mean.
//
// A step of a small model runs hundreds of loops of 20 to 500 microseconds. A team that meets at a
// barrier (OpenMP) waits for a thread that the system has taken away; here whoever is running
// claims the next chunk, so a busy neighbour costs one chunk's time and not a scheduling period.
//
// The ticket is one 64-bit word because of this trap: a worker that was stopped between looking at
// job 7 and claiming a chunk may wake up in job 8, where that chunk number means something else.
// Claiming compares and swaps job and chunk number at once, which fails then.
//
//     63        32 31         0
//     | job number | next chunk |      next chunk = CLOSED while the job's data are exchanged
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "parallel.h"

namespace toque {

class Pool {
 public:
  // `threads` counts the caller: Pool(1) starts no thread. Throws std::system_error if it cannot.
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // As pool_run(). Callable from any thread; two calls at once run one after the other. Throws
  // std::logic_error within a body of any pool, where it would wait for itself; what a body does
  // not catch ends the process.
  void run(long chunks, Body body, void* context);
  int threads() const { return static_cast<int>(workers_.size()) + 1; }

 private:
  struct Job {
    Body body = nullptr;
    void* context = nullptr;
    uint32_t chunks = 0;
  };

  void open(const Job& job);
  void work(int worker) noexcept;
  void worker_loop(int worker);
  void stop_workers();

  std::vector<std::thread> workers_;
  std::mutex one_at_a_time_;
  // Each on a cache line of its own: the workers write to one while others spin on its neighbour.
  alignas(64) std::atomic<uint64_t> ticket_;
  alignas(64) std::atomic<uint32_t> done_{0};
  alignas(64) std::atomic<uint32_t> rounds_{0};  // goes up when there may be something to do
  std::atomic<Body> body_{nullptr};
  std::atomic<void*> context_{nullptr};
  std::atomic<uint32_t> chunks_{0};
  std::atomic<bool> stopping_{false};
};

}  // namespace toque
