// Operators of the emulated device. Every operator without a kernel of its own runs the CPU's kernel, later, in a job of the current
// stream. The host needs the form of the outputs at once: it runs the same kernel on zeros the first time that it meets an operator
// with arguments of some form, and remembers the forms of the results.
#include "device.h"
#include "forms.h"
#include "memory.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <cstring>
#include <set>
#include <unordered_map>

namespace emulated {

using at::Tensor;
using c10::Device;
using c10::DeviceType;
using c10::IValue;

namespace {

// Operators whose output's size depends on values, or that return values to the host. A GPU synchronises in them, too.
const std::set<std::string> HOST = {
    "aten::nonzero",         "aten::equal",      "aten::masked_select", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::bincount", "aten::repeat_interleave", "aten::histc", "aten::_amp_update_scale"};
// Operators that take tensors on the CPU together with ones on the device.
const std::set<std::string> MIXED = {"aten::index", "aten::index_put_", "aten::_index_put_impl_"};

Device device_of(std::optional<Device> device) {
  return device && device->has_index() ? *device : Device(DeviceType::CUDA, current_device());
}

// The device of an operator's tensors, and what its kernel gets in their place
struct Call {
  c10::OperatorHandle op;
  const std::string& name;
  std::vector<IValue> given, used;
  std::optional<Device> device;
  bool host_tensors = false;  // a tensor with dimensions on the CPU
  bool masks = false;         // a mask as index, whose result has a size that depends on values
  std::vector<size_t> generators;

  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack) : op(op), name(op.operator_name().name) {
    const auto& arguments = op.schema().arguments();
    given.assign(stack->end() - arguments.size(), stack->end());
    used.reserve(given.size());
    for (size_t i = 0; i < given.size(); i++) {
      if (arguments[i].name() == "generator") generators.push_back(i);
      used.push_back(map_tensors(given[i], [&](const Tensor& t) { return see(t, given[i].isOptionalTensorList()); }));
      if (used.back().isDevice()) used.back() = Device(DeviceType::CPU);
    }
    if (!device) device = Device(DeviceType::CUDA, current_device());
    TORCH_CHECK(!host_tensors || MIXED.count(name), "Expected all tensors to be on the same device, but found at least two devices, ",
                *device, " and cpu! (", name, ")");
  }

  Tensor see(const Tensor& t, bool index) {
    if (!t.defined()) return t;
    if (!t.is_cuda()) {
      if (t.dim() > 0) host_tensors = true;
      // A launch copies what is on the host: numbers, and indices.
      return t.unsafeGetTensorImpl()->is_wrapped_number() ? t : t.clone();
    }
    masks = masks || (index && (t.scalar_type() == at::kBool || t.scalar_type() == at::kByte));
    TORCH_CHECK(!device || *device == t.device() || t.dim() == 0,
                "Expected all tensors to be on the same device, but found at least two devices, ", *device, " and ", t.device(), " (", name, ")");
    if (!device || t.dim() > 0) device = t.device();
    return host_view(t);
  }

  bool synchronises() const {
    if (HOST.count(name)) return true;
    if (name == "aten::index") return masks || host_tensors;
    return host_tensors;
  }
};

void check_fused(const Call& call) {  // what the CUDA kernels require
  if (call.name.rfind("aten::_fused_", 0) != 0 || !call.given[0].isTensorList()) return;
  auto parameters = call.given[0].toTensorVector();
  for (size_t i = 1; i < call.given.size(); i++) {
    if (!call.given[i].isTensorList()) continue;
    auto others = call.given[i].toTensorVector();
    for (size_t j = 0; j < others.size() && others.size() == parameters.size(); j++) {
      auto &a = parameters[j], &b = others[j];
      if (a.dim() == 0 || a.sizes() != b.sizes()) continue;
      TORCH_CHECK(a.strides() == b.strides() && a.scalar_type() == b.scalar_type() && a.device() == b.device(), call.name,
                  ": params, grads and states must have the same dtype, device and layout, argument ", i);
    }
  }
}

std::vector<IValue> run_on_cpu(const c10::OperatorHandle& op, std::vector<IValue> arguments) {
  at::AutoDispatchBelowADInplaceOrView guard;
  torch::jit::Stack stack = std::move(arguments);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
  return stack;
}

// Set the generator of a random operator: `generator` if the caller gives none
void set_generators(std::vector<IValue>& arguments, const std::vector<size_t>& places, const at::Generator& generator) {
  for (auto place : places) arguments[place] = generator;
}

// The forms of an operator's results and of the arguments that it modifies, after a run on zeros
struct Result {
  std::vector<IValue> returns;    // Tensors have a form only: their memory is not used.
  std::vector<IValue> arguments;
};

std::shared_ptr<Result> run_on_zeros(const Call& call, const at::Generator* generator) {
  auto result = std::make_shared<Result>();
  for (auto& value : call.used) result->arguments.push_back(map_tensors(value, [](const Tensor& t) { return zeros_of_form(t); }));
  if (generator) set_generators(result->arguments, call.generators, *generator);
  auto returns = run_on_cpu(call.op, result->arguments);
  for (auto& value : returns) result->returns.push_back(map_tensors(value, [](const Tensor& t) { return form_of(t); }));
  for (auto& value : result->arguments) value = map_tensors(value, [](const Tensor& t) { return form_of(t); });
  return result;
}

std::shared_ptr<Result> forms_of_results(const Call& call) {
  static auto* mutex = new std::mutex;
  static auto* known = new std::unordered_map<std::string, std::shared_ptr<Result>>;
  auto key = describe(call.op, call.used);
  {
    std::lock_guard<std::mutex> lock(*mutex);
    auto found = known->find(key);
    if (found != known->end()) return found->second;
  }
  auto result = run_on_zeros(call, nullptr);
  std::lock_guard<std::mutex> lock(*mutex);
  if (known->size() > 50000) known->clear();
  return (*known)[key] = result;
}

Tensor empty_of_form(const Tensor& form, Device device) {
  c10::DeviceGuard guard(device);
  return at::detail::empty_strided_generic(form.sizes(), form.strides(), device_allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                           form.scalar_type());
}

// Resize an out argument as the kernel does.
void resize(const Tensor& given, const Tensor& form) {
  if (given.sizes() == form.sizes() && given.strides() == form.strides()) return;
  auto* impl = given.unsafeGetTensorImpl();
  if (form.numel() * form.itemsize() > int64_t(given.storage().nbytes()))
    impl->set_storage_keep_dtype(empty_of_form(form, given.device()).storage());
  impl->set_sizes_and_strides(form.sizes(), form.strides(), 0);
}

// Put the results of an operator on the stack: arguments that it modifies, views of them, or `fresh` tensors.
void push_results(const Call& call, torch::jit::Stack* stack, const std::vector<IValue>& forms, std::vector<Tensor>* fresh) {
  const auto& schema = call.op.schema();
  torch::jit::drop(*stack, call.given.size());
  for (size_t r = 0; r < forms.size(); r++) {
    const auto* alias = schema.returns()[r].alias_info();
    const IValue* source = nullptr;
    for (size_t i = 0; alias && i < call.given.size(); i++) {
      const auto* own = schema.arguments()[i].alias_info();
      if (own && own->beforeSets() == alias->beforeSets()) source = &call.given[i];
    }
    if (source && alias->isWrite()) {
      stack->push_back(*source);
      continue;
    }
    stack->push_back(map_tensors(forms[r], [&](const Tensor& form) {
      if (!form.defined()) return form;
      if (source && source->isTensor())
        return at::native::as_strided_tensorimpl(source->toTensor(), form.sizes(), form.strides(), form.storage_offset());
      fresh->push_back(empty_of_form(form, *call.device));
      return fresh->back();
    }));
  }
}

bool written(const Call& call, size_t i) {
  const auto* alias = call.op.schema().arguments()[i].alias_info();
  const auto& value = call.given[i];
  return alias && alias->isWrite() && value.isTensor() && value.toTensor().defined() && value.toTensor().is_cuda();
}

std::vector<Tensor> tensors_in(const std::vector<IValue>& values) {
  std::vector<Tensor> found;
  for (auto& value : values) map_tensors(value, [&](const Tensor& t) { if (t.defined()) found.push_back(t); return t; });
  return found;
}

// Run an operator at once, after the stream's work: its results depend on values.
void run_now(Call& call, torch::jit::Stack* stack) {
  auto& stream = current_stream(call.device->index());
  record(stream).host_wait();
  if (!call.generators.empty()) {
    for (auto place : call.generators)
      if (call.used[place].isNone()) call.used[place] = default_generator(call.device->index());
  }
  auto returns = run_on_cpu(call.op, call.used);
  std::vector<IValue> forms;
  for (auto& value : returns) forms.push_back(map_tensors(value, [](const Tensor& t) { return form_of(t); }));
  for (size_t i = 0; i < call.given.size(); i++) {  // out arguments that the kernel has resized
    if (!written(call, i) || call.used[i].toTensor().sizes() == call.given[i].toTensor().sizes()) continue;
    resize(call.given[i].toTensor(), form_of(call.used[i].toTensor()));
    auto target = host_view(call.given[i].toTensor());
    copy_memory(target, call.used[i].toTensor());
  }
  std::vector<Tensor> fresh;
  push_results(call, stack, forms, &fresh);
  auto values = tensors_in(returns);
  size_t next = 0;
  for (auto& value : values) {
    if (next >= fresh.size()) break;
    auto target = host_view(fresh[next++]);
    stream.submit("result", [target, value]() mutable { copy_memory(target, value); });
  }
}

void run_later(Call& call, torch::jit::Stack* stack, const Result& forms, at::Generator generator) {
  for (size_t i = 0; i < call.given.size(); i++)
    if (written(call, i)) {
      resize(call.given[i].toTensor(), forms.arguments[i].toTensor());
      call.used[i] = host_view(call.given[i].toTensor());
    }
  std::vector<Tensor> fresh;
  push_results(call, stack, forms.returns, &fresh);
  std::vector<Tensor> targets;
  for (auto& tensor : fresh) targets.push_back(host_view(tensor));
  auto op = call.op;
  auto arguments = call.used;
  if (generator.defined()) set_generators(arguments, call.generators, generator);
  current_stream(call.device->index()).submit(call.name.c_str(), [op, arguments, targets]() mutable {
    auto returns = run_on_cpu(op, arguments);
    if (targets.empty()) return;
    auto values = tensors_in(returns);
    for (size_t i = 0; i < targets.size(); i++) copy_memory(targets[i], values[i]);
  });
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call call(op, stack);
  check_fused(call);
  c10::DeviceGuard guard(*call.device);
  const bool random = !call.generators.empty();
  at::Generator generator;
  std::shared_ptr<Result> forms;
  if (call.synchronises()) {
    on_sync("sync", call.name);
  } else {
    count_launch(call.device->index(), call.name + "." + op.operator_name().overload_name);
    try {
      if (random) {
        auto& given = call.used[call.generators[0]];
        auto own = given.isGenerator() ? given.toGenerator() : default_generator(call.device->index());
        generator = own.clone();
        forms = run_on_zeros(call, &own);
      } else {
        forms = forms_of_results(call);
      }
    } catch (const std::exception&) {
      forms = nullptr;  // zeros are no valid values, or the arguments are wrong
    }
  }
  if (forms) run_later(call, stack, *forms, generator);
  else run_now(call, stack);
}

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device,
             std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device_of(device));
  return at::detail::empty_generic(size, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype),
                                   format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device_of(device));
  return at::detail::empty_strided_generic(size, stride, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                           c10::dtype_or_default(dtype));
}

