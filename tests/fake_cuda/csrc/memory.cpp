#include "memory.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StorageImpl.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <utility>

#include "device.h"

namespace fake_cuda {

namespace {

using Guard = std::lock_guard<Mutex>;

// A freed block, and the operations on the streams of record_stream() that may still use it.
struct Freed {
  MemoryRef memory;
  std::vector<NodeId> follows;
};

struct Registry {
  std::map<Memory*, std::weak_ptr<Memory>> all;
  std::vector<MemoryRef> recorded;  // kept alive until the end of the replays
  std::map<const char*, size_t> pinned;
  std::map<int, std::vector<Freed>> freed;  // by stream
  std::map<int, MemoryStatistics> statistics;
};

Registry& registry() {
  static Registry* instance = new Registry;  // outlives tensors that are freed at exit
  return *instance;
}

MemoryRef new_memory(size_t size, int device) {
  auto memory = std::make_shared<Memory>();
  void* data = nullptr;
  TORCH_CHECK(posix_memalign(&data, 64, std::max<size_t>(size, 64)) == 0, "out of memory");
  std::memset(data, kPoison, std::max<size_t>(size, 64));
  memory->data = static_cast<char*>(data);
  memory->size = size;
  memory->device = device;
  return memory;
}

void release_device(void* context) {
  auto& queue = Queue::get();
  Guard guard(queue.mutex);  // also while the memory is destroyed, which removes it from the registry
  std::unique_ptr<MemoryRef> owner(static_cast<MemoryRef*>(context));
  MemoryRef memory = *owner;
  memory->freed = true;
  statistics(memory->device).allocated -= static_cast<int64_t>(memory->size);
  Freed freed{memory, {}};
  for (int stream : memory->stream_uses) {
    auto tail = queue.tail(stream);
    freed.follows.insert(freed.follows.end(), tail.begin(), tail.end());
  }
  registry().freed[memory->stream].push_back(std::move(freed));
}

// The caching allocator reuses a freed block for an allocation on the same stream. The operations that
// use it depend on those of this stream so far, and on those that the streams of record_stream() had
// when the block was freed.
void reuse_freed_blocks(int stream) {
  auto& queue = Queue::get();
  auto blocks = std::exchange(registry().freed[stream], {});
  for (auto& block : blocks) {
    auto& memory = block.memory;
    Node node;
    node.name = "reuse of a freed block of " + std::to_string(memory->size) + " bytes";
    node.follows = std::move(block.follows);
    auto tail = queue.tail(stream);
    node.follows.insert(node.follows.end(), tail.begin(), tail.end());
    node.touches = {{memory, memory->data, memory->data + memory->size, true}};
    node.run = [data = memory->data, size = memory->size] { std::memset(data, kPoison, size); };
    queue.add(kNoStream, std::move(node), 0);
  }
}

void release_pinned(void* context) {
  Guard guard(Queue::get().mutex);  // also while the memory is destroyed, which removes it from the registry
  std::unique_ptr<MemoryRef> owner(static_cast<MemoryRef*>(context));
  registry().pinned.erase((*owner)->data);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    auto& queue = Queue::get();
    Guard guard(queue.mutex);
    int device = current_device();
    auto memory = new_memory(size, device);
    memory->stream = current_stream(device);
    reuse_freed_blocks(memory->stream);
    registry().all[memory.get()] = memory;
    if (queue.recording()) registry().recorded.push_back(memory);
    queue.counters.allocations++;
    auto& counts = statistics(device);
    counts.allocated += static_cast<int64_t>(size);
    counts.peak = std::max(counts.peak, counts.allocated);
    counts.allocations++;
    return {memory->data, new MemoryRef(memory), release_device,
            cuda(device)};
  }
  void copy_data(void*, const void*, size_t) const override {
    TORCH_CHECK(false, "the allocator of the fake device copies no memory");
  }
};

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    Guard guard(Queue::get().mutex);
    auto memory = new_memory(size, -1);
    registry().pinned[memory->data] = std::max<size_t>(size, 1);
    return {memory->data, new MemoryRef(memory), release_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(to, from, size);
  }
};

}  // namespace

Memory::~Memory() {
  registry().all.erase(this);
  std::free(data);
}

c10::Allocator* device_allocator() {
  static DeviceAllocator allocator;
  return &allocator;
}

c10::Allocator* pinned_allocator() {
  static PinnedAllocator allocator;
  return &allocator;
}

[[maybe_unused]] const bool registered =
    (c10::SetAllocator(c10::DeviceType::CUDA, device_allocator(), 1), true);

