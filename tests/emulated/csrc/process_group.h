// The emulated NCCL: a backend of torch.distributed for tensors of the emulated device.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace emulated {

void bind_process_group(pybind11::module& m);

}  // namespace emulated
