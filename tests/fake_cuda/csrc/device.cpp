#include "device.h"

#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <cstring>
#include <mutex>

#include "memory.h"
#include "queue.h"

namespace fake_cuda {

namespace {

constexpr int kStreams = 1 << 16;  // of one device
constexpr int kMaxDevices = 16;

std::atomic<int> devices{1};
std::atomic<int> sync_debug_mode{0};
thread_local int current_device_index = 0;
thread_local c10::StreamId current_streams[kMaxDevices] = {};

// Torch passes -1 for the current device.
int or_current(int index) { return index < 0 ? current_device_index : index; }

std::vector<int> streams_of(int device) {
  auto& queue = Queue::get();
  std::vector<int> result;
  for (int stream : queue.streams()) {
    if (device_of(stream) == device) result.push_back(stream);
  }
  return result;
}

struct EventState {
  NodeId node = kNone;
  double end = 0;  // kept here, because the queue removes completed operations
};

EventState* state(void* event) { return static_cast<EventState*>(event); }

struct DeviceGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before = cuda(current_device_index);
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return cuda(current_device_index); }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < devices, "CUDA error: invalid device ordinal");
    if (device.index() >= 0) current_device_index = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current_device_index = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    int index = or_current(device.index());
    return c10::Stream(c10::Stream::UNSAFE, cuda(index), current_streams[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, cuda(or_current(device.index())), 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::atomic<c10::StreamId> next{1};
    return c10::Stream(c10::Stream::UNSAFE, cuda(or_current(device.index())), next++ % kStreams);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  void* getStreamNativeHandle(c10::Stream stream) const override {
    return reinterpret_cast<void*>(stream.id());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    c10::Stream before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(devices.load());
  }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete state(event); }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) *event = new EventState;
    Node marker;
    marker.name = "event";
    auto& queue = Queue::get();
    std::lock_guard lock(queue.mutex);
    NodeId node = queue.add(stream_number(stream), std::move(marker), 0);
    *state(*event) = {node, queue.end_time(node)};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) Queue::get().stream_wait(stream_number(stream), state(event)->node);
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || Queue::get().query(state(event)->node);
  }
  void synchronizeEvent(void* event) const override {
    Queue::get().wait_for(event == nullptr ? kNone : state(event)->node, "event.synchronize");
  }
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    TORCH_CHECK(first != nullptr && second != nullptr, "Both events must be recorded");
    return 1e3 * (state(second)->end - state(first)->end);
  }
  bool queryStream(const c10::Stream& stream) const override {
    return Queue::get().query(Queue::get().last_of(stream_number(stream)));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Queue::get().wait_for_streams({stream_number(stream)}, "stream.synchronize");
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    Queue::get().wait_for_streams(streams_of(or_current(device)), "synchronize");
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_stream(data, stream_number(stream));
  }
};

// Seed and offset, as of Philox; every random operation advances the offset.
struct Generator final : c10::GeneratorImpl {
  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
  static c10::DeviceType device_type() { return c10::DeviceType::CUDA; }
  explicit Generator(int device)
      : c10::GeneratorImpl(cuda(device), c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}
  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom(true));
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16 && state.device().is_cpu(), "RNG state is wrong size");
    auto* words = static_cast<const char*>(state.data());
    std::memcpy(&seed_, words, 8);
    std::memcpy(&offset_, words + 8, 8);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({16}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    std::memcpy(state.data_ptr(), &seed_, 8);
    std::memcpy(static_cast<char*>(state.data_ptr()) + 8, &offset_, 8);
    return state.getIntrusivePtr();
  }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }
};

const at::Generator& default_generator(int device) {
  static std::map<int, at::Generator> generators;
  device = or_current(device);
  auto& generator = generators[device];
  if (!generator.defined()) generator = at::make_generator<Generator>(device);
  return generator;
}

bool return_default_generator = false;

}  // namespace

c10::Device cuda(int index) {
  return c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index));
}
int device_count() { return devices; }
int current_device() { return current_device_index; }
void set_device(int device) { current_device_index = device; }
int current_stream(int device) {
  return device * kStreams + static_cast<int>(current_streams[device]);
}
int stream_number(const c10::Stream& stream) {
  return stream.device_index() * kStreams + static_cast<int>(stream.id());
}
int device_of(int stream) { return stream / kStreams; }

void check_sync_debug_mode(const std::string& cause) {
  TORCH_CHECK(sync_debug_mode < 2, "called a synchronizing CUDA operation: ", cause);
}

uint64_t next_seed(const std::optional<at::Generator>& generator, int device) {
  const auto& used = generator && generator->defined() ? *generator : default_generator(device);
  auto* state = at::check_generator<Generator>(used);
  std::lock_guard lock(state->mutex_);
  uint64_t words[2] = {state->seed_, state->offset_};
  state->offset_ += 4;
  return hash_bytes(words, sizeof words);
}

static DeviceGuard guard;
static c10::impl::DeviceGuardImplRegistrar guard_registrar(c10::DeviceType::CUDA, &guard);

}  // namespace fake_cuda

namespace at {

struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(fake_cuda::device_count()); }
  int getNumGPUs() const override { return fake_cuda::device_count(); }
  DeviceIndex current_device() const override { return getCurrentDevice(); }
  DeviceIndex getCurrentDevice() const override {
    return static_cast<DeviceIndex>(fake_cuda::current_device());
  }
  void setCurrentDevice(DeviceIndex device) const override { fake_cuda::set_device(device); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    DeviceIndex before = getCurrentDevice();
    setCurrentDevice(device);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* data) const override { return fake_cuda::is_pinned(data); }
  Allocator* getPinnedMemoryAllocator() const override { return fake_cuda::pinned_allocator(); }
  Allocator* getCUDADeviceAllocator() const override { return fake_cuda::device_allocator(); }
  Device getDeviceFromPtr(void*) const override {
    return Device(DeviceType::CUDA, getCurrentDevice());
  }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    return fake_cuda::default_generator(device);
  }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    if (fake_cuda::return_default_generator) return fake_cuda::default_generator(device);
    return at::make_generator<fake_cuda::Generator>(fake_cuda::or_current(device));
  }
  void deviceSynchronize(DeviceIndex device) const override {
    fake_cuda::guard.synchronizeDevice(device);
  }
  std::string showConfig() const override { return "fake"; }
};

REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace at

// Functions that Python calls through ctypes.
extern "C" {
double fake_cuda_elapsed_time(void* first, void* second) {
  return fake_cuda::guard.elapsedTime(first, second, 0);
}
void fake_cuda_set_devices(int count) { fake_cuda::devices = count; }
void fake_cuda_set_sync_debug_mode(int mode) { fake_cuda::sync_debug_mode = mode; }
int fake_cuda_get_sync_debug_mode() { return fake_cuda::sync_debug_mode; }
void fake_cuda_return_default_generator(bool yes) { fake_cuda::return_default_generator = yes; }
}
