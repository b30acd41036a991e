// Collectives with the order and lifetimes of NCCL's: a communicator runs its collectives in order on
// one stream; other streams wait for them, the host does not. Gloo transports the data.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include <future>

#include "device.h"
#include "memory.h"
#include "queue.h"

namespace fake_cuda {

namespace {

using at::Tensor;
using c10d::Backend;
using c10d::Work;
using Tensors = std::vector<Tensor>;
template <typename T>
using Ref = c10::intrusive_ptr<T>;

// One collective of a communicator.
class StreamWork final : public Work {
 public:
  StreamWork(c10d::OpType type, NodeId node, Tensors stashed, Tensors results, uint64_t sequence)
      : Work(-1, type), node_(node), stashed_(std::move(stashed)), results_(std::move(results)),
        sequence_(sequence) {}

  bool isCompleted() override { return Queue::get().query(node_); }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds = kNoTimeout) override {
    synchronize();
    return true;
  }
  void synchronize() override {
    auto& queue = Queue::get();
    queue.stream_wait(current_stream(current_device()), node_);
    stashed_.clear();
    if (blocking) queue.wait_for(node_, "barrier");
  }
  void blockCurrentStream() override { synchronize(); }
  Tensors result() override { return results_; }
  uint64_t getSequencenumber() const override { return sequence_; }
  bool blocking = false;

 private:
  NodeId node_;
  Tensors stashed_;  // as NCCL's stash, kept alive until `wait`
  Tensors results_;
  uint64_t sequence_;
};

Tensor flat_bytes(const Tensors& tensors) {
  Tensors parts;
  for (const auto& tensor : tensors) parts.push_back(tensor.contiguous().flatten().view(at::kByte));
  return at::cat(parts);
}

Tensor typed(const Tensor& bytes, const Tensor& like) {
  int64_t size = static_cast<int64_t>(like.element_size());
  return bytes.narrow(0, 0, bytes.numel() / size * size).view(like.scalar_type());
}

void write(const Tensor& output, const Tensor& values) { Tensor(output).copy_(values.view(output.sizes())); }

// The elements for this rank in a message of an all-to-all, which begins with the number for each rank.
Tensor elements_for(int64_t rank, int64_t world, const Tensor& message, const Tensor& like) {
  auto counts = message.narrow(0, 0, 8 * world).view(at::kLong);
  auto values = typed(message.narrow(0, 8 * world, message.numel() - 8 * world).clone(), like);
  return values.narrow(0, counts.narrow(0, 0, rank).sum().item<int64_t>(), counts[rank].item<int64_t>());
}

// Reduce the values of all ranks in rank order; 16-bit values are summed in FP32.
Tensor reduced(const Tensors& parts, const Tensor& like, c10d::ReduceOp op) {
  using Op = c10d::ReduceOp;
  Tensors values;
  for (const auto& part : parts) values.push_back(typed(part, like));
  auto stacked = at::stack(values);
  auto dtype = stacked.scalar_type();
  bool is_16_bit = dtype == at::kHalf || dtype == at::kBFloat16;
  switch (op) {
    case Op::MAX: return stacked.amax(0);
    case Op::MIN: return stacked.amin(0);
    case Op::PRODUCT: return stacked.prod(0, false, dtype);
    case Op::SUM: case Op::AVG: {
      auto sum = stacked.sum(0, false, is_16_bit ? at::kFloat : dtype);
      return (op == Op::AVG ? sum / static_cast<double>(parts.size()) : sum).to(dtype);
    }
    default: TORCH_CHECK(false, "the fake device does not support this reduction");
  }
}

// Gathers the bytes of every rank, in rank order. All collectives are based on it.
struct Gather {
  Tensors parts;

  void start(const Ref<Backend>& gloo, Tensor bytes, int64_t world, bool uneven) {
    own_ = std::move(bytes);
    if (world == 1) {
      parts = {own_};
      return;
    }
    if (!uneven) return gather(gloo, world);
    for (int64_t i = 0; i < world; i++) sizes_.push_back(at::empty({1}, at::kLong));
    std::vector<Tensors> received{sizes_};
    Tensors sent{at::tensor({own_.numel()}, at::kLong)};
    work_ = gloo->allgather(received, sent);
  }

  // Return whether the bytes of all ranks have arrived.
  bool advance(const Ref<Backend>& gloo) {
    if (!work_) return true;
    if (!work_->isCompleted()) return false;
    work_->wait();  // raises its error
    work_.reset();
    if (sizes_.empty()) return true;
    // Sizes differ between ranks: pad all to the largest.
    int64_t longest = 0;
    for (const auto& size : sizes_) longest = std::max(longest, size.item<int64_t>());
    auto padded = at::empty({(longest + 15) / 16 * 16}, at::kByte);
    padded.narrow(0, 0, own_.numel()).copy_(own_);
    own_ = padded;
    int64_t world = static_cast<int64_t>(sizes_.size());
    sizes_.clear();
    gather(gloo, world);
    return false;
  }

