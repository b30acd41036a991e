// Copies between a device and the host, which other files of this folder need too.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace fake_cuda {

void transfer(const at::Tensor& target, const at::Tensor& source, bool non_blocking);
// Fill a tensor of the host with bytes that no result has.
void poison(const at::Tensor& host);

}  // namespace fake_cuda
