#include "memory.h"

#include <cstdlib>
#include <cstring>
#include <map>

namespace emulated {

namespace {

constexpr size_t ROUND = 512;
constexpr int DEVICES = 16;
thread_local int device_now = 0;
thread_local int64_t stream_now[DEVICES] = {0};

void poison(void* data, size_t bytes) {
  std::memset(data, 0xFF, bytes);
}

struct Block {
  void* data;
  size_t bytes;
  Stream* stream;                // whose order of work decides when the block may be reused
  std::vector<Stream*> users;    // other streams that use it (record_stream)
};

using Key = std::pair<Stream*, size_t>;

struct Cache {
  std::mutex mutex;
  std::map<Key, std::vector<Block*>> free;
  std::vector<std::pair<Block*, std::vector<Mark>>> pending;  // freed, but used by other streams until the marks
  std::vector<Block*> elsewhere;  // freed while another stream was current: their stream may reuse them when it allocates next
  Usage usage[DEVICES];
};
Cache& cache() {
  static auto* it = new Cache;
  return *it;
}

// Poison a block once the work of its stream is done, and offer it for reuse: what its stream does later comes after that.
void offer(Block* block) {
  auto* data = block->data;
  auto bytes = block->bytes;
  block->stream->submit_unchecked("free", [data, bytes] { poison(data, bytes); });
  cache().free[{block->stream, block->bytes}].push_back(block);
}

void offer_freed_elsewhere(Stream* stream) {
  auto& blocks = cache().elsewhere;
  for (size_t i = 0; i < blocks.size();) {
    if (stream && blocks[i]->stream != stream) {
      i++;
      continue;
    }
    offer(blocks[i]);
    blocks.erase(blocks.begin() + i);
  }
}

void collect() {
  auto& pending = cache().pending;
  for (size_t i = 0; i < pending.size();) {
    auto& [block, marks] = pending[i];
    bool done = true;
    for (auto& mark : marks) done = done && mark.done();
    if (done) {
      offer(block);
      pending.erase(pending.begin() + i);
    } else {
      i++;
    }
  }
}

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  std::lock_guard<std::mutex> lock(cache().mutex);
  cache().usage[block->stream->device].allocated -= block->bytes;
  std::vector<Mark> marks;
  for (auto* user : block->users) marks.push_back(record(*user));
  block->users.clear();
  if (marks.empty() && block->stream == &current_stream(block->stream->device)) offer(block);
  else if (marks.empty()) cache().elsewhere.push_back(block);
  else cache().pending.emplace_back(block, std::move(marks));
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    c10::Device device(c10::DeviceType::CUDA, device_now);
    if (size == 0) return {nullptr, device};
    auto& stream = current_stream(device_now);
    auto bytes = (size + ROUND - 1) / ROUND * ROUND;
    std::lock_guard<std::mutex> lock(cache().mutex);
    collect();
    offer_freed_elsewhere(&stream);
    auto& used = cache().usage[device_now];
    auto& free = cache().free[{&stream, bytes}];
    Block* block;
    if (free.empty()) {
      block = new Block{std::aligned_alloc(ROUND, bytes), bytes, &stream, {}};
      poison(block->data, bytes);
      used.reserved += bytes;
    } else {
      block = free.back();
      free.pop_back();
    }
    used.allocated += bytes;
    used.allocations++;
    used.peak = std::max(used.peak, used.allocated);
    used.reserved_peak = std::max(used.reserved_peak, used.reserved);
    return {block->data, block, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* target, const void* source, std::size_t bytes) const override { default_copy_data(target, source, bytes); }
};

// Pinned memory

struct Pinned {
  size_t bytes;
  std::vector<Mark> marks;
  bool free = false;
};

struct PinnedCache {
  std::mutex mutex;
  std::map<const char*, Pinned> blocks;
};
PinnedCache& pinned() {
  static auto* it = new PinnedCache;
  return *it;
}

std::map<const char*, Pinned>::iterator find_pinned(const void* data) {
  auto& blocks = pinned().blocks;
  auto found = blocks.upper_bound(static_cast<const char*>(data));
  if (found == blocks.begin()) return blocks.end();
  --found;
  return static_cast<const char*>(data) < found->first + found->second.bytes ? found : blocks.end();
}

bool idle(Pinned& block) {
  for (auto& mark : block.marks)
    if (!mark.done()) return false;
  block.marks.clear();
  return true;
}

struct PinnedAllocator final : c10::Allocator {
  static void release(void* data) {
    std::lock_guard<std::mutex> lock(pinned().mutex);
    auto& block = pinned().blocks.at(static_cast<char*>(data));
    block.free = true;
    if (idle(block)) poison(data, block.bytes);
  }
  c10::DataPtr allocate(size_t size) override {
    c10::Device cpu(c10::DeviceType::CPU);
    auto bytes = std::max<size_t>((size + ROUND - 1) / ROUND * ROUND, ROUND);
    std::lock_guard<std::mutex> lock(pinned().mutex);
    for (auto& [data, block] : pinned().blocks)
      if (block.free && block.bytes == bytes && idle(block)) {
        block.free = false;
        poison(const_cast<char*>(data), bytes);
        return {const_cast<char*>(data), const_cast<char*>(data), &release, cpu};
      }
    auto* data = static_cast<char*>(std::aligned_alloc(ROUND, bytes));
    poison(data, bytes);
    pinned().blocks[data] = Pinned{bytes, {}};
    return {data, data, &release, cpu};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, std::size_t bytes) const override { default_copy_data(target, source, bytes); }
};

}  // namespace

c10::Allocator* device_allocator() {
  static auto* it = new DeviceAllocator;
  return it;
}

c10::Allocator* pinned_allocator() {
  static auto* it = new PinnedAllocator;
  return it;
}

void record_stream(const c10::DataPtr& data, Stream& stream) {
  if (data.get_deleter() != &release) return;
  auto* block = static_cast<Block*>(data.get_context());
  std::lock_guard<std::mutex> lock(cache().mutex);
  if (&stream != block->stream) block->users.push_back(&stream);
}

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> lock(pinned().mutex);
  return find_pinned(data) != pinned().blocks.end();
}

void record_pinned(const void* data, const Mark& mark) {
  std::lock_guard<std::mutex> lock(pinned().mutex);
  auto found = find_pinned(data);
  if (found != pinned().blocks.end()) found->second.marks.push_back(mark);
}

Usage usage(int device) {
  std::lock_guard<std::mutex> lock(cache().mutex);
  return cache().usage[device];
}

void reset_peak(int device) {
  std::lock_guard<std::mutex> lock(cache().mutex);
  auto& used = cache().usage[device];
  used.peak = used.allocated;
  used.reserved_peak = used.reserved;
}

void empty_cache() {
  synchronize_device(-1, "empty_cache");
  std::lock_guard<std::mutex> lock(cache().mutex);
  collect();
  offer_freed_elsewhere(nullptr);
  synchronize_device(-1, "empty_cache");
  for (auto& [key, blocks] : cache().free)
    for (auto* block : blocks) {
      cache().usage[block->stream->device].reserved -= block->bytes;
      std::free(block->data);
      delete block;
    }
  cache().free.clear();
}

int current_device() { return device_now; }
void set_current_device(int device) { device_now = device; }
Stream& current_stream(int device) { return get_stream(device, stream_now[device]); }
int64_t exchange_stream(int device, int64_t id) {
  auto old = stream_now[device];
  stream_now[device] = id;
  return old;
}

}  // namespace emulated
