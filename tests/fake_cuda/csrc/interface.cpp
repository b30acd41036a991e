// The functions that Python calls through ctypes: counters, schedules, recordings, streams by number.
#include <cstring>
#include <sstream>

#include "device.h"
#include "memory.h"
#include "queue.h"

using fake_cuda::Queue;

namespace {

// The result is valid until the next call in the same thread.
const char* keep_until_next_call(std::string text) {
  thread_local std::string last;
  last = std::move(text);
  return last.c_str();
}

void write(std::ostream& out, const std::map<std::string, int64_t>& counts) {
  out << "{";
  const char* separator = "";
  for (const auto& [name, count] : counts) {
    out << separator << '"' << name << "\": " << count;
    separator = ", ";
  }
  out << "}";
}

}  // namespace

extern "C" {

const char* fake_cuda_take_counters() {
  auto& queue = Queue::get();
  std::lock_guard lock(queue.mutex);
  std::ostringstream out;
  out << "{\"launches\": ";
  write(out, queue.counters.launches);
  out << ", \"waits\": ";
  write(out, queue.counters.waits);
  out << ", \"reads\": " << queue.counters.reads
      << ", \"pageable_copies\": " << queue.counters.pageable_copies
      << ", \"allocations\": " << queue.counters.allocations << "}";
  queue.counters = {};
  return keep_until_next_call(out.str());
}

void fake_cuda_set_schedule(int immediate, double eagerness, uint64_t seed) {
  Queue::get().set_schedule(immediate != 0, eagerness, seed);
}
void fake_cuda_start_progress_thread() { Queue::get().start_progress_thread(); }
void fake_cuda_drain() { Queue::get().drain(); }
void fake_cuda_begin_recording() { Queue::get().begin_recording(); }
void fake_cuda_end_recording() { Queue::get().end_recording(); }
int64_t fake_cuda_recorded() { return Queue::get().recorded(); }
const char* fake_cuda_replay(uint64_t seed) { return keep_until_next_call(Queue::get().replay(seed)); }
void fake_cuda_finish_replays() { Queue::get().finish_replays(); }
const char* fake_cuda_take_error() { return keep_until_next_call(Queue::get().take_error()); }

// Streams of collectives.
int fake_cuda_stream_number(int64_t id, int device) { return fake_cuda::stream_number(
    c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::DeviceType::CUDA, device), id)); }
void fake_cuda_stream_wait(int stream, int64_t node) { Queue::get().stream_wait(stream, node); }
int64_t fake_cuda_last_of(int stream) {
  fake_cuda::Node marker;
  marker.name = "event";
  return Queue::get().add(stream, std::move(marker), 0);
}
int fake_cuda_query(int64_t node) { return Queue::get().query(node); }
void fake_cuda_wait_for(int64_t node, const char* cause) { Queue::get().wait_for(node, cause); }
// torch.cuda._sleep.
void fake_cuda_sleep(int stream, double seconds) {
  fake_cuda::Node node;
  node.name = "sleep";
  Queue::get().add(stream, std::move(node), seconds);
}

void fake_cuda_register_host_memory(void* data, int64_t size) {
  fake_cuda::register_host_memory(data, static_cast<size_t>(size));
}
void fake_cuda_unregister_host_memory(void* data) { fake_cuda::unregister_host_memory(data); }

int64_t fake_cuda_allocated(int device) { return fake_cuda::statistics(device).allocated; }
int64_t fake_cuda_peak(int device) { return fake_cuda::statistics(device).peak; }
int64_t fake_cuda_allocations(int device) { return fake_cuda::statistics(device).allocations; }
void fake_cuda_reset_peak(int device) {
  auto& counts = fake_cuda::statistics(device);
  counts.peak = counts.allocated;
}
}

extern "C" {
int fake_cuda_current_device() { return fake_cuda::current_device(); }
void fake_cuda_set_device(int device) { fake_cuda::set_device(device); }
}
