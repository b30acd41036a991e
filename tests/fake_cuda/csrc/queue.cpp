#include <Python.h>

#include "queue.h"

#include <ATen/ThreadLocalState.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <set>
#include <thread>
#include <unordered_map>

#include "memory.h"

namespace fake_cuda {

namespace {

// Operations ignore the dispatch modes and autocast of the thread that runs them.
const at::ThreadLocalState& default_thread_state() {
  static const at::ThreadLocalState state;
  return state;
}
[[maybe_unused]] const at::ThreadLocalState& created_at_load = default_thread_state();

class DefaultThreadState {
  at::ThreadLocalStateGuard state_{default_thread_state()};
  at::AutoDispatchBelowADInplaceOrView below_;
};

// This many orders run even if no two accesses to the same memory have changed places: the accesses
// of an operation are taken from its schema, which could be wrong.
constexpr uint64_t kAlwaysRun = 20;

class WithoutPython {
 public:
  WithoutPython() : state_(Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~WithoutPython() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }

 private:
  PyThreadState* state_;
};

void sleep_briefly() {
  WithoutPython guard;
  std::this_thread::sleep_for(std::chrono::microseconds(100));
}

}  // namespace

void Mutex::lock() {
  if (mutex_.try_lock()) return;
  WithoutPython guard;
  mutex_.lock();
}

// Waits of the host end at once, but take their time on the simulated clock.
static double skipped_seconds = 0;

static double now() {
  using namespace std::chrono;
  return duration<double>(steady_clock::now().time_since_epoch()).count() + skipped_seconds;
}

uint64_t hash_bytes(const void* data, size_t size, uint64_t seed) {
  const char* bytes = static_cast<const char*>(data);
  uint64_t hash = seed ^ (size * 0x9E3779B97F4A7C15ull);
  while (size > 0) {
    uint64_t word = 0;
    size_t part = std::min<size_t>(size, 8);
    std::memcpy(&word, bytes, part);
    hash = (hash ^ word) * 0xD6E8FEB86659FD93ull;
    hash ^= hash >> 32;
    bytes += part;
    size -= part;
  }
  return hash;
}

Queue& Queue::get() {
  static Queue* queue = new Queue;  // outlives tensors that are freed at exit
  return *queue;
}

NodeId Queue::add(int stream, Node node, double seconds) {
  std::lock_guard lock(mutex);
  node.stream = stream;
  auto& follows = node.follows;
  if (host_ != kNone) follows.push_back(host_);
  if (stream != kNoStream) {
    auto before = tail(stream);
    follows.insert(follows.end(), before.begin(), before.end());
    waits_[stream].clear();
  }
  double start = now();
  for (NodeId id : follows) {
    if (id >= base_) start = std::max(start, at(id).end);
  }
  node.end = start + seconds;
  if (!recording_) remove_completed();
  follows.erase(
      std::remove_if(follows.begin(), follows.end(), [&](NodeId id) { return id < base_; }),
      follows.end());
  NodeId id = base_ + static_cast<NodeId>(nodes_.size());
  nodes_.push_back(std::move(node));
  if (stream != kNoStream) {
    last_[stream] = id;
  } else {
    unordered_.push_back(id);
  }
  return id;
}

NodeId Queue::last_of(int stream) {
  auto found = last_.find(stream);
  return found == last_.end() ? kNone : found->second;
}

std::vector<NodeId> Queue::tail(int stream) {
  std::vector<NodeId> result = waits_[stream];
  if (NodeId last = last_of(stream); last != kNone) result.push_back(last);
  return result;
}

std::vector<int> Queue::streams() {
  std::lock_guard lock(mutex);
  std::set<int> result;
  for (auto& [stream, node] : last_) result.insert(stream);
  for (auto& [stream, nodes] : waits_) result.insert(stream);
  return {result.begin(), result.end()};
}

void Queue::stream_wait(int stream, NodeId node) {
  std::lock_guard lock(mutex);
  if (node != kNone) waits_[stream].push_back(node);
}

bool Queue::ready(const Node& node) {
  return std::all_of(node.follows.begin(), node.follows.end(), [&](NodeId id) { return is_done(id); });
}

// Run or poll an operation whose dependencies are done; returns whether it is done.
bool Queue::advance(Node& node) {
  if (node.done) return true;
  if (!node.started) {
    node.started = true;
    try {
      DefaultThreadState guard;
      if (node.observed) node.live_hash = node.observed();
      if (node.run) node.run();
    } catch (const c10::IndexError& error) {
      fail("device-side assert triggered in " + node.name + ": " + error.what_without_backtrace());
    } catch (const std::exception& error) {
      fail(node.name + ": " + error.what());
    }
  }
  if (node.finished) {
    try {
      DefaultThreadState guard;
      node.done = node.finished();
    } catch (const std::exception& error) {
      fail(node.name + ": " + error.what());
      node.done = true;
    }
  } else {
    node.done = true;
  }
  if (node.done && !recording_) {
    node.run = nullptr;
    node.finished = nullptr;
    node.rerun = nullptr;
    node.observed = nullptr;
    node.touches.clear();
  }
  return node.done;
}

void Queue::run_ancestors(NodeId id, std::unique_lock<Mutex>& lock) {
  if (id == kNone || is_done(id)) return;
  std::vector<NodeId> wanted{id};
  std::vector<NodeId> stack{id};
  while (first_pending_ < nodes_.size() && nodes_[first_pending_].done) first_pending_++;
  NodeId open = base_ + static_cast<NodeId>(first_pending_);
  std::vector<bool> seen(nodes_.size() - first_pending_);
  seen[id - open] = true;
  while (!stack.empty()) {
    NodeId next = stack.back();
    stack.pop_back();
    for (NodeId before : at(next).follows) {
      if (is_done(before) || seen[before - open]) continue;
      seen[before - open] = true;
      wanted.push_back(before);
      stack.push_back(before);
    }
  }
  std::sort(wanted.begin(), wanted.end());
  for (NodeId next : wanted) {
    while (!is_done(next)) {
      if (ready(at(next)) && advance(at(next))) break;
      // This collective may need that other streams start theirs.
      run_some_ready();
      lock.unlock();
      sleep_briefly();
      lock.lock();
    }
  }
}

// Run ready operations of a few streams, chosen at random.
void Queue::run_some_ready() {
  std::vector<NodeId> heads;
  std::set<int> blocked;
  while (first_pending_ < nodes_.size() && nodes_[first_pending_].done) first_pending_++;
  for (size_t i = first_pending_; i < nodes_.size(); i++) {
    Node& node = nodes_[i];
    if (node.done) continue;
    if (node.stream != kNoStream && !blocked.insert(node.stream).second) continue;
    if (ready(node)) heads.push_back(base_ + static_cast<NodeId>(i));
  }
  std::shuffle(heads.begin(), heads.end(), random_);
  size_t many = heads.empty() ? 0 : 1 + random_() % heads.size();
  for (size_t i = 0; i < heads.size(); i++) {
    // Collectives are always polled: other ranks wait for them.
    if (i < many || at(heads[i]).finished) advance(at(heads[i]));
  }
}

// Reuse each freed block now or later, at random.
void Queue::run_block_reuse() {
  std::vector<NodeId> kept;
  for (NodeId id : unordered_) {
    if (is_done(id)) continue;
    if (random_() % 2 == 0 && ready(at(id))) {
      advance(at(id));
    } else {
      kept.push_back(id);
    }
  }
  unordered_ = std::move(kept);
}

void Queue::remove_completed() {
  size_t done = 0;
  while (done < nodes_.size() && nodes_[done].done) done++;
  if (done < 256 && done != nodes_.size()) return;
  nodes_.erase(nodes_.begin(), nodes_.begin() + done);
  base_ += static_cast<NodeId>(done);
  first_pending_ -= std::min(first_pending_, done);
  unordered_.erase(
      std::remove_if(unordered_.begin(), unordered_.end(), [&](NodeId id) { return is_done(id); }),
      unordered_.end());
}

void Queue::add_host_wait(const std::vector<NodeId>& waited) {
  Node marker;
  marker.name = "host waits";
  marker.follows = waited;
  marker.done = true;
  for (NodeId id : waited) skipped_seconds += std::max(end_time(id) - now(), 0.0);
  host_ = add(kNoStream, std::move(marker), 0);
}

void Queue::wait(const std::vector<NodeId>& waited, const std::string& cause, std::unique_lock<Mutex>& lock) {
  counters.waits[cause]++;
  for (NodeId id : waited) run_ancestors(id, lock);
  if (!waited.empty()) {
    run_block_reuse();
    add_host_wait(waited);
  }
  TORCH_CHECK(error_.empty(), "CUDA error: ", std::exchange(error_, {}));
}

void Queue::wait_for(NodeId node, const std::string& cause) {
  std::unique_lock lock(mutex);
  std::vector<NodeId> waited;
  if (node != kNone) waited.push_back(node);
  wait(waited, cause, lock);
}

void Queue::wait_for_streams(const std::vector<int>& streams, const std::string& cause) {
  std::unique_lock lock(mutex);
  std::vector<NodeId> waited;
  for (int stream : streams) {
    auto before = tail(stream);
    waited.insert(waited.end(), before.begin(), before.end());
  }
  wait(waited, cause, lock);
}

bool Queue::query(NodeId node) {
  std::unique_lock lock(mutex);
  if (node == kNone) return true;
  // A host that polls gets its answer after a few polls, and not before the device's clock allows it.
  if (!is_done(node) && at(node).end <= now() && random_() % 2 == 0) {
    if (has_progress_thread_) {
      run_some_ready();
    } else {
      run_ancestors(node, lock);
    }
  }
  if (!is_done(node)) return false;
  add_host_wait({node});
  return true;
}

double Queue::end_time(NodeId node) {
  std::lock_guard lock(mutex);
  return node == kNone || node < base_ ? 0 : at(node).end;
}

void Queue::drain() {
  std::unique_lock lock(mutex);
  for (size_t i = first_pending_; i < nodes_.size(); i++) {
    run_ancestors(base_ + static_cast<NodeId>(i), lock);
  }
}

void Queue::start_progress_thread() {
  std::lock_guard lock(mutex);
  if (has_progress_thread_) return;
  has_progress_thread_ = true;
  std::thread([this] {
    std::mt19937_64 random{7};
    while (true) {
      {
        std::lock_guard lock(mutex);
        run_some_ready();
      }
      std::this_thread::sleep_for(std::chrono::microseconds(50 + random() % 500));
    }
  }).detach();
}

void Queue::set_schedule(uint64_t seed) {
  drain();
  std::lock_guard lock(mutex);
  random_.seed(seed);
}

void Queue::add_host_write(NodeId node, const void* data, size_t size) {
  std::lock_guard lock(mutex);
  host_writes_.push_back({node, data, size});
}

bool Queue::writes_host(const void* data, size_t size) {
  std::lock_guard lock(mutex);
  host_writes_.erase(std::remove_if(host_writes_.begin(), host_writes_.end(),
                                    [&](const HostWrite& write) { return is_done(write.node); }),
                     host_writes_.end());
  auto first = static_cast<const char*>(data);
  return std::any_of(host_writes_.begin(), host_writes_.end(), [&](const HostWrite& write) {
    auto other = static_cast<const char*>(write.data);
    return other < first + size && first < other + write.size;
  });
}

void Queue::fail(const std::string& message) {
  std::lock_guard lock(mutex);
  if (error_.empty()) error_ = message;
}

std::string Queue::take_error() {
  std::lock_guard lock(mutex);
  return std::exchange(error_, {});
}

void Queue::begin_recording() {
  drain();
  std::lock_guard lock(mutex);
  base_ += static_cast<NodeId>(nodes_.size());
  nodes_.clear();
  first_pending_ = 0;
  unordered_.clear();
  host_ = kNone;
  recording_ = true;
  save_memory_before();
}

void Queue::end_recording() {
  drain();
  std::lock_guard lock(mutex);
  recording_ = false;
  save_memory_after();
}

// A legal order of the recorded operations. Streams have random priorities, which change at a few
// random places (probabilistic concurrency testing, Burckhardt et al., ASPLOS 2010).
std::vector<size_t> Queue::order(uint64_t seed) {
  size_t count = nodes_.size();
  std::vector<size_t> result;
  result.reserve(count);
  if (seed == 0) {
    for (size_t i = 0; i < count; i++) result.push_back(i);
    return result;
  }
  std::mt19937_64 random(seed);
  std::map<int, double> priority;
  std::uniform_real_distribution<> uniform(0, 1);
  if (followers_.empty()) {
    followers_.resize(count);
    predecessors_.resize(count);
    for (size_t i = 0; i < count; i++) {
      for (NodeId id : nodes_[i].follows) {
        if (id < base_) continue;
        predecessors_[i]++;
        followers_[id - base_].push_back(i);
      }
    }
  }
  auto missing = predecessors_;
  for (const auto& node : nodes_) priority.emplace(node.stream, 0);
  for (auto& [stream, value] : priority) value = uniform(random);
  std::set<size_t> changes;
  for (uint64_t i = 0, many = random() % 4; i < many; i++) changes.insert(random() % (count + 1));
  // Each freed block is reused as early or as late as possible, at random.
  double reused_early = uniform(random);
  std::map<std::pair<double, size_t>, size_t> ready;
  auto add = [&](size_t i) {
    double rank = priority[nodes_[i].stream];
    if (nodes_[i].stream == kNoStream) rank = uniform(random) < reused_early ? 2 : -1;
    ready[{-rank, i}] = i;
  };
  for (size_t i = 0; i < count; i++) {
    if (missing[i] == 0) add(i);
  }
  double lowest = 0;
  while (!ready.empty()) {
    size_t next = ready.begin()->second;
    ready.erase(ready.begin());
    if (changes.count(result.size()) != 0 && nodes_[next].stream != kNoStream) {
      changes.erase(result.size());
      priority[nodes_[next].stream] = lowest -= 1e-3;
      add(next);
      continue;
    }
    result.push_back(next);
    for (size_t i : followers_[next]) {
      if (--missing[i] == 0) add(i);
    }
  }
  return result;
}

// Orders with the same hash compute the same: each memory sees the same writes, and the same reads in
// between.
uint64_t Queue::hash_of_accesses(const std::vector<size_t>& order) {
  struct Past {
    uint64_t writes = 0;
    uint64_t reads = 0;  // since the last write
  };
  std::unordered_map<Memory*, Past> memories;
  for (size_t i : order) {
    uint64_t number = hash_bytes(&i, sizeof i);
    for (const auto& access : nodes_[i].touches) {
      Past& past = memories[access.memory.get()];
      if (access.writes) {
        uint64_t parts[] = {past.writes, past.reads, number};
        past = {hash_bytes(parts, sizeof parts), 0};
      } else {
        past.reads += number;
      }
    }
  }
  uint64_t sum = 0;
  for (const auto& [memory, past] : memories) {
    uint64_t parts[] = {reinterpret_cast<uint64_t>(memory), past.writes, past.reads};
    sum += hash_bytes(parts, sizeof parts);
  }
  return sum;
}

std::string Queue::replay(uint64_t seed) {
  std::lock_guard lock(mutex);
  auto schedule = order(seed);
  uint64_t hash_of_order = hash_of_accesses(schedule);
  auto earlier = differences_.find(hash_of_order);
  if (earlier != differences_.end() && seed > kAlwaysRun) return earlier->second;
  restore_memory_before();
  DefaultThreadState guard;
  std::string difference;
  for (size_t i : schedule) {
    Node& node = nodes_[i];
    uint64_t hash = node.observed ? node.observed() : 0;
    try {
      if (node.rerun) {
        node.rerun();
      } else if (node.run) {
        node.run();
      }
    } catch (const std::exception& error) {
      // The recording has raised it already; in other orders, it may be caused by poisoned memory.
      if (difference.empty() && seed != 0) difference = node.name + " raised " + error.what();
    }
    if (seed == 0) node.program_order_hash = hash;
    uint64_t expected = seed == 0 ? node.live_hash : node.program_order_hash;
    if (hash != expected && difference.empty()) {
      difference = node.name + " (operation " + std::to_string(i) + ", stream " +
          std::to_string(node.stream) + ") has a different value";
    }
  }
  if (difference.empty()) difference = first_difference();
  if (!difference.empty()) difference += first_race(schedule);
  return differences_[hash_of_order] = difference;
}

// The first race: two operations that access the same memory, in the opposite order.
std::string Queue::first_race(const std::vector<size_t>& order) {
  std::vector<size_t> place(nodes_.size());
  for (size_t i = 0; i < order.size(); i++) place[order[i]] = i;
  struct NodeAccess {
    size_t node;
    const Access* access;
  };
  std::map<Memory*, std::vector<NodeAccess>> touches;
  for (size_t i = 0; i < nodes_.size(); i++) {
    for (const auto& access : nodes_[i].touches) touches[access.memory.get()].push_back({i, &access});
  }
  size_t first = nodes_.size();
  std::string found;
  auto name = [&](size_t i) {
    const Node& node = nodes_[i];
    std::string stream = node.stream == kNoStream ? "" : ", stream " + std::to_string(node.stream);
    return node.name + " (operation " + std::to_string(i) + stream + ")";
  };
  for (const auto& [memory, list] : touches) {
    for (size_t later = 0; later < list.size(); later++) {
      size_t second = list[later].node;
      if (place[second] >= first) continue;
      for (size_t earlier = 0; earlier < later; earlier++) {
        const Access &a = *list[earlier].access, &b = *list[later].access;
        size_t node = list[earlier].node;
        if (node == second || !(a.writes || b.writes) || a.begin >= b.end || b.begin >= a.end) continue;
        if (place[node] < place[second]) continue;
        first = place[second];
        found = ": " + name(second) + " ran before " + name(node) + ", which accesses the same memory";
      }
    }
  }
  return found;
}

void Queue::finish_replays() {
  std::lock_guard lock(mutex);
  restore_memory_after();
  discard_saved_memory();
  followers_.clear();
  predecessors_.clear();
  differences_.clear();
  base_ += static_cast<NodeId>(nodes_.size());
  nodes_.clear();
  first_pending_ = 0;
  unordered_.clear();
  host_ = kNone;
}

}  // namespace fake_cuda
