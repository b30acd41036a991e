// Devices and streams as torch sees them.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Stream.h>

#include <string>

namespace fake_cuda {

int device_count();
int current_device();
void set_device(int device);
// A number for each stream of each device.
int current_stream(int device);
int stream_number(const c10::Stream& stream);
int device_of(int stream);
// Raise the first error of a device, as the host's waits do.
void raise_error();
// Raise or pass, as torch.cuda.set_sync_debug_mode() has chosen.
void note_wait(const std::string& cause);
// A seed for one random operation; the generator's offset moves on.
uint64_t next_seed(const std::optional<at::Generator>& generator, int device);

}  // namespace fake_cuda
