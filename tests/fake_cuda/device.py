"""The Python part of the fake devices; call `install` once, before anything uses CUDA.

The C++ library registers allocator, streams, operators and generators when it is loaded. This
module adds the functions of `torch._C` and the classes of `torch.cuda` that exist only in CUDA
builds.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import types
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

# Both check for a CUDA build when they are imported, so they are imported before `install`.
import torch._inductor.cudagraph_trees
import torch._meta_registrations

from tests.fake_cuda import library
from tests.fake_cuda.process_group import install_process_group

CAPABILITY = (9, 0)
MEMORY = 64 << 30  # bytes of each device
NCCL_VERSION = 2 << 32 | 28 << 16  # 2.28.0
SLEEP_HERTZ = 1e9  # cycles of torch.cuda._sleep in a second of the device's clock

_device: ctypes.CDLL


@dataclass(frozen=True)
class Counters:
    """Counts of operations and waits, summed over all devices.

    Attributes:
        launches: Launched operations, by operator; a foreach operator counts once.
        waits: Waits of the host, by cause.
        reads: Blocking reads of device values by the host; each is also one of `waits`.
        pageable_copies: Non-blocking copies to a device from memory that is not pinned.
        allocations: Allocations of device memory.
    """

    launches: Counter[str]
    waits: Counter[str]
    reads: int
    pageable_copies: int
    allocations: int


def take_counters() -> Counters:
    """Return the counters since the last call, and reset them."""
    values = json.loads(_device.fake_cuda_take_counters())
    launches, waits = Counter(values.pop("launches")), Counter(values.pop("waits"))
    return Counters(launches, waits, **values)


def set_schedule(*, seed: int) -> None:
    """Run all operations, and seed the random choices of when later ones run."""
    _device.fake_cuda_set_schedule(ctypes.c_uint64(seed))


class Recording:
    """The operations of a `recording()`, which can be replayed in other orders."""

    def __len__(self) -> int:
        return int(_device.fake_cuda_recorded())

    def replay(self, seed: int) -> str:
        """Run all operations again in another legal order; seed 0 is program order.

        Returns:
            The first bitwise difference from program order: in a value that the host read, in the
            input of a collective, or in memory at the end. Empty without a difference.
        """
        return str(_device.fake_cuda_replay(ctypes.c_uint64(seed)).decode())


@contextlib.contextmanager
def recording(check: Callable[[Recording], None]) -> Iterator[None]:
    """Record the operations of the block; call `check` with them if the block raises no error."""
    _device.fake_cuda_begin_recording()
    try:
        try:
            yield
        finally:
            _device.fake_cuda_end_recording()
        error = _device.fake_cuda_take_error().decode()
        if error:
            raise RuntimeError(f"CUDA error: {error}")
        check(Recording())
    finally:
        _device.fake_cuda_finish_replays()


def install(devices: int, loaded: ctypes.CDLL) -> None:
    """Make torch see `devices` CUDA devices; `loaded` is the result of `library.load`."""
    global _device
    _device = loaded
    for name in ("take_counters", "replay", "take_error"):
        getattr(_device, f"fake_cuda_{name}").restype = ctypes.c_char_p
    for name in ("allocated", "peak", "allocations", "recorded"):
        getattr(_device, f"fake_cuda_{name}").restype = ctypes.c_int64
    _device.fake_cuda_elapsed_time.restype = ctypes.c_double
    _device.fake_cuda_set_devices(devices)
    _device.fake_cuda_register("\n".join(_operators()).encode())
    _install_functions(devices)
    _install_classes()
    _install_storage()
    _install_generators(devices)
    install_process_group()


def _operators() -> list[str]:
    """Return the names of all operators that torch implements for CUDA, cached in `BUILD`."""
    cache = library.BUILD / f"operators-{torch.__version__}.txt"
    if not cache.exists():
        library.BUILD.mkdir(parents=True, exist_ok=True)
        cache.write_text("\n".join(_listed_operators()))
    return cache.read_text().split()


def _listed_operators() -> list[str]:
    from torchgen.gen import parse_native_yaml
    from torchgen.model import DispatchKey

    directory = library.torch_directory().parent / "torchgen/packaged/ATen/native"
    parsed = parse_native_yaml(
        str(directory / "native_functions.yaml"), str(directory / "tags.yaml")
    )
    listed = parsed.backend_indices[DispatchKey.CUDA].index
    names = {str(name) for name in listed}
    for function in parsed.native_functions:
        if function.structured_delegate in listed:
            names.add(str(function.func.name))
    return sorted(names)


def _stream(stream_id: int, device: int) -> tuple[int, int, int]:
    return stream_id, device, int(torch._C._autograd.DeviceType.CUDA)


def _install_functions(devices: int) -> None:
    def index(device: Any = None) -> int:
        if device is None or (isinstance(device, int) and device < 0):
            return int(_device.fake_cuda_current_device())
        return int(device)

    def set_device(device: int) -> None:
        if device >= devices:
            raise RuntimeError("CUDA error: invalid device ordinal")
        if device >= 0:
            _device.fake_cuda_set_device(device)

    def exchange_device(device: int) -> int:
        before = index()
        set_device(device)
        return before

    def current(device: int) -> tuple[int, int, int]:
        stream = torch._C._accelerator_getStream(index(device))
        return _stream(stream.stream_id, stream.device_index)

    def set_stream(stream_id: int, device_index: int, device_type: int) -> None:
        torch._C._accelerator_setStream(
            torch.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)
        )

    def synchronize() -> None:
        torch._C._accelerator_synchronizeDevice(index())

    def memory_stats(device: int) -> dict[str, Any]:
        now, peak = _device.fake_cuda_allocated(device), _device.fake_cuda_peak(device)
        counts = {"current": now, "peak": peak, "allocated": peak, "freed": peak - now}
        kinds = {"all": counts, "small_pool": counts, "large_pool": counts}
        allocations = _device.fake_cuda_allocations(device)
        pools = ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes")
        return {
            **dict.fromkeys(pools, kinds),
            "allocation": {"all": {"current": 0, "peak": 0, "allocated": allocations, "freed": 0}},
            "num_alloc_retries": 0,
            "num_ooms": 0,
            "num_sync_all_streams": 0,
        }

    def sleep(cycles: int) -> None:
        _device.fake_cuda_sleep(ctypes.c_double(cycles / SLEEP_HERTZ))

    def visible() -> int:
        return 0 if os.environ.get("CUDA_VISIBLE_DEVICES") == "" else devices

    functions: dict[str, Callable[..., Any]] = {
        "_cuda_init": lambda: None,
        "_cuda_getDeviceCount": visible,
        "_cuda_getDevice": index,
        "_cuda_setDevice": set_device,
        "_cuda_exchangeDevice": exchange_device,
        "_cuda_maybeExchangeDevice": exchange_device,
        "_cuda_getCurrentStream": current,
        "_cuda_getDefaultStream": lambda device: _stream(0, index(device)),
        "_cuda_setStream": set_stream,
        "_cuda_synchronize": synchronize,
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_cuda_isInBadFork": lambda: False,
        "_cuda_hasPrimaryContext": lambda device: True,
        "_cuda_getArchFlags": lambda: "sm_90",
        "_cuda_getCompiledVersion": lambda: 12080,
        "_cuda_memoryStats": memory_stats,
        "_cuda_resetPeakMemoryStats": lambda device: _device.fake_cuda_reset_peak(index(device)),
        "_cuda_resetAccumulatedMemoryStats": lambda device: None,
        "_cuda_emptyCache": lambda *pool: None,
        "_cuda_sleep": sleep,
        "_cuda_set_sync_debug_mode": _device.fake_cuda_set_sync_debug_mode,
        "_cuda_get_sync_debug_mode": _device.fake_cuda_get_sync_debug_mode,
        "_cuda_clearCublasWorkspaces": lambda: None,
        "_nccl_version": lambda: NCCL_VERSION,
        "_nccl_version_suffix": lambda: b"fake",
    }
    for name, function in functions.items():
        setattr(torch._C, name, function)
    torch._C._has_cuda = True  # type: ignore[attr-defined]
    torch.cuda._cudart = torch._C._cudart = _runtime()  # type: ignore[attr-defined,assignment]
    torch.cuda._exchange_device = exchange_device  # type: ignore[assignment]
    torch.cuda._maybe_exchange_device = exchange_device  # type: ignore[assignment]
    torch.cuda._get_device_properties = lambda device: _properties(index(device))  # type: ignore[attr-defined]
    torch.cuda.is_bf16_supported = lambda including_emulation=True: True
    torch.cuda._device_count_nvml = visible  # type: ignore[attr-defined]


def _properties(device: int) -> Any:
    return types.SimpleNamespace(
        name="Fake CUDA device",
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        total_memory=MEMORY,
        multi_processor_count=1,
        warp_size=32,
        uuid=f"fake-{device}",
        gcnArchName="",
        is_integrated=False,
        L2_cache_size=1 << 20,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=232448,
        shared_memory_per_multiprocessor=233472,
    )


def _runtime() -> types.SimpleNamespace:
    """Return the module that torch.cuda.cudart() returns."""

    def register(address: int, size: int, flags: int) -> int:
        _device.fake_cuda_register_host_memory(ctypes.c_void_p(int(address)), ctypes.c_int64(size))
        return 0

    def unregister(address: int) -> int:
        _device.fake_cuda_unregister_host_memory(ctypes.c_void_p(int(address)))
        return 0

    def memory_info(device: int) -> tuple[int, int]:
        return MEMORY - int(_device.fake_cuda_allocated(device)), MEMORY

    return types.SimpleNamespace(
        cudaHostRegister=register,
        cudaHostUnregister=unregister,
        cudaMemGetInfo=memory_info,
        cudaGetErrorString=lambda error: f"error {error}",
        cudaError=types.SimpleNamespace(success=0),
        cudaProfilerStart=lambda: 0,
        cudaProfilerStop=lambda: 0,
    )


def _install_classes() -> None:
    class Stream(torch.Stream):
        def __new__(cls, device: Any = None, priority: int = 0, **number: Any) -> Stream:
            if number:
                return super().__new__(cls, **number)  # type: ignore[no-any-return]
            device = torch.device(
                "cuda", torch.cuda._utils._get_device_index(device, optional=True)
            )
            return super().__new__(cls, device=device, priority=priority)  # type: ignore[no-any-return]

        @property
        def cuda_stream(self) -> int:
            return self.stream_id

        def record_event(self, event: Any = None) -> Any:
            event = Event() if event is None else event
            event.record(self)
            return event

        def wait_stream(self, stream: Any) -> None:
            self.wait_event(stream.record_event())

    class Event(torch.Event):
        def __new__(
            cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
        ) -> Event:
            return super().__new__(  # type: ignore[no-any-return]
                cls, device="cuda", enable_timing=enable_timing, blocking=blocking
            )

        def elapsed_time(self, end_event: Any) -> float:
            events = (ctypes.c_void_p(self.event_id), ctypes.c_void_p(end_event.event_id))
            return float(_device.fake_cuda_elapsed_time(*events))

    for module in (torch.cuda, torch.cuda.streams):
        module.Stream = Stream  # type: ignore[attr-defined,misc]
        module.Event = Event  # type: ignore[attr-defined,misc]


def _install_storage() -> None:
    resize = torch.UntypedStorage.resize_

    def resize_(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        if self.device.type != "cuda":
            resize(self, size)
        else:
            _device.fake_cuda_resize_storage(
                ctypes.c_void_p(self._cdata), ctypes.c_int64(int(size))
            )
        return self

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]


def _install_generators(devices: int) -> None:
    _device.fake_cuda_return_default_generator(True)
    torch.cuda.default_generators = tuple(
        torch.Generator(device=f"cuda:{index}") for index in range(devices)
    )
    _device.fake_cuda_return_default_generator(False)
