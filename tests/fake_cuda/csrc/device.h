// Devices, streams and generators that torch uses.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <string>

namespace fake_cuda {

c10::Device cuda(int index);
int device_count();
int current_device();
void set_device(int device);
// Streams are numbered over all devices.
int current_stream(int device);
int stream_number(const c10::Stream& stream);
int device_of(int stream);
// Raise if torch.cuda.set_sync_debug_mode("error") is set.
void check_sync_debug_mode(const std::string& cause);
// Return a seed for one random operation, and advance the offset of the generator.
uint64_t next_seed(const std::optional<at::Generator>& generator, int device);

}  // namespace fake_cuda
