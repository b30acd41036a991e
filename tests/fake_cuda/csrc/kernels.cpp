// All operators of a CUDA device. The Meta kernel computes the shapes at launch, the CPU kernel the
// values when the queue runs the operation.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/op_registration/op_registration.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/full.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/EmptyTensor.h>
#include <ATen/TensorOperators.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cmath>
#include <cstring>
#include <set>
#include <unordered_map>

#include "device.h"
#include "kernels.h"
#include "memory.h"
#include "queue.h"

namespace fake_cuda {

namespace {

using c10::Device;
using c10::DeviceType;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using torch::jit::Stack;

bool on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.device().is_cuda(); }

void count_launch(const std::string& name) {
  auto& queue = Queue::get();
  std::lock_guard lock(queue.mutex);
  queue.counters.launches[name]++;
}

// Let the host wait for an operation that reads values of the device.
void wait_for_values(NodeId id, const std::string& cause) {
  auto& queue = Queue::get();
  {
    std::lock_guard lock(queue.mutex);
    queue.counters.reads++;
  }
  queue.wait_for(id, cause);
}

// Apply a function to a tensor, or to each tensor of a list.
template <typename Function>
IValue with_tensors(const IValue& value, Function function) {
  if (value.isTensor()) return function(value.toTensor());
  if (value.isTensorList()) {
    auto list = value.toTensorVector();
    for (auto& tensor : list) tensor = function(tensor);
    return c10::List<at::Tensor>(list);
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& element : value.toOptionalTensorVector()) {
      bool some = element.has_value() && element->defined();
      list.push_back(some ? std::optional<at::Tensor>(function(*element)) : element);
    }
    return list;
  }
  return value;
}

template <typename Function>
void each_tensor(const IValue& value, Function function) {
  with_tensors(value, [&](const at::Tensor& tensor) {
    if (tensor.defined()) function(tensor);
    return tensor;
  });
}

bool is_generator(const c10::Argument& argument) {
  auto type = argument.type();
  if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  return type->kind() == c10::TypeKind::GeneratorType;
}

// The arguments of a call as meta tensors. Tensors that share a storage share it here too.
class MetaCall {
 public:
  Stack stack;

  at::Tensor operator()(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (tensor.device().is_cpu() && tensor.dim() == 0) return tensor;
    auto& storage = storages_[tensor.storage().unsafeGetStorageImpl()];
    if (!storage) {
      storage = c10::Storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(),
                             c10::DataPtr(nullptr, Device(DeviceType::Meta)),
                             c10::GetAllocator(DeviceType::Meta), true);
    }
    auto meta = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(storage), DispatchKeySet(DispatchKey::Meta), tensor.dtype());
    auto* impl = meta.unsafeGetTensorImpl();
    impl->set_storage_offset(tensor.storage_offset());
    impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
    arguments_.emplace_back(meta, tensor);
    return meta;
  }

  // Return the argument that a result is or views; undefined for a new tensor.
  at::Tensor argument(const at::Tensor& result) const {
    for (auto& [meta, tensor] : arguments_) {
      if (meta.is_same(result)) return tensor;
    }
    for (auto& [meta, tensor] : arguments_) {
      if (!on_device(tensor) || !result.storage().is_alias_of(meta.storage())) continue;
      auto view = at::detail::make_tensor<c10::TensorImpl>(
          c10::TensorImpl::VIEW, c10::Storage(tensor.storage()), tensor.key_set(), result.dtype());
      view.unsafeGetTensorImpl()->set_storage_offset(result.storage_offset());
      view.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides());
      return view;
    }
    return {};
  }

  // Resize `out` arguments as the operator does.
  void resize_arguments() const {
    for (auto& [meta, tensor] : arguments_) {
      if (!on_device(tensor) || meta.sizes() == tensor.sizes()) continue;
      size_t bytes = meta.storage().nbytes();
      if (bytes > tensor.storage().nbytes()) {
        resize_storage(tensor.storage().unsafeGetStorageImpl(), bytes);
      }
      tensor.unsafeGetTensorImpl()->set_sizes_and_strides(meta.sizes(), meta.strides());
    }
  }

 private:
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages_;
  std::vector<std::pair<at::Tensor, at::Tensor>> arguments_;
};

