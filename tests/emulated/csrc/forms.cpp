#include "forms.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/zeros.h>
#include <c10/core/CPUAllocator.h>

#include <cstring>

namespace emulated {

using at::Tensor;
using c10::IValue;

namespace {

Tensor over(const Tensor& t, c10::DataPtr data, size_t bytes) {
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes, std::move(data),
                                                             c10::GetCPUAllocator(), /*resizable=*/true));
  auto result = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
  auto* impl = result.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return result;
}

void append(std::string& text, const void* data, size_t bytes) { text.append(static_cast<const char*>(data), bytes); }

template <class T>
void append(std::string& text, const T& value) {
  append(text, &value, sizeof value);
}

template <class T>
void append_list(std::string& text, c10::ArrayRef<T> values) {
  append(text, values.size());
  append(text, values.data(), values.size() * sizeof(T));
}

void append_tensor(std::string& text, const Tensor& t) {
  if (!t.defined()) {
    text += 'u';
    return;
  }
  text += t.unsafeGetTensorImpl()->is_wrapped_number() ? 'w' : 't';
  append(text, t.scalar_type());
  append_list(text, t.sizes());
  append_list(text, t.strides());
  append(text, t.storage_offset());
}

void append_value(std::string& text, const IValue& value) {
  append(text, char(value.isTensor() ? 'T' : value.isNone() ? 'N' : 'V'));
  if (value.isTensor()) append_tensor(text, value.toTensor());
  else if (value.isInt()) append(text, value.toInt());
  else if (value.isBool()) append(text, value.toBool());
  else if (value.isDouble()) append(text, value.toDouble());
  else if (value.isIntList()) { auto list = value.toIntVector(); append_list<int64_t>(text, list); }
  else if (value.isDoubleList()) { auto list = value.toDoubleVector(); append_list<double>(text, list); }
  else if (value.isString()) text += value.toStringRef();
  else if (value.isList()) {
    auto list = value.toListRef();
    append(text, list.size());
    for (auto& item : list) append_value(text, item);
  } else if (!value.isNone() && !value.isDevice() && !value.isGenerator()) {
    text += c10::str(value);
  }
}

}  // namespace

IValue map_tensors(const IValue& value, const TensorMap& map) {
  if (value.isTensor()) return map(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& t : value.toTensorVector()) list.push_back(map(t));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const auto& t : value.toOptionalTensorVector()) list.push_back(t ? std::optional<Tensor>(map(*t)) : std::nullopt);
    return list;
  }
  return value;
}

Tensor host_view(const Tensor& t) {
  if (!t.defined()) return t;
  c10::DataPtr data(const_cast<void*>(t.storage().data()), c10::Device(c10::DeviceType::CPU));
  return over(t, std::move(data), t.storage().nbytes());
}

Tensor zeros_of_form(const Tensor& t) {
  if (!t.defined()) return t;
  at::AutoDispatchBelowADInplaceOrView guard;
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) return t;
  auto bytes = t.storage().nbytes();
  auto data = c10::GetCPUAllocator()->allocate(bytes);
  if (bytes) std::memset(data.get(), 0, bytes);
  return over(t, std::move(data), bytes);
}

Tensor form_of(const Tensor& t) { return t.defined() ? over(t, c10::DataPtr(nullptr, c10::Device(c10::DeviceType::CPU)), 0) : t; }

void copy_memory(Tensor& target, const Tensor& source) {
  at::AutoDispatchBelowADInplaceOrView guard;
  if (source.strides() == target.strides() && source.is_non_overlapping_and_dense() && source.scalar_type() == target.scalar_type())
    std::memcpy(target.mutable_data_ptr(), source.const_data_ptr(), source.nbytes());
  else
    target.copy_(source);
}

std::string describe(const c10::OperatorHandle& op, const std::vector<IValue>& arguments) {
  std::string text;
  text.reserve(256);
  text += op.operator_name().name;
  text += '.';
  text += op.operator_name().overload_name;
  for (auto& value : arguments) append_value(text, value);
  return text;
}

}  // namespace emulated
