// Streams of the emulated device. A stream is a queue of jobs and a thread that runs them in order, later than they are submitted.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

namespace emulated {

using Clock = std::chrono::steady_clock;
using Job = std::function<void()>;

// What the emulation adds to a plain execution: delays and faults. Set once, before the first stream is used.
struct Settings {
  int devices = 1;
  uint64_t seed = 0;         // of the random delays; 0: none
  double delay_rate = 0.02;  // share of jobs that are delayed
  int delay_us = 300;        // longest delay in microseconds
  bool lazy_loading = false; // the first launch of each kernel waits until the device is idle
  bool one_slot = false;     // a device runs one NCCL operation at a time, of all communicators
  int patience_ms = 15000;   // a host that waits for the device this long reports a deadlock; 0: never
  // Fault of this process: at its launch number fault_at it dies or hangs
  std::string fault;         // "", "die", "hang"
  int64_t fault_at = 0;
};
Settings& settings();

class Stream {
 public:
  const int device;
  const int64_t id;
  const std::string name;

  Stream(int device, int64_t id, std::string name);

  // Append a job, and return its number. Throws if the device has failed.
  uint64_t submit(const char* what, Job job);
  uint64_t submit_unchecked(const char* what, Job job);
  // Whether job `number` has run.
  bool done(uint64_t number);
  // Block the calling thread until job `number` has run. Throws if the device has failed, or if `limit` has passed.
  void wait(uint64_t number, Clock::duration limit = Clock::duration::zero());
  uint64_t last();
  // Draw delays from the current seed from now on.
  void seed();
  // The job that runs, and how many wait behind it, for dumps.
  std::string describe();

 private:
  void loop();
  void start();
  void delay();

  std::mutex mutex_;
  std::condition_variable submitted_, completed_;
  std::deque<std::pair<const char*, Job>> queue_;
  const char* running_ = nullptr;
  uint64_t number_ = 0, done_ = 0;
  bool started_ = false;
  std::mt19937_64 random_;
  double pace_ = 1;
};

// The point of a stream at which an event was recorded.
struct Mark {
  Stream* stream = nullptr;
  uint64_t number = 0;
  std::shared_ptr<std::atomic<int64_t>> nanoseconds;

  bool done() const;
  void host_wait() const;
};

Mark record(Stream& stream);
// Make later jobs of `stream` wait for the mark.
void wait_for(Stream& stream, const Mark& mark);

Stream& get_stream(int device, int64_t id);
// A new stream; ids repeat after 32, as those of torch's pool of streams do.
Stream& new_stream(int device);
// A stream of its own, such as that of a communicator.
Stream& own_stream(int device, const std::string& name);
std::vector<Stream*> all_streams(int device);

// Wait until all streams of a device are idle.
void synchronize_device(int device, const std::string& reason);

// Count a launch: faults happen here, and with lazy loading the first launch of a kernel waits for the device.
void count_launch(int device, const std::string& kernel);
// Number of launches of this process so far.
int64_t launches();

// The first error of a job. Like an error of a CUDA kernel, it is raised by later calls of the host, and the device stays unusable.
void fail(const std::string& error);
void check_failure();

// Called where the host would have to wait for a GPU.
void on_sync(const char* kind, const std::string& what);
using SyncHandler = void (*)(const char* kind, const std::string& what);
void set_sync_handler(SyncHandler handler);

// Everything that is under way, for messages about deadlocks.
std::string dump();

// Whether the process ends
bool stopped();
// Let the threads of all streams end. Called at exit.
void shut_down();

}  // namespace emulated
