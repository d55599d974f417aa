// What torch asks of a device type: the guard (devices, streams, events) and the hooks (generators, pinned memory).
#include "device.h"
#include "memory.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace emulated {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;

at::Generator& default_generator(int device) {
  static auto* all = new std::vector<at::Generator>;
  while (int(all->size()) <= device) all->push_back(at::detail::createCPUGenerator());
  return (*all)[device];
}

namespace {

Stream& stream_of(const c10::Stream& stream) { return get_stream(stream.device_index(), stream.id()); }

int index_of(Device device) { return device.has_index() ? device.index() : current_device(); }

Mark& mark_of(void* event) { return *static_cast<Mark*>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr DeviceType static_type = DeviceType::CUDA;
  Guard() = default;
  explicit Guard(DeviceType) {}

  DeviceType type() const override { return DeviceType::CUDA; }
  DeviceIndex deviceCount() const noexcept override { return settings().devices; }
  Device getDevice() const override { return Device(DeviceType::CUDA, current_device()); }
  void uncheckedSetDevice(Device device) const noexcept override { set_current_device(device.index()); }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() >= 0 && device.index() < settings().devices, "CUDA error: invalid device ordinal");
    set_current_device(device.index());
  }
  Device exchangeDevice(Device device) const override {
    auto old = getDevice();
    if (device.has_index()) setDevice(device);
    return old;
  }

  c10::Stream getStream(Device device) const override {
    auto index = index_of(device);
    return c10::Stream(c10::Stream::UNSAFE, Device(DeviceType::CUDA, index), current_stream(index).id);
  }
  c10::Stream getDefaultStream(Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, Device(DeviceType::CUDA, index_of(device)));
  }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(Device device, int) const override {
    auto index = index_of(device);
    return c10::Stream(c10::Stream::UNSAFE, Device(DeviceType::CUDA, index), new_stream(index).id);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto old = exchange_stream(stream.device_index(), stream.id());
    return c10::Stream(c10::Stream::UNSAFE, stream.device(), old);
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  bool queryStream(const c10::Stream& stream) const override { return stream_of(stream).done(stream_of(stream).last()); }
  void synchronizeStream(const c10::Stream& stream) const override {
    on_sync("synchronize", "stream");
    record(stream_of(stream)).host_wait();
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    on_sync("synchronize", "device");
    synchronize_device(device, "synchronize");
  }

  void record(void** event, const c10::Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Mark;
    mark_of(*event) = emulated::record(stream_of(stream));
  }
  static Mark record(Stream& stream) { return emulated::record(stream); }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) wait_for(stream_of(stream), mark_of(event));
  }
  bool queryEvent(void* event) const override { return event == nullptr || mark_of(event).done(); }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Mark*>(event); }
  void synchronizeEvent(void* event) const override {
    on_sync("synchronize", "event");
    if (event) mark_of(event).host_wait();
  }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    TORCH_CHECK(first && second, "Both events must be recorded before calculating elapsed time.");
    TORCH_CHECK(mark_of(first).done() && mark_of(second).done(), "CUDA error: device not ready (elapsed_time)");
    return double(*mark_of(second).nanoseconds - *mark_of(first).nanoseconds) / 1e6;
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_stream(data, stream_of(stream));
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return settings().devices; }
  int getNumGPUs() const override { return settings().devices; }
  DeviceIndex getCurrentDevice() const override { return current_device(); }
  DeviceIndex current_device() const override { return emulated::current_device(); }
  void setCurrentDevice(DeviceIndex device) const override { Guard().setDevice(Device(DeviceType::CUDA, device)); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return Guard().exchangeDevice(Device(DeviceType::CUDA, device)).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  Device getDeviceFromPtr(void*) const override { return Device(DeviceType::CUDA, emulated::current_device()); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  c10::Allocator* getCUDADeviceAllocator() const override { return device_allocator(); }
  const at::Generator& getDefaultGenerator(DeviceIndex device = -1) const override {
    return default_generator(device < 0 ? emulated::current_device() : device);
  }
  at::Generator getNewGenerator(DeviceIndex = -1) const override { return at::detail::createCPUGenerator(); }
  void deviceSynchronize(DeviceIndex device) const override { Guard().synchronizeDevice(device); }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)  // torch looks for this name

// Attention by its definition: the CPU has no kernel with the interface of CUDA's fused ones.
int64_t attention_backend(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
                          std::optional<double>, bool) {
  return int64_t(sdp::SDPBackend::math);
}
at::native::RegisterCUDADispatch<decltype(at::native::_fused_sdp_choice_stub)> registered_attention(
    at::native::_fused_sdp_choice_stub, &attention_backend);

}  // namespace

void register_device() { c10::SetAllocator(DeviceType::CUDA, device_allocator(), 100); }

}  // namespace emulated