 private:
  void gather(const Ref<Backend>& gloo, int64_t world) {
    for (int64_t i = 0; i < world; i++) parts.push_back(at::empty_like(own_));
    std::vector<Tensors> received{parts};
    Tensors sent{own_};
    work_ = gloo->allgather(received, sent);
  }

  Tensor own_;
  Tensors sizes_;
  Ref<Work> work_;
};

class FakeNccl final : public Backend {
 public:
  FakeNccl(int rank, int size, Ref<Backend> gloo)
      : Backend(rank, size), gloo_(std::move(gloo)), stream_(-1) {
    if (size > 1) Queue::get().start_progress_thread();
  }

  const std::string getBackendName() const override { return "nccl"; }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { last_ = {}; }
  Ref<Work> endCoalescing() override { return last_; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  void setTimeout(std::chrono::milliseconds) override {}
  void abort() override {}
  void shutdown() override { Queue::get().drain(); }

  Ref<Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto op = options.reduceOp;
    return run("allreduce", c10d::OpType::ALLREDUCE, tensors, tensors, options.asyncOp,
               [op](const Tensors& parts, const Tensors& outputs) {
                 int64_t start = 0;
                 auto values = reduced(parts, outputs[0], op);
                 for (const auto& output : outputs) {
                   write(output, values.narrow(0, start, output.numel()));
                   start += output.numel();
                 }
               });
  }
  Ref<Work> allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    for (auto& tensor : tensors) {
      Tensors one{tensor};
      last_ = allreduce(one, options);
    }
    return last_;
  }
  Ref<Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    int64_t root = options.rootRank;
    return run("broadcast", c10d::OpType::BROADCAST, tensors, tensors, options.asyncOp,
               [root](const Tensors& parts, const Tensors& outputs) {
                 write(outputs[0], typed(parts[root], outputs[0]));
               });
  }
  Ref<Work> reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto op = options.reduceOp;
    bool is_root = options.rootRank == getRank();
    return run("reduce", c10d::OpType::REDUCE, tensors, tensors, options.asyncOp,
               [op, is_root](const Tensors& parts, const Tensors& outputs) {
                 if (is_root) write(outputs[0], reduced(parts, outputs[0], op));
               });
  }
  Ref<Work> allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return run("allgather", c10d::OpType::ALLGATHER, outputs[0], inputs, options.asyncOp, write_each);
  }
  Ref<Work> _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    return run("allgather", c10d::OpType::_ALLGATHER_BASE, {output}, {input}, options.asyncOp,
               [](const Tensors& parts, const Tensors& outputs) {
                 write(outputs[0], typed(at::cat(parts), outputs[0]));
               });
  }
  Ref<Work> allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    for (size_t i = 0; i < outputs.size(); i++) last_ = _allgather_base(outputs[i], inputs[i], options);
    return last_;
  }
  Ref<Work> reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    return scatter_sum(outputs, inputs[0], options);
  }
  Ref<Work> _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return scatter_sum({output}, {input}, options);
  }
  Ref<Work> reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    for (size_t i = 0; i < outputs.size(); i++) last_ = _reduce_scatter_base(outputs[i], inputs[i], options);
    return last_;
  }
  Ref<Work> alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_splits,
                          std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override {
    // Every rank sends its splits with its rows, and receivers select their rows by them.
    int64_t world = getSize(), rank = getRank();
    auto splits = input_splits;
    if (splits.empty()) splits.assign(world, input.size(0) / world);
    int64_t row = input.size(0) == 0 ? 1 : input.numel() / input.size(0);
    for (auto& split : splits) split *= row;
    return run("alltoall", c10d::OpType::ALLTOALL_BASE, {output}, {input}, options.asyncOp,
               [world, rank](const Tensors& parts, const Tensors& outputs) {
                 Tensors received;
                 for (const auto& part : parts) received.push_back(elements_for(rank, world, part, outputs[0]));
                 write(outputs[0], at::cat(received));
               },
               at::tensor(splits, at::kLong));
  }
  Ref<Work> alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    int64_t world = getSize(), rank = getRank();
    std::vector<int64_t> splits;
    for (const auto& input : inputs) splits.push_back(input.numel());
    return run("alltoall", c10d::OpType::ALLTOALL, outputs, inputs, options.asyncOp,
               [world, rank](const Tensors& parts, const Tensors& outputs) {
                 for (size_t source = 0; source < parts.size(); source++) {
                   write(outputs[source], elements_for(rank, world, parts[source], outputs[0]));
                 }
               },
               at::tensor(splits, at::kLong));
  }
  Ref<Work> barrier(const c10d::BarrierOptions& options) override {
    Tensors one{new_element()};
    auto work = run("barrier", c10d::OpType::BARRIER, one, one, options.asyncOp,
                    [](const Tensors&, const Tensors&) {});
    static_cast<StreamWork*>(work.get())->blocking = true;
    return work;
  }
  Ref<Work> send(Tensors& tensors, int peer, int tag) override { return transfer(true, tensors[0], peer, tag); }
  Ref<Work> recv(Tensors& tensors, int peer, int tag) override { return transfer(false, tensors[0], peer, tag); }

 private:
  using Finish = std::function<void(const Tensors& parts, const Tensors& outputs)>;

  static void write_each(const Tensors& parts, const Tensors& outputs) {
    for (size_t i = 0; i < parts.size(); i++) write(outputs[i], typed(parts[i], outputs[i]));
  }

  Ref<Work> scatter_sum(Tensors outputs, Tensors inputs, const c10d::ReduceScatterOptions& options) {
    auto op = options.reduceOp;
    int64_t rank = getRank();
    return run("reduce_scatter", c10d::OpType::REDUCE_SCATTER, outputs, inputs, options.asyncOp,
               [op, rank](const Tensors& parts, const Tensors& results) {
                 int64_t count = results[0].numel();
                 write(results[0], reduced(parts, results[0], op).narrow(0, rank * count, count));
               });
  }

  static Tensor new_element() {
    return at::empty({1}, at::TensorOptions().dtype(at::kFloat).device(at::kCUDA, current_device()));
  }

  // The communicator's stream, which waits for the current stream. A blocking call uses the current one.
  int stream_for(bool async) {
    int caller = current_stream(current_device());
    if (!async) return caller;
    auto& queue = Queue::get();
    if (stream_ < 0) {
      c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
      stream_ = stream_number(guard.getNewStream(cuda(current_device())));
    }
    for (NodeId id : queue.tail(caller)) queue.stream_wait(stream_, id);
    return stream_;
  }

  Ref<Work> append(c10d::OpType type, Node node, bool async, Tensors stashed, Tensors results) {
    auto& queue = Queue::get();
    std::lock_guard lock(queue.mutex);
    queue.counters.launches["c10d::" + node.name]++;
    int stream = stream_for(async);
    if (previous_ != kNone) node.follows.push_back(previous_);
    previous_ = queue.add(stream, std::move(node));
    sequence_++;
    last_ = c10::make_intrusive<StreamWork>(type, previous_, std::move(stashed), std::move(results), sequence_);
    return last_;
  }

  Ref<Work> run(const std::string& name, c10d::OpType type, Tensors outputs, Tensors inputs, bool async,
                Finish finish, Tensor header = {}) {
    at::AutoDispatchBelowADInplaceOrView below;
    Node node;
    node.name = name;
    Tensors to, from;
    for (const auto& output : outputs) to.push_back(alias(output, node, true));
    for (const auto& input : inputs) from.push_back(alias(input, node, false));
    auto gloo = gloo_;
    int64_t world = getSize();
    node.observed = [from] {
      uint64_t hash = 0;
      for (const auto& tensor : from) hash = hash_of(tensor, hash);
      return hash;
    };
    auto gather = std::make_shared<Gather>();
    node.run = [=] {
      Tensors sent = from;
      if (header.defined()) sent.insert(sent.begin(), header);
      gather->start(gloo, flat_bytes(sent), world, header.defined());
    };
    node.finished = [=] {
      if (!gather->advance(gloo)) return false;
      finish(gather->parts, to);
      return true;
    };
    // Replays reuse the data that the other ranks sent in the recording.
    node.rerun = [=] { finish(gather->parts, to); };
    Tensors stashed = outputs;
    stashed.insert(stashed.end(), inputs.begin(), inputs.end());
    return append(type, std::move(node), async, async ? stashed : Tensors{}, outputs);
  }

  Ref<Work> transfer(bool send, const Tensor& tensor, int peer, int tag) {
    at::AutoDispatchBelowADInplaceOrView below;
    Node node;
    node.name = send ? "send" : "recv";
    auto values = alias(tensor, node, !send);
    auto buffer = at::empty(values.sizes(), values.options());
    // Gloo's send and recv make progress only inside of `wait`.
    auto pending = std::make_shared<std::future<void>>();
    auto gloo = gloo_;
    if (send) {
      node.observed = [=] { return hash_of(values); };
    }
    node.run = [=] {
      if (send) Tensor(buffer).copy_(values);
      Tensors tensors{buffer};
      auto work = send ? gloo->send(tensors, peer, tag) : gloo->recv(tensors, peer, tag);
      *pending = std::async(std::launch::async, [work] { work->wait(); });
    };
    auto complete = [=] {
      if (!send) Tensor(values).copy_(buffer);
    };
    node.finished = [=] {
      if (pending->wait_for(std::chrono::seconds(0)) != std::future_status::ready) return false;
      pending->get();
      complete();
      return true;
    };
    node.rerun = complete;
    // Each pair of ranks has a separate communicator.
    NodeId before = previous_;
    previous_ = kNone;
    auto work = append(send ? c10d::OpType::SEND : c10d::OpType::RECV, std::move(node), true, {tensor}, {tensor});
    previous_ = before;
    return work;
  }

  Ref<Backend> gloo_;
  int stream_;
  NodeId previous_ = kNone;
  uint64_t sequence_ = 0;
  Ref<Work> last_;
};

}  // namespace

}  // namespace fake_cuda

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("create", [](int rank, int size, c10::intrusive_ptr<c10d::Backend> gloo) {
    return c10::intrusive_ptr<c10d::Backend>(
        c10::make_intrusive<fake_cuda::FakeNccl>(rank, size, std::move(gloo)));
  });
}
