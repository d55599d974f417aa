// Python's interface to the emulation.
#include "device.h"
#include "memory.h"
#include "process_group.h"

#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;
using namespace emulated;

namespace {

PyObject* handler = nullptr;  // called with (kind, what)

void call_handler(const char* kind, const std::string& what) {
  if (!handler) return;
  py::gil_scoped_acquire gil;
  py::reinterpret_borrow<py::function>(handler)(kind, what);
}

void bind_settings(py::module& m) {
  py::class_<Settings>(m, "Settings")
      .def_readwrite("devices", &Settings::devices)
      .def_readwrite("seed", &Settings::seed)
      .def_readwrite("delay_rate", &Settings::delay_rate)
      .def_readwrite("delay_us", &Settings::delay_us)
      .def_readwrite("lazy_loading", &Settings::lazy_loading)
      .def_readwrite("one_slot", &Settings::one_slot)
      .def_readwrite("patience_ms", &Settings::patience_ms)
      .def_readwrite("fault", &Settings::fault)
      .def_readwrite("fault_at", &Settings::fault_at);
  m.def("settings", [] { return &settings(); }, py::return_value_policy::reference);
  m.def("on_sync", [](py::function f) {
    handler = f.release().ptr();
    set_sync_handler(&call_handler);
  });
}

void bind_device(py::module& m) {
  using release_gil = py::call_guard<py::gil_scoped_release>;
  m.def("current_device", &current_device);
  m.def("set_device", [](int device) {
    TORCH_CHECK(device >= 0 && device < settings().devices, "CUDA error: invalid device ordinal");
    set_current_device(device);
  });
  m.def("current_stream", [](int device) { return current_stream(device).id; });
  m.def("set_stream", [](int64_t id, int device) { exchange_stream(device, id); });
  m.def("default_generator", [](int device) { return default_generator(device); });
  m.def("launches", &launches);
  m.def("shut_down", &shut_down);
  m.def("empty_cache", &empty_cache, release_gil());
  m.def("synchronize", [](int device) { synchronize_device(device, "synchronize"); }, release_gil());
  m.def("sleep", [](int64_t nanoseconds) {
    current_stream(current_device()).submit("sleep", [=] { std::this_thread::sleep_for(std::chrono::nanoseconds(nanoseconds)); });
  });
  m.def("elapsed", [](int64_t first, int64_t second) {  // milliseconds between two events, which are given by their event_id
    auto &a = *reinterpret_cast<Mark*>(first), &b = *reinterpret_cast<Mark*>(second);
    TORCH_CHECK(a.done() && b.done(), "CUDA error: device not ready (elapsed_time)");
    return double(*b.nanoseconds - *a.nanoseconds) / 1e6;
  });
  m.def("reset_peak", &reset_peak);
  m.def("usage", [](int device) {
    auto used = usage(device);
    py::dict result;
    result["allocated"] = used.allocated;
    result["allocated_peak"] = used.peak;
    result["reserved"] = used.reserved;
    result["reserved_peak"] = used.reserved_peak;
    result["allocations"] = used.allocations;
    return result;
  });
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  register_device();
  bind_settings(m);
  bind_device(m);
  bind_process_group(m);
}