at::Tensor new_tensor(at::IntArrayRef sizes, at::IntArrayRef strides, c10::ScalarType dtype, int device) {
  c10::DeviceGuard guard(cuda(device));
  return at::detail::empty_strided_generic(sizes, strides, device_allocator(),
                                           DispatchKeySet(DispatchKey::CUDA), dtype);
}

// Operators that on CUDA take 16-bit inputs with FP32 statistics, while CPU kernels need one dtype.
bool computes_in_fp32(const std::string& name) {
  static const std::set<std::string> names{"aten::native_layer_norm", "aten::native_layer_norm_backward",
                                           "aten::_fused_rms_norm", "aten::_fused_rms_norm_backward"};
  return names.count(name) != 0;
}

// Torch has no CPU kernel of it; only CUDA's RMSNorm calls it.
std::tuple<at::Tensor, at::Tensor> rms_norm_backward(
    const at::Tensor& grad, const at::Tensor& input, at::IntArrayRef shape, const at::Tensor& rstd,
    const std::optional<at::Tensor>& weight, std::array<bool, 2> wanted) {
  std::vector<int64_t> outer, inner;
  int64_t count = input.dim(), first = count - static_cast<int64_t>(shape.size());
  for (int64_t i = 0; i < count; i++) (i < first ? outer : inner).push_back(i);
  bool weighted = weight.has_value() && weight->defined();
  auto normalized = input * rstd;
  auto scaled = weighted ? grad * *weight : grad;
  auto of_weight = grad * normalized;
  if (!outer.empty()) of_weight = of_weight.sum(outer);
  auto of_input = (scaled - normalized * (scaled * normalized).mean(inner, true)) * rstd;
  return {wanted[0] ? of_input : at::Tensor(), wanted[1] && weighted ? of_weight : at::Tensor()};
}

at::Tensor upcast(const at::Tensor& tensor) {
  bool is_16_bit = tensor.defined() &&
      (tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16);
  return is_16_bit ? tensor.to(at::kFloat) : tensor;
}

// A call of the CPU kernel on the memory of the device.
struct HostCall {
  c10::OperatorHandle op;
  Stack arguments;
  int generator = -1;  // index of the generator argument, or -1
  uint64_t seed = 0;
  bool upcasts = false;

  Stack operator()() const {
    Stack stack = arguments;
    if (generator >= 0) stack[generator] = at::make_generator<at::CPUGeneratorImpl>(seed);
    if (upcasts) {
      for (auto& value : stack) value = with_tensors(value, upcast);
    }
    op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &stack);
    return stack;
  }
};

