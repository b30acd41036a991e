// Memory of fake devices, which is poisoned as soon as the caching allocator could reuse it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "queue.h"

namespace fake_cuda {

constexpr int kPoison = 0xFF;  // NaN in most floating-point dtypes

struct Memory {
  char* data = nullptr;
  size_t size = 0;
  int device = -1;            // -1: pinned host memory
  int stream = kNoStream;     // on which it was allocated
  std::set<int> stream_uses;  // other streams, from record_stream
  bool freed = false;
  std::vector<char> before;  // contents at the begin of the recording
  std::vector<char> after;   // contents at its end
  ~Memory();
};

using MemoryRef = std::shared_ptr<Memory>;

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();

MemoryRef memory_of(const at::Tensor& tensor);
void record_stream(const c10::DataPtr& data, int stream);
void resize_storage(c10::StorageImpl* storage, size_t bytes);

bool is_pinned(const void* data);
void register_host_memory(void* data, size_t size);
void unregister_host_memory(void* data);

// Return a CPU tensor that shares the memory, and add the access to the operation.
at::Tensor alias(const at::Tensor& tensor, Node& node, bool writes);

// Return a hash of the values of a CPU tensor.
uint64_t hash_of(const at::Tensor& tensor, uint64_t seed = 0);

// Snapshots for replays.
void save_memory_before();
void save_memory_after();
void restore_memory_before();
void restore_memory_after();
std::string first_difference();
void discard_saved_memory();

struct MemoryStatistics {
  int64_t allocated = 0;
  int64_t peak = 0;
  int64_t allocations = 0;
};
MemoryStatistics& statistics(int device);

}  // namespace fake_cuda
