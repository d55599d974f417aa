// Memory of the emulated devices, and pinned memory of the host. Both are cached and reused in stream order, as torch's allocators do,
// and filled with NaN (all bits set) when they are freed.
#pragma once

#include "streams.h"

#include <c10/core/Allocator.h>

namespace emulated {

struct Usage {
  int64_t allocated = 0, peak = 0, reserved = 0, reserved_peak = 0, allocations = 0;
};

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();

// Memory on `stream` must not be reused until the work that `stream` has now is done.
void record_stream(const c10::DataPtr& data, Stream& stream);
bool is_pinned(const void* data);
// Keep a pinned block from being reused before `mark`. Does nothing for other memory.
void record_pinned(const void* data, const Mark& mark);

Usage usage(int device);
void reset_peak(int device);
// Return cached memory to the host, after waiting for the device.
void empty_cache();

// The device and the stream of the calling thread
int current_device();
void set_current_device(int device);
Stream& current_stream(int device);
int64_t exchange_stream(int device, int64_t id);

}  // namespace emulated