// A copy of a host argument: kernels read their arguments at launch.
at::Tensor copy_of(const at::Tensor& tensor) {
  auto copy = tensor.clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

HostCall host_call(const c10::OperatorHandle& op, const Stack& arguments, int device, Node& node) {
  HostCall call{op};
  std::optional<at::Generator> generator;
  const auto& schema = op.schema();
  for (size_t i = 0; i < arguments.size(); i++) {
    const IValue& value = arguments[i];
    const auto* alias_info = schema.arguments()[i].alias_info();
    bool writes = alias_info != nullptr && alias_info->isWrite();
    if (is_generator(schema.arguments()[i])) {
      call.generator = static_cast<int>(i);
      if (!value.isNone()) generator = value.toGenerator();
      call.arguments.emplace_back();
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
      call.arguments.emplace_back(Device(DeviceType::CPU));
    } else {
      call.arguments.push_back(with_tensors(value, [&](const at::Tensor& tensor) {
        if (!tensor.defined()) return tensor;
        return on_device(tensor) ? alias(tensor, node, writes) : copy_of(tensor);
      }));
    }
  }
  if (call.generator >= 0) call.seed = next_seed(generator, device);
  call.upcasts = computes_in_fp32(schema.name());
  return call;
}

int device_of_call(const Stack& arguments) {
  int device = -1;
  for (const auto& value : arguments) {
    each_tensor(value, [&](const at::Tensor& tensor) {
      if (!on_device(tensor)) return;
      TORCH_CHECK(device < 0 || device == tensor.device().index() || tensor.dim() == 0,
                  "Expected all tensors to be on the same device, but found at least two devices, cuda:",
                  device, " and cuda:", static_cast<int>(tensor.device().index()), "!");
      if (device < 0) device = tensor.device().index();
    });
    if (device < 0 && value.isDevice() && value.toDevice().is_cuda()) {
      device = value.toDevice().has_index() ? value.toDevice().index() : current_device();
    }
  }
  return device < 0 ? current_device() : device;
}

// As on a real device, host tensors must be 0-dim, except for indices.
void check_devices(const c10::OperatorHandle& op, const Stack& arguments) {
  static const std::set<std::string> takes_indices{
      "aten::index", "aten::index_put_", "aten::_index_put_impl_"};
  if (takes_indices.count(op.schema().name()) != 0) return;
  for (const auto& value : arguments) {
    each_tensor(value, [&](const at::Tensor& tensor) {
      TORCH_CHECK(!tensor.device().is_cpu() || tensor.dim() == 0,
                  "Expected all tensors to be on the same device, but found at least two devices, ",
                  "cuda:0 and cpu! (", op.schema().name(), ")");
    });
  }
}

// For operators that return values to the host, or whose output shapes depend on values: the host waits.
void call_and_wait(const c10::OperatorHandle& op, const Stack& arguments, int device, Stack* stack) {
  auto name = op.schema().name();
  check_sync_debug_mode(name);
  Node node;
  node.name = name;
  auto call = host_call(op, arguments, device, node);
  auto results = std::make_shared<Stack>();
  node.run = [call, results] { *results = call(); };
  node.observed = [call] {
    uint64_t hash = 0;
    for (const auto& value : call.arguments) {
      each_tensor(value, [&](const at::Tensor& tensor) { hash = hash_of(tensor, hash); });
    }
    return hash;
  };
  wait_for_values(Queue::get().add(current_stream(device), std::move(node)), name);
  for (const auto& value : *results) {
    stack->push_back(with_tensors(value, [&](const at::Tensor& tensor) {
      if (!tensor.defined()) return tensor;
      auto result = new_tensor(tensor.sizes(), tensor.strides(), tensor.scalar_type(), device);
      transfer(result, tensor, false);
      return result;
    }));
  }
}

// Refuse a layout that cuBLAS does not have; the CPU kernel takes any.
void check_layout(const std::string& name, const Stack& arguments) {
  if (name != "aten::_scaled_mm") return;
  auto first = arguments[0].toTensor(), second = arguments[1].toTensor();
  TORCH_CHECK(first.stride(1) == 1, "_scaled_mm: the first matrix must be row-major");
  TORCH_CHECK(second.stride(0) == 1, "_scaled_mm: the second matrix must be column-major");
}

// Return whether all outputs are tensors or lists of tensors, as Meta kernels compute.
bool returns_tensors(const c10::FunctionSchema& schema) {
  for (const auto& result : schema.returns()) {
    auto type = result.type();
    if (auto list = type->cast<c10::ListType>()) type = list->getElementType();
    if (type->kind() != c10::TypeKind::TensorType) return false;
  }
  return true;
}

void kernel(const c10::OperatorHandle& op, Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  const auto& schema = op.schema();
  const std::string name = schema.name();
  Stack arguments = torch::jit::pop(*stack, schema.arguments().size());
  int device = device_of_call(arguments);
  check_devices(op, arguments);
  check_layout(name, arguments);
  count_launch(name);

  MetaCall meta;
  for (size_t i = 0; i < arguments.size(); i++) {
    const IValue& value = arguments[i];
    if (is_generator(schema.arguments()[i])) {
      meta.stack.emplace_back();
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
      meta.stack.emplace_back(Device(DeviceType::Meta));
    } else {
      meta.stack.push_back(with_tensors(value, [&](const at::Tensor& tensor) { return meta(tensor); }));
    }
  }
  if (!returns_tensors(schema)) return call_and_wait(op, arguments, device, stack);
  if (!schema.returns().empty()) {
    try {
      op.redispatchBoxed(DispatchKeySet(DispatchKey::Meta), &meta.stack);
    } catch (const c10::NotImplementedError&) {
      return call_and_wait(op, arguments, device, stack);
    } catch (const std::exception& error) {
      // Raised by Meta kernels that are written in Python.
      if (std::string(error.what()).find("NotImplementedError") == std::string::npos) throw;
      return call_and_wait(op, arguments, device, stack);
    }
  } else {
    meta.stack.clear();
  }
  meta.resize_arguments();

  Node node;
  node.name = name;
  auto call = host_call(op, arguments, device, node);
  // New results, by output and index in a list.
  std::vector<std::pair<std::pair<size_t, int>, at::Tensor>> copied;
  for (size_t i = 0; i < meta.stack.size(); i++) {
    int next = 0;
    stack->push_back(with_tensors(meta.stack[i], [&](const at::Tensor& result) {
      int element = next++;
      if (!result.defined()) return result;
      if (auto argument = meta.argument(result); argument.defined()) return argument;
      auto made = new_tensor(result.sizes(), result.strides(), result.scalar_type(), device);
      if (made.numel() > 0) copied.push_back({{i, element}, alias(made, node, true)});
      return made;
    }));
  }
  node.run = [call, copied] {
    Stack results = call();
    for (const auto& [index, target] : copied) {
      const IValue& value = results[index.first];
      at::Tensor result = value.isTensor() ? value.toTensor() : value.toTensorVector()[index.second];
      at::Tensor(target).copy_(result);
    }
  };
  Queue::get().add(current_stream(device), std::move(node));
}

at::Tensor empty_memory_format(at::IntArrayRef sizes, std::optional<c10::ScalarType> dtype,
                               std::optional<c10::Layout>, std::optional<Device> device,
                               std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  int index = device && device->has_index() ? device->index() : current_device();
  c10::DeviceGuard guard(cuda(index));
  return at::detail::empty_generic(sizes, device_allocator(), DispatchKeySet(DispatchKey::CUDA),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides,
                         std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                         std::optional<Device> device, std::optional<bool>) {
  int index = device && device->has_index() ? device->index() : current_device();
  return new_tensor(sizes, strides, c10::dtype_or_default(dtype), index);
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef sizes, std::optional<c10::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  size_t bytes = at::detail::computeStorageNbytesContiguous(sizes, self.itemsize(), self.storage_offset());
  if (bytes > self.storage().nbytes()) resize_storage(self.storage().unsafeGetStorageImpl(), bytes);
  impl->set_sizes_contiguous(sizes);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, c10::Storage source, int64_t offset, at::IntArrayRef sizes,
                        at::IntArrayRef strides) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (strides.empty() && !sizes.empty()) {
    impl->set_sizes_contiguous(sizes);
  } else {
    impl->set_sizes_and_strides(sizes, strides);
  }
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, c10::Storage source) {
  int64_t count = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, {count}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_empty(at::Tensor& self) {
  auto empty = empty_memory_format({0}, self.scalar_type(), {}, self.device(), {}, {});
  return set_storage(self, empty.storage(), 0, {0}, {1});
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  check_sync_debug_mode("item");
  Node node;
  node.name = "item";
  auto source = alias(self, node, false);
  auto value = std::make_shared<at::Scalar>();
  node.run = [source, value] { *value = at::_local_scalar_dense(source); };
  node.observed = [source] { return hash_of(source); };
  wait_for_values(Queue::get().add(current_stream(self.device().index()), std::move(node)), "item");
  return *value;
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  transfer(self, source, non_blocking);
  return self;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  transfer(target, self, non_blocking);
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  transfer(target, self, false);
  return target;
}

void foreach_copy_(at::TensorList targets, at::TensorList sources, bool non_blocking) {
  bool all_on_devices = true;
  for (size_t i = 0; i < targets.size(); i++) {
    all_on_devices &= on_device(targets[i]) && on_device(sources[i]);
  }
  if (!all_on_devices) {
    for (size_t i = 0; i < targets.size(); i++) transfer(targets[i], sources[i], non_blocking);
    return;
  }
  if (targets.empty()) return;
  count_launch("aten::_foreach_copy_");
  Node node;
  node.name = "aten::_foreach_copy_";
  std::vector<at::Tensor> to, from;
  for (size_t i = 0; i < targets.size(); i++) {
    to.push_back(alias(targets[i], node, true));
    from.push_back(alias(sources[i], node, false));
  }
  node.run = [to, from] {
    for (size_t i = 0; i < to.size(); i++) to[i].copy_(from[i]);
  };
  Queue::get().add(current_stream(targets[0].device().index()), std::move(node));
}

std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& self, double p, std::optional<bool> train) {
  count_launch("aten::native_dropout");
  int device = self.device().index();
  auto result = new_tensor(self.sizes(), self.strides(), self.scalar_type(), device);
  auto mask = new_tensor(self.sizes(), self.strides(), at::kBool, device);
  Node node;
  node.name = "aten::native_dropout";
  auto input = alias(self, node, false), output = alias(result, node, true), kept = alias(mask, node, true);
  bool drop = train.value_or(true);
  uint64_t seed = next_seed({}, device);
  node.run = [=] {
    if (!drop || p == 0) {
      output.copy_(input);
      kept.fill_(true);
      return;
    }
    auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
    kept.copy_(at::bernoulli(at::full(input.sizes(), 1 - p), generator));
    output.copy_(p == 1 ? at::zeros_like(input) : input.mul(kept).mul_(1 / (1 - p)));
  };
  Queue::get().add(current_stream(device), std::move(node));
  return {result, mask};
}

void record_stream_kernel(at::Tensor& self, c10::Stream stream) {
  record_stream(self.storage().data_ptr(), stream_number(stream));
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty_memory_format);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", at::native::view);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("unfold", at::native::unfold);
  library.impl("resize_", resize_);
  library.impl("set_.source_Storage", set_whole_storage);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("set_", set_empty);
  library.impl("_local_scalar_dense", local_scalar_dense);
  library.impl("copy_", copy_);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_foreach_copy_", foreach_copy_);
  library.impl("native_dropout", native_dropout);
  library.impl("record_stream", record_stream_kernel);
}

}  // namespace

