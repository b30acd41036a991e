// The functions that Python calls through ctypes: counters, schedules, recordings, memory.
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

void fake_cuda_set_schedule(uint64_t seed) { Queue::get().set_schedule(seed); }
void fake_cuda_begin_recording() { Queue::get().begin_recording(); }
void fake_cuda_end_recording() { Queue::get().end_recording(); }
int64_t fake_cuda_recorded() { return Queue::get().recorded(); }
const char* fake_cuda_replay(uint64_t seed) { return keep_until_next_call(Queue::get().replay(seed)); }
void fake_cuda_finish_replays() { Queue::get().finish_replays(); }
const char* fake_cuda_take_error() { return keep_until_next_call(Queue::get().take_error()); }

// torch.cuda._sleep.
void fake_cuda_sleep(double seconds) {
  fake_cuda::Node node;
  node.name = "sleep";
  Queue::get().add(fake_cuda::current_stream(fake_cuda::current_device()), std::move(node), seconds);
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

int fake_cuda_current_device() { return fake_cuda::current_device(); }
void fake_cuda_set_device(int device) { fake_cuda::set_device(device); }
}
