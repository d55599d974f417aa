// Forms of tensors: sizes, strides and types without values. Values of boxed operators are mapped tensor by tensor.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

namespace emulated {

using TensorMap = std::function<at::Tensor(const at::Tensor&)>;

// The value with all tensors in it replaced.
c10::IValue map_tensors(const c10::IValue& value, const TensorMap& map);

// A tensor on the CPU over the memory of a tensor on the device. It doesn't own the memory, as a kernel doesn't own its arguments.
at::Tensor host_view(const at::Tensor& t);
// A tensor on the CPU of the same form, filled with zeros. Numbers keep their value.
at::Tensor zeros_of_form(const at::Tensor& t);
// A tensor of the same form that owns no memory.
at::Tensor form_of(const at::Tensor& t);
// Copy values; as bytes if the strides are equal.
void copy_memory(at::Tensor& target, const at::Tensor& source);

// Everything that the forms of an operator's results may depend on.
std::string describe(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments);

}  // namespace emulated