void copy_across(const Tensor& target, const Tensor& source) {  // between two devices
  auto &from = current_stream(source.device().index()), &to = current_stream(target.device().index());
  wait_for(from, record(to));
  auto a = host_view(target), b = host_view(source);
  from.submit("copy between devices", [a, b]() mutable { a.copy_(b); });
  wait_for(to, record(from));
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.is_cuda() && source.is_cuda() && self.device() != source.device()) {
    copy_across(self, source);
    return self;
  }
  const auto device = self.is_cuda() ? self.device() : source.device();
  c10::DeviceGuard guard(device);
  auto& stream = current_stream(device.index());
  count_launch(device.index(), "copy_");
  auto target = self.is_cuda() ? host_view(self) : self;
  if (self.is_cuda() == source.is_cuda()) {
    auto from = host_view(source);
    TORCH_CHECK(at::is_expandable_to(source.sizes(), self.sizes()), "The size of tensor a ", self.sizes(), " must match ", source.sizes());
    stream.submit("copy", [target, from]() mutable {
      at::AutoDispatchBelowADInplaceOrView guard;
      target.copy_(from);
    });
    return self;
  }
  const bool to_host = source.is_cuda();
  const auto& host = to_host ? self : source;
  const bool pinned = is_pinned(host.storage().data());
  std::ostringstream text;
  text << (to_host ? "D2H " : "H2D ") << source.scalar_type() << source.sizes() << (pinned ? " pinned" : " pageable");
  const bool waits = !(non_blocking && pinned);
  if (waits) on_sync("copy", text.str());
  auto from = to_host ? host_view(source) : source;
  if (!to_host && !pinned) from = source.clone();
  stream.submit("copy with the host", [target, from]() mutable {
    at::AutoDispatchBelowADInplaceOrView guard;
    target.copy_(from);
  });
  auto mark = record(stream);
  if (pinned) record_pinned(host.storage().data(), mark);
  if (waits) mark.host_wait();
  return self;
}

