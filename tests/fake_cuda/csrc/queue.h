// The work of fake devices: a graph of operations, executed late, and replayed in other legal orders.
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
// Operations that no stream orders: markers of the host, and memory handed to its next user.
constexpr int kUnordered = -1;

struct Memory;

// Bytes of a device that an operation reads or writes; it keeps them alive.
struct Access {
  std::shared_ptr<Memory> memory;
  const char* begin;
  const char* end;
  bool writes;
};

// One operation. It may run once all operations that it follows have run.
struct Node {
  int stream = kUnordered;
  std::string name;
  std::vector<NodeId> follows;
  std::vector<Access> touches;
  std::function<void()> run;
  // Collectives only: `run` starts them, and they are done once this is true.
  std::function<bool()> finished;
  // What a replay runs in place of `run`; empty: the same.
  std::function<void()> rerun;
  // A hash of what leaves the device: values that the host reads, and inputs of collectives.
  std::function<uint64_t()> observed;
  bool started = false;
  bool done = false;
  double end = 0;  // seconds, on a clock on which every operation takes its cost
  uint64_t live_hash = 0;
  uint64_t ordered_hash = 0;
};

// Counts since the last call of take_counters().
struct Counters {
  std::map<std::string, int64_t> launches;
  std::map<std::string, int64_t> waits;  // by cause; the host stood still for each
  int64_t reads = 0;                     // values that the host read and waited for
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

  // Taken by every public function; held while operations run.
  Mutex mutex;
  Counters counters;

  // Append an operation behind the last one of its stream and all that the stream waits for.
  NodeId add(int stream, Node node, double seconds = 1e-6);
  NodeId last_of(int stream);
  // What an operation added to the stream now would follow.
  std::vector<NodeId> tail(int stream);
  std::vector<int> streams();
  void let_stream_wait(int stream, NodeId node);

  // The host waits: run what the operation needs. Operations added later follow it.
  void wait_for(NodeId node, const std::string& cause);
  void wait_for_streams(const std::vector<int>& streams, const std::string& cause);
  bool query(NodeId node);
  double end_of(NodeId node);
  // Run everything. No wait of the host: order does not change.
  void drain();
  // Run ready operations from a thread of its own: other ranks wait for this one's collectives.
  void start_draining();

  // `eagerness` in [0, 1]: how often an operation runs before anybody needs it.
  void set_schedule(bool immediate, double eagerness, uint64_t seed);

  void begin_recording();
  void end_recording();
  bool recording() const { return recording_; }
  int64_t recorded() const { return static_cast<int64_t>(nodes_.size()); }
  // Run what was recorded in another legal order; returns what differed, or an empty string.
  // Seed 0 is the order of the program. An order that computes the same as an earlier one is not run.
  std::string replay(uint64_t seed);
  void finish_replays();

  // Ranges of the host's memory that pending copies will write.
  struct HostWrite {
    NodeId node;
    const void* data;
    size_t size;
  };
  std::vector<HostWrite> host_writes;
  bool writes_host(const void* data, size_t size);

  std::string take_error();
  void fail(const std::string& message);

 private:
  Node& at(NodeId id) { return nodes_[id - base_]; }
  bool is_done(NodeId id) { return id < base_ || at(id).done; }
  bool ready(const Node& node);
  bool advance(Node& node);
  void run_ancestors(NodeId id, std::unique_lock<Mutex>& lock);
  void run_some();
  void hand_on_memory();
  void forget_done();
  void host_follows(const std::vector<NodeId>& waited);
  std::vector<size_t> order(uint64_t seed);
  uint64_t hash_of_accesses(const std::vector<size_t>& order);
  std::string first_exchange(const std::vector<size_t>& order);

  std::vector<Node> nodes_;
  NodeId base_ = 0;
  size_t first_open_ = 0;  // all nodes before it are done
  std::map<int, NodeId> last_;
  std::map<int, std::vector<NodeId>> waits_;
  NodeId host_ = kNone;  // everything added later follows it
  std::vector<NodeId> unordered_;
  bool immediate_ = false;
  bool recording_ = false;
  bool draining_ = false;
  // Of the recording that is replayed.
  std::vector<std::vector<size_t>> followers_;
  std::vector<int> predecessors_;
  std::map<uint64_t, std::string> differences_;  // by hash of the order
  double eagerness_ = 0;
  std::mt19937_64 random_{1};
  std::string error_;
};

uint64_t hash_bytes(const void* data, size_t size, uint64_t seed = 0);
double now();

}  // namespace fake_cuda
