// The emulated device as torch sees it.
#pragma once

#include "streams.h"

#include <ATen/core/Generator.h>

namespace emulated {

at::Generator& default_generator(int device);
void register_device();

}  // namespace emulated