MemoryStatistics& statistics(int device) { return registry().statistics[device]; }

static MemoryRef memory_of(const c10::DataPtr& data) {
  if (data.get_deleter() != release_device) return nullptr;
  return *static_cast<MemoryRef*>(data.get_context());
}

MemoryRef memory_of(const at::Tensor& tensor) { return memory_of(tensor.storage().data_ptr()); }

void record_stream(const c10::DataPtr& data, int stream) {
  Guard guard(Queue::get().mutex);
  auto memory = memory_of(data);
  if (memory && memory->stream != stream) memory->stream_uses.insert(stream);
}

void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  auto old = memory_of(storage->data_ptr());
  c10::Device device = storage->device();
  c10::DeviceGuard guard(device);
  auto data = device_allocator()->allocate(bytes);
  size_t kept = std::min(bytes, storage->nbytes());
  if (old && kept > 0) {
    auto next = memory_of(data);
    Node node;
    node.name = "resize of a storage";
    node.touches = {{old, old->data, old->data + kept, false}, {next, next->data, next->data + kept, true}};
    node.run = [to = next->data, from = old->data, kept] { std::memcpy(to, from, kept); };
    Queue::get().add(current_stream(device.index()), std::move(node));
  }
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(bytes);
}

bool is_pinned(const void* data) {
  Guard guard(Queue::get().mutex);
  auto& pinned = registry().pinned;
  auto address = static_cast<const char*>(data);
  auto next = pinned.upper_bound(address);
  if (next == pinned.begin()) return false;
  --next;
  return address < next->first + next->second;
}

void register_host_memory(void* data, size_t size) {
  Guard guard(Queue::get().mutex);
  registry().pinned[static_cast<const char*>(data)] = size;
}

void unregister_host_memory(void* data) {
  Queue::get().drain();  // cudaHostUnregister synchronizes
  Guard guard(Queue::get().mutex);
  registry().pinned.erase(static_cast<const char*>(data));
}

at::Tensor alias(const at::Tensor& tensor, Node& node, bool writes) {
  auto memory = memory_of(tensor);
  if (!memory) {
    TORCH_CHECK(tensor.numel() == 0, "an operation uses a tensor without memory");
    return at::empty_strided(tensor.sizes(), tensor.strides(),
                             at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU));
  }
  if (tensor.numel() > 0) {
    const char* begin = memory->data + tensor.storage_offset() * tensor.itemsize();
    size_t size = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize());
    node.touches.push_back({memory, begin, begin + size, writes});
  }
  c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(),
                       c10::DataPtr(memory->data, c10::Device(c10::DeviceType::CPU)));
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* impl = result.unsafeGetTensorImpl();
  impl->set_storage_offset(tensor.storage_offset());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return result;
}

uint64_t hash_of(const at::Tensor& tensor, uint64_t seed) {
  auto contiguous = tensor.contiguous();
  return hash_bytes(contiguous.const_data_ptr(), contiguous.nbytes(), seed);
}

template <typename Function>
static void for_each_memory(Function function) {
  for (auto& [address, weak] : registry().all) {
    if (auto memory = weak.lock()) function(*memory);
  }
}

void save_memory_before() {
  for (auto& [address, weak] : registry().all) {
    if (auto memory = weak.lock(); memory && !memory->freed) {
      registry().recorded.push_back(memory);
      memory->before.assign(memory->data, memory->data + memory->size);
    }
  }
}

void save_memory_after() {
  for_each_memory([](Memory& memory) {
    if (!memory.freed) memory.after.assign(memory.data, memory.data + memory.size);
  });
}

void restore_memory_before() {
  for_each_memory([](Memory& memory) {
    if (memory.before.empty()) {
      std::memset(memory.data, kPoison, memory.size);
    } else {
      std::memcpy(memory.data, memory.before.data(), memory.size);
    }
  });
}

void restore_memory_after() {
  for_each_memory([](Memory& memory) {
    if (!memory.after.empty()) std::memcpy(memory.data, memory.after.data(), memory.size);
  });
}

std::string first_difference() {
  std::string difference;
  for_each_memory([&](Memory& memory) {
    if (memory.after.empty() || !difference.empty()) return;
    if (std::memcmp(memory.data, memory.after.data(), memory.size) != 0) {
      difference = "memory of " + std::to_string(memory.size) + " bytes differs at the end";
    }
  });
  return difference;
}

void discard_saved_memory() {
  for_each_memory([](Memory& memory) {
    memory.before.clear();
    memory.after.clear();
  });
  registry().recorded.clear();
}

}  // namespace fake_cuda