at::Scalar local_scalar(const Tensor& self) {
  on_sync("item", "item");
  record(current_stream(self.device().index())).host_wait();
  return host_view(self).item();
}

const Tensor& resize_(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  if (self.sizes() == size && !format) return self;
  auto fresh = empty(size, self.scalar_type(), {}, self.device(), {}, format);
  auto bytes = std::min(fresh.storage().nbytes(), self.storage().nbytes());
  auto *target = fresh.storage().mutable_data(), *source = const_cast<void*>(self.storage().data());
  if (bytes) current_stream(self.device().index()).submit("resize", [=] { std::memcpy(target, source, bytes); });
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(fresh.storage());
  self.unsafeGetTensorImpl()->set_sizes_and_strides(fresh.sizes(), fresh.strides(), 0);
  return self;
}

Tensor& set_source(Tensor& self, c10::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.size() == size.size()) impl->set_sizes_and_strides(size, stride, offset);
  else impl->set_sizes_contiguous(size);
  return self;
}

Tensor& set_storage(Tensor& self, c10::Storage source) {
  auto elements = int64_t(source.nbytes() / self.itemsize());
  return set_source(self, std::move(source), 0, {elements}, {1});
}

void record_stream_op(Tensor& self, c10::Stream stream) {
  record_stream(self.storage().data_ptr(), get_stream(stream.device_index(), stream.id()));
}

// The composition that CUDA's kernel computes, with a generator for the bits
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  auto mask = at::empty_like(input, input.options().dtype(at::kBool));
  if (train && !*train) return {input.clone(), mask.fill_(1)};
  mask.bernoulli_(1 - p);
  return {at::mul(input, mask).mul_(p == 1 ? 0. : 1 / (1 - p)), mask};
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  // One kernel each, as on a GPU with cuDNN; the composition for other devices would be slow, and other numbers than the CPU's
  for (auto name : {"convolution", "convolution_backward"}) m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  for (auto& op : c10::Dispatcher::singleton().getAllOpNames())
    if (op.name.rfind("aten::_foreach_", 0) == 0) {
      auto name = op.name.substr(6) + (op.overload_name.empty() ? "" : "." + op.overload_name);
      m.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
    }
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("copy_", &copy_);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_source);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("record_stream", &record_stream_op);
  m.impl("native_dropout", &native_dropout);
}

}  // namespace
}  // namespace emulated