void transfer(const at::Tensor& target, const at::Tensor& source, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView below;
  if (target.numel() == 0) return;
  auto& queue = Queue::get();
  at::Tensor from = source.expand(target.sizes());
  Node node;
  if (on_device(source) && on_device(target)) {
    auto to_alias = alias(target, node, true);
    auto from_alias = alias(from, node, false);
    bool same = source.device() == target.device();
    node.name = source.scalar_type() != target.scalar_type() ? "cast" : "copy";
    count_launch(node.name);
    node.run = [=] { at::Tensor(to_alias).copy_(from_alias); };
    int stream = current_stream(target.device().index());
    int other = current_stream(source.device().index());
    if (!same) node.follows = queue.tail(other);
    NodeId id = queue.add(stream, std::move(node));
    if (!same) queue.stream_wait(other, id);
    return;
  }
  if (on_device(target)) {
    bool pinned = is_pinned(source.const_data_ptr());
    auto to_alias = alias(target, node, true);
    auto source_copy = std::make_shared<at::Tensor>(from.clone());
    bool blocking = !non_blocking;
    if (blocking) check_sync_debug_mode("copy to the device");
    // A pinned source is read when the copy runs, and must be unchanged since the launch, unless a
    // pending copy to the host writes to it.
    bool is_written = queue.writes_host(source.storage().data(), source.storage().nbytes());
    bool deferred = pinned && non_blocking && !is_written;
    node.name = "copy to the device";
    count_launch(node.name);
    at::Tensor host = from;
    bool source_is_pending = pinned && !deferred;
    auto has_run = std::make_shared<bool>(false);
    node.run = [=, &queue] {
      if (!*has_run) {
        *has_run = true;
        if (source_is_pending) *source_copy = host.clone();
        if (deferred && hash_of(host) != hash_of(*source_copy)) {
          queue.fail("pinned memory was written before it had been copied to the device");
        }
      }
      at::Tensor(to_alias).copy_(*source_copy);
    };
    node.rerun = [=] { at::Tensor(to_alias).copy_(*source_copy); };
    NodeId id = queue.add(current_stream(target.device().index()), std::move(node));
    if (!pinned && non_blocking) {
      std::lock_guard lock(queue.mutex);
      queue.counters.pageable_copies++;
    }
    if (blocking) queue.wait_for(id, "copy to the device");
    return;
  }
  // To the host.
  auto from_alias = alias(from, node, false);
  bool pinned = is_pinned(target.const_data_ptr());
  bool blocking = !non_blocking || !pinned;
  if (blocking) check_sync_debug_mode("copy to the host");
  node.name = "copy to the host";
  count_launch(node.name);
  at::Tensor host = target;
  at::Tensor staged = at::empty_like(target, at::TensorOptions().pinned_memory(false));
  // Poisoned until the copy runs, so that a read without synchronization is detected.
  if (!blocking) poison(host);
  node.run = [=] {
    staged.copy_(from_alias);
    at::Tensor(host).copy_(staged);
  };
  node.rerun = [] {};
  node.observed = [=] { return hash_of(from_alias); };
  NodeId id = queue.add(current_stream(source.device().index()), std::move(node));
  if (blocking) {
    wait_for_values(id, "copy to the host");
  } else {
    queue.add_host_write(id, target.storage().data(), target.storage().nbytes());
  }
}

