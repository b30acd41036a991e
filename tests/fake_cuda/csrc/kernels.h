// Copies between devices and the host.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace fake_cuda {

void transfer(const at::Tensor& target, const at::Tensor& source, bool non_blocking);
// Fill a host tensor with 0xFF.
void poison(const at::Tensor& host);

}  // namespace fake_cuda
