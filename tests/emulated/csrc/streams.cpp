#include "streams.h"

#include <csignal>
#include <map>
#include <set>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <unistd.h>

namespace emulated {

namespace {

// All state is leaked, because the threads of streams may outlive static destructors.
struct State {
  std::mutex mutex;
  std::map<std::pair<int, int64_t>, Stream*> streams;
  std::map<int, int64_t> created;
  int64_t own = 1000;
  std::set<std::string> loaded;
  std::atomic<int64_t> launches{0};
  std::atomic<bool> failed{false}, stopped{false};
  std::string failure;
  SyncHandler handler = nullptr;
};
State& state() {
  static auto* it = new State;
  return *it;
}

constexpr int64_t POOL = 32;

void sleep_us(int64_t us) { std::this_thread::sleep_for(std::chrono::microseconds(us)); }

}  // namespace

Settings& settings() {
  static auto* it = new Settings;
  return *it;
}

Stream::Stream(int device, int64_t id, std::string name) : device(device), id(id), name(std::move(name)) { seed(); }

void Stream::seed() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::seed_seq parts{settings().seed, uint64_t(device), uint64_t(id)};
  random_.seed(parts);
  // Streams differ in pace, so that each is far behind the others for some seeds.
  const double paces[] = {0.1, 1, 1, 5};
  pace_ = paces[random_() % 4];
}

void Stream::start() {
  started_ = true;
  std::thread([this] { loop(); }).detach();
}

void Stream::delay() {
  if (!settings().seed) return;
  std::uniform_real_distribution<> uniform(0, 1);
  std::unique_lock<std::mutex> lock(mutex_);
  const bool delayed = uniform(random_) < settings().delay_rate;
  const auto us = int64_t(pace_ * settings().delay_us * uniform(random_));
  lock.unlock();
  if (delayed) sleep_us(us);
}

void Stream::loop() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    submitted_.wait(lock, [&] { return !queue_.empty() || state().stopped; });
    if (state().stopped) return;
    auto [what, job] = std::move(queue_.front());
    queue_.pop_front();
    running_ = what;
    lock.unlock();
    delay();
    try {
      if (!state().failed) job();
    } catch (const std::exception& error) {
      fail(std::string(what) + " on " + name + ": " + error.what());
    }
    job = nullptr;
    lock.lock();
    running_ = nullptr;
    done_++;
    completed_.notify_all();
  }
}

uint64_t Stream::submit(const char* what, Job job) {
  check_failure();
  return submit_unchecked(what, std::move(job));
}

uint64_t Stream::submit_unchecked(const char* what, Job job) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!started_) start();
  queue_.emplace_back(what, std::move(job));
  submitted_.notify_one();
  return ++number_;
}

bool Stream::done(uint64_t number) {
  std::lock_guard<std::mutex> lock(mutex_);
  return done_ >= number;
}

uint64_t Stream::last() {
  std::lock_guard<std::mutex> lock(mutex_);
  return number_;
}

void Stream::wait(uint64_t number, Clock::duration limit) {
  std::unique_lock<std::mutex> lock(mutex_);
  auto reached = [&] { return done_ >= number || state().stopped; };
  if (limit == Clock::duration::zero()) {
    completed_.wait(lock, reached);
  } else if (!completed_.wait_for(lock, limit, reached)) {
    lock.unlock();
    throw std::runtime_error("emulated CUDA: deadlock, the host waits for work that never ends\n" + dump());
  }
}

std::string Stream::describe() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::ostringstream text;
  text << name << ": " << done_ << " of " << number_ << " jobs done";
  if (running_) text << ", runs " << running_;
  if (!queue_.empty()) text << ", next " << queue_.front().first;
  return text.str();
}

bool Mark::done() const { return stream == nullptr || stream->done(number); }

void Mark::host_wait() const {
  if (stream == nullptr) return;
  stream->wait(number, std::chrono::milliseconds(settings().patience_ms));
  check_failure();
}

Mark record(Stream& stream) {
  Mark mark{&stream, 0, std::make_shared<std::atomic<int64_t>>(0)};
  auto time = mark.nanoseconds;
  mark.number = stream.submit("event record", [time] { *time = Clock::now().time_since_epoch().count(); });
  return mark;
}

void wait_for(Stream& stream, const Mark& mark) {
  if (!mark.stream || mark.stream == &stream || mark.done()) return;
  stream.submit("event wait", [mark] { mark.stream->wait(mark.number); });
}

Stream& get_stream(int device, int64_t id) {
  std::lock_guard<std::mutex> lock(state().mutex);
  auto& stream = state().streams[{device, id}];
  if (!stream) stream = new Stream(device, id, "cuda:" + std::to_string(device) + " stream " + std::to_string(id));
  return *stream;
}

Stream& new_stream(int device) {
  int64_t id;
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    id = 1 + state().created[device]++ % POOL;
  }
  return get_stream(device, id);
}

Stream& own_stream(int device, const std::string& name) {
  std::lock_guard<std::mutex> lock(state().mutex);
  auto id = state().own++;
  return *(state().streams[{device, id}] = new Stream(device, id, "cuda:" + std::to_string(device) + " " + name));
}

std::vector<Stream*> all_streams(int device) {
  std::lock_guard<std::mutex> lock(state().mutex);
  std::vector<Stream*> found;
  for (auto& [key, stream] : state().streams)
    if (device < 0 || key.first == device) found.push_back(stream);
  return found;
}

void synchronize_device(int device, const std::string& reason) {
  auto end = Clock::now() + std::chrono::milliseconds(settings().patience_ms ? settings().patience_ms : 1 << 30);
  for (auto* stream : all_streams(device)) {
    auto last = stream->last();
    while (!stream->done(last)) {
      if (Clock::now() > end)
        throw std::runtime_error("emulated CUDA: " + reason + " waits until the device is idle, which it never is\n" + dump());
      sleep_us(50);
    }
  }
  check_failure();
}

int64_t launches() { return state().launches; }

void count_launch(int device, const std::string& kernel) {
  auto number = ++state().launches;
  auto& options = settings();
  if (options.fault_at && number == options.fault_at) {
    if (options.fault == "die") kill(getpid(), SIGKILL);
    if (options.fault == "hang") std::this_thread::sleep_for(std::chrono::hours(24));
  }
  if (!options.lazy_loading) return;
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    if (!state().loaded.insert(kernel).second) return;
  }
  synchronize_device(device, "the first launch of " + kernel + ", which loads its module,");
}

void fail(const std::string& error) {
  std::lock_guard<std::mutex> lock(state().mutex);
  if (!state().failed) state().failure = error;
  state().failed = true;
}

void check_failure() {
  if (!state().failed) return;
  std::lock_guard<std::mutex> lock(state().mutex);
  throw std::runtime_error("CUDA error: device-side assert triggered (" + state().failure + ")");
}

void set_sync_handler(SyncHandler handler) { state().handler = handler; }

void on_sync(const char* kind, const std::string& what) {
  if (state().handler) state().handler(kind, what);
}

std::string dump() {
  std::string text;
  for (auto* stream : all_streams(-1)) text += "  " + stream->describe() + "\n";
  return text;
}

bool stopped() { return state().stopped; }

void shut_down() { state().stopped = true; }

}  // namespace emulated