void poison(const at::Tensor& host) {
  if (host.is_contiguous()) {
    std::memset(host.mutable_data_ptr(), kPoison, host.nbytes());
  } else {
    host.fill_(host.is_floating_point() ? std::nan("") : -1);
  }
}

// CPUs have no kernel of it.
at::Tensor& addmm_of_16_bits(const at::Tensor& self, const at::Tensor& left, const at::Tensor& right,
                             at::ScalarType dtype, const at::Scalar& beta, const at::Scalar& alpha,
                             at::Tensor& result) {
  return result.copy_(at::addmm(self.to(dtype), left.to(dtype), right.to(dtype), beta, alpha));
}

TORCH_LIBRARY_IMPL(aten, CPU, library) {
  library.impl("_fused_rms_norm_backward", rms_norm_backward);
  library.impl("addmm.dtype_out", addmm_of_16_bits);
}

}  // namespace fake_cuda

extern "C" {

void fake_cuda_resize_storage(void* storage, int64_t bytes) {
  fake_cuda::resize_storage(static_cast<c10::StorageImpl*>(storage), static_cast<size_t>(bytes));
}

// Register the boxed kernel for operators, one "name.overload" per line.
void fake_cuda_register(const char* names) {
  static auto* library =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  std::istringstream lines(names);
  std::string name;
  while (std::getline(lines, name)) {
    auto dot = name.find('.');
    c10::OperatorName operator_name("aten::" + name.substr(0, dot),
                                    dot == std::string::npos ? "" : name.substr(dot + 1));
    auto op = c10::Dispatcher::singleton().findSchema(operator_name);
    if (!op || op->hasKernelForDispatchKey(c10::DispatchKey::CUDA)) continue;
    library->impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&fake_cuda::kernel>());
  }
}
}
