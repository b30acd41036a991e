// The operations of fake devices: a dependency graph, run lazily, and replayed in other legal orders.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

namespace fake_cuda {

using NodeId = int64_t;
constexpr NodeId kNone = -1;
// For operations on no stream: waits of the host, and reuse of freed blocks.
constexpr int kNoStream = -1;

struct Memory;

// A range of device memory that an operation reads or writes; it keeps the memory alive.
struct Access {
  std::shared_ptr<Memory> memory;
  const char* begin;
  const char* end;
  bool writes;
};

// One operation. It may run once all operations that it follows have run.
struct Node {
  int stream = kNoStream;
  std::string name;
  std::vector<NodeId> follows;
  std::vector<Access> touches;
  std::function<void()> run;
  // Collectives only: `run` starts the collective, and this polls whether it has completed.
  std::function<bool()> finished;
  // Replays call this instead of `run`, if it is set.
  std::function<void()> rerun;
  // Returns the hash of the values that leave the device: read by the host, or sent by a collective.
  std::function<uint64_t()> observed;
  bool started = false;
  bool done = false;
  double end = 0;  // in seconds of the device's simulated clock
  uint64_t live_hash = 0;
  uint64_t program_order_hash = 0;
};

// Counts since the last call of take_counters().
struct Counters {
  std::map<std::string, int64_t> launches;
  std::map<std::string, int64_t> waits;  // of the host, by cause
  int64_t reads = 0;                     // blocking reads of device values by the host
  int64_t pageable_copies = 0;           // non-blocking copies from memory that is not pinned
  int64_t allocations = 0;
};

// A recursive mutex. A thread that waits for it gives Python's lock away: the one that has this mutex may
// need Python's, to free a tensor of NumPy or for gloo's flight recorder.
class Mutex {
 public:
  void lock();
  void unlock() { mutex_.unlock(); }

 private:
  std::recursive_mutex mutex_;
};

class Queue {
 public:
  static Queue& get();

  // Locked by every public function, and while operations run.
  Mutex mutex;
  Counters counters;

  // Append an operation to a stream; it depends on the last one and on what the stream waits for.
  NodeId add(int stream, Node node, double seconds = 1e-6);
  NodeId last_of(int stream);
  // The dependencies of the next operation of the stream.
  std::vector<NodeId> tail(int stream);
  std::vector<int> streams();
  void stream_wait(int stream, NodeId node);

  // Let the host wait: run the operation and its dependencies, and raise the first error of an operation.
  // Later operations depend on it.
  void wait_for(NodeId node, const std::string& cause);
  void wait_for_streams(const std::vector<int>& streams, const std::string& cause);
  bool query(NodeId node);
  double end_time(NodeId node);
  // Run everything, but add no dependency as a wait of the host would.
  void drain();
  // Run ready operations in a separate thread: other ranks wait for collectives of this one.
  void start_progress_thread();

  // Run everything, and seed the random choices of what runs when.
  void set_schedule(uint64_t seed);

  void begin_recording();
  void end_recording();
  bool recording() const { return recording_; }
  int64_t recorded() const { return static_cast<int64_t>(nodes_.size()); }
  // Run what was recorded in another legal order; returns what differed, or an empty string.
  // Seed 0 is the order of the program. An order that computes the same as an earlier one is not run.
  std::string replay(uint64_t seed);
  void finish_replays();

  // Ranges of host memory to which pending copies write.
  void add_host_write(NodeId node, const void* data, size_t size);
  bool writes_host(const void* data, size_t size);

  std::string take_error();
  void fail(const std::string& message);

 private:
  struct HostWrite {
    NodeId node;
    const void* data;
    size_t size;
  };

  Node& at(NodeId id) { return nodes_[id - base_]; }
  bool is_done(NodeId id) { return id < base_ || at(id).done; }
  bool ready(const Node& node);
  bool advance(Node& node);
  void run_ancestors(NodeId id, std::unique_lock<Mutex>& lock);
  void run_some_ready();
  void run_block_reuse();
  void remove_completed();
  void wait(const std::vector<NodeId>& waited, const std::string& cause, std::unique_lock<Mutex>& lock);
  void add_host_wait(const std::vector<NodeId>& waited);
  std::vector<size_t> order(uint64_t seed);
  uint64_t hash_of_accesses(const std::vector<size_t>& order);
  std::string first_race(const std::vector<size_t>& order);

  std::vector<Node> nodes_;
  NodeId base_ = 0;
  size_t first_pending_ = 0;  // all nodes before it are done
  std::map<int, NodeId> last_;
  std::map<int, std::vector<NodeId>> waits_;
  NodeId host_ = kNone;  // the last wait of the host; all later operations depend on it
  std::vector<NodeId> unordered_;
  std::vector<HostWrite> host_writes_;
  bool recording_ = false;
  bool has_progress_thread_ = false;
  // Of the recording that is replayed.
  std::vector<std::vector<size_t>> followers_;
  std::vector<int> predecessors_;
  std::map<uint64_t, std::string> differences_;  // by hash of the order
  std::mt19937_64 random_{1};
  std::string error_;
};

uint64_t hash_bytes(const void* data, size_t size, uint64_t seed = 0);

}  // namespace fake_cuda
